"""``scaled_dot_product_attention`` of existing programs, and the caches of its graphs."""

from cudnn.attention.graphs import _bprop_cache, _fprop_cache, scaled_dot_product_attention

__all__ = ["_bprop_cache", "_fprop_cache", "scaled_dot_product_attention"]
