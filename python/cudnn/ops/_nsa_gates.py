# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.gemm.formats import name_of
from cudnn.moe._run import has_kernel, run
from cudnn.ops._registration import custom_op
from cudnn_kernels.attention.sparse import GateConfiguration

_SOURCE = "cudnn_kernels.attention.gates:Gates"


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


@custom_op("nsa_gates")
def nsa_gates(
    compressed: torch.Tensor, selected: torch.Tensor, near: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """The sum of three ``[T, H, D]``, each times its gate of ``[T, H, 3]``, rounded once."""
    branches = [x.contiguous() for x in (compressed, selected, near)]
    if _by_kernel(compressed):
        out = torch.empty_like(branches[0])
        _run(branches, gates.contiguous(), out)
        return out
    wide = torch.promote_types(compressed.dtype, torch.float32)
    factors = gates.to(wide).unbind(-1)
    parts = [x.to(wide) * g[..., None] for x, g in zip(branches, factors, strict=True)]
    return (parts[0] + parts[1] + parts[2]).to(compressed.dtype)


@nsa_gates.register_fake
def _(compressed: torch.Tensor, selected: torch.Tensor, near: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(compressed, memory_format=torch.contiguous_format)


@custom_op("nsa_gates_bwd")
def nsa_gates_bwd(
    d_out: torch.Tensor, compressed: torch.Tensor, selected: torch.Tensor, near: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of all but the first."""
    branches, gates, d_out = (
        [x.contiguous() for x in (compressed, selected, near)],
        gates.contiguous(),
        d_out.contiguous(),
    )
    if _by_kernel(compressed):
        changes = [torch.empty_like(x) for x in (*branches, gates)]
        _run(branches, gates, d_out, *changes)
        return tuple(changes)  # type: ignore[return-value]
    wide = torch.promote_types(compressed.dtype, torch.float32)
    given, factors = d_out.to(wide), gates.to(wide)
    found = [(given * g[..., None]).to(compressed.dtype) for g in factors.unbind(-1)]
    products = torch.stack([(given * x.to(wide)).sum(-1) for x in branches], -1)
    return found[0], found[1], found[2], products.to(gates.dtype)


@nsa_gates_bwd.register_fake
def _(
    d_out: torch.Tensor, compressed: torch.Tensor, selected: torch.Tensor, near: torch.Tensor, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (compressed, selected, near, gates)]
    return found[0], found[1], found[2], found[3]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
    return nsa_gates_bwd(d_out, *ctx.saved_tensors)


nsa_gates.register_autograd(_differentiate, setup_context=_setup)
