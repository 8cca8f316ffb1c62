"""Graphs that cuDNN accepts and computes wrongly. Each was seen on an H200, with the other Python frontend too.

A graph in this list is refused, or the engines that go wrong are left out, since a wrong result without a word is worse
than either. The table in docs/compatibility.md says what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from cudnn.backend.library import format_version
from cudnn.enums import behavior_note
from cudnn.errors import cudnnGraphNotSupportedError, refusal
from cudnn.pygraph.convolution import Convolution
from cudnn.pygraph.matmul import Matmul
from cudnn.pygraph.node import Node
from cudnn.pygraph.pointwise import Pointwise
from cudnn.pygraph.structure import Concatenate

SEEN_IN = 91900  # no newer version has been run on a GPU by this project
_NEWER = f"cuDNN newer than {format_version(SEEN_IN)}"


def refuse(nodes: Sequence[Node], version: int) -> None:
    """Refuses graphs that end the process, and those that versions up to ``SEEN_IN`` compute wrongly."""
    _refuse_crash(nodes)
    if version > SEEN_IN:
        return
    if all(isinstance(node, Pointwise) for node in nodes):
        for node in nodes:
            _refuse_broadcast(node, version)
    if any(isinstance(node, Convolution) for node in nodes):
        for node in nodes:
            if isinstance(node, Concatenate):
                raise cudnnGraphNotSupportedError(
                    refusal(node.where, "a convolution in the same graph", format_version(version), _NEWER,
                            "concatenate in a graph of its own, or with the array library")
                )  # fmt: skip


def _refuse_crash(nodes: Sequence[Node]) -> None:
    """cuDNN 9.19 and 9.28 have no engine for a convolution beside a matrix product; some such graphs crash them."""
    products = [node for node in nodes if isinstance(node, Matmul)]
    if products and any(isinstance(node, Convolution) for node in nodes):
        raise cudnnGraphNotSupportedError(
            refusal(products[0].where, "a convolution in the same graph", "both", "one of the two: cuDNN may crash",
                    "build a graph of each, with the tensors between them in memory")
        )  # fmt: skip


def _refuse_broadcast(node: Node, version: int) -> None:
    """Element-wise graphs alone: beyond batch entry 0 the operand is read from the wrong place."""
    (out,) = node.outputs.values()
    if len(out.dim) != 3 or out.dim[0] == 1:
        return
    for port, tensor in node.inputs.items():
        dims = [1] * (3 - len(tensor.dim)) + tensor.dim
        if prod(dims) > 1 and (dims[0] < out.dim[0] or dims[1] < out.dim[1]):
            raise cudnnGraphNotSupportedError(
                refusal(node.where, f"input {port} (tensor {tensor.name!r})",
                        f"dim={tensor.dim} spread over dim={out.dim} with cuDNN {format_version(version)}",
                        "where all operations are element-wise: the output's shape, one element, or one per row; or "
                        + _NEWER, "expand the operand, or fuse the operation with the matmul that it follows")
            )  # fmt: skip


def faulty_engines(nodes: Sequence[Node]) -> behavior_note | None:
    """A note on the engines that must not run the graph.

    Engines over cuBLASLt take any ReLU for the plain one: they ignore slope and clips.
    """
    relu = any(
        isinstance(node, Pointwise)
        and node.mode == "RELU_FWD"
        and bool(node.negative_slope or node.lower_clip or node.upper_clip is not None)
        for node in nodes
    )
    return behavior_note.CUBLASLT_DEPENDENCY if relu and any(isinstance(node, Matmul) for node in nodes) else None
