"""``moe_grouped_matmul``: cuDNN's grouped GEMM of a mixture of experts as a PyTorch operator (a graph of one node)."""

# No `from __future__ import annotations`: PyTorch reads the types.

from math import prod
from typing import Any

import torch

from cudnn.enums import moe_grouped_matmul_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.pygraph import operator_graphs
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.operator_graphs import GraphCache, Tensors
from cudnn.runtime.memory import aligned, is_readable
from cudnn.runtime.registration import custom_op

_WHERE = "moe_grouped_matmul"
_NEEDED = {"none": (), "gather": ("token_index",), "scatter": ("token_index", "token_ks")}
_graph_cache: GraphCache = {}


@custom_op(
    "moe_grouped_matmul", autocast=("token", "weight"), flops=lambda weight, out: 2 * out[1] * weight[1] * weight[2]
)
def moe_grouped_matmul(
    token: torch.Tensor,
    weight: torch.Tensor,
    first_token_offset: torch.Tensor,
    token_index: torch.Tensor | None = None,
    token_ks: torch.Tensor | None = None,
    mode: str = "none",
    top_k: int = 1,
) -> torch.Tensor:
    """Multiplies each token by the weights of its expert: ``[1, rows, N]``, row-major, in the type of token.

    Sums are in float32. Needs cuDNN 9.15. Differentiable in token and weight: the gradient of token copies the weights,
    because cuDNN needs them transposed; that of weight needs cuDNN 9.22, built for CUDA 13.

    Args:
        token: ``[1, M, K]``, float16, bfloat16 or float32, sorted by expert; for "gather" in any order.
        weight: ``[E, K, N]`` with K contiguous: the transpose of a contiguous ``[E, N, K]``.
        first_token_offset: E integers, ``[E, 1, 1]``: the row at which each expert's segment begins, rising; the last
            segment ends with the rows.
        token_index: Integers ``[1, rows, 1]``. "gather": the token that a row takes; cuDNN requires a multiple of M
            rows. "scatter": the token that a row came from.
        token_ks: Integers ``[1, rows, 1]``, "scatter" only: which of its token's ``top_k`` experts a row belongs to.
        mode: "none": row r is computed from token r. "gather": from token ``token_index[r]``. "scatter": the result of
            token r is row ``token_index[r] * top_k + token_ks[r]``.
        top_k: Experts for each token, for "scatter".

    Raises:
        ValueError: the mode, a tensor that the mode needs or does not take, shapes, types, the order of weight.
        RuntimeError: cuDNN does not support it.
    """
    index_tensors = {"token_index": token_index, "token_ks": token_ks}
    _check(token, weight, index_tensors, mode)
    inputs = {"token": token, "weight": weight, "first_token_offset": _integers(first_token_offset)}
    inputs |= {name: _integers(x).view(1, -1, 1) for name, x in index_tensors.items() if x is not None}
    out = _rows(token, weight, token_index, mode)
    if out.numel():
        # In the other modes the number of rows implies it.
        scattered = {"top_k": top_k} if mode == "scatter" else {}
        _run(_describe, inputs, out, {"mode": moe_grouped_matmul_mode[mode.upper()], **scattered})
    return out


def _check(token: torch.Tensor, weight: torch.Tensor, index_tensors: dict[str, torch.Tensor | None], mode: str) -> None:
    if mode not in _NEEDED:
        raise make_error(ValueError, _WHERE, "mode", repr(mode), " or ".join(map(repr, _NEEDED)))
    for name, x in index_tensors.items():
        if (x is not None) != (name in _NEEDED[mode]):
            allowed = f"{', '.join(_NEEDED[mode]) or 'neither index'} with mode {mode!r}"
            raise make_error(ValueError, _WHERE, name, "None" if x is None else "a tensor", allowed)
    if token.ndim != 3 or weight.ndim != 3 or token.shape[0] != 1 or token.shape[2] != weight.shape[1]:
        got = f"{tuple(token.shape)} and {tuple(weight.shape)}"
        raise make_error(ValueError, _WHERE, "shapes of token and weight", got, "[1, M, K] and [E, K, N]")
    if token.dtype != weight.dtype:
        raise make_error(
            ValueError, _WHERE, "types of token and weight", f"{token.dtype} and {weight.dtype}", "one type"
        )
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        hint = "pass weight.mT.contiguous().mT"
        raise make_error(ValueError, _WHERE, "strides of weight", weight.stride(), "K contiguous, a stride of 1", hint)


