"""The gradients of attention to compressed keys, on Hopper.

There are few such keys and many rows: blocks of keys times heads of K are fewer than multiprocessors. So a CTA of
:mod:`cudnn_kernels.sm90.attention_backward` has a block of keys for one head of Q, and another kernel adds up the
heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cudnn_kernels.attention import around, sequences
from cudnn_kernels.attention.sparse import CompressionBackwardConfiguration
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_backward import AttentionBackward

THREADS = 128


class CompressionBackward(AttentionBackward):
    """The kernels for one :class:`CompressionBackwardConfiguration`."""

    c: CompressionBackwardConfiguration

    def launch_passes(self, given: Mapping[str, Any], values: around.Values) -> None:
        """To the kernel before this one, every head of Q has a head of K and V of its own, at the group's address."""
        sizes = around.sizes_of(self.c, given)
        spread, sums = dict(given), {}
        for x in ("k", "v"):
            spread[x] = self.heads_of_q(given[x], sizes["hq"])
            sums[x] = spread["d" + x] = self.of_every_head(f"head_d{x}", given, spread[x].layout.shape, sizes)
        super().launch_passes(spread, values)
        for x in ("k", "v"):
            self.add_heads(sums[x], given["d" + x], given.get("cum_seqlen_k"), given["stream"])

    def heads_of_q(self, tensor: cute.Tensor, heads: Any) -> cute.Tensor:
        """K or V, (.., heads, ..), as if each head of Q had its own."""
        shape, stride = list(tensor.shape), list(tensor.stride)
        shape[1], stride[1] = (Int32(heads) // shape[1], shape[1]), (0, stride[1])
        return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))

    def of_every_head(self, region: str, given: Mapping[str, Any], shape: Any, sizes: dict[str, Any]) -> cute.Tensor:
        """A region of the workspace of this shape, in the memory order batch, head, row."""
        (group, heads), width = shape[1], shape[-1]
        rows = shape[0 if self.c.packed else 2]
        head = Int64(rows) * width
        by_head = (head, head * group)
        stride = (width, by_head, 1) if self.c.packed else (head * group * heads, by_head, width, 1)
        first = around.regions_of(self.c, given, {region: (1,)}, sizes)[region].iterator
        return cute.make_tensor(cute.recast_ptr(first, dtype=self.dtype), cute.make_layout(shape, stride=stride))

    def add_heads(self, sums: cute.Tensor, out: cute.Tensor, offsets: Any, stream: Any) -> None:
        """The sum over each group of heads, in their order."""
        sums, out = (sequences.matrix(x, self.c.packed) for x in (sums, out))
        vectors = out.shape[0] * (out.shape[1] // VECTOR)
        grid, shape = around.grid_of(cute.ceil_div(vectors, THREADS), out.shape[2], out.shape[3])
        self.add_group(sums, out, offsets, grid).launch(grid=shape, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def add_group(self, sums: cute.Tensor, out: cute.Tensor, offsets: Any, grid: around.Grid) -> None:
        """One thread has eight elements of a key."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = around.place_in(grid)
        per_key = out.shape[1] // VECTOR
        index = block * THREADS + thread
        key, vector = index // per_key, index % per_key
        keys = Int32(out.shape[0])
        if const_expr(offsets is not None):
            keys = cutlass.min(keys, offsets[offsets.shape[0] - 1])
        if key < keys:
            total = cute.make_rmem_tensor(VECTOR, Float32)
            total.fill(0.0)
            for i in cutlass.range(sums.shape[2][0], unroll=4):
                part = vectors.load(sums[key, None, (i, head), batch], vector)
                total.store(total.load() + part.load().to(Float32))
            vectors.store(total.load(), out[key, None, head, batch], vector)

    name(add_group, "cudnn_compression_add_heads_sm90")
