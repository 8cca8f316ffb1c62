"""What the kernels of routing are compiled for. Plain data, no CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

MOST_EXPERTS = 1024
MOST_CHOICES = 16
MOST_GROUPS = 32


@dataclass(frozen=True)
class Rule:
    """How a router chooses ``top_k`` experts for a token from their logits, and weighs them.

    ``score`` is "softmax" or "sigmoid". With ``pre_softmax`` the softmax is over all experts, else over chosen ones.
    Experts form ``n_group`` groups of equal size, of which the best ``topk_group`` are chosen first.
    """

    top_k: int
    score: str = "softmax"
    pre_softmax: bool = True
    renormalize: bool = False
    n_group: int = 1
    topk_group: int = 1

    @property
    def is_scored_before(self) -> bool:
        """Whether a bias is added to scores; else to logits, whose softmax is of the chosen ones alone."""
        return self.score == "sigmoid" or self.pre_softmax

    @property
    def is_dense(self) -> bool:
        """Whether weights depend on the logits of experts that were not chosen: with a softmax of all.

        Renormalised, that is the softmax of the chosen ones.
        """
        return self.score == "softmax" and self.pre_softmax and not self.renormalize
