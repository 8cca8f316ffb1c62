"""Vectorized access to rows of 16-bit elements: 16 bytes per load or store."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

VECTOR = 8  # elements


def load(row: cute.Tensor, index: Any) -> cute.Tensor:
    """Loads the vector with an index of a row."""
    values = cute.make_rmem_tensor(VECTOR, row.element_type)
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (index,)), values)
    return values


def store(values: Any, row: cute.Tensor, index: Any) -> None:
    """Rounds values and stores them as the vector with an index of a row."""
    rounded = cute.make_rmem_tensor(VECTOR, row.element_type)
    rounded.store(values.to(row.element_type))
    cute.autovec_copy(rounded, cute.local_tile(row, (VECTOR,), (index,)))
