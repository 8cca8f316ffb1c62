"""Which arrays ``execute`` takes for a graph tensor: its type, and its elements where the graph looks for them."""

from __future__ import annotations

import itertools
import weakref
from ctypes import c_int
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.arrays.check import check_array
from cudnn.backend.plan import Pack
from cudnn.pygraph import fast_call
from cudnn.pygraph.tensor import Tensor
from support.drawing import shapes
from support.graphs import FLOAT, HALF, MODES, like, packed, reference_graph

types = cudnn.data_type


def tensor(dim: list[int], stride: list[int], dtype: Any = HALF) -> Tensor:
    return Tensor(dim, stride, dtype)


def array(dtype: torch.dtype, *dims: int) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)


F16, BF16, U8 = torch.float16, torch.bfloat16, torch.uint8
NCHW = tensor([8, 64, 16, 16], packed(8, 64, 16, 16))
CACHE = tensor([2, 4, 10, 64], [4 * 32 * 64, 32 * 64, 64, 1])  # 10 of 32 tokens
FP8, FP4 = tensor([4, 32], [32, 1], types.FP8_E4M3), tensor([4, 32], [32, 1], types.FP4_E2M1)
MASK = tensor([2, 64, 4, 4], [1024, 1, 256, 64], types.BOOLEAN)
ACCEPTED: dict[str, tuple[Tensor, Any]] = {
    "as it is": (NCHW, array(F16, 8, 64, 16, 16)),
    "channels last": (
        tensor([8, 64, 16, 16], [16384, 1, 1024, 64]),
        array(F16, 8, 64, 16, 16).to(memory_format=torch.channels_last),
    ),
    "channels last, by its shape in memory": (tensor([8, 64, 16, 16], [16384, 1, 1024, 64]), array(F16, 8, 16, 16, 64)),
    "a bias without leading ones": (tensor([1, 1, 48], [48, 48, 1]), array(F16, 48)),
    "a bias with any strides of ones": (tensor([1, 48, 1, 1], [48, 1, 48, 48]), array(F16, 1, 48, 1, 1)),
    "a scalar": (tensor([1, 1, 1, 1], [1] * 4, FLOAT), torch.tensor(1.0)),
    "the transposed of what is stored": (tensor([1, 32, 48], [1536, 1, 32]), array(F16, 1, 48, 32)),
    "heads and tokens the other way round": (tensor([2, 4, 16, 8], [512, 8, 32, 1]), array(F16, 2, 16, 4, 8)),
    "dimensions merged": (tensor([2, 3, 8], [24, 8, 1]), array(F16, 6, 8)),
    "dimensions split": (tensor([6, 8], [8, 1]), array(F16, 2, 3, 8)),
    "flat": (NCHW, array(F16, 8 * 64 * 256)),
    "strided": (tensor([4, 8], [20, 2]), array(F16, 80).as_strided((4, 8), (20, 2))),
    "spread": (tensor([4, 8], [0, 1]), array(F16, 8).expand(4, 8)),
    "all tokens of a cache": (CACHE, array(F16, 2, 4, 32, 64)),
    "all tokens of a cache of one head": (tensor([1, 1, 10, 64], [2048, 2048, 64, 1]), array(F16, 1, 1, 32, 64)),
    "rows with padding": (tensor([4, 30], [32, 1]), array(F16, 4, 32)),
    "bytes of fp8": (FP8, array(U8, 4, 32)),
    "signed bytes of fp8": (FP8, array(torch.int8, 4, 32)),
    "fp8": (FP8, array(torch.float8_e4m3fn, 4, 32)),
    "bytes of fp4": (FP4, array(U8, 4, 16)),
    "bytes of transposed fp4": (tensor([32, 4], [1, 32], types.FP4_E2M1), array(U8, 4, 16)),
    "bool": (MASK, array(torch.bool, 2, 64, 4, 4)),
    "a byte for eight elements": (MASK, array(U8, 2, 8, 4, 4)),
    "scales in tiles": (
        Tensor([2, 200, 6], [1200, 6, 1], types.FP8_E8M0, reordering_type=cudnn.tensor_reordering.F8_128x4),
        array(U8, 2, 256, 8),
    ),
    "raw memory": (tensor([4, 8], [8, 1], FLOAT), array(U8, 4 * 8 * 4 + 100)),
    "rows of a ragged tensor": (
        Tensor([2, 4, 16, 8], [512, 8, 32, 1], HALF, ragged_offset=Tensor()),
        array(F16, 21, 4, 8),
    ),
    "DLPack": (tensor([4, 8], [8, 1], FLOAT), np.zeros((4, 8), np.float32)),
}
REFUSED: dict[str, tuple[Tensor, Any]] = {
    "channels last": (NCHW, array(F16, 8, 64, 16, 16).to(memory_format=torch.channels_last)),
    "channels last, by its shape in memory": (NCHW, array(F16, 8, 16, 16, 64)),
    "another type of the same size": (NCHW, array(BF16, 8, 64, 16, 16)),
    "a larger type": (NCHW, array(torch.float32, 8, 64, 16, 16)),
    "integers": (tensor([4, 8], [8, 1], FLOAT), array(torch.int32, 4, 8)),
    "another fp8": (FP8, array(torch.float8_e5m2, 4, 32)),
    "unsigned for signed": (tensor([4, 8], [8, 1], types.INT8), array(U8, 4, 8)),
    "more entries": (NCHW, array(F16, 16, 64, 16, 16)),
    "fewer entries": (NCHW, array(F16, 4, 64, 16, 16)),
    "an entry more than one": (tensor([1, 4, 8], [32, 8, 1]), array(F16, 2, 4, 8)),
    "the transposed of a square": (tensor([32, 32], [32, 1]), array(F16, 32, 32).T),
    "the transposed": (tensor([32, 48], [48, 1]), array(F16, 48, 32)),
    "gaps": (tensor([4, 8], [8, 1]), array(F16, 4, 16)[:, :8]),
    "no gaps": (tensor([4, 8], [16, 1]), array(F16, 4, 8)),
    "fewer bytes of fp4": (FP4, array(U8, 4, 8)),
    "unpacked fp4": (FP4, array(U8, 4, 32)),
    "too short a mask": (MASK, array(U8, 2, 7, 4, 4)),
    "too little raw memory": (tensor([4, 8], [8, 1], FLOAT), array(U8, 4 * 8 * 4 - 1)),
    "another type for a ragged tensor": (
        Tensor([2, 4, 16, 8], [512, 8, 32, 1], HALF, ragged_offset=Tensor()),
        array(BF16, 21, 4, 8),
    ),
    "DLPack of another type": (tensor([4, 8], [8, 1], FLOAT), np.zeros((4, 8), np.float64)),
    "DLPack of another shape": (tensor([4, 8], [8, 1], FLOAT), np.zeros((4, 9), np.float32)),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case: str) -> None:
    described, given_array = ACCEPTED[case]
    check_array(described, given_array, "x")


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    described, given_array = REFUSED[case]
    with pytest.raises(ValueError, match=r"^execute: x: got .*; allowed: .* To fix it, "):
        check_array(described, given_array, "x")


