"""The rarer ways to run a graph on a GPU: CUDA graphs, overridden shapes, bare addresses, tuned and kept plans."""

from __future__ import annotations

import ctypes
import functools
import time
from ctypes import c_uint, c_ulonglong, c_void_p
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend.cuda_graph import Chain, upper_halves, words_to_device
from cudnn.backend.handle import default_handle
from cudnn.backend.plan import Pack
from gpu.common import BATCH, FP16, K, M, N, check, data, product, workspace
from support.graphs import FLOAT, HALF, MODES

NATIVE = cudnn.behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API


# CUDA graphs without a stream.
class NativeGraph:
    """A ``cudaGraph_t`` made through the driver."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._graph, self._executable = c_void_p(), c_void_p()
        self._call("cuGraphCreate", ctypes.byref(self._graph), c_uint(0))
        assert self._graph.value is not None
        self.address = self._graph.value

    def _call(self, name: str, *arguments: Any) -> None:
        assert self._driver[name](*arguments) == 0, name

    def launch(self, anew: bool = False) -> None:
        """Instantiates at the first call, or again with ``anew``, and updates at later ones."""
        if self._executable and anew:
            self._call("cuGraphExecDestroy", self._executable)
            self._executable = c_void_p()
        if not self._executable:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, c_ulonglong(0))
        else:
            result = (ctypes.c_uint64 * 4)()  # CUgraphExecUpdateResultInfo
            self._call("cuGraphExecUpdate_v2", self._executable, self._graph, ctypes.byref(result))
        self._call("cuGraphLaunch", self._executable, c_void_p(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()

    def close(self) -> None:
        if self._executable:
            self._call("cuGraphExecDestroy", self._executable)
        self._call("cuGraphDestroy", self._graph)


def plan_natively(graph: cudnn.pygraph) -> None:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.select_behavior_notes([NATIVE])
    try:
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(f"no plan fills a CUDA graph: {error}")


def test_a_cuda_graph_is_populated_and_updated() -> None:
    graph, native = product(), NativeGraph()
    plan_natively(graph)
    first, second, space = data(), data(), workspace(graph)
    handle = cudnn.create_handle()
    graph.populate_cuda_graph(handle, first, space, native.address)
    native.launch()
    check(first)
    first[1].normal_()
    native.launch()
    check(first)
    graph.update_cuda_graph(handle, second, space, native.address)
    native.launch()
    check(second)
    with pytest.raises(ValueError, match="graph: got a CUDA graph with nodes; allowed: an empty one"):
        graph.populate_cuda_graph(None, second, space, native.address)
    with pytest.raises(ValueError, match="allowed: a graph that this one has populated"):
        graph.update_cuda_graph(None, second, space, native.address + 8)
    native.close()
    cudnn.destroy_handle(handle)


def test_copies_before_and_after_a_plan_are_nodes() -> None:
    """Words into the workspace, the plan, the upper halves of FLOAT numbers: what attention may need around a plan."""
    graph, native = product(), NativeGraph()
    plan_natively(graph)
    plan = graph._plan()
    assert plan is not None
    pack, space, handle = data(), workspace(graph), default_handle(0)
    words = (ctypes.c_int32 * 3)(7, 8, 9)
    numbers = torch.randn(1000, device="cuda")
    chain: Chain | None = None
    for _ in range(2):
        target = torch.zeros(4, dtype=torch.int32, device="cuda")
        halves = torch.zeros(1001, dtype=torch.bfloat16, device="cuda")
        pointers = [pack[uid].data_ptr() for uid in graph._cudnn().uids]
        before = [words_to_device(target.data_ptr(), words)]
        after = [upper_halves(halves.data_ptr(), numbers.data_ptr(), 1000)]
        put = plan.populate_cuda_graph if chain is None else plan.update_cuda_graph
        fill = functools.partial(put, handle, pointers, space.data_ptr())
        if chain is None:
            chain = Chain(handle, native.address, before, fill, after)
        else:
            chain.update(handle, before, fill, after)
        pack[3].fill_(float("nan"))
        native.launch(anew=True)  # on an H200 the driver refused to take changed copies over
        check(pack)
        assert target.tolist() == [7, 8, 9, 0]
        truncated = (numbers.view(torch.int32) & -65536).view(torch.float32)
        torch.testing.assert_close(halves[:1000].float(), truncated, atol=0, rtol=0)
        assert halves[1000] == 0
    native.close()


# CUDA graphs that plans keep for addresses that come again.
@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> cudnn.pygraph:
    """A built product whose calls launch a CUDA graph after a few."""
    monkeypatch.setattr(Pack, "CALLS_BEFORE_GRAPH", 2)
    graph = product()
    plan_natively(graph)
    return graph


def graphs_of(graph: cudnn.pygraph) -> int:
    plan = graph._plan()
    assert plan is not None
    return sum(pack.graph is not None for pack in plan.packs.values())


def launch(graph: cudnn.pygraph, pack: dict[int, torch.Tensor], space: torch.Tensor, times: int = 1) -> None:
    """Calls with new numbers in the same memory, each checked."""
    for _ in range(times):
        pack[1].normal_()
        pack[2].normal_()
        pack[3].fill_(float("nan"))
        graph.execute(pack, space)
        check(pack)


def test_new_numbers_in_the_same_memory(kept: cudnn.pygraph) -> None:
    space, packs = workspace(kept), [data() for _ in range(3)]
    launch(kept, packs[0], space, 6)
    assert graphs_of(kept) == 1
    for pack in packs * 8:
        launch(kept, pack, space)
    mixed = {1: packs[0][1], 2: packs[1][2], 3: packs[2][3]}
    launch(kept, mixed, space)
    assert graphs_of(kept) == 3


def test_a_capture_gets_the_kernels_themselves(kept: cudnn.pygraph) -> None:
    space, pack = workspace(kept), data()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(kept, pack, space, 6)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, stream=stream):
            kept.execute(pack, space)
        for _ in range(3):
            pack[1].normal_()
            pack[3].fill_(float("nan"))
            captured.replay()
            check(pack)
        launch(kept, pack, space, 2)


def test_none_is_made_in_a_capture_of_another_stream(kept: cudnn.pygraph) -> None:
    """Making one neither joins nor breaks a capture that is under way."""
    space, pack, other = workspace(kept), data(), torch.ones(8, device="cuda")
    launch(kept, pack, space, 6)
    handle = cudnn.create_handle()
    side = torch.cuda.Stream()
    cudnn.set_stream(handle, side.cuda_stream)
    kept.execute(pack, space, handle=handle)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        other.add_(1)
        for _ in range(40):
            kept.execute(pack, space, handle=handle)
            time.sleep(1e-3)
        other.add_(1)
    captured.replay()
    check(pack)
    assert other.tolist() == [3] * 8
    assert graphs_of(kept) == 2
    cudnn.destroy_handle(handle)


def test_streams_in_turn(kept: cudnn.pygraph) -> None:
    space, pack = workspace(kept), data()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for number in range(24):
        with torch.cuda.stream(streams[number // 4 % 3]):
            launch(kept, pack, space)
    assert graphs_of(kept) == 1


def test_scalars_by_value_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pack, "CALLS_BEFORE_GRAPH", 2)
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    a = graph.tensor([BATCH, M, K], [M * K, K, 1], uid=1)
    b = graph.tensor([BATCH, K, N], [K * N, N, 1], uid=2)
    factor = graph.tensor([1, 1, 1], [1, 1, 1], data_type=FLOAT, is_pass_by_value=True, uid=4)
    graph.mul(graph.matmul(a, b), factor).set_output(True).set_data_type(HALF).set_uid(3)
    plan_natively(graph)
    pack, space, number = data(), workspace(graph), torch.ones(1, 1, 1)
    for value in range(1, 9):
        number.fill_(value)
        graph.execute({**pack, 4: number}, space)
        torch.cuda.synchronize()
        torch.testing.assert_close(pack[3].float(), value * (pack[1].float() @ pack[2].float()), atol=0.3, rtol=3e-3)
    assert graphs_of(graph) == 0


def test_a_gpu_that_is_far_behind_gets_the_kernels_themselves(kept: cudnn.pygraph) -> None:
    space, pack, handle = workspace(kept), data(), default_handle(0)
    launch(kept, pack, space, 80)
    assert handle.keeps_up
    torch.cuda._sleep(50_000_000)
    for _ in range(80):
        kept.execute(pack, space)
    assert not handle.keeps_up
    launch(kept, pack, space, 80)
    assert handle.keeps_up


def test_one_that_is_running_goes_with_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pack, "CALLS_BEFORE_GRAPH", 2)
    graph = product()
    plan_natively(graph)
    space, pack = workspace(graph), data()
    launch(graph, pack, space, 8)
    pack[3].fill_(float("nan"))
    torch.cuda._sleep(50_000_000)
    graph.execute(pack, space)
    assert graphs_of(graph) == 1
    del graph
    check(pack)


# Overridden shapes.
def overridable(graph: cudnn.pygraph) -> None:
    if cudnn.backend_version() < 92100:
        pytest.skip("cuDNN 9.21 brought graphs whose shapes may be overridden")
    graph.build(MODES)


@pytest.mark.parametrize("by_index", [False, True])
def test_other_shapes_and_strides(by_index: bool) -> None:
    graph = product(is_override_shape_enabled=True)
    overridable(graph)
    space = workspace(graph)
    for m in (M, 32, 64, 40, M):
        pack = data(m)
        guard = torch.full((BATCH, m + 8, N), float("nan"), **FP16)
        pack[3] = guard[:, :m]
        uids = [1, 3]
        override = uids, [[*pack[uid].shape] for uid in uids], [[*pack[uid].stride()] for uid in uids]
        if by_index:
            graph.execute_plan_at_index(pack, space, 0, None, *override)
        else:
            graph.execute(pack, space, None, *override)
        check(pack)
        assert bool(guard[:, m:].isnan().all())


def test_a_shorter_key_through_its_transposed_view() -> None:
    """K is read as [b, h, d, s] under a separate uid: overriding K overrides that view."""
    dims = [2, 4, 128, 64]
    strides = [4 * 128 * 64, 128 * 64, 64, 1]
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, is_override_shape_enabled=True
    )
    q, k, v = (graph.tensor(dims, strides, uid=uid) for uid in (1, 2, 3))
    composite = cudnn.attention_implementation.COMPOSITE
    o = graph.sdpa(q, k, v, attn_scale=0.125, is_inference=True, implementation=composite)[0]
    o.set_output(True).set_uid(4)
    overridable(graph)
    for s in (128, 64):
        pack = {uid: torch.randn(2, 4, s if uid in (2, 3) else 128, 64, **FP16) for uid in (1, 2, 3, 4)}
        override = [2, 3], [[*pack[uid].shape] for uid in (2, 3)], [[*pack[uid].stride()] for uid in (2, 3)]
        try:
            graph.execute(pack, workspace(graph), None, *override)
        except cudnn.cudnnGraphNotSupportedError as error:
            pytest.skip(str(error))
        torch.cuda.synchronize()
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(pack[uid].float() for uid in (1, 2, 3)), scale=0.125
        )
        torch.testing.assert_close(pack[4].float(), wanted, atol=1e-2, rtol=1e-2)


# Bare addresses, and data of another type.
def test_calls_with_addresses() -> None:
    graph = product()
    graph.build(MODES)
    pack, space, handle = data(), workspace(graph), cudnn.create_handle()
    assert graph._get_variant_pack_uids_sorted() == [1, 2, 3]
    pointers = [graph._get_data_ptr(pack[uid]) for uid in (1, 2, 3)]
    raw = (c_void_p * 3)(*pointers)
    graph._prepare_variant_pack_template()
    calls: list[Any] = [
        functools.partial(graph._execute, dict(zip((1, 2, 3), pointers, strict=True))),
        functools.partial(graph._execute_with_ptrs, pointers),
        functools.partial(graph._execute_with_raw_ptrs, ctypes.addressof(raw), 3),
    ]
    for call in calls:
        for used in (None, handle, int(handle)):
            pack[3].fill_(float("nan"))
            torch.cuda.synchronize()
            call(space.data_ptr(), used)
            check(pack)
    cudnn.destroy_handle(handle)


def test_no_workspace_is_as_good_as_an_empty_one() -> None:
    graph = product()
    graph.build(MODES)
    if graph.get_workspace_size():
        pytest.skip("this plan needs a workspace")
    for space in (None, 0, torch.empty(0, dtype=torch.uint8, device="cuda")):
        pack = data()
        graph.execute(pack, space)
        check(pack)


# Kept plans.
def test_autotune(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path))
    graph, pack = product(), data()
    before = pack[3].clone()
    report = cudnn.autotune(graph, pack)
    torch.testing.assert_close(pack[3], before, equal_nan=True, atol=0, rtol=0)
    timed = [plan for plan in report.plans if plan.microseconds is not None]
    assert len({plan.tag for plan in report.plans}) == len(report.plans)
    assert report.chosen == min(timed, key=lambda plan: plan.microseconds or 0).tag == graph.get_plan_name()
    assert all(0.5 < (plan.microseconds or 0) < 1e4 for plan in timed)
    print(report)
    graph.execute(pack, workspace(graph))
    check(pack)
    other = product()
    again = cudnn.autotune(other, pack)
    assert (again.from_cache, again.chosen, again.plans) == (True, report.chosen, ())
    other.execute(pack, workspace(other))
    check(pack)
    assert not cudnn.autotune(product(), pack, cache=False, iterations=3).from_cache


def test_autotune_refuses_a_capture() -> None:
    graph, pack = product(), data()
    graph.build(MODES)
    refused = pytest.raises(RuntimeError, match="autotune: stream: got one being captured")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), refused:
        cudnn.autotune(graph, pack)


def test_the_wrapper_tunes_at_its_first_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path))
    pack = data()
    with cudnn.Graph(io_data_type=HALF, heuristics=[cudnn.heur_mode.CUDNN_FIND]) as graph:
        graph.matmul(pack[1], pack[2], name="mm")
    assert not (tmp_path / "plans").exists()
    for _ in range(2):
        pack[3] = graph(pack[1], pack[2])
        check(pack)
    assert len([*(tmp_path / "plans").iterdir()]) == 1


def test_a_restored_plan_is_explained_as_it_was() -> None:
    graph, restored = product(), cudnn.pygraph()
    graph.build(MODES)
    plan = graph.explain().plan
    assert plan is not None
    assert (plan.tag, plan.workspace) == (graph.get_plan_name(), graph.get_workspace_size())
    restored.deserialize(graph.serialize())
    again = restored.explain()
    assert again.state == "built"
    assert again.plan is not None
    assert (again.plan.kernels, again.plan.workspace) == (plan.kernels, plan.workspace)
