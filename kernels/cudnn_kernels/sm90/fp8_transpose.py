"""In-kernel transpose of fp8 V, from shared to shared memory, since wgmma takes 8-bit operands K-major only."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

ROWS, COLUMNS = 16, 32  # tile of a warp


@cute.jit
def transpose_fp8(source: cute.Tensor, target: cute.Tensor, warp_idx: Int32, num_warps: int) -> None:
    """Transposes a warp's share of ``source``. Of each 16 rows, the target's order is 0, 1, 8, 9, 2, 3, 10, 11, ...

    With this order, the two pairs of columns in a word of an fp8-converted accumulator (P) are a word of the A operand.

    ldmatrix.trans transposes 8 x 8 matrices of byte pairs: a thread gets two rows of a pair of columns, and from
    another matrix the rows 8 further on; prmt makes a word of four rows of one column. The upper half-warp stores the
    odd column first, so that the eight rows of a stmatrix, two apart, are in different banks.
    """
    lane = cute.arch.lane_idx()
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), source.element_type)
    store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), source.element_type)
    upper_half = lane // 16
    selectors = 0x6420 + 0x1111 * upper_half, 0x7531 - 0x1111 * upper_half
    store_row = lane // 16 * 16 + lane % 8 * 2 + (lane // 4 + lane // 8) % 2  # whose word is stored
    for row_block in cutlass.range(warp_idx, cute.size(source, mode=[0]) // ROWS, num_warps, unroll=1):
        for column_block in cutlass.range_constexpr(cute.size(source, mode=[1]) // COLUMNS):
            loaded, stored = (cute.make_rmem_tensor(((16, 1), 1), source.element_type) for _ in range(2))
            loaded_words, stored_words = (cute.recast_tensor(x, Int32) for x in (loaded, stored))
            cute.copy(load, row_chunk(source, ROWS * row_block + lane % ROWS, 2 * column_block + upper_half), loaded)
            for i in cutlass.range_constexpr(4):
                stored_words[i] = cute.arch.prmt(
                    loaded_words[i // 2 * 2], loaded_words[i // 2 * 2 + 1], selectors[i % 2]
                )
            cute.copy(store, stored, row_chunk(target, COLUMNS * column_block + store_row, row_block))


def row_chunk(tensor: cute.Tensor, row: Int32, chunk: Int32) -> cute.Tensor:
    """16 bytes of a row."""
    pointer = cute.local_tile(tensor, (1, 16), (row, chunk)).iterator
    return cute.make_tensor(pointer, cute.make_layout(((16, 1), 1)))
