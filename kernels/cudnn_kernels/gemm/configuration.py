"""Configurations of the GEMM kernels of all architectures, and their signatures. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from cudnn_kernels.epilogue import regions_of, slots_of, traits_of
from cudnn_kernels.formats import FP4, FP8, GLU_BLOCK, row_bytes
from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.signature import (
    NUM_SMS,
    Region,
    Scalar,
    Sizes,
    Slot,
    Stream,
    Tensor,
    Workspace,
    accumulator_scales,
    addresses,
    block_scales,
    flat_scales,
    matrix,
    vector,
)

K_BYTES = 128  # bytes of a k tile: one row of the 128-byte swizzle
ATOM = 128  # rows of an atom of scale factors
ROW = 16  # bytes: row alignment of a prepared operand


def operand_slots(name: str, operand: Operand, rows: str, batch: str, varlen_k: bool = False) -> tuple[Tensor, ...]:
    """The slots of an operand (rows, k, l) and of its scale factors ``sf<name>``, if any. Of a ptr-array, the pointer
    arrays ``<name>_ptrs`` and ``sf<name>_ptrs``. Of a gathered operand, a tensor of ``<name> num_lines`` lines and the
    index.
    """
    if operand.index:
        num_lines, gathered = f"{name} lines", "k" if varlen_k else rows
        shape = (rows, num_lines, batch) if varlen_k else (num_lines, "k", batch)
        major = 1 if operand.major == "k" else 0
        slots = [matrix(name, operand.dtype, shape, major)]
        if operand.scale is not None:
            slots.append(accumulator_scales(f"sf{name}", num_lines, f"k / {operand.scale.vector}", batch))
        return (*slots, vector(operand.index, "int32", gathered))
    if operand.pointers:
        names = (name, f"sf{name}") if operand.scale is not None else (name,)
        return tuple(addresses(f"{x}_ptrs", f"{batch} halves" if operand.halves else batch) for x in names)
    slots = [matrix(name, operand.dtype, (rows, "k", batch), 1 if operand.major == "k" else 0)]
    scale = operand.scale
    if scale is not None and scale.scales_accumulator:
        height = rows if scale.rows == 1 else f"{rows} / {scale.rows}"
        slots.append(accumulator_scales(f"sf{name}", height, f"k / {scale.vector}", batch))
    elif scale is not None and varlen_k:
        slots.append(flat_scales(f"sf{name}", scale.dtype))
    elif scale is not None:
        slots.append(block_scales(f"sf{name}", scale.dtype, rows, f"k / {scale.vector}", batch))
    return tuple(slots)


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
    """The preparation of an operand (mn, k, l) that Hopper's tensor cores cannot read.

    With scale factors: dequantization to bfloat16, the major kept. Without: a transposition from MN-major to K-major
    or, with ``widen``, a cast of 8-bit or ragged bfloat16 operands to bfloat16, the major kept. ``float4_e2m1fn_x2``
    has two values per byte along k. ``varlen_k``: scale factors and ragged groups are those of
    :class:`cudnn_kernels.schedule.VarlenK`; groups are multiples of 16 bytes. The grid has at most ``resident`` CTAs
    per SM, which iterate over the tiles.

    Raises:
        ValueError: a combination that no GEMM takes, such as MN-major fp4.
    """

    source: Operand
    resident: int = 1 << 10
    widen: bool = False
    varlen_k: bool = False

    def __post_init__(self) -> None:
        scale = self.source.scale
        if self.source.index:
            raise ValueError(f"{self.source}: got an index; allowed: none, for an operand that is prepared")
        if self.source.ragged and (self.source.major != "k" or not self.varlen_k or not (scale or self.widen)):
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
        """The operand that the MMA reads."""
        if self.source.scale is not None or self.widen:
            return Operand("bfloat16", self.source.major)
        return replace(self.source, major="k", pointers=False)

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: ``source`` and ``scales``, or their pointer arrays, ``offsets`` of groups along
        k, ``target``.
        """
        source = operand_slots("source", self.source, "mn", "l", self.varlen_k)
        renamed = [replace(slot, name=name) for slot, name in zip(source, ("source", "scales"), strict=False)]
        (target,) = operand_slots("target", self.result, "mn", "l")
        offsets = [vector("offsets", "int32", "experts")] if self.varlen_k else []
        return (*renamed, *offsets, target, NUM_SMS, Stream())


def pitch(operand: Operand, rows: Any, k: Any) -> Any:
    """The leading dimension of a prepared operand, in elements."""
    step = ROW * 8 // operand.bits
    return ((k if operand.major == "k" else rows) + step - 1) // step * step


