"""The published programs run as printed, on the reference executor."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import cudnn
import pytest
import torch
from support.seed_programs import PROGRAMS, reference_cells, reference_prelude, run_program
from support.seed_reference import REFERENCE

CELLS = reference_cells()


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, libcudnn: object) -> None:
    """The programs compare their own results with PyTorch's. (One asks for cuDNN's version, hence the fixture.)"""
    run_program(program, "cpu")


def test_a_cached_graph_is_built_once() -> None:
    names = run_program("low_level_api", "cpu")
    again, _ = names["create_matmul_bias_graph"](names["handle"], names["a_gpu"], names["b_gpu"], names["d_gpu"])
    assert again is names["g"]


@pytest.mark.parametrize("title", REFERENCE)
def test_reference_cell(title: str) -> None:
    """A code block of the API reference, over evident definitions of what it leaves undefined, gives the right numbers."""
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
