"""Operators on PyTorch tensors that run graphs of cuDNN; their signatures may change."""

from cudnn.experimental import ops

__all__ = ["ops"]
