"""Operands and modifiers of one instruction as Python source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ptx_emulator.alu import SIGNED, UINT
from ptx_emulator.codegen.special import SPECIAL_REGISTERS
from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.ptx import Address, Graph, Imm, Instruction, Not, Pair, Reg, Symbol, Vector
from ptx_emulator.ptx.parser import TYPE_BITS, Operand

# Bytes in front of the first shared variable: the system's own part of shared memory on sm_90 and later.
RESERVED_SHARED = 1024


def registers_of(operands: Sequence[Operand]) -> set[str]:
    names: set[str] = set()
    for operand in operands:
        if isinstance(operand, Reg):
            names.add(operand.name)
        elif isinstance(operand, Vector):
            names |= registers_of(operand.items)
        elif isinstance(operand, Pair):
            names |= registers_of([operand.first, operand.second])
        elif isinstance(operand, Address):
            names |= registers_of([operand.base, *(operand.coordinates.items if operand.coordinates else ())])
    return names


class Modifiers:
    """The modifiers of an instruction. Handlers take the modifiers that they support; a remaining one is an error."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = list(instruction.modifiers)

    def take(self, *names: str) -> str:
        """The first modifier that is one of `names`, removed from the list; "" without one."""
        for index, modifier in enumerate(self.left):
            if modifier in names:
                return self.left.pop(index)
        return ""

    def need(self, *names: str) -> str:
        found = self.take(*names)
        if not found:
            raise self.unsupported(f"needs one of {', '.join('.' + n for n in names)}")
        return found

    def flag(self, name: str) -> bool:
        return bool(self.take(name))

    def ignore(self, *names: str) -> None:
        """Modifiers without an effect on values."""
        self.left = [m for m in self.left if m not in names]

    def last(self) -> str:
        if not self.left:
            raise self.unsupported("has no type")
        return self.left.pop()

    def done(self) -> None:
        if self.left:
            raise self.unsupported(f"modifier .{self.left[0]}")

    def unsupported(self, what: str) -> UnsupportedPTX:
        return UnsupportedPTX(f"PTX line {self.instruction.line}: {self.instruction.text}: {what}")


Handler = Callable[["Emitter", Instruction, Modifiers], list[str]]
HANDLERS: dict[str, Handler] = {}


