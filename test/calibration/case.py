"""A microkernel: its PTX, its buffers, and the tolerance between the outputs of two machines."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.maps import Map
from ptx_emulator.numerics import Array

GENERAL = ("sm_90a", "sm_100a")
HOPPER = ("sm_90a",)

_PREFIX = {2: "%h", 4: "%r", 8: "%rd"}
FLOATS: dict[str, Any] = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}


@dataclass(frozen=True)
class Tolerance:
    """`kind` "bits": equal bytes. A float type: any NaN equals any other, and numbers may differ by `ulps` units in the
    last place or by `absolute`, whichever is more."""

    kind: str = "bits"
    ulps: int = 0
    absolute: float = 0.0

    def __str__(self) -> str:
        if self.kind == "bits" or not (self.ulps or self.absolute):
            return self.kind if self.kind == "bits" else f"{self.kind} values"
        parts = [f"{self.ulps} ulps"] if self.ulps else []
        return f"{self.kind}: " + " or ".join(parts + ([f"{self.absolute:.3g}"] if self.absolute else []))


BITS = Tolerance()


@dataclass(frozen=True, eq=False)
class Case:
    """One launch. Parameters are the addresses of `inputs`, then of `outputs` (whose arrays are the contents before the
    launch), then the tensor maps. `refused`: the emulator raises UnsupportedPTX."""

    family: str
    name: str
    body: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    tolerance: Tolerance = BITS
    archs: tuple[str, ...] = GENERAL
    grid: int = 1
    block: int = 32
    cluster: int = 1
    shared: str = ""
    maps: tuple[Map, ...] = ()
    refused: bool = False

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"

    def text(self, arch: str) -> str:
        """The PTX module, with the entry `k`."""
        buffers = len(self.inputs) + len(self.outputs)
        declared = [f"  .param .b64 p{i}" for i in range(buffers)]
        declared += [f"  .param .align 128 .b8 m{i}[128]" for i in range(len(self.maps))]
        loads = [f"  ld.param.b64 %rd{i}, [p{i}];" for i in range(buffers)]
        loads += [
            f"  mov.b64 %rd{80 + i}, m{i};\n  cvta.param.u64 %rd{80 + i}, %rd{80 + i};" for i in range(len(self.maps))
        ]
        numbers: dict[str, int] = {"%h": 0, "%r": 99, "%rd": 89, "%f": 0, "%p": 0}
        for prefix, number in re.findall(r"(%(?:rd|[hrfp]))(\d+)", self.body):
            numbers[prefix] = max(numbers[prefix], int(number))
        types = {"%h": "b16", "%r": "b32", "%rd": "b64", "%f": "f32", "%p": "pred"}
        registers = "\n".join(f"  .reg .{types[p]} {p}<{n + 1}>;" for p, n in numbers.items())
        return (
            f".version 8.8\n.target {arch}\n.address_size 64\n.visible .entry k(\n" + ",\n".join(declared) + "\n)\n{\n"
            f"{registers}\n  {self.shared}\n"
            + "\n".join(loads)
            + f"\n  mov.u32 %r99, %tid.x;\n{self.body}\n  ret;\n}}\n"
        )

    def fingerprint(self, arch: str) -> str:
        """Changes with anything that could change the results; not with how the PTX is broken into lines."""
        text = " ".join(self.text(arch).split())
        state = hashlib.sha256(f"{text}{self.grid}{self.block}{self.cluster}{self.maps}".encode())
        for array in (*self.inputs, *self.outputs):
            state.update(array.tobytes())
        return state.hexdigest()[:16]


# -- inputs
def raw(name: str, count: int, bits: int = 32) -> Array:
    """Random words, the same ones for the same name everywhere."""
    generator = np.random.PCG64(zlib.crc32(name.encode()))
    words = np.atleast_1d(np.asarray(generator.random_raw(count), np.uint64))
    dtype: Any = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]
    return (words >> np.uint64(64 - bits)).astype(dtype)


def integers(name: str, count: int, low: int, high: int) -> Array:
    """int64 of low..high."""
    return (raw(name, count).astype(np.uint64) * np.uint64(high - low + 1) >> np.uint64(32)).astype(np.int64) + low


def pattern(items: Sequence[Any], count: int, stride: int, dtype: Any) -> Array:
    """Each item `stride` times in a row, repeated to `count`: two patterns of different strides meet in every pair."""
    return np.resize(np.repeat(np.array(items, dtype), stride), count)


def words(name: str, count: int, bits: int = 32, operand_index: int = 0) -> Array:
    """Random words after every pair of extreme ones; `operand_index` is the position of the operand."""
    special = [
        0,
        1,
        2,
        (1 << bits) - 1,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
        (1 << (bits - 1)) + 1,
        0x55 << bits - 8,
    ]
    values = raw(f"{name} {operand_index}", max(count, 64), bits)
    values[:64] = pattern(special, 64, 8**operand_index if operand_index < 2 else 3, values.dtype)
    return values[:count].copy()


def floats(name: str, count: int, exponents: int = 12, operand_index: int = 0, float_type: str = "f32") -> Array:
    """The bits of random floats with exponents of up to +-`exponents`, after every pair of special values."""
    bits, fraction = {"f32": (32, 23), "f16": (16, 10), "bf16": (16, 7), "f64": (64, 52)}[float_type]
    random_bits = raw(f"{name} {operand_index} {float_type}", max(count, 68), 64)
    bias = (1 << (bits - fraction - 2)) - 1
    span = min(exponents, bias - 1)
    exponent = bias - span + (random_bits >> np.uint64(40)) % np.uint64(2 * span + 1)
    values = (random_bits & np.uint64((1 << fraction) - 1)) | exponent << np.uint64(fraction)
    values |= (random_bits >> np.uint64(63)) << np.uint64(bits - 1)
    sign, one, infinity = 1 << (bits - 1), bias << fraction, (2 * bias + 1) << fraction
    special = [0, sign, one, infinity, infinity | sign, infinity | 1 << (fraction - 1), 1, infinity - 1]
    values[:64] = pattern(special, 64, 8**operand_index if operand_index < 2 else 3, np.uint64)
    values[64:68] = [sign | 1, (1 << fraction) - 1, 1 << fraction, one | sign]
    return values[:count].astype(FLOATS[float_type])


# -- kernels
def elementwise(
    family: str, name: str, code: str, sources: Sequence[Array], out: Any, tolerance: Tolerance = BITS, **options: Any
) -> Case:
    """One thread per element: `code` has %a, %b, %c for the sources and %d for the result, a register of its width."""
    count, width = len(sources[0]), np.dtype(out).itemsize
    lines = ["mov.u32 %r98, %ctaid.x; mov.u32 %r97, %ntid.x; mad.lo.s32 %r98, %r98, %r97, %r99;"]
    for index, source in enumerate(sources):
        size = source.itemsize
        lines.append(f"mul.wide.u32 %rd88, %r98, {size}; add.s64 %rd88, %rd88, %rd{index};")
        lines.append(f"ld.global.b{8 * size} {_PREFIX[size]}{70 + index}, [%rd88];")
        code = code.replace(f"%{'abc'[index]}", f"{_PREFIX[size]}{70 + index}")
    lines.append(re.sub(r"%d(?!\w)", f"{_PREFIX[width]}60", code))
    lines.append(f"mul.wide.u32 %rd88, %r98, {width}; add.s64 %rd88, %rd88, %rd{len(sources)};")
    lines.append(f"st.global.b{8 * width} [%rd88], {_PREFIX[width]}60;")
    block = 256 if count % 256 == 0 else 128
    return Case(
        family,
        name,
        "\n".join(lines),
        tuple(sources),
        (np.zeros(count, out),),
        tolerance,
        grid=count // block,
        block=block,
        **options,
    )


def title(instruction: str) -> str:
    """The opcode with its modifiers."""
    return instruction.split()[0]


def load_words(register: str, first: int, count: int, buffer: int) -> str:
    """Loads `count` words per thread into `register` first, first + 1, ... from rows of `count` words."""
    lines = [f"mul.wide.u32 %rd88, %r99, {4 * count}; add.s64 %rd88, %rd88, %rd{buffer};"]
    return "\n".join(lines + [f"ld.global.b32 {register}{first + i}, [%rd88+{4 * i}];" for i in range(count)])


def store_words(register: str, first: int, count: int, buffer: int) -> str:
    """The reverse."""
    lines = [f"mul.wide.u32 %rd88, %r99, {4 * count}; add.s64 %rd88, %rd88, %rd{buffer};"]
    return "\n".join(lines + [f"st.global.b32 [%rd88+{4 * i}], {register}{first + i};" for i in range(count)])


def registers(prefix: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{prefix}{first + i}" for i in range(count)) + "}"
