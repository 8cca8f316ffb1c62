"""Generates tables of the documentation and stubs: `python docs/generate.py`, in the root.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; a test fails while a page is out of date.
"""

from __future__ import annotations

import csv
import enum
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import experiments  # these are next to this file
import outside_kernels
import results
from reference_tables import arguments, first_paragraph
from reference_tables import table as reference

import cudnn
from cudnn import settings
from cudnn.fused import registry
from cudnn.pygraph.node import NodeList
from cudnn.pygraph.subgraph import SubGraph
from ptx_emulator import findings

_DOCS = Path(__file__).parent
_README = _DOCS.parent / "README.md"
_WORDS = {"Fp8": "fp8", "Moe": "MoE", "Mxfp8": "MXFP8", "Rope": "RoPE"}  # in headings
_TABLE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _families() -> Iterator[type]:
    """The classes that hold the methods of `pygraph`, one a family of operations, in the order of its bases."""
    for cls in cudnn.pygraph.__mro__[1:]:
        if issubclass(cls, NodeList) and cls is not SubGraph and _methods(cls):
            yield cls


def _methods(family: type) -> dict[Callable[..., Any], list[str]]:
    """The public methods of a family with all their names."""
    by_method: dict[Callable[..., Any], list[str]] = {}
    for name, value in vars(family).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            by_method.setdefault(value, []).append(name)
    return by_method


def _row(names: list[str], method: Callable[..., Any]) -> str:
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {arguments(method)} | {first_paragraph(method.__doc__)} |"


def operations() -> str:
    """One table a family: names, arguments, meaning."""
    parts: list[str] = []
    for family in _families():
        rows = [_row(names, method) for method, names in _methods(family).items()]
        if rows:
            words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", family.__name__.removesuffix("Methods")).capitalize().split()
            title = " ".join(_WORDS.get(word, word) for word in words)
            parts += [f"## {title}", "", "| method | arguments | what |", "|---|---|---|", *rows, ""]
    return "\n".join(parts).rstrip()


def enumerations() -> str:
    """One row for each enumeration: name, members, meaning."""
    rows = ["| enumeration | members | meaning |", "|---|---|---|"]
    for name, value in vars(cudnn).items():
        if isinstance(value, enum.EnumMeta):
            members = ", ".join(f"`{member.name}`" for member in value)
            rows.append(f"| `cudnn.{name}` | {members} | {first_paragraph(value.__doc__)} |")
    return "\n".join(rows)


def _page_of(title: str) -> str:
    """A link from `docs/fused` to the page of the docs that has this heading, with its anchor.

    Raises:
        LookupError: not one page has it.
    """
    heading = re.compile(rf"^#+ {re.escape(title)}$", re.MULTILINE)
    pages = [*(_DOCS / "fused").glob("*.md"), *_DOCS.glob("*.md")]
    found = [path for path in pages if heading.search(path.read_text())]
    if len(found) != 1:
        raise LookupError(f"{title!r} is a heading of {len(found)} pages of docs/fused and docs, not of one")
    anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
    return f"{'' if found[0].parent.name == 'fused' else '../'}{found[0].name}#{anchor}"


def fused_apis() -> str:
    """One row an API: its page, its class, its operator, what it computes."""
    rows = []
    for name in registry.packages():
        api = registry.find(name)
        what = first_paragraph(api.__doc__)
        rows.append(f"| [{api.title}]({_page_of(api.title)}) | `{api.__name__}` | `{name}` | {what} |")
    return "\n".join(["| API | class | wrapper (`_wrapper`), operator | what |", "|---|---|---|---|", *rows])


TRAFFIC = Path(__file__).parent / "emulator-traffic.csv"
TRAFFIC_COLUMNS = {
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "sectors loaded",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "sectors stored",
    "memory_l1_wavefronts_shared": "wavefronts",
    "memory_l1_wavefronts_shared_ideal": "without conflicts",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "L1 wavefronts",
    "lts__t_sectors_srcunit_tex_op_read.sum": "L2 sectors read",
    "lts__t_sectors_srcunit_tex_op_write.sum": "L2 sectors written",
}


def traffic() -> str:
    """Of `benchmarks/traffic.py`: a row for each launch, with what the GPU counted and the emulator's difference."""
    if not TRAFFIC.exists():
        return "Not measured yet."
    launches: dict[tuple[str, int], dict[str, str]] = {}
    close: Counter[str] = Counter()  # launches within 2 %, by metric
    seen: Counter[tuple[str, str]] = Counter()
    with TRAFFIC.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for row in rows:
        key = row["program"], row["metric"]
        chip, ours = float(row["ncu"]), float(row["emulator"])
        difference = f"{100 * (ours / chip - 1):+.1f} %" if chip else f"{ours:.0f}"
        cells = launches.setdefault((row["program"], seen[key]), {"program": f"{row['program']} {row['version']}"})
        cells[row["metric"]] = f"{chip:.0f} ({difference})" if ours != chip else f"{chip:.0f}"
        seen[key] += 1
        close[row["metric"]] += abs(ours - chip) <= 0.02 * chip
    columns = {name: title for name, title in TRAFFIC_COLUMNS.items() if name in close}
    lines = [
        f"{rows[0]['hardware']}, {rows[0]['date']}. In parentheses the emulator's difference, or its count where the "
        "GPU's is 0; no parentheses where both are equal.",
        "",
        f"| program | {' | '.join(columns.values())} |",
        "|---|" + "---:|" * len(columns),
    ]
    lines += [f"| {' | '.join(cells[name] for name in ('program', *columns))} |" for cells in launches.values()]
    lines.append(f"| within 2 % | {' | '.join(f'{close[name]} of {len(launches)}' for name in columns)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "enumerations": enumerations,
    "environment": settings.markdown_table,
    "operations": operations,
    "experiments": experiments.table,
    "fused_apis": fused_apis,
    "findings": findings.markdown_table,
    "outside_kernels": outside_kernels.table,
    "traffic": traffic,
}


def render(page: Path) -> str:
    """The page with regenerated tables and plots."""

    def generated(name: str) -> str:
        return TABLES[name]() if name in TABLES else {**results.GENERATORS, "reference": reference}[name](page)

    return _TABLE.sub(lambda match: f"{match[1]}\n{generated(match[2])}\n\n{match[3]}", page.read_text())


def pages() -> list[Path]:
    """The pages of the documentation, and the README."""
    return [_README, *sorted(_DOCS.rglob("*.md"))]


if __name__ == "__main__":
    import stubs  # next to this file

    stubs.write()
    results.write_figures()
    for path in pages():
        path.write_text(render(path))
