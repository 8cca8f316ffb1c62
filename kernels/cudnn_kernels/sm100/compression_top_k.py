"""Attention to compressed keys and the best blocks in one pass, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.warp_products import WarpProducts
from cudnn_kernels.sm90 import compression_top_k


class CompressionTopK(WarpProducts, compression_top_k.CompressionTopK):
    """The kernel for one :class:`CompressionTopKConfiguration`."""
