"""FlashAttention's functions on the GPU: random packings against float64, CUDA graphs, waiting, repeats."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from cudnn.ops import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from support.packings import Packing, assert_close, check, dense, exact, packings, passes
from support.selection import FULL

CONFIGURATIONS: list[dict[str, Any]] = [
    {"head": (128, 128), "causal": True, "left": -1, "right": -1, "softcap": 0.0, "sink": False},
    {"head": (128, 128), "causal": False, "left": -1, "right": -1, "softcap": 0.0, "sink": True},
    {"head": (64, 64), "causal": True, "left": 60, "right": -1, "softcap": 0.0, "sink": True},
    {"head": (64, 64), "causal": False, "left": 30, "right": 9, "softcap": 5.0, "sink": False},
    {"head": (96, 96), "causal": True, "left": -1, "right": -1, "softcap": 0.0, "sink": False},
    {"head": (192, 128), "causal": True, "left": -1, "right": -1, "softcap": 0.0, "sink": False},
    {"head": (192, 192), "causal": True, "left": 100, "right": -1, "softcap": 0.0, "sink": False},
    {"head": (256, 256), "causal": True, "left": 128, "right": -1, "softcap": 50.0, "sink": False},
]
REPEATS = 1000


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_random_packings(configuration: dict[str, Any]) -> None:
    """Without ``--full`` 30 of each configuration, of bfloat16: types are kernels of their own."""
    fixed = configuration | ({} if FULL else {"dtype": torch.bfloat16})

    @settings(max_examples=200 if FULL else 30)
    @given(packing=packings(longest=400, sequences=8, **fixed))
    def run(packing: Packing) -> None:
        check(packing, "cuda")

    run()


@pytest.mark.parametrize(
    "options", [{"left": 1023, "sink": True, "head": (64, 64)}, {"head": (128, 128)}, {"head": (192, 128)}]
)
def test_long_sequences(options: dict[str, Any]) -> None:
    lengths = ((4096, 4096), (1, 1), (0, 0), (6000, 6000), (777, 900), (300, 20))
    packing = Packing(lengths, causal=True, key_heads=1, share=4, **options)
    tensors = packing.tensors("cuda")
    actual, expected = passes(packing, tensors), exact(packing, tensors)
    for name, one, want in zip(("o", "lse", "dq", "dk", "dv", "dsink"), actual, expected, strict=False):
        finite = want.isfinite()
        error = (one.double() - want)[finite].norm() / want[finite].norm()
        assert error <= (1e-4 if name == "lse" else 6e-3), (name, error)


@pytest.mark.parametrize("lengths", [(300, 300), (1, 500), (200, 500), (500, 200)])
def test_sequences_of_one_length(lengths: tuple[int, int]) -> None:
    dense(Packing((lengths,), causal=True, left=120, sink=True), 2, "cuda")
    dense(Packing((lengths,), head=(128, 128), left=20, right=30), 3, "cuda")


def step(packing: Packing, tensors: list[torch.Tensor], ends: list[torch.Tensor]) -> list[torch.Tensor]:
    """A forward and a backward pass whose longest sequence may be as long as all tokens."""
    *inputs, do, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    o, lse = flash_attn_varlen_func(*leaves[:3], *ends, **packing.options, learnable_sink=leaves[3], return_lse=True)
    return [o.detach(), lse.detach(), *torch.autograd.grad([o, lse], leaves, [do, dlse])]


def test_a_graph_computes_the_sequences_of_its_replay() -> None:
    first = Packing(((300, 300), (100, 100), (624, 624)), causal=True, left=200, sink=True)
    second = replace(first, lengths=((1, 1), (1000, 1000), (23, 23)), seed=1)
    static, ends = first.tensors("cuda"), first.offsets("cuda")
    for _ in range(2):
        step(first, static, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(first, static, ends)
    for packing in (first, second):
        fresh, offsets = packing.tensors("cuda"), packing.offsets("cuda")
        for target, source in zip([*static, *ends], [*fresh, *offsets], strict=True):
            target.copy_(source)
        graph.replay()
        assert_close(packing, results, packing.tensors(), True)


def test_the_host_waits_for_nothing() -> None:
    """Also with other totals than before."""
    packing = Packing(((300, 300), (100, 100)), causal=True, sink=True)
    step(packing, packing.tensors("cuda"), packing.offsets("cuda"))
    calls = []
    for lengths in (((300, 300), (130, 130)), ((10, 10), (499, 499))):
        one = replace(packing, lengths=lengths)
        calls.append((one, one.tensors("cuda"), one.offsets("cuda")))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            step(*call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "packing",
    [
        Packing(((900, 900), (1, 1), (500, 700)), causal=True, left=100, sink=True, deterministic=True),
        Packing(((700, 700), (444, 444)), head=(128, 128), causal=True, deterministic=True),
        Packing(((300, 300), (444, 444)), head=(256, 256), deterministic=True),
    ],
)
def test_repeats_are_bit_identical(packing: Packing) -> None:
    tensors, ends = packing.tensors("cuda"), packing.offsets("cuda")
    expected = step(packing, tensors, ends)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPEATS):
        for one, want in zip(step(packing, tensors, ends), expected, strict=True):
            different += (one != want).sum()
    assert not int(different)


def test_compiled_for_all_totals() -> None:
    packing = Packing(((300, 300), (100, 100)), causal=True)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Any, longest: int) -> Any:
        return flash_attn_varlen_func(q, k, v, *ends, longest, longest, causal=True)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in (packing.lengths, ((40, 40), (7, 7))):
        one = replace(packing, lengths=lengths)
        leaves = [x.requires_grad_() for x in one.tensors("cuda")[:3]]
        longest, ends = max(n for n, _ in lengths), one.offsets("cuda")
        results = [function(*leaves, ends, longest) for function in (compiled, block)]
        assert torch.equal(*results)
        for pair in zip(*(torch.autograd.grad(x.float().square().sum(), leaves) for x in results), strict=True):
            torch.testing.assert_close(*pair, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page", [0, 64])
def test_decoding_is_attention_to_all_keys(page: int) -> None:
    """Steps of one token behind a first pass, with new keys written into the cache."""
    torch.manual_seed(0)
    tokens, batch, room = 300, 2, 512
    q, k, v = (torch.randn(batch, tokens, h, 128, device="cuda").bfloat16() for h in (8, 2, 2))
    expected = flash_attn_func(q, k, v, causal=True, window_size=(99, 0))
    table = None
    caches = [torch.zeros(batch, room, 2, 128, device="cuda", dtype=q.dtype) for _ in range(2)]
    if page:
        order = torch.randperm(batch * room // page, device="cuda").int()
        table = order.view(batch, -1)
        caches = [x.view(-1, page, 2, 128) for x in caches]
    attend = functools.partial(
        flash_attn_with_kvcache, block_table=table, causal=True, window_size=(99, 0), softmax_scale=128**-0.5
    )
    outputs = [attend(q[:, :290], *caches, k[:, :290], v[:, :290], cache_seqlens=0)]
    rows = [[x[:, i : i + 1] for x in (q, k, v)] for i in range(290, tokens)]
    outputs += [attend(x, *caches, *new, cache_seqlens=290 + i) for i, (x, *new) in enumerate(rows)]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, atol=2e-2, rtol=2e-2)


def test_gradients_of_lse_alone() -> None:
    packing = Packing(((200, 200), (90, 90)), causal=True)
    leaves = [x.requires_grad_() for x in packing.tensors("cuda")[:3]]
    ends = packing.offsets("cuda")
    _, lse = flash_attn_varlen_func(*leaves, *ends, causal=True, return_lse=True)
    *_, dlse = packing.tensors("cuda")
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse)
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    _, expected = flash_attn_varlen_func(*wide, *packing.offsets(), causal=True, return_lse=True)
    want = torch.autograd.grad(expected, wide, dlse.cpu().double())
    assert not dv.any()
    for one, other in zip((dq, dk), want[:2], strict=True):
        assert (one.cpu().double() - other).norm() <= 6e-3 * other.norm()
