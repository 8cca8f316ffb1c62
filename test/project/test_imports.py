"""What importing the packages costs and loads, and the layers between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "kernels")])}
HEAVY = ("cutlass", "tvm_ffi", "numpy", "rich", "typer")


def _python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT, cwd=ROOT).stdout


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys, json; {statement}; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    return set(json.loads(_python(code).splitlines()[-1]))


def test_import_loads_neither_torch_nor_cutlass() -> None:
    assert _loaded_by("import cudnn") & {"torch", *HEAVY} == set()


def test_integrations_need_no_import_of_their_own() -> None:
    code = "import cudnn; print(cudnn.integrations.transformers.register.__module__)"
    assert _python(code).strip() == "cudnn.integrations.transformers"


def test_kernels_import_neither_torch_nor_cudnn() -> None:
    assert _loaded_by("import cudnn_kernels") & {"torch", "cudnn"} == set()


def test_plugin_of_pytest_loads_nothing() -> None:
    """Each start of pytest imports it, in all projects of an environment."""
    assert _loaded_by("import ptx_emulator.testing") & {"torch", "cudnn", *HEAVY} == set()
    assert _loaded_by("import ptx_emulator; ptx_emulator.run_ptx") & {"torch", "cudnn", "cutlass"} == set()
    code = "import ptx_emulator; print([name for name in ptx_emulator.__all__ if not getattr(ptx_emulator, name)])"
    assert _python(code).strip() == "[]"


def test_import_is_quick() -> None:
    """``import cudnn`` adds under a quarter of its time to ``import torch``, best of six, or 0.2 s: slow and full cores
    cost both processor time."""
    clock = "time.process_time()"
    code = f"import time; a = {clock}; import torch; b = {clock}; import cudnn; print(b - a, {clock} - b)"
    times = (map(float, _python(code).split()) for _ in range(6))
    assert any(ours < max(0.2, of_torch / 4) for of_torch, ours in times)


@pytest.mark.parametrize("command", [["--version"], ["--help"], ["cache", "list"]])
def test_command_starts_without_torch(command: list[str]) -> None:
    code = f"""
import sys
from cudnn.cli import main
sys.argv = ["cudnn", *{command!r}]
try:
    main()
except SystemExit:
    pass
print({{"torch", "tvm_ffi", "numpy"}} & set(sys.modules))
"""
    assert _python(code).splitlines()[-1] == "set()"


def test_layers() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed: pip install '.[test]'")
    result = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
