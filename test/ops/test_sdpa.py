"""``cudnn.experimental.ops.scaled_dot_product_attention``: results, gradients, caches, compilation, refusals."""

from __future__ import annotations

import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cudnn
from cudnn.attention import graphs as module
from cudnn.experimental.ops import scaled_dot_product_attention
from cudnn.experimental.ops.sdpa import _bprop_cache, _fprop_cache
from cudnn.pygraph import operator_graphs
from support.dense_attention import with_gradients
from support.graphs import planned_by
from support.torch_attention import CASES, Varying

pytestmark = pytest.mark.filterwarnings("error")
F64 = torch.float64
SOME = ["causal", "lengths, bottom right", "packed, causal, grouped heads"]


@pytest.fixture(autouse=True)
def _empty_caches() -> None:
    for cache in (_fprop_cache, _bprop_cache):
        cache.clear()


def assert_solved(
    problem: Varying, actual: list[torch.Tensor], tensors: list[torch.Tensor], **tolerance: float
) -> None:
    expected = with_gradients(problem.solve, [x.double() for x in tensors])
    for name, one, other in zip(("O", "dQ", "dK", "dV"), actual, expected, strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    problem = CASES[name]
    tensors = problem.tensors(F64)
    function = functools.partial(scaled_dot_product_attention, **problem.keywords())
    actual = with_gradients(function, tensors)
    assert_solved(problem, actual, tensors, atol=1e-10, rtol=1e-10)
    packed = problem.starts_q is not None
    assert (actual[0].transpose(1, 2) if packed else actual[0]).is_contiguous()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", SOME)
def test_types(name: str, dtype: torch.dtype, tolerance: float) -> None:
    tensors = CASES[name].tensors(dtype)
    actual = with_gradients(functools.partial(scaled_dot_product_attention, **CASES[name].keywords()), tensors)
    assert {x.dtype for x in actual} == {dtype}
    assert_solved(CASES[name], actual, tensors, atol=tolerance, rtol=tolerance)


def test_the_gradient_passes_the_numerical_test() -> None:
    problem = CASES["lengths, bottom right"]
    small = dataclasses.replace(problem, s_q=4, s_kv=5, d=8, d_v=8, h_q=2, h_kv=1, lengths_q=[2, 4], lengths_kv=[5, 4])
    function = functools.partial(scaled_dot_product_attention, **small.keywords())
    leaves = [x.requires_grad_() for x in small.tensors(F64)[:3]]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in other strides."""
    if how == "sequence before heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "part of a larger tensor":  # as of a projection to query, key and value together
        whole = torch.zeros(x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3], dtype=x.dtype)
        whole[:, :, 1] = x.transpose(1, 2)
        return whole[:, :, 1].transpose(1, 2)
    if how == "transposed":
        return x.mT.contiguous().mT
    memory = torch.zeros(x.numel() + 1, dtype=x.dtype)  # "misaligned"
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


@pytest.mark.parametrize("how", ["sequence before heads", "part of a larger tensor", "transposed", "misaligned"])
@pytest.mark.parametrize("name", ["causal", "packed, causal, grouped heads"])
def test_any_strides(name: str, how: str) -> None:
    problem = CASES[name]
    tensors = problem.tensors(F64)
    function = functools.partial(scaled_dot_product_attention, **problem.keywords())
    actual = with_gradients(function, [laid_out(x, how) for x in tensors])
    assert_solved(problem, actual, tensors, atol=1e-10, rtol=1e-10)


def test_lengths_that_are_parts_of_other_tensors() -> None:
    """At addresses that graphs do not take."""
    problem = CASES["packed with gaps"]
    keywords = problem.keywords()
    parts = {name: x for name, x in keywords.items() if isinstance(x, torch.Tensor)}
    assert len(parts) == 4
    parts = {name: torch.cat([x.flatten()[:1], x.flatten()])[1:] for name, x in parts.items()}
    assert all(x.data_ptr() % 16 for x in parts.values())
    q, k, v, _ = problem.tensors(F64)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **{**keywords, **parts}), problem.solve(q, k, v))


def test_one_key_for_the_whole_batch() -> None:
    q, k, v, _ = CASES["causal"].tensors(F64)
    k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    actual = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(actual, CASES["causal"].solve(q, k, v))


def test_what_lies_beyond_the_lengths_does_not_matter() -> None:
    problem = CASES["lengths"]
    tensors = problem.tensors(F64)
    dirty = [x.clone() for x in tensors]
    for entry in range(problem.b):
        dirty[0][entry, :, problem.lengths_q[entry] :] = torch.nan
        dirty[3][entry, :, problem.lengths_q[entry] :] = torch.nan
        dirty[1][entry, :, problem.lengths_kv[entry] :] = torch.nan
        dirty[2][entry, :, problem.lengths_kv[entry] :] = torch.nan
    function = functools.partial(scaled_dot_product_attention, **problem.keywords())
    assert_solved(problem, with_gradients(function, dirty), tensors, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["lengths", "lengths of keys", "packed", "packed with gaps", "packed, empty entries"])
def test_zeros_where_there_is_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the graph leaves there."""

    def fill(cache: Any, describe: Any, inputs: Any, outputs: dict[str, torch.Tensor], options: Any) -> None:
        for x in outputs.values():
            x.fill_(torch.nan)

    monkeypatch.setattr(module, "run", fill)
    problem = CASES[name]
    function = functools.partial(scaled_dot_product_attention, **problem.keywords())
    o, dq, dk, dv = with_gradients(function, problem.tensors(torch.float16))
    sides = (
        ((o, dq), problem.s_q, problem.lengths_q, problem.starts_q),
        ((dk, dv), problem.s_kv, problem.lengths_kv, problem.starts_kv),
    )
    for tensors, longest, lengths, starts in sides:
        used = [token for index in range(problem.b) for token in problem.entry(index, longest, lengths, starts)]
        for x in tensors:
            tokens = x.transpose(1, 2).flatten(0, 1).isnan()
            assert tokens[used].all()
            assert tokens.sum() == tokens[used].numel()


@pytest.mark.parametrize(("b", "s_q", "s_kv"), [(0, 24, 24), (2, 0, 24), (2, 24, 0)])
def test_no_tokens(b: int, s_q: int, s_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_new", lambda x, shape, packed: x.new_full(shape, torch.nan))
    problem = dataclasses.replace(CASES["plain"], b=b, s_q=s_q, s_kv=s_kv)
    *leaves, d_o = problem.tensors(F64)
    actual = with_gradients(scaled_dot_product_attention, [*leaves, d_o])
    assert [x.shape for x in actual] == [x.shape for x in (d_o, *leaves)]
    assert not any(x.any() for x in actual)


def test_one_graph_for_each_configuration() -> None:
    problem = CASES["causal"]
    calls: list[tuple[Varying, dict[str, Any], int]] = [
        (problem, {"is_causal": True}, 1),
        (problem, {"is_causal": True}, 1),
        (problem, {"right_bound": 0}, 1),  # the same mask
        (problem, {}, 2),
        (problem, {"scale": 0.5}, 3),
        (problem, {"left_bound": 4}, 4),
        (dataclasses.replace(problem, s_q=16), {}, 5),
        (problem, {"seq_len_q": torch.tensor([3, 4])}, 6),
        (problem, {"seq_len_q": torch.tensor([5, 6])}, 6),
    ]
    for case, options, count in calls:
        with_gradients(functools.partial(scaled_dot_product_attention, **options), case.tensors(F64))
        assert (len(_fprop_cache), len(_bprop_cache)) == (count, count)


def test_threads_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    build, built = operator_graphs.build, []

    def slow(*arguments: Any) -> Any:
        built.append(arguments)
        time.sleep(0.05)
        return build(*arguments)

    monkeypatch.setattr(operator_graphs, "build", slow)
    problem = CASES["causal"]
    tensors = [problem.tensors(F64) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        actual = [*pool.map(lambda x: scaled_dot_product_attention(*x[:3], is_causal=True), tensors)]
    assert len(built) == 1
    for x, result in zip(tensors, actual, strict=True):
        torch.testing.assert_close(result, problem.solve(*x[:3]))


def test_gradients_of_any_strides_share_a_graph() -> None:
    leaf = CASES["plain"].tensors(F64)[0].requires_grad_()
    for weight in (
        torch.ones(()).expand(leaf.shape),
        torch.ones(leaf.shape),
        torch.ones(leaf.shape).mT.contiguous().mT,
    ):
        scaled_dot_product_attention(leaf, leaf, leaf).backward(weight.double())
    assert len(_bprop_cache) == 1


def test_the_oldest_graph_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_graphs, "MOST", 2)
    q, k, v, _ = CASES["plain"].tensors(F64)
    scaled_dot_product_attention(q, k, v, scale=0.1)
    (first,) = _fprop_cache
    for scale in (0.2, 0.3):
        scaled_dot_product_attention(q, k, v, scale=scale)
    assert len(_fprop_cache) == 2
    assert first not in _fprop_cache


@pytest.mark.parametrize("name", SOME)
def test_operators_are_registered_right(name: str) -> None:
    problem = CASES[name]
    q, k, v, d_o = problem.tensors(F64)
    options = problem.keywords()
    masks = (0.25, True, options.get("diagonal_alignment", 0), -1, -1)
    names = ("seq_len_q", "seq_len_kv", "cumulative_seq_len_q", "cumulative_seq_len_kv")
    arguments = [*masks, *(options.get(name) for name in names)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.cudnn.sdpa, (*leaves, *arguments))
    o, stats = torch.ops.cudnn.sdpa(*leaves, *arguments)
    assert not stats.requires_grad
    backward = (d_o, *(x.detach() for x in (q, k, v, o)), stats, *arguments)
    for more in ((), (True,)):
        torch.library.opcheck(torch.ops.cudnn.sdpa_bwd, (*backward, *more))


def test_deterministic_where_pytorch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def run(cache: Any, describe: Any, inputs: Any, outputs: Any, options: dict[str, Any]) -> None:
        asked.append(options.get("use_deterministic_algorithm", False))
        operator_graphs.run(cache, describe, inputs, outputs, options)

    monkeypatch.setattr(module, "run", run)
    for wanted in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda wanted=wanted: wanted)
        with_gradients(scaled_dot_product_attention, CASES["plain"].tensors(F64))
    assert asked == [False, False, False, True]


def _refused(error: type[Exception], words: str, problem: Varying = CASES["plain"], **options: Any) -> None:
    with pytest.raises(error, match=words):
        scaled_dot_product_attention(*problem.tensors(torch.float16)[:3], **options)


def test_refusals() -> None:
    _refused(NotImplementedError, "attn_mask: got a tensor", attn_mask=torch.ones(1))
    _refused(NotImplementedError, "dropout_p: got 0.1", dropout_p=0.1)
    grouped = CASES["grouped heads"]
    _refused(ValueError, "heads: got 8, 2, 2 of query, key and value.*pass enable_gqa=True", grouped)
    uneven = dataclasses.replace(grouped, h_q=9)
    _refused(ValueError, "heads of query: got 9; allowed: multiples of the 2 heads", uneven, enable_gqa=True)
    with pytest.raises(TypeError, match=r"type of query: got torch\.int32; allowed: torch\.float16 or"):
        scaled_dot_product_attention(*[torch.zeros(1, 1, 8, 8).int()] * 3)
    _refused(ValueError, "diagonal_alignment: got 2", diagonal_alignment=2)
    _refused(ValueError, "left_bound: got -2", left_bound=-2)
    _refused(ValueError, "right_bound: got -3", right_bound=-3)
    three = torch.zeros(3, dtype=torch.int32)
    _refused(ValueError, r"seq_len_q: got torch.int32 of shape \(3,\); allowed: 2 integers", seq_len_q=three)
    _refused(ValueError, "seq_len_kv: got torch.float32", seq_len_kv=torch.zeros(2))
    longest = CASES["plain"].s_kv
    for lengths in ([longest + 1, 1], [-1, 1], [1 << 32, 1]):
        _refused(ValueError, "seq_len_kv: got .* from 0 to", seq_len_kv=torch.tensor(lengths))
    for ends in ([0, 1, 2 * longest + 1], [-1, 1, 2], [0, 2, 1], [1 << 32, 2, 2]):
        starts = {f"cumulative_seq_len_{side}": torch.tensor(ends) for side in ("q", "kv")}
        _refused(ValueError, "cumulative_seq_len_q: got .* do not decrease", **starts)
    _refused(ValueError, "cumulative_seq_len_kv: got None with the other one set", cumulative_seq_len_q=three)
    _refused(ValueError, "cumulative_seq_len_q: got None with the other one set", cumulative_seq_len_kv=three)
    wide = dataclasses.replace(CASES["plain"], d=12)
    _refused(cudnn.cudnnGraphNotSupportedError, "head size: got d_qk=12", wide)
    tall = dataclasses.replace(CASES["plain"], s_q=32)
    _refused(cudnn.cudnnGraphNotSupportedError, "bottom-right", tall, is_causal=True, diagonal_alignment=1)


@pytest.mark.parametrize("function", [scaled_dot_product_attention, cudnn.ops.scaled_dot_product_attention])
def test_a_bound_of_an_exported_program_may_depend_on_a_size(function: Any) -> None:
    class Windowed(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return function(q, q, q, is_causal=True, left_bound=q.shape[2] // 2)

    q, longer, rows = torch.randn(1, 2, 16, 64), torch.randn(1, 2, 24, 64), torch.export.Dim("rows", min=8, max=64)
    program = torch.export.export(Windowed(), (q,), dynamic_shapes={"q": {2: rows}}, strict=False)
    torch.testing.assert_close(program.module()(longer), Windowed()(longer))


def test_refused_tensors() -> None:
    q, k, v, _ = CASES["plain"].tensors(F64)
    for tensors in ((q[0], k[0], v[0]), (q, k[:1], v), (q, k, v[:, :, 1:]), (q[..., 8:], k, v)):
        with pytest.raises(ValueError, match=r"shapes: got .* allowed: \[B, H_q, S_q, D\]"):
            scaled_dot_product_attention(*tensors)
    for function in (scaled_dot_product_attention, cudnn.ops.scaled_dot_product_attention):
        with pytest.raises(TypeError, match=r"key tensor: got numpy\.ndarray.*pass torch\.from_numpy\(key\)"):
            function(q, k.numpy(), v)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"seq_len_kv tensor: got list; allowed: a torch\.Tensor"):
            function(q, k, v, seq_len_kv=[1, 2])  # type: ignore[arg-type]
        for bound in ("diagonal_alignment", "left_bound", "right_bound"):
            with pytest.raises(TypeError, match=f"{bound}: got float; allowed: an int"):
                function(q, k, v, **{bound: 0.5})
    with pytest.raises(ValueError, match=r"types and devices: got .*float32 on cpu"):
        scaled_dot_product_attention(q, k.float(), v)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", [*SOME, "window, bottom right", "lengths of keys"])
def test_cudnn_has_engines(name: str, device_properties: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs as on a GPU, up to the plans."""
    built = planned_by(module, device_properties, monkeypatch)
    problem = CASES[name]
    with_gradients(
        functools.partial(scaled_dot_product_attention, **problem.keywords()), problem.tensors(torch.float16)
    )
    assert [graph.get_execution_plan_count() > 0 for graph in built] == [True, True]
