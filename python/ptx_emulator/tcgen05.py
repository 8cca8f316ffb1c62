"""Tensor memory and the fifth-generation tensor core instructions. Nothing here has been compared with a chip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import matrix
from ptx_emulator import numerics as N
from ptx_emulator.alu import at, one
from ptx_emulator.errors import CollectiveError, TensorMemoryError, UnsupportedPTX
from ptx_emulator.memory import AddressOperand
from ptx_emulator.numerics import Array, f32, u16, u32
from ptx_emulator.race import Issue, Shadow
from ptx_emulator.tensorcore import TCGEN05_RATE
from ptx_emulator.warp import whole_warps

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

LANES, COLUMNS = 128, 512
_F8 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "i8": {0: "u8", 1: "s8"},
    "mxf4": {5: "e2m1", 1: "e2m1"},
    "mxf4nvf4": {5: "e2m1", 1: "e2m1"},
}
_K = {"f16": 16, "tf32": 8, "i8": 32, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_SCALES = {
    "block32": lambda k: k // 32,
    "block16": lambda k: k // 16,
    "scale_vec::1X": lambda k: 1,
    "scale_vec::2X": lambda k: 2,
    "scale_vec::4X": lambda k: 4,
}
_LANE = np.arange(LANES)
# tcgen05.cp: lanes that are written, and the row of shared memory that each of them gets
_COPIES = {
    "128x256b": (_LANE, _LANE),
    "128x128b": (_LANE, _LANE),
    "4x256b": (_LANE[:4] * 32, _LANE[:4]),
    "64x128b.warpx2::02_13": (_LANE, _LANE % 64),
    "32x128b.warpx4": (_LANE, _LANE % 32),
    "64x128b.warpx2::01_23": (_LANE, _LANE // 64 * 32 + _LANE % 32),
}


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of tcgen05.mma."""

    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    negate: tuple[bool, bool]
    k_major: tuple[bool, bool]
    scale_ids: tuple[int, int]
    scale_format: str
    saturate: bool


def instruction_descriptor(raw: int, kind: str, scaled: bool) -> InstructionDescriptor:
    formats = (raw >> 7 & 7, raw >> 10 & 7)
    known = 7 << 7 | 7 << 10 | 0xF << 13 | 0x3F << 17 | 0x1F << 24 | 3 << 4
    known |= 1 << 23 | 3 << 29 if scaled else 8 * (kind == "i8")
    if raw & ~known:
        raise UnsupportedPTX(f"tcgen05 instruction descriptor {raw:#010x}: unknown bits {raw & ~known:#x}")
    names = _FORMATS.get(kind, _F8)
    if formats[0] not in names or formats[1] not in names:
        raise UnsupportedPTX(f"tcgen05.mma kind::{kind} with element formats {formats}")
    d = "f32" if scaled else {0: "f16", 1: "f32", 2: "s32"}.get(raw >> 4 & 3, "")
    if not d or (kind == "i8") != (d == "s32"):
        raise UnsupportedPTX(f"tcgen05.mma kind::{kind} with accumulator format {raw >> 4 & 3}")
    m, n = (raw >> 24 & 31) << 4, (raw >> 17 & 63) << 3
    ids = (raw >> 29 & 3, raw >> 4 & 3) if scaled else (0, 0)
    return InstructionDescriptor(
        m,
        n,
        _K[kind],
        names[formats[0]],
        names[formats[1]],
        d,
        (bool(raw >> 13 & 1), bool(raw >> 14 & 1)),
        (not raw >> 15 & 1, not raw >> 16 & 1),
        ids,
        "ue8m0" if raw >> 23 & 1 else "ue4m3",
        bool(raw >> 3 & 1),
    )


