"""What attention kernels are compiled for, on any architecture. Plain data, no CuTe DSL.

Tensors are as PyTorch has them: (b, h, s, d) or, where sequences of several lengths follow each other, ``packed``,
(t, h, d) with the offsets of their first rows. Several heads of Q may share one of K and V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from cudnn_kernels.formats import FORMATS
from cudnn_kernels.signature import MULTIPROCESSORS, Region, Scalar, Sizes, Slot, Stream, Tensor, Workspace, vector


def matrices(
    packed: bool, dtype: str, size: str, heads: str | int, names: dict[str, int], align: int = 16
) -> Iterator[Tensor]:
    """Tensors of so many elements a head, which have the stride 1."""
    for name, head in names.items():
        shape = (size, heads, head) if packed else ("b", heads, size, head)
        yield Tensor(name, dtype, shape, (*[None] * (len(shape) - 1), 1), align)


def offsets(packed: bool, dtype: str = "int32") -> tuple[Tensor, ...]:
    """Where sequences begin, and the last one's end: (b + 1,)."""
    names = ("cum_seqlen_q", "cum_seqlen_k") if packed else ()
    return tuple(vector(name, dtype, "ends") for name in names)


def row_values(packed: bool, name: str, heads: str | int = "hq") -> Tensor:
    """A float32 value for every row of every head, such as the log-sum-exp: (b, h, s), or (t, h) in any order."""
    return Tensor(name, "float32", ("sq", heads) if packed else ("b", heads, "sq"), (None,) * (3 - packed), align=4)


WINDOW = (Scalar("right", "int32"), Scalar("left", "int32"))
"""How many keys a row sees beyond its own on either side; not used on a side where the configuration has no end."""


@dataclass(frozen=True)
class AttentionConfiguration:
    """What both passes are compiled for: heads of ``head`` elements, and of ``head_v`` in V and O.

    ``right`` and ``left``: the window ends on that side; a causal mask is a right end. ``compressed``: the right end is
    that of compressed keys, one for every so many rows, of which a row sees those that are complete. ``lse`` says where
    that of packed sequences is: "by head", whatever its strides say, or "by strides"; "" is none. ``top_left``: the
    diagonal begins at the first row and key, else it ends at the last ones. ``softcap``: scores s become
    softcap * tanh(s / softcap), before the mask.
    """

    dtype: str
    head: int
    head_v: int
    tile: tuple[int, int]
    packed: bool = False
    right: bool = False
    left: bool = False
    compressed: bool = False
    lse: str = "by head"
    top_left: bool = False
    softcap: bool = False


DESCALES = "descale_q", "descale_k", "descale_v"


