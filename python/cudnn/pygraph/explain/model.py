"""What an explanation holds. Plain data: it outlives the graph, its plans and its handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ExplainedTensor:
    """A tensor. ``dim`` and ``stride`` count elements; both are empty where they could not be inferred.

    Attributes:
        name: The tensor's, or, where it has none, that of the node and port that first use it.
        uid: None before the graph is built.
        layout: Name of the stride order, such as ``"row-major"`` or ``"NHWC"``; ``""`` where it has none.
        role: ``"input"``, ``"output"``, ``"virtual"`` (never in memory), ``"view"`` (in the memory of another
            tensor) or ``"scalar"`` (passed by value).
        value: Of a constant that the graph itself holds, else None.
        notes: What else is special, such as a ragged offset.
    """

    name: str
    uid: int | None
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    layout: str
    data_type: str
    role: str
    value: int | float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """An operation of cuDNN's backend that a node lowered to.

    Attributes:
        kind: Name of its descriptor, without prefix: ``"MATMUL"``.
        step: Which smaller operation of a composite node it computes, such as ``"gen_index"``; ``""`` elsewhere.
    """

    kind: str
    step: str = ""


@dataclass(frozen=True)
class ExplainedNode:
    """A node. ``inputs`` and ``outputs`` lead from ports to indices in ``Explanation.tensors``.

    Attributes:
        label: Name and method, as messages call it.
        operations: What cuDNN gets; None where the graph was not lowered, empty for a view, which moves nothing.
        refused: Whether a reason names this node.
    """

    label: str
    tag: str
    compute_data_type: str
    attributes: Mapping[str, Any]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    operations: tuple[Operation, ...] | None = None
    refused: bool = False


@dataclass(frozen=True)
class ExplainedPlan:
    """The plan that ``execute`` runs.

    Attributes:
        tag: Name, ``eng<engine>_k<knob>=<value>...``, or ``"reference"``.
        knobs: Values by the knob's name.
        workspace: Bytes, the graph's own part included.
        kernels: Names of the kernels as the built plan lists them; empty for engines compiled in advance.
        before: Labels of nodes that separate plans compute first.
    """

    tag: str
    knobs: Mapping[str, int] = field(default_factory=dict)
    numerical_notes: tuple[str, ...] = ()
    behavior_notes: tuple[str, ...] = ()
    workspace: int = 0
    kernels: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True)
class RefusedPlan:
    """An engine configuration that cannot run the graph, and why: it was excluded, or cuDNN's message."""

    tag: str
    reason: str


@dataclass(frozen=True)
class Reason:
    """Why the graph cannot run.

    Attributes:
        nodes: Indices in ``Explanation.nodes`` of those it is about; empty for the whole graph.
        rule: What is wrong: the message of the node's check, or what cuDNN refuses.
        cures: What to change; one of them is enough.
        message: cuDNN's own, cut down to what its engines failed on.
    """

    nodes: tuple[int, ...]
    rule: str
    cures: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class Explanation:
    """What a graph is, what runs it and why not.

    Attributes:
        executor: What runs it: cuDNN, its version and the compute capability, or the reference executor.
        state: ``"described"``, ``"planned"`` (cuDNN offers configurations, none is built yet), ``"built"`` or
            ``"refused"``.
        types: Default data types: io, intermediate, compute.
        plan: None before it is built.
        candidates: Names of the configurations that are neither chosen nor refused, best first.
        refused: The configurations that may not run the graph.
        reasons: Empty unless the state is ``"refused"``.
    """

    name: str
    executor: str
    state: str
    types: tuple[str, str, str]
    nodes: Sequence[ExplainedNode]
    tensors: Sequence[ExplainedTensor]
    plan: ExplainedPlan | None = None
    candidates: Sequence[str] = ()
    refused: Sequence[RefusedPlan] = ()
    reasons: Sequence[Reason] = ()

    def text(self) -> str:
        """Everything as plain text."""
        from cudnn.pygraph.explain.text import render

        return render(self)

    def svg(self) -> str:
        """The graph as a drawing, one SVG element."""
        from cudnn.pygraph.explain.svg import render

        return render(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": self.text(), "image/svg+xml": self.svg()}
