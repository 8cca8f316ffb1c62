"""Attention by cuDNN against PyTorch in float64, forward and backward, with outputs full of NaN before each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from support.attention import CASES, Described, Problem, attention, describe
from support.graphs import FLOAT

pytestmark = pytest.mark.gpu
AUTO, COMPOSITE = cudnn.attention_implementation.AUTO, cudnn.attention_implementation.COMPOSITE
BACKWARD_CASES = [name for name, problem in CASES.items() if problem.h_k == problem.h_v]


def new_graph(dtype: torch.dtype) -> cudnn.pygraph:
    return cudnn.pygraph(io_data_type=dtype, intermediate_data_type=FLOAT, compute_data_type=FLOAT)


def buildable(described: Described) -> Described:
    try:
        described.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error))
    return described


def solve(problem: Problem, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], ...]:
    """Fresh inputs, the solution in float64, and that of the same operations in ``dtype``."""
    data = problem.tensors(dtype, "cuda")
    return data, attention(problem, data, torch.float64), attention(problem, data, dtype)


def check(problem: Problem, found: dict[str, torch.Tensor], exact: dict[str, Any], rough: dict[str, Any]) -> None:
    """At most twice the error of the same computation in the output type, plus that type's own rounding."""
    valid = problem.valid("cuda")
    for name, result in found.items():
        if name == "dBias":
            mask = torch.ones_like(result, dtype=torch.bool)
        else:
            mask = valid["kv" if name in ("dK", "dV") else "q"].expand(result.shape)
        expected = torch.where(mask, exact[name], 0.0)
        dead = torch.isinf(expected)  # the statistics of a row that sees nothing
        assert torch.equal(result[dead & mask].double(), expected[dead & mask]), name
        mask = mask & ~dead
        error = (result.double() - expected)[mask].abs().max().item()
        peer = (rough[name].double() - expected)[mask].abs().max().item()
        rounding = torch.finfo(result.dtype).eps * expected[mask].abs().max().item()
        # NaN in the result makes the comparison false.
        assert error <= 2 * peer + rounding, f"{name}: error {error:.3e}, the same in the output type {peer:.3e}"


