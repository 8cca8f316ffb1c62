"""Our attention kernels as an engine of graphs, next to cuDNN's plans: in PyTorch and emulated, selected or not."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import handle as handles
from cudnn.backend import plan as backend_plan
from cudnn.backend.engine import EngineConfig, Heuristics
from cudnn.backend.plan import ExecutionPlan
from cudnn.pygraph import fused_engine, program
from cudnn.pygraph.lowering import Bindings
from cudnn.sdpa import SdpaBackward, SdpaForward
from support.attention import Problem, attention, backward_data, describe
from support.graphs import BFLOAT16, FLOAT, HALF, MODES, planned_graph, reference_graph
from support.selection import brief

AUTO, FUSED, COMPOSITE, UNIFIED = (
    cudnn.attention_implementation[name] for name in ("AUTO", "FUSED", "COMPOSITE", "UNIFIED")
)
BOTTOM_RIGHT = cudnn.diagonal_alignment.BOTTOM_RIGHT
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError
CAUSAL = {"use_causal_mask": True}
SMALL = Problem(b=1, h_q=2, h_k=1, h_v=1, s_q=40, s_kv=40, options=CAUSAL)


def node_of(
    dims: Any = (1, 2, 40, 64),
    keys: int = 40,
    head: int = 0,
    io: Any = BFLOAT16,
    backward: bool = False,
    stats: Any = (0, 1),
    **options: Any,
) -> Any:
    """A validated node of attention. ``stats``: the strides of heads and rows of the backward pass's, 0 for dense."""
    graph = reference_graph(io)
    b, h, s, d = dims
    dv = head or d
    q, o, d_o = (graph.tensor([b, h, s, n], [h * s * n, n, h * n, 1]) for n in (d, dv, dv))
    k, v = (graph.tensor([b, h, keys, n], [h * keys * n, keys * n, n, 1]) for n in (d, dv))
    if backward:
        rows = graph.tensor([b, h, s, 1], [h * s, stats[0] or s, stats[1], 1], FLOAT)
        outputs: Any = graph.sdpa_backward(q, k, v, o, d_o, rows, **options)
    else:
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


