"""An explanation as SVG: a drawing in layers, after Sugiyama, Tagawa and Toda (1981).

Boxes get layers by their longest path, arrows that skip layers get a bend in each, crossings shrink as every box moves
to the mean position of its neighbors, and the order fixed so is spread out.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from itertools import pairwise
from statistics import fmean

from cudnn.pygraph.explain.drawing import COLOURS, LEGEND, Arrow, Box, Drawing, drawing
from cudnn.pygraph.explain.model import Explanation

_CHARACTER, _LINE, _PAD, _GAP, _BETWEEN = 6.7, 15.0, 8.0, 22.0, 46.0  # pixels, of a monospaced font of 11
_BEND = 8.0  # width that an arrow takes where it passes a layer
_SWEEPS = 8


def render(explained: Explanation) -> str:
    """One SVG element, with a caption and a legend; readable on light and dark pages."""
    picture = drawing(explained)
    layers, chains = _layers(picture)
    _untangle(layers, chains)
    sizes = {box.key: _size(box, picture.arrows) for box in picture.boxes}
    across = _spread(layers, chains, sizes)
    caption = [*picture.caption, ""]
    top = _PAD + _LINE * len(caption)
    heights = [max(sizes.get(key, (0.0, 0.0))[1] for key in layer) for layer in layers]
    middles: dict[str, float] = {}
    for layer, height in zip(layers, heights, strict=True):
        middles |= dict.fromkeys(layer, top + height / 2)
        top += height + _BETWEEN
    kinds = [kind for kind in LEGEND if any(box.kind == kind for box in picture.boxes)]
    right = [across[key] + sizes.get(key, (_BEND, 0.0))[0] / 2 for key in across]
    texts = [*caption, *(LEGEND[kind] for kind in kinds)]
    width = max([*right, *(_CHARACTER * len(text) + 3 * _PAD for text in texts)]) + _PAD
    height = top - _BETWEEN + 2 * _PAD + _LINE * 1.4 * len(kinds) + _PAD
    body = [_text(_PAD, _PAD + _LINE * (line + 0.8), text) for line, text in enumerate(caption) if text]
    docks = _docks(chains, across, sizes)
    for arrow, chain in chains.items():
        body += _arrow(arrow, [(across[key], middles[key]) for key in chain], docks[arrow], sizes)
    for box in picture.boxes:
        body += _box(box, across[box.key], middles[box.key], *sizes[box.key])
    for line, kind in enumerate(kinds):
        y = top - _BETWEEN + 2 * _PAD + 1.4 * _LINE * line
        body.append(_rectangle(kind, _PAD, y, 2 * _PAD, _LINE - 2))
        body.append(_text(4 * _PAD, y + _LINE - 5, LEGEND[kind]))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">',
            '<defs><marker id="cudnn-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
            *body,
            "</svg>",
        ]
    )


def _layers(picture: Drawing) -> tuple[list[list[str]], dict[Arrow, list[str]]]:
    """Keys by layer, and the way of each arrow through them: box, bends, box."""
    depth = {box.key: 0 for box in picture.boxes}
    while True:  # as often as the longest path has arrows: graphs are small
        deeper = {a.target: depth[a.source] + 1 for a in picture.arrows if depth[a.target] <= depth[a.source]}
        if not deeper or max(depth.values(), default=0) > len(
            depth
        ):  # a cycle, in a graph that will be refused, ends too
            break
        depth |= deeper
    targets = {arrow.target for arrow in picture.arrows}
    for box in picture.boxes:  # what nothing computes stands right above its first reader
        if box.key not in targets:
            depth[box.key] = min(depth[arrow.target] for arrow in picture.arrows if arrow.source == box.key) - 1
    layers: list[list[str]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for box in picture.boxes:
        layers[depth[box.key]].append(box.key)
    chains: dict[Arrow, list[str]] = {}
    for number, arrow in enumerate(picture.arrows):
        bends = [f"bend{number}.{layer}" for layer in range(depth[arrow.source] + 1, depth[arrow.target])]
        chains[arrow] = [arrow.source, *bends, arrow.target]
        for layer, bend in enumerate(bends, start=depth[arrow.source] + 1):
            layers[layer].append(bend)
    return layers, chains


def _neighbors(chains: dict[Arrow, list[str]]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    above: dict[str, list[str]] = {}
    below: dict[str, list[str]] = {}
    for chain in chains.values():
        for upper, lower in pairwise(chain):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def _untangle(layers: list[list[str]], chains: dict[Arrow, list[str]]) -> None:
    """Sorts every layer by the mean position of its neighbors, alternating downwards and upwards."""
    above, below = _neighbors(chains)
    positions = {key: position for layer in layers for position, key in enumerate(layer)}
    for sweep in range(_SWEEPS):
        toward, order = (above, layers) if sweep % 2 == 0 else (below, layers[::-1])
        for layer in order:
            means = {key: fmean(positions[other] for other in toward.get(key, [key])) for key in layer}
            layer.sort(key=means.__getitem__)
            positions |= {key: position for position, key in enumerate(layer)}


def _spread(
    layers: list[list[str]], chains: dict[Arrow, list[str]], sizes: dict[str, tuple[float, float]]
) -> dict[str, float]:
    """The middle of each box from the left: as near to its neighbors as the order in its layer lets it be."""
    above, below = _neighbors(chains)

    def width(key: str) -> float:
        return sizes.get(key, (_BEND, 0.0))[0]

    across: dict[str, float] = {}
    for layer in layers:
        _place(layer, [0.0] * len(layer), width, across)
    for sweep in range(2 * _SWEEPS):
        toward, order = (above, layers) if sweep % 2 == 0 else (below, layers[::-1])
        for layer in order:
            wishes = [fmean(across[other] for other in toward.get(key, [key])) for key in layer]
            _place(layer, wishes, width, across)
    left = min((across[key] - width(key) / 2 for key in across), default=0.0) - _PAD
    return {key: middle - left for key, middle in across.items()}


def _place(layer: list[str], wishes: list[float], width: Callable[[str], float], across: dict[str, float]) -> None:
    """Puts a layer's boxes where they wish to be, in order and without overlap: groups that collide share the shift."""
    groups: list[tuple[list[tuple[str, float]], float]] = []  # keys with their offsets in the group, its origin
    for key, wish in zip(layer, wishes, strict=True):
        members, origin = [(key, 0.0)], wish
        while groups:
            before, start = groups[-1]
            last, offset = before[-1]
            spacing = (width(last) + width(members[0][0])) / 2 + _GAP
            if origin - (start + offset) >= spacing:
                break
            groups.pop()
            shift = offset + spacing
            origin = (start * len(before) + (origin - shift) * len(members)) / (len(before) + len(members))
            members = [*before, *((other, at + shift) for other, at in members)]
        groups.append((members, origin))
    for members, origin in groups:
        across.update({key: origin + offset for key, offset in members})


