"""A GEMM and the backward pass of a squared ReLU, in one kernel."""

from cudnn.gemm_dsrelu.api import *
