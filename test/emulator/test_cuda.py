"""Programs for `device="cuda"`, kernels of Triton, and PTX of other libraries."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from cuda.bindings import driver
from cuda.bindings import runtime as cudart
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

import ptx_emulator
from emulator.harness import run

THREADS = 32


@cute.kernel
def double_kernel(a: cute.Tensor, b: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    b[thread] = a[thread] + a[thread]


@cute.jit
def double(a: cute.Tensor, b: cute.Tensor, stream: driver.CUstream) -> None:
    double_kernel(a, b).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def program() -> tuple[torch.Tensor, tuple[int, int]]:
    """As one for a GPU is written."""
    if not torch.cuda.is_available():
        raise RuntimeError("no GPU")
    torch.manual_seed(1)
    device = torch.device("cuda")
    a = torch.randn(THREADS, device=device)
    with torch.device("cuda"):
        b = torch.zeros(THREADS)
    assert a.is_cuda
    assert not a.is_cpu
    assert b.device == torch.device("cuda:0")
    assert a.get_device() == 0
    stream = torch.cuda.current_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    double(from_dlpack(a), from_dlpack(b), driver.CUstream(stream.cuda_stream))
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    on_host = b.cpu()
    assert on_host.data_ptr() != b.data_ptr()
    assert b.to("cpu").data_ptr() != b.data_ptr()
    assert b.to("cuda", torch.float32).data_ptr() == b.data_ptr()
    assert torch.testing.assert_close(on_host, 2 * a.cuda()) is None
    _, device_number = driver.cuDeviceGet(0)
    name = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    return b, (driver.cuDeviceGetAttribute(name, device_number)[1], torch.cuda.get_device_capability()[0])


@pytest.mark.parametrize(("arch", "major"), [("sm_90a", 9), ("sm_100a", 10)])
def test_a_program_for_a_gpu(arch: str, major: int) -> None:
    before = torch.cuda.is_available, torch.cuda.Stream, driver.cuDeviceGet
    with ptx_emulator.emulate(arch, races=True, cuda=True, multiprocessors=5) as report:
        b, majors = program()
        assert torch.cuda.get_device_properties(0).multi_processor_count == 5
        attributes = cudart.cudaDeviceAttr
        for name, value in (("ComputeCapabilityMajor", major), ("MultiProcessorCount", 5), ("WarpSize", 32)):
            assert cudart.cudaDeviceGetAttribute(getattr(attributes, f"cudaDevAttr{name}"), 0)[1] == value
        with pytest.raises(ptx_emulator.EmulatorError, match="cudaDevAttrPciBusId of the device is not known"):
            cudart.cudaDeviceGetAttribute(attributes.cudaDevAttrPciBusId, 0)
    assert majors == (major, major)
    assert len(report.launches) == 1
    assert (torch.cuda.is_available, torch.cuda.Stream, driver.cuDeviceGet) == before
    assert b.device.type == "cpu"


class Doubled(torch.autograd.Function):
    """An operator that wants tensors on a GPU in both passes."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.is_cuda
        return 2 * gradient


def test_backward_passes_see_the_gpu_too() -> None:
    with ptx_emulator.emulate("sm_90a", cuda=True):
        x = torch.ones(4, device="cuda", requires_grad=True)
        Doubled.apply(x).sum().backward()
        Doubled.apply(x).backward(gradient=torch.ones(4, device="cuda"))
    assert x.grad is not None
    assert x.grad.tolist() == [4] * 4


def test_one_block_at_a_time_changes_pytorch() -> None:
    from ptx_emulator.runtime.cuda import emulated_cuda

    with (
        ptx_emulator.emulate("sm_90a", cuda=True),
        pytest.raises(ptx_emulator.EmulatorError, match="another thread is in such a block"),
        emulated_cuda("sm_90a", (9, 0), 8),
    ):
        pass


def test_tensors_of_the_cpu_are_global_memory() -> None:
    """As on a GPU: a bulk copy takes them, and accesses are of global memory."""
    x = torch.zeros(4)
    assert "generic" in str(from_dlpack(x).memspace)
    with ptx_emulator.emulate("sm_90a"):
        assert "gmem" in str(from_dlpack(x).memspace)


@pytest.mark.parametrize("width", [2, 4])
def test_vector_registers(width: int) -> None:
    """QuACK and FlashAttention declare them in inline PTX."""
    names = "xyzw"[:width]
    moves = "".join(f"add.s32 v.{name}, %r99, {i};" for i, name in enumerate(names))
    out = np.zeros((32, width), np.uint32)
    run(
        f"""{{ .reg .v{width} .s32 v; {moves} mul.wide.u32 %rd1, %r99, {4 * width}; add.s64 %rd1, %rd1, %rd90;
        st.global.v{width}.b32 [%rd1], v; }}""",
        out,
    )
    assert out.tolist() == [[thread + i for i in range(width)] for thread in range(32)]


def compiled(parameters: int, **metadata: Any) -> Any:
    """What Triton's compiler returns, of a kernel that stores its number of threads and its program's number."""
    declared = ", ".join(f".param .u64 .ptr .global .align 1 p{i}" for i in range(parameters))
    text = f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry number({declared}) .reqntid 128
{{
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  .reg .pred %p<2>;
  ld.param.b64 %rd1, [p0];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  setp.ne.s32 %p1, %r2, 127;
  @%p1 ret;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd2, %rd1, %rd2;
  st.global.b32 [%rd2], %r1;
  ret;
}}"""
    defaults = {"name": "number", "num_warps": 4, "shared": 0, "num_ctas": 1, "global_scratch_size": 0}
    return types.SimpleNamespace(asm={"ptx": text}, metadata=types.SimpleNamespace(**defaults | metadata))


@pytest.mark.parametrize("scratch", [0, 64])
def test_a_kernel_of_triton(scratch: int) -> None:
    """Its parameters end with two pointers to scratch memory, which the launcher gives."""
    out = torch.full((3,), -1, dtype=torch.int32)
    launch = ptx_emulator.run_triton(compiled(3, global_scratch_size=scratch), 3, [out], races=True)
    assert out.tolist() == [0, 1, 2]
    assert (launch.block, launch.grid, launch.findings) == ((128, 1, 1), (3, 1, 1), [])
    with pytest.raises(ValueError, match="takes 3 arguments, got 4"):
        ptx_emulator.run_triton(compiled(3), 3, [out, out, out, out])
    assert ptx_emulator.run_triton(compiled(1, num_ctas=2), (1,), [out]).cluster == (2, 1, 1)
