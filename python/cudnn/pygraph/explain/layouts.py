"""Names of stride orders."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn.arrays.layout import channels_last, row_major, stride_order, strides_in_order

_CHANNELS_LAST = {3: "NWC", 4: "NHWC", 5: "NDHWC"}


def layout(dims: Sequence[int], strides: Sequence[int]) -> str:
    """The name of a stride order, ``""`` where it has none; where several fit, the more common one.

    ``"column-major"`` describes the last two dimensions, ``"BSHD"`` of attention's ``[b, h, s, d]`` with the heads of
    one token side by side. Gaps between elements are named too.

    >>> layout([8, 64, 28, 28], [50176, 1, 1792, 64])
    'NHWC'
    >>> layout([4, 6], [8, 1])
    'row-major with gaps'
    """
    rank = len(dims)
    if not rank or len(strides) != rank:
        return ""
    wide = [axis for axis in range(rank) if dims[axis] > 1]
    if any(strides[axis] == 0 for axis in wide):
        return "broadcast"
    named = {"row-major": row_major(dims)}
    if rank >= 2:
        named["column-major"] = strides_in_order(dims, [rank - 2, rank - 1, *range(rank - 3, -1, -1)])
    if rank in _CHANNELS_LAST:
        named[_CHANNELS_LAST[rank]] = channels_last(dims)
    if rank == 4:
        named["BSHD"] = strides_in_order(dims, [3, 1, 2, 0])
    for name, packed in named.items():
        if all(strides[axis] == packed[axis] for axis in wide):
            return name
    order = [axis for axis in stride_order(dims, strides) if axis in wide]
    for name, packed in named.items():
        if order == [axis for axis in stride_order(dims, packed) if axis in wide]:
            return f"{name} with gaps"
    return ""
