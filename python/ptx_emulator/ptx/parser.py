"""One kernel of a PTX module as a list of typed instructions.

Inline assembly opens scopes of its own; registers and labels declared there are renamed so that names are unique.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ptx_emulator.errors import EmulatorError, UnsupportedPTX
from ptx_emulator.ptx.lexer import Token, tokenize

TYPE_BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "b32": 32, "u32": 32,
             "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "b128": 128, "bf16": 16, "f16x2": 32,
             "bf16x2": 32}  # fmt: skip


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


@dataclass
class Parameter:
    offset: int
    size: int
    index: int


@dataclass
class Kernel:
    name: str
    target: str = ""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    parameter_bytes: int = 0
    registers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    dynamic_shared: dict[str, int] = field(default_factory=dict)
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    required_block: tuple[int, ...] = ()
    ptx_lines: list[str] = field(default_factory=list)


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class _Parser:
    def __init__(self, text: str, entry: str) -> None:
        self.tokens = tokenize(text)
        self.position = 0
        self.kernel = Kernel(entry, ptx_lines=text.splitlines())
        self.files: dict[int, str] = {}
        self.source: tuple[str, int] | None = None
        self.scopes: list[tuple[dict[str, str], dict[str, str]]] = []
        self.scope_count = 0

    # -- token access
    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index].text if index < len(self.tokens) else ""

    def next(self) -> Token:
        if self.position >= len(self.tokens):
            raise EmulatorError(f"PTX of {self.kernel.name} ends in the middle of a statement")
        self.position += 1
        return self.tokens[self.position - 1]

    def expect(self, text: str) -> Token:
        token = self.next()
        if token.text != text:
            raise EmulatorError(f"PTX line {token.line}: expected {text!r}, found {token.text!r}")
        return token

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.position += 1
            return True
        return False

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        return sign * int(self.next().text.rstrip("U"), 0)

    # -- module level
    def module(self) -> Kernel:
        while self.position < len(self.tokens):
            token = self.next()
            if token.text == ".target":
                self.kernel.target = self.next().text
            elif token.text == ".file":
                self.file()
            elif token.text == ".shared":
                self.variable("shared", external=self.tokens[self.position - 2].text == ".extern")
            elif token.text == ".entry" and self.peek() == self.kernel.name:
                self.entry()
        for instruction in self.kernel.instructions:
            if instruction.source:
                number, line = instruction.source
                instruction.source = (self.files.get(int(number), f"file {number}"), line)
        if not self.kernel.instructions:
            raise EmulatorError(f"no .entry {self.kernel.name} in this PTX module")
        return self.kernel

    def file(self) -> None:
        number = self.integer()
        self.files[number] = self.next().text.strip('"')

    def entry(self) -> None:
        kernel = self.kernel
        self.next()
        if self.accept("("):
            while not self.accept(")"):
                self.parameter()
                self.accept(",")
        while self.peek() != "{":
            directive = self.next().text
            if directive == ".reqntid":
                numbers = [self.integer()]
                while self.accept(","):
                    numbers.append(self.integer())
                kernel.required_block = tuple(numbers)
        self.body()

    def declaration(self) -> tuple[str, int, int | None, int]:
        """(name, bytes of an element, number of elements or None, alignment) of a parameter or variable."""
        size, alignment, name = 0, 0, ""
        while not name:
            text = self.next().text
            if text == ".align":  # behind the type it is that of what a pointer points to
                number = self.integer()
                alignment = alignment if size else number
            elif text[1:] in TYPE_BITS and not size:
                size = TYPE_BITS[text[1:]] // 8
            elif not text.startswith("."):
                name = text
        count: int | None = 1
        if self.accept("["):
            count = None if self.peek() == "]" else self.integer()
            self.expect("]")
        return name, size, count, alignment or size

    def parameter(self) -> None:
        self.expect(".param")
        kernel = self.kernel
        name, size, count, alignment = self.declaration()
        offset = _align(kernel.parameter_bytes, alignment)
        kernel.parameters[name] = Parameter(offset, size * (count or 1), len(kernel.parameters))
        kernel.parameter_bytes = offset + size * (count or 1)

    def variable(self, space: str, external: bool = False) -> None:
        kernel = self.kernel
        name, size, count, alignment = self.declaration()
        if external or count is None:
            kernel.dynamic_shared[name] = alignment
        elif space == "shared":
            kernel.shared[name] = _align(kernel.shared_bytes, alignment)
            kernel.shared_bytes = kernel.shared[name] + size * count
        else:
            kernel.local[name] = _align(kernel.local_bytes, alignment)
            kernel.local_bytes = kernel.local[name] + size * count

    # -- body
    def body(self) -> None:
        self.open_scope()
        while self.scopes:
            token = self.next()
            text = token.text
            if text == "{":
                self.open_scope(opened=True)
            elif text == "}":
                self.scopes.pop()
            elif text == ";":
                continue
            elif text.startswith("."):
                self.directive(text)
            elif self.peek() == ":" and token.kind == "name":
                self.next()
                self.kernel.labels[self.resolve(text, 1)] = len(self.kernel.instructions)
            else:
                self.position -= 1
                self.instruction()

    def open_scope(self, opened: bool = False) -> None:
        if not opened:
            self.expect("{")
        self.scope_count += 1
        suffix = f"__{self.scope_count}" if self.scopes else ""
        labels: dict[str, str] = {}
        depth, index = 0, self.position
        while depth >= 0 and index < len(self.tokens):
            text = self.tokens[index].text
            depth += (text == "{") - (text == "}")
            if depth == 0 and self.tokens[index].kind == "name" and self.tokens[index + 1].text == ":":
                labels[text] = text + suffix
            index += 1
        self.scopes.append(({}, labels))

    def resolve(self, name: str, which: int) -> str:
        for scope in reversed(self.scopes):
            if name in scope[which]:
                return scope[which][name]
        return name

    def directive(self, text: str) -> None:
        if text == ".reg":
            self.registers()
        elif text == ".loc":
            number, line = self.integer(), self.integer()
            self.integer()
            while self.accept(","):
                if self.next().text == "function_name":
                    self.next()
                    while self.accept("+"):
                        self.integer()
                else:
                    while self.peek() not in (",", ";") and self.tokens[self.position].kind == "number":
                        self.integer()
            self.source = (str(number), line)  # .file directives come last in a module; `module` fills in the names
        elif text in (".shared", ".local"):
            self.variable(text[1:])
        elif text in (".pragma", ".branchtargets", ".noreturn"):
            while self.next().text != ";":
                pass
        else:
            raise UnsupportedPTX(f"PTX line {self.tokens[self.position - 1].line}: directive {text}")

    def registers(self) -> None:
        kind = self.next().text[1:]
        if kind not in TYPE_BITS:
            raise UnsupportedPTX(f"register type .{kind}")
        nested = len(self.scopes) > 1
        while True:
            name = self.next().text
            if self.accept("<"):
                for index in range(self.integer()):
                    self.kernel.registers[f"{name}{index}"] = kind
                self.expect(">")
            elif nested:
                unique = f"{name}__s{self.scope_count}"
                self.scopes[-1][0][name] = unique
                self.kernel.registers[unique] = kind
            else:
                self.kernel.registers[name] = kind
            if not self.accept(","):
                break
        self.expect(";")

    def instruction(self) -> None:
        line = self.tokens[self.position].line
        predicate, negated = None, False
        if self.accept("@"):
            negated = self.accept("!")
            predicate = self.resolve(self.next().text, 0)
        opcode, *modifiers = self.next().text.split(".")
        operands: list[Operand] = []
        while not self.accept(";"):
            operands.append(self.operand())
            self.accept(",")
        self.kernel.instructions.append(Instruction(opcode, modifiers, operands, line, predicate, negated, self.source))

    def operand(self) -> Operand:
        if self.accept("{"):
            items: list[Operand] = []
            while not self.accept("}"):
                items.append(self.operand())
                self.accept(",")
            return Vector(tuple(items))
        if self.accept("["):
            return self.address()
        if self.accept("!"):
            operand = self.operand()
            assert isinstance(operand, Reg)
            return Not(operand)
        negative = self.accept("-")
        token = self.next()
        if token.kind == "number":
            return self.number(token.text, negative)
        name = self.resolve(token.text, 0)
        result: Operand = Reg(name) if name in self.kernel.registers or name == "_" else Symbol(self.resolve(name, 1))
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
