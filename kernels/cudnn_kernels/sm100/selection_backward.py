"""The gradients of attention to blocks of keys that rows choose, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from cudnn_kernels.attention.warp_products import WarpProducts
from cudnn_kernels.sm90 import selection_backward


class SelectionBackward(WarpProducts, selection_backward.SelectionBackward):
    """The kernels for one :class:`SelectionBackwardConfiguration`."""
