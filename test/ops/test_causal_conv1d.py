"""``cudnn.ops.causal_conv1d`` and the functions of libcudnn beneath it."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cudnn
from cudnn.backend import causal_conv1d as backend
from cudnn.backend import library
from cudnn.causal_conv1d import operator as module
from cudnn.ops import causal_conv1d
from support.dense_attention import with_gradients

pytestmark = pytest.mark.filterwarnings("error")
TYPES = [torch.float32, torch.float16, torch.bfloat16]


def operands(kind: torch.dtype = torch.float32, b: int = 2, c: int = 5, t: int = 17, w: int = 4) -> list[torch.Tensor]:
    """x, weight, bias and the gradient of the result."""
    torch.manual_seed(0)
    return [torch.randn(*shape).to(kind) for shape in ((b, c, t), (c, w), (c,), (b, c, t))]


def formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """In float64."""
    x, weight = x.double(), weight.double()
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    y = F.conv1d(padded, weight.unsqueeze(1), None if bias is None else bias.double(), groups=x.shape[1])
    return F.silu(y) if activation == "silu" else y


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize(("t", "w"), [(17, 4), (3, 8), (1, 2), (20, 1)])
def test_results_and_gradients(t: int, w: int, kind: torch.dtype, activation: str) -> None:
    tensors = operands(kind, t=t, w=w)
    actual = with_gradients(lambda *x: causal_conv1d(*x, activation=activation), tensors)
    expected = with_gradients(lambda *x: formula(*x, activation), tensors)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is kind
        # One rounding to the type, after sums in float32.
        eps = torch.finfo(kind).eps
        torch.testing.assert_close(
            one.double(), other.double(), rtol=eps, atol=1e-5 * max(1.0, float(other.abs().max()))
        )


def test_no_bias_and_any_strides() -> None:
    x, weight, _, d_y = operands()
    strided = [x.mT.contiguous().mT, weight.mT.contiguous().mT, d_y.mT.contiguous().mT]
    actual = with_gradients(lambda x, w: causal_conv1d(x, w, activation="silu"), strided)
    expected = with_gradients(lambda x, w: formula(x, w, None, "silu"), [x, weight, d_y])
    assert actual[0].is_contiguous()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.float())


@pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 9)])
def test_of_nothing(shape: tuple[int, ...]) -> None:
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in (shape, (4, 3), (4,)))
    y = causal_conv1d(x, weight, bias, activation="silu")
    assert y.shape == shape
    for gradient in torch.autograd.grad(y.sum(), (x, weight, bias)):
        assert not gradient.any()


def test_the_past_alone_counts() -> None:
    x, weight, bias, _ = operands()
    later = x.clone()
    later[:, :, 9:] = torch.nan
    assert torch.equal(causal_conv1d(later, weight, bias)[:, :, :9], causal_conv1d(x, weight, bias)[:, :, :9])


@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_operators_are_registered_right(activation: str) -> None:
    x, weight, bias, d_y = operands(torch.bfloat16)
    forward, backward = torch.ops.cudnn.causal_conv1d_fwd_primitive, torch.ops.cudnn.causal_conv1d_bwd_primitive
    assert isinstance(backward(d_y, x, weight, bias, activation), list)
    torch.library.opcheck(backward, (d_y, x, weight, bias, activation))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    torch.library.opcheck(forward, (*leaves, activation))


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (TypeError, "x tensor: got list; allowed: a torch.Tensor", {"x": [1.0]}),
    "rank": (ValueError, r"shape of x: got \(2, 5\); allowed: \[B, C, T\]", {"x": torch.zeros(2, 5)}),
    "rank of bias": (ValueError, r"shape of bias: got \(5, 1\); allowed: \[C\]", {"bias": torch.zeros(5, 1)}),
    "channels": (ValueError, "channels: got .*'weight': 6", {"weight": torch.zeros(6, 4)}),
    "no taps": (ValueError, "W of 1 or more", {"weight": torch.zeros(5, 0)}),
    "types": (TypeError, "types: got .*float16.*allowed: one type", {"weight": torch.zeros(5, 4).half()}),
    "type": (
        ValueError,
        "type of x: got torch.float64",
        {"x": torch.zeros(2, 5, 17).double(), "weight": torch.zeros(5, 4).double(), "bias": None},
    ),
    "devices": (ValueError, "devices: got .*meta", {"weight": torch.zeros(5, 4, device="meta")}),
    "activation": (ValueError, "activation: got 'relu'; allowed: 'identity' or 'silu'", {"activation": "relu"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    error, words, inputs = REFUSED[name]
    x, weight, bias, _ = operands()
    with pytest.raises(error, match=f"^causal_conv1d: .*{words}"):
        causal_conv1d(**({"x": x, "weight": weight, "bias": bias} | inputs))


# What runs on a GPU.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """A cuDNN 9.22 that notes what reaches its functions through ctypes."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def function(name: str, pointers: int, numbers: int) -> Any:
        def note(*arguments: int | None) -> int:
            seen.append((name, tuple(argument or 0 for argument in arguments)))
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * pointers, *[ctypes.c_int] * numbers)(note)

    loaded = SimpleNamespace(require=lambda since, what: None, check=lambda status, what: None)
    monkeypatch.setattr(library, "load", lambda: loaded)
    monkeypatch.setattr(backend, "_function", function)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=2**40 + 1))
    return seen


