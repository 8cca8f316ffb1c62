"""``cudnn demo``: its graphs and kernels run and are judged; a wrong or failing one makes it fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn import demo_cases
from cudnn.cli import demo

HANDLE = None  # on CPU tensors the graph selects the reference executor automatically


@pytest.mark.parametrize("make", demo.CASES, ids=lambda make: make.__name__)
def test_cases_pass_on_the_reference(make: Any) -> None:
    result = demo.check(make, HANDLE, "cpu")
    assert result.passed, result
    assert result.plan == "reference"
    assert 0 < result.error <= result.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("make", demo.CASES, ids=lambda make: make.__name__)
def test_cases_pass_on_the_gpu(make: Any) -> None:
    result = demo.check(make, cudnn.create_handle(), "cuda")
    assert result.passed, result
    assert result.plan.startswith("eng")


def _wrong(handle: Any, device: str) -> demo.Case:
    case = demo.matmul_bias_gelu(handle, device)
    case.formula = lambda a, b, d: a @ b + d  # forgets the activation
    return case


def _unbuildable(handle: Any, device: str) -> demo.Case:
    case = demo.matmul_bias_gelu(handle, device)
    case.output.set_dim([1, 2, 3])
    return case


@pytest.mark.parametrize("bad", [_wrong, _unbuildable])
def test_a_bad_graph_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Any
) -> None:
    monkeypatch.setattr(demo, "CASES", (demo.matmul_bias_gelu, bad))
    assert demo.run("cpu") == 1
    assert "1 of 2 graphs agree" in capsys.readouterr().out


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_pass_in_the_emulator(arch: str) -> None:
    for name in demo.KERNELS:
        result = demo.check_kernel(name, arch)
        assert result.passed, result
        assert result.where == f"emulated {arch}"
        assert 0 < result.error <= result.tolerance
        assert result.seconds > 0


@pytest.mark.gpu
def test_kernels_pass_on_the_gpu() -> None:
    for name in demo.KERNELS:
        result = demo.check_kernel(name, "")
        assert result.passed, result
        assert result.where == torch.cuda.get_device_name()


def _raise(*_: Any) -> Any:
    raise ValueError("not [today]")


@pytest.mark.parametrize(
    ("call", "compared", "said"),
    [
        (
            lambda: None,
            lambda _: [demo_cases.Comparison("a", 0, 1), demo_cases.Comparison("b", 3, 2)],
            "3.0e+00 2.0e+00",
        ),
        (_raise, _raise, "kernel: ValueError: not [today]"),
    ],
)
def test_a_bad_kernel_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: Any, compared: Any, said: str
) -> None:
    program = demo_cases.Program("kernel", (), (), lambda shape, device: demo_cases.Problem(call, compared))
    monkeypatch.setattr(demo_cases, "find", lambda name: program)
    monkeypatch.setattr(demo, "CASES", ())
    assert demo.run("cpu") == 1
    output = capsys.readouterr().out
    assert said in output
    assert "0 of 4 runs of fused kernels agree" in output
    assert "no data race" not in output


def test_all_good_means_exit_code_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "CASES", (demo.matmul_bias_gelu,))
    assert demo.run("cpu") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 graphs agree" in output
    assert "half a unit in the last place of the element shown, the one nearest to its bound" in output
    assert "4 of 4 runs of fused kernels agree with their references in PyTorch." in output
    assert "compiled for sm_90a and sm_100a, in an emulator that found no data race" in output
