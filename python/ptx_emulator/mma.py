"""Warp and warpgroup matrices: ldmatrix, stmatrix, mma.sync, wgmma."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import matrix, tensorcore
from ptx_emulator.alu import lanes_of
from ptx_emulator.errors import Fault, Misaligned, UnsupportedPTX
from ptx_emulator.memory import Place
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
def accumulator_index(lanes: int, registers: int, per: int = 1) -> tuple[Array, Array]:
    """Rows and columns (registers, lanes, `per`) of accumulators, `per` to a register: m16n8 fragments side by side."""
    lane, number = np.arange(lanes)[:, None], np.arange(registers)[:, None, None]
    number, within = (number, np.arange(2)) if per == 2 else (number // 2, number % 2)
    row = lane // 32 * 16 + lane % 32 // 4 + 8 * (number % 2)
    row, column = np.broadcast_arrays(row, number // 2 * 8 + lane % 4 * 2 + within)
    return row, column


class WarpMatrices:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        fragments, groups = machine.program.fragments, machine.count // 128
        self.unfenced = np.ones((groups if fragments else 0, fragments), bool)  # written since the last wgmma.fence
        self.committed: dict[int, int] = {}
        self.pending: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    # -- ldmatrix, stmatrix
    def _rows(self, site: int, m: Any, count: int, each: int, rows: Place, write: bool) -> tuple[Array, Array]:
        """(warps x 32 lanes, row addresses (count, warps, each)): `each` threads in turn give the rows of a matrix."""
        machine, memory = self.machine, self.machine.memory
        warps = whole_warps(m, machine.count, "stmatrix" if write else "ldmatrix", site)
        givers = warps[:, : each * count].reshape(-1)
        place = memory.physical(givers, rows, 16, site)
        if (place & 15).any():
            raise Misaligned("matrix row address is not a multiple of 16", givers[(place & 15) != 0], site)
        machine.report.count_bytes(f"shared {'store' if write else 'load'}", 16 * len(givers))
        if machine.race.on:
            machine.race.by_lanes(site, memory.shared_shadow, memory.shared_granules(place, 16), givers, write)
            machine.report.count_conflicts(site, givers, place, 16)
        return warps, place.reshape(len(warps), count, each).transpose(1, 0, 2)

    def ldmatrix(
        self, site: int, m: Any, shape: str, bits: int, transpose: bool, registers: list[Array], place: Place
    ) -> None:
        """Register i of thread t: row t / 4, bytes 4 (t % 4) of the matrix or of its transpose."""
        per, each = (2, 16) if shape == "m16n16" else (1, 8)
        count = len(registers) // per
        warps, rows = self._rows(site, m, count, each, place, False)
        data = np.ascontiguousarray(self.machine.memory.chunks[rows >> 4])
        raw = data.view(np.uint8) if bits >= 8 else matrix.unpack_padded(data, bits)
        tile = raw.view(u16 if bits == 16 else np.uint8).reshape(count, len(warps), each, -1)
        words = np.ascontiguousarray(tile.swapaxes(2, 3) if transpose else tile).view(u32)
        for register, values in zip(registers, words.reshape(count, -1, per, 32).swapaxes(1, 2).reshape(-1, warps.size),
                                    strict=True):  # fmt: skip
            register[warps.reshape(-1)] = values

    def stmatrix(
        self, site: int, m: Any, shape: str, bits: int, transpose: bool, registers: list[Array], place: Place
    ) -> None:
        warps, rows = self._rows(site, m, len(registers), 8, place, True)
        self.machine.event += 1
        for register, row in zip(registers, rows, strict=True):
            data = np.ascontiguousarray(register[warps.reshape(-1)])
            if bits == 16:
                tile = data.view(u16).reshape(-1, 8, 8)
                tile = tile.swapaxes(1, 2) if transpose else tile
            else:  # byte v of thread t is element t / 4 + 8 (v / 2) of the row 2 (t % 4) + v % 2
                tile = data.view(np.uint8).reshape(-1, 8, 4, 2, 2).transpose(0, 2, 4, 3, 1)
            lines = np.ascontiguousarray(tile).reshape(*row.shape, -1)
            self.machine.memory.chunks[row >> 4] = lines.view(np.complex128)[..., 0]

    # -- mma.sync
    def mma_sync(
        self, site: int, m: Any, shape: str, kinds: list[str], d: list[Array], a: list[Array], b: list[Array],
        c: list[Any],
    ) -> None:  # fmt: skip
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
            self._accumulate(A, B, to, (left, right), d, [lanes_of(x, self.machine.count) for x in c], warp, True)

    def _accumulate(
        self, A: Array, B: Array, to: str, kinds: tuple[str, str], d: list[Array], c: list[Array], lanes: Array,
        add: bool,
    ) -> None:  # fmt: skip
        """D = A B^T + C, or A B^T, of fragments in registers."""
        dtype, per = {"s32": (np.int32, 1), "f32": (f32, 1), "f16": (np.float16, 2)}[to]
        place = accumulator_index(len(lanes), len(d), per)
        C = np.zeros((len(A), len(B)), dtype)
        if add:
            here = slice(int(lanes[0]), int(lanes[-1]) + 1)
            C[place] = np.stack([x[here] for x in c]).view(dtype).reshape(place[0].shape)
        if to == "s32":
            D = (A @ B.T).astype(np.int32) + C
        else:
            D = tensorcore.multiply_add(A, B, C, kinds, len(lanes) == 128)
        for register, values in zip(d, np.ascontiguousarray(D[place]).reshape(len(d), -1).view(u32), strict=True):
            register[int(lanes[0]) : int(lanes[-1]) + 1] = values

    # -- wgmma
    def _groups(self, m: Any, what: str, site: int) -> Array:
        return whole_warps(m, self.machine.count, what, site, 128)

    def wgmma_fence(self, site: int, m: Any) -> None:
        self.unfenced[self._groups(m, "wgmma.fence", site)[:, 0] // 128] = False

    def written(self, m: Any, fragments: Array) -> None:
        """An ordinary instruction writes registers that wgmma uses."""
        if self.machine.race.on:
            groups = np.arange(len(self.unfenced)) if m is True else np.flatnonzero(m.reshape(-1, 128).any(1))
            self.unfenced[groups[:, None], fragments] = True

    def wgmma_commit_group(self, site: int, m: Any) -> None:
        for lanes in self._groups(m, "wgmma.commit_group", site):
            group = int(lanes[0]) // 128
            self.committed[group] = self.committed.get(group, 0) + 1

    def wgmma_wait_group(self, site: int, m: Any, left: int) -> None:
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
        self, site: int, m: Any, shape: str, kinds: list[str], fragments: Array, d: list[Array], a: Any, b: Any,
        scale_d: Any, rest: list[int],
    ) -> None:  # fmt: skip
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
            if self.unfenced[group, fragments].any():
                raise Fault("wgmma.mma_async without a wgmma.fence since its registers were written", lanes, site)
            descriptor_b = matrix.wgmma_descriptor(int(lanes_of(b, machine.count)[first]))
            values = [x[lanes].copy() for x in a] if in_registers else None
            descriptor_a = None if in_registers else matrix.wgmma_descriptor(int(lanes_of(a, machine.count)[first]))
            issue = machine.race.issue(lanes)
            epoch, add = self.committed.get(group, 0), bool(adds[first])

            def run(
                lanes: Array, group: int, block: int, descriptor_b: Any, values: Any, descriptor_a: Any,
                issue: Issue | None, epoch: int, add: bool,
            ) -> None:  # fmt: skip
                B, used = matrix.read(machine.memory, block, descriptor_b, n, k, right, b_k_major, site)
                self._reads(site, used, issue, group, epoch)
                if values is not None:
                    A = fragment_a(values, 64, k, left)
                else:
                    A, used = matrix.read(machine.memory, block, descriptor_a, 64, k, left, a_k_major, site)
                    self._reads(site, used, issue, group, epoch)
                self._accumulate(A if sign == 1 else -A, B, to, (left, right), d, d, lanes, add)

            operation = partial(run, lanes, group, block, descriptor_b, values, descriptor_a, issue, epoch, add)
            if machine.queues.lazy:
                self.pending.setdefault(group, []).append((epoch, operation))
            else:
                operation()
            machine.report.operations["wgmma multiply-adds"] += 64 * n * k

    def _reads(self, site: int, chunks: Array, issue: Issue | None, group: int, epoch: int) -> None:
        memory = self.machine.memory
        self.machine.report.count_bytes("shared matrix operands", 16 * chunks.size)
        if issue is not None:
            granules = memory.shared_granules(chunks.reshape(-1) << 4, 16)
            self.machine.race.by_agent(
                site, memory.shared_shadow, granules, issue, self.component(group), epoch + 1, False
            )
