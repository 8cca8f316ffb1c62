"""Operators on PyTorch tensors that run graphs of cuDNN, with gradients and for ``torch.compile``."""

import cudnn.attention.fused  # noqa: F401  registers the operators of head size 256
from cudnn.experimental.ops.moe_grouped_matmul import moe_grouped_matmul
from cudnn.experimental.ops.sdpa import scaled_dot_product_attention

__all__ = ["moe_grouped_matmul", "scaled_dot_product_attention"]
