"""Which tiles a cluster takes: every so-manieth one, or what cluster launch control hands out.

With cluster launch control there are as many clusters as tiles, most of which never start: a running cluster cancels
one that has not, and takes its tile. Clusters that are done early then take more.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.pipeline import Agent, CooperativeGroup, PipelineClcFetchAsync

RESPONSE = 16  # bytes
STAGES = 2


class Turns:
    """The tiles of this cluster, for every warp of it, each at its own pace.

    ``end`` is the number of tiles; so many warps of the cluster as there are ``readers`` ask for the next one.
    """

    def __init__(self, dynamic: bool, end: Int32, readers: int, cluster: cute.Layout, smem: Any) -> None:
        _, _, self.first = cute.arch.block_idx()
        _, _, self.step = cute.arch.grid_dim()
        self.dynamic, self.end = dynamic, end
        if dynamic:
            self.responses = smem.allocate_array(Int32, RESPONSE // 4 * STAGES, byte_alignment=RESPONSE)
            self.fetches = PipelineClcFetchAsync.create(
                num_stages=STAGES,
                producer_group=CooperativeGroup(Agent.Thread),
                consumer_group=CooperativeGroup(Agent.Thread, readers),
                tx_count=RESPONSE,
                barrier_storage=smem.allocate_array(cutlass.Int64, 2 * STAGES),
                cta_layout_vmnk=cluster,
                defer_sync=True,
            )

    def reader(self) -> Any:
        """A warp's place among the answers, to be kept and given to ``next``."""
        return self.fetches.make_consumer() if self.dynamic else Int32(0)

    def response(self, stage: Any) -> cute.Pointer:
        """Where an answer is put."""
        return (self.responses + stage.index * (RESPONSE // 4)).align(RESPONSE)

    @cute.jit
    def next(self, index: Int32, reader: Any) -> tuple[Int32, Any]:
        """The tile after ``index``, one that does not exist if there are no more, and the place after it."""
        if const_expr(not self.dynamic):
            return index + self.step, reader
        answer = reader.wait_and_advance()
        _, _, number, valid = cute.arch.clc_response(self.response(answer))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            answer.release()
        return (number if valid != 0 else self.end), reader

    @cute.jit
    def fetch(self) -> None:
        """One warp of the first CTA: asks for the cluster's next tile as long as there are some."""
        writer, reader = self.fetches.make_producer(), self.reader()
        index = self.first
        while index < self.end:
            free = writer.acquire_and_advance()
            with cute.arch.elect_one():
                cute.arch.issue_clc_query(free.barrier, self.response(free))
            index, reader = self.next(index, reader)
        writer.tail()
