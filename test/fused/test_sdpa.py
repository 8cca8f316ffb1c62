"""Attention's classes and wrappers: results, layouts, and what is refused. The kernels are tested in test/kernels."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import cudnn
from cudnn.attention import fused
from cudnn.sdpa import (
    SdpaBackward,
    SdpaForward,
    SdpafwdSm100D256,
    sdpa_bwd_wrapper_sm100_d256,
    sdpa_fwd_wrapper_sm100_d256,
)
from cudnn_kernels.attention import DESCALES, BackwardConfiguration
from cudnn_kernels.sm90.heuristics import kv_block_split
from support.dense_attention import attend, band
from support.recorded import OnGpu, Recorded
from support.selection import brief, within

CAUSAL: dict[str, Any] = {"is_causal": True, "window_size": (-1, 0)}


def matrix(batch: int, rows: int, heads: int, width: int = 256, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Small integers, (b, h, s, d) as a transposed (b, s, h, d)."""
    return torch.randint(-2, 2, (batch, rows, heads, width)).to(dtype).transpose(1, 2)


def packed(tensor: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """The first rows of each matrix, one sequence after the other: (t, h, d)."""
    lengths = [b - a for a, b in pairwise(ends)]
    return torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(tensor, lengths, strict=True)])


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("options", [{}, CAUSAL])
def test_forward_and_backward_are_pytorchs(options: dict[str, Any]) -> None:
    q, k, v = (matrix(2, 48, heads).float().requires_grad_() for heads in (4, 2, 2))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=bool(options), enable_gqa=True, scale=0.1
    )
    do = matrix(2, 48, 4)
    gradients = torch.autograd.grad(expected, (q, k, v), do.float())
    halves = [x.detach().transpose(1, 2).contiguous().half().transpose(1, 2) for x in (q, k, v)]
    o, lse = sdpa_fwd_wrapper_sm100_d256(*halves, scale_softmax=0.1, mma_tiler_mn=[128, 128], **options)
    torch.testing.assert_close(o.float(), expected, atol=2e-3, rtol=2e-3)
    tiles: dict[str, Any] = {"mma_tiler_mn": [128, 128], "dkdv_mma_tiler_mn": [128, 64]}  # lists do too
    actual = sdpa_bwd_wrapper_sm100_d256(*halves, o, do, lse, scale_softmax=0.1, **tiles, **options)
    for gradient, right in zip(actual, gradients, strict=True):
        torch.testing.assert_close(gradient.float(), right, atol=5e-2, rtol=5e-3)


def test_packed_sequences_are_those_of_one_length() -> None:
    ends = [0, 40, 96]
    q, k, v = (matrix(2, 56, heads) for heads in (4, 2, 2))
    rows, columns, values = (packed(x, ends) for x in (q, k, v))
    o, lse = sdpa_fwd_wrapper_sm100_d256(rows, columns, values, offsets(*ends), offsets(*ends), **CAUSAL)
    assert lse.shape == (96, 4)
    by_head = lse.view(4, 96)  # head by head in memory
    for index, (a, b) in enumerate(pairwise(ends)):
        parts = (x[index : index + 1, :, : b - a] for x in (q, k, v))
        single, single_lse = sdpa_fwd_wrapper_sm100_d256(*parts, **CAUSAL)
        torch.testing.assert_close(o[a:b].transpose(0, 1), single[0])
        torch.testing.assert_close(by_head[:, a:b], single_lse[0])


