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


def test_readme_has_two_commands_for_a_fresh_machine() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## A fresh machine")[1].split("\n#")[0]
    commands = [m[2].strip() for m in _BLOCK.finditer(section)]
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    assert commands[0].endswith("cudnn demo")
    assert "pytest" in commands[1]
    assert all("-c constraints.txt" in command for command in commands)


def test_relative_links_lead_somewhere() -> None:
    broken = [
        f"{_name(page)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
