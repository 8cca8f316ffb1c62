"""A compiled object takes other sizes than its samples'; those that its kernel cannot take are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnn
from cudnn import NSA
from cudnn.fused import object_cache

Tensors = tuple[Any, ...]
OFFSETS = torch.tensor([0, 64], dtype=torch.int32)


def rows(heads: int, width: int = 64, count: int = 64) -> torch.Tensor:
    """(1, h, s, d)"""
    return torch.randn(1, heads, count, width).half()


def forward(hq: int, hk: int, width: int = 64) -> Tensors:
    return rows(hq, width), rows(hk, width), rows(hk, width), rows(hq, width), torch.zeros(1, hq, 64)


def backward(hq: int, hk: int, width: int = 64) -> Tensors:
    q, k, v, o, lse = forward(hq, hk, width)
    return q, k, v, o, o.clone(), lse, q.clone(), k.clone(), v.clone()


def compression(hq: int, hk: int, width: int = 64) -> Tensors:
    return rows(hq, width), rows(hk, width, 8), rows(hk, width, 8), rows(hq, width), torch.zeros(1, hq, 64)


def top_k(hq: int, hk: int, width: int = 64) -> Tensors:
    scores = torch.zeros(1, 64, hk, 4).transpose(1, 2)
    return rows(hq, width), rows(hk, width, 8), torch.zeros(1, hq, 64), scores, scores.int()


def selection(hq: int, hk: int, width: int = 64) -> Tensors:
    q, k, v, o = (torch.randn(64, heads, width).half() for heads in (hq, hk, hk, hq))
    lists = torch.zeros(64, hk, 2, dtype=torch.int32), torch.ones(64, hk, dtype=torch.int32)
    return q, k, v, o, torch.zeros(64, hq), torch.zeros(64, hq), *lists, OFFSETS, None


def both(hq: int, hk: int, width: int = 64) -> Tensors:
    q, k, v, o, lse, *_ = selection(hq, hk, width)
    return q, k[:8], v[:8], o, lse, torch.zeros(64, hk, 8, dtype=torch.int32), OFFSETS, OFFSETS // 8


@pytest.mark.parametrize(
    ("api", "tensors", "options", "any_heads"),
    [
        (cudnn.SdpaForward, forward, {}, True),
        (cudnn.SdpaBackward, backward, {}, True),
        (NSA.CompressionAttention, compression, {}, True),
        (NSA.CompressionAttentionBackward, backward, {}, True),
        (NSA.TopKReduction, top_k, {"k_value": 4, "selection_block_size": 16, "compress_stride": 8}, False),
        (NSA.SelectionAttention, selection, {"block_size": 16}, False),
        (NSA.CompressionTopK, both, {"k_value": 4, "selection_block_size": 16, "compress_stride": 8}, False),
    ],
)
def test_other_heads(api: Any, tensors: Callable[..., Tensors], options: dict[str, Any], any_heads: bool) -> None:
    operation = api(*tensors(4, 1), **options)
    operation.compile()
    operation.execute(*tensors(4, 1))
    if any_heads:
        operation.execute(*tensors(4, 2))
    message = "heads of q: got 3; allowed: multiples of the 2" if any_heads else "q tensor shape mismatch: expected"
    arguments = tensors(3, 2)
    before = [x if x is None else x.clone() for x in arguments]
    with pytest.raises(ValueError, match=message):
        operation.execute(*arguments)
    assert all(x is y or torch.equal(x, y) for x, y in zip(arguments, before, strict=True))
    with pytest.raises(ValueError, match=r"q tensor shape mismatch: expected .*64\), got .*128\)"):
        operation.execute(*tensors(4, 1, 128))


def test_pages_of_another_size() -> None:
    def caches(page: int) -> dict[str, torch.Tensor]:
        return {"k_tensor": torch.randn(6, 1, page, 64).half(), "v_tensor": torch.randn(6, 1, page, 64).half()}

    step = rows(2, count=1)
    tensors = {"q_tensor": step, **caches(16), "o_tensor": step.clone(), "lse_tensor": torch.zeros(1, 2, 1)}
    tensors |= {"seqlen_k_tensor": torch.tensor([20]).int(), "page_table_tensor": torch.tensor([[4, 0, 3]]).int()}
    operation = cudnn.SdpaForward(**{f"sample_{name.removesuffix('_tensor')}": x for name, x in tensors.items()})
    operation.compile()
    operation.execute(**tensors)
    with pytest.raises(ValueError, match="page_table: got pages of 32 keys; allowed: pages of 16 keys"):
        operation.execute(**tensors | caches(32))


def test_as_many_objects_as_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of programs whose sequences have ever other lengths. The oldest goes first, and may come again."""
    monkeypatch.setattr(object_cache, "MAX_OBJECTS", 3)
    monkeypatch.setattr(cudnn.SdpafwdSm100D256, "objects", {})
    for count in (1, 2, 3, 4, 5, 1):
        q = rows(1, 256, count).transpose(1, 2).contiguous().transpose(1, 2)
        o, _ = cudnn.sdpa_fwd_wrapper_sm100_d256(q, q, q)
        torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=2e-3, rtol=2e-3)
    kept = [key[0][0][2][2] for key in cudnn.SdpafwdSm100D256.objects]
    assert kept == [4, 5, 1]
