"""What attention refuses: the class of each error, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.pygraph.attention import support as attention_support
from support.attention import BACKWARD_CASES, CASES, Problem, backward_data, checked, checked_backward, describe, small
from support.graphs import FLOAT, HALF, reference_graph

INT32 = cudnn.data_type.INT32
UNIFIED, COMPOSITE = cudnn.attention_implementation.UNIFIED, cudnn.attention_implementation.COMPOSITE
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError


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


def test_needs_an_intermediate_type() -> None:
    graph = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT, backend="reference")
    with pytest.raises(ValueError, match="intermediate_data_type"):
        checked(graph)


@pytest.mark.parametrize(
    ("sm", "sizes", "refused"),
    [
        (90, {"d": 256}, False),
        (90, {"d": 264}, True),
        (90, {"d": 36}, True),
        (100, {"d": 136}, True),
        (100, {"d": 192, "d_v": 128}, False),
        (100, {"d": 192}, True),
        (80, {"d": 128}, False),
        (80, {"d": 136}, True),
        (None, {"d": 264}, False),
    ],
)
def test_head_sizes_of_the_backward_pass(sm: int | None, sizes: dict[str, int], refused: bool) -> None:
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="reference", sm_version=sm
    )
    if refused:
        with pytest.raises(NOT_SUPPORTED, match=f"head size on compute capability {sm}"):
            checked_backward(graph, **sizes)
    else:
        checked_backward(graph, **sizes)


def test_unified_computes_in_float_only() -> None:
    with pytest.raises(NOT_SUPPORTED, match=r"UNIFIED, but .*FLOAT only"):
        checked(reference_graph(HALF, compute=HALF), implementation=UNIFIED)


# Versions, devices and combinations, in the order of the checks.
def validate(problem: Problem, version: int, sm: int | None, backward: bool, **options: Any) -> None:
    """The checks of a version of cuDNN on a device."""
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="reference", sm_version=sm
    )
    data = problem.tensors(torch.float16, "meta")
    if backward:
        data = backward_data(problem, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_support, "loaded_version", lambda: version)
        describe(graph, problem, data, **options).graph.validate()


NEW = 92800
CAUSAL = {"use_causal_mask": True}
BOTTOM_RIGHT = {"use_causal_mask_bottom_right": True}
WINDOW = {"diagonal_band_left_bound": 9}
PADDED = {"lengths_q": (77, 192), "lengths_kv": (128, 33)}
ALIBI = {"use_alibi_mask": True}
BIAS = (1, 4, 192, 192)
# Version, compute capability, problem, class, text.
BOTH = {
    "a broken cuDNN": (91000, None, Problem(), NOT_SUPPORTED, "9.10.0 or 9.10.1"),
    "the next broken cuDNN": (91001, None, Problem(), NOT_SUPPORTED, "9.10.0 or 9.10.1"),
    "windows of 9.14.0": (91400, None, Problem(s_kv=2048, options=WINDOW), NOT_SUPPORTED, "9.14.0 and s_kv > 1024"),
    "a score modifier and a mask": (
        NEW,
        None,
        Problem(modifier="softcap", options=CAUSAL),
        NOT_SUPPORTED,
        "score_mod: got with a right bound",
    ),
    "a score modifier and padding": (
        NEW,
        None,
        Problem(modifier="softcap", **PADDED),
        NOT_SUPPORTED,
        "score_mod: got with a padding mask",
    ),
    "a score modifier and a window": (
        NEW,
        None,
        Problem(modifier="softcap", options=WINDOW),
        NOT_SUPPORTED,
        "score_mod: got with a left bound",
    ),
    "ALiBi alone": (NEW, None, Problem(options=ALIBI), NOT_SUPPORTED, "use_alibi_mask: got right bound None"),
    "ALiBi to the right": (
        NEW,
        None,
        Problem(options={**ALIBI, "diagonal_band_right_bound": 3}),
        NOT_SUPPORTED,
        "right bound 3",
    ),
    "ALiBi bottom right": (
        NEW,
        None,
        Problem(options={**ALIBI, **BOTTOM_RIGHT}),
        NOT_SUPPORTED,
        "bottom-right causal mask: got with ALiBi",
    ),
    "bias bottom right": (NEW, None, Problem(bias=BIAS, options=BOTTOM_RIGHT), NOT_SUPPORTED, "got with bias"),
    "more rows bottom right": (NEW, None, Problem(s_q=256, options=BOTTOM_RIGHT), NOT_SUPPORTED, "s_q=256"),
    "dropout bottom right": (
        NEW,
        None,
        Problem(dropout=0.5, options=BOTTOM_RIGHT),
        NOT_SUPPORTED,
        "got with dropout; allowed: neither bias",
    ),
    "ragged without lengths": (NEW, None, Problem(ragged=True), NOT_SUPPORTED, "ragged tensors: got no padding mask"),
    "a window of too many rows": (
        NEW,
        None,
        Problem(s_q=256, options=WINDOW),
        NOT_SUPPORTED,
        "left_bound: got 9 with s_q=256 > s_kv=192",
    ),
    "a negative right bound": (
        NEW,
        None,
        Problem(options={"diagonal_band_right_bound": -2}),
        RuntimeError,
        "right_bound: got -2",
    ),
    "a sink before 9.13": (91200, None, Problem(sink=True), ValueError, "sink_token: got cuDNN 9.12.0"),
    "Volta": (NEW, 70, Problem(), NOT_SUPPORTED, "compute capability 70; allowed: 80"),
}
PAGED = {"page": 64, **PADDED}
FORWARD = {
    **BOTH,
    "heads": (NEW, None, Problem(d_qk=36), NOT_SUPPORTED, "head size: got d_qk=36"),
    "one row with a sink": (NEW, None, Problem(s_q=1, sink=True), NOT_SUPPORTED, "sink_token: got s_q=1"),
    "pages without lengths": (NEW, None, Problem(page=64), NOT_SUPPORTED, "paged attention: got no sequence lengths"),
    "pages with a shorter bias": (
        NEW,
        None,
        Problem(bias=(1, 1, 192, 1), **PAGED),
        NOT_SUPPORTED,
        "max_seq_len_kv: got 192 with bias",
    ),
    "ragged on Ampere": (91800, 86, Problem(ragged=True, **PADDED), NOT_SUPPORTED, "or cuDNN 9.18.1 or newer"),
    "all statistics": (92000, None, Problem(statistics=True), NOT_SUPPORTED, "score_max and score_sum_exp"),
}
BACKWARD = {
    **BOTH,
    "an empty window": (
        NEW,
        None,
        Problem(options={**CAUSAL, "diagonal_band_left_bound": 0}),
        RuntimeError,
        "left_bound: got 0",
    ),
    "one score": (NEW, None, Problem(s_q=1, s_kv=1), NOT_SUPPORTED, "s_q=1, s_kv=1"),
    "192 on an old Blackwell": (91000 + 2, 100, Problem(d_qk=192, d_v=128), NOT_SUPPORTED, "d_qk=192, d_v=128"),
    "256 on an old Blackwell": (92200, 100, Problem(d_qk=256, d_v=256), NOT_SUPPORTED, "d_qk=256, d_v=256"),
    "ragged dBias on Blackwell": (
        NEW,
        100,
        Problem(bias=BIAS, ragged=True, **PADDED),
        NOT_SUPPORTED,
        "dBias: got ragged tensors on compute",
    ),
    "ragged on Ampere": (91800, 86, Problem(ragged=True, **PADDED), NOT_SUPPORTED, "cuDNN 9.18.1 or newer, Stats not"),
    "ragged statistics on Ampere": (NEW, 86, Problem(ragged=True, **PADDED), NOT_SUPPORTED, "Stats not ragged"),
}
RULES = [(False, name, *rule) for name, rule in FORWARD.items()] + [
    (True, name, *rule) for name, rule in BACKWARD.items()
]


@pytest.mark.parametrize(("backward", "name", "version", "sm", "problem", "error", "text"), RULES)
def test_refuses_combinations(
    backward: bool, name: str, version: int, sm: int | None, problem: Problem, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        validate(problem, version, sm, backward)


# What cuDNN 9.19 was seen to compute wrongly on an H200: whether backward, problem, text.
ONE_ROW = {"s_q": 1, "lengths_q": (1, 1), "lengths_kv": (128, 33)}
WRONG = {
    "one dropped row": (False, Problem(s_q=1, dropout=0.5), "dropout: got s_q=1 with cuDNN 9.19.0"),
    "one dropped row, backward": (True, Problem(s_q=1, dropout=0.5), "dropout: got s_q=1 with cuDNN 9.19.0"),
    "a bias for each head": (False, Problem(bias=(1, 4, 1, 1)), "bias: got dim=.* which misreads it"),
    "ragged statistics of one row": (False, Problem(ragged=True, **ONE_ROW), "Stats: got ragged with s_q=1"),
    "a bias for each column": (True, Problem(bias=(1, 4, 1, 192)), "bias: got dim=.* with which dQ is wrong"),
    "ragged wide heads": (True, Problem(ragged=True, d_qk=256, **PADDED), "head size: got d_qk=256, d_v=64 of ragged"),
    "a narrow dBias": (True, Problem(bias=(1, 4, 192, 1)), "dBias: got dim=.* which writes outside it"),
    "a dropout mask": (True, Problem(own_mask=True), "dropout: got a mask .* ignores the inverse of its scale"),
    "dSink with dropout": (True, Problem(sink=True, dropout=0.5), "dSink_token: got dropout .* scales it wrongly"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_what_is_computed_wrongly(name: str) -> None:
    backward, problem, text = WRONG[name]
    with pytest.raises(NOT_SUPPORTED, match=text):
        validate(problem, 91900, 90, backward)
    validate(problem, 91901, 90, backward)


def test_warns_of_what_may_be_wrong(caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(ragged=True, sink=True, **PADDED)
    validate(problem, 91901, 90, True)
    assert not caplog.records
    validate(problem, 91900, 90, True)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "dSink_token: got ragged Stats with cuDNN 9.19.0, which reads beyond them" in record.message


DETERMINISTIC = {"use_deterministic_algorithm": True}


@pytest.mark.parametrize(
    ("version", "sm", "problem", "options", "refused"),
    [
        (91700, 100, Problem(), DETERMINISTIC, "cuDNN 9.18 or newer"),
        (91800, 100, Problem(), DETERMINISTIC, ""),
        (NEW, 100, Problem(dropout=0.5), DETERMINISTIC, "and dBias, dropout or ALiBi"),
        (NEW, 100, Problem(options={**ALIBI, **CAUSAL}), DETERMINISTIC, "and dBias, dropout or ALiBi"),
        (NEW, 100, Problem(bias=BIAS), DETERMINISTIC, "and dBias, dropout or ALiBi"),
        (91700, 90, Problem(dropout=0.5), DETERMINISTIC, ""),
        (NEW, None, Problem(), {"max_total_seq_len_q": 100}, "max_total_seq_len_q, max_total_seq_len_kv: got given"),
        (NEW, None, Problem(ragged=True, **PADDED), {"max_total_seq_len_kv": 300}, ""),
        (NEW, 100, Problem(d_qk=256, d_v=256), {}, ""),
    ],
)
def test_algorithms_of_the_backward_pass(
    version: int, sm: int | None, problem: Problem, options: dict[str, Any], refused: str
) -> None:
    if refused:
        with pytest.raises(NOT_SUPPORTED, match=refused):
            validate(problem, version, sm, True, **options)
    else:
        validate(problem, version, sm, True, **options)


@pytest.mark.parametrize("name", CASES)
def test_refuses_no_supported_case(name: str) -> None:
    for sm in (90, 100):
        validate(CASES[name], NEW, sm, backward=False)
        if name in BACKWARD_CASES:
            validate(CASES[name], NEW, sm, backward=True)


def test_dsink_needs_the_sink() -> None:
    graph = reference_graph(HALF)
    q, k, v = small(graph)
    stats, d_sink = graph.tensor([2, 4, 64, 1], [256, 64, 1, 1], FLOAT), graph.tensor([1, 4, 1, 1], [4, 1, 1, 1], FLOAT)
    gradients = graph.sdpa_backward(q, k, v, graph.tensor_like(q), graph.tensor_like(q), stats, dSink_token=d_sink)
    for gradient in gradients:
        gradient.set_output(True)
    with pytest.raises(ValueError, match="dSink_token: got given without sink_token"):
        graph.validate()


@pytest.mark.parametrize(
    ("version", "problem", "text"),
    [
        (91300, Problem(), "the operation itself needs cuDNN 9.13.1"),
        (91301, Problem(blocks=True), "a block mask needs cuDNN 9.14.0"),
        (91400, Problem(**PADDED), "a padding mask needs cuDNN 9.15.0"),
        (91400, Problem(**PAGED), "a padding mask needs cuDNN 9.15.0"),
        (92000, Problem(bias=BIAS), "bias needs cuDNN 9.21.0"),
        (92000, Problem(options={**ALIBI, **CAUSAL}), "ALiBi needs cuDNN 9.21.0"),
        (92000, Problem(options=BOTTOM_RIGHT), "a causal or sliding-window mask needs cuDNN 9.21.0"),
        (92000, Problem(sink=True), "a sink needs cuDNN 9.21.0"),
        (92000, Problem(modifier="softcap"), "a score modifier needs cuDNN 9.21.0"),
        (92100, Problem(dropout=0.5), "dropout needs cuDNN 9.22.0"),
        (NEW, Problem(dropout=0.5), "dropout with statistics is not among its features"),
        (NEW, Problem(own_mask=True), "a dropout mask of the user is not among its features"),
    ],
)
def test_what_the_one_operation_needs(version: int, problem: Problem, text: str) -> None:
    with pytest.raises(NOT_SUPPORTED, match=f"implementation: got UNIFIED, but {text}"):
        validate(problem, version, None, False, implementation=UNIFIED)


def test_what_only_the_one_operation_has() -> None:
    with pytest.raises(NOT_SUPPORTED, match="block_mask: got the COMPOSITE implementation; allowed: the UNIFIED one"):
        validate(Problem(blocks=True), NEW, None, False, implementation=COMPOSITE)


WRONG_ARGUMENTS: dict[str, tuple[Any, type[Exception], str]] = {  # options, or what makes them of a tensor
    "both causal masks": (
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True},
        RuntimeError,
        "bottom_right",
    ),
    "causal and right bound": (
        {"use_causal_mask": True, "diagonal_band_right_bound": 3},
        RuntimeError,
        "right bound of 0",
    ),
    "window twice": (
        {"sliding_window_length": 3, "diagonal_band_left_bound": 3},
        RuntimeError,
        "sliding_window_length",
    ),
    "statistics and inference": ({"is_inference": True, "generate_stats": True}, RuntimeError, "is_inference"),
    "statistics no bool": ({"generate_stats": 1}, RuntimeError, "generate_stats"),
    "scale of text": ({"attn_scale": "0.1"}, TypeError, "attn_scale"),
    "bound no int": ({"diagonal_band_right_bound": 1.5}, TypeError, "diagonal_band_right_bound"),
    "lengths missing": ({"use_padding_mask": True}, ValueError, "seq_len_q and seq_len_kv"),
    "dropout of all": (lambda one: {"dropout": (1.0, one, one)}, ValueError, "a probability of 1.0"),
    "negative dropout": (lambda one: {"dropout": (-0.1, one, one)}, ValueError, "a probability of -0.1"),
    "a probability alone": (lambda one: {"dropout": 0.5}, TypeError, r"dropout: got \(float\)"),
    "seeds no tensors": (lambda one: {"dropout": (0.5, 1, 2)}, TypeError, r"dropout: got \(float, int, int\)"),
    "a bool for statistics": (lambda one: {"score_max": True}, TypeError, "Max: got bool"),
    "two names of a bias": (lambda one: {"bias": one, "attn_bias": one}, RuntimeError, "bias and attn_bias"),
    "no tensor for a sink": (lambda one: {"sink_token": 0.5}, TypeError, "input Sink"),
    "a sink of another shape": (lambda one: {"sink_token": one}, ValueError, r"Sink .*h_q, 1, 1\] = \[1, 4, 1, 1\]"),
    "no modifier": (lambda one: {"score_mod": 5}, TypeError, "score_mod: got 5; allowed: a function"),
    "a modifier of no result": (lambda one: {"score_mod": lambda graph, x: None}, TypeError, "returned NoneType"),
    "a longest sequence without pages": (
        lambda one: {"paged_attention_max_seq_len_kv": 64},
        NOT_SUPPORTED,
        "max_seq_len_kv: got 64 without page tables",
    ),
    "page tables of one entry": (
        lambda one: {"paged_attention_k_table": one, "paged_attention_max_seq_len_kv": 64},
        ValueError,
        "Page_table_K",
    ),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_refuses_arguments(name: str) -> None:
    options, error, text = WRONG_ARGUMENTS[name]
    graph = reference_graph(HALF)
    with pytest.raises(error, match=text):
        checked(graph, **(options(graph.tensor([1] * 4, [1] * 4, FLOAT)) if callable(options) else options))


def test_ragged_offsets_are_integers_of_each_entry() -> None:
    for kind, count in ((FLOAT, 3), (INT32, 2)):
        graph = reference_graph(HALF)
        q, k, v = small(graph)
        q.set_ragged_offset(graph.tensor([count, 1, 1, 1], [1] * 4, kind))
        lengths = [graph.tensor([2, 1, 1, 1], [1] * 4, INT32) for _ in range(2)]
        graph.sdpa(q, k, v, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1])[0].set_output(True)
        with pytest.raises(ValueError, match=r"ragged_offset of tensor .*INT32 or INT64 \[b \+ 1, 1, 1, 1\]"):
            graph.validate()
