"""Global, shared and local memory. Global addresses are the process's own; shared ones carry the block in bits 24 up.

A shared address that the kernel sees is `rank in cluster << 24 | offset`; adding the first block of the cluster gives
the physical index into one array for the whole grid, so that mapa and
CUTLASS's masks of peer addresses work by arithmetic.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import numerics as N
from ptx_emulator import tensormap
from ptx_emulator.alu import SIGNED, UINT, at, maximum, minimum
from ptx_emulator.errors import Fault, Misaligned, OutOfBounds, UnsupportedPTX
from ptx_emulator.numerics import Array, f32, u8, u16, u32, u64
from ptx_emulator.race import ASYNC, ATOMIC, Issue, Shadow

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

AddressOperand = tuple[Any, int]  # an address operand: base register and byte offset
SHARED_STRIDE = 1 << 24
WINDOWS = {"shared": 1 << 60, "local": 1 << 61}  # generic addresses of other than global memory
_FIRST_ADDRESS = 4096


def bytes_at(address: int, size: int) -> Array:
    """A view of the process's memory."""
    buffer: Any = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(buffer, u8)


_PROCESS = bytes_at(_FIRST_ADDRESS, (1 << 47) - _FIRST_ADDRESS)
_GLOBAL: dict[int, Array] = {n: _PROCESS.view(dtype) for n, dtype in N.UNSIGNED.items()}


def _storage(tensor: Any) -> set[tuple[int, int]]:
    """[first, last) of a CPU tensor's storage, if it has one."""
    with sys.modules["torch"]._C.DisableTorchFunction():  # no mode says that the tensor is elsewhere
        return _plain_storage(tensor)


def _plain_storage(tensor: Any) -> set[tuple[int, int]]:
    if tensor.device.type != "cpu" or tensor.layout is not sys.modules["torch"].strided:
        return set()
    try:
        storage = tensor.untyped_storage()
        first, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a fake or functional tensor has no storage, or no memory
        return set()
    return {(first, first + size)} if type(size) is int and size else set()  # a symbol while torch.compile traces


