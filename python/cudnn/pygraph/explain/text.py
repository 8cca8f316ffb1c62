"""An explanation as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cudnn.pygraph.explain.model import ExplainedNode, ExplainedPlan, ExplainedTensor, Explanation, Reason

_STATES = {
    "described": "described; no plan yet",
    "planned": "cuDNN supports it; no plan is built yet",
    "built": "built",
    "refused": "refused",
}
_MOST = 12  # lines of a list of configurations


def render(explained: Explanation) -> str:
    """Everything, in sections; a section that has nothing to say is left out."""
    types = zip(("io", "intermediate", "compute"), explained.types, strict=True)
    lines = [
        f"graph {explained.name!r}: {_STATES[explained.state]}",
        f"runs on {explained.executor}; {', '.join(f'{what} {kind}' for what, kind in types)}",
    ]
    for reason in explained.reasons:
        lines += ["", *refusal(reason)]
    if explained.nodes:
        lines += ["", "nodes", *(line for node in explained.nodes for line in _node(explained, node))]
        lines += ["", "tensors", *_table([_tensor(tensor) for tensor in explained.tensors])]
    if explained.plan is not None:
        lines += ["", *_plan(explained, explained.plan)]
    lines += _configurations("other configurations, best first", explained.candidates)
    lines += _configurations("refused configurations", [f"{plan.tag}: {plan.reason}" for plan in explained.refused])
    return "\n".join(lines)


def refusal(reason: Reason) -> list[str]:
    """A reason, its alternative cures each on a line."""
    lines = [f"refused: {reason.rule}"]
    lines += [f"  cuDNN says: {reason.message}"] if reason.message else []
    return lines + [f"  {'or' if number else 'to fix it'}: {hint}" for number, hint in enumerate(reason.cures)]


def shape(tensor: ExplainedTensor) -> str:
    """``"HALF 8x64x28x28 NHWC"``, or the strides where their order has no name."""
    dims = "x".join(map(str, tensor.dim)) or "of unknown shape"
    order = tensor.layout or (f"strides {'x'.join(map(str, tensor.stride))}" if tensor.stride else "")
    return f"{tensor.data_type} {dims} {order}".rstrip()


def operations(node: ExplainedNode) -> str:
    """The backend operations of a node, ``""`` if unknown."""
    if node.operations is None:
        return ""
    if not node.operations:
        return "a view: no operation, an offset into its input"
    counted = Counter(f"{op.step}: {op.kind}" if op.step else op.kind for op in node.operations)
    return ", ".join(name if number == 1 else f"{number} x {name}" for name, number in counted.items())


def _node(explained: Explanation, node: ExplainedNode) -> list[str]:
    def ports(tensors: dict[str, int]) -> str:
        return ", ".join(f"{port}={explained.tensors[index].name!r}" for port, index in tensors.items())

    attributes = ", ".join(f"{name}={_value(value)}" for name, value in node.attributes.items())
    lines = [
        f"  {node.label}{'  <- refused' if node.refused else ''}",
        f"    {ports(dict(node.inputs))} -> {ports(dict(node.outputs))}",
        f"    computes in {node.compute_data_type}{', ' if attributes else ''}{attributes}",
    ]
    lowered = operations(node)
    return [*lines, f"    becomes {lowered}"] if lowered else lines


def _value(value: object) -> object:
    if callable(value):
        return getattr(value, "__name__", "a function")
    return value["name"] if isinstance(value, dict) and "enum" in value else value


def _tensor(tensor: ExplainedTensor) -> list[str]:
    role = tensor.role if tensor.value is None else f"constant {tensor.value:g}"
    uid = "" if tensor.uid is None else f"uid {tensor.uid}"
    strides = f"strides {list(tensor.stride)}" if tensor.stride else "strides unknown"
    where = " ".join([f"dim {list(tensor.dim)}" if tensor.dim else "dim unknown", strides])
    notes = ", ".join(filter(None, [tensor.layout, *tensor.notes]))
    return [repr(tensor.name), uid, role, tensor.data_type, where, notes]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _plan(explained: Explanation, plan: ExplainedPlan) -> list[str]:
    views = [node.label for node in explained.nodes if node.operations == ()]
    fused = [node.label for node in explained.nodes if node.operations != () and node.label not in plan.before]
    inside = ", ".join(fused)
    lines = [f"plan {plan.tag}"]
    if plan.tag == "reference":
        return [*lines, f"  computes node by node, without fusion: {inside}"]
    lines.append(f"  {'fuses' if len(fused) > 1 else 'runs'} {inside}")
    if plan.before:
        lines.append(f"  runs before it, in separate plans: {', '.join(plan.before)}")
    if views:
        lines.append(f"  runs as offsets into memory: {', '.join(views)}")
    names = [f"{number} x {name}" if number > 1 else name for name, number in Counter(plan.kernels).items()]
    lines.append(f"  kernels: {', '.join(names) or 'compiled in advance; the plan does not name them'}")
    facts = {
        "knobs": ", ".join(f"{name}={value}" for name, value in plan.knobs.items()),
        "numerical notes": ", ".join(plan.numerical_notes),
        "behavior notes": ", ".join(plan.behavior_notes),
        "workspace": f"{plan.workspace} bytes",
    }
    return lines + [f"  {name}: {text}" for name, text in facts.items() if text]


def _configurations(heading: str, entries: Iterable[str]) -> list[str]:
    unique = list(dict.fromkeys(entries))
    more = [f"  and {len(unique) - _MOST} more"] if len(unique) > _MOST else []
    return ["", heading, *(f"  {entry}" for entry in unique[:_MOST]), *more] if unique else []
