"""RMSNorm + Hadamard transform + amax on CPU tensors: the reference against the definition, refusals, the wrapper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax, api, best_num_threads, pick_rows_per_cta, rmsnorm_rht_amax_wrapper
from support.rmsnorm import definition
from support.selection import WHERE, in_turn, within


def inputs(m: int, n: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    x = torch.randn(m, n, device=device).to(dtype)
    return x, (torch.rand(n, device=device) + 0.5).to(dtype)


def sample(m: int = 16, n: int = 512, dtype: torch.dtype = torch.bfloat16, rows: int = 2, device: str = "meta") -> Any:
    x, w = torch.empty(m, n, dtype=dtype, device=device), torch.empty(n, dtype=dtype, device=device)
    amax = torch.empty(m // rows, device=device)
    return {"sample_x": x, "sample_w": w, "sample_o": torch.empty_like(x), "sample_amax": amax, "rows_per_cta": rows}


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(1, 6),
    st.sampled_from([(512, None), (256, 32), (768, 96), (1024, 64)]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1e-5, 0.1]),
)
def test_against_the_definition(dtype: torch.dtype, groups: int, size: Any, rows: int, eps: float) -> None:
    n, threads = size
    x, w = inputs(groups * rows, n, dtype)
    o, amax = rmsnorm_rht_amax_wrapper(x, w, eps=eps, num_threads=threads, rows_per_cta=rows)
    y, largest = definition(x, w, eps, rows)
    assert (o.dtype, amax.dtype, amax.shape) == (dtype, torch.float32, (groups,))
    spacing = torch.finfo(dtype).eps * y.abs().clamp(min=1e-3)
    assert bool(((o.double() - y).abs() <= 0.51 * spacing + 1e-6).all())  # half a unit: rounded once
    torch.testing.assert_close(amax.double(), largest, rtol=1e-5, atol=0)


@pytest.mark.parametrize("where", WHERE)
def test_nan_and_infinity_reach_the_results(where: str) -> None:
    x, w = inputs(4, 512, device="cuda" if where == "gpu" else "cpu")
    x[0, 0], x[2, 5] = float("nan"), float("inf")
    with within(where):
        o, amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=2)
    assert o[0].isnan().all()
    assert amax.isnan().all()
    assert o[1].isfinite().all()


def test_trailing_dimensions_of_size_one() -> None:
    x, w = inputs(8, 512)
    o, amax = torch.empty_like(x), torch.empty(4)
    padded = {"sample_x": x[..., None], "sample_w": w[:, None], "sample_o": o[..., None], "sample_amax": amax[:, None]}
    norm = RmsNormRhtAmax(**padded)
    assert norm.check_support() is True
    norm(x_tensor=x[..., None], w_tensor=w[:, None], o_tensor=o[..., None], amax_tensor=amax[:, None])
    expected = rmsnorm_rht_amax_wrapper(x, w)
    assert torch.equal(o, expected["o_tensor"])
    assert torch.equal(amax, expected["amax_tensor"])


SHAPES = [(1, 512), (7, 512), (3, 5, 512), (2, 3, 2, 512), (4, 6, 512, 1)]


@pytest.mark.parametrize(("where", "shape"), in_turn([(shape,) for shape in SHAPES], None, WHERE), ids=str)
def test_odd_rows_and_more_dimensions(where: str, shape: tuple[int, ...]) -> None:
    """Dimensions before the last are rows; each of an odd number of rows has a separate amax."""
    device = "cuda" if where == "gpu" else "cpu"
    x, w = torch.randn(shape, device=device).bfloat16(), torch.ones(512, device=device).bfloat16()
    with within(where):
        o, amax = rmsnorm_rht_amax_wrapper(x, w)
    m = x.numel() // 512
    y, largest = definition(x.view(m, 512), w, 1e-5, 1 if m % 2 else 2)
    assert o.shape == (x.shape[:-1] if x.shape[-1] == 1 else x.shape)
    torch.testing.assert_close(o.double().view(m, 512), y, rtol=0.01, atol=0.01)
    torch.testing.assert_close(amax.double(), largest, rtol=1e-4, atol=0)
    norm = RmsNormRhtAmax(x, w, o, amax)
    assert norm.check_support()
    if where == "reference":
        torch.library.opcheck(cudnn.ops.rmsnorm_rht_amax, (x, w))


def test_rows_that_lie_apart_are_refused_with_what_to_do() -> None:
    x, w = inputs(8, 512)
    with pytest.raises(ValueError, match=r"x: got the strides .* To fix it, pass x.contiguous\(\)"):
        rmsnorm_rht_amax_wrapper(x.view(4, 2, 512).transpose(0, 1), w)


REFUSED_CALLS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x_tensor": lambda t: np.zeros((4, 512))}, TypeError, "x tensor: got numpy.ndarray; allowed: a torch.Tensor"),
    ({"o_tensor": lambda t: t["x_tensor"].new_zeros(2049)[1:].view(4, 512)}, ValueError, "o tensor, its address: got"),
    (
        {"o_tensor": lambda t: t["both"][2:6]},
        ValueError,
        "o tensor: got memory that x uses too; allowed: separate memory",
    ),
    ({"amax_tensor": lambda t: t["x_tensor"].view(-1).view(torch.float32)[:2]}, ValueError, "amax tensor: got memory"),
    ({"current_stream": lambda t: "0"}, TypeError, "current_stream: got str; allowed: None, an int, a torch.cuda"),
]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_longest_rows(arch: str) -> None:
    assert RmsNormRhtAmax(**sample(n=65536), arch=arch).check_support()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("changes", "error", "words"), REFUSED_CALLS)
def test_what_is_refused_everywhere(where: str, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    device = "cuda" if where == "gpu" else "cpu"
    both, w = torch.zeros(8, 512, device=device).bfloat16(), torch.ones(512, device=device).bfloat16()
    tensors = {"x_tensor": both[:4], "w_tensor": w, "o_tensor": torch.empty_like(both[:4])}
    tensors["amax_tensor"] = torch.empty(2, device=device)
    norm = RmsNormRhtAmax(*tensors.values(), rows_per_cta=2)
    with within(where):
        norm.compile()
        with pytest.raises(error, match=words):
            norm.execute(**{**tensors, **{key: make({**tensors, "both": both}) for key, make in changes.items()}})
        norm.execute(**{**tensors, "o_tensor": tensors["x_tensor"]})  # in place


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n": 520}, ValueError, "columns of x: got 520; allowed: multiples of 16"),
    ({"n": 528}, ValueError, "columns of x: got 528; allowed: multiples of 512. To fix it, pass num_threads"),
    ({"num_threads": 0}, ValueError, "num_threads: got 0; allowed: multiples of 32 from 32 to 1024"),
    ({"num_threads": -32}, ValueError, "num_threads: got -32"),
    ({"num_threads": 48}, ValueError, "num_threads: got 48"),
    ({"n": 8448, "num_threads": 1056}, ValueError, "num_threads: got 1056"),
    ({"num_threads": 96}, ValueError, "num_threads: got 96; allowed: 512 / num_threads a multiple of 8"),
    ({"num_threads": 128}, ValueError, "num_threads: got 128; allowed: 512 / num_threads a multiple of 8"),
    ({"m": 15}, ValueError, "rows_per_cta: got 2; allowed: divisors of the 15 rows of x"),
    ({"rows_per_cta": 0}, ValueError, "rows_per_cta: got 0"),
    ({"rows_per_cta": 4}, ValueError, r"amax tensor shape mismatch: expected \(4,\), got \(8,\)"),
    ({"n": 65536 + 512}, NotImplementedError, "columns of x: got 66048; allowed: at most 65536"),
    ({"dtype": torch.float32}, ValueError, "x tensor dtype mismatch: expected torch.bfloat16 or torch.float16"),
    ({"sample_w": torch.empty(256)}, ValueError, r"w tensor shape mismatch: expected \(512,\), got \(256,\)"),
    ({"sample_w": torch.empty(512)}, ValueError, "w tensor dtype mismatch: expected torch.bfloat16, got torch.float32"),
    ({"sample_o": torch.empty(16, 512)}, ValueError, "o tensor dtype mismatch: expected torch.bfloat16"),
    ({"sample_o": torch.empty(16, 256)}, ValueError, r"o tensor shape mismatch: expected \(16, 512\), got \(16, 256\)"),
    ({"sample_x": torch.empty(16)}, ValueError, r"x: got the shape \(16,\); allowed: two dimensions or more"),
    ({"sample_x": None}, ValueError, "x tensor: got None; allowed: a tensor"),
    ({"sample_x": torch.empty(512, 16).t()}, ValueError, r"x tensor stride mismatch: expected \(512, 1\), got"),
    ({"sample_amax": torch.empty(16)[::2]}, ValueError, r"amax tensor stride mismatch: expected \(1,\), got \(2,\)"),
    ({"sample_amax": torch.empty(8).half()}, ValueError, "amax tensor dtype mismatch: expected torch.float32, got"),
    ({"sample_amax": torch.empty(8)}, ValueError, "samples: got x on meta, .*amax on cpu; allowed: one device"),
    ({"arch": None}, RuntimeError, "device: got meta; allowed: cuda or cpu"),
    ({"arch": "sm_80"}, RuntimeError, "architecture: got sm_80; allowed: sm_90a, sm_100a"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_what_is_not_supported_is_refused(change: dict[str, Any], error: type[Exception], words: str) -> None:
    change = dict(change)
    shape = {key: change.pop(key) for key in ("m", "n", "dtype") if key in change}
    arguments = {**sample(**shape), "arch": "sm_90a", **change}
    with pytest.raises(error, match=f"RmsNormRhtAmax: {words}"):
        RmsNormRhtAmax(**arguments).check_support()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_tensor": torch.empty(4, 256)}, r"x tensor shape mismatch: expected \(4, 512\), got \(4, 256\)"),
        ({"x_tensor": torch.empty(4, 512)}, "x tensor dtype mismatch: expected torch.bfloat16, got torch.float32"),
        ({"o_tensor": torch.empty(512, 4).bfloat16().t()}, "o tensor stride mismatch"),
        ({"w_tensor": torch.empty(16).bfloat16()}, "w tensor shape mismatch"),
        ({"amax_tensor": torch.empty(4)}, r"amax tensor shape mismatch: expected \(2,\), got \(4,\)"),
    ],
)
def test_other_tensors_than_the_samples_are_refused(change: dict[str, Any], words: str) -> None:
    norm = RmsNormRhtAmax(**sample(device="cpu"))
    norm.compile()
    x, w = inputs(4, 512)
    good = {"x_tensor": x, "w_tensor": w, "o_tensor": torch.empty_like(x), "amax_tensor": torch.empty(2)}
    norm.execute(**good)
    with pytest.raises(ValueError, match=words):
        norm.execute(**{**good, **change})


@pytest.mark.parametrize(
    ("threads", "columns"),
    [(64, [512]), (128, [1024, 2048, 7168]), (256, [4096]), (512, [8192, 12288, 32768]), (1024, [16384, 24576])],
)
def test_default_number_of_threads(threads: int | None, columns: list[int]) -> None:
    assert [best_num_threads(n) for n in columns] == [threads] * len(columns)


def test_no_default_number_of_threads() -> None:
    assert best_num_threads(256) is best_num_threads(528) is None


@pytest.mark.parametrize(
    ("m", "rows"),
    [(148 * 8, 8), (148 * 8 + 8, 8), (147 * 8, 4), (148 * 4 + 4, 4), (296, 2), (256, 2), (7, 1), (1, 1), (0, 2)],
)
def test_default_number_of_rows(m: int, rows: int) -> None:
    assert pick_rows_per_cta(m) == rows


def test_the_wrapper_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with check, compile and execute replaced, as a test of a user may do; execute gets keywords only."""
    calls: list[object] = []
    monkeypatch.setattr(RmsNormRhtAmax, "check_support", lambda self: calls.append("check") or True)
    monkeypatch.setattr(RmsNormRhtAmax, "compile", lambda self: calls.append("compile"))
    monkeypatch.setattr(RmsNormRhtAmax, "execute", lambda self, **tensors: calls.append(sorted(tensors)))
    api._cache_of_RmsNormRhtAmaxObjects.clear()
    names = ["amax_tensor", "current_stream", "o_tensor", "w_tensor", "x_tensor"]
    for m in (64, 128):  # the number of rows compiles nothing
        rmsnorm_rht_amax_wrapper(*inputs(m, 512), rows_per_cta=2)
    assert calls == ["check", "compile", names, names]
    assert len(api._cache_of_RmsNormRhtAmaxObjects) == 1
    rmsnorm_rht_amax_wrapper(*inputs(64, 512), rows_per_cta=4)
    rmsnorm_rht_amax_wrapper(*inputs(64, 512, torch.float16), rows_per_cta=2)
    rmsnorm_rht_amax_wrapper(*inputs(64, 1024), rows_per_cta=2)
    assert calls.count("compile") == len(api._cache_of_RmsNormRhtAmaxObjects) == 4
    api._cache_of_RmsNormRhtAmaxObjects.clear()


