"""The softmax of rows that come block by block (M. Milakov, N. Gimelshein: Online normalizer calculation, 2018)."""

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
SLACK = 8.0
"""Scores, times log2(e), may exceed what is subtracted from them by so much before all sums are multiplied anew."""
LARGEST_SUM = 2.0**12
"""What a thread's exponentials of a row and a block may add up to where maxima are not sought: float16 has room."""
LEAST_SCALE = 2.0**-60
"""The least that products of 8 bits are multiplied by: it makes 0 of them, and LIFT / scale is finite."""
LIFT = 8.0
"""The largest exponential's logarithm where they have 8 bits: e4m3 ends at 448, and loses bits below 2^-6."""


@dataclass
class State:
    """Of each of a thread's rows, what is subtracted from scores and the sum of exponentials.

    What is subtracted is at most ``SLACK``, or the slack given, less than the largest score so far.
    ``scale`` is that of the scores, times log2(e). ``sums`` are those of the thread's own values. ``largest`` are its
    own largest scores so far, where they are wanted. ``lift`` is what is subtracted less than that, LIFT / scale, where
    exponentials are rounded to 8 bits, to have the range of their type.
    """

    maxima: cute.Tensor
    sums: cute.Tensor
    scale: Float32
    largest: cute.Tensor | None = None
    lift: Any = None


@dataclass
class Scale:
    """What scores are multiplied by, and the number that caps them, if any does."""

    scores: Float32
    softcap: Any = None

    def powers(self) -> tuple[Float32, Any]:
        """What makes powers of 2 of scores, or of what :func:`cap` leaves, and its factor."""
        if self.softcap is None:
            return self.scores * LOG2_E, None
        return self.softcap * LOG2_E, 2 * LOG2_E * self.scores / self.softcap


def reset(state: State) -> None:
    """Before a row's first block."""
    state.maxima.fill(-math.inf)
    state.sums.fill(0.0)
    if state.largest is not None:
        state.largest.fill(-math.inf)


def reset_to_sink(state: State, sink: Float32, rows: RowLayout, thread: Int32) -> None:
    """The same where a row's sum begins with a logit that no value belongs to."""
    logit, one = sink * LOG2_E / state.scale, Float32(1.0)
    if state.lift is not None:
        logit, one = logit - state.lift, Float32(2.0**LIFT)
    for slot in range(rows.slots):
        state.maxima[slot] = logit
        state.sums[slot] = Float32(select_(thread % rows.neighbours == 0, one, Float32(0.0)))


def cap(scores: cute.Tensor, factor: Any) -> None:
    """Where there is a factor, scores s become tanh(s / cap); it is 2 log2(e) / cap, times the scale of the scores.

    Unlike tanh.approx, which errs by 2^-11, as exact as the exponentials.
    """
    if factor is not None:
        for i in range(cute.size(scores)):
            powers = cute.math.exp2(scores[i] * factor, fastmath=True)
            scores[i] = 1.0 - 2.0 * cute.arch.rcp_approx(1.0 + powers)


def update(
    state: State, scores: cute.Tensor, rows: RowLayout, width: int, slack: float = SLACK, chains: int = 2
) -> Sequence[Float32]:
    """Turns a block's scores into exponentials, in place. They are at most 2^slack, or 2^(slack + LIFT).

    What was added up before must be multiplied by the result, row by row. Without slack, the maxima are exact. A row's
    maximum is found in so many ``chains`` at a time.
    """
    corrections = []
    for slot in range(rows.slots):
        order = rows.order(width, slot)
        largest = rows.across(largest_of(scores, order, chains), cute.arch.fmax)
        correction = raise_row(state, slot, largest, slack)
        state.sums[slot] = powers(state, slot, scores, order, state.sums[slot] * correction)
        corrections.append(correction)
    return corrections


def largest_of(scores: cute.Tensor, order: Sequence[int], chains: int = 2) -> Float32:
    """The largest of some scores, found in so many chains."""
    found = [scores[i] for i in order[:chains]]
    for place, i in enumerate(order[chains:]):
        found[place % chains] = cute.arch.fmax(found[place % chains], scores[i])
    return functools.reduce(cute.arch.fmax, found)


def raise_row(state: State, slot: int, largest: Float32, slack: float = SLACK) -> Float32:
    """Raises what is subtracted of a row, whose largest score this is: what its sum is to be multiplied by."""
    before = state.maxima[slot]
    largest = cute.arch.fmax(before, largest if state.lift is None else largest - state.lift)
    state.maxima[slot] = Float32(select_((largest - before) * state.scale > slack, largest, before))
    return cute.math.exp2(before * state.scale - shift(state, slot), fastmath=True)


def shift(state: State, slot: int) -> Float32:
    """What is subtracted of a row, times the scale; 0 before its first score."""
    subtracted = state.maxima[slot]
    return Float32(select_(subtracted == -math.inf, Float32(0.0), subtracted * state.scale))


def powers(
    state: State, slot: int, scores: cute.Tensor, order: Sequence[int], total: Any, subtracted: Any = None
) -> Float32:
    """Turns a row's scores into exponentials, in place; their sum and the total."""
    sums, subtracted = [total, Float32(0.0)], shift(state, slot) if subtracted is None else subtracted
    for place, i in enumerate(order):
        value = cute.math.exp2(scores[i] * state.scale - subtracted, fastmath=True)
        scores[i] = value
        sums[place % 2] = sums[place % 2] + value
    return sums[0] + sums[1]


def guess(state: State, scores: cute.Tensor, rows: RowLayout, width: int) -> Boolean:
    """:func:`update` without maxima: what is subtracted stays as it is. Whether that suffices for a thread's values.

    It does if they add up to at most ``LARGEST_SUM`` in each row. They do not where a row has seen nothing before: the
    sum is infinite, or NaN. Then exponentials and sums are of no use.
    """
    fits = []
    for slot in range(rows.slots):
        order, subtracted = rows.order(width, slot), state.maxima[slot] * state.scale
        found = powers(state, slot, scores, order, Float32(0.0), subtracted)
        state.sums[slot] = state.sums[slot] + found
        fits.append(found <= LARGEST_SUM)
    return functools.reduce(operator.and_, fits)


def finish(state: State, rows: RowLayout, slot: int) -> tuple[Float32, Float32]:
    """What a row's products must be multiplied by, and its log of the sum of exponentials.

    Those of a row that saw nothing: 0 and -inf.
    """
    total = rows.across(state.sums[slot], lambda a, b: a + b)
    empty = total == 0.0
    factor = Float32(select_(empty, Float32(0.0), 1.0 / total))
    log_sum = (state.maxima[slot] * state.scale + cute.math.log2(total, fastmath=True)) * math.log(2)
    return factor, Float32(select_(empty, Float32(-math.inf), log_sum))
