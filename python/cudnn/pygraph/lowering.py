"""Lowers prepared nodes to backend operations, and records where each call finds the data of every tensor."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, get_type_hints

from cudnn.arrays.layout import span
from cudnn.backend import enums as be
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.engine import OperationGraph
from cudnn.backend.handle import Handle
from cudnn.datatypes import element_bits
from cudnn.enums import data_type, tensor_reordering
from cudnn.errors import CudnnError, cudnnGraphNotSupportedError
from cudnn.pygraph.node import Context, Node, NodeList
from cudnn.pygraph.schema import conforming
from cudnn.pygraph.tensor import Tensor

_DESCRIPTOR = be.AttributeType.BACKEND_DESCRIPTOR
_DATA_TYPES = {dtype: be.DataType[dtype.name] for dtype in data_type if dtype.name in be.DataType.__members__}
_CTYPES: dict[data_type, type[Any]] = {
    data_type.FLOAT: ctypes.c_float,
    data_type.DOUBLE: ctypes.c_double,
    data_type.INT32: ctypes.c_int32,
    data_type.INT64: ctypes.c_int64,
    data_type.INT8: ctypes.c_int8,
    data_type.BOOLEAN: ctypes.c_bool,
}


def host_scalar(dtype: data_type, value: float) -> Any:
    """A ctypes object that holds a constant in its own type."""
    ctype = _CTYPES.get(dtype)
    if ctype is None:
        raise ValueError(f"constant: data type {dtype.name}; allowed: {', '.join(k.name for k in _CTYPES)}.")
    return ctype(value if dtype in (data_type.FLOAT, data_type.DOUBLE) else int(value))


@dataclasses.dataclass
class Scratch:
    """A tensor that lives in the graph's own part of the workspace.

    ``initial`` (32-bit words) is copied there on the stream before each run; None leaves the memory as it is.
    """

    uid: int
    offset: int  # bytes from the start of the workspace
    initial: list[int] | None = None


class Alias(NamedTuple):
    """A tensor over the memory of another one."""

    source: int  # uid
    offset: int  # bytes from the start of the source
    axes: list[int] | None = (
        None  # its dimensions as those of the source, [0, 1, 3, 2] for the transposed; None: a part
    )


class Apart(NamedTuple):
    """A node that a separate plan computes before the graph's: where it reads its input and writes its result."""

    node: Node
    source: int  # uid of a tensor in memory
    source_offset: int  # bytes from the start of the source
    offset: int  # bytes from the start of the workspace


@dataclasses.dataclass
class Bindings:
    """Where a call finds the data of each tensor in the operation graph, by uid. JSON-able."""

    user: list[int] = dataclasses.field(default_factory=list[int])
    constants: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict[int, tuple[str, float]])
    scratch: list[Scratch] = dataclasses.field(default_factory=list[Scratch])
    aliases: dict[int, Alias] = dataclasses.field(default_factory=dict[int, Alias])
    hidden: list[int] = dataclasses.field(default_factory=list[int])  # in `user`, but not in the operation graph
    narrowed: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict[int, tuple[int, int]])  # where, count
    workspace_size: int = 0  # bytes of the graph's own part, which precedes the plan's

    def reserve(self, size: int) -> None:
        """Adds ``size`` bytes to the graph's own part; keeps every part, the plan's too, on 256 bytes."""
        self.workspace_size += (size + 255) // 256 * 256

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Bindings:
        bindings = cls(
            user=fields["user"],
            constants={int(uid): (dtype, value) for uid, (dtype, value) in fields["constants"].items()},
            scratch=[Scratch(**item) for item in fields["scratch"]],
            aliases={int(uid): Alias(*alias) for uid, alias in fields["aliases"].items()},
            hidden=fields["hidden"],
            narrowed={int(uid): (offset, count) for uid, (offset, count) in fields["narrowed"].items()},
            workspace_size=fields["workspace_size"],
        )
        for record in (bindings, *bindings.scratch, *bindings.aliases.values()):
            for name, hint in get_type_hints(type(record)).items():
                conforming(getattr(record, name), hint, name)
        return bindings


@contextlib.contextmanager
def refusals() -> Generator[None]:
    """Converts the NOT_SUPPORTED statuses of cuDNN to ``cudnnGraphNotSupportedError``."""
    try:
        yield
    except CudnnError as error:
        if error.not_supported:
            raise cudnnGraphNotSupportedError(str(error)) from error
        raise


