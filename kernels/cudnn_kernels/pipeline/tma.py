"""TMA: views for descriptors (concatenated GLU weights, ptr-arrays, ragged extents), loads, bulk copies."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

TMA_ALIGNMENT = 16  # bytes: TMA addresses and strides are multiples


def concat_glu_view(tensor: cute.Tensor, block: int) -> cute.Tensor:
    """A view of concatenated GLU weights (rows, columns, l) in which blocks of ``block`` rows alternate between the
    first and the second half.

    The row mode is (block, 2, rows / (2 block)): a TMA box of whole pairs takes the same number from each half.
    """
    rows, row_stride = tensor.shape[0], tensor.stride[0]
    shape = ((block, 2, rows // (2 * block)), *tensor.shape[1:])
    stride = ((row_stride, Int64(rows // 2) * row_stride, block * row_stride), *tensor.stride[1:])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def concat_glu_row(row: Int32, rows: Int32, block: int) -> Int32:
    """The row of the concatenated tensor that is row ``row`` of :func:`concat_glu_view`."""
    return row // (2 * block) * block + row // block % 2 * (rows // 2) + row % block


def concat_glu_shape(count: int, block: int) -> tuple[int, int, int]:
    """The shape of ``count`` rows of :func:`concat_glu_view`."""
    return (block, 2, count // (2 * block))


COORD_BITS = 30  # bits of an address, in units of TMA_ALIGNMENT, in each of two coordinates: together all 60


def address_space_view(
    element: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], pointers: cute.Tensor
) -> cute.Tensor:
    """A view of the whole address space as tensors of one shape; the last coordinate, :func:`ptr_array_coord`, selects
    the tensor's address.

    One TMA descriptor therefore serves a ptr-array, without tensormap updates in the kernel. The last mode counts from
    the pointer array, modulo 2^64 bytes, and has two dimensions because a coordinate has at most 31 bits. The view
    starts in mapped memory: TMA fills a box that is entirely out of bounds with zeros, but Hopper faults if it cannot
    read the descriptor's base address.
    """
    unit = ragged_step(element, True)
    low, high = (cute.assume(Int64(unit << bits), unit) for bits in (0, COORD_BITS))
    start = cute.make_ptr(element, address_space_base(pointers), cute.AddressSpace.gmem, assumed_align=TMA_ALIGNMENT)
    layout = cute.make_layout((*shape, (1 << COORD_BITS, 1 << COORD_BITS)), stride=(*stride, (low, high)))
    return cute.make_tensor(start, layout)


def address_space_base(pointers: cute.Tensor) -> Int64:
    """The address from which :func:`address_space_view` counts."""
    return pointers.iterator.toint() // TMA_ALIGNMENT * TMA_ALIGNMENT


def ptr_array_view(element: Any, rows: Any, columns: Any, row_major: bool, pointers: cute.Tensor) -> cute.Tensor:
    """:func:`address_space_view` of packed matrices, whose leading dimension is a multiple of 16 bytes."""
    pitch = cute.assume(Int64(columns if row_major else rows), ragged_step(element, True))
    return address_space_view(element, (rows, columns), (pitch, 1) if row_major else (1, pitch), pointers)


def ptr_array_coord(pointers: cute.Tensor | None, index: Any) -> Any:
    """The last coordinate of tensor ``index`` of a ptr-array; ``index`` itself without one."""
    if pointers is None:
        return index
    offset = (Int64(pointers[index]) - address_space_base(pointers)) // TMA_ALIGNMENT
    return Int32(offset & ((1 << COORD_BITS) - 1)), Int32((offset >> COORD_BITS) & ((1 << COORD_BITS) - 1))


def ragged_view(tensor: cute.Tensor, dim: int) -> cute.Tensor:
    """A view of (rows, columns, 1) for ragged TMA: boxes end in ``dim`` at a bound that the last coordinate selects.

    The mode ``dim`` ends at a large index, see :func:`ragged_wrap`. A box that begins ``count`` elements before that
    end has ``count`` elements in bounds; TMA loads zeros for the others and does not store them. The last coordinate
    moves the view by elements (by :func:`ragged_step` if they are contiguous) and then back to the tensor by strides
    that add up to nearly 2^64 bytes, since addresses wrap around. A group that ends in the middle of a tile so needs no
    separate descriptor, and the view begins at the tensor, in mapped memory (see :func:`address_space_view`).
    """
    shape, stride = list(tensor.shape), list(tensor.stride)
    step = ragged_step(tensor.element_type, isinstance(stride[dim], int) and stride[dim] == 1)
    steps, end = ragged_wrap(step)
    step_stride = step * stride[dim]
    wrap_stride = (1 << 64) // steps * 8 // tensor.element_type.width
    shape[2], stride[2] = (tensor.shape[dim] // step + 1, steps + 1), (step_stride, wrap_stride - step_stride)
    shape[dim] = end
    return cute.make_tensor(tensor.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


def ragged_wrap(step: int) -> tuple[int, int]:
    """How many steps take a :func:`ragged_view` once around the address space, and the index where its mode ends."""
    steps = 1 << (26 if step > 1 else 30)
    return steps, steps * step


def ragged_step(element: Any, contiguous: bool) -> int:
    """The number of elements that group boundaries are multiples of, along a contiguous or strided dimension."""
    return TMA_ALIGNMENT * 8 // element.width if contiguous else 1


def ragged_coord(first: Int32, end: Int32, extent: int, step: int) -> tuple[Int32, Any]:
    """The coordinate in ``dim`` and the last coordinate of a :func:`ragged_view` box of ``extent`` elements that holds
    the elements from ``first`` to before ``end``. ``step`` is that of :func:`ragged_step`.
    """
    count = cutlass.max(cutlass.min(end - first, extent), 0)
    steps, bound = ragged_wrap(step)
    return bound - count, ((first + count) // step, steps)


def partition_tile(atom: Any, smem: cute.Tensor, tile: cute.Tensor) -> tuple[Any, Any]:
    """``tma_partition`` of a tile in shared and in global memory, without multicast."""
    one_cta, (dst, src) = cute.make_layout(1), (cute.group_modes(x, 0, 2) for x in (smem, tile))
    return cpasync.tma_partition(atom, 0, one_cta, dst, src)


def tma_load(atom: Any, tile: cute.Tensor, smem: cute.Tensor, full: Any) -> None:
    """Issues the TMA load of a tile; its bytes complete on the mbarrier ``full``."""
    dst, src = partition_tile(atom, smem, tile)
    cute.copy(atom, src, dst, tma_bar_ptr=full)


def cp_async_zfill(target: Int32, source: Int64, zero_fill: cutlass.Boolean, size: int = TMA_ALIGNMENT) -> None:
    """``cp.async`` of 4, 8 or 16 bytes to shared memory; writes zeros where ``zero_fill``."""
    cache = "cg" if size == TMA_ALIGNMENT else "ca"  # bypass L1, or not
    cute.arch.inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[target, source, zero_fill],
    )


def cp_async_bulk(source: cute.Pointer, target: cute.Pointer, size: int, full: cute.Pointer) -> None:
    """One thread: ``cp.async.bulk`` of ``size`` bytes to shared memory, completing on the mbarrier ``full``."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target.toint(), source.toint(), Int32(size), full.toint()],
    )
