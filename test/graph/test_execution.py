"""What calls of a built graph hand to cuDNN: overridden shapes, bare addresses, CUDA graphs. No GPU is needed."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

import cudnn
from cudnn.backend import cuda_graph, library
from cudnn.backend.handle import gpu_available
from cudnn.backend.plan import Origin
from cudnn.pygraph import graph as graph_module
from cudnn.pygraph import program
from cudnn.pygraph.explain.dry_run import dry_run_copy
from support.graphs import FLOAT, HALF, MODES, packed, planned_graph, reference_graph

COMPOSITE = cudnn.attention_implementation.COMPOSITE
SINCE_9_21 = pytest.mark.skipif(
    library.is_available() and library.version() < 92100,
    reason="cuDNN 9.21 brought graphs whose shapes may be overridden",
)
NATIVE = cudnn.behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API


def overridable(device: Any) -> cudnn.pygraph:
    return cudnn.pygraph(
        io_data_type=HALF,
        intermediate_data_type=FLOAT,
        compute_data_type=FLOAT,
        device_property=device,
        is_override_shape_enabled=True,
    )


def attention(graph: cudnn.pygraph) -> list[cudnn.tensor]:
    """Q (uid 1), K (2) and V (3), O (4): [2, 4, 64, 32], causal, in small operations."""
    dims = [2, 4, 64, 32]
    q, k, v = (graph.tensor(dims, packed(*dims), uid=uid) for uid in (1, 2, 3))
    o: Any = graph.sdpa(q, k, v, attn_scale=0.125, is_inference=True, use_causal_mask=True, implementation=COMPOSITE)[0]
    return [q, k, v, o.set_output(True).set_uid(4)]


# Overridden shapes.
@pytest.mark.deviceless_919
def test_the_transposed_view_of_a_tensor_follows_it(h200: Any) -> None:
    graph = overridable(h200)
    attention(graph)
    graph.validate()
    graph.build_operation_graph()
    program = graph._cudnn()
    ((view, alias),) = program.bindings.aliases.items()  # K is read transposed, under a separate uid
    assert (alias.source, alias.offset, alias.axes) == (2, 0, [0, 1, 3, 2])
    dims, steps = [2, 4, 48, 32], [9000, 2000, 40, 1]
    given = [2, 3, 4], [dims, dims, (2, 4, 64, 32)], [steps, packed(*dims), packed(2, 4, 64, 32)]
    if cudnn.backend_version() < 92100:
        with pytest.raises(
            cudnn.cudnnGraphNotSupportedError, match=r"overriding shapes at execution needs cuDNN 9\.21"
        ):
            program._overriding(*given)
        return
    override = program._overriding(*given)
    assert override is not None
    assert dict(zip(override[0], zip(*override[1:], strict=True), strict=True)) == {
        3: (dims, packed(*dims)),
        view: ([2, 4, 32, 48], [9000, 2000, 1, 40]),
    }  # K itself is not in the operation graph, and O stays as it was built


@pytest.mark.deviceless_919
def test_fewer_rows_of_ragged_tensors(h200: Any) -> None:
    """Their lengths end them in any case: cuDNN before 9.21, which knows no overrides, need not be told."""
    graph = overridable(h200)
    dims, (batch, rows) = [2, 4, 64, 32], (9000, 128)
    offset = graph.tensor([3, 1, 1, 1], [1] * 4, cudnn.data_type.INT32)
    q, k, v = (graph.tensor(dims, [8192, 32, rows, 1], uid=uid, ragged_offset=offset) for uid in (1, 2, 3))
    lengths: dict[str, Any] = {
        f"seq_len_{side}": graph.tensor([2, 1, 1, 1], [1] * 4, cudnn.data_type.INT32) for side in ("q", "kv")
    }
    results: list[Any] = graph.sdpa(q, k, v, is_inference=True, use_padding_mask=True, **lengths)
    results[0].set_output(True).set_uid(4).set_dim(dims).set_stride([8192, 32, rows, 1]).set_ragged_offset(offset)
    graph.validate()
    graph.build_operation_graph()
    program = graph._cudnn()
    fewer = [1, 4], [[2, 4, 48, 32]] * 2, [[batch, 32, rows, 1]] * 2
    others = [([1, 4, 48, 32], [batch, 32, rows, 1]), ([2, 4, 48, 32], [batch, 32, 2 * rows, 1])]
    if cudnn.backend_version() < 92100:
        assert program._overriding(*fewer) is None
        for shape, strides in others:
            with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="overriding shapes at execution"):
                program._overriding([1], [shape], [strides])
    else:
        override = program._overriding(*fewer)
        assert override is not None
        assert set(override[0]) == {1, 4}


def test_overrides_that_change_nothing_are_dropped(h200: Any) -> None:
    graph = planned_graph(h200)  # not built for overrides: such calls are ordinary ones
    attention(graph)
    graph.validate()
    graph.build_operation_graph()
    dims = [2, 4, 64, 32]
    program = graph._cudnn()
    assert program._overriding([1, 2], [dims, torch.Size(dims)], [packed(*dims)] * 2) is None
    assert program._overriding([], [], []) is None
    with pytest.raises(ValueError, match=r"override_uids: got \[1\]; .*is_override_shape_enabled=True"):
        program._overriding([1], [[2, 4, 32, 32]], [packed(*dims)])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (([1], [], []), "got 1, 0 and 0 entries; allowed: one shape and one list of strides"),
        (([77], [[1]], [[1]]), "override_uids: got 77; allowed: uids of tensors of this graph"),
        (
            ([1], [[2, 64]], [[64, 1]]),
            r"override of uid 1: got dim=\[2, 64\].*; allowed: the rank of dim=\[2, 4, 64, 32\]",
        ),
    ],
)
def test_malformed_overrides(override: Any, message: str, h200: Any) -> None:
    graph = overridable(h200)
    attention(graph)
    graph.validate()
    graph.build_operation_graph()
    with pytest.raises(ValueError, match=message):
        graph._cudnn()._overriding(*override)


@SINCE_9_21
def test_a_sliced_tensor_has_one_shape(h200: Any) -> None:
    graph = overridable(h200)
    a = graph.tensor([1, 96, 64], packed(1, 96, 64), uid=1, name="a")
    b = graph.tensor([1, 64, 32], packed(1, 64, 32), uid=2)
    part = graph.slice(a, [slice(0, 1), slice(32, 96), slice(0, 64)], name="part")
    graph.matmul(part.set_data_type(HALF), b).set_output(True)
    graph.validate()
    graph.build_operation_graph()
    program = graph._cudnn()
    assert program._overriding([2], [[1, 64, 16]], [[1024, 16, 1]]) == ([2], [[1, 64, 16]], [[1024, 16, 1]])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"tensor 'a' \(uid 1\): got .* reads in another form"):
        program._overriding([1], [[1, 48, 64]], [[48 * 64, 64, 1]])


@SINCE_9_21
def test_memory_of_the_graphs_own_has_one_shape(h200: Any) -> None:
    graph = overridable(h200)
    dims = [2, 4, 64, 64]
    q, k, v, o, d_o = (graph.tensor(dims, packed(*dims), uid=uid) for uid in (1, 2, 3, 4, 5))
    stats = graph.tensor([2, 4, 64, 1], packed(2, 4, 64, 1), FLOAT, uid=6)
    for gradient in graph.sdpa_backward(q, k, v, o, d_o, stats, attn_scale=0.125):
        gradient.set_output(True)
    graph.validate()
    graph.build_operation_graph()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="a graph with separate memory for one shape"):
        graph._cudnn()._overriding([1], [[2, 4, 32, 64]], [packed(*dims)])


# Calls prepared for data like those of the last.
class Traced(cudnn.pygraph):
    """A program's own class of graphs."""

    def execute(self, *arguments: Any, **options: Any) -> None:
        self.seen.append("own")
        super().execute(*arguments, **options)

    seen: list[str]


