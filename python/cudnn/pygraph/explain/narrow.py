"""Which nodes cuDNN refuses: asks it about parts of a graph that it refuses as a whole, and about small changes.

Every statement is an answer of cuDNN about a graph of these very nodes, never a rule written down here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import channels_last, row_major
from cudnn.enums import data_type, heur_mode
from cudnn.pygraph.explain.model import Reason
from cudnn.pygraph.explain.twins import REFUSALS, twin_of
from cudnn.pygraph.node import Node
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.graph import pygraph

Part = tuple[int, ...]
_FLOATS = frozenset({data_type.FLOAT, data_type.DOUBLE, data_type.HALF, data_type.BFLOAT16})
_MODES = (heur_mode.A, heur_mode.B, heur_mode.FALLBACK)


def said(error: Exception) -> str:
    """A refusal without the name of the graph, which may be a part, and without advice."""
    return getattr(error, "detail", "") or str(error)


class Probe:
    """Asks cuDNN about parts of a graph, each question once.

    A tensor where a part is cut off lies in memory, in the graph's io type if both are floating-point.

    Args:
        graph: Prepared: shapes and types are inferred. It stays as it is.
        modes: The heuristic modes to ask.
        building: Refused is what gets no plan, not only what gets no configuration.
    """

    def __init__(self, graph: pygraph, modes: Sequence[heur_mode], building: bool) -> None:
        self.graph = graph
        self._modes = modes
        self._building = building
        self._answers: dict[Part, str] = {}

    def refused(self, part: Sequence[int]) -> tuple[Part, str] | None:
        """The first connected component that is refused, with cuDNN's message; None where all are supported."""
        for component in self.components(part):
            if self.message(component):
                return component, self.message(component)
        return None

    def message(self, part: Part) -> str:
        """What is said against one graph of these nodes, ``""`` where it is supported."""
        if part not in self._answers:
            self._answers[part] = self._ask(self.cut(part), self._building)
        return self._answers[part]

    def components(self, part: Sequence[int]) -> list[Part]:
        """The sets of nodes that hand tensors to one another."""
        nodes = self.graph.nodes
        left, found = list(part), list[Part]()
        while left:
            component, grown = {left[0]}, True
            while grown:
                inside = [nodes[index] for index in component]
                made = {tensor for node in inside for tensor in node.outputs.values()}
                read = {tensor for node in inside for tensor in node.inputs.values()}
                joined = {
                    index
                    for index in left
                    if not made.isdisjoint(nodes[index].inputs.values())
                    or not read.isdisjoint(nodes[index].outputs.values())
                } - component
                component |= joined
                grown = bool(joined)
            found.append(tuple(sorted(component)))
            left = [index for index in left if index not in component]
        return found

    def cut(self, part: Sequence[int]) -> list[Node]:
        """Copies of some nodes, as a graph of their own."""
        everything = copy.deepcopy(self.graph.nodes)
        nodes = [everything[index] for index in part]
        others = [node for index, node in enumerate(everything) if index not in part]
        made = {tensor for node in nodes for tensor in node.outputs.values()}
        made_outside = {tensor for node in others for tensor in node.outputs.values()}
        read_outside = {tensor for node in others for tensor in node.inputs.values()}
        io = self.graph.context.io_data_type
        for tensor in {tensor for node in nodes for tensor in node.tensors()}:
            if tensor.is_virtual and (tensor in made_outside or (tensor in made and tensor in read_outside)):
                tensor.is_virtual = False
                if tensor.data_type in _FLOATS and io in _FLOATS:
                    tensor.data_type = io
        return nodes

    def runs(self, nodes: Sequence[Node]) -> bool:
        """Whether cuDNN builds a plan for these nodes."""
        return not self._ask(nodes, building=True)

    def _ask(self, nodes: Sequence[Node], building: bool) -> str:
        graph = twin_of(self.graph, nodes)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans(self._modes)
            if building:
                graph.build_plans()
        except REFUSALS as error:
            return said(error)
        return ""


def narrowed(graph: pygraph, error: Exception, asked: Sequence[heur_mode], building: bool) -> list[Reason]:
    """The smallest sets of nodes that cuDNN refuses, each with its message and with changes that it accepts."""
    probe = Probe(graph, asked, building)
    everything = tuple(range(len(graph.nodes)))
    text = said(error)
    if not probe.message(everything):
        return [Reason(everything, text, ("call the failed step again: cuDNN supports the same graph now",))]
    modes = [mode for mode in _MODES if mode not in asked]
    if modes and Probe(graph, modes, building).runs(probe.cut(everything)):
        names = ", ".join(mode.name for mode in modes)
        return [Reason(everything, text, (f"ask these heuristic modes too: {names}; they give a plan",))]
    found: list[Reason] = []
    rest: Sequence[int] = everything
    while rest and (answer := probe.refused(rest)) is not None:
        part, message = _smallest(probe, *answer)
        rest = [index for index in rest if index not in part]
        found.append(Reason(part, _rule(probe, part, rest), _cures(probe, part, everything), message))
    if found:
        return found
    parts = probe.components(everything)
    rule = f"cuDNN refuses the graph, and supports its {len(parts)} unconnected parts, each alone"
    return [Reason(everything, rule, (f"build a graph of each: {_listed(probe, parts)}",), probe.message(everything))]


