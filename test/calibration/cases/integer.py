"""Integer, bit and logic instructions, and atomics on integers and floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.case import (
    BITS,
    Case,
    Tolerance,
    elementwise,
    floats,
    integers,
    raw,
    store_words,
    title,
    words,
)
from ptx_emulator.numerics import Array

COUNT = 256
_DTYPE: dict[int, Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def _types(template: str, ptx_types: str) -> list[str]:
    return [template.replace("TYPE", ptx_type) for ptx_type in ptx_types.split()]


def arithmetic() -> list[Case]:
    two, three = " %d, %a, %b;", " %d, %a, %b, %c;"
    same = "u16 s16 u32 s32 u64 s64"
    texts = [
        *(t for op in ("add", "sub", "mul.lo", "min", "max", "div", "rem") for t in _types(f"{op}.TYPE{two}", same)),
        *_types(f"mul.hi.TYPE{two}", same),
        *_types(f"mad.lo.TYPE{three}", same),
        *(f"{op}.sat.s32{two}" for op in ("add", "sub")),
        *(f"{op}.relu.s32{two}" for op in ("min", "max")),
        *(f"{op}.{k} %d, %a;" for op in ("abs", "neg") for k in ("s16", "s32", "s64")),
        *(t for op in ("and", "or", "xor") for t in _types(f"{op}.TYPE{two}", "b16 b32 b64")),
        *(t for op in ("not", "cnot") for t in _types(f"{op}.TYPE %d, %a;", "b16 b32 b64")),
        *(f"lop3.b32 %d, %a, %b, %c, {table};" for table in (0x96, 0xE8, 0xCA, 0x01, 0xFE, 0x6A)),
        *(f"shf.{way}.{how}.b32{three}" for way in "lr" for how in ("wrap", "clamp")),
        f"prmt.b32{three}",
        *(f"dp4a.{a}.{b}{three}" for a in ("s32", "u32") for b in ("s32", "u32")),
        f"slct.u32.s32{three}",
        f"slct.b32.f32{three}",
        *_types("brev.TYPE %d, %a;", "b32 b64"),
    ]
    cases_ = []
    for text in texts:
        name = title(text)
        bits = int(name.rsplit(".", 1)[1][1:])
        operands = 1 + ("%b" in text) + ("%c" in text)
        sources = [words(name, COUNT, bits, i) for i in range(operands)]
        suffix = "." + text.split()[-1].rstrip(";") if name.startswith("lop3") else ""
        cases_.append(elementwise("integer", name + suffix, text, sources, _DTYPE[bits]))
    return cases_


def _few(name: str, high: int) -> Array:
    """Small numbers, the edges among them: positions, lengths, shift amounts."""
    found = integers(name, COUNT, 0, high).astype(np.uint32)
    found[:8] = [0, 1, 31, 32, 33, 63, 64, 255]
    return found


def mixed_widths() -> list[Case]:
    cases_ = []
    for ptx_type in ("u16", "s16", "u32", "s32"):
        bits = int(ptx_type[1:])
        sources = [words(f"wide {ptx_type}", COUNT, bits, i) for i in (0, 1)]
        cases_.append(
            elementwise(
                "integer", f"mul.wide.{ptx_type}", f"mul.wide.{ptx_type} %d, %a, %b;", sources, _DTYPE[2 * bits]
            )
        )
        cases_.append(
            elementwise(
                "integer",
                f"mad.wide.{ptx_type}",
                f"mad.wide.{ptx_type} %d, %a, %b, %c;",
                [*sources, words("addend", COUNT, 2 * bits, 2)],
                _DTYPE[2 * bits],
            )
        )
    for name in ("shl.b16", "shr.u16", "shr.s16", "shl.b32", "shr.u32", "shr.s32", "shl.b64", "shr.u64", "shr.s64"):
        bits = int(name[-2:])
        cases_.append(
            elementwise(
                "integer", name, f"{name} %d, %a, %b;", [words(name, COUNT, bits), _few(name, 80)], _DTYPE[bits]
            )
        )
    for name in (
        "popc.b32",
        "popc.b64",
        "clz.b32",
        "clz.b64",
        "bfind.u32",
        "bfind.s32",
        "bfind.u64",
        "bfind.s64",
        "bfind.shiftamt.u32",
        "bfind.shiftamt.s32",
    ):
        bits = int(name[-2:])
        source = words(name, COUNT, bits)
        source[100:] >>= np.arange(COUNT - 100).astype(source.dtype) % source.dtype.type(bits)
        cases_.append(elementwise("integer", name, f"{name} %d, %a;", [source], np.uint32))
    for ptx_type in ("u32", "s32", "u64", "s64"):
        bits = int(ptx_type[1:])
        sources = [words(f"bfe {ptx_type}", COUNT, bits), _few("position", 70), _few("length", 40)[::-1].copy()]
        cases_.append(
            elementwise("integer", f"bfe.{ptx_type}", f"bfe.{ptx_type} %d, %a, %b, %c;", sources, _DTYPE[bits])
        )
    for bits in (32, 64):
        code = f"mov.b{bits} %d, 0x5A5A; bfi.b{bits} %d, %a, %d, %b, %c;"
        sources = [words("bfi", COUNT, bits), _few("place", 70), _few("extent", 40)[::-1].copy()]
        cases_.append(elementwise("integer", f"bfi.b{bits}", code, sources, _DTYPE[bits]))
    return cases_


def predicates() -> list[Case]:
    cases_ = []
    for ptx_type in ("s16", "u16", "s32", "u32", "s64", "u64"):
        sources = [words(f"setp {ptx_type}", COUNT, int(ptx_type[1:]), i) for i in (0, 1)]
        tests = ["eq", "ne", "lt", "le", "gt", "ge"] + (["lo", "ls", "hi", "hs"] if ptx_type[0] == "u" else [])
        cases_.append(_tests(f"setp.{ptx_type}", ptx_type, tests, sources))
    floating = ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
    for ptx_type in ("f32", "f64", "f16", "bf16"):
        sources = [floats("setp", COUNT, 2, i, ptx_type) for i in (0, 1)]
        cases_.append(_tests(f"setp.{ptx_type}", ptx_type, floating, sources))
    cases_.append(_tests("setp.ftz.f32", "ftz.f32", ["eq", "lt"], [floats("setp", COUNT, 2, i) for i in (0, 1)]))
    code = """setp.lt.s32 %p2, %a, 0; setp.gt.and.s32 %p3|%p4, %a, %b, %p2; setp.eq.or.s32 %p5|%p6, %a, %b, %p2;
      selp.b32 %d, 1, 0, %p3; selp.b32 %r1, 2, 0, %p4; or.b32 %d, %d, %r1; selp.b32 %r1, 4, 0, %p5; or.b32 %d, %d, %r1;
      selp.b32 %r1, 8, 0, %p6; or.b32 %d, %d, %r1; xor.pred %p7, %p3, %p5; not.pred %p8, %p7; and.pred %p7, %p8, %p2;
      selp.b32 %r1, 16, 0, %p7; or.b32 %d, %d, %r1;"""
    cases_.append(elementwise("integer", "setp.and.or", code, [words("both", COUNT, 32, i) for i in (0, 1)], np.uint32))
    return cases_


def _tests(name: str, ptx_type: str, tests: list[str], sources: list[Array]) -> Case:
    """One bit of the result per comparison."""
    lines = ["mov.b32 %d, 0;"]
    for index, test in enumerate(tests):
        lines.append(f"setp.{test}.{ptx_type} %p1, %a, %b; selp.b32 %r1, {1 << index}, 0, %p1; or.b32 %d, %d, %r1;")
    return elementwise("integer", name, " ".join(lines), sources, np.uint32)


# -- atomics
def own_cells(op: str, ptx_type: str, space: str) -> Case:
    """Each thread has its own cell: the old value and the new one are both known."""
    bits = {"f16x2": 32, "bf16x2": 32, "f16": 16, "bf16": 16}.get(ptx_type) or int(ptx_type[1:])
    wide, tolerance = _DTYPE[bits], BITS
    if ptx_type[0] in "fb" and ptx_type not in ("b32", "b64"):
        scalar = ptx_type.removesuffix("x2")
        cells, values = (
            floats(f"atom {ptx_type}", 256 * (2 if ptx_type.endswith("x2") else 1), 2, i, scalar).view(wide)
            for i in (0, 1)
        )
        tolerance = Tolerance(scalar)
    else:
        cells, values = (words(f"atom {ptx_type}", 256, bits, i) for i in (0, 1))
    register = {16: "%h", 32: "%r", 64: "%rd"}[bits]
    size = bits // 8
    name = f"{op}{'.noftz' if ptx_type in ('f16', 'bf16', 'f16x2', 'bf16x2') else ''}.{ptx_type}"
    extra = f", {register}11" if op == "cas" else ""
    address, move, back = "[%rd71]", "", ""
    shared = ""
    if space == "shared":
        shared, address = ".shared .align 16 .b8 buffer[2048];", "[%r51]"
        move = f"""mov.u32 %r51, buffer; mad.lo.s32 %r51, %r99, {size}, %r51; ld.global.b{bits} {register}13, [%rd71];
          st.shared.b{bits} [%r51], {register}13;"""
        back = f"ld.shared.b{bits} {register}13, [%r51]; st.global.b{bits} [%rd71], {register}13;"
    body = f"""mul.wide.u32 %rd70, %r99, {size}; add.s64 %rd71, %rd70, %rd1; add.s64 %rd72, %rd70, %rd2;
      add.s64 %rd70, %rd70, %rd0; ld.global.b{bits} {register}10, [%rd70]; mov.b{bits} {register}11, {register}10;
      {move} atom.{space}.{name} {register}12, {address}, {register}10{extra}; {back}
      st.global.b{bits} [%rd72], {register}12;"""
    return Case(
        "atomic", f"{space}.{name}", body, (values,), (cells, np.zeros(256, wide)), tolerance, block=256, shared=shared
    )


def one_cell(op: str, ptx_type: str, start: Any, value: str) -> Case:
    """All threads of two blocks meet in one cell; the result does not depend on their order."""
    register = "%rd" if ptx_type[1:] == "64" else "%f" if ptx_type == "f32" else "%r"
    body = f"""mov.u32 %r1, %ctaid.x; mad.lo.s32 %r1, %r1, 128, %r99; {value}
      red.relaxed.gpu.global.{op}.{ptx_type} [%rd0], {register}10;"""
    return Case("atomic", f"contended.{op}.{ptx_type}", body, (), (np.array([start]),), grid=2, block=128)


def atomics() -> list[Case]:
    cases_ = []
    for space in ("global", "shared"):
        for ptx_type in ("u32", "s32", "u64", "s64"):
            cases_ += [
                own_cells(op, ptx_type, space) for op in ("add", "min", "max") if (op, ptx_type) != ("add", "s64")
            ]
        cases_ += [own_cells(op, "b32", space) for op in ("and", "or", "xor", "exch", "cas")]
        cases_ += [own_cells(op, "b64", space) for op in ("and", "exch", "cas")]
        cases_ += [own_cells(op, "u32", space) for op in ("inc", "dec")]
        cases_ += [own_cells("add", ptx_type, space) for ptx_type in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")]
    thread = "mov.b32 %r10, %r1;"
    cases_ += [
        one_cell("add", "u32", np.uint32(7), thread),
        one_cell("max", "s32", np.int32(-5), "sub.s32 %r10, 100, %r1;"),
        one_cell("min", "s32", np.int32(5), "sub.s32 %r10, 100, %r1;"),
        one_cell("xor", "b32", np.uint32(3), thread),
        one_cell("inc", "u32", np.uint32(10), "mov.b32 %r10, 100;"),
        one_cell("add", "f32", np.float32(1), "cvt.rn.f32.u32 %f10, %r1;"),
        one_cell("add", "u64", np.uint64(1 << 40), "cvt.u64.u32 %rd10, %r1;"),
    ]
    for form, count in (("v2.f32", 2), ("v4.f32", 4), ("v2.f16x2", 2), ("v4.bf16x2", 4)):
        ptx_type = form[3:].removesuffix("x2")
        cells, values = (
            floats(f"red {form}", 32 * count * (2 if "x2" in form else 1), 2, i, ptx_type).view(np.uint32)
            for i in (0, 1)
        )
        loads = ", ".join(f"%r{10 + i}" for i in range(count))
        noftz = ".noftz" if "x2" in form else ""
        body = f"""mul.wide.u32 %rd70, %r99, {4 * count}; add.s64 %rd71, %rd70, %rd1; add.s64 %rd70, %rd70, %rd0;
          ld.global.v{count}.b32 {{{loads}}}, [%rd70];
          red.relaxed.gpu.global.add{noftz}.{form} [%rd71], {{{loads}}};"""
        cases_.append(Case("atomic", f"global.add{noftz}.{form}", body, (values,), (cells,), Tolerance(ptx_type)))
    return cases_


def special_registers() -> list[Case]:
    names = [
        "tid.x",
        "tid.y",
        "tid.z",
        "ntid.x",
        "ctaid.x",
        "ctaid.y",
        "nctaid.x",
        "laneid",
        "lanemask_eq",
        "lanemask_lt",
        "lanemask_le",
        "lanemask_gt",
        "lanemask_ge",
        "cluster_ctarank",
        "cluster_nctarank",
        "cluster_ctaid.x",
        "cluster_nctaid.x",
        "clusterid.x",
        "nclusterid.x",
    ]
    lines = "\n".join(f"mov.u32 %r{10 + i}, %{name};" for i, name in enumerate(names))
    body = f"""{lines} mov.u32 %r5, %ctaid.x; mad.lo.s32 %r99, %r5, 64, %r99;
      {store_words("%r", 10, len(names), 0)}"""
    out = np.zeros((4 * 64, len(names)), np.uint32)
    return [Case("registers", "all", body, (), (out,), grid=4, block=64, cluster=2)]


def local_and_sign() -> list[Case]:
    body = f""".local .align 16 .b8 depot[32]; mov.u64 %rd5, depot; cvta.local.u64 %rd6, %rd5;
      st.local.b32 [%rd5], %r99; add.s32 %r2, %r99, 7; st.b32 [%rd6+4], %r2; ld.b32 %r10, [%rd6];
      ld.local.b32 %r11, [%rd5+4]; mul.wide.u32 %rd7, %r99, 4; add.s64 %rd7, %rd7, %rd0;
      ld.global.v2.s16 {{%r12, %r13}}, [%rd7];
      ld.global.s8 %r14, [%rd7]; ld.global.u8 %r15, [%rd7+1]; ld.global.s8 %rd8, [%rd7+3]; cvt.u32.u64 %r16, %rd8;
      shr.u64 %rd8, %rd8, 32; cvt.u32.u64 %r17, %rd8; {store_words("%r", 10, 8, 1)}"""
    return [Case("integer", "ld.local.signed", body, (raw("loads", 32),), (np.zeros((32, 8), np.uint32),))]


def rare() -> list[Case]:
    """What compilers seldom emit and the emulator does not know."""
    three, two = " %d, %a, %b, %c;", " %d, %a, %b;"
    texts = [
        *(f"mul24.{part}.{ptx_type}{two}" for part in ("lo", "hi") for ptx_type in ("u32", "s32")),
        f"mad24.lo.u32{three}",
        *(f"mad.hi.{ptx_type}{three}" for ptx_type in ("u32", "s32")),
        *(f"sad.{ptx_type}{three}" for ptx_type in ("u32", "s32")),
        *(f"dp2a.{part}.s32.u32{three}" for part in ("lo", "hi")),
        f"bmsk.clamp.b32{two}",
        f"bmsk.wrap.b32{two}",
        *(f"prmt.b32.{mode}{three}" for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")),
        f"szext.clamp.s32{two}",
        f"set.lt.u32.s32{two}",
        "add.cc.u32 %d, %a, %b; addc.u32 %d, %c, %d;",
        "sub.cc.u32 %d, %a, %b; subc.u32 %d, %c, %d;",
    ]
    return [
        elementwise(
            "integer", title(text), text, [words(title(text), COUNT, 32, i) for i in range(3)], np.uint32, refused=True
        )
        for text in texts
    ]


def cases() -> list[Case]:
    return arithmetic() + rare() + mixed_widths() + predicates() + local_and_sign() + atomics() + special_registers()
