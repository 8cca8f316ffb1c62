"""Writes new keys and values into a KV cache, behind those of each sequence: memory-bound, 16 bytes a thread.

Nothing is written for a sequence without room for its new keys, whose length becomes ``INVALID_SEQLEN``, nor into a
page that does not exist: the split-KV kernel makes the results of both NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr, select_

from cudnn_kernels.attention import INVALID_SEQLEN
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.vectors import VECTOR

THREADS = 128


class AppendKV(Kernel):
    """The kernel for one :class:`AppendConfiguration`."""

    def launch(self, arguments: Mapping[str, Any]) -> None:
        batches, rows, heads, _ = arguments["k"].shape
        lanes = (self.c.head_dim + self.c.head_dim_v) // VECTOR
        tensors = [arguments[x] for x in ("k", "v", "k_cache", "v_cache", "seqlen_k", "new_seqlen_k")]
        self.kernel(*tensors, arguments.get("page_table")).launch(
            grid=[cute.ceil_div(batches * rows * heads * lanes, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
        )

    @cute.kernel
    def kernel(
        self,
        k: cute.Tensor,
        v: cute.Tensor,
        k_cache: cute.Tensor,
        v_cache: cute.Tensor,
        seqlens: cute.Tensor,
        new_seqlens: cute.Tensor,
        page_table: Any,
    ) -> None:
        """k and v are (b, rows, heads, head_dim), the caches (pages, keys of a page, heads, head_dim)."""
        (thread, cta), (batches, rows, heads, _) = thread_block_idx(), k.shape
        columns, columns_v = self.c.head_dim // VECTOR, self.c.head_dim_v // VECTOR
        index = cta * THREADS + thread
        index, column = index // (columns + columns_v), index % (columns + columns_v)
        index, head = index // heads, index % heads
        batch, row = index // rows, index % rows
        if batch < batches:
            page_size, seqlen = k_cache.shape[1], Int32(seqlens[batch])
            capacity = page_size * (page_table.shape[1] if const_expr(page_table is not None) else 1)
            fits = (seqlen >= 0) & (seqlen <= capacity - rows)
            if (row == 0) & (head == 0) & (column == 0):
                new_seqlens[batch] = Int32(select_(fits, seqlen + rows, Int32(INVALID_SEQLEN)))
            if fits:
                page, position = Int32(batch), seqlen + row
                if const_expr(page_table is not None):
                    page, position = Int32(page_table[batch, position // page_size]), position % page_size
                if (page >= 0) & (page < k_cache.shape[0]):
                    if column < columns:
                        self.copy(k[batch, row, head, None], k_cache[page, position, head, None], column)
                    else:
                        self.copy(v[batch, row, head, None], v_cache[page, position, head, None], column - columns)

    def copy(self, source: cute.Tensor, target: cute.Tensor, column: Int32) -> None:
        """Copies a vector of a row."""
        vectors.store(vectors.load(source, column).load(), target, column)

    set_kernel_name(kernel, "cudnn_attention_append_kv")