def test_the_wrapper_refuses_what_the_class_refuses() -> None:
    with pytest.raises(ValueError, match="columns of x: got 520"):
        rmsnorm_rht_amax_wrapper(*inputs(4, 520))
    x, w = inputs(6, 512)
    rmsnorm_rht_amax_wrapper(x[:4], w, rows_per_cta=4)
    for rows in (4, 0, -1):  # 4: of the cached object
        with pytest.raises(ValueError, match=f"^RmsNormRhtAmax: rows_per_cta: got {rows}; allowed: divisors"):
            rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=rows)


def test_operator() -> None:
    from cudnn.ops import rmsnorm_rht_amax

    x, w = inputs(64, 512)
    expected = rmsnorm_rht_amax_wrapper(x, w, eps=0.01, rows_per_cta=4)
    actual = torch.ops.cudnn.rmsnorm_rht_amax(x, w, 0.01, 4)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for arguments in ((x, w), (x, w, 0.01, 4)):
        torch.library.opcheck(torch.ops.cudnn.rmsnorm_rht_amax.default, arguments)
    compiled = torch.compile(lambda x, w: rmsnorm_rht_amax(2 * x, w)[0] + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w), rmsnorm_rht_amax(2 * x, w)[0] + 1)


def test_the_reference_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    from cudnn.runtime.launch import log_reference_runs

    log_reference_runs.cache_clear()
    for _ in range(2):
        rmsnorm_rht_amax_wrapper(*inputs(4, 512))
    said = [message for message in caplog.messages if "reference in PyTorch runs" in message]
    assert said == ["RmsNormRhtAmax: on CPU tensors the reference in PyTorch runs, not the kernel"]
