"""Instructions that exchange data between the 32 lanes of a warp."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.alu import lanes_of, put
from ptx_emulator.errors import CollectiveError, UnsupportedPTX
from ptx_emulator.numerics import Array, f32, u32, u64


def _active(m: Any, count: int) -> Array:
    return (np.ones(count, bool) if m is True else m).reshape(-1, 32)


def check_members(m: Any, members: Any, count: int, what: str, site: int) -> None:
    """Every lane named in the member mask must execute the instruction, and every executing lane must be named."""
    active = _active(m, count)
    bits = (active.astype(u64) << np.arange(32, dtype=u64)).sum(1).astype(u32)
    named = lanes_of(members, count).view(u32).reshape(-1, 32)
    wrong = active & (named != bits[:, None])
    if wrong.any():
        lane = int(np.flatnonzero(wrong.reshape(-1))[0])
        raise CollectiveError(
            f"{what}: member mask {int(named.reshape(-1)[lane]):#010x}, executed by {int(bits[lane // 32]):#010x}",
            np.flatnonzero(wrong.reshape(-1)),
            site,
        )


def gathered(m: Any, members: Any, count: int, site: int) -> Array:
    """Which lanes may pass a `bar.warp.sync`: those whose member mask names only lanes that have arrived."""
    active = _active(m, count)
    bits = (active.astype(u64) << np.arange(32, dtype=u64)).sum(1).astype(u32)[:, None]
    named = lanes_of(members, count).view(u32).reshape(-1, 32)
    outside = active & (named >> np.arange(32, dtype=u32) & u32(1) == 0)
    if outside.any():
        lane = int(np.flatnonzero(outside.reshape(-1))[0])
        raise CollectiveError(
            f"bar.warp.sync: member mask {int(named.reshape(-1)[lane]):#010x} does not name the lane {lane & 31} that "
            "executes it",
            np.flatnonzero(outside.reshape(-1)),
            site,
        )
    return (active & ((named & ~bits) == 0)).reshape(-1)


def whole_warps(m: Any, count: int, what: str, site: int, threads: int = 32) -> Array:
    """(warps, threads) lane indices; a fault if only some lanes of a warp (or warpgroup) are active."""
    if m is True:
        return np.arange(count).reshape(-1, threads)
    groups = m.reshape(-1, threads)
    some, every = groups.any(1), groups.all(1)
    if (some & ~every).any():
        first = int(np.flatnonzero(some & ~every)[0])
        raise CollectiveError(
            f"{what} executed by {int(groups[first].sum())} of {threads} threads",
            first * threads + np.flatnonzero(groups[first]),
            site,
        )
    return np.flatnonzero(m).reshape(-1, threads)


def elect(m: Any, d: Array | None, p: Array) -> None:
    active = _active(m, len(p))
    leader = np.argmax(active, 1)
    put(m, p, (np.arange(32)[None, :] == leader[:, None]).reshape(-1))
    if d is not None:
        put(m, d, np.repeat(leader, 32))


def shuffle(m: Any, mode: str, d: Array, p: Array | None, a: Any, b: Any, c: Any, site: int) -> None:
    count = len(d)
    lane = np.arange(count) & 31
    b = np.asarray(b).astype(np.int64) & 31
    c = np.asarray(c).astype(np.int64)
    segment, clamp = (c >> 8) & 31, c & 31
    highest = (lane & segment) | (clamp & ~segment)
    lowest = lane & segment
    source = {"idx": lowest | (b & ~segment), "bfly": lane ^ b, "up": lane - b, "down": lane + b}[mode]
    valid = source >= highest if mode == "up" else source <= highest
    source = (np.arange(count) & ~31) + np.where(valid, source, lane)
    if m is not True and not m[source[m]].all():
        bad = np.flatnonzero(m)[~m[source[m]]]
        raise CollectiveError(f"shfl.{mode} reads a lane that does not execute it", bad, site)
    value = lanes_of(a, count)[source]
    put(m, d, value)
    if p is not None:
        put(m, p, valid)


def vote(m: Any, mode: str, d: Array, p: Any) -> None:
    active = _active(m, len(d))
    chosen = lanes_of(p, len(d)).reshape(-1, 32) & active
    some, every = chosen.any(1), (chosen | ~active).all(1)
    bits = (chosen.astype(u64) << np.arange(32, dtype=u64)).sum(1)
    put(m, d, np.repeat({"ballot": bits, "any": some, "all": every, "uni": every | ~some}[mode], 32))


def match(m: Any, mode: str, d: Array, p: Array | None, a: Any) -> None:
    active, value = _active(m, len(d)), lanes_of(a, len(d)).reshape(-1, 32)
    same = (value[:, :, None] == value[:, None, :]) & active[:, None, :]
    bits = (same.astype(u64) << np.arange(32, dtype=u64)).sum(2)
    if mode == "all":
        every = (same | ~active[:, None, :]).all(2)
        bits = np.where(every, bits, u64(0))
        if p is not None:
            put(m, p, every.reshape(-1))
    put(m, d, bits.reshape(-1))


def reduce(m: Any, op: str, ptx_type: str, absolute: bool, nan: bool, d: Array, a: Any) -> None:
    dtype: Any = {"f32": f32, "s32": np.int32}.get(ptx_type, u32)
    x = lanes_of(a, len(d)).view(dtype).reshape(-1, 32)
    if ptx_type == "f32":
        table: dict[str, tuple[np.ufunc, Any]] = {
            "max": (np.maximum, -np.inf) if nan else (np.fmax, np.nan),
            "min": (np.minimum, np.inf) if nan else (np.fmin, np.nan),
        }
    else:
        limits = np.iinfo(dtype)
        table = {
            "max": (np.maximum, limits.min),
            "min": (np.minimum, limits.max),
            "add": (np.add, 0),
            "or": (np.bitwise_or, 0),
            "xor": (np.bitwise_xor, 0),
            "and": (np.bitwise_and, -1 if limits.min else limits.max),
        }
    if op not in table:
        raise UnsupportedPTX(f"redux.sync.{op}.{ptx_type}")
    ufunc, neutral = table[op]
    result = ufunc.reduce(np.abs(x) if absolute else x, 1, dtype, initial=dtype(neutral), where=_active(m, len(d)))
    put(m, d.view(dtype), np.repeat(result, 32))
