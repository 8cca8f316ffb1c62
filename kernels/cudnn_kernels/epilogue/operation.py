"""How epilogues run: the interface of an epilogue operation (EpiOp), and the epilogue that runs a tuple of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cudnn_kernels.epilogue import SizeNames, traits_of, widths_of
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout, ValueSubset, pick


@dataclass(frozen=True)
class EpilogueParams:
    """What operations must know of the mainloop.

    A group is the threads that share a named barrier: an MMA warpgroup on Hopper, the epilogue warps on Blackwell. It
    owns ``rows`` rows of the CTA's tile, which is ``tile_columns`` wide. The epilogue processes subtiles (epi_tile) of
    ``width`` accumulator columns.
    """

    rows: int
    width: int
    tile_columns: int
    groups: int
    threads: int  # of a group
    stages: int  # shared memory stages of each tensor that passes through shared memory
    layout: RowLayout
    tiled_copy: Callable[[Any, int], Any]  # (atom, width): between a fragment of ``width`` columns and shared memory
    fragment: Callable[[Any, int], Any]  # (type, width): registers
    ragged_m: bool = False  # whether groups of rows (experts) may end in the middle of a tile
    offsets: str = ""  # the argument with the end of each group of rows
    segment_stride: int = 0  # columns between the starts of a subtile's two segments; 0: one contiguous segment
    passes: int = 1  # subtiles that are reduced in a first pass before they are processed in a second
    early: bool = False  # whether a subtile is computed while the TMA store of the one before reads shared memory

    @property
    def num_subtiles(self) -> int:
        """Subtiles of a tile."""
        return self.tile_columns // self.width

    @property
    def num_segments(self) -> int:
        """Segments of a subtile: ranges of contiguous columns."""
        return 2 if self.segment_stride else 1

    def segment(self, subtile: int, which: int = 0) -> int:
        """The index of a subtile's segment among all segments of the tile, from left to right."""
        if not self.segment_stride:
            return subtile
        num_interleaved = self.segment_stride * 2 // self.width  # subtiles whose segments are interleaved
        return (subtile // num_interleaved * 2 + which) * num_interleaved + subtile % num_interleaved


@dataclass
class Tile:
    """A group's tile, in the kernel. ``row`` is its first row, ``column`` is the CTA's tile index along n."""

    row: Int32
    start: Int32  # first row of the problem, or of the expert
    end: Int32  # the row after the last one of the problem, or of the expert
    column: Int32
    n: Int32  # columns of the problem
    batch: Int32  # batch coordinate of the outputs
    expert: Int32  # index into tensors with an entry per group of rows
    count: Int32  # tiles that these threads have processed before
    thread: Int32  # of the group
    group: Int32
    barrier: Callable[[], None]  # synchronizes the group


class EpiOpImpl:
    """The implementation of an :class:`EpiOp`: transforms the named values of a tile, subtile by subtile.

    The methods are called while the kernel is traced. The value that it works on has ``width`` columns in a subtile.
    """

    reduces = False  # whether it reduces values, so that out-of-bounds values must be 0
    alignment = 16  # of its shared memory
    streams = (
        False  # whether it is elementwise: may be applied to some values at a time by ``start``, ``step``, ``finish``
    )
    observes = False  # whether it does not modify the values of other operations
    publishes_in_begin = False  # whether threads read shared memory that others write in ``begin_tile``

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        self.o, self.params, self.width = epi_op, params, width

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: the kernel's parameters, from its arguments by name."""
        return tuple(arguments[slot.name] for slot in self.o.slots(SizeNames("n", "l")))

    def bytes(self) -> int:
        """Bytes of shared memory that ``setup_smem`` allocates."""
        return 0

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        """At the start of the kernel: keeps its parameters and allocates shared memory."""
        self.parameters = parameters

    def init_barriers(self) -> None:
        """One thread, before the cluster synchronizes: initializes mbarriers."""

    def begin_tile(self, tile: Tile) -> None:
        """Before the mainloop of the tile."""

    def prefetch(self, tile: Tile, subtile: int) -> None:
        """Before the subtile's stage is free: issues loads with a long latency."""

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        """Processes all values of a subtile."""
        layout = self.params.layout
        all_positions = range(self.width // layout.neighbours)
        self.start(tile, subtile, values)
        self.step(tile, values, ValueSubset(self.width, [(slot, all_positions) for slot in range(layout.slots)]))
        self.finish(tile, subtile)

    def measure(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        """Processes a subtile in the first of two passes."""
        self.apply(tile, subtile, values)

    def start(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        """Before the steps of a subtile."""

    def step(self, tile: Tile, values: dict[str, Fragment], some: ValueSubset) -> None:
        """Processes some values of a subtile."""

    def finish(self, tile: Tile, subtile: int) -> None:
        """After the steps of a subtile."""

    def r2s(self, tile: Tile, subtile: int) -> None:
        """Copies the results of a subtile from registers to its stage in shared memory, which is free."""

    def commit(self, tile: Tile, subtile: int) -> None:
        """The group's first warp, after the barrier and the proxy fence: issues the TMA stores of a subtile."""

    def end_tile(self, tile: Tile) -> None:
        """After all subtiles of a tile."""

    def launch_follow_up(self, arguments: Mapping[str, Any]) -> None:
        """On the host: launches kernels that run after the GEMM, such as reductions of the workspace."""

    def segment(self, tile: Tile, subtile: int, which: int = 0) -> Int32:
        """The index of a subtile's segment among all segments of the tensor, from left to right."""
        return tile.column * (self.params.num_subtiles * self.params.num_segments) + self.params.segment(subtile, which)

    def tile_column(self, subtile: int, column: Any) -> Any:
        """The tile's column of a subtile's column."""
        if not self.params.segment_stride:
            return subtile * self.width + column
        width = self.width // 2
        return self.params.segment(subtile) * width + column // width * self.params.segment_stride + column % width

    def column(self, tile: Tile, subtile: int, column: Any) -> Int32:
        """The tensor's column of a subtile's column."""
        return tile.column * (self.params.num_subtiles * self.width) + self.tile_column(subtile, column)

    def row(self, tile: Tile, slot: int) -> Int32:
        """The tensor's row of one of the thread's row slots."""
        return tile.row + self.params.layout.row(tile.thread, slot)


class Epilogue:
    """Runs a tuple of epilogue operations."""

    def __init__(self, epi_ops: Sequence[Any], params: EpilogueParams) -> None:
        from cudnn_kernels.epilogue.registry import EPI_OPS

        self.operations: list[EpiOpImpl] = []
        traits = traits_of(epi_ops)
        allowed = f"multiples of {traits.columns}, by the epilogue"
        if params.tile_columns % traits.columns:
            raise ValueError(f"tile: got {params.tile_columns} columns; allowed: {allowed}")
        if not traits.accepts(params.width):
            raise ValueError(f"epi_tile_n: got {params.width} columns; allowed: {allowed}")
        if traits.is_split(params.width):
            params = replace(params, segment_stride=traits.segment_stride)
        self.params = params = replace(params, passes=traits.subtiles_per_pass(params.width))
        for epi_op, width in zip(epi_ops, widths_of(epi_ops)[0], strict=True):
            self.operations.append(EPI_OPS[type(epi_op)](epi_op, params, int(params.width * width)))
        self.reduces = any(operation.reduces for operation in self.operations)
        self.widens = traits.width > 1
        last = max((i for i, o in enumerate(epi_ops) if o.two_pass), default=-1)
        self.measured = [operation for operation in self.operations[: last + 1] if not operation.observes]

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: each operation's parameters."""
        return tuple(operation.prepare(arguments) for operation in self.operations)

    def launch_follow_up(self, arguments: Mapping[str, Any]) -> None:
        """On the host: launches kernels that run after the GEMM, such as reductions of the workspace."""
        for operation in self.operations:
            operation.launch_follow_up(arguments)

    def bytes(self) -> int:
        """Shared memory of all operations."""
        end = 0
        for operation in self.operations:
            end = -(-end // operation.alignment) * operation.alignment + operation.bytes()
        return end

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        """In the kernel: hands parameters to the operations, which allocate shared memory."""
        for operation, parameters_of_op in zip(self.operations, parameters, strict=True):
            operation.setup_smem(parameters_of_op, smem)

    def init_barriers(self) -> None:
        """One thread, before the cluster synchronizes: initializes mbarriers."""
        for operation in self.operations:
            operation.init_barriers()

    def begin_tile(self, tile: Tile) -> None:
        """Before the mainloop of the tile."""
        for operation in self.operations:
            operation.begin_tile(tile)

    def clear(self, tile: Tile, first: int, fragment: Fragment) -> None:
        """Before ``run``: zeroes out-of-bounds values of the columns from ``first`` on, if an operation reduces.

        TMA fills out-of-bounds operands with 0, but 0 times infinity is NaN.
        """
        if self.reduces:
            rows = tile.end - tile.row
            columns = tile.n - tile.column * self.params.tile_columns - first
            clear_outside(fragment, rows, columns, self.params.rows, tile.thread)

    def steps(self) -> list[tuple[int, Callable[[Tile, int, Fragment], None]]]:
        """The subtiles of a tile in order, with the method that processes each; with two passes, each comes twice."""
        steps, passes = [], self.params.passes
        for first in range(0, self.params.num_subtiles, passes):
            pass_subtiles = range(first, first + passes)
            steps += [(subtile, self.measure) for subtile in pass_subtiles if passes > 1]
            steps += [(subtile, self.run) for subtile in pass_subtiles]
        return steps

    def measure(self, tile: Tile, subtile: int, fragment: Fragment) -> None:
        """The first of two passes: applies the operations up to the one that reduces several subtiles."""
        if subtile == 0:
            tile.barrier()  # shared memory written in ``begin_tile`` is visible
        values = {"x": fragment}
        for operation in self.measured:
            operation.measure(tile, subtile, values)

    def run(self, tile: Tile, subtile: int, fragment: Fragment) -> None:
        """Applies all operations to a subtile."""
        for operation in self.operations:
            operation.prefetch(tile, subtile)
        if not self.params.early:
            self._free(tile.thread, subtile)
        if not self.params.early or (
            subtile == 0 and any(operation.publishes_in_begin for operation in self.operations)
        ):
            tile.barrier()
        values = {"x": fragment}
        for streams, operations in itertools.groupby(self.operations, lambda o: o.streams and self.widens):
            if streams:
                self.run_streamed(list(operations), tile, subtile, values)
                continue
            for operation in operations:
                operation.apply(tile, subtile, values)
        if self.params.early:
            self._free(tile.thread, subtile)
            tile.barrier()
            for operation in self.operations:
                operation.r2s(tile, subtile)
        cute.arch.fence_view_async_shared()
        tile.barrier()
        self._commit(tile, subtile)

    def run_streamed(
        self, operations: Sequence[EpiOpImpl], tile: Tile, subtile: int, values: dict[str, Fragment]
    ) -> None:
        """Applies consecutive elementwise operations to a few values at a time.

        If an operation widens its values, registers do not hold all of a subtile's between operations, and the compiler
        hardly reorders what it is given.
        """
        layout = self.params.layout
        count = self.params.width // layout.neighbours  # values of a row
        for operation in operations:
            operation.start(tile, subtile, values)
        inputs = dict(values)
        for slot in range(layout.slots):
            for first in range(0, count, layout.stream_width):
                current, some = (
                    dict(inputs),
                    ValueSubset(self.params.width, [(slot, range(first, first + layout.stream_width))]),
                )
                for operation in operations:
                    operation.step(tile, current, some)
                values |= current
        for operation in operations:
            operation.finish(tile, subtile)

    def end_tile(self, tile: Tile) -> None:
        """After all subtiles of a tile."""
        for operation in self.operations:
            operation.end_tile(tile)

    @cute.jit
    def drain(self, thread: Int32) -> None:
        """After the last tile: waits until the TMA stores have read shared memory."""
        if first_warp(thread):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _free(self, thread: Int32, subtile: cutlass.Constexpr[int]) -> None:
        """Waits until the TMA stores that read the subtile's stage are done."""
        stages = self.params.stages
        newest = const_expr(stages - 1 if subtile or self.params.num_subtiles % stages == 0 else 0)
        if first_warp(thread):
            cute.arch.cp_async_bulk_wait_group(newest, read=True)

    @cute.jit
    def _commit(self, tile: Tile, subtile: cutlass.Constexpr[int]) -> None:
        if first_warp(tile.thread):
            for i in cutlass.range_constexpr(len(self.operations)):
                self.operations[i].commit(tile, subtile)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def clear_outside(
    fragment: cutlass.Constexpr[Fragment], rows: Int32, columns: Int32, height: cutlass.Constexpr[int], thread: Int32
) -> None:
    """Zeroes values outside the first ``rows`` x ``columns`` of a group's tile of ``height`` rows."""
    if rows < height or columns < fragment.width:
        clear_each(fragment, rows, columns, thread)


def clear_each(fragment: Fragment, rows: Int32, columns: Int32, thread: Int32) -> None:
    """Zeroes values outside the first ``rows`` x ``columns``, one by one."""
    layout = fragment.rows
    for slot in range(layout.slots):
        inside = layout.inside(thread, slot, rows, columns)
        for position, i in enumerate(layout.order(fragment.width, slot)):
            fragment.values[i] = pick(inside(position), fragment.values[i], Float32(0.0))


def first_warp(thread: Int32) -> cutlass.Boolean:
    """Whether the thread belongs to the group's first warp, which issues the TMA stores."""
    return cute.arch.make_warp_uniform(thread // 32) == 0
