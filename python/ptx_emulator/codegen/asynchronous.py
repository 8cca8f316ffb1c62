"""Bulk copies, TMA, matrix instructions, tensor memory, cluster launch control."""

from __future__ import annotations

from ptx_emulator.codegen.arithmetic import put
from ptx_emulator.codegen.emitter import Emitter, Modifiers, bits_of, handles
from ptx_emulator.codegen.memory import CACHE_HINTS, SCOPES
from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.ptx import Address, Imm, Instruction, Reg, Vector
from ptx_emulator.ptx.parser import Operand


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
        return [f"M.async_copies.commit({e.site},m,'cp.async')"]
    if mods.flag("wait_group"):
        return [f"M.async_copies.wait({e.site},m,'cp.async',{number(i.operands[0])},True)"]
    if mods.flag("wait_all"):
        return [f"M.async_copies.wait({e.site},m,'cp.async',0,True)"]
    if mods.take("mbarrier"):
        mods.need("arrive")
        no_increment = mods.flag("noinc")
        mods.ignore("shared", "shared::cta", "b64")
        address, offset = e.address(i.operands[0])
        return [f"M.async_copies.mbarrier_arrive({e.site},m,{address},{offset},{no_increment})"]
    mods.need("ca", "cg")
    mods.ignore("shared", "shared::cta", "global", *CACHE_HINTS)
    target, target_offset = e.address(i.operands[0])
    source, source_offset = e.address(i.operands[1])
    size = number(i.operands[2])
    rest = i.operands[3:]
    valid = "None"
    if rest and not i.has("L2::cache_hint"):
        valid = e.value(rest[0])
        if isinstance(rest[0], Reg) and e.width(rest[0]) == 1:
            valid = f"np.where({valid},u32(0),u32({size}))"
    return [f"M.async_copies.copy({e.site},m,{target},{target_offset},{source},{source_offset},{size},{valid})"]


