"""Convolutions in one to three dimensions, their gradients, their prologues and epilogues."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from math import prod

import torch

import cudnn
from support.fuzz.approx import UNIT, Approx, contraction, reduce
from support.fuzz.case import Case, Spec, packed, pick
from support.fuzz.chain import Drawing, Instruction, Program, most_types

# Type of the image and filter (of the gradients' operands too), and of the output.
_TYPES: dict[tuple[str, str], float] = {
    ("float16", "float16"): 8,
    ("bfloat16", "bfloat16"): 8,
    ("float32", "float32"): 5,
    ("float16", "float32"): 1,
    ("bfloat16", "float32"): 1,
}
_FORWARD_TYPES = _TYPES | {("int8", "float32"): 1, ("float8_e4m3fn", "float16"): 0.5}


@dataclass(frozen=True)
class ConvolutionCase(Case):
    """A convolution, or the gradient of one.

    Attributes:
        method: ``conv_fprop``, ``conv_dgrad`` or ``conv_wgrad``.
        output: Type of what the graph writes.
        x, w, y: Shapes of the image ``[N, C, ...]``, of the filter ``[K, C / groups, ...]`` and of the response.
        order: Of memory, of all three, slowest first.
        pre, post, stride, dilation: Per spatial dimension.
        mirrored: Whether the filter is, as mathematics has it.
        before: Program on the image (forward and filter gradient).
        after: Program on the result.
        statistics: ``""``, ``genstats``, or a mode of reduction to channels.
    """

    family = "convolution"
    full = 1050
    most_refused = 0.12

    method: str
    output: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    order: tuple[int, ...]
    pre: tuple[int, ...]
    post: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    mirrored: bool
    before: Program
    after: Program
    statistics: str

    @classmethod
    def draw(cls, seed: int) -> ConvolutionCase:
        rng = random.Random(seed)
        method = pick(rng, {"conv_fprop": 5, "conv_dgrad": 2, "conv_wgrad": 2})
        io, output = pick(rng, _FORWARD_TYPES if method == "conv_fprop" else _TYPES)
        spatial = pick(rng, {1: 2, 2: 6, 3: 3})
        groups = pick(rng, {1: 10, 2: 1, 4: 1, 8: 0.5})
        unit = 16 if io in ("int8", "float8_e4m3fn") else pick(rng, {8: 8, 16: 2, 1: 0.7, 4: 0.7})
        channels, kernels = (groups * unit * rng.randint(1, max(1, 96 // unit)) for _ in range(2))
        if groups > 1:
            channels, kernels = (groups * unit * rng.randint(1, 3) for _ in range(2))
        if rng.random() < 0.05:  # one filter a channel
            groups = channels = kernels = 8 * rng.randint(1, 8)
        window = [
            pick(rng, {1: 2, 2: 1, 3: 4, 4: 0.5, 5: 1 if spatial < 3 else 0.2, 7: 0.3 if spatial < 3 else 0})
            for _ in range(spatial)
        ]
        pre = [rng.randint(0, window[i] - 1) if rng.random() < 0.9 else rng.randint(0, 3) for i in range(spatial)]
        post = pre if rng.random() < 0.85 else [max(0, p + rng.choice([-1, 0, 1])) for p in pre]
        stride = [pick(rng, {1: 6, 2: 3, 3: 1}) for _ in range(spatial)]
        dilation = [pick(rng, {1: 6, 2: 1, 3: 0.3}) for _ in range(spatial)]
        most = {1: 200, 2: 28, 3: 12}[spatial]
        extents = [
            max(1, d * (w - 1) + 1 - a - b) + rng.randint(0, most)
            for d, w, a, b in zip(dilation, window, pre, post, strict=True)
        ]
        axes = [*range(spatial + 2)]
        order = pick(rng, {(0, *axes[2:], 1): 4, tuple(axes): 1})
        if io in ("int8", "float8_e4m3fn"):
            order, groups, channels = (0, *axes[2:], 1), 1, max(channels // 16 * 16, 16)
        n = pick(rng, {1: 1, 2: 1, 3: 1, 4: 1, 8: 1})
        x = (n, channels, *extents)
        w = (kernels, channels // groups, *window)
        y = (
            n,
            kernels,
            *(
                1 + (e + a + b - d * (k - 1) - 1) // s
                for e, a, b, d, k, s in zip(extents, pre, post, dilation, window, stride, strict=True)
            ),
        )
        fill = "integers" if io == "int8" else "normal"
        taps = {"conv_fprop": prod(w[1:]), "conv_dgrad": prod(w) // w[1], "conv_wgrad": prod(y) // y[1]}[method]
        specs = {
            "X": Spec(x, packed(x, order), io, fill),
            "W": Spec(w, packed(w, order), io, fill, 1.0 if fill == "integers" else taps**-0.5),
            "DY": Spec(y, packed(y, order), io, "normal", taps**-0.5 if method == "conv_wgrad" else 1.0),
        }
        names = {"conv_fprop": "XW", "conv_dgrad": ("DY", "W"), "conv_wgrad": ("X", "DY")}[method]
        inputs = {name: specs[name] for name in names}
        # cuDNN fuses nothing into convolutions of one dimension, with groups, or with channels first.
        fuses = spatial > 1 and groups == 1 and order[-1] == 1
        before, after, statistics = Program(), Program(), ""
        if fuses and method != "conv_dgrad" and io in ("float16", "bfloat16") and rng.random() < 0.1:
            before = cls._before(rng, inputs, x, order, io)
        if fuses and method == "conv_fprop":
            value_range = (-300.0, 300.0) if io == "int8" else (-7.0, 7.0)
            after = cls._after(rng, inputs, y, order, output, value_range)
            plain = not after.instructions and io == "float16"
            statistics = pick(rng, {"": 10, "genstats": 5 if plain else 0.2, "ADD": 0.5, "MAX": 0.3})
        elif fuses and method == "conv_dgrad":
            after = cls._after(rng, inputs, x, order, output, (-7.0, 7.0))
        # Nor into one whose filter is mirrored.
        mirrored = rng.random() < (0.02 if after.instructions or before.instructions or statistics else 0.2)
        return cls(
            seed,
            io,
            "float32",
            "float32",
            inputs,
            method,
            output,
            x,
            w,
            y,
            order,
            tuple(pre),
            tuple(post),
            tuple(stride),
            tuple(dilation),
            mirrored,
            before,
            after,
            statistics,
        )

    @staticmethod
    def _before(
        rng: random.Random, inputs: dict[str, Spec], dims: tuple[int, ...], order: tuple[int, ...], io: str
    ) -> Program:
        """Scale, bias and ReLU, as batch normalisation leaves them to the convolution that follows."""
        vector = (1, dims[1], *[1] * (len(dims) - 2))
        for name in ("before_scale", "before_bias"):
            inputs[name] = Spec(vector, packed(vector, order), io, "normal")
        steps = (
            Instruction("mul", ("x0", "before_scale")),
            Instruction("add", ("x1", "before_bias")),
            Instruction("relu", ("x2",)),
        )
        steps = steps[: rng.choice([2, 3, 3])]
        return Program((*steps[:-1], Instruction(steps[-1].op, steps[-1].arguments, io)))

    @staticmethod
    def _after(
        rng: random.Random,
        inputs: dict[str, Spec],
        dims: tuple[int, ...],
        order: tuple[int, ...],
        output: str,
        value_range: tuple[float, float],
    ) -> Program:
        vector = (1, dims[1], *[1] * (len(dims) - 2))
        shapes = {dims: 3, vector: 6, (1,) * len(dims): 0.5}
        drawing = Drawing(rng, dims, order, shapes, most_types(output, rng), value_range)
        program = drawing.program(pick(rng, {0: 3, 1: 3, 2: 3, 3: 2, 4: 1, 5: 1, 6: 0.5}))
        inputs |= drawing.specs
        return program

    @property
    def _mode(self) -> cudnn.convolution_mode:
        return cudnn.convolution_mode.CONVOLUTION if self.mirrored else cudnn.convolution_mode.CROSS_CORRELATION

    def build(self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor]) -> dict[str, cudnn.tensor]:
        first, second = list(self.inputs)[:2]
        image = self.before.build(graph, tensors[first], tensors)[-1]
        result = getattr(graph, self.method)(
            image,
            tensors[second],
            pre_padding=self.pre,
            post_padding=self.post,
            stride=self.stride,
            dilation=self.dilation,
            convolution_mode=self._mode,
            compute_data_type=torch.int32 if self.io == "int8" else torch.float32,
        )
        dims = {"conv_fprop": self.y, "conv_dgrad": self.x, "conv_wgrad": self.w}[self.method]
        result.set_dim(dims).set_stride(packed(dims, self.order))
        if self.io == "int8" and self.after.instructions:
            result.set_data_type(torch.int32)
        results = self.after.build(graph, result, tensors)
        outputs = {f"tap{i}": results[i] for i in self.after.taps} | {"Y": results[-1]}
        for tensor in outputs.values():
            tensor.set_output(True).set_data_type(getattr(torch, self.output))
        if self.statistics == "genstats":
            outputs |= zip(("SUM", "SQ_SUM"), graph.genstats(results[-1]), strict=True)
        elif self.statistics:
            reduced = graph.reduction(results[-1], getattr(cudnn.reduction_mode, self.statistics))
            vector = [1, dims[1], *[1] * (len(dims) - 2)]
            outputs["R"] = reduced.set_dim(vector).set_stride(packed(vector, self.order))
        for name in ("SUM", "SQ_SUM", "R"):
            if name in outputs:
                outputs[name].set_output(True).set_data_type(cudnn.data_type.FLOAT)
        return outputs

    def expected(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> dict[str, Approx]:
        first, second = (Approx(data[name].double()) for name in list(self.inputs)[:2])
        first = self.before.formula(first, data, torch.float32)[-1]
        io, output = getattr(torch, self.io), getattr(torch, self.output)
        function = {"conv_fprop": self._forward, "conv_dgrad": self._data, "conv_wgrad": self._filter}[self.method]
        result = contraction(function, first, second, io)
        if self.io != "int8":  # Winograd's and Fourier's transforms spread errors over the tile
            result = Approx(result.value, result.bound + UNIT[io] * result.value.abs().max())
        values = self.after.formula(result, data, output)
        outputs = {f"tap{i}": values[i].stored(output) for i in self.after.taps} | {"Y": values[-1].stored(output)}
        # Statistics read what is stored, or what has not been rounded yet: the bound of the former covers both.
        stored = outputs["Y"]
        axes = [axis for axis in range(len(self.y)) if axis != 1]
        if self.statistics == "genstats":
            square = Approx(stored.value**2, 2 * stored.size * stored.bound)
            for name, x in (("SUM", stored), ("SQ_SUM", square)):
                outputs[name] = reduce(x, cudnn.reduction_mode.ADD, axes).stored(torch.float32)
        elif self.statistics:
            mode = getattr(cudnn.reduction_mode, self.statistics)
            outputs["R"] = reduce(stored, mode, axes).stored(torch.float32)
        return outputs

    def _taps(self):
        """For every place in the window: its index, and the slices of the padded image that it meets."""
        for tap in itertools.product(*(range(extent) for extent in self.w[2:])):
            cuts = tuple(
                slice(p * d, p * d + s * (extent - 1) + 1, s)
                for p, d, s, extent in zip(tap, self.dilation, self.stride, self.y[2:], strict=True)
            )
            index = tuple(e - 1 - p for e, p in zip(self.w[2:], tap, strict=True)) if self.mirrored else tap
            yield (slice(None), slice(None), *index), (slice(None), slice(None), *cuts)

    @property
    def _groups(self) -> int:
        return self.x[1] // self.w[1]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        pads = [*itertools.chain(*zip(reversed(self.pre), reversed(self.post), strict=True))]
        return torch.nn.functional.pad(x, pads)

    def _forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """One matrix product for every place in the window."""
        padded = self._padded(x)
        y = x.new_zeros(self.y[0], self._groups, self.w[0] // self._groups, *self.y[2:])
        for tap, cuts in self._taps():
            windowed = padded[cuts].unflatten(1, (self._groups, -1))
            y += torch.einsum("ngc...,gkc->ngk...", windowed, w[tap].unflatten(0, (self._groups, -1)))
        return y.flatten(1, 2)

    def _data(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        dx = torch.zeros_like(self._padded(dy.new_zeros(self.x)))
        grouped = dy.unflatten(1, (self._groups, -1))
        for tap, cuts in self._taps():
            windowed = torch.einsum("ngk...,gkc->ngc...", grouped, w[tap].unflatten(0, (self._groups, -1)))
            dx[cuts] += windowed.flatten(1, 2)
        inner = tuple(slice(a, a + extent) for a, extent in zip(self.pre, self.x[2:], strict=True))
        return dx[(slice(None), slice(None), *inner)]

    def _filter(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        padded, dw = self._padded(x), dy.new_zeros(self.w)
        grouped = dy.unflatten(1, (self._groups, -1))
        for tap, cuts in self._taps():
            windowed = padded[cuts].unflatten(1, (self._groups, -1))
            dw[tap] = torch.einsum("ngc...,ngk...->gkc", windowed, grouped).flatten(0, 1)
        return dw
