"""Float32 arithmetic in full precision, whatever PyTorch's settings are: references compute in it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from cudnn.lazy import torch

_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_OPERATIONS = (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
_REDUCED_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


class _Settings:
    """The settings before the first open block of any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open = 0
        self.precisions: dict[tuple[str, str], str] = {}
        self.reduced_sums: dict[str, Any] = {}

    def enter(self) -> None:
        with self.lock:
            if not self.open:
                self.precisions = _explicit_precisions()
                self.reduced_sums = {name: getattr(torch.backends.cuda.matmul, name) for name in _REDUCED_SUMS}
                for operation in _OPERATIONS:
                    _set(operation, "ieee")
                for name in _REDUCED_SUMS:
                    setattr(torch.backends.cuda.matmul, name, False)
            self.open += 1

    def leave(self) -> None:
        with self.lock:
            self.open -= 1
            if not self.open:
                for operation, precision in self.precisions.items():
                    _set(operation, precision)
                for name, value in self.reduced_sums.items():
                    setattr(torch.backends.cuda.matmul, name, value)


_settings = _Settings()


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """A block, or a function that is decorated with it, in which float32 GEMMs and convolutions use
    float32, not TF32 or bfloat16, and in which 16-bit GEMMs accumulate in float32.

    PyTorch's settings belong to the process. The last block that closes, of all threads, restores what the first one
    found; a setting that another thread changes meanwhile is lost. Both the older and the newer
    name of a setting have their values of before afterwards.
    """
    _settings.enter()
    try:
        yield
    finally:
        _settings.leave()


def _explicit_precisions() -> dict[tuple[str, str], str]:
    """What is set for each operation itself: ``"none"`` where it follows its backend, or that the setting for all."""
    before: dict[tuple[str, str], str] = {}
    try:
        for parent in _PARENTS:  # from the outermost one on: a getter gives what is inherited
            before[parent] = _get(parent)
            _set(parent, "none")
        return {operation: _get(operation) for operation in _OPERATIONS}
    finally:
        for parent, precision in before.items():
            _set(parent, precision)


# torch.backends has these as attributes, which raise after torch.backends.disable_global_flags().


def _get(operation: tuple[str, str]) -> str:
    return torch._C._get_fp32_precision_getter(*operation)


def _set(operation: tuple[str, str], precision: str) -> None:
    torch._C._set_fp32_precision_setter(*operation, precision)
