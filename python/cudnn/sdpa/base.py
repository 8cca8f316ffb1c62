"""Common to attention's forward and backward: sizes, sequences and windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from cudnn.errors import checked_number, make_error
from cudnn.fused.host import FusedAPI
from cudnn.fused.layouts import Contiguous, Sizes, TensorSpec, Vector
from cudnn.lazy import torch
from cudnn.sdpa.layouts import Heads, RowValues
from cudnn.sdpa.reference import Window
from cudnn_kernels.attention import DESCALES

TYPES = ("float16", "bfloat16")


def queries(
    name: str, head: str, written: bool = False, types: tuple[str, ...] = TYPES, same_dtype: str = "q"
) -> TensorSpec:
    """A matrix with the rows of Q."""
    return TensorSpec(
        name, Heads("sq", "hq", head), types, same_dtype="" if name == "q" else same_dtype, written=written
    )


def keys(name: str, head: str, written: bool = False, batch: str = "b", types: tuple[str, ...] = TYPES) -> TensorSpec:
    """A matrix with the rows of K; ``batch``: the name of its first dimension's size."""
    return TensorSpec(name, Heads("sk", "hk", head, batch=batch), types, same_dtype="q", written=written)


def row_values(name: str = "lse", written: bool = False, optional: bool = False) -> TensorSpec:
    """The log-sum-exp, or its gradient."""
    return TensorSpec(name, RowValues(), ("float32",), written=written, optional=optional)


def sinks(name: str = "sink", written: bool = False) -> TensorSpec:
    """A logit of each head of Q, or its gradient."""
    return TensorSpec(name, Contiguous("hq", alignment=4), ("float32",), written=written, optional=True)


OFFSETS = tuple(
    TensorSpec(name, Vector("ends", alignment=4), ("int32",), optional=True)
    for name in ("cum_seqlen_q", "cum_seqlen_k")
)


def checked_ends(api: FusedAPI, name: str, ends: Any, rows: int) -> list[int]:
    """cu_seqlens of varlen sequences with ``rows`` rows in all, copied to the host and checked."""
    values = ends.flatten().tolist()
    if len(values) < 2 or values[0] != 0 or any(a > b for a, b in pairwise([*values, rows])):
        got = f"{values[:8]}{'...' if len(values) > 8 else ''}"
        raise api.error(name, got, f"0, then where each sequence ends, up to the {rows} rows")
    return values


def checked_scale(api: FusedAPI, scale: float | None, positive: bool) -> float | None:
    """The call's scale of the scores; None for None and for 0. ``positive``: the kernel takes the row max before it
    scales, so the scale must not be negative.
    """
    if scale is None:
        return None
    number = api.checked_number("scale_softmax", scale)
    if positive and number < 0:
        raise api.error("scale_softmax", number, "numbers above 0; None or 0 for 1 / sqrt(d)")
    return number or None


MOST_SUMS = 2**31
"""The most elements of dQ, with every sequence's rows rounded up to 128: Hopper's kernels count them in 32 bits."""


