"""Execution plans: the choice among engine configurations, and execution."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import c_int64, c_void_p
from struct import Struct
from typing import Any, NamedTuple

from cudnn.backend import cuda_graph, library
from cudnn.backend.attributes import Attribute
from cudnn.backend.descriptor import Descriptor
from cudnn.backend.device import DeviceProperties, KernelCache
from cudnn.backend.engine import EngineConfig, OperationGraph, heuristics
from cudnn.backend.enums import DescriptorType
from cudnn.backend.handle import Handle, resolve
from cudnn.enums import behavior_note, build_plan_policy, heur_mode, numerical_note
from cudnn.errors import CudnnError, cudnnGraphNotSupportedError, make_error

_log = logging.getLogger("cudnn")
_VARIANT_PACK = int(DescriptorType.VARIANT_PACK)
_encode_pointer = Struct("Q").pack
_MAX_SHARED_MEMORY = 1 << 30  # an engine that asks for more per block is broken; no device has it
_EXPLAIN = "To find the nodes that it refuses, and what to change, call graph.explain()."


class Pack(cuda_graph.GraphReplay):
    """A finalized variant pack; ``argument`` is the pack as an argument of cuDNN."""

    __slots__ = ("argument",)

    def __init__(self, argument: Any) -> None:
        super().__init__()
        self.argument = argument


class _PackCache:
    """A plan's cached variant packs of one handle."""

    __slots__ = ("keys", "misses", "scratch")

    def __init__(self, scratch: Pack) -> None:
        self.keys: list[tuple[int, ...]] = []
        self.misses = 0
        self.scratch = scratch


class _Vector(ctypes.Structure):
    """``std::vector`` in the layout of libstdc++ and libc++."""

    _fields_ = (("begin", c_void_p), ("end", c_void_p), ("end_of_storage", c_void_p))


class _NestedVector:
    """A ``std::vector<std::vector<int64_t>>``, in which cuDNN takes override shapes and strides."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = [(c_int64 * len(row))(*row) for row in rows]
        self._inner = (_Vector * len(rows))(*[_vector_of(row) for row in self._rows])
        self._outer = _vector_of(self._inner)
        self.address = ctypes.addressof(self._outer)


def _vector_of(array: ctypes.Array[Any]) -> _Vector:
    begin = ctypes.addressof(array)
    end = begin + ctypes.sizeof(array)
    return _Vector(begin, end, end)


class Origin(NamedTuple):
    """The known properties of a restored plan's configuration."""

    tag: str = "restored"
    numerical_notes: Sequence[numerical_note] = ()
    behavior_notes: Sequence[behavior_note] = ()


