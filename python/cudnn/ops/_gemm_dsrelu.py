# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.gemm_dsrelu.api import GemmDsrelu, gemm_dsrelu_wrapper
from cudnn.gemm_srelu.api import quantized_results
from cudnn.ops._gemm import operator


@operator(
    GemmDsrelu,
    ("d", "dprob", "amax", "sfd"),
    lambda o: {
        "dprob": (torch.float32, ""),
        **quantized_results(o["a"], o["sfa"], o["d_dtype"], o["d_major"]),
    },
)
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
    results: Any = gemm_dsrelu_wrapper(a, b, c, sfa, sfb, prob, alpha, d_major, d_dtype, **options)
    return results
