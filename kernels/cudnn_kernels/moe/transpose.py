"""Tiles of 128 x 128 elements that a CTA reads once and stores quantized to e4m3, by rows and transposed.

A thread holds 8 rows x 8 columns. 16 lanes hold 128 columns of 8 rows, 16 bytes of a row each; a warp has 16 rows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.quantize import compute_block_scale, magnitude
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.moe.combining import rounded
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE
from cudnn_kernels.threads import WARP_SIZE

THREADS = 256  # of a CTA
VALUES = 8  # rows, and columns, of a thread
LANES = BLOCK // VALUES  # threads that share 8 rows
WARPS = THREADS // WARP_SIZE
PITCH = BLOCK + VALUES  # bytes between columns in shared memory: 16 lanes store 8 bytes each to different banks


class TransposedTile:
    """The shared memory in which a CTA transposes a tile in e4m3, and reduces its columns."""

    def __init__(self, thread: Int32) -> None:
        self.thread, self.group, self.lane = thread, thread // LANES, thread % LANES
        smem = SmemAllocator()
        layout = cute.make_layout((BLOCK, BLOCK), stride=(PITCH, 1))
        self.bytes = smem.allocate_tensor(DTYPES[FP8_DTYPE], layout, byte_alignment=16)
        self.maxima = smem.allocate_tensor(Float32, cute.make_layout((WARPS, BLOCK), stride=(BLOCK, 1)), 16)
        self.multipliers = smem.allocate_tensor(Float32, cute.make_layout(BLOCK), 16)

    def reduce_columns(self, values: list[list[Any]]) -> None:
        """The largest magnitude of each of a thread's 8 columns over the rows of its warp, to shared memory."""
        warp, amax = self.thread // WARP_SIZE, cute.make_rmem_tensor(VALUES, Float32)
        for j in range(VALUES):
            of_thread = magnitude([row[j] for row in values])
            amax[j] = maximum(of_thread, cute.arch.shuffle_sync_bfly(of_thread, LANES))
        cute.autovec_copy(amax, cute.local_tile(self.maxima[warp, None], (VALUES,), (self.lane,)))

    def scale_columns(self, scales: cute.Tensor) -> None:
        """One thread per column: computes its scale factor from the warps' maxima and stores it; the multipliers go to
        shared memory.
        """
        scale_column(self.maxima, self.thread, scales, self.multipliers)

    def column_multipliers(self) -> list[Float32]:
        """The multipliers of a thread's 8 columns, which :meth:`scale_columns` wrote."""
        vector = cute.make_rmem_tensor(VALUES, Float32)
        cute.autovec_copy(cute.local_tile(self.multipliers, (VALUES,), (self.lane,)), vector)
        return [vector[j] for j in range(VALUES)]

    def store(self, values: list[list[Any]], target: cute.Tensor) -> None:
        """Stores a thread's values, rounded to e4m3, transposed: to ``target`` (128 columns, 128 rows), global memory.

        Lane l has the columns 8 l + j. Column 8 l + j is row 16 j + l of the shared memory, so that the lanes' stores
        of one j are 8 bytes apart, modulo the banks.
        """
        dtype = DTYPES[FP8_DTYPE]
        for j in range(VALUES):
            column = rounded([row[j] for row in values], dtype)
            cute.autovec_copy(
                column, cute.local_tile(self.bytes[j * LANES + self.lane, None], (VALUES,), (self.group,))
            )
        cute.arch.sync_threads()
        for i in range(VALUES):
            position = self.group + i * (THREADS // LANES)
            column = cute.make_rmem_tensor(VALUES, dtype)
            cute.autovec_copy(cute.local_tile(self.bytes[position, None], (VALUES,), (self.lane,)), column)
            index = position % LANES * VALUES + position // LANES
            cute.autovec_copy(column, cute.local_tile(target[index, None], (VALUES,), (self.lane,)))


@cute.jit
def scale_column(maxima: cute.Tensor, column: Int32, scales: cute.Tensor, multipliers: cute.Tensor) -> None:
    """Writes the scale factor of a column and its multiplier, from the maxima (warps, columns)."""
    if column < BLOCK:
        amax = maxima[0, column]
        for warp in cutlass.range_constexpr(1, WARPS):
            amax = maximum(amax, maxima[warp, column])
        scale, multiplier = compute_block_scale(amax, FP8_DTYPE, "float32")
        scales[column] = scale
        multipliers[column] = multiplier


def lanes_max(value: Float32, lanes: cutlass.Constexpr[int]) -> Float32:
    """The maximum over ``lanes`` consecutive lanes, in all of them."""
    distance = 1
    while distance < lanes:
        value = maximum(value, cute.arch.shuffle_sync_bfly(value, distance))
        distance *= 2
    return value
