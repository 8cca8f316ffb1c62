"""``graph.explain()``: what it says of graphs in every state, agrees with the graphs and with cuDNN; the drawings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cudnn
from cudnn.backend import library
from cudnn.backend.messages import root_causes
from cudnn.backend.plan import ExecutionPlan
from cudnn.errors import CudnnError, CudnnLibraryError
from cudnn.pygraph.explain import Explanation
from cudnn.pygraph.explain.layouts import layout
from support.graphs import FLOAT, HALF, MODES, configurations, packed, planned_graph, reference_graph

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK
SVG = "{http://www.w3.org/2000/svg}"


def tensor(graph: Any, name: str, *dim: int, **rest: Any) -> Any:
    return graph.tensor(list(dim), packed(*dim), name=name, **rest)


def product(graph: Any, activation: str = "gelu") -> Any:
    """A matrix product and an activation."""
    made = graph.matmul(tensor(graph, "a", 4, 64, 128), tensor(graph, "b", 4, 128, 96), name="mm")
    return getattr(graph, activation)(made, name="act")


def planned(device: Any) -> cudnn.pygraph:
    """A graph of ``product`` for cuDNN."""
    graph = planned_graph(device)
    product(graph).set_output(True)
    return graph


def two_products(graph: Any) -> None:
    """What no engine fuses: a second product of the first one's FLOAT result."""
    graph.matmul(product(graph), tensor(graph, "w", 4, 96, 32), name="again").set_output(True)


def refused_by_cudnn(graph: cudnn.pygraph) -> cudnn.cudnnGraphNotSupportedError:
    graph.validate()
    graph.build_operation_graph()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError) as caught:
        graph.create_execution_plans(MODES)
    return caught.value


# Descriptions.
CUBE = torch.empty(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (CUBE, "row-major"),
        (CUBE.to(memory_format=torch.channels_last), "NHWC"),
        (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), "NDHWC"),
        (torch.empty(2, 5, 3).mT, "column-major"),
        (torch.empty(2, 4, 3, 5).transpose(1, 2), "BSHD"),
        (torch.empty(2, 3, 4, 8)[..., :5], "row-major with gaps"),
        (torch.empty(3, 1).expand(3, 7), "broadcast"),
        (CUBE.permute(3, 0, 1, 2), ""),
        (torch.empty(1, 7, 1, 1), "row-major"),
    ],
)
def test_layout_names(data: torch.Tensor, name: str) -> None:
    assert layout(data.shape, data.stride()) == name


def test_a_description_is_explained_and_stays_as_it_is() -> None:
    graph = reference_graph(io=HALF)
    out = product(graph).set_output(True)
    before = repr(graph)
    explained = graph.explain()
    assert repr(graph) == before
    assert out.get_dim() == []
    assert explained.state == "described"
    assert explained.plan is None
    assert [node.label for node in explained.nodes] == ["mm (matmul)", "act (gelu)"]
    assert [(t.name, t.role, t.data_type) for t in explained.tensors] == [
        ("a", "input", "HALF"),
        ("b", "input", "HALF"),
        ("mm::C", "virtual", "FLOAT"),
        ("act::OUT_0", "output", "HALF"),
    ]
    assert explained.tensors[3].dim == (4, 64, 96)
    assert [explained.tensors[i].name for i in explained.nodes[0].inputs.values()] == ["a", "b"]
    text = str(explained)
    for part in (
        "described; no plan yet",
        "reference executor",
        "IN_0='mm::C' -> OUT_0='act::OUT_0'",
        "dim [4, 64, 96]",
    ):
        assert part in text


