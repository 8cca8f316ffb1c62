"""The published programs run as printed, on the reference executor."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

import cudnn
from support.seed_programs import PROGRAMS, check_program, reference_cells, reference_prelude
from support.seed_reference import REFERENCE

CELLS = reference_cells()


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, libcudnn: object) -> None:
    """The programs compare their own results with PyTorch's. (One asks for cuDNN's version, hence the fixture.)"""
    check_program(program, "cpu")


def test_a_cached_graph_is_built_once() -> None:
    names = check_program("low_level_api", "cpu")
    again, _ = names["create_matmul_bias_graph"](names["handle"], names["a_gpu"], names["b_gpu"], names["d_gpu"])
    assert again is names["g"]


ASKING = [title for title in REFERENCE if "backend_version" in CELLS[title].code]


@pytest.mark.parametrize("title", [title for title in REFERENCE if title not in ASKING])
def test_reference_cell(title: str) -> None:
    """A code block of the API reference, with what it leaves undefined defined, gives the right numbers."""
    REFERENCE[title](CELLS[title], reference_prelude("cpu"), "cpu")


@pytest.mark.parametrize("title", ASKING)
def test_reference_cell_that_asks_for_the_version(title: str, libcudnn: object) -> None:
    REFERENCE[title](CELLS[title], reference_prelude("cpu"), "cpu")


SIGNATURES = {title: cell for title, cell in CELLS.items() if "def " in cell.code and title not in REFERENCE}


def test_every_cell_of_the_reference_is_covered() -> None:
    assert CELLS.keys() == REFERENCE.keys() | SIGNATURES.keys()


def _documented() -> list[tuple[str, ast.FunctionDef]]:
    found: list[tuple[str, ast.FunctionDef]] = []
    for cell in SIGNATURES.values():
        found += [(cell.title, node) for node in ast.walk(ast.parse(cell.code)) if isinstance(node, ast.FunctionDef)]
    return found


@pytest.mark.parametrize(("title", "printed"), _documented(), ids=lambda value: getattr(value, "name", ""))
def test_printed_signature(title: str, printed: ast.FunctionDef) -> None:
    """Every argument that the reference prints exists, in the printed order where it can be given by position."""
    method: Any = cudnn.Graph if printed.name == "__init__" else getattr(cudnn.pygraph, printed.name)
    ours = inspect.signature(method).parameters
    names = [argument.arg for argument in printed.args.args if argument.arg != "self"]
    if any(p.kind is p.VAR_KEYWORD for p in ours.values()):
        names = [name for name in names if name not in inspect.signature(cudnn.pygraph).parameters or name in ours]
    assert [name for name in names if name not in ours] == []


def test_reference_names_exist() -> None:
    for name in ("A", "B", "FALLBACK", "CUDNN_FIND"):
        assert isinstance(cudnn.heur_mode[name], cudnn.heur_mode)
    for name in ("FLOAT", "HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "INT8"):
        assert isinstance(cudnn.data_type[name], cudnn.data_type)
    assert isinstance(cudnn.create_handle(), cudnn.Handle)


def test_no_data_types_means_those_of_the_inputs() -> None:
    """``cudnn.Graph()`` of the reference: arithmetic in FLOAT, outputs in the type of their operation's first input."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(2, 8, 8, dtype=dtype)
        with cudnn.Graph() as graph:
            y = graph.relu(input=graph.add(x, x))
        assert y.get_data_type().name in ("HALF", "BFLOAT16", "FLOAT")
        assert graph(x).dtype is dtype


# Call shapes that only the API reference's text and signatures show.
def test_attention_arguments_of_the_reference() -> None:
    """``attn_bias``, and a dropout of 0 with its seed and offset."""
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    bias = torch.randn(2, 4, 16, 16)
    with cudnn.Graph() as graph:
        o, stats = graph.sdpa(
            q=q, k=k, v=v, attn_scale=0.5, is_inference=True, use_causal_mask=False, generate_stats=False,
            attn_bias=bias, dropout=0.0, dropout_seed=None, dropout_offset=0, name=None,
        )  # fmt: skip
    assert stats is None
    assert o.get_dim() == [2, 4, 16, 8]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5)
    torch.testing.assert_close(graph(q, k, v, bias), wanted, atol=1e-5, rtol=1e-5)


