"""The documentation: every Python code block runs, generated tables are current, the README keeps its promises."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def _blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """Line number and text of a page's code blocks in a language."""
    text = path.read_text()
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in _BLOCK.finditer(text) if m[1] == language]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "python")], ids=_name)
def test_code_blocks_run(page: Path) -> None:
    """The blocks of a page run in order, in one namespace, each compiled with its place in the page."""
    module = ModuleType("page")
    for line, code in _blocks(page, "python"):
        exec(compile("\n" * line + code, f"<{_name(page)}>", "exec"), vars(module))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_current(generate: ModuleType) -> None:
    stale = [_name(page) for page in generate.pages() if generate.render(page.read_text()) != page.read_text()]
    assert stale == [], "run `python docs/generate.py`"


def test_operations_table_lists_every_operation(generate: ModuleType) -> None:
    import cudnn
    from cudnn.pygraph.node import REGISTRY

    table = generate.operations()
    methods = {node.method for node in REGISTRY.values() if isinstance(node.__dict__.get("method"), str)}
    assert methods
    for method in methods & set(dir(cudnn.pygraph)):
        assert f"`{method}`" in table


@pytest.mark.parametrize("method", ["conv_fprop", "conv_dgrad", "conv_wgrad", "resample"])
def test_operations_table_says_which_empty_arguments_are_refused(method: str) -> None:
    """`padding=()` looks optional, and a convolution without padding is refused: the row says so."""
    import cudnn

    graph = cudnn.pygraph(io_data_type=cudnn.data_type.HALF, compute_data_type=cudnn.data_type.FLOAT)
    x, w = (graph.tensor(dim=[1, 8, 4, 4], stride=[128, 1, 32, 8]) for _ in range(2))
    if method == "resample":
        graph.resample(x, cudnn.resample_mode.MAXPOOL).set_output(True)
    else:
        getattr(graph, method)(x, w).set_output(True).set_dim([1, 8, 1, 1])
    with pytest.raises(ValueError, match="not set") as refused:
        graph.validate()
    cure = re.search(r"pass for instance (\w+)=", str(refused.value))
    assert cure is not None
    table = (ROOT / "docs" / "operations.md").read_text().split("<!-- end -->")[0]
    (row,) = re.findall(rf"^\| `{method}`.*$", table, re.MULTILINE)
    assert f"`{cure[1]}=()`" in row
    assert re.search(rf"(Needs|the same) `{cure[1]}`", row)


def test_readme_has_two_commands_for_a_fresh_machine() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## A fresh machine")[1].split("\n#")[0]
    commands = [m[2].strip() for m in _BLOCK.finditer(section)]
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    assert commands[0].endswith("cudnn demo")
    assert "pytest" in commands[1]
    assert all("-c constraints.txt" in command for command in commands)


def test_no_page_installs_the_package_from_an_index() -> None:
    """No package index has it: pages install a clone."""
    named = [
        f"{_name(page)}: {line}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if re.search(r"pip install .*\bcudnn-fused\b", line)
    ]
    assert named == []


def test_readme_says_what_the_reference_executor_runs() -> None:
    """No operation of the graph API is "not yet" in the README's table while `docs/operations.md` has it."""
    table = (ROOT / "README.md").read_text().split("## What works where")[1].split("\n## ")[0]
    rows = [row.lower() for row in table.splitlines() if row.startswith("|") and "not yet" in row]
    operations = (ROOT / "docs" / "operations.md").read_text().split("<!-- end -->")[0]
    families = [title.lower() for title in re.findall(r"^## (.*)$", operations, re.MULTILINE)]
    assert "block scale" in families
    assert [row for row in rows for family in families if family.split()[0] in row and "fused api" not in row] == []


def test_relative_links_lead_somewhere() -> None:
    broken = [
        f"{_name(page)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
