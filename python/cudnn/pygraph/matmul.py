"""Matrix product."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cudnn.backend import enums as be
from cudnn.errors import checked_number, make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand, where_of
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering


@dataclasses.dataclass(eq=False, kw_only=True)
class Matmul(Node):
    """C = A B over the last two dimensions, the others broadcast.

    ``override_m``, ``override_n`` and ``override_k`` are optional inputs used by attention: per-batch extents, INT32
    ``[batch, 1, 1, 1]``; elements beyond them read as ``padding``.
    """

    tag = "MATMUL"
    method = "matmul"
    optional = exact_ports = frozenset({"override_m", "override_n", "override_k"})
    any_address = True

    padding: float = 0.0

    def infer(self, context: Context) -> None:
        a, b = self.inputs["A"], self.inputs["B"]
        rank = max(len(a.dim), len(b.dim))
        for operand in (a, b):
            if len(operand.dim) < 2 or (operand.is_virtual and len(operand.dim) < rank):
                raise make_error(
                    ValueError,
                    self.where,
                    "A and B",
                    f"dim={a.dim} and dim={b.dim}",
                    "the same rank, 2 or more",
                    "add leading dimensions of extent 1",
                )
            while len(operand.dim) < rank:  # a matrix with a batch of matrices: all batch entries share it
                operand.stride.insert(0, operand.dim[0] * operand.stride[0])
                operand.dim.insert(0, 1)
        if a.dim[-1] != b.dim[-2]:
            fitting = "B" if a.dim[-1] == b.dim[-1] else "A" if a.dim[-2] == b.dim[-2] else ""
            hint = (
                f"transpose {fitting}: swap its last two dims and strides" if fitting else "correct one of the shapes"
            )
            got = f"dim={a.dim} and dim={b.dim}: inner extents {a.dim[-1]} and {b.dim[-2]}"
            raise make_error(ValueError, self.where, "A and B", got, "[.., M, K] and [.., K, N]", hint)
        batch = [max(pair) for pair in zip(a.dim[:-2], b.dim[:-2], strict=True)]
        # Grouped heads in attention: cuDNN lets one matrix serve several consecutive ones of the other operand.
        if any(max(pair) % min(pair) for pair in zip(a.dim[:-2], b.dim[:-2], strict=True)):
            raise make_error(
                ValueError,
                self.where,
                "A and B",
                f"dim={a.dim} and dim={b.dim}",
                "batch extents that are equal, 1, or multiples of one another",
                "reshape one of them",
            )
        self.fill_output("C", [*batch, a.dim[-2], b.dim[-1]])

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        lowering.operation(
            be.DescriptorType.OPERATION_MATMUL,
            {
                a.OPERATION_MATMUL_ADESC: self.inputs["A"],
                a.OPERATION_MATMUL_BDESC: self.inputs["B"],
                a.OPERATION_MATMUL_CDESC: self.outputs["C"],
                a.OPERATION_MATMUL_DESC: lowering.descriptor(
                    be.DescriptorType.MATMUL,
                    {
                        a.MATMUL_COMP_TYPE: lowering.data_type(self.compute_data_type),
                        a.MATMUL_PADDING_VALUE: self.padding or None,
                    },
                ),
                a.OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC: self.inputs.get("override_m"),
                a.OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC: self.inputs.get("override_n"),
                a.OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC: self.inputs.get("override_k"),
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        a, b = values["A"], values["B"]
        for axis in range(a.dim() - 2):
            larger, smaller = max(a.shape[axis], b.shape[axis]), min(a.shape[axis], b.shape[axis])
            if smaller not in (1, larger):
                a, b = (t.repeat_interleave(larger // t.shape[axis], axis) if t.shape[axis] > 1 else t for t in (a, b))
        dtype = a.dtype
        # PyTorch multiplies integers on the CPU only, and on a GPU float32 perhaps in TF32; float64 is exact for both.
        if a.is_cuda or not dtype.is_floating_point:
            a, b = a.double(), b.double()
        return {"C": torch.matmul(a, b).to(dtype)}


class MatmulMethods(NodeList[Operand]):
    """The method that adds a matrix product."""

    def matmul(
        self,
        A: Operand,
        B: Operand,
        compute_data_type: object = NOT_SET,
        padding: float = 0.0,
        name: str = "",
    ) -> Tensor:
        """Matrix product ``C = A B``.

        A is ``[.., M, K]`` and B ``[.., K, N]`` of the same rank, 2 or more; batch dimensions are equal or 1. C is
        ``[.., M, N]``, row-major unless its strides are set. ``padding`` is read beyond the extents of a tensor.
        """
        name = self._indexed(name)
        for port, tensor in (("A", A), ("B", B)):
            if isinstance(tensor, Tensor) and not tensor.name:  # pyright: ignore[reportUnnecessaryIsInstance]
                tensor.name = f"{name}::{port}"
        padding = checked_number(where_of("matmul", name), "padding", padding, limit=True)
        node = self._add(Matmul, name, compute_data_type, {"A": A, "B": B}, ["C"], padding=padding)
        return node.outputs["C"]
