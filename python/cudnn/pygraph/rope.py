"""Rotary position embedding."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from cudnn.backend import enums as be
from cudnn.errors import checked_number, make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering


@dataclasses.dataclass(eq=False, kw_only=True)
class Rope(Node):
    """Rotates the last ``rope_dim`` elements of each head, halves against each other, by the angles of its position.

    ``lo' = s (lo cos a - hi sin a)``, ``hi' = s (hi cos a + lo sin a)``, the elements before them times ``s``, where
    ``s`` is ``output_scale``: the formula of cuDNN's documentation (operation RoPE).
    """

    tag = "ROPE_FWD"
    method = "rope"
    source, result = "X", "Y"  # ports
    direction: ClassVar[int] = 1  # of the rotation

    output_scale: float = 1.0
    rope_dim: int = 0  # 0: the whole head

    @property
    def _rotated(self) -> int:
        return self.rope_dim or self.inputs[self.source].dim[-1]

    def infer(self, context: Context) -> None:
        x, freqs = self.inputs[self.source], self.inputs["FREQS"]
        self.rank_check([4], self.source)
        if self._rotated % 2 or not 2 <= self._rotated <= x.dim[-1]:
            raise make_error(
                ValueError,
                self.where,
                "rope_dim",
                self.rope_dim,
                f"an even number up to the head size, {x.dim[-1]}",
                "leave it out to rotate whole heads",
            )
        *leading, angles = freqs.dim
        if angles < self._rotated or max(leading, default=1) != prod(leading) or prod(leading) < x.dim[2]:
            raise make_error(
                ValueError,
                self.where,
                f"freqs (tensor {freqs.name!r})",
                f"dim={freqs.dim}",
                f"dim=[{x.dim[2]}, 1, 1, {self._rotated}]: the angles of each position, at least",
                "repeat the rotate-half angles twice along the last dimension",
            )
        self.fill_output(self.result, x.dim, lambda _: [*x.stride])

    def lower(self, lowering: Lowering) -> None:
        tag = self.tag
        operation = f"OPERATION_{tag}_"
        lowering.operation(
            be.DescriptorType[f"OPERATION_{tag}"],
            {
                be.Attribute[f"{operation}{self.source}DESC"]: self.inputs[self.source],
                be.Attribute[f"{operation}{self.result}DESC"]: self.outputs[self.result],
                be.Attribute[f"{operation}FREQSDESC"]: self.inputs["FREQS"],
                be.Attribute[f"{operation}OUTPUT_SCALE"]: self.output_scale,
                be.Attribute[f"{operation}ROPE_DIM"]: self.rope_dim,
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x, freqs = values[self.source], values["FREQS"]
        half = self._rotated // 2
        angles = freqs.reshape(-1, freqs.shape[-1])[: x.shape[2], :half]
        cos, sin = angles.cos(), angles.sin() * self.direction
        passed, low, high = x.split([x.shape[-1] - 2 * half, half, half], -1)
        rotated = [passed, low * cos - high * sin, high * cos + low * sin]
        return {self.result: torch.cat(rotated, -1) * self.output_scale}


class RopeBackward(Rope):
    """The gradient: the rotation by the opposite angles."""

    tag = "ROPE_BWD"
    method = "rope_backward"
    source, result = "DY", "DX"
    direction = -1


class RopeMethods(NodeList[Operand]):
    """The methods that add rotary position embeddings."""

    def rope(
        self,
        input: Operand,
        freqs: Operand,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Rotary position embedding of queries or keys (Su et al., 2021), halves of a head rotated against each other.

        cuDNN has it from 9.24, as a part of attention graphs.

        Args:
            input: ``[batch, heads, positions, head]``.
            freqs: Angles in radians, ``[positions, 1, 1, rope_dim]`` or another shape with one extent above 1 before
                the last; the second half of each row repeats the first.
            output_scale: Factor on the whole result.
            rope_dim: How many elements at the end of each head are rotated; 0: all.

        Returns:
            Y, shaped and laid out as ``input``.
        """
        inputs, options = {"X": input, "FREQS": freqs}, _options(name or "rope", output_scale, rope_dim)
        return self._add(Rope, name, compute_data_type, inputs, ["Y"], **options).outputs["Y"]

    def rope_backward(
        self,
        dY: Operand,
        freqs: Operand,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """Gradient of ``rope`` with respect to its input, from that of its result and the same options.

        cuDNN has it from 9.25. Returns DX, shaped and laid out as ``dY``.
        """
        inputs, options = {"DY": dY, "FREQS": freqs}, _options(name or "rope_backward", output_scale, rope_dim)
        return self._add(RopeBackward, name, compute_data_type, inputs, ["DX"], **options).outputs["DX"]


def _options(where: str, output_scale: float, rope_dim: int) -> dict[str, Any]:
    return {
        "output_scale": checked_number(where, "output_scale", output_scale),
        "rope_dim": checked_number(where, "rope_dim", rope_dim, integer=True),
    }
