"""Masks, dropout and autocast of the operators on PyTorch tensors, on the GPU against PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cudnn
from cudnn.ops import scaled_dot_product_attention
from support.dense_attention import attend, with_gradients

pytestmark = pytest.mark.usefixtures("outputs_hold_nan")
UNSUPPORTED = cudnn.cudnnGraphNotSupportedError
B, H, D = 2, 4, 64


def tensors(dtype: torch.dtype, s_q: int, s_kv: int) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of the result."""
    return [torch.randn(B, H, s, D, device="cuda").to(dtype) for s in (s_q, s_kv, s_kv, s_q)]


def by_hand(*arguments: torch.Tensor, seen: Any = None, kept: Any = 1.0) -> torch.Tensor:
    """Attention with a mask that is added or boolean, and weights that are kept or not."""
    q, k, v, *bias = arguments
    return attend(q, k, v, seen, bias=sum(x.to(q.dtype) for x in bias), kept=kept).o.to(v.dtype)


def check(actual: list[torch.Tensor], arguments: list[torch.Tensor], **options: Any) -> None:
    """At most twice the error of the same computation in the type, plus its rounding; four times, where a gradient is 0
    in exact arithmetic and what is computed is nothing but the sum of roundings.
    """
    exact = with_gradients(functools.partial(by_hand, **options), [x.double() for x in arguments])
    rough = with_gradients(functools.partial(by_hand, **options), arguments)
    for place, (one, other, typed) in enumerate(zip(actual, exact, rough, strict=True)):
        assert torch.isfinite(one).all(), place
        error, peer = ((x.double() - other).abs().max().item() for x in (one, typed))
        zero = other.abs().max().item() < 1e-9 * exact[0].abs().max().item()
        allowed = (4 if zero else 2) * peer + torch.finfo(one.dtype).eps * other.abs().max().item()
        assert error <= allowed, f"{place}: error {error:.3e}, allowed {allowed:.3e}"


SIZES = [(64, 64), (72, 128), (24, 40), (100, 77)]
SHAPES = ["s_q s_kv", "1 s_kv", "b 1 1 s_kv", "h s_q s_kv", "b h s_q s_kv", "s_q 1"]


def shape_of(text: str, s_q: int, s_kv: int) -> tuple[int, ...]:
    sizes = {"b": B, "h": H, "s_q": s_q, "s_kv": s_kv, "1": 1}
    return tuple(sizes[name] for name in text.split())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_boolean_masks(sizes: tuple[int, int], shape: str, dtype: torch.dtype) -> None:
    seen = torch.rand(shape_of(shape, *sizes), device="cuda") < 0.6
    if seen.shape[-1] > 1 and seen.shape[-2] > 1:
        seen[..., 3, :] = False  # a row that sees nothing
    arguments = tensors(dtype, *sizes)
    check(
        with_gradients(functools.partial(scaled_dot_product_attention, attn_mask=seen), arguments), arguments, seen=seen
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True], ids=["the type of query", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_masks_that_are_added(sizes: tuple[int, int], shape: str, wide: bool, dtype: torch.dtype) -> None:
    q, k, v, d_out = tensors(dtype, *sizes)
    bias = torch.randn(shape_of(shape, *sizes), device="cuda").to(torch.float32 if wide else dtype)
    arguments = [q, k, v, bias, d_out]
    check(with_gradients(scaled_dot_product_attention, arguments), arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "causal", "boolean", "added"])
def test_dropout(name: str, dtype: torch.dtype) -> None:
    """Both passes drop the same weights, which a value of ones and zeros shows."""
    s = 64
    q, k, _, d_out = tensors(dtype, s, s)
    v = torch.eye(s, device="cuda", dtype=dtype).expand(B, H, s, s)
    seen = torch.ones(s, s, dtype=torch.bool, device="cuda").tril() if name in ("causal", "boolean") else None
    more = [torch.randn(1, H, s, s, device="cuda").to(dtype)] if name == "added" else []
    options: dict[str, Any] = {"causal": {"is_causal": True}, "boolean": {"attn_mask": seen}}.get(name, {})

    def attention(*arguments: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return scaled_dot_product_attention(*arguments, dropout_p=0.25, **options)

    arguments = [q, k, v, *more, d_out]
    try:
        actual = with_gradients(attention, arguments)
    except UNSUPPORTED as error:
        pytest.skip(str(error))
    kept = actual[0] > 0
    visible = torch.ones_like(kept) if seen is None else seen.expand_as(kept)
    assert not kept[~visible].any()
    assert 0.7 < kept[visible].double().mean() < 0.8
    check(actual, arguments, seen=seen, kept=kept / 0.75)
    again = attention(q, k, v, *more)
    assert torch.equal(again, actual[0])
    other = scaled_dot_product_attention(q, k, v, *more, dropout_p=0.25, **options)
    assert not torch.equal(other, actual[0])


def test_each_replay_of_a_cuda_graph_drops_others() -> None:
    q, k, v, _ = tensors(torch.float16, 64, 64)
    attend = functools.partial(scaled_dot_product_attention, q, k, v, dropout_p=0.5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert all(torch.isfinite(x).all() for x in results)
    assert not torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    q, k, v, _ = tensors(torch.float32, 64, 64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda", dtype=dtype):
        out = scaled_dot_product_attention(*leaves, is_causal=True)
        peer = F.scaled_dot_product_attention(*leaves, is_causal=True)
    assert out.dtype == peer.dtype == dtype
    torch.testing.assert_close(out, peer, atol=2e-2, rtol=2e-2)
    for x in torch.autograd.grad(out.sum(), leaves):
        assert x.dtype == torch.float32
