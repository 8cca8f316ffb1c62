"""The help of every command."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cudnn.cli import app


def _commands(command: Any, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [words, *(path for name, one in below.items() for path in _commands(one, (*words, name)))]


COMMANDS = _commands(typer.main.get_command(app))


def test_all_commands_are_here() -> None:
    assert {("bench",), ("cache", "warm"), ("demo",), ("emulate",), ("explain",), ("info",)} <= set(COMMANDS)


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_flags_take_no_value(words: tuple[str, ...], option: str) -> None:
    shown = CliRunner().invoke(app, [*words, option], env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    assert "--help" in shown.output
    assert "bool" not in shown.output
