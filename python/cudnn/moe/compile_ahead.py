"""The kernels that a mixture-of-experts layer needs for any number of tokens, found by recording calls on meta tensors.

The GEMMs' configurations depend on the number of rows per expert, so a layer has several. All are compiled from the
layer's construction on, at the latest when the first is missing (:class:`~cudnn.runtime.kernels.CompileAhead`), and
none in the middle of a training run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from cudnn.fused.host import FusedAPI
from cudnn.moe import layer
from cudnn.moe.experts import Experts, GroupedGemmOps, Permutation, SortedRows, grouped_gemm_ops
from cudnn.moe.gathered import GatheredWeight
from cudnn.moe.quantized_rows import Rows
from cudnn.moe.quantizing import quantized_rows
from cudnn.runtime.architecture import device_architecture
from cudnn.runtime.kernels import compile_in_background
from cudnn.runtime.recording import MAX_TOKENS, Key, record
from cudnn_kernels.architecture import ARCHITECTURES

_known: set[Hashable] = set()  # the kinds of layers of this process whose kernels were submitted, or are in the cache


@contextlib.contextmanager
def at_construction(module: Any, device: Any, dtype: torch.dtype, kind: Hashable) -> Iterator[None]:
    """Within the block a :class:`cudnn.nn.MoE` gets its parameters on ``device``; then its kernels that the cache
    lacks are compiled in the background.

    Workers import the compiler within the block. Layers of the same ``kind`` need the same kernels: only the first one
    of a process does anything. Nothing is done for weights that are not on a GPU with kernels, within ``torch.compile``
    and under dispatch modes such as ``FakeTensorMode``: the first call handles what remains.
    """
    device = torch.get_default_device() if device is None else torch.device(device)
    kind = (kind, device, dtype)
    if kind in _known or not _compiles_early(device, dtype):
        yield
        return
    with compile_in_background(lambda: _gpu_kernels(module)):
        yield
    _known.add(kind)


def _compiles_early(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether construction compiles. Does not initialize CUDA, so that workers start before it, or are killed where
    there is no GPU and construction fails.
    """
    needs_cast = dtype not in (torch.bfloat16, torch.float16)  # to the dtype of torch.autocast at the call
    if device.type != "cuda" or needs_cast or torch.compiler.is_compiling():
        return False
    return not _get_current_dispatch_mode_stack()


def _gpu_kernels(module: Any) -> list[Key]:
    """The kernels of a module for its GPU, none for a GPU without kernels."""
    if not module.up.is_cuda:
        return []
    index = module.up.get_device()
    arch = device_architecture(index)
    return module_kernels(module, MAX_TOKENS, arch, FusedAPI.num_sms(index)) if arch in ARCHITECTURES else []


def of_module(module: Any, x: torch.Tensor) -> Callable[[str], list[Key]]:
    """For :class:`cudnn.runtime.kernels.CompileAhead`: the kernels of a module on the device of x, its tokens."""
    max_tokens, index = max(x.shape[0], MAX_TOKENS), x.get_device()
    return lambda arch: module_kernels(module, max_tokens, arch, FusedAPI.num_sms(index))


def module_kernels(module: Any, max_tokens: int, arch: str, num_sms: int, trains: bool = True) -> list[Key]:
    """The kernels of a :class:`cudnn.nn.MoE` without a group."""
    clone = on_meta(module)
    for weight in (clone.up, clone.down) if module.into_main_grad else ():
        if weight.main_grad is None:  # as in a layer whose training has not begun
            weight.main_grad = torch.empty_like(weight, dtype=torch.float32)

    def forward(count: int, saves: bool) -> Callable[[], Any]:
        x = torch.empty(count, module.up.shape[2], dtype=module.up.dtype, device="meta", requires_grad=saves)
        with torch.set_grad_enabled(saves):
            y = clone(x)
        return lambda: y.backward(torch.empty_like(y))

    trains = trains and any(p.requires_grad for p in clone.parameters())
    return record(forward, max_tokens, arch, num_sms, trains)


