"""A GEMM of the tokens of several experts, weighted, biased and quantized in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_quant.api import *
