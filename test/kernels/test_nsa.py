"""The kernels of native sparse attention in the emulator, with races detected, against float64 loops."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from cudnn.native_sparse_attention.selection.csr_transpose import transpose_selection
from cudnn_kernels import compiler, fakes
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import (
    TILE_COUNT_SEMAPHORE,
    CompressionTopKConfiguration,
    GatedSelectionConfiguration,
    SelectionBackwardConfiguration,
    SelectionConfiguration,
    SelectionKVOuterConfiguration,
    TopKConfiguration,
)
from cudnn_kernels.signature import workspace_size
from support.dense_attention import Attended, attend, attend_selected, band, times_seen
from support.selection import brief

ptx_emulator = pytest.importorskip("ptx_emulator")


@functools.lru_cache(maxsize=8)
def compiled(arch: str, configuration: Any) -> Any:
    """An architecture's kernel for the emulator."""
    module, kernel = ARCHITECTURES[arch].source(configuration).split(":")
    with ptx_emulator.emulate(arch):
        made = getattr(importlib.import_module(module), kernel)(configuration)
        return compiler.compile_for(arch, made, *fakes.arguments(configuration))


def run(configuration: Any, inputs: dict[str, Any], arch: str = "sm_90a") -> None:
    """Runs an architecture's kernel in the emulator."""
    function = compiled(arch, configuration)
    with ptx_emulator.emulate(arch, races=True):
        function(*(inputs[slot.name] for slot in configuration.slots()))


@dataclass(frozen=True)
class Choice:
    """Rows select up to ``num_blocks`` blocks of their sequence. ``spare`` rows behind the last one belong to none."""

    lengths: tuple[int, ...]
    num_blocks: int
    spare: int = 3


