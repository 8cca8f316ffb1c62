"""Tiles between registers and global memory, through shared memory and the copy engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint8, select_
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.epilogue import BLOCK
from cudnn_kernels.epilogue.fragment import Fragment, Some, indices
from cudnn_kernels.epilogue.operation import Operation, Plan, Tile, first_warp
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import FORMATS
from cudnn_kernels.pipeline.copy import address, clipped, ending, matrices


class _StagedTile(Operation):
    """A tensor (m, n, l) whose tiles pass through buffers in shared memory."""

    alignment = 1024  # of the widest swizzle
    engine: Any  # the copy engine's operation

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width)
        packed = FORMATS[declaration.dtype].packed
        self.packed = packed > 1
        self.pieces = width // BLOCK if declaration.halves else plan.pieces
        self.shape = (plan.rows, width // self.pieces // packed)  # of a piece, in elements of the tensor
        self.element = Uint8 if self.packed else DTYPES[declaration.dtype]
        if self.packed and declaration.major != "n":
            raise ValueError(f"{declaration.tensor}: {declaration.dtype} is packed along n, so major must be n")
        if plan.clips_rows and declaration.major != "n":
            raise ValueError(f"{declaration.tensor}: got major m; allowed: n, where experts end in the middle of tiles")
        if declaration.halves and (plan.pieces > 1 or self.packed):
            allowed = "parts in one piece, types of 8 bits and more"
            raise ValueError(f"{declaration.tensor}: got halves; allowed: none but of {allowed}")

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        one = cute.slice_(self.layout(), (None, None, 0))
        return tuple(cpasync.make_tiled_tma_atom(self.engine(), self.view(arguments), one, self.shape))

    def view(self, arguments: Mapping[str, Any]) -> cute.Tensor:
        """The tensor as the copy engine sees it: where experts end in tiles, so that its boxes end there too.

        What is beyond is loaded as zeros, so that another expert's values are in no reduction, and is not stored.
        """
        tensor = arguments[self.o.tensor]
        return ending(tensor, 0) if self.plan.clips_rows else tensor

    def bytes(self) -> int:
        return self.plan.groups * self.plan.stages * self.part_bytes()

    def enter(self, parameters: Sequence[Any], smem: Any) -> None:
        super().enter(parameters, smem)
        layout = self.layout()
        self.buffers = smem.allocate_tensor(self.element, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def part_bytes(self) -> int:
        """Bytes of a part of the group's rows."""
        return self.shape[0] * self.shape[1] * self.pieces * self.element.width // 8

    def layout(self) -> Any:
        """The layout of all groups' buffers, piece by piece."""
        order = LayoutEnum.ROW_MAJOR if self.o.major == "n" else LayoutEnum.COL_MAJOR
        count = self.plan.groups * self.plan.stages * self.pieces
        return sm90.make_smem_layout_epi(self.element, order, self.shape, count)

    def stage(self, tile: Tile, part: int) -> Any:
        """The number of the group's buffer for a part."""
        return tile.group * self.plan.stages + part % self.plan.stages

    def buffer(self, tile: Tile, part: int) -> cute.Tensor:
        """The group's buffer for a part, whose columns are those of its pieces."""
        if self.pieces == 1:
            return self.buffers[None, None, self.stage(tile, part)]
        both = cute.local_tile(self.buffers, (*self.shape, self.pieces), (0, 0, self.stage(tile, part)))
        return cute.group_modes(both, 1, 3)

    def ends(self, tile: Tile, part: int) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """The part's pieces in shared and in global memory, as the copy engine sees them."""
        atom, tensor = self.parameters[:2]
        row, last = self.rows(tile)
        moved = cute.domain_offset((row, 0, 0), tensor)
        whole = cute.make_layout(1)
        found = []
        for which in range(self.pieces):
            place = (0, self.piece(tile, part, which), last)
            if self.o.halves:  # whole blocks, those beyond the first half beyond the tensor
                blocks = Int32(tensor.shape[1]) // (2 * BLOCK)
                pair = (tile.column * self.plan.parts + part) * (self.pieces // 2) + which // 2
                place = (0, Int32(select_(pair < blocks, pair + which % 2 * blocks, 2 * blocks)), last)
            gD = cute.local_tile(moved, self.shape, place)
            sD = self.buffers[None, None, self.stage(tile, part) * self.pieces + which]
            two = (cute.group_modes(x, 0, 2) for x in (sD, gD))
            found.append(cpasync.tma_partition(atom, 0, whole, *two))
        return found

    def rows(self, tile: Tile) -> tuple[Any, Any]:
        """The row of the copy engine's view where the tile begins, and the view's last index."""
        if not self.plan.clips_rows:
            return tile.row, tile.batch
        return clipped(tile.row, tile.end, self.plan.rows, 1)

    def thread_copy(self, matrix: Any, tile: Tile) -> tuple[Any, Any]:
        """The copy between registers and shared memory: of 8 x 8 matrices, or of a thread's neighbouring columns."""
        transposed = self.o.major == "m"
        if self.element.width == 16 and self.plan.layout.matrices:
            atom = cute.make_copy_atom(matrix(transposed, 4), self.element)
        else:
            bits = self.element.width if transposed else min(128, self.element.width * self.plan.layout.run)
            atom = cute.make_copy_atom(CopyUniversalOp(), self.element, num_bits_per_copy=bits)
        return atom, self.plan.tiled_copy(atom, self.width).get_slice(tile.thread)


class StoreTile(_StagedTile):
    """From registers to a buffer, from there by the copy engine, which can add to what is there."""

    observes = True

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width)
        if plan.clips_rows and declaration.pointers:
            raise ValueError(f"{declaration.tensor}: got pointers; allowed: a tensor, where experts have parts of rows")
        if declaration.adds and self.element.width < 16:
            raise ValueError(f"{declaration.tensor}: got {declaration.dtype}; allowed: 16 and 32 bits, to add to")

    def engine(self) -> Any:
        return cpasync.CopyReduceBulkTensorTileS2GOp() if self.o.adds else cpasync.CopyBulkTensorTileS2GOp()

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return (*super().prepare(arguments), arguments[self.o.tensor] if self.o.pointers else None)

    def view(self, arguments: Mapping[str, Any]) -> cute.Tensor:
        if self.o.pointers:
            columns = arguments["n"] * self.width // self.plan.width
            columns, pointers = columns // FORMATS[self.o.dtype].packed, arguments[self.o.tensor]
            return matrices(self.element, arguments["m"], columns, self.o.major == "n", pointers)
        return super().view(arguments)

    def rows(self, tile: Tile) -> tuple[Any, Any]:
        row, last = super().rows(tile)
        return row, last if self.plan.clips_rows else address(self.parameters[2], last)

    @property
    def streams(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.element.width >= 16

    def start(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        self.rounded = self.plan.fragment(self.element, self.width)

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        x = values[self.o.value]
        for _, places in indices(x, some):
            for left, right in zip(places[::2], places[1::2], strict=True):  # neighbours, rounded by one instruction
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = x.values[left], x.values[right]
                both = cute.make_rmem_tensor(2, self.element)
                both.store(pair.load().to(self.element))
                self.rounded[left], self.rounded[right] = both[0], both[1]

    def finish(self, tile: Tile, part: int) -> None:
        if not self.plan.early:
            self.put(tile, part)

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        self.rounded = self.plan.fragment(Float32 if self.packed else self.element, self.width)
        self.rounded.store(values[self.o.value].values.load().to(self.rounded.element_type))
        self.finish(tile, part)

    def put(self, tile: Tile, part: int) -> None:
        buffer = self.buffer(tile, part)
        if self.packed:
            self.store_pairs(Fragment(self.rounded, self.width, self.plan.layout), buffer, tile.thread)
        else:
            atom, copy = self.thread_copy(warp.StMatrix8x8x16bOp, tile)
            cute.copy(atom, copy.retile(self.rounded), copy.partition_D(buffer))

    def store_pairs(self, fragment: Fragment, buffer: cute.Tensor, thread: Int32) -> None:
        """Two columns a byte, the left one in the low half; neighbouring columns of a thread at once."""
        rows = fragment.rows
        size = min(16, rows.run // 2)  # bytes
        runs = cute.flat_divide(buffer, (1, size))
        pairs = cute.make_rmem_tensor(size, Uint8)
        for slot in range(rows.slots):
            values = fragment.row_values(slot)
            for first in range(0, len(values), 2 * size):
                place = rows.row(thread, slot), rows.column(thread, first) // (2 * size)
                for i in range(size):
                    left, right = values[first + 2 * i : first + 2 * i + 2]
                    pairs[i] = Uint8(e2m1(left) | e2m1(right) << 4)
                if size == 1:
                    buffer[place] = pairs[0]  # as a run, it would cost registers that ping-pong on Hopper lacks
                else:
                    runs[(0, None, *place)].store(pairs.load())

    def commit(self, tile: Tile, part: int) -> None:
        for source, target in self.ends(tile, part):
            cute.copy(self.parameters[0], source, target)


class LoadTile(_StagedTile):
    """The copy engine fetches the first parts during the tile's products, each later one when a buffer is free."""

    engine = cpasync.CopyBulkTensorTileG2SOp

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width)
        if self.packed:
            raise ValueError(f"{declaration.tensor}: {declaration.dtype} can be stored, not loaded")

    def bytes(self) -> int:
        return super().bytes() + self.plan.groups * self.plan.stages * 8

    def enter(self, parameters: Sequence[Any], smem: Any) -> None:
        super().enter(parameters, smem)
        self.full = smem.allocate_array(cutlass.Int64, self.plan.groups * self.plan.stages)

    def ready(self) -> None:
        for i in range(self.plan.groups * self.plan.stages):
            cute.arch.mbarrier_init(self.full + i, 1)

    @cute.jit
    def begin(self, tile: Tile) -> None:
        if first_warp(tile.thread):
            self.fetch_first(tile)

    def fetch_first(self, tile: Tile) -> None:
        """Starts as many copies as there are buffers."""
        for part in range(min(self.plan.stages, self.plan.parts)):
            self.fetch(tile, part)

    def fetch(self, tile: Tile, part: int) -> None:
        """Starts the copy of a part. One warp."""
        full = self.full + self.stage(tile, part)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.part_bytes())
        for target, source in self.ends(tile, part):
            cute.copy(self.parameters[0], source, target, tma_bar_ptr=full)

    streams = True

    def start(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        self.loaded = self.load(tile, part)
        values[self.o.value] = Fragment(self.plan.fragment(Float32, self.width), self.width, self.plan.layout)
        if self.element.width == 8:  # converted by fours
            values[self.o.value].values.store(self.loaded.load().to(Float32))

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        x = values[self.o.value]
        for _, places in indices(x, some if self.element.width > 8 else Some(x.width, ())):
            for i in places:
                x.values[i] = Float32(self.loaded[i])

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        wide = self.plan.fragment(Float32, self.width)
        wide.store(self.load(tile, part).load().to(Float32))
        values[self.o.value] = Fragment(wide, self.width, self.plan.layout)

    def load(self, tile: Tile, part: int) -> cute.Tensor:
        """A part of the tensor in registers."""
        turn, stage = divmod(part, self.plan.stages)
        turns = -(-(self.plan.parts - stage) // self.plan.stages)  # of this buffer, for each tile
        cute.arch.mbarrier_wait(self.full + self.stage(tile, part), (tile.count * turns + turn) % 2)
        atom, copy = self.thread_copy(warp.LdMatrix8x8x16bOp, tile)
        loaded = self.plan.fragment(self.element, self.width)
        cute.copy(atom, copy.partition_S(self.buffer(tile, part)), copy.retile(loaded))
        return loaded

    def commit(self, tile: Tile, part: int) -> None:
        if part + self.plan.stages < self.plan.parts:  # all have read the buffer
            self.fetch(tile, part + self.plan.stages)


def e2m1(x: Float32) -> Int32:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, to even, with x's sign: its four bits. 6 or -6 for NaN.

    Hopper has no such conversion. Adding 2^22 times a power of two leaves of x so many halves of that power, rounded.
    """
    size = cute.arch.fmin(cute.math.absf(x), Float32(6.0))
    power = cute.arch.fmax(size, Float32(1.0)).bitcast(Int32) & 0x7F800000  # 1, 2 or 4: of the least, but at least 1
    magic = power + (22 << 23)
    halves = (size + magic.bitcast(Float32)).bitcast(Int32) - magic
    exponent = (power >> 23) - 127  # halves 2 and 3 of a power have the codes that 4 and 5 of the one before would have
    return halves + exponent + exponent | x.bitcast(Int32) >> 28 & 8
