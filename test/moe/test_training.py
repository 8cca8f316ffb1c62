"""What training needs of the layer: main_grad, the routing that losses need, balancing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_ as torchs_clip_grad_norm_
from torch.nn.utils import parametrize

from cudnn import moe
from cudnn.nn import MoE, clip_grad_norm_
from support.selection import ALONE, in_turn, within


@pytest.mark.parametrize("zero_out", [False, True])
@pytest.mark.parametrize("one_node", [True, False])
def test_main_grads_with_the_hooks_of_megatrons_ddp(one_node: bool, zero_out: bool) -> None:
    """With ``overlap_grad_reduce`` they need a gradient of each parameter, which they drop if the flag is set."""
    plain = MoE(64, 32, 4, 2, shared_experts=1)
    layer = MoE(64, 32, 4, 2, shared_experts=1, into_main_grad=True)
    layer.load_state_dict(plain.state_dict())
    ready, nodes = list[Any](), list[Any]()

    def add(parameter: Any) -> None:
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad or zero_out:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        ready.append(parameter.grad_added_to_main_grad)

    for p in layer.parameters():
        parameter: Any = p
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(p.shape), False
        parameter.zero_out_wgrad = zero_out
        nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, parameter=parameter: add(parameter))
    x = torch.randn(30, 64).bfloat16()
    for _ in range(2):
        (layer(x) if one_node else layer(x, layer.route(x)[1])).float().square().sum().backward()
    assert sorted(ready) == [False, False, True, True, True, True]  # the router's, and those of up and down
    plain(x).float().square().sum().backward()
    for actual, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert expected.grad is not None
        limit = float(expected.grad.abs().max())
        torch.testing.assert_close(actual.main_grad, 2 * expected.grad.float(), rtol=0.02, atol=0.01 * limit)


ROUTED: list[dict[str, Any]] = [
    {},
    {"renormalize": True, "shared_experts": 2, "shared_gate": True},
    {"score": "sigmoid", "correction_bias": True, "scaling_factor": 2.5},
]


@pytest.mark.parametrize(("where", "rule"), in_turn([(rule,) for rule in ROUTED], 1, ALONE))
def test_routing_that_the_layer_returns(where: str, rule: dict[str, Any]) -> None:
    """Losses of logits and weights have the gradients that they have with the operators of :meth:`MoE.route`."""
    device = "cuda" if where == "gpu" else "cpu"
    layer = MoE(64, 32, 4, 2, **rule).to(device)
    x = torch.randn(50, 64).bfloat16().to(device).requires_grad_()
    score = rule.get("score", "softmax")

    def loss(logits: torch.Tensor, routing: Any) -> torch.Tensor:
        balance = 40 * moe.load_balance_loss(logits, routing, score)
        return balance + moe.z_loss(logits) + routing.weights.square().sum()

    with within(where):
        y, routing = layer(x, return_routing=True)
        assert "LayerFunction" in y.grad_fn.name()
        assert routing.logits.grad_fn is y.grad_fn
        losses = [y.float().sum() + loss(routing.logits, routing), loss(routing.logits, routing)]
        leaves = [x, *layer.parameters()]
        actual = [torch.autograd.grad(each, leaves, retain_graph=True) for each in losses]
    logits, expected_routing = layer.route(x)
    right = layer(x, expected_routing)
    assert torch.equal(routing.indices, expected_routing.indices)
    assert torch.equal(routing.offsets, expected_routing.offsets)
    assert torch.equal(routing.counts, routing.indices.flatten().bincount(minlength=4))
    with torch.no_grad():
        again, same = layer(x, return_routing=True)
    torch.testing.assert_close((again, same.logits), (right, logits))
    for gradients, total in zip(actual, (right.float().sum(), 0.0), strict=True):
        expected = torch.autograd.grad(
            total + loss(logits, expected_routing), leaves, retain_graph=True, materialize_grads=True
        )
        for one, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))
    with pytest.raises(ValueError, match="MoE: routing: got Routing; allowed: None with return_routing"):
        layer(x, expected_routing, return_routing=True)


def test_the_update_of_the_correction() -> None:
    layer = MoE(64, 32, 4, 2, correction_bias=True)
    assert layer.correction is not None
    for _ in range(3):
        moe.update_correction_bias(layer.correction, torch.tensor([3, 5, 4, 4], dtype=torch.int32), 0.5)
    assert layer.correction.tolist() == [1.5, -1.5, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"update_correction_bias: shape of counts: got \(3,\) for a bias \(4,\)"):
        moe.update_correction_bias(layer.correction, torch.zeros(3))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_pytorchs_for_plain_tensors(norm_type: float) -> None:
    """Over meshes: test_scale."""
    pairs = [[torch.zeros(n).requires_grad_() for n in (5, 3)] for _ in range(2)]
    for parameters in zip(*pairs, strict=True):
        parameters[0].grad = torch.randn(parameters[0].shape)
        parameters[1].grad = parameters[0].grad.clone()
    assert clip_grad_norm_([*pairs[0], torch.zeros(2)], 0.1, norm_type) == torchs_clip_grad_norm_(
        pairs[1], 0.1, norm_type
    )
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert clip_grad_norm_(torch.zeros(2), 0.1) == 0
    before = [x.grad.clone() for x in pairs[0]]
    for wrong in (-1, -math.inf, math.nan):
        with pytest.raises(ValueError, match="clip_grad_norm_: max_norm: got"):
            clip_grad_norm_(pairs[0], wrong, norm_type)
    assert clip_grad_norm_(pairs[0], math.inf, norm_type) > 0
    assert all(map(torch.equal, before, [x.grad for x in pairs[0]]))
    pairs[0][0].grad = torch.full((5,), float("nan"))
    with pytest.raises(RuntimeError, match=rf"clip_grad_norm_: the norm of order {norm_type} of the gradients is nan"):
        clip_grad_norm_(iter(pairs[0]), 0.1, norm_type, error_if_nonfinite=True)


@pytest.mark.parametrize("fp8", [True, "blockwise"])
def test_gathered_weights_are_quantized_anew(fp8: bool | str) -> None:
    """FSDP2 gathers changed weights into the same memory, and no version counts it, nor changes of DTensors."""
    x = torch.randn(9, 128).bfloat16()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
        for over_ranks, shards in ((False, True), (True, True), (True, False)):
            layer = MoE(128, 128, 4, 2, fp8=fp8, mesh=mesh if over_ranks else None)
            model = torch.nn.Sequential(layer)
            if shards:
                fully_shard(layer, mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])
            with torch.set_grad_enabled(fp8 == "blockwise"):
                results = [model(x)]
                for _ in range(4):
                    with torch.no_grad():
                        layer.up.mul_(-1.25)
                    results.append(model(x))
            for earlier, later in itertools.pairwise(results):
                assert not torch.equal(earlier, later)
    finally:
        dist.destroy_process_group()


def test_parametrized_weights() -> None:
    """As adapters of weights make them: the layer reads the attribute, not the parameter."""
    layer, x = MoE(64, 32, 4, 2), torch.randn(5, 64).bfloat16()
    expected = 2 * layer(x)
    double = torch.nn.Identity()
    double.forward = lambda weight: 2 * weight  # pyright: ignore[reportIncompatibleMethodOverride]
    parametrize.register_parametrization(layer, "down", double)
    assert torch.equal(layer(x), expected)
    layer.load_state_dict(layer.state_dict())
    layer(x).sum().backward()
    weight: Any = layer.parametrizations.down.original  # pyright: ignore[reportAttributeAccessIssue]
    assert bool(weight.grad.any())
