"""Graphs that cuDNN accepts and computes wrongly, as seen on an H200; attention has a separate list.

A graph in this list is refused, or the engines that go wrong are left out, since a silent wrong result is worse
than either. The table in docs/compatibility.md lists what was observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from cudnn.backend.library import format_version
from cudnn.enums import behavior_note, data_type, moe_grouped_matmul_mode, resample_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.pygraph import matmul_faults
from cudnn.pygraph.block_scale import BlockScaleDequantize
from cudnn.pygraph.convolution import (
    Convolution,
    ConvolutionDataGradient,
    ConvolutionFilterGradient,
    ConvolutionForward,
)
from cudnn.pygraph.matmul import Matmul
from cudnn.pygraph.moe import MoeGroupedMatmul
from cudnn.pygraph.node import Node
from cudnn.pygraph.pointwise import Pointwise
from cudnn.pygraph.resample import Resample, ResampleBackward, ResampleForward
from cudnn.pygraph.structure import Concatenate

if TYPE_CHECKING:
    from cudnn.backend.engine import EngineConfig

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
    for node in nodes:
        if isinstance(node, Resample):
            _refuse_pooling(node, version)
        if isinstance(node, MoeGroupedMatmul) and node.mode is moe_grouped_matmul_mode.GATHER:
            raise make_error(
                cudnnGraphNotSupportedError,
                node.where,
                "mode",
                f"GATHER with cuDNN {format_version(version)}, which accesses memory that is not its own",
                f"NONE, or {_NEWER}",
                "gather the tokens with PyTorch",
            )
        if isinstance(node, BlockScaleDequantize) and node.is_negative_scale:
            raise make_error(
                cudnnGraphNotSupportedError,
                node.where,
                "is_negative_scale",
                f"True with cuDNN {format_version(version)}, which ignores it",
                f"False, or {_NEWER}",
                "negate the result of the matmul",
            )
    if any(isinstance(node, Convolution) for node in nodes):
        for node in nodes:
            if isinstance(node, Concatenate):
                raise make_error(
                    cudnnGraphNotSupportedError,
                    node.where,
                    "a convolution in the same graph",
                    format_version(version),
                    _NEWER,
                    "concatenate in a separate graph, or with PyTorch",
                )


def _refuse_pooling(node: Resample, version: int) -> None:
    """Of 60 tests on an H200 29 failed: elements were left unwritten or were wrong, or the plan did not run.

    Nothing else that was tried did. Of what is refused only the gradients of averages, channels last and in three
    dimensions, came out right.
    """
    image = node.inputs["X" if isinstance(node, ResampleForward) else "DY"]
    average = node.resampling_mode is not resample_mode.MAXPOOL
    faults = {
        "one spatial dimension": len(image.dim) == 3,
        "an operation before it": any(tensor.is_virtual for tensor in node.inputs.values()),
        "the gradient of an average": average and isinstance(node, ResampleBackward),
        "BFLOAT16, channels last, without an index": (
            image.data_type is data_type.BFLOAT16 and image.stride[1] == 1 and "INDEX" not in node.outputs
        ),
    }
    for fault, present in faults.items():
        if present:
            raise make_error(
                cudnnGraphNotSupportedError,
                node.where,
                "graph",
                f"{fault} with cuDNN {format_version(version)}, which computes it wrongly",
                _NEWER,
                "pool with PyTorch, or build the graph with backend='reference'",
            )


def _refuse_crash(nodes: Sequence[Node]) -> None:
    """cuDNN 9.19 and 9.28 have no engine for a graph with a convolution and a matmul; some such graphs crash them."""
    matmuls = [node for node in nodes if isinstance(node, Matmul)]
    if matmuls and any(isinstance(node, Convolution) for node in nodes):
        raise make_error(
            cudnnGraphNotSupportedError,
            matmuls[0].where,
            "a convolution in the same graph",
            "both",
            "one of the two: cuDNN may crash",
            "build a graph of each, with the tensors between them in memory",
        )


def _refuse_broadcast(node: Node, version: int) -> None:
    """Element-wise graphs alone: beyond batch entry 0 the operand is read from the wrong place.

    Seen with operands of one row, one column or one element per batch entry. Those of the output's last two extents,
    spread over the batch alone as in rotary embeddings, came out right.
    """
    (out,) = node.outputs.values()
    if len(out.dim) != 3 or out.dim[0] == 1:
        return
    for port, tensor in node.inputs.items():
        dims = [1] * (3 - len(tensor.dim)) + tensor.dim
        one_per_row, one_for_all_entries = dims[:2] == out.dim[:2], dims[1:] == out.dim[1:]
        if prod(dims) > 1 and not one_per_row and not one_for_all_entries:
            raise make_error(
                cudnnGraphNotSupportedError,
                node.where,
                f"input {port} (tensor {tensor.name!r})",
                f"dim={tensor.dim} spread over dim={out.dim} with cuDNN {format_version(version)}",
                "where all operations are element-wise: the output's shape, with or without its batch, one "
                f"element, or one per row; or {_NEWER}",
                "expand the operand, or fuse the operation with the matmul that it follows",
            )


def computed_apart(nodes: Sequence[Node], version: int) -> list[Pointwise]:
    """Nodes that need a separate plan, since the plan of the whole graph would compute them wrongly."""
    return matmul_faults.widened_apart(nodes) if version <= SEEN_IN else []


class Engines(NamedTuple):
    """Configurations that must not run a graph: those with a note, or those whose name is, or begins with, a name."""

    note: behavior_note | None = None
    name: str = ""

    def __str__(self) -> str:
        return f"engines with the note {self.note.name}" if self.note else f"engines {self.name}"

    def denial_reason(self, config: EngineConfig) -> str:
        """Why the configuration may not be used, or the empty string."""
        if self.note is not None:
            return f"has the note {self.note.name}" if self.note in config.behavior_notes else ""
        return "computes such graphs wrongly" if f"{config.tag}_".startswith(f"{self.name}_") else ""


def faulty_engines(nodes: Sequence[Node], version: int) -> Iterator[Engines]:
    """The engines that must not run the graph.

    Those over cuBLASLt take any ReLU for the plain one, at every version: they ignore slope and clips.
    """
    relu = any(
        isinstance(node, Pointwise)
        and node.mode == "RELU_FWD"
        and bool(node.negative_slope or node.lower_clip or node.upper_clip is not None)
        for node in nodes
    )
    if relu and any(isinstance(node, Matmul) for node in nodes):
        yield Engines(note=behavior_note.CUBLASLT_DEPENDENCY)
    if version <= SEEN_IN:
        if matmul_faults.tiles_misread(nodes):
            yield Engines(name="eng2")
            yield Engines(name="eng4")
        if matmul_faults.lies_off(nodes) or matmul_faults.adds_by_batch(nodes):
            yield Engines(note=behavior_note.CUBLASLT_DEPENDENCY)
        if matmul_faults.loads_race(nodes):
            yield Engines(name="eng7")
        fused = sum(isinstance(node, Pointwise) for node in nodes)
        for node in nodes:
            yield from _faulty_for_convolution(node, fused)


def _faulty_for_convolution(node: Node, fused: int) -> Iterator[Engines]:
    """Of 964 random convolutions on an H200 seven were wrong; the cause is unknown, so the conditions are guesses.

    Engine 1, strided data gradient: wrong for 5 of 8 with more than three operations fused, for 0 of 18 with fewer.
    Engine 7 in its variant 27, forward: wrong for the only one whose response has a number of channels that is no
    multiple of 8, right for 11 others; that graph had an ``identity`` too, which is left out since. Engine 20, filter
    gradient: wrong for the only one of one dimension, also the only one with unequal padding, right for 5 others.
    """
    if isinstance(node, ConvolutionForward):
        dtypes = node.inputs["X"].data_type, node.outputs["Y"].data_type
        if dtypes == (data_type.INT8, data_type.INT32):  # every element was wrong, in all of 6 shapes
            yield Engines(name="eng0")
            yield Engines(name="eng28")
    if isinstance(node, ConvolutionDataGradient) and max(node.stride) > 1 and fused > 3:
        yield Engines(name="eng1")
    if isinstance(node, ConvolutionForward) and node.outputs["Y"].dim[1] % 8 != 0:
        yield Engines(name="eng7_k24=27")
    if isinstance(node, ConvolutionFilterGradient) and (len(node.stride) == 1 or node.pre_padding != node.post_padding):
        yield Engines(name="eng20")
