"""FLOPs of the operators of native sparse attention, from shapes of varlen tensors; see :mod:`cudnn.runtime.flops`."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_kernels.attention.sparse import ALWAYS


def products(q: Sequence[int], keys: int, size: int) -> int:
    """FLOPs of GEMMs of each varlen row of q ``[T, H, D]`` with ``keys`` keys and ``elements`` elements of heads."""
    return 2 * q[0] * q[1] * keys * size


def _sizes(q: Sequence[int], v: Sequence[int], backward: bool) -> int:
    """Head elements of all attention GEMMs: two forward, five backward."""
    return 3 * q[2] + 2 * v[2] if backward else q[2] + v[2]


def top_k(q: Sequence[int], k: Sequence[int]) -> int:
    """The scores of all keys."""
    return products(q, k[0], q[2])


def compression(q: Sequence[int], k: Sequence[int], v: Sequence[int], backward: bool = False) -> int:
    """All rows with all keys: where sequences end is on the device."""
    return products(q, k[0], _sizes(q, v, backward))


def compression_backward(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    return compression(q, k, v, True)


def compression_top_k(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> int:
    return compression(q, k, v) + top_k(q, k)


def selection(q: Sequence[int], v: Sequence[int], lists: Sequence[int], block_size: int, backward: bool = False) -> int:
    return products(q, lists[2] * block_size, _sizes(q, v, backward))


def selection_backward(q: Sequence[int], v: Sequence[int], lists: Sequence[int], block_size: int) -> int:
    return selection(q, v, lists, block_size, True)


def sliding_window(q: Sequence[int], v: Sequence[int], window: int, longest: int, backward: bool = False) -> int:
    return products(q, min(window, longest), _sizes(q, v, backward))


def sliding_window_backward(q: Sequence[int], v: Sequence[int], window: int, longest: int) -> int:
    return sliding_window(q, v, window, longest, True)


def gated_selection(
    q: Sequence[int], v: Sequence[int], lists: Sequence[int], block_size: int, window: int, longest: int
) -> int:
    return selection(q, v, lists, block_size) + sliding_window(q, v, window, longest)


def branches(
    q: Sequence[int],
    v: Sequence[int],
    ck: Sequence[int],
    cv: Sequence[int],
    given_lists: Sequence[int] | None,
    count: int,
    block_size: int,
    window: int,
    longest: int,
) -> int:
    """The three branches; without lists, the scores of compressed keys again, to choose blocks."""
    scores = top_k(q, ck) if given_lists is None else 0
    lists = given_lists or (q[0], ck[1], ALWAYS + count)
    rest = gated_selection(q, v, lists, block_size, window, longest)
    return compression(q, ck, cv) + scores + rest


def branches_backward(
    q: Sequence[int],
    v: Sequence[int],
    ck: Sequence[int],
    cv: Sequence[int],
    lists: Sequence[int],
    block_size: int,
    window: int,
    longest: int,
) -> int:
    branches = selection(q, v, lists, block_size, True) + sliding_window(q, v, window, longest, True)
    return compression(q, ck, cv, True) + branches
