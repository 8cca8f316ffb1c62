# No `from __future__ import annotations`: PyTorch reads the types.

from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from cudnn.api_base import check_tensor
from cudnn.backend import causal_conv1d as backend
from cudnn.backend import library
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.full_precision import full_precision
from cudnn.runtime.registration import custom_op
from cudnn.runtime.vmap import in_front

_WHERE = "causal_conv1d"
_RANKS = {"x": "[B, C, T]", "weight": "[C, W]", "bias": "[C]"}
_ACTIVATIONS = {"identity": 0, "silu": 1}
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}
"""``cudnnDataType_t`` by type."""


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "identity"
) -> torch.Tensor:
    """Each channel convolved with its own filter over the past: ``[B, C, T]``, in the type of x.

        y[b, c, t] = act(bias[c] + sum over i < W of weight[c, i] * x[b, c, t - (W - 1) + i])      x is 0 before t = 0

    Sums are in float32. Differentiable once. On CUDA tensors it needs cuDNN 9.22; on CPU tensors PyTorch computes it.

    Args:
        x: ``[B, C, T]``; float32, float16 or bfloat16, in any strides; copied where it is not contiguous.
        weight: ``[C, W]`` of the same type. On CUDA W is 2 to 8, 16, 32, 64, 128 or 256.
        bias: ``[C]`` of the same type; None for zeros.
        activation: "identity" or "silu".

    Raises:
        ValueError: shapes, the type, the activation, tensors of several devices.
        TypeError: tensors of several types; an argument that is no tensor.
        cudnnGraphNotSupportedError: an older cuDNN, or a W that it does not have.
    """
    check_tensor(_WHERE, "x", x)
    if x.ndim != 3:
        raise make_error(ValueError, _WHERE, "shape of x", tuple(x.shape), _RANKS["x"])
    return causal_conv1d_fwd_primitive(x, weight, x.new_zeros(x.shape[1]) if bias is None else bias, activation)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> None:
    tensors_by_name = {"x": x, "weight": weight, "bias": bias}
    for name, tensor in tensors_by_name.items():
        if tensor.ndim != _RANKS[name].count(",") + 1:
            raise make_error(ValueError, _WHERE, f"shape of {name}", tuple(tensor.shape), _RANKS[name])
    types = {name: tensor.dtype for name, tensor in tensors_by_name.items()}
    if len(set(types.values())) > 1:
        raise make_error(TypeError, _WHERE, "types", types, "one type for all tensors", "call .to(x.dtype)")
    if x.dtype not in _TYPES:
        raise make_error(ValueError, _WHERE, "type of x", x.dtype, ", ".join(map(str, _TYPES)))
    devices = {name: str(tensor.device) for name, tensor in tensors_by_name.items()}
    if len(set(devices.values())) > 1 or x.device.type not in ("cuda", "cpu", "meta"):
        raise make_error(ValueError, _WHERE, "devices", devices, "one device, cuda or cpu", "move them to one")
    channels = {name: tensor.shape[1 if name == "x" else 0] for name, tensor in tensors_by_name.items()}
    if any(count != x.shape[1] for count in channels.values()):
        raise make_error(ValueError, _WHERE, "channels", channels, "the same number in all tensors")
    if weight.shape[1] < 1:
        raise make_error(ValueError, _WHERE, "shape of weight", tuple(weight.shape), "[C, W] with W of 1 or more")
    if activation not in _ACTIVATIONS:
        raise make_error(ValueError, _WHERE, "activation", repr(activation), " or ".join(map(repr, _ACTIVATIONS)))


@custom_op(
    "causal_conv1d_fwd_primitive", autocast=("x", "weight", "bias"), flops=lambda x, weight: 2 * prod(x) * weight[1]
)
def causal_conv1d_fwd_primitive(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> torch.Tensor:
    """y of :func:`causal_conv1d`, contiguous."""
    _check(x, weight, bias, activation)
    if not x.is_cuda and x.numel():
        z = _linear(x, weight, bias)
        return (F.silu(z) if activation == "silu" else z).to(x.dtype).contiguous()
    x, weight, bias = (tensor.contiguous() for tensor in (x, weight, bias))
    y = torch.empty_like(x)
    if y.numel():
        _launch(backend.forward, (x, weight, bias, y), (_TYPES[x.dtype], _ACTIVATIONS[activation]))
    return y


@causal_conv1d_fwd_primitive.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    _check(x, weight, bias, activation)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("causal_conv1d_bwd_primitive", flops=lambda x, weight: 4 * prod(x) * weight[1])
def causal_conv1d_bwd_primitive(
    grad_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> list[torch.Tensor]:
    """Gradients of x, weight and bias in the type of x; those of weight and bias are summed in float32."""
    _check(x, weight, bias, activation)
    if not x.is_cuda and x.numel():
        return [gradient.to(x.dtype).contiguous() for gradient in _gradients(grad_out, x, weight, bias, activation)]
    grad_out, x, weight, bias = (tensor.contiguous() for tensor in (grad_out, x, weight, bias))
    # cuDNN adds to the sums.
    d_weight, d_bias = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (weight, bias))
    dx = torch.empty_like(x)
    if dx.numel():
        tensors = (x, weight, bias, grad_out, dx, d_weight, d_bias)
        _launch(backend.backward, tensors, (_TYPES[x.dtype], _TYPES[torch.float32], _ACTIVATIONS[activation]))
    return [dx, d_weight.to(x.dtype), d_bias.to(x.dtype)]


causal_conv1d_bwd_primitive.register_fake(
    lambda grad_out, *inputs: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3]]
)


