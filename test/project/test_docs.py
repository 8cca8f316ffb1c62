"""The documentation: every Python code block runs, generated tables are current, the README keeps its promises."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from cudnn.backend.handle import gpu_available
from cudnn.backend.library import Library
from cudnn.bench.results import Result, write
from support.pages import PAGES, ROOT, Block, Page, current, describe_h200

pytestmark = pytest.mark.usefixtures("source_lines")  # pages show them
COMMANDS = [(page, block) for page in map(Page.read, PAGES) for block in page.commands]
STALE = "the page shows {shown!r}: run `PYTHONPATH=test python -m support.pages --write {page}`"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in PAGES if Page.read(path).scripts], ids=_name)
def test_code_blocks_run(path: Path) -> None:
    """The Python blocks of a page run in order, in one namespace, and print the output that the page shows."""
    page = Page.read(path)
    for package in page.needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    outputs = page.run_scripts()
    assert [block for block, _ in outputs] == [block for block in page.blocks if block.is_printed]
    for block, printed in outputs:
        assert current(block.text, printed), STALE.format(shown=block.text, page=page.name)


def commands(versioned: bool) -> list[Any]:
    """Those that the page says are of a version of cuDNN, or the others."""
    return [
        pytest.param(
            page, block, marks=[pytest.mark.full] * ("full" in block.conditions), id=f"{page.name}-{block.source}"
        )
        for page, block in COMMANDS
        if versioned == any(text.startswith("cuDNN ") for text in block.conditions)
    ]


@pytest.mark.parametrize(("page", "block"), commands(versioned=False))
def test_commands_print_what_the_pages_show(page: Page, block: Block) -> None:
    compare(page, block, page.run_command(block))


@pytest.mark.parametrize(("page", "block"), commands(versioned=True))
def test_commands_with_cudnn_print_what_the_pages_show(page: Page, block: Block, libcudnn: Library) -> None:
    """Where that version is installed, for a described H200."""
    version = libcudnn.version
    if f"cuDNN {version // 10000}.{version // 100 % 100}" not in block.conditions or gpu_available():
        pytest.skip(f"the page shows what {', '.join(block.conditions)} says, without a GPU")
    compare(page, block, page.run_command(block, describe_h200(version)))


def compare(page: Page, block: Block, printed: str) -> None:
    assert current(block.text, printed), f"{STALE.format(shown=block.text, page=page.name)}\nnow: {printed}"


def test_every_output_has_a_source() -> None:
    """What looks like output comes from a block or a command, or names the test that checks it."""
    blocks = [(page, block) for page in map(Page.read, PAGES) for block in page.blocks]
    assert [
        f"{page.name}:{block.line}" for page, block in blocks if block.is_output != (block.source is not None)
    ] == []
    for page, block in blocks:
        if block.checked_by:
            assert page.path.name in (ROOT / block.checked_by).read_text(), f"{block.checked_by} knows no {page.name}"


def test_an_output_is_current_or_not() -> None:
    assert current("took 2.5 s: error 3.8e-03\n", "took 13 s: error 1.2e-05\n")
    assert current("a\n...\nz\n", "a\nb\nc\nz\n")
    assert current(" table\n ──── \n 0.1 s\n", " table\n ────── \n  0.123 s\n")
    assert not current("6,808 instructions\n", "6,984 instructions\n")
    assert not current("none found\n", "none found\nexit code 1\n")


def test_outputs_are_written_anew(tmp_path: Path) -> None:
    """Times that moved leave a page alone; what is wrong is replaced, wherever it stands."""
    from support import pages

    text = """```python title="numbers_of_mine.py"
ONE = 1
```
```python
from numbers_of_mine import ONE
print(ONE, "1.5 s")
```
<!-- output -->
```text
{first}
```
```python
print("two")
```
<!-- output -->
```text
{second}
```
"""
    path = tmp_path / "page.md"
    path.write_text(text.format(first="1 2.5 s", second="old\nlines"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "ROOT", tmp_path)
        page = Page.read(path)
        pages.write(page, {block: new for block, new in page.run_scripts() if not current(block.text, new)})
    assert path.read_text() == text.format(first="1 2.5 s", second="two")


def _script(name: str) -> ModuleType:
    """A module of the folder `docs`. It may import those next to it."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return _script("generate")


