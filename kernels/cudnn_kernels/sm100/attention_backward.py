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

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences
from cudnn_kernels.attention.around import prepare
from cudnn_kernels.attention.forward import partition
from cudnn_kernels.attention.gradients import GradientsConfiguration, Pass
from cudnn_kernels.attention.mask import Mask, mask_of
from cudnn_kernels.attention.sequences import Sequence
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.configuration import SHARED_MEMORY
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import barriers, ring
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.shared_memory import BARRIERS
from cudnn_kernels.signature import bind
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.tensor_memory import CHUNK, COLUMNS, LANES, TensorMemoryRows, commit

ROWS = LANES  # of a CTA
VECTOR = 8  # elements of 16 bytes
BLOCK = 64  # columns of a step
THREADS = 256  # four warps that compute; of four others, one loads and one multiplies
MMA_WARP, LOAD_WARP = 4, 5
BUFFERS = 2  # of S, and of dP
READY = {"rows": (1, 1), "s": (BUFFERS, 1), "p": (BUFFERS, ROWS // 32), "done": (1, 1)}
"""Barriers of the rows' operands, of S with dP, of P with dS, and of the sums: how many, and each one's arrivals."""
SUMS = COLUMNS - BUFFERS * 2 * BLOCK  # columns of tensor memory for sums
K = OperandMajorMode.K


@dataclass
class Problem:
    """A CTA's rows, and the columns that they see: blocks from ``begin`` to before ``end`` of so many heads each.

    ``head`` is that of the rows, ``column_head`` the first one of the columns. ``first_value``: of the sequence's query
    rows among those in the workspace.
    """

    row: Int32
    head: Int32
    column_head: Int32
    column_heads: Int32
    batch: Int32
    first_row: Int32
    first_column: Int32
    first_value: Int32
    begin: Int32
    end: Int32
    mask: Mask


class AttentionBackward:
    """The kernels for one :class:`GradientsConfiguration`."""

    def __init__(self, configuration: GradientsConfiguration) -> None:
        self.c = configuration
        if configuration.tile != (ROWS, BLOCK):
            raise ValueError(f"{configuration}: tiles are ({ROWS}, {BLOCK})")

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        given = bind(self.c.slots(), arguments)
        values = prepare(self.c, given)
        for each in self.c.passes(SUMS):
            PassKernel(self.c, each).launch(given, [values.log_sums, values.products])


class PassKernel:
    """The kernel for one :class:`Pass`."""

    score_rows = TensorMemoryRows()

    def __init__(self, configuration: GradientsConfiguration, kernel_pass: Pass) -> None:
        c = self.c = configuration
        g = self.g = kernel_pass
        self.dtype = DTYPES[c.dtype]
        widths = {"q": c.head, "k": c.head, "v": c.head_v, "do": c.head_v}
        self.row_widths = [widths[name] for name in g.rows]
        self.column_widths = [widths[name] for name in g.columns]
        self.factors = [int(x == "dv") for x in g.sums]  # numbers among the columns' operands
        self.widths = [self.column_widths[i] for i in self.factors]

    def stages(self) -> tuple[int, int]:
        """Buffers of the columns' operands; of the second one, for long heads, there is room for one only."""
        size = self.dtype.width // 8
        free = SHARED_MEMORY - BARRIERS - (sum(self.row_widths) * ROWS + 2 * self.column_widths[0] * BLOCK) * size
        return 2, min(2, free // (self.column_widths[1] * BLOCK * size))

    def launch(self, given: dict[str, Any], values: list) -> None:
        """Launches it on a call's arguments by name and on LSE * log2(e) and D."""
        c, g = self.c, self.g
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = [(load, x, ROWS, width) for x, width in zip(g.rows, self.row_widths, strict=True)]
        boxes += [(load, x, BLOCK, width) for x, width in zip(g.columns, self.column_widths, strict=True)]
        boxes += [(store, x, ROWS, width) for x, width in zip(g.sums, self.widths, strict=True)]
        made = []
        for op, x, rows, width in boxes:
            one = cute.slice_(self.layout(rows, width, 1), (None, None, 0))
            made.append(cpasync.make_tiled_tma_atom(op, sequences.copied(given[x], c.packed), one, (rows, width)))
        q, k = (sequences.matrix(given[x], c.packed) for x in ("q", "k"))
        rows = q if g.of_queries else k
        offsets = (given.get("cum_seqlen_q"), given.get("cum_seqlen_k"))
        batches = offsets[0].shape[0] - 1 if c.packed else 1
        tiles = sequences.blocks_of(rows.shape[0], batches, ROWS, c.packed)
        self.kernel(
            [atom for atom, _ in made], [tensor for _, tensor in made], values, *offsets, q.shape[0], k.shape[0],
            q.shape[2] // k.shape[2], tiles, given["scale_softmax"], given["right"], given["left"],
        ).launch(
            grid=[tiles, rows.shape[2], rows.shape[3]], block=[THREADS, 1, 1], stream=given["stream"],
            min_blocks_per_mp=1,
        )  # fmt: skip

    def layout(self, rows: int, width: int, stages: int) -> Any:
        """(rows, elements, stage) of buffers in shared memory, whatever product they are for."""
        return sm100.make_smem_layout(K, (rows, width), self.dtype, stages)

    def score_mma(self) -> cute.TiledMma:
        """S or dP of a block."""
        return sm100.make_trivial_tiled_mma(self.dtype, self.dtype, K, K, Float32, tcgen05.CtaGroup.ONE, (ROWS, BLOCK))

    def product_mma(self, width: int) -> cute.TiledMma:
        """P or dS, from tensor memory, times a factor."""
        one, source = tcgen05.CtaGroup.ONE, tcgen05.OperandSource.TMEM
        tile = (ROWS, width)
        return sm100.make_trivial_tiled_mma(self.dtype, self.dtype, K, OperandMajorMode.MN, Float32, one, tile, source)

    @cute.kernel
    def kernel(
        self, atoms: list, tensors: list, values: list, offsets_q: Any, offsets_k: Any, queries: Int32,
        keys: Int32, group_heads: Int32, tiles: Int32, scale: Float32, right: Int32, left: Int32,
    ) -> None:  # fmt: skip
        """The roles of the warps."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        layouts = [self.layout(ROWS, width, 1) for width in self.row_widths]
        layouts += [
            self.layout(BLOCK, width, stages) for width, stages in zip(self.column_widths, self.stages(), strict=True)
        ]
        buffers = [smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner) for x in layouts]
        b = {x: smem.allocate_array(cutlass.Int64, n) for x, (n, _) in READY.items()}
        rings = [ring.Ring.allocate(smem, stages) for stages in self.stages()]
        holder = smem.allocate_array(Int32, 1)
        if warp == 0:
            cute.arch.alloc_tmem(COLUMNS, holder)
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                ring.initialise(rings[i], 1, 1)
            for x, (n, arrivals) in READY.items():
                for i in range(n):
                    cute.arch.mbarrier_init(b[x] + i, arrivals)
            for i in cutlass.range_constexpr(len(atoms)):
                cpasync.prefetch_descriptor(atoms[i])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        p = self.problem(offsets_q, offsets_k, queries, keys, group_heads, tiles, right, left)
        steps = (p.end - p.begin) * p.column_heads
        if warp == LOAD_WARP:
            self.load(atoms, tensors, buffers, b, rings, p, steps)
        elif warp == MMA_WARP:
            self.multiply(pointer, buffers, b, rings, steps)
        elif warp < MMA_WARP:
            if p.row < p.mask.queries:
                self.compute(pointer, buffers, b, p, atoms, tensors, values, scale, steps, thread)
            barriers.wait(Barrier.END, ROWS)
            if warp == 0:
                cute.arch.relinquish_tmem_alloc_permit()
                cute.arch.dealloc_tmem(pointer, COLUMNS)

    name(kernel, "cudnn_attention_gradient_sm100")

    @cute.jit
    def problem(
        self, offsets_q: Any, offsets_k: Any, queries: Int32, keys: Int32, group_heads: Int32, tiles: Int32,
        right: Int32, left: Int32,
    ) -> Problem:  # fmt: skip
        """What this CTA's rows are. With a causal mask, those that see most come first."""
        c, g = self.c, self.g
        tile, head, batch = cute.arch.block_idx()
        if const_expr(g.of_queries):
            tile = tiles - 1 - tile
        s, first_value = Sequence(batch, queries, keys, Int32(0), Int32(0)), Int32(0)
        if const_expr(c.packed):
            batch, tile = sequences.find_block(offsets_q if const_expr(g.of_queries) else offsets_k, tile, ROWS)
            s = sequences.packed(offsets_q, offsets_k, batch)
            first_value = sequences.first_block(offsets_q, batch, ROWS) * ROWS
            s.batch = Int32(0)
        mask = mask_of(c, s.queries, s.keys, right, left)
        first_row, first_column, column_head, heads = s.first_query, s.first_key, head // group_heads, Int32(1)
        if const_expr(not g.of_queries):
            mask = mask.turned()
            first_row, first_column, column_head, heads = s.first_key, s.first_query, head * group_heads, group_heads
        row = tile * ROWS
        begin, _, _, end = mask.blocks(row, cutlass.min(row + ROWS, mask.queries) - 1, BLOCK)
        if row >= mask.queries:
            end = begin
        return Problem(
            row, head, column_head, heads, s.batch, first_row, first_column, first_value, begin,
            cutlass.max(begin, end), mask,
        )  # fmt: skip

    def step(self, p: Problem, step: Int32) -> tuple[Int32, Int32]:
        """A step's head of the columns, and its block."""
        blocks = p.end - p.begin
        return p.column_head + step // blocks, p.begin + step % blocks

    @cute.jit
    def load(
        self, atoms: list, tensors: list, buffers: list, b: dict, rings: list, p: Problem, steps: Int32
    ) -> None:  # fmt: skip
        """One warp: fetches the rows' operands, then those of the columns, block by block."""
        count = const_expr(len(self.row_widths))
        if steps > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(b["rows"], self.bytes(ROWS, sum(self.row_widths)))
            for i in cutlass.range_constexpr(count):
                rows = sequences.copied_rows(tensors[i], p.head, p.batch, p.first_row, p.mask.queries)
                shape = (ROWS, self.row_widths[i])
                tile = cute.local_tile(cute.domain_offset((p.row, 0), rows), shape, (0, 0))
                target, source = partition(atoms[i], 0, 1, buffers[i][None, None, 0], tile)
                cute.copy(atoms[i], source, target, tma_bar_ptr=b["rows"])
        for step in cutlass.range(steps, unroll=1):
            head, block = self.step(p, step)
            for i in cutlass.range_constexpr(2):
                pieces, width = const_expr(rings[i]), self.column_widths[i]
                stage, phase = self.place(i, step)
                rows = sequences.copied_rows(tensors[count + i], head, p.batch, p.first_column, p.mask.keys)
                tile = cute.local_tile(rows, (BLOCK, width), (block, 0))
                ring.expect(pieces, stage, phase ^ 1, self.bytes(BLOCK, width))
                target, source = partition(atoms[count + i], 0, 1, buffers[count + i][None, None, stage], tile)
                cute.copy(atoms[count + i], source, target, tma_bar_ptr=pieces.full + stage)

    def place(self, operand: int, step: Int32) -> tuple[Int32, Int32]:
        """A step's buffer in a ring, and the phase of its barrier."""
        stages = self.stages()[operand]
        return step % stages, step // stages % 2

    def bytes(self, rows: int, columns: int) -> int:
        """Of a tile in shared memory."""
        return rows * columns * self.dtype.width // 8

    @cute.jit
    def multiply(self, pointer: cute.Pointer, buffers: list, b: dict, rings: list, steps: Int32) -> None:
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

    def multiply_rows(self, pointer: cute.Pointer, buffers: list, b: dict, rings: list, step: Int32) -> None:
        """Issues S and dP of a step."""
        mma, buffer = self.score_mma(), step % BUFFERS
        for i, width in enumerate(self.row_widths):
            stage = self.ready(rings, i, step)
            x = sm100.make_smem_layout_a(mma, (ROWS, BLOCK, width), self.dtype, 1)
            left = mma.make_fragment_A(cute.make_tensor(buffers[i].iterator, x.outer))
            self.issue(mma, pointer + (buffer * 2 + i) * BLOCK, left, buffers, i, (BLOCK, width), stage, False)
            if i not in self.factors:
                commit(rings[i].empty + stage)
        commit(b["s"] + buffer)

    def multiply_factors(self, pointer: cute.Pointer, buffers: list, rings: list, step: Int32) -> None:
        """Issues what a step adds to the sums."""
        for number, (i, width) in enumerate(zip(self.factors, self.widths, strict=True)):
            mma = self.product_mma(width)
            p = sm100.make_smem_layout_a(mma, (ROWS, width, BLOCK), self.dtype, 1)
            where = cute.recast_ptr(pointer + (step % BUFFERS * 2 + 1 - i) * BLOCK, dtype=self.dtype)
            left = cute.make_tensor(where, mma.make_fragment_A(cute.make_tensor(where, p.outer)).layout)
            stage = self.ready(rings, i, step)
            self.issue(mma, self.accumulator(pointer, number), left, buffers, i, (width, BLOCK), stage, step > 0)
            commit(rings[i].empty + stage)

    def issue(
        self, mma: cute.TiledMma, pointer: cute.Pointer, left: Any, buffers: list, i: int, shape: tuple[int, int],
        stage: Int32, adds: Any,
    ) -> None:  # fmt: skip
        """Issues a product with the columns' operand ``i``, of so many columns and elements along K."""
        y = sm100.make_smem_layout_b(mma, (ROWS, *shape), self.dtype, self.stages()[i])
        right = mma.make_fragment_B(cute.make_tensor(buffers[len(self.row_widths) + i].iterator, y.outer))
        target = mma.make_fragment_C(mma.partition_shape_C((ROWS, shape[0])))
        target = cute.make_tensor(pointer, target.layout)
        mma.set(tcgen05.Field.ACCUMULATE, adds)
        for k in range(shape[1] // 16):
            cute.gemm(mma, target, left[None, None, k, 0], right[None, None, k, stage], target)
            mma.set(tcgen05.Field.ACCUMULATE, True)

    def accumulator(self, pointer: cute.Pointer, number: int) -> cute.Pointer:
        """Where a sum is in tensor memory: behind the buffers of S and dP."""
        return pointer + (BUFFERS * 2 * BLOCK + sum(self.widths[:number]))

    def ready(self, rings: list, operand: int, step: Int32) -> Int32:
        """Waits for the columns' operand of a step; its buffer."""
        stage, phase = self.place(operand, step)
        cute.arch.mbarrier_wait(rings[operand].full + stage, phase)
        return stage

    @cute.jit
    def compute(
        self, pointer: cute.Pointer, buffers: list, b: dict, p: Problem, atoms: list, tensors: list,
        values: list, scale: Float32, steps: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """Four warps: P and dS of all steps, then the results."""
        g = self.g
        log_sum, product = Float32(0.0), Float32(0.0)
        if const_expr(g.of_queries):
            log_sum, product = (x[p.first_value + p.row + thread, p.head, p.batch] for x in values)
        for step in cutlass.range(steps, unroll=1):
            head, block = self.step(p, step)
            buffer = step % BUFFERS
            where = pointer + buffer * 2 * BLOCK
            cute.arch.mbarrier_wait(b["s"] + buffer, step // BUFFERS % 2)
            whole = p.mask.whole(p.row, ROWS, block * BLOCK, BLOCK)
            for chunk in cutlass.range_constexpr(BLOCK // CHUNK):
                column = block * BLOCK + chunk * CHUNK
                scores, gradients = (cute.make_rmem_tensor(CHUNK, Float32) for _ in range(2))
                tensor_memory.load(where + chunk * CHUNK, thread, scores)
                if const_expr(len(g.rows) == 2):
                    tensor_memory.load(where + BLOCK + chunk * CHUNK, thread, gradients)
                cute.arch.fence_view_async_tmem_load()
                if not whole:
                    p.mask.hide(scores, self.score_rows, thread, p.row, column, CHUNK)
                for i in cutlass.range_constexpr(0, CHUNK, 4):
                    subtracted, sums = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
                    subtracted.fill(product)
                    sums.fill(log_sum)
                    if const_expr(not g.of_queries):
                        self.fetch(values[0], sums, head, p, column + i)
                        self.fetch(values[1], subtracted, head, p, column + i)
                    for j in cutlass.range_constexpr(4):
                        scores[i + j] = cute.math.exp2(scores[i + j] * (scale * LOG2_E) - sums[j], fastmath=True)
                        if const_expr(len(g.rows) == 2):
                            gradients[i + j] = scores[i + j] * (gradients[i + j] - subtracted[j])
                for x in cutlass.range_constexpr(len(g.sums)):
                    part = const_expr(1 - self.factors[x])
                    back = where + (part * BLOCK + chunk * CHUNK // 2)
                    tensor_memory.store_rounded(back, thread, (scores, gradients)[part], self.dtype)
            cute.arch.fence_view_async_tmem_store()
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(b["p"] + buffer)
        if steps > 0:
            cute.arch.mbarrier_wait(b["done"], 0)
        self.store(pointer, buffers, p, atoms, tensors, scale, steps, thread)

    def fetch(self, source: cute.Tensor, target: cute.Tensor, head: Int32, p: Problem, row: Int32) -> None:
        """Four values of query rows, as many as 16 bytes hold."""
        values = source[None, head, p.batch]
        cute.autovec_copy(cute.local_tile(values, (4,), ((p.first_value + row) // 4,)), target)

    @cute.jit
    def store(
        self, pointer: cute.Pointer, buffers: list, p: Problem, atoms: list, tensors: list, scale: Float32,
        steps: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """Writes the results, through the buffers of the rows' operands."""
        outs = []
        for i in cutlass.range_constexpr(len(self.widths)):
            layout = cute.slice_(self.layout(ROWS, self.widths[i], 1), (None, None, 0))
            outs.append(cute.make_tensor(buffers[i].iterator, layout.outer))
            factor = scale if const_expr(self.factors[i] == 0) else Float32(1.0)
            tensor_memory.to_shared(self.accumulator(pointer, i), thread, factor, outs[i], steps > 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.wait(Barrier.GROUP, ROWS)
        if thread < 32:
            for i in cutlass.range_constexpr(len(self.widths)):
                last = const_expr(len(atoms) - len(self.widths) + i)
                rows = sequences.copied_rows(tensors[last], p.head, p.batch, p.first_row, p.mask.queries)
                tile = cute.local_tile(cute.domain_offset((p.row, 0), rows), (ROWS, self.widths[i]), (0, 0))
                source, target = partition(atoms[last], 0, 1, outs[i], tile)
                cute.copy(atoms[last], source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
