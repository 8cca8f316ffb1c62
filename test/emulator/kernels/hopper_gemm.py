"""A small SM90 GEMM for the emulator's tests: TMA, multicast, wgmma, stmatrix, TMA store. C = A B^T."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import cute, memory, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

STAGES = 3
CONSUMERS = 128  # one warpgroup; a fifth warp loads


class HopperGemm:
    def __init__(self, tile: tuple[int, int, int] = (64, 128, 64), cluster_m: int = 1, majors: str = "kk") -> None:
        self.tile, self.cluster_m = tile, cluster_m
        self.layout_a, self.layout_b = ((LayoutEnum.ROW_MAJOR if m == "k" else LayoutEnum.COL_MAJOR)
                                        for m in majors)  # fmt: skip

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor) -> None:
        tile = self.tile
        self.types = (a.element_type, b.element_type, c.element_type)
        mma = sm90.make_trivial_tiled_mma(
            a.element_type, b.element_type, self.layout_a.sm90_mma_major_mode(), self.layout_b.sm90_mma_major_mode(),
            cutlass.Int32 if cutlass.const_expr(a.element_type == cutlass.Int8) else cutlass.Float32, (1, 1, 1),
            (64, tile[1]),
        )  # fmt: skip
        layout_a = sm90.make_smem_layout_a(self.layout_a, tile, a.element_type, STAGES)
        layout_b = sm90.make_smem_layout_b(self.layout_b, tile, b.element_type, STAGES)
        layout_c = sm90.make_smem_layout_epi(c.element_type, LayoutEnum.ROW_MAJOR, tile[:2], 1)
        stage_a, stage_b = (cute.slice_(x, (None, None, 0)) for x in (layout_a, layout_b))
        load, multicast = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileG2SMulticastOp()
        atom_a, tensor_a = cpasync.make_tiled_tma_atom(load, a, stage_a, (tile[0], tile[2]))
        atom_b, tensor_b = cpasync.make_tiled_tma_atom(
            multicast if cutlass.const_expr(self.cluster_m > 1) else load, b, stage_b, (tile[1], tile[2]),
            num_multicast=self.cluster_m,
        )  # fmt: skip
        atom_c, tensor_c = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), c, cute.slice_(layout_c, (None, None, 0)), tile[:2]
        )
        grid = (cute.ceil_div(c.shape[0], tile[0]), cute.ceil_div(c.shape[1], tile[1]), 1)
        self.kernel(mma, atom_a, tensor_a, atom_b, tensor_b, atom_c, tensor_c, layout_a, layout_b, layout_c).launch(
            grid=grid, block=(CONSUMERS + 32, 1, 1), cluster=(self.cluster_m, 1, 1)
        )

    @cute.kernel
    def kernel(
        self, mma: cute.TiledMma, atom_a: cute.CopyAtom, mA: cute.Tensor, atom_b: cute.CopyAtom, mB: cute.Tensor,
        atom_c: cute.CopyAtom, mC: cute.Tensor, layout_a: Any, layout_b: Any, layout_c: Any,
    ) -> None:  # fmt: skip
        tile = self.tile
        tidx, _, _ = cute.arch.thread_idx()
        bidx, bidy, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = memory.SmemAllocator()
        barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES)
        layouts = (layout_a, layout_b, layout_c)
        sA, sB, sC = (smem.allocate_tensor(t, x.outer, byte_alignment=1024, swizzle=x.inner)
                      for t, x in zip(self.types, layouts, strict=True))  # fmt: skip
        bytes_ = sum(cute.size_in_bytes(t, cute.slice_(x, (None, None, 0)))
                     for t, x in zip(self.types[:2], layouts[:2], strict=True))  # fmt: skip
        producer, consumer = pipeline.PipelineTmaAsync.create(
            num_stages=STAGES, barrier_storage=barriers, tx_count=bytes_,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMERS // 32 * self.cluster_m),
            cta_layout_vmnk=cute.make_layout((1, self.cluster_m, 1, 1)),
        ).make_participants()  # fmt: skip

        gA = cute.local_tile(mA, (tile[0], tile[2]), (bidx, None))
        gB = cute.local_tile(mB, (tile[1], tile[2]), (bidy, None))
        gC = cute.local_tile(mC, tile[:2], (bidx, bidy))
        one = cute.make_layout(1)
        tAsA, tAgA = cpasync.tma_partition(atom_a, 0, one, cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2))
        tBsB, tBgB = cpasync.tma_partition(
            atom_b, rank, cute.make_layout(self.cluster_m), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        tCsC, tCgC = cpasync.tma_partition(
            atom_c, 0, one, cute.group_modes(sC[None, None, 0], 0, 2), cute.group_modes(gC, 0, 2)
        )
        k_tiles = cute.size(gA, mode=[2])
        if warp == CONSUMERS // 32:
            for _ in cutlass.range(k_tiles, unroll=1):
                free = producer.acquire_and_advance()
                cute.copy(atom_a, tAgA[None, free.count], tAsA[None, free.index], tma_bar_ptr=free.barrier)
                everyone = cutlass.Int16((1 << self.cluster_m) - 1)
                cute.copy(atom_b, tBgB[None, free.count], tBsB[None, free.index], tma_bar_ptr=free.barrier,
                          mcast_mask=everyone if cutlass.const_expr(self.cluster_m > 1) else None)  # fmt: skip
            producer.tail()
        else:
            part = mma.get_slice(tidx)
            tCrA, tCrB = mma.make_fragment_A(part.partition_A(sA)), mma.make_fragment_B(part.partition_B(sB))
            acc = cute.make_rmem_tensor(part.partition_shape_C(tile[:2]), mma.op.acc_dtype)
            mma.set(warpgroup.Field.ACCUMULATE, False)
            for _ in cutlass.range(k_tiles, unroll=1):
                full = consumer.wait_and_advance()
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    place = (None, None, block, full.index)
                    cute.gemm(mma, acc, tCrA[place], tCrB[place], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                full.release()
            self.store(mma, acc, sC, tCsC, tCgC, atom_c, tidx, warp)

    @cute.jit
    def store(
        self, mma: cute.TiledMma, acc: cute.Tensor, sC: cute.Tensor, tCsC: cute.Tensor, tCgC: cute.Tensor,
        atom_c: cute.CopyAtom, tidx: cutlass.Int32, warp: cutlass.Int32,
    ) -> None:  # fmt: skip
        if cutlass.const_expr(sC.element_type.width == 16):
            op: Any = cute.nvgpu.warp.StMatrix8x8x16bOp(False, 4)
        else:
            op = cute.nvgpu.CopyUniversalOp()
        atom = cute.make_copy_atom(op, sC.element_type)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(tidx)
        out = cute.make_rmem_tensor(acc.layout, sC.element_type)
        out.store(acc.load().to(sC.element_type))
        cute.copy(atom, copy.retile(out), copy.partition_D(sC[None, None, 0]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1, number_of_threads=CONSUMERS)
        if warp == 0:
            cute.copy(atom_c, tCsC, tCgC)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
