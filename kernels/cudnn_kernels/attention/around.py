"""What comes before and after the kernel of attention's backward pass: the products of rows, and dQ from its sums."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name

THREADS = 256
WARP = 32
VECTOR = 8  # elements of 16 bits that a thread loads at once
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


class RowProducts:
    """D = the sum of O dO over a row, LSE * log2(e), and zeros for dQ's sums. One warp has a row of a head.

    Results begin a new block of rows for every sequence. LSE is inf where there is no row, or where it is -inf: so P
    is 0 there.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration

    def launch(
        self, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, products: cute.Tensor, log_sums: cute.Tensor,
        dq_sums: cute.Tensor, offsets: Any, stream: Any, turns: Any = None,
    ) -> None:  # fmt: skip
        """O, dO (s, d, h, b); LSE (s, h, b); D, LSE * log2(e) and dQ's sums with rows rounded up to blocks.

        ``turns`` become zeros too.
        """
        blocks = products.shape[0] // (THREADS // WARP)
        zeros = cute.make_tensor(dq_sums.iterator, cute.make_layout((self.c.head, *products.shape)))
        counts = None if turns is None else cute.make_tensor(turns.iterator, products.layout)
        self.kernel(o, do, lse, products, log_sums, zeros, counts, offsets).launch(
            grid=[blocks, o.shape[2], o.shape[3]], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, products: cute.Tensor, log_sums: cute.Tensor,
        zeros: cute.Tensor, counts: Any, offsets: Any,
    ) -> None:  # fmt: skip
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        lane, place = thread % WARP, block * (THREADS // WARP) + thread // WARP
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for vector in cutlass.range_constexpr(0, c.head // 4, WARP):
            if lane + vector < c.head // 4:
                cute.autovec_copy(nothing, cute.local_tile(zeros[None, place, head, batch], (4,), (lane + vector,)))
        size = c.tile[0]
        mine, first, rows = block_of_rows(place // size, o.shape[0], size, offsets)
        row, total, log_sum = mine + place % size, Float32(0.0), Float32.inf
        if row < rows:
            for vector in cutlass.range_constexpr(0, c.head_v // VECTOR, WARP):
                if lane + vector < c.head_v // VECTOR:
                    parts = []
                    for tensor in (o, do):
                        source = cute.local_tile(tensor[first + row, None, head, batch], (VECTOR,), (lane + vector,))
                        part = cute.make_rmem_tensor(VECTOR, tensor.element_type)
                        cute.autovec_copy(source, part)
                        parts.append(part.load().to(Float32))
                    total += (parts[0] * parts[1]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            log_sum = lse[first + row, head, batch] * LOG2_E
            log_sum = Float32(select_(log_sum == -Float32.inf, Float32.inf, log_sum))
        total = cute.arch.warp_reduction_sum(total)
        if lane == 0:
            products[place, head, batch] = total
            log_sums[place, head, batch] = log_sum
            if const_expr(counts is not None):
                counts[place, head, batch] = 0

    name(kernel, "cudnn_attention_row_products")


class QueryGradient:
    """dQ = scale times the sums that Hopper's backward kernels leave, rounded. One CTA has a block of rows of a head.

    Sums are in the order of accumulators: for every 64 rows and 8 elements of the head, four values of each of 128
    threads.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]

    def launch(self, sums: cute.Tensor, dq: cute.Tensor, offsets: Any, scale: Float32, stream: Any) -> None:
        """Sums (512, rows * d / 512, blocks, h, b), dQ (s, d, h, b)."""
        self.kernel(sums, dq, offsets, scale).launch(
            grid=[sums.shape[2], dq.shape[2], dq.shape[3]], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, dq: cute.Tensor, offsets: Any, scale: Float32) -> None:
        c, size = self.c, self.c.tile[0]
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        row, first, rows = block_of_rows(block, dq.shape[0], size, offsets)
        smem = SmemAllocator()
        pitch = c.head + VECTOR  # rows 16 bytes apart from each other's banks
        sdQ = smem.allocate_tensor(self.dtype, cute.make_layout((size, c.head), stride=(pitch, 1)), byte_alignment=16)
        if row < rows:
            groups, columns = THREADS // 128, c.head // 8
            lane, group = thread % 128, thread // 128
            values = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(size * c.head // 512 // groups):
                index = i * groups + group
                source = cute.local_tile(sums[None, index, block, head, batch], (4,), (lane,))
                cute.autovec_copy(source, values)
                query = index // columns * SLAB + lane // WARP * 16 + lane % WARP // 4
                for j in cutlass.range_constexpr(2):
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for k in cutlass.range_constexpr(2):
                        pair[k] = (values[2 * j + k] * scale).to(self.dtype)
                    where = (query + 8 * j, index % columns * 4 + lane % 4)
                    cute.autovec_copy(pair, cute.local_tile(sdQ, (1, 2), where))
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(size * columns // THREADS):
                vector = thread + i * THREADS
                if row + vector // columns < rows:
                    where = (vector // columns, vector % columns)
                    out = cute.domain_offset((first + row, 0), dq[None, None, head, batch])
                    ready = cute.local_tile(sdQ, (1, VECTOR), where)
                    cute.autovec_copy(ready, cute.local_tile(out, (1, VECTOR), where))

    name(kernel, "cudnn_attention_query_gradient")
