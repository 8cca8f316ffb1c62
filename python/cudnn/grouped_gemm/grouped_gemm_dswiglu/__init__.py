"""Grouped GEMM + dGLU as programs call it that know SwiGLU alone."""

from cudnn.grouped_gemm.grouped_gemm_dswiglu.api import *
