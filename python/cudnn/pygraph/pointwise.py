"""Element-wise operations: arithmetic, comparisons, logic, activations and their derivatives."""

from __future__ import annotations

import dataclasses
import operator
import sys
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import broadcast, strides_like
from cudnn.backend import enums as be
from cudnn.enums import data_type
from cudnn.errors import checked_number, cudnnGraphNotSupportedError, make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

_FLT_MAX = 3.4028234663852886e38


@dataclasses.dataclass(eq=False, kw_only=True)
class Pointwise(Node):
    """``OUT_0 = mode(IN_0[, IN_1[, IN_2]])`` with right-aligned broadcasting.

    For the backward modes IN_0 is the gradient of the loss and IN_1 the input of the forward operation; for
    BINARY_SELECT IN_2 is the mask.
    """

    tag = "POINTWISE"

    mode: str
    negative_slope: float | None = None
    lower_clip: float | None = None
    upper_clip: float | None = None
    swish_beta: float | None = None
    axis: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise make_error(ValueError, "pointwise", "mode", repr(self.mode), ", ".join(_MODES), "choose one of these")

    @property
    def method(self) -> str:  # type: ignore[override]
        return _method(self.mode)

    def infer(self, context: Context) -> None:
        out = self.outputs["OUT_0"]
        ports = list(self.inputs.values())
        rank = max([len(t.dim) for t in ports if t.value is None] or [1])
        for tensor in ports:
            if tensor.value is not None and len(tensor.dim) < rank:  # a stored constant takes any rank
                tensor.dim, tensor.stride = [1] * rank, [1] * rank
        dims = broadcast([t.dim for t in ports])
        if dims is None:
            raise make_error(
                ValueError,
                self.where,
                "inputs",
                ", ".join(f"{t.name!r} dim={t.dim}" for t in ports),
                "shapes that broadcast (aligned at the last dimension; extents equal or 1)",
                "reshape or transpose one of them",
            )
        if self.axis is not None and not 0 <= self.axis < len(dims):
            raise make_error(ValueError, self.where, "axis", str(self.axis), f"0 to {len(dims) - 1}", "count from 0")
        if not out.dim:
            out.dim = dims
        elif out.dim != dims:
            raise make_error(
                ValueError,
                self.where,
                f"output (tensor {out.name!r})",
                f"dim={out.dim}",
                f"dim={dims}",
                "leave set_dim() out: it is inferred",
            )
        if not out.stride:
            out.stride = self._strides(out, ports)

    def _strides(self, out: Tensor, ports: list[Tensor]) -> list[int]:
        """Strides of the last input that has the output's shape; else the stride order of IN_0."""
        for tensor in reversed(ports):
            if tensor.dim == out.dim:
                return [*tensor.stride]
        first = ports[0]
        if out.is_virtual and len(first.dim) == len(out.dim):
            return strides_like(first.stride, first.dim, out.dim)
        raise make_error(
            ValueError,
            self.where,
            f"output (tensor {out.name!r})",
            "no strides",
            "strides that an input of the output's shape has",
            f"call set_stride() on it, for dim={out.dim}",
        )

    def lower(self, lowering: Lowering) -> None:
        if self._changes_nothing:
            # cuDNN 9.19 goes wrong where such a result meets its own input again: every element was wrong on an H200.
            lowering.same(self.outputs["OUT_0"], self.inputs["IN_0"])
            return
        a, mode = be.Attribute, be.PointwiseMode[self.mode]
        relu = self.mode in ("RELU_FWD", "RELU_BWD")
        upper = _FLT_MAX if self.compute_data_type is data_type.FLOAT else sys.float_info.max
        attributes: dict[be.Attribute, Any] = {
            a.POINTWISE_MODE: mode,
            a.POINTWISE_MATH_PREC: lowering.data_type(self.compute_data_type),
            a.POINTWISE_NAN_PROPAGATION: be.NanPropagation.PROPAGATE_NAN if relu else None,
            a.POINTWISE_RELU_LOWER_CLIP: (self.lower_clip or 0.0) if relu else None,
            a.POINTWISE_RELU_UPPER_CLIP: (upper if self.upper_clip is None else self.upper_clip) if relu else None,
            a.POINTWISE_RELU_LOWER_CLIP_SLOPE: (self.negative_slope or 0.0) if relu else None,
            a.POINTWISE_ELU_ALPHA: 1.0 if self.mode.startswith("ELU") else None,
            a.POINTWISE_SOFTPLUS_BETA: 1.0 if self.mode.startswith("SOFTPLUS") else None,
            a.POINTWISE_SWISH_BETA: self._beta if self.mode.startswith("SWISH") else None,
            a.POINTWISE_AXIS: self.axis,
        }
        backward = self.mode.endswith("_BWD")
        first, second, third = (self._operand(lowering, port) for port in ("IN_0", "IN_1", "IN_2"))
        out = self.outputs["OUT_0"]
        lowering.operation(
            be.DescriptorType.OPERATION_POINTWISE,
            {
                a.OPERATION_POINTWISE_PW_DESCRIPTOR: lowering.descriptor(be.DescriptorType.POINTWISE, attributes),
                a.OPERATION_POINTWISE_XDESC: second if backward else first,
                a.OPERATION_POINTWISE_BDESC: None if backward else second,
                a.OPERATION_POINTWISE_TDESC: third,
                a.OPERATION_POINTWISE_YDESC: None if backward else out,
                a.OPERATION_POINTWISE_DYDESC: first if backward else None,
                a.OPERATION_POINTWISE_DXDESC: out if backward else None,
                a.OPERATION_POINTWISE_ALPHA1: 1.0,
                a.OPERATION_POINTWISE_ALPHA2: 1.0,
            },
        )

    def _operand(self, lowering: Lowering, port: str) -> Tensor | None:
        """An input with the rank of the output, as cuDNN wants it: leading ones are added."""
        tensor = self.inputs.get(port)
        if tensor is None:
            return None
        missing = len(self.outputs["OUT_0"].dim) - len(tensor.dim)
        if not missing:
            return tensor
        if tensor.is_virtual or id(tensor) in lowering.produced:
            raise self.make_error(
                cudnnGraphNotSupportedError,
                port,
                f"dim={tensor.dim}, the result of another operation",
                f"{len(self.outputs['OUT_0'].dim)} dimensions, as the output has",
                "describe the tensors of that operation with leading dimensions of 1",
            )
        padded = Tensor.like(tensor)
        padded.dim = [1] * missing + tensor.dim
        padded.stride = [tensor.dim[0] * tensor.stride[0]] * missing + tensor.stride
        lowering.alias(padded, tensor)
        return padded

    @property
    def _beta(self) -> float:
        return 1.0 if self.swish_beta is None else self.swish_beta

    @property
    def _changes_nothing(self) -> bool:
        """An identity between virtual tensors that differ in nothing."""
        if self.mode != "IDENTITY":
            return False
        x, y = self.inputs["IN_0"], self.outputs["OUT_0"]
        same = (x.dim, x.stride, x.data_type) == (y.dim, y.stride, y.data_type)
        return same and x.is_virtual and y.is_virtual

    @property
    def exact_ports(self) -> frozenset[str]:  # type: ignore[override]
        """A comparison may have BOOLEAN, the type of its result, as compute type; its inputs are numbers."""
        truth = self.mode.startswith("CMP_") and self.compute_data_type is data_type.BOOLEAN
        return frozenset({"IN_0", "IN_1"} if truth else ())

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x = list(values.values())
        if self.mode == "ADD_SQUARE":
            return {"OUT_0": x[0] + x[1] * x[1]}
        if self.mode == "BINARY_SELECT":
            return {"OUT_0": torch.where(x[2].bool(), x[0], x[1])}
        if self.mode == "GEN_INDEX":
            assert self.axis is not None
            view = [-1 if axis == self.axis else 1 for axis in range(x[0].dim())]
            index = torch.arange(x[0].shape[self.axis], dtype=torch.int64, device=x[0].device)
            return {"OUT_0": index.view(view).expand(x[0].shape)}
        if self.mode.endswith("_BWD"):
            return {"OUT_0": self._derivative(loss=x[0], x=x[1])}
        return {"OUT_0": self._forward(*x)}

    def _forward(self, *operands: Any) -> Any:
        x = operands[0]
        if self.mode == "RELU_FWD":
            lower, slope = self.lower_clip or 0.0, self.negative_slope or 0.0
            y = torch.where(x > lower, x, lower + slope * (x - lower))
            return y if self.upper_clip is None else y.clamp(max=self.upper_clip)
        if self.mode == "SWISH_FWD":
            return x * torch.sigmoid(self._beta * x)
        if self.mode == "GELU_APPROX_TANH_FWD":
            return torch.nn.functional.gelu(x, approximate="tanh")
        return operator.attrgetter(_TORCH_FUNCTIONS[self.mode])(torch)(*operands)

    def _derivative(self, loss: Any, x: Any) -> Any:
        if self.mode == "RELU_BWD":
            lower, slope = self.lower_clip or 0.0, self.negative_slope or 0.0
            factor = torch.where(x <= lower, slope, 1.0)
            if self.upper_clip is not None:
                factor = torch.where(x >= self.upper_clip, 0.0, factor)
            return factor.to(loss.dtype) * loss
        forward = dataclasses.replace(self, mode=self.mode.removesuffix("_BWD") + "_FWD")
        with torch.enable_grad():
            leaf = x.detach().expand(torch.broadcast_shapes(x.shape, loss.shape)).clone().requires_grad_()
            return torch.autograd.grad(forward._forward(leaf), leaf, loss.expand(leaf.shape))[0]


