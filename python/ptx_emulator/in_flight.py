"""Registers that `wgmma` or `tcgen05.ld` still hold, at the instructions that may touch one too early."""

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
    "load_waits=False leaves the wait to ptxas",
}


class Registers:
    """By warp and number of a register: the group or load that holds it last, and of each warp what has completed."""

    def __init__(self, machine: Machine, load_waits: bool) -> None:
        self.machine, self.load_waits = machine, load_waits
        self.names = list(machine.program.in_flight.numbers)
        warps = machine.count // 32
        self.kind = np.array([LOAD if role == LOADED else WGMMA for _, role in self.names])
        self.held = np.zeros((warps, len(self.names)), np.int64)
        self.by = np.zeros((warps, len(self.names)), np.int32)
        self.issued, self.done = np.zeros((warps, 2), np.int64), np.zeros((warps, 2), np.int64)

    def hold(self, site: int, m: Any, numbers: Array) -> None:
        """A `wgmma` of the group that is next to be committed, or a load."""
        place, kind = np.ix_(self.machine.race.warps_of(m), numbers), int(self.kind[numbers[0]])
        if kind == LOAD:
            self.issued[place[0], LOAD] += 1
        self.held[place] = self.issued[place[0], kind] + (kind == WGMMA)
        self.by[place] = site

    def commit(self, m: Any) -> None:
        self.issued[self.machine.race.warps_of(m), WGMMA] += 1

    def wait(self, m: Any, kind: int, left: int) -> None:
        warps = self.machine.race.warps_of(m)
        self.done[warps, kind] = np.maximum(self.done[warps, kind], self.issued[warps, kind] - left)

    def move(self, m: Any, targets: Array, sources: Array) -> None:
        warps = self.machine.race.warps_of(m)
        last = sources[self.held[np.ix_(warps, sources)].argmax(1)]
        place = np.ix_(warps, targets)
        self.held[place], self.by[place] = self.held[warps, last][:, None], self.by[warps, last][:, None]

    def touch(self, site: int, m: Any, numbers: Array) -> None:
        warps = self.machine.race.warps_of(m)
        place = np.ix_(warps, numbers)
        early = self.held[place] > self.done[warps][:, self.kind[numbers]]
        if not early.any():
            return
        row, column = (int(x[0]) for x in np.nonzero(early))
        warp, number = int(warps[row]), int(numbers[column])
        (name, role), other = self.names[number], int(self.by[warp, number])
        text = f"{name} is used while {self.machine.describe_site(other)} still {_WHY[role]}"
        if role != LOADED or self.load_waits:
            raise RaceError(text, range(warp * 32, warp * 32 + 32), site)
        self.machine.report.warn(f"{self.machine.describe_site(site)}: {text}")
        self.done[warps, LOAD] = np.maximum(self.done[warps, LOAD], np.where(early, self.held[place], 0).max(1))
        self.machine.tensor.loaded(warps, self.done[warps, LOAD])
