"""Attention that cuDNN accepts and gets wrong: each of these was seen on an H200 with cuDNN 9.19.

A graph in this list is refused up to ``known_faults.SEEN_IN``, or a warning says what may be wrong, since a wrong
result without a word is worse. Where one more operation makes it right, the graph gets that. The table in
docs/compatibility.md lists what was observed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cudnn.backend.library import format_version
from cudnn.errors import cudnnGraphNotSupportedError, refusal
from cudnn.pygraph.known_faults import SEEN_IN

if TYPE_CHECKING:
    from cudnn.pygraph.attention.backward import AttentionBackward
    from cudnn.pygraph.attention.forward import AttentionForward
    from cudnn.pygraph.attention.fp8 import AttentionFp8Backward, AttentionFp8Forward
    from cudnn.pygraph.attention.scores import Attention

_log = logging.getLogger("cudnn")


class Fault(NamedTuple):
    """What a graph must not have, and what cuDNN makes of it."""

    present: bool
    what: str
    got: str
    effect: str
    allowed: str
    hint: str
    refused: bool = True  # else a warning: what is wrong depends on the data, or is an output that few read


def refuse_forward(node: AttentionForward, version: int) -> None:
    """Refuses what goes wrong in the forward pass in fp16 and bf16."""
    _refuse(node, version, _scores(node))


def refuse_backward(node: AttentionBackward, version: int) -> None:
    """Refuses what goes wrong in the backward pass in fp16 and bf16."""
    _refuse(node, version, [*_scores(node), *_gradients(node)])


def weights_overflow(node: AttentionBackward) -> bool:
    """Whether cuDNN may compute weights outside the scores, which overflow and make gradients NaN.

    A tile has 128 keys and 128 rows. cuDNN 9.19 masks the keys beyond ``s_kv`` in the last tile, but not where that
    tile is half full. There the score is 0 and the weight ``exp(0 - LSE)``: it overflows for an LSE below -88.7, or
    about -12 in fp16, and infinity times the zeros of K is NaN in dQ. With one row of Q, its LSE is read for all rows
    of the tile, and dK and dV become NaN. A bound of 1 on the weights, which no weight inside the scores exceeds, makes
    both right and takes 1% of the time. Bounds, lengths, dBias and a deterministic order were right without it.
    """
    s_q, s_kv = node.score_dim[2:]
    return s_kv % 128 == 64 or s_q == 1


def refuse_fp8_forward(node: AttentionFp8Forward, version: int) -> None:
    """Refuses what goes wrong in the forward pass in fp8 on Hopper."""
    d_qk, d_v = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    s_q, s_kv = node.score_dim[2:]
    unbounded = node.use_padding_mask and not node.is_ragged and not node.has_bounds
    _refuse(node, version, [
        Fault(d_v > d_qk, "head size", f"d_qk={d_qk}, d_v={d_v} with fp8 tensors", "which reads outside V",
              "d_v up to d_qk", "pad Q and K with zeros"),
        Fault(node.has_dropout, "dropout", "fp8 tensors", "which accesses memory out of bounds", "no dropout",
              "use fp16 or bf16 tensors"),
        Fault(unbounded and s_q > s_kv, "padding mask", f"s_q={s_q} > s_kv={s_kv} without another mask in fp8",
              "whose Amax_S is too large", "s_q up to s_kv", "pad K and V to the number of rows of Q", refused=False),
        Fault("Max" in node.outputs, "score_max", "fp8 tensors", "which writes it times log2(e)",
              "fp16 or bf16 tensors", "leave it out"),
    ])  # fmt: skip


def refuse_fp8_backward(node: AttentionFp8Backward, version: int) -> None:
    """Refuses what goes wrong in the backward pass in fp8 on Hopper."""
    s_q = node.score_dim[2]
    _refuse(node, version, [
        Fault(s_q % 16 != 0, "s_q", str(s_q), "which leaves the last rows of dQ zero", "a multiple of 16 in fp8",
              "pad the sequence"),
    ])  # fmt: skip


def _refuse(node: Attention, version: int, faults: Iterable[Fault]) -> None:
    if version > SEEN_IN:
        return
    for fault in faults:
        if fault.present:
            message = refusal(
                node.where, fault.what, f"{fault.got} with cuDNN {format_version(version)}, {fault.effect}",
                f"{fault.allowed}, or a cuDNN newer than {format_version(SEEN_IN)}", fault.hint
            )  # fmt: skip
            if fault.refused:
                raise cudnnGraphNotSupportedError(message)
            _log.warning("%s", message)


def _scores(node: Attention) -> Iterator[Fault]:
    one_row = node.score_dim[2] == 1
    yield Fault(
        node.has_dropout and one_row, "dropout", "s_q=1", "which computes it wrongly", "more than one row of Q",
        "leave dropout out"
    )  # fmt: skip
    bias = node.inputs["Bias"].dim if "Bias" in node.inputs else []
    yield Fault(
        bias[2:] == [1, 1] and prod(bias) > 1, "bias", f"dim={bias}", "which misreads it",
        "one element, or s_q or s_kv as last extents", "expand it"
    )  # fmt: skip
    stats = node.outputs.get("Stats")
    yield Fault(
        stats is not None and stats.ragged_offset is not None and one_row and stats.dim[1] > 1, "Stats",
        "ragged with s_q=1", "which leaves some unwritten", "a tensor that is not ragged",
        "leave set_ragged_offset() out: the rows follow one another"
    )  # fmt: skip


def _gradients(node: AttentionBackward) -> Iterator[Fault]:
    s_q, s_kv = node.score_dim[2:]
    bias = node.inputs["Bias"].dim if "Bias" in node.inputs else [1, 1, s_q, s_kv]
    yield Fault(
        bias[2] == 1 < s_q, "bias", f"dim={bias}", "with which dQ is wrong", f"s_q={s_q} as its third extent",
        "expand it"
    )  # fmt: skip
    d_qk, d_v = node.inputs["Q"].dim[3], node.inputs["V"].dim[3]
    yield Fault(
        node.is_ragged and d_qk > 192 and d_v <= 128, "head size",
        f"d_qk={d_qk}, d_v={d_v} of ragged tensors", "with which dQ and dK may be wrong",
        "d_qk up to 192, or d_v above 128", "pad V with zeros"
    )  # fmt: skip
    gradient = node.outputs["dBias"].dim if "dBias" in node.outputs else [1, 1, s_q, s_kv]
    yield Fault(
        gradient[2:] != [s_q, s_kv], "dBias", f"dim={gradient}", "which writes outside it",
        f"s_q and s_kv, {[s_q, s_kv]}, as last extents", "sum a full gradient"
    )  # fmt: skip
    yield Fault(
        "Dropout_mask" in node.inputs, "dropout", "a mask of the caller's", "which ignores the inverse of its scale",
        "a probability with seed and offset", "use the random mask"
    )  # fmt: skip
    sink = "dSink" in node.outputs
    yield Fault(
        sink and node.inputs["Stats"].ragged_offset is not None, "dSink_token", "ragged Stats",
        "which reads beyond them", "Stats that are not ragged", "let the forward pass write them padded", refused=False
    )  # fmt: skip
    yield Fault(
        sink and node.has_dropout, "dSink_token", "dropout in the same node", "which scales it wrongly", "no dropout",
        "leave dropout out"
    )  # fmt: skip