@pytest.mark.parametrize("implementation", [AUTO, COMPOSITE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, dtype: torch.dtype, implementation: Any) -> None:
    problem = CASES[name]
    data, exact, rough = solve(problem, dtype)
    described = buildable(describe(new_graph(dtype), problem, data, implementation=implementation))
    check(problem, described.run(), exact, rough)


@pytest.mark.parametrize("name", ["plain", "causal", "padding", "bias"])
def test_forward_without_statistics(name: str) -> None:
    problem = CASES[name]
    data, exact, rough = solve(problem, torch.float16)
    found = describe(new_graph(torch.float16), problem, data, stats=False).run()
    assert set(found) == {"O"}
    check(problem, found, exact, rough)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_backward(name: str, dtype: torch.dtype) -> None:
    problem = CASES[name]
    data, exact, rough = solve(problem, dtype)
    forward = buildable(describe(new_graph(dtype), problem, data)).run()
    described = buildable(describe(new_graph(dtype), problem, {**data, **forward}))
    check(problem, described.run(), exact, rough)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_scale_as_a_tensor(name: str, device: str) -> None:
    """On the device, and passed by value from the CPU."""
    problem = CASES[name]
    data, exact, rough = solve(problem, torch.float16)
    scale = torch.full((1, 1, 1, 1), problem.scale, device=device)
    forward = describe(new_graph(torch.float16), problem, data, scale=scale).run()
    check(problem, forward, exact, rough)
    backward = describe(new_graph(torch.float16), problem, {**data, **forward}, scale=scale).run()
    check(problem, backward, exact, rough)


def test_bias_without_its_gradient() -> None:
    problem = CASES["bias"]
    data, exact, rough = solve(problem, torch.float16)
    forward = describe(new_graph(torch.float16), problem, data).run()
    check(problem, describe(new_graph(torch.float16), problem, {**data, **forward}, d_bias=False).run(), exact, rough)


@pytest.mark.parametrize("implementation", [AUTO, COMPOSITE])
@pytest.mark.parametrize("bias_type", [torch.float32, torch.bfloat16])
def test_bias_of_another_type(bias_type: torch.dtype, implementation: Any) -> None:
    problem = CASES["bias"]
    data = problem.tensors(torch.float16, "cuda")
    data["bias"] = data["bias"].to(bias_type)
    exact, rough = attention(problem, data, torch.float64), attention(problem, data, torch.float16)
    described = buildable(describe(new_graph(torch.float16), problem, data, implementation=implementation))
    check(problem, described.run(), exact, rough)


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_statistics_in_bfloat16_stay_inside_their_buffer(name: str) -> None:
    problem = CASES[name]
    data, exact, _ = solve(problem, torch.bfloat16)
    described = describe(new_graph(torch.bfloat16), problem, data)
    described.outputs["Stats"].set_data_type(cudnn.data_type.BFLOAT16)
    described.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    count = exact["Stats"].numel()
    memory = torch.full((2 * count,), 7.0, dtype=torch.bfloat16, device="cuda")
    o = torch.full_like(data["dO"], float("nan"))
    results = {described.outputs["O"]: o, described.outputs["Stats"]: memory[:count]}
    workspace = torch.empty(max(described.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    described.graph.execute({**described.inputs, **results}, workspace)
    torch.testing.assert_close(o.double(), exact["O"], atol=2e-2, rtol=2e-2)
    assert bool((memory[count:] == 7).all())
    torch.testing.assert_close(memory[:count].view_as(exact["Stats"]).double(), exact["Stats"], atol=5e-2, rtol=1e-2)


def test_the_same_tensor_as_key_and_value() -> None:
    problem = Problem(options={"use_causal_mask": True})
    data = problem.tensors(torch.float16, "cuda")
    data["v"] = data["k"]
    exact, rough = attention(problem, data, torch.float64), attention(problem, data, torch.float16)
    graph = new_graph(torch.float16)
    q, k = graph.tensor_like(data["q"]), graph.tensor_like(data["k"])
    o, _ = graph.sdpa(q, k, k, attn_scale=problem.scale, use_causal_mask=True, implementation=COMPOSITE)
    o.set_output(True)
    found = Described(graph, {q: data["q"], k: data["k"]}, {"O": o}).run()
    check(problem, found, exact, rough)


def test_cuda_graph_replay_with_new_data() -> None:
    problem = CASES["causal"]
    data = problem.tensors(torch.float16, "cuda")
    forward = describe(new_graph(torch.float16), problem, data)
    found = forward.run()
    graph = describe(new_graph(torch.float16), problem, {**data, **found})
    graph.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    results = {tensor: torch.empty_like(data[name[1:].lower()]) for name, tensor in graph.outputs.items()}
    spaces = [
        torch.empty(max(each.graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
        for each in (forward, graph)
    ]

    def step() -> None:
        forward.graph.execute({**forward.inputs, **{forward.outputs[port]: found[port] for port in found}}, spaces[0])
        graph.graph.execute({**graph.inputs, **results}, spaces[1])

    step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        step()
    fresh = problem.tensors(torch.float16, "cuda")
    for name, value in fresh.items():
        data[name].copy_(value)
    for result in (*found.values(), *results.values()):
        result.fill_(float("nan"))
    captured.replay()
    exact, rough = attention(problem, data, torch.float64), attention(problem, data, torch.float16)
    check(problem, found | {name: results[tensor] for name, tensor in graph.outputs.items()}, exact, rough)


@pytest.mark.parametrize("causal", [False, True])
def test_one_tensor_as_query_key_and_value(causal: bool) -> None:
    """With one uid for Q and V, cuDNN 9.19 stops at a misaligned address."""
    x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.float16)
    graph = new_graph(torch.float16)
    q = graph.tensor_like(x)
    o, _ = graph.sdpa(q, q, q, is_inference=True, attn_scale=0.125, use_causal_mask=causal)
    o.set_output(True)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    found = torch.full_like(x, float("nan"))
    graph.execute({q: x, o: found}, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda"))
    wide = x.double()
    expected = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide, is_causal=causal, scale=0.125)
    torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=4e-3)
