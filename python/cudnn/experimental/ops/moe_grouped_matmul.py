"""``moe_grouped_matmul``, and the cache of its graphs."""

from cudnn.moe.grouped_matmul import _graph_cache, moe_grouped_matmul

__all__ = ["_graph_cache", "moe_grouped_matmul"]