def test_generated_tables_are_current(generate: ModuleType) -> None:
    stale = [_name(page) for page in generate.pages() if generate.render(page) != page.read_text()]
    assert stale == [], "run `python docs/generate.py`"


def test_plots_are_those_of_the_result_files(generate: ModuleType) -> None:
    figures = generate.results.figures()
    assert set(figures) == set(generate.results.FIGURES.glob("*.svg")), "run `python docs/generate.py`"
    assert [_name(path) for path, text in figures.items() if path.read_text() != text] == []
    for text in figures.values():
        assert "prefers-color-scheme:dark" in text
        ElementTree.fromstring(text)


SIZES = {"head": 15, "title": 15, "small": 12.5, "code": 12.5, "tick": 12, "value": 11}  # of fonts, by class; else 14

FIGURES = sorted({*(ROOT / "docs" / "figures").rglob("*.svg")} - {ROOT / "docs" / "figures" / "explain.svg"})


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.stem)
def test_texts_of_a_figure_lie_inside(path: Path) -> None:
    """By the mean width of a letter: 0.54 of the font's size, 0.62 in bold titles."""
    figure = ElementTree.parse(path).getroot()
    _, _, width, height = map(float, figure.attrib["viewBox"].split())
    outside = []
    for text in figure.iter("{http://www.w3.org/2000/svg}text"):
        if "transform" not in text.attrib:
            style, words = text.get("class", ""), "".join(text.itertext())
            length = len(words) * SIZES.get(style, 14) * (0.62 if style in ("head", "title") else 0.54)
            left = float(text.attrib["x"]) - {"middle": length / 2, "end": length}.get(text.get("text-anchor", ""), 0)
            if left < -1 or left + length > width + 1 or float(text.attrib["y"]) > height:
                outside.append(words)
    assert outside == []


FIGURE = re.compile(r"\d[\d.,]*(?:\s|&nbsp;)?(?:TFLOP/s|TF|TB/s|GB/s|tokens/s|us|ms|times)\b")
GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "docs" / "performance.md"], ids=_name)
def test_speeds_come_from_result_files(path: Path) -> None:
    """In generated sections, or written out as a result file has them."""
    published = _script("results").published()
    figures = FIGURE.findall(GENERATED.sub("", path.read_text()))
    assert [figure for figure in figures if figure not in published] == []


def test_a_figure_without_a_result_file_is_found() -> None:
    text = "now 1.57 times as fast, 700 TFLOP/s, 5.2 us\n<!-- generated: x -->\n9 us\n<!-- end -->\n4,096 tokens"
    assert FIGURE.findall(GENERATED.sub("", text)) == ["1.57 times", "700 TFLOP/s", "5.2 us"]