def _smallest(probe: Probe, part: Part, message: str) -> tuple[Part, str]:
    """Takes nodes out while what is left is refused: later ones first, since they depend on earlier ones."""
    for index in reversed(part):
        if index in part and len(part) > 1:
            answer = probe.refused([other for other in part if other != index])
            if answer is not None:
                part, message = answer
    return part, message


def _rule(probe: Probe, part: Part, rest: Sequence[int]) -> str:
    nodes = probe.graph.nodes
    names = " with ".join(nodes[index].where for index in part)
    if len(part) == 1:
        about = f"cuDNN refuses {names}, also in a graph of its own"
    elif len(part) == 2:
        about = f"cuDNN refuses {names}, and supports each alone"
    else:
        about = f"cuDNN refuses {names}, and supports what is left when any one of them is taken out"
    if rest and probe.refused(rest) is None:
        about += "; it supports the rest of the graph"
    return f"{about}."


def _cures(probe: Probe, part: Part, everything: Part) -> tuple[str, ...]:
    """Changes, or a cut, after which cuDNN builds a plan of the whole graph; where none is found, of the part."""
    these = "this node" if len(part) == 1 else "these nodes"
    cures: list[str] = []
    for name, change in _CHANGES.items():
        whole = probe.cut(everything)
        if change([whole[index] for index in part]) and probe.runs(whole):
            cures.append(f"use {name} in {these}: cuDNN then builds a plan of the graph")
    for end in range(len(everything) - 1, 0, -1):
        pieces = [*probe.components(everything[:end]), *probe.components(everything[end:])]
        if all(probe.refused(piece) is None and probe.runs(probe.cut(piece)) for piece in pieces):
            listed = _listed(probe, pieces)
            cures.append(f"build {len(pieces)} graphs, with the tensors between them in memory: {listed}")
            break
    if not cures and len(part) < len(everything):
        for name, change in _CHANGES.items():
            alone = probe.cut(part)
            if change(alone) and probe.runs(alone):
                cures.append(f"use {name} in {these}: cuDNN then builds a plan of {these}, though not of the graph yet")
    nothing = (
        "change shapes or operations (no other floating-point type and neither row-major nor channels-last tensors "
        "help), or let PyTorch compute it with pygraph(backend='reference')"
    )
    return tuple(cures) or (nothing,)


def _listed(probe: Probe, parts: Sequence[Part]) -> str:
    return "; ".join(" + ".join(probe.graph.nodes[index].where for index in part) for part in parts)


# Changes to try on copies of nodes; each returns whether it changed anything.
def _compute_float(nodes: Sequence[Node]) -> bool:
    changed = False
    for node in nodes:
        changed |= node.compute_data_type is not data_type.FLOAT
        node.compute_data_type = data_type.FLOAT
    return changed


def _tensors(nodes: Sequence[Node]) -> set[Tensor]:
    return {tensor for node in nodes for tensor in (*node.inputs.values(), *node.outputs.values())}


def _typed(kind: data_type, virtual: bool) -> Callable[[Sequence[Node]], bool]:
    def change(nodes: Sequence[Node]) -> bool:
        changed = False
        for tensor in _tensors(nodes):
            if tensor.is_virtual == virtual and not tensor.is_pass_by_value and tensor.data_type in _FLOATS - {kind}:
                tensor.data_type, changed = kind, True
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
    "FLOAT for virtual tensors": _typed(data_type.FLOAT, virtual=True),
    "HALF for virtual tensors": _typed(data_type.HALF, virtual=True),
    "BFLOAT16 for virtual tensors": _typed(data_type.BFLOAT16, virtual=True),
    "HALF for tensors in memory": _typed(data_type.HALF, virtual=False),
    "BFLOAT16 for tensors in memory": _typed(data_type.BFLOAT16, virtual=False),
    "FLOAT for tensors in memory": _typed(data_type.FLOAT, virtual=False),
    "row-major tensors": _laid_out(row_major),
    "channels-last tensors": _laid_out(channels_last),
}
