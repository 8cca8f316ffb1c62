"""The table of experiments, from `docs/dev/experiments.csv`."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path

FILE = Path(__file__).parent / "dev" / "experiments.csv"
COLUMNS = ("area", "change", "hypothesis", "before", "after", "kept", "date")


def rows() -> list[dict[str, str]]:
    """The experiments, sorted by area.

    Raises:
        ValueError: the file has other columns.
    """
    with FILE.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{FILE}: got columns {reader.fieldnames}; allowed: {', '.join(COLUMNS)}.")
        return sorted(reader, key=lambda row: row["area"])  # stable: those of an area keep their order


def table() -> str:
    """A table for each area."""
    parts: list[str] = []
    for area, group in groupby(rows(), lambda row: row["area"]):
        parts += [f"## {area}", "", f"| {' | '.join(COLUMNS[1:])} |", "|---|---|---|---|---|---|"]
        parts += [f"| {' | '.join(row[name].replace('|', chr(92) + '|') for name in COLUMNS[1:])} |" for row in group]
        parts.append("")
    return "\n".join(parts).rstrip()
