"""Launches that are recorded and repeated; the kernel is a Python function with the C interface of compiled ones."""

import contextlib
import copy
import ctypes
import pickle
import struct
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi

import cudnn
from cudnn.arrays.dlpack import _DLTensor
from cudnn.runtime import launch_capture, launch_sequence
from cudnn.runtime.launch_sequence import LaunchSequences, repeated
from cudnn.runtime.run import constant
from cudnn_kernels.signature import Scalar, Slot, Stream, Tensor

SLOTS: tuple[Slot, ...] = (
    Tensor("a", "float32", ("m", "n"), (None, None)),
    Tensor("b", "float32", ("m", "n"), (None, None)),
    Tensor("out", "float32", ("m", "n"), (None, None)),
    Scalar("factor", "float32"),
    Stream(),
)


class Argument(ctypes.Structure):
    """A TVMFFIAny: an integer, a number or the address of a DLTensor."""

    _fields_ = (("type_index", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_int64))


def _array(argument: Argument) -> Any:
    """The elements of a float32 or float16 tensor."""
    header = {7: 0, 70: 24}[argument.type_index]  # a DLTensor, or an object of TVM FFI that has one
    x = _DLTensor.from_address(argument.value + header)
    assert (x.type_code, x.type_lanes, x.device_type) == (2, 1, 1)
    size = x.type_bits // 8
    first = np.frombuffer((ctypes.c_char * size).from_address(x.data + x.byte_offset), dtype=f"<f{size}")
    strides = [size * step for step in x.strides[: x.ndim]]
    return np.lib.stride_tricks.as_strided(first, x.shape[: x.ndim], strides)


def _multiply_add(_: Any, address: int, count: int, result: Any) -> int:
    """out = factor a + b, by the C interface that compiled kernels have."""
    a, b, out, factor, stream = (Argument * count).from_address(address)
    (number,) = struct.unpack("<d", struct.pack("<q", factor.value))
    if number > 1e6 or np.isnan(_array(b)).any():
        text = b"factor is too large" if number > 1e6 else b"b is not a number"
        ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIErrorSetRaisedFromCStr(b"ValueError", text)
        return -1
    assert (factor.type_index, stream.type_index, stream.value) == (3, 1, 0)
    _array(out)[...] = _array(a) * number + _array(b)
    return 0


C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(
    _multiply_add
)
KERNEL: Any = tvm_ffi.Function.__from_extern_c__(
    ctypes.cast(C_FUNCTION, ctypes.c_void_p).value or 0, keep_alive_object=C_FUNCTION
)


def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """out = factor a + b."""
    arguments = (a, b, out, factor, 0)
    KERNEL(*arguments)
    if launch_capture.captures:
        launch_capture.record(KERNEL, SLOTS, arguments)


