"""MoE routing: selects the top_k experts of each token and sorts the (token, k) slots by expert, in three kernels.

1. A warp selects the experts of a token; its lanes hold consecutive experts. Each step finds the best key of all lanes
   by a warp reduction, then which of that lane's experts it is, by reading those with all lanes, and that lane's next
   best key. A warp takes consecutive tokens and counts its slots of each expert; at the end the CTA scans the counts of
   its warps. 2. The counts of the CTAs are scanned for each expert. 3. Each slot gets its row: the first row of the
   expert, plus the slots of earlier CTAs, of earlier warps of the CTA, and of earlier tokens of the warp.

The result does not depend on the order in which warps run: only integers are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.configuration import WARPS, RouteConfiguration, RouteGradientConfiguration
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

THREADS = WARP_SIZE * WARPS
REMOVED = -(2**31)  # below the keys of all numbers
ADDING_WARPS = 32
MOST_SORTED = 4  # experts that a lane sorts in registers
LEAST_SUM = 1e-20  # added to sums of sigmoids


def key_of(value: Any) -> Any:
    """An integer that orders as the values: -0 equals 0, and NaN is above all numbers."""
    bits = (value + Float32(0.0)).bitcast(Int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return Int32(select_(value == value, key, Int32(0x7FFFFFFF)))


def value_of(key: Any) -> Any:
    """The value of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).bitcast(Float32)


def first_of(lanes: Any) -> Any:
    """The index of the lowest set bit."""
    return cute.arch.popc((lanes & -lanes) - 1)


def exponential(value: Any) -> Any:
    """e to the power of a value."""
    return cute.math.exp2(value * Float32(math.log2(math.e)), approx=True)


def sigmoid(value: Any) -> Any:
    """1 / (1 + e^-value)."""
    return Float32(1.0) / (Float32(1.0) + exponential(-value))


class Softmax:
    """The softmax of a token's logits, distributed over the lanes."""

    def __init__(self, values: list) -> None:
        largest = values[0]
        for value in values[1:]:
            largest = cute.arch.fmax(largest, value)
        self.largest = cute.arch.warp_reduction_max(largest)
        total = Float32(0.0)
        for value in values:
            total = total + exponential(value - self.largest)
        self.total = cute.arch.warp_reduction_sum(total)

    def of(self, value: Any) -> Any:
        """The probability of a logit."""
        return exponential(value - self.largest) / self.total


