"""Elementwise epilogue operations in registers: scaling, bias, gated and ReLU^2 activations and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cudnn_kernels.epilogue import Gate
from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.pipeline.fragment import Fragment, RowLayout, ValueSubset, indices, pick
from cudnn_kernels.pipeline.tma import concat_glu_row


class _Multiply(EpiOpImpl):
    """Multiplies each value by the multiplier of its row slot."""

    elementwise = True
    multipliers: list[Any]

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x = values[self.op.value]
        for slot, positions in indices(x, subset):
            for i in positions:
                x.values[i] = x.values[i] * self.multipliers[slot]


class ScaleImpl(_Multiply):
    """Multiplies by a scalar argument.

    If the arithmetic overlaps with the TMA store of the subtile before (``params.overlaps_stores``), all subtiles but
    the first read the multiplier from shared memory by a volatile load: nothing else keeps ptxas from hoisting the
    arithmetic of all subtiles above the first store.
    """

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        self.reloads = params.overlaps_stores and params.num_subtiles > 1

    def bytes(self) -> int:
        return 4 * self.params.num_warpgroups * self.reloads

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        if self.reloads:
            layout = cute.make_layout(self.params.num_warpgroups)
            self.multiplier_smem = smem.allocate_tensor(Float32, layout, byte_alignment=self.alignment)

    def begin_tile(self, tile: Tile) -> None:
        multiplier = self.multiplier(tile)
        self.multipliers = [multiplier] * self.params.layout.slots
        if self.reloads:
            store_per_warpgroup(self.multiplier_smem, tile, multiplier)

    def multiplier(self, tile: Tile) -> Float32:
        """The multiplier of a tile."""
        return self.parameters[0]

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, multiplier = values[self.op.value].values, self.multipliers[0]
        if self.reloads and subtile > 0:
            multiplier = load_volatile((self.multiplier_smem.iterator + tile.wg_idx).toint())
        x.store(x.load() * multiplier)  # a vector: Blackwell multiplies two values by one instruction


class MultiplyGroupImpl(ScaleImpl):
    """Multiplies by one value per group, loaded before the mainloop of the tile."""

    def multiplier(self, tile: Tile) -> Float32:
        value = Float32(self.parameters[0][tile.expert])
        return math.prod([value] * (self.op.power - 1), start=value)


class MultiplyColumnImpl(_Multiply):
    """Multiplies each row by a value that the thread loads before the mainloop of the tile."""

    def begin_tile(self, tile: Tile) -> None:
        (multiplier,) = self.parameters
        self.multipliers = [
            load_row(multiplier, self.row(tile, slot), tile) for slot in range(self.params.layout.slots)
        ]


class MultiplyBlocksImpl(EpiOpImpl):
    """Multiplies blocks of each row by values that the thread loads before the mainloop of the tile."""

    elementwise = True

    def begin_tile(self, tile: Tile) -> None:
        (scales,) = self.parameters
        rows = [self.row(tile, slot) for slot in range(self.params.layout.slots)]
        blocks = -(-self.params.num_subtiles * self.width // self.op.vector)  # of the tile
        first = tile.column * (self.params.num_subtiles * self.width) // self.op.vector
        self.multipliers = [[load_block(scales, row, first + block, tile) for row in rows] for block in range(blocks)]

    def begin_subtile(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        self.first = subtile * self.width

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x, lanes = values[self.op.value], self.params.layout.lanes_per_row
        for slot, chosen in indices(x, subset):
            positions = {i: position for position, i in enumerate(x.layout.order(x.width, slot))}
            for i in chosen:
                block = (self.first + positions[i] * lanes) // self.op.vector
                x.values[i] = x.values[i] * self.multipliers[block][slot]


class AddRowImpl(EpiOpImpl):
    """Adds a row vector (bias), which the warpgroup loads to shared memory before the mainloop of the tile."""

    writes_smem_in_begin = True

    def bytes(self) -> int:
        return self.params.num_warpgroups * self.columns() * 4 + 16

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        layout = cute.make_layout((self.columns(), self.params.num_warpgroups))
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
            load_column(row, tile, self.buffers, tile.thread + start, self.columns(), self.op.concat_glu)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values["x"]
        orders = [x.layout.order(self.width, slot) for slot in range(x.layout.slots)]
        for position, column in enumerate(zip(*orders, strict=True)):
            value = self.buffers[self.tile_column(subtile, x.layout.column(tile.thread, position)), tile.wg_idx]
            for i, multiplier in zip(column, self.multipliers, strict=True):
                x.values[i] = fma(value, multiplier, x.values[i])  # out-of-bounds rows stay 0, for reductions


class GatedImpl(EpiOpImpl):
    """Gated activation. A gate column and its up column are 32 columns apart, so that one thread holds both."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, half = values["x"], self.width // 2
        y = Fragment(self.params.fragment(Float32, half), half, x.layout)
        activation = Activation(self.op.gate, self.parameters)
        for gate, up, target in gate_up_indices(x.layout, half, self.op.gate_first):
            y.values[target] = activation(x.values[gate], x.values[up])
        values["x"] = y


