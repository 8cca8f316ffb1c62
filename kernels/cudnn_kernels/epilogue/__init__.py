"""Epilogue operations (EpiOp): what happens to a GEMM's float32 accumulator before anything is stored.

An epilogue is a tuple of these configurations, applied from left to right to named values; the accumulator is ``x``,
and most operations can be applied to another ``value``.
They are plain data, part of a kernel's configuration, so this module imports no CuTe DSL. The other modules of the
package implement them on a GPU, with the suffix ``Impl``: ``cudnn_kernels.epilogue.operation`` describes how an
epilogue runs, ``cudnn_kernels.epilogue.registry`` maps each configuration to its implementation.
``cudnn.gemm.reference`` defines the operations for whole tensors.

``tensor`` names an argument of the kernel. An operation declares its arguments (``slots``), the width of the values
that it reads and defines (``width``, ``outputs``), and its requirements (``column_multiple``, ``staged_bits``,
``extra_registers``), so that neither the host nor the heuristics need to know it. Types go by PyTorch's names,
``major`` is the dimension of stride 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from cudnn_kernels.formats import GLU_BLOCK, bits
from cudnn_kernels.signature import (
    Region,
    Scalar,
    Sizes,
    Tensor,
    accumulator_scales,
    addresses,
    block_scales,
    column,
    matrix,
    vector,
)

MAX_EPI_TILE_N = 128
"""Columns of a subtile, at most, unless an operation needs more."""

Widths = Mapping[str, Fraction]
"""Columns of each value per column of the accumulator. The size of width 1 is ``n``, that of other widths ``columns``.
"""


@dataclass(frozen=True)
class SizeNames:
    """Names of the sizes of an operation's tensors: ``columns``, and ``groups`` with one row vector each."""

    columns: str
    groups: str
    rows: str = "m"
    batch: str = "l"


class EpiOp:
    """Configuration of an epilogue operation: plain data; the class with the suffix ``Impl`` implements it."""

    extra_registers: ClassVar[bool] = False
    """Whether it needs registers for more than one fragment, which ping-pong on Hopper does not have."""
    two_pass: ClassVar[bool] = False
    """Whether subtiles may be narrower than ``column_multiple``: a first pass over them applies the operations up to
    this one, which reduces each subtile (amax); a second pass applies all operations and stores.
    """
    value = "x"
    """The name of the value that it transforms."""

    @property
    def column_multiple(self) -> int:
        """Columns of tiles and subtiles are multiples of this number."""
        return 1

    @property
    def segment_stride(self) -> int:
        """The split-half stride: half of ``column_multiple``, if the operation pairs columns that are this far apart. A
        subtile may then be narrower than ``column_multiple``: two segments that start ``segment_stride`` columns apart.
        """
        return 0

    @property
    def row_multiple(self) -> int:
        """Rows of a group (expert) are multiples of this number."""
        return 1

    @property
    def staged_bits(self) -> int:
        """Bits per value in shared memory, if tiles pass through it to or from the tensor."""
        return 0

    def width(self, widths: Widths) -> Fraction:
        """The width of its tensors and of its value; ``widths`` are the widths of all values so far."""
        return widths[self.value]

    def outputs(self, widths: Widths) -> Widths:
        """The values that it defines, or whose width it changes."""
        return {}

    def slots(self, names: SizeNames) -> tuple[Tensor | Scalar, ...]:
        """Its arguments of the kernel."""
        return ()

    def regions(self, names: SizeNames) -> tuple[Region, ...]:
        """The regions of the workspace that it writes."""
        return ()


def size_names_of(epilogue: Sequence[EpiOp], groups: str, batch: str = "l") -> list[SizeNames]:
    """The size names of each operation."""
    return [SizeNames("n" if width == 1 else "columns", groups, batch=batch) for width in widths_of(epilogue)[0]]


def regions_of(epilogue: Sequence[EpiOp], groups: str, batch: str = "l") -> tuple[Region, ...]:
    """The regions of the workspace that all operations write."""
    names = size_names_of(epilogue, groups, batch)
    return tuple(region for op, op_names in zip(epilogue, names, strict=True) for region in op.regions(op_names))


