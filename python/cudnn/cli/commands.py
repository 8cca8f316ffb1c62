"""What commands share: how they show themselves, and how they refuse arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    """A flag, ``--help`` among them, takes no value, so its help names no type."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def refused(option: str, got: object, allowed: str) -> typer.BadParameter:
    """The error that an argument raises which cannot be."""
    return typer.BadParameter(f"got {got}; allowed: {allowed}.", param_hint=option)


def check_choice(option: str, got: str, allowed: Iterable[str]) -> None:
    """Refuses what is not among the allowed."""
    if got not in allowed:
        raise refused(option, repr(got), ", ".join(allowed))


def sizes(shape: str, allowed: str, count: int = 0) -> tuple[int, ...]:
    """Those of ``--shape``, such as 512x1024: as many as counted, or any number."""
    found = tuple(int(size) if size.isdecimal() else 0 for size in shape.split("x"))
    if min(found) < 1 or len(found) != (count or len(found)):
        raise refused("--shape", repr(shape), allowed)
    return found
