"""A hook of MkDocs: the reference of the fused APIs has a section for every folder of the package with an `api.py`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PLACE = "<!-- every fused API -->"
_PACKAGE = Path(__file__).parents[1] / "python" / "cudnn"
_METHODS = ("check_support", "compile", "execute", "workspace_size")


def sections() -> str:
    """A heading and the public names of each API, in the order of the folders."""
    return "\n".join(_section(path) for path in sorted(_PACKAGE.rglob("*/api.py")))


def _section(path: Path) -> str:
    """What an `api.py` defines, read without importing it: the class and its methods, the wrapper, helpers."""
    tree = ast.parse(path.read_text())
    title = (ast.get_docstring(tree) or path.parent.name).split("\n")[0].rstrip(".")
    module = ".".join(("cudnn", *path.relative_to(_PACKAGE).with_suffix("").parts))
    lines = [f"## {title}", ""]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            lines += [f"::: {module}.{node.name}", "    options:", f"      heading: cudnn.{node.name}"]
            if isinstance(node, ast.ClassDef):
                lines += ["      inherited_members: true", f"      members: [{', '.join(_METHODS)}]"]
            lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown.replace(PLACE, sections())
