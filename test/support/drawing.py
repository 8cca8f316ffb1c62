"""Random data for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st


def shapes(rank: int | None = None, largest: int = 5) -> st.SearchStrategy[list[int]]:
    """Small shapes."""
    ranks = st.integers(2, 4) if rank is None else st.just(rank)
    return ranks.flatmap(lambda rank: st.lists(st.integers(1, largest), min_size=rank, max_size=rank))


@st.composite
def strided(draw: st.DrawFn, dims: Sequence[int], low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Random float32 data with its dimensions in any order of memory, with or without gaps."""
    order = draw(st.permutations(range(len(dims))))
    gap = draw(st.sampled_from([0, 0, 1, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    strides, step = [1] * len(dims), 1
    for axis in order:
        strides[axis] = step
        step = step * dims[axis] + gap
    data = torch.empty_strided(dims, strides)
    return data.copy_(torch.rand(dims, generator=generator) * (high - low) + low)
