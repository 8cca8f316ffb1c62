"""Repeats the launches of a function on tensors with less host time than the function itself takes.

A function that only allocates memory, takes views and launches kernels does the same at every call with tensors of the
same metadata, but for addresses. :class:`LaunchSequences` runs it, from the second such call on records it, and later
writes the new addresses into the recorded arguments and launches the kernels: one allocation holds all temporary
tensors, no view is made, and nothing is derived again. What depends on more than the tensors, such as cached copies of
weights, the function gets by :func:`cudnn.runtime.launch_capture.outside`, which is called each time. A sequence is
used where host time matters, so for small tensors alone.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import struct
import threading
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn import settings
from cudnn.lazy import tvm_ffi
from cudnn.runtime.codegen import define
from cudnn.runtime.launch_capture import captures
from cudnn.runtime.run import is_constant
from cudnn.runtime.tensor_guards import guard
from cudnn_kernels.signature import Stream

MAX_SEQUENCES = 256
"""Keys of one :class:`LaunchSequences`, the oldest of which are dropped."""
MAX_VARIANTS = 4
"""Recorded sequences of a key, for tensors of different metadata."""
MAX_TEMPORARY_BYTES = 2**27
"""Of a sequence's temporary tensors, of which those that are not in use at the same time share memory."""
_ALIGNMENT = 256
_ALLOCATIONS = frozenset(("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"))
_NONE, _INT, _FLOAT, _DL_TENSOR = 0, 1, 3, 7  # TVMFFITypeIndex
_CPU, _CUDA = 1, 2  # DLDeviceType
_DTYPES = {  # DLDataTypeCode and bits
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.float8_e8m0fnu: (14, 8),
}

Tensors = tuple[Any, ...]
"""Tensors or None."""


class LaunchSequences:
    """Runs functions of tensors, and repeats their launches. A copy of it, also a pickled one, begins without any."""

    def __init__(self) -> None:
        self._sequences: dict[Hashable, list[Callable[..., Tensors | None]]] = {}

    def __reduce__(self) -> tuple[type[LaunchSequences], tuple[()]]:
        return LaunchSequences, ()

    def __call__(
        self, key: Hashable, function: Callable[..., Tensors], tensors: Tensors, adds: bool = False
    ) -> Tensors:
        """The results of ``function(*tensors)``.

        Args:
            key: Calls with the same key, whose tensors have the same metadata, launch the same kernels. It has what the
                function depends on besides tensors.
            function: Gives new tensors, its arguments or None.
            tensors: They need no autograd. Launches on those without storage, which subclasses have, are not repeated.
            adds: Whether the function adds to some of them. Then nothing runs twice after an error in the middle.
        """
        known = self._sequences.get(key)
        if known is None:
            self._remember(key)
            return function(*tensors)
        for run in known:
            results = run(*tensors)
            if results is not None:
                return results
        has_memory = all(x is None or torch._C._has_storage(x) for x in tensors)
        if len(known) >= MAX_VARIANTS or not has_memory:
            return function(*tensors)
        with Capture() as capture:
            results = function(*tensors)
        known.append(capture.sequence(tensors, results, adds))
        return results

    def _remember(self, key: Hashable) -> None:
        with _lock:
            while len(self._sequences) >= MAX_SEQUENCES:
                del self._sequences[next(iter(self._sequences))]
            self._sequences.setdefault(key, [])


_lock = threading.Lock()


def are_repeated(x: torch.Tensor) -> bool:
    """Whether launches on a tensor are repeated: on a GPU. The emulator checks the arguments of every call."""
    return x.is_cuda


def repeated(
    function: Callable[..., Any], places: Sequence[int], max_elements: int, mutated: Sequence[int] = ()
) -> Callable[..., Any]:
    """An operator's function whose launches are repeated where its first tensor is small.

    Args:
        function: Its results depend on its arguments, the library's settings and PyTorch's deterministic algorithms.
        places: The positions of its tensors and lists of tensors. The first is a tensor.
        max_elements: Of the first tensor: with more, a GPU takes longer than the host.
        mutated: The positions of lists of tensors that it adds to.
    """
    sequences = LaunchSequences()

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        first = args[places[0]]
        if not are_repeated(first) or first.numel() > max_elements:
            return function(*args)
        arguments: list[Any] = [tuple(x) if isinstance(x, (list, tuple)) else x for x in args]
        tensors: list[torch.Tensor | None] = []
        for place in places:
            x = arguments[place]
            if type(x) is not tuple:
                tensors.append(x)
                arguments[place] = None if x is None else x.shape
            else:
                tensors += x
                arguments[place] = (len(x), *[each.shape for each in x])

        def call(*tensors: torch.Tensor | None) -> Tensors:
            given, rest = list(args), iter(tensors)
            for place in places:
                is_list = isinstance(given[place], (list, tuple))
                given[place] = [next(rest) for _ in given[place]] if is_list else next(rest)
            results = function(*given)
            return results if isinstance(results, tuple) else (results,)

        key = (*arguments, first.dtype, torch.are_deterministic_algorithms_enabled(), settings.texts())
        results = sequences(key, call, tuple(tensors), any(len(args[place]) for place in mutated))
        result, *others = results
        return results if others else result

    return run


