"""The random graphs of the GPU tests, without a GPU: samples on the reference executor, and asked of cuDNN."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count, islice
from typing import Any

import pytest
import torch

import cudnn
from support.fuzz import FAMILIES, Case
from support.fuzz.approx import Approx, apply, compare
from support.fuzz.attention import AttentionCase, Mask
from support.fuzz.attention_formula import Problem
from support.fuzz.chain import Program
from support.fuzz.harness import plannable, run
from support.fuzz.matmul import MatmulCase

_SMALL = 60_000  # elements


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Cases are too small for more threads to help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(family: str, wanted: Callable[[Any], bool] = lambda case: True) -> list[Case]:
    """The first small cases."""
    cases = (FAMILIES[family].draw(seed) for seed in count())
    fitting = (case for case in cases if case.size < _SMALL and wanted(case))
    return list(islice(fitting, {"attention": 50, "attention_fp8": 15}.get(family, 50)))


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_executor(family: str) -> None:
    outcomes = [run(case, "cpu", "reference") for case in small(family)]
    failed = [f"seed {outcome.case.seed}: {outcome.message}" for outcome in outcomes if outcome.status != "passed"]
    assert not failed, "\n".join(failed)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("family", FAMILIES)
def test_cudnn_has_engines(family: str, h200: Any) -> None:
    cases = {"matmul": 50, "attention_fp8": 30}.get(family, 80)
    answers = [plannable(FAMILIES[family].draw(seed), h200) for seed in range(cases)]
    refused = Counter(answer for answer in answers if answer)
    assert refused.total() <= FAMILIES[family].most_refused * cases, refused.most_common()


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_are_data_that_a_seed_determines(family: str) -> None:
    seen = set()
    for seed in range(50):
        case, again = (FAMILIES[family].draw(seed) for _ in range(2))
        assert case == again
        assert json.loads(case.json())["seed"] == seed
        seen.add(repr(dataclasses.replace(case, seed=0)))
    assert len(seen) > 45


# A wrong library is noticed: here the formula is that of another graph.
def found_wrong(case: Case, formula: Case, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(
        type(case), "expected", lambda self, data, results: type(formula).expected(formula, data, results)
    )
    return run(case, "cpu", "reference").status == "failed"


def test_a_lost_operation_is_noticed() -> None:
    noticed = 0
    cases = small("matmul", lambda case: len(case.after.instructions) > 1 and not case.after.taps)[:20]
    for case in cases:
        assert isinstance(case, MatmulCase)
        shorter = dataclasses.replace(case, after=Program(case.after.instructions[:-1]))
        with pytest.MonkeyPatch.context() as patch:
            noticed += found_wrong(case, shorter, patch)
    assert noticed > len(cases) * 0.7  # an identity, or the ReLU of what is positive, changes nothing


def test_a_wrong_mask_is_noticed() -> None:
    cases = small("attention", lambda case: case.mask.left is not None and case.mask.left > 1)[:20]
    noticed = 0
    for case in cases:
        assert isinstance(case, AttentionCase)
        assert case.mask.left is not None
        narrower = dataclasses.replace(case, mask=dataclasses.replace(case.mask, left=case.mask.left - 1))
        with pytest.MonkeyPatch.context() as patch:
            noticed += found_wrong(case, narrower, patch)
    assert noticed > len(cases) * 0.7  # wider than the keys are many, it masks nothing
    assert Mask(left=1).options()


def tampered(
    change: Callable[[Mapping[Any, torch.Tensor], torch.Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> str:
    """The message of a case whose execution does more than it should."""
    execute = cudnn.pygraph.execute

    def wrapped(graph: Any, pack: dict[Any, torch.Tensor], workspace: torch.Tensor) -> None:
        execute(graph, pack, workspace)
        change(pack, workspace)

    monkeypatch.setattr(cudnn.pygraph, "execute", wrapped)
    return run(FAMILIES["matmul"].draw(5), "cpu", "reference").message


def whole(memory: torch.Tensor) -> torch.Tensor:
    """All bytes of what a tensor is part of."""
    return torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda pack, _: whole([*pack.values()][-1])[255].fill_(0), "wrote outside the elements of C"),
        (lambda _, workspace: whole(workspace)[-1].fill_(0), "wrote outside the workspace"),
        (lambda pack, _: next(iter(pack.values()))[0].fill_(0.123), "changed input A"),
        (lambda pack, _: [*pack.values()][-1][7].fill_(float("nan")), "C: 1 of 2048 elements wrong; at [0, 0, 7]"),
    ],
)
def test_what_should_not_happen_to_memory_is_noticed(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tampered(change, monkeypatch).startswith(said)


def test_bounds_cover_jumps_and_slopes() -> None:
    x = Approx(torch.tensor([0.9999, 0.5, 3.0]), torch.tensor([0.001, 0.001, 0.5]))
    rounded_up = apply(torch.ceil, x)
    assert compare(torch.tensor([2.0, 1.0, 3.0]), rounded_up) == ""  # what is near 1 may fall on either side
    assert compare(torch.tensor([1.0, 2.0, 3.0]), rounded_up).startswith("1 of 3 elements wrong; at [1] got 2")
    square = apply(lambda v: v * v, x)
    assert square.bound[2] == pytest.approx(3.25)


def test_bounds_cover_a_gradient_of_scores_that_is_rounded_times_the_scale() -> None:
    """As cuDNN stores dBias in fp16: small ones lie on a grid of 2^-24 / scale. A coarser grid is noticed."""
    generator, scale = torch.Generator().manual_seed(0), 0.05
    q, k, v, d_o = (torch.randn(1, 2, 96, 64, generator=generator).half().double() for _ in range(4))
    bias = 3 * torch.randn(1, 2, 96, 96, generator=generator).double()
    scores = scale * q @ k.mT + bias
    weights = scores.softmax(-1)
    o = (weights @ v).half().double()
    exact = scale * weights * (d_o @ v.mT - (d_o * o).sum(-1, keepdim=True))
    stats = scores.logsumexp(-1, keepdim=True)
    problem = Problem(q, k, v, torch.float16, scale, bias)
    allowed = problem.backward(o, d_o, stats, (1, 2, 96, 96))["dBias"].stored(torch.float16)

    def stored(grid: float) -> torch.Tensor:
        return ((exact / grid).half().double() * grid / scale).half()

    assert compare(stored(1), allowed) == ""
    assert "elements wrong" in compare(stored(8), allowed)
