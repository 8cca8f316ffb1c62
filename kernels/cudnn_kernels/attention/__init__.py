"""Compile-time configurations of the attention kernels of every architecture. Plain data, no CuTe DSL.

Tensors have PyTorch's layouts: (b, h, s, d), or (t, h, d) with ``cu_seqlens`` for ``varlen`` batches. With GQA or MQA,
``hq / hk`` heads of Q share a head of K and V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudnn_kernels.formats import FORMATS
from cudnn_kernels.signature import NUM_SMS, Region, Scalar, Sizes, Slot, Stream, Tensor, Workspace, vector


def head_tensors(
    varlen: bool, dtype: str, size: str, heads: str | int, names: dict[str, int], align: int = 16
) -> Iterator[Tensor]:
    """Declares tensors whose last mode is the head dimension, with stride 1."""
    for name, head in names.items():
        shape = (size, heads, head) if varlen else ("b", heads, size, head)
        yield Tensor(name, dtype, shape, (*[None] * (len(shape) - 1), 1), align)


def cu_seqlens(varlen: bool, dtype: str = "int32") -> tuple[Tensor, ...]:
    """The cumulative sequence lengths of a varlen batch, (b + 1,): empty for sequences of one length."""
    names = ("cum_seqlen_q", "cum_seqlen_k") if varlen else ()
    return tuple(vector(name, dtype, "ends") for name in names)


def row_values(varlen: bool, name: str, heads: str | int = "hq") -> Tensor:
    """Declares a float32 value per query row and head, such as the LSE: (b, h, s), or (t, h) in any order."""
    return Tensor(name, "float32", ("sq", heads) if varlen else ("b", heads, "sq"), (None,) * (3 - varlen), align=4)


HeadDims = tuple[int, int]
"""The head dimension of Q and K, and that of V and O."""
MAX_SPLIT_ROWS = 64
"""Rows of all heads of Q that share one of K up to which CTAs split the keys."""
WINDOW = (Scalar("right", "int32"), Scalar("left", "int32"))
"""``window_size``: how many keys a row sees on either side of its diagonal. Unused on a side without a bound."""


@dataclass(frozen=True)
class AttentionConfiguration:
    """Options of the forward and the backward pass. ``head_dim`` is that of Q and K, ``head_dim_v`` that of V and O.

    ``right`` and ``left``: the window has a bound on that side; a causal mask is a right bound of 0. ``compressed``:
    keys are NSA's compressed keys, one for a number of rows, and a row sees the complete ones. ``lse``: the layout of a
    varlen LSE, "by head" (contiguous per head, whatever its strides are) or "by strides"; "" is no LSE. ``top_left``:
    the diagonal begins at the first row and key, else it ends at the last ones. ``softcap``: scores s become softcap *
    tanh(s / softcap) before the mask.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    tile: tuple[int, int]
    varlen: bool = False
    right: bool = False
    left: bool = False
    compressed: bool = False
    lse: str = "by head"
    top_left: bool = False
    softcap: bool = False


DESCALES = "descale_q", "descale_k", "descale_v"


