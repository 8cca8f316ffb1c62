"""A token's result has the same bits whatever the other tokens and their number are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.moe import experts as operands
from cudnn.nn import MoE
from cudnn.ops import moe_experts, moe_mlp
from support.selection import within

BF16 = torch.bfloat16
EXPERTS, TOP_K = 4, 2


def arguments(tokens: int, hidden: int, inner: int, experts: int, device: str) -> dict[str, Any]:
    """The first token is the same for any number of tokens."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    up, down = draw(experts, 2 * inner, hidden) / hidden**0.5, draw(experts, hidden, inner) / inner**0.5
    x, logits, dy = draw(1, hidden), draw(1, experts), draw(1, hidden)
    generator.manual_seed(tokens)
    x, logits, dy = (torch.cat([first, draw(tokens - 1, first.shape[1])]) for first in (x, logits, dy))
    weights, indices = logits.softmax(1).topk(TOP_K)
    named = {"x": x.to(BF16), "up": up.to(BF16), "down": down.to(BF16), "dy": dy.to(BF16), "weights": weights}
    return {name: t.to(device) for name, t in {**named, "indices": indices}.items()}


def of_first_token(t: dict[str, Any]) -> list[torch.Tensor]:
    """y, dx and dweights."""
    x, weights = t["x"].requires_grad_(), t["weights"].requires_grad_()
    y = moe_mlp(x, (t["indices"], weights), t["up"], t["down"], batch_invariant=True)
    y.backward(t["dy"])
    return [y[0].detach(), x.grad[0], weights.grad[0]]


def of_first_row(t: dict[str, Any]) -> list[torch.Tensor]:
    """y, dx and dprob of the first row of one expert, with as many other rows as there are tokens."""
    x, tokens = t["x"].requires_grad_(), len(t["x"])
    probs = t["weights"][:, 0].detach().clone().requires_grad_()
    counts = [tokens, *[0] * (len(t["up"]) - 1)]
    y = moe_experts(x, counts, t["up"], t["down"], probs)
    y.backward(t["dy"])
    assert probs.grad is not None
    return [y[0].detach(), x.grad[0], probs.grad[0]]


def of_layer(t: dict[str, Any]) -> list[torch.Tensor]:
    """y of the whole layer, in which the router's GEMM takes part."""
    torch.manual_seed(0)
    experts, hidden, inner = t["down"].shape
    layer = MoE(hidden, inner, 8 * -(-experts // 8), TOP_K, batch_invariant=True, renormalize=True).to(t["x"].device)
    y = layer(t["x"].requires_grad_())
    y.backward(t["dy"])  # as one autograd node
    with torch.no_grad():
        by_operators = layer(t["x"], layer.route(t["x"])[1])
    return [y[0].detach(), by_operators[0]]


def test_layers_that_are_not_invariant_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_invariant: got 12 experts; allowed: a multiple of 8 experts"):
        MoE(64, 32, 12, 2, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant: got 8 experts, with shared_gate"):
        MoE(64, 32, 8, 2, batch_invariant=True, shared_experts=1, shared_gate=True)
    layer, x = MoE(64, 32, 8, 2, batch_invariant=True), torch.randn(3, 64, dtype=BF16)
    layer.router.float()
    with within("sm_90a"), pytest.raises(ValueError, match=r"moe_router_linear: x: got torch\.bfloat16 and a weight"):
        layer(x)


@pytest.mark.parametrize("run", [of_first_token, of_first_row, of_layer])
def test_emulated(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of tokens would be gathered: of 40 tokens, an expert has 20 rows on average."""
    monkeypatch.setattr(operands, "GATHER_ROWS", 4)
    with within("sm_90a"):
        results = [run(arguments(tokens, 64, 32, EXPERTS, "cpu")) for tokens in (1, 3, 40)]
    for each in results[1:]:
        for left, right in zip(each, results[0], strict=True):
            assert torch.equal(left, right)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [of_first_token, of_first_row, of_layer])
def test_from_one_token_to_ten_thousand(run: Any) -> None:
    results = [
        run(arguments(tokens, 1024, 512, 8, "cuda")) for tokens in (1, 2, 7, 64, 129, 1000, 2048, 4096, 8192, 10_000)
    ]
    for each in results[1:]:
        for left, right in zip(each, results[0], strict=True):
            assert torch.equal(left, right)


def test_a_router_of_another_dtype_is_refused() -> None:
    layer = MoE(64, 32, 8, 2, batch_invariant=True)
    layer.router.float()
    with pytest.raises(ValueError, match=r"moe_router_linear: x: got torch\.bfloat16 and a weight torch\.float32"):
        layer(torch.randn(4, 64).bfloat16())
