"""What selection attention and its gradients share: lists of blocks, packed sequences, sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec, Vector
from cudnn.native_sparse_attention.base import Sparse
from cudnn.sdpa.layouts import Heads

BLOCKS = (16, 32, 64, 128)
LISTS = (
    TensorSpec("block_indices", Heads("sq", "hk", "chosen", 4), ("int32",)),
    TensorSpec("block_counts", Contiguous("sq", "hk", alignment=4), ("int32",)),
    TensorSpec("cum_seqlen_q", Vector("ends", alignment=4), ("int32",)),
)


class Selected(Sparse):
    """Attention of each row to the keys of blocks that it chooses, for packed sequences."""

    scalars = ("scale_softmax",)
    fixed = ("hq", "hk", "d", "dv")
    sized_by = ("q", "k", "v", "block_indices", "cum_seqlen_q")
    example = (("s", "hq", "hk", "d", "dv", "block"), (128, 16, 1, 64, 64, 64))
    usual_shapes = ((128, 64, 4, 128, 128, 64), (128, 16, 1, 128, 128, 64))

    block_size: int
    is_causal: bool

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        more = {"dv": shapes["v"][-1], "chosen": shapes["block_indices"][-1], "ends": shapes["cum_seqlen_q"][0]}
        found = super().sizes_of(shapes, options)
        return {**found, **more, "sk": found["sq"]}

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        if self.block_size not in BLOCKS:
            raise self.error("block_size", self.block_size, ", ".join(map(str, BLOCKS)))

    @classmethod
    def usual_sizes(cls, shape: tuple[int, ...]) -> Iterable[dict[str, int]]:
        s, hq, hk, d, dv, block = shape
        shapes = {"q": (s, hq, d), "k": (s, hk, d), "v": (s, hk, dv), "block_indices": (s, hk, 16),
                  "cum_seqlen_q": (2,)}  # fmt: skip
        return [{**cls.sizes_of(shapes, {"packed": True, "block_size": block}), "b": 1}]
