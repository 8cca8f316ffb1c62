"""A list of nodes with the methods that may appear inside composite operations."""

from __future__ import annotations

from cudnn.pygraph.convolution import ConvolutionMethods
from cudnn.pygraph.matmul import MatmulMethods
from cudnn.pygraph.pointwise import PointwiseMethods
from cudnn.pygraph.reduction import ReductionMethods
from cudnn.pygraph.structure import StructureMethods


class SubGraph(PointwiseMethods, MatmulMethods, ReductionMethods, ConvolutionMethods, StructureMethods):
    """Every operation that is not composite itself. ``pygraph`` adds the others and the life cycle."""
