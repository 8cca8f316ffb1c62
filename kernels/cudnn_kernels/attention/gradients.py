"""What a backward pass is compiled for that computes each gradient where nobody else adds to it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_kernels.attention import BackwardConfiguration, Rows


@dataclass(frozen=True)
class Pass:
    """What one kernel computes: ``sums`` over blocks of dS or, for dv, of P, times an operand of the columns."""

    sums: tuple[str, ...]

    @property
    def of_queries(self) -> bool:
        """Whether rows are queries."""
        return "dq" in self.sums

    @property
    def rows(self) -> tuple[str, ...]:
        """The left operands of S and, where dS is needed, of dP."""
        operands = ("q", "do") if self.of_queries else ("k", "v")
        return operands[:1] if self.sums == ("dv",) else operands

    @property
    def columns(self) -> tuple[str, str]:
        """The right ones. The first is the factor of dS, the second that of P."""
        return ("k", "v") if self.of_queries else ("q", "do")


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
        if self.head + self.head_v <= columns:
            return Pass(("dq",)), Pass(("dk", "dv"))
        return Pass(("dq",)), Pass(("dk",)), Pass(("dv",))
