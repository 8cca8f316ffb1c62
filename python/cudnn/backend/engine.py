"""Operation graphs, their engines, and the configurations that heuristics propose."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cudnn import enums as public
from cudnn.backend import enums, library
from cudnn.backend.attributes import Attribute
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.device import DeviceProperties
from cudnn.backend.enums import DescriptorType, HeurMode, KnobType
from cudnn.backend.handle import Handle
from cudnn.backend.messages import root_causes
from cudnn.errors import CudnnError

_log = logging.getLogger("cudnn")
_mode_b_lock = threading.Lock()  # heuristics mode B is not safe to run in two threads
_MAX_KNOB_CHOICES = 64  # cuDNN 9.28 reports a count of 0; it has 46 knob types


class Knob(NamedTuple):
    """A tuning parameter of an engine: its type, and the values it takes."""

    type: public.knob_type
    max_value: int
    min_value: int
    stride: int


class OperationGraph:
    """A finalized operation graph."""

    def __init__(
        self,
        ops: Sequence[Descriptor],
        handle: Handle | None = None,
        dynamic_shape: bool = False,
        override_shape: bool = False,
    ) -> None:
        """Builds the graph of operation descriptors; needs no GPU work. A reference handle counts as none.

        Raises:
            CudnnError: cuDNN refuses the graph.
        """
        lib = library.load()
        attributes = {
            Attribute.OPERATIONGRAPH_OPS: ops,
            Attribute.OPERATIONGRAPH_HANDLE: handle if handle is not None and not handle.is_reference else None,
            Attribute.OPERATIONGRAPH_IS_DYNAMIC_SHAPE_ENABLED: True if dynamic_shape else None,
        }
        if override_shape and lib.version >= Attribute.OPERATIONGRAPH_IS_OVERRIDE_SHAPE_ENABLED.since:
            attributes[Attribute.OPERATIONGRAPH_IS_OVERRIDE_SHAPE_ENABLED] = True
        self.descriptor = Descriptor.make(DescriptorType.OPERATIONGRAPH, attributes)

    @functools.cached_property
    def engine_count(self) -> int:
        """How many engines there are for this graph, supported or not."""
        return self.descriptor.get(Attribute.OPERATIONGRAPH_ENGINE_GLOBAL_COUNT)

    def _engine(self, engine_id: int, device_properties: DeviceProperties | None) -> Descriptor:
        if not 0 <= engine_id < self.engine_count:
            raise RuntimeError(f"engine_id: got {engine_id}; allowed: 0 to {self.engine_count - 1} for this graph.")
        return Descriptor.make(
            DescriptorType.ENGINE,
            {
                Attribute.ENGINE_OPERATION_GRAPH: self.descriptor,
                Attribute.ENGINE_GLOBAL_INDEX: engine_id,
                Attribute.ENGINE_DEVICEPROP: device_properties and device_properties.descriptor,
            },
        )

    def knobs(self, engine_id: int, device_properties: DeviceProperties | None = None) -> list[Knob]:
        """The knobs of an engine that ``knob_type`` knows.

        Raises:
            RuntimeError: the engine does not exist or does not support the graph.
        """
        engine = self._engine(engine_id, device_properties)
        knobs: list[Knob] = []
        for info in engine.get_descriptors(Attribute.ENGINE_KNOB_INFO, DescriptorType.KNOB_INFO):
            type_ = _by_name(KnobType, info.get(Attribute.KNOB_INFO_TYPE), public.knob_type)
            if type_ is not None:
                maximum = info.get(Attribute.KNOB_INFO_MAXIMUM_VALUE)
                minimum = info.get(Attribute.KNOB_INFO_MINIMUM_VALUE)
                knobs.append(Knob(type_, maximum, minimum, info.get(Attribute.KNOB_INFO_STRIDE)))
        return knobs

    def engine_config(
        self, engine_id: int, knobs: Mapping[public.knob_type, int], device_properties: DeviceProperties | None = None
    ) -> EngineConfig:
        """The configuration of an engine with these knobs.

        Raises:
            RuntimeError: the engine does not exist, or does not take these values.
        """
        choices = [
            Descriptor.make(
                DescriptorType.KNOB_CHOICE,
                {Attribute.KNOB_CHOICE_KNOB_TYPE: KnobType[type_.name], Attribute.KNOB_CHOICE_KNOB_VALUE: value},
            )
            for type_, value in knobs.items()
        ]
        engine = self._engine(engine_id, device_properties)
        descriptor = Descriptor.make(
            DescriptorType.ENGINECFG,
            {Attribute.ENGINECFG_ENGINE: engine, Attribute.ENGINECFG_KNOB_CHOICES: choices or None},
        )
        return EngineConfig(descriptor, self)


def _by_name(backend: Any, number: int, names: Any) -> Any:
    """The public enum member for a number of cuDNN, matched by name; None for one that newer libraries added."""
    try:
        return names.__members__.get(backend(number).name)
    except ValueError:
        return None


class EngineConfig:
    """An engine and its knobs, as the heuristics chose them. Its properties are read on first access."""

    def __init__(self, descriptor: Descriptor, graph: OperationGraph) -> None:
        self.descriptor = descriptor
        self.graph = graph

    @functools.cached_property
    def _engine(self) -> Descriptor:
        return self.descriptor.get_descriptors(Attribute.ENGINECFG_ENGINE, DescriptorType.ENGINE)[0]

    @functools.cached_property
    def tag(self) -> str:
        """Name of the configuration: ``eng<index>_k<knob>=<value>_...`` with cuDNN's own knob numbers."""
        tag = f"eng{self._engine.get(Attribute.ENGINE_GLOBAL_INDEX)}"
        attribute = Attribute.ENGINECFG_KNOB_CHOICES
        for choice in self.descriptor.get_descriptors(attribute, DescriptorType.KNOB_CHOICE, _MAX_KNOB_CHOICES):
            tag += f"_k{choice.get(Attribute.KNOB_CHOICE_KNOB_TYPE)}={choice.get(Attribute.KNOB_CHOICE_KNOB_VALUE)}"
        return tag

    @functools.cached_property
    def numerical_notes(self) -> list[public.numerical_note]:
        """Numerical properties of the engine."""
        numbers = self._engine.get(Attribute.ENGINE_NUMERICAL_NOTE)
        notes = (_by_name(enums.NumericalNote, number, public.numerical_note) for number in numbers)
        return [note for note in notes if note is not None]

    @functools.cached_property
    def behavior_notes(self) -> list[public.behavior_note]:
        """Behavior of the engine."""
        numbers = self._engine.get(Attribute.ENGINE_BEHAVIOR_NOTE)
        notes = (_by_name(enums.BehaviorNote, number, public.behavior_note) for number in numbers)
        return [note for note in notes if note is not None]

    @functools.cached_property
    def workspace_size(self) -> int:
        """Bytes of workspace, an upper bound known before the plan is built."""
        return self.descriptor.get(Attribute.ENGINECFG_WORKSPACE_SIZE)

    @functools.cached_property
    def shared_memory_used(self) -> int:
        """Bytes of shared memory per block; 0 if the engine does not report it."""
        try:
            return self.descriptor.get(Attribute.ENGINECFG_SHARED_MEMORY_USED)
        except CudnnError:
            return 0


