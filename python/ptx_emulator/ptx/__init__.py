"""PTX text to typed instructions and basic blocks."""

from ptx_emulator.ptx.cfg import Block, Graph, build
from ptx_emulator.ptx.parser import Address, Imm, Instruction, Kernel, Not, Pair, Reg, Symbol, Vector, parse

__all__ = [
    "Address",
    "Block",
    "Graph",
    "Imm",
    "Instruction",
    "Kernel",
    "Not",
    "Pair",
    "Reg",
    "Symbol",
    "Vector",
    "build",
    "parse",
]
