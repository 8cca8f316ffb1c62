"""Native sparse attention of the newest row of each sequence, from caches of keys and values: one kernel for all of it.

A CTA has a sequence and a head of K. It attends to the compressed keys, finds from their probabilities the blocks that
the row chooses, attends to these and to the newest keys, and adds up the three with their gates. A warp takes 16 keys
at a time, each warp others, and keeps its own softmax; at the end of a branch they are put together in shared memory.

What is read comes straight from memory into the fragments of warp-level products, whose rows are the heads that share
the head of K. Dimensions that a product adds up may come in any order: so a thread has eight elements of 16 bits next
to each other, of Q and K along a head. Of V it has them across columns of the product: tile t of a half has the columns
t, 8 + t, 16 + t, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.attention.sparse import ALWAYS, NEWEST, SparseDecodeConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import name

WARP = 32
WARPS = 8
THREADS = WARP * WARPS
HEADS = 16  # rows of a product
KEYS = 16  # that a warp takes at a time
VECTOR = 8  # elements of 16 bits that a thread loads at once
NONE = 1 << 30  # behind all blocks


class Decode(Kernel):
    """The kernel for one :class:`SparseDecodeConfiguration`."""

    def __init__(self, configuration: SparseDecodeConfiguration) -> None:
        super().__init__(configuration)
        self.dtype = DTYPES[configuration.dtype]

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        caches = tuple(given[x] for x in ("k", "v", "compressed_k", "compressed_v"))
        self.kernel(
            given["q"],
            caches,
            given["gates"],
            given["lengths"],
            given["compressed_lengths"],
            given["probabilities"],
            given["o"],
            given["scale_softmax"] * LOG2_E,
        ).launch(grid=[c.key_heads, given["q"].shape[0], 1], block=[THREADS, 1, 1], stream=given["stream"])

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        caches: Any,
        gates: cute.Tensor,
        lengths: cute.Tensor,
        compressed_lengths: cute.Tensor,
        probabilities: cute.Tensor,
        o: cute.Tensor,
        scale: Float32,
    ) -> None:
        """A sequence and a head of K."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        head, batch, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        parts = smem.allocate_tensor(Float32, cute.make_layout((c.head_v, HEADS, WARPS)), byte_alignment=16)
        sums, maxima = (smem.allocate_tensor(Float32, cute.make_layout((HEADS, WARPS))) for _ in range(2))
        best = smem.allocate_tensor(Float32, cute.make_layout(WARPS))
        best_blocks = smem.allocate_tensor(Int32, cute.make_layout(WARPS))
        blocks = smem.allocate_tensor(Int32, cute.make_layout(ALWAYS + c.count))
        k, v, small_k, small_v = (x[batch, None, head, None] for x in caches)
        length, small = lengths[batch], compressed_lengths[batch]
        p, mine = probabilities[batch, head, None], q[batch, None, None]
        rows = self.heads_of(mine, head, thread)
        shared = (parts, sums, maxima)
        out = cute.make_rmem_tensor(c.head_v * HEADS // THREADS, Float32)
        out.fill(0.0)
        none = Int32(0)
        groups = cute.ceil_div(small, KEYS)
        self.attend(rows, small_k, small_v, shared, blocks, groups, none, small, scale, False, thread)
        self.add(out, shared, gates, batch, head, 0, thread)
        self.rank(rows, small_k, p, shared, small, scale, thread)
        self.choose(p, blocks, best, best_blocks, length, small, thread)
        groups = (ALWAYS + c.count) * (c.block // KEYS)
        self.attend(rows, k, v, shared, blocks, Int32(groups), none, length, scale, True, thread)
        self.add(out, shared, gates, batch, head, 1, thread)
        begin = cutlass.max(length - c.window, 0)
        groups = cute.ceil_div(length - begin, KEYS)
        self.attend(rows, k, v, shared, blocks, groups, begin, length, scale, False, thread)
        self.add(out, shared, gates, batch, head, 2, thread)
        for i in cutlass.range_constexpr(cute.size(out)):
            row, column = self.place(i, thread)
            if row < c.group:
                o[batch, head * c.group + row, column] = out[i].to(self.dtype)

    name(kernel, "cudnn_nsa_decode")

    def mma(self) -> cute.TiledMma:
        """The product of 16 rows, 8 columns and 16 of what is added up, of a warp."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (HEADS, 8, 16))
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def fragments(self, rows: int, columns: int, count: int) -> Any:
        """Registers for so many left or right operands."""
        mma = self.mma()
        shape = mma.partition_shape_A((rows, columns)) if rows == HEADS else mma.partition_shape_B((rows, columns))
        return cute.make_rmem_tensor((*shape, count), self.dtype)

    def load(self, source: cute.Tensor, vector: Any) -> Any:
        """16 bytes of a row."""
        part = cute.make_rmem_tensor(VECTOR, self.dtype)
        cute.autovec_copy(cute.local_tile(source, (VECTOR,), (vector,)), part)
        return part

    def along(self, target: cute.Tensor, part: Any, chunk: int, shift: int, width: int) -> None:
        """Puts 16 bytes of a row into the two fragments of 32 elements, which have ``width`` rows of a thread."""
        for i in range(VECTOR):
            step, pair, half = i // 4, i % 2, i // 2 % 2
            target[pair + 2 * shift + 2 * width * half, 0, 0, 2 * chunk + step] = part[i]

    @cute.jit
    def heads_of(self, q: cute.Tensor, head: Int32, thread: Int32) -> Any:
        """The heads of Q that share a head of K, as left operands; zeros where there are none."""
        c, lane = self.c, thread % WARP
        rows = self.fragments(HEADS, 16, c.head // 16)
        rows.fill(0.0)
        for half in cutlass.range_constexpr(2):
            if lane // 4 + 8 * half < c.group:
                for chunk in cutlass.range_constexpr(c.head // 32):
                    source = q[head * c.group + lane // 4 + 8 * half, None]
                    self.along(rows, self.load(source, 4 * chunk + lane % 4), chunk, half, 2)
        return rows

    @cute.jit
    def scores(self, rows: Any, k: cute.Tensor, first: Int32, last: Int32, lane: Int32) -> Any:
        """Q K^T of 16 keys from ``first`` on, of which there are those up to ``last``; others are its copies."""
        found = []
        for tile in cutlass.range_constexpr(KEYS // 8):
            key = cutlass.min(first + 8 * tile + lane // 4, last)
            columns = self.fragments(8, 16, self.c.head // 16)
            for chunk in cutlass.range_constexpr(self.c.head // 32):
                self.along(columns, self.load(k[key, None], 4 * chunk + lane % 4), chunk, 0, 1)
            mma = self.mma()
            acc = cute.make_rmem_tensor(mma.partition_shape_C((HEADS, 8)), Float32)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(self.c.head // 16):
                cute.gemm(mma, acc, rows[None, None, 0, step], columns[None, None, 0, step], acc)
            found.append(acc)
        return found

    @cute.jit
    def attend(
        self,
        rows: Any,
        k: cute.Tensor,
        v: cute.Tensor,
        shared: Any,
        blocks: cute.Tensor,
        groups: Int32,
        begin: Int32,
        end: Int32,
        scale: Float32,
        listed: cutlass.Constexpr[bool],
        thread: Int32,
    ) -> None:
        """A warp's part of a branch: 16 keys at a time, from ``begin`` to ``end``, or of the ``listed`` blocks."""
        c, mma = self.c, self.mma()
        lane, warp_index = thread % WARP, thread // WARP
        acc = cute.make_rmem_tensor((4, c.head_v // 8), Float32)
        total, largest = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        acc.fill(0.0)
        total.fill(0.0)
        largest.fill(-Float32.inf)
        for group in cutlass.range(warp_index, groups, WARPS, unroll=1):
            first = begin + group * KEYS
            if const_expr(listed):
                block = blocks[group // (c.block // KEYS)]
                first = Int32(select_(block >= 0, block * c.block + group % (c.block // KEYS) * KEYS, end))
            if first < end:
                values = []  # on their way while scores are computed
                for i in cutlass.range_constexpr(4):
                    key = cutlass.min(first + lane % 4 * 2 + i % 2 + 8 * (i // 2), end - 1)
                    values.append([self.load(v[key, None], 8 * x + lane // 4) for x in range(c.head_v // 64)])
                found = self.scores(rows, k, first, end - 1, lane)
                weights = self.fragments(HEADS, 16, 1)
                for half in cutlass.range_constexpr(2):
                    most = largest[half]
                    for tile in cutlass.range_constexpr(2):
                        for pair in cutlass.range_constexpr(2):
                            key = first + 8 * tile + lane % 4 * 2 + pair
                            score = Float32(select_(key < end, found[tile][pair + 2 * half], -Float32.inf))
                            found[tile][pair + 2 * half] = score
                            most = cutlass.max(most, score)
                    for distance in (1, 2):
                        most = cutlass.max(most, cute.arch.shuffle_sync_bfly(most, distance))
                    factor = cute.math.exp2((largest[half] - most) * scale, fastmath=True)
                    largest[half] = most
                    total[half] = total[half] * factor
                    for tile in cutlass.range_constexpr(2):
                        for pair in cutlass.range_constexpr(2):
                            weight = cute.math.exp2((found[tile][pair + 2 * half] - most) * scale, fastmath=True)
                            total[half] = total[half] + weight
                            weights[pair + 2 * half + 4 * tile, 0, 0, 0] = weight.to(self.dtype)
                    for i in cutlass.range_constexpr(c.head_v // 8):
                        for pair in cutlass.range_constexpr(2):
                            acc[pair + 2 * half, i] = acc[pair + 2 * half, i] * factor
                for part in cutlass.range_constexpr(c.head_v // 64):
                    for tile in cutlass.range_constexpr(8):
                        columns = self.fragments(8, 16, 1)
                        for i in cutlass.range_constexpr(4):
                            columns[i, 0, 0, 0] = values[i][part][tile]
                        sums = cute.make_rmem_tensor(mma.partition_shape_C((HEADS, 8)), Float32)
                        for i in cutlass.range_constexpr(4):
                            sums[i] = acc[i, 8 * part + tile]
                        cute.gemm(mma, sums, weights[None, None, 0, 0], columns[None, None, 0, 0], sums)
                        for i in cutlass.range_constexpr(4):
                            acc[i, 8 * part + tile] = sums[i]
        parts, sums, maxima = shared
        for half in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * half
            for distance in (1, 2):
                total[half] = total[half] + cute.arch.shuffle_sync_bfly(total[half], distance)
            sums[row, warp_index], maxima[row, warp_index] = total[half], largest[half] * scale
            for i in cutlass.range_constexpr(c.head_v // 8):
                for pair in cutlass.range_constexpr(2):
                    column = 64 * (i // 8) + 8 * (lane % 4 * 2 + pair) + i % 8
                    parts[column, row, warp_index] = acc[pair + 2 * half, i]
        cute.arch.sync_threads()

    def place(self, i: int, thread: Int32) -> tuple[Int32, Int32]:
        """The head and the column of a thread's i-th result."""
        element = thread + i * THREADS
        return element // self.c.head_v, element % self.c.head_v

    @cute.jit
    def log_sum(self, shared: Any, row: Int32) -> tuple[Float32, Float32]:
        """Of a head, the largest score of all warps, times log2(e), and the sum of exponentials, 0 if there is none."""
        _, sums, maxima = shared
        most, total = -Float32.inf, Float32(0.0)
        for each in cutlass.range_constexpr(WARPS):
            most = cutlass.max(most, maxima[row, each])
        for each in cutlass.range_constexpr(WARPS):
            if sums[row, each] > 0.0:
                total += sums[row, each] * cute.math.exp2(maxima[row, each] - most, fastmath=True)
        return most, total

    @cute.jit
    def add(
        self,
        out: cute.Tensor,
        shared: Any,
        gates: cute.Tensor,
        batch: Int32,
        head: Int32,
        branch: cutlass.Constexpr[int],
        thread: Int32,
    ) -> None:
        """Puts the warps' parts of a branch together, and adds them times the gate."""
        c = self.c
        parts, sums, maxima = shared
        for i in cutlass.range_constexpr(cute.size(out)):
            row, column = self.place(i, thread)
            if row < c.group:
                most, total = self.log_sum(shared, row)
                if total > 0.0:
                    value = Float32(0.0)
                    for each in cutlass.range_constexpr(WARPS):
                        if sums[row, each] > 0.0:
                            factor = cute.math.exp2(maxima[row, each] - most, fastmath=True)
                            value += parts[column, row, each] * factor
                    gate = gates[batch, head * c.group + row, branch].to(Float32)
                    out[i] = out[i] + value / total * gate
        if const_expr(branch == 1):  # the next one's parts come at once; behind the last there are none
            cute.arch.sync_threads()

    @cute.jit
    def rank(
        self, rows: Any, k: cute.Tensor, p: cute.Tensor, shared: Any, keys: Int32, scale: Float32, thread: Int32
    ) -> None:
        """The probability of every compressed key, summed over the heads, to memory."""
        c, lane = self.c, thread % WARP
        shifts = []
        for half in cutlass.range_constexpr(2):
            most, total = self.log_sum(shared, lane // 4 + 8 * half)
            shifts.append(most + cute.math.log2(total, fastmath=True))
        for group in cutlass.range(thread // WARP, cute.ceil_div(keys, KEYS), WARPS, unroll=1):
            found = self.scores(rows, k, group * KEYS, keys - 1, lane)
            for tile in cutlass.range_constexpr(2):
                for pair in cutlass.range_constexpr(2):
                    value = Float32(0.0)
                    for half in cutlass.range_constexpr(2):
                        weight = cute.math.exp2(found[tile][pair + 2 * half] * scale - shifts[half], fastmath=True)
                        exists = lane // 4 + 8 * half < c.group
                        value += Float32(select_(exists, weight, Float32(0.0)))
                    for distance in (4, 8, 16):
                        value += cute.arch.shuffle_sync_bfly(value, distance)
                    key = group * KEYS + 8 * tile + lane % 4 * 2 + pair
                    if (lane < 4) & (key < keys):
                        p[key] = value
        cute.arch.sync_threads()

    @cute.jit
    def choose(
        self,
        p: cute.Tensor,
        blocks: cute.Tensor,
        best: cute.Tensor,
        best_blocks: cute.Tensor,
        length: Int32,
        keys: Int32,
        thread: Int32,
    ) -> None:
        """The row's list: the first block, the newest, and those with the largest sums of probabilities.

        The sum of a block takes the place of its first key's probability, -1 that of one that was chosen.
        """
        c = self.c
        share = c.block // c.stride
        newest = length // c.block - (NEWEST - 1)
        end = cutlass.min(newest, cute.ceil_div(keys, share))
        for block in cutlass.range(1 + thread, end, THREADS, unroll=1):
            total = Float32(0.0)
            for i in cutlass.range(share, unroll=1):
                if block * share + i < keys:
                    total += p[block * share + i]
            p[block * share] = total
        if thread < ALWAYS:
            block = cutlass.max(newest, 1) + thread - 1
            block = Int32(select_(block > (length - 1) // c.block, Int32(-1), block))
            blocks[thread] = Int32(select_(thread == 0, Int32(0), block))
        for number in cutlass.range(c.count, unroll=1):
            score, chosen = Float32(-1.0), Int32(NONE)
            for block in cutlass.range(1 + thread, end, THREADS, unroll=1):
                value = p[block * share]
                if value > score:
                    score, chosen = value, block
            for distance in (1, 2, 4, 8, 16):
                other, other_block = (cute.arch.shuffle_sync_bfly(x, distance) for x in (score, chosen))
                score, chosen = self.better(score, chosen, other, other_block)
            if thread % WARP == 0:
                best[thread // WARP], best_blocks[thread // WARP] = score, chosen
            cute.arch.sync_threads()
            for each in cutlass.range_constexpr(WARPS):
                score, chosen = self.better(score, chosen, best[each], best_blocks[each])
            if thread == 0:
                blocks[ALWAYS + number] = Int32(select_(chosen == NONE, Int32(-1), chosen))
            if (chosen != NONE) & ((chosen - 1) % THREADS == thread):
                p[chosen * share] = Float32(-1.0)
            cute.arch.sync_threads()

    def better(self, score: Float32, block: Int32, other: Float32, other_block: Int32) -> tuple[Float32, Int32]:
        """The larger score and its block, of equal ones the lower block."""
        takes = (other > score) | ((other == score) & (other_block < block))
        return Float32(select_(takes, other, score)), Int32(select_(takes, other_block, block))
