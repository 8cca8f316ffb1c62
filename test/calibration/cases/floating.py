"""Arithmetic and functions on f32, f64, f16, bf16 and packed pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.case import FLOATS, Case, Tolerance, elementwise, floats, title
from ptx_emulator.numerics import Array

COUNT = 384
TWO, THREE = " %d, %a, %b;", " %d, %a, %b, %c;"


def _case(family: str, text: str, ptx_type: str, sources: list[Array], out: Any, **options: Any) -> Case:
    return elementwise(
        family, title(text), text, sources, out, options.pop("tolerance", Tolerance(ptx_type)), **options
    )


def _sources(text: str, ptx_type: str, count: int = COUNT, exponents: int = 12) -> list[Array]:
    operands = 1 + ("%b" in text) + ("%c" in text)
    return [floats(title(text), count, exponents, place, ptx_type) for place in range(operands)]


def single() -> list[Case]:
    texts = [
        f"{op}{way}{ftz}{sat}.f32{TWO}"
        for op in ("add", "mul")
        for way in (".rn", ".rz", ".rm", ".rp")
        for ftz in ("", ".ftz")
        for sat in ("", ".sat")
    ]
    texts += [f"sub{ftz}.f32{TWO}" for ftz in (".rn", ".rn.ftz", ".rn.sat", ".rz")]
    texts += [
        f"fma{way}{ftz}{sat}.f32{THREE}"
        for way in (".rn", ".rz", ".rm", ".rp")
        for ftz in ("", ".ftz")
        for sat in ("", ".sat")
    ]
    texts += [
        f"{op}{form}.f32{TWO}"
        for op in ("min", "max")
        for form in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs")
    ]
    texts += [f"{op}{ftz}.f32 %d, %a;" for op in ("abs", "neg") for ftz in ("", ".ftz")]
    texts += [
        f"copysign.f32{TWO}",
        f"div.rn.f32{TWO}",
        f"div.rn.ftz.f32{TWO}",
        "sqrt.rn.f32 %d, %a;",
        "sqrt.rn.ftz.f32 %d, %a;",
        "rcp.rn.f32 %d, %a;",
        "rcp.rn.ftz.f32 %d, %a;",
        f"div.rz.f32{TWO}",
        "sqrt.rz.f32 %d, %a;",
        "rcp.rp.f32 %d, %a;",
    ]
    # Every float's own exponent range: sums cancel, products overflow and underflow.
    refused = {f"div.rz.f32{TWO}", "sqrt.rz.f32 %d, %a;", "rcp.rp.f32 %d, %a;"}
    return [
        _case(
            "f32",
            text,
            "f32",
            _sources(text, "f32", exponents=70 if text[0] in "mf" else 12),
            np.uint32,
            refused=text in refused,
        )
        for text in texts
    ]


# As seen on an H200. PTX ISA states bounds for these functions, not bits.
FUNCTIONS: dict[str, Tolerance] = {
    f"{name}.approx{ftz}.f32": tolerance
    for name, tolerance in {
        "ex2": Tolerance("f32", 2),
        "rcp": Tolerance("f32", 1),
        "rsqrt": Tolerance("f32", 2),
        "sqrt": Tolerance("f32", 1),
        "lg2": Tolerance("f32", 2, 2.0**-22),
    }.items()
    for ftz in ("", ".ftz")
}
FUNCTIONS |= {
    "tanh.approx.f32": Tolerance("f32", 128),
    "sin.approx.f32": Tolerance("f32", 2, 2.0**-20),
    "cos.approx.f32": Tolerance("f32", 2, 2.0**-20),
}


def functions() -> list[Case]:
    cases_ = []
    for name, tolerance in FUNCTIONS.items():
        wide = {"ex2": 7, "tan": 5, "sin": 1, "cos": 1}.get(name[:3], 120)
        source = floats(name, 1024, wide)
        if wide == 1:  # within +-2 pi, beyond which the error is not bounded
            angle = source.view(np.float32)
            angle[68:] *= np.float32(1.5)
            angle[np.isfinite(angle) & (np.abs(angle) > 6.2)] = 6.2
        cases_.append(_case("functions", f"{name} %d, %a;", "f32", [source], np.uint32, tolerance=tolerance))
    cases_ += [
        _case(
            "functions", name + TWO, "f32", _sources(name + TWO, "f32", 1024), np.uint32, tolerance=Tolerance("f32", 2)
        )
        for name in ("div.approx.f32", "div.full.f32", "div.approx.ftz.f32", "div.full.ftz.f32")
    ]
    every = np.arange(65536).astype(np.uint16)
    for name in ("ex2.approx.f16", "tanh.approx.f16", "ex2.approx.ftz.bf16", "tanh.approx.bf16"):
        ptx_type = name.rsplit(".", 1)[1]
        cases_.append(
            _case("functions", f"{name} %d, %a;", ptx_type, [every], np.uint16, tolerance=Tolerance(ptx_type, 1))
        )
    for name in ("ex2.approx.f16x2", "tanh.approx.bf16x2"):
        ptx_type = name.rsplit(".", 1)[1].removesuffix("x2")
        cases_.append(
            _case(
                "functions",
                f"{name} %d, %a;",
                ptx_type,
                [floats(name, 1024, 3, 0, ptx_type).view(np.uint32)],
                np.uint32,
                tolerance=Tolerance(ptx_type, 1),
            )
        )
    return cases_


def double() -> list[Case]:
    texts = [f"{op}.rn.f64{TWO}" for op in ("add", "sub", "mul", "div")] + [f"{op}.f64{TWO}" for op in ("min", "max")]
    texts += [f"fma.rn.f64{THREE}", "sqrt.rn.f64 %d, %a;", "rcp.rn.f64 %d, %a;", "abs.f64 %d, %a;", "neg.f64 %d, %a;"]
    return [_case("f64", text, "f64", _sources(text, "f64"), np.uint64) for text in texts]


def halves() -> list[Case]:
    cases_ = []
    for ptx_type in ("f16", "bf16"):
        texts = [f"{op}.rn.TYPE{TWO}" for op in ("add", "sub", "mul")] + [
            f"fma.rn{r}.TYPE{THREE}" for r in ("", ".relu")
        ]
        texts += [f"{op}{form}.TYPE{TWO}" for op in ("min", "max") for form in ("", ".NaN", ".xorsign.abs")]
        texts += [f"{op}.TYPE %d, %a;" for op in ("abs", "neg")]
        if ptx_type == "f16":
            texts += [f"{op}.rn.{form}.TYPE{TWO}" for op in ("add", "sub", "mul") for form in ("ftz", "sat", "ftz.sat")]
            texts += [f"fma.rn.{form}.TYPE{THREE}" for form in ("ftz", "sat", "ftz.relu")]
            texts += [f"{op}.ftz.TYPE{TWO}" for op in ("min", "max")]
        for text in texts:
            scalar = text.replace("TYPE", ptx_type)
            refused = any(form in text for form in ("ftz", "sat", "xorsign"))
            cases_.append(
                _case("half", scalar, ptx_type, _sources(scalar, ptx_type, 512, 8), np.uint16, refused=refused)
            )
            packed = text.replace("TYPE", ptx_type + "x2")
            sources = [s.view(np.uint32) for s in _sources(packed, ptx_type, 512, 8)]
            cases_.append(_case("half", packed, ptx_type, sources, np.uint32, refused=refused))
        every = np.arange(65536).astype(np.uint16)
        other = (every * np.uint16(40503)).astype(np.uint16)
        cases_ += [
            elementwise(
                "half", "all inputs " + title(text), text, [every, other], FLOATS[ptx_type], Tolerance(ptx_type)
            )
            for text in (f"add.rn.{ptx_type}{TWO}", f"mul.rn.{ptx_type}{TWO}", f"max.{ptx_type}{TWO}")
        ]
    return cases_


def cases() -> list[Case]:
    return single() + double() + functions() + halves()
