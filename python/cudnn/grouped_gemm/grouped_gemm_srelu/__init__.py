"""A GEMM of the tokens of several experts, and the squared ReLU of its columns, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_srelu.api import *
