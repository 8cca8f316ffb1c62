"""Repeats the launches of a function on tensors with less host time than the function itself takes.

A function that only allocates memory, takes views and launches kernels does the same at every call with tensors of the
same metadata, but for addresses. :class:`LaunchSequences` runs it, from the second such call on records it, and later
writes the new addresses into the recorded arguments and launches the kernels: one allocation holds all temporary
tensors, no view is made, and nothing is derived again. A sequence is used where host time matters, so for small tensors
alone: temporary tensors do not share memory.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn.lazy import tvm_ffi
from cudnn.runtime.codegen import define
from cudnn.runtime.launch_capture import captures
from cudnn.runtime.run import is_constant
from cudnn.runtime.tensor_guards import guard
from cudnn_kernels.signature import Stream

MAX_SEQUENCES = 64
"""Keys of one :class:`LaunchSequences`, the oldest of which are dropped."""
MAX_VARIANTS = 4
"""Recorded sequences of a key, for tensors of different metadata."""
MAX_TEMPORARY_BYTES = 2**25
"""Of temporary tensors in a sequence: where there are more, a GPU takes longer than the host."""
_ALIGNMENT = 256
_ALLOCATIONS = frozenset(("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"))
_NONE, _INT, _FLOAT, _DL_TENSOR = 0, 1, 3, 7  # TVMFFITypeIndex
_CPU, _CUDA = 1, 2  # DLDeviceType
_DL_TENSOR_WORDS = 6  # of 8 bytes: data, device, dimensions and type, shape, strides, byte offset
_DTYPES = {  # DLDataTypeCode and bits
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}

Tensors = tuple[torch.Tensor | None, ...]


class LaunchSequences:
    """Runs functions of tensors, and repeats their launches. A copy of it, also a pickled one, begins without any."""

    def __init__(self) -> None:
        self._sequences: dict[Hashable, list[Callable[..., Tensors | None]]] = {}

    def __reduce__(self) -> tuple[type[LaunchSequences], tuple[()]]:
        return LaunchSequences, ()

    def __call__(self, key: Hashable, function: Callable[..., Tensors], tensors: Tensors) -> Tensors:
        """The results of ``function(*tensors)``.

        Args:
            key: Calls with the same key, whose tensors have the same metadata, launch the same kernels. It has what the
                function depends on besides tensors.
            function: Gives new tensors, its arguments or None.
            tensors: They need no autograd.
        """
        known = self._sequences.get(key)
        if known is None:
            self._remember(key)
            return function(*tensors)
        for run in known:
            results = run(*tensors)
            if results is not None:
                return results
        if len(known) == MAX_VARIANTS:
            return function(*tensors)
        with Capture() as capture:
            results = function(*tensors)
        known.append(capture.sequence(tensors, results))
        return results

    def _remember(self, key: Hashable) -> None:
        sequences: dict[Hashable, list[Callable[..., Tensors | None]]] = {**self._sequences, key: []}
        while len(sequences) > MAX_SEQUENCES:
            del sequences[next(iter(sequences))]
        self._sequences = sequences


class Capture(TorchDispatchMode):
    """Records the allocations and launches of this thread within its block.

    Tensors that are allocated in the block live until the end of :meth:`sequence`, so addresses tell them apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.allocated: list[torch.Tensor] = []
        self.launches: list[tuple[Any, Sequence[Any], tuple[Any, ...]]] = []
        self.computes = False  # outside of kernels that are recorded

    def __enter__(self) -> Any:
        captures.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        captures.remove(self)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _ALLOCATIONS:
            self.allocated.append(result)
        elif not func.is_view:
            self.computes = True
        return result

    def record(self, function: Callable[..., None], slots: Sequence[Any], arguments: Sequence[Any]) -> None:
        self.launches.append((function, slots, tuple(arguments)))

    def sequence(self, tensors: Tensors, results: Tensors) -> Callable[..., Tensors | None]:
        """What was recorded, as a function of ``tensors``; if that cannot be repeated, a function that gives None."""
        try:
            if not self.computes:
                return LaunchSequence(tensors, results, self.allocated, self.launches).run
        except _NotRepeatableError:
            pass
        return lambda *_: None


class _NotRepeatableError(Exception):
    """A call does more than a :class:`LaunchSequence` can."""


