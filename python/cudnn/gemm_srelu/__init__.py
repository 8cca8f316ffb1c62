"""A GEMM and the squared ReLU of its result times a probability for each row, in one kernel."""

from cudnn.gemm_srelu.api import *
