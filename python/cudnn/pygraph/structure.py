"""Operations that move or rename elements: reshape, transpose, slice, concatenate."""

from __future__ import annotations

import builtins
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cudnn import enums
from cudnn.arrays.layout import channels_last, row_major, span, strides_like
from cudnn.backend import enums as be
from cudnn.backend.library import format_version
from cudnn.datatypes import element_bits
from cudnn.enums import data_type
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand, where_of
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering


@dataclasses.dataclass(eq=False, kw_only=True)
class _Moving(Node):
    """An operation on one tensor that computes nothing: values keep their type and pass unchanged."""

    exact_ports = frozenset({"X"})
    computes = False

    def _reads_memory(self, lowering: Lowering) -> bool:
        """Whether Y can be X's own memory under another description, which every engine of every cuDNN reads."""
        x = self.inputs["X"]
        elsewhere = x.is_virtual or x.is_pass_by_value or id(x) in lowering.produced
        return not elsewhere or lowering.uid(x) in lowering.bindings.aliases

    def _share(self, lowering: Lowering, offset: int = 0, axes: list[int] | None = None) -> None:
        """Lets Y be a part of X's memory, ``offset`` bytes from its start."""
        x, y = self.inputs["X"], self.outputs["Y"]
        lowering.alias(y, x, offset, axes)
        declared, y.data_type = y.data_type, x.data_type
        lowering.tensor(y)  # the operations that follow see memory as it is ...
        y.is_virtual, y.data_type = True, declared  # ... and the graph's user a tensor that is not to be passed

    def _type_of_input(self, context: Context) -> None:
        """Gives the output the input's type where neither the user nor the graph's defaults say anything."""
        x, y = self.inputs["X"], self.outputs["Y"]
        self._default_type(y, context)
        if y.data_type is NOT_SET:
            y.data_type = x.data_type

    def _refuse_conversion(self) -> None:
        x, y = self.inputs["X"], self.outputs["Y"]
        if x.data_type is not y.data_type:
            raise self.make_error(
                RuntimeError,
                "Y",
                f"{y.data_type.name} for an input of {x.data_type.name}",
                "the input's data type; unset, a virtual tensor takes the graph's intermediate_data_type",
                f"call set_data_type(cudnn.data_type.{x.data_type.name}) on it",
            )


_NARROWER = (data_type.HALF, data_type.BFLOAT16, data_type.FP8_E4M3, data_type.FP8_E5M2)


