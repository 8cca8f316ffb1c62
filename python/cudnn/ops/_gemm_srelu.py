# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.gemm_srelu.api import GemmSrelu, gemm_srelu_wrapper, quantized_results
from cudnn.ops._gemm import operator


@operator(
    GemmSrelu,
    ("c", "d", "amax", "sfd"),
    lambda o: {
        "c": (o["c_dtype"], o["c_major"]),
        **quantized_results(o["a"], o["sfa"], o["d_dtype"], o["c_major"]),
    },
)
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
    results: Any = gemm_srelu_wrapper(a, b, sfa, sfb, prob, alpha, c_major, c_dtype, d_dtype, **options)
    return results
