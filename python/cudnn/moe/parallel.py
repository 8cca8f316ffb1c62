"""Expert parallelism: dispatch tokens to the ranks of their experts, run the experts, combine the results.

Forward on each rank, between the steps of :mod:`cudnn.moe.layer`:

    (1) dispatch   each token is sent once to each rank that has one of its experts, in e4m3 if they read it so
    (2) sort       the received (token, k) slots of local experts, by expert
    (3) experts    up GEMM + GLU, down GEMM (``layer.forward`` without its combine)
    (4) combine    the weighted sum over a rank's experts is sent back, and summed over ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from cudnn.errors import make_error
from cudnn.moe import layer
from cudnn.moe.compile_ahead import layer_ops
from cudnn.moe.exchange import Exchange, Sent, check_all_ranks, size_of
from cudnn.moe.experts import Experts, Permutation, grouped_gemm_ops, is_list, shape_of
from cudnn.moe.main_grads import dummy_grads
from cudnn.moe.quantized_rows import QuantizedRows, Rows
from cudnn.moe.quantizing import quantized_rows
from cudnn.moe.routing import sort
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import may_overwrite, once_differentiable

_WHERE = "moe_mlp"

Sizes = tuple[int, int, int, torch.dtype]
"""Experts of all ranks, top_k, hidden size and dtype."""


@dataclass
class GroupState:
    """Layers that all ranks of a group have called, and their exchanges by sizes, device and time limit.

    Layers share the last exchange of a key. Earlier ones had too small buffers and are kept, because a CUDA graph may
    hold their addresses.
    """

    layers: set[Any] = field(default_factory=set)
    exchanges: dict[Any, list[Exchange]] = field(default_factory=dict)


_GROUPS: WeakKeyDictionary[Any, GroupState] = WeakKeyDictionary()
"""By process group, while it is alive."""


def _group_state(group: Any) -> Any:
    """The state of a process group; an exchange has a ``layers`` attribute too."""
    if isinstance(group, Exchange):
        return group
    state = _GROUPS.get(group)
    if state is None:
        for other in [each for each in _GROUPS if each not in distributed_c10d._world.pg_map]:
            del _GROUPS[other]  # destroyed, though functions of PyTorch may have it as an argument's default
        state = _GROUPS[group] = GroupState()
    return state


def ranks_of(where: str, group: Any) -> int:
    """The number of ranks of a layer's ``group``, a process group or an exchange.

    Raises:
        TypeError: it is neither.
    """
    return group.ranks if isinstance(group, Exchange) else size_of(where, group)


def check_same_layer(where: str, group: Any, config: str, sizes: Sizes, x: Tensor, time_limit: float) -> None:
    """Waits until all ranks call with the same ``config``; makes an exchange with room for their tokens.

    Raises:
        ValueError: the ranks' layers differ, or the caller's exchange has other sizes or another device.
        RuntimeError: a rank did not call within the limit.
    """
    if isinstance(group, Exchange):
        actual, wanted = (group.experts, group.top_k, group.hidden, group.dtype, group.device), (*sizes, x.device)
        if actual != wanted:
            allowed = f"one of {wanted}, as the layer has: experts, top_k, hidden size, type, device"
            raise make_error(ValueError, where, "group, an Exchange", actual, allowed)
        check_all_ranks(group.group, config, 0, group.time_limit, where)
        return
    max_tokens = max(1, *check_all_ranks(group, config, len(x), time_limit, where))
    exchanges = _group_state(group).exchanges.setdefault((sizes, x.device, time_limit), [])
    if not exchanges or (exchanges[-1].max_tokens < max_tokens and exchanges[-1].transport.reuses_buffers):
        options: dict[str, Any] = {"dtype": sizes[3], "device": x.device, "time_limit": time_limit}
        exchanges.append(Exchange(group, *sizes[:3], max_tokens=max_tokens, **options))


def exchange_of(group: Any, config: str, sizes: Sizes, x: Tensor, time_limit: float) -> Exchange:
    """The exchange of a layer over a group; the first call runs :func:`check_same_layer`."""
    state = _group_state(group)
    if (config, x.device, time_limit) not in state.layers:
        check_same_layer(_WHERE, group, config, sizes, x, time_limit)
        state.layers.add((config, x.device, time_limit))
    return state if isinstance(state, Exchange) else state.exchanges[sizes, x.device, time_limit][-1]


@dataclass(frozen=True)
class LocalExperts:
    """A rank's experts without the tensors that have a gradient."""

    num_tensors: int  # of up, and of down
    main_grad: tuple[list[Tensor], list[Tensor]]
    activation: str
    act_params: list[float]
    glu_layout: str
    fp8: str
    save_preact: bool
    batch_invariant: bool = False

    def experts(self, up_bias: Tensor | None, down_bias: Tensor | None, matrices: Any) -> Experts:
        """The experts of this rank."""
        up, down = list(matrices[: self.num_tensors]), list(matrices[self.num_tensors :])
        options = (self.activation, self.act_params, self.glu_layout, self.fp8, self.batch_invariant)
        return Experts(up, down, up_bias, down_bias, *options)


