"""Looks at a graph, at cuDNN's answers about it, and at what its nodes' own checks say. The graph stays as it is."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from cudnn.backend import library
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.enums import KnobType
from cudnn.backend.plan import ExecutionPlan, PlanList
from cudnn.enums import data_type, heur_mode, tensor_reordering
from cudnn.errors import CudnnError, CudnnLibraryError, cudnnGraphNotSupportedError
from cudnn.pygraph.explain.dry_run import REFUSALS, dry_run_copy
from cudnn.pygraph.explain.layouts import layout
from cudnn.pygraph.explain.minimize import minimal_failures
from cudnn.pygraph.explain.model import (
    ExplainedNode,
    ExplainedPlan,
    ExplainedTensor,
    Explanation,
    Operation,
    Reason,
    RefusedPlan,
)
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import Node, NodeList
from cudnn.pygraph.program import CudnnProgram
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.graph import pygraph

MODES = (heur_mode.A, heur_mode.FALLBACK)
_KNOB = re.compile(r"_k(\d+)=(-?\d+)")


def explain(graph: pygraph, minimize: bool = True) -> Explanation:
    """Explains a graph in any state: described, validated, built, or refused by whichever step.

    Where the graph has no plans yet, cuDNN is asked for configurations, as ``create_execution_plans`` would, on a copy.

    Args:
        minimize: Where cuDNN refuses the graph, look for the smallest sets of nodes that it refuses, and for a change
            that it accepts: asks it about parts of the graph, and builds them where a build failed.
    """
    dry_run = dry_run_copy(graph)
    reasons = faults(dry_run)
    planned = _Planned()
    operations: dict[int, tuple[Operation, ...]] = {}
    if not reasons and not dry_run._runs_on_reference():
        with _kept_uids(dry_run.nodes):
            operations, reasons = _lowered(dry_run)
            if not reasons:
                planned = _ask(graph, dry_run, minimize)
                reasons = planned.reasons
    elif not reasons and graph.get_execution_plan_count():
        planned = _Planned(ExplainedPlan("reference"))
    if reasons:
        state = "refused"
    elif planned.plan is not None:
        state = "built"
    else:
        state = "planned" if planned.candidates else "described"
    tensors = _Tensors(dry_run.nodes, {index for index, ops in operations.items() if not ops})
    context = dry_run.context
    return Explanation(
        name=dry_run.name,
        executor=_executor(dry_run),
        state=state,
        types=(
            _typename(context.io_data_type),
            _typename(context.intermediate_data_type),
            _typename(context.compute_data_type),
        ),
        nodes=[
            _explained(node, tensors, operations.get(index), any(index in reason.nodes for reason in reasons))
            for index, node in enumerate(dry_run.nodes)
        ],
        tensors=tensors.explained,
        plan=planned.plan,
        candidates=planned.candidates,
        refused=planned.refused,
        reasons=reasons,
    )


@contextmanager
def _kept_uids(nodes: Sequence[Node]) -> Iterator[None]:
    """Score modifiers hand the user's own tensors to the copies of their node; these get no uids from them."""
    uids = {tensor: tensor.uid for node in nodes for tensor in node.tensors()}
    try:
        yield
    finally:
        for tensor, uid in uids.items():
            tensor.uid = uid


def faults(graph: pygraph) -> list[Reason]:
    """What the nodes' own rules say against them, then what ``validate()`` says against the whole. Infers shapes."""
    reasons: list[Reason] = []
    unknown: set[Tensor] = set()  # what nodes that failed leave without a shape
    for index, node in enumerate(graph.nodes):
        if unknown.isdisjoint(node.inputs.values()):
            error = _refusal(partial(node.prepare, graph.context))
            if error is None:
                continue
            reasons.append(reason(error, [index]))
        unknown.update(node.outputs.values())
    if not reasons:
        context = graph._checked_for()
        for index, node in enumerate(graph.nodes):
            error = _refusal(partial(node.check, context))
            reasons += [reason(error, [index])] if error is not None else []
    if not reasons:
        error = _refusal(graph.validate)
        if error is not None:
            named = [index for index, node in enumerate(graph.nodes) if str(error).startswith(f"{node.where}:")]
            reasons.append(reason(error, named))
    return reasons


def _refusal(check: Callable[[], None]) -> Exception | None:
    try:
        check()
    except REFUSALS as error:
        return error
    return None


