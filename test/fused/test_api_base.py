"""What the fused APIs share: descriptions of tensors against PyTorch itself, results by name, the warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cudnn
from cudnn.api_base import (
    TensorDesc,
    TupleDict,
    _reset_experimental_api_warning_registry,
    ceil_div,
    is_power_of_2,
    pad,
    stride_order,
    unpad,
    warn_experimental_api_once,
)
from support.threads import together


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any permutation of a contiguous tensor, with dimensions of size 1 among them."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return torch.empty(shape).permute(draw(st.permutations(range(len(shape)))))


METHODS: list[Callable[[Any], Any]] = [
    lambda t: t.transpose(0, -1),
    lambda t: t.permute(tuple(reversed(range(t.ndim)))),
    lambda t: t.permute(*reversed(range(t.ndim))),
    lambda t: t.squeeze(),
    lambda t: t.squeeze(-1),
    lambda t: t.squeeze((0,)),
    lambda t: t.unsqueeze(0),
    lambda t: t.unsqueeze(-1),
    lambda t: t.unsqueeze(t.ndim + 1),
    lambda t: t.transpose(0, 7),
    lambda t: t.permute(0),
    lambda t: t.contiguous(),
    lambda t: t.view(-1),
    lambda t: t.view(1, *t.shape),
    lambda t: t.view(7, -1),
    lambda t: t.as_strided((2, 1), (1, 3)),
    lambda t: pad(t, 5),
    lambda t: unpad(t, 1),
]


def outcome(method: Callable[[Any], Any], tensor: Any) -> object:
    try:
        result = method(tensor)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return type(error)
    stride = result.stride if isinstance(result, TensorDesc) else tuple(result.stride())
    return tuple(result.shape), stride


@given(tensors(), st.sampled_from(METHODS))
def test_methods_do_what_those_of_a_tensor_do(tensor: torch.Tensor, method: Callable[[Any], Any]) -> None:
    assert outcome(method, TensorDesc.of(tensor, "t")) == outcome(method, tensor)


@given(tensors())
def test_a_description_is_that_of_the_tensor(tensor: torch.Tensor) -> None:
    desc = TensorDesc.of(tensor, "t")
    assert (desc.shape, desc.stride, desc.ndim) == (tuple(tensor.shape), tensor.stride(), tensor.ndim)
    assert (len(desc), desc.size(), desc.size(-1)) == (len(tensor), tensor.shape, tensor.shape[-1])
    assert desc.is_contiguous() == tensor.is_contiguous()
    assert sorted(desc.stride_order) == list(range(tensor.ndim))
    assert [desc.stride[dim] for dim in desc.stride_order] == sorted(desc.stride)


def test_channels_last_is_told_apart() -> None:
    image = torch.empty(2, 3, 4, 5)
    desc = TensorDesc.of(image.to(memory_format=torch.channels_last), "t")
    assert desc.is_contiguous(torch.channels_last)
    assert not desc.is_contiguous()


@pytest.mark.parametrize(
    ("shape", "stride", "order"),
    [
        ((8, 16, 2), (16, 1, 128), (1, 0, 2)),  # K-major operand
        ((8, 16, 2), (1, 8, 128), (0, 1, 2)),  # M-major
        ((2, 4, 8, 16), (512, 16, 64, 1), (3, 1, 2, 0)),  # heads before tokens, tokens before heads in memory
        ((4, 1, 3), (1, 1, 4), (1, 0, 2)),  # equal strides: the smaller dimension first
    ],
)
def test_stride_order_is_innermost_first(shape: Any, stride: Any, order: Any) -> None:
    assert stride_order(shape, stride) == order


def test_packed_four_bit_elements_are_counted_singly() -> None:
    packed = torch.empty(4, 6, 8, dtype=torch.uint8).transpose(1, 2)  # stride 1 in the middle
    assert TensorDesc.of(packed, "a").shape == (4, 8, 6)
    desc = TensorDesc.of(packed, "a", interpret_uint8_as_fp4x2=True)
    assert (desc.shape, desc.stride) == ((4, 16, 6), (96, 1, 16))
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert TensorDesc.of(packed.view(torch.float4_e2m1fn_x2), "a").shape == (4, 16, 6)
    with pytest.raises(RuntimeError, match="a: packed four-bit elements need a dimension of stride 1"):
        TensorDesc.of(torch.empty(4, 6, dtype=torch.uint8)[:, ::2], "a", interpret_uint8_as_fp4x2=True)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"stride": (1,)}, ValueError, r"stride: got \(1,\); allowed: 2 entries"),
        ({"stride_order": (0, 0)}, ValueError, r"stride_order: got \(0, 0\); allowed: a permutation of \(0, 1\)"),
        ({"stride_order": (0,)}, ValueError, r"stride_order: got \(0,\)"),
        ({"device": "nowhere"}, TypeError, "device: got 'nowhere'"),
    ],
)
def test_a_wrong_description_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good: dict[str, Any] = {"shape": (2, 3), "stride": (3, 1), "stride_order": (1, 0), "device": "cpu"}
    TensorDesc(torch.float32, **good)
    with pytest.raises(error, match=words):
        TensorDesc(torch.float32, **{**good, **change})


def test_a_view_that_begins_elsewhere_is_refused() -> None:
    with pytest.raises(RuntimeError, match="storage offset: got 2; allowed: 0"):
        TensorDesc.of(torch.empty(8), "t").as_strided((2,), (1,), 2)


def test_results_by_name_position_and_unpacking() -> None:
    result = TupleDict(o_tensor=1, amax_tensor=None, c_tensor=3)
    first, second, third = result
    assert (first, second, third) == (result["o_tensor"], result[1], result["c_tensor"]) == (1, None, 3)
    assert list(result) == [1, None, 3]
    assert list(result.keys()) == ["o_tensor", "amax_tensor", "c_tensor"]
    for index in (3, -1):
        with pytest.raises(IndexError):
            result[index]
    with pytest.raises(KeyError):
        result["d_tensor"]


def test_integers() -> None:
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [n for n in range(-2, 9) if is_power_of_2(n)] == [1, 2, 4, 8]


def test_our_own_apis_are_silent(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    _reset_experimental_api_warning_registry()
    x = torch.empty(2, 512, dtype=torch.bfloat16, device="meta")
    cudnn.RmsNormRhtAmax(x, x[0], x, torch.empty(1, device="meta"), arch="sm_90a")
    assert caplog.messages == []
    assert capsys.readouterr() == ("", "")


def test_the_warning_comes_once_per_name(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("SomeApi")
    _reset_experimental_api_warning_registry()
    together(lambda _: warn_experimental_api_once(logger, "SomeApi"), 8)
    warn_experimental_api_once(logger, "Other")
    assert caplog.messages == ["SomeApi is an experimental API", "Other is an experimental API"]
    _reset_experimental_api_warning_registry()
    warn_experimental_api_once(logger, "Other")
    assert caplog.messages[2:] == ["Other is an experimental API"]
