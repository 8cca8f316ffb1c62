"""Exceptions of the emulator. Every fault of a kernel is a `Fault` that names the PTX line, the block and the lanes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptx_emulator.report import Finding


class EmulatorError(RuntimeError):
    """Base class of everything raised here."""


class UnsupportedPTX(EmulatorError, NotImplementedError):  # noqa: N818
    """An opcode, modifier, descriptor bit or tensor-map bit that the emulator does not support."""


class Fault(EmulatorError):  # noqa: N818
    """The kernel violated a rule of PTX.

    Attributes:
        code: That of a row of [Findings](../emulator-findings.md). Classes with one kind of fault have it too.
        message: What happened.
        where: The PTX line, its text, the line of the source, the block and the threads; empty for a deadlock.
        findings: All findings of the run, where this one ended it.
    """

    code = ""

    def __init__(
        self,
        message: str,
        lanes: Iterable[Any] = (),
        site: int | None = None,
        code: str = "",
        other: int | None = None,
    ) -> None:
        """`lanes` index the machine's lane axis; `site` and `other` number the instruction, and an earlier one."""
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.lanes = [int(x) for x in lanes]
        self.site, self.other = site, other
        self.where = ""
        self.findings: list[Finding] = []

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.message}", *([self.where] if self.where else [])]
        others = [each for each in self.findings if each.fault is not self and each.severity == "error"]
        if others:
            lines.append(f"{len(others)} more error{'s' * (len(others) > 1)}:")
            lines += [f"  {each.summary()}" for each in others]
        return "\n".join(lines)


class OutOfBounds(Fault):
    """An address that belongs to no allocation."""

    code = "PE201"


class Misaligned(Fault):
    """An address that is not a multiple of the access size."""

    code = "PE202"


class UninitializedRead(Fault):
    """A read of shared or tensor memory that was never written."""

    code = "PE203"


class Deadlock(Fault):
    """No thread can make progress. The message lists every waiting group and every barrier."""

    code = "PE301"


class BarrierError(Fault):
    """Over-arrival, use before init, arrival counts that disagree."""


class CollectiveError(Fault):
    """A warp- or warpgroup-wide instruction executed by only some of its lanes."""

    code = "PE401"


class TensorMemoryError(Fault):
    """A tensor memory access outside the allocation or the warp's lanes, or an allocation that was leaked."""


class RaceError(Fault):
    """Two conflicting accesses that synchronization does not order."""
