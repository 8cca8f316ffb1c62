"""The layer at scale: FSDP2 with expert parallelism, checkpoints over degrees, against one process."""

from __future__ import annotations

import copy
import io
import pathlib
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from cudnn import moe
from cudnn.nn import MoE, clip_grad_norm_
from support.ranks import run_processes

HIDDEN, INNER, EXPERTS, TOP_K, RANKS, STEPS = 32, 32, 8, 2, 4, 20
F64 = torch.float64


class Model(torch.nn.Module):
    """A linear layer, a mixture of experts, a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, HIDDEN, dtype=F64, device=options.get("device"))
        self.moe = MoE(HIDDEN, INNER, EXPERTS, TOP_K, dtype=F64, **options)
        self.last = torch.nn.Linear(HIDDEN, 4, dtype=F64, device=options.get("device"))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y, routing = self.moe(x, return_routing=True)
        balance = moe.load_balance_loss(routing.logits, routing)
        return (self.last(x + y) - target).square().mean() + 0.1 * balance


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's tokens and targets of a step; ranks have other tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [tuple(torch.randn(24, n, dtype=F64, generator=generator) for n in (16, 4)) for _ in range(RANKS)]  # pyright: ignore


def make(mesh: DeviceMesh | None = None, shards: bool = False, seed: int = 7, **options: Any) -> Model:
    """A model; on a mesh ("dp", "ep") with expert parallelism, and with ``shards`` by the recipe of the page."""
    torch.manual_seed(seed)
    model = Model(mesh=mesh, **options)
    return shard(model, mesh) if shards and mesh is not None else model


def shard(model: Model, mesh: DeviceMesh, placement: Any = None) -> Model:
    """FSDP2 as in docs/training_at_scale.md."""
    all_ranks, dp = mesh._flatten("dp_ep") if "dp_ep" not in cache(mesh) else mesh["dp_ep"], mesh["dp"]
    for module in (model.moe.router, model.moe.shared, model.moe.shared_gate):
        if module is not None:
            fully_shard(module, mesh=all_ranks)
    fully_shard(model.moe, mesh=dp, shard_placement_fn=placement)
    model.moe.set_gradient_divide_factor(mesh.size())  # pyright: ignore[reportCallIssue]
    fully_shard(model, mesh=all_ranks)
    return model


def cache(mesh: DeviceMesh) -> Any:
    return getattr(mesh._get_root_mesh(), "_flatten_mapping", {})


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Model, rank: int, first: int, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses, the mean over ranks, and clipped updates; without a mesh all ranks' batches in turn."""
    losses, alone = [], not any(isinstance(p, DTensor) for p in model.parameters())
    for step in range(first, first + steps):
        mine = batches(step) if alone else batches(step)[rank : rank + 1]
        total = torch.zeros((), dtype=F64)
        for x, target in mine:
            loss = model(x, target) / len(mine)
            loss.backward()
            total += loss.detach()
        if not alone:
            dist.all_reduce(total)
            total /= RANKS
            reduce_replicated(model)
        losses.append([float(total), float(clip_grad_norm_(model.parameters(), 0.5))])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reduce_replicated(model: Model) -> None:
    """Without FSDP2: the mean of the gradients over ranks; an expert's is the sum of all ranks' tokens in one dp rank."""
    for p in model.parameters():
        if not isinstance(p, DTensor):
            dist.all_reduce(p.grad)
            p.grad /= RANKS
        elif p.device_mesh.ndim == 1 and p.device_mesh.mesh_dim_names == ("ep",):
            if p.device_mesh.size() < RANKS:
                dist.all_reduce(p.grad.to_local(), group=DP[0])
            p.grad.to_local().div_(RANKS)


DP: list[Any] = []


def full(model: Model) -> dict[str, torch.Tensor]:
    return dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True))


def same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(actual[name], right, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")


def fsdp_and_ep(rank: int, path: pathlib.Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    DP.append(mesh.get_group("dp"))
    alone = make()
    model = make(mesh, shards=True)
    assert full(model).keys() == alone.state_dict().keys()
    if rank == 0:
        same(full(model), alone.state_dict())
    else:
        full(model)
    right, optimizer = optimizer_of(alone), optimizer_of(model)
    expected = train(alone, rank, 0, STEPS, right)
    torch.testing.assert_close(train(model, rank, 0, STEPS, optimizer), expected, rtol=1e-9, atol=1e-9)


def test_four_ranks(tmp_path: pathlib.Path) -> None:
    def rank(number: int) -> None:
        fsdp_and_ep(number, tmp_path)

    run_processes(RANKS, tmp_path, rank)
