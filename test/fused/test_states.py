"""Tensors of the fused APIs and operators whose memory has other values than they show, or is not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnn
import cudnn.ops
from cudnn import demo_cases
from cudnn.fused import registry
from cudnn.nn import MoE
from support.api_cases import case, execute
from support.selection import WHERE, brief
from support.states import UNSTRIDED, negative

pytest.importorskip("ptx_emulator")


def shown(x: Any) -> Any:
    """A negative view of the same values, where PyTorch negates the type."""
    return negative(x) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype.itemsize > 1 else x


def called(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    program = demo_cases.find(name)
    problem = program.make(program.shape, "cpu")  # which keeps the memory of addresses
    return [x for x in problem.call() if x is not None]


@pytest.mark.parametrize("name", registry.packages())
def test_wrappers_read_inputs_as_they_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, wrapper, seen = called(name), registry.wrapper(name), []

    @functools.wraps(wrapper)
    def call(**arguments: Any) -> Any:
        views = {key: shown(x) for key, x in arguments.items()}
        seen.extend(x for x in views.values() if isinstance(x, torch.Tensor) and x.is_neg())
        return wrapper(**views)

    monkeypatch.setattr(registry, "wrapper", lambda _: call)
    actual = called(name)
    assert seen
    assert all(x.is_neg() for x in seen)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8))


@pytest.mark.parametrize("where", brief(WHERE, 0, 2, 3))
@pytest.mark.parametrize("warm", [False, True])
def test_execute_refuses_what_it_would_have_to_copy(where: str, warm: bool) -> None:
    problem = case("gemm_srelu", 128, 128, 64, device="cuda" if where == "gpu" else "cpu")
    if warm:
        execute(problem, where)
    for key, cure in (("a", r"pass tensor.resolve_neg\(\)"), ("prob", "resolve_neg"), ("d", r"torch.empty\(\)")):
        plain = problem.tensors[key]
        problem.tensors[key] = torch._neg_view(plain)
        with pytest.raises(ValueError, match=rf"GemmSrelu: {key} tensor: got a negative view.*{cure}"):
            execute(problem, where)
        problem.tensors[key] = plain
    execute(problem, where)


def test_a_workspace_that_is_a_negative_view_is_refused() -> None:
    x, w = torch.randn(4, 512).bfloat16(), torch.randn(512).bfloat16()
    created = cudnn.RmsNormRhtAmax(x, w, x, torch.empty(2))
    with pytest.raises(ValueError, match="workspace_tensor: got a negative view"):
        created.check_workspace((x,), torch._neg_view(torch.empty(16, dtype=torch.uint8)), None)


def test_buffers_of_wrappers_are_refused() -> None:
    q = torch.randn(1, 64, 2, 64).bfloat16().transpose(1, 2)
    o, lse = torch.empty_like(q), torch.empty(1, 2, 64)
    created = cudnn.SdpaForward(q, q, q, o, lse)
    created.compile()
    with pytest.raises(ValueError, match=r"SdpaForward: o tensor: got a negative view"):
        created.execute(q, q, q, torch._neg_view(o), lse)


@pytest.mark.parametrize("kind", UNSTRIDED)
def test_tensors_without_strides_are_refused_by_name(kind: str) -> None:
    a, b = torch.randn(128, 64, 1).bfloat16(), torch.randn(128, 64, 1).bfloat16()
    bad = UNSTRIDED[kind](a)
    matched = rf": a( tensor)?: .*{kind}.*allowed: dense tensors.*To fix it"
    for call in (cudnn.gemm_swiglu_wrapper, cudnn.ops.gemm_swiglu):
        with pytest.raises(TypeError, match=matched):
            call(bad, b)
    with pytest.raises(TypeError, match=rf"GemmSwiglu: a tensor: .*{kind}"):
        cudnn.GemmSwiglu(bad, b, torch.empty(128, 128, 1).bfloat16(), torch.empty(128, 64, 1).bfloat16())


def test_tensors_without_memory_are_refused_by_name() -> None:
    problem = case("gemm_amax", 128, 128, 64, device="cpu")
    problem.tensors = {key: None if x is None else x.to("meta") for key, x in problem.tensors.items()}
    operation = case("gemm_amax", 128, 128, 64, device="cpu").operation()
    with pytest.raises(ValueError, match=r"GemmAmax: a tensor: .*without data"):
        operation(**problem.arguments())


HEADS = torch.randn(2, 4, 8, 16).half()
OPERATORS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "attention": ("query", lambda x: cudnn.ops.scaled_dot_product_attention(x, HEADS, HEADS)),
    "sinks": ("sinks", lambda x: cudnn.ops.scaled_dot_product_attention(HEADS, HEADS, HEADS, sinks=x)),
    "experimental": ("key", lambda x: cudnn.experimental.ops.scaled_dot_product_attention(HEADS, x, HEADS)),
    "nsa": ("query", lambda x: cudnn.ops.nsa_attention(x, HEADS, HEADS, HEADS, HEADS, HEADS)),
    "convolution": ("x", lambda x: cudnn.ops.causal_conv1d(x, HEADS, HEADS)),
    "layer": ("x", lambda x: MoE(64, 32, 4, 2)(x)),
}


@pytest.mark.parametrize("kind", UNSTRIDED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_refuse_tensors_without_strides_by_name(operator: str, kind: str) -> None:
    argument, call = OPERATORS[operator]
    with pytest.raises(TypeError, match=rf": {argument} tensor: .*{kind}.*allowed: dense tensors.*To fix it"):
        call(UNSTRIDED[kind](HEADS))
