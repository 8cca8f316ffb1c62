"""The calls that a layer of experts makes in training, argument by argument, as Transformer Engine makes them: MXFP8,
two layers forward and backward, each expert's weights behind addresses or in one tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.gemm import dequantize, quantize_rows

E4M3, E8M0, BF16, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32
EXPERTS, HIDDEN, INNER = 2, 128, 64
ENDS = [256, 768]
M = ENDS[-1]
Parts = list[tuple[int, int, int]]


def parts() -> Parts:
    return [(expert, start, end) for expert, (start, end) in enumerate(zip([0, *ENDS[:-1]], ENDS, strict=True))]


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, k, 1), its factors, its values."""
    data, scales = quantize_rows(x.unsqueeze(-1), E4M3, E8M0, 32)
    return data, scales, dequantize(data, scales, 32)[..., 0]


def by_expert(weights: list[torch.Tensor], packed: bool, major: str) -> tuple[dict[str, Any], Any, Any]:
    """Arguments for weights (n, k) of each expert; their values; what addresses lead to."""
    made = [quantised(w) for w in weights]
    n, k = weights[0].shape
    data = [d if major == "k" else d.view(torch.uint8)[..., 0].T.contiguous().view(E4M3) for d, _, _ in made]
    values = torch.stack([v for _, _, v in made])
    factors = [s.permute(5, 2, 4, 0, 1, 3).contiguous() for _, s, _ in made]
    if packed:
        together = torch.stack([d.view(torch.uint8).reshape(-1) for d in data]).view(E4M3)
        b = together.view(-1, n, k).permute(1, 2, 0) if major == "k" else together.view(-1, k, n).permute(2, 1, 0)
        sfb = torch.cat([f.view(torch.uint8) for f in factors]).view(E8M0).permute(3, 4, 1, 5, 2, 0)
        return {"b_tensor": b, "sfb_tensor": sfb}, values, None
    ptrs = {"b_ptrs": data, "sfb_ptrs": factors}
    given = {name: torch.tensor([x.data_ptr() for x in tensors]) for name, tensors in ptrs.items()}
    return {**given, "n": n, "b_dtype": E4M3, "b_major": major}, values, ptrs


def product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[start:end] @ weights[expert].T for expert, start, end in parts()])


