"""The call of a compiled kernel: what a warm ``execute`` costs. What is wrong with a call is found out elsewhere."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cudnn import launch, settings
from cudnn.fused.layouts import BlockScales, Matrix
from cudnn.lazy import torch
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.signature import workspace_size

if TYPE_CHECKING:
    from cudnn.fused.host import FusedAPI


class Plan(Protocol):
    """How an API runs on an architecture: a kernel, not loaded yet, and the slots of its arguments, in order.

    Slots are named after the API's tensors and scalars, and ``workspace``, ``multiprocessors``, ``stream``.
    ``cluster_size`` CTAs start together. ``notice`` is said in the log, once for each API.
    """

    @property
    def source(self) -> str: ...
    @property
    def configuration(self) -> Any: ...
    @property
    def slots(self) -> Sequence[Any]: ...
    @property
    def cluster_size(self) -> int: ...
    @property
    def notice(self) -> str: ...
    def workspace_size(self, sizes: Any) -> int:
        """Bytes that the kernel needs beside its tensors."""
        ...


class KernelPlan:
    """One kernel on tensors as they are."""

    cluster_size = 1
    notice = ""

    def __init__(self, source: str, configuration: Any) -> None:
        self.source, self.configuration, self.slots = source, configuration, configuration.slots()

    def workspace_size(self, sizes: Any) -> int:
        """Bytes of the workspace for a call's sizes."""
        return workspace_size(self.slots, sizes)


def kernel_plan(arch: str, configuration: Any) -> KernelPlan:
    """The plan of the one kernel that an architecture has for a configuration."""
    return KernelPlan(ARCHITECTURES[arch].source(configuration), configuration)


_TEMPLATE = '''
def run(tensors, scalars, stream, workspace):
    """What ``execute`` does, with tensors in the order of its signature."""
    global checked
    try:
        index = tensors[0].get_device()
        if index < 0:
            on_cpu(tensors, scalars, stream, workspace)
            return
        tensors = {refitted}
        {names}, = tensors
        {known}known = checked
        if {unseen} or (workspace is not None and workspace is not known()):
            accepted = check(tensors, workspace, stream)
            if accepted is None:
                return
            checked = accepted
        {numbers}
        {defaults}
        limit = known_limit(index) or limit_of(index)
        stream = current_stream(index) if stream is None else raw_stream(stream, index)
        {allocated}
        kernel({arguments})
    except (TypeError, ValueError, AttributeError, RuntimeError):
        again = otherwise(tensors, scalars)
        if again is None:
            raise
        again(tensors, scalars, stream, workspace)
'''


