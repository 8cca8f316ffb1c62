"""The gradient of the pre-activation overwrites it where autograd frees the graph: bits, peak memory, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import cudnn
from cudnn.moe import autograd, dispatched, layer, operator
from cudnn.moe.experts import Experts, GroupedGemmOps, SortedRows, grouped_gemm_ops
from cudnn.nn import MoE
from cudnn.ops import moe_experts, moe_mlp
from support.ranks import one_rank
from support.selection import in_turn

BF16 = torch.bfloat16
HIDDEN, INNER, EXPERTS, TOP_K, TOKENS, FEW = 64, 128, 4, 2, 150, 20
COUNTS = (0, 1, 130, 37)
KERNELS = [
    ("swiglu", "interleaved", ""),
    ("geglu", "concatenated", ""),
    ("srelu", "interleaved", ""),
    ("swiglu", "interleaved", "blockwise"),
]


@pytest.mark.parametrize(("arch", "activation", "glu_layout", "fp8"), in_turn(KERNELS, 2))
def test_kernels_write_over_the_tensor_that_they_read(arch: str, activation: str, glu_layout: str, fp8: str) -> None:
    """No race with the CTAs of the next expert, whose rows are in the same tile; other gradients have the same bits."""
    hidden, inner = (128, 128) if fp8 else (64, 96)
    used, rows = sum(COUNTS), sum(COUNTS) + 9
    wide = inner if activation == "srelu" else 2 * inner
    up, down = (torch.randn(len(COUNTS), *shape).to(BF16) / 8 for shape in ((wide, hidden), (hidden, inner)))
    bias = None if fp8 else torch.randn(len(COUNTS), wide).to(BF16)
    e = Experts([up], [down], bias, None, activation, [1.0, 1.702, 7.0, -7.0], glu_layout, fp8)
    x, dy = (torch.randn(rows, hidden).to(BF16) for _ in range(2))
    weights, offsets = torch.rand(rows, 1), torch.tensor(COUNTS).cumsum(0).int()
    order, needs = SortedRows(offsets, rows), (True, True, True, True, not fp8, False)

    def backward(preact: torch.Tensor, overwrites: bool) -> layer.Gradients:
        arguments = (dy, x, preact, None, weights, order, e, needs, ([], []))
        return layer.backward(grouped_gemm_ops(x, e), *arguments, into_preact=overwrites)

    with cudnn.emulation(arch):
        _, preact = layer.forward(grouped_gemm_ops(x, e), x, weights, order, e, True)
        saved = [preact.clone() for _ in range(2)]
        expected = backward(saved[0], False)
    with cudnn.emulation(arch, races=True):
        actual = backward(saved[1], True)
    assert torch.equal(saved[0].view(torch.uint8), preact.view(torch.uint8))
    assert torch.equal(saved[1].view(torch.uint8), preact.view(torch.uint8)) == (fp8 != "" and arch == "sm_100a")
    pairs: Any = zip(expected._fields, expected, actual, strict=True)
    for name, one, other in pairs:
        used_rows = slice(used if name in ("x", "weights") else None)
        assert one is other is None or torch.equal(one[used_rows], other[used_rows]), name


Run = Callable[[], torch.Tensor]


def module(tokens: int = TOKENS, **options: Any) -> tuple[Run, list[torch.Tensor]]:
    """A call of ``cudnn.nn.MoE`` and its leaves."""
    hidden = 128 if options else HIDDEN
    experts = MoE(hidden, INNER, EXPERTS, TOP_K, **options)
    x = torch.randn(tokens, hidden).to(BF16).requires_grad_()
    return lambda: experts(x), [x, *experts.parameters()]


def tensors(rows: int) -> list[torch.Tensor]:
    """x, up and down."""
    shapes = ((rows, HIDDEN), (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    return [torch.randn(shape).to(BF16).requires_grad_() for shape in shapes]


def mlp(**options: Any) -> tuple[Run, list[torch.Tensor]]:
    """A call of ``moe_mlp``."""
    (x, up, down), (weights, indices) = tensors(TOKENS), torch.rand(TOKENS, EXPERTS).topk(TOP_K)
    weights.requires_grad_()
    return lambda: moe_mlp(x, (indices, weights), up, down, **options), [x, weights, up, down]


def rows_of_a_dispatcher() -> tuple[Run, list[torch.Tensor]]:
    """A call of ``moe_experts``, as the modules of Megatron-Core and torchtitan call it, with padding rows."""
    x, up, down = tensors(TOKENS * TOP_K)
    probs = torch.rand(len(x)).requires_grad_()
    counts = torch.tensor([100, 0, 153, 31])
    return lambda: moe_experts(x, counts, up, down, probs), [x, probs, up, down]


def over_ranks() -> tuple[Run, list[torch.Tensor]]:
    return mlp(group=dist.group.WORLD)


CALLS = [module, mlp, rows_of_a_dispatcher, over_ranks]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators overwrite with few tokens too; one rank."""
    for each in (operator, dispatched):
        monkeypatch.setattr(each, "FEW", 0)
    with one_rank():
        yield


