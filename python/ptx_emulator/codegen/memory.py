"""Control flow, loads, stores, atomics, barriers and fences."""

from __future__ import annotations

from ptx_emulator.codegen.arithmetic import put
from ptx_emulator.codegen.emitter import Emitter, Modifiers, bits_of, handles
from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.memory import WINDOWS
from ptx_emulator.ptx import Address, Imm, Instruction, Reg, Symbol
from ptx_emulator.ptx.parser import Operand

# Hints that change neither values nor order.
CACHE_HINTS = (
    "nc",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "cop",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::cache_hint",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_first",
    "L2::evict_last",
    "L2::evict_normal",
)
SCOPES = ("cta", "cluster", "gpu", "sys")


def space_of(mods: Modifiers, *names: str) -> str:
    found = mods.take("global", "shared", "shared::cta", "shared::cluster", "local", "param", "const", "param::entry")
    return found.split("::")[0] if found else "generic"


def order_of(mods: Modifiers) -> str:
    order = mods.take("acquire", "release", "acq_rel", "relaxed", "volatile", "weak")
    mods.ignore(*SCOPES, "mmio")
    return "" if order == "weak" else "relaxed" if order == "volatile" else order


@handles("bra", "ret", "exit")
def branch(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    """Threads that leave go on behind the last block."""
    mods.ignore("uni")
    number = len(e.graph.blocks)
    if i.opcode == "bra":
        assert isinstance(i.operands[0], Symbol)
        number = e.graph.block_of_label[i.operands[0].name]
    return [f"return ('go',{e.guard(i) or True},{number})"]


@handles("trap", "brkpt")
def trap(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    return [f"M.trap({e.site},m)"]


@handles("nanosleep")
def sleep(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("u32")
    return ["return ('sleep',m)"]


@handles("setmaxnreg", "prefetch", "prefetchu", "discard", "applypriority", "createpolicy", "pmevent")
def hint(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if i.opcode == "setmaxnreg":
        mods.ignore("inc", "dec", "sync", "aligned", "u32")
        (count,) = i.operands
        if not isinstance(count, Imm) or count.value not in range(24, 257, 8):
            raise mods.unsupported("allowed: a multiple of 8 from 24 to 256")
        return [f"W.whole_warps(m,M.count,'setmaxnreg',{e.site})"]
    mods.left.clear()
    if i.opcode == "createpolicy":
        return put(e.raw(i.operands[0]), "u64(0)")
    return []


@handles("griddepcontrol")
def dependent_launch(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    """Launches run one after another here, so the wait is over before it begins."""
    mods.need("wait", "launch_dependents")
    return []


@handles("ld", "ldu")
def load(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    ptx_type = mods.last()
    order, space = order_of(mods), space_of(mods)
    cached = not order and not i.has("cg", "cv")
    mods.ignore(*CACHE_HINTS)
    mods.take("v2", "v4", "v8")
    target, source = i.operands[0], i.operands[1]
    items = e.vector(target)
    size = bits_of(ptx_type) // 8
    assert isinstance(source, Address)
    if space in ("param", "const") and isinstance(source.base, Symbol) and source.base.name in e.kernel.parameters:
        base = e.kernel.parameters[source.base.name].offset + source.offset
        return [
            f"M.load_parameter(m,{e.raw(x)},{base + n * size},{size},{ptx_type[0] == 's'})"
            for n, x in enumerate(items)
            if not (isinstance(x, Reg) and x.name == "_")
        ]
    if space in ("param", "const"):
        space = "generic"
    signed = ptx_type[0] == "s"
    return e.call("memory.load", repr(space), e.address(source), size, e.list_of(items), signed, repr(order), cached)


@handles("st")
def store(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if mods.take("async"):
        return remote(e, i, mods, "")
    ptx_type = mods.last()
    order, space = order_of(mods), space_of(mods)
    mods.ignore(*CACHE_HINTS)
    mods.take("v2", "v4", "v8")
    size = bits_of(ptx_type) // 8
    values = [e.immediate(x, "u", size * 8) if isinstance(x, Imm) else e.raw(x) for x in e.vector(i.operands[1])]
    return e.call("memory.store", repr(space), e.address(i.operands[0]), size, f"[{','.join(values)}]", repr(order))


def remote(e: Emitter, i: Instruction, mods: Modifiers, op: str) -> list[str]:
    """st.async, red.async: a store to a block of the cluster whose bytes complete on an mbarrier there."""
    ptx_type = mods.last()
    mods.need("mbarrier::complete_tx::bytes")
    mods.ignore("weak", "relaxed", "cluster", "shared::cluster", "v2", "v4")
    values = ",".join(e.value(x, "u", bits_of(ptx_type)) for x in e.vector(i.operands[1]))
    return e.call(
        "async_copies.remote",
        repr(op),
        repr(ptx_type),
        bits_of(ptx_type) // 8,
        e.address(i.operands[0]),
        f"[{values}]",
        e.address(i.operands[2]),
    )


@handles("atom", "red")
def atomic(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if mods.take("async"):
        return remote(e, i, mods, mods.need("add", "min", "max", "and", "or", "xor", "inc", "dec"))
    ptx_type = mods.last()
    order, space = order_of(mods) or "relaxed", space_of(mods)
    mods.ignore(*CACHE_HINTS, "noftz")
    vector = mods.take("v2", "v4", "v8")
    op = mods.need("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    bits = bits_of(ptx_type)
    operands = list(i.operands)
    target: Operand = operands.pop(0) if i.opcode == "atom" else Reg("_")
    columns, targets = [operands[1:]], [target]
    if vector:
        columns = [[x] for x in e.vector(operands[1])]
        targets = e.vector(target) if i.opcode == "atom" else [target] * len(columns)
    lines = []
    for number, (values, each) in enumerate(zip(columns, targets, strict=True)):
        sources = "[" + ",".join(e.value(v, "u", bits) for v in values) + "]"
        lines += e.call(
            "memory.atomic",
            repr(space),
            repr(op),
            repr(ptx_type),
            e.raw(each),
            e.address(operands[0], number * bits // 8),
            sources,
            repr(order),
            len(columns) * bits // 8 if number == 0 else 1,
        )
    return lines


@handles("cvta")
def convert_address(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    to, space, width = mods.flag("to"), space_of(mods), bits_of(mods.last())
    target, source = i.operands
    value = e.value(source, "u", e.width(source))
    if space == "generic":
        raise UnsupportedPTX(i.text)
    if space in WINDOWS:
        value = f"np.asarray({value}).astype(u64)" + ("&u64(0xffffffff)" if to else f"|u64({WINDOWS[space]})")
    return put(e.value(target, "u", width), value)


@handles("mapa")
def map_address(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.need("shared::cluster")
    if mods.need("u32", "u64") == "u64":
        raise UnsupportedPTX(i.text)
    target, address, rank = (e.value(x) for x in i.operands)
    return put(target, f"({address}&u32(0xffffff))|(np.asarray({rank})<<u32(24))")


@handles("getctarank")
def rank_of(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.need("shared::cluster")
    mods.ignore("u32")
    return put(e.value(i.operands[0]), f"{e.value(i.operands[1])}>>u32(24)")


# -- fences
@handles("fence", "membar")
def fence(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    if mods.left and mods.left[0] == "proxy":
        ptx_type = mods.left[1]
        if ptx_type not in ("async", "async::generic", "tensormap::generic", "alias"):
            raise UnsupportedPTX(i.text)
        mods.ignore("proxy", ptx_type, "global", "shared::cta", "shared::cluster", *SCOPES)
        if ptx_type == "alias":
            return []
        if ptx_type != "tensormap::generic":
            mods.ignore("acquire", "release", "sync_restrict::shared::cta", "sync_restrict::shared::cluster")
            return ["M.race.proxy_fence(m)"]
        if mods.need("acquire", "release") == "release":
            return ["M.tma.release_maps(m)"]
        return e.call("tma.acquire_map", e.address(i.operands[0]))
    init = mods.flag("mbarrier_init")
    mods.ignore(
        *SCOPES,
        "gl",
        "acq_rel",
        "sc",
        "acquire",
        "release",
        "sync_restrict::shared::cta",
        "sync_restrict::shared::cluster",
    )
    return ["M.race.init_fence(m)" if init else "M.race.memory_fence(m)"]


# -- barriers
@handles("bar", "barrier")
def barrier(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("cta", "aligned", "all", "b32", "release", "acquire")
    if mods.take("cluster"):
        relaxed = mods.flag("relaxed")
        if mods.need("arrive", "wait") == "arrive":
            return e.call("sync.cluster_arrive", relaxed)
        return [f"return ('wait',m,M.sync.cluster_wait({e.site},m))"]
    if mods.take("warp"):
        mods.need("sync")
        gathered = f"W.gathered(m,{e.value(i.operands[0])},M.count,{e.site})"
        return [f"t={gathered}", "M.race.converge(t)", "return ('wait',m,t)"]
    action, operands, reduction = (mods.need("sync", "arrive", "red"), list(i.operands), "None")
    if action == "red":
        op = mods.need("popc", "and", "or")
        mods.need("u32" if op == "popc" else "pred")
        reduction = f"({op!r},{e.raw(operands.pop(0))},{e.predicate(operands.pop())})"
    number, *rest = (e.value(x) for x in operands)
    count = rest[0] if rest else "M.rounded_block"
    if action == "arrive":
        return e.call("sync.named_wait", number, count, None, None)
    return [f"return ('bar',m,{number},{count},{reduction})"]


@handles("mbarrier")
def mbarrier(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    action = mods.left.pop(0)
    mods.ignore("b64", "shared", "shared::cta", "shared::cluster", *SCOPES)
    relaxed = mods.flag("relaxed")
    mods.ignore("release", "acquire")
    operands = list(i.operands)
    if action in ("try_wait", "test_wait"):
        test = wait_test(e, i, mods)
        if action == "try_wait":
            return [f"return ('try',m,{test},{e.raw(operands[0])})"]
        return put(e.raw(operands[0]), test)
    if action == "init":
        return e.call("sync.init", e.address(operands[0]), e.value(operands[1]))
    if action == "inval":
        return e.call("sync.invalidate", e.address(operands[0]))
    if action in ("expect_tx", "complete_tx"):
        value = f"{'' if action == 'expect_tx' else '-'}np.asarray({e.value(operands[1], 's')})"
        return e.call("sync.arrive", e.address(operands[0]), 0, value, True, None)
    if action != "arrive":
        raise UnsupportedPTX(i.text)
    expect = mods.flag("expect_tx")
    if mods.flag("noComplete"):
        raise UnsupportedPTX(i.text)
    state = "None"
    if not isinstance(operands[0], Address):
        state = e.raw(operands.pop(0))
    argument = e.value(operands[1]) if len(operands) > 1 else "1"
    count, bytes_ = ("1", argument) if expect else (argument, "0")
    return e.call("sync.arrive", e.address(operands[0]), count, bytes_, relaxed, state)


def wait_test(e: Emitter, i: Instruction, mods: Modifiers) -> str:
    parity = mods.flag("parity")
    return e.call("sync.test", e.address(i.operands[1]), e.value(i.operands[2], "u", 32 if parity else 64), parity)[0]


@handles("wait_loop")
def wait_loop(e: Emitter, i: Instruction, mods: Modifiers) -> list[str]:
    mods.ignore("mbarrier", "try_wait", "test_wait", "b64", "shared", "shared::cta", "acquire", "relaxed", *SCOPES)
    return [f"return ('wait',m,{wait_test(e, i, mods)})"]
