"""Expert weights over ranks: DTensors on a device mesh, their initialization, and their state dicts.

The expert dimension is sharded over expert parallelism (``Shard(0)``), the intermediate dimension over expert tensor
parallelism. FSDP2 composes with both: it shards the DTensors further, over another dimension of the same mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cudnn.errors import make_error
from cudnn.moe.exchange import Exchange
from cudnn.moe.parallel import ranks_of
from cudnn.moe.quantizing import owned_by

_WHERE = "MoE"


class ExpertMesh(NamedTuple):
    """The ranks of a layer's experts.

    - ``mesh``: the dimensions of ``DeviceMesh`` that shard the experts: ``(ep_dim,)`` or ``(ep_dim, etp_dim)``.
    - ``group``: the process group of ``ep_dim``, or an :class:`cudnn.moe.Exchange` over it.
    - ``etp_group``: the process group of ``etp_dim``, or None.
    """

    mesh: Any
    group: Any
    etp_group: Any

    @property
    def ep(self) -> int:
        """The degree of expert parallelism."""
        return self.mesh.size(0)

    @property
    def etp(self) -> int:
        """The degree of expert tensor parallelism."""
        return self.mesh.size(1) if self.mesh.ndim > 1 else 1

    @property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's position: (ep,) or (ep, etp)."""
        return tuple(self.mesh.get_coordinate())

    def shard(self, shape: Sequence[int], etp_dim: int | None, device: Any, dtype: torch.dtype) -> Tensor:
        """A DTensor of a global shape, not initialized: experts are sharded over ``ep_dim`` of the mesh, the tensor's
        dimension ``etp_dim`` over that of the mesh (None: replicated).
        """
        local, placements = [shape[0] // self.ep, *shape[1:]], [Shard(0)]
        if self.mesh.ndim > 1:
            placements.append(Replicate() if etp_dim is None else Shard(etp_dim))
            if etp_dim is not None:
                local[etp_dim] //= self.etp
        tensor = torch.empty(local, device=device, dtype=dtype)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(
            tensor, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def expert_mesh(group: Any, mesh: Any, ep_dim: str, etp_dim: str | None, device: Any) -> ExpertMesh | None:
    """The ranks that a layer's arguments name; None: this rank alone.

    Raises:
        ValueError: a mesh without these dimensions; an exchange over other ranks; ``etp_dim`` without a mesh.
        TypeError: a group or mesh of another type.
    """
    if mesh is None:
        if etp_dim is not None:
            raise make_error(ValueError, _WHERE, "etp_dim", repr(etp_dim), "None without mesh", "pass mesh=")
        if group is None:
            return None
        ranks_of(_WHERE, group)
        process_group, device = (group.group, group.device) if isinstance(group, Exchange) else (group, device)
        device_type = _device_type(process_group, device)
        return ExpertMesh(DeviceMesh.from_group(process_group, device_type, mesh_dim_names=("ep",)), group, None)
    if not isinstance(mesh, DeviceMesh):
        allowed = "a torch.distributed.device_mesh.DeviceMesh"
        raise make_error(TypeError, _WHERE, "mesh", type(mesh).__name__, allowed, "call init_device_mesh")
    names, dims = mesh.mesh_dim_names or (), [ep_dim] if etp_dim is None else [ep_dim, etp_dim]
    for argument, name in zip(("ep_dim", "etp_dim"), dims, strict=False):
        if name not in names or len(set(dims)) < len(dims):
            allowed = f"one dimension of the mesh, whose names are {names}"
            raise make_error(ValueError, _WHERE, argument, repr(name), allowed, "name it in init_device_mesh")
    if mesh.get_coordinate() is None:
        raise make_error(ValueError, _WHERE, "mesh", f"{mesh}, without this rank", "a mesh that this rank belongs to")
    sub_mesh = mesh[tuple(dims)] if len(dims) > 1 else mesh[ep_dim]
    ep_group, etp_group = mesh.get_group(ep_dim), None if etp_dim is None else mesh.get_group(etp_dim)
    if group is not None and not (isinstance(group, Exchange) and _ranks(group.group) == _ranks(ep_group)):
        allowed = f"None, or a cudnn.moe.Exchange over the ranks of {ep_dim!r}, {_ranks(ep_group)}"
        raise make_error(ValueError, _WHERE, "group with mesh", repr(group), allowed, "leave group out")
    return ExpertMesh(sub_mesh, ep_group if group is None else group, etp_group)


def _ranks(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)


def _device_type(group: Any, device: Any) -> str:
    """The device of a layer's weights, from its argument or from what the group's backend takes."""
    device_type = torch.get_default_device().type if device is None else torch.device(device).type
    supported = [each.type for each in group._device_types]
    if device_type not in supported:  # such as "meta"
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return device_type if device_type in supported else supported[0]


def device_of(device: Any, mesh: Any) -> Any:
    """The device of a layer's parameters: the argument, else PyTorch's default device, else the mesh's."""
    if device is not None or torch.get_default_device().type != "cpu" or mesh.device_type == "cpu":
        return device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def local_shard(name: str, weight: Tensor | None, experts: ExpertMesh | None) -> Tensor | None:
    """A weight's shard on this rank, differentiable.

    Raises:
        RuntimeError: it is sharded over more than the layer's mesh, as FSDP2 leaves it outside of ``forward``.
    """
    if weight is None or not isinstance(weight, DTensor):
        return weight
    mesh: Any = weight.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    if experts is None or mesh.ndim != experts.mesh.ndim:
        got = f"a DTensor over the mesh {mesh.mesh_dim_names or mesh}"
        allowed = "a tensor" if experts is None else f"a DTensor over the mesh {experts.mesh.mesh_dim_names}"
        hint = "call the layer, not its methods: fully_shard gathers weights in hooks of forward"
        raise make_error(RuntimeError, _WHERE, name, got, allowed, hint)
    sharded: Any = weight
    local = sharded.to_local()
    # A new tensor in each call: the version of a local tensor, by which e4m3 copies are cached, does not count changes
    # of the DTensor. With ``owned_by``, that of the DTensor counts.
    local = local.view_as(local) if local is sharded._local_tensor else local
    return local if torch.compiler.is_compiling() else owned_by(local, weight)


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The local tensor of a DTensor, and which part of the global one it is; a plain tensor is all of it."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    weight: Any = tensor
    with torch.device("cpu"):  # it computes with tensors: not within torch.device("meta")
        shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight._local_tensor, tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))


