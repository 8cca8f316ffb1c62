"""Common to selection attention and its backward: block lists, varlen sequences, sizes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

from cudnn.api_base import TupleDict
from cudnn.errors import make_error
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec, Vector
from cudnn.lazy import torch
from cudnn.native_sparse_attention.base import Sparse
from cudnn.runtime.call import warn_once
from cudnn.sdpa.layouts import Heads

BLOCKS = (16, 32, 64, 128)
LISTS = (
    TensorSpec("block_indices", Heads("sq", "hk", "list_len", 4), ("int32",)),
    TensorSpec("block_counts", Contiguous("sq", "hk", alignment=4), ("int32",)),
    TensorSpec("cum_seqlen_q", Vector("ends", alignment=4), ("int32",)),
)


P = ParamSpec("P")


def of_one_length(wrapper: Callable[P, TupleDict]) -> Callable[P, TupleDict]:
    """Lets a wrapper for varlen sequences also take sequences of one length, (b, h, s, ..), without cu_seqlens.

    Tensors in the memory order (b, s, h, ..) are not copied; results have it.
    """
    signature = inspect.signature(wrapper)
    title = wrapper.__name__.removesuffix("_wrapper").title().replace("_", "")

    @functools.wraps(wrapper)
    def call(*args: P.args, **kwargs: P.kwargs) -> TupleDict:
        q: Any = args[0] if args else kwargs.get("q_tensor")
        if not isinstance(q, torch.Tensor) or q.ndim != 4:
            return wrapper(*args, **kwargs)
        arguments: dict[str, Any] = dict(signature.bind_partial(*args, **kwargs).arguments)
        offsets = [arguments.pop(f"cum_seqlen_{x}_tensor", None) for x in "qk"]
        if any(x is not None for x in offsets):
            warn_once(title, "cu_seqlens are ignored: tensors (b, h, s, d) have sequences of one length")
        batch, _, rows, _ = q.shape
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor):
                least = 3 if name in ("block_counts_tensor", "lse_tensor") else 4
                if not least <= x.ndim <= 4 or (x.shape[0], x.shape[2]) != (batch, rows):
                    got = f"the shape {tuple(x.shape)}"
                    allowed = f"(b, h, s{', d' * (least == 4)}), of {batch} sequences of {rows} rows, as q"
                    raise make_error(ValueError, title, name.replace("_", " "), got, allowed)
                arguments[name] = x.transpose(1, 2).flatten(0, 1)
        arguments["cum_seqlen_q_tensor"] = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * rows
        results = wrapper(**arguments)  # pyright: ignore[reportCallIssue]
        return TupleDict({x: y.unflatten(0, (batch, rows)).transpose(1, 2) for x, y in results.items()})

    return call


class Selected(Sparse):
    """Block-sparse attention of each row to the keys of its block list, for varlen sequences."""

    scalars = ("scale_softmax",)
    fixed = ("hq", "hk", "d", "dv")
    sized_by = ("q", "k", "v", "block_indices", "cum_seqlen_q")
    example = (("s", "hq", "hk", "d", "dv", "block"), (128, 16, 1, 64, 64, 64))
    aot_shapes = ((128, 64, 4, 128, 128, 64), (128, 16, 1, 128, 128, 64))

    block_size: int
    is_causal: bool

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        more = {"dv": shapes["v"][-1], "list_len": shapes["block_indices"][-1], "ends": shapes["cum_seqlen_q"][0]}
        sizes = super().sizes_of(shapes, options)
        return {**sizes, **more, "sk": sizes["sq"]}

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        if self.block_size not in BLOCKS:
            raise self.error("block_size", self.block_size, ", ".join(map(str, BLOCKS)))

    @classmethod
    def usual_sizes(cls, shape: tuple[int, ...]) -> Iterable[dict[str, int]]:
        s, hq, hk, d, dv, block = shape
        shapes = {
            "q": (s, hq, d),
            "k": (s, hk, d),
            "v": (s, hk, dv),
            "block_indices": (s, hk, 16),
            "cum_seqlen_q": (2,),
        }
        return [{**cls.sizes_of(shapes, {"packed": True, "block_size": block}), "b": 1}]
