"""Tensor memory (TMEM): allocation, tcgen05.ld and tcgen05.st, and the tcgen05 MMAs of attention.

Tensor memory has 128 lanes of 512 columns of 32 bits. An accumulator of 128 rows has a row per lane and a column per
column. Thread i of four consecutive warps accesses lane i.
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

from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.fragment import RowLayout
from cudnn_kernels.pipeline.vectors import VECTOR

LANES = 128
COLUMNS = 512
LANE = 1 << 16  # the stride of lanes in a TMEM address
CHUNK = 32  # columns that one tcgen05.ld or tcgen05.st moves, at most


@dataclass(frozen=True)
class TensorMemoryRows(RowLayout):
    """Each thread holds a whole row, loaded from one lane of tensor memory.

    A reduction has two chains: with one, latency dominates and values that wait for it fill the registers; with four,
    the compiler keeps more values in flight than registers hold.
    """

    slots: int = 1
    lanes_per_row: int = 1
    run: int = 32
    matrices: bool = False
    chains: int = 2
    stream_width: int = 4

    def order(self, width: int, slot: int) -> Sequence[int]:
        return range(width)

    def row(self, thread: Int32, slot: int) -> Int32:
        return thread

    def in_bounds(self, thread: Int32, slot: int, rows: Int32, columns: Int32) -> Callable[[int], Any]:
        end = Int32(select_(thread < rows, columns, Int32(0)))  # one comparison and one select per value
        return lambda position: self.column(thread, position) < end


@dataclass(frozen=True)
class Umma:
    """acc (+)= A B^T of 128 rows and ``columns`` columns, 16-bit or 8-bit operands, by one CTA. Plain data.

    A and B are in stages of shared memory, K-major, ``depth`` elements per row. With ``a_in_tmem``, A is in tensor
    memory and B is MN-major.
    """

    dtype: Any
    columns: int
    depth: int
    a_in_tmem: bool = False

    def mma(self) -> cute.TiledMma:
        """A new tiled MMA for each use: its accumulate flag is an IR value."""
        k, source, tile = OperandMajorMode.K, tcgen05.OperandSource, (LANES, self.columns)
        major, source = (OperandMajorMode.MN, source.TMEM) if self.a_in_tmem else (k, source.SMEM)
        group = tcgen05.CtaGroup.ONE
        return sm100.make_trivial_tiled_mma(self.dtype, self.dtype, k, major, Float32, group, tile, source)

    def fragment_a(self, buffers: cute.Tensor, stage: int = 0) -> cute.Tensor:
        """The fragment of A in a stage of shared memory, (rows, elements, stages); its elements along k are one or
        several blocks of ``depth``.
        """
        mma, (_, elements, stages) = self.mma(), (cute.size(buffers, mode=[i]) for i in range(3))
        layout = sm100.make_smem_layout_a(mma, (LANES, self.columns, elements), self.dtype, stages)
        return mma.make_fragment_A(cute.make_tensor(buffers.iterator, layout.outer))[None, None, None, stage]

    def tmem_fragment_a(self, pointer: cute.Pointer) -> cute.Tensor:
        """The fragment of A in tensor memory, as :func:`store_as` stores it."""
        mma, address = self.mma(), cute.recast_ptr(pointer, dtype=self.dtype)
        layout = sm100.make_smem_layout_a(mma, (LANES, self.columns, self.depth), self.dtype, 1)
        fragment = mma.make_fragment_A(cute.make_tensor(address, layout.outer))
        return cute.make_tensor(address, fragment.layout)[None, None, None, 0]

    def issue(
        self, acc: cute.Pointer, a: cute.Tensor, stages: cute.Tensor, stage: Any, accumulate: Any, block: int = 0
    ) -> None:
        """Issues the MMA of a block of ``depth`` elements of A with a stage of B, (columns, depth, stages)."""
        mma, shape, count = self.mma(), (LANES, self.columns, self.depth), cute.size(stages, mode=[2])
        layout = sm100.make_smem_layout_b(mma, shape, self.dtype, count)
        b = mma.make_fragment_B(cute.make_tensor(stages.iterator, layout.outer))
        acc = cute.make_tensor(acc, mma.make_fragment_C(mma.partition_shape_C((LANES, self.columns))).layout)
        k_blocks = self.depth * self.dtype.width // 256  # instructions: each takes 32 bytes along k
        mma.set(tcgen05.Field.ACCUMULATE, accumulate)
        for k in range(k_blocks):
            cute.gemm(mma, acc, a[None, None, block * k_blocks + k], b[None, None, k, stage], acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)


@cute.jit
def allocate(smem: Any, warp: Int32) -> cute.Pointer:
    """Warp 0 allocates all of tensor memory; its address is in shared memory after the CTA has synchronized."""
    holder = smem.allocate_array(Int32, 1)
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, holder)
    return holder


@cute.jit
def free(pointer: cute.Pointer, warp: Int32, threads: int) -> None:
    """``threads`` threads, warp 0 among them, after their last read: warp 0 deallocates tensor memory."""
    barriers.sync(barriers.BlackwellAttention.END, threads)
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, COLUMNS)


def load(pointer: cute.Pointer, thread: Int32, values: cute.Tensor) -> None:
    """Issues tcgen05.ld of a thread's lane, of the columns from ``pointer`` on, ``CHUNK`` at a time."""
    for first in range(0, cute.size(values), CHUNK):
        copy, tmem, chunk_values = _chunk(tcgen05.Ld32x32bOp, pointer, values, first)
        cute.copy(copy, copy.get_slice(thread).partition_S(tmem), chunk_values)


