"""What comes before and after the kernel of attention's backward pass: the products of rows, and dQ from its sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import BackwardConfiguration, DecodeConfiguration, sequences
from cudnn_kernels.attention.backward import Work, block_of
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.pipeline.vectors import VECTOR

ROW_THREADS, THREADS = 128, 256  # of a CTA that has rows, and of one that rounds dQ
WARP = 32
SLAB = 64  # query rows of a product of dQ


@cute.jit
def block_of_rows(block: Int32, rows: Any, size: int, offsets: Any) -> tuple[Int32, Int32, Int32]:
    """Of a block of query rows: its first row in its sequence, that sequence's first row, and its length."""
    first, mine = Int32(0), block
    if const_expr(offsets is not None):
        sequence, mine = sequences.find_block(offsets, block, size)
        first = Int32(offsets[sequence])
        rows = Int32(offsets[sequence + 1]) - first
    return mine * size, first, Int32(rows)


@cute.jit
def store_rows(buffer: cute.Tensor, out: cute.Tensor, rows: Int32, thread: Int32) -> None:
    """Writes a buffer in shared memory, (s, d), where there are so many rows, by 256 threads."""
    columns = cute.size(buffer, mode=[1]) // VECTOR
    for i in cutlass.range_constexpr(-(-cute.size(buffer, mode=[0]) * columns // THREADS)):
        vector = thread + i * THREADS
        where = (vector // columns, vector % columns)
        if where[0] < rows:
            ready, target = (cute.local_tile(x, (1, VECTOR), where) for x in (buffer, out))
            cute.autovec_copy(ready, target)


@dataclass
class Grid:
    """CTAs for so many blocks of so many heads of each batch, in one dimension: the others are limited to 65,535."""

    blocks: Any  # divisor
    heads: Any  # divisor


def grid_of(blocks: Any, heads: Any, batches: Any) -> tuple[Grid, list[Any]]:
    """The grid, and its shape."""
    divisors = (cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in (blocks, heads))
    return Grid(*divisors), [Int32(blocks) * heads * batches, 1, 1]


def place_in(grid: Grid) -> tuple[Int32, Int32, Int32]:
    """This CTA's block, head and batch."""
    cta, _, _ = cute.arch.block_idx()
    index, block = divmod(cta, grid.blocks)
    batch, head = divmod(index, grid.heads)
    return block, head, batch


@dataclass
class Values:
    """What belongs to query rows in the workspace: LSE * log2(e), D, dQ's sums, and how many CTAs added to them.

    Of each sequence whole blocks of rows; the first two and the last are (s, h, b), the sums (512, .., blocks, h, b).
    ``key_sums``: dK and dV of the parts of split blocks of keys, (keys, elements of both, parts, blocks). ``drawn``:
    how many blocks of keys CTAs have drawn.
    """

    log_sums: cute.Tensor
    products: cute.Tensor
    dq_sums: Any = None
    turns: Any = None
    key_sums: Any = None
    drawn: Any = None


def prepare(c: BackwardConfiguration, given: Mapping[str, Any]) -> Values:
    """Launches :class:`RowProducts` on a call's arguments by name; its results."""
    values = values_of(c, given)
    RowProducts(c).launch(given, values)
    return values


def values_of(c: BackwardConfiguration, given: Mapping[str, Any]) -> Values:
    """What the workspace has, of a call's arguments by name: nothing is written yet."""
    q, batches = sequences.matrix(given["q"], c.packed), sequences.count(c, given)
    blocks, heads = sequences.blocks_of(q.shape[0], batches, c.tile[0], c.packed), q.shape[2:]
    shapes = {
        "dq_sums": (512, c.tile[0] * c.head // 512, blocks, *heads),
        "turns": (c.tile[0], blocks, *heads),
        "drawn": (1,),
        **dict.fromkeys(("log_sums", "products"), (blocks * c.tile[0], *heads)),
    }
    if const_expr(c.split):
        shapes["key_sums"] = (c.both, c.keys, given["parts"], given["split"])
    found = Values(**regions_of(c, given, shapes, sizes_of(c, given)))
    if const_expr(c.split):
        found.key_sums = turned(found.key_sums)
    return found


def sizes_of(c: BackwardConfiguration, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that regions of the workspace have."""
    q, k = (sequences.matrix(given[x], c.packed) for x in ("q", "k"))
    sizes = {"sq": q.shape[0], "sk": k.shape[0], "hq": q.shape[2], "b": sequences.count(c, given)}
    sizes |= {x: given[x] for x in ("split", "parts") if x in given}
    return {name: Int64(x) for name, x in sizes.items()}


def regions_of(
    c: BackwardConfiguration | DecodeConfiguration,
    given: Mapping[str, Any],
    shapes: Mapping[str, tuple[Any, ...]],
    sizes: dict[str, Any],
) -> dict[str, cute.Tensor]:
    """The workspace's regions that have a shape here, as values of 32 bits: counts where they are of turns."""
    pointers = divided(c.slots(), given, c.regions(), sizes)
    kinds = {x: Int32 if x in ("turns", "drawn") else Float32 for x in pointers if x in shapes}
    return {
        x: cute.make_tensor(cute.recast_ptr(pointers[x], dtype=kind), cute.make_layout(shapes[x]))
        for x, kind in kinds.items()
    }


def vector(tensor: cute.Tensor, row: Int32, head: Int32, batch: Int32, number: Any) -> cute.Tensor:
    """16 bytes of a row, by their number."""
    return cute.local_tile(tensor[row, None, head, batch], (VECTOR,), (number,))


class RowProducts:
    """D = the sum of O dO over a row, LSE * log2(e), and zeros for what is counted or added up. One CTA has 16 rows of
    a head.

    Results begin a new block of rows for every sequence. LSE is inf where there is no row, or where it is -inf: so P
    is 0 there. A row has 8 to 32 lanes, and a lane some rows, all of which it loads before it adds.
    """

    rows = 16

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.lanes = next(lanes for lanes in (8, 16, 32) if lanes * VECTOR >= configuration.head_v)
        self.passes = self.rows * self.lanes // ROW_THREADS

    def launch(self, given: Mapping[str, Any], values: Values) -> None:
        """On a call's arguments by name; the values' turns, and what was drawn, become zeros too."""
        c, rows = self.c, values.products.shape
        o, do = (sequences.matrix(given[x], c.packed) for x in ("o", "do"))
        lse, offsets = sequences.rows(given["lse"], c.packed, c.lse == "by head"), given.get("cum_seqlen_q")
        blocks, counts, zeros = rows[0] // self.rows, values.turns, None if c.stores_first else values.dq_sums
        if zeros is not None:
            zeros = cute.make_tensor(zeros.iterator, cute.make_layout((self.rows * c.head, blocks, *rows[1:])))
        if counts is not None:
            counts = cute.make_tensor(counts.iterator, values.products.layout)
        grid, shape = grid_of(blocks, o.shape[2], o.shape[3])
        self.kernel(o, do, lse, values.products, values.log_sums, zeros, counts, values.drawn, offsets, grid).launch(
            grid=shape, block=[ROW_THREADS, 1, 1], stream=given["stream"]
        )

    @cute.kernel
    def kernel(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        products: cute.Tensor,
        log_sums: cute.Tensor,
        zeros: Any,
        counts: Any,
        drawn: Any,
        offsets: Any,
        grid: Grid,
    ) -> None:
        c, lanes = self.c, self.lanes
        thread, cta = here()
        block, head, batch = place_in(grid)
        if const_expr(drawn is not None):
            if cta + thread == 0:
                drawn[0] = Int32(0)
        lane = thread % lanes
        mine, first, rows = self.rows_of(block, o.shape[0], offsets)
        parts = self.load((o, do), mine, first, rows, head, batch, thread)
        if const_expr(zeros is not None):
            self.clear(zeros[None, block, head, batch], thread)
        for i in cutlass.range_constexpr(self.passes):
            row, total, log_sum = mine + self.row(thread, i), Float32(0.0), Float32.inf
            if row < rows:
                if lane < c.head_v // VECTOR:
                    a, b = (part.load().to(Float32) for part in parts[i])
                    total = (a * b).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                log_sum = lse[first + row, head, batch] * LOG2_E
                log_sum = Float32(select_(log_sum == -Float32.inf, Float32.inf, log_sum))
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            if lane == 0:
                place = block * self.rows + self.row(thread, i)
                products[place, head, batch] = total
                log_sums[place, head, batch] = log_sum
                if const_expr(counts is not None):
                    counts[place, head, batch] = 0

    def rows_of(self, block: Int32, rows: Any, offsets: Any) -> tuple[Int32, Int32, Int32]:
        """Of a CTA's rows: the first one in its sequence, that sequence's first row, and its length."""
        start, size = block * self.rows, self.c.tile[0]
        mine, first, rows = block_of_rows(start // size, rows, size, offsets)
        return mine + start % size, first, rows

    @cute.jit
    def load(
        self, tensors: tuple, mine: Int32, first: Int32, rows: Int32, head: Int32, batch: Int32, thread: Int32
    ) -> list[list[cute.Tensor]]:
        """A lane's elements of a thread's rows, those of all tensors of each."""
        parts = [[cute.make_rmem_tensor(VECTOR, x.element_type) for x in tensors] for _ in range(self.passes)]
        lane = thread % self.lanes
        for i in cutlass.range_constexpr(self.passes):
            row = mine + self.row(thread, i)
            if (row < rows) & (lane < self.c.head_v // VECTOR):
                for part, tensor in zip(parts[i], tensors, strict=True):
                    cute.autovec_copy(vector(tensor, first + row, head, batch, lane), part)
        return parts

    def clear(self, sums: cute.Tensor, thread: Int32) -> None:
        """Makes dQ's sums of the CTA's rows zeros."""
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for i in range(self.rows * self.c.head // 4 // ROW_THREADS):
            cute.autovec_copy(nothing, cute.local_tile(sums, (4,), (thread + i * ROW_THREADS,)))

    def row(self, thread: Int32, i: int) -> Int32:
        """Which of the CTA's rows is a thread's ``i``-th."""
        return thread // self.lanes + i * (ROW_THREADS // self.lanes)

    name(kernel, "cudnn_attention_row_products")


class QueryGradient:
    """dQ = scale times the sums that Hopper's backward kernels leave, rounded. One CTA has a block of rows of a head.

    Sums are in the order of accumulators: for every 64 rows and 8 elements of the head, or the other way round, four
    values of each of 128 threads. Where CTAs took turns, and the first one stored, blocks that had no turn are zeros.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]

    def launch(self, sums: cute.Tensor, turns: Any, dq: cute.Tensor, offsets: Any, scale: Float32, stream: Any) -> None:
        """Sums (512, rows * d / 512, blocks, h, b), turns (rows, blocks, h, b), dQ (s, d, h, b)."""
        grid, shape = grid_of(sums.shape[2], dq.shape[2], dq.shape[3])
        turns = turns if self.c.stores_first else None
        self.kernel(sums, turns, dq, offsets, scale, grid).launch(grid=shape, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, sums: cute.Tensor, turns: Any, dq: cute.Tensor, offsets: Any, scale: Float32, grid: Grid) -> None:
        c, size = self.c, self.c.tile[0]
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = place_in(grid)
        row, first, rows = block_of_rows(block, dq.shape[0], size, offsets)
        smem = SmemAllocator()
        pitch = c.head + VECTOR  # rows 16 bytes apart from each other's banks
        sdQ = smem.allocate_tensor(self.dtype, cute.make_layout((size, c.head), stride=(pitch, 1)), byte_alignment=16)
        if row < rows:
            groups, columns, additions = THREADS // 128, c.head // 8, Int32(1)
            if const_expr(turns is not None):
                additions = turns[0, block, head, batch]
            lane, group = thread % 128, thread // 128
            values = cute.make_rmem_tensor(4, Float32)
            values.fill(0.0)
            for i in cutlass.range_constexpr(size * c.head // 512 // groups):
                index = i * groups + group
                source = cute.local_tile(sums[None, index, block, head, batch], (4,), (lane,))
                if additions > 0:
                    cute.autovec_copy(source, values)
                across = size // 8 if c.dq_turned else columns  # 8 columns each, of accumulators in 64 rows
                along = index // across * SLAB + lane // WARP * 16 + lane % WARP // 4
                for j in cutlass.range_constexpr(2):
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for k in cutlass.range_constexpr(2):
                        pair[k] = (values[2 * j + k] * scale).to(self.dtype)
                    where = (along + 8 * j, index % across * 4 + lane % 4)
                    if const_expr(c.dq_turned):
                        for k in cutlass.range_constexpr(2):
                            sdQ[2 * where[1] + k, where[0]] = pair[k]
                    else:
                        cute.autovec_copy(pair, cute.local_tile(sdQ, (1, 2), where))
            cute.arch.sync_threads()
            out = cute.domain_offset((first + row, 0), dq[None, None, head, batch])
            store_rows(sdQ, out, rows - row, thread)

    name(kernel, "cudnn_attention_query_gradient")


class KeyGradients:
    """dK and dV of the blocks of keys that are split: the sums of their parts, in this order, rounded.

    One CTA has 16 keys of a block, a key 16 to 64 threads, and each of them 8 elements of dK or dV.
    """

    keys = 16

    def __init__(self, configuration: BackwardConfiguration) -> None:
        c = self.c = configuration
        self.dtype = DTYPES[c.dtype]
        self.lanes = c.both // VECTOR

    def launch(
        self, sums: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, work: Work, scale: Float32, stream: Any
    ) -> None:
        """Sums (keys, elements, parts, blocks), dK and dV (s, d, h, b)."""
        self.kernel(sums, dk, dv, work, scale).launch(
            grid=[sums.shape[3] * (self.c.keys // self.keys), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, work: Work, scale: Float32) -> None:
        c, chunks = self.c, self.c.keys // self.keys
        thread, cta = here()
        number, first = cta // chunks, cta % chunks * self.keys
        block = block_of(c, work, work.whole + number, c.keys, c.tile[0], False, c.last_first)
        index, columns = thread % self.lanes, c.head // VECTOR
        total, rounded = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(self.keys * self.lanes // THREADS):
            key = first + i * (THREADS // self.lanes) + thread // self.lanes
            row = block.row + key
            if (index < columns + c.head_v // VECTOR) & (row < block.mask.queries):
                total.fill(0.0)
                for j in cutlass.range(sums.shape[2], unroll=4):
                    total.store(total.load() + vectors.load(sums[key, None, j, number], index).load())
                factor = Float32(select_(index < columns, scale, Float32(1.0)))
                rounded.store((total.load() * factor).to(self.dtype))
                row += block.first_row
                if index < columns:
                    cute.autovec_copy(rounded, vector(dk, row, block.head, block.batch, index))
                else:
                    cute.autovec_copy(rounded, vector(dv, row, block.head, block.batch, index - columns))

    name(kernel, "cudnn_attention_key_gradients")
