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
            q=q,
            k=k,
            v=v,
            attn_scale=0.5,
            is_inference=True,
            use_causal_mask=False,
            generate_stats=False,
            attn_bias=bias,
            dropout=0.0,
            dropout_seed=None,
            dropout_offset=0,
            name=None,
        )
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


def test_silu_and_swish() -> None:
    x = torch.randn(3, 4)
    with cudnn.Graph(heuristics=[cudnn.heur_mode.CUDNN_FIND]) as graph:
        graph.silu(input=x)
        graph.swish(input=x)
    for result in graph(x):
        torch.testing.assert_close(result, torch.nn.functional.silu(x))
