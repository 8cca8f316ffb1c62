"""e4m3 operands of the layer's forward GEMMs, with float32 block scales (1 x 128 for tokens, 128 x 128 for weights)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from cudnn.moe import reference
from cudnn.runtime import launch
from cudnn.runtime.run import DEFAULT_STREAM, architecture, has_kernel, kernel, persistent
from cudnn_kernels.moe.configuration import BLOCK, QuantizeConfiguration

_QUANTIZE = "cudnn_kernels.moe.quantize:Quantize"
_cache: Any = WeakTensorKeyDictionary()
_replayed: Any = WeakTensorKeyDictionary()  # weights that a CUDA graph trains
_LOCK = threading.RLock()  # of both, and of the cached entries
Pair = tuple[torch.Tensor, torch.Tensor]


def quantized(x: torch.Tensor, scatter_idx: torch.Tensor | None = None, rows: int = 0) -> Pair:
    """Rows (R, n) in e4m3 and their scales (R, n / 128).

    With ``scatter_idx`` (T, K), x has T tokens, which are permuted to ``rows`` rows; rows without a slot are not
    initialized.
    """
    rows = rows or len(x)
    out, scales = empty_quantized(x, rows, x.shape[1])
    if has_kernel(x, "quantize"):
        top_k = 0 if scatter_idx is None else scatter_idx.shape[1]
        launch_quantize = kernel(_QUANTIZE, QuantizeConfiguration, x.dtype, x.shape[1], False, top_k)
        launch_quantize(x, *(() if scatter_idx is None else (scatter_idx,)), out, scales)
        return out, scales
    of_tokens, token_scales = reference.quantize(x, 1)
    if scatter_idx is None:
        return of_tokens, token_scales
    token, slot = (scatter_idx >= 0).nonzero(as_tuple=True)
    row = scatter_idx[token, slot].long()
    out.view(torch.uint8)[row] = of_tokens.view(torch.uint8)[token]
    scales[row] = token_scales[token]
    return out, scales


def empty_quantized(x: torch.Tensor, rows: int, columns: int) -> Pair:
    """Memory for e4m3 rows and their scales, on x's device."""
    out = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return out, x.new_empty(rows, columns // BLOCK, dtype=torch.float32)


def gemm_quantizes(x: torch.Tensor) -> bool:
    """Whether the up GEMM's epilogue quantizes its output: not on Blackwell, where accumulators fill the registers."""
    return architecture(x) != "sm_100a"


@dataclass
class _Cached:
    """Cached e4m3 weights. Their memory is reused while the weights keep their ``addresses``: CUDA graphs may read it.

    ``versions``: the version counters of the quantized weights, None if the weights may have changed since. ``stream``
    quantized them and recorded the event ``done``. The memory belongs to the default stream. ``streams``: those that
    have read or written it since.
    """

    addresses: tuple[int, ...]
    pair: Pair
    versions: tuple[int, ...] | None = None
    stream: int = 0
    done: Any = None
    streams: dict[int, Any] = field(default_factory=dict)

    def record(self, versions: tuple[int, ...] | None) -> None:
        """Records that the current stream quantized the weights."""
        x = self.pair[0]
        if x.is_cuda:
            self.stream, self.done = self.current_stream(), self.done or torch.cuda.Event()
            self.done.record(self.streams[self.stream])
        self.versions = versions

    def current_stream(self) -> int:
        """The current stream, which is added to ``streams``."""
        x = self.pair[0]
        stream = launch.raw_stream(None, x.get_device())
        if stream not in self.streams:
            self.streams[stream] = torch.cuda.current_stream(x.device)
        return stream

    def read(self, captures: bool) -> Pair:
        """The pair, for reads on the current stream. A capture needs no event: it begins after the queued work."""
        if self.pair[0].is_cuda and not captures:
            stream = self.current_stream()
            if stream != self.stream:
                self.streams[stream].wait_event(self.done)
            self.record_stream()
        return self.pair

    def written(self) -> Pair:
        """The pair, for writes on the current stream, which first waits for the other streams that use it."""
        if self.pair[0].is_cuda:
            users, self.streams = self.streams, {}
            stream = self.current_stream()
            for other, user in users.items():
                if other != stream:
                    self.streams[stream].wait_stream(user)
        self.record_stream()
        return self.pair

    def record_stream(self) -> None:
        """Calls ``Tensor.record_stream`` if the current stream is not the default stream."""
        x = self.pair[0]
        if x.is_cuda and launch.raw_stream(None, x.get_device()) != DEFAULT_STREAM:
            for each in self.pair:
                each.record_stream(torch.cuda.current_stream(each.device))


def _captures(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def quantized_weights(weights: Sequence[torch.Tensor], trains: bool) -> Pair:
    """The experts' weights, one tensor or a list, in e4m3, (E, n, k), and their scales (E, n / 128, k / 128).

    A pass that ``trains`` always quantizes, because optimizers change weights without increasing PyTorch's version
    counter. Other passes cache the result while the first tensor lives, and quantize again after a training pass or
    when a version has changed. Tensors of ``torch.inference_mode``, which have no version, are not cached; a CUDA graph
    capture reads the cache and does not write it.
    """
    with _LOCK:
        return _quantized_weights(weights, trains)


def _quantized_weights(weights: Sequence[torch.Tensor], trains: bool) -> Pair:
    first, captures = weights[0], _captures(weights[0])
    addresses, cached = tuple(w.data_ptr() for w in weights), _cache.get(first)
    if cached is not None and cached.addresses != addresses:
        cached = None
    versions = None if any(w.is_inference() for w in weights) else tuple(w._version for w in weights)
    if trains:
        if captures:  # replays change the weights unnoticed
            _replayed[first] = True
        if cached is not None:
            cached.versions = None
    elif cached is not None and cached.versions is not None and cached.versions == versions:
        return cached.read(captures)
    caches = not (trains or captures or versions is None)
    if cached is not None and not captures:
        pair = cached.written()
    elif caches:
        pair = persistent(lambda: _pair(weights))
        if first.is_cuda:  # which used this memory before
            torch.cuda.current_stream(first.device).wait_stream(torch.cuda.default_stream(first.device))
    else:
        pair = _pair(weights)
    _quantize(weights, pair)
    if caches:
        cached = cached or _Cached(addresses, pair)
        cached.record_stream()
        cached.record(None if first in _replayed else versions)
        _cache[first] = cached
    return pair


def forget_quantized(weight: torch.Tensor) -> None:
    """Drops the cached e4m3 copy of a weight. FSDP2 gathers new values into a weight without a new version."""
    with _LOCK:
        _cache.pop(weight, None)


def _pair(weights: Sequence[torch.Tensor]) -> Pair:
    """Memory for :func:`quantized_weights`."""
    *_, n, k = weights[0].shape
    experts = len(weights) if weights[0].ndim == 2 else weights[0].shape[0]
    out = weights[0].new_empty(experts, n, k, dtype=torch.float8_e4m3fn)
    return out, weights[0].new_empty(experts, n // BLOCK, k // BLOCK, dtype=torch.float32)


def _quantize(weights: Sequence[torch.Tensor], pair: Pair) -> None:
    first, k = weights[0], weights[0].shape[-1]
    tensors = zip(weights, *pair, strict=True) if first.ndim == 2 else [(first, *pair)]
    for x, out, scales in tensors:
        flat = x.detach().reshape(-1, k)
        flat_out = (out.view(flat.shape), scales.view(-1, k // BLOCK))
        if has_kernel(x, "quantize"):
            kernel(_QUANTIZE, QuantizeConfiguration, x.dtype, k, True)(flat, *flat_out)
        else:
            for target, source in zip(flat_out, reference.quantize(flat, BLOCK), strict=True):
                target.copy_(source)
