"""Modules of PyTorch on fused kernels."""

from cudnn.moe.module import MoE

__all__ = ["MoE"]