def test_softcap_and_sinks() -> None:
    """Against a formula in float64. A sink is a key whose score is its logit and whose value is 0."""
    q, k, v = tensors = [matrix(2, 40, heads) for heads in (4, 2, 2)]
    o, lse, sink = torch.empty_like(q), torch.empty(2, 4, 40), torch.tensor([-torch.inf, -2.0, 1.0, 30.0])
    attention = SdpaForward(q, k, v, o, lse, scale_softmax=0.1, softcap=2.0, sample_sink=sink)
    attention.compile()
    attention.execute(q, k, v, o, lse, sink_tensor=sink)
    exact = [x.double().requires_grad_() for x in tensors]
    expected = attend(*exact, scale=0.05, modify=lambda x: 2 * x.tanh(), sink=sink)
    torch.testing.assert_close(o.double(), expected.o, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected.lse)
    do, gradients = matrix(2, 40, 4), [torch.empty_like(x) for x in tensors]
    backward = SdpaBackward(*tensors, o, do, lse, *gradients, scale_softmax=0.1, softcap=2.0)
    backward.compile()
    backward.execute(*tensors, o, do, lse, *gradients)
    for actual, right in zip(gradients, torch.autograd.grad(expected.o, exact, do.double()), strict=True):
        torch.testing.assert_close(actual.double(), right, atol=2e-2, rtol=5e-3)
    with pytest.raises(ValueError, match="sink"):
        attention.execute(q, k, v, o, lse)
    with pytest.raises(ValueError, match="softcap"):
        SdpaForward(q, k, v, o, lse, softcap=-1.0).check_support()


@pytest.mark.parametrize(("arch", "kind"), brief([("sm_90a", torch.float8_e5m2), ("", torch.float8_e4m3fn)], 0, 1))
def test_eight_bits(arch: str, kind: torch.dtype) -> None:
    """Few rows, too. One descale for all heads is a view with strides of 0; of zeros only, it may be 0."""
    q, k, v = (torch.randn(2, n, h, 64).to(kind).transpose(1, 2) for n, h in ((9, 4), (70, 2), (70, 2)))
    o, lse = torch.empty(q.shape, dtype=torch.float16), torch.empty(2, 4, 9)
    descales = [torch.tensor([[0.5, 2.0], [0.0, 0.25]]), torch.tensor(0.75).expand(2, 2), torch.rand(2, 1).expand(2, 2)]
    with within(arch):
        attention = SdpaForward(
            q, k, v, o, lse, is_causal=True, **dict(zip((f"sample_{x}" for x in DESCALES), descales, strict=True))
        )
        attention.compile()
        arguments = dict(zip((f"{x}_tensor" for x in DESCALES), descales, strict=True))
        attention.execute(q, k, v, o, lse, **arguments)
        with pytest.raises(ValueError, match=r"descale_k: got -1.0; allowed: positive numbers, or 0"):
            attention.execute(q, k, v, o, lse, **arguments | {"descale_k_tensor": -torch.ones(2, 2)})
    meant = [
        x.double() * d.double().repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
        for x, d in zip((q, k, v), descales, strict=True)
    ]
    expected = attend(*meant, band(9, 70, right=0, bottom_right=True), scale=1 / 8)
    assert (o.double() - expected.o).norm() <= 0.4 * torch.finfo(kind).eps * expected.o.norm()
    torch.testing.assert_close(lse.double(), expected.lse, atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"arch": "sm_100a"}, NotImplementedError, "8 bits on sm_90a"),
        ({"sample_descale_k": None}, ValueError, "descale_k"),
        ({"sample_q": matrix(1, 32, 2)}, ValueError, "k tensor dtype"),
        ({"sample_seqlen_k": offsets(32)}, NotImplementedError, "allowed: float16, bfloat16 with caches"),
        ({f"sample_{x}": matrix(1, 32, 2) for x in "qkv"}, ValueError, "descale_q of q, k and v in float16"),
        ({"api": SdpafwdSm100D256}, NotImplementedError, "SdpaForward takes it"),
    ],
)
def test_what_eight_bits_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    small = matrix(1, 32, 2, dtype=torch.float8_e4m3fn)
    arguments = {f"sample_{x}": small for x in "qkv"} | {f"sample_{x}": torch.ones(1, 2) for x in DESCALES}
    arguments |= {
        "sample_o": matrix(1, 32, 2),
        "sample_lse": torch.empty(1, 2, 32),
        "api": SdpaForward,
        "arch": "sm_90a",
    }
    arguments |= change
    attention = arguments.pop("api")(**arguments)
    with pytest.raises(error, match=message):
        attention.check_support()


