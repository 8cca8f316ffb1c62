"""Attention on Blackwell for few query rows and many keys: the forward kernel, of whose CTAs several split the keys."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cudnn_kernels.attention.split_keys import CachedProblem, SplitKeys
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.attention_forward import GROUP, AttentionForward, Barriers
from cudnn_kernels.sm100.tensor_memory import CHUNK


class AttentionDecode(SplitKeys, AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`. Its tile is (128, 128)."""

    def part(self, which: int) -> tuple[Any, tuple[int, int], bool]:
        box = (self.size, self.piece)
        return cute.composition(cute.slice_(self.layout(self.piece, 1), (None, None, 0)), box), box, False

    def load_rows(self, atoms: list, tensors: list, sQ: cute.Tensor, b: Barriers, p: CachedProblem) -> None:
        """Those that compute the softmax write Q."""

    @cute.jit
    def soften(
        self, pointer: cute.Pointer, sQ: cute.Tensor, b: Barriers, p: CachedProblem, atoms: list, tensors: list,
        lse: Any, sink: Any, scale: Float32, cap_factor: Any, scale_output: Float32, tile: Int32, thread: Int32,
        begin: Int32, end: Int32,
    ) -> None:  # fmt: skip
        self.load_queries(tensors[2], sQ[None, None, 0], p, 0, thread)
        barriers.wait(Barrier.GROUP, GROUP)
        if thread == 0:
            cute.arch.mbarrier_arrive(b.q_full)
        AttentionForward.soften(
            self, pointer, sQ, b, p, atoms, tensors, lse, sink, scale, cap_factor, scale_output, tile, thread, begin,
            end,
        )  # fmt: skip

    @cute.jit
    def store(
        self, atoms: list, tensors: list, out: cute.Pointer, sQ: cute.Tensor, lse: Any, p: CachedProblem,
        factor: Float32, log_sum: Float32, tile: Int32, thread: Int32, exists: Boolean,
    ) -> None:  # fmt: skip
        """What the rows have of the CTA's keys."""
        _, split, _ = cute.arch.block_idx()
        row = p.row + thread
        query, head = row // p.mask.share, p.head + row % p.mask.share
        if row < p.mask.queries:
            lse[query, head, p.batch, split] = log_sum
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for chunk in cutlass.range_constexpr(self.d.head_v // CHUNK):
            values.fill(0.0)
            if exists:
                tensor_memory.load(out + chunk * CHUNK, thread, values)
                cute.arch.fence_view_async_tmem_load()
            values.store(values.load() * factor)
            if row < p.mask.queries:
                target = tensors[3][None, query, head, p.batch, split]
                cute.autovec_copy(values, cute.local_tile(target, (CHUNK,), (chunk,)))
