"""``pygraph.execute`` on a GPU: streams, capture, changing buffers, scalars, workspace, handles, restored plans."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import cudnn
from cudnn.backend.plan import ExecutionPlan
from gpu.common import assert_allocates_nothing_and_waits_for_nothing
from support.graphs import FLOAT, HALF, MODES

pytestmark = pytest.mark.gpu


class Linear(NamedTuple):
    """relu(A B + bias), [4, 128, 256] x [4, 256, 64], with its tensors."""

    graph: cudnn.pygraph
    a: cudnn.tensor
    b: cudnn.tensor
    bias: cudnn.tensor
    y: cudnn.tensor

    def data(self) -> dict[cudnn.tensor, torch.Tensor]:
        """Fresh inputs, and an output full of NaN."""
        half: Any = {"dtype": torch.float16, "device": "cuda"}
        return {
            self.a: torch.randn(4, 128, 256, **half),
            self.b: torch.randn(4, 256, 64, **half),
            self.bias: torch.randn(1, 128, 64, **half),
            self.y: torch.full((4, 128, 64), float("nan"), **half),
        }

    def workspace(self) -> torch.Tensor:
        return torch.empty(self.graph.get_workspace_size(), dtype=torch.uint8, device="cuda")

    def check(self, data: dict[cudnn.tensor, torch.Tensor]) -> None:
        a, b, bias = (data[tensor].float() for tensor in (self.a, self.b, self.bias))
        torch.testing.assert_close(data[self.y].float(), torch.relu(a @ b + bias), atol=3e-2, rtol=3e-3)


def linear(**options: Any) -> Linear:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, **options)
    a = graph.tensor(dim=[4, 128, 256], stride=[128 * 256, 256, 1], name="a", uid=1)
    b = graph.tensor(dim=[4, 256, 64], stride=[256 * 64, 64, 1], name="b", uid=2)
    bias = graph.tensor(dim=[1, 128, 64], stride=[128 * 64, 64, 1], name="bias", uid=3)
    y = graph.relu(graph.bias(graph.matmul(a, b, name="mm"), bias, name="shift"), name="act")
    y.set_output(True).set_uid(4)
    graph.build(MODES)
    return Linear(graph, a, b, bias, y)


def test_new_tensors_at_every_call() -> None:
    """More sets of buffers than a plan keeps packs for, all alive at once, then each once more."""
    it = linear()
    workspace = it.workspace()
    sets = [it.data() for _ in range(ExecutionPlan.MAX_PACKS + 20)]
    for data in sets:
        it.graph.execute(data, workspace)
    for data in sets:
        it.check(data)
        data[it.y].fill_(float("nan"))
    for data in reversed(sets):
        it.graph.execute(data, workspace)
    for data in sets:
        it.check(data)


def test_packs_are_forgotten_when_buffers_keep_changing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutionPlan, "MAX_PACKS", 2)
    monkeypatch.setattr(ExecutionPlan, "MAX_MISSES", 5)
    it = linear()
    workspace = it.workspace()
    sets = [it.data() for _ in range(12)]
    for _ in range(2):
        for data in sets:
            it.graph.execute(data, workspace)
            it.check(data)


def test_keys_and_data_of_every_kind() -> None:
    it = linear()
    data, workspace = it.data(), it.workspace()
    by_uid = {tensor.get_uid(): value for tensor, value in data.items()}
    addresses = {uid: value.data_ptr() for uid, value in by_uid.items()}
    mixed = {it.a: data[it.a].data_ptr(), 2: data[it.b], it.bias: data[it.bias], 4: data[it.y], None: 0, 99: data[it.a]}
    for pack in (data, by_uid, addresses, mixed, by_uid, data):
        data[it.y].fill_(float("nan"))
        it.graph.execute(pack, workspace)
        it.check(data)
    data[it.y].fill_(float("nan"))
    it.graph.execute(data, workspace.data_ptr())
    it.check(data)


@pytest.mark.parametrize("warm", [True, False])
def test_capture_and_replay_with_changed_data(warm: bool) -> None:
    """Also of a first call: preparing it does nothing that a capture forbids."""
    it = linear()
    data, workspace = it.data(), it.workspace()
    if warm:
        it.graph.execute(data, workspace)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        it.graph.execute(data, workspace)
    for _ in range(3):
        for tensor in (it.a, it.b, it.bias):
            data[tensor].normal_()
        data[it.y].fill_(float("nan"))
        captured.replay()
        torch.cuda.synchronize()
        it.check(data)


def test_without_a_handle_the_current_stream_runs_it() -> None:
    """The input is written late on a stream of its own: only a call on that stream sees it."""
    it = linear()
    data, workspace = it.data(), it.workspace()
    late = data[it.a].clone()
    data[it.a].zero_()
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            data[it.a].zero_()
            torch.cuda._sleep(20_000_000)
            data[it.a].copy_(late)
            it.graph.execute(data, workspace)
        stream.synchronize()
        it.check(data)


def test_a_handle_on_a_stream() -> None:
    it = linear()
    handle, stream = cudnn.create_handle(), torch.cuda.Stream()
    cudnn.set_stream(handle=handle, stream=stream.cuda_stream)
    assert cudnn.get_stream(handle) == stream.cuda_stream
    data, workspace = it.data(), it.workspace()
    late = data[it.a].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        data[it.a].zero_()
        torch.cuda._sleep(20_000_000)
        data[it.a].copy_(late)
    it.graph.execute(data, workspace, handle=handle)
    stream.synchronize()
    it.check(data)
    cudnn.destroy_handle(handle)


def test_workspace_is_not_overrun() -> None:
    """The first candidate plans, each run between guard bytes."""
    it = linear()
    guard, ran = 4096, 0
    for index in range(min(it.graph.get_execution_plan_count(), 8)):
        try:
            it.graph.build_plan_at_index(index)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            continue
        size = it.graph.get_workspace_size_plan_at_index(index)
        memory = torch.full((size + 2 * guard,), 0x5A, dtype=torch.uint8, device="cuda")
        data = it.data()
        it.graph.execute_plan_at_index(data, memory[guard : guard + size], index)
        it.check(data)
        assert bool((memory[:guard] == 0x5A).all())
        assert bool((memory[guard + size :] == 0x5A).all())
        ran += 1
    assert ran > 0


# Scalars.
def scaled() -> tuple[cudnn.pygraph, cudnn.tensor, cudnn.tensor, cudnn.tensor]:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    x = graph.tensor(dim=[1, 64, 128], stride=[64 * 128, 128, 1], name="x")
    factor = graph.tensor_like(torch.ones(1, 1, 1))
    y = graph.mul(x, factor, name="times").set_output(True)
    graph.build(MODES)
    return graph, x, factor, y


def test_a_scalar_that_changes_between_calls() -> None:
    """In place, at the same address, and as a new array."""
    graph, x, factor, y = scaled()
    assert factor.get_is_pass_by_value()
    data = torch.randn(1, 64, 128, dtype=torch.float16, device="cuda")
    out, scalar = torch.empty_like(data), torch.ones(1, 1, 1)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    for value in (2.0, -3.0, 0.5, 0.5):
        scalar.fill_(value)
        graph.execute({x: data, factor: scalar, y: out.fill_(float("nan"))}, workspace)
        torch.testing.assert_close(out, data * value, atol=1e-2, rtol=1e-3)
    for fresh in (torch.full((1, 1, 1), 4.0), np.full((1, 1, 1), -1.0, dtype=np.float32)):
        graph.execute({x: data, factor: fresh, y: out.fill_(float("nan"))}, workspace)
        torch.testing.assert_close(out, data * fresh.item(), atol=1e-2, rtol=1e-3)


def test_a_scalar_on_the_device_is_refused() -> None:
    graph, x, factor, y = scaled()
    data = torch.randn(1, 64, 128, dtype=torch.float16, device="cuda")
    out = torch.empty_like(data)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    wrong = {x: data, factor: torch.ones(1, 1, 1, device="cuda"), y: out}
    for _ in range(2):  # before and after a call that went well
        with pytest.raises(ValueError, match="got a tensor on cuda:0; allowed: the CPU"):
            graph.execute(wrong, workspace)
        graph.execute({x: data, factor: torch.ones(1, 1, 1), y: out}, workspace)


# Refusals.
@pytest.mark.parametrize("warm", [False, True])
def test_refusals(warm: bool) -> None:
    it = linear()
    data, workspace = it.data(), it.workspace()
    if warm:
        it.graph.execute(data, workspace)
    for tensor in data:
        with pytest.raises(ValueError, match=rf"tensor {tensor.get_name()!r} \(uid {tensor.get_uid()}\): got no data"):
            it.graph.execute({key: value for key, value in data.items() if key is not tensor}, workspace)
        with pytest.raises(ValueError, match=rf"uid {tensor.get_uid()}\): got a tensor on cpu; allowed: cuda:0"):
            it.graph.execute({**data, tensor: data[tensor].cpu()}, workspace)
        with pytest.raises(TypeError, match=rf"uid {tensor.get_uid()}\): got list; allowed: a torch.Tensor"):
            it.graph.execute({**data, tensor: [1]}, workspace)
    it.graph.execute(data, workspace)
    it.check(data)


def test_a_workspace_that_is_too_small() -> None:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    x = graph.tensor(dim=[128, 256, 1, 1], stride=[256, 1, 256, 256], name="x")
    scale = graph.tensor(dim=[1, 256, 1, 1], stride=[256, 1, 256, 256], name="scale", data_type=FLOAT)
    phase = cudnn.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, x, scale, epsilon=graph.tensor_scalar(1e-5), name="norm")
    y.set_output(True)
    graph.build(MODES)
    size = graph.get_workspace_size()
    if not size:
        pytest.skip("this version of cuDNN needs no workspace here")
    half: Any = {"dtype": torch.float16, "device": "cuda"}
    data = {x: torch.randn(128, 256, **half), scale: torch.ones(256, device="cuda"), y: torch.empty(128, 256, **half)}
    enough = torch.empty(size, dtype=torch.uint8, device="cuda")
    for _ in range(2):  # before and after a call that went well
        with pytest.raises(ValueError, match=f"workspace: got {size - 1} bytes; allowed: {size} bytes or more"):
            graph.execute(data, torch.empty(size - 1, dtype=torch.uint8, device="cuda"))
        with pytest.raises(ValueError, match="workspace: got 0 bytes"):
            graph.execute(data)
        with pytest.raises(ValueError, match="workspace: got a tensor on cpu"):
            graph.execute(data, enough.cpu())
        graph.execute(data, enough)


def test_dead_and_foreign_handles() -> None:
    it = linear()
    data, workspace = it.data(), it.workspace()
    handle = cudnn.create_handle()
    it.graph.execute(data, workspace, handle=handle)
    it.graph.execute(data, workspace, handle=int(handle))
    cudnn.destroy_handle(handle)
    for _ in range(2):
        with pytest.raises(ValueError, match="live handle"):
            it.graph.execute(data, workspace, handle=handle)
        with pytest.raises(ValueError, match="no live handle"):
            it.graph.execute(data, workspace, handle=0x1234)
        it.graph.execute(data, workspace)
    it.check(data)


def test_a_graph_whose_handle_was_destroyed() -> None:
    handle = cudnn.create_handle()
    it = linear(handle=handle)
    data, workspace = it.data(), it.workspace()
    it.graph.execute(data, workspace)
    it.check(data)
    cudnn.destroy_handle(handle)
    with pytest.raises(ValueError, match="live handle"):
        it.graph.execute(data, workspace)


# Kept graphs.
def test_serialise_restore_execute() -> None:
    """In each form, also of what was restored, without the graph that it was at first."""
    it = linear()
    serialized = it.graph.serialize()
    assert json.loads(serialized)["plan"]
    about = it.graph.get_plan_name(), it.graph.get_behavior_notes()
    it.graph._forget_program()
    for arguments in ((serialized,), (list(serialized),), (cudnn.create_handle(), serialized)):
        first, restored = cudnn.pygraph(), cudnn.pygraph()
        first.deserialize(*arguments)
        restored.deserialize(first.serialize())
        assert (restored.get_plan_name(), restored.get_behavior_notes()) == about
        data = it.data()
        pack = {tensor.get_uid(): value for tensor, value in data.items()}
        for graph in (first, restored, restored):
            data[it.y].fill_(float("nan"))
            graph.execute(pack, torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda"))
            it.check(data)


def test_what_the_reference_executor_serialised_is_built_here() -> None:
    reference = linear(backend="reference")
    restored = cudnn.pygraph()
    restored.deserialize(reference.graph.serialize())
    assert restored.get_plan_name().startswith("eng")
    data = reference.data()
    pack = {tensor.get_uid(): value for tensor, value in data.items()}
    restored.execute(pack, torch.empty(restored.get_workspace_size(), dtype=torch.uint8, device="cuda"))
    reference.check(data)


# Which executor.
def test_the_reference_executor_on_gpu_tensors() -> None:
    it = linear(backend="reference")
    assert it.graph.get_plan_name() == "reference"
    data = it.data()
    it.graph.execute(data, it.workspace())
    it.check(data)


def test_nothing_is_allocated() -> None:
    it = linear()
    data, workspace = it.data(), it.workspace()
    assert_allocates_nothing_and_waits_for_nothing(lambda: it.graph.execute(data, workspace))


def test_a_tensor_that_no_operation_uses_is_an_extra_entry() -> None:
    net = linear()
    data = net.data()
    unused = net.graph.tensor_like(data[net.bias])
    for _ in range(2):  # the second call takes the path for data like those of the first
        net.graph.execute({**data, unused: data[net.bias]}, net.workspace())
        net.check(data)


def test_arrays_of_other_types_and_layouts_are_refused() -> None:
    """Types at every call, also where the addresses are known; layouts where an address is new."""
    net = linear()
    workspace = net.workspace()
    data = net.data()
    a = data[net.a]
    for change in (a.bfloat16(), a.float(), a.to(torch.int32), a.mT.contiguous()):
        with pytest.raises(ValueError, match=r"execute: tensor 'a' \(uid 1\): got "):
            net.graph.execute({**data, net.a: change}, workspace)
    for _ in range(3):  # from the second call on, the path for data like these
        net.graph.execute(data, workspace)
    net.check(data)
    others = {
        net.a: [data[net.a].view(torch.bfloat16), torch.randn(8, 128, 256, device="cuda").half()],
        net.b: [data[net.b].view(torch.int16), torch.randn(4, 64, 256, device="cuda").half().mT],
        net.y: [torch.empty(4, 64, 128, device="cuda").half()],
    }
    for tensor, arrays in others.items():
        for other in arrays:
            with pytest.raises(ValueError, match=rf"execute: tensor .* \(uid {tensor.get_uid()}\): got "):
                net.graph.execute({**data, tensor: other}, workspace)


def test_other_views_of_the_same_memory_run() -> None:
    net = linear()
    data = net.data()
    flat = {tensor: array.flatten() for tensor, array in data.items()}
    merged = {**data, net.a: data[net.a].view(512, 256), net.bias: data[net.bias][0]}
    raw = {tensor: array.view(-1).view(torch.uint8) for tensor, array in data.items()}
    for pack in (flat, merged, raw, data, flat, {**data, net.a: DLPackOnly(data[net.a])}):
        data[net.y].fill_(float("nan"))
        net.graph.execute(pack, net.workspace())
        net.check(data)


class DLPackOnly:
    """A tensor that has DLPack's protocol alone."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()
