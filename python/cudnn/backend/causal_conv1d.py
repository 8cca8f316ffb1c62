"""Causal depthwise convolution: two functions of libcudnn that take pointers instead of a graph. Since cuDNN 9.22.

``cudnn.causal_conv1d_forward`` and ``cudnn.causal_conv1d_backward`` exist only where the loaded cuDNN has them.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from cudnn.backend import library
from cudnn.backend.library import format_version

SINCE = 92200
WIDTHS = (*range(2, 9), 16, 32, 64, 128, 256)
"""The numbers of taps that cuDNN 9.28's header names."""


@functools.cache
def _function(name: str, pointers: int, numbers: int) -> Any:
    function = ctypes.CDLL(library.load().path)[name]
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int] * numbers
    return function


def _call(name: str, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    loaded = library.load()
    loaded.require(SINCE, name)
    loaded.check(_function(name, len(pointers), len(numbers))(*pointers, *numbers), name)


def forward(
    stream: int,
    x: int,
    w: int,
    bias: int,
    y: int,
    batch: int,
    dim: int,
    seq_len: int,
    ksize: int,
    dtype: int,
    act: int,
) -> None:
    """``y[b, c, t] = act(bias[c] + sum over i of w[c, i] * x[b, c, t - (ksize - 1) + i])``, x zero before t = 0.

    Args:
        stream: A ``cudaStream_t``.
        x, w, bias, y: Device addresses: ``[batch, dim, seq_len]``, ``[dim, ksize]``, ``[dim]``, as x; packed.
        ksize: One of ``WIDTHS``.
        dtype: Of all four, a ``cudnnDataType_t``: 0 float, 1 double, 2 half, 9 bfloat16.
        act: 0 identity, 1 SiLU.

    Raises:
        CudnnError: cuDNN refuses; a RuntimeError with its status.
        cudnnGraphNotSupportedError: cuDNN is older than 9.22.
    """
    _call("cudnnCausalConv1dForward", (stream, x, w, bias, y), (batch, dim, seq_len, ksize, dtype, act))


def backward(
    stream: int,
    x: int,
    w: int,
    bias: int,
    dy: int,
    dx: int,
    dw: int,
    db: int,
    batch: int,
    dim: int,
    seq_len: int,
    ksize: int,
    dtype: int,
    dw_dtype: int,
    act: int,
) -> None:
    """Gradients of ``forward``. Writes dx, and adds to dw and db.

    Args:
        stream ... bias, batch ... dtype, act: As given to ``forward``.
        dy, dx: Device addresses of the gradients of y and x, packed.
        dw, db: Those of the gradients of w and bias, in ``dw_dtype``: 0 float; 1 double where dtype is.

    Raises:
        CudnnError, cudnnGraphNotSupportedError: As ``forward``.
    """
    pointers = (stream, x, w, bias, dy, dx, dw, db)
    _call("cudnnCausalConv1dBackward", pointers, (batch, dim, seq_len, ksize, dtype, dw_dtype, act))


if TYPE_CHECKING:
    causal_conv1d_forward, causal_conv1d_backward = forward, backward

_PUBLIC = {"causal_conv1d_forward": forward, "causal_conv1d_backward": backward}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not library.is_available() or library.version() < SINCE:
        loaded = format_version(library.version()) if library.is_available() else "none"
        raise AttributeError(f"cudnn.{name} needs cuDNN {format_version(SINCE)} or newer; loaded: {loaded}.")
    return _PUBLIC[name]
