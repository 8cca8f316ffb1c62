"""Tokens of a PTX module."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from ptx_emulator.errors import EmulatorError

_LONG = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|(/\*.*?\*/)', re.DOTALL)  # what may hold the signs of a comment
_PUNCTUATION = "{}()[],;:@!|+-<>=*"
_TOKEN = re.compile(
    r"""
      [.%]?[A-Za-z_$][\w$]*(?:(?:\.|::)[\w$]+)*
    | [{}()\[\],;:@!|+\-<>=*]
    | 0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][-+]?\d+)?|\d+U?
    | //[^\n]*
    | "(?:[^"\\\n]|\\.)*"
    | \n
    | [^ \t\r]
    """,
    re.VERBOSE,
)
_SHORT = re.compile(r"[A-Za-z_$\d\n]")  # tokens of one character that are no punctuation


class Tokens(NamedTuple):
    """The tokens of a text, and the line of each. An empty token of line 0 stands at the end."""

    texts: list[str]
    lines: list[int]


def is_name(text: str) -> bool:
    return text[:1].isalpha() or text[:1] in ("_", "$", ".", "%")


@lru_cache(maxsize=4)
def tokenize(text: str) -> Tokens:
    """Callers do not change the lists: the kernels of a module share them."""
    if "/*" in text:
        text = _LONG.sub(lambda found: "\n" * found[1].count("\n") + " " if found[1] else found[0], text)
    found = _TOKEN.findall(text)
    unknown = {t for t in set(found) if len(t) == 1 and t not in _PUNCTUATION and not _SHORT.match(t)}
    texts, lines, line = list[str](), list[int](), 1
    for token in found:
        if token == "\n":
            line += 1
        elif token[0] != "/":
            texts.append(token)
            lines.append(line)
        if token in unknown:
            rest = text.split("\n")[line - 1]
            raise EmulatorError(f"PTX line {line}: cannot read {rest[rest.index(token) :][:20]!r}")
    return Tokens([*texts, ""], [*lines, 0])
