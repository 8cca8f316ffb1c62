"""Attention on MXFP8 tensors: the formula, what it refuses, and plans for a B200."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from support.dense_attention import attend, band
from support.graphs import BFLOAT16, FLOAT, configurations, like, packed, planned_graph, reference_graph, run
from support.oracle import in_atoms, memory_of

E4M3, E8M0 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FP8_E8M0
TILED = cudnn.tensor_reordering.F8_128x4
B, H, S, D = 2, 4, 128, 128


def describe(graph: cudnn.pygraph, heads: int = 2, scale: dict[str, Any] | None = None, **options: Any) -> Any:
    """Tensors by name, with O, Stats and Amax_O."""
    shapes = {"q": [B, H, S, D], "k": [B, heads, S, D], "v": [B, heads, S, D]}
    shapes |= {"descale_q": [B, H, S, D // 32], "descale_k": [B, heads, S, D // 32]}
    shapes |= {"descale_v": [B, heads, S // 32, D]}
    tensors: dict[str, Any] = {}
    for name, dims in shapes.items():
        layout: dict[str, Any] = (
            {"data_type": E8M0, "reordering_type": TILED} if name.startswith("descale") else {"data_type": E4M3}
        )
        if name == "descale_k":
            layout |= scale or {}
            dims = layout.pop("dim", dims)
        tensors[name] = graph.tensor(dim=dims, stride=packed(*dims), **layout)
    results: list[Any] = graph.sdpa_mxfp8(
        **tensors, attn_scale=0.09, generate_stats=True, use_causal_mask=True, name="attention", **options
    )
    o, stats, amax = results
    o.set_output(True).set_dim([B, H, S, D]).set_stride([H * S * D, D, H * D, 1]).set_data_type(BFLOAT16)
    stats.set_output(True)
    amax.set_output(True)
    return tensors | {"O": o, "Stats": stats, "Amax_O": amax}


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Scales ``[b, h, rows, columns]`` in tiles of 128 x 4."""
    return memory_of(in_atoms(scales.flatten(0, 1).permute(1, 2, 0)))


