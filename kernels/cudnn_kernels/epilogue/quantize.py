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
from cudnn_kernels.epilogue.hadamard import row_step
from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile
from cudnn_kernels.epilogue.reductions import ColumnBlocks
from cudnn_kernels.epilogue.tiles import e2m1
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import FORMATS, FP4
from cudnn_kernels.pipeline.fragment import Fragment, all_gather, reduce_scatter

ROWS_PER_SCALE = 32  # of a column, in QuantizeColumns
LARGEST = 3.40282346638528859812e38  # float32
LEAST_NORMAL = 2.0**-126  # float32
HALF_LEAST = 1 << 22  # bits of 2^-127, the only subnormal float32 among the values of e8m0


class _Quantizer(EpiOpImpl):
    """Computes and writes block scale factors; one thread computes each."""

    reduces = True

    def begin_tile(self, tile: Tile) -> None:
        norm = self.parameters[1] if self.op.norm_const else 1.0
        self.norm = norm[0] if self.op.norm_const and not self.op.by_value else norm

    def block_scale(self, amax: Float32) -> tuple[Any, Float32]:
        """The scale factor for a block's amax, as its bits or as float32, and the multiplier of the block's values."""
        return compute_block_scale(amax, self.op.dtype, self.op.scale_dtype, self.norm, self.op.power_of_two)

    def write(self, row: Int32, block: Int32, batch: Int32, code: Any, in_bounds: Any = True) -> None:
        """Writes the scale factor of a row and a block of its columns, if it is in bounds."""
        scales = self.parameters[0]
        if self.op.atoms and self.op.scale_dtype != "float32":
            write_atom_scale(scales, row, block, batch, code, in_bounds)
        else:
            write_matrix_scale(scales, (row, block, batch), code, in_bounds)


