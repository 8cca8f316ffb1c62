"""The gradients of the weights of several experts, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_wgrad.api import *
