"""Tensors as kernels want them: views, and scale factors put into atoms."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, Uint32

from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name

THREADS = 256
ROWS, BLOCKS = 128, 4  # of an atom


def matrix(tensor: cute.Tensor, columns: Any = None) -> cute.Tensor:
    """A row-major tensor as (rows, columns, 1), its last dimensions taken together."""
    rows, step = tensor.shape[0], tensor.stride[0]
    columns = tensor.shape[1] if columns is None else columns
    return cute.make_tensor(tensor.iterator, cute.make_layout((rows, columns, 1), stride=(step, 1, step)))


def turned(tensor: cute.Tensor) -> cute.Tensor:
    """The transpose of a matrix (rows, columns, ..), or of several."""
    modes = [1, 0, *range(2, cute.rank(tensor))]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))


class ArrangeScales:
    """Scale factors (rows, blocks, 1), as bytes, in atoms of 128 x 4: a thread writes four of a row, 0 for none."""

    def launch(self, source: cute.Tensor, start: cute.Pointer, element: Any, stream: Any) -> cute.Tensor:
        """Launches the kernel. The atoms, as factors of the type ``element``, that it writes at ``start``."""
        atoms, groups = cute.ceil_div(source.shape[0], ROWS), cute.ceil_div(source.shape[1], BLOCKS)
        words = cute.make_layout((32, 4, atoms, groups), stride=(4, 1, groups * 128, 128))
        total = atoms * ROWS * groups
        self.kernel(source, cute.make_tensor(cute.recast_ptr(start, dtype=Uint32), words), total).launch(
            grid=[cute.ceil_div(total, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )
        far = groups * 512
        layout = cute.make_layout((32, 4, atoms, 4, groups, 1), stride=(16, 4, far, 1, 512, far * atoms))
        return cute.make_tensor(cute.recast_ptr(start, dtype=element), layout)

    @cute.kernel
    def kernel(self, source: cute.Tensor, words: cute.Tensor, total: Int32) -> None:
        """Neighbouring threads have neighbouring groups of a row."""
        thread, cta = here()
        index, groups = cta * THREADS + thread, words.shape[3]
        if index < total:
            row, group = index // groups, index % groups
            word = Uint32(0)
            for i in cutlass.range_constexpr(BLOCKS):
                word = word | self.factor(source, row, group * BLOCKS + i) << (8 * i)
            words[row % 32, row // 32 % 4, row // ROWS, group] = word

    name(kernel, "cudnn_arrange_scales")

    @cute.jit
    def factor(self, source: cute.Tensor, row: Int32, block: Int32) -> Uint32:
        """A factor's bits, 0 where there is none."""
        code = Uint32(0)
        if row < source.shape[0] and block < source.shape[1]:
            code = Uint32(Uint8(source[row, block, 0]))
        return code & 0xFF