def widths_of(epilogue: Sequence[EpiOp]) -> tuple[list[Fraction], Fraction]:
    """The ``width`` of each operation, and that of ``x`` after the last one."""
    value_widths, op_widths = {"x": Fraction(1)}, list[Fraction]()
    for op in epilogue:
        op_widths.append(op.width(value_widths))
        value_widths |= op.outputs(value_widths)
    return op_widths, value_widths["x"]


def slots_of(epilogue: Sequence[EpiOp], groups: str, batch: str = "l") -> tuple[Tensor | Scalar, ...]:
    """The arguments of all operations; operations that name the same argument share it."""
    result: dict[str, Tensor | Scalar] = {}
    for op, names in zip(epilogue, size_names_of(epilogue, groups, batch), strict=True):
        for slot in op.slots(names):
            result.setdefault(slot.name, slot)
    return tuple(result.values())


@dataclass(frozen=True)
class EpilogueTraits:
    """What an epilogue requires of a configuration.

    The columns of a tile are a multiple of ``column_multiple``, the rows of a group of ``row_multiple``.
    ``staged_bits`` are the bits per value of each tensor that passes through shared memory, ``staged_bits_per_column``
    their sum per accumulator column. ``width`` is the width of ``x`` at the end. ``extra_registers`` as in
    :class:`EpiOp`.

    The columns of a subtile (epi_tile_n) are a multiple of ``column_multiple`` too, with two exceptions. With a
    ``segment_stride``, a subtile may be two segments, each a multiple of ``segment_multiple``. With two passes, it may
    be a multiple of ``two_pass_multiple`` that divides ``column_multiple``.
    """

    column_multiple: int
    row_multiple: int
    width: Fraction
    staged_bits: tuple[int, ...]
    extra_registers: bool
    staged_bits_per_column: int
    segment_stride: int = 0
    segment_multiple: int = 1
    two_pass_multiple: int = 0

    def accepts(self, epi_tile_n: int) -> bool:
        """Whether subtiles may have ``epi_tile_n`` columns."""
        return (
            epi_tile_n % self.column_multiple == 0
            or self.is_split(epi_tile_n)
            or self.subtiles_per_pass(epi_tile_n) > 1
        )

    def subtiles_per_pass(self, epi_tile_n: int) -> int:
        """The number of subtiles of ``epi_tile_n`` columns that a first pass reduces together; 1: there is only one
        pass.
        """
        divides = (
            self.two_pass_multiple
            and epi_tile_n % self.two_pass_multiple == 0
            and self.column_multiple % epi_tile_n == 0
        )
        return self.column_multiple // epi_tile_n if divides else 1

    def is_split(self, epi_tile_n: int) -> bool:
        """Whether a subtile of ``epi_tile_n`` columns must be two segments, ``segment_stride`` columns apart."""
        half = epi_tile_n // 2
        return (
            bool(self.segment_stride)
            and epi_tile_n % self.column_multiple != 0
            and self.segment_stride % half == 0
            and half % self.segment_multiple == 0
        )


def traits_of(epilogue: Sequence[EpiOp]) -> EpilogueTraits:
    """The traits of an epilogue: what all operations require together."""
    widths, final_width = widths_of(epilogue)
    columns = math.lcm(*((o.column_multiple / width).numerator for o, width in zip(epilogue, widths, strict=True)))
    strides = {o.segment_stride for o in epilogue if o.segment_stride}
    splits = len(strides) == 1 and final_width == 1 and columns == 2 * min(strides)
    two_pass_multiple = 0
    if (
        columns > MAX_EPI_TILE_N
        and any(o.two_pass for o in epilogue)
        and not any(isinstance(o, LoadTile) for o in epilogue)
    ):
        two_pass_multiple = math.lcm(
            *((o.column_multiple / w).numerator for o, w in zip(epilogue, widths, strict=True) if not o.two_pass)
        )
    return EpilogueTraits(
        columns,
        math.lcm(*(o.row_multiple for o in epilogue)),
        final_width,
        tuple(o.staged_bits for o in epilogue if o.staged_bits),
        any(o.extra_registers for o in epilogue),
        math.ceil(sum(o.staged_bits * width for o, width in zip(epilogue, widths, strict=True))),
        min(strides) if splits else 0,
        math.lcm(*(o.column_multiple for o in epilogue if not o.segment_stride)),
        two_pass_multiple,
    )


