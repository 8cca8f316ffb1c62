"""Compile-time configurations of the NSA kernels (native sparse attention). Plain data, no CuTe DSL.

J. Yuan et al.: Native Sparse Attention (2025). Numbers of heads and block sizes are compile-time constants here: models
have few of them, and kernels check their arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cudnn_kernels.attention import WINDOW, BackwardConfiguration, cu_seqlens, head_tensors, region, row_values
from cudnn_kernels.formats import FORMATS
from cudnn_kernels.signature import NUM_SMS, Scalar, Sizes, Slot, Stream, Tensor, Workspace, vector


@dataclass(frozen=True)
class CompressionBackwardConfiguration(BackwardConfiguration):
    """Backward of attention to compressed keys: so few that a CTA has an n_block for one head of Q."""

    compressed: bool = True
    lse: str = "by strides"

    kernel = "compression_backward:CompressionBackward"

    def regions(self) -> tuple[Any, ...]:
        """Also dK and dV of every head of Q."""
        widths = {"head_dk": self.head_dim, "head_dv": self.head_dim_v}
        per_head = ("sk", "hq", *["b"] * (not self.varlen))
        return (*super().regions(), *(region(x, 2 * width, *per_head) for x, width in widths.items()))


class SharedHeads:
    """GQA: ``heads`` of Q share ``key_heads`` of K and V."""

    heads: int
    key_heads: int

    @property
    def group(self) -> int:
        """Heads of Q that share one of K."""
        return self.heads // self.key_heads


def block_lists(heads: str | int, cu_seqlens_name: str) -> tuple[Tensor, ...]:
    """The selected block indices and their counts, of each row and head of K, and the cumulative sequence lengths."""
    return (
        Tensor("block_indices", "int32", ("s", heads, "list_len"), (None, None, 1), align=4),
        Tensor("block_counts", "int32", ("s", heads), (None, None), align=4),
        vector(cu_seqlens_name, "int32", "ends"),
    )


@dataclass(frozen=True)
class Selected(SharedHeads):
    """Attention of each query row to its selected blocks of ``block`` keys, for varlen batches.

    With ``causal``, a row sees keys up to its own position.
    """

    dtype: str
    heads: int
    key_heads: int
    head_dim: int
    head_dim_v: int
    block: int
    causal: bool = False

    @property
    def padded_group(self) -> int:
        """MMA rows of a query: the heads of the GQA group, padded to 8 or a multiple of 16."""
        return 8 if self.group <= 8 else -(-self.group // 16) * 16

    @property
    def queries_per_warpgroup(self) -> int:
        """Query rows whose heads are the 64 MMA rows of a warpgroup."""
        return max(64 // self.padded_group, 1)

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        """Declares tensors by name: Q, K, V, O, and their gradients."""
        shapes = {
            "q": (self.heads, self.head_dim),
            "k": (self.key_heads, self.head_dim),
            "v": (self.key_heads, self.head_dim_v),
            "o": (self.heads, self.head_dim_v),
        }
        return tuple(Tensor(x, self.dtype, ("s", *shapes[x.removeprefix("d")]), (None, None, 1)) for x in names)

    def row_values(self, *names: str) -> tuple[Tensor, ...]:
        """Declares a float32 value per query row and head of Q."""
        return tuple(Tensor(name, "float32", ("s", self.heads), (None, None), align=4) for name in names)


TILE_COUNT_SEMAPHORE = Workspace((region("tile_count_semaphore", 4),))
"""The dynamic scheduler's counter."""


