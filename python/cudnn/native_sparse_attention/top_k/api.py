"""Top-k reduction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.api_base import TupleDict
from cudnn.deprecation import renamed_arguments
from cudnn.errors import checked_number, make_error
from cudnn.fused.layouts import Sizes, TensorSpec
from cudnn.fused.object_cache import written
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention import reference
from cudnn.native_sparse_attention.base import AnyRowValues, Compressed
from cudnn.runtime.call import KernelPlan, kernel_plan
from cudnn.sdpa.base import OFFSETS, keys, queries
from cudnn.sdpa.layouts import Heads
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import ALWAYS, TopKConfiguration
from cudnn_kernels.sm90.heuristics.attention import TOP_K_TILES

if TYPE_CHECKING:
    from torch import Tensor, dtype

MOST = 64  # blocks that a warp keeps


def check_lists(api: Any) -> None:
    """Raises for lists that no kernel makes: too long, or of blocks that do not hold whole compressed keys."""
    if not 0 < api.k_value <= MOST:
        raise api.error("k_value", api.k_value, f"1 to {MOST}")
    block, stride = api.selection_block_size, api.compress_stride
    if stride <= 0 or block <= 0 or block % stride:
        allowed = "a block that is a multiple of the stride"
        raise api.error("selection_block_size and compress_stride", f"{block} and {stride}", allowed)


def check_choice(
    where: str,
    block_size: int,
    compress_stride: int,
    selected_blocks: int,
    window_size: int,
    most: int | None = None,
    has_lists: bool = False,
) -> None:
    """Raises for what operators do not take of blocks, of which ``most`` fit into a list, and of the window. Where a
    call with its own lists, none are selected.
    """
    arguments = {"block_size": block_size, "compress_stride": compress_stride, "selected_blocks": selected_blocks}
    for name, value in {**arguments, "window_size": window_size}.items():
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):  # torch.compile traces this
            checked_number(where, name, value, integer=True)
    if window_size < 1:
        raise make_error(ValueError, where, "window_size", window_size, "1 and more")
    if block_size < 1 or (not has_lists and (compress_stride < 1 or block_size % compress_stride)):
        got = f"{block_size} and {compress_stride}"
        raise make_error(ValueError, where, "block_size and compress_stride", got, "a block that is a multiple")
    if not has_lists and (selected_blocks <= ALWAYS or (most is not None and selected_blocks > most)):
        allowed = f"more than {ALWAYS}" if most is None else f"{ALWAYS + 1} to {most}"
        raise make_error(ValueError, where, "selected_blocks", selected_blocks, allowed)


class TopKReduction(Compressed):
    """The blocks of keys that each row should attend to: those with the largest probabilities of compressed keys.

        p[i, j] = sum over the heads of q that share one of k: exp2(scale_softmax * log2(e) * q[i] k[j]^T + lse[i])
        score[i, b] = sum of p[i, j] over the n = selection_block_size / compress_stride keys of block b, from b * n on

    ``lse`` is minus the log-sum-exp of compression attention, times log2(e). Candidates of row i are the blocks
    ``0 < b < (i + 1) // selection_block_size - 2`` that have a key: the first block, and the newest, are always
    attended to. ``topk_scores`` are the ``k_value`` largest scores, in descending order, of equal ones the lower block;
    ``topk_indices`` are their blocks. Missing candidates: -inf and -1. All keys of a candidate lie before
    the row, so ``is_causal`` changes nothing. The kernel for Blackwell (sm_100a) has run in the emulator only; its
    products are those of warps.

    With ``include_fixed_blocks``, ``topk_indices`` are (.., 4 + k), what selection attention needs: the first block,
    the newest ones, which are those from ``(i + 1) // selection_block_size - 2`` on, then the best; -1 for none.
    ``lse`` is then the natural log-sum-exp, as compression attention wrote it.

    | tensor                    | one length             | packed, with offsets | type                              |
    |---------------------------|------------------------|----------------------|-----------------------------------|
    | q                         | (b, hq, sq, d)         | (tq, hq, d)          | float16, bfloat16                 |
    | k                         | (b, hk, sk, d)         | (tk, hk, d)          | that of q                         |
    | lse                       | (b, hq, sq)            | (tq, hq[, 1])        | float32, with any strides         |
    | topk_scores, topk_indices | (b, hk, sq, k)         | (tq, hk, k)          | float32, int32                    |
    | cum_seqlen                | ignored, with a notice | (b + 1,)             | int32: 0, then where sequences end |

    Tensors (b, h, s, d) are transposed (b, s, h, d) ones. Heads h * hq / hk ... of q share head h of k, as in all of
    our attention. (Other implementations take every hk-th head.)

    Args:
        sample_q ... sample_cum_seqlen_k: tensors like those that ``execute`` will get.
        max_s_q, max_s_k: not needed. acc_dtype: torch.float32. mma_tiler_mn: (128, 128); the kernel chooses its tiles.
        k_value: 1 to 64. selection_block_size: rows of a block, a multiple of compress_stride.
        compress_stride: rows for each compressed key.
        scale_softmax: above 0. None or 0: 1 / sqrt(d).
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile without a GPU; default: that of the tensors'
            device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``, the
            kernel itself.
    """

    title = "top-k reduction"
    uncompiled = ValueError
    tensors = (
        queries("q", "d"),
        keys("k", "d"),
        TensorSpec("lse", AnyRowValues(), ("float32",)),
        TensorSpec("topk_scores", Heads("sq", "hk", "count", 4), ("float32",), written=True),
        TensorSpec("topk_indices", Heads("sq", "hk", "listed", 4), ("int32",), written=True),
        *OFFSETS,
    )
    returns = ("topk_scores", "topk_indices")
    scalars = ("scale_softmax",)
    fixed = ("hq", "hk", "d")
    aliases = {"cumulative_s_q_tensor": "cum_seqlen_q", "cumulative_s_k_tensor": "cum_seqlen_k"}  # noqa: RUF012
    most_heads = 128
    head_sizes = tuple((d,) for d in TOP_K_TILES)
    aot_shapes = ((512, 64, 4, 128), (512, 16, 1, 128))

    k_value: int
    selection_block_size: int
    compress_stride: int
    include_fixed_blocks: bool

    @renamed_arguments(whole_lists="include_fixed_blocks")
    def __init__(
        self,
        sample_q: Tensor,
        sample_k: Tensor,
        sample_lse: Tensor,
        sample_topk_scores: Tensor,
        sample_topk_indices: Tensor,
        sample_cum_seqlen_q: Tensor | None = None,
        sample_cum_seqlen_k: Tensor | None = None,
        max_s_q: int | None = None,
        max_s_k: int | None = None,
        acc_dtype: dtype = torch.float32,
        k_value: int = 16,
        selection_block_size: int = 64,
        compress_stride: int = 32,
        is_causal: bool = True,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        scale_softmax: float | None = None,
        arch: str | None = None,
        include_fixed_blocks: bool = False,
    ) -> None:
        super().__init__(locals())

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_tensor: Tensor,
        k_tensor: Tensor,
        lse_tensor: Tensor,
        topk_scores_tensor: Tensor,
        topk_indices_tensor: Tensor,
        cumulative_s_q_tensor: Tensor | None = None,
        cumulative_s_k_tensor: Tensor | None = None,
        current_stream: Any = None,
    ) -> None:
        """Writes ``topk_scores_tensor`` and ``topk_indices_tensor``. See :attr:`FusedAPI.run`.

        Raises:
            ValueError: also where it is not compiled yet.
        """
        ends = (cumulative_s_q_tensor, cumulative_s_k_tensor) if self.packed else (None, None)
        lse = self.taken("lse", lse_tensor)
        self.run(
            (q_tensor, k_tensor, lse, topk_scores_tensor, topk_indices_tensor, *ends), (None,), current_stream, None
        )

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        listed = self.k_value + ALWAYS * self.include_fixed_blocks
        return {**super().sizes(descs), "count": self.k_value, "listed": listed}

    def check_options(self) -> None:
        super().check_options()
        check_lists(self)

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        ratio, most = self.selection_block_size // self.compress_stride, TOP_K_TILES[sizes["d"]][1]
        if ratio > most:
            raise self.unsupported("selection_block_size / compress_stride", ratio, f"at most {most}")

    def plan(self, arch: str, sizes: Sizes) -> KernelPlan:
        problem = TopKConfiguration(
            name_of(self.dtype("q")),
            sizes["hq"],
            sizes["hk"],
            sizes["d"],
            self.k_value,
            self.selection_block_size,
            self.compress_stride,
            self.packed,
            full_list=self.include_fixed_blocks,
        )
        return kernel_plan(arch, ARCHITECTURES[arch].attention.configure_top_k(problem))

    def reference(self, tensors: Mapping[str, Any]) -> None:
        blocks = self.selection_block_size, self.compress_stride
        reference.top_k(
            tensors, tensors["scale_softmax"], *blocks, self.k_value, self.packed, self.include_fixed_blocks
        )


@renamed_arguments(whole_lists="include_fixed_blocks")
def topk_reduction_wrapper(
    q_tensor: Tensor,
    k_tensor: Tensor,
    lse_tensor: Tensor,
    cum_seqlen_q_tensor: Tensor | None = None,
    cum_seqlen_k_tensor: Tensor | None = None,
    max_s_q: int | None = None,
    max_s_k: int | None = None,
    acc_dtype: dtype = torch.float32,
    k_value: int = 16,
    selection_block_size: int = 64,
    compress_stride: int = 32,
    is_causal: bool = True,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    scale_softmax: float | None = None,
    current_stream: Any = None,
    include_fixed_blocks: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``topk_scores_tensor, topk_indices_tensor``. Arguments and errors as those of :class:`TopKReduction`.
    """
    TopKReduction.check_required(q=q_tensor, k=k_tensor)
    packed, heads = q_tensor.ndim == 3, k_tensor.shape[1]
    rows = (q_tensor.shape[0],) if packed else (q_tensor.shape[0], q_tensor.shape[2])
    scores = torch.empty((*rows, heads, k_value), dtype=torch.float32, device=q_tensor.device)
    listed = k_value + ALWAYS * include_fixed_blocks
    indices = torch.empty((*rows, heads, listed), dtype=torch.int32, device=q_tensor.device)
    if not packed:
        scores, indices = scores.transpose(1, 2), indices.transpose(1, 2)
    return written(TopKReduction, locals(), topk_scores=scores, topk_indices=indices)
