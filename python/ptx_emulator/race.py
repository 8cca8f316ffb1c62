"""Happens-before detection with vector clocks.

A component of a clock is a warp, or something that completes asynchronously: a phase of an mbarrier, a commit group,
the tcgen05 queue of a thread. Every byte (in granules of
1 to 4) remembers the component and epoch of its last write and of
its last reads; an access is ordered after another if its clock has reached that epoch. Clocks have two planes: plane 0
is plain happens-before; plane 1 holds what has also passed a proxy fence, which an access of the async proxy needs to
see a write of the generic proxy.

In shared and global memory lanes of one warp can race, too. Any synchronization of the warp (`bar.warp.sync`, another
`.sync` instruction, a wait) ends an interval; two lanes conflict within one interval.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptx_emulator.errors import BarrierError, RaceError, UninitializedRead
from ptx_emulator.numerics import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

READ_SLOTS = 4
ASYNC, ATOMIC, UNRECORDED = 1, 2, 4


class Shadow:
    """Last write and last reads of a range of memory. Keys are component + 1 in the high word, epoch in the low one."""

    def __init__(self, name: str, granules: int, must_be_written: bool, by_lane: bool = False) -> None:
        self.name, self.must_be_written, self.by_lane = name, must_be_written, by_lane
        self.write_key = np.zeros(granules, np.int64)
        self.write_site = np.zeros(granules, np.int32)
        self.write_flags = np.zeros(granules, np.uint8)
        self.read_key = np.zeros((granules, READ_SLOTS), np.int64)
        self.read_site = np.zeros((granules, READ_SLOTS), np.int32)
        # The warp's interval in the upper bits, the lane below, or 32 for several lanes.
        self.write_interval = np.zeros(granules if by_lane else 0, np.int64)
        self.read_interval = np.zeros((granules if by_lane else 0, READ_SLOTS), np.int64)


class Issue(NamedTuple):
    """What an asynchronous operation may rely on, and what its completion hands on.

    Completion comes after everything that was ordered before the issue, except the issuer's own latest accesses: an
    asynchronous completion releases nothing on the issuer's behalf.
    """

    clock: Array
    handed: Array
    lane: int = -1  # of a single thread, in its warp's interval
    interval: int = 0


def alike(x: Array) -> bool:
    """Whether all entries are the same, as those of what was copied together often are: then one stands for all."""
    return bool((x == x[:1]).all())


class NoRaces:
    """Stands in for the detector when it is off."""

    on = False

    def __getattr__(self, name: str) -> Any:
        return self._nothing

    @staticmethod
    def _nothing(*_: Any, **__: Any) -> None:
        return None


class Races:
    on = True

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.warps = machine.count // 32
        self.capacity = self.warps + 64
        self.clock = np.zeros((self.warps, 2, self.capacity), np.int32)
        index = np.arange(self.warps)
        self.clock[index, 0, index] = 1
        self.interval = np.ones(self.warps, np.int64)
        self.fenced: dict[int, Array] = {}
        self.pending: dict[int, Array] = {}
        self.locations: dict[int, Array] = {}
        self.components: dict[Hashable, int] = {}
        self.names: list[str] = []
        self.owner: dict[int, int] = {}

    # -- components and clocks
    def component(self, key: Hashable, name: str) -> int:
        number = self.components.get(key)
        if number is None:
            number = self.components[key] = self.warps + len(self.components)
            self.names.append(name)
            if number >= self.capacity:
                self.capacity *= 2
                grown = np.zeros((self.warps, 2, self.capacity), np.int32)
                grown[:, :, : self.clock.shape[2]] = self.clock
                self.clock = grown
        return number

    def name(self, component: int) -> str:
        if component < self.warps:
            return self.machine.warp_name(component)
        return self.names[component - self.warps]

    def empty(self) -> Array:
        return np.zeros((2, self.capacity), np.int32)

    def fit(self, clock: Array) -> Array:
        if clock.shape[1] == self.capacity:
            return clock
        grown = self.empty()
        grown[:, : clock.shape[1]] = clock
        return grown

    def join(self, a: Array | None, b: Array) -> Array:
        return b.copy() if a is None else np.maximum(self.fit(a), self.fit(b))

    def warps_of(self, m: Any) -> Array:
        if m is True:
            return np.arange(self.warps)
        return np.flatnonzero(m.reshape(-1, 32).any(1))

    def issue(self, lanes: Any) -> Issue:
        """An operation of one thread, or of several together: it relies only on what all their warps know."""
        if isinstance(lanes, int):
            warp = lanes >> 5
            clock = self.clock[warp].copy()
            handed = clock.copy()
            handed[0, warp] -= 1
            return Issue(clock, handed, lanes, int(self.interval[warp]))
        warps = np.unique(lanes >> 5)
        clock = self.clock[warps].min(0)
        handed = clock.copy()
        handed[0, warps] = self.clock[warps, 0, warps] - 1
        return Issue(clock, handed)

    def release(self, warps: Array) -> Array:
        """What `warps` know, to be handed on; accesses after this are newer than it."""
        known = self.clock[warps].max(0)
        self.clock[warps, 0, warps] += 1
        return known

    def acquire(self, warps: Array, clock: Array | None) -> None:
        self.interval[warps] += 1
        if clock is not None:
            self.clock[warps] = np.maximum(self.clock[warps], self.fit(clock))

    def learn(self, warps: Array, component: Any, epoch: Any) -> None:
        """`component` and `epoch` are numbers, or one for each warp."""
        self.clock[warps, 0, component] = np.maximum(self.clock[warps, 0, component], epoch)

    def converge(self, m: Any) -> None:
        self.interval[self.warps_of(m)] += 1

    # -- fences
    def proxy_fence(self, m: Any) -> None:
        warps = self.warps_of(m)
        self.clock[warps, 1] = np.maximum(self.clock[warps, 1], self.clock[warps, 0])
        self.clock[warps, 0, warps] += 1

    def memory_fence(self, m: Any) -> None:
        for warp in self.warps_of(m):
            warp = int(warp)
            if warp in self.pending:
                self.acquire(np.array([warp]), self.pending.pop(warp))
            self.fenced[warp] = self.release(np.array([warp]))

    def init_fence(self, m: Any) -> None:
        self.proxy_fence(m)
        self.memory_fence(m)

    def strong(self, warps: Array, addresses: Array, order: str) -> None:
        """Atomics and relaxed or volatile accesses carry clocks from one thread to another through their address."""
        releasing, acquiring = (order in ("release", "acq_rel"), order in ("acquire", "acq_rel"))
        if not (releasing or acquiring or self.fenced or self.locations):
            return
        for warp, address in sorted(set(zip(warps.tolist(), addresses.tolist(), strict=True))):
            seen = self.locations.get(address)
            if seen is not None:
                if acquiring:
                    self.acquire(np.array([warp]), seen)
                else:
                    self.pending[warp] = self.join(self.pending.get(warp), seen)
            given = self.release(np.array([warp])) if releasing else self.fenced.get(warp)
            if given is not None:
                self.locations[address] = self.join(seen, given)

    # -- accesses
    def by_lanes(
        self, site: int, shadow: Shadow, index: Array, lanes: Array, write: bool, flags: int = 0, alone: bool = False
    ) -> None:
        """A synchronous access; `index` (n, granules per lane), `lanes` (n,); `alone`: not by the warp together."""
        flat = index.reshape(-1)
        lane = np.repeat(lanes, index.shape[1]) if index.ndim > 1 else lanes
        who = lane >> 5
        if alone:
            self._apart(site, shadow, flat, lane, self.interval[who], write, flags)
        epochs = self.clock[who, 0, who].astype(np.int64)
        self._access(site, shadow, flat, who, epochs, self.clock, who, write, flags)

    def by_components(
        self, site: int, shadow: Shadow, index: Array, warps: Array, components: Array, epochs: Array
    ) -> None:
        """Reads that warps have issued, each by a separate component; `index` (warps, granules)."""
        for granules, warp, component, epoch in zip(index, warps, components, epochs, strict=True):
            self._access(site, shadow, granules, component, epoch, self.clock, warp, False, 0)

    def _apart(self, site: int, shadow: Shadow, flat: Array, lane: Any, interval: Any, write: bool, flags: int) -> None:
        """Two lanes of a warp must not access a granule in the same interval between warp barriers if one writes."""
        who, code = lane >> 5, interval << 6 | lane & 31
        last, slot = shadow.write_interval[flat], who % READ_SLOTS
        bad = (shadow.write_key[flat] >> 32 == who + 1) & (last >> 6 == interval) & (last != code)
        if flags & ATOMIC:
            bad &= (shadow.write_flags[flat] & ATOMIC) == 0
        reads = shadow.read_interval[flat, slot]
        others = (shadow.read_key[flat, slot] >> 32 == who + 1) & (reads >> 6 == interval) & (reads != code)
        if (bad | others & write).any():
            where = int(np.flatnonzero(bad | others & write)[0])
            one, granule = (int(np.broadcast_to(lane, flat.shape)[where]), int(flat[where]))
            then, other = "write", shadow.write_site[granule]
            if not bad[where]:
                then, other = "read", shadow.read_site[granule, (one >> 5) % READ_SLOTS]
            raise RaceError(
                f"race on {self.machine.place(shadow, granule)}: {'write' if write else 'read'} by lane {one & 31} of "
                f"{self.name(one >> 5)} is not ordered after the {then} by another lane at "
                f"{self.machine.describe_site(int(other))}: no bar.warp.sync between them",
                [one],
                site,
            )
        if np.ndim(lane) == 0:
            return
        if write:
            shadow.write_interval[flat] = code
            shadow.write_interval[flat[shadow.write_interval[flat] != code]] = (
                0  # lanes that write together: one of them wins
            )
        elif not flags & ATOMIC:
            shadow.read_interval[flat, slot] = code
            several = others | (shadow.read_interval[flat, slot] != code)
            shadow.read_interval[flat[several], slot[several]] = interval[several] << 6 | 32

    def by_agent(
        self,
        site: int,
        shadow: Shadow,
        index: Array,
        issue: Issue,
        component: int,
        epoch: int,
        write: bool,
        flags: int = ASYNC,
    ) -> None:
        """An asynchronous access by `component`."""
        flat = index.reshape(-1)
        if shadow.by_lane and issue.lane >= 0:
            self._apart(site, shadow, flat, issue.lane, issue.interval, write, flags)
        clock = self.fit(issue.clock)[None]
        self._access(site, shadow, flat, np.int64(component), np.int64(epoch), clock, np.int64(0), write, flags)

    def again(
        self, site: int, shadow: Shadow, rows: slice, columns: slice, width: int, component: int, epoch: int
    ) -> bool:
        """A write by the component that wrote all of a rectangle last, with no read since: nothing can race."""
        key = shadow.write_key.reshape(-1, width)[rows, columns]
        if ((key >> 32) != component + 1).any() or shadow.read_key.reshape(-1, width, READ_SLOTS)[rows, columns].any():
            return False
        key[...] = (np.int64(1 + component) << 32) | epoch
        shadow.write_site.reshape(-1, width)[rows, columns] = site
        return True

    def _access(
        self,
        site: int,
        shadow: Shadow,
        index: Array,
        who: Any,
        epochs: Any,
        clock: Array,
        row: Any,
        write: bool,
        flags: int,
    ) -> None:
        """By components `who` that know what rows `row` of `clock` say; both are a number or an array like `index`."""
        last = shadow.write_key[index]
        if not write and shadow.must_be_written and not last.all():
            missing = index[np.flatnonzero(last == 0)]
            raise UninitializedRead(
                f"read of uninitialised {shadow.name}: {len(missing)} places, first at "
                f"{self.machine.place(shadow, int(missing[0]))}",
                [],
                site,
            )

        def unordered(keys: Array, who: Any, row: Any, plane: Any) -> Array:
            other = (keys >> 32) - 1
            known = clock[row, plane, np.maximum(other, 0)]
            return (keys != 0) & (other != who) & (known < (keys & 0xFFFFFFFF))

        def report(bad: Array, keys: Array, sites: Array, then: str) -> None:
            where = tuple(int(x[0]) for x in np.nonzero(bad))
            one = int(np.broadcast_to(who, index.shape)[where[0]])
            raise RaceError(
                f"race on {self.machine.place(shadow, int(index[where[0]]))}: {'write' if write else 'read'} by "
                f"{self.name(one)} is not ordered after the {then} by {self.name(int(keys[where] >> 32) - 1)} at "
                f"{self.machine.describe_site(int(sites[index][where]))}",
                [],
                site,
            )

        earlier, together = shadow.write_flags[index], np.ndim(who) == 0
        if together and alike(last) and alike(earlier):
            last, earlier = last[:1], earlier[:1]
        plane = ((earlier & ASYNC) == 0).astype(np.int64) if flags & ASYNC else 0
        bad = unordered(last, who, row, plane)
        if flags & ASYNC:  # own earlier generic writes need the fence as well
            bad |= (last >> 32 == who + 1) & (plane == 1)
        if flags & ATOMIC:
            bad &= (earlier & ATOMIC) == 0
        if bad.any():
            report(bad, last, shadow.write_site, "write")
        if write:
            reads = shadow.read_key[index]
            if reads.any():
                if together and alike(reads):
                    reads = reads[:1]
                bad = unordered(reads, np.expand_dims(who, -1), np.expand_dims(row, -1), 0)
                if bad.any():
                    report(bad, reads, shadow.read_site, "read")
                shadow.read_key[index] = 0
            shadow.write_key[index] = ((np.int64(1) + who) << 32) | epochs
            shadow.write_site[index] = site
            shadow.write_flags[index] = flags
        elif not flags & (ATOMIC | UNRECORDED):
            slot = np.broadcast_to(who, index.shape) % READ_SLOTS
            shadow.read_key[index, slot] = ((np.int64(1) + who) << 32) | epochs
            shadow.read_site[index, slot] = site

    # -- mbarriers: initialisation is a write that every use must be ordered after
    def init_by(self, lane: int) -> tuple[int, int, int, int]:
        """Warp, its epoch and interval, and lane."""
        warp = lane >> 5
        return warp, int(self.clock[warp, 0, warp]), int(self.interval[warp]), lane

    def check_init(self, site: int, lanes: Array, init: tuple[int, int, int, int], what: str) -> None:
        warps = lanes >> 5
        late = self.clock[warps, 0, init[0]] < init[1]
        late |= (warps == init[0]) & (self.interval[warps] == init[2]) & (lanes != init[3])
        if late.any():
            raise RaceError(
                f"{what} by {self.name(int(warps[late][0]))} is not ordered after its init by {self.name(init[0])}",
                [],
                site,
            )

    def check_init_of_agent(self, site: int, issue: Issue, init: tuple[int, int, int, int], what: str) -> None:
        if issue.clock[1, init[0]] < init[1]:
            raise BarrierError(
                f"{what}: its init by {self.name(init[0])} has not been made visible to the async proxy "
                "(fence.mbarrier_init and a barrier)",
                [],
                site,
            )
