"""Drops one synchronising instruction of a kernel at a time and asks whether the emulator notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest

from ptx_emulator import EmulatorError, machine
from ptx_emulator.codegen import Program
from ptx_emulator.ptx import Instruction, Kernel, parse
from ptx_emulator.ptx.cfg import fuse_wait_loops

RACES: dict[str, Any] = {"races": True, "on_error": "raise"}  # the first error is enough
LANES = "lanes meet at the waits in between too, and the detector takes what one of them has waited for as known to all"


def synchronises(instruction: Instruction) -> bool:
    op, text = instruction.opcode, instruction.text
    if op in ("bar", "barrier", "fence", "membar", "wait_loop"):
        return True
    if op == "mbarrier":
        return instruction.modifiers[0] in ("arrive", "expect_tx", "init")
    starts = (
        "cp.async.bulk.commit_group",
        "cp.async.bulk.wait_group",
        "cp.async.commit_group",
        "cp.async.wait",
        "wgmma.fence",
        "wgmma.commit_group",
        "wgmma.wait_group",
        "tcgen05.commit",
        "tcgen05.wait",
    )
    return text.startswith(starts)


@dataclass
class Mutant:
    line: int
    text: str
    outcome: str  # the fault's class, "mismatch", or "survived"


def unexplained(mutants: list[Mutant], equivalent: Mapping[str, tuple[int, str]]) -> dict[str, int]:
    """What was not missed, instructions and their number, beyond what ``equivalent`` says is not needed, and why."""
    survivors = Counter(mutant.text for mutant in mutants if mutant.outcome == "survived")
    return {text: n for text, n in survivors.items() if n > equivalent.get(text, (0, ""))[0]}


@lru_cache(maxsize=4)
def parsed(text: str, entry: str) -> Kernel:
    """Of which every mutant has a copy."""
    kernel = parse(text, entry)
    fuse_wait_loops(kernel)
    return kernel


@contextmanager
def without(site: int | None, seen: list[Program], entry: str = "") -> Iterator[None]:
    """Every kernel loaded inside, of whose name `entry` is a part, lacks its instruction `site`. They are appended."""

    @lru_cache
    def load(text: str, name: str) -> Program:
        if entry not in name:
            return untouched(text, name)
        whole = parsed(text, name)
        kernel = replace(whole, instructions=[replace(instruction) for instruction in whole.instructions])
        if site is not None:
            dropped = kernel.instructions[site]
            dropped.opcode, dropped.modifiers, dropped.operands, dropped.predicate = "nop", [], [], None
        seen.append(Program(kernel))
        return seen[-1]

    untouched = machine.load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "load", load)
        yield


def holds_registers(instruction: Instruction) -> bool:
    """What an asynchronous instruction's registers are waited for with."""
    return instruction.text.startswith(("wgmma.commit_group", "wgmma.wait_group", "tcgen05.wait"))


def mutants(
    run: Callable[[str, int], bool],
    attempts: list[tuple[str, int]],
    chosen: Callable[[Instruction], bool] = synchronises,
    entry: str = "",
    every: int = 1,
) -> list[Mutant]:
    """`run(scheduler, seed)` launches the kernel with race detection and returns whether its result is right.

    Mutates every `every`-th instruction of the kernels whose names contain `entry`.
    """
    seen: list[Program] = []
    with without(None, seen, entry):
        for scheduler, seed in attempts:
            assert run(scheduler, seed)
    kernels = {program.kernel.name: program.kernel for program in seen}
    sites = [(x.name, i, at) for x in kernels.values() for i, at in enumerate(x.instructions) if chosen(at)]
    found = []
    for name, site, instruction in sites[::every]:
        outcome = "survived"
        with without(site, [], name):
            for scheduler, seed in attempts:
                try:
                    outcome = outcome if run(scheduler, seed) else "mismatch"
                except EmulatorError as error:
                    outcome = type(error).__name__
                if outcome != "survived":
                    break
        found.append(Mutant(instruction.line, instruction.text, outcome))
    return found
