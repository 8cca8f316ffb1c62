"""The operands of a layer of experts, gathered or permuted, and pointer arrays."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import cudnn
from cudnn.moe import autograd
from cudnn.moe import experts as operands
from cudnn.moe import layer as expert_layer
from cudnn.moe.experts import Permutation
from cudnn.ops import moe_mlp
from cudnn.runtime import pointer_arrays


def test_rows_are_copied_in_order_on_hopper_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If experts have few rows, and for GEMMs with many columns."""
    x, gather_idx = torch.randn(4, 8), torch.tensor([3, 0, 0])  # the last row has no slot
    permutation = Permutation(torch.tensor([2]), gather_idx, torch.tensor([[1], [-1], [-1], [0]], dtype=torch.int32))
    operands.log_permute_once.cache_clear()
    for arch, permuted in (("sm_90a", True), ("sm_100a", False)):
        with cudnn.emulation(arch, races=True), caplog.at_level("INFO", "cudnn"):
            actual, index = permutation.operand(x, False)
            assert permutation.gathers(x, False) != permuted
            with monkeypatch.context() as many:
                many.setattr(operands, "GATHER_ROWS", 3)
                assert permutation.operand(x, False)[0] is x
                assert permutation.gathers(x, True) != permuted
        assert torch.equal(actual[:2], x[[3, 0]]) if permuted else actual is x
        assert (index is None) == permuted
    messages = [record.getMessage() for record in caplog.records if "permuted" in record.getMessage()]
    assert messages == ["moe_mlp: tokens are permuted into a copy sorted by expert, freed after the pass"]


@pytest.mark.parametrize(("arch", "left"), [("sm_90a", 65), ("sm_100a", 73)])
def test_many_experts_without_rows(monkeypatch: pytest.MonkeyPatch, arch: str, left: int) -> None:
    """One cluster computes the experts before them, though no gathered rows follow."""
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", str(left))
    a, b, index = torch.randn(40, 16).bfloat16(), torch.randn(6, 32).bfloat16(), torch.tensor([3, 0, 0, 7, 9, 30]).int()
    ends = torch.tensor([2, *[2] * 8, 6, *[6] * 8], dtype=torch.int32)
    with cudnn.emulation(arch, races=True) as report:
        actual = cudnn.grouped_gemm_wgrad_wrapper(a.T, b, None, None, ends, a_index=index)["wgrad_tensor"]
    assert report.launches[-1].grid[2] == 1
    for expert, rows in ((0, slice(2)), (9, slice(2, 6))):
        expected = a[index[rows].long()].float().T @ b[rows].float()
        torch.testing.assert_close(actual[expert].float(), expected, atol=0.05, rtol=0.02)
    assert not actual[1:9].any()
    assert not actual[10:].any()


