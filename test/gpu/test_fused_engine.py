"""Our attention kernels as an engine of graphs, on a GPU: the results of cuDNN's plan, streams, captures."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch

import cudnn
from gpu.common import captured, workspace
from support.attention import Problem, attention, describe
from support.graphs import FLOAT, MODES

FUSED = cudnn.attention_implementation.FUSED
CAUSAL = {"use_causal_mask": True}
PROBLEM = Problem(h_q=4, h_k=2, h_v=2, s_q=300, s_kv=300, d_qk=128, d_v=128, scale=0.09, options=CAUSAL)
PROBLEMS = [
    PROBLEM,
    dataclasses.replace(PROBLEM, d_qk=256, d_v=256, scale=0.06, options={}),
    dataclasses.replace(PROBLEM, d_qk=192, d_v=128, s_kv=500, options={"use_causal_mask_bottom_right": True}),
]


def described(problem: Problem, data: dict[str, torch.Tensor], dtype: torch.dtype, **options: Any) -> Any:
    graph = cudnn.pygraph(io_data_type=dtype, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    made = describe(graph, problem, data, **options)
    made.graph.build(MODES)
    return made


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("problem", [*PROBLEMS, dataclasses.replace(PROBLEM, s_q=2, s_kv=700, options={})])
def test_results(problem: Problem, dtype: torch.dtype, stats: bool) -> None:
    data = problem.tensors(dtype, "cuda")
    made = described(problem, data, dtype, implementation=FUSED, stats=stats)
    assert made.graph.get_plan_name().startswith("fused_sdpa_fwd_d")
    check(made.run(), problem, data, dtype)


def check(actual: dict[str, torch.Tensor], problem: Problem, data: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    exact, rough = attention(problem, data, torch.float64), attention(problem, data, dtype)
    for name, result in actual.items():
        error, allowed = (result.double() - exact[name]).abs().max(), (rough[name].double() - exact[name]).abs().max()
        assert error <= 2 * allowed + 1e-3 * exact[name].abs().max(), name


def with_results(problem: Problem, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The data of the backward pass: O and Stats too."""
    exact = attention(problem, data, torch.float32)
    o = exact["O"].to(data["q"].dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return {**data, "O": o, "Stats": exact["Stats"].contiguous()}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("problem", [*PROBLEMS, dataclasses.replace(PROBLEM, d_qk=96, d_v=96)])
def test_gradients(problem: Problem, dtype: torch.dtype, deterministic: bool) -> None:
    data = with_results(problem, problem.tensors(dtype, "cuda"))
    made = described(problem, data, dtype, implementation=FUSED, use_deterministic_algorithm=deterministic)
    assert made.graph.get_plan_name().startswith("fused_sdpa_bwd_d")
    actual = made.run()
    check(actual, problem, data, dtype)
    if deterministic:
        again = made.run()
        assert all(torch.equal(again[name], result) for name, result in actual.items())


def test_gradients_of_addresses_and_captures() -> None:
    data = with_results(PROBLEM, PROBLEM.tensors(torch.bfloat16, "cuda"))
    made = described(PROBLEM, data, torch.bfloat16, implementation=FUSED, use_deterministic_algorithm=True)
    expected = made.run()
    results = {name: torch.empty_like(x) for name, x in expected.items()}
    pack = {**made.inputs, **{made.outputs[name]: x for name, x in results.items()}}
    space = workspace(made.graph)
    replay = captured(lambda: made.graph.execute(pack, space)).replay
    addresses = {tensor.get_uid(): x.data_ptr() for tensor, x in pack.items()}
    for run in (replay, lambda: made.graph.execute(addresses, space.data_ptr())):
        for x in results.values():
            x.fill_(torch.nan)
        run()
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected[name]) for name, x in results.items())


def test_streams_captures_and_new_addresses() -> None:
    data = PROBLEM.tensors(torch.bfloat16, "cuda")
    made = described(PROBLEM, data, torch.bfloat16, implementation=FUSED, stats=False)
    graph, (node,) = made.graph, made.graph.nodes
    uids = [node.inputs[port].get_uid() for port in "QKV"] + [node.outputs["O"].get_uid()]
    space = workspace(graph)
    expected = made.run()["O"]
    side = torch.cuda.Stream()
    for _ in range(3):
        values = [x.clone() for x in (data["q"], data["k"], data["v"])]
        out = torch.full_like(expected, torch.nan)
        pack = dict(zip(uids, (*values, out), strict=True))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            graph.execute(pack, space)
        side.synchronize()
        assert torch.equal(out, expected)
    replay = captured(lambda: graph.execute(pack, space)).replay
    out.fill_(torch.nan)
    replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    out.fill_(torch.nan)
    graph.execute({uid: x.data_ptr() for uid, x in pack.items()}, space.data_ptr())
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_chosen_where_it_was_measured_faster(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on Hopper")
    problem = Problem(b=1, h_q=32, h_k=2, h_v=2, s_q=4096, s_kv=4096, d_qk=128, d_v=128, scale=0.09, options=CAUSAL)
    data = problem.tensors(torch.bfloat16, "cuda")
    rows = torch.empty(1, 32, 4096, 1, device="cuda")
    caplog.set_level(logging.INFO, "cudnn")
    graph = described(problem, data, torch.bfloat16, stats=False).graph
    assert graph.get_plan_name() == "fused_sdpa_fwd_d128"
    assert graph.get_execution_plan_count() > 1
    assert "FUSED implementation: measured faster" in caplog.text
    assert "fused_sdpa_fwd_d128" in str(graph.explain())
    backward = {**data, "O": torch.empty_like(data["dO"]), "Stats": rows}
    assert described(problem, backward, torch.bfloat16).graph.get_plan_name() == "fused_sdpa_bwd_d128"
