# No `from __future__ import annotations`: PyTorch reads the types.

import torch

from cudnn.gemm_amax.api import GemmAmax, gemm_amax_wrapper
from cudnn.ops._gemm import fake

_ORDER = ("c", "amax")


@torch.library.custom_op("cudnn::gemm_amax", mutates_args=())
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
    c, amax = gemm_amax_wrapper(a, b, sfa, sfb, c_major, c_dtype, sf_vec_size=sf_vec_size)
    return c, amax


@gemm_amax.register_fake
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    sfa: torch.Tensor | None = None,
    sfb: torch.Tensor | None = None,
    c_major: str = "n",
    c_dtype: torch.dtype = torch.float32,
    sf_vec_size: int = 32,
) -> tuple[torch.Tensor, ...]:
    return fake(GemmAmax, a, b, {"c": (c_dtype, c_major), "amax": (torch.float32, "")}, _ORDER, sf_vec_size)
