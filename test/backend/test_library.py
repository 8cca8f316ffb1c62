from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cudnn.backend import library
from cudnn.backend.enums import Status
from cudnn.errors import CudnnLibraryError

FAKE = """
#include <stddef.h>
size_t cudnnGetVersion(void) { return 90900; }
size_t cudnnGetCudartVersion(void) { return 12090; }
"""


def test_version(libcudnn: library.Library) -> None:
    assert library.is_available()
    assert library.version() == libcudnn.version >= library.OLDEST
    assert library.version_string() == library.format_version(libcudnn.version)
    assert library.format_version(92813) == "9.28.13"
    assert Path(libcudnn.path).is_file()
    assert library.load() is libcudnn


def test_last_error_is_one_line(libcudnn: library.Library) -> None:
    libcudnn.finalize(None)
    assert "\n" not in library.last_error()


def test_an_unknown_status_is_still_told(libcudnn: library.Library) -> None:
    error = libcudnn.error(7777, "doing this")
    assert str(error).startswith("doing this failed: CUDNN_STATUS 7777")
    assert (error.status, error.not_supported) == (7777, False)
    assert libcudnn.error(3002, "x").not_supported


def test_a_missing_driver_library_is_named(libcudnn: library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, told in ((False, True), (True, False)):
        monkeypatch.setattr(library, "loads", lambda name, found=found: found)
        assert ("libcuda.so.1" in str(libcudnn.error(int(Status.SUBLIBRARY_LOADING_FAILED), "finalizing"))) is told
        assert "libcuda.so.1" not in str(libcudnn.error(int(Status.BAD_PARAM), "finalizing"))


def test_a_missing_library_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_candidates", lambda: iter(()))
    monkeypatch.setattr(library, "_library", None)
    assert not library.is_available()
    with pytest.raises(CudnnLibraryError, match=r"not installed.*pip install .\.\[cu12\]"):
        library.load()


def _python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path[:] = {sys.path!r}\n{program}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **environment}
    )


@pytest.fixture
def old_cudnn(tmp_path: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    target = tmp_path / "libcudnn.so.9"
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target), "-x", "c", "-"]
    subprocess.run(command, input=FAKE, text=True, check=True)
    return target


def test_an_old_library_on_the_path_is_refused_by_version(old_cudnn: Path) -> None:
    program = "from cudnn.backend import library\nlibrary.load()"
    result = _python(program, LD_LIBRARY_PATH=str(old_cudnn.parent))
    assert f"cuDNN 9.9.0 at {old_cudnn} is too old; needed: 9.10.0 or newer" in result.stderr


def test_a_loaded_library_comes_first(old_cudnn: Path) -> None:
    program = f"import ctypes; ctypes.CDLL({str(old_cudnn)!r})\nfrom cudnn.backend import library\nlibrary.load()"
    result = _python(program, LD_LIBRARY_PATH="")
    assert f"cuDNN 9.9.0 at {old_cudnn} is too old" in result.stderr


@pytest.mark.usefixtures("libcudnn")
def test_found_without_cuda_pathfinder() -> None:
    program = "sys.modules['cuda.pathfinder'] = None\nfrom cudnn.backend import library\nprint(library.load().path)\n"
    result = _python(program)
    assert result.returncode == 0, result.stderr
    assert os.path.basename(result.stdout.strip()).startswith("libcudnn.so")


def test_not_a_library(tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.9").write_text("no library")
    with pytest.raises(CudnnLibraryError, match="cannot be loaded"):
        library.Library(str(tmp_path / "libcudnn.so.9"))
