"""What comes before and after the kernel of attention's backward pass: the products of rows, and dQ from its sums."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import BackwardConfiguration
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.types import DTYPES, fake

THREADS = 256
WARP = 32
VECTOR = 8  # elements of 16 bits that a thread loads at once
M = 64  # query rows of a block of sums


class RowProducts:
    """D = the sum of O dO over a row, and LSE * log2(e), for every row of every head. One warp has a row."""

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration

    @cute.jit
    def __call__(
        self, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, products: cute.Tensor, log_sums: cute.Tensor, stream: Any
    ) -> None:
        """O, dO (s, d, h, b); LSE, D and LSE * log2(e) (s, h, b)."""
        blocks = cute.ceil_div(o.shape[0], THREADS // WARP)
        self.kernel(o, do, lse, products, log_sums).launch(
            grid=[blocks, o.shape[2], o.shape[3]], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor, products: cute.Tensor, log_sums: cute.Tensor
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        lane, row = thread % WARP, block * (THREADS // WARP) + thread // WARP
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


class QueryGradient:
    """dQ = scale times the sums that Hopper's backward kernel leaves, rounded. One CTA has 64 rows of a head."""

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]

    @cute.jit
    def __call__(self, sums: cute.Tensor, dq: cute.Tensor, offsets: Any, scale: Float32, stream: Any) -> None:
        """Sums (512, d / 8, blocks, h, b) as AttentionBackward has them, dQ (s, d, h, b)."""
        c = self.c
        batches = offsets.shape[0] - 1 if const_expr(c.packed) else dq.shape[3]
        blocks = sums.shape[2] if const_expr(not c.packed) else cute.ceil_div(dq.shape[0], M)
        self.kernel(sums, dq, offsets, scale).launch(
            grid=[blocks, dq.shape[2], batches], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums: cute.Tensor, dq: cute.Tensor, offsets: Any, scale: Float32) -> None:
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = cute.arch.block_idx()
        first, queries, first_block, place = Int32(0), dq.shape[0], Int32(0), batch
        if const_expr(c.packed):
            first, place = offsets[batch], Int32(0)
            queries = offsets[batch + 1] - first
            first_block = first // M + batch
        smem = SmemAllocator()
        pitch = c.head + VECTOR  # rows 16 bytes apart from each other's banks
        sdQ = smem.allocate_tensor(self.dtype, cute.make_layout((M, c.head), stride=(pitch, 1)), byte_alignment=16)
        if block * M < queries:
            groups = THREADS // 128
            mine, group = thread % 128, thread // 128
            values = cute.make_rmem_tensor(4, Float32)
            for i in cutlass.range_constexpr(c.head // 8 // groups):
                index = i * groups + group  # (quarter of the head, eight queries)
                source = cute.local_tile(sums[None, index, first_block + block, head, place], (4,), (mine,))
                cute.autovec_copy(source, values)
                row = index // 8 * 64 + mine // WARP * 16 + mine % WARP // 4
                query = index % 8 * 8 + mine % 4 * 2
                for j in cutlass.range_constexpr(4):
                    sdQ[query + j % 2, row + j // 2 * 8] = (values[j] * scale).to(self.dtype)
            cute.arch.sync_threads()
            columns = c.head // VECTOR
            for i in cutlass.range_constexpr(M * columns // THREADS):
                vector = thread + i * THREADS
                if block * M + vector // columns < queries:
                    where = (vector // columns, vector % columns)
                    out = cute.domain_offset((first + block * M, 0), dq[None, None, head, place])
                    ready = cute.local_tile(sdQ, (1, VECTOR), where)
                    cute.autovec_copy(ready, cute.local_tile(out, (1, VECTOR), where))


def row_product_arguments(configuration: BackwardConfiguration) -> tuple[Any, ...]:
    """Stand-ins for the arguments of :class:`RowProducts`."""
    s, h, b = (cute.sym_int() for _ in range(3))
    rows = (fake("float32", (s, h, b), None, align=4) for _ in range(3))
    matrices = (fake(configuration.dtype, (s, configuration.head, h, b), 1) for _ in range(2))
    return (*matrices, *rows, make_fake_stream())


def query_gradient_arguments(configuration: BackwardConfiguration) -> tuple[Any, ...]:
    """Stand-ins for the arguments of :class:`QueryGradient`."""
    c = configuration
    s, h, b = (cute.sym_int() for _ in range(3))
    offsets = fake("int32", (cute.sym_int(),), 0, align=4) if c.packed else None
    return (
        fake("float32", (512, c.head // 8, cute.sym_int(), h, b), 0), fake(c.dtype, (s, c.head, h, b), 1), offsets,
        Float32(0.0), make_fake_stream(),
    )  # fmt: skip
