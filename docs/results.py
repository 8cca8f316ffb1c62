"""Tables and plots of the documentation from the result files in `benchmarks/results`.

A section of a page, `<!-- generated: results_NAME -->`, has a plot, tables, and a line with the versions, the date and
the command of the run. Long tables are folded. Plots are SVG files in `docs/figures/results`, with colors for light and
dark pages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import plots  # next to this file

from cudnn.bench.results import Result, read

_DOCS = Path(__file__).parent
RESULTS = _DOCS.parent / "benchmarks" / "results"
FIGURES = _DOCS / "figures" / "results"
_SIGN = {"": 4, "%": 2, "s": 1, "nats": 4, "TFLOP/s": 0, "TB/s": 2, "GB": 1, "MB": 0, "GB/s": 0, "x": 2, "tokens/s": 0}


def shown(value: float, unit: str) -> str:
    """A figure as pages show it."""
    if unit in ("us", "ms"):
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:,.{_SIGN[unit]}f}"


def _all(line: Result) -> bool:
    return True


def _plain(shape: str, case: str) -> str:
    return f"{shape.replace('x', ' x ')} {case}".strip()


@dataclass(frozen=True)
class Section:
    """A plot of one result file, and a table for each metric.

    The first of the ``metrics`` is plotted. ``keep`` selects lines. ``peers`` are the candidates in their order, with
    the names that the page shows; the first is the one that ratios are of. ``label`` names a problem, ``problem`` heads
    the column of these names, ``short`` is its name in the plot. What a title has after a colon describes those names.
    ``ratio``: whether the table has a column with it. ``no_ratio``: candidates that the ratio ignores, such as a GEMM
    without its activation or another precision. ``command`` reproduces the file.
    """

    file: str
    title: str
    problem: str
    peers: dict[str, str]
    metrics: tuple[str, ...] = ("rate",)
    keep: Callable[[Result], bool] = _all
    label: Callable[[str, str], str] = _plain
    short: Callable[[str, str], str] | None = None
    ratio: bool = True
    no_ratio: frozenset[str] = frozenset()
    command: str = ""

    def lines(self) -> list[Result]:
        """The lines of the section; none before the first run."""
        path = RESULTS / f"{self.file}.csv"
        if not path.is_file():
            return []
        lines = [line for line in read(path) if self.keep(line) and line.peer in self.peers]
        times = [line.value for line in lines if line.unit == "us"]
        return [_in_milliseconds(line) for line in lines] if times and max(times) >= _MILLISECONDS else lines

    @property
    def reproduce(self) -> str:
        """The command that writes the result file."""
        return self.command or f"cudnn bench {self.file} --save benchmarks/results"


_MILLISECONDS = 10_000  # microseconds from which on a section has milliseconds


def _in_milliseconds(line: Result) -> Result:
    if line.unit != "us":
        return line
    return replace(line, value=line.value / 1e3, unit="ms", spread=line.spread / 1e3)


def _problems(lines: Iterable[Result]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((line.shape, line.case) for line in lines))


def _index(lines: Iterable[Result]) -> dict[tuple[str, str, str, str], Result]:
    return {(line.shape, line.case, line.peer, line.metric): line for line in lines}


def table(section: Section) -> str:
    """A table for each metric: a row for each problem, columns for the candidates; the first one ends in the ratio."""
    lines = section.lines()
    has_ratio = section.ratio and any(_best_ratio(section, lines, problem) for problem in _problems(lines))
    tables = [_table(section, metric, has_ratio and metric == section.metrics[0]) for metric in section.metrics]
    return "\n\n".join(text for text in tables if text)


def _table(section: Section, metric: str, with_ratio: bool) -> str:
    """The table of one metric; empty if no line has it."""
    lines = [line for line in section.lines() if line.metric == metric]
    if not lines:
        return ""
    found = _index(lines)
    peers = [peer for peer in section.peers if any(line.peer == peer for line in lines)]
    heads = [section.peers[peer] for peer in peers] + ["ours / fastest other"] * with_ratio
    rows = [f"| {section.problem} ({lines[0].unit}) | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for problem in _problems(lines):
        results = [found.get((*problem, peer, metric)) for peer in peers]
        cells = [shown(line.value, line.unit) if line else "" for line in results]
        cells += [_best_ratio(section, section.lines(), problem)] * with_ratio
        rows.append(f"| {section.label(*problem)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _best_ratio(section: Section, lines: Sequence[Result], problem: tuple[str, str]) -> str:
    """How many times as fast ours is as the fastest other, with the spread where the run has it."""
    ratio = _ratio(section, lines, problem)
    if ratio is None:
        return ""
    value, spread = ratio
    return f"{value:.2f}" if spread is None else f"{value:.2f} ± {spread:.2f}"


def _ratio(section: Section, lines: Sequence[Result], problem: tuple[str, str]) -> tuple[float, float | None] | None:
    """The ratio to the fastest other, and its spread; None without another."""
    found = {(line.peer, line.metric): line for line in lines if (line.shape, line.case) == problem}
    metric = "rate" if any(metric == "rate" for _, metric in found) else "time"
    others = [
        line
        for (_, name), line in found.items()
        if name == metric and not line.ours and line.peer not in section.no_ratio
    ]
    our = found.get((next(iter(section.peers)), metric))
    if our is None or not others:
        return None
    other = (max if metric == "rate" else min)(others, key=lambda line: line.value)
    measured = found.get((our.peer, f"ratio to {other.peer}"))
    if measured is not None:
        return measured.value, measured.spread
    return (our.value / other.value if metric == "rate" else other.value / our.value), None


def summary(page: Path) -> str:
    """A row for each section of the page with a ratio: candidates, smallest and largest ratio to the fastest."""
    rows = ["| task | compared with | ours / fastest other |", "|---|---|---:|"]
    anchors = _anchors(page.read_text())
    for name, anchor in anchors.items():
        spec = SECTIONS.get(name)
        if spec is None:
            continue
        lines = spec.lines()
        ratios = [_ratio(spec, lines, problem) for problem in _problems(lines)] if spec.ratio else []
        values = sorted(ratio[0] for ratio in ratios if ratio is not None)
        if not values:
            continue
        present = {line.peer for line in lines if not line.ours} - spec.no_ratio
        others = ", ".join(title for peer, title in spec.peers.items() if peer in present)
        task = f"[{spec.title.split(':')[0]}](#{anchor})"
        rows.append(f"| {task} | {others} | {values[0]:.2f} to {values[-1]:.2f} |")
    return "\n".join(rows)


def _anchors(text: str) -> dict[str, str]:
    """The anchor of the heading above each section of results on a page."""
    heading, anchors = "", {}
    for line in text.splitlines():
        if found := re.match(r"#+ (.*)", line):
            heading = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", found[1]).strip().lower())
        elif found := re.match(r"<!-- generated: results_(\w+) -->", line):
            anchors[found[1]] = heading
    return anchors


def source(section: Section) -> str:
    """The line with hardware, versions, commit, date and command."""
    lines = section.lines()
    first = lines[0]
    names = {
        (section.peers[line.peer], line.peer_version)
        for line in lines
        if not line.ours and line.peer_version and not first.torch.startswith(line.peer_version)  # PyTorch is named
    }
    versions = "".join(f", {name} {version}" for name, version in sorted(names))
    commit = f", commit {first.commit}" if first.commit else ""
    return (
        f"{first.hardware}, driver {first.driver}, CUDA {first.cuda}, PyTorch {first.torch}{versions}. "
        f"{first.date}{commit}, `{section.reproduce}`."
    )


def figure(section: Section) -> str:
    """The plot as SVG: a group of bars for each problem."""
    lines = [line for line in section.lines() if line.metric == section.metrics[0]]
    bars = {((line.shape, line.case), line.peer): line for line in lines}
    peers = [peer for peer in section.peers if any(line.peer == peer for line in lines)]
    series = [
        plots.Series(section.peers[peer], any(line.ours for line in lines if line.peer == peer)) for peer in peers
    ]
    label = section.short or section.label
    groups = {
        label(*problem): [bars[problem, peer].value if (problem, peer) in bars else None for peer in peers]
        for problem in _problems(lines)
    }
    title = section.title if ": " in section.title else f"{section.title}: {section.problem}"
    return plots.bars(title, lines[0].unit, series, groups)


def _of(pattern: str) -> Callable[[Result], bool]:
    compiled = re.compile(pattern)
    return lambda line: bool(compiled.search(f"{line.shape} {line.case}"))


def _attention_label(shape: str, case: str) -> str:
    batch, length, heads, kv_heads, d, dv = shape.split("x")
    head_dims = d if d == dv else f"{d}/{dv}"
    return f"{head_dims}, {batch} x {int(length):,}, {heads}/{kv_heads} heads"


def _attention_short(shape: str, case: str) -> str:
    batch, length, heads, kv_heads, d, dv = shape.split("x")
    head_dims = d if d == dv else f"{d}/{dv}"
    return f"{head_dims} {batch}x{length} {heads}/{kv_heads}"


def _flash_label(shape: str, case: str) -> str:
    """A packed batch has five sizes: the tokens stand for batch and length."""
    *tokens, heads, kv_heads, d, dv = shape.split("x")
    sizes = f"{tokens[0]} x {int(tokens[1]):,}" if len(tokens) > 1 else f"{int(tokens[0]):,} packed"
    head_dims = d if d == dv else f"{d}/{dv}"
    which = "" if case.endswith("host") else r", (forward|backward)$"
    return f"{head_dims}, {sizes}, {heads}/{kv_heads} heads, {re.sub(which, '', case).removesuffix(', host')}"


def _flash_short(shape: str, case: str) -> str:
    *tokens, heads, kv_heads, d, dv = shape.split("x")
    head_dims = d if d == dv else f"{d}/{dv}"
    mask = re.sub(r",? ?(causal, )?(forward|backward)$", "", case).replace(" sequences", " packed")
    return f"{head_dims} {heads}/{kv_heads} {'x'.join(tokens) if len(tokens) > 1 else ''} {mask}"


def _moe_short(shape: str, case: str) -> str:
    tokens, hidden, inner, *_ = shape.split("x")
    which = {"both": "both passes"}.get(case, case)
    return f"{int(tokens):,} {hidden}/{inner} {which}"


def _tokens_label(shape: str, case: str) -> str:
    tokens = int(shape.split("x")[0])
    return f"{tokens:,} token{'s' * (tokens > 1)}"


def _moe_label(shape: str, case: str) -> str:
    tokens, hidden, inner, experts, top_k = shape.split("x")
    which = {"both": "forward + backward"}.get(case, case)
    sizes = f"{int(tokens):,} tokens, {hidden}/{inner}, {experts} experts, top {top_k}"
    return f"{sizes}, {which}" if which else sizes


def _grouped_label(shape: str, case: str) -> str:
    m, n, k, experts = shape.split("x")
    return f"{experts} experts, {int(m):,} x {n} x {k}"


def _gemm_label(shape: str, case: str) -> str:
    return f"{shape.replace('x', ' x ')} {case}".strip()


def _model_label(shape: str, case: str) -> str:
    return case


ATTENTION = {"cudnn.sdpa": "cudnn-fused", "cuDNN": "cuDNN"}
FLASH_ATTN = {
    "cudnn.ops": "cudnn-fused",
    "FlashAttention-4": "FlashAttention-4",
    "sdpa": "sdpa",
    "eager, sequences not separated": "eager, sequences not separated",
}
MOE = {"MoE": "cudnn-fused", "MoE, fp8": "cudnn-fused, fp8", "PyTorch": "torch.compile"}
SECTIONS = {
    "model": Section(
        "model",
        "Two layers of Qwen3-30B-A3B in transformers, bf16",
        "pass",
        {"cudnn": "cudnn-fused", "cudnn experts, sdpa": "cudnn-fused experts alone", "transformers": "transformers"},
        ("rate", "memory"),
        label=_model_label,
    ),
    "moe_sonicmoe": Section(
        "moe_sonicmoe",
        "MoE layer and SonicMoE, bf16",
        "tokens, hidden/intermediate size, pass",
        {"MoE": "cudnn-fused", "SonicMoE": "SonicMoE"},
        ("rate", "memory"),
        label=_moe_label,
        short=_moe_short,
        command="python benchmarks/moe_vs_sonicmoe.py FOLDER --save benchmarks/results",
    ),
    "moe": Section(
        "moe",
        "MoE layer, bf16 and fp8",
        "tokens, hidden/intermediate size, pass",
        {**MOE, "transformers": "transformers"},
        ("rate", "memory"),
        label=_moe_label,
        short=_moe_short,
    ),
    "moe_decode": Section(
        "moe_decode",
        "MoE layer of Qwen3-30B-A3B, inference with few tokens",
        "tokens",
        {**MOE, "PyTorch, eager": "PyTorch, eager"},
        ("time",),
        label=_tokens_label,
    ),
    "moe_fp8": Section(
        "moe_fp8",
        "MoE layer, a training step of four micro-batches",
        "tokens, hidden/intermediate",
        {
            "MoE, fp8": "fp8, both passes",
            "MoE, fp8, 16 bits saved": "fp8, 16 bits saved",
            "MoE, fp8 forward": "fp8, forward pass",
            "MoE, bf16": "bf16",
        },
        ("rate", "memory"),
        label=_moe_label,
        short=_moe_short,
        ratio=False,
    ),
    "gated_mlp": Section(
        "gated_mlp",
        "Gated MLP, bf16",
        "tokens x hidden x intermediate, model, pass",
        {"GatedMLP": "cudnn-fused", "PyTorch": "torch.compile", "PyTorch, one gate_up": "torch.compile, one gate_up"},
        ("rate", "memory"),
        label=_gemm_label,
    ),
    "moe_ranks": Section(
        "moe_ranks",
        "MoE layer with expert parallelism, TFLOP/s of one GPU",
        "model, routing, pass",
        {
            **{f"MoE, {count} GPUs": f"{count} GPUs" for count in (2, 4, 8)},
            **{f"MoE fp8, {count} GPUs": f"{count} GPUs, fp8" for count in (2, 4, 8)},
            "MoE, 1 GPU": "1 GPU",
            "MoE fp8, 1 GPU": "1 GPU, fp8",
            **{f"all_to_all_single, {count} GPUs": f"{count} GPUs, all_to_all_single" for count in (2, 4, 8)},
        },
        keep=_of("forward|backward"),
        label=lambda shape, case: f"{case}, {int(shape.split('x')[0]):,} tokens a rank",
        ratio=False,
        command="cudnn bench moe --ranks 2 --save benchmarks/results",
    ),
    "moe_ranks_steps": Section(
        "moe_ranks",
        "Dispatch and combine of the MoE layer: time, and bytes on the busiest link",
        "model, routing, step",
        {"MoE, exchange": "bf16", "MoE fp8, exchange": "fp8"},
        ("time", "bytes"),
        keep=_of("dispatch|combine"),
        label=lambda shape, case: f"{case}, {int(shape.split('x')[0]):,} tokens a rank",
        ratio=False,
        command="cudnn bench moe --ranks 2 --save benchmarks/results",
    ),
    **{
        f"moe_in_{page}{suffix}": Section(
            file,
            f"{what}, Qwen3-30B-A3B, in {stack}, forward and backward, bf16",
            "tokens",
            {"cudnn-fused": "cudnn-fused", **{peer: peer for peer in peers}},
            metrics,
            keep=_of(f" {stack}{', host' * (suffix == '_host')}$"),
            label=_tokens_label,
            command=f"python benchmarks/{file}.py --wheels WHEELS --save benchmarks/results",
        )
        for page, stack, peers in (
            ("torchtitan", "torchtitan", ("GroupedExperts",)),
            ("megatron", "megatron-core", ("GroupedMLP", "SequentialMLP")),
        )
        for suffix, file, what, metrics in (
            ("", "moe_in_stacks", "Experts", ("rate", "memory")),
            ("_host", "moe_in_stacks", "Host time: experts", ("time",)),
            ("_ep", "moe_in_stacks_ep", "Layers over two GPUs", ("rate",)),
        )
    },
    **{
        f"sdpa_{which}": Section(
            "sdpa",
            f"Attention, {which}, causal, bf16: head size, batch x sequence, heads",
            "head size, batch x sequence, heads q/kv",
            ATTENTION,
            keep=_of(f"causal, {which}$"),
            label=_attention_label,
            short=_attention_short,
        )
        for which in ("forward", "backward")
    },
    **{
        f"flash_attn_{which}": Section(
            "flash_attn",
            f"FlashAttention's functions, {which}, bf16: head size, heads, tokens or packed sequences, mask",
            "head size, tokens, heads q/kv, mask",
            FLASH_ATTN,
            keep=_of(f"{which}$"),
            label=_flash_label,
            short=_flash_short,
        )
        for which in ("forward", "backward")
    },
    "flash_attn_training": Section(
        "flash_attn",
        "Training step of a packed batch in transformers, bf16",
        "model",
        FLASH_ATTN,
        keep=_of("training$"),
        label=lambda shape, case: case.removesuffix(", training"),
    ),
    "flash_attn_host": Section(
        "flash_attn",
        "Host time of FlashAttention's functions",
        "head size, tokens, heads q/kv, mask, pass",
        FLASH_ATTN,
        ("time",),
        keep=_of("host$"),
        label=_flash_label,
    ),
    "nsa": Section(
        "nsa",
        "Native sparse attention, 64/4 heads of 128",
        "tokens, pass",
        {"NSA": "cudnn-fused", "fla-core": "fla-core", "FlashAttention-4, dense": "FlashAttention-4, dense"},
        ("time",),
        keep=_of("whole"),
        label=lambda shape, case: f"{_tokens_label(shape, case)}, {'backward' if 'backward' in case else 'forward'}",
    ),
    "gemm_swiglu": Section(
        "gemm_swiglu",
        "GEMM + SwiGLU, bf16",
        "M x N x K",
        {
            "GemmSwiglu": "cudnn-fused",
            "our GEMM alone": "cudnn-fused, GEMM",
            "cuBLAS + SwiGLU": "cuBLAS + torch.compile",
            "Triton, fused": "Triton",
            "cuBLAS": "cuBLAS, GEMM",
            "QuACK": "QuACK, GEMM",
        },
        keep=lambda line: bool(line.shape),
        label=_gemm_label,
        no_ratio=frozenset({"cuBLAS", "QuACK"}),
    ),
    "gemm_swiglu_fp8_128": Section(
        "gemm_swiglu_fp8_128",
        "GEMM, e4m3 with a float32 scale for each 128 elements",
        "M x N x K",
        {
            "our GEMM alone": "cudnn-fused, GEMM alone",
            "GemmSwiglu": "cudnn-fused, GEMM + SwiGLU",
            "torch._scaled_mm, blocks": "torch._scaled_mm",
            "DeepGEMM": "DeepGEMM",
        },
        keep=lambda line: bool(line.shape),
        label=_gemm_label,
        command="cudnn bench gemm_swiglu --dtype fp8_128 --save benchmarks/results",
    ),
    "grouped_gemm": Section(
        "grouped_gemm",
        "Grouped GEMM, bf16",
        "experts, tokens x N x K",
        {"GroupedGemm": "cudnn-fused", "torch._grouped_mm": "torch._grouped_mm", "QuACK": "QuACK", "Triton": "Triton"},
        keep=lambda line: bool(line.shape),
        label=_grouped_label,
    ),
    "grouped_gemm_fp8": Section(
        "grouped_gemm_fp8",
        "Grouped GEMM, e4m3 with a float32 scale for each 128 elements",
        "experts, tokens x N x K",
        {
            "GroupedGemmQuant, fp8 per 128": "cudnn-fused, fp8",
            "GroupedGemm, bf16": "cudnn-fused, bf16",
            "DeepGEMM": "DeepGEMM, fp8",
            "torch._scaled_grouped_mm, fp8 per row": "torch._scaled_grouped_mm, a scale per row",
            "torch._grouped_mm, bf16": "torch._grouped_mm, bf16",
        },
        keep=lambda line: not line.case,
        label=_grouped_label,
        no_ratio=frozenset({"torch._grouped_mm, bf16"}),
    ),
    "grouped_gemm_fp8_gradient": Section(
        "grouped_gemm_fp8",
        "Grouped GEMM, e4m3, gradients of weights",
        "experts, tokens x N x K",
        {
            "GroupedGemmWgrad, fp8 per 128, added to float32": "cudnn-fused, fp8, sums",
            "GroupedGemmWgrad, fp8 per 128": "cudnn-fused, fp8",
            "GroupedGemmWgrad, bf16": "cudnn-fused, bf16",
            "DeepGEMM": "DeepGEMM, fp8, sums",
            "torch._grouped_mm, bf16": "torch._grouped_mm, bf16",
        },
        keep=lambda line: line.case == "gradient of weights",
        label=_grouped_label,
        no_ratio=frozenset({"torch._grouped_mm, bf16"}),
    ),
    "rmsnorm_rht_amax": Section(
        "rmsnorm_rht_amax",
        "RMSNorm + Hadamard transform + amax, bf16",
        "rows x columns",
        {"RmsNormRhtAmax": "cudnn-fused", "torch.compile": "torch.compile", "copy": "copy of the same bytes"},
        keep=lambda line: bool(line.shape),
        label=_gemm_label,
        no_ratio=frozenset({"copy"}),
    ),
}
HOST, TRAINING = "host", "fp8_training"
TRAINING_TITLE = "Loss of a small MoE language model, three seeds each"
RECIPES = {"fp8": "fp8, both passes", "bf16": "bf16"}


def section(name: str) -> Callable[[Path], str]:
    """The generator of a section: Markdown for a page."""

    def generate(page: Path) -> str:
        spec = SECTIONS[name]
        if not spec.lines():
            return f"Not measured yet: `{spec.reproduce}`."
        return "\n\n".join([_image(name, spec.title, page), *_folded(table(spec)), source(spec)])

    return generate


_UNFOLDED = 5  # rows of tables that a page shows at once


def _folded(text: str) -> list[str]:
    """Paragraphs with the tables, long ones behind a heading that unfolds them."""
    if text.count("\n| ") <= _UNFOLDED:
        return [text]
    return ["<details markdown>\n<summary>The numbers</summary>", text, "</details>"]


def plot(name: str) -> Callable[[Path], str]:
    """The generator of a plot alone."""

    def generate(page: Path) -> str:
        return f"{_image(name, SECTIONS[name].title, page)}\n\n{source(SECTIONS[name])}"

    return generate


def _image(name: str, title: str, page: Path) -> str:
    return f"![{title}]({Path(os.path.relpath(FIGURES / f'{name}.svg', page.parent)).as_posix()})"


def host(page: Path) -> str:
    """The table of host times: the call, its time, and that of `torch.add` in the same rounds, if timed there."""
    path, command = RESULTS / f"{HOST}.csv", "cudnn bench host --save benchmarks/results"
    if not path.is_file():
        return f"Not measured yet: `{command}`."
    lines = [line for line in read(path) if line.metric == "time"]
    base = {line.case: line.value for line in lines if line.peer == "torch.add(out=)"}
    rows = ["| task | call | time | `torch.add(out=)` |", "|---|---|---:|---:|"]
    for line in lines:
        if line.peer != "torch.add(out=)":
            yardstick = f"{base[line.case]:.1f} us" if line.case in base else ""
            rows.append(f"| {line.case} | `{line.peer}` | {_host_time(line.value)} | {yardstick} |")
    first = lines[0]
    commit = f", commit {first.commit}" if first.commit else ""
    run = f"{first.hardware}, driver {first.driver}, PyTorch {first.torch}. {first.date}{commit}"
    return "\n\n".join([*_folded("\n".join(rows)), f"{run}, `{command}`."])


def _with_spread(line: Result) -> str:
    """The value with its unit, and its spread if pages would show more than 0."""
    value, spread = (shown(each, line.unit) for each in (line.value, line.spread))
    return f"{value} ± {spread} {line.unit}" if float(spread.replace(",", "")) else f"{value} {line.unit}".strip()


def by_peer(name: str, command: str, page: Path) -> str:
    """A table of a small result file: a row for each case, a column for each peer."""
    path = RESULTS / f"{name}.csv"
    if not path.is_file():
        return f"Not measured yet: `{command}`."
    lines = read(path)
    peers = list(dict.fromkeys(line.peer for line in lines))
    cells = {(line.case, line.peer): _with_spread(line) for line in lines}
    rows = [f"| what | {' | '.join(peers)} |", f"|---|{'---:|' * len(peers)}"]
    rows += [
        f"| {case} | {' | '.join(cells.get((case, peer), '') for peer in peers)} |"
        for case in dict.fromkeys(line.case for line in lines)
    ]
    first = lines[0]
    commit = f", commit {first.commit}" if first.commit else ""
    run = f"{first.hardware}, driver {first.driver}, PyTorch {first.torch}. {first.date}{commit}"
    return "\n".join([*rows, "", f"{run}, `{command}`."])


def _losses() -> list[Result]:
    path = RESULTS / f"{TRAINING}.csv"
    return read(path) if path.is_file() else []


def training(page: Path) -> str:
    """The loss curves of training in fp8 and bf16, and a table of the losses on held-out text."""
    lines, command = _losses(), "python benchmarks/fp8_training.py --save benchmarks/results"
    if not lines:
        return f"Not measured yet: `{command}`."
    held_out = {(line.case.split(",")[0], line.peer): line.value for line in lines if line.case.endswith("held out")}
    rows = [f"| held-out text, nats per byte | {' | '.join(RECIPES.values())} |", f"|---|{'---:|' * len(RECIPES)}"]
    seeds = dict.fromkeys(seed for seed, _ in held_out)
    rows += [f"| {seed} | {' | '.join(f'{held_out[seed, name]:.4f}' for name in RECIPES)} |" for seed in seeds]
    first = lines[0]
    commit = f", commit {first.commit}" if first.commit else ""
    run = f"{first.hardware}, driver {first.driver}, CUDA {first.cuda}, PyTorch {first.torch}. {first.date}{commit}"
    return "\n".join([_image(TRAINING, TRAINING_TITLE, page), "", *rows, "", f"{run}, `{command}`."])


def training_figure(lines: Sequence[Result]) -> str:
    """The plot as SVG: a curve for each run."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = {name: {} for name in RECIPES}
    for line in lines:
        seed, step = line.case.split(", ")
        if step.startswith("step "):
            points[line.peer].setdefault(seed, []).append((float(step.removeprefix("step ")), line.value))
    series = [plots.Series(title, name == "fp8") for name, title in RECIPES.items()]
    return plots.curves(
        TRAINING_TITLE, "nats per byte", "steps", series, [list(runs.values()) for runs in points.values()]
    )


