"""Attention by cuDNN against PyTorch in float64, forward and backward.

Before each run the outputs are full of NaN, and guards lie round them and round the workspace.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import library
from gpu.common import captured, workspace
from support.attention import BACKWARD_CASES, CASES, DROPOUT_CASES, Described, Problem, attention, describe
from support.graphs import FLOAT, MODES

AUTO, COMPOSITE = cudnn.attention_implementation.AUTO, cudnn.attention_implementation.COMPOSITE


def new_graph(dtype: torch.dtype) -> cudnn.pygraph:
    return cudnn.pygraph(io_data_type=dtype, intermediate_data_type=FLOAT, compute_data_type=FLOAT)


def buildable(described: Described) -> Described:
    try:
        described.graph.build(MODES)
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error))
    return described


def solve(problem: Problem, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], ...]:
    """Fresh inputs, the solution in float64, and that of the same operations in ``dtype``."""
    data = problem.tensors(dtype, "cuda")
    return data, attention(problem, data, torch.float64), attention(problem, data, dtype)


def forward(problem: Problem, dtype: torch.dtype, **options: Any) -> tuple[dict[str, torch.Tensor], ...]:
    """Fresh inputs, what cuDNN makes of them, and the two solutions of ``solve``, with the mask that dropout drew."""
    data = problem.tensors(dtype, "cuda")
    # Before 9.21 it is Stats, or the largest score and the sum.
    stats = not (problem.statistics and library.version() < 92100)
    actual = buildable(describe(new_graph(dtype), problem, data, **{"stats": stats, **options})).run()
    if problem.dropout:
        data["mask"] = drawn(problem, actual)
    return data, actual, attention(problem, data, torch.float64), attention(problem, data, dtype)


def drawn(problem: Problem, actual: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mask that dropout drew. cuDNN leaves tiles of scores that take no part unwritten, full of NaN."""
    return torch.where(problem.visible().to("cuda"), actual.pop("RNG_DUMP"), 0.0)


def backward(problem: Problem, dtype: torch.dtype, **options: Any) -> tuple[dict[str, torch.Tensor], ...]:
    """As ``forward``, with the gradients, from O and Stats of cuDNN's own forward pass."""
    data, actual, exact, rough = forward(dataclasses.replace(problem, statistics=False), dtype)
    arguments = {name: x for name, x in data.items() if name != "mask" or problem.own_mask} | actual
    gradients = buildable(describe(new_graph(dtype), problem, arguments, **options)).run()
    if problem.dropout:
        assert torch.equal(drawn(problem, gradients), data["mask"])
    return data, gradients, exact, rough


def check(problem: Problem, actual: dict[str, torch.Tensor], exact: dict[str, Any], rough: dict[str, Any]) -> None:
    """At most twice the error of the same computation in the output type, plus that type's own rounding."""
    valid = problem.valid("cuda")
    for name, result in actual.items():
        if name in ("dBias", "dSink"):
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
        # The sink's gradient is a sum over all rows, whose roundings in the output type may cancel out by chance.
        allowed = (8 if name == "dSink" else 2) * peer + rounding
        assert error <= allowed, f"{name}: error {error:.3e}, the same in the output type {peer:.3e}"


