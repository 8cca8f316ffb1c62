"""Integer, logic, floating point, conversion, move and warp instructions."""

from __future__ import annotations

from ptx_emulator.codegen.emitter import Emitter, Modifiers, bits_of, handles
from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.ptx import Imm, Instruction, Reg, Vector
from ptx_emulator.ptx.parser import Operand

HALVES = ("f16", "bf16", "f16x2", "bf16x2", "f32x2")
DIRECTED = ("rz", "rm", "rp")
_LOGIC = {"and": "logical_and", "or": "logical_or", "xor": "logical_xor", "not": "logical_not"}
_FLOAT = {"add": "add", "sub": "subtract", "mul": "multiply", "div": "divide"}
_UNARY = {
    "abs": "np.absolute({0})",
    "neg": "np.negative({0})",
    "ex2": "np.exp2({0})",
    "lg2": "np.log2({0})",
    "sin": "np.sin({0})",
    "cos": "np.cos({0})",
    "tanh": "np.tanh({0})",
    "sqrt": "np.sqrt({0})",
    "rcp": "np.divide({0}.dtype.type(1),{0})",
    "rsqrt": "np.divide({0}.dtype.type(1),np.sqrt({0}))",
}
_COMPARE = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "lo": "less",
    "ls": "less_equal",
    "hi": "greater",
    "hs": "greater_equal",
}


def kind_of(name: str) -> str:
    return "u" if name[0] in "bu" else name[0]


def put(target: str, value: str) -> list[str]:
    return [f"A.put(m,{target},{value})"]


