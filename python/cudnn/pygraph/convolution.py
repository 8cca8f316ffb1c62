"""Convolution over one to three spatial dimensions, and its two gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn import enums
from cudnn.arrays.layout import channels_last
from cudnn.backend import enums as be
from cudnn.errors import make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand, where_of
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

CROSS_CORRELATION = enums.convolution_mode.CROSS_CORRELATION


@dataclasses.dataclass(eq=False, kw_only=True)
class Convolution(Node):
    """What the three have in common.

    They relate an image ``[N, C, *spatial]``, a filter ``[K, C / groups, *window]`` and a response ``[N, K, *extents]``
    with ``extents = 1 + (spatial + pre_padding + post_padding - dilation * (window - 1) - 1) // stride``. The number of
    groups follows from the channels of image and filter.
    """

    image: ClassVar[str] = "X"  # ports of the three tensors
    filter: ClassVar[str] = "W"
    response: ClassVar[str] = "Y"
    operation: ClassVar[be.DescriptorType]
    prefix: ClassVar[str]  # of the backend attributes

    pre_padding: list[int]
    post_padding: list[int]
    stride: list[int]
    dilation: list[int]
    convolution_mode: enums.convolution_mode = CROSS_CORRELATION

    def infer(self, context: Context) -> None:
        self.rank_check([3, 4, 5], *self.inputs)
        (port, output), *_ = self.outputs.items()
        first, second = self.inputs.values()
        rank = len(first.dim)
        if len(second.dim) != rank or len(output.dim) not in (0, rank):
            raise make_error(ValueError, self.where, "shapes", self._shapes(), "one rank", "add extents of 1")
        self._check_lists(rank - 2)
        if not output.dim:
            output.dim = self._missing(port)
        output.fill(output.dim, channels_last)
        self._check_channels()
        self._check_extents()

    def _missing(self, port: str) -> list[int]:
        """The shape of the output where the user has not set it."""
        raise NotImplementedError

    def _dim(self, port: str) -> list[int]:
        return (self.inputs.get(port) or self.outputs[port]).dim

    def _shapes(self) -> str:
        return ", ".join(f"{port} dim={tensor.dim}" for port, tensor in {**self.inputs, **self.outputs}.items())

    def _check_lists(self, spatial: int) -> None:
        # Published programs leave out stride and dilation where they are 1, never padding; the API refuses its absence.
        self.stride = self.stride or [1] * spatial
        self.dilation = self.dilation or [1] * spatial
        for what, argument, least in (
            ("pre_padding", "padding", 0),
            ("post_padding", "padding", 0),
            ("stride", "stride", 1),
            ("dilation", "dilation", 1),
        ):
            values: list[int] = getattr(self, what)
            if len(values) != spatial or min(values) < least:
                raise make_error(
                    ValueError,
                    self.where,
                    what,
                    values or "nothing, it is not set",
                    f"{spatial} numbers from {least} upwards, one per spatial dimension",
                    f"pass for instance {argument}={[least] * spatial}",
                )

    def _check_channels(self) -> None:
        (_, channels, *_), (kernels, per_group, *_) = self._dim(self.image), self._dim(self.filter)
        if min(channels, per_group) < 1 or channels % per_group or kernels % (channels // per_group):
            raise make_error(
                ValueError,
                self.where,
                "channels",
                self._shapes(),
                f"{self.image} [N, C, ..] and {self.filter} [K, C / groups, ..] with groups a divisor of C and of K",
                "correct the second extents",
            )

    def _check_extents(self) -> None:
        image, filter, response = self._dim(self.image), self._dim(self.filter), self._dim(self.response)
        options = f"padding {self.pre_padding} and {self.post_padding}, stride {self.stride}, dilation {self.dilation}"
        expected = self._response(image, filter)
        if min(expected) < 1:
            raise make_error(
                ValueError,
                self.where,
                "window",
                f"{self._shapes()}, {options}",
                "a dilated window no larger than the padded image",
                "pad more or dilate less",
            )
        if response != expected:
            raise make_error(
                ValueError,
                self.where,
                "shapes",
                self._shapes(),
                f"{self.response} dim={expected} for these {self.image} and {self.filter} with {options}",
                "correct the one that is wrong",
            )

    def _response(self, image: Sequence[int], filter: Sequence[int]) -> list[int]:
        extents = [
            1 + (extent + pre + post - dilation * (window - 1) - 1) // stride
            for extent, window, pre, post, stride, dilation in zip(
                image[2:], filter[2:], self.pre_padding, self.post_padding, self.stride, self.dilation, strict=True
            )
        ]
        return [image[0], filter[0], *extents]

    def _needs_unit_stride(self, port: str) -> None:
        if any(step != 1 for step in self.stride):
            raise make_error(
                ValueError,
                self.where,
                f"output {port}",
                f"no dim with stride={self.stride}",
                "an inferred shape for stride 1 only, since several shapes fit others",
                "call set_dim() on it",
            )

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        kernel = lowering.descriptor(
            be.DescriptorType.CONVOLUTION,
            {
                a.CONVOLUTION_COMP_TYPE: lowering.data_type(self.compute_data_type),
                a.CONVOLUTION_CONV_MODE: be.ConvolutionMode[self.convolution_mode.name],
                a.CONVOLUTION_SPATIAL_DIMS: len(self.stride),
                a.CONVOLUTION_PRE_PADDINGS: self.pre_padding,
                a.CONVOLUTION_POST_PADDINGS: self.post_padding,
                a.CONVOLUTION_DILATIONS: self.dilation,
                a.CONVOLUTION_FILTER_STRIDES: self.stride,
            },
        )
        fields: dict[str, Any] = {"CONV_DESC": kernel, **self.inputs, **self.outputs, "ALPHA": 1.0, "BETA": 0.0}
        lowering.operation(self.operation, {a[f"{self.prefix}_{key}"]: value for key, value in fields.items()})

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        first, second = values.values()
        dtype = first.dtype
        # PyTorch convolves no integers, and on a GPU float32 perhaps in TF32; float64 is exact for both.
        if first.is_cuda or not dtype.is_floating_point:
            first, second = first.double(), second.double()
        (port,) = self.outputs
        return {port: self._formula(first, second).to(dtype)}

    def _formula(self, first: Any, second: Any) -> Any:
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        groups = self._dim(self.image)[1] // self._dim(self.filter)[1]
        return {"stride": self.stride, "dilation": self.dilation, "groups": groups}

    def _padded(self, image: Any) -> Any:
        """The image with its padding in it: PyTorch's own padding is the same on both sides."""
        pairs = zip(reversed(self.pre_padding), reversed(self.post_padding), strict=True)
        return torch.nn.functional.pad(image, [amount for pair in pairs for amount in pair])

    def _oriented(self, filter: Any) -> Any:
        """The filter as cross-correlation takes it."""
        if self.convolution_mode is CROSS_CORRELATION:
            return filter
        return filter.flip(list(range(2, filter.dim())))

    def _function(self, suffix: str) -> Any:
        module = torch.nn.grad if suffix else torch.nn.functional
        return getattr(module, f"conv{len(self.stride)}d{suffix}")


