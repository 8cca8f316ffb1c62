"""Shapes and strides: the few rules that every operation's inference is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod


def row_major(dims: Sequence[int]) -> list[int]:
    """Strides with the last dimension fastest.

    >>> row_major([4, 8, 32])
    [256, 32, 1]
    """
    return strides_in_order(dims, range(len(dims) - 1, -1, -1))


def channels_last(dims: Sequence[int]) -> list[int]:
    """Strides with dimension 1 fastest, then the last one back to dimension 2, and dimension 0 slowest (NHWC order).

    >>> channels_last([8, 64, 56, 28])
    [100352, 1, 1792, 64]
    """
    if len(dims) < 2:
        return [1] * len(dims)
    return strides_in_order(dims, [1, *range(len(dims) - 1, 1, -1), 0])


def strides_in_order(dims: Sequence[int], fastest_first: Iterable[int]) -> list[int]:
    """Packed strides over ``dims``, its dimensions taken in the order given, fastest first."""
    strides = [1] * len(dims)
    step = 1
    for axis in fastest_first:
        strides[axis] = step
        step *= dims[axis]
    return strides


def stride_order(dims: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The dimensions, fastest first; of equal strides the smaller extent, then the later dimension, is faster."""
    return sorted(range(len(strides)), key=lambda axis: (strides[axis], dims[axis], -axis))


def strides_like(strides: Sequence[int], like_dims: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Packed strides over ``dims`` in the stride order of another tensor of the same rank.

    >>> strides_like([1, 4], [4, 8], [3, 5])
    [1, 3]
    """
    return strides_in_order(dims, stride_order(like_dims, strides))


def broadcast(shapes: Sequence[Sequence[int]]) -> list[int] | None:
    """The right-aligned broadcast of shapes, None where two extents differ and neither is 1.

    >>> broadcast([[8, 1, 4], [5, 1]])
    [8, 5, 4]
    """
    rank = max(len(shape) for shape in shapes)
    result = [1] * rank
    for shape in shapes:
        for axis, extent in enumerate(shape, start=rank - len(shape)):
            if result[axis] == 1:
                result[axis] = extent
            elif extent not in (1, result[axis]):
                return None
    return result


def span(dims: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one that a strided tensor touches, both included; 0 for an empty tensor."""
    if prod(dims) == 0:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(dims, strides, strict=True))


# cuDNN 9.19 fails to launch its element-wise kernels for rows of slightly more than twice this number of elements.
_LONGEST_ROW = 1 << 18


def element_wise_layout(dims: Sequence[int], *strides: Sequence[int]) -> list[list[int]]:
    """Three extents, and the strides of some tensors, for an operation that does not care which element is where.

    The last dimension is the fastest. Tensors without gaps are a matrix of other extents, with rows as long as may be.

    >>> element_wise_layout([2, 5, 3], [15, 1, 5], [15, 1, 5])
    [[1, 1, 30], [30, 30, 1], [30, 30, 1]]
    >>> element_wise_layout([2, 5, 3], [32, 1, 8], [15, 1, 5])
    [[2, 3, 5], [32, 8, 1], [15, 5, 1]]
    """
    count = prod(dims)
    if span(dims, strides[0]) == count and all([*steps] == [*strides[0]] for steps in strides):
        row = next(length for length in range(min(count, _LONGEST_ROW), 0, -1) if count % length == 0)
        return [[1, count // row, row], *([count, row, 1] for _ in strides)]
    order = stride_order(dims, strides[0])[::-1]
    return [[values[axis] for axis in order] for values in (dims, *strides)]
