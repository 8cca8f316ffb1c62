"""Attention on Blackwell, backward, without sums that several CTAs add to.

    P = exp(scale Q K^T - LSE)   dP = dO V^T   dS = P (dP - D)   D = the sum of O dO over a row
    dQ = scale dS K              dK = scale dS^T Q               dV = P^T dO

All gradients are the same computation. A CTA has 128 rows, of queries for dQ and of keys for the others, and goes
through blocks of 64 columns, of keys or of queries: S, and dP where it is needed, are products of the rows with the
block; P or dS are multiplied by the block again and added up. Results are the same from call to call. The mask of keys
that see queries is that of queries that see keys, turned.

S and dP are in tensor memory, a row in a thread's lane. P and dS go back to where they were, in 16 bits, and are left
operands from there. Two buffers of S and dP let the tensor cores compute one while the other becomes dS; they take half
of tensor memory. The other half has the sums: dK and dV together, for heads of up to 128 elements, so that seven
products do, in two kernels. Longer heads take a kernel for each, and eight products. A pair of CTAs would have room.

D and LSE, times log2(e), are in the workspace: of each sequence whole tiles of rows, so that 16 bytes can be loaded at
a time.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import GradientsConfiguration, sequences
from cudnn_kernels.attention.around import prepare
from cudnn_kernels.attention.backward import Block, Work, block_of, place_of, work_of
from cudnn_kernels.attention.softmax import Scale, cap
from cudnn_kernels.configuration import SHARED_MEMORY
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import barriers, ring
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.pipeline.copy import fetch, partition
from cudnn_kernels.shared_memory import BARRIERS
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.tensor_memory import CHUNK, COLUMNS, LANES, Product, TensorMemoryRows, commit

ROWS = LANES  # of a CTA
BLOCK = 64  # columns of a step
THREADS = 256  # four warps that compute; of four others, one loads and one multiplies
MMA_WARP, LOAD_WARP = 4, 5
BUFFERS = 2  # of S, and of dP
READY = {"rows": (1, 1), "s": (BUFFERS, 1), "p": (BUFFERS, ROWS // 32), "done": (1, 1)}
"""Barriers of the rows' operands, of S with dP, of P with dS, and of the sums."""
SUMS = COLUMNS - BUFFERS * 2 * BLOCK  # columns of tensor memory for sums


class AttentionBackward(Kernel):
    """The kernels for one :class:`GradientsConfiguration`."""

    def __init__(self, configuration: GradientsConfiguration) -> None:
        super().__init__(configuration)
        if configuration.tile != (ROWS, BLOCK):
            raise ValueError(f"{configuration}: tiles are ({ROWS}, {BLOCK})")

    def launch(self, given: Mapping[str, Any]) -> None:
        c, values = self.c, prepare(self.c, given)
        of_keys = [("dk", "dv")] if c.head + c.head_v <= SUMS else [("dk",), ("dv",)]  # for which there is room
        for sums in (("dq",), *of_keys):
            Gradients(c, sums).launch(given, [values.log_sums, values.products])


