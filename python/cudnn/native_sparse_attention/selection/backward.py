"""Selection attention, backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues
from cudnn.native_sparse_attention.selection.base import LISTS, Selected, of_one_length
from cudnn.native_sparse_attention.selection.csr_transpose import choosing_rows
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
    the emulator only. A call allocates a workspace of 8 bytes for every row of every head of q, and 512 (d + dv) / part
    bytes for every list entry, twice that for blocks of 128, on the stream of the call.

    Args:
        sample_q ... sample_cum_seqlen_q: tensors like those that ``execute`` will get. o, do and dq are like q, dk and
            dv like k and v. lse is (t, hq), ``m + l.log()`` of the forward pass.
        sample_choosing, sample_choosing_ends: the CSR transpose of the lists (block to rows), from
            :func:`cudnn.NSA.choosing_rows` with the same lists.
        block_size, scale_softmax, is_causal, arch: as those of :class:`SelectionAttention`.
        part: rows of a block's list that a CTA processes: that of ``choosing_rows``. Small chunks spread short
            sequences over more SMs and take more workspace.
        adds: accumulates into the gradients' tensors.
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
        TensorSpec("choosing", Contiguous("choices", alignment=4), ("int32",)),
        TensorSpec("choosing_ends", Contiguous("block_ends", "columns", alignment=4), ("int32",)),
    )
    returns = ("dq", "dk", "dv")
    most_heads = MOST_HEADS
    head_sizes = tuple(SELECTION_BACKWARD_TILES)

    part: int
    adds: bool

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
        sample_choosing: Tensor,
        sample_choosing_ends: Tensor,
        block_size: int = 64,
        scale_softmax: float | None = None,
        arch: str | None = None,
        is_causal: bool = False,
        part: int = LIST_CHUNK,
        adds: bool = False,
    ) -> None:
        super().__init__(locals())

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
        choosing_tensor: Tensor,
        choosing_ends_tensor: Tensor,
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
            choosing_tensor,
            choosing_ends_tensor,
        )
        self.run(tensors, (checked_scale(self, scale_softmax, positive=True),), current_stream, None)

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        sizes = super().sizes_of(shapes, options)
        rows, heads = sizes["sq"], sizes["hk"]
        blocks = heads * (rows // options["block_size"] + sizes["ends"] - 1) + 1
        return {**sizes, "block_ends": blocks, "s": rows, "columns": 3, "choices": rows * heads * sizes["chosen"]}

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        problem = SelectionBackwardConfiguration(
            name_of(self.dtype("q")),
            sizes["hq"],
            sizes["hk"],
            sizes["d"],
            sizes["dv"],
            self.block_size,
            self.is_causal,
            list_chunk=self.part,
            adds=self.adds,
        )
        return kernel_plan(arch, ARCHITECTURES[arch].attention.configure_selection_backward(problem))

    def reference(self, tensors: Mapping[str, Any]) -> None:
        rest = tensors["scale_softmax"], self.block_size, self.is_causal
        with reference.added(tensors, self.returns if self.adds else ()) as targets:
            reference.selection_backward(targets, *rest)


def csr_transpose(indices: Any, counts: Any, ends: Any, block_size: int, is_causal: bool) -> tuple[int, Any, Any]:
    """The chunk size that fills the GPU, and the results of ``choosing_rows`` for it."""
    part = LIST_CHUNK
    while part > MIN_CHUNK and part * NUM_CHUNKS > indices.numel():
        part //= 2
    return part, *choosing_rows(indices, counts, ends, block_size, is_causal, part)


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
    added_to: tuple[Tensor, Tensor, Tensor] | None = None,
    chosen_by: tuple[int, Tensor, Tensor] | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``dq_tensor, dk_tensor, dv_tensor``; ``added_to``: tensors to accumulate into instead. ``chosen_by``: the
    result of :func:`csr_transpose` for the lists, computed here if None; both are for varlen tensors. Arguments and
    errors as those of :class:`SelectionAttentionBackward`; tensors may also be (b, h, s, d), without cu_seqlens.
    """
    SelectionAttentionBackward.check_required(q=q_tensor, k=k_tensor, v=v_tensor)
    dq, dk, dv = added_to or map(torch.empty_like, (q_tensor, k_tensor, v_tensor))
    lists = (block_indices_tensor, block_counts_tensor, cum_seqlen_q_tensor)
    part, choosing_tensor, choosing_ends_tensor = chosen_by or csr_transpose(*lists, block_size, is_causal)
    adds = added_to is not None
    return written(SelectionAttentionBackward, locals(), dq=dq, dk=dk, dv=dv)
