"""MoE combine (unpermute): weighted sums of the expert outputs of a token, and their gradients. Memory-bound.

A thread has 16 bytes of a token's result. It loads that vector of all of the token's rows at once, which keeps enough
bytes in flight, and adds them up in float32, in the order of k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.configuration import CombineConfiguration
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE


def rounded(values: list, dtype: Any) -> cute.Tensor:
    """Values converted to another type."""
    wide, vector = (cute.make_rmem_tensor(len(values), x) for x in (Float32, dtype))
    for i, value in enumerate(values):
        wide[i] = value
    vector.store(wide.load().to(dtype))
    return vector


class Combine(Kernel):
    """The kernel for one :class:`CombineConfiguration`."""

    streams = False  # whether rows are loaded with an evict-first hint

    def __init__(self, configuration: CombineConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.columns = c.hidden // c.vector

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        tokens = max(1, c.most_threads // c.width)  # of a CTA
        self.kernel(
            arguments["rows"], arguments["scatter_idx"], arguments.get("weights"), arguments["out"], tokens
        ).launch(
            grid=[cute.ceil_div(arguments["out"].shape[0], tokens) * c.slices, 1, 1],
            block=[-(-tokens * c.width // WARP_SIZE) * WARP_SIZE, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,  # otherwise the compiler saves registers and loads three rows at a time
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        scatter_idx: cute.Tensor,
        weights: Any,
        out: cute.Tensor,
        tokens: cutlass.Constexpr[int],
    ) -> None:
        c = self.c
        thread, block = thread_block_idx()
        token = block // c.slices * tokens + thread // c.width
        column = block % c.slices * c.width + thread % c.width
        if (thread < tokens * c.width) & (token < out.shape[0]) & (column < self.columns):
            row, factor = self.load_slots(scatter_idx, weights, token)
            self.store(self.row_vector(out, token, column), self.total(rows, row, factor, column))

    set_kernel_name(kernel, "cudnn_moe_combine")

    def total(self, rows: cute.Tensor, row: cute.Tensor, factor: cute.Tensor, column: Int32) -> list:
        """The weighted sum of a 16-byte vector of a token's rows, in float32."""
        c = self.c
        vectors = [self.load(rows, row[k], column) for k in range(c.top_k)]
        total = [Float32(0.0)] * c.vector
        for k in range(c.top_k):
            scaled = self.values(vectors[k], row[k])
            if const_expr(c.weighted):
                weight = select_(row[k] >= 0, factor[k], Float32(0.0))  # the weight of a dropped slot may be NaN
                scaled = [x * weight for x in scaled]
            total = [a + b for a, b in zip(total, scaled, strict=True)]
        return total

    def load_slots(self, scatter_idx: cute.Tensor, weights: Any, token: Int32) -> tuple:
        """Loads the rows and weights of a token's (token, k) slots."""
        slots = []
        for source in (scatter_idx, weights):
            if source is not None:
                vector = cute.make_rmem_tensor(self.c.top_k, source.element_type)
                cute.autovec_copy(source[token, None], vector)
                slots.append(vector)
        return slots[0], slots[-1]

    def row_vector(self, tensor: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """A 16-byte vector of a row in global memory."""
        return cute.local_tile(tensor[row, None], (self.c.vector,), (column,))

    def load(self, rows: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """Loads a vector of a row; of row 0 if the slot is dropped."""
        vector = cute.make_rmem_tensor(self.c.vector, self.dtype)
        operation, hint = cute.nvgpu.CopyUniversalOp(), {}
        if const_expr(self.streams):
            operation, hint = cute.nvgpu.CopyG2ROp(), {"load_cache_mode": cute.nvgpu.LoadCacheMode.STREAMING}
        atom = cute.make_copy_atom(operation, self.dtype, num_bits_per_copy=128, **hint)
        cute.copy(atom, self.row_vector(rows, cutlass.max(row, 0), column), vector)
        return vector

    def values(self, vector: cute.Tensor, row: Int32) -> list:
        """A loaded vector in float32, zeros if the slot is dropped."""
        bits = cute.recast_tensor(vector, Int32)
        for i in range(4):
            bits[i] = Int32(select_(row >= 0, bits[i], Int32(0)))
        wide = vector.load().to(Float32)
        return [wide[i] for i in range(self.c.vector)]

    def store(self, target: cute.Tensor, values: list) -> None:
        """Rounds and stores a vector of a row."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        cute.copy(atom, rounded(values, self.dtype), target)


class CombineGradient(Combine):
    """The gradients of rows and of weights, from that of the sums, ``out``. A CTA reads its token once.

    Without weights it permutes: copies each token to its rows.
    """

    def launch(self, arguments: Mapping[str, Any]) -> None:
        threads = min(self.c.most_threads, -(-self.columns // WARP_SIZE) * WARP_SIZE)
        tensors = [arguments.get(x) for x in ("rows", "scatter_idx", "weights", "out", "d_rows", "d_weights")]
        self.gradients(*tensors, threads).launch(
            grid=[arguments["out"].shape[0], 1, 1],
            block=[threads, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def gradients(
        self,
        rows: Any,
        scatter_idx: cute.Tensor,
        weights: Any,
        out: cute.Tensor,
        d_rows: cute.Tensor,
        d_weights: Any,
        threads: cutlass.Constexpr[int],
    ) -> None:
        c = self.c
        thread, token = thread_block_idx()
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((c.top_k, threads // WARP_SIZE)), byte_alignment=16)
        row, factor = self.load_slots(scatter_idx, weights, token)
        dots = cute.make_rmem_tensor(c.top_k, Float32)
        dots.fill(0.0)
        for column in cutlass.range(thread, self.columns, threads, unroll=1):
            gradient = self.load(out, token, column).load().to(Float32)
            vectors = [self.load(rows, row[k], column) if c.weighted else None for k in range(c.top_k)]
            for k in cutlass.range_constexpr(c.top_k):
                scaled = [gradient[i] for i in range(c.vector)]
                if const_expr(c.weighted):
                    for a, b in zip(scaled, self.values(vectors[k], row[k]), strict=True):
                        dots[k] += a * b
                    scaled = [x * factor[k] for x in scaled]
                if row[k] >= 0:
                    self.store(self.row_vector(d_rows, row[k], column), scaled)
        if const_expr(c.weighted):
            for k in cutlass.range_constexpr(c.top_k):
                gradient = select_(row[k] >= 0, dots[k], Float32(0.0))  # not 0 times an undefined row
                total = cute.arch.warp_reduction_sum(Float32(gradient))
                if thread % WARP_SIZE == 0:
                    sums[k, thread // WARP_SIZE] = total
            cute.arch.sync_threads()
            if thread < c.top_k:
                total = Float32(0.0)
                for warp in cutlass.range_constexpr(threads // WARP_SIZE):
                    total += sums[thread, warp]
                d_weights[token, thread] = total

    set_kernel_name(gradients, "cudnn_moe_combine_gradient")
