"""``serialize`` and ``deserialize``: for the reference executor, for plans of cuDNN, and for descriptions alone."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import cudnn
from cudnn.pygraph import graph as graph_module
from cudnn.pygraph.lowering import Alias, Bindings, Scratch
from cudnn.pygraph.node import REGISTRY, Node
from support.graphs import FLOAT, MODES, planned_graph, reference_graph
from support.selection import FULL

ROOT = Path(__file__).parents[2]


def scaled_product(graph: cudnn.pygraph) -> None:
    """uid 0 @ uid 1, biased with uid 2, times a constant, to uid 3; uid 4 is a factor passed by value."""
    a = graph.tensor(dim=[2, 64, 128], stride=[64 * 128, 128, 1], name="a", uid=0)
    b = graph.tensor(dim=[2, 128, 32], stride=[128 * 32, 32, 1], name="b", uid=1)
    d = graph.tensor(dim=[1, 64, 32], stride=[64 * 32, 32, 1], name="d", uid=2)
    factor = graph.tensor(dim=[1, 1, 1], stride=[1, 1, 1], data_type=FLOAT, is_pass_by_value=True, name="f", uid=4)
    c = graph.bias(graph.matmul(a, b, name="mm"), d, name="shift")
    c = graph.relu(c, negative_slope=0.25, name="leak")
    graph.mul(graph.mul(c, factor, name="times"), graph.tensor_scalar(0.5), name="halve").set_output(True).set_uid(3)


def check(graph: cudnn.pygraph) -> None:
    a, b, d = torch.randn(2, 64, 128), torch.randn(2, 128, 32), torch.randn(1, 64, 32)
    out = torch.full((2, 64, 32), float("nan"))
    graph.execute({0: a, 1: b, 2: d, 3: out, 4: torch.full((1, 1, 1), 3.0)})
    wanted = torch.nn.functional.leaky_relu(a @ b + d, 0.25) * 1.5
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


def built() -> cudnn.pygraph:
    graph = reference_graph()
    scaled_product(graph)
    graph.build(MODES)
    return graph


def restored(*arguments: Any, **options: Any) -> cudnn.pygraph:
    graph = cudnn.pygraph(**options)
    graph.deserialize(*arguments)
    return graph


# The reference executor.
def test_round_trip() -> None:
    graph = built()
    data = graph.serialize()
    assert isinstance(data, bytes)
    again = restored(data, backend="reference")
    assert repr(again) == repr(graph)
    assert again.key() == graph.key()
    assert again.get_workspace_size() == 0
    assert again.get_execution_plan_count() == 1
    check(again)
    assert again.serialize() == data


def test_what_may_be_passed_back() -> None:
    data = built().serialize()
    for form in (list(data), bytearray(data), tuple(data)):
        check(restored(form, backend="reference"))


def test_with_a_handle() -> None:
    handle = cudnn.create_handle()
    check(restored(handle, built().serialize(), backend="reference"))
    cudnn.destroy_handle(handle)
    with pytest.raises(ValueError, match="a destroyed handle"):
        restored(handle, built().serialize())


def test_tensors_of_the_original_execute_the_restored_graph() -> None:
    graph = reference_graph()
    x = graph.tensor(dim=[2, 3], stride=[3, 1])
    y = graph.relu(x).set_output(True)
    graph.build(MODES)
    data, out = torch.randn(2, 3), torch.empty(2, 3)
    restored(graph.serialize(), backend="reference").execute({x: data, y: out})
    torch.testing.assert_close(out, torch.relu(data))


def test_another_process_reads_it(tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(built().serialize())
    code = (
        "import sys, torch, cudnn\n"
        "graph = cudnn.pygraph(backend='reference')\n"
        "graph.deserialize(open(sys.argv[1], 'rb').read())\n"
        "ones = [torch.ones(2, 64, 128), torch.ones(2, 128, 32), torch.ones(1, 64, 32)]\n"
        "out = torch.empty(2, 64, 32)\n"
        "graph.execute({0: ones[0], 1: ones[1], 2: ones[2], 3: out, 4: torch.full((1, 1, 1), 2.0)})\n"
        "assert bool((out == 129).all()), out\n"
        "print(graph.key())\n"
    )
    paths = f"{ROOT / 'python'}:{ROOT / 'kernels'}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "graph")],
        env={"PYTHONPATH": paths, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == built().key()


# Descriptions.
def test_json_text_is_a_description_to_build() -> None:
    graph = built()
    for text in (repr(graph), graph.serialize().decode()):
        again = restored(text, backend="reference")
        assert again.get_execution_plan_count() == 0
        with pytest.raises(RuntimeError, match="call build"):
            again.execute({})
        again.build(MODES)
        check(again)


def test_a_graph_without_a_plan() -> None:
    graph = reference_graph()
    scaled_product(graph)
    again = restored(graph.serialize(), backend="reference")
    assert again.get_execution_plan_count() == 0
    again.build(MODES)
    check(again)


def test_enumerations_constants_and_ragged_offsets_survive() -> None:
    graph = reference_graph()
    offsets = graph.tensor(dim=[3, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32, name="offsets")
    x = graph.tensor(dim=[2, 4, 8, 8], stride=[256, 1, 32, 4], ragged_offset=offsets, name="x")
    y = graph.reduction(x, cudnn.reduction_mode.AMAX, name="amax").set_dim([1, 1, 1, 1]).set_output(True)
    graph.add(y, graph.tensor_scalar(1 << 40), name="plus").set_output(True)
    graph.validate()
    again = restored(repr(graph), backend="reference")
    assert repr(again) == repr(graph)
    node = again.nodes[0]
    assert node.attributes()["mode"] == {"enum": "reduction_mode", "name": "AMAX"}
    assert node.inputs["X"].get_ragged_offset().get_name() == "offsets"
    assert again.nodes[1].inputs["IN_1"].value == 1 << 40


EXAMPLES: dict[Any, Any] = {  # that are no defaults
    bool: True,
    int: 3,
    int | None: 3,
    float: 0.25,
    float | None: 0.25,
    str: "CMP_LT",
    list[int]: [2, 3],
    list[list[int | None]]: [[1, None, 2]],
}


@pytest.mark.parametrize("operation", REGISTRY)
def test_every_attribute_of_every_operation_survives(operation: str) -> None:
    """Functions of scores apart, which are not restored."""
    kind = REGISTRY[operation]
    hints = get_type_hints(kind)
    own = {field.name for field in dataclasses.fields(kind) if field.init} - {f.name for f in dataclasses.fields(Node)}
    given = {
        name: [*hints[name]][-1] if isinstance(hints[name], type(enum.Enum)) else EXAMPLES[hints[name]]
        for name in own - {"score_mod", "score_mod_bprop"}
    }
    node = kind(name="x", compute_data_type=FLOAT, inputs={}, outputs={}, **given)
    described = json.loads(json.dumps({**node.describe(), "inputs": {}, "outputs": {}}))
    again = Node.from_description(described, {})
    assert again.describe() == node.describe()
    assert {name: getattr(again, name) for name in given} == given


# Data that are no graph.
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"{}",
        [1, 2, 3],
        [300, 1],
        "no json",
        b'{"format": 2}',
        b'{"context": {}, "nodes": [], "tensors": []}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        7,
        None,
        ["a"],
        "{",
        object(),
    ],
)
def test_what_is_no_graph(data: Any) -> None:
    with pytest.raises(ValueError, match=r"deserialize: data: got .*To fix it, serialize the graph again"):
        restored(data)


def test_truncated_data() -> None:
    data = built().serialize()
    for length in (1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="deserialize: data"):
            restored(data[:length])


def test_a_format_of_the_future() -> None:
    document = json.loads(built().serialize())
    document["format"] = 3
    with pytest.raises(ValueError, match="deserialize: format: got 3; allowed: 2"):
        restored(json.dumps(document).encode())


# Plans of cuDNN.
def test_plans_travel(h200: Any) -> None:
    """A plan for a device that is not there; without a GPU the reference executor runs what is restored."""
    graph = planned_graph(h200, io=FLOAT)
    scaled_product(graph)
    graph.build(MODES)
    data = graph.serialize()
    document = json.loads(data)
    assert json.loads(document["plan"])
    assert document["cudnn"] == cudnn.backend_version()
    bindings = Bindings.from_json(document["bindings"])
    assert bindings.user == [0, 1, 2, 3, 4]
    assert [kind for kind, _ in bindings.constants.values()] == ["FLOAT"]
    check(restored(data, backend="reference"))


def test_attention_travels_with_its_views_and_constants(h200: Any) -> None:
    """Ahead of time: a description and a plan for an H200; the restored graph is executed by uid."""
    graph = planned_graph(h200)
    dims, strides = [2, 4, 64, 32], [4 * 64 * 32, 64 * 32, 32, 1]
    q, k, v = (graph.tensor(dims, strides, uid=uid) for uid in (1, 2, 3))
    composite = cudnn.attention_implementation.COMPOSITE
    o, _ = graph.sdpa(q, k, v, attn_scale=0.3, is_inference=True, use_causal_mask=True, implementation=composite)
    o.set_output(True).set_uid(4)
    graph.build(MODES)
    data = graph.serialize()
    document = json.loads(data)
    bindings = Bindings.from_json(document["bindings"])
    assert bindings == graph._cudnn().bindings
    assert [alias.source for alias in bindings.aliases.values()] == [2]
    assert pytest.approx(0.3) in [value for _, value in bindings.constants.values()]
    assert document["tag"] == graph.get_plan_name()
    assert document["behavior_notes"] == [note.name for note in graph.get_behavior_notes()]
    half = [torch.randn(dims).half() for _ in range(3)]
    out = torch.empty(dims, dtype=torch.float16)
    restored(data, backend="reference").execute({1: half[0], 2: half[1], 3: half[2], 4: out})
    wanted = torch.nn.functional.scaled_dot_product_attention(
        half[0].float(), half[1].float(), half[2].float(), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(out.float(), wanted, atol=1e-2, rtol=1e-2)


def test_bindings_survive_json() -> None:
    bindings = Bindings(
        user=[1, 2],
        constants={3: ("FLOAT", 0.1)},
        scratch=[Scratch(4, 0, [1, 2]), Scratch(5, 256)],
        aliases={6: Alias(1, 64), 7: Alias(2, 0, [1, 0])},
        hidden=[1],
        workspace_size=512,
    )
    again = Bindings.from_json(json.loads(json.dumps(bindings.to_json())))
    assert again == Bindings(**vars(bindings))


def test_what_the_reference_ran_is_built_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which executor a machine has is decided by the handle; here the choice is made to fall on cuDNN."""
    data = built().serialize()
    modes: list[Any] = []
    monkeypatch.setattr(graph_module.pygraph, "_runs_on_reference", lambda self: False)
    monkeypatch.setattr(graph_module.pygraph, "build", lambda self, given: modes.extend(given))
    with caplog.at_level(logging.INFO, "cudnn"):
        restored(data)
    assert modes == MODES
    assert "serialized without a plan of cuDNN" in caplog.text


