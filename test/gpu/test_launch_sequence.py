"""Launches that are repeated give the bits of the functions that they were recorded from."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cudnn.fused.plain_gemm import gemm_add
from cudnn.moe import autograd, route
from cudnn.nn import MoE
from cudnn.ops import flash_attn_func, flash_attn_varlen_func, moe_experts, moe_mlp, scaled_dot_product_attention
from cudnn.runtime.launch_sequence import LaunchSequences

CALLS = 5
LAYERS: list[dict[str, Any]] = [
    {"renormalize": True},
    {},
    {"renormalize": True, "into_main_grad": True},
    {"score": "sigmoid", "correction_bias": True, "bias": True},
    {"renormalize": True, "fp8": True},
    {"renormalize": True, "fp8": "blockwise"},
    {"fp8": "blockwise", "into_main_grad": True},
    {"score": "sigmoid", "correction_bias": True, "bias": True, "fp8": "blockwise_save16"},
    {"renormalize": True, "activation": "srelu", "shared_experts": 1},
]
RECIPES = (False, True, "blockwise")


def passes(layer: MoE, x: torch.Tensor, dy: torch.Tensor, routing: bool) -> list[torch.Tensor]:
    """All results of both passes, with the router's loss if it has one."""
    x = x.clone().requires_grad_()
    weights: list[Any] = [layer.up, layer.down] if layer.into_main_grad else []
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    result = layer(x, return_routing=routing)
    y, output = result if routing else (result, None)
    inputs = [x, *layer.parameters()]
    grads = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    sums = [weight.main_grad for weight in weights]
    with torch.no_grad():
        inferred = layer(x)
    return [each for each in (y, *(output or ()), *grads, *sums, inferred) if each is not None]


def repeats(sequences: dict[Any, list[Callable[..., Any]]]) -> int:
    """Recorded sequences that can be repeated."""
    return sum(run.__name__ == "run" for runs in sequences.values() for run in runs)


@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("routing", [False, True])
def test_layers(options: dict[str, Any], routing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, device="cuda", **options)
    for tokens in (1, 300):
        for call in range(CALLS):
            x, dy = (torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            with torch.no_grad():
                layer.up.mul_(1.01)  # in place, as an optimizer does
                if call == 3:
                    layer.down = torch.nn.Parameter(layer.down.clone())  # at another address
            actual = passes(layer, x, dy, routing)
            with monkeypatch.context() as patched:
                patched.setattr(autograd, "_sequence_key", lambda *_: None)
                expected = passes(layer, x, dy, routing)
            assert len(actual) == len(expected)
            assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    if "shared_experts" not in options:
        assert repeats(layer._sequences._sequences) >= 4


@pytest.mark.parametrize("fp8", RECIPES)
def test_graphs_and_streams_take_repeated_launches(fp8: bool | str) -> None:
    layer = MoE(256, 128, 8, 2, renormalize=True, fp8=fp8, device="cuda")
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            expected = layer(x)
        assert repeats(layer._sequences._sequences) == 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, layer(x))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**7)
            later = layer(x)
            expected = layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(later, expected)


