"""Tensor memory: 128 lanes, which are rows, of 512 columns of 32 bits. A thread of four warps has a lane.

And the products whose sums attention has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, select_
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from cudnn_kernels.epilogue.fragment import RowLayout
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.vectors import VECTOR

LANES = 128
COLUMNS = 512
LANE = 1 << 16  # the distance of lanes in an address
CHUNK = 32  # columns that a thread loads or stores with one instruction, at most


@dataclass(frozen=True)
class TensorMemoryRows(RowLayout):
    """A thread has a whole row: lane for lane of tensor memory.

    One chain of additions would last longer than all else, and what waits for it would fill the registers; of four, the
    compiler starts more at once than registers hold.
    """

    slots: int = 1
    neighbours: int = 1
    run: int = 32
    matrices: bool = False
    chains: int = 2
    few: int = 4

    def order(self, width: int, slot: int) -> Sequence[int]:
        return range(width)

    def row(self, thread: Int32, slot: int) -> Int32:
        return thread

    def inside(self, thread: Int32, slot: int, rows: Int32, columns: Int32) -> Callable[[int], Any]:
        end = Int32(select_(thread < rows, columns, Int32(0)))  # so that one comparison and one choice do for a value
        return lambda position: self.column(thread, position) < end


@dataclass(frozen=True)
class Product:
    """A B^T of 128 rows and so many ``columns``, in 16 or 8 bits, summed in float32. Plain data.

    B is in a buffer of shared memory, rows of ``depth`` contiguous elements. A is there too, its rows likewise. With
    ``rounded``, A is in tensor memory, and B's columns are the contiguous ones.
    """

    dtype: Any
    columns: int
    depth: int
    rounded: bool = False

    def mma(self) -> cute.TiledMma:
        """The instruction, one for each use: to accumulate or not is a value of its own."""
        k, source, tile = OperandMajorMode.K, tcgen05.OperandSource, (LANES, self.columns)
        major, source = (OperandMajorMode.MN, source.TMEM) if self.rounded else (k, source.SMEM)
        one = tcgen05.CtaGroup.ONE
        return sm100.make_trivial_tiled_mma(self.dtype, self.dtype, k, major, Float32, one, tile, source)

    def left(self, buffers: cute.Tensor, stage: int = 0) -> cute.Tensor:
        """A in a buffer of shared memory, (rows, elements, stages): ``depth`` elements for each of several products."""
        mma, (_, elements, stages) = self.mma(), (cute.size(buffers, mode=[i]) for i in range(3))
        layout = sm100.make_smem_layout_a(mma, (LANES, self.columns, elements), self.dtype, stages)
        return mma.make_fragment_A(cute.make_tensor(buffers.iterator, layout.outer))[None, None, None, stage]

    def left_rounded(self, pointer: cute.Pointer) -> cute.Tensor:
        """A in tensor memory, as :func:`store_rounded` leaves it."""
        mma, where = self.mma(), cute.recast_ptr(pointer, dtype=self.dtype)
        layout = sm100.make_smem_layout_a(mma, (LANES, self.columns, self.depth), self.dtype, 1)
        left = mma.make_fragment_A(cute.make_tensor(where, layout.outer))
        return cute.make_tensor(where, left.layout)[None, None, None, 0]

    def issue(
        self, sums: cute.Pointer, left: cute.Tensor, buffers: cute.Tensor, stage: Any, adds: Any, part: int = 0
    ) -> None:
        """Issues the product of a part of A with a buffer of B, (columns, depth, stages); it ``adds`` to the sums."""
        mma, shape, stages = self.mma(), (LANES, self.columns, self.depth), cute.size(buffers, mode=[2])
        layout = sm100.make_smem_layout_b(mma, shape, self.dtype, stages)
        right = mma.make_fragment_B(cute.make_tensor(buffers.iterator, layout.outer))
        acc = cute.make_tensor(sums, mma.make_fragment_C(mma.partition_shape_C((LANES, self.columns))).layout)
        count = self.depth * self.dtype.width // 256  # instructions
        mma.set(tcgen05.Field.ACCUMULATE, adds)
        for k in range(count):
            cute.gemm(mma, acc, left[None, None, part * count + k], right[None, None, k, stage], acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def allocate(smem: Any, warp: Int32) -> cute.Pointer:
    """All of tensor memory, by the first warp; the address is where this says when all have met."""
    holder = smem.allocate_array(Int32, 1)
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, holder)
    return holder


@cute.jit
def free(pointer: cute.Pointer, warp: Int32, threads: int) -> None:
    """So many threads, the first ones, when they have read what they need."""
    barriers.wait(barriers.BlackwellAttention.END, threads)
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, COLUMNS)


def load(pointer: cute.Pointer, thread: Int32, values: cute.Tensor) -> None:
    """Starts to load a thread's lane of the columns from ``pointer`` on, ``CHUNK`` at a time."""
    for first in range(0, cute.size(values), CHUNK):
        copy, place, part = _chunk(tcgen05.Ld32x32bOp, pointer, values, first)
        cute.copy(copy, copy.get_slice(thread).partition_S(place), part)


