"""What the kernels of routing are compiled for. Plain data, no CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass, field

from cudnn_kernels.formats import FORMATS
from cudnn_kernels.signature import Scalar, Slot, Stream, Tensor, addresses, vector

MOST_EXPERTS = 1024
MOST_CHOICES = 16  # of a router
MOST_SUMMED = 32  # of a token in all, with shared experts: a lane of a warp has one
MOST_GROUPS = 32


def of_choices(name: str, top_k: int, dtype: str = "int32", at_once: bool = False) -> Tensor:
    """A number for each choice of each token; those of a token may be read at once, where the first token's are at a
    multiple of 16 bytes.
    """
    return Tensor(name, dtype, ("tokens", top_k), (top_k, 1), 4 * min(4, top_k & -top_k) if at_once else 4)


def of_each_row(name: str) -> Tensor:
    """A float32 for each row."""
    return Tensor(name, "float32", ("rows", 1, 1), (1, 1, 1), align=4)


@dataclass(frozen=True)
class Rule:
    """How a router chooses ``top_k`` experts for a token from their logits, and weighs them.

    ``score`` is "softmax" or "sigmoid". With ``pre_softmax`` the softmax is over all experts, else over chosen ones.
    Experts form ``n_group`` groups of equal size, of which the best ``topk_group`` are chosen first.
    """

    top_k: int
    score: str = "softmax"
    pre_softmax: bool = True
    renormalize: bool = False
    n_group: int = 1
    topk_group: int = 1

    @property
    def is_scored_before(self) -> bool:
        """Whether a bias is added to scores; else to logits, whose softmax is of the chosen ones alone."""
        return self.score == "sigmoid" or self.pre_softmax

    @property
    def is_dense(self) -> bool:
        """Whether weights depend on the logits of experts that were not chosen: with a softmax of all.

        Renormalised, that is the softmax of the chosen ones.
        """
        return self.score == "softmax" and self.pre_softmax and not self.renormalize


WARP = 32
WARPS = 8  # of a CTA that chooses experts


@dataclass(frozen=True)
class RouteConfiguration:
    """Choosing experts by a rule, and sorting by expert; without a rule, sorting indices that are given.

    A CTA takes consecutive tokens, and counts its choices of each expert: ``counts``, with a row for each CTA and one
    more for their sums. :meth:`blocks` says how many CTAs there are.
    """

    experts: int
    top_k: int
    rule: Rule | None = None
    dtype: str = ""
    biased: bool = False

    @property
    def share(self) -> int:
        """Consecutive experts that belong to a lane of a warp."""
        return -(-self.experts // WARP)

    def blocks(self, tokens: int) -> int:
        """CTAs: as many as fit on a GPU at a time, where there are tokens for them."""
        return min(1024 if self.experts <= 256 else 512, -(-tokens // WARPS))

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        scored: list[Slot] = []
        if self.rule is not None:
            size = FORMATS[self.dtype].bits // 8
            scored.append(Tensor("logits", self.dtype, ("tokens", self.experts), (None, 1), align=size))
            scored += [Tensor("bias", "float32", (self.experts,), (1,), align=4)] if self.biased else []
            scored.append(of_choices("weights", self.top_k, "float32"))
            if not self.rule.is_dense:
                scored.append(Tensor("chosen", self.dtype, ("tokens", self.top_k), (self.top_k, 1), align=size))
            scored.append(Scalar("scaling_factor", "float32"))
        return (
            *scored,
            of_choices("indices", self.top_k),
            Tensor("offsets", "int32", (self.experts,), (1,), align=4),
            vector("token_of_row", "int32", "rows"),
            of_choices("row_of_choice", self.top_k),
            Tensor("counts", "int32", ("blocks + 1", self.experts), (self.experts, 1), align=4),
            Stream(),
        )


@dataclass(frozen=True)
class RouteGradientConfiguration:
    """The gradient of logits from that of weights.

    ``logits`` are those of all experts where the rule is dense, else of the chosen ones. With ``choices`` of a token,
    shared experts' too, their rows are given the gradients of their logits, 0 for a shared expert's.
    """

    experts: int
    rule: Rule
    dtype: str
    choices: int = 0

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        size, known = FORMATS[self.dtype].bits // 8, self.experts if self.rule.is_dense else self.rule.top_k
        return (
            of_choices("gradient", self.rule.top_k, "float32"),
            Tensor("logits", self.dtype, ("tokens", known), (None, 1), align=size),
            of_choices("indices", self.rule.top_k),
            Tensor("d_logits", self.dtype, ("tokens", self.experts), (self.experts, 1), align=size),
            *([of_choices("row_of_choice", self.choices), of_each_row("of_rows")] if self.choices else []),
            Scalar("scaling_factor", "float32"),
            Stream(),
        )


@dataclass(frozen=True)
class Pieces:
    """Rows of ``hidden`` elements, of which each thread has 16 bytes."""

    dtype: str
    hidden: int
    top_k: int
    most_threads: int = field(default=256, kw_only=True)

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 128 // FORMATS[self.dtype].bits

    @property
    def slices(self) -> int:
        """CTAs that share a row."""
        return -(-self.hidden // (self.vector * self.most_threads))

    @property
    def width(self) -> int:
        """Threads of a CTA that share a row, 16 bytes for each."""
        return -(-self.hidden // (self.vector * self.slices))


@dataclass(frozen=True)
class CombineConfiguration(Pieces):
    """Sums of ``top_k`` rows for each token, ``weighted`` or not; or their ``gradient``."""

    weighted: bool
    gradient: bool = False

    def summed(self) -> tuple[Slot, ...]:
        """What is added up."""
        rows = Tensor("rows", self.dtype, ("rows", self.hidden), (None, 1))
        found: tuple[Slot, ...] = (of_choices("row_of_choice", self.top_k, at_once=True),)
        if self.weighted or not self.gradient:
            found = (rows, *found)
        return (*found, of_choices("weights", self.top_k, "float32", True)) if self.weighted else found

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        found = (*self.summed(), Tensor("out", self.dtype, ("tokens", self.hidden), (None, 1)))
        if self.gradient:
            found += (Tensor("d_rows", self.dtype, ("rows", self.hidden), (None, 1)),)
            found += (of_choices("d_weights", self.top_k, "float32"),) if self.weighted else ()
        return (*found, Stream())


@dataclass(frozen=True)
class ValuesConfiguration:
    """Stores the number of each choice in its row, and 0 in the row's ``sums``; or ``back``, that of a choice's row, 0
    where it has none.
    """

    top_k: int
    back: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        names = ("of_rows",) if self.back else ("of_rows", "sums")
        return (
            of_choices("row_of_choice", self.top_k),
            of_choices("of_choices", self.top_k, "float32"),
            *map(of_each_row, names),
            Stream(),
        )


BLOCK, NARROW = 128, "float8_e4m3fn"


@dataclass(frozen=True)
class QuantizeConfiguration:
    """Quantises rows of ``columns`` elements, a multiple of BLOCK, to e4m3. A factor is for BLOCK elements of a row or,
    with ``blocks``, for BLOCK x BLOCK. With ``top_k``, rows are tokens, which are stored in the rows of their choices.
    """

    dtype: str
    columns: int
    blocks: bool = False
    top_k: int = 0

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        rows, across = "rows" if self.top_k else "tokens", self.columns // BLOCK
        return (
            Tensor("x", self.dtype, ("tokens", self.columns), (None, 1)),
            *((of_choices("row_of_choice", self.top_k, at_once=True),) if self.top_k else ()),
            Tensor("quantized", NARROW, (rows, self.columns), (None, 1)),
            Tensor("factors", "float32", ("blocks" if self.blocks else rows, across), (across, 1), align=4),
            Stream(),
        )


@dataclass(frozen=True)
class GiveBackConfiguration(CombineConfiguration):
    """Sums that go to the ranks whose tokens they are of, with ``values`` float32 numbers for each token, as bits.

    ``out`` gets the sums over all ranks of this rank's tokens, ``own_values`` those of the numbers. At least ``before``
    CTAs start between one that sends a token and the one that adds what came of it: about what runs at a time on a GPU.
    """

    ranks: int = field(kw_only=True)
    values: int = field(kw_only=True)
    before: int = field(default=512, kw_only=True)

    @property
    def ahead(self) -> int:
        """By how many tokens sending is ahead of adding."""
        return -(-self.before // (self.ranks * self.slices))

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel; ``limit`` in milliseconds."""
        found = (*self.summed(), addresses("targets", "ranks"))
        found += (Tensor("row_of_rank", "int32", ("own", self.ranks), (self.ranks, 1), align=4),)
        found += (Tensor("out", self.dtype, ("own", self.hidden), (None, 1)), addresses("word_targets", "ranks"))
        if self.values:
            found += (Tensor("values", "int32", ("tokens", self.values), (self.values, 1), align=4),)
            found += (Tensor("own_values", "int32", ("own", self.values), (self.values, 1), align=4),)
        return (*found, Scalar("rank", "int32"), Scalar("most", "int32"), Scalar("limit", "int32"), Stream())


@dataclass(frozen=True)
class DispatchConfiguration(Pieces):
    """Rows of tokens to the ranks that have one of their ``top_k`` experts: each of ``ranks`` has ``local`` of them.

    ``announced``: the choices and their weights go to all ranks, too.
    """

    ranks: int
    local: int
    announced: bool

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel; weights as bits."""
        found: tuple[Slot, ...] = (
            Tensor("tokens", self.dtype, ("tokens", self.hidden), (None, 1)),
            of_choices("indices", self.top_k),
            addresses("targets", "ranks"),
        )
        if self.announced:
            found += (of_choices("weights", self.top_k), addresses("choice_targets", "ranks"))
            found += (Tensor("row_of_rank", "int32", ("tokens", self.ranks), (self.ranks, 1), align=4),)
        return (*found, Scalar("rank", "int32"), Scalar("most", "int32"), Stream())
