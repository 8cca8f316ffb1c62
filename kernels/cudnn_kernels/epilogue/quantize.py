"""Quantization in the epilogue: block scale factors (amax of a row or column block) in the layout of 128 x 4 atoms.

Hopper has no conversion to or from e8m0, so that is integer arithmetic on float32's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32, select_

from cudnn_kernels.epilogue.arithmetic import fma, maximum, minimum
from cudnn_kernels.epilogue.fragment import Fragment, gather, reduce_scatter
from cudnn_kernels.epilogue.hadamard import row_step
from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile
from cudnn_kernels.epilogue.reductions import ColumnBlocks
from cudnn_kernels.epilogue.tiles import e2m1
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import FORMATS, FP4

TOKENS = 32  # rows of a column that share a scale factor
LARGEST = 3.40282346638528859812e38  # float32
LEAST_NORMAL = 2.0**-126  # float32
HALF_LEAST = 1 << 22  # bits of 2^-127, the only subnormal float32 among the values of e8m0


class _Quantizer(EpiOpImpl):
    """Computes and writes scale factors; one thread computes each."""

    reduces = True

    def begin_tile(self, tile: Tile) -> None:
        norm = self.parameters[1] if self.o.norm_const else 1.0
        self.norm = norm[0] if self.o.norm_const and not self.o.by_value else norm

    def factor(self, largest: Float32) -> tuple[Any, Float32]:
        """The scale factor for an amax, as its bits or itself, and the multiplier of the block's values."""
        return compute_block_scale(largest, self.o.dtype, self.o.scale_dtype, self.norm, self.o.power_of_two)

    def write(self, row: Int32, group: Int32, batch: Int32, code: Any, in_bounds: Any = True) -> None:
        """Writes the scale factor of a row and a block of its columns, if it is in bounds."""
        scales = self.parameters[0]
        if self.o.atoms and self.o.scale_dtype != "float32":
            write_atom_scale(scales, row, group, batch, code, in_bounds)
        else:
            write_matrix_scale(scales, (row, group, batch), code, in_bounds)


