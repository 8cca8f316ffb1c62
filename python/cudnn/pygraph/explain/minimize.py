"""Failure minimizer: asks cuDNN about subgraphs of a graph that it refuses, and about small changes.

Every statement is an answer of cuDNN about a graph of these nodes; this module has no rules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import channels_last, row_major
from cudnn.enums import data_type, heur_mode
from cudnn.pygraph.explain.dry_run import REFUSALS, dry_run_copy
from cudnn.pygraph.explain.model import Reason
from cudnn.pygraph.node import Node
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.graph import pygraph

NodeSet = tuple[int, ...]
_FLOATS = frozenset({data_type.FLOAT, data_type.DOUBLE, data_type.HALF, data_type.BFLOAT16})
_MODES = (heur_mode.A, heur_mode.B, heur_mode.FALLBACK)


def detail_of(error: Exception) -> str:
    """A refusal without the name of the graph, which may be a subgraph, and without advice."""
    return getattr(error, "detail", "") or str(error)


class Probe:
    """Asks cuDNN about subgraphs, and caches the answers.

    A tensor at the boundary of a subgraph lies in memory, in the graph's io type if both are floating-point.

    Args:
        graph: Prepared: shapes and types are inferred. It stays as it is.
        modes: The heuristic modes to ask.
        building: Refused is what gets no plan, not only what gets no configuration.
    """

    def __init__(self, graph: pygraph, modes: Sequence[heur_mode], building: bool) -> None:
        self.graph = graph
        self._modes = modes
        self._building = building
        self._answers: dict[NodeSet, str] = {}

    def refused(self, subset: Sequence[int]) -> tuple[NodeSet, str] | None:
        """The first connected component that is refused, with cuDNN's message; None where all are supported."""
        for component in self.components(subset):
            if self.message(component):
                return component, self.message(component)
        return None

    def message(self, subset: NodeSet) -> str:
        """cuDNN's message against one graph of these nodes, ``""`` if it is supported."""
        if subset not in self._answers:
            self._answers[subset] = self._ask(self.cut(subset), self._building)
        return self._answers[subset]

    def components(self, subset: Sequence[int]) -> list[NodeSet]:
        """The connected components: sets of nodes that share tensors."""
        nodes = self.graph.nodes
        left, components = list(subset), list[NodeSet]()
        while left:
            component, grown = {left[0]}, True
            while grown:
                inside = [nodes[index] for index in component]
                produced = {tensor for node in inside for tensor in node.outputs.values()}
                read = {tensor for node in inside for tensor in node.inputs.values()}
                joined = {
                    index
                    for index in left
                    if not produced.isdisjoint(nodes[index].inputs.values())
                    or not read.isdisjoint(nodes[index].outputs.values())
                } - component
                component |= joined
                grown = bool(joined)
            components.append(tuple(sorted(component)))
            left = [index for index in left if index not in component]
        return components

    def cut(self, subset: Sequence[int]) -> list[Node]:
        """Copies of some nodes, as a separate graph."""
        everything = copy.deepcopy(self.graph.nodes)
        nodes = [everything[index] for index in subset]
        others = [node for index, node in enumerate(everything) if index not in subset]
        produced = {tensor for node in nodes for tensor in node.outputs.values()}
        produced_outside = {tensor for node in others for tensor in node.outputs.values()}
        read_outside = {tensor for node in others for tensor in node.inputs.values()}
        io = self.graph.context.io_data_type
        for tensor in {tensor for node in nodes for tensor in node.tensors()}:
            if tensor.is_virtual and (tensor in produced_outside or (tensor in produced and tensor in read_outside)):
                tensor.is_virtual = False
                if tensor.data_type in _FLOATS and io in _FLOATS:
                    tensor.data_type = io
        return nodes

    def runs(self, nodes: Sequence[Node]) -> bool:
        """Whether cuDNN builds a plan for these nodes."""
        return not self._ask(nodes, building=True)

    def _ask(self, nodes: Sequence[Node], building: bool) -> str:
        graph = dry_run_copy(self.graph, nodes)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans(self._modes)
            if building:
                graph.build_plans()
        except REFUSALS as error:
            return detail_of(error)
        return ""


def minimal_failures(graph: pygraph, error: Exception, asked: Sequence[heur_mode], building: bool) -> list[Reason]:
    """The smallest sets of nodes that cuDNN refuses, each with its message and with changes that it accepts."""
    probe = Probe(graph, asked, building)
    everything = tuple(range(len(graph.nodes)))
    text = detail_of(error)
    if not probe.message(everything):
        return [Reason(everything, text, ("call the failed step again: cuDNN supports the same graph now",))]
    modes = [mode for mode in _MODES if mode not in asked]
    if modes and Probe(graph, modes, building).runs(probe.cut(everything)):
        names = ", ".join(mode.name for mode in modes)
        return [Reason(everything, text, (f"ask these heuristic modes too: {names}; they give a plan",))]
    failures: list[Reason] = []
    rest: Sequence[int] = everything
    while rest and (answer := probe.refused(rest)) is not None:
        subset, message = _smallest(probe, *answer)
        rest = [index for index in rest if index not in subset]
        failures.append(Reason(subset, _rule(probe, subset, rest), _cures(probe, subset, everything), message))
    if failures:
        return failures
    subsets = probe.components(everything)
    rule = f"cuDNN refuses the graph, and supports its {len(subsets)} unconnected parts, each alone"
    return [Reason(everything, rule, (f"build a graph of each: {_listed(probe, subsets)}",), probe.message(everything))]


