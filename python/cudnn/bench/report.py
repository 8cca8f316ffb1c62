"""A run of a benchmark as a CSV file and as a plot with the roofline."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cudnn.bench import Ratio, Reading, Row

DATASHEET = {
    "H200": {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
    "H100 80GB HBM3": {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
}
"""Dense TFLOP/s at the boost clock by substring of the device name, then by type: from NVIDIA's datasheets."""
_PROBLEMS_PER_ROW = 12  # problems in one row of panels
_TEXTS = ("title", "dtype", "device", "software")
_OURS, _THEIRS = ("#4c8c00", "#76b900", "#b5dd6b"), ("#37474f", "#78909c", "#b0bec5", "#a1887f", "#d7ccc8")


@dataclass
class Report:
    """A benchmark's device, software and measurements."""

    title: str
    dtype: str
    device: str
    software: str
    yardsticks: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)


def write_csv(report: Report, path: Path) -> None:
    """One line for each row; ratios as median, low and high for each yardstick."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        ratios = [f"ratio {bound}: {name}" for name in report.yardsticks for bound in Ratio._fields]
        numeric_columns = ["microseconds", "flops", "bytes", "TFLOP/s", "TB/s"]
        writer.writerow(
            [*_TEXTS, "problem", "name", "ours", *numeric_columns, *ratios, *Reading._fields, "refused", "memory"]
        )
        for row in report.rows:
            values = [row.microseconds, row.flops, row.bytes, row.teraflops, row.terabytes]
            ratio_columns = [bound for r in row.ratios for bound in (r or ("",) * len(Ratio._fields))]
            ratio_columns += [""] * (len(ratios) - len(ratio_columns))
            texts = [getattr(report, name) for name in _TEXTS]
            reading = row.reading or ("",) * len(Reading._fields)
            writer.writerow(
                [
                    *texts,
                    row.problem,
                    row.name,
                    int(row.ours),
                    *values,
                    *ratio_columns,
                    *reading,
                    row.refused,
                    row.memory,
                ]
            )


def read_csv(path: Path) -> Report:
    """Reads a file of ``write_csv``.

    Raises:
        ValueError: the file has no rows, or other columns.
    """
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    if not lines or not {*_TEXTS, "problem", "microseconds"} <= set(lines[0]):
        raise ValueError(f"{path}: no CSV file of `cudnn bench`")
    mark = "ratio median: "
    first = lines[0]
    yardsticks = tuple(name.removeprefix(mark) for name in first if name.startswith(mark))
    report = Report(first["title"], first["dtype"], first["device"], first["software"], yardsticks)

    def parse_numbers(line: dict[str, str], names: Sequence[str]) -> list[float] | None:
        return [float(line[name]) for name in names] if line[names[0]] else None

    for line in lines:
        ratios = (parse_numbers(line, [f"ratio {bound}: {name}" for bound in Ratio._fields]) for name in yardsticks)
        reading = parse_numbers(line, Reading._fields)
        report.rows.append(
            Row(
                line["problem"],
                line["name"],
                float(line["microseconds"]),
                tuple(Ratio(*values) if values else None for values in ratios),
                float(line["flops"]),
                float(line["bytes"]),
                line["ours"] == "1",
                Reading(*reading) if reading else None,
                line["refused"],
                float(line.get("memory") or "nan"),
            )
        )
    return report


def roof(rows: Sequence[Row], flops: float, size: float) -> float | None:
    """The roofline: upper bound in TFLOP/s for a problem with ``flops`` operations that moves ``size`` bytes.

    The peak is the highest rate of the run, the bandwidth that of its device copy. None if the run lacks either.
    """
    peak = max((row.teraflops for row in rows if row.flops and not row.refused), default=None)
    bandwidth = max((row.terabytes for row in rows if row.bytes and not row.flops and not row.refused), default=None)
    if peak is None or bandwidth is None:
        return None
    return min(peak, flops / size * bandwidth)


def datasheet(device: str, dtype: str) -> float | None:
    """The datasheet's dense TFLOP/s; None for a device or type that the table lacks."""
    return next((rates.get(dtype) for name, rates in DATASHEET.items() if name in device), None)


def plot(report: Report, path: Path) -> None:
    """Plots rates by problem: TFLOP/s with the roofline, or TB/s for a memory-bound API."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    computing = any(row.flops for row in report.rows)
    rows = [row for row in report.rows if (row.flops if computing else row.bytes) and not row.refused]
    problems = list(dict.fromkeys(row.problem for row in rows))
    names = list(dict.fromkeys((row.name, row.ours) for row in rows))
    memory = any(row.memory == row.memory for row in rows)
    plot_rows = [problems[first : first + _PROBLEMS_PER_ROW] for first in range(0, len(problems), _PROBLEMS_PER_ROW)]
    size = max(8.0, 1.6 * min(len(problems), _PROBLEMS_PER_ROW) + 2), (9.5 if memory else 5.5) * len(plot_rows)
    panels_per_row = 1 + memory
    figure, panels = pyplot.subplots(panels_per_row * len(plot_rows), squeeze=False, figsize=size, layout="constrained")
    for row_index, problems_of_row in enumerate(plot_rows):
        axes = panels[panels_per_row * row_index + memory, 0]
        rate: Callable[[Row], float] = (lambda row: row.teraflops) if computing else (lambda row: row.terabytes)
        _draw_bars(axes, rows, problems_of_row, names, rate)
        if memory:
            above = panels[panels_per_row * row_index, 0]
            _draw_bars(above, rows, problems_of_row, names, lambda row: row.memory * 1e-9)
            above.set_xticks([])
            above.set_ylabel("peak GB without weights and tokens")
            above.spines[["top", "right"]].set_visible(False)
        if computing:
            _draw_roofs(axes, report, rows, problems_of_row)
        axes.set_xticks(
            range(len(problems_of_row)), [problem.replace(" ", "\n", 1) for problem in problems_of_row], fontsize=8
        )
        axes.set_ylabel("TFLOP/s" if computing else "TB/s")
        axes.set_axisbelow(True)
        axes.yaxis.grid(color="#e0e0e0")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_title(f"{report.title}, {report.dtype}: {report.device}", loc="left")
    axes = panels[-1, 0]
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_bars(
    axes: Any,
    rows: Sequence[Row],
    problems: Sequence[str],
    names: Sequence[tuple[str, bool]],
    value: Callable[[Row], float],
) -> None:
    colors = {True: iter(_OURS * len(names)), False: iter(_THEIRS * len(names))}
    width = 0.85 / len(names)
    for position, (name, ours) in enumerate(names):
        rows_of_candidate = [row for row in rows if row.name == name and row.problem in problems]
        left = [problems.index(row.problem) - 0.425 + width * position for row in rows_of_candidate]
        axes.bar(
            left, [value(row) for row in rows_of_candidate], width, align="edge", label=name, color=next(colors[ours])
        )


def _draw_roofs(axes: Any, report: Report, rows: Sequence[Row], problems: Sequence[str]) -> None:
    label = "roofline of this run: best rate, copy's bandwidth"
    for position, problem in enumerate(problems):
        row = next(row for row in rows if row.problem == problem)
        height = roof(report.rows, row.flops, row.bytes)
        if height is not None:
            axes.hlines(height, position - 0.45, position + 0.45, color="#c62828", linewidth=1.5, label=label)
            label = None
    peak = datasheet(report.device, report.dtype)
    if peak is not None:
        axes.axhline(peak, color="#c62828", linewidth=1, linestyle="--", label=f"datasheet, dense: {peak:.0f} TFLOP/s")