def fragment(shape: str, count: int, half: int) -> tuple[Array, Array]:
    """Lane and column of each register (32 threads, count) of tcgen05.ld/st, relative to the address."""
    t, i = np.arange(32)[:, None], np.arange(count)[None, :]
    if shape == "32x32b":
        return t + 0 * i, i + 0 * t
    if shape == "16x128b":
        return t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)
    if shape == "16x256b":
        return t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)
    if shape == "16x64b":
        return t // 4 % 8 + 8 * (t % 2) + 0 * i, t // 2 % 2 + 2 * i
    # 16x32bx2: the upper 16 threads take the columns at the second address
    return t % 16 + 0 * i, i + half * (t // 16)


class TensorMemory:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        blocks = machine.blocks if machine.program.uses_tensor_memory else 0
        self.words = np.full((blocks, LANES, COLUMNS), 0xFFFFFFFF, u32)
        self.allocated = np.zeros((blocks, COLUMNS), np.int64)  # number of the allocation, 0 = free
        self.allocations = 0
        self.relinquished = np.zeros(blocks, bool)
        self.shadow = Shadow("tensor memory", blocks * LANES * COLUMNS if machine.race.on else 0, True)
        self.sequence: dict[int, int] = {}
        self.stored: dict[int, int] = {}
        warps = machine.count // 32
        self.loads, self.loader = np.zeros(warps, np.int64), np.full(warps, -1)  # tcgen05.ld; their component

    # -- allocation
    def alloc(self, site: int, m: Any, holder: AddressOperand, columns: Any) -> None:
        machine = self.machine
        for warp in whole_warps(m, machine.count, "tcgen05.alloc", site):
            lane = int(warp[0])
            block, count = int(machine.block_of[lane]), one(columns, lane)
            if count < 32 or count > COLUMNS or count & (count - 1):
                raise TensorMemoryError(
                    f"tcgen05.alloc of {count} columns: a power of two from 32 to 512", warp, site, "PE404"
                )
            if self.relinquished[block]:
                raise TensorMemoryError("tcgen05.alloc after relinquish_alloc_permit", warp, site, "PE404")
            free = self.allocated[block] == 0
            starts = [s for s in range(0, COLUMNS, count) if free[s : s + count].all()]
            if not starts:
                raise TensorMemoryError(
                    f"tcgen05.alloc of {count} columns would wait: {int(free.sum())} of 512 are free",
                    warp,
                    site,
                    "PE404",
                )
            self.allocations += 1
            self.allocated[block, starts[0] : starts[0] + count] = self.allocations
            address = machine.memory.physical(warp[:1], holder, 4, site)
            machine.memory.views[4][int(address[0]) >> 2] = starts[0]
            if machine.race.on:
                granules = machine.memory.shared_granules(address, 4)
                machine.race.by_lanes(site, machine.memory.shared_shadow, granules, warp[:1], True)
        machine.event += 1

    def dealloc(self, site: int, m: Any, address: Any, columns: Any) -> None:
        machine = self.machine
        for warp in whole_warps(m, machine.count, "tcgen05.dealloc", site):
            lane = int(warp[0])
            block, start, count = int(machine.block_of[lane]), one(address, lane) & 0xFFFF, one(columns, lane)
            columns_ = self.allocated[block, start : start + count]
            number = int(columns_[0]) if len(columns_) else 0
            if not number or (columns_ != number).any() or int((self.allocated[block] == number).sum()) != count:
                raise TensorMemoryError(
                    f"tcgen05.dealloc of {count} columns at {start}: no such allocation", warp, site, "PE404"
                )
            if machine.race.on:  # a deallocation is a write: whoever used the columns must be done
                granules = self.granules(block, np.arange(LANES), start + np.arange(count))
                machine.race.by_lanes(site, self.shadow, granules, np.repeat(warp[:1], len(granules)), True)
                self.shadow.write[granules] = 0
            columns_[:] = 0

    def relinquish(self, site: int, m: Any) -> None:
        for warp in whole_warps(m, self.machine.count, "tcgen05.relinquish_alloc_permit", site):
            self.relinquished[int(self.machine.block_of[warp[0]])] = True

    def finish(self) -> None:
        if self.allocated.any():
            block = int(np.flatnonzero(self.allocated.any(1))[0])
            columns = int((self.allocated[block] > 0).sum())
            text = f"{self.machine.block_name(block)} ended with {columns} tensor memory columns allocated"
            self.machine.fault(TensorMemoryError(text, code="PE405"))

    def check(self, block: int, column: int, count: int, site: int, what: str) -> None:
        columns_ = self.allocated[block, column : column + count]
        if len(columns_) < count or (columns_ == 0).any():
            raise TensorMemoryError(
                f"{what}: columns {column}..{column + count - 1} of {self.machine.block_name(block)} are not all "
                "allocated",
                [],
                site,
                "PE403",
            )

    # -- accesses as the race detector sees them
    def granules(self, block: int, lanes: Any, columns: Any) -> Array:
        return ((block * LANES + np.asarray(lanes)[:, None]) * COLUMNS + np.asarray(columns)[None, :]).reshape(-1)

    def touch(self, site: int, lane: int, issue: Issue | None, granules: Array, write: bool) -> None:
        """Tensor memory is reached by one proxy only, hence flags 0."""
        if issue is not None:
            self.machine.race.by_agent(
                site, self.shadow, granules, issue, self.component(lane), self.sequence.get(lane, 0) + 1, write, 0
            )

    def read_shared(self, site: int, lane: int, issue: Issue | None, chunks: Array) -> None:
        if issue is not None:
            epoch = self.sequence.get(lane, 0) + 1
            self.machine.memory.chunks_by_agent(site, chunks, issue, self.component(lane), epoch, False)

    def component(self, lane: int) -> int:
        return self.machine.race.component(("tcgen05", lane), f"tcgen05 of {self.machine.warp_name(lane >> 5)}")

    # -- ld, st
    def move(
        self,
        site: int,
        m: Any,
        action: str,
        shape: str,
        packed: bool,
        registers: list[Array],
        operand: AddressOperand,
        half: int,
    ) -> None:
        machine = self.machine
        what = f"tcgen05.{action}.{shape}"
        warps = whole_warps(m, machine.count, what, site)
        addresses = at(operand, warps)
        if (addresses != addresses[:, :1]).any():
            raise CollectiveError(f"{what}: lanes of a warp give different addresses", warps[0], site)
        lane0, column0 = addresses[:, 0] >> 16 & 0x7F, addresses[:, 0] & 0xFFFF
        quarter = machine.thread[warps[:, 0]] // 32 % 4
        if (lane0 // 32 != quarter).any():
            bad = int(np.flatnonzero(lane0 // 32 != quarter)[0])
            raise TensorMemoryError(
                f"{what}: warp {int(machine.thread[warps[bad, 0]]) // 32} reaches only lanes "
                f"{32 * int(quarter[bad])} to {32 * int(quarter[bad]) + 31}, address has lane {int(lane0[bad])}",
                warps[bad],
                site,
                "PE403",
            )
        row, column = fragment(shape, len(registers), half)
        if packed:  # each register takes two neighbouring columns
            row, column = (np.repeat(row, 2, 1), np.stack([2 * column, 2 * column + 1], 2).reshape(32, -1))
        count = row.shape[1]
        blocks = machine.block_of[warps[:, 0]]
        for block, first in zip(blocks.tolist(), column0.tolist(), strict=True):
            self.check(block, first, int(column.max()) + 1, site, what)
        index = (blocks[:, None, None], lane0[:, None, None] + row, column0[:, None, None] + column)
        flat = warps.reshape(-1)
        machine.report._count_bytes(f"tensor memory {'load' if action == 'ld' else 'store'}", 4 * len(flat) * count)
        if machine.race.on:
            granules = ((index[0] * LANES + index[1]) * COLUMNS + index[2]).reshape(len(flat), -1)
            self._move_shadow(site, granules, flat, action == "st")
        if action == "ld":
            values = self.words[index].reshape(len(flat), count)
            if packed:
                values = (values[:, 0::2] & u32(0xFFFF)) | (values[:, 1::2] << u32(16))
            for number, register in enumerate(registers):
                register[flat] = values[:, number]
            return
        values = np.stack([at(x, flat) for x in registers], 1)
        if packed:
            values = np.stack([values & u32(0xFFFF), values >> u32(16)], 2).reshape(len(flat), -1)
        self.words[index] = values.reshape(index[1].shape)
        machine.event += 1

    def _move_shadow(self, site: int, granules: Array, lanes: Array, write: bool) -> None:
        race, warps = self.machine.race, lanes[::32] >> 5
        if not write:
            self.loads[warps] += 1
            granules = granules.reshape(len(warps), -1)
            race.by_components(site, self.shadow, granules, warps, self.loaders(warps), self.loads[warps])
            return
        for warp in warps.tolist():
            warp_granules = granules[lanes >> 5 == warp]
            component = race.component(("tcgen05.st", warp), f"tcgen05.st of {self.machine.warp_name(warp)}")
            issue = race.issue(np.array([warp * 32]))
            race.by_agent(site, self.shadow, warp_granules, issue, component, self.stored.get(warp, 0) + 1, True, 0)

    def loaders(self, warps: Array) -> Array:
        """The components that load for some warps."""
        for warp in warps[self.loader[warps] < 0].tolist():
            name = f"tcgen05.ld of {self.machine.warp_name(warp)}"
            self.loader[warp] = self.machine.race.component(("tcgen05.ld", warp), name)
        return self.loader[warps]

    def loaded(self, warps: Array, loads: Array) -> None:
        """Records that the first `loads` loads of each warp have completed."""
        self.machine.race.learn(warps, self.loaders(warps), loads)

    def wait(self, site: int, m: Any, what: str) -> None:
        machine = self.machine
        warps = whole_warps(m, machine.count, f"tcgen05.{what}", site)[:, 0] >> 5
        if machine.race.on and what == "wait::ld":
            self.loaded(warps, self.loads[warps])
        elif machine.race.on:
            for warp in warps.tolist():
                self.stored[warp] = self.stored.get(warp, 0) + 1
                component = machine.race.component(("tcgen05.st", warp), f"tcgen05.st of {machine.warp_name(warp)}")
                machine.race.learn(np.array([warp]), component, self.stored[warp])

    # -- queue of one thread: mma, cp and commit run in order
    def enqueue(self, lane: int, operation: Callable[[], None]) -> None:
        self.machine.queues.issue(("tcgen05", lane), operation)

    def pair_of(self, block: int, pair: bool, site: int) -> list[int]:
        if not pair:
            return [block]
        if self.machine.cluster_size % 2:
            raise CollectiveError("cta_group::2 in a cluster of odd size", [], site)
        return [block & ~1, block | 1]

    def commit(self, site: int, m: Any, barrier: AddressOperand, mask: Any) -> None:
        machine = self.machine

        def start(lane: int, address: int) -> None:
            blocks, issue = [address >> 24], machine.race.issue(lane)
            end = machine.timeline.open[("tcgen05", lane)] if machine.timeline.on else 0
            if mask is not None:
                bits, first = one(mask, lane), int(machine.cluster_base[lane]) >> 24
                blocks = [first + rank for rank in range(machine.cluster_size) if bits >> rank & 1]

            def run() -> None:
                machine.timeline.now = end
                known = None
                if issue is not None:
                    self.sequence[lane] = self.sequence.get(lane, 0) + 1
                    known = machine.race.empty()
                    known[:, self.component(lane)] = self.sequence[lane]
                for block in blocks:
                    machine.sync.agent_arrive(block << 24 | address & 0xFFFFFF, site, known, issue)

            self.enqueue(lane, run)

        for lane, address in zip(*(x.tolist() for x in machine.sync.barrier_addresses(site, m, barrier)), strict=True):
            start(lane, address)

    # -- cp: shared to tensor memory
    def copy(self, site: int, m: Any, pair: bool, form: str, target: AddressOperand, desc: Any) -> None:
        machine = self.machine
        if form not in _COPIES:
            raise UnsupportedPTX(f"tcgen05.cp.{form}")
        lanes, rows = _COPIES[form]
        words = 8 if "x256b" in form else 4

        def start(lane: int) -> None:
            descriptor, address = matrix.tcgen05_descriptor(one(desc, lane)), one(target, lane)
            blocks, issue = self.pair_of(int(machine.block_of[lane]), pair, site), machine.race.issue(lane)
            to, column = lanes + (address >> 16 & 0x7F), address & 0xFFFF
            if to[-1] >= LANES:
                raise UnsupportedPTX(f"tcgen05.cp.{form} to lane {address >> 16 & 0x7F}")

            def run() -> None:
                touch, height = partial(self.read_shared, site, lane, issue), int(rows.max()) + 1
                for block in blocks:
                    self.check(block, column, words, site, "tcgen05.cp")
                    data = matrix.read_rows(machine.memory, block, descriptor, height, words // 4, site, touch)
                    self.touch(site, lane, issue, self.granules(block, to, column + np.arange(words)), True)
                    self.words[block, to, column : column + words] = data.view(u32)[rows]
                    machine.report._count_bytes("shared to tensor memory", data.nbytes)

            self.enqueue(lane, run)

        for lane in machine.lanes(m).tolist():
            start(lane)

    # -- mma
    def mma(
        self,
        site: int,
        m: Any,
        pair: bool,
        kind: str,
        vector: str,
        target: AddressOperand,
        a: Any,
        b: Any,
        idesc: Any,
        enable: Any,
        scales: tuple[AddressOperand, AddressOperand] | None,
        disable: Any,
    ) -> None:
        """`a` is a descriptor, or an address in tensor memory."""
        machine = self.machine
        if disable is not None and any(np.asarray(x).any() for x in disable):
            raise UnsupportedPTX("tcgen05.mma with disable-output-lane")
        for lane in machine.lanes(m).tolist():
            blocks = self.pair_of(int(machine.block_of[lane]), pair, site)
            if pair and int(machine.block_of[lane]) & 1:
                raise CollectiveError("tcgen05.mma.cta_group::2 issued by the odd block of the pair", [lane], site)
            inst = instruction_descriptor(one(idesc, lane), kind, scales is not None)
            if isinstance(a, tuple) and inst.a in ("e2m1", "e2m3", "e3m2"):
                raise UnsupportedPTX("sub-byte A operand in tensor memory")
            factors = None
            if scales is not None:
                per = _SCALES[vector](inst.k) if vector else {"mxf8f6f4": 1, "mxf4": 2}.get(kind, 0)
                if not per:
                    raise UnsupportedPTX("tcgen05.mma.kind::mxf4nvf4 without a scale vector size")
                factors = (per, one(scales[0], lane), one(scales[1], lane))
            left = one(a, lane) if isinstance(a, tuple) else matrix.tcgen05_descriptor(one(a, lane))
            operation = Mma(
                site,
                lane,
                blocks,
                kind,
                inst,
                one(target, lane),
                left,
                matrix.tcgen05_descriptor(one(b, lane)),
                bool(one(enable, lane)),
                factors,
                machine.race.issue(lane),
            )
            self.enqueue(lane, partial(self.multiply, operation))
            end = machine.timeline.multiply(lane, inst.m * inst.n * inst.k, "tcgen05.mma")
            machine.timeline.hold(("tcgen05", lane), end)
            machine.report.operations["tcgen05 multiply-adds"] += inst.m * inst.n * inst.k
            machine.report.tensor_cycles += inst.m * inst.n * inst.k // TCGEN05_RATE[kind]

    def operand(self, op: Mma, block: int, descriptor: Any, rows: int, kind: str, k_major: bool) -> Array:
        touch, packed = partial(self.read_shared, op.site, op.lane, op.issue), op.kind in ("mxf4", "mxf4nvf4")
        memory, k = self.machine.memory, op.inst.k
        return matrix.read(memory, block, descriptor, rows, k, kind, k_major, op.site, touch, packed)

    def scale(self, op: Mma, block: int, address: int, rows: int, number: int, per: int) -> Array:
        """(rows, per) scale factors: row r at lane r % 32 of column base + r // 32, four bytes per word."""
        column, words = address & 0xFFFF, (rows + 31) // 32
        column &= 0x1FF
        if number + per > 4 or (per == 4 and number):
            raise UnsupportedPTX(f"scale factor id {number} with {per} scale factors per row")
        self.check(block, column, words, op.site, "scale factors")
        used = self.words[block, :32, column : column + words].T.reshape(-1)[:rows]
        lanes = np.arange(min(rows, 32))
        self.touch(op.site, op.lane, op.issue, self.granules(block, lanes, column + np.arange(words)), False)
        bytes_ = np.ascontiguousarray(used).view(np.uint8).reshape(rows, 4)
        return N.TABLES[op.inst.scale_format][bytes_[:, number : number + per]]

    def tensor_a(self, op: Mma, block: int, address: int, rows: int) -> Array:
        """(rows, k); with 64 rows of two blocks (128, k): each half of the lanes holds all rows for its columns."""
        inst = op.inst
        element = N.ELEMENT_BYTES[inst.a]
        lane, column, words = (address >> 16 & 0x7F, address & 0xFFFF, inst.k * element // 4)
        self.check(block, column, words, op.site, "A operand in tensor memory")
        lanes = np.arange(LANES)
        if rows == 64 and len(op.blocks) == 1 and lane in (0, 16):  # 16 rows in each quarter
            lanes = lane + lanes[:64] // 16 * 32 + lanes[:64] % 16
        elif lane:
            raise UnsupportedPTX(f"A operand in tensor memory with M = {inst.m}, lane {lane}")
        self.touch(op.site, op.lane, op.issue, self.granules(block, lanes, column + np.arange(words)), False)
        raw = np.ascontiguousarray(self.words[block, lanes, column : column + words])
        return N.to_f32(raw.view(N.UNSIGNED[element]), inst.a)

    def multiply(self, op: Mma) -> None:
        inst, blocks = op.inst, op.blocks
        rows, columns = inst.m // len(blocks), inst.n // len(blocks)
        B = np.concatenate([self.operand(op, block, op.b, columns, inst.b, inst.k_major[1]) for block in blocks])
        B = -B if inst.negate[1] else B
        for block in blocks:
            if isinstance(op.a, int):
                A = self.tensor_a(op, block, op.a, rows)
            else:
                A = self.operand(op, block, op.a, rows, inst.a, inst.k_major[0])
            A, right = (-A if inst.negate[0] else A), B
            if op.scales is not None:
                per, place_a, place_b = op.scales
                factors_a = self.scale(op, block, place_a, rows, inst.scale_ids[0], per)
                factors_b = self.scale(op, block, place_b, inst.n, inst.scale_ids[1], per)
                A = (A.reshape(rows, per, -1) * factors_a[:, :, None]).reshape(rows, inst.k)
                right = (B.reshape(inst.n, per, -1) * factors_b[:, :, None]).reshape(inst.n, inst.k)
            self._accumulate(op, block, A @ right.T)
        self.machine.event += 1

    def _accumulate(self, op: Mma, block: int, product: Array) -> None:
        rows, n = op.inst.m // len(op.blocks), product.shape[1]
        lane, column = op.target >> 16 & 0x7F, op.target & 0xFFFF
        if rows == 128 and not lane:  # layouts A and D: row = lane
            tiles_of_lane = {0: product}
        elif rows == 64 and len(op.blocks) == 1 and lane in (0, 16):  # F: 16 rows in each quarter
            tiles_of_lane = {32 * q + lane: product[16 * q : 16 * q + 16] for q in range(4)}
        elif rows == 64 and not lane:  # B: the right half of the columns in lanes 64 and up
            tiles_of_lane = {0: product[:64, : n // 2], 64: product[-64:, n // 2 :]}
        else:
            raise UnsupportedPTX(f"tcgen05.mma with M = {op.inst.m}, lane {lane}")
        for to, tile in tiles_of_lane.items():
            height, width = tile.shape
            self.check(block, column, width, op.site, "accumulator")
            view = self.words[block, to : to + height, column : column + width]
            if op.issue is not None:
                self._accumulator_shadow(op, op.issue, block, slice(to, to + height), slice(column, column + width))
            self._store(view, tile, op)

    def _accumulator_shadow(self, op: Mma, issue: Issue, block: int, lanes: slice, columns: slice) -> None:
        race, epoch = self.machine.race, self.sequence.get(op.lane, 0) + 1
        rows = slice(block * LANES + lanes.start, block * LANES + lanes.stop)
        if race.again(op.site, self.shadow, rows, columns, COLUMNS, self.component(op.lane), epoch):
            return
        granules = self.granules(block, np.arange(lanes.start, lanes.stop), np.arange(columns.start, columns.stop))
        if op.add:
            self.touch(op.site, op.lane, issue, granules, False)
        self.touch(op.site, op.lane, issue, granules, True)

    @staticmethod
    def _store(view: Array, tile: Array, op: Mma) -> None:
        if op.inst.d == "f16":  # one half per 32-bit column
            half = tile + (view & u32(0xFFFF)).astype(u16).view(np.float16).astype(f32) if op.add else tile
            view[...] = half.astype(np.float16).view(u16).astype(u32)
            return
        if op.inst.d == "s32":
            total = tile.astype(np.int64) + (view.view(np.int32) if op.add else 0)
            if op.inst.saturate:
                total = np.clip(total, -(1 << 31), (1 << 31) - 1)
            view[...] = total.astype(np.int32).view(u32)
            return
        target = view.view(f32)
        target[...] = target + tile if op.add else tile


@dataclass
class Mma:
    site: int
    lane: int
    blocks: list[int]
    kind: str
    inst: InstructionDescriptor
    target: int
    a: matrix.Descriptor | int  # or an address in tensor memory
    b: matrix.Descriptor
    add: bool
    scales: tuple[int, int, int] | None
    issue: Issue | None
