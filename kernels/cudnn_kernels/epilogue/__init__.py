"""The vocabulary of epilogues: what happens to a GEMM's float32 accumulator before anything is stored.

An epilogue is a tuple of these declarations, applied from left to right to named tiles of values; the accumulator is
``x``. They are plain data, part of a kernel's configuration, so this module imports no CuTe DSL. How each one runs on
a GPU is in the modules beside it, of which ``cudnn_kernels.epilogue.table`` says which class runs which declaration;
what each one means for whole tensors is in ``cudnn.gemm.reference``.

``tensor`` names an argument of the kernel. A declaration says which arguments it has (``slots``), how wide the values
are that it takes and makes (``width``, ``makes``), and what it asks of the configuration (``step``, ``staged``,
``registers``), so that neither the host nor the heuristics need to know it. Types go by PyTorch's names, ``major`` is
the dimension of stride 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

from cudnn_kernels.formats import bits
from cudnn_kernels.signature import (
    Region,
    Scalar,
    Sizes,
    Tensor,
    addresses,
    block_scales,
    column,
    matrix,
    sum_scales,
    vector,
)

BLOCK = 32
"""Columns of one role, where gates and other columns take turns."""

WIDEST = 128
"""Columns that pass through the epilogue at a time, at most, where they need not be more."""

Widths = Mapping[str, Fraction]
"""Columns of each value, for each of the accumulator's. The size of 1 is called ``n``, any other one ``columns``."""


@dataclass(frozen=True)
class Place:
    """Names of sizes where a declaration stands: its tensors have ``columns``, ``groups`` have a row vector each."""

    columns: str
    groups: str
    rows: str = "m"
    batch: str = "l"


class Declaration:
    """What every declaration says of itself."""

    columns: ClassVar[int] = 1
    """Columns come in multiples of as many: in a tile, and as many as pass through the epilogue at a time."""
    registers: ClassVar[bool] = False
    """Whether it holds more values in registers than a fragment, which ping-pong on Hopper has no room for."""
    sweeps: ClassVar[bool] = False
    """Whether parts may be narrower than its columns: it measures these in a sweep of their own, with what is before
    it, and then works on one part after the other."""
    value = "x"
    """The name of the value that it works on."""

    @property
    def step(self) -> int:
        """``columns``, where that depends on the fields."""
        return self.columns

    @property
    def apart(self) -> int:
        """Half of ``step``, where it takes columns so far apart together and not those between: then what passes
        through the epilogue at a time may be narrower, two pieces that begin so many columns apart.
        """
        return 0

    @property
    def rows(self) -> int:
        """Rows of an expert come in multiples of as many."""
        return 1

    @property
    def staged(self) -> int:
        """Bits that each value takes in shared memory on its way to or from the tensor."""
        return 0

    def width(self, widths: Widths) -> Fraction:
        """The width of its tensors, and of the value it works on, where the values before it have these."""
        return widths[self.value]

    def makes(self, widths: Widths) -> Widths:
        """The values that it makes, or makes wider or narrower."""
        return {}

    def slots(self, place: Place) -> tuple[Tensor | Scalar, ...]:
        """Its arguments of the kernel."""
        return ()

    def regions(self, place: Place) -> tuple[Region, ...]:
        """The parts of the workspace that it writes."""
        return ()


def places_of(epilogue: Sequence[Declaration], groups: str, batch: str = "l") -> list[Place]:
    """Where each declaration stands."""
    return [Place("n" if width == 1 else "columns", groups, batch=batch) for width in widths_of(epilogue)[0]]


def regions_of(epilogue: Sequence[Declaration], groups: str, batch: str = "l") -> tuple[Region, ...]:
    """The parts of the workspace that all declarations write."""
    places = places_of(epilogue, groups, batch)
    return tuple(region for o, place in zip(epilogue, places, strict=True) for region in o.regions(place))


def widths_of(epilogue: Sequence[Declaration]) -> tuple[list[Fraction], Fraction]:
    """The ``width`` of each declaration, and that of ``x`` after all."""
    values, found = {"x": Fraction(1)}, list[Fraction]()
    for declaration in epilogue:
        found.append(declaration.width(values))
        values |= declaration.makes(values)
    return found, values["x"]


