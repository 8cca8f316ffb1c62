"""The launch path without a GPU: object files, the disk cache, architectures."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cudnn
from cudnn import launch
from cudnn.cli import app
from cudnn.launch import cache, kernels, runtime
from cudnn.launch.elf import LoadedObject, ObjectError
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration

ROOT = Path(__file__).parents[2]
SOURCE = "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax"
CONFIGURATION = RmsNormRhtAmaxConfiguration("bfloat16", 512, threads=32, teams=1, stages=2)
ENTRY = cache.Entry("Kernel", "sm_90a", "columns=512", "source", "toolchain")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for each test."""
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled() -> bytes:
    """The object file of a real kernel."""
    return kernels._build(SOURCE, CONFIGURATION, "sm_90a")


class Builder:
    """Stands for the compiler; counts."""

    def __init__(self, content: bytes = b"object") -> None:
        self.content, self.calls = content, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.content


def test_a_kernel_is_built_once(folder: Path) -> None:
    build = Builder()
    assert [cache.fetch(ENTRY, build) for _ in range(3)] == [b"object"] * 3
    assert build.calls == 1
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert oct((folder / ENTRY.file_name).stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("field", ["name", "arch", "configuration", "source", "toolchain"])
def test_whatever_differs_is_another_kernel(field: str) -> None:
    build = Builder()
    cache.fetch(ENTRY, build)
    cache.fetch(replace(ENTRY, **{field: "other"}), build)
    assert build.calls == 2


def _python(code: str) -> subprocess.Popen[str]:
    """Another process."""
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "kernels")])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _change(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _junk(path: Path) -> None:
    path.write_bytes(b"[1, 2]\n")


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _another_kernel(path: Path) -> None:
    other = replace(ENTRY, arch="sm_100a")
    cache.fetch(other, Builder(b"other"))
    (path.parent / other.file_name).rename(path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_truncate, "truncated or changed"),
        (_change, "truncated or changed"),
        (_empty, "no compiled kernel"),
        (_junk, "no compiled kernel"),
        (_open_to_all, "others may write to it"),
        (_link, "symbolic link"),
        (_another_kernel, "holds another kernel"),
    ],
)
def test_a_bad_file_is_refused_and_built_again(
    folder: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], words: str
) -> None:
    cache.fetch(ENTRY, Builder())
    spoil(folder / ENTRY.file_name)
    build = Builder()
    assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == 1
    assert any("refused" in message and words in message for message in caplog.messages)
    assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == 1


def test_someone_elses_file_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cache.fetch(ENTRY, Builder())
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    build = Builder()
    for _ in range(2):
        assert cache.fetch(ENTRY, build) == b"object"
    assert build.calls == 2  # the folder is someone else's too, so nothing is kept there
    assert all("kernel cache not used" in message and "belongs to user" in message for message in caplog.messages)


def test_without_a_place_to_write_kernels_are_built_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "file" / "below"))
    assert cache.fetch(ENTRY, Builder()) == b"object"
    assert "kernel cache not used" in caplog.text


PROCESS = """
import sys, time
from cudnn.launch import cache
def build():
    print("built", flush=True)
    time.sleep(0.5)
    return b"object"
print(cache.fetch(cache.Entry("Kernel", "sm_90a", "columns=512", "source", "toolchain"), build).decode())
"""


def test_processes_that_need_the_same_kernel_build_it_once() -> None:
    processes = [_python(PROCESS) for _ in range(3)]
    output = [process.communicate(timeout=60)[0] for process in processes]
    assert "".join(output).count("built") == 1
    assert all(text.endswith("object\n") for text in output)


RELOAD = f"""
import sys, time
import torch, tvm_ffi
from cudnn import launch
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration
start = time.process_time()
launch.kernel({SOURCE!r}, {CONFIGURATION!r}, "sm_90a")
print(time.process_time() - start, "cutlass" in sys.modules)
"""


def test_another_process_loads_what_one_compiled(folder: Path) -> None:
    """Without the compiler, in at most 20 ms of the processor's time."""
    kernels._loaded.pop((SOURCE, CONFIGURATION, "sm_90a"), None)
    function = launch.kernel(SOURCE, CONFIGURATION, "sm_90a")
    assert launch.kernel(SOURCE, CONFIGURATION, "sm_90a") is function
    (path,) = folder.glob("*.kernel")
    written = path.stat().st_mtime_ns
    for _ in range(3):  # a slow one may be the machine's fault
        seconds, loaded = _python(RELOAD).communicate(timeout=60)[0].split()
        assert loaded == "False"
        if float(seconds) < 0.02:
            break
    assert float(seconds) < 0.02
    assert path.stat().st_mtime_ns == written


