"""A kernel as Python functions, one per basic block, made of numpy calls over all lanes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ptx_emulator import alu, convert, warp
from ptx_emulator.codegen import arithmetic, asynchronous, memory  # noqa: F401  (they register their handlers)
from ptx_emulator.codegen.emitter import Emitter, registers_of
from ptx_emulator.numerics import f32, flush, u16, u32, u64
from ptx_emulator.ptx import Instruction, Kernel, build, parse
from ptx_emulator.ptx.cfg import fuse_wait_loops
from ptx_emulator.ptx.parser import TYPE_BITS


class Program:
    """`functions[b](M, m, r, s, f)` runs block b for the lanes `m` of machine M; r, s, f are the registers as
    unsigned, signed and float arrays."""

    def __init__(self, kernel: Kernel) -> None:
        fuse_wait_loops(kernel)
        self.kernel = kernel
        self.graph = build(kernel)
        self.blocks = self.graph.blocks
        emitter = Emitter(self.graph)
        self.types, self.fragments, self.special = emitter.types, len(emitter.fragments), emitter.special
        lines: list[str] = []
        self.site_of_line: list[int] = []
        for number, block in enumerate(self.blocks):
            self._block(emitter, number, block.first, block.last, lines)
        self.source = "\n".join(lines)
        self.filename = f"<ptx {kernel.name}>"
        names: dict[str, Any] = {"np": np, "A": alu, "C": convert, "W": warp, "flush": flush, "f32": f32, "u16": u16,
                                 "u32": u32, "u64": u64, "K": emitter.constants, "i64": np.int64,
                                 "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64}  # fmt: skip
        exec(compile(self.source, self.filename, "exec"), names)
        self.functions: list[Callable[..., Any]] = [names[f"b{i}"] for i in range(len(self.blocks))]
        opcodes = {i.opcode for i in kernel.instructions}
        self.uses_tensor_memory = "tcgen05" in opcodes
        self.uses_launch_control = "clusterlaunchcontrol" in opcodes
        self.uses_warpgroups = "wgmma" in opcodes
        self.granule = self._granule()

    def warnings(self) -> list[str]:
        """PTX wants tcgen05.wait::ld before the registers of a tcgen05.ld are read; many DSL kernels leave it out.

        The compiler pairs registers where they are written: a move does not count, but what it writes does.
        """
        found = []
        loaded: dict[str, Instruction] = {}
        for instruction in self.kernel.instructions:
            if instruction.opcode == "tcgen05" and instruction.modifiers[0] == "wait::ld":
                loaded.clear()
            first = instruction.operands[:1]
            reads = instruction.operands if instruction.opcode in ("st", "red") else instruction.operands[1:]
            early = registers_of(reads) & loaded.keys()
            if instruction.opcode == "mov" and early:
                loaded |= dict.fromkeys(registers_of(first), loaded[min(early)])
                continue
            for name in early:
                load = loaded.pop(name)
                found.append(f"PTX line {load.line}: {name} of {load.text} is read without tcgen05.wait::ld")
            if instruction.opcode == "tcgen05" and instruction.modifiers[0] == "ld":
                loaded |= dict.fromkeys(registers_of(first), instruction)
        return sorted({text.split(": ")[0]: text for text in found}.values())

    def _granule(self) -> int:
        """Bytes that the race detector tells apart: the smallest store, at most four."""
        stores = [i for i in self.kernel.instructions if i.opcode in ("st", "atom", "red")]
        return min([4, *(TYPE_BITS.get(i.modifiers[-1], 32) // 8 for i in stores)])

    def _block(self, emitter: Emitter, number: int, first: int, last: int, lines: list[str]) -> None:
        def add(text: str, site: int) -> None:
            lines.append(text)
            self.site_of_line.append(site)

        add(f"def b{number}(M,m,r,s,f):", first)
        for site in range(first, last):
            instruction = self.kernel.instructions[site]
            body = emitter.emit(instruction, site)
            if "sync" in instruction.modifiers and instruction.opcode != "elect":
                body = ["M.race.converge(m)", *body]
            if written := emitter.written(instruction):
                body = [f"M.mma.written(m,{written})", *body]
            guard = emitter.guard(instruction)
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

    def site_at(self, line: int) -> int:
        return self.site_of_line[line - 1]


@lru_cache(maxsize=64)
def load(text: str, entry: str) -> Program:
    return Program(parse(text, entry))
