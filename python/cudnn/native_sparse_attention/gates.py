# No `from __future__ import annotations`: PyTorch reads the types.

import functools
from typing import Any

import torch

from cudnn import settings
from cudnn.fused.host import FusedAPI
from cudnn.gemm.formats import name_of
from cudnn.native_sparse_attention.selection.api import SelectionAttention
from cudnn.native_sparse_attention.selection.base import BLOCKS
from cudnn.runtime import flops, launch
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import custom_op
from cudnn.runtime.run import has_kernel, run
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import (
    TILE_COUNT_SEMAPHORE,
    GateConfiguration,
    GatedSelectionConfiguration,
    SelectionConfiguration,
)
from cudnn_kernels.signature import workspace_size

_SOURCE = "cudnn_kernels.attention.gates:Gates"


@functools.cache
def log_once(choice: str) -> None:
    """Says in the log which kernels nsa_attention runs, each sentence once."""
    settings.configure_logging().info("nsa_attention: %s", choice)


def _run(branches: list[torch.Tensor], gates: torch.Tensor, out: torch.Tensor, *changes: torch.Tensor) -> None:
    """The kernel, on rows of heads. ``changes``: the gradients of the branches and of the gates."""
    width = out.shape[-1]
    configuration = GateConfiguration(name_of(out.dtype), name_of(gates.dtype), width, bool(changes))
    *rows, of_gates = (*branches, out, *changes[:-1], gates)
    tensors = [x.view(-1, width) for x in rows]
    run(_SOURCE, configuration, *tensors, of_gates.view(-1, 3), *(x.view(-1, 3) for x in changes[-1:]))


def _by_kernel(x: torch.Tensor) -> bool:
    """Whether the kernel computes it: wider types are for tests on the CPU."""
    return x.element_size() == 2 and x.numel() > 0 and has_kernel(x, "nsa_gates")


def like(x: torch.Tensor) -> torch.Tensor:
    """Memory for a gradient, or a sum."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("nsa_gates", flops=flops.none)
def nsa_gates(
    compressed: torch.Tensor, selected: torch.Tensor, windowed: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """The sum of three ``[T, H, D]``, each times its gate of ``[T, H, 3]``, rounded once."""
    branches = [aligned(x) for x in (compressed, selected, windowed)]
    if _by_kernel(compressed):
        out = torch.empty_like(branches[0])
        _run(branches, aligned(gates), out)
        return out
    wide = torch.promote_types(compressed.dtype, torch.float32)
    gate_values = gates.to(wide).unbind(-1)
    gated = [x.to(wide) * g[..., None] for x, g in zip(branches, gate_values, strict=True)]
    return (gated[0] + gated[1] + gated[2]).to(compressed.dtype)


nsa_gates.register_fake(lambda compressed, *_: like(compressed))


@custom_op("nsa_gates_bwd", flops=flops.none)
def nsa_gates_bwd(
    d_out: torch.Tensor, compressed: torch.Tensor, selected: torch.Tensor, windowed: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of all but the first."""
    branches = [aligned(x) for x in (compressed, selected, windowed)]
    gates, d_out = aligned(gates), aligned(d_out)
    if _by_kernel(compressed):
        changes = [torch.empty_like(x) for x in (*branches, gates)]
        _run(branches, gates, d_out, *changes)
        return tuple(changes)  # type: ignore[return-value]
    wide = torch.promote_types(compressed.dtype, torch.float32)
    grad_out, gate_values = d_out.to(wide), gates.to(wide)
    dbranches = [(grad_out * g[..., None]).to(compressed.dtype) for g in gate_values.unbind(-1)]
    dgates = torch.stack([(grad_out * x.to(wide)).sum(-1) for x in branches], -1)
    return dbranches[0], dbranches[1], dbranches[2], dgates.to(gates.dtype)


nsa_gates_bwd.register_fake(lambda d_out, *branches_and_gates: tuple(map(like, branches_and_gates)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
    return nsa_gates_bwd(d_out, *ctx.saved_tensors)


nsa_gates.register_autograd(_differentiate, setup_context=_setup)


def selection_takes_gates(q: torch.Tensor, v: torch.Tensor, block_size: int) -> bool:
    """Whether there are kernels of :func:`selection` and :func:`gated_selection` for tensors like these. What is
    compiled for the CPU has none: the emulator may not be there when it runs.
    """
    heads = (q.shape[-1], v.shape[-1])
    by_kernel = q.is_cuda or (not torch.compiler.is_compiling() and bool(launch.emulated_architecture()))
    return (
        by_kernel
        and q.element_size() == 2
        and q.numel() > 0
        and heads in SelectionAttention.head_sizes
        and block_size in BLOCKS
    )


def gated_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    block_size: int,
    window: int,
    compressed: torch.Tensor,
    windowed: torch.Tensor,
    gates: torch.Tensor,
    *saved: torch.Tensor,
) -> torch.Tensor:
    """What nsa_gates makes of nsa_selection, nsa_window and compression, in one kernel.

    ``windowed`` is memory for the window's O, and ``saved`` for its log-sum-exp ``[B, H_q, longest]``, selection's O
    and its log-sum-exp.
    """
    log_once("one kernel computes selection and the window, and adds up the branches, each times its gate")
    out, options = torch.empty_like(compressed), {"gates": name_of(gates.dtype), "save_for_backward": bool(saved)}
    tensors = [*map(aligned, (q, k, v)), out, aligned(compressed), windowed, aligned(gates), *saved, lists, ends]
    _select(GatedSelectionConfiguration, tensors, (scale, min(window, len(q))), block_size, options)
    return out


def selection(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    lists: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    block_size: int,
) -> None:
    """Writes O and log-sum-exp of causal attention to the blocks of lists."""
    tensors = [*map(aligned, (q, k, v)), o, lse, lists, ends]
    _select(SelectionConfiguration, tensors, (scale,), block_size, {"lse": True})


def _select(
    configuration_class: Any,
    tensors: list[torch.Tensor],
    scalars: tuple[Any, ...],
    block_size: int,
    options: dict[str, Any],
) -> None:
    """Runs a kernel of selection on tensors that begin with those of q, k and v."""
    q, k, v, *_ = tensors
    index = q.get_device()
    problem = configuration_class(
        name_of(q.dtype), q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], block_size, True, **options
    )
    arch = launch.device_architecture(index) if q.is_cuda else launch.emulated_architecture()
    architecture = launch.pick(ARCHITECTURES, arch, "nsa_attention")
    multiprocessors = FusedAPI.num_sms(index) if q.is_cuda else architecture.num_sms
    configuration = architecture.attention.configure_selection(problem, len(q))
    workspace = torch.empty(workspace_size([TILE_COUNT_SEMAPHORE], {}), dtype=torch.uint8, device=q.device)
    run(architecture.source(configuration), configuration, *tensors, *scalars, multiprocessors, workspace)