@pytest.mark.parametrize("fp8", RECIPES)
def test_graphs_that_train_take_repeated_launches(fp8: bool | str) -> None:
    """A replay reads weights that have changed since the capture: of fp8, it quantizes them."""
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, renormalize=True, fp8=fp8, device="cuda")
    x, dy = (torch.randn(16, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    inputs = [x.requires_grad_(), *layer.parameters()]

    def both() -> list[torch.Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both()
        assert repeats(layer._sequences._sequences) == 2
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(3):
        layer.up.data.mul_(-1.5)
        layer.weights_changed()
        graph.replay()
        assert all(map(torch.equal, captured, both()))


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_in_e4m3_follow_an_optimizer(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of micro-batches with a fused optimizer, also with activation checkpointing, and evaluations: the bits of
    passes that are not repeated.
    """
    x, dy = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = MoE(256, 128, 8, 2, renormalize=True, fp8="blockwise", device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01, fused=True)
        outputs = []
        for _ in range(4):
            for _ in range(3):
                leaf = x.clone().requires_grad_()
                y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
                y.backward(dy)
                outputs += [y.detach(), leaf.grad]
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                outputs.append(layer(x).clone())
        is_repeated = autograd._sequence_key(layer, x) is not None
        assert (repeats(layer._sequences._sequences) >= 3) == is_repeated
        return outputs

    actual = train()
    monkeypatch.setattr(autograd, "_sequence_key", lambda *_: None)
    expected = train()
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def test_repeated_passes_report_changed_weights() -> None:
    """A change of ``data`` that nothing announced, within a few passes."""
    layer = MoE(256, 128, 8, 2, renormalize=True, fp8="blockwise", device="cuda")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def passes(count: int) -> None:
        for _ in range(count):
            layer(x).backward(x)
            torch.cuda.synchronize()

    passes(4)
    assert repeats(layer._sequences._sequences) == 2
    layer.up.data.mul_(1.5)
    with pytest.raises(RuntimeError, match=r"weights_changed"):
        passes(3)
    layer.weights_changed()
    passes(3)


def run_function(
    self: LaunchSequences, key: Any, function: Callable[..., Any], tensors: Any, adds: bool = False
) -> Any:
    """In place of ``LaunchSequences.__call__``."""
    return function(*tensors)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("fp8", RECIPES)
def test_experts(bias: bool, lists: bool, fp8: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, renormalize=True, bias=bias, device="cuda")
    matrices: Any = [layer.up, layer.down]
    if lists:
        matrices = [[w.detach().clone().requires_grad_() for w in each] for each in matrices]
    flat = [w for each in matrices for w in each] if lists else matrices
    inputs = [*flat, *(bias for bias in (layer.up_bias, layer.down_bias) if bias is not None)]

    def both(x: torch.Tensor, logits: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x, logits = x.clone().requires_grad_(), logits.clone().requires_grad_()
        routing = route(logits, 2, renormalize=True)
        y = moe_mlp(x, routing, *matrices, layer.up_bias, layer.down_bias, fp8=fp8)
        sorted_y = moe_experts(x, [8] * 8, *matrices, up_bias=layer.up_bias, down_bias=layer.down_bias, fp8=fp8)
        return [y, sorted_y, *torch.autograd.grad([y, sorted_y], [x, logits, *inputs], [dy, dy])]

    for _ in range(CALLS):
        x, dy = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        logits = torch.randn(64, 8, device="cuda", dtype=torch.float32)
        actual = both(x, logits, dy)
        with monkeypatch.context() as patched:
            patched.setattr(LaunchSequences, "__call__", run_function)
            expected = both(x, logits, dy)
        assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_a_plain_gemm_is_among_the_launches() -> None:
    sequences, calls = LaunchSequences(), []

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(None)
        gemm_add(a, b, out)
        return (out,)

    for _ in range(4):
        a, b = (torch.randn(64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        (out,) = sequences("key", run, (a, b, torch.zeros(64, 64, device="cuda", dtype=torch.float32)), adds=True)
        torch.testing.assert_close(out, a.float() @ b.float().T, rtol=1e-3, atol=1e-2)
    assert len(calls) == 2


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("fp8", RECIPES)
def test_no_function_runs_from_the_third_call_on(adds: bool, fp8: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that fail would go unnoticed: the function runs then. ``main_grad`` gets each gradient once."""
    torch.manual_seed(0)
    layer = MoE(256, 128, 8, 2, renormalize=True, into_main_grad=adds, fp8=fp8, device="cuda")
    counts = {"_forward": 0, "_backward": 0}
    for name in counts:

        def counted(function: Any, name: str, *arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        monkeypatch.setattr(autograd, name, functools.partial(counted, getattr(autograd, name), name))
    passes(layer, *(torch.randn(5, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2)), False)  # compiles
    for tokens in (1, 2, 17, 300):
        for name in counts:
            counts[name] = 0
        x, dy = (torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        for _ in range(4):
            passes(layer, x, dy, False)
        assert counts == {"_forward": 4, "_backward": 2}  # of forward, two that save and two that do not


@pytest.mark.parametrize("fp8", RECIPES)
def test_no_memory_is_kept(fp8: bool | str) -> None:
    def train() -> None:
        layer = MoE(256, 128, 8, 2, renormalize=True, fp8=fp8, device="cuda")
        for tokens in (8, 16):
            for _ in range(4):
                x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
                layer(x.requires_grad_()).sum().backward()
                q = torch.randn(2, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
                flash_attn_func(q, q.clone(), q.clone())

    train()
    gc.collect()
    before = torch.cuda.memory_allocated()
    train()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("fp8", RECIPES)
def test_graphs_that_are_captured_before_launches_are_recorded(fp8: bool | str) -> None:
    """The second call, which is recorded, is in the capture; later ones are outside of it, and in another one."""
    layer = MoE(256, 128, 8, 2, renormalize=True, fp8=fp8, device="cuda")
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(torch.randn(8, 256, device="cuda", dtype=torch.bfloat16))  # compiles
        expected = layer(x)
        results = []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
            results.append((graph, y))
            assert torch.equal(layer(x), expected)
        for graph, y in results:
            y.zero_()
            graph.replay()
            assert torch.equal(y, expected)


def test_modes_see_calls_that_would_be_repeated() -> None:
    q = torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = q.clone(), q.clone()
    for _ in range(4):
        flash_attn_func(q, k, v)
    with FlopCounterMode(display=False) as counter:
        flash_attn_func(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 4 * 128 * 128 * 64


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_devices_are_told_apart() -> None:
    """Another GPU gets tensors of the same metadata, while either is the current device."""
    for call in range(8):
        for index in (0, 1):
            q, k, v = (torch.randn(2, 128, 4, 64, device=f"cuda:{index}", dtype=torch.bfloat16) for _ in range(3))
            with torch.cuda.device(index if call % 2 else 1 - index):
                o = flash_attn_func(q, k, v, causal=True)
            expected = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=True
            )
            assert o.device == q.device
            torch.testing.assert_close(o.transpose(1, 2).float(), expected, rtol=0.02, atol=0.02)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    ends = torch.tensor([0, 100, 101, 256], dtype=torch.int32, device="cuda")
    return flash_attn_varlen_func(q, k, v, ends, ends, 155, 155, causal=True)


FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[..., torch.Tensor]]] = {
    "flash": ((2, 128, 4, 64), lambda q, k, v: flash_attn_func(q, k, v, causal=True)),
    "packed": ((256, 4, 128), packed),
    "cuDNN": ((2, 4, 128, 64), lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)),
    "fused": ((2, 4, 128, 64), lambda *x: scaled_dot_product_attention(*x, is_causal=True, backend="fused")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("joined", [False, True])
def test_attention(name: str, joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``joined``: q, k and v are views of one tensor, whose memory overlaps."""
    shape, function = FUNCTIONS[name]

    def both(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        q, k, v = (x[..., i, :] for i in range(3)) if joined else (x[..., i, :].contiguous() for i in range(3))
        y = function(q, k, v)
        return [y, *torch.autograd.grad(y, [x], dy)]

    for _ in range(CALLS):
        x = torch.randn(*shape[:-1], 3, shape[-1], device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        actual = both(x, dy)
        with monkeypatch.context() as patched:
            patched.setattr(LaunchSequences, "__call__", run_function)
            expected = both(x, dy)
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)  # dQ's sums may come in any order
        assert torch.equal(actual[0], expected[0])
