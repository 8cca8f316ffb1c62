"""Attention on fp8 tensors by cuDNN against PyTorch, forward and backward."""

from __future__ import annotations

import pytest
import torch

import cudnn
from support.attention import Described, Problem
from support.attention_fp8 import CASES, E4M3, E5M2, SCALES, attention_fp8, describe_fp8, new_graph, tensors
from support.fuzz.approx import Approx

BACKWARD = [name for name, problem in CASES.items() if not problem.statistics and not problem.dropout]


def results(described: Described) -> dict[str, torch.Tensor]:
    try:
        return described.run()
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error))


def check(problem: Problem, actual: dict[str, torch.Tensor], expected: dict[str, Approx]) -> None:
    """Within what numbers of fp8 that fall on the other side of a rounding make of sums of them."""
    valid = problem.valid("cuda")
    for port, result in actual.items():
        wanted = expected[port].value
        if port.startswith("Amax"):
            torch.testing.assert_close(result.double(), wanted, rtol=0.2, atol=0.0, msg=port)
            continue
        keep = valid["kv" if port in ("dK", "dV") else "q"]
        got, wanted = (torch.where(keep, x.double(), 0.0) for x in (result, wanted))
        assert bool(torch.isfinite(got).all()), port
        spread = 0.03 if result.dtype.itemsize > 1 else 0.1
        assert (got - wanted).norm() <= spread * wanted.norm(), port


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, kind: torch.dtype) -> None:
    problem = CASES[name]
    data = tensors(problem, kind, "cuda")
    actual = results(describe_fp8(new_graph(kind), problem, data))
    if problem.dropout:
        # Tiles of scores that take no part are left unwritten, full of NaN.
        data["mask"] = torch.where(problem.visible().to("cuda"), actual.pop("RNG_DUMP"), 0.0)
    check(problem, actual, attention_fp8(problem, data, kind))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str, deterministic: bool) -> None:
    problem = CASES[name]
    data = tensors(problem, E4M3, "cuda")
    forward = results(describe_fp8(new_graph(), problem, data))
    arguments = {**data, "O": forward["O"], "Stats": forward["Stats"]}
    described = describe_fp8(new_graph(), problem, arguments, use_deterministic_algorithm=deterministic)
    actual = results(described)
    check(problem, actual, attention_fp8(problem, data))
    if deterministic:
        for port, x in results(described).items():
            assert torch.equal(x.view(torch.uint8), actual[port].view(torch.uint8)), port


def test_scales_are_read_when_the_graph_runs() -> None:
    problem = CASES["causal"]
    data = tensors(problem, E4M3, "cuda")
    described = describe_fp8(new_graph(), problem, data)
    first = results(described)
    for tensor, value in described.inputs.items():
        if tensor.get_name() == "scale_o":
            value.fill_(SCALES["scale_o"] / 2)
    second = described.run()
    assert (2 * second["O"].double() - first["O"].double()).norm() <= 0.02 * first["O"].double().norm()
    assert torch.equal(first["Amax_O"], second["Amax_O"])