class Uids:
    """Hands out uids: from 1 upwards, in the order asked, past those that users have set."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._owner: dict[int, Tensor] = {}
        for node in nodes:
            for tensor in node.tensors():
                if tensor.uid is not None and self._owner.setdefault(tensor.uid, tensor) is not tensor:
                    raise RuntimeError(
                        f"uid {tensor.uid} is set on two tensors, {self._owner[tensor.uid].name!r} and {tensor.name!r} "
                        f"(the second one in {node.where}): allowed: one tensor per uid. To fix it, call set_uid() "
                        "with another number on one of them."
                    )
        self._next = 1

    def assign(self, tensor: Tensor) -> int:
        """The tensor's uid, given now if it has none."""
        if tensor.uid is None:
            while self._next in self._owner:
                self._next += 1
            tensor.uid = self._next
            self._owner[tensor.uid] = tensor
        return tensor.uid


class Lowering:
    """Collects the backend operations of a graph. Nodes call ``operation`` and, when composite, ``expand``."""

    def __init__(self, context: Context, nodes: Iterable[Node], version: int) -> None:
        nodes = list(nodes)
        self.context = context
        self.version = version  # of cuDNN, as cudnnGetVersion() counts: 92800 is 9.28.0
        self.operations: list[Descriptor] = []
        self.bindings = Bindings()
        self.produced = {id(tensor) for node in nodes for tensor in node.outputs.values()}
        self._uids = Uids(nodes)
        for node in nodes:
            for tensor in node.tensors():
                self._uids.assign(tensor)
        self._tensors: dict[int, Descriptor] = {}
        self._same: dict[int, int] = {}

    def run(self, nodes: Iterable[Node], apart: Sequence[Node] = ()) -> list[Apart]:
        """Lowers nodes in order, but for those of ``apart``: their results lie in the workspace before the plan runs.

        Each of these reads one tensor in memory and makes one virtual tensor.
        """
        before: list[Apart] = []
        nodes = list(nodes)
        use_counts = Counter(id(tensor) for node in nodes for tensor in node.inputs.values())
        with refusals():
            for node in nodes:
                if any(node is one for one in apart):
                    before.append(self._set_apart(node, use_counts))
                else:
                    node.lower(self)
        self.bindings.user = sorted(self.bindings.user)
        # cuDNN refuses a variant pack with a uid that its plan does not know.
        used = self.bindings.aliases.items()
        self.bindings.aliases = {uid: alias for uid, alias in used if uid in self._tensors}
        return before

    def _set_apart(self, node: Node, use_counts: Mapping[int, int]) -> Apart:
        """Allocates a node's result in the workspace, where later operations read it.

        ``use_counts``: how many inputs of nodes a tensor is, by ``id``.
        """
        (x,), (y,) = node.inputs.values(), node.outputs.values()
        result = Tensor(y.dim, y.stride, y.data_type, name=y.name)
        elements = span(y.dim, y.stride)
        self.scratch(result, (elements * element_bits(y.data_type) + 7) // 8)
        self.tensor(result)
        self.same(y, result)
        uid = self.uid(x)
        offset = 0
        if uid in self.bindings.aliases:
            if use_counts[id(x)] == 1:
                del self._tensors[uid]  # no operation of the graph reads this part of the source
            uid, offset, _ = self.bindings.aliases[uid]
        elif uid not in self.bindings.user:
            self.bindings.user.append(uid)
            self.bindings.hidden.append(uid)
        return Apart(node, uid, offset, self.bindings.scratch[-1].offset)

    def expand(self, smaller: NodeList[Tensor]) -> None:
        """Prepares and lowers the smaller operations that a composite node is made of."""
        for node in smaller.nodes:
            node.prepare(smaller.context)
            node.lower(self)

    def operation(self, descriptor_type: be.DescriptorType, attributes: Mapping[be.Attribute, Any]) -> Descriptor:
        """Appends an operation descriptor. A tensor stands for its descriptor; None leaves an attribute out."""
        descriptor = self.descriptor(descriptor_type, attributes)
        self.operations.append(descriptor)
        return descriptor

    def descriptor(self, descriptor_type: be.DescriptorType, attributes: Mapping[be.Attribute, Any]) -> Descriptor:
        """Makes a finalized descriptor that is not an operation of the graph."""
        resolved = {
            attribute: self._resolve(value) if attribute.type is _DESCRIPTOR else value
            for attribute, value in attributes.items()
            if value is not None
        }
        return Descriptor.make(descriptor_type, resolved)

    def operation_graph(self, handle: Handle | None, dynamic_shape: bool, override_shape: bool) -> OperationGraph:
        """The operations, handed to cuDNN as a graph."""
        with refusals():
            return OperationGraph(self.operations, handle, dynamic_shape, override_shape)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            return [self._resolve(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        return value

    def uid(self, tensor: Tensor) -> int:
        """The uid of the tensor, or of the one that stands for it."""
        uid = self._uids.assign(tensor)
        return self._same.get(uid, uid)

    def same(self, tensor: Tensor, other: Tensor) -> None:
        """Lets ``other``, which is equal in all that counts, stand for a virtual tensor wherever it is used."""
        self._same[self._uids.assign(tensor)] = self.uid(other)

    def data_type(self, dtype: data_type) -> be.DataType:
        """cuDNN's number for a type."""
        return _DATA_TYPES[dtype]

    def tensor(self, tensor: Tensor) -> Descriptor:
        """The tensor's descriptor, made at first use; its uid is bound to where its data will come from."""
        uid = self.uid(tensor)
        descriptor = self._tensors.get(uid)
        if descriptor is not None:
            return descriptor
        constant = None
        if not tensor.is_virtual:
            if tensor.value is None:
                self._bind(uid)
            elif tensor.is_compile_time_constant:
                constant = host_scalar(tensor.data_type, tensor.value)
            else:
                self.bindings.constants[uid] = (tensor.data_type.name, tensor.value)
        a = be.Attribute
        attributes: dict[be.Attribute, Any] = {
            a.TENSOR_DATA_TYPE: self.data_type(tensor.data_type),
            a.TENSOR_DIMENSIONS: tensor.dim,
            a.TENSOR_STRIDES: tensor.stride,
            a.TENSOR_UNIQUE_ID: uid,
            a.TENSOR_BYTE_ALIGNMENT: tensor.alignment,
        }
        if tensor.is_virtual:
            attributes[a.TENSOR_IS_VIRTUAL] = True
        if tensor.is_pass_by_value:
            attributes[a.TENSOR_IS_BY_VALUE] = True
        if tensor.vector_count != 1:
            attributes[a.TENSOR_VECTOR_COUNT] = tensor.vector_count
            attributes[a.TENSOR_VECTORIZED_DIMENSION] = tensor.vector_dimension
        if tensor.ragged_offset is not None:
            attributes[a.TENSOR_RAGGED_OFFSET_DESC] = tensor.ragged_offset
        if tensor.ragged_offset_multiplier != 1:
            attributes[a.TENSOR_RAGGED_OFFSET_MULTIPLIER] = tensor.ragged_offset_multiplier
        if tensor.reordering_type is not tensor_reordering.NONE:
            attributes[a.TENSOR_REORDERING_MODE] = be.TensorReordering[tensor.reordering_type.name]
        if constant is not None:
            attributes[a.TENSOR_CONSTANT_VALUE] = constant
        descriptor = self.descriptor(be.DescriptorType.TENSOR, attributes)
        self._tensors[uid] = descriptor
        return descriptor

    def _bind(self, uid: int) -> None:
        bindings = self.bindings
        if uid not in bindings.aliases and all(item.uid != uid for item in bindings.scratch):
            if uid in bindings.hidden:
                bindings.hidden.remove(uid)
            else:
                bindings.user.append(uid)

    def scratch(self, tensor: Tensor, size: int, initial: list[int] | None = None) -> Tensor:
        """Places a non-virtual tensor in the graph's own part of the workspace."""
        bindings = self.bindings
        bindings.scratch.append(Scratch(self.uid(tensor), bindings.workspace_size, initial))
        bindings.reserve(size)
        tensor.is_virtual = False
        return tensor

    def narrowed(self, tensor: Tensor) -> Tensor:
        """A FLOAT stand-in in the workspace for a packed BFLOAT16 output, which gets its upper halves after each run.

        For outputs that cuDNN writes as FLOAT whatever their type. The conversion truncates.
        """
        wide = Tensor(tensor.dim, tensor.stride, data_type.FLOAT, name=f"{tensor.name} as FLOAT")
        count = prod(tensor.dim)
        self.scratch(wide, 4 * count)
        uid = self.uid(tensor)
        self.bindings.narrowed[uid] = (self.bindings.scratch[-1].offset, count)
        self.bindings.user.append(uid)
        self.bindings.hidden.append(uid)
        return wide

    def alias(self, tensor: Tensor, source: Tensor, offset: int = 0, axes: Sequence[int] | None = None) -> None:
        """Lets a tensor share the memory of another.

        Args:
            offset: Bytes from the start of ``source``.
            axes: The tensor's dimensions as those of ``source``; None where it is a part of it.
        """
        source_uid = self.uid(source)
        if source_uid in self.bindings.aliases:
            source_uid, inner, order = self.bindings.aliases[source_uid]
            offset += inner
            axes = None if axes is None or order is None else [order[axis] for axis in axes]
        elif source_uid not in self.bindings.user:
            self.bindings.user.append(source_uid)
            self.bindings.hidden.append(source_uid)
        self.bindings.aliases[self.uid(tensor)] = Alias(source_uid, offset, None if axes is None else [*axes])
        tensor.is_virtual = False
