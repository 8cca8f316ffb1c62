"""Weights of gated layers in the order in which GEMM + SwiGLU reads them."""

from __future__ import annotations

from typing import Any

from cudnn.errors import make_error
from cudnn.gemm.formats import FLOAT4, name_of
from cudnn.lazy import torch

PAIR = 32  # columns of up, then the same number of gate


def interleave_glu_weights(weights: Any, *, order: str = "up_gate", gate_first: bool = False) -> Any:
    """Interleaves weights with concatenated halves of rows, as in checkpoints, to alternating blocks of 32 rows.

    Done once, when the weights are loaded, and before they are quantized with scale factors in atoms. K-major weights
    need not be interleaved: fused GEMMs take them as they are with ``glu_layout="concatenated"``.

    Args:
        weights: (2 inner, k) or (2 inner, k, l); inner a multiple of 32.
        order: ``"up_gate"`` or ``"gate_up"``, that of the halves.
        gate_first: that of the blocks, as for :func:`interleave_gate_up`.

    Returns:
        (2 inner, k) or (2 inner, k, l), K-major, new memory.

    Raises:
        ValueError: another order, number of rows or of dimensions.
    """
    where = "interleave_glu_weights"
    if order not in ("up_gate", "gate_up"):
        raise make_error(ValueError, where, "order", repr(order), "'up_gate' or 'gate_up'")
    if weights.ndim not in (2, 3) or weights.shape[0] % (2 * PAIR):
        allowed = f"(2 inner, k) or (2 inner, k, l), inner a multiple of {PAIR}"
        raise make_error(ValueError, where, "weights", f"the shape {tuple(weights.shape)}", allowed, "pad both halves")
    inner = weights.shape[0] // 2
    up, gate = weights[:inner], weights[inner:]
    if order == "gate_up":
        up, gate = gate, up
    return interleave_gate_up(gate, up, gate_first=gate_first)


def interleave_gate_up(gate: Any, up: Any, *, gate_first: bool = False) -> Any:
    """The rows of two weight matrices in alternating blocks of 32, for ``b`` of a fused GEMM with SwiGLU.

    Done once, when the weights are loaded, and before they are quantized with scale factors in atoms.

    Args:
        gate, up: (inner, k) or (inner, k, l), of one type and device; inner a multiple of 32.
        gate_first: whether a block of gate comes before that of up. :class:`cudnn.GemmSwiglu` takes up first, the
            default; the grouped GEMMs of cuDNN take gate first.

    Returns:
        (2 inner, k) or (2 inner, k, l), K-major, new memory.

    Raises:
        ValueError: shapes or types that differ, or another number of rows or dimensions.
    """
    where = "interleave_gate_up"
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        got = f"{gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)}"
        raise make_error(ValueError, where, "gate and up", got, "one shape and type")
    if gate.ndim not in (2, 3) or gate.shape[0] % PAIR:
        allowed = f"(inner, k) or (inner, k, l), inner a multiple of {PAIR}"
        raise make_error(ValueError, where, "gate and up", f"the shape {tuple(gate.shape)}", allowed, "pad inner")
    dtype = gate.dtype
    if name_of(dtype) == FLOAT4:  # PyTorch copies its bytes only
        gate, up = gate.view(torch.uint8), up.view(torch.uint8)
    parts = (gate, up) if gate_first else (up, gate)
    if gate.ndim == 3:
        parts = tuple(rows.permute(2, 0, 1) for rows in parts)
    interleave_glu = torch.stack([rows.unflatten(-2, (-1, PAIR)) for rows in parts], dim=-3).flatten(-4, -2)
    interleave_glu = interleave_glu.permute(1, 2, 0) if interleave_glu.ndim == 3 else interleave_glu
    return (
        interleave_glu if interleave_glu.dtype == dtype else interleave_glu.view(dtype)
    )  # a view as another type records no gradient
