"""NSA selection attention on Blackwell, backward: Hopper's kernel with mma.sync GEMMs.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.mma_sync_utils import MmaSyncMixin
from cudnn_kernels.sm90 import selection_backward


class SelectionBackward(MmaSyncMixin, selection_backward.SelectionBackward):
    """The kernels for one :class:`SelectionBackwardConfiguration`."""
