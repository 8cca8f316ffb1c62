"""Wheel, sdist and editable install, built here without a network: both source roots are in each."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed: pip install '.[test]'")

ROOT = Path(__file__).parents[2]


def _modules(folder: Path) -> set[str]:
    """Files of the packages below a folder, by their place in an installation."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if path.suffix in (".py", ".pyi", ".typed", ".json", ".xz", ".md")}


SOURCES = _modules(ROOT / "python") | _modules(ROOT / "kernels")


def _build(source: Path, out: Path, target: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (built,) = out.iterdir()
    return built


def _packaged(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _where(package_root: Path) -> list[str]:
    """Where the two packages come from when only ``package_root`` is added to the path."""
    code = "import cudnn, cudnn_kernels; print(cudnn.__file__, cudnn_kernels.__file__, sep='\\n')"
    env = {**os.environ, "PYTHONPATH": str(package_root)}
    shown = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True, cwd="/")
    return shown.stdout.split()


def test_wheel(tmp_path: Path) -> None:
    wheel = _build(ROOT, tmp_path / "wheel", "wheel")
    assert _packaged(wheel) == SOURCES
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "cudnn = cudnn.cli:main" in archive.read(entry_points).decode()
        assert "[pytest11]\nptx_emulator.testing = ptx_emulator.testing" in archive.read(entry_points).decode()
    site = tmp_path / "site"
    assert _where(site) == [str(site / "cudnn/__init__.py"), str(site / "cudnn_kernels/__init__.py")]


def test_wheel_from_sdist(tmp_path: Path) -> None:
    with tarfile.open(_build(ROOT, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert _packaged(_build(source, tmp_path / "wheel", "wheel")) == SOURCES
    for name in ("LICENSE", "README.md", "constraints.txt", "test/conftest.py", "docs/index.md"):
        assert (source / name).is_file(), name


def test_editable(tmp_path: Path) -> None:
    """An editable wheel holds no code but the two folders to look in."""
    code = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (links,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert set(archive.read(links).decode().split()) == {str(ROOT / "python"), str(ROOT / "kernels")}
