"""Measures the plans of a graph on the caller's data and selects the fastest, also for later processes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn.backend import library
from cudnn.backend.handle import Handle, default_handle, resolve
from cudnn.datatypes import _is_torch_tensor  # pyright: ignore[reportPrivateUsage]
from cudnn.enums import heur_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.lazy import torch
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.program import keys_by_uid

if TYPE_CHECKING:
    from cudnn.wrapper import Graph

_log = logging.getLogger("cudnn")
_WARM_UP = 3
_OTHER_DATA = 1 << 28  # bytes; several times the L2 cache of an H200 (60 MiB)


@dataclass(frozen=True)
class TunedPlan:
    """The measurement of one plan of a graph."""

    index: int
    tag: str  # ``eng<engine>_k<knob>=<value>...``
    microseconds: float | None  # median of one call on the GPU; None if it was not measured, with the reason
    workspace: int | None  # bytes; None if the plan was not built
    reason: str = ""


@dataclass(frozen=True)
class TuningReport:
    """What ``autotune`` measured; prints as a table.

    Attributes:
        plans: Every configuration once, in the order of the heuristics. Empty where the choice came from disk.
        chosen: Name of the plan that ``execute`` now runs.
        from_cache: The choice was read from disk; nothing was measured.
    """

    plans: tuple[TunedPlan, ...]
    chosen: str
    from_cache: bool

    def __str__(self) -> str:
        if self.from_cache:
            return f"{self.chosen}, measured by an earlier run"
        lines = [f"{'plan':<40} {'us':>9} {'workspace':>12}"]
        for plan in sorted(
            self.plans, key=lambda plan: float("inf") if plan.microseconds is None else plan.microseconds
        ):
            microseconds = "-" if plan.microseconds is None else f"{plan.microseconds:.2f}"
            bytes_needed = "-" if plan.workspace is None else str(plan.workspace)
            mark = "  <- chosen" if plan.tag == self.chosen else f"  {plan.reason}"
            lines.append(f"{plan.tag:<40} {microseconds:>9} {bytes_needed:>12}{mark}".rstrip())
        return "\n".join(lines)


def autotune(
    graph: pygraph | Graph,
    tensors: Mapping[Any, Any] | Sequence[Any],
    workspace: Any = None,
    *,
    handle: Handle | int | None = None,
    iterations: int = 20,
    cache: bool = True,
) -> TuningReport:
    """Builds every plan of a graph, times each on the given data, and makes the fastest the one that ``execute`` runs.

    Two CUDA events time each call, with an L2 cache full of other data; the result is the median. Outputs are saved
    before and restored afterwards, so that graphs that work in place can be tuned. The function waits for the GPU and
    allocates memory: copies of the outputs, 256 MiB to flush the cache, and the workspace unless one is passed.
    Afterwards call ``get_workspace_size()`` again: it returns the size of the chosen plan.

    The choice is saved in the folder of compiled kernels (``CUDNN_KERNEL_CACHE``) by the graph's description, the
    version of cuDNN and the name of the GPU. A later call reads it and does not measure.

    Args:
        graph: A ``pygraph``, built or only described (then the modes A, B and FALLBACK give the plans), or a
            ``cudnn.Graph``.
        tensors: As for a call: a dict, or for a ``cudnn.Graph`` also the inputs in order. Outputs must be tensors.
        workspace: A tensor: plans that need more are left out. None: as much as each plan needs is allocated.
        handle: As for ``execute``.
        iterations: Timed calls per plan.
        cache: False neither reads nor writes the choice on disk.

    Raises:
        cudnnGraphNotSupportedError: no plan runs.
        RuntimeError: a stream is being captured, or the graph was restored with its one plan.
        ValueError, TypeError: as for ``execute``; a workspace or an output that is a bare address.
    """
    if not isinstance(graph, pygraph):
        return graph._autotune(  # pyright: ignore[reportPrivateUsage]
            tensors, workspace, handle=handle, iterations=iterations, cache=cache
        )
    if not isinstance(tensors, Mapping):
        raise make_error(
            TypeError, "autotune", "tensors", type(tensors).__name__, "a dict, as for execute", "pass a dict"
        )
    if iterations < 1:
        raise make_error(ValueError, "autotune", "iterations", iterations, "1 or more")
    if isinstance(workspace, int):
        raise make_error(
            TypeError,
            "autotune",
            "workspace",
            "an address",
            "a tensor, whose size is known, or None",
            "pass the tensor",
        )
    if not graph.get_execution_plan_count():
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heur_mode.CUDNN_FIND])
    if graph._runs_on_reference():  # pyright: ignore[reportPrivateUsage]
        return _reference(graph, tensors, handle)
    chosen_handle = graph._handle if handle is None else handle  # pyright: ignore[reportPrivateUsage]
    handle_ = default_handle(graph._device()) if chosen_handle is None else resolve(chosen_handle)  # pyright: ignore[reportPrivateUsage]
    if torch.cuda.is_current_stream_capturing():
        raise make_error(
            RuntimeError, "autotune", "stream", "one being captured", "any other", "tune before the capture"
        )
    choice = _Choice(graph, torch.cuda.get_device_name(handle_.device)) if cache else None
    cached_tag = choice.read() if choice else None
    if cached_tag is not None and _build_cached(graph, cached_tag, workspace):
        return TuningReport((), cached_tag, from_cache=True)
    with _restored_outputs(graph, tensors):
        plans = tuple(_Bench(graph, tensors, workspace, handle_, iterations).plans())
    report = _best(graph, plans)
    _log.info("graph %r tuned:\n%s", graph.name, report)
    if choice:
        choice.write(report.chosen)
    return report


def _best(graph: pygraph, plans: tuple[TunedPlan, ...]) -> TuningReport:
    timed = [plan for plan in plans if plan.microseconds is not None]
    if not timed:
        reasons = "; ".join(f"{plan.tag}: {plan.reason}" for plan in plans[:8])
        raise cudnnGraphNotSupportedError(f"autotune: graph {graph.name!r}: no plan runs: {reasons}")
    best = min(timed, key=lambda plan: plan.microseconds or 0.0)
    graph.build_plan_at_index(best.index)
    return TuningReport(plans, best.tag, from_cache=False)


def _build_cached(graph: pygraph, tag: str, workspace: Any) -> bool:
    """Builds the plan with this name; False if it is missing, unsupported, or needs more than the workspace."""
    for index in range(graph.get_execution_plan_count()):
        if graph.get_plan_name_at_index(index) == tag:
            try:
                graph.build_plan_at_index(index)
            except (cudnnGraphNotSupportedError, RuntimeError) as error:
                _log.info("autotune: plan %s of an earlier run cannot be used: %s", tag, error)
                return False
            return workspace is None or graph.get_workspace_size() <= workspace.nbytes
    return False


def _reference(graph: pygraph, tensors: Mapping[Any, Any], handle: Handle | int | None) -> TuningReport:
    """Times the only plan of the reference executor by the host's clock."""
    graph.build_plans()
    with _restored_outputs(graph, tensors):
        start = time.perf_counter()
        graph.execute_plan_at_index(tensors, None, 0, handle)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        microseconds = 1e6 * (time.perf_counter() - start)
    tag = graph.get_plan_name_at_index(0)
    return TuningReport((TunedPlan(0, tag, microseconds, 0),), tag, from_cache=False)


