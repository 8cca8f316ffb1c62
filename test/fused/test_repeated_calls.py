"""Wrappers' warm path: a call like an earlier one gives what the first call of such arguments gives."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cudnn
from cudnn.fused import registry, repeated, wrapper
from cudnn.gemm_amax.api import GemmAmaxSm100
from cudnn.gemm_swiglu.api import GemmSwigluSm100
from support import oracle

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that went the whole way."""
    calls: list[str] = []
    prepare = wrapper.prepare
    monkeypatch.setattr(wrapper, "prepare", lambda api, given: calls.append(api.__name__) or prepare(api, given))
    repeated.forget()
    yield calls
    repeated.forget()


def warm(call: Callable[[], Any]) -> None:
    """Calls until calls are repeated."""
    for _ in range(3):
        call()


def test_sizes_that_come_once_are_not_remembered(counted: list[str]) -> None:
    for rows in range(16, 16 + 8 * repeated.MAX_CALLS, 8):
        cudnn.gemm_swiglu_wrapper(*operands(rows))
    assert not repeated._calls


def operands(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    return oracle.plain(rows, 64).tensor, oracle.plain(128, 64).tensor


def same(actual: Any, expected: Any) -> None:
    assert list(actual.keys()) == list(expected.keys())
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one, other)
            assert one.data_ptr() != other.data_ptr()


def test_other_values_and_addresses(counted: list[str]) -> None:
    """Only the first two calls derive anything; results are new memory, and follow values and alpha."""
    for _ in range(3):
        a, b = operands()
        for alpha in (1.0, 0.5, 2):
            actual = cudnn.gemm_swiglu_wrapper(a, b, alpha, ab12_dtype=BF16)
            z = alpha * torch.einsum("mkl,nkl->mnl", a.double(), b.double())
            torch.testing.assert_close(actual["ab12_tensor"].double(), z, rtol=0.01, atol=0.05)
            torch.testing.assert_close(actual[1].double(), oracle.swiglu(z), rtol=0.01, atol=0.1)
    assert counted == ["GemmSwigluSm100"] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: cudnn.gemm_swiglu_wrapper(a, b, c_dtype=None),
        lambda a, b: cudnn.gemm_swiglu_wrapper(a, b, c_major="m", ab12_dtype=None),
        lambda a, b: cudnn.gemm_swiglu_wrapper(a, b, glu_layout="concatenated"),
        lambda a, b: cudnn.gemm_amax_wrapper(a, b, None, None, c_dtype=BF16),
        lambda a, b: cudnn.gemm_srelu_wrapper(a, b, None, None, torch.ones(24, 1, 1)),
        lambda a, b: cudnn.grouped_gemm_glu_wrapper(a, None, torch.tensor([10, 24]).int(), torch.ones(2), two(b)),
    ],
)
def test_every_result(call: Callable[..., Any], counted: list[str]) -> None:
    a, b = operands()
    first = call(a, b)
    for _ in range(3):
        same(call(a, b), first)
        assert len(counted) == 2
    repeated.forget()
    same(call(a, b), first)
    assert len(counted) == 3


def two(b: torch.Tensor) -> torch.Tensor:
    return torch.stack([b[..., 0], b[..., 0]]).permute(1, 2, 0)


def test_whatever_differs_goes_the_whole_way(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands()
    warm(lambda: cudnn.gemm_swiglu_wrapper(a, b))
    changed: list[Callable[[], Any]] = [
        lambda: cudnn.gemm_swiglu_wrapper(*operands(40)),
        lambda: cudnn.gemm_swiglu_wrapper(a, oracle.plain(128, 64, major="mn").tensor),
        lambda: cudnn.gemm_swiglu_wrapper(a.half(), b.half()),
        lambda: cudnn.gemm_swiglu_wrapper(a, b, c_dtype=BF16),
        lambda: cudnn.gemm_swiglu_wrapper(a, b, glu_order="gate_up"),
        lambda: cudnn.gemm_swiglu_wrapper(torch.nn.Parameter(a), b),
        lambda: cudnn.gemm_swiglu_wrapper(a.as_subclass(Subclass), b),
        lambda: cudnn.gemm_swiglu_wrapper(torch._neg_view(a), b),  # pyright: ignore[reportPrivateImportUsage]
        lambda: cudnn.gemm_swiglu_wrapper(a, b, mma_tiler_mn=[128, 128]),  # pyright: ignore[reportArgumentType]
    ]
    for number, call in enumerate(changed):
        call()
        assert len(counted) == number + 3
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "1")
    cudnn.gemm_swiglu_wrapper(a, b)
    assert len(counted) == len(changed) + 3
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "many")
    with pytest.raises(ValueError, match="CUDNNFE_CLUSTER_OVERLAP_MARGIN: got 'many'"):
        cudnn.gemm_swiglu_wrapper(a, b)


class Subclass(torch.Tensor):
    """A tensor of another class."""


