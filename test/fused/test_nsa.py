"""cudnn.NSA: results against dense computations, layouts, and what is refused. Kernels are tested in test/kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from cudnn import NSA
from cudnn.fused import registry
from cudnn.native_sparse_attention.selection import csr_transpose
from cudnn_kernels.attention.sparse import SelectionConfiguration
from kernels import test_nsa as nsa
from kernels.test_nsa import Choice, Ranking
from support.dense_attention import attend, flat
from support.selection import ALONE, brief, within

C, CHOICE = SelectionConfiguration("float16", 4, 2, 64, 64, 16), Choice((12, 0, 38), 3, spare=0)
E4M3 = torch.float8_e4m3fn
ENDS = torch.tensor([0, 12, 12, 50], dtype=torch.int32)
GPU: Any = ALONE[-1]


def there(where: str, function: Callable[..., Any], **call: Any) -> list[Any]:
    """What a function of tensors gives in a place, on the CPU again."""

    def moved(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(moved, x))
        return x.cuda() if where == "gpu" and isinstance(x, torch.Tensor) else x

    with within(where):
        actual = function(**{name: moved(x) for name, x in call.items()})
    return [None if x is None else x.cpu() for x in actual]


def on_gpu(*values: Any) -> Any:
    """A test's parameters, the last of which is where it runs."""
    return pytest.param(*values, *GPU.values, marks=GPU.marks)


