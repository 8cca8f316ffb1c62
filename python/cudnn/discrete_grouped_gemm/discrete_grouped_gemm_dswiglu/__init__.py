"""Grouped GEMM with pointers to weights (ptr-array) + backward pass of a gated activation, in one kernel."""

from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_dswiglu.api import *
