"""Attention to compressed keys."""

from cudnn.native_sparse_attention.compression.api import CompressionAttention, compression_attention_wrapper

__all__ = ["CompressionAttention", "compression_attention_wrapper"]