@pytest.mark.parametrize("packed", [True, False], ids=["tensor", "addresses"])
def test_two_layers_of_experts(packed: bool) -> None:
    offsets, ones = torch.tensor(ENDS, dtype=torch.int32), torch.ones(EXPERTS, dtype=BF16)
    norm, common = torch.ones(1), {"acc_dtype": F32, "cd_major": "n", "sf_vec_size": 32, "use_dynamic_sched": True}
    x, sfx, x_values = quantised(torch.randn(M, HIDDEN))
    first, w1, kept1 = by_expert([torch.randn(2 * INNER, HIDDEN) / 8 for _ in range(EXPERTS)], packed, "k")
    prob = torch.rand(M, 1, 1).to(BF16)

    fc1 = cudnn.grouped_gemm_glu_wrapper_sm100(
        a_tensor=x, sfa_tensor=sfx, padded_offsets=offsets, alpha_tensor=ones, bias_tensor=None, prob_tensor=prob,
        norm_const_tensor=norm, c_dtype=BF16, d_dtype=E4M3, discrete_col_sfd=True, act_func="swiglu",
        use_single_group_runtime_offsets=False, current_stream=0, **common, **first,
    )  # fmt: skip
    c = product(x_values, w1)
    torch.testing.assert_close(fc1["c_tensor"].view(M, 2 * INNER).float(), c, rtol=0.01, atol=0.01)
    gate, up = c.unflatten(1, (-1, 2, 32)).unbind(2)
    y = (up * gate * torch.sigmoid(gate)).flatten(1) * prob[:, 0].float()
    y_values = dequantize(fc1["d_tensor"], fc1["sfd_row_tensor"], 32)[..., 0]
    torch.testing.assert_close(y_values, y, rtol=0.1, atol=0.02)
    assert fc1["d_col_tensor"].view(M, INNER).dtype == E4M3
    assert fc1["sfd_row_tensor"].permute(5, 2, 4, 0, 1, 3).is_contiguous()

    out = torch.empty(M * HIDDEN, dtype=BF16).as_strided((M, HIDDEN, 1), (HIDDEN, 1, M * HIDDEN))
    second, w2, kept2 = by_expert([torch.randn(HIDDEN, INNER) / 8 for _ in range(EXPERTS)], packed, "k")
    cudnn.grouped_gemm_quant_wrapper_sm100(
        a_tensor=fc1["d_tensor"], sfa_tensor=fc1["sfd_row_tensor"], padded_offsets=offsets, alpha_tensor=ones,
        bias_tensor=None, norm_const_tensor=None, prob_tensor=None, d_dtype=BF16, d_tensor=out, current_stream=0,
        use_single_group_runtime_offsets=False, **common, **second,
    )  # fmt: skip
    torch.testing.assert_close(out[..., 0].float(), product(y_values, w2), rtol=0.01, atol=0.01)

    dy, sfdy, dy_values = quantised(torch.randn(M, HIDDEN))
    back, w2t, kept3 = by_expert([w.T.contiguous() for w in w2], packed, "n")
    dprob = torch.zeros(M, 1, 1)
    backward = cudnn.grouped_gemm_dglu_wrapper_sm100(
        a_tensor=dy, sfa_tensor=sfdy, c_tensor=fc1["c_tensor"], padded_offsets=offsets, alpha_tensor=ones,
        beta_tensor=ones, prob_tensor=prob.float(), dprob_tensor=dprob, generate_dbias=False, norm_const_tensor=norm,
        d_dtype=E4M3, cd_major="n", sf_vec_size=32, discrete_col_sfd=True, use_dynamic_sched=True,
        use_single_group_runtime_offsets=False, act_func="dswiglu", current_stream=0, **back,
    )  # fmt: skip
    saved = fc1["c_tensor"][..., 0].float().requires_grad_()
    gate, up = saved.unflatten(1, (-1, 2, 32)).unbind(2)
    plain = (up * gate * torch.sigmoid(gate)).flatten(1)
    g = product(dy_values, w2t)
    (expected,) = torch.autograd.grad(plain, saved, g * prob[:, 0].float())
    d_values = dequantize(backward["d_row_tensor"], backward["sfd_row_tensor"], 32)[..., 0]
    torch.testing.assert_close(d_values, expected, rtol=0.1, atol=0.02 * float(expected.abs().max()))
    assert backward["dprob_tensor"] is dprob
    torch.testing.assert_close(dprob[:, 0], (g * plain.detach()).sum(1, keepdim=True), rtol=0.01, atol=0.05)
    backward["sfd_col_tensor"].permute(5, 2, 4, 0, 1, 3).view(-1)
    assert backward.get("dbias_tensor") is None

    # The gradients of the first layer's weights, from what the calls above quantised by columns.
    rows = backward["d_col_tensor"].view(M, 2 * INNER)
    scales = backward["sfd_col_tensor"].permute(5, 2, 4, 0, 1, 3).reshape(-1).view(2 * INNER, -1)
    columns, sfc, c_values = quantised(torch.cat([x_values[start:end].T for _, start, end in parts()], 1))
    memory = torch.cat([quantised(x_values[start:end].T)[1].permute(5, 2, 4, 0, 1, 3).reshape(-1).view(torch.uint8)
                        for _, start, end in parts()])  # fmt: skip
    wgrad = torch.ones(EXPERTS, 2 * INNER, HIDDEN)
    cudnn.grouped_gemm_wgrad_wrapper_sm100(
        a_tensor=rows.T, b_tensor=columns[..., 0].view(torch.uint8).T.contiguous().view(E4M3), sfa_tensor=scales,
        sfb_tensor=memory.view(E8M0).view(HIDDEN, -1), offsets_tensor=offsets, acc_dtype=F32, sf_vec_size=32,
        accumulate_on_output=True, output_mode="dense", wgrad_tensor=wgrad, wgrad_dtype=F32, current_stream=0,
    )  # fmt: skip
    for expert, start, end in parts():
        exact = 1 + expected[start:end].T @ c_values[:, start:end].T
        torch.testing.assert_close(wgrad[expert], exact, rtol=0.1, atol=0.03 * float(exact.abs().max()))
    del kept1, kept2, kept3, sfc


def test_one_expert_whose_offsets_are_a_view() -> None:
    """A shared expert: the length that the offsets say is not read, there is no probability."""
    x, sfx, values = quantised(torch.randn(256, HIDDEN))
    given, w, _ = by_expert([torch.randn(2 * INNER, HIDDEN) / 8], True, "k")
    offsets = torch.tensor([1 << 40]).view(torch.int32)[:1]
    fc1 = cudnn.grouped_gemm_glu_wrapper_sm100(
        a_tensor=x, sfa_tensor=sfx, padded_offsets=offsets, alpha_tensor=torch.ones(1, dtype=BF16), prob_tensor=None,
        bias_tensor=None, norm_const_tensor=torch.ones(1), acc_dtype=F32, c_dtype=BF16, d_dtype=E4M3, cd_major="n",
        sf_vec_size=32, use_dynamic_sched=True, discrete_col_sfd=True, act_func="geglu", linear_offset=1.0,
        geglu_alpha=1.702, glu_clamp_max=7.0, glu_clamp_min=-7.0, use_single_group_runtime_offsets=True,
        current_stream=0, **given,
    )  # fmt: skip
    torch.testing.assert_close(fc1["c_tensor"][..., 0].float(), values @ w[0].T, rtol=0.01, atol=0.01)
