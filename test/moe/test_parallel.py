"""A layer over ranks against one process that has all experts."""

from __future__ import annotations

import functools
import gc
import pathlib
import time
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import distributed as dist

import cudnn
from cudnn.moe import Exchange, parallel, quantizing
from cudnn.nn import MoE
from cudnn.ops import moe_mlp
from support.ranks import Rank, Threads, one_rank, run_processes

EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 64, 32


def tokens(rank: int, most: int = 41) -> tuple[torch.Tensor, ...]:
    """Of one rank: x, indices, weights and the gradient of the result; none on the third. One choice is dropped."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 2 else min(most, 20 + 7 * (rank % 4))
    x, gradient = (torch.randn(count, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    weights, indices = torch.randn(count, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
    indices[1:2, 1] = -1
    return x, indices, weights, gradient


def parameters(bias: bool) -> list[torch.Tensor]:
    """up, down and, with ``bias``, those of both."""
    generator = torch.Generator().manual_seed(99)
    shapes = ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    actual = [torch.randn(shape, generator=generator) / shape[2] ** 0.5 for shape in shapes]
    actual += [torch.randn(shape[:2], generator=generator) for shape in shapes] if bias else []
    return [each.bfloat16() for each in actual]


def nearly(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The sums over ranks were rounded once more."""
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.03, atol=0.03)


def same_as_alone(
    rank: int,
    ranks: int,
    group: Any,
    most: int = 41,
    *,
    bias: bool = False,
    lists: bool = False,
    double: bool = False,
) -> None:
    """Forward and backward, twice: memory is used again. ``double``: in float64."""
    every = [tokens(other, most) for other in range(ranks)]
    x, indices, scores, gradient = (torch.cat(parts) for parts in zip(*every, strict=True))
    alone = [t.double() if double else t.clone() for t in (x, scores, *parameters(bias))]
    alone, gradient = [t.requires_grad_() for t in alone], gradient.to(alone[0].dtype)
    close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12) if double else nearly
    y = moe_mlp(alone[0], (indices, alone[1]), *alone[2:])
    y.backward(gradient)
    start, share = sum(len(t[0]) for t in every[:rank]), EXPERTS // ranks
    mine, own = slice(start, start + len(every[rank][0])), slice(rank * share, (rank + 1) * share)
    parts = (mine, mine, *[own] * (len(alone) - 2))
    for _ in range(2):
        here = [t.detach()[part].clone().requires_grad_() for t, part in zip(alone, parts, strict=True)]
        arguments: list[Any] = [list(t.unbind(0)) if lists else t for t in here[2:4]]
        actual = moe_mlp(here[0], (indices[mine], here[1]), *arguments, *here[4:], group=group)
        actual.backward(gradient[mine])
        close(actual, y[mine])
        for one, other, part in zip(here, alone, parts, strict=True):
            close(one.grad, other.grad[part])
    with torch.no_grad():
        close(moe_mlp(here[0], (indices[mine], here[1]), *arguments, *here[4:], group=group), y[mine])


