"""A mixture's feed-forward layer as Transformer Engine calls it, in MXFP8 and NVFP4: its arguments, views, buffers.

One call's results are the next one's operands. Each call is compared in float64 with what its own operands mean.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cudnn
from support import oracle
from support.oracle import BF16, E4M3, E8M0, F32, FP4
from support.pages import transformer_engine_calls
from support.selection import ARCHES, brief, within

ENDS = (256, 256, 768)
HIDDEN, FFN = 128, 128
TOKENS, EXPERTS = ENDS[-1], len(ENDS)
PLACES = [*brief(["reference", *ARCHES], 0), pytest.param("gpu", marks=pytest.mark.gpu)]


def place(where: str) -> Any:
    """A context in which tensors are on the GPU, kernels are emulated, or neither."""
    if where == "gpu":
        return torch.device("cuda")
    return within(where)


def owners() -> torch.Tensor:
    """The expert of each token."""
    return torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor([256, 0, 512]))


@dataclass
class Quantized:
    """Codes (rows, k) of one matrix or of each expert's, bytes of scale factors in memory order, values in float64."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor


def quantized(x: torch.Tensor) -> Quantized:
    """MXFP8 along the last dimension."""
    blocks = x.double().unflatten(-1, (-1, 32))
    bytes_ = oracle.e8m0_code_above(blocks.abs().amax(-1) / 448)
    factors = oracle.e8m0_values(bytes_)
    codes = (blocks / factors[..., None]).flatten(-2).to(E4M3)
    memory = oracle.memory_of(oracle.in_atoms(bytes_.reshape(-1, *bytes_.shape[-2:]).permute(1, 2, 0)))
    memory = memory.view(x.shape[0] if x.ndim == 3 else 1, -1)  # by expert
    return Quantized(codes, memory, codes.double() * factors.repeat_interleave(32, -1))


def by_columns(x: torch.Tensor) -> Quantized:
    """The tokens' MXFP8 along the tokens of each expert: codes (tokens, columns), scale factors expert by expert."""
    parts = [quantized(x[start:end].T) for start, end in zip((0, *ENDS[:-1]), ENDS, strict=True) if end > start]
    return Quantized(
        torch.cat([part.codes.T.contiguous() for part in parts]),
        torch.cat([part.scales.flatten() for part in parts]),
        torch.cat([part.values.T for part in parts]),
    )