def slots_of(epilogue: Sequence[Declaration], groups: str, batch: str = "l") -> tuple[Tensor | Scalar, ...]:
    """The arguments of all declarations. Those of the same name are one, declared alike."""
    found: dict[str, Tensor | Scalar] = {}
    for declaration, place in zip(epilogue, places_of(epilogue, groups, batch), strict=True):
        for slot in declaration.slots(place):
            found.setdefault(slot.name, slot)
    return tuple(found.values())


@dataclass(frozen=True)
class Needs:
    """What an epilogue asks of a configuration: ``columns`` of a tile and ``rows`` of an expert are multiples of so
    many, ``staged`` are the bits of each tensor that passes through shared memory, ``width`` is that of ``x`` in the
    end, ``bits`` are those that pass through shared memory for each of the accumulator's. A part's columns are such a
    multiple too or, where there is ``apart``, two pieces of it, each a multiple of ``piece`` or, where there is
    ``swept``, a multiple of that which divides ``columns``.
    """

    columns: int
    rows: int
    width: Fraction
    staged: tuple[int, ...]
    registers: bool
    bits: int
    apart: int = 0
    piece: int = 1
    swept: int = 0

    def takes(self, part: int) -> bool:
        """Whether so many columns can pass through the epilogue at a time."""
        return part % self.columns == 0 or self.splits(part) or self.sweeps(part) > 1

    def sweeps(self, part: int) -> int:
        """How many parts of so many columns are measured together before they pass; 1: none."""
        divides = self.swept and part % self.swept == 0 and self.columns % part == 0
        return self.columns // part if divides else 1

    def splits(self, part: int) -> bool:
        """Whether so many columns can be two pieces that begin ``apart`` columns apart, and only so."""
        half = part // 2
        return bool(self.apart) and part % self.columns != 0 and self.apart % half == 0 and half % self.piece == 0


def needs_of(epilogue: Sequence[Declaration]) -> Needs:
    """What all declarations ask for together."""
    widths, last = widths_of(epilogue)
    columns = math.lcm(*((o.step / width).numerator for o, width in zip(epilogue, widths, strict=True)))
    apart = {o.apart for o in epilogue if o.apart}
    one = len(apart) == 1 and last == 1 and columns == 2 * min(apart)
    swept = 0
    if columns > WIDEST and sum(o.sweeps for o in epilogue) == 1 and not any(isinstance(o, LoadTile) for o in epilogue):
        swept = math.lcm(*((o.step / w).numerator for o, w in zip(epilogue, widths, strict=True) if not o.sweeps))
    return Needs(
        columns,
        math.lcm(*(o.rows for o in epilogue)),
        last,
        tuple(o.staged for o in epilogue if o.staged),
        any(o.registers for o in epilogue),
        math.ceil(sum(o.staged * width for o, width in zip(epilogue, widths, strict=True))),
        min(apart) if one else 0,
        math.lcm(*(o.step for o in epilogue if not o.apart)),
        swept,
    )


@dataclass(frozen=True)
class Scale(Declaration):
    """x = x * a, where ``a`` is a float that the caller passes; or another value."""

    tensor: str = "alpha"
    value: str = "x"

    def slots(self, place: Place) -> tuple[Scalar, ...]:
        return (Scalar(self.tensor, "float32"),)


@dataclass(frozen=True)
class MultiplyGroup(Declaration):
    """x = x * a[i]^power, or another value: ``a`` of any float type and of the shape (l,); i is batch or expert."""

    tensor: str = "alpha"
    dtype: str = "float32"
    power: int = 1
    value: str = "x"

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        return (replace(vector(self.tensor, self.dtype, place.groups), strides=(None,)),)


@dataclass(frozen=True)
class _Tile(Declaration):
    """A tensor (m, n, l) whose tiles pass through shared memory.

    Where its columns are ``halves``, blocks of 32 columns of the value lie in the first and the second half in turn.
    """

    tensor: str
    dtype: str
    major: str = "n"
    halves: bool = field(default=False, kw_only=True)

    @property
    def step(self) -> int:
        return 2 * BLOCK if self.halves else 1

    @property
    def staged(self) -> int:
        return bits(self.dtype)

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        shape = (place.rows, place.columns, place.batch)
        return (matrix(self.tensor, self.dtype, shape, 1 if self.major == "n" else 0),)