@dataclasses.dataclass(eq=False, kw_only=True)
class ConvolutionForward(Convolution):
    """Y from X and W."""

    tag = "CONV_FPROP"
    method = "conv_fprop"
    operation = be.DescriptorType.OPERATION_CONVOLUTION_FORWARD
    prefix = "OPERATION_CONVOLUTION_FORWARD"

    def _missing(self, port: str) -> list[int]:
        return self._response(self._dim("X"), self._dim("W"))

    def _formula(self, first: Any, second: Any) -> Any:
        return self._function("")(self._padded(first), self._oriented(second), **self._options())


@dataclasses.dataclass(eq=False, kw_only=True)
class ConvolutionDataGradient(Convolution):
    """DX from DY and W."""

    tag = "CONV_DGRAD"
    method = "conv_dgrad"
    image, response = "DX", "DY"
    operation = be.DescriptorType.OPERATION_CONVOLUTION_BACKWARD_DATA
    prefix = "OPERATION_CONVOLUTION_BWD_DATA"

    def _missing(self, port: str) -> list[int]:
        self._needs_unit_stride(port)
        response, filter = self._dim("DY"), self._dim("W")
        extents = [
            extent + dilation * (window - 1) - pre - post
            for extent, window, pre, post, dilation in zip(
                response[2:], filter[2:], self.pre_padding, self.post_padding, self.dilation, strict=True
            )
        ]
        return [response[0], filter[1], *extents]

    def _formula(self, first: Any, second: Any) -> Any:
        image = self._dim("DX")
        padded = [*image]
        for axis, (pre, post) in enumerate(zip(self.pre_padding, self.post_padding, strict=True), start=2):
            padded[axis] += pre + post
        gradient = self._function("_input")(padded, self._oriented(second), first, **self._options())
        for axis, pre in enumerate(self.pre_padding, start=2):
            gradient = gradient.narrow(axis, pre, image[axis])
        return gradient


@dataclasses.dataclass(eq=False, kw_only=True)
class ConvolutionFilterGradient(Convolution):
    """DW from X and DY."""

    tag = "CONV_WGRAD"
    method = "conv_wgrad"
    filter, response = "DW", "DY"
    operation = be.DescriptorType.OPERATION_CONVOLUTION_BACKWARD_FILTER
    prefix = "OPERATION_CONVOLUTION_BWD_FILTER"

    def _missing(self, port: str) -> list[int]:
        self._needs_unit_stride(port)
        image, response = self._dim("X"), self._dim("DY")
        windows = [
            (extent + pre + post - out) // dilation + 1
            for extent, out, pre, post, dilation in zip(
                image[2:], response[2:], self.pre_padding, self.post_padding, self.dilation, strict=True
            )
        ]
        return [response[1], image[1], *windows]

    def _formula(self, first: Any, second: Any) -> Any:
        gradient = self._function("_weight")(self._padded(first), self._dim("DW"), second, **self._options())
        return self._oriented(gradient)


