"""Which instructions may touch a register that an asynchronous one still reads or writes.

`wgmma` holds its accumulators, and A in registers, until a `wgmma.wait_group` that covers its commit group;
`tcgen05.ld` holds its targets until `tcgen05.wait::ld`. An analysis over all paths finds the few instructions that may
come too early, so that only those are watched while a kernel runs; a kernel that waits as it should has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ptx_emulator.codegen.emitter import registers_of
from ptx_emulator.ptx import Graph, Imm, Instruction, Symbol, Vector

# An accumulator of wgmma, its A in registers, and a target of tcgen05.ld.
ACCUMULATOR, LEFT, LOADED = "accumulator", "left", "loaded"
OLDEST = 16  # commit groups that are told apart


class Held(NamedTuple):
    register: str
    role: str
    load: int = -1  # the tcgen05.ld


State = dict[Held, int]  # what may be held, and by how many commits ago at least


def _joined(a: State, b: State) -> State:
    return a | {held: min(age, a.get(held, age)) for held, age in b.items()}


def _is_load(i: Instruction) -> bool:
    return i.opcode == "tcgen05" and i.modifiers[0] == "ld"


def moves(i: Instruction) -> bool:
    """The compiler puts loaded registers together before it waits: a move passes on what holds them."""
    return i.opcode == "mov"


class InFlight:
    """`touched`: by instruction, registers that may be held there. `numbers`: those, and what they were moved from."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.code = graph, graph.kernel.instructions
        self.touched: dict[int, list[Held]] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        if any(i.has("mma_async") or _is_load(i) for i in self.code):
            self._analyse()
        if self.touched:
            for site in range(len(self.code)):
                for held in [*self.held_by(site), *self.touched.get(site, ())]:
                    self.numbers.setdefault(held[:2], len(self.numbers))
            while sum(self._follow(i) for i in self.code if moves(i)):
                pass

    def _follow(self, i: Instruction) -> bool:
        """A move from a numbered register numbers what it writes."""
        sources, before = registers_of(i.operands[1:]), len(self.numbers)
        if any((name, LOADED) in self.numbers for name in sources):
            for name in sorted(registers_of(i.operands[:1])):
                self.numbers.setdefault((name, LOADED), len(self.numbers))
        return len(self.numbers) > before

    def held_by(self, site: int) -> list[Held]:
        """The registers that an instruction holds from now on."""
        i = self.code[site]
        if _is_load(i):
            return [Held(name, LOADED, site) for name in sorted(registers_of(i.operands[:1]))]
        if not i.has("mma_async"):
            return []
        left = registers_of(i.operands[1:2]) if isinstance(i.operands[1], Vector) else ()
        return [
            *(Held(name, ACCUMULATOR) for name in sorted(registers_of(i.operands[:1]))),
            *(Held(name, LEFT) for name in sorted(left)),
        ]

    def _analyse(self) -> None:
        blocks, pending = self.graph.blocks, [0]
        states: dict[int, State] = {0: {}}
        while pending:
            number = pending.pop()
            state = dict(states[number])
            for site in range(blocks[number].first, blocks[number].last):
                state = self._after(site, state)
            for following in self._successors(blocks[number].last - 1, number):
                known = states.get(following)
                joined = state if known is None else _joined(known, state)
                if following < len(blocks) and joined != known:
                    states[following] = joined
                    pending.append(following)

    def _successors(self, last: int, number: int) -> Iterable[int]:
        i = self.code[last]
        if i.opcode == "bra":
            assert isinstance(i.operands[0], Symbol)
            yield self.graph.block_of_label[i.operands[0].name]
        if i.opcode not in ("bra", "ret", "exit") or i.predicate:
            yield number + 1

    def _after(self, site: int, state: State) -> State:
        i = self.code[site]
        action = i.modifiers[0] if i.modifiers else ""
        if i.opcode == "wgmma" and action in ("commit_group", "wait_group", "fence"):
            if i.predicate or action == "fence":
                return state
            if action == "commit_group":
                return {held: age + (held.role != LOADED and age < OLDEST) for held, age in state.items()}
            assert isinstance(i.operands[0], Imm)
            left = i.operands[0].value
            return {held: age for held, age in state.items() if held.role == LOADED or age <= max(left, 0)}
        if i.opcode == "tcgen05" and action == "wait::ld":
            return state if i.predicate else self._without(state, lambda held: held.role == LOADED)
        held_now = self.held_by(site)
        if state:
            state = self._touch(site, i, state, held_now)
        return state | dict.fromkeys(held_now, 0) if held_now else state

    def _touch(self, site: int, i: Instruction, state: State, held_now: list[Held]) -> State:
        named = registers_of(i.operands)
        found = [held for held in state if held.register in named]
        if i.has("mma_async"):  # products that share an accumulator, or A, run in order
            roles = {(held.register, held.role) for held in held_now}
            found = [held for held in found if held[:2] not in roles]
        if not found:
            return state
        if moves(i) and all(held.role == LOADED for held in found):
            sources = [held for held in found if held.register in registers_of(i.operands[1:])]
            return state | {
                Held(name, LOADED, held.load): 0 for name in registers_of(i.operands[:1]) for held in sources
            }
        known = self.touched.setdefault(site, [])
        known += [held for held in found if held not in known]
        # Whoever used a loaded register without a wait has been told, or had waited.
        loads = set() if i.predicate else {held.load for held in found if held.role == LOADED}
        return self._without(state, lambda held: held.role == LOADED and held.load in loads)

    @staticmethod
    def _without(state: State, gone: Callable[[Held], bool]) -> State:
        return {held: age for held, age in state.items() if not gone(held)}
