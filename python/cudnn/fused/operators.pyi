"""The operators of the fused APIs, ``cudnn.ops``, for type checkers. Written by `python docs/generate.py`."""

from typing import overload

from torch import Tensor, dtype

def discrete_grouped_gemm_dswiglu(
    a: Tensor,
    b_ptrs: Tensor,
    c: Tensor,
    sfa: Tensor | None,
    sfb_ptrs: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    beta: Tensor,
    prob: Tensor | None,
    n: int,
    b_dtype: dtype,
    generate_dbias: bool = False,
    norm_const: Tensor | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    b_major: str = "k",
    epilogue_op: str | None = None,
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    semantics: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Discrete grouped GEMM + dSwiGLU: d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col; absent results have no
    elements. See :class:`cudnn.DiscreteGroupedGemmDswiglu`."""

def discrete_grouped_gemm_swiglu(
    a: Tensor,
    b_ptrs: Tensor,
    sfa: Tensor | None,
    sfb_ptrs: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    n: int,
    b_dtype: dtype,
    bias: Tensor | None = None,
    norm_const: Tensor | None = None,
    prob: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    b_major: str = "k",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    semantics: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Discrete grouped GEMM + SwiGLU: c, d, d_col, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.DiscreteGroupedGemmSwiglu`."""

@overload
def gemm_amax(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    c_major: str = "n",
    c_dtype: dtype | None = None,
    sf_vec_size: int = 32,
    accurate: bool = False,
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + amax: c, or those of c, amax that returns names. See :class:`cudnn.GemmAmax`."""

@overload
def gemm_amax(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    c_major: str = "n",
    c_dtype: dtype | None = None,
    sf_vec_size: int = 32,
    accurate: bool = False,
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + amax: c, or those of c, amax that returns names. See :class:`cudnn.GemmAmax`."""

@overload
def gemm_dsrelu(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    prob: Tensor,
    alpha: float = 1.0,
    d_major: str = "n",
    d_dtype: dtype | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
    power_of_two_scales: bool = False,
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + dsReLU: d, or those of d, dprob, amax, sfd that returns names. See :class:`cudnn.GemmDsrelu`."""

@overload
def gemm_dsrelu(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    prob: Tensor,
    alpha: float = 1.0,
    d_major: str = "n",
    d_dtype: dtype | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
    power_of_two_scales: bool = False,
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + dsReLU: d, or those of d, dprob, amax, sfd that returns names. See :class:`cudnn.GemmDsrelu`."""

@overload
def gemm_dswiglu(
    a: Tensor,
    b: Tensor,
    ab12: Tensor,
    alpha: float = 1.0,
    prob: Tensor | None = None,
    d_ab12_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + dSwiGLU: d_ab12, or those of d_ab12, c, dprob, amax, sfd that returns names. See
    :class:`cudnn.GemmDswiglu`."""

@overload
def gemm_dswiglu(
    a: Tensor,
    b: Tensor,
    ab12: Tensor,
    alpha: float = 1.0,
    prob: Tensor | None = None,
    d_ab12_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + dSwiGLU: d_ab12, or those of d_ab12, c, dprob, amax, sfd that returns names. See
    :class:`cudnn.GemmDswiglu`."""

@overload
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
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    power_of_two_scales: bool = False,
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + GeGLU: c, or those of ab12, c, sfc, amax that returns names. See :class:`cudnn.GemmGeglu`."""

@overload
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
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    power_of_two_scales: bool = False,
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + GeGLU: c, or those of ab12, c, sfc, amax that returns names. See :class:`cudnn.GemmGeglu`."""

@overload
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
    power_of_two_scales: bool = False,
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + RoPE: c, or those of c, sfc that returns names. See :class:`cudnn.GemmRope`."""

@overload
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
    power_of_two_scales: bool = False,
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + RoPE: c, or those of c, sfc that returns names. See :class:`cudnn.GemmRope`."""

@overload
def gemm_srelu(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    prob: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
    power_of_two_scales: bool = False,
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + squared ReLU: d, or those of c, d, amax, sfd that returns names. See :class:`cudnn.GemmSrelu`."""

@overload
def gemm_srelu(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    prob: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    norm_const: Tensor | None = None,
    sf_vec_size: int = 16,
    accurate: bool = False,
    power_of_two_scales: bool = False,
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + squared ReLU: d, or those of c, d, amax, sfd that returns names. See :class:`cudnn.GemmSrelu`."""

@overload
def gemm_swiglu(
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
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    power_of_two_scales: bool = False,
    *,
    returns: None = None,
) -> Tensor:
    """GEMM + SwiGLU: c, or those of ab12, c, sfc, amax that returns names. See :class:`cudnn.GemmSwiglu`."""

@overload
def gemm_swiglu(
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
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    power_of_two_scales: bool = False,
    *,
    returns: tuple[str, ...] | list[str],
) -> tuple[Tensor, ...]:
    """GEMM + SwiGLU: c, or those of ab12, c, sfc, amax that returns names. See :class:`cudnn.GemmSwiglu`."""

def grouped_gemm(
    a: Tensor,
    padded_offsets: Tensor,
    alpha: Tensor,
    b: Tensor | None = None,
    bias: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    prob: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    generate_c: bool = False,
    a_index: Tensor | None = None,
    b_halves: bool = False,
) -> tuple[Tensor, Tensor]:
    """Grouped GEMM: d, c; absent results have no elements. See :class:`cudnn.GroupedGemm`."""

def grouped_gemm_dglu(
    a: Tensor,
    c: Tensor,
    sfa: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    beta: Tensor,
    prob: Tensor | None,
    b: Tensor | None = None,
    sfb: Tensor | None = None,
    generate_dbias: bool = False,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    norm_const: Tensor | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    epilogue_op: str | None = None,
    use_single_group_runtime_offsets: bool = False,
    round_dgrad_to_input_dtype: bool = False,
    deterministic: bool = False,
    semantics: str | None = None,
    a_index: Tensor | None = None,
    glu_layout: str = "interleaved",
    sfc: Tensor | None = None,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + dGLU: d_row, d_col, dprob, dbias, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.GroupedGemmDglu`."""

def grouped_gemm_dsrelu(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    padded_offsets: Tensor | None = None,
    alpha: Tensor | None = None,
    prob: Tensor | None = None,
    generate_dbias: bool = False,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    norm_const: Tensor | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    deterministic: bool | None = None,
    tanh_clamp_scale: float | None = None,
    semantics: str | None = None,
    a_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + dsReLU: d_row, d_col, d_srelu, dprob, dbias, amax, sfd_row, sfd_col, sfd_col_d_srelu; absent
    results have no elements. See :class:`cudnn.GroupedGemmDsrelu`."""

def grouped_gemm_dswiglu(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    beta: Tensor | None,
    prob: Tensor | None,
    norm_const: Tensor | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    epilogue_op: str | None = None,
    a_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + dSwiGLU: d_row, d_col, dprob, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.GroupedGemmDswiglu`."""

def grouped_gemm_glu(
    a: Tensor,
    sfa: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    b: Tensor | None = None,
    sfb: Tensor | None = None,
    bias: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    norm_const: Tensor | None = None,
    prob: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_single_group_runtime_offsets: bool = False,
    generate_c: bool = False,
    semantics: str | None = None,
    a_index: Tensor | None = None,
    glu_layout: str = "interleaved",
    sfc: Tensor | None = None,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + GLU: c, d, d_col, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.GroupedGemmGlu`."""

def grouped_gemm_glu_hadamard(
    a: Tensor,
    sfa: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    prob: Tensor,
    b: Tensor | None = None,
    sfb: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    bias: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    act_func: str = "swiglu",
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    semantics: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + GLU + Hadamard: c, d, amax, post_rht_amax; absent results have no elements. See
    :class:`cudnn.GroupedGemmGluHadamard`."""

def grouped_gemm_glu_hadamard_quant(
    a: Tensor,
    sfa: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    prob: Tensor,
    b: Tensor | None = None,
    sfb: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    bias: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    rht_rowwise_dtype: dtype | None = None,
    rht_colwise_dtype: dtype | None = None,
    glu_alpha: float | None = None,
    glu_limit: float | None = None,
    norm_const: float = 1.0,
    rht_norm_const: float = 1.0,
    sf_vec_size: int = 16,
    act_func: str = "swiglu",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + GLU + Hadamard + quantization: c, d, sfd, rht_rowwise, sfrht_rowwise, rht_colwise, sfrht_colwise;
    absent results have no elements. See :class:`cudnn.GroupedGemmGluHadamardQuant`."""

def grouped_gemm_quant(
    a: Tensor,
    sfa: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    b: Tensor | None = None,
    sfb: Tensor | None = None,
    bias: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    norm_const: Tensor | None = None,
    prob: Tensor | None = None,
    row_scale: Tensor | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    use_single_group_runtime_offsets: bool = False,
    generate_amax: bool = True,
    semantics: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + quantization: d, d_col, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.GroupedGemmQuant`."""

def grouped_gemm_srelu(
    a: Tensor,
    b: Tensor | None = None,
    sfa: Tensor | None = None,
    sfb: Tensor | None = None,
    padded_offsets: Tensor | None = None,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    norm_const: Tensor | None = None,
    prob: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    tanh_clamp_scale: float | None = None,
    a_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + squared ReLU: c, d, d_col, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.GroupedGemmSrelu`."""

def grouped_gemm_swiglu(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    padded_offsets: Tensor,
    alpha: Tensor,
    norm_const: Tensor | None = None,
    prob: Tensor | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    discrete_col_sfd: bool = False,
    a_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Grouped GEMM + SwiGLU: c, d, d_col, amax, sfd_row, sfd_col; absent results have no elements. See
    :class:`cudnn.GroupedGemmSwiglu`."""

def grouped_gemm_wgrad(
    a: Tensor,
    b: Tensor,
    sfa: Tensor | None,
    sfb: Tensor | None,
    offsets: Tensor,
    global_scale_a: Tensor | None = None,
    global_scale_b: Tensor | None = None,
    wgrad_dtype: dtype | None = None,
    sf_vec_size: int = 16,
    accumulate_on_output: bool = False,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
) -> tuple[Tensor]:
    """Grouped GEMM of weight gradients: wgrad; absent results have no elements. See :class:`cudnn.GroupedGemmWgrad`."""

def rmsnorm_rht_amax(
    x: Tensor,
    w: Tensor,
    eps: float = 1e-05,
    rows_per_cta: int | None = None,
) -> tuple[Tensor, Tensor]:
    """RMSNorm + RHT + amax: o, amax; absent results have no elements. See :class:`cudnn.RmsNormRhtAmax`."""