# PyTorch's function for a mode.
_TORCH_FUNCTIONS = {
    "ADD": "add",
    "SUB": "sub",
    "MUL": "mul",
    "DIV": "div",
    "MAX": "maximum",
    "MIN": "minimum",
    "MOD": "fmod",
    "POW": "pow",
    "CMP_EQ": "eq",
    "CMP_NEQ": "ne",
    "CMP_GT": "gt",
    "CMP_GE": "ge",
    "CMP_LT": "lt",
    "CMP_LE": "le",
    "LOGICAL_AND": "logical_and",
    "LOGICAL_OR": "logical_or",
    "LOGICAL_NOT": "logical_not",
    "SQRT": "sqrt",
    "RSQRT": "rsqrt",
    "RECIPROCAL": "reciprocal",
    "ERF": "erf",
    "IDENTITY": "clone",
    "EXP": "exp",
    "LOG": "log",
    "NEG": "neg",
    "ABS": "abs",
    "CEIL": "ceil",
    "FLOOR": "floor",
    "SIN": "sin",
    "COS": "cos",
    "TAN": "tan",
    "TANH_FWD": "tanh",
    "SIGMOID_FWD": "sigmoid",
    "ELU_FWD": "nn.functional.elu",
    "GELU_FWD": "nn.functional.gelu",
    "SOFTPLUS_FWD": "nn.functional.softplus",
}
_WRITTEN_OUT = ("RELU_FWD", "SWISH_FWD", "GELU_APPROX_TANH_FWD")
_FORWARD = [mode for mode in (*_TORCH_FUNCTIONS, *_WRITTEN_OUT) if mode.endswith("_FWD")]
_MODES = frozenset(
    {*_TORCH_FUNCTIONS, *_WRITTEN_OUT, "ADD_SQUARE", "BINARY_SELECT", "GEN_INDEX"}
    | {mode.replace("_FWD", "_BWD") for mode in _FORWARD}
)


