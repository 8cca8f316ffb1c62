"""Rows of elements of 16 bits, of which a thread loads or stores 16 bytes at a time."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

VECTOR = 8  # elements


def load(line: cute.Tensor, number: Any) -> cute.Tensor:
    """The elements of a row, 16 bytes by their number."""
    values = cute.make_rmem_tensor(VECTOR, line.element_type)
    cute.autovec_copy(cute.local_tile(line, (VECTOR,), (number,)), values)
    return values


def store(values: Any, line: cute.Tensor, number: Any) -> None:
    """Rounds values, and stores them."""
    rounded = cute.make_rmem_tensor(VECTOR, line.element_type)
    rounded.store(values.to(line.element_type))
    cute.autovec_copy(rounded, cute.local_tile(line, (VECTOR,), (number,)))
