"""``cudnn.ops`` of dense GEMMs in the shapes of ``torch.nn.functional.linear``, compared with their batched form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn import ops
from cudnn.fused import registry
from support import oracle

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
N, K = 128, 64


def arguments(name: str, lead: tuple[int, ...], dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    """Those of two dimensions, and more for rows."""
    given = {"a": torch.randn(*lead, K), "b": torch.randn(N, K)}
    if name == "gemm_dswiglu":
        given["ab12"] = torch.randn(*lead, 2 * N)
    if name == "gemm_dsrelu":
        given["c"] = torch.randn(*lead, N)
    tensors: dict[str, Any] = {key: x.to(dtype) for key, x in given.items()}
    if "srelu" in name:
        tensors |= {"sfa": None, "sfb": None}
    if "srelu" in name or name == "gemm_dswiglu":
        tensors["prob"] = torch.rand(lead)
    if name == "gemm_rope":
        count = lead[0] if lead else 1
        angles = torch.rand(torch.Size(lead).numel() if lead else count, 64)
        tensors |= {"cos": angles.cos(), "sin": angles.sin()}
    return tensors


def batched(name: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """The same as (rows, columns, 1)."""
    matrices = {
        key: x.reshape(-1, x.shape[-1]).unsqueeze(-1) for key, x in tensors.items() if key in ("a", "b", "ab12", "c")
    }
    if "prob" in tensors:
        matrices["prob"] = tensors["prob"].reshape(-1, 1, 1)
    return {**tensors, **matrices}


ALL = {
    "gemm_amax": {"c_dtype": BF16},
    "gemm_swiglu": {"c_dtype": BF16, "ab12_dtype": BF16},
    "gemm_geglu": {"ab12_dtype": BF16},
    "gemm_srelu": {"c_dtype": BF16, "d_dtype": BF16},
    "gemm_dsrelu": {"d_dtype": BF16},
    "gemm_dswiglu": {"c_dtype": BF16},
    "gemm_rope": {"c_dtype": BF16},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("lead", [(24,), (2, 3, 4), ()], ids=str)
def test_family(name: str, lead: tuple[int, ...]) -> None:
    """Every result, bit by bit, in the dimensions of the rows; the primary one alone by default."""
    torch.manual_seed(0)
    api: Any = registry.find(name)
    tensors = arguments(name, lead)
    operator = getattr(ops, name)
    expected = operator(**batched(name, tensors), **ALL[name])
    by_name = dict(zip(api.returns, expected, strict=True))
    present = [key for key, x in by_name.items() if x.numel()]
    actual = operator(**tensors, returns=tuple(present))
    for key, x in zip(present, actual, strict=True):
        assert x.shape[: len(lead)] == lead if key != "amax" else x.ndim <= 1
        assert torch.equal(x.flatten(), by_name[key].flatten()), key
    primary = operator(**tensors)
    assert torch.equal(primary, actual[present.index(api.result[0])])
    assert primary.dtype is BF16


@given(
    lead=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    dtype=st.sampled_from((BF16, F16)),
    transposed=st.booleans(),
    out=st.sampled_from((None, BF16, F16)),
)
@settings(max_examples=15, deadline=None)
def test_swiglu_and_its_gradients(lead: tuple[int, ...], dtype: torch.dtype, transposed: bool, out: Any) -> None:
    """Against float64, with strided operands."""
    x = torch.randn(*lead, K).to(dtype)
    x = torch.stack([x, x], -1)[..., 0].requires_grad_() if not transposed else x.requires_grad_()
    w = torch.randn(K, 2 * N).to(dtype).T if transposed else torch.randn(2 * N, K).to(dtype)
    w = w.div(K**0.5).requires_grad_()
    y = ops.gemm_swiglu(x, w, c_dtype=out)
    assert (y.shape, y.dtype) == ((*lead, N), out or dtype)
    wide = [z.detach().double().requires_grad_() for z in (x, w)]
    expected = oracle.swiglu((wide[0].reshape(-1, K) @ wide[1].T).unsqueeze(-1))[..., 0].reshape(y.shape)
    dy = torch.randn_like(y)
    pairs = zip(
        [y, *torch.autograd.grad(y, (x, w), dy)],
        [expected, *torch.autograd.grad(expected, wide, dy.double())],
        strict=True,
    )
    for actual, other in pairs:
        assert float((actual.double() - other).norm().detach()) <= 0.01 * float(other.norm().detach()) + 1e-6


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(8, K).to(BF16), torch.randn(2 * N, K).to(BF16)
    asked: list[Any] = []
    results = cudnn.GemmSwiglu.results.__func__  # pyright: ignore[reportFunctionMemberAccess]
    note = classmethod(lambda cls, given: asked.append(given["ab12_dtype"]) or results(cls, given))
    monkeypatch.setattr(cudnn.GemmSwiglu, "results", note)
    ops.gemm_swiglu(x, w)
    ops.gemm_swiglu(x, w.requires_grad_())
    with torch.no_grad():
        ops.gemm_swiglu(x, w)
        ops.gemm_swiglu(x[:4], w, returns=("ab12",))
    assert asked == [None, BF16, None, BF16]


def test_under_transforms() -> None:
    x, w = torch.randn(3, 8, K).to(BF16), torch.randn(2 * N, K).to(BF16).requires_grad_()
    expected = ops.gemm_swiglu(x, w)
    compiled = torch.compile(ops.gemm_swiglu, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, w), expected)
    assert torch.equal(torch.vmap(ops.gemm_swiglu, (0, None))(x, w), expected)
    gradient = torch.func.grad(lambda w: ops.gemm_swiglu(x, w).float().sum())(w.detach())
    expected.float().sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(gradient, w.grad)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(ops.gemm_swiglu(x.float(), w.float()), expected)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"returns": ("sfc",)}, ValueError, r"returns: got sfc; allowed: results that the call has"),
        ({"returns": "c"}, ValueError, r"returns: got 'c'; allowed: a tuple of names, of ab12, c, sfc, amax"),
        ({"returns": ("d",)}, ValueError, r"returns: got \('d',\); allowed: a tuple of names"),
        ({"returns": ("c",), "b": torch.zeros(N, K, 1)}, ValueError, r"returns: got \('c',\) with b \(128, 64, 1\)"),
        ({"rows": 3}, TypeError, r"got an unexpected keyword argument 'rows'; allowed: a, b, alpha, "),
        ({"alpha": "1"}, TypeError, r"alpha: got str; allowed: a float"),
        ({"a": [1]}, TypeError, r"a: got list; allowed: torch\.Tensor"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"a": torch.zeros(8, K, dtype=BF16), "b": torch.zeros(N, K, dtype=BF16), **change}
    with pytest.raises(error, match=f"gemm_swiglu(_wrapper)?: {words}"):
        ops.gemm_swiglu(**given)


def test_positional_arguments_and_three_dimensions() -> None:
    x, w = torch.randn(8, K).to(BF16), torch.randn(N, K).to(BF16)
    assert ops.gemm_swiglu(x, w, 0.5, "m", None, F16).stride() == (1, 8)
    ab12, c, sfc, amax = ops.gemm_swiglu(x[..., None], w[..., None], 0.5, "n", F32, F16)
    assert (ab12.dtype, c.dtype, sfc.numel(), amax.numel()) == (F32, F16, 0, 0)
    assert torch.equal(ops.gemm_swiglu(x, w, 0.5, c_dtype=F16), c[..., 0])
