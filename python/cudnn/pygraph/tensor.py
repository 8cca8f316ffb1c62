"""A tensor of a graph: shape, strides, type and role; no data."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any, NoReturn, TypeAlias

from cudnn.arrays.dlpack import describe
from cudnn.arrays.layout import row_major, span
from cudnn.datatypes import (
    _is_torch_tensor,  # pyright: ignore[reportPrivateUsage]
    _torch_to_cudnn_data_type,  # pyright: ignore[reportPrivateUsage]
    dlpack_to_data_type,
    library_type,
)
from cudnn.enums import data_type, tensor_reordering
from cudnn.errors import make_error
from cudnn.pygraph.schema import conforming
from cudnn.strided import check_strided

NOT_SET = data_type.NOT_SET
_WITHOUT_DATA = "a cudnn.tensor, which has no data"
_LIMIT = 2**63  # cuDNN's extents, strides and uids are signed numbers of 64 bits


class Tensor:
    """A tensor of a graph (``cudnn.tensor``).

    Setters return the tensor, so that they chain. Tensors hash and compare by identity. ``dim`` and ``stride`` count
    elements; both are empty until they are set or inferred. A virtual tensor never reaches memory.
    """

    __slots__ = (
        "__weakref__",
        "alignment",
        "data_type",
        "dim",
        "is_compile_time_constant",
        "is_pass_by_value",
        "is_virtual",
        "name",
        "ragged_offset",
        "ragged_offset_multiplier",
        "reordering_type",
        "stride",
        "uid",
        "value",
        "vector_count",
        "vector_dimension",
    )

    def __init__(
        self,
        dim: Sequence[int] = (),
        stride: Sequence[int] = (),
        data_type: object = NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int | None = None,
        value: int | float | None = None,
    ) -> None:
        self.name = name
        self.dim = _integers(name, "dim", dim)
        self.stride = _integers(name, "stride", stride)
        self.data_type = library_type(data_type)
        self.is_virtual = is_virtual
        self.is_pass_by_value = is_pass_by_value
        self.value = value  # a host constant stored in the graph; every call passes it automatically
        self.is_compile_time_constant = False
        self.ragged_offset = ragged_offset
        self.ragged_offset_multiplier = 1
        self.reordering_type = reordering_type
        self.alignment = 16
        self.vector_count = 1
        self.vector_dimension = -1
        self.uid: int | None = None  # until the user or build_operation_graph() assigns one; 0 is a legal uid
        if uid is not None:
            self.set_uid(uid)

    @classmethod
    def like(cls, source: Any, name: str = "") -> Tensor:
        """A tensor described by another graph tensor, a ``torch.Tensor`` or any object with ``__dlpack__``.

        From a graph tensor everything but uid and name is copied. A scalar (one element) on the CPU is passed by value.
        """
        if isinstance(source, Tensor):
            copy = cls.__new__(cls)
            for field in _FIELDS:
                setattr(copy, field, getattr(source, field))
            copy.dim, copy.stride, copy.uid, copy.name = [*source.dim], [*source.stride], None, name
            return copy
        if _is_torch_tensor(source):
            check_strided("tensor_like", f"source {name!r}" if name else "source", source)
            dims, strides = list(source.shape), list(source.stride())
            dtype, on_cpu = _torch_to_cudnn_data_type(source.dtype) or NOT_SET, source.device.type == "cpu"
            if dtype is data_type.FP4_E2M1:  # two elements a byte: torch counts bytes along the last dimension
                dims[-1] *= 2
                strides = [step if step == 1 else 2 * step for step in strides]
        elif hasattr(source, "__dlpack__"):
            dims, strides, code, bits, on_cpu = describe(source)
            dtype = dlpack_to_data_type(code, bits)
        else:
            raise make_error(
                ValueError,
                "tensor_like",
                "source",
                f"{type(source).__name__}",
                "a cudnn.tensor, a torch.Tensor or any object with __dlpack__",
                "pass such a tensor, or describe it with graph.tensor(dim=, stride=)",
            )
        scalar = on_cpu and all(extent == 1 for extent in dims)
        return cls(dims or [1], strides or [1], dtype, is_pass_by_value=scalar, name=name)

    @classmethod
    def constant(cls, value: int | float, dtype: data_type, rank: int = 1, name: str = "") -> Tensor:
        """A host constant of shape ``[1] * rank`` that the graph passes at every call."""
        return cls([1] * rank, [1] * rank, dtype, is_pass_by_value=True, name=name, value=value)

    # Getters and setters of the public API.
    def get_name(self) -> str:
        """The name, empty while none is given."""
        return self.name

    def set_name(self, name: str) -> Tensor:
        """Names the tensor: messages, explanations and calls of a ``cudnn.Graph`` use the name."""
        self.name = str(name)
        return self

    def get_uid(self) -> int:
        """The uid, 0 while none is assigned."""
        return 0 if self.uid is None else self.uid

    def set_uid(self, uid: int) -> Tensor:
        """Assigns the number by which the tensor is found in a serialized graph and in a dict of data; 0 is allowed."""
        number = _integer(self.name, "uid", uid)
        if not 0 <= number < _LIMIT:
            raise make_error(
                ValueError, f"tensor {self.name!r}", "uid", number, "0 to 2^63 - 1", "choose another number"
            )
        self.uid = number
        return self

    def get_data_type(self) -> data_type:
        """The element type, ``NOT_SET`` until it is set or inferred."""
        return self.data_type

    def set_data_type(self, data_type: object) -> Tensor:
        """Sets the element type: a ``cudnn.data_type`` or a ``torch.dtype``."""
        self.data_type = library_type(data_type)
        return self

    def get_dim(self) -> list[int]:
        """The shape, empty until it is set or inferred."""
        return [*self.dim]

    def set_dim(self, dim: Sequence[int]) -> Tensor:
        """Sets the shape: 1 to 8 positive extents."""
        self.dim = _integers(self.name, "dim", dim)
        return self

    def get_stride(self) -> list[int]:
        """The strides in elements, empty until they are set or inferred."""
        return [*self.stride]

    def set_stride(self, stride: Sequence[int]) -> Tensor:
        """Sets the strides, in elements, one for each dimension."""
        self.stride = _integers(self.name, "stride", stride)
        return self

    def get_is_virtual(self) -> bool:
        """Whether the tensor lives inside the graph only and never reaches memory."""
        return self.is_virtual

    def set_is_virtual(self, is_virtual: bool) -> Tensor:
        """The opposite of ``set_output``."""
        self.is_virtual = bool(is_virtual)
        return self

    def set_output(self, is_output: bool) -> Tensor:
        """Makes the tensor an output of the graph: it is written to memory."""
        self.is_virtual = not is_output
        return self

    def get_is_pass_by_value(self) -> bool:
        """Whether the tensor is one number that each call passes from the host, not memory of the device."""
        return self.is_pass_by_value

    def set_is_pass_by_value(self, is_pass_by_value: bool) -> Tensor:
        """Makes the tensor, of one element, a number that each call passes from the host."""
        self.is_pass_by_value = bool(is_pass_by_value)
        return self

    def get_has_compile_time_constant(self) -> bool:
        """Whether the tensor is a constant that is compiled into the plan."""
        return self.is_compile_time_constant

    def get_reordering_type(self) -> tensor_reordering:
        """The special memory layout, such as that of block scale factors; ``NONE`` by default."""
        return self.reordering_type

    def set_reordering_type(self, reordering_type: tensor_reordering) -> Tensor:
        """Sets a special memory layout, such as ``F8_128x4`` for block scale factors."""
        try:
            self.reordering_type = tensor_reordering(reordering_type)
        except ValueError:
            allowed = ", ".join(map(str, tensor_reordering))
            raise make_error(
                ValueError, f"tensor {self.name!r}", "reordering_type", repr(reordering_type), allowed, "choose one"
            ) from None
        return self

    def get_alignment(self) -> int:
        """Alignment of the data in bytes."""
        return self.alignment

    def set_alignment(self, alignment: int) -> Tensor:
        """Sets what divides the address of every call's data, in bytes: a power of two, 16 unless set.

        Around a matrix product, data at other addresses are computed by another plan, which is slower.
        """
        number = _integer(self.name, "alignment", alignment)
        if number < 1 or number & (number - 1):
            raise make_error(
                ValueError, f"tensor {self.name!r}", "alignment", str(number), "a power of two", "round it down to one"
            )
        self.alignment = number
        return self

    def get_vector_count(self) -> int:
        """Elements of a vector along the vector dimension; 1 where the tensor is not vectorized."""
        return self.vector_count

    def get_vector_dimension(self) -> int:
        """The vectorized dimension, -1 if there is no such dimension."""
        return self.vector_dimension

    def set_vector_count_and_dimension(self, count: int, dimension: int) -> Tensor:
        """Stores ``count`` consecutive elements of ``dimension`` side by side, as ``INT8x4`` and ``INT8x32`` do."""
        self.vector_count = _integer(self.name, "count", count)
        self.vector_dimension = _integer(self.name, "dimension", dimension)
        return self

    def get_ragged_offset(self) -> Tensor | None:
        """The tensor with the offsets of the batch entries, None where these follow the strides."""
        return self.ragged_offset

    def set_ragged_offset(self, ragged_offset: Tensor) -> Tensor:
        """Batch entries start at the offsets (in elements) in a ``[batch + 1, 1, 1, 1]`` INT32 or INT64 tensor."""
        if not isinstance(ragged_offset, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            got = type(ragged_offset).__name__
            raise make_error(TypeError, f"tensor {self.name!r}", "ragged_offset", got, "a cudnn.tensor", "describe one")
        self.ragged_offset = ragged_offset
        return self

    def get_ragged_offset_multiplier(self) -> int:
        """What the offsets are multiplied by to count elements; 1 unless set."""
        return self.ragged_offset_multiplier

    def set_ragged_offset_multiplier(self, multiplier: int) -> Tensor:
        """Sets what the offsets are multiplied by to count elements."""
        self.ragged_offset_multiplier = _integer(self.name, "multiplier", multiplier)
        return self

    # Inference.
    def fill(self, dim: Sequence[int], layout: Callable[[Sequence[int]], list[int]] = row_major) -> None:
        """Sets the shape, then the strides that ``layout`` gives for it, each only where the user has not."""
        if not self.dim:
            self.dim = [*dim]
        if not self.stride:
            self.stride = layout(self.dim)

    def check(self, where: str) -> None:
        """Refuses a tensor that cannot be described to cuDNN."""
        label = f"tensor {self.name!r}"
        if not self.dim or not self.stride:
            raise make_error(
                ValueError,
                where,
                label,
                f"dim={self.dim}, stride={self.stride}",
                "both set or inferred",
                "call set_dim() and set_stride() on it",
            )
        if len(self.dim) != len(self.stride):
            raise make_error(
                ValueError,
                where,
                label,
                f"dim={self.dim} with stride={self.stride}",
                "one stride per dimension",
                "give both the same length",
            )
        if len(self.dim) > 8:
            raise make_error(ValueError, where, label, f"rank {len(self.dim)}", "rank 1 to 8", "merge dimensions")
        if any(extent < 1 for extent in self.dim):
            raise make_error(ValueError, where, label, f"dim={self.dim}", "positive extents", "drop empty dimensions")
        if any(step < 0 for step in self.stride):
            raise make_error(
                ValueError, where, label, f"stride={self.stride}", "strides of 0 or more", "turn the tensor round first"
            )
        last = sum((extent - 1) * step for extent, step in zip(self.dim, self.stride, strict=True))
        if max(*self.dim, *self.stride, prod(self.dim), last) >= _LIMIT // 8:
            raise make_error(
                ValueError,
                where,
                label,
                f"dim={self.dim}, stride={self.stride}",
                "fewer than 2^60 elements and places",
                "correct the shape",
            )
        if self.is_virtual and self.is_pass_by_value:
            raise make_error(ValueError, where, label, "virtual and pass-by-value", "one of the two", "choose one")
        if self.value is not None and not self.is_pass_by_value:
            raise make_error(
                ValueError, where, label, "a stored constant", "pass-by-value only", "call set_is_pass_by_value(True)"
            )

    def check_written(self, where: str) -> None:
        """Refuses an output whose strides put several elements at one place."""
        if self.is_virtual or self.ragged_offset is not None or self.reordering_type is not tensor_reordering.NONE:
            return
        axes = [(extent, step) for extent, step in zip(self.dim, self.stride, strict=True) if extent > 1]
        overlap = prod(self.dim) > span(self.dim, self.stride) or any(
            other < extent * gcd(step, other) and step < more * gcd(step, other)
            for (extent, step), (more, other) in itertools.combinations(axes, 2)
        )
        if overlap:
            raise make_error(
                ValueError,
                where,
                f"output tensor {self.name!r}",
                f"dim={self.dim}, stride={self.stride}",
                "distinct addresses for all elements",
                "correct set_stride()",
            )

    def describe(self) -> dict[str, Any]:
        """The tensor as JSON-able data; defaults are left out."""
        fields: dict[str, Any] = {
            "name": self.name,
            "uid": self.uid,
            "data_type": self.data_type.name,
            "dim": self.dim,
            "stride": self.stride,
        }
        optional: dict[str, tuple[Any, Any]] = {
            "is_virtual": (self.is_virtual, False),
            "is_pass_by_value": (self.is_pass_by_value, False),
            "value": (self.value, None),
            "is_compile_time_constant": (self.is_compile_time_constant, False),
            "reordering_type": (self.reordering_type.name, "NONE"),
            "alignment": (self.alignment, 16),
            "vector_count": (self.vector_count, 1),
            "vector_dimension": (self.vector_dimension, -1),
            "ragged_offset": (None if self.ragged_offset is None else self.ragged_offset.uid, None),
            "ragged_offset_multiplier": (self.ragged_offset_multiplier, 1),
        }
        fields.update({key: value for key, (value, default) in optional.items() if value != default})
        return fields

    @classmethod
    def from_description(cls, fields: dict[str, Any]) -> Tensor:
        """The tensor that ``describe()`` described; its ragged offset is left for the caller to connect.

        Raises:
            ValueError, KeyError: a name or a number that no description has.
        """
        checked = {key: conforming(fields[key], hint, key) for key, hint in _DESCRIBED.items() if key in fields}
        tensor = cls(checked["dim"], checked["stride"], data_type[fields["data_type"]], name=checked["name"])
        for key in checked:
            setattr(tensor, key, checked[key])
        tensor.reordering_type = tensor_reordering[fields.get("reordering_type", "NONE")]
        return tensor

    def __repr__(self) -> str:
        return json.dumps(self.describe())

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        """Called by PyTorch's functions that are given a graph tensor: they cannot compute with one."""
        hint = "call the graph's operation in its place: graph.relu(input=x), say"
        where = f"torch.{getattr(function, '__name__', function)}"
        raise make_error(TypeError, where, "argument", _WITHOUT_DATA, "a torch.Tensor", hint)

    def _operator(self, *_: object) -> NoReturn:
        hint = "call the graph's operation in its place: graph.add(a=x, b=y), say"
        raise make_error(TypeError, "arithmetic operator", "operand", _WITHOUT_DATA, "numbers and arrays", hint)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _operator
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = _operator


def _integer(name: str, what: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise make_error(
            TypeError, f"tensor {name!r}", what, repr(value), "an integer", "pass an int, or a NumPy or PyTorch integer"
        ) from None


def _integers(name: str, what: str, values: Sequence[int]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise make_error(
            TypeError, f"tensor {name!r}", what, repr(values), "a sequence of integers", f"pass {what}=[4, 8], say"
        ) from None


_FIELDS = [field for field in Tensor.__slots__ if field != "__weakref__"]
_DESCRIBED: dict[str, Any] = {  # the types of what describe() gives, save names of enumerations and the ragged offset
    "name": str,
    "uid": int,
    "dim": list[int],
    "stride": list[int],
    "is_virtual": bool,
    "is_pass_by_value": bool,
    "value": int | float,
    "is_compile_time_constant": bool,
    "alignment": int,
    "vector_count": int,
    "vector_dimension": int,
    "ragged_offset_multiplier": int,
}


Results: TypeAlias = "list[Tensor | Any]"
"""What an operation returns whose later results may be None, where they are not asked for.

For type checkers these are Any, so that programs need not ask about those that are there.
"""
