"""The architecture that a device needs its kernels compiled for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.errors import make_error
from cudnn.lazy import torch

ARCHITECTURES: Mapping[tuple[int, int], str] = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
"""By compute capability. Kernels use architecture-specific features (suffix ``a``), so they run on this compute
capability only.
"""


@functools.cache
def device_architecture(index: int) -> str:
    """The architecture of a CUDA device, such as ``sm_90a``; ``sm_80`` and the like where it has no kernels."""
    capability = torch.cuda.get_device_capability(index)
    return ARCHITECTURES.get(capability, "sm_{}{}".format(*capability))


def pick(kernels: Mapping[str, Any], arch: str, where: str) -> Any:
    """The kernel for an architecture.

    Raises:
        RuntimeError: no kernel for the architecture; lists those that have one.
    """
    if arch not in kernels:
        raise make_error(
            RuntimeError, where, "architecture", arch, ", ".join(kernels), "run on such a GPU, or on CPU tensors"
        )
    return kernels[arch]


def raw_stream(stream: Any, index: int) -> int:
    """The address of a stream: PyTorch's current one for None; an int, a ``CUstream`` or a ``torch.cuda.Stream``.

    Raises:
        TypeError: another type.
    """
    if stream is None:
        return torch._C._cuda_getCurrentRawStream(index)
    address = getattr(stream, "cuda_stream", stream)
    if isinstance(address, int):
        return address
    if type(stream).__module__.startswith("cuda."):  # of cuda-python
        return int(stream)
    allowed = "None, an int, a torch.cuda.Stream or a cuda.bindings.driver.CUstream"
    raise make_error(TypeError, "execute", "current_stream", type(stream).__name__, allowed)
