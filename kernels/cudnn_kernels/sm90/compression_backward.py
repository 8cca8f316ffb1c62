"""NSA compression attention on Hopper, backward.

There are few compressed keys and many rows: n_blocks times heads of K are fewer than SMs. So a CTA of
:mod:`cudnn_kernels.sm90.attention_backward` has an n_block for one head of Q alone, and another kernel reduces the
heads of a GQA group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cudnn_kernels.attention import flash_bwd_preprocess, seqlen_info
from cudnn_kernels.attention.sparse import CompressionBackwardConfiguration
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_backward import AttentionBackward

THREADS = 128


class CompressionBackward(AttentionBackward):
    """The kernels for one :class:`CompressionBackwardConfiguration`."""

    c: CompressionBackwardConfiguration

    def launch_main(self, arguments: Mapping[str, Any], workspace: flash_bwd_preprocess.BwdWorkspace) -> None:
        """The main kernel sees one head of K and V per head of Q, with stride 0 within the GQA group."""
        sizes = flash_bwd_preprocess.workspace_sizes(self.c, arguments)
        expanded, per_head = dict(arguments), {}
        for x in ("k", "v"):
            expanded[x] = self.expand_kv_heads(arguments[x], sizes["hq"])
            per_head[x] = expanded["d" + x] = self.per_head_tensor(
                f"head_d{x}", arguments, expanded[x].layout.shape, sizes
            )
        super().launch_main(expanded, workspace)
        for x in ("k", "v"):
            self.reduce_heads(per_head[x], arguments["d" + x], arguments.get("cum_seqlen_k"), arguments["stream"])

    def expand_kv_heads(self, tensor: cute.Tensor, heads: Any) -> cute.Tensor:
        """K or V, (.., heads, ..), expanded to the heads of Q."""
        shape, stride = list(tensor.shape), list(tensor.stride)
        shape[1], stride[1] = (Int32(heads) // shape[1], shape[1]), (0, stride[1])
        return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))

    def per_head_tensor(
        self, region: str, arguments: Mapping[str, Any], shape: Any, sizes: dict[str, Any]
    ) -> cute.Tensor:
        """A region of the workspace of this shape, in memory order batch, head, row."""
        (group, heads), width = shape[1], shape[-1]
        rows = shape[0 if self.c.varlen else 2]
        head = Int64(rows) * width
        head_strides = (head, head * group)
        stride = (width, head_strides, 1) if self.c.varlen else (head * group * heads, head_strides, width, 1)
        pointer = flash_bwd_preprocess.workspace_tensors(self.c, arguments, {region: (1,)}, sizes)[region].iterator
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=self.dtype), cute.make_layout(shape, stride=stride))

    def reduce_heads(self, per_head: cute.Tensor, out: cute.Tensor, cu_seqlens: Any, stream: Any) -> None:
        """Launches the sum over each group of heads, in order."""
        per_head, out = (seqlen_info.as_sdhb(x, self.c.varlen) for x in (per_head, out))
        vectors = out.shape[0] * (out.shape[1] // VECTOR)
        grid, shape = flash_bwd_preprocess.make_grid(cute.ceil_div(vectors, THREADS), out.shape[2], out.shape[3])
        self.reduce_heads_kernel(per_head, out, cu_seqlens, grid).launch(
            grid=shape, block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def reduce_heads_kernel(
        self, per_head: cute.Tensor, out: cute.Tensor, cu_seqlens: Any, grid: flash_bwd_preprocess.FlatGrid
    ) -> None:
        """A thread has eight elements of a key."""
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = flash_bwd_preprocess.grid_coord(grid)
        per_key = out.shape[1] // VECTOR
        index = block * THREADS + thread
        key, vector = index // per_key, index % per_key
        keys = Int32(out.shape[0])
        if const_expr(cu_seqlens is not None):
            keys = cutlass.min(keys, cu_seqlens[cu_seqlens.shape[0] - 1])
        if key < keys:
            acc = cute.make_rmem_tensor(VECTOR, Float32)
            acc.fill(0.0)
            for i in cutlass.range(per_head.shape[2][0], unroll=4):
                fragment = vectors.load(per_head[key, None, (i, head), batch], vector)
                acc.store(acc.load() + fragment.load().to(Float32))
            vectors.store(acc.load(), out[key, None, head, batch], vector)

    set_kernel_name(reduce_heads_kernel, "cudnn_nsa_compression_reduce_heads")
