"""Attention on Blackwell for few query rows and many keys: the forward kernel, of whose CTAs several split the keys."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cudnn_kernels.attention.forward import Call, O
from cudnn_kernels.attention.split_keys import CachedProblem, SplitKeys
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.attention_forward import GROUP, AttentionForward, Room
from cudnn_kernels.sm100.tensor_memory import CHUNK


class AttentionDecode(SplitKeys, AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`. Its tile is (128, 128)."""

    def load_rows(self, call: Call, room: Room, p: CachedProblem) -> None:
        """Those that compute the softmax load Q."""

    @cute.jit
    def soften(
        self, call: Call, room: Room, p: CachedProblem, tile: Int32, thread: Int32, begin: Int32, end: Int32
    ) -> None:
        self.load_queries(call, room.q[None, None, 0], p, 0, thread)
        barriers.wait(Barrier.GROUP, GROUP)
        if thread == 0:
            cute.arch.mbarrier_arrive(room.q_full)
        AttentionForward.soften(self, call, room, p, tile, thread, begin, end)

    @cute.jit
    def store(
        self, call: Call, room: Room, p: CachedProblem, factor: Float32, tile: Int32, thread: Int32, exists: Boolean
    ) -> None:
        """What the rows have of the CTA's keys."""
        row, out = p.row + thread, self.out(room, tile)
        target = call.tensors[O][(None, *self.place(p, row))]
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for chunk in cutlass.range_constexpr(self.c.head_v // CHUNK):
            values.fill(0.0)
            if exists:
                tensor_memory.load(out + chunk * CHUNK, thread, values)
                cute.arch.fence_view_async_tmem_load()
            values.store(values.load() * factor)
            if row < p.mask.queries:
                cute.autovec_copy(values, cute.local_tile(target, (CHUNK,), (chunk,)))
