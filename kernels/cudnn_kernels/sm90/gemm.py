"""The GEMM mainloop of Hopper: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

A CTA has three warpgroups. One thread of the first lets the copy engine fill a ring of buffers in shared memory with
tiles of A and B; CTAs of a cluster that need the same tile fetch a share each and send it to all. The other two
warpgroups multiply with wgmma, accumulate in registers and run the epilogue. CTAs stay on their SM and take every
n-th tile of the schedule, of n clusters, so that the next tile's operands arrive during the epilogue.

Cooperative: both warpgroups share a tile, each has half of its rows. Ping-pong: each has tiles of its own; they take
turns in multiplying, so that one's epilogue is hidden behind the other's products.

e4m3 and e5m2 products are accumulated by the tensor cores with fewer bits than float32 has, so each ``k`` tile's sum
is added to float32 registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, TFloat32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.configuration import GemmConfiguration as Configuration
from cudnn_kernels.epilogue.fragment import Fragment
from cudnn_kernels.epilogue.operation import Epilogue, Plan, Tile
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name
from cudnn_kernels.shared_memory import ring_stages
from cudnn_kernels.signature import bind
from cudnn_kernels.sm90.wgmma import WgmmaRows, mma_operation

GROUP = 128  # threads of a warpgroup
CONSUMERS = 2  # warpgroups that multiply
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
TURN_BARRIER, GROUP_BARRIER = 1, 3  # first of the named barriers: one each for both warpgroups


@dataclass
class Ring:
    """The buffers' barriers, in shared memory: ``full`` by the copy engine, ``empty`` by the warps that multiplied."""

    full: cute.Pointer
    empty: cute.Pointer
    stages: int


