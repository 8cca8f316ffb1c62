"""e4m3 operands of the layer's GEMMs, with float32 block scales (1 x 128 for tokens, 128 x 128 for weights)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from cudnn.errors import make_error
from cudnn.gemm.scales import quantize_token_blocks, token_block_count
from cudnn.moe import reference
from cudnn.moe.gathered import GatheredWeight
from cudnn.moe.quantized_rows import QuantizedRows, Rows
from cudnn.runtime import launch
from cudnn.runtime.launch_capture import outside
from cudnn.runtime.run import DEFAULT_STREAM, architecture, has_kernel, kernel, persistent
from cudnn_kernels.moe.configuration import (
    BLOCK,
    CheckQuantizedConfiguration,
    QuantizeConfiguration,
    QuantizeTokensConfiguration,
)

_QUANTIZE = "cudnn_kernels.moe.quantize:Quantize"
_CHECK = "cudnn_kernels.moe.check_quantized:CheckQuantized"
_QUANTIZE_TOKENS = "cudnn_kernels.moe.quantize_tokens:QuantizeTokens"
_cache: Any = WeakTensorKeyDictionary()
_replayed: Any = WeakTensorKeyDictionary()  # weights that a CUDA graph trains
_LOCK = threading.RLock()  # of both, and of the cached entries
_owners: Any = WeakTensorKeyDictionary()  # of views
Pair = tuple[torch.Tensor, torch.Tensor]


class TwoWays(NamedTuple):
    """Weights in e4m3, (E, n, k), with their scales, (E, n / 128, k / 128), and both transposed."""

    values: torch.Tensor
    scales: torch.Tensor
    transposed: torch.Tensor
    transposed_scales: torch.Tensor


def quantized_rows(x: torch.Tensor) -> QuantizedRows:
    """Rows (R, n) in e4m3 with their scales, in one tensor."""
    rows = QuantizedRows.empty(x)
    if has_kernel(x, "quantize"):
        if len(x):
            kernel(_QUANTIZE, QuantizeConfiguration, x.dtype, x.shape[1], False, 0)(x, *rows.pair)
        return rows
    for target, source in zip(rows.pair, reference.quantize(x, 1), strict=True):
        target.copy_(source)
    return rows


def quantized(x: Rows, scatter_idx: torch.Tensor | None = None, rows: int = 0) -> Pair:
    """Rows (R, n) in e4m3 and their scales (R, n / 128).

    With ``scatter_idx`` (T, K), x has T tokens, which are permuted to ``rows`` rows; rows without a slot are not
    initialized.
    """
    if isinstance(x, QuantizedRows):
        return (x if scatter_idx is None else x.permuted(scatter_idx, rows)).pair
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


def empty_quantized(x: torch.Tensor, rows: int, columns: int, out: torch.Tensor | None = None) -> Pair:
    """Memory for e4m3 rows, unless it is ``out``, and their scales, on x's device."""
    out = x.new_empty(rows, columns, dtype=torch.float8_e4m3fn) if out is None else out
    return out, x.new_empty(rows, columns // BLOCK, dtype=torch.float32)


class TokenColumns(NamedTuple):
    """Rows of experts in e4m3 by token columns, as the GEMMs of weight gradients read them.

    - ``blocks`` (B, n, 128), see :func:`cudnn.gemm.scales.token_blocks`: 128 rows of one expert each, transposed.
      Kernels do not initialize blocks without rows.
    - ``scales`` float32 (B, n): those of the 128 tokens of a column.
    """

    blocks: torch.Tensor
    scales: torch.Tensor


def empty_columns(x: torch.Tensor, rows: int, experts: int, columns: int) -> TokenColumns:
    """Memory for the token columns of ``rows`` rows, on x's device."""
    blocks = token_block_count(rows, experts)
    values = x.new_empty(blocks, columns, BLOCK, dtype=torch.float8_e4m3fn)
    return TokenColumns(values, x.new_empty(blocks, columns, dtype=torch.float32))


@overload
def quantized_tokens(
    x: Rows, gather_idx: torch.Tensor | None, offsets: torch.Tensor, rows: int, by_rows: Literal[True]
) -> tuple[Pair, TokenColumns]: ...


@overload
def quantized_tokens(
    x: Rows, gather_idx: torch.Tensor | None, offsets: torch.Tensor, rows: int, by_rows: Literal[False]
) -> tuple[None, TokenColumns]: ...


def quantized_tokens(
    x: Rows, gather_idx: torch.Tensor | None, offsets: torch.Tensor, rows: int, by_rows: bool
) -> tuple[Pair | None, TokenColumns]:
    """Tokens in the order of experts by rows, with ``by_rows``, and by token columns, in one read of x.

    Args:
        x: (T, n), of which row r is token ``gather_idx[r]``; or (R, n), the rows. Those in e4m3 are copied by rows.
        offsets: Where the experts' rows end.
        rows: R.

    Returns:
        e4m3 (R, n), its scales (R, n / 128), MN-major; rows behind the last expert's are not initialized. And the token
        columns.
    """
    operands = x.pair if isinstance(x, QuantizedRows) else (x,)
    tokens, (n, experts) = operands[0], (operands[0].shape[1], offsets.shape[0])
    of_rows = None
    if by_rows:
        scales = tokens.new_empty(n // BLOCK, rows, dtype=torch.float32).T
        of_rows = tokens.new_empty(rows, n, dtype=torch.float8_e4m3fn), scales
    if has_kernel(tokens, "quantize"):
        columns = empty_columns(tokens, rows, experts, n)
        gathers = gather_idx is not None
        run = kernel(_QUANTIZE_TOKENS, QuantizeTokensConfiguration, tokens.dtype, n, experts, gathers, by_rows)
        run(*operands, *(() if gather_idx is None else (gather_idx,)), offsets, *(of_rows or ()), *columns)
        return of_rows, columns
    if gather_idx is not None:
        operands = tuple(t[gather_idx.long()] for t in operands)
    dequantizes = isinstance(x, QuantizedRows)
    if of_rows is not None:
        sources = operands if dequantizes else reference.quantize(operands[0], 1)
        for target, source in zip(of_rows, sources, strict=True):
            target.copy_(source)
    wide = reference.dequantize(*operands) if dequantizes else operands[0]
    return of_rows, TokenColumns(*quantize_token_blocks(wide, offsets))


def gemm_quantizes(x: torch.Tensor) -> bool:
    """Whether epilogues quantize by 128 elements: not on Blackwell, where accumulators fill the registers."""
    return architecture(x) != "sm_100a"


class _Check:
    """Compares weights with their copies in one row of each 128, another row in each pass that reads the copies; of a
    list, those of one expert.

    A GPU's result is read when a later pass begins, without waiting for it. It stays until it has been raised: neither
    an optimizer's step nor a host that is ahead of the GPU loses it.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.changed = persistent(lambda: torch.zeros(1, dtype=torch.int32, device=x.device))
        self.seen = persistent(lambda: torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=x.is_cuda))
        self.passes = 0
        if x.is_cuda:  # the default stream has written zeros
            torch.cuda.current_stream(x.device).wait_stream(torch.cuda.default_stream(x.device))

    def run(
        self,
        weights: Sequence[torch.Tensor],
        values: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Starts a comparison, of one of a list's tensors. Raises a RuntimeError if an earlier one found a change.

        ``dtype``: the weights were cast to it before they were quantized.
        """
        self.raise_if_changed()
        row, index = self.passes // len(weights) % BLOCK, self.passes % len(weights)
        x, self.passes = weights[index].detach(), self.passes + 1
        if x.ndim == 2:
            values, scales = values[index], scales[index]
        x, values, scales = (t.reshape(-1, t.shape[-1]) for t in (x, values, scales))
        if dtype in (None, x.dtype) and has_kernel(x, "quantize"):
            kernel(_CHECK, CheckQuantizedConfiguration, x.dtype, x.shape[-1])(x, values, scales, self.changed, row)
        else:
            self.changed.bitwise_or_(reference.differ(x, values, scales, row, dtype))
        if not x.is_meta:  # on which kernels are recorded
            self.seen.copy_(self.changed, non_blocking=True)

    def raise_if_changed(self) -> None:
        """Raises a RuntimeError if a comparison has ended that found a change."""
        if int(self.seen):
            if self.changed.is_cuda:  # queued comparisons are of the same change
                torch.cuda.synchronize(self.changed.device)
            self.changed.zero_()
            self.seen.zero_()
            got = "other values than were quantized, without a new version and without a step of an optimizer"
            allowed = "the values of the optimizer's last step"
            hint = "call layer.weights_changed() or cudnn.moe.weights_changed(weight) after such a change"
            raise make_error(RuntimeError, "MoE", "weights, fp8='blockwise'", got, allowed, hint)


@dataclass
class _Cached:
    """Cached e4m3 weights. Their memory is reused while the weights keep their ``addresses``: CUDA graphs may read it.

    ``versions``: the version counters of the quantized weights, None if the weights may have changed since; ``steps``:
    the optimizers' steps until then. ``stream`` quantized them and recorded the event ``done``. The memory belongs to
    the default stream. ``streams``: those that have read or written it since.
    """

    addresses: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...] | None = None
    steps: int = 0
    check: _Check | None = None
    stream: int = 0
    done: Any = None
    streams: dict[int, Any] = field(default_factory=dict)

    def record(self, versions: tuple[int, ...] | None) -> None:
        """Records that the current stream quantized the weights."""
        x = self.tensors[0]
        if x.is_cuda:
            self.stream, self.done = self.current_stream(), self.done or torch.cuda.Event()
            self.done.record(self.streams[self.stream])
        self.versions, self.steps = versions, _steps.count
        if self.check is not None:
            self.check.raise_if_changed()

    def is_valid(self, versions: tuple[int, ...] | None) -> bool:
        """Whether the copies are of weights with these versions."""
        return self.versions is not None and self.versions == versions and self.steps == _steps.count

    def current_stream(self) -> int:
        """The current stream, which is added to ``streams``."""
        x = self.tensors[0]
        stream = launch.raw_stream(None, x.get_device())
        if stream not in self.streams:
            self.streams[stream] = torch.cuda.current_stream(x.device)
        return stream

    def read(self, captures: bool) -> tuple[torch.Tensor, ...]:
        """The copies, for reads on the current stream. A capture needs no event: it begins after the queued work."""
        if self.tensors[0].is_cuda and not captures:
            stream = self.current_stream()
            if stream != self.stream:
                self.streams[stream].wait_event(self.done)
            self.record_stream()
        return self.tensors

    def written(self) -> tuple[torch.Tensor, ...]:
        """The copies, for writes on the current stream, which first waits for the other streams that use them."""
        if self.tensors[0].is_cuda:
            users, self.streams = self.streams, {}
            stream = self.current_stream()
            for other, user in users.items():
                if other != stream:
                    self.streams[stream].wait_stream(user)
        self.record_stream()
        return self.tensors

    def record_stream(self) -> None:
        """Calls ``Tensor.record_stream`` if the current stream is not the default stream."""
        x = self.tensors[0]
        if x.is_cuda and launch.raw_stream(None, x.get_device()) != DEFAULT_STREAM:
            for each in self.tensors:
                each.record_stream(torch.cuda.current_stream(each.device))


class _Steps:
    """Counts the steps of all optimizers. Fused ones change weights without a new version."""

    def __init__(self) -> None:
        self.count, self.counts = 0, False

    def start(self) -> None:
        """Counts from now on."""
        if not self.counts:
            self.counts = True
            register_optimizer_step_post_hook(self._step)

    def _step(self, *_: Any) -> None:
        self.count += 1


_steps = _Steps()


def _captures(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def quantized_weights(weights: Sequence[torch.Tensor], trains: bool) -> Pair:
    """The experts' weights, one tensor or a list, in e4m3, (E, n, k), and their scales (E, n / 128, k / 128).

    A pass that ``trains`` always quantizes, because weights may be changed without a new version of PyTorch's counter.
    Other passes cache the result while the first tensor lives, and quantize again after a training pass, a step of an
    optimizer, or when a version has changed. Tensors of ``torch.inference_mode``, which have no version, are not
    cached; a CUDA graph capture reads the cache and does not write it.
    """
    return outside(functools.partial(_one_way, trains), *weights)


def _one_way(trains: bool, *weights: torch.Tensor) -> Pair:
    if isinstance(weights[0], GatheredWeight):
        return weights[0].copies.by_rows()
    with _LOCK:
        copies = _quantized_weights(weights, trains, False)
    return copies if len(copies) == 2 else copies[:2]  # pyright: ignore[reportReturnType]


def quantized_both_ways(weights: Sequence[torch.Tensor]) -> TwoWays:
    """As :func:`quantized_weights`, and transposed, for both passes of training.

    The copies are cached until a step of any ``torch.optim.Optimizer``, a new version of a weight, or
    :func:`weights_changed`. A CUDA graph capture quantizes, in each replay.
    """
    return TwoWays(*outside(_both_ways, *weights))


def _both_ways(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if isinstance(weights[0], GatheredWeight):
        return weights[0].copies.both_ways()
    with _LOCK:
        return _quantized_weights(weights, True, True)


def quantized_shard(shard: torch.Tensor, parameter: torch.Tensor, dtype: torch.dtype) -> Pair:
    """A shard of a ``parameter`` in e4m3, and its scales, as if it were of a 16-bit ``dtype``.

    The copies are cached as those of :func:`quantized_both_ways` are, while the shard lives: PyTorch replaces no
    parameter that has weak references, as keys of the cache have.
    """
    with _LOCK:
        return _quantized_weights([shard], False, False, dtype, [parameter])  # pyright: ignore[reportReturnType]


def _quantized_weights(
    weights: Sequence[torch.Tensor],
    trains: bool,
    by_step: bool,
    dtype: torch.dtype | None = None,
    shard_of: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    captures = _captures(weights[0])
    owners = [_owners.get(w, w) for w in weights]
    addresses, cached = tuple(w.data_ptr() for w in weights), _cache.get(owners[0])
    if cached is not None and cached.addresses != addresses:
        cached = None
    counted = (*owners, *weights, *shard_of)
    versions = None if any(w.is_inference() for w in counted) else tuple(w._version for w in counted)
    if trains and (captures or not by_step):
        if captures:  # replays change the weights unnoticed
            _replayed[owners[0]] = True
        if cached is not None:
            cached.versions = None
    elif cached is not None and len(cached.tensors) >= (4 if by_step else 2) and cached.is_valid(versions):
        copies = cached.read(captures)
        # Copies of training and of shards: other ones are quantized in each training pass.
        if (len(copies) > 2 or dtype) and not captures:
            cached.check = cached.check or _Check(copies[0])
            cached.check.run(weights, *copies[:2], dtype=dtype)
        return copies
    caches = not ((trains and not by_step) or captures or versions is None)
    if cached is not None and not captures:
        if by_step and len(cached.tensors) == 2:
            cached.tensors += _cached_memory(weights, True)[2:]
        tensors = cached.written()
    elif caches:
        tensors = _cached_memory(weights, by_step)
    else:
        tensors = _memory(weights, by_step)
    _quantize(weights if dtype is None else [w.detach().to(dtype) for w in weights], tensors)
    if caches:
        _steps.start()
        cached = cached or _Cached(addresses, tensors)
        cached.record_stream()
        cached.record(None if owners[0] in _replayed else versions)
        _cache[owners[0]] = cached
    return tensors


def forget_quantized(weight: torch.Tensor) -> None:
    """Drops the cached e4m3 copy of a weight. FSDP2 gathers new values into a weight without a new version."""
    with _LOCK:
        _cache.pop(weight, None)


def weights_changed(*weights: torch.Tensor) -> None:
    """The e4m3 copies of weights are made again in the next pass, in the same memory. Of a list of experts' weights,
    those that have changed suffice.
    """
    with _LOCK:
        for weight in weights:
            address = getattr(weight, "_local_tensor", weight).data_ptr()  # a DTensor has none
            for owner, cached in _cache.items():
                if owner is weight or address in cached.addresses:
                    cached.versions = None


def owned_by(weight: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """``weight``, a view whose versions are those of ``owner``, a DTensor that an optimizer changes."""
    _owners[weight] = owner
    return weight


def _cached_memory(weights: Sequence[torch.Tensor], transposed: bool) -> tuple[torch.Tensor, ...]:
    """:func:`_memory` on the default stream."""
    tensors, first = persistent(lambda: _memory(weights, transposed)), weights[0]
    if first.is_cuda:  # which used this memory before
        torch.cuda.current_stream(first.device).wait_stream(torch.cuda.default_stream(first.device))
    return tensors


def _memory(weights: Sequence[torch.Tensor], transposed: bool) -> tuple[torch.Tensor, ...]:
    """Memory for :func:`quantized_weights` or, ``transposed`` too, for :func:`quantized_both_ways`."""
    *_, n, k = weights[0].shape
    experts = len(weights) if weights[0].ndim == 2 else weights[0].shape[0]
    tensors: tuple[torch.Tensor, ...] = ()
    for rows, columns in [(n, k), (k, n)][: 1 + transposed]:
        out = weights[0].new_empty(experts, rows, columns, dtype=torch.float8_e4m3fn)
        tensors += out, weights[0].new_empty(experts, rows // BLOCK, columns // BLOCK, dtype=torch.float32)
    return tensors


def _quantize(weights: Sequence[torch.Tensor], tensors: tuple[torch.Tensor, ...]) -> None:
    first, (n, k) = weights[0], weights[0].shape[-2:]
    for x, *out in zip(weights, *tensors, strict=True) if first.ndim == 2 else [(first, *tensors)]:
        x = x.detach()
        if has_kernel(x, "quantize"):
            flat = [t.reshape(-1, t.shape[-1]) for t in (x, *out)]
            matrix_rows = n if len(out) > 2 else 0
            kernel(_QUANTIZE, QuantizeConfiguration, x.dtype, k, True, 0, matrix_rows)(*flat)
            continue
        results = reference.quantize(x.reshape(-1, k), BLOCK)
        for target, source in zip(out, results, strict=False):
            target.copy_(source.view(target.shape))
        for target, source in zip(out[2:], out, strict=False):
            target.copy_(source.mT)