class Counted:
    """A function and the number of its calls, which repeated launches do not raise."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *tensors: Any) -> Any:
        self.calls += 1
        return self.function(*tensors)


def of_views(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> tuple[Any, ...]:
    """Two temporaries, views of arguments and of a result, an argument and None among the results."""
    pair = a.new_empty(2, *a.shape)
    first, second = pair.unbind(0)
    launch(a.t(), b.t(), first.t(), 2.0)
    launch(first[1:], a[:-1], second[1:], 3.0)
    launch(first[:1], b[:1], second[:1], 3.0)
    out = torch.empty_strided((a.shape[1], a.shape[0]), (1, a.shape[1]), dtype=a.dtype, device=a.device)
    launch(second, a if c is None else c, out.t(), -1.0)
    return out, a, None, a.new_empty(0)


def inputs(rows: int = 3, columns: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, columns), torch.randn(rows, columns)


def test_repeated_launches_give_what_the_function_gives() -> None:
    sequences, function = LaunchSequences(), Counted(of_views)
    for call in range(6):
        a, b = inputs()
        expected, *_ = of_views(a, b, None)
        out, same, nothing, empty = sequences("key", function, (a, b, None))
        assert out is not None
        assert empty is not None
        assert torch.equal(out, expected)
        assert out.stride() == expected.stride()
        assert same is a
        assert nothing is None
        assert empty.numel() == 0
        assert function.calls == min(call + 1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: (a.half(), b.half(), None),
        lambda a, b: (a[:2], b[:2], None),
        lambda a, b: (a.t().contiguous().t(), b, None),
        lambda a, b: (a, b, a + b),
        lambda a, b: (a, a, None),
        lambda a, b: (a.requires_grad_(), b, None),
        lambda a, b: (torch.randn(25)[1:].view(3, 8), b, None),
    ],
    ids=["dtype", "shape", "strides", "further tensor", "the same tensor", "requires_grad", "alignment"],
)
def test_other_tensors_are_noticed(change: Callable[..., Any]) -> None:
    """A call whose tensors differ from those that were recorded runs the function, and is recorded itself."""
    sequences, function = LaunchSequences(), Counted(of_views)
    for _ in range(3):
        sequences("key", function, (*inputs(), None))
    assert function.calls == 2
    for _ in range(3):
        tensors = change(*inputs())
        out, *_ = sequences("key", function, tensors)
        with torch.no_grad():
            assert torch.equal(out, of_views(*tensors)[0])
    assert function.calls > 2
    before = function.calls
    sequences("key", function, (*inputs(), None))
    assert function.calls == before


def test_tensors_that_overlap_are_told_apart() -> None:
    """q, k and v are often views of one tensor; their views are of the right one, wherever the others begin."""

    def run(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty(2, 8, dtype=q.dtype, device=q.device)
        launch(q[1:], k[:2], out, 1.0)
        return (out,)

    sequences, function = LaunchSequences(), Counted(run)
    for i in range(4):
        x = torch.randn(4, 16)
        q, k = (x[:3, :8], x[1:, :8]) if i < 3 else (x[:3, :8], x[:3, 8:])
        (out,) = sequences("key", function, (q, k))
        assert torch.equal(out, q[1:] + k[:2])
    assert function.calls == 2


def test_what_cannot_be_repeated_runs_every_time() -> None:
    hidden = torch.randn(3, 8)

    def computes(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, a.square(), out, 1.0)
        return (out,)

    def reads_another_tensor(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, hidden, out, 1.0)
        return (out,)

    def returns_a_view(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, a, out, 1.0)
        return (out[1:],)

    for function, expected in (
        (computes, lambda a: a + a * a),
        (reads_another_tensor, lambda a: a + hidden),
        (returns_a_view, lambda a: 2 * a[1:]),
    ):
        sequences, counted = LaunchSequences(), Counted(function)
        for _ in range(8):
            a, _ = inputs()
            (out,) = sequences("key", counted, (a,))
            assert torch.equal(out, expected(a))
        assert counted.calls == 8


def test_constants_are_read_where_they_are() -> None:
    ones = constant(lambda: torch.ones(3, 8))

    def run(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, ones[:, :], out, 2.0)
        return (out,)

    sequences, function = LaunchSequences(), Counted(run)
    for _ in range(4):
        a, _ = inputs()
        (out,) = sequences("key", function, (a,))
        assert out is not None
        assert torch.equal(out, 2 * a + 1)
    assert function.calls == 2


class Cache:
    """2 a in memory that stays, as copies of weights do, or in other memory each time, as in a CUDA graph's capture."""

    def __init__(self) -> None:
        self.cached, self.calls, self.reuses = torch.empty(3, 8), 0, True

    def doubled(self, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.calls > 50:
            raise OverflowError("calls")
        out = self.cached if self.reuses else torch.empty(3, 8)
        out[: len(a)] = 2.0 * a  # in PyTorch, which cannot be recorded
        launch(a, a, torch.empty_like(a), 1.0)
        return out, a.new_zeros(2)

    def run(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.empty_like(a)
        launch(a, b, first, 1.0)
        doubled, zeros = launch_capture.outside(self.doubled, a)
        out = torch.empty(2, 8)
        launch(doubled[1:3], first[:2], out, 1.0)
        return out, zeros


def test_what_is_outside_is_called_each_time() -> None:
    """Its results may be the same memory with other values, or other memory, but not of other metadata."""
    cache, sequences = Cache(), LaunchSequences()
    function, (a, b) = Counted(cache.run), inputs()
    for call in range(8):
        a, b = inputs()
        cache.reuses = call % 3 != 0
        out, zeros = sequences("key", function, (a, b))
        assert torch.equal(out, 2 * a[1:] + (a + b)[:2])
        assert not zeros.any()
        assert cache.calls == call + 1
    assert function.calls == 2
    cache.cached, cache.reuses = torch.empty(4, 8), True
    out, _ = sequences("key", function, (a, b))
    assert function.calls == 3
    assert torch.equal(out, 2 * a[1:] + (a + b)[:2])
    cache.calls = 50
    with pytest.raises(OverflowError, match="calls"):
        sequences("key", function, (a, b))


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        (lambda a: launch_capture.outside(lambda x: (x + 1.0,), a[:2])[0], lambda a: 2 * a[:2] + 2.0),
        (lambda a: launch_capture.outside(lambda x: (x,), a)[0], lambda a: 2 * a),
    ],
    ids=["of a tensor that is no argument", "which gives an argument"],
)
def test_what_is_outside_but_not_of_arguments_alone_is_not_repeated(
    outside: Callable[..., Any], expected: Callable[..., Any]
) -> None:
    def run(a: torch.Tensor) -> tuple[torch.Tensor]:
        first = outside(a)
        out = torch.empty_like(first)
        launch(first, first, out, 1.0)
        return (out,)

    sequences, function = LaunchSequences(), Counted(run)
    for _ in range(4):
        a, _ = inputs()
        (out,) = sequences("key", function, (a,))
        assert torch.equal(out, expected(a))
    assert function.calls == 4


