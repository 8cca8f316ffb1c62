"""Selection attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.errors import make_error
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.object_cache import cache_object, written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.selection import kv_outer
from cudnn.native_sparse_attention.selection.base import LISTS, Selected, of_one_length
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa.base import OFFSETS, checked_scale, keys, queries
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import SelectionConfiguration
from cudnn_kernels.sm90.heuristics.attention import SELECTION_TILES

if TYPE_CHECKING:
    from torch import Tensor, dtype


class SelectionAttention(Selected):
    """Block-sparse attention: each row attends to the keys of its block list; varlen sequences.

        s = scale_softmax * q k^T         in float32, over the keys of the row's blocks
        m = max s                         l = sum exp(s - m)
        o = sum exp(s - m) v / l          the exponentials are rounded to the type of v before the PV GEMM

    Row i of a head of k attends to the blocks ``block_indices[i, h, :block_counts[i, h]]`` of its sequence: block b has
    the keys from ``b * block_size`` on, as far as the sequence goes, or, with ``is_causal``, as far as the row itself.
    A block that is listed twice counts twice; one outside the sequence has no keys. A row without any key gets o = 0,
    l = 0 and m = -inf. The kernel for Blackwell (sm_100a) has run in the emulator only; its products are those of
    warps. A call needs a workspace of 256 bytes, which PyTorch's allocator provides on the stream of the call.

    Args:
        sample_q ... sample_cum_seqlen_k: tensors like those that ``execute`` will get. q and k have the same sequences:
            cum_seqlen_k is None, or equal to cum_seqlen_q.
        max_s_q, max_s_k: the same number; the kernel reads lengths from cum_seqlen.
        acc_dtype: torch.float32. block_size: 16, 32, 64 or 128 keys.
        scale_softmax: above 0. None or 0: 1 / sqrt(d).
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile without a GPU; default: that of the tensors'
            device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``, the
            kernel itself.
        is_causal: rows see no key behind their own place. Existing programs leave such blocks out of the lists.
    """

    title = "selection attention"
    tensors = (
        queries("q", "d"),
        keys("k", "d"),
        keys("v", "dv"),
        queries("o", "dv", written=True, same_dtype=""),
        TensorSpec("l", Contiguous("sq", "hq", alignment=4), ("float32",), written=True),
        TensorSpec("m", Contiguous("sq", "hq", alignment=4), ("float32",), written=True),
        *LISTS,
        OFFSETS[1],
    )
    returns = ("o", "l", "m")
    head_sizes = tuple(SELECTION_TILES)

    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_o: Tensor,
        sample_l: Tensor,
        sample_m: Tensor,
        sample_block_indices: Tensor,
        sample_block_counts: Tensor,
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        max_s_q: int | None = 1024,
        max_s_k: int | None = 1024,
        acc_dtype: dtype = torch.float32,
        block_size: int = 64,
        scale_softmax: float | None = None,
        arch: str | None = None,
        is_causal: bool = False,
    ) -> None:
        if getattr(sample_q, "ndim", 3) == 4:
            got, allowed = f"the shape {tuple(sample_q.shape)}", "(t, h, d), varlen sequences, with cum_seqlen_q"
            hint = "pass q.transpose(1, 2).flatten(0, 1), or call the wrapper"
            raise make_error(NotImplementedError, self._title(), "q tensor", got, allowed, hint)
        super().__init__(locals())
        if max_s_q != max_s_k:
            raise self.unsupported("max_s_q and max_s_k", (max_s_q, max_s_k), "the same number")
        if sample_cum_seqlen_k is not None and sample_cum_seqlen_q is not None:
            one, other = sample_cum_seqlen_q, sample_cum_seqlen_k
            if one is not other and not torch.equal(one, other):
                raise self.unsupported("cum_seqlen_k", "other values than cum_seqlen_q", "None, or the same values")

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        o_tensor: Tensor,
        l_tensor: Tensor,
        m_tensor: Tensor,
        block_indices_tensor: Tensor,
        block_counts_tensor: Tensor,
        cum_seqlen_q_tensor: Tensor | None = None,
        cum_seqlen_k_tensor: Tensor | None = None,
        scale_softmax: float | None = None,
        current_stream: Any = None,
    ) -> None:
        """Writes ``o_tensor``, ``l_tensor`` and ``m_tensor``. See :attr:`FusedAPI.run`.

        ``cum_seqlen_k_tensor`` is not read.
        """
        tensors = (
            q_tensor,
            k_tensor,
            v_tensor,
            o_tensor,
            l_tensor,
            m_tensor,
            block_indices_tensor,
            block_counts_tensor,
            cum_seqlen_q_tensor,
            cum_seqlen_k_tensor,
        )
        self.run(tensors, (checked_scale(self, scale_softmax, positive=True),), current_stream, None)

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        problem = SelectionConfiguration(
            name_of(self.dtype("q")),
            sizes["hq"],
            sizes["hk"],
            sizes["d"],
            sizes["dv"],
            self.block_size,
            self.is_causal,
            out_dtype=name_of(self.dtype("o")),
        )
        return kernel_plan(arch, ARCHITECTURES[arch].attention.configure_selection(problem, sizes["sq"]))

    def reference(self, tensors: Mapping[str, Any]) -> None:
        reference.selection(tensors, tensors["scale_softmax"], self.block_size, self.is_causal)


@of_one_length
def selection_attention_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    block_indices_tensor: Tensor,
    block_counts_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    cum_seqlen_k_tensor: Tensor | None = None,
    block_size: int = 64,
    scale_softmax: float | None = None,
    o_dtype: dtype | None = None,
    acc_dtype: dtype = torch.float32,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    stream: Any = None,
    is_causal: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``o_tensor, l_tensor, m_tensor``.

    Arguments and errors as those of :class:`SelectionAttention`, but that tensors may be (b, h, s, d) too, without
    offsets: sequences of one length, best in the memory order (b, s, h, d). l and m are (t, hq, 1), or (b, hq, s, 1).
    o has ``o_dtype``, or the type of q.
    Where few heads of q share one of k, other kernels compute it if they were faster, which take up to 1 GB more.
    """
    max_s_q = max_s_q if max_s_q is not None else max_s_k
    max_s_k = max_s_k if max_s_k is not None else max_s_q
    SelectionAttention.check_required(q=q_tensor, v=v_tensor)
    rows = q_tensor.shape[:-1]
    o = torch.empty((*rows, v_tensor.shape[-1]), dtype=o_dtype or q_tensor.dtype, device=q_tensor.device)
    sums, maxima = (torch.empty((*rows, 1), dtype=torch.float32, device=q_tensor.device) for _ in range(2))
    qkv, lists = (q_tensor, k_tensor, v_tensor), (block_indices_tensor, block_counts_tensor, cum_seqlen_q_tensor)
    if stream is None and o.dtype == q_tensor.dtype and kv_outer.is_faster(*qkv, block_indices_tensor, block_size):
        tensors, objects = (*qkv, o, sums, maxima, *lists, cum_seqlen_k_tensor), SelectionAttention.objects
        options = (max_s_q, max_s_k, acc_dtype, block_size, scale_softmax)
        named = dict(zip(SelectionAttention.names, tensors, strict=True))
        key = ("by blocks", SelectionAttention.tensor_key(named), options)
        if key not in objects:
            checked = SelectionAttention(*tensors, *options)
            checked.check_support()
            cache_object(objects, key, checked)
        results, scale = (o, sums.squeeze(-1), maxima.squeeze(-1)), objects[key].scale_softmax
        kv_outer.attend(qkv, results, lists, block_size, scale, is_causal)
        return TupleDict(o_tensor=o, l_tensor=sums, m_tensor=maxima)
    return written(SelectionAttention, locals(), o=o, l=sums, m=maxima)
