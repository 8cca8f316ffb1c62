"""NSA selection attention on Blackwell, forward: Hopper's kernel with mma.sync GEMMs.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.mma_sync_utils import MmaSyncMixin
from cudnn_kernels.sm90 import selection


class Selection(MmaSyncMixin, selection.Selection):
    """The kernel for one :class:`SelectionConfiguration`."""

    single_query = False


class GatedSelection(MmaSyncMixin, selection.GatedSelection):
    """The kernel for one :class:`GatedSelectionConfiguration`."""

    single_query = False
