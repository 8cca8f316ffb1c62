"""Operators under ``torch.compile``, ``torch.autocast`` and ``torch.vmap``, compared with PyTorch's operators."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import cudnn
from cudnn.attention import graphs as sdpa_module
from cudnn.attention.graphs import sdpa, sdpa_bwd
from cudnn.causal_conv1d import operator as conv_module
from cudnn.causal_conv1d.operator import causal_conv1d_bwd_primitive
from cudnn.demo_cases import gemm_operands
from cudnn.experimental.ops import moe_grouped_matmul
from cudnn.ops import causal_conv1d, scaled_dot_product_attention
from support.dense_attention import with_gradients
from support.torch_attention import CASES

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


# Calls that PyTorch has to see.


class SeenError(Exception):
    """The dispatcher was asked."""


class Other(torch.Tensor):
    """Another class of tensors."""


def test_operators_are_called_directly_where_nothing_has_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def dispatched(*_: Any) -> None:
        raise SeenError

    operator = conv_module.causal_conv1d_fwd_primitive
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((2, 8, 20), (8, 4), (8,)))
    leaves = [x, weight, bias]
    expected = torch.autograd.grad(operator._opoverload(*leaves, "silu").sum(), leaves)
    for each in (operator, conv_module.causal_conv1d_bwd_primitive):
        monkeypatch.setattr(each, "_opoverload", dispatched)
    torch.testing.assert_close(torch.autograd.grad(operator(*leaves, "silu").sum(), leaves), expected)
    with torch.no_grad():
        assert not operator(x, weight, bias, "silu").requires_grad
    negated = torch.randn(2, 8, 20, dtype=torch.complex64).conj().imag
    for inputs in (negated, x.as_subclass(Other), x.to("meta")):
        with pytest.raises(SeenError):
            operator(inputs, weight, bias, "silu")
    around = [TorchDispatchMode(), BaseTorchFunctionMode(), torch.autocast("cpu", dtype=BF16)]
    for context in (*around, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])):
        with pytest.raises(SeenError), context:
            operator(x, weight, bias, "silu")
    with pytest.raises(SeenError), warnings.catch_warnings(action="ignore"):
        torch.jit.trace(lambda *inputs: operator(*inputs, "silu"), tuple(leaf.detach() for leaf in leaves))
    with pytest.raises(SeenError):
        torch.vmap(lambda x: operator(x, weight, bias, "silu"))(x[None])
    (once,) = torch.autograd.grad(operator(*leaves, "silu").sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(once.sum(), [weight])


# torch.func.


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": [1]}, r"a: got list; allowed: torch\.Tensor\."),
        ({"b": np.zeros((256, 64, 1))}, r"b: got ndarray; allowed: torch\.Tensor\."),
        ({"c_dtype": "bf16"}, r"c_dtype: got str; allowed: torch\.dtype \| None\."),
        ({"alpha": "1"}, r"alpha: got str; allowed: float\."),
        ({"out_dtype": torch.float16}, "got an unexpected keyword argument 'out_dtype'; allowed: a, b, alpha, "),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str, gradient: bool) -> None:
    a, b = torch.zeros(8, 64, 1).bfloat16().requires_grad_(gradient), torch.zeros(256, 64, 1).bfloat16()
    with pytest.raises(TypeError, match=f"^cudnn::gemm_swiglu: {message}"):
        cudnn.ops.gemm_swiglu(**{"a": a, "b": b, **change})
    with pytest.raises(TypeError, match=r"gemm_swiglu: missing a required argument: 'b'; allowed: a, b, alpha, "):
        cudnn.ops.gemm_swiglu(a)


def test_a_tensor_without_memory_beside_others() -> None:
    """PyTorch would take results without values from it."""
    q = torch.randn(1, 2, 8, 16)
    for change in ({"key": q.to("meta")}, {"seq_len_q": torch.tensor([3], device="meta")}):
        with pytest.raises(ValueError, match=r"cudnn::sdpa: devices: got .*'meta'.*; allowed: one device"):
            scaled_dot_product_attention(**{"query": q, "key": q, "value": q, **change})
    assert scaled_dot_product_attention(*[q.to("meta")] * 3).is_meta
    with pytest.raises(ValueError, match=r"device of attn_mask: got meta; allowed: cpu, .*\.to\('cpu'\)"):
        scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool, device="meta"))


def test_one_derivative_by_torch_func() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(x, weight, None, "silu").sin().sum()

    x, weight = torch.randn(2, 8, 20, requires_grad=True), torch.randn(8, 4)
    (expected,) = torch.autograd.grad(call(x), [x])
    torch.testing.assert_close(torch.func.grad(call)(x.detach()), expected)
    with torch.autocast("cpu", dtype=BF16):
        (expected,) = torch.autograd.grad(call(x), [x])
        torch.testing.assert_close(torch.func.grad(call)(x.detach()), expected)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.func.grad(lambda x: torch.func.grad(call)(x).sum())(x.detach())
    (twice,) = torch.autograd.grad(call(x), [x], create_graph=True)
    with pytest.raises(
        RuntimeError, match=r"cudnn::\w+ has no gradient: nothing here is differentiated twice\. To fix"
    ):
        twice.sum().backward()
    with pytest.raises(NotImplementedError, match="jvp"):  # not 0
        torch.func.jvp(call, (x.detach(),), (x.detach(),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        call(forward_ad.make_dual(x.detach(), x.detach()))


def attention(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    x = [torch.randn(2, 4, 24, 16).to(dtype) for _ in range(3)]
    return scaled_dot_product_attention, F.scaled_dot_product_attention, x


def masked(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    x = [torch.randn(2, 4, 24, 16).to(dtype) for _ in range(3)]
    return scaled_dot_product_attention, F.scaled_dot_product_attention, [*x, torch.randn(24, 24).to(dtype)]


def convolution(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    def peer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.conv1d(F.pad(x, (3, 0)), weight.unsqueeze(1), bias, groups=8)

    return causal_conv1d, peer, [torch.randn(*shape).to(dtype) for shape in ((2, 8, 20), (8, 4), (8,))]


FIRST = torch.tensor([0, 7], dtype=torch.int32)


def experts(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    def peer(token: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([token[:, :7] @ weight[0], token[:, 7:] @ weight[1]], 1)

    token, weight = torch.randn(1, 16, 32).to(dtype), torch.randn(2, 24, 32).to(dtype).mT
    return lambda token, weight: moe_grouped_matmul(token, weight, FIRST), peer, [token, weight]


CASE = pytest.mark.parametrize("make", [attention, masked, convolution, experts], ids=lambda make: make.__name__)


@CASE
def test_torch_func_differentiates_with_vmap_too(make: Any) -> None:
    ours, _, (first, *rest) = make(F32)

    def call(x: torch.Tensor) -> torch.Tensor:
        return ours(x, *rest).sin().sum()

    leaves = [x.requires_grad_() for x in (first.clone(), -first)]
    expected, many = torch.stack(torch.autograd.grad(sum(map(call, leaves)), leaves)), torch.stack([first, -first])
    torch.testing.assert_close(torch.func.grad(call)(first), expected[0])
    torch.testing.assert_close(torch.vmap(torch.func.grad(call))(many), expected)
    torch.testing.assert_close(torch.func.grad(lambda x: torch.vmap(call)(x).sum())(many), expected)


# Compiled.


def lengths(name: str, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    problem = CASES[name]
    ours = functools.partial(scaled_dot_product_attention, **problem.keywords())
    return ours, problem.solve, problem.tensors(dtype)[:3]


def numbers(mode: str, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any], list[torch.Tensor]]:
    _, peer, tensors = experts(dtype)
    place = torch.randperm(16).int().view(1, 16, 1)
    index = {"token_index": place // 2, "token_ks": place % 2, "top_k": 2} if mode == "scatter" else {}
    inputs = {"first_token_offset": FIRST, "mode": mode, "token_index": place} | index
    return functools.partial(moe_grouped_matmul, **inputs), peer, tensors


COMPILED = [
    *(attention, masked, convolution, experts),
    *(functools.partial(lengths, name) for name in ("lengths, bottom right", "packed, causal, grouped heads")),
    *(functools.partial(numbers, mode) for mode in ("gather", "scatter")),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", COMPILED, ids=lambda make: make.args[0] if hasattr(make, "args") else make.__name__)
def test_compiled(make: Any, dynamic: bool) -> None:
    ours, _, tensors = make(F32)

    def layer(first: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return ours(2 * first, *rest) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    inputs = [*tensors, torch.randn_like(layer(*tensors))]
    for one, other in zip(with_gradients(compiled, inputs), with_gradients(layer, inputs), strict=True):
        assert torch.equal(one, other)


# Autocast.


@CASE
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("inputs", [F32, BF16, F16, F64])
def test_autocast_as_pytorch(make: Any, inputs: torch.dtype, dtype: torch.dtype) -> None:
    if (make, inputs) == (convolution, F64):
        inputs = F32  # it has no float64
    ours, peer, tensors = make(inputs)
    leaves = [x.requires_grad_() for x in tensors]
    with torch.autocast("cpu", dtype=dtype):
        actual, expected = ours(*leaves), peer(*leaves)
    assert actual.dtype == expected.dtype == (F64 if inputs is F64 else dtype)
    torch.testing.assert_close(actual, expected, atol=5e-2, rtol=5e-2)
    gradients = [torch.autograd.grad(x, leaves, torch.ones_like(x)) for x in (actual, expected)]
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == inputs
        torch.testing.assert_close(one, other, atol=0.2, rtol=5e-2)


@CASE
def test_autocast_of_mixed_types(make: Any) -> None:
    ours, _, tensors = make(F32)
    tensors = [tensors[0].bfloat16(), *tensors[1:]]
    with torch.autocast("cpu", dtype=BF16):
        assert ours(*tensors).dtype == BF16
    if make is not masked:
        with pytest.raises((TypeError, ValueError)):
            ours(*tensors)


@CASE
def test_autocast_compiled(make: Any) -> None:
    ours, _, tensors = make(F32)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return ours(*tensors)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    actual = compiled(*tensors)
    assert actual.dtype == BF16
    assert torch.equal(actual, layer(*tensors))


def test_autocast_off_within() -> None:
    ours, _, tensors = attention(F32)
    with torch.autocast("cpu", dtype=BF16), torch.autocast("cpu", enabled=False):
        assert ours(*tensors).dtype == F32


def test_autocast_of_fused_gemms() -> None:
    """What is multiplied takes the type; results have the types that the call says; scaled operands stay."""
    a, b = (torch.randn(1, 128, 64).permute(1, 2, 0).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", dtype=BF16):
        ab12, c, _, _ = cudnn.ops.gemm_swiglu(a, b, c_dtype=None)
    assert (ab12.dtype, c.dtype) == (F32, BF16)
    plain = cudnn.ops.gemm_swiglu(a.detach().bfloat16(), b.detach().bfloat16(), c_dtype=None)
    assert torch.equal(c, plain[1])
    c.sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == F32
    scaled = gemm_operands.operands(
        gemm_operands.Variant("gemm_amax", (128, 128, 128, 1), "float8_e4m3fn", scale="float8_e8m0fnu", vector=32),
        "cpu",
    )
    with torch.autocast("cpu", dtype=BF16):
        actual = cudnn.ops.gemm_amax(scaled.a, scaled.b, scaled.sfa, scaled.sfb)
    expected = cudnn.ops.gemm_amax(scaled.a, scaled.b, scaled.sfa, scaled.sfb)
    assert all(map(torch.equal, actual, expected))


# vmap.


def mapped(
    function: Callable[..., Any], *tensors: Any, dims: Any = 0, atol: float = 1e-10, rtol: float = 1e-10, **options: Any
) -> None:
    """Under ``torch.vmap`` as in a loop, results and gradients, with no warning that it is slow."""
    leaves = [
        x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in tensors
    ]
    places = dims if isinstance(dims, tuple) else (dims,) * len(leaves)
    size = next(x.shape[dim] for x, dim in zip(leaves, places, strict=True) if dim is not None)
    actual = torch.vmap(function, places, **options)(*leaves)
    rows = [
        [x if dim is None else x.select(dim, entry) for x, dim in zip(leaves, places, strict=True)]
        for entry in range(size)
    ]
    expected = torch.stack([function(*row) for row in rows])
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    weight = torch.randn_like(expected)
    some = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = [torch.autograd.grad(x, some, weight) for x in (actual, expected)]
    torch.testing.assert_close(*gradients, atol=atol, rtol=rtol)


VMAP = pytest.mark.filterwarnings("error::UserWarning")


@VMAP
@pytest.mark.parametrize("dims", [0, 2, (0, None, None), (None, 1, 3)], ids=str)
@pytest.mark.parametrize("name", ["plain", "causal", "grouped heads", "window, bottom right"])
def test_vmap_of_attention(name: str, dims: Any) -> None:
    problem = CASES[name]
    q, k, v, _ = (torch.stack([x, 2 * x, -x]) for x in problem.tensors(F64))
    places = dims if isinstance(dims, tuple) else (dims,) * 3
    tensors = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip((q, k, v), places, strict=True)]
    mapped(functools.partial(scaled_dot_product_attention, **problem.keywords()), *tensors, dims=places)


@VMAP
@pytest.mark.parametrize("own", [False, True], ids=["the same lengths", "separate lengths"])
@pytest.mark.parametrize("name", ["lengths", "lengths of keys", "packed", "packed with gaps", "packed, empty entries"])
def test_vmap_of_lengths(name: str, own: bool) -> None:
    problem = CASES[name]
    q, k, v, _ = (torch.randn(3, *x.shape, dtype=F64) for x in problem.tensors(F64))
    keywords = problem.keywords()
    lengths = {key: x for key, x in keywords.items() if isinstance(x, torch.Tensor)}
    rest = {key: x for key, x in keywords.items() if key not in lengths}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, **dict(zip(lengths, inputs, strict=True)), **rest)

    inputs = [torch.stack([x, x, x]) if own else x for x in lengths.values()]
    if own and "cumulative_seq_len_q" not in lengths:
        inputs = [x - torch.arange(3).view(-1, 1, 1, 1, 1) for x in inputs]  # others for each
    mapped(attend, q, k, v, *inputs, dims=(0, 0, 0, *[0 if own else None] * len(inputs)))


@VMAP
@pytest.mark.parametrize("shape", [(24, 24), (4, 24, 24), (2, 1, 24, 24)], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["one mask", "separate masks"])
def test_vmap_of_masks(shape: tuple[int, ...], own: bool) -> None:
    q, k, v = (torch.randn(3, 2, 4, 24, 16, dtype=F64) for _ in range(3))
    mask = torch.randn(3, *shape, dtype=F64) if own else torch.randn(shape, dtype=F64)
    mapped(scaled_dot_product_attention, q, k, v, mask, dims=(0, 0, 0, 0 if own else None))


@VMAP
def test_vmap_of_a_backward_pass() -> None:
    """Many gradients of the result at once."""
    q, k, v, _ = CASES["causal"].tensors(F64)
    mask = torch.randn(1, 4, 24, 24, dtype=F64)
    leaves = [x.requires_grad_() for x in (q, k, v, mask)]
    out = scaled_dot_product_attention(*leaves)
    many = torch.randn(3, *out.shape, dtype=F64)
    actual = torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in many]
    for one, others in zip(actual, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(others), atol=1e-10, rtol=1e-10)


@VMAP
def test_vmap_of_dropout() -> None:
    q, k, v = (torch.randn(3, 2, 4, 24, 16, dtype=F64) for _ in range(3))
    attend = functools.partial(scaled_dot_product_attention, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="randomness"):  # PyTorch's own rule
        torch.vmap(attend)(q, k, v)
    equal = [x[:1].expand_as(x) for x in (q, k, v)]
    same = torch.vmap(attend, randomness="same")(*equal)
    assert torch.equal(same[0], same[1])
    other = torch.vmap(attend, randomness="different")(*equal)
    assert not torch.equal(other[0], other[1])
    # The backward pass drops what the forward pass dropped, for each of several gradients.
    options = (0.25, False, 0, -1, -1, None, None, None, None)
    tensors, more = (q[0], k[0], v[0]), (None, 0.5, torch.tensor([7]))
    o, stats = sdpa(*tensors, *options, *more)
    many = torch.randn(3, *o.shape, dtype=F64)
    actual = torch.vmap(lambda d: sdpa_bwd(d, *tensors, o, stats, *options, False, *more), randomness="same")(many)
    for place, one in enumerate(actual):
        each = [sdpa_bwd(d, *tensors, o, stats, *options, False, *more)[place] for d in many]
        torch.testing.assert_close(one, torch.stack(each))


@VMAP
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("dims", [(0, None, None), (2, None, None), (0, 0, 0), (1, 2, None), (None, 1, 0)], ids=str)
def test_vmap_of_convolutions(dims: tuple[int | None, ...], activation: str) -> None:
    tensors = [torch.randn(3, *shape) for shape in ((2, 4, 20), (4, 3), (4,))]
    tensors = [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(tensors, dims, strict=True)]
    # In float32, whose sums may have another order.
    mapped(functools.partial(causal_conv1d, activation=activation), *tensors, dims=dims, atol=1e-4, rtol=1e-5)


@VMAP
def test_vmap_of_a_convolutions_backward_pass() -> None:
    x, weight, bias = torch.randn(2, 4, 20), torch.randn(4, 3), torch.randn(4)
    many = torch.randn(3, 2, 4, 20)
    actual = torch.vmap(lambda d: causal_conv1d_bwd_primitive(d, x, weight, bias, "silu"))(many)
    for place, one in enumerate(actual):
        expected = torch.stack([causal_conv1d_bwd_primitive(d, x, weight, bias, "silu")[place] for d in many])
        torch.testing.assert_close(one, expected)


def test_vmap_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: calls.append(name) or function(*arguments)

    monkeypatch.setattr(sdpa_module, "run", counted("attention", sdpa_module.run))
    monkeypatch.setattr(conv_module, "_past", counted("convolution", conv_module._past))
    q = torch.randn(5, 2, 4, 24, 16, requires_grad=True)
    torch.vmap(scaled_dot_product_attention)(q, q, q).sum().backward()
    assert calls == ["attention"] * 2  # forward and backward
    x = torch.randn(5, 2, 4, 20, requires_grad=True)
    torch.vmap(causal_conv1d, (0, None))(x, torch.ones(4, 3)).sum().backward()
    assert calls[2:] == ["convolution"] * 2


def test_vmap_of_the_others_is_pytorchs_loop() -> None:
    first = torch.tensor([0, 7], dtype=torch.int32)
    token, weight = torch.randn(3, 1, 16, 32), torch.randn(2, 24, 32).mT
    actual = torch.vmap(lambda token: moe_grouped_matmul(token, weight, first))(token)
    assert torch.equal(actual, torch.stack([moe_grouped_matmul(x, weight, first) for x in token]))