def traced(kind: type[cudnn.pygraph], device: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """A built product that lists what its calls run; nothing is launched."""
    seen: list[str] = []
    monkeypatch.setattr(program.CudnnProgram, "execute", lambda *_: seen.append("any"))
    monkeypatch.setattr(program.CudnnProgram, "specialised", lambda *_: lambda *_, **__: seen.append("prepared"))
    graph: Any = kind(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, device_property=device)
    graph.seen = seen
    a = graph.tensor([1, 64, 64], packed(1, 64, 64))
    graph.matmul(a, a).set_output(True)
    graph.build(MODES)
    return graph, seen


def test_the_first_call_prepares_later_ones(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, seen = traced(cudnn.pygraph, h200, monkeypatch)
    graph.execute({})
    graph.execute({}, handle=None)
    cudnn.pygraph.execute(graph, {})
    graph._execute({}, 0)  # addresses are not prepared for
    assert seen == ["any", "prepared", "prepared", "any"]
    assert dry_run_copy(graph)._prepared is None
    assert "execute" not in vars(dry_run_copy(graph))
    graph.build_plan_at_index(0)
    graph.execute({})
    assert seen[4:] == ["any"]
    graph.build_operation_graph()
    with pytest.raises(RuntimeError, match="plan"):
        graph.execute({})


def test_a_subclass_keeps_its_execute(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, seen = traced(Traced, h200, monkeypatch)
    for _ in range(3):
        graph.execute({})
    assert seen == ["own", "any", "own", "prepared", "own", "prepared"]


def test_execute_may_be_wrapped_in_the_class(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, seen = traced(cudnn.pygraph, h200, monkeypatch)
    inner: Any = cudnn.pygraph.execute

    def wrapped(self: Any, *arguments: Any) -> None:
        seen.append("wrapped")
        inner(self, *arguments)

    monkeypatch.setattr(cudnn.pygraph, "execute", wrapped)
    for _ in range(3):
        graph.execute({})
    assert seen == ["wrapped", "any", "wrapped", "prepared", "wrapped", "prepared"]


# Bare addresses.
def doubled() -> tuple[cudnn.pygraph, cudnn.tensor, cudnn.tensor]:
    graph = reference_graph()
    x = graph.tensor([4, 6], [6, 1], uid=5)
    y = graph.add(x, x).set_output(True).set_uid(2)
    graph.build(MODES)
    return graph, x, y


class Elsewhere:
    """Stands for the handle of a device: nothing is launched."""

    is_reference = False
    device = 0
    ptr = 1


def test_calls_with_addresses(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, here = planned_graph(h200), Elsewhere()
    a, b = (graph.tensor([1, 64, 64], packed(1, 64, 64), uid=uid) for uid in (5, 3))
    graph.matmul(a, b).set_output(True).set_uid(2)
    graph.build(MODES)
    assert graph._get_variant_pack_uids_sorted() == [2, 3, 5]
    monkeypatch.setattr(program, "resolve", lambda handle: handle)
    monkeypatch.setattr(graph_module, "resolve", lambda handle: handle)
    seen: list[Any] = []
    monkeypatch.setattr(
        program.CudnnProgram, "launch", lambda self, pointers, space, *_: seen.append((pointers, space))
    )
    graph._prepare_variant_pack_template()
    pack, raw = {5: 1280, 3: 768, 2: 512}, (ctypes.c_void_p * 3)(512, 768, 1280)
    graph._execute(pack, 4096, here)
    graph._execute_plan_at_index(pack, 4096, 0, here, [5], [[1, 64, 64]], [[4096, 64, 1]])
    graph._execute_with_ptrs([512, 768, 1280], 4096, here)
    graph._execute_with_raw_ptrs(ctypes.addressof(raw), 3, 4096, here)
    assert seen == [([512, 768, 1280], 4096)] * 4
    with pytest.raises(ValueError, match=r"_execute_with_ptrs: pointers: got 1; allowed: 3, for the uids \[2, 3, 5\]"):
        graph._execute_with_ptrs([512], 0)


def test_the_reference_executor_takes_no_addresses() -> None:
    """It could not check that an address is valid: a wrong one would end the process."""
    graph, _, _ = doubled()
    assert graph._get_variant_pack_uids_sorted() == [2, 5]
    for call in (
        lambda: graph._execute({2: 1, 5: 1}, 0),
        lambda: graph._execute_with_ptrs([1, 1], 0),
        lambda: graph.execute({2: np.int64(1), 5: 1}),
    ):
        with pytest.raises(TypeError, match=r"input tensor .* \(uid 5\): got an address; allowed: .*on a GPU only"):
            call()


def test_where_data_lie() -> None:
    data = torch.randn(4, 6)
    assert cudnn.pygraph._get_data_ptr(data) == cudnn.pygraph._get_data_ptr(data.numpy()) == data.data_ptr()
    with pytest.raises(TypeError, match="data: got str; allowed"):
        cudnn.pygraph._get_data_ptr("here")


def test_the_uids_of_a_plan_of_cudnn(h200: Any) -> None:
    """What the caller brings: neither constants, nor views, nor memory of the graph's own."""
    graph = planned_graph(h200)
    attention(graph)
    graph.build(MODES)
    assert graph._get_variant_pack_uids_sorted() == [1, 2, 3, 4]
    assert set(graph._cudnn().uids) > {1, 3, 4}


# CUDA graphs.
def test_the_layout_of_a_copy_is_that_of_the_driver() -> None:
    """CUDA_MEMCPY3D of cuda.h on a machine of 64 bits."""
    fields = cuda_graph.Copy
    assert (ctypes.sizeof(fields), fields.target.offset, fields.width_bytes.offset) == (200, 88, 176)
    side = cuda_graph._MemcpyEndpoint
    assert [getattr(side, name).offset for name in ("host", "device", "pitch", "height")] == [40, 48, 72, 80]


class FakeDriver:
    """Keeps a list of calls; nodes and graphs are numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int = 0) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._nodes = nodes
        self._next = 100
        monkeypatch.setattr(cuda_graph, "_driver", self)
        monkeypatch.setattr(cuda_graph, "on_device", lambda device: contextlib.nullcontext(ctypes.c_void_p(7)))

    def __call__(self, name: str, *arguments: Any) -> None:
        if name == "cuGraphGetNodes":
            arguments[2]._obj.value = self._nodes
        elif name in ("cuGraphCreate", "cuGraphAddMemcpyNode", "cuGraphAddChildGraphNode"):
            self._next += 1
            arguments[0]._obj.value = self._next
            self.calls.append((name, [*arguments[2]] if "Add" in name else self._next))
        elif name == "cuGraphChildGraphNodeGetGraph":
            arguments[1]._obj.value = 55
            self.calls.append((name, arguments[0].value))
        else:
            self.calls.append((name, arguments[0].value))


def test_nodes_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    words = (ctypes.c_int32 * 2)(1, 2)
    copies = [cuda_graph.words_to_device(4096, words), cuda_graph.upper_halves(8192, 0, 10)]
    handle: Any = type("Handle", (), {"device": 0})

    def fill(graph: int) -> None:
        driver.calls.append(("fill", graph))

    chain = cuda_graph.Chain(handle, 1, copies[:1], fill, copies[1:])
    assert driver.calls == [
        ("cuGraphAddMemcpyNode", []),
        ("cuGraphCreate", 102),
        ("fill", 102),
        ("cuGraphAddChildGraphNode", [101]),
        ("cuGraphDestroy", 102),
        ("cuGraphAddMemcpyNode", [103]),
    ]
    driver.calls.clear()
    chain.update(handle, copies[:1], fill, copies[1:])
    assert driver.calls == [
        ("cuGraphMemcpyNodeSetParams", 101),
        ("cuGraphMemcpyNodeSetParams", 104),
        ("cuGraphChildGraphNodeGetGraph", 103),
        ("fill", 55),
    ]


def test_a_cuda_graph_with_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, nodes=3)
    handle: Any = type("Handle", (), {"device": 0})
    with pytest.raises(ValueError, match="graph: got a CUDA graph with nodes; allowed: an empty one"):
        cuda_graph.Chain(handle, 1, [], lambda graph: None, [])


def test_a_refusal_of_the_driver_is_named() -> None:
    if gpu_available():
        pytest.skip("the driver that stands in for a GPU's refuses everything")
    with pytest.raises(RuntimeError, match="cuGraphCreate failed: CUDA driver error 100"):
        cuda_graph._driver("cuGraphCreate")
    with pytest.raises(RuntimeError, match=r"cuOfLaterDrivers failed: the CUDA driver is too old"):
        cuda_graph._driver("cuOfLaterDrivers")


def test_a_cuda_graph_needs_a_plan_that_can_fill_one(h200: Any) -> None:
    graph = planned_graph(h200)
    a = graph.tensor([1, 64, 64], packed(1, 64, 64))
    graph.matmul(a, a).set_output(True)
    graph.build(MODES)
    plan = graph._plan()
    assert plan is not None
    assert NATIVE in graph.get_behavior_notes()
    plan.config = Origin("eng9", [], [cudnn.behavior_note.RUNTIME_COMPILATION])
    with pytest.raises(
        cudnn.cudnnGraphNotSupportedError,
        match=r"notes of the plan eng9: got RUNTIME_COMPILATION; allowed: SUPPORTS_CUDA_GRAPH_NATIVE_API.*capture",
    ):
        plan.populate_cuda_graph(cudnn.create_handle(), [], 0, 0)


@pytest.mark.parametrize("step", ["populate_cuda_graph", "update_cuda_graph"])
def test_the_reference_executor_fills_no_cuda_graph(step: str) -> None:
    graph, x, y = doubled()
    data = {x: torch.zeros(4, 6), y: torch.zeros(4, 6)}
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=f"{step}: got a graph of the reference executor"):
        getattr(graph, step)(None, data, None, 0)
