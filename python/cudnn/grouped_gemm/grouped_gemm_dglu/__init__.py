"""A GEMM of the tokens of several experts, and the backward pass of a gated activation, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_dglu.api import *
