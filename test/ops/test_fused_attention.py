"""``cudnn.ops.scaled_dot_product_attention`` by the library's own kernels; on the CPU, by their reference."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudnn.attention import fused, graphs
from cudnn.errors import cudnnGraphNotSupportedError
from cudnn.experimental.ops import scaled_dot_product_attention as experimental
from cudnn.ops import scaled_dot_product_attention as attention
from cudnn.sdpa import SdpaBackward
from support.dense_attention import with_gradients

BOTTOM_RIGHT = 1
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def drawn(heads: tuple[int, int] = (4, 2), rows: tuple[int, int] = (20, 30), head: int = 64) -> list[torch.Tensor]:
    """q, k and v in three orders of memory, and the gradient of the result."""
    torch.manual_seed(0)
    q = torch.randn(2, heads[0], rows[0], head).bfloat16()
    k = torch.randn(2, rows[1], heads[1], head).bfloat16().transpose(1, 2)
    v = torch.randn(heads[1], 2, rows[1], head + 3).bfloat16().transpose(0, 1)[..., :head]
    return [q, k, v, torch.randn(2, heads[0], rows[0], head).bfloat16()]


def passes(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """The result and the gradients."""
    return with_gradients(functools.partial(attention, enable_gqa=True, **options), tensors)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((20, 30), {}),
        ((30, 30), {"is_causal": True, "scale": 0.2}),
        ((20, 30), {"right_bound": 0, "left_bound": 7, "diagonal_alignment": BOTTOM_RIGHT}),
        ((30, 30), {"is_causal": True, "left_bound": 30}),
        ((1, 30), {"is_causal": True, "diagonal_alignment": BOTTOM_RIGHT}),
        ((1, 30), {"right_bound": 0, "left_bound": 7, "diagonal_alignment": BOTTOM_RIGHT}),
        ((0, 30), {}),
        ((20, 30), {"is_causal": True}),
        ((20, 30), {"left_bound": 3}),
        ((20, 30), {"left_bound": 3, "right_bound": 7}),
        ((20, 30), {"right_bound": 7, "diagonal_alignment": BOTTOM_RIGHT}),
        ((30, 20), {"right_bound": 4}),
        ((1, 30), {"is_causal": True}),
        ((1, 30), {"right_bound": 3, "left_bound": 2}),
    ],
)
def test_agrees_with_cudnns_graph(rows: tuple[int, int], options: dict[str, Any]) -> None:
    tensors = drawn(rows=rows)
    actual, expected = (passes(tensors, backend=name, **options) for name in ("fused", "cudnn"))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
        assert one.shape == other.shape
    assert actual[0].is_contiguous()


LENGTHS: list[dict[str, Any]] = [
    {"seq_len_q": torch.tensor([3, 20])},
    {"seq_len_q": torch.tensor([0, 17]), "seq_len_kv": torch.tensor([30, 9]), "is_causal": True},
    {
        "seq_len_q": torch.tensor([5, 17]),
        "seq_len_kv": torch.tensor([8, 29]),
        "is_causal": True,
        "left_bound": 6,
        "diagonal_alignment": BOTTOM_RIGHT,
    },
    {"cumulative_seq_len_q": torch.tensor([0, 9, 28]), "cumulative_seq_len_kv": torch.tensor([0, 30, 55])},
    {
        "cumulative_seq_len_q": torch.tensor([2, 9, 28]),
        "cumulative_seq_len_kv": torch.tensor([1, 30, 55]),
        "seq_len_q": torch.tensor([4, 18]),
        "seq_len_kv": torch.tensor([6, 24]),
        "is_causal": True,
    },
]


@pytest.mark.parametrize("options", LENGTHS)
def test_lengths_agree_with_cudnns_graph(options: dict[str, Any]) -> None:
    """Also where there is no token: zeros. What lies there does not matter."""
    tensors = drawn()
    actual, expected = (passes(tensors, backend=name, **options) for name in ("fused", "cudnn"))
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
    if "cumulative_seq_len_q" not in options:
        q, k, v, do = (x.clone() for x in tensors)
        for entry, length in enumerate(options["seq_len_q"].tolist()):
            q[entry, :, length:] = do[entry, :, length:] = torch.nan
        for one, other in zip(passes([q, k, v, do], backend="fused", **options), actual, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "left_bound": 6, "diagonal_alignment": BOTTOM_RIGHT}])
def test_sinks_agree_with_cudnns_graph(options: dict[str, Any]) -> None:
    q, k, v, do = drawn()
    sinks, results = torch.randn(4).bfloat16(), []
    for backend in ("fused", "cudnn"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        out = attention(*leaves[:3], enable_gqa=True, sinks=leaves[3], backend=backend, **options)
        results.append([out, *torch.autograd.grad(out, leaves, do)])
    torch.testing.assert_close(*results, atol=3e-2, rtol=3e-2)


def test_tensors_at_odd_addresses_are_copied() -> None:
    tensors = drawn(rows=(30, 30))
    moved = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in tensors]
    for one, other in zip(passes(moved, backend="fused"), passes(tensors, backend="fused"), strict=True):
        assert torch.equal(one, other)


def test_what_is_refused() -> None:
    q, k, v, _ = drawn()
    for arguments, options, message in [
        ((q, k, v), {"attn_mask": torch.ones(20, 30, dtype=torch.bool)}, "the kernels take bounds, lengths and sinks"),
        ((q, k, v), {"dropout_p": 0.1}, "a mask or dropout"),
        ((q, k, v), {"left_bound": 0}, "the kernels take left ones from 1 up"),
        ((q, k, v), {"scale": 0.0}, "the scale 0.0: the kernels take positive ones"),
        ((q.float(), k.float(), v.float()), {}, "torch.float32: the kernels take"),
        ((q[..., :32], k[..., :32], v[..., :32]), {}, r"head sizes \(32, 32\): the kernels take"),
    ]:
        with pytest.raises(NotImplementedError, match=f'backend="fused": got .*{message}.*leave backend out'):
            attention(*arguments, enable_gqa=True, backend="fused", **options)
    with pytest.raises(ValueError, match=r'got.*allowed: None, "cudnn" or "fused"'):
        attention(q, k, v, backend="flash")
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        attention(q, k, v, backend="fused")


def test_float32_in_autocast_is_its_type() -> None:
    q, k, v, _ = drawn()
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=q.dtype):
        actual = attention(*wide, enable_gqa=True, backend="fused")
    assert torch.equal(actual, attention(q, k, v, enable_gqa=True, backend="fused"))
    assert torch.autograd.grad(actual.float().sum(), wide)[0].dtype is torch.float32


def test_chosen_where_it_was_measured_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.launch, "device_architecture", lambda index: "sm_90a")

    def tensor(head: int, rows: int = 4096, device: int | None = 0) -> Any:
        shape = torch.Size((4, 8, rows, head))
        return SimpleNamespace(shape=shape, is_cuda=device is not None, device=SimpleNamespace(index=device))

    def chosen(head: int, head_v: int = 0, **options: Any) -> bool:
        x = tensor(head, **options)
        return fused.is_faster(x, x, tensor(head_v or head, **options))

    for heads in SdpaBackward.head_sizes:
        assert chosen(*heads)
    assert not chosen(80)
    assert not chosen(256, rows=2048)
    assert not chosen(256, device=None)
    monkeypatch.setattr(fused.launch, "device_architecture", lambda index: "sm_100a")
    assert not chosen(256)


def test_the_choice_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = drawn()
    calls: list[Any] = []
    monkeypatch.setattr(fused, "attend", lambda *inputs, **others: calls.append(inputs) or inputs[:1])
    for faster in (True, False):
        monkeypatch.setattr(fused, "is_faster", lambda *inputs, faster=faster: faster)
        attention(q, k, v, enable_gqa=True)
        attention(q, k, v, enable_gqa=True, backend="cudnn")
    monkeypatch.setattr(fused, "is_faster", lambda *inputs: True)
    attention(q, k, v, enable_gqa=True, left_bound=3)  # on Hopper alone
    attention(q, k, v, enable_gqa=True, is_causal=True)  # from the top left
    attention(q, k, v, enable_gqa=True, right_bound=3, diagonal_alignment=BOTTOM_RIGHT)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((30, 20), {"is_causal": True, "diagonal_alignment": BOTTOM_RIGHT}),
        ((30, 20), {"left_bound": 4, "right_bound": 2}),
    ],
)
def test_what_cudnn_has_nothing_for(rows: tuple[int, int], options: dict[str, Any]) -> None:
    tensors = drawn(rows=rows)
    with pytest.raises(cudnnGraphNotSupportedError):
        passes(tensors, backend="cudnn", **options)
    torch.testing.assert_close(passes(tensors, **options), by_mask(tensors, **options), atol=3e-2, rtol=3e-2)


def by_mask(
    tensors: list[torch.Tensor],
    is_causal: bool = False,
    diagonal_alignment: int = 0,
    left_bound: int = -1,
    right_bound: int = -1,
) -> list[torch.Tensor]:
    """The result and the gradients of PyTorch's attention in float32, rows that see nothing as zeros."""
    rows, keys = tensors[0].shape[2], tensors[1].shape[2]
    place = torch.arange(rows)[:, None] + (keys - rows if diagonal_alignment else 0)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left_bound != -1:
        seen &= torch.arange(keys) > place - left_bound
    if is_causal or right_bound != -1:
        seen &= torch.arange(keys) <= place + max(right_bound, 0)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(rows, keys).masked_fill(~seen, -torch.inf).masked_fill(~seen.any(1, keepdim=True), 0)
        actual = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=bias, enable_gqa=True)
        return actual * seen.any(1, keepdim=True)

    return [x.bfloat16() for x in with_gradients(attend, [x.float() for x in tensors])]