@contextmanager
def _restored_outputs(graph: pygraph, tensors: Mapping[Any, Any]) -> Iterator[None]:
    """Restores the content of the outputs at the end of the block."""
    by_uid = {uid: tensors[key] for uid, key in keys_by_uid(tensors).items()}
    saved: list[tuple[Any, Any]] = []
    for node in graph.nodes:
        for tensor in node.outputs.values():
            data = None if tensor.is_virtual else by_uid.get(tensor.get_uid())
            if data is None:
                continue
            if isinstance(data, int):
                raise make_error(
                    TypeError,
                    "autotune",
                    f"output {tensor.name!r} (uid {tensor.get_uid()})",
                    "an address",
                    "a tensor, whose content is put back after the measurement",
                    "pass the tensor",
                )
            view = data if _is_torch_tensor(data) else torch.from_dlpack(data)
            saved.append((view, view.detach().clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for view, content in saved:
                view.copy_(content)


class _Bench:
    """Times the plans of one graph on a GPU."""

    def __init__(
        self, graph: pygraph, tensors: Mapping[Any, Any], workspace: Any, handle: Handle, iterations: int
    ) -> None:
        self._graph, self._tensors, self._workspace, self._handle = graph, tensors, workspace, handle
        self._device = torch.device("cuda", handle.device)
        default = torch.cuda.default_stream(self._device)
        external = torch.cuda.ExternalStream
        self._stream = external(handle.stream, device=self._device) if handle.stream else default
        torch.cuda.synchronize(self._device)  # the data may have been written on another stream
        self._other = torch.empty(_OTHER_DATA, dtype=torch.uint8, device=self._device)
        self._events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in ("start", "end")) for _ in range(iterations)
        ]

    def plans(self) -> Iterator[TunedPlan]:
        """Every configuration once: two heuristic modes can return the same one."""
        seen: set[str] = set()
        for index in range(self._graph.get_execution_plan_count()):
            tag = self._graph.get_plan_name_at_index(index)
            if tag not in seen:
                seen.add(tag)
                yield self._plan(index, tag)

    def _plan(self, index: int, tag: str) -> TunedPlan:
        size = None
        try:
            self._graph.build_plan_at_index(index)
            size = self._graph.get_workspace_size_plan_at_index(index)
            if self._workspace is not None and size > self._workspace.nbytes:
                return TunedPlan(index, tag, None, size, f"the workspace has {self._workspace.nbytes} bytes")
            space = self._workspace
            if space is None:
                space = torch.empty(size, dtype=torch.uint8, device=self._device)
            microseconds = self._time(
                lambda: self._graph.execute_plan_at_index(self._tensors, space, index, self._handle)
            )
        except (cudnnGraphNotSupportedError, RuntimeError) as error:
            return TunedPlan(index, tag, None, size, str(error))
        return TunedPlan(index, tag, microseconds, size)

    def _time(self, call: Callable[[], None]) -> float:
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP):
                    call()
                for start, end in self._events:
                    # Evicts the data from the L2 cache, and takes longer than the host needs to enqueue the call.
                    self._other.zero_()
                    start.record()
                    call()
                    end.record()
        finally:
            self._stream.synchronize()  # what was queued still uses the memory of this measurement
        return 1e3 * statistics.median(start.elapsed_time(end) for start, end in self._events)


class _Choice:
    """The plan chosen for one graph, cuDNN and GPU, as a file."""

    def __init__(self, graph: pygraph, device: str) -> None:
        from cudnn.runtime.cache import user

        self._key = {"graph": repr(graph), "cudnn": library.version(), "device": device}
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()
        self._store = user()
        self._path = None if self._store is None else self._store.folder / "plans" / f"{digest[:32]}.json"

    def read(self) -> str | None:
        """Name of the saved plan; None if no choice is saved."""
        if self._path is None:
            return None
        try:
            stored = json.loads(self._path.read_bytes())
            return stored["plan"] if {key: stored[key] for key in self._key} == self._key else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("autotune: %s cannot be read and will be rewritten: %s", self._path, error)
            return None

    def write(self, tag: str) -> None:
        """Saves the name of the plan. If the folder is not writable, the next run measures again."""
        if self._store is None or self._path is None:
            return
        try:
            self._store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, suffix=".tmp")
            with open(descriptor, "w") as file:
                json.dump({**self._key, "plan": tag}, file)
            os.replace(temporary, self._path)  # a reader sees the old file or the new one
        except OSError as error:
            _log.warning("autotune: the choice could not be saved: %s", error)