def bulk(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if mods.flag("commit_group"):
        return [f"M.async_copies.commit({e.site},m,'bulk')"]
    if mods.flag("wait_group"):
        return [f"M.async_copies.wait({e.site},m,'bulk',{number(i.operands[0])},{not mods.flag('read')})"]
    if mods.take("prefetch"):
        mods.left.clear()
        return []
    if mods.take("tensor"):
        return tensor(e, i, mods)
    hint = mods.flag("L2::cache_hint")
    operands = list(i.operands)
    if hint:
        operands.pop()
    multicast, mbarrier = mods.flag("multicast::cluster"), mods.flag("mbarrier::complete_tx::bytes")
    group = mods.flag("bulk_group")
    spaces = [s for s in mods.left if s in ("global", "shared::cta", "shared::cluster")]
    mods.ignore("global", "shared::cta", "shared::cluster")
    target, source = e.address(operands[0]), e.address(operands[1])
    size = e.value(operands[2])
    reduction = mods.take("add", "min", "max", "inc", "dec", "and", "or", "xor")
    kind = mods.last() if reduction else ""
    mods.ignore("noftz")
    if mbarrier:
        barrier = e.address(operands[3])
        mask = e.value(operands[4], "u", 16) if multicast else "None"
        return [f"M.tma.bulk_load({e.site},m,{spaces[1]!r},{target[0]},{target[1]},{source[0]},{source[1]},{size},"
                f"{barrier[0]},{barrier[1]},{mask})"]  # fmt: skip
    if not group or spaces != ["global", "shared::cta"]:
        raise UnsupportedPTX(i.text)
    return [
        f"M.tma.bulk_store({e.site},m,{target[0]},{target[1]},{source[0]},{source[1]},{size},{reduction!r},{kind!r})"
    ]


def tensor(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.need("1d", "2d", "3d", "4d", "5d")
    mods.ignore("tile", "L2::cache_hint")
    multicast, pair = mods.flag("multicast::cluster"), mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    if mods.flag("bulk_group"):
        mods.ignore("global", "shared::cta")
        reduction = mods.take("add", "min", "max", "inc", "dec", "and", "or", "xor")
        return tma_store(e, i, reduction)
    mods.need("mbarrier::complete_tx::bytes")
    mods.need("shared::cluster", "shared::cta")
    mods.need("global")
    target, descriptor, barrier, *rest = i.operands
    destination, source, signal = e.address(target), e.address(descriptor), e.address(barrier)
    mask = e.value(rest[0], "u", 16) if multicast else "None"
    return [f"M.tma.load({e.site},m,{destination[0]},{destination[1]},{tma_source(e, descriptor, source)},"
            f"{signal[0]},{signal[1]},{mask},{pair})"]  # fmt: skip


def tma_source(e: Emitter, descriptor: Operand, source: tuple[str, int]) -> str:
    assert isinstance(descriptor, Address)
    assert descriptor.coordinates is not None
    return f"{source[0]},{e.list_of(descriptor.coordinates.items, 32)}"


def tma_store(e: Emitter, i: Instruction, reduction: str) -> list[str]:
    descriptor, source = i.operands[0], e.address(i.operands[1])
    place = tma_source(e, descriptor, e.address(descriptor))
    return [f"M.tma.store({e.site},m,{place},{source[0]},{source[1]},{reduction!r})"]


@handles("tensormap")
def tensor_map(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.need("replace", "cp_fenceproxy")
    if action == "cp_fenceproxy":
        mods.ignore("global", "shared::cta", "tensormap::generic", "release", *SCOPES, "sync", "aligned")
        target, source = e.address(i.operands[0]), e.address(i.operands[1])
        return [f"M.tma.copy_map({e.site},m,{target[0]},{target[1]},{source[0]},{source[1]})"]
    mods.need("tile")
    name = mods.need("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride")
    space = mods.need("global", "shared::cta")
    mods.need("b1024")
    bits = bits_of(mods.need("b32", "b64"))
    address, offset = e.address(i.operands[0])
    ordinal = number(i.operands[1]) if len(i.operands) > 2 else 0
    value = e.value(i.operands[-1], "u", bits)
    return [f"M.tma.replace({e.site},m,{space!r},{address},{offset},{name!r},{ordinal},{value})"]


# -- warp and warpgroup matrices
@handles("ldmatrix", "stmatrix")
def matrix_move(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync", "aligned", "shared", "shared::cta")
    transpose = mods.flag("trans")
    shape = mods.need("m8n8", "m16n16", "m8n16", "m16n8")
    mods.need("x1", "x2", "x4")
    kind = mods.last()
    kind = ".".join([*(m for m in mods.left if m in ("b8x16", "b8")), kind]) if mods.left else kind
    if (shape != "m8n8" and kind != "b8") or (shape == "m8n8" and kind != "b16"):
        raise UnsupportedPTX(i.text)
    registers, place = (i.operands if i.opcode == "ldmatrix" else i.operands[::-1])[:2]
    address, offset = e.address(place)
    return [f"M.mma.{i.opcode}({e.site},m,{shape!r},{transpose},{e.list_of(e.vector(registers))},{address},{offset})"]


@handles("mma")
def mma(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("sync", "aligned")
    shape = mods.left.pop(0)
    if mods.left[:2] != ["row", "col"]:
        raise UnsupportedPTX(i.text)
    del mods.left[:2]
    mods.ignore("satfinite") if "s32" not in mods.left else None
    kinds = [mods.left.pop(0) for _ in range(4)]
    d, a, b, c = (e.list_of(e.vector(x)) for x in i.operands[:4])
    return [f"M.mma.mma_sync({e.site},m,{shape!r},{kinds!r},{d},{a},{b},{c})"]


@handles("wgmma")
def wgmma(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.need("mma_async", "fence", "commit_group", "wait_group")
    mods.ignore("sync", "aligned")
    if action == "fence":
        return [f"M.mma.wgmma_fence({e.site},m)"]
    if action == "commit_group":
        return [f"M.mma.wgmma_commit({e.site},m)"]
    if action == "wait_group":
        return [f"M.mma.wgmma_wait({e.site},m,{number(i.operands[0])})"]
    if mods.flag("satfinite"):
        raise mods.unsupported("modifier .satfinite")
    shape = mods.left.pop(0)
    kinds = [mods.left.pop(0) for _ in range(3)]
    d, a, b, scale_d, *rest = i.operands
    left = e.list_of(a.items) if isinstance(a, Vector) else e.value(a, "u", 64)
    signs = [number(x) for x in rest]
    return [f"M.mma.wgmma({e.site},m,{shape!r},{kinds!r},{e.list_of(e.vector(d))},{left},{e.value(b, 'u', 64)},"
            f"{e.predicate(scale_d)},{signs!r})"]  # fmt: skip


# -- tensor memory
@handles("tcgen05")
def tensor_core(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.left.pop(0)
    mods.ignore("sync", "aligned")
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    if action in ("fence::before_thread_sync", "fence::after_thread_sync"):
        return []
    if action in ("wait::ld", "wait::st"):
        return [f"M.tensor.wait({e.site},m,{action!r})"]
    if action == "relinquish_alloc_permit":
        return [f"M.tensor.relinquish({e.site},m)"]
    if action == "alloc":
        mods.ignore("shared::cta", "b32")
        address, offset = e.address(i.operands[0])
        return [f"M.tensor.alloc({e.site},m,{pair},{address},{offset},{e.value(i.operands[1])})"]
    if action == "dealloc":
        mods.ignore("b32")
        return [f"M.tensor.dealloc({e.site},m,{pair},{e.value(i.operands[0])},{e.value(i.operands[1])})"]
    if action == "commit":
        mods.ignore("mbarrier::arrive::one", "shared::cluster", "b64")
        multicast = mods.flag("multicast::cluster")
        address, offset = e.address(i.operands[0])
        mask = e.value(i.operands[1], "u", 16) if multicast else "None"
        return [f"M.tensor.commit({e.site},m,{pair},{address},{offset},{mask})"]
    if action in ("ld", "st"):
        return tensor_move(e, i, mods, action)
    if action == "cp":
        return tensor_copy(e, i, mods, pair)
    if action == "shift":
        mods.need("down")
        address, offset = e.address(i.operands[0])
        return [f"M.tensor.shift({e.site},m,{pair},{address},{offset})"]
    if action == "mma":
        return tensor_mma(e, i, mods, pair)
    raise UnsupportedPTX(i.text)


def tensor_move(e: Emitter, i: Instruction, mods: Modifiers, action: str) -> list[str]:
    shape = mods.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    packed = mods.flag("pack::16b" if action == "ld" else "unpack::16b")
    mods.ignore("b32")
    repeat = mods.last()
    assert repeat[0] == "x"
    operands = list(i.operands)
    registers = operands.pop(0) if action == "ld" else operands.pop()
    address, offset = e.address(operands[0])
    half = number(operands[1]) if shape == "16x32bx2" else 0
    return [
        f"M.tensor.move({e.site},m,{action!r},{shape!r},{int(repeat[1:])},{packed},{e.list_of(e.vector(registers))},"
        f"{address},{offset},{half})"
    ]


def tensor_copy(e: Emitter, i: Instruction, mods: Modifiers, pair: bool) -> list[str]:
    shape = mods.need("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = mods.take("warpx2::02_13", "warpx2::01_23", "warpx4")
    source = "b6x16_p32" if mods.flag("b6x16_p32") else "b4x16_p64" if mods.flag("b4x16_p64") else ""
    mods.ignore("b8x16")
    address, offset = e.address(i.operands[0])
    return [f"M.tensor.copy({e.site},m,{pair},{shape!r},{multicast!r},{source!r},{address},{offset},"
            f"{e.value(i.operands[1], 'u', 64)})"]  # fmt: skip


def tensor_mma(e: Emitter, i: Instruction, mods: Modifiers, pair: bool) -> list[str]:
    kind = mods.need("kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8", "kind::mxf8f6f4", "kind::mxf4",
                     "kind::mxf4nvf4")[6:]  # fmt: skip
    mods.ignore("collector::a::discard", "collector::a::fill", "collector::a::use", "collector::a::lastuse")
    scaled = mods.flag("block_scale")
    vector = mods.take("block16", "block32", "scale_vec::1X", "scale_vec::2X", "scale_vec::4X")
    d, a, b, idesc, *rest = i.operands
    target, offset = e.address(d)
    if isinstance(a, Address):
        place = e.address(a)
        left = f"None,({place[0]},{place[1]})"
    else:
        left = f"{e.value(a, 'u', 64)},None"
    scales = "None,None"
    if scaled:
        scale_a, scale_b = e.address(rest.pop(0)), e.address(rest.pop(0))
        scales = f"({scale_a[0]},{scale_a[1]}),({scale_b[0]},{scale_b[1]})"
    disable = "None"
    if rest and isinstance(rest[0], Vector):
        disable = e.list_of(rest.pop(0).items)  # type: ignore[union-attr]
    enable = e.predicate(rest.pop(0))
    if rest:
        raise UnsupportedPTX(f"{i.text} with scale-input-d")
    return [f"M.tensor.mma({e.site},m,{pair},{kind!r},{vector!r},{target},{offset},{left},{e.value(b, 'u', 64)},"
            f"{e.value(idesc)},{enable},{scales},{disable})"]  # fmt: skip


@handles("clusterlaunchcontrol")
def launch_control(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.left.pop(0)
    if action == "try_cancel":
        mods.ignore("async", "shared::cta", "mbarrier::complete_tx::bytes", "b128")
        multicast = mods.flag("multicast::cluster::all")
        target, barrier = e.address(i.operands[0]), e.address(i.operands[1])
        return [f"M.sync.try_cancel({e.site},m,{target[0]},{target[1]},{barrier[0]},{barrier[1]},{multicast})"]
    what = mods.left.pop(0)
    mods.left.clear()
    response = e.raw(i.operands[-1])
    if what == "is_canceled":
        return put(e.raw(i.operands[0]), f"({response}[:,3]&u32(1))!=0")
    if what.startswith("get_first_ctaid::"):
        return put(e.raw(i.operands[0]), f"{response}[:,{'xyz'.index(what[-1])}]")
    raise UnsupportedPTX(i.text)
