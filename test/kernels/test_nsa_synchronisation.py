"""Synchronisations of native sparse attention, dropped one at a time, and seen missing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn.native_sparse_attention import reference  # noqa: E402
from cudnn.native_sparse_attention.selection.csr_transpose import transpose_selection  # noqa: E402
from cudnn_kernels import compiler, fakes  # noqa: E402
from cudnn_kernels.architecture import ARCHITECTURES  # noqa: E402
from cudnn_kernels.attention.sparse import (  # noqa: E402
    CompressionTopKConfiguration,
    CsrTransposeConfiguration,
    SelectionBackwardConfiguration,
    SelectionConfiguration,
    SelectionKVOuterConfiguration,
    SparseDecodeConfiguration,
    TopKConfiguration,
)
from emulator.mutation import LANES, RACES, mutants, synchronises, unexplained, without  # noqa: E402
from kernels import test_nsa as nsa  # noqa: E402
from kernels.test_nsa import Choice, Ranking  # noqa: E402
from ptx_emulator.codegen import Program  # noqa: E402
from ptx_emulator.ptx import Instruction  # noqa: E402
from support.selection import brief  # noqa: E402

ATTEMPTS = [("lowest-pc", 0), ("random", 0), ("lazy", 0)]
LISTS = {"bar.warp.sync": (1, "lanes meet at match.sync before they read again; PTX does not call that an order")}


def sorted_rows(c: CsrTransposeConfiguration, choice: Choice) -> dict[str, Any]:
    """Arguments of the second pass of turning lists around, after the first, in PyTorch, and what it has to find."""
    kwargs = nsa.selection_inputs(SelectionConfiguration("float16", 1, 1, 64, 64, c.block), choice)
    indices, counts, ends = kwargs["block_indices"], kwargs["block_counts"], kwargs["cum_seqlen_q"]
    rows, table = transpose_selection(indices, counts, ends, c.block, c.causal)
    begins, warps = table[:, 0].tolist(), -(-len(indices) // c.rows)
    places = torch.empty(len(begins) - 1, warps, dtype=torch.int32)
    for block, (first, last) in enumerate(pairwise(begins)):
        places[block] = first + (rows[first:last][:, None] < torch.arange(warps) * c.rows).sum(0)
    return {
        "block_indices": indices,
        "block_counts": counts,
        "cum_seqlen": ends,
        "positions": places,
        "stream": 0,
        "query_indices": torch.full_like(rows, -7),
        "expected": rows[: begins[-1]],
    }


def assert_sorted(kwargs: dict[str, Any], *_: Any) -> None:
    assert torch.equal(kwargs["query_indices"][: len(kwargs["expected"])], kwargs["expected"])


def decoded(c: SparseDecodeConfiguration, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of a decode step, caches with NaN behind each sequence, and what it has to find."""
    dtype, rows = getattr(torch, c.dtype), max(lengths)
    small = [x // c.stride for x in lengths]
    kwargs: dict[str, Any] = {"q": torch.randn(len(lengths), c.heads, c.head_dim).to(dtype)}
    for name, width, ends in (
        ("k", c.head_dim, lengths),
        ("v", c.head_dim_v, lengths),
        ("compressed_k", c.head_dim, small),
        ("compressed_v", c.head_dim_v, small),
    ):
        kwargs[name] = torch.randn(len(lengths), max(ends), c.key_heads, width).to(dtype)
        for cache, end in zip(kwargs[name], ends, strict=True):
            cache[end:] = math.nan
    kwargs["gates"] = torch.rand(len(lengths), c.heads, 3).to(getattr(torch, c.gates))
    expected = torch.empty(*kwargs["q"].shape[:2], c.head_dim_v, dtype=torch.float64)
    wide = [kwargs[x].double() for x in ("q", "k", "v", "compressed_k", "compressed_v", "gates")]
    caches = [x.transpose(1, 2) for x in wide[1:5]]
    sizes = (c.block, c.stride, c.count, c.window)
    reference.decode(wide[0], *caches, wide[5], list(lengths), small, expected, c.head_dim**-0.5, sizes)
    return kwargs | {
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "expected": expected,
        "stream": 0,
        "compressed_lengths": torch.tensor(small, dtype=torch.int32),
        "scale_softmax": c.head_dim**-0.5,
        "probabilities": torch.full((len(lengths), c.key_heads, rows // c.stride), math.nan),
        "o": torch.full_like(expected, math.nan, dtype=dtype),
    }


def assert_decoded(kwargs: dict[str, Any], *_: Any) -> None:
    torch.testing.assert_close(kwargs["o"].double(), kwargs["expected"], atol=2e-3, rtol=2e-3)


@dataclass(frozen=True)
class Listed(Choice):
    """Rows with these blocks, from the first row on; the others have none."""

    blocks: tuple[tuple[int, ...], ...] = ()


def selection_inputs(c: SelectionConfiguration, choice: Choice) -> dict[str, Any]:
    """Those of :mod:`kernels.test_nsa`, with the lists that the choice says."""
    kwargs = nsa.selection_inputs(c, choice)
    if isinstance(choice, Listed):
        kwargs["block_counts"].zero_()
        for row, blocks in enumerate(choice.blocks):
            kwargs["block_counts"][row] = len(blocks)
            kwargs["block_indices"][row, :, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        kwargs["num_sms"] = 1
    return kwargs


def one_cta(inputs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Arguments of one CTA, which fills each buffer of Q again and has keys of several sequences."""
    return lambda *kwargs: inputs(*kwargs) | {"num_sms": 1}


ARGUMENTS: dict[type, tuple[Callable[..., dict[str, Any]], Callable[..., None]]] = {
    # the functions that make the arguments and check the results
    CompressionTopKConfiguration: (one_cta(nsa.one_pass_inputs), nsa.assert_one_pass),
    SelectionConfiguration: (selection_inputs, nsa.assert_selected),
    SelectionKVOuterConfiguration: (lambda c, choice: nsa.by_blocks_inputs(c, choice, 1, 1), nsa.assert_by_blocks),
    SelectionBackwardConfiguration: (one_cta(nsa.selection_backward_inputs), nsa.assert_differentiated),
    TopKConfiguration: (nsa.top_k_inputs, nsa.assert_ranked),
    CsrTransposeConfiguration: (sorted_rows, assert_sorted),
    SparseDecodeConfiguration: (decoded, assert_decoded),
}
SOURCES = {  # of kernels that Hopper and Blackwell share
    CsrTransposeConfiguration: "cudnn_kernels.attention.csr_transpose:CsrTranspose",
    SparseDecodeConfiguration: "cudnn_kernels.attention.sparse_decode:Decode",
}
BACKWARD = SelectionBackwardConfiguration("float16", 16, 1, 64, 64, 16, True, (128, 16), 3, list_chunk=32)
TOP_K = replace(nsa.RANK, tile=(128, 32), stages=2, block=2, stride=1)
ONE_PASS = replace(nsa.SMALL, heads=16, key_heads=1, tile=(192, 64), block=4, stride=2)
SEVERAL = Ranking(((8, 4), (88, 44)))  # rows that see up to 32 keys take a separate path
CASES: dict[str, tuple[Any, Any]] = {
    # tiles are small, so that buffers are filled again, and lists short, so that a warpgroup skips blocks that
    # another one's rows chose, and some rows have none
    "lists": (CsrTransposeConfiguration(16, True, True, rows=8), Choice((2, 0, 24), 7)),
    "selection": (
        SelectionConfiguration("float16", 16, 1, 64, 64, 16, tile=(128, 16), stages=3),
        Choice((1, 2, 60), 3),
    ),
    "selection, rows one by one": (
        # of each eight rows, four share their blocks, and four hardly do, alone and in pairs: each by one warpgroup
        SelectionConfiguration("float16", 16, 1, 64, 64, 64, tile=(128, 64), stages=3, single_query_threshold=13),
        Listed(
            (66,),
            3,
            0,
            (
                (0,),
                (1,),
                (0,),
                (),
                *[(0, 1)] * 4,
                *[(1, 0)] * 4,
                (0,),
                (0,),
                (),
                (1,),
                (),
                (),
                (0,),
                (1, 0),
                *[(0, 1)] * 4,
                (),
                (1,),
                (),
                (),
                *[(0, 1)] * 4,
                *[(0, 1)] * 4,
                (),
                (),
                (0,),
                (),
            ),
        ),
    ),
    "selection by blocks": (
        SelectionKVOuterConfiguration("float16", 6, 3, 64, 64, 16, True, list_chunk=16),
        Choice((2, 0, 40), 7),
    ),
    "gradients by rows": (BACKWARD, Choice((1, 2, 90), 3, spare=0)),
    "gradients by blocks": (BACKWARD, Choice((1, 2, 40), 3, spare=0)),
    "top-k": (replace(TOP_K, full_list=True), Ranking(((10, 9), (100, 98)))),
    "top-k, teams of warps": (replace(TOP_K, heads=64, key_heads=1), Ranking(((100, 98),))),
    "decode step": (SparseDecodeConfiguration("float16", "float16", 4, 2, 64, 64, 16, 4, 2, 21), (200, 20)),
    "compression with top-k": (ONE_PASS, SEVERAL),
    "compression with top-k, teams of warps": (replace(ONE_PASS, heads=32), SEVERAL),
}
QUERIES = "Q may be overwritten once all four warps have read theirs, and the emulator ends a product for all at once"
AGAIN = (1, "a step that was looked at already is waited for again")
IN_ONE = {
    "wait_loop.mbarrier.try_wait.parity.shared.b64": (1, QUERIES),
    "wgmma.fence.sync.aligned": (1, "no register of Q K^T was written since the MMA before, on one of two paths"),
}
KERNELS = {"gradients by rows": "_rows", "gradients by blocks": "_blocks"}  # parts of names, where a call has several
OF_TOP_K = {
    "bar.warp.sync": (1, LANES),
    "fence.mbarrier_init.release.cluster": (1, "the fence between proxies, before all meet, orders these writes too"),
}
NOT_NOTICED: dict[str, dict[str, tuple[int, str]]] = {  # how many of an instruction, and why
    "lists": LISTS,
    "selection": {"bar.warp.sync": (10, LANES), "wait_loop.mbarrier.try_wait.parity.shared.b64": AGAIN},
    "selection, rows one by one": {
        "bar.sync": (10, "the second meeting of an exchange: all meet for something else before the next one"),
        "bar.warp.sync": (4, LANES),
        "fence.proxy.async.shared::cta": (4, "rows of O in shared memory are read by threads, not by products"),
        "wgmma.commit_group.sync.aligned": (1, "the first of two rows' product with V, waited for with the second's"),
        "wgmma.fence.sync.aligned": (5, "no register of a product was written since the one before"),
        "wgmma.wait_group.sync.aligned": (6, "all was waited for with the scores, but before the second of two rows"),
    },
    "selection by blocks": {"bar.sync": (1, QUERIES)},
    "gradients by rows": {
        "bar.warp.sync": (8, LANES),
        "wait_loop.mbarrier.try_wait.parity.shared.b64": AGAIN,
        "wgmma.commit_group.sync.aligned": (2, "the scores' product, which is waited for together with the one behind"),
        "wgmma.fence.sync.aligned": (2, "no register of a product was written since the one before"),
    },
    "gradients by blocks": {
        "bar.warp.sync": (1, LANES),
        "wgmma.fence.sync.aligned": (1, "no register of a product was written since the one before"),
        "wgmma.wait_group.sync.aligned": (1, "dV's product, whose operand has its own registers: waited for next"),
    },
    "top-k": OF_TOP_K,
    "top-k, teams of warps": OF_TOP_K,
    "compression with top-k": IN_ONE,
    "compression with top-k, teams of warps": IN_ONE,
}


def one_by_one(run: Callable[[str, int], bool]) -> Callable[[Instruction], bool]:
    """Synchronisations of a warpgroup that processes rows one by one: only it has barriers of one warpgroup."""
    seen: list[Program] = []
    with without(None, seen, "selection"):
        assert run(*ATTEMPTS[0])
    instructions = [x for x in seen[-1].kernel.instructions if x.opcode in ("bar", "wgmma")]
    texts = [x.text for x in instructions]
    first = next(i for i, text in enumerate(texts) if text.startswith("bar.red"))
    begin = max(i for i, text in enumerate(texts[:first]) if text == "bar.warp.sync")
    end = max(i for i, text in enumerate(texts) if text == "bar.sync")
    lines = range(instructions[begin].line + 1, instructions[end].line + 1)
    return lambda instruction: synchronises(instruction) and instruction.line in lines


def launcher(c: Any, problem: Any) -> Callable[[str, int], bool]:
    inputs, check = ARGUMENTS[type(c)]
    torch.manual_seed(0)
    fresh = inputs(c, problem)
    module, kernel = (SOURCES.get(type(c)) or ARCHITECTURES["sm_90a"].source(c)).split(":")
    with ptx_emulator.emulate("sm_90a"):
        made = getattr(importlib.import_module(module), kernel)(c)
        compiled = compiler.compile_for("sm_90a", made, *fakes.arguments(c))

    def run(scheduler: str, seed: int) -> bool:
        kwargs = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in fresh.items()}
        with ptx_emulator.emulate("sm_90a", **RACES, scheduler=scheduler, seed=seed):
            compiled(*(kwargs[slot.name] for slot in c.slots()))
        try:
            check(kwargs, c, problem)
        except AssertionError:
            return False
        return True

    return run


@pytest.mark.parametrize("name", brief(list(CASES), 0))
@pytest.mark.timeout(1200)
def test_each_synchronisation_is_missed(name: str) -> None:
    run = launcher(*CASES[name])
    chosen = one_by_one(run) if "one by one" in name else synchronises
    results = mutants(run, ATTEMPTS, chosen, entry=KERNELS.get(name, ""))
    assert len(results) >= 2
    assert not unexplained(results, NOT_NOTICED.get(name, {}))