def needs_backward(x: Tensor, weights: Tensor, e: Experts) -> bool:
    """Whether autograd may call the backward pass."""
    tensors = (x, weights, *e.up, *e.down, e.up_bias, e.down_bias)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def expert_parallel(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    e: Experts,
    main_grad: tuple[list[Tensor], list[Tensor]],
    exchange: Exchange,
) -> Tensor:
    """The layer's output (T, H); ``e`` are the experts of this rank."""
    save_preact = needs_backward(x, weights, e)
    local_experts = LocalExperts(
        len(e.up), main_grad, e.activation, list(e.act_params), e.glu_layout, e.fp8, save_preact, e.batch_invariant
    )
    return _OverRanks.apply(x, weights, indices, exchange, local_experts, e.up_bias, e.down_bias, *e.up, *e.down)


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        indices: Tensor,
        exchange: Exchange,
        local_experts: LocalExperts,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        *matrices: Tensor,
    ) -> Tensor:
        transport, e = exchange.transport, local_experts.experts(up_bias, down_bias, matrices)
        # (1) Dispatch.
        fp8 = e.receives_fp8(local_experts.save_preact)
        tokens, local, weights, sent = transport.dispatch(sent_rows(x, fp8), indices, weights)
        # (2) Sort the received slots by expert.
        permutation = permutation_of(local, exchange, sent)
        permutation.batch_invariant = e.batch_invariant
        # (3) Experts.
        rows, preact = x.new_empty(0, x.shape[1]), x.new_empty(0)
        if permutation.rows:
            ops = layer_ops(x, e, bool(local_experts.main_grad[0]), indices.shape[1], True)
            arguments = (received_rows(tokens, fp8), weights, permutation, e, local_experts.save_preact)
            rows, preact = layer.forward(ops, *arguments, combine=False)
        if local_experts.save_preact:
            tokens = tokens.clone() if transport.reuses_buffers else tokens
            permutation_tensors = (permutation.offsets, permutation.gather_idx, permutation.scatter_idx)
            ctx.save_for_backward(tokens, preact, local, weights, *permutation_tensors, up_bias, down_bias, *matrices)
            ctx.exchange, ctx.local_experts, ctx.sent = exchange, local_experts, sent
        # (4) Combine.
        return transport.combine(rows, permutation.scatter_idx, weights, sent)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, preact, local, weights, *rest = ctx.saved_tensors
        offsets, gather_idx, scatter_idx, up_bias, down_bias, *matrices = rest
        transport, local_experts, sent = ctx.exchange.transport, ctx.local_experts, ctx.sent
        e = local_experts.experts(up_bias, down_bias, matrices)
        permutation = Permutation(offsets, gather_idx, scatter_idx, batch_invariant=e.batch_invariant)
        (d_out,) = gradients
        dy = transport.scatter(sent_rows(d_out, e.receives_fp8_gradients), sent)
        if down_bias is not None:  # its gradient is a GEMM over all rows, including those that were not received
            dy = dy.where((local >= 0).any(1, keepdim=True), 0.0)
        num_tensors, needs_matrices = local_experts.num_tensors, ctx.needs_input_grad[7:]
        needs_up, needs_down = any(needs_matrices[:num_tensors]), any(needs_matrices[num_tensors:])
        needs_grad = (True, True, needs_up, needs_down, *ctx.needs_input_grad[5:7])
        main_grad = local_experts.main_grad
        if permutation.rows:
            rows = received_rows(dy, e.receives_fp8_gradients), received_rows(tokens, e.receives_fp8(True))
            arguments = (*rows, preact, local, weights, permutation, e, needs_grad, main_grad)
            into_preact = may_overwrite(preact)
            grads = layer.backward(grouped_gemm_ops(d_out, e), *arguments, combine=False, into_preact=into_preact)
        else:
            grads = _zero_gradients(d_out, weights, e, needs_grad, main_grad)
        dx, dweights = transport.combine(grads.x, scatter_idx, None, sent, grads.weights)
        needed = (needs_matrices[:num_tensors], needs_matrices[num_tensors:])
        matrices = zip((grads.up, grads.down), (e.up, e.down), main_grad, needed, strict=True)
        dw_up, dw_down = (
            dummy_grads(like, needs) if buffers else unbind_experts(dw, like) for dw, like, buffers, needs in matrices
        )
        return dx, dweights, None, None, None, grads.up_bias, grads.down_bias, *dw_up, *dw_down


