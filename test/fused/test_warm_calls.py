"""What a warm call of a fused API looks at, without a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cudnn.runtime.call import Call
from support.api_cases import case
from support.oracle import E4M3, E8M0
from support.recorded import OnGpu, Recorded


class Calls:
    """An object of a fused API, whose kernel remembers what it got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
        self.kernels = Recorded(monkeypatch)
        self.problem = case("gemm_swiglu", 128, 128, 64, **kwargs)
        self.gemm = self.problem.operation(arch="sm_90a")
        self.gemm.compile()

    def __call__(self, times: int = 1, **more: Any) -> list[tuple[Any, ...]]:
        """The arguments of the calls that reached the kernel."""
        before = len(self.kernels.calls)
        for _ in range(times):
            tensors = self.problem.arguments()
            self.gemm.execute(**{name: None if x is None else OnGpu(x) for name, x in tensors.items()}, **more)
        return [arguments for _, arguments in self.kernels.calls[before:]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_other_tensors_at_the_same_addresses_are_checked(calls: Calls) -> None:
    """Memory that was freed and given out again."""
    calls(times=3)
    smaller = calls.problem
    tensors = dict(smaller.tensors)
    smaller.tensors |= {"a": tensors["a"][:64], "ab12": tensors["ab12"][:64], "c": tensors["c"][:64]}
    assert len(calls()) == 1
    for wrong, words in (
        (tensors["c"][:1].expand(64, -1, -1), "c tensor stride mismatch"),
        (tensors["c"][:64].view(torch.float16), "c tensor dtype mismatch"),
    ):
        smaller.tensors["c"] = wrong
        with pytest.raises(ValueError, match=words):
            calls()


def test_strides_of_a_warm_call_are_looked_at(calls: Calls) -> None:
    """The kernel takes any multiples of 16 bytes, 0 too."""
    for _ in range(2):
        good = calls.problem.tensors["c"]
        calls.problem.tensors["c"] = good[:1].expand_as(good)
        with pytest.raises(ValueError, match="c tensor stride mismatch"):
            calls()
        assert not calls.kernels.calls
        calls.problem.tensors["c"] = good
        assert len(calls()) == 1
        calls.kernels.calls.clear()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, True, "2", torch.ones(())])
def test_numbers_of_a_warm_call_are_looked_at(calls: Calls, wrong: Any) -> None:
    """1 is 1.0, and True is neither."""
    for alpha in (1.0, 2):
        (arguments,) = calls(alpha=alpha)
        assert [x for x in arguments if type(x) is float] == [alpha]
    with pytest.raises(ValueError if isinstance(wrong, float) else TypeError, match="GemmSwiglu: alpha: got"):
        calls(alpha=wrong)
    assert len(calls(alpha=1)) == 1


def test_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's, which is checked when it is new; or memory of PyTorch's allocator."""
    held = torch.empty(1 << 20, dtype=torch.uint8)
    monkeypatch.setattr(Call, "_allocated", lambda self, size, stream, first: held[:size])
    calls = Calls(monkeypatch, dtype=E4M3, scale=E8M0)
    ours = [torch.empty(calls.gemm.workspace_size(), dtype=torch.uint8) for _ in range(2)]
    for space in (*ours, ours[0]):
        (arguments,) = calls(workspace_tensor=space)
        assert any(x is space for x in arguments)
    with pytest.raises(ValueError, match="workspace_tensor: got"):
        calls(workspace_tensor=ours[0][:64])
    (arguments,) = calls()
    assert any(isinstance(x, torch.Tensor) and x.data_ptr() == held.data_ptr() for x in arguments)
