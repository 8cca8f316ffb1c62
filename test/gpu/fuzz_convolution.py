"""Random convolutions in one to three dimensions: forward with element-wise operations after it, and both gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import cudnn
from gpu.common import IO_TYPES, Data, Epilogue
from support.graphs import like


class ConvolutionProblem:
    """Direction, type, layout, groups, extents, padding, stride and dilation, all from one seed."""

    def __init__(self, seed: int, device: str) -> None:
        data = Data(seed, device)
        rng = data.rng
        self.kind = rng.choice(IO_TYPES)
        self.method = rng.choice(["conv_fprop", "conv_fprop", "conv_dgrad", "conv_wgrad"])
        spatial = rng.choice([1, 2, 2, 2, 3])
        self.groups = rng.choice([1, 1, 1, 2, 4])
        channels, kernels = (8 * self.groups * rng.randint(1, 8) for _ in range(2))
        window = [rng.randint(1, 5 if spatial < 3 else 3) for _ in range(spatial)]
        self.pre = [rng.randint(0, 2) for _ in range(spatial)]
        self.post = self.pre if rng.random() < 0.7 else [rng.randint(0, 2) for _ in range(spatial)]
        self.stride = [rng.choice([1, 1, 2, 3]) for _ in range(spatial)]
        self.dilation = [rng.choice([1, 1, 2]) for _ in range(spatial)]
        extents = [
            max(1, d * (w - 1) + 1 - a - b) + rng.randint(0, 24 if spatial < 3 else 10)
            for d, w, a, b in zip(self.dilation, window, self.pre, self.post, strict=True)
        ]
        first_to_last = list(range(spatial + 2))
        order = rng.choice([[0, *first_to_last[2:], 1], [0, *first_to_last[2:], 1], first_to_last])
        per_group = channels // self.groups
        taps = per_group
        for extent in window:
            taps *= extent
        batch = rng.randint(1, 8)
        self.x = data.tensor([batch, channels, *extents], order, self.kind)
        self.w = data.tensor([kernels, per_group, *window], order, self.kind, taps**-0.5)
        with torch.no_grad():
            dims = list(self._forward(self.x.float(), self.w.float()).shape)
        self.dy = data.tensor(dims, order, self.kind)
        # cuDNN fuses nothing into convolutions of one dimension, with groups, or with channels first.
        fuses = spatial > 1 and self.groups == 1 and order[-1] == 1
        self.epilogue = Epilogue(data, dims, order, 1, self.kind, most=4 if fuses else 0)

    def _forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pads = [*itertools.chain(*zip(reversed(self.pre), reversed(self.post), strict=True))]
        convolve = getattr(torch.nn.functional, f"conv{len(self.stride)}d")
        padded = torch.nn.functional.pad(x, pads)
        return convolve(padded, w, stride=self.stride, dilation=self.dilation, groups=self.groups)

    def build(self, graph: cudnn.pygraph) -> tuple[dict[cudnn.tensor, torch.Tensor], cudnn.tensor]:
        data = {
            "conv_fprop": (self.x, self.w), "conv_dgrad": (self.dy, self.w), "conv_wgrad": (self.x, self.dy)
        }[self.method]  # fmt: skip
        values = {like(graph, item): item for item in data}
        y = getattr(graph, self.method)(
            *values, pre_padding=self.pre, post_padding=self.post, stride=self.stride, dilation=self.dilation
        )
        if self.method == "conv_fprop":
            y.set_stride(self.dy.stride())
            y = self.epilogue.build(graph, y, values)
        else:
            result = self.x if self.method == "conv_dgrad" else self.w
            y.set_dim(result.shape).set_stride(result.stride())
        return values, y.set_output(True)

    def formula(self, dtype: torch.dtype) -> torch.Tensor:
        x, w = (item.detach().to(dtype).requires_grad_() for item in (self.x, self.w))
        y = self._forward(x, w)
        if self.method == "conv_fprop":
            return self.epilogue.formula(y.detach())
        leaf = x if self.method == "conv_dgrad" else w
        return torch.autograd.grad(y, leaf, self.dy.to(dtype))[0]


def problems(count: int, device: str = "cuda") -> Iterator[tuple[int, ConvolutionProblem]]:
    """The problems of seeds 0 to ``count - 1``."""
    return ((seed, ConvolutionProblem(seed, device)) for seed in range(count))
