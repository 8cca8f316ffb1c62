"""Quantises rows, or tokens into the rows of their choices, or weights to e4m3.

There is a float32 factor for each 128 elements of a row, or of weights for each 128 x 128. 16 lanes have 128 elements
of a row, 16 bytes each. A CTA has 128 x 128 weights, or whole rows: each element is read once, and a token is stored in
all rows of its choices, whose numbers are read before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.quantize import compute_block_scale, magnitude
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.moe.combining import rounded
from cudnn_kernels.moe.configuration import BLOCK, NARROW, WARP, QuantizeConfiguration
from cudnn_kernels.naming import name

THREADS = 256  # of a CTA, or about as many
VALUES = 8  # of a thread, in a row
MOST_THREADS = 512  # of a row


class Quantize(Kernel):
    """The kernel for one :class:`QuantizeConfiguration`."""

    def __init__(self, configuration: QuantizeConfiguration) -> None:
        super().__init__(configuration)
        self.lanes = BLOCK // VALUES  # that have a row
        self.step = THREADS // self.lanes  # rows at a time

    def launch(self, given: Mapping[str, Any]) -> None:
        x, quantized, factors, count = given["x"], given["quantized"], given["factors"], given["x"].shape[0]
        if self.c.blocks:
            self.blocks(x, quantized, factors).launch(
                grid=[cute.ceil_div(count, BLOCK) * (self.c.columns // BLOCK), 1, 1],
                block=[THREADS, 1, 1],
                stream=given["stream"],
                min_blocks_per_mp=1,
            )
        else:
            pieces = self.c.columns // VALUES
            width = min(pieces, MOST_THREADS)  # threads of a row
            height = max(1, THREADS // width)  # rows of a CTA
            self.rows(x, given.get("row_of_choice"), quantized, factors, width, height).launch(
                grid=[cute.ceil_div(count, height), 1, 1],
                block=[-(-width * height // WARP) * WARP, 1, 1],
                stream=given["stream"],
                min_blocks_per_mp=1,
            )

    @cute.kernel
    def rows(
        self,
        x: cute.Tensor,
        row_of_choice: Any,
        quantized: cute.Tensor,
        factors: cute.Tensor,
        width: cutlass.Constexpr[int],
        height: cutlass.Constexpr[int],
    ) -> None:
        thread, block = here()
        row, lane = block * height + thread // width, thread % width
        mine = (thread < width * height) & (row < x.shape[0])
        row = Int32(select_(mine, row, Int32(0)))
        targets = self.targets(row_of_choice, row)
        for first in cutlass.range_constexpr(0, self.c.columns // VALUES, width):
            piece = first + lane
            there = mine & (piece < self.c.columns // VALUES)
            part = self.load(x, row, Int32(select_(there, piece, Int32(0))), there)
            most = among(magnitude(part), self.lanes)
            factor, inverse = compute_block_scale(most, NARROW, "float32")
            narrow = rounded([v * inverse for v in part], DTYPES[NARROW])
            for target in targets:
                self.store(quantized, factors, target, piece, there & (target >= 0), narrow, factor)

    name(rows, "cudnn_moe_quantize")

    def targets(self, row_of_choice: Any, row: Int32) -> list[Int32]:
        """Where a row is stored: -1 is nowhere."""
        if row_of_choice is None:
            return [row]
        found = cute.make_rmem_tensor(self.c.top_k, Int32)
        cute.autovec_copy(row_of_choice[row, None], found)
        return [found[choice] for choice in range(self.c.top_k)]

    @cute.kernel
    def blocks(self, x: cute.Tensor, quantized: cute.Tensor, factors: cute.Tensor) -> None:
        thread, block = here()
        across = self.c.columns // BLOCK
        first, column, lane = block // across * BLOCK + thread // self.lanes, block % across, thread % self.lanes
        rows = [first + i * self.step for i in range(BLOCK // self.step)]
        piece = column * self.lanes + lane
        parts = [self.load(x, row, piece, row < x.shape[0]) for row in rows]
        most = self.of_block([magnitude(part) for part in parts], thread)
        factor, inverse = compute_block_scale(most, NARROW, "float32")
        for row, part in zip(rows, parts, strict=True):
            narrow = rounded([v * inverse for v in part], DTYPES[NARROW])
            self.store(quantized, factors, row, piece, True, narrow, factor)

    name(blocks, "cudnn_moe_quantize_weights")

    def load(self, x: cute.Tensor, row: Int32, piece: Int32, there: cutlass.Boolean) -> list:
        """16 bytes of a row in float32; zeros where there are none."""
        part = cute.make_rmem_tensor(VALUES, x.element_type)
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
        self,
        quantized: cute.Tensor,
        factors: cute.Tensor,
        row: Int32,
        piece: Int32,
        there: Any,
        part: cute.Tensor,
        factor: Float32,
    ) -> None:
        """A thread's part of a row, if there is such a row, and one thread the factor of the row, or of the block."""
        height = const_expr(BLOCK if self.c.blocks else 1)  # rows that share a factor
        if there & (row < quantized.shape[0]):
            cute.autovec_copy(part, cute.local_tile(quantized[row, None], (VALUES,), (piece,)))
            if (piece % self.lanes == 0) & (row % height == 0):
                factors[row // height, piece // self.lanes] = factor


def among(value: Float32, lanes: int) -> Float32:
    """The largest value of so many neighbouring lanes, in each of them."""
    distance = 1
    while distance < lanes:
        value = maximum(value, cute.arch.shuffle_sync_bfly(value, distance))
        distance *= 2
    return value
