"""Tensor and bulk copies between global and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import tensormap
from ptx_emulator.alu import at, one
from ptx_emulator.errors import Fault, Misaligned, RaceError, UnsupportedPTX
from ptx_emulator.memory import AddressOperand, bytes_at, combine
from ptx_emulator.numerics import UNSIGNED, Array, f32, f32_to_tf32, u32
from ptx_emulator.race import ASYNC, ATOMIC, TENSOR_MAP, UNRECORDED, Issue
from ptx_emulator.report import SECTOR
from ptx_emulator.tensormap import TensorMap
from ptx_emulator.warp import whole_warps

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


def round_to_tf32(bits: Array) -> Array:
    """The rounding of loads through a tensor map of type tf32."""
    return np.where(np.isnan(bits.view(f32)), u32(0x7FFFE000), f32_to_tf32(bits.view(f32), "rn"))


class TMA:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.unreleased: dict[int, int] = {}
        self.acquired: dict[tuple[int, int], Array] = {}

    # -- operands
    def _address(self, operand: AddressOperand, lane: int, size: int, site: int, what: str) -> int:
        address = one(operand, lane) & ((1 << 60) - 1)
        self.machine.memory.check_global(np.array([address]), size, np.array([lane]), site, what)
        return address

    def _tile(
        self, site: int, lane: int, descriptor: AddressOperand, coordinates: list[Any], smem_address: int
    ) -> tuple[TensorMap, tuple[int, ...], Array]:
        """The tensor map, the coordinates, and the 16-byte chunks of the tile within a block's shared memory."""
        address = self._address(descriptor, lane, 128, site, "tensor map")
        if address % 64:
            raise Misaligned(f"tensor map at {address:#x} is not 64-byte aligned", [lane], site)
        if self.machine.race.on:
            self._check_map(site, lane, address)
        tensor = tensormap.decode(bytes(bytes_at(address, 128)))
        where = [int(np.uint32(one(v, lane)).view(np.int32)) for v in coordinates]
        if len(where) != len(tensor.dims):
            raise Fault(f"{len(where)} coordinates for a tensor map of rank {len(tensor.dims)}", [lane], site, "PE503")
        if tensor.packed:
            where[0] //= 2
        if smem_address % 128:
            raise Misaligned(f"tensor copy at shared +{smem_address & 0xFFFFFF:#x}: not 128-byte aligned", [lane], site)
        if where[0] * tensor.element % 16:  # an illegal instruction on the chip
            raise Misaligned(f"innermost coordinate {where[0]}: its bytes are not a multiple of 16", [lane], site)
        bytes_ = (smem_address & 0xFFFFFF) + tensor.tile_offsets
        return tensor, tuple(where), tensormap.swizzle(bytes_, tensor.swizzle) >> 4

    def _box(
        self, tensor: TensorMap, coordinates: tuple[int, ...], lane: int, site: int
    ) -> tuple[Array, tuple[slice, ...], int, int] | None:
        """The intersection of box and tensor: a view of global memory, its slices in the box, address and span."""
        low = [max(0, -c) for c in coordinates]
        high = [min(b, d - c) for b, d, c in zip(tensor.box, tensor.dims, coordinates, strict=True)]
        if any(h <= l for l, h in zip(low, high, strict=True)):  # noqa: E741
            return None
        address = tensor.at([c + s for c, s in zip(coordinates, low, strict=True)])
        shape = [h - s for s, h in zip(low, high, strict=True)]
        span = sum((n - 1) * t for n, t in zip(shape, tensor.strides, strict=True)) + tensor.element
        self.machine.memory.check_global(
            np.array([address]), span, np.array([lane]), site, f"tensor copy at coordinates {coordinates}"
        )
        base = bytes_at(address, span)[: tensor.element].view(UNSIGNED[tensor.element])
        view = np.lib.stride_tricks.as_strided(base, tuple(shape[::-1]), tuple(tensor.strides[::-1]))
        return (view, tuple(slice(s, h) for s, h in zip(low[::-1], high[::-1], strict=True)), address, span)

    def _targets(self, lane: int, smem_address: int, mask: Any) -> list[int]:
        if mask is None:
            return [smem_address >> 24]
        bits, first = one(mask, lane), int(self.machine.cluster_base[lane]) >> 24
        blocks = [first + rank for rank in range(16) if bits >> rank & 1]
        if not blocks or blocks[-1] >= first + self.machine.cluster_size:
            raise Fault(f"multicast mask {bits:#x} in a cluster of {self.machine.cluster_size}", [lane], code="PE503")
        return blocks

    # -- loads
    def load(
        self,
        site: int,
        m: Any,
        target: AddressOperand,
        descriptor: AddressOperand,
        coordinates: list[Any],
        barrier: AddressOperand,
        mask: Any,
        pair: bool,
    ) -> None:
        machine = self.machine
        lanes, memory = machine.lanes(m), machine.memory
        smem_addresses, signals = (memory.physical(lanes, target, 16, site), memory.physical(lanes, barrier, 8, site))

        def fetch(lane: int, tensor: TensorMap, where: tuple[int, ...], issue: Issue | None, signal: int) -> Array:
            box = np.zeros(tensor.box[::-1], UNSIGNED[tensor.element])
            inside = self._box(tensor, where, lane, site)
            if inside is not None:
                machine.report._count_rows("global to shared TMA", inside[0], inside[2])
            if inside is None:  # an H200 faults if the tensor's base address is unmapped; a store does not
                what = f"the beginning of a tensor, of a load wholly outside it at coordinates {where},"
                memory.check_global(np.array([tensor.address]), 1, np.array([lane]), site, what)
            else:
                box[inside[1]] = inside[0]
                number = int(np.searchsorted(memory.first, inside[2], side="right")) - 1
                if issue is not None and number in memory.global_shadows:  # only what this launch writes can race
                    completion = self.machine.sync.completion(signal, site)
                    self.machine.race.by_agent(site, *self._global_granules(inside), issue, *completion, False)
            return (round_to_tf32(box) if tensor.tf32 else box).reshape(-1).view(np.complex128)

        for lane, smem_address, signal in zip(lanes.tolist(), smem_addresses.tolist(), signals.tolist(), strict=True):
            tensor, where, chunks = self._tile(site, lane, descriptor, coordinates, smem_address)
            blocks, issue = (self._targets(lane, smem_address, mask), self.machine.race.issue(lane))
            homes = [block if mask is not None else signal >> 24 for block in blocks]
            if pair:  # bit 24 of the address selects the block of the pair that has the barrier
                homes = [home & ~1 | signal >> 24 & 1 for home in homes]
            self._deliver(
                site,
                lane,
                blocks,
                chunks,
                [home << 24 | signal & 0xFFFFFF for home in homes],
                issue,
                partial(fetch, lane, tensor, where),
                "global to shared TMA",
            )

    def bulk_load(
        self,
        site: int,
        m: Any,
        space: str,
        target: AddressOperand,
        source: AddressOperand,
        size: Any,
        barrier: AddressOperand,
        mask: Any,
    ) -> None:
        lanes, memory = self.machine.lanes(m), self.machine.memory
        signals = memory.physical(lanes, barrier, 8, site)

        def fetch(origin: int, count: int, issue: Issue | None, signal: int) -> Array:
            if space == "global":
                return bytes_at(origin, count).view(np.complex128)
            self._touch_shared(site, np.arange(origin, origin + count, 16) >> 4, issue, signal, False)
            return memory.chunks[origin >> 4 : origin + count >> 4]

        for lane, signal in zip(lanes.tolist(), signals.tolist(), strict=True):
            count, alone = one(size, lane), np.array([lane])
            smem_address = int(memory.physical(alone, target, count, site)[0])
            if space == "global":
                origin = self._address(source, lane, count, site, "cp.async.bulk")
            else:
                origin = int(memory.physical(alone, source, count, site)[0])
            self._bulk_check(lane, smem_address, origin, count, site)
            blocks = self._targets(lane, smem_address, mask)
            there = [(signal >> 24 if mask is None else block) << 24 | signal & 0xFFFFFF for block in blocks]
            chunks = np.arange(smem_address & 0xFFFFFF, (smem_address & 0xFFFFFF) + count, 16) >> 4
            self._deliver(
                site,
                lane,
                blocks,
                chunks,
                there,
                self.machine.race.issue(lane),
                partial(fetch, origin, count),
                f"{space.split('::')[0]} to shared bulk",
            )

    def _deliver(
        self,
        site: int,
        lane: int,
        blocks: Sequence[int],
        chunks: Array,
        signals: Sequence[int],
        issue: Issue | None,
        fetch: Callable[[Issue | None, int], Array],
        what: str,
    ) -> None:
        """Writes the same chunks of several blocks and completes their bytes on a barrier for each."""
        machine, memory, size = self.machine, self.machine.memory, 16 * len(chunks)
        low = int(chunks.min())
        extent = int(chunks.max()) + 1 - low
        end = machine.timeline.copy(lane, size, what)

        def run() -> None:
            machine.timeline.now = end
            data = fetch(issue, signals[0]).copy()
            machine.report._count_bytes(what, size * len(blocks))
            if what == "global to shared bulk":
                machine.report.sectors[what] += size // SECTOR
            for block, signal in zip(blocks, signals, strict=True):
                rank = u32(block - (int(machine.cluster_base[lane]) >> 24) << 24)
                memory.physical(np.array([lane]), (rank, 16 * low), 16 * extent, site)
                self.write(site, chunks + (block << 20), data, issue, signal)
            machine.event += 1

        machine.queues.issue(None, run)

    def write(self, site: int, chunks: Array, data: Array, issue: Issue | None, signal: int) -> None:
        """16-byte chunks that complete on a barrier."""
        self._touch_shared(site, chunks, issue, signal, True)
        self.machine.memory.chunks[chunks] = data
        self.machine.sync.complete(signal, 16 * len(chunks), site, issue)

    def _touch_shared(self, site: int, chunks: Array, issue: Issue | None, signal: int, write: bool) -> None:
        if issue is not None:
            completion = self.machine.sync.completion(signal, site)
            self.machine.memory.chunks_by_agent(site, chunks, issue, *completion, write)

    def _global_granules(self, inside: tuple[Array, tuple[slice, ...], int, int]) -> tuple[Any, Array]:
        """Shadow granules of a box view: rows are contiguous, outer dimensions strided."""
        view, _, address, _ = inside
        memory = self.machine.memory
        offsets = np.zeros(1, np.int64)
        for count, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
            offsets = (offsets[:, None] + np.arange(count) * stride).reshape(-1)
        row = max(view.shape[-1] * view.itemsize, memory.granule)
        return memory.global_granules(address + offsets, row)

    # -- stores
    def store(
        self,
        site: int,
        m: Any,
        descriptor: AddressOperand,
        coordinates: list[Any],
        source: AddressOperand,
        reduction: str,
    ) -> None:
        machine, memory = self.machine, self.machine.memory
        lanes = machine.lanes(m)
        done: set[Any] = set()
        sources = memory.physical(lanes, source, 16, site)
        # The DSL issues a store from a whole warp without electing a lane; the chip executes one copy per warp.
        values = np.stack([lanes >> 5, sources, *(at(x, lanes) for x in (descriptor, *coordinates))]).astype(np.int64)
        new = np.ones(len(lanes), bool)
        new[1:] = (values[:, 1:] != values[:, :-1]).any(0)
        for lane, smem_address in zip(lanes[new].tolist(), sources[new].tolist(), strict=True):
            tensor, where, chunks = self._tile(site, lane, descriptor, coordinates, smem_address)
            key = (lane >> 5, smem_address, tensor, where)
            if key in done:
                continue
            done.add(key)
            inside = self._box(tensor, where, lane, site)
            machine.report._count_bytes("shared to global TMA", tensor.box_bytes)
            if inside is not None:
                machine.report._count_rows("shared to global TMA", inside[0], inside[2])
                self._send(
                    site,
                    lane,
                    chunks + (smem_address >> 24 << 20),
                    tensor.box[::-1],
                    inside[1],
                    inside[0],
                    self._global_granules(inside),
                    reduction,
                    tensor.element_type,
                )

    def bulk_store(
        self,
        site: int,
        m: Any,
        target: AddressOperand,
        source: AddressOperand,
        size: Any,
        reduction: str,
        ptx_type: str,
    ) -> None:
        machine, memory = self.machine, self.machine.memory
        dtype = UNSIGNED[{"bf16": 2, "f16": 2}.get(ptx_type) or int(ptx_type[1:] or 8) // 8]
        for lane in machine.lanes(m).tolist():
            count = one(size, lane)
            smem_address = int(memory.physical(np.array([lane]), source, count, site)[0])
            address = self._address(target, lane, count, site, "cp.async.bulk")
            self._bulk_check(lane, smem_address, address, count, site)
            machine.report._count_bytes("shared to global bulk", count)
            machine.report.sectors["shared to global bulk"] += count // SECTOR
            view = bytes_at(address, count).view(dtype)
            rows = memory.global_granules(np.array([address]), count)
            self._send(
                site,
                lane,
                np.arange(smem_address, smem_address + count, 16) >> 4,
                view.shape,
                slice(None),
                view,
                rows,
                reduction,
                ptx_type,
            )

    def _send(
        self,
        site: int,
        lane: int,
        chunks: Array,
        shape: tuple[int, ...],
        inside_box: Any,
        view: Array,
        rows: Any,
        reduction: str,
        ptx_type: str,
    ) -> None:
        """Copies the elements `inside_box` of a box of `shape`, which lies in `chunks`, to a view of global memory."""
        machine, memory, race = self.machine, self.machine.memory, self.machine.race
        copies = machine.async_copies
        machine.timeline.hold(("bulk", lane), machine.timeline.copy(lane, 16 * len(chunks), "shared to global"))
        if race.on:  # shared memory outside the tensor's bounds may be uninitialized
            marks = np.zeros(shape, bool)
            marks[inside_box] = True
            granules = memory.shared_granules(chunks << 4, 16)
            wanted = np.repeat(marks.reshape(-1), view.itemsize).reshape(*granules.shape, -1).any(2)
            issue, epoch = race.issue(lane), copies.epoch("bulk", lane)
            race.by_agent(
                site,
                memory.shared_shadow,
                granules[wanted],
                issue,
                copies.component("bulk", "read", lane),
                epoch,
                False,
            )
            race.by_agent(
                site,
                *rows,
                issue,
                copies.component("bulk", "write", lane),
                epoch,
                True,
                ASYNC | (ATOMIC if reduction else 0),
            )

        def run(_: Array) -> None:
            data = np.ascontiguousarray(memory.chunks[chunks].view(view.dtype).reshape(shape)[inside_box])
            view[...] = combine(reduction, ptx_type, view.copy(), data) if reduction else data
            machine.event += 1

        copies.add("bulk", np.array([lane]), run)

    def _bulk_check(self, lane: int, a: int, b: int, size: int, site: int) -> None:
        if size % 16 or a % 16 or b % 16:
            raise Misaligned(f"cp.async.bulk of {size} bytes: addresses and size must be multiples of 16", [lane], site)

    # -- edits of a tensor map
    def replace(
        self, site: int, m: Any, space: str, target: AddressOperand, name: str, ordinal: int, value: Any
    ) -> None:
        machine, memory = self.machine, self.machine.memory
        if name not in tensormap.FIELDS:
            raise UnsupportedPTX(f"tensormap.replace.tile.{name}")
        first, size, encode = tensormap.FIELDS[name]
        for lane in machine.lanes(m).tolist():
            new = np.frombuffer(np.uint64(encode(one(value, lane))).tobytes()[:size], np.uint8)
            if space == "global":
                smem_address = self._address(target, lane, 128, site, "tensor map")
                raw = bytes_at(smem_address, 128)
                self.unreleased[smem_address] = lane >> 5
            else:
                smem_address = int(memory.physical(np.array([lane]), target, 128, site)[0])
                raw = memory.shared[smem_address : smem_address + 128]
            at = first + ordinal * size
            raw[at : at + size] = new
            if machine.race.on:
                memory.touch(site, space[:6], np.array([lane]), np.array([smem_address + at]), size, True, "")
        machine.event += 1

    def copy_map(self, site: int, m: Any, target: AddressOperand, source: AddressOperand) -> None:
        """tensormap.cp_fenceproxy: copies and releases."""
        machine, memory = self.machine, self.machine.memory
        for warp in whole_warps(m, machine.count, "tensormap.cp_fenceproxy", site):
            origin = memory.physical(warp[:1], source, 128, site)
            smem_address = self._address(target, int(warp[0]), 128, site, "tensor map")
            if machine.race.on:
                memory.touch(site, "shared", warp[:1], origin, 128, False, "")
                memory.touch(site, "global", warp[:1], np.array([smem_address]), 128, True, "")
            bytes_at(smem_address, 128)[...] = memory.shared[int(origin[0]) : int(origin[0]) + 128]
            self.unreleased.pop(smem_address, None)
        machine.event += 1

    def release_maps(self, m: Any) -> None:
        """fence.proxy.tensormap::generic.release"""
        race = self.machine.race
        if race.on:
            warps = race.warps_of(m).tolist()
            self.unreleased = {
                smem_address: warp for smem_address, warp in self.unreleased.items() if warp not in warps
            }
            race.memory_fence(m)

    def acquire_map(self, site: int, m: Any, operand: AddressOperand) -> None:
        """fence.proxy.tensormap::generic.acquire: what the warp knows of now holds for copies with this map."""
        race = self.machine.race
        if race.on:
            for lane in self.machine.lanes(m).tolist():
                address = self._address(operand, lane, 128, site, "tensor map")
                self.acquired[lane >> 5, address] = race.clock[lane >> 5, 0].copy()
            warps = race.warps_of(m)
            race.clock[warps, 0, warps] += 1

    def _check_map(self, site: int, lane: int, smem_address: int) -> None:
        """A map that this launch wrote must have been released, and acquired by the warp that uses it."""
        race, memory = self.machine.race, self.machine.memory
        if int(np.searchsorted(memory.first, smem_address, side="right")) - 1 not in memory.global_shadows:
            return
        if smem_address in self.unreleased:
            missing = "fence.proxy.tensormap::generic.release"
            text = f"tensor map at {smem_address:#x} was edited without {missing}"
            self.machine.fault(RaceError(text, [lane], site, "PE106"))
            return
        issue, known = race.issue(lane), self.acquired.get((lane >> 5, smem_address))
        issue.clock[1] = 0
        if known is not None:
            issue.clock[1, : len(known)] = known
        shadow, granules = memory.global_granules(np.array([smem_address]), 128)
        race.by_agent(
            site,
            shadow,
            granules,
            issue,
            race.component("tensor maps", "TMA"),
            0,
            False,
            ASYNC | UNRECORDED | TENSOR_MAP,
        )
