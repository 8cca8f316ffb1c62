"""The grouped GEMMs of fp8 training (float32 scales for 128 elements) against the recipe in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cudnn
from cudnn.gemm import dequantize_token_blocks, quantize_rows, quantize_token_blocks, token_block_count
from support.oracle import E4M3
from support.selection import within

pytest.importorskip("ptx_emulator")

ENDS = (0, 1, 130, 130, 386, 399)  # experts without tokens, with one, of whole blocks, and of other numbers
WHERE = ["reference", "sm_90a", "sm_100a", pytest.param("gpu", marks=pytest.mark.gpu)]


def tokens(columns: int, ends: tuple[int, ...], device: str, exact: bool) -> tuple[Any, ...]:
    """Blocks of tokens, their scale factors, and the values in float64. Unused blocks and their scales are NaN.

    ``exact``: small integers, times powers of two that differ from block to block, which float32 adds up exactly.
    """
    generator = torch.Generator(device).manual_seed(columns)
    x = torch.randn(ends[-1], columns, generator=generator, device=device)
    steps = torch.randint(0, 4, (ends[-1] // 64 + 1, columns), generator=generator, device=device)
    x = (x.round().clamp(-3, 3) if exact else x) * torch.exp2(steps.float()).repeat_interleave(64, 0)[: ends[-1]]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    elements, scales = quantize_token_blocks(x, offsets, power_of_two=exact)
    values = dequantize_token_blocks(elements, scales, offsets).double()
    assert not exact or torch.equal(values, x.double())
    used = quantize_token_blocks(torch.ones_like(x), offsets)[1][:, :1] > 0
    elements.view(torch.uint8).masked_fill_(~used.unsqueeze(-1), 0x7F)
    return elements, scales.masked_fill_(~used, float("nan")), values, offsets


CASES = [
    (False, "bfloat16", (272, 144)),  # tiles of 256 x 128 on Hopper, else of 128 x 256
    (True, "float32", (144, 272)),
    (True, "main_grad", (272, 144)),
    (False, "addresses", (144, 272)),
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("exact", "results", "shape"), CASES)
def test_weight_gradients(where: str, exact: bool, results: str, shape: tuple[int, int]) -> None:
    """Repeats are bit-identical. Exact sums are exact, others as accurate as the tensor cores' sums."""
    (m, n), device = shape, "cuda" if where == "gpu" else "cpu"
    (a, sfa, a_values, offsets), (b, sfb, b_values, _) = (tokens(x, ENDS, device, exact) for x in (m, n))
    dtype = torch.bfloat16 if results == "bfloat16" else torch.float32
    before = torch.randint(-9, 10, (len(ENDS), m, n), device=device).to(dtype)
    options: dict[str, Any] = {"wgrad_dtype": dtype, "sf_vec_size": 128}
    options["accumulate_on_output"] = results == "main_grad"
    outs = []
    for _ in range(2 if where == "gpu" else 1):
        out = before.clone()
        target: dict[str, Any] = {"wgrad_tensor": out}
        if results == "addresses":
            target = {"output_mode": "discrete", "wgrad_ptrs": torch.tensor([x.data_ptr() for x in out], device=device)}
        with within(where):
            cudnn.grouped_gemm_wgrad_wrapper(a, b, sfa, sfb, offsets, **options, **target)
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)
    for expert, (start, end) in enumerate(zip((0, *ENDS[:-1]), ENDS, strict=True)):
        expected = a_values[start:end].T @ b_values[start:end] + before[expert].double() * (results == "main_grad")
        error = outs[0][expert].double() - expected
        if exact or start == end:
            assert not error.any(), expert
        else:
            assert error.norm() <= (4e-3 if results == "bfloat16" else 1e-3) * expected.norm(), expert


def block_quantized(x: torch.Tensor, rows: int, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, k) in e4m3 and the scale factors of ``rows`` x 128 elements."""
    elements, scales = quantize_rows(x.unsqueeze(2), E4M3, torch.float32, 128, 1.0, rows, power_of_two)
    return elements[..., 0], scales[..., 0].contiguous()


def values_of(x: torch.Tensor, scales: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The values of quantized rows, float64."""
    return x.double() * scales.double().repeat_interleave(rows, 0)[: len(x)].repeat_interleave(128, 1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("gathered", "power_of_two"), [(True, False), (False, True)])
