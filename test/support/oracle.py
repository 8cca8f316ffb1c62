"""Fused GEMMs for tests: random operands whose values are known in float64, and the definitions of the results.

Nothing here uses the library: layouts and formats are computed independently, index by index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2, E8M0, FP4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2


@dataclass
class Operand:
    """A tensor (mn, k, l), its scale factors in atoms if it has some, and its values in float64."""

    tensor: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor


def strided(x: torch.Tensor, major: str) -> torch.Tensor:
    """(rows, columns, l) with stride 1 in the first (``major="mn"``) or the second dimension, dense."""
    rows, columns, _ = x.shape
    stride = (1, rows, rows * columns) if major == "mn" else (columns, 1, rows * columns)
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def plain(mn: int, k: int, l: int = 1, dtype: Any = BF16, major: str = "k", device: Any = None) -> Operand:  # noqa: E741
    x = strided(torch.randn(mn, k, l, device=device).to(dtype), major)
    return Operand(x, None, x.double())


def scale_index(mn: int, blocks: int, l: int, device: Any) -> tuple[torch.Tensor, ...]:  # noqa: E741
    """Where the scale factor of row r, block j, matrix i stands, for all of them."""
    r, j, i = torch.meshgrid(*(torch.arange(size, device=device) for size in (mn, blocks, l)), indexing="ij")
    return r % 32, r // 32 % 4, r // 128, j % 4, j // 4, i


def in_atoms(scales: torch.Tensor, beyond: int = 0) -> torch.Tensor:
    """Bytes of scale factors (mn, blocks, l) in a tensor of atoms, with ``beyond`` as padding."""
    mn, blocks, l = scales.shape  # noqa: E741
    shape = (l, -(-mn // 128), -(-blocks // 4), 32, 4, 4)
    atoms = torch.full(shape, beyond, dtype=torch.uint8, device=scales.device).permute(3, 4, 1, 5, 2, 0)
    atoms[scale_index(mn, blocks, l, scales.device)] = scales
    return atoms


def memory_of(atoms: torch.Tensor) -> torch.Tensor:
    """Scale factors in atoms, one after the other as they lie in memory."""
    return atoms.permute(5, 2, 4, 0, 1, 3).reshape(-1)


def atoms_of(memory: torch.Tensor, mn: int, blocks: int, l: int = 1) -> torch.Tensor:  # noqa: E741
    """Scale factors as they lie in memory, as a tensor of atoms."""
    return memory.view(l, -(-mn // 128), -(-blocks // 4), 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def atoms_by_part(atoms: torch.Tensor, ends: Sequence[int], vector: int, beyond: int | None = None) -> torch.Tensor:
    """Scale factors of a varlen_k operand whose ranges of k end at ``ends``: range after range in memory, then the
    rest, or ``beyond`` for it.
    """
    memory = atoms.view(torch.uint8).permute(5, 2, 4, 0, 1, 3)
    bounds = [0, *(-(-end // (4 * vector)) for end in ends), memory.shape[2]]
    parts = [memory[:, :, first:last].reshape(-1) for first, last in pairwise(bounds)]
    if beyond is not None:
        parts[-1] = torch.full_like(parts[-1], beyond)
    return torch.cat(parts).view(atoms.dtype)


def addresses_of(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Addresses of copies of the matrices along the last dimension, which lie anywhere, in any order; the copies."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    copies = {i: raw[..., i : i + 1].clone() for i in torch.randperm(x.shape[-1]).tolist()}
    matrices = [copies[i].view(x.dtype) for i in range(x.shape[-1])]
    return torch.tensor([copy.data_ptr() for copy in matrices], device=x.device), matrices


def from_atoms(scales: torch.Tensor, mn: int, blocks: int) -> torch.Tensor:
    """Bytes (mn, blocks, l) of scale factors in atoms."""
    raw = scales.view(torch.uint8)
    return raw[scale_index(mn, blocks, scales.shape[5], scales.device)]


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes.int() - 127)


def fp4_values(codes: torch.Tensor) -> torch.Tensor:
    """Sign, two bits of exponent, one of mantissa."""
    every = torch.arange(16, device=codes.device)
    exponent, mantissa = every >> 1 & 3, every & 1
    magnitude = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)).double()
    return torch.where(every >= 8, -magnitude, magnitude)[codes.long()]


def scaled(
    mn: int,
    k: int,
    l: int = 1,  # noqa: E741
    dtype: Any = FP4,
    scale: Any = E8M0,
    vector: int = 16,
    major: str = "k",
    device: Any = None,
    rows: int = 1,
) -> Operand:
    """Block-scaled, every scale factor another power of two or e4m3 number, or float32, which ``rows`` share."""
    blocks = -(-k // vector)
    if scale == F32:
        scales = torch.rand(-(-mn // rows), blocks, l, device=device) * 3 + 0.05
        tensor = strided(torch.randn(mn, k, l, device=device).to(dtype), major)
        each = scales.double().repeat_interleave(rows, 0)[:mn].repeat_interleave(vector, 1)[:, :k]
        return Operand(tensor, strided(scales, "mn" if rows == 1 else "k"), tensor.double() * each)
    if scale == E8M0:
        codes = torch.randint(125, 130, (mn, blocks, l), device=device).to(torch.uint8)
        scales = e8m0_values(codes)
    else:
        codes = (torch.rand(mn, blocks, l, device=device) * 3 + 0.05).to(E4M3).view(torch.uint8)
        scales = codes.view(E4M3).double()
    if dtype == FP4:
        nibbles = torch.randint(0, 16, (l, mn, k), device=device).to(torch.uint8)
        tensor = strided((nibbles[..., ::2] + 16 * nibbles[..., 1::2]).permute(1, 2, 0), "k").view(FP4)
        values = fp4_values(nibbles).permute(1, 2, 0)
    else:
        tensor = strided(torch.randn(mn, k, l, device=device).to(dtype), major)
        values = tensor.double()
    return Operand(tensor, in_atoms(codes).view(scale), values * scales.repeat_interleave(vector, 1)[:, :k])


def matmul(a: Operand, b: Operand) -> torch.Tensor:
    """(m, n, l) in float64."""
    return torch.stack([a.values[..., i] @ b.values[..., i].T for i in range(a.values.shape[2])], dim=2)


def swiglu(z: torch.Tensor, concat_glu: bool = False, gate_first: bool = False) -> torch.Tensor:
    """(m, n, l) to (m, n / 2, l), in float64: column p * 32 + i comes of columns p * 64 + i (up) and + 32 (gate).

    Of halves, column i comes of columns i and n / 2 + i.
    """
    columns = torch.arange(z.shape[1] // 2, device=z.device)
    first, distance = (columns, len(columns)) if concat_glu else (columns // 32 * 64 + columns % 32, 32)
    up, gate = z[:, first], z[:, first + distance]
    if gate_first:
        up, gate = gate, up
    return up * gate / (1 + torch.exp(-gate))


def srelu(z: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
    return torch.where(z > 0, z * z, 0.0) * prob.double()


def dsrelu(z: torch.Tensor, c: torch.Tensor, prob: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d and dprob."""
    positive = torch.where(z > 0, z, 0.0)
    return 2 * positive * c.double() * prob.double(), (positive * positive * c.double()).sum(1, keepdim=True)


