"""Attention on Hopper for few query rows and many keys, as when tokens are generated one after the other.

Such a call is bound by what it reads of K and V. So a tile's rows are those of all heads of Q that share a head of K,
which reads K and V once for them, and several CTAs split a sequence's keys: each has some of its blocks, whose result
and log-sum-exp it leaves in the workspace. A second kernel combines them, always in the same order.

Each sequence may have a length of its own, and its keys may lie in pages of a pool. The copy engine fetches a block
page by page. Pages are rows of one matrix, whose copies end where the sequence ends (:func:`sequences.ended`), so that
what lies beyond is read as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, select_
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import DecodeConfiguration, sequences
from cudnn_kernels.attention.around import region
from cudnn_kernels.attention.forward import Problem, partition
from cudnn_kernels.attention.mask import SharedMask
from cudnn_kernels.attention.sequences import turned
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind
from cudnn_kernels.sm90.attention_forward import GROUP, REGISTERS, ROWS, AttentionForward, Rings

WARP = 32
VECTOR = 8  # elements of 16 bytes
MANY = (1 << 31) - 1  # of such vectors: as far as the copy engine reaches


@dataclass
class Pages:
    """Where keys lie: vectors of 16 bytes from a page to the next, and from a row, in K and in V.

    Without a ``table``, every sequence has one page.
    """

    by_page: list
    by_row: list
    table: Any


class AttentionDecode(AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`."""

    def __init__(self, configuration: DecodeConfiguration) -> None:
        super().__init__(configuration)
        self.d = configuration
        self.size = min(configuration.page or self.tile_n, self.tile_n)  # keys that one copy fetches
        if self.tile_n % self.size or configuration.page % self.size or self.size % 8:
            raise ValueError(f"{configuration}: a page divides the tile's keys, or they divide it; both by 8")

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.d
        given = bind(c.slots(), arguments)
        scale, factor = self.scales(given)
        q, o = (sequences.matrix(given[x], False) for x in ("q", "o"))
        lse = sequences.rows(given["lse"], False)
        splits, batches, key_heads = given["splits"], q.shape[3], given["k"].shape[1]
        atoms, tensors, by_page, by_row = [], [], [], []
        for x, layout, width in zip("kv", self.layouts(1)[1:], (c.head, c.head_v), strict=True):
            pool = sequences.matrix(given[x], False)
            by_page.append(Int32(pool.stride[3] // VECTOR))
            by_row.append(Int32(pool.stride[0] // VECTOR))
            ended = sequences.ended(pool, MANY, VECTOR)
            box = (self.size, width) if const_expr(x == "k") else (width, self.size)
            part = cute.composition(cute.slice_(layout, (None, None, 0)), box)
            atom, tensor = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), ended if const_expr(x == "k") else turned(ended), part, box
            )
            atoms.append(atom)
            tensors.append(tensor)
        sizes = {"splits": Int64(splits), "b": Int64(batches), "hq": Int64(q.shape[2]), "sq": Int64(q.shape[0])}
        shape = (q.shape[0], q.shape[2], batches, splits)
        parts = region(self.d, given["workspace"], "parts", (c.head_v, *shape), sizes)
        log_sums = region(self.d, given["workspace"], "log_sums", shape, sizes)
        tiles = cute.ceil_div(q.shape[0] * (q.shape[2] // key_heads), self.tile_m)
        self.kernel(
            atoms, tensors, q, parts, log_sums, by_page, by_row, given.get("seqlen_k"), given.get("page_table"),
            given["k"].shape[2], tiles, key_heads, scale, factor, given["scale_output"], given["right"], given["left"],
        ).launch(
            grid=[splits, tiles * key_heads * batches, 1], block=[GROUP * (1 + self.groups), 1, 1],
            stream=given["stream"], min_blocks_per_mp=1,
        )  # fmt: skip
        blocks = cute.ceil_div(q.shape[0] * q.shape[2] * batches, GROUP // WARP)
        self.combine(parts, log_sums, o, lse, given.get("sink")).launch(
            grid=[blocks, 1, 1], block=[GROUP, 1, 1], stream=given["stream"]
        )

    @cute.kernel
    def kernel(
        self, atoms: list, tensors: list, q: cute.Tensor, parts: cute.Tensor, log_sums: cute.Tensor, by_page: list,
        by_row: list, lengths: Any, table: Any, room: Int32, tiles: Int32, key_heads: Int32, scale: Float32,
        cap_factor: Any, scale_output: Float32, right: Int32, left: Int32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        c = self.d
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        split, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in self.layouts(c.stages)
        )
        sQ = sQ[None, None, 0]
        rings = Rings(*(smem.allocate_array(cutlass.Int64, count) for count in (1, *[c.stages] * 4)))
        if thread == 0:
            cute.arch.mbarrier_init(rings.q_full, self.warps)
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(rings.k_full + stage, 1)
                cute.arch.mbarrier_init(rings.v_full + stage, 1)
                cute.arch.mbarrier_init(rings.k_empty + stage, self.warps)
                cute.arch.mbarrier_init(rings.v_empty + stage, self.warps)
            for i in cutlass.range_constexpr(2):
                cpasync.prefetch_descriptor(atoms[i])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        p = self.part(q, lengths, room, tiles, key_heads, right, left)
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            if warp_index == 0:
                self.fetch(atoms, tensors, sK, sV, rings, p, Pages(by_page, by_row, table), split)
        else:
            cute.arch.setmaxregister_increase(many)
            self.load(q, sQ, rings, p, group - 1, thread - GROUP * group)
            self.consume(
                None, parts, log_sums, None, sQ, sK, sV, None, rings, p, scale, cap_factor, scale_output, split,
                group - 1, thread - GROUP * group,
            )  # fmt: skip

    name(kernel, "cudnn_attention_decode_sm90")

    @cute.jit
    def part(
        self, q: cute.Tensor, lengths: Any, room: Int32, tiles: Int32, key_heads: Int32, right: Int32, left: Int32
    ) -> Problem:  # fmt: skip
        """What this CTA's rows are."""
        c = self.d
        _, index, _ = cute.arch.block_idx()
        key_head, batch = index // tiles % key_heads, index // tiles // key_heads
        keys, queries, share = Int32(room), Int32(q.shape[0]), q.shape[2] // key_heads
        if const_expr(lengths is not None):
            keys = Int32(lengths[batch])
        mask = SharedMask(
            queries * share, keys, keys - queries, right if const_expr(c.right) else None,
            left if const_expr(c.left) else None, share,
        )  # fmt: skip
        return Problem(index % tiles * self.tile_m, key_head * share, key_head, batch, Int32(0), Int32(0), mask)

    def blocks(self, p: Problem, rank: Any) -> tuple[Int32, Int32, Int32, Int32]:
        """The CTA's share of the blocks of keys that its rows need; ``rank`` is its number among those that split."""
        splits, _, _ = cute.arch.grid_dim()
        last = cutlass.min(p.row + self.tile_m, p.mask.queries) - 1
        begin, whole_begin, whole_end, end = p.mask.blocks(p.row, last, self.tile_n)
        each = cute.ceil_div(end - begin, splits)
        begin = cutlass.min(begin + rank * each, end)
        end = cutlass.min(begin + each, end)
        return begin, cutlass.max(whole_begin, begin), cutlass.min(whole_end, end), end

    def exists(self, p: Problem, rank: Any) -> Boolean:
        return p.row < p.mask.queries

    @cute.jit
    def load(
        self, q: cute.Tensor, sQ: cute.Tensor, rings: Rings, p: Problem, group: Int32, thread: Int32
    ) -> None:  # fmt: skip
        """A warpgroup: its rows of Q, and zeros where there are none."""
        columns = self.d.head // VECTOR
        vector = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(ROWS * columns // GROUP):
            place = i * GROUP + thread
            row, column = group * ROWS + place // columns, place % columns
            vector.fill(0.0)
            if p.row + row < p.mask.queries:
                query, head = (p.row + row) // p.mask.share, p.head + (p.row + row) % p.mask.share
                cute.autovec_copy(cute.local_tile(q[query, None, head, p.batch], (VECTOR,), (column,)), vector)
            cute.autovec_copy(vector, cute.local_tile(sQ, (1, VECTOR), (row, column)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if thread % WARP == 0:
            cute.arch.mbarrier_arrive(rings.q_full)

    @cute.jit
    def fetch(
        self, atoms: list, tensors: list, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, p: Problem, pages: Pages,
        split: Int32,
    ) -> None:  # fmt: skip
        """One warp: fetches K and V."""
        c = self.d
        begin, _, _, end = self.blocks(p, split)
        parts_k = cute.local_tile(sK, (self.size, c.head, c.stages), (None, 0, 0))
        parts_v = cute.local_tile(sV, (c.head_v, self.size, c.stages), (0, None, 0))
        for step in cutlass.range(end - begin + 1, unroll=1):
            if step < end - begin:
                stage, phase = step % c.stages, step // c.stages % 2
                cute.arch.mbarrier_wait(rings.k_empty + stage, phase ^ 1)
                self.fetch_block(
                    atoms[0], tensors[0], parts_k, rings.k_full, p, pages, 0, end - 1 - step, stage, c.head
                )
            if step > 0:
                stage, phase = (step - 1) % c.stages, (step - 1) // c.stages % 2
                cute.arch.mbarrier_wait(rings.v_empty + stage, phase ^ 1)
                self.fetch_block(atoms[1], tensors[1], parts_v, rings.v_full, p, pages, 1, end - step, stage, c.head_v)

    @cute.jit
    def fetch_block(
        self, atom: Any, tensor: cute.Tensor, parts: cute.Tensor, full: Any, p: Problem, pages: Pages, which: int,
        n: Int32, stage: Int32, width: int,
    ) -> None:  # fmt: skip
        """Starts the copies of a block of K or V."""
        count = self.tile_n // self.size
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.bytes(self.tile_n, width))
        number = p.batch
        if const_expr(pages.table is not None):  # a lane finds the page of a part
            key = n * self.tile_n + cute.arch.lane_idx() * self.size
            number = Int32(0)
            if (cute.arch.lane_idx() < count) & (key < p.mask.keys):
                number = Int32(pages.table[p.batch, key // self.d.page])
        for part in cutlass.range_constexpr(count):
            key, page = n * self.tile_n + part * self.size, number
            if const_expr(pages.table is not None):
                page = cute.arch.shuffle_sync(number, part)
            length = cutlass.max(cutlass.min(p.mask.keys - key, self.size), 0)
            after = (key % self.d.page if const_expr(self.d.page > 0) else key) + length
            end = page * pages.by_page[which] + after * pages.by_row[which]
            if const_expr(which == 0):
                found = sequences.ended_rows(tensor, p.key_head, end, length)
                tile = cute.local_tile(found, (self.size, width), (0, 0))
            else:
                found = turned(sequences.ended_rows(turned(tensor), p.key_head, end, length))
                tile = cute.local_tile(found, (width, self.size), (0, 0))
            to, of = partition(atom, 0, 1, parts, tile)
            cute.copy(atom, of, to[None, stage, part], tma_bar_ptr=full + stage)

    @cute.jit
    def store(
        self, mma: Any, acc: cute.Tensor, log_sums: cute.Tensor, atom_o: Any, mO: cute.Tensor,
        lse: Any, sO: Any, p: Problem, group: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """What a warpgroup's rows have of the CTA's keys."""
        split, _, _ = cute.arch.block_idx()
        pair = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            row = p.row + group * ROWS + self.score_rows.row(thread, slot)
            if row < p.mask.queries:
                query, head = row // p.mask.share, p.head + row % p.mask.share
                if thread % 4 == 0:
                    lse[query, head, p.batch, split] = log_sums[slot]
                order = self.score_rows.order(self.d.head_v, slot)
                for place in cutlass.range_constexpr(0, len(order), 2):
                    pair[0], pair[1] = acc[order[place]], acc[order[place + 1]]
                    column = self.score_rows.column(thread, place)
                    out = cute.local_tile(mO[None, query, head, p.batch, split], (2,), (column // 2,))
                    cute.autovec_copy(pair, out)

    @cute.kernel
    def combine(
        self, parts: cute.Tensor, log_sums: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: Any
    ) -> None:  # fmt: skip
        """A warp has a row: the mean of its parts, weighted by what exponentials add up to in each."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, index = thread % WARP, block * (GROUP // WARP) + thread // WARP
        queries, heads, batches, splits = log_sums.shape
        query, head, batch = index % queries, index // queries % heads, index // queries // heads
        if batch < batches:
            width = self.d.head_v // WARP
            largest, total = Float32(-Float32.inf), Float32(0.0)
            if const_expr(sink is not None):
                largest = Float32(sink[head])
            for split in cutlass.range(splits, unroll=1):
                largest = cute.arch.fmax(largest, log_sums[query, head, batch, split])
            shift = Float32(select_(largest == -Float32.inf, Float32(0.0), largest * LOG2_E))
            if const_expr(sink is not None):
                total = cute.math.exp2(sink[head] * LOG2_E - shift, fastmath=True)
            acc, part = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
            acc.fill(0.0)
            for split in cutlass.range(splits, unroll=1):
                weight = cute.math.exp2(log_sums[query, head, batch, split] * LOG2_E - shift, fastmath=True)
                cute.autovec_copy(cute.local_tile(parts[None, query, head, batch, split], (width,), (lane,)), part)
                total += weight
                for i in cutlass.range_constexpr(width):
                    acc[i] = acc[i] + weight * part[i]
            factor = Float32(select_(total == 0.0, Float32(0.0), 1.0 / total))
            rounded = cute.make_rmem_tensor(width, self.dtype)
            for i in cutlass.range_constexpr(width):
                rounded[i] = (acc[i] * factor).to(self.dtype)
            cute.autovec_copy(rounded, cute.local_tile(o[query, None, head, batch], (width,), (lane,)))
            if lane == 0:
                log_sum = (shift + cute.math.log2(total, fastmath=True)) / LOG2_E
                lse[query, head, batch] = Float32(select_(total == 0.0, -Float32.inf, log_sum))

    name(combine, "cudnn_attention_combine_sm90")
