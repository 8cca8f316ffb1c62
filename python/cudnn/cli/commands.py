"""How commands show themselves: a flag, ``--help`` among them, takes no value, so its help names no type."""

from __future__ import annotations

from typing import Any

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
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params
