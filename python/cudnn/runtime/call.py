"""The call of a compiled kernel: what a warm ``execute`` costs. What is wrong with a call is found out elsewhere."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn import settings
from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn.runtime.codegen import define
from cudnn.runtime.tensor_guards import like
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.signature import workspace_size

if TYPE_CHECKING:
    from cudnn.fused.host import FusedAPI


class Plan:
    """How an API runs on an architecture: a kernel, not loaded yet, and the slots of its arguments, in order.

    Slots are named after the API's tensors and scalars, and ``workspace``, ``num_sms``, ``stream``. The CTAs of
    a ``cluster`` start together. ``notice`` is said in the log, once for each API.
    """

    def __init__(self, source: str, configuration: Any, cluster: tuple[int, int] = (1, 1), notice: str = "") -> None:
        self.source, self.configuration, self.slots = source, configuration, configuration.slots()
        self.cluster_size, self.notice = cluster[0] * cluster[1], notice

    def workspace_size(self, sizes: Any) -> int:
        """Bytes that the kernel needs beside its tensors."""
        return workspace_size(self.slots, sizes)


def kernel_plan(arch: str, configuration: Any, cluster: tuple[int, int] = (1, 1), notice: str = "") -> Plan:
    """The plan of the one kernel that an architecture has for a configuration."""
    return Plan(ARCHITECTURES[arch].source(configuration), configuration, cluster, notice)


_TEMPLATE = '''
def run(tensors, scalars, stream, workspace):
    """What ``execute`` does, with tensors in the order of its signature."""
    global known
    {numbers}
    {checked}
    try:
        {refitted}
        {names}, = tensors
        layout = known
        if {unseen}not layout.alike({present}) or (workspace is not None and workspace is not layout.workspace()):
            layout = check(tensors, scalars, workspace, stream)
            if layout is None:
                return
            known = layout
        index = layout.index
        {values}
        stream = current_stream(index) if stream is None else raw_stream(stream, index)
        {allocated}
        limit = layout.limit
        kernel({arguments})
    except (TypeError, ValueError, AttributeError, RuntimeError):
        again = otherwise(tensors, scalars)
        if again is None:
            raise
        again(tensors, scalars, stream, workspace)
'''
_CHECKED = """
    if s{i} is None:
        s{i} = defaults[{i}]
    elif type(s{i}) is not {kind} or s{i} - s{i} != 0:
        s{i} = number({name!r}, s{i})
"""
_ALLOCATED = """
        if workspace is None:
            workspace = allocated(layout.bytes, stream, t0)
