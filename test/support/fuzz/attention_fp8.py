"""Attention on fp8 tensors, forward and backward, with a scale for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import cudnn
from support.fuzz.approx import ACCUMULATION, SATURATION, TINY, UNIT, Approx
from support.fuzz.attention import AttentionCase, Draw, Shape
from support.fuzz.attention_formula import Problem
from support.fuzz.case import literal, pick

_SIGMAS = 6  # errors of many roundings add up like random numbers
_FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_BACKWARD = (
    *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
    *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
)
_NAMES = {
    "sliding_window_length": "sliding_window",
    "diagonal_band_left_bound": "left_bound",
    "diagonal_band_right_bound": "right_bound",
}


@dataclass(frozen=True)
class AttentionFp8Case(AttentionCase):
    """Attention on fp8 tensors; ``scales`` are scales and descales by the names of the call's arguments."""

    family = "attention_fp8"
    full = 500
    most_refused = 0.06

    scales: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def draw(cls, seed: int) -> AttentionFp8Case:
        return cls(**_Draw(seed).fields())

    def _options(self, tensors: dict[str, cudnn.tensor], options: dict[str, Any]) -> dict[str, Any]:
        scales = {name: tensors[name] for name in self.scales}
        names = _NAMES | ({"sliding_window_length": "left_bound"} if self.backward else {})
        return {names.get(name, name): value for name, value in options.items()} | scales

    def _call_forward(
        self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor], options: dict[str, Any]
    ) -> dict[str, cudnn.tensor | None]:
        results = graph.sdpa_fp8(**self._options(tensors, options))
        return dict(zip(("O", "Stats", "Amax_S", "Amax_O"), results, strict=True))

    def _call_backward(
        self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor], options: dict[str, Any]
    ) -> dict[str, cudnn.tensor]:
        del options["use_alibi_mask"]
        results = graph.sdpa_fp8_backward(**self._options(tensors, options))
        return dict(zip(("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP"), results, strict=True))

    def derived(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs = super().derived(data)
        if "o" in outputs:
            f = self.scales
            limit = SATURATION[getattr(torch, self.io)]
            outputs["o"] = (outputs["o"] * f["descale_v"] / f["descale_o"]).clamp(-limit, limit)
        return outputs

    def expected(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> dict[str, Approx]:
        problem = self._problem(data, results)
        io = getattr(torch, self.io)
        if self.backward:
            o, d_o, stats = (self._dense(data, name) for name in ("o", "do", "stats"))
            outputs = _backward(problem, self.scales, o, d_o, stats, self.scale[0])
        else:
            outputs = _forward(problem, self.scales)
        return {name: x.stored(io if name in ("O", "dQ", "dK", "dV") else torch.float32) for name, x in outputs.items()}

    @property
    def score_scale(self) -> float:
        return self.scale[0] * self.scales["descale_q"] * self.scales["descale_k"]


class _Draw(Draw):
    types = (*("float8_e4m3fn",) * 9, "float8_e5m2")
    excluded = frozenset({"bias", "alibi", "dropout", "own mask", "softcap", "bottom_right", "sink"})

    def shape_of(self) -> Shape:
        """Head sizes that are multiples of 16; 128 in the backward pass, and rows a multiple of 16."""
        s = super().shape_of()
        # cuDNN 9.19 has no engine for one query.
        d_qk, d_v = (128, 128) if self.backward else (max(16, size // 16 * 16) for size in (s.d_qk, s.d_v))
        if not self.rarely():
            d_v = min(d_v, d_qk)
        s_q = max(2, s.s_q)
        if self.backward and not self.rarely():
            s_q = -(-s_q // 16) * 16
        return Shape(s.b, s.h_q, s.h_k, s.h_k, s_q, s.s_kv, d_qk, d_v)

    def features(self) -> set[str]:
        chosen = super().features() - self.excluded
        if self.backward:
            return chosen - {"ragged"}
        if self.shape.s_q > self.shape.s_kv and not chosen & {"ragged", "causal", "window", "right"}:
            chosen -= {"padding", "paged"}  # Amax_S of cuDNN 9.19 is too large
        return chosen

    def fields(self) -> dict[str, Any]:
        case_fields = super().fields()
        rng = self.rng
        if not self.rarely():
            case_fields["statistics"] = tuple(name for name in case_fields.get("statistics", ()) if name == "Stats")
        case_fields["implementation"], case_fields["stats_dtype"] = "AUTO", "float32"
        scales = dict.fromkeys(_BACKWARD if self.backward else _FORWARD, 1.0)
        for letter in "qkv":
            scales[f"descale_{letter}"] = round(rng.uniform(0.3, 1.5), 3)
        scales["scale_s"] = pick(rng, {256.0: 3, 1.0: 1, 128.0: 1})
        scales["descale_s"] = 1 / scales["scale_s"]
        if self.backward:
            scales |= {"descale_o": 0.02, "descale_dO": round(rng.uniform(0.3, 1.0), 3), "scale_dP": 4.0}
            scales |= {"descale_dP": 1 / 4.0, "scale_dQ": 4.0, "scale_dK": 4.0, "scale_dV": 4.0}
        else:
            scales["scale_o"] = rng.choice([16.0, 64.0])
        # Scores of about unit variance, whatever the descales.
        number, passed = case_fields["scale"]
        if passed in ("number", ""):
            number = round(number / (scales["descale_q"] * scales["descale_k"]), 4)
            case_fields["scale"] = (number, "number")
        for name, value in scales.items():
            self.inputs[name] = literal(value)
        case_fields["scales"] = scales
        return case_fields


def _noisy(rounded: torch.Tensor, unit: float, tiny: float, product: Any) -> torch.Tensor:
    """The error of a product whose first operand, ``rounded``, was rounded element by element."""
    return _SIGMAS * product((unit * rounded.abs() + tiny) ** 2).sqrt()


def _largest(x: Approx, valid: torch.Tensor) -> Approx:
    """The largest absolute value of the valid elements."""
    value = torch.where(valid, x.value.abs(), 0.0).amax().view(1, 1, 1, 1)
    return Approx(value, torch.where(valid, x.bound, 0.0).amax().view(1, 1, 1, 1))


def _times(x: Approx, factor: float) -> Approx:
    return Approx(x.value * factor, x.bound * abs(factor))


def _forward(p: Problem, f: Mapping[str, float]) -> dict[str, Approx]:
    weights, statistics = p.softmax()
    v = p.repeat_heads(p.v)
    error = _noisy(weights, UNIT[p.dtype], TINY[p.dtype] / f["scale_s"], lambda x: x @ v**2)
    error = error + (p.relative + ACCUMULATION[p.dtype]) * (weights @ v.abs())
    total = _times(Approx(weights @ v, error), f["scale_s"] * f["descale_s"] * f["descale_v"])
    o = _times(total, f["scale_o"])
    return {
        **statistics,
        "O": Approx(o.value, o.bound + p.beyond["O"]),
        "Amax_S": _largest(Approx(weights, p.relative * weights), p.seen),
        "Amax_O": _largest(total, p.valid_rows),
    }


def _backward(
    p: Problem, f: Mapping[str, float], o: torch.Tensor, d_o: torch.Tensor, stats: torch.Tensor, score_scale: float
) -> dict[str, Approx]:
    unit, tiny, rough = UNIT[p.dtype], TINY[p.dtype], ACCUMULATION[p.dtype]
    o, d_o = (torch.where(p.valid_rows, x, 0.0) for x in (o, d_o))
    weights = torch.where(p.seen, torch.exp(p.scores - torch.where(stats.isinf(), 0.0, stats)), 0.0)
    v, k = p.repeat_heads(p.v), p.repeat_heads(p.k)
    heads = p.k.shape[1]

    def product(a: Approx, b: torch.Tensor, scale: float, factor: float, grouped: bool) -> Approx:
        """``a b``, ``a`` in fp8 scaled by ``scale``, the result scaled by ``factor``."""
        value = a.value @ b
        noise = _noisy(a.value, unit, tiny / scale, lambda x: x @ b**2)
        error = noise + a.bound @ b.abs() + rough * (a.value.abs() @ b.abs())
        if grouped:
            value, error = p.gathered(value, heads), p.gathered(error, heads)
        return _times(Approx(value, error), factor)

    def transposed(x: Approx) -> Approx:
        return Approx(x.value.mT, x.bound.mT)

    d_v = product(
        transposed(Approx(weights, p.relative * weights)),
        d_o,
        f["scale_s"],
        f["scale_s"] * f["descale_s"] * f["descale_dO"],
        True,
    )
    row = (d_o * o).sum(-1, keepdim=True) * f["descale_dO"] * f["descale_o"]
    factor = f["descale_dO"] * f["descale_v"]
    inner = d_o @ v.mT * factor - row
    spent = weights * (p.relative * inner.abs() + (rough * factor) * (d_o.abs() @ v.abs().mT) + 2**-16 * row.abs())
    d_s = _times(Approx(weights * inner, spent), score_scale)
    joint = f["scale_dP"] * f["descale_dP"]
    d_q = product(d_s, k, f["scale_dP"], joint * f["descale_k"], False)
    d_k = product(transposed(d_s), p.q, f["scale_dP"], joint * f["descale_q"], True)
    outputs = {"Amax_dP": _largest(d_s, p.seen)}
    for name, x, valid in (("dQ", d_q, p.valid_rows), ("dK", d_k, p.valid_columns), ("dV", d_v, p.valid_columns)):
        outputs[f"Amax_{name}"] = _largest(x, valid)
        scaled = _times(x, f[f"scale_{name}"])
        outputs[name] = Approx(scaled.value, scaled.bound + p.beyond[name])
    return outputs
