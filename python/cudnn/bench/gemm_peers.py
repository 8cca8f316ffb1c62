"""GEMMs of other libraries: QuACK and DeepGEMM, if they are installed.

DeepGEMM's wheels are compiled against the C++ headers of one version of PyTorch, which they do not name: with another
one, `import deep_gemm` works, but tensors arrive with wrong sizes (``dim == 2 or dim == 3``, ``is_contiguous()``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cudnn.bench import GPU, Call, returning
from cudnn.lazy import torch

QUACK, QUACK_PACKAGE = "QuACK", "quack-kernels"
DEEP_GEMM, DEEP_GEMM_PACKAGE = "DeepGEMM", "sgl-deep-gemm"
BLOCK = 128  # elements that share a scale factor along k, and along n of B
_QUACK_TILES = (
    {"tile_m": 128, "tile_n": 192, "pingpong": True},
    {"tile_m": 128, "tile_n": 256, "pingpong": False},
    {"tile_m": 256, "tile_n": 192, "pingpong": False},
)
"""Configurations of QuACK's kernel on Hopper; its autotuner would compile about thirty."""


def quack(a: Any, b: Any, d: Any, name: str, **options: Any) -> Call:
    """QuACK's GEMM of a (m, k) and b (..., k, n) into d with the fastest of a few tiles. The result is called ``name``.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    interface = importlib.import_module("quack.gemm_interface")
    base = interface.default_config(a.device)
    run = functools.partial(interface.gemm_tuned.fn, a, b, d, **options)
    tiles = (replace(base, **changes) for changes in _QUACK_TILES)
    calls = [returning(functools.partial(run, config=config), {name: d}) for config in tiles]
    for call in calls:
        call()
    return min(calls, key=lambda call: min(GPU.seconds(call, 2) for _ in range(3)))


def deep_gemm(a: Any, sfa: Any, b: Any, sfb: Any, d: Any, name: str) -> Call:
    """DeepGEMM of e4m3 a (m, k) and b (n, k) into bfloat16 d.

    Args:
        a, b: the operands.
        sfa: float32 scale factors (m, k / 128).
        sfb: float32 scale factors (n / 128, k / 128).
        d: the result (m, n).
        name: the name of the result.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    library = importlib.import_module("deep_gemm")
    left, right = (a, aligned(sfa)), (b, sfb.contiguous())
    return returning(lambda: library.fp8_gemm_nt(left, right, d), {name: d})


def deep_grouped_gemm(a: Any, sfa: Any, b: Any, sfb: Any, offsets: Any, d: Any, name: str) -> Call:
    """DeepGEMM's grouped GEMM over contiguous rows: ``offsets`` are the end rows of the experts, multiples of 128.

    ``b`` is (experts, n, k) and ``sfb`` (experts, n / 128, k / 128).

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    library = importlib.import_module("deep_gemm")
    rows = torch.arange(a.shape[0], dtype=torch.int64, device=a.device)
    expert_of_row = torch.searchsorted(offsets.long(), rows, right=True).int()
    left, right = (a, aligned(sfa)), (b, sfb.contiguous())
    return returning(lambda: library.m_grouped_fp8_gemm_nt_contiguous(left, right, d, expert_of_row), {name: d})


def deep_grouped_wgrad(a: Any, sfa: Any, b: Any, sfb: Any, blocks: Sequence[slice], d: Any, name: str) -> Call:
    """DeepGEMM's grouped GEMM over contiguous k, added to float32 d (experts, m, n).

    ``a`` (blocks, m, 128) and ``b`` (blocks, n, 128) are blocks of 128 tokens, with scale factors ``sfa`` (blocks, m)
    and ``sfb`` (blocks, n); ``blocks`` are those of each expert. DeepGEMM reads a matrix (m, tokens) for each expert.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    library = importlib.import_module("deep_gemm")
    sizes = [(each.stop - each.start) * BLOCK for each in blocks]
    sizes_on_device = torch.tensor(sizes, dtype=torch.int32, device=a.device)

    def operand(elements: Any, scales: Any) -> tuple[Any, Any]:
        matrices = [elements[each].transpose(0, 1).flatten() for each in blocks]
        return torch.cat(matrices), torch.cat([scales[each] for each in blocks]).T

    run = library.k_grouped_fp8_gemm_nt_contiguous
    left, right = operand(a, sfa), operand(b, sfb)
    return returning(lambda: run(left, right, d, sizes, sizes_on_device, d), {name: d})


def aligned(scales: Any) -> Any:
    """Scale factors of A (m, k / 128) in the layout that TMA reads: column-major. DeepGEMM then copies nothing."""
    layout = importlib.import_module("deep_gemm.utils.layout")
    return layout.get_mn_major_tma_aligned_tensor(scales.contiguous())
