"""Tensor and bulk copies between global and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import tensormap
from ptx_emulator.alu import lanes_of
from ptx_emulator.errors import Fault, Misaligned, UnsupportedPTX
from ptx_emulator.memory import bytes_at, combine
from ptx_emulator.numerics import UNSIGNED, Array, u64
from ptx_emulator.race import ASYNC, ATOMIC, Issue
from ptx_emulator.tensormap import TensorMap
from ptx_emulator.warp import whole_warps

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


class TMA:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    # -- operands
    def _one(self, value: Any, lane: int) -> int:
        return int(lanes_of(value, self.machine.count)[lane])

    def _map(self, address: int, lane: int, site: int) -> TensorMap:
        address &= (1 << 60) - 1
        self.machine.memory.check_global(np.array([address]), 128, np.array([lane]), site, "tensor map")
        if address % 64:
            raise Misaligned(f"tensor map at {address:#x} is not 64-byte aligned", [lane], site)
        return tensormap.decode(bytes(bytes_at(address, 128)))

    def _coordinates(self, values: list[Any], lane: int, tensor: TensorMap, site: int) -> tuple[int, ...]:
        found = [int(np.uint32(self._one(v, lane)).view(np.int32)) for v in values]
        if len(found) != len(tensor.dims):
            raise Fault(f"{len(found)} coordinates for a tensor map of rank {len(tensor.dims)}", [lane], site)
        if tensor.packed:
            found[0] //= 2
        return tuple(found)

    def _box(
        self, tensor: TensorMap, place: tuple[int, ...], lane: int, site: int
    ) -> tuple[Array, tuple[slice, ...], int, int] | None:
        """The part of the box inside the tensor: a view of global memory, its place in the box, address and span."""
        low = [max(0, -c) for c in place]
        high = [min(b, d - c) for b, d, c in zip(tensor.box, tensor.dims, place, strict=True)]
        if any(h <= l for l, h in zip(low, high, strict=True)):  # noqa: E741
            return None
        address = tensor.address + sum((c + s) * t for c, s, t in zip(place, low, tensor.strides, strict=True))
        shape = [h - s for s, h in zip(low, high, strict=True)]
        span = sum((n - 1) * t for n, t in zip(shape, tensor.strides, strict=True)) + tensor.element
        self.machine.memory.check_global(np.array([address]), span, np.array([lane]), site,
                                         f"tensor copy at coordinates {place}")  # fmt: skip
        base = bytes_at(address, span)[: tensor.element].view(UNSIGNED[tensor.element])
        view = np.lib.stride_tricks.as_strided(base, tuple(shape[::-1]), tuple(tensor.strides[::-1]))
        return view, tuple(slice(s, h) for s, h in zip(low[::-1], high[::-1], strict=True)), address, span

    def _chunks(self, place: int, size: int, mode: int) -> Array:
        """Indices of the 16-byte chunks of a tile that starts at the physical address `place`."""
        return tensormap.swizzle(place + np.arange(0, size, 16), mode) >> 4

    def _targets(self, lane: int, place: int, mask: int | None) -> list[int]:
        if mask is None:
            return [place >> 24]
        first = int(self.machine.cluster_base[lane]) >> 24
        blocks = [first + rank for rank in range(16) if mask >> rank & 1]
        if not blocks or blocks[-1] >= first + self.machine.cluster_size:
            raise Fault(f"multicast mask {mask:#x} in a cluster of {self.machine.cluster_size}", [lane])
        return blocks

    # -- loads
    def load(
        self, site: int, m: Any, target: Any, target_offset: int, descriptor: Any, coordinates: list[Any], barrier: Any,
        barrier_offset: int, mask: Any, pair: bool,
    ) -> None:  # fmt: skip
        machine = self.machine
        lanes = machine.lanes(m)
        if not len(lanes):
            return
        places = machine.memory.physical(lanes, target, target_offset, 16, site)
        signals = machine.memory.physical(lanes, barrier, barrier_offset, 8, site)
        for lane, place, signal in zip(lanes.tolist(), places.tolist(), signals.tolist(), strict=True):
            tensor = self._map(self._one(descriptor, lane), lane, site)
            where = self._coordinates(coordinates, lane, tensor, site)
            blocks = self._targets(lane, place, None if mask is None else self._one(mask, lane))
            if place % 128:
                raise Misaligned(f"tensor copy to shared +{place & 0xFFFFFF:#x}: not 128-byte aligned", [lane], site)
            issue = machine.race.issue(lane >> 5) if machine.race.on else None
            operation = self._load_operation(
                site, lane, tensor, where, place, signal, blocks, mask is not None, pair, issue
            )
            machine.queues.issue(None, operation)

    def _load_operation(
        self, site: int, lane: int, tensor: TensorMap, where: tuple[int, ...], place: int, signal: int,
        blocks: list[int], multicast: bool, pair: bool, issue: Issue | None,
    ) -> Callable[[], None]:  # fmt: skip
        memory = self.machine.memory
        size = tensor.box_bytes

        def signal_of(block: int) -> int:
            home = block if multicast else signal >> 24
            if pair:  # the barrier may be that of the other block of the pair: parity of its own address
                home = (block & ~1) | ((signal >> 24) & 1)
            return home << 24 | signal & 0xFFFFFF

        def run() -> None:
            box = np.zeros(tensor.box[::-1], UNSIGNED[tensor.element])
            inside = self._box(tensor, where, lane, site)
            if inside is not None:
                box[inside[1]] = inside[0]
                if issue is not None:
                    self._global_read(site, inside, issue, signal_of(blocks[0]))
            data = box.reshape(-1).view(np.complex128)
            self.machine.report.count_bytes("global to shared TMA", size * len(blocks))
            for block in blocks:
                base = block << 24 | place & 0xFFFFFF
                memory.physical(np.array([lane]), np.uint32(base - int(self.machine.cluster_base[lane])), 0, size, site)
                chunks = self._chunks(base, size, tensor.swizzle)
                if issue is not None:
                    self._write_shadow(site, chunks, issue, signal_of(block))
                memory.chunks[chunks] = data
                self.machine.sync.complete(signal_of(block), size, site, issue)
            self.machine.event += 1

        return run

    def _write_shadow(self, site: int, chunks: Array, issue: Issue, signal: int) -> None:
        sync, memory = self.machine.sync, self.machine.memory
        granules = memory.shared_granules(chunks << 4, 16)
        self.machine.race.by_agent(site, memory.shared_shadow, granules, issue, sync.component(signal),
                                   sync.next_phase(signal, site), True)  # fmt: skip

    def _global_granules(self, inside: tuple[Array, tuple[slice, ...], int, int]) -> tuple[Any, Array]:
        """Shadow granules of a box view: rows are contiguous, outer dimensions strided."""
        view, _, address, _ = inside
        memory = self.machine.memory
        offsets = np.zeros(1, np.int64)
        for count, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
            offsets = (offsets[:, None] + np.arange(count) * stride).reshape(-1)
        row = max(view.shape[-1] * view.itemsize, memory.granule)
        starts = address + offsets
        found = np.searchsorted(memory.first, starts, side="right") - 1
        return memory.global_granules(starts, row, found)

    def _global_read(self, site: int, inside: Any, issue: Issue, signal: int) -> None:
        memory, sync = self.machine.memory, self.machine.sync
        number = int(np.searchsorted(memory.first, inside[2], side="right")) - 1
        if number in memory.global_shadows:  # only memory that this launch also writes can race
            shadow, granules = self._global_granules(inside)
            self.machine.race.by_agent(site, shadow, granules, issue, sync.component(signal),
                                       sync.next_phase(signal, site), False)  # fmt: skip

    # -- stores
    def store(
        self,
        site: int,
        m: Any,
        descriptor: Any,
        coordinates: list[Any],
        source: Any,
        source_offset: int,
        reduction: str,
    ) -> None:
        machine, memory = self.machine, self.machine.memory
        lanes = machine.lanes(m)
        if not len(lanes):
            return
        places = memory.physical(lanes, source, source_offset, 16, site)
        done: set[Any] = set()
        for lane, place in zip(lanes.tolist(), places.tolist(), strict=True):
            tensor = self._map(self._one(descriptor, lane), lane, site)
            where = self._coordinates(coordinates, lane, tensor, site)
            # The DSL lets a whole warp issue a store without electing a lane; the chip issues one copy for the warp.
            key = (lane >> 5, place, tensor, where)
            if key in done:
                continue
            done.add(key)
            if place % 128:
                raise Misaligned(f"tensor copy from shared +{place & 0xFFFFFF:#x}: not 128-byte aligned", [lane], site)
            chunks = self._chunks(place, tensor.box_bytes, tensor.swizzle)
            inside = self._box(tensor, where, lane, site)
            machine.report.count_bytes("shared to global TMA", tensor.box_bytes)
            if inside is None:
                continue
            if machine.race.on:
                self._store_shadow(site, lane, tensor, chunks, inside, bool(reduction))
            machine.async_copies.add("bulk", np.array([lane]), self._store_operation(tensor, chunks, inside, reduction))

    def _store_operation(
        self, tensor: TensorMap, chunks: Array, inside: Any, reduction: str
    ) -> Callable[[Array], None]:
        memory = self.machine.memory

        def run(_: Array) -> None:
            data = memory.chunks[chunks].view(UNSIGNED[tensor.element]).reshape(tensor.box[::-1])[inside[1]]
            view = inside[0]
            view[...] = combine(reduction, tensor.kind, view.copy(), np.ascontiguousarray(data)) if reduction else data
            self.machine.event += 1

        return run

    def _store_shadow(
        self, site: int, lane: int, tensor: TensorMap, chunks: Array, inside: Any, reduction: bool
    ) -> None:
        """Only what is stored is read: the part of the box outside the tensor may never have been written."""
        machine, memory = self.machine, self.machine.memory
        marks = np.zeros(tensor.box[::-1], bool)
        marks[inside[1]] = True
        per_chunk = marks.reshape(len(chunks), -1)
        granules = memory.shared_granules(chunks << 4, 16)
        wanted = np.repeat(per_chunk, granules.shape[1] // per_chunk.shape[1] or 1, axis=1)
        if wanted.shape != granules.shape:
            wanted = per_chunk.reshape(len(chunks), granules.shape[1], -1).any(2)
        copies, issue = machine.async_copies, machine.race.issue(lane >> 5)
        epoch = copies.epoch("bulk", lane)
        machine.race.by_agent(site, memory.shared_shadow, granules[wanted], issue,
                              copies.component("bulk", "read", lane), epoch, False)  # fmt: skip
        shadow, rows = self._global_granules(inside)
        machine.race.by_agent(site, shadow, rows, issue, copies.component("bulk", "write", lane), epoch, True,
                              ASYNC | (ATOMIC if reduction else 0))  # fmt: skip

    # -- copies without a tensor map
    def _bulk_check(self, lane: int, a: int, b: int, size: int, site: int) -> None:
        if size % 16 or a % 16 or b % 16:
            raise Misaligned(f"cp.async.bulk of {size} bytes: addresses and size must be multiples of 16", [lane], site)

    def bulk_load(
        self,
        site: int,
        m: Any,
        space: str,
        target: Any,
        target_offset: int,
        source: Any,
        source_offset: int,
        size: Any,
        barrier: Any,
        barrier_offset: int,
        mask: Any,
    ) -> None:
        machine, memory = self.machine, self.machine.memory
        lanes = machine.lanes(m)
        signals = memory.physical(lanes, barrier, barrier_offset, 8, site)
        for lane, signal in zip(lanes.tolist(), signals.tolist(), strict=True):
            count = self._one(size, lane)
            place = int(memory.physical(np.array([lane]), target, target_offset, count, site)[0])
            origin = self._one(source, lane) + source_offset
            if space == "global":
                memory.check_global(np.array([origin]), count, np.array([lane]), site, "cp.async.bulk")
            else:
                origin = int(memory.physical(np.array([lane]), source, source_offset, count, site)[0])
            self._bulk_check(lane, place, origin, count, site)
            blocks = self._targets(lane, place, None if mask is None else self._one(mask, lane))
            issue = machine.race.issue(lane >> 5) if machine.race.on else None
            machine.queues.issue(
                None, self._bulk_operation(site, space, origin, place, count, signal, blocks, mask is not None, issue)
            )

    def _bulk_operation(
        self,
        site: int,
        space: str,
        origin: int,
        place: int,
        count: int,
        signal: int,
        blocks: list[int],
        multicast: bool,
        issue: Issue | None,
    ) -> Callable[[], None]:
        machine, memory = self.machine, self.machine.memory

        def run() -> None:
            data = bytes_at(origin, count) if space == "global" else memory.shared[origin : origin + count].copy()
            machine.report.count_bytes(f"{space.split('::')[0]} to shared bulk", count * len(blocks))
            for block in blocks:
                base = block << 24 | place & 0xFFFFFF
                there = (block if multicast else signal >> 24) << 24 | signal & 0xFFFFFF
                if issue is not None:
                    self._write_shadow(site, np.arange(base, base + count, 16) >> 4, issue, there)
                    if space != "global":
                        granules = memory.shared_granules(np.arange(origin, origin + count, 16), 16)
                        machine.race.by_agent(
                            site,
                            memory.shared_shadow,
                            granules,
                            issue,
                            machine.sync.component(there),
                            machine.sync.next_phase(there, site),
                            False,
                        )
                memory.shared[base : base + count] = data
                machine.sync.complete(there, count, site, issue)
            machine.event += 1

        return run

    def bulk_store(
        self, site: int, m: Any, target: Any, target_offset: int, source: Any, source_offset: int, size: Any,
        reduction: str, kind: str,
    ) -> None:  # fmt: skip
        machine, memory = self.machine, self.machine.memory
        for lane in machine.lanes(m).tolist():
            count, one = self._one(size, lane), np.array([lane])
            place = int(memory.physical(one, source, source_offset, count, site)[0])
            address = self._one(target, lane) + target_offset
            self._bulk_check(lane, place, address, count, site)
            found = memory.check_global(np.array([address]), count, one, site, "cp.async.bulk")
            machine.report.count_bytes("shared to global bulk", count)
            if machine.race.on:
                copies, issue = machine.async_copies, machine.race.issue(lane >> 5)
                epoch = copies.epoch("bulk", lane)
                pieces = np.arange(place, place + count, 16)
                machine.race.by_agent(site, memory.shared_shadow, memory.shared_granules(pieces, 16), issue,
                                      copies.component("bulk", "read", lane), epoch, False)  # fmt: skip
                shadow, granules = memory.global_granules(np.array([address]), count, found)
                machine.race.by_agent(
                    site,
                    shadow,
                    granules,
                    issue,
                    copies.component("bulk", "write", lane),
                    epoch,
                    True,
                    ASYNC | (ATOMIC if reduction else 0),
                )

            def run(_: Array, place: int = place, address: int = address, count: int = count) -> None:
                data, view = memory.shared[place : place + count], bytes_at(address, count)
                if reduction:
                    width = {"bf16": 2, "f16": 2}.get(kind) or int(kind[1:]) // 8
                    dtype = UNSIGNED[width]
                    data = combine(reduction, kind, view.view(dtype).copy(), data.view(dtype)).view(np.uint8)
                view[...] = data
                machine.event += 1

            machine.async_copies.add("bulk", one, run)

    # -- edits of a tensor map
    def replace(
        self, site: int, m: Any, space: str, address: Any, offset: int, name: str, ordinal: int, value: Any
    ) -> None:
        machine, memory = self.machine, self.machine.memory
        for lane in machine.lanes(m).tolist():
            if space == "global":
                place = (self._one(address, lane) + offset) & ((1 << 60) - 1)
                memory.check_global(np.array([place]), 128, np.array([lane]), site, "tensor map")
                raw = bytes_at(place, 128)
            else:
                place = int(memory.physical(np.array([lane]), address, offset, 128, site)[0])
                raw = memory.shared[place : place + 128]
            number = self._one(value, lane)
            if name == "global_address":
                raw.view(u64)[0] = number
            elif name == "global_dim":
                raw.view(np.uint32)[8 + ordinal] = (number - 1) & 0xFFFFFFFF
            elif name == "global_stride":
                raw.view(np.uint32)[tensormap.FIELD_OF_STRIDE // 4 + ordinal] = number >> 4
            elif name == "box_dim":
                raw[55 + ordinal] = number - 1
            else:
                raise UnsupportedPTX(f"tensormap.replace.tile.{name}")

    def copy_map(self, site: int, m: Any, target: Any, target_offset: int, source: Any, source_offset: int) -> None:
        machine, memory = self.machine, self.machine.memory
        for warp in whole_warps(m, machine.count, "tensormap.cp_fenceproxy", site):
            lane = int(warp[0])
            place = int(memory.physical(warp[:1], source, source_offset, 128, site)[0])
            address = (self._one(target, lane) + target_offset) & ((1 << 60) - 1)
            memory.check_global(np.array([address]), 128, warp[:1], site, "tensor map")
            bytes_at(address, 128)[...] = memory.shared[place : place + 128]
