"""Quantises rows, or tokens into the rows of their choices, or weights to e4m3.

There is a float32 factor for each 128 elements of a row, or of weights for each 128 x 128. A CTA has 128 x 128
elements, and 16 lanes have a row, 16 bytes each. So each element is read once, and a token is stored in all rows of its
choices.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.quantize import magnitude, number
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import FORMATS
from cudnn_kernels.moe.configuration import BLOCK, NARROW, WARP, QuantizeConfiguration
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind

THREADS = 256
VALUES = 8  # of a thread, in a row


class Quantize:
    """The kernel for one :class:`QuantizeConfiguration`."""

    def __init__(self, configuration: QuantizeConfiguration) -> None:
        self.c = configuration
        self.lanes = BLOCK // VALUES  # that have a row
        self.step = THREADS // self.lanes  # rows at a time

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        given = bind(self.c.slots(), arguments)
        blocks = cute.ceil_div(given["x"].shape[0], BLOCK) * (self.c.columns // BLOCK)
        self.kernel(given["x"], given.get("row_of_choice"), given["quantized"], given["factors"]).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=given["stream"], min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, row_of_choice: Any, quantized: cute.Tensor, factors: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        across = self.c.columns // BLOCK
        first, column, lane = block // across * BLOCK + thread // self.lanes, block % across, thread % self.lanes
        rows = [first + i * self.step for i in range(BLOCK // self.step)]
        parts = [self.load(x, row, column * self.lanes + lane) for row in rows]
        largest = [magnitude(part) for part in parts]
        if const_expr(self.c.blocks):
            largest = [self.of_block(largest, thread)] * len(rows)
        else:
            largest = [among(x, self.lanes) for x in largest]
        for row, part, most in zip(rows, parts, largest, strict=True):
            factor, inverse = number(most * Float32(1.0 / FORMATS[NARROW].block_limit))
            self.store(row_of_choice, quantized, factors, row, column, lane, factor, [v * inverse for v in part])

    name(kernel, "cudnn_moe_quantize")

    def load(self, x: cute.Tensor, row: Int32, piece: Int32) -> list:
        """16 bytes of a row in float32; zeros where there is no row."""
        part = cute.make_rmem_tensor(VALUES, x.element_type)
        there = row < x.shape[0]
        cute.autovec_copy(cute.local_tile(x[Int32(select_(there, row, Int32(0))), None], (VALUES,), (piece,)), part)
        found = part.load().to(Float32)
        return [Float32(select_(there, found[i], Float32(0.0))) for i in range(VALUES)]

    def of_block(self, largest: list, thread: Int32) -> Float32:
        """The largest of all threads' values."""
        warps = THREADS // WARP
        shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), byte_alignment=16)
        found = largest[0]
        for other in largest[1:]:
            found = maximum(found, other)
        shared[thread // WARP] = among(found, WARP)  # of all lanes, the same
        cute.arch.sync_threads()
        found = shared[0]
        for warp in range(1, warps):
            found = maximum(found, shared[warp])
        return found

    @cute.jit
    def store(
        self, row_of_choice: Any, quantized: cute.Tensor, factors: cute.Tensor, row: Int32, column: Int32, lane: Int32,
        factor: Float32, values: list,
    ) -> None:  # fmt: skip
        """A thread's part of a row, to each of its places, and the factor."""
        c = self.c
        wide = cute.make_rmem_tensor(VALUES, Float32)
        for i in cutlass.range_constexpr(VALUES):
            wide[i] = values[i]
        part = cute.make_rmem_tensor(VALUES, DTYPES[NARROW])
        part.store(wide.load().to(DTYPES[NARROW]))
        for choice in cutlass.range_constexpr(max(1, c.top_k)):
            target = row
            if const_expr(c.top_k > 0):
                target = Int32(-1)
                if row < row_of_choice.shape[0]:
                    target = row_of_choice[row, choice]
            if (target >= 0) & (target < quantized.shape[0]):
                piece = cute.local_tile(quantized[target, None], (VALUES,), (column * self.lanes + lane,))
                cute.autovec_copy(part, piece)
                if const_expr(c.blocks):
                    if (lane == 0) & (row % BLOCK == 0):
                        factors[target // BLOCK, column] = factor
                elif lane == 0:
                    factors[target, column] = factor


def among(value: Float32, lanes: int) -> Float32:
    """The largest value of so many neighbouring lanes, in each of them."""
    distance = 1
    while distance < lanes:
        value = maximum(value, cute.arch.shuffle_sync_bfly(value, distance))
        distance *= 2
    return value
