"""Normalizations: layer, adaptive layer, RMS, instance and batch, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar, overload

from cudnn.arrays.layout import channels_last, strides_like
from cudnn.backend import enums as be
from cudnn.enums import data_type, norm_forward_phase
from cudnn.errors import checked_number, make_error
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand, where_of
from cudnn.pygraph.subgraph import SubGraph
from cudnn.pygraph.tensor import Results, Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

_log = logging.getLogger("cudnn")
Dims = Sequence[int]


@dataclasses.dataclass(frozen=True)
class NormType:
    """Type of a normalization: the axes of its statistics and of its parameters.

    ``pooled`` gives, from the shapes of X and SCALE, the dimensions over which the statistics are taken.
    """

    mode: be.NormMode
    pooled: Callable[[Dims, Dims], list[int]]
    parameters: Callable[[Dims], list[int]]  # shape of SCALE and BIAS where the user has set none
    vector_axis: int = -1  # the dimension that a SCALE or BIAS of rank 1 runs along
    by_channel: bool = False  # statistics in NHWC order instead of the order of X
    centered: bool = True  # False: no mean is subtracted

    def statistics(self, x: Dims, scale: Dims) -> list[int]:
        """Shape of MEAN and INV_VARIANCE."""
        pooled = self.pooled(x, scale)
        return [1 if axis in pooled else extent for axis, extent in enumerate(x)]


def _where_scale_varies(_: Dims, scale: Dims) -> list[int]:
    return [axis for axis, extent in enumerate(scale) if extent != 1]


def _one_sample(x: Dims) -> list[int]:
    return [1, *x[1:]]


def _one_channel_vector(x: Dims) -> list[int]:
    return [1, x[1], *[1] * (len(x) - 2)]


LAYER = NormType(be.NormMode.LAYER_NORM, _where_scale_varies, _one_sample)
RMS = NormType(be.NormMode.RMS_NORM, _where_scale_varies, _one_sample, centered=False)
ADA_LAYER = NormType(
    be.NormMode.ADA_LAYER_NORM,
    lambda x, scale: [axis for axis in _where_scale_varies(x, scale) if axis > 0],
    lambda x: [x[0], *[1] * (len(x) - 2), x[-1]],
)
INSTANCE = NormType(
    be.NormMode.INSTANCE_NORM, lambda x, _: [*range(2, len(x))], _one_channel_vector, vector_axis=1, by_channel=True
)
BATCH = NormType(
    be.NormMode.BATCH_NORM, lambda x, _: [0, *range(2, len(x))], _one_channel_vector, vector_axis=1, by_channel=True
)


@dataclasses.dataclass(eq=False, kw_only=True)
class Normalization(Node):
    """What forward and backward share. Ports: X, SCALE, and others by kind."""

    norm: ClassVar[NormType]

    def prepare(self, context: Context) -> None:
        """Completes parameters and constants given without the rank of X, then does what every node does."""
        x = self.inputs["X"]
        if x.dim and x.stride:
            self.rank_check(range(2, 9), "X")
            for port in ("SCALE", "BIAS"):
                if port in self.inputs:
                    self._complete(self.inputs[port], x)
            for tensor in self.inputs.values():
                if tensor.value is not None and len(tensor.dim) < len(x.dim):
                    tensor.dim, tensor.stride = [1] * len(x.dim), [1] * len(x.dim)
        super().prepare(context)

    def _complete(self, parameter: Tensor, x: Tensor) -> None:
        if len(parameter.dim) == 1:
            (extent,), (step,) = parameter.dim, parameter.stride or [1]
            parameter.dim, parameter.stride = [1] * len(x.dim), [step * extent] * len(x.dim)
            parameter.dim[self.norm.vector_axis], parameter.stride[self.norm.vector_axis] = extent, step
        parameter.fill(self.norm.parameters(x.dim), channels_last if self.norm.by_channel else _like(x))

    @property
    def _statistics(self) -> list[int]:
        return self.norm.statistics(self.inputs["X"].dim, self.inputs["SCALE"].dim)

    def _check_shapes(self) -> None:
        """Refuses inputs whose shapes do not fit X."""
        x = self.inputs["X"].dim
        for port in ("SCALE", "BIAS"):
            if port not in self.inputs:
                continue
            dim = self.inputs[port].dim
            fits = len(dim) == len(x) and all(got in (1, extent) for got, extent in zip(dim, x, strict=True))
            if not fits or (self.norm.by_channel and dim != _one_channel_vector(x)):
                allowed = f"dim={self.norm.parameters(x)}" if self.norm.by_channel else "the extents of X, or 1"
                self._refuse_shape(port, allowed)
            if port == "BIAS" and dim != self.inputs["SCALE"].dim:
                self._refuse_shape(port, f"dim={self.inputs['SCALE'].dim}, as SCALE")
        for port in ("MEAN", "INV_VARIANCE", "INPUT_RUNNING_MEAN", "INPUT_RUNNING_VAR"):
            if port in self.inputs and self.inputs[port].dim != self._statistics:
                self._refuse_shape(port, f"dim={self._statistics}")
        for port in ("EPSILON", "MOMENTUM"):
            if port in self.inputs and prod(self.inputs[port].dim) != 1:
                self._refuse_shape(port, "one element")
        if "DY" in self.inputs and self.inputs["DY"].dim != x:
            self._refuse_shape("DY", f"dim={x}, as X")

    def _refuse_shape(self, port: str, allowed: str) -> None:
        got = f"dim={self.inputs[port].dim} with X of dim={self.inputs['X'].dim}"
        raise self.make_error(ValueError, port, got, allowed, "reshape it")


def _like(tensor: Tensor) -> Callable[[Dims], list[int]]:
    """Packed strides in the stride order of a tensor."""
    return lambda dims: strides_like(tensor.stride, tensor.dim, dims)


def _mean(t: Any, shape: Dims) -> Any:
    """The mean over whatever ``shape`` has shrunk to 1."""
    return t.sum_to_size(shape) * (prod(shape) / t.numel())


@dataclasses.dataclass(eq=False, kw_only=True)
class NormForward(Normalization):
    """``Y = (X - MEAN) * INV_VARIANCE * SCALE + BIAS`` with ``INV_VARIANCE = 1 / sqrt(variance + EPSILON)``.

    The variance is that of the population (divided by n). RMS normalization subtracts no mean. In the training phase
    MEAN and INV_VARIANCE are outputs too; batch normalization in the inference phase takes them as inputs. Running
    statistics: ``next = (1 - MOMENTUM) * old + MOMENTUM * batch``, with the variance of the sample (n - 1).
    """

    phase: norm_forward_phase
    zero_centered_gamma: bool = False  # the scale is 1 + SCALE

    def infer(self, context: Context) -> None:
        self._check_shapes()
        x = self.inputs["X"]
        self.fill_output("Y", x.dim, lambda _: [*x.stride])
        layout = channels_last if self.norm.by_channel else _like(x)
        for port in ("MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR"):
            if port in self.outputs:
                self.fill_output(port, self._statistics, layout)

    def lower(self, lowering: Lowering) -> None:
        a, ports = be.Attribute, {**self.inputs, **self.outputs}
        if self.zero_centered_gamma:
            ports["SCALE"] = self._scale_plus_one(lowering)
        lowering.operation(
            be.DescriptorType.OPERATION_NORM_FORWARD,
            {
                a.OPERATION_NORM_FWD_MODE: self.norm.mode,
                a.OPERATION_NORM_FWD_PHASE: be.NormFwdPhase[self.phase.name],
                a.OPERATION_NORM_FWD_XDESC: ports["X"],
                a.OPERATION_NORM_FWD_MEAN_DESC: ports.get("MEAN"),
                a.OPERATION_NORM_FWD_INV_VARIANCE_DESC: ports.get("INV_VARIANCE"),
                a.OPERATION_NORM_FWD_SCALE_DESC: ports["SCALE"],
                a.OPERATION_NORM_FWD_BIAS_DESC: ports.get("BIAS"),
                a.OPERATION_NORM_FWD_EPSILON_DESC: ports.get("EPSILON"),
                a.OPERATION_NORM_FWD_EXP_AVG_FACTOR_DESC: ports.get("MOMENTUM"),
                a.OPERATION_NORM_FWD_INPUT_RUNNING_MEAN_DESC: ports.get("INPUT_RUNNING_MEAN"),
                a.OPERATION_NORM_FWD_INPUT_RUNNING_VAR_DESC: ports.get("INPUT_RUNNING_VAR"),
                a.OPERATION_NORM_FWD_OUTPUT_RUNNING_MEAN_DESC: ports.get("NEXT_RUNNING_MEAN"),
                a.OPERATION_NORM_FWD_OUTPUT_RUNNING_VAR_DESC: ports.get("NEXT_RUNNING_VAR"),
                a.OPERATION_NORM_FWD_YDESC: ports["Y"],
                a.OPERATION_NORM_FWD_PEER_STAT_DESCS: _peers(self),
            },
        )

    def _scale_plus_one(self, lowering: Lowering) -> Tensor:
        scale = self.inputs["SCALE"]
        context = dataclasses.replace(lowering.context, intermediate_data_type=self.compute_data_type)
        smaller: SubGraph[Tensor] = SubGraph(context)
        one = Tensor.constant(1.0, data_type.FLOAT, len(scale.dim))
        shifted = smaller.add(scale, one, self.compute_data_type, f"{self.name}::SCALE")
        lowering.expand(smaller)
        return shifted

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        _say_that_peers_are_absent(self)
        x, shape = values["X"], self._statistics
        results: dict[str, Any] = {}
        if "MEAN" in values:  # batch normalization with known statistics
            centered, factor = x - values["MEAN"], values["INV_VARIANCE"]
        else:
            mean = _mean(x, shape) if self.norm.centered else 0.0
            centered = x - mean
            variance = _mean(centered * centered, shape)
            factor = (variance + values["EPSILON"]).rsqrt()
            results |= {"MEAN": mean, "INV_VARIANCE": factor}
            if "MOMENTUM" in values:
                momentum, count = values["MOMENTUM"], x.numel() // prod(shape)
                batch = {"MEAN": mean, "VAR": variance * (count / max(count - 1, 1))}
                for which, value in batch.items():
                    old = values[f"INPUT_RUNNING_{which}"]
                    results[f"NEXT_RUNNING_{which}"] = (1 - momentum) * old + momentum * value
        scale = values["SCALE"] + 1 if self.zero_centered_gamma else values["SCALE"]
        results["Y"] = centered * factor * scale + values.get("BIAS", 0.0)
        return results


@dataclasses.dataclass(eq=False, kw_only=True)
class NormBackward(Normalization):
    """Gradients of a normalization with respect to X, SCALE and BIAS.

    With ``x' = (X - MEAN) * INV_VARIANCE``, ``g = DY * SCALE`` and ``mean()`` over the dimensions of the statistics:
    ``DX = INV_VARIANCE * (g - mean(g) - x' * mean(g * x'))``, DSCALE the sum of ``DY * x'`` and DBIAS that of DY over
    the dimensions that SCALE does not have. RMS: without MEAN and without ``mean(g)``.
    """

    def infer(self, context: Context) -> None:
        self._check_shapes()
        x, scale = self.inputs["X"], self.inputs["SCALE"]
        self.fill_output("DX", x.dim, lambda _: [*x.stride])  # cuDNN refuses a DX whose strides are not those of X
        for port in ("DSCALE", "DBIAS"):
            if port in self.outputs:
                self.fill_output(port, scale.dim, _like(scale))

    def lower(self, lowering: Lowering) -> None:
        a, ports = be.Attribute, {**self.inputs, **self.outputs}
        lowering.operation(
            be.DescriptorType.OPERATION_NORM_BACKWARD,
            {
                a.OPERATION_NORM_BWD_MODE: self.norm.mode,
                a.OPERATION_NORM_BWD_XDESC: ports["X"],
                a.OPERATION_NORM_BWD_MEAN_DESC: ports.get("MEAN"),
                a.OPERATION_NORM_BWD_INV_VARIANCE_DESC: ports.get("INV_VARIANCE"),
                a.OPERATION_NORM_BWD_DYDESC: ports["DY"],
                a.OPERATION_NORM_BWD_SCALE_DESC: ports["SCALE"],
                a.OPERATION_NORM_BWD_DSCALE_DESC: ports["DSCALE"],
                a.OPERATION_NORM_BWD_DBIAS_DESC: ports.get("DBIAS"),
                a.OPERATION_NORM_BWD_DXDESC: ports["DX"],
                a.OPERATION_NORM_BWD_PEER_STAT_DESCS: _peers(self),
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        _say_that_peers_are_absent(self)
        factor, shape, scale = values["INV_VARIANCE"], self._statistics, values["SCALE"]
        normalized = (values["X"] - values.get("MEAN", 0.0)) * factor
        gradient = values["DY"] * scale
        rest = gradient - normalized * _mean(gradient * normalized, shape)
        if self.norm.centered:
            rest = rest - _mean(gradient, shape)
        return {
            "DX": rest * factor,
            "DSCALE": (values["DY"] * normalized).sum_to_size(scale.shape),
            "DBIAS": values["DY"].sum_to_size(scale.shape),
        }


def _peers(node: Node) -> list[Tensor] | None:
    return [tensor for port, tensor in node.inputs.items() if port.startswith("PEER_STAT")] or None


def _say_that_peers_are_absent(node: Node) -> None:
    if _peers(node):
        _log.warning("%s: peer_stats: the reference executor takes the statistics of this process's batch", node.where)


class LayerNorm(NormForward):
    tag, method, norm = "LAYER_NORM", "layernorm", LAYER


class LayerNormBackward(NormBackward):
    tag, method, norm = "LAYER_NORM_BPROP", "layernorm_backward", LAYER


class AdaLayerNorm(NormForward):
    tag, method, norm = "ADA_LAYER_NORM", "adalayernorm", ADA_LAYER
    optional = frozenset({"BIAS"})


class AdaLayerNormBackward(NormBackward):
    tag, method, norm = "ADA_LAYER_NORM_BPROP", "adalayernorm_backward", ADA_LAYER


class RMSNorm(NormForward):
    tag, method, norm = "RMS_NORM", "rmsnorm", RMS
    optional = frozenset({"BIAS"})


class RMSNormBackward(NormBackward):
    tag, method, norm = "RMS_NORM_BPROP", "rmsnorm_backward", RMS


class InstanceNorm(NormForward):
    tag, method, norm = "INSTANCE_NORM", "instancenorm", INSTANCE


class InstanceNormBackward(NormBackward):
    tag, method, norm = "INSTANCE_NORM_BPROP", "instancenorm_backward", INSTANCE


class BatchNorm(NormForward):
    tag, method, norm = "BATCHNORM", "batchnorm", BATCH


class BatchNormInference(NormForward):
    tag, method, norm = "BATCHNORM_INFERENCE", "batchnorm_inference", BATCH


class BatchNormBackward(NormBackward):
    tag, method, norm = "DBN", "batchnorm_backward", BATCH


Self = TypeVar("Self", bound=NodeList[Any])
P = ParamSpec("P")


def _phase_may_be_left_out(
    method: Callable[Concatenate[Self, norm_forward_phase, P], Results],
) -> Callable[..., Results]:
    """Lets ``layernorm(x, scale, bias)`` stand for ``layernorm(norm_forward_phase.INFERENCE, x, scale, bias)``."""

    @functools.wraps(method)
    def call(self: Self, *args: Any, **keywords: Any) -> Results:
        if "norm_forward_phase" not in keywords and not (args and isinstance(args[0], (int, str))):  # phases are int
            args = (norm_forward_phase.INFERENCE, *args)
        return method(self, *args, **keywords)

    return call


class NormalizationMethods(NodeList[Operand]):
    """The methods that add normalizations.

    X is ``[N, C or hidden, ...]`` of rank 2 to 8; MEAN and INV_VARIANCE (``1 / sqrt(variance + epsilon)``) have its
    rank. ``epsilon`` and ``momentum`` are one-element tensors (``tensor_like`` of a CPU tensor passes them by value) or
    Python numbers. The forward methods of layer, RMS and instance normalization may be called without
    ``norm_forward_phase``: that is the inference phase. Lists that are returned hold None for what is not computed.
    """

    def _forward(self, cls: type[NormForward], arguments: Mapping[str, Any], **attributes: Any) -> Results:
        name, phase = arguments["name"], arguments["norm_forward_phase"]
        where = where_of(name, cls.method)
        if phase not in (norm_forward_phase.INFERENCE, norm_forward_phase.TRAINING):
            raise make_error(
                ValueError,
                where,
                "norm_forward_phase",
                f"{phase!r}",
                "INFERENCE, TRAINING",
                "pass cudnn.norm_forward_phase.TRAINING where a backward pass follows",
            )
        inputs = _inputs(arguments) | {"EPSILON": _scalar(where, "epsilon", arguments["epsilon"])}
        statistics = ("MEAN", "INV_VARIANCE") if cls.norm.centered else ("INV_VARIANCE",)
        outputs = ["Y", *statistics] if phase is norm_forward_phase.TRAINING else ["Y"]
        node = self._add(cls, name, arguments["compute_data_type"], inputs, outputs, phase=phase, **attributes)
        return [node.outputs.get(port) for port in ("Y", *statistics)]

    def _backward(self, cls: type[NormBackward], arguments: Mapping[str, Any]) -> list[Tensor]:
        outputs = ["DX", "DSCALE", "DBIAS"] if arguments.get("has_dbias", True) else ["DX", "DSCALE"]
        node = self._add(cls, arguments["name"], arguments["compute_data_type"], _inputs(arguments), outputs)
        return [node.outputs[port] for port in outputs]

    @overload
    def layernorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
        *,
        zero_centered_gamma: bool = False,
    ) -> Results: ...

    @overload
    def layernorm(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
        *,
        zero_centered_gamma: bool = False,
    ) -> Results: ...

    @_phase_may_be_left_out
    def layernorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
        *,
        zero_centered_gamma: bool = False,
    ) -> Results:
        """Layer normalization (Ba, Kiros and Hinton, 2016): ``[Y, MEAN, INV_VARIANCE]``, the last two in training only.

        The statistics go over the dimensions along which ``scale`` varies: ``[1, D, 1, 1]`` with X of
        ``[N, D, 1, 1]``, or a vector ``[D]`` for the last dimension. With ``zero_centered_gamma`` the scale is
        ``1 + scale``; cuDNN 9.28 fuses that addition only where the other extents of X from dimension 1 on are 1.
        """
        return self._forward(LayerNorm, locals(), zero_centered_gamma=zero_centered_gamma)

    @overload
    def rmsnorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results: ...

    @overload
    def rmsnorm(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results: ...

    @_phase_may_be_left_out
    def rmsnorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results:
        """Root-mean-square normalization (Zhang and Sennrich, 2019): ``[Y, INV_VARIANCE]``, the last in training only.

        INV_VARIANCE is ``1 / sqrt(mean(X * X) + epsilon)`` over the dimensions along which ``scale`` varies.
        """
        return self._forward(RMSNorm, locals())

    @overload
    def adalayernorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results: ...

    @overload
    def adalayernorm(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results: ...

    @_phase_may_be_left_out
    def adalayernorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results:
        """Layer normalization with a scale and bias for each batch entry (dimension 0); returns as ``layernorm``."""
        return self._forward(AdaLayerNorm, locals())

    @overload
    def instancenorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results: ...

    @overload
    def instancenorm(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results: ...

    @_phase_may_be_left_out
    def instancenorm(
        self,
        norm_forward_phase: norm_forward_phase,
        input: Operand,
        scale: Operand,
        bias: Operand,
        epsilon: Operand | float = 1e-5,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results:
        """Instance normalization (Ulyanov et al., 2016): ``[Y, MEAN, INV_VARIANCE]``, the last two in training only.

        Statistics per sample and channel, ``[N, C, 1, ..]``; scale and bias ``[1, C, 1, ..]``.
        """
        return self._forward(InstanceNorm, locals())

    def batchnorm(
        self,
        input: Operand,
        scale: Operand,
        bias: Operand,
        in_running_mean: Operand | None = None,
        in_running_var: Operand | None = None,
        epsilon: Operand | float = 1e-5,
        momentum: Operand | float | None = None,
        peer_stats: Sequence[Operand] = (),
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results:
        """Batch normalization in training (Ioffe and Szegedy, 2015).

        Everything but X and Y is ``[1, C, 1, ..]``. ``next = (1 - momentum) * running + momentum * batch``, where the
        variance is that of the sample (n - 1). ``peer_stats``: buffers ``[2, 4 C, 1, ..]`` through which several GPUs
        share the statistics; the reference executor ignores them and uses the statistics of the local batch.

        Returns:
            ``[Y, MEAN, INV_VARIANCE, NEXT_RUNNING_MEAN, NEXT_RUNNING_VAR]``; without running statistics the last two
            are None.
        """
        where = where_of(name, "batchnorm")
        running = {"INPUT_RUNNING_MEAN": in_running_mean, "INPUT_RUNNING_VAR": in_running_var}
        present = [tensor for tensor in running.values() if tensor is not None]
        if len(present) == 1 or (present and momentum is None):
            arguments = {"in_running_mean": in_running_mean, "in_running_var": in_running_var, "momentum": momentum}
            raise make_error(
                ValueError,
                where,
                "running statistics",
                ", ".join(f"no {k}" for k, v in arguments.items() if v is None),
                "in_running_mean, in_running_var and momentum together, or none of the first two",
                "pass all three",
            )
        inputs = {"X": input, "SCALE": scale, "BIAS": bias, "EPSILON": _scalar(where, "epsilon", epsilon)}
        outputs = ["Y", "MEAN", "INV_VARIANCE"]
        if present:
            inputs |= {**running, "MOMENTUM": _scalar(where, "momentum", momentum)}
            outputs += ["NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR"]
        inputs |= _peer_ports(peer_stats)
        node = self._add(BatchNorm, name, compute_data_type, inputs, outputs, phase=norm_forward_phase.TRAINING)
        return [
            node.outputs.get(port) for port in ("Y", "MEAN", "INV_VARIANCE", "NEXT_RUNNING_MEAN", "NEXT_RUNNING_VAR")
        ]

    def batchnorm_inference(
        self,
        input: Operand,
        mean: Operand,
        inv_variance: Operand,
        scale: Operand,
        bias: Operand,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``(input - mean) * inv_variance * scale + bias``, all but the input ``[1, C, 1, ..]``.

        cuDNN runs it as part of a larger graph only, for instance before ``relu_backward`` and ``batchnorm_backward``.
        """
        inputs, phase = _inputs(locals()), norm_forward_phase.INFERENCE
        return self._add(BatchNormInference, name, compute_data_type, inputs, ["Y"], phase=phase).outputs["Y"]

    def layernorm_backward(
        self,
        grad: Operand,
        input: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``layernorm``, from the gradient of Y and the statistics of the training phase."""
        return self._backward(LayerNormBackward, locals())

    def rmsnorm_backward(
        self,
        grad: Operand,
        input: Operand,
        scale: Operand,
        inv_variance: Operand,
        has_dbias: bool,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Results:
        """``[DX, DSCALE, DBIAS]`` of ``rmsnorm``; DBIAS is None unless ``has_dbias``."""
        gradients = self._backward(RMSNormBackward, locals())
        for tensor, port in zip(gradients, ("DX", "Dscale", "Dbias"), strict=False):  # as users of the API know them
            tensor.name = f"{name}::{port}"
        return [*gradients, *[None] * (3 - len(gradients))]

    def adalayernorm_backward(
        self,
        grad: Operand,
        input: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``adalayernorm``; the last two have the shape of ``scale``."""
        return self._backward(AdaLayerNormBackward, locals())

    def instancenorm_backward(
        self,
        grad: Operand,
        input: Operand,
        scale: Operand,
        mean: Operand | None = None,
        inv_variance: Operand | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``instancenorm``."""
        return self._backward(InstanceNormBackward, locals())

    def batchnorm_backward(
        self,
        grad: Operand,
        input: Operand,
        scale: Operand,
        mean: Operand,
        inv_variance: Operand,
        peer_stats: Sequence[Operand] = (),
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``[DX, DSCALE, DBIAS]`` of ``batchnorm``; the last two are ``[1, C, 1, ..]``."""
        return self._backward(BatchNormBackward, locals())


_PORTS = {"grad": "DY", "input": "X", "scale": "SCALE", "bias": "BIAS", "mean": "MEAN", "inv_variance": "INV_VARIANCE"}


def _inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those among a method's arguments, by port."""
    return {_PORTS[name]: x for name, x in arguments.items() if name in _PORTS} | _peer_ports(
        arguments.get("peer_stats", ())
    )


def _peer_ports(peer_stats: Sequence[Any]) -> dict[str, Any]:
    return {f"PEER_STAT_{index}": tensor for index, tensor in enumerate(peer_stats)}


def _scalar(where: str, what: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value
    allowed = "a one-element cudnn.tensor, as graph.tensor_like() makes it of a CPU tensor, or a Python number"
    return Tensor.constant(checked_number(where, what, value, allowed), data_type.FLOAT)