_TEMPLATE = """
def run({tensors}):
    if {presence} or not matches({present}):
        return None
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
    if {launches}:
        return None  # the function raises the error
    frames.append(frame)
    return ({returned})
"""


class LaunchSequence:
    """Launches with the arguments that were recorded, on other tensors of the same metadata.

    The arguments of all launches lie in one block of memory, a frame, in the layout of the C interface of TVM FFI. A
    call takes a frame that no other thread uses. ``run`` gives the results, or None if the tensors differ, are not
    aligned to 16 bytes, or a launch fails.
    """

    def __init__(
        self,
        tensors: Tensors,
        results: Tensors,
        allocated: Sequence[torch.Tensor],
        launches: Sequence[tuple[Any, Sequence[Any], tuple[Any, ...]]],
    ) -> None:
        self._functions = [function for function, _, _ in launches]  # kept alive
        self._words: list[int] = []
        self._pointers: list[tuple[int, int]] = []  # a word and the word whose address it gets
        self._bases: dict[str, list[int]] = {"stream": []}  # words by what is written to them at each call
        self._tensors: dict[Any, int] = {}  # the DLTensors in the frame
        self._set_memory(tensors, results, allocated)
        if not launches:
            raise _NotRepeatableError
        self._frame_words = [self._add_arguments(slots, arguments) for _, slots, arguments in launches]
        self._frame_words.append(self._append(_NONE, 0))
        present = [(f"t{i}", x) for i, x in enumerate(tensors) if x is not None]
        scope: dict[str, Any] = {f"empty_{name}": _allocation(x) for name, x in self._allocated.items()}
        scope |= {f"function{i}": _handle(function) for i, function in enumerate(self._functions)}
        device = present[0][1].device
        scope |= {
            "empty_workspace": functools.partial(torch.empty, (self._size,), dtype=torch.uint8, device=device),
            "matches": guard([x for _, x in present]),
            "frames": [],
            "new_frame": self._new_frame,
            "launch": _launch(),
            "index": device.index,
            "current_stream": torch._C._cuda_getCurrentRawStream if device.type == "cuda" else _null_stream,
        }
        self.run = define("run", self._source(len(tensors), [name for name, _ in present], launches), scope)

    def _source(self, count: int, present: Sequence[str], launches: Sequence[Any]) -> str:
        """The code of ``run``, which is the same for tensors of other sizes."""
        addresses = {name: f"p_{name}" for name in present}
        addresses |= {name: f"{name}.data_ptr()" for name in (*self._allocated, "workspace")}
        addresses["stream"] = "current_stream(index)"
        writes = [
            "".join(f"words[{word}] = " for word in words) + addresses[name] for name, words in self._bases.items()
        ]
        allocations = [f"{name} = empty_{name}()" for name in self._allocated]
        allocations += ["workspace = empty_workspace()"] if "workspace" in self._bases else []
        starts = [f"a{i}" for i in range(len(launches))]
        counts = [len(arguments) for _, _, arguments in launches]
        calls = [f"launch(function{i}, a{i}, {count}, result)" for i, count in enumerate(counts)]
        return _TEMPLATE.format(
            tensors=", ".join(f"t{i}" for i in range(count)),
            presence=" or ".join(f"t{i} is {'' if f't{i}' in present else 'not '}None" for i in range(count)),
            present=", ".join(present),
            pointers="; ".join(f"p_{name} = {name}.data_ptr()" for name in present),
            all_pointers=" | ".join(f"p_{name}" for name in present),
            allocations="\n    ".join(allocations),
            frame=", ".join(["words", *starts, "result"]),
            writes="\n    ".join(writes),
            launches=" or ".join(calls),
            returned="".join(f"{name}, " for name in self._returned),
        )

    def _set_memory(self, tensors: Tensors, results: Tensors, allocated: Sequence[torch.Tensor]) -> None:
        """The address ranges of arguments, results and temporary tensors: begin, end, name, offset."""
        ranges = [(*_extent(x), f"t{i}", 0) for i, x in enumerate(tensors) if x is not None]
        by_address = {x.untyped_storage().data_ptr(): x for x in allocated if x.numel()}
        self._allocated: dict[str, torch.Tensor] = {}
        self._returned: list[str] = []
        names = {id(x): f"t{i}" for i, x in enumerate(tensors) if x is not None}
        for i, x in enumerate(results):
            name = "None" if x is None else names.setdefault(id(x), f"r{i}")
            self._returned.append(name)
            if x is None or name != f"r{i}":
                continue
            memory = by_address.pop(x.untyped_storage().data_ptr(), None)
            if memory is None or _extent(memory) != _extent(x):
                raise _NotRepeatableError
            self._allocated[name] = x
            ranges.append((*_extent(x), name, 0))
        self._size = 0
        for x in by_address.values():
            begin, end = _extent(x)
            ranges.append((begin, end, "workspace", self._size))
            self._size += (end - begin + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        ranges.sort()
        overlap = any(one[1] > other[0] for one, other in zip(ranges, ranges[1:], strict=False))
        if overlap or self._size > MAX_TEMPORARY_BYTES:
            raise _NotRepeatableError
        self._ranges = ranges

    def _add_arguments(self, slots: Sequence[Any], arguments: Sequence[Any]) -> int:
        """Appends a launch's arguments, each a TVMFFIAny; the first word."""
        values: list[tuple[int, int | None, Any]] = []
        for slot, x in zip(slots, arguments, strict=True):
            if isinstance(x, torch.Tensor):
                values.append((_DL_TENSOR, self._add_tensor(x), None))
            elif isinstance(x, float):
                values.append((_FLOAT, None, struct.unpack("<Q", struct.pack("<d", x))[0]))
            elif type(x) is int:
                values.append((_INT, None, "stream" if isinstance(slot, Stream) else x % 2**64))
            else:
                raise _NotRepeatableError
        first = len(self._words)
        for type_index, tensor, value in values:
            word = self._append(type_index, 0 if isinstance(value, str) or value is None else value) + 1
            if tensor is not None:
                self._pointers.append((word, tensor))
            elif value == "stream":
                self._bases["stream"].append(word)
        return first

    def _add_tensor(self, x: torch.Tensor) -> int:
        """Appends a DLTensor with its shape and strides, once; its first word."""
        key = (x.data_ptr(), x.dtype, x.shape, x.stride())
        known = self._tensors.get(key)
        if known is not None:
            return known
        if x.dtype not in _DTYPES or x.is_neg() or x.is_conj():
            raise _NotRepeatableError
        code, bits = _DTYPES[x.dtype]
        device_type = _CUDA if x.device.type == "cuda" else _CPU
        address, base, offset = x.data_ptr(), None, 0
        if x.numel() and not is_constant(x):
            base, offset = self._base_of(x)
            address = 0
        sizes = self._append(*(size % 2**64 for size in (*x.shape, *x.stride())))
        first = self._append(
            address,
            device_type | (x.device.index or 0) << 32,
            x.ndim | code << 32 | bits << 40 | 1 << 48,
            0,
            0,
            offset,
        )
        self._pointers += [(first + 3, sizes), (first + 4, sizes + x.ndim)]
        if base is not None:
            self._bases.setdefault(base, []).append(first)
        self._tensors[key] = first
        return first

    def _base_of(self, x: torch.Tensor) -> tuple[str, int]:
        """What a tensor is a part of, and its byte offset in it."""
        begin, end = _extent(x)
        for first, last, name, offset in self._ranges:
            if first <= begin and end <= last:
                return name, begin - first + offset
        raise _NotRepeatableError

    def _append(self, *words: int) -> int:
        """Appends words to the frame; the index of the first."""
        self._words += words
        return len(self._words) - len(words)

    def _new_frame(self) -> tuple[Any, ...]:
        """Memory for arguments, and the addresses of each launch's arguments and of the result in it."""
        memory = (ctypes.c_uint64 * len(self._words))(*self._words)
        base = ctypes.addressof(memory)
        for word, target in self._pointers:
            memory[word] = base + 8 * target
        return memoryview(memory).cast("B").cast("Q"), *(base + 8 * word for word in self._frame_words)


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the end of the last one."""
    elements = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + (elements * x.element_size() if x.numel() else 0)


def _allocation(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that allocates tensors with the metadata of x."""
    shape, stride, dtype, device = tuple(x.shape), x.stride(), x.dtype, x.device
    empty = torch.empty_strided
    return lambda: empty(shape, stride, dtype=dtype, device=device)


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


def _null_stream(index: int | None) -> int:
    return 0
