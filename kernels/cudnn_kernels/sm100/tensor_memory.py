"""Tensor memory: 128 lanes, which are rows, of 512 columns of 32 bits. A thread of four warps has a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, select_
from cutlass.cute.nvgpu import tcgen05

from cudnn_kernels.epilogue.fragment import RowLayout

LANES = 128
COLUMNS = 512
LANE = 1 << 16  # the distance of lanes in an address
CHUNK = 32  # columns that a thread loads or stores with one instruction


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
        copy, place = _chunk(tcgen05.Ld32x32bOp, pointer + first)
        cute.copy(copy, copy.get_slice(thread).partition_S(place), _part(values, first))


def store(pointer: cute.Pointer, thread: Int32, values: cute.Tensor) -> None:
    """Starts to store it."""
    for first in range(0, cute.size(values), CHUNK):
        copy, place = _chunk(tcgen05.St32x32bOp, pointer + first)
        cute.copy(copy, _part(values, first), copy.get_slice(thread).partition_D(place))


def _chunk(operation: Any, pointer: cute.Pointer) -> tuple[Any, cute.Tensor]:
    place = cute.make_tensor(pointer, cute.make_layout((LANES, CHUNK), stride=(LANE, 1)))
    atom = cute.make_copy_atom(operation(tcgen05.Repetition(CHUNK)), pointer.dtype)
    return tcgen05.make_tmem_copy(atom, place), place


def _part(values: cute.Tensor, first: int) -> cute.Tensor:
    return cute.make_tensor(values.iterator + first, cute.make_layout(((CHUNK, 1), 1, 1)))
