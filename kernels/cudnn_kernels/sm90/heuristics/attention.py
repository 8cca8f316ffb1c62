"""The configurations of Hopper's attention kernels for a problem. Pure functions, no CuTe DSL.

Tables have head dimensions as keys: of Q and K, and of V and O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from cudnn_kernels.attention import (
    MAX_SPLIT_ROWS,
    BackwardConfiguration,
    DecodeConfiguration,
    ForwardConfiguration,
    HeadDims,
)
from cudnn_kernels.attention.sparse import (
    CompressionBackwardConfiguration,
    CompressionTopKConfiguration,
    GatedSelectionConfiguration,
    SelectionBackwardConfiguration,
    SelectionConfiguration,
    SelectionKVOuterConfiguration,
    TopKConfiguration,
)

FORWARD_TILES: dict[HeadDims, tuple[int, int]] = {
    (64, 64): (192, 128),
    (96, 96): (192, 112),
    (128, 128): (128, 128),
    (192, 128): (128, 128),
    (192, 192): (128, 112),
    (256, 256): (128, 80),
}
FP8_FORWARD_TILES: dict[HeadDims, tuple[int, int]] = {
    (64, 64): (192, 160),
    (96, 96): (128, 128),
    (128, 128): (128, 192),
    (192, 128): (128, 160),
    (192, 192): (128, 96),
    (256, 256): (128, 64),
}
"""Query rows and keys of a CTA: the fastest of those that were timed on an H200, save for FP8 at 96 and values of 192,
which were never timed: keys for which registers and shared memory suffice.
"""
WINDOW_TILES: dict[HeadDims, tuple[tuple[int, int], int]] = {
    (64, 64): ((192, 96), 4),
    (96, 96): ((192, 112), 3),
    (192, 192): ((128, 112), 2),
    (256, 256): ((128, 64), 2),
}
FP8_WINDOW_TILES: dict[HeadDims, tuple[tuple[int, int], int]] = {
    (64, 64): ((192, 96), 0),
    (128, 128): ((128, 128), 0),
    (192, 128): ((128, 128), 0),
}
"""Those for windows, where they differ, since fewer keys waste less at both edges; and, with
``n_blocks_per_warpgroup``, the stages of K and V.
"""
DECODE_TILES: dict[HeadDims, tuple[int, int]] = {
    (64, 64): (128, 4),
    (96, 96): (128, 3),
    (128, 128): (128, 2),
    (192, 128): (128, 2),
    (192, 192): (64, 3),
    (256, 256): (64, 2),
}
"""Keys of a tile, and stages of K and V, for split-KV."""
BACKWARD_TILES: dict[HeadDims, dict[str, Any]] = {
    (64, 64): {"tile": (128, 128)},
    (96, 96): {"tile": (64, 128), "v_in_registers": True},
    (128, 128): {"tile": (80, 128)},
    (192, 128): {"tile": (64, 112), "pair": True},
    (192, 192): {"tile": (64, 96), "pair": True},
    (256, 256): {"tile": (64, 80), "pair": True},
}
"""Query rows of a step, keys of a CTA, and other options of :class:`BackwardConfiguration`."""
SMALL_BACKWARD_TILES: dict[HeadDims, dict[str, Any]] = {(128, 128): {"tile": (64, 128)}}
"""The same with the dynamic scheduler, and for varlen or split KV blocks with a causal mask: 80 rows would spill
registers.
"""
SOFTCAP_BACKWARD_TILES = SMALL_BACKWARD_TILES | {(64, 64): {"tile": (64, 128)}}
"""The same with a softcap."""
LONGEST_FIRST_HEAD_DIMS = (192, 128), (192, 192), (256, 256)
"""Where KV blocks of varlen batches are sorted: CTA pairs, whose blocks are large and not scheduled dynamically."""
COMPRESSION_TILES: dict[HeadDims, tuple[int, int]] = {
    (32, 32): (192, 128),
    (64, 64): (192, 128),
    (128, 128): (128, 128),
}
"""Query rows and compressed keys of a CTA."""
COMPRESSION_TOP_K_ROWS, COMPRESSION_TOP_K_KEYS = 192, (64, 128)
"""MMA rows of a CTA, one for each head of a query row, and the compressed keys of a sequence that tiles have."""
SELECTION_TILES: dict[HeadDims, dict[str, Any]] = {
    (64, 64): {"tile": (192, 64), "stages": 8},
    (128, 128): {"tile": (192, 64), "stages": 5},
    (192, 128): {"tile": (192, 64), "stages": 3},
    (256, 256): {"tile": (128, 64), "stages": 2},
}
"""MMA rows and keys of a step, and pipeline stages."""
SELECTION_BACKWARD_TILES: dict[HeadDims, dict[str, Any]] = {
    (64, 64): {"tile": (128, 64), "stages": 4},
    (128, 128): {"tile": (128, 64), "stages": 4},
    (192, 128): {"tile": (128, 64), "stages": 3},
    (256, 256): {"tile": (64, 64), "stages": 2},
}
"""The same of the dQ kernel."""
SINGLE_QUERY = 12, 65536
"""``single_query_threshold`` of :class:`SelectionConfiguration`, and from how many rows on: at that size it saves
power, which limits the clock.
"""
KV_OUTER_HEADS, KV_OUTER_BLOCK = ((128, 128),), 64
"""Where the KV-outer kernel of selection was measured: head dimensions, keys of a block."""
KV_OUTER_MIN_ROWS = {1: 2048, 2: 4096, 4: 8192}
"""The number of rows from which on it is faster, by qhead_per_kvhead rounded up to a power of two."""
KV_OUTER_STEPS = 32
"""The most M = 64 MMA tiles (rows times qhead_per_kvhead) of a block in a CTA."""
TOP_K_TILES = {64: (128, 128), 128: (128, 128), 192: (128, 64), 256: (128, 64)}
"""MMA rows and keys of a CTA by head dimension."""

Selection = TypeVar("Selection", bound=SelectionConfiguration)


def configure_forward(dtype: str, heads: HeadDims, mask: Mapping[str, bool], **options: Any) -> ForwardConfiguration:
    """Attention, forward. FP8 has an ``out_dtype`` among the options.

    Varlen tiles are scheduled dynamically, and the bounds of a causal mask without other options stay in registers at
    head dimension 128: both were measured as faster, or as fast.
    """
    fp8 = bool(options.get("out_dtype"))
    tiles, window_tiles = (FP8_FORWARD_TILES, FP8_WINDOW_TILES) if fp8 else (FORWARD_TILES, WINDOW_TILES)
    tile, stages = (window_tiles if mask["left"] else {}).get(heads, (tiles[heads], 0))
    others = (mask["left"], mask["varlen"], mask["top_left"], *options.values())
    in_registers = dtype in ("float16", "bfloat16") and heads == (128, 128) and mask["right"] and not any(others)
    return ForwardConfiguration(
        dtype,
        *heads,
        tile,
        **mask,
        dynamic_scheduler=mask["varlen"],
        loop_bounds_in_registers=in_registers,
        n_blocks_per_warpgroup=stages > 0,
        stages=stages or 2,
        **options,
    )


def configure_decode(
    dtype: str, heads: HeadDims, rows: int, mask: Mapping[str, bool], **options: Any
) -> DecodeConfiguration:
    """Split-KV. ``rows``: those of all heads of Q that share one of K."""
    keys, stages = DECODE_TILES[heads]
    return DecodeConfiguration(
        dtype, *heads, (64 if rows <= MAX_SPLIT_ROWS else 128, keys), **mask, stages=stages, **options
    )


def num_splits(heads: HeadDims, rows: int, kv_heads: int, keys: int, num_sms: int) -> int:
    """How many CTAs split a sequence's keys. ``kv_heads``: those of all sequences."""
    return fewest_rounds(rows, kv_heads, keys, DECODE_TILES.get(heads, (MAX_SPLIT_ROWS, 0))[0], num_sms)


