"""Matrix products with rows of no multiple of 16 bytes: the engines that misread them are left out, casts run apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.backend.plan import Pack
from cudnn.pygraph import known_faults
from cudnn.pygraph.fast_call import specialised
from cudnn.pygraph.known_faults import SEEN_IN
from cudnn.pygraph.serialization import load
from support.graphs import FLOAT, HALF, MODES, planned_graph, reference_graph

CUBLASLT = cudnn.behavior_note.CUBLASLT_DEPENDENCY
INT8 = cudnn.data_type.INT8
NEWER = SEEN_IN + 100
Layout = tuple[list[int], list[int]]

ALIGNED: Layout = [2, 64, 48], [64 * 48, 48, 1]
ROWS: Layout = [2, 64, 46], [64 * 46, 46, 1]
COLUMNS: Layout = [2, 46, 48], [46 * 48, 1, 46]
BATCH: Layout = [2, 64, 48], [64 * 48 + 4, 48, 1]
SINGLE: Layout = [1, 64, 48], [64 * 48 + 4, 48, 1]
PADDED: Layout = [2, 64, 46], [64 * 48, 48, 1]


def left_out(graph: cudnn.pygraph, version: int = SEEN_IN) -> list[str]:
    graph.validate()
    return [engines.name for engines in known_faults.faulty_engines(graph.nodes, version)]


def product(graph: cudnn.pygraph, a: cudnn.tensor, k: int, columns: int = 32) -> cudnn.tensor:
    return graph.matmul(a, graph.tensor([2, k, columns], [k * 48, 48, 1]))


@pytest.mark.parametrize(
    ("layout", "misread"),
    [(ALIGNED, False), (ROWS, True), (COLUMNS, True), (BATCH, True), (PADDED, False), (SINGLE, False)],
)
def test_tiles_are_copied_from_rows_on_16_bytes_alone(layout: Layout, misread: bool) -> None:
    for before in (False, True):
        graph = reference_graph(HALF)
        a = graph.tensor(*layout)
        product(graph, graph.relu(a).set_data_type(HALF) if before else a, layout[0][2]).set_output(True)
        assert left_out(graph) == ["eng2", "eng4"] * misread
        assert not left_out(graph, NEWER)


def test_rows_of_the_result_and_of_what_is_added_do_not_matter() -> None:
    graph = reference_graph(HALF)
    c = product(graph, graph.tensor(*ALIGNED), 48, columns=31)
    graph.bias(c, graph.tensor([1, 1, 31], [31, 31, 1])).set_output(True)
    assert not left_out(graph)


def test_an_address_that_16_does_not_divide() -> None:
    graph = reference_graph(HALF)
    product(graph, graph.tensor(*ALIGNED).set_alignment(8), 48).set_output(True)
    assert left_out(graph) == ["eng2", "eng4", ""]
    assert known_faults.Engines(note=CUBLASLT) in known_faults.faulty_engines(graph.nodes, SEEN_IN)


def test_a_slice_that_begins_at_such_an_address() -> None:
    graph = reference_graph(HALF, HALF)
    whole = graph.tensor([2, 67, 48], [67 * 48, 48, 1])
    for start, found in ((3, []), (0, [])):
        product(graph, graph.slice(whole, [slice(0, 2), slice(start, start + 64)]), 48).set_output(True)
        assert left_out(graph) == found
    whole = graph.tensor([2, 64, 56], [64 * 56, 56, 1])
    product(graph, graph.slice(whole, [slice(0, 2), slice(0, 64), slice(4, 52)]), 48).set_output(True)
    assert left_out(graph) == ["eng2", "eng4", ""]
    assert known_faults.Engines(note=CUBLASLT) in known_faults.faulty_engines(graph.nodes, SEEN_IN)


@pytest.mark.parametrize(("dims", "misread"), [((2, 1, 32), True), ((2, 64, 32), False), ((1, 1, 32), False)])
def test_rows_that_are_added_by_batch(dims: tuple[int, int, int], misread: bool) -> None:
    graph = reference_graph(HALF)
    graph.bias(product(graph, graph.tensor(*ALIGNED), 48), graph.tensor(dims, [dims[1] * 32, 32, 1])).set_output(True)
    assert left_out(graph) == [""] * misread


# 8-bit operands that are converted to a wider type before the matmul.
def widened(graph: cudnn.pygraph, layout: Layout, relu: bool = False, start: int = 0) -> cudnn.tensor:
    (b, m, k), stride = layout
    a = graph.tensor([b, m + start, k], stride, INT8)
    if start:
        a = graph.slice(a, [slice(0, b), slice(start, None)]).set_data_type(INT8)
    wide = (graph.relu if relu else graph.identity)(a, name="widen").set_data_type(HALF)
    return product(graph, wide, k).set_output(True)


FOUR: Layout = [2, 64, 44], [64 * 44, 44, 1]
GAP: Layout = [2, 64, 45], [64 * 48, 48, 1]
VECTOR: Layout = [2, 1, 48], [48, 1, 1]


@pytest.mark.parametrize(
    ("layout", "apart"), [(FOUR, False), (ROWS, True), (GAP, True), (COLUMNS, True), (VECTOR, True)]
)
def test_casts_from_narrow_rows_run_apart(layout: Layout, apart: bool) -> None:
    graph = reference_graph(HALF)
    widened(graph, layout)
    graph.validate()
    assert [node.name for node in known_faults.computed_apart(graph.nodes, SEEN_IN)] == ["widen"] * apart
    assert not known_faults.computed_apart(graph.nodes, NEWER)
    assert "eng7" not in left_out(graph)


def test_other_operations_on_narrow_rows_keep_off_the_engine() -> None:
    graph = reference_graph(HALF)
    widened(graph, ROWS, relu=True)
    assert "eng7" in left_out(graph)
    assert not known_faults.computed_apart(graph.nodes, SEEN_IN)


def test_products_of_int8_are_right() -> None:
    graph = reference_graph(INT8, FLOAT, cudnn.data_type.INT32)
    product(graph, graph.tensor(*ROWS), 46).set_output(True).set_data_type(cudnn.data_type.INT32)
    assert "eng7" not in left_out(graph)
    assert not known_faults.computed_apart(graph.nodes, SEEN_IN)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done up to ``SEEN_IN``, at every version."""
    choose = known_faults.computed_apart
    monkeypatch.setattr(known_faults, "computed_apart", lambda nodes, version: choose(nodes, min(version, SEEN_IN)))


