"""From description to execution: order of steps, data types, uids, plans."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
import torch

import cudnn
from cudnn.pygraph import lowering
from support.graphs import FLOAT, HALF, MODES, configurations, planned_graph, reference_graph


def linear(graph: cudnn.pygraph, batch: int = 2) -> tuple[cudnn.tensor, cudnn.tensor, cudnn.tensor]:
    """C = A B, [batch, 64, 128] x [batch, 128, 32]."""
    a = graph.tensor(dim=[batch, 64, 128], stride=[64 * 128, 128, 1], name="a")
    b = graph.tensor(dim=[batch, 128, 32], stride=[128 * 32, 32, 1], name="b")
    return a, b, graph.matmul(a, b, name="mm").set_output(True)


def run(graph: cudnn.pygraph, a: cudnn.tensor, b: cudnn.tensor, c: cudnn.tensor) -> None:
    """Executes ``linear`` on fresh data and compares."""
    x, y = torch.randn(2, 64, 128), torch.randn(2, 128, 32)
    out = torch.full((2, 64, 32), float("nan"))
    graph.execute({a: x, b: y, c: out})
    torch.testing.assert_close(out, x @ y, atol=1e-4, rtol=1e-4)


# Order of steps.
@pytest.mark.parametrize("validated", [True, False])
def test_step_by_step(validated: bool) -> None:
    graph = reference_graph()
    tensors = linear(graph)
    if validated:
        graph.validate()
    graph.build_operation_graph()
    assert graph.get_execution_plan_count() == 0
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    assert graph.get_execution_plan_count() == 1
    assert graph.get_workspace_size() == 0
    run(graph, *tensors)


def test_build_twice() -> None:
    graph = reference_graph()
    tensors = linear(graph)
    graph.build(MODES)
    described = repr(graph)
    graph.build(MODES)
    assert repr(graph) == described
    run(graph, *tensors)


def test_build_without_modes_stops_before_plans() -> None:
    graph = reference_graph()
    linear(graph)
    graph.build()
    assert graph.get_execution_plan_count() == 0
    with pytest.raises(RuntimeError, match=r"plan: got none built.*call build_plans\(\) first"):
        graph.get_workspace_size()


@pytest.mark.parametrize("step", ["check_support", "build_plans", "get_workspace_size", "get_engine_count"])
def test_steps_before_their_time(step: str) -> None:
    graph = reference_graph()
    linear(graph)
    with pytest.raises(RuntimeError, match="without an operation graph"):
        getattr(graph, step)()
    with pytest.raises(RuntimeError, match="without an operation graph"):
        graph.create_execution_plans([cudnn.heur_mode.A])
    with pytest.raises(RuntimeError, match="without an operation graph"):
        graph.execute({})


def test_an_empty_graph() -> None:
    with pytest.raises(ValueError, match="nodes: got none"):
        reference_graph().validate()


def test_a_graph_with_new_nodes_is_rebuilt() -> None:
    graph = reference_graph()
    a, b, c = linear(graph)
    graph.build(MODES)
    d = graph.relu(c, name="act").set_output(True)
    graph.build(MODES)
    x, y = torch.randn(2, 64, 128), torch.randn(2, 128, 32)
    product, out = torch.empty(2, 64, 32), torch.empty(2, 64, 32)
    graph.execute({a: x, b: y, c: product, d: out})
    torch.testing.assert_close(out, torch.relu(product))


# Outputs and types.
def test_what_is_set_after_the_node_counts() -> None:
    graph = reference_graph(io=HALF)
    _, _, c = linear(graph)
    c.set_output(False)
    d = graph.relu(c, name="act")
    d.set_data_type(FLOAT)
    d.set_output(True).set_stride([64 * 32, 1, 64])
    graph.validate()
    assert d.get_data_type() is FLOAT
    assert d.get_stride() == [64 * 32, 1, 64]
    assert c.get_is_virtual()


def test_default_types_by_role() -> None:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    a, b, c = linear(graph)
    c.set_output(False)
    d = graph.relu(c).set_output(True)
    assert c.get_data_type() is cudnn.data_type.NOT_SET
    graph.validate()
    assert [t.get_data_type() for t in (a, b, c, d)] == [HALF, HALF, FLOAT, HALF]


def test_comparisons_are_not_boolean_by_themselves() -> None:
    graph = reference_graph(io=HALF)
    x = graph.tensor(dim=[2, 3], stride=[3, 1])
    y = graph.cmp_gt(x, x).set_output(True)
    graph.validate()
    assert y.get_data_type() is HALF


@pytest.mark.parametrize("missing", ["io", "intermediate", "compute"])
def test_a_type_that_is_not_set(missing: str) -> None:
    kinds = {"io": HALF, "intermediate": FLOAT, "compute": FLOAT, missing: cudnn.data_type.NOT_SET}
    graph = reference_graph(**kinds)
    _, _, c = linear(graph)
    graph.relu(c.set_output(False), name="act").set_output(True)
    message = {
        "io": r"mm \(matmul\): tensor 'a': got no data type",
        "intermediate": r"mm \(matmul\): tensor 'mm::C': got no data type",
        "compute": r"mm \(matmul\): compute_data_type: got none",
    }[missing]
    for step in (graph.validate, graph.build_operation_graph):
        with pytest.raises(ValueError, match=message):
            step()


def test_a_nodes_own_compute_type_wins() -> None:
    graph = reference_graph(compute=cudnn.data_type.NOT_SET)
    graph.relu(graph.tensor(dim=[2, 3], stride=[3, 1]), compute_data_type=torch.float32).set_output(True)
    graph.validate()


def test_tensors_of_another_graph() -> None:
    first, second = reference_graph(), reference_graph()
    x = first.tensor(dim=[2, 3], stride=[3, 1], name="x")
    y = first.relu(x).set_output(True)
    first.build(MODES)
    z = second.add(x, y).set_output(True)
    second.build(MODES)
    data, relu, total = torch.randn(2, 3), torch.empty(2, 3), torch.empty(2, 3)
    pack = {x: data, y: relu, z: total}
    first.execute(pack)
    second.execute(pack)
    torch.testing.assert_close(total, data + torch.relu(data))


# uids.
def test_uids_are_deterministic_and_leave_room_for_the_users() -> None:
    numbers: list[list[int]] = []
    for _ in range(2):
        graph = reference_graph()
        a, b, c = linear(graph)
        b.set_uid(1)
        graph.build(MODES)
        numbers.append([a.get_uid(), b.get_uid(), c.get_uid()])
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == 3
    assert numbers[0][1] == 1


def test_zero_is_a_uid() -> None:
    graph = reference_graph()
    a, b, c = linear(graph)
    a.set_uid(0)
    graph.build(MODES)
    assert a.get_uid() == 0
    assert 0 not in (b.get_uid(), c.get_uid())
    x, y, out = torch.randn(2, 64, 128), torch.randn(2, 128, 32), torch.empty(2, 64, 32)
    graph.execute({0: x, b: y, c: out})
    torch.testing.assert_close(out, x @ y, atol=1e-4, rtol=1e-4)
    assert graph.query_tensor_attributes_of_uid(0).get_name() == "a"


@pytest.mark.parametrize("step", ["validate", "build_operation_graph"])
def test_a_uid_given_twice(step: str) -> None:
    graph = reference_graph()
    a, _, c = linear(graph)
    a.set_uid(7)
    c.set_uid(7)
    with pytest.raises(RuntimeError, match=r"uid 7 is set on two tensors, 'a' and 'mm::C' .*mm \(matmul\)"):
        getattr(graph, step)()


def test_query_of_a_uid_gives_a_copy() -> None:
    graph = reference_graph()
    a, _, _ = linear(graph)
    graph.build(MODES)
    copy = graph.query_tensor_attributes_of_uid(a.get_uid())
    assert copy is not a
    assert (copy.get_dim(), copy.get_uid(), copy.get_name()) == (a.get_dim(), a.get_uid(), "a")
    with pytest.raises(RuntimeError, match="uid: got 999; allowed: the uid of a tensor of this graph"):
        graph.query_tensor_attributes_of_uid(999)


def test_key() -> None:
    keys: list[int] = []
    for batch in (2, 2, 3):
        graph = reference_graph()
        linear(graph, batch)
        graph.validate()
        keys.append(graph.key())
    assert keys[0] == keys[1] != keys[2]
    dynamic: list[int] = []
    for batch in (2, 3):
        graph = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT, is_dynamic_shape_enabled=True)
        linear(graph, batch)
        graph.validate()
        dynamic.append(graph.key())
    assert dynamic[0] == dynamic[1]


# Descriptions.
def test_validate_logs_one_line_of_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CUDNN_FRONTEND_LOG_INFO", "1")
    monkeypatch.setenv("CUDNN_FRONTEND_LOG_FILE", str(log))
    graph = reference_graph()
    linear(graph)
    graph.validate()
    monkeypatch.delenv("CUDNN_FRONTEND_LOG_INFO")
    reference_graph()  # puts the logger back
    lines = [line for line in log.read_text().splitlines() if '"context"' in line]
    assert len(lines) == 1
    assert json.loads(lines[0][lines[0].index("{") :])["nodes"][0]["tag"] == "MATMUL"


# Which executor.
def test_a_handle_made_without_a_gpu_selects_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    handle = cudnn.create_handle()
    if not handle.is_reference:
        pytest.skip("there is a GPU")
    graph = cudnn.pygraph(handle=handle, io_data_type=FLOAT, compute_data_type=FLOAT)
    tensors = linear(graph)
    graph.build(MODES)
    assert graph.get_plan_name() == "reference"
    run(graph, *tensors)


def test_cpu_data_select_the_reference() -> None:
    graph = cudnn.pygraph(io_data_type=FLOAT, compute_data_type=FLOAT)
    x = torch.randn(3, 4)
    tx = graph.tensor_like(x)
    y = graph.relu(tx).set_output(True)
    graph.build(MODES)
    assert graph.get_plan_name() == "reference"
    out = torch.empty(3, 4)
    graph.execute({tx: x, y: out})
    torch.testing.assert_close(out, torch.relu(x))


def test_backend_names() -> None:
    with pytest.raises(ValueError, match="backend: got 'cuda'; allowed: 'cudnn', 'reference' or None"):
        cudnn.pygraph(backend="cuda")


def test_the_reference_says_once_that_it_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cudnn.reference.executor._said", False)
    graph = reference_graph()
    tensors = linear(graph)
    graph.build(MODES)
    with caplog.at_level(logging.INFO, "cudnn"):
        run(graph, *tensors)
        run(graph, *tensors)
    assert len([r for r in caplog.records if "reference executor" in r.message]) == 1


# Plans of cuDNN for a device that is not there.
def test_plans_without_a_device(device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    _, _, c = linear(graph)
    graph.relu(c.set_output(False), name="act").set_output(True)
    count = configurations(graph)
    assert count > 0
    assert graph.get_engine_count() > 0
    names = [graph.get_plan_name_at_index(index) for index in range(count)]
    assert all(name.startswith("eng") for name in names)
    with pytest.raises(RuntimeError, match=f"plan index: got {count}"):
        graph.get_plan_name_at_index(count)
    with pytest.raises(RuntimeError, match=f"plan index: got {count}"):
        graph.get_behavior_notes_for_plan_at_index(count)
    graph.create_execution_plans(MODES)
    assert graph.get_execution_plan_count() == 2 * count


def test_deselecting(h200: Any) -> None:
    graph = planned_graph(h200)
    linear(graph)
    count = configurations(graph)
    notes = [graph.get_behavior_notes_for_plan_at_index(index) for index in range(count)]
    assert any(cudnn.behavior_note.RUNTIME_COMPILATION in found for found in notes)
    engine = graph.get_plan_name_at_index(0).split("_")[0]
    graph.deselect_engines([engine + "_"])
    graph.deselect_workspace_greater_than(0)
    graph.select_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
    graph.build_plans()
    assert not graph.get_plan_name().startswith(engine + "_")
    graph.deselect_behavior_notes([cudnn.behavior_note.RUNTIME_COMPILATION])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="has the note RUNTIME_COMPILATION"):
        graph.check_support()
    graph.deselect_engines(["eng"])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="excluded by name"):
        graph.check_support()


def test_build_all_and_by_index(h200: Any) -> None:
    graph = planned_graph(h200)
    linear(graph)
    configurations(graph)
    with pytest.raises(RuntimeError, match="which is not built"):
        graph.get_workspace_size_plan_at_index(0)
    graph.build_plan_at_index(0)
    assert graph.get_plan_name() == graph.get_plan_name_at_index(0)
    assert graph.get_workspace_size_plan_at_index(0) == graph.get_workspace_size()
    assert cudnn.behavior_note.RUNTIME_COMPILATION in graph.get_behavior_notes()


def test_engines_and_knobs_by_hand(h200: Any) -> None:
    graph = planned_graph(h200)
    linear(graph)
    count = configurations(graph)
    engine = int(graph.get_plan_name_at_index(0).split("_")[0].removeprefix("eng"))
    knobs = graph.get_knobs_for_engine(engine)
    assert all(knob.min_value <= knob.max_value for knob in knobs)
    graph.create_execution_plan(engine, {})
    assert graph.get_execution_plan_count() == count + 1
    with pytest.raises(RuntimeError, match=r"\d+"):
        graph.create_execution_plan(10_000, {})


def test_a_restored_kernel_cache_builds_at_once(h200: Any) -> None:
    """From the first call to the plan in a tenth of the processor time, for a shape that was not compiled for."""
    if cudnn.backend_version() < 92800:
        pytest.skip("cuDNN 9.19 compiles again with a restored cache, where there is no GPU")

    def build(cache: Any, batch: int) -> float:
        start = time.process_time()
        graph = cudnn.pygraph(
            io_data_type=HALF,
            intermediate_data_type=FLOAT,
            compute_data_type=FLOAT,
            device_property=h200,
            kernel_cache=cache,
        )
        linear(graph, batch)
        graph.build([cudnn.heur_mode.A])
        return time.process_time() - start

    first = cudnn.create_kernel_cache()
    compiled = build(first, 2)
    text = first.serialize()
    took: list[float] = []
    for batch in (4, 8, 16):
        cache = cudnn.create_kernel_cache()
        cache.deserialize(text)
        took.append(build(cache, batch))
        assert cache.size() == 1
    assert min(took) < compiled / 10


@pytest.mark.parametrize(("status", "error"), [(3001, cudnn.cudnnGraphNotSupportedError), (2000, cudnn.CudnnError)])
def test_what_cudnn_calls_not_supported_is_named_so(
    status: int, error: type[Exception], h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the operation graph is finalized, a call that programs leave unguarded."""

    def refuse(*_: Any) -> None:
        raise cudnn.CudnnError("finalizing the descriptor OPERATIONGRAPH failed", status, "")

    monkeypatch.setattr(lowering, "OperationGraph", refuse)
    graph = planned_graph(h200)
    linear(graph)
    graph.validate()
    with pytest.raises(error, match="finalizing the descriptor OPERATIONGRAPH failed"):
        graph.build_operation_graph()
