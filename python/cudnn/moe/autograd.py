"""The whole layer, router and experts, as one autograd node: :class:`LayerFunction`.

With few tokens the host needs more time than the GPU: then the launches of a pass, once recorded, are repeated
(:class:`cudnn.runtime.launch_sequence.LaunchSequences`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cudnn.moe import layer as expert_layer
from cudnn.moe.experts import Permutation, environment, grouped_gemm_ops
from cudnn.moe.main_grads import dummy_grads
from cudnn.moe.operator import checked
from cudnn.moe.router_linear import moe_router_linear
from cudnn.moe.routing import RouterOutput, logits_gradient, routed, rule_of, sort
from cudnn.runtime.launch_sequence import Tensors, are_repeated
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import may_overwrite, once_differentiable

if TYPE_CHECKING:
    from cudnn.moe.module import MoE

REPEATED_ELEMENTS = 2**23  # of all slots' tokens (T K, H) up to which launches are recorded and repeated


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


def forward(
    layer: MoE,
    tokens: Tensor,
    shared: Tensor | None,
    router: Tensor,
    parameters: Sequence[Tensor | None],
    saves: bool,
    return_routing: bool,
) -> tuple[Tensor, Saved | None, RouterOutput | None]:
    """y (T, hidden), the tensors for backward if ``saves``, and the router's output if wanted."""
    linear = moe_router_linear if layer.batch_invariant else torch.nn.functional.linear
    key = _sequence_key(layer, tokens)
    if key is None:  # the logits have no name here: if they are not saved, the experts reuse their memory
        correction = layer.correction
        results = _forward(
            layer, saves, return_routing, aligned(tokens), linear(tokens, router), shared, correction, parameters
        )
    else:

        def function(tokens: Tensor, logits: Tensor, shared: Any, correction: Any, *tensors: Any) -> Tensors:
            return _forward(layer, saves, return_routing, tokens, logits, shared, correction, tensors[:4])

        # The pass checks the buffers of gradients before it begins: others are noticed.
        main_grads = (layer._main_grads() if layer.into_main_grad else None) or (None, None)
        tensors = (aligned(tokens), linear(tokens, router), shared, layer.correction, *parameters, *main_grads)
        results = layer._sequences((saves, return_routing, *key), function, tensors)
    y, *others = results
    saved = Saved(*others[:8]) if saves else None
    output = RouterOutput(*others[8:]) if return_routing else None
    return y, saved, output


def _sequence_key(layer: MoE, tokens: Tensor) -> tuple[Any, ...] | None:
    """What a pass depends on besides its tensors; None if its launches are not repeated."""
    count, hidden = tokens.shape
    if count * layer.top_k * hidden > REPEATED_ELEMENTS or not are_repeated(tokens):
        return None
    rule = (layer.top_k, *layer._rule, layer._scaling_factor)
    experts = (layer.activation, layer.glu_layout, layer.fp8, layer.batch_invariant, *layer._act_params.values())
    return (count, tokens.dtype, *rule, *experts, *environment())


def _forward(
    layer: MoE,
    saves: bool,
    return_routing: bool,
    tokens: Tensor,
    logits: Tensor,
    shared: Tensor | None,
    correction: Tensor | None,
    parameters: Sequence[Tensor | None],
) -> Tensors:
    """The pass after the router's GEMM: y, the fields of ``Saved``, and those of a ``RouterOutput`` if wanted."""
    # (1) Top-k, weights, and the sort by expert.
    rule = rule_of(layer.top_k, *layer._rule)
    weights, indices, *permutation, chosen = routed(logits, correction, rule, layer._scaling_factor)
    output = (logits, weights, indices, permutation[0]) if return_routing else ()
    saved_logits = logits if saves and rule.is_dense else chosen
    del logits
    # (2) Shared experts are further slots of every token.
    if shared is not None:
        indices, weights = layer._with_shared(indices), torch.cat([weights, shared], 1)
        permutation = sort(indices, layer.experts + layer._shared_rows)
    # (3) Experts: permute, up GEMM + activation, down GEMM, combine.
    e = layer._experts(parameters)
    ops = checked(tokens, weights, indices, e, layer._main_grad_lists())
    rows = Permutation(*permutation, batch_invariant=layer.batch_invariant)
    y, preact = expert_layer.forward(ops, tokens, weights, rows, e, saves)
    saved = (tokens, saved_logits, preact, indices, weights, *permutation) if saves else (None,) * 8
    return (y, *saved, *output)


