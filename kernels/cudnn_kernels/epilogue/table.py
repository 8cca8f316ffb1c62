"""Which class runs which declaration: the one of the same name."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_kernels import epilogue as declared
from cudnn_kernels.epilogue import arithmetic, hadamard, quantize, reductions, rotate, tiles
from cudnn_kernels.epilogue.operation import Operation

OPERATIONS: Mapping[type, type[Operation]] = {
    getattr(declared, name): found
    for module in (arithmetic, hadamard, quantize, reductions, rotate, tiles)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Operation) and hasattr(declared, name)
}
