"""One kernel of a PTX module as a list of typed instructions.

Inline assembly opens nested scopes; registers and labels declared there are renamed so that names are unique.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from ptx_emulator.errors import EmulatorError, UnsupportedPTX
from ptx_emulator.ptx.lexer import is_name, tokenize

TYPE_BITS = {
    "pred": 1,
    "b8": 8,
    "u8": 8,
    "s8": 8,
    "b16": 16,
    "u16": 16,
    "s16": 16,
    "f16": 16,
    "b32": 32,
    "u32": 32,
    "s32": 32,
    "f32": 32,
    "b64": 64,
    "u64": 64,
    "s64": 64,
    "f64": 64,
    "b128": 128,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
}


@dataclass(frozen=True)
class Reg:
    name: str


@dataclass(frozen=True)
class Symbol:
    """A special register (`%tid.x`), a parameter, a shared or local variable, or a label."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An integer, or the bits of a 32- or 64-bit float written as 0f... or 0d..."""

    value: int
    is_float: bool = False


@dataclass(frozen=True)
class Not:
    operand: Reg


@dataclass(frozen=True)
class Pair:
    first: Operand
    second: Operand


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    base: Operand
    offset: int = 0
    coordinates: Vector | None = None


Operand = Reg | Symbol | Imm | Not | Pair | Vector | Address


@dataclass
class Instruction:
    opcode: str
    modifiers: list[str]
    operands: list[Operand]
    line: int
    predicate: str | None = None
    negated: bool = False
    source: tuple[str, int] | None = None

    @property
    def text(self) -> str:
        return ".".join([self.opcode, *self.modifiers])

    def has(self, *modifiers: str) -> bool:
        return any(m in self.modifiers for m in modifiers)


class Variable(NamedTuple):
    offset: int
    size: int


