"""Thread block clusters: the CTA's coordinate, multicast masks, and synchronization."""

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
        """The number of CTAs."""
        return self.m * self.n

    @property
    def consumer_ctas(self) -> int:
        """CTAs that read a stage which this CTA's TMA loads fill, itself included: those of its row and column."""
        return self.m + self.n - 1

    def cta_coord(self) -> tuple[Int32, Int32]:
        """This CTA's (m, n) in the cluster."""
        m, n, _ = cute.arch.block_idx()
        return m, n

    def multicast(self, operand: int) -> tuple[Int32, Int32]:
        """This CTA's rank among the CTAs that load the same tile of A (operand 0, a row of the cluster) or of B (1, a
        column), and their multicast mask.
        """
        m, n = self.cta_coord()
        mask = ((1 << self.m) - 1) << (self.m * n) if operand else sum(1 << (self.m * j) for j in range(self.n)) << m
        return (n, m)[operand], cutlass.Int16(mask)


@cute.jit
def cluster_sync(cluster: cutlass.Constexpr[Cluster], relaxed: cutlass.Constexpr[bool] = False) -> None:
    """Synchronizes all threads of the cluster, or of the CTA if the cluster has one CTA. ``relaxed``: the arrival
    releases no writes, which saves a memory barrier; enough for mbarriers after ``mbarrier_init_fence``.
    """
    if const_expr(cluster.size > 1):
        if const_expr(relaxed):
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()


@cute.jit
def consumer_release(cluster: cutlass.Constexpr[Cluster], empty: cute.Pointer) -> None:
    """One warp: arrives on the empty barrier of a stage in every CTA whose multicast loads write this CTA's stage."""
    lane = cute.arch.lane_idx()
    if const_expr(cluster.size == 1):
        if lane == 0:
            cute.arch.mbarrier_arrive(empty)
    else:
        m, n = cluster.cta_coord()
        if lane < cluster.size:
            if lane % cluster.m == m or lane // cluster.m == n:
                cute.arch.mbarrier_arrive(empty, lane)