class GatedBackwardImpl(EpiOpImpl):
    """Backward pass of a gated activation. The thread that holds a gradient of y also holds its gate and up values."""

    elementwise = True

    def begin_subtile(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        rows = self.params.layout
        self.outputs = {
            name: Fragment.empty(width, rows)
            for name, width in (("x", 2 * self.width), ("activation", self.width), ("prob_gradient", self.width))
        }

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x, saved = values["x"], values[self.op.saved]
        dx, y, prob_gradient = self.outputs.values()
        activation = Activation(self.op.gate, self.parameters)
        by_slot_of_saved, by_slot_of_x = (indices(fragment, subset) for fragment in (saved, x))
        for (_, saved_indices), (_, indices_of_x) in zip(by_slot_of_saved, by_slot_of_x, strict=True):
            first, second = saved_indices[: len(indices_of_x)], saved_indices[len(indices_of_x) :]
            gates, ups = (first, second) if self.op.gate_first else (second, first)
            for gate, up, i in zip(gates, ups, indices_of_x, strict=True):
                y.values[i], d_gate, d_up = activation.derivatives(saved.values[gate], saved.values[up])
                prob_gradient.values[i] = x.values[i] * y.values[i]
                dx.values[gate] = x.values[i] * d_gate
                dx.values[up] = x.values[i] * d_up
        values |= self.outputs


def gate_up_indices(layout: RowLayout, width: int, gate_first: bool) -> Iterator[tuple[int, int, int]]:
    """Register indices of gate, up and result, for a result of ``width`` columns."""
    block = GLU_BLOCK // layout.lanes_per_row  # values of a row in 32 columns
    for slot in range(layout.slots):
        input_order = layout.order(2 * width, slot)
        for position, target in enumerate(layout.order(width, slot)):
            first = position // block * 2 * block + position % block
            gate, up = (input_order[first + (block if second else 0)] for second in (not gate_first, gate_first))
            yield gate, up, target


class Activation:
    """Computes a gated activation, see :class:`cudnn_kernels.epilogue.Gate`; ``parameters`` are its float arguments."""

    def __init__(self, gate: Gate, parameters: Sequence[Any]) -> None:
        self.gate = gate.bind(dict(zip((slot.name for slot in gate.slots()), parameters, strict=True)))

    def clamped(self, gate: Float32, up: Float32) -> tuple[Float32, Float32]:
        """The clamped g, and the clamped u plus the offset."""
        p = self.gate
        if p.clamp_max is not None:
            gate, up = (minimum(x, p.clamp_max) for x in (gate, up))
        if p.gate_min is not None:
            gate = maximum(gate, p.gate_min)
        if p.clamp_min is not None:
            up = maximum(up, p.clamp_min)
        if not (isinstance(p.offset, float) and p.offset == 0.0):
            up = up + p.offset
        return gate, up

    def bounded(self, gate: Float32, up: Float32) -> tuple[Float32, Float32, Float32]:
        """For ``situ``: the hyperbolic tangents of g / beta1 and of u / beta2, and the sigmoid of g."""
        betas = (self.gate.beta1, self.gate.beta2)
        inverses = [1.0 / x if isinstance(x, float) else cute.arch.rcp_approx(x) for x in betas]
        tanh_gate, tanh_up = (tanh(x * scale) for x, scale in zip((gate, up), inverses, strict=True))
        return tanh_gate, tanh_up, cute.arch.rcp_approx(1.0 + exponential(gate, 1.0))

    def __call__(self, gate: Float32, up: Float32) -> Float32:
        p = self.gate
        if p.activation == "situ":
            tanh_gate, tanh_up, sigmoid = self.bounded(gate, up)
            return (p.beta2 * tanh_up) * (p.beta1 * tanh_gate * sigmoid)
        gate, up = self.clamped(gate, up)
        return up * (relu(gate) if p.activation == "relu" else swish(gate, p.slope))

    def derivatives(self, gate: Float32, up: Float32) -> tuple[Float32, Float32, Float32]:
        """y, and its derivatives with respect to gate and up; NaN if gate or up is NaN."""
        p = self.gate
        if p.activation == "situ":
            tanh_gate, tanh_up, sigmoid = self.bounded(gate, up)
            f, h = p.beta1 * tanh_gate * sigmoid, p.beta2 * tanh_up
            d_gate = h * sigmoid * ((1.0 - tanh_gate * tanh_gate) + p.beta1 * tanh_gate * (1.0 - sigmoid))
            return h * f, d_gate, f * (1.0 - tanh_up * tanh_up)
        g, u = self.clamped(gate, up)
        if p.activation == "relu":
            d_up = relu(g)
            d_gate = pick(g <= 0.0, 0.0, u)
        else:
            sigmoid = cute.arch.rcp_approx(1.0 + exponential(g, p.slope))
            d_up = g * sigmoid
            d_gate = u * (sigmoid * p.slope * (g - d_up) + sigmoid)
        y = u * d_up
        if p.clamp_max is not None:
            d_gate, d_up = (pick(x > p.clamp_max, 0.0, d) for x, d in ((gate, d_gate), (up, d_up)))
        if p.clamp_min is not None:
            d_up = pick(up < p.clamp_min, 0.0, d_up)
        return y, d_gate, d_up


class RoundImpl(EpiOpImpl):
    """Rounds to a type and back to float32."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values[self.op.value].values
        x.store(x.load().to(DTYPES[self.op.dtype]).to(Float32))


class SquaredReluImpl(EpiOpImpl):
    """max(x, 0)^2"""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values["x"].values
        for i in range(cute.size(x)):
            y, _ = clamped_relu(x[i], self.op.clamp)
            x[i] = y * y


class SquaredReluBackwardImpl(EpiOpImpl):
    """Both results from one multiplication: relu(x) c, or x relu(c)."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, c = values["x"].values, values[self.op.gradient].values
        gradient = self.params.fragment(Float32, self.width)
        for i in range(cute.size(x)):
            rectified, other = (c[i], x[i]) if self.op.of_saved else (x[i], c[i])
            y, slope = clamped_relu(rectified, self.op.clamp)
            product = y * other
            gradient[i] = y * product
            x[i] = product + product if slope is None else (product + product) * slope
            if self.op.of_saved:
                c[i] = y * y
        values["prob_gradient"] = Fragment(gradient, self.width, self.params.layout)
        if self.op.of_saved:
            values["activation"] = values.pop(self.op.gradient)


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
def store_per_warpgroup(smem: cute.Tensor, tile: Tile, value: Float32) -> None:
    """Thread 0 of a warpgroup stores the warpgroup's value to shared memory."""
    if tile.thread == 0:
        smem[tile.wg_idx] = value


def load_volatile(address: Int32) -> Float32:
    """A volatile load from shared memory, which ptxas cannot hoist."""
    cute.arch.sync_warp()
    return cute.arch.inline_ptx(
        "ld.volatile.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


@cute.jit
def load_row(tensor: cute.Tensor, row: Int32, tile: Tile) -> Float32:
    """An element of a tensor (m, 1, l), 0 if the row is out of bounds."""
    value = Float32(0.0)
    if row < tile.end:
        value = Float32(tensor[row, 0, tile.batch])
    return value


@cute.jit
def load_block(tensor: cute.Tensor, row: Int32, block: Int32, tile: Tile) -> Float32:
    """An element of a tensor (m, blocks, l), 0 if it is out of bounds."""
    value = Float32(0.0)
    if (row < tile.end) & (block < tensor.shape[1]):
        value = Float32(tensor[row, block, tile.batch])
    return value


@cute.jit
def load_column(
    row: cute.Tensor, tile: Tile, buffers: cute.Tensor, column: Int32, columns: int, concat_glu: bool
) -> None:
    """One thread: loads an element of (n, l) for a column of the tile, 0 if out of bounds, to shared memory."""
    if column < columns:
        value = Float32(0.0)
        if tile.column * columns + column < row.shape[0]:
            column_index = tile.column * columns + column
            if const_expr(concat_glu):
                column_index = concat_glu_row(column_index, row.shape[0], GLU_BLOCK)
            value = Float32(row[column_index, tile.expert])
        buffers[column, tile.wg_idx] = value
