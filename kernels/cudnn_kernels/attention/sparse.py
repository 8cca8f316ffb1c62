"""What the kernels of native sparse attention are compiled for. Plain data, no CuTe DSL.

J. Yuan et al.: Native Sparse Attention (2025). Heads are numbers here, as are the sizes of blocks: models have few of
them, and kernels check what they are called with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cudnn_kernels.attention import WINDOW, BackwardConfiguration, matrices, offsets, region, row_values
from cudnn_kernels.formats import FORMATS
from cudnn_kernels.signature import MULTIPROCESSORS, Scalar, Sizes, Slot, Stream, Tensor, Workspace, vector


@dataclass(frozen=True)
class CompressionBackwardConfiguration(BackwardConfiguration):
    """The gradients of attention to compressed keys: so few that a CTA takes them for one head of Q alone."""

    compressed: bool = True
    lse: str = "by strides"

    kernel = "compression_backward:CompressionBackward"

    def regions(self) -> tuple[Any, ...]:
        """The regions of the workspace, with gradients of K and V for every head of Q."""
        widths, of = {"head_dk": self.head, "head_dv": self.head_v}, ("sk", "hq", *["b"] * (not self.packed))
        return (*super().regions(), *(region(x, 2 * width, *of) for x, width in widths.items()))


class SharedHeads:
    """``heads`` of Q share ``key_heads`` of K."""

    heads: int
    key_heads: int

    @property
    def group(self) -> int:
        """Heads of Q that share one of K."""
        return self.heads // self.key_heads


def lists(heads: str | int, ends: str) -> tuple[Tensor, ...]:
    """The tensors that say which blocks rows chose, and where sequences end."""
    return (
        Tensor("block_indices", "int32", ("s", heads, "chosen"), (None, None, 1), align=4),
        Tensor("block_counts", "int32", ("s", heads), (None, None), align=4),
        vector(ends, "int32", "ends"),
    )


@dataclass(frozen=True)
class Selected(SharedHeads):
    """Attention of each row to blocks of ``block`` keys of its own choice, for packed sequences.

    ``heads`` of Q share ``key_heads`` of K and V. With ``causal``, a row sees the keys at its own place or before.
    """

    dtype: str
    heads: int
    key_heads: int
    head: int
    head_v: int
    block: int
    causal: bool = False

    @property
    def padded(self) -> int:
        """Heads of a group with those that there are not: rows of a product come in multiples of it."""
        return 8 if self.group <= 8 else -(-self.group // 16) * 16

    @property
    def together(self) -> int:
        """Rows of Q whose heads are the 64 rows of a warpgroup's product."""
        return max(64 // self.padded, 1)

    def matrices(self, *names: str) -> tuple[Tensor, ...]:
        """Tensors by name: those like Q, K, V and O, and their gradients."""
        kinds = {
            "q": (self.heads, self.head),
            "k": (self.key_heads, self.head),
            "v": (self.key_heads, self.head_v),
            "o": (self.heads, self.head_v),
        }
        return tuple(Tensor(x, self.dtype, ("s", *kinds[x.removeprefix("d")]), (None, None, 1)) for x in names)

    def row_values(self, *names: str) -> tuple[Tensor, ...]:
        """float32 values of every row of every head of Q."""
        return tuple(Tensor(name, "float32", ("s", self.heads), (None, None), align=4) for name in names)


APART = 12, 65536
"""``apart`` of :class:`SelectionConfiguration`, and from how many rows on: power limits the other way there."""
DRAWN = Workspace((region("drawn", 4),))
"""How many tiles CTAs have drawn."""


@dataclass(frozen=True)
class SelectionConfiguration(Selected):
    """Forward. ``tile`` is (rows, keys) of a step of a CTA, whose rows are heads of Q that share one of K.

    They are those of neighbouring rows of Q, ``together`` for each 64, or up to 64 heads of one. ``tile[1] / block``
    blocks are taken at a time, or a part of one. ``stages``: buffers of steps, 2 or more: a warpgroup may hold two.
    ``result`` is O's type, if it is not that of Q. ``apart``: on Hopper, a warpgroup takes the rows of a tile one by
    one if fewer than so many eighths of a row share a step, for groups of 9 to 16 heads and steps of 64 keys. ``lse``:
    the result is the log-sum-exp, in place of sums of exponentials and largest scores, and lists have no counts: -1 is
    no block.
    """

    tile: tuple[int, int] = (192, 64)
    stages: int = 5
    result: str = ""
    apart: int = 0
    lse: bool = False

    kernel = "selection:Selection"

    @property
    def sums(self) -> tuple[Tensor, ...]:
        """What there is of a row's exponentials beside O."""
        return self.row_values(*(("lse",) if self.lse else ("l", "m")))

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """The lists, and where sequences end."""
        return tuple(x for x in lists(self.key_heads, "cum_seqlen_q") if not self.lse or x.name != "block_counts")

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *self.matrices("q", "k", "v"),
            *(replace(x, dtype=self.result or self.dtype) for x in self.matrices("o")),
            *self.sums,
            *self.lists,
            Scalar("scale_softmax", "float32"),
            MULTIPROCESSORS,
            DRAWN,
            Stream(),
        )


