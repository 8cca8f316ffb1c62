"""The blocks of keys with the largest probabilities, for every row, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.sm90 import top_k
from cudnn_kernels.sm100.warp_products import WarpProducts


class TopK(WarpProducts, top_k.TopK):
    """The kernel for one :class:`TopKConfiguration`."""