def _smallest(probe: Probe, subset: NodeSet, message: str) -> tuple[NodeSet, str]:
    """Removes nodes while the rest is refused: later ones first, since they depend on earlier ones."""
    for index in reversed(subset):
        if index in subset and len(subset) > 1:
            answer = probe.refused([other for other in subset if other != index])
            if answer is not None:
                subset, message = answer
    return subset, message


def _rule(probe: Probe, subset: NodeSet, rest: Sequence[int]) -> str:
    nodes = probe.graph.nodes
    names = " with ".join(nodes[index].where for index in subset)
    if len(subset) == 1:
        about = f"cuDNN refuses {names}, also in a separate graph"
    elif len(subset) == 2:
        about = f"cuDNN refuses {names}, and supports each alone"
    else:
        about = f"cuDNN refuses {names}, and supports what is left when any one of them is taken out"
    if rest and probe.refused(rest) is None:
        about += "; it supports the rest of the graph"
    return f"{about}."


def _cures(probe: Probe, subset: NodeSet, everything: NodeSet) -> tuple[str, ...]:
    """Changes, or a cut, after which cuDNN builds a plan of the whole graph; failing that, of the subset."""
    these = "this node" if len(subset) == 1 else "these nodes"
    cures: list[str] = []
    for name, change in _CHANGES.items():
        full_graph = probe.cut(everything)
        if change([full_graph[index] for index in subset]) and probe.runs(full_graph):
            cures.append(f"use {name} in {these}: cuDNN then builds a plan of the graph")
    for end in range(len(everything) - 1, 0, -1):
        components = [*probe.components(everything[:end]), *probe.components(everything[end:])]
        if all(probe.refused(component) is None and probe.runs(probe.cut(component)) for component in components):
            listed = _listed(probe, components)
            cures.append(f"build {len(components)} graphs, with the tensors between them in memory: {listed}")
            break
    if not cures and len(subset) < len(everything):
        for name, change in _CHANGES.items():
            alone = probe.cut(subset)
            if change(alone) and probe.runs(alone):
                cures.append(f"use {name} in {these}: cuDNN then builds a plan of {these}, though not of the graph yet")
    nothing = (
        "change shapes or operations (no other floating-point type and neither row-major nor channels-last tensors "
        "help), or let PyTorch compute it with pygraph(backend='reference')"
    )
    return tuple(cures) or (nothing,)


def _listed(probe: Probe, subsets: Sequence[NodeSet]) -> str:
    return "; ".join(" + ".join(probe.graph.nodes[index].where for index in subset) for subset in subsets)


# Changes to try on copies of nodes; each returns whether it changed anything.
def _compute_float(nodes: Sequence[Node]) -> bool:
    changed = False
    for node in nodes:
        changed |= node.compute_data_type is not data_type.FLOAT
        node.compute_data_type = data_type.FLOAT
    return changed


def _tensors(nodes: Sequence[Node]) -> set[Tensor]:
    return {tensor for node in nodes for tensor in (*node.inputs.values(), *node.outputs.values())}


def _set_type(dtype: data_type, virtual: bool) -> Callable[[Sequence[Node]], bool]:
    def change(nodes: Sequence[Node]) -> bool:
        changed = False
        for tensor in _tensors(nodes):
            if tensor.is_virtual == virtual and not tensor.is_pass_by_value and tensor.data_type in _FLOATS - {dtype}:
                tensor.data_type, changed = dtype, True
        return changed

    return change


def _laid_out(order: Callable[[Sequence[int]], list[int]]) -> Callable[[Sequence[Node]], bool]:
    def change(nodes: Sequence[Node]) -> bool:
        changed = False
        for tensor in _tensors(nodes):
            if not tensor.is_pass_by_value and tensor.ragged_offset is None and tensor.stride != order(tensor.dim):
                tensor.stride, changed = order(tensor.dim), True
        return changed

    return change


_CHANGES: dict[str, Callable[[Sequence[Node]], Any]] = {
    "compute_data_type=FLOAT": _compute_float,
    "FLOAT for virtual tensors": _set_type(data_type.FLOAT, virtual=True),
    "HALF for virtual tensors": _set_type(data_type.HALF, virtual=True),
    "BFLOAT16 for virtual tensors": _set_type(data_type.BFLOAT16, virtual=True),
    "HALF for tensors in memory": _set_type(data_type.HALF, virtual=False),
    "BFLOAT16 for tensors in memory": _set_type(data_type.BFLOAT16, virtual=False),
    "FLOAT for tensors in memory": _set_type(data_type.FLOAT, virtual=False),
    "row-major tensors": _laid_out(row_major),
    "channels-last tensors": _laid_out(channels_last),
}
