"""Elementwise epilogue operations in registers: scaling, bias, gated and ReLU^2 activations and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cudnn_kernels.epilogue import BLOCK, Gate
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout, ValueSubset, indices, pick
from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.pipeline.tma import concat_glu_row


class _Multiply(EpiOpImpl):
    """Multiplies each value by the multiplier of its row slot."""

    streams = True
    multipliers: list[Any]

    def step(self, tile: Tile, values: dict[str, Fragment], some: ValueSubset) -> None:
        x = values[self.o.value]
        for slot, positions in indices(x, some):
            for i in positions:
                x.values[i] = x.values[i] * self.multipliers[slot]


class Scale(_Multiply):
    """Multiplies by a scalar argument.

    With early computation, all subtiles but the first read it from shared memory. Nothing else keeps ptxas from
    hoisting a subtile's arithmetic above the store of the one before, and then nothing overlaps with the store.
    """

    def __init__(self, declaration: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(declaration, params, width)
        self.reads = params.early and params.num_subtiles > 1

    def bytes(self) -> int:
        return 4 * self.params.groups * self.reads

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        if self.reads:
            layout = cute.make_layout(self.params.groups)
            self.words = smem.allocate_tensor(Float32, layout, byte_alignment=self.alignment)

    def begin_tile(self, tile: Tile) -> None:
        factor = self.factor(tile)
        self.multipliers = [factor] * self.params.layout.slots
        if self.reads:
            put_word(self.words, tile, factor)

    def factor(self, tile: Tile) -> Float32:
        """The multiplier of a tile."""
        return self.parameters[0]

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, factor = values[self.o.value].values, self.multipliers[0]
        if self.reads and subtile > 0:
            factor = read_again((self.words.iterator + tile.group).toint())
        x.store(x.load() * factor)  # two by one instruction, on Blackwell


class MultiplyGroup(Scale):
    """Multiplies by one value per group, loaded before the mainloop of the tile."""

    def factor(self, tile: Tile) -> Float32:
        factor = Float32(self.parameters[0][tile.expert])
        return math.prod([factor] * (self.o.power - 1), start=factor)


class MultiplyColumn(_Multiply):
    """Multiplies each row by a value that the thread loads before the mainloop of the tile."""

    def begin_tile(self, tile: Tile) -> None:
        (multiplier,) = self.parameters
        self.multipliers = [
            load_row(multiplier, self.row(tile, slot), tile) for slot in range(self.params.layout.slots)
        ]


class AddRow(EpiOpImpl):
    """Adds a row vector (bias), which the group loads to shared memory before the mainloop of the tile."""

    publishes_in_begin = True

    def bytes(self) -> int:
        return self.params.groups * self.columns() * 4 + 16

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        layout = cute.make_layout((self.columns(), self.params.groups))
        self.buffers = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def columns(self) -> int:
        """Columns of the value in a tile."""
        return self.params.num_subtiles * self.width

    def begin_tile(self, tile: Tile) -> None:
        row, *multiplier = self.parameters
        rows = [self.row(tile, slot) for slot in range(self.params.layout.slots)]
        if multiplier:
            self.multipliers = [load_row(*multiplier, row_idx, tile) for row_idx in rows]
        else:
            self.multipliers = [pick(row_idx < tile.end, 1.0, 0.0) for row_idx in rows]
        for start in range(0, self.columns(), self.params.threads):
            load_columns(row, tile, self.buffers, tile.thread + start, self.columns(), self.o.concat_glu)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values["x"]
        orders = [x.rows.order(self.width, slot) for slot in range(x.rows.slots)]
        for position, column in enumerate(zip(*orders, strict=True)):
            value = self.buffers[self.tile_column(subtile, x.rows.column(tile.thread, position)), tile.group]
            for i, factor in zip(column, self.multipliers, strict=True):
                x.values[i] = fma(value, factor, x.values[i])  # out-of-bounds rows stay 0, for reductions


class Gated(EpiOpImpl):
    """Gate and up are 32 columns apart, in the same thread."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, half = values["x"], self.width // 2
        y = Fragment(self.params.fragment(Float32, half), half, x.rows)
        activation = Activation(self.o.gate, self.parameters)
        for gate, other, target in pairs(x.rows, half, self.o.gate_first):
            y.values[target] = activation(x.values[gate], x.values[other])
        values["x"] = y


