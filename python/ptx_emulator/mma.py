"""Warp and warpgroup matrices: ldmatrix, stmatrix, mma.sync, wgmma. Products are float32 BLAS, int8 exact."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import matrix
from ptx_emulator.alu import lanes_of
from ptx_emulator.errors import Fault, Misaligned, UnsupportedPTX
from ptx_emulator.numerics import ELEMENT_BYTES, UNSIGNED, Array, f32, to_f32, u16, u32
from ptx_emulator.race import Issue
from ptx_emulator.warp import whole_warps

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

_K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def shape_of(name: str) -> tuple[int, int, int]:
    m, n, k = (int(x) for x in re.fullmatch(r"m(\d+)n(\d+)k(\d+)", name).groups())  # type: ignore[union-attr]
    return m, n, k


def fragment_a(registers: list[Array], rows: int, k: int, kind: str) -> Array:
    """(rows, k) from A registers of 32 or 128 lanes: register i holds row lane/4 + 8 (i%2) of the warp's 16 rows."""
    lanes = np.arange(len(registers[0]))
    per = 4 // ELEMENT_BYTES[kind]
    out = np.zeros((rows, k), f32)
    base = lanes // 32 * 16 + lanes % 32 // 4
    for number, register in enumerate(registers):
        values = to_f32(np.ascontiguousarray(register).view(UNSIGNED[4 // per]).reshape(-1, per), kind)
        column = (number // 2) * 4 * per + lanes % 4 * per
        out[(base + 8 * (number % 2))[:, None], column[:, None] + np.arange(per)] = values
    return out


@lru_cache(maxsize=64)
def accumulator_index(lanes: int, registers: int) -> tuple[Array, Array]:
    """Rows and columns (registers, lanes) of 32-bit accumulators: m16n8 fragments side by side."""
    lane, number = np.arange(lanes)[None, :], np.arange(registers)[:, None]
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (number // 2 % 2)
    return row, number // 4 * 8 + lane % 4 * 2 + number % 2


class WarpMatrices:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.fenced: set[int] = set()
        self.committed: dict[int, int] = {}
        self.pending: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    # -- ldmatrix, stmatrix
    def _rows(
        self, site: int, m: Any, count: int, each: int, address: Any, offset: int, write: bool
    ) -> tuple[Array, Array]:
        """(warps x 32 lanes, row addresses (count, warps, each)): `each` threads in turn give the rows of a matrix."""
        machine, memory = self.machine, self.machine.memory
        warps = whole_warps(m, machine.count, "stmatrix" if write else "ldmatrix", site)
        givers = warps[:, : each * count].reshape(-1)
        base = np.asarray(address)
        place = memory.physical(givers, base, offset, 16, site)
        if (place & 15).any():
            raise Misaligned("matrix row address is not a multiple of 16", givers[(place & 15) != 0], site)
        machine.report.count_bytes(f"shared {'store' if write else 'load'}", 16 * len(givers))
        if machine.race.on:
            machine.race.by_lanes(site, memory.shared_shadow, memory.shared_granules(place, 16), givers >> 5, write)
            machine.report.count_conflicts(site, givers, place, 16)
        return warps, place.reshape(len(warps), count, each).transpose(1, 0, 2)

    def ldmatrix(
        self, site: int, m: Any, shape: str, transpose: bool, registers: list[Array], address: Any, offset: int
    ) -> None:
        if shape == "m16n16" and transpose:
            self._load_bytes(site, m, registers, address, offset)
            return
        if shape != "m8n8":
            raise UnsupportedPTX(f"ldmatrix.{shape}")
        warps, rows = self._rows(site, m, len(registers), 8, address, offset, False)
        memory = self.machine.memory.views[2]
        for register, row in zip(registers, rows, strict=True):
            tile = memory[(row[:, :, None] >> 1) + np.arange(8)]
            tile = tile.transpose(0, 2, 1) if transpose else tile
            register[warps.reshape(-1)] = np.ascontiguousarray(tile).reshape(-1, 32, 2).view(u32).reshape(-1)

    def _load_bytes(self, site: int, m: Any, registers: list[Array], address: Any, offset: int) -> None:
        """m16n16.trans.b8: register h of a matrix holds rows 4 (t%4) .. + 3 of column t/4 + 8 h of thread t."""
        warps, rows = self._rows(site, m, len(registers) // 2, 16, address, offset, False)
        memory, t = self.machine.memory.shared, np.arange(32)
        for number, register in enumerate(registers):
            row = rows[number // 2][:, (t % 4 * 4)[:, None] + np.arange(4)]
            data = memory[row + (t // 4 + 8 * (number % 2))[:, None]]
            register[warps.reshape(-1)] = np.ascontiguousarray(data).view(u32).reshape(-1)

    def stmatrix(
        self, site: int, m: Any, shape: str, transpose: bool, registers: list[Array], address: Any, offset: int
    ) -> None:
        if shape not in ("m8n8", "m16n8") or (shape == "m16n8" and not transpose):
            raise UnsupportedPTX(f"stmatrix.{shape}")
        warps, rows = self._rows(site, m, len(registers), 8, address, offset, True)
        self.machine.event += 1
        for register, row in zip(registers, rows, strict=True):
            data = np.ascontiguousarray(register[warps.reshape(-1)])
            if shape == "m8n8":
                tile = data.view(u16).reshape(-1, 8, 8)
                place = (row[:, :, None] >> 1) + np.arange(8)
                self.machine.memory.views[2][place] = tile.transpose(0, 2, 1) if transpose else tile
                continue
            # m16n8.trans.b8: byte v of thread t is element t/4 + 8 (v/2) of the row 2 (t%4) + v%2.
            t, v = np.arange(32)[:, None], np.arange(4)[None, :]
            place = row[:, t % 4 * 2 + v % 2] + t // 4 + 8 * (v // 2)
            self.machine.memory.shared[place] = data.view(np.uint8).reshape(-1, 32, 4)

    # -- mma.sync
    def mma_sync(
        self,
        site: int,
        m: Any,
        shape: str,
        kinds: list[str],
        d: list[Array],
        a: list[Array],
        b: list[Array],
        c: list[Any],
    ) -> None:
        rows, columns, k = shape_of(shape)
        to, left, right, addend = kinds
        if (rows, columns) != (16, 8) or to not in ("f32", "f16", "s32") or addend != to:
            raise UnsupportedPTX(f"mma.sync {shape} {'.'.join(kinds)}")
        warps = whole_warps(m, self.machine.count, "mma.sync", site)
        for warp in warps:
            A = fragment_a([x[warp] for x in a], 16, k, left)
            per = 4 // ELEMENT_BYTES[right]
            B, lane = np.zeros((8, k), f32), np.arange(32)
            for number, register in enumerate(b):
                values = to_f32(np.ascontiguousarray(register[warp]).view(UNSIGNED[4 // per]).reshape(-1, per), right)
                B[(lane // 4)[:, None], (number * 4 * per + lane % 4 * per)[:, None] + np.arange(per)] = values
            self._accumulate(A @ B.T, to, d, [lanes_of(x, self.machine.count) for x in c], warp, True)

    def _accumulate(self, product: Array, to: str, d: list[Array], c: list[Array], lanes: Array, add: bool) -> None:
        local = np.arange(len(lanes))
        if to == "f16":
            for number, (register, addend) in enumerate(zip(d, c, strict=True)):
                row = local // 32 * 16 + local % 32 // 4 + 8 * (number % 2)
                column = number // 2 * 8 + local % 4 * 2
                value = product[row[:, None], column[:, None] + np.arange(2)]
                if add:
                    value = value + np.ascontiguousarray(addend[lanes]).view(np.float16).reshape(-1, 2).astype(f32)
                register[lanes] = np.ascontiguousarray(value.astype(np.float16)).view(u32).reshape(-1)
            return
        dtype = np.int32 if to == "s32" else f32
        values = product[accumulator_index(len(lanes), len(d))].astype(dtype, copy=False)
        here = slice(int(lanes[0]), int(lanes[-1]) + 1)
        for value, register, addend in zip(values, d, c, strict=True):
            target = register.view(dtype)[here]
            if add:
                np.add(value, addend.view(dtype)[here], out=target)
            else:
                target[...] = value

    # -- wgmma
    def _groups(self, m: Any, what: str, site: int) -> Array:
        return whole_warps(m, self.machine.count, what, site, 128)

    def wgmma_fence(self, site: int, m: Any) -> None:
        self.fenced.update((self._groups(m, "wgmma.fence", site)[:, 0] // 128).tolist())

    def wgmma_commit(self, site: int, m: Any) -> None:
        for lanes in self._groups(m, "wgmma.commit_group", site):
            group = int(lanes[0]) // 128
            self.committed[group] = self.committed.get(group, 0) + 1

    def wgmma_wait(self, site: int, m: Any, left: int) -> None:
        race = self.machine.race
        for lanes in self._groups(m, "wgmma.wait_group", site):
            group = int(lanes[0]) // 128
            limit = self.committed.get(group, 0) - left
            self._run(group, limit)
            if race.on and limit > 0:
                race.learn(np.unique(lanes >> 5), self.component(group), limit)

    def component(self, group: int) -> int:
        return self.machine.race.component(("wgmma", group), f"wgmma of {self.machine.warp_name(group * 4)}")

    def _run(self, group: int, limit: int) -> None:
        queue = self.pending.get(group, [])
        while queue and queue[0][0] < limit:
            queue.pop(0)[1]()

    def finish(self) -> None:
        for group in self.pending:
            self._run(group, 1 << 60)

    def wgmma(
        self,
        site: int,
        m: Any,
        shape: str,
        kinds: list[str],
        d: list[Array],
        a: Any,
        b: Any,
        scale_d: Any,
        rest: list[int],
    ) -> None:
        machine = self.machine
        _, n, k = shape_of(shape)
        to, left, right = kinds
        if to not in ("f32", "f16", "s32") or left not in _K or right not in _K or _K[left] != k:
            raise UnsupportedPTX(f"wgmma {shape}.{'.'.join(kinds)}")
        in_registers = isinstance(a, list)
        sign = (rest[0] * rest[1]) if len(rest) >= 2 else 1
        transposed = rest[2:]
        b_k_major = not (transposed and transposed[-1])
        a_k_major = not (len(transposed) == 2 and transposed[0])
        adds = lanes_of(scale_d, machine.count)
        for lanes in self._groups(m, "wgmma.mma_async", site):
            first, group = int(lanes[0]), int(lanes[0]) // 128
            block = int(machine.block_of[first])
            if group not in self.fenced:
                raise Fault("first wgmma.mma_async of the warpgroup without a wgmma.fence before it", lanes, site)
            descriptor_b = matrix.wgmma_descriptor(int(lanes_of(b, machine.count)[first]))
            values = [x[lanes].copy() for x in a] if in_registers else None
            descriptor_a = None if in_registers else matrix.wgmma_descriptor(int(lanes_of(a, machine.count)[first]))
            issue = machine.race.issue(np.unique(lanes >> 5)) if machine.race.on else None
            epoch, add = self.committed.get(group, 0), bool(adds[first])

            def run(
                lanes: Array = lanes, group: int = group, block: int = block, descriptor_b: Any = descriptor_b,
                values: Any = values, descriptor_a: Any = descriptor_a, issue: Issue | None = issue, epoch: int = epoch,
                add: bool = add,
            ) -> None:  # fmt: skip
                B, used = matrix.read(machine.memory, block, descriptor_b, n, k, right, b_k_major, site)
                self._reads(site, used, issue, group, epoch)
                if values is not None:
                    A = fragment_a(values, 64, k, left)
                else:
                    A, used = matrix.read(machine.memory, block, descriptor_a, 64, k, left, a_k_major, site)
                    self._reads(site, used, issue, group, epoch)
                product = A @ B.T
                self._accumulate(product if sign == 1 else -product, to, d, d, lanes, add)

            if machine.queues.lazy:
                self.pending.setdefault(group, []).append((epoch, run))
            else:
                run()
            machine.report.operations["wgmma multiply-adds"] += 64 * n * k

    def _reads(self, site: int, chunks: Array, issue: Issue | None, group: int, epoch: int) -> None:
        memory = self.machine.memory
        self.machine.report.count_bytes("shared matrix operands", 16 * chunks.size)
        if issue is not None:
            granules = memory.shared_granules(chunks.reshape(-1) << 4, 16)
            self.machine.race.by_agent(
                site, memory.shared_shadow, granules, issue, self.component(group), epoch + 1, False
            )
