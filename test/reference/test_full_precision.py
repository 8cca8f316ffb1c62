"""References compute in float32 whatever PyTorch's settings are, and leave these as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cudnn
from cudnn.full_precision import full_precision
from cudnn.pygraph.matmul import Matmul

OPERATIONS = (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
FLOATS = {"io_data_type": cudnn.data_type.FLOAT, "compute_data_type": cudnn.data_type.FLOAT}
SUMS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")


def precisions(names: tuple[tuple[str, str], ...] = (*PARENTS, *OPERATIONS)) -> list[str]:
    return [torch._C._get_fp32_precision_getter(*name) for name in names]


def sums() -> list[Any]:
    return [getattr(torch.backends.cuda.matmul, name) for name in SUMS]


def older() -> tuple[Any, ...]:
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


def allow_by_older_names() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def allow_medium() -> None:
    torch.set_float32_matmul_precision("medium")


def allow_all() -> None:
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.allow_fp16_accumulation = True


def allow_cuda() -> None:
    torch.backends.cudnn.fp32_precision = "tf32"


def allow_operations() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


ALLOWED = [allow_by_older_names, allow_medium, allow_all, allow_cuda, allow_operations]


@pytest.mark.parametrize("allow", ALLOWED)
def test_settings_are_in_force_and_restored(allow: Callable[[], None]) -> None:
    allow()
    before = precisions(), sums()

    @full_precision()
    def fail() -> None:
        with full_precision():
            pass
        assert precisions(OPERATIONS) == ["ieee"] * 4
        assert sums() == [False] * 3
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (precisions(), sums()) == before


def test_older_names_still_answer() -> None:
    allow_by_older_names()
    before = older()
    with full_precision():
        pass
    assert older() == before == (True, True, "high")


def test_what_followed_a_setting_for_all_still_follows() -> None:
    torch.backends.fp32_precision = "tf32"
    with full_precision():
        pass
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_threads_restore_what_the_first_one_found() -> None:
    allow_operations()
    before, entered, leave = precisions(), threading.Event(), threading.Event()

    def run() -> None:
        with full_precision():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=run)
    with full_precision():
        other.start()
        assert entered.wait(10)
    assert precisions(OPERATIONS) == ["ieee"] * 4
    leave.set()
    other.join()
    assert precisions() == before


def of_graph(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A product by the reference executor, and in float64."""
    a, b = (torch.randn(1, 64, 64, device=device) for _ in range(2))
    graph = cudnn.pygraph(backend="reference", **FLOATS)
    names = [graph.tensor_like(x) for x in (a, b)]
    c = graph.matmul(*names).set_output(True)
    graph.build([cudnn.heur_mode.A])
    result = torch.empty_like(a)
    graph.execute({names[0]: a, names[1]: b, c: result}, None)
    return result, a.double() @ b.double()


def of_convolution(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = torch.randn(2, 32, 16, 16, device=device), torch.randn(32, 32, 3, 3, device=device)
    graph = cudnn.pygraph(backend="reference", **FLOATS)
    names = [graph.tensor_like(t) for t in (x, w)]
    y = graph.conv_fprop(*names, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
    y.set_stride(x.stride())
    graph.build([cudnn.heur_mode.A])
    result = torch.empty_like(x)
    graph.execute({names[0]: x, names[1]: w, y: result}, None)
    return result, torch.nn.functional.conv2d(x.cpu().double(), w.cpu().double(), padding=1).to(device)


def test_the_executor_computes_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    evaluate = Matmul.evaluate
    monkeypatch.setattr(
        Matmul, "evaluate", lambda *arguments: (seen.append(precisions(OPERATIONS)), evaluate(*arguments))[1]
    )
    allow_operations()
    before = precisions()
    of_graph()
    assert seen == [["ieee"] * 4]
    assert precisions() == before


def test_fused_references_compute_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudnn.gemm_swiglu.api import GemmSwiglu

    seen: list[list[str]] = []
    reference = GemmSwiglu.reference
    monkeypatch.setattr(GemmSwiglu, "reference", lambda *x: (seen.append(precisions(OPERATIONS)), reference(*x))[1])
    allow_operations()
    before = precisions()
    cudnn.gemm_swiglu_wrapper_sm100(*(torch.randn(1, 128, 64).bfloat16().permute(1, 2, 0) for _ in range(2)))
    assert seen == [["ieee"] * 4]
    assert precisions() == before


def test_a_convolution_along_time_computes_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    conv1d = torch.nn.functional.conv1d
    monkeypatch.setattr(
        torch.nn.functional, "conv1d", lambda *x, **y: (seen.append(precisions(OPERATIONS)), conv1d(*x, **y))[1]
    )
    allow_operations()
    x = torch.randn(1, 8, 16, requires_grad=True)
    cudnn.ops.causal_conv1d(x, torch.randn(8, 4), torch.randn(8)).sum().backward()
    assert seen == [["ieee"] * 4] * len(seen)
    assert len(seen) >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("allow", ALLOWED)
@pytest.mark.parametrize("compute", [of_graph, of_convolution])
def test_errors_on_a_gpu(compute: Callable[[str], Any], allow: Callable[[], None]) -> None:
    """With TF32 they would be 3e-4."""
    allow()
    result, expected = compute("cuda")
    assert float((result - expected).norm() / expected.norm()) < 1e-6
