"""``torch.ops.cudnn.rmsnorm_rht_amax``."""

from __future__ import annotations

import torch

from cudnn.api_base import unpad
from cudnn.rmsnorm_rht_amax.api import rmsnorm_rht_amax_wrapper
from cudnn_kernels.norm.heuristics import pick_rows_per_cta


@torch.library.custom_op("cudnn::rmsnorm_rht_amax", mutates_args=())
def rmsnorm_rht_amax(
    x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5, rows_per_cta: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm, Hadamard transform of every 16 columns and amax of every group of rows: (o, amax).

    Shapes, types and errors as those of :class:`cudnn.RmsNormRhtAmax`. There is no backward pass.
    """
    o, amax = rmsnorm_rht_amax_wrapper(x, w, eps=eps, rows_per_cta=rows_per_cta)
    return o, amax


@rmsnorm_rht_amax.register_fake
def _(
    x: torch.Tensor, w: torch.Tensor, eps: float = 1e-5, rows_per_cta: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    x = unpad(x, 2)
    m = x.shape[:-1].numel()
    rows = rows_per_cta if rows_per_cta is not None else pick_rows_per_cta(m)
    return torch.empty_like(x), x.new_empty(m // rows, dtype=torch.float32)
