"""Online softmax (M. Milakov, N. Gimelshein: Online normalizer calculation for softmax, 2018)."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_

from cudnn_kernels.epilogue.fragment import RowLayout

LOG2_E = math.log2(math.e)
RESCALE_THRESHOLD = 8.0
"""Lazy rescale: scores times log2(e) may exceed the subtracted maximum by this much before O and the row sum are
rescaled.
"""
MAX_SPECULATIVE_SUM = 2.0**12
"""Bound of a thread's sum of exponentials of a row and a block if the maximum is not updated: float16 holds it."""
MIN_FP8_SCALE = 2.0**-60
"""Lower bound of the softmax scale of fp8: scores round to 0 with it, and FP8_MAX_OFFSET / scale stays finite."""
FP8_MAX_OFFSET = 8.0
"""log2 of the largest fp8 exponential (FlashAttention-3's Max_offset): e4m3 ends at 448 and loses bits below 2^-6."""


@dataclass
class OnlineSoftmax:
    """The running maximum and sum of each of a thread's rows.

    ``row_max`` is what is subtracted from scores: at most the rescale threshold below the largest score so far.
    ``scale_log2`` is the softmax scale times log2(e). ``row_sum`` sums the thread's own exponentials; the threads of a
    row add theirs in :func:`finalize`. ``true_max``: the thread's own largest scores so far, if the kernel returns
    them. ``fp8_max_offset``: FP8_MAX_OFFSET / scale, subtracted from the maximum of fp8 rows so that P uses the range
    of fp8.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    scale_log2: Float32
    true_max: cute.Tensor | None = None
    fp8_max_offset: Any = None


@dataclass
class Scale:
    """The softmax scale and the softcap, if there is one."""

    softmax_scale: Float32
    softcap: Any = None

    def log2_scales(self) -> tuple[Float32, Any]:
        """The scale of the exponent of exp2, applied to the scores or to what :func:`apply_softcap` leaves, and the
        softcap's scale.
        """
        if self.softcap is None:
            return self.softmax_scale * LOG2_E, None
        return self.softcap * LOG2_E, 2 * LOG2_E * self.softmax_scale / self.softcap


def reset(state: OnlineSoftmax) -> None:
    """Initializes the state before a row's first block."""
    state.row_max.fill(-math.inf)
    state.row_sum.fill(0.0)
    if state.true_max is not None:
        state.true_max.fill(-math.inf)


def reset_to_sink(state: OnlineSoftmax, sink: Float32, rows: RowLayout, thread: Int32) -> None:
    """:func:`reset` with an attention sink: the row sum starts with the sink's logit."""
    logit, sink_weight = sink * LOG2_E / state.scale_log2, Float32(1.0)
    if state.fp8_max_offset is not None:
        logit, sink_weight = logit - state.fp8_max_offset, Float32(2.0**FP8_MAX_OFFSET)
    for slot in range(rows.slots):
        state.row_max[slot] = logit
        state.row_sum[slot] = Float32(select_(thread % rows.lanes_per_row == 0, sink_weight, Float32(0.0)))


def apply_softcap(scores: cute.Tensor, factor: Any) -> None:
    """Scores s become tanh(s / softcap), unless ``factor`` is None; factor = 2 log2(e) * softmax_scale / softcap.

    By exp2 and rcp.approx, which is as exact as the exponentials; tanh.approx is off by up to 2^-11.
    """
    if factor is not None:
        for i in range(cute.size(scores)):
            exp2x = cute.math.exp2(scores[i] * factor, fastmath=True)
            scores[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + exp2x)


def online_softmax(
    state: OnlineSoftmax,
    scores: cute.Tensor,
    rows: RowLayout,
    width: int,
    rescale_threshold: float = RESCALE_THRESHOLD,
    chains: int = 2,
) -> Sequence[Float32]:
    """Replaces a block's scores by exponentials and updates the state; the row scales for the rescale of O.

    Exponentials are at most 2^rescale_threshold, times 2^FP8_MAX_OFFSET for fp8. With a threshold of 0 the maxima are
    exact. ``chains``: independent fmax chains per row, which hide the instruction's latency.
    """
    row_scales = []
    for slot in range(rows.slots):
        order = rows.order(width, slot)
        row_max = rows.all_reduce_row(local_max(scores, order, chains), cute.arch.fmax)
        row_scale = update_row_max(state, slot, row_max, rescale_threshold)
        state.row_sum[slot] = exp2_and_sum(state, slot, scores, order, state.row_sum[slot] * row_scale)
        row_scales.append(row_scale)
    return row_scales


