"""Matrix products with rows that are no multiples of 16 bytes: what cuDNN computes wrongly, as seen on an H200."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeGuard

from cudnn.datatypes import element_bits
from cudnn.pygraph.matmul import Matmul
from cudnn.pygraph.node import Node
from cudnn.pygraph.pointwise import Pointwise
from cudnn.pygraph.structure import Slice
from cudnn.pygraph.tensor import Tensor

_TILE_STEP = 16  # bytes between rows that TMA wants a multiple of
_ASYNCHRONOUS = 4  # bytes, the least that an asynchronous load takes


class _Sources:
    """The tensors in memory that a product's operands are made of."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.matmuls = [node for node in nodes if isinstance(node, Matmul)]
        self._makers = {id(tensor): node for node in nodes for tensor in node.outputs.values()}

    def maker(self, tensor: Tensor) -> Node | None:
        """The node that computes a virtual tensor; None for memory, of which a slice is a part."""
        maker = self._makers.get(id(tensor))
        return None if isinstance(maker, Slice) and self.maker(maker.inputs["X"]) is None else maker

    def of(self, tensor: Tensor, reader: Node) -> Iterator[tuple[Tensor, Node]]:
        """Those that an operand of ``reader`` is made of, each with the node that reads it."""
        maker = self.maker(tensor)
        if maker is None:
            yield tensor, reader
        else:
            for source in maker.inputs.values():
                yield from self.of(source, maker)

    def operands(self) -> Iterator[tuple[Tensor, Tensor, Node]]:
        """Of all products: an operand, a tensor in memory that it is made of, and the node that reads that."""
        for product in self.matmuls:
            for operand in (product.inputs["A"], product.inputs["B"]):
                for source, reader in self.of(operand, product):
                    yield operand, source, reader


def _is_aligned(tensor: Tensor, bytes_: int) -> bool:
    """Whether all rows and matrices begin at multiples of ``bytes_``, for data that do.

    Where two dimensions have stride 1, cuDNN may take either for the row.
    """
    if tensor.is_pass_by_value or tensor.alignment % bytes_:
        return tensor.is_pass_by_value
    steps = [step for axis, step in enumerate(tensor.stride) if axis != _row(tensor) and (axis or tensor.dim[0] > 1)]
    return all(step * element_bits(tensor.data_type) % (8 * bytes_) == 0 for step in steps)


def _row(tensor: Tensor) -> int:
    """The last dimension of stride 1, along which a row runs."""
    return max((axis for axis, step in enumerate(tensor.stride) if step == 1), default=-1)


def tiles_misread(nodes: Sequence[Node]) -> bool:
    """Whether engines 2 and 4, which copy tiles with TMA, misread an operand.

    Engine 2 came out wrong for all of 20 products with such operands, whatever the rows of the result were, and right
    for 25 of 26 without; the other one read a matrix that entries of the batch share. Heuristics proposed it, last, for
    one. Engine 4 they propose where rows are multiples of 16 bytes, but not only where the step between entries of a
    batch is: wrong for the one product of int8 that was like that.
    """
    return any(
        source.dim[-2:] == operand.dim[-2:] and not _is_aligned(source, _TILE_STEP)
        for operand, source, _ in _Sources(nodes).operands()
    )


def adds_by_batch(nodes: Sequence[Node]) -> bool:
    """Whether a product is followed by a row that is another one for each entry of the batch.

    cuBLASLt added the first entry's to all, in the only such product that it ran, of one row and one column.
    """
    rows = (tensor for node in nodes if isinstance(node, Pointwise) for tensor in node.inputs.values())
    return any(isinstance(node, Matmul) for node in nodes) and any(
        not tensor.is_virtual and len(tensor.dim) > 2 and tensor.dim[-2] == 1 and prod(tensor.dim[:-2]) > 1
        for tensor in rows
    )


def lies_off(nodes: Sequence[Node]) -> bool:
    """Whether the graph of a product has a tensor at an address that 16 does not divide: cuBLASLt may refuse to run.

    In 7 of 61 runs it failed at execution, for alignments that were declared.
    """
    tensors = [tensor for node in nodes for tensor in node.tensors() if not tensor.is_pass_by_value]
    return any(isinstance(node, Matmul) for node in nodes) and any(tensor.alignment % _TILE_STEP for tensor in tensors)


def widened_apart(nodes: Sequence[Node]) -> list[Pointwise]:
    """The ``identity`` nodes that widen an operand of 8 bits and must not run in the plan of the matmul.

    Engine 7 converts while it loads; where rows are too narrow for its asynchronous loads, it uses what it has not
    loaded yet. Which elements are wrong changes from run to run, from a few to all: in 58 of 195 runs, of 20 among 23
    products. With rows of 4 bytes' multiples all of 212 runs came out right.
    """
    readers = {id(reader): reader for reader in _narrow_loads(nodes)}
    return [reader for reader in readers.values() if _is_plain_cast(reader)]


def loads_race(nodes: Sequence[Node]) -> bool:
    """Whether engine 7 would convert such an operand in a way that ``widened_apart`` does not take out of the plan."""
    return not all(map(_is_plain_cast, _narrow_loads(nodes)))


def _narrow_loads(nodes: Sequence[Node]) -> list[Node]:
    """What reads operands of 8 bits, with rows of no multiple of 4 bytes, to widen them before the matmul."""
    return [
        reader
        for _, source, reader in _Sources(nodes).operands()
        if not isinstance(reader, Matmul) and element_bits(source.data_type) == 8 and not _has_wide_rows(source)
    ]


def _has_wide_rows(tensor: Tensor) -> bool:
    row = _row(tensor)
    return _is_aligned(tensor, _ASYNCHRONOUS) and (row < 0 or tensor.dim[row] % _ASYNCHRONOUS == 0)


def _is_plain_cast(node: Node) -> TypeGuard[Pointwise]:
    return isinstance(node, Pointwise) and node.mode == "IDENTITY" and node.outputs["OUT_0"].is_virtual
