"""Refusals before any work for a GPU: class, node, tensor, what is allowed, what to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cudnn
from cudnn.errors import CudnnError, checked_number, refusal
from cudnn.pygraph import program as program_module
from support.graphs import FLOAT, HALF, MODES, packed, planned_graph, reference_graph


def half(*dim: int) -> dict[str, Any]:
    return {"dim": list(dim), "stride": packed(*dim), "data_type": HALF}


def test_wording() -> None:
    assert refusal("mm (matmul)", "A", 3, "4", "pass 4") == "mm (matmul): A: got 3; allowed: 4. To fix it, pass 4."
    assert refusal("mm", "A", 3, "4") == "mm: A: got 3; allowed: 4."


def test_numbers() -> None:
    for value in (1, 0.5, np.float32(0.5), np.int64(3)):
        assert type(checked_number("mm", "x", value)) is float
    assert type(checked_number("mm", "x", np.int64(3), integer=True)) is int
    assert checked_number("mm", "x", -math.inf, limit=True) == -math.inf
    for value in (True, 1j, "1", None, torch.ones(1)):
        with pytest.raises(TypeError, match=f"mm: x: got {type(value).__name__}; allowed: a float"):
            checked_number("mm", "x", value)
    for value, limit in ((math.nan, False), (math.inf, False), (math.nan, True)):
        with pytest.raises(ValueError, match=f"mm: x: got {value}; allowed: (finite )?numbers"):
            checked_number("mm", "x", value, limit=limit)
    with pytest.raises(TypeError, match=r"mm: x: got float; allowed: an int"):
        checked_number("mm", "x", 1.0, integer=True)


def test_classes() -> None:
    assert cudnn.cudnnGraphNotSupportedError.__bases__ == (Exception,)
    assert issubclass(CudnnError, RuntimeError)
    assert CudnnError("", 3001, "").not_supported
    assert not CudnnError("", 2001, "").not_supported


# While the graph is described.
@pytest.mark.parametrize(
    ("describe", "port"),
    [
        (lambda g, x: g.matmul(x, None), "B"),
        (lambda g, x: g.add(x, None), "IN_1"),
        (lambda g, x: g.relu(None), "IN_0"),
        (lambda g, x: g.concatenate([x, None], 1), "X_1"),
        (lambda g, x: g.sdpa(x, None, x), "K"),
        (lambda g, x: g.sdpa_backward(x, x, x, x, None, x), "dO"),
        (lambda g, x: g.sdpa_fp8(x, x, x, x, x, x, None, x, x, is_inference=True), "Descale_s"),
        (lambda g, x: g.reduction(None, cudnn.reduction_mode.ADD), "X"),
        (lambda g, x: g.conv_fprop(x, None, padding=[0, 0]), "W"),
        (lambda g, x: g.genstats(None), "X"),
        (lambda g, x: g.moe_grouped_matmul(x, x, None), "FIRST_TOKEN_OFFSET"),
        (lambda g, x: g.rope(x, None), "FREQS"),
    ],
)
def test_no_tensor_where_one_is_needed(describe: Callable[[Any, Any], Any], port: str) -> None:
    graph = reference_graph(io=HALF)
    with pytest.raises(TypeError, match=f": input {port}: got None; allowed: a cudnn.tensor"):
        describe(graph, graph.tensor(**half(1, 2, 16, 64)))


def test_no_member_of_an_enumeration() -> None:
    graph = reference_graph(io=HALF)
    q = graph.tensor(**half(1, 2, 16, 64))
    for arguments, words in (
        ({"implementation": "FUSED"}, "implementation: got 'FUSED'; allowed: a cudnn.attention_implementation: AUTO,"),
        ({"diagonal_alignment": 7}, "diagonal_alignment: got 7; allowed: a cudnn.diagonal_alignment: TOP_LEFT, BOTTOM"),
    ):
        options: dict[str, Any] = arguments
        with pytest.raises(ValueError, match=f"sdpa: {words}"):
            graph.sdpa(q, q, q, **options)
    with pytest.raises(ValueError, match="sdpa_backward: implementation: got 9; allowed"):
        graph.sdpa_backward(q, q, q, q, q, q, implementation=9)  # type: ignore[arg-type]


# validate(). The tensor that is returned, if any, becomes the output.
def relu(graph: cudnn.pygraph, dim: list[int], stride: list[int]) -> cudnn.tensor:
    return graph.relu(graph.tensor(dim, stride, HALF, name="x"), name="act")


def product(graph: cudnn.pygraph, a: tuple[int, ...], b: tuple[int, ...]) -> cudnn.tensor:
    return graph.matmul(graph.tensor(**half(*a), name="a"), graph.tensor(**half(*b), name="b"), name="mm")


def broadcast(graph: cudnn.pygraph) -> cudnn.tensor:
    return graph.add(graph.tensor(**half(2, 3), name="a"), graph.tensor(**half(2, 4), name="b"), name="sum")


def no_output(graph: cudnn.pygraph) -> None:
    relu(graph, [2, 3], [3, 1])


def virtual_of_another(graph: cudnn.pygraph) -> cudnn.tensor:
    other = reference_graph()
    return graph.relu(other.neg(other.tensor(**half(4, 8)), name="theirs"), name="act")


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (
            lambda g: product(g, (4,), (4, 4)),
            r"mm \(matmul\): A and B: got dim=\[4\] and dim=\[4, 4\]; allowed: .*rank.*add leading dimensions",
        ),
        (
            lambda g: product(g, (1, 2, 3), (1, 4, 5)),
            r"mm \(matmul\): A and B: .*inner.* 3 and 4; allowed: \[.., M, K\] and \[.., K, N\]",
        ),
        (
            lambda g: product(g, (1, 4, 8), (1, 8, 5)).set_dim([1, 4, 6]),
            r"mm \(matmul\): output C .*: got dim=\[1, 4, 6\]; allowed: dim=\[1, 4, 5\]",
        ),
        (broadcast, r"sum \(add\): inputs: got 'a' dim=\[2, 3\], 'b' dim=\[2, 4\]; allowed: shapes that broadcast"),
        (
            lambda g: relu(g, [2, 3], [3]),
            r"act \(relu\): tensor 'x'.*dim=\[2, 3\] with stride=\[3\]; allowed: one stride per dimension",
        ),
        (
            lambda g: relu(g, [2, 3], [3, 1]).set_dim([3, 2]),
            r"act \(relu\): output \(tensor 'act::OUT_0'\): got dim=\[3, 2\]; allowed: dim=\[2, 3\]",
        ),
        (no_output, r"graph 'test_graph': outputs: got none; allowed: .*set_output\(True\)"),
        (
            lambda g: g.relu(cudnn.tensor().set_name("x"), name="act"),
            r"act \(relu\): input IN_0 \(tensor 'x'\): got dim=\[\], stride=\[\]",
        ),
        (
            lambda g: relu(g, [4, 8], [8, -1]),
            r"act \(relu\): tensor 'x': got stride=\[8, -1\]; allowed: strides of 0 or more",
        ),
        (
            lambda g: relu(g, [4, 8], [8, 1]).set_stride([4, 1]),
            r"act \(relu\): output tensor 'act::OUT_0': got .*; allowed: distinct addresses",
        ),
        (lambda g: relu(g, [4, 8], [8, 1]).set_stride([0, 1]), "distinct addresses for all elements"),
        (lambda g: relu(g, [4, 4], [4, 1]).set_stride([2, 3]), "distinct addresses for all elements"),
        (
            lambda g: relu(g, [2**63, 8], [8, 1]),
            r"tensor 'x': got dim=\[9223372036854775808, 8\].*; allowed: fewer than 2\^60",
        ),
        (lambda g: relu(g, [2**31, 8], [2**31, 1]), r"'x': got .*; allowed: fewer than 2\^60 elements and places"),
        (
            virtual_of_another,
            r"act \(relu\): input IN_0 .*: got a virtual tensor that no operation of this graph makes",
        ),
    ],
)
def test_validate(describe: Callable[[cudnn.pygraph], cudnn.tensor | None], message: str) -> None:
    graph = reference_graph(HALF)
    output = describe(graph)
    if output is not None:
        output.set_output(True)
    with pytest.raises(ValueError, match=message):
        graph.validate()


# execute() on the reference executor.
def doubled() -> tuple[cudnn.pygraph, cudnn.tensor, cudnn.tensor]:
    graph = reference_graph()
    x = graph.tensor(dim=[4, 6], stride=[6, 1], name="x", uid=1)
    y = graph.add(x, x, name="sum").set_output(True).set_uid(2)
    graph.build(MODES)
    return graph, x, y


def test_extra_entries_are_ignored() -> None:
    """Programs pass tensors of other graphs, keys of None for absent tensors, and data that a variant does not use."""
    graph, x, y = doubled()
    data, out = torch.randn(4, 6), torch.empty(4, 6)
    unused = graph.tensor_like(data)  # no operation takes it, so that it gets no uid
    graph.execute({unused: data, x: data, y: out, 99: data, None: data, 98: None})
    torch.testing.assert_close(out, 2 * data)


X, SHORT = torch.zeros(4, 6), torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("pack", "error", "message"),
    [
        ({1: X}, ValueError, r"execute: output tensor 'sum::OUT_0' \(uid 2\): got no data.*uid 2"),
        ({2: X}, ValueError, r"execute: input tensor 'x' \(uid 1\): got no data"),
        ({1: None, 2: X}, ValueError, r"input tensor 'x' \(uid 1\): got no data"),
        ({"x": X, 2: X}, TypeError, "key: got str; allowed: .*names are keys of cudnn.Graph"),
        (
            {1: SHORT, 2: X},
            ValueError,
            r"tensor 'x' \(uid 1\): got shape \[4, 5\] with strides \[5, 1\]; "
            r"allowed: dim=\[4, 6\] with stride=\[6, 1\]",
        ),
        ({1: X, 2: SHORT}, ValueError, r"tensor 'sum::OUT_0' \(uid 2\): got shape \[4, 5\]"),
        ({1: [1, 2], 2: X}, TypeError, r"input tensor 'x' \(uid 1\): got list; allowed: a torch.Tensor"),
        ({1: X.data_ptr(), 2: X}, TypeError, r"input tensor 'x' \(uid 1\): got an address; allowed: .*on a GPU only"),
        ({1: X, 2: X.data_ptr()}, TypeError, r"output tensor .*: got an address"),
        ({1: X, 2: X.to("meta")}, ValueError, r"uid 2\): got Tensor without data, .*allowed: tensors with memory"),
    ],
)
def test_execute(pack: dict[Any, Any], error: type[Exception], message: str) -> None:
    graph, _, _ = doubled()
    with pytest.raises(error, match=message):
        graph.execute(pack)


def test_misaligned_memory() -> None:
    graph, x, y = doubled()
    raw = torch.zeros(4 * 6 * 4 + 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"tensor 'x' \(uid 1\): got address .*; allowed: a multiple of 16 bytes"):
        graph.execute({x: raw[1:], y: torch.zeros(4, 6)})


def test_the_reference_has_one_plan() -> None:
    graph, x, y = doubled()
    pack = {x: torch.zeros(4, 6), y: torch.zeros(4, 6)}
    graph.execute_plan_at_index(pack, None, 0)
    for name in ("plan_name", "behavior_notes_for_plan", "workspace_size_plan"):
        with pytest.raises(RuntimeError, match="plan index: got 1; allowed: 0"):
            getattr(graph, f"get_{name}_at_index")(1)
    for call in (graph.build_plan_at_index, lambda i: graph.execute_plan_at_index(pack, None, i)):
        with pytest.raises(RuntimeError, match="plan index: got 1; allowed: 0"):
            call(1)
    for engine, knobs in ((1, {}), (0, {cudnn.knob_type.STAGES: 2})):
        with pytest.raises(RuntimeError, match=rf"plan: got engine {engine} with knobs .*; allowed: engine 0"):
            graph.create_execution_plan(engine, knobs)
    restored = cudnn.pygraph()
    restored.deserialize(None, graph.serialize())  # as with no handle
    assert repr(restored) == repr(graph)


def test_a_plan_of_the_references_engine() -> None:
    graph = reference_graph()
    x = graph.tensor(dim=[4, 6], stride=[6, 1])
    y = graph.add(x, x).set_output(True)
    graph.build()
    graph.create_execution_plan(0, {})
    graph.check_support()
    graph.build_plans()
    out = torch.zeros(4, 6)
    graph.execute({x: torch.ones(4, 6), y: out}, None)
    assert (out == 2).all()


def test_overrides_need_a_graph_that_is_built_for_them() -> None:
    graph, x, y = doubled()
    pack = {x: torch.zeros(4, 6), y: torch.zeros(4, 6)}
    with pytest.raises(ValueError, match=r"override_uids: got \[1\]; .*is_override_shape_enabled=True"):
        graph.execute(pack, None, None, [1], [[2, 6]], [[6, 1]])
    with pytest.raises(ValueError, match="override_uids"):
        graph.execute_plan_at_index(
            pack, None, 0, override_uids=[1], override_shapes=[[2, 6]], override_strides=[[6, 1]]
        )


def test_overrides_on_the_reference_executor() -> None:
    graph = cudnn.pygraph("g", FLOAT, FLOAT, FLOAT, backend="reference", is_override_shape_enabled=True)
    a, b = (graph.tensor(dim=dim, stride=packed(*dim), data_type=FLOAT) for dim in ([1, 4, 8], [1, 8, 6]))
    c = graph.relu(graph.matmul(a, b)).set_output(True)
    graph.build(MODES)
    restored = cudnn.pygraph(backend="reference")
    restored.deserialize(graph.serialize())
    y = torch.randn(1, 8, 6)
    for rows, used in itertools.product((2, 4, 7), (graph, restored)):  # also more than the graph was built with
        x, out = torch.randn(1, rows, 8), torch.empty(1, rows, 6)
        shapes = [[*tensor.shape] for tensor in (x, out)]
        pack = {tensor.get_uid(): data for tensor, data in ((a, x), (b, y), (c, out))}
        uids = [a.get_uid(), c.get_uid()]
        used.execute(pack, None, None, uids, shapes, [packed(*shape) for shape in shapes])
        torch.testing.assert_close(out, (x @ y).relu())
    with pytest.raises(ValueError, match=r"7, 6|M, K"):  # a result of another shape than that of its operands
        graph.execute({a: x, b: y, c: out}, None, None, uids[:1], shapes[:1], [packed(*shapes[0])])


def test_overrides_that_change_nothing_are_for_all() -> None:
    graph, x, y = doubled()
    data, out = torch.randn(4, 6), torch.empty(4, 6)
    graph.execute({x: data, y: out}, None, None, [1, 2], [[4, 6], (4, 6)], [[6, 1], [6, 1]])
    torch.testing.assert_close(out, 2 * data)
    graph.execute_plan_at_index({x: data, y: out.zero_()}, None, 0, None, [1], [[4, 6]], [[6, 1]])
    torch.testing.assert_close(out, 2 * data)


def test_a_destroyed_handle() -> None:
    graph, x, y = doubled()
    handle = cudnn.create_handle()
    cudnn.destroy_handle(handle)
    pack = {x: torch.zeros(4, 6), y: torch.zeros(4, 6)}
    with pytest.raises(ValueError, match="handle: got a destroyed handle"):
        graph.execute(pack, handle=handle)
    with pytest.raises(ValueError, match="handle: got 0x3039, which is no live handle"):
        graph.execute(pack, handle=0x3039)
    with pytest.raises(TypeError, match="handle: got str"):
        graph.execute(pack, handle="mine")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a destroyed handle"):
        cudnn.pygraph(handle=handle)


# execute() of a plan of cuDNN: what is checked before the call, with no GPU.
class Elsewhere:
    """Stands for the handle of a device: the checks come before anything is done with it."""

    is_reference = False
    device = 0
    ptr = 1


@pytest.fixture
def program(h200: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    graph = planned_graph(h200)
    a = graph.tensor(**half(1, 64, 64), name="a", uid=1)
    b = graph.tensor(**half(1, 64, 64), name="b", uid=2)
    factor = graph.tensor(dim=[1, 1, 1], stride=[1, 1, 1], data_type=FLOAT, is_pass_by_value=True, name="f", uid=3)
    graph.mul(graph.matmul(a, b, name="mm"), factor, name="times").set_output(True).set_uid(4)
    graph.build(MODES)
    monkeypatch.setattr(program_module, "resolve", lambda handle: handle)
    monkeypatch.setattr(type(graph._cudnn()), "workspace_size", lambda self, plan: 1024)
    return graph._cudnn()


class Fake(torch.Tensor):
    """A tensor that reports a CUDA device."""

    lies_on = 0

    def get_device(self) -> int:
        return self.lies_on

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return torch.device("cuda", self.lies_on) if self.lies_on >= 0 else torch.device("cpu")


def fake(device: int = 0, size: int = 8192) -> Fake:
    made = torch.zeros(size, dtype=torch.uint8).as_subclass(Fake)
    made.lies_on = device
    return made


@pytest.mark.parametrize(
    ("change", "workspace", "message"),
    [
        ({1: None}, fake(), r"execute: tensor 'a' \(uid 1\): got no data"),
        (
            {1: fake(1)},
            fake(),
            r"tensor 'a' \(uid 1\): got a tensor on cuda:1; allowed: cuda:0, the device of the handle",
        ),
        ({2: fake(-1)}, fake(), r"tensor 'b' \(uid 2\): got a tensor on cpu; allowed: cuda:0.*backend='reference'"),
        ({3: fake(0)}, fake(), r"tensor 'f' \(uid 3\): got a tensor on cuda:0; allowed: the CPU"),
        ({}, None, "workspace: got 0 bytes; allowed: 1024 bytes or more"),
        ({}, fake(size=1023), "workspace: got 1023 bytes; allowed: 1024 bytes or more"),
        ({}, fake(-1), "workspace: got a tensor on cpu; allowed: cuda:0"),
        ({}, fake(1), "workspace: got a tensor on cuda:1; allowed: cuda:0"),
    ],
)
def test_execute_with_cudnn(program: Any, change: dict[int, Any], workspace: Any, message: str) -> None:
    pack = {1: fake(), 2: fake(), 3: fake(-1), 4: fake()} | change
    with pytest.raises(ValueError, match=message):
        program.execute(pack, workspace, Elsewhere())


def test_outputs_with_gaps_and_interleaved_are_allowed() -> None:
    graph = reference_graph(HALF)
    for stride in ([32, 2], [1, 4], [3, 13]):
        graph.relu(graph.tensor(**half(4, 8))).set_output(True).set_stride(stride)
    graph.relu(graph.tensor(**half(2, 3))).set_output(True).set_stride([3, 2])  # 0 2 4 3 5 7
    graph.validate()


def test_an_output_in_memory_of_another_graph_is_an_input() -> None:
    other = reference_graph(HALF)
    made = other.neg(other.tensor(**half(4, 8))).set_output(True)
    other.validate()
    graph = reference_graph(HALF)
    graph.relu(made).set_output(True)
    graph.validate()


@pytest.mark.parametrize("modes", ["A", cudnn.heur_mode.A, ["A"], [0], 3])
@pytest.mark.parametrize("step", ["build", "create_execution_plans"])
def test_modes(modes: Any, step: str) -> None:
    graph, _, _ = doubled()
    with pytest.raises(
        TypeError, match=f"modes of {step}: got .*; allowed: a list of cudnn.heur_mode. To fix it, pass"
    ):
        getattr(graph, step)(modes)


@pytest.mark.parametrize(
    ("setter", "arguments", "error", "message"),
    [
        ("set_uid", ("a",), TypeError, "uid: got 'a'; allowed: an integer"),
        ("set_uid", (1.0,), TypeError, "uid: got 1.0"),
        ("set_uid", (-1,), ValueError, r"uid: got -1; allowed: 0 to 2\^63 - 1"),
        ("set_uid", (2**64,), ValueError, "uid: got 18446744073709551616"),
        ("set_dim", ("ab",), TypeError, "dim: got 'ab'; allowed: a sequence of integers"),
        ("set_dim", (4,), TypeError, "dim: got 4"),
        ("set_dim", ([2.5],), TypeError, r"dim: got \[2.5\]"),
        ("set_stride", (None,), TypeError, "stride: got None"),
        ("set_alignment", ("x",), TypeError, "alignment: got 'x'"),
        ("set_alignment", (12,), ValueError, "alignment: got 12; allowed: a power of two"),
        ("set_vector_count_and_dimension", ("x", 1), TypeError, "count: got 'x'"),
        ("set_ragged_offset", (torch.zeros(2),), TypeError, "ragged_offset: got Tensor; allowed: a cudnn.tensor"),
        ("set_ragged_offset_multiplier", ("x",), TypeError, "multiplier: got 'x'"),
        ("set_reordering_type", ("x",), ValueError, "reordering_type: got 'x'; allowed: tensor_reordering.NONE"),
    ],
)
def test_setters(setter: str, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"tensor 'x': {message}.*To fix it"):
        getattr(cudnn.tensor(name="x"), setter)(*arguments)


@pytest.mark.parametrize("uid", ["a", 2**64, -2])
def test_uids_of_new_tensors(uid: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="tensor 'x': uid: got "):
        reference_graph().tensor([2], [1], name="x", uid=uid)