def fewest_rounds(rows: int, kv_heads: int, keys: int, tile_n: int, num_sms: int) -> int:
    """The split with which the chip is done after the fewest tiles of keys, and two a round besides."""
    tiles, blocks = math.ceil(rows / MAX_SPLIT_ROWS) * kv_heads, math.ceil(keys / tile_n)

    def cost(splits: int) -> int:
        return math.ceil(tiles * splits / num_sms) * (math.ceil(blocks / splits) + 2)

    return min(range(1, min(blocks, 64) + 1), key=cost, default=1)


def configure_backward(dtype: str, heads: HeadDims, **options: Any) -> BackwardConfiguration:
    """Attention, backward. The options are those of the configuration."""
    small = options.get("dynamic_scheduler") or (options["right"] and (options["varlen"] or options.get("split")))
    others = SOFTCAP_BACKWARD_TILES if options.get("softcap") else SMALL_BACKWARD_TILES if small else {}
    return BackwardConfiguration(dtype, *heads, **(BACKWARD_TILES | others)[heads], **options)


def schedules_backward_dynamically(heads: HeadDims, right: bool, softcap: bool) -> bool:
    """Whether the backward pass uses the dynamic scheduler: where a mask makes KV blocks unequal.

    Not at head dimension 96, where it is slower, nor with a softcap at 128, which needs its registers.
    """
    return right and (heads == (64, 64) or (heads == (128, 128) and not softcap))


