"""e4m3 operands of the layer's forward products, with float32 factors for 128 elements."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cudnn.moe import reference
from cudnn.runtime import launch
from cudnn.runtime.run import DEFAULT_STREAM, architecture, has_kernel, kernel, lasting
from cudnn_kernels.moe.configuration import BLOCK, QuantizeConfiguration

_QUANTIZE = "cudnn_kernels.moe.quantize:Quantize"
_kept: Any = WeakTensorKeyDictionary()
_replayed: Any = WeakTensorKeyDictionary()  # weights that a CUDA graph trains
_LOCK = threading.RLock()  # of both, and of what is noted of kept weights
Pair = tuple[torch.Tensor, torch.Tensor]


def quantized(x: torch.Tensor, row_of_choice: torch.Tensor | None = None, rows: int = 0) -> Pair:
    """Rows (R, n) in e4m3 and their factors (R, n / 128). With the row of each choice, (T, K), x has tokens, and they
    are ``rows`` rows, of which those of no choice are not written.
    """
    rows = rows or len(x)
    found, factors = results(x, rows, x.shape[1])
    if has_kernel(x, "quantize"):
        top_k = 0 if row_of_choice is None else row_of_choice.shape[1]
        made = kernel(_QUANTIZE, QuantizeConfiguration, x.dtype, x.shape[1], False, top_k)
        made(x, *(() if row_of_choice is None else (row_of_choice,)), found, factors)
        return found, factors
    narrow, of_rows = reference.quantize(x, 1)
    if row_of_choice is None:
        return narrow, of_rows
    token, choice = (row_of_choice >= 0).nonzero(as_tuple=True)
    row = row_of_choice[token, choice].long()
    found.view(torch.uint8)[row] = narrow.view(torch.uint8)[token]
    factors[row] = of_rows[token]
    return found, factors


def results(x: torch.Tensor, rows: int, columns: int) -> Pair:
    """Memory for rows in e4m3, on x's device, and for their factors."""
    found = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return found, x.new_empty(rows, columns // BLOCK, dtype=torch.float32)


def quantizes_results(x: torch.Tensor) -> bool:
    """Whether a product of e4m3 quantises what it makes: not on Blackwell, where sums fill the registers."""
    return architecture(x) != "sm_100a"


@dataclass
class _Kept:
    """Weights in e4m3, in memory that stays as long as these lie at their ``addresses``: CUDA graphs may read it.

    ``versions`` are those of the weights that they were made of, None where the weights may have changed since.
    ``stream``, ``done``: where they were made, and an event there. The memory is the default stream's. ``readers`` are
    the streams that have read them since.
    """

    addresses: tuple[int, ...]
    pair: Pair
    versions: tuple[int, ...] | None = None
    stream: int = 0
    done: Any = None
    readers: dict[int, Any] = field(default_factory=dict)

    def made(self, versions: tuple[int, ...] | None) -> None:
        """Notes that they were made on the current stream."""
        x = self.pair[0]
        if x.is_cuda:
            self.stream, self.done = self.noted(), self.done or torch.cuda.Event()
            self.done.record(self.readers[self.stream])
        self.versions = versions

    def noted(self) -> int:
        """The current stream, noted as one that reads or writes the pair."""
        x = self.pair[0]
        stream = launch.raw_stream(None, x.get_device())
        if stream not in self.readers:
            self.readers[stream] = torch.cuda.current_stream(x.device)
        return stream

    def read(self, captures: bool) -> Pair:
        """The pair, for the current stream. A capture begins when the GPU has done what was queued."""
        if self.pair[0].is_cuda and not captures:
            stream = self.noted()
            if stream != self.stream:
                self.readers[stream].wait_event(self.done)
            self.used()
        return self.pair

    def written(self) -> Pair:
        """The pair, to be written anew on the current stream, which first waits for other streams that have read it."""
        if self.pair[0].is_cuda:
            before, self.readers = self.readers, {}
            stream = self.noted()
            for other, reader in before.items():
                if other != stream:
                    self.readers[stream].wait_stream(reader)
        self.used()
        return self.pair

    def used(self) -> None:
        """Tells PyTorch's allocator of another stream that uses the memory."""
        x = self.pair[0]
        if x.is_cuda and launch.raw_stream(None, x.get_device()) != DEFAULT_STREAM:
            for each in self.pair:
                each.record_stream(torch.cuda.current_stream(each.device))


def _captures(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def quantized_weights(weights: Sequence[torch.Tensor], trains: bool) -> Pair:
    """The experts' weights, one tensor or a list, in e4m3, (E, n, k), and their factors (E, n / 128, k / 128).

    Made anew in each pass that ``trains``, since optimizers change weights in ways that PyTorch does not count. Those
    of other passes are kept, as long as the first tensor lives, and made anew when a tensor's version has changed or a
    training pass was since; not of tensors of ``torch.inference_mode``, which have no versions, nor in a capture, which
    makes none.
    """
    with _LOCK:
        return _quantized_weights(weights, trains)


def _quantized_weights(weights: Sequence[torch.Tensor], trains: bool) -> Pair:
    first, captures = weights[0], _captures(weights[0])
    addresses, kept = tuple(w.data_ptr() for w in weights), _kept.get(first)
    if kept is not None and kept.addresses != addresses:
        kept = None
    versions = None if any(w.is_inference() for w in weights) else tuple(w._version for w in weights)
    if trains:
        if captures:  # nothing tells of the changes that replays make
            _replayed[first] = True
        if kept is not None:
            kept.versions = None
    elif kept is not None and kept.versions is not None and kept.versions == versions:
        return kept.read(captures)
    keeps = not (trains or captures or versions is None)
    if kept is not None and not captures:
        pair = kept.written()
    elif keeps:
        pair = lasting(lambda: _pair(weights))
        if first.is_cuda:  # what read this memory before
            torch.cuda.current_stream(first.device).wait_stream(torch.cuda.default_stream(first.device))
    else:
        pair = _pair(weights)
    _quantize(weights, pair)
    if keeps:
        kept = kept or _Kept(addresses, pair)
        kept.used()
        kept.made(None if first in _replayed else versions)
        _kept[first] = kept
    return pair


def _pair(weights: Sequence[torch.Tensor]) -> Pair:
    """Memory for :func:`quantized_weights`."""
    *_, n, k = weights[0].shape
    experts = len(weights) if weights[0].ndim == 2 else weights[0].shape[0]
    found = weights[0].new_empty(experts, n, k, dtype=torch.float8_e4m3fn)
    return found, weights[0].new_empty(experts, n // BLOCK, k // BLOCK, dtype=torch.float32)


def _quantize(weights: Sequence[torch.Tensor], pair: Pair) -> None:
    first, k = weights[0], weights[0].shape[-1]
    parts = zip(weights, *pair, strict=True) if first.ndim == 2 else [(first, *pair)]
    for x, narrow, of_blocks in parts:
        flat = x.detach().reshape(-1, k)
        given = flat, narrow.view(flat.shape), of_blocks.view(-1, k // BLOCK)
        if has_kernel(x, "quantize"):
            kernel(_QUANTIZE, QuantizeConfiguration, x.dtype, k, True)(*given)
        else:
            for target, source in zip(given[1:], reference.quantize(flat, BLOCK), strict=True):
                target.copy_(source)