def test_scalars_constants_and_offsets() -> None:
    graph = reference_graph()
    x, offsets = tensor(graph, "x", 2, 3, 4, 5), tensor(graph, "offsets", 3, 1, 1, 1, data_type=cudnn.data_type.INT32)
    x.set_ragged_offset(offsets).set_alignment(4)
    half = graph.tensor_scalar(0.5)
    y = graph.mul(x, half, name="half")
    graph.add(y, graph.tensor_like(torch.ones(1, 1, 1, 1)), name="sum").set_output(True)
    explained = graph.explain()
    found = {t.name: t for t in explained.tensors}
    assert found["half::IN_1"].value == 0.5
    assert found["half::IN_1"].role == found["sum::IN_1"].role == "scalar"
    assert found["sum::IN_1"].value is None
    assert found["x"].notes == ("ragged by 'offsets'", "aligned to 4 bytes")
    assert "constant 0.5" in str(explained)


def test_the_reference_executor_is_named() -> None:
    graph = reference_graph()
    product(graph).set_output(True)
    graph.build(MODES)
    explained = graph.explain()
    assert explained.state == "built"
    assert explained.plan is not None
    assert explained.plan.tag == "reference"
    assert "computes node by node, without fusion: mm (matmul), act (gelu)" in explained.text()


# Plans.
@pytest.fixture(scope="module")
def fused(h200: Any) -> tuple[cudnn.pygraph, Explanation]:
    graph = planned(h200)
    graph.build(MODES)
    return graph, graph.explain()


@pytest.mark.deviceless_919
def test_the_plan_and_its_kernels(fused: tuple[cudnn.pygraph, Explanation]) -> None:
    graph, explained = fused
    plan = explained.plan
    assert explained.state == "built"
    assert plan is not None
    assert plan.tag == graph.get_plan_name()
    assert plan.workspace == graph.get_workspace_size()
    assert plan.behavior_notes == tuple(note.name for note in graph.get_behavior_notes())
    assert "TENSOR_CORE" in plan.numerical_notes
    assert set(plan.knobs) <= set(cudnn.knob_type.__members__)
    assert [name for name in plan.kernels if "matmul" in name.lower()]  # one kernel of cuDNN for both nodes
    names = {graph.get_plan_name_at_index(index) for index in range(graph.get_execution_plan_count())}
    assert set(explained.candidates) == names - {plan.tag}
    assert [[operation.kind for operation in node.operations or ()] for node in explained.nodes] == [
        ["MATMUL"],
        ["POINTWISE"],
    ]
    text = explained.text()
    assert f"plan {plan.tag}\n  fuses mm (matmul), act (gelu)\n" in text
    assert plan.kernels[0] in text


def test_before_the_build_cudnn_is_asked(h200: Any) -> None:
    graph = planned(h200)
    explained = graph.explain()
    assert (explained.state, explained.plan) == ("planned", None)
    assert graph.get_execution_plan_count() == 0
    assert len(explained.candidates) == configurations(graph)


def test_composites_and_views(h200: Any) -> None:
    graph = planned_graph(h200)
    names = ("q", "k", "v", "o", "dO")
    inputs = [tensor(graph, name, 1, 2, 128, 64) for name in names]
    gradients = graph.sdpa_backward(*inputs, tensor(graph, "stats", 1, 2, 128, 1, data_type=FLOAT), name="backward")
    for gradient in gradients:
        gradient.set_output(True)
    operations = graph.explain().nodes[0].operations or ()
    # S = Q K^T, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q.
    assert sum(operation.kind == "MATMUL" for operation in operations) == 5
    assert {operation.step for operation in operations if operation.kind == "REDUCTION"} == {"reduction"}

    graph = planned_graph(h200)
    upper = graph.slice(tensor(graph, "x", 4, 64, 64), [slice(2, 4), slice(0, 64), slice(0, 64)], name="upper")
    graph.matmul(upper.set_data_type(HALF), tensor(graph, "b", 2, 64, 32), name="mm").set_output(True)
    graph.build(MODES)
    explained = graph.explain()
    assert explained.nodes[0].operations == ()
    assert {t.name: t.role for t in explained.tensors}["upper::Y"] == "view"
    assert "fuses" not in explained.text()
    assert "runs mm (matmul)\n  runs as offsets into memory: upper (slice)" in explained.text()


