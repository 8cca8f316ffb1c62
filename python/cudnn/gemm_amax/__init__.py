"""A GEMM and the largest magnitude of its result, in one kernel."""

from cudnn.gemm_amax.api import *
