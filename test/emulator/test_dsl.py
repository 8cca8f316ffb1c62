"""The hook into the CuTe DSL: plain and TVM-FFI functions, both architectures in one process, faults at the call."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import cutlass
import pytest
import torch
from cutlass import cute, pipeline
from cutlass.cute.runtime import from_dlpack

import ptx_emulator
from ptx_emulator.runtime.hook import HOOK

pytest_plugins = ["ptx_emulator.testing"]
THREADS = 64


@cute.kernel
def scale_kernel(a: cute.Tensor, b: cute.Tensor, factor: cute.Float32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    b[index] = a[index] * factor


@cute.jit
def scale(a: cute.Tensor, b: cute.Tensor, factor: cute.Float32) -> None:
    scale_kernel(a, b, factor).launch(grid=(a.shape[0] // THREADS, 1, 1), block=(THREADS, 1, 1))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(128, dtype=torch.float32), torch.zeros(128)


def test_plain_function(emulated_arch: str, emulate: Any) -> None:
    a, b = tensors()
    arguments = [from_dlpack(a), from_dlpack(b), cute.Float32(3.0)]
    with emulate(emulated_arch) as report:
        cute.compile(scale, *arguments)(*arguments)
    assert torch.equal(b, 3 * a)
    launch = report.launches[0]
    assert launch.grid == (2, 1, 1)
    assert launch.instructions["st.global.b32"] == 4
    assert launch.bytes["global store"] == 512
    assert json.loads(report.to_json())["launches"][0]["block"] == [64, 1, 1]


def test_tvm_ffi_function_keeps_working_in_later_blocks(emulated_arch: str) -> None:
    a, b = tensors()
    with ptx_emulator.emulate(emulated_arch):
        compiled = cute.compile(scale, from_dlpack(a), from_dlpack(b), cute.Float32(1.0), options="--enable-tvm-ffi")
    for factor, scheduler in ((2.0, "random"), (5.0, "lazy")):
        with ptx_emulator.emulate(emulated_arch, races=True, scheduler=scheduler, seed=1) as report:
            compiled(a, b, factor)
        assert torch.equal(b, factor * a)
        assert len(report.launches) == 1


def test_two_architectures_in_one_process() -> None:
    a, b = tensors()
    arguments = [from_dlpack(a), from_dlpack(b), cute.Float32(3.0)]
    compiled = {}
    for arch in ("sm_90a", "sm_100a", "sm_90a"):
        with ptx_emulator.emulate(arch):
            compiled[arch] = cute.compile(scale, *arguments)
    for arch, function in compiled.items():
        b.zero_()
        with ptx_emulator.emulate(arch):
            function(*arguments)
        assert torch.equal(b, 3 * a)
    with (
        ptx_emulator.emulate("sm_100a"),
        pytest.raises(ptx_emulator.EmulatorError, match="compiled for sm_90a, and this block emulates sm_100a"),
    ):
        compiled["sm_90a"](*arguments)


@pytest.mark.parametrize("tvm_ffi", [False, True])
@pytest.mark.usefixtures("source_lines")
def test_fault_surfaces_at_the_call_with_its_python_line(tvm_ffi: bool) -> None:
    a, b = tensors()
    short = torch.zeros(100)
    options = "--enable-tvm-ffi" if tvm_ffi else ""
    wrap: Any = (lambda x: x) if tvm_ffi else (lambda x: from_dlpack(x).mark_layout_dynamic())
    with ptx_emulator.emulate("sm_90a"):
        dynamic = [from_dlpack(x).mark_layout_dynamic() for x in (a, b)]
        compiled = cute.compile(scale, *dynamic, cute.Float32(1.0), options=options)
        with pytest.raises(ptx_emulator.OutOfBounds, match=r"test_dsl\.py:\d+; block \(1, 0, 0\), threads 36, 37"):
            compiled(wrap(a), wrap(short), 1.0)
        compiled(wrap(a), wrap(b), 4.0)
    assert torch.equal(b, 4 * a)


@cute.kernel
def advancing_kernel(b: cute.Tensor) -> None:
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 3)
    for _ in cutlass.range(cute.Int32(b[0]), unroll=1):
        b[state.index] = cute.Float32(state.phase)
        state.advance()


@cute.jit
def advancing(b: cute.Tensor) -> None:
    advancing_kernel(b).launch(grid=(1, 1, 1), block=(1, 1, 1))


@pytest.mark.usefixtures("source_lines")
def test_no_message_names_a_line_of_the_emulator() -> None:
    """Functions of the DSL that kernels call come through the hook."""
    b = from_dlpack(torch.full((3,), 4.0))
    with ptx_emulator.emulate("sm_90a", races=True):
        cute.compile(advancing, b)(b)
    files = re.findall(r'\.file\s+\d+ "(.*)"', HOOK.runtimes[-1].ptx)
    assert [Path(name).name for name in files] == ["test_dsl.py"]


def test_a_launch_that_fails_is_in_the_report() -> None:
    a, b = tensors()
    short = torch.zeros(100)
    dynamic = [from_dlpack(x).mark_layout_dynamic() for x in (a, b, short)]
    with ptx_emulator.emulate("sm_90a") as report:
        compiled = cute.compile(scale, dynamic[0], dynamic[1], cute.Float32(1.0))
        with pytest.raises(ptx_emulator.OutOfBounds):
            compiled(dynamic[0], dynamic[2], 1.0)
        compiled(dynamic[0], dynamic[1], 4.0)
    failed, passed = report.launches
    assert failed.error.startswith("OutOfBounds: PE201: global access out of bounds")
    assert failed.instructions["ld.global.b32"] == 4
    assert "error: OutOfBounds" in str(report)
    assert passed.error == ""


@cute.kernel
def turn_kernel(a: cute.Tensor, b: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    tile = cute.make_tensor(cute.arch.alloc_smem(cute.Float32, THREADS), cute.make_layout(THREADS))
    tile[thread] = a[thread]
    b[thread] = tile[thread ^ 32]


@cute.jit
def turn(a: cute.Tensor, b: cute.Tensor) -> None:
    """Passes elements from warp to warp, without a barrier."""
    turn_kernel(a, b).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def racing(error: str = "", **options: Any) -> ptx_emulator.Report:
    """A launch with a race, and one without; with `error`, the block raises it."""
    a, b = (from_dlpack(x) for x in tensors())
    with ptx_emulator.emulate("sm_90a", races=True, **options) as report:
        cute.compile(turn, a, b)(a, b)
        cute.compile(scale, a, b, cute.Float32(3.0))(a, b, 3.0)
        assert not error, error
    return report


def test_the_end_of_the_block_raises_what_the_launches_found() -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"^PE101: ") as caught:
        racing()
    assert [finding.code for finding in caught.value.findings] == ["PE101"]
    report = racing(on_error="report")
    assert [launch.codes for launch in report.launches] == [["PE101"], []]
    assert (report.arch, len(report.errors)) == ("sm_90a", 1)
    assert [launch.codes for launch in racing(ignore=["PE101"], report=report).launches] == [["PE101"], [], [], []]


def test_an_error_can_be_raised_at_once_or_explain_what_the_block_raises() -> None:
    a, b = (from_dlpack(x) for x in tensors())
    with ptx_emulator.emulate("sm_90a", races=True, on_error="raise"):
        compiled = cute.compile(turn, a, b)
        with pytest.raises(ptx_emulator.RaceError):
            compiled(a, b)
    with pytest.raises(ptx_emulator.RaceError) as caught:
        racing("wrong result")
    assert str(caught.value.__cause__).startswith("wrong result")
    with pytest.raises(AssertionError, match="wrong result"):
        racing("wrong result", on_error="report")


@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
def test_what_calls_the_emulator_has_no_object_file(options: str, tmp_path: Any) -> None:
    """It holds addresses of this process; no cache may keep it."""
    a, b = tensors()
    arguments = [from_dlpack(a), from_dlpack(b), cute.Float32(1.0)]
    with ptx_emulator.emulate("sm_90a"):
        compiled = cute.compile(scale, *arguments, options=options)
    with pytest.raises(ptx_emulator.EmulatorError, match="has no object file"):
        compiled.export_to_c(str(tmp_path / "kernel.o"), "kernel")
    for_gpu = cute.compile(scale, *arguments, options="--enable-tvm-ffi --gpu-arch sm_90a")
    for_gpu.export_to_c(str(tmp_path / "kernel.o"), "kernel")
    assert (tmp_path / "kernel.o").stat().st_size > 0


def test_modules_that_import_others_on_demand_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"{name} wants what is not installed")

    module = types.ModuleType("lazy")
    module.__dict__["__getattr__"] = missing
    monkeypatch.setitem(sys.modules, "lazy", module)
    HOOK.refuse_export()


def test_outside_the_block_it_refuses() -> None:
    a, b = tensors()
    arguments = [from_dlpack(a), from_dlpack(b), cute.Float32(3.0)]
    with ptx_emulator.emulate("sm_90a"):
        compiled = cute.compile(scale, *arguments)
        with (
            pytest.raises(ptx_emulator.EmulatorError, match="do not nest"),
            ptx_emulator.emulate("sm_100a"),
        ):
            pass
        compiled(*arguments)
    with pytest.raises(ptx_emulator.EmulatorError, match="call it inside"):
        compiled(*arguments)