class GatedBackward(EpiOpImpl):
    """Gate and up are 32 columns apart, in the thread that holds their gradient."""

    streams = True

    def start(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        rows = self.params.layout
        self.outputs = {
            name: Fragment(self.params.fragment(Float32, width), width, rows)
            for name, width in (("x", 2 * self.width), ("activation", self.width), ("prob_gradient", self.width))
        }

    def step(self, tile: Tile, values: dict[str, Fragment], some: ValueSubset) -> None:
        x, saved = values["x"], values[self.o.saved]
        wide, y, product = self.outputs.values()
        activation = Activation(self.o.gate, self.parameters)
        by_slot_of_saved, by_slot_of_x = (indices(y, some) for y in (saved, x))
        for (_, saved_indices), (_, indices_of_x) in zip(by_slot_of_saved, by_slot_of_x, strict=True):
            first, second = saved_indices[: len(indices_of_x)], saved_indices[len(indices_of_x) :]
            gates, ups = (first, second) if self.o.gate_first else (second, first)
            for gate, other, i in zip(gates, ups, indices_of_x, strict=True):
                y.values[i], by_gate, by_other = activation.derivatives(saved.values[gate], saved.values[other])
                product.values[i] = x.values[i] * y.values[i]
                wide.values[gate] = x.values[i] * by_gate
                wide.values[other] = x.values[i] * by_other
        values |= self.outputs


def pairs(rows: RowLayout, width: int, gate_first: bool) -> Iterator[tuple[int, int, int]]:
    """Register indices of gate, up and result, for a result of ``width`` columns."""
    block = BLOCK // rows.neighbours  # values of a row in 32 columns
    for slot in range(rows.slots):
        wide = rows.order(2 * width, slot)
        for position, target in enumerate(rows.order(width, slot)):
            first = position // block * 2 * block + position % block
            gate, other = (wide[first + (block if second else 0)] for second in (not gate_first, gate_first))
            yield gate, other, target


class Activation:
    """Computes a gated activation; ``parameters`` are its float arguments."""

    def __init__(self, gate: Gate, parameters: Sequence[Any]) -> None:
        self.o = gate.bind(dict(zip((slot.name for slot in gate.slots()), parameters, strict=True)))

    def clamped(self, gate: Float32, other: Float32) -> tuple[Float32, Float32]:
        """The clamped g, and the clamped u plus the offset."""
        o = self.o
        if o.clamp_max is not None:
            gate, other = (minimum(x, o.clamp_max) for x in (gate, other))
        if o.gate_min is not None:
            gate = maximum(gate, o.gate_min)
        if o.clamp_min is not None:
            other = maximum(other, o.clamp_min)
        if not (isinstance(o.offset, float) and o.offset == 0.0):
            other = other + o.offset
        return gate, other

    def bounded(self, gate: Float32, other: Float32) -> tuple[Float32, Float32, Float32]:
        """For ``situ``: the hyperbolic tangents of g / beta1 and of u / beta2, and the sigmoid of g."""
        betas = (self.o.beta1, self.o.beta2)
        inverses = [1.0 / x if isinstance(x, float) else cute.arch.rcp_approx(x) for x in betas]
        first, second = (tanh(x * scale) for x, scale in zip((gate, other), inverses, strict=True))
        return first, second, cute.arch.rcp_approx(1.0 + exponential(gate, 1.0))

    def __call__(self, gate: Float32, other: Float32) -> Float32:
        o = self.o
        if o.activation == "situ":
            first, second, sigmoid = self.bounded(gate, other)
            return (o.beta2 * second) * (o.beta1 * first * sigmoid)
        gate, other = self.clamped(gate, other)
        return other * (relu(gate) if o.activation == "relu" else swish(gate, o.slope))

    def derivatives(self, gate: Float32, other: Float32) -> tuple[Float32, Float32, Float32]:
        """y, and its derivatives with respect to gate and up; NaN if one of the two is."""
        o = self.o
        if o.activation == "situ":
            first, second, sigmoid = self.bounded(gate, other)
            f, h = o.beta1 * first * sigmoid, o.beta2 * second
            by_gate = h * sigmoid * ((1.0 - first * first) + o.beta1 * first * (1.0 - sigmoid))
            return h * f, by_gate, f * (1.0 - second * second)
        g, u = self.clamped(gate, other)
        if o.activation == "relu":
            by_other = relu(g)
            by_gate = pick(g <= 0.0, 0.0, u)
        else:
            sigmoid = cute.arch.rcp_approx(1.0 + exponential(g, o.slope))
            by_other = g * sigmoid
            by_gate = u * (sigmoid * o.slope * (g - by_other) + sigmoid)
        y = u * by_other
        if o.clamp_max is not None:
            by_gate, by_other = (pick(x > o.clamp_max, 0.0, d) for x, d in ((gate, by_gate), (other, by_other)))
        if o.clamp_min is not None:
            by_other = pick(other < o.clamp_min, 0.0, by_other)
        return y, by_gate, by_other


class Round(EpiOpImpl):
    """Rounds to a type and back to float32."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values[self.o.value].values
        x.store(x.load().to(DTYPES[self.o.dtype]).to(Float32))


class SquaredRelu(EpiOpImpl):
    """max(x, 0)^2"""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values["x"].values
        for i in range(cute.size(x)):
            y, _ = clamped_relu(x[i], self.o.clamp)
            x[i] = y * y


class SquaredReluBackward(EpiOpImpl):
    """Both results from one multiplication: relu(x) c, or x relu(c)."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, c = values["x"].values, values[self.o.gradient].values
        gradient = self.params.fragment(Float32, self.width)
        for i in range(cute.size(x)):
            rectified, other = (c[i], x[i]) if self.o.of_saved else (x[i], c[i])
            y, slope = clamped_relu(rectified, self.o.clamp)
            product = y * other
            gradient[i] = y * product
            x[i] = product + product if slope is None else (product + product) * slope
            if self.o.of_saved:
                c[i] = y * y
        values["prob_gradient"] = Fragment(gradient, self.width, self.params.layout)
        if self.o.of_saved:
            values["activation"] = values.pop(self.o.gradient)


def relu(x: Float32) -> Float32:
    """max(x, 0), NaN for NaN."""
    return cute.arch.fmax(x, Float32(0.0), nan=True)


def clamped_relu(x: Float32, clamp: float | None) -> tuple[Float32, Float32 | None]:
    """max(x, 0), NaN for NaN; or s tanh(max(x, 0) / s), 0 for NaN, and its derivative where x is positive."""
    if clamp is None:
        return relu(x), None
    t = tanh(cute.arch.fmax(x, Float32(0.0)) * (1.0 / clamp))
    return t * clamp, 1.0 - t * t


def tanh(x: Float32) -> Float32:
    """tanh(x), within a few ulp of the approximations: a series near 0, where 1 - 2 / (1 + exp(2 x)) loses digits."""
    square = x * x
    series = Float32(SERIES[-1])
    for coefficient in reversed(SERIES[:-1]):
        series = fma(series, square, Float32(coefficient))
    rest = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exponential(x, -2.0))
    return pick(square < 0.1, x * series, rest)


SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c, rounded once."""
    return cute.arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def swish(x: Float32, slope: Any = 1.0) -> Float32:
    """x / (1 + exp(-slope x)), within 2 ulp of exp's and the reciprocal's approximations."""
    return x * cute.arch.rcp_approx(1.0 + exponential(x, slope))


def exponential(x: Float32, slope: Any) -> Float32:
    """exp(-slope x), approximately."""
    return cute.math.exp2(x * (slope * -math.log2(math.e)), fastmath=True)


def minimum(a: Float32, b: Any) -> Float32:
    """The smaller one, NaN if one is."""
    return cute.arch.fmin(a, Float32(b), nan=True)


def maximum(a: Float32, b: Any) -> Float32:
    """The larger one, NaN if one is."""
    return cute.arch.fmax(a, Float32(b), nan=True)


@cute.jit
def put_word(words: cute.Tensor, tile: Tile, value: Float32) -> None:
    """Thread 0 of a group writes the group's word to shared memory."""
    if tile.thread == 0:
        words[tile.group] = value


def read_again(column_index: Int32) -> Float32:
    """A volatile load of a word of shared memory, which ptxas cannot move up."""
    cute.arch.sync_warp()
    return cute.arch.inline_ptx(
        "ld.volatile.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[column_index]
    )


@cute.jit
def load_row(tensor: cute.Tensor, row: Int32, tile: Tile) -> Float32:
    """An element of a tensor (m, 1, l), 0 if the row is out of bounds."""
    value = Float32(0.0)
    if row < tile.end:
        value = Float32(tensor[row, 0, tile.batch])
    return value


@cute.jit
def load_columns(
    row: cute.Tensor, tile: Tile, buffers: cute.Tensor, column: Int32, columns: int, concat_glu: bool
) -> None:
    """One thread: loads an element of (n, l) for a column of the tile, 0 if out of bounds, to shared memory."""
    if column < columns:
        value = Float32(0.0)
        if tile.column * columns + column < row.shape[0]:
            column_index = tile.column * columns + column
            if const_expr(concat_glu):
                column_index = concat_glu_row(column_index, row.shape[0], BLOCK)
            value = Float32(row[column_index, tile.expert])
        buffers[column, tile.group] = value
