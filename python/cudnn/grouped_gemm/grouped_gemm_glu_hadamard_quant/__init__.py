"""Grouped GEMM + gated activation + Hadamard transform + quantization to four bits, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_glu_hadamard_quant.api import *
