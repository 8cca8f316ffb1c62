"""Attention for few query rows and many keys, as when tokens are generated one after the other, on any architecture.

Such a call is bound by what it reads of K and V. So a tile's rows are those of all heads of Q that share a head of K,
which reads K and V once for them, and several CTAs split a sequence's keys: each has some of its blocks, whose result
and log-sum-exp it leaves in the workspace. A second kernel combines them, always in the same order.

Each sequence may have a length of its own, and its keys may lie in pages of a pool. The copy engine fetches a block
page by page. Pages are rows of one matrix, whose copies end where the sequence ends (:func:`sequences.ended`), so that
what lies beyond is read as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, select_

from cudnn_kernels.attention import DecodeConfiguration, sequences
from cudnn_kernels.attention.around import regions_of
from cudnn_kernels.attention.forward import Call, Forward, K, Problem, Q, V
from cudnn_kernels.attention.mask import SharedMask
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.copy import fetch
from cudnn_kernels.pipeline.vectors import VECTOR

GROUP, WARP = 128, 32
MANY = (1 << 31) - 1  # the most steps that the copy engine counts


@dataclass
class Caches:
    """The sizes of a call, and where its keys lie."""

    queries: Int32  # rows
    share: Int32  # heads of Q that share one of K
    key_heads: Int32
    tiles: Int32  # of a head of K
    room: Int32  # keys that a sequence has memory for
    by_page: list  # steps from a page to the next, in K and in V
    by_row: list  # steps from a row to the next
    lengths: Any  # of sequences
    table: Any  # of pages; without one, each sequence is a page
    right: Int32  # ends of the window
    left: Int32


@dataclass
class CachedProblem(Problem):
    """What a tile belongs to, whose rows are of all heads of Q that share one of K."""

    caches: Caches


class SplitKeys(Forward):
    """What kernels for a :class:`DecodeConfiguration` have in common, to be mixed into a forward kernel.

    Threads load Q and store O, which is that of the CTA's keys.
    """

    c: DecodeConfiguration

    def __init__(self, configuration: DecodeConfiguration) -> None:
        super().__init__(configuration)
        size = self.size = min(configuration.page or self.tile_n, self.tile_n)  # keys that one copy fetches
        if self.tile_n % size or configuration.page % size or size % 8:
            raise ValueError(f"{configuration}: a page divides the tile's keys, or they divide it; both by 8")
        for which in (K, V):
            self.boxes[which] = (size, self.boxes[which][1])

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        q, o = (sequences.matrix(given[x], False) for x in ("q", "o"))
        splits, batches, key_heads = given["splits"], q.shape[3], given["k"].shape[1]
        copies, by_page, by_row = [], [], []
        for which in (K, V):
            pool = sequences.matrix(given["qkv"[which]], False)
            page, row = (sequences.pitch(pool.stride[i], self.dtype.width) for i in (3, 0))
            step = common_step(page, row)
            by_page.append(Int32(page // step))
            by_row.append(Int32(row // step))
            copies.append(self.copy(which, sequences.ended(pool, MANY, step)))
        sizes = {"splits": Int64(splits), "b": Int64(batches), "hq": Int64(q.shape[2]), "sq": Int64(q.shape[0])}
        shape = (q.shape[0], q.shape[2], batches, splits)
        regions = regions_of(c, given, {"parts": (c.head_v, *shape), "log_sums": shape}, sizes)
        parts, log_sums = regions["parts"], regions["log_sums"]
        share = q.shape[2] // key_heads
        tiles = cute.ceil_div(q.shape[0] * share, self.tile_m)
        caches = Caches(
            q.shape[0],
            share,
            key_heads,
            tiles,
            given["k"].shape[2],
            by_page,
            by_row,
            given.get("seqlen_k"),
            given.get("page_table"),
            given["right"],
            given["left"],
        )
        copies = [(None, q), *copies, (None, parts)]
        self.kernel(self.call(given, copies, log_sums, None, caches)).launch(
            grid=[tiles * key_heads * batches, splits, 1],
            block=[self.threads, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,
        )
        blocks = cute.ceil_div(q.shape[0] * q.shape[2] * batches, GROUP // WARP)
        self.combine(parts, log_sums, o, sequences.rows(given["lse"], False), given.get("sink")).launch(
            grid=[blocks, 1, 1], block=[GROUP, 1, 1], stream=given["stream"]
        )

    @cute.kernel
    def kernel(self, call: Call) -> None:
        """O and LSE of a CTA's keys."""
        self.body(call)

    name(kernel, "cudnn_attention_decode")

    @cute.jit
    def tile(self, work: Caches, turn: Any = None) -> tuple[Int32, Int32]:
        """A CTA's tile, and its head of K among all."""
        index, _, _ = cute.arch.block_idx()
        return index % work.tiles, index // work.tiles

    @cute.jit
    def problem(self, work: Caches, tile: Int32, index: Int32) -> CachedProblem:
        """The rows of a tile; ``index`` is the number of its head of K among all."""
        c = self.c
        key_head, batch = index % work.key_heads, index // work.key_heads
        keys, share = Int32(work.room), work.share
        if const_expr(work.lengths is not None):
            keys = Int32(work.lengths[batch])
        mask = SharedMask(
            work.queries * share,
            keys,
            Int32(0) if const_expr(c.top_left) else keys - work.queries,
            work.right if const_expr(c.right) else None,
            work.left if const_expr(c.left) else None,
            share,
        )
        return CachedProblem(tile * self.tile_m, key_head * share, key_head, batch, Int32(0), Int32(0), mask, work)

    def blocks(self, p: Problem) -> tuple[Int32, Int32, Int32, Int32]:
        """The CTA's share of the blocks of keys that its rows need."""
        _, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        begin, whole_begin, whole_end, end = super().blocks(p)
        each = cute.ceil_div(end - begin, splits)
        begin = cutlass.min(begin + split * each, end)
        end = cutlass.min(begin + each, end)
        return begin, cutlass.max(whole_begin, begin), cutlass.min(whole_end, end), end

    def place(self, p: CachedProblem, row: Int32) -> tuple[Any, ...]:
        """Of a row's LSE, and of its part of O: that of the CTA's keys."""
        _, split, _ = cute.arch.block_idx()
        return row // p.mask.share, p.head + row % p.mask.share, p.batch, split

    @cute.jit
    def load_queries(self, call: Call, rows: cute.Tensor, p: CachedProblem, first: Any, thread: Int32) -> None:
        """128 threads: rows of Q from the tile's ``first`` on, and zeros where there are none."""
        count, columns = cute.size(rows, mode=[0]), self.c.head // VECTOR
        vector = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(count * columns // GROUP):
            row, column = (i * GROUP + thread) // columns, (i * GROUP + thread) % columns
            mine = p.row + first + row
            vector.fill(0.0)
            if mine < p.mask.queries:
                query, head, batch, _ = self.place(p, mine)
                source = call.tensors[Q][query, None, head, batch]
                cute.autovec_copy(cute.local_tile(source, (VECTOR,), (column,)), vector)
            cute.autovec_copy(vector, cute.local_tile(rows, (1, VECTOR), (row, column)))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def fetch_keys(
        self, call: Call, buffer: cute.Tensor, full: Any, p: CachedProblem, which: int, n: Int32, piece: int = 0
    ) -> None:
        """Starts the copies of a ``piece`` of the columns of a block of K or V."""
        box, size, page_size, table = self.boxes[which], self.size, self.c.page, p.caches.table
        count, parts = self.tile_n // size, cute.local_tile(buffer, box, (None, 0))
        number = p.batch
        if const_expr(table is not None):  # a lane finds the page of a part
            key = n * self.tile_n + cute.arch.lane_idx() * size
            number = Int32(0)
            if (cute.arch.lane_idx() < count) & (key < p.mask.keys):
                number = Int32(table[p.batch, key // page_size])
        for part in cutlass.range_constexpr(count):
            key, page = n * self.tile_n + part * size, number
            if const_expr(table is not None):
                page = cute.arch.shuffle_sync(number, part)
            length = cutlass.max(cutlass.min(p.mask.keys - key, size), 0)
            after = (key % page_size if const_expr(page_size > 0) else key) + length
            end = page * p.caches.by_page[which - K] + after * p.caches.by_row[which - K]
            found = sequences.ended_rows(call.tensors[which], p.key_head, end, length)
            fetch(call.atoms[which], cute.local_tile(found, box, (0, piece)), parts[None, None, part], full)

    @cute.kernel
    def combine(self, parts: cute.Tensor, log_sums: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: Any) -> None:
        """A warp has a row: the mean of its parts, weighted by what exponentials add up to in each."""
        thread, block = here()
        lane, index = thread % WARP, block * (GROUP // WARP) + thread // WARP
        queries, heads, batches, splits = log_sums.shape
        query, head, batch = index % queries, index // queries % heads, index // queries // heads
        if batch < batches:
            width = self.c.head_v // WARP
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

    name(combine, "cudnn_attention_combine")


@cute.jit
def common_step(by_page: Int64, by_row: Int64) -> Int64:
    """The greatest common divisor of the strides of pages and of rows, in elements: mostly that of rows.

    The copy engine counts such steps. With steps of 16 bytes, a pool of more than 32 GiB would have more than 2^31.
    """
    step = cutlass.max(Int64(by_row), Int64(VECTOR))
    rest = Int64(by_page) % step
    while rest > 0:
        step, rest = rest, step % rest
    return cute.assume(step, divby=VECTOR)
