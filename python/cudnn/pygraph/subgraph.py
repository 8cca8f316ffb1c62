"""A list of nodes with the methods that may appear inside composite operations."""

from __future__ import annotations

from cudnn.pygraph.block_scale import BlockScaleMethods
from cudnn.pygraph.convolution import ConvolutionMethods
from cudnn.pygraph.matmul import MatmulMethods
from cudnn.pygraph.moe import MoeMethods
from cudnn.pygraph.pointwise import PointwiseMethods
from cudnn.pygraph.reduction import ReductionMethods
from cudnn.pygraph.rope import RopeMethods
from cudnn.pygraph.structure import StructureMethods


class SubGraph(
    PointwiseMethods,
    MatmulMethods,
    MoeMethods,
    BlockScaleMethods,
    ReductionMethods,
    ConvolutionMethods,
    RopeMethods,
    StructureMethods,
):
    """Every operation that is not composite itself. ``pygraph`` adds the others and the life cycle."""
