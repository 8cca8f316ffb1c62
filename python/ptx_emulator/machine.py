"""One wave of blocks: every register is an array with one lane per thread of every block, blocks of code run on masks.

Schedulers: `lowest-pc` runs the lowest block of code that has lanes ready, which brings diverged lanes together again;
`random` picks a warp (a warpgroup, where wgmma is used) at random; `lazy` is lowest-pc with asynchronous work done as
late as the kernel's own waits allow.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_emulator import alu
from ptx_emulator.asynchronous import AsyncCopies, Queues
from ptx_emulator.blas import single_threaded
from ptx_emulator.codegen import Program, load
from ptx_emulator.codegen.emitter import RESERVED_SHARED
from ptx_emulator.codegen.special import SPECIAL_REGISTERS, WIDE, block_coordinate, coordinate
from ptx_emulator.errors import CollectiveError, Deadlock, EmulatorError, Fault
from ptx_emulator.findings import check_codes
from ptx_emulator.in_flight import Registers
from ptx_emulator.memory import Memory
from ptx_emulator.mma import WarpMatrices
from ptx_emulator.numerics import Array, u32, u64
from ptx_emulator.ptx.parser import TYPE_BITS
from ptx_emulator.race import NoRaces, Races, Shadow
from ptx_emulator.report import Finding, Launch, Report
from ptx_emulator.sync import Sync, wait_name
from ptx_emulator.tcgen05 import TensorMemory
from ptx_emulator.timeline import NoRecorder, Recorder, Timeline
from ptx_emulator.tma import TMA

Dim3 = tuple[int, int, int]
SCHEDULERS = ("lowest-pc", "random", "lazy")
ON_ERROR = ("collect", "raise", "report")
WAVE = 256  # resident blocks
GRID_LIMIT = ((1 << 31) - 1, 65_535, 65_535)  # blocks by dimension
PATIENCE = 1_000  # such steps, as of a loop that polls memory, after which pending asynchronous work is done
IDLE_LIMIT = 200_000  # steps without an effect that other threads can observe


@dataclass(frozen=True)
class Options:
    races: bool = False
    scheduler: str = "lowest-pc"
    seed: int = 0
    multiprocessors: int = 8
    ignore: Collection[str] = ()
    warn: Collection[str] = ()
    on_error: str = "collect"
    timeline: Dim3 | None = None

    def __post_init__(self) -> None:
        for name in ("ignore", "warn"):
            object.__setattr__(self, name, check_codes(getattr(self, name), name))
        for name, allowed in (("scheduler", SCHEDULERS), ("on_error", ON_ERROR)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")


def _place(code: str, site: int | None, other: int | None) -> tuple[str, int | None, int | None]:
    """Two accesses are one finding in whatever order they come."""
    return (code, other, site) if site is not None and other is not None and other < site else (code, site, other)


class Machine:
    def __init__(
        self,
        program: Program,
        launch: Launch,
        options: Options,
        parameters: Any,
        ranges: set[tuple[int, int]],
        clusters: list[int],
        waiting: deque[int],
    ) -> None:
        self.program, self.report = program, launch
        grid, block, cluster = launch.grid, launch.block, launch.cluster
        # Clusters of the grid: resident; not started; and started in place of one that ended, to run afterwards.
        self.clusters, self.waiting, self.started = np.array(clusters), waiting, deque[int]()
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.blocks = blocks = len(clusters) * self.cluster_size
        self.block_threads = block[0] * block[1] * block[2]
        self.rounded_block = -(-self.block_threads // 32) * 32
        # Lanes of one block, so that warps (and warpgroups, where wgmma is used) are aligned slices of the lane axis.
        unit = 128 if program.uses_warpgroups else 32
        self.lane_stride = -(-self.block_threads // unit) * unit
        self.count = blocks * self.lane_stride
        self.running = np.full(blocks, self.block_threads)
        self.all_lanes = np.arange(self.count)
        self.block_of = self.all_lanes // self.lane_stride
        self.thread = self.all_lanes % self.lane_stride
        self.rank = self.block_of % self.cluster_size
        self.cluster = self.clusters[self.block_of // self.cluster_size]
        self.clusters_of_grid = [g // c for g, c in zip(grid, cluster, strict=True)]
        values = {name: alu.lanes_of(SPECIAL_REGISTERS[name](self), self.count) for name in program.special}
        self.special = {name: value.astype(u64 if name in WIDE else u32) for name, value in values.items()}
        self.where = np.stack([block_coordinate(self, axis) for axis in range(3)], 1)[:: self.lane_stride].tolist()
        self._registers()
        kernel = program.kernel
        alignment = max([16, *kernel.dynamic_shared.values()])
        dynamic = RESERVED_SHARED + -(-kernel.shared.bytes // alignment) * alignment
        self.shared_end = dynamic + launch.shared_bytes - kernel.shared.bytes
        self.shared_window = (self.rank << 24).astype(u32)
        self.dynamic_shared = self.shared_window + u32(dynamic)
        self.cluster_base = (self.block_of - self.rank).astype(np.int64) << 24
        self.parameters = bytes(parameters)
        self.parameter_base = ctypes.addressof(parameters)
        ranges = ranges | {(self.parameter_base, self.parameter_base + len(self.parameters))}
        self.event = 0
        self.options = options
        self.current = 0  # the block of code that runs
        self.scheduler, self.random = options.scheduler, random.Random(options.seed)
        self.queues = Queues(options.scheduler == "lazy", options.seed)
        self.race: Any = Races(self) if options.races else NoRaces()
        watched = options.races and program.in_flight.numbers
        self.registers: Any = Registers(self) if watched else NoRaces()
        self.memory = Memory(self, ranges)
        self.sync = Sync(self)
        self.async_copies = AsyncCopies(self)
        self.tma = TMA(self)
        self.mma = WarpMatrices(self)
        self.tensor = TensorMemory(self)
        self.found = launch.by_place
        self.timeline: Any = self._recorder(options.timeline)
        self.groups: dict[int, Array] = {0: self.thread < self.block_threads}
        self.blocked: dict[int, tuple[int, Array]] = {}
        self.executed = np.zeros(len(program.blocks), np.int64)

    def _recorder(self, block: Dim3 | None) -> Any:
        """Of the thread block, if it is one of these."""
        if block is None or list(block) not in self.where:
            return NoRecorder()
        self.report.timeline = Timeline(block)
        return Recorder(self, self.where.index(list(block)), self.report.timeline)

    def hand_out(self) -> tuple[int, int, int] | None:
        """Cluster launch control: takes a cluster that has not started; returns its first block, None without one."""
        if not self.waiting:
            return None
        self.waiting.rotate(0 if self.scheduler == "lowest-pc" else self.random.randrange(len(self.waiting)))
        number, size = self.waiting.popleft(), self.report.cluster
        x, y, z = (coordinate(number, self.clusters_of_grid, axis) * size[axis] for axis in range(3))
        return x, y, z

    def _registers(self) -> None:
        self.r: list[Array] = []
        self.s: list[Array] = []
        self.f: list[Array] = []
        for kind in self.program.types:
            bits = TYPE_BITS[kind]
            if bits == 1:
                views = [np.zeros(self.count, bool)] * 3
            elif bits == 128:
                views = [np.zeros((self.count, 4), u32)] * 3
            else:
                base = np.zeros(self.count, alu.UINT[bits])
                floats = {8: np.int8, 16: np.float16, 32: np.float32, 64: np.float64}[bits]
                views = [base, base.view(alu.SIGNED[bits // 8]), base.view(floats)]
            for registers, view in zip((self.r, self.s, self.f), views, strict=True):
                registers.append(view)

    # -- used by the generated code
    def lanes(self, m: Any) -> Array:
        return self.all_lanes if m is True else np.flatnonzero(m)

    def parameter_address(self, offset: int) -> Any:
        return u64(self.parameter_base + offset)

    def nanoseconds(self) -> Any:
        return u64(time.time_ns())

    def load_parameter(self, m: Any, target: Array, offset: int, size: int, signed: bool) -> None:
        value = np.frombuffer(self.parameters, alu.UINT[size * 8], 1, offset)[0]
        if signed:
            value = value.view(alu.SIGNED[size]).astype(alu.SIGNED[target.dtype.itemsize]).view(target.dtype)
        alu.put(m, target, value)

    def trap(self, site: int, m: Any) -> None:
        raise Fault("trap", self.lanes(m), site, "PE501")

    # -- findings
    def known(self, code: str, site: int | None, other: int | None = None) -> bool:
        """Whether a finding needs no text: its code is ignored, or it is there already and is counted."""
        if code in self.options.ignore:
            return True
        finding = self.found.get(_place(code, site, other))
        if finding is not None:
            finding.count += 1
        return finding is not None

    def fault(self, fault: Fault) -> None:
        """An error behind which the launch goes on, if it may."""
        if self.known(fault.code, fault.site, fault.other):
            return
        place = _place(fault.code, fault.site, fault.other)
        self.locate(fault)
        if fault.code in self.options.warn:
            finding = Finding(fault.code, "warning", fault.message)
            self.found[place] = self.add(finding, fault.site, fault.other, fault.where)
        elif self.options.on_error == "raise":
            raise fault
        else:
            self.found[place] = self.add_error(fault)

    def warn(self, code: str, text: str, site: int | None = None, other: int | None = None) -> None:
        if not self.known(code, site, other):
            where = "" if site is None else self.describe_place(site)
            finding = Finding(code, "warning", text)
            self.found[_place(code, site, other)] = self.add(finding, site, other, where)

    def add_error(self, fault: Fault, fatal: bool = False) -> Finding:
        finding = Finding(fault.code, "error", fault.message, fatal=fatal, fault=fault)
        return self.add(finding, fault.site, fault.other, fault.where)

    def add(self, finding: Finding, site: int | None, other: int | None, where: str) -> Finding:
        describe = self.program.instruction
        finding.at, finding.other, finding.where = describe(site), describe(other), where
        self.report.findings.append(finding)
        return finding

    def block_number(self, lanes: Array) -> Array:
        """Of each lane's block, within the launch."""
        return self.cluster[lanes].astype(np.int64) * self.cluster_size + self.rank[lanes]

    # -- names for messages
    def block_name(self, block: int) -> str:
        x, y, z = self.where[block]
        return f"block ({x}, {y}, {z})"

    def warp_name(self, warp: int) -> str:
        lane = warp * 32
        return f"warp {lane % self.lane_stride // 32} of {self.block_name(lane // self.lane_stride)}"

    def shared_name(self, address: int) -> str:
        return f"+{address & 0xFFFFFF:#x} of {self.block_name(address >> 24)}"

    def place(self, shadow: Shadow, granule: int) -> str:
        memory = self.memory
        if shadow is memory.shared_shadow:
            block, offset = divmod(granule, memory.shadow_stride)
            return f"shared memory +{offset * memory.granule:#x} of {self.block_name(block)}"
        if shadow is self.tensor.shadow:
            block, rest = divmod(granule, 128 * 512)
            return f"tensor memory lane {rest // 512} column {rest % 512} of {self.block_name(block)}"
        number = next(n for n, s in memory.global_shadows.items() if s is shadow)
        return f"global memory {int(memory.first[number]):#x} + {granule * memory.granule:#x}"

    def describe_site(self, site: int) -> str:
        instruction = self.program.kernel.instructions[site]
        text = f"PTX line {instruction.line} ({instruction.text})"
        if instruction.source:
            text += f", {instruction.source[0]}:{instruction.source[1]}"
        return text

    def describe_lanes(self, lanes: Sequence[int]) -> str:
        if not len(lanes):
            return ""
        block = int(self.block_of[lanes[0]])
        threads = [int(self.thread[x]) for x in lanes if self.block_of[x] == block]
        shown = ", ".join(map(str, threads[:8])) + (", ..." if len(threads) > 8 else "")
        others = len({int(self.block_of[x]) for x in lanes}) - 1
        return f"; {self.block_name(block)}, threads {shown}" + (f", and {others} more blocks" if others else "")

    # -- scheduling
    def schedule(self, block: int, mask: Array) -> None:
        if not mask.any():
            return
        if block >= len(self.program.blocks):
            self.leave(mask)
            return
        if block in self.program.warp_barriers:  # those that wait there look again
            self.blocked.pop(block, None)
        known = self.groups.get(block)
        self.groups[block] = mask if known is None else known | mask

    def leave(self, mask: Array) -> None:
        lanes = np.flatnonzero(mask)
        self.async_copies.check_exit(lanes)
        np.add.at(self.sync.exited, self.sync.cluster_of[lanes], 1)
        before = self.running.reshape(-1, self.cluster_size).any(1)
        np.add.at(self.running, self.block_of[lanes], -1)
        for _ in range(int((before & ~self.running.reshape(-1, self.cluster_size).any(1)).sum())):
            if self.waiting:  # its resources are free for the next cluster
                self.started.append(self.waiting.popleft())
        self.sync.check_clusters()
        self.event += 1

    def ready(self, block: int) -> Array | None:
        mask = self.groups[block]
        event, held = self.blocked.get(block, (-1, mask))
        if event != self.event:
            return mask
        left = mask & ~held
        return left if left.any() else None

    def pick_lowest(self) -> tuple[int, Array] | None:
        worn: tuple[int, int, Array] | None = None
        for block in sorted(self.groups):
            mask = self.ready(block)
            if mask is None:
                continue
            spins = self.spins.get(block, 0)
            if spins < 64:
                return block, mask
            if worn is None or spins < worn[0]:
                worn = spins, block, mask
        return None if worn is None else worn[1:]

    def pick_random(self) -> tuple[int, Array] | None:
        unit = 128 if self.program.uses_warpgroups else 32
        units = self.count // unit
        lowest = np.full(units, -1)
        for block in sorted(self.groups, reverse=True):
            mask = self.ready(block)
            if mask is not None:
                lowest[mask.reshape(units, unit).any(1)] = block
        candidates = np.flatnonzero(lowest >= 0)
        if not len(candidates):
            return None
        block = int(lowest[self.random.choice(candidates.tolist())])
        chosen = lowest == block
        if chosen.sum() > 1:
            keep = np.array([self.random.random() < 0.5 for _ in range(units)])
            chosen = chosen & keep if (chosen & keep).any() else chosen
        ready = self.ready(block)
        assert ready is not None
        return block, ready & np.repeat(chosen, unit)

    def run(self) -> None:
        """Runs until every thread has exited."""
        pick = self.pick_random if self.scheduler == "random" else self.pick_lowest
        self.spins: dict[int, int] = {}
        self.polls: dict[int, Array] = {}
        self.sleeping: list[tuple[int, Array]] = []
        idle, last, released = 0, -1, 0
        try:
            with np.errstate(all="ignore"):
                while self.groups or self.sleeping:
                    if self.event != last:
                        last, idle, released = self.event, 0, 0
                        self.spins.clear()
                        self.polls.clear()
                    choice = pick()
                    if (choice is None or idle > PATIENCE) and self.queues.run_one():
                        self.event += 1
                        continue
                    if choice is None and self.sleeping:
                        self.wake()
                        continue
                    if choice is None and self.polls and released < 200:
                        released += 1
                        self.release_polls()
                        continue
                    idle += 1
                    if choice is None:
                        self.check_warp_barriers()
                    if choice is None or idle > IDLE_LIMIT:
                        raise Deadlock(self.deadlock("no thread can go on" if choice is None else "no progress"))
                    self.current, mask = choice
                    self.step(self.current, mask)
                if any(barrier.waiting for barrier in self.sync.named.values()):
                    raise Deadlock(self.deadlock("a named barrier never fills"))
                for site, text in self.sync.describe_named():  # threads may end after an arrival that none waits for
                    self.warn("PE307", f"{text} when the kernel ended", site)
                self.queues.drain()
                self.async_copies.drain()
                self.mma.finish()
                self.tensor.finish()
        except Fault as fault:
            self.locate(fault)
            self.add_error(fault, fatal=True)
            raise
        finally:
            self.count_instructions()

    def step(self, block: int, mask: Array) -> None:
        rest = self.groups[block] & ~mask
        if rest.any():
            self.groups[block] = rest
        else:
            del self.groups[block]
        self.spins[block] = self.spins.get(block, 0) + 1
        self.executed[block] += int(mask.reshape(-1, 32).any(1).sum())
        m: Any = True if mask.all() else mask
        self.timeline.step(block, mask)
        result = self.program.functions[block](self, m, self.r, self.s, self.f)
        following = block + 1
        if result is None:
            self.schedule(following, mask)
            return
        what = result[0]
        inner = mask if result[1] is True else result[1] & mask
        self.schedule(following, mask & ~inner)
        if what == "go":
            self.schedule(result[2], inner)
        elif what == "bar":
            first = self.program.blocks[block].first
            self.report.waits["bar.sync"] += 1
            self.sync.named_wait(first, inner, result[2], result[3], following, result[4])
        elif what == "wait":
            ready = result[2] & inner
            self.hold(block, inner, ready)
            self.schedule(following, ready)
        elif what == "try":
            self.poll(block, inner, result[2] & inner, result[3])
        else:  # nanosleep
            self.sleeping.append((following, inner))

    def wake(self) -> None:
        """Resumes sleeping threads when no other can run: they may wait for memory that another launch writes."""
        time.sleep(1e-3)
        self.event += 1
        for block, mask in self.sleeping:
            self.schedule(block, mask)
        self.sleeping.clear()

    def check_warp_barriers(self) -> None:
        """A `bar.warp.sync` at which all lanes that are left wait names some that have ended."""
        for block in self.program.warp_barriers & self.groups.keys():
            warps = self.groups[block].reshape(-1, 32)
            alive = np.zeros_like(warps)
            for mask in self.groups.values():
                alive |= mask.reshape(-1, 32)
            for barrier in self.sync.named.values():
                for _, lanes, _ in barrier.waiting:
                    alive.reshape(-1)[lanes] = True
            ended = warps.any(1) & (warps == alive).all(1)
            if ended.any():
                lanes = np.flatnonzero((warps & ended[:, None]).reshape(-1))
                site = self.program.blocks[block].first
                raise CollectiveError(
                    f"bar.warp.sync executed by {int(warps[ended][0].sum())} of 32 threads: the others have ended",
                    lanes,
                    site,
                )

    def hold(self, block: int, mask: Array, ready: Array) -> None:
        waiting = mask & ~ready
        if not waiting.any():
            return
        self.report.waits[wait_name(self.program.kernel.instructions[self.program.blocks[block].first])] += 1
        self.schedule(block, waiting)
        event, held = self.blocked.get(block, (-1, waiting))
        self.blocked[block] = (self.event, held | waiting if event == self.event else waiting)

    def poll(self, block: int, mask: Array, ready: Array, predicate: Array) -> None:
        """A single try_wait, which may return false: it blocks its lanes only while other work exists."""
        predicate[ready] = True
        self.schedule(block + 1, ready)
        waiting = mask & ~ready
        if not waiting.any():
            return
        if self.scheduler == "lazy" or (self.scheduler == "random" and self.random.random() < 0.5):
            predicate[waiting] = False
            self.schedule(block + 1, waiting)
            return
        self.hold(block, mask, ready)
        self.polls[block] = predicate

    def release_polls(self) -> None:
        for block, predicate in self.polls.items():
            mask = self.groups.pop(block, None)
            if mask is not None:
                predicate[mask] = False
                self.schedule(block + 1, mask)
            self.blocked.pop(block, None)
        self.polls.clear()

    # -- reports
    def count_instructions(self) -> None:
        code = self.program.kernel.instructions
        for number, block in enumerate(self.program.blocks):
            if self.executed[number]:
                for instruction in code[block.first : block.last]:
                    if instruction.opcode != "nop":
                        name = "mbarrier.try_wait" if instruction.opcode == "wait_loop" else instruction.text
                        self.report.instructions[name] += int(self.executed[number])

    def deadlock(self, why: str) -> str:
        first = [block.first for block in self.program.blocks]
        waiting = [(first[block], np.flatnonzero(mask)) for block, mask in sorted(self.groups.items())]
        # Lanes at a named barrier have left their block and will go on at the next one.
        waiting += [(first[block] - 1, lanes) for b in self.sync.named.values() for block, lanes, _ in b.waiting]
        lines = [f"deadlock: {why}"]
        for site, lanes in waiting:
            lines.append(f"  {len(lanes)} threads at {self.describe_site(site)}{self.describe_lanes(lanes.tolist())}")
        return "\n".join(lines + self.sync.describe())

    def locate(self, fault: Fault) -> None:
        if fault.where or isinstance(fault, Deadlock):
            return
        site = fault.site
        if site is None:
            trace, line = fault.__traceback__, 0
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == self.program.filename:
                    line = trace.tb_lineno
                trace = trace.tb_next
            site = self.program.site_at(line) if line else self.program.blocks[self.current].first
        fault.site = site
        fault.where = self.describe_place(site, fault.lanes)

    def describe_place(self, site: int, lanes: Sequence[int] = ()) -> str:
        kernel = self.program.kernel
        text = kernel.ptx_lines[kernel.instructions[site].line - 1].strip()
        return f"  at {self.describe_site(site)}{self.describe_lanes(lanes)}\n  {text}"


