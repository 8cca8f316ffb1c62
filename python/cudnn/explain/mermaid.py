"""An explanation as a Mermaid flowchart."""

from __future__ import annotations

from cudnn.explain.drawing import COLOURS, Box, drawing
from cudnn.explain.model import Explanation

_SHAPES = {"input": ("([", "])"), "output": ("([", "])"), "scalar": ("{{", "}}"), "virtual": ("(", ")")}
_BORDERS = {"output": "stroke-width:3px,", "virtual": "stroke-dasharray:4 3,"}
_STYLES = {
    kind: f"fill:{fill},stroke:{edge},{_BORDERS.get(kind, '')}color:#111" for kind, (fill, edge) in COLOURS.items()
}


def render(explained: Explanation) -> str:
    """A flowchart; what a plan fuses stands in a subgraph with the plan's name."""
    caption, boxes, arrows = drawing(explained)
    plan = explained.plan if explained.plan is not None and explained.plan.tag != "reference" else None
    inside = [
        box
        for box in boxes
        if plan is not None and box.kind in ("operation", "virtual") and box.lines[0] not in plan.before
    ]
    lines = [f"%% {line}" for line in caption]
    lines.append("flowchart TD")
    lines += [f"  {_box(box)}" for box in boxes if box not in inside]
    if plan is not None:
        lines += [f'  subgraph plan["{_escaped(plan.tag)}"]', *(f"    {_box(box)}" for box in inside), "  end"]
    lines += [f'  {source} -->|"{_escaped(port)}"| {target}' for source, target, port in arrows]
    lines += [f"  classDef {kind} {style}" for kind, style in _STYLES.items() if any(box.kind == kind for box in boxes)]
    return "\n".join(lines) + "\n"


def _box(box: Box) -> str:
    before, after = _SHAPES.get(box.kind, ("[", "]"))
    return f'{box.key}{before}"{"<br/>".join(map(_escaped, box.lines))}"{after}:::{box.kind}'


def _escaped(text: str) -> str:
    """Mermaid's own entities: what it would take for markup, and the colons of ``node::PORT``."""
    for character in '#&"<>`:;':
        text = text.replace(character, f"\0{ord(character)}\1")
    return text.replace("\0", "#").replace("\1", ";")