class Space(dict[str, Variable]):
    """Parameters or variables, one behind the other."""

    bytes = 0

    def place(self, name: str, size: int, alignment: int) -> None:
        self[name] = Variable(-(-self.bytes // alignment) * alignment, size)
        self.bytes = self[name].offset + size


@dataclass
class Kernel:
    name: str
    parameters: Space = field(default_factory=Space)
    registers: dict[str, str] = field(default_factory=dict)
    shared: Space = field(default_factory=Space)
    dynamic_shared: dict[str, int] = field(default_factory=dict)  # alignments
    local: Space = field(default_factory=Space)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    ptx_lines: list[str] = field(default_factory=list)


class _Parser:
    def __init__(self, text: str, entry: str) -> None:
        self.texts, self.lines = tokenize(text)
        self.position = 0
        self.kernel = Kernel(entry, ptx_lines=text.splitlines())
        files = [n for n, token in enumerate(self.texts) if token == ".file"]
        self.files = {self.texts[n + 1]: self.texts[n + 2].strip('"') for n in files}
        self.source: tuple[str, int] | None = None
        self.scopes: list[dict[str, str]] = []  # new names of what is declared there
        self.scope_count = 0
        self.vectors: dict[str, Vector] = {}  # variables of .v2 or .v4
        self.known: dict[str, Operand] = {}  # operands of one token, while no declaration changes their meaning

    # -- token access
    def peek(self) -> str:
        return self.texts[self.position]

    def next(self) -> str:
        text = self.texts[self.position]
        if not text:
            raise EmulatorError(f"PTX of {self.kernel.name} ends in the middle of a statement")
        self.position += 1
        return text

    def expect(self, text: str) -> None:
        line, found = self.lines[self.position], self.next()
        if found != text:
            raise EmulatorError(f"PTX line {line}: expected {text!r}, found {found!r}")

    def accept(self, text: str) -> bool:
        found = self.texts[self.position] == text
        self.position += found
        return found

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        return sign * int(self.next().rstrip("U"), 0)

    # -- module level
    def module(self) -> Kernel:
        for position in [n for n, token in enumerate(self.texts) if token in (".shared", ".entry")]:
            if position < self.position:  # inside the kernel
                continue
            self.position = position + 1
            if self.texts[position] == ".shared":
                self.variable(self.kernel.shared, external=self.texts[position - 1] == ".extern")
            elif self.peek() == self.kernel.name:
                self.entry()
        if not self.kernel.instructions:
            raise EmulatorError(f"no .entry {self.kernel.name} in this PTX module")
        return self.kernel

    def entry(self) -> None:
        self.next()
        if self.accept("("):
            while not self.accept(")"):
                self.expect(".param")
                self.variable(self.kernel.parameters)
                self.accept(",")
        while not self.accept("{"):
            self.next()
        self.body()

    def variable(self, space: Space, external: bool = False) -> None:
        size, alignment, name = 0, 0, ""
        while not name:
            text = self.next()
            if text == ".align":  # behind the type it is that of what a pointer points to
                number = self.integer()
                alignment = alignment if size else number
            elif text[1:] in TYPE_BITS and not size:
                size = TYPE_BITS[text[1:]] // 8
            elif not text.startswith("."):
                name = text
        count = 1
        if self.accept("["):
            external |= self.peek() == "]"
            count = 0 if external else self.integer()
            self.expect("]")
        if external:
            self.kernel.dynamic_shared[name] = alignment or size
        else:
            space.place(name, size * count, alignment or size)

    # -- body
    def body(self) -> None:
        self.open_scope()
        while self.scopes:
            text = self.next()
            if text == "{":
                self.open_scope()
            elif text == "}":
                self.scopes.pop()
                self.known.clear()
            elif text[0] == ".":
                self.directive(text)
            elif self.peek() == ":" and is_name(text):
                self.next()
                self.kernel.labels[self.resolve(text)] = len(self.kernel.instructions)
            elif text != ";":
                self.position -= 1
                self.instruction()

    def open_scope(self) -> None:
        """Behind its brace. Labels may be used before they stand."""
        self.scopes.append({})
        self.scope_count += 1
        if len(self.scopes) == 1:  # its names stay
            return
        self.known.clear()
        depth, index = 0, self.position
        while depth >= 0 and index < len(self.texts) - 1:
            text = self.texts[index]
            depth += (text == "{") - (text == "}")
            if depth == 0 and self.texts[index + 1] == ":" and is_name(text):
                self.declare(text)
            index += 1

    def declare(self, name: str) -> str:
        """The unique name of what the innermost scope declares."""
        if len(self.scopes) == 1:
            return name
        return self.scopes[-1].setdefault(name, f"{name}__{self.scope_count}")

    def resolve(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self.scopes) if name in scope), name)

    def directive(self, text: str) -> None:
        line = self.lines[self.position - 1]
        if text == ".reg":
            self.registers()
        elif text == ".loc":
            number = self.next()
            self.source = (self.files.get(number, f"file {number}"), self.integer())
            while self.lines[self.position] == line:  # the column, and where it was inlined
                self.position += 1
        elif text in (".shared", ".local"):
            self.variable(self.kernel.shared if text == ".shared" else self.kernel.local)
        elif text in (".pragma", ".branchtargets", ".noreturn"):
            while self.next() != ";":
                pass
        else:
            raise UnsupportedPTX(f"PTX line {line}: directive {text}")

    def registers(self) -> None:
        self.known.clear()
        type_ = self.next()[1:]
        components = {"v2": "xy", "v4": "xyzw"}.get(type_, "")
        if components:
            type_ = self.next()[1:]
        if type_ not in TYPE_BITS:
            raise UnsupportedPTX(f"register type .{type_}")
        while not self.accept(";"):
            name = self.next()
            if self.accept("<"):
                self.kernel.registers |= dict.fromkeys((f"{name}{index}" for index in range(self.integer())), type_)
                self.expect(">")
            elif components:
                names = [self.declare(f"{name}.{component}") for component in components]
                self.kernel.registers |= dict.fromkeys(names, type_)
                self.vectors[self.declare(name)] = Vector(tuple(Reg(each) for each in names))
            else:
                self.kernel.registers[self.declare(name)] = type_
            self.accept(",")

    def instruction(self) -> None:
        line = self.lines[self.position]
        predicate, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            predicate = self.resolve(self.next())
        opcode, *modifiers = self.next().split(".")
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand())
            self.accept(",")
        self.kernel.instructions.append(Instruction(opcode, modifiers, operands, line, predicate, negated, self.source))

    def operand(self) -> Operand:
        text, following = self.texts[self.position], self.texts[self.position + 1]
        known = self.known.get(text)
        if known is not None and following != "|":
            self.position += 1
            return known
        if text == "{":
            self.position += 1
            items: list[Operand] = []
            while not self.accept("}"):
                items.append(self.operand())
                self.accept(",")
            return Vector(tuple(items))
        if text == "[":
            self.position += 1
            return self.address()
        if self.accept("!"):
            operand = self.operand()
            assert isinstance(operand, Reg)
            return Not(operand)
        if self.accept("-"):
            return self.number(self.next(), True)
        self.next()
        if text[0].isdigit():
            result = self.known[text] = self.number(text, False)
            return result
        name = self.resolve(text)
        if name in self.vectors:
            return self.vectors[name]
        result = self.known[text] = Reg(name) if name in self.kernel.registers or name == "_" else Symbol(name)
        if self.accept("|"):
            return Pair(result, self.operand())
        return result

    @staticmethod
    def number(text: str, negative: bool) -> Imm:
        if text[:2] in ("0f", "0F", "0d", "0D"):
            return Imm(int(text[2:], 16), True)
        if "." in text:
            return Imm(int.from_bytes(struct.pack("<f", -float(text) if negative else float(text)), "little"), True)
        value = int(text.rstrip("U"), 0)
        return Imm(-value if negative else value)

    def address(self) -> Address:
        base, offset, coordinates = self.operand(), 0, None
        if self.accept("+") or self.peek() == "-":
            offset = self.integer()
        if self.accept(","):
            vector = self.operand()
            assert isinstance(vector, Vector)
            coordinates = vector
        self.expect("]")
        return Address(base, offset, coordinates)


def parse(text: str, entry: str) -> Kernel:
    """The kernel `entry` of a PTX module."""
    return _Parser(text, entry).module()
