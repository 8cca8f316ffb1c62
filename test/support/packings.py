"""Random packings for FlashAttention's functions: results and gradients against float64, differentiated by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from cudnn.ops import flash_attn_func, flash_attn_varlen_func
from support.dense_attention import attend_packed, band

NAMES = "o", "lse", "dq", "dk", "dv", "dsink"
ABSOLUTE = 1e-4  # of the root mean square, where all terms cancel


@dataclass(frozen=True)
class Packing:
    """``lengths``: queries and keys of each sequence. ``left`` and ``right``: -1 is no bound."""

    lengths: tuple[tuple[int, int], ...]
    key_heads: int = 2
    share: int = 2
    head: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sink: bool = False
    seed: int = 0
    deterministic: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Of FlashAttention's functions."""
        window = self.left, self.right
        return {
            "causal": self.causal,
            "window_size": window,
            "softcap": self.softcap,
            "deterministic": self.deterministic,
        }

    def offsets(self, device: Any = None) -> list[torch.Tensor]:
        """``cu_seqlens`` of queries and keys."""
        return [
            torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in zip(*self.lengths, strict=True)
        ]

    def tensors(self, device: Any = None) -> list[torch.Tensor]:
        """q, k, v, the sinks, and the gradients of O and LSE; packed."""
        generator = torch.Generator().manual_seed(self.seed)
        queries, keys = (sum(n) for n in zip(*self.lengths, strict=True))
        heads, (d, dv) = self.key_heads * self.share, self.head
        shapes = [(queries, heads, d), (keys, self.key_heads, d), (keys, self.key_heads, dv), (heads,)]
        shapes += [(queries, heads, dv), (heads, queries)]
        dtypes = [self.dtype] * 3 + [torch.float32, self.dtype, torch.float32]
        return [
            torch.randn(shape, generator=generator).to(device, dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]

    def window(self, queries: int, keys: int) -> torch.Tensor:
        """Which keys each query sees."""
        left, right = (x if x >= 0 else None for x in (self.left, 0 if self.causal else self.right))
        return band(queries, keys, left, right, bottom_right=True)


@st.composite
def packings(draw: st.DrawFn, longest: int = 40, sequences: int = 4, **fixed: Any) -> Packing:
    """Packings with sequences of no, one, few and many rows; ``fixed`` are fields that are not drawn."""
    length = st.one_of(st.sampled_from([0, 1]), st.integers(0, longest))
    lengths = draw(st.lists(st.tuples(length, length), min_size=1, max_size=sequences))
    if draw(st.booleans()):
        lengths = [(n, n) for n, _ in lengths]
    drawn: dict[str, Any] = {
        "key_heads": st.integers(1, 2),
        "share": st.sampled_from([1, 2, 3, 8]),
        "head": st.sampled_from([(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
        "causal": st.booleans(),
        "left": st.one_of(st.just(-1), st.integers(0, longest)),
        "right": st.one_of(st.just(-1), st.integers(0, longest)),
        "softcap": st.sampled_from([0.0, 5.0]),
        "sink": st.booleans(),
    }
    values = {name: draw(x) for name, x in drawn.items() if name not in fixed}
    return Packing(tuple(lengths), **values, **fixed, seed=draw(st.integers(0, 1 << 30)))


def passes(packing: Packing, tensors: list[torch.Tensor], with_lse: bool = True) -> list[torch.Tensor]:
    """Results and gradients of ``flash_attn_varlen_func``, in the order of ``NAMES``."""
    *inputs, do, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in (inputs if packing.sink else inputs[:3])]
    longest = [max(n) for n in zip(*packing.lengths, strict=True)]
    sink = leaves[3] if packing.sink else None
    offsets = packing.offsets(do.device)
    o, lse = flash_attn_varlen_func(
        *leaves[:3], *offsets, *longest, **packing.options, learnable_sink=sink, return_lse=True
    )
    return [o.detach(), lse.detach(), *gradients(o, lse, leaves, do, dlse if with_lse else None)]


def gradients(
    o: torch.Tensor, lse: torch.Tensor, leaves: list[torch.Tensor], do: torch.Tensor, dlse: torch.Tensor | None
) -> list[torch.Tensor]:
    """Of the product with ``do``, and ``dlse`` where rows see a key."""
    if dlse is None:
        return list(torch.autograd.grad(o, leaves, do))
    seen = lse.detach() > -torch.inf
    return list(torch.autograd.grad([o, lse], leaves, [do, torch.where(seen, dlse, 0.0).to(lse.dtype)]))


def exact(packing: Packing, tensors: list[torch.Tensor], with_lse: bool = True) -> list[torch.Tensor]:
    """The same in float64, by a formula that shares no code."""
    *inputs, do, dlse = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (inputs if packing.sink else inputs[:3])]
    cap = packing.softcap
    modify: Callable[[torch.Tensor], torch.Tensor] | None = (lambda s: cap * torch.tanh(s / cap)) if cap else None
    sink = leaves[3] if packing.sink else None
    ends = packing.offsets()
    o, lse = attend_packed(*leaves[:3], *ends, packing.window, modify=modify, sink=sink)
    return [o.detach(), lse.T.detach(), *gradients(o, lse.T, leaves, do, dlse if with_lse else None)]


def assert_close(packing: Packing, actual: list[torch.Tensor], tensors: list[torch.Tensor], with_lse: bool) -> None:
    """An error is at most twice the reference's, which rounds P, dS and results alike, and a thousandth of the norm."""
    expected = exact(packing, tensors, with_lse)
    rounded = passes(packing, tensors, with_lse)
    for name, one, want, same in zip(NAMES, actual, expected, rounded, strict=False):
        one, same = one.cpu().double(), same.double()
        assert one.shape == want.shape, name
        seen = want > -torch.inf
        assert torch.equal(one > -torch.inf, seen), name
        one, want, same = (torch.where(seen, x, 0.0) for x in (one, want, same))
        floor = 1e-3 * want.norm() + ABSOLUTE * want.numel() ** 0.5
        error = (one - want).norm()
        assert error <= 2 * (same - want).norm() + floor, f"{name}: {error} in {packing}"


def check(
    packing: Packing, device: Any = None, with_lse: bool = True, context: Callable[[], Any] | None = None
) -> None:
    """Results and gradients on a device, or within a context."""
    if not all(sum(n) for n in zip(*packing.lengths, strict=True)):
        packing = replace(packing, lengths=(*packing.lengths, (3, 5)))
    tensors = packing.tensors()
    if context is None:
        actual = passes(packing, [x.to(device) for x in tensors], with_lse)
    else:
        with context():
            actual = passes(packing, tensors, with_lse)
    assert_close(packing, actual, tensors, with_lse)


def dense(packing: Packing, batch: int, device: Any = None) -> None:
    """``flash_attn_func`` on a batch with the first sequence's lengths."""
    packing = replace(packing, lengths=packing.lengths[:1] * batch)
    tensors = [x.to(device) for x in packing.tensors()]
    *inputs, do, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in (inputs if packing.sink else inputs[:3])]
    split = [x.unflatten(0, (batch, -1)) for x in leaves[:3]]
    sink = leaves[3] if packing.sink else None
    o, lse = flash_attn_func(*split, **packing.options, learnable_sink=sink, return_lse=True)
    o, lse = o.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert_close(packing, [o.detach(), lse.detach(), *gradients(o, lse, leaves, do, dlse)], packing.tensors(), True)
