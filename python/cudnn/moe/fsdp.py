"""FSDP2's all-gather of expert weights in e4m3, by its extension points ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``.

FSDP2 looks for them on the local tensor of a sharded parameter, which stays a plain tensor: optimizers and checkpoints
see the same parameters as without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cudnn.errors import make_error
from cudnn.moe.gathered import GatheredCopies, GatheredWeight
from cudnn.moe.quantizing import quantized_shard

_WHERE = "MoE.enable_fsdp_fp8_all_gather"
_TYPES = (torch.bfloat16, torch.float16)


class Fp8AllGather:
    """The extension for the parameter ``name`` of a module: the shard is quantized, its values and scales are gathered.

    A 128 x 128 block lies in one expert, so shards of whole experts have the scales of the whole weight.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What FSDP2 gathers: the shard in e4m3 and its scales, cached until the weight changes; and the scales again,
        for :meth:`post_all_gather`.
        """
        weight = module._parameters[self.name]
        dtype = mp_policy.param_dtype or weight.dtype
        if dtype not in _TYPES:
            allowed = f"{' or '.join(map(str, _TYPES))}, the dtype of gradients before they are reduced"
            hint = "pass fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            raise make_error(ValueError, _WHERE, f"dtype of {self.name}, gathered", dtype, allowed, hint)
        values, scales = quantized_shard(weight._local_tensor, weight, dtype)
        return (values, scales), scales

    def post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Tensor, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[GatheredWeight, tuple[Tensor, Tensor]] | None:
        """The unsharded parameter, and its tensors that FSDP2 frees with it; from the second time on it is ``out``.

        Over one rank FSDP2 passes the first of the gathered tensors only.
        """
        values, scales = outputs if len(outputs) > 1 else (outputs[0], metadata)
        if out is not None:
            gathered: Any = out._local_tensor if isinstance(out, DTensor) else out
            gathered.copies.renew(values, scales)
            return None
        copies = GatheredCopies(values, scales)
        return GatheredWeight(copies, param_dtype), (copies.transposed, copies.transposed_scales)


def attach(module: torch.nn.Module, names: Sequence[str]) -> None:
    """FSDP2 gathers these parameters of a module in e4m3, as long as their local tensors are not replaced."""
    for name in names:
        local: Any = module._parameters[name]._local_tensor  # pyright: ignore
        extension = Fp8AllGather(name)
        local.fsdp_pre_all_gather = extension.pre_all_gather
        local.fsdp_post_all_gather = extension.post_all_gather


def check_sharding(name: str, weight: Any, expert_dims: Sequence[str]) -> None:
    """Raises an error for a parameter whose shards are not whole experts, the same number on each rank.

    ``expert_dims``: the mesh dimensions over which the layer itself is sharded.
    """
    placements, by_fsdp = (), ()
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        names = mesh.mesh_dim_names or [""] * mesh.ndim
        by_fsdp = [p for n, p in zip(names, placements, strict=True) if n not in expert_dims]
    if not any(hasattr(p, "dim") for p in by_fsdp):
        got = f"placements {tuple(placements)}" if placements else "a plain tensor"
        raise make_error(RuntimeError, _WHERE, name, got, "a parameter that FSDP2 shards", "call fully_shard before it")
    hint = "leave enable_fsdp_fp8_all_gather out: weights are then gathered in 16 bits"
    if any(getattr(p, "dim", 0) for p in by_fsdp):
        allowed = "Shard(0) by FSDP2: whole experts on each rank"
        raise make_error(ValueError, _WHERE, f"sharding of {name}", tuple(by_fsdp), allowed, hint)
    sizes = zip(mesh.shape, placements, strict=True)
    ranks = prod(size for size, p in sizes if getattr(p, "dim", None) == 0)
    if len(weight) % ranks:
        got, allowed = f"{len(weight)} experts over {ranks} ranks", "the same number on each rank"
        why = "" if expert_dims else "shared experts are among them without mesh=; "
        raise make_error(ValueError, _WHERE, f"sharding of {name}", got, allowed, why + hint)
    device = weight._local_tensor.device.type
    if device not in ("meta", mesh.device_type):
        got, allowed = f"{device}, with CPUOffloadPolicy", f"{mesh.device_type}, the mesh's"
        raise make_error(ValueError, _WHERE, f"device of {name}", got, allowed, "leave offload_policy out")
