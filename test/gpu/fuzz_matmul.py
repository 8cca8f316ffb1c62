"""Random matrix products with random element-wise operations after them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import cudnn
from gpu.common import IO_TYPES, Data, Epilogue
from support.graphs import like


class MatmulProblem:
    """C = epilogue(A B): types, extents, transposes, a shared B, odd extents, all from one seed."""

    def __init__(self, seed: int, device: str) -> None:
        data = Data(seed, device)
        rng = data.rng
        self.kind = rng.choice(IO_TYPES)
        batch = rng.choice([1, 1, 2, 3, 8])
        unit = rng.choice([8, 8, 8, 16, 64, 1])  # extents off the multiple of 8 that 16-byte accesses want are rarer
        m, n, k = (unit * rng.randint(1, 256 // unit) for _ in range(3))
        row_major, column_major = [0, 1, 2], [0, 2, 1]
        # A product of about unit variance, so that no activation saturates.
        self.a = data.tensor([batch, m, k], rng.choice([row_major, column_major]), self.kind, k**-0.5)
        self.b = data.tensor([rng.choice([1, batch]), k, n], rng.choice([row_major, column_major]), self.kind)
        self.epilogue = Epilogue(data, [batch, m, n], row_major, rng.choice([1, 2]), self.kind)

    def build(self, graph: cudnn.pygraph) -> tuple[dict[cudnn.tensor, torch.Tensor], cudnn.tensor]:
        values = {like(graph, data): data for data in (self.a, self.b)}
        c = self.epilogue.build(graph, graph.matmul(*values), values)
        return values, c.set_output(True)

    def formula(self, dtype: torch.dtype) -> torch.Tensor:
        return self.epilogue.formula(self.a.to(dtype) @ self.b.to(dtype))


def problems(count: int, device: str = "cuda") -> Iterator[tuple[int, MatmulProblem]]:
    """The problems of seeds 0 to ``count - 1``."""
    return ((seed, MatmulProblem(seed, device)) for seed in range(count))
