# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.gemm_amax.api import GemmAmax, gemm_amax_wrapper
from cudnn.ops._gemm import operator


@operator(GemmAmax, ("c", "amax"), lambda o: {"c": (o["c_dtype"], o["c_major"]), "amax": (torch.float32, "")})
def gemm_amax(
    a: torch.Tensor,
    b: torch.Tensor,
    sfa: torch.Tensor | None = None,
    sfb: torch.Tensor | None = None,
    c_major: str = "n",
    c_dtype: torch.dtype = torch.float32,
    sf_vec_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A GEMM and the largest magnitude of its result: (c, amax). There is no backward pass.

    Shapes, types and errors as those of :class:`cudnn.GemmAmax`.
    """
    results: Any = gemm_amax_wrapper(a, b, sfa, sfb, c_major, c_dtype, sf_vec_size=sf_vec_size)
    return results