def test_temporaries_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are in use at the same time do not: of a chain, two at a time, and one that is read at the end."""
    sizes: list[int] = []
    workspace = launch_sequence._workspace
    monkeypatch.setattr(
        launch_sequence, "_workspace", lambda size, device: (sizes.append(size), workspace(size, device))[1]
    )

    def run(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        large, small = a.new_empty(2 * len(a), *a.shape[1:]), torch.empty_like(a)
        launch(a, b, small, 2.0)
        chain = a
        for _ in range(4):
            out = torch.empty_like(a)
            launch(chain, b, out, 2.0)
            chain = out
        launch(chain, small, large[: len(a)], 1.0)
        launch(chain, b, large[len(a) :], 1.0)
        result = torch.empty_like(large)
        launch(large, large, result, 1.0)
        return (result,)

    sequences, function = LaunchSequences(), Counted(run)
    for _ in range(4):
        a, b = inputs(8, 8)  # of 256 bytes
        (out,) = sequences("key", function, (a, b))
        chain = 16 * a + 15 * b
        expected = torch.cat([chain + 2 * a + b, chain + b])
        assert torch.allclose(out, 2 * expected, rtol=1e-5, atol=1e-4)
    assert function.calls == 2
    assert sizes == [4 * 256]  # at the end of the chain: it, the small and the large one


def test_types_are_those_of_the_launches_interface() -> None:
    for dtype, code_and_bits in launch_sequence._DTYPES.items():
        x = tvm_ffi.from_dlpack(torch.empty(16, dtype=dtype))
        assert (x.dtype.type_code, x.dtype.bits) == code_and_bits


def test_a_launch_that_fails_raises_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences, function = LaunchSequences(), Counted(of_views)
    for _ in range(3):
        sequences("key", function, (*inputs(), None))
    run = sequences._sequences["key"][0]

    def failing(*_: Any) -> int:
        return -1

    monkeypatch.setitem(run.__globals__, "launch", failing)
    a, b = inputs()
    out, *_ = sequences("key", function, (a, b, None))  # the function succeeds
    assert torch.equal(out, of_views(a, b, None)[0])

    def fails(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, a, out, 1e7)
        return (out,)

    with pytest.raises(ValueError, match="factor is too large"):
        sequences("other", fails, (a,))


def test_a_later_launch_that_fails_raises_and_nothing_runs_twice() -> None:
    def adds(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, total, total, 1.0)
        launch(a, b, out, 1.0)
        return (out,)

    sequences, function = LaunchSequences(), Counted(adds)
    total = torch.zeros(3, 8)
    for _ in range(3):
        sequences("key", function, (torch.ones(3, 8), torch.ones(3, 8), total), adds=True)
    with pytest.raises(ValueError, match="b is not a number"):
        sequences("key", function, (torch.ones(3, 8), torch.full((3, 8), torch.nan), total), adds=True)
    assert function.calls == 2
    assert torch.equal(total, torch.full((3, 8), 4.0))
    (out,) = sequences("key", function, (torch.ones(3, 8), torch.ones(3, 8), total), adds=True)
    assert torch.equal(out, torch.full((3, 8), 2.0))
    assert function.calls == 2


def test_launches_on_another_stream_are_not_repeated() -> None:
    def forks(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch_capture.record(KERNEL, SLOTS, (a, a, out, 2.0, 1234))
        KERNEL(a, a, out, 2.0, 0)
        return (out,)

    sequences, function = LaunchSequences(), Counted(forks)
    for _ in range(4):
        sequences("key", function, inputs()[:1])
    assert function.calls == 4


def test_no_launch_is_missed_while_another_thread_ends_its_capture() -> None:
    class Leaving:
        @property
        def thread(self) -> int:
            launch_capture.captures.remove(self)  # as the other thread may at any moment
            return 0

    def run(a: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(a)
        launch(a, a, out, 2.0)
        return (out,)

    a, _ = inputs()
    leaving: Any = Leaving()
    with launch_sequence.Capture() as capture:
        launch_capture.captures.insert(0, leaving)
        run(a)
    assert len(capture.launches) == 1


def test_no_tensor_is_kept() -> None:
    sequences, kept = LaunchSequences(), []

    def run(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        temporary, out = torch.empty_like(a), torch.empty_like(a)
        launch(a, b, temporary, 2.0)
        launch(temporary[:], b, out, 1.0)
        kept.append(weakref.ref(temporary))
        return (out,)

    for _ in range(4):
        tensors = inputs()
        (out,) = sequences("key", run, tensors)
        kept += [weakref.ref(x) for x in (*tensors, out)]
    del tensors, out
    assert [each() for each in kept] == [None] * len(kept)


def test_threads_do_not_share_arguments() -> None:
    sequences, barrier = LaunchSequences(), threading.Barrier(4)
    for _ in range(3):
        sequences("key", of_views, (*inputs(), None))

    def work(_: int) -> bool:
        barrier.wait()
        for _ in range(50):
            a, b = inputs()
            out, *_rest = sequences("key", of_views, (a, b, None))
            if not torch.equal(out, of_views(a, b, None)[0]):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_copies_begin_without_sequences_and_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_sequence, "MAX_SEQUENCES", 2)
    sequences = LaunchSequences()
    for key in (1, 2, 3):
        sequences(key, of_views, (*inputs(), None))
    assert list(sequences._sequences) == [2, 3]
    for clone in (copy.deepcopy(sequences), pickle.loads(pickle.dumps(sequences))):
        assert not clone._sequences


def test_large_temporaries_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_sequence, "MAX_TEMPORARY_BYTES", 64)
    sequences, function = LaunchSequences(), Counted(of_views)
    for _ in range(4):
        sequences("key", function, (*inputs(), None))
    assert function.calls == 4


def test_operators_depend_on_their_numbers_and_on_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    monkeypatch.setattr(launch_sequence, "are_repeated", lambda x: True)

    def run(a: torch.Tensor, factor: float) -> torch.Tensor:
        calls.append(factor)
        out = torch.empty_like(a)
        launch(a, a, out, factor)
        return out

    operator = repeated(run, [0], 2**10)
    for factor in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0):
        a, _ = inputs()
        assert torch.equal(operator(a, factor), factor * a + a)
    assert calls == [1.0, 1.0, 2.0, 2.0]
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "1")
    operator(a, 1.0)
    assert calls == [1.0, 1.0, 2.0, 2.0, 1.0]
    torch.use_deterministic_algorithms(True)
    try:
        operator(a, 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls == [1.0, 1.0, 2.0, 2.0, 1.0, 1.0]


def test_operators_that_take_lists_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_sequence, "are_repeated", lambda x: True)

    def run(a: torch.Tensor, others: list[torch.Tensor], factor: float) -> torch.Tensor:
        for b in others:
            out = torch.empty_like(a)
            launch(a, b, out, factor)
            a = out
        return a

    function = Counted(run)
    operator = repeated(function, [0, 1], 2**10)
    for count in (1, 2, 3) * 3:
        a, *others = (torch.randn(3, 8) for _ in range(1 + count))
        assert torch.allclose(operator(a, others, 1.0), a + sum(others), atol=1e-5)
    assert function.calls == 6
    b = torch.randn(3, 8)
    assert torch.allclose(operator(a, [b, b], 1.0), a + 2 * b, atol=1e-5)
    assert function.calls == 7


@pytest.mark.parametrize("block", [True, False])
def test_the_emulator_gets_every_call(block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks the values of tensors, which repeated launches do not."""
    function = Counted(lambda a: of_views(a, a, None)[0])
    operator = repeated(function, [0], 2**10)
    if not block:
        monkeypatch.setenv("CUDNN_EMULATE", "sm_90a")
    with cudnn.emulation("sm_90a") if block else contextlib.nullcontext():
        for _ in range(4):
            operator(inputs()[0])
    assert function.calls == 4
