"""Helpers that the commands share: command classes, and errors for invalid arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose help names no types of flags."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    """Removes the type from the help of flags (including ``--help``), which take no value."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def option_error(option: str, got: object, allowed: str) -> typer.BadParameter:
    """Returns the error for an invalid argument."""
    return typer.BadParameter(f"got {got}; allowed: {allowed}.", param_hint=option)


def check_choice(option: str, got: str, allowed: Iterable[str]) -> None:
    """Raises an error unless ``got`` is one of the allowed values."""
    if got not in allowed:
        raise option_error(option, repr(got), ", ".join(allowed))


def sizes(shape: str, allowed: str, count: int = 0, option: str = "--shape") -> tuple[int, ...]:
    """Parses the sizes of an option, such as 512x1024: ``count`` of them, or any number if ``count`` is 0."""
    values = tuple(int(size) if size.isdecimal() else 0 for size in shape.split("x"))
    if min(values) < 1 or len(values) != (count or len(values)):
        raise option_error(option, repr(shape), allowed)
    return values
