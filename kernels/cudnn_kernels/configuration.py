"""What GEMM kernels are compiled for, on any architecture, and the slots of their signatures. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from cudnn_kernels.epilogue import BLOCK, needs_of, regions_of, slots_of
from cudnn_kernels.formats import FP4, FP8, row_bytes
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.signature import (
    MULTIPROCESSORS,
    Region,
    Scalar,
    Sizes,
    Slot,
    Stream,
    Tensor,
    Workspace,
    addresses,
    block_scales,
    flat_scales,
    matrix,
    sum_scales,
    vector,
)

SHARED_MEMORY = 227 * 1024  # bytes that a CTA may use, on Hopper and Blackwell alike
K_BYTES = 128  # of a k tile: one row of the widest swizzle
ATOM = 128  # rows whose scale factors lie together
ROW = 16  # bytes: rows of a prepared operand begin at multiples


def operand_slots(name: str, operand: Operand, rows: str, batch: str, splits_k: bool = False) -> tuple[Tensor, ...]:
    """An operand (rows, k, l), and its scale factors ``sf<name>`` where it has some: of all, or by parts of k. Or the
    addresses of both, ``<name>_ptrs`` and ``sf<name>_ptrs``. Or a tensor of any ``<name> lines``, and their numbers.
    """
    if operand.index:
        lines, gathered = f"{name} lines", "k" if splits_k else rows
        shape = (rows, lines, batch) if splits_k else (lines, "k", batch)
        major = 1 if operand.major == "k" else 0
        found = [matrix(name, operand.dtype, shape, major)]
        if operand.scale is not None:
            found.append(sum_scales(f"sf{name}", lines, f"k / {operand.scale.vector}", batch))
        return (*found, vector(operand.index, "int32", gathered))
    if operand.pointers:
        names = (name, f"sf{name}") if operand.scale is not None else (name,)
        return tuple(addresses(f"{x}_ptrs", batch) for x in names)
    found = [matrix(name, operand.dtype, (rows, "k", batch), 1 if operand.major == "k" else 0)]
    scale = operand.scale
    if scale is not None and splits_k:
        found.append(flat_scales(f"sf{name}", scale.dtype))
    elif scale is not None and scale.of_sums:
        height = rows if scale.rows == 1 else f"{rows} / {scale.rows}"
        found.append(sum_scales(f"sf{name}", height, f"k / {scale.vector}", batch))
    elif scale is not None:
        found.append(block_scales(f"sf{name}", scale.dtype, rows, f"k / {scale.vector}", batch))
    return tuple(found)


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


@dataclass(frozen=True)
class OperandConfiguration:
    """What Hopper's tensor cores need done to an operand (mn, k, l) before they multiply.

    With scale factors: every value times its factor, to bfloat16, the major kept. Without: the same values, MN-major to
    K-major or, to ``widen`` those of 8 bits, or ragged bfloat16, to bfloat16, the major kept. ``float4_e2m1fn_x2`` has
    two values to a byte along k. ``splits_k``: factors, and ragged parts, are those of
    :class:`cudnn_kernels.schedule.GroupedK`; parts are multiples of 16 bytes. The grid has at most ``resident`` CTAs
    for each multiprocessor, which share the tiles.

    Raises:
        ValueError: a combination that no GEMM takes, such as MN-major fp4.
    """

    source: Operand
    resident: int = 1 << 10
    widen: bool = False
    splits_k: bool = False

    def __post_init__(self) -> None:
        scale = self.source.scale
        if self.source.index:
            raise ValueError(f"{self.source}: got an index; allowed: none, for an operand that is prepared")
        if self.source.ragged and (self.source.major != "k" or not self.splits_k or not (scale or self.widen)):
            raise ValueError(f"{self}: got a ragged operand; allowed: parts of a K-major one that becomes bfloat16")
        if self.widen:
            if scale is not None or self.source.dtype not in (*FP8, *("bfloat16",) * self.source.ragged):
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
        return replace(self.source, major="k", pointers=False)

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: ``source``, its ``scales`` where there are some, or the addresses of both,
        ``offsets`` of parts of k, ``target``.
        """
        given = operand_slots("source", self.source, "mn", "l", self.splits_k)
        renamed = [replace(slot, name=name) for slot, name in zip(given, ("source", "scales"), strict=False)]
        (target,) = operand_slots("target", self.result, "mn", "l")
        offsets = [vector("offsets", "int32", "experts")] if self.splits_k else []
        return (*renamed, *offsets, target, MULTIPROCESSORS, Stream())


