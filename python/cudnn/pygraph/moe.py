"""Grouped GEMMs of a mixture of experts: every token times the weights of its expert."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import strides_in_order
from cudnn.backend import enums as be
from cudnn.enums import data_type, moe_grouped_matmul_mode
from cudnn.errors import make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import Context, Node, NodeList, Operand
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

NONE, GATHER, SCATTER = moe_grouped_matmul_mode


@dataclasses.dataclass(eq=False, kw_only=True)
class Grouped(Node):
    """What forward and backward share: tokens ``[1, T, K]``, sorted by expert at the offsets ``[E, 1, 1]``."""

    def _check_ranks(self) -> None:
        self.rank_check([3], *self.inputs)
        for port in ("TOKEN", "DOUTPUT"):
            if port in self.inputs and self.inputs[port].dim[0] != 1:
                self._refuse_shape(port, "dim=[1, tokens, hidden]")
        for port in self.exact_ports & self.inputs.keys():
            tensor = self.inputs[port]
            if tensor.dim[2] != 1 or (tensor.dim[1] != 1 if port == "FIRST_TOKEN_OFFSET" else tensor.dim[0] != 1):
                self._refuse_shape(port, "dim=[experts, 1, 1]" if port == "FIRST_TOKEN_OFFSET" else "dim=[1, rows, 1]")
            if tensor.data_type is not data_type.INT32:
                raise self.make_error(ValueError, port, tensor.data_type.name, "INT32", "call .to(torch.int32)")

    def _refuse_shape(self, port: str, allowed: str) -> None:
        raise self.make_error(ValueError, port, f"dim={self.inputs[port].dim}", allowed, "reshape it")

    def _segments(self, first: Any, tokens: int) -> list[tuple[int, int]]:
        """The rows of each expert: from its offset to the next one's, the last expert's to the end."""
        starts: list[int] = first.flatten().tolist()
        ends = [*starts[1:], tokens]
        if any(not 0 <= start <= end <= tokens for start, end in zip(starts, ends, strict=True)):
            raise make_error(
                ValueError,
                self.where,
                "first_token_offset",
                str(starts),
                f"rising values from 0 to {tokens}",
                "sort the tokens by expert and pass the row at which each expert's begin",
            )
        return list(zip(starts, ends, strict=True))


@dataclasses.dataclass(eq=False, kw_only=True)
class MoeGroupedMatmul(Grouped):
    """OUTPUT ``[1, rows, N]``: row r is TOKEN's by the WEIGHT ``[E, K, N]`` of the expert whose segment r lies in."""

    tag = "MOE_GROUPED_MATMUL"
    method = "moe_grouped_matmul"
    optional = frozenset({"TOKEN_INDEX", "TOKEN_KS"})
    exact_ports = frozenset({"FIRST_TOKEN_OFFSET", *optional})

    mode: moe_grouped_matmul_mode
    top_k: int = 0

    def infer(self, context: Context) -> None:
        self._check_ranks()
        token, weight, first = (self.inputs[port] for port in ("TOKEN", "WEIGHT", "FIRST_TOKEN_OFFSET"))
        if token.dim[2] != weight.dim[1]:
            self._refuse_shape("WEIGHT", f"dim=[experts, {token.dim[2]}, N] for TOKEN of dim={token.dim}")
        if first.dim[0] % weight.dim[0]:
            self._refuse_shape("FIRST_TOKEN_OFFSET", f"dim=[{weight.dim[0]}, 1, 1], one offset for each expert")
        rows = self.inputs["TOKEN_INDEX"].dim[1] if self.mode is GATHER else token.dim[1]
        for port in ("TOKEN_INDEX", "TOKEN_KS"):
            if port in self.inputs and self.inputs[port].dim[1] != rows:
                self._refuse_shape(port, f"dim=[1, {rows}, 1]")
        self.fill_output("OUTPUT", [1, rows, weight.dim[2]])

    def lower(self, lowering: Lowering) -> None:
        a, ports = be.Attribute, {**self.inputs, **self.outputs}
        lowering.operation(
            be.DescriptorType.OPERATION_MOE_GROUPED_MATMUL,
            {
                a.OPERATION_MOE_GROUPED_MATMUL_MODE: be.MoeGroupedMatmulMode[self.mode.name],
                a.OPERATION_MOE_GROUPED_MATMUL_MATH_PREC: lowering.data_type(self.compute_data_type),
                a.OPERATION_MOE_GROUPED_MATMUL_TOKEN_DESC: ports["TOKEN"],
                a.OPERATION_MOE_GROUPED_MATMUL_WEIGHT_DESC: ports["WEIGHT"],
                a.OPERATION_MOE_GROUPED_MATMUL_FIRST_TOKEN_OFFSET_DESC: ports["FIRST_TOKEN_OFFSET"],
                a.OPERATION_MOE_GROUPED_MATMUL_OUTPUT_DESC: ports["OUTPUT"],
                a.OPERATION_MOE_GROUPED_MATMUL_TOKEN_INDEX_DESC: ports.get("TOKEN_INDEX"),
                a.OPERATION_MOE_GROUPED_MATMUL_TOKEN_KS_DESC: ports.get("TOKEN_KS"),
                a.OPERATION_MOE_GROUPED_MATMUL_TOP_K: self.top_k or None,
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        weight, first = values["WEIGHT"], values["FIRST_TOKEN_OFFSET"]
        if first.numel() != weight.shape[0]:
            raise make_error(
                NotImplementedError,
                self.where,
                "first_token_offset",
                f"{first.numel()} offsets for {weight.shape[0]} experts",
                "one for each expert on the reference executor",
                "make one graph for each batch entry",
            )
        rows = values["TOKEN"][0]
        index = values["TOKEN_INDEX"].flatten().long() if self.mode is not NONE else None
        if self.mode is GATHER:
            rows = rows[index]
        segments = self._segments(first, rows.shape[0])
        parts = [rows[start:end] @ weight[expert] for expert, (start, end) in enumerate(segments)]
        out = rows.new_zeros(rows.shape[0], weight.shape[2])
        out[segments[0][0] :] = torch.cat(parts)
        if self.mode is SCATTER:
            assert index is not None
            destination = index * self.top_k + values["TOKEN_KS"].flatten().long()
            out = torch.zeros_like(out).index_copy_(0, destination, out)
        return {"OUTPUT": out.unsqueeze(0)}


@dataclasses.dataclass(eq=False, kw_only=True)
class MoeGroupedMatmulBackward(Grouped):
    """DWEIGHT ``[E, K, N]``: for each expert its tokens, transposed, by the gradient of its output rows."""

    tag = "MOE_GROUPED_MATMUL_BWD"
    method = "moe_grouped_matmul_bwd"
    exact_ports = frozenset({"FIRST_TOKEN_OFFSET"})

    def infer(self, context: Context) -> None:
        self._check_ranks()
        doutput, token, first = (self.inputs[port] for port in ("DOUTPUT", "TOKEN", "FIRST_TOKEN_OFFSET"))
        if doutput.dim[1] != token.dim[1]:
            self._refuse_shape("DOUTPUT", f"dim=[1, {token.dim[1]}, N] for TOKEN of dim={token.dim}")
        dims = [first.dim[0], token.dim[2], doutput.dim[2]]
        self.fill_output("DWEIGHT", dims, lambda dims: strides_in_order(dims, [1, 2, 0]))

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        lowering.operation(
            be.DescriptorType.OPERATION_MOE_GROUPED_MATMUL_BWD,
            {
                a.OPERATION_MOE_GROUPED_MATMUL_BWD_MATH_PREC: lowering.data_type(self.compute_data_type),
                a.OPERATION_MOE_GROUPED_MATMUL_BWD_TOKEN_DESC: self.inputs["TOKEN"],
                a.OPERATION_MOE_GROUPED_MATMUL_BWD_DWEIGHT_DESC: self.outputs["DWEIGHT"],
                a.OPERATION_MOE_GROUPED_MATMUL_BWD_FIRST_TOKEN_OFFSET_DESC: self.inputs["FIRST_TOKEN_OFFSET"],
                a.OPERATION_MOE_GROUPED_MATMUL_BWD_DOUTPUT_DESC: self.inputs["DOUTPUT"],
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        token, doutput = values["TOKEN"][0], values["DOUTPUT"][0]
        segments = self._segments(values["FIRST_TOKEN_OFFSET"], token.shape[0])
        return {"DWEIGHT": torch.stack([token[start:end].T @ doutput[start:end] for start, end in segments])}


class MoeMethods(NodeList[Operand]):
    """The methods that add grouped GEMMs of a mixture of experts."""

    def moe_grouped_matmul(
        self,
        token: Operand,
        weight: Operand,
        first_token_offset: Operand,
        token_index: Operand | None = None,
        token_ks: Operand | None = None,
        mode: moe_grouped_matmul_mode = moe_grouped_matmul_mode.NONE,
        compute_data_type: object = data_type.FLOAT,
        top_k: int = 0,
        name: str = "",
    ) -> Tensor:
        """Multiplies each token by the weights of its expert, for all experts in one operation. Needs cuDNN 9.15.

        Args:
            token: ``[1, rows, K]``, sorted by expert; for GATHER ``[1, tokens, K]`` in any order.
            weight: ``[E, K, N]``; cuDNN takes strides ``[K * N, 1, K]``.
            first_token_offset: INT32 ``[E, 1, 1]``: the row at which each expert's segment begins, rising. The last
                segment ends with the rows.
            token_index: INT32 ``[1, rows, 1]``. GATHER: the token that row r takes. SCATTER: the token it came from.
            token_ks: INT32 ``[1, rows, 1]``, SCATTER only: which of its token's ``top_k`` experts row r belongs to.
            mode: NONE: output row r comes from row r. GATHER: of token ``token_index[r]``. SCATTER: the result
                of row r goes to output row ``token_index[r] * top_k + token_ks[r]``.
            top_k: Experts for each token. SCATTER needs it; the other modes take it from the rows.

        Returns:
            OUTPUT ``[1, rows, N]``, row-major unless its strides are set.
        """
        name = self._indexed(name)
        where = f"{name} (moe_grouped_matmul)"
        if not isinstance(mode, moe_grouped_matmul_mode):  # pyright: ignore[reportUnnecessaryIsInstance]
            allowed = "cudnn.moe_grouped_matmul_mode. NONE, GATHER, SCATTER"
            raise make_error(ValueError, where, "mode", repr(mode), allowed, "pass one of them")
        arguments: dict[str, object] = {"token_index": token_index, "token_ks": token_ks, "top_k": top_k or None}
        needed = {NONE: (), GATHER: ("token_index",), SCATTER: ("token_index", "token_ks", "top_k")}[mode]
        if mode is not SCATTER:
            del arguments["top_k"]  # the number of rows implies it
        for argument, value in arguments.items():
            if (value is not None) != (argument in needed):
                allowed = (
                    f"{', '.join(needed)} for mode {mode.name}" if needed else f"none of them for mode {mode.name}"
                )
                raise make_error(
                    ValueError,
                    where,
                    argument,
                    "nothing" if value is None else "a value",
                    allowed,
                    "pass it" if value is None else "leave it out",
                )
        inputs = {
            "TOKEN": token,
            "WEIGHT": weight,
            "FIRST_TOKEN_OFFSET": first_token_offset,
            "TOKEN_INDEX": token_index,
            "TOKEN_KS": token_ks,
        }
        node = self._add(MoeGroupedMatmul, name, compute_data_type, inputs, ["OUTPUT"], mode=mode, top_k=int(top_k))
        return node.outputs["OUTPUT"]

    def moe_grouped_matmul_bwd(
        self,
        doutput: Operand,
        token: Operand,
        first_token_offset: Operand,
        compute_data_type: object = data_type.FLOAT,
        name: str = "",
    ) -> Tensor:
        """Gradient of ``moe_grouped_matmul`` (mode NONE) with respect to its weight. Needs cuDNN 9.22, cuBLASLt 13.5.

        Args:
            doutput: ``[1, rows, N]``, the gradient of the output.
            token: ``[1, rows, K]``.
            first_token_offset: INT32 ``[E, 1, 1]``, as in the forward product.

        Returns:
            DWEIGHT ``[E, K, N]`` with strides ``[K * N, 1, K]`` unless they are set.
        """
        inputs = {"DOUTPUT": doutput, "TOKEN": token, "FIRST_TOKEN_OFFSET": first_token_offset}
        node = self._add(MoeGroupedMatmulBackward, self._indexed(name), compute_data_type, inputs, ["DWEIGHT"])
        return node.outputs["DWEIGHT"]
