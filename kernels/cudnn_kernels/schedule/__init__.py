"""The order of tiles, and where each one's operands lie: policies that the mainloop asks. Plain data until traced.

A schedule lists its arguments of the kernel in ``slots()``; ``experts`` names the size that counts the matrices of B.
On the host, ``parameters`` makes of the arguments, by name, what the kernel needs, and ``limit`` says how many tiles
there can be; in the kernel, ``total`` says how many there are and ``find`` where one of them is. Tiles are
those of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cudnn_kernels.signature import Tensor, vector


@dataclass
class Work:
    """A cluster's tile: its row and column, the last indices of A, B and the outputs, and the expert."""

    m: Any
    n: Any
    a: Any
    b: Any
    d: Any
    expert: Any


def strips(index: Any, m: Any, n: Any, height: int) -> tuple[Any, Any]:
    """Row and column of a tile where m x n tiles are taken ``height`` rows at a time, column after column.

    What runs at the same time then reads a nearly square part of A and B, which stays in the L2 cache.
    """
    import cutlass

    strip, index = index // (height * n), index % (height * n)
    rows = cutlass.min(m - strip * height, height)
    return strip * height + index % rows, index // rows


@dataclass(frozen=True)
class Dense:
    """One product, or a batch of them along l."""

    strip: int = 8
    experts: ClassVar[str] = "l"

    def slots(self) -> tuple[Tensor, ...]:
        return ()

    def parameters(self, m: Any, n: Any, batch: Any, rows: int, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return m, n, batch

    def limit(self, parameters: Any) -> Any:
        m, n, batch = parameters
        return m * n * batch

    def total(self, parameters: Any) -> Any:
        return self.limit(parameters)

    def find(self, parameters: Any, index: Any) -> Work:
        m, n, _ = parameters
        batch = index // (m * n)
        return Work(*strips(index % (m * n), m, n, self.strip), batch, batch, batch, batch)


@dataclass(frozen=True)
class GroupedRows:
    """The rows of A belong to experts, one after the other, and each expert has a B: those along l.

    ``offsets``, int32 (experts,), holds the row where each expert ends, a multiple of the tile's rows. Rows beyond the
    last one are not touched. An expert may have none.
    """

    strip: int = 8
    offsets: str = "offsets"
    experts: ClassVar[str] = "experts"

    def slots(self) -> tuple[Tensor, ...]:
        return (vector(self.offsets, "int32", "experts"),)

    def parameters(self, m: Any, n: Any, batch: Any, rows: int, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return m, n, rows, arguments[self.offsets]

    def limit(self, parameters: Any) -> Any:
        m, n, _, _ = parameters
        return m * n

    def total(self, parameters: Any) -> Any:
        _, n, rows, offsets = parameters
        return offsets[offsets.shape[0] - 1] // rows * n

    def find(self, parameters: Any, index: Any) -> Work:
        from cutlass import Int32

        from cudnn_kernels.schedule.search import count_up_to

        _, n, rows, offsets = parameters
        m, n = strips(index, self.total(parameters) // n, n, self.strip)
        expert = count_up_to(offsets, m * rows)
        return Work(m, n, Int32(0), expert, Int32(0), expert)