class Gemm:
    """The kernel for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        c = self.c = configuration
        self.a_type, self.b_type = DTYPES[c.a.dtype], DTYPES[c.b.dtype]
        self.tile_m, self.tile_n, self.tile_k = c.tile
        self.cluster_size = c.cluster[0] * c.cluster[1]
        self.group_rows = self.tile_m if c.pingpong else self.tile_m // CONSUMERS
        self.layouts = tuple(
            LayoutEnum.ROW_MAJOR if operand.major == "k" else LayoutEnum.COL_MAJOR for operand in (c.a, c.b)
        )
        self.epilogue = Epilogue(c.epilogue, self.plan())

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        self.launch(bind(self.c.slots(), arguments))

    def launch(self, arguments: Mapping[str, Any]) -> None:
        """Launches the kernel on arguments by name."""
        c, a, b = self.c, arguments["a"], arguments["b"]
        cm, cn = c.cluster
        rows = self.tile_m * cm
        tiles = (cute.ceil_div(a.shape[0], rows), cute.ceil_div(b.shape[0], self.tile_n * cn))
        scheduled = c.schedule.parameters(*tiles, a.shape[2], rows, arguments)
        parameters = self.epilogue.prepare(arguments)
        clusters = cutlass.min(c.schedule.limit(scheduled), arguments["multiprocessors"] // self.cluster_size)
        a_layout, b_layout = (cute.slice_(x, (None, None, 0)) for x in self.operand_layouts(1))
        self.kernel(
            *self.descriptor(a, self.tile_m, a_layout, cn),
            *self.descriptor(b, self.tile_n, b_layout, cm),
            scheduled,
            parameters,
        ).launch(
            grid=[cm, cn, clusters],
            block=[GROUP * (1 + CONSUMERS), 1, 1],
            cluster=[cm, cn, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )

    def descriptor(self, tensor: cute.Tensor, rows: int, layout: Any, share: int) -> tuple[Any, Any]:
        """The copy engine's atom and view of an operand, for one CTA or for ``share`` of them.

        It rounds float32 to tf32, to nearest; wgmma would truncate.
        """
        op = cpasync.CopyBulkTensorTileG2SOp() if share == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        kind = TFloat32 if const_expr(tensor.element_type == Float32) else None
        return cpasync.make_tiled_tma_atom(
            op, tensor, layout, (rows, self.tile_k), num_multicast=share, internal_type=kind
        )

    def operand_layouts(self, stages: int) -> tuple[Any, Any]:
        """A's and B's rings in shared memory."""
        return (
            sm90.make_smem_layout_a(self.layouts[0], self.c.tile, self.a_type, stages),
            sm90.make_smem_layout_b(self.layouts[1], self.c.tile, self.b_type, stages),
        )

    def tiled_mma(self, width: int) -> cute.TiledMma:
        """One warpgroup's product with ``width`` columns."""
        majors = [OperandMajorMode.K if m == "k" else OperandMajorMode.MN for m in (self.c.a.major, self.c.b.major)]
        return cute.make_tiled_mma(cute.make_mma_atom(mma_operation(self.a_type, self.b_type, width, *majors)))

    def fragment(self, dtype: Any, width: int) -> cute.Tensor:
        """Registers for ``width`` columns of a warpgroup's rows, in the accumulator's order."""
        return cute.make_rmem_tensor(self.tiled_mma(width).partition_shape_C((self.group_rows, width)), dtype)

    def plan(self) -> Plan:
        """What the epilogue must know."""
        return Plan(
            rows=self.group_rows,
            width=self.c.part,
            tile_columns=self.tile_n,
            groups=CONSUMERS,
            threads=GROUP,
            stages=self.c.staged,
            layout=WgmmaRows(slots=2 * (self.group_rows // 64)),
            tiled_copy=lambda atom, width: cute.make_tiled_copy_C(atom, self.tiled_mma(width)),
            fragment=self.fragment,
        )

    def stages(self) -> int:
        """Buffers that fit beside the epilogue's."""
        return ring_stages(self.epilogue.bytes(), self.stage_bytes())

    def stage_bytes(self) -> int:
        """Bytes of a tile of A and a tile of B."""
        return (self.tile_m * self.a_type.width + self.tile_n * self.b_type.width) * self.tile_k // 8

    @cute.kernel
    def kernel(
        self,
        atom_a: cute.CopyAtom,
        mA: cute.Tensor,
        atom_b: cute.CopyAtom,
        mB: cute.Tensor,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """The roles of the warpgroups."""
        stages = self.stages()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)

        smem = SmemAllocator()
        layout_a, layout_b = self.operand_layouts(stages)
        sA = smem.allocate_tensor(self.a_type, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
        sB = smem.allocate_tensor(self.b_type, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
        full, empty = (smem.allocate_array(cutlass.Int64, stages) for _ in range(2))
        ring = Ring(full, empty, stages)
        self.epilogue.enter(parameters, smem)
        if thread == 0:
            sharers = self.c.cluster[0] + self.c.cluster[1] - 1
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(ring.full + stage, 1)
                cute.arch.mbarrier_init(ring.empty + stage, sharers * 4 * (1 if self.c.pingpong else CONSUMERS))
            self.epilogue.ready()
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
        cute.arch.mbarrier_init_fence()
        self.meet()

        if group == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(atom_a, mA, atom_b, mB, sA, sB, ring, scheduled)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(sA, sB, mA, mB, ring, scheduled, group - 1, thread - GROUP * group)
        if const_expr(self.cluster_size > 1):
            self.meet()  # a CTA's shared memory lives until no other one writes or signals there

    name(kernel, "cudnn_gemm_sm90")

    @cute.jit
    def meet(self) -> None:
        """Waits for all threads of the cluster."""
        if const_expr(self.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def place(self) -> tuple[Int32, Int32, Int32, Int32]:
        """This CTA's place in its cluster, the cluster's number, the number of clusters."""
        m, n, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        return m, n, cluster, clusters

    @cute.jit
    def produce(
        self,
        atom_a: cute.CopyAtom,
        mA: cute.Tensor,
        atom_b: cute.CopyAtom,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ring: Ring,
        scheduled: Any,
    ) -> None:
        """One warp: fills the ring with the operands of all tiles of this CTA."""
        c = self.c
        cm, cn = c.cluster
        place_m, place_n, cluster, clusters = self.place()
        gA = cute.local_tile(mA, (self.tile_m, self.tile_k), (None, None, None))
        gB = cute.local_tile(mB, (self.tile_n, self.tile_k), (None, None, None))
        tAsA, tAgA = cpasync.tma_partition(
            atom_a, place_n, cute.make_layout(cn), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )
        tBsB, tBgB = cpasync.tma_partition(
            atom_b, place_m, cute.make_layout(cm), cute.group_modes(sB, 0, 2), cute.group_modes(gB, 0, 2)
        )
        mask_a = sum(1 << (cm * j) for j in range(cn)) << place_m
        mask_b = ((1 << cm) - 1) << (cm * place_n)
        k_tiles = cute.size(gA, mode=[3])
        stage, phase = Int32(0), Int32(1)
        for index in cutlass.range(cluster, c.schedule.total(scheduled), clusters):
            work = c.schedule.find(scheduled, index)
            tA = tAgA[None, work.m * cm + place_m, None, work.a]
            tB = tBgB[None, work.n * cn + place_n, None, work.b]
            for k in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(ring.empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, self.stage_bytes())
                cute.copy(
                    atom_a, tA[None, k], tAsA[None, stage], tma_bar_ptr=ring.full + stage,
                    mcast_mask=cutlass.Int16(mask_a) if const_expr(cn > 1) else None,
                )  # fmt: skip
                cute.copy(
                    atom_b, tB[None, k], tBsB[None, stage], tma_bar_ptr=ring.full + stage,
                    mcast_mask=cutlass.Int16(mask_b) if const_expr(cm > 1) else None,
                )  # fmt: skip
                stage, phase = advanced(ring, stage, phase)

    @cute.jit
    def consume(
        self,
        sA: cute.Tensor,
        sB: cute.Tensor,
        mA: cute.Tensor,
        mB: cute.Tensor,
        ring: Ring,
        scheduled: Any,
        group: Int32,
        thread: Int32,
    ) -> None:
        """A warpgroup: multiplies, then runs the epilogue, for each of its tiles."""
        c = self.c
        cm, cn = c.cluster
        place_m, place_n, cluster, clusters = self.place()
        mma = self.tiled_mma(self.tile_n)
        part = mma.get_slice(thread)
        share = const_expr(0) if const_expr(c.pingpong) else group
        sA_group = cute.local_tile(sA, (self.group_rows, self.tile_k), (share, 0, None))
        tCrA = mma.make_fragment_A(part.partition_A(sA_group))
        tCrB = mma.make_fragment_B(part.partition_B(sB))
        acc = self.fragment(Float32, self.tile_n)
        k_tiles = cute.ceil_div(cute.size(mA, mode=[1]), self.tile_k)
        turns = 2 if c.pingpong else 1
        total = c.schedule.total(scheduled)
        first = cluster + group * clusters if const_expr(c.pingpong) else cluster
        position = group * k_tiles if const_expr(c.pingpong) else Int32(0)  # in the ring, of the next tile's operands
        count = Int32(0)
        if const_expr(c.pingpong):
            if group == 1:
                self.give_turn(group)
        for index in cutlass.range(first, total, clusters * turns):
            work = c.schedule.find(scheduled, index)
            m_tile = work.m * cm + place_m
            tile = Tile(
                row=m_tile if const_expr(c.pingpong) else m_tile * CONSUMERS + group,
                column=work.n * cn + place_n,
                m=cute.size(mA, mode=[0]),
                n=cute.size(mB, mode=[0]),
                batch=work.d,
                expert=work.expert,
                count=count,
                thread=thread,
                group=group,
                barrier=lambda: self.group_barrier(group),
            )
            self.epilogue.begin(tile)
            if const_expr(c.pingpong):
                self.take_turn(group)
            self.multiply(mma, acc, tCrA, tCrB, ring, position, k_tiles)
            if const_expr(c.pingpong):
                if index + clusters < total:
                    self.give_turn(group)
            self.finish(acc, tile)
            position += k_tiles * turns
            count += 1
        self.epilogue.drain(thread)

    @cute.jit
    def take_turn(self, group: Int32) -> None:
        """Waits until the other warpgroup has issued its products."""
        cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=CONSUMERS * GROUP)

    @cute.jit
    def give_turn(self, group: Int32) -> None:
        """Lets the other warpgroup multiply."""
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=CONSUMERS * GROUP)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        ring: Ring,
        position: Int32,
        k_tiles: Int32,
    ) -> None:
        """The products of a tile. One k tile's are in flight while the next one's are issued.

        With ``promote``, the sum of so many k tiles is added to float32 registers; meanwhile the other warpgroup
        multiplies.
        """
        promote = const_expr(self.c.promote)
        stage, phase = position % ring.stages, position // ring.stages % 2
        last = stage
        sums = acc
        if const_expr(promote):
            acc.fill(0.0)
            sums = self.fragment(Float32, self.tile_n)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            if const_expr(promote):
                mma.set(warpgroup.Field.ACCUMULATE, k % promote != 0)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, sums, tCrA[None, None, block, stage], tCrB[None, None, block, stage], sums)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if const_expr(promote):
                warpgroup.wait_group(0)
                self.release(ring.empty + stage)
                if k % promote == promote - 1 or k == k_tiles - 1:
                    acc.store(acc.load() + sums.load())
            else:
                warpgroup.wait_group(1)
                if k > 0:
                    self.release(ring.empty + last)
                last = stage
            stage, phase = advanced(ring, stage, phase)
        if const_expr(not promote):
            warpgroup.wait_group(0)
            self.release(ring.empty + last)

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        """A warp is done with a buffer: says so to all CTAs that write it."""
        lane = cute.arch.lane_idx()
        if const_expr(self.cluster_size == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(empty)
        else:
            cm, _ = self.c.cluster
            m, n, _, _ = self.place()
            if lane < self.cluster_size:
                if lane % cm == m or lane // cm == n:
                    cute.arch.mbarrier_arrive(empty, lane)

    def finish(self, acc: cute.Tensor, tile: Tile) -> None:
        """The epilogue of a tile, part by part."""
        plan = self.epilogue.plan
        half = plan.width // 2  # values of a part, for each 64 rows
        self.epilogue.clear(tile, 0, Fragment(acc, self.tile_n, plan.layout))
        for part in range(plan.parts):
            values = self.fragment(Float32, plan.width)
            for atom in range(self.group_rows // 64):
                for i in range(half):
                    values[i + atom * half] = acc[i + part * half + atom * (self.tile_n // 2)]
            fragment = Fragment(values, plan.width, plan.layout)
            self.epilogue.run(tile, part, fragment)
        self.epilogue.end(tile)

    def group_barrier(self, group: Int32) -> None:
        """Waits for the warpgroup."""
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP)


@cute.jit
def advanced(ring: Ring, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The buffer after this one, and the phase of its barriers."""
    stage += 1
    if stage == ring.stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase
