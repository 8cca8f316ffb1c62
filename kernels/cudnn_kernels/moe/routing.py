"""Choosing experts for tokens, and sorting tokens by expert: three kernels of one call.

1. A warp chooses the experts of a token, its lanes holding consecutive experts each. It finds the best one of all
   lanes, then which of that lane's experts it is, by reading these with all lanes; then that lane's next best is known,
   and the next round follows. A warp takes consecutive tokens and counts its choices of each expert; at the end the CTA
   adds up the counts of its warps.
2. The counts of CTAs are added up for each expert.
3. Each choice is given its row: where the expert's rows begin, how many choices of it earlier CTAs have, how many
   earlier warps of the CTA, and how many earlier ones the warp.

Nothing depends on the order in which warps run. Only integers are counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.moe.configuration import WARP, WARPS, RouteConfiguration, RouteGradientConfiguration
from cudnn_kernels.naming import name

THREADS = WARP * WARPS
REMOVED = -(2**31)  # below the key of every number
ADDING_WARPS = 32
MOST_SORTED = 4  # experts that a lane sorts in registers
LEAST_SUM = 1e-20  # added to sums of sigmoids


def key_of(value: Any) -> Any:
    """An integer in the order of values: -0 equals 0, and NaN is above all numbers."""
    bits = (value + Float32(0.0)).bitcast(Int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return Int32(select_(value == value, key, Int32(0x7FFFFFFF)))


def value_of(key: Any) -> Any:
    """The value of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).bitcast(Float32)


def first_of(lanes: Any) -> Any:
    """The number of the lowest bit."""
    return cute.arch.popc((lanes & -lanes) - 1)


def exponential(value: Any) -> Any:
    """e to the power of a value."""
    return cute.math.exp2(value * Float32(math.log2(math.e)), approx=True)


def sigmoid(value: Any) -> Any:
    """1 / (1 + e^-value)."""
    return Float32(1.0) / (Float32(1.0) + exponential(-value))


class Softmax:
    """The softmax of a token's logits, of which every lane has some."""

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
        """The probability of an expert with such a logit."""
        return exponential(value - self.largest) / self.total