class Gradients:
    """The kernel for some gradients: ``sums`` over blocks of dS or, for dv, of P, times an operand of the columns.

    ``rows`` are the left operands of S and, where dS is needed, of dP, ``columns`` the right ones. Of these the first
    is the factor of dS, the second that of P.
    """

    score_rows = TensorMemoryRows()

    def __init__(self, configuration: GradientsConfiguration, sums: tuple[str, ...]) -> None:
        c = self.c = configuration
        self.dtype, self.sums, self.of_queries = DTYPES[c.dtype], sums, "dq" in sums
        of_queries, of_keys = ("q", "do"), ("k", "v")
        rows, self.columns = (of_queries, of_keys) if self.of_queries else (of_keys, of_queries)
        self.rows = rows[:1] if sums == ("dv",) else rows
        widths = {"q": c.head, "k": c.head, "v": c.head_v, "do": c.head_v}
        self.factors = [int(x == "dv") for x in sums]  # numbers among the columns' operands
        self.widths = [widths[self.columns[i]] for i in self.factors]  # of sums
        size = self.dtype.width // 8
        first, second = (widths[x] * BLOCK for x in self.columns)
        free = SHARED_MEMORY - BARRIERS - (sum(widths[x] for x in self.rows) * ROWS + 2 * first) * size
        self.stages = 2, min(2, free // (second * size))
        """Buffers of the columns' operands; of the second one, for long heads, there is room for one only."""
        self.boxes = {x: (ROWS, widths[x], 1) for x in self.rows}
        self.boxes |= {x: (BLOCK, widths[x], stages) for x, stages in zip(self.columns, self.stages, strict=True)}
        """Of every operand's buffer the rows, the elements of a head, and how many tiles it has."""

    def launch(self, given: Mapping[str, Any], values: list) -> None:
        """Launches it on a call's arguments by name and on LSE * log2(e) and D."""
        c = self.c
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = [(load, x, rows, width) for x, (rows, width, _) in self.boxes.items()]
        boxes += [(store, x, ROWS, width) for x, width in zip(self.sums, self.widths, strict=True)]
        copies = []
        for op, x, rows, width in boxes:
            one = cute.slice_(self.layout(rows, width, 1), (None, None, 0))
            copies.append(cpasync.make_tiled_tma_atom(op, sequences.copied(given[x], c.packed), one, (rows, width)))
        work, ctas = work_of(c, given, ROWS, self.of_queries)
        self.kernel(copies, values, work, Scale(given["scale_softmax"], given.get("softcap"))).launch(
            grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=given["stream"], min_blocks_per_mp=1
        )

    def layout(self, rows: int, width: int, stages: int) -> Any:
        """(rows, elements, stage) of buffers in shared memory, whatever product they are for."""
        return sm100.make_smem_layout(OperandMajorMode.K, (rows, width), self.dtype, stages)

    @cute.kernel
    def kernel(self, copies: list, values: list, work: Work, scale: Scale) -> None:
        """The roles of the warps."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        layouts = {x: self.layout(*box) for x, box in self.boxes.items()}
        buffers = {
            x: smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for x, layout in layouts.items()
        }
        b = barriers.allocate(smem, READY)
        rings = [ring.Ring.allocate(smem, stages) for stages in self.stages]
        holder = tensor_memory.allocate(smem, warp)
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                ring.initialise(rings[i], 1, 1)
            barriers.initialise(b, READY)
            for i in cutlass.range_constexpr(len(copies)):
                cpasync.prefetch_descriptor(copies[i][0])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        copied = dict(zip((*self.boxes, *self.sums), copies, strict=True))
        index, _, _ = cute.arch.block_idx()  # with a causal mask, rows that see most come first
        block = block_of(self.c, work, index, ROWS, BLOCK, self.of_queries, self.of_queries)
        if warp == LOAD_WARP:
            self.load(copied, buffers, b, rings, block)
        elif warp == MMA_WARP:
            self.multiply(pointer, buffers, b, rings, block.steps)
        elif warp < MMA_WARP:
            if block.row < block.mask.queries:
                self.compute(pointer, b, block, values, scale, thread)
                self.store(pointer, buffers, block, copied, scale.scores, thread)
            tensor_memory.free(pointer, warp, ROWS)

    name(kernel, "cudnn_attention_gradient_sm100")

    @cute.jit
    def load(self, copied: dict, buffers: dict, b: dict, rings: list, block: Block) -> None:
        """One warp: fetches the rows' operands, then those of the columns, block by block."""
        if block.steps > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(b["rows"], sum(self.bytes(x) for x in self.rows))
            for x in self.rows:
                rows = sequences.copied_rows(copied[x][1], block.head, block.batch, block.first_row, block.mask.queries)
                tile = cute.local_tile(cute.domain_offset((block.row, 0), rows), self.boxes[x][:2], (0, 0))
                fetch(copied[x][0], tile, buffers[x][None, None, 0], b["rows"])
        for step in cutlass.range(block.steps, unroll=1):
            head, number = place_of(block, step)
            for i, x in enumerate(self.columns):
                rows = sequences.copied_rows(copied[x][1], head, block.batch, block.first_column, block.mask.keys)
                tile = cute.local_tile(rows, self.boxes[x][:2], (number, 0))
                stage = ring.claim(rings[i], step, self.bytes(x))
                fetch(copied[x][0], tile, buffers[x][None, None, stage], rings[i].full + stage)

    def bytes(self, x: str) -> int:
        """Of an operand's tile in shared memory."""
        rows, width, _ = self.boxes[x]
        return rows * width * self.dtype.width // 8

    @cute.jit
    def multiply(self, pointer: cute.Pointer, buffers: dict, b: dict, rings: list, steps: Int32) -> None:
        """One warp: issues all products."""
        if steps > 0:
            cute.arch.mbarrier_wait(b["rows"], 0)
        for step in cutlass.range_constexpr(BUFFERS):
            if step < steps:
                self.multiply_rows(pointer, buffers, b, rings, Int32(step))
        for step in cutlass.range(steps, unroll=1):
            cute.arch.mbarrier_wait(b["p"] + step % BUFFERS, step // BUFFERS % 2)
            self.multiply_factors(pointer, buffers, rings, step)
            if step + BUFFERS < steps:
                self.multiply_rows(pointer, buffers, b, rings, step + BUFFERS)
        if steps > 0:
            commit(b["done"])

    def multiply_rows(self, pointer: cute.Pointer, buffers: dict, b: dict, rings: list, step: Int32) -> None:
        """Issues S and dP of a step."""
        buffer = step % BUFFERS
        for i, (row, column) in enumerate(zip(self.rows, self.columns, strict=False)):
            product, stage = Product(self.dtype, BLOCK, self.boxes[row][1]), ring.ready(rings[i], step)
            target = pointer + (buffer * 2 + i) * BLOCK
            product.issue(target, product.left(buffers[row]), buffers[column], stage, False)
            if i not in self.factors:
                commit(rings[i].empty + stage)
        commit(b["s"] + buffer)

    def multiply_factors(self, pointer: cute.Pointer, buffers: dict, rings: list, step: Int32) -> None:
        """Issues what a step adds to the sums."""
        for number, (i, width) in enumerate(zip(self.factors, self.widths, strict=True)):
            product = Product(self.dtype, width, BLOCK, rounded=True)
            left = product.left_rounded(pointer + (step % BUFFERS * 2 + 1 - i) * BLOCK)
            stage, right = ring.ready(rings[i], step), buffers[self.columns[i]]
            product.issue(self.accumulator(pointer, number), left, right, stage, step > 0)
            commit(rings[i].empty + stage)

    def accumulator(self, pointer: cute.Pointer, number: int) -> cute.Pointer:
        """Where a sum is in tensor memory: behind the buffers of S and dP."""
        return pointer + (BUFFERS * 2 * BLOCK + sum(self.widths[:number]))

    @cute.jit
    def compute(self, pointer: cute.Pointer, b: dict, p: Block, values: list, scale: Scale, thread: Int32) -> None:
        """Four warps: P and dS of all steps."""
        scale_log2, factor = scale.powers()
        log_sum, product = Float32(0.0), Float32(0.0)
        if const_expr(self.of_queries):
            log_sum, product = (x[p.first_block * ROWS + p.row + thread, p.head, p.batch] for x in values)
        for step in cutlass.range(p.steps, unroll=1):
            head, block = place_of(p, step)
            buffer = step % BUFFERS
            where = pointer + buffer * 2 * BLOCK
            cute.arch.mbarrier_wait(b["s"] + buffer, step // BUFFERS % 2)
            whole = p.mask.whole(p.row, ROWS, block * BLOCK, BLOCK)
            for chunk in cutlass.range_constexpr(BLOCK // CHUNK):
                column = block * BLOCK + chunk * CHUNK
                scores, gradients = (cute.make_rmem_tensor(CHUNK, Float32) for _ in range(2))
                tensor_memory.load(where + chunk * CHUNK, thread, scores)
                if const_expr(len(self.rows) == 2):
                    tensor_memory.load(where + BLOCK + chunk * CHUNK, thread, gradients)
                cute.arch.fence_view_async_tmem_load()
                cap(scores, factor)
                if not whole:
                    p.mask.hide(scores, self.score_rows, thread, p.row, column, CHUNK)
                for i in cutlass.range_constexpr(0, CHUNK, 4):
                    subtracted, sums = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
                    subtracted.fill(product)
                    sums.fill(log_sum)
                    if const_expr(not self.of_queries):
                        self.fetch_values(values[0], sums, head, p, column + i)
                        self.fetch_values(values[1], subtracted, head, p, column + i)
                    for j in cutlass.range_constexpr(4):
                        score = scores[i + j]
                        scores[i + j] = cute.math.exp2(score * scale_log2 - sums[j], fastmath=True)
                        if const_expr(len(self.rows) == 2):
                            gradients[i + j] = scores[i + j] * (gradients[i + j] - subtracted[j])
                            if const_expr(self.c.softcap):
                                gradients[i + j] = gradients[i + j] * cute.arch.fmax(1.0 - score * score, 0.0)
                for x in cutlass.range_constexpr(len(self.sums)):
                    part = const_expr(1 - self.factors[x])
                    back = where + (part * BLOCK + chunk * CHUNK // 2)
                    tensor_memory.store_rounded(back, thread, (scores, gradients)[part], self.dtype)
            cute.arch.fence_view_async_tmem_store()
            cute.arch.sync_warp()
            barriers.arrive_once(b["p"] + buffer)
        if p.steps > 0:
            cute.arch.mbarrier_wait(b["done"], 0)

    def fetch_values(self, source: cute.Tensor, target: cute.Tensor, head: Int32, p: Block, row: Int32) -> None:
        """Four values of query rows, as many as 16 bytes hold."""
        values = source[None, head, p.batch]
        cute.autovec_copy(cute.local_tile(values, (4,), ((p.first_block * ROWS + row) // 4,)), target)

    @cute.jit
    def store(
        self, pointer: cute.Pointer, buffers: dict, p: Block, copied: dict, scale: Float32, thread: Int32
    ) -> None:
        """Writes the results, through the buffers of the rows' operands."""
        outs = []
        for i, (x, width) in enumerate(zip(self.rows, self.widths, strict=False)):
            layout = cute.slice_(self.layout(ROWS, width, 1), (None, None, 0))
            outs.append(cute.make_tensor(buffers[x].iterator, layout.outer))
            factor = scale if const_expr(self.factors[i] == 0) else Float32(1.0)
            tensor_memory.to_shared(self.accumulator(pointer, i), thread, factor, outs[i], p.steps > 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.wait(Barrier.GROUP, ROWS)
        if thread < 32:
            for out, x, width in zip(outs, self.sums, self.widths, strict=True):
                atom, tensor = copied[x]
                rows = sequences.copied_rows(tensor, p.head, p.batch, p.first_row, p.mask.queries)
                tile = cute.local_tile(cute.domain_offset((p.row, 0), rows), (ROWS, width), (0, 0))
                source, target = partition(atom, out, tile)
                cute.copy(atom, source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
