"""What the kernels of native sparse attention are compiled for. Plain data, no CuTe DSL.

J. Yuan et al.: Native Sparse Attention (2025). Heads are numbers here, as are the sizes of blocks: models have few of
them, and kernels check what they are called with.
"""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_kernels.signature import Scalar, Slot, Stream, Tensor, vector


@dataclass(frozen=True)
class SelectionConfiguration:
    """Attention of each row to blocks of ``block`` keys of its own choice, for packed sequences.

    ``heads`` of Q share ``key_heads`` of K and V. ``tile`` is (rows, keys) of a step of a CTA, which has the heads of
    one row that share a head of K; so ``tile[1] / block`` blocks are taken at a time.
    """

    dtype: str
    heads: int
    key_heads: int
    head: int
    head_v: int
    block: int
    tile: tuple[int, int] = (64, 64)
    stages: int = 2

    kernel = "selection:Selection"
    cluster = 1

    @property
    def group(self) -> int:
        """Heads of Q that share one of K."""
        return self.heads // self.key_heads

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        dense = (None, None, 1)
        return (
            Tensor("q", self.dtype, ("s", self.heads, self.head), dense),
            Tensor("k", self.dtype, ("s", self.key_heads, self.head), dense),
            Tensor("v", self.dtype, ("s", self.key_heads, self.head_v), dense),
            Tensor("o", self.dtype, ("s", self.heads, self.head_v), dense),
            Tensor("l", "float32", ("s", self.heads), (None, None), align=4),
            Tensor("m", "float32", ("s", self.heads), (None, None), align=4),
            Tensor("block_indices", "int32", ("s", self.key_heads, "chosen"), dense, align=4),
            Tensor("block_counts", "int32", ("s", self.key_heads), (None, None), align=4),
            vector("cum_seqlen_q", "int32", "ends"), Scalar("scale_softmax", "float32"), Stream(),
        )  # fmt: skip


@dataclass(frozen=True)
class TopKConfiguration:
    """The ``count`` blocks of keys with the largest sums of probabilities, for each row and head of K.

    A block is ``block`` rows, whose keys were compressed to one for every ``stride`` rows. ``tile`` is (rows of the
    product, keys): a row of the product is a row of a head of Q.
    """

    dtype: str
    heads: int
    key_heads: int
    head: int
    count: int
    block: int
    stride: int
    packed: bool = False
    tile: tuple[int, int] = (128, 128)
    stages: int = 3

    kernel = "top_k:TopK"

    @property
    def group(self) -> int:
        """Heads of Q that share one of K."""
        return self.heads // self.key_heads

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        offsets = ("cum_seqlen_q", "cum_seqlen_k") if self.packed else ()
        return (
            self._matrix("q", self.dtype, "sq", self.heads, self.head),
            self._matrix("k", self.dtype, "sk", self.key_heads, self.head),
            Tensor("lse", "float32", ("sq", self.heads) if self.packed else ("b", self.heads, "sq"),
                   (None,) * (3 - self.packed), align=4),
            self._matrix("topk_scores", "float32", "sq", self.key_heads, self.count, align=4),
            self._matrix("topk_indices", "int32", "sq", self.key_heads, self.count, align=4),
            *(vector(name, "int32", "ends") for name in offsets), Scalar("scale_softmax", "float32"), Stream(),
        )  # fmt: skip

    def _matrix(self, name: str, dtype: str, rows: str, heads: int, width: int, align: int = 16) -> Tensor:
        shape = (rows, heads, width) if self.packed else ("b", heads, rows, width)
        return Tensor(name, dtype, shape, (*[None] * (len(shape) - 1), 1), align)
