"""The copy engine's view of tensors, and parts of tensors that end where no tile ends."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

PIECE = 16  # bytes: addresses and strides that the copy engine knows are multiples


def woven(tensor: cute.Tensor, block: int) -> cute.Tensor:
    """A view of (rows, columns, l) in which blocks of so many rows come in turn from the first and the second half.

    The rows are a mode (block, 2, half of the blocks): a box of whole pairs takes as many from one half as from the
    other.
    """
    rows, far = tensor.shape[0], tensor.stride[0]
    shape = ((block, 2, rows // (2 * block)), *tensor.shape[1:])
    stride = ((far, Int64(rows // 2) * far, block * far), *tensor.stride[1:])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def unwoven(row: Int32, rows: Int32, block: int) -> Int32:
    """The number in the tensor of a row of such a view."""
    return row // (2 * block) * block + row // block % 2 * (rows // 2) + row % block


def woven_rows(count: int, block: int) -> tuple[int, int, int]:
    """The shape of so many rows of such a view."""
    return (block, 2, count // (2 * block))


HALF = 30  # bits of a distance, in pieces, that each of two parts of a last index has: together all 60


def everywhere(element: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], pointers: cute.Tensor) -> cute.Tensor:
    """A view of all memory as tensors of a shape: the last index, an :func:`address`, says where one begins.

    So tensors that lie anywhere need one descriptor, which nobody edits. The last index counts from the list of their
    addresses, once around all 2^64 bytes, and has two dimensions, since one has no more than 2^31 coordinates. The view
    must begin in memory that exists: a box that lies wholly outside a tensor is filled with zeros, but on Hopper it
    faults where the view's first address cannot be read.
    """
    piece = granule(element, True)
    near, far = (cute.assume(Int64(piece << bits), piece) for bits in (0, HALF))
    start = cute.make_ptr(element, origin(pointers), cute.AddressSpace.gmem, assumed_align=PIECE)
    layout = cute.make_layout((*shape, (1 << HALF, 1 << HALF)), stride=(*stride, (near, far)))
    return cute.make_tensor(start, layout)


def origin(pointers: cute.Tensor) -> Int64:
    """Where the view of a list of addresses begins."""
    return pointers.iterator.toint() // PIECE * PIECE


def matrices(element: Any, rows: Any, columns: Any, row_major: bool, pointers: cute.Tensor) -> cute.Tensor:
    """The same for matrices without gaps between rows or columns, which are multiples of 16 bytes."""
    pitch = cute.assume(Int64(columns if row_major else rows), granule(element, True))
    return everywhere(element, (rows, columns), (pitch, 1) if row_major else (1, pitch), pointers)


def address(pointers: cute.Tensor | None, number: Any) -> Any:
    """The last index of a tensor whose address is in a list; its number, where there is no list."""
    if pointers is None:
        return number
    piece = (Int64(pointers[number]) - origin(pointers)) // PIECE
    return Int32(piece & ((1 << HALF) - 1)), Int32((piece >> HALF) & ((1 << HALF) - 1))


def ending(tensor: cute.Tensor, dim: int) -> cute.Tensor:
    """A view of (rows, columns, 1) whose boxes end in ``dim`` where their last index says.

    The dimension ends at an element with a high number, :func:`far`. A box that begins ``count`` elements before it
    holds ``count`` elements and, beyond them, what is outside the view: zeros when it is loaded, nothing when it is
    stored. The last index says where in the tensor that is: it moves the view by elements, or by :func:`granule` where
    they are contiguous, and back to the tensor by steps that add up to nearly 2^64 bytes, as addresses wrap around. So
    a part of a tensor that ends in the middle of a tile needs no descriptor of its own, and the view begins where the
    tensor does, in memory that exists, as a view must (see :func:`everywhere`).
    """
    shape, stride = list(tensor.shape), list(tensor.stride)
    step = granule(tensor.element_type, isinstance(stride[dim], int) and stride[dim] == 1)
    steps, end = far(step)
    once = step * stride[dim]
    turn = (1 << 64) // steps * 8 // tensor.element_type.width
    shape[2], stride[2] = (tensor.shape[dim] // step + 1, steps + 1), (once, turn - once)
    shape[dim] = end
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


def far(step: int) -> tuple[int, int]:
    """How many steps lead a view of :func:`ending` back to its tensor, and the element where its dimension ends."""
    steps = 1 << (26 if step > 1 else 30)
    return steps, steps * step


def granule(element: Any, contiguous: bool) -> int:
    """Of how many elements parts of a tensor are multiples, along a dimension that is contiguous or not."""
    return PIECE * 8 // element.width if contiguous else 1


def clipped(first: Int32, end: Int32, extent: int, step: int) -> tuple[Int32, Any]:
    """Where a box of :func:`ending`, ``extent`` long, begins that holds what there is from ``first`` to before ``end``,
    and its last index. ``step`` is the granule.
    """
    count = cutlass.max(cutlass.min(end - first, extent), 0)
    steps, last = far(step)
    return last - count, ((first + count) // step, steps)


def partition(atom: Any, buffer: cute.Tensor, tile: cute.Tensor) -> tuple[Any, Any]:
    """A tile in shared and in global memory, or several in each, as the copy engine sees them."""
    alone, (to, of) = cute.make_layout(1), (cute.group_modes(x, 0, 2) for x in (buffer, tile))
    return cpasync.tma_partition(atom, 0, alone, to, of)


def fetch(atom: Any, tile: cute.Tensor, buffer: cute.Tensor, full: Any) -> None:
    """Starts the copy of a tile to shared memory, which a barrier counts."""
    to, of = partition(atom, buffer, tile)
    cute.copy(atom, of, to, tma_bar_ptr=full)


def copy_or_clear(target: Int32, source: Int64, clears: cutlass.Boolean, size: int = PIECE) -> None:
    """Starts a copy of 4 or 16 bytes to an address in shared memory, or of zeros."""
    cached = "cg" if size == PIECE else "ca"  # past the L1 cache, or not
    cute.arch.inline_ptx(
        f"cp.async.{cached}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[target, source, clears],
    )


def copy_bytes(source: cute.Pointer, target: cute.Pointer, size: int, full: cute.Pointer) -> None:
    """One thread: starts a copy of so many bytes to shared memory, which a barrier counts."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source.toint(), Int32(size), full.toint()],
    )