def pitch(operand: Operand, rows: Any, k: Any) -> Any:
    """Elements from one row of a prepared operand, or column, to the next."""
    step = ROW * 8 // operand.bits
    return ((k if operand.major == "k" else rows) + step - 1) // step * step


@dataclass(frozen=True)
class GemmConfiguration:
    """``tile`` is (m, n, k) of a CTA, or of a pair on Blackwell, ``cluster`` (m, n) in CTAs.

    With ``pingpong`` each of two warpgroups has a tile of its own and one works on its epilogue while the other
    multiplies; else both share one. A cluster ``draws`` its tiles from a counter, or takes every n-th one. ``part``
    accumulator columns pass through the epilogue at a time; ``staged`` buffers hold them. ``halves`` as of the problem.
    ``prepared`` operands, by name, are written to the workspace first, in the same call: ``a`` and ``b`` are what
    becomes of them.

    Raises:
        ValueError: experts that may end in the middle of an atom of scale factors, or of a block of rows; drawn tiles
            that are no experts'; tiles of halves that the CTAs of a cluster cannot share; an ``index`` that is not of
            experts' rows of A, which is K-major, or not of their k, of an MN-major operand, or of one with scale
            factors that are not of sums.
    """

    kernel: ClassVar[str] = "gemm:Gemm"

    a: Operand
    b: Operand
    epilogue: tuple[Any, ...]
    schedule: Any
    tile: tuple[int, int, int] = (128, 256, 64)
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    part: int = 64
    staged: int = 1
    halves: bool = False
    draws: bool = False
    prepared: tuple[tuple[str, OperandConfiguration], ...] = ()

    def __post_init__(self) -> None:
        if self.halves and (self.tile[1] not in (64, 128, 256) or self.tile[1] % (2 * self.block)):
            allowed = "256, with scale factors" if self.tensor_core_scale else "64, 128, 256"
            raise ValueError(f"tile: got {self.tile[1]} columns; allowed: {allowed}, of halves of B")
        rows = {"scale factors": 128 if self.tensor_core_scale else 1, "the epilogue": needs_of(self.epilogue).rows}
        for name, needed in rows.items():
            if self.schedule.aligned % needed:
                allowed = f"multiples of {needed}, by {name}"
                raise ValueError(f"rows of an expert: got multiples of {self.schedule.aligned}; allowed: {allowed}")
        in_order = self.tensor_core_scale is not None or not self.schedule.searches
        whole = [x for x in (self.a, self.b) if x.index and (in_order or x.pointers)]
        lines = ("mn", "mn") if self.schedule.splits_k else ("k", "")
        if whole or any(x.index and x.major != major for x, major in zip((self.a, self.b), lines, strict=True)):
            allowed = "of rows of a K-major A, with factors of sums or none, or of k of MN-major operands, of experts"
            raise ValueError(f"index: got {self.a}, {self.b}, {self.schedule}; allowed: {allowed}")
        if self.schedule.sideways and (self.cluster != (2, 1) or self.gathers):
            allowed = "(2, 1), of operands in order, where the last rows are taken sideways"
            raise ValueError(f"cluster: got {self.cluster}, {self.gathers}; allowed: {allowed}")
        if self.draws and not self.schedule.searches:
            raise ValueError(f"draws: got {self.schedule}; allowed: experts' tiles, which one warp finds for all")
        if self.a.ragged or self.b.ragged:
            raise ValueError(f"ragged: got {self.a}, {self.b}; allowed: neither, but before it is prepared")

    @property
    def tensor_core_scale(self) -> BlockScale | None:
        """A's factors, and B's are alike, where the tensor cores multiply by them."""
        return None if self.a.scale is None or self.a.scale.of_sums else self.a.scale

    @property
    def block(self) -> int:
        """Rows of B's halves that take turns in a tile: those of an atom, where there are scale factors in atoms."""
        return ATOM if self.tensor_core_scale else BLOCK

    @property
    def scales_sums(self) -> bool:
        """Whether both operands have factors that the sums of a k tile are multiplied by."""
        return self.a.scale is not None and self.a.scale.of_sums

    @property
    def gathers(self) -> tuple[str, ...]:
        """The operands whose lines have numbers, by name."""
        return tuple(name for name in "ab" if getattr(self, name).index)

    @property
    def operand_sizes(self) -> dict[str, tuple[str, str]]:
        """The names of the operands' rows and of how many matrices there are, by operand."""
        return {"a": ("m", "l"), "b": ("n", self.schedule.b)}

    def given(self, name: str) -> Operand:
        """An operand before it is prepared, with the factors of sums that it keeps."""
        operand, step = getattr(self, name), dict(self.prepared).get(name)
        return replace(step.source, scale=operand.scale or step.source.scale) if step else operand

    def operand_slots(self) -> list[Slot]:
        """The arguments that say what A and B are, or what they are made of."""
        found: list[Slot] = []
        for name, sizes in self.operand_sizes.items():
            operand = self.given(name)
            found += operand_slots(name, operand, *sizes, self.schedule.splits_k)
            found += [Scalar(sizes[0], "int32")] if operand.pointers else []  # no tensor tells
        return found

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        rest = (*self.schedule.slots(), *slots_of(self.epilogue, self.schedule.groups, self.schedule.d))
        workspace = (Workspace(self.regions),) if self.regions else ()
        return (*self.operand_slots(), *rest, *workspace, MULTIPROCESSORS, Stream())

    @property
    def regions(self) -> tuple[Region, ...]:
        """The parts of the workspace: prepared operands, and what the epilogue writes."""
        made = (Region(name, partial(self.prepared_bytes, name)) for name, _ in self.prepared)
        drawn = (Region("drawn", lambda _: 4),) if self.draws else ()
        return (*made, *drawn, *regions_of(self.epilogue, self.schedule.groups, self.schedule.d))

    def prepared_bytes(self, name: str, sizes: Sizes) -> Any:
        """Those of a prepared operand."""
        operand = getattr(self, name)
        rows, batch = (sizes[size] for size in self.operand_sizes[name])
        lines = rows if operand.major == "k" else sizes["k"]
        return row_bytes(operand.dtype, pitch(operand, rows, sizes["k"]) * lines * batch)