# Data from anywhere.
def attention() -> cudnn.pygraph:
    graph = reference_graph()
    q, k, v = (graph.tensor([2, 4, 8, 16], [512, 128, 16, 1]) for _ in range(3))
    graph.sdpa(q, k, v, attn_scale=0.25, is_inference=True, use_causal_mask=True)[0].set_output(True)
    graph.build(MODES)
    return graph


def pieces() -> cudnn.pygraph:
    """Not built: a description of operations with attributes of every kind."""
    graph = reference_graph()
    x, w = graph.tensor([2, 4, 8, 8], [256, 1, 32, 4]), graph.tensor([4, 4, 3, 3], [36, 1, 12, 4])
    y = graph.conv_fprop(x, w, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    y = graph.relu(graph.slice(y, [slice(0, 1)]), upper_clip=3.0)
    graph.reduction(y, cudnn.reduction_mode.MAX).set_dim([1, 4, 1, 1]).set_output(True)
    return graph


def called() -> cudnn.Graph:
    with cudnn.Graph(backend="reference") as graph:
        graph.mul(graph.matmul(torch.zeros(4, 8), torch.zeros(8, 3)), torch.full((1, 1), 2.0)).set_output(True)
    return graph


POOL: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**63,
    -(2**63),
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "ZERO_",
    "LOAD",
    "eval",
    "__builtins__",
    "HALF",
    "NOT_SET",
    [],
    [1],
    [[1, 2]],
    ["a"],
    {},
    {"a": 1},
    {"enum": "__builtins__", "name": "eval"},
    {"enum": "data_type", "name": "HALF"},
    {"enum": "enum", "name": "IntEnum"},
    {"enum": "Enumeration", "name": "mro"},
]


