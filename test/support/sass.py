"""What a GEMM kernel's machine code says of its tensor core instructions. Needs no GPU.

``nvdisasm`` disassembles a cubin; here that text becomes instructions, basic blocks and loops, and those become
``Products``. NVIDIA does not document where an instruction has the mask of scoreboards that it waits for; here it is
that of Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv:1804.06826.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
from cuda import pathfinder

MMA = re.compile(r"(HGMMA|QGMMA|IGMMA|UTC[A-Z]*MMA)\b")
_WAIT = re.compile(r"(SYNCS\.PHASECHK|WARPGROUP\.DEPBAR|DEPBAR|BAR\.SYNC|UCGABAR_WAIT|NANOSLEEP|WARPSYNC|UTCBAR)\b")
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_LABEL = re.compile(r"([.$]\S+):\s*$")
_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\(([^)]+)\)")
_MASK = 41 + 11  # of scoreboards that an instruction waits for: 6 bits of its second word


@dataclass(frozen=True)
class Instruction:
    """``opcode`` with its suffixes; ``target`` of a branch is the place in the program, ``mask`` the scoreboards."""

    predicate: str
    opcode: str
    operands: str
    target: int | None = None
    mask: int = 0

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.split(".")[0]

    @property
    def branches(self) -> bool:
        """Whether it ends a basic block."""
        return self.target is not None or self.name in ("EXIT", "RET", "BRX")

    @property
    def continues(self) -> bool:
        """Whether what follows may run next."""
        only_target = _TARGET.sub("", self.operands).strip() == ""
        unconditional = not self.predicate and (self.name in ("EXIT", "RET", "BRX") or only_target)
        return not (self.branches and unconditional)

    @property
    def columns(self) -> int:
        """Of tensor memory, that LDTM reads: one 32-bit register each."""
        actual = re.search(r"\.x(\d+)", self.opcode)
        return int(actual[1]) if actual else 1


class Program:
    """A kernel: instructions, and the loops among them.

    Raises:
        ValueError: the text holds no kernel, or more than one.
    """

    def __init__(self, text: str) -> None:
        lines, labels = [], {}
        for line in text.splitlines():
            if actual := _LABEL.match(line):
                labels[actual[1]] = len(lines)
            elif actual := _LINE.match(line):
                lines.append([actual, 0])
            elif lines and (word := _WORD.search(line)):
                lines[-1][1] = int(word[1], 16) >> _MASK & 0x3F
        addresses = [int(actual[1], 16) for actual, _ in lines]
        if not addresses or addresses != sorted(set(addresses)):
            raise ValueError(f"instructions: got {len(addresses)}; allowed: those of one kernel")
        self.instructions = [self._instruction(actual, mask, labels) for actual, mask in lines]
        self.labels = frozenset(labels.values())

    @staticmethod
    def _instruction(actual: re.Match[str], mask: int, labels: dict[str, int]) -> Instruction:
        _, predicate, opcode, operands = actual.groups()
        to = _TARGET.search(operands) if opcode.startswith("BRA") else None
        return Instruction(predicate or "", opcode, operands, labels[to[1]] if to else None, mask)

    @cached_property
    def _blocks(self) -> dict[int, list[int]]:
        """The basic blocks that are reached: where each one begins, and where the ones begin that follow it."""
        code, size = self.instructions, len(self.instructions)
        targets = {i.target for i in code if i.target is not None}
        starts = sorted({0, *targets, *(n + 1 for n, i in enumerate(code) if i.branches and n + 1 < size)})
        ends = dict(zip(starts, [*starts[1:], size], strict=True))
        actual: dict[int, list[int]] = {}
        todo = [0]
        while todo:
            start = todo.pop()
            if start in actual:
                continue
            last = code[ends[start] - 1]
            following = [last.target] if last.target is not None else []
            if last.continues and ends[start] < size:
                following.append(ends[start])
            actual[start] = following
            todo += following
        self._ends = ends
        return actual

    @cached_property
    def _dominators(self) -> dict[int, frozenset[int]]:
        """Of every block, those on each way to it."""
        before: dict[int, list[int]] = {block: [] for block in self._blocks}
        for block, following in self._blocks.items():
            for other in following:
                before[other].append(block)
        self._before = before
        every = frozenset(self._blocks)
        actual = dict.fromkeys(self._blocks, every) | {0: frozenset([0])}
        changed = True
        while changed:
            changed = False
            for block in sorted(every - {0}):
                ways = [actual[other] for other in before[block]]
                now = frozenset.intersection(*ways) | {block}
                changed |= now != actual[block]
                actual[block] = now
        return actual

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """The instructions of every loop, by their place in the program, from small loops to large ones."""
        dominators = self._dominators
        bodies: dict[int, set[int]] = {}
        for block, following in self._blocks.items():
            for head in following:
                if head in dominators[block]:
                    body = bodies.setdefault(head, {head})
                    todo = [block]
                    while todo:
                        inner = todo.pop()
                        if inner not in body:
                            body.add(inner)
                            todo += self._before[inner]
        loops = [frozenset(n for start in body for n in range(start, self._ends[start])) for body in bodies.values()]
        return sorted(loops, key=len)

    def loops_around(self, places: Sequence[int]) -> list[frozenset[int]]:
        """The loops that all of these instructions are in, from the innermost one outwards."""
        return [loop for loop in self.loops if loop.issuperset(places)]

    def places(self, name: str) -> list[int]:
        """Where instructions of a name are."""
        return [n for n, i in enumerate(self.instructions) if i.name == name]


@dataclass(frozen=True)
class Products:
    """The tensor core instructions of a GEMM kernel.

    ``mma`` is their opcode. They come in runs of ``run`` with no branch, barrier or wait among them; ``waits`` of the
    instructions after a run's first product wait for a scoreboard. ``copies`` of scale factors into tensor memory come
    with a k tile. The epilogue reads ``columns`` of tensor memory.
    """

    mma: str
    run: int
    waits: int
    copies: int
    columns: int


def products(text: str) -> Products:
    """What the text of a GEMM kernel says.

    Raises:
        ValueError: not one kind of product, in one loop; those of a tile's first k tile may come before it.
    """
    program = Program(text)
    code = program.instructions
    places = [n for n, i in enumerate(code) if MMA.match(i.opcode)]
    kinds = sorted({code[n].opcode for n in places})
    around = program.loops_around(places[-1:])
    if len(kinds) != 1 or len(around) < 2 or not around[1].issuperset(places):
        allowed = "one kind, in a loop over k in one over tiles"
        raise ValueError(f"products: got {kinds} in {len(around)} loops; allowed: {allowed}")
    reads = program.places("LDTM")
    epilogue = program.loops_around(reads)[0] if reads else ()
    run, waits = _runs(program, [n for n in places if n in around[0]])
    return Products(
        mma=kinds[0],
        run=run,
        waits=waits,
        copies=sum(code[n].name == "UTCCP" for n in around[0]),
        columns=sum(code[n].columns for n in epilogue if code[n].name == "LDTM"),
    )


def _runs(program: Program, products: Sequence[int]) -> tuple[int, int]:
    """The shortest run of products, and how many instructions in all runs wait for a scoreboard."""
    code = program.instructions
    runs = [[products[0]]]
    for before, now in itertools.pairwise(products):
        between = range(before + 1, now)
        cut = any(code[n].branches or _WAIT.match(code[n].opcode) or n in program.labels for n in (*between, now))
        runs.append([now]) if cut else runs[-1].append(now)
    waits = sum(bool(code[n].mask) for run in runs for n in range(run[0] + 1, run[-1] + 1))
    return min(map(len, runs)), waits


def disassemble(cubin: bytes) -> str:
    """The text of a cubin, with encodings, by ``nvdisasm``; skips the test without it."""
    tool = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is missing")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [tool, "-c", "-hex", "-ndf", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
