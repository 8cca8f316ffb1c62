"""What the operators of the fused GEMMs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudnn.gemm.base import FusedGemm, allocate
from cudnn.lazy import torch


def present(results: Mapping[str, Any], order: Sequence[str], like: Any) -> tuple[Any, ...]:
    """Results by name in order; operators return tensors, so one without elements stands for one that there is not."""
    found = [results.get(name) for name in order]
    return tuple(like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in found)


def fake(
    api: type[FusedGemm],
    a: Any,
    b: Any,
    results: Mapping[str, tuple[Any, str]],
    order: Sequence[str],
    vector: int,
) -> tuple[Any, ...]:
    """Stand-ins for the results, for tracing."""
    return present(allocate(api, a, b, results, vector), order, a)
