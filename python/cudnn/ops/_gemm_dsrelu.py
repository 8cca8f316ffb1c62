# No `from __future__ import annotations`: PyTorch reads the types.

import torch

from cudnn.gemm_dsrelu.api import GemmDsrelu, gemm_dsrelu_wrapper
from cudnn.gemm_srelu.api import quantized_results
from cudnn.ops._gemm import fake, present

_ORDER = ("d", "dprob", "amax", "sfd")


@torch.library.custom_op("cudnn::gemm_dsrelu", mutates_args=())
def gemm_dsrelu(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    sfa: torch.Tensor | None,
    sfb: torch.Tensor | None,
    prob: torch.Tensor,
    alpha: float = 1.0,
    d_major: str = "n",
    d_dtype: torch.dtype = torch.bfloat16,
    norm_const: torch.Tensor | None = None,
    sf_vec_size: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A GEMM and the backward pass of a squared ReLU: (d, dprob, amax, sfd). There is no backward pass of it.

    Shapes, types and errors as those of :class:`cudnn.GemmDsrelu`. A result that there is not has no elements.
    """
    options = {"norm_const_tensor": norm_const, "sf_vec_size": sf_vec_size}
    results = gemm_dsrelu_wrapper(a, b, c, sfa, sfb, prob, alpha, d_major, d_dtype, **options)
    d, dprob, amax, sfd = present(results, [f"{name}_tensor" for name in _ORDER], a)
    return d, dprob, amax, sfd


@gemm_dsrelu.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    sfa: torch.Tensor | None,
    sfb: torch.Tensor | None,
    prob: torch.Tensor,
    alpha: float = 1.0,
    d_major: str = "n",
    d_dtype: torch.dtype = torch.bfloat16,
    norm_const: torch.Tensor | None = None,
    sf_vec_size: int = 16,
) -> tuple[torch.Tensor, ...]:
    results = {"dprob": (torch.float32, ""), **quantized_results(a, sfa, d_dtype, d_major)}
    return fake(GemmDsrelu, a, b, results, _ORDER, sf_vec_size)
