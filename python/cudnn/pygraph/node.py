"""What every operation shares: attributes, ports, and the three things it knows how to do."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, get_type_hints

from cudnn.arrays.layout import row_major
from cudnn.datatypes import library_type
from cudnn.enums import data_type
from cudnn.errors import E, make_error
from cudnn.pygraph.schema import ENUMERATIONS, conforming
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

NOT_SET = data_type.NOT_SET
REGISTRY: dict[str, type[Node]] = {}


def where_of(name: str, method: str) -> str:
    """How messages call a node."""
    return f"{name} ({method})" if name else method


@dataclasses.dataclass(frozen=True)
class Context:
    """What a graph tells its nodes: default types, and the compute capability it is checked for."""

    io_data_type: data_type = NOT_SET
    intermediate_data_type: data_type = NOT_SET
    compute_data_type: data_type = NOT_SET
    sm_version: int | None = None  # 90 for compute capability 9.0; None where no device is known


@dataclasses.dataclass(eq=False, kw_only=True)
class Node:
    """One operation: its attributes (the fields of the subclass), its input and output tensors by port.

    A subclass defines ``tag`` (its name in JSON) and ``method`` (the method of ``pygraph`` that adds it),
    and implements ``infer``, ``lower`` and ``evaluate``.
    """

    tag: ClassVar[str]
    method: ClassVar[str]
    optional: ClassVar[frozenset[str]] = frozenset()  # inputs that a call may leave out, with None
    exact_ports: ClassVar[frozenset[str]] = frozenset()  # inputs that evaluate() takes in their own type
    pool_ports: ClassVar[frozenset[str]] = frozenset()  # inputs whose memory may go on beyond their shape
    any_address: ClassVar[bool] = False  # True where data may lie at addresses that their alignment does not divide
    computes: ClassVar[bool] = True  # False where elements are moved alone, which takes no compute type

    name: str = ""
    compute_data_type: data_type = NOT_SET
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])
    outputs: dict[str, Tensor] = dataclasses.field(default_factory=dict[str, Tensor])

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "tag" in cls.__dict__:
            REGISTRY[cls.tag] = cls

    # What a subclass implements.
    def infer(self, context: Context) -> None:
        """Fills shape, strides and type of the outputs where the user has not, and refuses what cannot be."""
        raise NotImplementedError

    def check(self, context: Context) -> None:
        """Refuses, before cuDNN is asked, what the operation does not support. Called by ``validate()`` only."""

    def lower(self, lowering: Lowering) -> None:
        """Emits the backend operations that compute the node."""
        raise NotImplementedError

    def fall_back(self) -> bool:
        """Where cuDNN has no engine for what ``lower`` made: switches to another lowering; False if no other exists."""
        return False

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        """The reference formula: torch tensors by input port to torch tensors by output port.

        Floating-point inputs arrive in the node's compute type with the shape of their graph tensor; so do all others,
        save the ports in ``exact_ports``. The caller rounds each result to its tensor's type.
        """
        raise NotImplementedError

    def rows(self, port: str) -> Tensor | None:
        """The input with the number of rows of each batch entry of a ragged output, if any."""
        return None

    # What it inherits.
    @property
    def where(self) -> str:
        """How messages call the node."""
        return where_of(self.name, self.method)

    def make_error(self, error_type: type[E], port: str, got: object, allowed: str, hint: str) -> E:
        """The exception that refuses the tensor at a port."""
        direction, tensor = ("input", self.inputs[port]) if port in self.inputs else ("output", self.outputs[port])
        return make_error(error_type, self.where, f"{direction} {port} (tensor {tensor.name!r})", got, allowed, hint)

    def output(self, port: str) -> Tensor:
        """Adds a virtual output tensor named ``<node>::<port>``."""
        tensor = Tensor(is_virtual=True, name=f"{self.name}::{port}")
        self.outputs[port] = tensor
        return tensor

    def tensors(self) -> Iterable[Tensor]:
        """Inputs, outputs and their ragged offsets, in a fixed order."""
        for tensor in (*self.inputs.values(), *self.outputs.values()):
            yield tensor
            if tensor.ragged_offset is not None:
                yield tensor.ragged_offset

    def prepare(self, context: Context) -> None:
        """Default types, then inference, then the checks that hold for every tensor. May run more than once."""
        if self.compute_data_type is NOT_SET:
            self.compute_data_type = context.compute_data_type
        for port, tensor in self.inputs.items():
            if not tensor.dim or not tensor.stride:
                got, hint = f"dim={tensor.dim}, stride={tensor.stride}", "create the node that makes this tensor first"
                raise self.make_error(ValueError, port, got, "both set or inferred", f"set them, or {hint}")
            self._default_type(tensor, context)
        self.infer(context)
        for tensor in self.outputs.values():
            self._default_type(tensor, context)
        for tensor in self.tensors():
            tensor.check(self.where)

    @staticmethod
    def _default_type(tensor: Tensor, context: Context) -> None:
        if tensor.data_type is NOT_SET:
            tensor.data_type = context.intermediate_data_type if tensor.is_virtual else context.io_data_type

    def fill_output(
        self, port: str, dim: Sequence[int], layout: Callable[[Sequence[int]], list[int]] = row_major
    ) -> None:
        """Shape and strides of an output where the user has set none; refuses another shape than this one."""
        tensor = self.outputs[port]
        tensor.fill(dim, layout)
        if tensor.dim != [*dim]:
            hint = "leave set_dim() out: it is inferred"
            raise self.make_error(ValueError, port, f"dim={tensor.dim}", f"dim={[*dim]}", hint)

    def rank_check(self, ranks: Sequence[int], *ports: str) -> None:
        """Refuses inputs whose rank is not one of ``ranks``."""
        for port in ports:
            dim = self.inputs[port].dim
            if len(dim) not in ranks:
                allowed, hint = f"rank {', '.join(map(str, ranks))}", "add dimensions of extent 1 or merge some"
                raise self.make_error(ValueError, port, f"rank {len(dim)}, dim={dim}", allowed, hint)

    def attributes(self) -> dict[str, Any]:
        """The fields that the subclass adds, as JSON-able data; defaults are left out."""
        encoded: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.name in _BASE_FIELDS or not field.init:
                continue
            value = getattr(self, field.name)
            if field.default is not dataclasses.MISSING and value == field.default:
                continue
            encoded[field.name] = _encode(value)
        return encoded

    def describe(self) -> dict[str, Any]:
        """The node as JSON-able data, without its tensors."""
        return {
            "tag": self.tag,
            "name": self.name,
            "compute_data_type": self.compute_data_type.name,
            **self.attributes(),
        }

    @staticmethod
    def from_description(fields: Mapping[str, Any], tensors: Mapping[int, Tensor]) -> Node:
        """The node that ``describe()`` described, over tensors by uid.

        Raises:
            ValueError, KeyError: a name or a number that no description has.
        """
        cls = REGISTRY[fields["tag"]]
        hints = _hints(cls)
        attributes = {key: conforming(_decode(fields[key]), hints[key], key) for key in fields.keys() & hints.keys()}
        return cls(
            name=conforming(fields["name"], str, "name"),
            compute_data_type=data_type[fields["compute_data_type"]],
            inputs={port: tensors[uid] for port, uid in fields["inputs"].items()},
            outputs={port: tensors[uid] for port, uid in fields["outputs"].items()},
            **attributes,
        )


_BASE_FIELDS = {field.name for field in dataclasses.fields(Node)}


@functools.cache
def _hints(cls: type[Node]) -> dict[str, Any]:
    """The types of the attributes that an operation adds."""
    hints = get_type_hints(cls)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(cls)
        if field.init and field.name not in _BASE_FIELDS
    }


def _encode(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        described = cast(dict[str, str], value)
        return ENUMERATIONS[described["enum"]][described["name"]]
    if isinstance(value, list):
        return [_decode(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


N = TypeVar("N", bound=Node)
Operand = TypeVar("Operand")  # what methods take where they need a tensor: Tensor or, in cudnn.Graph, an array too


class NodeList(Generic[Operand]):
    """A list of nodes that grows by method calls: the base of ``pygraph`` and of sub-graphs."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.nodes: list[Node] = []

    def _add(
        self,
        cls: Callable[..., N],
        name: str,
        compute_data_type: object,
        inputs: Mapping[str, object],
        outputs: Sequence[str] = (),
        **attributes: Any,
    ) -> N:
        """Appends a node; optional inputs that are None are left out, ``outputs`` are created as virtual tensors.

        Raises:
            TypeError: an input is no tensor, or is None and not optional.
        """
        present: dict[str, Tensor] = {}
        node = cls(name=name or "", compute_data_type=library_type(compute_data_type), inputs=present, **attributes)
        for port, tensor in inputs.items():
            if tensor is None and port in node.optional:
                continue
            if not isinstance(tensor, Tensor):
                got = "None" if tensor is None else type(tensor).__name__
                raise make_error(
                    TypeError,
                    node.where,
                    f"input {port}",
                    got,
                    "a cudnn.tensor",
                    "make one with graph.tensor_like(x), or use cudnn.Graph, which converts arrays automatically",
                )
            present[port] = tensor
        for port in outputs:
            node.output(port)
        self.nodes.append(node)
        return node

    def _indexed(self, name: str) -> str:
        """The name given, or the node's index, for the operations whose outputs are named so."""
        return name or str(len(self.nodes))
