"""Attention, forward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa import reference
from cudnn.sdpa.base import OFFSETS, TYPES, Attention, checked_scale, keys, queries, row_values, sinks
from cudnn.sdpa.layouts import HeadValues
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention import DESCALES, MAX_SPLIT_ROWS, DecodeConfiguration
from cudnn_kernels.sm90.heuristics.attention import FORWARD_TILES

if TYPE_CHECKING:
    from torch import Tensor, dtype

HEADS = tuple(FORWARD_TILES)
ALL_TYPES = (*TYPES, "float8_e4m3fn", "float8_e5m2")


class SdpaForward(Attention):
    """The forward pass of attention, dense or varlen.

        s   = scale_softmax * q k^T          in float32, -inf where the mask hides a key
        o   = scale_output * softmax(s) v    the exponentials are rounded to the type of v before the PV GEMM
        lse = ln sum exp(s)                  natural, over the keys of a row

    With ``softcap``, s becomes softcap * tanh(s / softcap) before the mask. With a ``sink``, every row's softmax has
    one more logit, its head's, without a value: exp(sink) joins the denominator and lse.

    A row that sees no key gets o = 0 and lse = -inf, or the sink. The kernel for Blackwell (sm_100a) has run in the
    emulator only, never on a chip.

    | tensor     | dense                           | varlen                    | type                              |
    |------------|---------------------------------|---------------------------|-----------------------------------|
    | q          | (b, hq, sq, d)                  | (tq, hq, d)               | float16, bfloat16, or 8 bits      |
    | k, v       | (b, hk, sk, d), (b, hk, sk, dv) | (tk, hk, d), (tk, hk, dv) | that of q                         |
    | o          | (b, hq, sq, dv)                 | (tq, hq, dv)              | that of q; float16, bfloat16      |
    | lse        | (b, hq, sq)                     | (tq, hq)                  | float32                           |
    | cum_seqlen | none                            | (b + 1,)                  | int32: 0, then where sequences end |
    | sink       | (hq,), or none                  | (hq,), or none            | float32                           |
    | seqlen_k   | (b,), or none                   | none                      | int32                             |
    | page_table | (b, pages), or none             | none                      | int32                             |
    | descales   | (b, hk), or none                | (b, hk), or none          | float32                           |

    Matrices may have any strides with a last one of 1 and others that are multiples of 16 bytes. A varlen lse lies
    head by head in memory, whatever its strides say: ``lse.view(hq, tq).t()`` has them by row and head. hq
    is a multiple of hk. A compiled object serves tensors of all sizes but d and dv.

    On Hopper q, k and v may be float8_e4m3fn or float8_e5m2, with descales, by which they are multiplied: that of q,
    too, has a value for each head of k. The exponentials are multiplied by 2^8 before they are rounded. o is float16 or
    bfloat16 then.

    Args:
        sample_q ... sample_cum_seqlen_k: tensors like those that ``execute`` will get.
        max_s_q, max_s_k: at least the lengths of the longest sequences, which the kernel reads from cum_seqlen.
        qk_acc_dtype, pv_acc_dtype: torch.float32. mma_tiler_mn: (128, 128); the kernel chooses its own tiles.
        is_causal: row i of q sees the keys up to i + sk - sq: the diagonal ends in the lower right corner.
        window_size: (left, right): row i sees the keys from i + sk - sq - left to i + sk - sq + right; -1: no end on
            that side. With ``is_causal`` the right end is 0, and may be given as -1.
        scale_softmax: None or 0: 1 / sqrt(d).
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile without a GPU; default: that of the tensors'
            device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``, the
            kernel itself.
        softcap: 0 for none. sample_sink: a tensor like the logits of the sinks, if there are any.
        sample_seqlen_k: a tensor like the lengths of the sequences' keys, if k and v are caches with room for more: a
            sequence has its first seqlen_k keys, and its diagonal ends at the last of them.
        sample_page_table: a tensor like the table of pages, if k is a pool (pages, hk, page, d), and so v: key i of a
            sequence is row i % page of the page ``page_table[sequence, i // page]``. Entries beyond a sequence's length
            are not read. A page has a power of 2 of keys, 8 or more. Needs ``sample_seqlen_k``.
        num_splits: CTAs that share a sequence's keys where rows are few, or keys a cache; 0: from the samples' sizes.
            The result is the same bit for bit with the same number.
        top_left: the diagonal begins in the upper left corner: row i stands at key i, not at i + sk - sq.
        sample_descale_q, sample_descale_k, sample_descale_v: tensors like the descales, of any strides: one for all
            heads is ``descale.expand(b, hk)``. Needed with 8 bits.
    """

    scale_softmax: float
    num_splits: int
    title = "attention, forward"
    tensors = (
        queries("q", "d", types=ALL_TYPES),
        keys("k", "d", batch="bk", types=ALL_TYPES),
        keys("v", "dv", batch="bk", types=ALL_TYPES),
        queries("o", "dv", written=True, same_dtype=""),
        row_values(written=True),
        *OFFSETS,
        sinks(),
        TensorSpec("seqlen_k", Contiguous("b", alignment=4), ("int32",), optional=True),
        TensorSpec("page_table", Contiguous("b", "pages", alignment=4), ("int32",), optional=True),
        *[TensorSpec(name, HeadValues(), ("float32",), optional=True) for name in DESCALES],
    )
    counted_by = ("page_table",)
    returns = ("o", "lse")
    scalars = ("scale_softmax", "scale_output", "right", "left", "softcap")
    head_sizes = HEADS
    aot_shapes = tuple((1, 1, 128, *heads) for heads in HEADS)

    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_o: Tensor,
        sample_lse: Tensor,
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        max_s_q: int | None = None,
        max_s_k: int | None = None,
        qk_acc_dtype: dtype = torch.float32,
        pv_acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        is_causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        scale_softmax: float | None = None,
        scale_output: float = 1.0,
        arch: str | None = None,
        softcap: float = 0.0,
        sample_sink: Tensor | None = None,
        sample_seqlen_k: Tensor | None = None,
        sample_page_table: Tensor | None = None,
        num_splits: int = 0,
        top_left: bool = False,
        sample_descale_q: Tensor | None = None,
        sample_descale_k: Tensor | None = None,
        sample_descale_v: Tensor | None = None,
    ) -> None:
        super().__init__(locals())

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        o_tensor: Tensor,
        lse_tensor: Tensor,
        cum_seqlen_q_tensor: Tensor | None = None,
        cum_seqlen_k_tensor: Tensor | None = None,
        scale_softmax: float | None = None,
        scale_output: float | None = None,
        current_stream: Any = None,
        sink_tensor: Tensor | None = None,
        seqlen_k_tensor: Tensor | None = None,
        page_table_tensor: Tensor | None = None,
        descale_q_tensor: Tensor | None = None,
        descale_k_tensor: Tensor | None = None,
        descale_v_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``o_tensor`` and ``lse_tensor``. See :attr:`FusedAPI.run`. None: what the constructor got."""
        self.check_cu_seqlens(cum_seqlen_q_tensor, cum_seqlen_k_tensor)
        tensors = (q_tensor, k_tensor, v_tensor, o_tensor, lse_tensor)
        tensors = (*map(self.squeezed, tensors), cum_seqlen_q_tensor, cum_seqlen_k_tensor, sink_tensor)
        tensors = (*tensors, seqlen_k_tensor, page_table_tensor, descale_q_tensor, descale_k_tensor, descale_v_tensor)
        scale = checked_scale(self, scale_softmax, positive=True)
        self.run(tensors, (scale, scale_output, None, None, None), current_stream, None)

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        page = self.sizes(self.descs)["sk"]
        if self.has("page_table") and sizes["sk"] != page:
            raise self.error("page_table", f"pages of {sizes['sk']} keys", f"pages of {page} keys, as the samples'")

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        checked_scale(self, self.scale_softmax, positive=True)
        cached, paged = self.has("seqlen_k"), self.has("page_table")
        if cached and self.packed:
            raise self.unsupported("seqlen_k", "lengths with cum_seqlen_k", "one of the two")
        if paged and not cached:
            raise self.error("page_table", "no lengths with it", "sample_seqlen_k too")
        if paged and (sizes["sk"] < 8 or sizes["sk"] & (sizes["sk"] - 1)):
            raise self.error("page_table", f"pages of {sizes['sk']} keys", "pages of a power of 2 of keys, 8 or more")
        if not 0 <= self.num_splits <= 256:
            raise self.error("num_splits", self.num_splits, "1 to 256, or 0 to let the samples' sizes decide")
        if not self.eight_bits and self.dtype("o") != self.dtype("q"):
            raise self._refuse("o tensor dtype", self.dtype("o"), self.dtype("q"))
        for name in DESCALES:
            if self.has(name) != self.eight_bits:
                got, allowed = ("none", "a tensor") if self.eight_bits else ("a tensor", "none")
                raise self.error(f"{name} of q, k and v in {name_of(self.dtype('q'))}", got, allowed)
        if self.eight_bits and (cached or self.as_existing):
            what = "caches" if cached else "this class; SdpaForward takes it"
            raise self.unsupported("q tensor dtype", name_of(self.dtype("q")), f"float16, bfloat16 with {what}")

    @property
    def eight_bits(self) -> bool:
        """Whether q, k and v have 8 bits."""
        return self.dtype("q").itemsize == 1

    def decodes(self, sizes: Sizes) -> bool:
        """Whether CTAs split a sequence's keys."""
        qhead_per_kvhead = sizes["hq"] // max(sizes["hk"], 1)
        splits_keys = not self.packed and not self.eight_bits and qhead_per_kvhead * sizes["sq"] <= MAX_SPLIT_ROWS
        return self.has("seqlen_k") or splits_keys

    @functools.cached_property
    def constants(self) -> Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How many CTAs split a sequence's keys."""
        if self.num_splits:
            return {"splits": self.num_splits}
        arch, sizes = ARCHITECTURES[self._target() or "sm_90a"], super().sizes(self.descs)
        heads, kv_heads = (sizes["d"], sizes["dv"]), sizes["b"] * sizes["hk"]
        rows = -(-sizes["sq"] * sizes["hq"] // max(sizes["hk"], 1))
        return {"splits": arch.attention.num_splits(heads, rows, kv_heads, self.longest[1], self.expected_num_sms())}

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        return {**super().sizes(descs), **self.constants}

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        if self.decodes(sizes):
            return kernel_plan(arch, self.decode(arch, sizes))
        dtype, heads = name_of(self.dtype("q")), (sizes["d"], sizes["dv"])
        options: dict[str, Any] = {"softcap": self.softcap > 0, "sink": self.has("sink")}
        if self.eight_bits:
            if arch != "sm_90a":
                raise self.unsupported("q tensor dtype", dtype, f"float16, bfloat16 on {arch}; 8 bits on sm_90a")
            options["out_dtype"] = name_of(self.dtype("o"))
        heuristics = ARCHITECTURES[arch].attention
        return kernel_plan(arch, heuristics.configure_forward(dtype, heads, self.ends(), **options))

    def decode(self, arch: str, sizes: Sizes) -> DecodeConfiguration:
        """What the kernel for few rows, or caches, is compiled for."""
        return ARCHITECTURES[arch].attention.configure_decode(
            name_of(self.dtype("q")),
            (sizes["d"], sizes["dv"]),
            sizes["hq"] // max(sizes["hk"], 1) * sizes["sq"],
            self.ends(),
            softcap=self.softcap > 0,
            sink=self.has("sink"),
            cached=self.has("seqlen_k"),
            page_size=sizes["sk"] if self.has("page_table") else 0,
        )

    def reference(self, tensors: Mapping[str, Any]) -> None:
        scales = tensors["scale_softmax"], tensors["scale_output"], self.softcap
        reference.forward(tensors, self.window, *scales, self.packed)


class SdpafwdSm100D256(SdpaForward):
    """:class:`SdpaForward` for heads of 256 elements, by the name that existing programs use.

    It takes windows with ``is_causal`` alone, whose right end is 0 whatever is given.
    """

    head_sizes = ((256, 256),)
    as_existing = True
    objects: ClassVar[dict[Any, Any]] = {}


def sdpa_fwd_wrapper_sm100_d256(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    cum_seqlen_k_tensor: Tensor | None = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    qk_acc_dtype: dtype = torch.float32,
    pv_acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale_softmax: float | None = None,
    scale_output: float = 1.0,
    current_stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``o_tensor, lse_tensor``.

    Arguments and errors as those of :class:`SdpaForward`, for heads of 256 elements. Nothing is recorded for autograd.
    """
    SdpafwdSm100D256.check_required(q=q_tensor)
    o = torch.empty_like(q_tensor)
    lse = torch.empty(lse_shape(q_tensor, cum_seqlen_q_tensor), dtype=torch.float32, device=q_tensor.device)
    return written(SdpafwdSm100D256, locals(), o=o, lse=lse)


def lse_shape(q: Any, ends: Any) -> tuple[int, ...]:
    """That of the row values for a q."""
    if ends is not None:
        return tuple(q.shape[-3:-1])
    return tuple(q.shape[:3])
