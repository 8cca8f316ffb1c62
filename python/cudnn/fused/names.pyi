"""The public names of the fused APIs. Written by `python docs/generate.py`."""

# ruff: noqa: F403
from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_dswiglu import *
from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_swiglu import *
from cudnn.gemm_amax import *
from cudnn.gemm_dsrelu import *
from cudnn.gemm_dswiglu import *
from cudnn.gemm_geglu import *
from cudnn.gemm_proj_rope_mxfp8 import *
from cudnn.gemm_rope import *
from cudnn.gemm_srelu import *
from cudnn.gemm_swiglu import *
from cudnn.grouped_gemm.grouped_gemm import *
from cudnn.grouped_gemm.grouped_gemm_dglu import *
from cudnn.grouped_gemm.grouped_gemm_dsrelu import *
from cudnn.grouped_gemm.grouped_gemm_dswiglu import *
from cudnn.grouped_gemm.grouped_gemm_glu import *
from cudnn.grouped_gemm.grouped_gemm_glu_hadamard import *
from cudnn.grouped_gemm.grouped_gemm_glu_hadamard_quant import *
from cudnn.grouped_gemm.grouped_gemm_quant import *
from cudnn.grouped_gemm.grouped_gemm_srelu import *
from cudnn.grouped_gemm.grouped_gemm_swiglu import *
from cudnn.grouped_gemm.grouped_gemm_wgrad import *
from cudnn.native_sparse_attention import *
from cudnn.rmsnorm_rht_amax import *
from cudnn.sdpa import *