class Heuristics(NamedTuple):
    """Result of a heuristic mode: configurations, best first, or cuDNN's reason for finding none."""

    configs: list[EngineConfig]
    reason: str


_EXPANSION = {
    public.heur_mode.A: (HeurMode.A,),
    public.heur_mode.B: (HeurMode.B,),
    public.heur_mode.FALLBACK: (HeurMode.FALLBACK,),
    public.heur_mode.OPENSOURCE: (HeurMode.A, HeurMode.FALLBACK),
    public.heur_mode.CUDNN_FIND: (HeurMode.A, HeurMode.B, HeurMode.FALLBACK),
}


def heuristics(
    graph: OperationGraph,
    mode: public.heur_mode,
    device_properties: DeviceProperties | None = None,
    sm_count: int | None = None,
) -> Heuristics:
    """Engine configurations for a graph. A mode that fails adds no configurations, only its reason."""
    lib = library.load()
    configs: list[EngineConfig] = []
    reasons: list[str] = []
    for backend_mode in _EXPANSION[mode]:
        lib.last_error()  # reading clears it, so that the next message is about this mode
        try:
            if backend_mode is HeurMode.B:
                with _mode_b_lock:
                    descriptors = _ask(graph, backend_mode, device_properties, sm_count)
            else:
                descriptors = _ask(graph, backend_mode, device_properties, sm_count)
        except CudnnError as error:
            reasons.append(f"heuristics mode {backend_mode.name}: {error}")
            continue
        if not descriptors:
            message = lib.last_error()
            _log.debug(
                "heuristics mode %s has no engine configuration; cuDNN's whole text: %s", backend_mode.name, message
            )
            reasons.append(f"heuristics mode {backend_mode.name}: {root_causes(message) or 'no engine configuration'}")
        configs += [EngineConfig(descriptor, graph) for descriptor in descriptors]
    return Heuristics(configs, "; ".join(reasons))


def _ask(
    graph: OperationGraph, mode: HeurMode, device_properties: DeviceProperties | None, sm_count: int | None
) -> list[Descriptor]:
    heuristic = Descriptor.make(
        DescriptorType.ENGINEHEUR,
        {
            Attribute.ENGINEHEUR_OPERATION_GRAPH: graph.descriptor,
            Attribute.ENGINEHEUR_MODE: mode,
            Attribute.ENGINEHEUR_DEVICEPROP: device_properties and device_properties.descriptor,
            Attribute.ENGINEHEUR_SM_COUNT_TARGET: sm_count,
        },
    )
    return heuristic.get_descriptors(Attribute.ENGINEHEUR_RESULTS, DescriptorType.ENGINECFG)