def mutate(document: Any, draw: random.Random) -> None:
    """Changes, drops, adds or doubles one entry somewhere in a JSON structure."""
    entries_: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        container = stack.pop()
        entries = list(container.items() if isinstance(container, dict) else enumerate(container))
        entries_ += [(container, key) for key, _ in entries]
        stack += [value for _, value in entries if isinstance(value, (dict, list))]
    container, key = draw.choice(entries_)
    change = draw.choice(["replace", "replace", "drop", "swap", "double"])
    if change == "replace":
        container[key] = copy.deepcopy(draw.choice(POOL))
    elif change == "drop":
        del container[key]
    elif change == "swap":
        other, other_key = draw.choice(entries_)
        container[key] = copy.deepcopy(other[other_key])
    elif isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[str(draw.choice(POOL))] = copy.deepcopy(container[key])


def restore(data: bytes, wrapped: bool) -> None:
    """Restores and, if that succeeds, inspects the graph; allows only ValueErrors with a hint."""
    message = "To fix it"
    # A cudnn.Graph builds a sound description at once, which may be refused like any other.
    refused = (RuntimeError, NotImplementedError, cudnn.cudnnGraphNotSupportedError) if wrapped else ()
    try:
        graph = cudnn.Graph(backend="reference") if wrapped else cudnn.pygraph(backend="reference")
        graph.deserialize(data)
        repr(graph)
    except (ValueError, *refused) as error:
        message = str(error)
    assert "To fix it" in message


