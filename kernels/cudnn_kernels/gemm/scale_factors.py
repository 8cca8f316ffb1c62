"""fp32 scale factors of accumulators (block-scaled fp8 as DeepGEMM): loaded by producer warps through a pipeline.

One or two warps copy the scale factors of a k tile for the CTA's rows (SFA) and columns (SFB) to shared memory by
4-byte ``cp.async``, for any strides, some k tiles ahead. On Hopper they share the stages and the mbarriers of the
operands, so that MMA warpgroups wait once for a k tile; on Blackwell, where other warps read them, they have a separate
pipeline. If ``rows`` rows share a scale factor, a tile need not begin at such a block: it has one value for each
granule, the largest common part of tile and block. Gathered rows take the scale factors of their indices, and 0 for
out-of-range indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.gemm.problem import BlockScale
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance
from cudnn_kernels.pipeline.tma import address_space_view, concat_glu_row, cp_async_zfill, ptr_array_coord
from cudnn_kernels.schedule.tile_scheduler import TileScheduler
from cudnn_kernels.threads import WARP_SIZE

ALIGNMENT, VECTOR = 16, 4  # bytes, and values, of a vector load


class OperandScales:
    """The scale factors of ``extent`` rows of A (SFA), which may be ``gathered``, or of B (SFB), which may be
    ``concat_glu`` weights, for one k tile.
    """

    def __init__(self, scale: BlockScale, extent: int, concat_glu: bool = False, gathered: bool = False) -> None:
        self.rows, self.vector, self.concat_glu, self.gathered = scale.rows, scale.vector, concat_glu, gathered
        self.granule = math.gcd(extent, scale.rows, GLU_BLOCK if concat_glu else extent)
        # A multiple of a vector load, which the compiler makes of loads of neighbors: 3 become 4, the last one unused.
        self.count = -(-extent // self.granule // VECTOR) * VECTOR


class ScaleFactorPipeline:
    """SFA and SFB for the tiles of a ``scheduler``, in the stages of a ``pipeline``.

    Every lane of a producer warp arrives on the full barrier of a stage when its copies are complete.
    """

    def __init__(
        self,
        operands: tuple[OperandScales, ...],
        tensors: tuple[Any, ...],
        scheduler: TileScheduler,
        pipeline: MbarrierPipeline,
        smem: Any,
    ) -> None:
        self.operands, self.scheduler, self.pipeline = operands, scheduler, pipeline
        *self.tensors, self.pointers, self.index = tensors
        self.stages = [
            smem.allocate_tensor(
                Float32,
                cute.make_layout((operand.count, pipeline.stages)),
                byte_alignment=ALIGNMENT,
            )
            for operand in self.operands
        ]

    @staticmethod
    def arguments(arguments: Mapping[str, Any], operands: tuple[OperandScales, ...], index: str) -> tuple[Any, ...]:
        """On the host: SFA, SFB, the pointer array of SFB if B is a ptr-array, the index tensor of gathered rows."""
        if not operands:
            return ()
        b, pointers = arguments.get("sfb"), arguments.get("sfb_ptrs")
        if pointers is not None:
            _, blocks, _ = arguments["sfa"].shape
            rows = cute.ceil_div(arguments["n"], operands[1].rows)
            b = address_space_view(Float32, (rows, blocks), (blocks, 1), pointers)
        return arguments["sfa"], b, pointers, arguments.get(index)

    @staticmethod
    def stage_bytes(operands: tuple[OperandScales, ...]) -> int:
        """Shared memory of a stage of both operands."""
        return sum(4 * operand.count for operand in operands)

    @cute.jit
    def run(
        self,
        tile_origin: cutlass.Constexpr[Callable[[Any], Any]],
        tile_k: cutlass.Constexpr[int],
        operands: cutlass.Constexpr[tuple[int, ...]],
    ) -> None:
        """A producer warp: loads the scale factors of A (0), B (1) or both for all tiles.

        ``tile_origin``: the first row and column of a work tile.
        """
        self.start()
        stage, phase = Int32(0), Int32(1)
        cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            coord = self.begin_tile(tile_origin(work), work)
            for k in cutlass.range(work.k_tiles(tile_k), unroll=1):
                cute.arch.mbarrier_wait(self.pipeline.empty + stage, phase)
                self.load(operands, coord, work.k + k * tile_k, stage)
                stage, phase = advance(self.pipeline, stage, phase)
            cursor = self.scheduler.advance_to_next_work(cursor)

    def start(self) -> None:
        """Once per warp: registers for the indices of the rows whose scale factors a lane copies."""
        if self.operands[0].gathered:
            self.indices = cute.make_rmem_tensor(-(-self.operands[0].count // WARP_SIZE), Int32)

    def begin_tile(self, first: Any, work: Any) -> tuple[Any, Any]:
        """Before a tile's first k tile: loads the indices of gathered rows. Returns the tile's first row and column,
        and the batch coordinates of both operands.
        """
        if self.operands[0].gathered:
            for i in range(cute.size(self.indices)):
                row = first[0] + i * WARP_SIZE + cute.arch.lane_idx()
                self.indices[i] = self.index[cutlass.min(row, work.end - 1)]
        batch_a, batch_b, _ = self.scheduler.tile_map.batch_coords(work.group)
        return first, (batch_a, ptr_array_coord(self.pointers, batch_b))

    def load(self, operands: tuple[int, ...], coord: tuple[Any, Any], k: Int32, stage: Int32) -> None:
        """One warp: issues the copies of these operands' scale factors of a k tile to an empty stage."""
        first, batch = coord
        for operand in operands:
            self.copy(operand, first[operand], k, batch[operand], stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.pipeline.full + stage)

    @cute.jit
    def load_own_operand(self, warp: Int32, coord: tuple[Any, Any], k: Int32, stage: Int32) -> None:
        """One of two warps: :meth:`load` for the operand with the warp's index."""
        for operand in cutlass.range_constexpr(len(self.operands)):
            if warp == operand:
                self.load((operand,), coord, k, stage)

    def copy(self, i: int, first: Int32, k: Int32, batch: Any, stage: Int32) -> None:
        """Issues the copies of operand i's scale factors, some for each lane."""
        for start in range(0, self.operands[i].count, WARP_SIZE):
            index = start + cute.arch.lane_idx()
            if self.operands[i].gathered:
                self.copy_gathered(i, index, self.indices[start // WARP_SIZE], k, batch, stage)
            else:
                self.copy_one(i, index, first, k, batch, stage)

    def copy_gathered(self, i: int, index: Int32, row: Int32, k: Int32, batch: Any, stage: Int32) -> None:
        """Issues the copy of the scale factor of a gathered row, or of 0 if the row is out of range."""
        tensor, stages = self.tensors[i], self.stages[i]
        source = tensor.iterator + cute.crd2idx(self.coord(i, row, k, batch), tensor.layout)
        target = stages.iterator + cute.crd2idx((index, stage), stages.layout)
        cp_async_zfill(target.toint(), source.toint(), (row < 0) | (row >= tensor.shape[0]), 4)

    def coord(self, i: int, row: Any, k: Int32, batch: Any) -> tuple[Any, Any, Any]:
        """The coordinate of a scale factor of operand i in its tensor."""
        k, batch = self.scheduler.tile_map.operand_coord(k, batch)
        return row, k // self.operands[i].vector, batch

    @cute.jit
    def copy_one(
        self, i: cutlass.Constexpr[int], index: Int32, first: Int32, k: Int32, batch: Any, stage: Int32
    ) -> None:
        """Issues the copy of one scale factor. Rows beyond the last one take the last one's."""
        operand, tensor, stages = self.operands[i], self.tensors[i], self.stages[i]
        if index < operand.count:
            row = first + index * operand.granule
            if const_expr(operand.concat_glu):
                row = concat_glu_row(row, self.scheduler.problem().n, GLU_BLOCK)
            row = cutlass.min(row // operand.rows, tensor.shape[0] - 1)
            source = tensor.iterator + cute.crd2idx(self.coord(i, row, k, batch), tensor.layout)
            target = stages.iterator + cute.crd2idx((index, stage), stages.layout)
            one = cute.make_layout(1)
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
            cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))

    def row(self, stage: Int32, row: Any) -> Float32:
        """The scale factor of a row of the CTA's tile."""
        return self.stages[0][row // self.operands[0].granule, stage]

    def column(self, stage: Int32, column: Any) -> Float32:
        """The scale factor of a column of the CTA's tile."""
        return self.stages[1][column // self.operands[1].granule, stage]
