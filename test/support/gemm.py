"""Arguments for GEMM kernels, and their runs in the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ptx_emulator
from cudnn_kernels import compiler
from cudnn_kernels import epilogue as declared
from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.epilogue import reference
from cudnn_kernels.schedule import Dense

ARCH = "sm_90a"
PACKED = "float4_e2m1fn_x2"


def configuration(epilogue: Sequence[Any], a: str = "bfloat16", b: str = "", **options: Any) -> GemmConfiguration:
    """Small tiles, unless ``options`` say otherwise."""
    defaults: dict[str, Any] = {"tile": (128, 128, 64), "cluster": (1, 1), "schedule": Dense()}
    return GemmConfiguration(a=a, b=b or a, epilogue=tuple(epilogue), **(defaults | options))


@functools.lru_cache(maxsize=4)
def compiled(c: GemmConfiguration) -> Callable[..., None]:
    """The kernel as the emulator runs it."""
    from cudnn_kernels.sm90 import gemm

    with ptx_emulator.emulate(ARCH):
        return compiler.compile_for(ARCH, gemm.Gemm(c), *gemm.arguments(c))


def matrix(rows: int, columns: int, batch: int, dtype: str, column_major: bool = False) -> torch.Tensor:
    """NaN in a tensor (rows, columns, l), or bytes with all bits set."""
    shape = (batch, columns, rows) if column_major else (batch, rows, columns)
    kind = getattr(torch, dtype)
    x = torch.full(shape, 0xFF, dtype=kind) if kind == torch.uint8 else torch.full(shape, torch.nan).to(kind)
    return x.permute(2, 1, 0) if column_major else x.permute(1, 2, 0)


def operand(rows: int, k: int, batch: int, dtype: str, major: str) -> torch.Tensor:
    """Small integers over 8: sums of their products are exact in float32."""
    x = matrix(rows, k, batch, dtype, major != "k")
    return x.copy_(torch.randint(-3, 4, x.shape) / 8)


def scales(rows: int, groups: int, batch: int, dtype: str) -> torch.Tensor:
    """Factors in atoms of 128 rows and 4 groups, all 0."""
    atoms = torch.zeros(batch, -(-rows // 128), -(-groups // 4), 32, 4, 4, dtype=torch.uint8)
    return atoms.view(getattr(torch, dtype)).permute(3, 4, 1, 5, 2, 0)


def arguments(epilogue: Sequence[Any], m: int, n: int, batch: int) -> list[Any]:
    """Random inputs, outputs of NaN, for an epilogue."""
    made: list[Any] = []
    for o in epilogue:
        if isinstance(o, declared.Scale):
            made.append(0.5)
        elif isinstance(o, declared.StoreTile):
            if o.dtype == PACKED:
                made.append(matrix(m, n // 2, batch, "uint8"))
            else:
                made.append(matrix(m, n, batch, o.dtype, o.major == "m"))
        elif isinstance(o, declared.LoadTile):
            x = matrix(m, n, batch, o.dtype, o.major == "m")
            made.append(x.copy_(torch.randn(x.shape)))
        elif isinstance(o, declared.MultiplyColumn):
            made.append(torch.randn(batch, 1, m).permute(2, 1, 0))
        elif isinstance(o, declared.SumRow):
            made.append(torch.zeros(batch, 1, m).permute(2, 1, 0))
        elif isinstance(o, declared.AddRow):
            made.append(torch.randn(batch, n).to(getattr(torch, o.dtype)).t())
        elif isinstance(o, declared.Amax):
            made.append(torch.full((batch if o.by_expert else 1,), -torch.inf))
        elif isinstance(o, declared.QuantizeRows):
            made += [scales(m, -(-n // o.vector), batch, o.scale_dtype), torch.tensor([0.01])]
        elif isinstance(o, declared.QuantizeColumns):
            made += [scales(n, -(-m // 32), batch, o.scale_dtype), torch.tensor([0.01])]
        elif isinstance(o, declared.Swiglu):
            n //= 2
    return made


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B^T, (m, n, l), in float64, rounded once."""
    return torch.einsum("mkl,nkl->mnl", a.double(), b.double()).float()


def run(
    c: GemmConfiguration, m: int, n: int, k: int, batch: int = 1, *, change: Callable[..., None] | None = None,
    multiprocessors: int = 4, **options: Any,
) -> tuple[list[Any], list[Any], ptx_emulator.Report]:  # fmt: skip
    """The epilogue's arguments as the kernel left them, as the reference does, and the emulator's report.

    ``change`` edits operands and arguments before.
    """
    a, b = operand(m, k, batch, c.a, c.a_major), operand(n, k, batch, c.b, c.b_major)
    given = arguments(c.epilogue, m, n, batch)
    if change is not None:
        change(a, b, given)
    expected = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    reference.evaluate(c.epilogue, product(a, b), expected)
    kernel = compiled(c)
    with ptx_emulator.emulate(ARCH, races=True, **options) as report:
        kernel(a, b, *given, multiprocessors, 0)
    return given, expected, report


def bits(x: torch.Tensor) -> torch.Tensor:
    """For comparisons bit by bit: all NaNs are equal, and 8-bit types compare as bytes."""
    if x.element_size() == 1:
        nan = x.float().isnan() if x.dtype != torch.uint8 else torch.zeros(x.shape, dtype=torch.bool)
        return x.view(torch.uint8).masked_fill(nan, 0xFF)
    return x.float().nan_to_num(12345.678, torch.inf, -torch.inf)
