"""The operators of the fused APIs, ``cudnn.ops``, for type checkers. Written by `python docs/generate.py`."""

import torch
from torch import Tensor, dtype

def gemm_amax(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    c_major: str = "n",
    c_dtype: dtype = torch.float32,
    sf_vec_size: int = 32,
    accurate: bool = False,
) -> tuple[Tensor, Tensor]:
    """GEMM + amax: c, amax; what there is not has no elements. See :class:`cudnn.GemmAmax`."""

def gemm_dsrelu(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    prob: Tensor,
    alpha: float = 1.0,
    d_major: str = "n",
    d_dtype: dtype = torch.bfloat16,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GEMM + dsReLU: d, dprob, amax, sfd; what there is not has no elements. See :class:`cudnn.GemmDsrelu`."""

def gemm_geglu(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    linear_offset: float = 1.0,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    accurate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GEMM + GeGLU: ab12, c, sfc, amax; what there is not has no elements. See :class:`cudnn.GemmGeglu`."""

def gemm_rope(
    a: Tensor,
    b: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    head_size: int = 128,
    rotary_size: int | None = None,
    rotated_begin: int = 0,
    rotated_end: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: dtype | None = None,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
) -> tuple[Tensor, Tensor]:
    """GEMM + RoPE: c, sfc; what there is not has no elements. See :class:`cudnn.GemmRope`."""

def gemm_srelu(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    prob: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: dtype = torch.bfloat16,
    d_dtype: dtype = torch.bfloat16,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GEMM + squared ReLU: c, d, amax, sfd; what there is not has no elements. See :class:`cudnn.GemmSrelu`."""

def gemm_swiglu(
    a: Tensor,
    b: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: dtype | None = torch.float32,
    c_dtype: dtype | None = torch.float16,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """GEMM + SwiGLU: ab12, c, sfc, amax; what there is not has no elements. See :class:`cudnn.GemmSwiglu`."""

def rmsnorm_rht_amax(
    x: Tensor,
    w: Tensor,
    eps: float = 1e-05,
    rows_per_cta: int | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm + RHT + amax: o, amax; what there is not has no elements. See :class:`cudnn.RmsNormRhtAmax`."""
