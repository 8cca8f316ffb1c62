"""Statistics of a run: instructions, bytes per space, bank conflicts, waits. Counts, not times."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ptx_emulator.numerics import Array


def _no_conflict(words: Array) -> bool:
    """Whether the 32 words of each pass lie in different banks."""
    banks = np.uint64(1) << (words & 31).astype(np.uint64)
    return bool((np.bitwise_or.reduce(banks, 1) == np.uint64(0xFFFFFFFF)).all())


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
        operations: Multiply-adds of tensor cores, by instruction.
        waits: How often threads waited, by kind of barrier.
        conflicts: By PTX instruction: passes of shared memory that were needed, and those beyond. `bank_conflicts` is
            the sum of the latter.
        warnings: What is suspicious and no fault.
        error: The fault that ended the launch; empty without one.
        codes: The codes of the warnings and, last, of the fault: [Findings](../emulator-findings.md) explains them.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    seconds: float = 0.0
    instructions: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    conflicts: dict[int, list[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    codes: list[str] = field(default_factory=list)

    def count_bytes(self, what: str, number: int) -> None:
        self.bytes[what] += number

    def warn(self, code: str, text: str) -> None:
        if (text := f"{code}: {text}") not in self.warnings:
            self.warnings.append(text)
            self.codes.append(code)

    def count_conflicts(self, site: int, lanes: Array, address: Array, size: int) -> None:
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
            "operations": dict(self.operations),
            "waits": dict(self.waits),
            "bank_conflicts": self.bank_conflicts,
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
        for title, counter in (("bytes", self.bytes), ("operations", self.operations), ("waits", self.waits)):
            if counter:
                lines.append(f"  {title}: " + ", ".join(f"{name} {n}" for name, n in sorted(counter.items())))
        if self.conflicts:
            lines.append(f"  bank conflicts: {self.bank_conflicts} extra passes of shared memory")
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join([*lines, f"  error: {self.error}"] if self.error else lines)


@dataclass
class Report:
    """All launches inside one `emulate` block; prints as their summaries."""

    launches: list[Launch] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"launches": [launch.as_dict() for launch in self.launches]}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(str(launch) for launch in self.launches)
