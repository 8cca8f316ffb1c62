"""Configurations of the MoE kernels: routing, combine, quantization, expert-parallel exchange. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from cudnn_kernels.formats import FORMATS
from cudnn_kernels.signature import Scalar, Slot, Stream, Tensor, addresses, vector
from cudnn_kernels.threads import WARP_SIZE

MOST_EXPERTS = 1024
MOST_CHOICES = 16  # top_k of a router
MOST_SUMMED = 32  # experts of a token, with shared experts: one per lane
MOST_GROUPS = 32


def per_slot(name: str, top_k: int, dtype: str = "int32", at_once: bool = False) -> Tensor:
    """A value per (token, k) slot; those of a token may be loaded as a vector if the tensor is aligned to 16 bytes."""
    return Tensor(name, dtype, ("tokens", top_k), (top_k, 1), 4 * min(4, top_k & -top_k) if at_once else 4)


def per_row(name: str) -> Tensor:
    """A float32 per row."""
    return Tensor(name, "float32", ("rows", 1, 1), (1, 1, 1), align=4)


@dataclass(frozen=True)
class Rule:
    """The rule of a router: how it selects ``top_k`` experts of a token from the logits, and their weights.

    ``score`` is "softmax" or "sigmoid". With ``pre_softmax`` the softmax is over all experts, else over the selected
    ones. Experts form ``n_group`` groups of equal size, of which the best ``topk_group`` are selected first.
    """

    top_k: int
    score: str = "softmax"
    pre_softmax: bool = True
    renormalize: bool = False
    n_group: int = 1
    topk_group: int = 1

    @property
    def is_scored_before(self) -> bool:
        """Whether the bias is added to scores; else to logits, with a softmax over the selected experts."""
        return self.score == "sigmoid" or self.pre_softmax

    @property
    def is_dense(self) -> bool:
        """Whether weights depend on the logits of all experts: with a softmax over all.

        Renormalized, that equals the softmax over the selected experts.
        """
        return self.score == "softmax" and self.pre_softmax and not self.renormalize


WARPS = 8  # of a CTA that selects experts


@dataclass(frozen=True)
class RouteConfiguration:
    """Selects experts by a rule and sorts the slots by expert; without a rule, sorts the caller's indices.

    A CTA takes consecutive tokens and counts its slots of each expert: ``counts`` has a row per CTA and one for the
    sums. :meth:`blocks` is the number of CTAs.
    """

    experts: int
    top_k: int
    rule: Rule | None = None
    dtype: str = ""
    biased: bool = False

    @property
    def experts_per_lane(self) -> int:
        """Consecutive experts per lane."""
        return -(-self.experts // WARP_SIZE)

    def blocks(self, tokens: int) -> int:
        """CTAs: those that are resident at a time on a GPU, or fewer for few tokens."""
        return min(1024 if self.experts <= 256 else 512, -(-tokens // WARPS))

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        scored: list[Slot] = []
        if self.rule is not None:
            size = FORMATS[self.dtype].bits // 8
            scored.append(Tensor("logits", self.dtype, ("tokens", self.experts), (None, 1), align=size))
            scored += [Tensor("bias", "float32", (self.experts,), (1,), align=4)] if self.biased else []
            scored.append(per_slot("weights", self.top_k, "float32"))
            if not self.rule.is_dense:
                scored.append(Tensor("chosen", self.dtype, ("tokens", self.top_k), (self.top_k, 1), align=size))
            scored.append(Scalar("scaling_factor", "float32"))
        return (
            *scored,
            per_slot("indices", self.top_k),
            Tensor("offsets", "int32", (self.experts,), (1,), align=4),
            vector("gather_idx", "int32", "rows"),
            per_slot("scatter_idx", self.top_k),
            Tensor("counts", "int32", ("blocks + 1", self.experts), (self.experts, 1), align=4),
            Stream(),
        )


@dataclass(frozen=True)
class RouteGradientConfiguration:
    """The gradient of logits from that of weights.

    ``logits`` are those of all experts if the rule is dense, else of the selected ones. With ``num_slots`` per token,
    shared experts included, the gradients of the logits are also stored per row, 0 for a shared expert.
    """

    experts: int
    rule: Rule
    dtype: str
    num_slots: int = 0

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        size, known = FORMATS[self.dtype].bits // 8, self.experts if self.rule.is_dense else self.rule.top_k
        return (
            per_slot("gradient", self.rule.top_k, "float32"),
            Tensor("logits", self.dtype, ("tokens", known), (None, 1), align=size),
            per_slot("indices", self.rule.top_k),
            Tensor("d_logits", self.dtype, ("tokens", self.experts), (self.experts, 1), align=size),
            *([per_slot("scatter_idx", self.num_slots), per_row("per_row")] if self.num_slots else []),
            Scalar("scaling_factor", "float32"),
            Stream(),
        )


@dataclass(frozen=True)
class RowVectors:
    """Rows of ``hidden`` elements, processed in 16-byte vectors, one per thread."""

    dtype: str
    hidden: int
    top_k: int
    most_threads: int = field(default=256, kw_only=True)

    @property
    def vector(self) -> int:
        """Elements of a vector."""
        return 128 // FORMATS[self.dtype].bits

    @property
    def slices(self) -> int:
        """CTAs that share a row."""
        return -(-self.hidden // (self.vector * self.most_threads))

    @property
    def width(self) -> int:
        """Threads of a CTA per row."""
        return -(-self.hidden // (self.vector * self.slices))


@dataclass(frozen=True)
class CombineConfiguration(RowVectors):
    """Sums of ``top_k`` rows for each token, ``weighted`` or not; or their ``gradient``."""

    weighted: bool
    gradient: bool = False

    def summands(self) -> tuple[Slot, ...]:
        """The arguments that are summed."""
        rows = Tensor("rows", self.dtype, ("rows", self.hidden), (None, 1))
        slots: tuple[Slot, ...] = (per_slot("scatter_idx", self.top_k, at_once=True),)
        if self.weighted or not self.gradient:
            slots = (rows, *slots)
        return (*slots, per_slot("weights", self.top_k, "float32", True)) if self.weighted else slots

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        slots = (*self.summands(), Tensor("out", self.dtype, ("tokens", self.hidden), (None, 1)))
        if self.gradient:
            slots += (Tensor("d_rows", self.dtype, ("rows", self.hidden), (None, 1)),)
            slots += (per_slot("d_weights", self.top_k, "float32"),) if self.weighted else ()
        return (*slots, Stream())


@dataclass(frozen=True)
class ValuesConfiguration:
    """Stores the value of each slot to its row, and 0 to the row's ``sums``; or, with ``back``, the value of each row
    to its slot, 0 for dropped slots.
    """

    top_k: int
    back: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        names = ("per_row",) if self.back else ("per_row", "sums")
        return (
            per_slot("scatter_idx", self.top_k),
            per_slot("per_slot", self.top_k, "float32"),
            *map(per_row, names),
            Stream(),
        )


@dataclass(frozen=True)
class RowOffsetsConfiguration:
    """The end offsets of experts' rows from their counts, and zeros in ``rows`` behind the last end.

    Without a ``count_dtype``, the kernel reads the offsets instead of writing them.
    """

    experts: int
    dtype: str
    hidden: int
    count_dtype: str = ""

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 128 // FORMATS[self.dtype].bits

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        counts: tuple[Slot, ...] = ()
        if self.count_dtype:
            size = 8 if self.count_dtype == "int64" else 4
            counts = (Tensor("counts", self.count_dtype, (self.experts,), (1,), align=size),)
        return (
            *counts,
            Tensor("offsets", "int32", (self.experts,), (1,), align=4),
            Tensor("rows", self.dtype, ("rows", self.hidden), (None, 1)),
            Stream(),
        )


BLOCK, FP8_DTYPE = 128, "float8_e4m3fn"


@dataclass(frozen=True)
class QuantizeConfiguration:
    """Quantizes rows of ``columns`` elements, a multiple of BLOCK, to e4m3. A scale factor is for BLOCK elements of a
    row or, with ``blocks``, for BLOCK x BLOCK. With ``top_k``, rows are tokens, stored to the rows of their slots
    (permuted). With ``matrix_rows``, blocks are of matrices (matrix_rows, columns), one after the other, which are also
    stored transposed.
    """

    dtype: str
    columns: int
    blocks: bool = False
    top_k: int = 0
    matrix_rows: int = 0

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        rows, across = "rows" if self.top_k else "tokens", self.columns // BLOCK
        slots: tuple[Slot, ...] = (
            Tensor("x", self.dtype, ("tokens", self.columns), (None, 1)),
            *((per_slot("scatter_idx", self.top_k, at_once=True),) if self.top_k else ()),
            Tensor("quantized", FP8_DTYPE, (rows, self.columns), (None, 1)),
            Tensor("scales", "float32", ("blocks" if self.blocks else rows, across), (None, 1), align=4),
        )
        if self.matrix_rows:
            height, down = self.matrix_rows, self.matrix_rows // BLOCK
            slots += (Tensor("transposed", FP8_DTYPE, ("transposed rows", height), (None, 1)),)
            slots += (Tensor("transposed_scales", "float32", ("transposed blocks", down), (down, 1), align=4),)
        return (*slots, Stream())


@dataclass(frozen=True)
class CheckQuantizedConfiguration:
    """Sets ``changed`` if row ``row`` of any BLOCK rows of x (rows, columns) is not rounded to its e4m3 copy."""

    dtype: str
    columns: int

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        across = self.columns // BLOCK
        return (
            Tensor("x", self.dtype, ("rows", self.columns), (None, 1)),
            Tensor("quantized", FP8_DTYPE, ("rows", self.columns), (None, 1)),
            Tensor("scales", "float32", ("rows / 128", across), (across, 1), align=4),
            Tensor("changed", "int32", (1,), (1,), align=4),
            Scalar("row", "int32"),
            Stream(),
        )


@dataclass(frozen=True)
class TransposeQuantizedConfiguration:
    """Transposes e4m3 matrices (rows, columns), one after the other, with a scale factor for BLOCK x BLOCK elements."""

    rows: int
    columns: int

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        down, across = self.rows // BLOCK, self.columns // BLOCK
        return (
            Tensor("quantized", FP8_DTYPE, ("rows", self.columns), (None, 1)),
            Tensor("scales", "float32", ("blocks", across), (across, 1), align=4),
            Tensor("transposed", FP8_DTYPE, ("transposed rows", self.rows), (None, 1)),
            Tensor("transposed_scales", "float32", ("transposed blocks", down), (down, 1), align=4),
            Stream(),
        )


@dataclass(frozen=True)
class QuantizeTokensConfiguration:
    """Quantizes tokens of ``columns`` elements, a multiple of BLOCK, to e4m3 by token columns, with ``by_rows`` by rows
    too. ``gathers``: row r of the experts' is token ``gather_idx[r]``; else x is the rows. Tokens in e4m3 come with
    their scale factors ``x_scales``; by rows they are copied.

    - ``offsets``: where the rows of each expert end.
    - ``rows`` (rows, columns) and ``row_scales`` (rows, columns / BLOCK), MN-major.
    - ``blocks`` (blocks, columns, BLOCK) and ``block_scales`` (blocks, columns): block start // BLOCK + e + j has the
      expert's rows from start + BLOCK j on, transposed, and zeros behind its last row. Other blocks are not written.
    """

    dtype: str
    columns: int
    experts: int
    gathers: bool
    by_rows: bool

    @property
    def dequantizes(self) -> bool:
        """Whether the tokens are in e4m3."""
        return self.dtype == FP8_DTYPE

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        across, sources = self.columns // BLOCK, "tokens" if self.gathers else "rows"
        slots: tuple[Slot, ...] = (
            Tensor("x", self.dtype, (sources, self.columns), (None, 1)),
            *((Tensor("x_scales", "float32", (sources, across), (None, 1), align=4),) if self.dequantizes else ()),
            *((vector("gather_idx", "int32", "rows"),) if self.gathers else ()),
            Tensor("offsets", "int32", (self.experts,), (1,), align=4),
        )
        if self.by_rows:
            slots += (Tensor("rows", FP8_DTYPE, ("rows", self.columns), (None, 1)),)
            slots += (Tensor("row_scales", "float32", ("rows", across), (1, None), align=4),)
        return (
            *slots,
            Tensor("blocks", FP8_DTYPE, ("blocks", self.columns, BLOCK), (None, BLOCK, 1)),
            Tensor("block_scales", "float32", ("blocks", self.columns), (self.columns, 1)),
            Stream(),
        )


@dataclass(frozen=True)
class CombineExchangeConfiguration(CombineConfiguration):
    """Combine with exchange: sums that are sent to the tokens' ranks, with ``values`` float32 per token, as bits.

    ``out`` is the sum over all ranks of this rank's tokens, ``own_values`` that of the values. At least ``before``
    CTAs, about the resident ones of a GPU, start between one that sends a token and the one that adds the received
    rows.
    """

    ranks: int = field(kw_only=True)
    values: int = field(kw_only=True)
    before: int = field(default=512, kw_only=True)

    @property
    def lookahead(self) -> int:
        """The lookahead of sending over adding, in tokens."""
        return -(-self.before // (self.ranks * self.slices))

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        slots = (*self.summands(), addresses("targets", "ranks"))
        slots += (Tensor("row_of_rank", "int32", ("own", self.ranks), (self.ranks, 1), align=4),)
        slots += (Tensor("out", self.dtype, ("own", self.hidden), (None, 1)), addresses("word_targets", "ranks"))
        if self.values:
            slots += (Tensor("values", "int32", ("tokens", self.values), (self.values, 1), align=4),)
            slots += (Tensor("own_values", "int32", ("own", self.values), (self.values, 1), align=4),)
        return (*slots, Scalar("rank", "int32"), Scalar("max_tokens", "int32"), Scalar("timeout_ms", "int32"), Stream())


@dataclass(frozen=True)
class DispatchConfiguration(RowVectors):
    """Dispatch: sends tokens to the ranks with one of their ``top_k`` experts; each of ``ranks`` has ``local_experts``.

    ``sends_routing``: the indices and weights are sent to all ranks, too.
    """

    ranks: int
    local_experts: int
    sends_routing: bool

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel; weights as bits."""
        slots: tuple[Slot, ...] = (
            Tensor("tokens", self.dtype, ("tokens", self.hidden), (None, 1)),
            per_slot("indices", self.top_k),
            addresses("targets", "ranks"),
        )
        if self.sends_routing:
            slots += (per_slot("weights", self.top_k), addresses("slot_targets", "ranks"))
            slots += (Tensor("row_of_rank", "int32", ("tokens", self.ranks), (self.ranks, 1), align=4),)
        return (*slots, Scalar("rank", "int32"), Scalar("max_tokens", "int32"), Stream())
