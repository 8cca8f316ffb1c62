"""The package's own data: one version, pins that fit the requirements, nothing of a machine in the files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cudnn

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    found = re.findall(r'^__version__ = "([^"]+)"$', (ROOT / "python/cudnn/__init__.py").read_text(), re.MULTILINE)
    assert found == [cudnn.__version__]


def test_every_pin_is_exact_and_named_once() -> None:
    assert all([specifier.operator for specifier in pin.specifier] == ["=="] for pin in PINS)
    names = [_canonical(pin.name) for pin in PINS]
    assert len(names) == len(set(names))


def test_pins_satisfy_the_requirements() -> None:
    pins = {_canonical(pin.name): next(iter(pin.specifier)).version for pin in PINS}
    # Extra cu13 has no pin: PyTorch from the default index asks for a cuDNN of its own choice.
    wanted = [text for extra, texts in PROJECT["optional-dependencies"].items() if extra != "cu13" for text in texts]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *wanted]):
        version = pins[_canonical(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} and {version}"


def test_pins_name_no_machine() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"://|file:|@ |^-", text, re.MULTILINE)


def test_hooks_run_the_pinned_ruff() -> None:
    (pin,) = (next(iter(pin.specifier)).version for pin in PINS if pin.name == "ruff")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"ruff-pre-commit\n    rev: v(\S+)$", hooks, re.MULTILINE) == [pin]
