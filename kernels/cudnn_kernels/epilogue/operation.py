"""How an epilogue runs: the hooks of an epilogue operation, and the class that calls them for a tuple of operations.

A warpgroup processes its tile in subtiles (epi_tile) of ``width`` accumulator columns. On Hopper that is an MMA
warpgroup, with the accumulators in registers; on Blackwell the four epilogue warps, which load each subtile from tensor
memory. :class:`Epilogue` calls the hooks of all its operations, in order, before it calls the next hook:

    host    prepare                         kernel parameters: TMA atoms, tensors, scalars
    kernel  setup_smem, init_barriers       once, before the cluster synchronizes
    tile    begin_tile                      before the mainloop, so that loads overlap with it
            first_pass                      for each subtile, only if the epilogue has two passes
            for each subtile:
              prefetch                      (1) issue loads with a long latency
                                            (2) the first warp waits for a free stage (cp.async.bulk.wait_group.read);
                                                named barrier
              apply                         (3) compute in registers; the results go to shared memory (r2s)
                                            (4) proxy fence, named barrier
              issue_tma                     (5) the first warp issues the TMA stores (and the loads of a later subtile)
                                                and commits them as a bulk group
            end_tile
    kernel  store_tail                      wait for the last TMA stores
    host    launch_follow_up                kernels that run after the GEMM

``params.overlaps_stores`` moves step (2) behind (3) and the copies to shared memory into a hook, ``r2s``, after it: the
arithmetic of a subtile then overlaps with the TMA store of the one before.

For elementwise operations, ``apply`` consists of ``begin_subtile``, ``apply_subset`` for all values, ``end_subtile``.
If an epilogue widens its values, consecutive elementwise operations run together on a few values at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cudnn_kernels.epilogue import EpiOp, SizeNames, traits_of, widths_of
from cudnn_kernels.pipeline.fragment import Fragment, RowLayout, ValueSubset, pick


@dataclass(frozen=True)
class EpilogueParams:
    """What operations must know of the mainloop.

    Each of ``num_warpgroups`` warpgroups has ``rows`` rows of the CTA's tile, which is ``tile_columns`` wide, and
    processes subtiles (epi_tile) of ``width`` accumulator columns.
    """

    rows: int
    width: int
    tile_columns: int
    num_warpgroups: int
    threads: int  # of a warpgroup
    stages: int  # of each tensor that passes through shared memory
    layout: RowLayout
    tiled_copy: Callable[[Any, int], Any]  # (atom, width): tiled copy of a fragment of ``width`` columns
    fragment: Callable[[Any, int], Any]  # (type, width): registers for ``width`` columns
    ragged_m: bool = False  # whether groups of rows (experts) may end in the middle of a tile
    offsets: str = ""  # the argument with the end of each group of rows
    segment_stride: int = 0  # columns between the starts of a subtile's two segments; 0: one contiguous segment
    subtiles_per_pass: int = 1  # with two passes: subtiles that the first pass reduces before the second begins
    overlaps_stores: bool = False  # whether a subtile is computed while the TMA store of the one before reads its stage

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
    """A warpgroup's tile, in the kernel. ``row`` is its first row, ``column`` is the CTA's tile index along n."""

    row: Int32
    start: Int32  # first row of the problem or, with varlen_m, of the expert
    end: Int32  # the row after the last one of the problem, or of the expert
    column: Int32
    n: Int32  # columns of the problem
    batch: Int32  # batch coordinate of the outputs
    expert: Int32  # index into tensors with one entry per expert (group), or per batch
    iteration: Int32  # tiles that this warpgroup has processed before
    thread: Int32  # index in the warpgroup
    wg_idx: Int32  # index of the warpgroup among those of the epilogue
    barrier: Callable[[], None]  # synchronizes the warpgroup (named barrier)
    barrier_all: Callable[[], None]  # synchronizes all warpgroups of the epilogue, if they share the CTA's tile


class EpiOpImpl:
    """The implementation of an :class:`EpiOp`: transforms the named values of a tile, subtile by subtile.

    The module's docstring has the order of the calls. The hooks run while the kernel is traced, so they may keep values
    in attributes between calls. ``op`` is the configuration; ``width`` is the number of columns that the operation's
    value has in a subtile.
    """

    reduces = False  # whether it reduces values, so that out-of-bounds values must be 0
    alignment = 16  # of its shared memory
    elementwise = False  # whether it implements ``apply_subset``
    read_only = False  # whether it leaves the values of other operations unchanged
    writes_smem_in_begin = False  # whether threads read shared memory that others write in ``begin_tile``

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        self.op, self.params, self.width = epi_op, params, width

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: the kernel's parameters, from its arguments by name."""
        return tuple(arguments[slot.name] for slot in self.op.slots(SizeNames("n", "l")))

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
        """Before the wait for the subtile's stage: issues loads with a long latency."""

    def first_pass(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        """Processes a subtile in the first of two passes."""
        self.apply(tile, subtile, values)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        """Processes a subtile."""
        layout = self.params.layout
        all_positions = range(self.width // layout.lanes_per_row)
        self.begin_subtile(tile, subtile, values)
        all_values = ValueSubset(self.width, [(slot, all_positions) for slot in range(layout.slots)])
        self.apply_subset(tile, values, all_values)
        self.end_subtile(tile, subtile)

    def begin_subtile(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        """Elementwise operations: before the first ``apply_subset`` of a subtile."""

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        """Elementwise operations: processes some values of a subtile."""

    def end_subtile(self, tile: Tile, subtile: int) -> None:
        """Elementwise operations: after the last ``apply_subset`` of a subtile."""

    def r2s(self, tile: Tile, subtile: int) -> None:
        """With ``overlaps_stores``: copies a subtile's results from registers to its stage, which is free."""

    def issue_tma(self, tile: Tile, subtile: int) -> None:
        """The first warp, after the proxy fence and the barrier: issues the TMA stores of a subtile."""

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

    def __init__(self, epi_ops: Sequence[EpiOp], params: EpilogueParams) -> None:
        from cudnn_kernels.epilogue.registry import EPI_OPS

        self.operations: list[EpiOpImpl] = []
        traits = traits_of(epi_ops)
        allowed = f"multiples of {traits.column_multiple}, by the epilogue"
        if params.tile_columns % traits.column_multiple:
            raise ValueError(f"tile: got {params.tile_columns} columns; allowed: {allowed}")
        if not traits.accepts(params.width):
            raise ValueError(f"epi_tile_n: got {params.width} columns; allowed: {allowed}")
        if traits.is_split(params.width):
            params = replace(params, segment_stride=traits.segment_stride)
        self.params = params = replace(params, subtiles_per_pass=traits.subtiles_per_pass(params.width))
        for epi_op, width in zip(epi_ops, widths_of(epi_ops)[0], strict=True):
            self.operations.append(EPI_OPS[type(epi_op)](epi_op, params, int(params.width * width)))
        self.reduces = any(operation.reduces for operation in self.operations)
        self.widens = traits.width > 1
        last_two_pass = max((i for i, o in enumerate(epi_ops) if o.two_pass), default=-1)
        up_to_last = self.operations[: last_two_pass + 1]
        self.first_pass_operations = [operation for operation in up_to_last if not operation.read_only]

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

    def zero_out_of_bounds(self, tile: Tile, first: int, fragment: Fragment) -> None:
        """Zeroes the fragment's out-of-bounds values, if an operation reduces; ``first`` is its first column in the
        tile.

        TMA fills out-of-bounds operands with 0, but 0 times infinity is NaN.
        """
        if self.reduces:
            rows = tile.end - tile.row
            columns = tile.n - tile.column * self.params.tile_columns - first
            zero_outside(fragment, rows, columns, self.params.rows, tile.thread)

    def subtile_passes(self) -> list[tuple[int, Callable[[Tile, int, Fragment], None]]]:
        """The subtiles of a tile in order, each with the method that processes it; with two passes, each comes twice:
        first ``subtiles_per_pass`` subtiles in the first pass, then the same ones in the second.
        """
        calls: list[tuple[int, Callable[[Tile, int, Fragment], None]]] = []
        for first in range(0, self.params.num_subtiles, self.params.subtiles_per_pass):
            subtiles = range(first, first + self.params.subtiles_per_pass)
            if self.params.subtiles_per_pass > 1:
                calls += [(subtile, self.first_pass) for subtile in subtiles]
            calls += [(subtile, self.run) for subtile in subtiles]
        return calls

    def first_pass(self, tile: Tile, subtile: int, fragment: Fragment) -> None:
        """The first of two passes: applies the operations up to the one that reduces several subtiles."""
        if subtile == 0:
            tile.barrier()  # shared memory written in ``begin_tile`` is visible
        values = {"x": fragment}
        for operation in self.first_pass_operations:
            operation.first_pass(tile, subtile, values)

    def run(self, tile: Tile, subtile: int, fragment: Fragment) -> None:
        """Applies all operations to a subtile; the steps are those of the module's docstring."""
        overlaps_stores = self.params.overlaps_stores
        # (1) Issue loads with a long latency.
        for operation in self.operations:
            operation.prefetch(tile, subtile)
        # (2) Wait until the subtile's stage is free; the barrier also publishes what ``begin_tile`` wrote.
        if not overlaps_stores:
            self._wait_free_stage(tile.thread, subtile)
        writes_smem_in_begin = any(operation.writes_smem_in_begin for operation in self.operations)
        if not overlaps_stores or (subtile == 0 and writes_smem_in_begin):
            tile.barrier()
        # (3) Compute.
        values = {"x": fragment}
        for streams, operations in itertools.groupby(self.operations, lambda op: op.elementwise and self.widens):
            if streams:
                self.run_elementwise(list(operations), tile, subtile, values)
                continue
            for operation in operations:
                operation.apply(tile, subtile, values)
        if overlaps_stores:
            self._wait_free_stage(tile.thread, subtile)
            tile.barrier()
            for operation in self.operations:
                operation.r2s(tile, subtile)
        # (4) Make the threads' writes to shared memory visible to TMA (the async proxy).
        cute.arch.fence_view_async_shared()
        tile.barrier()
        # (5) Issue the TMA stores.
        self._issue_tma(tile, subtile)

    def run_elementwise(
        self, operations: Sequence[EpiOpImpl], tile: Tile, subtile: int, values: dict[str, Fragment]
    ) -> None:
        """Applies consecutive elementwise operations to ``stream_width`` values of a row at a time.

        If an operation widens its values, registers cannot hold all intermediate values of a subtile, and the compiler
        hardly reorders the code.
        """
        layout = self.params.layout
        values_per_row = self.params.width // layout.lanes_per_row
        for operation in operations:
            operation.begin_subtile(tile, subtile, values)
        inputs = {name: fragment.in_registers() for name, fragment in values.items()}
        for slot in range(layout.slots):
            for first in range(0, values_per_row, layout.stream_width):
                positions = range(first, first + layout.stream_width)
                current, subset = dict(inputs), ValueSubset(self.params.width, [(slot, positions)])
                for operation in operations:
                    operation.apply_subset(tile, current, subset)
                values |= current
        for operation in operations:
            operation.end_subtile(tile, subtile)

    def end_tile(self, tile: Tile) -> None:
        """After all subtiles of a tile."""
        for operation in self.operations:
            operation.end_tile(tile)

    @cute.jit
    def store_tail(self, thread: Int32) -> None:
        """After the last tile: waits until the TMA stores have read shared memory."""
        if first_warp(thread):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _wait_free_stage(self, thread: Int32, subtile: cutlass.Constexpr[int]) -> None:
        """The first warp waits until the TMA stores of the subtile's stage have read it.

        The bulk groups of the last ``stages - 1`` subtiles use other stages and may stay in flight. For a tile's first
        subtile that holds only if the number of subtiles is a multiple of the stages.
        """
        stages = self.params.stages
        in_flight = const_expr(stages - 1 if subtile or self.params.num_subtiles % stages == 0 else 0)
        if first_warp(thread):
            cute.arch.cp_async_bulk_wait_group(in_flight, read=True)

    @cute.jit
    def _issue_tma(self, tile: Tile, subtile: cutlass.Constexpr[int]) -> None:
        """The first warp issues the TMA operations of a subtile and commits its stores as one bulk group."""
        if first_warp(tile.thread):
            for i in cutlass.range_constexpr(len(self.operations)):
                self.operations[i].issue_tma(tile, subtile)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def zero_outside(
    fragment: cutlass.Constexpr[Fragment], rows: Int32, columns: Int32, height: cutlass.Constexpr[int], thread: Int32
) -> None:
    """Zeroes values outside the first ``rows`` x ``columns`` of a warpgroup's tile of ``height`` rows."""
    if rows < height or columns < fragment.width:
        zero_each(fragment, rows, columns, thread)


def zero_each(fragment: Fragment, rows: Int32, columns: Int32, thread: Int32) -> None:
    """Zeroes values outside the first ``rows`` x ``columns``, one by one."""
    layout = fragment.layout
    for slot in range(layout.slots):
        in_bounds = layout.in_bounds(thread, slot, rows, columns)
        for position, i in enumerate(layout.order(fragment.width, slot)):
            fragment.values[i] = pick(in_bounds(position), fragment.values[i], Float32(0.0))


def first_warp(thread: Int32) -> cutlass.Boolean:
    """Whether the thread belongs to the warpgroup's first warp, which issues the TMA stores."""
    return cute.arch.make_warp_uniform(thread // 32) == 0