def dswiglu(z: torch.Tensor, ab12: torch.Tensor, prob: torch.Tensor, *order: bool) -> tuple[torch.Tensor, ...]:
    """d_ab12, dprob and c, by autograd: z is the gradient of c."""
    saved, factor = ab12.double().requires_grad_(), prob.double().requires_grad_()
    c = swiglu(saved, *order) * factor
    c.backward(z)
    assert saved.grad is not None
    assert factor.grad is not None
    return saved.grad, factor.grad, c.detach()


def e8m0_code_above(x: torch.Tensor) -> torch.Tensor:
    """The byte of the least power of two from 2^-127 to 2^127 that is not below x, float64 and not negative."""
    mantissa, exponent = torch.frexp(x)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # x = mantissa 2^exponent, mantissa in [1/2, 1)
    return torch.where(x == 0, 0, (exponent + 127).clamp(0, 254)).to(torch.uint8)


def unpacked(bytes_: torch.Tensor) -> torch.Tensor:
    """The float4 values (rows, columns, l) of bytes (rows, columns / 2, l), the even columns in the low bits."""
    codes = bytes_.view(torch.uint8).permute(0, 2, 1)
    return fp4_values(torch.stack([codes & 15, codes >> 4], dim=-1).flatten(2)).permute(0, 2, 1)


def signs_of(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix, from the bits that two numbers have in common."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def rounding_interval(values: torch.Tensor, error: torch.Tensor, dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that were computed with an error of at most ``error``, then rounded (larger ones to the largest number):
    the middle of what each may be, and how far from it: 0 but where the error reaches a midpoint of two numbers.
    """
    largest = torch.finfo(dtype).max
    low, high = ((values + sign * error).clamp(-largest, largest).to(dtype).double() for sign in (-1, 1))
    return (low + high) / 2, (high - low) / 2


def assert_rounded(
    actual: torch.Tensor, expected: torch.Tensor, slack: float, doubt: torch.Tensor | float = 0.0
) -> None:
    """``actual`` is ``expected``, float64, rounded once, after an error of ``slack`` times its largest magnitude.

    ``doubt``: how far each element may lie from ``expected`` besides, since something that it is made of was rounded.
    """
    if actual.dtype in (FP4, torch.uint8):
        actual, expected = unpacked(actual), expected.clamp(-6, 6)
        magnitude = expected.abs().unsqueeze(-1)
        grid = fp4_values(torch.arange(8, dtype=torch.uint8, device=actual.device))
        spacing = 2 * (magnitude - grid).abs().amin(-1)
    elif actual.dtype == F32:
        spacing = torch.zeros_like(expected)
    else:
        info = torch.finfo(actual.dtype)
        largest = 448.0 if actual.dtype == E4M3 else info.max
        expected = expected.clamp(-largest, largest) if actual.dtype in (E4M3, E5M2) else expected
        least = {E4M3: 2.0**-6, E5M2: 2.0**-14, F16: 2.0**-14}.get(actual.dtype, 2.0**-126)
        spacing = info.eps * 2.0 ** torch.floor(torch.log2((expected.abs() + doubt).clamp(min=least)))
        # A binade's first value may come of the one below, with half the distance; found may lie a binade above.
    allowed = 0.505 * spacing + slack * float(expected.abs().max().clamp(min=1e-30)) + doubt
    # Beyond the largest number of float16 lies infinity.
    limit = torch.finfo(torch.float16).max if actual.dtype is torch.float16 else math.inf
    error = (actual.double().clamp(-limit, limit) - expected.clamp(-limit, limit)).abs()
    worst = (error - allowed).flatten().argmax()
    assert bool((error <= allowed).all()), f"error {error.flatten()[worst]}, allowed {allowed.flatten()[worst]}"