@dataclass(frozen=True)
class Scale(EpiOp):
    """x = x * a; ``a`` is a float argument of the call."""

    tensor: str = "alpha"
    value: str = "x"

    def slots(self, names: SizeNames) -> tuple[Scalar, ...]:
        return (Scalar(self.tensor, "float32"),)


@dataclass(frozen=True)
class MultiplyGroup(EpiOp):
    """x = x * a[i]^power: ``a`` of any float type and of the shape (l,); i is the batch index or the expert."""

    tensor: str = "alpha"
    dtype: str = "float32"
    power: int = 1
    value: str = "x"

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return (replace(vector(self.tensor, self.dtype, names.groups), strides=(None,)),)


@dataclass(frozen=True)
class _Tile(EpiOp):
    """A tensor (m, n, l) whose tiles pass through shared memory.

    ``concat_glu``: the tensor has concatenated halves; blocks of 32 columns of the value alternate between them.
    """

    tensor: str
    dtype: str
    major: str = "n"
    concat_glu: bool = field(default=False, kw_only=True)

    @property
    def column_multiple(self) -> int:
        return 2 * GLU_BLOCK if self.concat_glu else 1

    @property
    def staged_bits(self) -> int:
        return bits(self.dtype)

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        shape = (names.rows, names.columns, names.batch)
        return (matrix(self.tensor, self.dtype, shape, 1 if self.major == "n" else 0),)


@dataclass(frozen=True)
class LoadTile(_Tile):
    """Loads a tensor (m, n, l) as the value ``value``. It has ``times`` times the columns of ``x``."""

    value: str = "c"
    times: int = 1

    def width(self, widths: Widths) -> Fraction:
        return widths["x"] * self.times

    def outputs(self, widths: Widths) -> Widths:
        return {self.value: self.width(widths)}


@dataclass(frozen=True)
class StoreTile(_Tile):
    """Rounds a value to the tensor's type, to nearest even, and writes it: (m, n, l).

    Types of 8 bits and fewer saturate. float4_e2m1fn_x2, with major n only, is a uint8 tensor (m, n / 2, l), the left
    column of two in the low half; it has no NaN, which becomes the largest magnitude.

    ``adds``: adds the rounded value to the tensor instead (TMA reduction), in the tensor's type, which has 16 or 32
    bits; the sum is rounded again. ``pointers``: a ptr-array: ``tensor`` holds the int64 addresses of l matrices, which
    are multiples of 16 bytes; each matrix is contiguous.
    """

    value: str = "x"
    adds: bool = False
    pointers: bool = False

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return (addresses(self.tensor, names.batch),) if self.pointers else super().slots(names)


@dataclass(frozen=True)
class MultiplyColumn(EpiOp):
    """x[m, n] = x[m, n] * v[m]: ``v`` of any float type and of the shape (m, 1, l)."""

    tensor: str = "prob"
    dtype: str = "float32"
    value: str = "x"

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return (column(self.tensor, names.rows, names.batch, self.dtype),)


@dataclass(frozen=True)
class MultiplyBlocks(EpiOp):
    """x[m, n] = x[m, n] * s[m, n // vector]: ``s`` float32 (m, ceil(n / vector), l), with any strides."""

    tensor: str
    vector: int
    value: str = "x"

    @property
    def column_multiple(self) -> int:
        return GLU_BLOCK

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return (accumulator_scales(self.tensor, names.rows, f"{names.columns} / {self.vector}", names.batch),)


@dataclass(frozen=True)
class AddRow(EpiOp):
    """x[m, n] = x[m, n] + v[n], ``v`` of the shape (n, l), of any float type; l is the batch, or the expert.

    With a ``factor``, v[n] * f[m] is added, with ``f`` as in :class:`MultiplyColumn`. ``concat_glu``: v has
    concatenated halves, as in :class:`StoreTile`.
    """

    tensor: str
    dtype: str
    factor: MultiplyColumn | None = None
    concat_glu: bool = False

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        factor = self.factor.slots(names) if self.factor else ()
        return (vector(self.tensor, self.dtype, names.columns, names.groups), *factor)


