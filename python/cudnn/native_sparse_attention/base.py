"""Common to the operations of native sparse attention: sequences, heads, options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cudnn.api_base import is_non_overlapping
from cudnn.errors import make_error
from cudnn.fused.host import FusedAPI
from cudnn.fused.layouts import Sizes
from cudnn.lazy import torch
from cudnn.runtime.call import warn_once
from cudnn.sdpa.base import OverHeads, checked_ends, checked_scale
from cudnn.sdpa.layouts import RowValues


@dataclass(frozen=True)
class AnyRowValues(RowValues):
    """A value for every row of every head, (b, h, s) or packed (t, h), with any strides."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        return not written or is_non_overlapping(shape, stride)

    def allowed(self, sizes: Sizes, written: bool) -> tuple[str, str]:
        return "a separate address for every element", ""


class Sparse(OverHeads):
    """An operation of native sparse attention, over sequences of one length, (b, h, s, d), or varlen, (t, h, d)."""

    most_heads: ClassVar[int] = 1 << 30
    """The largest qhead_per_kvhead."""

    scale_softmax: float

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.check_required(q=arguments["sample_q"])
        q = arguments["sample_q"]
        if q.ndim not in (3, 4):
            allowed = "(t, h, d) or (b, h, s, d)"
            raise make_error(ValueError, self._title(), "q tensor", f"the shape {tuple(q.shape)}", allowed)
        self.packed = q.ndim == 3
        samples = {name: self.taken(name.removeprefix("sample_"), value) for name, value in arguments.items()}
        scale = checked_scale(self, arguments["scale_softmax"], positive=False)
        super().__init__({**samples, "scale_softmax": scale or q.shape[-1] ** -0.5})

    def taken(self, name: str, value: Any) -> Any:
        """An argument as the kernel takes it: no offsets where sequences have one length, no last dimension of 1."""
        if name.startswith("cum_seqlen") and value is not None and not self.packed:
            warn_once(self._title(), "the offsets are ignored: tensors (b, h, s, d) have sequences of one length")
            return None
        if name == "lse" and value is not None and getattr(value, "ndim", 0) == (3 if self.packed else 4):
            return value.squeeze(-1)
        return value

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        packed = options["packed"]
        for name in ("q", "k"):
            if len(shapes[name]) != (3 if packed else 4):
                allowed = "(t, h, d), as q" if packed else "(b, h, s, d), as q"
                got = f"the shape {tuple(shapes[name])}"
                raise make_error(ValueError, cls._title(), f"{name} tensor", got, allowed)
        (*first, hq, sq, d), (*_, hk, sk, _) = shapes["q"], shapes["k"]
        if packed:
            first, hq, sq, hk, sk = [0], sq, hq, sk, hk
        return {"packed": packed, "b": first[0], "hq": hq, "sq": sq, "hk": hk, "sk": sk, "d": d}

    def check_rules(self, sizes: Sizes) -> None:
        super().check_rules(sizes)
        hq, hk = sizes["hq"], sizes["hk"]
        if hq > hk * self.most_heads:
            raise self.unsupported("heads of q", hq, f"at most {self.most_heads} for each of the {hk} heads of k")
        checked_scale(self, self.scale_softmax, positive=True)

    def check_values(self, tensors: Sequence[Any]) -> None:
        """Raises for offsets outside the tensors."""
        arguments = dict(zip(self.names, tensors, strict=True))
        for name in "qk" if self.packed else "":
            if arguments.get(f"cum_seqlen_{name}") is not None:
                checked_ends(self, f"cum_seqlen_{name}", arguments[f"cum_seqlen_{name}"], arguments[name].shape[0])

    @classmethod
    def usual_sizes(cls, shape: tuple[int, ...]) -> Iterable[dict[str, int]]:
        """All sizes of usual calls, from those of ``example``."""
        raise NotImplementedError

    @classmethod
    def aot_preset(cls, dtype: str, shape: tuple[int, ...], arch: str) -> Iterable[FusedAPI]:
        torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        for sizes in cls.usual_sizes(shape):
            tensors = {
                spec.name: torch.empty_strided(
                    spec.layout.shape(sizes),
                    spec.layout.strides(sizes)[0],
                    dtype=torch_dtype if "float16" in spec.types else getattr(torch, next(iter(spec.types))),
                    device="cpu",
                )
                for spec in cls.tensors
                if sizes["packed"] or not spec.name.startswith("cum_seqlen")
            }
            for name in tensors.keys() & {"cum_seqlen_q", "cum_seqlen_k"}:  # only their values are looked at
                tensors[name].zero_()
            arguments: dict[str, Any] = {**cls.samples(tensors), "arch": arch}
            yield cls(**arguments)


class Compressed(Sparse):
    """An operation on compressed keys: varlen sequences have cu_seqlens of rows and of keys."""

    example = (("s", "hq", "hk", "d"), (256, 16, 1, 64))

    def sizes(self, descs: Mapping[str, Any]) -> dict[str, int]:
        ends = descs.get("cum_seqlen_q") or self.descs.get("cum_seqlen_q")
        count = ends.shape[0] if ends else 0
        sizes = {**super().sizes(descs), "ends": count} | ({"b": count - 1} if self.packed else {})
        if "v" not in self.descs:
            return sizes
        v = self.descs["v"]
        return {**sizes, "dv": v.shape[-1] if v is not None else sizes["d"]}

    def check_options(self) -> None:
        present = [name for name in ("cum_seqlen_q", "cum_seqlen_k") if self.has(name)]
        if self.packed and len(present) < 2:
            raise self.error("samples", " alone".join([*present, ""]) or "no offsets", "cum_seqlen_q and cum_seqlen_k")

    @classmethod
    def usual_sizes(cls, shape: tuple[int, ...]) -> Iterable[dict[str, int]]:
        s, hq, hk, d = shape
        sizes = {"b": 1, "hq": hq, "hk": hk, "sq": s, "sk": s // 32, "d": d, "dv": d, "ends": 2}
        return [{"packed": packed, **sizes, "count": 16, "listed": 16} for packed in (False, True)]
