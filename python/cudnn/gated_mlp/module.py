"""A gated MLP as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, make_error
from cudnn.fused import argument_types
from cudnn.fused.gated import LAYOUTS
from cudnn.gated_mlp.layer import ACTIVATIONS
from cudnn.gated_mlp.operator import gated_mlp
from cudnn.moe.experts import ACT_PARAMS

_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class GatedMLP(torch.nn.Module):
    """The dense feed-forward layer of Llama, Qwen3 and others: y = (f(gate x) * (up x)), then down, in two GEMMs.

    Computes :func:`cudnn.ops.gated_mlp`.

    Parameters of the module:

        - ``gate_up`` (2 intermediate, hidden): the first half of the rows are gates. With ``glu_layout="interleaved"``,
          the first 32 of every 64 rows are.
        - ``down`` (hidden, intermediate).
        - ``gate_up_bias``, ``down_bias`` with ``bias``.

    State dicts with the keys ``gate_proj.weight``, ``up_proj.weight`` and ``down_proj.weight`` (and ``.bias``), as
    transformers' checkpoints have them, load too; :meth:`split_state_dict` makes them.

    Args:
        hidden, intermediate: Sizes, multiples of 8 and of 32.
        activation: "swiglu" or "geglu", of :func:`cudnn.ops.gated_mlp`.
        bias: All linear layers have biases.
        glu_layout: "concatenated", or "interleaved", which is read in the same way and changes the weights' order only.
        into_main_grad: The backward pass adds the gradients of ``gate_up`` and ``down`` to ``gate_up.main_grad`` and
            ``down.main_grad``, float32, as Megatron's optimizers allocate them; autograd gets none.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".
        dtype: bfloat16 or float16; float32 for calls under ``torch.autocast`` and, as float64, for the reference on the
            CPU. None: PyTorch's default type.

    Raises:
        ValueError: an activation, a layout or a size that is not allowed.
        TypeError: an argument of another Python type.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        glu_layout: str = "concatenated",
        into_main_grad: bool = False,
        linear_offset: float = 1.0,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        device: Any = None,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        arguments = argument_types.checked("GatedMLP", GatedMLP.__init__, locals())
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        for name, allowed in (("activation", ACTIVATIONS), ("glu_layout", LAYOUTS), ("dtype", _TYPES)):
            value = dtype if name == "dtype" else arguments[name]
            if value not in allowed:
                raise make_error(ValueError, "GatedMLP", name, repr(value), " or ".join(map(repr, allowed)))
        hidden, intermediate = arguments["hidden"], arguments["intermediate"]
        for name, size, step in (("hidden", hidden, 8), ("intermediate", intermediate, 32)):
            if size < 1 or size % step:
                hint = f"take {-(-max(size, 1) // step) * step} and pad the weights with zeros"
                raise make_error(ValueError, "GatedMLP", name, size, f"a multiple of {step}", hint)
        self.activation, self.glu_layout, self.into_main_grad = activation, glu_layout, into_main_grad
        numbers = zip(ACT_PARAMS, (linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min), strict=True)
        self._act_params = {name: checked_number("GatedMLP", name, x, limit="clamp" in name) for name, x in numbers}
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up = torch.nn.Parameter(torch.empty(2 * intermediate, hidden, **factory))
        self.down = torch.nn.Parameter(torch.empty(hidden, intermediate, **factory))
        self.gate_up_bias = torch.nn.Parameter(torch.empty(2 * intermediate, **factory)) if bias else None
        self.down_bias = torch.nn.Parameter(torch.empty(hidden, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the parameters as ``torch.nn.Linear`` does."""
        for weight, bias in ((self.gate_up, self.gate_up_bias), (self.down, self.down_bias)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]``, of the shape and dtype of x."""
        main_grads = self._main_grads() if self.into_main_grad and torch.is_grad_enabled() else None
        return gated_mlp(
            x,
            self.gate_up,
            self.down,
            self.gate_up_bias,
            self.down_bias,
            activation=self.activation,
            glu_layout=self.glu_layout,
            main_grads=main_grads,
            **self._act_params,
        )

    def _main_grads(self) -> tuple[Tensor, Tensor]:
        buffers = [getattr(weight, "main_grad", None) for weight in (self.gate_up, self.down)]
        if any(buffer is None for buffer in buffers):
            hint = "set both, or call the layer under torch.no_grad()"
            allowed = "float32 tensors of their shapes"
            raise make_error(ValueError, "GatedMLP", "main_grad of gate_up and down", None, allowed, hint)
        return buffers[0], buffers[1]  # pyright: ignore[reportReturnType]

    def load_gate_up(self, gate: Tensor, up: Tensor) -> None:
        """Copies weights (intermediate, hidden) into ``gate_up``."""
        half = (self.gate_up.shape[0] // 2, self.gate_up.shape[1])
        for name, weight in (("gate", gate), ("up", up)):
            check_tensor("GatedMLP.load_gate_up", name, weight)
            if weight.shape != half:
                raise make_error(ValueError, "GatedMLP.load_gate_up", name, tuple(weight.shape), str(half))
        with torch.no_grad():
            for rows, weight in zip(self._halves(self.gate_up), (gate, up), strict=True):
                rows.copy_(weight.view(rows.shape))

    def _halves(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the rows of gate and of up."""
        if self.glu_layout == "concatenated":
            gate, up = gate_up.chunk(2)
            return gate, up
        gate, up = gate_up.unflatten(0, (-1, 2, 32)).unbind(1)
        return gate, up

    def split_state_dict(self) -> dict[str, Tensor]:
        """The parameters as checkpoints of transformers have them: ``gate_proj``, ``up_proj`` and ``down_proj``."""
        state: dict[str, Tensor] = {}
        for kind, gate_up, down in (
            ("weight", self.gate_up, self.down),
            ("bias", self.gate_up_bias, self.down_bias),
        ):
            if gate_up is None or down is None:
                continue
            gate, up = (rows.reshape(-1, *gate_up.shape[1:]) for rows in self._halves(gate_up.detach()))
            state |= {f"gate_proj.{kind}": gate, f"up_proj.{kind}": up, f"down_proj.{kind}": down.detach()}
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes separate weights, ``gate_proj``, ``up_proj`` and ``down_proj``, too."""
        for kind, target, down in (("weight", "gate_up", "down"), ("bias", "gate_up_bias", "down_bias")):
            names = [f"{prefix}{name}.{kind}" for name in ("gate_proj", "up_proj", "down_proj")]
            own = getattr(self, target)
            if own is None or f"{prefix}{target}" in state_dict or not all(name in state_dict for name in names):
                continue
            gate, up, down_rows = (state_dict.pop(name) for name in names)
            half = (own.shape[0] // 2, *own.shape[1:])
            for name, rows in zip(names, (gate, up), strict=False):
                if rows.shape != half:
                    raise make_error(ValueError, "GatedMLP.load_state_dict", name, tuple(rows.shape), str(half))
            joined = torch.cat([gate, up])
            if self.glu_layout == "interleaved":
                joined = joined.unflatten(0, (2, -1, 32)).transpose(0, 1).flatten(0, 2)
            state_dict[f"{prefix}{target}"], state_dict[f"{prefix}{down}"] = joined, down_rows
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        layout = f", {self.glu_layout}" if self.glu_layout != "concatenated" else ""
        return f"{self.gate_up.shape[1]}, {self.down.shape[1]}, {self.activation}{layout}"
