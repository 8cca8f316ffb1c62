"""The grouped GEMMs of fp8 training (float32 scales for 128 elements) against the recipe in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cudnn
from cudnn.gemm import dequantize_token_blocks, quantize_rows, quantize_token_blocks, token_block_count
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


CASES = [(False, "bfloat16"), (True, "float32"), (True, "main_grad"), (False, "addresses")]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("exact", "results"), CASES)
def test_weight_gradients(where: str, exact: bool, results: str) -> None:
    """Repeats are bit-identical. Exact sums are exact, others as accurate as the tensor cores' sums of e4m3 products."""
    m, n, device = 144, 272, "cuda" if where == "gpu" else "cpu"
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
    """(m, k) in e4m3 with a scale factor for ``rows`` x 128 elements, and the scale factors, as canonical (.., .., 1)."""
    elements, scales = quantize_rows(x.unsqueeze(2), torch.float8_e4m3fn, torch.float32, 128, 1.0, rows, power_of_two)
    return elements[..., 0], scales[..., 0].contiguous()


def values_of(x: torch.Tensor, scales: torch.Tensor, rows: int = 1) -> torch.Tensor:
    """The values of quantized rows, float64."""
    return x.double() * scales.double().repeat_interleave(rows, 0)[: len(x)].repeat_interleave(128, 1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("gathered", "power_of_two"), [(True, False), (False, True)])
def test_dglu(where: str, gathered: bool, power_of_two: bool) -> None:
    """All results, against the recipe in float64 on the same quantized operands."""
    n, k, ends, device = 192, 256, ENDS, "cuda" if where == "gpu" else "cpu"
    m, experts = ends[-1], len(ends)
    generator = torch.Generator(device).manual_seed(5)
    random = functools.partial(torch.randn, generator=generator, device=device)
    rows = 64 if gathered else m
    # Small integers and scales that are powers of two: the product is exact.
    a, sfa = block_quantized(random(rows, k).round().clamp(-3, 3), 1, True)
    index = torch.randint(0, rows, (m,), generator=generator, device=device, dtype=torch.int32) if gathered else None
    weights = [block_quantized(random(n, k).round().clamp(-3, 3) / 16, 128, True) for _ in range(experts)]
    b, sfb = (torch.stack(x).permute(1, 2, 0) for x in zip(*weights, strict=True))
    c, prob = random(m, 2 * n).bfloat16(), torch.rand(m, 1, 1, device=device)
    c, sfc = (c, None) if gathered else block_quantized(c, 1, power_of_two)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    blocks, e4m3 = token_block_count(m, experts), torch.float8_e4m3fn
    runs = []
    for _ in range(2 if where == "gpu" else 1):
        results = {
            "dprob_tensor": torch.zeros(m, 1, 1, device=device),
            "d_blocks_tensor": torch.zeros(blocks, 2 * n, 128, device=device, dtype=e4m3),
            "sfd_blocks_tensor": torch.zeros(blocks, 2 * n, device=device),
            "activation_blocks_tensor": torch.zeros(blocks, n, 128, device=device, dtype=e4m3),
            "sfactivation_blocks_tensor": torch.zeros(blocks, n, device=device),
        }
        with within(where):
            returned = cudnn.grouped_gemm_dglu_wrapper(
                a, c, sfa.unsqueeze(2), offsets, torch.ones(experts, device=device), torch.ones(experts, device=device), prob,
                b_tensor=b, sfb_tensor=sfb, sf_vec_size=128, d_dtype=e4m3, generate_dbias=True, deterministic=True,
                a_index=index, sfc_tensor=None if sfc is None else sfc.unsqueeze(2), power_of_two_scales=power_of_two, **results,
            )  # fmt: skip
        runs.append({**returned, **results})
    for name, x in runs[0].items():
        assert x is None or all(torch.equal(x.contiguous().view(torch.uint8), run[name].contiguous().view(torch.uint8)) for run in runs)
    r = runs[0]
    x_values = values_of(a, sfa) if index is None else values_of(a, sfa)[index.long()]
    product = torch.cat(
        [
            x_values[start:end] @ values_of(*weights[e], 128).T
            for e, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True))
        ]
    )
    preact = c.double() if sfc is None else values_of(c, sfc)
    gate, up = preact.unflatten(1, (-1, 2, 32)).unbind(2)
    sigmoid = gate.sigmoid()
    y = (gate * sigmoid * up).flatten(1)
    dy = product.unflatten(1, (-1, 32))
    d = torch.stack([dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid], 2).flatten(1)
    d, activation = d * prob[:, :, 0], y * prob[:, :, 0]
    torch.testing.assert_close(r["dprob_tensor"][:, 0, 0].double(), (product * y).sum(1), rtol=1e-3, atol=0.02)
    row = values_of(r["d_row_tensor"], r["sfd_row_tensor"][:, :, 0])
    for name, actual, expected, scales in (
        ("rows", row, d, r["sfd_row_tensor"][:, :, 0]),
        ("d", dequantize_token_blocks(r["d_blocks_tensor"], r["sfd_blocks_tensor"], offsets), d, r["sfd_blocks_tensor"]),
        (
            "activation",
            dequantize_token_blocks(r["activation_blocks_tensor"], r["sfactivation_blocks_tensor"], offsets),
            activation,
            r["sfactivation_blocks_tensor"],
        ),
    ):
        assert (actual - expected).norm() <= 0.03 * expected.norm(), name
        elements, exact_scales = quantized_again(name, expected.float(), offsets, power_of_two)
        torch.testing.assert_close(scales, exact_scales, rtol=0.0 if power_of_two else 1e-5, atol=0.0)
        actual_elements = r[{"rows": "d_row_tensor"}.get(name, f"{name}_blocks_tensor")]
        steps = actual_elements.view(torch.uint8).reshape(elements.shape).int() - elements.view(torch.uint8).int()
        assert (steps != 0).float().mean() < 2e-3, name  # values between two elements, which float32 rounds otherwise


def quantized_again(name: str, x: torch.Tensor, offsets: torch.Tensor, power_of_two: bool) -> tuple[Any, Any]:
    """The quantized form of exact values; unused blocks are zeros."""
    if name == "rows":
        return block_quantized(x, 1, power_of_two)
    return quantize_token_blocks(x, offsets, power_of_two=power_of_two)