def live_bytes() -> int:
    """Bytes of all tensors that Python knows."""
    storages = {}
    for x in gc.get_objects():
        if isinstance(x, torch.Tensor) and x.device.type == "cpu" and torch._C._has_storage(x):
            storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
    return sum(storages.values())


def peak_of_backward(monkeypatch: pytest.MonkeyPatch, y: torch.Tensor, leaves: Any, keeps: bool) -> tuple[int, Any]:
    """The most bytes that are live when a grouped GEMM begins, and the gradients."""
    peak, run = 0, GroupedGemmOps.run

    def sampled(*arguments: Any, **options: Any) -> None:
        nonlocal peak
        peak = max(peak, live_bytes())
        run(*arguments, **options)

    monkeypatch.setattr(GroupedGemmOps, "run", sampled)
    gc.collect()
    before = live_bytes()
    gradients = torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=keeps)
    monkeypatch.setattr(GroupedGemmOps, "run", run)
    return peak - before, gradients


@pytest.mark.parametrize("call", CALLS)
def test_the_peak_is_lower_by_one_buffer(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the pre-activation has no separate memory, unless the graph is kept."""
    run, leaves = call()
    y = run()
    higher, expected = peak_of_backward(monkeypatch, y, leaves, True)
    lower, actual = peak_of_backward(monkeypatch, y, leaves, False)
    assert all(map(torch.equal, actual, expected))
    assert higher - lower == TOKENS * TOP_K * 2 * INNER * BF16.itemsize


def test_the_peak_of_e4m3_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient's e4m3 rows overwrite the pre-activation's; their scales do not."""
    run, leaves = module(FEW, fp8="blockwise")
    with cudnn.emulation("sm_90a"):
        y = run()
        torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)  # caches constants
        higher, expected = peak_of_backward(monkeypatch, y, leaves, True)
        lower, actual = peak_of_backward(monkeypatch, y, leaves, False)
    assert all(map(torch.equal, actual, expected))
    assert higher - lower == FEW * TOP_K * 2 * INNER


@pytest.mark.parametrize("call", CALLS)
def test_a_graph_that_is_kept_gives_the_same_again(call: Any) -> None:
    run, leaves = call()
    y = run()
    results = [torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=keeps) for keeps in (True, True, False)]
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))


@pytest.mark.parametrize("call", CALLS)
def test_a_second_try_after_an_error_raises(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd keeps the graph of a pass that failed, but the pre-activation is lost."""
    run, leaves = call()
    y = run()
    with monkeypatch.context() as context:
        context.setattr(layer, "backward_up", None)
        with pytest.raises(TypeError):
            torch.autograd.grad(y, leaves, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))


def double_use(run: Run) -> torch.Tensor:
    return run() + 2 * run()


def checkpointed(run: Run, leaves: Sequence[torch.Tensor], reentrant: bool) -> torch.Tensor:
    result: Any = checkpoint(lambda *_: run(), *leaves, use_reentrant=reentrant)
    return result


def offloaded(run: Run) -> torch.Tensor:
    with save_on_cpu():
        return run()


@pytest.mark.parametrize("call", CALLS)
def test_checkpoints_hooks_and_double_use(call: Any) -> None:
    run, leaves = call()

    def gradients(y: torch.Tensor, **options: Any) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(y, leaves, torch.ones_like(y), **options)

    kept, graph = gradients(run(), retain_graph=True), gradients(run(), create_graph=True, retain_graph=False)
    for y in (checkpointed(run, leaves, False), offloaded(run)):
        assert all(map(torch.equal, gradients(y), kept))
    assert all(map(torch.equal, graph, kept))
    twice = [gradients(double_use(run), retain_graph=keeps) for keeps in (True, False)]
    assert all(map(torch.equal, *twice))
    checkpointed(run, leaves, True).backward(torch.ones_like(run()))
    assert all(torch.equal(leaf.grad, each) for leaf, each in zip(leaves, kept, strict=True) if leaf.grad is not None)


def test_repeated_launches_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of either kind has its own sequence of launches."""
    monkeypatch.setattr(autograd, "are_repeated", lambda x: True)
    run, leaves = module(FEW)
    with cudnn.emulation("sm_90a"):
        y = run()
        results = [
            torch.autograd.grad(y if keeps else run(), leaves, torch.ones_like(y), retain_graph=keeps)
            for keeps in (True, False) * 3
        ]
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)
