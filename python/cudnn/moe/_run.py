"""How operators run kernels: on CUDA tensors, or emulated on CPU tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cudnn import launch
from cudnn_kernels.architecture import ARCHITECTURES


def has_kernel(tensor: torch.Tensor, where: str) -> bool:
    """Whether a kernel runs: on CUDA tensors, and within ``cudnn.emulation``. The reference runs on other CPU tensors.

    Raises:
        RuntimeError: no kernel for the device.
    """
    if tensor.is_cuda or launch.emulated_architecture():
        return True
    launch.say_reference_runs(where)
    return False


def run(source: str, configuration: Any, *arguments: Any) -> None:
    """Runs a kernel, on PyTorch's current stream, with the arguments that its configuration lists before the stream."""
    device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
    if device.type != "cuda":
        launch.emulate(source, configuration, launch.emulated_architecture(), *arguments, 0)
        return
    index = device.index if device.index is not None else torch.cuda.current_device()
    _kernel(source, configuration, index)(*arguments, launch.raw_stream(None, index))


@functools.cache
def _kernel(source: str, configuration: Any, index: int) -> Any:
    arch = launch.device_architecture(index)
    launch.pick(dict.fromkeys(ARCHITECTURES, ""), arch, source)
    return launch.kernel(source, configuration, arch)
