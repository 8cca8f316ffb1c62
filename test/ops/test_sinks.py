"""Attention with sinks: a logit of each head that joins the softmax of every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.ops import scaled_dot_product_attention
from support.dense_attention import attend, band

F64 = torch.float64
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "left_bound": 3},
    "mask": {"attn_mask": torch.rand(2, 1, 9, 11, generator=torch.Generator().manual_seed(1)) < 0.3},
}


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and sinks: 4 heads, of which two share those of keys."""
    torch.manual_seed(0)
    shapes = [(2, 4, 9, 16), (2, 2, 11, 16), (2, 2, 11, 8), (4,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **masks: Any) -> torch.Tensor:
    seen = masks.get("attn_mask")
    if masks.get("is_causal"):
        seen = band(9, 11, masks.get("left_bound", 99) - 1, 0)
    return attend(q, k, v, seen, sink=sinks).o


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    arguments = tensors(F64)
    actual = scaled_dot_product_attention(*arguments[:3], enable_gqa=True, sinks=arguments[3], **CASES[name])
    expected = formula(*arguments, **CASES[name])
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(actual.shape, dtype=F64)
    pairs = zip(
        torch.autograd.grad(actual, arguments, weights), torch.autograd.grad(expected, arguments, weights), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other)


def test_vmap() -> None:
    many = [torch.stack([x.detach(), 2 * x.detach()]).requires_grad_() for x in tensors(F64)]

    def step(*arguments: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*arguments[:3], is_causal=True, enable_gqa=True, sinks=arguments[3])

    actual, expected = torch.vmap(step)(*many), torch.stack([step(*(x[i] for x in many)) for i in range(2)])
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(actual.shape, dtype=F64)
    torch.testing.assert_close(*(torch.autograd.grad(y, many, weights) for y in (actual, expected)))


def test_compiled_and_in_autocast() -> None:
    q, k, v, sinks = tensors(torch.float32)

    def step(q: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, sinks=sinks)

    expected = step(q)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), [q])
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), [q])[0], expected_gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = step(q)
    (gradient,) = torch.autograd.grad(half.sum(), [q])
    assert half.dtype is torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.02)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sinks": torch.zeros(2)}, r"sinks: got torch.float32 of the shape \(2,\) on cpu; allowed: .* \(4,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, "sinks: got torch.int32"),
        ({"seq_len_q": torch.tensor([9, 9])}, "sinks: got lengths with them"),
        ({"attn_mask": torch.zeros(9, 11, dtype=F64).requires_grad_()}, "sinks: got a mask with a gradient"),
    ],
)
def test_refusals(changed: dict[str, Any], words: str) -> None:
    q, k, v, sinks = tensors(F64)
    with pytest.raises(ValueError, match=words):
        scaled_dot_product_attention(q, k, v, enable_gqa=True, **{"sinks": sinks, **changed})
