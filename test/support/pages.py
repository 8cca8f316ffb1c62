"""The documentation's pages: their code blocks, and the outputs that they show.

A block with a title is a file; it lies in the folder in which the page's other blocks and its commands run. What a
page shows as output, a ``text`` block, has a comment above it with its source::

    <!-- output -->                                        of the Python block above
    <!-- output of `cudnn emulate turn.py`, exit code 1 -->  of a command
    <!-- output of `cudnn demo`, full -->                  checked with --full only: it takes long
    <!-- output of `cudnn explain mlp.py`, cuDNN 9.28 -->  where that version is installed and no GPU is
    <!-- output, checked by test/graph/test_x.py -->       of neither: a separate test checks it

A page whose blocks need a package that may be missing declares it: ``<!-- needs: transformers -->``.

``...`` in an output stands for anything. Times, and errors of random data, may differ. In the repository's root::

    PYTHONPATH=test python -m support.pages                 # checks all of them, those with ``full`` too
    PYTHONPATH=test python -m support.pages --write         # rewrites those that are out of date
    PYTHONPATH=test python -m support.pages --write docs/errors.md
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "python" / "ptx_emulator" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 96  # columns of a command's output: what a page shows without cutting it off

_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_SOURCE = re.compile(r"<!-- output(?: of `([^`]+)`)?((?:, [^,>]+)*) -->\n$")


@dataclass(frozen=True)
class Block:
    """A fenced code block. ``source`` is the source that the comment above it names; ``None`` without a comment."""

    language: str
    title: str
    text: str
    line: int  # of the first line of the text, less one
    source: str | None
    """A command; ``""``: the Python block above."""
    conditions: tuple[str, ...]

    @property
    def is_output(self) -> bool:
        return self.language == "text"

    @property
    def is_printed(self) -> bool:
        """Whether the Python block above prints it."""
        return self.is_output and self.source == "" and not self.checked_by

    @property
    def checked_by(self) -> str:
        """The test that checks this output; ``""``: the tests of all pages do."""
        return next(
            (text.removeprefix("checked by ") for text in self.conditions if text.startswith("checked by ")), ""
        )


@dataclass
class Page:
    """A page's blocks, in order."""

    path: Path
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Page:
        text, blocks = path.read_text(), []
        for fence in _FENCE.finditer(text):
            source = _SOURCE.search(text, 0, fence.start())
            blocks.append(
                Block(
                    language=fence[1],
                    title=fence[2] or "",
                    text=fence[3],
                    line=text.count("\n", 0, fence.start(3)),
                    source=None if source is None else source[1] or "",
                    conditions=() if source is None else tuple(source[2].split(", ")[1:]),
                )
            )
        return cls(path, blocks)

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def needs(self) -> list[str]:
        """Packages without which the blocks do not run."""
        return re.findall(r"^<!-- needs: (\w+) -->$", self.path.read_text(), re.MULTILINE)

    @property
    def scripts(self) -> list[Block]:
        """The Python blocks that run in order, in one namespace."""
        return [block for block in self.blocks if block.language == "python" and not block.title]

    @property
    def commands(self) -> list[Block]:
        """The outputs of commands."""
        return [block for block in self.blocks if block.is_output and block.source]

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """A folder with the page's files, which is the current one and where Python looks for modules."""
        before, modules = Path.cwd(), {Path(block.title).stem for block in self.blocks if block.title}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            for block in self.blocks:
                if block.title:
                    (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                    (folder / block.title).write_text(block.text)
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            try:
                yield folder
            finally:
                sys.path.remove(str(folder))
                os.chdir(before)
                for module in modules:
                    sys.modules.pop(module, None)

    def run_scripts(self) -> list[tuple[Block, str]]:
        """Runs the Python blocks, each compiled with its place in the page; the outputs, with what was printed."""
        module, outputs = ModuleType("page"), []
        with self.folder() as folder:
            printed = ""
            for block in self.blocks:
                if block in self.scripts:
                    with contextlib.redirect_stdout(io.StringIO()) as stream:
                        code = compile("\n" * block.line + block.text, f"<{self.name}>", "exec")
                        exec(code, vars(module))
                    printed = _cleaned(stream.getvalue(), folder)
                elif block.is_printed:
                    outputs.append((block, printed))
        return outputs

    def run_command(self, block: Block, prepare: Callable[[Path], None] = lambda folder: None) -> str:
        """What the command prints; raises unless its exit code is the one that the page names."""
        from typer.testing import CliRunner

        from cudnn.cli import app

        assert block.source
        program, *arguments = shlex.split(block.source)
        if program == "python":
            with self.folder() as folder:
                run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
            return _cleaned(run.stdout, folder)
        assert program == "cudnn", f"{self.name}: {block.source}"
        codes = [int(text.removeprefix("exit code ")) for text in block.conditions if text.startswith("exit code ")]
        with self.folder() as folder:
            prepare(folder)
            result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(WIDTH), "NO_COLOR": "1"})
        if result.exit_code != (codes[0] if codes else 0):
            raise AssertionError(f"{block.source}: exit code {result.exit_code}\n{result.output}") from result.exception
        return _cleaned(result.stdout, folder)


