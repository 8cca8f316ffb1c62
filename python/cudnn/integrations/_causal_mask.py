"""A causal mask that names its band instead of storing it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cudnn.errors import make_error


class CausalMask(Tensor):
    """A mask ``[B, 1, S_q, S_kv]`` of type bool: row i sees the keys up to ``i + offset``, of a window the last ones.

    With ``ends``, rows are packed sequences, which see their own keys alone: the offsets of all B * S rows, 0 first,
    int32. ``longest`` is the length of the longest.

    It has no storage. Slices along the batch and the rows, and of the first keys, are masks of this class; other views
    are a :class:`MaskView`, and any other operation reads the mask as a plain tensor, which :meth:`dense` makes. So a
    model may treat it as any mask, and an attention function that knows the class takes the band.
    """

    offset: int
    window: int | None
    ends: Tensor | None
    longest: int
    _anchor: Tensor

    @staticmethod
    def __new__(
        cls,
        anchor: Tensor,
        shape: tuple[int, ...],
        offset: int = 0,
        window: int | None = None,
        ends: Tensor | None = None,
        longest: int = 0,
    ) -> CausalMask:
        """``anchor``: any tensor on the mask's device; ``torch.compile`` traces it in place of the mask."""
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=anchor.device)
        mask._anchor, mask.offset, mask.window = anchor, offset, window
        mask.ends, mask.longest = ends, longest
        return mask

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        rows = torch.arange(self.shape[2], dtype=torch.int64, device=self.device)[:, None] + self.offset
        keys = torch.arange(self.shape[3], dtype=torch.int64, device=self.device)
        seen = keys <= rows
        if self.window is not None:
            seen &= keys > rows - self.window
        if self.ends is not None:
            places = torch.arange(self.shape[0] * self.shape[2], dtype=torch.int32, device=self.device)
            sequence = torch.searchsorted(self.ends, places, right=True).view(self.shape[0], 1, -1)
            seen = seen & (sequence[..., None] == sequence[..., None, :])
        return seen.expand(self.shape)

    def __repr__(self) -> str:
        packed = "" if self.ends is None else f", sequences={self.ends.shape[0] - 1}"
        return f"CausalMask(shape={tuple(self.shape)}, offset={self.offset}, window={self.window}{packed})"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refused_write("__setitem__")

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, int | None, int]]:
        return ["_anchor", *["ends"] * (self.ends is not None)], (self.offset, self.window, self.longest)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[int, int | None, int], size: Any, _: Any
    ) -> CausalMask:
        offset, window, longest = context
        return CausalMask(inner["_anchor"], tuple(size), offset, window, inner.get("ends"), longest)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            return args[0]._of(tuple(args[0].shape), args[0].offset)
        if func is torch.ops.aten.slice.Tensor and (sliced := args[0]._sliced(*args[1:], **kwargs)) is not None:
            return sliced
        if func is torch.ops.aten.clone.default:
            return args[0].dense().contiguous()  # may be written
        return _on_dense(func, args, kwargs)

    def _of(self, shape: tuple[int, ...], offset: int) -> CausalMask:
        return CausalMask(self._anchor, shape, offset, self.window, self.ends, self.longest)

    def _sliced(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
        """The slice as a mask of this class, or None where it is none."""
        dim, size = dim % 4, self.shape[dim]
        first, last, _ = slice(start, end).indices(size)
        if step != 1 or (dim == 3 and first) or (self.ends is not None and (first, last) != (0, size)):
            return None
        shape = [*self.shape[:dim], max(last - first, 0), *self.shape[dim + 1 :]]
        return self._of(tuple(shape), self.offset + (first if dim == 2 else 0))


class MaskView(Tensor):
    """A view of a :class:`CausalMask`, as a plain tensor that refuses writes: they would not reach the mask."""

    _dense: Tensor

    @staticmethod
    def __new__(cls, dense: Tensor) -> MaskView:
        strides, offset = dense.stride(), dense.storage_offset()
        view = Tensor._make_wrapper_subclass(cls, dense.shape, strides, offset, dtype=dense.dtype, device=dense.device)
        view._dense = dense
        return view

    def dense(self) -> Tensor:
        """The view as a plain tensor."""
        return self._dense

    def __repr__(self) -> str:
        return f"MaskView({self._dense!r})"

    def __setitem__(self, index: Any, value: Any) -> None:
        raise _refused_write("__setitem__")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_dense"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, *sizes: Any) -> MaskView:
        return MaskView(inner["_dense"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return func(args[0].dense(), **(kwargs or {}))  # may be written
        return _on_dense(func, args, kwargs or {})


MASKS = (CausalMask, MaskView)


def _on_dense(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on plain tensors in place of masks. Views of a mask stay such; a write to one is refused."""
    schema = func._schema
    for i, argument in enumerate(schema.arguments if schema.is_mutable else ()):
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if written and any(isinstance(x, MASKS) for x in pytree.tree_leaves(value)):
            raise _refused_write(schema.name)
    dense = pytree.tree_map_only(MASKS, lambda mask: mask.dense(), (args, kwargs))
    out = func(*dense[0], **dense[1])
    is_view = not schema.is_mutable and isinstance(args[0], MASKS) and any(x.alias_info for x in schema.returns)
    return pytree.tree_map_only(Tensor, MaskView, out) if is_view else out


def _refused_write(where: str) -> ValueError:
    hint = "call .clone() on the mask first"
    return make_error(ValueError, where, "self", "a CausalMask", "a mask with storage", hint)
