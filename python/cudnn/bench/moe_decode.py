"""Benchmark of the MoE layer's inference with few tokens, every candidate in a CUDA graph, as a server runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from cudnn.bench import GPU, QUICK, Benchmark, Call, Candidate, Options, Problem, moe, operands, returning
from cudnn.lazy import torch

NAME = "moe_decode"
SHAPES = tuple((tokens, 2048, 768, 128, 8) for tokens in (1, 8, 32, 128, 512, 2048))
"""Qwen3-30B-A3B: tokens, hidden and intermediate size, experts, top-k."""
NAMES = (moe.PEER, moe.OURS, moe.FP8)


def benchmark() -> Benchmark:
    """The benchmark; a shape is like those of ``SHAPES``."""
    return Benchmark(
        title="MoE layer, inference with few tokens",
        yardsticks=(moe.PEER,),
        dtypes=("bf16",),
        dimensions=dict(moe.DIMENSIONS),
        problems=problems,
        quick=SHAPES,
    )


def problems(options: Options) -> list[Problem]:
    """Inference of each shape. TFLOP/s counts the GEMMs."""
    clock = QUICK if options.quick else GPU
    return [
        Problem(
            f"{'x'.join(map(str, shape))} decode",
            functools.partial(candidates, shape),
            moe.flops_of(shape)[0],
            clock=clock,
        )
        for shape in options.shapes or SHAPES
    ]


def candidates(shape: tuple[int, ...]) -> list[Candidate]:
    """The layer compiled by PyTorch, ours, and ours with fp8 GEMMs."""
    return [
        replace(candidate, prepare=captured(candidate.prepare))
        for candidate in moe.candidates(shape, "inference")
        if candidate.name in NAMES
    ]


def captured(prepare: Callable[[], Call]) -> Callable[[], Call]:
    """The same call in a CUDA graph; on CPU tensors, the call."""

    def make() -> Call:
        call = prepare()
        if operands.DEVICE == "cpu":
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # allocates workspaces and compiles before the capture
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        return returning(graph.replay, results)

    return make
