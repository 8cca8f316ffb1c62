"""The call of a compiled kernel: what a warm ``execute`` costs. What is wrong with a call is found out elsewhere."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from cudnn import launch, settings
from cudnn.fused.layouts import BlockScales, Matrix
from cudnn.lazy import torch
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.signature import signature, workspace_size

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
        self.source, self.configuration, self.slots = source, configuration, signature(configuration)

    def workspace_size(self, sizes: Any) -> int:
        """Bytes of the workspace for a call's sizes."""
        return workspace_size(self.slots, sizes)


def kernel_plan(arch: str, configuration: Any) -> KernelPlan:
    """The plan of the one kernel that an architecture has for a configuration."""
    return KernelPlan(ARCHITECTURES[arch].source(configuration), configuration)


class Call:
    """A kernel bound to an API's arguments.

    The kernel itself checks types, strides and the shapes that share sizes, and raises before it writes anything but
    the workspace. Shapes that it cannot relate are checked when they change; so is the workspace, and that tensors
    without a sample are None. One value remembers all, since several threads may use an object.
    """

    def __init__(self, api: FusedAPI, plan: Plan, kernel: Callable[..., None]) -> None:
        self.api, self.plan = api, plan
        if plan.notice:
            say(api._title(), plan.notice)
        self.call = _written_out(api, plan, kernel)
        absent = [name for name in api.names if not api.given(name)]
        self.seen = _picked(api, _unrelated(api), absent)
        self.leading = api.names.index(api.leading(api.descs))
        self.refits, self.viewing = self._refits(api.refitted), api.views
        self.defaults = tuple(getattr(api, name) for name in api.scalars)
        self.unset = (None,) * len(self.defaults)
        self.prepares = any(slot.name == "workspace" for slot in plan.slots)
        self.sized = _picked(api, [name for name in (*api.sized_by, *api.counted_by) if api.given(name)])
        self.room: tuple[Any, int] = (None, 0)  # shapes, and the bytes of their workspace
        self.limits: dict[int, int] = {}
        self.checked: tuple[Any, Callable[[], Any]] = (None, _none)
        self.current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def run(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], stream: Any, workspace: Any) -> None:
        """What ``execute`` does, with tensors in the order of its signature."""
        try:
            index = tensors[0].get_device()
            if index < 0:
                self.api.run_on_cpu(tensors, scalars, stream, workspace)
                return
            if self.refits or self.viewing:
                tensors = self._refitted(tensors)
            seen = self.seen(tensors)
            checked, known = self.checked
            if seen != checked or (workspace is not None and workspace is not known()):
                named = dict(zip(self.api.names, tensors, strict=True))
                self.api.check_as_many(named)
                if 0 in tensors[self.leading].shape:
                    self.api.run_empty(tensors)
                    return
                self._check(tensors, named, seen, workspace)
            if scalars == self.unset:
                scalars = self.defaults
            elif None in scalars:
                scalars = tuple(d if s is None else s for s, d in zip(scalars, self.defaults, strict=True))
            limit = self.limits.get(index) or self._limit(index)
            stream = self.current_stream(index) if stream is None else launch.raw_stream(stream, index)
            if self.prepares and workspace is None:
                workspace = self._allocated(tensors, stream)
            self.call(tensors, scalars, limit, stream, workspace)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            if not self.viewing and self.api.viewed_call(tensors) is not tensors:
                self.viewing = True
                self.run(tensors, scalars, stream, workspace)
                return
            self.api.explain(tensors, scalars)  # says it better, where a tensor is at fault
            others = self.api.unfitting(dict(zip(self.api.names, tensors, strict=True)))
            if not others:
                raise
            self.refits = [*self.refits, *self._refits(others)]
            self.run(tensors, scalars, stream, workspace)

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
        if self.prepares and workspace is None:
            workspace = self._allocated(tensors, 0)
        self.call(tensors, scalars, self.api.usable(self.plan, multiprocessors), 0, workspace)

    def _check(self, tensors: tuple[Any, ...], named: Mapping[str, Any], seen: Any, workspace: Any) -> None:
        """Checks shapes and workspace, and remembers them."""
        self.api.check_shapes(named)
        known: Callable[[], Any] = _none
        if workspace is not None:
            self.api.check_workspace(tensors, workspace, self.plan)
            known = weakref.ref(workspace)
        self.checked = (seen, known)

    def _limit(self, index: int) -> int:
        self.limits[index] = self.api.usable(self.plan, self.api.multiprocessors(index))
        return self.limits[index]

    def _allocated(self, tensors: tuple[Any, ...], stream: int) -> Any:
        """Memory of this call, which PyTorch's allocator knows to be used on ``stream``."""
        shapes, (known, size), first = self.sized(tensors), self.room, tensors[0]
        if shapes != known:
            size = self.plan.workspace_size(self.api.sizes_now(tensors))
            self.room = (shapes, size)
        with _allocating_for(stream, first):
            return torch.empty(size, dtype=torch.uint8, device=first.device)


def _written_out(api: FusedAPI, plan: Plan, kernel: Callable[..., None]) -> Callable[..., None]:
    """Calls a kernel with a call's tensors and scalars, the number of multiprocessors, stream and workspace.

    Written out, it takes a third of the time of picking from a tuple of them all. Packed elements are taken as bytes,
    signed bytes as exponents.
    """
    views = {torch.float4_e2m1fn_x2: torch.uint8, torch.int8: torch.float8_e8m0fnu}
    text = {"multiprocessors": "limit", "stream": "stream", "workspace": "workspace"}
    text |= {name: f"scalars[{i}]" for i, name in enumerate(api.scalars)}
    for i, name in enumerate(api.names):
        viewed = api.given(name) and api.dtype(name) in views
        text[name] = f"tensors[{i}].view({views[api.dtype(name)]})" if viewed else f"tensors[{i}]"
    text |= {name: f"constants[{name!r}]" for name in api.constants}
    arguments = ", ".join(text[slot.name] for slot in plan.slots)
    known = {"kernel": kernel, "torch": torch, "constants": dict(api.constants)}
    return eval(f"lambda tensors, scalars, limit, stream, workspace: kernel({arguments})", known)


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


def _picked(api: FusedAPI, shapes: Sequence[str], whole: Sequence[str] = ()) -> Callable[[Sequence[Any]], Any]:
    """The shapes of some tensors of a call, and others whole. Written out, four take two thirds of a loop's time."""
    parts = [f"tensors[{api.names.index(name)}].shape" for name in shapes]
    parts += [f"tensors[{api.names.index(name)}]" for name in whole]
    return eval(f"lambda tensors: ({', '.join(parts)},)")


@functools.cache
def say(name: str, notice: str) -> None:
    """Says something of an API in the log, once."""
    settings.configure_logging().warning("%s: %s", name, notice)


def _none() -> None:
    """Stands for a reference to a workspace that there is not."""


def _allocating_for(stream: int, tensor: Any) -> Any:
    """A context in which PyTorch's allocator knows that memory is used on ``stream``."""
    if not tensor.is_cuda or stream == launch.raw_stream(None, tensor.get_device()):
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=tensor.device))
