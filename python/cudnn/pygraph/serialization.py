"""Graphs as JSON: the description of nodes and tensors, and the plan that was built for them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn.backend import library
from cudnn.backend.plan import Origin
from cudnn.enums import behavior_note, data_type, numerical_note
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.pygraph.lowering import Bindings
from cudnn.pygraph.node import Context, Node
from cudnn.pygraph.schema import conforming
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.program import CudnnProgram

FORMAT = 2


class Restored(NamedTuple):
    """What a serialized graph holds."""

    name: str
    context: Context
    nodes: list[Node]
    bindings: Bindings
    on_cpu: bool
    override_shape: bool
    plan: str | None  # cuDNN's JSON; "" where only the reference executor was built; None where nothing was
    origin: Origin
    before: list[tuple[str, str, int, int, int, int]]  # as program.Before, each graph serialized


def describe(name: str, context: Context, nodes: Sequence[Node], on_cpu: bool = False) -> dict[str, Any]:
    """A graph as JSON-able data. Tensors without a uid get a negative number, so that nodes can point at them."""
    tensors: dict[int, dict[str, Any]] = {}
    uids: dict[int, int] = {}

    def number(tensor: Tensor) -> int:
        if id(tensor) not in uids:
            uids[id(tensor)] = -1 - len(uids) if tensor.uid is None else tensor.uid
            fields = tensor.describe()
            fields["uid"] = uids[id(tensor)]
            if tensor.ragged_offset is not None:
                fields["ragged_offset"] = number(tensor.ragged_offset)
            tensors[uids[id(tensor)]] = fields
        return uids[id(tensor)]

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


def dump(
    description: dict[str, Any], program: CudnnProgram | None, planned: bool, override_shape: bool = False
) -> bytes:
    """A description and the plan that runs it, as UTF-8 JSON. ``override_shape``: whether calls may override shapes."""
    document: dict[str, Any] = {"format": FORMAT, **description, "override_shape": override_shape}
    if planned:
        document["plan"] = ""
    if program is not None and program.plan is not None:
        document["plan"] = program.plan.to_json().decode()
        document["tag"] = program.plan.config.tag
        document["numerical_notes"] = [note.name for note in program.plan.config.numerical_notes]
        document["behavior_notes"] = [note.name for note in program.plan.config.behavior_notes]
        document["bindings"] = program.bindings.to_json()
        document["before"] = [[item.node, item.graph.serialize().decode(), *item[2:]] for item in program.before]
        document["cudnn"] = library.version()
    return json.dumps(document).encode()


def load(data: bytes | bytearray | str | Sequence[int]) -> Restored:
    """Reads what ``dump`` wrote, or the JSON text of a description.

    Raises:
        ValueError: whatever is wrong with the data.
    """
    with refusing("data"):
        document = json.loads(data if isinstance(data, str) else bytes(data))
        written = document.get("format", FORMAT)
        if written == FORMAT:
            return _restore(document, with_plan=not isinstance(data, str))
    raise make_error(
        ValueError, "deserialize", "format", f"{written!r:.80}", str(FORMAT), "serialize with this version"
    )


@contextlib.contextmanager
def refusing(what: str) -> Generator[None]:
    """Converts every error raised while external data are read to a ValueError with advice."""
    try:
        yield
    except Exception as error:
        raise make_error(
            ValueError,
            "deserialize",
            what,
            f"no graph ({type(error).__name__}: {error!s:.200})",
            "what serialize() returned, or the JSON text of a graph",
            "serialize the graph again",
        ) from None


def _restore(document: dict[str, Any], with_plan: bool) -> Restored:
    restored = _read(document, with_plan)
    # What was built was sound; a mere description may have been written before it was complete, and is only tried.
    built = restored.plan is not None
    incomplete = () if built else (ValueError, RuntimeError)
    for node in (restored if built else _read(document, with_plan)).nodes:
        with contextlib.suppress(cudnnGraphNotSupportedError, *incomplete):  # they come again when it is used
            node.prepare(restored.context)
    if any(source not in restored.bindings.user for _, _, source, *_ in restored.before):
        raise ValueError("a plan before the graph's that reads an unknown tensor")
    if built and any(tensor.uid is None for node in restored.nodes for tensor in node.tensors()):
        raise ValueError("a plan with a tensor that has no uid")
    return restored


def _read(document: dict[str, Any], with_plan: bool) -> Restored:
    context = document["context"]
    conforming(context["name"], str, "name")
    conforming(context["sm_version"], int | None, "sm_version")
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
        conforming(context.get("on_cpu", False), bool, "on_cpu"),
        conforming(document.get("override_shape", False), bool, "override_shape"),
        conforming(document.get("plan"), str | None, "plan") if with_plan else None,
        Origin(
            conforming(document.get("tag", ""), str, "tag"),
            [numerical_note[name] for name in document.get("numerical_notes", [])],
            [behavior_note[name] for name in document.get("behavior_notes", [])],
        ),
        conforming([*map(tuple, document.get("before", []))], list[tuple[str, str, int, int, int, int]], "before"),
    )
