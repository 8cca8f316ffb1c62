"""PyTorch's switch and Megatron-Core's core attention, on the CPU by the reference."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import _registry
from torch.nn.attention.varlen import varlen_attn

from cudnn.integrations import torch_attention
from cudnn.integrations.megatron_attention import CoreAttention
from cudnn.ops import flash_attn_func, flash_attn_varlen_func
from support.packings import Packing

PACKING = Packing(((5, 5), (9, 9)), share=1)


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The switch on, of the CPU's operators."""
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {})
    torch_attention.register()
    assert torch.nn.attention.list_flash_attention_impls() == ["cudnn"]
    handle = torch_attention.activate("CPU")
    yield handle
    handle.remove()


def test_varlen_attn_runs_ours_until_it_is_restored(switched: Any) -> None:
    q, k, v, _, do, _ = PACKING.tensors()
    ends = PACKING.offsets()
    results = []
    for function in (
        lambda *x: varlen_attn(*x, *ends, 9, 9, window_size=(3, 0)),
        lambda *x: flash_attn_varlen_func(*x, *ends, 9, 9, window_size=(3, 0)),
    ):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    assert all(map(torch.equal, *results))
    switched.remove()
    with pytest.raises(NotImplementedError):
        varlen_attn(q, k, v, *ends, 9, 9)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_the_operators_of_scaled_dot_product_attention(switched: Any, tokens_first: bool) -> None:
    """In both orders of memory, which the result has too."""
    q, k, v, do = (torch.randn(2, 7, 2, 64).bfloat16().transpose(1, 2) for _ in range(4))
    if not tokens_first:
        q, k, v, do = (x.contiguous() for x in (q, k, v, do))
    out, lse, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    assert out.stride() == torch.empty_like(q).stride()
    arguments = (do, q, k, v, out, lse, rest[0], rest[1], 7, 7, 0.0, True, rest[4], rest[5])
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(*arguments)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    expected = flash_attn_func(*(x.transpose(1, 2) for x in leaves), causal=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    for one, other in zip(gradients, torch.autograd.grad(expected, leaves, do), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


def test_what_the_switch_refuses(switched: Any) -> None:
    q = torch.randn(1, 2, 7, 64).bfloat16()
    for arguments, message in [
        ((q, q, q, 0.1), "dropout_p: got 0.1; allowed: 0 .*restore_flash_attention_impl"),
        ((q[..., :32].contiguous(),) * 3, r"head sizes of query and value: got \(32, 32\)"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.aten._scaled_dot_product_flash_attention(*arguments)
    x, ends = q[0].transpose(0, 1), torch.tensor([0, 7], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="seqused_k: got Tensor; allowed: None"):
        varlen_attn(x, x, x, ends, ends, 7, 7, seqused_k=ends[1:])


class Mask(enum.Enum):
    """As Megatron's ``AttnMaskType``."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


def config(**changed: Any) -> Any:
    """What Megatron's ``TransformerConfig`` has of attention."""
    values = {"attention_dropout": 0.0, "num_attention_heads": 4, "tensor_model_parallel_size": 1}
    return SimpleNamespace(**values, params_dtype=torch.bfloat16, use_cpu_initialization=True, **changed)


def test_megatrons_core_attention() -> None:
    packing = Packing(((5, 5), (9, 9)))
    q, k, v, *_ = packing.tensors()
    ends = packing.offsets()
    core = CoreAttention(config(window_size=(3, 0), softmax_type="learnable"), 1, Mask.causal)
    core.softmax_offset.data.normal_()
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1], max_seqlen_q=9)
    packed.max_seqlen_kv, packed.cu_seqlens_q_padded = 9, None
    options: dict[str, Any] = {"causal": True, "window_size": (3, 0), "learnable_sink": core.softmax_offset}
    actual = core(q, k, v, None, attn_mask_type=Mask.padding_causal, packed_seq_params=packed)
    assert torch.equal(actual, flash_attn_varlen_func(q, k, v, *ends, 9, 9, **options).flatten(1))
    dense = [x.unflatten(0, (7, 2)) for x in (q, k, v)]  # (s, b, h, d)
    expected = flash_attn_func(*(x.transpose(0, 1) for x in dense), **options)
    assert torch.equal(core(*dense, None), expected.transpose(0, 1).flatten(2))
    torch.autograd.grad(core(*dense, None).float().sum(), core.softmax_offset)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout: got 0.1"),
        ({"context_parallel_size": 2}, "context_parallel_size: got 2"),
        ({"softmax_type": "off-by-one"}, "softmax_type: got off-by-one; allowed: vanilla or learnable"),
    ],
)
def test_what_megatrons_core_attention_refuses(changed: dict[str, Any], message: str) -> None:
    one = config()
    vars(one).update(changed)
    with pytest.raises(NotImplementedError, match=message):
        CoreAttention(one, 1, Mask.causal)


def test_masks_that_megatrons_core_attention_refuses() -> None:
    core, q = CoreAttention(config(), 1, Mask.causal), torch.randn(5, 1, 2, 64).bfloat16()
    with pytest.raises(NotImplementedError, match="attn_mask_type: got arbitrary"):
        core(q, q, q, None, attn_mask_type=Mask.arbitrary)
    with pytest.raises(NotImplementedError, match="attention_mask: got a tensor"):
        core(q, q, q, torch.ones(1), attn_mask_type=Mask.padding)
