"""Attention, forward and backward: shapes, layouts, masks, dropout, ragged and paged tensors."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

import cudnn
from support.fuzz.approx import Approx
from support.fuzz.attention_formula import Problem
from support.fuzz.case import Case, Spec, View, literal, packed, pick

_LARGEST = 3 << 20  # scores
_DEVIATIONS = 16  # standard ones of dropout's rate: 12 were observed, cause unknown
_ORDERS = {"bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "sbhd": (2, 0, 1, 3)}
ALIGNMENT = cudnn.diagonal_alignment


@dataclass(frozen=True)
class Shape:
    """Batch, heads of Q, K and V, lengths, head sizes of Q and K, and of V."""

    b: int
    h_q: int
    h_k: int
    h_v: int
    s_q: int
    s_kv: int
    d_qk: int
    d_v: int

    def dims(self, name: str) -> tuple[int, int, int, int]:
        """Of a tensor by the letter that ends its name: q, k, v, or o."""
        letter = name[-1].lower()
        heads = {"q": self.h_q, "k": self.h_k, "v": self.h_v, "o": self.h_q}[letter]
        length = self.s_q if letter in "qo" else self.s_kv
        return self.b, heads, length, self.d_qk if letter in "qk" else self.d_v


@dataclass(frozen=True)
class Mask:
    """Which scores take part, in the words of the call.

    Attributes:
        causal: ``""``, ``top_left`` or ``bottom_right``: the flags of a causal mask.
        left, right: Bounds of the band; ``old_left`` gives the left one its older name.
        bottom_right: The alignment, if no flag sets it.
        lengths_q, lengths_kv: Of a padding mask.
    """

    causal: str = ""
    left: int | None = None
    right: int | None = None
    old_left: bool = False
    bottom_right: bool = False
    lengths_q: tuple[int, ...] = ()
    lengths_kv: tuple[int, ...] = ()

    def options(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if self.causal:
            arguments["use_causal_mask" if self.causal == "top_left" else "use_causal_mask_bottom_right"] = True
        elif self.right is not None:
            arguments["diagonal_band_right_bound"] = self.right
        if self.left is not None:
            arguments["sliding_window_length" if self.old_left else "diagonal_band_left_bound"] = self.left
        if not self.causal and (self.left is not None or self.right is not None):
            arguments["diagonal_alignment"] = ALIGNMENT.BOTTOM_RIGHT if self.bottom_right else ALIGNMENT.TOP_LEFT
        return arguments

    @property
    def right_bound(self) -> int | None:
        return 0 if self.causal else self.right

    @property
    def aligned_bottom_right(self) -> bool:
        return self.causal == "bottom_right" or (not self.causal and self.bottom_right)


@dataclass(frozen=True)
class AttentionCase(Case):
    """Attention, or its backward pass.

    Attributes:
        strides: Of Q, K, V and O, logical shape ``[b, h, s, d]``; of the gradients, where they lie in another way.
        starts: By tensor, where it is ragged: first element of each batch entry, and the end of the last one.
        gap: Tokens between the entries of a ragged tensor.
        page: Tokens of a page, where K and V are paged; else 0.
        scale: Number, and how it is passed: ``number``, ``host``, ``memory``, or ``""`` for no scale.
        dropout: Probability; None for no dropout, 1 for a mask of the user's.
        statistics: Outputs other than O: ``Stats``, ``Max``, ``Sum_exp``.
        implementation: ``AUTO`` or ``COMPOSITE``.
        d_bias: Shape of dBias.
    """

    family = "attention"
    full = 3300
    most_refused = 0.06

    backward: bool
    shape: Shape
    mask: Mask
    strides: dict[str, tuple[int, ...]]
    starts: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    gap: int = 0
    page: int = 0
    scale: tuple[float, str] = (1.0, "")
    alibi: bool = False
    softcap: float | None = None
    dropout: float | None = None
    statistics: tuple[str, ...] = ()
    stats_dtype: str = "float32"
    implementation: str = "AUTO"
    deterministic: bool = False
    max_total: bool = False
    d_bias: tuple[int, ...] = ()
    d_sink: bool = False

    @classmethod
    def draw(cls, seed: int) -> AttentionCase:
        return cls(**Draw(seed).fields())

    # The graph.
    def build(self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor]) -> dict[str, cudnn.tensor]:
        for name in self.starts:
            if name in tensors:
                tensors[name].set_ragged_offset(tensors[f"start_{name}"])
        options: dict[str, Any] = {**self.mask.options(), "name": "attention", "use_alibi_mask": self.alibi}
        number, passed = self.scale
        if passed:
            options["attn_scale"] = number if passed == "number" else tensors["scale"]
        if "bias" in tensors:
            options["bias"] = tensors["bias"]
        if self.mask.lengths_q:
            options |= {"use_padding_mask": True, "seq_len_q": tensors["seq_q"], "seq_len_kv": tensors["seq_kv"]}
        if "sink" in tensors:
            options["sink_token"] = tensors["sink"]
        if self.softcap is not None:
            cap, inverse = graph.tensor_scalar(self.softcap), graph.tensor_scalar(1 / self.softcap)
            options["score_mod"] = lambda g, scores: g.mul(g.tanh(g.mul(scores, inverse)), cap)
        if self.dropout == 1.0:
            names = ["keep", "keep_scale", *(["keep_inverse"] if self.backward else [])]
            options["dropout"] = tuple(tensors[name] for name in names)
        elif self.dropout is not None:
            options["dropout"] = (self.dropout, tensors["seed"], tensors["offset"])
            s = self.shape
            dims = (s.b, s.h_q, s.s_q, s.s_kv)
            options["rng_dump"] = graph.tensor(dims, packed(dims, range(4)), torch.float32, name="rng_dump")
        operands = {name: tensors[name] for name in "qkv"}
        outputs = (
            self._backward(graph, tensors, operands, options)
            if self.backward
            else self._forward(graph, tensors, operands, options)
        )
        if "rng_dump" in options:
            outputs["rng_dump"] = options["rng_dump"]
        for tensor in outputs.values():
            tensor.set_output(True)
        return outputs

    def _forward(
        self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor], operands: dict[str, Any], options: dict[str, Any]
    ) -> dict[str, cudnn.tensor]:
        outputs: dict[str, cudnn.tensor] = {}
        if self.page:
            options |= {f"paged_attention_{letter}_table": tensors[f"table_{letter}"] for letter in "kv"}
            options["paged_attention_max_seq_len_kv"] = self.shape.s_kv
        for name, argument in (("Max", "score_max"), ("Sum_exp", "score_sum_exp")):
            if name in self.statistics:
                dims = (*self.shape.dims("q")[:3], 1)
                outputs[name] = options[argument] = graph.tensor(dims, packed(dims, range(4)), torch.float32, name=name)
        options |= operands | {"generate_stats": "Stats" in self.statistics}
        results = self._call_forward(graph, tensors, options)
        outputs |= {name: tensor for name, tensor in results.items() if tensor is not None}
        outputs["O"].set_dim(self.shape.dims("o")).set_stride(self.strides["o"])
        if "Stats" in outputs:
            stats = outputs["Stats"].set_data_type(getattr(torch, self.stats_dtype))
            if "stats" in self.starts:
                stats.set_dim((*self.shape.dims("q")[:3], 1)).set_stride(self.strides["stats"])
        self._offsets(tensors, outputs)
        return outputs

    def _call_forward(
        self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor], options: dict[str, Any]
    ) -> dict[str, cudnn.tensor | None]:
        implementation = getattr(cudnn.attention_implementation, self.implementation)
        return dict(zip(("O", "Stats"), graph.sdpa(**options, implementation=implementation), strict=True))

    def _call_backward(
        self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor], options: dict[str, Any]
    ) -> dict[str, cudnn.tensor]:
        return dict(zip(("dQ", "dK", "dV"), graph.sdpa_backward(**options), strict=True))

    def _backward(
        self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor], operands: dict[str, Any], options: dict[str, Any]
    ) -> dict[str, cudnn.tensor]:
        outputs: dict[str, cudnn.tensor] = {}
        operands |= {"o": tensors["o"], "dO": tensors["do"], "stats": tensors["stats"]}
        if self.d_bias:
            dims = self.d_bias
            outputs["dBias"] = options["dBias"] = graph.tensor(dims, packed(dims, range(4)), getattr(torch, self.io))
        if self.d_sink:
            dims = (1, self.shape.h_q, 1, 1)
            outputs["dSink"] = options["dSink_token"] = graph.tensor(dims, packed(dims, range(4)), torch.float32)
        if self.max_total:
            for letter, argument in (("q", "max_total_seq_len_q"), ("k", "max_total_seq_len_kv")):
                tokens = self.starts[letter][-1] // self.strides[letter][2]
                options[argument] = -(-tokens // 64) * 64
        if self.deterministic:
            options["use_deterministic_algorithm"] = True
        outputs |= self._call_backward(graph, tensors, options | operands)
        for name in ("dQ", "dK", "dV"):
            outputs[name].set_dim(self.shape.dims(name)).set_stride(
                self.strides.get(name, self.strides[name[1].lower()])
            )
        self._offsets(tensors, outputs)
        return outputs

    def _offsets(self, tensors: dict[str, cudnn.tensor], outputs: dict[str, cudnn.tensor]) -> None:
        for name, tensor in outputs.items():
            source = self._source(name)
            if source in self.starts:
                tensor.set_ragged_offset(tensors[f"start_{source}"])

    @staticmethod
    def _source(name: str) -> str:
        """The input whose layout an output, or another input, has."""
        return {"O": "o", "dQ": "q", "dK": "k", "dV": "v", "do": "o", "Stats": "stats"}.get(name, name)

    # Memory.
    def span(self, name: str) -> int:
        source = self._source(name)
        return self.starts[source][-1] + _SPARE * self.strides[source][2] if source in self.starts else 0

    def views(self, spec: Spec, memory: torch.Tensor, name: str) -> list[View]:
        starts = self.starts.get(self._source(name))
        if starts is None:
            return super().views(spec, memory, name)
        lengths = self.mask.lengths_kv if self._source(name) in "kv" else self.mask.lengths_q
        _, heads, _, size = spec.dims
        return [
            (
                (entry, slice(None), slice(0, length)),
                memory[start:].as_strided((heads, length, size), spec.strides[1:], memory.storage_offset() + start),
            )
            for entry, (start, length) in enumerate(zip(starts, lengths, strict=False))
        ]

    def _dense(self, data: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """An operand in float64 as ``[b, h, s, d]``, zeros beyond its lengths where it is ragged."""
        if self.page and name in "kv":
            return self._gathered(data, name)
        if name not in self.starts:
            return data[name].double()
        spec = self.inputs[name]
        dense = torch.zeros(spec.dims, dtype=torch.float64, device=data[name].device)
        for position, view in self.views(spec, data[name], name):
            dense[position] = view.double()
        return dense

    def _gathered(self, data: dict[str, torch.Tensor], letter: str) -> torch.Tensor:
        """K or V from its pages."""
        table = data[f"table_{letter}"]
        pages = -(-self.shape.s_kv // self.page)
        if f"table_{letter}" in self.starts:
            rows = []
            for start, length in zip(self.starts[f"table_{letter}"], self.mask.lengths_kv, strict=False):
                count = -(-length // self.page)
                rows.append(torch.nn.functional.pad(table[start : start + count], (0, pages - count)))
            table = torch.stack(rows)
        chosen = data[letter][table.reshape(self.shape.b, pages).long()]  # [b, pages, h, page, d]
        return chosen.transpose(1, 2).flatten(2, 3)[:, :, : self.shape.s_kv].double()

    # The formula.
    def _problem(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> Problem:
        keep = None
        if self.dropout == 1.0:
            keep = data["keep"].double() * data["keep_scale"].double()
        elif self.dropout is not None and "rng_dump" in results:
            keep = results["rng_dump"].double() / (1 - self.dropout)
            keep = keep.nan_to_num(nan=0.0)  # where no score takes part
        return Problem(
            **{name: self._dense(data, name) for name in "qkv"},
            dtype=getattr(torch, self.io),
            scale=self.score_scale,
            bias=data["bias"].double() if "bias" in data else None,
            alibi=self.alibi,
            softcap=self.softcap,
            rows=data.get("seq_q"),
            columns=data.get("seq_kv"),
            left=self.mask.left,
            right=self.mask.right_bound,
            bottom_right=self.mask.aligned_bottom_right,
            sink=data["sink"].double() if "sink" in data else None,
            keep=keep,
        )

    @property
    def score_scale(self) -> float:
        """Scale of ``Q K^T`` of the stored values."""
        return self.scale[0]

    def derived(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not self.backward:
            return {}
        outputs = self._problem(data, {}).forward()
        return {"o": outputs["O"].value, "stats": outputs["Stats"].value}

    def expected(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> dict[str, Approx]:
        problem = self._problem(data, results)
        if self.backward:
            o, d_o, stats = (self._dense(data, name) for name in ("o", "do", "stats"))
            outputs = problem.backward(o, d_o, stats, self.d_bias)
        else:
            outputs = problem.forward()
        types = {"Stats": self.stats_dtype, "Max": "float32", "Sum_exp": "float32", "dSink": "float32"}
        outputs = {name: x.stored(getattr(torch, types.get(name, self.io))) for name, x in outputs.items()}
        if "rng_dump" in results:
            dump = results["rng_dump"].double()
            unseen = torch.where(problem.seen, 0.0, torch.inf)
            outputs["rng_dump"] = Approx((dump > 0.5).double(), unseen)
        return outputs

    def objection(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> str:
        if "rng_dump" not in results or self.dropout is None:
            return ""
        dropout_mask = results["rng_dump"][self._problem(data, results).seen]
        if not dropout_mask.numel():
            return ""
        rate, wanted = dropout_mask.mean().item(), 1 - self.dropout
        allowed = _DEVIATIONS * (wanted * self.dropout / dropout_mask.numel()) ** 0.5
        return "" if abs(rate - wanted) <= allowed else f"dropout keeps {rate:.4f}, not {wanted} within {allowed:.4f}"


_SPARE = 5  # tokens after those of a ragged tensor, which no kernel may write


class Draw:
    """Samples one case."""

    types = ("float16", "bfloat16")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.inputs: dict[str, Spec] = {}
        self.starts: dict[str, tuple[int, ...]] = {}
        self.strides: dict[str, tuple[int, ...]] = {}

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def rarely(self) -> bool:
        """Whether to sample refused cases, since cuDNN 9.19 computes it wrongly."""
        return self.chance(0.05)

    def fields(self) -> dict[str, Any]:
        """The attributes of the case."""
        rng = self.rng
        self.backward = self.chance(0.35)
        self.io = rng.choice(self.types)
        self.shape = self.shape_of()
        self.page = self.gap = 0
        features = self.features()
        self.mask = self._mask(features)
        if "paged" in features:
            self.page = pick(rng, {16: 1, 32: 1, 64: 2, 128: 2, 1: 0.3, 8: 0.3})
        self._operands("ragged" in features)
        extra = self._extras(features)
        return {
            "seed": self.seed,
            "io": self.io,
            "intermediate": "float32",
            "compute": "float32",
            "inputs": self.inputs,
            "backward": self.backward,
            "shape": self.shape,
            "mask": self.mask,
            "strides": self.strides,
            "starts": self.starts,
            "gap": self.gap,
            "page": self.page,
            **extra,
        }

    def _length(self, largest: int) -> int:
        unit = pick(self.rng, {128: 3, 64: 3, 16: 2, 8: 1, 1: 3})
        return unit * self.rng.randint(1, max(1, largest // unit))

    def shape_of(self) -> Shape:
        """Of the operands."""
        rng = self.rng
        h_k = pick(rng, {1: 3, 2: 3, 3: 1, 4: 2, 8: 0.5})
        group = pick(rng, {1: 5, 2: 2, 3: 1, 4: 2, 8: 0.5})
        h_v = h_k
        if self.chance(0.03) and h_k > 1:
            h_v = rng.choice([x for x in range(1, h_k + 1) if (h_k * group) % x == 0])
        b = pick(rng, {1: 2, 2: 3, 3: 2, 4: 1, 5: 0.5})
        d_qk = pick(rng, {64: 4, 128: 5, 0: 5, 32: 1, 96: 1, 192: 1, 256: 1})
        d_qk = d_qk or 8 * rng.randint(1, 32)
        d_v = d_qk
        if self.chance(0.2):
            d_v = 128 if d_qk == 192 else 8 * rng.randint(1, 32)
        largest = pick(rng, {128: 2, 512: 6, 1024: 1.5, 2048: 0.5})
        style = pick(rng, {"self": 5, "cross": 3, "longer keys": 2, "decode": 1 if not self.backward else 0.2})
        s_q = self._length(largest)
        s_kv = s_q if style == "self" else self._length(largest)
        if style == "longer keys":
            s_q, s_kv = min(s_q, s_kv), max(s_q, s_kv)
        if style == "decode":
            s_q = 1
        while b * h_k * group * s_q * s_kv > _LARGEST:
            if b > 1:
                b = 1
            elif group > 1:
                group, h_v = 1, h_k
            elif h_k > 1:
                h_k = h_v = 1
            else:
                s_q, s_kv = -(-s_q // 2), -(-s_kv // 2)
        return Shape(b, h_k * group, h_k, h_v, s_q, s_kv, d_qk, d_v)

    def features(self) -> set[str]:
        """Which features come together: few of them, and none that exclude each other."""
        rng, backward = self.rng, self.backward
        weights = {
            "padding": 0.25,
            "ragged": 0.15,
            "paged": 0 if backward else 0.12,
            "bias": 0.2,
            "alibi": 0.08,
            "dropout": 0.1,
            "own mask": 0.001 if backward else 0.015,
            "sink": 0.08,
            "softcap": 0 if backward else 0.03,
            "window": 0.2,
            "causal": 0.4,
            "right": 0.06,
            "bottom_right": 0.3,
        }
        chosen = {name for name, weight in weights.items() if rng.random() < weight}
        if chosen & {"ragged", "paged"}:
            chosen.add("padding")
        if "alibi" in chosen:
            chosen = (chosen | {"causal"}) - {"right"}
        if "causal" in chosen:
            chosen.discard("right")
        if "bottom_right" in chosen and not chosen & {"causal", "right", "window"}:
            chosen.discard("bottom_right")
        if "bottom_right" in chosen and chosen & {"causal", "right"}:
            chosen -= {"bias", "alibi", "dropout", "own mask"}
        if "own mask" in chosen:
            chosen.discard("dropout")
        if "softcap" in chosen:
            chosen = {"softcap"} | (chosen & {"bias"})
        if self.shape.s_q == 1:
            chosen -= {"sink"} if self.rarely() else {"sink", "dropout", "own mask"}
        return chosen

    def _mask(self, features: set[str]) -> Mask:
        rng, s = self.rng, self.shape
        bottom_right = "bottom_right" in features
        lengths_q: tuple[int, ...] = ()
        lengths_kv: tuple[int, ...] = ()
        if "padding" in features:
            lengths_q = tuple(self._part(s.s_q) for _ in range(s.b))
            lengths_kv = tuple(self._part(s.s_kv) for _ in range(s.b))
            if s.s_q == s.s_kv and self.chance(0.5):
                lengths_kv = lengths_q
            if bottom_right:
                s = self.shape
                lengths_q = tuple(min(a, b) for a, b in zip(lengths_q, lengths_kv, strict=True))
        elif (bottom_right or "window" in features) and s.s_q > s.s_kv:
            self.shape = s = Shape(s.b, s.h_q, s.h_k, s.h_v, s.s_kv, s.s_q, s.d_qk, s.d_v)
        left = rng.randint(1, max(1, s.s_kv)) if "window" in features else None
        right = rng.randint(0, max(1, s.s_kv // 2)) if "right" in features else None
        causal = ""
        if "causal" in features:
            causal = "bottom_right" if bottom_right else "top_left"
            if self.chance(0.3):
                causal, right = "", 0
        return Mask(causal, left, right, self.chance(0.3), bottom_right, lengths_q, lengths_kv)

    def _part(self, length: int) -> int:
        return length if self.chance(0.2) else self.rng.randint(1, length)

    def _operands(self, ragged: bool) -> None:
        """Q, K, V (in the backward pass O, dO and Stats too), lengths, starts and pages."""
        rng, s = self.rng, self.shape
        layout = pick(rng, {"bshd": 5, "bhsd": 3, "sbhd": 2, "packed": 2, "mixed": 1})
        dtype = pick(rng, {"int32": 3, "int64": 1})  # cuDNN wants one type for all
        if ragged:
            layout = pick(rng, {"bshd": 3, "packed": 1})
        for letter in "qkvo":
            dims = s.dims(letter)
            order = _ORDERS[rng.choice([*_ORDERS]) if layout == "mixed" else layout if layout in _ORDERS else "bshd"]
            strides = packed(dims, order)
            if layout == "packed" and letter != "o":
                strides = self._packed(letter, dims)
            self.strides[letter] = strides
        if ragged:
            self.gap = 0 if self.chance(0.9) else rng.randint(1, 8)
            for letter in "qkvo":
                if self.page and letter in "kv":
                    continue
                self._ragged(letter, dtype)
            if self.chance(0.3) and (s.s_q > 1 or self.rarely()):
                self.strides["stats"] = (s.h_q * s.s_q, 1, s.h_q, 1)
                self._ragged("stats", dtype)
        if self.mask.lengths_q:
            for name, lengths in (("seq_q", self.mask.lengths_q), ("seq_kv", self.mask.lengths_kv)):
                self.inputs[name] = literal(*lengths, dtype="int32", dims=(s.b, 1, 1, 1))
        for letter in "qkv":
            if self.page and letter in "kv":
                self._paged(letter, ragged)
            else:
                self._dense(letter, letter)
        if self.backward:
            self._dense("o", "o")
            self._dense("do", "o")
            if not ragged and self.chance(0.25):
                self._other_layouts()
            if "o" in self.starts:
                self.starts["do"] = self.starts["o"]
                self.inputs["start_do"] = self.inputs["start_o"]
            dims = (*s.dims("q")[:3], 1)
            self.strides.setdefault("stats", packed(dims, range(4)))
            self.inputs["stats"] = Spec(dims, self.strides["stats"], "float32", span=self._span("stats"))

    def _other_layouts(self) -> None:
        """Lays the gradients out in another way than what they are gradients of."""
        dims = self.shape.dims("o")
        self.inputs["do"] = Spec(dims, packed(dims, self.rng.choice([*_ORDERS.values()])), self.io)
        for name in ("dQ", "dK", "dV"):
            self.strides[name] = packed(self.shape.dims(name), self.rng.choice([*_ORDERS.values()]))

    def _packed(self, letter: str, dims: tuple[int, ...]) -> tuple[int, ...]:
        """Strides in memory that Q, K and V share: ``[b, s, 3, h, d]`` or with the heads of all three in a row."""
        s = self.shape
        row_size = s.h_q * s.d_qk + s.h_k * s.d_qk + s.h_v * s.d_v
        if s.s_q != s.s_kv and letter != "q":  # K and V alone
            row_size = s.h_k * s.d_qk + s.h_v * s.d_v
        elif s.s_q != s.s_kv:
            row_size = s.h_q * s.d_qk
        return (dims[2] * row_size, dims[3], row_size, 1)

    def _ragged(self, letter: str, dtype: str) -> None:
        lengths = self.mask.lengths_kv if letter in "kv" else self.mask.lengths_q
        step = self.strides[letter][2]
        self._start(letter, ((length + self.gap) * step for length in lengths), dtype)

    def _start(self, name: str, sizes: Iterable[int], dtype: str = "int32") -> None:
        """Where each batch entry begins, by the sizes of all."""
        self.starts[name] = starts = tuple(accumulate(sizes, initial=0))
        self.inputs[f"start_{name}"] = literal(*starts, dtype=dtype, dims=(self.shape.b + 1, 1, 1, 1))

    def _dense(self, name: str, letter: str) -> None:
        self.inputs[name] = Spec(self.shape.dims(letter), self.strides[letter], self.io, span=self._span(letter))

    def _span(self, letter: str) -> int:
        return self.starts[letter][-1] + _SPARE * self.strides[letter][2] if letter in self.starts else 0

    def _paged(self, letter: str, ragged: bool) -> None:
        rng, s = self.rng, self.shape
        pages = -(-s.s_kv // self.page)
        _, heads, _, size = s.dims(letter)
        blocks = s.b * pages + rng.randint(0, 3)
        dims = (blocks, heads, self.page, size)
        strides = packed(dims, rng.choice([(0, 1, 2, 3), (0, 2, 1, 3)]))
        self.inputs[letter] = Spec(dims, strides, self.io)
        self.strides[letter] = strides
        chosen = rng.sample(range(blocks), s.b * pages)
        table = (s.b, 1, pages, 1)
        span, name = 0, f"table_{letter}"
        if self.page > 1 and rng.random() < 0.15:
            self._start(name, (-(-length // self.page) for length in self.mask.lengths_kv))
            span = self.starts[name][-1]
            chosen = chosen[:span]
        self.inputs[name] = literal(*chosen, dtype="int32", dims=table, span=span)

    def _bias_dims(self) -> tuple[int, ...]:
        s = self.shape
        b, h = (extent if self.chance(0.5) else 1 for extent in (s.b, s.h_q))
        rows = s.s_q if self.chance(0.85) or (self.backward and not self.rarely()) else 1
        columns = s.s_kv if self.page or self.chance(0.95) or (rows == 1 and not self.rarely()) else 1
        return b, h, rows, columns

    def _extras(self, features: set[str]) -> dict[str, Any]:
        rng, s = self.rng, self.shape
        fields: dict[str, Any] = {"alibi": "alibi" in features}
        if "softcap" in features:
            fields["softcap"] = rng.choice([5.0, 20.0])
        number = round(rng.uniform(0.5, 1.5) * s.d_qk**-0.5, 4)
        passed = pick(rng, {"number": 8, "host": 0.05 if self.backward else 1, "memory": 0.5, "": 0.5})
        if passed in ("host", "memory"):
            self.inputs["scale"] = literal(number, by_value=passed == "host")
        fields["scale"] = (number if passed else 1.0, passed)
        bias_dims: tuple[int, ...] = ()
        if "bias" in features:
            bias_dims = self._bias_dims()
            self.inputs["bias"] = Spec(bias_dims, packed(bias_dims, range(4)), self.io)
        if "sink" in features:
            self.inputs["sink"] = Spec((1, s.h_q, 1, 1), (s.h_q, 1, 1, 1), "float32")
        if "dropout" in features:
            fields["dropout"] = pick(rng, {0.1: 3, 0.2: 1, 0.5: 1, 0.75: 0.5})
            host = self.chance(0.2)
            for name in ("seed", "offset"):
                self.inputs[name] = literal(rng.randint(0, 10**6), dtype="int64", by_value=host)
        elif "own mask" in features:
            fields["dropout"] = 1.0
            dims = (s.b, s.h_q, s.s_q, s.s_kv)
            self.inputs["keep"] = Spec(dims, packed(dims, range(4)), self.io, "mask")
            self.inputs["keep_scale"] = literal(2.0)
            if self.backward:
                self.inputs["keep_inverse"] = literal(0.5)
        if self.backward:
            fields["deterministic"] = self.chance(0.2)
            fields["max_total"] = "q" in self.starts and self.chance(0.5)
            if bias_dims and self.chance(0.6) and (bias_dims[2:] == (s.s_q, s.s_kv) or self.rarely()):
                fields["d_bias"] = bias_dims
            fields["d_sink"] = "sink" in features and self.chance(0.7)
            if "dropout" in fields:
                fields["d_sink"] &= self.rarely()
            fields["d_sink"] &= "stats" not in self.starts  # cuDNN 9.19 reads beyond ragged statistics, into the guards
        else:
            fields["statistics"] = pick(
                rng, {("Stats",): 6, (): 4, ("Max", "Sum_exp"): 1, ("Stats", "Max", "Sum_exp"): 0.05}
            )
            if "Stats" not in fields["statistics"] and "stats" in self.starts:
                del self.starts["stats"], self.inputs["start_stats"]
            fields["implementation"] = pick(rng, {"AUTO": 4, "COMPOSITE": 1})
            if (
                "Stats" in fields["statistics"]
                and "q" not in self.starts
                and self.chance(0.02)
                and self.io == "bfloat16"
            ):
                fields["stats_dtype"] = "bfloat16"
        return fields
