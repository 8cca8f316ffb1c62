"""All the operations of a graph."""

from __future__ import annotations

from cudnn.pygraph.attention import AttentionMethods, Fp8AttentionMethods, Mxfp8AttentionMethods
from cudnn.pygraph.node import Operand
from cudnn.pygraph.normalization import NormalizationMethods
from cudnn.pygraph.subgraph import SubGraph


class Methods(
    AttentionMethods[Operand],
    Fp8AttentionMethods[Operand],
    Mxfp8AttentionMethods[Operand],
    NormalizationMethods[Operand],
    SubGraph[Operand],
):
    """The methods that add operations to a graph: of tensors to ``pygraph``, of arrays too to ``cudnn.Graph``."""
