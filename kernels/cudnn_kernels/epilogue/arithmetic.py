"""Operations on values in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cudnn_kernels.epilogue.fragment import Fragment, pick
from cudnn_kernels.epilogue.operation import Operation, Sizes, Tile
from cudnn_kernels.types import DTYPES, fake

BLOCK = 32  # columns of one role, where gates and other columns take turns


class Scale(Operation):
    """One multiplication for each value."""

    def arguments(self, sizes: Sizes) -> tuple[Any, ...]:
        return (Float32(0.0),)

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x = values["x"].values
        x.store(x.load() * self.parameters[0])


class MultiplyColumn(Operation):
    """A thread loads the factors of its rows before the tile's products."""

    def arguments(self, sizes: Sizes) -> tuple[Any, ...]:
        return (fake("float32", (sizes.m, 1, sizes.l), None, align=4),)

    def begin(self, tile: Tile) -> None:
        (factors,) = self.parameters
        self.factors = [load_row(factors, self.row(tile, slot), tile.batch) for slot in range(self.plan.layout.slots)]

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x = values["x"]
        for slot, factor in enumerate(self.factors):
            for i in x.rows.order(x.width, slot):
                x.values[i] = x.values[i] * factor


class AddRow(Operation):
    """The group loads what the tile's columns need into shared memory before the tile's products."""

    def arguments(self, sizes: Sizes) -> tuple[Any, ...]:
        size = DTYPES[self.o.dtype].width // 8
        return (fake(self.o.dtype, (sizes.n, cute.sym_int()), 0, align=size),)

    def bytes(self) -> int:
        return self.plan.groups * self.columns() * 4 + 16

    def enter(self, parameters: Sequence[Any], smem: Any) -> None:
        super().enter(parameters, smem)
        layout = cute.make_layout((self.columns(), self.plan.groups))
        self.buffers = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def columns(self) -> int:
        """Columns of a tile."""
        return self.plan.parts * self.width

    def begin(self, tile: Tile) -> None:
        (row,) = self.parameters
        self.exists = [pick(self.row(tile, slot) < tile.m, 1.0, 0.0) for slot in range(self.plan.layout.slots)]
        for start in range(0, self.columns(), self.plan.threads):
            load_columns(row, tile, self.buffers, tile.thread + start, self.columns())

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x = values["x"]
        orders = [x.rows.order(self.width, slot) for slot in range(x.rows.slots)]
        for position, column in enumerate(zip(*orders, strict=True)):
            place = part * self.width + x.rows.column(tile.thread, position)
            value = self.buffers[place, tile.group]
            for i, exists in zip(column, self.exists, strict=True):
                x.values[i] = fma(value, exists, x.values[i])  # rows outside stay 0, for reductions


class Swiglu(Operation):
    """Gate and other lie 32 columns apart, in the same thread."""

    narrowing, count = 2, 0

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x, half = values["x"], self.width // 2
        y = Fragment(self.plan.fragment(Float32, half), half, x.rows)
        block = BLOCK // x.rows.neighbours  # values of a row in 32 columns
        for slot in range(x.rows.slots):
            wide, narrow = x.rows.order(self.width, slot), y.rows.order(half, slot)
            for position, target in enumerate(narrow):
                first = position // block * 2 * block + position % block
                gate, other = (x.values[wide[i]] for i in (first, first + block))
                if not self.o.gate_first:
                    gate, other = other, gate
                y.values[target] = other * silu(gate)
        values["x"] = y


class SquaredRelu(Operation):
    """max(x, 0)^2"""

    count = 0

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x = values["x"].values
        for i in range(cute.size(x)):
            y = relu(x[i])
            x[i] = y * y


class SquaredReluBackward(Operation):
    """Both results from one product: relu(x) c."""

    count = 0

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x, c = values["x"].values, values[self.o.gradient].values
        gradient = self.plan.fragment(Float32, self.width)
        for i in range(cute.size(x)):
            y = relu(x[i])
            product = y * c[i]
            gradient[i] = y * product
            x[i] = product + product
        values["prob_gradient"] = Fragment(gradient, self.width, self.plan.layout)


def relu(x: Float32) -> Float32:
    """max(x, 0), NaN for NaN."""
    return cute.arch.fmax(x, Float32(0.0), nan=True)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)), within 2 ulp of exp's and the reciprocal's approximations."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -math.log2(math.e), fastmath=True))


@cute.jit
def load_row(tensor: cute.Tensor, row: Int32, batch: Int32) -> Float32:
    """An element of a tensor (m, 1, l), 0 beyond the last row."""
    value = Float32(0.0)
    if row < tensor.shape[0]:
        value = tensor[row, 0, batch]
    return value


@cute.jit
def load_columns(row: cute.Tensor, tile: Tile, buffers: cute.Tensor, column: Int32, columns: int) -> None:
    """One thread: an element of a tensor (n, l) for a column of the tile, 0 beyond the last one, into shared memory."""
    if column < columns:
        value = Float32(0.0)
        if tile.column * columns + column < row.shape[0]:
            value = Float32(row[tile.column * columns + column, tile.expert])
        buffers[column, tile.group] = value
