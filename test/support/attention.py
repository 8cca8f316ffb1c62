"""Attention problems for tests: graphs for them, and their solution in PyTorch, sharing no code with the library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import cudnn
from support.graphs import like, run


@dataclass
class Problem:
    """One attention problem: shapes and features. Lengths, where given, are those of a padding mask."""

    b: int = 2
    h_q: int = 4
    h_k: int = 2
    h_v: int = 2
    s_q: int = 192
    s_kv: int = 192
    d_qk: int = 64
    d_v: int = 64
    scale: float | None = 0.15
    bias: tuple[int, ...] = ()
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def left(self) -> int | None:
        return self.options.get("sliding_window_length", self.options.get("diagonal_band_left_bound"))

    @property
    def right(self) -> int | None:
        causal = self.options.get("use_causal_mask") or self.options.get("use_causal_mask_bottom_right")
        return 0 if causal else self.options.get("diagonal_band_right_bound")

    @property
    def bottom_right(self) -> bool:
        alignment = self.options.get("diagonal_alignment")
        return bool(self.options.get("use_causal_mask_bottom_right")) or (
            alignment is not None and alignment.name == "BOTTOM_RIGHT"
        )

    def rows(self, entry: int) -> int:
        return self.lengths_q[entry] if self.lengths_q else self.s_q

    def columns(self, entry: int) -> int:
        return self.lengths_kv[entry] if self.lengths_kv else self.s_kv

    def visible(self) -> torch.Tensor:
        """``[b, 1, s_q, s_kv]``, one element at a time."""
        seen = torch.zeros(self.b, 1, self.s_q, self.s_kv, dtype=torch.bool)
        for entry in range(self.b):
            offset = self.columns(entry) - self.rows(entry) if self.bottom_right else 0
            for row in range(self.rows(entry)):
                first = 0 if self.left is None else max(0, row + offset - self.left + 1)
                end = (
                    self.columns(entry)
                    if self.right is None
                    else min(self.columns(entry), row + offset + self.right + 1)
                )
                seen[entry, 0, row, first : max(first, end)] = True
        return seen

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Random q, k, v and dO (batch, sequence, heads, size in memory), bias where there is one."""

        def random(heads: int, sequence: int, size: int) -> torch.Tensor:
            return torch.randn(self.b, sequence, heads, size, device=device).to(dtype).transpose(1, 2)

        made = {
            "q": random(self.h_q, self.s_q, self.d_qk),
            "k": random(self.h_k, self.s_kv, self.d_qk),
            "v": random(self.h_v, self.s_kv, self.d_v),
            "dO": random(self.h_q, self.s_q, self.d_v),
        }
        if self.bias:
            made["bias"] = torch.randn(self.bias, device=device).to(dtype)
        return made

    def lengths(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """seq_len_q and seq_len_kv."""
        if not self.lengths_q:
            return {}
        pairs = {"seq_len_q": self.lengths_q, "seq_len_kv": self.lengths_kv}
        return {
            name: torch.tensor(ends, dtype=torch.int32, device=device).view(-1, 1, 1, 1) for name, ends in pairs.items()
        }

    def valid(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Which rows of a tensor of Q's, or of K's, sequence length count, as ``[b, 1, s, 1]``."""
        rows = torch.tensor([self.rows(entry) for entry in range(self.b)], device=device).view(-1, 1, 1, 1)
        columns = torch.tensor([self.columns(entry) for entry in range(self.b)], device=device).view(-1, 1, 1, 1)
        return {
            "q": torch.arange(self.s_q, device=device).view(1, 1, -1, 1) < rows,
            "kv": torch.arange(self.s_kv, device=device).view(1, 1, -1, 1) < columns,
        }


def attention(problem: Problem, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """O, Stats, dQ, dK, dV (and dBias), computed in ``dtype`` by matrix products, softmax and autograd."""
    leaves = {
        name: x.detach().to(dtype).clone().requires_grad_()
        for name, x in tensors.items()
        if name in ("q", "k", "v", "bias")
    }
    q = leaves["q"]
    k = leaves["k"].repeat_interleave(problem.h_q // problem.h_k, 1)
    v = leaves["v"].repeat_interleave(problem.h_q // problem.h_v, 1)
    scores = q @ k.transpose(2, 3)
    if problem.scale is not None:
        scores = scores * problem.scale
    if problem.bias:
        scores = scores + leaves["bias"]
    visible = problem.visible().to(q.device)
    alive = visible.any(-1, keepdim=True)
    masked = scores.masked_fill(~visible & alive, float("-inf"))  # rows that see nothing are put right below
    o = torch.where(alive, masked.softmax(-1), 0.0) @ v
    stats = torch.where(alive, masked.logsumexp(-1, keepdim=True), float("-inf"))
    names = ["q", "k", "v", *(["bias"] if problem.bias else [])]
    valid = problem.valid(str(q.device))["q"]
    gradients = torch.autograd.grad(
        o, [leaves[name] for name in names], torch.where(valid, tensors["dO"].to(dtype), 0.0)
    )
    found = {"O": o.detach(), "Stats": stats.detach()}
    named = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias"}
    return found | {named[name]: gradient for name, gradient in zip(names, gradients, strict=True)}


BOTTOM_RIGHT = cudnn.diagonal_alignment.BOTTOM_RIGHT
CASES = {
    "plain": Problem(),
    "one head of K and V": Problem(h_k=1, h_v=1),
    "as many heads": Problem(h_k=4, h_v=4),
    "fewer heads of V than of K": Problem(h_k=4, h_v=2),
    "odd lengths": Problem(s_q=131, s_kv=259),
    "d_v smaller": Problem(d_qk=192, d_v=128),
    "head size 128": Problem(d_qk=128, d_v=128),
    "no scale": Problem(scale=None, d_qk=32, d_v=32),
    "causal": Problem(s_kv=200, options={"use_causal_mask": True}),
    "causal, s_q > s_kv": Problem(s_q=200, s_kv=136, options={"use_causal_mask": True}),
    "causal bottom right": Problem(s_q=136, s_kv=200, options={"use_causal_mask_bottom_right": True}),
    "right bound": Problem(options={"diagonal_band_right_bound": 5}),
    "right bound bottom right": Problem(
        s_q=128, s_kv=200, options={"diagonal_band_right_bound": 9, "diagonal_alignment": BOTTOM_RIGHT}
    ),
    "left bound": Problem(options={"diagonal_band_left_bound": 40}),
    "sliding window": Problem(options={"use_causal_mask": True, "sliding_window_length": 40}),
    "sliding window bottom right": Problem(
        s_q=136, s_kv=200, options={"use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 40}
    ),
    "padding": Problem(s_q=130, s_kv=200, lengths_q=(77, 130), lengths_kv=(128, 33)),
    "padding, causal": Problem(s_kv=200, lengths_q=(77, 192), lengths_kv=(200, 199), options={"use_causal_mask": True}),
    "padding, causal bottom right": Problem(
        s_kv=200, lengths_q=(77, 120), lengths_kv=(200, 133), options={"use_causal_mask_bottom_right": True}
    ),
    "padding, sliding window bottom right": Problem(
        s_kv=200,
        lengths_q=(77, 120),
        lengths_kv=(200, 133),
        options={"use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 30},
    ),
    "bias": Problem(bias=(1, 4, 192, 192)),
    "bias for each batch entry": Problem(bias=(2, 1, 192, 192)),
    "bias, causal": Problem(bias=(1, 4, 192, 192), options={"use_causal_mask": True}),
    "bias, padding": Problem(bias=(1, 4, 192, 192), lengths_q=(77, 192), lengths_kv=(128, 33)),
}


@dataclass
class Described:
    """A graph with attention in it: the data of its inputs, and its outputs by name."""

    graph: cudnn.pygraph
    inputs: dict[cudnn.tensor, torch.Tensor]
    outputs: dict[str, cudnn.tensor]

    def run(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.outputs, run(self.graph, self.inputs, *self.outputs.values()), strict=True))


def describe(
    graph: cudnn.pygraph,
    problem: Problem,
    data: dict[str, torch.Tensor],
    scale: torch.Tensor | None = None,
    stats: bool = True,
    d_bias: bool = True,
    **options: Any,
) -> Described:
    """The backward pass where ``data`` has O and Stats, else the forward pass. ``scale`` replaces the number."""
    inputs: dict[cudnn.tensor, torch.Tensor] = {}

    def tensor(name: str, value: torch.Tensor) -> cudnn.tensor:
        made = graph.tensor_like(value, name) if name == "scale" else like(graph, value, name)
        inputs[made] = value
        return made

    backward = "Stats" in data
    arguments: dict[str, Any] = {**problem.options, **options, "name": "attention"}
    arguments["attn_scale"] = problem.scale if scale is None else tensor("scale", scale)
    arguments |= {name: tensor(name, data[name]) for name in ("q", "k", "v", *(["bias"] if problem.bias else []))}
    if problem.lengths_q:
        device = data["q"].device.type
        lengths = problem.lengths("cpu" if device == "meta" else device)
        arguments |= {"use_padding_mask": True, **{name: tensor(name, value) for name, value in lengths.items()}}
    outputs: dict[str, cudnn.tensor] = {}
    if backward:
        if problem.bias and d_bias:
            bias = data["bias"]
            outputs["dBias"] = arguments["dBias"] = graph.tensor(list(bias.shape), list(bias.stride()), bias.dtype)
        given = {name: tensor(name, data[port]) for name, port in (("o", "O"), ("dO", "dO"), ("stats", "Stats"))}
        gradients = graph.sdpa_backward(**arguments, **given)
        outputs = dict(zip(("dQ", "dK", "dV"), gradients, strict=True)) | outputs
    else:
        o, statistics = graph.sdpa(**arguments, generate_stats=stats)
        outputs = {"O": o} | ({"Stats": statistics} if stats else {})
    for output in outputs.values():
        output.set_output(True)
    return Described(graph, inputs, outputs)


def described_backward_data(problem: Problem, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The forward pass's data with O and Stats of the right shape, for graphs that are built but not run."""
    o = torch.empty_like(data["dO"])
    return {**data, "O": o, "Stats": torch.empty(*o.shape[:3], 1, device=o.device)}