def sent_rows(x: Tensor, fp8: bool) -> Tensor:
    """The rows of x as they are sent, with ``fp8`` in e4m3."""
    return quantized_rows(aligned(x)).words if fp8 else x.contiguous()


def received_rows(received: Tensor, fp8: bool) -> Rows:
    """Received rows of :func:`sent_rows`."""
    return QuantizedRows(received) if fp8 else received


def permutation_of(local: Tensor, exchange: Exchange, sent: Sent) -> Permutation:
    """The slots of local experts, sorted by expert; at most ``sent.max_rows``."""
    offsets, gather_idx, scatter_idx = sort(local.contiguous(), exchange.local_experts)
    if sent.max_rows < gather_idx.numel() and exchange.transport.reuses_buffers:
        message = f"Exchange: max_rows={sent.max_rows} is less than the (token, k) slots of this rank's experts"
        torch.ops.aten._assert_async.msg(offsets[-1] <= sent.max_rows, message)
        offsets = offsets.clamp(max=sent.max_rows)  # no kernel writes out of bounds before the assertion fires
        scatter_idx = scatter_idx.where(scatter_idx < sent.max_rows, -1)
    return Permutation(offsets, gather_idx[: sent.max_rows], scatter_idx)


def _zero_gradients(
    like: Tensor, weights: Tensor, e: Experts, needs_grad: Any, main_grad: tuple[list[Tensor], list[Tensor]]
) -> layer.Gradients:
    """The gradients if no slot has an expert of this rank."""
    shapes, likes = gradient_shapes(like[:0], weights, e, needs_grad, main_grad), (like, weights, *[like] * 4)
    return layer.Gradients(*(None if s is None else x.new_zeros(s) for s, x in zip(shapes, likes, strict=True)))


def gradient_shapes(
    x: Tensor, weights: Tensor, e: Experts, needs_grad: Sequence[bool], main_grad: Sequence[Any]
) -> list[Any]:
    """The shapes of the gradients of x, weights, up, down and the biases; None if autograd does not need one, or if
    ``main_grad`` accumulates it.
    """
    up, down = e.up_shape, shape_of(e.down)
    dw_up = up if e.halves == 1 else (2, up[0], up[1] // 2, up[2])
    returned = (need and not buffers for need, buffers in zip(needs_grad[2:4], main_grad, strict=True))
    wanted = [*needs_grad[:2], *returned, *needs_grad[4:]]
    shapes = [x.shape, weights.shape, dw_up, down, up[:2], down[:2]]
    return [shape if want else None for shape, want in zip(shapes, wanted, strict=True)]


def unbind_experts(gradient: Tensor | None, like: Any) -> list[Tensor | None]:
    """The gradient of each tensor in the list ``like``."""
    if gradient is None:
        return [None] * len(like)
    if is_list(like):
        return list(gradient.flatten(0, -3).unbind(0))
    return [gradient] if gradient.ndim == 3 else list(gradient.unbind(0))
