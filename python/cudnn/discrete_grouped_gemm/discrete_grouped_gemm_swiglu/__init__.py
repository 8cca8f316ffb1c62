"""Grouped GEMM with pointers to weights (ptr-array) + gated activation, in one kernel."""

from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_swiglu.api import *