class RouterBackward:
    """The backward pass of the router's rule and of the shared experts' gate: :class:`expert_layer.RouterBackward`.

    Args:
        needs_shared: Whether the shared experts' weights need a gradient.
        by_row: Whether only the chosen experts' logits have a gradient: the up GEMM^T then adds dlogit[r] router[e] to
            each row of dx.
        of_losses: The gradients of a :class:`RouterOutput`'s logits and weights, or None.

    Attributes:
        dlogits: The gradient of the logits (T, experts), None without one of the weights.
        dshared: The gradient of the shared experts' weights, if needed.
    """

    dlogits: Tensor | None = None
    dshared: Tensor | None = None

    def __init__(
        self,
        layer: MoE,
        saved: Saved,
        router: Tensor,
        needs_shared: bool,
        by_row: bool,
        of_losses: Sequence[Tensor | None],
    ) -> None:
        self.layer, self.saved, self.router = layer, saved, router
        self.needs_shared, self.by_row, self.of_losses = needs_shared, by_row, of_losses

    def backward_weights(self, dweights: Tensor) -> tuple[Tensor, Tensor] | None:
        layer, saved, drouted, indices = self.layer, self.saved, dweights, self.saved.indices
        dlogits_of_losses, dweights_of_losses = self.of_losses
        if layer._shared_rows:
            drouted, dshared = (x.contiguous() for x in dweights.split([layer.top_k, layer._shared_rows], 1))
            self.dshared = dshared if self.needs_shared else None
            indices = indices[:, : layer.top_k].contiguous()
        if dweights_of_losses is not None:
            drouted = drouted + dweights_of_losses
        dlogit_of_row = dweights.new_empty(saved.gather_idx.numel(), 1, 1) if self.by_row else None
        rows = None if dlogit_of_row is None else (saved.scatter_idx, dlogit_of_row)
        rule = rule_of(layer.top_k, *layer._rule[:3])
        arguments = (drouted, saved.logits, indices, layer.experts, rule, layer._scaling_factor, rows)
        self.dlogits = logits_gradient(*arguments)
        if dlogits_of_losses is not None:
            self.dlogits += dlogits_of_losses
        return None if dlogit_of_row is None else (dlogit_of_row, layer._padded_router(self.router))


def _backward(
    layer: MoE,
    needs: expert_layer.NeedsGrad,
    needs_shared: bool,
    by_row: bool,
    into_preact: bool,
    dy: Tensor,
    *tensors: Any,
) -> Tensors:
    """The gradients of the logits, the shared experts' weights and the tokens, then those of the parameters.

    The gradient of the tokens is without the router's contribution unless ``by_row``. ``tensors``: the fields of
    ``Saved``, the router's weight, four parameters, ``main_grad`` of up and down, and the gradients of losses.
    ``into_preact``: as of :func:`expert_layer.backward`.
    """
    saved: Any = Saved(*tensors[:8])
    router, *rest = tensors[8:]
    parameters, main_grad, of_losses = rest[:4], rest[4:6], rest[6:]
    e = layer._experts(parameters)
    rows = (saved.offsets, saved.gather_idx, saved.scatter_idx)
    permutation = Permutation(*rows, batch_invariant=layer.batch_invariant)
    router_backward = RouterBackward(layer, saved, router, needs_shared, by_row, of_losses)
    up_main_grad, down_main_grad = ([] if x is None else [x] for x in main_grad)
    grads = expert_layer.backward(
        grouped_gemm_ops(saved.tokens, e),
        dy,
        saved.tokens,
        saved.preact,
        saved.indices,
        saved.weights,
        permutation,
        e,
        needs,
        (up_main_grad, down_main_grad),
        router=router_backward,
        into_preact=into_preact,
    )
    return router_backward.dlogits, router_backward.dshared, grads.x, *grads[2:]


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
        y, saved, routing = forward(layer, tokens, shared, router, parameters, True, return_routing)
        assert saved is not None
        ctx.layer, ctx.main_grad = layer, layer._main_grads()
        ctx.save_for_backward(*saved, router, *parameters)
        if routing is None:
            return y
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(routing.indices, routing.offsets)
        return y, *routing

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, tensors = ctx.layer, ctx.saved_tensors
        tokens, router, parameters = tensors[0], tensors[8], tensors[9:]
        _, _, needs_tokens, needs_shared, needs_router, *needs_parameters = ctx.needs_input_grad
        dy, *of_losses = gradients[0], *(gradients[1:3] or (None, None))
        dy = tokens.new_zeros(tokens.shape) if dy is None else aligned(dy)
        if ctx.main_grad is not None:
            torch.autograd.graph.increment_version(ctx.main_grad)
        needs_weights = needs_tokens or needs_shared or needs_router
        needs = expert_layer.NeedsGrad(needs_tokens, needs_weights, *needs_parameters)
        by_row = of_losses[0] is None and not rule_of(layer.top_k, *layer._rule[:3]).is_dense
        into_preact = may_overwrite(tensors[2])
        options = (needs, needs_shared, by_row, into_preact)
        function = functools.partial(_backward, layer, *options)
        main_grad = ctx.main_grad or (None, None)
        arguments, key = (dy, *tensors, *main_grad, *of_losses), _sequence_key(layer, tokens)
        results: Any = (
            function(*arguments)
            if key is None
            else layer._sequences((*options, *key), function, arguments, into_preact or ctx.main_grad is not None)
        )
        dlogits, dshared, dx, *grads = results
        drouter = dlogits.T @ tokens if needs_router and dlogits is not None else None
        if dx is not None and dlogits is not None and not by_row:
            dx.addmm_(dlogits, router)  # in place: dx is not shared
        if ctx.main_grad is not None:
            grads[:2] = dummy_grads(parameters[:2], needs_parameters[:2])
        return None, None, dx, dshared, drouter, *grads
