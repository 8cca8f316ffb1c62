"""mbarriers, named barriers, the cluster barrier, cluster launch control."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.alu import at, one
from ptx_emulator.errors import BarrierError, Fault, Misaligned
from ptx_emulator.memory import AddressOperand
from ptx_emulator.numerics import Array, u32
from ptx_emulator.ptx.parser import Instruction
from ptx_emulator.race import Issue

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine

TX_LIMIT = (1 << 20) - 1


@dataclass
class MBarrier:
    count: int
    pending: int
    init: tuple[int, int, int, int]
    tx: int = 0
    phase: int = 0
    clock: Array | None = None
    incoming: Array | None = None


@dataclass
class NamedBarrier:
    expected: int
    site: int  # of the first arrival
    arrived: int = 0
    # Where lanes go on, the lanes, and for bar.red the operation, its target and its predicate.
    waiting: list[tuple[int, Array, tuple[str, Array, Any] | None]] = field(default_factory=list)
    incoming: Array | None = None


class Sync:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.barriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        clusters = machine.blocks // machine.cluster_size
        self.cluster_of = machine.block_of // machine.cluster_size
        self.cluster_arrived = np.zeros(clusters, np.int64)
        self.cluster_phase = np.zeros(clusters, np.int64)
        self.cluster_joined = np.full(machine.count, -1, np.int64)
        self.cluster_incoming: dict[int, Array] = {}
        self.cluster_clock: dict[int, Array] = {}
        self.exited = np.zeros(clusters, np.int64)
        self.declined = np.zeros(machine.count, bool)

    # -- mbarriers
    def barrier_addresses(self, site: int, m: Any, barrier: AddressOperand) -> tuple[Array, Array]:
        lanes = self.machine.lanes(m)
        address = self.machine.memory.physical(lanes, barrier, 8, site)
        if (address & 7).any():
            raise Misaligned("mbarrier address is not a multiple of 8", lanes[(address & 7) != 0], site)
        return lanes, address

    def get(self, address: int, site: int) -> MBarrier:
        barrier = self.barriers.get(address)
        if self.machine.running[address >> 24] == 0:
            raise Fault(
                f"mbarrier at {self.machine.shared_name(address)} signalled after its block ended", [], site, "PE204"
            )
        if barrier is None:
            raise BarrierError(
                f"mbarrier at {self.machine.shared_name(address)} used before mbarrier.init", [], site, "PE302"
            )
        return barrier

    def init(self, site: int, m: Any, barrier: AddressOperand, count: Any) -> None:
        lanes, addresses = self.barrier_addresses(site, m, barrier)
        race = self.machine.race
        for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
            number = one(count, lane)
            if not 0 < number <= TX_LIMIT:
                raise BarrierError(f"mbarrier.init with count {number}", [lane], site, "PE303")
            self.barriers[address] = MBarrier(number, number, race.init_by(lane))
        self.machine.event += 1

    def invalidate(self, site: int, m: Any, barrier: AddressOperand) -> None:
        for address in self.barrier_addresses(site, m, barrier)[1].tolist():
            self.get(address, site)
            del self.barriers[address]

    def component(self, address: int) -> int:
        return self.machine.race.component(
            ("mbarrier", address), f"what completes on {self.machine.shared_name(address)}"
        )

    def _flip(self, address: int, barrier: MBarrier, site: int) -> None:
        if barrier.pending < 0:
            raise BarrierError(
                f"mbarrier at {self.machine.shared_name(address)}: more arrivals than its count", [], site, "PE303"
            )
        if barrier.pending or barrier.tx:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        self.machine.timeline.flip(address, barrier.phase)
        race = self.machine.race
        if race.on:
            component = self.component(address)
            incoming = race.join(barrier.incoming, race.empty())
            incoming[:, component] = barrier.phase
            barrier.clock, barrier.incoming = race.join(barrier.clock, incoming), None
        self.machine.event += 1

    def arrive(
        self, site: int, m: Any, target: AddressOperand, count: Any, bytes_: Any, relaxed: bool, state: Any
    ) -> None:
        lanes, addresses = self.barrier_addresses(site, m, target)
        race = self.machine.race
        if race.on:
            known: dict[int, Array] = {}
            for address in dict.fromkeys(addresses.tolist()):
                barrier, some = self.get(address, site), lanes[addresses == address]
                race.check_init(site, some, barrier.init, "arrival on an mbarrier")
                for warp in dict.fromkeys((some >> 5).tolist()) if not relaxed else ():
                    if warp not in known:
                        known[warp] = race.clock[warp].copy()
                    barrier.incoming = race.join(barrier.incoming, known[warp])
            warps = np.array(sorted(known), np.int64)
            race.clock[warps, 0, warps] += 1
        timeline = self.machine.timeline
        if timeline.on:
            for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
                timeline.arrive(address, [lane >> 5])
        counts, amounts = (np.broadcast_to(at(x, lanes), lanes.shape).tolist() for x in (count, bytes_))
        barriers = {address: self.get(address, site) for address in dict.fromkeys(addresses.tolist())}
        for lane, address, arrivals, amount in zip(lanes.tolist(), addresses.tolist(), counts, amounts, strict=True):
            barrier = barriers[address]
            if state is not None:
                state[lane] = barrier.phase
            barrier.tx += amount
            barrier.pending -= arrivals
            if barrier.pending <= 0:
                self._flip(address, barrier, site)

    def complete(self, address: int, bytes_: int, site: int, issue: Issue | None) -> None:
        """`bytes_` of an asynchronous copy arrived."""
        barrier = self.get(address, site)
        if issue is not None:
            self.machine.race.check_init_of_agent(site, issue, barrier.init, "completion on an mbarrier")
            barrier.incoming = self.machine.race.join(barrier.incoming, issue.handed)
        barrier.tx -= bytes_
        self.machine.timeline.complete(address)
        self._flip(address, barrier, site)

    def agent_arrive(self, address: int, site: int, known: Array | None, issuer: Issue | None) -> None:
        """An asynchronous arrival (tcgen05.commit, cp.async.mbarrier.arrive) that hands on `known`."""
        barrier = self.get(address, site)
        if known is not None:
            race = self.machine.race
            if issuer is not None:
                race.check_init_of_agent(site, issuer, barrier.init, "tcgen05.commit")
                known = race.join(known, issuer.handed)
            barrier.incoming = race.join(barrier.incoming, known)
        barrier.pending -= 1
        self.machine.timeline.complete(address)
        self._flip(address, barrier, site)

    def completion(self, address: int, site: int) -> tuple[int, int]:
        """Component and epoch under which what completes on the barrier now becomes known."""
        return self.component(address), self.get(address, site).phase + 1

    def test(self, site: int, m: Any, target: AddressOperand, state: Any, parity: bool) -> Array:
        """Which lanes' phase is over."""
        machine = self.machine
        ready = np.zeros(machine.count, bool)
        lanes, addresses = self.barrier_addresses(site, m, target)
        states = at(state, lanes).astype(np.int64)
        keys = addresses * 2 + (states & 1) if parity else np.arange(len(lanes))
        for key in np.unique(keys):
            same = keys == key
            address = int(addresses[same][0])
            barrier = self.get(address, site)
            over = (barrier.phase & 1) != int(states[same][0] & 1) if parity else barrier.phase > int(states[same][0])
            warps = np.unique(lanes[same] >> 5) if machine.race.on else None
            if warps is not None:
                machine.race.check_init(site, lanes[same], barrier.init, "wait on an mbarrier")
            if over:
                ready[lanes[same]] = True
                if machine.timeline.on:
                    machine.timeline.passed(address, barrier.phase, lanes[same] >> 5, "mbarrier")
                if warps is not None:
                    machine.race.acquire(warps, barrier.clock)
        return ready

    # -- named barriers
    def named_wait(self, site: int, m: Any, number: Any, count: Any, resume: int | None, reduction: Any) -> None:
        """Lanes leave the scheduler until the barrier is full, then go on at block `resume`, if there is one."""
        machine, race = self.machine, self.machine.race
        lanes = machine.lanes(m)
        keys = machine.block_of[lanes] * 16 + at(number, lanes).astype(np.int64)
        for key in np.unique(keys).tolist():
            some = lanes[keys == key]
            if not 0 <= key - int(machine.block_of[some[0]]) * 16 < 16:
                raise BarrierError(f"named barrier {key} is not in 0..15", some, site, "PE305")
            expected = one(count, some[0])
            if expected % 32 or expected <= 0:
                raise BarrierError(f"named barrier for {expected} threads: not a multiple of 32", some, site, "PE305")
            barrier = self.named.setdefault(key, NamedBarrier(expected, site))
            if barrier.expected != expected:
                raise BarrierError(
                    f"named barrier {key % 16}: {expected} threads here, {barrier.expected} elsewhere",
                    some,
                    site,
                    "PE305",
                )
            # A barrier counts warps: a warp with inactive lanes arrives as a whole.
            warps = np.unique(some >> 5)
            barrier.arrived += 32 * len(warps)
            machine.timeline.arrive(("named", key), warps)
            if race.on:
                barrier.incoming = race.join(barrier.incoming, race.release(warps))
            if resume is not None:
                barrier.waiting.append((resume, some, reduction))
            if barrier.arrived > barrier.expected:
                raise BarrierError(
                    f"named barrier {key % 16}: {barrier.arrived} arrivals for {barrier.expected}", some, site, "PE305"
                )
            if barrier.arrived == barrier.expected:
                machine.timeline.flip(("named", key), 0)
                self._open(self.named.pop(key), ("named", key))

    def _open(self, barrier: NamedBarrier, key: tuple[str, int]) -> None:
        machine = self.machine
        votes = [at(reduction[2], lanes) for _, lanes, reduction in barrier.waiting if reduction]
        for resume, lanes, reduction in barrier.waiting:
            if reduction:  # the number of true predicates, or whether one or all are true
                every = np.concatenate(votes)
                reduction[1][lanes] = {"popc": every.sum(), "and": every.all(), "or": every.any()}[reduction[0]]
            mask = np.zeros(machine.count, bool)
            mask[lanes] = True
            machine.schedule(resume, mask)
            machine.race.acquire(np.unique(lanes >> 5), barrier.incoming)
            machine.timeline.passed(key, 0, lanes >> 5, "bar.sync")
        machine.event += 1

    # -- cluster barrier
    def cluster_arrive(self, site: int, m: Any, relaxed: bool) -> None:
        machine, race = self.machine, self.machine.race
        lanes = machine.lanes(m)
        cluster = self.cluster_of[lanes]
        again = self.cluster_joined[lanes] == self.cluster_phase[cluster]
        if again.any():
            raise BarrierError("barrier.cluster.arrive twice without a wait", lanes[again], site, "PE306")
        self.cluster_joined[lanes] = self.cluster_phase[cluster]
        np.add.at(self.cluster_arrived, cluster, 1)
        if machine.timeline.on:
            for lane, number in zip(lanes.tolist(), cluster.tolist(), strict=True):
                machine.timeline.arrive(("cluster", number), [lane >> 5])
        if race.on:
            for number in np.unique(cluster).tolist():
                warps = np.unique(lanes[cluster == number] >> 5)
                # Of relaxed arrivals only what an earlier fence released goes along.
                fenced = [race.fenced[warp] for warp in warps.tolist() if warp in race.fenced]
                for known in fenced if relaxed else [race.release(warps)]:
                    self.cluster_incoming[number] = race.join(self.cluster_incoming.get(number), known)
        self.check_clusters()

    def check_clusters(self) -> None:
        """Exited threads count as arrived."""
        machine = self.machine
        members = machine.cluster_size * machine.block_threads
        full = (self.cluster_arrived > 0) & (self.cluster_arrived + self.exited == members)
        for number in np.flatnonzero(full).tolist():
            self.cluster_phase[number] += 1
            machine.timeline.flip(("cluster", number), int(self.cluster_phase[number]))
            self.cluster_arrived[number] = 0
            if number in self.cluster_incoming:
                self.cluster_clock[number] = self.cluster_incoming.pop(number)
            machine.event += 1

    def cluster_wait(self, site: int, m: Any) -> Array:
        machine, race = self.machine, self.machine.race
        never = machine.lanes(m)
        never = never[self.cluster_joined[never] < 0]
        if len(never):
            raise BarrierError("barrier.cluster.wait without an arrive", never, site, "PE306")
        ready = self.cluster_phase[self.cluster_of] > self.cluster_joined
        if machine.timeline.on:
            for lane in machine.lanes(ready if m is True else ready & m).tolist():
                number = int(self.cluster_of[lane])
                machine.timeline.passed(("cluster", number), int(self.cluster_phase[number]), [lane >> 5], "cluster")
        if race.on:
            done = machine.lanes(ready if m is True else ready & m)
            for number in np.unique(self.cluster_of[done]).tolist():
                race.acquire(np.unique(done[self.cluster_of[done] == number] >> 5), self.cluster_clock.get(number))
        return ready

    # -- cluster launch control: our response holds x, y, z of the first block, and whether it is valid
    def try_cancel(self, site: int, m: Any, target: AddressOperand, barrier: AddressOperand, multicast: bool) -> None:
        machine, memory = self.machine, self.machine.memory
        lanes = machine.lanes(m)
        if self.declined[lanes].any():
            raise Fault("clusterlaunchcontrol.try_cancel by a thread that saw one fail", lanes, site, "PE502")
        addresses, signals = (memory.physical(lanes, target, 16, site), memory.physical(lanes, barrier, 8, site))

        def run(lane: int, address: int, signal: int, issue: Issue | None) -> None:
            first_block, cluster_first = machine.hand_out(), int(machine.cluster_base[lane]) >> 24
            machine.report.operations["clusters handed out"] += first_block is not None
            words = (*first_block, 1) if first_block else (0xFFFFFFFF,) * 3 + (0,)
            for block in range(cluster_first, cluster_first + machine.cluster_size) if multicast else [address >> 24]:
                here, there = (block << 24 | x & 0xFFFFFF for x in (address, signal))
                machine.tma.write(site, np.array([here >> 4]), np.array(words, u32).view(np.complex128), issue, there)

        for lane, address, signal in zip(lanes.tolist(), addresses.tolist(), signals.tolist(), strict=True):
            machine.queues.issue(None, partial(run, lane, address, signal, machine.race.issue(lane)))

    def query(self, m: Any, response: Array) -> Array:
        """Which responses grant a cluster; a thread that sees a decline must not issue another request."""
        granted = response[:, 3] != 0
        self.declined |= ~granted & m
        return granted

    # -- deadlock reports
    def describe_named(self) -> list[tuple[int, str]]:
        return [
            (
                named.site,
                f"named barrier {key % 16} of {self.machine.block_name(key // 16)}: "
                f"{named.arrived} of {named.expected} threads",
            )
            for key, named in sorted(self.named.items())
        ]

    def describe(self) -> list[str]:
        lines = [f"  {text}" for _, text in self.describe_named()]
        for address, b in sorted(self.barriers.items()):
            lines.append(
                f"  mbarrier {self.machine.shared_name(address)}: {b.count - b.pending} of {b.count} arrivals, "
                f"{b.tx} bytes outstanding, phase {b.phase & 1} (number {b.phase})"
            )
        lines += [
            f"  cluster barrier {number}: {int(self.cluster_arrived[number])} threads arrived"
            for number in np.flatnonzero(self.cluster_arrived).tolist()
        ]
        return lines


def wait_name(instruction: Instruction) -> str:
    return "mbarrier" if instruction.opcode == "wait_loop" else instruction.text
