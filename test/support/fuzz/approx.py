"""Values with bounds on their errors: what a correct computation in given data types may return."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cudnn.enums import reduction_mode

# Relative error of one rounding: to nearest, or towards zero, as some conversions of tensor cores do.
UNIT = {
    torch.float32: 2**-23,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float8_e4m3fn: 2**-3,
    torch.float8_e5m2: 2**-2,
    torch.int8: 0.0,
    torch.int32: 0.0,
}
# Absolute error of one rounding: the smallest number above zero.
TINY = {
    torch.float32: 2**-126,
    torch.float16: 2**-24,
    torch.bfloat16: 2**-126,
    torch.float8_e4m3fn: 2**-9,
    torch.float8_e5m2: 2**-16,
}
SATURATION = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
TF32 = 2**-9  # both operands of a tensor core MMA rounded, or cut, to ten bits
# Relative to the sum of absolute products. fp8 tensor cores of Hopper align to the largest product and keep 13 bits.
ACCUMULATION = {torch.float8_e4m3fn: 2**-11, torch.float8_e5m2: 2**-11, torch.float32: TF32, torch.int8: 0.0}
SUM = 2**-18  # of sums in float32, relative to the sum of absolute terms
APPROXIMATE = 2**-10  # hardware's tanh has eleven bits


@dataclass(frozen=True)
class Approx:
    """``value`` in float64, and how far a correct result may lie from it; None for not at all."""

    value: torch.Tensor
    error: torch.Tensor | None = None

    @property
    def bound(self) -> torch.Tensor:
        return torch.zeros_like(self.value) if self.error is None else self.error.expand(self.value.shape)

    @property
    def size(self) -> torch.Tensor:
        """The largest absolute value."""
        return self.value.abs() + self.bound

    def stored(self, dtype: torch.dtype) -> Approx:
        """Converted to ``dtype``; conversions to eight bits saturate."""
        if dtype is torch.bool:
            return self
        limit = SATURATION.get(dtype)
        value = self.value if limit is None else self.value.clamp(-limit, limit)
        if dtype.is_floating_point:
            error = self.bound + UNIT[dtype] * self.size + TINY[dtype]
            return Approx(value, torch.where(self.size > torch.finfo(dtype).max, torch.inf, error))
        return self if self.error is None else Approx(value, self.error + 1)


def apply(
    function: Callable[..., torch.Tensor], *operands: Approx, relative: float = 0.0, absolute: float = 0.0
) -> Approx:
    """An element-wise function: it errs by what it changes at the ends of its operands' intervals, plus its own."""
    value = function(*(x.value for x in operands))
    error = relative * value.abs() + absolute
    ends = [(0,) if x.error is None else (-1, 1) for x in operands]
    for signs in itertools.product(*ends):
        if not any(signs):
            continue
        moved = function(*(x.value + sign * x.bound for x, sign in zip(operands, signs, strict=True)))
        error = torch.maximum(
            error, (moved - value).abs().nan_to_num(nan=torch.inf) + relative * value.abs() + absolute
        )
    exact = not relative and not absolute and all(x.error is None for x in operands)
    return Approx(value, None if exact else error)


def contraction(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: Approx, b: Approx, dtype: torch.dtype
) -> Approx:
    """A sum of products, bilinear in its operands, on tensor cores that take ``dtype``."""
    value = product(a.value, b.value)
    unit = ACCUMULATION.get(dtype, SUM)
    if not unit and a.error is None and b.error is None:
        return Approx(value)
    error = unit * product(a.value.abs(), b.value.abs())
    if a.error is not None:
        error = error + product(a.bound, b.size)
    if b.error is not None:
        error = error + product(a.value.abs(), b.bound)
    return Approx(value, error)


def reduce(x: Approx, mode: reduction_mode, axes: Sequence[int]) -> Approx:
    """A reduction over ``axes``, which stay with extent 1."""
    v, e, axes = x.value, x.bound, list(axes)
    total = SUM * v.abs().sum(axes, keepdim=True)
    name = mode.name
    if name in ("MIN", "MAX", "AMAX"):
        value = {"MIN": v.amin, "MAX": v.amax, "AMAX": v.abs().amax}[name](axes, keepdim=True)
        return Approx(value, e.amax(axes, keepdim=True))
    if name == "ADD":
        return Approx(v.sum(axes, keepdim=True), e.sum(axes, keepdim=True) + total)
    if name == "NORM1":
        return Approx(v.abs().sum(axes, keepdim=True), e.sum(axes, keepdim=True) + total)
    if name == "AVG":
        count = v.numel() / v.sum(axes, keepdim=True).numel()
        return Approx(v.mean(axes, keepdim=True), (e.sum(axes, keepdim=True) + total) / count)
    if name == "NORM2":
        value = (v * v).sum(axes, keepdim=True).sqrt()
        return Approx(value, (e * e).sum(axes, keepdim=True).sqrt() + SUM * value)
    raise ValueError(f"no formula for {name}")


def compare(result: torch.Tensor, expected: Approx) -> str:
    """Why the result is not what was expected, or the empty string. Elements of no finite bound count for nothing."""
    got, value = result.double(), expected.value.expand(result.shape)
    bound = expected.bound.expand(result.shape) * 1.001 + 1e-30
    same = (got == value) | (got.isnan() & value.isnan())
    counted = ~bound.isinf() & ~same
    wrong = counted & ~((got - value).abs() <= bound)
    if not wrong.any():
        return ""
    ratio = torch.where(wrong, ((got - value).abs() / bound).nan_to_num(nan=torch.inf, posinf=torch.inf), 0.0)
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements wrong; at {list(at)} got {got[at].item():.6g}, "
        f"expected {value[at].item():.6g} within {bound[at].item():.3g}"
    )
