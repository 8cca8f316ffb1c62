"""What attention's forward and backward pass share: their attributes, and the way from ``Q K^T`` to masked scores.

That way is a chain of steps, each a method of :class:`ScoreGraph` from scores to scores that returns them unchanged
where it does not apply. A new feature of the scores is one more step in the lists of ``attention_forward.py`` and
``attention_backward.py``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from cudnn.enums import data_type, diagonal_alignment, reduction_mode
from cudnn.errors import cudnnGraphNotSupportedError, refusal
from cudnn.pygraph.attention_ops import DiagonalBandMask, HeadReduction, Softmax
from cudnn.pygraph.layout import broadcast, row_major
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.matmul import Matmul
from cudnn.pygraph.node import Context, Node
from cudnn.pygraph.subgraph import SubGraph
from cudnn.pygraph.tensor import Tensor
from cudnn.reference.attention import Masks

A = TypeVar("A", bound="Attention")
BAND_MASK_SINCE = 92100  # cuDNN's own operations for the band mask and the softmax


@dataclasses.dataclass(eq=False, kw_only=True)
class Attention(Node):
    """Attributes and inputs of both passes.

    Inputs: Q ``[b, h_q, s_q, d_qk]``, K ``[b, h_k, s_kv, d_qk]``, V ``[b, h_v, s_kv, d_v]``; optional Attn_scale (one
    element), Bias (broadcasts to ``[b, h_q, s_q, s_kv]``), Seq_len_q and Seq_len_kv (INT32 ``[b, 1, 1, 1]``).
    """

    exact_ports = frozenset({"Seq_len_q", "Seq_len_kv"})

    attn_scale: float | None = None
    use_padding_mask: bool = False
    diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT
    left_bound: int | None = None
    right_bound: int | None = None

    @property
    def bottom_right(self) -> bool:
        return self.diagonal_alignment == diagonal_alignment.BOTTOM_RIGHT

    @property
    def score_dim(self) -> list[int]:
        """``[b, h_q, s_q, s_kv]``."""
        return [*self.inputs["Q"].dim[:3], self.inputs["K"].dim[2]]

    @property
    def has_bounds(self) -> bool:
        return self.left_bound is not None or self.right_bound is not None

    def check_shapes(self) -> None:
        """Refuses inputs whose shapes do not fit each other."""
        self.rank_check((4,), "Q", "K", "V")
        q, k, v = (self.inputs[port].dim for port in "QKV")
        if k[0] != q[0] or v[0] != q[0] or k[3] != q[3] or v[2] != k[2]:
            raise ValueError(
                refusal(self.where, "Q, K and V", f"dim={q}, dim={k} and dim={v}",
                        "[b, h_q, s_q, d_qk], [b, h_k, s_kv, d_qk] and [b, h_v, s_kv, d_v]",
                        "give the logical shape batch, heads, sequence, head size; strides say how it lies in memory")
            )  # fmt: skip
        if "Bias" in self.inputs:
            self.check_shape("Bias", lambda dim: broadcast([dim, self.score_dim]) == self.score_dim and len(dim) == 4,
                             f"a shape that broadcasts to [b, h_q, s_q, s_kv] = {self.score_dim}")  # fmt: skip
        for port, tensor in (*self.inputs.items(), *self.outputs.items()):
            if tensor.ragged_offset is not None:
                raise NotImplementedError(
                    refusal(self.where, f"ragged_offset of {port} (tensor {tensor.name!r})", "an offset tensor",
                            "none: ragged tensors are not supported yet", "use a padding mask instead")
                )  # fmt: skip
        for port in ("Seq_len_q", "Seq_len_kv"):
            if port in self.inputs:
                lengths = self.inputs[port]
                self.check_shape(port, lambda dim: dim == [q[0], 1, 1, 1], f"[b, 1, 1, 1] = {[q[0], 1, 1, 1]}")
                if lengths.data_type not in (data_type.INT32, data_type.NOT_SET):
                    raise ValueError(
                        refusal(self.where, f"{port} (tensor {lengths.name!r})", lengths.data_type.name, "INT32",
                                "convert the lengths")
                    )  # fmt: skip
        if "Attn_scale" in self.inputs:
            self.check_shape("Attn_scale", lambda dim: all(extent == 1 for extent in dim), "one element")

    def check_shape(self, port: str, fits: Callable[[list[int]], bool], allowed: str) -> None:
        """Refuses an input or output that has a shape, but not a fitting one."""
        tensor = self.inputs.get(port) or self.outputs[port]
        if tensor.dim and not fits(tensor.dim):
            raise ValueError(
                refusal(
                    self.where, f"{port} (tensor {tensor.name!r})", f"dim={tensor.dim}", allowed, "correct its shape"
                )
            )

    def masks(self, values: Mapping[str, Any]) -> Masks:
        """The same in the terms of the reference formulas."""
        return Masks(
            scale=values.get("Attn_scale", self.attn_scale),
            bias=values.get("Bias"),
            seq_len_q=values.get("Seq_len_q"),
            seq_len_kv=values.get("Seq_len_kv"),
            left_bound=self.left_bound,
            right_bound=self.right_bound,
            bottom_right=self.bottom_right,
        )

    def apart(self: A, lowering: Lowering) -> A:
        """The node with a tensor for every input, where one tensor came in twice: the same memory under several uids.

        Plans of cuDNN 9.19 with one uid for Q and V stop with a misaligned address on an H200.
        """
        inputs = dict(self.inputs)
        for port, tensor in self.inputs.items():
            first = next(other for other, candidate in self.inputs.items() if candidate is tensor)
            if port != first and not tensor.is_virtual:
                inputs[port] = Tensor.like(tensor, f"{tensor.name} as {port}")
                lowering.alias(inputs[port], tensor, 0)
        if inputs == self.inputs:
            return self
        node = copy.copy(self)
        node.inputs = inputs
        return node

    def transposed(self, lowering: Lowering, port: str) -> Tensor:
        """K or V described as ``[b, h, d, s]``, as cuDNN's patterns want it: the same memory under a uid of its own.

        The user's tensor stays as it is, since it may appear again in the graph (as V, in another node).
        """
        tensor = self.inputs[port]
        if tensor.is_virtual:
            raise cudnnGraphNotSupportedError(
                refusal(self.where, f"input {port} (tensor {tensor.name!r})", "a virtual tensor", "a tensor in memory",
                        "call set_output(True) on it and run attention as a graph of its own")
            )  # fmt: skip
        view = swapped(tensor)
        lowering.alias(view, tensor, 0)
        return view


def swapped(tensor: Tensor) -> Tensor:
    """A description of the tensor with its last two dimensions exchanged."""
    view = Tensor.like(tensor, f"{tensor.name} transposed")
    for field in (view.dim, view.stride):
        field[2], field[3] = field[3], field[2]
    return view


class ScoreGraph(SubGraph):
    """The smaller operations that an attention node is made of; ``version`` is that of cuDNN."""

    def __init__(self, node: Attention, context: Context, version: int) -> None:
        super().__init__(dataclasses.replace(context, compute_data_type=node.compute_data_type))
        self.node = node
        self.version = version
        self.lengths = node.inputs.get("Seq_len_q"), node.inputs.get("Seq_len_kv")  # of the padding mask

    # Parts.
    def apply(self, steps: Sequence[Callable[[ScoreGraph, Tensor], Tensor]], scores: Tensor) -> Tensor:
        """Runs the steps one after the other."""
        for step in steps:
            scores = step(self, scores)
        return scores

    def scores(self, tensor: Tensor) -> Tensor:
        """Gives a result the row-major shape of the scores, whatever the strides of what it was made from."""
        dims = self.node.score_dim
        return tensor.set_dim(dims).set_stride(row_major(dims))

    def product(self, a: Tensor, b: Tensor, **lengths: Tensor | None) -> Tensor:
        """Matrix product; ``m``, ``n``, ``k`` are optional valid extents of each batch entry."""
        overrides = {f"override_{axis}": length for axis, length in lengths.items()}
        return self._add(Matmul, "", None, {"A": a, "B": b, **overrides}, ["C"]).outputs["C"]

    def reduced(self, x: Tensor, mode: reduction_mode) -> Tensor:
        """Reduction of the last dimension of a ``[b, h_q, s_q, .]`` tensor."""
        dims = [*self.node.score_dim[:3], 1]
        return self.reduction(x, mode).set_dim(dims).set_stride(row_major(dims))

    def into(self, tensor: Tensor) -> None:
        """Lets the last operation write a tensor that is there already."""
        (port,) = self.nodes[-1].outputs
        self.nodes[-1].outputs[port] = tensor

    @staticmethod
    def number(value: float) -> Tensor:
        """A FLOAT constant."""
        return Tensor.constant(value, data_type.FLOAT, 4)

    @staticmethod
    def integer(value: int) -> Tensor:
        """An INT32 constant."""
        return Tensor.constant(value, data_type.INT32, 4)

    def index(self, scores: Tensor, axis: int) -> Tensor:
        """Row (axis 2) or column (axis 3) of each score."""
        return self.scores(self.gen_index(scores, axis, data_type.INT32)).set_data_type(data_type.INT32)

    def where(self, scores: Tensor, keep: Tensor) -> Tensor:
        """Scores where ``keep`` is true, else -inf."""
        self.scores(keep).set_data_type(data_type.BOOLEAN)
        return self.scores(self.binary_select(scores, self.number(float("-inf")), keep))

    def softmax(self, scores: Tensor, stats: Tensor | None) -> Tensor:
        """cuDNN's softmax operation; ``stats`` is written where there is one."""
        node = self._add(Softmax, "", None, {"X": scores}, ["Y"])
        if stats is not None:
            node.outputs["Stats"] = stats
        return node.outputs["Y"]

    def sum_heads(self, x: Tensor, out: Tensor) -> None:
        """Sums the gradients of the heads of Q that share one of K or V, into a tensor that is there already."""
        self._add(HeadReduction, "", None, {"X": x}, ["Y"], mode=reduction_mode.ADD)
        self.into(out)

    # Steps.
    def scaled(self, scores: Tensor) -> Tensor:
        """The attention scale."""
        scale = self.node.inputs.get("Attn_scale")
        if scale is None and self.node.attn_scale is not None:
            scale = self.number(self.node.attn_scale)
        return scores if scale is None else self.scores(self.mul(scores, scale))

    def biased(self, scores: Tensor) -> Tensor:
        """The additive bias."""
        bias = self.node.inputs.get("Bias")
        return scores if bias is None else self.scores(self.add(scores, bias))

    def padded(self, scores: Tensor) -> Tensor:
        """The mask of rows and columns beyond the sequence lengths."""
        seq_len_q, seq_len_kv = self.lengths
        if seq_len_q is None or seq_len_kv is None:
            return scores
        boolean = data_type.BOOLEAN
        row_valid = self.cmp_lt(self.index(scores, 2), seq_len_q, boolean).set_data_type(boolean)
        column_valid = self.cmp_lt(self.index(scores, 3), seq_len_kv, boolean).set_data_type(boolean)
        keep = self.logical_and(self.scores(row_valid), self.scores(column_valid), boolean)
        return self.where(scores, keep)

    def right_bounded(self, scores: Tensor) -> Tensor:
        """The mask right of the diagonal: the column is at most row + s_kv - s_q (bottom right only) + right bound."""
        shift = self.node.right_bound
        if shift is None:
            return scores
        seq_len_q, seq_len_kv = self.ends if self.node.bottom_right else (None, None)
        right = self.integer(shift) if shift else None
        if self.version >= BAND_MASK_SINCE:
            lengths = {"Seq_len_q": seq_len_q, "Seq_len_kv": seq_len_kv}
            return self.banded("CMP_GE", scores, {**lengths, "Shift_right": right})
        diagonal = self.index(scores, 2)
        if seq_len_q is not None and seq_len_kv is not None:
            diagonal = self.integers("SUB", self.integers("ADD", diagonal, seq_len_kv), seq_len_q)
        if right is not None:
            diagonal = self.integers("ADD", diagonal, right)
        return self.where(scores, self.cmp_ge(diagonal, self.index(scores, 3), data_type.BOOLEAN))

    def left_bounded(self, scores: Tensor) -> Tensor:
        """The mask left of the window: column + left bound - s_kv + s_q (bottom right only) is greater than the row."""
        width = self.node.left_bound
        if width is None:
            return scores
        seq_len_q, seq_len_kv = self.lengths if self.node.bottom_right else (None, None)
        if self.node.bottom_right and seq_len_q is None:
            s_q, s_kv = self.node.score_dim[2:]
            width += s_q - s_kv
        # cuDNN's attention engines match a FLOAT bound, save where sequence lengths are subtracted from it.
        left = self.number(width) if seq_len_q is None else self.integer(width)
        if self.version >= BAND_MASK_SINCE:
            return self.banded("CMP_GT", scores, {"Seq_len_q": seq_len_q, "Seq_len_kv": seq_len_kv, "Left": left})
        shifted = self.integers("ADD", self.index(scores, 3), left)
        if seq_len_q is not None and seq_len_kv is not None:
            shifted = self.integers("ADD", self.integers("SUB", shifted, seq_len_kv), seq_len_q)
        return self.where(scores, self.cmp_gt(shifted, self.index(scores, 2), data_type.BOOLEAN))

    # Parts of the masks.
    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """Where the bottom-right diagonal ends: at the lengths of the padding mask, else at the tensor's."""
        seq_len_q, seq_len_kv = self.lengths
        if seq_len_q is not None and seq_len_kv is not None:
            return seq_len_q, seq_len_kv
        s_q, s_kv = self.node.score_dim[2:]
        return self.integer(s_q), self.integer(s_kv)

    def banded(self, comparison: str, scores: Tensor, bounds: Mapping[str, Tensor | None]) -> Tensor:
        """cuDNN's band mask operation."""
        inputs = {"X": scores, "Fill": self.number(float("-inf")), **bounds}
        return self._add(DiagonalBandMask, "", None, inputs, ["Y"], comparison=comparison).outputs["Y"]

    def integers(self, mode: str, index: Tensor, other: Tensor) -> Tensor:
        """Index arithmetic, in the type of a constant operand."""
        kind = other.data_type if other.value is not None else data_type.INT32
        operation = self.add if mode == "ADD" else self.sub
        return self.scores(operation(index, other, kind)).set_data_type(kind)
