"""Execution of plans on a GPU, without the graph builder."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from ctypes import c_uint, c_ulonglong, c_void_p

import pytest
import torch

from cudnn.backend.handle import (
    Handle,
    create_handle,
    default_handle,
    destroy_handle,
    device_capability,
    device_count,
    get_stream,
    set_stream,
)
from cudnn.backend.library import Library
from cudnn.backend.memory import copy_to_device
from cudnn.backend.plan import ExecutionPlan, PlanList
from cudnn.enums import behavior_note, heur_mode
from support import descriptors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("libcudnn")]
B, M, N, K = 2, 128, 256, 64


@pytest.fixture
def handle() -> Iterator[Handle]:
    made = create_handle()
    set_stream(made, torch.cuda.current_stream().cuda_stream)
    yield made
    torch.cuda.synchronize()
    destroy_handle(made)


def build(handle: Handle, **options: bool) -> ExecutionPlan:
    plans = PlanList(descriptors.matmul(B, M, N, K, handle=handle, **options))
    plans.add([heur_mode.A])
    plans.select_behavior_notes([behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API])
    plans.build()
    plans.candidate.bind([1, 2, 3])
    return plans.candidate


def data(m: int = M) -> list[torch.Tensor]:
    a = torch.randn(B, m, K, device="cuda", dtype=torch.float16)
    b = torch.randn(B, K, N, device="cuda", dtype=torch.float16)
    return [a, b, torch.full((B, m, N), torch.nan, device="cuda", dtype=torch.float16)]


def run(plan: ExecutionPlan, handle: Handle, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Executes; the workspace comes back, to be kept until the stream is done."""
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device="cuda")
    plan.execute(handle, [tensor.data_ptr() for tensor in tensors], workspace.data_ptr())
    return workspace


def check(tensors: list[torch.Tensor]) -> None:
    a, b, c = tensors
    torch.testing.assert_close(c, (a.float() @ b.float()).half(), rtol=2e-3, atol=2e-2)


def test_the_device_is_described(handle: Handle) -> None:
    assert not handle.is_reference
    assert handle.device == torch.cuda.current_device()
    assert device_capability(handle.device) == torch.cuda.get_device_capability()
    assert device_capability(device_count()) is None
    assert device_count() == torch.cuda.device_count()
    assert get_stream(handle) == torch.cuda.current_stream().cuda_stream


def test_new_pointers_at_every_call(handle: Handle) -> None:
    plan = build(handle)
    sets = [data() for _ in range(ExecutionPlan.MAX_PACKS + 40)]  # the last 40 share one pack, opened again
    kept = [run(plan, handle, tensors) for tensors in sets]
    torch.cuda.synchronize()
    for tensors in sets:
        check(tensors)
    for tensors in sets:
        tensors[0].normal_()
        tensors[2].fill_(torch.nan)
        kept.append(run(plan, handle, tensors))
    torch.cuda.synchronize()
    for tensors in sets:
        check(tensors)


def test_packs_made_anew_after_many_misses(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutionPlan, "MAX_PACKS", 4)
    monkeypatch.setattr(ExecutionPlan, "MAX_MISSES", 6)
    plan = build(handle)
    for _ in range(2):
        sets = [data() for _ in range(30)]
        kept = [run(plan, handle, tensors) for tensors in sets]
        torch.cuda.synchronize()
        for tensors in sets:
            check(tensors)
        del kept


def test_a_plan_restored_from_json(handle: Handle) -> None:
    plan = ExecutionPlan.from_json(handle, build(handle).to_json())
    plan.bind([1, 2, 3])
    tensors = data()
    kept = run(plan, handle, tensors)
    torch.cuda.synchronize()
    check(tensors)
    del kept


def test_capture_and_replay(handle: Handle) -> None:
    plan = build(handle)
    tensors = data()
    workspace = run(plan, default_handle(0), tensors)  # creates the handle, which a capture would not survive
    torch.cuda.synchronize()
    tensors[2].fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = default_handle(0)
        assert get_stream(captured) == torch.cuda.current_stream().cuda_stream
        plan.execute(captured, [tensor.data_ptr() for tensor in tensors], workspace.data_ptr())
    tensors[1].normal_()
    graph.replay()
    torch.cuda.synchronize()
    check(tensors)
    assert get_stream(default_handle(0)) == torch.cuda.current_stream().cuda_stream


def test_two_threads_with_two_handles_share_a_plan(handle: Handle) -> None:
    plan = build(handle)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                sets = [data() for _ in range(ExecutionPlan.MAX_PACKS + 10)]
                for _ in range(5):
                    for tensors in sets:
                        tensors[2].fill_(torch.nan)
                        run(plan, default_handle(0), tensors)
                torch.cuda.current_stream().synchronize()
                for tensors in sets:
                    check(tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_native_cuda_graph(handle: Handle) -> None:
    plan = build(handle)
    driver = ctypes.CDLL("libcuda.so.1")
    graph, executable = c_void_p(), c_void_p()
    first, second = data(), data()
    workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device="cuda")

    def launch() -> None:
        assert not driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, c_ulonglong(0))
        assert not driver.cuGraphLaunch(executable, c_void_p(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        assert not driver.cuGraphExecDestroy(executable)

    assert not driver.cuGraphCreate(ctypes.byref(graph), c_uint(0))
    assert graph.value is not None
    plan.populate_cuda_graph(handle, [tensor.data_ptr() for tensor in first], workspace.data_ptr(), graph.value)
    launch()
    check(first)
    plan.update_cuda_graph(handle, [tensor.data_ptr() for tensor in second], workspace.data_ptr(), graph.value)
    launch()
    check(second)
    assert not driver.cuGraphDestroy(graph)


def test_shapes_overridden_at_execution(handle: Handle, libcudnn: Library) -> None:
    if libcudnn.version < 92100:
        pytest.skip("cuDNN 9.21 brought graphs whose shapes may be overridden")
    plan = build(handle, override_shape=True)
    for m in (32, 64, 128):
        tensors = data(m)
        workspace = torch.empty(plan.workspace_size, dtype=torch.uint8, device="cuda")
        plan.execute_overridden(
            handle,
            [tensor.data_ptr() for tensor in tensors],
            workspace.data_ptr(),
            [1, 2, 3],
            [list(tensor.shape) for tensor in tensors],
            [list(tensor.stride()) for tensor in tensors],
        )
        torch.cuda.synchronize()
        check(tensors)


def test_copy_to_device(handle: Handle) -> None:
    words = (ctypes.c_int32 * 5)(*range(5))
    target = torch.full((6,), -1, dtype=torch.int32, device="cuda")
    copy_to_device(target.data_ptr(), words, handle)
    torch.cuda.synchronize()
    assert target.tolist() == [0, 1, 2, 3, 4, -1]

    thread = threading.Thread(target=lambda: copy_to_device(target.data_ptr() + 4, words, handle))
    thread.start()  # without a current context
    thread.join()
    torch.cuda.synchronize()
    assert target.tolist() == [0, 0, 1, 2, 3, 4]