def named(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Those of the kernels' arguments, as the wrappers call them."""
    return {f"{name}_tensor": arguments[name] for name in names} | {"scale_softmax": arguments["scale_softmax"]}


def selection_call(arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """Tensors of a call with two heads of K and different blocks for all rows."""
    arguments = arguments or nsa.selection_inputs(C, CHOICE)
    call = named(arguments, "q", "k", "v", "block_indices", "block_counts", "cum_seqlen_q")
    return call | {"cum_seqlen_k_tensor": arguments["cum_seqlen_q"], "block_size": C.block}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("arch", brief(["", GPU, "sm_90a"], 0, 1))
def test_selection_is_a_masked_softmax(is_causal: bool, arch: str) -> None:
    c = replace(C, causal=is_causal)
    arguments = nsa.selection_inputs(c, CHOICE)
    options = {"is_causal": is_causal, "o_dtype": torch.bfloat16 if is_causal else None}
    o, sums, maxima = there(arch, NSA.selection_attention_wrapper, **selection_call(arguments), **options)
    assert o.dtype is (options["o_dtype"] or arguments["q"].dtype)
    assert sums.shape == maxima.shape == (50, 4, 1)
    nsa.assert_selected(arguments | {"o": o, "l": sums[..., 0], "m": maxima[..., 0]}, c)


@pytest.mark.parametrize(
    ("arch", "is_causal"),
    brief(
        [(arch, causal) for arch in ("", "sm_90a", "sm_100a") for causal in (True, False)]
        + [pytest.param("gpu", causal, marks=GPU.marks) for causal in (True, False)],
        0,
        1,
        2,
        6,
        7,
    ),
)
def test_selection_backward(arch: str, is_causal: bool) -> None:
    """With a mask, gradients are added to what there is."""
    c = replace(C, causal=is_causal)
    arguments = nsa.selection_inputs(c, CHOICE)
    arguments["lse"], arguments["do"] = torch.empty_like(arguments["l"]), torch.randn_like(arguments["o"])
    arguments["expected"] = nsa.selection_gradients(arguments, c)
    arguments["lse"] = arguments["lse"].unsqueeze(2)
    call = selection_call(arguments) | named(arguments, "o", "do", "lse")
    del call["cum_seqlen_k_tensor"]
    before = tuple(torch.randn_like(arguments[x]) for x in "qkv") if is_causal else None
    if before:
        call["accumulate_into"] = tuple(x.clone() for x in before)
    actual = there(arch, NSA.selection_attention_backward_wrapper, **call, is_causal=is_causal)
    own = [x - y for x, y in zip(actual, before, strict=True)] if before else actual
    nsa.assert_differentiated(arguments | dict(zip(("dq", "dk", "dv"), own, strict=True)), c)


@pytest.mark.parametrize("arch", ["", "sm_90a", GPU])
def test_selection_of_sequences_of_one_length(arch: str) -> None:
    """(b, h, s, ..), in both orders in memory, as packed ones; offsets do not count."""
    call, batch, rows = selection_call(), 2, 25
    size = {n: x for n, x in call.items() if not isinstance(x, torch.Tensor)}
    arguments = {n: x for n, x in call.items() if n not in size and not n.startswith("cum_seqlen")}
    views = {n: x.unflatten(0, (batch, rows)).transpose(1, 2) for n, x in arguments.items()}
    ends = torch.arange(batch + 1, dtype=torch.int32) * rows
    packed = {**arguments, "cum_seqlen_q_tensor": ends}
    expected = there(arch, NSA.selection_attention_wrapper, **packed, **size)
    for arguments in (views, {n: x.contiguous() for n, x in views.items()}, views | {"cum_seqlen_q_tensor": ends + 7}):
        actual = there(arch, NSA.selection_attention_wrapper, **arguments, **size)
        assert actual[1].shape == (batch, 4, rows, 1)
        for ours, other in zip(actual, expected, strict=True):
            assert torch.equal(ours.transpose(1, 2).flatten(0, 1), other)
    o, sums, maxima = expected
    own = {"o_tensor": o, "do_tensor": o + 1, "lse_tensor": maxima + sums.log()}
    turned = {n: x.unflatten(0, (batch, rows)).transpose(1, 2) for n, x in own.items()}
    gradients = there(arch, NSA.selection_attention_backward_wrapper, **packed, **own, **size)
    for arguments in (turned, turned | {"lse_tensor": turned["lse_tensor"].squeeze(-1)}):
        actual = there(arch, NSA.selection_attention_backward_wrapper, **views, **arguments, **size)
        for ours, other in zip(actual, gradients, strict=True):
            assert torch.equal(ours.transpose(1, 2).flatten(0, 1), other)
    with pytest.raises(
        ValueError,
        match=r"SelectionAttention: k tensor: got the shape \(2, 2, 24, 64\); allowed: .* 2 sequences of 25 rows",
    ):
        NSA.selection_attention_wrapper(**{**views, "k_tensor": views["k_tensor"][:, :, 1:]})
    with pytest.raises(NotImplementedError, match="or call the wrapper"):
        NSA.SelectionAttention(*(views[f"{x}_tensor"] for x in "qkvqqq"), *[views["block_counts_tensor"]] * 2)


@pytest.mark.parametrize("arch", ["", "sm_90a", GPU])
def test_transpose_selection(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sequences with 3, 0 and 5 rows, blocks of 2; lists with blocks twice, of the future, and none at all."""
    indices = torch.tensor([[0, 0], [1, -1], [1, 0], [2, 0], [7, 1], [0, 1], [0, 2], [2, 1]], dtype=torch.int32)[
        :, None
    ]
    counts = torch.tensor([[2], [1], [9], [2], [2], [0], [1], [2]], dtype=torch.int32)
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)

    monkeypatch.setattr(csr_transpose, "ROWS", (3,))

    def by_block(is_causal: bool) -> list[list[int]]:
        arguments = {"block_indices": indices, "block_counts": counts, "cum_seqlen": ends}
        rows, table = there(arch, NSA.transpose_selection, **arguments, block_size=2, is_causal=is_causal, chunk_size=2)
        assert table[0].tolist() == [0, 0, 0]
        actual = [rows[first:last].tolist() for first, last in pairwise(table[:, 0].tolist())]
        chunks = [max(-(-len(x) // 2), 1) for x in actual]
        assert table[:, 1].diff().tolist() == chunks
        assert table[:, 2].diff().tolist() == [x if x > 1 else 0 for x in chunks]
        return actual

    assert by_block(False) == [[0, 0, 2], [1, 2], [], [3, 6], [4, 7], [3, 7], []]  # sequence 2 begins with number 3
    assert by_block(True) == [[0, 0, 2], [2], [], [3, 6], [7], [7], []]
    indices, counts, ends = indices[:0], counts[:0], ends * 0
    assert by_block(False) == [[], [], []]


def test_deprecated_names() -> None:
    """Old names of functions and arguments warn and give the same results."""
    arguments = nsa.selection_inputs(C, CHOICE)
    lists = [arguments[x] for x in ("block_indices", "block_counts", "cum_seqlen_q")]
    expected = NSA.transpose_selection(*lists, 16, chunk_size=512, return_positions=True)
    with pytest.warns(DeprecationWarning, match="use transpose_selection"):
        actual = NSA.choosing_rows(*lists, 16, part=512, tells=True)
    assert all(map(torch.equal, actual, expected))
    with pytest.warns(DeprecationWarning, match=r"choosing_rows\(tells=...\) is deprecated: use return_positions"):
        NSA.choosing_rows(*lists, 16, tells=True)

    q, k, v, o = (arguments[x] for x in "qkvo")
    lse, do, (indices, offsets, _) = torch.zeros_like(arguments["l"]), torch.randn_like(o), expected
    grads = tuple(map(torch.zeros_like, (q, k, v)))
    samples = (q, k, v, do, do, lse, *grads, *lists)
    options = {"block_size": 16, "part": 512, "adds": True}
    with pytest.warns(
        DeprecationWarning, match=r"SelectionAttentionBackward\(part=...\) is deprecated: use chunk_size"
    ):
        backward: Any = NSA.SelectionAttentionBackward(
            *samples, sample_choosing=indices, sample_choosing_ends=offsets, **options
        )
    assert (backward.chunk_size, backward.accumulate) == (512, True)
    backward.compile()
    with pytest.warns(DeprecationWarning, match="use query_offsets_tensor"):
        backward.execute(*samples, choosing_tensor=indices, choosing_ends_tensor=offsets)
    results = tuple(map(torch.zeros_like, grads))
    wrapper: Any = NSA.selection_attention_backward_wrapper
    with pytest.warns(DeprecationWarning, match="use accumulate_into"):
        wrapper(q, k, v, do, do, lse, *lists, 16, added_to=results, chosen_by=(512, indices, offsets))
    assert all(map(torch.equal, results, grads))
    wrapper, sizes = NSA.topk_reduction_wrapper, {"k_value": 4, "selection_block_size": 16, "compress_stride": 4}
    q, k = torch.randn(1, 2, 80, 64).half(), torch.randn(1, 1, 20, 64).half()
    with pytest.warns(DeprecationWarning, match="use include_fixed_blocks"):
        scores, blocks = wrapper(q, k, torch.zeros(1, 2, 80), **sizes, whole_lists=True)
    assert blocks.shape[-1] == scores.shape[-1] + 4


@pytest.mark.parametrize("arch", ["", "sm_90a", GPU])
def test_lists_may_be_parts_of_others(arch: str) -> None:
    """The first columns of longer lists; lists without any block."""
    call = selection_call()
    few = call["block_indices_tensor"][..., :2].contiguous()
    part = call["block_indices_tensor"][..., :2]
    if arch == "gpu":
        part = call["block_indices_tensor"].cuda()[..., :2]  # a copy of a part is a whole list
    (o, sums, _), (actual, found_sums, _), (none, *_) = (
        there(arch, NSA.selection_attention_wrapper, **call | {"block_indices_tensor": x})
        for x in (few, part, torch.empty(50, 2, 0).int())
    )
    assert torch.equal(actual, o)
    assert torch.equal(found_sums, sums)
    assert not none.any()


def test_what_a_list_may_say() -> None:
    """A count beyond the list ends with it, blocks outside the sequence have no keys, one listed twice counts twice."""
    call = selection_call()
    call["block_indices_tensor"][:] = torch.tensor([1, -1, 1 << 27], dtype=torch.int32)
    call["block_counts_tensor"][:] = 9
    o, sums, _ = NSA.selection_attention_wrapper(**call)
    call["block_counts_tensor"][:] = 1
    once, sums_once, _ = NSA.selection_attention_wrapper(**call)
    torch.testing.assert_close(o, once)
    call["block_indices_tensor"][:] = 1
    call["block_counts_tensor"][:] = 2
    _, sums_twice, _ = NSA.selection_attention_wrapper(**call)
    torch.testing.assert_close(sums, sums_once)
    torch.testing.assert_close(sums_twice, 2 * sums_once)
    call["block_counts_tensor"][:] = 0
    o, sums, maxima = NSA.selection_attention_wrapper(**call)
    assert not o.any()
    assert not sums.any()
    assert (maxima == -math.inf).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_tensor": torch.zeros(1, 4, 50, 64).half()}, ValueError, "k tensor: got the shape"),
        ({"max_s_q": 64, "max_s_k": 50}, NotImplementedError, "max_s_q and max_s_k"),
        ({"cum_seqlen_k_tensor": ENDS + 1}, NotImplementedError, "cum_seqlen_k"),
        ({"cum_seqlen_q_tensor": None}, ValueError, "cum_seqlen_q tensor"),
        ({"cum_seqlen_q_tensor": ENDS + 1, "cum_seqlen_k_tensor": None}, ValueError, "up to the 50 rows"),
        ({"block_size": 24}, ValueError, "block_size"),
        ({"acc_dtype": torch.float16}, ValueError, "acc_dtype"),
        ({"o_dtype": torch.float32}, ValueError, "o tensor dtype"),
        ({"q_tensor": torch.zeros(50, 3, 64).half()}, ValueError, "heads of q"),
        ({"block_counts_tensor": torch.zeros(50, 2)}, ValueError, "block_counts tensor dtype"),
        ({"scale_softmax": -1.0}, ValueError, "scale_softmax"),
        ({"scale_softmax": math.nan}, ValueError, "scale_softmax"),
        (
            {f"{name}_tensor": torch.zeros(50, 2, 80).half() for name in "qkv"},
            ValueError,
            r"head size: got \(80, 80\); allowed: 64, 128, 192 with 128 in v, 256\.",
        ),
    ],
)
def test_what_selection_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    NSA.SelectionAttention.objects.clear()
    with pytest.raises(error, match=message):
        NSA.selection_attention_wrapper(**{**selection_call(), **change})


@pytest.mark.parametrize("missing", ["q", "k", "v"])
def test_wrappers_of_what_is_no_tensor(missing: str) -> None:
    x = torch.zeros(1, 4, 32, 64).half()
    three: dict[str, Any] = dict.fromkeys(("q_tensor", "k_tensor", "v_tensor"), x)
    rows = {"lse_tensor": torch.zeros(1, 4, 32)}
    for api, wrapper, arguments in [
        (NSA.CompressionAttention, NSA.compression_attention_wrapper, three),
        (
            NSA.CompressionAttentionBackward,
            NSA.compression_attention_backward_wrapper,
            three | rows | {"o_tensor": x, "do_tensor": x},
        ),
        (NSA.SlidingWindowAttention, NSA.sliding_window_attention_wrapper, three),
        (NSA.SelectionAttention, NSA.selection_attention_wrapper, selection_call()),
        *[(NSA.TopKReduction, NSA.topk_reduction_wrapper, three | rows)] * (missing != "v"),
    ]:
        call = {name: x for name, x in arguments.items() if api is not NSA.TopKReduction or name != "v_tensor"}
        for value, error, got in ((None, ValueError, "None"), (x.numpy(), TypeError, r"numpy\.ndarray")):
            with pytest.raises(error, match=f"{api.__name__}: {missing} tensor: got {got}"):
                wrapper(**{**call, f"{missing}_tensor": value})


TOP_K, RANKING = replace(nsa.RANK, heads=4, varlen=False), Ranking(((150, 18), (150, 18)))


def top_k_call(arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """Two sequences of one length, with the log-sum-exp of compression attention."""
    call = named(arguments or nsa.top_k_inputs(TOP_K, RANKING), "q", "k", "lse")
    return call | {"k_value": TOP_K.count, "selection_block_size": TOP_K.block, "compress_stride": TOP_K.stride}


@pytest.mark.parametrize("arch", brief(["", GPU, "sm_90a"], 0, 1))
@pytest.mark.parametrize("packed", [False, True])
def test_top_k_are_the_largest_probabilities(packed: bool, arch: str) -> None:
    c = replace(TOP_K, varlen=packed)
    arguments = nsa.top_k_inputs(c, RANKING)
    call = top_k_call(arguments)
    if packed:
        call |= named(arguments, "cum_seqlen_q", "cum_seqlen_k") | {"lse_tensor": arguments["lse"].unsqueeze(2)}
    scores, indices = there(arch, NSA.topk_reduction_wrapper, **call)
    actual = arguments | {"topk_scores": scores, "topk_indices": indices}
    nsa.assert_ranked(actual, c, RANKING, ties=bool(arch))  # PyTorch's GEMMs may differ for equal keys


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_value": 65}, ValueError, "k_value"),
        ({"compress_stride": 6}, ValueError, "selection_block_size and compress_stride"),
        ({"compress_stride": 1, "selection_block_size": 256}, NotImplementedError, "selection_block_size"),
        ({"mma_tiler_mn": (64, 64)}, ValueError, "mma_tiler_mn"),
        (
            {
                "q_tensor": torch.zeros(300, 4, 64).half(),
                "k_tensor": torch.zeros(36, 2, 64).half(),
                "lse_tensor": torch.zeros(300, 4, 1),
                "cum_seqlen_q_tensor": torch.tensor([0, 150, 300]).int(),
            },
            ValueError,
            "cum_seqlen_q alone",
        ),
        (
            {
                "q_tensor": torch.zeros(300, 4, 64).half(),
                "k_tensor": torch.zeros(36, 2, 64).half(),
                "lse_tensor": torch.zeros(300, 4, 1),
                "cum_seqlen_q_tensor": torch.tensor([0, 150, 300]).int(),
                "cum_seqlen_k_tensor": torch.tensor([0, 18, 37]).int(),
            },
            ValueError,
            "up to the 36 rows",
        ),
    ],
)
def test_what_top_k_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    call = top_k_call()
    with pytest.raises(error, match=message):
        NSA.topk_reduction_wrapper(**{**call, **change})


def one_pass_call(rows: int = 150, keys: int = 18) -> dict[str, Any]:
    """Two varlen sequences of one length, with four heads of Q and two of K."""
    q, k, v = (torch.randn(2 * n, heads, 64).half() for n, heads in ((rows, 4), (keys, 2), (keys, 2)))
    ends = {f"cum_seqlen_{x}_tensor": torch.arange(3).int() * n for x, n in (("q", rows), ("k", keys))}
    options = {"k_value": 3, "selection_block_size": 16, "compress_stride": 8}
    return {"q_tensor": q, "k_tensor": k, "v_tensor": v, **ends, **options}


@pytest.mark.parametrize("arch", brief(["", GPU, "sm_90a"], 0, 1))
def test_compression_and_top_k_in_one_are_both(arch: str) -> None:
    call = one_pass_call()
    o, lse, indices = there(arch, NSA.compression_top_k_wrapper, **call)
    options = {x: call.pop(x) for x in ("k_value", "selection_block_size", "compress_stride")}
    expected, expected_lse = NSA.compression_attention_wrapper(**call, enable_lse=True)
    del call["v_tensor"]
    _, lists = NSA.topk_reduction_wrapper(**call, lse_tensor=expected_lse, include_fixed_blocks=True, **options)
    torch.testing.assert_close(o, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, expected_lse[..., 0], atol=1e-5, rtol=1e-5)
    assert torch.equal(indices, lists)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_value": 65}, ValueError, "k_value"),
        ({"compress_stride": 6}, ValueError, "selection_block_size and compress_stride"),
        ({"max_s_k": 129}, NotImplementedError, "compressed keys of a sequence: got 129; allowed: at most 128"),
        ({"q_tensor": torch.zeros(300, 130, 64).half()}, NotImplementedError, "heads of q"),
        ({f"{name}_tensor": torch.zeros(1, 2, 40, 64).half() for name in "qkv"}, ValueError, "q tensor"),
        ({"cum_seqlen_k_tensor": None}, ValueError, "cum_seqlen_q alone"),
    ],
)
def test_what_compression_with_top_k_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NSA.compression_top_k_wrapper(**{**one_pass_call(), **change})


def test_compressed_keys_of_later_calls() -> None:
    """The tile's number of blocks for the samples, and no sequence longer than announced."""

    def tensors(call: dict[str, Any]) -> tuple[Any, ...]:
        q, ends = call["q_tensor"], [call[f"cum_seqlen_{x}_tensor"] for x in "qk"]
        lists = torch.empty(len(q), 2, 7, dtype=torch.int32)
        results = torch.empty_like(q), torch.empty(q.shape[:2]), lists
        return q, call["k_tensor"], call["v_tensor"], *results, *ends

    few, many = (one_pass_call(80, keys) for keys in (10, 40))
    options = {x: few[x] for x in ("k_value", "selection_block_size", "compress_stride")}
    for most, error in (
        (None, "compressed keys: got 80 rows of k; allowed: at most 64, after samples of 20"),
        (20, "compressed keys of a sequence: got 40; allowed: at most 20"),
    ):
        operation = NSA.CompressionTopK(*tensors(few), **options, max_s_k=most)
        operation.compile()
        operation.execute(*tensors(few))
        with pytest.raises(ValueError, match=error):
            operation.execute(*tensors(many))
        with pytest.raises(NotImplementedError, match="compressed keys: got 0 rows of k; allowed: 1 row and more"):
            operation.execute(*tensors(one_pass_call(80, 0)))


def test_top_k_before_compile() -> None:
    call = top_k_call()
    scores = torch.empty(2, 150, 2, 3).transpose(1, 2)
    tensors = (call["q_tensor"], call["k_tensor"], call["lse_tensor"], scores, scores.int())
    with pytest.raises(ValueError, match="not compiled"):
        NSA.TopKReduction(*tensors, k_value=3).execute(*tensors)


@pytest.mark.parametrize("name", [name for name in registry.compiled() if name.startswith("nsa_")])
def test_the_kernels_of_usual_calls_are_known(name: str) -> None:
    """Those that ``cudnn cache warm`` compiles."""
    preset = registry.aot_preset(name)
    for shape in preset.shapes:
        operation = list(preset.objects("bf16", shape, "sm_90a"))
        assert operation
        for api in operation:
            assert api.check_support()
            assert len(api.kernels()) == 1


def compression_call(queries: int, keys: int, d: int = 64, key_heads: int = 1) -> dict[str, Any]:
    """Two sequences of one length, two heads of Q for one of K."""
    names = {"q_tensor": (queries, 2 * key_heads), "k_tensor": (keys, key_heads), "v_tensor": (keys, key_heads)}
    return {n: torch.randn(2, rows, heads, d).half().transpose(1, 2) for n, (rows, heads) in names.items()}


def compressed(call: dict[str, Any], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp in float64."""
    q, k, v = (call[f"{name}_tensor"].double() for name in "qkv")
    ratio = q.shape[2] // k.shape[2]
    seen = torch.arange(k.shape[2]) < (torch.arange(q.shape[2])[:, None] + 1) // ratio
    actual = attend(q, k, v, seen, scale=scale)
    return actual.o, actual.lse


@pytest.mark.parametrize(
    ("queries", "keys", "d", "packed", "arch"),
    brief(
        [
            (100, 24, 64, False, ""),
            (100, 24, 64, True, ""),
            on_gpu(100, 24, 64, True),
            on_gpu(70, 70, 128, False),
            on_gpu(400, 200, 32, False),
            (100, 24, 64, True, "sm_90a"),
            (70, 70, 128, False, "sm_90a"),
            (400, 200, 32, False, "sm_90a"),
            (300, 280, 64, True, "sm_90a"),
            (100, 24, 64, True, "sm_100a"),
            (70, 70, 128, False, "sm_100a"),
            (400, 200, 32, False, "sm_100a"),
            (300, 280, 64, True, "sm_100a"),
        ],
        0,
        1,
        2,
        3,
        4,
    ),
)
def test_compression_sees_complete_keys(queries: int, keys: int, d: int, packed: bool, arch: str) -> None:
    call = compression_call(queries, keys, d)
    o, lse = compressed(call, 0.125 * 1.5)
    options = {"scale_softmax": 0.125, "scale_q": 1.5, "scale_v": 2.0, "inv_scale_o": 0.25, "enable_lse": True}
    if packed:
        call = {name: flat(x) for name, x in call.items()}
        o, lse = flat(o), lse.transpose(1, 2).flatten(0, 1)[..., None]
        for name, rows in (("q", queries), ("k", keys)):
            options[f"cum_seqlen_{name}_tensor"] = torch.arange(3) * rows  # int64
    actual, found_lse = there(arch, NSA.compression_attention_wrapper, **call, **options)
    torch.testing.assert_close(actual.double(), 0.5 * o, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "result", "d", "packed", "arch"),
    brief(
        [
            (E4M3, torch.float16, 64, True, ""),
            (torch.bfloat16, E4M3, 32, False, ""),
            on_gpu(E4M3, E4M3, 128, False),
            on_gpu(E4M3, torch.bfloat16, 64, True),
            on_gpu(torch.float16, E4M3, 32, False),
            (E4M3, E4M3, 32, True, "sm_90a"),
            (E4M3, torch.bfloat16, 64, True, "sm_100a"),
            (torch.float16, E4M3, 32, False, "sm_90a"),
            (E4M3, E4M3, 128, False, "sm_90a"),
            (torch.bfloat16, torch.float16, 64, False, "sm_90a"),
            (E4M3, torch.float16, 128, False, "sm_90a"),
            (E4M3, torch.bfloat16, 64, True, "sm_90a"),
            (E4M3, E4M3, 32, True, "sm_100a"),
            (E4M3, torch.float16, 128, False, "sm_100a"),
            (torch.float16, E4M3, 64, True, "sm_100a"),
            (torch.bfloat16, torch.float16, 32, False, "sm_100a"),
        ],
        0,
        1,
        2,
        3,
        4,
        5,
        6,
    ),
)
def test_compression_of_8_bits_and_to_another_type(
    kind: torch.dtype, result: torch.dtype, d: int, packed: bool, arch: str
) -> None:
    """Values beyond the largest of 8 bits are rounded to that."""
    call = {name: x.to(kind) for name, x in compression_call(300, 140, d).items()}
    o, lse = compressed({name: x.double() for name, x in call.items()}, 0.125 * 1.5)
    options = {"scale_softmax": 0.125, "scale_q": 1.5, "scale_v": 500.0, "enable_lse": True, "o_dtype": result}
    if packed:
        call = {name: flat(x) for name, x in call.items()}
        o, lse = flat(o), lse.transpose(1, 2).flatten(0, 1)[..., None]
        for name, rows in (("q", 300), ("k", 140)):
            options[f"cum_seqlen_{name}_tensor"] = torch.arange(3) * rows
    actual, found_lse = there(arch, NSA.compression_attention_wrapper, **call, **options)
    assert actual.dtype is result
    assert actual.stride() == call["q_tensor"].stride()
    expected = (500 * o).clamp(-torch.finfo(result).max, torch.finfo(result).max)
    eps = max(torch.finfo(x).eps for x in (kind, result))
    assert (actual.double() - expected).norm() <= 0.4 * eps * expected.norm()
    assert (expected.abs() == 448).any() == (result is E4M3)
    torch.testing.assert_close(found_lse.double(), lse, atol=1e-2 if kind is E4M3 else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", brief(["", "sm_90a"], 0))
def test_compression_without_the_log_sum_exp_and_with_other_factors(arch: str) -> None:
    call = compression_call(40, 10)
    tensors = (*call.values(), torch.empty_like(call["q_tensor"]))
    with within(arch):
        attention = NSA.CompressionAttention(*tensors)
        with pytest.raises(ValueError, match="not compiled"):
            attention.execute(*tensors)
        attention.compile()
        attention.execute(*tensors, scale_k=2.0, inv_scale_o=4.0)
    torch.testing.assert_close(tensors[-1].double(), 4 * compressed(call, 0.25)[0], atol=1e-2, rtol=2e-3)


def test_compression_of_more_sequences_than_it_was_made_for() -> None:
    """The workspace is as large as the call needs: short sequences have more tiles than their rows fill."""

    def call(sequences: int) -> list[Any]:
        q, k = torch.randn(3 * sequences, 1, 64).half(), torch.randn(sequences, 1, 64).half()
        ends = torch.arange(sequences + 1, dtype=torch.int32)
        return [q, k, k, torch.empty_like(q), None, 3 * ends, ends]

    few, many = call(1), call(60)
    with within("sm_90a"):
        attention = NSA.CompressionAttention(*few)
        attention.compile()
        attention.execute(*many)
    expected = NSA.compression_attention_wrapper(*many[:3], *many[5:])["o_tensor"]
    torch.testing.assert_close(many[3], expected, atol=2e-3, rtol=2e-3)


def test_packed_values_of_rows_may_have_any_strides() -> None:
    call = {name: flat(x) for name, x in compression_call(40, 10).items()}
    ends = [torch.arange(3, dtype=torch.int32) * rows for rows in (40, 10)]
    results = []
    for lse in (torch.empty(80, 2), torch.empty(2, 80, 1).transpose(0, 1)):
        tensors = (*call.values(), torch.empty_like(call["q_tensor"]), lse)
        attention = NSA.CompressionAttention(*tensors, *ends)
        attention.compile()
        attention.execute(*tensors, *ends)
        results.append(lse.reshape(80, 2))
    assert torch.equal(*results)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1, 3, 1)])
def test_offsets_may_have_dimensions_of_one_element(shape: tuple[int, ...]) -> None:
    """In all parts; the log-sum-exp of selection is 0, its gradients are only compared with each other."""
    q, k, v = (torch.randn(rows, heads, 64).half() for rows, heads in ((80, 2), (20, 1), (20, 1)))
    kv, blocks, counts = torch.randn(80, 1, 64).half(), torch.zeros(80, 1, 2).int(), torch.ones(80, 1).int()
    sizes = {"k_value": 4, "selection_block_size": 16, "compress_stride": 4}

    def results(*ends: torch.Tensor) -> list[torch.Tensor]:
        o, lse = NSA.compression_attention_wrapper(q, k, v, *ends, enable_lse=True)
        lists = {"block_indices_tensor": blocks, "block_counts_tensor": counts, "cum_seqlen_q_tensor": ends[0]}
        actual = (
            NSA.compression_attention_backward_wrapper(q, k, v, o, o, lse, *ends),
            NSA.topk_reduction_wrapper(q, k, lse, *ends, **sizes),
            NSA.compression_top_k_wrapper(q, k, v, *ends, **sizes),
            NSA.selection_attention_wrapper(q, kv, kv, blocks, counts, *ends[:1] * 2, block_size=16),
            NSA.selection_attention_backward_wrapper(q, kv, kv, o, o, 0 * lse, **lists, block_size=16),
        )
        return [o, lse, *(x for arguments in actual for x in arguments)]

    ends = [torch.arange(3, dtype=torch.int32) * rows for rows in (40, 10)]
    torch.testing.assert_close(results(*(x.view(shape) for x in ends)), results(*ends), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale_q": 0.0}, ValueError, "scale_q"),
        ({"scale_k": math.nan}, ValueError, "scale_k"),
        ({"qk_acc_dtype": torch.float16}, ValueError, "qk_acc_dtype"),
        ({"mma_tiler_mn": (64, 64)}, ValueError, "mma_tiler_mn"),
        ({"o_dtype": torch.float32}, ValueError, "o tensor dtype"),
        ({"q_tensor": torch.zeros(2, 40, 2, 64).half().transpose(1, 2).float()}, ValueError, "q tensor dtype"),
        ({f"{name}_tensor": torch.zeros(2, 1, 40, 48).half() for name in "qkv"}, ValueError, "head size"),
    ],
)
def test_what_compression_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NSA.compression_attention_wrapper(**{**compression_call(40, 10), **change})


@pytest.mark.parametrize(
    ("queries", "keys", "d", "packed", "arch"),
    brief(
        [
            (100, 24, 64, False, ""),
            (100, 24, 64, True, ""),
            on_gpu(150, 40, 64, True),
            on_gpu(70, 70, 128, False),
            (150, 40, 64, True, "sm_90a"),
            (70, 70, 128, False, "sm_90a"),
            (300, 150, 128, True, "sm_90a"),
            (130, 4, 64, False, "sm_90a"),
            (150, 40, 64, True, "sm_100a"),
            (70, 70, 128, False, "sm_100a"),
            (300, 150, 128, True, "sm_100a"),
            (130, 4, 64, False, "sm_100a"),
        ],
        0,
        1,
        2,
        3,
    ),
)
def test_compression_backward(queries: int, keys: int, d: int, packed: bool, arch: str) -> None:
    call = compression_call(queries, keys, d, key_heads=2)
    of = {name: x.double().requires_grad_() for name, x in call.items()}
    o, lse = compressed(of, d**-0.5)
    d_o = torch.randn(2, queries, 4, d).half().transpose(1, 2)
    expected = torch.autograd.grad(o, list(of.values()), d_o.double())
    arguments = {**call, "o_tensor": o.detach().half().transpose(1, 2).contiguous().transpose(1, 2), "do_tensor": d_o}
    lse, ends = lse.detach().float(), {}
    if packed:
        arguments, lse = {name: flat(x) for name, x in arguments.items()}, lse.transpose(1, 2).flatten(0, 1)[..., None]
        ends = {f"cum_seqlen_{name}_tensor": torch.arange(3).int() * n for name, n in (("q", queries), ("k", keys))}
    actual = there(arch, NSA.compression_attention_backward_wrapper, **arguments, lse_tensor=lse, **ends)
    for gradient, requested in zip(actual, expected, strict=True):
        requested = flat(requested) if packed else requested
        assert (gradient.double() - requested).norm() < 2e-3 * requested.norm()
