"""What comes before and after the kernel of attention's backward pass: the products of rows, and dQ from its sums."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name

THREADS = 256
WARP = 32
VECTOR = 8  # elements of 16 bits that a thread loads at once
M = 64  # query rows of a block of sums


class RowProducts:
    """D = the sum of O dO over a row, LSE * log2(e), and zeros for dQ's sums. One warp has a row of a head."""

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration

    def launch(
        self, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, products: cute.Tensor, log_sums: cute.Tensor,
        dq_sums: cute.Tensor, stream: Any,
    ) -> None:  # fmt: skip
        """O, dO (s, d, h, b); LSE (s, h, b); D, LSE * log2(e) and dQ's sums with rows rounded up to blocks."""
        blocks = products.shape[0] // (THREADS // WARP)
        zeros = cute.make_tensor(dq_sums.iterator, cute.make_layout((self.c.head, *products.shape)))
        self.kernel(o, do, lse, products, log_sums, zeros).launch(
            grid=[blocks, o.shape[2], o.shape[3]], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, products: cute.Tensor, log_sums: cute.Tensor,
        zeros: cute.Tensor,
    ) -> None:  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        lane, row = thread % WARP, block * (THREADS // WARP) + thread // WARP
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for i in cutlass.range_constexpr(self.c.head // (4 * WARP)):
            cute.autovec_copy(nothing, cute.local_tile(zeros[None, row, head, batch], (4,), (lane + i * WARP,)))
        if row < o.shape[0]:
            total = Float32(0.0)
            for first in cutlass.range_constexpr(0, self.c.head // VECTOR, WARP):
                if lane + first < self.c.head // VECTOR:
                    parts = []
                    for tensor in (o, do):
                        source = cute.local_tile(tensor[row, None, head, batch], (VECTOR,), (lane + first,))
                        part = cute.make_rmem_tensor(VECTOR, tensor.element_type)
                        cute.autovec_copy(source, part)
                        parts.append(part.load().to(Float32))
                    total += (parts[0] * parts[1]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = cute.arch.warp_reduction_sum(total)
            if lane == 0:
                products[row, head, batch] = total
                log_sums[row, head, batch] = lse[row, head, batch] * LOG2_E

    name(kernel, "cudnn_attention_row_products")


class QueryGradient:
    """dQ = scale times the sums that Hopper's backward kernel leaves, rounded. One CTA has 64 rows of a head."""

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]

    def launch(self, sums: cute.Tensor, dq: cute.Tensor, offsets: Any, scale: Float32, stream: Any) -> None:
        """Sums (512, d / 8, blocks, h, b) as AttentionBackward has them, dQ (s, d, h, b)."""
        self.kernel(sums, dq, offsets, scale).launch(
            grid=[sums.shape[2], dq.shape[2], dq.shape[3]], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, dq: cute.Tensor, offsets: Any, scale: Float32) -> None:
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        first, queries, mine = Int32(0), dq.shape[0], block
        if const_expr(c.packed):
            sequence, mine = sequences.find_block(offsets, block, M)
            first = offsets[sequence]
            queries = offsets[sequence + 1] - first
        row = mine * M
        smem = SmemAllocator()
        pitch = c.head + VECTOR  # rows 16 bytes apart from each other's banks
        sdQ = smem.allocate_tensor(self.dtype, cute.make_layout((M, c.head), stride=(pitch, 1)), byte_alignment=16)
        if row < queries:
            groups = THREADS // 128
            lane, group = thread % 128, thread // 128
            values = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(c.head // 8 // groups):
                index = i * groups + group  # (quarter of the head, eight queries)
                source = cute.local_tile(sums[None, index, block, head, batch], (4,), (lane,))
                cute.autovec_copy(source, values)
                element = index // 8 * 64 + lane // WARP * 16 + lane % WARP // 4
                query = index % 8 * 8 + lane % 4 * 2
                for j in cutlass.range_constexpr(4):
                    sdQ[query + j % 2, element + j // 2 * 8] = (values[j] * scale).to(self.dtype)
            cute.arch.sync_threads()
            columns = c.head // VECTOR
            for i in cutlass.range_constexpr(M * columns // THREADS):
                vector = thread + i * THREADS
                if row + vector // columns < queries:
                    where = (vector // columns, vector % columns)
                    out = cute.domain_offset((first + row, 0), dq[None, None, head, batch])
                    ready = cute.local_tile(sdQ, (1, VECTOR), where)
                    cute.autovec_copy(ready, cute.local_tile(out, (1, VECTOR), where))

    name(kernel, "cudnn_attention_query_gradient")