def test_pools_hold_more_pages_than_the_graph_says() -> None:
    pages = tensor([8, 4, 16, 64], packed(8, 4, 16, 64))
    check_array(pages, array(F16, 20, 4, 16, 64), "x", pool=True)
    with pytest.raises(ValueError, match="x: got shape"):
        check_array(pages, array(F16, 20, 4, 16, 64), "x")
    with pytest.raises(ValueError, match="x: got shape"):
        check_array(pages, array(F16, 7, 4, 16, 64), "x", pool=True)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dims=shapes())
def test_views_of_the_same_memory_are_accepted(data: st.DataObject, dims: list[int]) -> None:
    """Whatever order the dimensions have in memory, that order and the flat memory describe the same elements."""
    order = data.draw(st.permutations(range(len(dims))))
    stored = torch.empty([dims[axis] for axis in order], dtype=F16)
    view = stored.permute(*(order.index(axis) for axis in range(len(dims))))
    described = tensor(list(view.shape), list(view.stride()))
    check_array(described, view, "x")
    check_array(described, stored.flatten(), "x")
    if sorted(order) == order or len({extent for extent in dims if extent > 1}) == sum(e > 1 for e in dims):
        check_array(described, stored, "x")


# In execute().
def product() -> tuple[cudnn.pygraph, dict[int, Any]]:
    graph = reference_graph(HALF)
    a = graph.tensor([1, 16, 32], [512, 32, 1], name="a", uid=1)
    b = graph.tensor([1, 32, 16], [512, 16, 1], name="b", uid=2)
    graph.matmul(a, b).set_output(True).set_uid(3)
    graph.build(MODES)
    data = {1: torch.randn(1, 16, 32).half(), 2: torch.randn(1, 32, 16).half(), 3: torch.empty(1, 16, 16).half()}
    return graph, data


