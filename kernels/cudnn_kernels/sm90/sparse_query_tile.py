"""NSA block-sparse attention on Hopper, query-stationary: CTAs own adjacent query rows, which select KV blocks by
lists.

A work tile fills the 64 MMA rows of each MMA warpgroup: with GQA, the heads of Q that share a head of K are MMA rows,
so 16 heads make 4 query rows per warpgroup. Adjacent rows mostly select the same blocks: the CTA
loads the union of their lists, each block once, with a bit mask of the rows that selected it.

Warps: warpgroup 0 is the producer. Its warps 1 to 3 read the rows' lists, 32 entries at a time, and build the union in
shared memory; warp 1 also issues the TMA loads of Q (and dO) and takes the next tile of the dynamic scheduler; warp 0
issues the TMA loads of the union's K and V. The others are MMA warpgroups: each skips the n_tiles that none of its rows
selected.

Pipelines: K and V share one pipeline of ``stages``; of each stage, shared memory also has the n_tile's index and its
row mask (index -1: end of the tile's list). Q has a full/empty mbarrier pair per MMA warpgroup. The union is
double-buffered. The scheduler pipeline broadcasts tile indices from the atomic counter.

Named barriers: LOADING_BARRIER (a union is complete and the previous one is loaded), UNION_BARRIER (the union warps),
WARPGROUP_BARRIER + i (MMA warpgroup i).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import seqlen_info
from cudnn_kernels.epilogue.fragment import upper_lane
from cudnn_kernels.kernel import atomic_inc, thread_block_idx
from cudnn_kernels.pipeline.barriers import elect_arrive
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance, init_mbarriers
from cudnn_kernels.pipeline.tma import partition_tile
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_forward import WGMMA_M, AttentionForward
from cudnn_kernels.sm90.sparse_block_union import (
    ENTRIES,
    BlockLists,
    BlockUnion,
    TileInfo,
    UnionStorage,
)
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

LOADING_BARRIER, WARPGROUP_BARRIER = 1, 3  # named barriers: of the producer warpgroup; MMA warpgroup i uses ID + i
NO_LIMIT = 1 << 30
SCHED_STAGES = 2  # stages of the scheduler pipeline
LOOKAHEAD = 2  # steps a warpgroup may look ahead while it holds one: fewer than the stages
NUM_REGS = {1: (56, 256), 2: (56, 224), 3: (32, 160)}  # setmaxnreg of producer and MMA threads, by MMA warpgroups


@dataclass
class PipelineStorage:
    """The K/V pipeline, and in shared memory for every box of a stage its n_tile (-1: end of the list) and its row
    mask.

    ``q_full`` and ``q_empty``: Q (and dO) of each MMA warpgroup. ``sched_pipeline`` and ``tile_indices``: the dynamic
    scheduler's. ``single_query``: per MMA warpgroup, whether it processes the tile's queries one by one.
    """

    kv_pipeline: MbarrierPipeline
    q_full: Any
    q_empty: Any
    n_tiles: cute.Tensor
    row_masks: cute.Tensor
    sched_pipeline: Any
    tile_indices: Any
    single_query: Any


@dataclass
class WarpgroupContext:
    """An MMA warpgroup's tensors, shared memory, row values, lists and pipelines."""

    tensors: Any
    smem: Any
    row_stats: Any
    block_lists: BlockLists
    storage: PipelineStorage
    scale: Float32
    wg_idx: Int32
    thread: Int32


@dataclass
class MainloopState:
    """What an MMA warpgroup computes a tile with.

    ``score_mmas``: the GEMMs that begin a step, (accumulator, A, B, k): S, and dP in the backward. The softmax replaces
    the first accumulator by P (or dS) with ``row_state``; converted to ``tOrP`` it is the A operand of acc += P V.
    ``is_window``: the n_tiles are those of the sliding window.
    """

    tile: TileInfo
    score_mmas: Any
    tOrP: cute.Tensor
    acc: cute.Tensor
    tOrV: Any
    acc_columns: int
    row_state: Any
    is_window: bool = False