def test_addresses_and_sizes_reach_cudnn(calls: list[tuple[str, tuple[int, ...]]]) -> None:
    x, weight, bias, y = operands(torch.bfloat16)
    module._launch(backend.forward, (x, weight, bias, y), (9, 1))
    d_weight, d_bias = torch.zeros(5, 4), torch.zeros(5)
    module._launch(backend.backward, (x, weight, bias, y, x, d_weight, d_bias), (9, 0, 1))
    at = [tensor.data_ptr() for tensor in (x, weight, bias, y)]
    assert calls == [
        ("cudnnCausalConv1dForward", (2**40 + 1, *at, 2, 5, 17, 4, 9, 1)),
        (
            "cudnnCausalConv1dBackward",
            (2**40 + 1, *at, at[0], d_weight.data_ptr(), d_bias.data_ptr(), 2, 5, 17, 4, 9, 0, 1),
        ),
    ]


def test_a_width_that_cudnn_does_not_have(calls: list[tuple[str, tuple[int, ...]]]) -> None:
    x, weight, bias, y = operands(w=9)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"W of weight: got 9; allowed: 2, 3, .*, 256 on CUDA"):
        module._launch(backend.forward, (x, weight, bias, y), (0, 0))
    assert calls == []


def _needs(libcudnn: library.Library, newer: bool) -> None:
    if (libcudnn.version >= backend.SINCE) != newer:
        pytest.skip(f"for cuDNN {'9.22 or newer' if newer else 'before 9.22'}; here is {library.version_string()}")


@pytest.mark.parametrize("name", ["causal_conv1d_forward", "causal_conv1d_backward"])
def test_arguments_are_those_of_the_header(name: str, libcudnn: library.Library) -> None:
    _needs(libcudnn, True)
    header = Path(libcudnn.path).parents[1] / "include" / "cudnn_subquadratic_ops.h"
    if not header.exists():
        pytest.skip("libcudnn stands without its headers")
    entry = "cudnnCausalConv1d" + name.rpartition("_")[2].capitalize()
    (declared,) = re.findall(rf"\b{entry}\(([^)]*)\)", header.read_text())
    kinds = [ctypes.c_void_p if "*" in one or "cudaStream_t" in one else ctypes.c_int for one in declared.split(",")]
    pointers = kinds.count(ctypes.c_void_p)
    assert backend._function(entry, pointers, len(kinds) - pointers).argtypes == kinds
    names = [re.findall(r"\w+", one)[-1] for one in declared.split(",")]
    wanted = list(cudnn.__getattr__(name).__annotations__)[:-1]
    assert len(names) == len(wanted)
    known = {"weight": "w", "dweight": "dw", "dbias": "db", "seqLen": "seq_len", "kernelSize": "ksize"}
    known |= {"dataType": "dtype", "dwDataType": "dw_dtype", "activation": "act"}
    assert [known.get(name, name) for name in names] == wanted


def test_cudnn_names_its_status(libcudnn: library.Library) -> None:
    _needs(libcudnn, True)
    with pytest.raises(RuntimeError, match="cudnnCausalConv1dForward failed: CUDNN_STATUS_BAD_PARAM"):
        cudnn.causal_conv1d_forward(0, 0, 0, 0, 0, 1, 1, 1, 4, 0, 0)
    with pytest.raises(RuntimeError, match="cudnnCausalConv1dBackward failed: CUDNN_STATUS_BAD_PARAM"):
        cudnn.causal_conv1d_backward(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 4, 0, 0, 0)


@pytest.mark.deviceless_919
def test_an_older_cudnn_does_not_have_them(libcudnn: library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcudnn, "version", min(libcudnn.version, 91900))
    for name in ("causal_conv1d_forward", "causal_conv1d_backward"):
        monkeypatch.delitem(vars(cudnn), name, raising=False)
        with pytest.raises(AttributeError, match=rf"cudnn.{name} needs cuDNN 9.22.0 or newer; loaded: 9.19.0"):
            getattr(cudnn, name)
    x, weight, bias, y = operands()
    needs = "needs cuDNN 9.22.0 or newer; loaded: 9.19.0"
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=f"causal_conv1d {needs}"):
        module._launch(backend.forward, (x, weight, bias, y), (0, 0))
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=f"cudnnCausalConv1dForward {needs}"):
        backend.forward(0, 0, 0, 0, 0, 1, 1, 1, 4, 0, 0)


def test_names_without_a_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_available", lambda: False)
    monkeypatch.delitem(vars(cudnn), "causal_conv1d_forward", raising=False)
    assert not hasattr(cudnn, "causal_conv1d_forward")
    with pytest.raises(AttributeError, match="no attribute 'sideways'"):
        _ = backend.sideways  # pyright: ignore[reportAttributeAccessIssue]
