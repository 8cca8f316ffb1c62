"""ldmatrix, stmatrix and mma.sync."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.case import (
    Case,
    Tolerance,
    floats,
    integers,
    load_words,
    raw,
    registers,
    store_words,
)
from calibration.cases.copies import PLACE, SHARED, dump, fill
from ptx_emulator.numerics import Array

# Codes of small integers, whose products and sums are exact: -3..3 (0..3 for unsigned types).
SMALL: dict[str, list[int]] = {
    "f16": [0xC200, 0xC000, 0xBC00, 0, 0x3C00, 0x4000, 0x4200],
    "bf16": [0xC040, 0xC000, 0xBF80, 0, 0x3F80, 0x4000, 0x4040],
    "tf32": [0xC0400000, 0xC0000000, 0xBF800000, 0, 0x3F800000, 0x40000000, 0x40400000],
    "e4m3": [0xC4, 0xC0, 0xB8, 0, 0x38, 0x40, 0x44],
    "e5m2": [0xC2, 0xC0, 0xBC, 0, 0x3C, 0x40, 0x42],
    "s8": [0xFD, 0xFE, 0xFF, 0, 1, 2, 3],
    "u8": [0, 1, 2, 3],
}
SIZE = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def small(name: str, ptx_type: str, words: int) -> Array:
    """`words` 32-bit words of small integers of a type."""
    codes, size = SMALL[ptx_type], SIZE[ptx_type]
    chosen = integers(f"{name} {ptx_type}", words * 4 // size, 0, len(codes) - 1)
    return np.array(codes, np.uint64)[chosen].astype(_UNSIGNED[size]).view(np.uint32)


def random_operand(name: str, ptx_type: str, words: int) -> Array:
    """`words` 32-bit words of random finite numbers, about 1 in size."""
    size = SIZE[ptx_type]
    if ptx_type in ("s8", "u8"):
        return raw(f"{name} {ptx_type}", words)
    if ptx_type in ("e4m3", "e5m2"):
        codes = raw(f"{name} {ptx_type}", words * 4, 8)
        limit = 0x30 if ptx_type == "e4m3" else 0x38
        return ((codes & np.uint8(0x80)) | (codes & np.uint8(0x7F)) % np.uint8(limit + 0x10)).view(np.uint32)
    bits = raw(f"{name} {ptx_type}", words * 4 // size, 64)
    fraction, bias = {"f16": (10, 15), "bf16": (7, 127), "tf32": (23, 127)}[ptx_type]
    found = (bits & np.uint64((1 << fraction) - 1)) | (bits >> np.uint64(60)) % np.uint64(5) + np.uint64(bias - 4) << (
        np.uint64(fraction)
    )
    return (
        (found | (bits >> np.uint64(59) & np.uint64(1)) << np.uint64(8 * size - 1))
        .astype(_UNSIGNED[size])
        .view(np.uint32)
    )


def loads_and_stores() -> list[Case]:
    cases_ = []
    source = raw("matrices", 256)
    # The rows are permuted: thread t holds row 7 t + 3.
    rows = f"{PLACE} mad.lo.s32 %r5, %r99, 7, 3; and.b32 %r5, %r5, 31; mad.lo.s32 %r5, %r5, 16, %r1;"
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            form = f"m8n8.x{count}{trans}"
            body = f"""{rows} {fill(1024, 0)}
              ldmatrix.sync.aligned.{form}.shared.b16 {registers("%r", 10, count)}, [%r5];
              {store_words("%r", 10, count, 1)}"""
            cases_.append(Case("ldmatrix", form, body, (source,), (np.zeros(32 * count, np.uint32),), shared=SHARED))
            body = f"""{rows} {fill(1024, 0)} {load_words("%r", 10, count, 1)} bar.warp.sync -1;
              stmatrix.sync.aligned.{form}.shared.b16 [%r5], {registers("%r", 10, count)}; bar.warp.sync -1;
              {dump(1024, 2)}"""
            cases_.append(
                Case(
                    "stmatrix",
                    form,
                    body,
                    (source, raw("fragments", 32 * count)),
                    (np.zeros(256, np.uint32),),
                    shared=SHARED,
                )
            )
    blackwell = ("sm_100a",)
    for count in (1, 2):
        form = f"m16n16.x{count}.trans"
        body = f"""{rows} {fill(1024, 0)}
          ldmatrix.sync.aligned.{form}.shared.b8 {registers("%r", 10, 2 * count)}, [%r5];
          {store_words("%r", 10, 2 * count, 1)}"""
        cases_.append(
            Case("ldmatrix", form, body, (source,), (np.zeros(64 * count, np.uint32),), archs=blackwell, shared=SHARED)
        )
    for count in (1, 2, 4):
        form = f"m16n8.x{count}.trans"
        body = f"""{rows} {fill(1024, 0)} {load_words("%r", 10, count, 1)} bar.warp.sync -1;
          stmatrix.sync.aligned.{form}.shared.b8 [%r5], {registers("%r", 10, count)}; bar.warp.sync -1;
          {dump(1024, 2)}"""
        cases_.append(
            Case(
                "stmatrix",
                form,
                body,
                (source, raw("fragments", 32 * count)),
                (np.zeros(256, np.uint32),),
                archs=blackwell,
                shared=SHARED,
            )
        )
    return cases_


def mma(
    shape: str,
    to: str,
    left: str,
    right: str,
    name: str,
    a: Array,
    b: Array,
    c: Array,
    tolerance: Tolerance,
    form: str = "",
    refused: bool = False,
) -> Case:
    """One mma.sync of a warp; fragments come from memory word by word."""
    words = [len(x) // 32 for x in (a, b, c)]
    body = f"""{load_words("%r", 10, words[0], 0)} {load_words("%r", 20, words[1], 1)}
      {load_words("%r", 30, words[2], 2)}
      mma.sync.aligned.{shape}.row.col{form}.{to}.{left}.{right}.{to} {registers("%r", 40, words[2])},
        {registers("%r", 10, words[0])}, {registers("%r", 20, words[1])}, {registers("%r", 30, words[2])};
      {store_words("%r", 40, words[2], 3)}"""
    return Case(
        "mma.sync",
        f"{shape}.{to}.{left}.{right}{form} {name}",
        body,
        (a, b, c),
        (np.zeros(len(c), np.uint32),),
        tolerance,
        refused=refused,
    )


SHAPES = [
    ("m16n8k16", "f32", "f16", "f16"),
    ("m16n8k8", "f32", "f16", "f16"),
    ("m16n8k16", "f16", "f16", "f16"),
    ("m16n8k8", "f16", "f16", "f16"),
    ("m16n8k16", "f32", "bf16", "bf16"),
    ("m16n8k8", "f32", "bf16", "bf16"),
    ("m16n8k8", "f32", "tf32", "tf32"),
    ("m16n8k4", "f32", "tf32", "tf32"),
    ("m16n8k32", "f32", "e4m3", "e4m3"),
    ("m16n8k32", "f32", "e5m2", "e5m2"),
    ("m16n8k32", "f32", "e4m3", "e5m2"),
    ("m16n8k32", "s32", "s8", "s8"),
    ("m16n8k32", "s32", "u8", "u8"),
    ("m16n8k32", "s32", "s8", "u8"),
    ("m16n8k32", "s32", "u8", "s8"),
    ("m16n8k16", "s32", "s8", "s8"),
]


def products() -> list[Case]:
    cases_ = []
    for shape, to, left, right in SHAPES:
        k = int(shape.split("k")[1])
        sizes = [16 * k * SIZE[left] // 4, 8 * k * SIZE[right] // 4, 128 if to != "f16" else 64]
        values = to if to != "s32" else "bits"
        c = {
            "f32": np.arange(-64, 64).astype(np.float32).view(np.uint32),
            "s32": np.arange(-64, 64).astype(np.int32).view(np.uint32),
            "f16": np.arange(-64, 64).astype(np.float16).view(np.uint32),
        }[to]
        seed = f"{shape}{to}"
        cases_.append(
            mma(
                shape,
                to,
                left,
                right,
                "integers",
                small(seed + "a", left, sizes[0]),
                small(seed + "b", right, sizes[1]),
                c,
                Tolerance(values),
            )
        )
        addend = c if to == "s32" else floats(seed, 128, 2, 2, to)[:128].view(np.uint32)
        if to != "s32":
            addend = np.where(np.arange(len(addend)) < 64, c, addend) if to == "f32" else c
        cases_.append(
            mma(
                shape,
                to,
                left,
                right,
                "random",
                random_operand(seed + "a", left, sizes[0]),
                random_operand(seed + "b", right, sizes[1]),
                addend,
                Tolerance(values),
            )
        )
    large = np.full(128, 2**31 - 1000, np.int32).view(np.uint32)
    cases_ += [
        mma(
            "m16n8k32",
            "s32",
            "s8",
            "s8",
            "overflow",
            raw("wide a", 128),
            raw("wide b", 64),
            large,
            Tolerance(),
            form,
            refused=form != "",
        )
        for form in ("", ".satfinite")
    ]
    for ptx_type in ("bf16", "f16"):
        special = floats("mma special", 256, 3, 0, ptx_type).view(np.uint32)[:128]
        other = floats("mma special", 128, 3, 1, ptx_type).view(np.uint32)[:64]
        cases_.append(
            mma(
                "m16n8k16",
                "f32",
                ptx_type,
                ptx_type,
                "special",
                special,
                other,
                np.zeros(128, np.uint32),
                Tolerance("f32"),
            )
        )
    return cases_


def cases() -> list[Case]:
    return loads_and_stores() + products()
