"""Attention of each row to blocks of keys of its own choice, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.warp_products import WarpProducts
from cudnn_kernels.sm90 import selection


class Selection(WarpProducts, selection.Selection):
    """The kernel for one :class:`SelectionConfiguration`."""

    apart = False


class GatedSelection(WarpProducts, selection.GatedSelection):
    """The kernel for one :class:`GatedSelectionConfiguration`."""

    apart = False
