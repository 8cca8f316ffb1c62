"""Causal convolution as an operator of PyTorch."""

from cudnn.causal_conv1d.operator import causal_conv1d

__all__ = ["causal_conv1d"]
