"""``batch_invariant`` attention on the GPU: the same bits among 0 to 9,999 other sequences."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from cudnn.ops import scaled_dot_product_attention
from support.invariance import batched, decoded, packed
from support.selection import brief

WINDOW = {"causal": True, "window_size": (500, -1)}
CASES: list[tuple[tuple[int, int], dict[str, Any]]] = [
    ((64, 64), WINDOW),
    ((128, 128), {"causal": True}),
    ((192, 128), {"causal": True}),
    ((256, 256), {"causal": True, "softcap": 20.0}),
    ((96, 96), {}),
    ((192, 192), WINDOW),
]
OTHERS = [(300, 300), (1, 1), (0, 9), (700, 30), (64, 2000), (129, 129)]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), one, other, strict=False):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("head", "options"), brief(CASES, 0, 1, 2, 3))
def test_packed_sequences(head: tuple[int, int], options: dict[str, Any]) -> None:
    for own in ((600, 700), (1, 130)):
        run = functools.partial(packed, own, heads=(4, 2), head=head, device="cuda", batch_invariant=True, **options)
        alone = run([], 0)
        for count, place in ((1, 1), (6, 3), (300, 250)):
            assert_same(alone, run((OTHERS * 50)[:count], place))


@pytest.mark.parametrize("head", [(64, 64), (128, 128), (192, 128)])
def test_ten_thousand_sequences(head: tuple[int, int]) -> None:
    others = [(i % 23, i % 23) for i in range(9_999)]
    run = functools.partial(packed, (150, 150), heads=(4, 2), head=head, device="cuda", causal=True)
    assert_same(run([], 0, batch_invariant=True), run(others, 7_000, batch_invariant=True))


@pytest.mark.parametrize(("head", "options"), brief(CASES, 1, 2, 4))
def test_entries_of_a_batch(head: tuple[int, int], options: dict[str, Any]) -> None:
    for own in ((600, 700), (3, 900)):
        run = functools.partial(batched, own, heads=(4, 2), head=head, device="cuda", batch_invariant=True, **options)
        alone = run(1, 0)
        for batch, place in ((2, 1), (9, 5), (200, 113)):
            assert_same(alone, run(batch, place))


@pytest.mark.parametrize(("rows", "page"), [(1, 0), (1, 16), (5, 64), (40, 0)])
def test_decoding(rows: int, page: int) -> None:
    run = functools.partial(decoded, 1000, rows=rows, page=page, device="cuda", batch_invariant=True)
    alone = run([], 0)
    for count, place in ((1, 1), (40, 17), (300, 250)):
        assert_same(alone, run([50 * (i % 40) for i in range(count)], place))


def test_by_the_operator_of_graphs() -> None:
    """Where sizes would choose cuDNN for a few entries, and our kernels for many."""
    q = torch.randn(64, 8, 4096, 64, device="cuda", dtype=torch.bfloat16)
    run = functools.partial(scaled_dot_product_attention, is_causal=True, batch_invariant=True)
    assert torch.equal(run(q, q, q)[9:10], run(*[q[9:10]] * 3))
    counts = torch.arange(64, device="cuda", dtype=torch.int32) * 60
    assert torch.equal(run(q, q, q, seq_len_kv=counts)[9:10], run(*[q[9:10]] * 3, seq_len_kv=counts[9:10]))
