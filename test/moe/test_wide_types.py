"""The layer of experts in float32 and float64, which the reference alone takes: its gradients by differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

import cudnn
from cudnn import moe
from cudnn.nn import MoE
from cudnn.ops import moe_mlp

F32, F64 = torch.float32, torch.float64
EXPERTS, HIDDEN, INNER = 3, 8, 32


def operands(activation: str = "swiglu", tokens: int = 4, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """x, up, down, their biases and weights of two experts for each token; leaves."""
    wide = INNER if activation == "srelu" else 2 * INNER
    shapes = [(tokens, HIDDEN), (EXPERTS, wide, HIDDEN), (EXPERTS, HIDDEN, INNER), (EXPERTS, wide), (EXPERTS, HIDDEN)]
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in (*shapes, (tokens, 2))]


@pytest.mark.parametrize(
    ("activation", "glu_layout", "lists"),
    [("swiglu", "concatenated", False), *((a, "interleaved", x) for a in ("swiglu", "geglu", "srelu") for x in (0, 1))],
)
def test_gradients_of_the_operator(activation: str, glu_layout: str, lists: bool) -> None:
    """With a choice that was dropped."""
    x, up, down, up_bias, down_bias, weights = operands(activation)
    indices = torch.tensor([[0, 2], [-1, 1], [2, 0], [0, 1]])

    def layer(x: Any, up_bias: Any, down_bias: Any, weights: Any, *matrices: Any) -> Any:
        half = len(matrices) // 2
        up, down = (list(part) if lists else part[0] for part in (matrices[:half], matrices[half:]))
        return moe_mlp(
            x,
            (indices, weights),
            up,
            down,
            up_bias,
            down_bias,
            activation=activation,
            glu_layout=glu_layout,
            glu_clamp_max=0.5,
            glu_clamp_min=-0.4,
        )

    each = [w.detach().clone().requires_grad_() for part in (up, down) for w in part] if lists else [up, down]
    assert gradcheck(layer, (x, up_bias, down_bias, weights, *each), fast_mode=True)


RULES: list[dict[str, Any]] = [
    {},
    {"renormalize": True, "scaling_factor": 2.5},
    {"pre_softmax": False},
    {"score": "sigmoid"},
    {"score": "sigmoid", "renormalize": True, "n_group": 2},
]


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_routers(rule: dict[str, Any], corrected: bool) -> None:
    """And of what balances them."""
    logits, bias = torch.randn(5, 8, dtype=F64).requires_grad_(), torch.rand(8) if corrected else None

    def routed(logits: torch.Tensor) -> Any:
        routing = moe.route(logits, 3, bias=bias, **rule)
        balance = moe.load_balance_loss(logits, routing, rule.get("score", "softmax"))
        return routing.weights, balance, moe.z_loss(logits)

    assert all(result.dtype is F64 for result in routed(logits))
    assert gradcheck(routed, (logits,))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_what_combines(weighted: bool) -> None:
    """Around experts of one's own; a choice was dropped."""
    offsets, gather_idx, scatter_idx = moe.sort(torch.tensor([[0, 2], [-1, 1], [2, 0]], dtype=torch.int32), 3)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x[gather_idx[: offsets[-1]].long()].square()
        return moe.combine(rows, scatter_idx, weights if weighted else None)

    arguments = [torch.randn(shape, dtype=F64).requires_grad_() for shape in ((3, HIDDEN), (3, 2))]
    assert gradcheck(layer, arguments)
    with cudnn.emulation("sm_90a"), pytest.raises(ValueError, match=r"^combine: type of rows: got torch\.float64;"):
        layer(*arguments)


def test_a_router_tells_apart_what_float32_does_not() -> None:
    """Of equal logits the lower expert would come first; NaN is above all numbers."""
    logits = torch.tensor([[1.0, 1.0 + 1e-12, -1.0, -1.0 - 1e-12], [0.0, float("inf"), float("nan"), 1.0]], dtype=F64)
    assert moe.route(logits, 4).indices.tolist() == [[1, 0, 2, 3], [2, 1, 3, 0]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"renormalize": True, "bias": True, "shared_experts": 1, "shared_gate": True},
        {"activation": "geglu", "glu_layout": "concatenated", "pre_softmax": False},
        {"activation": "srelu", "score": "sigmoid", "correction_bias": True, "shared_experts": 2},
    ],
)
def test_gradients_of_the_module(options: dict[str, Any]) -> None:
    layer = MoE(HIDDEN, INNER, 4, 2, dtype=F64, **options)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def called(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    leaves = [torch.randn(5, HIDDEN, dtype=F64), *(p.detach().clone() for p in parameters)]
    assert gradcheck(called, [leaf.requires_grad_() for leaf in leaves], fast_mode=True)


def test_float32_is_float64_but_for_rounding() -> None:
    """Results and gradients, of the operator and with gradients added to others, which are float32."""
    indices, actual = torch.randint(EXPERTS, (40, 2)), []
    arguments = operands(tokens=40)
    for dtype in (F64, F32):
        x, up, down, up_bias, down_bias, weights = (t.detach().to(dtype).requires_grad_() for t in arguments)
        sums = [torch.ones(w.shape) for w in (up, down)]
        for main_grads in (None, (sums[0], sums[1])):
            y = moe_mlp(x, (indices, weights), up, down, up_bias, down_bias, main_grads=main_grads)
            y.square().sum().backward()
        gradients = [t.grad for t in (x, up, down, up_bias, down_bias, weights)]
        assert y.dtype is dtype
        assert all(g is not None and g.dtype is dtype for g in gradients)
        actual.append([y, *gradients, *sums])
    for exact, rounded in zip(*actual, strict=True):
        exact = exact.detach().double()
        torch.testing.assert_close(rounded.detach().double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def test_what_kernels_do_not_take() -> None:
    """Also after a call outside of the emulation that took it."""
    for dtype, words in ((F32, r"got torch\.float32; .* use that, or torch\.autocast"), (F64, r"got torch\.float64;")):
        x, up, down, _, _, weights = operands(dtype=dtype)
        routing = (torch.zeros(4, 2, dtype=torch.int64), weights)
        moe_mlp(x, routing, up, down)
        with cudnn.emulation("sm_90a"), pytest.raises(ValueError, match=f"^moe_mlp: types: {words}"):
            moe_mlp(x, routing, up, down)
    with cudnn.emulation("sm_90a"), pytest.raises(ValueError, match=r"^route: type of logits: got torch\.float64;"):
        moe.route(x, 2)
    with pytest.raises(ValueError, match=r"got torch\.int64 and torch\.float32; .* pass weights\.double\(\)"):
        moe_mlp(x, (routing[0], weights.float()), up, down)
    wide = [torch.zeros(shape) for shape in ((4, 128), (2, 256, 128), (2, 128, 128))]
    with pytest.raises(ValueError, match=r"^moe_mlp: types: got torch\.float32; .* without fp8"):
        moe_mlp(wide[0], (routing[0], weights.float()), wide[1], wide[2], fp8=True)