class ExecutionPlan:
    """A finalized execution plan and its variant packs.

    A variant pack binds a plan to pointers. A finalized pack accepts no new pointers, so packs are cached by pointers.

    Attributes:
        packs: From (data pointers in the order of ``uids``, workspace pointer, ``handle.ptr``) to the finalized pack.
            The hot path is ``plan.launch(handle.argument, plan.argument, plan.packs[key].argument)``, which returns a
            status; a key that is missing goes to ``pack``, a status that is not 0 to ``failure``.
        argument: The plan, for the hot path.
        launch: ``cudnnBackendExecute``, without conversions.
        uids: The tensors whose pointers the keys hold, set by ``bind``.
    """

    MAX_PACKS = 64  # per handle; a training step cycles through fewer sets of buffers
    MAX_MISSES = 1024
    is_rebuilt = False  # whether a restored graph builds this plan again

    def __init__(self, descriptor: Descriptor, config: EngineConfig | Origin) -> None:
        self.descriptor = descriptor
        self.config = config
        self.argument = library.pointer_argument(descriptor.pointer)
        self.packs: dict[tuple[int, ...], Pack] = {}
        self.uids: tuple[int, ...] = ()
        self._by_handle: dict[int, _PackCache] = {}
        self._library = library.load()
        self.launch = self._library.execute_unchecked
        self.bind(())

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        kernel_cache: KernelCache | None = None,
        device_properties: DeviceProperties | None = None,
    ) -> ExecutionPlan:
        """Builds the plan of a configuration, which may compile a kernel.

        Raises:
            CudnnError: cuDNN refuses the configuration.
        """
        descriptor = Descriptor.make(
            DescriptorType.EXECUTION_PLAN,
            {
                Attribute.EXECUTION_PLAN_ENGINE_CONFIG: config.descriptor,
                Attribute.EXECUTION_PLAN_KERNEL_CACHE: kernel_cache and kernel_cache.descriptor,
                Attribute.EXECUTION_PLAN_DEVICEPROP: device_properties and device_properties.descriptor,
            },
        )
        return cls(descriptor, config)

    @classmethod
    def from_json(cls, handle: Handle, text: str | bytes, origin: Origin | None = None) -> ExecutionPlan:
        """Restores a plan from ``to_json``, on the device of ``handle``. ``origin`` is for the reader.

        Raises:
            ValueError: the handle selects the reference executor; cuDNN 9.28 crashes on a plan restored without a GPU.
        """
        if resolve(handle).is_reference:
            what = "one that selects the reference executor"
            raise make_error(ValueError, "ExecutionPlan.from_json", "handle", what, "a handle of a GPU")
        descriptor = Descriptor.make(
            DescriptorType.EXECUTION_PLAN,
            {Attribute.EXECUTION_PLAN_HANDLE: handle, Attribute.EXECUTION_PLAN_JSON_REPRESENTATION: text},
        )
        return cls(descriptor, origin or Origin())

    @functools.cached_property
    def workspace_size(self) -> int:
        """Bytes of workspace that execution needs."""
        return self.descriptor.get(Attribute.EXECUTION_PLAN_WORKSPACE_SIZE)

    def to_json(self) -> bytes:
        """The plan as JSON text, compiled kernels included."""
        return self.descriptor.get(Attribute.EXECUTION_PLAN_JSON_REPRESENTATION)

    def bind(self, uids: Sequence[int]) -> None:
        """Fixes which tensors' pointers the keys of ``packs`` hold, and in which order."""
        self._drop_packs()
        self.uids = tuple(uids)
        self._uid_array = ctypes.byref((c_int64 * len(uids))(*uids))
        self._uid_count = len(uids)
        self._encode = Struct(f"{len(uids) + 2}Q").pack

    def failure(self, status: int) -> CudnnError:
        """The exception for a failed execution."""
        return self._library.error(status, f"executing the plan {self.config.tag}")

    def pack(self, key: tuple[int, ...], pointers: tuple[int, ...] | None = None) -> Pack:
        """The pack of a key that ``packs`` lacks, good for one call.

        ``pointers`` (data pointers, workspace, ``handle.ptr``) goes into the pack instead of the key, for the graph,
        which derives some addresses from others and keeps only the others in its keys.

        The first ``MAX_PACKS`` keys of a handle get cached packs. Later keys share one scratch pack, which is reset and
        refilled: that is cheaper than eviction at every call. After ``MAX_MISSES`` such calls, the packs that no call
        has used since belong to buffers that are no longer used, and are evicted. Threads never share these packs,
        because cuDNN allows one thread at a time to use a handle.
        """
        lib = self._library
        pointers = pointers or key
        handle_packs = self._by_handle.get(key[-1]) or self._first_pack(pointers)
        is_cached = len(handle_packs.keys) < self.MAX_PACKS
        status = 0
        if is_cached:
            pack = self._new_pack()
        else:
            if lib.reopen_unchecked is None:
                lib.destroy(handle_packs.scratch.argument)
                handle_packs.scratch = self._new_pack()
            else:
                status = lib.reopen_unchecked(handle_packs.scratch.argument)
            pack = handle_packs.scratch
            handle_packs.misses += 1
            if handle_packs.misses == self.MAX_MISSES:
                self._evict(handle_packs)
        set_attribute, argument = lib.set_unchecked, pack.argument
        count = self._uid_count
        # Plain ints for VARIANT_PACK_UNIQUE_IDS (1000), _DATA_POINTERS (1001), _WORKSPACE (1003) and the types
        # INT64 (3) and VOID_PTR (6): ctypes takes them faster than enumeration members or ctypes objects.
        status = (
            status
            or set_attribute(argument, 1000, 3, count, self._uid_array)
            or set_attribute(argument, 1001, 6, count, self._encode(*pointers))  # cuDNN copies the first `count` words
            or (pointers[-2] and set_attribute(argument, 1003, 6, 1, _encode_pointer(pointers[-2])))
            or lib.finalize_unchecked(argument)
        )
        if status:
            error = lib.error(status, "preparing a variant pack")
            if is_cached:
                lib.destroy(argument)
            raise error
        if is_cached:
            handle_packs.keys.append(key)
            self.packs[key] = pack
        return pack

    def _first_pack(self, key: tuple[int, ...]) -> _PackCache:
        if len(key) != len(self.uids) + 2:
            count = len(key) - 2
            raise make_error(
                ValueError, "variant pack", "pointers", count, f"{len(self.uids)}, one for each of the uids {self.uids}"
            )
        if resolve(key[-1]).is_reference:
            raise make_error(
                ValueError, "variant pack", "handle", "one that selects the reference executor", "a handle of a GPU"
            )
        handle_packs = self._by_handle[key[-1]] = _PackCache(self._new_pack())
        return handle_packs

    def _new_pack(self) -> Pack:
        lib, pack = self._library, c_void_p()
        lib.check(lib.create_unchecked(_VARIANT_PACK, ctypes.byref(pack)), "creating a variant pack")
        return Pack(library.pointer_argument(pack.value or 0))

    def _evict(self, handle_packs: _PackCache) -> None:
        """Evicts the packs that no call has used since the last eviction; all of them if no CUDA graphs track use."""
        handle_packs.misses = 0
        used = [key for key in handle_packs.keys if self.packs[key].used]
        self._forget([key for key in handle_packs.keys if not self.packs[key].used])
        handle_packs.keys = used
        for key in used:
            self.packs[key].used = False

    def _forget(self, keys: Iterable[tuple[int, ...]]) -> None:
        for key in keys:
            pack = self.packs.pop(key)
            pack.drop_graph()
            self._library.destroy(pack.argument)

    @property
    def fills_cuda_graphs(self) -> bool:
        """Whether cuDNN can write the plan's kernels into a CUDA graph."""
        return _fills_cuda_graphs(self.config)

    def keep_graph(self, pack: Pack, handle: Handle) -> None:
        """Creates the CUDA graph that later calls with this pack launch on the handle's stream, unless it is too early.

        Kernels in a CUDA graph keep the values of pass-by-value tensors, so the plan must have none that the caller
        sets.
        """
        others = [other for other in list(self.packs.values()) if other is not pack]  # another thread may add some
        first = not any(other.graph for other in others)

        def fill(graph: int) -> None:
            call = self._library.populate_cuda_graph
            self._library.check(call(handle.ptr, self.argument, pack.argument, graph), "populating a CUDA graph")

        if pack.keep_graph(handle, self._name, fill) and first:
            _log.info("%s: calls with addresses that come again launch a CUDA graph from now on", self._name)

    def lose_graph(self, pack: Pack, status: int) -> None:
        """Falls back to cuDNN's execute after the driver refused to launch the pack's CUDA graph."""
        pack.lose_graph(self._name, status)

    @property
    def _name(self) -> str:
        return f"the plan {self.config.tag}"

    def execute_overridden(
        self,
        handle: Handle,
        pointers: Sequence[int],
        workspace: int,
        override_uids: Sequence[int],
        override_shapes: Sequence[Sequence[int]],
        override_strides: Sequence[Sequence[int]],
    ) -> None:
        """As ``execute``, with other shapes and strides for some tensors, in a graph with ``override_shape``."""
        lib = self._library
        pack = Descriptor(DescriptorType.VARIANT_PACK)
        pack.set(Attribute.VARIANT_PACK_UNIQUE_IDS, self.uids)
        pack.set(Attribute.VARIANT_PACK_DATA_POINTERS, pointers)
        pack.set(Attribute.VARIANT_PACK_WORKSPACE, workspace)
        pack.set(Attribute.VARIANT_PACK_OVERRIDE_UNIQUE_IDS, override_uids)
        nested = [
            (Attribute.VARIANT_PACK_OVERRIDE_SHAPES, _NestedVector(override_shapes)),
            (Attribute.VARIANT_PACK_OVERRIDE_STRIDES, _NestedVector(override_strides)),
        ]
        for attribute, vector in nested:
            status = lib.set_attribute(pack.pointer, attribute, attribute.type, 1, vector.address)
            lib.check(status, f"setting {attribute.name} of the descriptor VARIANT_PACK")
        pack.finalize()
        status = lib.execute_unchecked(resolve(handle).argument, self.argument, library.pointer_argument(pack.pointer))
        if status:
            raise self.failure(status)

    def populate_cuda_graph(self, handle: Handle, pointers: Sequence[int], workspace: int, graph: int) -> None:
        """Adds the plan's nodes to an empty ``cudaGraph_t``.

        Raises:
            cudnnGraphNotSupportedError: the plan lacks the note SUPPORTS_CUDA_GRAPH_NATIVE_API.
        """
        native = behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API
        if not self.fills_cuda_graphs:
            notes = ", ".join(note.name for note in self.config.behavior_notes) or "none"
            raise make_error(
                cudnnGraphNotSupportedError,
                "populate_cuda_graph",
                f"notes of the plan {self.config.tag}",
                notes,
                native.name,
                f"call select_behavior_notes([{native.name}]) before build_plans(), or capture execute() in a "
                "stream instead",
            )
        self._with_cuda_graph(
            self._library.populate_cuda_graph, "populating a CUDA graph", handle, pointers, workspace, graph
        )

    def update_cuda_graph(self, handle: Handle, pointers: Sequence[int], workspace: int, graph: int) -> None:
        """Sets new pointers in the nodes that ``populate_cuda_graph`` added."""
        self._with_cuda_graph(
            self._library.update_cuda_graph, "updating a CUDA graph", handle, pointers, workspace, graph
        )

    def _with_cuda_graph(
        self, call: Any, what: str, handle: Handle, pointers: Sequence[int], workspace: int, graph: int
    ) -> None:
        key = (*pointers, workspace, resolve(handle).ptr)
        pack = self.packs.get(key) or self.pack(key)
        self._library.check(call(handle.ptr, self.argument, pack.argument, graph), what)

    def close(self) -> None:
        """Destroys the plan and its packs."""
        self._drop_packs()
        self.descriptor.close()
        self.argument = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._drop_packs()

    def _drop_packs(self) -> None:
        for handle_packs in self._by_handle.values():
            self._forget(handle_packs.keys)
            self._library.destroy(handle_packs.scratch.argument)
        self._by_handle.clear()