@dataclass(frozen=True)
class Gate:
    """A gated activation of a gate g and an up value u, both clamped first:

        g = max(min(g, clamp_max), gate_min),  u = max(min(u, clamp_max), clamp_min)
        y = (u + offset) f(g)

    with f(g) = g / (1 + exp(-slope g)) for the activation ``swish``, and max(g, 0) for ``relu``. A parameter that is a
    string names a float argument of the call. For the activation ``situ``

        y = beta2 tanh(u / beta2) f(g),    f(g) = beta1 tanh(g / beta1) / (1 + exp(-g))
    """

    activation: str = "swish"
    slope: float | str = 1.0
    clamp_max: float | str | None = None
    clamp_min: float | str | None = None
    offset: float | str = 0.0
    beta1: float | str = 4.0
    beta2: float | str = 25.0
    gate_min: float | None = None
    FLOAT_PARAMETERS: ClassVar = ("slope", "clamp_max", "clamp_min", "offset", "beta1", "beta2")

    def slots(self) -> tuple[Scalar, ...]:
        """The parameters that are arguments of the call."""
        values = (getattr(self, name) for name in self.FLOAT_PARAMETERS)
        return tuple(Scalar(value, "float32") for value in values if isinstance(value, str))

    def bind(self, arguments: Mapping[str, Any]) -> Any:
        """The gate with values instead of argument names, from the ``arguments`` of the call."""
        parameters = {name: getattr(self, name) for name in self.FLOAT_PARAMETERS}
        return replace(self, **{name: arguments[x] for name, x in parameters.items() if isinstance(x, str)})


SWIGLU, GEGLU, REGLU = Gate(), Gate("swish", 1.702, 7.0, -7.0, 1.0), Gate("relu")


@dataclass(frozen=True)
class Gated(EpiOp):
    """y = act(gate, up): each 64 columns, 32 gate and 32 up, become 32 columns; see :class:`Gate`."""

    gate: Gate = SWIGLU
    gate_first: bool = False

    @property
    def column_multiple(self) -> int:
        return 2 * GLU_BLOCK

    def outputs(self, widths: Widths) -> Widths:
        return {"x": widths["x"] / 2}

    def slots(self, names: SizeNames) -> tuple[Scalar, ...]:
        return self.gate.slots()


@dataclass(frozen=True)
class GatedBackward(EpiOp):
    """The backward pass of :class:`Gated`: x is the gradient of y; the value ``saved`` has the gate and up columns.

    x becomes the gradient of ``saved``, in the same order: with the derivative f' and t the clamped u plus the offset,

        x t f'(g)  for a gate column, 0 where g is above clamp_max
        x f(g)     for an up column, 0 where u is above clamp_max or below clamp_min

    Two more values have the width that x had: ``activation`` = y, and ``prob_gradient`` = x y, the gradient of a factor
    (router probability) of y, if x is the gradient of the scaled y.
    """

    gate: Gate = SWIGLU
    gate_first: bool = False
    saved: str = "c"

    @property
    def column_multiple(self) -> int:
        return GLU_BLOCK

    def outputs(self, widths: Widths) -> Widths:
        width = widths["x"]
        return {"x": 2 * width, "activation": width, "prob_gradient": width}

    def slots(self, names: SizeNames) -> tuple[Scalar, ...]:
        return self.gate.slots()


@dataclass(frozen=True)
class Round(EpiOp):
    """Rounds a value to a type, to nearest even, and back to float32: later operations see the rounded value."""

    dtype: str
    value: str = "x"


@dataclass(frozen=True)
class Deinterleave(EpiOp):
    """Deinterleaves ``size`` columns from ``first`` on of every head of ``head`` columns: the even columns come first,
    then the odd ones. ``first`` and ``head`` are multiples of ``size``.
    """

    head: int
    first: int
    size: int

    @property
    def column_multiple(self) -> int:
        return self.size


