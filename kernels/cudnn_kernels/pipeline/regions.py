"""The workspace of a call, divided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from cudnn_kernels.signature import START, Region, Sizes, Workspace, sizes_of


def divided(
    slots: Sequence[Any], arguments: Mapping[str, Any], regions: Sequence[Region], sizes: Sizes | None = None
) -> dict[str, Any]:
    """Pointers to regions of the workspace, by name. Without ``sizes``, the slots' own; matrices of two dimensions are
    one each.
    """
    if not regions:
        return {}
    (workspace,) = (slot for slot in slots if isinstance(slot, Workspace))
    places, _ = workspace.places(sizes or {"l": Int64(1), **sizes_of(slots, arguments, Int64)})
    first = arguments[workspace.name].iterator
    return {x.name: (first + cute.assume(Int64(places[x.name]), START)).align(16) for x in regions}
