"""``pygraph.execute`` on a GPU: streams, capture, changing buffers, scalars, workspace, handles, restored plans."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import cudnn
from cudnn.backend.plan import ExecutionPlan
from gpu.common import (
    BATCH,
    FP16,
    K,
    M,
    N,
    assert_allocates_nothing_and_waits_for_nothing,
    captured,
    check,
    data,
    product,
    workspace,
)
from support.graphs import FLOAT, HALF, MODES, OnlyDlpack


def built(**options: Any) -> cudnn.pygraph:
    graph = product(**options)
    graph.build(MODES)
    return graph


def test_new_tensors_at_every_call() -> None:
    """More sets of buffers than a plan keeps packs for, all alive at once, then each once more."""
    graph = built()
    space = workspace(graph)
    sets = [data() for _ in range(ExecutionPlan.MAX_PACKS + 20)]
    for pack in sets:
        graph.execute(pack, space)
    for pack in sets:
        check(pack)
        pack[3].fill_(float("nan"))
    for pack in reversed(sets):
        graph.execute(pack, space)
    for pack in sets:
        check(pack)


def test_packs_are_forgotten_when_buffers_keep_changing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutionPlan, "MAX_PACKS", 2)
    monkeypatch.setattr(ExecutionPlan, "MAX_MISSES", 5)
    graph = built()
    space = workspace(graph)
    sets = [data() for _ in range(12)]
    for _ in range(2):
        for pack in sets:
            graph.execute(pack, space)
            check(pack)


def test_keys_and_data_of_every_kind() -> None:
    graph = built()
    pack, space = data(), workspace(graph)
    tensors = {tensor.get_uid(): tensor for tensor in graph.nodes[0].tensors()}
    by_tensor = {tensors[uid]: value for uid, value in pack.items()}
    addresses = {uid: value.data_ptr() for uid, value in pack.items()}
    mixed = {1: pack[1].data_ptr(), tensors[2]: pack[2], 3: pack[3], None: 0, 99: pack[1]}
    for inputs in (by_tensor, pack, addresses, mixed, pack, by_tensor):
        pack[3].fill_(float("nan"))
        graph.execute(inputs, space)
        check(pack)
    pack[3].fill_(float("nan"))
    graph.execute(pack, space.data_ptr())
    check(pack)


@pytest.mark.parametrize("warm", [True, False])
def test_capture_and_replay_with_changed_data(warm: bool) -> None:
    """Also of a first call: preparing it does nothing that a capture forbids."""
    graph = built()
    pack, space = data(), workspace(graph)
    if warm:
        graph.execute(pack, space)
    torch.cuda.synchronize()
    again = captured(lambda: graph.execute(pack, space))
    for _ in range(3):
        for uid in (1, 2):
            pack[uid].normal_()
        pack[3].fill_(float("nan"))
        again.replay()
        torch.cuda.synchronize()
        check(pack)


def test_without_a_handle_the_current_stream_runs_it() -> None:
    """The input is written late on a separate stream: only a call on that stream sees it."""
    graph = built()
    pack, space = data(), workspace(graph)
    late = pack[1].clone()
    pack[1].zero_()
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            pack[1].zero_()
            torch.cuda._sleep(20_000_000)
            pack[1].copy_(late)
            graph.execute(pack, space)
        stream.synchronize()
        check(pack)


def test_a_handle_on_a_stream() -> None:
    graph = built()
    handle, stream = cudnn.create_handle(), torch.cuda.Stream()
    cudnn.set_stream(handle=handle, stream=stream.cuda_stream)
    assert cudnn.get_stream(handle) == stream.cuda_stream
    pack, space = data(), workspace(graph)
    late = pack[1].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        pack[1].zero_()
        torch.cuda._sleep(20_000_000)
        pack[1].copy_(late)
    graph.execute(pack, space, handle=handle)
    stream.synchronize()
    check(pack)
    cudnn.destroy_handle(handle)


def test_workspace_is_not_overrun() -> None:
    """The first candidate plans, each run between guard bytes."""
    graph = built()
    guard, ran = 4096, 0
    for index in range(min(graph.get_execution_plan_count(), 8)):
        try:
            graph.build_plan_at_index(index)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            continue
        size = graph.get_workspace_size_plan_at_index(index)
        memory = torch.full((size + 2 * guard,), 0x5A, dtype=torch.uint8, device="cuda")
        pack = data()
        graph.execute_plan_at_index(pack, memory[guard : guard + size], index)
        check(pack)
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
    space = workspace(graph)
    for value in (2.0, -3.0, 0.5, 0.5):
        scalar.fill_(value)
        graph.execute({x: data, factor: scalar, y: out.fill_(float("nan"))}, space)
        torch.testing.assert_close(out, data * value, atol=1e-2, rtol=1e-3)
    for fresh in (torch.full((1, 1, 1), 4.0), np.full((1, 1, 1), -1.0, dtype=np.float32)):
        graph.execute({x: data, factor: fresh, y: out.fill_(float("nan"))}, space)
        torch.testing.assert_close(out, data * fresh.item(), atol=1e-2, rtol=1e-3)


def test_a_scalar_on_the_device_is_refused() -> None:
    graph, x, factor, y = scaled()
    data = torch.randn(1, 64, 128, dtype=torch.float16, device="cuda")
    out = torch.empty_like(data)
    space = workspace(graph)
    wrong = {x: data, factor: torch.ones(1, 1, 1, device="cuda"), y: out}
    for _ in range(2):  # before and after a call that went well
        with pytest.raises(ValueError, match="got a tensor on cuda:0; allowed: the CPU"):
            graph.execute(wrong, space)
        graph.execute({x: data, factor: torch.ones(1, 1, 1), y: out}, space)


# Refusals.
@pytest.mark.parametrize("warm", [False, True])
def test_refusals(warm: bool) -> None:
    graph = built()
    pack, space = data(), workspace(graph)
    if warm:
        graph.execute(pack, space)
    for uid, name in ((1, "a"), (2, "b"), (3, "mm::C")):
        with pytest.raises(ValueError, match=rf"tensor {name!r} \(uid {uid}\): got no data"):
            graph.execute({key: value for key, value in pack.items() if key != uid}, space)
        with pytest.raises(ValueError, match=rf"uid {uid}\): got a tensor on cpu; allowed: cuda:0"):
            graph.execute({**pack, uid: pack[uid].cpu()}, space)
        with pytest.raises(TypeError, match=rf"uid {uid}\): got list; allowed: a torch.Tensor"):
            graph.execute({**pack, uid: [1]}, space)
    graph.execute(pack, space)
    check(pack)


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
    graph = built()
    pack, space = data(), workspace(graph)
    handle = cudnn.create_handle()
    graph.execute(pack, space, handle=handle)
    graph.execute(pack, space, handle=int(handle))
    cudnn.destroy_handle(handle)
    for _ in range(2):
        with pytest.raises(ValueError, match="live handle"):
            graph.execute(pack, space, handle=handle)
        with pytest.raises(ValueError, match="no live handle"):
            graph.execute(pack, space, handle=0x1234)
        graph.execute(pack, space)
    check(pack)


def test_a_graph_whose_handle_was_destroyed() -> None:
    handle = cudnn.create_handle()
    graph = built(handle=handle)
    pack, space = data(), workspace(graph)
    graph.execute(pack, space)
    check(pack)
    cudnn.destroy_handle(handle)
    with pytest.raises(ValueError, match="live handle"):
        graph.execute(pack, space)


# Kept graphs.
def test_serialise_restore_execute() -> None:
    """In each form, also of what was restored, without the graph that it was at first."""
    graph = built()
    serialized = graph.serialize()
    assert json.loads(serialized)["plan"]
    about = graph.get_plan_name(), graph.get_behavior_notes()
    graph._forget_program()
    for arguments in ((serialized,), (list(serialized),), (cudnn.create_handle(), serialized)):
        first, restored = cudnn.pygraph(), cudnn.pygraph()
        first.deserialize(*arguments)
        restored.deserialize(first.serialize())
        assert (restored.get_plan_name(), restored.get_behavior_notes()) == about
        pack = data()
        for graph in (first, restored, restored):
            pack[3].fill_(float("nan"))
            graph.execute(pack, workspace(graph))
            check(pack)


def test_what_the_reference_executor_serialised_is_built_here() -> None:
    restored, pack = cudnn.pygraph(), data()
    restored.deserialize(built(backend="reference").serialize())
    assert restored.get_plan_name().startswith("eng")
    restored.execute(pack, workspace(restored))
    check(pack)


# Which executor.
def test_the_reference_executor_on_gpu_tensors() -> None:
    graph = built(backend="reference")
    assert graph.get_plan_name() == "reference"
    pack = data()
    graph.execute(pack, workspace(graph))
    check(pack)


def test_nothing_is_allocated() -> None:
    graph = built()
    pack, space = data(), workspace(graph)
    assert_allocates_nothing_and_waits_for_nothing(lambda: graph.execute(pack, space))


def test_a_tensor_that_no_operation_uses_is_an_extra_entry() -> None:
    graph = built()
    pack = data()
    unused = graph.tensor_like(pack[1])
    for _ in range(2):  # the second call takes the path for data like those of the first
        graph.execute({**pack, unused: pack[1]}, workspace(graph))
        check(pack)


def test_arrays_of_other_types_and_layouts_are_refused() -> None:
    """Types at every call, also where the addresses are known; layouts where an address is new."""
    graph = built()
    space = workspace(graph)
    pack = data()
    a = pack[1]
    for change in (a.bfloat16(), a.float(), a.to(torch.int32), a.mT.contiguous()):
        with pytest.raises(ValueError, match=r"execute: tensor 'a' \(uid 1\): got "):
            graph.execute({**pack, 1: change}, space)
    for _ in range(3):  # from the second call on, the path for data like these
        graph.execute(pack, space)
    check(pack)
    others = {
        1: [pack[1].view(torch.bfloat16), torch.randn(2 * BATCH, M, K, **FP16)],
        2: [pack[2].view(torch.int16), torch.randn(BATCH, N, K, **FP16).mT],
        3: [torch.empty(BATCH, N, M, **FP16)],
    }
    for uid, arrays in others.items():
        for other in arrays:
            with pytest.raises(ValueError, match=rf"execute: tensor .* \(uid {uid}\): got "):
                graph.execute({**pack, uid: other}, space)


def test_other_views_of_the_same_memory_run() -> None:
    graph = built()
    pack = data()
    flat = {uid: array.flatten() for uid, array in pack.items()}
    merged = {**pack, 1: pack[1].view(BATCH * M, K)}
    raw = {uid: array.view(-1).view(torch.uint8) for uid, array in pack.items()}
    for inputs in (flat, merged, raw, pack, flat, {**pack, 1: OnlyDlpack(pack[1])}):
        pack[3].fill_(float("nan"))
        graph.execute(inputs, workspace(graph))
        check(pack)


@pytest.mark.parametrize("calls", [0, 1, 20])
@pytest.mark.parametrize("fresh", [False, True])
def test_inputs_that_are_negative_views_are_read_as_they_show(calls: int, fresh: bool) -> None:
    """At addresses that earlier calls had, of which the last ones launched a CUDA graph, and at new ones."""
    graph = built()
    pack, space = data(), workspace(graph)
    for _ in range(calls):
        graph.execute(pack, space)
    shown = data() if fresh else pack
    view = {**shown, 1: torch._neg_view(shown[1])}
    for _ in range(3):
        shown[3].fill_(float("nan"))
        graph.execute(view, space)
        check({**shown, 1: -shown[1]})
        graph.execute(shown, space)
        check(shown)


def test_a_negative_view_is_captured() -> None:
    graph = built()
    pack, space = data(), workspace(graph)
    view = {**pack, 1: torch._neg_view(pack[1])}
    graph.execute(view, space)
    torch.cuda.synchronize()
    again = captured(lambda: graph.execute(view, space))
    for _ in range(3):
        pack[1].normal_()
        pack[3].fill_(float("nan"))
        again.replay()
        torch.cuda.synchronize()
        check({**pack, 1: -pack[1]})


@pytest.mark.parametrize("warm", [False, True])
def test_an_output_that_is_a_negative_view_is_refused(warm: bool) -> None:
    graph = built()
    pack, space = data(), workspace(graph)
    if warm:
        for _ in range(3):
            graph.execute(pack, space)
    with pytest.raises(ValueError, match=r"\(uid 3\): got a negative view"):
        graph.execute({**pack, 3: torch._neg_view(pack[3])}, space)


@pytest.mark.parametrize("make", [lambda x: x.to_sparse(), lambda x: x.to("meta")])
def test_inputs_without_strided_memory_are_refused_by_name(make: Any) -> None:
    graph = built()
    pack, space = data(), workspace(graph)
    graph.execute(pack, space)
    with pytest.raises((TypeError, ValueError), match=r"execute: tensor .*\(uid 1\): got"):
        graph.execute({**pack, 1: make(pack[1])}, space)