def configured(
    problem: GemmProblem, tile: tuple[int, int], cluster: tuple[int, int], **chosen: Any
) -> GemmConfiguration:
    """The configuration of a problem with a tile (m, n), a cluster and what else is ``chosen``."""
    shape = (*tile, K_BYTES * 8 // problem.a.bits)
    same = (problem.a, problem.b, problem.epilogue, problem.schedule)
    return GemmConfiguration(*same, tile=shape, cluster=cluster, halves=problem.halves, **chosen)


def prepared_first(problem: GemmProblem, configure: Callable[[GemmProblem], GemmConfiguration]) -> GemmConfiguration:
    """The preparation of the operands that need one, and what is chosen for what becomes of them."""
    operands = (problem.a, problem.b)
    bare = [replace(x, scale=None) if x.scale and x.scale.of_sums else x for x in operands]
    steps = [preparation(x, problem.accurate, problem.schedule.splits_k) for x in bare]
    prepared = [step.result if step else x for x, step in zip(bare, steps, strict=True)]
    a, b = (
        replace(x, scale=was.scale) if was.scale and was.scale.of_sums else x
        for x, was in zip(prepared, operands, strict=True)
    )
    gemm = configure(replace(problem, a=a, b=b))
    return replace(gemm, prepared=tuple((name, step) for name, step in zip("ab", steps, strict=True) if step))


def preparation(operand: Operand, accurate: bool, splits_k: bool = False) -> OperandConfiguration | None:
    """What must be done to an operand first, if anything. ``splits_k`` as in a schedule."""
    if operand.scale is None and (operand.ragged or (accurate and operand.bits == 8)):
        return OperandConfiguration(operand, widen=True, splits_k=operand.ragged)
    if operand.scale is None and (operand.major == "k" or operand.bits == 16):
        return None
    return OperandConfiguration(operand, splits_k=splits_k and operand.scale is not None)
