"""cudnn.ops.nsa_attention against one dense computation with masks, its gradients, layouts, and what it refuses."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

import cudnn
from cudnn.native_sparse_attention import decode
from cudnn.native_sparse_attention import gates as gates_module
from cudnn.native_sparse_attention import operator as nsa
from cudnn.native_sparse_attention.gates import nsa_gates, selection_takes_gates
from cudnn.native_sparse_attention.operator import nsa_selection
from cudnn.native_sparse_attention.selection import kv_outer
from cudnn.ops import nsa_attention, nsa_decode
from cudnn.runtime import streams
from cudnn.runtime.run import run
from cudnn_kernels.sm90.heuristics import attention as heuristics
from support.dense_attention import attend, band
from support.selection import ALONE, brief, within

BLOCK, STRIDE, WINDOW = 8, 4, 6
OPTIONS = {"block_size": BLOCK, "compress_stride": STRIDE, "window_size": WINDOW, "selected_blocks": 6}
OPTIONS_16 = {**OPTIONS, "block_size": 16, "compress_stride": 8, "window_size": 37}
"""For types of 16 bits; one set of kernels, which compile for half a minute on a slow machine."""
LENGTHS = (64, 88)
GPU: Any = ALONE[-1]


def moved(call: dict[str, Any], where: str) -> dict[str, Any]:
    """A call's tensors in a place."""
    return {name: x.cuda() if where == "gpu" else x for name, x in call.items()}