def _host_time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1e4 else f"{microseconds * 1e-6:.2f} s"


GENERATORS: dict[str, Callable[[Path], str]] = {
    **{f"results_{name}": section(name) for name in SECTIONS},
    **{f"plot_{name}": plot(name) for name in SECTIONS},
    "results_host": host,
    f"results_{TRAINING}": training,
    "results_summary": summary,
    "results_training_at_scale": partial(
        by_peer, "training_at_scale", "python benchmarks/training_at_scale.py --save benchmarks/results"
    ),
    "results_fsdp_fp8": partial(by_peer, "fsdp_fp8", "python benchmarks/fsdp_fp8.py --save benchmarks/results"),
}


def figures() -> dict[Path, str]:
    """The SVG files that pages show, with their contents."""
    drawn = {FIGURES / f"{name}.svg": figure(spec) for name, spec in SECTIONS.items() if spec.lines()}
    losses = _losses()
    return {**drawn, FIGURES / f"{TRAINING}.svg": training_figure(losses)} if losses else drawn


def write_figures() -> None:
    """Writes the SVG files and removes those without a result file."""
    wanted = figures()
    FIGURES.mkdir(parents=True, exist_ok=True)
    for path in FIGURES.glob("*.svg"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        path.write_text(text)


def published() -> set[str]:
    """Every figure of the result files as pages show it, with its unit."""
    return {
        f"{shown(line.value, line.unit)} {line.unit}" for path in sorted(RESULTS.glob("*.csv")) for line in read(path)
    }