def handles(*opcodes: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for opcode in opcodes:
            HANDLERS[opcode] = handler
        return handler

    return register


def bits_of(ptx_type: str) -> int:
    if ptx_type in TYPE_BITS:
        return TYPE_BITS[ptx_type]
    if ptx_type in ("f32x2",):
        return 64
    raise UnsupportedPTX(f"type .{ptx_type}")


class Emitter:
    """Knows the registers of one kernel; `site` is the index of the instruction being emitted."""

    def __init__(self, graph: Graph) -> None:
        kernel = graph.kernel
        self.graph, self.kernel = graph, kernel
        self.index = {name: i for i, name in enumerate(kernel.registers)}
        self.types = list(kernel.registers.values())
        # Registers that some wgmma.mma_async accumulates in or multiplies from: writes to them want a wgmma.fence.
        vectors = [v for i in kernel.instructions if i.has("mma_async") for v in i.operands[:2]]
        names = dict.fromkeys(r for v in vectors if isinstance(v, Vector) for r in registers_of([v]))
        self.fragments = {name: number for number, name in enumerate(names)}
        self.constants: list[Any] = []
        self._known: dict[tuple[str, bytes], int] = {}
        self.special: set[str] = set()
        self.site = 0

    def emit(self, instruction: Instruction, site: int) -> list[str]:
        self.site = site
        if instruction.opcode == "nop":
            return []
        handler = HANDLERS.get(instruction.opcode)
        if handler is None:
            raise UnsupportedPTX(f"PTX line {instruction.line}: opcode {instruction.text}")
        modifiers = Modifiers(instruction)
        try:
            lines = handler(self, instruction, modifiers)
        except UnsupportedPTX as error:
            if "PTX line" in str(error):
                raise
            raise modifiers.unsupported(str(error)) from None
        modifiers.done()
        return lines

    # -- operands
    def constant(self, value: Any) -> str:
        key = (type(value).__name__, value.tobytes())
        if key not in self._known:
            self._known[key] = len(self.constants)
            self.constants.append(value)
        return f"K[{self._known[key]}]"

    def width(self, operand: Operand) -> int:
        if isinstance(operand, Reg) and operand.name != "_":
            return TYPE_BITS[self.types[self.index[operand.name]]]
        return 64 if isinstance(operand, Symbol) and operand.name in self.kernel.parameters else 32

    def immediate(self, value: Imm, number_class: str, bits: int) -> str:
        if number_class == "f" and not value.is_float:
            return self.constant(np.float32(value.value) if bits == 32 else np.float64(value.value))
        raw = np.array(value.value & ((1 << bits) - 1), UINT[bits])
        if number_class == "f":
            raw = raw.view({32: np.float32, 64: np.float64, 16: np.float16}[bits])
        elif number_class == "s":
            raw = raw.view(SIGNED[bits // 8])
        return self.constant(raw[()])

    def value(self, operand: Operand, number_class: str = "u", bits: int = 32) -> str:
        """Source for `operand` as unsigned ("u"), signed ("s") or float ("f") of `bits`."""
        if isinstance(operand, Not):
            return f"~{self.value(operand.operand, number_class, bits)}"
        if isinstance(operand, Imm):
            return self.immediate(operand, number_class, bits)
        if isinstance(operand, Symbol):
            return self.symbol(operand.name)
        if not isinstance(operand, Reg):
            raise UnsupportedPTX(f"operand {operand}")
        number = self.index[operand.name]
        name = self.types[number]
        if name == "pred":
            return f"r[{number}]"
        if TYPE_BITS[name] == bits:
            return {"u": "r", "s": "s", "f": "f"}[number_class] + f"[{number}]"
        if TYPE_BITS[name] < bits or number_class == "f":
            raise UnsupportedPTX(f"a .{name} register used as {bits}-bit {number_class}")
        short = f"A.low(r[{number}],{bits})"
        return short if number_class == "u" else f"{short}.view(int{bits})"

    def raw(self, operand: Operand) -> str:
        """The operand at its own width, unsigned."""
        if isinstance(operand, Reg) and operand.name == "_":
            return "None"
        return self.value(operand, "u", self.width(operand))

    def guard(self, i: Instruction) -> str:
        """The predicate under which an instruction runs, or ""."""
        return f"{'~' if i.negated else ''}r[{self.index[i.predicate]}]" if i.predicate else ""

    def pair(self, operand: Operand) -> tuple[str, str]:
        """Both targets of `a|b`; the second of a single one is None."""
        first, second = (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Reg("_"))
        return self.raw(first), self.raw(second)

    def symbol(self, name: str) -> str:
        kernel = self.kernel
        if name.startswith("%"):
            if name[1:] not in SPECIAL_REGISTERS:
                raise UnsupportedPTX(f"special register {name}")
            if name == "%globaltimer":
                return "M.nanoseconds()"
            self.special.add(name[1:])
            return f"M.special[{name[1:]!r}]"
        if name in kernel.parameters:
            return f"M.parameter_address({kernel.parameters[name].offset})"
        if name in kernel.dynamic_shared:
            return "M.dynamic_shared"
        if name in kernel.shared:
            return f"(M.shared_window+u32({RESERVED_SHARED + kernel.shared[name].offset}))"
        if name in kernel.local:
            return f"u64({kernel.local[name].offset})"
        raise UnsupportedPTX(f"symbol {name}")

    def predicate(self, operand: Operand) -> str:
        if isinstance(operand, Imm):
            return "True" if operand.value else "False"
        return self.value(operand)

    def address(self, operand: Operand, more: int = 0) -> str:
        """(base at its own width, offset + `more`)."""
        if not isinstance(operand, Address):
            raise UnsupportedPTX(f"operand {operand} is not an address")
        base = self.immediate(operand.base, "u", 32) if isinstance(operand.base, Imm) else self.raw(operand.base)
        return f"({base},{operand.offset + more})"

    def call(self, method: str, *arguments: object) -> list[str]:
        """Source of a call of a unit of the machine; arguments are source text or constants."""
        given = ",".join(x if isinstance(x, str) else repr(x) for x in arguments)
        return [f"M.{method}({self.site},m,{given})"]

    def fragment_numbers(self, operands: Sequence[Operand]) -> list[int]:
        """The registers among `operands` that wgmma uses, as `WarpMatrices.written` counts them."""
        return sorted(self.fragments[name] for name in registers_of(operands) & self.fragments.keys())

    def numbers(self, numbers: Sequence[int]) -> str:
        """Source of an array of them."""
        return self.constant(np.array(numbers, np.int64))

    def written(self, i: Instruction) -> list[int]:
        """The same for the targets of an ordinary instruction. A move between such registers only renames."""
        if not self.fragments:
            return []
        target = [x for x in i.operands[:1] if isinstance(x, (Reg, Vector, Pair))]
        renames = i.opcode == "mov" and registers_of(i.operands[1:]) & self.fragments.keys()
        return [] if i.opcode == "wgmma" or renames else self.fragment_numbers(target)

    def vector(self, operand: Operand) -> list[Operand]:
        return list(operand.items) if isinstance(operand, Vector) else [operand]

    def list_of(self, items: Sequence[Operand], bits: int | None = None) -> str:
        return "[" + ",".join(self.raw(x) if bits is None else self.value(x, "u", bits) for x in items) + "]"