def _size(box: Box, arrows: list[Arrow]) -> tuple[float, float]:
    """Width and height, with room for the names of an operation's ports."""
    ends = ([a.port for a in arrows if a.target == box.key], [a.port for a in arrows if a.source == box.key])
    ports = max(len(names) * max(map(len, names), default=0) for names in ends) if box.key.startswith("n") else 0
    return _CHARACTER * max(ports, *map(len, box.lines)) + 2 * _PAD, _LINE * len(box.lines) + _PAD


def _docks(
    chains: dict[Arrow, list[str]], across: dict[str, float], sizes: dict[str, tuple[float, float]]
) -> dict[Arrow, float]:
    """Where each arrow meets its operation: evenly spread, in the order of the other ends."""
    groups: dict[tuple[str, bool], list[Arrow]] = {}
    for arrow in chains:
        leaves = _leaves(arrow)
        groups.setdefault((arrow.source if leaves else arrow.target, leaves), []).append(arrow)
    docks: dict[Arrow, float] = {}
    for (key, leaves), group in groups.items():
        group.sort(key=lambda arrow: across[chains[arrow][1 if leaves else -2]])
        step = sizes[key][0] / len(group)
        docks |= {arrow: across[key] + step * (index - (len(group) - 1) / 2) for index, arrow in enumerate(group)}
    return docks


def _leaves(arrow: Arrow) -> bool:
    """Whether an arrow goes from an operation to a tensor."""
    return arrow.source.startswith("n")


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}" '
        f'fill="#111111">{escape(text, quote=False)}</text>'
    )


def _rectangle(kind: str, x: float, y: float, width: float, height: float) -> str:
    fill, stroke = COLOURS[kind]
    radius = 3 if kind in ("operation", "refused", "view") else 10
    dashes = ' stroke-dasharray="4 3"' if kind == "virtual" else ""
    thick = 2.5 if kind == "output" else 1.2
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="{thick}"{dashes}/>'
    )


def _box(box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    top = y - height / 2
    parts = [_rectangle(box.kind, x - width / 2, top, width, height)]
    for line, text in enumerate(box.lines):
        weight = "bold" if line == 0 and box.kind in ("operation", "refused", "view") else "normal"
        parts.append(_text(x, top + _PAD / 2 + _LINE * (line + 0.75), text, "middle", weight))
    return parts


def _arrow(
    arrow: Arrow, points: list[tuple[float, float]], dock: float, sizes: dict[str, tuple[float, float]]
) -> list[str]:
    """A smooth path through the bends, with the port's name where it meets the operation."""
    leaves = _leaves(arrow)
    (first, upper), (last, lower) = points[0], points[-1]
    points[0] = dock if leaves else first, upper + sizes[arrow.source][1] / 2
    points[-1] = last if leaves else dock, lower - sizes[arrow.target][1] / 2
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (y0 + y1) / 2
        path += f" C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
    y = points[0][1] + 0.8 * _LINE if leaves else points[-1][1] - 0.7 * _LINE
    return [
        f'<path d="{path}" fill="none" stroke="#555555" marker-end="url(#cudnn-arrow)"/>',
        _text(dock + 4, y, arrow.port, size=9),
    ]