def test_tensors_of_a_score_modifier_stay_as_they_are(h200: Any) -> None:
    graph = planned_graph(h200)
    shift = tensor(graph, "shift", 1, 1, 1, 64, data_type=FLOAT)

    def shifted(inner: Any, scores: Any) -> Any:
        return inner.add(scores, shift)

    q, k, v = (tensor(graph, name, 1, 2, 64, 64) for name in "qkv")
    o, _ = graph.sdpa(q, k, v, is_inference=True, score_mod=shifted, name="attention")
    o.set_output(True)
    explained = graph.explain()
    assert explained.state == "planned", explained
    assert "shift" in [found.name for found in explained.tensors]
    assert "score_mod=shifted" in explained.text()
    assert shift.get_uid() == q.get_uid() == 0
    graph.build(MODES)
    assert sorted({tensor.get_uid() for tensor in (q, k, v, shift, o)}) == [1, 2, 3, 4, 5]


def test_why_configurations_are_barred(h200: Any) -> None:
    graph = planned(h200)
    configurations(graph)
    first = graph.get_plan_name_at_index(0)
    graph.deselect_engines([first])
    graph.build_plans()
    explained = graph.explain()
    assert {plan.tag: plan.reason for plan in explained.refused}[first] == f"excluded by name ({first})"
    assert explained.plan is not None
    assert explained.plan.tag == graph.get_plan_name() != first
    graph = planned(h200)
    configurations(graph)
    graph.deselect_workspace_greater_than(-1)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"workspace, over the limit.*graph\.explain"):
        graph.check_support()
    explained = graph.explain()
    assert explained.state == "refused"
    assert len(explained.refused) == graph.get_execution_plan_count()
    assert "every one of the" in explained.reasons[0].rule
    assert "remove a restriction" in explained.reasons[0].cures[0]


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """cuDNN fails to build the configurations whose names are so."""
    build = ExecutionPlan.build

    def attempt(config: Any, **rest: Any) -> ExecutionPlan:
        if fails(config.tag):
            raise CudnnError("no kernel [today]", 5003, "CUDNN_STATUS_EXECUTION_FAILED")
        return build(config, **rest)

    monkeypatch.setattr(ExecutionPlan, "build", attempt)


def test_failed_builds_are_told(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planned(h200)
    configurations(graph)
    first = graph.get_plan_name_at_index(0)
    failing(monkeypatch, first.__eq__)
    graph.build_plans()
    explained = graph.explain()
    assert explained.plan is not None
    assert (explained.refused[0].tag, explained.refused[0].reason) == (first, "no kernel [today]")

    failing(monkeypatch, lambda tag: True)
    graph = planned(h200)
    with pytest.raises(
        cudnn.cudnnGraphNotSupportedError, match=r"graph 'test_graph' of mm \(matmul\), act \(gelu\): no"
    ):
        graph.build(MODES)
    explained = graph.explain()
    assert explained.state == "refused"
    assert [reason.nodes for reason in explained.reasons] == [(0,), (1,)]  # neither can be built alone
    assert all("no kernel [today]" in reason.message for reason in explained.reasons)


# Refusals of the nodes' own rules.
def test_all_faulty_nodes_are_named_and_only_they() -> None:
    graph = reference_graph()
    wrong = graph.matmul(tensor(graph, "a", 1, 2, 3), tensor(graph, "b", 1, 4, 5), name="mm")
    graph.relu(wrong, name="after").set_output(True)
    graph.exp(graph.tensor([3], [1, 1], name="e"), name="ex").set_output(True)
    explained = graph.explain()
    assert explained.state == "refused"
    assert [reason.nodes for reason in explained.reasons] == [(0,), (2,)]
    assert explained.reasons[0].rule.startswith("mm (matmul): A and B: got dim=[1, 2, 3]")
    assert explained.reasons[0].cures == ("correct one of the shapes",)
    assert [node.refused for node in explained.nodes] == [True, False, True]
    assert explained.tensors[3].dim == ()
    assert "dim unknown" in str(explained)
    assert "of unknown shape" in explained.svg()


def test_a_fault_of_the_whole_graph() -> None:
    graph = reference_graph()
    product(graph)
    (reason,) = graph.explain().reasons
    assert reason.nodes == ()
    assert "set_output(True)" in reason.cures[0]
    empty = reference_graph().explain()
    assert "one operation or more" in empty.reasons[0].rule
    assert "nodes\n" not in empty.text()
    assert "one operation or more" in "".join(ElementTree.fromstring(empty.svg()).itertext())


def test_a_rule_found_while_lowering_is_not_narrowed(h200: Any) -> None:
    graph = planned_graph(h200)
    o, _ = graph.sdpa(*(tensor(graph, name, 1, 2, 64, 64) for name in "qkv"), is_inference=True, name="attention")
    graph.relu(o, name="act").set_output(True)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="data type of O"):
        graph.build(MODES)
    (reason,) = graph.explain().reasons
    assert reason.nodes == (0,)
    assert "data type of O: got FLOAT with HALF" in reason.rule


