"""Synchronisations of native sparse attention, dropped one at a time: so far of the kernel that turns lists around."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn.native_sparse_attention.selection.inverse import choosing_rows  # noqa: E402
from cudnn_kernels import compiler, fakes  # noqa: E402
from cudnn_kernels.attention.inverse import Inverse  # noqa: E402
from cudnn_kernels.attention.sparse import InverseConfiguration, SelectionConfiguration  # noqa: E402
from emulator.mutation import mutants, unexplained  # noqa: E402
from kernels.test_nsa import Choice, selection_inputs  # noqa: E402

EQUIVALENT = {"bar.warp.sync": (1, "lanes meet at match.sync before they read again; PTX does not call that an order")}


def test_each_synchronisation_is_missed() -> None:
    """Of the second pass, which puts rows in order; the first one is done in PyTorch."""
    torch.manual_seed(0)
    c = InverseConfiguration(16, True, True, rows=8)
    given = selection_inputs(SelectionConfiguration("float16", 1, 1, 64, 64, c.block), Choice((2, 0, 24), 7))
    lists = given["block_indices"], given["block_counts"], given["cum_seqlen_q"]
    rows, table = choosing_rows(*lists, c.block, c.causal)
    begins, warps = table[:, 0].tolist(), -(-len(lists[0]) // c.rows)
    places = torch.empty(len(begins) - 1, warps, dtype=torch.int32)
    for block, (first, last) in enumerate(pairwise(begins)):
        places[block] = first + (rows[first:last][:, None] < torch.arange(warps) * c.rows).sum(0)
    with ptx_emulator.emulate("sm_90a"):
        compiled = compiler.compile_for("sm_90a", Inverse(c), *fakes.arguments(c))

    def run(scheduler: str, seed: int) -> bool:
        found = torch.full_like(rows, -7)
        with ptx_emulator.emulate("sm_90a", races=True, scheduler=scheduler, seed=seed):
            compiled(*lists, places.clone(), found, 0)
        return torch.equal(found[: begins[-1]], rows[: begins[-1]])

    results = mutants(run, [("lowest-pc", 0), ("random", 0), ("lazy", 0)])
    assert len(results) == 2
    assert not unexplained(results, EQUIVALENT)
