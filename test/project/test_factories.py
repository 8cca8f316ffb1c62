"""No tensor takes its type or device from PyTorch's defaults, which belong to the program that calls the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("python/cudnn", "python/ptx_emulator", "kernels/cudnn_kernels")
_WINDOWS = ("bartlett", "blackman", "hamming", "hann", "kaiser")
_FACTORIES = frozenset(
    f"torch.{name}"
    for name in (
        *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_quantized", "empty_strided", "eye"),
        *("fft.fftfreq", "fft.rfftfreq", "full", "linspace", "logspace", "nested.nested_tensor", "normal", "ones"),
        *("rand", "randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor"),
        *("tril_indices", "triu_indices", "zeros", *(f"{name}_window" for name in _WINDOWS)),
    )
)
_TYPED = frozenset({"torch.frombuffer"})  # on the CPU, whatever the defaults are
_PLACED = frozenset({"torch.Generator", "torch.UntypedStorage"})  # without a type
_LEGACY = frozenset(f"torch.{name}Tensor" for name in ("", "BFloat16", "Double", "Float", "Half", "Int", "Long"))
_NOT_MADE = frozenset({"Module", "ModuleDict", "ModuleList", "Parameter", "ParameterDict", "ParameterList"})


def _needed(name: str) -> frozenset[str]:
    """The arguments without which a function of PyTorch asks the defaults."""
    module, _, last = name.rpartition(".")
    if name in _FACTORIES or (module == "torch.nn" and last[:1].isupper() and last not in _NOT_MADE):
        return frozenset({"dtype", "device"})
    return frozenset({"dtype"} if name in _TYPED else {"device"} if name in _PLACED else ())


def _scopes(tree: ast.Module) -> dict[int, ast.AST]:
    """The innermost function that each call is in, or the file."""
    scopes: dict[int, ast.AST] = {}
    for scope in ast.walk(tree):  # outer ones come first
        if isinstance(scope, (ast.Module, ast.FunctionDef)):
            scopes |= {id(node): scope for node in ast.walk(scope) if isinstance(node, ast.Call)}
    return scopes


def _names_of_dicts(scope: ast.AST) -> dict[str, set[str]]:
    """Dictionaries that a function writes out and assigns only once, with their keys: calls may pass them by ``**``."""
    assigned: dict[str, list[set[str]]] = {}
    for node in ast.walk(scope):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _annotated(node) else []
        for target in targets:
            if isinstance(target, ast.Name):
                keys = node.value.keys if isinstance(node.value, ast.Dict) else []
                assigned.setdefault(target.id, []).append({key.value for key in keys if isinstance(key, ast.Constant)})
    return {name: keys[0] for name, keys in assigned.items() if len(keys) == 1}


def _annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and node.value is not None


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of what makes a tensor, or may make one, whose type or device the program leaves out."""
    tree = ast.parse(source)
    scopes = _scopes(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    partial = [node for node in calls if ast.unparse(node.func) == "functools.partial"]
    called = {id(node.func): node for node in calls} | {id(node.args[0]): node for node in partial}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if any(_needed(f"{node.module}.{alias.name}") for alias in node.names):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import) and any(a.name == "torch" and a.asname for a in node.names):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            name, call = ast.unparse(node), called.get(id(node))
            if call is None:
                if _needed(name) == {"dtype", "device"} and not name.startswith("torch.nn."):  # a class is no call
                    yield node.lineno, name
                continue
            passed = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            for keyword in call.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Name):
                    passed |= _names_of_dicts(scopes[id(call)]).get(keyword.value.id, set())
            positional = name == "torch.Generator" and call.args
            if name in _LEGACY or (not positional and not _needed(name) <= passed):
                yield node.lineno, ast.unparse(call)


def _listed() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in faults(path.read_text())
    ]


def test_every_tensor_is_made_with_a_type_and_a_device() -> None:
    unspecified = _listed()
    assert not unspecified, "say dtype= and device=, which PyTorch's defaults must not choose:\n" + "\n".join(
        unspecified
    )


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros(2, device=x.device)",
        "torch.arange(2, dtype=torch.int64)",
        "torch.tensor(1.0, dtype=kind)",
        "torch.rand(2, generator=g)",
        "torch.Generator()",
        "torch.Tensor([1.0])",
        "torch.frombuffer(memory)",
        "torch.nn.Linear(2, 2, dtype=dtype)",
        "make = torch.empty",
        "functools.partial(torch.empty, 2, dtype=kind)",
        "functools.partial(make, torch.empty, dtype=kind, device=here)",
        "list(map(torch.ones, sizes))",
        "torch.zeros(2, **options)",
        "options = {'dtype': kind}\ntorch.zeros(2, **options)",
        "options = {'dtype': kind, 'device': here}\noptions = {}\ntorch.zeros(2, **options)",
        "from torch import zeros",
        "import torch as t",
    ],
)
def test_what_is_a_fault(line: str) -> None:
    assert [*faults(line)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros(2, dtype=torch.float32, device=x.device)",
        "options = {'dtype': kind, 'device': here}\ntorch.zeros(2, **options)",
        "functools.partial(torch.empty, 2, dtype=kind, device=here)",
        "x.new_zeros(2), torch.zeros_like(x)",
        "torch.Generator('cpu'), torch.Generator(device=x.device)",
        "torch.frombuffer(memory, dtype=torch.uint8)",
        "torch.nn.Parameter(x), isinstance(layer, torch.nn.Linear)",
        "from torch import Tensor",
    ],
)
def test_what_is_none(line: str) -> None:
    assert not [*faults(line)]
