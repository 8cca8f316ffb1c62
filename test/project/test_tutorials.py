"""The tutorials: they run with and without a GPU, cuDNN has plans for them, and their stored outputs are current."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import cudnn
from cudnn.backend import library
from cudnn.backend.handle import gpu_available
from cudnn.bench.dense_gemm import source_module
from cudnn.pygraph import known_faults
from support import notebooks
from support.graphs import configurations
from support.notebooks import NOTEBOOKS
from support.pages import ROOT

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    """The sources of a notebook's cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@functools.cache
def run(path: Path) -> tuple[str, tuple[str, ...], list[list[notebooks.Output]]]:
    """Runs the code cells; returns their device, the graphs that were built, and what each cell put out."""
    graphs: dict[str, None] = {}
    create = cudnn.pygraph.create_execution_plans

    def record(graph: cudnn.pygraph, modes: Any) -> None:
        graphs[repr(graph)] = None
        create(graph, modes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn.pygraph, "create_execution_plans", record)
        module, outputs = notebooks.run(path)
    return vars(module)["device"], tuple(graphs), outputs


@every_notebook
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_runs(path: Path, device: str) -> None:
    if device == "cpu" and gpu_available():
        pytest.skip("a GPU is here, so the tutorials use it")
    assert run(path)[0] == device


@every_notebook
def test_stored_outputs_are_current(path: Path) -> None:
    if gpu_available():
        pytest.skip("what is stored is what a machine without a GPU shows")
    stale = notebooks.stale_cells(path, run(path)[2])
    assert stale == [], "run `PYTHONPATH=test python -m support.notebooks --write`"


@pytest.mark.deviceless_919
@every_notebook
def test_cudnn_has_plans(path: Path, device_properties: Any) -> None:
    """What runs on the reference executor here has engines on an H200 and on a B200."""
    for description in run(path)[1]:
        if '"score_mod"' in description:  # it names a Python function and does not hold it
            continue
        graph = json.loads(description)
        graph["context"]["sm_version"] = (
            device_properties.sm_version
        )  # so that the library's own rules for the device apply
        planned = cudnn.pygraph(device_property=device_properties)
        planned.deserialize(json.dumps(graph))
        try:
            assert configurations(planned) > 0
        except cudnn.cudnnGraphNotSupportedError as error:
            if "GATHER with cuDNN" not in str(error) or library.version() > known_faults.SEEN_IN:
                raise  # gathered rows alone wait for a newer cuDNN, as their notebook states


@every_notebook
def test_is_a_notebook_with_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell.get("execution_count") is None
    assert any(cell["outputs"] for cell in notebooks.code_cells(notebook)), "it shows nothing"
    assert path.stat().st_size < 30_000, "outputs are small"
    assert cells(path, "markdown")[0].startswith("# ")
    assert re.search(r"\b(assert|close\()", cells(path, "code")[-1]), "it ends without comparing anything"


def test_a_stale_output_is_seen(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["print('one')\n", "'two'"], "outputs": []}
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    _, outputs = notebooks.run(path)
    assert notebooks.texts(outputs[0]) == {"stream": "one\n", "text/plain": "'two'"}
    assert notebooks.stale_cells(path, outputs) == [1]
    path.write_text(json.dumps({"cells": [{**cell, "outputs": outputs[0]}]}))
    assert notebooks.stale_cells(path, outputs) == []


def test_the_site_shows_every_notebook() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f": tutorials/{path.name}" not in navigation] == []


@every_notebook
def test_a_page_holds_every_cell(path: Path) -> None:
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install '.[docs]'")
    notebook = json.loads(path.read_text())
    page = source_module("docs/notebooks.py").markdown(notebook)
    assert page.startswith("# ")
    assert all(f"```python\n{code}\n```\n" in page for code in cells(path, "code"))
    assert all(f"{text}\n" in page for text in cells(path, "markdown"))
    for cell in notebooks.code_cells(notebook):
        for kind, text in notebooks.texts(cell["outputs"]).items():
            if kind != "text/plain":  # an explanation, which has a drawing
                assert text in page