class QuantizeRowsImpl(_Quantizer):
    """The lanes that share a row reduce-scatter the amax of its blocks. Each lane computes the scale factors of some
    blocks and all-gathers the multipliers.
    """

    def block_indices(self, x: Fragment) -> list[Sequence[int]]:
        """The register indices of a thread's values of each block; of those in the subtile, if a block is wider."""
        count = min(self.op.vector, self.width) // x.layout.lanes_per_row
        orders = (x.layout.order(self.width, slot) for slot in range(x.layout.slots))
        return [order[first : first + count] for order in orders for first in range(0, len(order), count)]

    def local_amax(self, x: Fragment) -> list[Float32]:
        """The amax of a thread's values of each block."""
        return [magnitude(x.values[i] for i in block) for block in self.block_indices(x)]

    @property
    def source(self) -> str:
        """The value that is quantized."""
        return self.op.source or self.op.value

    @property
    def subtiles_per_block(self) -> int:
        """Consecutive subtiles that share a block, which the first of two passes reduces."""
        return max(1, self.op.vector // self.width) if self.params.subtiles_per_pass > 1 else 1

    def first_pass(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        if self.subtiles_per_block == 1:
            return
        amax, index = self.local_amax(values[self.source]), subtile % self.params.subtiles_per_pass
        if index == 0:
            self.amax = []  # of each block of the pass
        if index % self.subtiles_per_block == 0:
            self.amax.append(amax)
        else:
            self.amax[-1] = [maximum(a, b) for a, b in zip(self.amax[-1], amax, strict=True)]

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values[self.source]
        if self.subtiles_per_block == 1:
            self.multipliers = self.compute_scales(tile, subtile, self.local_amax(x))
        elif subtile % self.subtiles_per_block == 0:
            block = subtile % self.params.subtiles_per_pass // self.subtiles_per_block
            self.multipliers = self.compute_scales(tile, subtile, self.amax[block])
        result = self.params.fragment(Float32, self.width) if self.op.source else x.values
        for block, multiplier in zip(self.block_indices(x), self.multipliers, strict=True):
            for i in block:
                result[i] = x.values[i] * multiplier
        values[self.op.value] = Fragment(result, self.width, x.layout)

    def compute_scales(self, tile: Tile, subtile: int, local_amax: list[Float32]) -> list[Float32]:
        """Writes the scale factors of a thread's blocks that begin in the subtile; returns the multipliers of their
        values.
        """
        layout = self.params.layout
        block_amax, first = reduce_scatter(local_amax, maximum, 1, layout.lanes_per_row)
        multipliers = []
        blocks = max(1, self.width // self.op.vector)  # of a row, in the subtile
        for i, amax in enumerate(block_amax):
            code, multiplier = self.block_scale(amax)
            multipliers.append(multiplier)
            slot, block = (first + i) // blocks, (first + i) % blocks
            block_of_row = self.column(tile, subtile, block * self.op.vector) // self.op.vector
            row = self.row(tile, slot)
            self.write(row, block_of_row, tile.batch, code, row < tile.end if self.params.ragged_m else True)
        return all_gather(multipliers, len(local_amax), 1, layout.lanes_per_row)


class QuantizeColumnsImpl(_Quantizer):
    """Warps reduce their rows to shared memory; one thread per column computes the scale factors from the maxima."""

    read_only = True

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        self.blockwise = ColumnBlocks(params, width, ROWS_PER_SCALE, maximum)
        self.num_scales = params.rows // ROWS_PER_SCALE * width  # scale factors of a warpgroup's subtile

    def bytes(self) -> int:
        return self.blockwise.bytes() + self.params.num_warpgroups * self.num_scales * 4 + 16

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        self.blockwise.setup_smem(smem)
        layout = cute.make_layout((self.width, self.params.rows // ROWS_PER_SCALE, self.params.num_warpgroups))
        self.multipliers = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, layout = values[self.op.source], self.params.layout
        warp_amax = self.blockwise.reduce_warps(tile, x, magnitude)
        multipliers = self.multipliers[None, None, tile.wg_idx]
        for start in range(0, self.num_scales, self.params.threads):
            self.compute_scale_in_bounds(tile, subtile, tile.thread + start, warp_amax, multipliers)
        tile.barrier()
        y = self.params.fragment(Float32, self.width)
        for slot in range(layout.slots):
            block = layout.row(tile.thread, slot) // ROWS_PER_SCALE
            for position, i in enumerate(x.layout.order(self.width, slot)):
                y[i] = x.values[i] * multipliers[layout.column(tile.thread, position), block]
        values[self.op.value] = Fragment(y, self.width, layout)

    @cute.jit
    def compute_scale_in_bounds(
        self, tile: Tile, subtile: int, index: Int32, warp_amax: cute.Tensor, multipliers: cute.Tensor
    ) -> None:
        """One thread: :meth:`compute_scale` of the scale factor with an index, if there is one."""
        if index < self.num_scales:
            self.compute_scale(tile, subtile, index % self.width, index // self.width, warp_amax, multipliers)

    def compute_scale(
        self, tile: Tile, subtile: int, column: Int32, block: Int32, warp_amax: cute.Tensor, multipliers: cute.Tensor
    ) -> None:
        """One thread: computes and writes the scale factor of a column of the subtile and a block of its rows."""
        code, multipliers[column, block] = self.block_scale(self.blockwise.result(warp_amax, column, block))
        in_bounds = tile.row + block * ROWS_PER_SCALE < tile.end if self.params.ragged_m else True
        position = self.column(tile, subtile, column), tile.row // ROWS_PER_SCALE + block
        if self.op.by_expert:
            write_expert_scale(self.parameters[0], *position, tile, code, in_bounds)
        else:
            self.write(*position, tile.batch, code, in_bounds)


class StoreColumnsImpl(EpiOpImpl):
    """NVFP4 along m. The lanes that hold 16 rows of a column all-reduce their amax and the bits of their elements; one
    lane stores both the elements and the scale factor.
    """

    reduces = True

    def begin_tile(self, tile: Tile) -> None:
        _, _, self.norm = self.parameters
        self.inverse = reciprocal(self.norm)
        self.columns = tile.n * self.width // self.params.width
        self.expert_rows = tile.end - tile.start

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, layout = values[self.op.value], self.params.layout
        orders = [x.layout.order(self.width, slot) for slot in range(layout.slots)]
        steps = [row_step(layout, step) for step in (1, 2, 4, 8)]
        lane_distances = [lanes for lanes, _ in steps if lanes]
        slots_per_block = 1 + max(slots for _, slots in steps)  # row slots of a thread in a block of 16 rows
        for first in range(0, layout.slots, slots_per_block):
            slots = range(first, first + slots_per_block)
            rows = [layout.row(tile.thread, slot) for slot in slots]
            for position in range(len(orders[first])):
                column = [x.values[orders[slot][position]] for slot in slots]
                amax = magnitude(column)
                for distance in lane_distances:
                    amax = maximum(amax, cute.arch.shuffle_sync_bfly(amax, distance))
                code, _ = compute_block_scale(amax, FP4, "float8_e4m3fn", self.norm)
                multiplier = reciprocal(from_e4m3(code) * self.inverse)
                words = [Int32(0), Int32(0)]  # of rows 0 to 7, and 8 to 15
                for value, row in zip(column, rows, strict=True):
                    bits, upper = e2m1(value * multiplier) << (row % 8 * 4), row // 8 % 2
                    words = [word | Int32(select_(upper == i, bits, Int32(0))) for i, word in enumerate(words)]
                for distance in lane_distances:
                    words = [word | cute.arch.shuffle_sync_bfly(word, distance) for word in words]
                column_of_tensor = self.column(tile, subtile, layout.column(tile.thread, position))
                is_first_row = rows[0] % 16 == 0
                self.write(tile, tile.row + rows[0] - tile.start, column_of_tensor, words, code, is_first_row)

    @cute.jit
    def write(
        self, tile: Tile, row: Int32, column: Int32, words: list, code: Int32, is_first_row: cutlass.Boolean
    ) -> None:
        """The lane that holds the first of 16 rows: stores their elements and their scale factor."""
        data, scales, _ = self.parameters
        if is_first_row and row < self.expert_rows and column < self.columns:
            element = Int64(self.columns) * tile.start + Int64(column) * self.expert_rows + row
            pair = cute.make_rmem_tensor(2, Int32)
            pair[0], pair[1] = words[0], words[1]
            target = cute.recast_ptr((data.iterator + element // 2).align(8), dtype=Int32)
            cute.make_tensor(target, cute.make_layout(2)).store(pair.load())
            position = (column % 32 * 4 + column // 32 % 4) * (self.columns // 128) + column // 128
            position = (position * 4 + row // 16 % 4) * (self.expert_rows // 64) + row // 64
            expert_scales = cute.recast_ptr(scales.iterator, dtype=Uint8) + Int64(self.columns // 16) * tile.start
            cute.arch.store(expert_scales + position, Uint8(code))


def magnitude(values: Any) -> Float32:
    """The largest magnitude; NaN if a value is NaN."""
    return functools.reduce(maximum, map(cute.math.absf, values))


def compute_block_scale(
    amax: Float32, dtype: str, scale_dtype: str, norm: Any = 1.0, power_of_two: bool = False
) -> tuple[Any, Float32]:
    """The scale factor of a block, as its bits or as float32, and the multiplier that quantizes the block's values.

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
    scale = amax * (1 / FORMATS[dtype].block_limit) * norm
    if scale_dtype == "float32":
        lower, upper = maximum(Float32(norm), 1.0) * LEAST_NORMAL, 2.0**127 if power_of_two else LARGEST
        bounded = maximum(minimum(scale, upper), lower)
        scale = Float32(select_((amax > 0.0) & (amax <= LARGEST), bounded, amax))
    elif scale_dtype == "float8_e4m3fn":
        scale = Float32(select_(amax > LARGEST, Float32(float("nan")), scale))
    code, inverse = SCALE_ROUNDING[scale_dtype](next_power_of_two(scale) if power_of_two else scale)
    return code, minimum(norm * inverse, LARGEST)


def e8m0(scale: Float32) -> tuple[Int32, Float32]:
    """Rounds up to a power of two from 2^-127 to 2^127: its e8m0 bits, and its inverse. NaN for NaN."""
    bits = scale.bitcast(Int32)
    code = cutlass.min((bits + ((1 << 23) - 1)) >> 23, 254)  # rounds up; infinity becomes 2^127
    code = Int32(select_(bits <= HALF_LEAST, Int32(0), code))
    inverse = cutlass.max((254 - code) << 23, HALF_LEAST).bitcast(Float32)
    nan = scale != scale
    return Int32(select_(nan, Int32(255), code)), Float32(select_(nan, scale, inverse))


def next_power_of_two(scale: Float32) -> Float32:
    """Rounds up to a power of two that is a normal float32, or infinity; 0, infinity and NaN are unchanged."""
    power = ((scale.bitcast(Int32) + 0x7FFFFF) & 0x7F800000).bitcast(Float32)
    return Float32(select_(scale <= LARGEST, power, scale))


def e4m3(scale: Float32) -> tuple[Int32, Float32]:
    """Rounds to e4m3, at most 448: its bits, and the correctly rounded inverse, 0 for 0."""
    pair = cute.arch.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint16],
        read_only_args=[Float32(0.0), scale],
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


def unrounded(scale: Float32) -> tuple[Float32, Float32]:
    """The scale factor itself, and its reciprocal."""
    return scale, reciprocal(scale)


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
def write_atom_scale(scales: cute.Tensor, row: Int32, block: Int32, batch: Int32, code: Int32, in_bounds: Any) -> None:
    """Writes the scale factor of a row and a block of its columns to its 128 x 4 atom, if it is in bounds."""
    # Shifts and masks: the compiler does not know that the indices are not negative, and would emit floor division.
    if in_bounds and row >> 7 < scales.shape[2] and block >> 2 < scales.shape[4]:
        position = (row & 31, row >> 5 & 3, row >> 7, block & 3, block >> 2, batch)
        address = cute.recast_ptr(scales.iterator, dtype=Uint8) + cute.crd2idx(position, scales.layout)
        cute.arch.store(address, Uint8(code))


@cute.jit
def write_expert_scale(
    scales: cute.Tensor, column: Int32, block: Int32, tile: Tile, code: Int32, in_bounds: Any
) -> None:
    """The same for a column and 32 of its rows, if each expert has separate atoms, one expert after the other."""
    columns = scales.shape[2]
    if in_bounds and column >> 7 < columns:
        first = tile.start >> 7
        atoms = (tile.end + 127 >> 7) - first
        atom = first * columns + (column >> 7) * atoms + (block >> 2) - first
        position = (atom << 9) + ((column & 31) << 4) + ((column >> 5 & 3) << 2) + (block & 3)
        cute.arch.store(cute.recast_ptr(scales.iterator, dtype=Uint8) + position, Uint8(code))


@cute.jit
def write_matrix_scale(scales: cute.Tensor, position: tuple[Int32, Int32, Int32], code: Any, in_bounds: Any) -> None:
    """Writes the scale factor of a row and a block of its columns to a matrix, if it is in bounds."""
    if in_bounds and position[0] < scales.shape[0] and position[1] < scales.shape[1]:
        scales[position] = scales.element_type(code)
