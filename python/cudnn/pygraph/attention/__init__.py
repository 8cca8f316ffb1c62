"""Attention: ``sdpa`` and its gradients in 16 bits, fp8 and mxfp8, as nodes of a graph."""

from cudnn.pygraph.attention.fp8 import Fp8AttentionMethods as Fp8AttentionMethods
from cudnn.pygraph.attention.methods import AttentionMethods as AttentionMethods
from cudnn.pygraph.attention.mxfp8 import Mxfp8AttentionMethods as Mxfp8AttentionMethods