def in_autocast(rank: int, ranks: int) -> None:
    """Gradients have the types of the parameters."""
    x, indices, scores, gradient = tokens(rank)
    share = EXPERTS // ranks
    up, down = (w[rank * share :][:share].float().requires_grad_() for w in parameters(False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe_mlp(x.float(), (indices, scores), up, down, group=dist.group.WORLD)
    assert y.dtype == torch.bfloat16
    y.backward(gradient)
    assert up.grad is not None
    assert up.grad.dtype == torch.float32


def main_grads(rank: int, ranks: int) -> None:
    """They are added to, and autograd gets none."""
    x, indices, scores, gradient = tokens(rank)
    share = EXPERTS // ranks
    up, down = (w[rank * share :][:share].clone().requires_grad_() for w in parameters(False))
    sums = torch.ones(up.shape), torch.ones(down.shape)
    arguments: dict[str, Any] = {"group": dist.group.WORLD}
    moe_mlp(x, (indices, scores), up, down, main_grads=sums, **arguments).backward(gradient)
    assert up.grad is None
    assert down.grad is None
    moe_mlp(x, (indices, scores), up, down, **arguments).backward(gradient)
    for total, weight in zip(sums, (up, down), strict=True):
        nearly(total - 1, weight.grad)


def refused(rank: int, ranks: int) -> None:
    changed: Any
    for changed in (
        {"activation": "geglu"},
        {"bias": True},
        {"score": "sigmoid"},
        {"renormalize": True},
        {"n_group": 2},
        {"scaling_factor": 2.0},
        {"correction_bias": True},
        {"glu_layout": "concatenated"},
        {"time_limit": 50.0},
    ):
        layer = MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD, **(changed if rank == 1 else {}))
        assert layer.up.to_local().shape[0] == EXPERTS // ranks
        (name,) = changed
        with pytest.raises(
            ValueError, match=rf"MoE: layer: got {name}=.+ on rank {rank}, {name}=.+ on rank {1 - rank};"
        ):
            layer(tokens(rank)[0])
    x, indices, scores, _ = tokens(rank)
    up, down, up_bias, _ = (w[rank * EXPERTS // ranks :][: EXPERTS // ranks] for w in parameters(True))
    with pytest.raises(ValueError, match=r"moe_mlp: layer: got up_bias=.+ on rank"):
        moe_mlp(x, (indices, scores), up, down, up_bias if rank else None, activation="geglu", group=dist.group.WORLD)
    with pytest.raises(ValueError, match="MoE: experts: got 7 experts on 2 ranks; allowed: the same number"):
        MoE(HIDDEN, INNER, 7, TOP_K, group=dist.group.WORLD)
    for choices, place in ((1, "cpu"), (TOP_K, "meta")):
        other = Exchange(None, EXPERTS, choices, HIDDEN, max_tokens=8, device="cpu")
        other.device = torch.device(place)
        its = rf"\(8, {choices}, 64, torch.bfloat16, device\(type='{place}'\)\)"
        with pytest.raises(ValueError, match=f"MoE: group, an Exchange: got {its}; allowed"):
            MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=other)(tokens(rank)[0])


def absent(rank: int) -> None:
    """A rank that does not come: to the first call of a layer, to a later one, to the backward pass."""
    layer = MoE(HIDDEN, INNER, EXPERTS, 2, group=dist.group.WORLD, time_limit=3)
    loss = layer(tokens(rank)[0]).float().sum()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"MoE: group: got no answer of ranks 1 within 0\.5 s on rank 0"):
            MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD, time_limit=0.5)(tokens(0)[0])
    dist.barrier()
    MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD)(tokens(rank)[0])  # the ranks are in step again
    if rank:
        dist.distributed_c10d._get_default_store().wait(["rank 0 has waited"])
        return
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Exchange: group: got no answer of all ranks within 3 s"):
        loss.backward()
    assert time.monotonic() - begin < 6  # not until the other one ends
    with pytest.raises(RuntimeError, match=r"Exchange: group: got one in which a rank did not answer in time; .*new"):
        layer(tokens(0)[0])
    dist.distributed_c10d._get_default_store().set("rank 0 has waited", "")


def test_one_rank() -> None:
    """The whole way of tokens, to itself. Its exchange goes with a group, or when the next one needs one."""
    groups, left = list[Any](), list[Any]()
    for keeps in (True, False):
        with one_rank():
            same_as_alone(0, 1, dist.group.WORLD)
            gc.collect()
            assert not any(each() for each in left)
            ((made,),) = parallel._GROUPS[dist.group.WORLD].exchanges.values()
            left.append(weakref.ref(made))
            del made
            groups += [dist.group.WORLD] if keeps else []  # as PyTorch's functions may
    gc.collect()
    assert not any(each() for each in left)


def test_one_token_of_float64() -> None:
    """Its weights come behind the numbers of its experts, three words of 32 bits."""
    with one_rank():
        same_as_alone(0, 1, dist.group.WORLD, most=1, double=True)


def test_a_compiled_layer_is_left_for_its_experts_only() -> None:
    """The exchange is not traced: there are graphs before it and behind it, for 10 tokens and for any number."""
    with one_rank():
        exchange = Exchange(None, EXPERTS, TOP_K, HIDDEN, max_tokens=12, device="cpu")
        layer = MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=exchange)
        layer(torch.zeros(1, HIDDEN).bfloat16())
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(lambda x: layer(x.sin()).cos(), backend="aot_eager")
        for count in (10, 11, 12):
            x = torch.randn(count, HIDDEN).bfloat16().requires_grad_()
            actual, expected = (torch.autograd.grad(y.sum(), x) for y in (compiled(x), layer(x.sin()).cos()))
            torch.testing.assert_close(actual, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
        (reason,) = torch._dynamo.utils.counters["graph_break"]
        assert "ranks exchange tokens" in reason


def test_a_copy_of_a_layer_shares_its_group() -> None:
    """As averages of weights have one."""
    with one_rank():
        layer = MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD)
        x = tokens(0)[0]
        average = torch.optim.swa_utils.AveragedModel(layer)
        assert torch.equal(average(x), layer(x))
        average.module.up.data.zero_()
        assert not torch.equal(average(x), layer(x))


