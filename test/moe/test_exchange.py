"""Expert parallelism against the same experts in one process: by gloo, and by emulated kernels on memory they share."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cudnn
from cudnn.moe import Exchange, exchange, sort
from cudnn_kernels.moe.configuration import CombineExchangeConfiguration
from support.pages import ROOT, Page
from support.ranks import Rank, Threads, run_processes

EXPERTS, TOP_K, HIDDEN, MOST = 8, 3, 16, 7


class Case:
    """Tokens of all ranks, their choices, weights and gradients, and the experts: a matrix each."""

    def __init__(self, ranks: int, counts: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(ranks)

        def normal(*shape: int) -> torch.Tensor:  # at no multiple of 16 bytes
            return torch.randn(1 + math.prod(shape), generator=generator)[1:].view(shape)

        self.ranks = ranks
        self.x = [normal(n, HIDDEN) for n in counts]
        self.d_y = [normal(n, HIDDEN) for n in counts]
        self.weights = [normal(n, TOP_K) for n in counts]
        choices = (torch.randint(-1, EXPERTS, (n, TOP_K), generator=generator, dtype=torch.int32) for n in counts)
        self.indices = list(choices)
        self.experts = normal(EXPERTS, HIDDEN, HIDDEN) / 4

    def expected(self) -> tuple[list[Any], list[Any], list[Any], Any]:
        """Results, and gradients of tokens, weights and experts, without an exchange."""
        x, weights = ([t.clone().requires_grad_() for t in arguments] for arguments in (self.x, self.weights))
        experts = self.experts.clone().requires_grad_()
        results = []
        for tokens, factors, indices in zip(x, weights, self.indices, strict=True):
            each = torch.einsum("th,tkhj->tkj", tokens, experts[indices.clamp(min=0).long()])
            results.append((each * (factors * (indices >= 0))[..., None]).sum(1))
        torch.autograd.backward(results, self.d_y)
        return results, [t.grad for t in x], [t.grad for t in weights], experts.grad

    def check(self, rank: int, parallel: Exchange) -> None:
        """A rank's part, forward and backward, twice."""
        results, d_x, d_weights, d_experts = self.expected()
        for _ in range(2):
            x, weights = (arguments[rank].detach().requires_grad_() for arguments in (self.x, self.weights))
            here = slice(rank * EXPERTS // self.ranks, (rank + 1) * EXPERTS // self.ranks)
            experts = self.experts[here].clone().requires_grad_()
            received = parallel.dispatch(x, self.indices[rank], weights)
            offsets, gather_idx, scatter_idx = sort(received.indices, parallel.local_experts)
            starts = [0, *offsets.tolist()]
            rows = received.tokens[gather_idx[: starts[-1]].long()]
            parts = [rows[i:j] @ matrix for (i, j), matrix in zip(itertools.pairwise(starts), experts, strict=True)]
            y = parallel.combine(torch.cat(parts), scatter_idx, received)
            torch.testing.assert_close(y, results[rank], rtol=1e-5, atol=1e-5)
            y.backward(self.d_y[rank])
            for one, other in ((x.grad, d_x[rank]), (weights.grad, d_weights[rank]), (experts.grad, d_experts[here])):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
            went = parallel.is_sent(self.indices[rank])
            assert went.sum() <= (self.indices[rank] >= 0).sum()
            if received.sent.send_counts:
                assert received.sent.send_counts == went.sum(0).tolist()  # a token once to a rank


@pytest.mark.parametrize(
    "counts", [(5, 7), *(pytest.param(counts, marks=pytest.mark.full) for counts in ((4, 0, 7, 1), (0, 0)))]
)
def test_by_all_to_all(counts: tuple[int, ...], tmp_path: Path) -> None:
    case = Case(len(counts), counts)

    def rank(number: int) -> None:
        arguments = {"max_tokens": MOST, "dtype": torch.float32, "device": "cpu"}
        case.check(number, Exchange(None, EXPERTS, TOP_K, HIDDEN, **arguments))

    run_processes(len(counts), tmp_path, rank)


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    page = Page.read(ROOT / "docs/fused/moe_routing.md")
    (text,) = [block.text for block in page.blocks if block.title == "parallel.py"]
    program: dict[str, Any] = {"__name__": "parallel"}
    exec(compile(text, "parallel.py", "exec"), program)

    def rank(_: int) -> None:
        dist.init_process_group = lambda *_: None  # in this process, where it is done
        torch.cuda.is_available = lambda: False
        program["main"]()

    run_processes(2, tmp_path, rank)


@pytest.mark.parametrize(
    ("arch", "counts"),
    [("sm_90a", (5, 7)), ("sm_100a", (5, 7)), ("sm_90a", (4, 0, 7, 1))],
)
@pytest.mark.full
def test_by_kernels_on_shared_memory(arch: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(len(counts), counts)
    monkeypatch.setattr(
        exchange, "CombineExchangeConfiguration", functools.partial(CombineExchangeConfiguration, before=4)
    )

    def rank(group: Rank) -> None:
        arguments: dict[str, Any] = {"max_tokens": MOST, "dtype": torch.float32, "device": "cpu", "symmetric": True}
        with cudnn.emulation(arch, races=True):
            case.check(group.number, Exchange(group, EXPERTS, TOP_K, HIDDEN, **arguments))

    Threads(len(counts), monkeypatch).run(rank)


@pytest.mark.full
def test_a_rank_that_sends_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that waits for them ends in time."""

    def rank(group: Rank) -> None:
        arguments: dict[str, Any] = {"max_tokens": 4, "device": "cpu", "symmetric": True, "time_limit": 1}
        with cudnn.emulation("sm_90a"):
            parallel = Exchange(group, 4, 2, 16, **arguments)
            indices = torch.tensor([[0, 2]] * 3, dtype=torch.int32)  # an expert of each
            received = parallel.dispatch(torch.ones(3, 16).bfloat16(), indices, torch.ones(3, 2))
            if group.number:
                return
            with pytest.raises(Exception, match="trap"):
                parallel.combine(received.tokens, sort(received.indices, 2)[2], received)

    Threads(2, monkeypatch).run(rank)


def test_barriers_before_other_ranks_memory_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not see when a CUDA graph runs: it may replay any part of the calls."""
    (group,), calls, capture = Threads(1, monkeypatch).groups, list[str](), 0
    monkeypatch.setattr(exchange, "run", lambda source, *_: calls.append(source.split(":")[1]))
    monkeypatch.setattr(exchange, "capture_of", lambda _: capture)
    transport = Exchange(group, 8, 2, 16, max_tokens=4, device="cpu", symmetric=True).transport
    monkeypatch.setattr(transport.tokens, "barrier", lambda: calls.append("barrier"))
    x, indices = torch.ones(4, 16).bfloat16(), torch.zeros(4, 2, dtype=torch.int32)

    def dispatch() -> None:
        transport.dispatch(x, indices, torch.ones(4, 2))

    def combine() -> None:
        transport.combine(x, indices, None, exchange.Sent(indices, indices[:, :1], 8))

    for now, call, expected in (
        (0, dispatch, ["Dispatch", "barrier"]),
        (0, combine, ["CombineExchange"]),
        (0, combine, ["barrier", "CombineExchange"]),
        (0, dispatch, ["Dispatch", "barrier"]),
        (0, dispatch, ["barrier", "Dispatch", "barrier"]),
        (1, combine, ["barrier", "CombineExchange"]),
        (1, dispatch, ["Dispatch", "barrier"]),
        (2, combine, ["barrier", "CombineExchange"]),
        (0, dispatch, ["barrier", "Dispatch", "barrier"]),
        (0, combine, ["barrier", "CombineExchange"]),
    ):
        calls.clear()
        capture = now
        call()
        assert calls == expected


def test_a_group_ignores_earlier_groups_over_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finished, and one whose rank timed out."""
    first = Threads(2, monkeypatch)
    first.run(lambda group: exchange.check_all_ranks(group, "layer", 0, 60, "MoE"))
    for number in (0, 1):
        again = Threads(2, monkeypatch, first.store)
        with pytest.raises(
            RuntimeError, match=rf"got no answer of ranks {1 - number} within 0\.01 s on rank {number};"
        ):
            exchange.check_all_ranks(again.groups[number], "layer", 0, 0.01, "MoE")
    last = Threads(2, monkeypatch, first.store)
    last.run(lambda group: exchange.check_all_ranks(group, "layer", 0, 60, "MoE"))


def test_late_ranks_join_the_others_at_their_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks that wait with one that times out get its error."""
    ranks, limits = Threads(3, monkeypatch), {0: 0.2, 1: 60.0}

    def rank(group: Rank) -> None:
        if group.number < 2:
            with pytest.raises(RuntimeError, match=r"got no answer of ranks 2 within 0\.2 s on rank 0;"):
                exchange.check_all_ranks(group, "layer", 0, limits[group.number], "MoE")
        ranks.barrier.wait()
        assert exchange.check_all_ranks(group, "layer", group.number, 60, "MoE") == [0, 1, 2]

    ranks.run(rank)


def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the process that held it."""

    def fail(*_: Any) -> None:
        raise dist.DistNetworkError("Broken pipe")

    (group,) = Threads(1, monkeypatch, SimpleNamespace(set=fail)).groups
    with pytest.raises(RuntimeError, match=r"^MoE: group: got an error of its store, Broken pipe; allowed: every rank"):
        exchange.check_all_ranks(group, "layer", 0, 60, "MoE")


def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(exchange, "Path", lambda _: boot)
    actual = {exchange._host()}  # without a boot ID
    for text in ("one", "another"):
        boot.write_text(text)
        actual.add(exchange._host())
    assert len(actual) == 3


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = Threads(1, monkeypatch).groups
    arguments: dict[str, Any] = {"max_tokens": 4, "device": "cpu", "symmetric": True}
    changed: Any
    for changed, words in (
        ({"experts": 0}, "experts: got 0; allowed: multiples of 1 ranks"),
        ({"top_k": 17}, "top_k: got 17; allowed: 1 to 16"),
        ({"hidden": 12}, "hidden: got 12; allowed: multiples of 8"),
        ({"max_tokens": 0}, "max_tokens: got 0; allowed: 1 or more"),
        ({"max_rows": 0}, "max_rows: got 0; allowed: 1 or more"),
        ({"time_limit": 0}, "time_limit: got 0; allowed: seconds, above 0"),
        ({"dtype": torch.float64}, "dtype: got torch.float64; allowed: torch.bfloat16, torch.float16, torch.float32"),
    ):
        with pytest.raises(ValueError, match=f"Exchange: {words}"):
            Exchange(**{"group": group, "experts": 8, "top_k": 2, "hidden": 16, **arguments, **changed})
    for wrong, words in ((None, "got no initialised torch.distributed"), (-100, "got -100")):
        allowed = f"group: {words}; allowed: a process group of torch.distributed that this rank belongs to, or a"
        with pytest.raises(TypeError, match=f"^Exchange: {allowed}"):
            Exchange(wrong, 8, 2, 16, **arguments)
    with pytest.raises(TypeError, match=r"^MoE: group: got -100; "):
        cudnn.nn.MoE(64, 32, 4, 2, group=-100)
    x, up, down = (torch.zeros(shape).bfloat16() for shape in ((5, 64), (1, 64, 64), (1, 64, 32)))
    with pytest.raises(TypeError, match=r"^moe_mlp: group: got 3; "):
        cudnn.ops.moe_mlp(x, (torch.zeros(5, 1).long(), torch.ones(5, 1)), up, down, group=3)
    parallel = Exchange(group, 8, 2, 16, **arguments)
    x, indices, weights = torch.zeros(5, 16).bfloat16(), torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2)
    for changed, words in (
        (
            {},
            "tokens of x: got 5; allowed: max_tokens=4. To fix it, make the Exchange, which a layer takes as its group",
        ),
        ({"x": x[:4].float()}, "x: got torch.float32 of the shape"),
        ({"x": x[:4], "indices": indices[:4].long()}, "indices: got torch.int64"),
        (
            {"x": x[:4], "indices": indices[:4], "weights": weights[:3]},
            "tokens of x, indices and weights: got 4, 4 and 3",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            parallel.dispatch(**{"x": x, "indices": indices, "weights": weights, **changed})
