"""Operands of which a tile takes any lines, by their numbers, on their way to shared memory.

A line is a row where k is contiguous, or one k where rows are. Ordinary threads start asynchronous copies of 16 bytes.
Of rows, on Hopper, the copy engine brings 128 bytes of one at a time, which CTAs can share. Both leave a tile in shared
memory as the copy engine does with neighbouring lines: in atoms of eight lines of 128 bytes, swizzled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass._mlir.dialects.cute_nvgpu as nvgpu
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr, select_
from cutlass._mlir import ir
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.pipeline.copy import PIECE, copy_or_clear
from cudnn_kernels.pipeline.factors import Factors
from cudnn_kernels.pipeline.ring import Ring, advanced
from cudnn_kernels.schedule.feed import Feed

WARPS = 2  # that start copies
LINE, LINES = 128, 8  # bytes of a line of an atom, and its lines
CHUNKS = LINE // PIECE  # of a line: one for each lane, so that a warp copies four lines at once
WARP = 32
FOUR = LINES // WARPS  # lines of an atom that a warp copies
ENTRY = 4  # bytes, of a line's number
IN_FLIGHT = 4  # k tiles that are being copied, at most


class Lines:
    """An operand (rows, k, 1), A or B by ``side``, of which line i of the product's is the one with the number
    ``index[i]``; a number that no line has stands for zeros.

    A CTA's tile has ``shape`` (rows, k); ``place`` tells where an element of it lies in the first buffer of ``ring``.
    The numbers of a tile's lines stand in a table in shared memory, -1 for zeros: those that a lane copies lie next to
    each other, so that it reads four at once.
    """

    def __init__(
        self,
        side: int,
        along_k: bool,
        tensor: cute.Tensor,
        index: cute.Tensor,
        ring: cute.Tensor,
        shape: tuple[int, int],
        place: Callable[[int, int], int],
        smem: Any,
    ) -> None:
        self.side, self.along_k, self.tensor, self.index = side, along_k, tensor, index
        self.size = ring.element_type.width // 8  # bytes of an element
        lines, width = shape[::-1] if along_k else shape
        across = LINE // self.size  # elements of an atom's line
        self.count, self.blocks = lines // LINES, width // across
        self.bytes = lines * width * self.size  # of a buffer
        self.mine = lines // WARPS  # lines of a warp
        self.target = ring.iterator.toint()
        self.table = smem.allocate_tensor(Int32, cute.make_layout((self.count, FOUR, WARPS)), byte_alignment=PIECE)

        def start(line: int, block: int) -> int:
            at = (block * across, line) if along_k else (line, block * across)
            return self.size * place(*at)

        self.atoms = [[start(i * LINES, block) for block in range(self.blocks)] for i in range(self.count)]
        misplaced = any(x % (LINE * LINES) for line in self.atoms for x in line) or start(1, 0) != LINE
        if self.mine % WARP or self.count % FOUR or width % across or misplaced:
            raise ValueError(f"a tile {shape}: not made of atoms of {LINES} lines of {LINE} bytes, for {WARPS} warps")

    def start(self, warp: Int32) -> None:
        """A warp's lane: which chunk it copies of which line of an atom, and where the numbers of its lines stand."""
        self.warp, self.lane = warp, cute.arch.lane_idx()
        of_warp, self.chunk = self.lane // CHUNKS, self.lane % CHUNKS  # its line, of the warp's in an atom
        line = self.line(of_warp)
        self.place = self.target + line * LINE + (self.chunk ^ line) * PIECE
        self.entries = self.table.iterator.toint() + (warp * FOUR + of_warp) * (self.count * ENTRY)
        self.numbers = cute.make_rmem_tensor(self.mine // WARP, Int32)

    def line(self, number: Any) -> Any:
        """The line of the tile that is a warp's line."""
        return number // FOUR * LINES + self.warp * FOUR + number % FOUR

    def read(self, first: Int32, end: Int32) -> None:
        """Starts to read the numbers of a tile's lines, which are those from ``first`` to before ``end``."""
        for i in range(self.mine // WARP):
            self.numbers[i] = self.index[cutlass.min(first + self.line(i * WARP + self.lane), end - 1)]

    def keep(self, first: Int32, end: Int32) -> None:
        """Puts these numbers into the table."""
        there = Int32(self.tensor.shape[1 if self.along_k else 0])
        cute.arch.sync_warp()
        for i in range(self.mine // WARP):
            own, number = i * WARP + self.lane, self.numbers[i]
            inside = (first + self.line(own) < end) & (number >= 0) & (number < there)
            self.table[own // FOUR, own % FOUR, self.warp] = Int32(select_(inside, number, Int32(-1)))
        cute.arch.sync_warp()

    def copy(self, across: Int32, stage: Int32) -> None:
        """Starts to copy the lines, from their element ``across`` on, into a buffer."""
        dim = 0 if self.along_k else 1
        pitch, first = Int64(Int32(self.tensor.stride[1 - dim] * self.size)), across * self.size + self.chunk * PIECE
        begin, size = self.tensor.iterator.toint() + Int64(first), Int32(self.tensor.shape[dim] * self.size)
        beyond = [Int32(select_(first + block * LINE < size, Int32(0), Int32(-1))) for block in range(self.blocks)]
        place = self.place + stage * self.bytes
        for start in range(0, self.count, FOUR):
            entries = cute.make_ptr(Int32, self.entries + start * ENTRY, cute.AddressSpace.smem, assumed_align=PIECE)
            numbers = cute.make_rmem_tensor(FOUR, Int32)
            numbers.store(cute.make_tensor(entries, cute.make_layout(FOUR)).load())
            for i in range(FOUR):
                line = begin + Int64(numbers[i]) * pitch
                for block in range(self.blocks):
                    target = place + self.atoms[start + i][block]
                    copy_or_clear(target, line + block * LINE, (numbers[i] | beyond[block]) < 0)


class Boxes(Lines):
    """Rows by the copy engine, which brings zeros for a number that no row has, and counts the bytes itself.

    ``share`` CTAs, of which this one is number ``rank``, ``mask`` in the cluster, fetch a part of the rows each and
    send it to all. ``engine``: what :func:`boxes_of` made.
    """

    def __init__(
        self,
        engine: tuple[Any, Any],
        index: cute.Tensor,
        buffers: cute.Tensor,
        shape: tuple[int, int],
        place: Callable[[int, int], int],
        smem: Any,
        ring: Ring,
        share: tuple[int, Int32, Int32],
    ) -> None:
        self.atom, view = engine
        super().__init__(0, False, view, index, buffers, shape, place, smem)
        self.ring, (self.share, self.rank, self.mask) = ring, share
        self.mine //= self.share
        self.starts = [self.atoms[row // LINES][0] + row % LINES * LINE for row in range(self.mine)]

    def start(self, warp: Int32) -> None:
        """A warp's first row of the tile, and its place in the table."""
        self.lane, self.first = cute.arch.lane_idx(), (self.rank * WARPS + warp) * self.mine
        self.entries = cute.make_tensor(self.table.iterator + warp * self.mine, cute.make_layout(self.mine))
        self.numbers = cute.make_rmem_tensor(self.mine // WARP, Int32)

    def line(self, number: Any) -> Any:
        """The row of the tile that is a warp's row."""
        return self.first + number

    def keep(self, first: Int32, end: Int32) -> None:
        """Puts the numbers into the table."""
        cute.arch.sync_warp()
        for i in range(self.mine // WARP):
            own = i * WARP + self.lane
            inside = first + self.line(own) < end
            self.entries[own] = Int32(select_(inside, self.numbers[i], Int32(-1)))
        cute.arch.sync_warp()

    @cute.jit
    def copy(self, across: Int32, stage: Int32) -> None:
        """Starts to copy the rows, from their element ``across`` on, into a buffer."""
        engine, full = described(self.atom), (self.ring.full + stage).toint()
        pitch = const_expr(self.atoms[1][0] - self.atoms[0][0])  # of eight rows
        target = self.target + stage * self.bytes + self.first // LINES * pitch
        with cute.arch.elect_one():
            for start in cutlass.range_constexpr(0, self.mine, FOUR):
                place = self.entries.iterator.toint() + start * ENTRY
                entries = cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=PIECE)
                numbers = cute.make_rmem_tensor(FOUR, Int32)
                numbers.store(cute.make_tensor(entries, cute.make_layout(FOUR)).load())
                for i in cutlass.range_constexpr(FOUR):
                    self.box([target + const_expr(self.starts[start + i]), engine, across, numbers[i], full])

    def box(self, given: list) -> None:
        """Starts to copy 128 bytes of a row. The DSL's own copy would elect a thread for each."""
        kind, more = "", ""
        if self.share > 1:
            kind, more, given = ".multicast::cluster", ", {$r5}", [*given, Int16(self.mask)]
        cute.arch.inline_ptx(
            f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{kind} "
            f"[{{$r0}}], [{{$r1}}, {{{{$r2}}, {{$r3}}}}], [{{$r4}}]{more};",
            read_only_args=given,
        )


def boxes_of(tensor: cute.Tensor) -> tuple[Any, Any]:
    """The copy engine's atom and view (rows, k) of an operand (rows, k, 1), for 128 bytes of a row."""
    across = LINE * 8 // tensor.element_type.width
    flat = cute.make_tensor(tensor.iterator, cute.make_layout(tensor.shape[:2], stride=(tensor.stride[0], 1)))
    box = cute.make_layout((1, across), stride=(across, 1))
    layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, box)
    return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), flat, layout, (1, across)))


def described(atom: Any) -> Int64:
    """The address of the copy engine's description of a tensor."""
    field = ir.Attribute.parse("#cute_nvgpu.atom_copy_field_tmaload<tma_descriptor_ptr>")
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    return nvgpu.atom_get_value(kind, nvgpu.atom_make_exec_tma(atom._trait.value), field).toint()


def selected(tensor: cute.Tensor, index: cute.Tensor | None, along_k: bool) -> cute.Tensor:
    """An operand (rows, k, 1) with the size that the product sees: lines by number are as many as there are numbers."""
    if index is None:
        return tensor
    rows, k, batch = tensor.shape
    shape = (rows, index.shape[0], batch) if along_k else (index.shape[0], k, batch)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.stride))


class Gather:
    """The lines of all ``sources`` for the tiles of a ``feed``, of k tiles ``depth`` deep, into the buffers of a ring.

    WARPS warps serve, and bring the ``factors`` of k tiles too, where there are some. Boxes are counted by the copy
    engine. Else each thread arrives at a buffer's barrier when its copies are done; who reads the buffer by another
    proxy needs a fence then. Or each warp does, by ``arrive``, after a fence of its own, at a barrier of another CTA,
    which no copy reaches; that fence waits for later copies too.
    """

    def __init__(
        self,
        sources: tuple[Lines, ...],
        ring: Ring,
        feed: Feed,
        depth: int,
        arrive: Callable[[Any], None] | None,
        factors: Factors | None = None,
    ) -> None:
        self.sources, self.ring, self.feed, self.depth, self.arrive = sources, ring, feed, depth, arrive
        self.factors, self.boxes = factors, isinstance(sources[0], Boxes)
        self.ahead = min(max(ring.stages - 2, 1), IN_FLIGHT - 1)  # k tiles in flight when one's are waited for

    @cute.jit
    def serve(self, warp: Int32, begins: cutlass.Constexpr[Callable[[Any], Any]]) -> None:
        """One warp of WARPS. ``begins`` tells the first row of A and of B of a tile."""
        ring, depth = self.ring, const_expr(self.depth)
        self.start(warp)
        stage, phase, oldest, waiting = Int32(0), Int32(1), Int32(0), Int32(0)
        buffer = (Int32(0), Int32(1))  # in the ring of factors
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            rows = begins(work)
            if work.k < work.k_end:
                self.begin(rows, work)
            if const_expr(self.factors is not None):
                place = self.factors.begin(rows, work)
            for k in cutlass.range(work.k_tiles(depth), unroll=1):
                cute.arch.mbarrier_wait(ring.empty + stage, phase)
                self.copy(rows, work, work.k + k * depth, stage)
                if const_expr(self.factors is not None):
                    self.factors.bring_side(warp, place, work.k + k * depth, *buffer)
                    buffer = advanced(self.factors.ring, *buffer)
                if const_expr(self.arrive is None):
                    if const_expr(not self.boxes):
                        cute.arch.cp_async_mbarrier_arrive_noinc(ring.full + stage)
                else:
                    cute.arch.cp_async_commit_group()
                    if waiting == self.ahead:
                        self.hand_over(self.ahead)
                        self.arrive(ring.full + oldest)
                        oldest, _ = advanced(ring, oldest, Int32(0))
                    else:
                        waiting += 1
                stage, phase = advanced(ring, stage, phase)
            if const_expr(self.arrive is not None and self.sources[0].along_k):
                if (work.k >= work.k_end) & (waiting > 0):
                    # Nothing here pushes on what is in flight, and until that is multiplied the feed may give no tiles.
                    self.hand_over(0)
                    for _ in cutlass.range(waiting, unroll=1):
                        self.arrive(ring.full + oldest)
                        oldest, _ = advanced(ring, oldest, Int32(0))
                    waiting = Int32(0)
            cursor = self.feed.next(cursor)
        if const_expr(not self.boxes):
            self.hand_over(0)
        if const_expr(self.arrive is not None):
            for _ in cutlass.range(waiting, unroll=1):
                self.arrive(ring.full + oldest)
                oldest, _ = advanced(ring, oldest, Int32(0))

    def start(self, warp: Int32) -> None:
        """Before all: what a lane copies."""
        for source in self.sources:
            source.start(warp)
        if self.factors is not None:
            self.factors.start()

    def begin(self, rows: tuple[Int32, Int32], work: Any) -> None:
        """Before a tile's first k tile."""
        for source in self.sources:
            first, end = (work.k, work.k_end) if source.along_k else (rows[source.side], work.end)
            source.read(first, end)
            if not source.along_k:
                source.keep(first, end)

    def copy(self, rows: tuple[Int32, Int32], work: Any, k: Int32, stage: Int32) -> None:
        """Starts the copies of a k tile; where lines are along k, reads the numbers of the next one's meanwhile."""
        for source in self.sources:
            if source.along_k:
                source.keep(k, work.k_end)
            source.copy(rows[source.side] if source.along_k else k, stage)
            if source.along_k:
                source.read(k + self.depth, work.k_end)

    def hand_over(self, left: int) -> None:
        """Waits for all copies but those of the last ``left`` k tiles: what they wrote is the tensor cores' now."""
        cute.arch.cp_async_wait_group(left)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