def reason(error: Exception, nodes: Iterable[int] = ()) -> Reason:
    """A refusal, taken apart into rule and hint."""
    rule, _, hint = str(error).partition(" To fix it, ")
    return Reason(tuple(nodes), rule, (hint.rstrip("."),) if hint else ())


@dataclasses.dataclass
class _Planned:
    """What there is of plans."""

    plan: ExplainedPlan | None = None
    candidates: list[str] = dataclasses.field(default_factory=list)
    refused: list[RefusedPlan] = dataclasses.field(default_factory=list)
    reasons: list[Reason] = dataclasses.field(default_factory=list)


def _ask(graph: pygraph, dry_run: pygraph, minimize: bool) -> _Planned:
    """The graph's plans, or those that cuDNN proposes for its twin."""
    program = graph._program
    if isinstance(program, CudnnProgram) and program.plan is not None and program.plans is None:
        return _Planned(_plan(program, program.plan))
    plans = program.plans if isinstance(program, CudnnProgram) else None
    error: Exception | None = None
    asked = MODES
    if plans is None or not (plans.modes or plans.configs):
        trial = dry_run_copy(dry_run)
        try:
            trial.build_operation_graph()
            trial.create_execution_plans(MODES)
        except REFUSALS as refused:
            error = refused
        program = trial._program
        plans = program.plans if isinstance(program, CudnnProgram) else None
    else:
        asked = tuple(plans.modes)
    planned = _Planned()
    if plans is not None:
        refused_configs = plans.refusals()
        planned.refused = [RefusedPlan(plans.configs[index].tag, why) for index, why in refused_configs.items()]
        planned.candidates = [
            config.tag
            for index, config in enumerate(plans.configs)
            if index not in refused_configs and index != plans.chosen
        ]
        if isinstance(program, CudnnProgram) and program.plan is not None:
            planned.plan = _plan(program, program.plan)
            planned.candidates = [
                tag for tag in planned.candidates if tag != planned.plan.tag
            ]  # modes propose some twice
            return planned
    if not planned.candidates:
        planned.reasons = _reasons(dry_run, plans, error, asked, minimize)
    return planned


def _reasons(
    dry_run: pygraph, plans: PlanList | None, error: Exception | None, asked: Sequence[heur_mode], minimize: bool
) -> list[Reason]:
    """Why no configuration may run the graph."""
    if isinstance(error, CudnnLibraryError) or (isinstance(error, CudnnError) and error.status < 2000):
        return [reason(error)]  # cuDNN could not be asked
    if plans is not None and plans.configs and not plans.failures:
        return [
            Reason(
                (),
                f"every one of the {len(plans.configs)} engine configurations is excluded",
                ("remove a restriction: the refused configurations name the one that excludes them",),
            )
        ]
    building = plans is not None and bool(plans.failures)
    if error is None:
        what = "cuDNN builds no plan of" if building else "cuDNN has no engine configuration for"
        names = ", ".join(mode.name for mode in asked)
        error = cudnnGraphNotSupportedError(f"{what} this graph (heuristic modes {names})")
    return minimal_failures(dry_run, error, asked, building) if minimize else [reason(error)]


def _plan(program: CudnnProgram, plan: ExecutionPlan) -> ExplainedPlan:
    try:
        engine = json.loads(plan.to_json()).get("engine", {})
    except CudnnError:  # of an engine whose plans cannot be written out
        engine = {}
    kernels = tuple(kernel.get("kernelName", "") for kernel in engine.get("payload", {}).get("kernels", ()))
    config = plan.config
    return ExplainedPlan(
        tag=config.tag,
        knobs={_knob_name(int(number)): int(value) for number, value in _KNOB.findall(config.tag)},
        numerical_notes=tuple(note.name for note in config.numerical_notes),
        behavior_notes=tuple(note.name for note in config.behavior_notes),
        workspace=program.workspace_size(plan),
        kernels=kernels,
        before=tuple(item.node for item in program.before),
    )


def _knob_name(number: int) -> str:
    try:
        return KnobType(number).name
    except ValueError:  # of a newer cuDNN
        return f"k{number}"


class _Recorder(Lowering):
    """Notes which operations each node becomes."""

    step = ""

    def __init__(self, *arguments: Any) -> None:
        self.recorded: list[Operation] = []
        super().__init__(*arguments)

    def expand(self, smaller: NodeList[Tensor]) -> None:
        for node in smaller.nodes:
            single: NodeList[Tensor] = NodeList(smaller.context)
            single.nodes = [node]
            outer, self.step = self.step, node.method
            super().expand(single)
            self.step = outer

    def descriptor(self, descriptor_type: Any, attributes: Any) -> Descriptor:
        if descriptor_type.name.startswith("OPERATION_"):
            self.recorded.append(Operation(descriptor_type.name.removeprefix("OPERATION_"), self.step))
        return super().descriptor(descriptor_type, attributes)


