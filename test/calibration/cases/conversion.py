"""cvt between every pair of types, with every rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.case import Case, Tolerance, elementwise, floats, title, words
from ptx_emulator.numerics import Array

COUNT = 256
_OUT: dict[str, Any] = {"8": np.uint32, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_WIDTH = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "tf32": 32}


def _bits(ptx_type: str) -> int:
    return _WIDTH.get(ptx_type) or int(ptx_type[1:])


def _edges(source: str, seed: str) -> Array:
    """Floats around the limits of the integer types and half-way between integers, after the special ones."""
    found = floats(seed, COUNT, 34, 0, source)
    if source in ("f32", "f64"):
        edges = [
            0.5,
            1.5,
            2.5,
            -0.5,
            -1.5,
            -2.5,
            0.49999997,
            127.5,
            128.0,
            255.5,
            256.0,
            -128.5,
            -129.0,
            32767.5,
            32768.0,
            65535.5,
            65536.0,
            -32769.0,
            2147483520.0,
            2147483648.0,
            4294967040.0,
            4294967296.0,
            -2147483648.0,
            -2147483904.0,
            9.223371e18,
            9.223372036854775808e18,
            1.8446742e19,
            1.8446744073709552e19,
            -9.3e18,
            -1.0,
        ]
        dtype = np.float32 if source == "f32" else np.float64
        found[70 : 70 + len(edges)] = np.array(edges, dtype).view(found.dtype)
    return found


def _range(ptx_type: str) -> tuple[int, int]:
    bits = int(ptx_type[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if ptx_type[0] == "s" else (0, (1 << bits) - 1)


def integers_and_floats() -> list[Case]:
    cases_ = []
    integers = ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
    for source in ("f32", "f16", "f64", "bf16"):
        for to in integers:
            if source == "bf16" and to[1:] == "8":
                continue
            for way in ("rni", "rzi", "rmi", "rpi") if source == "f32" else ("rni", "rzi"):
                for ftz in ("", ".ftz") if (source, way) == ("f32", "rpi") else ("",):
                    text = f"cvt.{way}{ftz}.{to}.{source} %d, %a;"
                    cases_.append(elementwise("convert", title(text), text, [_edges(source, to)], _OUT[to[1:]]))
    for source in integers:
        bits = _bits(source)
        values = words(f"cvt {source}", COUNT, max(bits, 16))
        for to in ("f32", "f64", "f16", "bf16")[: 3 if bits == 8 else 4]:
            for way in ("rn", "rz", "rm", "rp") if to == "f32" else ("rn",):
                text = f"cvt.{way}.{to}.{source} %d, %a;"
                out = _OUT[str(_bits(to))]
                cases_.append(elementwise("convert", title(text), text, [values], out, Tolerance(to)))
        for to in integers:
            if to == source:
                continue
            (low, high), (least, most) = _range(source), _range(to)
            for sat in ("",) if least <= low and high <= most else ("", ".sat"):
                text = f"cvt{sat}.{to}.{source} %d, %a;"
                cases_.append(elementwise("convert", title(text), text, [values], _OUT[to[1:]]))
    return cases_


def floats_to_floats() -> list[Case]:
    every = np.arange(65536).astype(np.uint16)
    texts = [f"cvt.f32.{k} %d, %a;" for k in ("f16", "bf16")] + ["cvt.f64.f16 %d, %a;", "cvt.ftz.f32.f16 %d, %a;"]
    texts += [f"cvt.{way}.f16.f16 %d, %a;" for way in ("rni", "rzi", "rmi", "rpi")]
    texts += [
        "cvt.rn.bf16.f16 %d, %a;",
        "cvt.rn.f16.bf16 %d, %a;",
        "cvt.rz.f16.bf16 %d, %a;",
        "cvt.sat.f32.f16 %d, %a;",
    ]
    cases_ = []
    for text in texts:
        to = title(text).split(".")[-2]
        cases_.append(elementwise("convert", title(text), text, [every], _OUT[str(_bits(to))], Tolerance(to)))
    texts = [
        f"cvt.{way}{form}.{to}.f32 %d, %a;"
        for to in ("f16", "bf16")
        for way in ("rn", "rz")
        for form in ("", ".relu", ".satfinite", ".relu.satfinite")
    ]
    texts += [f"cvt.{way}.f16.f32 %d, %a;" for way in ("rm", "rp", "rn.ftz", "rn.sat")]
    texts += [f"cvt.{way}.tf32.f32 %d, %a;" for way in ("rna", "rna.satfinite", "rn", "rz", "rn.relu", "rz.relu")]
    texts += [f"cvt.{way}.f32.f32 %d, %a;" for way in ("rni", "rzi", "rmi", "rpi", "sat", "ftz", "rni.sat")]
    texts += ["cvt.f64.f32 %d, %a;"]
    for text in texts:
        to = title(text).split(".")[-2]
        source = floats(title(text), 1024, 18)
        _ties(source, to)
        # The low bits of a tf32 are not part of the format.
        cases_.append(
            elementwise(
                "convert",
                title(text),
                text,
                [source],
                _OUT[str(_bits(to))],
                Tolerance(to, 0) if to != "tf32" else Tolerance("f32"),
            )
        )
    for way in ("rn", "rz", "rm", "rp"):
        text = f"cvt.{way}.f32.f64 %d, %a;"
        cases_.append(
            elementwise(
                "convert", title(text), text, [floats("f64", COUNT, 140, 0, "f64")], np.uint32, Tolerance("f32")
            )
        )
    return cases_


def _ties(source: Array, to: str) -> None:
    """Makes a part of the f32 bits lie half-way between two numbers of the narrower type."""
    kept = {"f16": 10, "bf16": 7, "tf32": 10, "e4m3": 3, "e5m2": 2}.get(to)
    if kept is not None:
        shift = 23 - kept
        some = source[256:768]
        some[...] = some >> np.uint32(shift) << np.uint32(shift) | np.uint32(1 << (shift - 1))
        some[::4] += np.uint32(1)
        some[1::4] -= np.uint32(1)


def pairs() -> list[Case]:
    cases_ = []
    for to in ("f16x2", "bf16x2"):
        for way in ("rn", "rz", "rn.relu", "rz.relu", "rn.satfinite", "rn.relu.satfinite"):
            text = f"cvt.{way}.{to}.f32 %d, %a, %b;"
            sources = [floats(title(text), COUNT, 20, i) for i in (0, 1)]
            cases_.append(elementwise("convert", title(text), text, sources, np.uint32, Tolerance(to[:-2])))
    for to in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            name = f"cvt.rn.satfinite{relu}.{to}.f32"
            sources = [floats(name, 1024, 14, i) for i in (0, 1)]
            for source in sources:
                _ties(source, to[:-2])
            cases_.append(elementwise("convert", name, f"{name} %d, %a, %b;", sources, np.uint16))
            name = f"cvt.rn.satfinite{relu}.{to}.f16x2"
            every = np.arange(65536).astype(np.uint32)
            both = every | (every[::-1] << np.uint32(16))
            cases_.append(elementwise("convert", name, f"{name} %d, %a;", [both], np.uint16))
            name = f"cvt.rn{relu}.f16x2.{to}"
            codes = np.arange(256).astype(np.uint16)
            both = codes | codes[::-1] << np.uint16(8)
            cases_.append(elementwise("convert", name, f"{name} %d, %a;", [both], np.uint32, Tolerance("f16")))
    return cases_


def moves() -> list[Case]:
    """mov that splits and joins registers."""
    code = """mov.b32 {%h1, %h2}, %a; mov.b64 %rd63, {%a, %b}; mov.b64 {%r1, %r2}, %rd63; mov.b32 %r3, {%h2, %h1};
      mov.b64 %rd61, {%h1, %h2, %h2, %h1}; xor.b32 %r1, %r1, %r3; mov.b64 %rd62, {%r1, %r2};
      xor.b64 %d, %rd61, %rd62;"""
    return [elementwise("convert", "mov", code, [words("mov", COUNT, 32, i) for i in (0, 1)], np.uint64)]


def cases() -> list[Case]:
    return integers_and_floats() + floats_to_floats() + pairs() + moves()