def _launch(function: Any, tensors: tuple[torch.Tensor, ...], dtype_codes: tuple[int, ...]) -> None:
    """Calls cuDNN on the current stream of the tensors' device; the first two are x and weight."""
    x, weight = tensors[:2]
    library.require(backend.SINCE, _WHERE)
    if weight.shape[1] not in backend.WIDTHS:
        allowed = f"{', '.join(map(str, backend.WIDTHS))} on CUDA"
        raise make_error(
            cudnnGraphNotSupportedError,
            _WHERE,
            "W of weight",
            weight.shape[1],
            allowed,
            "pad the filter with zeros at its beginning",
        )
    with torch.cuda.device_of(x):
        stream = torch.cuda.current_stream(x.device).cuda_stream
        function(stream, *(tensor.data_ptr() for tensor in tensors), *x.shape, weight.shape[1], *dtype_codes)


def _past(x: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(x.float(), (width - 1, 0))


@full_precision()
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The convolution before the activation, in float32."""
    width = weight.shape[1]
    return F.conv1d(_past(x, width), weight.float().unsqueeze(1), bias.float(), groups=x.shape[1])


@full_precision()
def _gradients(
    grad_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> tuple[torch.Tensor, ...]:
    """Those of x, weight and bias, in float32."""
    dz = grad_out.float()
    if activation == "silu":
        z = _linear(x, weight, bias)
        s = torch.sigmoid(z)
        dz = dz * s * (1 + z * (1 - s))
    width = weight.shape[1]
    dx = F.conv1d(F.pad(dz, (0, width - 1)), weight.float().flip(1).unsqueeze(1), groups=x.shape[1])
    d_weight = torch.einsum("bct,bcwt->cw", dz, _past(x, width).unfold(2, x.shape[2], 1))
    return dx, d_weight, dz.sum((0, 2))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.activation = inputs[3]


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    return *causal_conv1d_bwd_primitive(grad_out, x, weight, bias, ctx.activation), None


causal_conv1d_fwd_primitive.register_autograd(_backward, setup_context=_setup)


def _channels(info: Any, dims: tuple[int | None, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with the dimension that is mapped over as a part of the channels."""
    front = [in_front(x, dim, info.batch_size) for x, dim in zip(tensors, dims, strict=False)]
    return tuple(x.movedim(0, 1).flatten(1, 2) if x.ndim == 4 else x.flatten(0, 1) for x in front)


@causal_conv1d_fwd_primitive.register_vmap
def _(
    info: Any, dims: tuple[int | None, ...], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
) -> tuple[torch.Tensor, int]:
    if dims[1] is None and dims[2] is None:  # the same filters for all: a larger batch
        y = causal_conv1d_fwd_primitive(in_front(x, dims[0], info.batch_size).flatten(0, 1), weight, bias, activation)
        return y.unflatten(0, (info.batch_size, -1)), 0
    x, weight, bias = _channels(info, dims, x, weight, bias)
    y = causal_conv1d_fwd_primitive(x, weight, bias, activation)
    return y.unflatten(1, (info.batch_size, -1)), 1


@causal_conv1d_bwd_primitive.register_vmap
def _(
    info: Any,
    dims: tuple[int | None, ...],
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
) -> tuple[list[torch.Tensor], list[int]]:
    grad_out, x, weight, bias = _channels(info, dims, grad_out, x, weight, bias)
    dx, *sums = causal_conv1d_bwd_primitive(grad_out, x, weight, bias, activation)
    size = info.batch_size
    return [dx.unflatten(1, (size, -1)), *(x.unflatten(0, (size, -1)) for x in sums)], [1, 0, 0]