def test_without_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise CudnnLibraryError("libcudnn is not here. To fix it, install it.")

    monkeypatch.setattr(library, "load", missing)
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="cudnn")
    product(graph).set_output(True)
    explained = graph.explain()
    assert [(reason.nodes, reason.cures) for reason in explained.reasons] == [((), ("install it",))]
    assert "cannot be loaded" in explained.executor


# Refusals of cuDNN.
@pytest.mark.deviceless_919
def test_the_smallest_refused_set_and_the_cuts(h200: Any) -> None:
    graph = planned_graph(h200)
    two_products(graph)
    message = str(refused_by_cudnn(graph))
    assert message.startswith("graph 'test_graph' of mm (matmul), act (gelu), again (matmul): cuDNN has no engine")
    assert message.endswith("call graph.explain().")
    (reason,) = graph.explain().reasons
    assert reason.nodes == (1, 2)
    assert "act (gelu) with again (matmul), and supports each alone; it supports the rest of the graph" in reason.rule
    assert reason.cures == (
        "build 2 graphs, with the tensors between them in memory: mm (matmul) + act (gelu); again (matmul)",
    )
    # The same, asked of cuDNN without explain().
    pair = planned_graph(h200)
    pair.matmul(pair.gelu(tensor(pair, "x", 4, 64, 96)), tensor(pair, "w", 4, 96, 32)).set_output(True)
    refused_by_cudnn(pair)
    for describe in (lambda graph: product(graph), lambda graph: graph.gelu(tensor(graph, "x", 4, 64, 96))):
        piece = planned_graph(h200)
        describe(piece).set_output(True)
        assert configurations(piece)


@pytest.mark.deviceless_919
def test_a_change_that_cudnn_accepts(h200: Any) -> None:
    graph = planned_graph(h200, compute=HALF)
    product(graph, "relu").set_output(True)
    refused_by_cudnn(graph)
    (reason,) = graph.explain().reasons
    assert reason.nodes == (1,)
    assert reason.rule == "cuDNN refuses act (relu), also in a separate graph; it supports the rest of the graph."
    assert reason.cures[0] == "use compute_data_type=FLOAT in this node: cuDNN then builds a plan of the graph"
    graph.nodes[1].compute_data_type = FLOAT
    graph.build(MODES)
    assert graph.get_plan_name().startswith("eng")


def test_two_faults_are_two_reasons(h200: Any) -> None:
    graph = planned_graph(h200, compute=HALF)
    graph.tanh(product(graph, "relu"), name="last").set_output(True)
    refused_by_cudnn(graph)
    reasons = graph.explain().reasons
    assert sorted(reason.nodes for reason in reasons) == [(1,), (2,)]
    for reason in reasons:
        cure = (
            "use compute_data_type=FLOAT in this node: cuDNN then builds a plan of this node, though not of the graph"
        )
        assert any(text.startswith(cure) for text in reason.cures)


