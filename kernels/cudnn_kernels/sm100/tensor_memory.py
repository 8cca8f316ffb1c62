"""Tensor memory: 128 lanes, which are rows, of 512 columns of 32 bits. A thread of four warps has a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_
from cutlass.cute.nvgpu import tcgen05

from cudnn_kernels.epilogue.fragment import RowLayout

LANES = 128
COLUMNS = 512
LANE = 1 << 16  # the distance of lanes in an address
CHUNK = 32  # columns that a thread loads or stores with one instruction, at most
VECTOR = 8  # elements of 16 bytes


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
