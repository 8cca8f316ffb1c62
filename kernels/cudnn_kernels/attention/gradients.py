"""What a backward pass is compiled for that computes each gradient where nobody else adds to it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_kernels.attention import BackwardConfiguration, Rows


@dataclass(frozen=True)
class Sum:
    """A gradient: the sum over blocks of dS or P times an operand of the columns, its ``factor``."""

    out: str
    of_ds: bool
    factor: int


@dataclass(frozen=True)
class Pass:
    """What one kernel computes: sums. ``rows`` are the left operands of S and, where there is a second one, of dP;
    ``columns`` are the right ones.
    """

    rows: tuple[str, ...]
    columns: tuple[str, str]
    sums: tuple[Sum, ...]

    @property
    def of_queries(self) -> bool:
        """Whether rows are queries."""
        return self.rows[0] == "q"


QUERIES = Pass(("q", "do"), ("k", "v"), (Sum("dq", True, 0),))
DK, DV = Sum("dk", True, 0), Sum("dv", False, 1)


@dataclass(frozen=True)
class GradientsConfiguration(BackwardConfiguration):
    """dQ, dK and dV. The tile is (rows of a CTA, columns of a block), be they queries or keys."""

    tile: tuple[int, int] = (128, 64)

    @property
    def kernel(self) -> str:
        return "attention_backward:AttentionBackward"

    def regions(self) -> tuple[Rows, ...]:
        """The regions of the workspace: LSE * log2(e), and D."""
        return tuple(Rows(name, 4, self.tile[0], self.packed) for name in ("log_sums", "row_products"))

    def passes(self, columns: int) -> tuple[Pass, ...]:
        """The kernels, one after the other, of which each has room for so many columns of sums."""
        keys, queries = ("k", "v"), ("q", "do")
        if self.head + self.head_v <= columns:
            return QUERIES, Pass(keys, queries, (DK, DV))
        return QUERIES, Pass(keys, queries, (DK,)), Pass(keys[:1], queries, (DV,))
