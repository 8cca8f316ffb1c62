"""The blocks of keys with the largest probabilities, for every row."""

from cudnn.native_sparse_attention.top_k.api import TopKReduction, topk_reduction_wrapper

__all__ = ["TopKReduction", "topk_reduction_wrapper"]
