"""The limits that keep the code small: length of files and functions, repetition, who reads the environment."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES, REPEATED_SHARE = 800, 150, 0.05
RUN = 6  # shortest run of equal lines that counts as a repetition

SOURCES = sorted(path for folder in ("python", "kernels") for path in (ROOT / folder).rglob("*.py"))
ALL = SOURCES + sorted(path for folder in ("test", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(source: str) -> list[str]:
    """The lines that hold code, stripped: no blank lines, comments, docstrings, imports or lone brackets."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    comments = {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines: list[str] = []
    for number, text in enumerate(source.splitlines(), start=1):
        code = text[: comments[number]] if number in comments else text
        if number not in skipped and any(character.isalnum() for character in code):
            lines.append(code.strip())
    return lines


def repeated_share(files: dict[str, list[str]]) -> float:
    """Share of the lines that stand, in a run of at least ``RUN`` equal lines, in another file too."""
    places: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, lines in files.items():
        for start in range(len(lines) - RUN + 1):
            places[tuple(lines[start : start + RUN])].add(name)
    repeated = 0
    for lines in files.values():
        marked: set[int] = set()
        for start in range(len(lines) - RUN + 1):
            if len(places[tuple(lines[start : start + RUN])]) > 1:
                marked.update(range(start, start + RUN))
        repeated += len(marked)
    return repeated / max(1, sum(map(len, files.values())))


def test_files_are_short() -> None:
    lengths = {_name(path): len(path.read_text().splitlines()) for path in ALL}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Those in a statement, which is looked for in statements alone."""
    parts = ("body", "orelse", "finalbody", "handlers", "cases")
    for child in itertools.chain.from_iterable(getattr(node, part, ()) for part in parts):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        yield from functions(child)


def test_functions_are_short() -> None:
    texts = {path: path.read_text() for path in ALL}
    long = {
        f"{_name(path)}:{node.lineno} {node.name}": length
        for path, text in texts.items()
        if text.count("\n") > FUNCTION_LINES
        for node in functions(ast.parse(text))
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def test_repetition_is_counted() -> None:
    block = "".join(f"value_{index} = compute({index})\n" for index in range(10))
    first, second = code_lines('"""Doc."""\nimport os\n' + block), code_lines("# other\n" + block + "tail = 1\n")
    assert len(first) == 10
    assert repeated_share({"a": first, "b": second}) == 20 / 21
    assert repeated_share({"a": first, "b": ["tail = 1"]}) == 0


def test_little_stands_twice() -> None:
    assert repeated_share({_name(path): code_lines(path.read_text()) for path in SOURCES}) < REPEATED_SHARE


def test_only_settings_reads_the_environment() -> None:
    readers = {
        _name(path)
        for path in SOURCES
        if re.search("environ|getenv", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers == {"python/cudnn/settings.py"}
