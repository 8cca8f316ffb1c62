"""Pooling over one to three spatial dimensions, and its gradient."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.arrays.layout import strides_like
from cudnn.backend import enums as be
from cudnn.enums import data_type, padding_mode, resample_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand, where_of
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

MAXPOOL, ZERO_PAD = resample_mode.MAXPOOL, padding_mode.ZERO_PAD
POOLING = (MAXPOOL, resample_mode.AVGPOOL_INCLUDE_PADDING, resample_mode.AVGPOOL_EXCLUDE_PADDING)
INDEX_TYPES = (data_type.INT8, data_type.INT32)


@dataclasses.dataclass(eq=False, kw_only=True)
class Resample(Node):
    """What pooling and its gradient have in common.

    They relate an image ``[N, C, *spatial]`` and a response ``[N, C, *extents]`` with
    ``extents = 1 + (spatial + pre_padding + post_padding - window) // stride``.
    """

    operation: ClassVar[be.DescriptorType]

    resampling_mode: resample_mode
    pre_padding: list[int]
    post_padding: list[int]
    stride: list[int]
    window: list[int]
    padding_mode: padding_mode = ZERO_PAD

    def _check_options(self, spatial: int) -> None:
        if self.resampling_mode not in POOLING:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "resampling_mode",
                self.resampling_mode.name,
                ", ".join(mode.name for mode in POOLING),
                "interpolate with PyTorch: cuDNN 9.19 and 9.28 build no plan for it",
            )
        self.pre_padding = self.pre_padding or [0] * spatial
        self.post_padding = self.post_padding or [0] * spatial
        for what, least in (("window", 1), ("stride", 1), ("pre_padding", 0), ("post_padding", 0)):
            values: list[int] = getattr(self, what)
            if len(values) != spatial or min(values) < least:
                raise make_error(
                    ValueError,
                    self.where,
                    what,
                    values or "nothing, it is not set",
                    f"{spatial} whole numbers from {least} upwards, one per spatial dimension",
                    f"pass for instance {what}={[least] * spatial}",
                )
        padding = zip(self.pre_padding, self.post_padding, self.window, strict=True)
        if any(max(pre, post) >= window for pre, post, window in padding):
            raise make_error(
                ValueError,
                self.where,
                "pre_padding and post_padding",
                f"{self.pre_padding} and {self.post_padding}",
                f"less than the window, {self.window}",
                "pad less: such a window would lie outside the image",
            )

    def _extents(self, image: Sequence[int]) -> list[int]:
        """The shape of the response to an image of this shape."""
        options = zip(image[2:], self.pre_padding, self.post_padding, self.window, self.stride, strict=True)
        extents = [1 + (extent + pre + post - window) // stride for extent, pre, post, window, stride in options]
        if min(extents) < 1:
            raise make_error(
                ValueError,
                self.where,
                "window",
                f"{self.window} for an image of dim={[*image]}",
                f"one no larger than the image with padding {self.pre_padding} and {self.post_padding}",
                "take a smaller window",
            )
        return [*image[:2], *extents]

    def _check_index(self, index: Tensor, response: Tensor) -> None:
        last = prod(self.window) - 1
        if index.data_type is NOT_SET:
            index.data_type = data_type.INT8 if last < 128 else data_type.INT32
        fits = index.data_type is not data_type.INT8 or last < 128
        if index.data_type not in INDEX_TYPES or not fits or index.dim != response.dim:
            hint = "set its type to INT8 or INT32, and leave its shape to inference"
            raise make_error(
                ValueError,
                self.where,
                f"index (tensor {index.name!r})",
                f"{index.data_type.name} dim={index.dim}",
                f"INT8 (up to 128 elements in a window) or INT32, dim={response.dim}",
                hint if fits else f"make it INT32: a window has {last + 1} elements",
            )

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        # The values in the padding matter only if there is padding and the average counts it.
        padding = ZERO_PAD if self.resampling_mode is not MAXPOOL else padding_mode.NEG_INF_PAD
        counted = self.resampling_mode is not resample_mode.AVGPOOL_EXCLUDE_PADDING
        if self.padding_mode is not padding and counted and any(self.pre_padding + self.post_padding):
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "padding_mode",
                self.padding_mode.name,
                f"{padding.name} for {self.resampling_mode.name} with cuDNN",
                f"pass padding_mode=cudnn.padding_mode.{padding.name}, or pad nothing",
            )
        pooling = lowering.descriptor(
            be.DescriptorType.RESAMPLE,
            {
                a.RESAMPLE_MODE: be.ResampleMode[self.resampling_mode.name],
                a.RESAMPLE_COMP_TYPE: lowering.data_type(self.compute_data_type),
                a.RESAMPLE_PADDING_MODE: be.PaddingMode[padding.name],
                a.RESAMPLE_SPATIAL_DIMS: len(self.window),
                a.RESAMPLE_WINDOW_DIMS: self.window,
                a.RESAMPLE_STRIDES: self.stride,
                a.RESAMPLE_PRE_PADDINGS: self.pre_padding,
                a.RESAMPLE_POST_PADDINGS: self.post_padding,
            },
        )
        prefix = self.operation.name
        tensors = {
            a[f"{prefix}_{'IDX' if port == 'INDEX' else port}DESC"]: tensor
            for port, tensor in {**self.inputs, **self.outputs}.items()
        }
        lowering.operation(self.operation, {a[f"{prefix}_DESC"]: pooling, **tensors})

    def _windows(self, image: Any) -> Any:
        """``[N, C, *extents, elements]``: the elements of the window at each output position."""
        pairs = zip(reversed(self.pre_padding), reversed(self.post_padding), strict=True)
        amounts = [amount for pair in pairs for amount in pair]
        if self.padding_mode is padding_mode.EDGE_VAL_PAD:
            image = torch.nn.functional.pad(image, amounts, mode="replicate")
        else:
            value = -inf if self.padding_mode is padding_mode.NEG_INF_PAD else 0.0
            image = torch.nn.functional.pad(image, amounts, value=value)
        for axis, (window, stride) in enumerate(zip(self.window, self.stride, strict=True), start=2):
            image = image.unfold(axis, window, stride)
        return image.flatten(2 + len(self.window))

    def _shares(self, image: Any) -> Any:
        """What each element of a window counts in its average, shaped as the windows of ``image``."""
        if self.resampling_mode is resample_mode.AVGPOOL_INCLUDE_PADDING:
            return torch.full_like(self._windows(image), 1 / prod(self.window))
        inside = dataclasses.replace(self, padding_mode=ZERO_PAD)._windows(torch.ones_like(image))
        return inside / inside.sum(-1, keepdim=True)


@dataclasses.dataclass(eq=False, kw_only=True)
class ResampleForward(Resample):
    """Y = the largest element or the average of each window of X; INDEX = where in its window the largest stands."""

    tag = "RESAMPLE_FWD"
    method = "resample"
    operation = be.DescriptorType.OPERATION_RESAMPLE_FWD

    def infer(self, context: Context) -> None:
        x = self.inputs["X"]
        self.rank_check([3, 4, 5], "X")
        self._check_options(len(x.dim) - 2)
        for port in self.outputs:
            self.fill_output(port, self._extents(x.dim), lambda dims: strides_like(x.stride, x.dim, dims))
        if "INDEX" in self.outputs:
            if self.resampling_mode is not MAXPOOL:
                raise make_error(
                    ValueError,
                    self.where,
                    "generate_index",
                    f"True for {self.resampling_mode.name}",
                    "MAXPOOL",
                    "leave it out: the gradient of an average needs no index",
                )
            self._check_index(self.outputs["INDEX"], self.outputs["Y"])

    def lower(self, lowering: Lowering) -> None:
        # The engine that cuDNN 9.19 has for row-major tensors takes an index of any type; 9.28 has none.
        if "INDEX" in self.outputs and self.inputs["X"].stride[1] != 1:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "generate_index",
                f"True for stride={self.inputs['X'].stride}",
                "channels-last strides with cuDNN",
                "store the image as [N, *spatial, C], or pass input and output to resample_backward",
            )
        super().lower(lowering)

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x = values["X"]
        x = x if x.is_floating_point() else x.double()
        windows = self._windows(x)
        if self.resampling_mode is MAXPOOL:
            return {"Y": windows.amax(-1), "INDEX": windows.argmax(-1)}
        shares = self._shares(x)
        return {"Y": torch.where(shares == 0, 0, windows * shares).sum(-1)}


@dataclasses.dataclass(eq=False, kw_only=True)
class ResampleBackward(Resample):
    """DX from DY, with INDEX, or X and Y, for the largest elements."""

    tag = "RESAMPLE_BWD"
    method = "resample_backward"
    operation = be.DescriptorType.OPERATION_RESAMPLE_BWD
    optional = frozenset({"INDEX", "X", "Y"})
    exact_ports = frozenset({"INDEX"})

    def infer(self, context: Context) -> None:
        dy, dx, x = self.inputs["DY"], self.outputs["DX"], self.inputs.get("X")
        self.rank_check([3, 4, 5], *self.inputs)
        self._check_options(len(dy.dim) - 2)
        if self.resampling_mode is MAXPOOL and "INDEX" not in self.inputs and not {"X", "Y"} <= self.inputs.keys():
            raise make_error(
                ValueError,
                self.where,
                "index",
                "nothing, and not both input and output",
                "one or the other for MAXPOOL",
                "pass the second result of resample(generate_index=True)",
            )
        if x is None and not dx.dim:
            raise make_error(
                ValueError,
                self.where,
                "output DX",
                "no dim",
                "the shape of the image: several have this response",
                "call set_dim() on it, or pass input",
            )
        dims = x.dim if x is not None else dx.dim
        y = self.inputs.get("Y", dy)
        expected = self._extents(dims) if len(dims) == len(dy.dim) else "the same number of dimensions as DX"
        if not dy.dim == y.dim == expected:
            raise make_error(
                ValueError,
                self.where,
                "shapes",
                f"DX dim={dims}, DY dim={dy.dim}, Y dim={y.dim}",
                f"DY and Y dim: {expected}",
                "correct the one that is wrong",
            )
        self.fill_output("DX", dims, lambda dims: strides_like(dy.stride, dy.dim, dims))
        if "INDEX" in self.inputs:
            self._check_index(self.inputs["INDEX"], dy)

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        dy = values["DY"]
        dy = dy if dy.is_floating_point() else dy.double()
        with torch.enable_grad():
            image = torch.zeros(self.outputs["DX"].dim, dtype=dy.dtype, device=dy.device, requires_grad=True)
            windows = self._windows(image)
        if self.resampling_mode is not MAXPOOL:
            shares = self._shares(image.detach())
        else:
            index = values["INDEX"].long() if "INDEX" in values else self._windows(values["X"].to(dy.dtype)).argmax(-1)
            shares = torch.nn.functional.one_hot(index, windows.shape[-1])
        return {"DX": torch.autograd.grad(windows, image, shares * dy.unsqueeze(-1))[0]}


class ResampleMethods(NodeList[Operand]):
    """The methods that add pooling."""

    def resample(
        self,
        input: Operand,
        resampling_mode: resample_mode,
        padding_mode: padding_mode = ZERO_PAD,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        window: Sequence[int] = (),
        generate_index: bool = False,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Any:
        """Pooling of ``input`` ``[N, C, *spatial]``: the largest element, or the average, of each window. Needs
        ``window`` and ``stride``; ``pre_padding`` and ``post_padding`` are 0 unless given.

        All four are lists of whole numbers, one for each of the one to three spatial dimensions. A padding is smaller
        than its window. cuDNN requires FLOAT for ``compute_data_type``.

        Args:
            resampling_mode: MAXPOOL, AVGPOOL_INCLUDE_PADDING (divides by the size of the window) or
                AVGPOOL_EXCLUDE_PADDING (by how much of the window lies in the image). BILINEAR and NEAREST are refused.
            padding_mode: Value of the padding. cuDNN requires NEG_INF_PAD for MAXPOOL and ZERO_PAD for averages
                where anything is padded; the reference executor takes EDGE_VAL_PAD too.
            generate_index: Also returns the place of the largest element in its window, for ``resample_backward``: a
                number in row-major order, INT8, or INT32 where a window has more than 128 elements. cuDNN has it for
                channels-last tensors.

        Returns:
            Y ``[N, C, *extents]``, ``extents = 1 + (spatial + pre_padding + post_padding - window) // stride``, in the
            stride order of ``input``; ``[Y, INDEX]`` with ``generate_index``.
        """
        node = self._resample(ResampleForward, {"X": input}, ["Y", "INDEX"][: 1 + bool(generate_index)], locals())
        return [*node.outputs.values()] if generate_index else node.outputs["Y"]

    def resample_backward(
        self,
        loss: Operand,
        resampling_mode: resample_mode,
        padding_mode: padding_mode = ZERO_PAD,
        pre_padding: Sequence[int] = (),
        post_padding: Sequence[int] = (),
        stride: Sequence[int] = (),
        window: Sequence[int] = (),
        index: Operand | None = None,
        input: Operand | None = None,
        output: Operand | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Gradient of ``resample`` with respect to its input, from that of Y and the same ``window``, ``stride``,
        ``pre_padding`` and ``post_padding``.

        MAXPOOL needs the ``index`` of the forward pass, or its ``input`` and ``output``: cuDNN the first for
        channels-last tensors, the other two for row-major ones. Returns DX: set its shape unless ``input`` is given.
        """
        inputs = {"DY": loss, "INDEX": index, "X": input, "Y": output}
        return self._resample(ResampleBackward, inputs, ["DX"], locals()).outputs["DX"]

    def _resample(
        self, cls: type[Resample], inputs: Mapping[str, object], outputs: Sequence[str], arguments: Mapping[str, Any]
    ) -> Resample:
        where = where_of(arguments["name"], cls.method)
        enums = {"resampling_mode": resample_mode, "padding_mode": padding_mode}
        for what, enum in enums.items():
            if not isinstance(arguments[what], enum) or arguments[what] is resample_mode.NOT_SET:
                allowed = ", ".join(member.name for member in enum if member.name != "NOT_SET")
                raise make_error(
                    ValueError,
                    where,
                    what,
                    repr(arguments[what]),
                    f"cudnn.{enum.__name__}. {allowed}",
                    "pass one of them",
                )
        modes = {what: arguments[what] for what in enums}
        lists = {
            what: _whole(where, what, arguments[what]) for what in ("pre_padding", "post_padding", "stride", "window")
        }
        return self._add(cls, arguments["name"], arguments["compute_data_type"], inputs, outputs, **modes, **lists)


def _whole(where: str, what: str, values: Iterable[int]) -> list[int]:
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise make_error(
            TypeError,
            where,
            what,
            repr(values),
            "a list of whole numbers, one per spatial dimension",
            f"pass for instance {what}=[1, 1]",
        ) from None