class Gradients(FusedAPI):
    """A backward pass of attention: without rows or keys all gradients are zeros."""

    def check_sizes(self, sizes: Sizes) -> None:
        super().check_sizes(sizes)
        rows, sequences = sizes["sq"], sizes["b"]
        rows = rows + 128 * sequences if sizes["packed"] else -(-rows // 128) * 128 * sequences
        elements = rows * sizes["hq"] * sizes["d"]
        if elements > MOST_SUMS and self._target() == "sm_90a":
            allowed = "at most 2^31 on Hopper, with every sequence's rows rounded up to 128"
            raise self.unsupported("elements of q", elements, allowed, "call it for some of the heads at a time")

    def is_empty(self, tensors: Sequence[Any]) -> bool:
        return super().is_empty(tensors) or 0 in tensors[self.names.index("k")].shape

    def run_empty(self, tensors: Sequence[Any]) -> None:
        for name, tensor in zip(self.names, tensors, strict=True):
            if tensor is not None and self.spec(name).written:
                tensor.detach().zero_()


class OverHeads(FusedAPI):
    """Checks of all attention APIs: numbers of heads, head dimensions, and options without kernels."""

    counted = False
    sized_by = ("q", "k")
    fixed = ("d",)
    aot_dtypes = ("bf16", "fp16")
    head_sizes: ClassVar[Sequence[tuple[int, ...]]]
    """Head dimensions of Q and K and, if there is a V, of V."""

    def check_sizes(self, sizes: Sizes) -> None:
        hq, hk = sizes["hq"], sizes["hk"]
        if hq and (not hk or hq % hk):
            raise self.error("heads of q", hq, f"multiples of the {hk} heads of k")

    def check_rules(self, sizes: Sizes) -> None:
        heads = (sizes["d"], sizes["dv"]) if "dv" in sizes else (sizes["d"],)
        if heads not in self.head_sizes:
            allowed = (str(d) if {*dv} <= {d} else f"{d} with {dv[0]} in v" for d, *dv in self.head_sizes)
            raise self.error("head size", heads if len(heads) > 1 else heads[0], ", ".join(allowed))
        tiler = tuple(getattr(self, "mma_tiler_mn", (128, 128)))
        if tiler != (128, 128):
            raise self.error("mma_tiler_mn", tiler, "(128, 128); the kernel chooses its tiles")
        for name in ("qk_acc_dtype", "pv_acc_dtype", "acc_dtype"):
            if getattr(self, name, torch.float32) != torch.float32:
                raise self.error(name, getattr(self, name), "torch.float32")

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        raise NotImplementedError  # wrappers allocate the results


class Attention(OverHeads):
    """A pass of attention over sequences of one length or varlen sequences."""

    integers = ("right", "left")
    example = (("b", "h", "s", "d", "dv"), (1, 1, 128, 64, 64))
    as_existing: ClassVar[bool] = False
    """Whether it refuses what existing programs expect to be refused: matrices in another order in memory than
    (b, s, h, d) and (t, h, d), windows without ``is_causal``, and those that hide no key. With ``is_causal``, the right
    end that is given does not count.
    """

    is_causal: bool
    window_size: tuple[int, int]
    top_left: bool
    softcap: float = 0.0

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.check_required(**{name: arguments[f"sample_{name}"] for name in self.sized_by})
        packed = arguments["sample_cum_seqlen_q"] is not None
        if packed != (arguments["sample_cum_seqlen_k"] is not None):
            got = "cum_seqlen_k alone" if not packed else "cum_seqlen_q alone"
            raise make_error(
                ValueError, self._title(), "samples", got, "both cum_seqlen_q and cum_seqlen_k, or neither"
            )
        self.packed = packed
        samples = {name: self.squeezed(t) if name.startswith("sample_") else t for name, t in arguments.items()}
        ends = arguments["window_size"]
        if not isinstance(ends, Sequence) or isinstance(ends, str) or len(ends) != 2:
            raise make_error(TypeError, self._title(), "window_size", repr(ends), "a pair of ints")
        left, right = (
            checked_number(self._title(), "window_size", end, "a pair of ints", integer=True) for end in ends
        )
        if min(left, right) < -1:
            raise self.error("window_size", (left, right), "ends of 0 and more, or -1 for none")
        right = 0 if arguments["is_causal"] else right
        self.window = Window(right if right >= 0 else None, left if left >= 0 else None, arguments["top_left"])
        scale = (
            checked_scale(self, arguments["scale_softmax"], positive=False) or arguments["sample_q"].shape[-1] ** -0.5
        )
        super().__init__({**samples, "scale_softmax": scale, "right": max(right, 0), "left": max(left, 0)})
        self.longest = self._longest(arguments)

    def squeezed(self, tensor: Any) -> Any:
        """Packed tensors without a batch of 1 before, and row values without a dimension of 1 behind."""
        if not self.packed or not hasattr(tensor, "ndim"):
            return tensor
        if tensor.ndim == 4 and tensor.shape[0] == 1:
            return tensor.squeeze(0)
        return tensor.squeeze(-1) if tensor.ndim == 3 and tensor.shape[-1] == 1 else tensor

    def _longest(self, arguments: Mapping[str, Any]) -> tuple[int, int]:
        """The lengths of the longest sequences: as given where they are packed, else as read from the offsets."""
        found = []
        for name in ("q", "k"):
            ends, most = arguments[f"sample_cum_seqlen_{name}"], arguments[f"max_s_{name}"]
            if ends is None:
                shape, table = arguments[f"sample_{name}"].shape, arguments.get("sample_page_table")
                pages = table.shape[-1] if name == "k" and table is not None else 1
                longest = shape[2] * pages if len(shape) == 4 else 0
            elif most is not None and ends.device.type != "cpu" and not self.as_existing:
                longest = 0  # not read, so that the host does not wait for the GPU
            else:
                values = checked_ends(self, f"cum_seqlen_{name}", ends, arguments[f"sample_{name}"].shape[-3])
                longest = max(b - a for a, b in pairwise(values))
            if most is not None and most < longest:
                raise self.error(f"max_s_{name}", most, f"at least {longest}, the longest sequence")
            found.append(most if ends is not None and most is not None else longest)
        return found[0], found[1]

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        packed = options["packed"]
        dims = 3 if packed else 4
        for name, shape in shapes.items():
            if len(shape) != dims:
                allowed = "(t, h, d), with offsets" if packed else "(b, h, s, d), without offsets"
                raise make_error(ValueError, cls._title(), f"{name} tensor", f"the shape {tuple(shape)}", allowed)
        (*first, hq, sq, d), (*_, hk, sk, _) = shapes["q"], shapes["k"]
        if packed:
            first, hq, sq, hk, sk = [options["sequences"]], sq, hq, sk, hk
        found = {"packed": packed, "b": first[0], "hq": hq, "sq": sq, "hk": hk, "sk": sk, "d": d, "ends": first[0] + 1}
        table = options.get("table", ())  # its shape, where K and V are pages
        return found | {"bk": shapes["k"][0] if table else first[0], "pages": table[-1] if table else 1}

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        shapes = {name: descs[name].shape for name in self.sized_by}
        ends = descs.get("cum_seqlen_q") or self.descs.get("cum_seqlen_q")
        table = descs.get("page_table")
        options = {"sequences": ends.shape[0] - 1 if ends else 0, "table": table.shape if table else ()}
        found = self.sizes_of(shapes, {"packed": self.packed, **options})
        v = self.descs["v"]
        return {**found, "dv": v.shape[-1] if v is not None else found["d"]}

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        if not 0 <= self.softcap < math.inf:
            raise self.error("softcap", self.softcap, "a positive number, or 0 for none")
        if self.as_existing:
            self._check_as_existing()
        elif self.is_causal and self.window_size[1] > 0:
            allowed = "(left, -1) or (left, 0) with is_causal=True, which is a right end of 0"
            raise self.error("window_size", self.window_size, allowed, "pass is_causal=False for a right end")

    def _check_as_existing(self) -> None:
        if not self.is_causal and tuple(self.window_size) != (-1, -1):
            raise self.unsupported("window_size", self.window_size, "(-1, -1), unless is_causal=True")
        for name, desc in self.descs.items():
            if desc is not None and isinstance(self.spec(name).layout, Heads):
                order = (0, 1) if self.packed else (0, 2, 1)
                strides = [desc.stride[i] for i in order if desc.shape[i] != 1]
                if strides != sorted(strides, reverse=True):
                    allowed = "the order (t, h, d)" if self.packed else "the order (b, s, h, d)"
                    hint = "pass tensor.transpose(1, 2).contiguous().transpose(1, 2)"
                    raise self.error(f"{name} tensor stride", desc.stride, f"{allowed} in memory", hint)
        longest_q, longest_k = self.longest
        if self.window.left is not None and self.window.left >= longest_k - 1:
            raise self.error("window_size, left", self.window.left, f"less than {longest_k - 1}, or -1 for no end")
        if self.is_causal and longest_q <= 1:
            allowed = "False where no sequence has more than one row of q, which sees all keys anyway"
            raise self.error("is_causal", True, allowed)

    def check_cu_seqlens(self, cum_seqlen_q: Any, cum_seqlen_k: Any) -> None:
        """Raises if cu_seqlens are missing for varlen sequences, or passed for dense ones."""
        if (cum_seqlen_q is not None, cum_seqlen_k is not None) != (self.packed, self.packed):
            allowed = "given, for varlen sequences" if self.packed else "None, for (b, h, s, d)"
            raise self.error("cum_seqlen_q_tensor and cum_seqlen_k_tensor", (cum_seqlen_q, cum_seqlen_k), allowed)

    def check_values(self, tensors: Sequence[Any]) -> None:
        """Raises for offsets, lengths and pages outside the tensors, and for negative descales."""
        arguments = dict(zip(self.names, tensors, strict=True))
        for name in DESCALES:
            if arguments.get(name) is not None and (arguments[name] < 0).any():
                raise self.error(name, arguments[name].min().item(), "positive numbers, or 0")
        k, lengths, table = arguments["k"], arguments.get("seqlen_k"), arguments.get("page_table")
        if self.packed:
            for name in "qk":
                checked_ends(self, f"cum_seqlen_{name}", arguments[f"cum_seqlen_{name}"], arguments[name].shape[0])
        if lengths is None:
            return
        page = k.shape[2]
        most = page * (1 if table is None else table.shape[1])
        if ((lengths < 0) | (lengths > most)).any():
            raise self.error("seqlen_k", lengths.tolist(), f"numbers from 0 to {most}, the keys that there is room for")
        if table is not None:
            used = torch.arange(table.shape[1], dtype=torch.int64, device=table.device) * page < lengths[:, None]
            if (used & ((table < 0) | (table >= k.shape[0]))).any():
                allowed = f"pages from 0 to {k.shape[0] - 1}, up to the end of each sequence"
                raise self.error("page_table", table.tolist(), allowed)

    def ends(self) -> dict[str, Any]:
        """Options of a configuration: on which sides the window ends, and where the diagonal lies."""
        right, left = (end is not None for end in (self.window.right, self.window.left))
        return {"varlen": self.packed, "right": right, "left": left, "top_left": self.top_left}

    @classmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        b, h, s, d, dv = shape
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        for packed in (False, True):
            rows = b * s if packed else s
            sizes = {"packed": packed, "b": b, "bk": b, "hq": h, "hk": h, "sq": rows, "sk": rows, "d": d, "dv": dv}
            tensors = {
                spec.name: torch.empty_strided(
                    spec.layout.shape(sizes),
                    spec.layout.strides(sizes)[0],
                    dtype=torch.float32 if spec.types == ("float32",) else torch_dtype,
                    device="cpu" if packed else "meta",
                )
                for spec in cls.tensors
                if not spec.optional
            }
            if packed:
                tensors |= {spec.name: s * torch.arange(b + 1, dtype=torch.int32, device="cpu") for spec in OFFSETS}
            for causal in (False, True):
                arguments: dict[str, Any] = {**cls.samples(tensors), "is_causal": causal, "arch": arch}
                yield cls(**arguments)
