"""Bulk copies, TMA, matrix instructions, tensor memory, cluster launch control."""

from __future__ import annotations

from ptx_emulator.codegen.arithmetic import put
from ptx_emulator.codegen.emitter import Emitter, Modifiers, bits_of, handles
from ptx_emulator.codegen.memory import CACHE_HINTS, SCOPES
from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.ptx import Address, Imm, Instruction, Reg, Vector
from ptx_emulator.ptx.parser import Operand

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def number(operand: Operand) -> int:
    if not isinstance(operand, Imm):
        raise UnsupportedPTX(f"operand {operand} must be a constant")
    return operand.value


@handles("cp")
def copy(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    reduce = mods.flag("reduce")
    mods.need("async")
    if reduce and not (i.has("bulk_group") and i.has("shared::cta")):
        raise UnsupportedPTX(i.text)
    if mods.take("bulk"):
        return bulk(e, i, mods)
    if mods.flag("commit_group"):
        return e.call("async_copies.commit", "'cp.async'")
    if mods.flag("wait_group"):
        return e.call("async_copies.wait", "'cp.async'", number(i.operands[0]), True)
    if mods.flag("wait_all"):
        return e.call("async_copies.wait", "'cp.async'", 0, True)
    if mods.take("mbarrier"):
        mods.need("arrive")
        no_increment = mods.flag("noinc")
        mods.ignore("shared", "shared::cta", "b64")
        return e.call("async_copies.mbarrier_arrive", e.address(i.operands[0]), no_increment)
    cached = mods.need("ca", "cg") == "ca"
    mods.ignore("shared", "shared::cta", "global", *CACHE_HINTS)
    target, source, size, *rest = i.operands
    valid = "None"
    if rest and not i.has("L2::cache_hint"):
        valid = e.value(rest[0])
        if isinstance(rest[0], Reg) and e.width(rest[0]) == 1:
            valid = f"np.where({valid},u32(0),u32({number(size)}))"
    return e.call("async_copies.copy", e.address(target), e.address(source), number(size), valid, cached)


def bulk(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if mods.flag("commit_group"):
        return e.call("async_copies.commit", "'bulk'")
    if mods.flag("wait_group"):
        return e.call("async_copies.wait", "'bulk'", number(i.operands[0]), not mods.flag("read"))
    if mods.take("prefetch"):
        mods.left.clear()
        return []
    tensor = mods.flag("tensor")
    if tensor:
        mods.need("1d", "2d", "3d", "4d", "5d")
        mods.ignore("tile")
    operands = list(i.operands)
    if mods.flag("L2::cache_hint"):
        operands.pop()
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    multicast, mbarrier = (mods.flag("multicast::cluster"), mods.flag("mbarrier::complete_tx::bytes"))
    group = mods.flag("bulk_group")
    spaces = [s for s in mods.left if s in ("global", "shared::cta", "shared::cluster")]
    mods.ignore("global", "shared::cta", "shared::cluster", "noftz")
    target, source = e.address(operands[0]), e.address(operands[1])
    mask = e.value(operands[-1], "u", 16) if multicast else "None"
    if mbarrier and tensor:
        mapped = (source, coordinates(e, operands[1]))
        return e.call("tma.load", target, *mapped, e.address(operands[2]), mask, pair)
    if mbarrier:
        size, barrier = e.value(operands[2]), e.address(operands[3])
        return e.call("tma.bulk_load", repr(spaces[1]), target, source, size, barrier, mask)
    if not group or spaces != ["global", "shared::cta"]:
        raise UnsupportedPTX(i.text)
    reduction = mods.take(*REDUCTIONS)
    if tensor:
        return e.call("tma.store", target, coordinates(e, operands[0]), source, repr(reduction))
    kind = mods.last() if reduction else ""
    return e.call("tma.bulk_store", target, source, e.value(operands[2]), repr(reduction), repr(kind))


def coordinates(e: Emitter, descriptor: Operand) -> str:
    if not isinstance(descriptor, Address) or descriptor.coordinates is None:
        raise UnsupportedPTX(f"operand {descriptor} has no coordinates")
    return e.list_of(descriptor.coordinates.items, 32)


@handles("tensormap")
def tensor_map(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.need("replace", "cp_fenceproxy")
    if action == "cp_fenceproxy":
        mods.ignore("global", "shared::cta", "tensormap::generic", "release", *SCOPES, "sync", "aligned")
        return e.call("tma.copy_map", e.address(i.operands[0]), e.address(i.operands[1]))
    mods.need("tile")
    space, bits = mods.need("global", "shared::cta"), bits_of(mods.need("b32", "b64"))
    mods.need("b1024")
    ordinal = number(i.operands[1]) if len(i.operands) > 2 else 0
    value = e.value(i.operands[-1], "u", bits)
    return e.call("tma.replace", repr(space), e.address(i.operands[0]), repr(mods.last()), ordinal, value)


# -- warp and warpgroup matrices: (shape, type, transposed) -> bits of an element in memory
_LDMATRIX = {("m8n8", "b16", False): 16, ("m8n8", "b16", True): 16, ("m16n16", "b8", True): 8} | {
    (shape, f"b8x16.{kind}", shape == "m16n16"): bits
    for shape in ("m8n16", "m16n16")
    for kind, bits in (("b6x16_p32", 6), ("b4x16_p64", 4))
}
_STMATRIX = {("m8n8", "b16", False): 16, ("m8n8", "b16", True): 16, ("m16n8", "b8", True): 8}


@handles("ldmatrix", "stmatrix")
def matrix_move(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync", "aligned", "shared", "shared::cta")
    transpose = mods.flag("trans")
    shape = mods.need("m8n8", "m16n16", "m8n16", "m16n8")
    mods.need("x1", "x2", "x4")
    kind, mods.left = ".".join(mods.left), []
    bits = (_LDMATRIX if i.opcode == "ldmatrix" else _STMATRIX).get((shape, kind, transpose))
    if bits is None:
        raise UnsupportedPTX(i.text)
    registers, place = (i.operands if i.opcode == "ldmatrix" else i.operands[::-1])[:2]
    return e.call(f"mma.{i.opcode}", repr(shape), bits, transpose, e.list_of(e.vector(registers)), e.address(place))


@handles("mma")
def mma(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync", "aligned")
    shape = mods.left.pop(0)
    if mods.left[:2] != ["row", "col"]:
        raise UnsupportedPTX(i.text)
    del mods.left[:2]
    mods.ignore("satfinite") if "s32" not in mods.left else None
    ptx_types = [mods.left.pop(0) for _ in range(4)]
    return e.call("mma.mma_sync", repr(shape), ptx_types, *(e.list_of(e.vector(x)) for x in i.operands[:4]))


@handles("wgmma")
def wgmma(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.need("mma_async", "fence", "commit_group", "wait_group")
    mods.ignore("sync", "aligned")
    if action != "mma_async":
        return e.call(f"mma.wgmma_{action}", *map(number, i.operands))
    if mods.flag("satfinite"):
        raise mods.unsupported("modifier .satfinite")
    shape = mods.left.pop(0)
    ptx_types = [mods.left.pop(0) for _ in range(3)]
    d, a, b, scale_d, *rest = i.operands
    left = e.list_of(a.items) if isinstance(a, Vector) else e.value(a, "u", 64)
    used = e.numbers(e.fragment_numbers([d, a] if isinstance(a, Vector) else [d]))
    return e.call(
        "mma.wgmma",
        repr(shape),
        ptx_types,
        used,
        e.list_of(e.vector(d)),
        left,
        e.value(b, "u", 64),
        e.predicate(scale_d),
        [number(x) for x in rest],
    )


# -- tensor memory
@handles("tcgen05")
def tensor_core(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.left.pop(0)
    mods.ignore("sync", "aligned")
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    if action in ("fence::before_thread_sync", "fence::after_thread_sync"):
        return []
    if action in ("wait::ld", "wait::st"):
        return e.call("tensor.wait", repr(action))
    if action == "relinquish_alloc_permit":
        return e.call("tensor.relinquish")
    if action in ("alloc", "dealloc"):
        mods.ignore("shared::cta", "b32")
        place = e.address(i.operands[0]) if action == "alloc" else e.value(i.operands[0])
        return e.call(f"tensor.{action}", place, e.value(i.operands[1]))
    if action == "commit":
        mods.ignore("mbarrier::arrive::one", "shared::cluster", "b64")
        mask = e.value(i.operands[1], "u", 16) if mods.flag("multicast::cluster") else "None"
        return e.call("tensor.commit", e.address(i.operands[0]), mask)
    if action in ("ld", "st"):
        return tensor_move(e, i, mods, action)
    if action == "cp":
        form, mods.left = ".".join(mods.left), []
        return e.call("tensor.copy", pair, repr(form), e.address(i.operands[0]), e.value(i.operands[1], "u", 64))
    if action == "mma":
        return tensor_mma(e, i, mods, pair)
    raise UnsupportedPTX(i.text)


def tensor_move(e: Emitter, i: Instruction, mods: Modifiers, action: str) -> list[str]:
    shape = mods.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    packed = mods.flag("pack::16b" if action == "ld" else "unpack::16b")
    if packed and shape == "16x32bx2":
        raise UnsupportedPTX(i.text)
    mods.ignore("b32")
    mods.need(*(f"x{1 << n}" for n in range(8)))
    operands = list(i.operands)
    registers = e.list_of(e.vector(operands.pop(0) if action == "ld" else operands.pop()))
    half = number(operands[1]) if shape == "16x32bx2" else 0
    return e.call("tensor.move", repr(action), repr(shape), packed, registers, e.address(operands[0]), half)


def tensor_mma(e: Emitter, i: Instruction, mods: Modifiers, pair: bool) -> list[str]:
    kind = mods.need(
        "kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8", "kind::mxf8f6f4", "kind::mxf4", "kind::mxf4nvf4"
    )[6:]
    mods.ignore("collector::a::discard", "collector::a::fill", "collector::a::use", "collector::a::lastuse")
    scaled = mods.flag("block_scale")
    vector = mods.take("block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
    d, a, b, idesc, *rest = i.operands
    left = e.address(a) if isinstance(a, Address) else e.value(a, "u", 64)
    scales = f"({e.address(rest.pop(0))},{e.address(rest.pop(0))})" if scaled else "None"
    disable = e.list_of(e.vector(rest.pop(0))) if isinstance(rest[0], Vector) else "None"
    enable = e.predicate(rest.pop(0))
    if rest:
        raise UnsupportedPTX(f"{i.text} with scale-input-d")
    return e.call(
        "tensor.mma",
        pair,
        repr(kind),
        repr(vector),
        e.address(d),
        left,
        e.value(b, "u", 64),
        e.value(idesc),
        enable,
        scales,
        disable,
    )


@handles("clusterlaunchcontrol")
def launch_control(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.left.pop(0)
    if action == "try_cancel":
        mods.ignore("async", "shared::cta", "mbarrier::complete_tx::bytes", "b128")
        multicast = mods.flag("multicast::cluster::all")
        return e.call("sync.try_cancel", e.address(i.operands[0]), e.address(i.operands[1]), multicast)
    if action != "query_cancel":
        raise UnsupportedPTX(i.text)
    mods.ignore("pred", "b32", "b128", "v4")
    response = e.raw(i.operands[-1])
    what = mods.need("is_canceled", "get_first_ctaid", *(f"get_first_ctaid::{axis}" for axis in "xyz"))
    if what == "is_canceled":
        return put(e.raw(i.operands[0]), f"M.sync.query(m,{response})")
    if what == "get_first_ctaid":
        return [f"A.unpack128(m,{response},{e.list_of(e.vector(i.operands[0]))})"]
    return put(e.raw(i.operands[0]), f"{response}[:,{'xyz'.index(what[-1])}]")
