"""The rule for the scale factors of blocks, one element at a time in NumPy's float32."""

from __future__ import annotations

import math

import numpy as np
import torch

E4M3, E8M0, F32 = "float8_e4m3fn", "float8_e8m0fnu", "float32"
LARGEST, LEAST_NORMAL = float(np.finfo(np.float32).max), 2.0**-126
AMAX = (
    *(0.0, 2.0**-149, 1e-42, 1e-38, LEAST_NORMAL, 1.2e-36, 1.4e-36, 5e-36, 448 * LEAST_NORMAL, 6e-36, 1e-30, 1e-3),
    *(1.0, 5.0, 448.0, 1e5, 1e30, LARGEST, math.inf, math.nan),
)
"""Largest magnitudes: 0, subnormal, tiny, where reciprocals of scales overflow, ordinary, largest, not finite."""


def values(vector: int) -> torch.Tensor:
    """Blocks with these largest magnitudes, negative ones and zeros among the others."""
    x = torch.zeros(len(AMAX), vector)
    amax = torch.tensor(AMAX)
    for column, share in ((3, 1.0), (5, -0.75), (7, 0.11), (8, -0.002)):
        x[:, column] = amax * share
    x[-2:, 4:] = 1.0  # only one value is infinity, or NaN
    return x


def rule(amax: float, limit: float, kind: str, norm: float = 1.0, power_of_two: bool = False) -> tuple[float, float]:
    """The scale factor, and what values are multiplied by."""
    one, norm = np.float32(1.0), np.float32(norm)
    with np.errstate(all="ignore"):
        exact = np.float32(amax) * np.float32(1 / limit) * norm
        if math.isnan(amax):
            return math.nan, math.nan
        if kind == E8M0:
            power = next((e for e in range(-127, 127) if exact <= 2.0**e), 127)
            scale = np.float32(2.0**power)
        elif kind == E4M3:
            if math.isinf(amax):
                return math.nan, math.nan
            scale = np.float32(torch.tensor(min(float(exact), 448.0)).to(torch.float8_e4m3fn).float().item())
        elif amax == 0 or math.isinf(amax):
            return amax, 0.0
        else:
            scale = min(max(exact, max(norm, one) * np.float32(LEAST_NORMAL)), np.float32(LARGEST))
            if power_of_two:
                scale = np.float32(2.0 ** next((e for e in range(-126, 127) if scale <= 2.0**e), 127))
        if scale == 0:
            return 0.0, 0.0
        return float(scale), float(min(norm * min(one / scale, np.float32(LARGEST)), np.float32(LARGEST)))


def rules(limit: float, kind: str, norm: float = 1.0, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of all :data:`AMAX`."""
    scales, multipliers = zip(*(rule(amax, limit, kind, norm, power_of_two) for amax in AMAX), strict=True)
    return torch.tensor(scales, dtype=torch.float32), torch.tensor(multipliers, dtype=torch.float32)


def check(x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, limit: float, kind: str, norm: float = 1.0) -> None:
    """Finite blocks have finite elements and scales, and come back from them unless a narrow scale saturates or
    vanishes; of others, no value that was not finite has become finite.
    """
    finite = x.isfinite().all(1)
    assert scales[finite].isfinite().all()
    assert q[finite].isfinite().all()
    back = q.double() * scales.double()[:, None] / norm
    assert not (back.abs() <= LARGEST)[~x.isfinite()].any()  # as float32
    amax = x.abs().amax(1).double() * norm / limit
    least, most = {E8M0: (0.0, 2.0**127), E4M3: (2.0**-7, 448.0), F32: (0.0, LARGEST)}[kind]
    fits = finite & (amax >= least) & (amax <= most)
    assert fits.sum() >= 3
    step = torch.maximum(x.abs().double() / 4, scales.double()[:, None] / norm)  # of e4m3, and of e2m1, is less
    assert ((back - x).abs() <= step)[fits].all()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all numbers are equal; all NaNs are."""
    return torch.equal(a.float().nan_to_num(12345.678, torch.inf), b.float().nan_to_num(12345.678, torch.inf))
