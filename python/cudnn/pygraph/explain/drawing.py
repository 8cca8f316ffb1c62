"""What the drawing shows: boxes for nodes and tensors, arrows between them, and a caption."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from cudnn.pygraph.explain.model import ExplainedNode, Explanation
from cudnn.pygraph.explain.text import refusal, shape

LEGEND = {
    "operation": "operation",
    "refused": "refused operation",
    "view": "view: an offset into memory, without a kernel",
    "input": "input",
    "output": "output",
    "virtual": "virtual tensor, never in memory",
    "scalar": "scalar, passed by value",
}
"""Kinds of boxes."""

COLOURS = {
    "operation": ("#d7ecd9", "#2e7d32"),
    "refused": ("#f8d7d7", "#b71c1c"),
    "view": ("#eeeeee", "#757575"),
    "input": ("#dbe9f9", "#1565c0"),
    "output": ("#dbe9f9", "#1565c0"),
    "virtual": ("#ffffff", "#757575"),
    "scalar": ("#fff4d6", "#b08900"),
}
"""What boxes are filled with, and their edges, by kind."""

_WIDE = 44  # characters of a line in a box
_CAPTION = 110


class Box(NamedTuple):
    """A node or a tensor: its lines of text, the first one its name."""

    key: str
    kind: str
    lines: list[str]


class Arrow(NamedTuple):
    """From box to box, with the port's name."""

    source: str
    target: str
    port: str


class Drawing(NamedTuple):
    """Boxes in order of creation, so that arrows lead from earlier to later ones, save for an input's own boxes."""

    caption: list[str]
    boxes: list[Box]
    arrows: list[Arrow]


def drawing(explained: Explanation) -> Drawing:
    """The boxes and arrows of an explanation."""
    boxes = [
        Box(f"t{i}", t.role, [*_wrapped(t.name), shape(t) if t.value is None else f"{t.value:g}"])
        for i, t in enumerate(explained.tensors)
    ]
    arrows: list[Arrow] = []
    for number, node in enumerate(explained.nodes):
        boxes.append(Box(f"n{number}", _kind(node), [*_wrapped(node.label), *_wrapped(_operations(node))]))
        arrows += [Arrow(f"t{index}", f"n{number}", port) for port, index in node.inputs.items()]
        arrows += [Arrow(f"n{number}", f"t{index}", port) for port, index in node.outputs.items()]
    joined = {key for arrow in arrows for key in (arrow.source, arrow.target)}
    return Drawing(_caption(explained), [box for box in boxes if box.key in joined], arrows)


def _kind(node: ExplainedNode) -> str:
    if node.refused:
        return "refused"
    return "view" if node.operations == () else "operation"


def _operations(node: ExplainedNode) -> str:
    kinds = dict.fromkeys(operation.kind for operation in node.operations or ())
    return ", ".join(kinds) if len(node.operations or ()) > 1 else ""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDE, max_lines=4, placeholder=" ...")


def _caption(explained: Explanation) -> list[str]:
    lines = [f"graph {explained.name!r} on {explained.executor}: {explained.state}"]
    plan = explained.plan
    if plan is not None:
        lines.append(f"plan {plan.tag}, workspace {plan.workspace} bytes")
        lines += list(dict.fromkeys(f"kernel {name}" for name in plan.kernels))
    for reason in explained.reasons:
        for line in refusal(reason):
            lines += textwrap.wrap(line, _CAPTION, subsequent_indent="  ")
    return lines
