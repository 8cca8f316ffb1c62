"""``cudnn info``: what it finds here, and what it makes of broken installations."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cudnn
from cudnn.cli import app, info
from cudnn.cli.info import Facts, Problem, abilities, diagnose

LIB = "/env/lib/python3.11/site-packages/nvidia/cudnn/lib"
HEALTHY = Facts(
    gpus=["NVIDIA H200"],
    driver="580.1",
    driver_library=True,
    torch="2.13.0",
    torch_cuda="13.0",
    torch_wants=['nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"'],
    packages={"nvidia-cudnn-cu13": "9.20.0.48"},
    cudnn="9.20.0",
    cudnn_cuda="13.0",
    cudnn_path=f"{LIB}/libcudnn.so.9",
    mapped=[f"{LIB}/libcudnn.so.9", f"{LIB}/libcudnn_graph.so.9"],
)


def test_a_healthy_installation_has_no_problems() -> None:
    assert diagnose(HEALTHY) == []
    assert all(able for _, able, _ in abilities(HEALTHY))


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        (
            {"packages": {"nvidia-cudnn-cu12": "9.20.0.48", "nvidia-cudnn-cu13": "9.20.0.48"}},
            "nvidia-cudnn-cu12 and nvidia-cudnn-cu13 are both installed",
            "pip uninstall -y nvidia-cudnn-cu12 nvidia-cudnn-cu13, then pip install 'nvidia-cudnn-cu13==9.20.0.48'",
        ),
        ({"mismatched": ["libcudnn_cnn"]}, "another version than libcudnn 9.20.0: libcudnn_cnn", "pip uninstall"),
        ({"mapped": [f"{LIB}/libcudnn.so.9", "/opt/old/libcudnn_graph.so.9"]}, "from 2 folders", "LD_LIBRARY_PATH"),
        (
            {"packages": {"nvidia-cudnn-cu13": "9.28.0.42"}, "cudnn": "9.28.0"},
            "PyTorch asks for nvidia-cudnn-cu13==9.20.0.48; installed: 9.28.0.42",
            "pip install 'nvidia-cudnn-cu13==9.20.0.48'",
        ),
        ({"cudnn": "9.28.0"}, "9.20.0.48 is installed, but its folder holds cuDNN 9.28.0", "pip uninstall"),
        ({"cudnn_cuda": "12.9"}, "PyTorch is built for CUDA 13.0, this cuDNN for CUDA 12.9", "nvidia-cudnn-cu13"),
    ],
    ids=["two-packages", "mixed", "two-copies", "torch-pin", "overwritten", "cuda-major"],
)
def test_a_broken_installation_is_named_with_its_remedy(change: dict[str, object], what: str, remedy: str) -> None:
    problems = diagnose(dataclasses.replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert [problem for problem in problems if what in problem.what and remedy in problem.remedy]


def test_without_gpu_and_library_only_the_reference_runs() -> None:
    bare = Facts(torch="2.13.0")
    assert [able for _, able, _ in abilities(bare)] == [False, True, False]
    assert diagnose(bare) == []


def _cudnn(*arguments: str) -> str:
    command = [sys.executable, "-m", "cudnn", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def test_info_of_this_machine() -> None:
    import torch

    shown = _cudnn("info")
    assert cudnn.__version__ in shown
    assert torch.__version__ in shown
    assert "graphs on the reference executor" in shown


def test_extras_are_not_taken_for_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(torch="2.13.0", cudnn_error="To fix it, `pip install '.[cu12]'`")
    problem = Problem("one is [old]", "`pip install '.[cu13]'`")
    monkeypatch.setattr(info, "collect", lambda: facts)
    monkeypatch.setattr(info, "diagnose", lambda facts: [problem])
    shown = " ".join(CliRunner().invoke(app, ["info"]).output.split())
    assert all(words in shown for words in ("'.[cu12]'", "one is [old]", "'.[cu13]'"))


def test_a_real_second_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages as ``pip`` leaves them: metadata in a folder of ``sys.path``."""
    for cuda in ("cu12", "cu13"):
        folder = tmp_path / f"nvidia_cudnn_{cuda}-9.19.0.56.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cudnn-{cuda}\nVersion: 9.19.0.56\n")
    monkeypatch.syspath_prepend(tmp_path)
    shown = " ".join(CliRunner().invoke(app, ["info"]).output.split())
    assert "nvidia-cudnn-cu12 and nvidia-cudnn-cu13 are both installed" in shown


def test_version() -> None:
    assert _cudnn("--version") == f"cudnn-fused {cudnn.__version__}\n"
