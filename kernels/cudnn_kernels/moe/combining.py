"""Sums of what experts made of a token, and their gradients. Both are bound by memory.

A thread has 16 bytes of a token's result. It reads all of the token's rows at once, which keeps enough bytes in flight,
and adds them up in float32, in the order of the choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.moe.configuration import WARP, CombineConfiguration
from cudnn_kernels.naming import name


def rounded(values: list, dtype: Any) -> cute.Tensor:
    """Values in another type."""
    wide, part = (cute.make_rmem_tensor(len(values), x) for x in (Float32, dtype))
    for i, value in enumerate(values):
        wide[i] = value
    part.store(wide.load().to(dtype))
    return part


class Combine(Kernel):
    """The kernel for one :class:`CombineConfiguration`."""

    streams = False  # rows, which leave the cache first then

    def __init__(self, configuration: CombineConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.columns = c.hidden // c.vector

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        tokens = max(1, c.most_threads // c.width)  # of a CTA
        self.kernel(given["rows"], given["row_of_choice"], given.get("weights"), given["out"], tokens).launch(
            grid=[cute.ceil_div(given["out"].shape[0], tokens) * c.slices, 1, 1],
            block=[-(-tokens * c.width // WARP) * WARP, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,  # else the compiler saves registers, and loads three rows at a time
        )

    @cute.kernel
    def kernel(
        self,
        rows: cute.Tensor,
        row_of_choice: cute.Tensor,
        weights: Any,
        out: cute.Tensor,
        tokens: cutlass.Constexpr[int],
    ) -> None:
        c = self.c
        thread, block = here()
        token = block // c.slices * tokens + thread // c.width
        column = block % c.slices * c.width + thread % c.width
        if (thread < tokens * c.width) & (token < out.shape[0]) & (column < self.columns):
            row, factor = self.choices(row_of_choice, weights, token)
            self.store(self.part(out, token, column), self.total(rows, row, factor, column))

    name(kernel, "cudnn_moe_combine")

    def total(self, rows: cute.Tensor, row: cute.Tensor, factor: cute.Tensor, column: Int32) -> list:
        """The sum of 16 bytes of a token's rows, in float32."""
        c = self.c
        parts = [self.load(rows, row[k], column) for k in range(c.top_k)]
        total = [Float32(0.0)] * c.vector
        for k in range(c.top_k):
            scaled = self.values(parts[k], row[k])
            if const_expr(c.weighted):
                weight = select_(row[k] >= 0, factor[k], Float32(0.0))  # a dropped choice may have a NaN
                scaled = [x * weight for x in scaled]
            total = [a + b for a, b in zip(total, scaled, strict=True)]
        return total

    def choices(self, row_of_choice: cute.Tensor, weights: Any, token: Int32) -> tuple:
        """A token's rows and weights."""
        found = []
        for source in (row_of_choice, weights):
            if source is not None:
                part = cute.make_rmem_tensor(self.c.top_k, source.element_type)
                cute.autovec_copy(source[token, None], part)
                found.append(part)
        return found[0], found[-1]

    def part(self, tensor: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """16 bytes of a row in global memory."""
        return cute.local_tile(tensor[row, None], (self.c.vector,), (column,))

    def load(self, rows: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
        """16 bytes of a row; of the first one, where there is none."""
        part = cute.make_rmem_tensor(self.c.vector, self.dtype)
        operation, hint = cute.nvgpu.CopyUniversalOp(), {}
        if const_expr(self.streams):
            operation, hint = cute.nvgpu.CopyG2ROp(), {"load_cache_mode": cute.nvgpu.LoadCacheMode.STREAMING}
        atom = cute.make_copy_atom(operation, self.dtype, num_bits_per_copy=128, **hint)
        cute.copy(atom, self.part(rows, cutlass.max(row, 0), column), part)
        return part

    def values(self, part: cute.Tensor, row: Int32) -> list:
        """What was loaded in float32, zeros where there is no row."""
        bits = cute.recast_tensor(part, Int32)
        for i in range(4):
            bits[i] = Int32(select_(row >= 0, bits[i], Int32(0)))
        found = part.load().to(Float32)
        return [found[i] for i in range(self.c.vector)]

    def store(self, target: cute.Tensor, values: list) -> None:
        """Rounds 16 bytes of a row, and stores them."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        cute.copy(atom, rounded(values, self.dtype), target)


class CombineGradient(Combine):
    """The gradients of rows and of weights, from that of the sums, ``out``. A CTA has a token, which it reads once.

    Without weights it copies each token to its rows.
    """

    def launch(self, given: Mapping[str, Any]) -> None:
        threads = min(self.c.most_threads, -(-self.columns // WARP) * WARP)
        tensors = [given.get(x) for x in ("rows", "row_of_choice", "weights", "out", "d_rows", "d_weights")]
        self.gradients(*tensors, threads).launch(
            grid=[given["out"].shape[0], 1, 1],
            block=[threads, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def gradients(
        self,
        rows: Any,
        row_of_choice: cute.Tensor,
        weights: Any,
        out: cute.Tensor,
        d_rows: cute.Tensor,
        d_weights: Any,
        threads: cutlass.Constexpr[int],
    ) -> None:
        c = self.c
        thread, token = here()
        smem = SmemAllocator()
        sums = smem.allocate_tensor(Float32, cute.make_layout((c.top_k, threads // WARP)), byte_alignment=16)
        row, factor = self.choices(row_of_choice, weights, token)
        products = cute.make_rmem_tensor(c.top_k, Float32)
        products.fill(0.0)
        for column in cutlass.range(thread, self.columns, threads, unroll=1):
            mine = self.load(out, token, column).load().to(Float32)
            parts = [self.load(rows, row[k], column) if c.weighted else None for k in range(c.top_k)]
            for k in cutlass.range_constexpr(c.top_k):
                scaled = [mine[i] for i in range(c.vector)]
                if const_expr(c.weighted):
                    for a, b in zip(scaled, self.values(parts[k], row[k]), strict=True):
                        products[k] += a * b
                    scaled = [x * factor[k] for x in scaled]
                if row[k] >= 0:
                    self.store(self.part(d_rows, row[k], column), scaled)
        if const_expr(c.weighted):
            for k in cutlass.range_constexpr(c.top_k):
                mine = select_(row[k] >= 0, products[k], Float32(0.0))  # not 0 times what `out` has for nobody
                total = cute.arch.warp_reduction_sum(Float32(mine))
                if thread % WARP == 0:
                    sums[k, thread // WARP] = total
            cute.arch.sync_threads()
            if thread < c.top_k:
                total = Float32(0.0)
                for warp in cutlass.range_constexpr(threads // WARP):
                    total += sums[thread, warp]
                d_weights[token, thread] = total

    name(gradients, "cudnn_moe_combine_gradient")
