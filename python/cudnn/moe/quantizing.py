"""e4m3 operands of the layer's forward products, with float32 factors for 128 elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cudnn.gemm.formats import name_of
from cudnn.moe import reference
from cudnn.moe._run import has_kernel, run
from cudnn_kernels.moe.configuration import BLOCK, QuantizeConfiguration

_QUANTIZE = "cudnn_kernels.moe.quantize:Quantize"
_kept: Any = WeakTensorKeyDictionary()
Pair = tuple[torch.Tensor, torch.Tensor]


def quantized(x: torch.Tensor, row_of_choice: torch.Tensor | None = None, rows: int = 0) -> Pair:
    """Rows (R, n) in e4m3 and their factors (R, n / 128). With the row of each choice, (T, K), x has tokens, and they
    are ``rows`` rows, of which those of no choice are not written.
    """
    rows = rows or len(x)
    found = x.new_empty(rows, x.shape[1], dtype=torch.float8_e4m3fn)
    factors = x.new_empty(rows, x.shape[1] // BLOCK, dtype=torch.float32)
    if has_kernel(x, "quantize"):
        top_k = 0 if row_of_choice is None else row_of_choice.shape[1]
        configuration = QuantizeConfiguration(name_of(x.dtype), x.shape[1], top_k=top_k)
        run(_QUANTIZE, configuration, x, *(() if row_of_choice is None else (row_of_choice,)), found, factors)
        return found, factors
    narrow, of_rows = reference.quantize(x, 1)
    if row_of_choice is None:
        return narrow, of_rows
    token, choice = (row_of_choice >= 0).nonzero(as_tuple=True)
    row = row_of_choice[token, choice].long()
    found.view(torch.uint8)[row] = narrow.view(torch.uint8)[token]
    factors[row] = of_rows[token]
    return found, factors


def quantized_weights(weights: Sequence[torch.Tensor], keep: bool) -> Pair:
    """The experts' weights, one tensor or a list, in e4m3, (E, n, k), and their factors (E, n / 128, k / 128).

    They are kept, as long as the first tensor lives, and made anew when a tensor has changed since. Not where ``keep``
    is false, nor of tensors of ``torch.inference_mode``, whose changes PyTorch does not count.
    """
    first = weights[0]
    keep = keep and not any(w.is_inference() for w in weights)
    state = tuple((w.data_ptr(), w._version) for w in weights) if keep else None
    if keep and first in _kept and _kept[first][0] == state:
        return _kept[first][1]
    *_, n, k = first.shape
    experts = len(weights) if first.ndim == 2 else first.shape[0]
    found = first.new_empty(experts, n, k, dtype=torch.float8_e4m3fn)
    factors = first.new_empty(experts, n // BLOCK, k // BLOCK, dtype=torch.float32)
    parts = list(zip(weights, found, factors, strict=True)) if first.ndim == 2 else [(first, found, factors)]
    for x, narrow, of_blocks in parts:
        flat = x.detach().reshape(-1, k)
        given = flat, narrow.view(flat.shape), of_blocks.view(-1, k // BLOCK)
        if has_kernel(x, "quantize"):
            run(_QUANTIZE, QuantizeConfiguration(name_of(x.dtype), k, blocks=True), *given)
        else:
            for target, source in zip(given[1:], reference.quantize(flat, BLOCK), strict=True):
                target.copy_(source)
    pair = found, factors
    if keep:
        _kept[first] = state, pair
    return pair