class Route(Kernel):
    """The kernels for one :class:`RouteConfiguration`."""

    def __init__(self, configuration: RouteConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.is_sorted = c.experts_per_lane <= MOST_SORTED and c.rule is not None and c.rule.n_group == 1
        self.steps = c.experts_per_lane  # unsorted: a lane loads every 32nd expert's logit ...
        self.pitch = c.experts_per_lane | 1  # ... and reduces consecutive ones in shared memory, without bank conflicts

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        stream, counts, indices = arguments["stream"], arguments["counts"], arguments["indices"]
        blocks = counts.shape[0] - 1
        per_warp = cute.ceil_div(indices.shape[0], blocks * WARPS)
        scored = (arguments.get(x) for x in ("logits", "bias", "weights", "chosen"))
        self.choose(
            *scored, indices, arguments["scatter_idx"], counts, arguments.get("scaling_factor"), per_warp
        ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)
        self.scan_counts(counts, blocks).launch(
            grid=[-(-c.experts // WARP_SIZE), 1, 1], block=[ADDING_WARPS * WARP_SIZE, 1, 1], stream=stream
        )
        self.assign_rows(
            indices, counts, arguments["offsets"], arguments["gather_idx"], arguments["scatter_idx"], blocks, per_warp
        ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def choose(
        self,
        logits: Any,
        bias: Any,
        weights: Any,
        chosen: Any,
        indices: cute.Tensor,
        scatter_idx: cute.Tensor,
        counts: cute.Tensor,
        scaling_factor: Any,
        per_warp: Int32,
    ) -> None:
        """``per_warp`` tokens per warp; ``scatter_idx`` gets the number of the CTA's earlier slots of the expert."""
        c = self.c
        thread, block = thread_block_idx()
        lane, warp = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
        smem = SmemAllocator()
        counters = smem.allocate_tensor(Int32, cute.make_layout((c.experts, WARPS)), byte_alignment=16)
        warp_counts = counters[None, warp]
        for j in cutlass.range_constexpr(self.steps):
            if self.is_expert(lane, j):
                warp_counts[lane + j * WARP_SIZE] = 0
        cute.arch.sync_warp()
        first = (block * WARPS + warp) * per_warp
        end = cutlass.min(first + per_warp, indices.shape[0])
        if const_expr(c.rule is not None):
            num_keys = c.top_k if self.is_sorted else WARP_SIZE * self.pitch
            keys = smem.allocate_tensor(Int32, cute.make_layout((num_keys, WARPS)), byte_alignment=16)
            next_logits = cute.make_rmem_tensor(self.steps, Float32)
            if first < end:
                self.load(logits, first, lane, next_logits)
            for token in cutlass.range(first, end, unroll=1):
                values = [next_logits[j] for j in range(self.steps)]
                if token + 1 < end:
                    self.load(logits, token + 1, lane, next_logits)
                expert, logit, softmax = self.choose_for(logits, bias, token, lane, values, keys[None, warp])
                weight = self.weight(logit, softmax) * scaling_factor
                if lane < c.top_k:
                    indices[token, lane] = expert
                    weights[token, lane] = weight
                    if const_expr(not c.rule.is_dense):
                        chosen[token, lane] = logit.to(chosen.element_type)
                    scatter_idx[token, lane] = warp_counts[expert]
                    warp_counts[expert] += 1
                cute.arch.sync_warp()
        else:
            for token in cutlass.range(first, end, unroll=1):
                self.count(indices, scatter_idx, token, lane, warp_counts)
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(-(-c.experts // THREADS)):
            expert = thread + j * THREADS
            if expert < c.experts:
                total = Int32(0)
                for w in cutlass.range_constexpr(WARPS):
                    count = counters[expert, w]
                    counters[expert, w] = total
                    total += count
                counts[block, expert] = total
        cute.arch.sync_threads()
        if lane < c.top_k:
            for token in cutlass.range(first, end, unroll=1):
                expert = indices[token, lane]
                if self.is_valid(expert):
                    scatter_idx[token, lane] += warp_counts[expert]

    set_kernel_name(choose, "cudnn_moe_choose")

    def is_expert(self, lane: Int32, j: int) -> Any:
        """Whether a lane has a j-th expert; a bool, except for the last one."""
        return True if (j + 1) * WARP_SIZE <= self.c.experts else lane + j * WARP_SIZE < self.c.experts

    def is_valid(self, expert: Int32) -> Any:
        """Whether a slot is not dropped."""
        return True if self.c.rule is not None else (expert >= 0) & (expert < self.c.experts)

    @cute.jit
    def load(self, logits: cute.Tensor, token: Int32, lane: Int32, values: cute.Tensor) -> None:
        """A lane's logits of a token; -inf beyond the last expert."""
        for j in cutlass.range_constexpr(self.steps):
            values[j] = -Float32.inf
            if self.is_logit(lane, j):
                values[j] = logits[token, self.logit(lane, j)].to(Float32)

    def logit(self, lane: Int32, j: int) -> Any:
        """The expert of a lane's j-th logit."""
        return lane * self.c.experts_per_lane + j if self.is_sorted else lane + j * WARP_SIZE

    def is_logit(self, lane: Int32, j: int) -> Any:
        """Whether a lane has a j-th logit."""
        if self.is_sorted and self.c.experts % WARP_SIZE:
            return self.logit(lane, j) < self.c.experts
        return self.is_expert(lane, j)

    @cute.jit
    def count(
        self, indices: cute.Tensor, scatter_idx: cute.Tensor, token: Int32, lane: Int32, counters: cute.Tensor
    ) -> None:
        """Counts the slots of a token from the caller's indices, which may repeat an expert."""
        expert = Int32(-1)
        if lane < self.c.top_k:
            expert = indices[token, lane]
        same = cute.arch.match_sync(0xFFFFFFFF, expert)
        before = cute.arch.popc(same & cute.arch.lanemask_lt())
        if lane < self.c.top_k:
            if self.is_valid(expert):
                scatter_idx[token, lane] = counters[expert] + Int32(before)
            else:
                scatter_idx[token, lane] = -1
        cute.arch.sync_warp()
        if (before == 0) & self.is_valid(expert):
            counters[expert] += Int32(cute.arch.popc(same))
        cute.arch.sync_warp()

    @cute.jit
    def choose_for(
        self, logits: cute.Tensor, bias: Any, token: Int32, lane: Int32, values: list, keys: cute.Tensor
    ) -> tuple:
        """The lane-th expert of a token, in the first ``top_k`` lanes, its logit, and the softmax of all, if needed."""
        c, rule = self.c, self.c.rule
        is_scored = const_expr(c.biased and rule.is_scored_before)
        softmax = None
        if const_expr(rule.is_dense or (is_scored and rule.score == "softmax")):
            softmax = Softmax(values)
        warp_counts = cute.make_rmem_tensor(self.steps, Int32)
        for j in cutlass.range_constexpr(self.steps):
            expert, value = self.logit(lane, j), values[j]
            warp_counts[j] = REMOVED
            if const_expr(is_scored):
                value = self.score(value, softmax)
            if self.is_logit(lane, j):
                if const_expr(c.biased):
                    value += bias[expert]
                warp_counts[j] = key_of(value)
            if const_expr(not self.is_sorted):
                keys[expert // c.experts_per_lane * self.pitch + expert % c.experts_per_lane] = warp_counts[j]
        if const_expr(self.is_sorted):
            expert = self.best_of_sorted(warp_counts, keys, lane)
        else:
            cute.arch.sync_warp()
            if const_expr(rule.n_group > 1):
                self.remove_groups(keys, lane)
            expert = self.best(keys, lane)
        logit = -Float32.inf
        if lane < rule.top_k:
            logit = logits[token, expert].to(Float32)
        return expert, logit, softmax

    @cute.jit
    def best_of_sorted(self, keys: cute.Tensor, chosen: cute.Tensor, lane: Int32) -> Int32:
        """The lane-th best of all experts, of which each lane has a few, sorted; the owner lane stores it."""
        c, last = self.c, self.c.experts_per_lane - 1
        experts = cute.make_rmem_tensor(c.experts_per_lane, Int32)
        for j in cutlass.range_constexpr(c.experts_per_lane):
            experts[j] = lane * c.experts_per_lane + j
        for end in cutlass.range_constexpr(last, 0, -1):
            for j in cutlass.range_constexpr(end):
                if keys[j] < keys[j + 1]:  # stable
                    for x in (keys, experts):
                        x[j], x[j + 1] = x[j + 1], x[j]
        for k in cutlass.range_constexpr(c.rule.top_k):
            top = cute.arch.warp_redux_sync(keys[0], "max")
            lanes = cute.arch.vote_ballot_sync(keys[0] == top)
            if lanes & -lanes == Int32(1) << lane:
                chosen[k] = experts[0]
                for j in cutlass.range_constexpr(last):
                    keys[j], experts[j] = keys[j + 1], experts[j + 1]
                keys[last] = REMOVED
        cute.arch.sync_warp()
        expert = Int32(0)
        if lane < c.rule.top_k:
            expert = chosen[lane]
        return expert

    @cute.jit
    def best(self, keys: cute.Tensor, lane: Int32) -> Int32:
        """The lane-th best of all experts."""
        c = self.c
        best = Int32(REMOVED)  # key of the lane's experts
        for i in cutlass.range_constexpr(c.experts_per_lane):
            best = cutlass.max(best, keys[lane * self.pitch + i])
        expert = Int32(0)
        for k in cutlass.range_constexpr(c.rule.top_k):
            top = cute.arch.warp_redux_sync(best, "max")
            owner = first_of(cute.arch.vote_ballot_sync(best == top))
            key = Int32(REMOVED)
            if lane < c.experts_per_lane:
                key = keys[owner * self.pitch + lane]
            position = first_of(cute.arch.vote_ballot_sync(key == top))
            if lane == k:
                expert = owner * c.experts_per_lane + position
            if lane == position:  # the only lane that reads this position
                key = Int32(REMOVED)
                keys[owner * self.pitch + position] = key
            rest = cute.arch.warp_redux_sync(key, "max")
            if lane == owner:
                best = rest
        return expert

    @cute.jit
    def remove_groups(self, keys: cute.Tensor, lane: Int32) -> None:
        """Removes the experts of groups that are not selected. Lane g holds the key of group g."""
        c, rule = self.c, self.c.rule
        size = c.experts // rule.n_group
        worth = Int32(REMOVED)
        for g in cutlass.range_constexpr(rule.n_group):
            first, second = Int32(REMOVED), Int32(REMOVED)
            for j in cutlass.range_constexpr(-(-size // WARP_SIZE)):
                if lane + j * WARP_SIZE < size:
                    expert = g * size + lane + j * WARP_SIZE
                    key = keys[expert // c.experts_per_lane * self.pitch + expert % c.experts_per_lane]
                    second = cutlass.max(second, cutlass.min(first, key))
                    first = cutlass.max(first, key)
            top = cute.arch.warp_redux_sync(first, "max")
            group = top
            if const_expr(c.biased):
                owner = first_of(cute.arch.vote_ballot_sync(first == top))
                if lane == owner:
                    first = second
                group = key_of(value_of(top) + value_of(cute.arch.warp_redux_sync(first, "max")))
            if lane == g:
                worth = group
        kept_groups = Int32(0)
        for _ in cutlass.range_constexpr(rule.topk_group):
            top = cute.arch.warp_redux_sync(worth, "max")
            group = first_of(cute.arch.vote_ballot_sync(worth == top))
            kept_groups |= Int32(1) << group
            if lane == group:
                worth = Int32(REMOVED)
        for j in cutlass.range_constexpr(self.steps):
            expert = lane + j * WARP_SIZE
            if self.is_expert(lane, j):
                if (kept_groups >> (expert // size)) & 1 == 0:
                    keys[expert // c.experts_per_lane * self.pitch + expert % c.experts_per_lane] = Int32(REMOVED)
        cute.arch.sync_warp()

    def score(self, logit: Float32, softmax: Any) -> Float32:
        """The score of an expert, before the selection."""
        return sigmoid(logit) if self.c.rule.score == "sigmoid" else softmax.of(logit)

    def weight(self, logit: Float32, softmax: Any) -> Float32:
        """The weight of a selected expert; lanes without one have a logit of -inf."""
        rule = self.c.rule
        if rule.is_dense:
            return softmax.of(logit)
        if rule.score == "softmax":
            return Softmax([logit]).of(logit)
        score = sigmoid(logit)
        if rule.renormalize:
            score = score / (cute.arch.warp_reduction_sum(score) + Float32(LEAST_SUM))
        return score

    @cute.kernel
    def scan_counts(self, counts: cute.Tensor, blocks: Int32) -> None:
        """Exclusive scan of the counts over the CTAs; the last row gets the totals. A lane has an expert."""
        thread, column = thread_block_idx()
        lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
        most = -(-self.c.blocks(2**31) // ADDING_WARPS)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARP_SIZE, ADDING_WARPS)), byte_alignment=16)
        expert = column * WARP_SIZE + lane
        loaded_counts = cute.make_rmem_tensor(most, Int32)
        loaded_counts.fill(0)
        if expert < self.c.experts:
            for i in cutlass.range_constexpr(most):
                if warp * most + i < blocks:
                    loaded_counts[i] = counts[warp * most + i, expert]
        total = Int32(0)
        for i in cutlass.range_constexpr(most):
            total += loaded_counts[i]
        sums[lane, warp] = total
        cute.arch.sync_threads()
        before = Int32(0)
        for w in cutlass.range(warp, unroll=4):
            before += sums[lane, w]
        if expert < self.c.experts:
            for i in cutlass.range_constexpr(most):
                if warp * most + i < blocks:
                    counts[warp * most + i, expert] = before
                before += loaded_counts[i]
            if warp == ADDING_WARPS - 1:
                counts[blocks, expert] = before

    set_kernel_name(scan_counts, "cudnn_moe_add_up")

    @cute.kernel
    def assign_rows(
        self,
        indices: cute.Tensor,
        counts: cute.Tensor,
        offsets: cute.Tensor,
        gather_idx: cute.Tensor,
        scatter_idx: cute.Tensor,
        blocks: Int32,
        per_warp: Int32,
    ) -> None:
        """Stores the row of every slot and the token of every row."""
        c = self.c
        thread, block = thread_block_idx()
        smem = SmemAllocator()
        starts = smem.allocate_tensor(Int32, cute.make_layout(c.experts), byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        rows = self.starts_of(counts, offsets, starts, sums, block, blocks, thread)
        num_slots = indices.shape[0] * c.top_k
        flat = cute.make_layout(num_slots)
        chosen, row_of = (cute.make_tensor(x.iterator, flat) for x in (indices, scatter_idx))
        first = block * per_warp * (WARPS * c.top_k)
        end = cutlass.min(first + per_warp * (WARPS * c.top_k), num_slots)
        for choice in cutlass.range(first + thread, end, THREADS, unroll=4):
            expert = chosen[choice]
            if self.is_valid(expert):
                row = row_of[choice] + starts[expert]
                row_of[choice] = row
                gather_idx[row] = choice // c.top_k
            if const_expr(c.rule is None):
                if choice >= rows:
                    gather_idx[choice] = 0

    set_kernel_name(assign_rows, "cudnn_moe_place")

    @cute.jit
    def starts_of(
        self,
        counts: cute.Tensor,
        offsets: cute.Tensor,
        starts: cute.Tensor,
        sums: cute.Tensor,
        block: Int32,
        blocks: Int32,
        thread: Int32,
    ) -> Int32:
        """Computes ``starts``, the CTA's first row of each expert. Returns the number of rows."""
        c = self.c
        lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
        each = -(-c.experts // THREADS)
        loaded_counts = cute.make_rmem_tensor((each, 2), Int32)
        loaded_counts.fill(0)
        for j in cutlass.range_constexpr(each):
            if thread * each + j < c.experts:
                loaded_counts[j, 0] = counts[blocks, thread * each + j]
                loaded_counts[j, 1] = counts[block, thread * each + j]
        total = Int32(0)
        for j in cutlass.range_constexpr(each):
            total += loaded_counts[j, 0]
        end = total
        for distance in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(end, distance)
            end += Int32(select_(lane >= distance, other, Int32(0)))
        if lane == WARP_SIZE - 1:
            sums[warp] = end
        cute.arch.sync_threads()
        start, rows = end - total, Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            start += Int32(select_(w < warp, sums[w], Int32(0)))
            rows += sums[w]
        for j in cutlass.range_constexpr(each):
            expert = thread * each + j
            if expert < c.experts:
                starts[expert] = start + loaded_counts[j, 1]
                start += loaded_counts[j, 0]
                if block == 0:
                    offsets[expert] = start
        cute.arch.sync_threads()
        return rows


class RouteGradient(Kernel):
    """The kernel for one :class:`RouteGradientConfiguration`. A warp has a token."""

    def __init__(self, configuration: RouteGradientConfiguration) -> None:
        super().__init__(configuration)
        self.steps = -(-configuration.experts // WARP_SIZE)

    def launch(self, arguments: Mapping[str, Any]) -> None:
        names = ("gradient", "logits", "indices", "d_logits", "scatter_idx", "per_row", "scaling_factor")
        self.kernel(*map(arguments.get, names)).launch(
            grid=[cute.ceil_div(arguments["gradient"].shape[0], WARPS), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
        )

    @cute.kernel
    def kernel(
        self,
        gradient: cute.Tensor,
        logits: cute.Tensor,
        indices: cute.Tensor,
        d_logits: cute.Tensor,
        scatter_idx: Any,
        per_row: Any,
        scaling_factor: Float32,
    ) -> None:
        c, rule = self.c, self.c.rule
        thread, block = thread_block_idx()
        lane, warp = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((c.experts, WARPS)), byte_alignment=16)[None, warp]
        token = block * WARPS + warp
        if token < logits.shape[0]:
            expert, g, logit = Int32(0), Float32(0.0), -Float32.inf
            if lane < rule.top_k:
                expert = indices[token, lane]
                g = gradient[token, lane] * scaling_factor
                logit = logits[token, expert if rule.is_dense else lane].to(Float32)
            values, softmax = [Float32(0.0)] * self.steps, None
            if const_expr(rule.is_dense):
                values = [self.logit(logits, token, lane + j * WARP_SIZE) for j in range(self.steps)]
                softmax = Softmax(values)
            warp_counts, shared = self.gradients(g, logit, softmax)
            if const_expr(c.num_slots):
                value = Float32(select_(lane < rule.top_k, warp_counts, Float32(0.0)))
                if lane < c.num_slots:
                    per_row[scatter_idx[token, lane], 0, 0] = value
            dense_gradients = [-softmax.of(value) * shared if rule.is_dense else Float32(0.0) for value in values]
            for j in cutlass.range_constexpr(self.steps):
                if lane + j * WARP_SIZE < c.experts:
                    sums[lane + j * WARP_SIZE] = dense_gradients[j]
            cute.arch.sync_warp()
            if lane < rule.top_k:
                sums[expert] += warp_counts
            cute.arch.sync_warp()
            for j in cutlass.range_constexpr(self.steps):
                if lane + j * WARP_SIZE < c.experts:
                    d_logits[token, lane + j * WARP_SIZE] = sums[lane + j * WARP_SIZE].to(d_logits.element_type)

    set_kernel_name(kernel, "cudnn_moe_route_gradient")

    @cute.jit
    def logit(self, logits: cute.Tensor, token: Int32, expert: Int32) -> Float32:
        """The logit of an expert, -inf if out of range."""
        value = -Float32.inf
        if expert < self.c.experts:
            value = logits[token, expert].to(Float32)
        return value

    def gradients(self, g: Float32, logit: Float32, softmax: Any) -> tuple:
        """The gradient of a selected expert's logit, and the factor of -p for all experts, with a softmax over all."""
        rule, add = self.c.rule, cute.arch.warp_reduction_sum
        if rule.score == "softmax":
            p = (softmax or Softmax([logit])).of(logit)
            shared = add(g * p)
            return (g * p, shared) if rule.is_dense else (p * (g - shared), shared)
        s = sigmoid(logit)
        if rule.renormalize:
            total = add(s) + Float32(LEAST_SUM)
            g = (g - add(g * s) / total) / total
        return g * s * (Float32(1.0) - s), Float32(0.0)
