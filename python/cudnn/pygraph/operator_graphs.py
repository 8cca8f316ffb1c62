"""What the operators share: graphs built at the first call for a layout of tensors, and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cudnn.enums import heur_mode
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.tensor import Tensor
from cudnn.runtime import recording
from cudnn.runtime.launch_capture import captures, record_graph

MOST = 256
"""Graphs that a cache holds; the oldest goes first."""

Tensors = dict[str, Tensor]
GraphCache = dict[Any, tuple[pygraph, Tensors]]
Describe = Callable[..., Mapping[str, Tensor]]

_building = threading.Lock()


def run(
    cache: GraphCache,
    describe: Describe,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    described: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Runs ``describe(graph, inputs, **options)``, which returns its outputs by name, and fills ``outputs``.

    The graph is built once for shapes, strides, types, device and options. cuDNN runs it on CUDA tensors, on PyTorch's
    current stream; the reference executor runs it on CPU tensors. ``described``: tensors with the shapes and strides
    that the graph has in place of those of the data, by name: where rows of several lengths are packed. Within
    :func:`cudnn.runtime.recording.recording` nothing runs.
    """
    if recording.current():
        return
    data = {**inputs, **outputs}
    device = next(iter(data.values())).device
    described = described or {}
    inputs, outputs = ({n: described.get(n, x) for n, x in mapping.items()} for mapping in (inputs, outputs))
    layout = tuple((name, x.shape, x.stride(), x.dtype) for name, x in {**inputs, **outputs}.items())
    key = (device, tuple(options.items()), layout)
    with torch.cuda.device(device if device.type == "cuda" else -1):
        cached = cache.get(key)
        if cached is None:
            with _building:
                if key not in cache:  # another thread may have built it meanwhile
                    while len(cache) >= MOST:
                        del cache[next(iter(cache))]
                    cache[key] = build(describe, inputs, outputs, options, backend(device))
                cached = cache[key]
        graph, tensors = cached
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
        by_tensor = {tensors[name]: x for name, x in data.items()}
        graph.execute(by_tensor, workspace)
        if captures:
            record_graph(graph, by_tensor, workspace)


def backend(device: torch.device) -> dict[str, Any]:
    """Options of the graph: who runs it."""
    return {"backend": "cudnn" if device.type == "cuda" else "reference"}


def build(
    describe: Describe,
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    graph_options: Mapping[str, Any],
) -> tuple[pygraph, Tensors]:
    """A built graph, and its tensors by name."""
    # The reference executor computes float64 inputs in float64.
    precision = torch.float64 if torch.float64 in {x.dtype for x in inputs.values()} else torch.float32
    types: dict[str, Any] = {"intermediate_data_type": precision, "compute_data_type": precision}
    graph = pygraph(**{**types, **graph_options})
    tensors = {name: graph.tensor([*x.shape], [*x.stride()], x.dtype, name=name) for name, x in inputs.items()}
    results = describe(graph, tensors, **options)
    for name, x in outputs.items():
        tensors[name] = results[name].set_output(True).set_data_type(x.dtype)
        tensors[name].set_dim([*x.shape]).set_stride([*x.stride()])
    graph.build([heur_mode.A, heur_mode.FALLBACK])
    return graph, tensors
