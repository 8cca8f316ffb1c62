"""A matrix of 8 bits transposed from shared memory to shared memory, since wgmma takes such an operand K-major only."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

ROWS, COLUMNS = 16, 32  # of what a warp transposes at a time


@cute.jit
def turn_bytes(source: cute.Tensor, target: cute.Tensor, number: Int32, warps: int) -> None:
    """Transposes the part of a warp, of so many: of each 16 rows of the source, the order is 0, 1, 8, 9, 2, 3, 10, ...

    So the two pairs of columns of a word of an accumulator, rounded to 8 bits, are a word of the other operand.

    A matrix of 8 x 8 pairs of bytes is transposed as it is loaded. A thread then has two rows of a pair of columns, and
    of another matrix the rows 8 further on: four rows of each column are a word. The upper half of a warp has the odd
    column's first, so that the 8 rows of a matrix to be stored, two apart, lie in different banks.
    """
    lane = cute.arch.lane_idx()
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), source.element_type)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), source.element_type)
    half = lane // 16
    selectors = 0x6420 + 0x1111 * half, 0x7531 - 0x1111 * half
    column = lane // 16 * 16 + lane % 8 * 2 + (lane // 4 + lane // 8) % 2  # whose word is stored
    for group in cutlass.range(number, cute.size(source, mode=[0]) // ROWS, warps, unroll=1):
        for part in cutlass.range_constexpr(cute.size(source, mode=[1]) // COLUMNS):
            loaded, stored = (cute.make_rmem_tensor(((16, 1), 1), source.element_type) for _ in range(2))
            old, new = (cute.recast_tensor(x, Int32) for x in (loaded, stored))
            cute.copy(load, row_of(source, ROWS * group + lane % ROWS, 2 * part + half), loaded)
            for i in cutlass.range_constexpr(4):
                new[i] = cute.arch.prmt(old[i // 2 * 2], old[i // 2 * 2 + 1], selectors[i % 2])
            cute.copy(store, stored, row_of(target, COLUMNS * part + column, group))


def row_of(tensor: cute.Tensor, row: Int32, chunk: Int32) -> cute.Tensor:
    """16 bytes of a row."""
    pointer = cute.local_tile(tensor, (1, 16), (row, chunk)).iterator
    return cute.make_tensor(pointer, cute.make_layout(((16, 1), 1)))
