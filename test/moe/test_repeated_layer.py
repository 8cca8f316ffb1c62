"""A layer whose recorded launches are repeated gives the bits of one that runs its functions, in the emulator."""

import pytest
import torch

import cudnn
from cudnn.moe import autograd, sort
from cudnn.nn import MoE


def results(layer: MoE, x: torch.Tensor) -> list[torch.Tensor]:
    """Of both passes, the router's output, and the pass without gradients."""
    y, output = layer(x, return_routing=True)
    with torch.no_grad():
        inferred = layer(x)
    return [y, *output, *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y)), inferred]


def test_repeated_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(autograd, "are_repeated", lambda x: True)
    layer = MoE(64, 32, 8, 2, renormalize=True)
    calls: list[None] = []
    function = autograd._forward
    monkeypatch.setattr(autograd, "_forward", lambda *arguments: (calls.append(None), function(*arguments))[1])
    with cudnn.emulation("sm_90a"):
        for call in range(3):
            calls.clear()
            if call == 2:
                layer.down = torch.nn.Parameter(layer.down.detach().clone())  # at another address
            x = torch.randn(5, 64).bfloat16().requires_grad_()
            actual = results(layer, x)
            assert len(calls) == (2 if call < 2 else 0), "once, and once more to record"
        monkeypatch.setattr(autograd, "_sequence_key", lambda *_: None)
        expected = results(layer, x)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_other_main_grads_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass with other buffers than those that were checked raises before it begins."""
    monkeypatch.setattr(autograd, "are_repeated", lambda x: True)
    layer = MoE(64, 32, 8, 2, renormalize=True, into_main_grad=True)
    for weight in (layer.up, layer.down):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = torch.randn(5, 64).bfloat16()
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