@dataclass(frozen=True)
class LoadTile(_Tile):
    """Names a tensor (m, n, l) ``value``. It may have ``times`` as many columns as ``x``."""

    value: str = "c"
    times: int = 1

    def width(self, widths: Widths) -> Fraction:
        return widths["x"] * self.times

    def makes(self, widths: Widths) -> Widths:
        return {self.value: self.width(widths)}


@dataclass(frozen=True)
class StoreTile(_Tile):
    """Rounds a value to the tensor's type, to nearest even, and writes it: (m, n, l).

    Types of 8 bits and fewer saturate. float4_e2m1fn_x2, with major n only, is a uint8 tensor (m, n / 2, l), the left
    column of two in the low half; it has no NaN, which becomes the largest magnitude.

    ``adds``: to what the tensor held, in its type, which has 16 or 32 bits: the sum of two rounded numbers is rounded.
    ``pointers``: the matrices are not one tensor; ``tensor`` holds their l addresses, int64, multiples of 16 bytes, and
    each lies there without gaps between rows or columns.
    """

    value: str = "x"
    adds: bool = False
    pointers: bool = False

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        return (addresses(self.tensor, place.batch),) if self.pointers else super().slots(place)


@dataclass(frozen=True)
class MultiplyColumn(Declaration):
    """x[m, n] = x[m, n] * v[m], ``v`` of the shape (m, 1, l), of any float type; or another value."""

    tensor: str = "prob"
    dtype: str = "float32"
    value: str = "x"

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        return (column(self.tensor, place.rows, place.batch, self.dtype),)


@dataclass(frozen=True)
class AddRow(Declaration):
    """x[m, n] = x[m, n] + v[n], ``v`` of the shape (n, l), of any float type; l is the batch, or the expert.

    With a ``factor``, it is added v[n] * f[m]: ``f`` as that of :class:`MultiplyColumn`. ``halves``: of v, as those of
    the columns of :class:`StoreTile`.
    """

    tensor: str
    dtype: str
    factor: MultiplyColumn | None = None
    halves: bool = False

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        factors = self.factor.slots(place) if self.factor else ()
        return (vector(self.tensor, self.dtype, place.columns, place.groups), *factors)


@dataclass(frozen=True)
class Gate:
    """What a gated activation makes of a gate g and the other value u, both clamped before:

        g = max(min(g, clamp_max), gate_min),  u = max(min(u, clamp_max), clamp_min)
        y = (u + offset) f(g)

    with f(g) = g / (1 + exp(-slope g)) for the kind ``swish``, and max(g, 0) for ``relu``. A parameter that is a string
    names a float that the caller passes. Without clamps nothing is clamped. For the kind ``situ``

        y = beta2 tanh(u / beta2) f(g),    f(g) = beta1 tanh(g / beta1) / (1 + exp(-g))
    """

    kind: str = "swish"
    slope: float | str = 1.0
    clamp_max: float | str | None = None
    clamp_min: float | str | None = None
    offset: float | str = 0.0
    beta1: float | str = 4.0
    beta2: float | str = 25.0
    gate_min: float | None = None
    NUMBERS: ClassVar = ("slope", "clamp_max", "clamp_min", "offset", "beta1", "beta2")

    def slots(self) -> tuple[Scalar, ...]:
        """The parameters that the caller passes."""
        values = (getattr(self, name) for name in self.NUMBERS)
        return tuple(Scalar(value, "float32") for value in values if isinstance(value, str))

    def given(self, arguments: Mapping[str, Any]) -> Any:
        """The same with numbers instead of names; ``arguments`` are what the caller passes."""
        found = {name: getattr(self, name) for name in self.NUMBERS}
        return replace(self, **{name: arguments[x] for name, x in found.items() if isinstance(x, str)})


SWIGLU, GEGLU, REGLU = Gate(), Gate("swish", 1.702, 7.0, -7.0, 1.0), Gate("relu")


@dataclass(frozen=True)
class Gated(Declaration):
    """Of every 64 columns, 32 gates and 32 others make 32 columns, as :class:`Gate` says."""

    gate: Gate = SWIGLU
    gate_first: bool = False
    columns: ClassVar[int] = 2 * BLOCK

    def makes(self, widths: Widths) -> Widths:
        return {"x": widths["x"] / 2}

    def slots(self, place: Place) -> tuple[Scalar, ...]:
        return self.gate.slots()