@pytest.mark.parametrize("build", [built, attention, pieces, called])
def test_mutated_structures(build: Any) -> None:
    draw, data = random.Random(build.__name__), build().serialize()
    for _ in range(1250 if FULL else 400):
        document = json.loads(data)
        for _ in range(draw.choice([1, 1, 2, 5])):
            mutate(document, draw)
        restore(json.dumps(document).encode(), build is called)


def test_mutated_bytes() -> None:
    draw, data = random.Random(0), built().serialize()
    for _ in range(1000):
        mutated = bytearray(data)
        for _ in range(draw.choice([1, 1, 3])):
            at = draw.randrange(len(mutated))
            end = at + draw.choice([0, 1, 1, 8, len(mutated)])
            mutated[at:end] = draw.randbytes(draw.choice([0, 1, 1, 8]))
        restore(bytes(mutated), wrapped=False)


@pytest.mark.parametrize("mode", ["ZERO_", "LOAD", "__CLASS__", "SAVE"])
def test_names_of_torch_functions_are_no_modes(mode: str) -> None:
    graph = reference_graph()
    graph.relu(graph.tensor([2, 3], [3, 1])).set_output(True)
    graph.build(MODES)
    data = graph.serialize().replace(b"RELU_FWD", mode.encode())
    with pytest.raises(ValueError, match=f"pointwise: mode: got '{mode}'; allowed: "):
        cudnn.pygraph(backend="reference").deserialize(data)


@pytest.mark.parametrize("named", [("__builtins__", "eval"), ("enum", "IntEnum"), ("Enumeration", "mro")])
def test_only_enumerations_are_named(named: tuple[str, str]) -> None:
    data = built_reduction().replace(b'"reduction_mode"', json.dumps(named[0]).encode())
    with pytest.raises(ValueError, match=f"no graph .KeyError: '{named[0]}'"):
        cudnn.pygraph(backend="reference").deserialize(data.replace(b'"MAX"', json.dumps(named[1]).encode()))


def built_reduction() -> bytes:
    graph = reference_graph()
    x = graph.tensor([2, 3], [3, 1])
    graph.reduction(x, cudnn.reduction_mode.MAX).set_dim([2, 1]).set_output(True)
    graph.build(MODES)
    return graph.serialize()
