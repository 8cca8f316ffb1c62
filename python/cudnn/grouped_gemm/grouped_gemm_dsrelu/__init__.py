"""A GEMM of the tokens of several experts, and the backward pass of a squared ReLU, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_dsrelu.api import *
