"""What attention refuses: the class of each error, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

import cudnn
from cudnn.pygraph import attention_support
from support.attention import checked, checked_backward, small
from support.graphs import FLOAT, HALF, reference_graph

INT32 = cudnn.data_type.INT32
UNIFIED = cudnn.attention_implementation.UNIFIED
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError


LENGTHS = {"use_padding_mask": True}
CONTRADICTIONS = {
    "both causal masks": (
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True}, RuntimeError, "bottom_right"
    ),
    "causal and right bound": (
        {"use_causal_mask": True, "diagonal_band_right_bound": 3}, RuntimeError, "right bound of 0"
    ),
    "window twice": (
        {"sliding_window_length": 3, "diagonal_band_left_bound": 3}, RuntimeError, "sliding_window_length"
    ),
    "statistics and inference": ({"is_inference": True, "generate_stats": True}, RuntimeError, "is_inference"),
    "statistics no bool": ({"generate_stats": 1}, RuntimeError, "generate_stats"),
    "scale of text": ({"attn_scale": "0.1"}, TypeError, "attn_scale"),
    "bound no int": ({"diagonal_band_right_bound": 1.5}, TypeError, "diagonal_band_right_bound"),
    "lengths missing": (LENGTHS, ValueError, "seq_len_q and seq_len_kv"),
    "negative right bound": ({"diagonal_band_right_bound": -1}, RuntimeError, "diagonal_band_right_bound: got -1"),
    "window over more rows than columns": ({"s_q": 128, "sliding_window_length": 9}, NOT_SUPPORTED, "left_bound"),
    "bottom right over more rows than columns": (
        {"s_q": 128, "use_causal_mask_bottom_right": True}, NOT_SUPPORTED, "s_q=128"
    ),
    "head size": ({"d": 20}, NOT_SUPPORTED, "head size: got d_qk=20"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_refuses(name: str) -> None:
    options, error, text = CONTRADICTIONS[name]
    with pytest.raises(error, match=text):
        checked(**options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: t["q"].set_dim([2, 64, 64]).set_stride([4096, 64, 1]), ValueError, "input Q .* rank 3"),
        (lambda t: t["k"].set_dim([3, 2, 64, 64]), ValueError, r"Q, K and V: got dim=\[2, 4, 64, 64\]"),
        (lambda t: t["k"].set_dim([2, 2, 64, 32]), ValueError, "Q, K and V"),
        (lambda t: t["v"].set_dim([2, 2, 32, 64]), ValueError, "Q, K and V"),
        (lambda t: t["k"].set_dim([2, 3, 64, 64]), NOT_SUPPORTED, "heads: got 4 of Q, 3 of K"),
        (lambda t: t["q"].set_stride([16384, 4096, 1, 64]), NOT_SUPPORTED, "Q .* last stride of 1"),
        (lambda t: t["o"].set_dim([2, 4, 64, 32]), ValueError, r"O .*allowed: dim=\[2, 4, 64, 64\]"),
        (lambda t: t["bias"].set_dim([1, 3, 64, 64]), ValueError, "Bias .* broadcasts"),
        (lambda t: t["bias"].set_data_type(cudnn.data_type.BOOLEAN), NOT_SUPPORTED, "bias: got BOOLEAN"),
        (lambda t: t["seq_len_q"].set_dim([1, 1, 1, 1]), ValueError, "Seq_len_q"),
        (lambda t: t["seq_len_kv"].set_data_type(FLOAT), ValueError, "Seq_len_kv .* INT32"),
        (lambda t: t["stats"].set_dim([2, 4, 64, 2]), ValueError, "Stats"),
    ],
)
def test_refuses_tensors(change: Any, error: type[Exception], text: str) -> None:
    graph = reference_graph(HALF)
    tensors = dict(zip("qkv", small(graph), strict=True))
    tensors["bias"] = graph.tensor([1, 1, 64, 64], [4096, 4096, 64, 1])
    tensors |= {name: graph.tensor([2, 1, 1, 1], [1] * 4, INT32) for name in ("seq_len_q", "seq_len_kv")}
    o, stats = graph.sdpa(**tensors, use_padding_mask=True, generate_stats=True)
    change({**tensors, "o": o.set_output(True), "stats": stats.set_output(True)})
    with pytest.raises(error, match=text):
        graph.validate()


def test_lengths_need_the_padding_mask() -> None:
    graph = reference_graph(HALF)
    lengths = [graph.tensor([2, 1, 1, 1], [1] * 4, INT32) for _ in range(2)]
    with pytest.raises(ValueError, match="use_padding_mask=True"):
        checked(graph, seq_len_q=lengths[0], seq_len_kv=lengths[1])


def test_bias_not_with_bottom_right() -> None:
    graph = reference_graph(HALF)
    with pytest.raises(NOT_SUPPORTED, match="with bias"):
        checked(graph, bias=graph.tensor([1, 1, 64, 64], [4096, 4096, 64, 1]), use_causal_mask_bottom_right=True)


def test_needs_an_intermediate_type() -> None:
    graph = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT, backend="reference")
    with pytest.raises(ValueError, match="intermediate_data_type"):
        checked(graph)


def test_refuses_old_devices() -> None:
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="reference", sm_version=75
    )
    with pytest.raises(NOT_SUPPORTED, match="compute capability 75"):
        checked(graph)


@pytest.mark.parametrize(
    ("sm", "sizes", "refused"),
    [
        (90, {"d": 256}, False), (90, {"d": 264}, True), (90, {"d": 36}, True), (100, {"d": 136}, True),
        (100, {"d": 192, "d_v": 128}, False), (100, {"d": 192}, True), (80, {"d": 128}, False), (80, {"d": 136}, True),
        (None, {"d": 264}, False),
    ],
)  # fmt: skip
def test_head_sizes_of_the_backward_pass(sm: int | None, sizes: dict[str, int], refused: bool) -> None:
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="reference", sm_version=sm
    )
    if refused:
        with pytest.raises(NOT_SUPPORTED, match=f"head size on compute capability {sm}"):
            checked_backward(graph, **sizes)
    else:
        checked_backward(graph, **sizes)


def test_backward_pass_refuses_an_empty_window_and_a_single_score() -> None:
    with pytest.raises(RuntimeError, match="diagonal_band_left_bound: got 0"):
        checked_backward(reference_graph(HALF), diagonal_band_left_bound=0)
    with pytest.raises(NOT_SUPPORTED, match="s_q=1, s_kv=1"):
        checked_backward(reference_graph(HALF), s=1)


@pytest.mark.parametrize(("version", "options", "text"), [
    (91000, {}, "9.10.0 or 9.10.1"), (91001, {}, "9.10.0 or 9.10.1"),
    (91400, {"sliding_window_length": 9, "s_kv": 2048}, "9.14.0"),
    (91300, {"implementation": UNIFIED}, r"the operation itself needs cuDNN 9.13.1, this is 9.13.0"),
    (92000, {"implementation": UNIFIED, "use_causal_mask": True}, "causal or sliding-window mask needs cuDNN 9.21.0"),
])  # fmt: skip
def test_refuses_versions(version: int, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_support, "loaded_version", lambda: version)
    with pytest.raises(NOT_SUPPORTED, match=text):
        checked(**options)


def test_unified_computes_in_float_only() -> None:
    with pytest.raises(NOT_SUPPORTED, match=r"UNIFIED, but .*FLOAT only"):
        checked(reference_graph(HALF, compute=HALF), implementation=UNIFIED)
