"""Attention, backward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Sizes
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa import reference
from cudnn.sdpa.base import OFFSETS, Attention, Gradients, checked_scale, keys, queries, row_values, sinks
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.sm90.heuristics import kv_block_split
from cudnn_kernels.sm90.heuristics.attention import (
    BACKWARD_TILES,
    configure_backward,
    schedules_backward_dynamically,
    sorts_backward_blocks,
)

if TYPE_CHECKING:
    from torch import Tensor, dtype

HEADS = tuple(BACKWARD_TILES)


class SdpaBackward(Gradients, Attention):
    """The gradients of attention.

        p  = exp(scale_softmax * q k^T - lse)    0 where the mask hides a key; d[i] = the sum of o do over row i
        ds = p (do v^T - d)                      p and ds are rounded to the type of q before the GEMMs
        dq = scale_softmax * ds k      dk = scale_softmax * ds^T q      dv = p^T do

    With ``softcap``, t = tanh(scale_softmax q k^T / softcap): p = exp(softcap * t - lse), ds has a factor 1 - t^2.
    lse is taken as it is: p need not sum up to 1. dk and dv are summed over the heads of q that share one of k. With a
    gradient ``dlse`` of lse, d is less by it. With a ``sink``, whose logits lse contains,
    dsink = -sum exp(sink - lse) d over all rows of a head.

    On Hopper (sm_90a), dq is added up in float32, in an order that may change from call to call unless
    ``deterministic``. ``batch_invariant`` is deterministic too, and the gradients of a sequence, save for dsink, have
    the same bits whatever other sequences the call has. The kernels for Blackwell (sm_100a) always sum in the same
    order; they have run in the emulator only, never on a chip.

    Shapes, layouts and arguments are those of :class:`SdpaForward`: o, do and dq like q, dk and dv like k and v; all
    results are overwritten. A call needs a workspace, on Hopper about 4 bytes for every element of q and, for sums of
    split blocks of keys, up to 250 MB more, on Blackwell 8 bytes for every row, which PyTorch's allocator provides on
    the stream of the call.
    """

    deterministic: bool
    batch_invariant: bool
    title = "attention, backward"
    tensors = (
        queries("q", "d"),
        keys("k", "d"),
        keys("v", "dv"),
        queries("o", "dv"),
        queries("do", "dv"),
        row_values(),
        queries("dq", "d", written=True),
        keys("dk", "d", written=True),
        keys("dv", "dv", written=True),
        *OFFSETS,
        row_values("dlse", optional=True),
        sinks(),
        sinks("dsink", written=True),
    )
    returns = ("dq", "dk", "dv")
    scalars = ("scale_softmax", "right", "left", "softcap")
    head_sizes = HEADS
    aot_shapes = (
        *((1, 1, rows, *heads) for heads in HEADS for rows in (128, 2048)),
        *((1, 64, 4096, *heads) for heads in kv_block_split.ORDERED_HEAD_DIMS),
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
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        max_s_q: int | None = None,
        max_s_k: int | None = None,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        dkdv_mma_tiler_mn: tuple[int, int] = (128, 64),
        is_causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        scale_softmax: float | None = None,
        arch: str | None = None,
        deterministic: bool = False,
        top_left: bool = False,
        softcap: float = 0.0,
        sample_dlse: Tensor | None = None,
        sample_sink: Tensor | None = None,
        sample_dsink: Tensor | None = None,
        batch_invariant: bool = False,
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
        cum_seqlen_q_tensor: Tensor | None = None,
        cum_seqlen_k_tensor: Tensor | None = None,
        scale_softmax: float | None = None,
        current_stream: Any = None,
        dlse_tensor: Tensor | None = None,
        sink_tensor: Tensor | None = None,
        dsink_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``dq_tensor``, ``dk_tensor``, ``dv_tensor`` and, with sinks, ``dsink_tensor``. See
        :attr:`FusedAPI.run`.
        """
        self.check_cu_seqlens(cum_seqlen_q_tensor, cum_seqlen_k_tensor)
        tensors = (q_tensor, k_tensor, v_tensor, o_tensor, do_tensor, lse_tensor, dq_tensor, dk_tensor, dv_tensor)
        tensors = (*map(self.squeezed, tensors), cum_seqlen_q_tensor, cum_seqlen_k_tensor)
        tensors = (*tensors, None if dlse_tensor is None else self.squeezed(dlse_tensor), sink_tensor, dsink_tensor)
        self.run(tensors, (checked_scale(self, scale_softmax, positive=False), None, None, None), current_stream, None)

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        tiler = tuple(getattr(self, "dkdv_mma_tiler_mn"))  # noqa: B009
        if tiler != (128, 64):
            raise self.error("dkdv_mma_tiler_mn", tiler, "(128, 64); the kernel chooses its tiles")
        if self.has("sink") != self.has("dsink"):
            got = "sink alone" if self.has("sink") else "dsink alone"
            raise self.error("samples", got, "both sink and dsink, or neither")

    @functools.cached_property
    def constants(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many of the last KV blocks are split, and into how many CTAs each, by the samples' sizes."""
        sizes = super().sizes(self.descs)
        heads = (sizes["d"], sizes["dv"])
        if (self._target() or "sm_90a") != "sm_90a" or heads not in HEADS or self.packed or self.batch_invariant:
            return {"split": 0, "parts": 1}
        c = configure_backward("bfloat16", heads, **self.kernel_options(heads))
        return kv_block_split.split_of_window(c, sizes, self.window, self.expected_num_sms())

    @functools.cached_property
    def ordered_dq(self) -> bool:
        """Whether KV blocks add to dQ in order (dQ_semaphore, deterministic): on request, and where it is faster."""
        sizes = super().sizes(self.descs)
        c = configure_backward("bfloat16", (sizes["d"], sizes["dv"]), **self.ends(), softcap=self.softcap > 0)
        ordered = (
            self.deterministic
            or self.batch_invariant
            or kv_block_split.ordered_dq_is_faster(c, sizes, self.window, self.expected_num_sms())
        )
        self._logger.info("dq is accumulated %s", "in order, deterministic" if ordered else "in any order")
        return ordered

    def kernel_options(self, heads: tuple[int, int]) -> dict[str, Any]:
        """Options of a configuration for Hopper, without split."""
        softcap, right = self.softcap > 0, self.window.right is not None
        options = {"softcap": softcap, "deterministic": self.ordered_dq, **self.row_options()}
        options["one_direction"] = self.batch_invariant
        options["longest_first"] = sorts_backward_blocks(heads, self.packed, right)
        return self.ends() | options | {"dynamic_scheduler": schedules_backward_dynamically(heads, right, softcap)}

    def row_options(self) -> dict[str, bool]:
        """Options of a configuration: what the preprocess kernel reads besides dO and O."""
        return {"dlse": self.has("dlse"), "sink": self.has("sink")}

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        return {**super().sizes(descs), **self.constants}

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        heads, options = (sizes["d"], sizes["dv"]), self.ends() | {"softcap": self.softcap > 0, **self.row_options()}
        if arch == "sm_90a":
            options = self.kernel_options(heads) | {"split": self.constants["split"] > 0}
        configuration = ARCHITECTURES[arch].attention.configure_backward(name_of(self.dtype("q")), heads, **options)
        return kernel_plan(arch, configuration)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        reference.backward(tensors, self.window, tensors["scale_softmax"], self.packed, self.softcap)


class SdpabwdSm100D256(SdpaBackward):
    """:class:`SdpaBackward` for heads of 256 elements, by the name that existing programs use."""

    head_sizes = ((256, 256),)
    as_existing = True
    objects: ClassVar[dict[Any, Any]] = {}


def sdpa_bwd_wrapper_sm100_d256(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    o_tensor: Tensor,
    do_tensor: Tensor,
    lse_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    cum_seqlen_k_tensor: Tensor | None = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    dkdv_mma_tiler_mn: tuple[int, int] = (128, 64),
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale_softmax: float | None = None,
    current_stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``dq_tensor, dk_tensor, dv_tensor``.

    Arguments and errors as those of :class:`SdpaBackward`, for heads of 256 elements.
    """
    SdpabwdSm100D256.check_required(q=q_tensor, k=k_tensor, v=v_tensor)
    dq, dk, dv = map(torch.empty_like, (q_tensor, k_tensor, v_tensor))
    return written(SdpabwdSm100D256, locals(), dq=dq, dk=dk, dv=dv)
