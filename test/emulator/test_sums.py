"""The sums of `tensorcore`: the shortcut where nothing is cut off against the sum in steps, and when it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_emulator import tensorcore

f64 = np.float64
BITS = [tensorcore.ALIGNED, tensorcore.ALIGNED_FP8]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("step", [1.0, 0.125])
@pytest.mark.parametrize("largest", [1, 3, 12])
def test_shortcut_gives_the_bits_of_the_sum_in_steps(bits: int, step: float, largest: int) -> None:
    random = np.random.default_rng(largest)
    a, b = (random.integers(-largest, largest + 1, (n, 16)) * step for n in (24, 40))
    a[:3], b[:5] = -0.0, 0.0
    c = random.integers(-largest, largest + 1, (24, 40)) * step * step
    exact = [
        [sum(int(x / step) * int(y / step) for x, y in zip(row, column, strict=True)) for column in b] for row in a
    ]
    assert tensorcore._loses_nothing(a, b, c, bits)
    short, steps = tensorcore.aligned_sum(a, b, c, bits), tensorcore._sum(a, b, c, bits)
    assert short.view(np.int64).tolist() == steps.view(np.int64).tolist()
    assert short.tolist() == (np.array(exact) * step * step + c).tolist()


@pytest.mark.parametrize("bits", BITS)
def test_one_step_more_is_refused_where_the_sum_is_cut(bits: int) -> None:
    """2^bits and 1/2 do not fit into `bits` bits below the largest exponent."""
    a, b = np.array([[2.0**bits, 0.5]]), np.ones((1, 2))
    assert not tensorcore._loses_nothing(a, b, np.zeros((1, 1)), bits)
    assert tensorcore.aligned_sum(a, b, np.zeros((1, 1)), bits).item() == 2.0**bits


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        (1 / 16, 1.0, 0.0),  # not a multiple of 1/8
        (1.0, 1.0, 1 / 128),  # the addend not a multiple of 1/64
        (2.0**12, 2.0**12, 0.0),  # products of 25 bits
        (1.0, 1.0, 2.0**24),
        (0.1, 0.1, 0.1),
        (np.inf, 1.0, 0.0),
        (np.nan, 1.0, 0.0),
        (1.0, 1.0, -np.inf),
    ],
)
@pytest.mark.parametrize("bits", BITS)
def test_other_operands_are_refused(a: float, b: float, c: float, bits: int) -> None:
    assert not tensorcore._loses_nothing(np.full((2, 8), a), np.full((3, 8), b), np.full((2, 3), c), bits)
