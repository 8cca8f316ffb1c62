"""The vocabulary of epilogues: what happens to a GEMM's float32 accumulator before anything is stored.

An epilogue is a tuple of these declarations, applied from left to right to named tiles of values; the accumulator is
``x``. They are plain data, part of a kernel's configuration, so this module imports no CuTe DSL. How each one runs on
a GPU is in the modules beside it, of which ``cudnn_kernels.epilogue.table`` says which class runs which declaration;
what each one means for whole tensors is in ``cudnn_kernels.epilogue.reference``.

``tensor`` names an argument of the kernel; the arguments of an epilogue come in the order of its declarations. Types go
by PyTorch's names, ``major`` is the dimension of stride 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RECIPROCALS: Mapping[str, float] = {"float8_e4m3fn": 1 / 448, "float8_e5m2": 1 / 128, "float4_e2m1fn_x2": 1 / 6}
"""What quantisers multiply the largest magnitude by: 1 / limit, and 1 for other types. e5m2's values reach 128 only."""


@dataclass(frozen=True)
class Scale:
    """x = x * a, where ``a`` is a float that the caller passes."""

    tensor: str = "alpha"


@dataclass(frozen=True)
class LoadTile:
    """Names a tensor (m, n, l) ``value``."""

    tensor: str
    dtype: str
    major: str = "n"
    value: str = "c"


@dataclass(frozen=True)
class StoreTile:
    """Rounds a value to the tensor's type, to nearest even, and writes it: (m, n, l).

    Types of 8 bits and fewer saturate. float4_e2m1fn_x2, with major n only, is a uint8 tensor (m, n / 2, l), the left
    column of two in the low half; it has no NaN, which becomes the largest magnitude.
    """

    tensor: str
    dtype: str
    major: str = "n"
    value: str = "x"


@dataclass(frozen=True)
class MultiplyColumn:
    """x[m, n] = x[m, n] * v[m], ``v`` of the shape (m, 1, l), float32."""

    tensor: str = "prob"


@dataclass(frozen=True)
class AddRow:
    """x[m, n] = x[m, n] + v[n], ``v`` of the shape (n, l), of any float type; l is the batch, or the expert."""

    tensor: str
    dtype: str


@dataclass(frozen=True)
class Swiglu:
    """Of every 64 columns, 32 gates and 32 others make 32 columns: x = other * gate * sigmoid(gate)."""

    gate_first: bool = False


@dataclass(frozen=True)
class SquaredRelu:
    """x = relu(x)^2."""


@dataclass(frozen=True)
class SquaredReluBackward:
    """x = 2 relu(x) c, and the value ``prob_gradient`` = relu(x)^2 c, for a value ``c``."""

    gradient: str = "c"


@dataclass(frozen=True)
class Amax:
    """a[i] = max(a[i], |x|), before rounding; NaN where a value is. i is 0, or the expert.

    The caller fills ``a``, float32, with -inf or with 0.
    """

    tensor: str = "amax"
    by_expert: bool = False


@dataclass(frozen=True)
class SumRow:
    """s[m] += the sum of a value over the columns; ``s`` of the shape (m, 1, l), float32. The order is not fixed."""

    tensor: str
    value: str


@dataclass(frozen=True)
class QuantizeRows:
    """Divides every ``vector`` columns by a common scale factor, and writes the factors.

        s = max |x| / limit * norm_const, rounded to ``scale_dtype``: up, to a power of two, for float8_e8m0fnu
        x = x * min(norm_const / s, largest float32), or 0 where s is 0

    ``limit`` is that of ``dtype``, which the values will be rounded to. e8m0's factors lie between 2^-127 and 2^127,
    e4m3's are at most 448; NaN among the values makes their factor NaN. The factors have the layout of 128 x 4 atoms,
    (32, 4, ceil(m / 128), 4, ceil(n / vector / 4), l); those of rows and columns beyond the tensor become 0 or stay.
    norm_const is a float32 tensor (1,), positive.
    """

    tensor: str
    dtype: str
    scale_dtype: str
    vector: int
    norm_const: str = "norm_const"


@dataclass(frozen=True)
class QuantizeColumns:
    """As :class:`QuantizeRows` for every 32 rows of a column, into the value ``columns``; x stays.

    The last rows may be fewer. The factors' atoms have columns for rows and groups of 32 rows for columns:
    (32, 4, ceil(n / 128), 4, ceil(m / 128), l).
    """

    tensor: str
    dtype: str
    scale_dtype: str
    value: str = "columns"
    norm_const: str = "norm_const"
