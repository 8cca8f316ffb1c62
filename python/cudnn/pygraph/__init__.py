"""The graph builder."""

from cudnn.pygraph.graph import pygraph as pygraph
from cudnn.pygraph.tensor import Tensor as Tensor
