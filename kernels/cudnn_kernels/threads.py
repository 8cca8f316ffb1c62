"""How many threads the hardware groups together, in one place for host and device code."""

from __future__ import annotations

WARP_SIZE = 32
WARPGROUP_SIZE = 128
"""Threads of four consecutive warps that issue one wgmma, or read the 128 lanes of tensor memory."""
