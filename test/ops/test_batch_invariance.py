"""``batch_invariant`` attention in the emulator: a sequence has the same bits whatever the others are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cudnn
from cudnn.attention.flash_op import BATCH_INVARIANT_SPLITS
from cudnn.ops import scaled_dot_product_attention
from cudnn.sdpa import SdpaForward
from support.invariance import batched, decoded, packed

WINDOW: dict[str, Any] = {"causal": True, "window_size": (200, -1)}
OWN = (150, 190)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_packed_sequences() -> None:
    """A longer sequence makes the window hide keys, for which there is a kernel of its own."""
    run = functools.partial(packed, OWN, heads=(2, 1), head=(64, 64), **WINDOW)
    with cudnn.emulation("sm_90a"):
        alone = run([], 0, batch_invariant=True)
        assert same(alone, run([(300, 300), (0, 9)], 1, batch_invariant=True))
        assert not same(run([], 0), run([(300, 300)], 1))


def test_entries_of_a_batch() -> None:
    """Of nine, the last ones are added up in another order, unless calls are batch-invariant."""
    run = functools.partial(batched, OWN, heads=(1, 1), head=(64, 64), causal=True)
    with cudnn.emulation("sm_90a"):
        assert same(run(1, 0, batch_invariant=True), run(17, 2, batch_invariant=True))
        assert not same(run(1, 0, deterministic=True), run(17, 2, deterministic=True))


@pytest.mark.parametrize("page", [0, 16])
def test_decoding(page: int) -> None:
    """The splits of a sequence depend on its own keys."""
    run = functools.partial(decoded, 300, rows=1, page=page, batch_invariant=True)
    with cudnn.emulation("sm_90a"):
        assert same(run([], 0), run([700, 5], 1))


def test_the_numbers_of_splits() -> None:
    """They follow from a batch's size, unless calls are batch-invariant."""
    splits = set()
    for batch, batch_invariant in ((1, True), (100, True), (1, False), (100, False)):
        q, k, o = (torch.empty(batch, 2, n, 64, dtype=torch.bfloat16, device="meta") for n in (1, 8192, 1))
        lse = torch.empty(batch, 2, 1, dtype=torch.float32, device="meta")
        options: dict[str, Any] = {"num_splits": BATCH_INVARIANT_SPLITS} if batch_invariant else {}
        api = SdpaForward(q, k, k, o, lse, arch="sm_90a", **options)
        splits.add((batch_invariant, api.constants["splits"]))
    assert len(splits) == 3


def test_by_the_operator_of_graphs() -> None:
    """By our kernels alone, whatever the sizes."""
    q = torch.randn(3, 2, 70, 64).bfloat16()
    run = functools.partial(scaled_dot_product_attention, is_causal=True, batch_invariant=True)
    with cudnn.emulation("sm_90a"):
        assert torch.equal(run(q, q, q)[1:2], run(*[q[1:2]] * 3))
        counts = torch.tensor([70, 9, 0], dtype=torch.int32)
        assert torch.equal(run(q, q, q, seq_len_kv=counts)[1:2], run(*[q[1:2]] * 3, seq_len_kv=counts[1:2]))
    with pytest.raises(ValueError, match="backend with batch_invariant: got cudnn"):
        run(q, q, q, backend="cudnn")
    with pytest.raises(NotImplementedError, match='backend="fused": got a mask or dropout'):
        run(q, q, q, dropout_p=0.5)
