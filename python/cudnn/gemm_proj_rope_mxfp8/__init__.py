"""The projection of MLA's queries: a GEMM, rotary embeddings, and quantization to MXFP8 by rows and by columns."""

from cudnn.gemm_proj_rope_mxfp8.projection import (
    GemmProjRopeMxfp8Bf16InSm100,
    GemmProjRopeMxfp8Mxfp8InSm100,
    gemm_proj_rope_mxfp8_wrapper_sm100,
)
from cudnn.gemm_proj_rope_mxfp8.projection import (
    gemm_proj_rope_mxfp8_reference as gemm_proj_rope_mxfp8_reference,
)

__all__ = [
    "GemmProjRopeMxfp8Bf16InSm100",
    "GemmProjRopeMxfp8Mxfp8InSm100",
    "gemm_proj_rope_mxfp8_wrapper_sm100",
]