def test_a_section_of_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of candidates, the ratio with its spread where the run has it, versions, and a figure for the plot."""
    results = _script("results")
    run = ("NVIDIA Fake", "580.1", "13.0", "2.11.0+cu130", "abc", "2026-11-29", "grouped_gemm", "bf16")
    lines = []
    for shape, ours, peer in (("64x32x16x2", 700.0, 650.0), ("96x32x16x3", 600.0, 630.0)):
        lines.append(Result(*run, shape, "uniform", "GroupedGemm", "0.1", 1, "rate", ours, "TFLOP/s", 5.0))
        lines.append(Result(*run, shape, "uniform", "torch._grouped_mm", "2.11.0", 0, "rate", peer, "TFLOP/s", 5.0))
        lines.append(Result(*run, shape, "uniform", "QuACK", "0.6.5", 0, "rate", 500.0, "TFLOP/s", 5.0))
    first = lines[0]
    lines.append(replace(first, metric="ratio to torch._grouped_mm", value=1.08, unit="x", spread=0.01))
    write(tmp_path / "grouped_gemm.csv", lines)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    text = results.section("grouped_gemm")(ROOT / "docs" / "performance.md")
    assert "![Grouped GEMM, bf16](figures/results/grouped_gemm.svg)" in text
    assert "| 2 experts, 64 x 32 x 16 | 700 | 650 | 500 | 1.08 ± 0.01 |" in text
    assert "| 3 experts, 96 x 32 x 16 | 600 | 630 | 500 | 0.95 |" in text  # a peer ahead is shown
    assert "PyTorch 2.11.0+cu130, QuACK 0.6.5. 2026-11-29, commit abc, `cudnn bench grouped_gemm" in text
    plot = results.figure(results.SECTIONS["grouped_gemm"])
    assert plot.count("<rect") == 3 + 6  # legend and bars
    assert "experts, tokens x N x K" in plot
    assert "<details" not in text
    write(tmp_path / "grouped_gemm.csv", [])
    assert results.section("grouped_gemm")(ROOT / "README.md").startswith("Not measured yet: `cudnn bench")


def test_long_tables_are_folded_and_long_times_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table for each metric; the ratio is in the first."""
    results = _script("results")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    run = ("NVIDIA Fake", "580.1", "13.0", "2.11.0+cu130", "abc", "2026-11-29", "moe", "bf16")
    metrics = (("rate", 600.0, "TFLOP/s"), ("memory", 2.5, "GB"))
    lines = [
        Result(*run, "64x32x16x2x1", case, peer, "0.1", ours, metric, value / (2 - ours), unit, 0.0)
        for case in ("forward", "inference", "backward")
        for peer, ours in (("MoE", 1), ("transformers", 0))
        for metric, value, unit in metrics
    ]
    write(tmp_path / "moe.csv", lines)
    text = results.section("moe")(ROOT / "docs" / "performance.md")
    assert "<details markdown>\n<summary>The numbers</summary>\n\n| tokens" in text
    assert "pass (TFLOP/s) | cudnn-fused | transformers | ours / fastest other |" in text
    assert "backward | 600 | 300 | 2.00 |" in text
    assert "pass (GB) | cudnn-fused | transformers |\n" in text
    write(tmp_path / "nsa.csv", [Result(*run, "65536x64x4x128", "whole", "NSA", "", 1, "time", 19_500.0, "us", 0.0)])
    assert "| 65,536 tokens, forward | 19.5 |" in results.table(results.SECTIONS["nsa"])


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [
        (707.0, [0, 200, 400, 600, 800]),
        (1.3e6, [0, 500_000, 1_000_000, 1_500_000]),
        (3.7, [0, 1, 2, 3, 4]),
        (0.1, [0, 0.025, 0.05, 0.075, 0.1]),
    ],
)
def test_an_axis_has_round_ticks(highest: float, ticks: list[float]) -> None:
    end, found = _script("plots").axis(highest)
    assert found == pytest.approx(ticks)
    assert end > max(highest, ticks[-1])


