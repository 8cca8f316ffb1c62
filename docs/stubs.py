"""The stubs of the package, what type checkers see of names that exist at run time only: `python docs/generate.py`.

A test fails while one is out of date.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import cudnn
from cudnn import enums, registry, wrapper
from cudnn.fused import operator

WIDTH = 120
_WRITTEN = "Written by `python docs/generate.py`."
_GRAPH = f'''"""The operations of ``cudnn.Graph`` for type checkers. {_WRITTEN}"""

import builtins
from collections.abc import Sequence
from typing import Any, Protocol, overload

from cudnn import enums
{{imports}}
from cudnn.pygraph.tensor import Results, Tensor

class Array(Protocol):
    """A PyTorch tensor, or another array with DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

class GraphMethods:
'''
_OPERATORS = f'''"""The operators of the fused APIs, ``cudnn.ops``, for type checkers. {_WRITTEN}"""

import torch
from torch import Tensor, dtype
'''
_ENUMS = sorted(name for name, value in vars(enums).items() if isinstance(value, EnumMeta))


def operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The methods that ``cudnn.Graph`` takes over from ``pygraph``, which it does not define itself."""
    for name in dir(cudnn.pygraph):
        if not name.startswith("_") and name not in wrapper._LIFE_CYCLE and name not in vars(cudnn.Graph):
            yield name, getattr(cudnn.pygraph, name)


def graph() -> str:
    """The operations as methods that take arrays too."""
    own = {"Any", "None", "Results", "Sequence", "Tensor"}
    homes = {
        name: method.__module__
        for _, method in operations()
        for parameter in inspect.signature(method).parameters.values()
        for name in re.findall(r"\b[A-Z]\w+", str(parameter.annotation))
        if name not in own
    }
    modules = {home: ", ".join(sorted(name for name in homes if homes[name] == home)) for home in homes.values()}
    imports = "\n".join(f"from {home} import {used}" for home, used in sorted(modules.items()))
    stubs = (line for name, method in operations() for line in _stub(name, method))
    return _GRAPH.format(imports=imports) + "".join(f"{line}\n" for line in stubs)


def _stub(name: str, method: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(method)
    takes_arrays = name not in wrapper._TENSOR_METHODS | wrapper._QUERIES
    parameters = list(signature.parameters.values())
    result = _annotation(signature.return_annotation)
    variants = [parameters]
    if len(parameters) > 1 and parameters[1].name == "norm_forward_phase" and hasattr(method, "__wrapped__"):
        variants.append([parameters[0], *parameters[2:]])  # the phase may be left out
    for number, variant in enumerate(variants):
        if len(variants) > 1:
            yield "    @overload"
        shown = [p if isinstance(p, str) else _parameter(p, takes_arrays) for p in _with_marks(variant)]
        line = f"    def {name}({', '.join(shown)}) -> {result}:"
        end = "" if number == 0 else " ..."
        if len(line + end) <= WIDTH:
            yield line + end
        else:
            yield from (f"    def {name}(", *(f"        {each}," for each in shown), f"    ) -> {result}:{end}")
        yield from _docstring(method) if number == 0 else ()


def _with_marks(parameters: list[inspect.Parameter]) -> Iterator[inspect.Parameter | str]:
    """The parameters, with ``*`` before the first that is given by keyword alone."""
    before = None
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and before is not inspect.Parameter.KEYWORD_ONLY:
            yield "*"
        before = parameter.kind
        yield parameter


def _parameter(parameter: inspect.Parameter, takes_arrays: bool) -> str:
    if parameter.name == "self":
        return "self"
    kind = _annotation(parameter.annotation)
    if takes_arrays:
        kind = re.sub(r"\bTensor\b", "Tensor | Array", kind)
    return _named(parameter.name, kind, parameter.default)


def _named(name: str, kind: str, default: Any) -> str:
    shown = f"{name}: {kind}"
    return shown if default is inspect.Parameter.empty else f"{shown} = {_default(default)}"


def _annotation(text: str) -> str:
    """Names of enumerations are looked up in their module: arguments, and methods, have the same names."""
    return re.sub(rf"(?<![\w.])({'|'.join(_ENUMS)})\b", r"enums.\1", text)


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        return f"enums.{type(value).__name__}.{value.name}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _docstring(method: Callable[..., Any]) -> Iterator[str]:
    lines = inspect.cleandoc(method.__doc__ or "").split("\n")
    yield f'        """{lines[0]}' + ('"""' if len(lines) == 1 else "")
    yield from (f"        {line}".rstrip() for line in lines[1:])
    if len(lines) > 1:
        yield '        """'


def operators() -> str:
    """The operators as functions, from the wrappers."""
    return _OPERATORS + "".join(f"\n{_operator(name)}" for name in registry.packages())


def _operator(name: str) -> str:
    api, function = registry.find(name), registry.wrapper(name)
    types = {p.name: p.annotation for p in inspect.signature(function).parameters.values()}
    signature, names = operator.signature_of(api, function)
    shown = [_named(name, types[names[name]], p.default) for name, p in signature.parameters.items()]
    result = f"tuple[{', '.join(['Tensor'] * len(api.returns))}]"
    about = (
        f"{api.title}: {', '.join(api.returns)}; what there is not has no elements. See :class:`cudnn.{api.__name__}`."
    )
    about = textwrap.wrap(f'"""{about}"""', WIDTH, initial_indent="    ", subsequent_indent="    ")
    lines = (f"def {name}(", *(f"    {each}," for each in shown), f") -> {result}:", *about)
    return "".join(f"{line}\n" for line in lines)


def names() -> str:
    """The public names of the fused APIs, which `cudnn` has."""
    lines = [f'"""The public names of the fused APIs. {_WRITTEN}"""', ""]
    for package in dict.fromkeys(registry.public_names().values()):
        exported = [name for name, home in registry.public_names().items() if home == package]
        for name in sorted(exported, key=lambda name: (name[0].islower(), name.lower())):  # as ruff has it
            line = f"from {package} import {name} as {name}"
            lines += [line] if len(line) <= WIDTH else [f"from {package} import (", f"    {name} as {name},", ")"]
    return "\n".join(lines) + "\n"


_PACKAGE = Path(cudnn.__file__).parent
STUBS: dict[Path, Callable[[], str]] = {
    _PACKAGE / "graph_methods.pyi": graph,
    _PACKAGE / "fused" / "names.pyi": names,
    _PACKAGE / "fused" / "operators.pyi": operators,
}


def write() -> None:
    """Writes all of them."""
    for path, text in STUBS.items():
        path.write_text(text())