@pytest.mark.deviceless_919
@pytest.mark.parametrize("start", [0, 3])
def test_a_cast_that_runs_apart(start: int, apart: None, h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planned_graph(h200)
    c = widened(graph, ([2, 64, 45], [80 * 45, 45, 1]), start=start)
    graph.build(MODES)
    program = graph._cudnn()
    (before,) = program.before
    a, wide, b = graph.nodes[0].inputs, program.bindings.scratch[0], graph.nodes[-1].inputs["B"]
    source = next(iter(a.values())).get_uid()
    size = 2 * (80 * 45 + 64 * 45)  # bytes of the widened operand, whose batch entries lie apart as the narrow ones do
    assert program.bindings.user == sorted([source, b.get_uid(), c.get_uid()])
    assert wide.offset + size <= before.workspace <= program.bindings.workspace_size <= graph.get_workspace_size()
    assert (before.source, before.source_offset, before.result) == (source, start * 45, wide.offset)

    calls: list[Any] = []
    monkeypatch.setattr(before.graph, "execute", lambda *arguments: calls.append(arguments), raising=False)
    monkeypatch.setattr(program.plan, "launch", lambda *arguments: calls.append("plan") or 0)
    monkeypatch.setattr(program.plan, "pack", lambda key, pointers=None: calls.append(pointers) or Pack(None))
    addresses = {uid: 4096 * (1 + index) for index, uid in enumerate(program.bindings.user)}
    handle: Any = type("Handle", (), {"ptr": 1, "argument": None, "device": 0})()
    program.launch([*addresses.values()], 1 << 20, handle, program.plan)
    given, space, used = calls[0]
    assert given == {0: addresses[source] + start * 45, 1: (1 << 20) + wide.offset}
    assert (space, used) == ((1 << 20) + before.workspace, handle)
    assert set(calls[1]) >= {addresses[b.get_uid()], addresses[c.get_uid()], (1 << 20) + wide.offset}
    assert addresses[source] not in calls[1]
    assert calls[2] == "plan"


@pytest.mark.deviceless_919
def test_it_is_serialised_with_the_graph(apart: None, h200: Any) -> None:
    graph = planned_graph(h200)
    widened(graph, ROWS)
    graph.build(MODES)
    (before,) = graph._cudnn().before
    explained = graph.explain()
    assert "runs 1 (matmul)\n  runs before it, in separate plans: widen (identity)" in str(explained)
    data = graph.serialize()
    ((node, text, *places),) = load(data).before
    assert node == "widen (identity)"
    assert places == [*before[2:]]
    assert load(text.encode()).plan
    document = json.loads(data)
    for wrong in ([["widen", "{}", 99, 0, 0, 0]], [[1, 2]], 3):
        with pytest.raises(ValueError, match="serialize the graph again"):
            load(json.dumps({**document, "before": wrong}).encode())


@pytest.mark.deviceless_919
@pytest.mark.parametrize("dtype", [HALF, cudnn.data_type.FP8_E4M3, INT8], ids=lambda dtype: dtype.name)
def test_rows_that_are_not_aligned_have_engines(device_properties: Any, dtype: Any) -> None:
    graph = planned_graph(device_properties, io=dtype, compute=cudnn.data_type.INT32 if dtype is INT8 else FLOAT)
    a, b = graph.tensor([2, 61, 45], [61 * 45, 45, 1]), graph.tensor([2, 45, 33], [45 * 33, 1, 45])
    graph.matmul(a, b).set_output(True).set_data_type(cudnn.data_type.INT32 if dtype is INT8 else HALF)
    graph.build(MODES)
    if library.version() <= SEEN_IN:
        assert graph.get_plan_name().split("_")[0] not in ("eng2", "eng4")


# Data at addresses that the alignment of their tensors does not divide.
@pytest.fixture
def plain(h200: Any) -> tuple[cudnn.pygraph, Any]:
    """A built product, and a handle that no GPU has."""
    graph = planned_graph(h200)
    product(graph, graph.tensor(*ROWS, uid=1), 46).set_output(True).set_uid(3)
    graph.nodes[0].inputs["B"].set_uid(2)
    graph.build(MODES)
    return graph, type("Handle", (), {"ptr": 1, "argument": None, "device": 0})()


@pytest.mark.deviceless_919
def test_such_data_go_to_a_plan_that_reads_them(
    plain: tuple[cudnn.pygraph, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, handle = plain
    program = graph._cudnn()
    calls: list[Any] = []
    monkeypatch.setattr(program.plan, "launch", lambda *arguments: calls.append("plan") or 0)
    monkeypatch.setattr(program.plan, "pack", lambda key, pointers=None: Pack(None))
    program.launch([4096, 8192, 16384], 0, handle, program.plan)
    assert calls == ["plan"]
    assert program._at_any_address is None
    monkeypatch.setattr(cudnn.pygraph, "execute", lambda graph, *arguments: calls.append((graph, *arguments)))
    for _ in range(2):
        with caplog.at_level("WARNING", "cudnn"):
            program.launch([4096, 8194, 16384], 0, handle, program.plan)
    other, pack, space, used = calls[1]
    assert calls[2] == calls[1]
    assert (pack, space, used) == ({1: 4096, 2: 8194, 3: 16384}, 0, handle)
    assert other is not graph
    assert {tensor.alignment for node in other.nodes for tensor in node.tensors()} == {2}
    assert other.get_workspace_size() == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a slower plan is built" in caplog.text
    assert "(uid 2)" in caplog.text
    assert "set_alignment(2)" in caplog.text


@pytest.mark.deviceless_919
def test_casts_that_would_need_workspace_are_refused(apart: None, h200: Any) -> None:
    graph = planned_graph(h200)
    widened(graph, FOUR)
    graph.build(MODES)
    program = graph._cudnn()
    assert not program.before
    handle: Any = type("Handle", (), {"ptr": 1, "argument": None, "device": 0})()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"off its alignment of 16 bytes.*set_alignment\(2\)"):
        program.launch([4098, 8192, 16384], 0, handle, program.plan)


@pytest.mark.deviceless_919
def test_addresses_inside_an_element_are_refused(plain: tuple[cudnn.pygraph, Any]) -> None:
    graph, handle = plain
    program = graph._cudnn()
    with pytest.raises(ValueError, match=r"\(uid 3\): got data at 0x4001, .*whole elements"):
        program.launch([4096, 8192, 16385], 0, handle, program.plan)


@pytest.mark.deviceless_919
def test_the_hot_path_leaves_them_to_the_other(plain: tuple[cudnn.pygraph, Any]) -> None:
    graph, handle = plain
    program = graph._cudnn()
    assert program.off_bits == [(0, 15), (1, 15), (2, 15)]
    other: list[Any] = []
    arrays = [torch.empty_strided(*layout, dtype=torch.float16) for layout in (ROWS, ([2, 46, 32], [46 * 48, 48, 1]))]
    arrays.append(torch.empty(2, 64, 32, dtype=torch.float16))
    fast = specialised(program, graph._planned().plan, [1, 2, 3], arrays, handle, lambda *given: other.append(given))
    off = torch.empty(2 * 64 * 32 + 1, dtype=torch.float16)[1:].view(2, 64, 32)
    data = dict(zip([1, 2, 3], [*arrays[:2], off], strict=True))
    fast(data)
    assert other[0][0] is data
    with pytest.raises(TypeError, match="handle"):  # the others are checked, and the first thing is the handle
        fast(dict(zip([1, 2, 3], arrays, strict=True)))
    assert len(other) == 1


def test_the_reference_executor_takes_them_too() -> None:
    graph = reference_graph(HALF)
    a, b = graph.tensor([1, 4, 3], [12, 3, 1], uid=1), graph.tensor([1, 3, 4], [12, 4, 1], uid=2)
    graph.matmul(a, b).set_output(True).set_uid(3)
    graph.build(MODES)
    memory = torch.randn(41).half()
    first, second, third = memory[1:13].view(1, 4, 3), memory[13:25].view(1, 3, 4), memory[25:].view(1, 4, 4)
    graph.execute({1: first, 2: second, 3: third})
    torch.testing.assert_close(third.float(), first.float() @ second.float(), atol=1e-2, rtol=1e-3)