def test_parts_that_have_nothing_in_common(h200: Any) -> None:
    graph = planned(h200)
    x, scale = tensor(graph, "x", 8, 64, 1, 1), tensor(graph, "scale", 1, 64, 1, 1, data_type=FLOAT)
    epsilon = graph.tensor_like(torch.full((1, 1, 1, 1), 1e-5))
    y, _ = graph.rmsnorm(cudnn.norm_forward_phase.INFERENCE, x, scale, epsilon=epsilon, name="norm")
    y.set_output(True)
    (reason,) = graph.explain().reasons
    assert reason.nodes == (0, 1, 2)
    assert "supports its 2 unconnected parts, each alone" in reason.rule
    assert reason.cures == ("build a graph of each: mm (matmul) + act (gelu); norm (rmsnorm)",)


def test_a_failure_that_is_over(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = planned(h200)
    configurations(graph)
    with monkeypatch.context() as patch:
        failing(patch, lambda tag: True)
        with pytest.raises(cudnn.cudnnGraphNotSupportedError):
            graph.build_plans()
    (reason,) = graph.explain().reasons
    assert reason.rule == "cuDNN builds no plan of this graph (heuristic modes A, FALLBACK)"
    assert reason.cures == ("call the failed step again: cuDNN supports the same graph now",)


def test_no_change_helps(h200: Any) -> None:
    if cudnn.backend_version() < 92200:
        pytest.skip("cuDNN has the operation from 9.22 on")
    graph = planned_graph(h200)
    graph.transpose(tensor(graph, "x", 1, 64, 32), [0, 2, 1], name="turn").set_output(True)
    refused_by_cudnn(graph)
    (reason,) = graph.explain().reasons
    assert "backend='reference'" in reason.cures[0]


def test_another_heuristic_mode_is_a_cure(h200: Any) -> None:
    if cudnn.backend_version() < 92100:
        pytest.skip("before 9.21 attention is a pattern that FALLBACK has engines for")
    graph = planned_graph(h200)
    o, _ = graph.sdpa(*(tensor(graph, name, 1, 2, 64, 64) for name in "qkv"), is_inference=True, name="attention")
    o.set_output(True)
    graph.validate()
    graph.build_operation_graph()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        graph.create_execution_plans([FALLBACK])
    (reason,) = graph.explain().reasons
    assert "heuristic modes FALLBACK" in reason.rule
    assert "ask these heuristic modes too: A, B" in reason.cures[0]
    graph.build([A])


def test_minimizing_can_be_left_out(h200: Any) -> None:
    graph = planned_graph(h200)
    two_products(graph)
    error = refused_by_cudnn(graph)
    (reason,) = graph.explain(minimize=False).reasons
    with pytest.warns(DeprecationWarning, match="use minimize"):
        assert graph.explain(narrow=False).reasons == [reason]
    assert reason.nodes == ()
    assert "heuristic modes A, FALLBACK" in reason.rule
    assert "heuristics mode A: engine" in error.detail


def test_root_causes() -> None:
    chain = " Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: check() Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: f()"

    def engine(number: int, status: str, reason: str) -> str:
        knobs = '"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_STAGES":-1}'
        return f'{{"engineId":{number},{knobs}}} Warning: CUDNN_STATUS_{status}; Reason: {reason}{chain} '

    text = engine(4, "A", "types differ. at: a != b") + engine(7, "A", "types differ at: a != b") + engine(4, "B", "x")
    assert root_causes(text) == "engines 4, 7: CUDNN_STATUS_A: types differ; engine 4: CUDNN_STATUS_B: x"
    other = engine(9, "NOT_SUPPORTED_ARCH_MISMATCH", "Blackwell only")
    assert root_causes(other + engine(4, "B", "x")) == "engine 4: CUDNN_STATUS_B: x"
    assert "Blackwell only" in root_causes(other)
    cut = engine(4, "B", "long cause") + engine(4, "B", "long cause").split(" cause")[0]
    assert root_causes(cut) == "engine 4: CUDNN_STATUS_B: long cause"
    assert root_causes("Error: CUDNN_STATUS_C; Reason: k at: line 3" + chain) == "CUDNN_STATUS_C: k"
    assert root_causes("nothing known") == "nothing known"


# The wrapper.
def test_the_wrapper_explains_also_what_it_could_not_build(h200: Any) -> None:
    good = cudnn.Graph(io_data_type=FLOAT, backend="reference")
    with good:
        good.relu(torch.ones(2, 3), name="act")
    assert good.explain().state == "built"
    bad = cudnn.Graph(io_data_type=HALF, compute_data_type=HALF, device_property=h200)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"graph\.explain"), bad:
        product(bad, "relu").set_output(True)
    assert bad.explain().reasons[0].nodes == (1,)
    with pytest.raises(RuntimeError, match="a graph that was not built"):
        cudnn.Graph().explain()


