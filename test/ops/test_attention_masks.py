"""``cudnn.ops.scaled_dot_product_attention``: masks and dropout, on the reference executor against PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cudnn
from cudnn.attention import graphs as module
from cudnn.ops import scaled_dot_product_attention
from support.dense_attention import attend, with_gradients
from support.graphs import planned_by
from support.torch_attention import CASES

pytestmark = pytest.mark.filterwarnings("error")
F64 = torch.float64
B, H, S_Q, S_KV, D = 2, 4, 24, 32, 16


@pytest.fixture(autouse=True)
def _fresh() -> None:
    for cache in (module._fprop_cache, module._bprop_cache):
        cache.clear()


def tensors(dtype: torch.dtype = F64, heads: int = H) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of the result."""
    shapes = ((H, S_Q), (heads, S_KV), (heads, S_KV), (H, S_Q))
    return [torch.randn(B, *shape, D).to(dtype) for shape in shapes]


SHAPES = [(S_Q, S_KV), (1, S_KV), (S_Q, 1), (B, 1, 1, S_KV), (H, S_Q, S_KV), (B, H, S_Q, S_KV), (1, H, S_Q, S_KV)]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks(shape: tuple[int, ...], added: bool) -> None:
    """What is added has a gradient."""
    *inputs, d_out = tensors()
    seen = torch.rand(shape) < 0.7
    seen[..., 0] = True  # every row sees a key
    inputs, options = ([*inputs, torch.randn(shape, dtype=F64)], {}) if added else (inputs, {"attn_mask": seen})
    ours, theirs = (
        with_gradients(functools.partial(function, **options), [*inputs, d_out])
        for function in (scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert len(ours) == 4 + added
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("added", [False, True])
def test_rows_that_see_nothing_are_zero(added: bool) -> None:
    seen = torch.rand(B, 1, S_Q, S_KV) < 0.7
    seen[0, :, 3] = seen[1, :, :5] = False
    mask: Any = torch.zeros(seen.shape, dtype=F64).masked_fill(~seen, -torch.inf) if added else seen
    q, k, v, d_out = inputs = tensors()
    actual = with_gradients(functools.partial(scaled_dot_product_attention, attn_mask=mask), inputs)
    assert all(torch.isfinite(x).all() for x in actual)
    for x in actual[:2]:
        assert not x[0, :, 3].any()
        assert not x[1, :, :5].any()
    some = torch.cat([q[0, :, :3], q[0, :, 4:]], 1)
    expected = F.scaled_dot_product_attention(some, k[0], v[0], torch.cat([seen[0, 0, :3], seen[0, 0, 4:]]))
    torch.testing.assert_close(torch.cat([actual[0][0, :, :3], actual[0][0, :, 4:]], 1), expected)
    d_out[0, :, 3], d_out[1, :, :5] = 0, 0
    for one, other in zip(actual[1:], with_gradients(functools.partial(reference, seen=seen), inputs)[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Rows that see nothing see everything, and have no gradient."""
    return F.scaled_dot_product_attention(q, k, v, seen | ~seen.any(-1, keepdim=True))


def test_grouped_heads_and_the_numerical_test() -> None:
    q, k, v, _ = tensors(heads=2)
    bias = torch.randn(1, H, S_Q, S_KV, dtype=F64)
    function = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    leaves = [x[..., :4, :].requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(function, (*leaves, bias[..., :4, :4].requires_grad_()), fast_mode=True)


def test_float32_masks_beside_other_types() -> None:
    inputs = tensors(torch.bfloat16)
    bias = torch.randn(S_Q, S_KV)
    actual = with_gradients(functools.partial(scaled_dot_product_attention, attn_mask=bias), inputs)
    expected = F.scaled_dot_product_attention(*(x.float() for x in inputs[:3]), bias)
    assert {x.dtype for x in actual} == {torch.bfloat16}
    torch.testing.assert_close(actual[0].float(), expected, atol=3e-2, rtol=3e-2)


def kept_and_scaled(p: float, **options: Any) -> torch.Tensor:
    """The weights after dropout: V is the identity."""
    q, k, v = torch.zeros(1, 2, 64, 16), torch.zeros(1, 2, 64, 16), torch.eye(64).expand(1, 2, 64, 64)
    return scaled_dot_product_attention(q, k, v, dropout_p=p, **options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(64, 64).tril().bool()}], ids=str)
def test_dropout_drops_and_scales(options: dict[str, Any]) -> None:
    without = scaled_dot_product_attention(
        torch.zeros(1, 2, 64, 16), torch.zeros(1, 2, 64, 16), torch.eye(64).expand(1, 2, 64, 64), **options
    )
    weights = kept_and_scaled(0.25, **options)
    visible = without > 0
    kept = weights > 0
    assert not kept[~visible].any()
    torch.testing.assert_close(weights[kept], (without / 0.75)[kept])
    assert 0.7 < kept[visible].double().mean() < 0.8


def test_dropout_follows_the_generator() -> None:
    torch.manual_seed(1)
    first, second = kept_and_scaled(0.5), kept_and_scaled(0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(kept_and_scaled(0.5), first)
    assert len(module._fprop_cache) == 1  # the seed is data


@pytest.mark.parametrize("masked", [False, True])
def test_the_backward_pass_drops_the_same_weights(masked: bool) -> None:
    """Against autograd through the weights that the forward pass kept."""
    q, k, _, _ = tensors()
    v = torch.eye(S_KV, dtype=F64).expand(B, H, S_KV, S_KV)
    bias = torch.randn(1, H, S_Q, S_KV, dtype=F64)
    d_out = torch.randn(B, H, S_Q, S_KV, dtype=F64)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return scaled_dot_product_attention(q, k, v, *bias, dropout_p=0.3)

    more = [bias] if masked else []
    kept = attention(q, k, v, *more) > 0
    assert 0.6 < kept.double().mean() < 0.8

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return attend(q, k, v, bias=sum(bias), kept=kept.to(q.dtype) / 0.7).o

    inputs = [q, k, v, *more, d_out]
    torch.testing.assert_close(
        with_gradients(attention, inputs), with_gradients(by_hand, inputs), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    q, k, v, d_out = tensors()
    mask = torch.rand(S_Q, S_KV) < 0.7
    inputs = [q, k, v, torch.randn(H, S_Q, S_KV, dtype=F64), d_out]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        once = scaled_dot_product_attention(2 * q, k, v, bias, 0.3)
        return scaled_dot_product_attention(once, k, v, attn_mask=mask) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    actual = [with_gradients(function, inputs) for function in (compiled, layer) if not torch.manual_seed(3) or True]
    torch.testing.assert_close(*actual, atol=1e-12, rtol=1e-12)


def test_operators_are_registered_right() -> None:
    q, k, v, d_out = tensors()
    bias = torch.randn(1, H, S_Q, S_KV, dtype=F64)
    seed = torch.tensor([5])
    options = (0.25, False, 0, -1, -1, None, None, None, None)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for more in ((bias.requires_grad_(), 0.0, None), (None, 0.5, seed), (bias, 0.5, seed)):
        torch.library.opcheck(torch.ops.cudnn.sdpa, (*leaves, *options, *more))
        with torch.no_grad():
            o, stats = torch.ops.cudnn.sdpa(*leaves, *options, *more)
            arguments = (d_out, *(x.detach() for x in (q, k, v)), o, stats)
            torch.library.opcheck(torch.ops.cudnn.sdpa_bwd, (*arguments, *options, False, *more))
            if more[0] is not None:
                torch.library.opcheck(torch.ops.cudnn.sdpa_bias_bwd, (*arguments, bias.detach(), 0.25, *more[1:]))


def _refused(error: type[Exception], words: str, *mask: Any, **options: Any) -> None:
    with pytest.raises(error, match=words):
        scaled_dot_product_attention(*tensors(torch.float16)[:3], *mask, **options)


def test_refusals() -> None:
    mask = torch.ones(S_Q, S_KV, dtype=torch.bool)
    _refused(ValueError, "dropout_p: got 1.0; allowed: 0 and more, less than 1", dropout_p=1.0)
    _refused(ValueError, "dropout_p: got -0.1", dropout_p=-0.1)
    for options in ({"is_causal": True}, {"left_bound": 3}, {"seq_len_kv": torch.tensor([3, 4])}):
        _refused(ValueError, "attn_mask: got a tensor with bounds or lengths.*put all of them", mask, **options)
    _refused(
        ValueError, r"shape of attn_mask: got \(24, 31\); allowed: what broadcasts to \(2, 4, 24, 32\)", mask[:, 1:]
    )
    _refused(ValueError, "shape of attn_mask", mask.expand(3, 1, 1, -1, -1))
    _refused(TypeError, "type of attn_mask: got torch.int64; allowed: torch.bool", mask.long())
    _refused(TypeError, "type of attn_mask: got torch.bfloat16", mask.bfloat16())


def test_the_operator_refuses() -> None:
    q, k, v, _ = tensors()
    options = (0.25, False, 0, -1, -1, None, None, None, None)
    bias = torch.zeros(1, 1, S_Q, S_KV, dtype=F64)
    for more, words in (
        ((bias[0],), "shape of bias"),
        ((bias[:, :, :1],), "shape of bias"),
        ((bias.bool(),), "bias: got torch.bool"),
        ((None, 0.5), "seed: got None"),
        ((None, 0.0, torch.tensor([3])), "seed: got a tensor"),
        ((None, 1.5, torch.tensor([3])), "dropout_p: got 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            module.sdpa(q, k, v, *options, *more)


def test_a_bias_with_gradient_stands_alone() -> None:
    q, k, v, _ = tensors()
    bias = torch.zeros(1, 1, S_Q, S_KV, dtype=F64, requires_grad=True)
    o, _ = module.sdpa(q, k, v, 0.25, True, 0, -1, -1, None, None, None, None, bias)
    with pytest.raises(NotImplementedError, match="gradient of bias: got other masks"):
        o.sum().backward()
    frozen = module.sdpa(q, k.requires_grad_(), v, 0.25, True, 0, -1, -1, None, None, None, None, bias.detach())[0]
    frozen.sum().backward()
    assert k.grad is not None


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
@pytest.mark.parametrize("inputs", ["nothing", "is_causal", "seen", "lengths", "bias", "sink"])
def test_gradients_of_one_row_and_one_key(inputs: str, dtype: torch.dtype) -> None:
    """cuDNN has no engine for them."""
    seen = torch.tensor([True, False, True]).view(3, 1, 1, 1)
    options: dict[str, dict[str, Any]] = {
        "is_causal": {"is_causal": True},
        "seen": {"attn_mask": seen},
        "lengths": {"seq_len_q": torch.ones(3).int(), "seq_len_kv": seen.flatten().int()},
    }
    torch.manual_seed(0)
    drawn = [torch.randn(3, heads, 1, d) for heads, d in ((4, 16), (2, 16), (2, 24))]
    drawn += [torch.randn(shape) for shape in {"bias": [(1, 4, 1, 1)], "sink": [(4,)]}.get(inputs, [])]
    leaves = [x.to(dtype) for x in (*drawn, torch.randn(3, 4, 1, 24))]

    def actual(*x: torch.Tensor) -> torch.Tensor:
        more = dict(zip(["sinks" if inputs == "sink" else "attn_mask"], x[3:], strict=False))
        return scaled_dot_product_attention(*x[:3], enable_gqa=True, **more, **options.get(inputs, {}))

    def expected(*x: torch.Tensor) -> torch.Tensor:
        more: dict[str, Any] = dict(zip([inputs], x[3:], strict=False))
        return attend(*x[:3], seen if inputs in ("seen", "lengths") else None, **more).o

    slack, wide = 1e-10 if dtype is F64 else 3e-2, [x.double() for x in leaves]
    for one, other in zip(with_gradients(actual, leaves), with_gradients(expected, wide), strict=True):
        torch.testing.assert_close(one.double(), other, atol=slack, rtol=slack)


def test_no_tokens() -> None:
    q, k, v, d_out = tensors()
    bias = torch.zeros(S_Q, S_KV, dtype=F64)
    empty = [q, k[:, :, :0], v[:, :, :0], bias[:, :0], d_out]
    actual = with_gradients(scaled_dot_product_attention, empty)
    assert [x.shape for x in actual] == [d_out.shape, *(x.shape for x in empty[:4])]
    assert not any(x.any() for x in actual)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", ["bias", "bias, no gradient", "dropout", "dropout, causal", "bias and dropout"])
def test_cudnn_has_engines(name: str, device_properties: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs as on a GPU, up to the plans."""
    built = planned_by(module, device_properties, monkeypatch)
    q, k, v, d_out = tensors(torch.float16)
    inputs = [q, k, v, *([torch.randn(H, S_Q, S_KV).half()] if name in ("bias", "bias and dropout") else []), d_out]
    options: dict[str, Any] = {"dropout_p": 0.1} if "dropout" in name else {}
    if "causal" in name:
        options["is_causal"] = True
    if name == "bias, no gradient":
        options["attn_mask"] = torch.rand(B, 1, 1, S_KV) < 0.5
    function = functools.partial(scaled_dot_product_attention, **options)
    if name == "bias and dropout" and device_properties.sm_version >= 100:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError):  # with the bias's gradient: no engine
            with_gradients(function, inputs)
        return
    with_gradients(function, inputs)
    assert [graph.get_execution_plan_count() > 0 for graph in built] == [True, True]


def test_without_masks_both_functions_are_the_same() -> None:
    from cudnn.experimental import ops

    for name in ("causal", "lengths, bottom right", "packed, causal, grouped heads"):
        problem = CASES[name]
        q, k, v, _ = problem.tensors(F64)
        results = [
            f(q, k, v, **problem.keywords()) for f in (scaled_dot_product_attention, ops.scaled_dot_product_attention)
        ]
        assert torch.equal(*results)
