"""The configurations of Blackwell's attention kernels for a problem. Pure functions, no CuTe DSL. None was ever timed.

NSA's selection and top-k take Hopper's tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn_kernels.attention import DecodeConfiguration, ForwardConfiguration, GradientsConfiguration, HeadDims
from cudnn_kernels.sm90.heuristics.attention import (
    configure_compression_top_k,
    configure_selection,
    configure_selection_backward,
    configure_top_k,
    fewest_rounds,
)

__all__ = [
    "configure_backward",
    "configure_compression",
    "configure_compression_backward",
    "configure_compression_top_k",
    "configure_decode",
    "configure_forward",
    "configure_selection",
    "configure_selection_backward",
    "configure_top_k",
    "num_splits",
]

FORWARD_TILES: dict[HeadDims, tuple[int, int]] = {
    (64, 64): (256, 128),
    (96, 96): (256, 128),
    (128, 128): (256, 128),
    (192, 128): (256, 128),
    (192, 192): (128, 128),
    (256, 256): (128, 128),
}
"""Query rows and keys of a CTA by head dimensions."""
DECODE_TILE, DECODE_STAGES = (128, 128), 2
"""MMA rows and keys of a tile, and stages of K and V, for split-KV."""
COMPRESSION_TILE = 256, 128
"""Query rows and compressed keys of a CTA."""


def configure_forward(dtype: str, heads: HeadDims, mask: Mapping[str, bool], **options: Any) -> ForwardConfiguration:
    """Attention, forward."""
    return ForwardConfiguration(dtype, *heads, FORWARD_TILES[heads], **mask, **options)


def configure_decode(
    dtype: str, heads: HeadDims, rows: int, mask: Mapping[str, bool], **options: Any
) -> DecodeConfiguration:
    """Split-KV: the same for any number of rows."""
    return DecodeConfiguration(dtype, *heads, DECODE_TILE, **mask, stages=DECODE_STAGES, **options)


def num_splits(heads: HeadDims, rows: int, kv_heads: int, keys: int, num_sms: int) -> int:
    """How many CTAs split a sequence's keys. ``kv_heads``: those of all sequences."""
    return fewest_rounds(rows, kv_heads, keys, DECODE_TILE[1], num_sms)


def configure_backward(dtype: str, heads: HeadDims, **options: Any) -> GradientsConfiguration:
    """Attention, backward: one tile for all problems."""
    return GradientsConfiguration(dtype, *heads, **options)


def configure_compression(
    dtype: str, heads: HeadDims, out_dtype: str, varlen: bool, **options: Any
) -> ForwardConfiguration:
    """Attention to compressed keys."""
    options |= {"varlen": varlen, "right": True, "compressed": True}
    return ForwardConfiguration(dtype, *heads, COMPRESSION_TILE, out_dtype=out_dtype, **options)


def configure_compression_backward(dtype: str, heads: HeadDims, varlen: bool) -> GradientsConfiguration:
    """Attention to compressed keys, backward."""
    return GradientsConfiguration(dtype, *heads, varlen=varlen, compressed=True, lse="by strides")
