"""Attention and its gradients in float64, with bounds on what rounding in smaller types may change."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from support.dense_attention import slopes
from support.fuzz.approx import ACCUMULATION, APPROXIMATE, SUM, TINY, UNIT, Approx

_EXP = 2**-11  # of exponentials and logarithms in hardware


@dataclass
class Problem:
    """Dense operands in float64, with at most the heads of Q.

    Attributes:
        rows, columns: Valid ones of each batch entry, ``[b, 1, 1, 1]``.
        softcap: Scores go through ``softcap * tanh(scores / softcap)``; None for not.
        keep: Factor of dropout on the weights, 1 / (1 - p) included; None for nothing.
        kind: Type of Q, K, V and of the weights as MMA operands.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0
    bias: torch.Tensor | None = None
    alibi: bool = False
    softcap: float | None = None
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    sink: torch.Tensor | None = None
    keep: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.heads = self.q.shape[1]
        b, _, s_q, _ = self.q.shape
        s_kv = self.k.shape[2]
        full = torch.ones(b, 1, 1, 1, dtype=torch.long, device=self.q.device)
        self.n_rows = full * s_q if self.rows is None else self.rows.long()
        self.n_columns = full * s_kv if self.columns is None else self.columns.long()
        row = torch.arange(s_q, device=self.q.device).view(1, 1, -1, 1)
        column = torch.arange(s_kv, device=self.q.device).view(1, 1, 1, -1)
        self.valid_rows, self.valid_columns = row < self.n_rows, (column < self.n_columns).mT
        self.q = torch.where(self.valid_rows, self.q, 0.0)
        self.k, self.v = (torch.where(self.valid_columns, x, 0.0) for x in (self.k, self.v))
        # A diagonal that ends at the last valid row and column starts so far to the right of the first ones.
        diagonal = row + (self.n_columns - self.n_rows) if self.bottom_right else row
        seen = self.valid_rows & self.valid_columns.mT
        if self.right is not None:
            seen = seen & (column <= diagonal + self.right)
        if self.left is not None:
            seen = seen & (column > diagonal - self.left)
        self.seen = seen.expand(b, self.heads, s_q, s_kv)
        self._score(column - row)

    def _score(self, distance: torch.Tensor) -> None:
        k = self.repeat_heads(self.k)
        scores = self.q @ k.mT * self.scale
        error = ACCUMULATION.get(self.dtype, SUM) * abs(self.scale) * (self.q.abs() @ k.abs().mT)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
            error = error + 2 * APPROXIMATE * scores.abs()
        if self.bias is not None:
            scores = scores + self.bias
        if self.alibi:
            scores = scores + slopes(self.heads).to(self.q).view(1, -1, 1, 1) * distance
        error = error + 2**-20 * scores.abs()
        self.scores = scores.masked_fill(~self.seen, -torch.inf)
        self.score_error = torch.where(self.seen, error, 0.0).amax(-1, keepdim=True)

    def repeat_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Each head repeated for the heads of Q that it serves."""
        return x.repeat_interleave(self.heads // x.shape[1], 1)

    def gathered(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(1, (heads, -1)).sum(2)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.keep is None else x * self.keep

    @property
    def alive(self) -> torch.Tensor:
        """Rows that see something."""
        return self.seen.any(-1, keepdim=True)

    @property
    def relative(self) -> torch.Tensor:
        """Relative error of the weights."""
        return 2 * self.score_error + _EXP

    def softmax(self) -> tuple[torch.Tensor, dict[str, Approx]]:
        """The weights; Stats, Max and Sum_exp. Stats of rows that see nothing are -inf; the sink, where one is."""
        largest = self.scores.amax(-1, keepdim=True)
        if self.sink is not None:
            largest = torch.maximum(largest, self.sink)
        alive = self.alive
        shift = torch.where(alive, largest, 0.0)
        powers = torch.exp(self.scores - shift)
        total = powers.sum(-1, keepdim=True)
        if self.sink is not None:
            total = total + torch.exp(self.sink - shift)
        weights = torch.where(alive, powers / total, 0.0)
        stats = torch.where(alive, shift + total.log(), -torch.inf)
        if self.sink is not None:
            stats = torch.where(self.valid_rows & ~alive, self.sink, stats)
        anything = torch.where(self.valid_rows & alive, 0.0, torch.inf)
        return weights, {
            "Stats": Approx(stats, torch.where(alive, self.relative + 2**-20 * stats.abs(), 0.0)),
            "Max": Approx(shift, self.score_error + anything),
            "Sum_exp": Approx(total, self.relative * total + anything),
        }

    def forward(self) -> dict[str, Approx]:
        """O and the statistics. Valid rows that see nothing: O is 0."""
        weights, statistics = self.softmax()
        v = self.repeat_heads(self.v)
        sized = self.dropped(weights)
        error = (UNIT[self.dtype] + self.relative) * (sized @ v.abs())
        error = error + TINY[self.dtype] * (self.dropped(self.seen.double()) @ v.abs())
        return {"O": Approx(sized @ v, error + self.beyond["O"]), **statistics}

    @property
    def beyond(self) -> dict[str, torch.Tensor]:
        """By result: infinity in the rows of padding, which may hold anything, else 0."""
        rows, columns = (torch.where(valid, 0.0, torch.inf) for valid in (self.valid_rows, self.valid_columns))
        return {"O": rows, "dQ": rows, "dK": columns, "dV": columns}

    def backward(
        self, o: torch.Tensor, d_o: torch.Tensor, stats: torch.Tensor, bias_dims: tuple[int, ...] = ()
    ) -> dict[str, Approx]:
        """dQ, dK, dV, and dBias, dSink where they have a meaning, from given O and Stats."""
        unit, tiny = UNIT[self.dtype], TINY[self.dtype]
        o, d_o = (torch.where(self.valid_rows, x, 0.0) for x in (o, d_o))
        stats = torch.where(stats.isinf(), 0.0, stats)
        weights = torch.where(self.seen, torch.exp(self.scores - stats), 0.0)
        relative = self.relative
        v, k = self.repeat_heads(self.v), self.repeat_heads(self.k)
        sized = self.dropped(weights)
        d_v = self.gathered(sized.mT @ d_o, self.v.shape[1])
        v_error = ((2 * unit + relative) * sized + tiny).mT @ d_o.abs()
        row = (d_o * o).sum(-1, keepdim=True)
        d_p = d_o @ v.mT
        row_error = SUM * (d_o * o).abs().sum(-1, keepdim=True)
        p_error = self.dropped(SUM * (d_o.abs() @ v.abs().mT)) + row_error
        inner = self.dropped(d_p) - row
        d_s = weights * inner
        # The difference of two sums cancels: what each is worth counts, not what is left.
        s_error = weights * (
            p_error + (relative + 2**-20) * inner.abs() + 2**-20 * (self.dropped(d_p.abs()) + row.abs())
        )
        scale = abs(self.scale)
        rounded = s_error + 2 * unit * d_s.abs() + tiny / scale  # cuDNN rounds it times the scale
        results = {
            "dV": Approx(d_v, self.gathered(v_error, self.v.shape[1])),
            "dQ": Approx(self.scale * d_s @ k, scale * rounded @ k.abs()),
            "dK": Approx(
                self.gathered(self.scale * d_s.mT @ self.q, self.k.shape[1]),
                self.gathered(scale * rounded.mT @ self.q.abs(), self.k.shape[1]),
            ),
        }
        results = {name: Approx(x.value, x.bound + self.beyond[name]) for name, x in results.items()}
        if bias_dims:
            axes = [axis for axis, extent in enumerate(bias_dims) if extent == 1]
            # PyTorch takes an empty list of axes for all of them, so there is always one of extent 1.
            total, spent = (x.unsqueeze(-1).sum([*axes, -1], keepdim=True).squeeze(-1) for x in (d_s, rounded))
            results["dBias"] = Approx(total, spent)
        if self.sink is not None:
            sink_weight = torch.where(self.valid_rows, torch.exp(self.sink - stats), 0.0)
            error = (_EXP * row.abs() + row_error) * sink_weight
            error = error + SUM * (sink_weight * row).abs()
            results["dSink"] = Approx(-(sink_weight * row).sum([0, 2], keepdim=True), error.sum([0, 2], keepdim=True))
        return results
