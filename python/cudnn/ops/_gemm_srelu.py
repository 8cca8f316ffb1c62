# No `from __future__ import annotations`: PyTorch reads the types.

import torch

from cudnn.gemm_srelu.api import GemmSrelu, gemm_srelu_wrapper, quantized_results
from cudnn.ops._gemm import fake, present

_ORDER = ("c", "d", "amax", "sfd")


@torch.library.custom_op("cudnn::gemm_srelu", mutates_args=())
def gemm_srelu(
    a: torch.Tensor,
    b: torch.Tensor,
    sfa: torch.Tensor | None,
    sfb: torch.Tensor | None,
    prob: torch.Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: torch.dtype = torch.bfloat16,
    d_dtype: torch.dtype = torch.bfloat16,
    norm_const: torch.Tensor | None = None,
    sf_vec_size: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A GEMM and the squared ReLU of its result: (c, d, amax, sfd). There is no backward pass.

    Shapes, types and errors as those of :class:`cudnn.GemmSrelu`. A result that there is not has no elements.
    """
    options = {"norm_const_tensor": norm_const, "sf_vec_size": sf_vec_size}
    results = gemm_srelu_wrapper(a, b, sfa, sfb, prob, alpha, c_major, c_dtype, d_dtype, **options)
    c, d, amax, sfd = present(results, [f"{name}_tensor" for name in _ORDER], a)
    return c, d, amax, sfd


@gemm_srelu.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    sfa: torch.Tensor | None,
    sfb: torch.Tensor | None,
    prob: torch.Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: torch.dtype = torch.bfloat16,
    d_dtype: torch.dtype = torch.bfloat16,
    norm_const: torch.Tensor | None = None,
    sf_vec_size: int = 16,
) -> tuple[torch.Tensor, ...]:
    results = {"c": (c_dtype, c_major), **quantized_results(a, sfa, d_dtype, c_major)}
    return fake(GemmSrelu, a, b, results, _ORDER, sf_vec_size)
