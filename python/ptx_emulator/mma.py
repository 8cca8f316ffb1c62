"""Warp and warpgroup matrices: ldmatrix, stmatrix, mma.sync, wgmma."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator import matrix, tensorcore
from ptx_emulator.alu import at, lanes_of
from ptx_emulator.errors import Fault, Misaligned, UnsupportedPTX
from ptx_emulator.memory import AddressOperand
from ptx_emulator.numerics import ELEMENT_BYTES, UNSIGNED, Array, f32, to_f32, u16, u32
from ptx_emulator.report import WAVEFRONT
from ptx_emulator.warp import whole_warps

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

_K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}


def shape_of(name: str) -> tuple[int, int, int]:
    m, n, k = (int(x) for x in re.fullmatch(r"m(\d+)n(\d+)k(\d+)", name).groups())  # type: ignore[union-attr]
    return m, n, k


def elements(registers: list[Array], ptx_type: str) -> Array:
    """(registers, lanes, elements of a register) as float32."""
    words = np.stack(registers)
    return to_f32(words.view(UNSIGNED[ELEMENT_BYTES[ptx_type]]), ptx_type).reshape(*words.shape, -1)


def fragment_a(registers: list[Array], ptx_type: str) -> Array:
    """(rows, k) from A registers of 32 or 128 lanes: register i holds row lane/4 + 8 (i%2) of the warp's 16 rows."""
    values = elements(registers, ptx_type)
    lanes = values.shape[1]
    parts = values.reshape(-1, 2, lanes // 32, 8, 4, values.shape[2])
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(lanes // 2, -1)


# Accumulators: axes of the matrix (warp, half and row of its 16 rows; 8 columns, pair and element of those) as they
# follow each other in registers and lanes, for one and two elements in a register.
ACCUMULATORS = {1: (3, 1, 5, 0, 2, 4), 2: (3, 1, 0, 2, 4, 5)}


FENCED, CONSTANT, COMPUTED = 0, 1, 2


class WarpMatrices:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        fragments, groups = machine.program.fragments, machine.count // 128
        # How registers were written since the last wgmma.fence; whether a wgmma came since.
        self.unfenced = np.full((groups if fragments else 0, fragments), COMPUTED, np.uint8)
        self.multiplied = np.ones(groups, bool)
        self.committed: dict[int, int] = {}
        self.pending: dict[int, list[tuple[int, Callable[[], None]]]] = {}

    # -- ldmatrix, stmatrix
    def _rows(
        self, site: int, m: Any, count: int, rows_per_matrix: int, rows: AddressOperand, write: bool
    ) -> tuple[Array, Array]:
        """(warps x 32 lanes, row addresses (count, warps, rows_per_matrix)): adjacent threads hold a matrix's rows."""
        machine, memory = self.machine, self.machine.memory
        warps = whole_warps(m, machine.count, "stmatrix" if write else "ldmatrix", site)
        givers = warps[:, : rows_per_matrix * count].reshape(-1)
        addresses = memory.physical(givers, rows, 16, site)
        if (addresses & 15).any():
            raise Misaligned("matrix row address is not a multiple of 16", givers[(addresses & 15) != 0], site)
        machine.report._count_bytes(f"shared {'store' if write else 'load'}", 16 * len(givers))
        if machine.race.on:
            machine.race.by_lanes(site, memory.shared_shadow, memory.shared_granules(addresses, 16), givers, write)
            machine.report._count_conflicts(site, givers, addresses, 16)
        return warps, addresses.reshape(len(warps), count, rows_per_matrix).transpose(1, 0, 2)

    def ldmatrix(
        self, site: int, m: Any, shape: str, bits: int, transpose: bool, registers: list[Array], operand: AddressOperand
    ) -> None:
        """Register i of thread t: row t / 4, bytes 4 (t % 4) of the matrix or of its transpose."""
        per, rows_per_matrix = (2, 16) if shape == "m16n16" else (1, 8)
        count = len(registers) // per
        warps, rows = self._rows(site, m, count, rows_per_matrix, operand, False)
        data = np.ascontiguousarray(self.machine.memory.chunks[rows >> 4])
        raw = data.view(np.uint8) if bits >= 8 else matrix.unpack_padded(data, bits)
        tile = raw.view(u16 if bits == 16 else np.uint8).reshape(count, len(warps), rows_per_matrix, -1)
        words = np.ascontiguousarray(tile.swapaxes(2, 3) if transpose else tile).view(u32)
        for register, values in zip(
            registers, words.reshape(count, -1, per, 32).swapaxes(1, 2).reshape(-1, warps.size), strict=True
        ):
            register[warps.reshape(-1)] = values

    def stmatrix(
        self, site: int, m: Any, shape: str, bits: int, transpose: bool, registers: list[Array], operand: AddressOperand
    ) -> None:
        warps, rows = self._rows(site, m, len(registers), 8, operand, True)
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
        self,
        site: int,
        m: Any,
        shape: str,
        ptx_types: list[str],
        d: list[Array],
        a: list[Array],
        b: list[Array],
        c: list[Any],
    ) -> None:
        rows, columns, k = shape_of(shape)
        to, left, right, addend = ptx_types
        if (rows, columns) != (16, 8) or to not in ("f32", "f16", "s32") or addend != to:
            raise UnsupportedPTX(f"mma.sync {shape} {'.'.join(ptx_types)}")
        warps = whole_warps(m, self.machine.count, "mma.sync", site)
        lanes = warps.reshape(-1)
        A = fragment_a([x[lanes] for x in a], left).reshape(len(warps), 16, k)
        B = elements([x[lanes] for x in b], right).reshape(len(b), len(warps), 8, -1)
        B = B.transpose(1, 2, 0, 3).reshape(len(warps), 8, k)
        addend = [lanes_of(x, self.machine.count) for x in c]
        self._accumulate(A, B, to, (left, right), d, addend, lanes, np.ones(len(warps), bool))

    def _accumulate(
        self,
        A: Array,
        B: Array,
        to: str,
        ptx_types: tuple[str, str],
        d: list[Array],
        c: list[Array],
        lanes: Array,
        add: Array,
    ) -> None:
        """D = A B^T + C, or A B^T, of fragments in registers: A (groups, m, k), B (groups, n, k), `add` (groups,)."""
        dtype, per = {"s32": (np.int32, 1), "f32": (f32, 1), "f16": (np.float16, 2)}[to]
        order, here = ACCUMULATORS[per], lanes
        if len(lanes) == lanes[-1] - lanes[0] + 1:
            here = slice(int(lanes[0]), int(lanes[-1]) + 1)
        shape = (len(lanes) // 32, 2, 8, B.shape[1] // 8, 4, 2)
        C = np.zeros((*A.shape[:2], B.shape[1]), dtype)
        if add.any():
            parts = np.stack([x[here] for x in c]).view(dtype).reshape([shape[axis] for axis in order])
            C = parts.transpose(np.argsort(order)).reshape(C.shape)
            if not add.all():
                C[~add] = 0
        if to == "s32":
            D = (A @ B.swapaxes(1, 2)).astype(np.int32) + C
        else:
            D = tensorcore.multiply_add(A, B, C, ptx_types, A.shape[1] == 64)
        words = np.ascontiguousarray(D.reshape(shape).transpose(order)).reshape(len(d), -1).view(u32)
        for register, values in zip(d, words, strict=True):
            register[here] = values

    # -- wgmma
    def _groups(self, m: Any, what: str, site: int) -> Array:
        return whole_warps(m, self.machine.count, what, site, 128)

    def wgmma_fence(self, site: int, m: Any) -> None:
        groups = self._groups(m, "wgmma.fence", site)[:, 0] // 128
        self.unfenced[groups], self.multiplied[groups] = FENCED, False

    def written(self, m: Any, fragments: Array, constants: bool = False) -> None:
        """Ordinary instructions write registers that wgmma uses; `constants`: only moves of constants do.

        A compiler may place such a move between `wgmma.fence` and the first `wgmma` behind it, where the source has it
        before the fence.
        """
        if self.machine.race.on:
            groups = np.arange(len(self.unfenced)) if m is True else np.flatnonzero(m.reshape(-1, 128).any(1))
            level = np.where(self.multiplied[groups] | (not constants), COMPUTED, CONSTANT)[:, None]
            entries = groups[:, None], fragments
            self.unfenced[entries] = np.maximum(self.unfenced[entries], level)

    def wgmma_commit_group(self, site: int, m: Any) -> None:
        for lanes in self._groups(m, "wgmma.commit_group", site):
            group = int(lanes[0]) // 128
            self.committed[group] = self.committed.get(group, 0) + 1
            self.machine.timeline.commit(("wgmma", group))

    def wgmma_wait_group(self, site: int, m: Any, left: int) -> None:
        race = self.machine.race
        for lanes in self._groups(m, "wgmma.wait_group", site):
            group = int(lanes[0]) // 128
            limit = self.committed.get(group, 0) - left
            self._run(group, limit)
            self.machine.timeline.wait_group(("wgmma", group), np.unique(lanes >> 5), left, "wgmma group")
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
        ptx_types: list[str],
        fragments: Array,
        d: list[Array],
        a: Any,
        b: Any,
        scale_d: Any,
        rest: list[int],
    ) -> None:
        machine = self.machine
        _, n, k = shape_of(shape)
        to, left, right = ptx_types
        if to not in ("f32", "f16", "s32") or left not in _K or right not in _K or _K[left] != k:
            raise UnsupportedPTX(f"wgmma {shape}.{'.'.join(ptx_types)}")
        sign = (rest[0] * rest[1]) if len(rest) >= 2 else 1
        transposed = rest[2:]
        b_k_major = not (transposed and transposed[-1])
        a_k_major = not (len(transposed) == 2 and transposed[0])

        groups = self._groups(m, "wgmma.mma_async", site)
        first = groups[:, 0]
        numbers = first // 128
        unfenced = self.unfenced[numbers[:, None], fragments].max(1, initial=FENCED)
        self.multiplied[numbers] = True
        if unfenced.any():
            worst = unfenced.max()
            lanes = groups[int(np.flatnonzero(unfenced == worst)[0])]
            if worst == COMPUTED:
                text = "wgmma.mma_async without a wgmma.fence since its registers were written"
                machine.fault(Fault(text, lanes, site, "PE402"))
            else:
                machine.warn("PE406", "constants were moved into registers of wgmma.mma_async behind wgmma.fence", site)
        blocks, epochs = machine.block_of[first].tolist(), [self.committed.get(g, 0) for g in numbers.tolist()]
        sources = [list(zip(blocks, map(matrix.wgmma_descriptor, at(b, first).tolist()), strict=True))]
        if isinstance(a, list):
            values = [x[groups.reshape(-1)] for x in a]
        else:
            sources.append(list(zip(blocks, map(matrix.wgmma_descriptor, at(a, first).tolist()), strict=True)))
        add = np.broadcast_to(at(scale_d, first).astype(bool), first.shape)
        issues = [machine.race.issue(lanes) for lanes in groups]

        def toucher(number: int) -> matrix.Touch:
            issue, group, epoch = issues[number], int(numbers[number]), epochs[number] + 1

            def touch(chunks: Array) -> None:
                if issue is not None:
                    machine.memory.chunks_by_agent(site, chunks, issue, self.component(group), epoch, False)

            return touch

        def run(chosen: slice) -> None:
            touches = [toucher(number) for number in range(len(groups))[chosen]]
            memory, lanes = machine.memory, groups[chosen].reshape(-1)
            B = matrix.read_all(memory, sources[0][chosen], n, k, right, b_k_major, site, touches)
            if isinstance(a, list):
                mine = slice(128 * (chosen.start or 0), 128 * (chosen.start or 0) + len(lanes))
                A = fragment_a([x[mine] for x in values], left).reshape(len(touches), 64, k)
            else:
                A = matrix.read_all(memory, sources[1][chosen], 64, k, left, a_k_major, site, touches)
            self._accumulate(A if sign == 1 else -A, B, to, (left, right), d, d, lanes, add[chosen])

        if machine.queues.lazy:
            for number, group in enumerate(numbers.tolist()):
                operation = partial(run, slice(number, number + 1))
                self.pending.setdefault(group, []).append((epochs[number], operation))
        else:
            run(slice(None))
        if machine.timeline.on:
            for lane, group in zip(first.tolist(), numbers.tolist(), strict=True):
                machine.timeline.hold(("wgmma", group), machine.timeline.multiply(lane, 64 * n * k, "wgmma"))
        read = n * k * ELEMENT_BYTES[right] + (0 if isinstance(a, list) else 64 * k * ELEMENT_BYTES[left])
        machine.report.wgmma_wavefronts += len(groups) * read // WAVEFRONT
        machine.report.operations["wgmma multiply-adds"] += 64 * n * k * len(groups)
        machine.report.tensor_cycles += 64 * n * k * len(groups) // tensorcore.WGMMA_RATE[left]
