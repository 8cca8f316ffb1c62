"""Attention on Blackwell, forward: O = softmax(scale Q K^T + mask) V.

S = Q K^T of 128 rows and 128 keys is in tensor memory, of which a thread of four warps has a lane, that is a row: its
maximum and its sum need no other thread. The exponentials P go back to where S was, and are the left operand of P V
from there. O stays in tensor memory until the end.

There are two buffers of S, so that the tensor cores compute one while the softmax of the other runs. Values of up to
128 elements leave room for two tiles of rows, each with a buffer and with four warps for its softmax: K and V are read
once for both. Longer ones take one tile, whose blocks of keys use the buffers in turn. Of two more warps, one lets the
copy engine fetch, the other issues all products: P V of a block, then Q K^T of the one that has the same buffer next.
Since they are executed in this order, no barrier has to tell that a buffer is free.

K and V come in pieces of 128 keys and 64 or 128 elements of a head, which share a ring. Blocks are taken from the last
to the first, so that those at the mask's edge come first. What is subtracted from scores follows their maximum only
where that has grown by more than a slack; O is multiplied then, which is so seldom that the warps of the softmax do it.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import ForwardConfiguration, softmax
from cudnn_kernels.attention.forward import Call, Forward, K, Problem, V
from cudnn_kernels.pipeline import barriers, ring
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.shared_memory import ring_stages
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.tensor_memory import CHUNK, COLUMNS, LANES, Product, TensorMemoryRows, commit

ROWS = LANES  # of a tile
KEYS = 128  # of a block
GROUP = 128  # threads of a softmax
BUFFERS = 2  # of S
REGISTERS = {2: (72, 216)}  # of a thread of the last warpgroup, and of others, by tiles; for one tile all have enough


@dataclass
class Room:
    """Tensor memory, and shared memory: Q by tile, pieces of K and V with their ring, O by tile where Q was or apart.

    Barriers are of Q by tile, and by buffer of S, of P and of the product that adds to O. With one barrier for all
    products of a tile, a wait for the last one could return while the one before still runs: a wait tells phases apart
    by their parity alone.
    """

    pointer: cute.Pointer
    q: cute.Tensor
    pieces: cute.Tensor
    o: cute.Pointer
    ring: ring.Ring
    q_full: Any
    s_full: Any
    p_full: Any
    o_full: Any


class AttentionForward(Forward):
    """The kernel for one :class:`ForwardConfiguration`. Its tile is (128 or 256, 128)."""

    rows, score_rows = ROWS, TensorMemoryRows()

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.tiles = self.tile_m // ROWS
        self.ahead = BUFFERS // self.tiles  # blocks whose scores are computed before the first one's products
        self.piece = math.gcd(128, c.head, c.head_v)
        self.key_pieces, self.value_pieces = c.head // self.piece, c.head_v // self.piece
        self.boxes[K] = self.boxes[V] = (KEYS, self.piece)
        self.apart = self.result.width > self.dtype.width  # whether O does not fit where Q was
        self.mma_warp, self.threads = self.tiles * GROUP // 32, (self.tiles + 1) * GROUP
        if c.tile != (self.tiles * ROWS, KEYS) or self.tiles * c.head_v > COLUMNS - BUFFERS * KEYS:
            raise ValueError(f"{c}: tiles are (128, 128) or, for head_v of at most 128, (256, 128)")

    def layout(self, rows: int, columns: int, stages: int = 1, dtype: Any = None) -> Any:
        return sm100.make_smem_layout(OperandMajorMode.K, (rows, columns), dtype or self.dtype, stages)

    def stages(self) -> int:
        """Pieces that fit beside Q, and O."""
        apart = self.tile_m * self.c.head_v * self.result.width // 8 if self.apart else 0
        return ring_stages(self.bytes(self.tile_m, self.c.head) + apart, self.bytes(KEYS, self.piece))

    @cute.jit
    def body(self, call: Call) -> None:
        """The roles of the warps."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        sQ, pieces = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in (self.layout(ROWS, c.head, self.tiles), self.layout(KEYS, self.piece, self.stages()))
        )
        o = sQ.iterator
        if const_expr(self.apart):
            o = smem.allocate_array(self.result, self.tile_m * c.head_v, byte_alignment=1024)
        full = {"q": (self.tiles, 1), "s": (BUFFERS, 1), "p": (BUFFERS, GROUP // 32), "o": (BUFFERS, 1)}
        made, of_pieces = barriers.allocate(smem, full), ring.Ring.allocate(smem, self.stages())
        holder = tensor_memory.allocate(smem, warp)
        if thread == 0:
            ring.initialise(of_pieces, 1, 1)
            barriers.initialise(made, full)
            self.prefetch(call)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        p = self.problem(call.work, *self.tile(call.work))
        begin, _, _, end = self.blocks(p)
        if not self.exists(p):
            end = begin
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        room = Room(pointer, sQ, pieces, o, of_pieces, *(made[x] for x in "qspo"))
        if warp >= self.mma_warp:
            if const_expr(self.tiles in REGISTERS):
                cute.arch.setmaxregister_decrease(REGISTERS[self.tiles][0])
            if warp == self.mma_warp:
                self.multiply(room, end - begin)
            elif warp == self.mma_warp + 1:
                self.load(call, room, p, begin, end)
        else:
            if const_expr(self.tiles in REGISTERS):
                cute.arch.setmaxregister_increase(REGISTERS[self.tiles][1])
            tile = cute.arch.make_warp_uniform(thread // GROUP)
            if self.exists(p):
                self.soften(call, room, p, tile, thread - tile * GROUP, begin, end)
            tensor_memory.free(pointer, warp, self.tiles * GROUP)

    @cute.jit
    def load(self, call: Call, room: Room, p: Problem, begin: Int32, end: Int32) -> None:
        """One warp: fetches Q, K and V."""
        if end > begin:
            self.load_rows(call, room, p)
            position, blocks = Int32(0), end - begin
            for ahead in cutlass.range_constexpr(self.ahead):
                if ahead < blocks:
                    position = self.fetch(call, room, p, K, end - 1 - ahead, position)
            for block in cutlass.range(blocks, unroll=1):
                n = end - 1 - block
                position = self.fetch(call, room, p, V, n, position)
                if n - self.ahead >= begin:
                    n -= self.ahead
                    position = self.fetch(call, room, p, K, n, position)

    def load_rows(self, call: Call, room: Room, p: Problem) -> None:
        """Starts the copies of Q."""
        for tile in range(self.tiles):
            self.fetch_rows(call, room.q, room.q_full, p, tile)

    def fetch(self, call: Call, room: Room, p: Problem, which: int, n: Int32, position: Int32) -> Int32:
        """Fetches a block of K or V, piece by piece. The position after them in the ring."""
        count = self.key_pieces if which == K else self.value_pieces
        for piece in range(count):
            stage = ring.claim(room.ring, position + piece, self.bytes(KEYS, self.piece))
            self.fetch_keys(call, room.pieces[None, None, stage], room.ring.full + stage, p, which, n, piece)
        return position + count

    @cute.jit
    def multiply(self, room: Room, blocks: Int32) -> None:
        """One warp: issues all products."""
        position = Int32(0)
        for ahead in cutlass.range_constexpr(self.ahead):
            if ahead < blocks:
                for tile in cutlass.range_constexpr(self.tiles):
                    if const_expr(ahead == 0):
                        cute.arch.mbarrier_wait(room.q_full + tile, 0)
                    self.multiply_keys(room, tile, ahead + tile, position)
                position += self.key_pieces
        for block in cutlass.range(blocks, unroll=1):
            for tile in cutlass.range_constexpr(self.tiles):
                buffer, phase = self.buffer(block, tile)
                cute.arch.mbarrier_wait(room.p_full + buffer, phase)
                self.multiply_values(room, tile, buffer, position, block > 0)
                if block + self.ahead < blocks:
                    self.multiply_keys(room, tile, buffer, position + self.value_pieces)
            position += self.value_pieces
            if block + self.ahead < blocks:
                position += self.key_pieces

    def buffer(self, block: Int32, tile: Any) -> tuple[Any, Int32]:
        """The buffer of S that a tile's block has, counted in the order of blocks, and the phase of its barriers."""
        return (tile, block % 2) if self.tiles == BUFFERS else (block % BUFFERS, block // BUFFERS % 2)

    def multiply_keys(self, room: Room, tile: int, buffer: Any, position: Int32) -> None:
        """Issues Q K^T of a tile and a block."""
        product = Product(self.dtype, KEYS, self.piece)
        left, target = product.left(room.q, tile), room.pointer + buffer * KEYS
        for piece in range(self.key_pieces):
            stage = ring.ready(room.ring, position + piece)
            product.issue(target, left, room.pieces, stage, piece > 0, piece)
            if tile == self.tiles - 1:
                commit(room.ring.empty + stage)
        commit(room.s_full + buffer)

    def multiply_values(self, room: Room, tile: int, buffer: Any, position: Int32, adds: Any) -> None:
        """Issues P V of a tile and a block; ``adds`` to what O is so far."""
        product, out = Product(self.dtype, self.piece, KEYS, rounded=True), self.out(room, tile)
        left = product.left_rounded(room.pointer + buffer * KEYS)
        for piece in range(self.value_pieces):
            stage = ring.ready(room.ring, position + piece)
            product.issue(out + piece * self.piece, left, room.pieces, stage, adds)
            if tile == self.tiles - 1:
                commit(room.ring.empty + stage)
        commit(room.o_full + buffer)

    def out(self, room: Room, tile: Any) -> cute.Pointer:
        """Where a tile's O is in tensor memory: behind the buffers of S."""
        return room.pointer + (BUFFERS * KEYS + tile * self.c.head_v)

    @cute.jit
    def soften(self, call: Call, room: Room, p: Problem, tile: Int32, thread: Int32, begin: Int32, end: Int32) -> None:
        """Four warps: the softmax of a tile's rows, then O and LSE."""
        row, out = p.row + tile * ROWS, self.out(room, tile)
        state = self.state(call)
        self.reset(state, call, p, thread)
        _, whole_begin, whole_end, _ = p.mask.blocks(row, cutlass.min(row + ROWS, p.mask.queries) - 1, KEYS)
        for block in cutlass.range(end - begin, unroll=1):
            n = end - 1 - block
            buffer, phase = self.buffer(block, tile)
            where = room.pointer + buffer * KEYS
            cute.arch.mbarrier_wait(room.s_full + buffer, phase)
            scores = cute.make_rmem_tensor(KEYS, Float32)
            tensor_memory.load(where, thread, scores)
            cute.arch.fence_view_async_tmem_load()
            softmax.cap(scores, call.cap_factor)
            if n >= whole_end or n < whole_begin:
                self.hide(scores, p, row, thread, n)
            slack = softmax.SLACK if self.dtype.width == 16 else 0.0
            (correction,) = softmax.update(state, scores, self.score_rows, KEYS, slack)
            tensor_memory.store_rounded(where, thread, scores, self.dtype)
            if block > 0:
                if cute.arch.vote_any_sync(correction != 1.0):
                    before, multiplied = self.buffer(block - 1, tile)
                    cute.arch.mbarrier_wait(room.o_full + before, multiplied)
                    self.correct(out, correction, thread)
            cute.arch.fence_view_async_tmem_store()
            cute.arch.sync_warp()
            barriers.arrive_once(room.p_full + buffer)
        factor, log_sum = softmax.finish(state, self.score_rows, 0)
        if end > begin:
            last, done = self.buffer(end - begin - 1, tile)
            cute.arch.mbarrier_wait(room.o_full + last, done)
        self.store_log_sums(call, p, row, thread, [log_sum])
        self.store(call, room, p, factor * call.scale_output, tile, thread, end > begin)

    @cute.jit
    def store(
        self, call: Call, room: Room, p: Problem, factor: Float32, tile: Int32, thread: Int32, exists: Boolean
    ) -> None:
        """A tile's O, times a factor; it is 0 where nothing ``exists``."""
        c = self.c
        one = self.layout(ROWS, c.head_v, dtype=self.result)
        start = room.o + tile * (ROWS * (c.head_v if self.apart else c.head))
        where = cute.recast_ptr(start, one.inner, self.result)
        sO = cute.make_tensor(where, cute.slice_(one.outer, (None, None, 0)))
        tensor_memory.to_shared(self.out(room, tile), thread, factor, sO, exists)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.wait(Barrier.GROUP + tile, GROUP)
        if thread < 32:
            self.store_rows(call, sO, p, p.row + tile * ROWS)
            cute.arch.cp_async_bulk_wait_group(0)

    def correct(self, out: cute.Pointer, factor: Float32, thread: Int32) -> None:
        """Multiplies a thread's row of O."""
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for first in range(0, self.c.head_v, CHUNK):
            tensor_memory.load(out + first, thread, values)
            cute.arch.fence_view_async_tmem_load()
            values.store(values.load() * factor)
            tensor_memory.store(out + first, thread, values)
