"""Arguments for GEMM kernels, and their runs in the emulator."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

import ptx_emulator
from cudnn.gemm import reference
from cudnn_kernels import compiler, fakes
from cudnn_kernels import epilogue as declared
from cudnn_kernels.formats import bits as bits_of
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.gemm.problem import BlockScale, Operand
from cudnn_kernels.schedule import Dense, VarlenK, VarlenM
from cudnn_kernels.signature import Workspace, sizes_of, workspace_size
from support import oracle

HOPPER, BLACKWELL = "sm_90a", "sm_100a"
ARCHES = (HOPPER, BLACKWELL)
MODULES = {HOPPER: "cudnn_kernels.sm90.gemm", BLACKWELL: "cudnn_kernels.sm100.gemm"}
PACKED, E4M3, E5M2, E8M0 = "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"


def configuration(
    epilogue: Sequence[Any],
    a: str = "bfloat16",
    b: str = "",
    *,
    majors: str = "kk",
    scale: str = "",
    vector: int = 0,
    blocks: tuple[int, int] = (1, 128),
    index: str = "",
    **options: Any,
) -> GemmConfiguration:
    """Small tiles, and 128 bytes along k, unless ``options`` say otherwise; ``majors`` such as "mk".

    ``blocks``: rows of A, and of B, that share a float32 blockwise scale. ``index``: the operands that are gathered.
    """
    defaults: dict[str, Any] = {"tile": (128, 128), "cluster": (1, 1), "schedule": Dense()}
    arguments = {**defaults, **options}
    arguments["tile"] = (*arguments["tile"], 1024 // bits_of(a))[:3]
    operands = [
        Operand(
            dtype,
            "k" if major == "k" else "mn",
            BlockScale(scale, vector, rows if scale == "float32" else 1) if scale else None,
            index=f"{name}_index" if name in index else "",
        )
        for name, dtype, major, rows in zip("ab", (a, b or a), majors, blocks, strict=True)
    ]
    return GemmConfiguration(*operands, epilogue=tuple(epilogue), **arguments)


def for_arch(c: GemmConfiguration, arch: str) -> GemmConfiguration:
    """The same for an architecture: what a warpgroup has on its own on Hopper, a CTA of a pair has on Blackwell."""
    if arch == HOPPER:
        return c
    rows = 256 if c.pingpong else max(c.tile[0], 128)
    return replace(
        c,
        pingpong=False,
        tile=(rows, *c.tile[1:]),
        cluster=(c.cluster[0] * rows // 128, c.cluster[1]) if c.pingpong else c.cluster,
    )


def fits_smem(arch: str, c: GemmConfiguration) -> bool:
    """Whether two stages of operands fit shared memory next to the epilogue's staging buffers."""
    try:
        return importlib.import_module(MODULES[arch]).Gemm(c).stages() >= 2
    except ValueError:
        return False


@functools.lru_cache(maxsize=24)
def compiled(arch: str, c: GemmConfiguration) -> Callable[..., None]:
    """The kernel compiled for the emulator."""
    module = importlib.import_module(MODULES[arch])
    with ptx_emulator.emulate(arch):
        return compiler.compile_for(arch, module.Gemm(c), *fakes.arguments(c))


def host_module(arch: str, c: GemmConfiguration) -> str:
    """What loads and launches the kernel, as the compiler's text."""
    module = importlib.import_module(MODULES[arch])
    return str(compiler.compile_for(arch, module.Gemm(c), *fakes.arguments(c)).ir_module)


def matrix(rows: int, columns: int, batch: int, dtype: str, column_major: bool = False) -> torch.Tensor:
    """NaN in a tensor (rows, columns, l), or bytes with all bits set."""
    shape = (batch, columns, rows) if column_major else (batch, rows, columns)
    torch_dtype = getattr(torch, dtype)
    x = (
        torch.full(shape, 0xFF, dtype=torch_dtype)
        if torch_dtype == torch.uint8
        else torch.full(shape, torch.nan).to(torch_dtype)
    )
    return x.permute(2, 1, 0) if column_major else x.permute(1, 2, 0)