"""


class Layout:
    """Tensors that were checked: types, shapes, strides and devices, not addresses.

    Attributes:
        alike: Whether as many tensors are like them.
        index: Their device.
        limit: How many of its multiprocessors the kernel may use.
        bytes: The size of their workspace.
        workspace: A weak reference to the caller's workspace that was checked last.
    """

    def __init__(self, alike: Callable[..., bool], index: int, limit: int, size: int) -> None:
        self.alike, self.index, self.limit, self.bytes = alike, index, limit, size
        self.workspace: Callable[[], Any] = _none


class Call:
    """A kernel bound to an API's arguments.

    Tensors are checked where their types, shapes or strides are not those of a call before; so is the workspace, and
    that tensors without a sample are None. The kernel itself checks addresses, and raises before it writes anything but
    the workspace. One value remembers all, since several threads may use an object.
    """

    MAX_LAYOUTS = 16

    def __init__(self, api: FusedAPI, plan: Plan, kernel: Callable[..., None]) -> None:
        self.api, self.plan, self.kernel = api, plan, kernel
        if plan.notice:
            say(api._title(), plan.notice)
        self.refits, self.viewing = self._refits(api.refitted), api.views
        self.present = [i for i, name in enumerate(api.names) if api.given(name) and name not in api.unused()]
        self.layouts: list[Layout] = []  # that calls had, the last ones first
        self.validates = api.validates
        self.run = self._written_out()

    def _written_out(self) -> Callable[..., None]:
        """What ``execute`` does: ``run(tensors, scalars, stream, workspace)``, written out for the tensors of this API.

        One Python frame, in which a tensor or number has a variable of its own, takes 0.8 of the time of one that
        passes tuples to others.
        """
        api = self.api
        names = [f"t{i}" for i in range(len(api.names))]
        present = [f"t{i}" for i in self.present]
        absent = [f"t{i}" for i, name in enumerate(api.names) if not api.given(name)]
        numbers = [f"s{i}" for i in range(len(api.scalars))]
        prepares = any(slot.name == "workspace" for slot in self.plan.slots)
        source = _TEMPLATE.format(
            refitted="tensors = refitted(tensors)" if self.refits or self.viewing else "",
            names=", ".join(names),
            unseen="".join(f"{name} is not None or " for name in absent),
            present=", ".join(present),
            values=f"check_values(({', '.join(names)},))" if self.validates else "",
            numbers=f"{', '.join(numbers)}, = scalars" if numbers else "",
            checked="".join(_checked(api, i, name) for i, name in enumerate(api.scalars)).strip(),
            allocated=_ALLOCATED.strip() if prepares else "",
            arguments=_arguments(api, self.plan),
        )
        scope: dict[str, Any] = {
            "kernel": self.kernel,
            "torch": torch,
            "constants": dict(api.constants),
            "known": Layout(lambda *_: False, -1, 0, 0),
            "check": self._check,
            "check_values": api.check_values,
            "refitted": self._refitted,
            "defaults": tuple(getattr(api, name) for name in api.scalars),
            "number": api.checked_number,
            "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "raw_stream": launch.raw_stream,
            "allocated": self._allocated,
            "otherwise": self._otherwise,
        }
        return define("run", source, scope)

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
            workspace = self._allocated(self.plan.workspace_size(self.api.sizes_now(tensors)), 0, tensors[0])
        known = {"kernel": self.kernel, "torch": torch, "constants": dict(self.api.constants)}
        known |= {f"t{i}": tensor for i, tensor in enumerate(tensors)} | {f"s{i}": x for i, x in enumerate(scalars)}
        known |= {"limit": self.api.usable(self.plan, multiprocessors), "stream": 0, "workspace": workspace}
        source = f"def launch({', '.join(known)}):\n    kernel({_arguments(self.api, self.plan)})\n"
        define("launch", source, {})(**known)  # not as globals, which the function would keep

    def _check(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], workspace: Any, stream: Any) -> Layout | None:
        """The layout of a call's tensors, which are checked unless it is known; None where there is nothing to launch.
        The workspace is checked.
        """
        api, index = self.api, tensors[0].get_device()
        if index < 0:
            api.run_on_cpu(tensors, scalars, stream, workspace)
            return None
        api.check_as_many(dict(zip(api.names, tensors, strict=True)))
        present = [tensors[i] for i in self.present]
        found = next((layout for layout in self.layouts if layout.alike(*present)), None)
        if found is None:
            sizes = api.explain(tensors, scalars)
            if api.is_empty(tensors):
                with on_stream(stream, tensors[0]):
                    api.run_empty(tensors)
                return None
            limit = api.usable(self.plan, api.multiprocessors(index))
            found = Layout(like(present), index, limit, self.plan.workspace_size(sizes))
            self.layouts = [found, *self.layouts[: self.MAX_LAYOUTS - 1]]
        if workspace is not None and workspace is not found.workspace():
            api.check_workspace(tensors, workspace, self.plan)
            found.workspace = weakref.ref(workspace)
        return found

    def _allocated(self, size: int, stream: int, first: Any) -> Any:
        """Memory of this call, which PyTorch's allocator knows to be used on ``stream``."""
        with on_stream(stream, first):
            return torch.empty(size, dtype=torch.uint8, device=first.device)


def _arguments(api: FusedAPI, plan: Plan) -> str:
    """A kernel's arguments as source text: tensors t0 ..., scalars s0 ..., limit, stream, workspace.

    Packed elements are taken as bytes, signed bytes as exponents.
    """
    views = {torch.float4_e2m1fn_x2: torch.uint8, torch.int8: torch.float8_e8m0fnu}
    text = {"num_sms": "limit", "stream": "stream", "workspace": "workspace"}
    text |= {name: f"s{i}" for i, name in enumerate(api.scalars)}
    for i, name in enumerate(api.names):
        viewed = api.given(name) and api.dtype(name) in views
        text[name] = f"t{i}.view({views[api.dtype(name)]})" if viewed else f"t{i}"
    text |= {name: f"constants[{name!r}]" for name in api.constants}
    return ", ".join(text[slot.name] for slot in plan.slots)


def _checked(api: FusedAPI, i: int, name: str) -> str:
    """The check of a number that a call gives, as source text: of none that is finite and of its type."""
    return _CHECKED.strip("\n").format(i=i, name=name, kind="int" if name in api.integers else "float") + "\n"


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