@pytest.mark.parametrize("change", [lambda x: x.bfloat16(), lambda x: x.float(), lambda x: x.mT.contiguous()])
@pytest.mark.parametrize("uid", [1, 2])
def test_the_reference_executor_checks_every_call(uid: int, change: Any) -> None:
    graph, data = product()
    graph.execute(data)
    with pytest.raises(ValueError, match=rf"execute: tensor '.' \(uid {uid}\): got .*; allowed: "):
        graph.execute({**data, uid: change(data[uid])})


def test_outputs_over_other_tensors_are_refused() -> None:
    graph = reference_graph()
    x = graph.tensor([4, 8], [8, 1], name="x", uid=1)
    graph.neg(x, name="minus").set_output(True).set_uid(2)
    graph.abs(x, name="size").set_output(True).set_uid(3)
    graph.build(MODES)
    memory = torch.arange(-64.0, 64.0)
    parts = [memory[start : start + 32].view(4, 8) for start in (0, 32, 64, 8)]
    graph.execute({1: parts[0], 2: parts[1], 3: parts[2]})
    with pytest.raises(ValueError, match=r"output tensor '.*' \(uid .\): got memory that tensor '.*' \(uid .\) uses"):
        graph.execute({1: parts[0], 2: parts[1], 3: parts[1]})
    with pytest.raises(ValueError, match=r"output tensor 'minus::OUT_0' \(uid 2\): got memory that tensor 'x'"):
        graph.execute({1: parts[0], 2: parts[3], 3: parts[2]})
    wanted = -parts[0]
    graph.execute({1: parts[0], 2: parts[0], 3: parts[1]})  # in place
    assert torch.equal(parts[0], wanted)


def test_outputs_between_the_elements_of_others_are_not() -> None:
    """As rotary embeddings do, in place on the two halves of every row."""
    graph = reference_graph()
    memory = torch.randn(6, 16)
    halves = [memory[:, :8], memory[:, 8:]]
    first, second = (like(graph, half) for half in halves)
    outs = [graph.neg(x).set_output(True) for x in (second, first)]
    graph.build(MODES)
    wanted = torch.cat([-halves[1], -halves[0]], 1)
    graph.execute({first: halves[0], second: halves[1], outs[0]: halves[0], outs[1]: halves[1]})
    assert torch.equal(memory, wanted)


# On the path that is written out for a graph.
class Recorder:
    """Stands for a plan: counts what reaches cuDNN, and what the driver."""

    def __init__(self, fills_cuda_graphs: bool = True) -> None:
        self.packs: dict[Any, Pack] = {}
        self.argument, self.launched, self.checked, self.elsewhere = 0, 0, 0, 0
        self.last: Any = None
        self.fills_cuda_graphs = fills_cuda_graphs
        self.graphs: list[Any] = []  # that were launched
        self.refusal = 0

    def pack(self, key: Any) -> Pack:
        return self.packs.setdefault(key, Pack(key))

    def keep_graph(self, pack: Pack, handle: Any) -> None:
        pack.queue, pack.graph = handle.queue, pack.argument

    def lose_graph(self, pack: Pack, status: int) -> None:
        pack.queue = None

    def launch_graph(self, graph: Any, queue: Any) -> int:
        self.graphs.append((graph, queue))
        return self.refusal

    def launch(self, *arguments: Any) -> int:
        self.launched += 1
        self.last = arguments
        return 0

    def failure(self, status: int) -> Exception:
        return RuntimeError(status)


class Bound:
    """Stands for a program of one tensor on the device, one passed by value, and its plan."""

    by_value, device, plain, off_bits = frozenset({2}), 0, True, ()

    def __init__(self, plan: Recorder) -> None:
        self.bindings, self.plan = type("Bindings", (), {"user": [1, 2]}), plan

    def workspace_size(self, plan: Any) -> int:
        return 0

    def check(self, *_: Any) -> None:
        self.plan.checked += 1


class Handle:
    device, ptr, argument, stream = -1, 1, 1, 0  # the device of CPU tensors

    def __init__(self) -> None:
        self.queue, self.capturing, self.busy = object(), c_int(), False
        self.capture_result = self.capturing
        self.keeps_up, self.until_asked = False, 0


@pytest.fixture
def call() -> tuple[Any, Recorder]:
    """The call written out for float32 of [4, 8] (key 1) and one float32 number (key 2)."""
    plan = Recorder()

    def otherwise(*_: Any) -> None:
        plan.elsewhere += 1

    arrays = [torch.zeros(4, 8), torch.ones(1)]
    return fast_call.specialised(Bound(plan), plan, [1, 2], arrays, Handle(), otherwise), plan  # type: ignore[arg-type]


