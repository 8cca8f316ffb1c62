"""Compression attention and the top-k reduction in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.fused.layouts import Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues, Compressed
from cudnn.native_sparse_attention.top_k.api import check_lists
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa.base import OFFSETS, keys, queries
from cudnn.sdpa.layouts import Heads
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import ALWAYS
from cudnn_kernels.sm90.heuristics.attention import COMPRESSION_TOP_K_KEYS, compression_top_k_tile_n

if TYPE_CHECKING:
    from torch import Tensor

HEADS = ((64, 64), (128, 128))
"""Elements of a head, in Q and K and in V."""
MOST_HEADS = 64


class CompressionTopK(Compressed):
    """:class:`CompressionAttention` and :class:`TopKReduction` with whole lists, for sequences of few compressed keys.

    Each sequence has at most 128 of them, which fit a tile of the kernel: it reads Q and computes scores once. Blocks'
    scores are sums of the probabilities of compression attention, so of keys that a row sees there. Sequences are
    packed. The kernel for Blackwell (sm_100a) has run in the emulator only.

    | tensor       | shape           | type                                 |
    |--------------|-----------------|--------------------------------------|
    | q, o         | (tq, hq, d)     | float16, bfloat16                    |
    | k, v         | (tk, hk, d)     | that of q                            |
    | lse          | (tq, hq[, 1])   | float32, with any strides            |
    | topk_indices | (tq, hk, 4 + k) | int32                                |
    | cum_seqlen   | (b + 1,)        | int32: 0, then where sequences end   |

    d is 64 or 128. At most 64 heads of q share one of k.

    Args:
        sample_q ... sample_cum_seqlen_k: tensors like those that ``execute`` will get.
        k_value: 1 to 64. selection_block_size: rows of a block, a multiple of compress_stride.
        compress_stride: rows for each compressed key.
        max_s_k: most compressed keys of a sequence, up to 128. On a GPU nothing checks this: of a longer sequence the
            first 64 or 128 keys are attended to, and only their blocks can be among the best. None: the rows of k, of
            which later calls may have up to 64, or up to 128 if the samples have more.
        scale_softmax: above 0. None or 0: 1 / sqrt(d).
        arch: as that of :class:`CompressionAttention`.
    """

    title = "compression attention with top-k reduction"
    tensors = (
        queries("q", "d"),
        keys("k", "d"),
        keys("v", "dv"),
        queries("o", "dv", written=True),
        TensorSpec("lse", AnyRowValues(), ("float32",), written=True),
        TensorSpec("topk_indices", Heads("sq", "hk", "listed", 4), ("int32",), written=True),
        *OFFSETS,
    )
    returns = ("o", "lse", "topk_indices")
    scalars = ("scale_softmax",)
    fixed = ("hq", "hk", "d", "dv")
    most_heads = MOST_HEADS
    head_sizes = HEADS
    aot_shapes = tuple((rows, 64, 4, d) for rows in (4096, 8192) for d, _ in HEADS)

    k_value: int
    selection_block_size: int
    compress_stride: int
    max_s_k: int | None

    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_v: Tensor,
        sample_o: Tensor,
        sample_lse: Tensor,
        sample_topk_indices: Tensor,
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        k_value: int = 12,
        selection_block_size: int = 64,
        compress_stride: int = 64,
        max_s_k: int | None = None,
        scale_softmax: float | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        v_tensor: Tensor,
        o_tensor: Tensor,
        lse_tensor: Tensor,
        topk_indices_tensor: Tensor,
        cum_seqlen_q_tensor: Tensor,
        cum_seqlen_k_tensor: Tensor,
        current_stream: Any = None,
    ) -> None:
        """Writes ``o_tensor``, ``lse_tensor`` and ``topk_indices_tensor``. See :attr:`FusedAPI.run`."""
        tensors = (
            q_tensor,
            k_tensor,
            v_tensor,
            o_tensor,
            self.taken("lse", lse_tensor),
            topk_indices_tensor,
            cum_seqlen_q_tensor,
            cum_seqlen_k_tensor,
        )
        self.run(tensors, (None,), current_stream, None)

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        return {**super().sizes(descs), "listed": self.k_value + ALWAYS}

    def check_options(self) -> None:
        if not self.packed:
            raise self.error("q tensor", "four dimensions", "varlen sequences: (t, h, d) and cu_seqlens")
        super().check_options()
        check_lists(self)

    def most_keys(self, sizes: Sizes) -> int:
        """The most compressed keys of a sequence."""
        return sizes["sk"] if self.max_s_k is None else self.max_s_k

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        if sizes["sq"] and not sizes["sk"]:
            hint = "use CompressionAttention and TopKReduction"
            raise self.unsupported("compressed keys", "0 rows of k", "1 row and more", hint)
        most, sampled = self.most_keys(sizes), self.most_keys(self.sizes(self.descs))
        if most > max(compression_top_k_tile_n(sampled), sampled):
            got, hint = f"{most} rows of k", "pass max_s_k"
            raise self.error(
                "compressed keys", got, f"at most {compression_top_k_tile_n(sampled)}, after samples of {sampled}", hint
            )

    def check_values(self, tensors: Sequence[Any]) -> None:
        super().check_values(tensors)
        ends, most = tensors[self.names.index("cum_seqlen_k")], self.most_keys(self.sizes_now(tensors))
        longest = int(ends.flatten().diff().max())
        if longest > most:
            raise self.error("compressed keys of a sequence", longest, f"at most {most}, as max_s_k says")

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        if self.most_keys(sizes) > COMPRESSION_TOP_K_KEYS[-1]:
            got, hint = self.most_keys(sizes), "use CompressionAttention and TopKReduction"
            raise self.unsupported("compressed keys of a sequence", got, f"at most {COMPRESSION_TOP_K_KEYS[-1]}", hint)

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        configuration = ARCHITECTURES[arch].attention.configure_compression_top_k(
            self.most_keys(sizes),
            dtype=name_of(self.dtype("q")),
            heads=sizes["hq"],
            key_heads=sizes["hk"],
            head_dim=sizes["d"],
            head_dim_v=sizes["dv"],
            count=self.k_value,
            block=self.selection_block_size,
            stride=self.compress_stride,
        )
        return kernel_plan(arch, configuration)

    def reference(self, tensors: Mapping[str, Any]) -> None:
        scale, blocks = tensors["scale_softmax"], (self.selection_block_size, self.compress_stride)
        reference.compression(tensors, scale, 1.0, True)
        q, k = tensors["q"], tensors["k"]
        scores = torch.empty((q.shape[0], k.shape[1], self.k_value), dtype=torch.float32, device=q.device)
        reference.top_k({**tensors, "topk_scores": scores}, scale, *blocks, self.k_value, True, True)

    @classmethod
    def usual_sizes(cls, shape: tuple[int, ...]) -> Iterable[dict[str, int]]:
        return [{**sizes, "sk": sizes["sq"] // 64} for sizes in super().usual_sizes(shape) if sizes["packed"]]


def compression_top_k_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor,
    cum_seqlen_k_tensor: Tensor,
    k_value: int = 12,
    selection_block_size: int = 64,
    compress_stride: int = 64,
    max_s_k: int | None = None,
    scale_softmax: float | None = None,
    current_stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``o_tensor, lse_tensor,
    topk_indices_tensor``, where lse is (t, hq).

    Arguments and errors as those of :class:`CompressionTopK`.
    """
    CompressionTopK.check_required(q=q_tensor, k=k_tensor)
    rows, device = q_tensor.shape[0], q_tensor.device
    o, lse = torch.empty_like(q_tensor), torch.empty(q_tensor.shape[:2], dtype=torch.float32, device=device)
    listed = torch.empty((rows, k_tensor.shape[1], ALWAYS + k_value), dtype=torch.int32, device=device)
    return written(CompressionTopK, locals(), o=o, lse=lse, topk_indices=listed)
