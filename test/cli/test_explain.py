"""``cudnn explain``: graphs of examples, programs and files, in every format; a refused one makes it fail."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

import cudnn
from cudnn.backend import handle
from cudnn.cli import app
from cudnn.cli.explain import EXAMPLES
from support import driver
from support.cli import invoke, words
from support.graphs import FLOAT, reference_graph

PROGRAM = """
import sys
import cudnn

def describe(columns=4, **options):
    graph = cudnn.pygraph(io_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT, **options)
    x = graph.tensor([1, 2, 3], [6, 3, 1], name="x")
    w = graph.tensor([1, columns, 5], [5 * columns, 5, 1], name="w")
    graph.matmul(x, w, name="mm").set_data_type(cudnn.data_type.FLOAT).set_output(True)
    return graph, ["an output"]

def right():
    return describe(3)

def stops():
    hidden, _ = describe(4)
    hidden.build([cudnn.heur_mode.A])

if __name__ == "__main__":
    good, _ = describe(3)
    bad, _ = describe(4)
    others = [good]
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def explain(*arguments: str | Path) -> Result:
    return invoke("explain", *arguments)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    result = explain("--example", name)
    assert result.exit_code == 0, result.output
    assert "graph 'test_graph': built" in result.output
    plan = "plan eng" if handle.gpu_available() else "plan reference"
    assert plan in result.output


def test_a_described_device(tmp_path: Path, libcudnn: object) -> None:
    properties = tmp_path / "h200.json"
    properties.write_text(driver.device_json("h200", cudnn.backend_version()))
    result = explain("--example", "matmul", "--device-properties", properties)
    if handle.gpu_available():
        assert result.exit_code == 2
        assert "got a described device on a machine with a GPU; allowed: a machine without a GPU" in words(result)
        return
    assert result.exit_code == 0, result.output
    assert "for compute capability 9.0" in result.output
    assert "plan eng" in result.output
    assert "fuses matmul (matmul), bias (add), gelu (gelu)" in result.output
    properties.write_text("{}")
    for said in ("which cuDNN refuses", "No such file"):
        result = explain("--example", "matmul", "--device-properties", properties)
        assert result.exit_code == 2
        assert said in words(result)
        properties.unlink(missing_ok=True)


def test_formats_and_files(tmp_path: Path) -> None:
    drawing = tmp_path / "graph.svg"
    result = explain("--example", "conv", "--format", "svg", "--output", drawing)
    assert result.exit_code == 0
    assert "written: " in result.output
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_programs(program: Path) -> None:
    result = explain(program)
    assert result.exit_code == 1
    assert result.output.count("graph 'test_graph':") == 2  # each graph once
    assert "refused: mm (matmul): A and B: got dim=[1, 2, 3] and dim=[1, 4, 5]" in result.output
    assert "to fix it: correct one of the shapes" in result.output
    result = explain(program, "--format", "svg")
    assert result.exit_code == 2
    assert "got 2 graphs; allowed: one graph for an SVG file" in words(result)


@pytest.mark.parametrize("name", ["right", "describe"])
def test_functions_of_programs(program: Path, name: str) -> None:
    result = explain(f"{program}:{name}")
    assert result.output.count("graph 'test_graph':") == 1
    assert result.exit_code == (1 if name == "describe" else 0)


def test_a_program_that_stops_shows_the_graph_it_worked_on(program: Path) -> None:
    result = explain(f"{program}:stops")
    assert result.exit_code == 1
    assert "program.py stopped: ValueError: mm (matmul): A and B" in words(result)
    assert "refused: mm (matmul)" in result.output
    program.write_text("raise ValueError('nothing to do with graphs')")
    with pytest.raises(ValueError, match="nothing to do with graphs"):
        CliRunner().invoke(app, ["explain", str(program)], catch_exceptions=False)


def test_files(tmp_path: Path) -> None:
    graph = reference_graph(io=FLOAT)
    graph.relu(graph.tensor([2, 3], [3, 1], name="x"), name="act").set_output(True)
    graph.build()
    for name, data in (("description.json", str(graph).encode()), ("graph.bin", graph.serialize())):
        path = tmp_path / name
        path.write_bytes(data)
        result = explain(path)
        assert result.exit_code == 0, result.output
        assert "act (relu)" in result.output
    path.write_bytes(b"no graph")
    assert "got no graph" in words(explain(path))


def test_names_that_are_not_there(program: Path) -> None:
    assert "got 'unknown'; allowed: a name in program.py" in words(explain(f"{program}:unknown"))
    assert ", without a graph; allowed: a program with a graph in a variable" in words(explain(f"{program}:cudnn"))
