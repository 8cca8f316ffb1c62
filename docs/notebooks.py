"""A hook of MkDocs: notebooks become pages of the site, and are also files to download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Notebook(File):
    """A notebook, which MkDocs treats as a page: links to it become links to the page."""

    def is_documentation_page(self) -> bool:
        return True


def markdown(notebook: dict[str, Any]) -> str:
    """The cells one after another, code as code blocks, each followed by its outputs."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """What a cell printed as a block of text, a drawing as it is."""
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text'])}```"
    if "image/svg+xml" in output["data"]:
        return f'<div class="drawing">{"".join(output["data"]["image/svg+xml"])}</div>'
    return f"```text\n{''.join(output['data']['text/plain'])}\n```"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    return files


def on_page_read_source(*, page: Page, config: MkDocsConfig) -> str | None:
    if not isinstance(page.file, Notebook):
        return None
    title, _, rest = markdown(json.loads(page.file.content_string)).partition("\n\n")
    name = Path(page.file.src_uri).name
    link = f'<a href="{"../" if config.use_directory_urls else ""}{name}" download>This page as a notebook</a>'
    return f"{title}\n\n{link}\n\n{rest}"


def on_post_build(*, config: MkDocsConfig) -> None:
    for path in Path(config.docs_dir).rglob("*.ipynb"):
        shutil.copy(path, Path(config.site_dir) / path.relative_to(config.docs_dir))
