"""A GEMM and the backward pass of SwiGLU, in one kernel."""

from cudnn.gemm_dswiglu.api import *
