"""Results of a chip, kept in one small file, and comparison with them.

A line of JSON and the bytes it describes, compressed. Outputs above `FULL` bytes are kept as a hash and some of their
elements: enough to see that something differs, and mostly what.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from calibration.case import FLOATS, Tolerance
from ptx_emulator.numerics import Array

FULL, SAMPLES = 8192, 512


def path(arch: str) -> Path:
    """The package's own file for an architecture."""
    return Path(__file__).parent / "golden" / f"{arch}.xz"


class Measured(Protocol):
    """What results are kept of: a `Case`, or a kernel of one's own."""

    @property
    def id(self) -> str: ...

    @property
    def tolerance(self) -> Tolerance: ...

    def fingerprint(self, arch: str) -> str: ...


@dataclass(frozen=True)
class Kept:
    """What is kept of one output: all of it, or every `step`-th element and the hash of the whole."""

    step: int
    values: Array
    digest: str


Outputs = dict[str, tuple[str, list[Kept]]]


@dataclass(frozen=True)
class Golden:
    """`about` names the GPU, the driver and the day; `outputs` by case, with the fingerprint that case had."""

    about: dict[str, str]
    outputs: Outputs


def keep(output: Array) -> Kept:
    output = output.reshape(-1)
    step = 1 if output.nbytes <= FULL else -(-len(output) // SAMPLES) | 1
    return Kept(step, output[::step].copy(), hashlib.sha256(output.tobytes()).hexdigest())


def collect(arch: str, cases: Sequence[Measured], outputs: dict[str, list[Array]]) -> Outputs:
    """What is kept of the cases that have results."""
    done = [case for case in cases if case.id in outputs]
    return {case.id: (case.fingerprint(arch), [keep(x) for x in outputs[case.id]]) for case in done}


def save(file: Path, golden: Golden) -> None:
    index: dict[str, Any] = {}
    blob = bytearray()
    for name, (fingerprint, outputs) in golden.outputs.items():
        rows = [[k.values.dtype.str, len(k.values), k.step, k.digest if k.step > 1 else ""] for k in outputs]
        blob += b"".join(k.values.tobytes() for k in outputs)
        index[name] = [fingerprint, rows]
    head = json.dumps({"about": golden.about, "cases": index}).encode() + b"\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress(head + bytes(blob), preset=9 | lzma.PRESET_EXTREME))


def load(file: Path) -> Golden:
    head, _, blob = lzma.decompress(file.read_bytes()).partition(b"\n")
    described, place = json.loads(head), 0
    outputs: Outputs = {}
    for name, (fingerprint, rows) in described["cases"].items():
        kept = []
        for dtype, count, step, digest in rows:
            values = np.frombuffer(blob, dtype, count, place)
            place += values.nbytes
            kept.append(Kept(step, values, digest))
        outputs[name] = (fingerprint, kept)
    return Golden(described["about"], outputs)


# -- comparison
@dataclass
class Difference:
    """How far two outputs are apart. `wrong`: elements beyond the tolerance; `nan`: NaNs with other bits."""

    elements: int = 0
    unequal: int = 0
    wrong: int = 0
    ulps: int = 0
    absolute: float = 0.0
    nan: int = 0
    first: str = ""

    def add(self, other: Difference) -> None:
        self.elements += other.elements
        self.unequal += other.unequal
        self.wrong += other.wrong
        self.nan += other.nan
        self.ulps, self.absolute = max(self.ulps, other.ulps), max(self.absolute, other.absolute)
        self.first = self.first or other.first

    def __str__(self) -> str:
        text = f"{self.wrong} of {self.elements} elements beyond the tolerance ({self.unequal} unequal"
        if self.ulps:
            text += f", up to {self.ulps} ulps, {self.absolute:.3g}"
        return text + f"); first: {self.first}"


def _number(bits: Array, float_type: str) -> Array:
    if float_type == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[float_type]).astype(np.float64)


def difference(chip: Array, emulated: Array, tolerance: Tolerance) -> Difference:
    """Compares one output of a chip with one of the emulator."""
    a, b = np.ascontiguousarray(chip), np.ascontiguousarray(emulated)
    if tolerance.kind == "bits":
        unequal = a != b
        wrong, result = unequal, Difference(a.size, int(unequal.sum()))
    else:
        dtype = FLOATS[tolerance.kind]
        a, b = a.view(dtype), b.view(dtype)
        with np.errstate(all="ignore"):
            x, y = _number(a, tolerance.kind), _number(b, tolerance.kind)
            both_nan = np.isnan(x) & np.isnan(y)
            unequal = (a != b) & ~both_nan
            distance = np.abs(x - y)
        # Order of the bits as sign and magnitude: neighbours differ by one.
        bits = a.itemsize * 8
        sign = dtype(1 << (bits - 1))
        order = [np.where(v & sign, -(v & ~sign).astype(np.float64), v.astype(np.float64)) for v in (a, b)]
        ulps = np.where(unequal, np.maximum(np.abs(order[0] - order[1]), 1), 0)
        finite = np.isfinite(x) & np.isfinite(y)
        near = (ulps <= tolerance.ulps) | (finite & (distance <= tolerance.absolute) & (tolerance.absolute > 0))
        wrong = unequal & ~near
        measured = unequal & finite
        result = Difference(
            a.size,
            int(unequal.sum()),
            nan=int((both_nan & (a != b)).sum()),
            ulps=int(ulps[measured].max(initial=0)),
            absolute=float(distance[measured].max(initial=0)),
        )
    result.wrong = int(wrong.sum())
    if result.wrong:
        index = int(np.flatnonzero(wrong)[0])
        result.first = f"[{index}] {int(a[index]):#x} on the chip, {int(b[index]):#x} here"
    return result


def compare(case: Measured, expected: Sequence[Kept], outputs: Sequence[Array]) -> Difference:
    """All outputs of a case against what is kept of the chip's."""
    total = Difference()
    for stored, output in zip(expected, outputs, strict=True):
        result = difference(stored.values, output.reshape(-1)[:: stored.step], case.tolerance)
        if stored.step > 1 and case.tolerance.kind == "bits" and not result.wrong:
            digest = hashlib.sha256(output.tobytes()).hexdigest()
            if digest != stored.digest:
                result.wrong, result.first = 1, "hash of the whole output; the elements kept are equal"
        total.add(result)
    return total
