"""The copy engine's view of tensors, and parts of tensors that end where no tile ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, TFloat32
from cutlass.cute.nvgpu import cpasync


@dataclass
class Operand:
    """An operand (rows, k, l) on Hopper: the copy engine's atom and view, the ring, its box.

    ``share`` CTAs fetch a part of each tile and send it to all.
    """

    atom: Any
    tensor: cute.Tensor
    ring: cute.Tensor
    shape: tuple[int, int]
    share: int


def fetch(o: Operand, start: tuple[Any, Any], last: Any, stage: Int32, full: Any, place: Int32, mask: Any) -> None:
    """Starts the copy of the tile whose first element is ``start``, for the last index ``last``, into a buffer.

    This CTA is the one with the number ``place`` of those that share the tile, which are ``mask`` in the cluster.
    """
    moved = cute.domain_offset((*start, 0), o.tensor)
    tile = cute.local_tile(moved, o.shape, (0, 0, last))
    target, source = cpasync.tma_partition(
        o.atom, place, cute.make_layout(o.share), cute.group_modes(o.ring, 0, 2), cute.group_modes(tile, 0, 2)
    )
    mask = mask if o.share > 1 else None
    cute.copy(o.atom, source, target[None, stage], tma_bar_ptr=full, mcast_mask=mask)


def descriptor(tensor: cute.Tensor, shape: tuple[int, int], layout: Any, share: int = 1) -> tuple[Any, Any]:
    """The copy engine's atom and view of a tensor, for boxes of a shape that ``share`` CTAs fetch together.

    It rounds float32 to tf32, to nearest; wgmma would truncate.
    """
    op = cpasync.CopyBulkTensorTileG2SOp() if share == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
    kind = TFloat32 if tensor.element_type == Float32 else None
    return cpasync.make_tiled_tma_atom(op, tensor, layout, shape, num_multicast=share, internal_type=kind)


def ending(tensor: cute.Tensor, dim: int, extent: int) -> cute.Tensor:
    """A view of (rows, columns, 1) whose boxes, ``extent`` long in ``dim``, end where their last index says.

    Element r of the dimension and last index s is the tensor's element s + r - extent. A box that begins at
    extent - count and has the last index first + count holds ``count`` elements from ``first`` on, and beyond them what
    is outside the view: zeros when it is loaded, nothing when it is stored. So a part of a tensor that ends in the
    middle of a tile needs no descriptor of its own.
    """
    far = tensor.stride[dim]
    shape, stride = list(tensor.shape), list(tensor.stride)
    shape[dim], shape[2], stride[2] = extent, tensor.shape[dim] + 1, far
    start = tensor.iterator - Int64(extent) * far
    return cute.make_tensor(start.align(16), cute.make_layout(tuple(shape), stride=tuple(stride)))
