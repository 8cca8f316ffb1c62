"""The package's own data: one version, pins that fit the requirements, nothing of a machine in the files."""

from __future__ import annotations

import re
import subprocess
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
    versions = re.findall(r'^__version__ = "([^"]+)"$', (ROOT / "python/cudnn/__init__.py").read_text(), re.MULTILINE)
    assert versions == [cudnn.__version__]


def test_every_pin_is_exact_and_named_once() -> None:
    assert all([specifier.operator for specifier in pin.specifier] == ["=="] for pin in PINS)
    names = [_canonical(pin.name) for pin in PINS]
    assert len(names) == len(set(names))


def test_pins_satisfy_the_requirements() -> None:
    pins = {_canonical(pin.name): next(iter(pin.specifier)).version for pin in PINS}
    # Extra cu13 has no pin: PyTorch from the default index requires its cuDNN version.
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


def test_ci_runs_the_command_of_the_readme(tmp_path: Path) -> None:
    """Its parts one after the other, as programs with their words, until one fails."""
    function = re.search(r"^readme_tests\(\) \{\n.*?^\}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE | re.DOTALL)
    assert function is not None
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    for name in ("python3", "env/bin/pip", "env/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        program = '#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@" >> log\n[ ! -e stop ]\n'
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)

    def run() -> tuple[int, list[str]]:
        script = f"PATH={tmp_path}:$PATH env=env\n{function[0]}\nreadme_tests"
        done = subprocess.run(["bash", "-uc", script], cwd=tmp_path)
        return done.returncode, (tmp_path / "log").read_text().split("\n")[:-1]

    code, words = run()
    extras = ".[test,cu12,docs,transformers]"
    install = ["pip", "install", "-c", "constraints.txt", "-e", extras]
    stacks = ["megatron-core", "torchtitan", "spmd_types", "tyro", "docstring_parser", "typeguard", "einops", "triton"]
    stacks += ["accelerate", "peft", "psutil"]
    install += ["pip", "install", "--no-deps", "-c", "constraints.txt", *stacks]
    assert (code, words) == (0, ["python3", "-m", "venv", "env", *install, "python", "-m", "pytest", "-n", "auto"])
    (tmp_path / "log").unlink()
    (tmp_path / "stop").touch()
    assert run() == (1, ["python3", "-m", "venv", "env"])
