"""How epilogues run: what an operation is, and the epilogue that runs a tuple of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cudnn_kernels.epilogue import Place, needs_of, widths_of
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout, Some, pick


@dataclass(frozen=True)
class Plan:
    """What operations must know of the mainloop.

    A group is the threads that share a barrier. It owns ``rows`` rows of the CTA's tile, which is ``tile_columns``
    wide; ``width`` columns of the accumulator pass through the epilogue at a time, a part.
    """

    rows: int
    width: int
    tile_columns: int
    groups: int
    threads: int  # of a group
    stages: int  # buffers, for each tile that is staged in shared memory
    layout: RowLayout
    tiled_copy: Callable[[Any, int], Any]  # (atom, width): between a fragment of so many columns and shared memory
    fragment: Callable[[Any, int], Any]  # (type, width): registers
    clips_rows: bool = False  # whether tiles end where experts do, in the middle of the tensor
    offsets: str = ""  # the argument that says where groups of rows end
    apart: int = 0  # columns from the beginning of a part's first piece to that of its second; 0: it is one piece
    sweeps: int = 1  # parts that are measured together before they are worked on
    early: bool = False  # whether a part is computed while the copy engine stores the one before

    @property
    def parts(self) -> int:
        """Parts of a tile."""
        return self.tile_columns // self.width

    @property
    def pieces(self) -> int:
        """Pieces of a part: columns that lie next to each other."""
        return 2 if self.apart else 1

    def piece(self, part: int, which: int = 0) -> int:
        """The place of a part's piece in the tile, which counts pieces from left to right."""
        if not self.apart:
            return part
        turns = self.apart * 2 // self.width  # parts whose pieces take turns
        return (part // turns * 2 + which) * turns + part % turns


@dataclass
class Tile:
    """A group's tile, in the kernel. ``row`` is its first row, ``column`` counts tiles of the CTA's columns."""

    row: Int32
    start: Int32  # first row of the product, or the expert
    end: Int32  # first row that is not the product's, or the expert's
    column: Int32
    n: Int32  # columns of the product
    batch: Int32  # last index of outputs
    expert: Int32  # index where every group of rows has an entry
    count: Int32  # tiles that this group had before
    thread: Int32  # of the group
    group: Int32
    barrier: Callable[[], None]  # waits for the group


class Operation:
    """One declaration of an epilogue at work: takes the named values of a tile, part by part from left to right.

    The methods are called while the kernel is traced. The value that it works on has ``width`` columns of a part.
    """

    reduces = False  # so values outside of the product must be 0
    alignment = 16  # of its shared memory
    streams = False  # whether it works value by value: may be applied by ``start``, ``step`` and ``finish``
    observes = False  # whether it leaves alone the values that others work on
    tells = False  # whether threads read what others have written in ``begin``

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        self.o, self.plan, self.width = declaration, plan, width

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: the kernel's parameters, from its arguments by name."""
        return tuple(arguments[slot.name] for slot in self.o.slots(Place("n", "l")))

    def bytes(self) -> int:
        """Shared memory that ``enter`` takes."""
        return 0

    def enter(self, parameters: Sequence[Any], smem: Any) -> None:
        """In the kernel, first of all."""
        self.parameters = parameters

    def ready(self) -> None:
        """One thread, before all threads meet: initialises barriers."""

    def begin(self, tile: Tile) -> None:
        """Before the tile's products."""

    def ahead(self, tile: Tile, part: int) -> None:
        """Before a part's buffers are free: asks for what takes long to come."""

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        """One part of the tile: all of its values, as others stream."""
        layout = self.plan.layout
        whole = range(self.width // layout.neighbours)
        self.start(tile, part, values)
        self.step(tile, values, Some(self.width, [(slot, whole) for slot in range(layout.slots)]))
        self.finish(tile, part)

    def measure(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        """One part in a sweep before, for what does not just observe."""
        self.apply(tile, part, values)

    def start(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        """Before all steps of a part."""

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        """Some values of a part."""

    def finish(self, tile: Tile, part: int) -> None:
        """After all steps of a part."""

    def put(self, tile: Tile, part: int) -> None:
        """Writes what it has made of a part to the part's buffers, which are free."""

    def commit(self, tile: Tile, part: int) -> None:
        """The group's first warp, once all have applied the part and the copy engine sees shared memory."""

    def end(self, tile: Tile) -> None:
        """After all parts."""

    def follow(self, arguments: Mapping[str, Any]) -> None:
        """On the host: launches what follows the kernel."""

    def piece(self, tile: Tile, part: int, which: int = 0) -> Int32:
        """The place of a part's piece in the tensor, which counts pieces from left to right."""
        return tile.column * (self.plan.parts * self.plan.pieces) + self.plan.piece(part, which)

    def place(self, part: int, column: Any) -> Any:
        """The column of the tile that is a part's column."""
        if not self.plan.apart:
            return part * self.width + column
        width = self.width // 2
        return self.plan.piece(part) * width + column // width * self.plan.apart + column % width

    def column(self, tile: Tile, part: int, column: Any) -> Int32:
        """The column of the tensor that is a part's column."""
        return tile.column * (self.plan.parts * self.width) + self.place(part, column)

    def row(self, tile: Tile, slot: int) -> Int32:
        """The row of the tensor that one of the thread's slots holds."""
        return tile.row + self.plan.layout.row(tile.thread, slot)


class Epilogue:
    """A tuple of declarations as one."""

    def __init__(self, declarations: Sequence[Any], plan: Plan) -> None:
        from cudnn_kernels.epilogue.table import OPERATIONS

        self.operations: list[Operation] = []
        needs = needs_of(declarations)
        allowed = f"multiples of {needs.columns}, by the epilogue"
        if plan.tile_columns % needs.columns:
            raise ValueError(f"tile: got {plan.tile_columns} columns; allowed: {allowed}")
        if not needs.takes(plan.width):
            raise ValueError(f"part: got {plan.width} columns; allowed: {allowed}")
        if needs.splits(plan.width):
            plan = replace(plan, apart=needs.apart)
        self.plan = plan = replace(plan, sweeps=needs.sweeps(plan.width))
        for declaration, width in zip(declarations, widths_of(declarations)[0], strict=True):
            self.operations.append(OPERATIONS[type(declaration)](declaration, plan, int(plan.width * width)))
        self.reduces = any(operation.reduces for operation in self.operations)
        self.widens = needs.width > 1
        last = max((i for i, o in enumerate(declarations) if o.sweeps), default=-1)
        self.measured = [operation for operation in self.operations[: last + 1] if not operation.observes]

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: each operation's parameters."""
        return tuple(operation.prepare(arguments) for operation in self.operations)

    def follow(self, arguments: Mapping[str, Any]) -> None:
        """On the host: launches what follows the kernel."""
        for operation in self.operations:
            operation.follow(arguments)

    def bytes(self) -> int:
        """Shared memory of all operations."""
        end = 0
        for operation in self.operations:
            end = -(-end // operation.alignment) * operation.alignment + operation.bytes()
        return end

    def enter(self, parameters: Sequence[Any], smem: Any) -> None:
        """In the kernel: takes parameters and shared memory."""
        for operation, mine in zip(self.operations, parameters, strict=True):
            operation.enter(mine, smem)

    def ready(self) -> None:
        """One thread: initialises barriers."""
        for operation in self.operations:
            operation.ready()

    def begin(self, tile: Tile) -> None:
        """Before the tile's products."""
        for operation in self.operations:
            operation.begin(tile)

    def clear(self, tile: Tile, first: int, fragment: Fragment) -> None:
        """Before ``run``: makes values outside of the product 0, for columns of the tile from the first one given.

        Copies fill operands up with 0, but 0 times infinity is NaN.
        """
        if self.reduces:
            rows = tile.end - tile.row
            columns = tile.n - tile.column * self.plan.tile_columns - first
            clear_outside(fragment, rows, columns, self.plan.rows, tile.thread)

    def steps(self) -> list[tuple[int, Callable[[Tile, int, Fragment], None]]]:
        """The parts of a tile in order, and what to do with each: some come twice."""
        found, sweeps = [], self.plan.sweeps
        for first in range(0, self.plan.parts, sweeps):
            together = range(first, first + sweeps)
            found += [(part, self.measure) for part in together if sweeps > 1]
            found += [(part, self.run) for part in together]
        return found

    def measure(self, tile: Tile, part: int, fragment: Fragment) -> None:
        """Applies what must see several parts before it works on one, and what is before that."""
        if part == 0:
            tile.barrier()  # what ``begin`` wrote for others is there
        values = {"x": fragment}
        for operation in self.measured:
            operation.measure(tile, part, values)

    def run(self, tile: Tile, part: int, fragment: Fragment) -> None:
        """Applies all operations to a part of a tile."""
        for operation in self.operations:
            operation.ahead(tile, part)
        if not self.plan.early:
            self._free(tile.thread, part)
        if not self.plan.early or (part == 0 and any(operation.tells for operation in self.operations)):
            tile.barrier()
        values = {"x": fragment}
        for streams, operations in itertools.groupby(self.operations, lambda o: o.streams and self.widens):
            if streams:
                self.stream(list(operations), tile, part, values)
                continue
            for operation in operations:
                operation.apply(tile, part, values)
        if self.plan.early:
            self._free(tile.thread, part)
            tile.barrier()
            for operation in self.operations:
                operation.put(tile, part)
        cute.arch.fence_view_async_shared()
        tile.barrier()
        self._commit(tile, part)

    def stream(self, operations: Sequence[Operation], tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        """Applies operations that follow each other to a few values at a time.

        Where values are widened, registers do not hold a part's between one operation and the next, and the compiler
        hardly changes the order that it is given.
        """
        layout = self.plan.layout
        count = self.plan.width // layout.neighbours  # values of a row
        for operation in operations:
            operation.start(tile, part, values)
        before = dict(values)
        for slot in range(layout.slots):
            for first in range(0, count, layout.few):
                now, some = dict(before), Some(self.plan.width, [(slot, range(first, first + layout.few))])
                for operation in operations:
                    operation.step(tile, now, some)
                values |= now
        for operation in operations:
            operation.finish(tile, part)

    def end(self, tile: Tile) -> None:
        """After all parts of a tile."""
        for operation in self.operations:
            operation.end(tile)

    @cute.jit
    def drain(self, thread: Int32) -> None:
        """After the last tile: shared memory lives until the stores have read it."""
        if first_warp(thread):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _free(self, thread: Int32, part: cutlass.Constexpr[int]) -> None:
        """Waits until the stores that read the part's buffers are done: all but the newest, where those use others."""
        stages = self.plan.stages
        newest = const_expr(stages - 1 if part or self.plan.parts % stages == 0 else 0)
        if first_warp(thread):
            cute.arch.cp_async_bulk_wait_group(newest, read=True)

    @cute.jit
    def _commit(self, tile: Tile, part: cutlass.Constexpr[int]) -> None:
        if first_warp(tile.thread):
            for i in cutlass.range_constexpr(len(self.operations)):
                self.operations[i].commit(tile, part)
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def clear_outside(
    fragment: cutlass.Constexpr[Fragment], rows: Int32, columns: Int32, height: cutlass.Constexpr[int], thread: Int32
) -> None:
    """Zeroes values outside the first ``rows`` x ``columns`` of a group's tile, which is ``height`` rows high."""
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
    """Whether the thread belongs to the group's first warp, which alone deals with the copy engine."""
    return cute.arch.make_warp_uniform(thread // 32) == 0