def store(pointer: cute.Pointer, thread: Int32, values: cute.Tensor) -> None:
    """Starts to store it."""
    for first in range(0, cute.size(values), CHUNK):
        copy, place, part = _chunk(tcgen05.St32x32bOp, pointer, values, first)
        cute.copy(copy, part, copy.get_slice(thread).partition_D(place))


def store_rounded(pointer: cute.Pointer, thread: Int32, values: cute.Tensor, dtype: Any) -> None:
    """Starts to store values of 16 bits, two in a column, as a product takes its left operand from there."""
    rounded = cute.make_rmem_tensor(cute.size(values), dtype)
    rounded.store(values.load().to(dtype))
    store(cute.recast_ptr(pointer, dtype=Int32), thread, cute.recast_tensor(rounded, Int32))


@cute.jit
def to_shared(pointer: cute.Pointer, thread: Int32, factor: Float32, buffer: cute.Tensor, exists: Boolean) -> None:
    """A thread's lane, times a factor and rounded, to its row of a buffer (128, n); zeros, where nothing ``exists``."""
    for chunk in cutlass.range_constexpr(cute.size(buffer, mode=[1]) // CHUNK):
        values = cute.make_rmem_tensor(CHUNK, Float32)
        values.fill(0.0)
        if exists:
            load(pointer + chunk * CHUNK, thread, values)
            cute.arch.fence_view_async_tmem_load()
        rounded = cute.make_rmem_tensor(CHUNK, buffer.element_type)
        rounded.store((values.load() * factor).to(buffer.element_type))
        for i in cutlass.range_constexpr(CHUNK // VECTOR):
            source = cute.make_tensor(rounded.iterator + i * VECTOR, cute.make_layout((1, VECTOR)))
            where = (thread, chunk * (CHUNK // VECTOR) + i)
            cute.autovec_copy(source, cute.local_tile(buffer, (1, VECTOR), where))


def commit(barrier: cute.Pointer) -> None:
    """Lets a barrier know when the products issued so far are done."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


def _chunk(operation: Any, pointer: cute.Pointer, values: cute.Tensor, first: int) -> tuple[Any, Any, Any]:
    """The copy of columns from ``first`` on, those in tensor memory, and a thread's values of them."""
    width = min(CHUNK, cute.size(values) - first)
    place = cute.make_tensor(pointer + first, cute.make_layout((LANES, width), stride=(LANE, 1)))
    atom = cute.make_copy_atom(operation(tcgen05.Repetition(width)), pointer.dtype)
    part = cute.make_tensor(values.iterator + first, cute.make_layout(((width, 1), 1, 1)))
    return tcgen05.make_tmem_copy(atom, place), place, part
