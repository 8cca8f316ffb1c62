"""Basic blocks. A wait loop around `mbarrier.try_wait` becomes one blocking instruction, so that deadlock is exact."""

from __future__ import annotations

from dataclasses import dataclass

from ptx_emulator.errors import EmulatorError
from ptx_emulator.ptx.parser import Instruction, Kernel, Operand, Reg, Symbol


@dataclass
class Block:
    first: int
    last: int


@dataclass
class Graph:
    kernel: Kernel
    blocks: list[Block]
    block_of_label: dict[str, int]


def _target(operand: Operand) -> str:
    assert isinstance(operand, Symbol)
    return operand.name


def fuse_wait_loops(kernel: Kernel) -> None:
    """`L: try_wait p, ..; @p bra D; bra L; D:` and `L: try_wait p, ..; @!p bra L;` become a `wait_loop`."""
    code, labels = kernel.instructions, kernel.labels
    nothing = ("nop", [], [])
    for index, wait in enumerate(code[:-1]):
        if wait.opcode != "mbarrier" or wait.modifiers[0] not in ("try_wait", "test_wait") or wait.predicate:
            continue
        branch, done = code[index + 1], wait.operands[0]
        if branch.opcode != "bra" or not isinstance(done, Reg) or branch.predicate != done.name:
            continue
        fused = 0
        if branch.negated and labels[_target(branch.operands[0])] == index:
            fused = 1
        elif not branch.negated and index + 2 < len(code):
            back = code[index + 2]
            if (
                back.opcode == "bra"
                and back.predicate is None
                and labels[_target(back.operands[0])] == index
                and labels[_target(branch.operands[0])] == index + 3
            ):
                fused = 2
        if fused:
            wait.opcode, wait.modifiers = "wait_loop", ["mbarrier", *wait.modifiers]
            for skipped in code[index + 1 : index + 1 + fused]:
                skipped.opcode, skipped.modifiers, skipped.operands = nothing[0], [], []
                skipped.predicate = None


def is_blocking(instruction: Instruction) -> bool:
    """Instructions at which lanes may have to stay: each stands alone in a block."""
    op, mods = instruction.opcode, instruction.modifiers
    if op == "mbarrier":
        return mods[0] == "try_wait"
    if op in ("bar", "barrier"):
        return "sync" in mods or "red" in mods or mods[:2] == ["cluster", "wait"]
    return op in ("wait_loop", "nanosleep")


def build(kernel: Kernel) -> Graph:
    code = kernel.instructions
    starts = {0} | {p for p in kernel.labels.values() if p < len(code)}
    for index, instruction in enumerate(code):
        if instruction.opcode in ("bra", "ret", "exit"):
            starts.add(index + 1)
        if is_blocking(instruction):
            starts |= {index, index + 1}
    order = sorted(p for p in starts if p < len(code))
    blocks = [Block(p, q) for p, q in zip(order, [*order[1:], len(code)], strict=True)]
    number = {block.first: index for index, block in enumerate(blocks)}
    number[len(code)] = len(blocks)
    for instruction in code:
        if instruction.opcode == "bra" and _target(instruction.operands[0]) not in kernel.labels:
            raise EmulatorError(f"PTX line {instruction.line}: unknown label {_target(instruction.operands[0])}")
    return Graph(kernel, blocks, {name: number[p] for name, p in kernel.labels.items()})