def test_wrong_arguments_after_right_ones(counted: list[str]) -> None:
    a, b = operands()
    warm(lambda: cudnn.gemm_swiglu_wrapper(a, b))
    for change, words in (
        ({"a_tensor": None}, "a tensor: got NoneType"),
        ({"a_tensor": a.to_sparse()}, "dense tensors"),
        ({"alpha": "1"}, "alpha: got str"),
        ({"alpha": float("nan")}, "alpha: got nan"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            cudnn.gemm_swiglu_wrapper(**{"a_tensor": a, "b_tensor": b, **change})


def test_arguments_by_position_by_name_and_left_out(counted: list[str]) -> None:
    """Calls that pass other arguments are other calls; each is repeated, and gives the same."""
    a, b = operands()
    first = cudnn.gemm_swiglu_wrapper(a, b)
    calls: list[Callable[[], Any]] = [
        lambda: cudnn.gemm_swiglu_wrapper(a, b, 1.0),
        lambda: cudnn.gemm_swiglu_wrapper(b_tensor=b, a_tensor=a),
        lambda: cudnn.gemm_swiglu_wrapper(a, b_tensor=b, alpha=1.0, c_major="n", stream=None),
    ]
    for call in calls:
        warm(call)
        before = len(counted)
        same(call(), first)
        assert len(counted) == before


def test_a_call_that_does_not_fit_the_signature(counted: list[str]) -> None:
    a, b = operands()
    warm(lambda: cudnn.gemm_swiglu_wrapper(a, b))
    wrapper: Any = cudnn.gemm_swiglu_wrapper
    for call, words in (
        (lambda: wrapper(a), "missing 1 required positional argument: 'b_tensor'"),
        (lambda: wrapper(a, b, a_tensor=a), "multiple values for argument 'a_tensor'"),
        (lambda: wrapper(a, b, alhpa=1.0), "unexpected keyword argument 'alhpa'"),
        (lambda: wrapper(a, alhpa=b), "unexpected keyword argument 'alhpa'"),
        (lambda: wrapper(*[a] * 99), "positional arguments but 99 were given"),
    ):
        with pytest.raises(TypeError, match=rf"gemm_swiglu_wrapper\(\) .*{words}"):
            call()
    for name in registry.packages():  # parameters behind a star have no position
        wrapper = registry.wrapper(name)
        positions = [p for p in inspect.signature(wrapper).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        with pytest.raises(TypeError, match=r"positional arguments"):
            wrapper(*[a] * (len(positions) + 1))


def test_a_cleared_cache_is_filled_again(counted: list[str]) -> None:
    a, b = operands()
    warm(lambda: cudnn.gemm_swiglu_wrapper(a, b))
    GemmSwigluSm100.objects.clear()
    cudnn.gemm_swiglu_wrapper(a, b)
    assert len(counted) == 3
    assert len(GemmSwigluSm100.objects) == 1


def test_an_execute_of_a_program_is_called(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands()
    warm(lambda: cudnn.gemm_swiglu_wrapper(a, b))
    seen: list[Any] = []
    monkeypatch.setattr(GemmSwigluSm100, "execute", lambda self, **named: seen.append(named), raising=False)
    cudnn.gemm_swiglu_wrapper(a, b)
    assert [sorted(each)[:3] for each in seen] == [["a_tensor", "ab12_tensor", "alpha"]]


@pytest.mark.parametrize("repeats", [False, True])
def test_fills_are_on_the_stream_of_the_call(
    repeats: bool, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An amax is filled with -inf, and gradients with zeros, in the order of the stream that the kernel runs on."""
    a, b = operands()
    call = lambda **stream: cudnn.gemm_amax_wrapper(a, b, None, None, c_dtype=BF16, **stream)  # noqa: E731
    if repeats:
        warm(lambda: call(stream=None))
    current: list[Any] = [None]
    seen: list[Any] = []

    @contextlib.contextmanager
    def on_stream(stream: Any, tensor: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    fill = torch.Tensor.fill_
    monkeypatch.setattr(torch.Tensor, "fill_", lambda self, value: seen.append(current[-1]) or fill(self, value))
    monkeypatch.setattr(wrapper, "on_stream", on_stream)
    for remembered in repeated._calls.get(GemmAmaxSm100, ()):
        monkeypatch.setitem(remembered.__globals__, "on_stream", on_stream)  # pyright: ignore[reportAttributeAccessIssue]
    call(stream=1234)
    assert seen == [1234]
    assert len(counted) == (2 if repeats else 1)


@pytest.mark.gpu
def test_a_stream_beside_a_busy_one() -> None:
    """The current stream is busy for long: results of calls on another stream do not wait for it, nor are they filled
    by it after the kernel.
    """
    a, b = (x.cuda() for x in operands(256))
    expected = cudnn.gemm_amax_wrapper(a, b, None, None, c_dtype=BF16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        results = cudnn.gemm_amax_wrapper(a, b, None, None, c_dtype=BF16, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(results["amax_tensor"], expected["amax_tensor"])
        assert torch.equal(results["c_tensor"], expected["c_tensor"])