@dataclass(frozen=True)
class SelectionConfiguration(Selected):
    """Forward. ``tile`` is (MMA rows of a CTA, keys of a step).

    The rows are heads of adjacent query rows, ``queries_per_warpgroup`` for each 64, or up to 64 heads of one. A step
    has ``tile[1] / block`` blocks, or a part of one. ``stages`` of K and V, 2 or more: a warpgroup may hold two.
    ``out_dtype`` is O's type, if it is not that of Q. ``single_query_threshold``: on Hopper, a warpgroup processes a
    tile's queries one by one if fewer than this many eighths of its queries share a step, for groups of 9 to 16 heads
    and steps of 64 keys. ``lse``: the result is the LSE, not row sums and maxima, and lists have no counts: -1 is no
    block.
    """

    tile: tuple[int, int] = (192, 64)
    stages: int = 5
    out_dtype: str = ""
    single_query_threshold: int = 0
    lse: bool = False

    kernel = "selection:Selection"

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """The row values of the result."""
        return self.row_values(*(("lse",) if self.lse else ("l", "m")))

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """The block lists, and the cumulative sequence lengths."""
        return tuple(x for x in block_lists(self.key_heads, "cum_seqlen_q") if not self.lse or x.name != "block_counts")

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *self.matrices("q", "k", "v"),
            *(replace(x, dtype=self.out_dtype or self.dtype) for x in self.matrices("o")),
            *self.sums,
            *self.lists,
            Scalar("scale_softmax", "float32"),
            NUM_SMS,
            TILE_COUNT_SEMAPHORE,
            Stream(),
        )


