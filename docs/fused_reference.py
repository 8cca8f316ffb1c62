"""A hook of MkDocs: the reference of the fused APIs has a section for every folder of the package with an `api.py`."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cudnn.fused import registry  # reads the folders; loads neither PyTorch nor the CuTe DSL

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PLACE = "<!-- every fused API -->"
_SOURCE = Path(__file__).parents[1] / "python"
_METHODS = ("check_support", "compile", "execute", "workspace_size")


def sections() -> str:
    """A heading and the public names of each API, in the order of the folders."""
    return "\n".join(_section(package) for package in registry.packages().values())


def _section(package: str) -> str:
    """The class with the methods that programs call, the wrapper, helpers; no names for an architecture."""
    declaration = _SOURCE.joinpath(*package.split("."), "api.py").read_text()
    title = (ast.get_docstring(ast.parse(declaration)) or package).split("\n")[0].rstrip(".")
    lines = [f"## {title}", ""]
    for name, home in registry.public_names().items():
        if home == package and not name.lower().endswith("sm100"):
            lines += [f"::: {package}.{name}", "    options:", f"      heading: cudnn.{name}"]
            if name[0].isupper():
                lines += ["      inherited_members: true", f"      members: [{', '.join(_METHODS)}]"]
            lines.append("")
    return "\n".join(lines)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Without the roles of Sphinx in docstrings: `:class:` and others, before what is code anyway."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    return markdown.replace(PLACE, sections())
