"""Signs of life: a bar on a terminal, lines elsewhere, nothing in the way of what a command prints."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import cudnn
from cudnn.cli import app, progress, selftest
from cudnn.demo_cases import grouped
from cudnn.demo_cases.gemm_variants import Variant

ROOT = Path(__file__).parents[2]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until what is being done now has been shown, however slow or loaded the machine is."""
    shown = threading.Event()

    class Told(Console):
        def print(self, *objects: object, **options: object) -> None:
            super().print(*objects, **options)  # type: ignore[arg-type]
            shown.set()

    def wait() -> None:
        for _ in range(2):  # the first may have begun before
            shown.clear()
            assert shown.wait(60)

    monkeypatch.setattr(progress, "Console", Told)
    monkeypatch.setattr(progress, "PERIOD", 0.01)
    return wait


def test_lines_without_a_terminal(said: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown("first", 3) as steps:
        said()
        steps.advance("second")
        said()
        print("what the command prints")
    captured = capsys.readouterr()
    assert captured.out == "what the command prints\n"
    lines = [line.partition("  ")[2] for line in captured.err.splitlines()]
    assert (lines[0], lines[-1]) == ("0 of 3, first", "1 of 3, second")


def test_a_short_command_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PERIOD", 3600)
    with progress.shown("quick", 1) as steps:
        steps.advance()
    assert capsys.readouterr().err == ""


def test_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "PERIOD", 0.01)
    with progress.shown("work", quiet=True) as steps:
        time.sleep(0.1)
        steps.advance()
    assert capsys.readouterr().err == ""


def test_the_work_can_be_looked_at(said: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is a program that knows nothing of progress."""
    launches: list[str] = []

    def refresh(steps: progress.Steps) -> None:
        steps.doing = f"launch {len(launches)}"

    with progress.shown("compiling", refresh=refresh):
        launches.append("kernel")
        said()
    assert capsys.readouterr().err.splitlines()[-1].endswith("  launch 1")


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="of the work"), progress.shown("work", 2):
        raise ValueError("of the work")


PROGRAM = """
from cudnn.cli import progress
with progress.shown("the work", 4) as steps:
    input()
    steps.advance()
    print("a line of the command", flush=True)
    input()
"""


@pytest.mark.parametrize("piped", [False, True])
def test_a_bar_on_a_terminal(piped: bool, tmp_path: Path) -> None:
    """Also where standard output is a file, which has the command's own lines alone. The command goes on when its bar
    shows how far it is."""
    terminal, end = pty.openpty()
    out = tmp_path / "out"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'kernels'}",
        "TERM": "xterm",
        "COLUMNS": "80",
    }
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=file if piped else end,
            stderr=end,
            env=environment,
        )
    os.close(end)
    shown, awaited = b"", [b"the work", b"25%"]
    assert process.stdin is not None
    try:
        while chunk := os.read(terminal, 65536):
            shown += chunk
            while awaited and awaited[0] in shown:
                awaited.pop(0)
                process.stdin.write(b"\n")
                process.stdin.flush()
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    process.stdin.close()
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "the work" in text
    assert "25%" in text
    assert ("a line of the command" in text) is not piped
    assert out.read_text() == ("a line of the command\n" if piped else "")


def test_selftest_shows_what_it_does(said: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    advance = progress.Steps.advance

    def slowly(steps: progress.Steps, *arguments: Any) -> None:
        said()
        advance(steps, *arguments)

    monkeypatch.setattr(progress.Steps, "advance", slowly)
    monkeypatch.setattr(selftest, "sample", lambda arch, count: [Variant("gemm_amax", (128, 128, 64, 1))] * 2)
    monkeypatch.setattr(grouped, "variants", lambda full: [])
    result = CliRunner().invoke(app, ["selftest", "--arch", "sm_90a", "--emulate"])
    assert result.exit_code == 0, result.output
    steps = re.findall(r"^\d:\d\d:\d\d  (\d+) of (\d+), (.+)$", result.stderr, re.MULTILINE)
    last = {doing.split()[0] for done, total, doing in steps if int(done) == int(total) - 1}
    assert "gemm_amax" in last
    assert not re.search(r"^\d:\d\d:\d\d  ", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("json", [[], ["--json", "-"]])
def test_emulate_shows_what_it_does_but_where_json_is_printed(
    json: list[str], said: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation = cudnn.emulation

    @contextlib.contextmanager
    def slow(**options: Any) -> Iterator[Any]:
        with emulation(**options) as report:
            yield report
            if not json:
                said()

    monkeypatch.setattr(cudnn, "emulation", slow)
    result = CliRunner().invoke(app, ["emulate", "rmsnorm_rht_amax", "--no-races", *json])
    assert result.exit_code == 0, result.output
    assert bool(re.search(r"^\d:\d\d:\d\d  (compiling|launch 1: )", result.stderr, re.MULTILINE)) == (not json)
