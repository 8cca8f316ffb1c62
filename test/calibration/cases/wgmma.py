"""wgmma: every way an operand can lie in shared memory, every type, on small integers and on random numbers.

Shared memory holds an image of operands in no particular arrangement: where an element lies decides the result.
"""

from __future__ import annotations

import numpy as np

from calibration.case import HOPPER, Case, Tolerance, load_words, registers
from calibration.cases.copies import fill
from calibration.cases.matrices import SIZE, random_operand, small
from ptx_emulator.numerics import Array

MODES = {"none": 0, "sw128": 1, "sw64": 2, "sw32": 3}
SPAN = {"none": 16, "sw128": 128, "sw64": 64, "sw32": 32}
A_BYTES, B_BYTES = 16384, 16384


def _descriptor(mode: str, leading: int, stride: int) -> int:
    return (leading >> 4) << 16 | (stride >> 4) << 32 | MODES[mode] << 62


def _strides(mode: str, k_major: bool, extent: int) -> tuple[int, int]:
    """Leading and stride byte offsets of a dense operand of `extent` rows (or columns)."""
    if k_major:
        return (8 * extent * 2, 128) if mode == "none" else (16, 8 * SPAN[mode])
    if mode == "none":
        return 16 * extent, 128
    return 8 * SPAN[mode] * 2, 8 * SPAN[mode]


def multiply(
    name: str,
    ptx_types: tuple[str, str, str],
    n: int,
    image: tuple[Array, Array],
    *,
    mode: tuple[str, str] = ("none", "none"),
    majors: str = "kk",
    in_registers: bool = False,
    scale_d: str = "p",
    signs: tuple[int, int] = (1, 1),
    steps: int = 1,
    advance: tuple[int, int] = (0, 0),
    addend: Array | None = None,
) -> Case:
    """D = A B + D for 64 x n; `majors` says whether A and B are K-major ("k") or not ("m"). `steps` multiplications in
    a row, whose descriptors advance by `advance` bytes."""
    to, left, right = ptx_types
    k = 32 // max(SIZE[left], 1)
    count = n // 2 if to != "f16" else n // 4
    lines = [
        "mov.u32 %r1, image; setp.eq.s32 %p5, 0, 0; setp.ne.s32 %p6, 0, 0;",
        fill(A_BYTES, 0, 128),
        f"add.s32 %r2, %r1, {A_BYTES};",
        fill(B_BYTES, 1, 128, "%r2"),
        load_words("%r", 100, count, 2),
    ]
    if in_registers:
        lines.append(load_words("%r", 10, 4, 0))
    for operand, register in ((0, "%r1"), (1, "%r2")):
        strides = _strides(mode[operand], majors[operand] == "k", 64 if operand == 0 else n)
        place = f"%rd{10 + operand}"
        lines.append(
            f"and.b32 %r3, {register}, 0x3FFFF; shr.u32 %r3, %r3, 4; cvt.u64.u32 {place}, %r3; "
            f"or.b64 {place}, {place}, {_descriptor(mode[operand], *strides)};"
        )
    lines.append("wgmma.fence.sync.aligned;")
    transposed = f", {int(majors[0] != 'k')}, {int(majors[1] != 'k')}"
    if in_registers:
        transposed = f", {int(majors[1] != 'k')}"
    for step in range(steps):
        a = registers("%r", 10, 4) if in_registers else "%rd10"
        predicate = {"p": "%p5", "p0": "%p6"}[scale_d]
        rest = "" if to == "s32" else f", {signs[0]}, {signs[1]}" + (transposed if left in ("f16", "bf16") else "")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{to}.{left}.{right} {registers('%r', 100, count)}, "
            f"{a}, %rd11, {predicate}{rest};"
        )
        if step + 1 < steps:
            lines += [f"add.s64 %rd{10 + i}, %rd{10 + i}, {advance[i] >> 4};" for i in (0, 1)]
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    # Register i goes to row i, so that neighbouring threads write neighbouring words.
    lines.append("mul.wide.u32 %rd70, %r99, 4; add.s64 %rd70, %rd70, %rd3;")
    lines += [f"st.global.b32 [%rd70+{512 * i}], %r{100 + i};" for i in range(count)]
    if addend is None:
        width = {"f32": np.float32, "s32": np.int32, "f16": np.float16}[to]
        addend = (np.arange(128 * count * (2 if to == "f16" else 1)) % 61 - 30).astype(width).view(np.uint32)
    shared = f".shared .align 1024 .b8 image[{A_BYTES + B_BYTES}];"
    return Case(
        "wgmma",
        f"{left}{'' if left == right else '.' + right}.{to} {name}",
        "\n".join(lines),
        (*image, addend),
        (np.zeros(128 * count, np.uint32),),
        Tolerance("bits" if to == "s32" else to),
        archs=HOPPER,
        block=128,
        shared=shared,
    )


