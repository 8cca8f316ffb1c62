"""Attention in PyTorch, in float32, or float64 for float64 inputs: sequence by sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cudnn.gemm.formats import wide
from cudnn.gemm.scales import round_to
from cudnn.lazy import torch
from cudnn.sdpa.layouts import by_head


@dataclass(frozen=True)
class Window:
    """The keys that a row attends to: ``right`` and ``left`` of its diagonal; None: all on that side.

    The diagonal begins in the upper left corner or, else, ends in the lower right one.
    """

    right: int | None
    left: int | None
    top_left: bool = False

    def hidden(self, queries: int, keys: int, device: Any) -> Any:
        """True for keys that a row does not see: (queries, keys)."""
        row = torch.arange(queries, dtype=torch.int64, device=device)[:, None]
        row = row if self.top_left else row + keys - queries
        key = torch.arange(keys, dtype=torch.int64, device=device)
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        if self.right is not None:
            hidden |= key > row + self.right
        if self.left is not None:
            hidden |= key < row - self.left
        return hidden


def cached(x: Any, index: int, lengths: Any, table: Any) -> Any:
    """K or V of a sequence, (h, s, d), with its ``lengths`` rows; gathered from pages if there is a page table."""
    length = int(lengths[index])
    if table is None:
        return x[index, :, :length]
    pages = table[index, : -(-length // x.shape[2])]
    return x[pages].transpose(0, 1).flatten(1, 2)[:, :length]


def sequences(tensors: Mapping[str, Any], packed: bool) -> Iterator[dict[str, Any]]:
    """The tensors of each sequence: matrices (h, s, d), LSE (h, s). Writing them writes the whole tensors."""
    queries, keys = ("q", "o", "do", "dq"), ("k", "v", "dk", "dv")
    present = [name for name in (*queries, *keys) if tensors.get(name) is not None]
    rows = {name: by_head(tensors[name], packed) for name in ("lse", "dlse") if tensors.get(name) is not None}
    if not packed:
        table, lengths = tensors.get("page_table"), tensors.get("seqlen_k")
        for index in range(tensors["q"].shape[0]):
            parts = {name: tensors[name][index] for name in present if table is None or name not in keys}
            if lengths is not None:
                parts |= {name: cached(tensors[name], index, lengths, table) for name in "kv"}
            yield parts | {name: x[index] for name, x in rows.items()}
        return
    ends_q, ends_k = (tensors[name].tolist() for name in ("cum_seqlen_q", "cum_seqlen_k"))
    for index in range(len(ends_q) - 1):
        q, k = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
        parts = {name: tensors[name][q if name in queries else k].transpose(0, 1) for name in present}
        yield parts | {name: x[:, q] for name, x in rows.items()}


def forward(
    tensors: Mapping[str, Any], window: Window, scale: float, scale_output: float, softcap: float, packed: bool
) -> None:
    """Writes O and LSE. P is rounded to the inputs' type, 2^8 P to 8 bits. Rows that see nothing: 0 and -inf, or the
    sink.
    """
    sink, lift = tensors.get("sink"), 256 if tensors["v"].dtype.itemsize == 1 else 1
    for index, x in enumerate(sequences(tensors, packed)):
        qhead_per_kvhead = x["q"].shape[0] // max(x["k"].shape[0], 1)
        descales = {name: descale[index] for name in "qkv" if (descale := tensors.get(f"descale_{name}")) is not None}
        q, k, v = (wide(x[name]) for name in "qkv")
        k, v = (value.repeat_interleave(qhead_per_kvhead, 0) for value in (k, v))
        if descales:
            q, k, v = (
                value * descales[name].repeat_interleave(qhead_per_kvhead)[:, None, None]
                for name, value in zip("qkv", (q, k, v), strict=True)
            )
        hidden = window.hidden(x["q"].shape[1], k.shape[1], k.device)
        scores = scale * q @ k.mT
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        first = (sink if sink is not None else scores.new_tensor(-math.inf)).reshape(-1, 1, 1)
        scores = torch.cat((first.expand(*scores.shape[:2], 1), scores.masked_fill(hidden, -math.inf)), -1)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest.masked_fill(largest == -math.inf, 0)).exp()
        total = weights.sum(-1, keepdim=True)
        products = wide((lift * weights[..., 1:]).to(x["v"].dtype)) / lift @ v
        x["o"].copy_(round_to(torch.where(total == 0, 0, scale_output * products / total), x["o"].dtype))
        x["lse"].copy_((largest + total.log()).squeeze(-1))


def backward(tensors: Mapping[str, Any], window: Window, scale: float, packed: bool, softcap: float = 0.0) -> None:
    """Writes dQ, dK, dV and, with sinks, dsink from the LSE. P and dS are rounded to the inputs' type."""
    sink, dsink = tensors.get("sink"), tensors.get("dsink")
    if dsink is not None:
        dsink.zero_()
    for x in sequences(tensors, packed):
        dtype, qhead_per_kvhead = x["q"].dtype, x["q"].shape[0] // max(x["k"].shape[0], 1)
        q, o, do = (wide(x[name]) for name in ("q", "o", "do"))
        k, v = (wide(x[name]).repeat_interleave(qhead_per_kvhead, 0) for name in "kv")
        hidden = window.hidden(q.shape[1], k.shape[1], k.device)
        scores = scale * q @ k.mT
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        weights = (scores - x["lse"][..., None]).exp().masked_fill(hidden, 0)
        delta = (o * do).sum(-1, keepdim=True)
        if "dlse" in x:
            delta -= x["dlse"][..., None]
        if sink is not None and dsink is not None:
            dsink -= ((sink[:, None] - x["lse"]).exp() * delta.squeeze(-1)).sum(-1)
        gradients = weights * (do @ v.mT - delta)
        if softcap:
            gradients *= 1 - (scores / softcap).square()
        gradients = wide(gradients.masked_fill(hidden, 0).to(dtype))
        heads = (x["k"].shape[0], qhead_per_kvhead)
        x["dv"].copy_((wide(weights.to(dtype)).mT @ do).unflatten(0, heads).sum(1))
        x["dk"].copy_(scale * (gradients.mT @ q).unflatten(0, heads).sum(1))
        x["dq"].copy_(scale * gradients @ k)
