"""Layouts of attention's tensors: (b, h, s, d) in b, s, h, d order, or varlen (t, h, d)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn.fused.layouts import Layout, Sizes
from cudnn.lazy import torch


@dataclass(frozen=True)
class Heads(Layout):
    """The rows of every head by the names of sizes; the elements of a head have the stride 1.

    Sequences of one length are (b, h, s, d), varlen ones (t, h, d), with any strides as long as rows do not overlap.
    Results are allocated as a transposed (b, s, h, d).
    """

    rows: str
    heads: str
    head: str
    alignment: int = 16
    batch: str = "b"
    rank = 4

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        rows, heads, head = sizes[self.rows], sizes[self.heads], sizes[self.head]
        return (rows, heads, head) if sizes["packed"] else (sizes[self.batch], heads, rows, head)

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        rows, heads, head = sizes[self.rows], sizes[self.heads], sizes[self.head]
        row = heads * head
        return [(row, head, 1)] if sizes["packed"] else [(rows * row, head, row, 1)]

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        """Any order, apart by multiples of the alignment."""
        if stride[-1] != 1:
            return False
        if 0 in shape:
            return True
        reach = shape[-1]
        for dim in sorted((i for i in range(len(shape) - 1) if shape[i] != 1), key=lambda i: stride[i]):
            if stride[dim] < reach or stride[dim] * bits % (8 * self.alignment):
                return False
            reach = stride[dim] * shape[dim]
        return True

    def allowed(self, sizes: Sizes, written: bool) -> tuple[str, str]:
        dense, _ = super().allowed(sizes, written)
        hint = "" if sizes["packed"] else "pass tensor.transpose(1, 2).contiguous().transpose(1, 2)"
        return f"{dense}, or others with 1 last and multiples of {self.alignment} bytes before", hint

    def canonicalize(self, tensor: Any) -> Any:
        return tensor


@dataclass(frozen=True)
class RowValues(Layout):
    """A value for every row of every head: (b, h, s) contiguous, or varlen (t, h).

    Varlen values are stored head by head, whether the strides are (1, t) or (h, 1).
    """

    rank = 3
    alignment = 4

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        rows, heads = sizes["sq"], sizes["hq"]
        return (rows, heads) if sizes["packed"] else (sizes["b"], heads, rows)

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        rows, heads = sizes["sq"], sizes["hq"]
        return [(heads, 1), (1, rows)] if sizes["packed"] else [(heads * rows, rows, 1)]

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.squeeze(-1) if tensor.ndim > 2 and tensor.shape[-1] == 1 else tensor


@dataclass(frozen=True)
class HeadValues(Layout):
    """A value for every head of K of every sequence: (b, hk), with any strides, 0 too."""

    rank = 2
    alignment = 4

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes["b"], sizes["hk"]

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        return [(sizes["hk"], 1)]

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        return True


def by_head(values: Any, packed: bool) -> Any:
    """Row values as (b, h, s), or (h, t) for varlen."""
    if not packed:
        return values
    rows, heads = values.shape
    return torch.as_strided(values, (heads, rows), (rows, 1), values.storage_offset())
