"""Views of matrices."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute


def matrix_view(tensor: cute.Tensor, columns: Any = None) -> cute.Tensor:
    """A row-major tensor as (rows, columns, 1), with its last dimensions flattened."""
    rows, step = tensor.shape[0], tensor.stride[0]
    columns = tensor.shape[1] if columns is None else columns
    return cute.make_tensor(tensor.iterator, cute.make_layout((rows, columns, 1), stride=(step, 1, step)))


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """The transposed view of (rows, columns, ...)."""
    modes = [1, 0, *range(2, cute.rank(tensor))]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=modes))
