"""Expert parallelism: processes over gloo against one process that has all experts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist

from cudnn.nn import MoE
from cudnn.ops import moe_mlp

EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 64, 32


def tokens(rank: int) -> tuple[torch.Tensor, ...]:
    """Of one rank: x, indices, weights and the gradient of the result; none on the second of four."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 2 else 20 + 7 * rank
    x, gradient = (torch.randn(count, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    weights, indices = torch.randn(count, EXPERTS, generator=generator).softmax(1).topk(TOP_K)
    return x, indices, weights, gradient


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    shapes = ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    return [(torch.randn(shape, generator=generator) / shape[2] ** 0.5).bfloat16() for shape in shapes]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The sums over ranks were rounded once more."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.03, atol=0.03)


def same_as_alone(rank: int, world: int) -> None:
    every = [tokens(other) for other in range(world)]
    x, indices, scores, gradient = (torch.cat(parts) for parts in zip(*every, strict=True))
    alone = [t.clone().requires_grad_() for t in (x, scores, *weights())]
    y = moe_mlp(alone[0], (indices, alone[1]), *alone[2:])
    y.backward(gradient)
    start = sum(len(t[0]) for t in every[:rank])
    mine, share = slice(start, start + len(every[rank][0])), EXPERTS // world
    own = slice(rank * share, (rank + 1) * share)
    here = [t.clone().requires_grad_() for t in (x[mine], scores[mine], *(w[own] for w in weights()))]
    found = moe_mlp(here[0], (indices[mine], here[1]), *here[2:], group=dist.group.WORLD)
    found.backward(gradient[mine])
    close(found, y[mine])
    for one, other, part in zip(here, alone, (mine, mine, own, own), strict=True):
        close(one.grad, other.grad[part])


def refused(rank: int) -> None:
    layer = MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD, activation=("swiglu", "geglu")[rank == 1])
    assert len(layer.up) == EXPERTS // dist.get_world_size()
    with pytest.raises(ValueError, match=r"moe_mlp: layer: got another one on the ranks [012, ]+ than here: 3 of 8"):
        layer(tokens(rank)[0])
    with pytest.raises(ValueError, match="MoE: experts: got 8 experts and 1 shared ones"):
        MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD, shared_experts=1)


def absent(rank: int) -> None:
    """A rank that does not come."""
    if rank:
        return
    with pytest.raises(RuntimeError, match=r"moe_mlp: group: got no answer of all ranks within 0\.5 s"):
        MoE(HIDDEN, INNER, EXPERTS, TOP_K, group=dist.group.WORLD, time_limit=0.5)(tokens(0)[0])


def process(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    same_as_alone(rank, world)
    if world == 2:
        refused(rank)
        absent(rank)


def test_one_rank() -> None:
    """The whole way of tokens, to itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        same_as_alone(0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int, tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(world), str(tmp_path / "store")]
    running = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    said = [each.communicate(timeout=240)[1] for each in running]
    assert [each.returncode for each in running] == [0] * world, "\n".join(said)


if __name__ == "__main__":
    process(int(sys.argv[3]), int(sys.argv[1]), sys.argv[2])
