"""Attention with variable lengths in PyTorch, one batch entry at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from support.dense_attention import attend, band


@dataclass
class Varying:
    """A problem for ``scaled_dot_product_attention``: shapes, options, and what they mean.

    Attributes:
        lengths_q, lengths_kv: Rows and keys of each entry; None: all.
        starts_q, starts_kv: Packed: the first token of each entry, and the end of the last.
    """

    b: int = 2
    h_q: int = 4
    h_kv: int = 4
    s_q: int = 24
    s_kv: int = 24
    d: int = 16
    d_v: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    lengths_q: list[int] | None = None
    lengths_kv: list[int] | None = None
    starts_q: list[int] | None = None
    starts_kv: list[int] | None = None

    def tensors(self, dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
        """Query, key, value, and the gradient of the result."""
        shapes = [
            (self.h_q, self.s_q, self.d),
            (self.h_kv, self.s_kv, self.d),
            (self.h_kv, self.s_kv, self.d_v),
            (self.h_q, self.s_q, self.d_v),
        ]
        return [torch.randn(self.b, *shape, device=device).to(dtype) for shape in shapes]

    def keywords(self, device: str = "cpu") -> dict[str, Any]:
        """The operator's keyword arguments."""
        given = {
            "seq_len_q": self.lengths_q,
            "seq_len_kv": self.lengths_kv,
            "cumulative_seq_len_q": self.starts_q,
            "cumulative_seq_len_kv": self.starts_kv,
        }
        tensors = {
            name: torch.tensor(numbers, dtype=torch.int32, device=device).view(-1, 1, 1, 1)
            for name, numbers in given.items()
            if numbers is not None
        }
        return {"enable_gqa": self.h_q != self.h_kv, **self.options, **tensors}

    def visible(self, rows: int, keys: int) -> torch.Tensor:
        """``[rows, keys]``."""
        left, right = (self.options.get(name, -1) for name in ("left_bound", "right_bound"))
        if right == -1:
            right = 0 if self.options.get("is_causal") else None
        bottom_right = bool(self.options.get("diagonal_alignment"))
        return band(rows, keys, None if left == -1 else left - 1, right, bottom_right)

    def entry(self, index: int, longest: int, lengths: list[int] | None, starts: list[int] | None) -> list[int]:
        """The entry's tokens among all ``b * longest``."""
        first = index * longest if starts is None else starts[index]
        end = first + longest if starts is None else starts[index + 1]
        count = end - first if lengths is None else lengths[index]
        return list(range(first, first + count))

    def solve(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The result in the type of q, 0 in rows that belong to no entry or see nothing."""
        tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = tokens[0].new_zeros(self.b * self.s_q, self.h_q, self.d_v)
        for index in range(self.b):
            rows = self.entry(index, self.s_q, self.lengths_q, self.starts_q)
            keys = self.entry(index, self.s_kv, self.lengths_kv, self.starts_kv)
            some = (x[places].transpose(0, 1) for x, places in zip(tokens, (rows, keys, keys), strict=True))
            visible = self.visible(len(rows), len(keys)).to(q.device)
            o = attend(*some, visible, scale=self.options.get("scale")).o
            places = torch.tensor(rows, dtype=torch.long, device=q.device)
            out = out.index_put((places,), o.transpose(0, 1))
        return out.unflatten(0, (self.b, self.s_q)).transpose(1, 2)


LENGTHS = {"lengths_q": [10, 24], "lengths_kv": [17, 5]}
PACKED = {"starts_q": [0, 10, 33], "starts_kv": [0, 17, 22]}
CASES = {
    "plain": Varying(),
    "scale": Varying(options={"scale": 0.3}),
    "causal": Varying(options={"is_causal": True}),
    "cross, another value size": Varying(s_q=16, s_kv=24, d_v=32),
    "grouped heads": Varying(h_q=8, h_kv=2, options={"is_causal": True}),
    "right bound beats causal": Varying(options={"is_causal": True, "right_bound": 3}),
    "bottom right": Varying(s_q=8, options={"is_causal": True, "diagonal_alignment": 1}),
    "window": Varying(options={"is_causal": True, "left_bound": 5}),
    "window, bottom right": Varying(s_q=16, options={"left_bound": 4, "right_bound": 2, "diagonal_alignment": 1}),
    "lengths": Varying(**LENGTHS),
    "lengths, bottom right": Varying(
        **{**LENGTHS, "lengths_q": [10, 5]}, options={"is_causal": True, "diagonal_alignment": 1}
    ),
    "rows that see nothing": Varying(**LENGTHS, options={"is_causal": True, "diagonal_alignment": 1}),
    "lengths of keys": Varying(lengths_kv=[17, 5], options={"is_causal": True}),
    "lengths of rows": Varying(lengths_q=[10, 24]),
    "an empty entry": Varying(lengths_q=[0, 24], lengths_kv=[0, 24]),
    "packed": Varying(**PACKED),
    "packed, causal, grouped heads": Varying(**PACKED, h_q=8, h_kv=2, options={"is_causal": True}),
    "packed, bottom right": Varying(
        starts_q=[0, 10, 20], starts_kv=[0, 17, 40], options={"is_causal": True, "diagonal_alignment": 1}
    ),
    "packed with gaps": Varying(**PACKED, lengths_q=[7, 20], lengths_kv=[12, 5]),
    "packed, empty entries": Varying(b=3, starts_q=[0, 0, 9, 9], starts_kv=[0, 0, 24, 24]),
}