class KernelLaunch(NamedTuple):
    """A compiled kernel, its signature and the arguments of a launch."""

    function: Callable[..., None]
    slots: Sequence[Any]
    arguments: tuple[Any, ...]


class GraphLaunch(NamedTuple):
    """A graph of cuDNN and the arguments of its ``execute``."""

    graph: Any
    data: dict[Any, Any]
    workspace: Any


class OutsideCall(NamedTuple):
    """A call of :func:`cudnn.runtime.launch_capture.outside`: its arguments and results, tensors."""

    function: Callable[..., Tensors]
    tensors: Tensors
    results: Tensors


class Capture(TorchDispatchMode):
    """Records the allocations, views and launches of this thread within its block.

    Attributes:
        origins: By the ``id`` of a tensor that was allocated or is a view: it, and the tensor that it is a view of.
        launches: Kernels or graphs and their arguments, in order.
        outside: Calls of which nothing else is recorded, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.origins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.launches: list[KernelLaunch | GraphLaunch] = []
        self.outside: list[OutsideCall] = []
        self._is_outside = False
        self._computes = False  # outside of kernels that are recorded

    def __enter__(self) -> Any:
        captures.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        captures.remove(self)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_outside:
            return result
        if func._schema.name in _ALLOCATIONS:
            self.origins[id(result)] = result, result
        elif func.is_view:
            origin = self.origin(args[0])
            for x in result if isinstance(result, (list, tuple)) else [result]:
                self.origins[id(x)] = x, origin
        else:
            self._computes = True
        return result

    def origin(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that x is a view of, or x."""
        return self.origins.get(id(x), (x, x))[1]

    def record(self, function: Callable[..., None], slots: Sequence[Any], arguments: Sequence[Any]) -> None:
        if not self._is_outside:
            self.launches.append(KernelLaunch(function, slots, tuple(arguments)))

    def record_graph(self, graph: Any, data: Mapping[Any, Any], workspace: Any) -> None:
        if not self._is_outside:
            self.launches.append(GraphLaunch(graph, dict(data), workspace))

    def call_outside(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        if self._is_outside:
            return function(*tensors)
        self._is_outside = True
        try:
            results = function(*tensors)
        finally:
            self._is_outside = False
        self.outside.append(OutsideCall(function, tuple(tensors), results))
        return results

    def sequence(self, tensors: Tensors, results: Tensors, adds: bool = False) -> Callable[..., Tensors | None]:
        """What was recorded, as a function of ``tensors``; if that cannot be repeated, a function that gives None."""
        try:
            if self.launches and not self._computes:
                return LaunchSequence(tensors, results, self, adds).run
        except _NotRepeatableError:
            pass
        return lambda *_: None


class _NotRepeatableError(Exception):
    """A call does more than a :class:`LaunchSequence` can."""


_TEMPLATE = """
def run({tensors}):
    if {conditions} or not matches({present}):
        return None
    {outside}
    {pointers}
    if ({all_pointers}) & 15:
        return None
    {allocations}
    try:
        frame = frames.pop()
    except IndexError:
        frame = new_frame()
    {frame} = frame
    {writes}
    {launches}
    frames.append(frame)
    return ({returned})
"""


class LaunchSequence:
    """Launches with the arguments that were recorded, on other tensors of the same metadata.

    The arguments of all launches lie in one block of memory, a frame, in the layout of the C interface of TVM FFI. A
    call takes a frame that no other thread uses. ``run`` gives the results, or None if the tensors differ, are not
    aligned to 16 bytes, or a launch fails. With ``adds`` it raises if a launch after the first fails: what ran before
    may have added to tensors, and must not run again.
    """

    def __init__(self, tensors: Tensors, results: Tensors, capture: Capture, adds: bool) -> None:
        self._capture, self._adds = capture, adds
        self._words: list[int] = []
        self._pointers: list[tuple[int, int]] = []  # a word and the word whose address it gets
        self._writes: dict[str, list[int]] = {}  # words by the name of the address that is written to them at each call
        self._dl_tensors: dict[Any, int] = {}
        self._arguments = {id(x): f"t{i}" for i, x in reversed([*enumerate(tensors)]) if x is not None}
        self._allocated: dict[str, torch.Tensor] = {}  # results
        present = [(f"t{i}", x) for i, x in enumerate(tensors) if self._arguments.get(id(x)) == f"t{i}"]
        self._device = device = present[0][1].device
        current_stream = torch._C._cuda_getCurrentRawStream if device.type == "cuda" else _null_stream
        self._stream = current_stream(device.index)
        scope: dict[str, Any] = {}
        self._outside_names: list[str] = []  # of results of outside calls
        calls = [self._add_outside_call(i, call, scope) for i, call in enumerate(capture.outside)]
        returned = [self._name_result(f"r{i}", x) for i, x in enumerate(results)]
        self._temporaries, self._size = self._place_temporaries()
        self._frame_words = [self._append(_NONE, 0)]  # of the result and of the arguments of each kernel
        steps = [self._add_launch(i, launch, scope) for i, launch in enumerate(capture.launches)]
        if self._size > MAX_TEMPORARY_BYTES:  # the workspaces of graphs are allocated one by one
            raise _NotRepeatableError
        scope |= {f"empty_{name}": _allocation(x) for name, x in self._allocated.items()}
        scope |= {
            "empty_workspace": _workspace(self._size, device),
            "matches": guard([x for _, x in present]),
            "frames": [],
            "new_frame": functools.partial(_new_frame, array("Q", self._words), self._pointers, self._frame_words),
            "launch": _launch(),
            "raised": _raised,
            "index": device.index,
            "current_stream": current_stream,
            "current_device": torch._C._cuda_getDevice if device.type == "cuda" else _no_device,
        }
        source = self._source(tensors, [name for name, _ in present], calls, returned, steps)
        self.run = define("run", source, scope)
        del self._capture  # and its tensors

    def _source(
        self,
        tensors: Tensors,
        present: Sequence[str],
        calls: Sequence[str],
        returned: Sequence[str],
        steps: Sequence[str],
    ) -> str:
        """The code of ``run``, which is the same for tensors of other sizes."""
        conditions = []
        for i, x in enumerate(tensors):
            same = self._arguments.get(id(x), "None")
            conditions.append(f"t{i} is None" if same == f"t{i}" else f"t{i} is not {same}")
        read = [*present, *self._outside_names]
        addresses = {name: f"p_{name}" for name in read}
        addresses |= {name: f"{name}.data_ptr()" for name in (*self._allocated, "workspace")}
        addresses["stream"] = "current_stream(index)"
        writes = [
            "".join(f"words[{word}] = " for word in words) + addresses[name] for name, words in self._writes.items()
        ]
        allocations = [f"{name} = empty_{name}()" for name in self._allocated]
        allocations += ["workspace = empty_workspace()"] if self._size else []
        if any(isinstance(launch, GraphLaunch) for launch in self._capture.launches):
            conditions.append("current_device() != index")  # a graph runs on the current device
        return _TEMPLATE.format(
            tensors=", ".join(f"t{i}" for i in range(len(tensors))),
            conditions=" or ".join(conditions),
            present=", ".join(present),
            outside="\n    ".join(calls),
            pointers="; ".join(f"p_{name} = {name}.data_ptr()" for name in read),
            all_pointers=" | ".join(f"p_{name}" for name in read),
            allocations="\n    ".join(allocations or ["pass"]),
            frame=", ".join(["words", "result", *(f"a{i}" for i in range(1, len(self._frame_words)))]),
            writes="\n    ".join(writes),
            launches="\n    ".join(steps),
            returned="".join(f"{name}, " for name in returned),
        )

    def _add_outside_call(self, i: int, call: OutsideCall, scope: dict[str, Any]) -> str:
        """The code of a call outside, whose results get names, and whose function is put into ``scope``."""
        known = self._arguments
        if any(id(x) not in known for x in call.tensors) or any(id(x) in known for x in call.results):
            raise _NotRepeatableError
        arguments = [known[id(x)] for x in call.tensors]
        names = [f"o{i}_{j}" for j in range(len(call.results))]
        self._arguments |= {id(x): name for name, x in zip(names, call.results, strict=True)}
        self._outside_names += names
        scope |= {f"outside{i}": call.function, f"matches{i}": guard(call.results)}
        listed = ", ".join(names)
        return f"{listed}, = outside{i}({', '.join(arguments)})\n    if not matches{i}({listed}): return None"

    def _name_result(self, name: str, x: torch.Tensor | None) -> str:
        """The variable of a result: an argument, or a tensor that each call allocates."""
        if x is None:
            return "None"
        if id(x) in self._arguments:
            return self._arguments[id(x)]
        origin = self._capture.origin(x)
        if id(origin) in self._arguments or id(x) not in self._capture.origins or _extent(origin) != _extent(x):
            raise _NotRepeatableError
        self._arguments[id(origin)] = self._arguments[id(x)] = name
        self._allocated[name] = x
        return name

    def _add_launch(self, i: int, launch: KernelLaunch | GraphLaunch, scope: dict[str, Any]) -> str:
        """The code of a launch, whose names are put into ``scope``."""
        if isinstance(launch, KernelLaunch):
            scope[f"kernel{i}"], scope[f"handle{i}"] = launch.function, _handle(launch.function)
            self._frame_words.append(self._add_arguments(launch.slots, launch.arguments))
            arguments = f"a{len(self._frame_words) - 1}, {len(launch.arguments)}"
            failed = "raise raised()" if i and self._adds else "return None  # the function raises the error"
            return f"if launch(handle{i}, {arguments}, result):\n        {failed}"
        data = []
        for j, (key, x) in enumerate(launch.data.items()):
            name = self._arguments.get(id(x))
            if name is None:
                raise _NotRepeatableError
            scope[f"key{i}_{j}"] = key
            data.append(f"key{i}_{j}: {name}")
        scope[f"graph{i}"], scope[f"empty_workspace{i}"] = launch.graph, _allocation(launch.workspace)
        return f"graph{i}.execute({{{', '.join(data)}}}, empty_workspace{i}())"

    def _add_arguments(self, slots: Sequence[Any], arguments: Sequence[Any]) -> int:
        """Appends a launch's arguments, each a TVMFFIAny; the first word."""
        values: list[tuple[int, int | None, Any]] = []
        for slot, x in zip(slots, arguments, strict=True):
            if isinstance(x, torch.Tensor):
                values.append((_DL_TENSOR, self._add_tensor(x), None))
            elif isinstance(x, float):
                values.append((_FLOAT, None, struct.unpack("<Q", struct.pack("<d", x))[0]))
            elif type(x) is int and not isinstance(slot, Stream):
                values.append((_INT, None, x % 2**64))
            elif type(x) is int and x == self._stream:
                values.append((_INT, None, "stream"))
            else:
                raise _NotRepeatableError
        first = len(self._words)
        for type_index, tensor, value in values:
            word = self._append(type_index, 0 if isinstance(value, str) or value is None else value) + 1
            if tensor is not None:
                self._pointers.append((word, tensor))
            elif value == "stream":
                self._writes.setdefault("stream", []).append(word)
        return first

    def _add_tensor(self, x: torch.Tensor) -> int:
        """Appends a DLTensor with its shape and strides, once; its first word."""
        key = (id(self._capture.origin(x)), x.data_ptr(), x.dtype, x.shape, x.stride())
        if key in self._dl_tensors:
            return self._dl_tensors[key]
        if x.dtype not in _DTYPES or x.is_neg() or x.is_conj():
            raise _NotRepeatableError
        code, bits = _DTYPES[x.dtype]
        device = (_CUDA if x.device.type == "cuda" else _CPU) | (x.device.index or 0) << 32
        address, name, offset = self._locate(x)
        sizes = self._append(*(size % 2**64 for size in (*x.shape, *x.stride())))
        # Words of a DLTensor: data, device, dimensions and type, shape, strides, byte offset.
        first = self._append(address, device, x.ndim | code << 32 | bits << 40 | 1 << 48, 0, 0, offset)
        self._pointers += [(first + 3, sizes), (first + 4, sizes + x.ndim)]
        if name:
            self._writes.setdefault(name, []).append(first)
        self._dl_tensors[key] = first
        return first

    def _locate(self, x: torch.Tensor) -> tuple[int, str, int]:
        """A tensor's address, if it is always the same, or the name of the memory that it is in; and a byte offset."""
        origin = self._capture.origin(x)
        offset, name = x.data_ptr() - origin.data_ptr(), self._arguments.get(id(origin))
        if not x.numel():
            return x.data_ptr(), "", 0
        if name is not None:
            return 0, name, offset
        if is_constant(origin):
            return x.data_ptr(), "", 0
        if id(origin) not in self._temporaries:
            raise _NotRepeatableError
        return 0, "workspace", offset + self._temporaries[id(origin)]

    def _place_temporaries(self) -> tuple[dict[int, int], int]:
        """Byte offsets of temporary tensors in the workspace, by their ``id``, and its size.

        Tensors share memory if all launches that use one come before those that use the other. The largest are placed
        first, each at the lowest free offset.
        """
        uses: dict[int, tuple[int, int, int]] = {}  # bytes, first and last launch
        for i, launch in enumerate(self._capture.launches):
            for x in launch.arguments if isinstance(launch, KernelLaunch) else ():
                origin = self._capture.origin(x)
                is_temporary = id(origin) in self._capture.origins and id(origin) not in self._arguments
                if is_temporary and origin.device == self._device:
                    begin, end = _extent(origin)
                    size = (end - begin + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
                    uses[id(origin)] = size, uses.get(id(origin), (size, i, i))[1], i
        offsets: dict[int, int] = {}
        for tensor, (size, first, last) in sorted(uses.items(), key=lambda use: -use[1][0]):
            offset = 0
            for other in sorted(offsets, key=offsets.__getitem__):
                other_size, other_first, other_last = uses[other]
                if other_first <= last and first <= other_last:
                    if offset + size <= offsets[other]:
                        break
                    offset = max(offset, offsets[other] + other_size)
            offsets[tensor] = offset
        return offsets, max((offset + uses[tensor][0] for tensor, offset in offsets.items()), default=0)

    def _append(self, *words: int) -> int:
        """Appends words to the frame; the index of the first."""
        self._words += words
        return len(self._words) - len(words)


def _new_frame(words: array[int], pointers: Sequence[tuple[int, int]], addresses: Sequence[int]) -> tuple[Any, ...]:
    """Memory for the arguments of all launches, and the addresses of some of its words."""
    memory = (ctypes.c_uint64 * len(words)).from_buffer_copy(words)
    base = ctypes.addressof(memory)
    for word, target in pointers:
        memory[word] = base + 8 * target
    return memoryview(memory).cast("B").cast("Q"), *(base + 8 * word for word in addresses)


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the end of the last one."""
    elements = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + (elements * x.element_size() if x.numel() else 0)


def _allocation(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that allocates tensors with the metadata of x."""
    return functools.partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _workspace(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that allocates bytes."""
    return functools.partial(torch.empty, size, dtype=torch.uint8, device=device)


def _handle(function: Any) -> int:
    """The C handle of a compiled kernel, which may be an object that wraps a function of TVM FFI."""
    wrapped = getattr(function, "__tvm_ffi_object__", None)
    function = function if isinstance(function, tvm_ffi.Function) or wrapped is None else wrapped()
    return function.__chandle__()


@functools.cache
def _launch() -> Callable[[int, int, int, int], int]:
    """``TVMFFIFunctionCall(function, arguments, count, result)``, which gives 0 on success."""
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    call = library.TVMFFIFunctionCall
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p), ctypes.c_int
    return call


class _Error(ctypes.Structure):
    """The beginning of a TVMFFIObject that is an error: its header, kind and message."""

    _fields_ = (("header", ctypes.c_uint64 * 3), ("texts", ctypes.c_void_p * 4))


def _raised() -> Exception:
    """The error of the launch that failed last in this thread."""
    library, handle = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()), ctypes.c_void_p()
    library.TVMFFIErrorMoveFromRaised(ctypes.byref(handle))
    if not handle.value:
        return RuntimeError("a kernel's launch failed")
    kind, kind_size, message, size = _Error.from_address(handle.value).texts
    name, text = (ctypes.string_at(a, n or 0).decode() for a, n in ((kind, kind_size), (message, size)))
    library.TVMFFIObjectDecRef(handle)
    error = getattr(builtins, name, RuntimeError)
    return error(text) if error in _ERRORS else RuntimeError(f"{name}: {text}")


_ERRORS = (TypeError, ValueError, RuntimeError)


def _null_stream(index: int | None) -> int:
    return 0


def _no_device() -> None:
    pass
