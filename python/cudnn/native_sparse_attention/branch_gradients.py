"""The backward pass of native sparse attention on Hopper but for selection's: one call computes all of it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cudnn.fused.host import FusedAPI
from cudnn.gemm.formats import name_of
from cudnn.native_sparse_attention.compression.backward import HEADS
from cudnn.runtime.memory import aligned, placed
from cudnn.runtime.run import architecture, run
from cudnn.sdpa.base import MOST_SUMS
from cudnn.sdpa.reference import Window
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import BRANCHES, BranchGradientsConfiguration
from cudnn_kernels.signature import Scalar, Stream, Tensor, Workspace
from cudnn_kernels.sm90.heuristics import kv_block_split
from cudnn_kernels.sm90.heuristics.attention import configure_backward

ARCH = "sm_90a"
Ends = tuple[torch.Tensor, torch.Tensor] | None


def has_one_call(q: torch.Tensor, v: torch.Tensor, ck: torch.Tensor) -> bool:
    """Whether there is :func:`branch_gradients` for tensors like these."""
    exist = q.element_size() == 2 and 0 < q.numel() < MOST_SUMS and ck.numel() > 0
    exist = exist and (q.shape[-1], v.shape[-1]) in HEADS
    return exist and architecture(q) == ARCH


@functools.cache
def _compiled_for(
    dtype: str,
    gates: str,
    heads: tuple[int, int],
    packed: bool,
    window: int,
    num_sms: int,
    compressed: int,
    **sizes: int,
) -> tuple[BranchGradientsConfiguration, dict[str, int]]:
    """What the kernels are compiled for, and the numbers that they take. ``compressed``: keys of a sequence."""
    ends = {"varlen": packed, "right": True, "left": True}
    scalars = {"split": 0, "parts": 1}
    if not packed:
        unsplit = configure_backward(dtype, heads, **ends)
        scalars = kv_block_split.split_of_window(unsplit, sizes, Window(0, window - 1), num_sms)
    c: Any = configure_backward(dtype, heads, **ends, split=scalars["split"] > 0)
    one_block = not packed and compressed <= c.tile[1] and sizes["sq"] // compressed <= c.tile[0]
    return BranchGradientsConfiguration(c, gates, one_block), {**scalars, "right": 0, "left": window - 1}


def branch_gradients(
    inputs: dict[str, torch.Tensor],
    branches: tuple[torch.Tensor, ...],
    values: tuple[torch.Tensor, torch.Tensor],
    ends: Ends,
    scale: float,
    window: int,
    longest: int,
) -> dict[str, torch.Tensor]:
    """The gradients of the window, of compression, of gates and of selection's result, by names with ``d``.

    ``inputs``: packed tensors by name, of which ``out`` is the gradient of the sum. ``values``: log-sum-exp of
    compression ``[T, H_q]`` and of the window ``[B, H_q, longest, 1]``. ``ends``: cu_seqlens, all rows and
    compressed ones; None where each has ``longest`` rows.
    """
    inputs_by_name = {x: placed(y) for x, y in inputs.items()} | dict(
        zip(BRANCHES, map(aligned, branches), strict=True)
    )
    inputs_by_name["gates"] = aligned(inputs_by_name["gates"])
    likes = {f"d_{x}": x for x in ("gates", *BRANCHES)}
    likes |= {f"{y}d{x}": y + x for y in ("", "compressed_") for x in "qkv" if y + x in inputs}
    results = {x: torch.empty_like(inputs_by_name[y], memory_format=torch.contiguous_format) for x, y in likes.items()}
    q, k, small = inputs_by_name["q"], inputs_by_name["k"], inputs_by_name["compressed_k"]
    count = ends[0].shape[0] - 1 if ends else q.shape[0] // longest
    each = 1 if ends else count
    keys = {"workspace": k.shape[0] // each, "compressed_workspace": small.shape[0] // each}
    c, scalars = _compiled_for(
        name_of(q.dtype),
        name_of(inputs_by_name["gates"].dtype),
        (q.shape[2], inputs_by_name["v"].shape[2]),
        ends is not None,
        window,
        FusedAPI.num_sms(q.get_device()) if q.is_cuda else ARCHITECTURES[ARCH].num_sms,
        compressed=keys["compressed_workspace"],
        b=count,
        hq=q.shape[1],
        hk=k.shape[1],
        sq=longest,
        sk=longest,
    )
    sizes = {"b": count, "hq": q.shape[1], "sq": q.shape[0] // each, **scalars}
    tensors = {**inputs_by_name, **results, "compressed_lse": values[0], "windowed_lse": values[1].squeeze(-1)}
    if ends is None:
        tensors |= {x: y.unflatten(0, (count, -1)).transpose(1, 2) for x, y in tensors.items() if x != "windowed_lse"}
    else:
        tensors |= dict(zip(("cum_seqlen_q", "cum_seqlen_k", "cum_seqlen_compressed"), (ends[0], *ends), strict=True))
    arguments = []
    for slot in c.slots():
        if isinstance(slot, Workspace):
            size = slot.offsets({**sizes, "sk": keys[slot.name]})[1]
            arguments.append(torch.empty(size, dtype=torch.uint8, device=q.device))
        elif isinstance(slot, Tensor):
            arguments.append(tensors[slot.name])
        elif isinstance(slot, Scalar):
            arguments.append(scale if slot.name == "scale_softmax" else scalars[slot.name])
        else:
            assert isinstance(slot, Stream)
    run(ARCHITECTURES[ARCH].source(c), c, *arguments)
    return results