@handles("and", "or", "xor", "not", "cnot")
def logic(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    ptx_type = mods.last()
    if ptx_type == "pred":
        sources = ",".join(e.predicate(x) for x in i.operands[1:])
        return [f"np.{_LOGIC[i.opcode]}({sources},out={e.raw(i.operands[0])},where=m)"]
    bits = bits_of(ptx_type)
    target, *sources = (e.value(x, "u", bits) for x in i.operands)
    if i.opcode == "cnot":
        return put(target, f"({sources[0]}==0)")
    name = "invert" if i.opcode == "not" else f"bitwise_{i.opcode}"
    return [f"np.{name}({','.join(sources)},out={target},where=m)"]


@handles(
    "add",
    "sub",
    "mul",
    "mad",
    "fma",
    "div",
    "rem",
    "min",
    "max",
    "abs",
    "neg",
    "ex2",
    "lg2",
    "sin",
    "cos",
    "tanh",
    "sqrt",
    "rcp",
    "rsqrt",
    "copysign",
)
def arithmetic(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    ptx_type = mods.last()
    if ptx_type in ("f16", "bf16") and "f32" in mods.left:
        return mixed(e, i, mods, ptx_type)
    if ptx_type in HALVES:
        return half(e, i, mods, ptx_type)
    if ptx_type in ("f32", "f64"):
        return floating(e, i, mods, ptx_type)
    return integer(e, i, mods, ptx_type)


def mixed(e: Emitter, i: Instruction, mods: Modifiers, ptx_type: str) -> list[str]:
    """add/sub/fma.f32.bf16: the first sources are narrow, the last one (the addend) is f32."""
    mods.take("f32")
    mods.ignore("rn")
    sources = i.operands[1:]
    ptx_types = [ptx_type] * (len(sources) - 1) + ["f32"]
    values = ",".join(e.value(x, "u", bits_of(k)) for x, k in zip(sources, ptx_types, strict=True))
    return put(e.value(i.operands[0], "f", 32), f"A.mixed({i.opcode!r},{ptx_types!r},M.count,{values})")


def half(e: Emitter, i: Instruction, mods: Modifiers, ptx_type: str) -> list[str]:
    if i.opcode not in ("add", "sub", "mul", "fma", "min", "max", "neg", "abs", "ex2", "tanh"):
        raise UnsupportedPTX(i.text)
    mods.ignore("rn", "approx")
    rounding = mods.take(*DIRECTED) if ptx_type == "f32x2" and i.opcode in ("add", "sub", "mul", "fma") else ""
    flush = mods.flag("ftz")
    if flush and ptx_type != "f32x2" and i.opcode not in ("ex2",):
        raise mods.unsupported("modifier .ftz")
    relu, nan = mods.flag("relu"), mods.flag("NaN")
    values = ",".join(e.value(x, "u", bits_of(ptx_type)) for x in i.operands)
    return [f"A.half_op(m,{i.opcode!r},{ptx_type!r},{relu},{nan},{rounding!r},{flush},{values})"]


def floating(e: Emitter, i: Instruction, mods: Modifiers, ptx_type: str) -> list[str]:
    bits, op = bits_of(ptx_type), i.opcode
    approximate = mods.flag("approx")
    mods.ignore("rn", "full")
    rounding = mods.take(*DIRECTED) if ptx_type == "f32" and op in ("add", "sub", "mul", "fma") else ""
    flush, saturate = mods.flag("ftz"), mods.flag("sat")
    target, *sources = (e.value(x, "f", bits) for x in i.operands)
    if flush and op not in ("copysign",):
        sources = [f"flush({x})" for x in sources]
    if rounding:
        value = f"A.N.directed({op!r},{rounding!r},{','.join(sources)})"
    elif op in ("fma", "mad"):
        value = f"A.N.fma_{ptx_type}({','.join(sources)})"
    elif op in ("min", "max"):
        nan, sign = mods.flag("NaN"), mods.flag("xorsign")
        absolute = mods.flag("abs")
        name = "maximum" if op == "max" else "minimum"
        inputs = [f"np.absolute({x})" for x in sources] if absolute else sources
        value = inputs[0]
        for other in inputs[1:]:
            value = f"A.{name}({value},{other},{nan})"
        if sign:
            value = f"A.xorsign({value},{sources[0]},{sources[1]})"
    elif op == "div" and approximate:
        value = f"A.div_approx({','.join(sources)})"
    elif op in _FLOAT:
        if not flush and not saturate:
            return [f"np.{_FLOAT[op]}({','.join(sources)},out={target},where=m)"]
        value = f"np.{_FLOAT[op]}({','.join(sources)})"
    elif op == "copysign":
        value = f"np.copysign({sources[1]},{sources[0]})"
    elif op in _UNARY:
        value = _UNARY[op].format(f"np.asarray({sources[0]})")
    else:
        raise UnsupportedPTX(i.text)
    if flush:
        value = f"flush({value})"
    return put(target, f"A.saturate({value})" if saturate else value)


def integer(e: Emitter, i: Instruction, mods: Modifiers, ptx_type: str) -> list[str]:
    op, k = i.opcode, kind_of(ptx_type)
    if ptx_type in ("s16x2", "u16x2"):
        raise UnsupportedPTX(i.text)
    bits = bits_of(ptx_type)
    if op in ("mul", "mad"):
        return product(e, i, mods, k, bits)
    target, *x = (e.value(y, k, bits) for y in i.operands)
    if op in ("add", "sub"):
        if mods.flag("sat"):
            return put(target, f"A.saturating({x[0]},{x[1]},{1 if op == 'add' else -1})")
        return [f"np.{_FLOAT[op]}({x[0]},{x[1]},out={target},where=m)"]
    if op in ("div", "rem"):
        return put(target, f"A.{op}({x[0]},{x[1]})")
    if op in ("min", "max"):
        value = f"np.{op}imum({x[0]},{x[1]})"
        return put(target, f"np.maximum({value},0)" if mods.flag("relu") else value)
    if op in ("neg", "abs"):
        return [f"np.{'negative' if op == 'neg' else 'absolute'}({x[0]},out={target},where=m)"]
    raise UnsupportedPTX(i.text)


def product(e: Emitter, i: Instruction, mods: Modifiers, k: str, bits: int) -> list[str]:
    part = mods.need("lo", "hi", "wide")
    sources = [e.value(x, k, bits) for x in i.operands[1:3]]
    if part == "wide":
        target = e.value(i.operands[0], k, 2 * bits)
        value = f"A.wide({sources[0]},{sources[1]},np.{'u' if k == 'u' else ''}int{2 * bits})"
        return put(target, value + (f"+{e.value(i.operands[3], k, 2 * bits)}" if i.opcode == "mad" else ""))
    target = e.value(i.operands[0], k, bits)
    if part == "hi":
        if i.opcode == "mad":
            raise UnsupportedPTX(i.text)
        return put(target, f"A.mul_hi({sources[0]},{sources[1]},{k == 's'},{bits})")
    if i.opcode == "mad":
        return put(target, f"{sources[0]}*{sources[1]}+{e.value(i.operands[3], k, bits)}")
    return [f"np.multiply({sources[0]},{sources[1]},out={target},where=m)"]


@handles("shl", "shr")
def shift(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    ptx_type = mods.last()
    k, bits = kind_of(ptx_type), bits_of(ptx_type)
    target, value = (e.value(x, k, bits) for x in i.operands[:2])
    amount = i.operands[2]
    if isinstance(amount, Imm) and 0 <= amount.value < bits:
        name = "left_shift" if i.opcode == "shl" else "right_shift"
        return [f"np.{name}({value},{e.immediate(amount, k, bits)},out={target},where=m)"]
    name = "shift_left" if i.opcode == "shl" else "shift_right"
    return put(target, f"A.{name}(np.asarray({value}),{e.value(amount)},{bits})")


@handles("shf", "prmt", "lop3", "popc", "clz", "brev", "bfind", "bfe", "bfi", "dp4a")
def bits(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    """What is one function of `alu` on the operands, and on what the modifiers say."""
    op, ptx_type = i.opcode, mods.last()
    width, signed = bits_of(ptx_type), ptx_type[0] == "s"
    wide = {"bfind": 2, "bfe": 2, "bfi": 3, "popc": 2, "clz": 2, "brev": 2}.get(op, 0)  # operands as wide as the type
    narrow = op in ("popc", "clz", "bfind")  # a result of 32 bits
    values = [e.value(x, "u", width if narrow <= n < wide else 32) for n, x in enumerate(i.operands)]
    call = {
        "shf": ("A.funnel", lambda: (mods.need("l", "r") == "l", mods.need("wrap", "clamp") == "wrap")),
        "prmt": ("A.permute", tuple),
        "lop3": ("A.lop3", tuple),
        "popc": ("np.bitwise_count", tuple),
        "clz": ("A.leading_zeros", lambda: (width,)),
        "brev": ("A.bit_reverse", lambda: (width,)),
        "bfind": ("A.find_msb", lambda: (signed, width, mods.flag("shiftamt"))),
        "bfe": ("A.bit_extract", lambda: (signed, width)),
        "bfi": ("A.bit_insert", lambda: (width,)),
        "dp4a": ("A.dot4", lambda: (mods.last() == "s32", signed)),
    }[op]
    return put(values[0], f"{call[0]}({','.join([*values[1:], *map(repr, call[1]())])})")


@handles("setp", "set")
def set_predicate(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if i.opcode == "set":
        raise UnsupportedPTX(i.text)
    ptx_type = mods.last()
    comparison = mods.need(*_COMPARE, "num", "nan", "equ", "neu", "ltu", "leu", "gtu", "geu")
    combine, flush = mods.take("and", "or", "xor"), mods.flag("ftz")
    a, b = i.operands[1:3]
    target, second = e.pair(i.operands[0])
    if ptx_type in ("f32", "f64"):
        x, y = (e.value(o, "f", bits_of(ptx_type)) for o in (a, b))
        if flush:
            x, y = f"flush({x})", f"flush({y})"
        test = f"A.compare({comparison!r},{x},{y})"
    elif ptx_type in ("f16", "bf16"):
        x, y = (f"A.halves({e.value(o, 'u', 16)},{ptx_type!r},M.count)[:,0]" for o in (a, b))
        test = f"A.compare({comparison!r},{x},{y})"
    elif ptx_type in ("f16x2", "bf16x2"):
        raise UnsupportedPTX(i.text)
    else:
        x, y = (e.value(o, kind_of(ptx_type), bits_of(ptx_type)) for o in (a, b))
        if not combine and second == "None":
            return [f"np.{_COMPARE[comparison]}({x},{y},out={target},where=m)"]
        test = f"np.{_COMPARE[comparison]}({x},{y})"
    lines = [f"t={test}"]
    value, inverse = "t", "~t"
    if combine:
        other = e.predicate(i.operands[3])
        value, inverse = (f"np.{_LOGIC[combine]}({v},{other})" for v in (value, inverse))
    if second != "None":
        return [*lines, "t2=" + inverse, *put(target, value), *put(second, "t2")]
    return lines + put(target, value)


@handles("selp", "slct")
def select(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    test = mods.last() if i.opcode == "slct" else ""
    width = bits_of(mods.last())
    target, a, b = (e.value(x, "u", width) for x in i.operands[:3])
    condition = e.predicate(i.operands[3])
    if test:
        condition = e.value(i.operands[3], "f" if test == "f32" else "s", 32) + ">=0"
    return put(target, f"np.where({condition},{a},{b})")


@handles("mov")
def move(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    target, source = i.operands
    ptx_type = mods.last()
    if ptx_type == "pred":
        return put(e.raw(target), e.predicate(source))
    width = bits_of(ptx_type)
    if isinstance(target, Vector):
        items = list(target.items)
        if width == 128:
            return [f"A.unpack128(m,{e.raw(source)},{e.list_of(items)})"]
        each, value = width // len(items), e.value(source, "u", width)
        lines = [f"t={value}"]
        for index, item in enumerate(items):
            if not (isinstance(item, Reg) and item.name == "_"):
                lines += put(e.raw(item), f"A.part(t,{each},{index})")
        return lines
    if isinstance(source, Vector):
        items = list(source.items)
        if width == 128:
            return [f"A.pack128(m,{e.raw(target)},{e.list_of(items)})"]
        each = width // len(items)
        return [f"A.pack(m,{e.value(target, 'u', width)},{each},{e.list_of(items, each)})"]
    return put(e.value(target, "u", width), e.value(source, "u", width))


_CVT_TYPES = (
    "f16",
    "bf16",
    "f32",
    "f64",
    "tf32",
    "f16x2",
    "bf16x2",
    "e4m3x2",
    "e5m2x2",
    "e2m3x2",
    "e3m2x2",
    "e2m1x2",
    "ue8m0x2",
    "u8",
    "u16",
    "u32",
    "u64",
    "s8",
    "s16",
    "s32",
    "s64",
)
_NARROW = {"e4m3x2": 16, "e5m2x2": 16, "e2m3x2": 16, "e3m2x2": 16, "ue8m0x2": 16, "e2m1x2": 8, "tf32": 32}


@handles("cvt")
def convert(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    source, to = mods.last(), mods.last()
    if source not in _CVT_TYPES or to not in _CVT_TYPES:
        raise UnsupportedPTX(i.text)
    rounding = mods.take("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi")
    flags = [f for f in ("relu", "sat", "satfinite", "ftz") if mods.flag(f)]
    width = _NARROW.get(source) or bits_of(source)
    target = i.operands[0]
    own = e.width(target)
    if own < (_NARROW.get(to) or bits_of(to)):
        raise UnsupportedPTX(f"{i.text} into a {own}-bit register")
    wide = [
        f"{e.raw(x)}" if e.width(x) == width else e.value(x, "u", width if width > 8 or e.width(x) > 8 else 8)
        for x in i.operands[1:]
    ]
    call = f"C.convert({to!r},{source!r},{rounding!r},{flags!r},M.count,{own},[{','.join(wide)}])"
    return put(e.raw(target), call)


# -- warps
def among(e: Emitter, i: Instruction, members: Operand, call: str) -> list[str]:
    """A call of `warp` behind the check of the member mask."""
    return [f"W.check_members(m,{e.value(members)},M.count,'{i.opcode}.sync',{e.site})", f"W.{call}"]


@handles("elect")
def elect(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync")
    leader, chosen = e.pair(i.operands[0])
    return among(e, i, i.operands[1], f"elect(m,{leader},{chosen})")


@handles("shfl")
def shuffle(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync", "b32")
    mode = mods.need("up", "down", "bfly", "idx")
    target, valid = e.pair(i.operands[0])
    a, b, c = (e.value(x) for x in i.operands[1:4])
    return among(e, i, i.operands[4], f"shuffle(m,{mode!r},{target},{valid},{a},{b},{c},{e.site})")


@handles("vote")
def vote(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync", "b32", "pred")
    mode = mods.need("ballot", "any", "all", "uni")
    return among(e, i, i.operands[2], f"vote(m,{mode!r},{e.raw(i.operands[0])},{e.predicate(i.operands[1])})")


@handles("match")
def match(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync")
    mode, width = mods.need("any", "all"), bits_of(mods.last())
    target, every = e.pair(i.operands[0])
    return [f"W.match(m,{mode!r},{target},{every},{e.value(i.operands[1], 'u', width)})"]


@handles("activemask")
def active_mask(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("b32")
    return [f"W.vote(m,'ballot',{e.raw(i.operands[0])},True)"]


@handles("redux")
def redux(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    ptx_type = mods.last()
    mods.ignore("sync")
    op, absolute, nan = (mods.need("add", "min", "max", "and", "or", "xor"), mods.flag("abs"), mods.flag("NaN"))
    call = f"reduce(m,{op!r},{ptx_type!r},{absolute},{nan},{e.raw(i.operands[0])},{e.value(i.operands[1])})"
    return among(e, i, i.operands[2], call)