@dataclass(frozen=True)
class ForwardConfiguration(AttentionConfiguration):
    """O = softmax(scale Q K^T + mask) V.

    ``tile`` is (tile_m, tile_n). ``sink``: each head has an extra logit without a value. ``dynamic_scheduler``:
    persistent CTAs take varlen tiles from an atomic counter. ``loop_bounds_in_registers``: bounds of the n_block loops
    stay in registers and pipeline counts are unsigned, which saves instructions in every iteration.
    ``n_blocks_per_warpgroup``: each MMA warpgroup processes the n_blocks that its own 64 rows need, without ping-pong;
    not for fp8. ``out_dtype`` is the type of O if it is not that of Q.
    """

    stages: int = 2
    sink: bool = False
    cu_seqlens_dtype: str = "int32"
    dynamic_scheduler: bool = False
    loop_bounds_in_registers: bool = False
    n_blocks_per_warpgroup: bool = False
    out_dtype: str = ""

    kernel = "attention_forward:AttentionForward"

    @property
    def descaled(self) -> bool:
        """Whether Q, K and V have descales, one for each sequence and head of K."""
        return FORMATS[self.dtype].bits == 8 and not self.compressed

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *head_tensors(self.varlen, self.dtype, "sq", "hq", {"q": self.head_dim}),
            *head_tensors(self.varlen, self.dtype, "sk", "hk", {"k": self.head_dim, "v": self.head_dim_v}),
            *head_tensors(self.varlen, self.out_dtype or self.dtype, "sq", "hq", {"o": self.head_dim_v}),
            *([row_values(self.varlen, "lse")] if self.lse else []),
            *cu_seqlens(self.varlen, self.cu_seqlens_dtype),
            *([Tensor(x, "float32", ("b", "hk"), (None, None), 4) for x in DESCALES] if self.descaled else []),
            *[vector("sink", "float32", "hq")] * self.sink,
            Scalar("scale_softmax", "float32"),
            Scalar("scale_output", "float32"),
            *WINDOW,
            *[Scalar("softcap", "float32")] * self.softcap,
            NUM_SMS,
            *[Workspace((Region("tile_order", self.order_bytes),))] * self.dynamic_scheduler,
            Stream(),
        )

    def order_bytes(self, sizes: Sizes) -> Any:
        """Two int32 for each tile of a varlen batch, and two for the header."""
        return 8 * (1 + sizes["sq"] // self.tile[0] + sizes["b"])


def region(name: str, element_bytes: int, *shape: str) -> Region:
    """A region of the workspace: ``element_bytes`` for every element of a shape, whose modes are sizes by name."""
    return Region(name, lambda sizes: math.prod((sizes[x] for x in shape), start=element_bytes))


@dataclass(frozen=True)
class DecodeConfiguration(ForwardConfiguration):
    """Split-KV (flash-decoding): several CTAs split a sequence's keys, and a second kernel combines their results.

    All heads of Q that share a head of K are rows of one tile (PackGQA). ``cached``: K and V are a cache, and every
    sequence has a length. With a ``page_size``, the cache is paged, K is (pages, hk, page_size, d), and there is a page
    table.
    """

    cached: bool = False
    page_size: int = 0

    kernel = "attention_decode:AttentionDecode"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        kv_shape = ("pages", "hk", self.page_size) if self.page_size else ("b", "hk", "sk")
        shapes = {name: ("b", "hq", "sq", head) for name, head in (("q", self.head_dim), ("o", self.head_dim_v))}
        shapes |= {"k": (*kv_shape, self.head_dim), "v": (*kv_shape, self.head_dim_v)}
        return (
            *[Tensor(name, self.dtype, shapes[name], (None, None, None, 1)) for name in "qkvo"],
            row_values(False, "lse"),
            *[vector("seqlen_k", "int32", "b")] * self.cached,
            *[Tensor("page_table", "int32", ("b", "pages of one"), (None, 1), align=4)] * (self.page_size > 0),
            *[vector("sink", "float32", "hq")] * self.sink,
            Scalar("scale_softmax", "float32"),
            Scalar("scale_output", "float32"),
            *WINDOW,
            *[Scalar("softcap", "float32")] * self.softcap,
            Scalar("splits", "int32"),
            Workspace(self.regions()),
            Stream(),
        )

    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: O and LSE of every row and split."""
        per_row = "splits", "b", "hq", "sq"
        return region("o_partial", 4 * self.head_dim_v, *per_row), region("lse_partial", 4, *per_row)


INVALID_SEQLEN = -1
"""The length of a sequence that its cache cannot have."""


@dataclass(frozen=True)
class AppendConfiguration:
    """Writes new keys and values into a cache: (b, keys, hk, d), or (pages, page, hk, d) if it is ``paged``.

    ``new_seqlen_k`` receives the lengths with the new keys.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    paged: bool

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        tensors = {"k": ("b", "new"), "v": ("b", "new"), "k_cache": ("pages", "page"), "v_cache": ("pages", "page")}
        heads = {"k": self.head_dim, "v": self.head_dim_v}
        return (
            *[Tensor(x, self.dtype, (*rows, "hk", heads[x[0]]), (None, None, None, 1)) for x, rows in tensors.items()],
            *[vector(name, "int32", "b") for name in ("seqlen_k", "new_seqlen_k")],
            *[Tensor("page_table", "int32", ("b", "pages of one"), (None, 1), align=4)] * self.paged,
            Stream(),
        )


@dataclass(frozen=True)
class BackwardConfiguration(AttentionConfiguration):
    """dQ, dK and dV.

    ``tile`` is (tile_m, tile_n): query rows of an iteration, keys of a CTA. ``pair``: the two CTAs of a cluster
    exchange dS through distributed shared memory. ``deterministic``: a semaphore orders the additions to dQ by n_block.
    ``v_in_registers``: V is a register operand of dP = V dO^T, not one in shared memory; not with ``pair``. ``split``:
    the m_blocks of each of the last ``split`` n_blocks are split among ``parts`` CTAs (or pairs). ``shared_dq_accum``:
    dQ's accumulator is in the workspace of another pass. This pass accumulates to it ("accumulate") or, if one n_block
    covers all keys, stores it ("store"). ``dynamic_scheduler``: persistent CTAs take n_blocks from an atomic counter;
    not with ``pair`` or ``dq_swap_ab``. ``dlse``: there is a gradient of the LSE. ``sink``: the forward pass had a
    sink; dsink is its gradient. ``longest_first``: n_blocks of a varlen batch start in the order of their steps; not
    with ``split``. ``one_direction``: all sections of heads have the order of the first, so that the order of additions
    does not depend on the number of heads.
    """

    pair: bool = False
    dynamic_scheduler: bool = False
    deterministic: bool = False
    v_in_registers: bool = False
    split: bool = False
    shared_dq_accum: str = ""
    dlse: bool = False
    sink: bool = False
    longest_first: bool = False
    one_direction: bool = False

    @property
    def cluster_tile_n(self) -> int:
        """Keys of a CTA, or of a pair of CTAs."""
        return self.tile[1] * (1 + self.pair)

    @property
    def dkv_width(self) -> int:
        """Elements of a key in dK and dV, rounded up to a power of 2."""
        return 1 << (self.head_dim + self.head_dim_v - 1).bit_length()

    @property
    def reverse_n_blocks(self) -> bool:
        """Whether CTAs start with a head's last n_block: if a semaphore orders dQ, and where it was measured faster."""
        measured_faster = (self.head_dim, self.head_dim_v) in ((64, 64), (192, 128)) and not (
            self.varlen or self.left or self.split
        )
        return self.right and (self.deterministic or measured_faster)

    @property
    def first_cta_stores_dq(self) -> bool:
        """Whether the first CTA of the semaphore's order stores its part of dQ, so that dq_accum need not be zeroed
        before.
        """
        return self.deterministic and not self.shared_dq_accum

    @property
    def dq_swap_ab(self) -> bool:
        """Whether the MMA computes dQ^T = K^T dS^T. Then tile_m is the MMA's N, a multiple of 8, not its M, a multiple
        of 64.
        """
        return self.tile[0] % 64 > 0

    @property
    def kernel(self) -> str:
        """The module and class of the kernel."""
        return "attention_backward_pair:PairedBackward" if self.pair else "attention_backward:AttentionBackward"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        query_sizes, key_sizes = ("sq", "hq"), ("sk", "hk")
        return (
            *head_tensors(self.varlen, self.dtype, *query_sizes, {"q": self.head_dim}),
            *head_tensors(self.varlen, self.dtype, *key_sizes, {"k": self.head_dim, "v": self.head_dim_v}),
            *head_tensors(self.varlen, self.dtype, *query_sizes, {"o": self.head_dim_v, "do": self.head_dim_v}),
            row_values(self.varlen, "lse"),
            *head_tensors(self.varlen, self.dtype, *query_sizes, {"dq": self.head_dim}),
            *head_tensors(self.varlen, self.dtype, *key_sizes, {"dk": self.head_dim, "dv": self.head_dim_v}),
            *cu_seqlens(self.varlen),
            *[row_values(self.varlen, "dlse")] * self.dlse,
            *[vector(name, "float32", "hq") for name in ("sink", "dsink")] * self.sink,
            Scalar("scale_softmax", "float32"),
            *WINDOW,
            *[Scalar("softcap", "float32")] * self.softcap,
            *[Scalar("split", "int32"), Scalar("parts", "int32")] * self.split,
            *[NUM_SMS] * self.dynamic_scheduler,
            Workspace(self.regions()),
            Stream(),
        )

    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: float32 row values and dQ, and partial dK and dV of the split n_blocks."""
        row_widths = {"dpsum": 1, "lse_log2": 1}
        if not self.shared_dq_accum:
            row_widths["dq_accum"] = self.head_dim
        if self.deterministic:
            row_widths["dq_semaphore"] = 1
        rows = (Region(name, partial(self.row_bytes, 4 * count)) for name, count in row_widths.items())
        semaphore = [region("tile_count_semaphore", 4)] * self.dynamic_scheduler
        return (
            *rows,
            *semaphore,
            *[Region("block_order", self.order_bytes)] * self.longest_first,
            *[region("dkv_partial", 4 * self.cluster_tile_n * self.dkv_width, "split", "parts")] * self.split,
        )

    def order_bytes(self, sizes: Sizes) -> Any:
        """Two int32 for each n_block of a head of K in a varlen batch."""
        return 8 * (sizes["sk"] // self.cluster_tile_n + sizes["b"])

    def row_bytes(self, bytes_per_row: int, sizes: Sizes) -> Any:
        """``bytes_per_row`` for every row of a head of Q; each sequence has whole m_blocks of rows."""
        rows, num_sequences = self.tile[0], sizes["b"]
        blocks = sizes["sq"] // rows + num_sequences if self.varlen else -(-sizes["sq"] // rows) * num_sequences
        return blocks * rows * sizes["hq"] * bytes_per_row


@dataclass(frozen=True)
class GradientsConfiguration(BackwardConfiguration):
    """dQ, dK and dV, each by CTAs that accumulate all of it, without atomics.

    The tile is (rows of a CTA, columns of an iteration); rows are queries for dQ, and keys for dK and dV.
    """

    tile: tuple[int, int] = (128, 64)

    kernel = "attention_backward:AttentionBackward"

    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: LSE * log2(e), and dPsum = rowsum(dO * O)."""
        return tuple(Region(name, partial(self.row_bytes, 4)) for name in ("lse_log2", "dpsum"))
