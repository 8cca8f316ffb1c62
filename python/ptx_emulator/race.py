"""Happens-before detection with vector clocks.

A component of a clock is a warp, or something that completes asynchronously: a phase of an mbarrier, a commit group,
the tcgen05 queue of a thread. Every granule of 1 to 4 bytes remembers its last write and its last reads as numbers of
events; an event has a component and an epoch. An access is ordered after another if its clock has reached that epoch.
Clocks have two planes: plane 0 is plain happens-before; plane 1 holds what has also passed a proxy fence, which an
access of the async proxy needs to see a write of the generic proxy.

In shared and global memory lanes of one warp can race, too. Any synchronization of the warp (`bar.warp.sync`, another
`.sync` instruction, a wait) ends an interval; two lanes conflict within one interval.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ptx_emulator.errors import BarrierError, EmulatorError, RaceError, UninitializedRead
from ptx_emulator.numerics import Array

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

READ_SLOTS = 4
ASYNC, ATOMIC, UNRECORDED, TENSOR_MAP = 1, 2, 4, 8
SEVERAL, NEVER = 32, -1
Same = Callable[[], Array]


class Shadow:
    """Last write and last reads of a range of memory: codes, `event << 6 | lane`, 0 for none.

    The lane is that of an access by a single lane, `SEVERAL` for several of one event.
    """

    def __init__(self, name: str, granules: int, must_be_written: bool, by_lane: bool = False) -> None:
        self.name, self.must_be_written, self.by_lane = name, must_be_written, by_lane
        self.write = np.zeros(granules, np.int32)
        self.read = np.zeros((granules, READ_SLOTS), np.int32)
        self.rows: dict[int, Shadow] = {}
        self.per, self.whole = 1, self

    def by_rows(self, per: int) -> Shadow:
        """The same memory in rows of `per` granules, for accesses to whole rows."""
        if per not in self.rows:
            view = self.rows[per] = copy(self)
            view.per, view.whole = per, self
            view.write, view.read = self.write.reshape(-1, per), self.read.reshape(-1, per, READ_SLOTS)
        return self.rows[per]


class Events:
    """Accesses that shadows remember: one for each warp of an instruction, or asynchronous operation. 0 is none."""

    def __init__(self) -> None:
        self.count = 1
        self.component, self.epoch = np.full(1024, -1, np.int32), np.zeros(1024, np.int32)
        self.site, self.flags = np.zeros(1024, np.int32), np.zeros(1024, np.uint8)
        self.interval = np.full(1024, NEVER)  # of the warp, where lanes of the warp are told apart

    def add(self, component: Any, epoch: Any, site: int, flags: int, interval: Any = NEVER) -> int:
        """The number of the first of one event, or of one for each component."""
        first, last = self.count, self.count + np.size(component)
        if last > len(self.component):
            if last > 1 << 25:
                raise EmulatorError("too many memory accesses for one race detection: run a smaller problem")
            for name in ("component", "epoch", "site", "flags", "interval"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros(max(len(old), last - first), old.dtype)]))
        self.component[first:last], self.epoch[first:last] = component, epoch
        self.site[first:last], self.flags[first:last], self.interval[first:last] = site, flags, interval
        self.count = last
        return first


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
    return len(x) > 1 and bool((x == x[:1]).all())


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
        self.events = Events()

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
            if given is not None:  # clocks that are kept do not change, so that addresses may share one
                self.locations[address] = given if seen is None or seen is given else self.join(seen, given)

    # -- accesses
    def by_lanes(
        self,
        site: int,
        shadow: Shadow,
        index: Array,
        lanes: Array,
        write: bool,
        flags: int = 0,
        alone: bool = False,
        same: Same | None = None,
        stored: Same | None = None,
    ) -> None:
        """A synchronous access; `index` (n, granules per lane), `lanes` (n,); `alone`: not by the warp together.

        Of a store that has not happened yet, `same` says which granules it leaves as they are, and `stored` what it
        writes.
        """
        index, warp = index.reshape(len(lanes), -1), lanes >> 5
        starts = np.flatnonzero(warp[1:] != warp[:-1]) + 1
        warps = warp[np.concatenate([[0], starts])]
        epochs, interval = self.clock[warps, 0, warps], self.interval[warps] if alone else NEVER
        event = self.events.add(warps, epochs, site, flags, interval)
        number = np.zeros(len(lanes), np.int32)
        number[starts] = 1
        codes = ((event + np.cumsum(number, dtype=np.int32)) << 6 | (lanes & 31).astype(np.int32))[:, None]
        who, lane = warp[:, None], lanes[:, None]
        last = shadow.write[index]
        if alone:
            slot = who % READ_SLOTS
            reads = shadow.read[index, slot]
            others = self._apart(site, shadow, index, lane, self.interval[who], write, flags, last, reads, same)
        self._check(site, shadow, index, who, self.clock, who, write, flags, last, same)
        if write:
            shadow.write[index] = codes
            if alone:
                now = shadow.write[index]
                together = now != codes
                if together.any():  # lanes that write together: one of them wins
                    if not flags & ATOMIC:
                        self._collide(site, shadow, index, lanes, codes, now, stored)
                    again = self.events.add(warps, epochs, site, flags)
                    shadow.write[index[together]] = now[together] + ((again - event) << 6)
        elif not flags & (ATOMIC | UNRECORDED):
            if not alone:
                shadow.read[index, who % READ_SLOTS] = codes
                return
            shadow.read[index, slot] = codes
            now = shadow.read[index, slot]
            several = (others | (now != codes)) & (now >> 6 == codes >> 6)
            if several.any():
                where = np.broadcast_to(slot, index.shape)[several]
                shadow.read[index[several], where] = now[several] & ~63 | SEVERAL

    def by_components(
        self, site: int, shadow: Shadow, index: Array, warps: Array, components: Array, epochs: Array
    ) -> None:
        """Reads that warps have issued, each by a separate component; `index` (warps, granules)."""
        for granules, warp, component, epoch in zip(index, warps, components, epochs, strict=True):
            self._by_one(site, shadow, granules, int(component), int(epoch), self.clock[warp], False, 0)

    def _apart(
        self,
        site: int,
        shadow: Shadow,
        index: Array,
        lane: Any,
        interval: Any,
        write: bool,
        flags: int,
        last: Array,
        reads: Array,
        same: Same | None = None,
    ) -> Array:
        """Two lanes of a warp must not access a granule in the same interval between warp barriers if one writes.

        `last`, `reads`: the codes of the last write and of the warp's last read. Returns where another lane has read.
        """
        events, who, number = self.events, lane >> 5, lane & 31

        def another(codes: Array) -> Array:
            event = codes >> 6
            mine = (events.component[event] == who) & (events.interval[event] == interval)
            return mine & (codes & 63 != number)

        bad, others = another(last), another(reads)
        if flags & ATOMIC:
            bad &= (events.flags[last >> 6] & ATOMIC) == 0
        if same is not None and bad.any():
            bad &= ~self._repeats(site, shadow, index, bad, last, same)
        wrong = bad | others if write else bad
        if wrong.any():
            where = tuple(int(x[0]) for x in np.nonzero(wrong))
            then, code = ("write", last[where]) if bad[where] else ("read", reads[where])
            one, other = int(np.broadcast_to(lane, wrong.shape)[where]), int(events.site[code >> 6])
            if self.machine.known("PE103", site, other):
                return others
            text = (
                f"race on {self._place(shadow, index, where)}: {'write' if write else 'read'} by lane "
                f"{one & 31} of {self.name(one >> 5)} is not ordered after the {then} by another lane at "
                f"{self.machine.describe_site(other)}: no bar.warp.sync between them"
            )
            self.machine.fault(RaceError(text, [one], site, "PE103", other))
        return others

    def _collide(
        self, site: int, shadow: Shadow, index: Array, lanes: Array, codes: Array, now: Array, stored: Same | None
    ) -> None:
        """Stores of one instruction by several warps at once, as if one warp came after the other."""
        events, who = self.events, np.broadcast_to((lanes >> 5)[:, None], index.shape)
        apart = events.component[now >> 6] != who
        if not apart.any():
            return
        new = stored() if stored is not None else None
        winners = {int(index[at]): at for at in map(tuple, np.argwhere(now == codes).tolist())}
        for at in map(tuple, np.argwhere(apart).tolist()):
            winner = winners[int(index[at])]
            place = self._place(shadow, index, at)
            if new is not None and (new[at] == new[winner]).all():
                text = f"store of the same value to {place} by {self.name(int(who[at]))}"
                self.machine.warn(
                    "PE108", f"{text} and {self.name(int(who[winner]))}, and nothing orders them", site, site
                )
            elif not self.machine.known("PE101", site, site):
                text = (
                    f"race on {place}: write by {self.name(int(who[at]))} is not ordered after the write by "
                    f"{self.name(int(who[winner]))} at {self.machine.describe_site(site)}"
                )
                self.machine.fault(RaceError(text, [int(lanes[at[0]])], site, "PE101", site))

    def _repeats(self, site: int, shadow: Shadow, index: Array, bad: Array, last: Array, same: Same) -> Array:
        """Where a store conflicts with a store of the same value, which is a warning, once for two instructions."""
        events = self.events
        repeats = bad & ((events.flags[last >> 6] & (ASYNC | ATOMIC)) == 0)
        if repeats.any():
            repeats &= same()
        if repeats.any():
            where = tuple(int(x[0]) for x in np.nonzero(repeats))
            other, describe = int(events.site[int(last[where]) >> 6]), self.machine.describe_site
            if not self.machine.known("PE108", site, other):
                text = f"store of the same value to {self._place(shadow, index, where)} as at {describe(other)}"
                self.machine.warn("PE108", f"{text}, and nothing orders them", site, other)
        return repeats

    def _place(self, shadow: Shadow, index: Array, where: Sequence[int]) -> str:
        """The name of an element of an access; of its row's granule where `index` counts rows."""
        number = int(index[tuple(where[: index.ndim])])
        if shadow.per > 1:
            number = number * shadow.per + where[index.ndim]
        return self.machine.place(shadow.whole, number)

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
        per: int = 1,
    ) -> None:
        """An asynchronous access by `component`; each element of `index` stands for `per` granules."""
        lane = issue if shadow.by_lane and issue.lane >= 0 else None
        view, index, clock = shadow.by_rows(per) if per > 1 else shadow, index.reshape(-1), self.fit(issue.clock)
        self._by_one(site, view, index, component, epoch, clock, write, flags, lane)

    def _by_one(
        self,
        site: int,
        shadow: Shadow,
        index: Array,
        component: int,
        epoch: int,
        clock: Array,
        write: bool,
        flags: int,
        issue: Issue | None = None,
    ) -> None:
        """An access by one component that knows `clock`; with `issue`, by what a single lane has issued."""
        last, reads = shadow.write[index], shadow.read[index] if write else None
        last = last[:1] if alike(last) else last
        if not self._harmless(shadow, last, reads, component, clock, flags, issue):
            if issue is not None:
                slot = (issue.lane >> 5) % READ_SLOTS
                others = last[:1] * 0 if reads is None else reads[..., slot]
                self._apart(site, shadow, index, issue.lane, issue.interval, write, flags, last, others)
            self._check(site, shadow, index, component, clock[None], 0, write, flags, last)
        if reads is not None and reads.any():
            shadow.read[index] = 0
        if not write and flags & (ATOMIC | UNRECORDED):
            return
        code = self.events.add(component, epoch, site, flags) << 6
        if write:
            shadow.write[index] = code
        else:
            shadow.read[index, component % READ_SLOTS] = code

    def _harmless(
        self,
        shadow: Shadow,
        last: Array,
        reads: Array | None,
        component: int,
        clock: Array,
        flags: int,
        issue: Issue | None,
    ) -> bool:
        """Whether an access by one component follows all others, where these are alike; False: to be looked at."""
        events = self.events

        def follows(code: int, plane: int) -> bool:
            event = code >> 6
            other = int(events.component[event])
            if issue is not None and other == issue.lane >> 5 and events.interval[event] == issue.interval:
                return False
            return other == component or clock[plane, other] >= events.epoch[event]

        if len(last) > 1 or flags & ATOMIC:
            return False
        for code in set(last.reshape(-1).tolist()):
            generic = bool(flags & ASYNC) and not events.flags[code >> 6] & ASYNC
            if code == 0 and reads is None and shadow.must_be_written:
                return False
            if code and ((generic and events.component[code >> 6] == component) or not follows(code, int(generic))):
                return False
        if reads is None or not reads.any():
            return True
        if len(reads) > 1 and not alike(reads):
            return False
        return all(follows(code, 0) for code in set(reads[0].reshape(-1).tolist()) if code)

    def again(
        self, site: int, shadow: Shadow, rows: slice, columns: slice, width: int, component: int, epoch: int
    ) -> bool:
        """A write by the component that wrote all of a rectangle last, with no read since: nothing can race."""
        codes, events = shadow.write.reshape(-1, width)[rows, columns], self.events
        same = (codes == codes[0, 0]).all() and events.component[codes[0, 0] >> 6] == component
        if not same and (events.component[codes >> 6] != component).any():
            return False
        if shadow.read.reshape(-1, width, READ_SLOTS)[rows, columns].any():
            return False
        codes[...] = events.add(component, epoch, site, 0) << 6
        return True

    def _check(
        self,
        site: int,
        shadow: Shadow,
        index: Array,
        who: Any,
        clock: Array,
        row: Any,
        write: bool,
        flags: int,
        last: Array,
        same: Same | None = None,
    ) -> None:
        """By components `who` that know what rows `row` of `clock` say; both are a number or fit `index`.

        `last`: codes of the last writes, one if all are alike. A write makes `shadow` forget the reads that it follows.
        """
        events = self.events
        if not write and shadow.must_be_written and not last.all():
            missing = np.nonzero(np.broadcast_to(last == 0, (*index.shape, *last.shape[index.ndim :])))
            text = (
                f"read of uninitialised {shadow.name}: {len(missing[0])} places, first at "
                f"{self._place(shadow, index, [int(x[0]) for x in missing])}"
            )
            self.machine.fault(UninitializedRead(text, [], site))

        def unordered(event: Array, who: Any, row: Any, plane: Any) -> Array:
            other = events.component[event]
            return (other != who) & (clock[row, plane, other] < events.epoch[event])

        def report(bad: Array, codes: Array, then: str, code: str, why: str = "") -> None:
            """Once for each instruction that made an earlier access."""
            places = np.argwhere(bad)
            sites = events.site[codes[bad] >> 6]
            for other in np.unique(sites).tolist():
                if self.machine.known(code, site, other):
                    continue
                where = tuple(places[np.flatnonzero(sites == other)[0]].tolist())
                event = int(codes[where]) >> 6
                one = int(np.broadcast_to(who, index.shape)[where[: index.ndim]])
                text = (
                    f"race on {self._place(shadow, index, where)}: {'write' if write else 'read'} by "
                    f"{self.name(one)} is not ordered after the {then} by {self.name(int(events.component[event]))} at "
                    f"{self.machine.describe_site(other)}{why}"
                )
                self.machine.fault(RaceError(text, [], site, code, other))

        if last.any():
            event = last >> 6
            generic = (events.flags[event] & ASYNC) == 0
            bad = unordered(event, who, row, generic.astype(np.int64) if flags & ASYNC else 0)
            if flags & ASYNC:  # own earlier generic writes need the fence as well
                bad |= (events.component[event] == who) & generic
            if flags & ATOMIC:
                bad &= (events.flags[event] & ATOMIC) == 0
            if flags & TENSOR_MAP and bad.any():
                report(bad, last, "write", "PE106", ": no fence.proxy.tensormap::generic.acquire")
            elif bad.any():
                race = bad & unordered(event, who, row, 0)
                fence = bad & ~race
                if same is not None:
                    race &= ~self._repeats(site, shadow, index, race, last, same)
                if race.any():
                    report(race, last, "write", "PE101")
                if fence.any():
                    report(fence, last, "write", "PE102", ": no fence.proxy.async between them")
        if write:
            reads = shadow.read[index]
            if reads.any():
                some = reads[:1] if np.ndim(who) == 0 and alike(reads) else reads
                bad = unordered(some >> 6, np.expand_dims(who, -1), np.expand_dims(row, -1), 0)
                if bad.any():
                    report(bad, some, "read", "PE101")
                shadow.read[index] = 0

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
            text = f"{what} by {self.name(int(warps[late][0]))} is not ordered after its init by {self.name(init[0])}"
            self.machine.fault(RaceError(text, [], site, "PE107"))

    def check_init_of_agent(self, site: int, issue: Issue, init: tuple[int, int, int, int], what: str) -> None:
        if issue.clock[1, init[0]] < init[1]:
            text = (
                f"{what}: its init by {self.name(init[0])} has not been made visible to the async proxy "
                "(fence.mbarrier_init and a barrier)"
            )
            self.machine.fault(BarrierError(text, [], site, "PE304"))
