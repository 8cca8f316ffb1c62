"""Compression attention, backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues, Compressed
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa.base import OFFSETS, Gradients, checked_scale, keys, queries
from cudnn_kernels.architecture import ARCHITECTURES

if TYPE_CHECKING:
    from torch import Tensor

HEADS = ((64, 64), (128, 128))
"""Elements of a head, in Q and K and in V."""


class CompressionAttentionBackward(Gradients, Compressed):
    """The gradients of :class:`CompressionAttention`, whose scales other than ``scale_softmax`` are 1.

        p  = exp(scale_softmax * q k^T - lse)    over the keys that row i sees; d[i] = the sum of o do over row i
        ds = p (do v^T - d)                      p and ds are rounded to the type of q before the GEMMs
        dq = scale_softmax * ds k      dk = scale_softmax * ds^T q      dv = p^T do

    dk and dv are summed over the heads of q that share one of k. On Hopper (sm_90a) each head's are rounded before, and
    dq is added up in float32 in an order that changes from call to call. On Blackwell (sm_100a), where the kernels have
    run in the emulator only, nothing is rounded before and every sum has one order. Heads have 64 or 128 elements;
    offsets are int32. A call needs a workspace, on Hopper of about 4 bytes for every element of q, which PyTorch's
    allocator provides on the stream of the call.

    Args:
        sample_q ... sample_cum_seqlen_k: tensors like those that ``execute`` will get: o, do and dq like q, dk and dv
            like k and v, lse as the forward pass wrote it.
        scale_softmax: None or 0: 1 / sqrt(d).
        arch: as that of :class:`CompressionAttention`.
    """

    title = "compression attention, backward"
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
        *OFFSETS,
    )
    returns = ("dq", "dk", "dv")
    scalars = ("scale_softmax", "right", "left")
    integers = ("right", "left")
    head_sizes = HEADS
    aot_shapes = tuple((256, 16, 1, d) for d, _ in HEADS)

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
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        scale_softmax: float | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__({**locals(), "right": 0, "left": 0})

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
        cum_seqlen_q_tensor: Tensor | None = None,
        cum_seqlen_k_tensor: Tensor | None = None,
        scale_softmax: float | None = None,
        current_stream: Any = None,
    ) -> None:
        """Writes ``dq_tensor``, ``dk_tensor`` and ``dv_tensor``. See :attr:`FusedAPI.run`."""
        ends = (cum_seqlen_q_tensor, cum_seqlen_k_tensor) if self.packed else (None, None)
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
            *ends,
        )
        self.run(tensors, (checked_scale(self, scale_softmax, positive=True), None, None), current_stream, None)

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        dtype, heads = name_of(self.dtype("q")), (sizes["d"], sizes["dv"])
        heuristics = ARCHITECTURES[arch].attention
        return kernel_plan(arch, heuristics.configure_compression_backward(dtype, heads, self.packed))

    def reference(self, tensors: Mapping[str, Any]) -> None:
        reference.compression_backward(tensors, tensors["scale_softmax"], self.packed)


def compression_attention_backward_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    o_tensor: Tensor,
    do_tensor: Tensor,
    lse_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    cum_seqlen_k_tensor: Tensor | None = None,
    scale_softmax: float | None = None,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``dq_tensor, dk_tensor, dv_tensor``.

    Arguments and errors as those of :class:`CompressionAttentionBackward`.
    """
    CompressionAttentionBackward.check_required(q=q_tensor, k=k_tensor, v=v_tensor)
    dq, dk, dv = map(torch.empty_like, (q_tensor, k_tensor, v_tensor))
    return written(CompressionAttentionBackward, locals(), dq=dq, dk=dk, dv=dv)
