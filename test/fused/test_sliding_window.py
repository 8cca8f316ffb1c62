"""cudnn.NSA.SlidingWindowAttention: results against a mask over all pairs of rows and keys, and its contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cudnn
from cudnn import NSA
from support.dense_attention import attend_packed, band

Rows = tuple[int, ...]


def call(lengths: Rows, keys: Rows, d: int = 64, dv: int = 64, heads: tuple[int, int] = (4, 2)) -> dict[str, Any]:
    """Tensors of varlen sequences."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {"q": (sum(lengths), heads[0], d), "k": (sum(keys), heads[1], d), "v": (sum(keys), heads[1], dv)}
    actual: dict[str, Any] = {f"{n}_tensor": torch.randn(shape, device=device).half() for n, shape in rows.items()}
    for name, sizes in (("q", lengths), ("kv", keys)):
        actual[f"seq_len_{name}_tensor"] = torch.tensor(sizes, dtype=torch.int32, device=device)
    return actual


def same_length(arguments: dict[str, Any], batch: int) -> dict[str, Any]:
    """The same tensors as (b, h, s, d)."""
    return {f"{n}_tensor": arguments[f"{n}_tensor"].unflatten(0, (batch, -1)).transpose(1, 2) for n in "qkv"}


def windowed(arguments: dict[str, Any], left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """O and the log-sum-exp, in float64."""
    q, k, v = (arguments[f"{n}_tensor"].double() for n in "qkv")
    ends = (torch.nn.functional.pad(arguments[f"seq_len_{n}_tensor"].cumsum(0), (1, 0)) for n in ("q", "kv"))
    o, stats = attend_packed(q, k, v, *ends, lambda rows, keys: band(rows, keys, left - 1, right))
    return o, stats[..., None]


@pytest.mark.parametrize(("left", "right"), [(16, 0), (1, 0), (20, 7)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_sees_its_window(left: int, right: int, packed: bool) -> None:
    arguments = call((100, 100), (100, 100), 64, 32)
    o, stats = windowed(arguments, left, right)
    actual = NSA.sliding_window_attention_wrapper(
        **(arguments if packed else same_length(arguments, 2)), left_bound=left, right_bound=right
    )
    if not packed:
        assert actual["o_tensor"].transpose(1, 2).is_contiguous(), "o has the order of strides of q"
        actual = {name: x.transpose(1, 2).flatten(0, 1) for name, x in actual.items()}
    torch.testing.assert_close(actual["o_tensor"].double(), o, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(actual["stats_tensor"].double(), stats, atol=1e-4, rtol=1e-4)


def test_sequences_of_several_lengths_and_rows_beyond_all_keys() -> None:
    arguments = call((30, 70), (12, 70))
    o, stats = windowed(arguments, 8, 0)
    actual, lse = NSA.sliding_window_attention_wrapper(**arguments, left_bound=8, right_bound=0)
    assert not actual[12 + 8 - 1 : 30].any()
    seen = stats[..., 0] > -math.inf
    torch.testing.assert_close(actual.double(), o, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(lse.double()[seen], stats[seen], atol=1e-4, rtol=1e-4)


def test_offsets_of_sequences_with_room_between_them() -> None:
    arguments = call((30, 70), (30, 70))
    expected, _ = NSA.sliding_window_attention_wrapper(**arguments, left_bound=8, attn_scale=0.3)
    apart, starts = dict(arguments), torch.tensor([0, 40, 130]).to(arguments["q_tensor"].device)
    for name in "qkv":
        x = arguments[f"{name}_tensor"]
        apart[f"{name}_tensor"] = torch.cat([x[:30], x[:10] * math.nan, x[30:], x[:20] * math.nan])
        apart[f"{name}_ragged_offset_tensor"] = starts * x.stride(0)
    apart["o_ragged_offset_tensor"] = starts * arguments["q_tensor"].stride(0)
    apart["stats_ragged_offset_tensor"] = starts * arguments["q_tensor"].shape[1]
    actual, lse = NSA.sliding_window_attention_wrapper(**apart, left_bound=8, attn_scale=0.3)
    assert lse is not None
    torch.testing.assert_close(torch.cat([actual[:30], actual[40:110]]), expected)
    del apart["stats_ragged_offset_tensor"]
    actual, lse = NSA.sliding_window_attention_wrapper(**apart, left_bound=8, attn_scale=0.3, is_infer=True)
    assert lse is None
    torch.testing.assert_close(torch.cat([actual[:30], actual[40:110]]), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_o_of_another_type(dtype: torch.dtype) -> None:
    arguments = call((30, 70), (30, 70))
    expected, _ = NSA.sliding_window_attention_wrapper(**arguments, left_bound=8)
    actual, _ = NSA.sliding_window_attention_wrapper(**arguments, left_bound=8, o_dtype=dtype)
    assert torch.equal(actual, expected.to(dtype))


def operation(arguments: dict[str, Any], **options: Any) -> tuple[NSA.SlidingWindowAttention, dict[str, Any]]:
    """The class for a call's tensors, and the tensors with a result."""
    tensors = {"o_tensor": torch.empty_like(arguments["q_tensor"]), **arguments}
    samples = {f"sample_{name.removesuffix('_tensor')}": x for name, x in tensors.items()}
    return NSA.SlidingWindowAttention(**samples, **options), tensors


def test_the_steps_of_the_class() -> None:
    handle = cudnn.create_handle()
    arguments = same_length(call((64,), (64,)), 1)
    attention, tensors = operation(arguments, left_bound=8, cudnn_handle=handle)
    with pytest.raises(ValueError, match="not compiled"):
        attention.execute(**tensors)
    with pytest.raises(NotImplementedError, match="compile"):
        attention(**tensors)
    assert attention.check_support() is True
    attention.compile()
    with pytest.raises(NotImplementedError, match="skip_compile"):
        attention.execute(**tensors, skip_compile=True)
    attention.execute(**tensors, cudnn_handle=handle)
    expected, _ = NSA.sliding_window_attention_wrapper(**arguments, left_bound=8)
    torch.testing.assert_close(tensors["o_tensor"], expected)
    with pytest.raises(ValueError, match="stats tensor"):
        attention.execute(**tensors, stats_tensor=torch.empty(1, 4, 64, 1))
    with pytest.raises(ValueError, match="q tensor shape"):
        attention.execute(**{**tensors, "q_tensor": tensors["q_tensor"][:, :, 1:]})
    cudnn.destroy_handle(handle)


def test_what_no_graph_can_have_is_false_not_an_exception() -> None:
    attention, _ = operation(same_length(call((64,), (32,)), 1), left_bound=8)  # rows beyond all keys need lengths
    assert attention.check_support() is False
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        attention.compile()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_len_kv": None}, "max_seq_len_kv"),
        ({"seq_len_q_tensor": None}, "seq_len_q"),
        ({"q_ragged_offset_tensor": torch.zeros(3)}, "ragged offsets"),
        ({"seq_len_kv_tensor": torch.zeros(3, dtype=torch.int32)}, "seq_len_kv"),
        ({"q_tensor": torch.zeros(100, 3, 64).half()}, "heads of q"),
        ({"k_tensor": torch.zeros(1, 2, 100, 64).half()}, "k tensor"),
        ({"v_tensor": torch.zeros(99, 2, 64).half()}, "v tensor shape"),
        ({"v_tensor": torch.zeros(100, 2, 64)}, "v tensor dtype"),
        ({"o_tensor": torch.zeros(100, 4, 64).int()}, "o tensor dtype"),
        ({"left_bound": -8}, "left_bound: got -8; allowed: 0 and more"),
        ({"right_bound": -1}, "right_bound: got -1; allowed: 0 and more"),
        ({"attn_scale": float("nan")}, "attn_scale: got nan; allowed: finite numbers"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    options = {"left_bound": 8, "max_seq_len_q": 70, "max_seq_len_kv": 70}
    arguments = call((30, 70), (30, 70))
    for name, value in change.items():
        (arguments if name.endswith("_tensor") else options)[name] = value
    with pytest.raises(ValueError, match=message):
        operation(arguments, **options)[0].check_support()


@pytest.mark.parametrize("name", ["left_bound", "right_bound", "max_seq_len_q", "attn_scale"])
def test_numbers_of_other_types(name: str) -> None:
    options = {"left_bound": 8, "max_seq_len_q": 70, "max_seq_len_kv": 70, name: "8"}
    with pytest.raises(TypeError, match=f"SlidingWindowAttention: {name}: got str; allowed: an? (int|float)"):
        operation(call((30, 70), (30, 70)), **options)


def test_lengths_belong_to_packed_tensors() -> None:
    arguments = {**same_length(call((64,), (64,)), 1), "seq_len_q_tensor": torch.tensor([64])}
    with pytest.raises(ValueError, match="seq_len_q"):
        NSA.sliding_window_attention_wrapper(**arguments, left_bound=8)