@dataclass(frozen=True)
class GatedBackward(Declaration):
    """The backward pass of :class:`Gated`: x is the gradient of y, ``saved`` a value with two columns for each of x's.

    x becomes the gradient of ``saved``, in the same order: with the derivative f' and t the clamped u plus the offset,

        x t f'(g)  for a gate, 0 where it is above clamp_max
        x f(g)     for another, 0 where it is above clamp_max or below clamp_min

    Two more values have the width that x had: ``activation`` = y, and ``prob_gradient`` = x y, which is the gradient of
    a factor of y, where x is that of the product.
    """

    gate: Gate = SWIGLU
    gate_first: bool = False
    saved: str = "c"
    columns: ClassVar[int] = BLOCK

    def makes(self, widths: Widths) -> Widths:
        before = widths["x"]
        return {"x": 2 * before, "activation": before, "prob_gradient": before}

    def slots(self, place: Place) -> tuple[Scalar, ...]:
        return self.gate.slots()


@dataclass(frozen=True)
class Round(Declaration):
    """Rounds a value to a type, to nearest even: what follows sees what that type holds."""

    dtype: str
    value: str = "x"


@dataclass(frozen=True)
class Deinterleave(Declaration):
    """Of every head of ``head`` columns, puts ``size`` from ``first`` on into another order: of their pairs of
    neighbours, first all that were left, then all that were right. ``first`` and ``head`` are multiples of ``size``.
    """

    head: int
    first: int
    size: int

    @property
    def step(self) -> int:
        return self.size