def _integers(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point():
        raise make_error(ValueError, _WHERE, "type of offsets and indices", x.dtype, "integers")
    return aligned(x.int()).view(-1, 1, 1)


def _rows(token: torch.Tensor, weight: torch.Tensor, token_index: torch.Tensor | None, mode: str) -> torch.Tensor:
    rows = token_index.numel() if mode == "gather" and token_index is not None else token.shape[1]
    return token.new_empty(1, rows, weight.shape[2])


@moe_grouped_matmul.register_fake
def _(
    token: torch.Tensor,
    weight: torch.Tensor,
    first_token_offset: torch.Tensor,
    token_index: torch.Tensor | None = None,
    token_ks: torch.Tensor | None = None,
    mode: str = "none",
    top_k: int = 1,
) -> torch.Tensor:
    return _rows(token, weight, token_index, mode)


def _describe(graph: pygraph, t: Tensors, **options: Any) -> Tensors:
    return {"out": graph.moe_grouped_matmul(**t, **options, **_compute(graph))}


def _describe_gradient(graph: pygraph, t: Tensors) -> Tensors:
    return {"out": graph.moe_grouped_matmul_bwd(**t, **_compute(graph))}


def _compute(graph: pygraph) -> dict[str, Any]:
    """The graph's compute type instead of the operation's default, FLOAT."""
    return {"compute_data_type": graph.context.compute_data_type}


def _run(describe: Any, inputs: dict[str, torch.Tensor], out: torch.Tensor, options: dict[str, Any]) -> None:
    for name in inputs.keys() & {"token", "doutput"}:
        if not is_readable(inputs[name]):
            inputs[name] = inputs[name].clone(memory_format=torch.contiguous_format)
    try:
        operator_graphs.run(_graph_cache, describe, inputs, {"out": out}, options)
    except cudnnGraphNotSupportedError as error:
        raise RuntimeError(str(error)) from error


@custom_op("moe_grouped_matmul_bwd", flops=lambda doutput, token: 2 * prod(doutput) * token[2])
def moe_grouped_matmul_bwd(
    doutput: torch.Tensor, token: torch.Tensor, first_token_offset: torch.Tensor
) -> torch.Tensor:
    """The gradient ``[E, K, N]`` of the weight, K contiguous, from that of the output and the token of each row."""
    inputs = {"doutput": doutput, "token": token, "first_token_offset": _integers(first_token_offset)}
    out = _like_weight(doutput, token, first_token_offset)
    if token.numel():
        _run(_describe_gradient, inputs, out, {})
    else:
        out.zero_()
    return out


def _like_weight(doutput: torch.Tensor, token: torch.Tensor, first_token_offset: torch.Tensor) -> torch.Tensor:
    return token.new_empty(first_token_offset.numel(), doutput.shape[2], token.shape[2]).mT


moe_grouped_matmul_bwd.register_fake(_like_weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.mode, ctx.top_k = inputs[5:]


def _backward(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
    token, weight, first, index, ks = ctx.saved_tensors
    if ctx.mode == "scatter":
        d_out = d_out[:, (index * ctx.top_k + ks).flatten()]
    gathered = index.flatten() if ctx.mode == "gather" else None
    d_token = d_weight = None
    if ctx.needs_input_grad[0]:
        d_token = moe_grouped_matmul(d_out, weight.contiguous().mT, first)
        if gathered is not None:
            wide = torch.promote_types(token.dtype, torch.float32)
            total = torch.zeros_like(token, dtype=wide).index_add_(1, gathered, d_token.to(wide))
            d_token = total.to(token.dtype)
    if ctx.needs_input_grad[1]:
        d_weight = moe_grouped_matmul_bwd(d_out, token if gathered is None else token[:, gathered], first)
    return d_token, d_weight, *[None] * 5


moe_grouped_matmul.register_autograd(_backward, setup_context=_setup)
