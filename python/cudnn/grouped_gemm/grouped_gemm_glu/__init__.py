"""A GEMM of the tokens of several experts, and a gated activation of its columns, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_glu.api import *