@dataclass(frozen=True)
class Rotate(Declaration):
    """Rotates pairs of columns by angles that depend on the row, as rotary embeddings do:

        left, right = left cos - right sin, right cos + left sin          with -sin where it is ``inverse``

    The columns are heads of ``head`` each, of which ``rotary`` are rotated from ``first`` on, 0 or a multiple of
    ``rotary`` as head is then. Pair i is the columns i and i + rotary / 2 of those or, ``interleaved``, 2 i and
    2 i + 1. Only heads from column ``begin`` to before ``end`` are rotated; both are multiples of ``head``.

    ``cos`` and ``sin`` are tensors (m, rotary / 2) of the type ``dtype`` or, where they are ``whole``, (m, rotary): the
    second half is for right columns. With ``positions``, an int32 tensor (m,), they have any number of rows and row m
    takes that row of them; what takes one that there is not becomes NaN.
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
    whole: bool = False
    registers: ClassVar[bool] = True

    @property
    def step(self) -> int:
        """Of halves, the smallest share of a head, in multiples of 16, that holds all of them."""
        if self.interleaved:
            return 2
        return next(x for x in range(self.rotary, self.head + 1, 16) if self.head % x == 0)

    @property
    def apart(self) -> int:
        return self.rotary // 2 if self.step == self.rotary else 0

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        shape = ("positions" if self.positions else place.rows, self.rotary if self.whole else self.rotary // 2)
        tables = [Tensor(name, self.dtype, shape, (None, 1)) for name in (self.cos, self.sin)]
        return (*tables, *([vector(self.positions, "int32", place.rows)] if self.positions else []))


@dataclass(frozen=True)
class Hadamard(Declaration):
    """``result`` = factor H v, for every 16 values v of a row, ``along`` n, or of a column, along m: H[i, j] is -1
    where the numbers i and j have an odd number of bits in common, else 1.

    v are those of ``value``, rounded to bfloat16 first. An expert's rows are multiples of 16 along m.
    """

    along: str
    result: str = "rotated"
    value: str = "x"
    factor: float = 1.0
    registers: ClassVar[bool] = True

    @property
    def step(self) -> int:
        return 16 if self.along == "n" else 1

    @property
    def rows(self) -> int:
        return 16 if self.along == "m" else 1

    def makes(self, widths: Widths) -> Widths:
        return {self.result: widths[self.value]}


@dataclass(frozen=True)
class SquaredRelu(Declaration):
    """x = relu(x)^2, or (s tanh(relu(x) / s))^2, 0 for NaN, with the number s = ``clamp``."""

    clamp: float | None = None


@dataclass(frozen=True)
class SquaredReluBackward(Declaration):
    """x = 2 relu(x) c, and the value ``prob_gradient`` = relu(x)^2 c, for a value ``c``.

    ``of_saved``: relu is that of c instead, x = 2 x relu(c), ``prob_gradient`` = x relu(c)^2 and, one more value,
    ``activation`` = relu(c)^2. Then there may be a ``clamp`` too: with r = s tanh(relu(c) / s), ``activation`` = r^2,
    ``prob_gradient`` = x r^2 and x = 2 x r (1 - (r / s)^2).
    """

    gradient: str = "c"
    of_saved: bool = False
    clamp: float | None = None

    def makes(self, widths: Widths) -> Widths:
        names = ("prob_gradient", "activation") if self.of_saved else ("prob_gradient",)
        return dict.fromkeys(names, widths["x"])


@dataclass(frozen=True)
class Amax(Declaration):
    """a[i] = max(a[i], |x|) or of another value, before rounding; NaN where a value is. i is 0, or the expert.

    With two ``roles``, blocks of 32 columns take turns: a[i, j] is that of every second block, from block j on. The
    caller fills ``a``, float32, with -inf or with 0.
    """

    tensor: str = "amax"
    by_expert: bool = False
    value: str = "x"
    roles: int = 1

    @property
    def step(self) -> int:
        return self.roles * BLOCK if self.roles > 1 else 1

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        shape = (place.groups,) if self.by_expert else (1,) if self.roles == 1 else ()
        shape += (self.roles,) if self.roles > 1 else ()
        strides = (self.roles, 1)[-len(shape) :]
        return (Tensor(self.tensor, "float32", shape, strides, align=4),)


TILE_COLUMNS, BLOCK_ROWS = 64, 64
"""Columns of a tile, at least, whose sums of rows are added up in order, and rows whose sums of columns are."""


@dataclass(frozen=True)
class SumRow(Declaration):
    """s[m] += the sum of a value over the columns; ``s`` of the shape (m, 1, l), float32. The order is not fixed.

    ``ordered``: each tile puts its sum into the workspace, and a second kernel adds them to s in their order.
    """

    tensor: str
    value: str
    ordered: bool = False

    def regions(self, place: Place) -> tuple[Region, ...]:
        def size(sizes: Sizes) -> Any:
            """float32 (tiles, rows of all batches), as many as of the narrowest tiles."""
            tiles = (sizes[place.columns] + TILE_COLUMNS - 1) // TILE_COLUMNS
            return tiles * sizes[place.rows] * sizes[place.batch] * 4

        return (Region(f"{self.tensor} sums", size),) if self.ordered else ()

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        return (column(self.tensor, place.rows, place.batch),)


@dataclass(frozen=True)
class SumColumn(Declaration):
    """s[i, n] = the sum of a value over the rows of expert i, or of batch i; ``s`` of the shape (experts, n), of any
    float type, n contiguous. Sums of 64 rows are put into the workspace, and added up in their order by a second
    kernel. ``halves`` as of :class:`AddRow`.
    """

    tensor: str
    dtype: str = "float32"
    value: str = "x"
    halves: bool = False

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        size = bits(self.dtype) // 8
        return (Tensor(self.tensor, self.dtype, (place.groups, place.columns), (None, 1), align=size),)

    def regions(self, place: Place) -> tuple[Region, ...]:
        def size(sizes: Sizes) -> Any:
            """float32 (blocks of all groups, columns): groups that share rows have one more than whole ones at most."""
            blocks, groups = (sizes[place.rows] + BLOCK_ROWS - 1) // BLOCK_ROWS, sizes[place.groups]
            count = blocks * groups if place.groups == place.batch else blocks + groups
            return count * sizes[place.columns] * 4

        return (Region(f"{self.tensor} sums", size),)


@dataclass(frozen=True)
class QuantizeRows(Declaration):
    """Divides every ``vector`` columns of x, or of another value, by a common scale factor, and writes the factors.

        s = max |x| / limit * norm_const, rounded to ``scale_dtype``: up, to a power of two, for float8_e8m0fnu
        x = x * min(norm_const / s, largest float32), or 0 where s is 0; e8m0 has no 0

    ``limit`` is that of ``dtype``, which the values will be rounded to. e8m0's factors lie between 2^-127 and 2^127,
    e4m3's are at most 448; NaN among the values makes their factor NaN. The factors have the layout of 128 x 4 atoms,
    (32, 4, ceil(m / 128), 4, ceil(n / vector / 4), l); those of rows and columns beyond the tensor become 0 or stay.
    norm_const is a float32 tensor (1,), positive, or where ``by_value`` a float; 1 where it has no name. Without
    ``atoms``, the factors are bytes (m, n / vector, l) of any strides. float32's are not rounded, or up to a
    ``power_of_two``, and lie as a matrix too, (m, ceil(n / vector), l).
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
    registers: ClassVar[bool] = True
    sweeps: ClassVar[bool] = True

    @property
    def step(self) -> int:
        return self.vector

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        return quantizer_slots(self, place.rows, f"{place.columns} / {self.vector}", place.batch)


