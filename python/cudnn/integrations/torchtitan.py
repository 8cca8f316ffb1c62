"""torchtitan: an override that runs the routed experts on our grouped GEMMs.

--override.imports cudnn.integrations.torchtitan.cudnn_experts
"""

# No `from __future__ import annotations`: torchtitan's configurations are read at run time.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cudnn.errors import make_error
from cudnn.integrations.weights import interleaved, log_once
from cudnn.moe.dispatched import moe_experts

_WHERE = "cudnn.integrations.torchtitan"

try:
    from torchtitan.config import derive, override  # pyright: ignore[reportMissingImports]
    from torchtitan.models.common.moe import GroupedExperts  # pyright: ignore[reportMissingImports]
except ImportError as error:
    hint = "pip install 'torchtitan>=0.3'"
    raise make_error(ImportError, _WHERE, "torchtitan", str(error), "version 0.3 or later", hint) from error

_TYPES = (torch.bfloat16, torch.float16)


class CudnnGroupedExperts(GroupedExperts):
    """torchtitan's ``GroupedExperts`` with its parameters, sharding and state dicts, and another ``forward``.

    The kernels read ``w1_EFD``, ``w2_EDF`` and ``w3_EFD`` in place. Weights of other types than bfloat16 and float16
    are cast to bfloat16 in each pass, as those of torchtitan's experts are: use a mixed precision policy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's configuration.

        ``fp8`` is that of :func:`cudnn.ops.moe_experts`. Gates and up projections are then interleaved in each pass,
        before they are quantized.
        """

        fp8: bool | str = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        multiples = (128, 128) if config.fp8 else (64, 8)
        if config.hidden_dim % multiples[0] or config.dim % multiples[1]:
            got, allowed = f"hidden_dim={config.hidden_dim}, dim={config.dim}", "multiples of {} and of {}"
            raise make_error(
                ValueError, _WHERE, "GroupedExperts.Config", got, allowed.format(*multiples), "leave the override out"
            )
        self.fp8 = config.fp8

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The experts' outputs of dispatched rows; zeros for padding rows behind the counts."""
        x = x_RD if x_RD.dtype in _TYPES else x_RD.bfloat16()
        w1, w2, w3 = (_in_type(_local(weight), x.dtype) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        counts = num_tokens_per_expert_E
        if counts.dtype not in (torch.int32, torch.int64):
            counts = counts.long()
        up, glu_layout = (interleaved(_WHERE, w1, w3), "interleaved") if self.fp8 else ((w1, w3), "separate")
        return moe_experts(x.contiguous(), counts, up, w2, glu_layout=glu_layout, fp8=self.fp8).to(x_RD.dtype)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _in_type(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype is dtype:
        return weight
    log_once(_WHERE, f"expert weights are cast from {weight.dtype} to {dtype} in each pass")
    return weight.to(dtype)


@override(target=GroupedExperts.Config, exact=True, description="Routed experts on cuDNN's grouped GEMM kernels")
def cudnn_experts(cfg: Any, *, fp8: bool | str = False) -> Any:
    """torchtitan's override of ``GroupedExperts.Config``, for ``--override.imports``.

    Args:
        cfg: The configuration of the experts.
        fp8: of :func:`cudnn.ops.moe_experts`.
    """
    return derive(cfg, CudnnGroupedExperts.Config, fp8=fp8)