def tensors(
    lengths: tuple[int, ...] = LENGTHS,
    heads: tuple[int, int] = (4, 2),
    d: int = 16,
    dtype: torch.dtype = torch.float64,
    stride: int = STRIDE,
) -> dict[str, Any]:
    """Packed arguments of a call: keys are compressed by a mean of theirs and values, those of whole strides."""
    rows = sum(lengths)
    q = torch.randn(rows, heads[0], d, dtype=dtype)
    k, v = (torch.randn(rows, heads[1], d, dtype=dtype) for _ in range(2))
    actual = {"query": q, "key": k, "value": v, "gates": torch.rand(rows, heads[0], 3, dtype=dtype)}
    for name in ("key", "value"):
        parts = (x[: len(x) // stride * stride] for x in actual[name].split(lengths))
        actual[f"compressed_{name}"] = torch.cat([x.unflatten(0, (-1, stride)).mean(1) for x in parts])
    ends, small = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, [n // stride for n in lengths]))
    return {**actual, "cu_seqlens": ends, "cu_seqlens_compressed": small}


def batched(call: dict[str, Any], batch: int) -> dict[str, Any]:
    """The same of sequences of one length, as tensors (batch, heads, rows, size)."""
    return {n: x.unflatten(0, (batch, -1)).transpose(1, 2) for n, x in call.items() if "seqlens" not in n}


def dense(
    call: dict[str, Any], block_indices: torch.Tensor | None = None, options: dict[str, int] = OPTIONS
) -> torch.Tensor:
    """The definition, sequence by sequence and head by head, with one mask for each branch."""
    block, results = options["block_size"], []
    for (first, last), (start, stop) in zip(
        pairwise(call["cu_seqlens"].tolist()), pairwise(call["cu_seqlens_compressed"].tolist()), strict=True
    ):
        q, k, v, gates = (call[x][first:last].double().transpose(0, 1) for x in ("query", "key", "value", "gates"))
        ck, cv = (call[f"compressed_{x}"][start:stop].double().transpose(0, 1) for x in ("key", "value"))
        n, row, blocks = last - first, torch.arange(last - first)[:, None], -(-(last - first) // block)
        by_keys = attend(q, ck, cv, torch.arange(stop - start) < (row + 1) // (n // (stop - start)))
        shares = by_keys.weights.detach().unflatten(0, (len(k), -1)).sum(1)
        lists = (
            [selected_blocks(p, options) for p in shares]
            if block_indices is None
            else block_indices[first:last].unbind(1)
        )
        seen = [torch.zeros(n, blocks + 1).bool().scatter_(1, x.long() % (blocks + 1), True)[:, :-1] for x in lists]
        mask = torch.stack(seen).repeat_interleave(block, 2)[..., :n].tril().repeat_interleave(len(q) // len(k), 0)
        parts = (by_keys.o, attend(q, k, v, mask).o, attend(q, k, v, band(n, n, options["window_size"] - 1, 0)).o)
        results.append(sum(gates[..., i : i + 1] * part for i, part in enumerate(parts)).transpose(0, 1))
    return torch.cat(results)


def selected_blocks(p: torch.Tensor, options: dict[str, int]) -> torch.Tensor:
    """The list of every row, from the probabilities of compressed keys: the first, the newest and the best blocks."""
    n, count, block = p.shape[0], options["selected_blocks"], options["block_size"]
    share, lists = block // options["compress_stride"], torch.full((n, count), -1)
    for row in range(n):
        newest = max((row + 1) // block - 2, 1)
        always = [0, *range(newest, row // block + 1)]
        scores = {b: float(p[row, b * share : (b + 1) * share].sum()) for b in range(1, newest)}
        best = sorted(scores, key=scores.__getitem__, reverse=True)[: count - 4]
        lists[row, : len(always) + len(best)] = torch.tensor(always + best)
    return lists


@pytest.mark.parametrize("arch", brief(["", GPU, "sm_90a"], 0, 1))
def test_half_precision(arch: str) -> None:
    call = tensors((64, 96), (4, 2), 64, torch.float16)
    options = {**OPTIONS, "block_size": 16, "compress_stride": 8}
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    with within(arch, races=False):
        actual = nsa_attention(**moved(call, arch), **options)
    assert actual.dtype is torch.float16
    torch.testing.assert_close(actual.cpu().double(), nsa_attention(**wide, **options), atol=4e-3, rtol=4e-3)


def test_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for compression and top-k where a sequence's compressed keys are one tile of it, and no separate gates
    where selection's takes them.
    """
    names = ("nsa_compression", "nsa_top_k", "nsa_compression_top_k", "nsa_selection", "nsa_gates")
    done: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: (done.append(name), function(*inputs))[1]

    for name in names:
        monkeypatch.setattr(nsa, name, noted(name, getattr(nsa, name)))

    def run(call: dict[str, Any], **options: Any) -> list[str]:
        done.clear()
        nsa_attention(**call, **{**OPTIONS, "block_size": 16, **options})
        return done[:]

    call = tensors((64, 96), (4, 2), 64, torch.float16)
    one, two, rest = ["nsa_compression_top_k"], ["nsa_compression", "nsa_top_k"], ["nsa_selection", "nsa_gates"]
    assert run(call, compress_stride=8) == [*one, *rest]
    assert run(call, block_indices=torch.zeros(160, 2, 1, dtype=torch.int32)) == [two[0], *rest]
    assert run(tensors((160,), (2, 1), 64, torch.float16, stride=1), compress_stride=1) == [*two, *rest]
    two_of_80 = {
        name: x.unflatten(0, (2, -1)).transpose(1, 2)
        for name, x in tensors((80, 80), (2, 1), 64, torch.float16, stride=1).items()
        if "seqlens" not in name
    }
    assert run(two_of_80, compress_stride=1) == [*one, *rest]
    monkeypatch.setattr(nsa, "selection_takes_gates", lambda *_: True)
    monkeypatch.setattr(nsa, "nsa_gated_selection", noted("both", lambda *inputs: inputs[3]))
    monkeypatch.setattr(nsa, "gated_selection", noted("both, and selection's", lambda *inputs: inputs[8]))
    assert run(call) == [*one, "both"]
    leaves(call)
    assert run(call) == [*one, "both, and selection's"]
    with torch.no_grad():
        assert run(call) == [*one, "both"]


def leaves(call: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that are differentiated."""
    names = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
    return [call[name].requires_grad_() for name in names]


def test_gradients_are_those_of_the_dense_computation() -> None:
    call = tensors((24, 40))
    of = leaves(call)
    actual = nsa_attention(**call, **OPTIONS)
    expected = dense(call)
    weights = torch.randn_like(actual)
    for mine, other in zip(*(torch.autograd.grad((x * weights).sum(), of) for x in (actual, expected)), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_sequences_of_one_row(packed: bool) -> None:
    """cuDNN has none of one row and one key."""
    call, options = tensors((1, 1, 1), stride=1), {**OPTIONS, "compress_stride": 1}
    of, expected = leaves(call), dense(call, options=options)
    inputs = {**call, "max_seqlen": 1} if packed else batched(call, 3)
    out = nsa_attention(**inputs, **options)
    actual = out if packed else out.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(actual)
    torch.testing.assert_close(*(torch.autograd.grad((x * weights).sum(), of) for x in (actual, expected)))


@pytest.mark.parametrize(
    ("arch", "batch", "stride"),
    brief(
        [
            ("sm_90a", 2, 8),
            *(pytest.param("gpu", *x, marks=GPU.marks) for x in ((2, 8), (0, 8), (2, 1))),
            ("sm_90a", 2, 1),
            ("", 0, 8),
        ],
        0,
        1,
        2,
        3,
    ),
)
def test_gradients_in_half_precision(arch: str, batch: int, stride: int) -> None:
    """Of a compressed key for every row there are two blocks, whose sums of dQ meet."""
    call = tensors((72, 72) if stride > 1 else (144, 144), (2, 1), 64, torch.float16, stride)
    call = batched(call, batch) if batch else call
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    weights, actual = torch.randn(call["query"].shape), []
    for inputs, where in ((moved(call, arch), arch), (wide, "")):
        of = leaves(inputs)
        with within(where, races=False):
            out = nsa_attention(**inputs, **{**OPTIONS_16, "compress_stride": stride})
            actual.append(torch.autograd.grad((out * weights.to(out.device)).sum(), of))
    for mine, other in zip(*actual, strict=True):
        assert mine.dtype is torch.float16
        assert (mine.cpu().double() - other).norm() < 4e-3 * other.norm()


def test_tensors_at_odd_addresses_are_copied() -> None:
    """With the kernels of the test before."""
    call, actual = batched(tensors((32, 32), (2, 1), 64, torch.float16, 8), 2), []
    apart = {name: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape) for name, x in call.items()}
    with cudnn.emulation("sm_90a"):
        for inputs in (call, apart):
            of = leaves(inputs)
            inferred = nsa_attention(**{n: x.detach() for n, x in inputs.items()}, **OPTIONS_16)
            out = nsa_attention(**inputs, **OPTIONS_16)
            actual.append([inferred, out, *torch.autograd.grad(out.float().sin().sum(), of)])
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("seed", brief(list(range(24)), 0))
def test_the_sum_of_three_attentions(seed: int) -> None:
    """Any groups, blocks, strides and windows; sequences that end anywhere, one of them in the middle of a stride."""
    drawn = random.Random(seed)
    block, key_heads, group = drawn.choice((16, 32, 64, 128)), drawn.choice((1, 2)), drawn.choice((1, 2, 3, 5, 16))
    options = {
        "block_size": block,
        "compress_stride": drawn.choice((block, block // 2, block // 4)),
        "selected_blocks": drawn.randint(5, 8),
        "window_size": drawn.randint(1, 2 * block),
    }
    lengths = (block + drawn.randint(0, block), 4 * block + drawn.randint(1, 3 * block) | 1)
    call = tensors(lengths, (group * key_heads, key_heads), 8, stride=options["compress_stride"])
    torch.testing.assert_close(nsa_attention(**call, **options), dense(call, options=options), atol=1e-6, rtol=1e-6)


@pytest.mark.full
def test_numeric_gradients_of_the_parts() -> None:
    """Selection with a list that has a block twice, and rows that see nothing; one sequence ends in a block."""
    call = tensors((12, 9), (2, 1), 8)
    q, k, v, ck, cv, gates = leaves(call)
    ends, small = call["cu_seqlens"], call["cu_seqlens_compressed"]
    lists = torch.tensor([[0, 0, 1]], dtype=torch.int32).expand(21, 1, 3).contiguous()
    lists[4] = -1
    parts: list[tuple[Callable[..., Any], list[torch.Tensor], list[Any]]] = [
        (nsa.nsa_compression, [q, ck, cv], [ends, small, 0.5]),
        (nsa.nsa_selection, [q, k, v], [lists, ends, 0.5, BLOCK]),
        (nsa.nsa_window, [q, k, v], [ends, 0.5, WINDOW, 12]),
        (nsa_gates, [q, q.flip(0), q.roll(1, 0), gates], []),
    ]
    for part, of, rest in parts:
        inputs = [x.detach().clone().requires_grad_() for x in of]

        def attend(*x: torch.Tensor, part: Any = part, rest: list[Any] = rest) -> torch.Tensor:
            actual = part(*x, *rest)
            return actual[0] if isinstance(actual, tuple) else actual

        assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


def test_numeric_gradients() -> None:
    call = tensors((16,), (2, 1), 8)
    lists = torch.tensor([[0, 1]], dtype=torch.int32).expand(16, 1, 2).contiguous()
    names = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
    rest = {name: x for name, x in call.items() if name not in names}

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return nsa_attention(**dict(zip(names, inputs, strict=True)), **rest, block_indices=lists, **OPTIONS)

    assert torch.autograd.gradcheck(attend, leaves(call), fast_mode=True)


@pytest.mark.parametrize(
    ("heads", "d", "dtype", "gates"),
    brief([(3, 64, torch.float16, torch.float32), (1, 256, torch.bfloat16, torch.bfloat16)], 0),
)
def test_gates_by_the_kernel(heads: int, d: int, dtype: torch.dtype, gates: torch.dtype) -> None:
    branches = [torch.randn(13, heads, d).to(dtype) for _ in range(3)]
    inputs = [x.requires_grad_() for x in (*branches, torch.rand(13, heads, 3).to(gates))]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    d_out = torch.randn(13, heads, d).to(dtype)
    with cudnn.emulation("sm_90a", races=True):
        actual = nsa_gates(*inputs)
        gradients = torch.autograd.grad(actual, inputs, d_out)
    expected = sum(x * g[..., None] for x, g in zip(wide[:3], wide[3].unbind(-1), strict=True))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.double(), expected, atol=eps, rtol=eps)
    for mine, other in zip(gradients, torch.autograd.grad(expected, wide, d_out.double()), strict=True):
        torch.testing.assert_close(mine.double(), other, atol=1e-4, rtol=eps)
    torch.library.opcheck(nsa_gates, [x.detach() for x in inputs])


@pytest.mark.parametrize("arch", ["sm_90a", GPU])
def test_few_heads_to_a_key(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From some rows on, blocks of keys are outermost, a few heads at a time, in operators and in the wrapper."""
    monkeypatch.setattr(heuristics, "KV_OUTER_MIN_ROWS", {2: 100})
    monkeypatch.setattr(heuristics, "KV_OUTER_HEADS", ((64, 64),))
    monkeypatch.setattr(kv_outer, "MEMORY", 1)  # fewer bytes than one head of K takes
    call = tensors((70, 40), (4, 2), 64, torch.bfloat16, 16)
    call["lists"] = torch.randint(-1, 2, (110, 2, 3)).int()
    expected, done = nsa_selection(*(call[x] for x in ("query", "key", "value", "lists", "cu_seqlens")), 0.1, 64), []
    q, k, v, lists, ends = (moved(call, arch)[x] for x in ("query", "key", "value", "lists", "cu_seqlens"))
    monkeypatch.setattr(kv_outer, "run", lambda *inputs: (done.append(inputs[-2:]), run(*inputs)))
    with within(arch, races=False):
        nsa_selection(q[:99], k[:99], v[:99], lists[:99], ends.clamp(max=99), 0.1, 64)
        assert not done
        actual = nsa_selection(q, k, v, lists, ends, 0.1, 64)
        wrapped = cudnn.NSA.selection_attention_wrapper(
            q,
            k,
            v,
            lists.sort(-1, descending=True).values,
            (lists >= 0).sum(-1, dtype=torch.int32),
            ends,
            scale_softmax=0.1,
            is_causal=True,
        )
        none = nsa_selection(q, k, v, lists[..., :0].contiguous(), ends, 0.1, 64)
    assert done == [(0, 1), (1, 1)] * 2
    assert not none[0].any()
    for mine in (actual, (wrapped["o_tensor"], (wrapped["m_tensor"] + wrapped["l_tensor"].log()).squeeze(-1))):
        torch.testing.assert_close(mine[0].cpu(), expected[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(mine[1].cpu(), expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_branches_with_few_heads_to_a_key(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks of keys are outermost, no kernel adds up the branches. Blackwell goes by rows."""
    options = {**OPTIONS, "block_size": 64, "compress_stride": 16}
    call = tensors((140,), (2, 2), 64, torch.bfloat16, 16)
    expected, done = (
        nsa_attention(**{n: x.double() if x.is_floating_point() else x for n, x in call.items()}, **options),
        [],
    )
    monkeypatch.setattr(heuristics, "KV_OUTER_MIN_ROWS", {1: 100})
    monkeypatch.setattr(heuristics, "KV_OUTER_HEADS", ((64, 64),))
    attend = kv_outer.attend
    monkeypatch.setattr(kv_outer, "attend", lambda *inputs: (done.append(1), attend(*inputs)))
    with cudnn.emulation(arch):
        inferred = nsa_attention(**call, **options)
        leaves(call)
        kept = nsa_attention(**call, **options)
    assert len(done) == (2 if arch == "sm_90a" else 0)
    for actual in (inferred, kept):
        torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)


def test_gated_selection_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the type of the branches, which autocast gave them, not that of the caller's tensors."""
    taken: list[Any] = []
    monkeypatch.setattr(gates_module, "run", lambda _, kind, *inputs: taken.append([kind.dtype, *inputs[:6]]))
    q, k, v = (torch.zeros(8, heads, 64).half() for heads in (2, 1, 1))
    branch, gates = torch.zeros(8, 2, 64).bfloat16(), torch.zeros(8, 2, 3).half()
    lists, ends = torch.zeros(8, 1, 1).int(), torch.tensor([0, 8]).int()
    with cudnn.emulation("sm_90a"), torch.autocast("cpu", torch.bfloat16):
        out = nsa.nsa_gated_selection(q, k, v, branch, gates, lists, ends, None, 0.1, 16, 5, 8)
    ((kind, *inputs),) = taken
    assert kind == "bfloat16"
    assert {x.dtype for x in (out, *inputs)} == {torch.bfloat16}


def test_mixed_types_under_autocast() -> None:
    """Where norms gave float32 and products the type of autocast, it is the latter."""
    options, call = {**OPTIONS, "block_size": 16}, tensors((32,), (2, 1), 64, torch.float32)
    narrow = {name: x.bfloat16() if x.is_floating_point() and name != "gates" else x for name, x in call.items()}
    call["value"] = narrow["value"]
    expected = nsa_attention(**narrow, **options)
    for function in (nsa_attention, torch.compile(nsa_attention, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(function(**call, **options), expected)


def test_what_is_compiled_for_the_cpu_has_no_gated_selection() -> None:
    """The compiler cannot ask whether the emulator runs."""
    q = torch.zeros(8, 2, 64).half()
    with cudnn.emulation("sm_90a"):
        assert selection_takes_gates(q, q, 16)
        assert not torch.compile(selection_takes_gates, fullgraph=True, backend="eager")(q, q, 16)


def test_lists_of_the_caller() -> None:
    call = tensors()
    lists = torch.randint(-1, 8, (sum(LENGTHS), 2, 3), dtype=torch.int32)
    lists[..., 0] = torch.cat([torch.arange(n) // BLOCK for n in LENGTHS])[
        :, None
    ]  # the row's own block: no row is empty
    lists[..., 1:] = lists[..., 1:].masked_fill(lists[..., 1:] == lists[..., :1], -1)
    lists[..., 2] = lists[..., 2].masked_fill(lists[..., 2] == lists[..., 1], -1)
    actual = nsa_attention(**call, block_indices=lists, **OPTIONS)
    torch.testing.assert_close(actual, dense(call, lists), atol=1e-6, rtol=1e-6)


def test_sequences_of_one_length() -> None:
    call = tensors((64, 64))
    packed = nsa_attention(**call, **OPTIONS)
    batched = {name: x.unflatten(0, (2, -1)).transpose(1, 2) for name, x in call.items() if "seqlens" not in name}
    actual = nsa_attention(**batched, **OPTIONS)
    torch.testing.assert_close(actual.transpose(1, 2).flatten(0, 1), packed)


def test_sequences_too_short_for_a_compressed_key() -> None:
    call = tensors((4, 4))
    call |= {name: call[name][:0] for name in ("compressed_key", "compressed_value")}
    call["cu_seqlens_compressed"] *= 0
    packed = nsa_attention(**call, **OPTIONS)
    batched = {
        name: x.view(2, len(x) // 2, *x.shape[1:]).transpose(1, 2) for name, x in call.items() if "seqlens" not in name
    }
    actual = nsa_attention(**batched, **OPTIONS)
    torch.testing.assert_close(actual.transpose(1, 2).flatten(0, 1), packed)


def test_compiled_it_is_the_same() -> None:
    call = tensors((64,))
    of = leaves(call)
    expected = nsa_attention(**call, **OPTIONS)
    compiled = torch.compile(nsa_attention, fullgraph=True, backend="aot_eager")
    actual = compiled(**call, **OPTIONS)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), of) for x in (actual, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compilers_know_how_gradients_lie_in_memory(dtype: torch.dtype) -> None:
    """Also where heads come before rows, as in a batch of one."""
    q, k, v, ck, cv = (torch.randn(2, n, 64, dtype=dtype).transpose(0, 1) for n in (32, 32, 32, 4, 4))
    gates, ends, small = torch.rand(32, 2, 3, dtype=dtype), *(torch.tensor([0, n]).int() for n in (32, 4))
    lists, ops = torch.zeros(32, 2, 1).int(), nsa
    one = ops.nsa_compression(q, ck, cv, ends, small, 0.5)
    two = ops.nsa_selection(q, k, v, lists, ends, 0.5, 16)
    three = ops.nsa_window(q, k, v, None, 0.5, WINDOW, 32)
    inputs = [*one, *two, *three, lists, ends, small, None, 0.5, 16, WINDOW, 32]
    for operator, arguments in (
        (ops.nsa_compression_bwd, [one[0], q, ck, cv, *one, ends, small, 0.5]),
        (ops.nsa_selection_bwd, [two[0], q, k, v, *two, lists, ends, 0.5, 16]),
        (ops.nsa_window_bwd, [three[0], q, k, v, *three, None, 0.5, WINDOW, 32]),
        (ops.nsa_branches_bwd, [one[0], q, k, v, ck, cv, gates, *inputs]),
    ):
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")


class Stream:
    def __init__(self, name: str, done: list[tuple[str, str]]) -> None:
        self.name, self.done, self.cuda_stream = name, done, 0

    def wait_stream(self, other: Any) -> None:
        self.done.append((self.name, f"waits for {other.name}"))


def test_each_stream_has_a_second_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, current = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("second", []))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(streams, "_second", functools.cache(streams._second.__wrapped__))
    seconds = []
    for handle in (1, 2, 1):
        current.append(Stream("first", []))
        current[-1].cuda_stream = handle
        with streams.forked(device) as beside, beside as second:
            seconds.append(second)
    assert seconds[0] is seconds[2]
    assert seconds[0] is not seconds[1]


@pytest.mark.gpu
def test_fewer_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for compression and top-k, no separate gates: as with all of them, and the same bits each time."""
    call = {name: x.cuda() for name, x in tensors((512, 1000), (16, 1), 64, torch.bfloat16, 16).items()}
    options = {"block_size": 32, "compress_stride": 16, "selected_blocks": 8, "window_size": 100}
    actual = nsa_attention(**call, **options)
    for _ in range(20):
        assert torch.equal(nsa_attention(**call, **options), actual)
    for rule in ("selection_takes_gates", "_in_one_pass"):
        monkeypatch.setattr(nsa, rule, lambda *_: False)
        expected = nsa_attention(**call, **options)
        assert (actual - expected).float().norm() < 0.01 * expected.float().norm()


@pytest.mark.parametrize(("batch", "rows", "small"), [(2, 0, 0), (0, 8, 2), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_nothing_to_attend(batch: int, rows: int, small: int, dtype: torch.dtype) -> None:
    shapes = [(4, rows, 64), *[(2, rows, 64)] * 2, *[(2, small, 64)] * 2, (4, rows, 3)]
    inputs = [torch.ones(batch, *shape, dtype=dtype).requires_grad_() for shape in shapes]
    out = nsa_attention(*inputs, **{**OPTIONS, "block_size": 16})
    assert out.shape == inputs[0].shape
    gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(x.shape == y.shape and not y.any() for x, y in zip(inputs, gradients, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": None}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 152])}, r"shapes of cu_seqlens, cu_seqlens_compressed: got \[.2,., .3,.\]"),
        ({"gates": torch.rand(152, 4, 2)}, "shape of gates"),
        ({"compressed_key": torch.rand(38, 2, 8).double()}, "shape of compressed_key"),
        ({"value": torch.rand(152, 2, 16)}, "types"),
        ({"query": torch.rand(152, 3, 16).double()}, "heads of query"),
        ({"key": torch.rand(1, 152, 2, 16).double()}, "shapes"),
        ({"selected_blocks": 4}, "selected_blocks"),
        ({"window_size": 0}, "window_size"),
        ({"block_size": 6}, "block_size and compress_stride: got 6 and 4"),
        ({"block_size": 0}, "block_size and compress_stride"),
        ({"scale": 0.0}, "scale: got 0.0"),
        ({"block_indices": torch.zeros(152, 2, 3)}, "type of block_indices: got torch.float32"),
        ({"block_indices": torch.zeros(152, 1, 3).int()}, r"shape of block_indices: got .152, 1, 3.; .* .152, 2, n."),
        ({"block_indices": torch.zeros(152, 2, 0).int()}, r"shape of block_indices: got .152, 2, 0.; .* n of 1 and mo"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nsa_attention(**{**tensors(), **OPTIONS, **change})
    with pytest.raises(TypeError, match=r"gates tensor: got NoneType; allowed: a torch.Tensor"):
        nsa_attention(**{**tensors(), **OPTIONS, "gates": None})


@pytest.mark.parametrize("name", ["block_size", "compress_stride", "selected_blocks", "window_size"])
@pytest.mark.parametrize("value", [True, 8.0, "8"])
def test_sizes_that_are_no_integers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"nsa_attention: {name}: got {type(value).__name__}; allowed: an int"):
        nsa_attention(**{**tensors(), **OPTIONS, name: value})
    with pytest.raises(TypeError, match=f"nsa_decode: {name}: got {type(value).__name__}; allowed: an int"):
        nsa_decode(**decode_call(torch.float64), **{**OPTIONS, name: value})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_behind_the_last_sequence(dtype: torch.dtype) -> None:
    """Their results and gradients are 0, whatever had been in memory; those of the others are as without them."""
    call = tensors(d=64, dtype=dtype)
    options = {**OPTIONS, "block_size": 16}
    names = [name for name, x in call.items() if x.is_floating_point()]
    rest = {name: x for name, x in call.items() if name not in names}
    longer = [torch.cat([call[n], call[n].new_full((9, *call[n].shape[1:]), torch.nan)]) for n in names]

    def passes(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = nsa_attention(**dict(zip(names, inputs, strict=True)), **rest, **options)
        with torch.no_grad():
            again = nsa_attention(**dict(zip(names, inputs, strict=True)), **rest, **options)
        return [out, again, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    alone = [call[name] for name in names]
    expected, actual = (passes([x.detach().requires_grad_() for x in inputs]) for inputs in (alone, longer))
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other[: len(one)], one)
        assert len(other) == len(one) + 9
        assert not other[len(one) :].any()


def test_a_decode_step_has_no_gradient() -> None:
    call = decode_call(torch.float64)
    out = nsa_decode(**{**call, "query": call["query"].requires_grad_()}, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"cudnn::nsa_decode_step has no gradient\. To fix it, detach its tensors"):
        out.sum().backward()


def test_a_longest_length_that_is_no_integer() -> None:
    with pytest.raises(TypeError, match="nsa_attention: max_seqlen: got str; allowed: an int"):
        nsa_attention(**{**tensors(), **OPTIONS, "max_seqlen": "88"})


def test_longer_lists_than_kernels_keep() -> None:
    call = tensors(d=64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="nsa_attention: selected_blocks: got 69; allowed: 5 to 68"):
        nsa_attention(**call, **{**OPTIONS, "selected_blocks": 69})
    wide = {name: x.double() if x.is_floating_point() else x for name, x in call.items()}
    assert nsa_attention(**wide, **{**OPTIONS, "selected_blocks": 69}).shape == call["query"].shape


def decode_call(dtype: torch.dtype, d: int = 16) -> dict[str, torch.Tensor]:
    """The newest rows of sequences of 64 and 88 rows, and caches with NaN behind them; keys of the compressed means."""
    call = tensors(d=d, dtype=dtype)
    ends, small = call.pop("cu_seqlens"), call.pop("cu_seqlens_compressed")
    actual = {name: call[name][ends[1:] - 1] for name in ("query", "gates")}
    for name, x in call.items():
        if name not in actual:
            parts = x.tensor_split((small if "compressed" in name else ends)[1:-1].tolist())
            cache = torch.full((len(LENGTHS), x.shape[1], 100, d), float("nan"), dtype=dtype)
            for i, part in enumerate(parts):
                cache[i, :, : len(part)] = part.transpose(0, 1)
            actual[name] = cache
    return {**actual, "lengths": ends.diff(), "compressed_lengths": small.diff()}


def test_a_decode_step_is_the_last_row() -> None:
    actual = nsa_decode(**decode_call(torch.float64), **OPTIONS)
    torch.manual_seed(0)
    call = tensors()
    expected = nsa_attention(**call, **OPTIONS)[call["cu_seqlens"][1:] - 1]
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


def test_a_decode_step_of_mixed_types_under_autocast() -> None:
    call = decode_call(torch.float32)
    mixed = {**call, "key": call["key"].bfloat16(), "compressed_value": call["compressed_value"].bfloat16()}
    expected = nsa_decode(**{n: x.bfloat16() if x.is_floating_point() else x for n, x in call.items()}, **OPTIONS)
    with torch.autocast("cpu", torch.bfloat16):
        actual = nsa_decode(**{**mixed, "gates": call["gates"].bfloat16()}, **OPTIONS)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("arch", "d", "dtype", "block"),
    brief(
        [
            ("sm_90a", 64, torch.float16, 16),
            pytest.param("gpu", 128, torch.bfloat16, 32, marks=GPU.marks),
            ("sm_100a", 128, torch.bfloat16, 32),
        ],
        0,
        1,
    ),
)
def test_a_decode_step_by_the_kernel(arch: str, d: int, dtype: torch.dtype, block: int) -> None:
    call = decode_call(dtype, d)
    options = {**OPTIONS, "block_size": block, "compress_stride": 4, "selected_blocks": 5, "window_size": 21}
    expected = nsa_decode(**{name: x.double() if x.is_floating_point() else x for name, x in call.items()}, **options)
    with within(arch):
        actual = nsa_decode(**moved(call, arch), **options)
    torch.testing.assert_close(actual.cpu().double(), expected, atol=8e-3, rtol=8e-3)


def test_no_sequences_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU refuses a grid without CTAs."""
    monkeypatch.setattr(decode, "run", None)
    call = {name: x[:0] for name, x in decode_call(torch.float16, 64).items()}
    with cudnn.emulation("sm_90a"):
        assert nsa_decode(**call, **{**OPTIONS, "block_size": 16}).shape == (0, 4, 64)


def test_a_decode_step_refuses_strides_that_the_kernel_cannot_load() -> None:
    call = decode_call(torch.float16, 64)
    call["value"] = torch.zeros(2, 2, 100, 68, dtype=torch.float16)[..., :64]
    with cudnn.emulation("sm_90a"), pytest.raises(ValueError, match=r"strides of value: got \(13600, 6800, 68, 1\)"):
        nsa_decode(**call, **{**OPTIONS, "block_size": 16})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": torch.rand(2, 4, 2).double()}, ValueError, "shape of gates"),
        ({"lengths": torch.tensor([64, 88])}, ValueError, "type of lengths"),
        ({"lengths": 88}, TypeError, "lengths tensor: got int; allowed: a torch.Tensor"),
        ({"lengths": torch.tensor([64, 101]).int()}, ValueError, r"lengths: got \[64, 101\]; allowed: numbers from 0"),
        ({"key": torch.rand(2, 3, 100, 16).double()}, ValueError, "heads of query"),
        ({"selected_blocks": 4}, ValueError, "selected_blocks"),
        ({"compress_stride": 3}, ValueError, "block_size and compress_stride"),
    ],
)
def test_what_a_decode_step_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nsa_decode(**{**decode_call(torch.float64), **OPTIONS, **change})


def test_a_sequence_longer_than_the_longest_one() -> None:
    q, k, few = torch.randn(64, 2, 64).half(), torch.randn(64, 1, 64).half(), torch.randn(4, 1, 64).half()
    ends, ends_few = torch.tensor([0, 48, 64], dtype=torch.int32), torch.tensor([0, 3, 4], dtype=torch.int32)
    options: dict[str, Any] = {"block_size": 16, "compress_stride": 16, "max_seqlen": 32}
    with pytest.raises(ValueError, match="max_seqlen: got 32; allowed: at least 48, the longest sequence"):
        nsa_attention(
            q, k, k, few, few, torch.rand(64, 2, 3).half(), cu_seqlens=ends, cu_seqlens_compressed=ends_few, **options
        )
