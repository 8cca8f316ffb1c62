"""Expert weights that FSDP2 has gathered in e4m3: the tensor that autograd and the layer see, without 16-bit memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn.errors import make_error
from cudnn.runtime.registration import register_operand_class
from cudnn.runtime.run import has_kernel, kernel
from cudnn_kernels.moe.configuration import TransposeQuantizedConfiguration

_TRANSPOSE = "cudnn_kernels.moe.transpose_quantized:TransposeQuantized"
_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.as_strided.default)
_FACTORIES = (_aten.empty_like.default, _aten.zeros_like.default, _aten.new_empty.default, _aten.new_zeros.default)


class GatheredCopies:
    """The e4m3 copies of a gathered weight (E, n, k), in memory that FSDP2 frees and allocates.

    ``values`` and ``scales`` are what was gathered. ``transposed`` and ``transposed_scales`` have memory from
    :meth:`both_ways` on, which only backward passes call, until the weight is resharded or gathered again.
    """

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales
        self.transposed, self.transposed_scales = (x.new_empty(x.mT.shape) for x in (values, scales))
        self._is_transposed = False
        self._free_transposed()

    def renew(self, values: Tensor, scales: Tensor) -> None:
        """Takes newly gathered values."""
        self.values, self.scales, self._is_transposed = values, scales, False
        self._free_transposed()

    def by_rows(self) -> tuple[Tensor, Tensor]:
        """``values`` and ``scales``.

        Raises:
            RuntimeError: they have been freed.
        """
        if not self.values.untyped_storage().size():
            allowed = "one that is gathered now"
            raise make_error(RuntimeError, "MoE", "weight", "one that FSDP2 has resharded", allowed, "call the layer")
        return self.values, self.scales

    def both_ways(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """:meth:`by_rows`, and transposed, which is computed once per gather."""
        values, scales = self.by_rows()
        if not self._is_transposed or not self.transposed.untyped_storage().size():
            for x in (self.transposed, self.transposed_scales):
                x.untyped_storage().resize_(x.numel() * x.itemsize)
            _transpose(values, scales, self.transposed, self.transposed_scales)
            self._is_transposed = True
        return values, scales, self.transposed, self.transposed_scales

    def _free_transposed(self) -> None:
        for x in (self.transposed, self.transposed_scales):
            x.untyped_storage().resize_(0)


def _equal(sizes: Sequence[int], others: Sequence[int]) -> bool:
    return tuple(sizes) == tuple(others)


def _transpose(values: Tensor, scales: Tensor, transposed: Tensor, transposed_scales: Tensor) -> None:
    if not has_kernel(values, "transpose"):
        transposed.copy_(values.mT)
        transposed_scales.copy_(scales.mT)
        return
    _, n, k = values.shape
    flat = [x.view(-1, x.shape[-1]) for x in (values, scales, transposed, transposed_scales)]
    kernel(_TRANSPOSE, TransposeQuantizedConfiguration, n, k)(*flat)


class GatheredWeight(Tensor):
    """A weight (E, n, k) of the dtype of its gradient whose values exist in e4m3 alone.

    The layer reads ``copies``. Views of the same shape share them; tensors that are made like this one are plain. Any
    other operation raises a RuntimeError.
    """

    copies: GatheredCopies

    @staticmethod
    def __new__(cls, copies: GatheredCopies, dtype: torch.dtype) -> GatheredWeight:
        values = copies.values
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)  # pyright: ignore

    def __init__(self, copies: GatheredCopies, dtype: torch.dtype) -> None:
        self.copies = copies

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        if isinstance(x, GatheredWeight):
            if func in _ALIASES and all(map(_equal, args[1:3], (x.shape, x.stride()))):
                return GatheredWeight(x.copies, x.dtype)
            if func in _FACTORIES:
                return func(x.copies.values.new_empty((), dtype=x.dtype).expand(x.shape), *args[1:], **(kwargs or {}))
        allowed = "the layer's own reads: the weight is gathered in e4m3"
        hint = "read the sharded parameter outside of forward, or leave enable_fsdp_fp8_all_gather out"
        raise make_error(RuntimeError, "MoE", "operation on a gathered weight", func, allowed, hint)

    def data_ptr(self) -> int:
        """The address of the e4m3 values."""
        return self.copies.values.data_ptr()

    def on_meta(self) -> GatheredWeight:
        """The same without memory, for recording kernels."""
        copies = (x.new_empty(x.shape, device="meta") for x in (self.copies.values, self.copies.scales))
        return GatheredWeight(GatheredCopies(*copies), self.dtype)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"GatheredWeight({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


register_operand_class(GatheredWeight)


def is_gathered(weights: Sequence[Tensor]) -> bool:
    """Whether a layer's weights, one tensor or a list, were gathered in e4m3."""
    return isinstance(weights[0], GatheredWeight)
