"""Instructions that look across the 32 lanes of a warp."""

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
            np.flatnonzero(wrong.reshape(-1)), site,
        )  # fmt: skip


def whole_warps(m: Any, count: int, what: str, site: int, threads: int = 32) -> Array:
    """(warps, threads) lane indices; a part of a warp (or warpgroup) is a fault."""
    if m is True:
        return np.arange(count).reshape(-1, threads)
    groups = m.reshape(-1, threads)
    some, every = groups.any(1), groups.all(1)
    if (some & ~every).any():
        first = int(np.flatnonzero(some & ~every)[0])
        raise CollectiveError(
            f"{what} executed by {int(groups[first].sum())} of {threads} threads",
            first * threads + np.flatnonzero(groups[first]), site,
        )  # fmt: skip
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
    if mode == "ballot":
        value: Any = (chosen.astype(u64) << np.arange(32, dtype=u64)).sum(1)
    elif mode == "any":
        value = chosen.any(1)
    elif mode == "all":
        value = (chosen | ~active).all(1)
    else:
        value = (chosen | ~active).all(1) | ~chosen.any(1)
    put(m, d, np.repeat(value, 32))


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


def reduce(m: Any, op: str, kind: str, absolute: bool, nan: bool, d: Array, a: Any) -> None:
    active = _active(m, len(d))
    dtype = {"f32": f32, "s32": np.int32}.get(kind, u32)
    x = lanes_of(a, len(d)).view(dtype).reshape(-1, 32)
    if absolute:
        x = np.abs(x)
    if kind == "f32":
        neutral = -np.inf if op == "max" else np.inf
        pick = {("max", True): np.max, ("max", False): np.nanmax, ("min", True): np.min, ("min", False): np.nanmin}
        result = pick[op, nan](np.where(active, x, f32(neutral)), axis=1)
    elif op in ("max", "min"):
        limit = np.iinfo(dtype).min if op == "max" else np.iinfo(dtype).max
        result = (np.max if op == "max" else np.min)(np.where(active, x, dtype(limit)), axis=1)
    elif op == "add":
        result = np.where(active, x, dtype(0)).sum(1, dtype=dtype)
    elif op in ("and", "or", "xor"):
        ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op]
        result = ufunc.reduce(np.where(active, x, dtype(-1 if op == "and" else 0) if dtype != u32 else
                                       u32(0xFFFFFFFF if op == "and" else 0)), axis=1)  # fmt: skip
    else:
        raise UnsupportedPTX(f"redux.sync.{op}")
    put(m, d.view(dtype), np.repeat(result, 32))