def test_types_are_compared_where_addresses_are_known(call: tuple[Any, Recorder]) -> None:
    run, plan = call
    x, scalar = torch.zeros(4, 8), torch.ones(1)
    for _ in range(3):
        run({1: x, 2: scalar})
    assert (plan.launched, plan.checked, plan.elsewhere) == (3, 0, 0)
    run({1: x.view(torch.int32), 2: scalar})
    run({1: x, 2: scalar.view(torch.int32)})
    assert (plan.launched, plan.checked, plan.elsewhere) == (3, 0, 2)


def test_each_call_gets_its_own_addresses_and_handle(call: tuple[Any, Recorder]) -> None:
    run, plan = call
    tensors = [torch.zeros(4, 8), torch.zeros(4, 8)], [torch.ones(1), torch.ones(1)]
    handles = [Handle(), Handle()]
    for number, handle in enumerate(handles, 1):
        handle.ptr, handle.argument = number, number
    calls = [*itertools.product(*tensors, handles)]
    for x, scalar, handle in [*calls, *calls, *calls, *(one for one in calls for _ in range(3))]:
        run({1: x, 2: scalar}, None, handle)
        assert plan.last == (handle.ptr, plan.argument, (x.data_ptr(), scalar.data_ptr(), 0, handle.ptr))
    handle = handles[0]
    handle.ptr, handle.argument = 0, None  # destroyed
    run({1: tensors[0][0], 2: tensors[1][0]}, None, handle)
    assert plan.last[-1][-1] == 0  # looked for among the packs, where a real plan would refuse it


def test_all_is_checked_that_is_new_and_not_like_what_was_accepted(call: tuple[Any, Recorder]) -> None:
    run, plan = call
    keep_alive: list[torch.Tensor] = []  # so that all have different addresses
    for checks, x in (
        (0, torch.zeros(4, 8)),
        (1, torch.zeros(8, 4).mT),
        (2, torch.zeros(4, 8, dtype=torch.int32)),
        (3, torch.zeros(8, 4)),
    ):
        for _ in range(2):
            keep_alive += [x.clone(), torch.ones(1)]
            run({1: keep_alive[-2], 2: keep_alive[-1]})
            assert plan.checked == checks
    elsewhere = Handle()
    elsewhere.device = 0
    run({1: torch.zeros(8, 4), 2: torch.ones(1)}, None, elsewhere)
    assert (plan.checked, plan.elsewhere) == (4, 0)


