"""Operation graphs built to finalized plans by libcudnn itself, for an H200 and a B200 that are not there."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cudnn.backend import cuda_graph
from cudnn.backend import handle as handles
from cudnn.backend.device import DeviceProperties
from cudnn.backend.engine import OperationGraph, heuristics
from cudnn.backend.handle import Handle, create_handle, destroy_handle
from cudnn.backend.library import Library
from cudnn.backend.plan import ExecutionPlan, Pack, PlanList
from cudnn.enums import behavior_note, build_plan_policy, heur_mode, knob_type, numerical_note
from cudnn.errors import CudnnError, cudnnGraphNotSupportedError
from support import descriptors, recorded
from support.threads import together

pytestmark = pytest.mark.usefixtures("libcudnn")
TAG = re.compile(r"eng\d+(_k\d+=\d+)*")


def planned(graph: OperationGraph, device: DeviceProperties, *modes: heur_mode) -> PlanList:
    plans = PlanList(graph, device_properties=device)
    plans.add(modes or [heur_mode.A])
    return plans


@pytest.mark.deviceless_919
@pytest.mark.parametrize("graph", [descriptors.matmul, descriptors.convolution])
def test_graph_becomes_a_plan(graph: Callable[[], OperationGraph], device_properties: DeviceProperties) -> None:
    plans = planned(graph(), device_properties)
    plans.check_support()
    plans.build()
    assert plans.chosen is not None
    assert plans.candidate.workspace_size >= 0
    assert TAG.fullmatch(plans.configs[plans.chosen].tag)
    text = plans.candidate.to_json()
    assert len(text) > 200
    json.loads(text)


def test_the_plans_of_two_architectures_differ(h200: DeviceProperties, b200: DeviceProperties) -> None:
    texts = []
    for device in (h200, b200):
        plans = planned(descriptors.matmul(), device)
        plans.build()
        texts.append(plans.candidate.to_json())
    assert texts[0] != texts[1]


def test_heuristic_modes(h200: DeviceProperties) -> None:
    graph = descriptors.matmul()
    tags = {mode: [config.tag for config in heuristics(graph, mode, h200).configs] for mode in heur_mode}
    assert all(tags.values())
    assert tags[heur_mode.OPENSOURCE] == tags[heur_mode.A] + tags[heur_mode.FALLBACK]
    assert tags[heur_mode.CUDNN_FIND] == tags[heur_mode.A] + tags[heur_mode.B] + tags[heur_mode.FALLBACK]


def test_sm_count_is_passed_on(h200: DeviceProperties) -> None:
    assert heuristics(descriptors.matmul(), heur_mode.A, h200, sm_count=132).configs
    plans = PlanList(descriptors.matmul(), device_properties=h200, sm_count=66)
    with pytest.raises(cudnnGraphNotSupportedError, match=r"heuristics mode A: .*66"):  # it is not the device's
        plans.add([heur_mode.A])


def test_a_graph_without_engines_says_so() -> None:
    if handles.gpu_available():
        pytest.skip("about machines without a GPU")
    with pytest.raises(cudnnGraphNotSupportedError, match=r"no engine configuration for this graph: heuristics mode A"):
        planned(descriptors.convolution(), None)  # type: ignore[arg-type]


def test_notes(h200: DeviceProperties) -> None:
    config = planned(descriptors.matmul(), h200).configs[0]
    assert behavior_note.RUNTIME_COMPILATION in config.behavior_notes
    assert numerical_note.TENSOR_CORE in config.numerical_notes
    assert 0 < config.shared_memory_used <= 232448
    assert config.workspace_size >= 0


def test_knobs(h200: DeviceProperties) -> None:
    graph = descriptors.matmul()
    config = planned(graph, h200).configs[0]
    engine = int(re.findall(r"\d+", config.tag)[0])
    knobs = {knob.type: knob for knob in graph.knobs(engine, h200)}
    kernel = knobs[knob_type.KERNEL_CFG]
    assert kernel.min_value < kernel.max_value
    assert kernel.stride >= 1
    chosen = graph.engine_config(engine, {knob_type.KERNEL_CFG: 1}, h200)
    assert chosen.tag == f"eng{engine}_k24=1"
    plans = PlanList(graph, device_properties=h200)
    plans.append(chosen)
    plans.build_at(0)
    assert plans.candidate.config is chosen
    with pytest.raises(RuntimeError, match="finalizing the descriptor ENGINECFG failed"):
        graph.engine_config(engine, {knob_type.KERNEL_CFG: kernel.max_value + 1000}, h200)
    with pytest.raises(RuntimeError, match=r"engine_id: got 999; allowed: 0 to \d+ for this graph"):
        graph.engine_config(999, {}, h200)


def test_a_bar_after_the_build_drops_the_candidate(h200: DeviceProperties) -> None:
    plans = planned(descriptors.matmul(), h200)
    plans.build()
    assert plans.chosen == 0
    plans.deselect_engines([plans.configs[0].tag])
    with pytest.raises(RuntimeError, match=r"No execution plan is built.*build"):
        _ = plans.candidate
    plans.build()
    assert plans.chosen not in (None, 0)


def test_bars_by_note_and_workspace(h200: DeviceProperties) -> None:
    plans = planned(descriptors.convolution(), h200, heur_mode.A, heur_mode.FALLBACK)
    plans.select_behavior_notes([behavior_note.RUNTIME_COMPILATION])
    plans.build()
    assert behavior_note.RUNTIME_COMPILATION in plans.candidate.config.behavior_notes  # type: ignore[union-attr]
    assert plans.chosen != 0  # a precompiled engine

    plans = planned(descriptors.convolution(), h200, heur_mode.FALLBACK)
    plans.deselect_numeric_notes([numerical_note.TENSOR_CORE])
    plans.select_numeric_notes([numerical_note.STRICT_NAN_PROP])
    plans.deselect_behavior_notes([behavior_note.RUNTIME_COMPILATION])
    plans.deselect_workspace_greater_than(0)
    plans.check_support()
    plans.build()
    config = plans.candidate.config
    assert config is not None
    assert numerical_note.TENSOR_CORE not in config.numerical_notes
    assert numerical_note.STRICT_NAN_PROP in config.numerical_notes
    assert config.workspace_size == 0


def test_everything_barred_lists_the_reasons(h200: DeviceProperties) -> None:
    plans = planned(descriptors.matmul(), h200)
    plans.deselect_behavior_notes([behavior_note.RUNTIME_COMPILATION])
    for call in (plans.check_support, plans.build):
        with pytest.raises(cudnnGraphNotSupportedError, match=r"eng\d+\S* has the note RUNTIME_COMPILATION"):
            call()
    with pytest.raises(cudnnGraphNotSupportedError, match="index 0 may not be used"):
        plans.build_at(0)


def spoil(plans: PlanList, index: int) -> None:
    """Makes cuDNN refuse a configuration when a plan is built of it."""
    assert plans.configs[index].tag  # read while it can be
    plans.configs[index].descriptor.close()


def test_a_refused_configuration_gives_way_to_the_next(h200: DeviceProperties) -> None:
    plans = planned(descriptors.matmul(), h200)
    spoil(plans, 0)
    plans.build()
    assert plans.chosen == 1


def test_all_refused_gives_cudnns_reasons(h200: DeviceProperties) -> None:
    plans = planned(descriptors.matmul(), h200)
    for index in range(len(plans)):
        spoil(plans, index)
    with pytest.raises(cudnnGraphNotSupportedError) as caught:
        plans.build()
    for part in ("no engine configuration can be built", plans.configs[0].tag, "CUDNN_STATUS_BAD_PARAM", "says: "):
        assert part in str(caught.value)


def test_policy_all_keeps_the_first_that_built(h200: DeviceProperties) -> None:
    plans = planned(descriptors.convolution(), h200, heur_mode.FALLBACK)
    spoil(plans, 0)
    plans.build(build_plan_policy.ALL)
    assert sorted(plans.plans) == list(range(1, len(plans)))
    assert plans.chosen == 1


def test_indices(h200: DeviceProperties) -> None:
    plans = PlanList(descriptors.convolution(), device_properties=h200)
    with pytest.raises(RuntimeError, match=r"plan index: got 0; allowed: none before create_execution_plans"):
        plans.config_at(0)
    with pytest.raises(RuntimeError, match="No execution plan is built"):
        _ = plans.candidate
    plans.add([heur_mode.FALLBACK])
    plans.build_at(1)
    assert plans.chosen == 1
    assert plans.plan_at(1) is plans.candidate
    with pytest.raises(RuntimeError, match="got 0, which is not built; built: 1"):
        plans.plan_at(0)
    with pytest.raises(RuntimeError, match=rf"got {len(plans)}; allowed: 0 to {len(plans) - 1}"):
        plans.build_at(len(plans))


def test_threads_build_their_own_graphs(h200: DeviceProperties) -> None:
    def work(number: int) -> None:
        plans = planned(descriptors.matmul(m=64 * (number + 1)), h200, heur_mode.B)
        plans.build()
        assert plans.candidate.to_json()

    together(work, 4)


@pytest.fixture
def plan(h200: DeviceProperties) -> ExecutionPlan:
    plans = planned(descriptors.matmul(), h200)
    plans.build()
    plans.candidate.bind([1, 2, 3])
    return plans.candidate


def test_calls_go_to_the_library_that_runs_plans(plan: ExecutionPlan) -> None:
    """Not through libcudnn.so, which only passes them on."""
    address = ctypes.cast(plan.launch, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < end:
            assert "/libcudnn_graph.so" in line
            return
    raise AssertionError("an address of no library")


@pytest.fixture
def described_handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    """Counts as the handle of a GPU; packs can be prepared for it, but nothing can run."""
    handle = Handle(0x7000, 0)
    monkeypatch.setitem(handles._live, handle.ptr, handle)
    return handle


def address(pack: Any) -> int:
    """The address that a prepared argument passes."""
    return ctypes.addressof(pack.argument._obj)


def test_packs_are_kept_by_pointers_and_bounded(plan: ExecutionPlan, described_handle: Handle) -> None:
    def key(i: int, workspace: int = 0) -> tuple[int, ...]:
        return (4096 * i, 1 << 40, 2 << 40, workspace, described_handle.ptr)

    bound = ExecutionPlan.MAX_PACKS
    packs = [plan.pack(key(i + 1, 256 * (i % 2))) for i in range(bound)]
    assert len({address(pack) for pack in packs}) == len(plan.packs) == bound
    assert plan.packs[key(3)] is packs[2]

    extra = {address(plan.pack(key(1000 + i))) for i in range(10)}
    assert len(extra) == 1  # they share one
    assert not extra & {address(pack) for pack in packs}
    assert len(plan.packs) == bound

    packs[2].used = True  # a call met it
    for i in range(ExecutionPlan.MAX_MISSES):
        plan.pack(key(5000 + i))
    newest = key(5000 + ExecutionPlan.MAX_MISSES - 1)
    assert newest in plan.packs  # others made room
    assert key(1) not in plan.packs
    assert plan.packs[key(3)] is packs[2]
    for i in range(ExecutionPlan.MAX_MISSES + bound):
        plan.pack(key(9000 + i))
    assert key(3) not in plan.packs  # which no call has met since
    assert len(plan.packs) <= bound
    plan.close()
    assert not plan.packs


class GraphDriver(recorded.GraphDriver):
    """cuDNN fills the CUDA graphs, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lib: Library, status: int = 0) -> None:
        super().__init__(monkeypatch)
        self._status = status
        monkeypatch.setattr(lib, "populate_cuda_graph", self.populate)

    def populate(self, handle: int, plan: Any, pack: Any, graph: int) -> int:
        self.calls.append(("populate", address(Pack(pack)), graph))
        return self._status