# Drawings.
def dense() -> Explanation:
    """Arrows over several layers, one tensor in two ports, names that need escapes, all kinds of tensors."""
    graph = reference_graph()
    x = tensor(graph, 'x "<&>" [y]', 2, 3)
    skip = graph.exp(x, name="first")
    y = graph.mul(graph.sigmoid(skip, name="second"), graph.tensor_scalar(2.0).set_dim([1, 1]).set_stride([1, 1]))
    y = graph.add(y, skip, name="third")
    graph.mul(y, y, name="square").set_output(True)
    graph.max(y, x, name="last").set_output(True)
    return graph.explain()


def boxes(explained: Explanation) -> list[tuple[float, float, float, float]]:
    """Left, top, right, bottom of the boxes in the drawing, without the legend's."""
    root = ElementTree.fromstring(explained.svg())
    rectangles = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class")]
    found: list[tuple[float, float, float, float]] = []
    for rect in rectangles[: len(explained.nodes) + len(explained.tensors)]:
        x, y, width, height = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    assert all(box[0] >= 0 and box[2] <= float(root.get("width", "nan")) for box in found)
    assert all(box[1] >= 0 and box[3] <= float(root.get("height", "nan")) for box in found)
    return found


def overlapping(boxes: list[tuple[float, float, float, float]]) -> int:
    return sum(
        a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for i, a in enumerate(boxes) for b in boxes[:i]
    )


def test_svg() -> None:
    explained = dense()
    root = ElementTree.fromstring(explained.svg())
    assert root.tag == f"{SVG}svg"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    for name in [*(node.label for node in explained.nodes), *(t.name for t in explained.tensors)]:
        assert name in texts
    ports = sum(len(node.inputs) + len(node.outputs) for node in explained.nodes)
    assert len([path for path in root.iter(f"{SVG}path") if path.get("marker-end")]) == ports
    assert overlapping(boxes(explained)) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12))
def test_boxes_never_overlap(sources: list[tuple[int, int]]) -> None:
    graph = reference_graph()
    tensors = [tensor(graph, "x", 2, 3), tensor(graph, "another input", 2, 3)]
    for first, second in sources:
        tensors.append(graph.add(tensors[first % len(tensors)], tensors[second % len(tensors)]))
    tensors[-1].set_output(True)
    found = boxes(graph.explain())
    assert len(found) >= 2 * len(sources)
    assert overlapping(found) == 0


def test_drawings_of_refusals() -> None:
    graph = reference_graph()
    graph.matmul(tensor(graph, "a", 1, 2, 3), tensor(graph, "b", 1, 4, 5), name="mm").set_output(True)
    explained = graph.explain()
    root = ElementTree.fromstring(explained.svg())
    assert [rect.get("class") for rect in root.iter(f"{SVG}rect")].count("refused") == 2  # and in the legend
    caption = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    assert "correct one of the shapes" in caption


def test_notebooks_show_it() -> None:
    explained = dense()
    shown = explained._repr_mimebundle_()
    assert shown["text/plain"] == str(explained)
    assert shown["image/svg+xml"] == explained._repr_svg_()