class _Offered(NamedTuple):
    """A configuration of our kernels: how to build its plan, whether it replaces cuDNN's, and its workspace size."""

    config: EngineConfig
    build: Callable[[], ExecutionPlan]
    alone: bool
    workspace: int


class PlanList:
    """The engine configurations of a graph, best first, and the plans built of them.

    Attributes:
        configs: All configurations, including excluded ones.
        where: Name of the graph in messages.
        plans: The built plans, by the index of their configuration.
        chosen: Index of the candidate, the plan to execute; None before it is built.
        modes: The heuristic modes asked so far.
        failures: Why configurations could not be built, by index.
    """

    def __init__(
        self,
        graph: OperationGraph,
        *,
        device_properties: DeviceProperties | None = None,
        sm_count: int | None = None,
        kernel_cache: KernelCache | None = None,
        where: str = "graph",
    ) -> None:
        self.graph = graph
        self.where = where
        self.configs: list[EngineConfig] = []
        self.modes: list[heur_mode] = []
        self.plans: dict[int, ExecutionPlan] = {}
        self.chosen: int | None = None
        self._device_properties = device_properties
        self._sm_count = sm_count
        self._kernel_cache = kernel_cache
        self._denials: list[Callable[[EngineConfig], str]] = []
        self._offered: _Offered | None = None
        self.failures: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.configs)

    def offer(self, config: EngineConfig, build: Callable[[], ExecutionPlan], alone: bool) -> None:
        """Adds a configuration of our kernels before those of the heuristics or, with ``alone``, instead of them.

        Its plan cannot populate CUDA graphs, so its workspace also fits the first allowed configuration of cuDNN that
        can. ``build`` builds its plan, or raises :class:`CudnnError`. The mode FALLBACK, which asks for plans that run
        rather than for fast ones, does not add it.
        """
        self._offered = _Offered(config, build, alone, config.workspace_size)

    def add(self, modes: Iterable[heur_mode]) -> None:
        """Appends the configurations of these heuristic modes.

        Raises:
            cudnnGraphNotSupportedError: cuDNN has none.
        """
        reasons: list[str] = []
        offered = self._offered
        ours, alone = (None, False) if offered is None else (offered.config, offered.alone)
        for mode in modes:
            self.modes.append(mode)
            if ours is not None and ours not in self.configs and (alone or mode is not heur_mode.FALLBACK):
                self.configs.append(ours)
            if alone:
                continue
            answer = heuristics(self.graph, mode, self._device_properties, self._sm_count)
            self.configs += answer.configs
            reasons += [answer.reason] if answer.reason else []
        self._reserve_workspace()
        if not self.configs or (self.configs == [ours] and not alone):
            what = "cuDNN has no engine configuration for this graph"
            raise self._refused(what, reasons or ["no heuristic mode was asked"])

    def _reserve_workspace(self) -> None:
        """Grows the workspace of the offered configuration to fit the plan that populates CUDA graphs instead of it."""
        offered = self._offered
        if offered is not None and offered.config in self.configs:
            native_configs = (
                config for config in self.configs if config is not offered.config and _fills_cuda_graphs(config)
            )
            native_workspace = next(
                (config.workspace_size for config in native_configs if not self._denial_reason(config)), 0
            )
            offered.config.workspace_size = max(offered.workspace, native_workspace)

    def append(self, config: EngineConfig) -> None:
        """Adds one configuration that the caller chose."""
        self.configs.append(config)

    def deselect_engines(self, names: Sequence[str]) -> None:
        """Excludes configurations whose tag contains one of these texts, such as ``"eng3"``."""
        self.deny(lambda config: next((f"excluded by name ({name})" for name in names if name in config.tag), ""))

    def deselect_workspace_greater_than(self, size: int) -> None:
        """Excludes configurations that need more than ``size`` bytes of workspace."""

        def deny(config: EngineConfig) -> str:
            need = config.workspace_size
            return f"needs {need} bytes of workspace, over the limit of {size}" if need > size else ""

        self.deny(deny)

    def deselect_numeric_notes(self, notes: Sequence[numerical_note]) -> None:
        """Excludes configurations with any of these notes."""
        self.deny(lambda config: _first("has the note", [note for note in notes if note in config.numerical_notes]))

    def deselect_behavior_notes(self, notes: Sequence[behavior_note]) -> None:
        """Excludes configurations with any of these notes."""
        self.deny(lambda config: _first("has the note", [note for note in notes if note in config.behavior_notes]))

    def select_numeric_notes(self, notes: Sequence[numerical_note]) -> None:
        """Excludes configurations that lack any of these notes."""
        self.deny(
            lambda config: _first("lacks the note", [note for note in notes if note not in config.numerical_notes])
        )

    def select_behavior_notes(self, notes: Sequence[behavior_note]) -> None:
        """Excludes configurations that lack any of these notes."""
        self.deny(
            lambda config: _first("lacks the note", [note for note in notes if note not in config.behavior_notes])
        )

    def deny(self, deny: Callable[[EngineConfig], str]) -> None:
        """Excludes configurations for which the function returns a reason; ``""`` allows a configuration."""
        self._denials.append(deny)
        self._reserve_workspace()
        if self.chosen is not None and deny(self.configs[self.chosen]):
            self.chosen = None

    def _denial_reason(self, config: EngineConfig) -> str:
        """The reason why a configuration is excluded, or ``""``."""
        try:
            reason = next(filter(None, (deny(config) for deny in self._denials)), "")
            if not reason and config.shared_memory_used > _MAX_SHARED_MEMORY:
                reason = f"asks for {config.shared_memory_used} bytes of shared memory"
        except CudnnError as error:
            reason = str(error)
        return reason

    def refusals(self) -> dict[int, str]:
        """Why configurations are excluded, or could not be built, by index."""
        reasons = {i: self._denial_reason(config) or self.failures.get(i, "") for i, config in enumerate(self.configs)}
        return {index: reason for index, reason in reasons.items() if reason}

    def check_support(self) -> None:
        """Builds nothing.

        Raises:
            cudnnGraphNotSupportedError: every configuration is excluded.
        """
        reasons: list[str] = []
        for config in self.configs:
            reason = self._denial_reason(config)
            if not reason:
                return
            reasons.append(f"{config.tag} {reason}")
        raise self._refused("no engine configuration may be used", reasons)

    def build(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Builds the first configuration that works, or all of them; the candidate is the first that was built.

        Raises:
            cudnnGraphNotSupportedError: none works.
        """
        if self.chosen is not None and policy is build_plan_policy.HEURISTICS_CHOICE:
            return
        reasons: list[str] = []
        for index in self._allowed(reasons):
            try:
                self._build(index)
            except CudnnError as error:
                reasons.append(f"{self.configs[index].tag} {error}")
                continue
            if self.chosen is None:
                self.chosen = index
            if policy is build_plan_policy.HEURISTICS_CHOICE:
                return
        if self.chosen is None:
            raise self._refused("no engine configuration can be built", reasons)

    def _allowed(self, reasons: list[str]) -> Iterator[int]:
        for index, config in enumerate(self.configs):
            reason = self._denial_reason(config)
            if reason:
                reasons.append(f"{config.tag} {reason}")
            else:
                yield index

    def build_at(self, index: int) -> None:
        """Builds one configuration and makes it the candidate.

        Raises:
            RuntimeError: the index is out of range.
            cudnnGraphNotSupportedError: it is excluded, or cuDNN refuses it.
        """
        config = self.config_at(index)
        reason = self._denial_reason(config)
        if reason:
            raise self._refused(f"the configuration at index {index} may not be used", [f"{config.tag} {reason}"])
        try:
            self._build(index)
        except CudnnError as error:
            if not error.not_supported:
                raise
            raise self._refused(
                f"the configuration at index {index} cannot be built", [f"{config.tag} {error}"]
            ) from error
        self.chosen = index

    def _build(self, index: int) -> None:
        if index in self.plans:
            return
        config = self.configs[index]
        try:
            if self._offered is not None and config is self._offered.config:
                self.plans[index] = self._offered.build()
                return
            self.plans[index] = ExecutionPlan.build(
                config, kernel_cache=self._kernel_cache, device_properties=self._device_properties
            )
        except CudnnError as error:
            self.failures[index] = str(error)
            raise

    def native(self, space: int) -> ExecutionPlan:
        """The first plan that can populate CUDA graphs with ``space`` bytes of workspace; else the candidate."""
        for index in self._allowed([]):
            config = self.configs[index]
            if _fills_cuda_graphs(config) and config.workspace_size <= space:
                with contextlib.suppress(CudnnError):
                    self._build(index)
                    return self.plans[index]
        return self.candidate

    def config_at(self, index: int) -> EngineConfig:
        """The configuration at an index, with its tag, notes and workspace size."""
        if not 0 <= index < len(self.configs):
            allowed = f"0 to {len(self.configs) - 1}" if self.configs else "none before create_execution_plans()"
            raise RuntimeError(f"plan index: got {index}; allowed: {allowed}.")
        return self.configs[index]

    def plan_at(self, index: int) -> ExecutionPlan:
        """The built plan at an index."""
        self.config_at(index)
        if index not in self.plans:
            built = ", ".join(map(str, sorted(self.plans))) or "none"
            hint = f"To fix it, call build_plan_at_index({index})"
            raise RuntimeError(f"plan index: got {index}, which is not built; built: {built}. {hint}.")
        return self.plans[index]

    @property
    def candidate(self) -> ExecutionPlan:
        """The plan to execute.

        Raises:
            RuntimeError: none is built.
        """
        if self.chosen is None:
            raise RuntimeError("No execution plan is built. To fix it, call build() or build_plans() first.")
        return self.plans[self.chosen]

    def _refused(self, what: str, reasons: Sequence[str]) -> cudnnGraphNotSupportedError:
        unique = list(dict.fromkeys(reasons))
        more = f"; and {len(unique) - 8} more" if len(unique) > 8 else ""
        detail = f"{'; '.join(unique[:8]) or 'none'}{more}".rstrip(".")
        error = cudnnGraphNotSupportedError(f"{self.where}: {what}: {detail}. {_EXPLAIN}")
        error.detail = detail
        return error


def _fills_cuda_graphs(config: EngineConfig | Origin) -> bool:
    return behavior_note.SUPPORTS_CUDA_GRAPH_NATIVE_API in config.behavior_notes


def _first(what: str, notes: Sequence[numerical_note | behavior_note]) -> str:
    return f"{what} {notes[0].name}" if notes else ""
