"""The warm path of ``execute``: a generated function that compares tensors with those checked before and launches."""

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
from cudnn.runtime.launch_capture import captures, record
from cudnn.runtime.tensor_guards import guard
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.signature import workspace_size

if TYPE_CHECKING:
    from cudnn.fused.host import FusedAPI


class KernelPlan:
    """How an API runs on an architecture: a kernel, not loaded yet, and the slots of its arguments, in order.

    Slots are named after the API's tensors and scalars, and ``workspace``, ``num_sms``, ``stream``. ``cluster`` is the
    cluster shape in CTAs. ``warning`` is logged once for each API.
    """

    def __init__(self, source: str, configuration: Any, cluster: tuple[int, int] = (1, 1), warning: str = "") -> None:
        self.source, self.configuration, self.slots = source, configuration, configuration.slots()
        self.cluster_size, self.warning = cluster[0] * cluster[1], warning

    def workspace_size(self, sizes: Any) -> int:
        """Bytes of the workspace."""
        return workspace_size(self.slots, sizes)


def kernel_plan(arch: str, configuration: Any, cluster: tuple[int, int] = (1, 1), warning: str = "") -> KernelPlan:
    """The plan for the kernel of a configuration on an architecture."""
    return KernelPlan(ARCHITECTURES[arch].source(configuration), configuration, cluster, warning)


_TEMPLATE = '''
def run(tensors, scalars, stream, workspace):
    """What ``execute`` does, with tensors in the order of its signature."""
    global last
    {numbers}
    {checked}
    try:
        {canonicalized}
        {names}, = tensors
        layout = last
        if {absent}not layout.matches({present}) or (workspace is not None and workspace is not layout.workspace()):
            layout = check(tensors, scalars, workspace, stream)
            if layout is None:
                return
            last = layout
        index = layout.index
        {values}
        stream = current_stream(index) if stream is None else raw_stream(stream, index)
        {allocated}
        num_sms = layout.num_sms
        kernel({arguments})
        if captures:
            record(kernel, slots, ({arguments},))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        retry = recover(tensors, scalars)
        if retry is None:
            raise
        retry(tensors, scalars, stream, workspace)
'''
_CHECKED = """
    if s{i} is None:
        s{i} = defaults[{i}]
    elif type(s{i}) is not {type_name} or s{i} - s{i} != 0:
        s{i} = check_number({name!r}, s{i})
"""
_ALLOCATED = """
        if workspace is None:
            workspace = allocated(layout.bytes, stream, t0)
"""


class CheckedTensors:
    """The guard of a call's tensors that passed the checks: dtypes, shapes, strides and devices, not addresses.

    Attributes:
        matches: Whether other tensors have the same dtypes, shapes, strides and devices.
        index: The index of their CUDA device.
        num_sms: The number of SMs that the kernel may use.
        bytes: The size of their workspace.
        workspace: A weak reference to the workspace of the caller that was checked last.
    """

    def __init__(self, matches: Callable[..., bool], index: int, num_sms: int, size: int) -> None:
        self.matches, self.index, self.num_sms, self.bytes = matches, index, num_sms, size
        self.workspace: Callable[[], Any] = _none