def test_a_loaded_object_checks_its_arguments(compiled: bytes) -> None:
    """The function is the compiler's own: it refuses what it was not compiled for before anything reaches a GPU."""
    import torch

    function = runtime.load(compiled)
    x = torch.empty(2, 512, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="Expects 6 parameters"):
        function(x)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(x, x[0], x, torch.empty(1), 1e-5, 0)


def _nowhere(name: str) -> int:
    return 0


def test_an_object_asks_for_the_symbols_that_it_lacks(compiled: bytes) -> None:
    asked: list[str] = []
    loaded = LoadedObject(compiled, lambda name: asked.append(name) or 0)
    assert "_cudaLaunchKernelEx" in asked
    assert len(asked) == len(set(asked))
    assert runtime.ENTRY in loaded.symbols
    assert not set(asked) & set(loaded.symbols)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: b"", "damaged"),
        (lambda content: content[:4000], "damaged"),
        (lambda content: b"\x7fELG" + content[4:], "no 64-bit x86-64 ELF object"),
        (lambda content: content[:18] + b"\xb7\x00" + content[20:], "no 64-bit x86-64 ELF object"),  # aarch64
    ],
)
def test_a_damaged_object_is_refused(compiled: bytes, spoil: Callable[[bytes], bytes], words: str) -> None:
    with pytest.raises(ObjectError, match=words):
        LoadedObject(spoil(compiled), _nowhere)


C_OBJECT = r"""
extern int add(int, int);
static int state = 40;
static const int table[] = {1, 2, 3};
static int (*pointer)(int, int) = add;
int run(int i) { state += table[i]; return pointer(state, add(i, i)); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_code_data_and_imports_of_an_object_work(tmp_path: Path) -> None:
    source = tmp_path / "object.c"
    source.write_text(C_OBJECT)
    options = ["-c", "-O1", "-fpic", "-mcmodel=large", "-fno-asynchronous-unwind-tables", "-fcf-protection=none"]
    subprocess.run(["gcc", *options, str(source), "-o", str(tmp_path / "object.o")], check=True)
    add = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(lambda a, b: 10 * a + b)
    address = ctypes.cast(add, ctypes.c_void_p).value or 0
    loaded = LoadedObject((tmp_path / "object.o").read_bytes(), {"add": address}.__getitem__)
    run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(loaded.symbols["run"])
    assert [run(0), run(2)] == [10 * 41 + 0, 10 * 44 + 22]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_an_unknown_relocation_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "object.c"
    source.write_text(C_OBJECT)
    subprocess.run(["gcc", "-c", "-fpic", str(source), "-o", str(tmp_path / "object.o")], check=True)
    with pytest.raises(ObjectError, match="relocation of kind"):
        LoadedObject((tmp_path / "object.o").read_bytes(), _nowhere)


def test_toolchain_names_the_compiler() -> None:
    assert "nvidia_cutlass_dsl-4." in runtime.toolchain()


def test_architecture_without_a_kernel() -> None:
    with pytest.raises(RuntimeError, match="Api: architecture: got sm_80; allowed: sm_90a, sm_100a"):
        launch.pick({"sm_90a": "a", "sm_100a": "b"}, "sm_80", "Api")


def test_streams() -> None:
    from cuda.bindings.driver import CUstream

    assert launch.raw_stream(17, 0) == launch.raw_stream(CUstream(17), 0) == 17
    for address in (5, 0):  # PyTorch's default stream has the address 0
        assert launch.raw_stream(type("Stream", (), {"cuda_stream": address})(), 0) == address
    for wrong in ("0", 1.5, object()):
        with pytest.raises(TypeError, match=r"execute: current_stream: got .*; allowed: None, an int, a torch.cuda"):
            launch.raw_stream(wrong, 0)


def test_command_line(folder: Path) -> None:
    cache.fetch(ENTRY, Builder())
    (folder / "junk.kernel").write_text("")
    listed = CliRunner().invoke(app, ["cache", "list"]).output
    assert "1 compiled kernels, 1 refused" in listed
    assert "columns=512" in listed
    assert "junk.kernel: no compiled kernel" in listed
    assert "2 compiled kernels removed" in CliRunner().invoke(app, ["cache", "clear"]).output
    assert list(folder.iterdir()) == []
    refused = CliRunner().invoke(app, ["cache", "warm", "--arch", "sm_80"])
    assert refused.exit_code == 2
    assert "allowed: sm_90a, sm_100a" in " ".join(refused.output.replace("│", " ").split())


def test_lazy_names() -> None:
    assert "RmsNormRhtAmax" in dir(cudnn)
    with pytest.raises(AttributeError, match="module 'cudnn' has no attribute 'nothing'"):
        cudnn.nothing  # noqa: B018
    code = "import sys; sys.modules['cudnn_kernels.architecture'] = None; import cudnn; cudnn.RmsNormRhtAmax"
    assert "ImportError: cudnn.RmsNormRhtAmax cannot be loaded" in _python(code).communicate(timeout=60)[1]
