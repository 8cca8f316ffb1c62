"""Tokens of a PTX module."""

from __future__ import annotations

import re
from typing import NamedTuple

from ptx_emulator.errors import EmulatorError


class Token(NamedTuple):
    kind: str
    text: str
    line: int


_PATTERN = re.compile(
    r"""
      (?P<space>[ \t\r]+)
    | (?P<newline>\n)
    | (?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|\d+U?)
    | (?P<name>[.%]?[A-Za-z_$][\w$]*(?:(?:\.|::)[\w$]+)*)
    | (?P<punct>[{}()\[\],;:@!|+\-<>=*])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokenize(text: str) -> list[Token]:
    tokens: list[Token] = []
    position, line = 0, 1
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None:
            raise EmulatorError(f"PTX line {line}: cannot read {text[position : position + 20]!r}")
        kind = match.lastgroup or ""
        if kind not in ("space", "newline", "comment"):
            tokens.append(Token(kind, match.group(), line))
        line += match.group().count("\n")
        position = match.end()
    return tokens
