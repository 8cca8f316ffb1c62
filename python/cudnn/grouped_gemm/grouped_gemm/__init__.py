"""A GEMM of the tokens of several experts with the experts' weights, and nothing fused but weights and a bias."""

from cudnn.grouped_gemm.grouped_gemm.api import *
