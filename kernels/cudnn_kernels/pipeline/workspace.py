"""Suballocation of a call's workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from cudnn_kernels.signature import START, Region, Sizes, Workspace, sizes_of


def workspace_pointers(
    slots: Sequence[Any], arguments: Mapping[str, Any], regions: Sequence[Region], sizes: Sizes | None = None
) -> dict[str, Any]:
    """Pointers to the regions of the workspace, by name. ``sizes`` default to those of the slots, with l = 1 for
    matrices of two dimensions.
    """
    if not regions:
        return {}
    (workspace,) = (slot for slot in slots if isinstance(slot, Workspace))
    offsets, _ = workspace.offsets(sizes or {"l": Int64(1), **sizes_of(slots, arguments, Int64)})
    first = arguments[workspace.name].iterator
    return {x.name: (first + cute.assume(Int64(offsets[x.name]), START)).align(16) for x in regions}