@pytest.mark.parametrize(("kernels", "as_batch"), brief([("sm_90a", False), ("sm_90a", True), ("sm_100a", True)], 1))
def test_the_kernels_run_from_the_wrappers(kernels: str, as_batch: bool) -> None:
    ends = offsets(0, 30, 70)
    q, k, v, do = (torch.randint(-2, 2, (70, heads, 256)).half() for heads in (2, 1, 1, 2))
    lse = torch.full((70, 2), 10.0)
    results = []
    for arch in ("", kernels):
        arguments = [x[None] if as_batch and arch else x for x in (q, k, v)]
        with within(arch):
            o, actual = sdpa_fwd_wrapper_sm100_d256(*arguments, ends, ends, **CAUSAL)
            more = [x[None] if as_batch and arch else x for x in (o.view(q.shape), do)]
            gradients = sdpa_bwd_wrapper_sm100_d256(*arguments, *more, lse, ends, ends, **CAUSAL)
        results.append([o.view(q.shape), actual, *(g.view(x.shape) for g, x in zip(gradients, (q, k, v), strict=True))])
    torch.testing.assert_close(*results, atol=2e-3, rtol=2e-3)


@dataclass(frozen=True)
class Cache:
    """K and V of ``lengths`` keys in memory with room for more, NaN beyond, or in pages that lie anywhere in a pool."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    rows: int = 1
    page: int = 0
    pages_of_heads: bool = False
    head: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    sink: bool = False
    splits: int = 0
    far: int = 0  # bytes from a page to the next, of a file that is mapped and has room without memory

    def keys(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each sequence, (h, s, d)."""
        shapes = [(self.heads[1], n, d) for n in self.lengths for d in self.head]
        return list(zip(*[iter(torch.randn(shape).to(self.dtype) for shape in shapes)] * 2, strict=True))

    def stored(self, keys: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """K, V and the table of pages, if there are any."""
        page = self.page or max(self.lengths) + 5
        per = -(-max(self.lengths) // page)
        order = torch.randperm(len(keys) * per + 2)[: len(keys) * per].view(-1, per)
        table = torch.full(order.shape, -7, dtype=torch.int32)
        stored = []
        for which, d in enumerate(self.head):
            shape = (order.numel() + 2, self.heads[1], page, d)
            pool = torch.empty(shape, dtype=self.dtype)
            if self.far:
                with tempfile.TemporaryFile() as file:
                    room = np.memmap(file, np.int16, "w+", shape=shape[0] * self.far // 2)
                pool = torch.from_numpy(room).view(self.dtype).as_strided(shape, (self.far // 2, *pool.stride()[1:]))
            pool.fill_(torch.nan)
            if not self.pages_of_heads and not self.far:
                pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
            for index, pair in enumerate(keys):
                for number, part in enumerate(pair[which].split(page, 1)):
                    place = order[index, number] if self.page else index
                    pool[place, :, : part.shape[1]] = part
                    table[index, number] = place
            stored.append(pool if self.page else pool[: len(keys)])
        return *stored, table if self.page else None


@pytest.mark.full
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("keys", "strides"), [(40, (7, 2560, 64, 1)), (1, (128, 64, 7, 1))])
def test_strides_of_one_element_may_be_any(arch: str, keys: int, strides: tuple[int, ...]) -> None:
    """Of a batch of one sequence, and of one key."""
    q, k, v = (torch.randn(1, heads, n, 64).bfloat16() for heads, n in ((4, 1), (2, keys), (2, keys)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    k, v = (x.as_strided(x.shape, strides) for x in (k, v))
    o, lse = torch.empty_like(q), torch.empty(1, 4, 1)
    attention = SdpaForward(q, k, v, o, lse)
    with cudnn.emulation(arch):
        attention.compile()
        attention.execute(q, k, v, o, lse)
    torch.testing.assert_close(o, expected, atol=2e-2, rtol=2e-2)


CACHES: list[tuple[Cache, dict[str, Any]]] = [
    (Cache((200, 50), (4, 2), page=16, splits=2), {}),
    (Cache((200, 300), (12, 2), 3, head=(64, 64), dtype=torch.float16, sink=True, splits=3), CAUSAL),
    (
        Cache((150, 60), (7, 1), 2, 128, pages_of_heads=True, head=(256, 256)),
        {"is_causal": True, "window_size": (40, 0), "softcap": 5.0},
    ),
    (Cache((300, 140), (6, 2), 40, 256, head=(192, 128), sink=True), CAUSAL),
    (Cache((200, 300), (12, 2), 3, 32, head=(96, 96), sink=True, splits=2), CAUSAL),
    (
        Cache((300, 140), (6, 2), 40, 16, head=(192, 192), dtype=torch.float16),
        {"window_size": (99, 6), "top_left": True},
    ),
    (Cache((40, 20), (2, 1), page=16, splits=1, far=9 << 30), {}),  # beyond 2^31 steps of 16 bytes
    (Cache((40, 20), (2, 1), page=16, splits=1, far=4272), {}),  # a page is no whole number of rows
]


@pytest.mark.parametrize(
    ("arch", "cache", "options"), brief([(arch, *case) for case in CACHES for arch in ("sm_90a", "sm_100a")], 0)
)
def test_caches_of_keys(arch: str, cache: Cache, options: dict[str, Any]) -> None:
    """Results in PyTorch and in the emulator are those of each sequence alone."""
    keys, batch, (hq, _) = cache.keys(), len(cache.lengths), cache.heads
    k, v, table = cache.stored(keys)
    q = torch.randn(batch, cache.rows, hq, cache.head[0]).to(cache.dtype).transpose(1, 2)
    sink = torch.linspace(-1, 3, hq) if cache.sink else None
    lengths = torch.tensor(cache.lengths, dtype=torch.int32)

    def attended(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **samples: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
        lse = torch.full(q.shape[:3], torch.nan)
        arguments = {name: x for name, x in {**samples, "sink": sink}.items() if x is not None}
        more = {f"sample_{name}": x for name, x in arguments.items()}
        operation = SdpaForward(q, k, v, o, lse, **more, num_splits=cache.splits, **options)
        operation.compile()
        operation.execute(q, k, v, o, lse, **{f"{name}_tensor": x for name, x in arguments.items()})
        return o, lse

    alone = [attended(q[i : i + 1], *(x[None] for x in pair)) for i, pair in enumerate(keys)]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for emulated in ("", arch):
        with within(emulated) as report:
            o, lse = attended(q, k, v, seqlen_k=lengths, page_table=table)
        torch.testing.assert_close(lse, expected[1], atol=2e-6, rtol=1e-6)
        assert (o.double() - expected[0]).norm() <= 2 * torch.finfo(o.dtype).eps * expected[0].double().norm()
    names = [launch.kernel.partition("_cutlass")[0] for launch in report.launches]
    assert names == ["cudnn_attention_decode", "cudnn_attention_combine"]


@pytest.mark.parametrize(("rows", "arch", "splits"), [(16, "sm_90a", 26), (17, "sm_90a", 0), (16, "sm_100a", 22)])
def test_few_rows_split_the_keys(rows: int, arch: str, splits: int) -> None:
    q, k, o, lse = matrix(5, rows, 4), matrix(5, 8192, 1), matrix(5, rows, 4), torch.empty(5, 4, rows)
    attention = SdpaForward(q, k, k, o, lse, arch=arch)
    plan = attention.plan(arch, attention.sizes(attention.descs))
    assert [slot.name for slot in plan.slots].count("splits") == (splits > 0)
    if splits:
        assert attention.constants == {"splits": splits}
        assert plan.workspace_size(attention.sizes(attention.descs)) >= splits * q.numel() * 4


@pytest.mark.parametrize(
    ("options", "drawn"), [(CAUSAL, True), ({}, True), ({"is_causal": True, "window_size": (40, 0)}, True)]
)
def test_ctas_draw_tiles_of_packed_sequences(options: dict[str, Any], drawn: bool) -> None:
    q, ends = torch.randn(70, 2, 128).bfloat16(), offsets(0, 30, 70)
    attention = SdpaForward(q, q, q, q, torch.empty(70, 2), ends, ends, arch="sm_90a", **options)
    sizes = attention.sizes(attention.descs)
    plan = attention.plan("sm_90a", sizes)
    assert ("workspace" in [slot.name for slot in plan.slots]) == drawn
    assert (plan.workspace_size(sizes) > 0) == drawn


def test_rows_that_see_nothing() -> None:
    q, k = matrix(1, 8, 1), matrix(1, 4, 1)
    o, lse = sdpa_fwd_wrapper_sm100_d256(q, k, k, **CAUSAL)
    assert (o[0, 0, :4] == 0).all()
    assert torch.equal(lse[0, 0, :4], torch.full((4,), -torch.inf))
    assert lse[0, 0, 4:].isfinite().all()


@pytest.mark.parametrize(("head", "head_v"), SdpaBackward.head_sizes)
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_is_a_kernel_of_its_own_on_hopper(head: int, head_v: int, deterministic: bool) -> None:
    q, v, lse = matrix(1, 32, 2, head), matrix(1, 32, 2, head_v), torch.empty(1, 2, 32)
    options: dict[str, Any] = {"deterministic": deterministic}
    for arch in ("sm_90a", "sm_100a"):
        attention = SdpaBackward(q, q, v, v, v, lse, q, q, v, arch=arch, **options)
        configuration = attention.plan(arch, attention.sizes(attention.descs)).configuration
        assert getattr(configuration, "deterministic", False) == (deterministic and arch == "sm_90a")


@pytest.mark.parametrize(
    ("options", "lengths", "heads", "share", "split"),
    [
        ({}, [512] * 26, 8, 1, (10, 6)),
        ({}, [64] * 26, 32, 1, (40, 3)),
        ({}, [64] * 26, 33, 1, (0, 1)),
        ({}, [], 8, 1, (0, 1)),
        ({}, [64] * 26, 64, 1, (0, 1)),
        ({"right": True}, [*range(64, 12, -2)], 32, 1, (0, 1)),
        ({"right": True}, [*range(512, 96, -16)], 8, 1, (208, 2)),
        ({"right": True, "deterministic": True}, [*range(512, 96, -16)], 8, 1, (0, 1)),
        ({"right": True, "deterministic": True}, [*range(512, 96, -16)], 8, 2, (208, 2)),
        ({"right": True, "deterministic": True}, [*range(512, 96, -16)], 2, 9, (52, 3)),
    ],
)
def test_last_blocks_of_keys_are_split(
    options: dict[str, bool], lengths: list[int], heads: int, share: int, split: tuple[int, int]
) -> None:
    """In 66 pairs of CTAs, of which 208 blocks leave 10 for a fourth turn, and 858 none. Where they take turns with a
    right end, parts have whole ones of the heads that share one of K.
    """
    c = BackwardConfiguration("bfloat16", 256, 256, (64, 80), pair=True, **options)
    assert kv_block_split.split_of(c, lengths, heads, 132, share) == dict(zip(("split", "parts"), split, strict=True))


@pytest.mark.parametrize(
    ("batches", "rows", "heads", "d", "causal", "in_turns"),
    [
        (4, 4096, (8, 8), 256, False, True),
        (16, 1024, (8, 8), 256, False, False),
        (16, 1024, (8, 8), 256, True, True),
        (1, 4096, (2, 2), 256, True, False),
        (4, 4096, (16, 16), 128, False, False),
        (1, 16384, (32, 32), 64, False, True),
        (4, 4096, (32, 32), 64, True, True),
        (4, 4096, (32, 8), 64, True, False),
    ],
)
def test_turns_are_taken_where_they_are_faster(
    batches: int, rows: int, heads: tuple[int, int], d: int, causal: bool, in_turns: bool
) -> None:
    q, k = (torch.empty(batches, h, rows, d, dtype=torch.bfloat16, device="meta") for h in heads)
    lse = torch.empty(batches, heads[0], rows, device="meta")
    attention = SdpaBackward(q, k, k, q, q, lse, q, k, k, is_causal=causal, arch="sm_90a")
    plan = attention.plan("sm_90a", attention.sizes(attention.descs))
    assert plan.configuration.deterministic == in_turns


@pytest.mark.parametrize("heads", [63, 64])
def test_no_gradients_of_more_elements_than_kernels_count(heads: int) -> None:
    """Sums of dQ for more than 2^31 elements were written to wrong addresses."""
    rows = 2**18 + 1
    q, k = (torch.empty(1, h, rows, 128, dtype=torch.bfloat16, device="meta") for h in (heads, 1))
    tensors = (q, k, k, q, q, torch.empty(1, heads, rows, device="meta"), q, k, k)
    attention = SdpaBackward(*tensors, arch="sm_90a")
    small = cudnn.NSA.CompressionAttentionBackward(*tensors, arch="sm_90a")
    leaves = [x.clone().requires_grad_() for x in (q, k, k)]
    unsupported_reason = fused.unsupported_reason(*leaves, (False, 0, -1, -1), None, False)
    if heads == 63:
        assert attention.check_support()
        assert not unsupported_reason
        return
    assert f"a query of {q.numel()} elements" in unsupported_reason
    assert not fused.unsupported_reason(q, k, k, (False, 0, -1, -1), None, False)
    for each in (attention, small):
        with pytest.raises(NotImplementedError, match=f"elements of q: got {128 * 64 * (2**18 + 128)}; allowed"):
            each.check_support()
    assert SdpaBackward(*tensors, arch="sm_100a").check_support()


def test_packed_sequences_take_turns_as_if_all_had_the_average() -> None:
    q, lse = torch.empty(36_000, 8, 256, dtype=torch.bfloat16), torch.empty(36_000, 8)
    for rows, in_turns in ((3000, True), (300, False)):
        ends = torch.arange(0, 36_001, rows, dtype=torch.int32)
        attention = SdpaBackward(q, q, q, q, q, lse, q, q, q, ends, ends, arch="sm_90a")
        assert attention.ordered_dq == in_turns


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mma_tiler_mn": (64, 64)}, ValueError, "mma_tiler_mn"),
        ({"qk_acc_dtype": torch.float16}, ValueError, "qk_acc_dtype"),
        ({"window_size": (64, 0)}, NotImplementedError, "window_size"),
        ({"is_causal": True, "window_size": (31, 0)}, ValueError, "window_size, left"),
        ({"q_tensor": matrix(1, 1, 2), "is_causal": True}, ValueError, "is_causal: got True; allowed: False where"),
        ({"window_size": (-2, -1)}, ValueError, r"window_size: got \(-2, -1\); allowed: ends of 0 and more, or -1"),
        ({"q_tensor": matrix(1, 32, 3)}, ValueError, "heads of q"),
        ({"q_tensor": matrix(1, 32, 2).contiguous()}, ValueError, "q tensor stride"),
        ({"k_tensor": matrix(1, 32, 2).bfloat16()}, ValueError, "k tensor dtype"),
        ({name: matrix(1, 32, 2, 128) for name in ("q_tensor", "k_tensor", "v_tensor")}, ValueError, "head size"),
        ({"cum_seqlen_q_tensor": offsets(0, 32)}, ValueError, "both cum_seqlen_q and cum_seqlen_k"),
        ({"max_s_q": 31}, ValueError, "max_s_q"),
        ({"scale_softmax": -0.1}, ValueError, "scale_softmax"),
        ({"scale_softmax": float("nan")}, ValueError, "scale_softmax"),
        ({"window_size": (1.0, 0)}, TypeError, "window_size"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {name: matrix(1, 32, 2) for name in ("q_tensor", "k_tensor", "v_tensor")}
    with pytest.raises(error, match=message):
        sdpa_fwd_wrapper_sm100_d256(**{**arguments, **change})


@pytest.mark.parametrize("missing", ["q", "k", "v", "o", "lse"])
def test_no_tensor(missing: str) -> None:
    samples: dict[str, Any] = {f"sample_{name}": matrix(1, 32, 2) for name in "qkvo"}
    samples |= {"sample_lse": torch.empty(1, 2, 32), f"sample_{missing}": None}
    with pytest.raises(ValueError, match=f"SdpaForward: {missing} tensor: got None; allowed: a tensor"):
        SdpaForward(**samples).check_support()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q_tensor": None}, ValueError, "q tensor: got None"),
        ({"k_tensor": np.zeros((1, 2, 32, 256))}, TypeError, r"k tensor: got numpy\.ndarray.*torch\.from_numpy"),
        ({"cum_seqlen_q_tensor": [0, 32]}, TypeError, "cum_seqlen_q tensor: got list"),
    ],
)
def test_wrappers_of_what_is_no_tensor(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {f"{name}_tensor": matrix(1, 32, 2) for name in "qkv"} | change
    with pytest.raises(error, match=f"SdpafwdSm100D256: {message}"):
        sdpa_fwd_wrapper_sm100_d256(**arguments)
    arguments |= {"o_tensor": matrix(1, 32, 2), "do_tensor": matrix(1, 32, 2), "lse_tensor": torch.zeros(1, 2, 32)}
    with pytest.raises(error, match=f"SdpabwdSm100D256: {message}"):
        sdpa_bwd_wrapper_sm100_d256(**arguments)


def test_given_lengths_of_the_longest_sequences_decide_what_hides_no_key() -> None:
    q, ends = torch.randn(3, 2, 256).half(), offsets(0, 1, 2, 3)
    options: dict[str, Any] = {"max_s_q": 16, "max_s_k": 16, "is_causal": True, "window_size": (4, 0)}
    o, _ = sdpa_fwd_wrapper_sm100_d256(q, q, q, ends, ends, **options)
    torch.testing.assert_close(o, q)  # each row sees its own key alone


def test_a_right_end_beside_is_causal() -> None:
    """Refused, save by the names of existing programs, for which it is 0."""
    q, lse = matrix(1, 32, 2), torch.empty(1, 2, 32)
    options: dict[str, Any] = {"is_causal": True, "window_size": (8, 4)}
    for attention in (SdpaForward(q, q, q, q, lse, **options), SdpaBackward(q, q, q, q, q, lse, q, q, q, **options)):
        with pytest.raises(ValueError, match=r"window_size: got \(8, 4\); allowed: \(left, -1\) or \(left, 0\)"):
            attention.check_support()
    for one, other in zip(
        *(sdpa_fwd_wrapper_sm100_d256(q, q, q, is_causal=True, window_size=(8, x)) for x in (4, 0)), strict=True
    ):
        assert torch.equal(one, other)


def test_a_calls_scale_is_checked() -> None:
    q = matrix(1, 32, 2)
    attention = SdpaForward(q, q, q, q, torch.empty(1, 2, 32))
    attention.compile()
    with pytest.raises(ValueError, match=r"scale_softmax: got -0\.1; allowed: numbers above 0"):
        attention.execute(q, q, q, q, torch.empty(1, 2, 32), scale_softmax=-0.1)
    backward: dict[str, Any] = dict.fromkeys(SdpaBackward.parameters, q) | {"lse": torch.empty(1, 2, 32)}
    samples = {f"sample_{name}": x for name, x in backward.items() if not name.startswith("cum")}
    for scale, error in ((float("nan"), ValueError), (float("inf"), ValueError), (True, TypeError), (1j, TypeError)):
        with pytest.raises(error, match="SdpaBackward: scale_softmax: got"):
            SdpaBackward(**samples, scale_softmax=scale)


@pytest.mark.parametrize(
    ("rows", "keys", "left", "right"),
    [(1, 12, -1, 0), (1, 12, 3, 0), (9, 9, 40, 0), (0, 9, -1, 0), (9, 0, -1, 0), (9, 14, 3, 2), (70, 80, -1, 4)],
)
def test_windows_that_existing_programs_expect_to_be_refused(rows: int, keys: int, left: int, right: int) -> None:
    """Those that hide nothing, also of no rows or keys, and others than causal ones. Gradients of keys that no row sees
    are zeros.
    """
    q, k, v, do = (torch.randn(1, 2, n, 64).half() for n in (rows, keys, keys, rows))
    o, lse = torch.empty_like(q), torch.empty(1, 2, rows)
    options: dict[str, Any] = {"is_causal": right == 0, "window_size": (left, right or -1)}
    forward = SdpaForward(q, k, v, o, lse, **options)
    forward.compile()
    forward.execute(q, k, v, o, lse)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    row, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)
    seen = (key <= row + right) & ((key >= row - left) | (left < 0))
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=seen)
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)
    actual = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    backward = SdpaBackward(q, k, v, o, do, lse, *actual, **options)
    backward.compile()
    backward.execute(q, k, v, o, do, lse, *actual)
    for ours, other in zip(actual, torch.autograd.grad(expected, wide, do.double()), strict=True):
        torch.testing.assert_close(ours.double(), other, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("missing", ["q", "k"])
def test_gradients_where_nothing_is_attended_launch_no_kernel(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of no CTAs is an error on a GPU. Objects take such a call between others."""
    kernels, streams = Recorded(monkeypatch), list[Any]()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: streams.append(stream) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: address)

    def tensors(rows: int, keys: int) -> list[torch.Tensor]:
        sizes = (rows, keys, keys, rows, rows)
        q, k, v, o, do = (torch.randn(1, 2, n, 64).half() for n in sizes)
        return [q, k, v, o, do, torch.zeros(1, 2, rows), *(torch.full_like(x, torch.nan) for x in (q, k, v))]

    samples = tensors(32, 48)
    backward = SdpaBackward(*samples, arch="sm_90a")
    backward.compile()
    for arguments, launches in ((samples, 1), (tensors(*((0, 48) if missing == "q" else (32, 0))), 1), (samples, 2)):
        backward.execute(*map(OnGpu, arguments), current_stream=3)
        assert len(kernels.calls) == launches
        if arguments is not samples:
            assert not any(x.any() for x in arguments[6:])
    assert streams.count(3) == len(streams) > 0


@pytest.mark.parametrize("ends", [(0, 33), (1, 32), (0, 20, 10, 32), (0, -1, 32)])
def test_offsets_outside_the_tensors(ends: tuple[int, ...]) -> None:
    """Refused by the constructor and, on the CPU, by every call, whose offsets may be others."""
    q, right = matrix(1, 32, 2)[0].transpose(0, 1), offsets(*([0] * (len(ends) - 1)), 32)
    with pytest.raises(ValueError, match=r"cum_seqlen_k: got .* up to the 32 rows"):
        sdpa_fwd_wrapper_sm100_d256(q, q, q, right, offsets(*ends))
    o, lse = sdpa_fwd_wrapper_sm100_d256(q, q, q, right, right)
    with pytest.raises(ValueError, match=r"cum_seqlen_q: got .* up to the 32 rows"):
        sdpa_bwd_wrapper_sm100_d256(q, q, q, o, o, lse, offsets(*ends), right)
    attention = SdpaForward(q, q, q, o, lse, right, right)
    attention.compile()
    with pytest.raises(ValueError, match=r"cum_seqlen_q: got .* up to the 32 rows"):
        attention.execute(q, q, q, o, lse, offsets(*ends), right)


@pytest.mark.parametrize(
    ("length", "page", "message"), [(33, 0, "seqlen_k: got"), (-1, 0, "seqlen_k: got"), (9, 3, "page_table: got")]
)
def test_lengths_and_pages_outside_the_caches(length: int, page: int, message: str) -> None:
    q, o, pool, lse = matrix(1, 1, 2), matrix(1, 1, 2), matrix(3, 8, 2), torch.empty(1, 2, 1)
    lengths, table = torch.tensor([length], dtype=torch.int32), torch.tensor([[0, page, 9, 9]], dtype=torch.int32)
    attention = SdpaForward(q, pool, pool, o, lse, sample_seqlen_k=lengths, sample_page_table=table)
    attention.compile()
    with pytest.raises(ValueError, match=message):
        attention.execute(q, pool, pool, o, lse, seqlen_k_tensor=lengths, page_table_tensor=table)


def test_offsets_belong_to_packed_sequences() -> None:
    q = matrix(1, 32, 2)
    o, lse = torch.empty_like(q), torch.empty(1, 2, 32)
    attention = SdpafwdSm100D256(q, q, q, o, lse)
    attention.compile()
    with pytest.raises(ValueError, match="cum_seqlen_q_tensor"):
        attention.execute(q, q, q, o, lse, offsets(0, 32), offsets(0, 32))
    with pytest.raises(ValueError, match="where each sequence ends"):
        SdpaForward(*(x[0].transpose(0, 1) for x in (q, q, q, o)), lse[0].t(), offsets(0), offsets(0))


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ({"sample_page_table": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, "sample_seqlen_k"),
        ({"sample_seqlen_k": torch.ones(2, dtype=torch.int32)}, ValueError, "seqlen_k"),
        ({"sample_seqlen_k": torch.ones(1)}, ValueError, "seqlen_k"),
        ({"num_splits": -1}, ValueError, "num_splits"),
    ],
)
def test_what_caches_are_refused(samples: dict[str, Any], error: type[Exception], message: str) -> None:
    q = matrix(1, 24, 2)
    with pytest.raises(error, match=message):
        SdpaForward(q, q, q, q, torch.empty(1, 2, 24), **samples).compile()
