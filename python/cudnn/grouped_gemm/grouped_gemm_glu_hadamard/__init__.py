"""Grouped GEMM + gated activation + largest magnitudes before and after a Hadamard transform, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_glu_hadamard.api import *