@pytest.mark.parametrize("implementation", [AUTO, COMPOSITE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, dtype: torch.dtype, implementation: Any) -> None:
    _, actual, exact, rough = forward(CASES[name], dtype, implementation=implementation)
    check(CASES[name], actual, exact, rough)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_backward(name: str, dtype: torch.dtype, deterministic: bool) -> None:
    _, actual, exact, rough = backward(CASES[name], dtype, use_deterministic_algorithm=deterministic)
    check(CASES[name], actual, exact, rough)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("s_kv", [64, 192, 704, 128])
@pytest.mark.parametrize("s_q", [1, 128])
@pytest.mark.parametrize("name", ["plain", "bias", "sink", "causal", "padding", "head size 128"])
def test_gradients_of_scores_far_below_zero(name: str, s_q: int, s_kv: int, dtype: torch.dtype) -> None:
    """cuDNN may compute weights outside the scores, which overflow where the LSE is below -12 (fp16) or -88.7."""
    bias = (1, 4, s_q, s_kv) if name == "bias" else ()
    lengths = {"lengths_q": (s_q, (s_q + 1) // 2), "lengths_kv": (s_kv, s_kv // 2)} if name == "padding" else {}
    problem = dataclasses.replace(CASES[name], s_q=s_q, s_kv=s_kv, bias=bias, **lengths)
    assert problem.scale is not None
    data = problem.tensors(dtype, "cuda")
    levels = torch.linspace(-300, 20, s_q, device="cuda")  # of the scores of each row
    data["q"][..., 0], data["k"][..., 0] = levels / problem.scale, 1
    if problem.sink:
        data["sink"] -= 100
    actual = buildable(describe(new_graph(dtype), problem, data)).run()
    gradients = buildable(describe(new_graph(dtype), problem, {**data, **actual})).run()
    exact, valid = attention(problem, data, torch.float64), problem.valid("cuda")
    for port in ("dQ", "dK", "dV"):
        rows = valid["q" if port == "dQ" else "kv"]
        # Element 0 of dQ and dK is a sum that cancels out, times a large number.
        got, right = (torch.where(rows, x[port].double(), 0.0)[..., 1:] for x in (gradients, exact))
        # A row that sees one key has gradients of 0, computed as a difference of float32 numbers.
        torch.testing.assert_close(got, right, rtol=0, atol=max(0.02 * right.abs().max().item(), 1e-5))


@pytest.mark.parametrize("implementation", [AUTO, COMPOSITE])
@pytest.mark.parametrize("name", ["padding", "padding, causal"])
def test_rows_of_padding(name: str, implementation: Any) -> None:
    """They get O = 0, and from 9.14 statistics of -inf."""
    problem = CASES[name]
    _, actual, _, _ = forward(problem, torch.float16, implementation=implementation)
    padding = ~problem.valid("cuda")["q"]
    assert bool((actual["O"][padding.expand_as(actual["O"])] == 0).all())
    if library.version() >= 91400:
        assert bool(torch.isneginf(actual["Stats"][padding.expand_as(actual["Stats"])]).all())


@pytest.mark.parametrize("name", DROPOUT_CASES)
def test_dropout_mask(name: str) -> None:
    """Ones in the share asked for, where the scores take part."""
    problem = CASES[name]
    data, _, _, _ = forward(problem, torch.float16)
    live = data["mask"][problem.visible().to("cuda").expand_as(data["mask"])]
    assert set(live.unique().tolist()) == {0.0, 1.0}
    keep = 1 - problem.dropout
    assert abs(live.mean().item() - keep) < 6 * (keep * problem.dropout / live.numel()) ** 0.5


@pytest.mark.parametrize("name", ["causal", "bias", "ragged, causal", "one head of K and V", "dropout", "sink"])
def test_deterministic_algorithm(name: str) -> None:
    """The same bits twice, forward and backward, with work for many multiprocessors; cuDNN's dSink alone varies."""
    problem = CASES[name]
    if not problem.lengths_q and not problem.bias:
        problem = dataclasses.replace(problem, s_q=1024, s_kv=1024)
    data, actual, _, _ = forward(problem, torch.float16)
    arguments = {key: x for key, x in data.items() if key != "mask"}
    described = describe(new_graph(torch.float16), problem, {**arguments, **actual}, use_deterministic_algorithm=True)
    first, second = (buildable(described).run() for _ in range(2))
    for port in first.keys() - {"dSink"}:
        assert torch.equal(first[port].nan_to_num(), second[port].nan_to_num()), port


@pytest.mark.parametrize("tokens", [{}, {"max_total_seq_len_q": 256, "max_total_seq_len_kv": 256}])
def test_bounds_on_all_tokens(tokens: dict[str, int]) -> None:
    """Of ragged tensors: the workspace is shorter, the guards behind it hold, the gradients are the same."""
    _, actual, exact, rough = backward(CASES["ragged, causal"], torch.float16, **tokens)
    check(CASES["ragged, causal"], actual, exact, rough)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_scale_as_a_tensor(name: str, device: str) -> None:
    """On the device, and passed by value from the CPU."""
    problem = CASES[name]
    data, exact, rough = solve(problem, torch.float16)
    scale = torch.full((1, 1, 1, 1), problem.scale, device=device)
    actual = describe(new_graph(torch.float16), problem, data, scale=scale).run()
    check(problem, actual, exact, rough)
    gradients = describe(new_graph(torch.float16), problem, {**data, **actual}, scale=scale).run()
    check(problem, gradients, exact, rough)


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
    described.graph.build(MODES)
    count = exact["Stats"].numel()
    memory = torch.full((2 * count,), 7.0, dtype=torch.bfloat16, device="cuda")
    o = torch.full_like(data["dO"], float("nan"))
    results = {described.outputs["O"]: o, described.outputs["Stats"]: memory[:count]}
    described.graph.execute({**described.inputs, **results}, workspace(described.graph))
    torch.testing.assert_close(o.double(), exact["O"], atol=2e-2, rtol=2e-2)
    assert bool((memory[count:] == 7).all())
    torch.testing.assert_close(memory[:count].view_as(exact["Stats"]).double(), exact["Stats"], atol=5e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["causal", "ALiBi, causal", "bias", "sink, causal", "softcap"])
def test_cuda_graph_replay_with_new_data(name: str) -> None:
    problem = CASES[name]
    data = problem.tensors(torch.float16, "cuda")
    first = describe(new_graph(torch.float16), problem, data)
    actual = first.run()
    second = describe(new_graph(torch.float16), problem, {**data, **actual})
    gradients = second.run()
    spaces = [workspace(each.graph) for each in (first, second)]

    def step() -> None:
        first.graph.execute({**first.inputs, **{first.outputs[port]: x for port, x in actual.items()}}, spaces[0])
        results = {second.outputs[port]: x for port, x in gradients.items()}
        second.graph.execute({**second.inputs, **results}, spaces[1])

    step()
    torch.cuda.synchronize()
    again = captured(step)
    fresh = problem.tensors(torch.float16, "cuda")
    for port, value in fresh.items():
        data[port].copy_(value)
    for result in (*actual.values(), *gradients.values()):
        result.fill_(float("nan"))
    again.replay()
    exact, rough = attention(problem, data, torch.float64), attention(problem, data, torch.float16)
    check(problem, actual | gradients, exact, rough)


@pytest.mark.parametrize("implementation", [AUTO, COMPOSITE])
@pytest.mark.parametrize("causal", [False, True])
def test_one_tensor_as_query_key_and_value(causal: bool, implementation: Any) -> None:
    """With one uid for Q and V, cuDNN 9.19 stops at a misaligned address."""
    x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.float16)
    graph = new_graph(torch.float16)
    q = graph.tensor_like(x)
    options: Any = {"use_causal_mask": causal, "implementation": implementation}
    o, _ = graph.sdpa(q, q, q, is_inference=True, attn_scale=0.125, **options)
    o.set_output(True)
    graph.build(MODES)
    actual = torch.full_like(x, float("nan"))
    graph.execute({q: x, o: actual}, workspace(graph))
    wide = x.double()
    expected = torch.nn.functional.scaled_dot_product_attention(wide, wide, wide, is_causal=causal, scale=0.125)
    torch.testing.assert_close(actual.double(), expected, atol=4e-3, rtol=4e-3)