def test_dglu(where: str, gathered: bool, power_of_two: bool) -> None:
    """All results, against the recipe in float64 on the same quantized operands. Repeats are bit-identical."""
    n, k, device = 192, 256, "cuda" if where == "gpu" else "cpu"
    m, experts = ENDS[-1], len(ENDS)
    generator = torch.Generator(device).manual_seed(5)
    random = functools.partial(torch.randn, generator=generator, device=device)
    # Small integers and scales that are powers of two: the product is exact.
    rows = 64 if gathered else m
    a, sfa = block_quantized(random(rows, k).round().clamp(-3, 3), 1, True)
    weights = [block_quantized(random(n, k).round().clamp(-3, 3) / 16, 128, True) for _ in ENDS]
    b, sfb = (torch.stack(x).permute(1, 2, 0) for x in zip(*weights, strict=True))
    index = torch.randint(0, rows, (m,), generator=generator, device=device, dtype=torch.int32)
    c, prob = random(m, 2 * n).bfloat16(), torch.rand(m, 1, 1, device=device)
    index = index if gathered else None
    offsets, one = torch.tensor(ENDS, dtype=torch.int32, device=device), torch.ones(experts, device=device)
    blocks, zeros = token_block_count(m, experts), functools.partial(torch.zeros, device=device)
    runs = []
    for _ in range(2 if where == "gpu" else 1):
        results = {
            "dprob_tensor": zeros(m, 1, 1),
            "d_blocks_tensor": zeros(blocks, 2 * n, 128, dtype=E4M3),
            "sfd_blocks_tensor": zeros(blocks, 2 * n),
            "activation_blocks_tensor": zeros(blocks, n, 128, dtype=E4M3),
            "sfactivation_blocks_tensor": zeros(blocks, n),
        }
        with within(where):
            returned = cudnn.grouped_gemm_dglu_wrapper(
                a, c, sfa.unsqueeze(2), offsets, one, one, prob, b_tensor=b, sfb_tensor=sfb, sf_vec_size=128,
                d_dtype=E4M3, deterministic=True, power_of_two_scales=power_of_two, a_index=index, **results,
            )  # fmt: skip
        runs.append({name: x for name, x in {**returned, **results}.items() if x is not None})
    for name, x in runs[0].items():
        first, *others = (run[name].contiguous().view(torch.uint8) for run in runs)
        assert all(torch.equal(other, first) for other in others), (name, x.shape)

    r, values = runs[0], values_of(a, sfa)
    values = values if index is None else values[index.long()]
    ranges = enumerate(zip((0, *ENDS[:-1]), ENDS, strict=True))
    product = torch.cat([values[start:end] @ values_of(*weights[e], 128).T for e, (start, end) in ranges])
    gate, up = c.double().unflatten(1, (-1, 2, 32)).unbind(2)
    sigmoid, dy = gate.sigmoid(), product.unflatten(1, (-1, 32))
    y = (gate * sigmoid * up).flatten(1)
    d = torch.stack([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid], 2).flatten(1)
    torch.testing.assert_close(r["dprob_tensor"][:, 0, 0].double(), (product * y).sum(1), rtol=1e-5, atol=1e-4)
    d, activation = (d * prob[:, :, 0]).float(), (y * prob[:, :, 0]).float()
    by_blocks = functools.partial(quantize_token_blocks, offsets=offsets, power_of_two=power_of_two)
    for name, scales, expected in (
        ("d_row_tensor", r["sfd_row_tensor"][:, :, 0], block_quantized(d, 1, power_of_two)),
        ("d_blocks_tensor", r["sfd_blocks_tensor"], by_blocks(d)),
        ("activation_blocks_tensor", r["sfactivation_blocks_tensor"], by_blocks(activation)),
    ):
        elements, expected_scales = expected
        torch.testing.assert_close(scales, expected_scales, rtol=0.0 if power_of_two else 1e-5, atol=0.0)
        differs = r[name].view(torch.uint8).reshape(elements.shape) != elements.view(torch.uint8)
        # Few values lie so near the middle between two elements that float32's rounding decides.
        assert differs.float().mean() < 2e-3, name


