"""The gated MLP: forward and backward as sequences of kernels.

T tokens of size H, intermediate size I.

Forward:

    (1) up GEMM + GLU      h = x gate_up^T + gate_up_bias            preact, (T, 2 I), saved for backward
                           act = f(gate) up                          (T, I), in the epilogue
    (2) down GEMM          y = act down^T + down_bias                (T, H)

Backward saves x and h alone:

    (1) down GEMM^T + dGLU dact = dy down;  dh = dglu(dact, h)       act recomputed
    (2) down wgrad         ddown = dy^T act
    (3) up GEMM^T          dx = dh gate_up
    (4) up wgrad           dgate_up = dh^T x

Kernels of this library run the GEMMs with an activation and those that add to ``main_grad``; cuBLAS runs the others.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn import settings
from cudnn.fused.plain_gemm import gemm_add
from cudnn.lazy import torch
from cudnn.moe.experts import ACT_PARAMS, Experts, GroupedGemmOps, environment, matrix, ones, transposed

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("swiglu", "geglu")


class Weights(NamedTuple):
    """The layer's weights: ``gate_up`` is one tensor (2 I, H), or gate (I, H) and up (I, H); ``down`` is (H, I).

    ``glu_layout`` of one tensor: "concatenated", the first I rows are gates, or "interleaved", of every 64 rows the
    first 32 are gates. The preactivation's columns have the order of these rows; two tensors count as concatenated.
    """

    gate_up: Sequence[Tensor]
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str
    act_params: Sequence[float]
    glu_layout: str


class NeedsGrad(NamedTuple):
    """Which gradients autograd needs."""

    x: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class Gradients(NamedTuple):
    """The gradients that are needed, else None; also None if they were added to ``main_grad``."""

    x: Tensor | None
    gate_up: Tensor | None
    down: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


def forward(x: Tensor, w: Weights, save_preact: bool) -> tuple[Tensor, Tensor | None]:
    """y (T, H) and, with ``save_preact``, the preactivation (T, 2 I), else None. T is not 0."""
    rows, intermediate = x.shape[0], w.down.shape[1]
    preact = x.new_empty(rows, 2 * intermediate) if save_preact else None
    act = x.new_empty(rows, intermediate)
    # (1) Up GEMM + GLU.
    up_gemm(x, w, preact, act)
    # (2) Down GEMM.
    if w.down_bias is not None:
        return torch.nn.functional.linear(act, w.down, w.down_bias), preact
    return act @ w.down.T, preact


def backward(
    dy: Tensor,
    x: Tensor,
    preact: Tensor,
    w: Weights,
    needs_grad: Sequence[bool],
    main_grad: tuple[Sequence[Tensor], Sequence[Tensor]],
    into_preact: bool = False,
) -> Gradients:
    """The gradients that ``needs_grad`` names, in the order of :class:`Gradients`.

    Args:
        dy: (T, H), contiguous.
        main_grad: float32 buffers of gate_up and of down that their gradients are added to; empty: none.
        into_preact: The gradient of the preactivation overwrites it, which saves memory of its size.
    """
    needs, rows, intermediate = NeedsGrad(*needs_grad), x.shape[0], w.down.shape[1]
    ddown_bias = dy.sum(0) if needs.down_bias else None
    act = x.new_empty(rows, intermediate) if needs.down else None
    # (1) Down GEMM^T; its epilogue applies the derivative of the activation, and recomputes it.
    dpreact = preact if into_preact else torch.empty_like(preact)
    dact_gemm(dy, preact, w, dpreact, act)
    del preact
    # (2) Weight gradient of down.
    ddown = _wgrad(dy, act, main_grad[1]) if act is not None else None
    del act
    dgate_up_bias = dpreact.sum(0) if needs.gate_up_bias else None
    # (3) Up GEMM^T.
    dx = _dx(dpreact, w.gate_up) if needs.x else None
    # (4) Weight gradient of gate_up.
    dgate_up = _wgrad(dpreact, x, main_grad[0]) if needs.gate_up else None
    return Gradients(dx, dgate_up, ddown, dgate_up_bias, ddown_bias)


def up_gemm(x: Tensor, w: Weights, preact: Tensor | None, act: Tensor) -> None:
    """Writes act (T, I) and, unless it is None, preact (T, 2 I)."""
    ops, gate_up, saves = ops_of(x, w), as_one(w.gate_up), preact is not None
    saved = None if preact is None else matrix(preact)
    tensors: dict[str, Any] = {"a": matrix(x), "b": matrix(gate_up)}
    if w.gate_up_bias is None:
        tensors |= {"ab12": saved, "c": matrix(act)}
        ops.run(("gated up", saves), f"gemm_{w.activation}", tensors, _dense_options(w))
    else:
        tensors |= {**_one_group(x), "bias": w.gate_up_bias.unsqueeze(1), "c": saved, "d": matrix(act)}
        ops.run(("gated up, bias", saves), "grouped_gemm_glu", tensors, ops.act_options)


def dact_gemm(dy: Tensor, preact: Tensor, w: Weights, dpreact: Tensor, act: Tensor | None) -> None:
    """Writes dpreact (T, 2 I), which may be preact, and, unless it is None, act (T, I)."""
    ops = ops_of(dy, w)
    activation = None if act is None else matrix(act)
    tensors: dict[str, Any] = {"a": matrix(dy), "b": transposed(w.down)}
    if w.activation == "swiglu":
        tensors |= {"ab12": matrix(preact), "d_ab12": matrix(dpreact), "c": activation}
        ops.run(("gated dact", act is None), "gemm_dswiglu", tensors, _dense_options(w))
    else:
        tensors |= {**_one_group(dy), "c": matrix(preact), "prob": None}
        tensors |= {"d_row": matrix(dpreact), "activation": activation}
        ops.run(("gated dact", act is None), "grouped_gemm_dglu", tensors, ops.dact_options)


def as_one(gate_up: Sequence[Tensor]) -> Tensor:
    """Weights (2 I, H) as one tensor. Gate and up that lie one after the other in memory are viewed, others copied."""
    if len(gate_up) == 1:
        return gate_up[0]
    gate, up = gate_up
    if are_adjacent(gate, up):
        return gate.as_strided((2 * gate.shape[0], gate.shape[1]), gate.stride())
    _log_copy_once()
    return torch.cat([gate, up])


def are_adjacent(gate: Tensor, up: Tensor) -> bool:
    """Whether the rows of up follow those of gate in the same memory."""
    shared = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
    follows = up.storage_offset() == gate.storage_offset() + gate.numel()
    return shared and follows and gate.is_contiguous() and up.is_contiguous()


@functools.cache
def _log_copy_once() -> None:
    logger = settings.configure_logging()
    logger.warning("gated_mlp: gate and up do not lie one after the other: each pass copies them into one tensor")


def _dx(dpreact: Tensor, gate_up: Sequence[Tensor]) -> Tensor:
    if len(gate_up) == 1 or are_adjacent(*gate_up):
        return dpreact @ as_one(gate_up)
    dgate, dup = dpreact.chunk(2, 1)
    return torch.addmm(dgate @ gate_up[0], dup, gate_up[1])


def _wgrad(d: Tensor, x: Tensor, main_grad: Sequence[Tensor]) -> Tensor | None:
    """d^T x; None if it is added to ``main_grad``, buffers of consecutive rows."""
    if not main_grad:
        return d.T @ x
    for buffer, columns in zip(main_grad, d.split([len(each) for each in main_grad], 1), strict=True):
        gemm_add(columns.T, x.T, buffer)
    return None


_OPS: dict[Any, GroupedGemmOps] = {}


def ops_of(x: Tensor, w: Weights) -> GroupedGemmOps:
    """The cached GEMMs of a layer. The key: device, dtype, weight shapes, bias, activation, and settings."""
    sizes = (len(w.gate_up), w.down.shape, w.gate_up_bias is None)
    key = (x.device, x.dtype, sizes, w.activation, *w.act_params, w.glu_layout, environment())
    ops = _OPS.get(key)
    if ops is None:
        ops = _OPS[key] = GroupedGemmOps(Experts([], [], None, None, w.activation, w.act_params, w.glu_layout))
    return ops


def _dense_options(w: Weights) -> Mapping[str, Any]:
    act_params = dict(zip(ACT_PARAMS, w.act_params, strict=True)) if w.activation == "geglu" else {}
    return {"glu_layout": w.glu_layout, "glu_order": "gate_up", **act_params}


def _one_group(x: Tensor) -> dict[str, Tensor]:
    """What a grouped GEMM needs to treat all rows as one group."""
    offsets = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    return {"padded_offsets": offsets, "alpha": ones(1, x.device)}
