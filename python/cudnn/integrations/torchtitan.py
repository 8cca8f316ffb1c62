"""torchtitan: an override that runs the routed experts on our grouped GEMMs.

--override.imports cudnn.integrations.torchtitan.cudnn_experts
"""

# No `from __future__ import annotations`: torchtitan's configurations are read at run time.

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cudnn import settings
from cudnn.errors import make_error
from cudnn.moe.dispatched import moe_experts

_WHERE = "cudnn.integrations.torchtitan"

try:
    from torchtitan.config import derive, override  # pyright: ignore[reportMissingImports]
    from torchtitan.models.common.moe import GroupedExperts  # pyright: ignore[reportMissingImports]
except ImportError as error:
    hint = "pip install 'torchtitan>=0.3'"
    raise make_error(ImportError, _WHERE, "torchtitan", str(error), "version 0.3 or later", hint) from error

_TYPES = (torch.bfloat16, torch.float16)
_GATE, _UP, _BOTH = "w1_EFD", "w3_EFD", "w13"
_BLOCK = 32  # rows of gates and of up projections alternate


class CudnnGroupedExperts(GroupedExperts):
    """``GroupedExperts`` whose gate and up projections are one parameter, ``w13`` (E, F / 32, 2, 32, D), gates first.

    The kernels read it in place. State dicts have torchtitan's keys, ``w1_EFD`` and ``w3_EFD``, and loading takes them.
    Expert parallelism and FSDP2 shard dimension 0 or 1 of ``w13`` as they do of ``w1_EFD``, and so does tensor
    parallelism. Weights of other types than bfloat16 and float16 are cast to bfloat16 in each pass, as those of
    torchtitan's experts are: use a mixed precision policy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """torchtitan's configuration.

        ``fp8`` is that of :func:`cudnn.ops.moe_experts`.
        """

        fp8: bool | str = False

        def build(self, **kwargs: Any) -> Any:
            """The module; ``w13`` gets the sharding of ``w1_EFD``."""
            return GroupedExperts.Config.build(_with_one_sharding(self), **kwargs)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.hidden_dim % _BLOCK or config.dim % 8:
            got, allowed = f"hidden_dim={config.hidden_dim}, dim={config.dim}", "multiples of 32 and of 8"
            raise make_error(ValueError, _WHERE, "GroupedExperts.Config", got, allowed, "leave the override out")
        self.fp8 = config.fp8
        experts, hidden, dim = self.w1_EFD.shape
        del self.w1_EFD, self.w3_EFD
        self.w13 = torch.nn.Parameter(self.w2_EDF.new_empty(experts, hidden // _BLOCK, 2, _BLOCK, dim))
        self.register_state_dict_post_hook(_split)
        self.register_load_state_dict_pre_hook(_merge)

    @torch.no_grad()
    def _init_self_parameters(self) -> None:
        """Draws what torchtitan draws, in its order."""
        for name in (_GATE, "w2_EDF", _UP):
            if name == "w2_EDF":
                self._init_param(name, self.w2_EDF)
                continue
            half = self.w13[:, :, (_GATE, _UP).index(name)]
            drawn: Any = torch.empty_like(half.flatten(1, 2), memory_format=torch.contiguous_format)
            self._init_param(name, drawn)
            half.copy_(drawn.unflatten(1, (-1, _BLOCK)))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The experts' outputs of dispatched rows; zeros for padding rows behind the counts."""
        x = x_RD if x_RD.dtype in _TYPES else x_RD.bfloat16()
        up, down = (_in_type(_local(weight), x.dtype) for weight in (self.w13, self.w2_EDF))
        counts = num_tokens_per_expert_E
        if counts.dtype not in (torch.int32, torch.int64):
            counts = counts.long()
        return moe_experts(x.contiguous(), counts, up.flatten(1, 3), down, fp8=self.fp8).to(x_RD.dtype)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _in_type(weight: Tensor, dtype: torch.dtype) -> Tensor:
    if weight.dtype is dtype:
        return weight
    if not torch.compiler.is_compiling():
        _log_cast_once(weight.dtype, dtype)
    return weight.to(dtype)


@functools.cache
def _log_cast_once(source: torch.dtype, target: torch.dtype) -> None:
    settings.configure_logging().warning(f"{_WHERE}: expert weights are cast from {source} to {target} in each pass")


def _split(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """After ``state_dict``: torchtitan's keys."""
    both = state_dict.pop(f"{prefix}{_BOTH}", None)
    if both is not None:
        for half, name in enumerate((_GATE, _UP)):
            state_dict[f"{prefix}{name}"] = both[:, :, half].flatten(1, 2)


def _merge(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``load_state_dict``: the parameter from torchtitan's keys."""
    keys = [f"{prefix}{name}" for name in (_GATE, _UP)]
    if all(key in state_dict for key in keys):
        halves = [state_dict.pop(key).unflatten(1, (-1, _BLOCK)) for key in keys]
        state_dict[f"{prefix}{_BOTH}"] = torch.stack(halves, 2)


def _with_one_sharding(cfg: Any) -> Any:
    """A configuration with the sharding of ``w1_EFD`` for ``w13``: shards have the same dimension, 0 or 1."""
    sharding = cfg.sharding_config
    if sharding is None or _GATE not in sharding.state_shardings:
        return cfg
    state = {name: layout for name, layout in sharding.state_shardings.items() if name not in (_GATE, _UP)}
    state[_BOTH] = sharding.state_shardings[_GATE]
    return replace(cfg, sharding_config=replace(sharding, state_shardings=state))


@override(target=GroupedExperts.Config, exact=True, description="Routed experts on cuDNN's grouped GEMM kernels")
def cudnn_experts(cfg: Any, *, fp8: bool | str = False) -> Any:
    """torchtitan's override of ``GroupedExperts.Config``, for ``--override.imports``.

    Args:
        cfg: The configuration of the experts.
        fp8: of :func:`cudnn.ops.moe_experts`.
    """
    return derive(cfg, CudnnGroupedExperts.Config, fp8=fp8)