def parameter_buffer(program: Program, values: Sequence[bytes]) -> tuple[Any, Any]:
    """(the parameters, 64-byte aligned; the object that keeps them alive)."""
    kernel = program.kernel
    size = max(kernel.parameters.bytes, 1)
    raw = (ctypes.c_uint8 * (size + 127))()
    view = (ctypes.c_uint8 * size).from_buffer(raw, -ctypes.addressof(raw) % 128)
    if len(values) != len(kernel.parameters):
        raise EmulatorError(f"{kernel.name} takes {len(kernel.parameters)} parameters, got {len(values)}")
    for number, (parameter, value) in enumerate(zip(kernel.parameters.values(), values, strict=True)):
        if len(value) != parameter.size:
            raise EmulatorError(f"parameter {number} has {parameter.size} bytes, got {len(value)}")
        ctypes.memmove(ctypes.addressof(view) + parameter.offset, value, parameter.size)
    return view, raw


def execute(
    text: str,
    entry: str,
    grid: Dim3,
    block: Dim3,
    cluster: Dim3,
    shared_bytes: int,
    values: Sequence[bytes],
    *,
    ranges: set[tuple[int, int]],
    options: Options,
    report: Report,
) -> Launch:
    """Runs one launch, in waves of whole clusters, and adds it to `report`.

    With cluster launch control a wave has one block per SM; `try_cancel` assigns the others to running blocks.
    """
    program = load(text, entry)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise EmulatorError(f"grid {grid} is not a multiple of the cluster {cluster}")
    if any(g > limit for g, limit in zip(grid, GRID_LIMIT, strict=True)):
        raise EmulatorError(f"grid {grid} is beyond what CUDA allows: {GRID_LIMIT}")
    launch = Launch(entry, grid, block, cluster, shared_bytes + program.kernel.shared.bytes)
    if not options.races:  # with race detection, actual uses are reported instead
        launch.findings += [
            Finding(code, "warning", text, program.instruction(site))
            for code, site, text in program.warnings()
            if code not in options.ignore
        ]
    launch.handled = options.on_error == "report"
    report.launches.append(launch)
    parameters, keep = parameter_buffer(program, values)
    size = cluster[0] * cluster[1] * cluster[2]
    waiting = deque(range(grid[0] * grid[1] * grid[2] // size))
    wave = max(1, (options.multiprocessors if program.uses_launch_control else WAVE) // size)
    start = time.perf_counter()
    try:
        while waiting:
            clusters = [waiting.popleft() for _ in range(min(wave, len(waiting)))]
            machine = Machine(program, launch, options, parameters, ranges, clusters, waiting)
            with single_threaded():
                machine.run()
            waiting.extendleft(reversed(machine.started))
    except Fault:
        if not launch.handled:
            launch.handled = True
            first = launch.errors[0].fault
            assert first is not None
            first.findings = launch.findings
            raise first  # noqa: B904  (what happened later is in its message)
    finally:
        launch.seconds = time.perf_counter() - start
        del keep
    return launch
