"""The tutorials: runs their cells, and keeps the outputs that the notebooks store current.

What is stored is what a machine without a GPU shows. Times, and errors of random data, may differ::

    PYTHONPATH=test python -m support.notebooks           # those out of date
    PYTHONPATH=test python -m support.notebooks --write   # rewrites them
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from support.pages import ROOT, current

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
Output = dict[str, Any]


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> tuple[ModuleType, list[list[Output]]]:
    """Runs the code cells in order, in a separate namespace; returns it, and the outputs of each cell."""
    module, outputs = ModuleType(path.stem), []
    for number, cell in enumerate(code_cells(json.loads(path.read_text())), start=1):
        tree = ast.parse("".join(cell["source"]), f"<{path.name} cell {number}>")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"<{path.name} cell {number}>", "exec"), vars(module))
            value = last and eval(
                compile(ast.Expression(last.value), f"<{path.name} cell {number}>", "eval"), vars(module)
            )
        outputs.append(_outputs(printed.getvalue(), value))
    return module, outputs


def _outputs(printed: str, value: Any) -> list[Output]:
    """As Jupyter stores what a cell printed, and the value that it ends with."""
    outputs: list[Output] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        mime = value._repr_mimebundle_() if hasattr(value, "_repr_mimebundle_") else {"text/plain": repr(value)}
        data = {mime_type: text.splitlines(keepends=True) for mime_type, text in mime.items()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def texts(outputs: list[Output]) -> dict[str, str]:
    """The texts of a cell's outputs, by kind."""
    by_type: dict[str, str] = {}
    for output in outputs:
        for mime_type, lines in ({"stream": output["text"]} if "text" in output else output["data"]).items():
            by_type[mime_type] = "".join(lines)
    return by_type


def stale_cells(path: Path, outputs: list[list[Output]]) -> list[int]:
    """The numbers of the cells whose stored outputs are not these."""
    stale = []
    for number, (cell, now_outputs) in enumerate(
        zip(code_cells(json.loads(path.read_text())), outputs, strict=True), start=1
    ):
        shown, now = texts(cell["outputs"]), texts(now_outputs)
        if shown.keys() != now.keys() or not all(current(shown[mime_type], now[mime_type]) for mime_type in now):
            stale.append(number)
    return stale


def main() -> int:
    """The command of the docstring; 1 where an output is out of date."""
    write, stale = "--write" in sys.argv[1:], 0
    for path in NOTEBOOKS:
        _, outputs = run(path)
        indices = stale_cells(path, outputs)
        if not indices:
            continue
        stale += 1
        print(f"{path.name}: cells {', '.join(map(str, indices))}: out of date" + (", written" if write else ""))
        if write:
            notebook = json.loads(path.read_text())
            for number in indices:
                code_cells(notebook)[number - 1]["outputs"] = outputs[number - 1]
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    return int(stale > 0 and not write)


if __name__ == "__main__":
    sys.exit(main())
