"""A GEMM whose epilogue rotates heads by the positions of rows: a projection with rotary embeddings, in one kernel."""

from cudnn.gemm_rope.api import *
