"""The CuTe DSL's types by PyTorch's names, and fake tensors for the arguments that a signature lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor
from cutlass.runtime import make_fake_stream

from cudnn_kernels.signature import Configuration, Scalar, Slot, Stream, Workspace

DTYPES: Mapping[str, Any] = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "float8_e8m0fnu": cutlass.Float8E8M0FNU,
    "float4_e2m1fn_x2": cutlass.Float4E2M1FN,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    # Not used by the kernels of this package; `cudnn.datatypes` translates them for users' kernels.
    "float64": cutlass.Float64,
    "int8": cutlass.Int8,
    "int16": cutlass.Int16,
    "bool": cutlass.Boolean,
}

Symbols = dict[Any, Any]


def arguments(configuration: Configuration) -> tuple[Any, ...]:
    """Fake arguments to compile the kernel of a configuration with; sizes are dynamic.

    Slots that name the same size share a symbol, which a call checks.
    """
    symbols: Symbols = {}
    return tuple(fake_argument(slot, symbols) for slot in configuration.slots())


def fake_argument(slot: Slot, symbols: Symbols) -> Any:
    """The fake argument of a slot; ``symbols`` are the sizes by name so far."""
    match slot:
        case Scalar():
            return DTYPES[slot.dtype](0)
        case Stream():
            return make_fake_stream()
        case Workspace():
            return make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=16)
    packed = slot.packed
    element = cutlass.Uint8 if packed > 1 else DTYPES[slot.dtype]
    step = max(1, slot.align * 8 // element.width)
    sizes = zip(slot.shape, slot.strides, strict=True)
    shape = [x if isinstance(x, int) else _symbol(symbols, x, packed if stride == 1 else 1) for x, stride in sizes]
    strides = [cute.sym_int64(divisibility=step) if stride is None else stride for stride in slot.strides]
    return make_fake_tensor(element, tuple(shape), tuple(strides), assumed_align=max(slot.align, element.width // 8))


def _symbol(symbols: Symbols, name: str, packed: int) -> Any:
    """The symbol of a size, in elements or in bytes of packed elements."""
    return symbols.setdefault((name, packed), cute.sym_int())
