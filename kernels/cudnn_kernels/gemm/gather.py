"""Gathered operands (gather_A): a tile takes any rows of the tensor, or any k indices, by an index tensor.

A line is a row of a K-major operand, or one k of an MN-major one. Producer threads copy lines by 16-byte ``cp.async``.
On Hopper, TMA copies rows in boxes of 128 bytes, which CTAs can multicast. Both leave a tile in shared memory in the
128-byte swizzle atoms (eight lines of 128 bytes) that a tiled TMA load writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as nvgpu
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr, select_
from cutlass._mlir import ir
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.gemm.scale_factors import ScaleFactorPipeline
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance
from cudnn_kernels.pipeline.tma import TMA_ALIGNMENT, cp_async_zfill
from cudnn_kernels.schedule.tile_scheduler import TileScheduler
from cudnn_kernels.threads import WARP_SIZE

GATHER_WARPS = 2  # producer warps
ATOM_BYTES, ATOM_LINES = 128, 8  # bytes of a line of a swizzle atom, and its lines
CHUNKS = ATOM_BYTES // TMA_ALIGNMENT  # of a line: one for each lane, so that a warp copies four lines at once
WARP_LINES = ATOM_LINES // GATHER_WARPS  # lines of an atom that a warp copies
INDEX_BYTES = 4
MAX_IN_FLIGHT = 4  # k tiles with outstanding copies


class CpAsyncGather:
    """Gathers an operand (rows, k, 1), A or B, by ``cp.async``: line i of the problem is the tensor's line
    ``index[i]``. Out-of-range indices read as zero.

    A CTA's tile has ``shape`` (rows, k); ``smem_offset`` is the position of an element (row, k) in the first stage of
    ``stages``. The indices of a tile's lines are in a table in shared memory, -1 for zeros, ordered so that a lane
    reads four indices at once.
    """

    def __init__(
        self,
        operand: int,
        along_k: bool,
        tensor: cute.Tensor,
        index: cute.Tensor,
        stages: cute.Tensor,
        shape: tuple[int, int],
        smem_offset: Callable[[int, int], int],
        smem: Any,
    ) -> None:
        self.operand, self.along_k, self.tensor, self.index = operand, along_k, tensor, index
        self.size = stages.element_type.width // 8  # bytes of an element
        num_tile_lines, width = shape[::-1] if along_k else shape
        atom_width = ATOM_BYTES // self.size  # elements of an atom's line
        self.count, self.blocks = num_tile_lines // ATOM_LINES, width // atom_width
        self.bytes = num_tile_lines * width * self.size  # of a stage
        self.num_lines = num_tile_lines // GATHER_WARPS  # of a warp
        self.target = stages.iterator.toint()
        layout = cute.make_layout((self.count, WARP_LINES, GATHER_WARPS))
        self.table = smem.allocate_tensor(Int32, layout, byte_alignment=TMA_ALIGNMENT)

        def start(line: int, block: int) -> int:
            coord = (block * atom_width, line) if along_k else (line, block * atom_width)
            return self.size * smem_offset(*coord)

        self.atoms = [[start(i * ATOM_LINES, block) for block in range(self.blocks)] for i in range(self.count)]
        misplaced = any(x % (ATOM_BYTES * ATOM_LINES) for line in self.atoms for x in line)
        misplaced |= start(1, 0) != ATOM_BYTES
        if self.num_lines % WARP_SIZE or self.count % WARP_LINES or width % atom_width or misplaced:
            allowed = f"atoms of {ATOM_LINES} lines of {ATOM_BYTES} bytes, for {GATHER_WARPS} warps"
            raise ValueError(f"tile: got {shape}; allowed: {allowed}")

    def start(self, warp: Int32) -> None:
        """Once per warp: which 16-byte chunk of which line a lane copies, and where its indices are in the table."""
        self.warp, self.lane = warp, cute.arch.lane_idx()
        warp_line, self.chunk = self.lane // CHUNKS, self.lane % CHUNKS  # line among the warp's in an atom
        line = self.line(warp_line)
        self.lane_target = self.target + line * ATOM_BYTES + (self.chunk ^ line) * TMA_ALIGNMENT
        self.entries = self.table.iterator.toint() + (warp * WARP_LINES + warp_line) * (self.count * INDEX_BYTES)
        self.indices = cute.make_rmem_tensor(self.num_lines // WARP_SIZE, Int32)

    def line(self, i: Any) -> Any:
        """The line of the tile that is line i of the warp."""
        return i // WARP_LINES * ATOM_LINES + self.warp * WARP_LINES + i % WARP_LINES

    def load_indices(self, first: Int32, end: Int32) -> None:
        """Issues the loads of the indices of a tile's lines, which are those from ``first`` to before ``end``."""
        for i in range(self.num_lines // WARP_SIZE):
            self.indices[i] = self.index[cutlass.min(first + self.line(i * WARP_SIZE + self.lane), end - 1)]

    def store_indices(self, first: Int32, end: Int32) -> None:
        """Stores the loaded indices to the table."""
        limit = Int32(self.tensor.shape[1 if self.along_k else 0])
        cute.arch.sync_warp()
        for i in range(self.num_lines // WARP_SIZE):
            line, index = i * WARP_SIZE + self.lane, self.indices[i]
            in_bounds = (first + self.line(line) < end) & (index >= 0) & (index < limit)
            self.table[line // WARP_LINES, line % WARP_LINES, self.warp] = Int32(select_(in_bounds, index, Int32(-1)))
        cute.arch.sync_warp()

    def copy(self, offset: Int32, stage: Int32) -> None:
        """Issues the copies of the lines, from element ``offset`` of each on, to a stage."""
        dim = 0 if self.along_k else 1
        pitch = Int64(Int32(self.tensor.stride[1 - dim] * self.size))
        first = offset * self.size + self.chunk * TMA_ALIGNMENT
        begin, size = self.tensor.iterator.toint() + Int64(first), Int32(self.tensor.shape[dim] * self.size)
        oob = [Int32(select_(first + block * ATOM_BYTES < size, Int32(0), Int32(-1))) for block in range(self.blocks)]
        lane_target = self.lane_target + stage * self.bytes
        for start in range(0, self.count, WARP_LINES):
            indices = load_four(self.entries + start * INDEX_BYTES)
            for i in range(WARP_LINES):
                line = begin + Int64(indices[i]) * pitch
                for block in range(self.blocks):
                    target = lane_target + self.atoms[start + i][block]
                    cp_async_zfill(target, line + block * ATOM_BYTES, (indices[i] | oob[block]) < 0)


class TmaRowGather(CpAsyncGather):
    """Gathers rows by TMA, one row of 128 bytes a box. TMA reads out-of-range indices as zero and counts the bytes on
    the stage's full barrier.

    ``multicast`` is (CTAs, this CTA's rank, mask): each CTA loads a slice of the rows and multicasts it to all.
    ``atom_and_view``: of :func:`tma_row_view`.
    """

    def __init__(
        self,
        atom_and_view: tuple[Any, Any],
        index: cute.Tensor,
        stages: cute.Tensor,
        shape: tuple[int, int],
        smem_offset: Callable[[int, int], int],
        smem: Any,
        pipeline: MbarrierPipeline,
        multicast: tuple[int, Int32, Int32],
    ) -> None:
        self.atom, view = atom_and_view
        super().__init__(0, False, view, index, stages, shape, smem_offset, smem)
        self.pipeline, (self.num_multicast, self.rank, self.mask) = pipeline, multicast
        self.num_lines //= self.num_multicast
        self.starts = [
            self.atoms[row // ATOM_LINES][0] + row % ATOM_LINES * ATOM_BYTES for row in range(self.num_lines)
        ]

    def start(self, warp: Int32) -> None:
        """Once per warp: its first row of the tile and its part of the table."""
        self.lane, self.first = cute.arch.lane_idx(), (self.rank * GATHER_WARPS + warp) * self.num_lines
        self.entries = cute.make_tensor(self.table.iterator + warp * self.num_lines, cute.make_layout(self.num_lines))
        self.indices = cute.make_rmem_tensor(self.num_lines // WARP_SIZE, Int32)

    def line(self, i: Any) -> Any:
        """The row of the tile that is row i of the warp."""
        return self.first + i

    def store_indices(self, first: Int32, end: Int32) -> None:
        """Stores the loaded indices to the table; TMA checks the range of those inside the group."""
        cute.arch.sync_warp()
        for i in range(self.num_lines // WARP_SIZE):
            row = i * WARP_SIZE + self.lane
            in_group = first + self.line(row) < end
            self.entries[row] = Int32(select_(in_group, self.indices[i], Int32(-1)))
        cute.arch.sync_warp()

    @cute.jit
    def copy(self, offset: Int32, stage: Int32) -> None:
        """One thread issues the loads of the rows, from element ``offset`` of each on, to a stage."""
        descriptor, full = tma_descriptor_address(self.atom), (self.pipeline.full + stage).toint()
        pitch = const_expr(self.atoms[1][0] - self.atoms[0][0])  # of eight rows
        target = self.target + stage * self.bytes + self.first // ATOM_LINES * pitch
        with cute.arch.elect_one():
            for start in cutlass.range_constexpr(0, self.num_lines, WARP_LINES):
                indices = load_four(self.entries.iterator.toint() + start * INDEX_BYTES)
                for i in cutlass.range_constexpr(WARP_LINES):
                    self.load_row([target + const_expr(self.starts[start + i]), descriptor, offset, indices[i], full])

    def load_row(self, arguments: list) -> None:
        """Loads 128 bytes of a row. ``cute.copy`` would elect a thread for each load."""
        multicast, mask = "", ""
        if self.num_multicast > 1:
            multicast, mask, arguments = ".multicast::cluster", ", {$r5}", [*arguments, Int16(self.mask)]
        cute.arch.inline_ptx(
            f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{multicast} "
            f"[{{$r0}}], [{{$r1}}, {{{{$r2}}, {{$r3}}}}], [{{$r4}}]{mask};",
            read_only_args=arguments,
        )


def load_four(address: Any) -> cute.Tensor:
    """Four indices from the table by one load."""
    entries = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=TMA_ALIGNMENT)
    indices = cute.make_rmem_tensor(WARP_LINES, Int32)
    indices.store(cute.make_tensor(entries, cute.make_layout(WARP_LINES)).load())
    return indices


def tma_row_view(tensor: cute.Tensor) -> tuple[Any, Any]:
    """The TMA atom and coordinate tensor (rows, k) of an operand (rows, k, 1), for boxes of 128 bytes of a row."""
    width = ATOM_BYTES * 8 // tensor.element_type.width
    flat = cute.make_tensor(tensor.iterator, cute.make_layout(tensor.shape[:2], stride=(tensor.stride[0], 1)))
    box = cute.make_layout((1, width), stride=(width, 1))
    layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box)
    return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), flat, layout, (1, width)))


def tma_descriptor_address(atom: Any) -> Int64:
    """The address of an atom's TMA descriptor."""
    field = ir.Attribute.parse("#cute_nvgpu.atom_copy_field_tmaload<tma_descriptor_ptr>")
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    return nvgpu.atom_get_value(pointer, nvgpu.atom_make_exec_tma(atom._trait.value), field).toint()


def gathered_view(tensor: cute.Tensor, index: cute.Tensor | None, along_k: bool) -> cute.Tensor:
    """An operand (rows, k, 1) with the shape that the GEMM sees: one line per entry of the index tensor."""
    if index is None:
        return tensor
    rows, k, batch = tensor.shape
    shape = (rows, index.shape[0], batch) if along_k else (index.shape[0], k, batch)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.stride))


