"""A small SM100 GEMM for the emulator's tests: TMA, tcgen05.mma with one or two CTAs, tcgen05.ld. C = A B^T."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import cute, memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

STAGES = 2
THREADS = 128


class BlackwellGemm:
    def __init__(self, tile: tuple[int, int] = (128, 128), pair: bool = False, majors: str = "kk") -> None:
        self.tile, self.pair = tile, pair
        self.majors = [OperandMajorMode.K if m == "k" else OperandMajorMode.MN for m in majors]
        self.group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
        self.types = (a.element_type, b.element_type, c.element_type)
        integer = cutlass.const_expr(a.element_type == cutlass.Int8)
        self.accumulator = cutlass.Int32 if integer else cutlass.Float32
        mma = sm100.make_trivial_tiled_mma(
            a.element_type,
            b.element_type,
            *self.majors,
            self.accumulator,
            self.group,
            self.tile,
        )
        self.tile_k = 4 * 256 // a.element_type.width
        tile = (*self.tile, self.tile_k)
        layout_a = sm100.make_smem_layout_a(mma, tile, a.element_type, STAGES)
        layout_b = sm100.make_smem_layout_b(mma, tile, b.element_type, STAGES)
        cluster = cute.tiled_divide(cute.make_layout((2 if self.pair else 1, 1, 1)), (mma.thr_id.shape,))
        load = cpasync.CopyBulkTensorTileG2SOp(self.group)
        atom_a, tensor_a = cute.nvgpu.make_tiled_tma_atom_A(
            load, a, cute.select(layout_a, mode=[0, 1, 2]), tile, mma, cluster.shape
        )
        atom_b, tensor_b = cute.nvgpu.make_tiled_tma_atom_B(
            load, b, cute.select(layout_b, mode=[0, 1, 2]), tile, mma, cluster.shape
        )
        pairs = 2 if self.pair else 1
        grid = (cute.ceil_div(c.shape[0], tile[0]) * pairs, cute.ceil_div(c.shape[1], tile[1]), 1)
        self.kernel(mma, atom_a, tensor_a, atom_b, tensor_b, c, layout_a, layout_b).launch(
            grid=grid, block=(THREADS, 1, 1), cluster=(pairs, 1, 1)
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        mA: cute.Tensor,
        atom_b: cute.CopyAtom,
        mB: cute.Tensor,
        mC: cute.Tensor,
        layout_a: Any,
        layout_b: Any,
    ) -> None:
        tile, pairs = (*self.tile, self.tile_k), 2 if self.pair else 1
        tidx, _, _ = cute.arch.thread_idx()
        bidx, bidy, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        peer = bidx % pairs
        leader = peer == 0

        smem = memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES + 2)
        dealloc = smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(cutlass.Int32, 1)
        sA = smem.allocate_tensor(self.types[0], layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
        sB = smem.allocate_tensor(self.types[1], layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
        bytes_ = pairs * sum(
            cute.size_in_bytes(t, cute.select(x, mode=[0, 1, 2]))
            for t, x in ((self.types[0], layout_a), (self.types[1], layout_b))
        )
        cluster = cute.tiled_divide(cute.make_layout((pairs, 1, 1)), (mma.thr_id.shape,))
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        producer, consumer = pipeline.PipelineTmaUmma.create(
            num_stages=STAGES,
            producer_group=one,
            consumer_group=one,
            tx_count=bytes_,
            barrier_storage=barriers,
            cta_layout_vmnk=cluster,
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one,
            barrier_storage=barriers + 2 * STAGES,
            cta_layout_vmnk=cluster,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS * pairs),
        ).make_participants()
        tmem = memory.TmemAllocator(
            holder,
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            is_two_cta=self.pair,
            two_cta_tmem_dealloc_mbar_ptr=dealloc,
        )
        columns = 256
        tmem.allocate(columns)

        place = (bidx // pairs, bidy, None)
        gA = cute.local_tile(mA, tile, place, proj=(1, None, 1))
        gB = cute.local_tile(mB, tile, place, proj=(None, 1, 1))
        gC = cute.local_tile(mC, tile, place, proj=(1, 1, None))
        part = mma.get_slice(peer)
        tCgA, tCgB, tCgC = part.partition_A(gA), part.partition_B(gB), part.partition_C(gC)
        tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        unit = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(atom_a, 0, unit, cute.group_modes(sA, 0, 3), cute.group_modes(tCgA, 0, 3))
        tBsB, tBgB = cpasync.tma_partition(atom_b, 0, unit, cute.group_modes(sB, 0, 3), cute.group_modes(tCgB, 0, 3))

        tmem.wait_for_alloc()
        pointer = tmem.retrieve_ptr(self.accumulator)
        fragment = mma.make_fragment_C(mma.partition_shape_C(tile[:2]))
        acc = cute.make_tensor(pointer, fragment.layout)
        k_tiles = cute.size(gA, mode=[2])
        if warp == 0:
            for _ in cutlass.range(k_tiles, unroll=1):
                free = producer.acquire_and_advance()
                cute.copy(atom_a, tAgA[None, free.count], tAsA[None, free.index], tma_bar_ptr=free.barrier)
                cute.copy(atom_b, tBgB[None, free.count], tBsB[None, free.index], tma_bar_ptr=free.barrier)
            producer.tail()
        if warp == 1 and leader:
            done = acc_producer.acquire_and_advance()
            for _ in cutlass.range(k_tiles, unroll=1):
                full = consumer.wait_and_advance()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    which = (None, None, block, full.index)
                    cute.gemm(mma, acc, tCrA[which], tCrB[which], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                full.release()
            done.commit()

        tmem.relinquish_alloc_permit()
        ready = acc_consumer.wait_and_advance()
        self.store(acc, tCgC, tidx)
        ready.release()
        cute.arch.barrier(barrier_id=2, number_of_threads=THREADS)
        tmem.free(pointer)

    @cute.jit
    def store(self, acc: cute.Tensor, tCgC: cute.Tensor, tidx: cutlass.Int32) -> None:
        rows, columns = cute.size(acc, mode=[0, 0]), 32
        if cutlass.const_expr(self.pair and rows == 64):  # the right half of the columns lies in lanes 64 and up
            columns = cute.size(acc, mode=[0, 1])
        epilogue = ((rows, columns),)
        tAcc, gAcc = cute.zipped_divide(acc, epilogue), cute.zipped_divide(tCgC, epilogue)
        op: Any = tcgen05.Ld32x32bOp(tcgen05.Repetition.x32)
        if cutlass.const_expr(rows == 64 and not self.pair):
            op = tcgen05.Ld16x256bOp(tcgen05.Repetition.x4)
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, self.accumulator), tAcc[None, 0])
        mine = copy.get_slice(tidx)
        source, target = mine.partition_S(tAcc), mine.partition_D(gAcc)
        values = cute.make_rmem_tensor(target[None, None, 0].shape, self.accumulator)
        out = cute.make_rmem_tensor(target[None, None, 0].shape, self.types[2])
        for i in cutlass.range(cute.size(source, mode=[2]), unroll=1):
            cute.copy(copy, source[None, None, i], values)
            cute.arch.fence_view_async_tmem_load()
            out.store(values.load().to(self.types[2]))
            cute.autovec_copy(out, target[None, None, i])