class SparseQueryTile(BlockUnion, AttentionForward):
    """The common part of the kernels whose CTAs own adjacent query rows.

    A subclass has :meth:`compute_tile`, which calls :meth:`mainloop`, and :meth:`softmax_step`, whose ``is_later`` says
    that the tile had a step before. ``q_operands``: what is loaded of query rows. ``num_row_stats``: float32 values per
    MMA row in shared memory. :meth:`prologue` and :meth:`load_row_stats` are hooks. ``single_query``: warpgroups may
    process queries one by one, as :meth:`prefer_single_query` decides.
    """

    q_operands: tuple[str, ...] = ("q",)
    num_row_stats, single_query = 0, False

    def __init__(self, configuration: Any) -> None:
        super().__init__(configuration)
        s = self.s = configuration
        self.kv_box = min(s.block, self.tile_n)  # keys of a TMA box
        self.copies_per_block = s.block // self.kv_box
        self.boxes_per_step = self.tile_n // self.kv_box
        self.ctas_per_row = -(-s.group // WGMMA_M)  # CTAs that split a query row's heads
        self.rows_per_tile = self.num_mma_warpgroups * s.queries_per_warpgroup
        self.head_box = min(s.padded_group, 16)  # heads of Q of a TMA box
        self.lookahead = min(s.stages - 1, LOOKAHEAD)

    @property
    def head_dims(self) -> dict[str, int]:
        """The head dimension of each loaded tensor."""
        s = self.s
        widths = {"q": s.head_dim, "do": s.head_dim_v, "k": s.head_dim, "v": s.head_dim_v}
        return {x: widths[x] for x in (*self.q_operands, "k", "v")}

    def tma_loads(self, tma_atoms: Any, smem: Any) -> list[Any]:
        """Of each loaded tensor: TMA atom, coordinate tensor, shared memory, head dimension."""
        return [(*tma_atoms[x], smem[x], width) for x, width in self.head_dims.items()]

    def launch_query_tiles(
        self,
        kernel: Any,
        arguments: Mapping[str, Any],
        tensors: Any,
        scale: Float32,
        semaphore_memory: Any = None,
        window: Any = None,
    ) -> None:
        """Launches a kernel of :meth:`kernel_body`. ``semaphore_memory``: the dynamic scheduler's counter."""
        cu_seqlens = arguments["cum_seqlen_q"]
        if const_expr(semaphore_memory is not None):
            semaphore_memory = self.reset_tile_counter(semaphore_memory.align(16), arguments["stream"])
        tiles_per_head = (
            seqlen_info.num_blocks(arguments["q"].shape[0], cu_seqlens.shape[0] - 1, self.rows_per_tile, True)
            * self.ctas_per_row
        )
        block_lists = BlockLists(
            arguments["block_indices"],
            arguments.get("block_counts"),
            cu_seqlens,
            tiles_per_head,
            semaphore_memory,
            window,
        )
        kernel(self.make_tma_atoms(arguments, self.head_box, self.kv_box), tensors, block_lists, scale).launch(
            grid=[cutlass.min(tiles_per_head * self.s.key_heads, arguments["num_sms"]), 1, 1],
            block=[WARPGROUP_SIZE * (1 + self.num_mma_warpgroups), 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )

    @cute.jit
    def kernel_body(self, tma_atoms: Any, tensors: Any, block_lists: BlockLists, scale: Float32) -> None:
        """Allocates shared memory and dispatches the warps to their roles. ``tensors`` are the subclass's."""
        s, allocator = self.s, SmemAllocator()
        thread, cta = thread_block_idx()
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        shapes = {x: (self.tile_m, width, 1) for x, width in self.head_dims.items()}
        shapes |= {x: (self.tile_n, self.head_dims[x], s.stages) for x in ("k", "v")}
        smem = self.allocate_smem(allocator, shapes | self.extra_smem())
        row_stats = None
        if const_expr(self.num_row_stats):
            layout = cute.make_layout((WGMMA_M, self.num_row_stats, self.num_mma_warpgroups))
            row_stats = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
        union, storage = self.allocate_union(allocator), self.allocate_pipelines(allocator, block_lists)
        self.init_barriers(storage, thread)
        self.prologue(tensors, cta, thread)
        num_regs_load, num_regs_mma = NUM_REGS[self.num_mma_warpgroups]
        if wg_idx == 0:
            cute.arch.setmaxregister_decrease(num_regs_load)
            self.load_warpgroup(tma_atoms, smem, block_lists, union, storage, thread)
        else:
            cute.arch.setmaxregister_increase(num_regs_mma)
            wg_stats = row_stats[None, None, wg_idx - 1] if const_expr(self.num_row_stats) else None
            ctx = WarpgroupContext(
                tensors, smem, wg_stats, block_lists, storage, scale, wg_idx - 1, thread - WARPGROUP_SIZE * wg_idx
            )
            self.mma_warpgroup(ctx)

    def extra_smem(self) -> dict[str, tuple[int, int, int]]:
        """More operands in shared memory by name: (rows, columns, stages)."""
        return {}

    def prologue(self, tensors: Any, cta: Int32, thread: Int32) -> None:
        """Hook before the warps take their roles."""

    @cute.jit
    def tile_info(self, tile_idx: Int32, block_lists: BlockLists) -> TileInfo:
        """The ``tile_idx``-th tile. All tiles of a head of K come before the next head's, so that its K and V stay in
        L2.
        """
        s, tiles_per_head, cu_seqlens = self.s, block_lists.tiles_per_head, block_lists.cu_seqlens
        kv_head = tile_idx // tiles_per_head
        m_tile = tile_idx % tiles_per_head // self.ctas_per_row
        head_slice = tile_idx % self.ctas_per_row
        seq_idx, tile_in_seq = seqlen_info.find_block(cu_seqlens, m_tile, self.rows_per_tile)
        offset_k = cu_seqlens[cutlass.max(seq_idx, 0)]
        seqlen_k, seq_row = cu_seqlens[seq_idx + 1] - offset_k, tile_in_seq * self.rows_per_tile
        num_rows = Int32(select_(seq_idx >= 0, cutlass.min(seqlen_k - seq_row, self.rows_per_tile), Int32(0)))
        num_heads = cutlass.min(s.group - head_slice * WGMMA_M, WGMMA_M)
        return TileInfo(
            offset_k + seq_row,
            num_rows,
            seq_idx,
            seq_row,
            kv_head,
            kv_head * s.group + head_slice * WGMMA_M,
            num_heads,
            offset_k,
            seqlen_k,
        )

    def allocate_pipelines(self, smem: Any, block_lists: BlockLists) -> PipelineStorage:
        """Shared memory of the pipelines."""
        stages = self.s.stages
        kv_pipeline = MbarrierPipeline.allocate(smem, stages)
        q_mbarriers = (smem.allocate_array(cutlass.Int64, self.num_mma_warpgroups) for _ in range(2))
        n_tiles_and_masks = (
            smem.allocate_tensor(Int32, cute.make_layout((self.boxes_per_step, stages)), byte_alignment=16)
            for _ in range(2)
        )
        sched_pipeline, tile_indices = None, None
        if const_expr(block_lists.tile_count_semaphore is not None):
            sched_pipeline = MbarrierPipeline.allocate(smem, SCHED_STAGES)
            tile_indices = smem.allocate_tensor(Int32, cute.make_layout(SCHED_STAGES), byte_alignment=16)
        single_query = None
        if const_expr(self.single_query):
            single_query = smem.allocate_tensor(Int32, cute.make_layout(self.num_mma_warpgroups), byte_alignment=16)
        return PipelineStorage(
            kv_pipeline, *q_mbarriers, *n_tiles_and_masks, sched_pipeline, tile_indices, single_query
        )

    @cute.jit
    def init_barriers(self, storage: PipelineStorage, thread: Int32) -> None:
        """Initializes the mbarriers."""
        if thread == 0:
            for wg_idx in cutlass.range_constexpr(self.num_mma_warpgroups):
                cute.arch.mbarrier_init(storage.q_full + wg_idx, 1)
                cute.arch.mbarrier_init(storage.q_empty + wg_idx, WARPGROUP_SIZE // WARP_SIZE)
            init_mbarriers(storage.kv_pipeline, 1, self.num_mma_warps)
            if const_expr(storage.sched_pipeline is not None):
                init_mbarriers(storage.sched_pipeline, 1, self.num_mma_warps + WARPGROUP_SIZE // WARP_SIZE)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    def load_q_heads(
        self, tma_atom: Any, tensor: cute.Tensor, sQ: cute.Tensor, head_dim: int, mbar: Any, tile: TileInfo, wg_idx: int
    ) -> None:
        """Issues the TMA loads of a warpgroup's heads of Q, or dO, (heads, head_dim, rows); rows that do not exist are
        0.
        """
        box = (self.head_box, head_dim)
        source = cute.local_tile(cute.domain_offset((tile.head_begin, 0, 0), tensor), box, (None, 0, None))
        tQsQ, tQgQ = partition_tile(tma_atom, cute.local_tile(sQ, box, (None, 0)), source)
        for row in range(0, WGMMA_M, self.head_box):
            query, head = wg_idx * self.s.queries_per_warpgroup + row // self.s.padded_group, row % self.s.padded_group
            exists = (
                (query < tile.num_rows)
                & (head < tile.num_heads)
                & (row // self.s.padded_group < self.s.queries_per_warpgroup)
            )
            # A head out of range: TMA fills zeros.
            head_box_idx = Int32(select_(exists, Int32(head // self.head_box), Int32(self.s.heads)))
            q_row = tile.row + cutlass.min(query, tile.num_rows - 1)
            smem_box = (wg_idx * WGMMA_M + row) // self.head_box
            cute.copy(tma_atom, tQgQ[None, head_box_idx, q_row], tQsQ[None, smem_box], tma_bar_ptr=mbar)

    def sync_load_warpgroup(self) -> None:
        """A union is complete, and the previous one is loaded."""
        cute.arch.barrier(barrier_id=LOADING_BARRIER, number_of_threads=WARPGROUP_SIZE)

    @cute.jit
    def load_warpgroup(
        self,
        tma_atoms: Any,
        smem: Any,
        block_lists: BlockLists,
        union: UnionStorage,
        storage: PipelineStorage,
        thread: Int32,
    ) -> None:
        """Producer warpgroup: all tiles of the CTA."""
        tile_idx, _, _ = cute.arch.block_idx()
        list_len = cutlass.max(block_lists.indices.shape[2], 1)
        # Counts of steps, of tiles with rows, of unions, and of tiles.
        steps_done, tiles_done, unions_done, iteration = Int32(0), Int32(0), Int32(0), Int32(0)
        while tile_idx < block_lists.tiles_per_head * self.s.key_heads:
            tile = self.tile_info(tile_idx, block_lists)
            if tile.num_rows > 0:
                loads = self.tma_loads(tma_atoms, smem)
                q_loads, kv_copies = loads[:-2], [self.kv_copy(*load, tile) for load in loads[-2:]]
                for first_entry in cutlass.range(0, list_len, ENTRIES, unroll=1):
                    # (1) Warps 1 to 3 build a union of 32 entries per row, while warp 0 loads the previous one.
                    if thread >= WARP_SIZE:
                        self.build_union(first_entry, block_lists, union, unions_done, tile, thread - WARP_SIZE)
                    self.sync_load_warpgroup()
                    # (2) Warp 0 loads K and V of the union, after those of the window; warp 1 loads Q.
                    if thread < WARP_SIZE:
                        if const_expr(block_lists.window is not None):
                            if first_entry == 0:
                                steps_done = self.load_window(kv_copies, storage, tile, steps_done, block_lists.window)
                        steps_done = self.load_union(kv_copies, union, storage, tile, steps_done, unions_done)
                    elif (thread // WARP_SIZE == 1) & (first_entry == 0):
                        self.load_q(q_loads, storage, tile, tiles_done, union, unions_done)
                    unions_done += 1
                # (3) The end marker.
                if thread < WARP_SIZE:
                    self.signal_end(storage, steps_done)
                steps_done += 1
                tiles_done += 1
            # (4) The next tile.
            if const_expr(block_lists.tile_count_semaphore is not None):
                if thread // WARP_SIZE == 1:
                    self.schedule_tile(block_lists, storage, iteration)
            tile_idx = self.advance_to_next_work(block_lists, storage, tile_idx, iteration)
            iteration += 1

    @cute.jit
    def schedule_tile(self, block_lists: BlockLists, storage: PipelineStorage, iteration: Int32) -> None:
        """One warp takes the next tile from the atomic counter and broadcasts it. A CTA's first tile is static."""
        stage, phase = iteration % SCHED_STAGES, iteration // SCHED_STAGES % 2
        sched_pipeline, tile_indices = storage.sched_pipeline, storage.tile_indices
        num_ctas, _, _ = cute.arch.grid_dim()
        cute.arch.mbarrier_wait(sched_pipeline.empty + stage, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            tile_indices[stage] = num_ctas + atomic_inc(block_lists.tile_count_semaphore)
            cute.arch.mbarrier_arrive(sched_pipeline.full + stage)

    @cute.jit
    def advance_to_next_work(
        self, block_lists: BlockLists, storage: PipelineStorage, tile_idx: Int32, iteration: Int32
    ) -> Int32:
        """The index of the CTA's next tile."""
        num_ctas, _, _ = cute.arch.grid_dim()
        next_idx = tile_idx + num_ctas
        if const_expr(block_lists.tile_count_semaphore is not None):
            stage = iteration % SCHED_STAGES
            phase = iteration // SCHED_STAGES % 2
            sched_pipeline = storage.sched_pipeline
            cute.arch.mbarrier_wait(sched_pipeline.full + stage, phase)
            next_idx = cute.arch.make_warp_uniform(storage.tile_indices[stage])
            self.consumer_release(sched_pipeline.empty + stage)
        return next_idx

    @cute.jit
    def load_q(
        self,
        q_loads: Any,
        storage: PipelineStorage,
        tile: TileInfo,
        tiles_done: Int32,
        union: UnionStorage,
        union_idx: Int32,
    ) -> None:
        """One warp loads Q, and dO, of each MMA warpgroup once that has released the previous tile's. ``union_idx``:
        the tile's first union.
        """
        head_dims = sum(head_dim for *_, head_dim in q_loads)
        for wg_idx in cutlass.range_constexpr(self.num_mma_warpgroups):
            mbar = storage.q_full + wg_idx
            cute.arch.mbarrier_wait(storage.q_empty + wg_idx, tiles_done % 2 ^ 1)
            single_query, flags = None, storage.single_query
            if const_expr(self.single_query):
                single_query = self.prefer_single_query(union, union_idx % 2, wg_idx)
            with cute.arch.elect_one():
                if const_expr(self.single_query):
                    flags[wg_idx] = single_query
                cute.arch.mbarrier_arrive_and_expect_tx(mbar, self.tile_bytes(WGMMA_M, head_dims))
            for atom, tensor, sQ, head_dim in q_loads:
                self.load_q_heads(atom, tensor, sQ[None, None, 0], head_dim, mbar, tile, wg_idx)

    def prefer_single_query(self, union: UnionStorage, union_stage: Int32, wg_idx: int) -> Any:
        """Whether a warpgroup's rows seldom share blocks, as an integer."""

    @cute.jit
    def load_union(
        self,
        kv_copies: Any,
        union_storage: UnionStorage,
        storage: PipelineStorage,
        tile: TileInfo,
        steps_done: Int32,
        union_idx: Int32,
    ) -> Int32:
        """One warp loads the blocks of a union; the number of steps done after it."""
        union_stage = union_idx % 2
        count = Int32(union_storage.counts[union_stage])
        union = (union_storage.blocks[None, union_stage], union_storage.masks[None, union_stage])
        steps_end = steps_done + cute.ceil_div(count, self.boxes_per_step) * self.copies_per_block
        for step in cutlass.range(steps_end - steps_done, unroll=1):
            n_tiles, row_masks = (cute.make_rmem_tensor(self.boxes_per_step, Int32) for _ in range(2))
            for box_idx in cutlass.range_constexpr(self.boxes_per_step):
                position = step // self.copies_per_block * self.boxes_per_step + box_idx
                n_tiles[box_idx], row_masks[box_idx] = self.oob_tile(tile), Int32(0)
                if position < count:
                    n_tiles[box_idx] = union[0][position] * self.copies_per_block + step % self.copies_per_block
                    row_masks[box_idx] = union[1][position]
            self.load_step(kv_copies, steps_done + step, n_tiles, row_masks, storage)
        return steps_end

    @cute.jit
    def load_window(
        self, kv_copies: Any, storage: PipelineStorage, tile: TileInfo, steps_done: Int32, window: Int32
    ) -> Int32:
        """One warp loads the sliding window's n_tiles and their end marker; the number of steps done after it."""
        first_n_tile = cutlass.max(tile.seq_row + 1 - window, 0) // self.kv_box
        num_tiles = (tile.seq_row + tile.num_rows - 1) // self.kv_box + 1 - first_n_tile
        for step in cutlass.range(cute.ceil_div(num_tiles, self.boxes_per_step), unroll=1):
            n_tiles, row_masks = (cute.make_rmem_tensor(self.boxes_per_step, Int32) for _ in range(2))
            for box_idx in cutlass.range_constexpr(self.boxes_per_step):
                tile_in_window = step * self.boxes_per_step + box_idx
                key_begin = (
                    first_n_tile + tile_in_window
                ) * self.kv_box - tile.seq_row  # of keys, counted from the tile's first row
                row_begin = cutlass.max(key_begin, 0)
                row_end = cutlass.min(key_begin + self.kv_box + window - 1, tile.num_rows)
                exists = (tile_in_window < num_tiles) & (row_begin < row_end)
                n_tiles[box_idx] = Int32(select_(exists, first_n_tile + tile_in_window, self.oob_tile(tile)))
                row_masks[box_idx] = Int32(select_(exists, (1 << row_end) - (1 << row_begin), Int32(0)))
            self.load_step(kv_copies, steps_done, n_tiles, row_masks, storage)
            steps_done += 1
        self.signal_end(storage, steps_done)
        return steps_done + 1

    def oob_tile(self, tile: TileInfo) -> Int32:
        """An n_tile out of range, which TMA fills with zeros."""
        return cute.ceil_div(tile.seqlen_k, self.kv_box)

    @cute.jit
    def signal_end(self, storage: PipelineStorage, steps_done: Int32) -> None:
        """One warp signals the end of a tile's list: n_tile -1."""
        stage = steps_done % self.s.stages
        phase = steps_done // self.s.stages % 2
        n_tiles = storage.n_tiles
        row_masks = storage.row_masks
        cute.arch.mbarrier_wait(storage.kv_pipeline.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            for box_idx in cutlass.range_constexpr(self.boxes_per_step):
                n_tiles[box_idx, stage], row_masks[box_idx, stage] = Int32(-1), Int32(-1)
            cute.arch.mbarrier_arrive(storage.kv_pipeline.full + stage)

    @cute.jit
    def load_step(
        self, kv_copies: Any, step_idx: Int32, n_tiles: cute.Tensor, row_masks: cute.Tensor, storage: PipelineStorage
    ) -> None:
        """One warp loads the boxes of a step, with their n_tiles and row masks."""
        stage, phase = step_idx % self.s.stages, step_idx // self.s.stages % 2
        mbar, smem_n_tiles, smem_masks = storage.kv_pipeline.full + stage, storage.n_tiles, storage.row_masks
        cute.arch.mbarrier_wait(storage.kv_pipeline.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            for box_idx in cutlass.range_constexpr(self.boxes_per_step):
                smem_n_tiles[box_idx, stage], smem_masks[box_idx, stage] = n_tiles[box_idx], row_masks[box_idx]
            cute.arch.mbarrier_arrive_and_expect_tx(
                mbar, self.tile_bytes(self.tile_n, self.s.head_dim + self.s.head_dim_v)
            )
        for box_idx in cutlass.range_constexpr(self.boxes_per_step):
            for tma_atom, tKsK, tKgK in kv_copies:
                cute.copy(tma_atom, tKgK[None, n_tiles[box_idx]], tKsK[None, stage, box_idx], tma_bar_ptr=mbar)

    def kv_copy(
        self, tma_atom: Any, tensor: cute.Tensor, smem_stages: cute.Tensor, head_dim: int, tile: TileInfo
    ) -> Any:
        """TMA atom of K or V with the partitioned stages and n_tiles."""
        tma_tensor = seqlen_info.tma_rows(tensor, tile.kv_head, Int32(0), tile.offset_k, tile.seqlen_k)
        box, all_cols = (self.kv_box, head_dim), (None, 0)
        smem_boxes = cute.local_tile(smem_stages, (*box, self.s.stages), (*all_cols, 0))
        return tma_atom, *partition_tile(tma_atom, smem_boxes, cute.local_tile(tma_tensor, box, all_cols))

    @cute.jit
    def mma_warpgroup(self, ctx: WarpgroupContext) -> None:
        """An MMA warpgroup: all tiles of the CTA."""
        tile_idx, _, _ = cute.arch.block_idx()
        stage, phase, tiles_done, iteration = Int32(0), Int32(0), Int32(0), Int32(0)
        while tile_idx < ctx.block_lists.tiles_per_head * self.s.key_heads:
            tile = self.tile_info(tile_idx, ctx.block_lists)
            if tile.num_rows > 0:
                self.load_row_stats(ctx, tile)
                cute.arch.mbarrier_wait(ctx.storage.q_full + ctx.wg_idx, tiles_done % 2)
                tiles_done += 1
                stage, phase = self.compute_tile(ctx, tile_idx, tile, stage, phase)
            tile_idx = self.advance_to_next_work(ctx.block_lists, ctx.storage, tile_idx, iteration)
            iteration += 1

    def load_row_stats(self, ctx: WarpgroupContext, tile: TileInfo) -> None:
        """Hook before Q is waited for."""

    def issue_scores(self, state: MainloopState, stage: Int32) -> None:
        """Issues a step's first GEMMs: S = Q K^T, and dP = dO V^T in the backward."""
        for acc, tArA, tBrB, k_extent in state.score_mmas:
            self.mma_ss(acc, tArA, tBrB, self.tile_n, k_extent, stage)

    def issue_acc(self, state: MainloopState, stage: Int32) -> None:
        """Issues acc += P V, or dS K."""
        self.mma_rs(state.acc, state.tOrP, state.tOrV, state.acc_columns, self.tile_n, stage)

    @cute.jit
    def convert_p(self, state: MainloopState, any_visible: Boolean) -> None:
        """Converts P (or dS) to an A operand; 0 if no row of the warp sees a key."""
        tOrP, acc_P = state.tOrP, state.score_mmas[0][0]
        if any_visible:
            tOrP.store(acc_P.load().to(self.dtype))
        else:
            tOrP.fill(0.0)

    @cute.jit
    def mainloop(self, ctx: WarpgroupContext, state: MainloopState, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """All steps of a tile, from a stage and its phase on; the stage of the end marker.

        Software pipelining: the second GEMM of a step overlaps S and softmax of the warpgroup's next step, if it is
        close enough.
        """
        kv_pipeline = ctx.storage.kv_pipeline
        # (1) Find the first n_tile that a row of the warpgroup selected.
        stage, phase, has_step = self.next_step(ctx, stage, phase)
        while has_step:
            # (2) S = Q K^T and its softmax; no GEMM overlaps it.
            self.issue_scores(state, stage)
            visible = self.visible_spans(ctx, state, stage)
            self.wait_mma(0)
            self.softmax_step(ctx, state, stage, visible, False)
            self.convert_p(state, visible[1])
            prev_stage = stage
            # (3) The next selected n_tile, if it is within the lookahead: the previous one is held until then.
            stage, phase, has_next = self.next_step(ctx, *advance(kv_pipeline, stage, phase), self.lookahead)
            while has_next:
                # (4) Issue S = Q K^T of this n_tile and O += P V of the previous one.
                self.issue_scores(state, stage)
                self.issue_acc(state, prev_stage)
                visible = self.visible_spans(ctx, state, stage)
                # (5) Softmax of S while O += P V runs; then release the previous stage.
                self.wait_mma(1)
                self.softmax_step(ctx, state, stage, visible, True)
                self.wait_mma(0)
                self.consumer_release(kv_pipeline.empty + prev_stage)
                self.convert_p(state, visible[1])
                prev_stage = stage
                stage, phase, has_next = self.next_step(ctx, *advance(kv_pipeline, stage, phase), self.lookahead)
            # (6) The last O += P V.
            self.issue_acc(state, prev_stage)
            self.wait_mma(0)
            self.consumer_release(kv_pipeline.empty + prev_stage)
            stage, phase, has_step = self.next_step(ctx, stage, phase)
        # (7) Release the end marker, and Q.
        self.consumer_release(kv_pipeline.empty + stage)
        if const_expr(not state.is_window):
            self.consumer_release(ctx.storage.q_empty + ctx.wg_idx)
        return stage, phase

    @cute.jit
    def next_step(
        self, ctx: WarpgroupContext, stage: Int32, phase: Int32, max_steps: cutlass.Constexpr[int] = NO_LIMIT
    ) -> tuple[Int32, Int32, Boolean]:
        """The warpgroup's next step that any of its rows selected, and whether there is one (or the list ended).

        Releases the steps before it. Looks at ``max_steps`` steps: if none was selected, the last one is not released.
        """
        storage, budget = ctx.storage, Int32(max_steps - 1)
        take = self.wait_step(storage, stage, phase, ctx.wg_idx)
        while ~take & (budget > 0):
            self.consumer_release(storage.kv_pipeline.empty + stage)
            stage, phase = advance(storage.kv_pipeline, stage, phase)
            take = self.wait_step(storage, stage, phase, ctx.wg_idx)
            budget -= 1
        return stage, phase, take & (cute.arch.make_warp_uniform(storage.n_tiles[0, stage]) >= 0)

    def wait_step(self, storage: PipelineStorage, stage: Int32, phase: Int32, wg_idx: Int32) -> Boolean:
        """Waits for a step; whether a row of the warpgroup selected any of its boxes, or it is the end marker."""
        cute.arch.mbarrier_wait(storage.kv_pipeline.full + stage, phase)
        row_mask = Int32(0)
        for box_idx in range(self.boxes_per_step):
            row_mask = row_mask | storage.row_masks[box_idx, stage]
        return self.selected_by_warpgroup(row_mask, wg_idx)

    def selected_by_warpgroup(self, row_mask: Int32, wg_idx: Int32) -> Boolean:
        """Whether a row mask has rows of a warpgroup."""
        wg_rows = (1 << self.s.queries_per_warpgroup) - 1
        return cute.arch.make_warp_uniform(row_mask >> (wg_idx * self.s.queries_per_warpgroup)) & wg_rows != 0

    def visible_spans(self, ctx: WarpgroupContext, state: MainloopState, stage: Int32) -> tuple[Any, Boolean, Boolean]:
        """For each of a thread's rows and each box, the first visible key (None: 0) and the end of visible keys;
        whether any row of the warp sees a key, and whether the thread's rows see all.
        """
        spans_of_slots, min_end, max_end = [], Int32(self.kv_box), Int32(0)
        for slot in range(2):
            q_row = (
                ctx.wg_idx * self.s.queries_per_warpgroup + self.score_rows.row(ctx.thread, slot) // self.s.padded_group
            )
            spans = []
            for box_idx in range(self.boxes_per_step):
                selected, span_begin = (ctx.storage.row_masks[box_idx, stage] >> q_row) & 1, None
                box_begin = ctx.storage.n_tiles[box_idx, stage] * self.kv_box
                span_end = (
                    state.tile.seq_row + q_row + 1 if state.is_window else self.num_visible(state.tile, q_row)
                ) - box_begin
                span_end, full_end = Int32(select_(selected == 1, span_end, Int32(0))), None
                if state.is_window:
                    span_begin = span_end - ctx.block_lists.window
                    full_end = Int32(select_(span_begin > 0, Int32(0), span_end))
                min_end = cutlass.min(min_end, span_end if full_end is None else full_end)
                max_end = cutlass.max(max_end, span_end)
                spans.append((span_begin, span_end))
            spans_of_slots.append(spans)
        return spans_of_slots, cute.arch.vote_any_sync(max_end > 0), min_end >= self.kv_box

    @cute.jit
    def apply_selection_mask(self, acc_S: cute.Tensor, spans: Any, all_visible: Boolean, thread: Int32) -> None:
        """Sets scores of keys that a row did not select or does not see to -inf."""
        if ~all_visible:
            for slot in cutlass.range_constexpr(2):
                for position, i in enumerate(self.score_rows.order(self.tile_n, slot)):
                    box_idx = position // 2 * 8 // self.kv_box  # four threads share eight adjacent columns
                    column = self.score_rows.column(thread, position) - box_idx * self.kv_box
                    span_begin, span_end = spans[slot][box_idx]
                    visible = column < span_end
                    if const_expr(span_begin is not None):
                        visible = visible & (column >= span_begin)
                    acc_S[i] = Float32(select_(visible, acc_S[i], -Float32.inf))

    def sync_warpgroup(self, wg_idx: Int32) -> None:
        """Synchronizes an MMA warpgroup."""
        cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + wg_idx, number_of_threads=WARPGROUP_SIZE)

    @cute.jit
    def consumer_release(self, empty: Any) -> None:
        """A warp releases a stage."""
        cute.arch.sync_warp()
        elect_arrive(empty)

    def row_coord(self, tile: TileInfo, wg_idx: Int32, mma_row: Int32) -> tuple[Int32, Int32, Boolean]:
        """The query row and the head of an MMA row, and whether they exist."""
        q_in_wg, head = mma_row // self.s.padded_group, mma_row % self.s.padded_group
        row = wg_idx * self.s.queries_per_warpgroup + q_in_wg
        exists = (row < tile.num_rows) & (head < tile.num_heads) & (q_in_wg < self.s.queries_per_warpgroup)
        return tile.row + row, tile.head_begin + head, exists

    def vector_columns(self, thread: Int32) -> list[Any]:
        """The vectors of a row that a thread has after :meth:`transpose_quad`."""
        return [4 * i + thread % 4 for i in range(self.s.head_dim_v // (4 * VECTOR))]

    def transpose_quad(self, acc: cute.Tensor, slot: int, scale: Float32) -> cute.Tensor:
        """A row's values, scaled and converted: shuffles among the four threads of a row give each 8 adjacent values of
        every 32, (8, 32s), instead of every fourth pair, for 16-byte stores.
        """
        order = self.score_rows.order(self.s.head_dim_v, slot)
        converted = cute.make_rmem_tensor((VECTOR, len(order) // VECTOR), self.dtype)
        for position, i in enumerate(order):
            converted[position] = (acc[i] * scale).to(self.dtype)
        pairs = cute.recast_tensor(converted, Int32)
        for group_begin in range(0, len(order) // 2, 4):
            for distance in (1, 2):
                upper = upper_lane(distance)
                for lower in range(group_begin, group_begin + 4):
                    if not lower & distance:
                        a, b = pairs[lower], pairs[lower + distance]
                        received = cute.arch.shuffle_sync_bfly(Int32(select_(upper, a, b)), distance)
                        pairs[lower] = Int32(select_(upper, received, a))
                        pairs[lower + distance] = Int32(select_(upper, b, received))
        return converted
