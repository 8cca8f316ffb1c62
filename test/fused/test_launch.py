"""The launch path without a GPU: object files, architectures, streams."""

from __future__ import annotations

import ctypes
import linecache
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import cudnn
from cudnn.runtime import codegen, kernels, launch, loader
from cudnn.runtime.elf import LoadedObject, ObjectError
from fused.test_kernel_cache import CONFIGURATION, SOURCE, python

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> bytes:
    """The object file of a real kernel."""
    return kernels.build(SOURCE, CONFIGURATION, "sm_90a")


def test_a_loaded_object_checks_its_arguments(compiled: bytes) -> None:
    """The function is the compiler's own: it refuses what it was not compiled for before anything reaches a GPU."""
    import torch

    function = loader.load(compiled)
    x = torch.empty(2, 512, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="Expects 6 parameters"):
        function(x)
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(x, x[0], x, torch.empty(1), 1e-5, 0)


def test_no_kernel_for_a_gpu_is_compiled_within_emulation() -> None:
    with cudnn.emulation("sm_90a"), pytest.raises(RuntimeError, match=r"within cudnn\.emulation; .* leave arch out"):
        kernels.build(SOURCE, CONFIGURATION, "sm_90a")


def _nowhere(name: str) -> int:
    return 0


def test_an_object_asks_for_the_symbols_that_it_lacks(compiled: bytes) -> None:
    asked: list[str] = []
    loaded = LoadedObject(compiled, lambda name: asked.append(name) or 0)
    assert "_cudaLaunchKernelEx" in asked
    assert len(asked) == len(set(asked))
    assert loader.ENTRY in loaded.symbols
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
    assert "nvidia_cutlass_dsl-4." in loader.toolchain()


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


def test_lazy_names() -> None:
    assert "RmsNormRhtAmax" in dir(cudnn)
    with pytest.raises(AttributeError, match="module 'cudnn' has no attribute 'nothing'"):
        cudnn.nothing  # noqa: B018
    code = "import sys; sys.modules['cudnn_kernels.architecture'] = None; import cudnn; cudnn.RmsNormRhtAmax"
    assert "ImportError: cudnn.RmsNormRhtAmax cannot be loaded" in python(code).communicate(timeout=60)[1]


def test_tracebacks_show_source_that_was_written_out() -> None:
    divide = codegen.define("divide", "def divide(x):\n    return scale / x\n", {"scale": 1})
    with pytest.raises(ZeroDivisionError) as raised:
        divide(0)
    linecache.checkcache()
    assert "return scale / x" in "".join(traceback.format_exception(raised.value))