@dataclass(frozen=True)
class Rotate(EpiOp):
    """Rotary embedding (RoPE): rotates pairs of columns by angles that depend on the row:

        left, right = left cos - right sin, right cos + left sin          with -sin where it is ``inverse``

    The columns are heads of ``head`` columns, of which ``rotary`` are rotated from ``first`` on, which is 0, or a
    multiple of ``rotary`` that divides ``head`` too. Pair i is the columns i and i + rotary / 2 of those or,
    ``interleaved``, 2 i and 2 i + 1. Only heads from column ``begin`` to before ``end`` are rotated; both are multiples
    of ``head``.

    ``cos`` and ``sin`` are tensors (m, rotary / 2) of the type ``dtype`` or, if ``full_tables``, (m, rotary): the
    second half is for right columns. With ``positions``, an int32 tensor (m,), they have any number of rows and row m
    takes the row positions[m]; rows with an out-of-range position become NaN.
    """

    head: int
    rotary: int
    dtype: str = "float32"
    interleaved: bool = False
    inverse: bool = False
    begin: int = 0
    end: int | None = None
    cos: str = "cos"
    sin: str = "sin"
    positions: str = ""
    first: int = 0
    full_tables: bool = False
    extra_registers: ClassVar[bool] = True

    @property
    def column_multiple(self) -> int:
        """With split halves, the smallest divisor of a head that holds both halves, in steps of 16 columns."""
        if self.interleaved:
            return 2
        return next(x for x in range(self.rotary, self.head + 1, 16) if self.head % x == 0)

    @property
    def segment_stride(self) -> int:
        return self.rotary // 2 if self.column_multiple == self.rotary else 0

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        shape = ("positions" if self.positions else names.rows, self.rotary if self.full_tables else self.rotary // 2)
        tables = [Tensor(name, self.dtype, shape, (None, 1)) for name in (self.cos, self.sin)]
        return (*tables, *([vector(self.positions, "int32", names.rows)] if self.positions else []))


@dataclass(frozen=True)
class Hadamard(EpiOp):
    """``result`` = factor H v, for every 16 values v of a row (``along`` n) or of a column (along m): H[i, j] is -1 if
    popcount(i & j) is odd, else 1.

    v are those of ``value``, rounded to bfloat16 first. An expert's rows are multiples of 16 along m.
    """

    along: str
    result: str = "rotated"
    value: str = "x"
    factor: float = 1.0
    extra_registers: ClassVar[bool] = True

    @property
    def column_multiple(self) -> int:
        return 16 if self.along == "n" else 1

    @property
    def row_multiple(self) -> int:
        return 16 if self.along == "m" else 1

    def outputs(self, widths: Widths) -> Widths:
        return {self.result: widths[self.value]}


@dataclass(frozen=True)
class SquaredRelu(EpiOp):
    """x = relu(x)^2, or (s tanh(relu(x) / s))^2, 0 for NaN, with the number s = ``clamp``."""

    clamp: float | None = None


@dataclass(frozen=True)
class SquaredReluBackward(EpiOp):
    """x = 2 relu(x) c, and the value ``prob_gradient`` = relu(x)^2 c, for a value ``c``.

    ``of_saved``: relu is that of c instead, x = 2 x relu(c), ``prob_gradient`` = x relu(c)^2 and, one more value,
    ``activation`` = relu(c)^2. Then there may be a ``clamp`` too: with r = s tanh(relu(c) / s), ``activation`` = r^2,
    ``prob_gradient`` = x r^2 and x = 2 x r (1 - (r / s)^2).
    """

    gradient: str = "c"
    of_saved: bool = False
    clamp: float | None = None

    def outputs(self, widths: Widths) -> Widths:
        names = ("prob_gradient", "activation") if self.of_saved else ("prob_gradient",)
        return dict.fromkeys(names, widths["x"])


@dataclass(frozen=True)
class Amax(EpiOp):
    """a[i] = max(a[i], |x|) before x is rounded; NaN if an x is NaN. i is 0, or the expert.

    With two ``roles``, blocks of 32 columns alternate (gate and up): a[i, j] is the maximum of every second block, from
    block j on. The caller fills ``a``, float32, with -inf or with 0.
    """

    tensor: str = "amax"
    by_expert: bool = False
    value: str = "x"
    roles: int = 1

    @property
    def column_multiple(self) -> int:
        return self.roles * GLU_BLOCK if self.roles > 1 else 1

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        shape = (names.groups,) if self.by_expert else (1,) if self.roles == 1 else ()
        shape += (self.roles,) if self.roles > 1 else ()
        strides = (self.roles, 1)[-len(shape) :]
        return (Tensor(self.tensor, "float32", shape, strides, align=4),)


TILE_COLUMNS, BLOCK_ROWS = 64, 64
"""The smallest tile width of an ordered :class:`SumRow`, and the rows of a partial sum of :class:`SumColumn`."""


@dataclass(frozen=True)
class SumRow(EpiOp):
    """s[m] += the sum of a value over the columns; ``s`` of the shape (m, 1, l), float32. By atomics, in any order.

    ``ordered`` (deterministic): each tile stores its partial sum to the workspace, and a second kernel adds them up in
    order.
    """

    tensor: str
    value: str
    ordered: bool = False

    def regions(self, names: SizeNames) -> tuple[Region, ...]:
        def size(sizes: Sizes) -> Any:
            """float32 (tiles, rows of all batches), for the narrowest tiles."""
            tiles = (sizes[names.columns] + TILE_COLUMNS - 1) // TILE_COLUMNS
            return tiles * sizes[names.rows] * sizes[names.batch] * 4

        return (Region(f"{self.tensor} sums", size),) if self.ordered else ()

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return (column(self.tensor, names.rows, names.batch),)


@dataclass(frozen=True)
class SumColumn(EpiOp):
    """s[i, n] = the sum of a value over the rows of expert i, or of batch i; ``s`` of the shape (experts, n), of any
    float type, n contiguous. Partial sums of 64 rows are stored to the workspace, and a second kernel adds them up in
    order. ``concat_glu`` as in :class:`AddRow`.
    """

    tensor: str
    dtype: str = "float32"
    value: str = "x"
    concat_glu: bool = False

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        size = bits(self.dtype) // 8
        return (Tensor(self.tensor, self.dtype, (names.groups, names.columns), (None, 1), align=size),)

    def regions(self, names: SizeNames) -> tuple[Region, ...]:
        def size(sizes: Sizes) -> Any:
            """float32 (blocks of all groups, columns): a varlen_m group has at most one partial block more."""
            blocks, groups = (sizes[names.rows] + BLOCK_ROWS - 1) // BLOCK_ROWS, sizes[names.groups]
            count = blocks * groups if names.groups == names.batch else blocks + groups
            return count * sizes[names.columns] * 4

        return (Region(f"{self.tensor} sums", size),)


@dataclass(frozen=True)
class QuantizeRows(EpiOp):
    """Divides every ``vector`` columns of x by a common scale factor, and writes the scale factors.

        s = max |x| / limit * norm_const, rounded to ``scale_dtype``: up, to a power of two, for float8_e8m0fnu
        x = x * min(norm_const / s, largest float32), or 0 where s is 0; e8m0 has no 0

    ``limit`` is that of ``dtype``, to which the values will be rounded. e8m0 scale factors lie between 2^-127 and
    2^127, e4m3 ones are at most 448; NaN among the values makes their scale factor NaN. The scale factors have the
    layout of 128 x 4 atoms, (32, 4, ceil(m / 128), 4, ceil(n / vector / 4), l); those of out-of-bounds rows and columns
    become 0 or stay. norm_const is a float32 tensor (1,), positive, or a float if ``by_value``; 1 without a name.
    Without ``atoms``, the scale factors are bytes (m, n / vector, l) of any strides. float32 scale factors are not
    rounded, or up to a ``power_of_two``, and form a matrix too, (m, ceil(n / vector), l). With a ``source``, the value
    is computed from that one, which does not change.
    """

    tensor: str
    dtype: str
    scale_dtype: str
    vector: int
    norm_const: str = "norm_const"
    atoms: bool = True
    value: str = "x"
    by_value: bool = False
    power_of_two: bool = False
    source: str = ""
    extra_registers: ClassVar[bool] = True
    two_pass: ClassVar[bool] = True

    @property
    def column_multiple(self) -> int:
        return self.vector

    def outputs(self, widths: Widths) -> Widths:
        return {self.value: widths[self.source]} if self.source else {}

    def width(self, widths: Widths) -> Fraction:
        return widths[self.source or self.value]

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return quantizer_slots(self, names.rows, f"{names.columns} / {self.vector}", names.batch)


@dataclass(frozen=True)
class QuantizeColumns(EpiOp):
    """As :class:`QuantizeRows`, for every 32 rows of a column of x, into the value ``columns``; x is unchanged.

    The last rows may be fewer. The atoms of scale factors are transposed: (32, 4, ceil(n / 128), 4, ceil(m / 128), l);
    without ``atoms`` the scale factors are bytes (n, ceil(m / 32), l). Experts begin at multiples of 32 rows.
    ``by_expert``: at multiples of 128, and each expert has separate atoms, one expert after the other.
    """

    tensor: str
    dtype: str
    scale_dtype: str
    value: str = "columns"
    norm_const: str = "norm_const"
    by_expert: bool = False
    atoms: bool = True
    source: str = "x"
    by_value: ClassVar[bool] = False
    power_of_two: ClassVar[bool] = False
    extra_registers: ClassVar[bool] = True

    @property
    def row_multiple(self) -> int:
        return 128 if self.by_expert else 32

    def outputs(self, widths: Widths) -> Widths:
        return {self.value: widths[self.source]}

    def width(self, widths: Widths) -> Fraction:
        return widths[self.source]

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        return quantizer_slots(self, names.columns, f"{names.rows} / 32", names.batch)


def quantizer_slots(o: QuantizeRows | QuantizeColumns, rows: str, blocks: str, batch: str) -> tuple[Any, ...]:
    """The scale factors of a quantizer, and its norm_const, if any."""
    scales = Tensor(o.tensor, "uint8", (rows, blocks, batch), (None, None, None), align=1)
    if o.scale_dtype == "float32":
        scales = accumulator_scales(o.tensor, rows, blocks, batch)
    elif o.atoms:
        scales = block_scales(o.tensor, o.scale_dtype, rows, blocks, batch)
    if o.by_value:
        return scales, Scalar(o.norm_const, "float32")
    return (scales, *([Tensor(o.norm_const, "float32", (1,), (1,), align=4)] if o.norm_const else []))


@dataclass(frozen=True)
class StoreColumns(EpiOp):
    """NVFP4 along m: divides every 16 rows of a column of a value by a common scale factor, rounds the quotients to
    four bits and writes both, transposed.

        s = max |x| / 6 * norm_const, rounded to float8_e4m3fn;  d = x / (s / norm_const), or 0 where s is 0

    ``tensor``, bytes (m n / 2,), has one expert after the other, each with t rows, column by column: row j of column i
    is element i t + j of its expert, the first one of two in the low half. In ``scales``, bytes (m n / 16,), the scale
    factor of rows 16 j ... of column i has the index

        ((i % 32 * 4 + i // 32 % 4) * n / 128 + i // 128) * t / 16 + j % 4 * t / 64 + j // 4

    of its expert. Experts have multiples of 64 rows, n is one of 128. ``norm_const`` is a float.
    """

    tensor: str
    scales: str
    norm_const: str
    value: str = "x"
    extra_registers: ClassVar[bool] = True

    @property
    def row_multiple(self) -> int:
        return 64

    def slots(self, names: SizeNames) -> tuple[Tensor | Scalar, ...]:
        types = {self.tensor: "uint8", self.scales: "float8_e4m3fn"}
        flat = [Tensor(name, dtype, (f"{name} bytes",), (1,)) for name, dtype in types.items()]
        return (*flat, Scalar(self.norm_const, "float32"))


TOKEN_BLOCK = 128
"""Rows of a block of :class:`StoreTokenBlocks`."""


@dataclass(frozen=True)
class StoreTokenBlocks(EpiOp):
    """Divides every 128 rows of a column of a value by a common scale factor, rounds and writes them transposed, as the
    K-major operands that weight gradients read by ``VarlenK(k_block=128)``.

        s = max |x| / limit, or the next ``power_of_two``;  d = x / s, or 0 where s is 0

    Blocks begin where groups do: row 128 j + i of group e is token i of block :func:`first_block` + j of ``tensor``,
    (blocks, n, 128), of 8 bits; the tokens after a group's last one are zeros. The scale factors are float32
    (blocks, n). Other blocks stay.
    """

    tensor: str
    scales: str
    dtype: str
    value: str = "x"
    power_of_two: bool = False
    major: ClassVar[str] = "m"
    concat_glu: ClassVar[bool] = False
    extra_registers: ClassVar[bool] = True

    @property
    def staged_bits(self) -> int:
        return bits(self.dtype)

    def slots(self, names: SizeNames) -> tuple[Tensor, ...]:
        blocks = f"{names.rows} / {TOKEN_BLOCK}"
        return (
            Tensor(self.tensor, self.dtype, (blocks, names.columns, TOKEN_BLOCK), (None, None, 1)),
            Tensor(self.scales, "float32", (blocks, names.columns), (None, 1), align=4),
        )