@dataclass(frozen=True)
class QuantizeColumns(Declaration):
    """As :class:`QuantizeRows` for every 32 rows of a column of x, or of another value, into the value ``columns``; x
    stays.

    The last rows may be fewer. The factors' atoms have columns for rows and groups of 32 rows for columns:
    (32, 4, ceil(n / 128), 4, ceil(m / 128), l); without ``atoms`` the factors are bytes (n, ceil(m / 32), l).
    Experts begin at multiples of 32 rows. ``by_expert``: at multiples of 128, and the atoms of each expert are those of
    a matrix of its own, one expert after the other.
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
    registers: ClassVar[bool] = True

    @property
    def rows(self) -> int:
        return 128 if self.by_expert else 32

    def makes(self, widths: Widths) -> Widths:
        return {self.value: widths[self.source]}

    def width(self, widths: Widths) -> Fraction:
        return widths[self.source]

    def slots(self, place: Place) -> tuple[Tensor, ...]:
        return quantizer_slots(self, place.columns, f"{place.rows} / 32", place.batch)


def quantizer_slots(o: QuantizeRows | QuantizeColumns, rows: str, blocks: str, batch: str) -> tuple[Any, ...]:
    """The factors of a quantiser, and its constant where it has one."""
    factors = Tensor(o.tensor, "uint8", (rows, blocks, batch), (None, None, None), align=1)
    if o.scale_dtype == "float32":
        factors = sum_scales(o.tensor, rows, blocks, batch)
    elif o.atoms:
        factors = block_scales(o.tensor, o.scale_dtype, rows, blocks, batch)
    if o.by_value:
        return factors, Scalar(o.norm_const, "float32")
    return (factors, *([Tensor(o.norm_const, "float32", (1,), (1,), align=4)] if o.norm_const else []))


@dataclass(frozen=True)
class StoreColumns(Declaration):
    """Divides every 16 rows of a column of a value by a common scale factor, rounds the quotients to four bits and
    writes both, columns instead of rows.

        s = max |x| / 6 * norm_const, rounded to float8_e4m3fn;  d = x / (s / norm_const), or 0 where s is 0

    ``tensor``, bytes (m n / 2,), has the experts one after the other, each with its t rows of all columns in turn: row
    j of column i is element i t + j of its expert, the first one of two in the low half. In ``scales``, bytes
    (m n / 16,), the factor of rows 16 j ... of column i is number

        ((i % 32 * 4 + i // 32 % 4) * n / 128 + i // 128) * t / 16 + j % 4 * t / 64 + j // 4

    of its expert. Experts have multiples of 64 rows, n is one of 128. ``norm_const`` is a float.
    """

    tensor: str
    scales: str
    norm_const: str
    value: str = "x"
    registers: ClassVar[bool] = True
    rows: ClassVar[int] = 64  # pyright: ignore[reportIncompatibleMethodOverride]

    def slots(self, place: Place) -> tuple[Tensor | Scalar, ...]:
        types = {self.tensor: "uint8", self.scales: "float8_e4m3fn"}
        flat = [Tensor(name, dtype, (f"{name} bytes",), (1,)) for name, dtype in types.items()]
        return (*flat, Scalar(self.norm_const, "float32"))
