"""A dense GEMM without an epilogue, which may add to its result. Its tiles do not depend on the number of rows of a."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from cudnn.fused.host import FusedAPI
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn.runtime.launch_capture import captures, record
from cudnn_kernels.architecture import ARCHITECTURES

if TYPE_CHECKING:
    from torch import Tensor


def gemm_add(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a b^T for a (m, k) and b (n, k), one of whose strides is 1, and a contiguous out (m, n), float32 or of 16
    bits. The sum over k is in float32.

    CUDA tensors, and those within ``cudnn.emulation``, run a kernel; PyTorch computes on other CPU tensors.
    """
    run(a, b, out, True)


def run(a: Tensor, b: Tensor, out: Tensor, adds: bool, choice: tuple[tuple[str, Any], ...] = ()) -> None:
    """out = a b^T, or out += a b^T with ``adds``. ``choice``: fields of the configuration."""
    index = a.get_device()
    arch = launch.emulated_architecture() if index < 0 else launch.device_architecture(index)
    if not arch:
        product = torch.mm(a.to(out.dtype), b.to(out.dtype).T)
        out.copy_(out + product if adds else product)
        return
    majors = ["k" if x.stride(1) == 1 else "mn" for x in (a, b)]
    k, n = a.shape[1], b.shape[0]
    source, configuration = _configuration(name_of(a.dtype), *majors, name_of(out.dtype), adds, n, k, arch, choice)
    values: dict[str, Any] = {name: x.unsqueeze(-1) for name, x in (("a", a), ("b", b), ("z", out))}
    num_sms = FusedAPI.num_sms(index) if index >= 0 else ARCHITECTURES[arch].num_sms
    values |= {"num_sms": num_sms, "stream": launch.raw_stream(None, index) if index >= 0 else 0}
    arguments = [values[slot.name] for slot in configuration.slots()]
    if index < 0:
        launch.emulate(source, configuration, arch, *arguments)
    else:
        loaded = _loaded(source, configuration, arch)
        loaded(*arguments)
        if captures:
            record(loaded, configuration.slots(), arguments)


@functools.lru_cache(256)
def _configuration(
    dtype: str, a_major: str, b_major: str, out: str, adds: bool, n: int, k: int, arch: str, choice: Any = ()
) -> Any:
    from cudnn_kernels.epilogue import StoreTile
    from cudnn_kernels.gemm.configuration import configured
    from cudnn_kernels.gemm.problem import GemmProblem, Operand
    from cudnn_kernels.schedule import Dense

    problem = GemmProblem(
        Operand(dtype, a_major), Operand(dtype, b_major), (StoreTile("z", out, adds=adds),), Dense(), n, k
    )
    configuration = configured(problem, **dict(choice)) if choice else ARCHITECTURES[arch].configure(problem)
    return ARCHITECTURES[arch].source(configuration), configuration


@functools.cache
def _loaded(source: str, configuration: Any, arch: str) -> Any:
    return launch.kernel(source, configuration, arch)