def _cleaned(text: str, folder: Path) -> str:
    """The text without the folder's name, without blanks at the ends of lines, without empty lines at its ends."""
    lines = [line.rstrip() for line in text.replace(f"{folder}{os.sep}", "").splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def _comparable(text: str) -> str:
    """The text without what differs from run to run: times, errors of random data, and the widths of columns."""
    text = re.sub(r"\d+(\.\d+)? (s|ms|us)\b|\b\d+\.\d\d\b", "<time>", text)
    text = re.sub(r"\d\.\d+e[-+]\d\d", "<error>", text)
    return re.sub("─+", "─", text)


def current(shown: str, printed: str) -> bool:
    """Whether a page may go on showing this."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(_comparable(shown), _comparable(printed), flags)


def describe_h200(version: int) -> Callable[[Path], None]:
    """Puts ``h200.json`` into a folder: an H200 described to this version of cuDNN."""
    from support import driver

    return lambda folder: (folder / "h200.json").write_text(driver.device_json("h200", version)) and None


def write(page: Page, printed: dict[Block, str]) -> None:
    """Puts what was printed in the place of outputs."""
    lines = page.path.read_text().splitlines(keepends=True)
    for block in sorted(printed, key=lambda block: -block.line):
        lines[block.line : block.line + block.text.count("\n")] = [printed[block]]
    page.path.write_text("".join(lines))


def main() -> int:
    """The command of the docstring; 1 where an output is out of date."""
    from support import driver

    driver.load_stub_driver()
    from cudnn.backend import library

    arguments = sys.argv[1:]
    writing = "--write" in arguments
    chosen = [Path(name).resolve() for name in arguments if name != "--write"] or PAGES
    stale = 0
    for page in (Page.read(path) for path in chosen):
        runs: list[tuple[Block, str]] = []
        if any(block.is_printed for block in page.blocks):
            runs += page.run_scripts()
        runs += [(block, page.run_command(block, describe_h200(library.version()))) for block in page.commands]
        printed = {block: text for block, text in runs if not current(block.text, text)}
        for block in printed:
            print(f"{page.name}:{block.line}: out of date" + (", written" if writing else ""))
        if writing:
            write(page, printed)
        stale += len(printed)
    return int(stale > 0 and not writing)


def transformer_engine_calls() -> dict[str, set[str]]:
    """The keywords of each call in the table of the page on Transformer Engine."""
    _, _, table = (ROOT / "docs" / "transformer_engine.md").read_text().partition("<!-- calls -->\n")
    weights = {"b_tensor", "sfb_tensor", "b_ptrs", "sfb_ptrs", "n", "b_dtype", "b_major"}
    rows = re.findall(r"^\|[^|]+\| `(\w+)` \| `([^`]+)` \|$", table, re.MULTILINE)
    calls = {name: {*keywords.split()} for name, keywords in rows}
    return {name: (words - {"weights"}) | (weights if "weights" in words else set()) for name, words in calls.items()}


if __name__ == "__main__":
    sys.exit(main())
