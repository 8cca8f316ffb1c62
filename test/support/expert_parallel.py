"""Layers in e4m3 over ranks, compared with one rank that has all experts and all tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

from cudnn.ops import moe_mlp

EXPERTS, TOP_K = 8, 2
NAMES = ("x", "weights", "up", "down", "down_bias")
Results = dict[str, torch.Tensor]


class Case:
    """Tokens of all ranks, their experts, and the experts' weights.

    ``routing``: "together": all experts of a token are on one rank, so that combine rounds no sum; "first": on rank 0;
    "anywhere". In each, some choices are dropped, and tokens of which all are.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        routing: str,
        *,
        hidden: int = 128,
        bias: bool = False,
        device: Any = "cpu",
        batch_invariant: bool = True,
    ) -> None:
        generator, total, ranks = torch.Generator().manual_seed(len(routing)), sum(counts), len(counts)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        self.counts, self.local, self.bias = counts, EXPERTS // ranks, bias
        self.batch_invariant = batch_invariant
        among = EXPERTS if routing == "anywhere" else self.local
        indices = torch.rand(total, among, generator=generator).topk(TOP_K)[1]
        if routing == "together":
            indices += self.local * torch.randint(0, ranks, (total, 1), generator=generator)
        dropped = torch.rand(total, TOP_K, generator=generator) < 0.2
        self.indices = indices.where(~dropped, -1).to(device)
        weights = torch.rand(total, TOP_K, generator=generator).to(device)
        shapes = ((EXPERTS, 256, hidden), (EXPERTS, hidden, 128), (EXPERTS, hidden))
        matrices = [normal(*shape) / 8 for shape in shapes]
        self.tensors = dict(zip(NAMES, (normal(total, hidden), weights, *matrices), strict=True))
        self.gradient = normal(total, hidden)

    def parts(self, rank: int) -> dict[str, slice]:
        """What a rank has: some tokens, some experts."""
        start = sum(self.counts[:rank])
        tokens, experts = (slice(start, start + self.counts[rank]), slice(rank * self.local, (rank + 1) * self.local))
        return {"y": tokens, **dict.fromkeys(NAMES[:2], tokens), **dict.fromkeys(NAMES[2:], experts)}

    def run(self, fp8: bool | str, rank: int | None = None, group: Any = None, grad: bool = True) -> Results:
        """The result, and with ``grad`` the gradients: of a rank, or of one that has everything."""
        parts = dict.fromkeys(("y", *NAMES), slice(None)) if rank is None else self.parts(rank)
        leaves = {name: t[parts[name]].clone().requires_grad_(grad) for name, t in self.tensors.items()}
        x, weights, up, down, bias = leaves.values()
        biases = (None, bias) if self.bias else ()
        options: dict[str, Any] = {} if rank is None else {"group": group}
        with contextlib.nullcontext() if grad else torch.no_grad():
            routing = (self.indices[parts["y"]], weights)
            y = moe_mlp(x, routing, up, down, *biases, fp8=fp8, batch_invariant=self.batch_invariant, **options)
        if grad:
            y.backward(self.gradient[parts["y"]])
        return {"y": y.detach(), **{name: t.grad for name, t in leaves.items() if t.grad is not None}}


def check_rank(
    case: Case, alone: Results, fp8: bool | str, rank: int, group: Any, exact: Sequence[str] = ("y", *NAMES)
) -> None:
    """Twice, since memory is used again. ``alone``: of one rank, with the same ``fp8``. ``exact``: what has the same
    bits; the rest is summed up in another order.
    """
    parts = case.parts(rank)
    for _ in range(2):
        actual = case.run(fp8, rank, group)
        inference = case.run(fp8, rank, group, grad=False)
        # Quantized before the dispatch or after it: the same bits.
        assert torch.equal(inference["y"], actual["y"])
        assert actual.keys() == alone.keys()
        for name, each in actual.items():
            expected, error = alone[name][parts[name]], 0.0
            if expected.any():
                error = float((each.float() - expected.float()).norm() / expected.float().norm())
            if fp8 == "blockwise" and (name == "up" or (name == "down" and not case.bias)):
                # x and dy were rounded twice before they were summed over tokens
                assert torch.equal(each.any((1, 2)), expected.any((1, 2)))
                assert (error > 0) == bool(expected.any())
                assert error < 0.055, f"{name}: {error}"
            elif name in exact:
                assert torch.equal(each, expected), f"{name}: {error}"
            else:
                assert error < 0.01, f"{name}: {error}"


def over_gpus(rank: int, ranks: int, path: str) -> None:
    """A process of a rank, for spawn: both transports, with tokens that are copied and tokens that GEMMs gather."""
    from cudnn.moe import Exchange

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=ranks, device_id=device)
    for hidden, most, gathers in ((128, 200, False), (2048, 3000, True)):
        options: dict[str, Any] = {"hidden": hidden, "device": device, "batch_invariant": not gathers}
        # Without gathers a row's results do not depend on the other rows.
        exact = () if gathers else ("y", "x", "weights")
        cases = [
            (Case(counts, routing, **options), fp8, exact)
            for counts in ((most, most - 77), (most, 0))
            for routing in ("together", "first")
            for fp8 in (True, "blockwise")
        ]
        if not gathers:
            cases.append((Case((most, most), "together", bias=True, **options), "blockwise", ("y", "x")))
        expected = [case.run(fp8) for case, fp8, _ in cases]
        for symmetric in (True, False):
            group = Exchange(
                None, EXPERTS, TOP_K, hidden, max_tokens=most, device=device, symmetric=symmetric, time_limit=60
            )
            for (case, fp8, names), alone in zip(cases, expected, strict=True):
                check_rank(case, alone, fp8, rank, group, names)
    torch.cuda.synchronize()
    dist.destroy_process_group()
