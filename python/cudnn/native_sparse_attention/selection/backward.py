"""Selection attention, backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.objects import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues
from cudnn.native_sparse_attention.selection.base import LISTS, Selected, of_one_length
from cudnn.native_sparse_attention.selection.inverse import choosing_rows
from cudnn.runtime.call import Plan, kernel_plan
from cudnn.sdpa.base import checked_scale, keys, queries
from cudnn_kernels.attention.sparse import LIST_CHUNK, SelectionBackwardConfiguration

if TYPE_CHECKING:
    from torch import Tensor

TILES: dict[tuple[int, int], dict[str, Any]] = {
    (64, 64): {"tile": (128, 64), "stages": 4},
    (128, 128): {"tile": (128, 64), "stages": 4},
    (192, 128): {"tile": (128, 64), "stages": 3},
    (256, 256): {"tile": (64, 64), "stages": 2},
}
"""Rows and keys of a step, and buffers, for dq by head sizes."""
MOST_HEADS = 64
LEAST_PART, PARTS = 512, 1024
"""Rows of a list that are worth a CTA, and into so many parts the wrapper divides lists where there are enough rows."""


class SelectionAttentionBackward(Selected):
    """The gradients of :class:`SelectionAttention`.

        p  = exp(scale_softmax * q k^T - lse)    over the keys of a row's blocks; d[i] = the sum of o do over row i
        ds = p (do v^T - d)                      p and ds are rounded to the type of q before the products
        dq = scale_softmax * ds k      dk = scale_softmax * ds^T q      dv = p^T do

    dk and dv are summed over the heads of q that share one of k and over the rows that chose a block, in one order:
    results do not change from call to call. Rows behind the last sequence are left as they are. The kernels for
    Blackwell (sm_100a) have run in the emulator only. A call needs a workspace of 8 bytes for every row of every head
    of q, and 512 (d + dv) / part for every entry of the lists, twice that for blocks of 128, which PyTorch's allocator
    provides on the stream of the call.

    Args:
        sample_q ... sample_cum_seqlen_q: tensors like those that ``execute`` will get. o, do and dq are like q, dk and
            dv like k and v. lse is (t, hq), ``m + l.log()`` of the forward pass.
        sample_choosing, sample_choosing_ends: the rows that chose each block, from
            :func:`cudnn.NSA.choosing_rows` with the same lists.
        block_size, scale_softmax, is_causal, arch: as those of :class:`SelectionAttention`.
        part: rows of a block's list that the kernel takes at a time: that of ``choosing_rows``. Small ones spread short
            sequences over the multiprocessors; they take more workspace.
        adds: gradients are added to what their tensors have.
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
        TensorSpec("choosing_ends", Contiguous("numbered", "columns", alignment=4), ("int32",)),
    )
    returns = ("dq", "dk", "dv")
    most_heads = MOST_HEADS
    head_sizes = tuple(TILES)

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
        found = super().sizes_of(shapes, options)
        rows, heads = found["sq"], found["hk"]
        numbered = heads * (rows // options["block_size"] + found["ends"] - 1) + 1
        return {**found, "numbered": numbered, "s": rows, "columns": 3, "choices": rows * heads * found["chosen"]}

    def plan(self, arch: str, sizes: Sizes) -> Plan:
        heads = (sizes["d"], sizes["dv"])
        configuration = SelectionBackwardConfiguration(
            name_of(self.dtype("q")),
            sizes["hq"],
            sizes["hk"],
            *heads,
            self.block_size,
            self.is_causal,
            list_chunk=self.part,
            adds=self.adds,
            **TILES[heads],
        )
        return kernel_plan(arch, configuration)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        rest = tensors["scale_softmax"], self.block_size, self.is_causal
        with reference.added(tensors, self.returns if self.adds else ()) as own:
            reference.selection_backward(own, *rest)


def turned_around(indices: Any, counts: Any, ends: Any, block_size: int, is_causal: bool) -> tuple[int, Any, Any]:
    """A number of rows of a part that fills the GPU, and what ``choosing_rows`` makes of lists with it."""
    part = LIST_CHUNK
    while part > LEAST_PART and part * PARTS > indices.numel():
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
    """Allocates the results, compiles where that was not done yet, and executes.

    Returns ``dq_tensor, dk_tensor, dv_tensor``: those that they are ``added_to``, if given. ``chosen_by``: what
    :func:`turned_around` returned for the lists, unless that is to be called here; both are of packed tensors.
    Arguments and errors as those of :class:`SelectionAttentionBackward`, but that tensors may be (b, h, s, d) too,
    without offsets.
    """
    SelectionAttentionBackward.check_needed(q=q_tensor, k=k_tensor, v=v_tensor)
    dq, dk, dv = added_to or map(torch.empty_like, (q_tensor, k_tensor, v_tensor))
    lists = (block_indices_tensor, block_counts_tensor, cum_seqlen_q_tensor)
    part, choosing_tensor, choosing_ends_tensor = chosen_by or turned_around(*lists, block_size, is_causal)
    adds = added_to is not None
    return written(SelectionAttentionBackward, locals(), dq=dq, dk=dk, dv=dv)
