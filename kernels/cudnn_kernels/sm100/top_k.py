"""The blocks of keys with the largest probabilities, for every row, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.warp_products import WarpProducts
from cudnn_kernels.sm90 import top_k


class TopK(WarpProducts, top_k.TopK):
    """The kernel for one :class:`TopKConfiguration`."""