def selection_inputs(c: SelectionConfiguration, choice: Choice) -> dict[str, Any]:
    """Random tensors, different lists of blocks for all rows, some twice in a list, and results of NaN."""
    rows, dtype = sum(choice.lengths) + choice.spare, getattr(torch, c.dtype)
    inputs: dict[str, Any] = {
        "q": torch.randn(rows, c.heads, c.head_dim).to(dtype),
        "k": torch.randn(rows, c.key_heads, c.head_dim).to(dtype),
        "v": torch.randn(rows, c.key_heads, c.head_dim_v).to(dtype),
        "scale_softmax": 1.3 / math.sqrt(c.head_dim),
        "stream": 0,
        "lse": torch.full((rows, c.heads), math.nan),
        "num_sms": 3,
        "o": torch.full((rows, c.heads, c.head_dim_v), math.nan, dtype=dtype),
        "l": torch.full((rows, c.heads), math.nan),
        "m": torch.full((rows, c.heads), math.nan),
        "cum_seqlen_q": torch.tensor([0, *choice.lengths]).cumsum(0).to(torch.int32),
        "workspace": torch.full((workspace_size([TILE_COUNT_SEMAPHORE], {}),), 77, dtype=torch.uint8),
    }
    indices = torch.full((rows, c.key_heads, choice.num_blocks), 1 << 20, dtype=torch.int32)
    counts = torch.zeros(rows, c.key_heads, dtype=torch.int32)
    for first, last in pairwise(inputs["cum_seqlen_q"].tolist()):
        blocks = -(-(last - first) // c.block)
        for row in range(first, last):
            for head in range(c.key_heads):
                count = int(torch.randint(0, choice.num_blocks + 1, ()))
                indices[row, head, :count] = torch.randint(0, blocks, (count,)).int()
                counts[row, head] = count
    last = int(inputs["cum_seqlen_q"][-1])
    indices[last - 1, 0, :3] = torch.tensor([-1, 1 << 28, 0], dtype=torch.int32)  # two that do not exist
    counts[last - 1, 0] = choice.num_blocks + 5
    for name in "qkv":
        inputs[name][last:] = math.nan
    if isinstance(c, SelectionConfiguration) and c.lse:
        indices.masked_fill_(torch.arange(choice.num_blocks) >= counts[..., None], -1)
    return {**inputs, "block_indices": indices, "block_counts": counts}


def assert_selected(inputs: dict[str, Any], c: SelectionConfiguration, *_: Any) -> None:
    """Over the keys that are in the rows' blocks. Spare rows are left alone."""
    rows = int(inputs["cum_seqlen_q"][-1])
    assert inputs["o"][rows:].isnan().all()
    expected = selected(c, inputs, *(inputs[x][:rows].double() for x in "qkv"))
    o, *actual = (inputs[x][:rows].double().transpose(0, 1) for x in ("o", *(x.name for x in c.sums)))
    if c.lse:
        torch.testing.assert_close(actual[0], expected.lse, rtol=1e-5, atol=1e-5)
    else:
        total = (expected.lse - expected.largest).exp().nan_to_num(0.0)
        torch.testing.assert_close(actual[0], total, rtol=1e-4, atol=0)
        torch.testing.assert_close(actual[1], expected.largest, rtol=1e-5, atol=1e-5)
    error = (o - expected.o).norm(dim=2)
    assert bool((error <= 2 * torch.finfo(inputs["o"].dtype).eps * expected.o.norm(dim=2) + 1e-6).all())


def selected(c: SelectionConfiguration, inputs: dict[str, Any], *qkv: torch.Tensor) -> Attended:
    """What the rows' lists lead to."""
    rows, lists = len(qkv[0]), (inputs["block_indices"], inputs["block_counts"])
    times = times_seen(*(x[:rows] for x in lists), inputs["cum_seqlen_q"], c.block, c.causal)
    return attend_selected(*qkv, times, inputs["scale_softmax"])


@pytest.mark.parametrize(
    ("c", "choice"),
    brief(
        [
            (SelectionConfiguration("float16", 8, 2, 64, 64, 16), Choice((2, 0, 20), 7)),
            (SelectionConfiguration("float16", 32, 2, 128, 128, 16), Choice((10, 0, 50), 40)),
            (SelectionConfiguration("bfloat16", 16, 1, 128, 128, 64, stages=3), Choice((100,), 4)),
            (SelectionConfiguration("bfloat16", 6, 2, 64, 64, 32), Choice((100, 30), 40)),
            (SelectionConfiguration("float16", 4, 1, 192, 128, 64, stages=3), Choice((70,), 3)),
            (SelectionConfiguration("bfloat16", 1, 1, 256, 256, 64, tile=(128, 64), stages=2), Choice((100,), 3)),
            (SelectionConfiguration("bfloat16", 24, 1, 64, 64, 128, causal=True), Choice((3, 70), 3)),
            (SelectionConfiguration("bfloat16", 24, 1, 64, 64, 128), Choice((150,), 3)),
            (SelectionConfiguration("float16", 80, 1, 64, 64, 16, causal=True), Choice((30,), 3)),
        ],
        0,
        6,
    ),
)
@pytest.mark.parametrize("arch", brief(["sm_90a", "sm_100a"], 0))
def test_selection(c: SelectionConfiguration, choice: Choice, arch: str) -> None:
    inputs = selection_inputs(c, choice)
    run(c, inputs, arch)
    assert_selected(inputs, c)


def gated_inputs(c: GatedSelectionConfiguration, choice: Choice, window: int) -> dict[str, Any]:
    """Those of selection, compression's O and gates, and more results of NaN."""
    inputs = selection_inputs(c, choice)
    lse = torch.full((len(choice.lengths), c.heads, max(choice.lengths)), math.nan)
    return inputs | {
        "compressed": torch.randn_like(inputs["o"]),
        "windowed": inputs["o"].clone(),
        "selected": inputs["o"].clone(),
        "gates": torch.rand(*inputs["o"].shape[:2], 3).to(getattr(torch, c.gates)),
        "windowed_lse": lse,
        "window": window,
    }


def assert_gated(inputs: dict[str, Any], c: GatedSelectionConfiguration, *_: Any) -> None:
    """The sum of branches that were rounded, and those that the kernel computes. Spare rows are left alone."""
    rows, eps = int(inputs["cum_seqlen_q"][-1]), torch.finfo(inputs["o"].dtype).eps
    for number, (first, last) in enumerate(pairwise(inputs["cum_seqlen_q"].tolist())):
        q, k, v, windowed = (inputs[x][first:last].double().transpose(0, 1) for x in ("q", "k", "v", "windowed"))
        seen = band(last - first, last - first, inputs["window"] - 1, 0)
        expected = attend(q, k, v, seen, scale=inputs["scale_softmax"])
        error = (windowed - expected.o).norm(dim=2)
        assert bool((error <= 2 * eps * expected.o.norm(dim=2) + 1e-6).all())
        lse = inputs["windowed_lse"][number].double()
        assert lse[:, last - first if c.save_for_backward else 0 :].isnan().all()
        if c.save_for_backward:
            torch.testing.assert_close(lse[:, : last - first], expected.lse, rtol=1e-5, atol=1e-5)
    own = selected(c, inputs, *(inputs[x][:rows].double() for x in "qkv")).o.transpose(0, 1)
    if c.save_for_backward:
        assert_selected({**inputs, "o": inputs["selected"]}, c)
        own = inputs["selected"][:rows].double()
    branches = (inputs["compressed"][:rows].double(), own, inputs["windowed"][:rows].double())
    gates = inputs["gates"][:rows].double().unbind(-1)
    expected = sum(x * g[..., None] for x, g in zip(branches, gates, strict=True))
    slack = eps * expected.abs() + (
        0 if c.save_for_backward else 3 * eps * own.norm(dim=2, keepdim=True)
    )  # its O was rounded
    assert bool(((inputs["o"][:rows].double() - expected).abs() <= slack + 1e-6).all())
    assert inputs["o"][rows:].isnan().all()


GATED = GatedSelectionConfiguration("bfloat16", 8, 2, 64, 64, 16)


@pytest.mark.parametrize(
    ("c", "choice", "window"),
    brief(
        [
            (replace(GATED, dtype="float16", gates="float32"), Choice((2, 0, 20), 7), 1),
            (replace(GATED, heads=24, block=32, causal=True, save_for_backward=True), Choice((60, 7), 4), 37),
            (
                replace(GATED, heads=16, key_heads=1, head_dim=128, head_dim_v=128, block=64, stages=3),
                Choice((100,), 4),
                80,
            ),
            (replace(GATED, heads=4, block=128, save_for_backward=True), Choice((7, 150), 3), 400),
            (replace(GATED, heads=80, key_heads=1, causal=True, save_for_backward=True), Choice((30,), 3), 12),
            (replace(GATED, heads=2, head_dim=256, head_dim_v=256, tile=(128, 64), stages=2), Choice((90,), 3), 20),
        ],
        0,
        1,
        2,
    ),
)
@pytest.mark.parametrize("arch", brief(["sm_90a", "sm_100a"], 0))
def test_gated_selection(c: GatedSelectionConfiguration, choice: Choice, window: int, arch: str) -> None:
    inputs = gated_inputs(c, choice, window)
    run(c, inputs, arch)
    assert_gated(inputs, c)


@pytest.mark.parametrize(
    ("c", "choice"),
    brief(
        [
            (SelectionConfiguration("bfloat16", 16, 1, 64, 64, 16, causal=True), Choice((3, 40), 40)),
            (SelectionConfiguration("float16", 24, 2, 192, 128, 64, stages=3), Choice((70,), 3)),
            (SelectionConfiguration("float16", 16, 1, 128, 128, 128, out_dtype="bfloat16"), Choice((40,), 3)),
            (SelectionConfiguration("float16", 9, 1, 64, 64, 32, tile=(128, 64)), Choice((2, 0, 70), 4)),
            (GatedSelectionConfiguration("bfloat16", 16, 1, 128, 128, 64, save_for_backward=True), Choice((60,), 4)),
            (GatedSelectionConfiguration("float16", 16, 1, 64, 64, 16, gates="float32"), Choice((30, 7), 4)),
        ],
        0,
        4,
    ),
)
def test_rows_one_by_one(c: SelectionConfiguration, choice: Choice) -> None:
    """On Hopper, whatever rows share."""
    c = replace(c, single_query_threshold=1000)
    gated = isinstance(c, GatedSelectionConfiguration)
    inputs = gated_inputs(c, choice, 9) if gated else selection_inputs(c, choice)
    inputs["o"] = inputs["o"].to(getattr(torch, c.out_dtype or c.dtype))
    run(c, inputs)
    (assert_gated if gated else assert_selected)(inputs, c)


@pytest.mark.parametrize("apart", brief([0, 1000], 0))
def test_scores_that_exceed_what_was_subtracted(apart: int) -> None:
    """By far, from block to block: a guess that does not fit is noticed, and what came before counts as it should."""
    c = SelectionConfiguration(
        "bfloat16", 16, 1, 64, 64, 64, causal=True, stages=3, single_query_threshold=apart, lse=True
    )
    inputs = selection_inputs(c, Choice((150,), 3, spare=0))
    inputs["q"].fill_(1.0)
    for block, most in enumerate((-400, 5, 400)):
        inputs["k"][block * 64 : block * 64 + 64] = most / 8 / c.head_dim**0.5
    inputs["block_indices"].copy_(torch.tensor([0, 1, 2]))
    inputs["block_counts"].fill_(3)
    run(c, inputs)
    assert_selected(inputs, c)


def by_blocks_inputs(c: SelectionKVOuterConfiguration, choice: Choice, first: int, some: int) -> dict[str, Any]:
    """Those of selection, its lists turned around, and memory of NaN for what rows have of blocks of some heads."""
    inputs = selection_inputs(SelectionConfiguration(*astuple(c)[:6], causal=c.causal), choice)
    lists = [inputs[x] for x in ("block_indices", "block_counts", "cum_seqlen_q")]
    entries = lists[0].shape[0] * lists[0].shape[2] * some
    turned = transpose_selection(*lists, c.block, c.causal, c.list_chunk, True)
    return (
        inputs
        | dict(zip(("query_indices", "query_offsets", "entry_positions"), turned, strict=True))
        | {
            "o_partial": torch.full((entries, c.group, c.head_dim_v), math.nan, dtype=inputs["o"].dtype),
            "partial_stats": torch.full((entries, c.group, 2), math.nan),
            "first_head": first,
            "some_heads": some,
        }
    )


def assert_by_blocks(inputs: dict[str, Any], c: SelectionKVOuterConfiguration, *_: Any) -> None:
    """As selection by rows, of the heads that the call has; others are left alone."""
    first, some = inputs["first_head"], inputs["some_heads"]
    heads = slice(first * c.group, (first + some) * c.group)
    for name in "olm":
        assert inputs[name][:, : heads.start].isnan().all()
        assert inputs[name][:, heads.stop :].isnan().all()
    keys = {x: inputs[x][:, first : first + some] for x in ("k", "v", "block_indices", "block_counts")}
    own = {**inputs, **{x: inputs[x][:, heads] for x in "qolm"}, **keys}
    plain = SelectionConfiguration(c.dtype, some * c.group, some, *astuple(c)[3:7])
    assert_selected(own, plain)


@pytest.mark.parametrize(
    ("c", "choice", "heads"),
    brief(
        [
            (SelectionKVOuterConfiguration("float16", 6, 3, 64, 64, 16, list_chunk=16), Choice((2, 0, 30), 7), (1, 1)),
            (
                SelectionKVOuterConfiguration("bfloat16", 8, 2, 128, 128, 64, True, list_chunk=64),
                Choice((100,), 3),
                (0, 2),
            ),
            (SelectionKVOuterConfiguration("bfloat16", 2, 2, 64, 64, 64, True), Choice((3, 130), 40), (0, 2)),
            (
                SelectionKVOuterConfiguration("float16", 3, 1, 64, 64, 32, True, list_chunk=32),
                Choice((70, 7), 5),
                (0, 1),
            ),
        ],
        0,
        1,
    ),
)
def test_selection_by_blocks(c: SelectionKVOuterConfiguration, choice: Choice, heads: tuple[int, int]) -> None:
    """A number of heads of K, from head 1 on."""
    inputs = by_blocks_inputs(c, choice, *heads)
    run(c, inputs)
    assert_by_blocks(inputs, c)


@pytest.mark.parametrize("shared", [False, True])
def test_which_rows_are_taken_one_by_one(shared: bool) -> None:
    """Those that share few blocks: sums are in another order then."""
    c = SelectionConfiguration("bfloat16", 16, 1, 64, 64, 64)
    inputs, actual = selection_inputs(c, Choice((132,), 3, spare=0)), {}
    inputs["block_counts"].fill_(1)
    inputs["block_indices"].copy_((torch.arange(132) % (1 if shared else 3))[:, None, None])
    for limit in (12, 0, 1000):
        run(replace(c, single_query_threshold=limit), inputs)
        assert_selected(inputs, c)
        actual[limit] = inputs["l"].clone()
    default, together, apart = actual.values()
    assert torch.equal(default, together if shared else apart)
    assert not torch.equal(together, apart)


@dataclass(frozen=True)
class Ranking:
    """``lengths`` are (queries, compressed keys) of each sequence."""

    lengths: tuple[tuple[int, int], ...]


def top_k_inputs(c: TopKConfiguration, ranking: Ranking) -> dict[str, Any]:
    """Random tensors, every other block of a sequence like the second one, and results of NaN and 77."""
    (queries, keys), dtype = zip(*ranking.lengths, strict=True), getattr(torch, c.dtype)
    rows, batch = (sum(queries), sum(keys)), len(queries)

    def made(rows: int, width: int, heads: int) -> torch.Tensor:
        x = torch.randn(rows, heads, width)
        return x if c.varlen else x.unflatten(0, (batch, -1)).transpose(1, 2)

    k, share, first = made(rows[1], c.head_dim, c.key_heads).to(dtype), c.block // c.stride, 0
    for index, count in enumerate(keys):
        part = k[first : first + count] if c.varlen else k[index].transpose(0, 1)
        for block in range(3, count // share, 2):
            part[block * share : (block + 1) * share] = part[share : 2 * share]
        first += count
    lse = made(rows[0], 1, c.heads)[..., 0] - 8
    scores, indices = (made(rows[0], width, c.key_heads) for width in (c.count, c.num_fixed + c.count))
    return {
        "q": made(rows[0], c.head_dim, c.heads).to(dtype),
        "k": k,
        "lse": -lse * math.log(2) if c.full_list else lse,
        "topk_scores": torch.full_like(scores, math.nan),
        "topk_indices": torch.full_like(indices, 77).int(),
        "cum_seqlen_q": torch.tensor([0, *queries]).cumsum(0).int(),
        "scale_softmax": 1.3 / math.sqrt(c.head_dim),
        "cum_seqlen_k": torch.tensor([0, *keys]).cumsum(0).int(),
        "stream": 0,
    }


def assert_ranked(inputs: dict[str, Any], c: Any, ranking: Ranking, ties: bool = True) -> None:
    """Each row: its scores, that each block has its score, and that blocks of equal scores ascend.

    Without scores, the blocks must have the best scores.
    """
    share, found_any = c.block // c.stride, 0
    for index, (queries, keys) in enumerate(ranking.lengths):
        parts = {}
        for name in {"q", "k", "lse", "topk_scores", "topk_indices"} & inputs.keys():
            ends = inputs["cum_seqlen_k" if name == "k" else "cum_seqlen_q"].tolist()
            x = inputs[name]
            parts[name] = x[ends[index] : ends[index + 1]].transpose(0, 1) if c.varlen else x[index]
        for row in range(queries):
            for head in range(c.key_heads):
                heads = slice(head * c.group, (head + 1) * c.group)
                logits = inputs["scale_softmax"] * parts["q"][heads, row].double() @ parts["k"][head].double().mT
                factor = -1 if c.full_list else math.log(2)
                p = (logits + factor * parts["lse"][heads, row].double()[:, None]).exp().sum(0)
                blocks = range(1, min((row + 1) // c.block - 2, -(-keys // share)))
                scores = {b: float(p[b * share : (b + 1) * share].sum()) for b in blocks}
                best = sorted(scores.values(), reverse=True)[: c.count]
                missing = c.count - len(best)
                expected = torch.tensor(best + [-math.inf] * missing)
                listed = parts["topk_indices"][head, row].tolist()
                always, top_k = listed[: c.num_fixed], listed[c.num_fixed :]
                own = torch.tensor([scores[b] for b in top_k[: len(best)]] + [-math.inf] * missing)
                actual = parts["topk_scores"][head, row] if "topk_scores" in parts else own
                newest = range(max((row + 1) // c.block - 2, 1), row // c.block + 1)
                assert always == ([0, *newest, *[-1] * (3 - len(newest))] if c.full_list else [])
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)
                assert top_k[len(best) :] == [-1] * missing
                assert len(set(top_k)) == len(best) + (missing > 0)
                torch.testing.assert_close(actual, own, rtol=1e-4, atol=0)
                equal = [b for b in blocks if b % 2 and b < keys // share] if ties else []
                listed = [b for b in top_k if b in equal]
                assert listed == equal[: len(listed)]
                found_any += len(best)
    assert found_any


RANK = TopKConfiguration("float16", 32, 2, 64, 3, 16, 8, varlen=True)


@pytest.mark.parametrize(
    ("c", "ranking"),
    brief(
        [
            (replace(RANK, full_list=True, stages=2, ctas=2), Ranking(((10, 1), (0, 0), (150, 17)))),
            (
                replace(RANK, heads=12, head_dim=128, varlen=False, count=2, block=4, stride=4),
                Ranking(((150, 140), (150, 140))),
            ),
            (replace(RANK, heads=3, key_heads=1, head_dim=64, block=12, stride=4), Ranking(((500, 125),))),
            (
                replace(RANK, heads=1, key_heads=1, head_dim=256, count=32, block=2, stride=1, tile=(128, 64)),
                Ranking(((200, 190),)),
            ),
            (
                replace(RANK, heads=4, key_heads=2, head_dim=192, dtype="bfloat16", tile=(128, 64)),
                Ranking(((200, 25),)),
            ),
            (replace(RANK, heads=40, key_heads=2, count=40, block=2, stride=1), Ranking(((10, 9), (120, 118)))),
            (replace(RANK, heads=64, key_heads=1, block=4, stride=2), Ranking(((60, 29),))),
            (replace(RANK, heads=100, key_heads=1, block=4, stride=2), Ranking(((40, 19),))),
        ],
        0,
    ),
)
@pytest.mark.parametrize("arch", brief(["sm_90a", "sm_100a"], 0))
def test_top_k(c: TopKConfiguration, ranking: Ranking, arch: str) -> None:
    inputs = top_k_inputs(c, ranking)
    run(c, inputs, arch)
    assert_ranked(inputs, c, ranking)


SPARE = 3  # rows, and keys, that belong to no sequence


def one_pass_inputs(c: CompressionTopKConfiguration, ranking: Ranking) -> dict[str, Any]:
    """Those of top-k, values, and results of NaN and 77."""
    inputs = top_k_inputs(replace(RANK, **{x: getattr(c, x) for x in vars(RANK).keys() & vars(c).keys()}), ranking)
    inputs["v"] = torch.randn(len(inputs["k"]), c.key_heads, c.head_dim_v).to(inputs["k"].dtype)
    for name in "qkv":
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, 0, 0, 0, 0, SPARE), value=math.nan)
    rows = len(inputs["q"])
    del inputs["topk_scores"]
    return inputs | {
        "o": torch.full((rows, c.heads, c.head_dim_v), math.nan, dtype=inputs["q"].dtype),
        "num_sms": 5,
        "lse": torch.full((rows, c.heads), math.nan),
        "topk_indices": torch.full((rows, c.key_heads, c.num_fixed + c.count), 77, dtype=torch.int32),
    }


def assert_one_pass(inputs: dict[str, Any], c: CompressionTopKConfiguration, ranking: Ranking) -> None:
    """O and LSE of compression attention, and the lists that they lead to. Spare rows are left alone."""
    rows = len(inputs["q"]) - SPARE
    assert inputs["o"][rows:].isnan().all()
    assert inputs["lse"][rows:].isnan().all()
    assert (inputs["topk_indices"][rows:] == 77).all()
    ends = (pairwise(inputs[f"cum_seqlen_{x}"].tolist()) for x in "qk")
    for (first, last), (first_key, last_key) in zip(*ends, strict=True):
        q, o = (inputs[x][first:last].double().transpose(0, 1) for x in "qo")
        k, v = (inputs[x][first_key:last_key].double().transpose(0, 1) for x in "kv")
        ratio = max((last - first) // max(last_key - first_key, 1), 1)
        seen = torch.arange(last_key - first_key) < (torch.arange(last - first)[:, None] + 1) // ratio
        expected = attend(q, k, v, seen, scale=inputs["scale_softmax"])
        torch.testing.assert_close(inputs["lse"][first:last].double().T, expected.lse, rtol=1e-5, atol=1e-5)
        error = (o - expected.o).norm(dim=2)
        assert bool((error <= 2 * torch.finfo(inputs["q"].dtype).eps * expected.o.norm(dim=2) + 1e-6).all())
    assert_ranked(inputs, c, ranking)


SMALL = CompressionTopKConfiguration("float16", 32, 2, 64, 64, 3, 16, 8)


@pytest.mark.parametrize(
    ("c", "ranking"),
    brief(
        [
            (replace(SMALL, heads=16, key_heads=1, tile=(192, 64), block=4, stride=2), Ranking(((40, 20), (0, 0)))),
            (SMALL, Ranking(((10, 1), (0, 0), (150, 17), (30, 0)))),
            (replace(SMALL, head_dim=128, head_dim_v=128, dtype="bfloat16", block=4, stride=4), Ranking(((280, 70),))),
            (replace(SMALL, heads=12, block=4, stride=2, count=60), Ranking(((40, 20), (150, 75)))),
            (replace(SMALL, heads=2, block=12, stride=4), Ranking(((270, 67),))),
            (replace(SMALL, heads=40, count=40, block=2, stride=1), Ranking(((10, 9), (90, 88)))),
            (replace(SMALL, heads=64, key_heads=1, block=4, stride=2), Ranking(((60, 29),))),
            (replace(SMALL, tile=(192, 64), block=8), Ranking(((270, 33),))),
        ],
        0,
    ),
)
@pytest.mark.parametrize("arch", brief(["sm_90a", "sm_100a"], 0))
def test_compression_and_top_k_in_one(c: CompressionTopKConfiguration, ranking: Ranking, arch: str) -> None:
    inputs = one_pass_inputs(c, ranking)
    run(c, inputs, arch)
    assert_one_pass(inputs, c, ranking)


def selection_gradients(inputs: dict[str, Any], c: SelectionBackwardConfiguration) -> dict[str, torch.Tensor]:
    """dQ, dK and dV in float64; sets O and LSE."""
    leaves = [inputs[x].double().nan_to_num(0.0).requires_grad_() for x in "qkv"]
    actual = selected(c, inputs, *leaves)
    inputs["o"].copy_(actual.o.detach().transpose(0, 1))
    inputs["lse"].copy_(actual.lse.detach().T)
    gradients = torch.autograd.grad(actual.o, leaves, inputs["do"].double().transpose(0, 1))
    return dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def selection_backward_inputs(c: SelectionBackwardConfiguration, choice: Choice) -> dict[str, Any]:
    """Those forward and its results, lists turned around, gradients of NaN, and what these have to be."""
    inputs = selection_inputs(c, choice)
    inputs["lse"], inputs["do"] = torch.empty_like(inputs["l"]), torch.randn_like(inputs["o"])
    inputs["expected"] = selection_gradients(inputs, c)
    for name in "qkv":
        inputs[f"d{name}"] = torch.full_like(inputs[name], math.nan)
    lists = (inputs["block_indices"], inputs["block_counts"], inputs["cum_seqlen_q"])
    inputs["query_indices"], inputs["query_offsets"] = transpose_selection(*lists, c.block, c.causal, c.list_chunk)
    size = workspace_size(c.slots(), {"s": inputs["q"].shape[0], "list_entries": inputs["query_indices"].shape[0]})
    return {**inputs, "workspace": torch.full((size,), 255, dtype=torch.uint8)}


def assert_differentiated(inputs: dict[str, Any], c: SelectionBackwardConfiguration, *_: Any) -> None:
    """dQ, dK and dV, as a whole."""
    for name, gradient in inputs["expected"].items():
        error = (inputs[name].double() - gradient).norm() / gradient.norm()
        assert error < 4 * torch.finfo(inputs["q"].dtype).eps, name


@pytest.mark.parametrize(
    ("c", "choice"),
    brief(
        [
            (
                SelectionBackwardConfiguration("float16", 16, 1, 64, 64, 64, causal=True, list_chunk=32),
                Choice((70,), 3, spare=0),
            ),
            (SelectionBackwardConfiguration("bfloat16", 32, 2, 128, 128, 64), Choice((40, 0, 100), 4, spare=0)),
            (SelectionBackwardConfiguration("float16", 6, 2, 64, 128, 16, causal=True), Choice((40, 7), 5, spare=0)),
            (
                SelectionBackwardConfiguration("bfloat16", 64, 1, 64, 64, 128, causal=True, list_chunk=64),
                Choice((150,), 3, spare=0),
            ),
            (SelectionBackwardConfiguration("bfloat16", 24, 1, 64, 64, 32), Choice((70,), 3, spare=0)),
            (SelectionBackwardConfiguration("bfloat16", 40, 1, 64, 64, 32), Choice((70,), 3, spare=0)),
            (
                SelectionBackwardConfiguration("bfloat16", 16, 1, 192, 128, 64, causal=True, stages=3, list_chunk=32),
                Choice((70,), 3, spare=0),
            ),
            (
                SelectionBackwardConfiguration("float16", 8, 2, 256, 256, 32, tile=(64, 64), stages=2, list_chunk=32),
                Choice((40,), 3, spare=0),
            ),
        ],
        0,
    ),
)
@pytest.mark.parametrize("arch", brief(["sm_90a", "sm_100a"], 0))
def test_selection_backward(c: SelectionBackwardConfiguration, choice: Choice, arch: str) -> None:
    inputs = selection_backward_inputs(c, choice)
    run(c, inputs, arch)
    assert_differentiated(inputs, c)