class Route(Kernel):
    """The kernels for one :class:`RouteConfiguration`."""

    def __init__(self, configuration: RouteConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.is_sorted = c.share <= MOST_SORTED and c.rule is not None and c.rule.n_group == 1
        self.steps = c.share  # without, a lane reads every 32nd expert's logit ...
        self.pitch = c.share | 1  # ... and finds the best of `share` consecutive ones, each lane in banks of its own

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        stream, counts, indices = given["stream"], given["counts"], given["indices"]
        blocks = counts.shape[0] - 1
        per_warp = cute.ceil_div(indices.shape[0], blocks * WARPS)
        scored = (given.get(x) for x in ("logits", "bias", "weights", "chosen"))
        self.choose(*scored, indices, given["row_of_choice"], counts, given.get("scaling_factor"), per_warp).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )
        self.add_up(counts, blocks).launch(
            grid=[-(-c.experts // WARP), 1, 1], block=[ADDING_WARPS * WARP, 1, 1], stream=stream
        )
        self.place(
            indices, counts, given["offsets"], given["token_of_row"], given["row_of_choice"], blocks, per_warp
        ).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def choose(
        self,
        logits: Any,
        bias: Any,
        weights: Any,
        chosen: Any,
        indices: cute.Tensor,
        row_of_choice: cute.Tensor,
        counts: cute.Tensor,
        scaling_factor: Any,
        per_warp: Int32,
    ) -> None:
        """``per_warp`` tokens for each warp; ``row_of_choice``: how many choices of the expert the CTA made before."""
        c = self.c
        thread, block = here()
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        counters = smem.allocate_tensor(Int32, cute.make_layout((c.experts, WARPS)), byte_alignment=16)
        mine = counters[None, warp]
        for j in cutlass.range_constexpr(self.steps):
            if self.is_expert(lane, j):
                mine[lane + j * WARP] = 0
        cute.arch.sync_warp()
        first = (block * WARPS + warp) * per_warp
        end = cutlass.min(first + per_warp, indices.shape[0])
        if const_expr(c.rule is not None):
            places = c.top_k if self.is_sorted else WARP * self.pitch
            keys = smem.allocate_tensor(Int32, cute.make_layout((places, WARPS)), byte_alignment=16)
            ahead = cute.make_rmem_tensor(self.steps, Float32)
            if first < end:
                self.load(logits, first, lane, ahead)
            for token in cutlass.range(first, end, unroll=1):
                values = [ahead[j] for j in range(self.steps)]
                if token + 1 < end:
                    self.load(logits, token + 1, lane, ahead)
                expert, logit, softmax = self.choose_for(logits, bias, token, lane, values, keys[None, warp])
                weight = self.weight(logit, softmax) * scaling_factor
                if lane < c.top_k:
                    indices[token, lane] = expert
                    weights[token, lane] = weight
                    if const_expr(not c.rule.is_dense):
                        chosen[token, lane] = logit.to(chosen.element_type)
                    row_of_choice[token, lane] = mine[expert]
                    mine[expert] += 1
                cute.arch.sync_warp()
        else:
            for token in cutlass.range(first, end, unroll=1):
                self.count(indices, row_of_choice, token, lane, mine)
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
                    row_of_choice[token, lane] += mine[expert]

    name(choose, "cudnn_moe_choose")

    def is_expert(self, lane: Int32, j: int) -> Any:
        """Whether there is a j-th expert for a lane: known when compiling, but for the last one."""
        return True if (j + 1) * WARP <= self.c.experts else lane + j * WARP < self.c.experts

    def is_valid(self, expert: Int32) -> Any:
        """Whether a choice was not dropped."""
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
        return lane * self.c.share + j if self.is_sorted else lane + j * WARP

    def is_logit(self, lane: Int32, j: int) -> Any:
        """Whether there is one."""
        if self.is_sorted and self.c.experts % WARP:
            return self.logit(lane, j) < self.c.experts
        return self.is_expert(lane, j)

    @cute.jit
    def count(
        self, indices: cute.Tensor, row_of_choice: cute.Tensor, token: Int32, lane: Int32, counters: cute.Tensor
    ) -> None:
        """Counts the given choices of a token, which may be the same expert more than once."""
        expert = Int32(-1)
        if lane < self.c.top_k:
            expert = indices[token, lane]
        same = cute.arch.match_sync(0xFFFFFFFF, expert)
        before = cute.arch.popc(same & cute.arch.lanemask_lt())
        if lane < self.c.top_k:
            if self.is_valid(expert):
                row_of_choice[token, lane] = counters[expert] + Int32(before)
            else:
                row_of_choice[token, lane] = -1
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
        mine = cute.make_rmem_tensor(self.steps, Int32)
        for j in cutlass.range_constexpr(self.steps):
            expert, value = self.logit(lane, j), values[j]
            mine[j] = REMOVED
            if const_expr(is_scored):
                value = self.score(value, softmax)
            if self.is_logit(lane, j):
                if const_expr(c.biased):
                    value += bias[expert]
                mine[j] = key_of(value)
            if const_expr(not self.is_sorted):
                keys[expert // c.share * self.pitch + expert % c.share] = mine[j]
        if const_expr(self.is_sorted):
            expert = self.best_of_sorted(mine, keys, lane)
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
        """The lane-th best of all experts, of which each lane has a few in registers. The best one's lane writes it."""
        c, last = self.c, self.c.share - 1
        experts = cute.make_rmem_tensor(c.share, Int32)
        for j in cutlass.range_constexpr(c.share):
            experts[j] = lane * c.share + j
        for end in cutlass.range_constexpr(last, 0, -1):
            for j in cutlass.range_constexpr(end):
                if keys[j] < keys[j + 1]:  # equal ones stay
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
        best = Int32(REMOVED)  # of the lane's experts
        for i in cutlass.range_constexpr(c.share):
            best = cutlass.max(best, keys[lane * self.pitch + i])
        expert = Int32(0)
        for k in cutlass.range_constexpr(c.rule.top_k):
            top = cute.arch.warp_redux_sync(best, "max")
            owner = first_of(cute.arch.vote_ballot_sync(best == top))
            key = Int32(REMOVED)
            if lane < c.share:
                key = keys[owner * self.pitch + lane]
            place = first_of(cute.arch.vote_ballot_sync(key == top))
            if lane == k:
                expert = owner * c.share + place
            if lane == place:  # the only lane that reads this place
                key = Int32(REMOVED)
                keys[owner * self.pitch + place] = key
            rest = cute.arch.warp_redux_sync(key, "max")
            if lane == owner:
                best = rest
        return expert

    @cute.jit
    def remove_groups(self, keys: cute.Tensor, lane: Int32) -> None:
        """Removes the experts of groups that are not among the best. Lane g has what group g is worth."""
        c, rule = self.c, self.c.rule
        size = c.experts // rule.n_group
        worth = Int32(REMOVED)
        for g in cutlass.range_constexpr(rule.n_group):
            first, second = Int32(REMOVED), Int32(REMOVED)
            for j in cutlass.range_constexpr(-(-size // WARP)):
                if lane + j * WARP < size:
                    expert = g * size + lane + j * WARP
                    key = keys[expert // c.share * self.pitch + expert % c.share]
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
        kept = Int32(0)
        for _ in cutlass.range_constexpr(rule.topk_group):
            top = cute.arch.warp_redux_sync(worth, "max")
            group = first_of(cute.arch.vote_ballot_sync(worth == top))
            kept |= Int32(1) << group
            if lane == group:
                worth = Int32(REMOVED)
        for j in cutlass.range_constexpr(self.steps):
            expert = lane + j * WARP
            if self.is_expert(lane, j):
                if (kept >> (expert // size)) & 1 == 0:
                    keys[expert // c.share * self.pitch + expert % c.share] = Int32(REMOVED)
        cute.arch.sync_warp()

    def score(self, logit: Float32, softmax: Any) -> Float32:
        """That of an expert, before experts are chosen."""
        return sigmoid(logit) if self.c.rule.score == "sigmoid" else softmax.of(logit)

    def weight(self, logit: Float32, softmax: Any) -> Float32:
        """That of a chosen expert; lanes without one have a logit of -inf."""
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
    def add_up(self, counts: cute.Tensor, blocks: Int32) -> None:
        """Counts become those of all earlier CTAs, and the last row those of all. A lane has an expert."""
        thread, column = here()
        lane, warp = thread % WARP, thread // WARP
        most = -(-self.c.blocks(2**31) // ADDING_WARPS)
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARP, ADDING_WARPS)), byte_alignment=16)
        expert = column * WARP + lane
        found = cute.make_rmem_tensor(most, Int32)
        found.fill(0)
        if expert < self.c.experts:
            for i in cutlass.range_constexpr(most):
                if warp * most + i < blocks:
                    found[i] = counts[warp * most + i, expert]
        total = Int32(0)
        for i in cutlass.range_constexpr(most):
            total += found[i]
        sums[lane, warp] = total
        cute.arch.sync_threads()
        before = Int32(0)
        for w in cutlass.range(warp, unroll=4):
            before += sums[lane, w]
        if expert < self.c.experts:
            for i in cutlass.range_constexpr(most):
                if warp * most + i < blocks:
                    counts[warp * most + i, expert] = before
                before += found[i]
            if warp == ADDING_WARPS - 1:
                counts[blocks, expert] = before

    name(add_up, "cudnn_moe_add_up")

    @cute.kernel
    def place(
        self,
        indices: cute.Tensor,
        counts: cute.Tensor,
        offsets: cute.Tensor,
        token_of_row: cute.Tensor,
        row_of_choice: cute.Tensor,
        blocks: Int32,
        per_warp: Int32,
    ) -> None:
        """Every choice's row, and every row's token."""
        c = self.c
        thread, block = here()
        smem = SmemAllocator()
        starts = smem.allocate_tensor(Int32, cute.make_layout(c.experts), byte_alignment=16)
        sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS), byte_alignment=16)
        rows = self.starts_of(counts, offsets, starts, sums, block, blocks, thread)
        choices = indices.shape[0] * c.top_k
        flat = cute.make_layout(choices)
        chosen, row_of = (cute.make_tensor(x.iterator, flat) for x in (indices, row_of_choice))
        first = block * per_warp * (WARPS * c.top_k)
        end = cutlass.min(first + per_warp * (WARPS * c.top_k), choices)
        for choice in cutlass.range(first + thread, end, THREADS, unroll=4):
            expert = chosen[choice]
            if self.is_valid(expert):
                row = row_of[choice] + starts[expert]
                row_of[choice] = row
                token_of_row[row] = choice // c.top_k
            if const_expr(c.rule is None):
                if choice >= rows:
                    token_of_row[choice] = 0

    name(place, "cudnn_moe_place")

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
        """``starts``: where the CTA's rows of each expert begin. Returns how many rows there are."""
        c = self.c
        lane, warp = thread % WARP, thread // WARP
        each = -(-c.experts // THREADS)
        found = cute.make_rmem_tensor((each, 2), Int32)
        found.fill(0)
        for j in cutlass.range_constexpr(each):
            if thread * each + j < c.experts:
                found[j, 0] = counts[blocks, thread * each + j]
                found[j, 1] = counts[block, thread * each + j]
        total = Int32(0)
        for j in cutlass.range_constexpr(each):
            total += found[j, 0]
        end = total
        for distance in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(end, distance)
            end += Int32(select_(lane >= distance, other, Int32(0)))
        if lane == WARP - 1:
            sums[warp] = end
        cute.arch.sync_threads()
        start, rows = end - total, Int32(0)
        for w in cutlass.range_constexpr(WARPS):
            start += Int32(select_(w < warp, sums[w], Int32(0)))
            rows += sums[w]
        for j in cutlass.range_constexpr(each):
            expert = thread * each + j
            if expert < c.experts:
                starts[expert] = start + found[j, 1]
                start += found[j, 0]
                if block == 0:
                    offsets[expert] = start
        cute.arch.sync_threads()
        return rows


class RouteGradient(Kernel):
    """The kernel for one :class:`RouteGradientConfiguration`. A warp has a token."""

    def __init__(self, configuration: RouteGradientConfiguration) -> None:
        super().__init__(configuration)
        self.steps = -(-configuration.experts // WARP)

    def launch(self, given: Mapping[str, Any]) -> None:
        names = ("gradient", "logits", "indices", "d_logits", "row_of_choice", "of_rows", "scaling_factor")
        self.kernel(*map(given.get, names)).launch(
            grid=[cute.ceil_div(given["gradient"].shape[0], WARPS), 1, 1],
            block=[THREADS, 1, 1],
            stream=given["stream"],
        )

    @cute.kernel
    def kernel(
        self,
        gradient: cute.Tensor,
        logits: cute.Tensor,
        indices: cute.Tensor,
        d_logits: cute.Tensor,
        row_of_choice: Any,
        of_rows: Any,
        scaling_factor: Float32,
    ) -> None:
        c, rule = self.c, self.c.rule
        thread, block = here()
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
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
                values = [self.logit(logits, token, lane + j * WARP) for j in range(self.steps)]
                softmax = Softmax(values)
            mine, shared = self.gradients(g, logit, softmax)
            if const_expr(c.choices):
                value = Float32(select_(lane < rule.top_k, mine, Float32(0.0)))
                if lane < c.choices:
                    of_rows[row_of_choice[token, lane], 0, 0] = value
            others = [-softmax.of(value) * shared if rule.is_dense else Float32(0.0) for value in values]
            for j in cutlass.range_constexpr(self.steps):
                if lane + j * WARP < c.experts:
                    sums[lane + j * WARP] = others[j]
            cute.arch.sync_warp()
            if lane < rule.top_k:
                sums[expert] += mine
            cute.arch.sync_warp()
            for j in cutlass.range_constexpr(self.steps):
                if lane + j * WARP < c.experts:
                    d_logits[token, lane + j * WARP] = sums[lane + j * WARP].to(d_logits.element_type)

    name(kernel, "cudnn_moe_route_gradient")

    @cute.jit
    def logit(self, logits: cute.Tensor, token: Int32, expert: Int32) -> Float32:
        """That of an expert, -inf where there is none."""
        value = -Float32.inf
        if expert < self.c.experts:
            value = logits[token, expert].to(Float32)
        return value

    def gradients(self, g: Float32, logit: Float32, softmax: Any) -> tuple:
        """What a chosen expert's logit gets, and the factor of -p that all experts' get where the softmax is of all."""
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
