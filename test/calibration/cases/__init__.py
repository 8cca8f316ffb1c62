"""All the cases, by family."""

from __future__ import annotations

from calibration.case import Case
from calibration.cases import (
    barriers,
    conversion,
    copies,
    floating,
    integer,
    matrices,
    tensors,
    warp,
    wgmma,
)


def cases(arch: str) -> list[Case]:
    """The cases for an architecture, in the order of their families."""
    families = (integer, floating, conversion, warp, barriers, copies, tensors, matrices, wgmma)
    return [case for family in families for case in family.cases() if arch in case.archs]