def torch_storages() -> set[tuple[int, int]]:
    """The storages of all live CPU tensors, if PyTorch is loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return set()
    kinds, new = {torch.Tensor}, [torch.Tensor]
    while new:
        new = [k for ptx_type in new for k in ptx_type.__subclasses__()]
        kinds.update(new)
    # An object refers to its type. A list of all objects would hold those that other threads are just building, and a
    # tuple that is referred to from elsewhere cannot grow.
    return set().union(*(_storage(each) for each in gc.get_referrers(*kinds) if type(each) in kinds))


def storages(arguments: Sequence[Any]) -> set[tuple[int, int]]:
    """The storages that a call's arguments lead to: those of the tensors among them, and all others where one of them
    may hold addresses. Those are integers of 64 bits; what else is neither a tensor nor a number may be anything.
    """
    torch = sys.modules.get("torch")
    tensors = [x for x in arguments if torch is not None and isinstance(x, torch.Tensor)]
    numbers = [x for x in arguments if x is None or isinstance(x, (int, float))]
    found = set().union(*map(_storage, tensors))
    wide = any(x.dtype in (torch.int64, torch.uint64) for x in tensors) if torch is not None else False
    if wide or len(tensors) + len(numbers) < len(arguments) or any(x is not None and x >= 1 << 32 for x in numbers):
        found |= torch_storages()
    return found


def merged(ranges: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, overlapping ones as one."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low < found[-1][1]:
            low, high = found[-1][0], max(found.pop()[1], high)
        found.append((low, high))
    return found


POINTER_TABLE_BYTES = 1 << 20


def reachable(ranges: set[tuple[int, int]], values: Sequence[bytes]) -> set[tuple[int, int]]:
    """The ranges that the kernel's parameters point into, directly or through tables of pointers.

    Tensors that the kernel was not given stay out of bounds, although the process could reach them. Memory up to 1 MiB
    is searched for further pointers, as a conservative garbage collector does. A tensor map may begin before its
    tensor, so its last element counts too.
    """
    ordered = sorted(ranges)
    first, last = (np.array([r[i] for r in ordered], np.int64) for i in (0, 1))
    found: set[int] = set()
    pending = [np.frombuffer(v[: len(v) // 8 * 8], np.int64) for v in values]
    ends = [tensormap.last_element(v) for v in values]
    pending += [np.array([end], np.int64) for end in ends if end is not None]
    while pending and ordered:
        words = pending.pop()
        index = np.searchsorted(first, words, side="right") - 1
        inside = (index >= 0) & (words < last[np.maximum(index, 0)])
        for number in np.unique(index[inside]).tolist():
            low, high = ordered[number]
            if number not in found:
                found.add(number)
                if high - low <= POINTER_TABLE_BYTES and low % 8 == 0:
                    pending.append(bytes_at(low, (high - low) // 8 * 8).view(np.int64))
    return {ordered[number] for number in found}


class Memory:
    def __init__(self, machine: Machine, ranges: set[tuple[int, int]]) -> None:
        self.machine = machine
        self.report = machine.report
        self.granule = machine.program.granule
        self.first, self.last = np.ascontiguousarray(np.array(merged(ranges), np.int64).reshape(-1, 2).T)
        blocks, self.shared_end = machine.blocks, machine.shared_end
        # Zero pages as they are touched: the C library's allocator would clear all the bytes of memory it reuses.
        self.shared = np.frombuffer(mmap.mmap(-1, blocks * SHARED_STRIDE, mmap.MAP_PRIVATE), u8)
        self.chunks = self.shared.view(np.complex128)  # 16 bytes each
        self.views: dict[int, Array] = {n: self.shared.view(dtype) for n, dtype in N.UNSIGNED.items()}
        for block in range(blocks):  # NaN in every format, which makes uninitialized reads visible
            self.shared[block * SHARED_STRIDE : block * SHARED_STRIDE + self.shared_end] = 0xFF
        self.local_bytes = -(-machine.program.kernel.local.bytes // 16) * 16
        self.local = np.full(machine.count * self.local_bytes, 0xFF, u8)
        self.local_views: dict[int, Array] = {n: self.local.view(dtype) for n, dtype in N.UNSIGNED.items()}
        self.shared_shadow = Shadow("shared memory", 0, True)
        self.global_shadows: dict[int, Shadow] = {}
        self.chunk_granules = 16 // self.granule
        self.shadow_stride = -(-self.shared_end // 16) * self.chunk_granules
        if machine.race.on:
            self.shared_shadow = Shadow("shared memory", blocks * self.shadow_stride, True, by_lane=True)

    # -- address spaces
    def check_global(self, address: Array, size: int, lanes: Array, site: int, what: str = "global access") -> Array:
        """Index of the range that contains each access."""
        range_index = np.searchsorted(self.first, address, side="right") - 1
        bad = (
            (range_index < 0) | (address + size > self.last[np.maximum(range_index, 0)])
            if len(self.first)
            else address >= 0
        )
        if bad.any():
            one = int(np.flatnonzero(bad)[0])
            first_bad = int(address[one])
            near = [
                f"{int(a):#x}..{int(b):#x}"
                for a, b in zip(self.first, self.last, strict=True)
                if min(abs(int(a) - first_bad), abs(int(b) - first_bad)) < 1 << 24
            ][:3]
            raise OutOfBounds(
                f"{what} out of bounds: {size} bytes at {first_bad:#x}, {int(bad.sum())} of {len(address)}; "
                f"allocations nearby: {', '.join(near) or 'none'}",
                lanes[bad] if len(lanes) == len(bad) else lanes,
                site,
            )
        return range_index

    def physical(self, lanes: Array, operand: AddressOperand, size: int, site: int) -> Array:
        """Physical shared addresses of `lanes`, checked."""
        address = at(operand, lanes)
        return self._physical(
            lanes, address & 0xFFFFFFFF if np.asarray(operand[0]).dtype == u64 else address, size, site
        )

    def _physical(self, lanes: Array, address: Array, size: int, site: int) -> Array:
        offset, rank = address & 0xFFFFFF, address >> 24
        bad = (offset + size > self.shared_end) | (rank < 0) | (rank >= self.machine.cluster_size)
        if bad.any():
            one = int(np.flatnonzero(bad)[0])
            raise OutOfBounds(
                f"shared access out of bounds: {size} bytes at +{int(offset[one]):#x} of rank {int(rank[one])}; the "
                f"block has {self.shared_end} bytes, the cluster {self.machine.cluster_size} blocks",
                lanes[bad],
                site,
            )
        physical = self.machine.cluster_base[lanes] + address
        gone = self.machine.running[physical >> 24] == 0
        if gone.any():
            name = self.machine.block_name(int(physical[gone][0]) >> 24)
            raise Fault(f"access to shared memory of {name}, which has ended", lanes[gone], site, "PE204")
        return physical

    def resolve(
        self, m: Any, space: str, operand: AddressOperand, size: int, site: int
    ) -> list[tuple[str, Array, Array]]:
        """(space, lanes, physical addresses); generic addresses can belong to several spaces."""
        lanes = self.machine.lanes(m)
        if not len(lanes):
            return []
        if space == "shared":
            return [(space, lanes, self.physical(lanes, operand, size, site))]
        address = at(operand, lanes)
        checks = {"shared": self._physical, "local": self._local, "global": self._global}
        if space != "generic":
            return [(space, lanes, checks[space](lanes, address, size, site))]
        parts = []
        for name, window in (WINDOWS | {"global": 0}).items():
            chosen = (address & sum(WINDOWS.values())) == window
            if chosen.any():
                some = address[chosen] & 0xFFFFFFFF if window else address[chosen]
                parts.append((name, lanes[chosen], checks[name](lanes[chosen], some, size, site)))
        return parts

    def _global(self, lanes: Array, address: Array, size: int, site: int) -> Array:
        self.check_global(address, size, lanes, site)
        return address

    def _local(self, lanes: Array, address: Array, size: int, site: int) -> Array:
        bad = (address < 0) | (address + size > self.local_bytes)
        if bad.any():
            raise OutOfBounds(f"local access out of bounds, +{int(address[bad][0]):#x}", lanes[bad], site)
        return lanes * self.local_bytes + address

    def array(self, space: str, size: int) -> tuple[Array, int]:
        if space == "global":
            return _GLOBAL[size], _FIRST_ADDRESS
        return (self.views if space == "shared" else self.local_views)[size], 0

    def _aligned(self, address: Array, size: int, lanes: Array, space: str, site: int) -> None:
        if (address & (size - 1)).any():
            bad = (address & (size - 1)) != 0
            raise Misaligned(f"{space} address {int(address[bad][0]):#x} is not a multiple of {size}", lanes[bad], site)

    # -- loads and stores
    def _access(
        self,
        site: int,
        m: Any,
        what: str,
        space: str,
        operand: AddressOperand,
        total: int,
        order: str,
        values: Sequence[Any] = (),
        cached: bool = True,
    ) -> Iterator[tuple[str, Array, Array]]:
        """(space, lanes, addresses), checked, counted and recorded for race detection.

        `values`: of a store; `cached`: whether L1 keeps what a load reads.
        """
        for where, lanes, address in self.resolve(m, space, operand, total, site):
            self._aligned(address, total, lanes, where, site)
            self.report._count_bytes(f"{where} {what}", len(lanes) * total)
            if self.machine.race.on and where != "local":
                if where == "shared" and what != "atomic":
                    self.report._count_conflicts(site, lanes, address, total)
                if where == "global" and what == "load":
                    blocks = self.machine.block_number(lanes)
                    self.report._count_loads("global load", lanes >> 5, blocks, address, total, cached=cached)
                elif where == "global":
                    self.report._count_sectors(f"global {what}", lanes >> 5, address, total)
                self.touch(site, where, lanes, address, total, what != "load", order, values)
            yield where, lanes, address
        if what != "load":
            self.machine.event += 1

    def load(
        self,
        site: int,
        m: Any,
        space: str,
        operand: AddressOperand,
        size: int,
        targets: list[Any],
        signed: bool,
        order: str,
        cached: bool,
    ) -> None:
        total = size * len(targets)
        for where, lanes, address in self._access(site, m, "load", space, operand, total, order, cached=cached):
            memory, first = self.array(where, min(size, 8))
            index = (address - first) // min(size, 8)
            for number, target in enumerate(targets):
                if target is None:
                    continue
                if size == 16:
                    pair = target.view(u64)
                    pair[lanes, 0], pair[lanes, 1] = (memory[index + 2 * number], memory[index + 2 * number + 1])
                    continue
                value = memory[index + number]
                if signed:
                    value = value.view(SIGNED[size]).astype(SIGNED[target.dtype.itemsize]).view(target.dtype)
                target[lanes] = value

    def store(
        self, site: int, m: Any, space: str, operand: AddressOperand, size: int, values: list[Any], order: str
    ) -> None:
        for where, lanes, address in self._access(site, m, "store", space, operand, size * len(values), order, values):
            memory, first = self.array(where, min(size, 8))
            index = (address - first) // min(size, 8)
            for number, value in enumerate(values):
                if size == 16:
                    pair = value.view(u64)
                    memory[index + 2 * number], memory[index + 2 * number + 1] = (pair[lanes, 0], pair[lanes, 1])
                else:
                    memory[index + number] = at(value, lanes).astype(UINT[size * 8])

    def atomic(
        self,
        site: int,
        m: Any,
        space: str,
        op: str,
        ptx_type: str,
        target: Any,
        operand: AddressOperand,
        values: list[Any],
        order: str,
        alignment: int,
    ) -> None:
        """One element; `alignment` is that of the whole vector where it is the first."""
        size = {"f16x2": 4, "bf16x2": 4, "b128": 16}.get(ptx_type) or int(
            "".join(c for c in ptx_type if c.isdigit())
        ) // 8
        if size == 16:
            raise UnsupportedPTX(f"atom.{op}.{ptx_type}")
        for where, lanes, address in self._access(site, m, "atomic", space, operand, size, order or "relaxed"):
            self._aligned(address, alignment, lanes, where, site)
            memory, first = self.array(where, size)
            index = (address - first) // size
            sources = [at(v, lanes).astype(UINT[size * 8]) for v in values]
            if target is None and ptx_type[0] in "us" and op in ("add", "min", "max"):
                dtype = SIGNED[size] if ptx_type[0] == "s" else UINT[size * 8]
                ufunc = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
                elements, which = np.unique(index, return_inverse=True)
                total = memory[elements].view(dtype)
                ufunc.at(total, which, sources[0].view(dtype))
                memory[elements] = total.view(memory.dtype)
                continue
            flushed = "f32.ftz" if where == "global" and ptx_type == "f32" else ptx_type
            for turn in turns(index):
                element = index[turn]
                old = memory[element]
                memory[element] = combine(op, flushed, old, *(s[turn] for s in sources))
                if target is not None:
                    target[lanes[turn]] = old

    # -- bookkeeping
    def shared_granules(self, address: Array, size: int) -> Array:
        """(n, granules) of shared accesses of `size` bytes."""
        start = (address >> 24) * self.shadow_stride + (address & 0xFFFFFF) // self.granule
        return start[:, None] + np.arange(max(1, size // self.granule))

    def global_granules(self, address: Array, size: int) -> tuple[Shadow, Array]:
        """Shadow and granules of accesses within one allocation."""
        number = int(np.searchsorted(self.first, address[0], side="right")) - 1
        shadow = self.global_shadows.get(number)
        if shadow is None:
            length = int(self.last[number] - self.first[number])
            shadow = Shadow(f"global memory {number}", -(-length // self.granule) + 1, False, by_lane=True)
            self.global_shadows[number] = shadow
        start = (address - self.first[number]) // self.granule
        return shadow, start[:, None] + np.arange(max(1, size // self.granule))

    def touched_by_agent(
        self,
        site: int,
        address: Array,
        size: int,
        issue: Issue,
        component: int,
        epoch: int,
        write: bool,
        flags: int = ASYNC,
    ) -> None:
        """Asynchronous accesses of `size` bytes of shared memory."""
        granules = self.shared_granules(address, size)
        self.machine.race.by_agent(site, self.shared_shadow, granules, issue, component, epoch, write, flags)

    def chunks_by_agent(self, site: int, chunks: Array, issue: Issue, component: int, epoch: int, write: bool) -> None:
        """Asynchronous accesses to 16-byte chunks, by their numbers."""
        per = self.chunk_granules
        rows = (chunks >> 20) * (self.shadow_stride // per) + (chunks & 0xFFFFF)
        self.machine.race.by_agent(site, self.shared_shadow, rows, issue, component, epoch, write, per=per)

    def _unchanged(self, space: str, values: Sequence[Any], size: int, lanes: Array, address: Array) -> Array:
        """Where a store of `values`, `size` bytes per lane, leaves a granule as it is: (lanes, granules per lane)."""
        element = min(size // len(values), 8)
        memory, first = self.array(space, element)
        old = memory[((address - first) // element)[:, None] + np.arange(size // element)]
        new = self._stored(values, size, lanes)
        return (old.view(np.uint8).reshape(new.shape) == new).all(2)

    def _stored(self, values: Sequence[Any], size: int, lanes: Array) -> Array:
        """What a store of `values` writes: (lanes, granules per lane, bytes of a granule)."""
        element = min(size // len(values), 8)
        if size // len(values) == 16:
            new = np.concatenate([value.view(u64)[lanes] for value in values], 1)
        else:
            each = (at(value, lanes).astype(UINT[element * 8]) for value in values)
            new = np.stack([np.broadcast_to(value, len(lanes)) for value in each], 1)
        return np.ascontiguousarray(new).view(np.uint8).reshape(len(lanes), -1, self.granule)

    def touch(
        self,
        site: int,
        space: str,
        lanes: Array,
        address: Array,
        size: int,
        write: bool,
        order: str,
        values: Sequence[Any] = (),
    ) -> None:
        """An access by lanes, which need not belong together; `values`: what they store, if known."""
        race, flags = self.machine.race, ATOMIC if order else 0
        if order:
            race.strong(lanes >> 5, address, order)
        same = partial(self._unchanged, space, values, size) if values else None
        if space == "shared":
            index = self.shared_granules(address, size)
            same = same and partial(same, lanes, address)
            stored = partial(self._stored, values, size, lanes) if values else None
            race.by_lanes(site, self.shared_shadow, index, lanes, write, flags, True, same, stored)
            return
        found = np.searchsorted(self.first, address, side="right") - 1
        for number in np.unique(found):
            chosen = found == number
            shadow, index = self.global_granules(address[chosen], size)
            again = same and partial(same, lanes[chosen], address[chosen])
            stored = partial(self._stored, values, size, lanes[chosen]) if values else None
            race.by_lanes(site, shadow, index, lanes[chosen], write, flags, True, again, stored)


def turns(index: Array) -> Iterator[Any]:
    """Positions of `index` in groups without a repeated element; equal elements keep their order."""
    if len(index) == 1 or len(np.unique(index)) == len(index):
        yield slice(None)
        return
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    turn = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    for number in range(int(turn.max()) + 1):
        yield order[turn == number]


_COMBINE = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
}


def combine(op: str, ptx_type: str, old: Array, *sources: Array) -> Array:
    """One atomic or reduction step on arrays of raw values."""
    new = sources[0]
    if op == "exch":
        return new
    if op == "cas":
        return np.where(old == new, sources[1], old)
    if op == "inc":
        return np.where(old >= new, 0, old + old.dtype.type(1)).astype(old.dtype)
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - old.dtype.type(1)).astype(old.dtype)
    if ptx_type in ("f16", "bf16", "f16x2", "bf16x2"):
        widen, narrow = (N.bf16_to_f32, N.f32_to_bf16) if ptx_type[0] == "b" else (N.f16_to_f32, N.f32_to_f16)
        a, b = (widen(np.ascontiguousarray(x).view(u16)) for x in (old, new))
        c = a + b if op == "add" else (minimum if op == "min" else maximum)(a, b, False)
        return narrow(c).astype(u16).view(old.dtype).reshape(old.shape)
    signed = SIGNED[old.dtype.itemsize] if ptx_type[0] == "s" else old.dtype
    dtype: Any = {"f32": f32, "f32.ftz": f32, "f64": np.float64}.get(ptx_type, signed)
    a, b = np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(new).view(dtype)
    if ptx_type == "f32.ftz" and op == "add":
        return N.flush(N.flush(a) + N.flush(b)).view(u32)
    return _COMBINE[op](a, b).view(old.dtype)
