"""The tables at the head of the reference's pages: name, parameters and purpose of all objects, and their methods.

A page's `::: path` sections are for the site; a code host shows the table.
"""

from __future__ import annotations

import importlib
import inspect
import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fused_reference  # next to this file

_DIRECTIVE = re.compile(r"^::: ([\w.]+)\n((?:[ ]{4}.*\n?)*)", re.MULTILINE)
_HEADING = re.compile(r"(?<!_)heading: (.+)")
_COMMON = ("self", "compute_data_type", "name")
_LONGEST = 40  # letters of a default value
_FILTERS = re.compile(r"filters: (\[.*\])")


def first_paragraph(text: str | None) -> str:
    """The first paragraph of a docstring in one line of Markdown."""
    line = " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=`)", "", line).replace("``", "`").replace("|", "\\|")


def arguments(function: Callable[..., Any], skipped: tuple[str, ...] = _COMMON) -> str:
    """The parameters of a function with their default values."""
    shown: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in skipped:
            continue
        default = parameter.default
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if default is inspect.Parameter.empty:
            shown.append(stars + parameter.name)
        else:
            value = str(getattr(default, "name", None) or repr(default))
            is_short = len(value) <= _LONGEST and " at 0x" not in value
            shown.append(f"{parameter.name}={value}" if is_short else parameter.name)
    return ", ".join(f"`{text}`" for text in shown)


def documented(page: str) -> Iterator[tuple[str, Any]]:
    """The objects of a page's directives with the names that programs use."""
    for name, documented_object, _ in _directives(page):
        yield name, documented_object


def methods(page: str) -> Iterator[tuple[str, Any]]:
    """The methods of the page's classes that the site shows; not of directives that list them, as fused APIs' do."""
    for name, cls, options in _directives(page):
        if inspect.isclass(cls) and "members:" not in options:
            filters = _FILTERS.search(options)
            hidden = re.compile("|".join(text.lstrip("!") for text in literal_eval(filters[1])) if filters else "^_")
            for member, value in vars(cls).items():
                if inspect.isfunction(value) and value.__doc__ and not hidden.search(member):
                    yield f"{name.split(',')[0]}.{member}", value


def _directives(page: str) -> Iterator[tuple[str, Any, str]]:
    for path, options in _DIRECTIVE.findall(page.replace(fused_reference.PLACE, fused_reference.sections())):
        heading = _HEADING.search(options)
        yield heading[1] if heading else path, _resolve(path), options


def _resolve(path: str) -> Any:
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise LookupError(path)


def table(page: Path) -> str:
    """A row for each object, and below for each method of its classes: name, parameters, purpose."""
    text = page.read_text()
    objects = dict(documented(text))
    further = {name: method for name, method in methods(text) if name not in objects}
    parts = [_rows("name", objects), _rows("method", further)] if further else [_rows("name", objects)]
    return "\n\n".join(parts)


def _rows(head: str, objects: dict[str, Any]) -> str:
    rows = [f"| {head} | parameters | purpose |", "|---|---|---|"]
    for name, documented_object in objects.items():
        parameters = "" if inspect.ismodule(documented_object) else _parameters(documented_object)
        rows.append(f"| `{name}` | {parameters} | {first_paragraph(documented_object.__doc__)} |")
    return "\n".join(rows)


def _parameters(documented_object: Any) -> str:
    try:
        return arguments(documented_object, ("self",))
    except (TypeError, ValueError):  # no function, or one without a signature
        return ""
