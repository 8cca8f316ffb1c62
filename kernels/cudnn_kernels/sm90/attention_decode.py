"""Attention on Hopper for few query rows and many keys: the forward kernel, of whose CTAs several split the keys."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.attention.forward import Call, O
from cudnn_kernels.attention.split_keys import WARP, CachedProblem, SplitKeys
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS, AttentionForward, Part, Room


class AttentionDecode(SplitKeys, AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`."""

    query_arrivals, apart, guesses = GROUP // WARP, False, False

    @cute.jit
    def each_tile(self, call: Call, visit: Any, draws: bool = False) -> None:
        visit(self.problem(call.work, *self.tile(call.work)), Int32(0), Int32(0))

    def fetch_queries(self, call: Call, room: Room, p: CachedProblem, phase: Int32) -> None:
        """The warpgroups themselves load Q."""

    def take(self, call: Call, room: Room, part: Part, p: CachedProblem, place: Int32, phase: Int32) -> None:
        self.load_queries(call, room.q[None, None, part.group], p, part.group * ROWS, part.thread)
        cute.arch.sync_warp()
        self.release(room.q_full + part.group)
        super().take(call, room, part, p, place, phase)

    @cute.jit
    def store(self, call: Call, room: Room, part: Part, p: CachedProblem) -> None:
        """What a warpgroup's rows have of the CTA's keys."""
        for slot in cutlass.range_constexpr(2):
            row = p.row + part.group * ROWS + self.score_rows.row(part.thread, slot)
            if row < p.mask.queries:
                target = call.tensors[O][(None, *self.place(p, row))]
                self.score_rows.store(part.acc, slot, target, part.thread)
