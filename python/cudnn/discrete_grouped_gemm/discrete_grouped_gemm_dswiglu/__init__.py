"""Grouped GEMM with weights behind addresses + backward pass of a gated activation, in one kernel."""

from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_dswiglu.api import *
