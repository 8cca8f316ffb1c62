"""The CTAs that start together, m x n of them: where this one is, who shares its tiles, how they meet."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@dataclass(frozen=True)
class Cluster:
    """m x n CTAs; the grid's third dimension counts clusters."""

    m: int
    n: int

    @property
    def size(self) -> int:
        """All CTAs."""
        return self.m * self.n

    @property
    def sharers(self) -> int:
        """CTAs that read what this one's operands are in, itself included."""
        return self.m + self.n - 1

    def place(self) -> tuple[Int32, Int32]:
        """This CTA's place."""
        m, n, _ = cute.arch.block_idx()
        return m, n

    def sharing(self, side: int) -> tuple[Int32, Int32]:
        """This CTA's number among those of its row, which share A, or of its column and B, and all of them as bits."""
        m, n = self.place()
        mask = ((1 << self.m) - 1) << (self.m * n) if side else sum(1 << (self.m * j) for j in range(self.n)) << m
        return (n, m)[side], cutlass.Int16(mask)


@cute.jit
def meet(cluster: cutlass.Constexpr[Cluster]) -> None:
    """Waits for all threads of the cluster."""
    if const_expr(cluster.size > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@cute.jit
def release(cluster: cutlass.Constexpr[Cluster], empty: cute.Pointer) -> None:
    """A warp is done with a buffer: says so to all CTAs that write it."""
    lane = cute.arch.lane_idx()
    if const_expr(cluster.size == 1):
        if lane == 0:
            cute.arch.mbarrier_arrive(empty)
    else:
        m, n = cluster.place()
        if lane < cluster.size:
            if lane % cluster.m == m or lane // cluster.m == n:
                cute.arch.mbarrier_arrive(empty, lane)
