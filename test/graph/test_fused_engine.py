"""Our attention kernels as an engine of graphs: in PyTorch and emulated, chosen or not, beside cuDNN's plans."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import handle as handles
from cudnn.backend.plan import ExecutionPlan
from cudnn.pygraph import fused_engine, program
from cudnn.pygraph.lowering import Bindings
from cudnn.sdpa import SdpaForward
from support.attention import Problem, describe
from support.graphs import BFLOAT16, FLOAT, HALF, MODES, planned_graph, reference_graph
from support.selection import brief

AUTO, FUSED, COMPOSITE = (cudnn.attention_implementation[name] for name in ("AUTO", "FUSED", "COMPOSITE"))
BOTTOM_RIGHT = cudnn.diagonal_alignment.BOTTOM_RIGHT
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError
SMALL = Problem(b=1, h_q=2, h_k=1, h_v=1, s_q=40, s_kv=40)
CAUSAL = {"use_causal_mask": True}


def node_of(dims: Any = (1, 2, 40, 64), keys: int = 40, head: int = 0, io: Any = BFLOAT16, **options: Any) -> Any:
    """A validated node of attention."""
    graph = reference_graph(io)
    b, h, s, d = dims
    q = graph.tensor([*dims], [h * s * d, d, h * d, 1])
    k, v = (graph.tensor([b, h, keys, n], [h * keys * n, keys * n, n, 1]) for n in (d, head or d))
    outputs = graph.sdpa(q, k, v, **options)
    for tensor in outputs:
        if tensor is not None:
            tensor.set_output(True)
    graph.validate()
    return graph.nodes[0]


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> handles.Handle:
    """Counts as the handle of a GPU."""
    made = handles.Handle(0x7000, 0)
    monkeypatch.setitem(handles._live, made.ptr, made)
    return made


@pytest.mark.parametrize("arch", brief(["", "sm_90a", "sm_100a"], 0))
@pytest.mark.parametrize("stats", [True, False])
def test_results(arch: str, stats: bool, handle: handles.Handle) -> None:
    """Of addresses, with the log-sum-exp in the workspace where nobody asks for it."""
    torch.manual_seed(0)
    data = SMALL.tensors(torch.bfloat16)
    described = describe(reference_graph(BFLOAT16), SMALL, data, implementation=FUSED, stats=stats, **CAUSAL)
    described.graph.build(MODES)
    expected = described.run()
    (node,) = described.graph.nodes
    ports = [node.inputs[port] for port in "QKV"] + [node.outputs[port] for port in expected]
    config = fused_engine.FusedConfig(node, Bindings([tensor.get_uid() for tensor in ports], workspace_size=256), None)
    outputs = [torch.full_like(x, torch.nan) for x in expected.values()]
    with cudnn.emulation(arch) if arch else contextlib.nullcontext():
        assert config.workspace_size == (0 if stats else 4 * 2 * 40 + 32)
        space = torch.empty(256 + config.workspace_size, dtype=torch.uint8)
        pointers = [x.data_ptr() for x in (data["q"], data["k"], data["v"], *outputs, space)]
        plan = config.build()
        for _ in range(2):
            pack = plan.packs.get((*pointers, handle.ptr)) or plan.pack((*pointers, handle.ptr))
            assert plan.launch(handle.argument, plan.argument, pack.argument) == 0
    for name, found in zip(expected, outputs, strict=True):
        torch.testing.assert_close(found, expected[name], atol=2e-2, rtol=2e-2)
    with pytest.raises(ValueError, match=r"data at 0x.*; allowed: multiples of 16 bytes"):
        plan.pack((pointers[0] + 2, *pointers[1:], handle.ptr))
    for count in range(2 * plan.MAX_PACKS):
        plan.pack((*pointers[:-1], space.data_ptr() + 256 * count, handle.ptr))
    assert len(plan.packs) == plan.MAX_PACKS


def test_a_later_handle_of_the_same_address_has_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN gives the address of a handle that was destroyed to the next one, and a plan finds its calls by it."""
    node = node_of(implementation=FUSED)
    ports = [*node.inputs.values(), node.outputs["O"]]
    config = fused_engine.FusedConfig(node, Bindings([tensor.get_uid() for tensor in ports]), None)
    streams: list[int] = []
    monkeypatch.setattr(config.operation, "run", lambda given, scalars, stream, workspace: streams.append(stream))
    monkeypatch.setattr(fused_engine, "memory", lambda address, size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(config.operation, "compile", lambda: None)
    plan = config.build()
    for stream in (3, 4):
        made = handles.Handle(0x7000, 0)
        monkeypatch.setitem(handles._live, made.ptr, made)
        made.put_on(stream)
        key = (*[256] * len(ports), 256, made.ptr)
        pack = plan.packs.get(key) or plan.pack(key)
        plan.launch(made.argument, plan.argument, pack.argument)
    assert streams == [3, 4]


def test_memory_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would copy it, and results would be lost."""
    monkeypatch.setattr(fused_engine.torch, "as_tensor", lambda x, device: torch.empty(16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="memory of another device at 0x1000; allowed: memory of device 1"):
        fused_engine.memory(0x1000, 16, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": (1, 2, 40, 32)}, r"head sizes \(32, 32\): the kernels take"),
        ({"diagonal_band_left_bound": 3}, "left_bound=3, right_bound=-1: the kernels take right_bound=0"),
        ({"keys": 50, **CAUSAL}, "40 rows and 50 keys from the top left"),
        ({"dims": (1, 2, 1, 64), "use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 3}, "for one row"),
        ({"attn_scale": -0.5}, "the scale -0.5: the kernels take positive ones"),
        ({"use_alibi_mask": True, "diagonal_band_right_bound": 0}, "use_alibi_mask: the kernels take Q, K, V"),
        ({"io": FLOAT}, "the types FLOAT: the kernels take HALF or BFLOAT16"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NOT_SUPPORTED, match=f"implementation: got FUSED, but .*{message}"):
        node_of(implementation=FUSED, **changes)
    assert fused_engine.obstacle(node_of(**changes))  # and AUTO does not take them


def test_chosen_where_it_was_measured_faster(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = {"nvidia_cutlass_dsl": object()}
    monkeypatch.setattr(fused_engine.importlib.util, "find_spec", lambda name: found.get(name))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    large = {"dims": (2, 16, 4096, 256), "keys": 4096}

    def tag(capability: Any = (9, 0), offered: bool = True, more: int = 0, **options: Any) -> str:
        nodes = [node_of(**options)] * (1 + more)
        config = fused_engine.chosen(nodes, Bindings([0]), capability, offered)
        return "" if config is None else config.tag

    caplog.set_level(logging.INFO, "cudnn")
    assert tag(**large) == "fused_sdpa_fwd_d256"
    assert "FUSED implementation: measured faster than cuDNN's on sm_90a" in caplog.text
    assert tag(dims=(2, 16, 4096, 192), keys=4096, head=128, generate_stats=True) == "fused_sdpa_fwd_d192_dv128"
    assert tag(dims=(2, 16, 4096, 128), keys=4096, **CAUSAL) == "fused_sdpa_fwd_d128"
    for options in (
        {"dims": (2, 16, 4096, 128), "keys": 4096}, {"dims": (1, 1, 4096, 256), "keys": 4096},
        {**large, "keys": 2048}, {**large, "capability": (10, 0)}, {**large, "capability": None},
        {**large, "offered": False}, {**large, "more": 1}, {**large, "implementation": COMPOSITE},
        {**large, "use_causal_mask": True, "diagonal_band_left_bound": 99},
    ):  # fmt: skip
        assert not tag(**options), options
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # plans would fail at their first call
    assert not tag(**large)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    found.clear()
    assert not tag(**large)
    assert "which is faster, needs the CuTe DSL" in caplog.text
    for options, message in (({"more": 1}, "a graph of 2 nodes"), ({"capability": (8, 0)}, r"capability \(8, 0\)")):
        with pytest.raises(NOT_SUPPORTED, match=f"FUSED, but .*{message}"):
            tag(implementation=FUSED, **options)


def test_what_the_class_refuses_is_left_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise ValueError("refused")

    monkeypatch.setattr(fused_engine, "_measured_faster", lambda node, arch: "measured")
    monkeypatch.setattr(fused_engine.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(fused_engine, "FusedConfig", refused)
    assert fused_engine.chosen([node_of()], Bindings([0]), (9, 0), True) is None
    with pytest.raises(NOT_SUPPORTED, match="FUSED implementation: refused"):
        fused_engine.chosen([node_of(implementation=FUSED)], Bindings([0]), (9, 0), True)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that were compiled, without a compiler."""
    made: list[Any] = []
    monkeypatch.setattr(SdpaForward, "compile", lambda self: made.append(self))
    return made


def test_it_is_the_one_plan_of_a_graph_that_asks_for_it(h200: Any, compiled: list[Any]) -> None:
    graph = planned_graph(h200)
    describe(graph, SMALL, SMALL.tensors(torch.float16, "meta"), implementation=FUSED, stats=False)
    graph.build(MODES)
    assert [operation.arch for operation in compiled] == ["sm_90a"]
    assert graph.get_execution_plan_count() == 1
    assert graph.get_plan_name() == "fused_sdpa_fwd_d64"
    assert graph.get_behavior_notes() == [cudnn.behavior_note.RUNTIME_COMPILATION]
    assert graph.get_workspace_size() >= 4 * 2 * 40
    assert graph.explain().plan.tag == "fused_sdpa_fwd_d64"
    with pytest.raises(NOT_SUPPORTED, match="SUPPORTS_CUDA_GRAPH_NATIVE_API"):
        graph._plan().populate_cuda_graph()
    text = cudnn.pygraph()
    text.deserialize(graph.serialize())  # built anew, here on the reference executor
    assert text.nodes[0].implementation is FUSED


def test_it_stands_before_cudnns_plans(
    h200: Any, compiled: list[Any], handle: handles.Handle, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    choose = fused_engine.chosen
    monkeypatch.setattr(fused_engine, "_measured_faster", lambda node, arch: "measured")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(
        fused_engine, "chosen", lambda nodes, bindings, arch, offered: choose(nodes, bindings, arch, True)
    )
    monkeypatch.setattr(fused_engine.importlib.util, "find_spec", lambda name: object())
    names = []
    graph, filled = planned_graph(h200, HALF), []
    describe(graph, SMALL, SMALL.tensors(torch.float16, "meta"), stats=False)
    graph.build(MODES)
    (node,) = graph.nodes
    monkeypatch.setattr(program, "Chain", lambda handle, graph, before, fill, after: fill(7))
    monkeypatch.setattr(
        ExecutionPlan, "populate_cuda_graph", lambda self, *given: filled.append((self.config.tag, given[-1]))
    )
    data = dict.fromkeys((*(node.inputs[port] for port in "QKV"), node.outputs["O"]), 256)
    graph.populate_cuda_graph(handle, data, 256, 7)
    assert graph.get_plan_name() == "fused_sdpa_fwd_d64"
    assert [(tag[:3], given) for tag, given in filled] == [("eng", 7)]
    for barred in ([], ["fused"]):
        graph = planned_graph(h200, HALF)
        describe(graph, SMALL, SMALL.tensors(torch.float16, "meta"), stats=False)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans(MODES)
        graph.deselect_engines(barred)
        graph.build_plans()
        names.append(graph.get_plan_name())
        assert graph.get_execution_plan_count() > 1
        assert graph.get_plan_name_at_index(0) == "fused_sdpa_fwd_d64"
    assert names[0] == "fused_sdpa_fwd_d64"
    assert names[1].startswith("eng")

    def refused(self: Any) -> None:
        raise ImportError("no CuTe DSL")

    monkeypatch.setattr(SdpaForward, "compile", refused)
    graph = planned_graph(h200, HALF)
    describe(graph, SMALL, SMALL.tensors(torch.float16, "meta"), stats=False)
    graph.build(MODES)
    assert graph.get_plan_name().startswith("eng")
    assert graph._cudnn().plans.refusals()[0] == "fused_sdpa_fwd_d64: no CuTe DSL"
