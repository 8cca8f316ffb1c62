"""The whole layer, router and experts, as one autograd node: :class:`LayerFunction`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cudnn.moe import layer as expert_layer
from cudnn.moe.experts import Permutation
from cudnn.moe.main_grads import dummy_grads
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import once_differentiable

if TYPE_CHECKING:
    from cudnn.moe.module import MoE


class Saved(NamedTuple):
    """Tensors saved for backward. ``logits``: all experts', or only the chosen ones' if these suffice."""

    tokens: Tensor
    logits: Tensor
    preact: Tensor
    indices: Tensor
    weights: Tensor
    offsets: Tensor
    gather_idx: Tensor
    scatter_idx: Tensor


class RouterBackward:
    """The backward pass of the router and of the shared experts' gate: a :class:`cudnn.moe.layer.RouterBackward`.

    If only the chosen experts' logits have a gradient, the up GEMM^T adds dlogit[r] router[e] to each row of dx; else
    :meth:`add_dx` adds the router's GEMM at the end.

    Args:
        of_losses: The gradients of a :class:`RouterOutput`'s logits and weights, or None.

    Attributes:
        dshared, drouter: The gradients of the shared experts' weights and of the router's weight, if needed.
    """

    dlogits: Tensor
    dshared: Tensor | None = None
    drouter: Tensor | None = None

    def __init__(
        self,
        layer: MoE,
        saved: Saved,
        router: Tensor,
        needs_shared: bool,
        needs_router: bool,
        of_losses: Sequence[Tensor | None],
    ) -> None:
        self.layer, self.saved, self.router = layer, saved, router
        self.needs_shared, self.needs_router, self.of_losses = needs_shared, needs_router, of_losses

    def backward_weights(self, dweights: Tensor) -> tuple[Tensor, Tensor] | None:
        layer, drouted = self.layer, dweights
        dlogits_of_losses, dweights_of_losses = self.of_losses
        if self.needs_shared:
            drouted, self.dshared = (x.contiguous() for x in dweights.split([layer.top_k, layer._shared_rows], 1))
        elif layer._shared_rows:
            drouted = dweights[:, : layer.top_k].contiguous()
        if dweights_of_losses is not None:
            drouted = drouted + dweights_of_losses
        self.dlogits, dlogit_of_row = layer._dlogits(drouted, self.saved, dlogits_of_losses is None)
        if dlogits_of_losses is not None:
            self.dlogits += dlogits_of_losses
        self.drouter = self.dlogits.T @ self.saved.tokens if self.needs_router else None
        return None if dlogit_of_row is None else (dlogit_of_row, layer._padded_router(self.router))

    def add_dx(self, dx: Tensor) -> None:
        dx.addmm_(self.dlogits, self.router)  # in place: dx is not shared


class LayerFunction(torch.autograd.Function):
    """The whole layer as one autograd node, which takes less host time than one node per operator.

    Its results are y and, with ``return_routing``, the fields of a :class:`RouterOutput`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: MoE,
        return_routing: bool,
        tokens: Tensor,
        shared: Tensor | None,
        router: Tensor,
        *parameters: Tensor | None,
    ) -> Any:
        y, saved, ctx.ops, routing = layer._forward(tokens, shared, router, parameters, True, return_routing)
        ctx.layer, ctx.main_grad = layer, layer._main_grad_lists()
        ctx.save_for_backward(*saved, router, *parameters)
        if routing is None:
            return y
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(routing.indices, routing.offsets)
        return y, *routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, main_grad = ctx.layer, ctx.main_grad
        tensors = ctx.saved_tensors
        saved, (router, *parameters) = Saved(*tensors[:8]), tensors[8:]
        _, _, needs_tokens, needs_shared, needs_router, *needs_parameters = ctx.needs_input_grad
        dy, dlogits, dweights = gradients[0], *(gradients[1:3] or (None, None))
        dy = saved.tokens.new_zeros(saved.tokens.shape) if dy is None else aligned(dy)
        for buffers in main_grad:
            torch.autograd.graph.increment_version(buffers)
        e = layer._experts(parameters)
        rows = (saved.offsets, saved.gather_idx, saved.scatter_idx)
        permutation = Permutation(*rows, batch_invariant=layer.batch_invariant)
        needs_weights = needs_tokens or needs_shared or needs_router
        needs_grad = expert_layer.NeedsGrad(needs_tokens, needs_weights, *needs_parameters)
        router_backward = RouterBackward(layer, saved, router, needs_shared, needs_router, (dlogits, dweights))
        arguments = (saved.preact, saved.indices, saved.weights, permutation, e, needs_grad, main_grad)
        grads = expert_layer.backward(ctx.ops, dy, saved.tokens, *arguments, router=router_backward)
        if main_grad[0]:
            up, down = dummy_grads(parameters[:2], needs_parameters[:2])
            grads = grads._replace(up=up, down=down)
        return None, None, grads.x, router_backward.dshared, router_backward.drouter, *grads[2:]