@dataclass(frozen=True)
class GatedSelectionConfiguration(SelectionConfiguration):
    """O is the gated sum of NSA's branches; ``gates`` is the type of the gates.

    The ``compressed`` branch is an input. ``windowed`` is memory for the sliding window's O of ``window`` keys. With
    ``save_for_backward``, there are its LSE, selection's O (``selected``) and LSE, too.
    """

    lse: bool = True
    gates: str = "bfloat16"
    save_for_backward: bool = False

    kernel = "selection:GatedSelection"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        branch = ("s", self.heads, self.head_dim_v), (None, None, 1)
        gates = ("s", self.heads, len(BRANCHES)), (None, None, 1)
        return (
            *self.matrices("q", "k", "v", "o"),
            Tensor("compressed", self.dtype, *branch),
            Tensor("windowed", self.dtype, *branch),
            Tensor("gates", self.gates, *gates, align=FORMATS[self.gates].bits // 8),
            *[x for x in self.saved_tensors() if self.save_for_backward],
            *self.lists,
            Scalar("scale_softmax", "float32"),
            Scalar("window", "int32"),
            NUM_SMS,
            TILE_COUNT_SEMAPHORE,
            Stream(),
        )

    def saved_tensors(self) -> tuple[Tensor, ...]:
        """What the backward needs: ``windowed_lse`` is (sequence, head, position in the sequence)."""
        windowed = Tensor("windowed_lse", "float32", ("sequences", self.heads, "longest"), (None, None, 1), align=4)
        selected = Tensor("selected", self.dtype, ("s", self.heads, self.head_dim_v), (None, None, 1))
        return windowed, selected, *self.sums


@dataclass(frozen=True)
class HeadValues:
    """A region of the workspace: two float32 values for ``heads`` of every row and head of K, with one padding row."""

    name: str
    key_heads: int
    heads: int

    def bytes(self, sizes: Sizes) -> Any:
        return (sizes["s"] + 1) * (self.key_heads * 2 * self.heads * 4)


LIST_CHUNK = 4096
"""Query rows of a block's list that one CTA processes at most: nearly all rows select the first block."""


@dataclass(frozen=True)
class PartialSums:
    """A region of the workspace: float32 partial dK and dV for each chunk of lists that have several.

    ``width`` values for each of 64 keys, in ``times`` key tiles of a block.
    """

    name: str
    list_chunk: int
    width: int
    times: int

    def bytes(self, sizes: Sizes) -> Any:
        return sizes["list_entries"] * 2 // self.list_chunk * (64 * self.width * 4 * self.times)


@dataclass(frozen=True)
class SelectionBackwardConfiguration(Selected):
    """Backward: dQ query-stationary, then dK and dV KV-stationary, from transposed block lists.

    ``tile`` and ``stages`` are those of dQ, as in the forward. The query rows that select block b of head h of K are
    ``query_indices`` from ``query_offsets[h * blocks + b, 0]`` to the next one, where ``blocks`` are those of all
    sequences: sequence i has the blocks from ``cum_seqlen_q[i] / block + i`` on. Lists are processed in chunks of
    ``list_chunk`` rows; the other columns of ``query_offsets`` count chunks, and chunks of lists that have several.
    ``accumulate``: gradients are added to what their tensors hold.
    """

    tile: tuple[int, int] = (128, 64)
    stages: int = 4
    list_chunk: int = LIST_CHUNK
    accumulate: bool = False

    kernel = "selection_backward:SelectionBackward"

    @property
    def rows_of_step(self) -> int:
        """Query rows of a step of dK and dV, whose heads are its 64 columns, or 32 for wide heads."""
        return max((64 if self.head_dim + self.head_dim_v <= 256 else 32) // self.padded_group, 1)

    @property
    def num_dkv_warpgroups(self) -> int:
        """MMA warpgroups of the dK/dV kernel, which split the columns of dK and dV."""
        return 1 if self.head_dim + self.head_dim_v <= 320 else 2

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        return (
            *self.matrices("q", "k", "v", "o", "do"),
            *self.row_values("lse"),
            *self.matrices("dq", "dk", "dv"),
            *block_lists(self.key_heads, "cum_seqlen_q"),
            vector("query_indices", "int32", "list_entries"),
            Tensor("query_offsets", "int32", ("blocks", 3), (3, 1), align=4),
            Scalar("scale_softmax", "float32"),
            NUM_SMS,
            Workspace(self.regions()),
            Stream(),
        )

    def regions(self) -> tuple[Any, ...]:
        """The regions of the workspace."""
        sums = PartialSums("partial_sums", self.list_chunk, self.head_dim + self.head_dim_v, -(-self.block // 64))
        return HeadValues("head_values", self.key_heads, self.padded_group), sums


@dataclass(frozen=True)
class SelectionKVOuterConfiguration(Selected):
    """Forward, KV-stationary: a CTA has up to 64 keys and up to ``list_chunk`` of the query rows that selected them.

    A call computes ``some_heads`` heads of K from ``first_head`` on. Lists are those of
    :class:`SelectionBackwardConfiguration`. ``o_partial`` is memory for O of every list entry, ``partial_stats`` for
    row maximum and sum. ``entry_positions``: where the entries of a row are in the transposed lists.
    """

    tile: tuple[int, int] = (64, 64)
    stages: int = 2
    list_chunk: int = LIST_CHUNK

    kernel = "selection_kv_outer:SelectionKVOuter"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        return (
            *self.matrices("q", "k", "v", "o"),
            *self.row_values("l", "m"),
            vector("cum_seqlen_q", "int32", "ends"),
            vector("query_indices", "int32", "list_entries"),
            Tensor("query_offsets", "int32", ("blocks", 3), (3, 1), align=4),
            Tensor("entry_positions", "int32", ("s", self.key_heads, "list_len"), (None, None, 1), align=4),
            Tensor("o_partial", self.dtype, ("entries", self.group, self.head_dim_v), (None, None, 1)),
            Tensor("partial_stats", "float32", ("entries", self.group, 2), (None, None, 1), align=4),
            Scalar("scale_softmax", "float32"),
            Scalar("first_head", "int32"),
            Scalar("some_heads", "int32"),
            Stream(),
        )


@dataclass(frozen=True)
class CsrTransposeConfiguration:
    """A pass of the transposition of block lists, ``rows`` per warp; with ``causal``, blocks after a row are left out.

    ``positions`` are, for every block (numbered as in :class:`SelectionBackwardConfiguration`) and warp, counts,
    initially 0, or, if the pass ``writes_rows``, where the warp's rows begin. ``writes_positions``: it writes where
    each list entry went.
    """

    block: int
    causal: bool
    writes_rows: bool
    rows: int
    writes_positions: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *block_lists("hk", "cum_seqlen"),
            Tensor("positions", "int32", ("blocks", "warps"), (None, 1), align=4),
            *[vector("query_indices", "int32", "list_entries")] * self.writes_rows,
            *[Tensor("entry_positions", "int32", ("s", "hk", "list_len"), (None, None, 1), align=4)]
            * self.writes_positions,
            Stream(),
        )


NEWEST = 3
ALWAYS = 1 + NEWEST
"""Blocks in every row's full list: the first one and the newest ones."""


@dataclass(frozen=True)
class TopKConfiguration(SharedHeads):
    """The ``count`` blocks of keys with the largest probability sums, for each query row and head of K.

    A block is ``block`` rows, of which every ``stride`` have a compressed key. ``tile`` is (MMA rows, keys): an MMA row
    is a head of a query row. ``full_list``: results include the fixed blocks, and the LSE is a natural logarithm, else
    it is given times -log2(e). ``ctas``: CTAs per SM, of which one selects while another waits for Q.
    """

    dtype: str
    heads: int
    key_heads: int
    head_dim: int
    count: int
    block: int
    stride: int
    varlen: bool = False
    tile: tuple[int, int] = (128, 128)
    stages: int = 3
    full_list: bool = False
    ctas: int = 1

    kernel = "top_k:TopK"

    @property
    def num_fixed(self) -> int:
        """Fixed entries of a list before the top-k blocks."""
        return ALWAYS if self.full_list else 0

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        p = self.varlen
        return (
            *head_tensors(p, self.dtype, "sq", self.heads, {"q": self.head_dim}),
            *head_tensors(p, self.dtype, "sk", self.key_heads, {"k": self.head_dim}),
            row_values(p, "lse", self.heads),
            *head_tensors(p, "float32", "sq", self.key_heads, {"topk_scores": self.count}, 4),
            *head_tensors(p, "int32", "sq", self.key_heads, {"topk_indices": self.num_fixed + self.count}, 4),
            *cu_seqlens(p),
            Scalar("scale_softmax", "float32"),
            Stream(),
        )


@dataclass(frozen=True)
class CompressionTopKConfiguration(SharedHeads):
    """Attention to compressed keys fused with block selection, for varlen batches with at most ``tile[1]`` compressed
    keys.

    The others are those of :class:`TopKConfiguration`; at most 64 heads of Q share one of K.
    """

    dtype: str
    heads: int
    key_heads: int
    head_dim: int
    head_dim_v: int
    count: int
    block: int
    stride: int
    tile: tuple[int, int] = (192, 128)

    kernel = "compression_top_k:CompressionTopK"
    varlen, num_fixed, full_list = True, ALWAYS, True

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *head_tensors(True, self.dtype, "sq", self.heads, {"q": self.head_dim}),
            *head_tensors(True, self.dtype, "sk", self.key_heads, {"k": self.head_dim, "v": self.head_dim_v}),
            *head_tensors(True, self.dtype, "sq", self.heads, {"o": self.head_dim_v}),
            row_values(True, "lse", self.heads),
            *head_tensors(True, "int32", "sq", self.key_heads, {"topk_indices": self.num_fixed + self.count}, 4),
            *cu_seqlens(True),
            Scalar("scale_softmax", "float32"),
            NUM_SMS,
            Stream(),
        )


BRANCHES = ("compressed", "selected", "windowed")
"""The branches of NSA: compression, selection, sliding window."""


@dataclass(frozen=True)
class GateConfiguration:
    """The gated sum of the branches' rows of ``width`` elements, or its ``gradient``.

    ``gates`` is the type of the gates. A row is a head of a query row; ``width`` is 8 times a power of two up to 32.
    """

    dtype: str
    gates: str
    width: int
    gradient: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: with ``gradient``, ``out`` is the gradient of the sum."""

        def rows(*names: str) -> tuple[Slot, ...]:
            return tuple(Tensor(x, self.dtype, ("rows", self.width), (self.width, 1)) for x in names)

        gates = (vector_of_rows("gates", self.gates), *[vector_of_rows("d_gates", self.gates)] * self.gradient)
        changes = [f"d_{x}" for x in BRANCHES] if self.gradient else []
        return (*rows(*BRANCHES, "out", *changes), *gates, Stream())


@dataclass(frozen=True)
class BranchGradientsConfiguration:
    """The gradients of gates, branches, window and compression; dQ is the sum of the latter two's.

    ``windowed`` is the configuration of the window's kernel; compression's has the same tile and runs first. ``gates``
    is their type. ``one_block``: all compressed keys are one n_block that all m_blocks see.
    """

    windowed: BackwardConfiguration
    gates: str
    one_block: bool = False

    kernel = "branch_gradients:BranchGradients"

    @property
    def compressed(self) -> CompressionBackwardConfiguration:
        """The configuration of compression's kernel."""
        c, shared_dq_accum = self.windowed, "store" if self.one_block else "accumulate"
        return CompressionBackwardConfiguration(
            c.dtype, c.head_dim, c.head_dim_v, c.tile, c.varlen, shared_dq_accum=shared_dq_accum
        )

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels: ``out`` is the gradient of the sum."""
        c = self.windowed
        p, keys = c.varlen, {"k": c.head_dim, "v": c.head_dim_v, "dk": c.head_dim, "dv": c.head_dim_v}
        compressed_widths = {f"compressed_{x}": width for x, width in keys.items()}
        rows = dict.fromkeys((*BRANCHES, "out", *(f"d_{x}" for x in BRANCHES)), c.head_dim_v)
        gates = dict.fromkeys(("gates", "d_gates"), len(BRANCHES))
        return (
            *head_tensors(p, c.dtype, "sq", "hq", {"q": c.head_dim, "dq": c.head_dim, **rows}),
            *head_tensors(p, c.dtype, "sk", "hk", keys),
            *head_tensors(p, c.dtype, "sc", "hk", compressed_widths),
            *head_tensors(p, self.gates, "sq", "hq", gates, FORMATS[self.gates].bits // 8),
            row_values(p, "compressed_lse"),
            Tensor("windowed_lse", "float32", ("sequences", "hq", "longest"), (None, None, 1), align=4),
            *cu_seqlens(p),
            *[vector("cum_seqlen_compressed", "int32", "ends")] * p,
            Scalar("scale_softmax", "float32"),
            *WINDOW,
            *[Scalar("split", "int32"), Scalar("parts", "int32")] * c.split,
            Workspace(c.regions()),
            Workspace(self.compressed.regions(), "compressed_workspace"),
            Stream(),
        )


@dataclass(frozen=True)
class SparseDecodeConfiguration(SharedHeads):
    """NSA decode: all branches for the newest row of each sequence, from KV caches.

    ``heads`` of Q, at most 16 of which share one of ``key_heads`` of K; ``gates`` is the type of the gates. A list has
    ``ALWAYS`` fixed blocks of ``block`` keys and the ``count`` best ones; every ``stride`` rows have a compressed key;
    ``window`` keys are the sliding window. ``head_dim`` is a multiple of 32, ``head_dim_v`` of 64, ``block`` of 16.
    """

    dtype: str
    gates: str
    heads: int
    key_heads: int
    head_dim: int
    head_dim_v: int
    block: int
    stride: int
    count: int
    window: int

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel. ``probabilities`` is scratch memory."""

        def cache(name: str, rows: str, width: int) -> Slot:
            return Tensor(name, self.dtype, ("b", rows, self.key_heads, width), (None, None, None, 1))

        return (
            Tensor("q", self.dtype, ("b", self.heads, self.head_dim), (None, None, 1)),
            cache("k", "s", self.head_dim),
            cache("v", "s", self.head_dim_v),
            cache("compressed_k", "c", self.head_dim),
            cache("compressed_v", "c", self.head_dim_v),
            Tensor("gates", self.gates, ("b", self.heads, len(BRANCHES)), (None, None, None), align=2),
            vector("lengths", "int32", "b"),
            vector("compressed_lengths", "int32", "b"),
            Tensor("probabilities", "float32", ("b", self.key_heads, "c"), (None, None, 1), align=4),
            Tensor("o", self.dtype, ("b", self.heads, self.head_dim_v), (None, None, 1), align=2),
            Scalar("scale_softmax", "float32"),
            Stream(),
        )


def vector_of_rows(name: str, dtype: str) -> Tensor:
    """A value per row and branch."""
    return Tensor(name, dtype, ("rows", len(BRANCHES)), (len(BRANCHES), 1), align=FORMATS[dtype].bits // 8)