def images(left: str, right: str) -> tuple[Array, Array]:
    return small("image a", left, A_BYTES // 4), small("image b", right, B_BYTES // 4)


def layouts() -> list[Case]:
    cases_ = []
    for ptx_type, to in (("bf16", "f32"), ("f16", "f32")):
        for majors in ("kk", "mk", "km", "mm"):
            for mode in MODES:
                # An MN-major operand of a swizzle wider than B's columns: N must fill the swizzle's row.
                n = 16 if majors[1] == "k" else max(16, SPAN[mode] // 2)
                cases_.append(
                    multiply(
                        f"{majors} {mode}",
                        (to, ptx_type, ptx_type),
                        n,
                        images(ptx_type, ptx_type),
                        mode=(mode, mode),
                        majors=majors,
                    )
                )
    cases_.append(
        multiply(
            "km sw128 n96", ("f32", "bf16", "bf16"), 192, images("bf16", "bf16"), mode=("sw64", "sw128"), majors="km"
        )
    )
    for ptx_types in (
        ("f32", "tf32", "tf32"),
        ("f32", "e4m3", "e4m3"),
        ("f32", "e5m2", "e5m2"),
        ("f32", "e4m3", "e5m2"),
        ("f32", "e5m2", "e4m3"),
        ("s32", "s8", "s8"),
        ("s32", "u8", "u8"),
        ("s32", "s8", "u8"),
        ("s32", "u8", "s8"),
    ):
        cases_ += [multiply(f"kk {mode}", ptx_types, 16, images(*ptx_types[1:]), mode=(mode, mode)) for mode in MODES]
    cases_ += [
        multiply("kk sw64", ("f16", ptx_type, ptx_type), 32, images(ptx_type, ptx_type), mode=("sw64", "sw64"))
        for ptx_type in ("f16", "e4m3", "e5m2")
    ]
    return cases_


def variants() -> list[Case]:
    cases_ = []
    for ptx_type in ("bf16", "tf32", "e4m3", "s8"):
        to = "s32" if ptx_type == "s8" else "f32"
        pair = images(ptx_type, ptx_type)
        sizes = (8, 16, 24, 64, 128, 256)
        cases_ += [multiply(f"n{n}", (to, ptx_type, ptx_type), n, pair, mode=("sw32", "sw32")) for n in sizes]
        cases_.append(
            multiply("registers", (to, ptx_type, ptx_type), 32, pair, mode=("none", "sw128"), in_registers=True)
        )
        cases_.append(multiply("no addend", (to, ptx_type, ptx_type), 16, pair, scale_d="p0", mode=("sw32", "sw32")))
        cases_.append(
            multiply(
                "four steps", (to, ptx_type, ptx_type), 16, pair, mode=("sw128", "sw128"), steps=4, advance=(32, 32)
            )
        )
        if ptx_type in ("bf16", "tf32", "e4m3"):
            cases_ += [
                multiply(
                    f"signs {signs[0]} {signs[1]}",
                    (to, ptx_type, ptx_type),
                    16,
                    pair,
                    signs=signs,
                    mode=("sw64", "sw64"),
                )
                for signs in ((-1, 1), (1, -1), (-1, -1))
            ]
    pair = images("f16", "f16")
    cases_.append(
        multiply(
            "registers mm", ("f32", "f16", "f16"), 64, pair, mode=("none", "sw128"), majors="km", in_registers=True
        )
    )
    cases_.append(
        multiply(
            "four steps registers",
            ("f32", "f16", "f16"),
            32,
            pair,
            mode=("none", "sw128"),
            steps=4,
            advance=(0, 32),
            in_registers=True,
        )
    )
    cases_.append(multiply("f16 no addend", ("f16", "f16", "f16"), 64, pair, mode=("sw32", "sw32"), scale_d="p0"))
    return cases_


def random_data() -> list[Case]:
    """Sums that are not exact: their bits show how the chip forms them."""
    cases_ = []
    forms = [("f32", ptx_type, steps) for ptx_type in ("bf16", "f16", "tf32", "e4m3", "e5m2") for steps in (1, 4)]
    forms += [("f16", "f16", 4), ("f16", "e4m3", 4), ("f16", "e5m2", 4), ("s32", "s8", 4), ("s32", "u8", 4)]
    for to, ptx_type, steps in forms:
        pair = (random_operand("image a", ptx_type, A_BYTES // 4), random_operand("image b", ptx_type, B_BYTES // 4))
        n, addend = (16, np.zeros(128 * 8, np.uint32)) if to == "f32" else (32, None)
        cases_.append(
            multiply(
                f"random {steps}",
                (to, ptx_type, ptx_type),
                n,
                pair,
                mode=("sw128", "sw128"),
                steps=steps,
                advance=(32, 32),
                addend=addend,
            )
        )
    return cases_


def subnormal() -> list[Case]:
    """Operands of A below the normal range: what their exponents count as decides what is cut off."""
    cases_ = []
    for ptx_type, mask in (("f16", 0x83FF83FF), ("bf16", 0x807F807F), ("e4m3", 0x87878787), ("e5m2", 0x83838383)):
        a = random_operand("image a", ptx_type, A_BYTES // 4) & np.uint32(mask)
        b = random_operand("image b", ptx_type, B_BYTES // 4)
        cases_.append(
            multiply("subnormal", ("f32", ptx_type, ptx_type), 16, (a, b), mode=("sw128", "sw128"), scale_d="p0")
        )
    return cases_


def cases() -> list[Case]:
    return layouts() + variants() + random_data() + subnormal()