@dataclass(frozen=True)
class ForwardConfiguration(AttentionConfiguration):
    """O = softmax(scale Q K^T + mask) V.

    ``tile`` is (query rows, keys) of a CTA. ``sink``: every head has a logit without a value. ``ends`` is the type of
    offsets. ``queue``: CTAs stay and draw packed tiles. ``holds``: a loop's ends stay in registers and places in rings
    are unsigned, which saves instructions in every step. ``own``: warpgroups take the blocks that their own rows need,
    not all of the tile's, and no turns; not with 8 bits. ``result`` is O's type, if it is not that of Q.
    """

    stages: int = 2
    sink: bool = False
    ends: str = "int32"
    queue: bool = False
    holds: bool = False
    own: bool = False
    result: str = ""

    kernel = "attention_forward:AttentionForward"

    @property
    def descaled(self) -> bool:
        """Whether Q, K and V are multiplied by descales, one for each head of K."""
        return FORMATS[self.dtype].bits == 8 and not self.compressed

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        return (
            *matrices(self.packed, self.dtype, "sq", "hq", {"q": self.head}),
            *matrices(self.packed, self.dtype, "sk", "hk", {"k": self.head, "v": self.head_v}),
            *matrices(self.packed, self.result or self.dtype, "sq", "hq", {"o": self.head_v}),
            *([row_values(self.packed, "lse")] if self.lse else []),
            *offsets(self.packed, self.ends),
            *([Tensor(x, "float32", ("b", "hk"), (None, None), 4) for x in DESCALES] if self.descaled else []),
            *[vector("sink", "float32", "hq")] * self.sink,
            Scalar("scale_softmax", "float32"),
            Scalar("scale_output", "float32"),
            *WINDOW,
            *[Scalar("softcap", "float32")] * self.softcap,
            MULTIPROCESSORS,
            *[Workspace((Region("order", self.order_bytes),))] * self.queue,
            Stream(),
        )

    def order_bytes(self, sizes: Sizes) -> Any:
        """Two numbers of 32 bits for each tile of packed sequences, and two."""
        return 8 * (1 + sizes["sq"] // self.tile[0] + sizes["b"])


def region(name: str, bytes_each: int, *shape: str) -> Region:
    """A region of the workspace: so many bytes for every element of a shape of sizes by name."""
    return Region(name, lambda sizes: math.prod((sizes[x] for x in shape), start=bytes_each))


@dataclass(frozen=True)
class DecodeConfiguration(ForwardConfiguration):
    """Few query rows and many keys: a head's keys are split among CTAs, whose results another kernel combines.

    The heads of Q that have a head of K in common are rows of the same tile. K and V may be ``cached``: each
    sequence has a length of its own, and with a ``page`` of so many keys a list of pages: K is (pages, hk, page, d).
    """

    cached: bool = False
    page: int = 0

    kernel = "attention_decode:AttentionDecode"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        keys = ("pages", "hk", self.page) if self.page else ("b", "hk", "sk")
        shapes = {name: ("b", "hq", "sq", head) for name, head in (("q", self.head), ("o", self.head_v))}
        shapes |= {"k": (*keys, self.head), "v": (*keys, self.head_v)}
        return (
            *[Tensor(name, self.dtype, shapes[name], (None, None, None, 1)) for name in "qkvo"],
            row_values(False, "lse"),
            *[vector("seqlen_k", "int32", "b")] * self.cached,
            *[Tensor("page_table", "int32", ("b", "pages of one"), (None, 1), align=4)] * (self.page > 0),
            *[vector("sink", "float32", "hq")] * self.sink,
            Scalar("scale_softmax", "float32"),
            Scalar("scale_output", "float32"),
            *WINDOW,
            *[Scalar("softcap", "float32")] * self.softcap,
            Scalar("splits", "int32"),
            Workspace(self.regions()),
            Stream(),
        )

    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: of every row, for every CTA that has some of its keys."""
        of_row = "splits", "b", "hq", "sq"
        return region("parts", 4 * self.head_v, *of_row), region("log_sums", 4, *of_row)


@dataclass(frozen=True)
class BackwardConfiguration(AttentionConfiguration):
    """dQ, dK and dV.

    ``tile`` is (query rows of a step, keys of a CTA). ``pair``: two CTAs exchange dS. ``deterministic``: dQ is summed
    in the order of keys. ``v_in_registers``: V is an operand from there, not from shared memory; not with ``pair``.
    ``split``: the last ``split`` blocks of keys are for ``parts`` CTAs, or pairs, each, which share the queries.
    ``shared``: dQ's sums are in the workspace of another pass, and this one "adds" to them, or, where one block has all
    keys, "stores" them. ``queue``: CTAs stay and draw their blocks of keys; not with ``pair`` or ``dq_turned``.
    """

    pair: bool = False
    queue: bool = False
    deterministic: bool = False
    v_in_registers: bool = False
    split: bool = False
    shared: str = ""

    @property
    def keys(self) -> int:
        """Of a CTA, or a pair."""
        return self.tile[1] * (1 + self.pair)

    @property
    def both(self) -> int:
        """Elements of a key in dK and dV, up to a power of 2."""
        return 1 << (self.head + self.head_v - 1).bit_length()

    @property
    def last_first(self) -> bool:
        """Whether CTAs start with the last keys: where they take turns, and where it was faster."""
        faster = (self.head, self.head_v) in ((64, 64), (192, 128)) and not (self.packed or self.left or self.split)
        return self.right and (self.deterministic or faster)

    @property
    def stores_first(self) -> bool:
        """Whether the first CTA whose turn it is stores its part of dQ, so that sums need not be zeros before."""
        return self.deterministic and not self.shared

    @property
    def dq_turned(self) -> bool:
        """Whether products for dQ have elements of the head in rows, which come in 64: query rows come in 8 then."""
        return self.tile[0] % 64 > 0

    @property
    def kernel(self) -> str:
        """The module and class of the kernel."""
        return "attention_backward_pair:PairedBackward" if self.pair else "attention_backward:AttentionBackward"

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernels."""
        query, key = ("sq", "hq"), ("sk", "hk")
        return (
            *matrices(self.packed, self.dtype, *query, {"q": self.head}),
            *matrices(self.packed, self.dtype, *key, {"k": self.head, "v": self.head_v}),
            *matrices(self.packed, self.dtype, *query, {"o": self.head_v, "do": self.head_v}),
            row_values(self.packed, "lse"),
            *matrices(self.packed, self.dtype, *query, {"dq": self.head}),
            *matrices(self.packed, self.dtype, *key, {"dk": self.head, "dv": self.head_v}),
            *offsets(self.packed),
            Scalar("scale_softmax", "float32"),
            *WINDOW,
            *[Scalar("softcap", "float32")] * self.softcap,
            *[Scalar("split", "int32"), Scalar("parts", "int32")] * self.split,
            *[MULTIPROCESSORS] * self.queue,
            Workspace(self.regions()),
            Stream(),
        )

    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: float32 values of every row, and dK and dV of the parts."""
        values = {"products": 1, "log_sums": 1}
        if not self.shared:
            values["dq_sums"] = self.head
        if self.deterministic:
            values["turns"] = 1
        rows = (Region(name, partial(self.row_bytes, 4 * count)) for name, count in values.items())
        drawn = [region("drawn", 4)] * self.queue
        return *rows, *drawn, *[region("key_sums", 4 * self.keys * self.both, "split", "parts")] * self.split

    def row_bytes(self, each: int, sizes: Sizes) -> Any:
        """So many for every row of a head of Q, of each sequence whole blocks of rows."""
        rows, count = self.tile[0], sizes["b"]
        blocks = sizes["sq"] // rows + count if self.packed else -(-sizes["sq"] // rows) * count
        return blocks * rows * sizes["hq"] * each


@dataclass(frozen=True)
class GradientsConfiguration(BackwardConfiguration):
    """dQ, dK and dV, each computed where nobody else adds to it.

    The tile is (rows of a CTA, columns of a block), be they queries or keys.
    """

    tile: tuple[int, int] = (128, 64)

    kernel = "attention_backward:AttentionBackward"

    def regions(self) -> tuple[Region, ...]:
        """The regions of the workspace: LSE * log2(e), and D."""
        return tuple(Region(name, partial(self.row_bytes, 4)) for name in ("log_sums", "products"))