def test_reference_agrees_with_pytorch() -> None:
    graph = reference_graph(E4M3, FLOAT, FLOAT)
    tensors = describe(graph)
    data: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name in "qkv":
        dims = tensors[name].get_dim()
        data[name] = torch.randn(dims).to(torch.float8_e4m3fn)
        exponents = torch.randint(125, 129, tensors[f"descale_{name}"].get_dim(), dtype=torch.uint8)
        # A padded tile is written where the extents are no multiples of 128 and 4.
        data[f"descale_{name}"] = tiled(exponents).view(torch.float8_e8m0fnu)
        factors = torch.exp2(exponents.double() - 127).repeat_interleave(32, 2 if name == "v" else 3)
        exact[name] = data[name].double() * factors
    graph.build([cudnn.heur_mode.A])
    found = {
        "O": torch.empty(B, S, H, D, dtype=torch.bfloat16).transpose(1, 2),
        "Stats": torch.empty(B, H, S, 1),
        "Amax_O": torch.empty(1, 1, 1, 1),
    }
    graph.execute({tensors[name]: value for name, value in (data | found).items()}, None)
    o, stats, *_ = attend(exact["q"], exact["k"], exact["v"], band(S, S, right=0), scale=0.09)
    torch.testing.assert_close(found["O"].double(), o, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(found["Stats"].double(), stats.unsqueeze(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["Amax_O"].double().item(), o.abs().max().item(), atol=1e-4, rtol=1e-4)


def test_gradients_agree_with_float64() -> None:
    """Each operand rounded along the dimension that a product sums over, and grouped heads, padding, a sink."""
    graph, heads, scale = reference_graph(E4M3, FLOAT, FLOAT), {"q": H, "k": 2, "v": 2, "dO": H}, 0.09
    tensors: dict[str, Any] = {}
    data: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name in ("q", "q_T", "k", "k_T", "v", "dO", "dO_T"):
        dims = [B, heads[name.removesuffix("_T")], S, D]
        axis = 2 if name.endswith("_T") else 3
        scales = [*dims]
        scales[axis] //= 32
        data[name] = torch.randn(dims).to(torch.float8_e4m3fn)
        exponents = torch.randint(125, 129, scales, dtype=torch.uint8)
        data[f"descale_{name}"] = tiled(exponents).view(torch.float8_e8m0fnu)
        exact[name] = data[name].double() * torch.exp2(exponents.double() - 127).repeat_interleave(32, axis)
        tensors[name] = graph.tensor(dims, packed(*dims), E4M3, name=name)
        tensors[f"descale_{name}"] = graph.tensor(scales, packed(*scales), E8M0, reordering_type=TILED)
    lengths, sink = torch.tensor([100, 128]), torch.randn(1, H, 1, 1)
    data |= {"seq_len_q": lengths.int().view(B, 1, 1, 1), "seq_len_kv": lengths.int().view(B, 1, 1, 1)}
    data |= {name: torch.randn(B, H, S, D).bfloat16() for name in ("o_f16", "dO_f16")} | {"sink_token": sink}
    rows = torch.arange(S) < lengths.view(B, 1, 1)
    seen = (rows.unsqueeze(-1) & rows.unsqueeze(-2)).logical_and(band(S, S, right=0))
    scores = torch.einsum("bhqd,bhkd->bhqk", exact["q"], exact["k"].repeat_interleave(2, 1)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    data["stats"] = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink.double()).float()
    for name in ("seq_len_q", "seq_len_kv", "o_f16", "dO_f16", "sink_token", "stats"):
        tensors[name] = like(graph, data[name], name)
    d_sink = graph.tensor([1, H, 1, 1], [H, 1, 1, 1], FLOAT)
    results = graph.sdpa_mxfp8_backward(
        **tensors, attn_scale=scale, use_causal_mask=True, use_padding_mask=True, dSink_token=d_sink
    )
    for tensor in results:
        tensor.set_output(True).set_data_type(FLOAT)
    d_q, d_k, d_v, *amax, by_sink = run(graph, {tensors[name]: x for name, x in data.items()}, *results, d_sink)

    wide = {
        name: x.double().masked_fill(~rows.unsqueeze(-1), 0)
        for name, x in (data | exact).items()
        if x.ndim == 4 and x.shape[2:] == (S, D)
    }
    p = (scores - data["stats"].double()).exp().masked_fill(~seen, 0)
    inner = (wide["o_f16"] * wide["dO_f16"]).sum(-1, keepdim=True)
    d_s = scale * p * (wide["dO"] @ wide["v"].repeat_interleave(2, 1).mT - inner)
    for found, right in (
        (d_q, d_s @ wide["k_T"].repeat_interleave(2, 1)),
        (d_k, (d_s.mT @ wide["q_T"]).unflatten(1, (2, 2)).sum(2)),
        (d_v, (p.mT @ wide["dO_T"]).unflatten(1, (2, 2)).sum(2)),
        (by_sink, -((sink - data["stats"].double()).exp() * inner * rows.unsqueeze(-1)).sum((0, 2, 3), keepdim=True)),
    ):
        torch.testing.assert_close(found.double(), right, atol=1e-3, rtol=1e-3)
    assert [x.item() for x in amax] == [x.abs().max().item() for x in (d_q, d_k, d_v)]


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        ({"data_type": E4M3}, "descale_k .* got FP8_E4M3; allowed: FP8_E8M0"),
        ({"reordering_type": cudnn.tensor_reordering.NONE}, "descale_k .* got reordering NONE; allowed: F8_128x4"),
        ({"dim": [B, 2, S, 2]}, r"descale_k .* got dim=\[2, 2, 128, 2\]; allowed: dim=\[2, 2, 128, 4\]"),
    ],
)
def test_refuses_scales(scale: dict[str, Any], text: str) -> None:
    graph = reference_graph(E4M3, FLOAT, FLOAT)
    describe(graph, scale=scale)
    with pytest.raises(ValueError, match=text):
        graph.validate()


def test_plans_for_blackwell(b200: Any, libcudnn: Any) -> None:
    graph = planned_graph(b200, E4M3)
    describe(graph)
    if libcudnn.version < 92100:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"MXFP8 tensors: got cuDNN .*9\.21 or newer"):
            graph.validate()
    else:
        assert configurations(graph) > 0
        graph.build_plans()
        # K and its scales are read transposed, and follow a shape that a call overrides.
        assert [alias.axes for alias in graph._cudnn().bindings.aliases.values()] == [[0, 1, 3, 2]] * 2


def test_the_backward_pass_is_refused_on_gpus(b200: Any) -> None:
    graph = planned_graph(b200, E4M3)
    tensor, scale = (
        graph.tensor([1, 1, 128, n], [128 * n, 128 * n, n, 1], dtype) for n, dtype in ((128, E4M3), (4, E8M0))
    )
    stats = graph.tensor([1, 1, 128, 1], [128, 128, 1, 1], FLOAT)
    graph.sdpa_mxfp8_backward(*[tensor] * 9, stats, *[scale] * 7)[0].set_output(True)
    with pytest.raises(
        cudnn.cudnnGraphNotSupportedError, match="backward pass on MXFP8 tensors: got compute capability"
    ):
        graph.validate()


def test_refuses_hopper(h200: Any) -> None:
    graph = planned_graph(h200, E4M3)
    describe(graph)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"MXFP8 tensors: got (cuDNN|compute capability 90)"):
        graph.validate()
