"""Attention on Hopper for few query rows and many keys: the forward kernel, of whose CTAs several split the keys."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import DecodeConfiguration
from cudnn_kernels.attention.split_keys import WARP, CachedProblem, Caches, SplitKeys
from cudnn_kernels.naming import name
from cudnn_kernels.sm90.attention_forward import GROUP, REGISTERS, ROWS, AttentionForward, Part, Rings


class AttentionDecode(SplitKeys, AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`."""

    apart = False

    def __init__(self, configuration: DecodeConfiguration) -> None:
        super().__init__(configuration)
        self.threads = GROUP * (1 + self.groups)

    def part(self, which: int) -> tuple[Any, tuple[int, int], bool]:
        width = (self.d.head, self.d.head_v)[which]
        box = (width, self.size) if which else (self.size, width)
        return cute.composition(cute.slice_(self.layouts(1)[1 + which], (None, None, 0)), box), box, which > 0

    @cute.kernel
    def kernel(
        self, atoms: list, tensors: list, log_sums: cute.Tensor, sink: Any, caches: Caches, scale: Float32,
        cap_factor: Any, scale_output: Float32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        c = self.d
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        smem = SmemAllocator()
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in self.layouts(c.stages)
        )
        sQ = sQ[None, None, 0]
        rings = self.rings(smem, GROUP // WARP)
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                cpasync.prefetch_descriptor(atoms[i])
        p = self.problem(caches, *self.tile(caches))
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            if warp_index == 0:
                self.fetch(atoms, tensors, sK, sV, rings, p)
        else:
            cute.arch.setmaxregister_increase(many)
            part = self.prepare(sQ, sK, sV, rings, scale, cap_factor, group - 1, thread - GROUP * group)
            rows = cute.local_tile(sQ, (ROWS, c.head), (part.group, 0))
            self.load_queries(tensors[2], rows, p, part.group * ROWS, part.thread)
            cute.arch.sync_warp()
            self.release(rings.q_full + part.group)
            self.take_turns(part.group, True)
            self.put(part, p, self.attend(part, p, sink, scale_output, Int32(0), Int32(0)), tensors[3], log_sums)
            self.take_turns(part.group, False)

    name(kernel, "cudnn_attention_decode_sm90")

    @cute.jit
    def fetch(
        self, atoms: list, tensors: list, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, p: CachedProblem
    ) -> None:  # fmt: skip
        """One warp: fetches K and V."""
        c = self.d
        begin, _, _, end = self.blocks(p)
        for step in cutlass.range(end - begin + 1, unroll=1):
            if step < end - begin:
                self.fetch_block(atoms, tensors, sK, rings.k_full, rings.k_empty, p, 0, step, end - 1 - step, c.head)
            if step > 0:
                self.fetch_block(atoms, tensors, sV, rings.v_full, rings.v_empty, p, 1, step - 1, end - step, c.head_v)

    def fetch_block(
        self, atoms: list, tensors: list, buffers: cute.Tensor, full: Any, empty: Any, p: CachedProblem, which: int,
        step: Int32, n: Int32, width: int,
    ) -> None:  # fmt: skip
        """Waits for a buffer, and starts the copies of a block of K or V."""
        stage = self.expect(full, empty, step, width)
        self.fetch_keys(atoms[which], tensors[which], buffers[None, None, stage], full + stage, p, which, n)

    @cute.jit
    def put(
        self, part: Part, p: CachedProblem, ends: cute.Tensor, parts: cute.Tensor, log_sums: cute.Tensor
    ) -> None:  # fmt: skip
        """What a warpgroup's rows have of the CTA's keys."""
        _, split, _ = cute.arch.block_idx()
        pair = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            row = p.row + part.group * ROWS + self.score_rows.row(part.thread, slot)
            if row < p.mask.queries:
                query, head = row // p.mask.share, p.head + row % p.mask.share
                if part.thread % 4 == 0:
                    log_sums[query, head, p.batch, split] = ends[slot]
                order = self.score_rows.order(self.d.head_v, slot)
                for place in cutlass.range_constexpr(0, len(order), 2):
                    pair[0], pair[1] = part.acc[order[place]], part.acc[order[place + 1]]
                    column = self.score_rows.column(part.thread, place)
                    out = cute.local_tile(parts[None, query, head, p.batch, split], (2,), (column // 2,))
                    cute.autovec_copy(pair, out)