@dataclasses.dataclass(eq=False, kw_only=True)
class Reshape(_Moving):
    """Y = X under the shape, and for VIEW_ONLY the strides, that the user has set on Y."""

    tag = "RESHAPE"
    method = "reshape"

    reshape_mode: enums.reshape_mode = enums.reshape_mode.VIEW_ONLY

    def infer(self, context: Context) -> None:
        x, y = self.inputs["X"], self.outputs["Y"]
        if not y.dim:
            raise self.make_error(ValueError, "Y", "no dim", "the new shape", "call set_dim() on it")
        y.fill(y.dim, channels_last)
        self._type_of_input(context)
        if self.reshape_mode is enums.reshape_mode.LOGICAL:
            self._refuse_conversion()
        if math.prod(x.dim) != math.prod(y.dim):
            allowed = f"the number of elements of the input, {math.prod(x.dim)}"
            raise self.make_error(
                ValueError, "Y", f"dim={y.dim} for an input of dim={x.dim}", allowed, "correct set_dim()"
            )
        if self.reshape_mode is enums.reshape_mode.VIEW_ONLY and span(y.dim, y.stride) > span(x.dim, x.stride):
            got = f"dim={y.dim}, stride={y.stride} for an input of dim={x.dim}, stride={x.stride}"
            raise self.make_error(
                ValueError, "Y", got, "a view that stays inside the input's memory", "correct set_stride()"
            )

    def _reads_memory(self, lowering: Lowering) -> bool:
        x, y = self.inputs["X"], self.outputs["Y"]
        packed = x.stride == row_major(x.dim) and y.stride == row_major(y.dim)
        is_a_view = y.is_virtual and (packed or self.reshape_mode is enums.reshape_mode.VIEW_ONLY)
        # FLOAT, graphs' usual type of virtual tensors, holds what narrower memory has.
        is_a_view &= y.data_type is x.data_type or (y.data_type is data_type.FLOAT and x.data_type in _NARROWER)
        # Inside a composite operation it is a part of the pattern that cuDNN's engines look for.
        return is_a_view and id(y) in lowering.produced and super()._reads_memory(lowering)

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        mode = self.reshape_mode
        if self._reads_memory(lowering):
            return self._share(lowering)
        if mode is enums.reshape_mode.LOGICAL and lowering.version < 92200:
            raise _too_old(self.where, "reshape_mode", "LOGICAL", lowering.version)
        lowering.operation(
            be.DescriptorType.OPERATION_RESHAPE,
            {
                a.OPERATION_RESHAPE_XDESC: self.inputs["X"],
                a.OPERATION_RESHAPE_YDESC: self.outputs["Y"],
                a.OPERATION_RESHAPE_MODE: be.ReshapeMode[mode.name] if lowering.version >= 92200 else None,
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        value, x, y = values["X"], self.inputs["X"], self.outputs["Y"]
        if self.reshape_mode is enums.reshape_mode.LOGICAL:
            return {"Y": value.reshape(y.dim)}
        memory = value.new_zeros(span(x.dim, x.stride))
        memory.as_strided(x.dim, x.stride).copy_(value)
        return {"Y": memory.as_strided(y.dim, y.stride)}


@dataclasses.dataclass(eq=False, kw_only=True)
class Transpose(_Moving):
    """Y = X with its dimensions in another order: dimension i of Y is dimension ``permutation[i]`` of X."""

    tag = "TRANSPOSE"
    method = "transpose"

    permutation: list[int]

    def infer(self, context: Context) -> None:
        x = self.inputs["X"]
        if not self.permutation:
            raise make_error(
                ValueError,
                self.where,
                "permutation",
                "nothing",
                f"an order of the dimensions 0 to {len(x.dim) - 1}",
                "pass permutation=[..]",
            )
        if sorted(self.permutation) != list(range(len(x.dim))):
            raise make_error(
                RuntimeError,
                self.where,
                "permutation",
                self.permutation,
                f"an order of the dimensions 0 to {len(x.dim) - 1}",
                "name each dimension once",
            )
        dims = [x.dim[axis] for axis in self.permutation]
        self.fill_output("Y", dims, lambda _: [x.stride[axis] for axis in self.permutation])
        self._type_of_input(context)
        self._refuse_conversion()

    def lower(self, lowering: Lowering) -> None:
        if self.outputs["Y"].is_virtual and self._reads_memory(lowering):
            return self._share(lowering, axes=self.permutation)
        if lowering.version < 92200:
            raise _too_old(self.where, "operation", "transpose", lowering.version)
        a = be.Attribute
        lowering.operation(
            be.DescriptorType.OPERATION_TRANSPOSE,
            {
                a.OPERATION_TRANSPOSE_XDESC: self.inputs["X"],
                a.OPERATION_TRANSPOSE_YDESC: self.outputs["Y"],
                a.OPERATION_TRANSPOSE_PERMUTATION: self.permutation,
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"Y": values["X"].permute(self.permutation)}


@dataclasses.dataclass(eq=False, kw_only=True)
class Slice(_Moving):
    """Y = a part of X: ``[start, stop, step]`` for each dimension. Where X lies in memory, Y is the same memory."""

    tag = "SLICE"
    method = "slice"

    slices: list[list[int | None]]

    def _ranges(self) -> list[range]:
        x = self.inputs["X"]
        full_axes = [[None, None, None]] * (len(x.dim) - len(self.slices))
        return [
            range(*builtins.slice(*triple).indices(extent))
            for triple, extent in zip([*self.slices, *full_axes], x.dim, strict=True)
        ]

    def infer(self, context: Context) -> None:
        x, y = self.inputs["X"], self.outputs["Y"]
        if len(self.slices) > len(x.dim):
            raise make_error(
                ValueError, self.where, "slices", f"{len(self.slices)} of them", f"at most {len(x.dim)}", "drop some"
            )
        if any(step is not None and step < 1 for *_, step in self.slices):
            raise make_error(ValueError, self.where, "slices", self.slices, "positive steps", "leave the step out")
        ranges = self._ranges()
        dims = [len(indices) for indices in ranges]
        if 0 in dims:
            raise make_error(
                ValueError,
                self.where,
                "slices",
                f"{self.slices} of dim={x.dim}, which is empty",
                "one element or more in each dimension",
                "correct start and stop",
            )
        strides = [step * indices.step for step, indices in zip(x.stride, ranges, strict=True)]
        self.fill_output("Y", dims, lambda _: strides)
        if x.data_type is not NOT_SET:  # as it is, at the latest, when the graph is built
            y.alignment = math.gcd(x.alignment, self._offset())
        if not y.is_virtual:
            allowed = "a virtual tensor: nothing writes a slice to memory"
            raise self.make_error(
                ValueError, "Y", "set_output(True)", allowed, "copy it: graph.identity(y).set_output(True)"
            )
        self._type_of_input(context)
        self._refuse_conversion()

    def lower(self, lowering: Lowering) -> None:
        x = self.inputs["X"]
        if self._reads_memory(lowering):
            self._share(lowering, self._offset())
        elif lowering.version < 92200:
            raise _too_old(
                self.where, f"input X (tensor {x.name!r})", "the result of another operation", lowering.version
            )
        else:
            a, ranges = be.Attribute, self._ranges()
            lowering.operation(
                be.DescriptorType.OPERATION_SLICE,
                {
                    a.OPERATION_SLICE_XDESC: x,
                    a.OPERATION_SLICE_YDESC: self.outputs["Y"],
                    a.OPERATION_SLICE_START_INDICES: [indices.start for indices in ranges],
                    a.OPERATION_SLICE_LIMIT_INDICES: [indices.stop for indices in ranges],
                    a.OPERATION_SLICE_STRIDES: [indices.step for indices in ranges],
                },
            )

    def _offset(self) -> int:
        """Bytes from the start of X."""
        x = self.inputs["X"]
        elements = sum(indices.start * step for indices, step in zip(self._ranges(), x.stride, strict=True))
        offset, rest = divmod(elements * element_bits(x.data_type), 8)
        if rest:
            raise make_error(
                ValueError,
                self.where,
                "slices",
                f"a start inside a byte of {x.data_type.name} elements",
                "a start on a whole byte",
                "start at an even element",
            )
        return offset

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"Y": values["X"][tuple(builtins.slice(i.start, i.stop, i.step) for i in self._ranges())]}


@dataclasses.dataclass(eq=False, kw_only=True)
class Concatenate(Node):
    """Y = the inputs one after the other along ``axis``; the one of ``in_place_index`` already lies in Y's memory."""

    tag = "CONCATENATE"
    method = "concatenate"
    computes = False

    axis: int
    in_place_index: int | None = None

    @property
    def exact_ports(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(self.inputs)

    def infer(self, context: Context) -> None:
        inputs = list(self.inputs.values())
        shapes = ", ".join(f"dim={tensor.dim}" for tensor in inputs)
        first = inputs[0]
        rank = len(first.dim)
        if not 0 <= self.axis < rank:
            raise make_error(ValueError, self.where, "axis", self.axis, f"0 to {rank - 1}", "count from 0")
        other_extents = [[*tensor.dim[: self.axis], *tensor.dim[self.axis + 1 :]] for tensor in inputs]
        if any(len(tensor.dim) != rank for tensor in inputs) or any(
            other != other_extents[0] for other in other_extents
        ):
            raise make_error(
                ValueError,
                self.where,
                "inputs",
                shapes,
                f"one shape save for dimension {self.axis}",
                "reshape or slice",
            )
        if any(tensor.data_type is not first.data_type for tensor in inputs):
            dtypes = ", ".join(tensor.data_type.name for tensor in inputs)
            raise make_error(ValueError, self.where, "inputs", dtypes, "one data type", "convert some with identity()")
        if self.in_place_index is not None and not 0 <= self.in_place_index < len(inputs):
            raise make_error(
                ValueError,
                self.where,
                "in_place_index",
                self.in_place_index,
                f"None or 0 to {len(inputs) - 1}",
                "correct it",
            )
        dims = [*first.dim]
        dims[self.axis] = sum(tensor.dim[self.axis] for tensor in inputs)
        self.fill_output("Y", dims, lambda dims: strides_like(first.stride, first.dim, dims))

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        lowering.operation(
            be.DescriptorType.OPERATION_CONCAT,
            {
                a.OPERATION_CONCAT_AXIS: self.axis,
                a.OPERATION_CONCAT_INPUT_DESCS: list(self.inputs.values()),
                a.OPERATION_CONCAT_OUTPUT_DESC: self.outputs["Y"],
                a.OPERATION_CONCAT_INPLACE_INDEX: self.in_place_index,
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"Y": torch.cat(list(values.values()), self.axis)}


def _too_old(where: str, what: str, got: str, version: int) -> cudnnGraphNotSupportedError:
    got_version = f"{got} with cuDNN {format_version(version)}"
    hint = "install a newer cuDNN"
    return make_error(cudnnGraphNotSupportedError, where, what, got_version, "cuDNN 9.22 or newer", hint)


class StructureMethods(NodeList[Operand]):
    """The methods that add operations which move or rename elements."""

    def reshape(
        self, input: Operand, name: str = "", reshape_mode: enums.reshape_mode = enums.reshape_mode.VIEW_ONLY
    ) -> Tensor:
        """``input`` under another shape: call ``set_dim()``, and best ``set_stride()``, on the result.

        ``reshape_mode`` VIEW_ONLY reads the memory of ``input`` with the strides of the result (channels-last where
        they are not set); LOGICAL keeps the row-major order of the elements. Where ``input`` lies in memory and the
        result is virtual, it is the same memory. cuDNN has the operation on other results inside attention only,
        LOGICAL from 9.22. Returns Y.
        """
        return self._add(Reshape, name, NOT_SET, {"X": input}, ["Y"], reshape_mode=reshape_mode).outputs["Y"]

    def transpose(
        self, input: Operand, permutation: Sequence[int], compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``input`` with its dimensions reordered: dimension i of the result is dimension ``permutation[i]`` of it.

        Shape and strides of Y are those of ``input``, permuted; its type is the same. Where ``input`` lies in memory
        and Y is virtual, Y is the same memory; the transpose of another operation's result needs cuDNN 9.22.
        """
        order = [int(axis) for axis in permutation]
        return self._add(Transpose, name, compute_data_type, {"X": input}, ["Y"], permutation=order).outputs["Y"]

    def slice(
        self,
        input: Operand,
        slices: Sequence[builtins.slice] = (),
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """The part of ``input`` that ``slices`` select: Python ``slice`` objects, one per dimension, positive steps.

        The result has the strides of ``input`` times the steps, and its type. It is virtual and never passed to
        ``execute``: it shares the memory of ``input``. The slice of another operation's result needs cuDNN 9.22.
        """
        where = where_of(name, "slice")
        for item in slices:
            if not isinstance(item, builtins.slice):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise make_error(
                    TypeError, where, "slices", repr(item), "Python slice objects", "write slice(start, stop)"
                )
        triples = [[item.start, item.stop, item.step] for item in slices]
        return self._add(Slice, name, compute_data_type, {"X": input}, ["Y"], slices=triples).outputs["Y"]

    def concatenate(
        self, inputs: Sequence[Operand], axis: int, in_place_index: int | None = None, name: str = ""
    ) -> Tensor:
        """``inputs`` joined along dimension ``axis``; their other extents and their types are equal.

        ``in_place_index`` is the index of the input that already lies in the memory of the result. Returns Y, with
        strides in the order of the first input's.
        """
        name = self._indexed(name)
        if not inputs:
            raise make_error(ValueError, f"{name} (concatenate)", "inputs", "none", "one tensor or more", "pass a list")
        ports: dict[str, object] = {f"X_{index}": tensor for index, tensor in enumerate(inputs)}
        node = self._add(Concatenate, name, NOT_SET, ports, ["Y"], axis=int(axis), in_place_index=in_place_index)
        return node.outputs["Y"]
