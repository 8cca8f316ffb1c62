"""A GEMM of the tokens of several experts, weighted, biased and quantised in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_quant.api import *
