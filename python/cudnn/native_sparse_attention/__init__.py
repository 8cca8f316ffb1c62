"""Native sparse attention: ``cudnn.NSA``."""

from cudnn.native_sparse_attention.compression import CompressionAttention, compression_attention_wrapper
from cudnn.native_sparse_attention.compression.backward import (
    CompressionAttentionBackward,
    compression_attention_backward_wrapper,
)
from cudnn.native_sparse_attention.compression.top_k import CompressionTopK, compression_top_k_wrapper
from cudnn.native_sparse_attention.selection import SelectionAttention, selection_attention_wrapper
from cudnn.native_sparse_attention.selection.backward import (
    SelectionAttentionBackward,
    selection_attention_backward_wrapper,
)
from cudnn.native_sparse_attention.selection.csr_transpose import choosing_rows, transpose_selection
from cudnn.native_sparse_attention.sliding_window_attention.api import (
    SlidingWindowAttention,
    sliding_window_attention_wrapper,
)
from cudnn.native_sparse_attention.top_k import TopKReduction, topk_reduction_wrapper


class NSA:
    """The branches of native sparse attention (J. Yuan et al., 2025), each a class and a wrapper."""

    CompressionAttention = CompressionAttention
    CompressionAttentionBackward = CompressionAttentionBackward
    CompressionTopK = CompressionTopK
    SelectionAttention = SelectionAttention
    SelectionAttentionBackward = SelectionAttentionBackward
    SlidingWindowAttention = SlidingWindowAttention
    TopKReduction = TopKReduction
    choosing_rows = staticmethod(choosing_rows)
    compression_attention_backward_wrapper = staticmethod(compression_attention_backward_wrapper)
    compression_attention_wrapper = staticmethod(compression_attention_wrapper)
    compression_top_k_wrapper = staticmethod(compression_top_k_wrapper)
    selection_attention_wrapper = staticmethod(selection_attention_wrapper)
    selection_attention_backward_wrapper = staticmethod(selection_attention_backward_wrapper)
    sliding_window_attention_wrapper = staticmethod(sliding_window_attention_wrapper)
    topk_reduction_wrapper = staticmethod(topk_reduction_wrapper)
    transpose_selection = staticmethod(transpose_selection)


__all__ = ["NSA"]
