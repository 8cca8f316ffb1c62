"""Modules of PyTorch on fused kernels."""

from cudnn.gated_mlp.module import GatedMLP
from cudnn.moe.module import MoE
from cudnn.nn.gradients import clip_grad_norm_

__all__ = ["GatedMLP", "MoE", "clip_grad_norm_"]
