"""Registers that an asynchronous `wgmma` or `tcgen05.ld` still uses, checked at instructions that access them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.codegen.in_flight import ACCUMULATOR, LEFT, LOADED
from ptx_emulator.errors import RaceError
from ptx_emulator.numerics import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

WGMMA, LOAD = 0, 1
_WHY = {
    ACCUMULATOR: "accumulates in it: no wgmma.wait_group between them covers its group",
    LEFT: "multiplies from it: no wgmma.wait_group between them covers its group",
    LOADED: "loads it: no tcgen05.wait::ld (cute.arch.fence_view_async_tmem_load) between them; "
    'warn=["PE105"] leaves the wait to ptxas',
}


class Registers:
    """Per warp and register, the last group or load that uses it; per warp, the groups and loads that completed."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.names = list(machine.program.in_flight.numbers)
        warps = machine.count // 32
        self.source = np.array([LOAD if role == LOADED else WGMMA for _, role in self.names])
        self.held = np.zeros((warps, len(self.names)), np.int64)
        self.by = np.zeros((warps, len(self.names)), np.int32)
        self.issued, self.done = np.zeros((warps, 2), np.int64), np.zeros((warps, 2), np.int64)

    def hold(self, site: int, m: Any, registers: Array) -> None:
        """A `wgmma` of the group that is next to be committed, or a load."""
        entries, source = np.ix_(self.machine.race.warps_of(m), registers), int(self.source[registers[0]])
        if source == LOAD:
            self.issued[entries[0], LOAD] += 1
        self.held[entries] = self.issued[entries[0], source] + (source == WGMMA)
        self.by[entries] = site

    def commit(self, m: Any) -> None:
        self.issued[self.machine.race.warps_of(m), WGMMA] += 1

    def wait(self, m: Any, source: int, left: int) -> None:
        warps = self.machine.race.warps_of(m)
        self.done[warps, source] = np.maximum(self.done[warps, source], self.issued[warps, source] - left)

    def move(self, m: Any, targets: Array, sources: Array) -> None:
        warps = self.machine.race.warps_of(m)
        last = sources[self.held[np.ix_(warps, sources)].argmax(1)]
        entries = np.ix_(warps, targets)
        self.held[entries], self.by[entries] = self.held[warps, last][:, None], self.by[warps, last][:, None]

    def touch(self, site: int, m: Any, registers: Array) -> None:
        warps = self.machine.race.warps_of(m)
        entries = np.ix_(warps, registers)
        early = self.held[entries] > self.done[warps][:, self.source[registers]]
        if not early.any():
            return
        # An access that is reported counts as the wait.
        for source in (WGMMA, LOAD):
            now = early & (self.source[registers] == source)
            if now.any():
                self._report(site, warps, registers, now)
                waited = np.where(now, self.held[entries], 0).max(1)
                self.done[warps, source] = np.maximum(self.done[warps, source], waited)
        if (early & (self.source[registers] == LOAD)).any():
            self.machine.tensor.loaded(warps, self.done[warps, LOAD])

    def _report(self, site: int, warps: Array, registers: Array, early: Array) -> None:
        row, column = (int(x[0]) for x in np.nonzero(early))
        warp, number = int(warps[row]), int(registers[column])
        (name, role), other = self.names[number], int(self.by[warp, number])
        code = "PE105" if role == LOADED else "PE104"
        if not self.machine.known(code, site, other):
            text = f"{name} is used while {self.machine.describe_site(other)} still {_WHY[role]}"
            self.machine.fault(RaceError(text, range(warp * 32, warp * 32 + 32), site, code, other))
