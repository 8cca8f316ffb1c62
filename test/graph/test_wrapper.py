"""``cudnn.Graph``: names, order of arguments, calls by position and by name, refusals."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import cudnn
from cudnn.wrapper import destroy_default_handle, get_default_handle
from support.graphs import OnlyDlpack


def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8), torch.randn(2, 8, 3), torch.randn(1, 4, 3)


def product(**options: Any) -> tuple[cudnn.Graph, tuple[torch.Tensor, ...], cudnn.tensor]:
    """A batched matrix product plus bias, both named."""
    a, b, d = arrays()
    with cudnn.Graph(**options) as graph:
        c = graph.bias(name="shift", input=graph.matmul(name="mm", A=a, B=b), bias=d)
        c.set_output(True)
    return graph, (a, b, d), c


def expected(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return a @ b + d


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)


# Building.
def test_a_graph_has_one_block() -> None:
    graph, _, _ = product()
    with pytest.raises(RuntimeError, match=r"make a new cudnn.Graph"), graph:
        pass


def test_an_exception_in_the_block_passes_and_drops_the_graph() -> None:
    graph = cudnn.Graph()
    with pytest.raises(ZeroDivisionError), graph:
        graph.relu(torch.randn(2, 1 // 0))
    with pytest.raises(RuntimeError, match="not built"):
        graph(torch.randn(2, 3))


def test_a_graph_whose_build_fails_is_dropped() -> None:
    graph = cudnn.Graph()
    with pytest.raises(ValueError, match="mm"), graph:
        graph.matmul(torch.randn(1, 2, 3), torch.randn(1, 4, 5), name="mm")
    with pytest.raises(RuntimeError, match="not built"):
        graph()


@pytest.mark.parametrize("what", ["inputs", "outputs", "heuristics"])
def test_lists_are_lists(what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}: got str; allowed: a list or a tuple"):
        cudnn.Graph(**{what: "mm::A"})


@pytest.mark.parametrize("name", ["build", "validate", "execute", "check_support", "create_execution_plans", "key"])
def test_the_life_cycle_is_not_for_callers(name: str) -> None:
    graph, _, _ = product()
    with pytest.raises(RuntimeError, match=f"{name}.*use cudnn.pygraph for the single steps"):
        getattr(graph, name)
    assert name not in dir(graph)


def test_queries_pass_through() -> None:
    graph, _, c = product()
    assert graph.get_workspace_size() == 0
    assert graph.get_plan_name() == "reference"
    assert graph.query_tensor_attributes_of_uid(c.get_uid()).get_dim() == [2, 4, 3]


def test_an_operation_after_the_block_is_refused() -> None:
    graph, _, _ = product()
    with pytest.raises(RuntimeError, match="operations inside it"):
        graph.relu(torch.randn(2, 3))


def test_a_name_that_is_no_operation() -> None:
    with cudnn.Graph() as graph:
        graph.relu(torch.randn(2, 3))
        assert not hasattr(graph, "reluu")
    assert not hasattr(cudnn.Graph(), "shape")
    for name, cure in (("mat_mul", "write matmul"), ("flip", r"look at dir\(cudnn.Graph\(\)\)")):
        with pytest.raises(AttributeError, match=f"attribute: got '{name}'; .*{cure}"):
            getattr(cudnn.Graph(), name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": 1, "b": 2}, "missing a required argument: 'A'"),
        ({"A": 1}, "missing a required argument: 'B'"),
        ({"A": 1, "B": 2, "C": 3}, "got an unexpected keyword argument 'C'"),
    ],
)
def test_arguments_that_an_operation_does_not_have(arguments: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 2, 2)
    graph: Any
    with cudnn.Graph() as graph:
        graph.relu(x)
        with pytest.raises(
            TypeError, match=rf"^mm \(matmul\): {message}; allowed: A, B, compute_data_type, padding, name\."
        ):
            graph.matmul(**dict.fromkeys(arguments, x), name="mm")
        with pytest.raises(TypeError, match=r"input A: got int; allowed: a cudnn\.tensor"):
            graph.matmul(1, x)


def test_several_results_are_no_tensor() -> None:
    q = torch.zeros(1, 2, 16, 64).half()
    with cudnn.Graph() as graph:
        results: Any = graph.sdpa(q=q, k=q, v=q, is_inference=True, name="attend")
        assert isinstance(results, list)
        assert results[1] is None
        with pytest.raises(
            AttributeError, match=r"attend: set_output: got a list of results.*write o, _ = graph\.sdpa"
        ):
            results.set_output(True)
        with pytest.raises(AttributeError, match="'list' object has no attribute 'numpy'"):
            results.numpy()
        results[0].set_output(True)


def test_dir_lists_operations() -> None:
    assert {"matmul", "conv_fprop", "set_io_tuples", "tensor_like"} <= set(dir(cudnn.Graph()))


# Names.
def test_default_node_names_count_by_method() -> None:
    x = torch.randn(2, 3)
    with cudnn.Graph(name=None) as graph:
        names = [graph.relu(x).get_name(), graph.tanh(x, name=None).get_name(), graph.relu(x).get_name()]
    assert names == ["relu.0::OUT_0", "tanh.0::OUT_0", "relu.1::OUT_0"]


def test_a_node_name_is_given_once() -> None:
    x = torch.randn(2, 3)
    with cudnn.Graph() as graph:
        graph.relu(x, name="act")
        with pytest.raises(ValueError, match=r"'act'.*a name once"):
            graph.tanh(x, name="act")


def test_keyword_and_positional_inputs_have_names() -> None:
    a, b, d = arrays()
    with cudnn.Graph() as graph:
        graph.bias(graph.matmul(a, B=b, name="mm"), d, name="shift")
    result = graph({"mm::0": a, "mm::B": b, "shift::1": d})
    close(result["shift::OUT_0"], expected(a, b, d))


def test_an_array_is_one_tensor_wherever_it_is_used() -> None:
    x = torch.randn(4, 4)
    with cudnn.Graph() as graph:
        graph.mul(graph.add(x, x, name="twice"), x, name="square")
    close(graph(x), 2 * x * x)
    close(graph({"square::1": x})["square::OUT_0"], 2 * x * x)


def test_a_recycled_id_is_another_array() -> None:
    """Arrays that die in the block leave their id() to the next one."""
    with cudnn.Graph() as graph:
        tensors = [graph.relu(torch.randn(2, extent)) for extent in range(1, 40)]
    assert [tensor.get_dim() for tensor in tensors] == [[2, extent] for extent in range(1, 40)]


def test_a_graph_does_not_keep_the_arrays_that_described_it() -> None:
    x = torch.randn(64, 64)
    with cudnn.Graph() as graph:
        graph.relu(x)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    close(graph(torch.ones(64, 64)), torch.ones(64, 64))


def test_arrays_that_require_gradients() -> None:
    a, b, d = (x.requires_grad_() for x in arrays())
    with cudnn.Graph() as graph:
        graph.bias(graph.matmul(a, b), d)
    result = graph(a, b, d)
    assert not result.requires_grad
    close(result, expected(a, b, d).detach())


def test_dlpack_objects_describe_and_run() -> None:
    a, b, d = (x.numpy() for x in arrays())
    given = tuple(OnlyDlpack(x) for x in (a, b, d))
    with cudnn.Graph() as graph:
        graph.bias(graph.matmul(given[0], given[1]), given[2])
    close(graph(*given), torch.from_numpy(a @ b + d))
    close(graph(a, b, d), torch.from_numpy(a @ b + d))


def test_tuples_are_processed_by_element() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    with cudnn.Graph() as graph:
        graph.concatenate([x, y], 1, name="join")
    close(graph({"join::0::0": x, "join::0::1": y})["join::Y"], torch.cat([x, y], 1))


# Order.
def test_default_order_is_that_of_first_use() -> None:
    a, b, d = arrays()
    with cudnn.Graph() as graph:
        graph.add(d, graph.matmul(B=b, A=a))
    close(graph(b, a, d), expected(a, b, d))


def test_several_outputs_come_in_order_of_creation() -> None:
    x = torch.randn(2, 3)
    with cudnn.Graph() as graph:
        first = graph.relu(x).set_output(True)
        graph.tanh(first).set_output(True)
    relu, tanh = graph(x)
    close(relu, torch.relu(x))
    close(tanh, torch.tanh(torch.relu(x)))


def test_without_outputs_the_leaves_are_outputs() -> None:
    x = torch.randn(2, 3)
    with cudnn.Graph() as graph:
        y = graph.relu(x)
        graph.tanh(y)
        graph.exp(y)
    tanh, exp = graph(x)
    close(tanh, torch.tanh(torch.relu(x)))
    close(exp, torch.exp(torch.relu(x)))


def test_io_by_canonical_name_assigned_name_uid_tensor_and_array() -> None:
    a, b, d = arrays()
    for last in ("shift::bias", "offset", 77, "tensor", d):
        with cudnn.Graph() as graph:
            bias = graph.tensor_like(d).set_name("offset").set_uid(77) if last is not d else d
            key = bias if last == "tensor" else last
            graph.set_io_tuples([key, "mm::B", "mm::A"], ["result"])
            c = graph.bias(graph.matmul(A=a, B=b, name="mm"), bias=bias, name="shift")
            c.set_output(True).set_name("result")
        close(graph(d, b, a), expected(a, b, d))


def test_set_io_tuples_after_the_block() -> None:
    graph, (a, b, d), c = product()
    graph.set_io_tuples(["shift::bias", a, "mm::B"], [c])
    close(graph(d, a, b), expected(a, b, d))
    graph.set_io_tuples()
    close(graph(a, b, d), expected(a, b, d))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["mm::A", "mm::B", "unknown"], None, "inputs: got 'unknown'; allowed: one of 'mm::A', 'mm::B', 'shift::bias'"),
        (["mm::A", "mm::A", "shift::bias"], None, "inputs: got 'mm::A' twice"),
        (["mm::A", "mm::B"], None, "inputs: got a list without 'shift::bias'"),
        (["mm::A", "mm::B", "shift::bias", "mm::C"], None, r"inputs: got 'mm::C' \(a virtual tensor\)"),
        (["mm::A", "mm::B", "shift::bias", 1234], None, "inputs: got 1234; allowed"),
        (["mm::A", "mm::B", torch.zeros(1)], None, "inputs: got a Tensor; allowed"),
        (None, ["mm::C"], r"outputs: got 'mm::C' \(a virtual tensor\); allowed: one of 'shift::OUT_0'"),
        (None, ["mm::A"], "outputs: got 'mm::A'; allowed: one of 'shift::OUT_0'"),
        (None, ["shift::OUT_0", "shift::OUT_0"], "outputs: got 'shift::OUT_0' twice"),
        (None, [], "outputs: got a list without 'shift::OUT_0'"),
    ],
)
def test_io_refusals(inputs: list[Any] | None, outputs: list[Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        product(inputs=inputs, outputs=outputs)
    graph, _, _ = product()
    with pytest.raises(ValueError, match=message):
        graph.set_io_tuples(inputs, outputs)


def test_a_name_given_twice_is_the_later_tensors() -> None:
    x = torch.randn(2, 3)
    with cudnn.Graph(outputs=["y"]) as graph:
        first = graph.relu(x).set_name("y")
        graph.tanh(first).set_name("y").set_output(True)
    close(graph(x), torch.tanh(torch.relu(x)))


# Calls.
def test_the_number_of_arguments_counts() -> None:
    graph, (a, b, _), _ = product()
    with pytest.raises(ValueError, match="arguments: got 2; allowed: 3: 'mm::A', 'mm::B', 'shift::bias'"):
        graph(a, b)


def test_a_call_inside_the_block_is_refused() -> None:
    with cudnn.Graph() as graph:
        graph.relu(torch.randn(2, 3))
        with pytest.raises(RuntimeError, match="inside the with block"):
            graph(torch.randn(2, 3))


def test_a_call_before_the_block_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"write 'with cudnn.Graph"):
        cudnn.Graph()(torch.randn(2, 3))


def test_dict_keys_of_every_kind() -> None:
    a, b, d = arrays()
    with cudnn.Graph() as graph:
        ta = graph.tensor_like(a)
        tb = graph.tensor_like(b).set_uid(0)
        td = graph.tensor_like(d).set_name("offset")
        c = graph.bias(graph.matmul(ta, tb), td, name="shift").set_output(True).set_name("result")
    out = torch.full((2, 4, 3), float("nan"))
    data = {ta: a, 0: b, "offset": d, "result": out}
    assert graph(data) is data
    close(out, expected(a, b, d))
    assert set(data) == {ta, 0, "offset", "result"}
    close(graph({ta: a, tb: b, td: d})["shift::OUT_0"], expected(a, b, d))
    out.fill_(float("nan"))
    graph({ta.get_uid(): a, tb: b, td: d, c: out})
    close(out, expected(a, b, d))


def test_arrays_of_the_block_as_keys() -> None:
    graph, (a, b, d), _ = product()
    fresh = arrays()
    close(graph(dict(zip((a, b, d), fresh, strict=True)))["shift::OUT_0"], expected(*fresh))


def test_missing_outputs_are_added_under_their_canonical_names() -> None:
    graph, (a, b, d), _ = product()
    data = {"mm::A": a, "mm::B": b, "shift::bias": d, "shift::OUT_0": None}
    assert graph(data) is data
    close(data["shift::OUT_0"], expected(a, b, d))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"unknown": 0}, ValueError, "key: got 'unknown'; allowed: 'mm::A', 'mm::B', 'shift::bias', 'shift::OUT_0'"),
        ({"mm::C": torch.zeros(2, 4, 3)}, ValueError, r"key: got 'mm::C' \(a virtual tensor; set_output\(True\)"),
        ({4711: 0}, ValueError, "key: got 4711"),
        ({cudnn.tensor(): 0}, ValueError, "key: got a Tensor"),
        ({3.5: 0}, ValueError, "key: got a float"),
        ({"mm::0": 0}, ValueError, "key: got 'mm::0'"),
        ({"shift::bias": None}, RuntimeError, "no data for 'shift::bias'"),
    ],
)
def test_dict_refusals(extra: dict[Any, Any], error: type[Exception], message: str) -> None:
    graph, (a, b, d), _ = product()
    with pytest.raises(error, match=message):
        graph({"mm::A": a, "mm::B": b, "shift::bias": d, **extra})


def test_two_keys_for_one_tensor() -> None:
    graph, (a, b, d), _ = product()
    with pytest.raises(ValueError, match="another key for 'mm::A'"):
        graph({"mm::A": a, a: b, "mm::B": b, "shift::bias": d})


def test_shapes_may_differ_from_those_of_the_block() -> None:
    """A buffer of another shape that holds the elements is taken as it is."""
    graph, (a, b, d), _ = product()
    close(graph(a.flatten(), b, d), expected(a, b, d))


@pytest.mark.parametrize("handle", [None, "auto"])
def test_handles(handle: Any) -> None:
    graph, (a, b, d), _ = product(handle=handle)
    close(graph(a, b, d), expected(a, b, d))
    close(graph(a, b, d, handle=handle), expected(a, b, d))
    close(graph(a, b, d, handle=cudnn.create_handle()), expected(a, b, d))


def test_handles_are_handles() -> None:
    with pytest.raises(ValueError, match="handle: got 'mine'; allowed: a handle, None or 'auto'"):
        cudnn.Graph(handle="mine")
    graph, data, _ = product()
    with pytest.raises(ValueError, match="handle: got 'mine'"):
        graph(*data, handle="mine")
    handle = cudnn.create_handle()
    cudnn.destroy_handle(handle)
    with pytest.raises(ValueError, match="a destroyed handle"):
        graph(*data, handle=handle)
    with pytest.raises(ValueError, match="a destroyed handle"):
        product(handle=handle)


def test_default_handle() -> None:
    handle = get_default_handle()
    assert get_default_handle() is handle
    destroy_default_handle()
    assert int(get_default_handle()) != 0


def test_workspace_alloc_false_where_no_workspace_is_needed() -> None:
    graph, data, _ = product(workspace_alloc=False)
    close(graph(*data), expected(*data))
    close(graph(*data, workspace=torch.empty(16, dtype=torch.uint8)), expected(*data))


def test_scalars_on_the_cpu_keep_the_value_of_the_block() -> None:
    x, factor = torch.randn(2, 3), torch.full((1, 1), 3.0)
    with cudnn.Graph() as graph:
        graph.mul(x, factor, name="times")
    close(graph(x), 3 * x)
    close(graph(x, torch.full((1, 1), 5.0)), 5 * x)
    close(graph({"times::0": x, "times::1": torch.full((1, 1), 7.0)})["times::OUT_0"], 7 * x)
    close(graph({"times::0": x})["times::OUT_0"], 3 * x)


def test_float16_scalars_are_passed_by_value_too() -> None:
    x, factor = torch.randn(2, 3, dtype=torch.float16), torch.full((1, 1), 3.0, dtype=torch.float16)
    with cudnn.Graph() as graph:
        graph.mul(x, factor)
    torch.testing.assert_close(graph(x), 3 * x)


# Keeping.
def test_serialise_and_restore_with_names_and_order() -> None:
    a, b, d = arrays()
    with cudnn.Graph(inputs=["shift::1", "mm::B", "mm::A"]) as graph:
        c = graph.bias(graph.matmul(A=a, B=b, name="mm"), d, name="shift")
        graph.mul(c, torch.full((1, 1, 1), 2.0), name="twice").set_output(True)
        c.set_output(True)
    for data in (graph.serialize(), list(graph.serialize()), graph.serialize().decode()):
        restored = cudnn.Graph.deserialize(data)
        plain, doubled = restored(d, b, a)
        close(plain, expected(a, b, d))
        close(doubled, 2 * expected(a, b, d))
        close(restored({"mm::A": a, "mm::B": b, "shift::1": d})["twice::OUT_0"], 2 * expected(a, b, d))


def test_the_data_of_a_pygraph_are_restored_too() -> None:
    a, b, _ = arrays()
    graph = cudnn.pygraph(io_data_type=torch.float32, compute_data_type=torch.float32)
    graph.matmul(graph.tensor_like(a, "left"), graph.tensor_like(b, "right"), name="mm").set_output(True)
    described = repr(graph)
    graph.build([cudnn.heur_mode.A])
    for data in (graph.serialize(), described):
        restored = cudnn.Graph.deserialize(data)
        close(restored(a, b), a @ b)
        close(restored({"left": a, "right": b})["mm::C"], a @ b)


def test_restoring_over_a_graph_is_refused() -> None:
    graph, _, _ = product()
    with pytest.raises(RuntimeError, match=r"call Graph.deserialize\(data\)"):
        graph.deserialize(graph.serialize())
    fresh = cudnn.Graph()
    assert fresh.deserialize(graph.serialize()) is fresh


def test_outputs_that_pytorch_cannot_allocate() -> None:
    x = torch.randn(2, 8)
    with cudnn.Graph() as graph:
        graph.identity(x, name="cast").set_output(True).set_data_type(cudnn.data_type.INT4)
    with pytest.raises(NotImplementedError, match="output 'cast::OUT_0': got INT4"):
        graph(x)


def test_repr() -> None:
    assert repr(cudnn.Graph()) == "<cudnn.Graph, not built>"
    graph, _, _ = product()
    assert '"tag": "MATMUL"' in repr(graph)
