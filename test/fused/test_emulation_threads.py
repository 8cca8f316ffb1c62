"""``cudnn.emulation`` belongs to its thread: eight at once, of several APIs and both architectures."""

from __future__ import annotations

import contextvars
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cudnn
from cudnn import demo_cases
from cudnn.runtime import kernels
from cudnn.runtime.launch import emulated_architecture

ptx_emulator = pytest.importorskip("ptx_emulator")

from ptx_emulator.runtime.launch import I32, P, Runtime  # noqa: E402

NORM, GEMM = ("rmsnorm_rht_amax", (16, 512)), ("gemm_amax", (128, 128, 64))
THREADS = [
    (name, arch, scheduler)
    for name, arch in ((NORM, "sm_90a"), (NORM, "sm_100a"), *[(GEMM, "sm_90a")] * 2)
    for scheduler in ("lowest-pc", "random")
]


def test_eight_threads_emulate_at_once() -> None:
    problems = [demo_cases.find(name).make(shape, "cpu") for (name, shape), _, _ in THREADS]
    together = threading.Barrier(len(THREADS))

    def run(number: int) -> tuple[Any, list[str], str]:
        _, arch, scheduler = THREADS[number]
        together.wait()
        with cudnn.emulation(arch, races=True, scheduler=scheduler, seed=number) as report:
            results = problems[number].call()
            seen = emulated_architecture()
        return problems[number].compare(results), [launch.kernel for launch in report.launches], seen

    with ThreadPoolExecutor(len(THREADS)) as pool:
        actual = list(pool.map(run, range(len(THREADS))))
    for (_, arch, _), (comparisons, launched, seen) in zip(THREADS, actual, strict=True):
        assert len(launched) == 1
        assert seen == arch
        assert all(each.passed for each in comparisons)
    for problem in problems[:2]:  # what was compiled meanwhile serves the main thread as well
        with cudnn.emulation("sm_100a"):
            assert all(each.passed for each in problem.compare(problem.call()))


def test_a_thread_waits_until_another_has_loaded_the_kernel() -> None:
    """Before, a launch found no kernel where its thread came second."""
    runtime = Runtime("", lambda *_: None, lambda _: None, (9, 0, 132))
    begun, loaded = threading.Event(), threading.Event()

    def slowly(_: int) -> int:
        begun.set()
        time.sleep(0.2)
        return 0

    def done(*_: int) -> int:
        loaded.set()
        return 0

    init, load = ctypes.CFUNCTYPE(I32, P)(slowly), ctypes.CFUNCTYPE(I32, P, I32)(done)
    init_at, load_at = (ctypes.cast(function, P).value or 0 for function in (init, load))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(runtime.init_once, 1, init_at, load_at, 0)
        assert begun.wait(60)
        assert pool.submit(lambda: (runtime.init_once(1, init_at, load_at, 0), loaded.is_set())).result() == (0, True)
        assert first.result() == 0


def test_another_thread_is_not_within_the_block() -> None:
    """Unless it runs in a copy of this thread's context."""
    x, w = torch.randn(16, 512).bfloat16(), torch.ones(512).bfloat16()

    def elsewhere() -> str:
        cudnn.rmsnorm_rht_amax_wrapper(x, w)
        return emulated_architecture()

    with ThreadPoolExecutor(1) as pool, cudnn.emulation("sm_90a") as report:
        assert pool.submit(elsewhere).result() == ""
        assert report.launches == []
        assert pool.submit(contextvars.copy_context().run, elsewhere).result() == "sm_90a"
        assert len(report.launches) == 1


def test_a_fault_is_raised_in_its_own_thread() -> None:
    """While another thread's launch goes well; the kernel is one, its arguments are not."""
    source = "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax"
    from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration

    configuration = RmsNormRhtAmaxConfiguration("bfloat16", 512, threads=32, teams=1, stages=2)
    x, w = torch.randn(16, 512).bfloat16(), torch.ones(512, dtype=torch.bfloat16)
    together = threading.Barrier(2)

    def run(weight: torch.Tensor) -> str:
        with cudnn.emulation("sm_90a"):
            kernel = kernels.emulated_kernel(source, configuration, "sm_90a")
            together.wait()
            try:
                kernel(x, weight, torch.zeros_like(x), torch.zeros(8), 1e-5, 0)
            except ptx_emulator.Fault as fault:
                return type(fault).__name__
        return ""

    short = torch.ones(512, dtype=torch.bfloat16)
    short.untyped_storage().resize_(512)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, [w, short])) == ["", "OutOfBounds"]


def test_another_thread_may_compile_for_a_gpu() -> None:
    source = "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax"
    from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration

    configuration = RmsNormRhtAmaxConfiguration("bfloat16", 512, threads=32, teams=1, stages=2)
    with ThreadPoolExecutor(1) as pool, cudnn.emulation("sm_100a"):
        assert len(pool.submit(kernels.build, source, configuration, "sm_90a").result()) > 0
        with pytest.raises(RuntimeError, match=r"calls outside of it"):
            kernels.build(source, configuration, "sm_90a")
