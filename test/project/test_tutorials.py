"""The tutorials: notebooks without outputs; they run with and without a GPU, and cuDNN has plans for their graphs."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cudnn
from cudnn.backend import library
from cudnn.backend.handle import gpu_available
from cudnn.pygraph import known_faults
from support.graphs import configurations

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    """The sources of a notebook's cells of a kind."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@functools.cache
def run(path: Path) -> tuple[str, tuple[str, ...]]:
    """Runs the code cells in order, in a namespace of their own; returns its device, and the graphs that were built."""
    module, graphs = ModuleType(path.stem), {}
    create = cudnn.pygraph.create_execution_plans

    def record(graph: cudnn.pygraph, modes: Any) -> None:
        graphs[repr(graph)] = None
        create(graph, modes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn.pygraph, "create_execution_plans", record)
        for number, code in enumerate(cells(path, "code"), start=1):
            exec(compile(code, f"<{path.name} cell {number}>", "exec"), vars(module))
    return vars(module)["device"], tuple(graphs)


@every_notebook
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_runs(path: Path, device: str) -> None:
    if device == "cpu" and gpu_available():
        pytest.skip("a GPU is here, so the tutorials use it")
    assert run(path)[0] == device


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
                raise  # gathered rows alone wait for a newer cuDNN, and their notebook says so


@every_notebook
def test_is_a_notebook_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert cells(path, "markdown")[0].startswith("# ")
    assert re.search(r"\b(assert|close\()", cells(path, "code")[-1]), "it ends without comparing anything"


def test_the_site_shows_every_notebook() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f": tutorials/{path.name}" not in navigation] == []


@every_notebook
def test_a_page_holds_every_cell(path: Path) -> None:
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install '.[docs]'")
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = hook.markdown(json.loads(path.read_text()))
    assert page.startswith("# ")
    assert all(f"```python\n{code}\n```\n" in page for code in cells(path, "code"))
    assert all(f"{text}\n" in page for text in cells(path, "markdown"))
