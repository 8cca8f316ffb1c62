"""What a run found and did: findings, instructions, bytes per space, bank conflicts, waits. Counts, not times."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ptx_emulator.errors import Fault
from ptx_emulator.findings import RULES
from ptx_emulator.numerics import Array
from ptx_emulator.timeline import Timeline

SECTOR = 32  # bytes
WAVEFRONT = 128  # bytes of shared memory
ISSUED = 4  # instructions of warps in a cycle of an SM


def _no_conflict(words: Array) -> bool:
    """Whether the 32 words of each pass lie in different banks."""
    banks = np.uint64(1) << (words & 31).astype(np.uint64)
    return bool((np.bitwise_or.reduce(banks, 1) == np.uint64(0xFFFFFFFF)).all())


@dataclass(frozen=True)
class Instruction:
    """An instruction of a kernel.

    Attributes:
        line: Its line in the PTX.
        text: That line.
        file, source_line: The line of Python that it was compiled from; "" and 0 where the PTX does not say.
    """

    line: int
    text: str
    file: str = ""
    source_line: int = 0

    def __str__(self) -> str:
        return f"PTX line {self.line}" + (f", {self.file}:{self.source_line}" if self.file else "")


@dataclass
class Finding:
    """An error or a warning about a kernel; prints with its line.

    The same of the same instructions is one finding with a `count`; its message is that of the first time.

    Attributes:
        code: Of a row of [Findings](../emulator-findings.md).
        severity: "error" or "warning".
        message: What happened, with the names of memory, warps and blocks.
        at: The instruction; None where the finding belongs to none, as a deadlock.
        other: Of a race, the instruction of the earlier access.
        where: Text that says where: the line of PTX and its source, the block and the threads.
        count: How often it happened.
        fatal: Whether the launch ended there.
        fault: The exception that stands for it; None for a warning.
    """

    code: str
    severity: Literal["error", "warning"]
    message: str
    at: Instruction | None = None
    other: Instruction | None = None
    where: str = ""
    count: int = 1
    fatal: bool = False
    fault: Fault | None = field(default=None, repr=False, compare=False)

    @property
    def title(self) -> str:
        """A few words for the code."""
        return RULES[self.code].title

    @property
    def fix(self) -> str:
        """What to change in the kernel."""
        return RULES[self.code].fix

    def summary(self) -> str:
        """One line: code, title and place."""
        place = f" at {self.at}" if self.at else ""
        earlier = f", with {self.other}" if self.other else ""
        return f"{self.code} {self.title}{place}{earlier}{self._times()}"

    def _times(self) -> str:
        return f" ({self.count} times)" if self.count > 1 else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "code": self.code,
            "severity": self.severity,
            "title": self.title,
            "message": self.message,
            "fix": self.fix,
            "at": vars(self.at) if self.at else None,
            "other": vars(self.other) if self.other else None,
            "where": self.where.strip(),
            "count": self.count,
            "fatal": self.fatal,
        }

    def __str__(self) -> str:
        name = f"{type(self.fault).__name__}: " if self.fault else ""
        lines = [f"{self.severity}: {name}{self.code}: {self.message}{self._times()}"]
        return "\n".join([*lines, *([self.where] if self.where else [])])


@dataclass
class Launch:
    """One kernel launch; prints as a summary.

    Attributes:
        kernel: The kernel's name.
        grid, block, cluster: Their sizes; `cluster` in blocks.
        shared_bytes: Shared memory of a block, static and dynamic.
        seconds: How long the emulation took.
        instructions: Instructions by opcode, counted per warp, as a profiler does.
        bytes: Bytes moved, by kind: "global load", "shared store", "global to shared TMA" and so on.
        sectors: 32-byte sectors of global memory, by kind as `bytes`: of loads, stores and `cp.async` the distinct ones
            of each warp's instruction (with race detection only), of TMA those of each row of a box. A multicast counts
            once.
        operations: Multiply-adds of tensor cores, by instruction.
        wgmma_wavefronts: Passes of shared memory in which `wgmma` reads its operands, 128 bytes each.
        tensor_cycles: Cycles that tensor cores of one SM would need for all `wgmma` and `tcgen05.mma` of the launch, at
            their full rate. Those of two blocks of a pair are added up; `mma.sync` is not in it.
        waits: How often threads waited, by kind of barrier.
        conflicts: By PTX instruction: passes of shared memory (wavefronts) that loads, stores, `cp.async` and matrix
            loads and stores would need without bank conflicts, and those beyond. `bank_conflicts` is the sum of the
            latter, `wavefronts` of both.
        findings: All errors and warnings, in the order in which they happened.
        timeline: What the warps of one thread block did, if it was asked for: `timeline.svg()` draws it.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    seconds: float = 0.0
    instructions: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    sectors: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    wgmma_wavefronts: int = 0
    tensor_cycles: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    conflicts: dict[int, list[int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    timeline: Timeline | None = field(default=None, repr=False)
    handled: bool = field(default=False, init=False, repr=False)
    loaded: list[Array] = field(default_factory=list, init=False, repr=False)  # by loads that L1 caches: block, sector
    past_l1: int = field(default=0, init=False, repr=False)  # sectors of other loads
    by_place: dict[tuple[str, int | None, int | None], Finding] = field(default_factory=dict, init=False, repr=False)

    @property
    def errors(self) -> list[Finding]:
        """The findings with severity "error"."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def warnings(self) -> list[str]:
        """Code and message of each warning."""
        return [f"{each.code}: {each.message}" for each in self.findings if each.severity == "warning"]

    @property
    def error(self) -> str:
        """Class, code, message and place of the first error; empty without one."""
        return next((str(finding).removeprefix("error: ") for finding in self.errors), "")

    @property
    def codes(self) -> list[str]:
        """The code of each finding."""
        return [finding.code for finding in self.findings]

    def _count_bytes(self, what: str, number: int) -> None:
        self.bytes[what] += number

    def _count_sectors(self, what: str, warps: Array, address: Array, size: int) -> Array:
        """Counts the distinct sectors of each warp for one instruction. Returns all (lanes, sectors of a lane)."""
        per = max(1, size // SECTOR)
        sectors = (address // SECTOR)[:, None] + np.arange(per)
        self.sectors[what] += len(np.unique((warps[:, None] << np.int64(44)) | sectors))
        return sectors

    def _count_loads(self, what: str, warps: Array, blocks: Array, address: Array, size: int, *, cached: bool) -> None:
        """Sectors of one instruction that reads; `cached`: whether the L1 cache can have them."""
        before = self.sectors[what]
        sectors = self._count_sectors(what, warps, address, size)
        if cached:
            self.loaded.append(np.unique((blocks[:, None] << np.int64(44)) | sectors))
        else:
            self.past_l1 += self.sectors[what] - before

    def _count_rows(self, what: str, view: Array, address: int) -> None:
        """Counts the sectors of each contiguous row of a box in global memory."""
        starts = np.full(1, address, np.int64)
        for count, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
            starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
        last = starts + view.shape[-1] * view.itemsize - 1
        self.sectors[what] += int((last // SECTOR - starts // SECTOR + 1).sum())

    @property
    def tensor_bound(self) -> float:
        """The share of the time, at most, in which tensor cores are busy, 0 to 1, if one SM ran the whole launch.

        In this time it must also issue the warps' instructions, four a cycle, and do `l1_wavefronts`, one a cycle. The
        instructions are those of PTX: ptxas makes more or fewer of them.
        """
        others = max(sum(self.instructions.values()) / ISSUED, self.l1_wavefronts)
        return self.tensor_cycles / max(self.tensor_cycles, others, 1)

    @property
    def wavefronts(self) -> int:
        """Passes of shared memory that instructions of threads take, with those of bank conflicts; see `conflicts`."""
        return sum(passes + extra for passes, extra in self.conflicts.values())

    @property
    def l1_wavefronts(self) -> int:
        """Passes of the stage of L1 that has shared memory: `wavefronts`, `wgmma_wavefronts`, one for each shuffle.

        ptxas replaces most `shfl.sync.idx` by moves to uniform registers; they are not counted.
        """
        shuffles = sum(self.instructions[f"shfl.sync.{mode}.b32"] for mode in ("bfly", "up", "down"))
        return self.wavefronts + self.wgmma_wavefronts + shuffles

    @property
    def l2_sectors(self) -> dict[str, int]:
        """Sectors that the launch reads from the L2 cache ("read") and writes to it ("write"), without atomics.

        Every block has an L1 cache that is empty at first and large enough. So loads and `cp.async.ca` read each sector
        once a block (with race detection only); TMA, strong loads, `.cg` and `.cv` every time.
        """
        if self.loaded:
            self.loaded = [np.unique(np.concatenate(self.loaded))]
        copies = self.sectors["global to shared TMA"] + self.sectors["global to shared bulk"]
        written = self.sectors["shared to global TMA"] + self.sectors["shared to global bulk"]
        return {
            "read": sum(map(len, self.loaded)) + self.past_l1 + copies,
            "write": self.sectors["global store"] + written,
        }

    def _count_conflicts(self, site: int, lanes: Array, address: Array, size: int) -> None:
        """Wavefronts in addition to the one (two, four for 8- and 16-byte accesses) that every warp needs."""
        per_pass = {8: 16, 16: 8}.get(size, 32)
        if size > 16:
            return
        group = (lanes >> 5) * (32 // per_pass) + (lanes & 31) // per_pass
        passes = 1 + int(np.count_nonzero(group[1:] != group[:-1]))
        entry = self.conflicts.setdefault(site, [0, 0])
        entry[0] += passes
        words = address >> 2 if size <= 4 else (address[:, None] + 4 * np.arange(size // 4)) >> 2
        # Distinct words of one pass that share a bank are serialized. A pass of 32 words in a row shares none.
        if passes * 32 == words.size and _no_conflict(words.reshape(passes, 32)):
            return
        key = np.sort((np.repeat(group, words.size // len(group)) << np.int64(36)) | words.reshape(-1))
        key = key[np.concatenate([[True], key[1:] != key[:-1]])]
        banks = np.sort((key >> 36) * 32 + (key & 31))
        first = np.flatnonzero(np.concatenate([[True], banks[1:] != banks[:-1]]))
        counts = np.diff(np.append(first, len(banks)))
        groups = banks[first] // 32
        worst = np.maximum.reduceat(counts, np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]])))
        entry[1] += int(worst.sum()) - passes

    @property
    def bank_conflicts(self) -> int:
        return sum(extra for _, extra in self.conflicts.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster),
            "shared_bytes": self.shared_bytes,
            "emulation_seconds": round(self.seconds, 4),
            "instructions": dict(self.instructions.most_common()),
            "bytes": dict(self.bytes),
            "sectors": dict(self.sectors),
            "l2_sectors": self.l2_sectors,
            "operations": dict(self.operations),
            "tensor_cycles": self.tensor_cycles,
            "tensor_bound": round(self.tensor_bound, 4),
            "waits": dict(self.waits),
            "bank_conflicts": self.bank_conflicts,
            "wavefronts": self.wavefronts,
            "l1_wavefronts": self.l1_wavefronts,
            "findings": [finding.as_dict() for finding in self.findings],
            "warnings": self.warnings,
            "error": self.error,
            "codes": self.codes,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.kernel}",
            f"  grid {self.grid}, block {self.block}, cluster {self.cluster}, "
            f"{self.shared_bytes} bytes of shared memory; emulated in {self.seconds:.3f} s",
        ]
        top = ", ".join(f"{name} {n}" for name, n in self.instructions.most_common(8))
        lines.append(f"  {sum(self.instructions.values())} warp instructions: {top}")
        for title, counter in (
            ("bytes", self.bytes),
            ("sectors", self.sectors),
            ("operations", self.operations),
            ("waits", self.waits),
        ):
            if counter:
                lines.append(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in sorted(counter.items())))
        if self.tensor_cycles:
            share = f"{100 * self.tensor_bound:.0f} % of the time at most, by issue slots and shared memory"
            lines.append(f"  tensor cores: {self.tensor_cycles} cycles of an SM; busy {share}")
        if self.conflicts:
            lines.append(f"  bank conflicts: {self.bank_conflicts} extra passes of shared memory")
        return "\n".join([*lines, *(textwrap.indent(str(finding), "  ") for finding in self.findings)])


@dataclass
class Report:
    """All launches inside one `emulate` block; prints as their summaries.

    Attributes:
        launches: In their order.
        arch: What was emulated: "sm_90a", "sm_100a".
    """

    launches: list[Launch] = field(default_factory=list)
    arch: str = ""

    @property
    def findings(self) -> list[Finding]:
        """Those of all launches."""
        return [finding for launch in self.launches for finding in launch.findings]

    @property
    def errors(self) -> list[Finding]:
        """The findings with severity "error"."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `format` changes when a key changes its meaning."""
        return {"format": 1, "arch": self.arch, "launches": [launch.as_dict() for launch in self.launches]}

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.as_dict(), indent=2)

    def raise_errors(self) -> None:
        """Raises the first error that no call has raised, with all others in its message."""
        __tracebackhide__ = True  # pytest shows the call instead
        for launch in self.launches:
            if launch.errors and not launch.handled:
                launch.handled = True
                fault = launch.errors[0].fault
                assert fault is not None
                fault.findings = self.findings
                raise fault

    def __str__(self) -> str:
        return "\n".join(str(launch) for launch in self.launches)
