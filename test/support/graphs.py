"""Graphs for tests: a run on either executor, plans of cuDNN for a device that is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch

import cudnn
from cudnn.datatypes import _cudnn_to_torch_data_type

FLOAT, HALF, BFLOAT16 = cudnn.data_type.FLOAT, cudnn.data_type.HALF, cudnn.data_type.BFLOAT16
MODES = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]


class OnlyDlpack:
    """An array that has DLPack's protocol and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def reference_graph(io: object = FLOAT, intermediate: object = FLOAT, compute: object = FLOAT) -> cudnn.pygraph:
    """A graph that the reference executor runs, on any machine."""
    return cudnn.pygraph(
        io_data_type=io, intermediate_data_type=intermediate, compute_data_type=compute, backend="reference"
    )


def planned_graph(
    device: Any, io: object = HALF, intermediate: object = FLOAT, compute: object = FLOAT
) -> cudnn.pygraph:
    """A graph whose plans are made for a described device (the fixtures ``device_properties``, ``h200``, ``b200``)."""
    return cudnn.pygraph(
        io_data_type=io, intermediate_data_type=intermediate, compute_data_type=compute, device_property=device
    )


def planned_by(module: Any, device_properties: Any, monkeypatch: pytest.MonkeyPatch) -> list[cudnn.pygraph]:
    """The graphs that operators of ``module`` describe from now on, as on a GPU, up to their plans; nothing runs."""
    from cudnn.pygraph import operator_graphs

    built: list[cudnn.pygraph] = []

    def plan(cache: Any, describe: Any, inputs: Any, outputs: Any, options: Any) -> None:
        built.append(
            operator_graphs.build(describe, inputs, outputs, options, {"device_property": device_properties})[0]
        )

    monkeypatch.setattr(module, "run", plan)
    monkeypatch.setattr(cudnn.pygraph, "build_plans", lambda graph: None)
    return built


def configurations(graph: cudnn.pygraph) -> int:
    """How many engine configurations cuDNN has for a graph; ``cudnnGraphNotSupportedError`` where it has none."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.check_support()
    return graph.get_execution_plan_count()


def packed(*dims: int) -> list[int]:
    """Strides of a shape, row after row."""
    return [prod(dims[axis + 1 :]) for axis in range(len(dims))]


def like(graph: cudnn.pygraph, data: torch.Tensor, name: str = "") -> cudnn.tensor:
    """A graph tensor of the shape, strides and type of the data. One element is no scalar here."""
    return graph.tensor(list(data.shape), list(data.stride()), data.dtype, name=name)


def outputs(tensors: Iterable[Any]) -> list[Any]:
    """Marks what is there as output: the first in the graph's type, the rest in float32."""
    present = [tensor for tensor in tensors if tensor is not None]
    for index, tensor in enumerate(present):
        tensor.set_output(True)
        if index:
            tensor.set_data_type(FLOAT)
    return present


def buffer(tensor: cudnn.tensor, device: str = "cpu") -> torch.Tensor:
    """Memory for an output, full of what no correct program leaves there (NaN, or the largest number)."""
    dtype = _cudnn_to_torch_data_type(tensor.get_data_type())
    out = torch.empty_strided(tensor.get_dim(), tensor.get_stride(), dtype=dtype, device=device)
    if dtype.is_floating_point:
        return out.fill_(float("nan")) if dtype.itemsize > 1 else out
    return out.fill_(True if dtype is torch.bool else torch.iinfo(dtype).max)


def run(graph: cudnn.pygraph, data: Mapping[cudnn.tensor, torch.Tensor], *outputs: cudnn.tensor) -> list[torch.Tensor]:
    """Builds and executes the graph on the device of the data; returns what it wrote to the outputs."""
    graph.build(MODES)
    device = str(next((value.device for value in data.values() if value.device.type != "cpu"), "cpu"))
    results = {tensor: buffer(tensor, device) for tensor in outputs}
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
    graph.execute({**data, **results}, workspace)
    return list(results.values())


def evaluate(
    operation: str,
    *arguments: Any,
    types: Sequence[object] = (),
    first: object = None,
    outputs: object = FLOAT,
    dim: Sequence[int] | None = None,
    graph: cudnn.pygraph | None = None,
    **keywords: Any,
) -> tuple[list[cudnn.tensor], list[torch.Tensor]]:
    """One operation in a graph, of the reference executor unless one is given: its outputs' tensors, and their data.

    Args:
        arguments, keywords: Arrays among them, and in lists, are described and passed.
        types: Of ``reference_graph``.
        first, outputs: The type of the first output, None for the graph's, and of the others.
        dim: The shape of the first output, where it is not inferred.
    """
    graph, data = graph or reference_graph(*types), dict[cudnn.tensor, torch.Tensor]()

    def described(value: Any) -> Any:
        if isinstance(value, list):
            return [described(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        tensor = like(graph, value)
        data[tensor] = value
        return tensor

    call_arguments = [described(value) for value in arguments]
    results = getattr(graph, operation)(*call_arguments, **{name: described(value) for name, value in keywords.items()})
    tensors = [x.set_output(True) for x in (results if isinstance(results, list) else [results]) if x is not None]
    for tensor, dtype in zip(tensors, [first, *[outputs] * (len(tensors) - 1)], strict=True):
        if dtype is not None:
            tensor.set_data_type(dtype)
    if dim is not None:
        tensors[0].set_dim(dim)
    return tensors, run(graph, data, *tensors)
