"""Attention's gradients of any shapes, masks and layouts, against float64 differentiated by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn.sdpa import SdpaBackward
from support.dense_attention import attend, band, with_gradients
from support.selection import FULL

FLOOR = 2e-6  # of the norm of all terms without signs: float32 sums, where what they sum up cancels


@dataclass(frozen=True)
class Case:
    """``lengths``: queries and keys of each sequence, or of all of a batch. ``right``, ``left``: -1 is no end."""

    lengths: list[tuple[int, int]]
    packed: bool
    key_heads: int
    share: int
    head: tuple[int, int]
    dtype: torch.dtype
    causal: bool
    left: int
    right: int
    top_left: bool
    rows_first: bool
    large: float
    seed: int


def formula(
    x: dict[str, torch.Tensor], seen: torch.Tensor, scale: float, dtype: torch.dtype, signs: bool = True
) -> list[torch.Tensor]:
    """dQ, dK and dV of one sequence, (h, s, d), in float64 but for P, dS and results, which are rounded to a type.

    ``signs``: else every term of a sum is positive.
    """
    share = x["q"].shape[0] // x["k"].shape[0]
    q, k, v, o, do = (x[name].double() if signs else x[name].double().abs() for name in ("q", "k", "v", "o", "do"))
    k, v = (each.repeat_interleave(share, 0) for each in (k, v))
    scores = scale * x["q"].double() @ x["k"].double().repeat_interleave(share, 0).mT
    p = (scores - x["lse"].double()[..., None]).exp().masked_fill(~seen, 0)
    products, sums = do @ v.mT, (o * do).sum(-1, keepdim=True)
    ds = (p * (products - sums if signs else products + sums)).to(dtype).double()
    actual = [scale * ds @ k, scale * ds.mT @ q, p.to(dtype).double().mT @ do]
    return [actual[0].to(dtype), *(each.unflatten(0, (-1, share)).sum(1).to(dtype) for each in actual[1:])]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.integers(1, 40)
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3))
    if not packed or not all(sum(x) for x in zip(*lengths, strict=True)):
        lengths = [draw(st.tuples(size, size))] * draw(st.integers(1, 2))
    causal = draw(st.booleans())
    return Case(
        lengths,
        packed,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(SdpaBackward.head_sizes)),
        draw(st.sampled_from([torch.float16, torch.bfloat16])),
        causal,
        draw(st.integers(-1, 45)),
        -1 if causal else draw(st.integers(-1, 45)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from([0.1, 1.0, 4.0])),
        draw(st.integers(0, 1 << 30)),
    )


@settings(max_examples=400 if FULL else 20)
@given(case=cases())
def test_gradients(case: Case) -> None:
    """An error is at most twice that of the same formula in float64, where P, dS and results are rounded alike."""
    torch.manual_seed(case.seed)
    heads = case.key_heads * case.share
    sequences, scale = [], 1.2 * case.head[0] ** -0.5
    for rows, keys in case.lengths:
        shapes = {
            "q": (heads, rows, case.head[0]),
            "k": (case.key_heads, keys, case.head[0]),
            "v": (case.key_heads, keys, case.head[1]),
            "do": (heads, rows, case.head[1]),
        }
        x = {name: (case.large * torch.randn(shape)).to(case.dtype) for name, shape in shapes.items()}
        left, right = (x if x >= 0 else None for x in (case.left, 0 if case.causal else case.right))
        seen = band(rows, keys, left, right, bottom_right=not case.top_left)

        def attended(*tensors: torch.Tensor, seen: torch.Tensor = seen) -> torch.Tensor:
            q, k, v = tensors
            return attend(q, k, v, seen, scale=scale).o

        wide = [x[name].double() for name in ("q", "k", "v", "do")]
        o, *exact = with_gradients(attended, wide)
        x |= {"o": o.to(case.dtype), "lse": attend(wide[0], wide[1], wide[2], seen, scale=scale).lse.float()}
        sequences.append((x, seen, exact))
    given, actual = stored(case, [x for x, *_ in sequences])
    results = {f"d{name}": torch.full_like(given[name], torch.nan) for name in "qkv"}
    ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in zip(*case.lengths, strict=True)]
    samples: list[Any] = [*given.values(), *results.values(), *(ends if case.packed else ())]
    options: dict[str, Any] = {"is_causal": case.causal, "window_size": (case.left, case.right), "scale_softmax": scale}
    options["top_left"] = case.top_left
    backward = SdpaBackward(*samples, **options)
    backward.compile()
    backward.execute(*samples)
    for index, (x, seen, exact) in enumerate(sequences):
        rounded, terms = (formula(x, seen, scale, case.dtype, signs) for signs in (True, False))
        for name, want, same, size in zip("qkv", exact, rounded, terms, strict=True):
            error = (actual(results[f"d{name}"], index, name).double() - want).norm()
            assert error <= 2 * (same.double() - want).norm() + FLOOR * size.double().norm(), name


def stored(case: Case, sequences: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of all sequences in the order of :class:`SdpaBackward`, and how to find those of one in a result."""
    names = ("q", "k", "v", "o", "do", "lse")
    if case.packed:
        operation = {name: torch.cat([x[name].transpose(0, 1) for x in sequences]) for name in names}
        operation["lse"] = operation["lse"].t().contiguous().view(operation["lse"].shape)  # head by head
        ends = {name: [0, *accumulate(x[name].shape[1] for x in sequences)] for name in "qkv"}
        return operation, lambda x, i, name: x[slice(*list(pairwise(ends[name]))[i])].transpose(0, 1)
    operation = {name: torch.stack([x[name] for x in sequences]) for name in names}
    if case.rows_first:
        operation |= {name: operation[name].transpose(1, 2).contiguous().transpose(1, 2) for name in names[:-1]}
    return operation, lambda x, i, name: x[i]
