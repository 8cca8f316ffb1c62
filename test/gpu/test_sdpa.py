"""Attention on the GPU, as existing programs test it, at all head sizes and in a CUDA graph."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import cudnn
from cudnn.sdpa import SdpaBackward, SdpaForward, sdpa_bwd_wrapper_sm100_d256, sdpa_fwd_wrapper_sm100_d256
from cudnn_kernels.attention import DESCALES
from gpu.common import captured
from support.dense_attention import Attended, attend, band, flat

CAUSAL: dict[str, Any] = {"is_causal": True, "window_size": (-1, 0)}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("there is a kernel for Hopper only")


def drawn(rows: int, heads: int, head: int = 256, batch: int = 2, integers: bool = True) -> torch.Tensor:
    """(b, h, s, d) as a transposed (b, s, h, d)."""
    shape = (batch, rows, heads, head)
    x = torch.randint(-2, 2, shape, device="cuda") if integers else torch.randn(shape, device="cuda")
    return x.half().transpose(1, 2)


def formula(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Attended:
    """In float32, the diagonal in the lower right corner."""
    seen = band(q.shape[2], k.shape[2], right=0 if causal else None, bottom_right=True, device="cuda")
    return attend(q.float(), k.float(), v.float(), seen, scale=scale)


@pytest.mark.parametrize("options", [{}, CAUSAL])
@pytest.mark.parametrize("layout", ["bhsd", "thd"])
def test_as_existing_programs_do(layout: str, options: dict[str, Any]) -> None:
    batch, rows, scale = 2, 512, 1 / 16
    q, do, o = (drawn(rows, 24) for _ in range(3))
    k, v = drawn(rows, 4), drawn(rows, 4)
    expected, lse, _, weights = formula(q, k, v, bool(options), scale)
    ends = [torch.arange(0, (batch + 1) * rows, rows, device="cuda", dtype=torch.int32)] * 2 if layout == "thd" else []
    change = flat if layout == "thd" else lambda x: x
    for _ in range(2):
        actual, found_lse = sdpa_fwd_wrapper_sm100_d256(*map(change, (q, k, v)), *ends, **options)
    torch.testing.assert_close(actual.float(), change(expected), atol=5e-3, rtol=5e-3)
    lse_as_stored = lse.transpose(0, 1).reshape(24, -1) if ends else lse
    torch.testing.assert_close(found_lse.view(lse_as_stored.shape), lse_as_stored, atol=1e-4, rtol=1e-4)

    # P that does not sum up to 1, O that is none: the gradients' formulas hold all the same. P and dS are rounded to
    # float16, which alone moves a few elements in 10,000 by more than 1e-3, so norms are compared.
    given_lse = torch.full_like(found_lse, 10.0)
    p = weights * (lse - 10).exp().unsqueeze(-1)
    share = 6
    wide_k, wide_v = (x.float().repeat_interleave(share, 1) for x in (k, v))
    ds = p * (do.float() @ wide_v.mT - (o.float() * do.float()).sum(-1, keepdim=True))
    p, ds = p.half().float(), ds.half().float()
    right = [
        scale * ds @ wide_k,
        (scale * ds.mT @ q.float()).unflatten(1, (4, share)).sum(2),
        (p.mT @ do.float()).unflatten(1, (4, share)).sum(2),
    ]
    gradients = sdpa_bwd_wrapper_sm100_d256(*map(change, (q, k, v, o, do)), given_lse, *ends, **options)
    for gradient, want in zip(gradients, right, strict=True):
        assert (gradient.float() - change(want)).norm() <= 4e-4 * want.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head", "head_v"), SdpaForward.head_sizes)
def test_head_sizes(head: int, head_v: int, causal: bool) -> None:
    q, k = drawn(500, 8, head, integers=False), drawn(700, 2, head, integers=False)
    v = drawn(700, 2, head_v, integers=False)
    o = torch.full_like(drawn(500, 8, head_v), math.nan)
    lse = torch.full((2, 8, 500), math.nan, device="cuda")
    attention = SdpaForward(q, k, v, o, lse, **(CAUSAL if causal else {}))
    attention.compile()
    attention.execute(q, k, v, o, lse)
    expected, expected_lse, *_ = formula(q, k, v, causal, head**-0.5)
    torch.testing.assert_close(o.float(), expected, atol=4e-3, rtol=2e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
    first = o.clone()
    for _ in range(1000):
        attention.execute(q, k, v, o, lse)
    assert torch.equal(o, first)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head", "head_v"), SdpaForward.head_sizes)
def test_eight_bits(head: int, head_v: int, causal: bool, kind: torch.dtype) -> None:
    q, k = (drawn(rows, heads, head, integers=False).to(kind) for rows, heads in ((500, 8), (700, 2)))
    v = drawn(700, 2, head_v, integers=False).to(kind)
    o = torch.full_like(drawn(500, 8, head_v), math.nan)
    lse = torch.full((2, 8, 500), math.nan, device="cuda")
    descales = [torch.rand(2, 2, device="cuda") + 0.5 for _ in range(3)]
    attention = SdpaForward(
        q,
        k,
        v,
        o,
        lse,
        **(CAUSAL if causal else {}),
        **dict(zip((f"sample_{x}" for x in DESCALES), descales, strict=True)),
    )
    attention.compile()
    run = functools.partial(
        attention.execute, q, k, v, o, lse, **dict(zip((f"{x}_tensor" for x in DESCALES), descales, strict=True))
    )
    run()
    meant = [
        x.float() * d.repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
        for x, d in zip((q, k, v), descales, strict=True)
    ]
    expected, expected_lse, *_ = formula(*meant, causal, head**-0.5)
    assert (o.float() - expected).norm() <= 0.4 * torch.finfo(kind).eps * expected.norm()
    torch.testing.assert_close(lse, expected_lse, atol=1e-2, rtol=0)
    first = o.clone()
    for _ in range(100):
        run()
    assert torch.equal(o, first)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(
    ("head", "head_v", "page"),
    [(64, 64, 256), (96, 96, 32), (128, 128, 16), (192, 128, 64), (192, 192, 16), (256, 256, 128)],
)
def test_pages_of_keys(head: int, head_v: int, page: int, rows: int) -> None:
    lengths = torch.tensor([3000, 1, 777], device="cuda", dtype=torch.int32)
    table = torch.randperm(3 * 4096 // page, device="cuda").view(3, -1).int()
    q = drawn(rows, 12, head, batch=3, integers=False)
    k, v = (drawn(page, 2, width, batch=table.numel(), integers=False) for width in (head, head_v))
    o, lse = drawn(rows, 12, head_v, batch=3), torch.empty(3, 12, rows, device="cuda")
    attention = SdpaForward(q, k, v, o, lse, sample_seqlen_k=lengths, sample_page_table=table)
    attention.compile()
    attention.execute(q, k, v, o, lse, seqlen_k_tensor=lengths, page_table_tensor=table)
    for i, length in enumerate(lengths.tolist()):
        keys = (x[table[i]].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (k, v))
        expected, expected_lse, *_ = formula(q[i : i + 1], *keys, False, head**-0.5)
        torch.testing.assert_close(o[i : i + 1].float(), expected, atol=4e-3, rtol=2e-3)
        torch.testing.assert_close(lse[i : i + 1], expected_lse, atol=1e-4, rtol=1e-4)
    first = o.clone()
    for _ in range(1000):
        attention.execute(q, k, v, o, lse, seqlen_k_tensor=lengths, page_table_tensor=table)
    assert torch.equal(o, first)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head", "head_v"), SdpaBackward.head_sizes)
def test_deterministic_gradients(head: int, head_v: int, causal: bool) -> None:
    """Twelve heads of K are more than the interleaved CTAs process concurrently."""
    options = {**(CAUSAL if causal else {}), "deterministic": True}
    q, do = (drawn(1000, 24, width, integers=False) for width in (head, head_v))
    k, v = (drawn(1000, 12, width, integers=False) for width in (head, head_v))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    expected, lse, *_ = formula(*leaves, causal, head**-0.5)
    expected.backward(do.float())
    o, lse = expected.detach().half().transpose(1, 2).contiguous().transpose(1, 2), lse.detach()
    gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
    attention = SdpaBackward(q, k, v, o, do, lse, *gradients, **options)
    attention.compile()
    attention.execute(q, k, v, o, do, lse, *gradients)
    first = [x.clone() for x in gradients]
    for actual, leaf in zip(first, leaves, strict=True):
        assert leaf.grad is not None
        assert (actual.float() - leaf.grad).norm() <= 4e-3 * leaf.grad.norm()
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        attention.execute(q, k, v, o, do, lse, *gradients)
        differences += sum((x != y).sum() for x, y in zip(gradients, first, strict=True))
    assert differences == 0


@pytest.mark.parametrize(("head", "causal"), [(128, True), (256, False), (256, True)])
def test_the_operator_chooses_our_kernels(head: int, causal: bool) -> None:
    leaves = [torch.randn(1, 32, 4096, head, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    results = []
    for backend in (None, "fused", "cudnn"):
        o = cudnn.ops.scaled_dot_product_attention(*leaves, is_causal=causal, backend=backend)
        results.append([o, *torch.autograd.grad(o.float().square().sum(), leaves)])
    assert torch.equal(results[0][0], results[1][0])
    for chosen, theirs in zip(results[0], results[2], strict=True):
        assert (chosen.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()


def test_capture() -> None:
    q, k, v = (drawn(300, heads, integers=False) for heads in (4, 2, 2))
    o, lse = torch.empty_like(q), torch.empty(2, 4, 300, device="cuda")
    attention = SdpaForward(q, k, v, o, lse, **CAUSAL)
    attention.compile()
    attention.execute(q, k, v, o, lse)
    graph = captured(lambda: attention.execute(q, k, v, o, lse))
    q.copy_(drawn(300, 4, integers=False))
    graph.replay()
    expected, *_ = formula(q, k, v, True, 1 / 16)
    torch.testing.assert_close(o.float(), expected, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize(("rows", "keys"), [(200, 0), (5, 0), (0, 64)])
def test_nothing_to_attend(rows: int, keys: int) -> None:
    q, k, v, do = (drawn(n, 2, 128) for n in (rows, keys, keys, rows))
    o, lse = torch.full_like(q, math.nan), torch.full((2, 2, rows), math.nan, device="cuda")
    attention = SdpaForward(q, k, v, o, lse)
    attention.compile()
    attention.execute(q, k, v, o, lse)
    assert not o.any()
    assert (lse == -math.inf).all()
    gradients = [torch.full_like(x, math.nan) for x in (q, k, v)]
    backward = SdpaBackward(q, k, v, o, do, lse, *gradients)
    backward.compile()
    backward.execute(q, k, v, o, do, lse, *gradients)
    assert not any(x.any() for x in gradients)
