"""What a graph is, what runs it and why not: ``graph.explain()`` and ``cudnn explain``.

An ``Explanation`` holds nodes, tensors, the plan, the plans that were refused and the reasons; it prints itself,
renders itself as SVG, and shows itself in a notebook.
"""

from cudnn.pygraph.explain.collect import explain
from cudnn.pygraph.explain.model import (
    ExplainedNode,
    ExplainedPlan,
    ExplainedTensor,
    Explanation,
    Operation,
    Reason,
    RefusedPlan,
)

__all__ = [
    "ExplainedNode",
    "ExplainedPlan",
    "ExplainedTensor",
    "Explanation",
    "Operation",
    "Reason",
    "RefusedPlan",
    "explain",
]
