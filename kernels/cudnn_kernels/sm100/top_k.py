"""NSA top-k block selection on Blackwell: Hopper's kernel with mma.sync GEMMs.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.mma_sync_utils import MmaSyncMixin
from cudnn_kernels.sm90 import top_k


class TopK(MmaSyncMixin, top_k.TopK):
    """The kernel for one :class:`TopKConfiguration`."""
