"""What each code block of the API reference needs around it, and what its result must equal."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch

import cudnn
from support.seed_programs import Cell

Names = dict[str, Any]
functional = torch.nn.functional


def _close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 5e-3, rtol: float = 5e-3) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol, rtol=rtol)


def _statements(cell: Cell, names: Names, device: str) -> list[tuple[str, Any]]:
    """Runs each ``y = graph.operation(...)`` of a cell in a separate graph: the operation's name and its result."""
    results: list[tuple[str, Any]] = []
    for statement in ast.parse(cell.code).body:
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        assert isinstance(statement.value.func, ast.Attribute)
        scope = {**names}
        with cudnn.Graph(handle=names["handle"]) as scope["graph"]:
            Cell(cell.program, cell.title, ast.unparse(statement)).run(scope, device)
        arrays = [
            names[keyword.value.id] for keyword in statement.value.keywords if isinstance(keyword.value, ast.Name)
        ]
        results.append((statement.value.func.attr, scope["graph"](*arrays)))
    return results


def _basic_usage(cell: Cell, names: Names, device: str) -> None:
    cell.run(names, device)
    _close(names["result"], functional.conv2d(names["x"], names["w"], padding=1), atol=2e-2)


def _llm_inference(cell: Cell, names: Names, device: str) -> None:
    cell.run(names, device)
    q, k, v = names["Q"], names["K"], names["V"]
    result = names["graph"](q, k, v, handle=names["handle"])
    _close(result, functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def _configurations(cell: Cell, names: Names, device: str) -> None:
    """Each pair of lines is a choice of keyword arguments for a graph."""
    cell.run(names, device)
    for text in cell.code.strip().split("\n\n"):
        chosen: Names = {}
        Cell(cell.program, cell.title, "import cudnn\n" + text).run(chosen, device)
        dtypes = {key: value for key, value in chosen.items() if key.endswith("data_type")}
        assert dtypes.keys() == {"io_data_type", "compute_data_type"}
        cudnn.Graph(**dtypes)


def _attention_of_the_reference(cell: Cell, names: Names, device: str) -> None:
    q, k, v = names["queries"], names["keys"], names["values"]
    cell.run(names, device)
    result = names["graph"](q, k, v, handle=names["handle"])
    _close(result, functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def _linear_layers(cell: Cell, names: Names, device: str) -> None:
    x = torch.randn(2, 32, 64, device=device, dtype=torch.float16)
    w1 = torch.randn(64, 256, device=device, dtype=torch.float16) / 8
    w2 = torch.randn(256, 64, device=device, dtype=torch.float16) / 16
    names |= {"x": x, "W1": w1, "W2": w2}
    cell.run(names, device)
    _close(names["graph"](x, w1, w2), functional.gelu(x.float() @ w1.float()) @ w2.float(), atol=2e-2)


def _rms(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * gamma.float()


def _pre_norm(cell: Cell, names: Names, device: str) -> None:
    inputs = {
        name: torch.randn(2, 32, 64, device=device, dtype=torch.float16) for name in ("x", "attn_output", "ffn_output")
    }
    inputs |= {name: torch.randn(64, device=device, dtype=torch.float16) for name in ("gamma", "gamma2")}
    names |= inputs
    cell.run(names, device)
    order = ("x", "gamma", "attn_output", "gamma2", "ffn_output")
    first, second, residual = names["graph"](*(inputs[name] for name in order))
    x = inputs["x"].float() + inputs["attn_output"].float()
    _close(first, _rms(inputs["x"], inputs["gamma"]))
    _close(second, _rms(x, inputs["gamma2"]), atol=1e-2)
    _close(residual, x + inputs["ffn_output"].float())


def _element_wise(cell: Cell, names: Names, device: str) -> None:
    x, b, s, x1, x2 = (names[name].float() for name in ("x", "b", "s", "x1", "x2"))
    expected = {"add": x1 + x2, "mul": x1 * x2, "bias": x + b, "scale": x * s}
    results = _statements(cell, names, device)
    assert [name for name, _ in results] == list(expected)
    for name, result in results:
        _close(result, expected[name])


def _convolutions(cell: Cell, names: Names, device: str) -> None:
    x, w, dy = (names[name].float() for name in ("x", "w", "dy"))
    expected = {
        "conv_fprop": functional.conv2d(x, w, padding=1),
        "conv_dgrad": torch.nn.grad.conv2d_input(list(x.shape), w, dy, padding=1),
        "conv_wgrad": torch.nn.grad.conv2d_weight(x, list(w.shape), dy, padding=1),
    }
    results = _statements(cell, names, device)
    assert [name for name, _ in results] == list(expected)
    for name, result in results:
        _close(result, expected[name], atol=5e-2, rtol=1e-2)


def _tensor_method(cell: Cell, names: Names, device: str) -> None:
    q, k, v = names["Q"], names["K"], names["V"]
    with cudnn.Graph() as names["graph"]:
        names["y"], _ = names["graph"].sdpa(q, k, v)
        names["y"].set_output(True)
        cell.run(names, device)
    result = names["graph"](q, k, v)
    _close(result, functional.scaled_dot_product_attention(q, k, v, scale=1.0), atol=1e-2)
    if cell.title == "set_name":
        assert names["y"].get_name() == "attention_output"
    elif cell.title == "set_dim / set_stride":
        assert result.stride() == (128 * 4 * 64, 64, 4 * 64, 1)


def _data_type(cell: Cell, names: Names, device: str) -> None:
    x, weight = names["x1"], torch.randn(2, 64, 64, device=device, dtype=torch.float16)
    with cudnn.Graph() as names["graph"]:
        names["y"] = names["graph"].matmul(x, weight)
        cell.run(names, device)
    result = names["graph"](x, weight)
    assert result.dtype is torch.float32
    _close(result, x.float() @ weight.float())


def _handle_management(cell: Cell, names: Names, device: str) -> None:
    with cudnn.Graph() as names["graph"]:
        names["graph"].conv_fprop(image=names["x"], weight=names["w"], padding=[1, 1])
    cell.run(names, device)
    _close(names["result"], functional.conv2d(names["x"], names["w"], padding=1), atol=2e-2)


def _positional(cell: Cell, names: Names, device: str) -> None:
    cell.run(names, device)
    q, k, v = names["Q_data"], names["K_data"], names["V_data"]
    _close(names["result"], functional.scaled_dot_product_attention(q, k, v, scale=1.0), atol=1e-2)


def _dictionary(cell: Cell, names: Names, device: str) -> None:
    cell.run(names, device)
    q, k, v = names["Q_data"], names["K_data"], names["V_data"]
    _close(names["output"], functional.scaled_dot_product_attention(q, k, v, scale=1.0), atol=1e-2)
    assert names["result_dict"]["attn::q"] is q


def _utilities(cell: Cell, names: Names, device: str) -> None:
    with cudnn.Graph() as names["graph"]:
        names["graph"].conv_fprop(image=names["x"], weight=names["w"], padding=[1, 1])
    built = names["graph"]
    cell.run(names, device)
    assert names["graph"] is not built
    assert names["version"] == cudnn.backend_version()
    assert names["workspace_size"] >= 0
    _close(names["graph"](names["x"], names["w"]), functional.conv2d(names["x"], names["w"], padding=1), atol=2e-2)


def _layer(cell: Cell, names: Names, device: str) -> None:
    cell.run(names, device)
    graph = names["create_llm_attention_layer"](2, 128, 4, 64, names["handle"])
    x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)
    gamma = torch.randn(256, device=device, dtype=torch.float32)
    _close(graph(x, gamma, handle=names["handle"]), _rms(x, gamma), atol=1e-2, rtol=1e-2)


# Patterns of several matrix products or normalisations, which no engine of cuDNN runs as one graph.
REFUSED_BY_CUDNN = frozenset({"LLM Linear Layers", "Pre-norm Transformer Pattern"})

REFERENCE: dict[str, Callable[[Cell, Names, str], None]] = {
    "Basic Usage": _basic_usage,
    "For LLM inference": _llm_inference,
    "Recommended configurations for LLMs": _configurations,
    "LLM Inference Example": _attention_of_the_reference,
    "GQA for LLaMA-style models": _attention_of_the_reference,
    "LLM Linear Layers": _linear_layers,
    "Pre-norm Transformer Pattern": _pre_norm,
    "Element-wise Operations": _element_wise,
    "Convolution Operations": _convolutions,
    "set_output": _tensor_method,
    "set_name": _tensor_method,
    "set_data_type": _data_type,
    "set_dim / set_stride": _tensor_method,
    "Handle Management": _handle_management,
    "Positional Arguments": _positional,
    "Dictionary Interface": _dictionary,
    "Utility Functions": _utilities,
    "Complete LLM Layer Example": _layer,
}
