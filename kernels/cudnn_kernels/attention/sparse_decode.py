"""NSA decode: all three branches for the newest query row of each sequence, from KV caches, in one kernel.

A CTA has a sequence and a head of K: (1) attention to the compressed keys, (2) their probabilities, summed over the GQA
group and per block, (3) top-k block selection, (4) attention to the selected blocks, (5) to the sliding window, (6) the
gated sum. Each of 8 warps takes every 8th tile of 16 keys with its own online softmax; at the end of a branch the
warps' partial results are combined through shared memory.

mma.sync m16n8k16; its rows are the heads of the GQA group. Operands are loaded from global memory straight into
fragments. A GEMM's k order is arbitrary if both operands agree: so a thread loads 8 adjacent elements of Q and K. V's
columns are permuted instead: n-tile t of 64 columns has the columns t, 8 + t, 16 + t, ...
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
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

WARPS = 8
THREADS = WARP_SIZE * WARPS
MMA_M = 16
TILE_N = 16  # keys of a warp's tile
VECTOR = 8  # 16-bit elements of a 16-byte load
NO_BLOCK = 1 << 30


class Decode(Kernel):
    """The kernel for one :class:`SparseDecodeConfiguration`."""

    def __init__(self, configuration: SparseDecodeConfiguration) -> None:
        super().__init__(configuration)
        self.dtype = DTYPES[configuration.dtype]

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        caches = tuple(arguments[x] for x in ("k", "v", "compressed_k", "compressed_v"))
        self.kernel(
            arguments["q"],
            caches,
            arguments["gates"],
            arguments["lengths"],
            arguments["compressed_lengths"],
            arguments["probabilities"],
            arguments["o"],
            arguments["scale_softmax"] * LOG2_E,
        ).launch(grid=[c.key_heads, arguments["q"].shape[0], 1], block=[THREADS, 1, 1], stream=arguments["stream"])

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
        scale_log2: Float32,
    ) -> None:
        """A sequence and a head of K."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        head, batch, _ = cute.arch.block_idx()
        allocator = SmemAllocator()
        o_partial = allocator.allocate_tensor(
            Float32, cute.make_layout((c.head_dim_v, MMA_M, WARPS)), byte_alignment=16
        )
        row_sums, row_maxes = (allocator.allocate_tensor(Float32, cute.make_layout((MMA_M, WARPS))) for _ in range(2))
        best_scores = allocator.allocate_tensor(Float32, cute.make_layout(WARPS))
        best_blocks = allocator.allocate_tensor(Int32, cute.make_layout(WARPS))
        blocks = allocator.allocate_tensor(Int32, cute.make_layout(ALWAYS + c.count))
        k, v, compressed_k, compressed_v = (x[batch, None, head, None] for x in caches)
        length, compressed_length = lengths[batch], compressed_lengths[batch]
        probs, batch_q = probabilities[batch, head, None], q[batch, None, None]
        tSrQ = self.load_q(batch_q, head, thread)
        partials = (o_partial, row_sums, row_maxes)
        out = cute.make_rmem_tensor(c.head_dim_v * MMA_M // THREADS, Float32)
        out.fill(0.0)
        zero = Int32(0)
        # (1) Attention to the compressed keys.
        num_key_tiles = cute.ceil_div(compressed_length, TILE_N)
        self.attend_branch(
            tSrQ,
            compressed_k,
            compressed_v,
            partials,
            blocks,
            num_key_tiles,
            zero,
            compressed_length,
            scale_log2,
            False,
            thread,
        )
        self.add_branch(out, partials, gates, batch, head, 0, thread)
        # (2) Probabilities of compressed keys, (3) top-k block selection.
        self.score_keys(tSrQ, compressed_k, probs, partials, compressed_length, scale_log2, thread)
        self.select_blocks(probs, blocks, best_scores, best_blocks, length, compressed_length, thread)
        # (4) Attention to the selected blocks.
        num_key_tiles = (ALWAYS + c.count) * (c.block // TILE_N)
        self.attend_branch(tSrQ, k, v, partials, blocks, Int32(num_key_tiles), zero, length, scale_log2, True, thread)
        self.add_branch(out, partials, gates, batch, head, 1, thread)
        # (5) Attention to the sliding window.
        begin = cutlass.max(length - c.window, 0)
        num_key_tiles = cute.ceil_div(length - begin, TILE_N)
        self.attend_branch(tSrQ, k, v, partials, blocks, num_key_tiles, begin, length, scale_log2, False, thread)
        self.add_branch(out, partials, gates, batch, head, 2, thread)
        for i in cutlass.range_constexpr(cute.size(out)):
            row, column = self.out_coord(i, thread)
            if row < c.group:
                o[batch, head * c.group + row, column] = out[i].to(self.dtype)

    set_kernel_name(kernel, "cudnn_nsa_decode")

    def mma(self) -> cute.TiledMma:
        """mma.sync.m16n8k16."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (MMA_M, 8, 16))
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def operand_fragments(self, rows: int, columns: int, count: int) -> Any:
        """Registers of ``count`` A or B operand fragments."""
        mma = self.mma()
        shape = mma.partition_shape_A((rows, columns)) if rows == MMA_M else mma.partition_shape_B((rows, columns))
        return cute.make_rmem_tensor((*shape, count), self.dtype)

    def load(self, source: cute.Tensor, vector: Any) -> Any:
        """16 bytes of a row."""
        fragment = cute.make_rmem_tensor(VECTOR, self.dtype)
        cute.autovec_copy(cute.local_tile(source, (VECTOR,), (vector,)), fragment)
        return fragment

    def fill_fragment(self, fragment: cute.Tensor, loaded: Any, k_chunk: int, half_rows: int, row_halves: int) -> None:
        """Puts 16 bytes of a row into the fragments of two k-blocks."""
        for i in range(VECTOR):
            step, pair, half = i // 4, i % 2, i // 2 % 2
            fragment[pair + 2 * half_rows + 2 * row_halves * half, 0, 0, 2 * k_chunk + step] = loaded[i]

    @cute.jit
    def load_q(self, q: cute.Tensor, head: Int32, thread: Int32) -> Any:
        """The heads of the GQA group as A operands; 0 for heads that do not exist."""
        c, lane = self.c, thread % WARP_SIZE
        fragment = self.operand_fragments(MMA_M, 16, c.head_dim // 16)
        fragment.fill(0.0)
        for half in cutlass.range_constexpr(2):
            if lane // 4 + 8 * half < c.group:
                for chunk in cutlass.range_constexpr(c.head_dim // 32):
                    source = q[head * c.group + lane // 4 + 8 * half, None]
                    self.fill_fragment(fragment, self.load(source, 4 * chunk + lane % 4), chunk, half, 2)
        return fragment

    @cute.jit
    def mma_qk(self, tSrQ: Any, k: cute.Tensor, first: Int32, last: Int32, lane: Int32) -> Any:
        """S = Q K^T of 16 keys from ``first`` on; keys beyond ``last`` are copies of it."""
        accs = []
        for tile in cutlass.range_constexpr(TILE_N // 8):
            key = cutlass.min(first + 8 * tile + lane // 4, last)
            tSrK = self.operand_fragments(8, 16, self.c.head_dim // 16)
            for chunk in cutlass.range_constexpr(self.c.head_dim // 32):
                self.fill_fragment(tSrK, self.load(k[key, None], 4 * chunk + lane % 4), chunk, 0, 1)
            mma = self.mma()
            acc = cute.make_rmem_tensor(mma.partition_shape_C((MMA_M, 8)), Float32)
            acc.fill(0.0)
            for step in cutlass.range_constexpr(self.c.head_dim // 16):
                cute.gemm(mma, acc, tSrQ[None, None, 0, step], tSrK[None, None, 0, step], acc)
            accs.append(acc)
        return accs

    @cute.jit
    def attend_branch(
        self,
        tSrQ: Any,
        k: cute.Tensor,
        v: cute.Tensor,
        partials: Any,
        blocks: cute.Tensor,
        num_key_tiles: Int32,
        begin: Int32,
        end: Int32,
        scale_log2: Float32,
        from_blocks: cutlass.Constexpr[bool],
        thread: Int32,
    ) -> None:
        """A warp's part of a branch: tiles of 16 keys from ``begin`` to ``end``, or of the selected blocks
        (``from_blocks``).
        """
        c, mma = self.c, self.mma()
        lane, warp_index = thread % WARP_SIZE, thread // WARP_SIZE
        acc = cute.make_rmem_tensor((4, c.head_dim_v // 8), Float32)
        row_sum, row_max = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        acc.fill(0.0)
        row_sum.fill(0.0)
        row_max.fill(-Float32.inf)
        for key_tile in cutlass.range(warp_index, num_key_tiles, WARPS, unroll=1):
            first = begin + key_tile * TILE_N
            if const_expr(from_blocks):
                block = blocks[key_tile // (c.block // TILE_N)]
                first = Int32(select_(block >= 0, block * c.block + key_tile % (c.block // TILE_N) * TILE_N, end))
            if first < end:
                v_regs = []  # in flight while S is computed
                for i in cutlass.range_constexpr(4):
                    key = cutlass.min(first + lane % 4 * 2 + i % 2 + 8 * (i // 2), end - 1)
                    v_regs.append([self.load(v[key, None], 8 * x + lane // 4) for x in range(c.head_dim_v // 64)])
                acc_S = self.mma_qk(tSrQ, k, first, end - 1, lane)
                tOrP = self.operand_fragments(MMA_M, 16, 1)
                for half in cutlass.range_constexpr(2):
                    new_max = row_max[half]
                    for tile in cutlass.range_constexpr(2):
                        for pair in cutlass.range_constexpr(2):
                            key = first + 8 * tile + lane % 4 * 2 + pair
                            score = Float32(select_(key < end, acc_S[tile][pair + 2 * half], -Float32.inf))
                            acc_S[tile][pair + 2 * half] = score
                            new_max = cutlass.max(new_max, score)
                    for distance in (1, 2):
                        new_max = cutlass.max(new_max, cute.arch.shuffle_sync_bfly(new_max, distance))
                    row_scale = cute.math.exp2((row_max[half] - new_max) * scale_log2, fastmath=True)
                    row_max[half] = new_max
                    row_sum[half] = row_sum[half] * row_scale
                    for tile in cutlass.range_constexpr(2):
                        for pair in cutlass.range_constexpr(2):
                            p = cute.math.exp2((acc_S[tile][pair + 2 * half] - new_max) * scale_log2, fastmath=True)
                            row_sum[half] = row_sum[half] + p
                            tOrP[pair + 2 * half + 4 * tile, 0, 0, 0] = p.to(self.dtype)
                    for i in cutlass.range_constexpr(c.head_dim_v // 8):
                        for pair in cutlass.range_constexpr(2):
                            acc[pair + 2 * half, i] = acc[pair + 2 * half, i] * row_scale
                for column_chunk in cutlass.range_constexpr(c.head_dim_v // 64):
                    for tile in cutlass.range_constexpr(8):
                        tOrV = self.operand_fragments(8, 16, 1)
                        for i in cutlass.range_constexpr(4):
                            tOrV[i, 0, 0, 0] = v_regs[i][column_chunk][tile]
                        acc_tile = cute.make_rmem_tensor(mma.partition_shape_C((MMA_M, 8)), Float32)
                        for i in cutlass.range_constexpr(4):
                            acc_tile[i] = acc[i, 8 * column_chunk + tile]
                        cute.gemm(mma, acc_tile, tOrP[None, None, 0, 0], tOrV[None, None, 0, 0], acc_tile)
                        for i in cutlass.range_constexpr(4):
                            acc[i, 8 * column_chunk + tile] = acc_tile[i]
        o_partial, acc_tile, row_maxes = partials
        for half in cutlass.range_constexpr(2):
            row = lane // 4 + 8 * half
            for distance in (1, 2):
                row_sum[half] = row_sum[half] + cute.arch.shuffle_sync_bfly(row_sum[half], distance)
            acc_tile[row, warp_index], row_maxes[row, warp_index] = row_sum[half], row_max[half] * scale_log2
            for i in cutlass.range_constexpr(c.head_dim_v // 8):
                for pair in cutlass.range_constexpr(2):
                    column = 64 * (i // 8) + 8 * (lane % 4 * 2 + pair) + i % 8
                    o_partial[column, row, warp_index] = acc[pair + 2 * half, i]
        cute.arch.sync_threads()

    def out_coord(self, i: int, thread: Int32) -> tuple[Int32, Int32]:
        """The head and the column of a thread's i-th output."""
        element = thread + i * THREADS
        return element // self.c.head_dim_v, element % self.c.head_dim_v

    @cute.jit
    def combined_stats(self, partials: Any, row: Int32) -> tuple[Float32, Float32]:
        """A head's maximum over all warps, times log2(e), and row sum; 0 without keys."""
        _, row_sums, row_maxes = partials
        max_log2, row_sum = -Float32.inf, Float32(0.0)
        for w in cutlass.range_constexpr(WARPS):
            max_log2 = cutlass.max(max_log2, row_maxes[row, w])
        for w in cutlass.range_constexpr(WARPS):
            if row_sums[row, w] > 0.0:
                row_sum += row_sums[row, w] * cute.math.exp2(row_maxes[row, w] - max_log2, fastmath=True)
        return max_log2, row_sum

    @cute.jit
    def add_branch(
        self,
        out: cute.Tensor,
        partials: Any,
        gates: cute.Tensor,
        batch: Int32,
        head: Int32,
        branch: cutlass.Constexpr[int],
        thread: Int32,
    ) -> None:
        """Combines the warps' partial results of a branch and adds them times the gate."""
        c = self.c
        o_partial, row_sums, row_maxes = partials
        for i in cutlass.range_constexpr(cute.size(out)):
            row, column = self.out_coord(i, thread)
            if row < c.group:
                max_log2, row_sum = self.combined_stats(partials, row)
                if row_sum > 0.0:
                    value = Float32(0.0)
                    for w in cutlass.range_constexpr(WARPS):
                        if row_sums[row, w] > 0.0:
                            scale = cute.math.exp2(row_maxes[row, w] - max_log2, fastmath=True)
                            value += o_partial[column, row, w] * scale
                    gate = gates[batch, head * c.group + row, branch].to(Float32)
                    out[i] = out[i] + value / row_sum * gate
        if const_expr(branch == 1):  # the next branch overwrites the partial results
            cute.arch.sync_threads()

    @cute.jit
    def score_keys(
        self,
        tSrQ: Any,
        k: cute.Tensor,
        probs: cute.Tensor,
        partials: Any,
        num_keys: Int32,
        scale_log2: Float32,
        thread: Int32,
    ) -> None:
        """The probability of every compressed key, summed over heads, to global memory."""
        c, lane = self.c, thread % WARP_SIZE
        lse_log2 = []
        for half in cutlass.range_constexpr(2):
            max_log2, row_sum = self.combined_stats(partials, lane // 4 + 8 * half)
            lse_log2.append(max_log2 + cute.math.log2(row_sum, fastmath=True))
        for key_tile in cutlass.range(thread // WARP_SIZE, cute.ceil_div(num_keys, TILE_N), WARPS, unroll=1):
            acc_S = self.mma_qk(tSrQ, k, key_tile * TILE_N, num_keys - 1, lane)
            for tile in cutlass.range_constexpr(2):
                for pair in cutlass.range_constexpr(2):
                    prob_sum = Float32(0.0)
                    for half in cutlass.range_constexpr(2):
                        prob = cute.math.exp2(acc_S[tile][pair + 2 * half] * scale_log2 - lse_log2[half], fastmath=True)
                        exists = lane // 4 + 8 * half < c.group
                        prob_sum += Float32(select_(exists, prob, Float32(0.0)))
                    for distance in (4, 8, 16):
                        prob_sum += cute.arch.shuffle_sync_bfly(prob_sum, distance)
                    key = key_tile * TILE_N + 8 * tile + lane % 4 * 2 + pair
                    if (lane < 4) & (key < num_keys):
                        probs[key] = prob_sum
        cute.arch.sync_threads()

    @cute.jit
    def select_blocks(
        self,
        probs: cute.Tensor,
        blocks: cute.Tensor,
        best_scores: cute.Tensor,
        best_blocks: cute.Tensor,
        length: Int32,
        num_keys: Int32,
        thread: Int32,
    ) -> None:
        """The row's block list: block 0, the newest blocks, and the top-k blocks.

        A block's sum replaces its first key's probability, and -1 that of a selected block.
        """
        c = self.c
        keys_per_block = c.block // c.stride
        newest = length // c.block - (NEWEST - 1)
        end = cutlass.min(newest, cute.ceil_div(num_keys, keys_per_block))
        for block in cutlass.range(1 + thread, end, THREADS, unroll=1):
            block_sum = Float32(0.0)
            for i in cutlass.range(keys_per_block, unroll=1):
                if block * keys_per_block + i < num_keys:
                    block_sum += probs[block * keys_per_block + i]
            probs[block * keys_per_block] = block_sum
        if thread < ALWAYS:
            block = cutlass.max(newest, 1) + thread - 1
            block = Int32(select_(block > (length - 1) // c.block, Int32(-1), block))
            blocks[thread] = Int32(select_(thread == 0, Int32(0), block))
        for rank in cutlass.range(c.count, unroll=1):
            score, best_block = Float32(-1.0), Int32(NO_BLOCK)
            for block in cutlass.range(1 + thread, end, THREADS, unroll=1):
                value = probs[block * keys_per_block]
                if value > score:
                    score, best_block = value, block
            for distance in (1, 2, 4, 8, 16):
                other, other_block = (cute.arch.shuffle_sync_bfly(x, distance) for x in (score, best_block))
                score, best_block = self.better(score, best_block, other, other_block)
            if thread % WARP_SIZE == 0:
                best_scores[thread // WARP_SIZE], best_blocks[thread // WARP_SIZE] = score, best_block
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(WARPS):
                score, best_block = self.better(score, best_block, best_scores[w], best_blocks[w])
            if thread == 0:
                blocks[ALWAYS + rank] = Int32(select_(best_block == NO_BLOCK, Int32(-1), best_block))
            if (best_block != NO_BLOCK) & ((best_block - 1) % THREADS == thread):
                probs[best_block * keys_per_block] = Float32(-1.0)
            cute.arch.sync_threads()

    def better(self, score: Float32, block: Int32, other: Float32, other_block: Int32) -> tuple[Float32, Int32]:
        """The larger score and its block; of equal ones the lower block."""
        other_wins = (other > score) | ((other == score) & (other_block < block))
        return Float32(select_(other_wins, other, score)), Int32(select_(other_wins, other_block, block))