@dataclass(frozen=True)
class GemmConfiguration:
    """``tile`` is (m, n, k) of a CTA, or of a pair of CTAs on Blackwell, ``cluster`` (m, n) in CTAs.

    ``pingpong``: each MMA warpgroup has its own tile, and the epilogue of one overlaps with the MMAs of the other; else
    both share a tile (cooperative). ``dynamic_scheduler``: clusters claim tiles from an atomic counter; else the
    schedule is static persistent. The epilogue processes subtiles of ``epi_tile_n`` accumulator columns, staged in
    ``epi_stages`` stages of shared memory. ``concat_glu`` as in the problem. ``prepared`` operands, by name, are
    written to the workspace by a preceding kernel of the same call: ``a`` and ``b`` are the results.

    Raises: ValueError: groups that may end inside an atom of scale factors, or a block of rows; a dynamic schedule that
        is not grouped; blocks of k other than k tiles of K-major operands; tiles of concatenated halves that the CTAs
        of a cluster cannot split; an ``index`` that is not of the rows of a K-major A of varlen_m, or of k of MN-major
        operands of varlen_k, or with block scale factors; ``halves`` that TMA cannot read as they are.
    """

    kernel: ClassVar[str] = "gemm:Gemm"

    a: Operand
    b: Operand
    epilogue: tuple[Any, ...]
    schedule: Any
    tile: tuple[int, int, int] = (128, 256, 64)
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    epi_tile_n: int = 64
    epi_stages: int = 1
    concat_glu: bool = False
    dynamic_scheduler: bool = False
    prepared: tuple[tuple[str, OperandConfiguration], ...] = ()

    def __post_init__(self) -> None:
        if self.concat_glu and (self.tile[1] not in (64, 128, 256) or self.tile[1] % (2 * self.block)):
            allowed = "256, with scale factors" if self.tensor_core_scale else "64, 128, 256"
            raise ValueError(f"tile: got {self.tile[1]} columns; allowed: {allowed}, of halves of B")
        if self.concat_glu and self.b.pointers and not self.b.halves:
            raise ValueError(f"halves: got {self.b}; allowed: True, for pointers to concatenated halves of B")
        if self.b.halves and (not self.b.pointers or self.b.scale or (self.b.major != "k" and self.concat_glu)):
            allowed = "pointers without scale factors, K-major with concatenated halves"
            raise ValueError(f"halves: got {self.b}; allowed: {allowed}")
        if self.a.halves or any(step.source.halves for _, step in self.prepared):
            raise ValueError(f"halves: got {self.a}, {self.prepared}; allowed: B alone, which is not prepared")
        rows = {
            "scale factors": 128 if self.tensor_core_scale else 1,
            "the epilogue": traits_of(self.epilogue).row_multiple,
        }
        for name, needed in rows.items():
            if self.schedule.row_alignment % needed:
                allowed = f"multiples of {needed}, by {name}"
                raise ValueError(f"rows of a group: got multiples of {self.schedule.row_alignment}; allowed: {allowed}")
        in_order = self.tensor_core_scale is not None or not self.schedule.searches
        disallowed = [x for x in (self.a, self.b) if x.index and (in_order or x.pointers)]
        majors = ("mn", "mn") if self.schedule.varlen_k else ("k", "")
        if disallowed or any(x.index and x.major != major for x, major in zip((self.a, self.b), majors, strict=True)):
            allowed = "rows of a K-major A of varlen_m, with fp32 scales or none, or k of MN-major operands of varlen_k"
            raise ValueError(f"index: got {self.a}, {self.b}, {self.schedule}; allowed: {allowed}")
        if self.schedule.split_tail_n and (self.cluster != (2, 1) or self.gathers):
            allowed = "(2, 1), without gathered operands, with split_tail_n"
            raise ValueError(f"cluster: got {self.cluster}, {self.gathers}; allowed: {allowed}")
        if self.dynamic_scheduler and not self.schedule.searches:
            raise ValueError(f"dynamic_scheduler: got {self.schedule}; allowed: schedules with a scheduler warp")
        k_block = self.schedule.k_block if self.schedule.varlen_k else 0
        if k_block and (k_block != self.tile[2] or self.gathers or (self.a.major, self.b.major) != ("k", "k")):
            got = f"{self.a}, {self.b}, a k tile of {self.tile[2]}"
            raise ValueError(f"k_block: got {got}; allowed: K-major operands, not gathered, a k tile of {k_block}")
        if self.a.ragged or self.b.ragged:
            raise ValueError(f"ragged: got {self.a}, {self.b}; allowed: neither, but before it is prepared")

    @property
    def tensor_core_scale(self) -> BlockScale | None:
        """The scale factors of A, and likewise of B, of a block-scaled MMA."""
        return None if self.a.scale is None or self.a.scale.scales_accumulator else self.a.scale

    @property
    def block(self) -> int:
        """Rows of a block of concatenated halves, which alternate in a tile: those of an atom, if the MMA is
        block-scaled.
        """
        return ATOM if self.tensor_core_scale else GLU_BLOCK

    @property
    def scales_accumulator(self) -> bool:
        """Whether accumulators are scaled by fp32 scale factors of both operands."""
        return self.a.scale is not None and self.a.scale.scales_accumulator

    @property
    def gathers(self) -> tuple[str, ...]:
        """The names of the gathered operands."""
        return tuple(name for name in "ab" if getattr(self, name).index)

    @property
    def operand_sizes(self) -> dict[str, tuple[str, str]]:
        """The names of the sizes of the operands' rows and batch, by operand."""
        return {"a": ("m", "l"), "b": ("n", self.schedule.b)}

    def source_operand(self, name: str) -> Operand:
        """An operand before it is prepared, with the fp32 scale factors that it keeps."""
        operand, step = getattr(self, name), dict(self.prepared).get(name)
        return replace(step.source, scale=operand.scale or step.source.scale) if step else operand

    def operand_slots(self) -> list[Slot]:
        """The arguments of A and B, or of what they are prepared from."""
        slots: list[Slot] = []
        for name, sizes in self.operand_sizes.items():
            operand = self.source_operand(name)
            slots += operand_slots(name, operand, *sizes, self.schedule.varlen_k)
            slots += [Scalar(sizes[0], "int32")] if operand.pointers else []  # no tensor has the size
        return slots

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        rest = (*self.schedule.slots(), *slots_of(self.epilogue, self.schedule.groups, self.schedule.d))
        workspace = (Workspace(self.regions),) if self.regions else ()
        return (*self.operand_slots(), *rest, *workspace, NUM_SMS, Stream())

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: prepared operands, the tile counter, and what the epilogue writes."""
        prepared = (Region(name, partial(self.prepared_bytes, name)) for name, _ in self.prepared)
        semaphore = (Region("tile_count_semaphore", lambda _: 4),) if self.dynamic_scheduler else ()
        return (*prepared, *semaphore, *regions_of(self.epilogue, self.schedule.groups, self.schedule.d))

    def prepared_bytes(self, name: str, sizes: Sizes) -> Any:
        """Bytes of a prepared operand."""
        operand = getattr(self, name)
        rows, batch = (sizes[size] for size in self.operand_sizes[name])
        num_lines = rows if operand.major == "k" else sizes["k"]
        return row_bytes(operand.dtype, pitch(operand, rows, sizes["k"]) * num_lines * batch)


def configured(
    problem: GemmProblem, tile: tuple[int, int], cluster: tuple[int, int], **chosen: Any
) -> GemmConfiguration:
    """The configuration of a problem with a tile (m, n), a cluster and the other fields ``chosen``."""
    shape = (*tile, K_BYTES * 8 // problem.a.bits)
    same = (problem.a, problem.b, problem.epilogue, problem.schedule)
    return GemmConfiguration(*same, tile=shape, cluster=cluster, concat_glu=problem.concat_glu, **chosen)


def prepared_first(problem: GemmProblem, configure: Callable[[GemmProblem], GemmConfiguration]) -> GemmConfiguration:
    """The configuration of the GEMM after the operands that need it are prepared."""
    operands = (problem.a, problem.b)
    bare = [replace(x, scale=None) if x.scale and x.scale.scales_accumulator else x for x in operands]
    steps = [preparation(x, problem.accurate, problem.schedule.varlen_k) for x in bare]
    prepared = [step.result if step else x for x, step in zip(bare, steps, strict=True)]
    a, b = (
        replace(x, scale=was.scale) if was.scale and was.scale.scales_accumulator else x
        for x, was in zip(prepared, operands, strict=True)
    )
    gemm = configure(replace(problem, a=a, b=b))
    return replace(gemm, prepared=tuple((name, step) for name, step in zip("ab", steps, strict=True) if step))


def preparation(operand: Operand, accurate: bool, varlen_k: bool = False) -> OperandConfiguration | None:
    """The preparation that an operand needs, or None. ``varlen_k`` as in a schedule."""
    if operand.scale is None and (operand.ragged or (accurate and operand.bits == 8)):
        return OperandConfiguration(operand, widen=True, varlen_k=operand.ragged)
    if operand.scale is None and (operand.major == "k" or operand.bits == 16):
        return None
    return OperandConfiguration(operand, varlen_k=varlen_k and operand.scale is not None)
