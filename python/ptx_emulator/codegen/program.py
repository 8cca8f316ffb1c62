"""A kernel as Python functions, one per basic block, made of numpy calls over all lanes."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from ptx_emulator import alu, convert, report, warp
from ptx_emulator.codegen import arithmetic, asynchronous, memory  # noqa: F401  (they register their handlers)
from ptx_emulator.codegen.emitter import Emitter, registers_of
from ptx_emulator.codegen.in_flight import LOADED, InFlight, moves
from ptx_emulator.numerics import f32, flush, u16, u32, u64
from ptx_emulator.ptx import Instruction, Kernel, build, parse
from ptx_emulator.ptx.cfg import fuse_wait_loops
from ptx_emulator.ptx.parser import TYPE_BITS, Imm


class Functions(dict[int, Callable[..., Any]]):
    """The functions of a program by the number of their block, each compiled when it is first asked for."""

    def __init__(self, lines: list[str], filename: str, names: dict[str, Any]) -> None:
        super().__init__()
        self.lines, self.filename, self.names = lines, filename, names
        starts = [number for number, line in enumerate(lines) if line.startswith("def ")]
        self.ranges = list(zip(starts, [*starts[1:], len(lines)], strict=True))

    def __missing__(self, block: int) -> Callable[..., Any]:
        first, last = self.ranges[block]
        source = "\n" * first + "\n".join(self.lines[first:last])  # line numbers are those of the whole source
        exec(compile(source, self.filename, "exec"), self.names)
        function = self[block] = self.names[f"b{block}"]
        return function


class Program:
    """`functions[b](M, m, r, s, f)` runs block b for the lanes `m` of machine M; r, s, f are the registers as
    unsigned, signed and float arrays."""

    def __init__(self, kernel: Kernel) -> None:
        fuse_wait_loops(kernel)
        self.kernel = kernel
        self.graph = build(kernel)
        self.blocks = self.graph.blocks
        self.in_flight = InFlight(self.graph)
        first = [kernel.instructions[block.first] for block in self.blocks]
        self.warp_barriers = {n for n, i in enumerate(first) if i.opcode == "bar" and "warp" in i.modifiers}
        emitter = Emitter(self.graph)
        self.types, self.fragments, self.special = emitter.types, len(emitter.fragments), emitter.special
        lines: list[str] = []
        self.site_of_line: list[int] = []
        for number, block in enumerate(self.blocks):
            self._block(emitter, number, block.first, block.last, lines)
        self.source = "\n".join(lines)
        self.filename = f"<ptx {kernel.name}>"
        names: dict[str, Any] = {
            "np": np,
            "A": alu,
            "C": convert,
            "W": warp,
            "flush": flush,
            "f32": f32,
            "u16": u16,
            "u32": u32,
            "u64": u64,
            "K": emitter.constants,
            "i64": np.int64,
            "int8": np.int8,
            "int16": np.int16,
            "int32": np.int32,
            "int64": np.int64,
        }
        linecache.cache[self.filename] = (len(self.source), None, self.source.splitlines(keepends=True), self.filename)
        weakref.finalize(self, linecache.cache.pop, self.filename, None).atexit = False
        self.functions = Functions(lines, self.filename, names)
        opcodes = {i.opcode for i in kernel.instructions}
        self.uses_tensor_memory = "tcgen05" in opcodes
        self.uses_launch_control = "clusterlaunchcontrol" in opcodes
        self.uses_warpgroups = "wgmma" in opcodes
        self.granule = self._granule()

    def instruction(self, site: int | None) -> report.Instruction | None:
        """An instruction for reports."""
        if site is None:
            return None
        instruction = self.kernel.instructions[site]
        text, (file, line) = self.kernel.ptx_lines[instruction.line - 1].strip(), instruction.source or ("", 0)
        return report.Instruction(instruction.line, text, file, line)

    def warnings(self) -> list[tuple[str, int, str]]:
        """Codes, instructions and texts: registers that may be used before the wait for what holds them."""
        found = {}
        for site, held in self.in_flight.touched.items():
            register, role, load = min(held)
            code = self.kernel.instructions
            what = f"of {code[load].text}" if role == LOADED else "of a wgmma"
            wait = "tcgen05.wait::ld" if role == LOADED else "wgmma.wait_group"
            found[load if role == LOADED else site] = (
                "PE105" if role == LOADED else "PE104",
                site,
                f"PTX line {code[site].line}: {register} {what} is used without {wait}",
            )
        return list(found.values())

    def _granule(self) -> int:
        """Bytes that the race detector tells apart: the smallest store, at most four."""
        stores = [i for i in self.kernel.instructions if i.opcode in ("st", "atom", "red")]
        return min([4, *(TYPE_BITS.get(i.modifiers[-1], 32) // 8 for i in stores)])

    def _block(self, emitter: Emitter, number: int, first: int, last: int, lines: list[str]) -> None:
        def add(text: str, site: int) -> None:
            lines.append(text)
            self.site_of_line.append(site)

        add(f"def b{number}(M,m,r,s,f):", first)
        # Fragments of wgmma, by instructions without a guard; told before the next wgmma or fence.
        written, constants = set[int](), set[int]()
        for site in range(first, last):
            instruction = self.kernel.instructions[site]
            body, guard = emitter.emit(instruction, site), emitter.guard(instruction)
            if "sync" in instruction.modifiers and instruction.opcode != "elect" and number not in self.warp_barriers:
                body = ["M.race.converge(m)", *body]
            fragments = emitter.written(instruction)
            is_constant = instruction.opcode == "mov" and isinstance(instruction.operands[1], Imm)
            if fragments and guard:
                body = [f"M.mma.written(m,{emitter.numbers(fragments)},{is_constant})", *body]
            elif fragments:
                (constants if is_constant else written).update(fragments)
            if instruction.opcode == "wgmma" or site == last - 1:
                for numbers, flag in ((written, False), (constants, True)):
                    if numbers:
                        add(f"  M.mma.written(m,{emitter.numbers(sorted(numbers))},{flag})", site)
                        numbers.clear()
            if self.in_flight.numbers:
                body = self._watched(emitter, site, instruction, body)
            if not guard or instruction.opcode in ("bra", "ret", "exit"):
                for text in body:
                    add(f"  {text}", site)
                continue
            add(f"  m0=m; m=A.mask(m,{guard})", site)
            add("  if m is not None:", site)
            for text in [*body, "pass"]:
                add(f"    {text}", site)
            add("  m=m0", site)
        add("  return None", last - 1)

    def _watched(self, emitter: Emitter, site: int, i: Instruction, body: list[str]) -> list[str]:
        """With what it does to registers in flight; `M.registers` keeps account."""
        numbers = self.in_flight.numbers

        def constant(held: Iterable[tuple[str, str]]) -> str:
            return emitter.constant(np.array([numbers[register, role] for register, role in held]))

        if early := self.in_flight.touched.get(site):
            body = [f"M.registers.touch({site},m,{constant(held[:2] for held in early)})", *body]
        if held := self.in_flight.held_by(site):
            return [*body, f"M.registers.hold({site},m,{constant(each[:2] for each in held)})"]
        if i.text.startswith("wgmma.commit_group"):
            return [*body, "M.registers.commit(m)"]
        if i.text.startswith("wgmma.wait_group"):
            return [*body, f"M.registers.wait(m,0,{asynchronous.number(i.operands[0])})"]
        if i.text.startswith("tcgen05.wait::ld"):
            return [*body, "M.registers.wait(m,1,0)"]
        if moves(i):
            targets, sources = (sorted(registers_of(x)) for x in (i.operands[:1], i.operands[1:]))
            known = [(name, LOADED) for name in sources if (name, LOADED) in numbers]
            if known:
                moved = constant((name, LOADED) for name in targets)
                return [*body, f"M.registers.move(m,{moved},{constant(known)})"]
        return body

    def site_at(self, line: int) -> int:
        return self.site_of_line[line - 1]


@lru_cache(maxsize=64)
def load(text: str, entry: str) -> Program:
    return Program(parse(text, entry))