def test_registered_right() -> None:
    q, k, v, _ = drawn(heads=(2, 2), rows=(8, 8))
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    torch.library.opcheck(torch.ops.cudnn.fused_sdpa.default, (*leaves, 0.125, True, -1), test_utils=CHECKS)
    many = torch.stack([q, 2 * q])
    together = torch.vmap(lambda x: attention(x, k, v, backend="fused"))(many)
    torch.testing.assert_close(together[1], attention(2 * q, k, v, backend="fused"))


def test_the_operators_of_head_size_256() -> None:
    for mine, other in (("sdpa_fwd_d256", "sdpa"), ("sdpa_bwd_d256", "sdpa_bwd")):
        mine, other = (str(getattr(torch.ops.cudnn, name).default._schema) for name in (mine, other))
        (more, results), others = mine.split("(", 1)[1].split(") ->"), other.split("(", 1)[1]
        assert others.startswith(more)
        assert others.endswith(results)
        assert len(more.split(",")) == 12 + 4 * ("dO" in more)
    q, k, v, do = drawn(rows=(8, 8), head=256)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    arguments = (0.07, True, 0, -1, -1, None, None, None, None)
    torch.library.opcheck(torch.ops.cudnn.sdpa_fwd_d256.default, (*leaves, *arguments), test_utils=CHECKS)
    results = []
    for operator in (torch.ops.cudnn.sdpa_fwd_d256, torch.ops.cudnn.sdpa):
        o, stats = operator(*leaves, *arguments)
        results.append([o, stats, *torch.autograd.grad(o, leaves, do)])
    torch.testing.assert_close(*results, atol=3e-2, rtol=3e-2)
    o, stats = results[0][:2]
    actual = torch.ops.cudnn.sdpa_bwd_d256(do, q, k, v, o, stats, *arguments, True)
    assert all(map(torch.equal, actual, results[0][2:]))
    for place, value, message in [
        (5, torch.ones(2, 1, 1, 1).int(), "the kernels take bounds alone"),
        (3, 4, "left_bound=4: the kernels take -1"),
        (0, 0.0, "the scale 0.0: the kernels take positive ones"),
    ]:
        changed = [value if place == i else x for i, x in enumerate(arguments)]
        with pytest.raises(NotImplementedError, match=message):
            torch.ops.cudnn.sdpa_fwd_d256(q, k, v, *changed)
        with pytest.raises(NotImplementedError, match=message):
            torch.ops.cudnn.sdpa_bwd_d256(do, q, k, v, o, stats, *changed)
    with pytest.raises(NotImplementedError, match=r"head sizes \(64, 64\): the kernels take 256"):
        torch.ops.cudnn.sdpa_fwd_d256(*(x[..., :64] for x in (q, k, v)), *arguments)


def test_existing_programs_reach_them_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = drawn(rows=(8, 8), head=256)
    graphs._fprop_cache.clear()
    expected = experimental(q, k, v, is_causal=True, enable_gqa=True)
    monkeypatch.setattr(graphs, "_on_blackwell", lambda x: True)
    for options, entries in [
        ({"is_causal": True}, 1),
        ({}, 1),
        ({"is_causal": True, "diagonal_alignment": BOTTOM_RIGHT}, 2),
        ({"seq_len_q": torch.tensor([3, 4])}, 3),
        ({"left_bound": 3}, 4),
        ({"is_causal": True, "right_bound": 1}, 5),
    ]:
        actual = experimental(q, k, v, enable_gqa=True, **options)
        assert len(graphs._fprop_cache) == entries
        if options == {"is_causal": True}:
            torch.testing.assert_close(actual, expected, atol=3e-2, rtol=3e-2)
    experimental(q, k[:, :, :6], v[:, :, :6], is_causal=True, enable_gqa=True)  # another diagonal
    assert len(graphs._fprop_cache) == 6
    actual = experimental(q, k, v, scale=0.0, enable_gqa=True)  # the kernels' 0 means another scale
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(actual, mean.expand_as(actual), atol=2e-2, rtol=2e-2)
