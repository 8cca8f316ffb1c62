"""Modules of PyTorch on fused kernels."""

from cudnn.nn.moe import MoE

__all__ = ["MoE"]
