"""What the GEMM mainloops of all architectures share: from a call's arguments to the kernel's launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32, Uint8
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.epilogue.operation import Epilogue, Plan, Tile
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.copy import ending, matrices
from cudnn_kernels.pipeline.factors import Factors, Side
from cudnn_kernels.pipeline.gather import ENTRY, selected
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.schedule.feed import Feed
from cudnn_kernels.schedule.tiles import Work, tiles_of
from cudnn_kernels.shared_memory import ring_stages


class Mainloop(Kernel, ABC):
    """A GEMM for one configuration. ``rows`` are those of a CTA's own tile, ``threads`` those of a CTA."""

    splits_sums: ClassVar[bool]  # whether what has one factor may be several k tiles
    group_barrier: ClassVar[int]  # of the first group of the epilogue
    overhead: ClassVar[int]  # bytes of shared memory that suffice for barriers, gaps, and what warps tell each other
    kernel: Any
    threads: int
    epilogue: Epilogue
    feed: Feed
    factor_ring: Factors

    def __init__(self, configuration: GemmConfiguration, rows: int) -> None:
        super().__init__(configuration)
        c = configuration
        self.rows = rows
        self.tiles = tiles_of(c.schedule, rows * c.cluster[0], c.tile[1] * c.cluster[1])
        self.sides = self.factor_sides()

    def launch(self, given: Mapping[str, Any]) -> None:
        cm, cn = self.c.cluster
        own = [region for region in self.c.regions if region.name not in given]  # else whoever launches divides it
        arguments = {**given, **divided(self.c.slots(), given, own)}
        operands = {name: self.operand(name, arguments) for name in "ab"}
        gathered = tuple((self.lines(arguments[x]), arguments[getattr(self.c, x).index]) for x in self.c.gathers)
        a, b = operands.values()
        arguments |= {"m": a.shape[0], "n": b.shape[0]}
        scheduled = self.tiles.prepare(a, b, arguments)
        parameters = self.epilogue.prepare(arguments)
        clusters = self.tiles.clusters(scheduled, arguments["multiprocessors"] // (cm * cn))
        factors = Factors.arguments(arguments, self.sides, self.c.a.index)
        if self.c.draws:
            scheduled = (*scheduled, self.begin_drawing(arguments["drawn"], arguments["stream"]))
        self.kernel(*self.described({**arguments, **operands}), gathered, factors, scheduled, parameters).launch(
            grid=[cm, cn, clusters],
            block=[self.threads, 1, 1],
            cluster=[cm, cn, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )
        self.epilogue.follow(arguments)

    def operand(self, name: str, arguments: Mapping[str, Any]) -> cute.Tensor:
        """A or B as the product has it: at any address, with as many lines as have numbers, or ending where experts do;
        its elements, where they are packed.
        """
        operand, tensor = getattr(self.c, name), arguments.get(name)
        if operand.pointers:
            element = Uint8 if operand.packed > 1 else DTYPES[operand.dtype]
            k = arguments["a"].shape[1]
            tensor = matrices(element, arguments["n"], k, operand.major == "k", arguments["b_ptrs"])
        if operand.index:
            return selected(tensor, arguments[operand.index], self.tiles.clips_k)
        tensor = ending(tensor, 1) if self.tiles.clips_k else tensor
        return cute.recast_tensor(tensor, DTYPES[operand.dtype]) if operand.packed > 1 else tensor

    def lines(self, tensor: cute.Tensor) -> Any:
        """What brings lines by their numbers takes: the tensor, or the copy engine's view of it."""
        return tensor

    @abstractmethod
    def described(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """The kernel's first arguments: what the copy engine brings, and how the tensor cores take it."""

    def factor_sides(self) -> tuple[Side, ...]:
        """The factors of sums, of A and of B, where the operands have such.

        Raises:
            ValueError: k tiles that are no share of what has a factor, or that end where experts do.
        """
        c, depth = self.c, self.c.tile[2]
        if not c.scales_sums:
            return ()
        fits = c.a.scale.vector % depth == 0 and (self.splits_sums or c.a.scale.vector == depth)
        if not fits or c.pingpong or self.tiles.clips_k:
            raise ValueError(f"{c}: factors of sums need sums of {c.a.scale.vector}, of a shared tile")
        return Side(c.a.scale, self.rows, numbered=bool(c.a.index)), Side(c.b.scale, c.tile[1], c.halves)

    def epilogue_of(self, **own: Any) -> Epilogue:
        """The epilogue; ``own`` is what the architecture's plan says of threads and accumulators."""
        c, tiles = self.c, self.tiles
        plan = Plan(
            width=c.part,
            tile_columns=c.tile[1],
            stages=c.staged,
            clips_rows=tiles.clips_rows,
            offsets=tiles.row_offsets,
            **own,
        )
        return Epilogue(c.epilogue, plan)

    @abstractmethod
    def stage_bytes(self) -> int:
        """Bytes of the operands' tiles in one CTA."""

    def stages(self) -> int:
        """Buffers that fit beside the epilogue's."""
        numbers = len(self.c.gathers) * ENTRY * (self.c.tile[2] if self.tiles.clips_k else self.rows)
        taken = self.epilogue.bytes() + Factors.bytes(self.sides) + numbers
        return ring_stages(taken, self.stage_bytes(), self.overhead)

    def ready(self, atoms: list) -> None:
        """One thread, before all meet: initialises barriers, and prefetches what describes operands."""
        for part in (self.feed, *([self.factor_ring] if self.sides else []), self.epilogue):
            part.ready()
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)

    def begins(self, work: Any) -> tuple[Int32, Int32]:
        """This CTA's first row and column of a cluster's tile."""
        m, n, _ = cute.arch.block_idx()
        column = self.column(work, (m, n))
        return self.row(work, (m, n)), column * self.c.tile[1]

    def row(self, work: Any, place: Any) -> Int32:
        """The first row of the CTA at a ``place`` in the cluster."""
        m = place[0] * (2 - work.valid) if self.c.schedule.sideways else place[0]
        return work.row + m * self.rows

    def column(self, work: Any, place: Any) -> Int32:
        """The number of its column of tiles."""
        column = work.column * self.c.cluster[1] + place[1]
        return column + place[0] * (work.valid - 1) if self.c.schedule.sideways else column

    def tile(self, work: Work, place: Any, share: Any, count: Int32, thread: Int32, group: Any) -> Tile:
        """What a group of threads of the CTA at a ``place`` has of its cluster's tile: a ``share``, by number."""
        return Tile(
            row=self.row(work, place) + share * self.epilogue.plan.rows,
            start=work.start,
            end=work.end,
            column=self.column(work, place),
            n=self.feed.extent().n,
            batch=self.tiles.last(work.group)[2],
            expert=work.group,
            count=count,
            thread=thread,
            group=Int32(group),
            barrier=lambda: barriers.wait(self.group_barrier + group, self.epilogue.plan.threads),
        )