def local_max(scores: cute.Tensor, order: Sequence[int], chains: int = 2) -> Float32:
    """The maximum of some of a thread's scores, by independent chains."""
    chains_max = [scores[i] for i in order[:chains]]
    for position, i in enumerate(order[chains:]):
        chains_max[position % chains] = cute.arch.fmax(chains_max[position % chains], scores[i])
    return functools.reduce(cute.arch.fmax, chains_max)


def update_row_max(
    state: OnlineSoftmax, slot: int, new_max: Float32, rescale_threshold: float = RESCALE_THRESHOLD
) -> Float32:
    """Raises a row's subtracted maximum if the threshold is exceeded; the factor to rescale the row's sum and O."""
    old_max = state.row_max[slot]
    new_max = cute.arch.fmax(old_max, new_max if state.fp8_max_offset is None else new_max - state.fp8_max_offset)
    state.row_max[slot] = Float32(select_((new_max - old_max) * state.scale_log2 > rescale_threshold, new_max, old_max))
    return cute.math.exp2(old_max * state.scale_log2 - scaled_row_max(state, slot), fastmath=True)


def scaled_row_max(state: OnlineSoftmax, slot: int) -> Float32:
    """The subtracted maximum times the scale; 0 before the row's first visible score, so that -inf - -inf does not
    arise.
    """
    row_max = state.row_max[slot]
    return Float32(select_(row_max == -math.inf, Float32(0.0), row_max * state.scale_log2))


def exp2_and_sum(
    state: OnlineSoftmax, slot: int, scores: cute.Tensor, order: Sequence[int], total: Any, scaled_max: Any = None
) -> Float32:
    """Replaces a row's scores by exponentials; ``total`` plus their sum."""
    partial_sums, scaled_max = [total, Float32(0.0)], scaled_row_max(state, slot) if scaled_max is None else scaled_max
    for position, i in enumerate(order):
        value = cute.math.exp2(scores[i] * state.scale_log2 - scaled_max, fastmath=True)
        scores[i] = value
        partial_sums[position % 2] = partial_sums[position % 2] + value
    return partial_sums[0] + partial_sums[1]


def speculative_softmax(state: OnlineSoftmax, scores: cute.Tensor, rows: RowLayout, width: int) -> Boolean:
    """:func:`online_softmax` with the old maximum: no row maximum is computed. Whether the result is valid for the
    thread.

    It is if each of its rows adds at most ``MAX_SPECULATIVE_SUM``. A row that has seen no score before gives inf or
    NaN, which fails the comparison. If it is not valid, exponentials and sums must be discarded.
    """
    fits = []
    for slot in range(rows.slots):
        order, scaled_max = rows.order(width, slot), state.row_max[slot] * state.scale_log2
        partial_sum = exp2_and_sum(state, slot, scores, order, Float32(0.0), scaled_max)
        state.row_sum[slot] = state.row_sum[slot] + partial_sum
        fits.append(partial_sum <= MAX_SPECULATIVE_SUM)
    return functools.reduce(operator.and_, fits)


def finalize(state: OnlineSoftmax, rows: RowLayout, slot: int) -> tuple[Float32, Float32]:
    """The normalization of a row of O, 1 / row_sum, and its LSE; 0 and -inf for a row that sees no key."""
    row_sum = rows.all_reduce_row(state.row_sum[slot], lambda a, b: a + b)
    empty = row_sum == 0.0
    factor = Float32(select_(empty, Float32(0.0), 1.0 / row_sum))
    lse = (state.row_max[slot] * state.scale_log2 + cute.math.log2(row_sum, fastmath=True)) * math.log(2)
    return factor, Float32(select_(empty, Float32(-math.inf), lse))
