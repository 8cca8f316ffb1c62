"""Attention of each row to a window of keys around its own place."""

from cudnn.native_sparse_attention.sliding_window_attention.api import SlidingWindowAttention

__all__ = ["SlidingWindowAttention"]  # not the wrapper: the registry would take a graph for a fused kernel