def data_of(problem: Problem, backward: bool, dtype: torch.dtype, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Random tensors, with those that the forward pass gives the backward pass."""
    data = problem.tensors(dtype, device)
    if not backward:
        return data
    if device == "meta":
        return backward_data(problem, data)
    exact = attention(problem, data, torch.float32)
    return data | {"O": exact["O"].to(dtype).transpose(1, 2).contiguous().transpose(1, 2), "Stats": exact["Stats"]}


@pytest.mark.parametrize("arch", brief(["", "sm_90a", "sm_100a"], 0))
@pytest.mark.parametrize("which", ["forward", "forward without Stats", "backward", "deterministic"])
def test_results(arch: str, which: str, handle: handles.Handle) -> None:
    """Of addresses, with memory of the kernels' own in the workspace, that of cuDNN's operations included."""
    backward = not which.startswith("forward")
    data = data_of(SMALL, backward, torch.bfloat16)
    options: Any = {"use_deterministic_algorithm": which == "deterministic"} if backward else {}
    stats = which != "forward without Stats"
    described = describe(reference_graph(BFLOAT16), SMALL, data, implementation=FUSED, stats=stats, **options)
    described.graph.build(MODES)
    expected = described.run()
    (node,) = described.graph.nodes
    inputs, outputs = node.inputs.values(), [described.outputs[name] for name in expected]
    uids = [tensor.get_uid() for tensor in (*inputs, *outputs)]
    results = [torch.full_like(x, torch.nan) for x in expected.values()]
    with cudnn.emulation(arch) if arch else contextlib.nullcontext():
        own = fused_engine.FusedConfig(node, Bindings(uids), None).workspace_size
        config = fused_engine.FusedConfig(node, Bindings(uids, workspace_size=48), None)
        assert config.workspace_size == max(own - 48, 0)
        kernels = config.operation.workspace_size()
        assert own == (0 if stats and not kernels else kernels + (0 if stats else 4 * 2 * 40) + 32)
        assert kernels > 0 or not (backward and arch)
        space = torch.full([48 + config.workspace_size + 64], 0x5A, dtype=torch.uint8)
        pointers = [x.data_ptr() for x in (*(described.inputs[tensor] for tensor in inputs), *results, space)]
        plan = config.build()
        for _ in range(2):
            pack = plan.packs.get((*pointers, handle.ptr)) or plan.pack((*pointers, handle.ptr))
            assert plan.launch(handle.argument, plan.argument, pack.argument) == 0
    assert (space[-64:] == 0x5A).all()
    for name, found in zip(expected, results, strict=True):
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(found, expected[name], atol=2e-2 * largest, rtol=2e-2)
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
    config.operation.run = lambda given, scalars, stream, workspace: streams.append(stream)
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


def test_another_device_is_made_current_where_it_is_not(
    handle: handles.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To enter a device takes longer than to ask which one is current."""
    node = node_of(implementation=FUSED)
    ports = [*node.inputs.values(), node.outputs["O"]]
    config = fused_engine.FusedConfig(node, Bindings([tensor.get_uid() for tensor in ports]), "sm_90a")
    current, entered, calls = [1], [], []
    monkeypatch.setattr(fused_engine, "memory", lambda address, size, device: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(fused_engine, "current_device", lambda: lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", lambda number: entered.append(number) or contextlib.nullcontext())
    monkeypatch.setattr(config.operation, "compile", lambda: None)
    config.operation.run = lambda *given: calls.append(given)
    call = config.build().pack((*[256] * len(ports), 256, handle.ptr)).argument
    call()
    assert entered == [0]
    current[0] = 0
    call()
    assert (entered, len(calls)) == ([0], 2)


def test_memory_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would copy it, and results would be lost."""
    monkeypatch.setattr(fused_engine.torch, "as_tensor", lambda x, device, dtype: torch.empty(16, dtype=dtype))
    with pytest.raises(ValueError, match="memory of another device at 0x1000; allowed: memory of device 1"):
        fused_engine.memory(0x1000, 16, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": (1, 2, 40, 32)}, r"head sizes \(32, 32\): the kernels take"),
        ({"diagonal_band_left_bound": 0}, "left_bound=0: the kernels take left ones from 1 up"),
        ({"attn_scale": -0.5}, "the scale -0.5: the kernels take positive ones"),
        ({"use_alibi_mask": True, "diagonal_band_right_bound": 0}, "use_alibi_mask: the kernels take Q, K, V"),
        ({"io": FLOAT}, "the types FLOAT: the kernels take HALF or BFLOAT16"),
        ({"backward": True, "dims": (1, 2, 40, 32)}, r"head sizes \(32, 32\): the kernels take \(64, 64\), \(96, 96\)"),
        ({"backward": True, "use_alibi_mask": True, **CAUSAL}, "use_alibi_mask: the kernels take .*Stats, dO, dQ, dK"),
        ({"backward": True, "score_mod_bprop": lambda graph, x: x}, "score_mod_bprop: the kernels take"),
        ({"backward": True, "stats": (1, 2)}, "Stats of FLOAT with the strides .*: the kernels take FLOAT, contiguous"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(NOT_SUPPORTED, match=f"implementation: got FUSED, but .*{message}"):
        node_of(implementation=FUSED, **changes)
    assert fused_engine.unsupported_reason(node_of(**changes))  # and AUTO does not take them


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("changes", "causal", "window", "top_left"),
    [
        ({"diagonal_band_left_bound": 3}, False, (2, -1), False),
        ({"keys": 50, "diagonal_band_left_bound": 3, "diagonal_band_right_bound": 5}, False, (2, 5), True),
        ({"keys": 50, **CAUSAL}, True, (-1, -1), True),
        ({"keys": 50, "use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 3}, True, (2, -1), False),
        ({"keys": 50, "diagonal_band_right_bound": 49}, False, (-1, -1), False),
        ({"dims": (1, 2, 1, 64), **CAUSAL}, True, (-1, -1), True),
        (
            {"dims": (1, 2, 1, 64), "use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 3},
            False,
            (2, -1),
            False,
        ),
    ],
)
def test_bounds(changes: dict[str, Any], causal: bool, window: Any, top_left: bool, backward: bool) -> None:
    node = node_of(implementation=FUSED, backward=backward, **changes)
    ports = [tensor.get_uid() for tensor in (*node.inputs.values(), *node.outputs.values())]
    made = fused_engine.FusedConfig(node, Bindings(ports), None).operation
    assert (made.is_causal, made.window_size, made.top_left) == (causal, window, top_left)
    assert made.check_support()


def test_a_node_with_others_is_refused_by_name() -> None:
    graph = reference_graph(BFLOAT16)
    q = graph.tensor([1, 2, 40, 64], [5120, 2560, 64, 1])
    o = graph.sdpa(q, q, q, implementation=FUSED, name="attention")[0]
    graph.relu(o).set_output(True)
    with pytest.raises(NOT_SUPPORTED, match="FUSED, but O is virtual: the kernels compute graphs of one node"):
        graph.validate()


def test_the_backward_pass_is_no_one_operation_of_cudnn() -> None:
    with pytest.raises(NOT_SUPPORTED, match="got UNIFIED, but cuDNN has no one operation for the backward pass"):
        node_of(backward=True, implementation=UNIFIED)
    assert node_of(backward=True, implementation=COMPOSITE).implementation is COMPOSITE
    assert not fused_engine.unsupported_reason(node_of((1, 2, 40, 96), backward=True))


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
    backward: Any = {**large, "backward": True}
    assert tag(**backward) == tag(**backward, **CAUSAL) == "fused_sdpa_bwd_d256"
    mixed: Any = {**backward, "dims": (2, 16, 4096, 192), "head": 128, **CAUSAL}
    assert tag(**mixed) == "fused_sdpa_bwd_d192_dv128"
    assert tag(**mixed, use_deterministic_algorithm=True) == "fused_sdpa_bwd_d192_dv128"
    assert tag(**{**large, "dims": (2, 16, 4096, 96)}) == "fused_sdpa_fwd_d96"
    for options in (
        {**backward, "keys": 2048},
        {"dims": (1, 1, 4096, 256), "keys": 4096},
        {**large, "keys": 2048},
        {**large, "capability": (10, 0)},
        {**large, "capability": None},
        {**large, "offered": False},
        {**large, "more": 1},
        {**large, "implementation": COMPOSITE},
        {**large, "use_causal_mask": True, "diagonal_band_left_bound": 99},
    ):
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
    for operation in (SdpaForward, SdpaBackward):
        monkeypatch.setattr(operation, "compile", lambda self: made.append(self))
    return made


def attending(device: Any, backward: bool = False, io: Any = HALF, **options: Any) -> Any:
    """A graph of one small node for a described device."""
    graph = planned_graph(device, io)
    describe(graph, SMALL, data_of(SMALL, backward, torch.float16, "meta"), stats=False, **options)
    return graph


@pytest.mark.parametrize("backward", [False, True])
def test_it_is_the_one_plan_of_a_graph_that_asks_for_it(
    backward: bool, h200: Any, compiled: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cudnn")
    graph, name = attending(h200, backward, implementation=FUSED), f"fused_sdpa_{'bwd' if backward else 'fwd'}_d64"
    graph.build(MODES)
    assert f"attention ({graph.nodes[0].method}): FUSED implementation: asked for" in caplog.text
    assert [operation.arch for operation in compiled] == ["sm_90a"]
    assert graph.get_execution_plan_count() == 1
    assert graph.get_plan_name() == name
    assert graph.get_behavior_notes() == [cudnn.behavior_note.RUNTIME_COMPILATION]
    own = compiled[0].workspace_size() if backward else 4 * 2 * 40
    assert graph.get_workspace_size() >= own > 0
    assert graph.explain().plan.tag == name
    assert graph.explain().plan.workspace == graph.get_workspace_size()
    with pytest.raises(NOT_SUPPORTED, match=r"capture execute\(\), or leave implementation=FUSED out"):
        graph._plan().populate_cuda_graph()
    text = cudnn.pygraph()
    text.deserialize(graph.serialize())  # rebuilt, here on the reference executor
    assert text.nodes[0].implementation is FUSED


@pytest.fixture
def faster(h200: Any, compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device of graphs that are small, and count as measured faster by our kernels."""
    choose = fused_engine.chosen
    monkeypatch.setattr(fused_engine, "_measured_faster", lambda node, arch: "measured")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(
        fused_engine, "chosen", lambda nodes, bindings, arch, offered: choose(nodes, bindings, arch, True)
    )
    monkeypatch.setattr(fused_engine.importlib.util, "find_spec", lambda name: object())
    return h200


def planned(device: Any, modes: Any = MODES, backward: bool = False) -> Any:
    graph = attending(device, backward)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(modes)
    return graph


@pytest.mark.parametrize("backward", [False, True])
def test_it_stands_before_cudnns_plans(
    backward: bool, faster: Any, handle: handles.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[Any] = []
    graph, name = attending(faster, backward), f"fused_sdpa_{'bwd' if backward else 'fwd'}_d64"
    graph.build(MODES)
    (node,) = graph.nodes
    monkeypatch.setattr(program, "Chain", lambda handle, graph, before, fill, after: fill(7))
    monkeypatch.setattr(
        ExecutionPlan, "populate_cuda_graph", lambda self, *given: filled.append((self.config, given[-1]))
    )
    data = dict.fromkeys((*node.inputs.values(), *node.outputs.values()), 256)
    graph.populate_cuda_graph(handle, data, 256, 7)
    assert graph.get_plan_name() == name
    assert [(config.tag[:3], given) for config, given in filled] == [("eng", 7)]
    assert graph.get_workspace_size() >= filled[0][0].workspace_size > 0
    graph = planned(faster, backward=backward)
    graph.deselect_engines(["fused"])
    graph.check_support()
    assert graph.get_execution_plan_count() > 1
    assert graph._cudnn().plans.refusals() == {0: "excluded by name (fused)"}


def test_its_workspace_has_room_for_the_plan_that_fills_cuda_graphs(
    faster: Any, handle: handles.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineConfig, "workspace_size", 1 << 20)
    graph = attending(faster, True)
    graph.build(MODES)
    assert graph.get_plan_name() == "fused_sdpa_bwd_d64"
    assert graph.get_workspace_size() >= 1 << 20
    assert graph._cudnn().plans.native(1 << 20).config.tag.startswith("eng")
    graph = attending(faster, True)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.deselect_workspace_greater_than(1 << 19)  # which bars those: no room is made, and ours stays
    graph.build_plans()
    assert graph.get_plan_name() == "fused_sdpa_bwd_d64"
    assert graph.get_workspace_size() <= 1 << 19
    graph = attending(faster, True, implementation=FUSED)
    graph.build(MODES)
    assert graph.get_workspace_size() < 1 << 20


def test_cudnns_plans_are_built_where_it_cannot_be(faster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Any) -> None:
        raise ImportError("no CuTe DSL")

    monkeypatch.setattr(SdpaForward, "compile", refused)
    graph = planned(faster)
    graph.build_plans()
    assert graph.get_plan_name().startswith("eng")
    assert graph._cudnn().plans.refusals()[0] == "fused_sdpa_fwd_d64: no CuTe DSL"


@pytest.mark.parametrize("modes", [1, 2])
def test_composite_is_tried_where_cudnn_has_no_engine_for_the_one_operation(
    modes: int, faster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though our kernels are there: they may not be built. Where cuDNN has none at all, they are alone."""
    ask, graphs = backend_plan.heuristics, list[Any]()

    def asked(graph: Any, *others: Any) -> Any:
        graphs.extend([] if graph in graphs else [graph])
        return Heuristics([], "none") if len(graphs) <= modes else ask(graph, *others)

    monkeypatch.setattr(backend_plan, "heuristics", asked)
    graph = planned(faster)
    assert len(graphs) == 2
    assert graph.nodes[0].unified_refused
    assert graph.get_plan_name_at_index(0) == "fused_sdpa_fwd_d64"
    assert (graph.get_execution_plan_count() > 1) == (modes == 1)


def test_mode_fallback_asks_for_none_of_ours(faster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that replaces all plans is still added, and another mode adds it before its own plans."""
    fallback, ask = cudnn.heur_mode.FALLBACK, backend_plan.heuristics
    monkeypatch.setattr(backend_plan, "heuristics", lambda graph, mode, *others: ask(graph, MODES[0], *others))
    graph = planned(faster, modes=[fallback])
    count = graph.get_execution_plan_count()
    assert count > 0
    names = [graph.get_plan_name_at_index(index) for index in range(count)]
    assert all(name.startswith("eng") for name in names)
    graph.create_execution_plans([cudnn.heur_mode.A])
    assert graph.get_plan_name_at_index(count) == "fused_sdpa_fwd_d64"
    graph = attending(faster, backward=True, implementation=FUSED)
    graph.build([fallback])
    assert graph.get_plan_name() == "fused_sdpa_bwd_d64"