class OfAnotherThread(Pack):
    """A pack that adds another one to the cache, as a second thread could, when its graph is read."""

    def __init__(self, packs: dict[Any, Any]) -> None:
        self.packs = packs

    @property
    def graph(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.packs[1,] = Pack(None)


def test_cuda_graphs_are_kept_with_packs(
    plan: ExecutionPlan, described_handle: Handle, libcudnn: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = GraphDriver(monkeypatch, libcudnn)
    pack = plan.pack((4096, 1 << 40, 2 << 40, 0, described_handle.ptr))
    described_handle.marker = ctypes.c_void_p(7)  # it was asked before
    for driver.capturing, driver.left in ((1, 0), (0, 600)):
        pack.calls = Pack.CALLS_BEFORE_GRAPH
        plan.keep_graph(pack, described_handle)
        assert (pack.calls, pack.queue, pack.graph) == (256 - 32, None, None)  # tried again later

    driver.left = 0
    driver.calls.clear()
    plan.packs[0,] = OfAnotherThread(plan.packs)
    plan.keep_graph(pack, described_handle)
    assert pack.calls == Pack.CALLS_BEFORE_GRAPH - Pack.CALLS_BEFORE_NEXT_GRAPH
    assert pack.queue is described_handle.queue
    del driver.calls[:4]  # of the question whether the GPU keeps up
    names = [call[0] for call in driver.calls]
    exchange = "cuThreadExchangeStreamCaptureMode"
    assert names == [
        exchange,
        "cuStreamGetCtx",
        "cuGraphCreate",
        "populate",
        "cuGraphInstantiateWithFlags",
        "cuGraphDestroy",
        exchange,
    ]
    assert driver.calls[3] == ("populate", address(pack), 101)
    assert ctypes.addressof(pack.graph._obj) == 102

    described_handle.put_on(0x5000)
    driver.calls.clear()
    plan.keep_graph(pack, described_handle)  # for another stream
    assert driver.calls[5] == ("cuGraphExecDestroy", 102)
    assert pack.queue is described_handle.queue
    driver.calls.clear()
    plan.close()
    assert ("cuGraphExecDestroy", 104) in driver.calls


def test_cuda_graphs_of_all_plans_are_bounded(
    plan: ExecutionPlan, described_handle: Handle, libcudnn: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those go first that no call has launched for longest, of whatever plan."""
    driver = GraphDriver(monkeypatch, libcudnn)
    monkeypatch.setattr(Pack, "MAX_GRAPHS", 3)
    described_handle.marker = ctypes.c_void_p(7)
    packs = [plan.pack((4096 * (i + 1), 1 << 40, 2 << 40, 0, described_handle.ptr)) for i in range(6)]

    class Other(ExecutionPlan):
        def __init__(self) -> None:
            self._library, self.argument, self.packs, self.config = libcudnn, plan.argument, {}, plan.config
            self._by_handle = {}

    for owner, pack in zip((plan, Other(), plan), packs, strict=False):
        owner.keep_graph(pack, described_handle)
    for used, made, gone in (((), 3, 0), ((1, 3), 4, 2), ((3, 4), 5, 1)):
        for pack in packs:
            pack.used = packs.index(pack) in used
        executable = ctypes.addressof(packs[gone].graph._obj)
        plan.keep_graph(packs[made], described_handle)
        assert ("cuGraphExecDestroy", executable) in driver.calls
        assert (packs[gone].graph, packs[gone].queue) == (None, None)
        assert packs[gone].calls == Pack.CALLS_BEFORE_GRAPH - Pack.CALLS_BEFORE_NEXT_GRAPH
        assert packs[made] in described_handle.graphs
        assert len(described_handle.graphs) == 3
    monkeypatch.setattr(libcudnn, "destroy_handle", lambda pointer: 0)
    left = [ctypes.addressof(made._obj) for made in described_handle.graphs.values()]
    described_handle.marker = None
    destroy_handle(described_handle)
    assert {("cuGraphExecDestroy", executable) for executable in left} < {*driver.calls}
    assert not described_handle.graphs
    assert not any(pack.graph or pack.queue for pack in packs)


def test_the_gpu_is_asked_whether_it_keeps_up(
    described_handle: Handle, libcudnn: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it has passed the event of the question before; never in a capture, which the question would break."""
    driver = GraphDriver(monkeypatch, libcudnn)
    exchange, record = ("cuThreadExchangeStreamCaptureMode", 2), ("cuEventRecord", 101)
    for driver.capturing, driver.left, found, calls in (
        (1, 0, False, []),
        (0, 0, False, [exchange, ("cuEventCreate", 101), record, exchange]),
        (0, 0, True, [exchange, "cuEventQuery", record, exchange]),
        (0, 600, False, [exchange, "cuEventQuery", record, exchange]),
    ):
        driver.calls.clear()
        cuda_graph.ask_whether_it_keeps_up(described_handle)
        assert (described_handle.keeps_up, described_handle.until_asked, driver.calls) == (found, 32, calls)


def test_a_plan_whose_cuda_graph_fails_goes_on_without(
    plan: ExecutionPlan,
    described_handle: Handle,
    libcudnn: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = GraphDriver(monkeypatch, libcudnn, status=3000)
    described_handle.marker = ctypes.c_void_p(7)
    pack = plan.pack((4096, 1 << 40, 2 << 40, 0, described_handle.ptr))
    with caplog.at_level("INFO", "cudnn"):
        plan.keep_graph(pack, described_handle)
    assert pack.queue is None
    assert pack.calls < -(10**9)
    assert "its CUDA graph failed: populating a CUDA graph failed" in caplog.text
    assert "cuGraphDestroy" in str(driver.calls)
    assert "cuGraphInstantiateWithFlags" not in str(driver.calls)


def test_packs_without_the_deprecated_entry_point(
    plan: ExecutionPlan, described_handle: Handle, libcudnn: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libcudnn, "reopen_unchecked", None)
    for i in range(3 * ExecutionPlan.MAX_PACKS):
        assert address(plan.pack((4096 * (i + 1), 1 << 40, 2 << 40, 0, described_handle.ptr)))


def test_packs_refuse_what_cannot_run(plan: ExecutionPlan, described_handle: Handle) -> None:
    with pytest.raises(ValueError, match=r"pointers: got 2; allowed: 3, one for each of the uids \(1, 2, 3\)"):
        plan.pack((1 << 40, 2 << 40, 0, described_handle.ptr))
    if not handles.gpu_available():
        handle = create_handle()
        key = (1 << 40, 2 << 40, 3 << 40, 0, handle.ptr)
        with pytest.raises(ValueError, match="handle: got one that selects the reference executor"):
            plan.pack(key)
        with pytest.raises(ValueError, match="handle: got one that selects the reference executor"):
            ExecutionPlan.from_json(handle, plan.to_json())
        destroy_handle(handle)
        with pytest.raises(ValueError, match="no live handle"):
            plan.pack(key)


def test_a_failed_pack_is_not_kept(plan: ExecutionPlan, described_handle: Handle) -> None:
    plan.bind([])
    with pytest.raises(CudnnError, match="preparing a variant pack failed: CUDNN_STATUS_BAD_PARAM"):
        plan.pack((0, described_handle.ptr))
    assert not plan.packs


def test_an_event_is_destroyed_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(cuda_graph, "_driver", lambda name, *_: called.append(name))
    handle = Handle(1, 0)
    handle.marker = cuda_graph.Event(7)
    assert not called
    del handle
    assert called.count("cuEventDestroy_v2") == 1
    cuda_graph.Event()  # was not made
    assert called.count("cuEventDestroy_v2") == 1
