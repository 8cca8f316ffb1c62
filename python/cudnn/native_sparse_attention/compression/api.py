"""Compression attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues, Compressed
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa.base import OFFSETS, TYPES, checked_scale, keys, queries
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.sm90.heuristics.attention import COMPRESSION_TILES

if TYPE_CHECKING:
    from torch import Tensor, dtype

HEADS = tuple(COMPRESSION_TILES)
_TYPES = (*TYPES, "float8_e4m3fn")
_SCALES = ("scale_q", "scale_k", "scale_v", "inv_scale_o", "scale_softmax")


class CompressionAttention(Compressed):
    """Attention to compressed keys, each of which stands for r = sq // sk rows, forward.

        s   = scale_q * scale_k * scale_softmax * q k^T     in float32, over the keys j <= (i + 1) // r - 1 of row i
        o   = scale_v * inv_scale_o * softmax(s) v          the exponentials are rounded to the type of v before, 2^8
                                                            times as large if it has 8 bits
        lse = ln sum exp(s)

    r is that of each sequence, and at least 1. A row that sees no key gets o = 0 and lse = -inf. The kernel for
    Blackwell (sm_100a) has run in the emulator only.

    | tensor     | one length             | packed, with offsets | type                                                |
    |------------|------------------------|----------------------|-----------------------------------------------------|
    | q, o       | (b, hq, sq, d)         | (tq, hq, d)          | each float16, bfloat16 or float8_e4m3fn             |
    | k, v       | (b, hk, sk, d)         | (tk, hk, d)          | that of q                                           |
    | lse        | (b, hq, sq[, 1])       | (tq, hq[, 1])        | float32, with any strides; may be None              |
    | cum_seqlen | ignored, with a notice | (b + 1,)             | int32 or int64: 0, then where sequences end         |

    Tensors (b, h, s, d) are transposed (b, s, h, d) ones. d is 32, 64 or 128. Offsets may have more dimensions, of size
    1. A compiled object serves all other sizes.

    Args:
        sample_q ... sample_cum_seqlen_k: tensors like those that ``execute`` will get.
        qk_acc_dtype, pv_acc_dtype: torch.float32. mma_tiler_mn: (128, 128); the kernel chooses its tiles.
        is_persistent: changes nothing.
        scale_q, scale_k, scale_v, inv_scale_o: scales as above. scale_softmax: None or 0: 1 / sqrt(d).
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile without a GPU; default: that of the tensors'
            device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``, the
            kernel itself.
    """

    title = "compression attention"
    uncompiled = ValueError
    tensors = (
        queries("q", "d", types=_TYPES),
        keys("k", "d", types=_TYPES),
        keys("v", "dv", types=_TYPES),
        queries("o", "dv", written=True, types=_TYPES, same_dtype=""),
        TensorSpec("lse", AnyRowValues(), ("float32",), optional=True, written=True),
        *(replace(spec, types=("int32", "int64")) for spec in OFFSETS),
    )
    returns = ("o", "lse")
    scalars = ("scale_softmax", "scale_output", "right", "left")
    integers = ("right", "left")
    head_sizes = HEADS
    aot_shapes = tuple((256, 16, 1, d) for d, _ in HEADS)

    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_o: Tensor,
        sample_lse: Tensor | None = None,
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        qk_acc_dtype: dtype = torch.float32,
        pv_acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        is_persistent: bool = False,
        scale_q: float = 1.0,
        scale_k: float = 1.0,
        scale_v: float = 1.0,
        inv_scale_o: float = 1.0,
        scale_softmax: float | None = None,
        arch: str | None = None,
    ) -> None:
        arguments = dict(locals())
        arguments["scale_softmax"] = checked_scale(self, scale_softmax, positive=False) or sample_q.shape[-1] ** -0.5
        self.scales = {name: self.checked_number(name, arguments[name]) for name in _SCALES}
        scale, scale_output = self.products()
        super().__init__({**arguments, "scale_softmax": scale, "scale_output": scale_output, "right": 0, "left": 0})

    def products(self, **arguments: float | None) -> tuple[float, float]:
        """The scales of scores and results; a call's replace the constructor's."""
        x = {**self.scales, **{n: self.checked_number(n, value) for n, value in arguments.items() if value is not None}}
        scale = x["scale_q"] * x["scale_k"] * x["scale_softmax"]
        if not scale > 0:
            raise self.error("scale_q * scale_k * scale_softmax", scale, "numbers above 0")
        return scale, x["scale_v"] * x["inv_scale_o"]

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        o_tensor: Tensor,
        lse_tensor: Tensor | None = None,
        cum_seqlen_q_tensor: Tensor | None = None,
        cum_seqlen_k_tensor: Tensor | None = None,
        current_stream: Any = None,
        scale_q: float | None = None,
        scale_k: float | None = None,
        scale_v: float | None = None,
        inv_scale_o: float | None = None,
        scale_softmax: float | None = None,
    ) -> None:
        """Writes ``o_tensor`` and ``lse_tensor``. See :attr:`FusedAPI.run`. None: what the constructor got.

        Raises:
            ValueError: also where it is not compiled yet.
        """
        scales = (None, None)
        if (scale_q, scale_k, scale_v, inv_scale_o, scale_softmax) != (None,) * 5:
            scales = self.products(
                scale_q=scale_q,
                scale_k=scale_k,
                scale_v=scale_v,
                inv_scale_o=inv_scale_o,
                scale_softmax=checked_scale(self, scale_softmax, positive=False),
            )
        ends = (cum_seqlen_q_tensor, cum_seqlen_k_tensor) if self.packed else (None, None)
        tensors = (q_tensor, k_tensor, v_tensor, o_tensor, self.taken("lse", lse_tensor), *ends)
        self.run(tensors, (*scales, None, None), current_stream, None)

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        dtypes = {name: self.dtype(name) for name in ("cum_seqlen_q", "cum_seqlen_k")}
        if len(set(dtypes.values())) > 1:
            raise self.error("cum_seqlen_q and cum_seqlen_k", tuple(dtypes.values()), "one type for both")

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        ends = self.dtype("cum_seqlen_q")
        configuration = ARCHITECTURES[arch].attention.configure_compression(
            name_of(self.dtype("q")),
            (sizes["d"], sizes["dv"]),
            name_of(self.dtype("o")),
            varlen=self.packed,
            lse="by strides" if self.has("lse") else "",
            cu_seqlens_dtype=name_of(ends) if ends is not None else "int32",
        )
        return kernel_plan(arch, configuration)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        reference.compression(tensors, tensors["scale_softmax"], tensors["scale_output"], self.packed)


def compression_attention_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    cum_seqlen_k_tensor: Tensor | None = None,
    enable_lse: bool = False,
    o_dtype: dtype | None = None,
    qk_acc_dtype: dtype = torch.float32,
    pv_acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    is_persistent: bool = False,
    scale_q: float = 1.0,
    scale_k: float = 1.0,
    scale_v: float = 1.0,
    inv_scale_o: float = 1.0,
    scale_softmax: float | None = None,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``o_tensor, lse_tensor``.

    ``lse_tensor`` is None unless ``enable_lse``; for varlen sequences it is (t, hq, 1), one head after the other in
    memory. Arguments and errors as those of :class:`CompressionAttention`. o has ``o_dtype``, or the type of q.
    """
    CompressionAttention.check_required(q=q_tensor)
    o, lse = torch.empty_like(q_tensor, dtype=o_dtype or q_tensor.dtype), None
    if enable_lse:
        shape = q_tensor.shape[:-1] if q_tensor.ndim == 4 else (1, q_tensor.shape[1], q_tensor.shape[0])
        lse = torch.empty(shape, dtype=torch.float32, device=q_tensor.device)
        lse = lse if q_tensor.ndim == 4 else lse.permute(2, 1, 0)
    return written(CompressionAttention, locals(), o=o, lse=lse)