def sorts_backward_blocks(heads: HeadDims, varlen: bool, right: bool) -> bool:
    """Whether the backward pass takes KV blocks of a varlen batch in the order of their steps, longest first."""
    return varlen and right and heads in LONGEST_FIRST_HEAD_DIMS


def configure_compression(
    dtype: str, heads: HeadDims, out_dtype: str, varlen: bool, **options: Any
) -> ForwardConfiguration:
    """Attention to compressed keys. Three warpgroups lack registers to convert O."""
    tile = COMPRESSION_TILES[heads] if out_dtype == dtype else (128, 128)
    options |= {"varlen": varlen, "right": True, "compressed": True, "dynamic_scheduler": varlen}
    return ForwardConfiguration(dtype, *heads, tile, out_dtype=out_dtype, **options)


def configure_compression_backward(dtype: str, heads: HeadDims, varlen: bool) -> CompressionBackwardConfiguration:
    """Attention to compressed keys, backward."""
    return CompressionBackwardConfiguration(dtype, *heads, **BACKWARD_TILES[heads], varlen=varlen)


def compression_top_k_tile_n(keys: int) -> int:
    """The smallest tile with at least this many keys, else the largest."""
    return next((x for x in COMPRESSION_TOP_K_KEYS if x >= keys), COMPRESSION_TOP_K_KEYS[-1])


def configure_compression_top_k(keys: int, **problem: Any) -> CompressionTopKConfiguration:
    """Attention to at most ``keys`` compressed keys of a sequence, with the selection of blocks."""
    return CompressionTopKConfiguration(**problem, tile=(COMPRESSION_TOP_K_ROWS, compression_top_k_tile_n(keys)))


def configure_selection(c: Selection, rows: int) -> Selection:
    """The configuration of a problem with its tile, for a number of rows."""
    threshold, first = SINGLE_QUERY
    saves = isinstance(c, GatedSelectionConfiguration) and c.save_for_backward
    faster = rows >= first and (c.head_dim, c.head_dim_v) == (128, 128) and c.block == 64 and not saves
    tile = SELECTION_TILES[c.head_dim, c.head_dim_v]
    return replace(c, **tile, single_query_threshold=threshold if faster else 0)


def configure_selection_backward(c: SelectionBackwardConfiguration) -> SelectionBackwardConfiguration:
    """The configuration of a problem with its tile."""
    return replace(c, **SELECTION_BACKWARD_TILES[c.head_dim, c.head_dim_v])


def kv_outer_is_faster(rows: int, qhead_per_kvhead: int, heads: HeadDims, block: int) -> bool:
    """Whether selection is faster with KV blocks in the outer loop."""
    least = KV_OUTER_MIN_ROWS.get(_rounded(qhead_per_kvhead))
    return least is not None and rows >= least and heads in KV_OUTER_HEADS and block == KV_OUTER_BLOCK


def configure_selection_kv_outer(c: SelectionKVOuterConfiguration) -> SelectionKVOuterConfiguration:
    """The configuration of a problem with the rows of a CTA."""
    return replace(c, list_chunk=KV_OUTER_STEPS * 64 // _rounded(c.group))


def _rounded(qhead_per_kvhead: int) -> int:
    """MMA rows of a query row: qhead_per_kvhead, rounded up to a power of two."""
    return 1 << (qhead_per_kvhead - 1).bit_length()


def configure_top_k(c: TopKConfiguration) -> TopKConfiguration:
    """The configuration of a problem with its tile; two CTAs per SM where memory and registers suffice."""
    two = c.head_dim <= 128 and c.group >= 8 and c.count <= 32
    return replace(c, tile=TOP_K_TILES[c.head_dim], stages=2 if two else 3, ctas=2 if two else 1)
