"""The stubs of the package, what type checkers see of names that exist at run time only: `python docs/generate.py`.

A test fails while one is out of date. They are laid out as `ruff format` would do it.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cudnn
from cudnn.fused import linear, operator, registry
from cudnn.fused.dense import DenseGemm

_WRITTEN = "Written by `python docs/generate.py`."
_OPERATORS = f'''"""The operators of the fused APIs, ``cudnn.ops``, for type checkers. {_WRITTEN}"""

from typing import overload

from torch import Tensor, dtype
'''


def _named(name: str, parameter_kind: str, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return f"{name}: {parameter_kind}"
    return f"{name}: {parameter_kind} = {json.dumps(default) if isinstance(default, str) else repr(default)}"


def operators() -> str:
    """The operators as functions, from the wrappers."""
    return _OPERATORS + "".join(f"\n{_operator(name)}" for name in registry.packages())


def _operator(name: str) -> str:
    api, function = registry.find(name), registry.wrapper(name)
    types = {p.name: p.annotation for p in inspect.signature(function).parameters.values()}
    signature, names = operator.signature_of(api, function)
    if issubclass(api, DenseGemm):
        return _linear_operator(name, api, types, signature, names)
    shown = [_named(name, types[names[name]], p.default) for name, p in signature.parameters.items()]
    result = f"tuple[{', '.join(['Tensor'] * len(api.returns))}]"
    about = f"{', '.join(api.returns)}; absent results have no elements. See :class:`cudnn.{api.__name__}`."
    about = _wrapped(f'"""{api.title}: {about}"""')
    return "\n".join([f"def {name}(", *(f"    {each}," for each in shown), f") -> {result}:", *about, ""])


def _linear_operator(name: str, api: Any, types: Any, signature: inspect.Signature, names: Any) -> str:
    """Those of dense GEMMs return the primary result, or with ``returns`` a tuple."""
    shown = []
    for parameter in linear.signature_of(signature.parameters).parameters.values():
        if parameter.name in names:
            annotation = types[names[parameter.name]]
            optional = parameter.name.endswith("_dtype") and "None" not in annotation
            shown.append(_named(parameter.name, f"{annotation} | None" if optional else annotation, parameter.default))
    about = (
        f"{api.result[0]}, or those of {', '.join(api.returns)} that returns names. See :class:`cudnn.{api.__name__}`."
    )
    overloads = []
    for returns, result in (("None = None", "Tensor"), ("tuple[str, ...] | list[str]", "tuple[Tensor, ...]")):
        arguments = [*shown, "*", f"returns: {returns}"]
        lines = ["@overload", f"def {name}(", *(f"    {each}," for each in arguments), f") -> {result}:"]
        overloads.append("\n".join([*lines, *_wrapped(f'"""{api.title}: {about}"""'), ""]))
    return "\n".join(overloads)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, initial_indent="    ", subsequent_indent="    ")


def names() -> str:
    """The public names of the fused APIs, which `cudnn` has."""
    imports = [f"from {package} import *" for package in dict.fromkeys(registry.public_names().values())]
    return "\n".join([f'"""The public names of the fused APIs. {_WRITTEN}"""', "", "# ruff: noqa: F403", *imports, ""])


_PACKAGE = Path(cudnn.__file__).parent
STUBS: dict[Path, Callable[[], str]] = {
    _PACKAGE / "fused" / "names.pyi": names,
    _PACKAGE / "fused" / "operators.pyi": operators,
}


def write() -> None:
    """Writes all of them."""
    for path, text in STUBS.items():
        path.write_text(text())
