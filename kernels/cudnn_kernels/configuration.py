"""What GEMM kernels are compiled for, on any architecture, and the slots of their signatures. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cudnn_kernels.epilogue import slots_of
from cudnn_kernels.formats import FP4, FP8, row_bytes
from cudnn_kernels.problem import GemmProblem, Operand
from cudnn_kernels.signature import (
    MULTIPROCESSORS,
    Region,
    Sizes,
    Slot,
    Stream,
    Tensor,
    Workspace,
    block_scales,
    matrix,
)

SHARED_MEMORY = 227 * 1024  # bytes that a CTA may use, on Hopper and Blackwell alike
K_BYTES = 128  # of a k tile: one row of the widest swizzle
ROW = 16  # bytes: rows of a prepared operand begin at multiples


def operand_slots(name: str, operand: Operand, rows: str, batch: str) -> tuple[Tensor, ...]:
    """An operand (rows, k, l), and its scale factors ``sf<name>`` where it has some."""
    found = [matrix(name, operand.dtype, (rows, "k", batch), 1 if operand.major == "k" else 0)]
    if operand.scale is not None:
        scale = operand.scale
        found.append(block_scales(f"sf{name}", scale.dtype, rows, f"k / {scale.vector}", batch))
    return tuple(found)


@dataclass(frozen=True)
class GemmConfiguration:
    """``tile`` is (m, n, k) of a CTA, or of a pair on Blackwell, ``cluster`` (m, n) in CTAs.

    With ``pingpong`` each of two warpgroups has a tile of its own and one works on its epilogue while the other
    multiplies; else both share one. Every ``promote`` k tiles, their sum is added to float32 registers; 0: the tensor
    cores add up all of it. ``part`` accumulator columns pass through the epilogue at a time; ``staged`` buffers hold
    them. ``dynamic``: whoever is done takes the next tile.
    """

    kernel: ClassVar[str] = "gemm:Gemm"

    a: Operand
    b: Operand
    epilogue: tuple[Any, ...]
    schedule: Any
    tile: tuple[int, int, int] = (128, 256, 64)
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    promote: int = 0
    part: int = 64
    staged: int = 1
    dynamic: bool = False

    @property
    def gemm(self) -> GemmConfiguration:
        """The GEMM itself."""
        return self

    def operand_slots(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A and B, each with its scale factors."""
        return operand_slots("a", self.a, "m", "l"), operand_slots("b", self.b, "n", self.schedule.b)

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        a, b = self.operand_slots()
        rest = (*self.schedule.slots(), *slots_of(self.epilogue, self.schedule.groups, self.schedule.d))
        return (*a, *b, *rest, MULTIPROCESSORS, Stream())


def configured(
    problem: GemmProblem, tile: tuple[int, int], cluster: tuple[int, int], **chosen: Any
) -> GemmConfiguration:
    """The configuration of a problem with a tile (m, n), a cluster and what else is ``chosen``."""
    shape = (*tile, K_BYTES * 8 // problem.a.bits)
    same = (problem.a, problem.b, problem.epilogue, problem.schedule)
    return GemmConfiguration(*same, tile=shape, cluster=cluster, **chosen)


@dataclass(frozen=True)
class OperandConfiguration:
    """What Hopper's tensor cores need done to an operand (mn, k, l) before they multiply.

    With scale factors: every value times its factor, to bfloat16, the major kept. Without: the same values, MN-major to
    K-major or, to ``widen`` those of 8 bits, to bfloat16, the major kept. ``float4_e2m1fn_x2`` has two values to a byte
    along k. The grid has at most ``resident`` CTAs for each multiprocessor, which share the tiles.

    Raises:
        ValueError: a combination that no GEMM takes, such as MN-major fp4.
    """

    kernel: ClassVar[str] = "operand:PrepareOperand"

    source: Operand
    resident: int = 1 << 10
    widen: bool = False

    def __post_init__(self) -> None:
        scale = self.source.scale
        if self.widen:
            if scale is not None or self.source.dtype not in FP8:
                raise ValueError(f"{self}: got neither {' nor '.join(FP8)} without scale factors, which can be widened")
            return
        form = (self.source.dtype, self.source.major, *((scale.dtype, scale.vector) if scale else (None, 0)))
        if form not in OPERANDS:
            raise ValueError(f"{self}: got neither a block-scaled format nor an MN-major operand of 1, 2 or 4 bytes")

    @property
    def result(self) -> Operand:
        """The operand that the tensor cores get."""
        if self.source.scale is not None or self.widen:
            return Operand("bfloat16", self.source.major)
        return replace(self.source, major="k")

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: ``source``, its ``scales`` where there are some, ``target``."""
        source, *scales = operand_slots("source", self.source, "mn", "l")
        (target,) = operand_slots("target", self.result, "mn", "l")
        renamed = [replace(slot, name="scales") for slot in scales]
        return (source, *renamed, target, MULTIPROCESSORS, Stream())


@dataclass(frozen=True)
class PreparedOperand(Region):
    """A prepared operand in the workspace; ``rows`` and ``batch`` are its sizes by name."""

    name: str
    operand: Operand
    rows: str
    batch: str

    def pitch(self, sizes: Sizes) -> Any:
        """Elements from one row, or column, to the next."""
        step = ROW * 8 // self.operand.bits
        return (sizes["k" if self.operand.major == "k" else self.rows] + step - 1) // step * step

    def bytes(self, sizes: Sizes) -> Any:
        count = self.pitch(sizes) * sizes[self.rows if self.operand.major == "k" else "k"] * sizes[self.batch]
        return row_bytes(self.operand.dtype, count)


@dataclass(frozen=True)
class PreparedGemmConfiguration:
    """A GEMM some of whose operands are prepared first, in the same call."""

    kernel: ClassVar[str] = "prepared:PreparedGemm"

    gemm: GemmConfiguration
    a: OperandConfiguration | None
    b: OperandConfiguration | None

    @property
    def steps(self) -> dict[str, OperandConfiguration]:
        """The operands that are prepared, by name."""
        return {name: step for name, step in (("a", self.a), ("b", self.b)) if step is not None}

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: those of the GEMM with the operands as they are before, and a workspace."""
        found: list[Slot] = []
        regions: list[PreparedOperand] = []
        operands = {slots[0].name: slots for slots in self.gemm.operand_slots()}
        for slot in self.gemm.slots():
            step = self.steps.get(slot.name)
            if step is None:
                found.append(slot)
                continue
            rows, _, batch = (str(size) for size in operands[slot.name][0].shape)
            found += operand_slots(slot.name, step.source, rows, batch)
            regions.append(PreparedOperand(slot.name, step.result, rows, batch))
        return (*found[:-2], Workspace(tuple(regions)), *found[-2:])


OPERANDS = frozenset(
    [
        *((fp8, major, "float8_e8m0fnu", 32) for fp8 in FP8 for major in ("k", "mn")),
        (FP4, "k", "float8_e8m0fnu", 32),
        (FP4, "k", "float8_e8m0fnu", 16),
        (FP4, "k", "float8_e4m3fn", 16),
        *((t, "mn", None, 0) for t in (*FP8, "float16", "bfloat16", "float32")),
    ]
)
"""(dtype, major, type of the scale factors, elements that share one) of every operand that can be prepared."""
