"""NSA compression attention fused with top-k selection on Blackwell: Hopper's kernel with mma.sync GEMMs.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.mma_sync_utils import MmaSyncMixin
from cudnn_kernels.sm90 import compression_top_k


class CompressionTopK(MmaSyncMixin, compression_top_k.CompressionTopK):
    """The kernel for one :class:`CompressionTopKConfiguration`."""
