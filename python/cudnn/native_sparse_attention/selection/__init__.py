"""Selection attention: block-sparse attention with a KV-block list for each row."""

from cudnn.native_sparse_attention.selection.api import SelectionAttention, selection_attention_wrapper

__all__ = ["SelectionAttention", "selection_attention_wrapper"]