def layer_ops(x: torch.Tensor, e: Experts, adds: bool, top_k: int | None, over_ranks: bool = False) -> GroupedGemmOps:
    """The GEMMs of a layer on the device of x, of which the first missing one starts the compilation of all.

    Args:
        adds: Gradients of weights are accumulated into ``main_grad``.
        top_k: Experts of a token; None for rows that are sorted by expert.
        over_ranks: Other ranks send the tokens.
    """
    ops = grouped_gemm_ops(x, e)
    if ops.layer_kernels is None and x.is_cuda:
        up, down = ([_meta(w) for w in weights] for weights in (e.up, e.down))
        e = e._replace(up=up, down=down, up_bias=_meta(e.up_bias), down_bias=_meta(e.down_bias))
        max_tokens, index = max(x.shape[0], MAX_TOKENS), x.get_device()
        options = (adds, top_k, max_tokens)
        ops.layer_kernels = lambda arch: expert_kernels(e, *options, arch, FusedAPI.num_sms(index), over_ranks)
    return ops


def expert_kernels(
    e: Experts, adds: bool, top_k: int | None, max_tokens: int, arch: str, num_sms: int, over_ranks: bool = False
) -> list[Key]:
    """The kernels of :func:`cudnn.ops.moe_mlp` or, without ``top_k``, of :func:`cudnn.ops.moe_experts`, for weights on
    the meta device.
    """
    up, down = e.up, e.down
    experts, _, h = e.up_shape
    ops = GroupedGemmOps(e)
    up_main_grad, down_main_grad = (
        [torch.empty_like(w, dtype=torch.float32) for w in weights] if adds else [] for weights in (up, down)
    )
    main_grad = (up_main_grad, down_main_grad)

    def forward(has_weights: bool, count: int, saves: bool) -> Callable[[], Any]:
        x: Rows = torch.empty(count, h, dtype=up[0].dtype, device="meta")
        offsets = torch.empty(experts, dtype=torch.int32, device="meta")
        indices = None if top_k is None else offsets.new_empty(count, top_k)
        rows: Any = SortedRows(offsets, count)
        if indices is not None:
            rows = Permutation(offsets, offsets.new_empty(indices.numel()), indices)
        weights = torch.empty(count, top_k or 1, dtype=torch.float32, device="meta") if has_weights else None
        x = quantized_rows(x) if over_ranks and e.receives_fp8(saves) else x
        y, preact = layer.forward(ops, x, weights, rows, e, saves)
        needs_grad = [True, has_weights, True, True, e.up_bias is not None, e.down_bias is not None]
        dy = quantized_rows(y) if over_ranks and saves and e.receives_fp8_gradients else y
        return lambda: layer.backward(ops, dy, x, preact, indices, weights, rows, e, needs_grad, main_grad)

    keys: dict[Key, None] = {}
    for has_weights in (True,) if top_k else (True, False):
        keys |= dict.fromkeys(record(functools.partial(forward, has_weights), max_tokens, arch, num_sms))
    return list(keys)


def on_meta(module: torch.nn.Module) -> Any:
    """A copy of a module without hooks, whose parameters and buffers are on the meta device."""
    clone = object.__new__(type(module))
    clone.__dict__ = dict(vars(module))
    for name, value in vars(module).items():
        if "hooks" in name and hasattr(value, "clear"):
            clone.__dict__[name] = type(value)()
    clone._parameters = {name: _meta(p) for name, p in module._parameters.items()}
    clone._buffers = {name: _meta(b) for name, b in module._buffers.items()}
    clone._modules = {name: None if m is None else on_meta(m) for name, m in module._modules.items()}
    return clone


def _meta(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    meta = local.on_meta() if isinstance(local, GatheredWeight) else torch.empty_like(local.detach(), device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        meta = torch.nn.Parameter(meta, tensor.requires_grad)
        meta.main_grad = _meta(getattr(tensor, "main_grad", None))  # pyright: ignore[reportAttributeAccessIssue]
    return meta