def factors(memory: torch.Tensor, rows: int, k: int, experts: int = 1) -> torch.Tensor:
    """Bytes as they lie in memory, as the view that calls take."""
    return oracle.atoms_of(memory.view(E8M0), rows, k // 32, experts)


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows (tokens, columns) with the scale factors that a call returned."""
    bytes_ = oracle.from_atoms(scales, codes.shape[0], codes.shape[1] // 32)[..., 0]
    return codes.double() * oracle.e8m0_values(bytes_).repeat_interleave(32, 1)


def dequantized_columns(codes: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same by columns, expert by expert: ``codes`` (tokens, columns), scale factors in memory order."""
    actual, first, width = [], 0, codes.shape[1]
    for start, end in zip((0, *ENDS[:-1]), ENDS, strict=True):
        if end == start:
            continue
        size = (end - start) // 32 * width
        atoms = oracle.atoms_of(memory[first : first + size], width, (end - start) // 32)
        bytes_ = oracle.from_atoms(atoms, width, (end - start) // 32)[..., 0]
        actual.append(codes[start:end].double() * oracle.e8m0_values(bytes_).repeat_interleave(32, 1).T)
        first += size
    return torch.cat(actual)


def column(x: torch.Tensor) -> torch.Tensor:
    return x.view(TOKENS, 1, 1)


def tokens(x: Quantized, k: int) -> dict[str, torch.Tensor]:
    """The operand A and its scale factors."""
    a = x.codes.as_strided((TOKENS, k, 1), (k, 1, TOKENS * k))
    return {"a_tensor": a, "sfa_tensor": factors(x.scales, TOKENS, k)}


def weights(x: Quantized, rows: int, k: int, major: str, packed: bool) -> dict[str, Any]:
    """The operand B: one tensor of all experts, or addresses, of matrices that lie anywhere, in any order."""
    codes = x.codes if major == "k" else x.codes.transpose(1, 2).contiguous()  # (experts, k, rows)
    if packed:
        b = codes.permute(1, 2, 0) if major == "k" else codes.permute(2, 1, 0)
        return {"b_tensor": b, "sfb_tensor": factors(x.scales, rows, k, EXPERTS)}
    (b_ptrs, parts), (sfb_ptrs, scales) = map(oracle.addresses_of, (codes.permute(1, 2, 0), x.scales.T))
    kept.extend([*parts, *scales])
    return {"b_ptrs": b_ptrs, "sfb_ptrs": sfb_ptrs, "n": rows, "b_dtype": E4M3, "b_major": major}


kept: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _calls_are_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/transformer_engine.md has every call that is made here, with every keyword."""

    def call(function: Any, known: set[str], **arguments: Any) -> Any:
        assert {*arguments} <= known, f"not on the page: {function.__name__}: { ({*arguments} - known) }"
        return function(**arguments)

    for name, keywords in transformer_engine_calls().items():
        monkeypatch.setattr(cudnn, name, functools.partial(call, getattr(cudnn, name), keywords))


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Each token with its expert's weights (experts, n, k)."""
    actual = torch.empty(TOKENS, w.shape[1], dtype=torch.float64)
    for expert in range(EXPERTS):
        actual[expert == owners()] = x[expert == owners()] @ w[expert].T
    return actual


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float) -> None:
    """Within a share of the largest magnitude of 32 neighbours, which is what a block's factor is chosen by."""
    largest = torch.nn.functional.max_pool2d(expected.abs()[None, None], 63, 1, 31)[0, 0]
    assert bool(((actual - expected).abs() <= share * largest + 1e-12).all())


def swiglu(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates, others, and the sigmoid of gates: of every 64 columns the first 32 are gates."""
    pairs = c.unflatten(1, (-1, 2, 32))
    gate, up = pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)
    return gate, up, gate.sigmoid()


@pytest.mark.parametrize("packed", [True, False], ids=["one tensor", "addresses"])
@pytest.mark.parametrize("where", PLACES)
def test_forward_and_backward(where: str, packed: bool) -> None:
    with place(where):
        forward_and_backward(packed)
    kept.clear()


def forward_and_backward(packed: bool) -> None:
    offsets, ones = torch.tensor(ENDS, dtype=torch.int32), torch.ones(EXPERTS, dtype=BF16)
    common: dict[str, Any] = {
        "padded_offsets": offsets,
        "alpha_tensor": ones,
        "cd_major": "n",
        "sf_vec_size": 32,
        "use_dynamic_sched": True,
    }
    x, dy = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    w1, w2 = torch.randn(EXPERTS, 2 * FFN, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, FFN) / 8
    prob = torch.rand(TOKENS) + 0.5
    x_rows, x_columns, dy_rows, dy_columns = quantized(x), by_columns(x), quantized(dy), by_columns(dy)
    w1_rows, w1_columns = quantized(w1), quantized(w1.transpose(1, 2))
    w2_rows, w2_columns = quantized(w2), quantized(w2.transpose(1, 2))

    # FC1 and the activation.
    up = cudnn.grouped_gemm_glu_wrapper_sm100(
        **tokens(x_rows, HIDDEN),
        **weights(w1_rows, 2 * FFN, HIDDEN, "k", packed),
        **common,
        bias_tensor=None,
        prob_tensor=column(prob.to(BF16)),
        norm_const_tensor=torch.ones(1),
        acc_dtype=F32,
        c_dtype=BF16,
        d_dtype=E4M3,
        act_func="swiglu",
        discrete_col_sfd=True,
        current_stream=None,
    )
    c = up["c_tensor"].view(TOKENS, 2 * FFN)
    z = product(x_rows.values, w1_rows.values)
    oracle.assert_rounded(c, z, 1e-5)
    gate, other, s = swiglu(z)
    h = gate * s * other * prob.to(BF16).double()[:, None]
    h_rows = dequantized(up["d_tensor"].view(TOKENS, FFN), up["sfd_row_tensor"])
    memory = up["sfd_col_tensor"].permute(5, 2, 4, 0, 1, 3).reshape(-1)
    h_columns = dequantized_columns(up["d_col_tensor"].view(TOKENS, FFN), memory.view(torch.uint8))
    assert up["sfd_row_tensor"].permute(5, 2, 4, 0, 1, 3).is_contiguous()
    for actual in (h_rows, h_columns):
        assert_near(actual, h, 2**-4)

    # FC2, into the caller's buffer.
    y = torch.full((TOKENS, HIDDEN), torch.nan, dtype=BF16)
    cudnn.grouped_gemm_quant_wrapper_sm100(
        a_tensor=up["d_tensor"],
        sfa_tensor=up["sfd_row_tensor"],
        **weights(w2_rows, HIDDEN, FFN, "k", packed),
        **common,
        bias_tensor=None,
        norm_const_tensor=None,
        prob_tensor=None,
        acc_dtype=F32,
        d_dtype=BF16,
        d_tensor=y.as_strided((TOKENS, HIDDEN, 1), (HIDDEN, 1, TOKENS * HIDDEN)),
        current_stream=None,
    )
    oracle.assert_rounded(y, product(h_rows, w2_rows.values), 1e-5)

    # FC2's gradient and the activation's.
    dprob = torch.zeros(TOKENS)
    down = cudnn.grouped_gemm_dglu_wrapper_sm100(
        **tokens(dy_rows, HIDDEN),
        **weights(w2_columns, FFN, HIDDEN, "n", packed),
        **common,
        c_tensor=up["c_tensor"],
        beta_tensor=ones,
        prob_tensor=column(prob),
        dprob_tensor=column(dprob),
        generate_dbias=True,
        norm_const_tensor=torch.ones(1),
        d_dtype=E4M3,
        act_func="dswiglu",
        discrete_col_sfd=True,
        current_stream=None,
    )
    dh = product(dy_rows.values, w2_columns.values)
    gate, other, s = swiglu(c.double())
    weighted = dh * prob.double()[:, None]
    parts = [weighted * other * s * (1 + gate * (1 - s)), weighted * gate * s]
    dz = torch.stack([each.unflatten(1, (-1, 32)) for each in parts], 2).flatten(1)
    dz_rows = dequantized(down["d_row_tensor"].view(TOKENS, 2 * FFN), down["sfd_row_tensor"])
    memory = down["sfd_col_tensor"].permute(5, 2, 4, 0, 1, 3).view(-1).view(torch.uint8)
    dz_columns = dequantized_columns(down["d_col_tensor"].view(TOKENS, 2 * FFN), memory)
    for actual in (dz_rows, dz_columns):
        assert_near(actual, dz, 2**-4)
    assert down["dprob_tensor"].data_ptr() == dprob.data_ptr()
    torch.testing.assert_close(dprob.double(), (dh * gate * s * other).sum(1), rtol=1e-4, atol=1e-3)
    dbias = torch.zeros(EXPERTS, 2 * FFN, dtype=torch.float64).index_add_(0, owners(), dz)
    assert down["dbias_tensor"].squeeze(-1).shape == dbias.shape
    oracle.assert_rounded(down["dbias_tensor"].squeeze(-1), dbias, 1e-4)

    # FC1's gradient.
    dx = torch.full((TOKENS, HIDDEN), torch.nan, dtype=BF16)
    cudnn.grouped_gemm_quant_wrapper_sm100(
        a_tensor=down["d_row_tensor"],
        sfa_tensor=down["sfd_row_tensor"],
        **weights(w1_columns, HIDDEN, 2 * FFN, "n", packed),
        **common,
        norm_const_tensor=None,
        prob_tensor=None,
        acc_dtype=F32,
        d_dtype=BF16,
        discrete_col_sfd=True,
        d_tensor=dx.as_strided((TOKENS, HIDDEN, 1), (HIDDEN, 1, TOKENS * HIDDEN)),
        current_stream=None,
    )
    oracle.assert_rounded(dx, product(dz_rows, w1_columns.values), 1e-5)

    # Both gradients of weights, added to what was there.
    for left, left_values, right, right_values, rows, columns in (
        (dy_columns, dy_columns.values, up, h_columns, HIDDEN, FFN),
        (down, dz_columns, x_columns, x_columns.values, 2 * FFN, HIDDEN),
    ):
        codes, scales = zip(*(of_tokens(each) for each in (left, right)), strict=True)
        gradient = torch.randn(EXPERTS, rows, columns)
        expected = gradient.double()
        for expert in range(EXPERTS):
            own = expert == owners()
            expected[expert] += left_values[own].T @ right_values[own]
        output: dict[str, Any] = {"output_mode": "dense", "wgrad_tensor": gradient}
        if not packed:
            addresses = torch.tensor([each.data_ptr() for each in gradient])
            output = {"output_mode": "discrete", "wgrad_ptrs": addresses}
        cudnn.grouped_gemm_wgrad_wrapper_sm100(
            a_tensor=codes[0].view(TOKENS, rows).T,
            b_tensor=codes[1].view(TOKENS, columns),
            sfa_tensor=scales[0].view(E8M0).view(rows, -1),
            sfb_tensor=scales[1].view(E8M0).view(columns, -1),
            offsets_tensor=offsets,
            acc_dtype=F32,
            sf_vec_size=32,
            accumulate_on_output=True,
            wgrad_dtype=F32,
            current_stream=None,
            **output,
        )
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-3)


def of_tokens(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Column-wise codes and bytes of scale factors: a call's results, or the client's."""
    if isinstance(x, Quantized):
        return x.codes, x.scales
    return x["d_col_tensor"], x["sfd_col_tensor"].permute(5, 2, 4, 0, 1, 3).reshape(-1)


def test_one_expert_whose_offsets_are_a_view() -> None:
    """A shared expert: what the offsets say is not read, and there is no probability."""
    x, w = quantized(torch.randn(TOKENS, HIDDEN)), quantized(torch.randn(1, 2 * FFN, HIDDEN) / 8)
    up = cudnn.grouped_gemm_glu_wrapper_sm100(
        **tokens(x, HIDDEN),
        b_tensor=w.codes.permute(1, 2, 0),
        sfb_tensor=factors(w.scales, 2 * FFN, HIDDEN),
        padded_offsets=torch.tensor([1 << 40]).view(torch.int32)[:1],
        alpha_tensor=torch.ones(1, dtype=BF16),
        bias_tensor=None,
        prob_tensor=None,
        norm_const_tensor=torch.ones(1),
        acc_dtype=F32,
        c_dtype=BF16,
        d_dtype=E4M3,
        cd_major="n",
        sf_vec_size=32,
        use_dynamic_sched=True,
        discrete_col_sfd=True,
        act_func="geglu",
        linear_offset=1.0,
        geglu_alpha=1.702,
        glu_clamp_max=7.0,
        glu_clamp_min=-7.0,
        use_single_group_runtime_offsets=True,
        current_stream=0,
    )
    oracle.assert_rounded(up["c_tensor"][..., 0], x.values @ w.values[0].T, 1e-5)


# NVFP4, with pointer arrays of weights: FC2 and the weight gradients are other GEMMs of the client's.


def in_float4(rows: int, k: int, experts: int = 1) -> tuple[oracle.Operand, dict[str, Any]]:
    """An operand, and the arguments of weights that lie anywhere."""
    x = oracle.scaled(rows, k, experts, FP4, E4M3, 16)
    (b_ptrs, matrices), (sfb_ptrs, scales) = (oracle.addresses_of(t) for t in (x.tensor, x.scales))
    kept.extend([*matrices, *scales])
    return x, {"b_ptrs": b_ptrs, "sfb_ptrs": sfb_ptrs, "n": rows, "b_dtype": FP4, "b_major": "k"}


@pytest.mark.parametrize("act_func", ["swiglu", "srelu"])
@pytest.mark.parametrize("where", PLACES)
def test_nvfp4(where: str, act_func: str) -> None:
    with place(where):
        forward_and_backward_of_nvfp4(act_func)
    kept.clear()


def forward_and_backward_of_nvfp4(act_func: str) -> None:
    gated = act_func == "swiglu"
    offsets, alpha = torch.tensor(ENDS, dtype=torch.int32), torch.rand(EXPERTS) / 64 + 0.01
    common: dict[str, Any] = {"padded_offsets": offsets, "cd_major": "n", "sf_vec_size": 16, "use_dynamic_sched": True}
    prob = torch.rand(TOKENS) + 0.5
    of_token = alpha.double()[owners(), None]

    # FC1, the activation, and the largest magnitudes for the quantiser of its result.
    x, _ = in_float4(TOKENS, HIDDEN)
    w1, weights1 = in_float4(FFN * (1 + gated), HIDDEN, EXPERTS)
    up = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(
        a_tensor=x.tensor,
        sfa_tensor=x.scales,
        **weights1,
        **common,
        alpha_tensor=alpha,
        bias_tensor=None,
        prob_tensor=column(prob),
        acc_dtype=F32,
        c_dtype=BF16,
        d_dtype=BF16,
        act_func=act_func,
        use_tmem_post_rht_amax=False,
        current_stream=None,
    )
    z = of_token * product(x.values[..., 0], w1.values.permute(2, 0, 1))
    oracle.assert_rounded(up["c_tensor"][..., 0], z, 1e-5)
    gate, other, s = swiglu(z) if gated else (z, z, torch.ones(()))
    h = (gate * s * other if gated else z.clamp(min=0) ** 2) * prob.double()[:, None]
    d = up["d_tensor"].view(TOKENS, FFN)
    oracle.assert_rounded(d, h, 1e-4)
    rotated = (oracle.signs_of(16) @ d.float().unflatten(0, (-1, 16)) / 4).abs()
    for expert, (first, last) in enumerate(zip((0, *ENDS[:-1]), ENDS, strict=True)):
        own = rotated[first // 16 : last // 16]
        expected = own.max() if last > first else torch.zeros(())
        torch.testing.assert_close(up["post_rht_amax_tensor"].view(-1)[expert], expected, rtol=1e-5, atol=0)
        expected = h[first:last].abs().max().float() if last > first else torch.zeros(())
        torch.testing.assert_close(up["amax_tensor"].view(-1)[expert], expected, rtol=1e-4, atol=0)

    # FC2's gradient and the activation's.
    dy, _ = in_float4(TOKENS, HIDDEN)
    w2, weights2 = in_float4(FFN, HIDDEN, EXPERTS)
    dprob = torch.zeros(TOKENS)
    arguments = {
        "a_tensor": dy.tensor,
        "sfa_tensor": dy.scales,
        "c_tensor": up["c_tensor"],
        **weights2,
        **common,
        "alpha_tensor": alpha,
        "prob_tensor": column(prob),
        "dprob_tensor": column(dprob),
        "generate_dbias": True,
        "norm_const_tensor": None,
        "d_dtype": BF16,
        "discrete_col_sfd": False,
        "current_stream": None,
    }
    g = of_token * product(dy.values[..., 0], w2.values.permute(2, 0, 1))
    c, weight = up["c_tensor"][..., 0].double(), prob.double()[:, None]
    if gated:
        down = cudnn.grouped_gemm_dglu_wrapper_sm100(**arguments, beta_tensor=torch.ones(EXPERTS), act_func="dswiglu")
        gate, other, s = swiglu(c)
        g = g * of_token  # which is squared: the client passes the root
        parts = [g * weight * other * s * (1 + gate * (1 - s)), g * weight * gate * s]
        dz = torch.stack([each.unflatten(1, (-1, 32)) for each in parts], 2).flatten(1)
        y = gate * s * other
    else:
        down = cudnn.grouped_gemm_dsrelu_wrapper_sm100(**arguments, use_dsrelu_reuse=True)
        dz, y = 2 * g * c.clamp(min=0) * weight, c.clamp(min=0) ** 2
        oracle.assert_rounded(down.get("d_srelu_tensor").view(TOKENS, FFN), y * weight, 1e-5)
        assert down.get("sfd_col_d_srelu_tensor") is None
    oracle.assert_rounded(down["d_row_tensor"].view(TOKENS, -1), dz, 1e-4)
    assert down["dprob_tensor"].data_ptr() == dprob.data_ptr()
    oracle.assert_rounded(dprob, (g * y).sum(1), 1e-5)
    dbias = torch.zeros(EXPERTS, dz.shape[1], dtype=torch.float64).index_add_(0, owners(), dz)
    oracle.assert_rounded(down["dbias_tensor"].squeeze(-1), dbias, 1e-3)
