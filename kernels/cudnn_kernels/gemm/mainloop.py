"""What the GEMM kernels of all architectures share: from a call's arguments to the launch of the kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32, Uint8
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.epilogue.operation import Epilogue, EpilogueParams, Tile
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.gemm.gather import INDEX_BYTES, gathered_view
from cudnn_kernels.gemm.scale_factors import OperandScales, ScaleFactorPipeline
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.shared_memory import num_stages
from cudnn_kernels.pipeline.tma import ptr_array_view, ragged_view
from cudnn_kernels.pipeline.workspace import workspace_pointers
from cudnn_kernels.schedule.tile_maps import WorkTileInfo, tile_map
from cudnn_kernels.schedule.tile_scheduler import TileScheduler


class Mainloop(Kernel, ABC):
    """A GEMM for one configuration. ``tile_m`` rows are a CTA's, ``threads`` are those of a CTA."""

    promotes_k_groups: ClassVar[bool]  # whether one scale factor may span several k tiles
    epilogue_barrier: ClassVar[int]  # named barrier of the first group of epilogue threads
    overhead: int  # bytes of shared memory for mbarriers, alignment, and the scheduler's payload
    kernel: Any
    threads: int
    epilogue: Epilogue
    scheduler: TileScheduler
    scale_pipeline: ScaleFactorPipeline

    def __init__(self, configuration: GemmConfiguration, tile_m: int) -> None:
        super().__init__(configuration)
        c = configuration
        self.cta_tile_m = tile_m
        self.tile_map = tile_map(c.schedule, tile_m * c.cluster[0], c.tile[1] * c.cluster[1])
        self.operand_scales = self.accumulator_scales()

    def launch(self, arguments: Mapping[str, Any]) -> None:
        cm, cn = self.c.cluster
        regions = [region for region in self.c.regions if region.name not in arguments]  # not yet allocated by a caller
        arguments = {**arguments, **workspace_pointers(self.c.slots(), arguments, regions)}
        operands = {name: self.operand(name, arguments) for name in "ab"}
        gathered = tuple(
            (self.gather_source(arguments[x]), arguments[getattr(self.c, x).index]) for x in self.c.gathers
        )
        a, b = operands.values()
        arguments |= {"m": a.shape[0], "n": arguments["n"] if self.c.b.halves else b.shape[0]}
        scheduled = self.tile_map.prepare(a, arguments["n"], arguments)
        parameters = self.epilogue.prepare(arguments)
        clusters = self.tile_map.clusters(scheduled, arguments["num_sms"] // (cm * cn))
        scales = ScaleFactorPipeline.arguments(arguments, self.operand_scales, self.c.a.index)
        if self.c.dynamic_scheduler:
            semaphore = self.reset_tile_counter(arguments["tile_count_semaphore"], arguments["stream"])
            scheduled = (*scheduled, semaphore)
        tma = self.tma_arguments({**arguments, **operands})
        self.kernel(*tma, gathered, scales, scheduled, parameters).launch(
            grid=[cm, cn, clusters],
            block=[self.threads, 1, 1],
            cluster=[cm, cn, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )
        self.epilogue.launch_follow_up(arguments)

    def operand(self, name: str, arguments: Mapping[str, Any]) -> cute.Tensor:
        """A or B as the GEMM sees it: a ptr-array, gathered, or ragged along k; unpacked elements of packed types."""
        operand, tensor = getattr(self.c, name), arguments.get(name)
        if operand.pointers:
            element = Uint8 if operand.packed > 1 else DTYPES[operand.dtype]
            n, k = arguments["n"], arguments["a"].shape[1]
            if operand.halves:
                n, k = (n // 2, k) if self.c.concat_glu else (n, k // 2)
            tensor = ptr_array_view(element, n, k, operand.major == "k", arguments["b_ptrs"])
        if operand.index:
            return gathered_view(tensor, arguments[operand.index], self.tile_map.ragged_k)
        tensor = ragged_view(tensor, 1) if self.tile_map.ragged_k else tensor
        return cute.recast_tensor(tensor, DTYPES[operand.dtype]) if operand.packed > 1 else tensor

    def gather_source(self, tensor: cute.Tensor) -> Any:
        """What the gather producer reads: the tensor, or its TMA atom and view."""
        return tensor

    @abstractmethod
    def tma_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The kernel's first arguments: TMA atoms and coordinate tensors, pointer arrays and tiled MMAs."""

    def accumulator_scales(self) -> tuple[OperandScales, ...]:
        """SFA and SFB in fp32, if accumulators are scaled.

        Raises:
            ValueError: k tiles that do not divide a scale factor's block, or that may end inside a group.
        """
        c, tile_k = self.c, self.c.tile[2]
        if not c.scales_accumulator:
            return ()
        fits = c.a.scale.vector % tile_k == 0 and (self.promotes_k_groups or c.a.scale.vector == tile_k)
        if not fits or c.pingpong or self.tile_map.ragged_k:
            raise ValueError(
                f"{c}: fp32 scale factors need accumulators of {c.a.scale.vector} along k, of a shared tile, whose k "
                "range is a group's blocks, if groups are ranges of k"
            )
        return (
            OperandScales(c.a.scale, self.cta_tile_m, gathered=bool(c.a.index)),
            OperandScales(c.b.scale, c.tile[1], c.concat_glu),
        )

    def epilogue_of(self, **params: Any) -> Epilogue:
        """The epilogue; ``params`` are the architecture's fields of :class:`EpilogueParams`."""
        c = self.c
        return Epilogue(
            c.epilogue,
            EpilogueParams(
                width=c.epi_tile_n,
                tile_columns=c.tile[1],
                stages=c.epi_stages,
                ragged_m=self.tile_map.ragged_m,
                offsets=self.tile_map.row_offsets,
                **params,
            ),
        )

    @abstractmethod
    def stage_bytes(self) -> int:
        """Bytes of a stage in one CTA: the operands' tiles, and the scale factors that share it."""

    def stages(self) -> int:
        """The number of operand stages that fit next to the epilogue's shared memory."""
        gathered_lines = self.c.tile[2] if self.tile_map.ragged_k else self.cta_tile_m
        indices = len(self.c.gathers) * INDEX_BYTES * gathered_lines
        used = self.epilogue.bytes() + indices
        return num_stages(used, self.stage_bytes(), self.overhead)

    def init_barriers(self, atoms: list) -> None:
        """One thread, before the cluster synchronizes: initializes mbarriers and prefetches TMA descriptors."""
        for component in (self.scheduler, self.epilogue):
            component.init_barriers()
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)

    def tile_origin(self, work: Any) -> tuple[Int32, Int32]:
        """This CTA's first row and column of a cluster's tile."""
        m, n, _ = cute.arch.block_idx()
        column = self.column(work, (m, n))
        return self.row(work, (m, n)), column * self.c.tile[1]

    def row(self, work: Any, cta_coord: Any) -> Int32:
        """The first row of the CTA with a coordinate in the cluster."""
        m = cta_coord[0] * (2 - work.valid) if self.c.schedule.split_tail_n else cta_coord[0]
        return work.row + m * self.cta_tile_m

    def column(self, work: Any, cta_coord: Any) -> Int32:
        """The CTA's tile index along n."""
        column = work.column * self.c.cluster[1] + cta_coord[1]
        return column + cta_coord[0] * (work.valid - 1) if self.c.schedule.split_tail_n else column

    def epilogue_barrier_all(self) -> None:
        """Synchronizes all warpgroups of the epilogue, which share a tile."""
        count = self.epilogue.params.num_warpgroups
        barriers.sync(self.epilogue_barrier + count, self.epilogue.params.threads * count)

    def tile(
        self, work: WorkTileInfo, cta_coord: Any, wg_in_tile: Any, iteration: Int32, thread: Int32, wg_idx: Any
    ) -> Tile:
        """The epilogue's view of a work tile, for the warpgroup ``wg_in_tile`` of those that share the CTA's tile."""
        return Tile(
            row=self.row(work, cta_coord) + wg_in_tile * self.epilogue.params.rows,
            start=work.start,
            end=work.end,
            column=self.column(work, cta_coord),
            n=self.scheduler.problem().n,
            batch=self.tile_map.batch_coords(work.group)[2],
            expert=work.group,
            iteration=iteration,
            thread=thread,
            wg_idx=Int32(wg_idx),
            barrier=lambda: barriers.sync(self.epilogue_barrier + wg_idx, self.epilogue.params.threads),
            barrier_all=self.epilogue_barrier_all,
        )