@pytest.mark.parametrize("where", ["reference", "sm_90a"])
def test_glu_with_scales_that_are_powers_of_two(where: str) -> None:
    """The forward pass: c in bfloat16 for the backward pass, and d quantized."""
    m, n, k, ends = 130, 512, 128, torch.tensor([1, 130], dtype=torch.int32)
    a, sfa = block_quantized(torch.randn(m, k).round().clamp(-3, 3), 1, True)
    weights = [block_quantized(torch.randn(n, k).round().clamp(-3, 3) / 16, 128, True) for _ in ends]
    b, sfb = (torch.stack(x).permute(1, 2, 0) for x in zip(*weights, strict=True))
    with within(where):
        r = cudnn.grouped_gemm_glu_wrapper(
            a, sfa.unsqueeze(2), ends, torch.ones(2), b_tensor=b, sfb_tensor=sfb, norm_const_tensor=torch.ones(1),
            d_dtype=E4M3, sf_vec_size=128, power_of_two_scales=True,
        )  # fmt: skip
    values = values_of(a, sfa)
    c = torch.cat([values[:1] @ values_of(*weights[0], 128).T, values[1:] @ values_of(*weights[1], 128).T])
    gate, up = c.unflatten(1, (-1, 2, 32)).unbind(2)
    elements, scales = block_quantized((gate * gate.sigmoid() * up).flatten(1).float(), 1, True)
    assert torch.equal(r["c_tensor"], c.bfloat16())
    assert torch.equal(r["sfd_row_tensor"][:, :, 0], scales)
    assert (r["d_tensor"].view(torch.uint8) != elements.view(torch.uint8)).float().mean() < 2e-3


def test_refusals() -> None:
    """What is refused, before anything runs."""
    (a, sfa, _, offsets), (b, sfb, _, _) = (tokens(x, ENDS, "cpu", True) for x in (144, 272))
    wgrad = functools.partial(cudnn.grouped_gemm_wgrad_wrapper, sf_vec_size=128)
    with pytest.raises(ValueError, match=r"a tensor: got the shape \(144, 128\); allowed: \(blocks, hidden, 128\)"):
        wgrad(a[0], b, sfa, sfb, offsets)
    with pytest.raises(ValueError, match=r"blocks = 5, with .*; allowed: \(blocks, hidden, 128\) .*, at least a block"):
        wgrad(a[:5], b[:5], sfa[:5], sfb[:5], offsets)
    with pytest.raises(ValueError, match="b tensor shape mismatch"):
        wgrad(a, b[:-1], sfa, sfb, offsets)
    with pytest.raises(ValueError, match="sfb tensor shape mismatch"):
        wgrad(a, b, sfa, sfa, offsets)
    with pytest.raises(ValueError, match=f"offsets: got .*; allowed: numbers .* from 0 to {3 * 128 + 127}"):
        wgrad(a, b, sfa, sfb, offsets + 128)
    x, e, one = torch.zeros(64, 128), torch.tensor([64], dtype=torch.int32), torch.ones(1)
    (x8, sfx), (w8, sfw) = block_quantized(x, 1, False), block_quantized(torch.ones(128, 128), 128, False)
    weights = {"b_tensor": w8.unsqueeze(2), "sfb_tensor": sfw.unsqueeze(2), "sf_vec_size": 128}
    dglu = functools.partial(cudnn.grouped_gemm_dglu_wrapper, x8, sfa_tensor=sfx.unsqueeze(2), padded_offsets=e)
    c = torch.zeros(64, 256).bfloat16()
    dglu = functools.partial(dglu, c_tensor=c, alpha_tensor=one, beta_tensor=one, prob_tensor=None, **weights)
    with pytest.raises(ValueError, match="d_blocks and sfd_blocks tensors: got one of them; allowed: both or none"):
        dglu(d_blocks_tensor=torch.zeros(1, 256, 128, dtype=E4M3))
    with pytest.raises(ValueError, match="d_blocks tensor shape mismatch"):
        dglu(d_blocks_tensor=torch.zeros(2, 256, 128, dtype=E4M3), sfd_blocks_tensor=torch.zeros(2, 256))
    with pytest.raises(ValueError, match="power_of_two_scales: got True; allowed: False, for results without"):
        dglu(power_of_two_scales=True)
