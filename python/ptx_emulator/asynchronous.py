"""Asynchronous operations: copy groups, and the queues of the lazy scheduler."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.alu import UINT, at
from ptx_emulator.errors import Fault, Misaligned
from ptx_emulator.memory import AddressOperand, combine
from ptx_emulator.numerics import Array
from ptx_emulator.race import ATOMIC, Issue

if TYPE_CHECKING:
    from ptx_emulator.machine import Machine


class Queues:
    """Eager: operations run when issued. Lazy: when no thread can run, in random order; each queue is in order."""

    def __init__(self, lazy: bool, seed: int) -> None:
        self.lazy = lazy
        self.random = random.Random(seed)
        self.queues: dict[Hashable, deque[Callable[[], None]]] = {}
        self.count = 0

    def issue(self, queue: Hashable, operation: Callable[[], None]) -> None:
        """`queue` None: unordered with other operations."""
        if not self.lazy:
            operation()
            return
        if queue is None:
            self.count += 1
            queue = ("free", self.count)
        self.queues.setdefault(queue, deque()).append(operation)

    def run_one(self) -> bool:
        if not self.queues:
            return False
        key = self.random.choice(list(self.queues))
        operation = self.queues[key].popleft()
        if not self.queues[key]:
            del self.queues[key]
        operation()
        return True

    def drain(self) -> None:
        while self.run_one():
            pass


@dataclass
class Group:
    """One pending operation of a commit group: lanes, the group index of each, and a function that runs some lanes."""

    lanes: Array
    numbers: Array
    run: Callable[[Array], None]


class AsyncCopies:
    """Commit groups per thread (`cp.async` and `bulk`), and cp.async itself."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.committed = {mechanism: np.zeros(machine.count, np.int64) for mechanism in ("cp.async", "bulk")}
        self.pending: dict[str, list[Group]] = {"cp.async": [], "bulk": []}
        # Groups of bulk copies whose source has been waited for, and that must be waited for before the block ends.
        self.waited, self.reading = (np.zeros(machine.count, np.int64), np.zeros(machine.count, np.int64))

    def add(self, mechanism: str, lanes: Array, run: Callable[[Array], None]) -> None:
        if mechanism == "bulk":
            self.reading[lanes] = self.committed[mechanism][lanes] + 1
        if self.machine.queues.lazy:
            self.pending[mechanism].append(Group(lanes, self.committed[mechanism][lanes], run))
        else:
            run(np.arange(len(lanes)))

    def component(self, mechanism: str, what: str, lane: int) -> int:
        thread = lane >> 5 if mechanism == "cp.async" else lane
        return self.machine.race.component(
            (mechanism, what, thread), f"{mechanism} ({what}s) of {self.machine.warp_name(lane >> 5)}"
        )

    def epoch(self, mechanism: str, lane: int) -> int:
        return int(self.committed[mechanism][lane]) + 1

    def commit(self, site: int, m: Any, mechanism: str) -> None:
        self.committed[mechanism][self.machine.lanes(m)] += 1
        if self.machine.timeline.on:
            for lane in self.machine.lanes(m).tolist():
                self.machine.timeline.commit((mechanism, lane))

    def wait(self, site: int, m: Any, mechanism: str, left: int, full: bool) -> None:
        machine = self.machine
        lanes = machine.lanes(m)
        limits = np.full(machine.count, -1, np.int64)
        limits[lanes] = self.committed[mechanism][lanes] - left
        self._run(mechanism, limits)
        if machine.timeline.on:
            for lane in lanes.tolist():
                machine.timeline.wait_group((mechanism, lane), [lane >> 5], left, f"{mechanism} group")
        if mechanism == "bulk":
            self.waited[lanes] = np.maximum(self.waited[lanes], limits[lanes])
        if not machine.race.on:
            return
        for lane in lanes.tolist() if mechanism == "bulk" else np.unique(lanes >> 5 << 5).tolist():
            for what in ("read", "write") if full else ("read",):
                if (mechanism, what, lane if mechanism == "bulk" else lane >> 5) in machine.race.components:
                    component = self.component(mechanism, what, lane)
                    machine.race.learn(np.array([lane >> 5]), component, int(limits[lane]))

    def _run(self, mechanism: str, limits: Array) -> None:
        left = []
        for group in self.pending[mechanism]:
            due = group.numbers < limits[group.lanes]
            if due.any():
                group.run(np.flatnonzero(due))
                if due.all():
                    continue
                group.numbers = np.where(due, np.int64(1) << 60, group.numbers)
            left.append(group)
        self.pending[mechanism] = left

    def drain(self) -> None:
        for mechanism in self.pending:
            self._run(mechanism, np.full(self.machine.count, np.int64(1) << 59))

    def check_exit(self, lanes: Array) -> None:
        left = lanes[self.reading[lanes] > self.waited[lanes]]
        if len(left):
            self.machine.fault(
                Fault(
                    "thread ended while its bulk copy may still read shared memory: no cp.async.bulk.wait_group covers "
                    "it",
                    left,
                    code="PE205",
                )
            )

    def mbarrier_arrive(self, site: int, m: Any, barrier: AddressOperand, no_increment: bool) -> None:
        """Arrives when the thread's earlier cp.async complete. Without .noinc it first increments the pending count."""
        machine, sync = self.machine, self.machine.sync
        lanes, addresses = sync.barrier_addresses(site, m, barrier)
        if not no_increment:
            for address in addresses.tolist():
                sync.get(address, site).pending += 1

        ends = [machine.timeline.open[("cp.async", lane)] for lane in lanes.tolist()] if machine.timeline.on else [0]

        def finish() -> None:
            machine.timeline.now = max(ends)
            everything = np.full(machine.count, -1, np.int64)
            everything[lanes] = np.int64(1) << 59
            self._run("cp.async", everything)
            for lane, address in zip(lanes.tolist(), addresses.tolist(), strict=True):
                known = None
                if machine.race.on:
                    component = self.component("cp.async", "write", lane)
                    known = machine.race.empty()
                    known[0, component] = self.epoch("cp.async", lane)  # a write of the generic proxy
                sync.agent_arrive(address, site, known, None)

        machine.queues.issue(None, finish)

    def copy(
        self,
        site: int,
        m: Any,
        target: AddressOperand,
        source: AddressOperand,
        size: int,
        valid: Any,
        cached: bool,
    ) -> None:
        machine, memory, race = self.machine, self.machine.memory, self.machine.race
        lanes = machine.lanes(m)
        to = memory.physical(lanes, target, size, site)
        origin = at(source, lanes)
        if (to % size).any() or (origin % size).any():
            raise Misaligned(f"cp.async of {size} bytes", lanes, site)
        amount = np.full(len(lanes), size) if valid is None else at(valid, lanes).astype(np.int64)
        some = amount > 0
        if some.any():
            memory.check_global(origin[some], int(amount[some].max()), lanes[some], site, "cp.async")
        what = "global to shared cp.async"
        machine.report._count_bytes(what, int(amount.sum()))
        if race.on and len(lanes):
            machine.report._count_conflicts(site, lanes, to, size)
        if race.on and some.any():
            which, address = lanes[some], origin[some].astype(np.int64)
            blocks = machine.block_number(which)
            machine.report._count_loads(what, which >> 5, blocks, address, size, cached=cached)
        if machine.timeline.on:
            ends = {
                warp: machine.timeline.copy(warp << 5, 32 * size, "cp.async") for warp in np.unique(lanes >> 5).tolist()
            }
            for lane in lanes.tolist():
                machine.timeline.hold(("cp.async", lane), ends[lane >> 5])
        for warp in np.unique(lanes >> 5).tolist() if race.on else ():
            mine = lanes >> 5 == warp
            lane = int(lanes[mine][0])
            component, epoch = (self.component("cp.async", "write", lane), self.epoch("cp.async", lane))
            memory.touched_by_agent(site, to[mine], size, race.issue(lanes[mine]), component, epoch, True, 0)
        unit = min(size, 8)
        shared = memory.views[unit]
        global_memory, first = memory.array("global", unit)

        def run(which: Array) -> None:
            for part in range(size // unit):
                full = amount[which] >= (part + 1) * unit
                index = (to[which] + part * unit) // unit
                shared[index[~full]] = 0
                shared[index[full]] = global_memory[(origin[which][full] - first) // unit + part]
            ragged = which[(amount[which] % unit) != 0]
            bytes_, first_byte = memory.array("global", 1)
            for one in ragged.tolist():
                start, rest = int(amount[one]) // unit * unit, int(amount[one]) % unit
                address, here = (int(to[one]) + start, int(origin[one]) + start - first_byte)
                memory.shared[address : address + rest] = bytes_[here : here + rest]

        self.add("cp.async", lanes, run)

    def remote(
        self,
        site: int,
        m: Any,
        op: str,
        ptx_type: str,
        size: int,
        target: AddressOperand,
        values: list[Any],
        barrier: AddressOperand,
    ) -> None:
        """st.async and, with an `op`, red.async: the bytes complete on an mbarrier of the block they go to."""
        machine, memory, race = self.machine, self.machine.memory, self.machine.race
        lanes, total = machine.lanes(m), size * len(values)
        addresses, signals = (
            memory.physical(lanes, target, total, site),
            machine.sync.barrier_addresses(site, m, barrier)[1],
        )
        if (addresses % total).any() or (addresses >> 24 != signals >> 24).any():
            raise Misaligned(
                f"{total} bytes to a misaligned address or to another block than their mbarrier", lanes, site
            )
        data = np.stack([at(v, lanes).astype(UINT[8 * size]) for v in values], 1)

        def run(address: int, signal: int, new: Array, issue: Issue | None) -> None:
            if issue is not None:
                completion, flags = machine.sync.completion(signal, site), ATOMIC if op else 0
                memory.touched_by_agent(site, np.array([address]), total, issue, *completion, True, flags)
            view = memory.views[size][address // size : address // size + len(values)]
            view[:] = combine(op, ptx_type, view.copy(), new) if op else new
            machine.sync.complete(signal, total, site, issue)
            machine.event += 1

        for lane, address, signal, new in zip(lanes.tolist(), addresses.tolist(), signals.tolist(), data, strict=True):
            machine.queues.issue(None, partial(run, address, signal, new, race.issue(lane)))
