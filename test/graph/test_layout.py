"""The examples in docstrings, and the stride rules on random shapes."""

from __future__ import annotations

import doctest

import torch
from hypothesis import given
from hypothesis import strategies as st

from cudnn import errors
from cudnn.arrays import layout

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def test_examples_in_docstrings() -> None:
    for module in (errors, layout):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


@given(SHAPES)
def test_row_major_is_contiguous(shape: list[int]) -> None:
    assert tuple(layout.row_major(shape)) == torch.empty(shape).stride()


@given(st.lists(st.integers(2, 7), min_size=4, max_size=5))
def test_channels_last_is_that_of_pytorch(shape: list[int]) -> None:
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    assert tuple(layout.channels_last(shape)) == torch.empty(shape).to(memory_format=memory_format).stride()


@given(st.lists(st.integers(2, 7), min_size=1, max_size=5), st.randoms())
def test_strides_like_keeps_the_order(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    permuted = torch.empty(shape).permute(order)
    other = [extent + 1 for extent in permuted.shape]
    strides = layout.strides_like(permuted.stride(), permuted.shape, other)
    fresh = torch.empty([other[order.index(axis)] for axis in range(len(shape))]).permute(order)
    assert tuple(strides) == fresh.stride()


@given(SHAPES, SHAPES)
def test_broadcast_is_that_of_pytorch(first: list[int], second: list[int]) -> None:
    try:
        expected = list(torch.broadcast_shapes(first, second))
    except RuntimeError:
        expected = None
    assert layout.broadcast([first, second]) == expected


@given(SHAPES)
def test_span_reaches_the_last_element(shape: list[int]) -> None:
    tensor = torch.arange(torch.Size(shape).numel() * 2)[::2].view(shape)
    assert layout.span(shape, tensor.stride()) == int(tensor.flatten()[-1]) + 1