def store(pointer: cute.Pointer, thread: Int32, values: cute.Tensor) -> None:
    """Issues tcgen05.st of a thread's lane, of the columns from ``pointer`` on."""
    for first in range(0, cute.size(values), CHUNK):
        copy, tmem, chunk_values = _chunk(tcgen05.St32x32bOp, pointer, values, first)
        cute.copy(copy, chunk_values, copy.get_slice(thread).partition_D(tmem))


def store_as(pointer: cute.Pointer, thread: Int32, values: cute.Tensor, dtype: Any) -> None:
    """Issues the store of values as a 16-bit type, two per column: operand A of an MMA."""
    rounded = cute.make_rmem_tensor(cute.size(values), dtype)
    rounded.store(values.load().to(dtype))
    store(cute.recast_ptr(pointer, dtype=Int32), thread, cute.recast_tensor(rounded, Int32))


@cute.jit
def tmem_to_smem(pointer: cute.Pointer, thread: Int32, factor: Float32, buffer: cute.Tensor, exists: Boolean) -> None:
    """Copies a thread's lane, scaled and rounded, to its row of a buffer (128, n) in shared memory; zeros unless
    ``exists``.
    """
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
            coord = (thread, chunk * (CHUNK // VECTOR) + i)
            cute.autovec_copy(source, cute.local_tile(buffer, (1, VECTOR), coord))


def commit(barrier: cute.Pointer, mask: Any = None, group: Any = tcgen05.CtaGroup.ONE) -> None:
    """tcgen05.commit: arrives on an mbarrier when the MMAs issued so far by the CTA group are complete; with a
    multicast ``mask``, on that mbarrier in each of these CTAs of the cluster.
    """
    with cute.arch.elect_one():
        tcgen05.commit(barrier, mask, group)


def _chunk(operation: Any, pointer: cute.Pointer, values: cute.Tensor, first: int) -> tuple[Any, Any, Any]:
    """The tiled copy of columns from ``first`` on, the columns in tensor memory, and a thread's values of them."""
    width = min(CHUNK, cute.size(values) - first)
    tmem = cute.make_tensor(pointer + first, cute.make_layout((LANES, width), stride=(LANE, 1)))
    atom = cute.make_copy_atom(operation(tcgen05.Repetition(width)), pointer.dtype)
    chunk_values = cute.make_tensor(values.iterator + first, cute.make_layout(((width, 1), 1, 1)))
    return tcgen05.make_tmem_copy(atom, tmem), tmem, chunk_values
