"""A mixture of experts as a module: router, experts, shared experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cudnn.errors import refusal
from cudnn.moe.experts import ACTIVATIONS, GATED, NUMBERS
from cudnn.moe.parallel import agreed, ranks_of
from cudnn.moe.routing import Routing, route, sort
from cudnn.ops._moe_mlp import moe_mlp


class _Logits(torch.autograd.Function):
    """The router's product, and its tokens for the experts: their gradients meet here, where a product adds its own."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens, weight)
        passed = tokens.view_as(tokens)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(passed)
        return torch.nn.functional.linear(tokens, weight), passed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (by_logits, by_tokens), (tokens, weight) = gradients, ctx.saved_tensors
        by_weight = by_logits.T @ tokens if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, by_weight
        return by_tokens.addmm_(by_logits, weight), by_weight  # nobody else has this gradient


class _Router(torch.nn.Linear):
    """A linear layer that also ``passes`` its tokens on, with the gradients of both in one."""

    def forward(self, tokens: Tensor, passes: bool = False) -> Any:
        cast, weight = torch.is_autocast_enabled(tokens.device.type), self.weight
        if (tokens.dtype is not weight.dtype and not cast) or tokens.shape[-1] != weight.shape[1]:
            got, allowed = f"{tokens.dtype} [..., {tokens.shape[-1]}]", f"{weight.dtype} [..., {weight.shape[1]}]"
            raise ValueError(refusal("MoE", "x", got, allowed, "use x.to(layer.up.dtype), or torch.autocast"))
        if not passes:
            return super().forward(tokens)
        if cast or torch.compiler.is_compiling():
            return super().forward(tokens), tokens
        return _Logits.apply(tokens, weight)

    @property
    def has_hooks(self) -> bool:
        """Whether someone looks at its results or their gradients, and expects the logits alone."""
        return bool(self._forward_hooks or self._backward_hooks or self._backward_pre_hooks)