def operand(rows: int, k: int, batch: int, dtype: str, major: str = "k") -> torch.Tensor:
    """Small integers over 8, or any fp4: sums of their products are exact in float32."""
    if dtype == PACKED:
        return torch.randint(0, 256, (batch, rows, k // 2), dtype=torch.uint8).permute(1, 2, 0)
    x = matrix(rows, k, batch, dtype, major != "k")
    return x.copy_(torch.randint(-3, 4, x.shape) / 8)


def scales(rows: int, groups: int, batch: int, dtype: str) -> torch.Tensor:
    """Scale factors in atoms of 128 rows and 4 groups, all 0."""
    return oracle.in_atoms(torch.zeros(rows, groups, batch, dtype=torch.uint8)).view(getattr(torch, dtype))


def scale_factors(rows: int, k: int, batch: int, dtype: str, vector: int, block: int = 1) -> torch.Tensor:
    """Scale factors of an operand: 1/2, 1 or 2, or 1 to 3; the padding of atoms as well.

    float32 scales of single rows are MN-major, those of ``block`` rows K-major with a padded pitch.
    """
    if dtype == "float32":
        height, groups = -(-rows // block), -(-k // vector)
        values = torch.exp2(torch.randint(-1, 2, (batch, groups, height)).float())
        if block == 1:
            return values.permute(2, 1, 0)
        wide = torch.full((batch, height, -(-groups // 4) * 4), torch.nan)
        wide[..., :groups] = values.transpose(1, 2)
        return wide.permute(1, 2, 0)[:, :groups]
    x = scales(rows, -(-k // vector), batch, dtype)
    first = 126 if dtype == E8M0 else 0
    codes = first + torch.randint(0, 3, x.shape, dtype=torch.uint8)
    x.view(torch.uint8).copy_(codes if dtype == E8M0 else (codes + 1).to(torch.float8_e4m3fn).view(torch.uint8))
    return x


def pointer_arguments(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copies of the matrices of each tensor, along its last dimension, that lie anywhere, and their addresses."""
    arguments: dict[str, Any] = {}
    for name, x in tensors.items():
        arguments[f"{name}_ptrs"], copies = oracle.addresses_of(x)
        arguments[f"{name} copies"] = [copy[..., 0] for copy in copies]
    return arguments


def decoded(x: torch.Tensor, scales: torch.Tensor | None = None, vector: int = 0) -> torch.Tensor:
    """An operand's values (mn, k, l), in float64."""
    values = oracle.unpacked(x) if x.dtype == torch.uint8 else x.double()
    if scales is None:
        return values
    rows, k, _ = values.shape
    if scales.dtype == torch.float32:
        block = 1 if scales.shape[0] == rows else 128
        return values * scales.double().repeat_interleave(block, 0)[:rows].repeat_interleave(vector, 1)[:, :k]
    codes = oracle.from_atoms(scales, rows, -(-k // vector))
    sizes = oracle.e8m0_values(codes) if scales.dtype == torch.float8_e8m0fnu else codes.view(scales.dtype).double()
    return values * sizes.repeat_interleave(vector, 1)[:, :k]


def operands(c: GemmConfiguration, m: int, n: int, k: int, batch: int, experts: int = 0) -> dict[str, torch.Tensor]:
    """A, B and their scale factors, if any, by name."""
    tensors = {}
    for name, x, rows, count in (("a", c.a, m, batch), ("b", c.b, n, experts or batch)):
        tensors[name] = operand(rows, k, count, x.dtype, x.major)
        if x.index:
            tensors[name], tensors[x.index] = gathered(tensors[name], int(isinstance(c.schedule, VarlenK)))
        if x.scale:
            tensors[f"sf{name}"] = scale_factors(rows, k, count, x.scale.dtype, x.scale.vector, x.scale.rows)
    return tensors


def gathered(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half of an operand's rows (or k indices), and indices into them: most occur, some more than once, and some are
    out of range. Rows that do not occur are NaN.
    """
    count = x.shape[dim]
    rows = x.narrow(dim, 0, count // 2 + 1).clone(memory_format=torch.preserve_format)
    index = torch.randint(0, count // 2 + 1, (count,), dtype=torch.int32)
    index[torch.randint(0, count, (count // 16,))] = -1
    index[torch.randint(0, count, (count // 16,))] = count // 2 + 1
    absent = torch.ones(count // 2 + 3, dtype=torch.bool).index_fill(0, index.long() + 1, value=False)[1:-1]
    rows.masked_fill_(absent[:, None, None] if dim == 0 else absent[:, None], torch.nan)
    return rows, index


def values(c: GemmConfiguration, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """A and B times their scale factors, in float64, gathered."""
    decoded_operands = []
    for name, x in (("a", c.a), ("b", c.b)):
        value = decoded(tensors[name], tensors.get(f"sf{name}"), x.scale.vector if x.scale else 0)
        if x.index:
            dim, index = int(isinstance(c.schedule, VarlenK)), tensors[x.index].long()
            count = value.shape[dim]
            zeros = torch.cat([value, torch.zeros_like(value.narrow(dim, 0, 1))], dim)
            value = zeros.index_select(dim, torch.where((index >= 0) & (index < count), index, count))
        decoded_operands.append(value)
    return decoded_operands


def product(c: GemmConfiguration, tensors: Mapping[str, torch.Tensor], ends: Sequence[int] = ()) -> torch.Tensor:
    """A B^T, (m, n, l), in float64, rounded once: of experts' rows, with NaN for the rest, or of experts' k."""
    a, b = values(c, tensors)
    ranges = [slice(*pair) for pair in itertools.pairwise((0, *ends))]
    if isinstance(c.schedule, VarlenK):
        return torch.stack([a[:, range_, 0] @ b[:, range_, 0].T for range_ in ranges], 2).float()
    if isinstance(c.schedule, VarlenM):
        d = torch.full((a.shape[0], b.shape[0], 1), torch.nan)
        for expert, range_ in enumerate(ranges):
            d[range_, :, 0] = (a[range_, :, 0] @ b[:, :, expert].T).float()
        return d
    return torch.einsum("mkl,nkl->mnl", a, b).float()


def arguments(epilogue: Sequence[Any], m: int, n: int, batch: int) -> dict[str, Any]:
    """Random inputs, outputs of NaN, for an epilogue, by name."""
    tensors: dict[str, Any] = {}
    columns = n
    for o, width in zip(epilogue, declared.widths_of(epilogue)[0], strict=True):
        n = int(columns * width)
        if isinstance(o, declared.Scale):
            tensors[o.tensor] = 0.5
        elif isinstance(o, declared.StoreTile):
            if o.dtype == PACKED:
                tensors[o.tensor] = matrix(m, n // 2, batch, "uint8")
            else:
                tensors[o.tensor] = matrix(m, n, batch, o.dtype, o.major == "m")
        elif isinstance(o, declared.LoadTile):
            x = matrix(m, n, batch, o.dtype, o.major == "m")
            tensors[o.tensor] = x.copy_(torch.randn(x.shape))
        elif isinstance(o, declared.MultiplyColumn):
            tensors[o.tensor] = torch.randn(batch, 1, m).permute(2, 1, 0)
        elif isinstance(o, declared.MultiplyBlocks):
            tensors[o.tensor] = torch.randn(batch, -(-n // o.vector), m).permute(2, 1, 0)
        elif isinstance(o, declared.SumColumn):
            tensors[o.tensor] = torch.full((batch, n), torch.nan, dtype=getattr(torch, o.dtype))
        elif isinstance(o, declared.SumRow):
            tensors[o.tensor] = torch.zeros(batch, 1, m).permute(2, 1, 0)
        elif isinstance(o, declared.MultiplyGroup):
            tensors[o.tensor] = torch.randn(batch).to(getattr(torch, o.dtype))
        elif isinstance(o, declared.AddRow):
            tensors[o.tensor] = torch.randn(batch, n).to(getattr(torch, o.dtype)).t()
            if o.factor:
                tensors[o.factor.tensor] = torch.randn(batch, 1, m).to(getattr(torch, o.factor.dtype)).permute(2, 1, 0)
        elif isinstance(o, declared.Rotate):
            tensors |= rotation(o, m)
        elif isinstance(o, declared.Amax):
            experts, roles = [batch] if o.by_expert else [], [o.roles] if o.roles > 1 else []
            tensors[o.tensor] = torch.full(experts + roles or [1], -torch.inf)
        elif isinstance(o, declared.QuantizeRows):
            groups = -(-n // o.vector)
            if o.scale_dtype == "float32":
                tensors[o.tensor] = matrix(m, groups, batch, "float32", column_major=True)
            else:
                tensors[o.tensor] = scales(m, groups, batch, o.scale_dtype)
            tensors[o.norm_const] = torch.tensor([0.01])
        elif isinstance(o, declared.QuantizeColumns):
            tensors |= {o.tensor: scales(n, -(-m // 32), batch, o.scale_dtype), o.norm_const: torch.tensor([0.01])}
    return tensors


def rotation(o: declared.Rotate, m: int) -> dict[str, torch.Tensor]:
    """Cosines and sines of few bits, so that rotating is exact; some positions have none."""
    rows = m + 3 if o.positions else m
    shape = (rows, o.rotary // 2)
    tables = {name: (torch.randint(-8, 9, shape) / 8).to(getattr(torch, o.dtype)) for name in (o.cos, o.sin)}
    if o.positions:
        tables[o.positions] = torch.randint(-1, rows + 1, (m,), dtype=torch.int32)
    return tables


def call(kernel: Callable[..., None], c: Any, tensors: Mapping[str, Any], num_sms: int) -> None:
    """Calls a kernel on the emulator with arguments by name."""
    slots = c.slots()
    arguments = {**tensors, "num_sms": num_sms, "stream": 0}
    size = (
        workspace_size(slots, sizes_of(slots, arguments)) if any(isinstance(slot, Workspace) for slot in slots) else 0
    )
    arguments["workspace"] = torch.full((size,), 0xFF, dtype=torch.uint8)
    kernel(*(arguments[slot.name] for slot in slots))


def run(
    arch: str,
    c: GemmConfiguration,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    *,
    change: Callable[..., None] | None = None,
    multiprocessors: int = 4,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any], ptx_emulator.Report]:
    """The epilogue's arguments as the kernel left them, as the reference does, and the emulator's report.

    ``change`` edits operands and arguments before. At least one cluster of SMs is emulated.
    """
    operand_tensors, epilogue_arguments = operands(c, m, n, k, batch), arguments(c.epilogue, m, n, batch)
    if change is not None:
        change(operand_tensors["a"], operand_tensors["b"], epilogue_arguments)
    expected = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in epilogue_arguments.items()}
    reference.evaluate(c.epilogue, product(c, operand_tensors), expected)
    kernel, count = compiled(arch, c), max(multiprocessors, c.cluster[0] * c.cluster[1])
    with ptx_emulator.emulate(arch, races=True, multiprocessors=count, **options) as report:
        call(kernel, c, {**operand_tensors, **epilogue_arguments}, count)
    return epilogue_arguments, expected, report


def bits(x: torch.Tensor) -> torch.Tensor:
    """For comparisons bit by bit: all NaNs are equal, and 8-bit types compare as bytes."""
    if x.element_size() == 1:
        nan = x.float().isnan() if x.dtype != torch.uint8 else torch.zeros(x.shape, dtype=torch.bool)
        return x.view(torch.uint8).masked_fill(nan, 0xFF)
    return x.float().nan_to_num(12345.678, torch.inf, -torch.inf)
