"""Peers of the MoE layer: PyTorch and transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from cudnn.lazy import torch

GroupedProduct = Callable[[Any, Any, Any], Any]
"""Takes rows (R, k), weights (E, n, k) and the end row of each expert."""


def plain(
    grouped_product: GroupedProduct, top_k: int, x: Any, up: Any, down: Any, router: Any, indices: Any = None
) -> Any:
    """The layer in PyTorch. ``up`` interleaves blocks of 32 gate and 32 up rows. ``indices`` replaces the router's."""
    logits = torch.nn.functional.linear(x, router).float()
    if indices is None:
        indices = logits.topk(top_k).indices
    weights = logits.gather(1, indices).softmax(-1)
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(up), dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    h = grouped_product(x[order // top_k], up, ends)
    gate, other = h.unflatten(1, (-1, 2, 32)).unbind(2)
    activated = (torch.nn.functional.silu(gate.float()) * other.float()).to(x.dtype).flatten(1)
    rows = grouped_product(activated, down, ends)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = torch.arange(len(order), dtype=torch.int64, device=x.device)
    return (rows[row_of_slot].view(len(x), top_k, -1).float() * weights.unsqueeze(2)).sum(1).to(x.dtype)


def grouped(rows: Any, weights: Any, ends: Any) -> Any:
    """PyTorch's grouped GEMM."""
    return torch._grouped_mm(rows, weights.mT, offs=ends)


def one_by_one(rows: Any, weights: Any, ends: Any) -> Any:
    """cuBLAS for each expert; the host waits for the sizes."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat(
        [rows_of_expert @ weight.T for rows_of_expert, weight in zip(rows.split(sizes), weights.unbind(), strict=True)]
    )


def concatenated(up: Any) -> Any:
    """Interleaved weights (E, 2 I, H), blocks of 32, as concatenated gate and up halves."""
    return up.unflatten(1, (-1, 2, 32)).transpose(1, 2).flatten(1, 3)


def interleaved(up: Any) -> Any:
    """Concatenated gate and up halves as interleaved blocks of 32."""
    return up.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)


def has_transformers() -> bool:
    """Whether Hugging Face transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_layer(shape: tuple[int, ...], up: Any, down: Any, router: Any) -> Any:
    """Hugging Face transformers' Qwen3-MoE block with copied weights; its experts use ``torch._grouped_mm``."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe  # pyright: ignore

    _, hidden, inner, experts, chosen = shape
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for module, name, weight in (
        (block.experts, "gate_up_proj", concatenated(up.detach()).contiguous()),
        (block.experts, "down_proj", down.detach()),
        (block.gate, "weight", router.detach()),
    ):
        setattr(module, name, torch.nn.Parameter(weight))
    return block