class MoE(torch.nn.Module):
    """A layer of experts: each token goes through ``top_k`` of them, chosen and weighted by a router.

    The router is a linear layer and :func:`cudnn.moe.route`, the experts are :func:`cudnn.ops.moe_mlp`. Shared experts,
    of the same size, see every token with the weight 1 or, with ``shared_gate``, ``sigmoid(gate(x))``; S of them are
    one of S times the intermediate size.

    It has these parameters:

        - ``router.weight`` (experts, hidden), ``shared_gate.weight`` (1, hidden).
        - ``up`` (experts + shared_experts, N, hidden) with N = 2 intermediate or, for "srelu", intermediate. Of every
          64 rows of a gated activation, the first 32 are gates: :meth:`load_gate_up` copies weights in halves. With
          ``glu_layout="concatenated"``, the first half are gates.
        - ``down`` (experts + shared_experts, hidden, intermediate).
        - ``up_bias``, ``down_bias`` with ``bias``.

    The buffer ``correction``, float32 (experts,), with ``correction_bias``, is added to the scores that choose experts,
    not to weights.

    Args:
        hidden, intermediate: Sizes, multiples of 8 and of 32.
        experts, top_k: How many there are, and how many a token sees.
        activation, glu_layout: of :func:`cudnn.ops.moe_mlp`.
        bias: The experts have biases.
        shared_experts, shared_gate: See above.
        correction_bias: See above.
        fp8: of :func:`cudnn.ops.moe_mlp`: the experts' forward products are of e4m3.
        into_main_grad: The backward pass adds the gradients of ``up`` and ``down`` to ``up.main_grad`` and
            ``down.main_grad``, float32, as Megatron's optimizers have them, and gives none to autograd.
        group, time_limit: of :func:`cudnn.ops.moe_mlp`: ``experts`` are those of all ranks, of which each has its share
            in ``up`` and ``down``; gradients of the router are this rank's. Not with shared experts.
        dtype: bfloat16 or float16.
        score, pre_softmax, renormalize, n_group, topk_group, scaling_factor: of :func:`cudnn.moe.route`.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".

    Raises:
        ValueError: an activation or size that is not allowed.
    """

    def __init__(
        self, hidden: int, intermediate: int, experts: int, top_k: int, *, activation: str = "swiglu",
        glu_layout: str = "interleaved", bias: bool = False, fp8: bool = False, shared_experts: int = 0,
        shared_gate: bool = False,
        correction_bias: bool = False, into_main_grad: bool = False, score: str = "softmax", pre_softmax: bool = True,
        renormalize: bool = False, n_group: int = 1, topk_group: int = 1, scaling_factor: float = 1.0,
        linear_offset: float = 1.0, geglu_alpha: float = 1.702, glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0, group: Any = None, time_limit: float = 600.0, device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(refusal("MoE", "activation", repr(activation), " or ".join(map(repr, ACTIVATIONS))))
        if hidden % 8 or intermediate % 32 or min(hidden, intermediate, experts) < 1:
            got = f"hidden={hidden}, intermediate={intermediate}, experts={experts}"
            raise ValueError(
                refusal("MoE", "sizes", got, "hidden a multiple of 8, intermediate of 32, one expert or more")
            )
        self.experts, self.top_k, self.shared_experts, self.activation = experts, top_k, shared_experts, activation
        self.glu_layout, self.fp8, self.into_main_grad = glu_layout, fp8, into_main_grad
        self._route: dict[str, Any] = {
            "score": score, "pre_softmax": pre_softmax, "renormalize": renormalize, "n_group": n_group,
            "topk_group": topk_group, "scaling_factor": scaling_factor,
        }  # fmt: skip
        numbers = (linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min)
        self._numbers = dict(zip(NUMBERS, numbers, strict=True))
        made = {"device": device, "dtype": dtype}
        ranks = 1 if group is None else ranks_of(group)
        if experts % ranks or (group is not None and shared_experts):
            got = f"{experts} experts and {shared_experts} shared ones on {ranks} ranks"
            allowed = "as many experts on each rank, and no shared ones with a group"
            raise ValueError(refusal("MoE", "experts", got, allowed, "make the shared experts a layer of their own"))
        self._ranks: dict[str, Any] = {"group": group, "time_limit": time_limit}
        self._agreed = group is None
        count, wide = experts // ranks + shared_experts, intermediate * (2 if activation in GATED else 1)
        self.router = _Router(hidden, experts, bias=False, **made)
        self.shared_gate = torch.nn.Linear(hidden, 1, bias=False, **made) if shared_gate else None
        self.up = torch.nn.Parameter(torch.empty(count, wide, hidden, **made))
        self.down = torch.nn.Parameter(torch.empty(count, hidden, intermediate, **made))
        self.up_bias = torch.nn.Parameter(torch.empty(count, wide, **made)) if bias else None
        self.down_bias = torch.nn.Parameter(torch.empty(count, hidden, **made)) if bias else None
        self.correction: Tensor | None
        self.register_buffer("correction", torch.zeros(experts, device=device) if correction_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the experts' parameters as those of ``torch.nn.Linear`` are."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, -bound, bound)

    def load_gate_up(self, gate_up: Tensor) -> None:
        """Copies weights (experts + shared_experts, 2 intermediate, hidden) into ``up``: halves, gates first."""
        if self.activation not in GATED or gate_up.shape != self.up.shape:
            got = f"{tuple(gate_up.shape)}, for the activation {self.activation!r}"
            raise ValueError(refusal("MoE.load_gate_up", "gate_up", got, f"{tuple(self.up.shape)}, of a gated one"))
        if self.glu_layout == "interleaved":
            gate_up = gate_up.detach().unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)
        with torch.no_grad():
            self.up.copy_(gate_up)

    def route(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The router's logits (T, experts) and its choice, without shared experts: for a loss that balances, say."""
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        return logits, route(logits, self.top_k, bias=self.correction, **self._route)

    def _with_shared(self, tokens: Tensor, routing: Routing) -> Routing:
        """The shared experts as further choices of every token."""
        shape = (len(tokens), self.shared_experts)
        shared = torch.arange(self.experts, len(self.up), dtype=torch.int32, device=tokens.device).expand(shape)
        weight = tokens.new_ones(shape, dtype=torch.float32)
        if self.shared_gate is not None:
            weight = weight * self.shared_gate(tokens).float().sigmoid()
        indices = torch.cat([routing.indices, shared], 1)
        return Routing(indices, torch.cat([routing.weights, weight], 1), *sort(indices, len(self.up)))

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """``[..., hidden]`` of the same shape. ``routing``: what :meth:`route` returned for x, if it was called."""
        if not self._agreed:
            self._agree(x)
        if routing is None and type(self.router) is _Router and not self.router.has_hooks:
            logits, tokens = self.router(x.reshape(-1, x.shape[-1]), passes=True)
            routing, x = route(logits, self.top_k, bias=self.correction, **self._route), tokens.view(x.shape)
        elif routing is None:
            _, routing = self.route(x)
        if self.shared_experts:
            routing = self._with_shared(x.reshape(-1, x.shape[-1]), routing)
        both: tuple[Any, Any] = (self.up, self.down)
        sums = (both[0].main_grad, both[1].main_grad) if self.into_main_grad else None
        return moe_mlp(
            x, routing, self.up, self.down, self.up_bias, self.down_bias, activation=self.activation,
            glu_layout=self.glu_layout, fp8=self.fp8, main_grads=sums, **self._numbers, **self._ranks,
        )  # fmt: skip

    def _agree(self, x: Tensor) -> None:
        """At the first call all ranks say what their layer is: see the operator's errors."""
        kind, words = x.device.type, f"{self.extra_repr()}, {self.glu_layout}, {self.up.dtype}, {self._numbers}"
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.up.dtype
        sizes, tokens = (self.experts, self.top_k, x.shape[-1], dtype), x.reshape(-1, x.shape[-1])
        agreed("MoE", words=words, sizes=sizes, x=tokens, **self._ranks)
        self._agreed = True

    def extra_repr(self) -> str:
        sizes = f"{self.up.shape[2]}, {self.down.shape[2]}, experts={self.experts}, top_k={self.top_k}"
        shared = f", shared_experts={self.shared_experts}" if self.shared_experts else ""
        return f"{sizes}{shared}, {self.activation}{', fp8' * self.fp8}"