def test_what_a_check_refuses_is_not_accepted(call: tuple[Any, Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    run, plan = call

    def refuse(*_: Any) -> None:
        plan.checked += 1
        raise ValueError("execute")

    monkeypatch.setattr(Bound, "check", refuse)
    for checks in (1, 2):
        with pytest.raises(ValueError, match="execute"):
            run({1: torch.zeros(8, 4), 2: torch.ones(1)})
        assert (plan.checked, plan.launched) == (checks, 0)
    run({1: torch.zeros(4, 8), 2: torch.ones(1)})
    assert (plan.checked, plan.launched) == (2, 1)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a call written out for one tensor (key 1) and a scalar (key 2), on the device unless it is ``by_value``.

    The driver that stands in says of each handle what its ``capturing`` says.
    """

    def make(by_value: frozenset[int] = frozenset(), **options: Any) -> tuple[Any, Recorder, Handle]:
        plan, own = Recorder(**options), Handle()
        driver = {"cuGraphLaunch": plan.launch_graph, "cuStreamIsCapturing": lambda queue, result: 0}
        monkeypatch.setattr(fast_call, "unchecked", driver.__getitem__)
        monkeypatch.setattr(Pack, "CALLS_BEFORE_GRAPH", 3)

        def ask(handle: Any) -> None:
            handle.keeps_up, handle.until_asked = not handle.busy, 2

        monkeypatch.setattr(fast_call, "ask_whether_it_keeps_up", ask)
        program: Any = Bound(plan)
        program.by_value = by_value
        arrays = [torch.zeros(4, 8), torch.ones(1)]
        return fast_call.specialised(program, plan, [1, 2], arrays, own, lambda *_: None), plan, own  # type: ignore[arg-type]

    return make


def test_addresses_that_come_again_launch_a_cuda_graph(again: Any) -> None:
    run, plan, own = again()
    first, second = ({1: torch.zeros(4, 8), 2: torch.ones(1)} for _ in range(2))
    for _ in range(6):
        run(first)
    key = first[1].data_ptr(), first[2].data_ptr(), 0, own.ptr
    assert (plan.launched, plan.graphs) == (4, [(key, own.queue)] * 2)  # one to make the pack, three that are counted
    run(second)
    run({**first, 2: second[2]})
    assert (plan.launched, len(plan.graphs)) == (6, 2)
    run(first)
    run({**first, 1: first[1].view(torch.int32)})  # goes elsewhere
    assert (plan.launched, len(plan.graphs)) == (6, 3)


@pytest.mark.parametrize("captured", [True, False])
def test_a_capture_or_another_stream_gets_the_kernels_themselves(again: Any, captured: bool) -> None:
    run, plan, own = again()
    data = {1: torch.zeros(4, 8), 2: torch.ones(1)}
    for _ in range(5):
        run(data)
    home = own.queue
    own.capturing.value, own.queue = (1, home) if captured else (0, object())
    run(data)
    assert (plan.launched, len(plan.graphs)) == (5, 1)
    own.capturing.value, own.queue = 0, home
    run(data)
    assert (plan.launched, len(plan.graphs)) == (5, 2)


def test_a_gpu_that_is_far_behind_gets_the_kernels_themselves(again: Any) -> None:
    """Asked at every second call, here."""
    run, plan, own = again()
    data = {1: torch.zeros(4, 8), 2: torch.ones(1)}
    own.busy = True
    for _ in range(8):
        run(data)
    assert (plan.launched, len(plan.graphs)) == (8, 0)
    own.busy = False
    for _ in range(4):
        run(data)
    own.busy = True
    for _ in range(4):
        run(data)
    assert (plan.launched, len(plan.graphs)) == (12, 4)


def test_the_default_stream_of_another_device_does_not_get_the_cuda_graph(
    again: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [-1]
    monkeypatch.setattr(fast_call, "current_device", lambda: lambda: current[0])
    run, plan, own = again()
    data = {1: torch.zeros(4, 8), 2: torch.ones(1)}
    for device, stream, launched, graphs in ((-1, 0, 4, 1), (0, 0, 5, 1), (0, 8, 5, 2), (-1, 0, 5, 3)):
        current[0], own.stream = device, stream
        for _ in range(5 if not plan.launched else 1):
            run(data)
        assert (plan.launched, len(plan.graphs)) == (launched, graphs)


def test_a_cuda_graph_that_the_driver_refuses_is_given_up(again: Any) -> None:
    run, plan, _ = again()
    data = {1: torch.zeros(4, 8), 2: torch.ones(1)}
    plan.refusal = 700
    for _ in range(8):
        run(data)
    assert (plan.launched, len(plan.graphs)) == (8, 1)


@pytest.mark.parametrize(
    "options",
    [{"by_value": frozenset({2})}, {"fills_cuda_graphs": False}, {"setting": "0"}],
    ids=lambda o: next(iter(o)),
)
def test_where_no_cuda_graph_is_kept(again: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalars by value, whose values it would keep; plans that fill none; users who want none."""
    monkeypatch.setenv("CUDNN_PLAN_CUDA_GRAPHS", options.pop("setting", "1"))
    run, plan, _ = again(**options)
    data = {1: torch.zeros(4, 8), 2: torch.ones(1)}
    for _ in range(8):
        run(data)
    assert (plan.launched, plan.graphs) == (8, [])


@pytest.mark.parametrize("without", [False, True])
def test_arrays_alike(without: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's own comparison, and for a PyTorch without it."""
    if without:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    first = torch.zeros(4, 8)
    alive = weakref.ref(first)
    scalar = torch.tensor(1.0)
    alike = fast_call.guard([first, scalar])
    assert type(alike).__name__ == ("function" if without else "builtin_function_or_method")
    del first
    assert alive() is None
    assert alike(torch.ones(4, 8), scalar)
    for other in (
        torch.zeros(4, 8, dtype=torch.int32),
        torch.zeros(4, 8).bfloat16(),
        torch.zeros(4, 9)[:, :8],
        torch.zeros(8, 4),
        torch.zeros(8, 4).mT,
        torch.zeros(32),
        torch.zeros(1, 4, 8),
        torch.zeros(1).expand(4, 8),
        torch.zeros(4, 8, device="meta"),
    ):
        assert not alike(other, scalar)
    assert not alike(torch.ones(4, 8), scalar[None])
    twice = fast_call.guard([scalar, scalar])  # of which PyTorch's says no
    assert twice(scalar, scalar)
    assert not twice(scalar, scalar[None])