class ConvolutionMethods(NodeList[Operand]):
    """The methods that add convolutions.

    Shapes are ``[N, C, *spatial]`` for images and ``[K, C / groups, *window]`` for filters, with one to three spatial
    dimensions; outputs are channels-last unless their strides are set. ``padding`` stands for equal ``pre_padding`` and
    ``post_padding``; ``stride`` and ``dilation`` are 1 where left out. ``convolution_mode`` CONVOLUTION mirrors the
    filter, CROSS_CORRELATION (what PyTorch computes) does not.
    """

    def _convolution(
        self, cls: type[Convolution], name: str, inputs: Mapping[str, object], arguments: Mapping[str, Any]
    ) -> Tensor:
        where, mode = where_of(name, cls.method), arguments["convolution_mode"]
        if not isinstance(mode, enums.convolution_mode):
            raise make_error(
                TypeError,
                where,
                "convolution_mode",
                repr(mode),
                "a cudnn.convolution_mode",
                "pass pre_padding= and post_padding= by keyword: the third argument is padding",
            )
        padding, pre_padding, post_padding, stride, dilation = (
            _numbers(where, what, arguments[what])
            for what in ("padding", "pre_padding", "post_padding", "stride", "dilation")
        )
        if padding and (pre_padding or post_padding):
            raise make_error(
                ValueError,
                where,
                "padding",
                "padding together with pre_padding or post_padding",
                "one of the two forms",
                "leave padding out",
            )
        output = next(port for port in (cls.image, cls.filter, cls.response) if port not in inputs)
        node = self._add(
            cls,
            name,
            arguments["compute_data_type"],
            inputs,
            [output],
            pre_padding=pre_padding or padding,
            post_padding=post_padding or padding,
            stride=stride,
            dilation=dilation,
            convolution_mode=mode,
        )
        return node.outputs[output]

    def conv_fprop(
        self,
        image: Operand,
        weight: Operand,
        padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: enums.convolution_mode = CROSS_CORRELATION,
        compute_data_type: object = NOT_SET,
        name: str = "",
        *,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
    ) -> Tensor:
        """Convolution of ``image`` ``[N, C, *spatial]`` with ``weight`` ``[K, C / groups, *window]``. Needs
        ``padding``, or ``pre_padding`` and ``post_padding``; ``stride`` and ``dilation`` are 1 unless given.

        Returns Y ``[N, K, *extents]`` with
        ``extents = 1 + (spatial + pre_padding + post_padding - dilation * (window - 1) - 1) // stride``.
        """
        return self._convolution(ConvolutionForward, self._indexed(name), {"X": image, "W": weight}, locals())

    def conv_dgrad(
        self,
        loss: Operand,
        filter: Operand | None = None,
        padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: enums.convolution_mode = CROSS_CORRELATION,
        compute_data_type: object = NOT_SET,
        name: str = "",
        *,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
        weight: Operand | None = None,
    ) -> Tensor:
        """Gradient of ``conv_fprop`` with respect to its image. Takes the same ``padding``, or ``pre_padding`` and
        ``post_padding``, ``stride`` and ``dilation``.

        ``loss`` is the gradient of Y, ``[N, K, *extents]``; ``filter`` (or ``weight``) is the filter. Returns DX
        ``[N, C, *spatial]``: set its shape, save for stride 1 without groups, where only one fits and is inferred.
        """
        inputs = {"DY": loss, "W": weight if filter is None else filter}
        return self._convolution(ConvolutionDataGradient, name, inputs, locals())

    def conv_wgrad(
        self,
        image: Operand,
        loss: Operand,
        padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: enums.convolution_mode = CROSS_CORRELATION,
        compute_data_type: object = NOT_SET,
        name: str = "",
        *,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
    ) -> Tensor:
        """Gradient of ``conv_fprop`` with respect to its weight. Takes the same ``padding``, or ``pre_padding`` and
        ``post_padding``, ``stride`` and ``dilation``.

        ``loss`` is the gradient of Y, ``[N, K, *extents]``. Returns DW ``[K, C / groups, *window]``: set its shape,
        save for stride 1 without groups, where it is inferred.
        """
        return self._convolution(ConvolutionFilterGradient, name, {"X": image, "DY": loss}, locals())


def _numbers(where: str, what: str, values: Iterable[int]) -> list[int]:
    try:
        return [int(value) for value in values]
    except TypeError:
        raise make_error(
            TypeError, where, what, repr(values), "a list of numbers, one per spatial dimension", f"pass {what}=[..]"
        ) from None
