"""The projection of MLA's queries, with rotary embeddings and MXFP8 by rows and by columns, as Transformer Engine calls
it: names and order of arguments and results, and every byte of the results.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import cudnn
from cudnn.api_base import TupleDict
from cudnn.gemm_proj_rope_mxfp8 import gemm_proj_rope_mxfp8_reference, projection
from cudnn_kernels import fakes
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.gemm.projection import ProjectionConfiguration, problem
from support.compiled import compile_kernel
from support.selection import brief, within

pytest.importorskip("ptx_emulator")

E4M3 = torch.float8_e4m3fn
wrapper = cudnn.gemm_proj_rope_mxfp8_wrapper_sm100
RESULTS = ("out_fp8_row", "out_scales_row", "out_fp8_col", "out_scales_col")
WHERE = ("reference", "sm_90a", "sm_100a")


def few(*shape: int, most: int = 3) -> torch.Tensor:
    """Numbers of few bits: their sums of products are exact."""
    return torch.randint(-most, most + 1, shape) / 8


def angles(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return few(tokens, 64, most=8).bfloat16(), few(tokens, 64, most=8).bfloat16()


def scaled(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, bits of their scale factors, and values."""
    codes, factors = few(rows, k).to(E4M3), torch.randint(125, 130, (rows, k // 32), dtype=torch.uint8)
    return codes, factors, codes.double() * torch.exp2(factors.double() - 127).repeat_interleave(32, 1)


def rotated(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads (t, heads, 192), in float64: pairs of neighbours become halves."""
    cos, sin = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    plain, even, odd = q[..., :128], q[..., 128::2], q[..., 129::2]
    left = even * cos[..., :32] - odd * sin[..., :32]
    right = odd * cos[..., 32:] + even * sin[..., 32:]
    return torch.cat([plain, left, right], 2)


def quantised(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and bits of the scale factors of the last dimension's blocks."""
    mantissa, exponent = (blocks.abs().amax(-1) / 448).frexp()
    byte = (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254)
    byte = byte.masked_fill(mantissa == 0, 0)
    codes = (blocks * torch.exp2(127.0 - byte.double()).unsqueeze(-1)).clamp(-448, 448).float().to(E4M3)
    return codes, byte.byte()


def check(results: Any, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """All bytes, for queries (t, n) in float64."""
    y = rotated(q.float().bfloat16().double().unflatten(1, (-1, 192)), cos, sin)
    codes, scales = quantised(y.unflatten(2, (6, 32)))
    assert torch.equal(results["out_scales_row"], scales)
    assert torch.equal(results["out_fp8_row"].float(), codes.flatten(2).float())
    codes, scales = quantised(y.unflatten(0, (-1, 32)).permute(0, 2, 3, 1))
    assert torch.equal(results["out_scales_col"], scales)
    assert torch.equal(results["out_fp8_col"].float(), codes.permute(0, 3, 1, 2).flatten(0, 1).float())


def called(where: str, *kwargs: torch.Tensor, **options: Any) -> Any:
    """The wrapper's results there, on the CPU."""
    device = "cuda" if where == "gpu" else "cpu"
    named = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with within(where):
        results = wrapper(*(x.to(device) for x in kwargs), **named)
    return TupleDict({name: x.cpu() for name, x in results.items()})


CASES = [(where, w_out_in) for where in WHERE for w_out_in in (True, False)]
GPU = [pytest.param("gpu", w_out_in, marks=pytest.mark.gpu) for w_out_in in (True, False)]


@pytest.mark.parametrize(("where", "w_out_in"), [*brief(CASES, 0, 1), *GPU])
def test_bfloat16(where: str, w_out_in: bool) -> None:
    tokens, n, k = 128, 2 * 192, 72
    x, w, (cos, sin) = few(tokens, k).bfloat16(), few(n, k).bfloat16(), angles(tokens)
    x[32:64] = 0
    results = called(where, x, w if w_out_in else w.t().contiguous(), cos, sin, w_out_in=w_out_in, stream=None)
    assert tuple(results.keys()) == RESULTS
    assert [tuple(t.shape) for t in results] == [(128, 2, 192), (128, 2, 6), (128, 2, 192), (4, 2, 192)]
    assert [t.dtype for t in results] == [E4M3, torch.uint8] * 2
    assert all(t.is_contiguous() for t in results)
    check(results, x.double() @ w.double().t(), cos, sin)
    assert not results["out_scales_row"][32:64].any()
    assert not results["out_scales_col"][1].any()


@pytest.mark.parametrize(("where", "w_out_in"), [*brief(CASES, 0, 1, 2), *GPU])
def test_mxfp8(where: str, w_out_in: bool) -> None:
    """Three blocks along k: the atoms of scale factors are not full."""
    tokens, n, k = 128, 2 * 192, 96
    (x, x_scale, a), (w, w_scale, b), (cos, sin) = scaled(tokens, k), scaled(n, k), angles(tokens)
    kwargs = (w, w_scale) if w_out_in else (w.t().contiguous(), w_scale.t().contiguous())
    scales = {"x_scale": x_scale, "w_scale": kwargs[1]}
    results = called(where, x, kwargs[0], cos, sin, **scales, w_out_in=w_out_in, stream=0)
    check(results, a @ b.t(), cos, sin)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("arch", WHERE[1:])
def test_no_register_is_spilled(arch: str, kind: str) -> None:
    operation = ARCHITECTURES[arch]
    c = ProjectionConfiguration.of(operation.configure(problem(kind, True, 24576, 1536)))
    module, kernel = operation.source(c).split(":")
    compiled = compile_kernel(arch, getattr(importlib.import_module(module), kernel)(c), *fakes.arguments(c))
    assert compiled.stack == 0
    assert compiled.registers <= 255


def test_names_and_order() -> None:
    bf16, mxfp8 = cudnn.GemmProjRopeMxfp8Bf16InSm100, cudnn.GemmProjRopeMxfp8Mxfp8InSm100
    names = list(inspect.signature(wrapper).parameters.items())
    assert [name for name, _ in names] == ["x", "w", "cos", "sin", "x_scale", "w_scale", "w_out_in", "stream"]
    assert [p.default for _, p in names[4:]] == [None, None, True, None]
    inputs = {bf16: ["x", "w", "cos", "sin"], mxfp8: ["x_code", "x_scale", "w_code", "w_scale", "cos", "sin"]}
    for cls, first in inputs.items():
        tensors = [*first, *RESULTS]
        operation = list(inspect.signature(cls).parameters)
        assert operation[: len(tensors)] == [f"sample_{name}" for name in tensors]
        assert list(inspect.signature(cls.execute).parameters)[1:] == [*tensors, "current_stream"]
    assert inspect.signature(bf16).parameters["w_out_in"].default is False


def samples(tokens: int = 128, n: int = 384, k: int = 64) -> dict[str, Any]:
    x, w, (cos, sin) = few(tokens, k).bfloat16(), few(n, k).bfloat16(), angles(tokens)
    return {"x": x, "w": w, "cos": cos, "sin": sin}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"x": few(100, 64).bfloat16()}, ValueError, "tokens: got 100; allowed: multiples of 128"),
        ({"w": few(200, 64).bfloat16()}, ValueError, "columns: got 200; allowed: multiples of 192"),
        (
            {"x": few(128, 60).bfloat16(), "w": few(384, 60).bfloat16()},
            ValueError,
            "k: got 60; allowed: multiples of 8",
        ),
        ({"w": few(384, 32).bfloat16()}, ValueError, "w tensor shape"),
        ({"x": few(128, 128).bfloat16()[:, ::2]}, ValueError, "x tensor stride"),
        ({"cos": few(128, 32).bfloat16()}, ValueError, "cos tensor shape"),
        ({"sin": few(128, 64)}, ValueError, "sin tensor dtype"),
        ({"x": few(128, 64, 1).bfloat16()}, ValueError, "x: got the shape"),
        ({"w": few(384, 64).to(E4M3)}, AssertionError, "w dtype"),
        ({"x": few(128, 64).half(), "w": few(384, 64).half()}, AssertionError, "x dtype: got torch.float16"),
        ({"x_scale": torch.zeros(128, 2, dtype=torch.uint8)}, AssertionError, "x_scale: got a tensor; allowed: None"),
        ({"x": few(128, 64).to(E4M3), "w": few(384, 64).to(E4M3)}, AssertionError, "x_scale: got None"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refusals(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wrapper(**{**samples(), **changed})


@pytest.mark.parametrize(
    ("n", "k", "message"), [(192, 64, "columns: got 192; allowed: multiples of 384"), (384, 48, "k: got 48; allowed:")]
)
def test_refusals_of_mxfp8(n: int, k: int, message: str) -> None:
    (cos, sin), scale = angles(128), torch.zeros(128, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        wrapper(few(128, k).to(E4M3), few(n, k).to(E4M3), cos, sin, x_scale=scale, w_scale=scale)


def test_objects_are_kept() -> None:
    projection._bf16in_obj_cache.clear()
    for _ in range(2):
        first = wrapper(**samples())
        wrapper(**samples(tokens=256))
    assert len(projection._bf16in_obj_cache) == 2
    again = wrapper(**samples())
    assert first["out_fp8_row"].data_ptr() != again["out_fp8_row"].data_ptr()


def test_reference_is_not_rounded() -> None:
    kwargs = samples()
    kwargs["x"] = torch.randn(128, 64).bfloat16()
    q = (kwargs["x"].double() @ kwargs["w"].double().t()).unflatten(1, (2, 192))
    actual = gemm_proj_rope_mxfp8_reference(**kwargs, w_out_in=True)
    torch.testing.assert_close(actual.double(), rotated(q, kwargs["cos"], kwargs["sin"]), rtol=1e-5, atol=1e-5)
    turned = gemm_proj_rope_mxfp8_reference(kwargs["x"], kwargs["w"].t(), kwargs["cos"], kwargs["sin"])
    assert torch.equal(actual, turned)
