"""A block-scaled SM100 GEMM for the emulator's tests: C = (A * SFA) (B * SFB)^T, one CTA a tile, one stage.

Kinds: mxf8f6f4 (fp8 with ue8m0 factors for 32 elements), mxf4 and mxf4nvf4 (fp4, factors for 32 or 16 elements).
Factors lie in the layout that cuBLAS and CuTe share: 128 x 4 blocks, row r % 32 first, then r / 32, then the column.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import cute, memory, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from emulator.kernels.blackwell_gemm import THREADS, BlackwellGemm

STAGES = 2


class BlockScaledGemm(BlackwellGemm):
    def __init__(self, element: Any, scale: Any, vector: int, tile: tuple[int, int] = (128, 128)) -> None:
        super().__init__(tile)
        self.element, self.scale, self.vector = element, scale, vector

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, sfa: cute.Pointer, sfb: cute.Pointer, c: cute.Pointer,
        mnk: cutlass.Constexpr,
    ) -> None:  # fmt: skip
        m, n, k = mnk
        self.accumulator, self.types = cutlass.Float32, (self.element, self.element, cutlass.Float32)
        major = OperandMajorMode.K
        mma = sm100.make_blockscaled_trivial_tiled_mma(
            self.element, major, major, self.scale, self.vector, tcgen05.CtaGroup.ONE, self.tile
        )
        tile = (*self.tile, 4 * 256 // self.element.width)
        mA = cute.make_tensor(a, cute.make_layout((m, k, 1), stride=(k, 1, m * k)))
        mB = cute.make_tensor(b, cute.make_layout((n, k, 1), stride=(k, 1, n * k)))
        mC = cute.make_tensor(c, cute.make_layout((m, n, 1), stride=(n, 1, m * n)))
        mSFA, mSFB = (cute.make_tensor(p, blockscaled.tile_atom_to_shape_SF(t.shape, self.vector))
                      for p, t in ((sfa, mA), (sfb, mB)))  # fmt: skip
        layouts = (
            sm100.make_smem_layout_a(mma, tile, self.element, STAGES),
            sm100.make_smem_layout_b(mma, tile, self.element, STAGES),
            blockscaled.make_smem_layout_sfa(mma, tile, self.vector, STAGES),
            blockscaled.make_smem_layout_sfb(mma, tile, self.vector, STAGES),
        )
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape
        atoms, tensors = [], []
        for number, tensor in enumerate((mA, mB, mSFA, mSFB)):
            make = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)[number % 2]
            one = cute.slice_(layouts[number], (None, None, None, 0))
            atom, view = make(load, tensor, one, tile, mma, cluster,
                              internal_type=cutlass.Int16 if cutlass.const_expr(number > 1) else None)  # fmt: skip
            atoms.append(atom)
            tensors.append(view)
        self.mma_tile = tile
        self.kernel(mma, atoms, tensors, mC, layouts).launch(
            grid=(m // tile[0], n // tile[1], 1), block=(THREADS, 1, 1), cluster=(1, 1, 1)
        )

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, atoms: list, tensors: list, mC: cute.Tensor, layouts: tuple) -> None:
        tile, types = self.mma_tile, (self.element, self.element, self.scale, self.scale)
        tidx, _, _ = cute.arch.thread_idx()
        bidx, bidy, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES + 2)
        holder = smem.allocate_array(cutlass.Int32, 1)
        shared = [
            smem.allocate_tensor(types[i], layouts[i].outer, byte_alignment=1024, swizzle=layouts[i].inner)
            if i < 2 else smem.allocate_tensor(types[i], layouts[i], byte_alignment=128) for i in range(4)
        ]  # fmt: skip
        stage = [cute.slice_(x, (None, None, None, 0)) for x in layouts]
        bytes_ = sum(cute.size_in_bytes(t, x) for t, x in zip(types, stage, strict=True))
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        producer, consumer = pipeline.PipelineTmaUmma.create(
            num_stages=STAGES, producer_group=one, consumer_group=one, tx_count=bytes_, barrier_storage=barriers
        ).make_participants()
        acc_producer, acc_consumer = pipeline.PipelineUmmaAsync.create(
            num_stages=1, producer_group=one, barrier_storage=barriers + 2 * STAGES,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS),
        ).make_participants()  # fmt: skip
        tmem = memory.TmemAllocator(
            holder, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS)
        )
        tmem.allocate(512)

        part = mma.get_slice(0)
        tS, tG = [], []
        for i in cutlass.range_constexpr(4):
            tiler = (tile[0], tile[2]) if i % 2 == 0 else (tile[1], tile[2])
            g = cute.local_tile(tensors[i], tiler, (bidx if i % 2 == 0 else bidy, None, 0))
            t = part.partition_A(g) if i % 2 == 0 else part.partition_B(g)
            s, g = cpasync.tma_partition(
                atoms[i], 0, cute.make_layout(1), cute.group_modes(shared[i], 0, 3), cute.group_modes(t, 0, 3)
            )
            tS.append(cute.filter_zeros(s) if i > 1 else s)
            tG.append(cute.filter_zeros(g) if i > 1 else g)
        gC = cute.local_tile(mC, tile[:2], (bidx, bidy, 0))
        tCgC = part.partition_C(gC)
        tCrA, tCrB = mma.make_fragment_A(shared[0]), mma.make_fragment_B(shared[1])

        tmem.wait_for_alloc()
        pointer = tmem.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C(tile[:2])).layout)
        offset = tcgen05.find_tmem_tensor_col_offset(acc)
        tSFA = cute.make_tensor(
            cute.recast_ptr(pointer + offset, dtype=self.scale),
            blockscaled.make_tmem_layout_sfa(mma, tile, self.vector, stage[2]),
        )
        offset += tcgen05.find_tmem_tensor_col_offset(tSFA)
        tSFB = cute.make_tensor(
            cute.recast_ptr(pointer + offset, dtype=self.scale),
            blockscaled.make_tmem_layout_sfb(mma, tile, self.vector, stage[3]),
        )
        to_tensor = [self.scale_copy(s, t) for s, t in ((shared[2], tSFA), (shared[3], tSFB))]

        k_tiles = cute.size(tG[0], mode=[1])
        if warp == 0:
            for _ in cutlass.range(k_tiles, unroll=1):
                free = producer.acquire_and_advance()
                for i in cutlass.range_constexpr(4):
                    cute.copy(atoms[i], tG[i][None, free.count], tS[i][None, free.index], tma_bar_ptr=free.barrier)
            producer.tail()
        if warp == 1:
            done = acc_producer.acquire_and_advance()
            for _ in cutlass.range(k_tiles, unroll=1):
                full = consumer.wait_and_advance()
                for copy, source, target in to_tensor:
                    cute.copy(copy, source[None, None, None, None, full.index], target)
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    mma.set(tcgen05.Field.SFA, tSFA[None, None, block].iterator)
                    mma.set(tcgen05.Field.SFB, tSFB[None, None, block].iterator)
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

    def scale_copy(self, source: cute.Tensor, target: cute.Tensor) -> tuple[Any, Any, Any]:
        """(copy, shared descriptors, tensor memory) of one operand's scale factors."""
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), self.scale)
        compact = cute.filter_zeros(target)
        copy = tcgen05.make_s2t_copy(atom, compact)
        mine = copy.get_slice(0)
        descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(cute.filter_zeros(source)))
        return copy, descriptors, mine.partition_D(compact)
