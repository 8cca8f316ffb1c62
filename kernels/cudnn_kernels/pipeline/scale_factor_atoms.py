"""Block scale factors in atoms of 128 rows x 4 blocks; and views of matrices."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32

from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name

THREADS = 256
ROWS, BLOCKS = 128, 4  # of an atom


def matrix_view(tensor: cute.Tensor, columns: Any = None) -> cute.Tensor:
    """A row-major tensor as (rows, columns, 1), with its last dimensions flattened."""
    rows, step = tensor.shape[0], tensor.stride[0]
    columns = tensor.shape[1] if columns is None else columns
    return cute.make_tensor(tensor.iterator, cute.make_layout((rows, columns, 1), stride=(step, 1, step)))


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The transposed view of (rows, columns, ...)."""
    modes = [1, 0, *range(2, cute.rank(tensor))]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


class PackScaleFactors:
    """Packs scale factors (rows, blocks, 1), bytes, into atoms: a thread writes four of a row, 0 if out of bounds."""

    def launch(self, source: cute.Tensor, start: cute.Pointer, element: Any, stream: Any) -> cute.Tensor:
        """Launches the kernel. Returns the atoms of type ``element`` that it writes at ``start``."""
        atoms, groups = cute.ceil_div(source.shape[0], ROWS), cute.ceil_div(source.shape[1], BLOCKS)
        words = cute.make_layout((32, 4, atoms, groups), stride=(4, 1, groups * 128, 128))
        total = atoms * ROWS * groups
        self.kernel(source, cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), words), total).launch(
            grid=[cute.ceil_div(total, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )
        atom_row_stride = groups * 512
        layout = cute.make_layout(
            (32, 4, atoms, 4, groups, 1), stride=(16, 4, atom_row_stride, 1, 512, atom_row_stride * atoms)
        )
        return cute.make_tensor(cute.recast_ptr(start, dtype=element), layout)

    @cute.kernel
    def kernel(self, source: cute.Tensor, words: cute.Tensor, total: Int32) -> None:
        """Consecutive threads write consecutive groups of four blocks of a row."""
        thread, cta = thread_block_idx()
        index, groups = cta * THREADS + thread, words.shape[3]
        if index < total:
            row, group = index // groups, index % groups
            word = Uint32(0)
            for i in cutlass.range_constexpr(BLOCKS):
                word = word | self.scale_bits(source, row, group * BLOCKS + i) << (8 * i)
            words[row % 32, row // 32 % 4, row // ROWS, group] = word

    set_kernel_name(kernel, "cudnn_arrange_scales")

    @cute.jit
    def scale_bits(self, source: cute.Tensor, row: Int32, block: Int32) -> Uint32:
        """A scale factor's bits, 0 if out of bounds."""
        code = Uint32(0)
        if row < source.shape[0] and block < source.shape[1]:
            code = Uint32(Uint8(source[row, block, 0]))
        return code & 0xFF