def _method(mode: str) -> str:
    """The method of a mode: ``relu`` of RELU_FWD, ``relu_backward`` of RELU_BWD."""
    return mode.removesuffix("_FWD").replace("_BWD", "_BACKWARD").lower()


def _number(where: str, what: str, value: float | None) -> float | None:
    return None if value is None else checked_number(where, what, value, "a number", limit=True)


class PointwiseMethods(NodeList[Operand]):
    """The methods that add element-wise operations.

    Each takes tensors that broadcast against each other (aligned at the last dimension), then ``compute_data_type``,
    the type of the arithmetic, and ``name``. Each returns one tensor, ``<name>::OUT_0``; where its strides are not set,
    it takes those of the last input of its shape.
    """

    def _pointwise(self, mode: str, inputs: list[Operand], compute: object, name: str, **attributes: Any) -> Tensor:
        name = self._indexed(name)
        for index, tensor in enumerate(inputs):
            if isinstance(tensor, Tensor) and not tensor.name:  # pyright: ignore[reportUnnecessaryIsInstance]
                tensor.name = f"{name}::IN_{index}"
        ports = {f"IN_{index}": tensor for index, tensor in enumerate(inputs)}
        return self._add(Pointwise, name, compute, ports, ["OUT_0"], mode=mode, **attributes).outputs["OUT_0"]

    def add(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a + b``."""
        return self._pointwise("ADD", [a, b], compute_data_type, name)

    def sub(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a - b``."""
        return self._pointwise("SUB", [a, b], compute_data_type, name)

    def mul(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a * b``."""
        return self._pointwise("MUL", [a, b], compute_data_type, name)

    def div(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a / b``."""
        return self._pointwise("DIV", [a, b], compute_data_type, name)

    def add_square(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a + b * b``."""
        return self._pointwise("ADD_SQUARE", [a, b], compute_data_type, name)

    def logical_and(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a and b``."""
        return self._pointwise("LOGICAL_AND", [a, b], compute_data_type, name)

    def logical_or(self, a: Operand, b: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``a or b``."""
        return self._pointwise("LOGICAL_OR", [a, b], compute_data_type, name)

    def bias(self, input: Operand, bias: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``input + bias``."""
        return self._pointwise("ADD", [input, bias], compute_data_type, name)

    def scale(self, input: Operand, scale: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``input * scale``."""
        return self._pointwise("MUL", [input, scale], compute_data_type, name)

    def max(self, input0: Operand, input1: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """The larger of the two."""
        return self._pointwise("MAX", [input0, input1], compute_data_type, name)

    def min(self, input0: Operand, input1: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """The smaller of the two."""
        return self._pointwise("MIN", [input0, input1], compute_data_type, name)

    def mod(self, input0: Operand, input1: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Remainder of ``input0 / input1`` with the sign of ``input0`` (C's fmod)."""
        return self._pointwise("MOD", [input0, input1], compute_data_type, name)

    def pow(self, input0: Operand, input1: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``input0 ** input1``."""
        return self._pointwise("POW", [input0, input1], compute_data_type, name)

    def cmp_eq(
        self, input: Operand, comparison: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """1 where ``input == comparison``, else 0."""
        return self._pointwise("CMP_EQ", [input, comparison], compute_data_type, name)

    def cmp_neq(
        self, input: Operand, comparison: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """1 where ``input != comparison``, else 0."""
        return self._pointwise("CMP_NEQ", [input, comparison], compute_data_type, name)

    def cmp_gt(
        self, input: Operand, comparison: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """1 where ``input > comparison``, else 0."""
        return self._pointwise("CMP_GT", [input, comparison], compute_data_type, name)

    def cmp_ge(
        self, input: Operand, comparison: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """1 where ``input >= comparison``, else 0."""
        return self._pointwise("CMP_GE", [input, comparison], compute_data_type, name)

    def cmp_lt(
        self, input: Operand, comparison: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """1 where ``input < comparison``, else 0."""
        return self._pointwise("CMP_LT", [input, comparison], compute_data_type, name)

    def cmp_le(
        self, input: Operand, comparison: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """1 where ``input <= comparison``, else 0."""
        return self._pointwise("CMP_LE", [input, comparison], compute_data_type, name)

    def sqrt(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Square root."""
        return self._pointwise("SQRT", [input], compute_data_type, name)

    def rsqrt(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``1 / sqrt(input)``."""
        return self._pointwise("RSQRT", [input], compute_data_type, name)

    def reciprocal(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``1 / input``."""
        return self._pointwise("RECIPROCAL", [input], compute_data_type, name)

    def erf(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Error function."""
        return self._pointwise("ERF", [input], compute_data_type, name)

    def identity(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """The input, converted to the type of the output."""
        return self._pointwise("IDENTITY", [input], compute_data_type, name)

    def exp(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``e ** input``."""
        return self._pointwise("EXP", [input], compute_data_type, name)

    def log(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Natural logarithm."""
        return self._pointwise("LOG", [input], compute_data_type, name)

    def neg(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``-input``."""
        return self._pointwise("NEG", [input], compute_data_type, name)

    def abs(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Absolute value."""
        return self._pointwise("ABS", [input], compute_data_type, name)

    def ceil(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Smallest integer not below the input."""
        return self._pointwise("CEIL", [input], compute_data_type, name)

    def floor(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Largest integer not above the input."""
        return self._pointwise("FLOOR", [input], compute_data_type, name)

    def sin(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Sine of radians."""
        return self._pointwise("SIN", [input], compute_data_type, name)

    def cos(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Cosine of radians."""
        return self._pointwise("COS", [input], compute_data_type, name)

    def tan(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Tangent of radians."""
        return self._pointwise("TAN", [input], compute_data_type, name)

    def logical_not(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``not input``."""
        return self._pointwise("LOGICAL_NOT", [input], compute_data_type, name)

    def tanh(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """Hyperbolic tangent."""
        return self._pointwise("TANH_FWD", [input], compute_data_type, name)

    def elu(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``input`` where positive, else ``exp(input) - 1``."""
        return self._pointwise("ELU_FWD", [input], compute_data_type, name)

    def gelu(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``input * Phi(input)`` with the normal distribution function (Hendrycks and Gimpel, 2016)."""
        return self._pointwise("GELU_FWD", [input], compute_data_type, name)

    def gelu_approx_tanh(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """GELU with the tanh approximation of Hendrycks and Gimpel, 2016."""
        return self._pointwise("GELU_APPROX_TANH_FWD", [input], compute_data_type, name)

    def sigmoid(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``1 / (1 + exp(-input))``."""
        return self._pointwise("SIGMOID_FWD", [input], compute_data_type, name)

    def softplus(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``log(1 + exp(input))``."""
        return self._pointwise("SOFTPLUS_FWD", [input], compute_data_type, name)

    def _relu(
        self,
        mode: str,
        inputs: list[Operand],
        compute: object,
        name: str,
        negative_slope: float | None,
        lower_clip: float | None,
        upper_clip: float | None,
    ) -> Tensor:
        where = name or _method(mode)
        return self._pointwise(
            mode,
            inputs,
            compute,
            name,
            negative_slope=_number(where, "negative_slope", negative_slope),
            lower_clip=_number(where, "lower_clip", lower_clip),
            upper_clip=_number(where, "upper_clip", upper_clip),
        )

    def relu(
        self,
        input: Operand,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input`` above ``lower_clip`` (0), a line of slope ``negative_slope`` (0) below; at most ``upper_clip``."""
        return self._relu("RELU_FWD", [input], compute_data_type, name, negative_slope, lower_clip, upper_clip)

    def leaky_relu(
        self, input: Operand, negative_slope: float, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``input`` where positive, else ``negative_slope * input``."""
        return self._relu("RELU_FWD", [input], compute_data_type, name, negative_slope, None, None)

    def swish(
        self, input: Operand, swish_beta: float | None = None, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``input * sigmoid(swish_beta * input)``; beta is 1 by default (SiLU)."""
        beta = _number(name or "swish", "swish_beta", swish_beta)
        return self._pointwise("SWISH_FWD", [input], compute_data_type, name, swish_beta=beta)

    def silu(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """``input * sigmoid(input)``."""
        return self._pointwise("SWISH_FWD", [input], compute_data_type, name)

    def gen_index(self, input: Operand, axis: int, compute_data_type: object = NOT_SET, name: str = "") -> Tensor:
        """The index along ``axis`` of each element of a tensor of the input's shape."""
        return self._pointwise("GEN_INDEX", [input], compute_data_type, name, axis=int(axis))

    def binary_select(
        self, input0: Operand, input1: Operand, mask: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``input0`` where ``mask`` is true, else ``input1``."""
        return self._pointwise("BINARY_SELECT", [input0, input1, mask], compute_data_type, name)

    def relu_backward(
        self,
        loss: Operand,
        input: Operand,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``relu`` at ``input``."""
        return self._relu("RELU_BWD", [loss, input], compute_data_type, name, negative_slope, lower_clip, upper_clip)

    def leaky_relu_backward(
        self, loss: Operand, input: Operand, negative_slope: float, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``leaky_relu`` at ``input``."""
        return self._relu("RELU_BWD", [loss, input], compute_data_type, name, negative_slope, None, None)

    def swish_backward(
        self,
        loss: Operand,
        input: Operand,
        compute_data_type: object = NOT_SET,
        swish_beta: float | None = None,
        name: str = "",
    ) -> Tensor:
        """``loss`` times the derivative of ``swish`` at ``input``."""
        beta = _number(name or "swish_backward", "swish_beta", swish_beta)
        return self._pointwise("SWISH_BWD", [loss, input], compute_data_type, name, swish_beta=beta)

    def tanh_backward(
        self, loss: Operand, input: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``tanh`` at ``input``."""
        return self._pointwise("TANH_BWD", [loss, input], compute_data_type, name)

    def sigmoid_backward(
        self, loss: Operand, input: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``sigmoid`` at ``input``."""
        return self._pointwise("SIGMOID_BWD", [loss, input], compute_data_type, name)

    def elu_backward(
        self, loss: Operand, input: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``elu`` at ``input``."""
        return self._pointwise("ELU_BWD", [loss, input], compute_data_type, name)

    def gelu_backward(
        self, loss: Operand, input: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``gelu`` at ``input``."""
        return self._pointwise("GELU_BWD", [loss, input], compute_data_type, name)

    def softplus_backward(
        self, loss: Operand, input: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``softplus`` at ``input``."""
        return self._pointwise("SOFTPLUS_BWD", [loss, input], compute_data_type, name)

    def gelu_approx_tanh_backward(
        self, loss: Operand, input: Operand, compute_data_type: object = NOT_SET, name: str = ""
    ) -> Tensor:
        """``loss`` times the derivative of ``gelu_approx_tanh`` at ``input``."""
        return self._pointwise("GELU_APPROX_TANH_BWD", [loss, input], compute_data_type, name)
