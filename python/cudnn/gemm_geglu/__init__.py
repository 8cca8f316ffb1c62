"""A GEMM and the GeGLU of its columns in one kernel, as gpt-oss has it: clamped, with an offset."""

from cudnn.gemm_geglu.api import *
