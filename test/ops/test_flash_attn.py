"""FlashAttention's functions: random packings on the reference and in the emulator, and how they are registered."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from cudnn.attention.flash_op import flash_attn_append, flash_attn_kvcache
from cudnn.ops import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from cudnn.sdpa import SdpaForward
from support.dense_attention import attend, band
from support.packings import Packing, check, dense, exact, packings, passes
from support.selection import FULL, brief, within

F64 = torch.float64
MIXED = ((5, 9), (0, 3), (50, 40), (1, 0), (1, 1))
EVERYTHING = Packing(MIXED, causal=True, left=20, softcap=3.0, sink=True)
EMULATED = [
    ("sm_90a", EVERYTHING),
    ("sm_100a", EVERYTHING),
    *[
        (arch, Packing(MIXED, **options))
        for arch in ("sm_90a", "sm_100a")
        for options in (
            {"causal": True, "head": (128, 128), "share": 3},
            {"head": (192, 128), "left": 7, "right": 4, "dtype": torch.float16},
            {"causal": True, "head": (256, 256), "softcap": 5.0, "key_heads": 1, "deterministic": True},
            {"head": (96, 96), "sink": True, "left": 30, "right": 0, "share": 1},
            {"head": (192, 192), "causal": True, "sink": True},
        )
    ],
]


@settings(max_examples=300 if FULL else 12)
@given(packing=packings())
def test_the_reference_agrees_with_float64(packing: Packing) -> None:
    check(packing, "cpu")


@pytest.mark.parametrize("with_lse", [True, False])
def test_float64_is_exact(with_lse: bool) -> None:
    tensors = [x.double() for x in EVERYTHING.tensors()]
    actual, expected = passes(EVERYTHING, tensors, with_lse), exact(EVERYTHING, tensors, with_lse)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("arch", "packing"), brief(EMULATED, 0, 1))
def test_the_kernels_agree_with_float64(arch: str, packing: Packing) -> None:
    check(packing, context=functools.partial(within, arch))


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_kernels_agree_on_random_packings(arch: str) -> None:
    @settings(max_examples=10)
    @given(packing=packings(longest=150, key_heads=1, share=2, head=(64, 64), dtype=torch.bfloat16, softcap=0.0))
    def run(packing: Packing) -> None:
        check(packing, context=functools.partial(within, arch))

    run()


@pytest.mark.parametrize("lengths", [(40, 40), (1, 30), (9, 40), (40, 9)])
def test_sequences_of_one_length(lengths: tuple[int, int]) -> None:
    dense(Packing((lengths,), causal=True, left=12, sink=True), 2)
    dense(Packing((lengths,), left=2, right=3), 3)


def test_gradients_pass_the_numerical_test() -> None:
    packing = Packing(((3, 5), (0, 2), (4, 4)), causal=True, left=3, softcap=2.0, sink=True)
    leaves = [x.double().requires_grad_() for x in packing.tensors()[:4]]
    ends = packing.offsets()

    def function(*x: torch.Tensor) -> Any:
        return flash_attn_varlen_func(*x[:3], *ends, **packing.options, learnable_sink=x[3], return_lse=True)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_nothing_to_attend_to() -> None:
    q, empty = torch.randn(2, 3, 4, 64, dtype=F64), torch.zeros(2, 0, 2, 64, dtype=F64)
    sinks = torch.randn(4, dtype=F64, requires_grad=True)
    o, lse = flash_attn_func(q, empty, empty, learnable_sink=sinks, return_lse=True)
    assert not o.any()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(2, 4, 3))
    assert torch.equal(torch.autograd.grad(lse.sum(), sinks)[0], torch.full((4,), 6.0, dtype=F64))
    assert flash_attn_func(q[:, :0], q, q).shape == (2, 0, 4, 64)


def test_what_is_returned() -> None:
    q = torch.randn(1, 5, 2, 64).bfloat16()
    out, lse, nothing = flash_attn_func(q, q, q, return_attn_probs=True)
    assert nothing is None
    assert torch.equal(out, flash_attn_func(q, q, q))
    assert all(map(torch.equal, (out, lse), flash_attn_func(q, q, q, return_lse=True)))
    assert out.is_contiguous()
    assert (lse.shape, lse.dtype) == ((1, 2, 5), torch.float32)


def test_strides_and_alignment_do_not_matter() -> None:
    packing = Packing(((20, 20), (7, 7)), share=1)
    q, k, v, *_ = packing.tensors()
    qkv = torch.stack([q, k, v], 1)  # as of a projection to query, key and value together
    moved = torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)
    ends = packing.offsets()
    expected = flash_attn_varlen_func(q, k, v, *ends, 20, 20)
    assert torch.equal(flash_attn_varlen_func(*qkv.unbind(1), *ends, 20, 20), expected)
    assert torch.equal(flash_attn_varlen_func(moved, k, v, *ends, 20, 20), expected)


def test_compiled_once_for_all_totals() -> None:
    counted, frames = CompileCounterWithBackend("aot_eager"), []

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, ends: Any, longest: int) -> Any:
        return 2 * flash_attn_varlen_func(q, k, v, *ends, longest, longest, causal=True, learnable_sink=s)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counted)
    for lengths in [((5, 5), (9, 9)), ((12, 12), (3, 3)), ((7, 7), (30, 30))]:
        packing = Packing(lengths, sink=True)
        leaves = [x.requires_grad_() for x in packing.tensors()[:4]]
        ends, longest = packing.offsets(), max(lengths)[0]
        actual, expected = (f(*leaves, ends, longest) for f in (compiled, step))
        assert torch.equal(actual, expected)
        one, other = (torch.autograd.grad(x.float().square().sum(), leaves) for x in (actual, expected))
        assert all(map(torch.equal, one, other))
        frames.append(counted.frame_count)
    assert len({*frames}) == 1


def test_recomputed_by_a_checkpoint() -> None:
    q, k, v, *_ = (x.requires_grad_() for x in Packing(((6, 6), (9, 9))).tensors())
    ends = Packing(((6, 6), (9, 9))).offsets()

    def block(q: torch.Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, *ends, 9, 9, causal=True)

    grads = [torch.autograd.grad(x.float().sum(), q)[0] for x in (block(q), checkpoint(block, q, use_reentrant=False))]
    assert torch.equal(*grads)


def test_vmap() -> None:
    many = [torch.randn(3, 2, n, h, 64, dtype=F64, requires_grad=True) for n, h in ((5, 4), (7, 2), (7, 2))]
    sinks = torch.randn(3, 4, dtype=F64, requires_grad=True)
    for function, inputs in [
        (functools.partial(flash_attn_func, causal=True), many),
        (lambda q, k, v, s: flash_attn_func(q, k, v, learnable_sink=s), [*many, sinks]),
    ]:
        actual = torch.vmap(function)(*inputs)
        expected = torch.stack([function(*(x[i] for x in inputs)) for i in range(3)])
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), inputs) for x in (actual, expected)))


def test_registered_right() -> None:
    packing = Packing(((6, 6), (9, 9)), sink=True)
    leaves = [x.requires_grad_() for x in packing.tensors()[:4]]
    numbers = (9, 9, 0.125, True, 3, -1, 0.0, False)
    arguments = (*leaves[:3], *packing.offsets(), leaves[3], *numbers)
    torch.library.opcheck(torch.ops.cudnn.flash_attn.default, arguments)
    split = [x.detach().unflatten(0, (3, 5)).requires_grad_() for x in leaves[:3]]
    torch.library.opcheck(torch.ops.cudnn.flash_attn.default, (*split, None, None, None, *numbers))


def test_in_autocast() -> None:
    q = torch.randn(1, 5, 2, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_func(q, q, q)
    assert out.dtype is torch.bfloat16
    assert torch.autograd.grad(out.float().sum(), q)[0].dtype is torch.float32


def test_flops_count_the_pairs_of_each_sequence() -> None:
    packing = Packing(((6, 6), (9, 12)))
    q, k, v, *_ = (x.requires_grad_() for x in packing.tensors())
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_func(q, k, v, *packing.offsets(), 9, 12).float().sum().backward()
    assert counter.get_total_flops() == 7 * 2 * 4 * (36 + 108) * 64


def refused(message: str, kind: type[Exception], function: Any, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=message):
        function(*arguments, **options)


def test_what_is_refused() -> None:
    q = torch.randn(1, 5, 4, 64).bfloat16()
    none = torch.zeros(4)
    for message, kind, options in [
        ("dropout_p: got 0.1; allowed: 0", NotImplementedError, {"dropout_p": 0.1}),
        ("alibi_slopes: got a tensor; allowed: None", NotImplementedError, {"alibi_slopes": none}),
        ("softmax_scale: got 0", ValueError, {"softmax_scale": 0.0}),
        ("softcap: got -1", ValueError, {"softcap": -1.0}),
        ("window_size: got 3; allowed: a pair", TypeError, {"window_size": 3}),
        (r"window_size: got \(-2, 0\)", ValueError, {"window_size": (-2, 0)}),
        (r"sinks: got torch.float32 of the shape \(3,\)", ValueError, {"learnable_sink": none[:3]}),
        ("learnable_sink: got torch.int32", TypeError, {"learnable_sink": none.int()}),
    ]:
        with pytest.raises(kind, match=message):
            flash_attn_func(q, q, q, **options)
    for message, kind, tensors in [
        (r"head sizes of q and v: got \(32, 32\); allowed: \(64, 64\)", NotImplementedError, [q[..., :32]] * 3),
        ("heads of q: got 4; allowed: multiples of the 3", ValueError, [q, q[:, :, :3], q[:, :, :3]]),
        ("call flash_attn_varlen_func", ValueError, [q[0]] * 3),
        ("type of q: got torch.int32", TypeError, [q.int()] * 3),
        ("types and devices: got", ValueError, [q, q.float(), q]),
        ("k and v of the same tokens", ValueError, [q, q, q[:, 1:]]),
    ]:
        refused(message, kind, flash_attn_func, *tensors)
    x, ends = q[0], torch.tensor([0, 2, 5], dtype=torch.int32)
    for message, kind, offsets, options in [
        (r"cu_seqlens_q: got \[0, 2, 4\]; allowed: 0, then .* a last sequence", ValueError, ends.clamp(max=4), {}),
        ("cu_seqlens_q: got torch.int64", ValueError, ends.long(), {}),
        ("max_seqlen_q: got 2; allowed: at least 3", ValueError, ends, {"max_seqlen_q": 2}),
        ("max_seqlen_k: got float; allowed: an int, or None", TypeError, ends, {"max_seqlen_k": 5.0}),
        (
            "block_table: got a tensor; .* call flash_attn_with_kvcache",
            NotImplementedError,
            ends,
            {"block_table": none},
        ),
        ("as many in both", ValueError, ends[1:] - 2, {}),
    ]:
        refused(message, kind, flash_attn_varlen_func, x, x, x, offsets, ends, **options)


def test_double_backward_is_refused() -> None:
    q = torch.randn(1, 5, 2, 64, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(flash_attn_func(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="nothing here is differentiated twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("where", ["reference", pytest.param("sm_90a", marks=pytest.mark.full)])
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_of_keys_and_values(paged: bool, where: str) -> None:
    """With new keys, which are written behind the others."""
    torch.manual_seed(0)
    lengths, new, page = [30, 5], 2, 16
    q, k, v = (torch.randn(2, new, h, 64).bfloat16() for h in (4, 2, 2))
    old = [torch.randn(2, 48, 2, 64).bfloat16() for _ in range(2)]
    caches, table = old, None
    if paged:
        table = torch.tensor([[4, 0, 2], [3, 5, 1]], dtype=torch.int32)
        caches = [torch.full((6, page, 2, 64), torch.nan).bfloat16() for _ in range(2)]
        for cache, x in zip(caches, old, strict=True):
            cache[table.long()] = x.unflatten(1, (3, page))
    sinks = torch.randn(4)
    counts = torch.tensor(lengths, dtype=torch.int32)
    with within(where):
        out, lse = flash_attn_with_kvcache(
            q,
            *caches,
            k,
            v,
            cache_seqlens=counts,
            block_table=table,
            causal=True,
            window_size=(20, -1),
            learnable_sink=sinks,
            return_softmax_lse=True,
        )
    for i, length in enumerate(lengths):
        keys, values = (
            torch.cat([x[i, :length], y[i]]).transpose(0, 1).double() for x, y in zip(old, (k, v), strict=True)
        )
        seen = band(new, length + new, 20, 0, bottom_right=True)
        expected = attend(q[i].transpose(0, 1).double(), keys, values, seen, sink=sinks)
        torch.testing.assert_close(out[i].transpose(0, 1).double(), expected.o, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[i].double(), expected.lse, atol=1e-5, rtol=1e-5)
        written = caches[0][table[i].long()].flatten(0, 1) if table is not None else caches[0][i]
        assert torch.equal(written[length : length + new], k[i])


def test_what_a_cache_is_refused() -> None:
    q, cache = torch.randn(2, 1, 4, 64).bfloat16(), torch.randn(2, 32, 2, 64).bfloat16()
    for message, kind, options in [
        ("rotary_cos: got a tensor; .* rotate q and k", NotImplementedError, {"rotary_cos": cache}),
        ("cache_batch_idx: got a tensor", NotImplementedError, {"cache_batch_idx": cache}),
        ("k and v: got k alone", ValueError, {"k": cache}),
        ("cache_seqlens: got torch.int64", ValueError, {"cache_seqlens": torch.tensor([3, 4])}),
        (r"k: got torch.bfloat16 of the shape \(1, 1, 2, 64\)", ValueError, {"k": cache[:1, :1], "v": cache[:1, :1]}),
    ]:
        refused(message, kind, flash_attn_with_kvcache, q, cache, cache, **options)
    assert flash_attn_with_kvcache(q, cache, cache, cache_seqlens=7).shape == (2, 1, 4, 64)


def test_new_keys_that_do_not_fit_are_not_written() -> None:
    """Nothing of them: neither the keys before an error of the values, nor those of other sequences."""
    q, new = torch.randn(2, 1, 4, 64).bfloat16(), torch.ones(2, 3, 2, 64).bfloat16()
    caches = torch.zeros(2, 2, 32, 2, 64).bfloat16()
    pages = caches.view(2, 4, 16, 2, 64)
    table = torch.tensor([[0, -1], [2, 3]], dtype=torch.int32)
    for message, k, v, options in [
        (r"v: got torch.float16 of the shape", new, new.half(), {"cache_seqlens": 4}),
        (r"v: got .* \(2, 3, 2, 64\) .*; allowed: .* \(2, 2, 2, 64\)", new[:, :2], new, {"cache_seqlens": 4}),
        (r"sinks: got", new, new, {"cache_seqlens": 4, "learnable_sink": torch.zeros(3)}),
        (r"cache_seqlens: got \[4, 30\]; allowed: numbers from 0 to 29", new, new, {"cache_seqlens": [4, 30]}),
        (r"cache_seqlens: got \[-1, 4\]; allowed: numbers from 0 to 29", new, new, {"cache_seqlens": [-1, 4]}),
        (r"cache_seqlens: got \[32, 32\]; allowed: numbers from 0 to 29", new, new, {}),
        (r"block_table: got .* pages from 0 to 3", new, new, {"cache_seqlens": [14, 4], "block_table": table}),
    ]:
        if isinstance(options.get("cache_seqlens"), list):
            options["cache_seqlens"] = torch.tensor(options["cache_seqlens"], dtype=torch.int32)
        memory = pages if "block_table" in options else caches
        refused(message, ValueError, flash_attn_with_kvcache, q, *memory, k, v, **options)
        assert not caches.any(), message
    with torch.autocast("cpu", torch.bfloat16):
        wide = [x.float() for x in (q, new[:, :2], new[:, :2])]
        flash_attn_with_kvcache(wide[0], *pages, *wide[1:], cache_seqlens=14, block_table=table)
    assert pages[:, [0, 2], 14:].all()
    assert caches.sum() == new[:, :2].sum() * 2


@pytest.mark.parametrize("arch", [*brief(["sm_90a", "sm_100a"], 0)])
@pytest.mark.parametrize("paged", [False, True])
def test_kernels_keep_to_the_caches_whatever_the_values_are(
    paged: bool, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host does not read lengths and pages: wrong ones make the sequence's results NaN, and no others."""
    monkeypatch.setattr(SdpaForward, "check_values", lambda *_: None)
    lengths = torch.tensor([30, -3, 46, 2**31 - 1, 3, 45], dtype=torch.int32)
    fits = [True, False, False, False, True, True]
    q, new = torch.randn(6, 1, 4, 64).bfloat16(), torch.randn(6, 3, 2, 64).bfloat16()
    caches = [torch.randn(6, 48, 2, 64).bfloat16() for _ in range(2)]
    table = None
    if paged:
        caches = [x.view(18, 16, 2, 64) for x in caches]
        table = torch.arange(18, dtype=torch.int32).view(6, 3)
        lengths[0], table[0, 2], fits[0] = 31, -1, False  # of three new keys one is before the page
        table[5, 1], fits[5] = 18, False
        table[4, 1:] = 99  # behind the end
    before = [x.clone() for x in caches]
    with within(arch):
        ends = flash_attn_append(*caches, new, new, lengths, table)
        out, lse = flash_attn_kvcache(q, *caches, ends, table, None, 0.125, True, -1, -1, 0.0, 0)
    assert ends.tolist() == [int(lengths[0]) + 3, -1, -1, -1, 6, 48]
    assert out.isnan().all(3).all(2)[:, 0].tolist() == lse.isnan().all(1)[:, 0].tolist() == [not x for x in fits]
    assert out[fits].isfinite().all()
    for cache, old in zip(caches, before, strict=True):
        rows, untouched = cache.view(6, 48, 2, 64), old.view(6, 48, 2, 64)
        for i, first in ((0, int(lengths[0])), (4, 3), (5, 45)):
            count = 1 if paged and i == 0 else 3
            assert torch.equal(rows[i, first : first + count], new[i, :count])
            untouched[i, first : first + count] = rows[i, first : first + count]
        assert torch.equal(rows, untouched)


def test_a_cache_in_one_graph_for_any_length() -> None:
    """As a decoding loop calls it: the length is a Python int."""

    def step(length: int, *caches: torch.Tensor) -> torch.Tensor:
        return flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=length, causal=True)

    q, new = torch.randn(1, 1, 4, 64).bfloat16(), torch.randn(1, 1, 2, 64).bfloat16()
    right = [torch.randn(1, 32, 2, 64).bfloat16() for _ in range(2)]
    left = [cache.clone() for cache in right]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for length in range(5, 11):
        assert torch.equal(compiled(length, *left), step(length, *right))
        assert all(map(torch.equal, left, right))
    assert counter.frame_count <= 2  # the first length may be a constant