def test_dropout_with_numbers_for_seed_and_offset() -> None:
    q, k, v = torch.zeros(2, 4, 64, 8), torch.zeros(2, 4, 64, 8), torch.ones(2, 4, 64, 8)
    with cudnn.Graph() as graph:
        graph.sdpa(q=q, k=k, v=v, dropout=0.25, dropout_seed=7, dropout_offset=0)
    o = graph(q, k, v)
    assert torch.equal(o, graph(q, k, v))
    kept = (o * 64 * 0.75).round()  # every weight is 1/64, and those kept are divided by 0.75
    torch.testing.assert_close(o, kept / 64 / 0.75)
    assert 0.7 < kept.mean() / 64 < 0.8
    with pytest.raises(TypeError, match="dropout: got"), cudnn.Graph() as graph:
        graph.sdpa(q=q, k=k, v=v, dropout=0.25)


def test_no_scale_means_no_scaling() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    with cudnn.Graph() as graph:
        graph.sdpa(q, k, v)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    torch.testing.assert_close(graph(q, k, v), wanted, atol=1e-5, rtol=1e-5)


def test_attention_keeps_the_stride_order_of_q() -> None:
    q, k, v = (torch.randn(2, 16, 4, 8).transpose(1, 2) for _ in range(3))
    with cudnn.Graph() as graph:
        graph.sdpa(q, k, v)
    assert graph(q, k, v).stride() == q.stride()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm_of_the_reference(zero_centered: bool) -> None:
    x, gamma, beta = torch.randn(2, 8, 16), torch.randn(16), torch.randn(16)
    with cudnn.Graph() as graph:
        results = graph.layernorm(x, gamma, beta, epsilon=1e-3, zero_centered_gamma=zero_centered)
    assert results[1:] == [None, None]
    wanted = torch.nn.functional.layer_norm(x, [16], gamma + zero_centered, beta, 1e-3)
    torch.testing.assert_close(graph(x, gamma, beta), wanted, atol=1e-5, rtol=1e-5)


def test_rmsnorm_gives_two_results() -> None:
    with cudnn.Graph() as graph:
        y, inverse = graph.rmsnorm(torch.randn(2, 8, 16), torch.randn(16))
    assert y.get_dim() == [2, 8, 16]
    assert inverse is None


def test_silu_and_swish() -> None:
    x = torch.randn(3, 4)
    with cudnn.Graph(heuristics=[cudnn.heur_mode.CUDNN_FIND]) as graph:
        graph.silu(input=x)
        graph.swish(input=x)
    for result in graph(x):
        torch.testing.assert_close(result, torch.nn.functional.silu(x))


def test_data_gradient_of_a_strided_convolution_needs_its_shape() -> None:
    w, dy = torch.randn(4, 3, 3, 3), torch.randn(2, 4, 5, 5)
    with pytest.raises(ValueError, match=r"conv_dgrad.*set_dim"), cudnn.Graph() as graph:
        graph.conv_dgrad(weight=w, loss=dy, padding=[1, 1], stride=[2, 2])


def test_find_asks_every_heuristic(h200: object) -> None:
    counts: dict[str, int] = {}
    for mode in ("A", "CUDNN_FIND"):
        graph = cudnn.pygraph(io_data_type=torch.float16, compute_data_type=torch.float32, device_property=h200)
        a = graph.tensor(dim=[1, 64, 64], stride=[4096, 64, 1])
        graph.matmul(a, graph.tensor_like(a)).set_output(True)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode[mode]])
        counts[mode] = graph.get_execution_plan_count()
    assert counts["CUDNN_FIND"] > counts["A"] > 0
