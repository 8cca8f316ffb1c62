"""A causal mask that names its band instead of storing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cudnn.errors import refused


class CausalMask(Tensor):
    """A mask ``[B, 1, S_q, S_kv]`` of type bool: row i sees the keys up to ``i + offset``, of a window the last ones.

    It has no storage. Slices along the batch and the rows, and of the first keys, are masks of this class; any other
    operation reads the mask as a plain tensor, which :meth:`dense` makes. So a model may treat it as any mask, and an
    attention function that knows the class takes the band.
    """

    offset: int
    window: int | None
    _anchor: Tensor

    @staticmethod
    def __new__(cls, anchor: Tensor, shape: tuple[int, ...], offset: int = 0, window: int | None = None) -> CausalMask:
        """``anchor``: any tensor on the mask's device; ``torch.compile`` traces it in place of the mask."""
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=anchor.device)
        mask._anchor, mask.offset, mask.window = anchor, offset, window
        return mask

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        rows = torch.arange(self.shape[2], dtype=torch.int64, device=self.device)[:, None] + self.offset
        keys = torch.arange(self.shape[3], dtype=torch.int64, device=self.device)
        seen = keys <= rows
        if self.window is not None:
            seen &= keys > rows - self.window
        return seen.expand(self.shape)

    def __repr__(self) -> str:
        return f"CausalMask(shape={tuple(self.shape)}, offset={self.offset}, window={self.window})"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refused_write("__setitem__")

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, int | None]]:
        return ["_anchor"], (self.offset, self.window)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[int, int | None], size: Any, _: Any
    ) -> CausalMask:
        return CausalMask(inner["_anchor"], tuple(size), *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            return args[0]._of(tuple(args[0].shape), args[0].offset)
        if func is torch.ops.aten.slice.Tensor and (sliced := args[0]._sliced(*args[1:], **kwargs)) is not None:
            return sliced
        if func is torch.ops.aten.clone.default:
            return args[0].dense().contiguous()  # may be written
        if func._schema.is_mutable and isinstance(args[0], CausalMask):
            raise _refused_write(func._schema.name)
        dense = pytree.tree_map_only(CausalMask, CausalMask.dense, (args, kwargs))
        return func(*dense[0], **dense[1])

    def _of(self, shape: tuple[int, ...], offset: int) -> CausalMask:
        return CausalMask(self._anchor, shape, offset, self.window)

    def _sliced(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
        """The slice as a mask of this class, or None where it is none."""
        dim, size = dim % 4, self.shape[dim]
        first, last, _ = slice(start, end).indices(size)
        if step != 1 or (dim == 3 and first):
            return None
        shape = [*self.shape[:dim], max(last - first, 0), *self.shape[dim + 1 :]]
        return self._of(tuple(shape), self.offset + (first if dim == 2 else 0))


def _refused_write(where: str) -> ValueError:
    cure = "call .clone() on the mask first"
    return refused(ValueError, where, "self", "a CausalMask", "a mask with storage", cure)