def test_experiments_are_sorted_by_area(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = _script("experiments")
    rows = experiments.rows()
    assert len(rows) > 300
    assert [row["area"] for row in rows] == sorted(row["area"] for row in rows)
    assert all(row["change"] and row["after"] and row["kept"] and row["date"] for row in rows)
    path = tmp_path / "experiments.csv"
    path.write_text("area,change,hypothesis,before,after,kept,date\nB,b|c,,1,2,no,2026\nA,a,,1,2,yes,2026\n")
    monkeypatch.setattr(experiments, "FILE", path)
    assert experiments.table().index("## A") < experiments.table().index("## B")
    assert r"| b\|c |  | 1 | 2 | no | 2026 |" in experiments.table()
    path.write_text("area,what\n")
    with pytest.raises(ValueError, match="got columns"):
        experiments.rows()


def test_generated_stubs_are_current() -> None:
    stubs = _script("stubs").STUBS
    assert len(stubs) == 2
    stale = [_name(path) for path, text in stubs.items() if path.read_text() != text()]
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
    """`padding=()` looks optional, and a convolution without padding is refused: the row documents it."""
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


def test_reference_has_every_public_name(generate: ModuleType) -> None:
    """The names of the packages, the methods of graphs, and each fused API of the folders."""
    import cudnn
    import ptx_emulator
    from cudnn import experimental, ops
    from cudnn.fused import registry

    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    fused = _script("fused_reference")
    assert fused.PLACE in pages["fused"]
    names = re.findall(
        r"(?:^::: |heading: |^\| `)([\w.]+)", "\n".join([*pages.values(), fused.sections()]), re.MULTILINE
    )
    reached = {name.rsplit(".", 1)[-1] for name in names}
    faults = {name for name in ptx_emulator.__all__ if name[0].isupper()}
    faults -= {"Finding", "Instruction", "Launch", "Report", "Timeline"}
    assert "ptx_emulator.errors" in names
    assert all(getattr(ptx_emulator, name).__module__ == "ptx_emulator.errors" for name in faults)
    hidden = {"__version__", *cudnn._LAZY_MODULES}
    fused_names = {name for name in registry.public_names() if not name.lower().endswith("sm100")}
    public = {
        *cudnn.__all__,
        *cudnn._LAZY,
        *fused_names,
        "emulate",
        "run_ptx",
        "run_triton",
        "Timeline",
        "Report",
        "Launch",
        "Finding",
    }
    operators = {*experimental.ops.__all__, *ops._OWN}
    assert sorted((public | operators) - hidden - reached) == []
    families = {family.__name__ for family in generate._families()}
    assert families - reached == set()
    assert [api for api in registry.packages() if f"cudnn.{api}_wrapper" not in names] == []


def test_reference_pages_begin_with_a_table_for_code_hosts(generate: ModuleType) -> None:
    """Each object that a page documents has a row with its parameters and a purpose in one paragraph."""
    tables = _script("reference_tables")
    for name in ("emulator", "fused", "graph", "launch", "operators"):
        text = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
        rows = dict(re.findall(r"^\| `([^`]+)` \| .*\| (.*) \|$", text.split("<!-- end -->")[0], re.MULTILINE))
        documented = [heading for heading, _ in tables.documented(text)]
        assert [heading for heading in documented if not rows[heading]] == []
        methods = [method for method, _ in tables.methods(text)]
        assert [method for method in methods if not rows[method]] == []
        assert ("cudnn.nn.MoE.load_gate_up" in methods) == (name == "operators")
    opaque = object()
    assert tables.arguments(lambda a, *b, c=1, d=opaque, **e: None) == "`a`, `*b`, `c=1`, `d`, `**e`"
    assert tables.first_paragraph("One ``x`` of :class:`Y`\n  | z.\n\nMore.") == "One `x` of `Y` \\| z."


def test_docstrings_name_arguments_that_exist() -> None:
    """Of everything on the reference's pages; several names may share an entry."""
    griffe = pytest.importorskip("griffe", reason="griffe is not installed: pip install '.[docs]'")
    unknown = []
    for package in ("cudnn", "ptx_emulator"):
        for function in _functions(griffe.load(package, search_paths=[ROOT / "python"])):
            known = {parameter.name for parameter in function.parameters}
            owner = function.parent if function.name == "__init__" else function
            for section in owner.docstring.parse("google", warnings=False) if owner.docstring else ():
                if section.kind.value == "parameters":
                    named = {name for entry in section.value for name in re.findall(r"\w+", entry.name)}
                    unknown += [f"{owner.path}: {name}" for name in sorted(named - known - {"others"})]
    assert unknown == []


def _functions(module: Any) -> Iterator[Any]:
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_function:
            yield member
        elif member.is_module or member.is_class:
            yield from _functions(member)


def test_names_in_kernels_are_those_of_the_kernels() -> None:
    """The page's examples occur in the kernels, the prefixes of the kernels on the page, and its lines are theirs."""
    page = Page.read(ROOT / "docs" / "dev" / "kernels.md")
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "kernels").rglob("*.py")))
    words = set(re.findall(r"\w+", sources))
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in page.path.read_text().split("\n## Names\n")[1].splitlines()
        if row[:3] == "| `"
    ]
    shown = [name for row in rows for name in re.findall(r"`(\w+)`", row[0] if len(row) == 2 else row[2])]
    assert len(shown) > 20
    assert [name for name in shown if name not in words] == []
    prefixes = "".join(name for row in rows if len(row) == 3 for name in re.findall(r"`(\w)`", row[0]))
    assert prefixes == "mgsrt"
    nodes = [node for path in (ROOT / "kernels").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    variables = {node.id for node in nodes if isinstance(node, ast.Name)}
    variables |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    tensors = {name for name in variables if re.fullmatch(r"[a-z]{1,2}[A-Z][a-z_]*|t[A-Z][a-z][A-Z]\w*", name)}
    assert tensors
    assert "A small `d` before the operand means its gradient" in page.path.read_text()
    assert [name for name in sorted(tensors) if name[0] not in f"{prefixes}d"] == []
    (block,) = [block for block in page.blocks if block.title]
    lines = {line.strip() for line in (ROOT / block.title).read_text().splitlines()}
    assert [line for line in block.text.splitlines() if line.strip() not in lines] == []


def test_readme_has_two_commands_for_a_fresh_machine() -> None:
    text = (ROOT / "README.md").read_text()
    section = text.split("## A fresh machine")[1].split("\n#")[0]
    commands = [command.strip() for command in re.findall(r"^```\w+\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)]
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
    """All operations of the graph API that `docs/operations.md` has; nothing in the table is "coming" without a GPU."""
    table = (ROOT / "README.md").read_text().split("## What works where")[1].split("\n## ")[0]
    here = {row.split("|")[1].strip(): row.split("|")[-2].strip() for row in table.splitlines() if row.startswith("| ")}
    operations = (ROOT / "docs" / "operations.md").read_text().split("<!-- end -->")[0]
    assert "Block scale" in re.findall(r"^## (.*)$", operations, re.MULTILINE)
    graphs = [what for name, what in here.items() if name.startswith(("graphs of", "attention, forward"))]
    assert graphs == ["reference"] * 2
    assert not {"coming", "not yet"} & set(here.values())


def test_readme_and_front_page_open_alike() -> None:
    """With a picture, and three doors, each with a section that begins with code that runs."""
    for path, picture in (
        (ROOT / "README.md", "figures/results/"),
        (ROOT / "docs" / "index.md", "figures/overview.svg"),
    ):
        text = path.read_text()
        doors = re.findall(r"^- \*\*\[(.+)\]\(#(.+)\)\*\*", text, re.MULTILINE)
        assert [name for name, _ in doors] == [
            "Train a MoE or a transformer",
            "Run cuDNN graphs",
            "Write and test kernels without a GPU",
        ]
        assert picture in text.split("\n## ")[0]
        for name, anchor in doors:
            assert anchor == name.lower().replace(" ", "-")
            assert "```python" in text.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150, "the README stays short"


def test_navigation_names_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    names = re.findall(r"^ *- (.+?): \S+$", navigation, re.MULTILINE)
    titles = [page.read_text().split("# ", 1)[1].split("\n")[0] for page in PAGES[1:]]
    assert len(names) > 30
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert sorted({title for title in titles if titles.count(title) > 1}) == []


def test_code_fits() -> None:
    """120 columns are what the site shows next to its navigation at 1,300 px; outputs wrap."""
    wide = [
        f"{page.name}:{block.line + number}: {len(line)}"
        for page in map(Page.read, PAGES)
        for block in page.blocks
        if not block.is_output
        for number, line in enumerate(block.text.splitlines(), start=1)
        if len(line) > 120
    ]
    assert wide == []


def test_relative_links_lead_somewhere() -> None:
    broken = [
        f"{_name(page)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []
