"""Tensors whose memory is not what they show, or that have none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def negative(x: torch.Tensor) -> torch.Tensor:
    """A negative view that shows the values of ``x``, in its strides."""
    found = torch._neg_view(x.neg())
    assert found.is_neg()
    return found


def imaginary(x: torch.Tensor) -> torch.Tensor:
    """The imaginary part of a conjugate, which has the values of ``x`` in strides of 2."""
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    return found


def _nested(x: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([*x, x[0, :1]], layout=layout)


UNSTRIDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": lambda x: x.flatten(0, -2).to_sparse_csr(),
    "_mkldnn": lambda x: x.float().to_mkldnn(),
    "nested tensor": lambda x: _nested(x, torch.strided),
    "a nested": lambda x: _nested(x, torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
}
"""Tensors without strides, by what messages say of them."""
