"""Sums of experts' results: values, gradients, dropped choices; in PyTorch, emulated, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.moe import combine, sort
from cudnn.moe.combining import permute_weights, unpermute_weights
from support.selection import ALONE, WHERE, in_turn, within


def problem(where: str, tokens: int, top_k: int, hidden: int, dtype: torch.dtype, weighted: bool, dropped: bool) -> Any:
    """Rows, scatter_idx and weights."""
    device = "cuda" if where == "gpu" else "cpu"
    indices = torch.randint(-1 if dropped else 0, 4, (tokens, top_k), dtype=torch.int32)
    if dropped:
        indices[:1] = -1
    _, _, scatter_idx = sort(indices, 4)
    rows = torch.randn(tokens * top_k, hidden).to(dtype)
    rows[(scatter_idx >= 0).sum() :] = torch.nan  # rows without a slot
    weights = torch.rand(tokens, top_k).where(scatter_idx >= 0, torch.nan).to(device) if weighted else None
    return rows.to(device), scatter_idx.to(device), weights


def definition(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """In float64, with gradients; row -1 is one of zeros."""
    actual = torch.cat([rows.double(), torch.zeros(1, rows.shape[1], device=rows.device)])[scatter_idx.long()]
    if weights is None:
        return actual.sum(1)
    return (actual * weights.double().where(scatter_idx >= 0, 0.0)[..., None]).sum(1)


CASES = [
    (5, 4, 264, torch.bfloat16, True, True),
    (9, 8, 64, torch.float32, True, False),
    (3, 1, 2056, torch.float16, False, False),
    (6, 3, 8, torch.bfloat16, False, True),
    (2, 18, 136, torch.bfloat16, True, True),
    (3, 2, 4096, torch.bfloat16, True, False),
    (3, 2, 4104, torch.float32, True, False),
]


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same at no multiple of 16 bytes."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x)


def assert_combined(where: str, tensors: Any) -> None:
    rows, scatter_idx, weights = tensors
    rows.requires_grad_()
    if weights is not None:
        weights.requires_grad_()
    with within(where):
        out = combine(rows, scatter_idx, weights)
        gradient = torch.randn_like(out)
        tensors = apart(gradient)
        tensors[(scatter_idx < 0).all(1)] = torch.nan  # of a token that has no row
        out.backward(tensors)
    exact = [None if x is None else x.detach().clone().requires_grad_() for x in (rows, weights)]
    expected = definition(exact[0], scatter_idx, exact[1])
    expected.backward(gradient.double())
    tolerance = {torch.bfloat16: 1 / 256, torch.float16: 1 / 2048, torch.float32: 1e-5}[rows.dtype]
    assert out.dtype == rows.dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-5)
    torch.testing.assert_close(rows.grad, exact[0].grad, rtol=tolerance, atol=1e-5)
    if weights is not None:
        torch.testing.assert_close(weights.grad, exact[1].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("where", "tokens", "top_k", "hidden", "dtype", "weighted", "dropped"), in_turn(CASES, 2, WHERE)
)
def test_combine(
    where: str, tokens: int, top_k: int, hidden: int, dtype: torch.dtype, weighted: bool, dropped: bool
) -> None:
    assert_combined(where, problem(where, tokens, top_k, hidden, dtype, weighted, dropped))


@pytest.mark.parametrize("where", in_turn([()], 1, WHERE))
def test_tensors_at_odd_addresses(where: str) -> None:
    assert_combined(where, tuple(map(apart, problem(where, 20, 2, 16, torch.bfloat16, True, False))))


@pytest.mark.parametrize(("where", "tokens"), in_turn([(90,)], 1, WHERE))
def test_weights_of_slots_by_row_and_back(where: str, tokens: int) -> None:
    _, scatter_idx, weights = problem(where, tokens, 3, 8, torch.bfloat16, True, True)
    with within(where):
        prob, dprob = permute_weights(weights, scatter_idx, scatter_idx.numel())
        back = unpermute_weights(prob, scatter_idx)
    is_routed = scatter_idx >= 0
    rows = scatter_idx[is_routed].long()
    assert torch.equal(prob[rows, 0, 0], weights[is_routed])
    assert not dprob[rows].any()
    assert torch.equal(back, weights.where(is_routed, 0.0))


@settings(max_examples=12)
@given(st.integers(0, 12), st.integers(1, 32), st.integers(1, 5), st.booleans(), st.booleans())
def test_combine_of_any_size(tokens: int, top_k: int, eighths: int, weighted: bool, dropped: bool) -> None:
    assert_combined("reference", problem("reference", tokens, top_k, 8 * eighths, torch.float32, weighted, dropped))


@pytest.mark.parametrize("where", ALONE)
def test_compiles_without_breaks(where: str) -> None:
    rows, scatter_idx, weights = problem(where, 6, 2, 16, torch.float32, True, False)
    rows.requires_grad_()
    actual = torch.compile(combine, backend="aot_eager", fullgraph=True)(rows, scatter_idx, weights)
    assert torch.equal(actual, combine(rows, scatter_idx, weights))
    torch.library.opcheck(cudnn.moe.combining.moe_combine, (rows, scatter_idx, weights))


ROWS, CHOICES = torch.zeros(8, 16), torch.zeros(4, 2, dtype=torch.int32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rows": torch.zeros(8, 12)}, r"combine: shape of rows: got \(8, 12\); allowed: \(R, H\), H a multiple of 8"),
    ({"rows": ROWS.int()}, "type of rows: got torch.int32; .* on the CPU, not emulated, torch.float64 too"),
    ({"rows": ROWS.double(), "weights": torch.zeros(4, 2)}, "weights: got torch.float32 .*; allowed: torch.float64"),
    ({"rows": torch.zeros(16, 8).T}, r"strides of rows: .* pass rows.contiguous\(\)"),
    ({"scatter_idx": torch.zeros(4, dtype=torch.int32)}, r"shape of scatter_idx: got \(4,\)"),
    ({"scatter_idx": CHOICES.long()}, r"type of scatter_idx: .* pass scatter_idx.int\(\)"),
    ({"weights": torch.zeros(4, 3)}, r"weights: got torch.float32 of the shape \(4, 3\); allowed: .* \(4, 2\)"),
    ({"weights": torch.zeros(4, 2).half()}, "weights: got torch.float16"),
]


def test_deprecated_name_of_indices() -> None:
    old = {"row_of_choice": CHOICES}
    with pytest.warns(DeprecationWarning, match="use scatter_idx"):
        assert torch.equal(combine(ROWS, **old), combine(ROWS, CHOICES))
    with pytest.raises(TypeError, match="got both"):
        combine(ROWS, scatter_idx=CHOICES, **old)
    compiled = torch.compile(lambda rows: combine(rows, scatter_idx=CHOICES), backend="eager", fullgraph=True)
    assert torch.equal(compiled(ROWS), combine(ROWS, CHOICES))


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_combine_refuses(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        combine(**{"rows": ROWS, "scatter_idx": CHOICES, **changes})
