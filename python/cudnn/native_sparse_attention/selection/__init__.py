"""Attention of each row to blocks of keys of its own choice."""

from cudnn.native_sparse_attention.selection.api import SelectionAttention, selection_attention_wrapper

__all__ = ["SelectionAttention", "selection_attention_wrapper"]
