"""Which tile next, for one product or a batch of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Work:
    """A cluster's tile: its indices, where the operands lie in the last dimension, and the index of the expert."""

    m: Any
    n: Any
    a: Any
    b: Any
    d: Any
    expert: Any


@dataclass(frozen=True)
class Dense:
    """Tiles of a batch of matrices, ``strip`` rows of tiles at a time, column after column.

    What runs at the same time then reads a nearly square part of A and B, which stays in the L2 cache.
    """

    strip: int = 8
    count = 0  # of its arguments

    def arguments(self) -> tuple[Any, ...]:
        """Stand-ins for what the caller passes."""
        return ()

    def parameters(self, tiles: tuple[Any, Any], batch: Any, *arguments: Any) -> tuple[Any, ...]:
        """On the host: what the kernel needs to find its tiles, from the tiles in both dimensions."""
        return (*tiles, batch)

    def total(self, parameters: Any) -> Any:
        """Number of tiles."""
        m, n, batch = parameters
        return m * n * batch

    def find(self, parameters: Any, index: Any) -> Work:
        """A tile by its number."""
        import cutlass

        m, n, _ = parameters
        batch, index = index // (m * n), index % (m * n)
        strip, index = index // (self.strip * n), index % (self.strip * n)
        rows = cutlass.min(m - strip * self.strip, self.strip)
        return Work(strip * self.strip + index % rows, index // rows, batch, batch, batch, batch)