@pytest.mark.parametrize("fp8", [True, "blockwise"])
def test_e4m3_on_one_rank(fp8: bool | str) -> None:
    layer = MoE(128, 128, 4, 2)
    x = torch.randn(20, 128).bfloat16()
    indices, weights = torch.randint(0, 4, (20, 2)), torch.rand(20, 2)

    def results(fp8: bool | str, **options: Any) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, weights, layer.up, layer.down)]
        y = moe_mlp(leaves[0], (indices, leaves[1]), *leaves[2:], fp8=fp8, **options)
        return [y, *torch.autograd.grad(y, leaves, x)]

    with one_rank():
        actual = results(fp8, group=dist.group.WORLD)
    same = 5 if fp8 is True else 3  # the gradients of weights are of tokens that were rounded twice: test_blockwise.py
    assert list(map(torch.equal, actual, results(fp8))) == [True] * same + [False] * (5 - same)
    assert not any(map(torch.equal, actual, results(False)))


def test_weights_of_ranks_are_quantized_once_per_step() -> None:
    """The local tensors of DTensors, which no version counts, are followed by the versions of the DTensors."""
    with one_rank():
        layer = MoE(128, 128, 4, 2, fp8="blockwise", group=dist.group.WORLD)
        x = torch.randn(20, 128).bfloat16()
        copies = []
        for fused in (False, True):
            optimizer = torch.optim.AdamW([layer.up, layer.down], lr=0.1, fused=fused)
            for _ in range(2):
                layer(x).backward(x)
                cached = quantizing._cache[layer.up]
                copies.append(cached.tensors[0].float().clone())
            optimizer.step()
    assert torch.equal(copies[0], copies[1])
    assert torch.equal(copies[2], copies[3])
    assert not torch.equal(copies[1], copies[2])


def test_shared_experts_of_ranks_follow_their_weights() -> None:
    """They are a module of their own: its weights are announced with the layer's, and may be replaced, as by FSDP2."""
    with one_rank():
        layer = MoE(128, 128, 4, 2, fp8="blockwise", shared_experts=1, group=dist.group.WORLD)
        x, shared = torch.randn(20, 128).bfloat16(), layer.shared
        assert shared is not None
        layer(x).backward(x)
        scales = quantizing._cache[shared.up].tensors[1].clone()
        shared.up.data.mul_(2.0)
        layer.weights_changed()
        layer(x).backward(x)
        assert torch.equal(quantizing._cache[shared.up].tensors[1], 2 * scales)
        replaced, weight = torch.nn.Parameter(shared.up.detach().clone()), shared.up
        shared.up = replaced
        assert weight not in quantizing._cache


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (4, 8))])
def test_ranks(ranks: int, tmp_path: pathlib.Path) -> None:
    def rank(number: int) -> None:
        same_as_alone(number, ranks, dist.group.WORLD, bias=ranks == 4, lists=ranks == 8)
        same_as_alone(number, ranks, dist.group.WORLD, bias=True, double=True)
        main_grads(number, ranks)
        in_autocast(number, ranks)
        if ranks == 2:
            refused(number, ranks)
            absent(number)

    run_processes(ranks, tmp_path, rank)


@pytest.mark.full
@pytest.mark.parametrize(("arch", "ranks"), [("sm_90a", 2), ("sm_100a", 2), ("sm_90a", 4)])
def test_kernels_on_shared_memory(arch: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(here: Rank) -> None:
        arguments: dict[str, Any] = {"max_tokens": 8, "device": "cpu", "symmetric": True}
        with cudnn.emulation(arch, races=ranks == 2):
            group = Exchange(here, EXPERTS, TOP_K, HIDDEN, **arguments)
            same_as_alone(here.number, ranks, group, most=7, bias=ranks == 4)

    Threads(ranks, monkeypatch).run(rank)


@pytest.mark.full
def test_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More (token, k) slots of a rank's experts than ``max_rows``."""

    def rank(here: Rank) -> None:
        arguments: dict[str, Any] = {
            "max_tokens": 8,
            "max_rows": 4,
            "device": "cpu",
            "symmetric": True,
            "time_limit": 20,
        }
        x, _, weights, _ = tokens(here.number, 3)
        indices = torch.full(weights.shape, -1)
        indices[:, 0] = 1  # those of both ranks are on the first
        up, down = (w[4 * here.number :][:4] for w in parameters(False))
        with cudnn.emulation("sm_90a"):
            group = Exchange(here, EXPERTS, TOP_K, HIDDEN, **arguments)
            moe_mlp(x, (indices, weights), up, down, group=group)

    ranks = Threads(2, monkeypatch)
    with pytest.raises(AssertionError, match=r"Exchange: max_rows=4 is less than the \(token, k\) slots"):
        ranks.run(rank)