class QuantizeRows(_Quantizer):
    """Lanes that share a row reduce-scatter the amax of its blocks, so that each computes some scale factors."""

    def vectors(self, x: Fragment) -> list[Sequence[int]]:
        """The register indices of a thread's values of each block, or of the subtile's part of it."""
        count = min(self.o.vector, self.width) // x.rows.neighbours
        orders = (x.rows.order(self.width, slot) for slot in range(x.rows.slots))
        return [order[first : first + count] for order in orders for first in range(0, len(order), count)]

    def magnitudes(self, x: Fragment) -> list[Float32]:
        """The amax of each."""
        return [magnitude(x.values[i] for i in vector) for vector in self.vectors(x)]

    def measure(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        magnitudes = self.magnitudes(values[self.o.value])
        first = subtile % self.params.passes == 0
        self.largest = magnitudes if first else [maximum(a, b) for a, b in zip(self.largest, magnitudes, strict=True)]

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values[self.o.value]
        if self.params.passes == 1:
            self.multipliers = self.compute_scales(tile, subtile, self.magnitudes(x))
        elif subtile % self.params.passes == 0:
            self.multipliers = self.compute_scales(tile, subtile, self.largest)
        for vector, factor in zip(self.vectors(x), self.multipliers, strict=True):
            for i in vector:
                x.values[i] = x.values[i] * factor

    def compute_scales(self, tile: Tile, subtile: int, largest: list[Float32]) -> list[Float32]:
        """Writes the scale factors of a thread's blocks that begin in the subtile; returns the multipliers of their
        values.
        """
        layout = self.params.layout
        own_maxima, first = reduce_scatter(largest, maximum, 1, layout.neighbours)
        scales = []
        blocks = max(1, self.width // self.o.vector)
        for i, value in enumerate(own_maxima):
            code, factor = self.factor(value)
            scales.append(factor)
            slot, block = (first + i) // blocks, (first + i) % blocks
            group = self.column(tile, subtile, block * self.o.vector) // self.o.vector
            row = self.row(tile, slot)
            self.write(row, group, tile.batch, code, row < tile.end if self.params.ragged_m else True)
        return gather(scales, len(largest), 1, layout.neighbours)


class QuantizeColumns(_Quantizer):
    """Warps reduce their rows to shared memory; one thread per column computes the scale factors from the maxima."""

    observes = True

    def __init__(self, declaration: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(declaration, params, width)
        self.blockwise = ColumnBlocks(params, width, TOKENS, maximum)
        self.words = params.rows // TOKENS * width  # scale factors of a group of threads

    def bytes(self) -> int:
        return self.blockwise.bytes() + self.params.groups * self.words * 4 + 16

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        self.blockwise.setup_smem(smem)
        layout = cute.make_layout((self.width, self.params.rows // TOKENS, self.params.groups))
        self.multipliers = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, layout = values[self.o.source], self.params.layout
        maxima, scales = self.blockwise.gather(tile, x, magnitude), self.multipliers[None, None, tile.group]
        for start in range(0, self.words, self.params.threads):
            self.convert(tile, subtile, tile.thread + start, maxima, scales)
        tile.barrier()
        y = self.params.fragment(Float32, self.width)
        for slot in range(layout.slots):
            group = layout.row(tile.thread, slot) // TOKENS
            for position, i in enumerate(x.rows.order(self.width, slot)):
                y[i] = x.values[i] * scales[layout.column(tile.thread, position), group]
        values[self.o.value] = Fragment(y, self.width, layout)

    @cute.jit
    def convert(self, tile: Tile, subtile: int, index: Int32, maxima: cute.Tensor, scales: cute.Tensor) -> None:
        """One thread: :meth:`convert_one` for the block with an index, if it exists."""
        if index < self.words:
            self.convert_one(tile, subtile, index % self.width, index // self.width, maxima, scales)

    def convert_one(
        self, tile: Tile, subtile: int, column: Int32, group: Int32, maxima: cute.Tensor, scales: cute.Tensor
    ) -> None:
        """Computes and writes the scale factor of a column of the subtile and a block of its rows."""
        code, scales[column, group] = self.factor(self.blockwise.result(maxima, column, group))
        in_bounds = tile.row + group * TOKENS < tile.end if self.params.ragged_m else True
        position = self.column(tile, subtile, column), tile.row // TOKENS + group
        if self.o.by_expert:
            write_expert_scale(self.parameters[0], *position, tile, code, in_bounds)
        else:
            self.write(*position, tile.batch, code, in_bounds)


class StoreColumns(EpiOpImpl):
    """The lanes that hold the 16 rows of a column reduce their amax and pack their bits; one lane stores."""

    reduces = True

    def begin_tile(self, tile: Tile) -> None:
        _, _, self.norm = self.parameters
        self.inverse = reciprocal(self.norm)
        self.columns = tile.n * self.width // self.params.width
        self.count = tile.end - tile.start

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, layout = values[self.o.value], self.params.layout
        orders = [x.rows.order(self.width, slot) for slot in range(layout.slots)]
        steps = [row_step(layout, step) for step in (1, 2, 4, 8)]
        lanes, stack = [lanes for lanes, _ in steps if lanes], 1 + max(slots for _, slots in steps)
        for first in range(0, layout.slots, stack):
            slots = range(first, first + stack)
            rows = [layout.row(tile.thread, slot) for slot in slots]
            for position in range(len(orders[first])):
                column = [x.values[orders[slot][position]] for slot in slots]
                largest = magnitude(column)
                for distance in lanes:
                    largest = maximum(largest, cute.arch.shuffle_sync_bfly(largest, distance))
                code, _ = compute_block_scale(largest, FP4, "float8_e4m3fn", self.norm)
                factor = reciprocal(from_e4m3(code) * self.inverse)
                words = [Int32(0), Int32(0)]  # of rows 0 to 7, and 8 to 15
                for value, row in zip(column, rows, strict=True):
                    bits, upper = e2m1(value * factor) << (row % 8 * 4), row // 8 % 2
                    words = [word | Int32(select_(upper == i, bits, Int32(0))) for i, word in enumerate(words)]
                for distance in lanes:
                    words = [word | cute.arch.shuffle_sync_bfly(word, distance) for word in words]
                position = self.column(tile, subtile, layout.column(tile.thread, position))
                self.write(tile, tile.row + rows[0] - tile.start, position, words, code, rows[0] % 16 == 0)

    @cute.jit
    def write(self, tile: Tile, row: Int32, column: Int32, words: list, code: Int32, first: cutlass.Boolean) -> None:
        """One lane of those that hold 16 rows: stores their elements and scale factor."""
        data, scales, _ = self.parameters
        if first and row < self.count and column < self.columns:
            element = Int64(self.columns) * tile.start + Int64(column) * self.count + row
            pair = cute.make_rmem_tensor(2, Int32)
            pair[0], pair[1] = words[0], words[1]
            target = cute.recast_ptr((data.iterator + element // 2).align(8), dtype=Int32)
            cute.make_tensor(target, cute.make_layout(2)).store(pair.load())
            position = (column % 32 * 4 + column // 32 % 4) * (self.columns // 128) + column // 128
            position = (position * 4 + row // 16 % 4) * (self.count // 64) + row // 64
            first_factor = cute.recast_ptr(scales.iterator, dtype=Uint8) + Int64(self.columns // 16) * tile.start
            cute.arch.store(first_factor + position, Uint8(code))


def magnitude(values: Any) -> Float32:
    """The largest magnitude; NaN if a value is NaN."""
    return functools.reduce(maximum, map(cute.math.absf, values))


def compute_block_scale(
    amax: Float32, dtype: str, scale_dtype: str, norm: Any = 1.0, power_of_two: bool = False
) -> tuple[Any, Float32]:
    """The scale factor of a block, its bits or itself, and the multiplier that quantizes the block's values.

        scale = round(amax / limit * norm),  multiplier = min(norm / scale, largest float32),  0 where scale is 0

    for blocks of ``dtype``, whose ``limit`` is :data:`FORMATS`'s. A finite amax gives a finite scale and multiplier:

    ============  =======================  ===============================  ===================
    amax          float8_e8m0fnu           float8_e4m3fn                    float32
    ============  =======================  ===============================  ===================
    0             2^-127                   0, multiplier 0                  0, multiplier 0
    tiny          at least 2^-127          the nearest, may be 0            at least 2^-126 max(norm, 1)
    huge          at most 2^127            at most 448                      at most the largest float32, or power of two
    infinity      2^127                    NaN                              infinity, multiplier 0
    NaN           NaN                      NaN                              NaN
    ============  =======================  ===============================  ===================

    A block with an infinity or a NaN dequantizes to infinity or NaN where it has one: 2^127 times the limit is more
    than float32 holds, and 0 times infinity is NaN. A float32 scale is a normal number, so that its reciprocal is
    finite, and so that arithmetic which flushes subnormal numbers does not lose it.
    """
    factor = amax * (1 / FORMATS[dtype].block_limit) * norm
    if scale_dtype == "float32":
        least, most = maximum(Float32(norm), 1.0) * LEAST_NORMAL, 2.0**127 if power_of_two else LARGEST
        bounded = maximum(minimum(factor, most), least)
        factor = Float32(select_((amax > 0.0) & (amax <= LARGEST), bounded, amax))
    elif scale_dtype == "float8_e4m3fn":
        factor = Float32(select_(amax > LARGEST, Float32(float("nan")), factor))
    code, inverse = SCALE_ROUNDING[scale_dtype](next_power_of_two(factor) if power_of_two else factor)
    return code, minimum(norm * inverse, LARGEST)


def e8m0(factor: Float32) -> tuple[Int32, Float32]:
    """The next power of two of 2^-127 to 2^127, as e8m0's bits and inverted. NaN for NaN."""
    bits = factor.bitcast(Int32)
    code = cutlass.min((bits + ((1 << 23) - 1)) >> 23, 254)  # rounds up; infinity becomes 2^127
    code = Int32(select_(bits <= HALF_LEAST, Int32(0), code))
    inverse = cutlass.max((254 - code) << 23, HALF_LEAST).bitcast(Float32)
    nan = factor != factor
    return Int32(select_(nan, Int32(255), code)), Float32(select_(nan, factor, inverse))


def next_power_of_two(factor: Float32) -> Float32:
    """Rounds up to a power of two that is a normal float32, or infinity; 0, infinity and NaN are unchanged."""
    power = ((factor.bitcast(Int32) + 0x7FFFFF) & 0x7F800000).bitcast(Float32)
    return Float32(select_(factor <= LARGEST, power, factor))


def e4m3(factor: Float32) -> tuple[Int32, Float32]:
    """Rounds to e4m3, at most 448: its bits, and the correctly rounded inverse, 0 for 0."""
    pair = cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint16],
        read_only_args=[Float32(0.0), factor],
    )
    rounded = from_e4m3(pair)
    inverse = cute.arch.rcp_approx(rounded)
    # One Newton step: the error of 1 ulp becomes 2^-46, less than the distance of these quotients from a midpoint.
    inverse = fma(inverse, fma(-rounded, inverse, Float32(1.0)), inverse)
    return Int32(pair), Float32(select_(rounded == 0.0, Float32(0.0), inverse))


def from_e4m3(code: Any) -> Float32:
    """The value of an e4m3's bits."""
    fp16_pair = cute.arch.inline_ptx(
        "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[Uint16(code)]
    )
    return Float32(Uint16(fp16_pair & 0xFFFF).bitcast(DTYPES["float16"]))


def unrounded(factor: Float32) -> tuple[Float32, Float32]:
    """The factor itself, and its reciprocal."""
    return factor, reciprocal(factor)


def reciprocal(x: Float32) -> Float32:
    """1 / x: correctly rounded, at most the largest float32, and 0 for 0."""
    inverse = cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])
    return Float32(select_(x == 0.0, Float32(0.0), minimum(inverse, LARGEST)))


SCALE_ROUNDING: dict[str, Callable[[Float32], tuple[Any, Float32]]] = {
    "float8_e8m0fnu": e8m0,
    "float8_e4m3fn": e4m3,
    "float32": unrounded,
}


@cute.jit
def write_atom_scale(scales: cute.Tensor, row: Int32, group: Int32, batch: Int32, code: Int32, in_bounds: Any) -> None:
    """Writes the scale factor of a row and a block of its columns to its 128 x 4 atom, if it is in bounds."""
    # Shifts and masks: the compiler does not know that the indices are not negative, and would emit floor division.
    if in_bounds and row >> 7 < scales.shape[2] and group >> 2 < scales.shape[4]:
        position = (row & 31, row >> 5 & 3, row >> 7, group & 3, group >> 2, batch)
        address = cute.recast_ptr(scales.iterator, dtype=Uint8) + cute.crd2idx(position, scales.layout)
        cute.arch.store(address, Uint8(code))


@cute.jit
def write_expert_scale(
    scales: cute.Tensor, column: Int32, group: Int32, tile: Tile, code: Int32, in_bounds: Any
) -> None:
    """The same for a column and 32 of its rows, if each expert has separate atoms, one expert after the other."""
    columns = scales.shape[2]
    if in_bounds and column >> 7 < columns:
        first = tile.start >> 7
        atoms = (tile.end + 127 >> 7) - first
        atom = first * columns + (column >> 7) * atoms + (group >> 2) - first
        position = (atom << 9) + ((column & 31) << 4) + ((column >> 5 & 3) << 2) + (group & 3)
        cute.arch.store(cute.recast_ptr(scales.iterator, dtype=Uint8) + position, Uint8(code))


@cute.jit
def write_matrix_scale(scales: cute.Tensor, position: tuple[Int32, Int32, Int32], code: Any, in_bounds: Any) -> None:
    """Writes the scale factor of a row and a block of its columns to a matrix, if it is in bounds."""
    if in_bounds and position[0] < scales.shape[0] and position[1] < scales.shape[1]:
        scales[position] = scales.element_type(code)
