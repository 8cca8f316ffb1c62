"""The command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from cudnn.cli import app


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def words(result: Result) -> str:
    """What was printed, its line breaks and boxes away."""
    return " ".join(result.output.replace("│", " ").split())