class Call:
    """A kernel bound to an API's arguments.

    The kernel itself checks types, strides and the shapes that share sizes, and raises before it writes anything but
    the workspace. Shapes that it cannot relate are checked when they change; so is the workspace, and that tensors
    without a sample are None. One value remembers all, since several threads may use an object.
    """

    def __init__(self, api: FusedAPI, plan: Plan, kernel: Callable[..., None]) -> None:
        self.api, self.plan, self.kernel = api, plan, kernel
        if plan.notice:
            say(api._title(), plan.notice)
        self.refits, self.viewing = self._refits(api.refitted), api.views
        self.sized = [name for name in (*api.sized_by, *api.counted_by) if api.given(name)]
        self.room: tuple[Any, int] = (None, 0)  # shapes, and the bytes of their workspace
        self.limits: dict[int, int] = {}
        self.unrelated = _unrelated(api)
        self.run = self._written_out()

    def _written_out(self) -> Callable[..., None]:
        """What ``execute`` does: ``run(tensors, scalars, stream, workspace)``, written out for the tensors of this API.

        One Python frame, in which a tensor or number has a variable of its own, takes 0.8 of the time of one that
        passes tuples to others.
        """
        api = self.api
        names = [f"t{i}" for i in range(len(api.names))]
        unrelated = [api.names.index(name) for name in self.unrelated]
        absent = [f"t{i}" for i, name in enumerate(api.names) if not api.given(name)]
        unseen = [f"t{i}.shape != k{i}" for i in unrelated] + [f"{name} is not None" for name in absent]
        numbers = [f"s{i}" for i in range(len(api.scalars))]
        defaults = [f"        if s{i} is None:\n            s{i} = defaults[{i}]" for i in range(len(numbers))]
        prepares = any(slot.name == "workspace" for slot in self.plan.slots)
        source = _TEMPLATE.format(
            refitted="refitted(tensors)" if self.refits or self.viewing else "tensors",
            names=", ".join(names),
            known="".join(f"k{i}, " for i in unrelated),
            unseen=" or ".join(unseen),
            numbers=f"{', '.join(numbers)}, = scalars" if numbers else "",
            defaults="\n".join(defaults).strip(),
            allocated="if workspace is None: workspace = allocated(tensors, stream)" if prepares else "",
            arguments=_arguments(api, self.plan),
        )
        scope: dict[str, Any] = {
            "kernel": self.kernel,
            "torch": torch,
            "constants": dict(api.constants),
            "checked": (*(None for _ in unrelated), _none),
            "check": self._check,
            "on_cpu": api.run_on_cpu,
            "refitted": self._refitted,
            "defaults": tuple(getattr(api, name) for name in api.scalars),
            "known_limit": self.limits.get,
            "limit_of": self._limit,
            "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "raw_stream": launch.raw_stream,
            "allocated": self._allocated,
            "otherwise": self._otherwise,
        }
        exec(compile(source, __file__, "exec"), scope)
        return scope["run"]

    def _otherwise(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> Callable[..., None] | None:
        """After an error: what runs a call whose tensors are to be seen in other dimensions; None where none are.

        Raises:
            TypeError, ValueError: what is wrong with the call, where a tensor or number is at fault.
        """
        if self.api.viewed_call(tensors) is not tensors:  # also where another thread has just found out
            self.viewing = True
        else:
            self.api.explain(tensors, scalars)  # says it better than the error
            others = self.api.unfitting(dict(zip(self.api.names, tensors, strict=True)))
            if not others:
                return None
            self.refits = [*self.refits, *self._refits(others)]
        self.api.run = self._written_out()
        return self.api.run

    def _refits(self, names: Sequence[str]) -> list[tuple[int, Callable[[Any], Any]]]:
        """Which tensors are brought into the dimensions of their layouts, and how."""
        return [(self.api.names.index(name), self.api.spec(name).layout.fitted) for name in names]

    def _refitted(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        found = list(self.api.viewed_call(tensors) if self.viewing else tensors)
        for i, fitted in self.refits:
            if found[i] is not None:
                found[i] = fitted(found[i])
        return tuple(found)

    def emulate(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], multiprocessors: int, workspace: Any) -> None:
        """The same in the emulator, for tensors that were checked."""
        if workspace is None and any(slot.name == "workspace" for slot in self.plan.slots):
            workspace = self._allocated(tensors, 0)
        known = {"kernel": self.kernel, "torch": torch, "constants": dict(self.api.constants)}
        known |= {f"t{i}": tensor for i, tensor in enumerate(tensors)} | {f"s{i}": x for i, x in enumerate(scalars)}
        known |= {"limit": self.api.usable(self.plan, multiprocessors), "stream": 0, "workspace": workspace}
        eval(f"kernel({_arguments(self.api, self.plan)})", known)

    def _check(self, tensors: tuple[Any, ...], workspace: Any, stream: Any) -> tuple[Any, ...] | None:
        """Checks shapes and workspace, and returns what to remember of them; None where there is nothing to compute."""
        named = dict(zip(self.api.names, tensors, strict=True))
        self.api.check_as_many(named)
        if self.api.is_empty(tensors):
            with on_stream(stream, tensors[0]):
                self.api.run_empty(tensors)
            return None
        self.api.check_shapes(named)
        known: Callable[[], Any] = _none
        if workspace is not None:
            self.api.check_workspace(tensors, workspace, self.plan)
            known = weakref.ref(workspace)
        return (*(named[name].shape for name in self.unrelated), known)

    def _limit(self, index: int) -> int:
        self.limits[index] = self.api.usable(self.plan, self.api.multiprocessors(index))
        return self.limits[index]

    def _allocated(self, tensors: tuple[Any, ...], stream: int) -> Any:
        """Memory of this call, which PyTorch's allocator knows to be used on ``stream``."""
        shapes = [tensors[self.api.names.index(name)].shape for name in self.sized]
        (known, size), first = self.room, tensors[0]
        if shapes != known:
            size = self.plan.workspace_size(self.api.sizes_now(tensors))
            self.room = (shapes, size)
        with on_stream(stream, first):
            return torch.empty(size, dtype=torch.uint8, device=first.device)


def _arguments(api: FusedAPI, plan: Plan) -> str:
    """A kernel's arguments as source text: tensors t0 ..., scalars s0 ..., limit, stream, workspace.

    Packed elements are taken as bytes, signed bytes as exponents.
    """
    views = {torch.float4_e2m1fn_x2: torch.uint8, torch.int8: torch.float8_e8m0fnu}
    text = {"multiprocessors": "limit", "stream": "stream", "workspace": "workspace"}
    text |= {name: f"s{i}" for i, name in enumerate(api.scalars)}
    for i, name in enumerate(api.names):
        viewed = api.given(name) and api.dtype(name) in views
        text[name] = f"t{i}.view({views[api.dtype(name)]})" if viewed else f"t{i}"
    text |= {name: f"constants[{name!r}]" for name in api.constants}
    return ", ".join(text[slot.name] for slot in plan.slots)


def _unrelated(api: FusedAPI) -> list[str]:
    """Tensors whose shapes tell whether those that the kernel cannot relate are right; the first one, if all are."""
    found = [spec for spec in api.tensors if api.given(spec.name) and not _is_related(api, spec.layout)]
    ruled = [name for name in api.ruled_by() if api.given(name)]
    if not found:
        return list(dict.fromkeys([api.leading(api.descs), *ruled]))
    before = api.sized_by if len(api.sized_by) == 1 else api.sized_by[1:]
    scaled = {size for spec in found if isinstance(x := spec.layout, BlockScales) for size in (x.rows, x.columns)}
    if scaled:  # a factor stands for many sizes: a matrix that has all of them tells, if there is one
        matrices = ((spec.name, spec.layout) for spec in api.tensors if isinstance(spec.layout, Matrix))
        whole = ([name] for name, x in matrices if api.given(name) and scaled <= {x.rows, x.columns})
        before = next(whole, api.sized_by)
    names = [*before, *(spec.name for spec in found), *ruled]
    return [name for name in dict.fromkeys(names) if api.given(name) and name not in api.unused()]


def _is_related(api: FusedAPI, layout: Any) -> bool:
    if isinstance(layout, Matrix):
        return layout.columns not in api.multiples and layout.rows not in api.multiples
    return not isinstance(layout, BlockScales) and not set(getattr(layout, "dims", ())) & set(api.multiples)


@functools.cache
def say(name: str, notice: str) -> None:
    """Says something of an API in the log, once."""
    settings.configure_logging().warning("%s: %s", name, notice)


def _none() -> None:
    """Stands for a reference to a workspace that there is not."""


def on_stream(stream: Any, tensor: Any) -> Any:
    """A context in which PyTorch launches its own kernels on ``stream``, and its allocator knows that memory is used
    there.
    """
    if stream is None or not tensor.is_cuda or stream == launch.raw_stream(None, tensor.get_device()):
        return contextlib.nullcontext()
    address = launch.raw_stream(stream, tensor.get_device())
    return torch.cuda.stream(torch.cuda.ExternalStream(address, device=tensor.device))
