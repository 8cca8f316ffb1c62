"""Modules of PyTorch on fused kernels."""

from cudnn.gated_mlp.module import GatedMLP
from cudnn.moe.module import MoE

__all__ = ["GatedMLP", "MoE"]