def draw_seed(parameter: Tensor) -> int:
    """A seed for :func:`uniform_`, from the CPU's default generator; 0 if the parameter has no memory."""
    return 0 if _has_no_memory(parameter) else int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


def _has_no_memory(parameter: Tensor) -> bool:
    return parameter.is_meta or detect_fake_mode([parameter]) is not None


def uniform_(parameter: Tensor, bound: float, seed: int) -> None:
    """Uniform values in [-bound, bound], the same for every sharding of the parameter over ranks.

    Each index of the first dimension, such as an expert, has the seed ``seed + index``, and a rank draws those that it
    stores. So ranks with the same seed hold parts of the same tensor.
    """
    if _has_no_memory(parameter):
        return
    local, part = local_part(parameter)
    generator = torch.Generator(local.device)
    whole = torch.empty(parameter.shape[1:], dtype=local.dtype, device=local.device)
    with torch.no_grad():
        for row, index in zip(local, range(part[0].start, part[0].stop), strict=True):
            row.copy_(whole.uniform_(-bound, bound, generator=generator.manual_seed(seed + index))[part[1:]])


def share_of(parameter: Tensor, value: Tensor) -> tuple[Tensor, str]:
    """A value of a state dict as the parameter stores it, and the reason why it cannot be loaded, or "".

    A plain tensor of the global shape becomes this rank's shard, without communication.
    """
    if isinstance(value, DTensor):
        saved: Any = value
        if not isinstance(parameter, DTensor):
            return (
                value,
                "is a DTensor, the layer's is not: load by torch.distributed.checkpoint, or save a full state dict",
            )
        target: Any = parameter
        if saved.shape == target.shape and (saved.device_mesh, saved.placements) != (
            target.device_mesh,
            target.placements,
        ):
            got, has = ((tuple(x.device_mesh.shape), tuple(x.placements)) for x in (saved, target))
            return value, f"is sharded over ranks as {got}, but the layer's is as {has}"
        return value, ""
    if not isinstance(parameter, DTensor):
        return value, ""
    local, part = local_part(parameter)
    if value.shape == parameter.shape:
        target = parameter
        shard = value[part].to(local.device)
        options: dict[str, Any] = {"run_check": False, "shape": target.shape, "stride": target.stride()}
        return DTensor.from_local(shard, target.device_mesh, target.placements, **options), ""  # pyright: ignore
    got = "one rank's share" if value.shape == local.shape else "another number of experts, or other sizes"
    return value, f"has the shape {tuple(value.shape)}, {got}; allowed: all experts', {tuple(parameter.shape)}"