@dataclass(frozen=True)
class GatedSelectionConfiguration(SelectionConfiguration):
    """O is the sum of the branches of native sparse attention, each times its gate, of the type ``gates``.

    The ``compressed`` one is given. ``near`` is memory for the one of attention to the newest ``window`` keys. With
    ``keeps`` there are its log-sum-exp, and selection's own O, ``selected``, and log-sum-exp, too.
    """

    lse: bool = True
    gates: str = "bfloat16"
    keeps: bool = False

    kernel = "selection:GatedSelection"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        branch = ("s", self.heads, self.head_v), (None, None, 1)
        gates = ("s", self.heads, len(BRANCHES)), (None, None, 1)
        return (
            *self.matrices("q", "k", "v", "o"),
            Tensor("compressed", self.dtype, *branch),
            Tensor("near", self.dtype, *branch),
            Tensor("gates", self.gates, *gates, align=FORMATS[self.gates].bits // 8),
            *[x for x in self.kept() if self.keeps],
            *self.lists,
            Scalar("scale_softmax", "float32"),
            Scalar("window", "int32"),
            MULTIPROCESSORS,
            DRAWN,
            Stream(),
        )

    def kept(self) -> tuple[Tensor, ...]:
        """What the gradients need: ``near_lse`` is by sequences, heads and places in a sequence."""
        near = Tensor("near_lse", "float32", ("sequences", self.heads, "longest"), (None, None, 1), align=4)
        selected = Tensor("selected", self.dtype, ("s", self.heads, self.head_v), (None, None, 1))
        return near, selected, *self.sums


@dataclass(frozen=True)
class HeadValues:
    """A region of the workspace: two float32 values for ``heads`` of every row and head of K, and for one row more."""

    name: str
    key_heads: int
    heads: int

    def bytes(self, sizes: Sizes) -> Any:
        return (sizes["s"] + 1) * (self.key_heads * 2 * self.heads * 4)


PART = 4096
"""Rows that chose a block, of which a CTA takes so many at most: nearly all rows choose the first block."""


@dataclass(frozen=True)
class PartSums:
    """A region of the workspace: float32 sums of dK and dV for each part of the longer lists of ``choices``.

    ``width`` values for each of 64 keys, in ``times`` tiles of a block.
    """

    name: str
    part: int
    width: int
    times: int

    def bytes(self, sizes: Sizes) -> Any:
        return sizes["choices"] * 2 // self.part * (64 * self.width * 4 * self.times)


@dataclass(frozen=True)
class SelectionBackwardConfiguration(Selected):
    """Backward: dQ by rows, then dK and dV by blocks of keys, from the rows that chose each.

    ``tile`` and ``stages`` are those for dQ, as forward. The rows that chose block b of head h of K are ``choosing``
    from ``choosing_ends[h * blocks + b, 0]`` to the next one, where ``blocks`` are those of all sequences: sequence i
    has the blocks from ``cum_seqlen_q[i] / block + i`` on. They are taken in parts of ``part`` rows; the other columns
    of ``choosing_ends`` count parts, and parts of lists that have several. ``adds``: gradients are added to what their
    tensors have.
    """

    tile: tuple[int, int] = (128, 64)
    stages: int = 4
    part: int = PART
    adds: bool = False

    kernel = "selection_backward:SelectionBackward"

    @property
    def rows_of_step(self) -> int:
        """Rows that chose a block, whose heads are the columns of a step for dK and dV: half as many of wide heads."""
        return max((64 if self.head + self.head_v <= 256 else 32) // self.padded, 1)

    @property
    def split(self) -> int:
        """Warpgroups that have some columns of dK and dV each."""
        return 1 if self.head + self.head_v <= 320 else 2

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        return (
            *self.matrices("q", "k", "v", "o", "do"),
            *self.row_values("lse"),
            *self.matrices("dq", "dk", "dv"),
            *lists(self.key_heads, "cum_seqlen_q"),
            vector("choosing", "int32", "choices"),
            Tensor("choosing_ends", "int32", ("blocks", 3), (3, 1), align=4),
            Scalar("scale_softmax", "float32"),
            MULTIPROCESSORS,
            Workspace(self.regions()),
            Stream(),
        )

    def regions(self) -> tuple[Any, ...]:
        """The regions of the workspace."""
        sums = PartSums("part_sums", self.part, self.head + self.head_v, -(-self.block // 64))
        return HeadValues("head_values", self.key_heads, self.padded), sums


@dataclass(frozen=True)
class SelectionByBlocksConfiguration(Selected):
    """Forward, with blocks of keys outermost: a CTA has up to 64 keys and up to ``part`` of the rows that chose them.

    A call computes ``some_heads`` heads of K from ``first_head`` on. Lists are as those of
    :class:`SelectionBackwardConfiguration`. ``of_chosen`` is memory for O of every entry of their lists, and
    ``chosen_values`` for the largest score and the sum of exponentials. ``chosen_places``: where in the lists of all
    heads the entries of a row are.
    """

    tile: tuple[int, int] = (64, 64)
    stages: int = 2
    part: int = PART

    kernel = "selection_by_blocks:SelectionByBlocks"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        return (
            *self.matrices("q", "k", "v", "o"),
            *self.row_values("l", "m"),
            vector("cum_seqlen_q", "int32", "ends"),
            vector("choosing", "int32", "choices"),
            Tensor("choosing_ends", "int32", ("blocks", 3), (3, 1), align=4),
            Tensor("chosen_places", "int32", ("s", self.key_heads, "chosen"), (None, None, 1), align=4),
            Tensor("of_chosen", self.dtype, ("entries", self.group, self.head_v), (None, None, 1)),
            Tensor("chosen_values", "float32", ("entries", self.group, 2), (None, None, 1), align=4),
            Scalar("scale_softmax", "float32"),
            Scalar("first_head", "int32"),
            Scalar("some_heads", "int32"),
            Stream(),
        )


@dataclass(frozen=True)
class InverseConfiguration:
    """A pass of turning lists around, with ``rows`` to a warp: with ``causal``, without blocks behind a row.

    ``places`` are, for every block as :class:`SelectionBackwardConfiguration` numbers them and every warp, counts, 0
    before, or, where it ``puts`` rows in order, where those begin. With ``tells``, it writes where in ``choosing`` each
    entry of the lists went.
    """

    block: int
    causal: bool
    puts: bool
    rows: int
    tells: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *lists("hk", "cum_seqlen"),
            Tensor("places", "int32", ("blocks", "warps"), (None, 1), align=4),
            *[vector("choosing", "int32", "choices")] * self.puts,
            *[Tensor("chosen_places", "int32", ("s", "hk", "chosen"), (None, None, 1), align=4)] * self.tells,
            Stream(),
        )


NEWEST = 3
ALWAYS = 1 + NEWEST
"""Blocks that are in every row's whole list: the first one, and so many of the newest."""


@dataclass(frozen=True)
class TopKConfiguration(SharedHeads):
    """The ``count`` blocks of keys with the largest sums of probabilities, for each row and head of K.

    A block is ``block`` rows, whose keys were compressed to one for every ``stride`` rows. ``tile`` is (rows of the
    product, keys): a row of the product is a row of a head of Q. ``whole``: the results are whole lists, and lse is a
    natural logarithm, not yet times -log2(e). ``ctas``: so many share a multiprocessor, of which one compares while
    another waits for Q.
    """

    dtype: str
    heads: int
    key_heads: int
    head: int
    count: int
    block: int
    stride: int
    packed: bool = False
    tile: tuple[int, int] = (128, 128)
    stages: int = 3
    whole: bool = False
    ctas: int = 1

    kernel = "top_k:TopK"

    @property
    def before(self) -> int:
        """Entries of a list before the best blocks."""
        return ALWAYS if self.whole else 0

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        p = self.packed
        return (
            *matrices(p, self.dtype, "sq", self.heads, {"q": self.head}),
            *matrices(p, self.dtype, "sk", self.key_heads, {"k": self.head}),
            row_values(p, "lse", self.heads),
            *matrices(p, "float32", "sq", self.key_heads, {"topk_scores": self.count}, 4),
            *matrices(p, "int32", "sq", self.key_heads, {"topk_indices": self.before + self.count}, 4),
            *offsets(p),
            Scalar("scale_softmax", "float32"),
            Stream(),
        )


@dataclass(frozen=True)
class CompressionTopKConfiguration(SharedHeads):
    """Attention to compressed keys, and whole lists of blocks, of packed sequences with at most ``tile[1]`` such keys.

    The others are as those of :class:`TopKConfiguration`; at most 64 heads of Q share one of K.
    """

    dtype: str
    heads: int
    key_heads: int
    head: int
    head_v: int
    count: int
    block: int
    stride: int
    tile: tuple[int, int] = (192, 128)

    kernel = "compression_top_k:CompressionTopK"
    packed, before, whole = True, ALWAYS, True

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *matrices(True, self.dtype, "sq", self.heads, {"q": self.head}),
            *matrices(True, self.dtype, "sk", self.key_heads, {"k": self.head, "v": self.head_v}),
            *matrices(True, self.dtype, "sq", self.heads, {"o": self.head_v}),
            row_values(True, "lse", self.heads),
            *matrices(True, "int32", "sq", self.key_heads, {"topk_indices": self.before + self.count}, 4),
            *offsets(True),
            Scalar("scale_softmax", "float32"),
            MULTIPROCESSORS,
            Stream(),
        )


BRANCHES = ("compressed", "selected", "near")
"""The attentions that native sparse attention adds up."""


@dataclass(frozen=True)
class GateConfiguration:
    """The sum of the branches' rows of ``width`` elements, each times its gate; or its ``gradient``.

    ``gates`` is the type of gates. A row is one of a head; ``width`` is 8 times a power of two up to 32.
    """

    dtype: str
    gates: str
    width: int
    gradient: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: of the gradient, ``out`` is that of the sum."""

        def rows(*names: str) -> tuple[Slot, ...]:
            return tuple(Tensor(x, self.dtype, ("rows", self.width), (self.width, 1)) for x in names)

        gates = (vector_of_rows("gates", self.gates), *[vector_of_rows("d_gates", self.gates)] * self.gradient)
        changes = [f"d_{x}" for x in BRANCHES] if self.gradient else []
        return (*rows(*BRANCHES, "out", *changes), *gates, Stream())


@dataclass(frozen=True)
class BranchGradientsConfiguration:
    """The gradients of gates, branches, the window and compression; dq is the sum of the latter two's.

    ``near`` is what the window's kernel is compiled for; compression's has the same tile, and comes first. ``gates`` is
    their type. ``one_block``: there are so few compressed keys, and all blocks of rows see some.
    """

    near: BackwardConfiguration
    gates: str
    one_block: bool = False

    kernel = "branch_gradients:BranchGradients"

    @property
    def compressed(self) -> CompressionBackwardConfiguration:
        """What compression's kernel is compiled for."""
        c, shared = self.near, "stores" if self.one_block else "adds"
        return CompressionBackwardConfiguration(c.dtype, c.head, c.head_v, c.tile, c.packed, shared=shared)

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels: ``out`` is the gradient of the sum."""
        c = self.near
        p, keys = c.packed, {"k": c.head, "v": c.head_v, "dk": c.head, "dv": c.head_v}
        of_compressed = {f"compressed_{x}": width for x, width in keys.items()}
        rows = dict.fromkeys((*BRANCHES, "out", *(f"d_{x}" for x in BRANCHES)), c.head_v)
        gates = dict.fromkeys(("gates", "d_gates"), len(BRANCHES))
        return (
            *matrices(p, c.dtype, "sq", "hq", {"q": c.head, "dq": c.head, **rows}),
            *matrices(p, c.dtype, "sk", "hk", keys),
            *matrices(p, c.dtype, "sc", "hk", of_compressed),
            *matrices(p, self.gates, "sq", "hq", gates, FORMATS[self.gates].bits // 8),
            row_values(p, "compressed_lse"),
            Tensor("near_lse", "float32", ("sequences", "hq", "longest"), (None, None, 1), align=4),
            *offsets(p),
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
    """All of native sparse attention, of the newest row of each sequence, from caches.

    ``heads`` of Q, at most 16 of which share one of ``key_heads`` of K; ``gates`` is the type of gates. A list has
    ``ALWAYS`` blocks of ``block`` keys and the ``count`` best ones; ``stride`` rows have a compressed key; the newest
    ``window`` keys are the last branch. ``head`` is a multiple of 32, ``head_v`` of 64, ``block`` of 16.
    """

    dtype: str
    gates: str
    heads: int
    key_heads: int
    head: int
    head_v: int
    block: int
    stride: int
    count: int
    window: int

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel. ``probabilities`` is scratch memory."""

        def cache(name: str, rows: str, width: int) -> Slot:
            return Tensor(name, self.dtype, ("b", rows, self.key_heads, width), (None, None, None, 1))

        return (
            Tensor("q", self.dtype, ("b", self.heads, self.head), (None, None, 1)),
            cache("k", "s", self.head),
            cache("v", "s", self.head_v),
            cache("compressed_k", "c", self.head),
            cache("compressed_v", "c", self.head_v),
            Tensor("gates", self.gates, ("b", self.heads, len(BRANCHES)), (None, None, None), align=2),
            vector("lengths", "int32", "b"),
            vector("compressed_lengths", "int32", "b"),
            Tensor("probabilities", "float32", ("b", self.key_heads, "c"), (None, None, 1), align=4),
            Tensor("o", self.dtype, ("b", self.heads, self.head_v), (None, None, 1), align=2),
            Scalar("scale_softmax", "float32"),
            Stream(),
        )


def vector_of_rows(name: str, dtype: str) -> Tensor:
    """A number of every row for each branch."""
    return Tensor(name, dtype, ("rows", len(BRANCHES)), (len(BRANCHES), 1), align=FORMATS[dtype].bits // 8)
