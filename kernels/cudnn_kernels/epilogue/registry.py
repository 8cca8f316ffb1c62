"""The implementation of each epilogue operation: the class of the same name."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_kernels import epilogue as epi_ops
from cudnn_kernels.epilogue import arithmetic, hadamard, quantize, reductions, rotate, tiles
from cudnn_kernels.epilogue.operation import EpiOpImpl

EPI_OPS: Mapping[type, type[EpiOpImpl]] = {
    getattr(epi_ops, name): impl
    for module in (arithmetic, hadamard, quantize, reductions, rotate, tiles)
    for name, impl in vars(module).items()
    if isinstance(impl, type) and issubclass(impl, EpiOpImpl) and hasattr(epi_ops, name)
}