def _lowered(graph: pygraph) -> tuple[dict[int, tuple[Operation, ...]], list[Reason]]:
    """The operations of each node, up to the first that cannot be lowered, and the rule of that node against it."""
    if not library.is_available():
        return {}, []  # which the plans are refused for
    nodes = copy.deepcopy(graph.nodes)
    lowered: dict[int, tuple[Operation, ...]] = {}
    try:
        recorder = _Recorder(graph.context, nodes, library.version())
        for index, node in enumerate(nodes):
            node.lower(recorder)
            lowered[index], recorder.recorded = tuple(recorder.recorded), []
    except REFUSALS as error:
        asked = isinstance(error, CudnnError) or isinstance(error.__cause__, CudnnError)
        return lowered, [] if asked else [reason(error, [len(lowered)])]  # what cuDNN refuses will be narrowed down
    return lowered, []


def _executor(graph: pygraph) -> str:
    if graph._runs_on_reference():
        return "the reference executor (PyTorch)"
    cudnn = f"cuDNN {library.version_string()}" if library.is_available() else "cuDNN, which cannot be loaded"
    capability = graph._checked_for().sm_version
    return cudnn if capability is None else f"{cudnn} for compute capability {capability / 10:.1f}"


def _typename(dtype: data_type) -> str:
    return "unset" if dtype is data_type.NOT_SET else dtype.name


class _Tensors:
    """The tensors of a graph, numbered in order of use."""

    def __init__(self, nodes: Sequence[Node], views: set[int]) -> None:
        self._indices: dict[Tensor, int] = {}
        self.explained: list[ExplainedTensor] = []
        produced = {tensor: "output" for node in nodes for tensor in node.outputs.values() if not tensor.is_virtual}
        seen = {tensor: "view" for index in views for tensor in nodes[index].outputs.values()}
        for node in nodes:
            for tensor in node.tensors():
                if tensor not in self._indices:
                    self._indices[tensor] = len(self._indices)
                    role = "virtual" if tensor.is_virtual else "scalar" if tensor.is_pass_by_value else "input"
                    role = {**produced, **seen}.get(tensor, role)
                    self.explained.append(self._explained(tensor.name or self._named(node, tensor), tensor, role))

    def indices(self, ports: dict[str, Tensor]) -> dict[str, int]:
        """Ports to indices."""
        return {port: self._indices[tensor] for port, tensor in ports.items()}

    @staticmethod
    def _named(node: Node, tensor: Tensor) -> str:
        """What to call a tensor without a name: after the node and the port that it, or what it offsets, is at."""
        ports = {**node.inputs, **node.outputs}
        names = {used: port for port, used in ports.items()}
        names |= {used.ragged_offset: f"{port}::offset" for port, used in ports.items() if used.ragged_offset}
        return f"{node.name or node.method}::{names[tensor]}"

    @staticmethod
    def _explained(name: str, tensor: Tensor, role: str) -> ExplainedTensor:
        notes: list[str] = []
        if tensor.ragged_offset is not None:
            notes.append(f"ragged by {tensor.ragged_offset.name!r}")
        if tensor.reordering_type is not tensor_reordering.NONE:
            notes.append(f"reordered {tensor.reordering_type.name}")
        if tensor.alignment != 16:
            notes.append(f"aligned to {tensor.alignment} bytes")
        if tensor.vector_count != 1:
            notes.append(f"vectors of {tensor.vector_count} along dimension {tensor.vector_dimension}")
        return ExplainedTensor(
            name,
            tensor.uid,
            tuple(tensor.dim),
            tuple(tensor.stride),
            layout(tensor.dim, tensor.stride),
            _typename(tensor.data_type),
            role,
            tensor.value,
            tuple(notes),
        )


def _explained(node: Node, tensors: _Tensors, operations: tuple[Operation, ...] | None, refused: bool) -> ExplainedNode:
    return ExplainedNode(
        label=node.where,
        tag=node.tag,
        compute_data_type=_typename(node.compute_data_type),
        attributes=node.attributes(),
        inputs=tensors.indices(node.inputs),
        outputs=tensors.indices(node.outputs),
        operations=operations,
        refused=refused,
    )
