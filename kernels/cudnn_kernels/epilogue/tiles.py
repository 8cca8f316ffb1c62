"""Loads and stores of tiles in the epilogue: TMA between global and shared memory, and copies between shared memory and
registers (r2s: stmatrix; s2r: ldmatrix), subtile by subtile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint8, select_
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile, first_warp
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import FORMATS, GLU_BLOCK
from cudnn_kernels.pipeline.fragment import Fragment, Registers, ValueSubset, elements, indices
from cudnn_kernels.pipeline.tma import ptr_array_coord, ptr_array_view, ragged_coord, ragged_view


class StagedTile(EpiOpImpl):
    """A tensor (m, n, l) whose subtiles pass through stages in shared memory."""

    alignment = 1024  # of the widest swizzle
    tma_op: Any  # the TMA operation

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        packed = FORMATS[epi_op.dtype].packed
        self.packed = packed > 1
        self.num_segments = width // GLU_BLOCK if epi_op.concat_glu else params.num_segments
        self.shape = (params.rows, width // self.num_segments // packed)  # of a segment, in elements of the tensor
        self.element = Uint8 if self.packed else DTYPES[epi_op.dtype]
        if self.packed and epi_op.major != "n":
            raise ValueError(f"{epi_op.tensor}: {epi_op.dtype} is packed along n, so major must be n")
        if epi_op.concat_glu and (params.num_segments > 1 or self.packed):
            allowed = "subtiles of one segment, types of 8 bits and more"
            raise ValueError(f"{epi_op.tensor}: got concatenated halves; allowed: none but of {allowed}")

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        one_segment = cute.slice_(self.layout(), (None, None, 0))
        return tuple(cpasync.make_tiled_tma_atom(self.tma_op(), self.view(arguments), one_segment, self.shape))

    def view(self, arguments: Mapping[str, Any]) -> cute.Tensor:
        """The tensor for TMA; a ragged view if groups may end in the middle of a tile.

        Rows beyond the group are loaded as zeros, so that they do not contribute to reductions, and are not stored.
        """
        tensor = arguments[self.op.tensor]
        return ragged_view(tensor, 0) if self.params.ragged_m else tensor

    def bytes(self) -> int:
        return self.params.num_warpgroups * self.params.stages * self.subtile_bytes()

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        layout = self.layout()
        self.buffers = smem.allocate_tensor(self.element, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def subtile_bytes(self) -> int:
        """Bytes of a subtile of the warpgroup's rows."""
        return self.shape[0] * self.shape[1] * self.num_segments * self.element.width // 8

    def layout(self) -> Any:
        """The layout of the stages of all warpgroups, segment by segment."""
        order = LayoutEnum.ROW_MAJOR if self.op.major == "n" else LayoutEnum.COL_MAJOR
        count = self.params.num_warpgroups * self.params.stages * self.num_segments
        return sm90.make_smem_layout_epi(self.element, order, self.shape, count)

    def stage(self, tile: Tile, subtile: int) -> Any:
        """The index of a subtile's stage among those of all warpgroups."""
        return tile.wg_idx * self.params.stages + subtile % self.params.stages

    def buffer(self, tile: Tile, subtile: int) -> cute.Tensor:
        """A subtile's stage, with the segments' columns joined."""
        if self.num_segments == 1:
            return self.buffers[None, None, self.stage(tile, subtile)]
        joined = cute.local_tile(self.buffers, (*self.shape, self.num_segments), (0, 0, self.stage(tile, subtile)))
        return cute.group_modes(joined, 1, 3)

    def tma_partitions(self, tile: Tile, subtile: int) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """``tma_partition`` of each segment of a subtile: in shared and in global memory."""
        atom, tensor = self.parameters[:2]
        row, batch = self.rows(tile)
        shifted = cute.domain_offset((row, 0, 0), tensor)
        one_cta = cute.make_layout(1)
        partitions = []
        for which in range(self.num_segments):
            coord = (0, self.segment(tile, subtile, which), batch)
            if self.op.concat_glu:  # a segment is a block of 32 columns; blocks of both halves alternate
                blocks_of_half = Int32(tensor.shape[1]) // (2 * GLU_BLOCK)
                block = (tile.column * self.params.num_subtiles + subtile) * (self.num_segments // 2) + which // 2
                block_of_tensor = block + which % 2 * blocks_of_half
                out_of_bounds = 2 * blocks_of_half
                coord = (0, Int32(select_(block < blocks_of_half, block_of_tensor, out_of_bounds)), batch)
            gD = cute.local_tile(shifted, self.shape, coord)
            sD = self.buffers[None, None, self.stage(tile, subtile) * self.num_segments + which]
            smem_and_gmem = (cute.group_modes(x, 0, 2) for x in (sD, gD))
            partitions.append(cpasync.tma_partition(atom, 0, one_cta, *smem_and_gmem))
        return partitions

    def rows(self, tile: Tile) -> tuple[Any, Any]:
        """The row of the TMA view where the tile begins, and the batch coordinate."""
        if not self.params.ragged_m:
            return tile.row, tile.batch
        return ragged_coord(tile.row, tile.end, self.params.rows, 1)

    def thread_copy(self, matrix_op: Any, tile: Tile) -> tuple[Any, Any]:
        """The tiled copy between registers and shared memory: stmatrix, ldmatrix, or vectors of columns."""
        transposed = self.op.major == "m"
        if self.element.width == 16 and self.params.layout.matrices:
            atom = cute.make_copy_atom(matrix_op(transposed, 4), self.element)
        else:
            bits = self.element.width if transposed else min(128, self.element.width * self.params.layout.run)
            atom = cute.make_copy_atom(CopyUniversalOp(), self.element, num_bits_per_copy=bits)
        return atom, self.params.tiled_copy(atom, self.width).get_slice(tile.thread)


def check_rows(epi_op: Any, params: EpilogueParams) -> None:
    """Raises unless TMA can leave out the rows of a tile that belong to the next group."""
    if params.ragged_m and epi_op.major != "n":
        raise ValueError(f"{epi_op.tensor}: got major m; allowed: n, if groups may end in the middle of tiles")


class StoreTileImpl(StagedTile):
    """Stores a value: from registers to shared memory, then by a TMA store, or by a TMA reduction (add)."""

    read_only = True

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        check_rows(epi_op, params)
        if params.ragged_m and epi_op.pointers:
            raise ValueError(
                f"{epi_op.tensor}: got pointers; allowed: a tensor, if groups may end in the middle of a tile"
            )
        if epi_op.adds and self.element.width < 16:
            raise ValueError(f"{epi_op.tensor}: got {epi_op.dtype}; allowed: 16 and 32 bits, to add to")

    def tma_op(self) -> Any:
        return cpasync.CopyReduceBulkTensorTileS2GOp() if self.op.adds else cpasync.CopyBulkTensorTileS2GOp()

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return (*super().prepare(arguments), arguments[self.op.tensor] if self.op.pointers else None)

    def view(self, arguments: Mapping[str, Any]) -> cute.Tensor:
        if self.op.pointers:
            columns = arguments["n"] * self.width // self.params.width
            columns, pointers = columns // FORMATS[self.op.dtype].packed, arguments[self.op.tensor]
            return ptr_array_view(self.element, arguments["m"], columns, self.op.major == "n", pointers)
        return super().view(arguments)

    def rows(self, tile: Tile) -> tuple[Any, Any]:
        row, batch = super().rows(tile)
        return row, batch if self.params.ragged_m else ptr_array_coord(self.parameters[2], batch)

    @property
    def elementwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.element.width >= 16

    def begin_subtile(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        self.rounded = self.params.fragment(self.element, self.width)

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x = values[self.op.value]
        for _, positions in indices(x, subset):
            # One instruction rounds two adjacent columns.
            for left, right in zip(positions[::2], positions[1::2], strict=True):
                pair = Registers([x.values[left], x.values[right]]).load()
                self.rounded[left], self.rounded[right] = elements(pair.to(self.element))

    def end_subtile(self, tile: Tile, subtile: int) -> None:
        if not self.params.overlaps_stores:
            self.r2s(tile, subtile)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        self.rounded = self.params.fragment(Float32 if self.packed else self.element, self.width)
        self.rounded.store(values[self.op.value].values.load().to(self.rounded.element_type))
        self.end_subtile(tile, subtile)

    def r2s(self, tile: Tile, subtile: int) -> None:
        buffer = self.buffer(tile, subtile)
        if self.packed:
            self.store_pairs(Fragment(self.rounded, self.width, self.params.layout), buffer, tile.thread)
        else:
            atom, copy = self.thread_copy(warp.StMatrix8x8x16bOp, tile)
            cute.copy(atom, copy.retile(self.rounded), copy.partition_D(buffer))

    def store_pairs(self, fragment: Fragment, buffer: cute.Tensor, thread: Int32) -> None:
        """fp4: packs two columns into a byte, the left one in the low half, a run of a thread's columns at a time."""
        rows = fragment.layout
        size = min(16, rows.run // 2)  # bytes
        runs = cute.flat_divide(buffer, (1, size))
        pairs = cute.make_rmem_tensor(size, Uint8)
        for slot in range(rows.slots):
            values = fragment.row_values(slot)
            for first in range(0, len(values), 2 * size):
                coord = rows.row(thread, slot), rows.column(thread, first) // (2 * size)
                for i in range(size):
                    left, right = values[first + 2 * i : first + 2 * i + 2]
                    pairs[i] = Uint8(e2m1(left) | e2m1(right) << 4)
                if size == 1:
                    buffer[coord] = pairs[0]  # a vector store would cost registers that ping-pong on Hopper lacks
                else:
                    runs[(0, None, *coord)].store(pairs.load())

    def issue_tma(self, tile: Tile, subtile: int) -> None:
        for source, target in self.tma_partitions(tile, subtile):
            cute.copy(self.parameters[0], source, target)


class LoadTileImpl(StagedTile):
    """Loads a tensor by TMA. The loads of the first subtiles overlap with the mainloop; ``issue_tma`` of a subtile
    issues the load of the subtile that uses the same stage next.
    """

    elementwise = True
    tma_op = cpasync.CopyBulkTensorTileG2SOp

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        check_rows(epi_op, params)
        if self.packed:
            raise ValueError(f"{epi_op.tensor}: {epi_op.dtype} can be stored, not loaded")

    def bytes(self) -> int:
        return super().bytes() + self.params.num_warpgroups * self.params.stages * 8

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        self.full = smem.allocate_array(cutlass.Int64, self.params.num_warpgroups * self.params.stages)

    def init_barriers(self) -> None:
        for i in range(self.params.num_warpgroups * self.params.stages):
            cute.arch.mbarrier_init(self.full + i, 1)

    @cute.jit
    def begin_tile(self, tile: Tile) -> None:
        if first_warp(tile.thread):
            self.load_first(tile)

    def load_first(self, tile: Tile) -> None:
        """Issues the loads that fill all stages."""
        for subtile in range(min(self.params.stages, self.params.num_subtiles)):
            self.issue_load(tile, subtile)

    def issue_load(self, tile: Tile, subtile: int) -> None:
        """One warp: issues the load of a subtile."""
        full = self.full + self.stage(tile, subtile)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.subtile_bytes())
        for target, source in self.tma_partitions(tile, subtile):
            cute.copy(self.parameters[0], source, target, tma_bar_ptr=full)

    def begin_subtile(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        self.loaded = self.load(tile, subtile)
        values[self.op.value] = Fragment.empty(self.width, self.params.layout)
        if self.element.width == 8:  # four values per conversion
            values[self.op.value].values.store(self.loaded.load().to(Float32))

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x = values[self.op.value]
        for _, positions in indices(x, subset if self.element.width > 8 else ValueSubset(x.width, ())):
            for i in positions:
                x.values[i] = Float32(self.loaded[i])

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        converted = self.params.fragment(Float32, self.width)
        converted.store(self.load(tile, subtile).load().to(Float32))
        values[self.op.value] = Fragment(converted, self.width, self.params.layout)

    def load(self, tile: Tile, subtile: int) -> cute.Tensor:
        """Waits for a subtile and loads it to registers."""
        use, stage = divmod(subtile, self.params.stages)
        uses_per_tile = -(-(self.params.num_subtiles - stage) // self.params.stages)  # of this stage
        cute.arch.mbarrier_wait(self.full + self.stage(tile, subtile), (tile.iteration * uses_per_tile + use) % 2)
        atom, copy = self.thread_copy(warp.LdMatrix8x8x16bOp, tile)
        loaded = self.params.fragment(self.element, self.width)
        cute.copy(atom, copy.partition_S(self.buffer(tile, subtile)), copy.retile(loaded))
        return loaded

    def issue_tma(self, tile: Tile, subtile: int) -> None:
        if subtile + self.params.stages < self.params.num_subtiles:  # all threads have read the stage
            self.issue_load(tile, subtile + self.params.stages)


def e2m1(x: Float32) -> Int32:
    """Converts to e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and the sign), rounding to nearest even; saturates, 6 or -6 for NaN.

    Hopper has no such conversion. Adding 2^22 times a power of two rounds x to multiples of half that power.
    """
    size = cute.arch.fmin(cute.math.absf(x), Float32(6.0))
    power = cute.arch.fmax(size, Float32(1.0)).bitcast(Int32) & 0x7F800000  # x's power of two: 1, 2 or 4
    magic = power + (22 << 23)
    count = (size + magic.bitcast(Float32)).bitcast(Int32) - magic
    exponent = (power >> 23) - 127  # each power of two adds two codes: count is in halves of the power
    return count + exponent + exponent | x.bitcast(Int32) >> 28 & 8
