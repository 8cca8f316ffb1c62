"""Tokens of a PTX module."""

from __future__ import annotations

import re
from typing import NamedTuple

from ptx_emulator.errors import EmulatorError


class Token(NamedTuple):
    kind: str
    text: str
    line: int


_LONG = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|(/\*.*?\*/)', re.DOTALL)  # what may hold the signs of a comment
_PATTERN = re.compile(
    r"""
      (?P<name>[.%]?[A-Za-z_$][\w$]*(?:(?:\.|::)[\w$]+)*)
    | (?P<punct>[{}()\[\],;:@!|+\-<>=*])
    | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|\d+U?)
    | (?P<comment>//.*)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<unknown>[^ \t\r])
    """,
    re.VERBOSE,
)


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    if "/*" in text:
        text = _LONG.sub(lambda found: "\n" * found[1].count("\n") + " " if found[1] else found[0], text)
    for number, line in enumerate(text.split("\n"), start=1):
        for match in _PATTERN.finditer(line):
            kind = match.lastgroup or ""
            if kind == "unknown":
                raise EmulatorError(f"PTX line {number}: cannot read {line[match.start() :][:20]!r}")
            if kind != "comment":
                tokens.append(Token(kind, match.group(), number))
    return tokens
