"""The grouped GEMMs of fp8 training (float32 scales for 128 elements) against the recipe in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.gemm import dequantize_token_blocks, quantize_token_blocks
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
