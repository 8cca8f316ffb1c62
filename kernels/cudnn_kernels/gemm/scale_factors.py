"""fp32 scale factors of accumulators (block-scaled fp8 as DeepGEMM): loaded by producer warps through a pipeline.

One or two warps copy the scale factors of a k tile for the CTA's rows (SFA) and columns (SFB) to shared memory by
4-byte ``cp.async``, for any strides, some k tiles ahead. On Hopper they share the stages and the mbarriers of the
operands, so that MMA warpgroups wait once for a k tile; on Blackwell, where other warps read them, they have a separate
pipeline. If ``rows`` rows share a scale factor, a tile need not begin at such a block: it has one value for each
granule, their greatest common divisor. Gathered rows take the scale factors of their indices, and 0 for
out-of-range indices. Each lane computes the offsets of its rows once a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, select_
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.gemm.problem import BlockScale
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance
from cudnn_kernels.pipeline.tma import address_space_view, concat_glu_row, cp_async_zfill, ptr_array_coord
from cudnn_kernels.schedule.tile_scheduler import TileScheduler
from cudnn_kernels.threads import WARP_SIZE

ALIGNMENT, VECTOR = 16, 4  # bytes, and values, of a vector load
ZERO_FILL = -1  # instead of the offset of a row whose index is out of range


class OperandScales:
    """The scale factors of ``extent`` rows of A (SFA), which may be ``gathered``, or of B (SFB), which may be
    ``concat_glu`` weights, for one k tile.
    """

    def __init__(self, scale: BlockScale, extent: int, concat_glu: bool = False, gathered: bool = False) -> None:
        self.rows, self.vector, self.concat_glu, self.gathered = scale.rows, scale.vector, concat_glu, gathered
        self.granule = math.gcd(extent, scale.rows, GLU_BLOCK if concat_glu else extent)
        # A multiple of a vector load, which the compiler makes of loads of neighbors: 3 become 4, the last one unused.
        self.count = -(-extent // self.granule // VECTOR) * VECTOR
        self.copies = -(-self.count // WARP_SIZE)  # of a lane, for a k tile


class ScaleFactorPipeline:
    """SFA and SFB for the tiles of a ``scheduler``, in the stages of a ``pipeline``.

    Every lane of a producer warp arrives on the full barrier of a stage when its copies are complete. ``sfa_layout``
    maps a row of the CTA's tile to the position of its scale factor in a stage.
    """

    def __init__(
        self,
        operands: tuple[OperandScales, ...],
        tensors: tuple[Any, ...],
        scheduler: TileScheduler,
        pipeline: MbarrierPipeline,
        smem: Any,
        sfa_layout: cute.Layout | None = None,
    ) -> None:
        self.operands, self.scheduler, self.pipeline = operands, scheduler, pipeline
        *self.tensors, self.pointers, self.index = tensors
        layouts = [cute.make_layout(operand.count) for operand in operands]
        if sfa_layout is not None:
            layouts[0] = sfa_layout
        self.stages = [
            smem.allocate_tensor(
                Float32,
                cute.make_layout((layout.shape, pipeline.stages), stride=(layout.stride, operand.count)),
                byte_alignment=ALIGNMENT,
            )
            for operand, layout in zip(operands, layouts, strict=True)
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
            batch = self.begin_tile(tile_origin(work), work)
            for k in cutlass.range(work.k_tiles(tile_k), unroll=1):
                cute.arch.mbarrier_wait(self.pipeline.empty + stage, phase)
                self.load(operands, batch, work.k + k * tile_k, stage)
                stage, phase = advance(self.pipeline, stage, phase)
            cursor = self.scheduler.advance_to_next_work(cursor)

    def start(self) -> None:
        """Once per warp: registers for the offsets of the rows whose scale factors a lane copies."""
        self.offsets = [cute.make_rmem_tensor(operand.copies, Int64) for operand in self.operands]

    def begin_tile(self, first: Any, work: Any) -> tuple[Any, Any]:
        """Before a tile's first k tile: computes the offsets of its rows; ``first`` are its first row and column.
        Returns the batch coordinates of both operands.
        """
        for i, operand in enumerate(self.operands):
            for copy in range(operand.copies):
                index = copy * WARP_SIZE + cute.arch.lane_idx()
                self.offsets[i][copy] = self.row_offset(i, first[i] + index * operand.granule, work.end)
        batch_a, batch_b, _ = self.scheduler.tile_map.batch_coords(work.group)
        return batch_a, ptr_array_coord(self.pointers, batch_b)

    def row_offset(self, i: int, row: Int32, end: Int32) -> Int64:
        """The offset of a row of operand i in its scale factors. Out-of-range rows are clamped to the last one."""
        operand, tensor = self.operands[i], self.tensors[i]
        if operand.gathered:
            row = self.index[cutlass.min(row, end - 1)]
            return select_((row < 0) | (row >= tensor.shape[0]), Int64(ZERO_FILL), Int64(row) * tensor.stride[0])
        if operand.concat_glu:
            row = concat_glu_row(row, self.scheduler.problem().n, GLU_BLOCK)
        return Int64(cutlass.min(row // operand.rows, tensor.shape[0] - 1)) * tensor.stride[0]

    def load(self, operands: tuple[int, ...], batch: tuple[Any, Any], k: Int32, stage: Int32) -> None:
        """One warp: issues the copies of these operands' scale factors of a k tile to an empty stage."""
        for i in operands:
            tensor = self.tensors[i]
            k_block = tensor.iterator + cute.crd2idx(self.coord(i, k, batch[i]), tensor.layout)
            for copy in range(self.operands[i].copies):
                self.copy(i, copy * WARP_SIZE + cute.arch.lane_idx(), k_block, self.offsets[i][copy], stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.pipeline.full + stage)

    @cute.jit
    def load_own_operand(self, warp: Int32, batch: tuple[Any, Any], k: Int32, stage: Int32) -> None:
        """One of two warps: :meth:`load` for the operand with the warp's index."""
        for operand in cutlass.range_constexpr(len(self.operands)):
            if warp == operand:
                self.load((operand,), batch, k, stage)

    def coord(self, i: int, k: Int32, batch: Any) -> tuple[Any, Any, Any]:
        """The coordinate of the first row's scale factor of operand i in its tensor."""
        k, batch = self.scheduler.tile_map.operand_coord(k, batch)
        return 0, k // self.operands[i].vector, batch

    @cute.jit
    def copy(self, i: cutlass.Constexpr[int], index: Int32, k_block: cute.Pointer, offset: Int64, stage: Int32) -> None:
        """Issues the copy of one scale factor, or of 0."""
        operand, stages = self.operands[i], self.stages[i]
        if index < operand.count:
            source, target = k_block + offset, stages.iterator + cute.crd2idx((index, stage), stages.layout)
            if const_expr(operand.gathered):
                cp_async_zfill(target.toint(), source.toint(), offset == ZERO_FILL, 4)
            else:
                one = cute.make_layout(1)
                atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
                cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))

    def row(self, stage: Int32, row: Any) -> Float32:
        """The scale factor of a row of the CTA's tile."""
        return self.stages[0][row // self.operands[0].granule, stage]

    def neighbors(self, stage: Int32, position: Int32, count: int) -> list[Float32]:
        """The scale factors of ``count`` rows at neighboring positions of a stage, by vector loads."""
        layout = cute.make_layout(count)
        position = cute.assume(position + stage * self.operands[0].count, divby=count)
        values = cute.make_rmem_tensor(layout, Float32)
        cute.autovec_copy(cute.make_tensor(self.stages[0].iterator + position, layout), values)
        return [values[i] for i in range(count)]

    def column(self, stage: Int32, column: Any) -> Float32:
        """The scale factor of a column of the CTA's tile."""
        return self.stages[1][column // self.operands[1].granule, stage]
