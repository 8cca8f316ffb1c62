"""A layer whose recorded launches are repeated gives the bits of one that runs its functions, in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.moe import autograd, sort
from cudnn.nn import MoE
from cudnn.ops import moe_mlp
from cudnn.runtime import launch_sequence
from cudnn.runtime.launch_sequence import LaunchSequences

full = pytest.mark.full
RECIPES = [False, *(pytest.param(recipe, marks=full) for recipe in (True, "blockwise", "blockwise_save16"))]


def sizes(fp8: bool | str) -> tuple[int, int]:
    """Hidden and intermediate size."""
    return (128, 128) if fp8 else (64, 32)


def results(layer: MoE, x: torch.Tensor) -> list[torch.Tensor]:
    """Of both passes, the router's output, and the pass without gradients."""
    y, output = layer(x, return_routing=True)
    with torch.no_grad():
        inferred = layer(x)
    return [y, *output, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y)), inferred]


@pytest.mark.parametrize("fp8", RECIPES)
def test_repeated_launches_give_the_same_bits(fp8: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(autograd, "are_repeated", lambda x: True)
    hidden, intermediate = sizes(fp8)
    layer = MoE(hidden, intermediate, 8, 2, renormalize=True, fp8=fp8)
    calls: list[None] = []
    function = autograd._forward
    monkeypatch.setattr(autograd, "_forward", lambda *arguments: (calls.append(None), function(*arguments))[1])

    def passes(count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        calls.clear()
        x = torch.randn(5, hidden).bfloat16().requires_grad_()
        actual = results(layer, x)
        assert len(calls) == count
        return x, actual

    with cudnn.emulation("sm_90a"):
        for count in (2, 2, 0):  # once, and once more to record
            if count == 0:
                layer.down = torch.nn.Parameter(layer.down.detach().clone())  # at another address
            passes(count)
        with torch.no_grad():
            layer.up.mul_(1.5)
        x, actual = passes(0)
        monkeypatch.setattr(autograd, "_sequence_key", lambda *_: None)
        expected = results(layer, x)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_changes_of_weights_in_e4m3_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are repeated quantize announced changes of ``data``, and report others."""
    monkeypatch.setattr(autograd, "are_repeated", lambda x: True)
    layer = MoE(128, 128, 8, 2, renormalize=True, fp8="blockwise")
    x = torch.randn(5, 128).bfloat16()
    with cudnn.emulation("sm_90a"):
        first, *_, last = [layer(x) for _ in range(3)]
        monkeypatch.setattr(autograd, "_forward", None)
        assert torch.equal(first, last)
        layer.up.data.mul_(2.0)
        layer.weights_changed()
        assert not torch.equal(layer(x), first)
        layer.up.data.mul_(0.5)
        with pytest.raises(RuntimeError, match=r"weights, fp8='blockwise': got other .* layer\.weights_changed"):
            [layer(x) for _ in range(3)]
        layer.weights_changed()
        assert torch.equal(layer(x), first)


LISTS = [
    ("blockwise", "interleaved"),
    pytest.param("", "separate", marks=full),
    pytest.param(True, "interleaved", marks=full),
    pytest.param("", "concatenated", marks=full),
]


@pytest.mark.parametrize(("fp8", "glu_layout"), LISTS)
def test_lists_of_weights_and_of_main_gradients(fp8: Any, glu_layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights at other addresses in each call, and their gradients in ``main_grads``."""
    torch.manual_seed(0)
    experts, size, separate = 3, 128, glu_layout == "separate"
    up, down = (torch.randn(experts, n, size).bfloat16() / size**0.5 for n in (2 * size, size))
    indices = torch.randint(0, experts, (20, 2))

    def passes(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        parts = up.chunk(2, 1) if separate else [up]
        ups, downs = ([w.clone().requires_grad_() for part in each for w in part] for each in (parts, [down]))
        buffers = [[torch.ones_like(w, dtype=torch.float32) for w in each] for each in (ups, downs)]
        up_weights, up_grads = ((x[:experts], x[experts:]) if separate else x for x in (ups, buffers[0]))
        options: Any = {"main_grads": (up_grads, buffers[1]), "fp8": fp8, "glu_layout": glu_layout}
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = moe_mlp(x, (indices, weights), up_weights, downs, **options)
        y.backward(torch.ones_like(y))
        assert x.grad is not None
        assert weights.grad is not None
        return [y.detach(), x.grad, weights.grad, *buffers[0], *buffers[1]]

    ran: list[bool] = []
    call = LaunchSequences.__call__

    def repeating(self: Any, key: Any, function: Any, tensors: Any, adds: bool = False) -> Any:
        ran.append(False)
        return call(self, key, lambda *t: (ran.__setitem__(-1, True), function(*t))[1], tensors, adds)

    monkeypatch.setattr(LaunchSequences, "__call__", repeating)
    with cudnn.emulation("sm_90a"):
        for i in range(3):
            x, weights = torch.randn(20, size).bfloat16(), torch.rand(20, 2)
            ran.clear()
            with monkeypatch.context() as patched:
                patched.setattr(launch_sequence, "are_repeated", lambda x: True)
                actual = passes(x, weights)
            _sort, *both = ran
            assert both == [i < 2] * 2  # once, and once more to record
        expected = passes(x, weights)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("fp8", [False, "blockwise"])
def test_other_main_grads_are_noticed(fp8: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass with other buffers than those that were checked raises before it begins."""
    monkeypatch.setattr(autograd, "are_repeated", lambda x: True)
    hidden, intermediate = sizes(fp8)
    layer = MoE(hidden, intermediate, 8, 2, renormalize=True, into_main_grad=True, fp8=fp8)
    for weight in (layer.up, layer.down):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = torch.randn(5, hidden).bfloat16()
    with cudnn.emulation("sm_90a"), torch.no_grad():
        for _ in range(3):
            layer(x)
        layer.up.main_grad = torch.zeros_like(layer.up)
        with pytest.raises(ValueError, match="main_grads of up"):
            layer(x)


def test_the_environment_emulates_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a block of the emulator around it, a repeated launch would write nothing."""
    monkeypatch.setenv("CUDNN_EMULATE", "sm_90a")
    for _ in range(3):
        indices = torch.randint(0, 8, (3, 2), dtype=torch.int32)
        _, gather_idx, _ = sort(indices, 8)
        assert torch.equal(gather_idx, indices.flatten().argsort(stable=True).int() // 2)
