"""Selection attention, backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.deprecation import renamed_arguments
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues
from cudnn.native_sparse_attention.selection.base import LISTS, Selected, of_one_length
from cudnn.native_sparse_attention.selection.csr_transpose import transpose_selection
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa.base import checked_scale, keys, queries
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import LIST_CHUNK, SelectionBackwardConfiguration
from cudnn_kernels.sm90.heuristics.attention import SELECTION_BACKWARD_TILES

if TYPE_CHECKING:
    from torch import Tensor

MOST_HEADS = 64
MIN_CHUNK, NUM_CHUNKS = 512, 1024
"""The least rows of a list for a CTA, and the number of chunks that the wrapper aims at."""


class SelectionAttentionBackward(Selected):
    """The gradients of :class:`SelectionAttention`.

        p  = exp(scale_softmax * q k^T - lse)    over the keys of a row's blocks; d[i] = the sum of o do over row i
        ds = p (do v^T - d)                      p and ds are rounded to the type of q before the GEMMs
        dq = scale_softmax * ds k      dk = scale_softmax * ds^T q      dv = p^T do

    dk and dv are summed over the heads of q that share one of k and over the rows whose lists have a block, in a fixed
    order (deterministic). Rows after the last sequence are not written. The kernels for Blackwell (sm_100a) have run in
    the emulator only. A call allocates a workspace of 8 bytes for every row of every head of q, and 512 (d + dv) /
    chunk_size bytes for every list entry, twice that for blocks of 128, on the stream of the call.

    Args:
        sample_q ... sample_cum_seqlen_q: tensors like those that ``execute`` will get. o, do and dq are like q, dk and
            dv like k and v. lse is (t, hq), ``m + l.log()`` of the forward pass.
        sample_query_indices, sample_query_offsets: the CSR transpose of the lists (for each KV block, the query rows
            that select it), from :func:`cudnn.NSA.transpose_selection` with the same lists.
        block_size, scale_softmax, is_causal, arch: as those of :class:`SelectionAttention`.
        chunk_size: query rows of a block that a CTA processes: that of ``transpose_selection``. Small chunks spread
            short sequences over more SMs and take more workspace.
        accumulate: accumulates into the gradients' tensors.
    """

    title = "selection attention, backward"
    tensors = (
        queries("q", "d"),
        keys("k", "d"),
        keys("v", "dv"),
        queries("o", "dv"),
        queries("do", "dv"),
        TensorSpec("lse", AnyRowValues(), ("float32",)),
        queries("dq", "d", written=True),
        keys("dk", "d", written=True),
        keys("dv", "dv", written=True),
        *LISTS,
        TensorSpec("query_indices", Contiguous("list_entries", alignment=4), ("int32",)),
        TensorSpec("query_offsets", Contiguous("block_ends", "columns", alignment=4), ("int32",)),
    )
    returns = ("dq", "dk", "dv")
    most_heads = MOST_HEADS
    head_sizes = tuple(SELECTION_BACKWARD_TILES)

    chunk_size: int
    accumulate: bool

    @renamed_arguments(
        sample_choosing="sample_query_indices",
        sample_choosing_ends="sample_query_offsets",
        part="chunk_size",
        adds="accumulate",
    )
    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_o: Tensor,
        sample_do: Tensor,
        sample_lse: Tensor,
        sample_dq: Tensor,
        sample_dk: Tensor,
        sample_dv: Tensor,
        sample_block_indices: Tensor,
        sample_block_counts: Tensor,
        sample_cum_seqlen_q: Tensor,
        sample_query_indices: Tensor,
        sample_query_offsets: Tensor,
        block_size: int = 64,
        scale_softmax: float | None = None,
        arch: str | None = None,
        is_causal: bool = False,
        chunk_size: int = LIST_CHUNK,
        accumulate: bool = False,
    ) -> None:
        super().__init__(locals())

    @renamed_arguments(choosing_tensor="query_indices_tensor", choosing_ends_tensor="query_offsets_tensor")
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        o_tensor: Tensor,
        do_tensor: Tensor,
        lse_tensor: Tensor,
        dq_tensor: Tensor,
        dk_tensor: Tensor,
        dv_tensor: Tensor,
        block_indices_tensor: Tensor,
        block_counts_tensor: Tensor,
        cum_seqlen_q_tensor: Tensor,
        query_indices_tensor: Tensor,
        query_offsets_tensor: Tensor,
        scale_softmax: float | None = None,
        current_stream: Any = None,
    ) -> None:
        """Writes ``dq_tensor``, ``dk_tensor`` and ``dv_tensor``. See :attr:`FusedAPI.run`."""
        tensors = (
            q_tensor,
            k_tensor,
            v_tensor,
            o_tensor,
            do_tensor,
            self.taken("lse", lse_tensor),
            dq_tensor,
            dk_tensor,
            dv_tensor,
            block_indices_tensor,
            block_counts_tensor,
            cum_seqlen_q_tensor,
            query_indices_tensor,
            query_offsets_tensor,
        )
        self.run(tensors, (checked_scale(self, scale_softmax, positive=True),), current_stream, None)

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        sizes = super().sizes_of(shapes, options)
        rows, heads = sizes["sq"], sizes["hk"]
        blocks = heads * (rows // options["block_size"] + sizes["ends"] - 1) + 1
        entries = rows * heads * sizes["list_len"]
        return {**sizes, "block_ends": blocks, "s": rows, "columns": 3, "list_entries": entries}

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        problem = SelectionBackwardConfiguration(
            name_of(self.dtype("q")),
            sizes["hq"],
            sizes["hk"],
            sizes["d"],
            sizes["dv"],
            self.block_size,
            self.is_causal,
            list_chunk=self.chunk_size,
            accumulate=self.accumulate,
        )
        return kernel_plan(arch, ARCHITECTURES[arch].attention.configure_selection_backward(problem))

    def reference(self, tensors: Mapping[str, Any]) -> None:
        rest = tensors["scale_softmax"], self.block_size, self.is_causal
        with reference.added(tensors, self.returns if self.accumulate else ()) as targets:
            reference.selection_backward(targets, *rest)


def csr_transpose(indices: Any, counts: Any, ends: Any, block_size: int, is_causal: bool) -> tuple[int, Any, Any]:
    """The chunk size that fills the GPU, and the results of ``transpose_selection`` for it."""
    chunk_size = LIST_CHUNK
    while chunk_size > MIN_CHUNK and chunk_size * NUM_CHUNKS > indices.numel():
        chunk_size //= 2
    return chunk_size, *transpose_selection(indices, counts, ends, block_size, is_causal, chunk_size)


@renamed_arguments(added_to="accumulate_into", chosen_by="transposed_lists")
@of_one_length
def selection_attention_backward_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    o_tensor: Tensor,
    do_tensor: Tensor,
    lse_tensor: Tensor,
    block_indices_tensor: Tensor,
    block_counts_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    block_size: int = 64,
    scale_softmax: float | None = None,
    is_causal: bool = False,
    stream: Any = None,
    accumulate_into: tuple[Tensor, Tensor, Tensor] | None = None,
    transposed_lists: tuple[int, Tensor, Tensor] | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``dq_tensor, dk_tensor, dv_tensor``; ``accumulate_into``: tensors to accumulate into instead.
    ``transposed_lists``: the result of :func:`csr_transpose` for the lists, computed here if None; both are for varlen
    tensors. Arguments and errors as those of :class:`SelectionAttentionBackward`; tensors may also be (b, h, s, d),
    without cu_seqlens.
    """
    SelectionAttentionBackward.check_required(q=q_tensor, k=k_tensor, v=v_tensor)
    dq, dk, dv = accumulate_into or map(torch.empty_like, (q_tensor, k_tensor, v_tensor))
    lists = (block_indices_tensor, block_counts_tensor, cum_seqlen_q_tensor)
    transposed_lists = transposed_lists or csr_transpose(*lists, block_size, is_causal)
    chunk_size, query_indices_tensor, query_offsets_tensor = transposed_lists
    accumulate = accumulate_into is not None
    return written(SelectionAttentionBackward, locals(), dq=dq, dk=dk, dv=dv)
