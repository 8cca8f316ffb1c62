"""Bar plots as SVG files for the documentation. One file has the colors of light pages and of dark ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

_OURS, _THEIRS = ("#2a9d8f", "#76c7bb", "#1d6f66"), ("#e9a23b", "#8d99ae", "#5b86c9", "#c98ba8")
_WIDTH, _LEFT, _TOP, _HEIGHT = 860, 62, 58, 210
_LETTER, _WIDEST = 6.4, 7.6  # mean width of a letter, and of one in labels of digits and capitals
_STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:#24292f;font-size:12px}'
    ".title{font-size:15px;font-weight:600}.value{font-size:11px}.tick{fill:#57606a}.grid{stroke:#d0d7de}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.tick{fill:#9da7b3}.grid{stroke:#3d444d}}"
)


class Series(NamedTuple):
    """A candidate: its name in the legend, and whether it is of this library."""

    name: str
    ours: bool


Curve = Sequence[tuple[float, float]]
"""Points (step, value)."""


def bars(title: str, unit: str, series: Sequence[Series], groups: Mapping[str, Sequence[float | None]]) -> str:
    """A group of bars for each problem, with a bar for each series; ``None``: not measured.

    What the title has after a colon stands below the names of the problems.
    """
    title, _, caption = title.partition(": ")
    step = (_WIDTH - _LEFT - 10) / len(groups)
    width = min(46.0, step * 0.84 / len(series))
    limit, ticks = axis(max(value for values in groups.values() for value in values if value is not None))
    colors = _colors(series)
    legend, below = _legend(series, colors)
    body = _grid(ticks, limit, unit)
    rows = 1
    for index, (label, values) in enumerate(groups.items()):
        middle = _LEFT + step * (index + 0.5)
        for position, (value, color) in enumerate(zip(values, colors, strict=True)):
            if value is not None:
                x = middle + width * (position - len(series) / 2)
                text = _short(value)
                body += _bar(x, width, value / limit, color, text if width >= _LETTER * len(text) else "")
        lines = wrapped(label, int(step / _WIDEST))
        rows = max(rows, len(lines))
        body += [_text(middle, _TOP + _HEIGHT + 18 + 14 * row, text, "", "middle") for row, text in enumerate(lines)]
    body.append(_text((_LEFT + _WIDTH) / 2, _TOP + _HEIGHT + 24 + 14 * rows, caption, "tick", "middle"))
    return _figure(title, legend, below, body, _TOP + _HEIGHT + 32 + 14 * rows)


def curves(title: str, unit: str, steps: str, series: Sequence[Series], curves: Sequence[Sequence[Curve]]) -> str:
    """Curves over training steps: several for each series, in its color. ``steps`` names the horizontal axis."""
    points = [point for several in curves for curve in several for point in curve]
    last, high = max(x for x, _ in points), max(y for _, y in points)
    limit, ticks = axis(high)
    colors = _colors(series)
    legend, below = _legend(series, colors)
    body = _grid(ticks, limit, unit)
    for several, color in zip(curves, colors, strict=True):
        for curve in several:
            path = " L".join(
                f"{_LEFT + (_WIDTH - _LEFT - 12) * x / last:.1f} {_TOP + _HEIGHT * (1 - y / limit):.1f}"
                for x, y in curve
            )
            body.append(f'<path fill="none" stroke="{color}" stroke-width="1.4" d="M{path}"/>')
    body += [
        _text(_LEFT, _TOP + _HEIGHT + 18, "0", "tick"),
        _text(_WIDTH - 12, _TOP + _HEIGHT + 18, f"{last:g}", "tick", "end"),
    ]
    body.append(_text((_LEFT + _WIDTH) / 2, _TOP + _HEIGHT + 18, steps, "tick", "middle"))
    return _figure(title, legend, below, body, _TOP + _HEIGHT + 32)


def axis(highest: float) -> tuple[float, list[float]]:
    """The end of an axis from 0 past ``highest``, and its ticks."""
    power = 10.0 ** floor(log10(highest / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= highest / 4)
    count = int(-(-highest // step))
    return step * count * 1.04, [step * i for i in range(count + 1)]


def wrapped(text: str, columns: int) -> list[str]:
    """The text in lines of at most ``columns`` letters, unless a word is longer."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= columns:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _colors(series: Sequence[Series]) -> list[str]:
    palettes = {True: iter(_OURS * len(series)), False: iter(_THEIRS * len(series))}
    return [next(palettes[ours]) for _, ours in series]


def _figure(title: str, legend: Sequence[str], below: int, body: Sequence[str], height: int) -> str:
    """The SVG file: title, legend, and the plot, moved down by what the legend takes more than a line."""
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + below}" role="img">'
    head = [opening, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", _text(_LEFT, 18, title, "title")]
    if below:
        body = [f'<g transform="translate(0 {below})">', *body, "</g>"]
    return "\n".join([*head, *legend, *body, "</svg>", ""])


def _legend(series: Sequence[Series], colors: Sequence[str]) -> tuple[list[str], int]:
    """The names of the series, and the height of all lines but the first."""
    body, x, line = [], float(_LEFT), 0
    for (name, _), color in zip(series, colors, strict=True):
        if x > _LEFT and x + 17 + _WIDEST * len(name) > _WIDTH:
            x, line = float(_LEFT), line + 1
        y = 29 + 18 * line
        body.append(f'<rect fill="{color}" x="{x:.0f}" y="{y}" width="12" height="12"/>')
        body.append(_text(x + 17, y + 11, name, ""))
        x += 34 + _LETTER * len(name)
    return body, 18 * line


def _grid(ticks: Sequence[float], limit: float, unit: str) -> list[str]:
    body = []
    for tick in ticks:
        y = _TOP + _HEIGHT * (1 - tick / limit)
        body.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - 8}"/>')
        body.append(_text(_LEFT - 8, y + 4, _tick(tick), "tick", "end"))
    turned = f'transform="translate(13 {_TOP + _HEIGHT / 2}) rotate(-90)"'
    return [*body, f'<text class="tick" text-anchor="middle" {turned}>{escape(unit)}</text>']


def _bar(x: float, width: float, share: float, color: str, value: str) -> list[str]:
    size = _HEIGHT * share
    y = _TOP + _HEIGHT - size
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{size:.1f}"'
    above = [_text(x + width / 2 - 1, y - 4, value, "value", "middle")] if value else []
    return [f'<rect fill="{color}" {shape}/>', *above]


def _tick(value: float) -> str:
    if value >= 1e6:
        return f"{value * 1e-6:g}M"
    return f"{value * 1e-3:g}k" if value >= 1e4 else f"{value:g}"


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value * 1e-6:.2f}M"
    if value >= 1e4:
        return f"{value * 1e-3:.0f}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