@pytest.mark.parametrize("permuted", [True, False])
def test_the_forward_pass_permutes_tokens_if_experts_have_few_rows(
    monkeypatch: pytest.MonkeyPatch, permuted: bool
) -> None:
    """The permuted copy is freed before the down GEMM's output is allocated; right with and without it."""
    monkeypatch.setattr(operands, "GATHER_ROWS", 140 // 4 + permuted)
    weights, indices = torch.rand(70, 2), torch.randint(-1, 4, (70, 2))
    x, up, down = torch.randn(70, 64).bfloat16(), torch.randn(4, 64, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
    expected = moe_mlp(x, (indices, weights), up, down)  # the reference's, which test_layer.py compares with a formula
    copies: list[weakref.ref[torch.Tensor]] = []
    permute, run, alive, gathered = operands.permute, operands.GroupedGemmOps.run, [], []

    def permutes(x: torch.Tensor, scatter_idx: torch.Tensor, rows: torch.Tensor) -> None:
        copies.append(weakref.ref(rows))
        permute(x, scatter_idx, rows)

    def runs(ops: Any, key: Any, name: str, tensors: dict[str, Any], *options: Any) -> None:
        if key == "down":
            alive.append(sum(each() is not None for each in copies))
        else:
            gathered.append(tensors["a_index"] is not None)
        run(ops, key, name, tensors, *options)

    monkeypatch.setattr(operands, "permute", permutes)
    monkeypatch.setattr(operands.GroupedGemmOps, "run", runs)
    with cudnn.emulation("sm_90a", races=True), torch.no_grad():
        y = moe_mlp(x, (indices, weights), up, down)
    assert float((y - expected).float().norm() / expected.float().norm()) < 0.01
    assert gathered == [not permuted]
    assert len(copies) == permuted
    assert alive == [0]


@pytest.mark.parametrize("fp8", [False, True])
def test_activations_are_freed_before_combine(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """The forward pass uses most memory then: y may reuse theirs."""
    weights, indices = torch.rand(20, 2), torch.randint(4, (20, 2))
    x, up, down = (torch.randn(*sizes).bfloat16() for sizes in ((20, 128), (4, 256, 128), (4, 128, 128)))
    read: list[StorageWeakRef] = []
    alive: list[int] = []
    run, summed = operands.GroupedGemmOps.run, expert_layer.combine_rows

    def runs(ops: Any, key: Any, name: str, tensors: dict[str, Any], *options: Any) -> None:
        run(ops, key, name, tensors, *options)
        if key == "down":
            read.extend(StorageWeakRef(tensors[each].untyped_storage()) for each in ("a", "sfa") if each in tensors)

    def combine(made: torch.Tensor, *rest: Any) -> torch.Tensor:
        alive.append(sum(not each.expired() for each in read))
        return summed(made, *rest)

    monkeypatch.setattr(operands.GroupedGemmOps, "run", runs)
    monkeypatch.setattr(expert_layer, "combine_rows", combine)
    moe_mlp(x, (indices, weights), up, down, fp8=fp8)
    assert len(read) == 1 + fp8
    assert alive == [0]


def test_addresses_last_as_long_as_the_weights() -> None:
    """However many others there are: a CUDA graph that reads them cannot make them."""
    weights = [torch.ones(2) for _ in range(1100)]
    tables = [pointer_arrays.pointers([w]) for w in weights]
    assert [int(t) for t in tables] == [w.data_ptr() for w in weights]
    assert pointer_arrays.pointers([weights[0]]) is tables[0]
    assert pointer_arrays.pointers([weights[1].view(2)]) is tables[1]
    gone = weakref.ref(tables.pop())
    del weights[-1]
    pointer_arrays.pointers([torch.ones(3)])
    assert gone() is None
    assert pointer_arrays.pointers([weights[0]]) is tables[0]


def test_pointer_arrays_of_a_storage_that_moves_are_few() -> None:
    """One that is resized to 0 and back, as FSDP does, lies elsewhere each time; others of that storage stay."""
    weight, others, seen = torch.ones(4), [], set()
    storage = weight.untyped_storage()
    for _ in range(20):
        table, half = pointer_arrays.pointers([weight]), pointer_arrays.pointers([weight[2:]])
        assert (int(table), int(half)) == (weight.data_ptr(), weight[2:].data_ptr())
        seen.add(int(table))
        storage.resize_(0)
        others.append(torch.ones(4))  # takes that memory
        storage.resize_(16)
    kept = [key for key, each in pointer_arrays._TABLES.items() if each.memory.cdata == StorageWeakRef(storage).cdata]
    assert len(kept) == 2 * pointer_arrays.MOVES < len(seen)


def test_two_threads_may_find_the_same_addresses_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two devices: each has a thread of autograd."""

    def expired() -> bool:
        tables.pop("gone", None)  # by the other thread
        return True

    tables: dict[Any, Any] = {"gone": SimpleNamespace(memory=SimpleNamespace(expired=expired, cdata=0), offset=0)}
    monkeypatch.setattr(pointer_arrays, "_TABLES", tables)
    weight = torch.ones(2)
    assert int(pointer_arrays.pointers([weight])) == weight.data_ptr()


@pytest.mark.parametrize(
    ("grad", "rule", "kept"),
    [
        (False, {}, False),
        (True, {}, True),
        (True, {"renormalize": True}, False),
        (True, {"pre_softmax": False}, False),
        (True, {"score": "sigmoid", "renormalize": True}, False),
    ],
)
def test_logits_that_are_kept(monkeypatch: pytest.MonkeyPatch, grad: bool, rule: dict[str, Any], kept: bool) -> None:
    """Where the experts begin, those of all experts are gone, unless the backward pass of a softmax needs them."""
    layer, x = cudnn.nn.MoE(32, 32, 4, 2, **rule).bfloat16(), torch.randn(20, 32).bfloat16()
    made: list[StorageWeakRef] = []
    alive: list[bool] = []
    routed, forward = autograd.routed, expert_layer.forward

    def routes(logits: torch.Tensor, *rest: Any) -> Any:
        made.append(StorageWeakRef(logits.untyped_storage()))
        return routed(logits, *rest)

    def computes(*arguments: Any) -> Any:
        alive.append(not made[0].expired())
        return forward(*arguments)

    monkeypatch.setattr(autograd, "routed", routes)
    monkeypatch.setattr(expert_layer, "forward", computes)
    with torch.set_grad_enabled(grad):
        y = layer(x)
    assert y.requires_grad == grad
    assert alive == [kept]