class GatherProducer:
    """The producer warps of gathered operands: ``sources`` for the tiles of a ``scheduler``, k tiles ``tile_k`` deep.

    GATHER_WARPS warps also load the ``scales`` of k tiles, if any. TMA loads complete on the full barrier. After
    ``cp.async``, each thread arrives on the full barrier with ``cp.async.mbarrier.arrive.noinc``, and consumers need a
    proxy fence. With ``arrive``, each warp instead waits for its copies, fences and arrives on another CTA's barrier,
    which ``cp.async`` cannot signal; that fence also waits for later copies.
    """

    def __init__(
        self,
        sources: tuple[CpAsyncGather, ...],
        pipeline: MbarrierPipeline,
        scheduler: TileScheduler,
        tile_k: int,
        arrive: Callable[[Any], None] | None,
        scales: ScaleFactorPipeline | None = None,
    ) -> None:
        self.sources, self.pipeline, self.scheduler, self.tile_k = sources, pipeline, scheduler, tile_k
        self.arrive, self.scales, self.uses_tma = arrive, scales, isinstance(sources[0], TmaRowGather)
        self.lookahead = min(max(pipeline.stages - 2, 1), MAX_IN_FLIGHT - 1)  # k tiles in flight behind a waited one

    @cute.jit
    def run(self, warp: Int32, tile_origin: cutlass.Constexpr[Callable[[Any], Any]]) -> None:
        """One of GATHER_WARPS producer warps. ``tile_origin``: the first row of A and of B of a work tile."""
        pipeline, tile_k = self.pipeline, const_expr(self.tile_k)
        self.start(warp)
        stage, phase, oldest, in_flight = Int32(0), Int32(1), Int32(0), Int32(0)
        cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            rows = tile_origin(work)
            # (1) Load the indices of the tile's rows.
            if work.k < work.k_end:
                self.begin_tile(rows, work)
            if const_expr(self.scales is not None):
                scale_batch = self.scales.begin_tile(rows, work)
            for k in cutlass.range(work.k_tiles(tile_k), unroll=1):
                # (2) Acquire a stage and issue the copies of a k tile and of its scale factors.
                cute.arch.mbarrier_wait(pipeline.empty + stage, phase)
                self.copy(rows, work, work.k + k * tile_k, stage)
                if const_expr(self.scales is not None):
                    self.scales.load_own_operand(warp, scale_batch, work.k + k * tile_k, stage)
                # (3) Signal the full barrier, directly or once the copies of an earlier k tile are complete.
                if const_expr(self.arrive is None):
                    if const_expr(not self.uses_tma):
                        cute.arch.cp_async_mbarrier_arrive_noinc(pipeline.full + stage)
                else:
                    cute.arch.cp_async_commit_group()
                    if in_flight == self.lookahead:
                        self.wait_and_fence(self.lookahead)
                        self.arrive(pipeline.full + oldest)
                        oldest, _ = advance(pipeline, oldest, Int32(0))
                    else:
                        in_flight += 1
                stage, phase = advance(pipeline, stage, phase)
            if const_expr(self.arrive is not None and self.sources[0].along_k):
                if (work.k >= work.k_end) & (in_flight > 0):
                    # An empty group issues no copies that would retire earlier ones, and the scheduler may not advance
                    # until their k tiles have been consumed.
                    self.wait_and_fence(0)
                    for _ in cutlass.range(in_flight, unroll=1):
                        self.arrive(pipeline.full + oldest)
                        oldest, _ = advance(pipeline, oldest, Int32(0))
                    in_flight = Int32(0)
            cursor = self.scheduler.advance_to_next_work(cursor)
        if const_expr(not self.uses_tma):
            self.wait_and_fence(0)
        if const_expr(self.arrive is not None):
            for _ in cutlass.range(in_flight, unroll=1):
                self.arrive(pipeline.full + oldest)
                oldest, _ = advance(pipeline, oldest, Int32(0))

    def start(self, warp: Int32) -> None:
        """Once per warp: what each lane copies."""
        for source in self.sources:
            source.start(warp)
        if self.scales is not None:
            self.scales.start()

    def begin_tile(self, rows: tuple[Int32, Int32], work: Any) -> None:
        """Before a tile's first k tile: loads the indices of its rows, or of its first k."""
        for source in self.sources:
            first, end = (work.k, work.k_end) if source.along_k else (rows[source.operand], work.end)
            source.load_indices(first, end)
            if not source.along_k:
                source.store_indices(first, end)

    def copy(self, rows: tuple[Int32, Int32], work: Any, k: Int32, stage: Int32) -> None:
        """Issues the copies of a k tile; if k is gathered, loads the indices of the next k tile meanwhile."""
        for source in self.sources:
            if source.along_k:
                source.store_indices(k, work.k_end)
            source.copy(rows[source.operand] if source.along_k else k, stage)
            if source.along_k:
                source.load_indices(k + self.tile_k, work.k_end)

    def wait_and_fence(self, pending: int) -> None:
        """Waits for all copies but those of the last ``pending`` k tiles, and makes them visible to the async proxy."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