class Call:
    """A kernel bound to an API's arguments.

    Tensors are checked if their dtypes, shapes or strides differ from those of the last calls. The workspace is checked
    if it is another tensor. Tensors without a sample have to be None. The kernel itself checks addresses, and raises
    before it writes anything but the workspace. All state of the last call is one value, because several threads may
    use an object.
    """

    MAX_CHECKED = 16

    def __init__(self, api: FusedAPI, plan: KernelPlan, kernel: Callable[..., None]) -> None:
        self.api, self.plan, self.kernel = api, plan, kernel
        if plan.warning:
            warn_once(api._title(), plan.warning)
        self.canonicalizers, self.reinterprets = self._canonicalizers(api.noncanonical_samples), api.reinterprets
        self.present = [i for i, name in enumerate(api.names) if api.has(name) and name not in api.unused()]
        self.checked: list[CheckedTensors] = []  # most recently checked first
        self.validates = api.validates
        self.run = self._generate()

    def _generate(self) -> Callable[..., None]:
        """What ``execute`` does: ``run(tensors, scalars, stream, workspace)``, generated for the tensors of this API.

        One Python frame with a local variable for each tensor and number takes 0.8 of the time of a frame that passes
        tuples to other functions.
        """
        api = self.api
        names = [f"t{i}" for i in range(len(api.names))]
        present = [f"t{i}" for i in self.present]
        absent = [f"t{i}" for i, name in enumerate(api.names) if not api.has(name)]
        numbers = [f"s{i}" for i in range(len(api.scalars))]
        prepares = any(slot.name == "workspace" for slot in self.plan.slots)
        source = _TEMPLATE.format(
            canonicalized="tensors = canonicalized(tensors)" if self.canonicalizers or self.reinterprets else "",
            names=", ".join(names),
            absent="".join(f"{name} is not None or " for name in absent),
            present=", ".join(present),
            values=f"check_values(({', '.join(names)},))" if self.validates else "",
            numbers=f"{', '.join(numbers)}, = scalars" if numbers else "",
            checked="".join(_checked(api, i, name) for i, name in enumerate(api.scalars)).strip(),
            allocated=_ALLOCATED.strip() if prepares else "",
            arguments=_arguments(api, self.plan),
        )
        scope: dict[str, Any] = {
            "kernel": self.kernel,
            "slots": self.plan.slots,
            "captures": captures,
            "record": record,
            "torch": torch,
            "constants": dict(api.constants),
            "last": CheckedTensors(lambda *_: False, -1, 0, 0),
            "check": self._check,
            "check_values": api.check_values,
            "canonicalized": self._canonicalized,
            "defaults": tuple(getattr(api, name) for name in api.scalars),
            "check_number": api.checked_number,
            "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "raw_stream": launch.raw_stream,
            "allocated": self._allocated,
            "recover": self._recover,
        }
        return define("run", source, scope)

    def _recover(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...]) -> Callable[..., None] | None:
        """After an error: the function that runs the call after its tensors are canonicalized; None if they all are.

        Raises:
            TypeError, ValueError: a tensor or number of the call is wrong.
        """
        if self.api.reinterpret_call(tensors) is not tensors:  # also if another thread has just regenerated it
            self.reinterprets = True
        else:
            self.api.check_call(tensors, scalars)  # raises a clearer error
            noncanonical = self.api.noncanonical(dict(zip(self.api.names, tensors, strict=True)))
            if not noncanonical:
                return None
            self.canonicalizers = [*self.canonicalizers, *self._canonicalizers(noncanonical)]
        self.api.run = self._generate()
        return self.api.run

    def _canonicalizers(self, names: Sequence[str]) -> list[tuple[int, Callable[[Any], Any]]]:
        """The indices of tensors that are not canonical, and the functions that canonicalize them."""
        return [(self.api.names.index(name), self.api.spec(name).layout.canonicalize) for name in names]

    def _canonicalized(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        canonical = list(self.api.reinterpret_call(tensors) if self.reinterprets else tensors)
        for i, canonicalize in self.canonicalizers:
            if canonical[i] is not None:
                canonical[i] = canonicalize(canonical[i])
        return tuple(canonical)

    def emulate(self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], num_sms: int, workspace: Any) -> None:
        """Runs the kernel in the emulator on checked tensors."""
        if workspace is None and any(slot.name == "workspace" for slot in self.plan.slots):
            workspace = self._allocated(self.plan.workspace_size(self.api.sizes_now(tensors)), 0, tensors[0])
        scope = {"kernel": self.kernel, "torch": torch, "constants": dict(self.api.constants)}
        scope |= {f"t{i}": tensor for i, tensor in enumerate(tensors)} | {f"s{i}": x for i, x in enumerate(scalars)}
        scope |= {"num_sms": self.api.usable_sms(self.plan, num_sms), "stream": 0, "workspace": workspace}
        source = f"def launch({', '.join(scope)}):\n    kernel({_arguments(self.api, self.plan)})\n"
        define("launch", source, {})(**scope)  # not as globals, which the function would keep

    def _check(
        self, tensors: tuple[Any, ...], scalars: tuple[Any, ...], workspace: Any, stream: Any
    ) -> CheckedTensors | None:
        """The guard of a call's tensors, which are checked unless a guard matches; None if there is nothing to launch.

        The workspace is checked.
        """
        api, index = self.api, tensors[0].get_device()
        if index < 0:
            api.run_on_cpu(tensors, scalars, stream, workspace)
            return None
        api.check_presence(dict(zip(api.names, tensors, strict=True)))
        present = [tensors[i] for i in self.present]
        checked = next((layout for layout in self.checked if layout.matches(*present)), None)
        if checked is None:
            sizes = api.check_call(tensors, scalars)
            if api.is_empty(tensors):
                with on_stream(stream, tensors[0]):
                    api.run_empty(tensors)
                return None
            num_sms = api.usable_sms(self.plan, api.num_sms(index))
            checked = CheckedTensors(guard(present), index, num_sms, self.plan.workspace_size(sizes))
            self.checked = [checked, *self.checked[: self.MAX_CHECKED - 1]]
        if workspace is not None and workspace is not checked.workspace():
            api.check_workspace(tensors, workspace, self.plan)
            checked.workspace = weakref.ref(workspace)
        return checked

    def _allocated(self, size: int, stream: int, first: Any) -> Any:
        """A workspace from PyTorch's caching allocator, allocated on ``stream``."""
        with on_stream(stream, first):
            return torch.empty(size, dtype=torch.uint8, device=first.device)


def _arguments(api: FusedAPI, plan: KernelPlan) -> str:
    """A kernel's arguments as source text: tensors t0 ..., scalars s0 ..., num_sms, stream, workspace.

    Packed FP4 elements are passed as uint8, int8 as E8M0 scale factors.
    """
    views = {torch.float4_e2m1fn_x2: torch.uint8, torch.int8: torch.float8_e8m0fnu}
    text = {"num_sms": "num_sms", "stream": "stream", "workspace": "workspace"}
    text |= {name: f"s{i}" for i, name in enumerate(api.scalars)}
    for i, name in enumerate(api.names):
        viewed = api.has(name) and api.dtype(name) in views
        text[name] = f"t{i}.view({views[api.dtype(name)]})" if viewed else f"t{i}"
    text |= {name: f"constants[{name!r}]" for name in api.constants}
    return ", ".join(text[slot.name] for slot in plan.slots)


def _checked(api: FusedAPI, i: int, name: str) -> str:
    """The check of a scalar argument, as source text; a finite number of the right type passes without a call."""
    return _CHECKED.strip("\n").format(i=i, name=name, type_name="int" if name in api.integers else "float") + "\n"


@functools.cache
def warn_once(name: str, warning: str) -> None:
    """Logs a warning about an API, once."""
    settings.configure_logging().warning("%s: %s", name, warning)


def _none() -> None:
    """A weak reference to no workspace."""


def on_stream(stream: Any, tensor: Any) -> Any:
    """A context in which PyTorch launches its kernels, and allocates memory, on ``stream``."""
    if stream is None or not tensor.is_cuda or stream == launch.raw_stream(None, tensor.get_device()):
        return contextlib.nullcontext()
    address = launch.raw_stream(stream, tensor.get_device())
    return torch.cuda.stream(torch.cuda.ExternalStream(address, device=tensor.device))
