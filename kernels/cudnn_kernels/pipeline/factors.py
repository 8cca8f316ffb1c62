"""float32 factors of the sums of k tiles, on their way to the warps that multiply by them, in a ring of their own.

One or two warps copy each k tile's factors of the CTA's rows and columns to shared memory, asynchronously and whatever
their strides, some k tiles ahead. Where ``rows`` rows share a factor, a tile need not begin with such a block: its
factors are those of granules, the largest common parts of tile and block. Rows by number have their numbers' factors,
and 0 for a number that no row has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.epilogue import BLOCK
from cudnn_kernels.pipeline.copy import address, copy_or_clear, everywhere, unwoven
from cudnn_kernels.pipeline.ring import Ring, advanced, initialise
from cudnn_kernels.problem import BlockScale
from cudnn_kernels.schedule.feed import Feed

STAGES = 4  # a power of two: a k tile's number tells buffer and phase
WARP = 32
ALIGNMENT = 16


class Side:
    """The factors of ``extent`` rows of A, which may be ``numbered``, or of B, whose ``halves`` may take turns, for one
    k tile.
    """

    def __init__(self, scale: BlockScale, extent: int, halves: bool = False, numbered: bool = False) -> None:
        self.rows, self.vector, self.halves, self.numbered = scale.rows, scale.vector, halves, numbered
        self.granule = math.gcd(extent, scale.rows, BLOCK if halves else extent)
        self.count = extent // self.granule


class Factors:
    """Both sides' factors for the tiles of a ``feed``: ``fillers`` warps of the CTA serve, ``readers`` read."""

    def __init__(
        self, sides: tuple[Side, ...], tensors: tuple[Any, ...], feed: Feed, fillers: int, readers: int, smem: Any
    ) -> None:
        self.sides, self.feed, self.fillers, self.readers = sides, feed, fillers, readers
        *self.tensors, self.pointers, self.index = tensors
        self.ring = Ring.allocate(smem, STAGES)
        self.buffers = [
            smem.allocate_tensor(Float32, cute.make_layout((side.count, STAGES)), byte_alignment=ALIGNMENT)
            for side in self.sides
        ]

    @staticmethod
    def arguments(arguments: Mapping[str, Any], sides: tuple[Side, ...], index: str) -> tuple[Any, ...]:
        """On the host: the tensors of both sides, the addresses of experts' B's, where they have such, and the numbers
        of A's rows, where they have some.
        """
        if not sides:
            return ()
        b, pointers = arguments.get("sfb"), arguments.get("sfb_ptrs")
        if pointers is not None:
            _, blocks, _ = arguments["sfa"].shape
            rows = cute.ceil_div(arguments["n"], sides[1].rows)
            b = everywhere(Float32, (rows, blocks), (blocks, 1), pointers)
        return arguments["sfa"], b, pointers, arguments.get(index)

    @staticmethod
    def bytes(sides: tuple[Side, ...]) -> int:
        """Shared memory of both sides' buffers; none without sides."""
        return sum(4 * side.count * STAGES + ALIGNMENT for side in sides)

    def ready(self) -> None:
        """One thread, before all meet."""
        initialise(self.ring, WARP * self.fillers, self.readers)

    @cute.jit
    def serve(
        self,
        begins: cutlass.Constexpr[Callable[[Any], Any]],
        depth: cutlass.Constexpr[int],
        sides: cutlass.Constexpr[tuple[int, ...]],
    ) -> None:
        """One warp: the factors of A, 0, or B, 1, of all tiles.

        ``begins`` tells a tile's first row and column; k tiles are ``depth`` deep.
        """
        self.start()
        stage, phase = Int32(0), Int32(1)
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            place = self.begin(begins(work), work)
            for k in cutlass.range(work.k_tiles(depth), unroll=1):
                self.bring(sides, place, work.k + k * depth, stage, phase)
                stage, phase = advanced(self.ring, stage, phase)
            cursor = self.feed.next(cursor)

    def start(self) -> None:
        """A warp, before all: registers for the numbers of the rows whose factors a lane copies."""
        if self.sides[0].numbered:
            self.numbers = cute.make_rmem_tensor(-(-self.sides[0].count // WARP), Int32)

    def begin(self, first: Any, work: Any) -> tuple[Any, Any]:
        """A warp, before a tile's first k tile: reads the numbers of its rows. Gives the tile's first row and column,
        and the last index of both sides.
        """
        if self.sides[0].numbered:
            for i in range(cute.size(self.numbers)):
                row = first[0] + i * WARP + cute.arch.lane_idx()
                self.numbers[i] = self.index[cutlass.min(row, work.end - 1)]
        last_a, last_b, _ = self.feed.tiles.last(work.group)
        return first, (last_a, address(self.pointers, last_b))

    def bring(self, sides: tuple[int, ...], place: tuple[Any, Any], k: Int32, stage: Int32, phase: Int32) -> None:
        """A warp: waits for an empty buffer, and starts the copies of these sides' factors of a k tile."""
        first, last = place
        cute.arch.mbarrier_wait(self.ring.empty + stage, phase)
        for side in sides:
            self.copy(side, first[side], k, last[side], stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full + stage)

    @cute.jit
    def bring_side(self, warp: Int32, place: tuple[Any, Any], k: Int32, stage: Int32, phase: Int32) -> None:
        """One of as many warps as there are sides: its side's."""
        for side in cutlass.range_constexpr(len(self.sides)):
            if warp == side:
                self.bring((side,), place, k, stage, phase)

    def copy(self, i: int, first: Int32, k: Int32, last: Any, stage: Int32) -> None:
        """Starts the copies of one side's factors, some for each lane."""
        for start in range(0, self.sides[i].count, WARP):
            index = start + cute.arch.lane_idx()
            if self.sides[i].numbered:
                self.copy_numbered(i, index, self.numbers[start // WARP], k, last, stage)
            else:
                self.copy_one(i, index, first, k, last, stage)

    def copy_numbered(self, i: int, index: Int32, row: Int32, k: Int32, last: Any, stage: Int32) -> None:
        """Starts the copy of the factor of the row with a number, or of 0."""
        tensor, buffer = self.tensors[i], self.buffers[i]
        source = tensor.iterator + cute.crd2idx((row, k // self.sides[i].vector, last), tensor.layout)
        target = buffer.iterator + cute.crd2idx((index, stage), buffer.layout)
        copy_or_clear(target.toint(), source.toint(), (row < 0) | (row >= tensor.shape[0]), 4)

    @cute.jit
    def copy_one(
        self, i: cutlass.Constexpr[int], index: Int32, first: Int32, k: Int32, last: Any, stage: Int32
    ) -> None:
        """Starts the copy of a factor; of rows beyond the last one, it is that one's."""
        side, tensor, buffer = self.sides[i], self.tensors[i], self.buffers[i]
        if index < side.count:
            row = first + index * side.granule
            if const_expr(side.halves):
                row = unwoven(row, self.feed.extent().n, BLOCK)
            row = cutlass.min(row // side.rows, tensor.shape[0] - 1)
            source = tensor.iterator + cute.crd2idx((row, k // side.vector, last), tensor.layout)
            target = buffer.iterator + cute.crd2idx((index, stage), buffer.layout)
            one = cute.make_layout(1)
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=32)
            cute.copy(atom, cute.make_tensor(source, one), cute.make_tensor(target, one))

    def place(self, position: Int32) -> Int32:
        """The buffer of the k tile with a number, counted over all tiles."""
        return position & (STAGES - 1)

    def wait(self, position: Int32) -> None:
        """Waits for the factors of that k tile."""
        cute.arch.mbarrier_wait(self.ring.full + self.place(position), position // STAGES & 1)

    @cute.jit
    def release(self, position: Int32) -> None:
        """A warp is done with them."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.ring.empty + self.place(position))

    def row(self, position: Int32, row: Any) -> Float32:
        """The factor of a row of the CTA's tile."""
        return self.buffers[0][row // self.sides[0].granule, self.place(position)]

    def column(self, position: Int32, column: Any) -> Float32:
        """The factor of a column of the CTA's tile."""
        return self.buffers[1][column // self.sides[1].granule, self.place(position)]
