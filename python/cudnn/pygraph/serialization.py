"""Graphs as JSON: the description of nodes and tensors, and the plan that was built for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn.backend import library
from cudnn.backend.plan import Origin
from cudnn.enums import behavior_note, data_type, numerical_note
from cudnn.errors import refusal
from cudnn.pygraph.lowering import Bindings
from cudnn.pygraph.node import Context, Node
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.program import CudnnProgram

FORMAT = 2


class Restored(NamedTuple):
    """What a serialised graph holds."""

    name: str
    context: Context
    nodes: list[Node]
    bindings: Bindings
    on_cpu: bool
    override_shape: bool
    plan: str | None  # cuDNN's JSON; "" where only the reference executor was built; None where nothing was
    origin: Origin


def describe(name: str, context: Context, nodes: Sequence[Node], on_cpu: bool = False) -> dict[str, Any]:
    """A graph as JSON-able data. Tensors without a uid get a negative number, so that nodes can point at them."""
    tensors: dict[int, dict[str, Any]] = {}
    numbers: dict[int, int] = {}

    def number(tensor: Tensor) -> int:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = -1 - len(numbers) if tensor.uid is None else tensor.uid
            fields = tensor.describe()
            fields["uid"] = numbers[id(tensor)]
            if tensor.ragged_offset is not None:
                fields["ragged_offset"] = number(tensor.ragged_offset)
            tensors[numbers[id(tensor)]] = fields
        return numbers[id(tensor)]

    described = [
        {
            **node.describe(),
            "inputs": {port: number(tensor) for port, tensor in node.inputs.items()},
            "outputs": {port: number(tensor) for port, tensor in node.outputs.items()},
        }
        for node in nodes
    ]
    return {
        "context": {
            "name": name,
            "io_data_type": context.io_data_type.name,
            "intermediate_data_type": context.intermediate_data_type.name,
            "compute_data_type": context.compute_data_type.name,
            "sm_version": context.sm_version,
            **({"on_cpu": True} if on_cpu else {}),
        },
        "nodes": described,
        "tensors": list(tensors.values()),
    }


def dump(description: dict[str, Any], program: CudnnProgram | None, planned: bool) -> bytes:
    """A description and the plan that runs it, as UTF-8 JSON."""
    document: dict[str, Any] = {"format": FORMAT, **description}
    if planned:
        document["plan"] = ""
    if program is not None and program.plan is not None:
        document["plan"] = program.plan.to_json().decode()
        document["tag"] = program.plan.config.tag
        document["numerical_notes"] = [note.name for note in program.plan.config.numerical_notes]
        document["behavior_notes"] = [note.name for note in program.plan.config.behavior_notes]
        document["override_shape"] = program.override_shape
        document["bindings"] = program.bindings.to_json()
        document["cudnn"] = library.version()
    return json.dumps(document).encode()


def load(data: bytes | bytearray | str | Sequence[int]) -> Restored:
    """Reads what ``dump`` wrote, or the JSON text of a description."""
    try:
        document = json.loads(data if isinstance(data, str) else bytes(data))
        if document.get("format", FORMAT) == FORMAT:
            return _restore(document, with_plan=not isinstance(data, str))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            refusal("deserialize", "data", f"{len(data)} bytes that are no graph ({type(error).__name__}: {error})",
                    "what serialize() returned, or the JSON text of a graph", "serialise the graph again")
        ) from None  # fmt: skip
    raise ValueError(
        refusal("deserialize", "format", str(document["format"]), str(FORMAT), "serialise with this version")
    )


def _restore(document: dict[str, Any], with_plan: bool) -> Restored:
    context = document["context"]
    tensors = {fields["uid"]: Tensor.from_description(fields) for fields in document["tensors"]}
    for fields in document["tensors"]:
        if "ragged_offset" in fields:
            tensors[fields["uid"]].ragged_offset = tensors[fields["ragged_offset"]]
    for number, tensor in tensors.items():
        tensor.uid = None if number < 0 else number
    nodes = [Node.from_description(fields, tensors) for fields in document["nodes"]]
    return Restored(
        context["name"],
        Context(
            data_type[context["io_data_type"]],
            data_type[context["intermediate_data_type"]],
            data_type[context["compute_data_type"]],
            context["sm_version"],
        ),
        nodes,
        Bindings.from_json(document["bindings"]) if "bindings" in document else Bindings(),
        context.get("on_cpu", False),
        document.get("override_shape", False),
        document.get("plan") if with_plan else None,
        Origin(
            document.get("tag", ""),
            [numerical_note[name] for name in document.get("numerical_notes", [])],
            [behavior_note[name] for name in document.get("behavior_notes", [])],
        ),
    )
