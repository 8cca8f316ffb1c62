"""Routing: the experts and weights of each token (top-k), and the permutation that sorts tokens by expert.

On CUDA tensors one kernel sequence computes top-k, weights and a stable counting sort by expert.
"""

# No `from __future__ import annotations`: PyTorch reads the types.

import functools
import warnings
from typing import Any, NamedTuple

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, make_error
from cudnn.gemm.formats import wide
from cudnn.moe import reference
from cudnn.runtime import flops
from cudnn.runtime.registration import SMALL, custom_op
from cudnn.runtime.run import Kernel, architecture, has_kernel, kernel
from cudnn_kernels.moe.configuration import (
    MOST_CHOICES,
    MOST_EXPERTS,
    MOST_GROUPS,
    MOST_SUMMED,
    RouteConfiguration,
    RouteGradientConfiguration,
    Rule,
)

_ROUTE, _GRADIENT = "cudnn_kernels.moe.routing:Route", "cudnn_kernels.moe.routing:RouteGradient"
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCORES = ("softmax", "sigmoid")
_SCORES_IN_WORDS = " or ".join(map(repr, _SCORES))
_MOST_ROWS = 2**30
Maybe = torch.Tensor | None
Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Routing(NamedTuple):
    """T tokens with K experts each, as T * K rows sorted by expert; those of an expert are in the order of tokens.

    - ``indices`` int32 (T, K): the experts of a token.
    - ``weights`` float32 (T, K), differentiable; float64 for logits in float64.
    - ``offsets`` int32 (E,): where the rows of each expert end (an inclusive cumulative sum).
    - ``gather_idx`` int32 (T * K,): the token of each row.
    - ``scatter_idx`` int32 (T, K): the row of each (token, k) slot.

    ``token_of_row`` and ``row_of_choice`` are deprecated names of the last two.
    """

    indices: torch.Tensor
    weights: torch.Tensor
    offsets: torch.Tensor
    gather_idx: torch.Tensor
    scatter_idx: torch.Tensor

    @property
    def token_of_row(self) -> torch.Tensor:
        """Deprecated name of ``gather_idx``."""
        warnings.warn("Routing.token_of_row is deprecated: use gather_idx", DeprecationWarning, stacklevel=2)
        return self.gather_idx

    @property
    def row_of_choice(self) -> torch.Tensor:
        """Deprecated name of ``scatter_idx``."""
        warnings.warn("Routing.row_of_choice is deprecated: use scatter_idx", DeprecationWarning, stacklevel=2)
        return self.scatter_idx


class RouterOutput(NamedTuple):
    """The inputs of router losses: the second result of ``MoE(x, return_routing=True)``, without shared experts.

    - ``logits`` (T, E), differentiable; ``logits.softmax(-1)`` are the probabilities.
    - ``weights`` float32 (T, K), of the chosen experts, differentiable; float64 for logits in float64.
    - ``indices`` int32 (T, K): the chosen experts.
    - ``offsets`` int32 (E,): the inclusive cumulative sum of ``counts``.
    """

    logits: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    offsets: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        """int32 (E,): the number of tokens of each expert."""
        return self.offsets.diff(prepend=self.offsets.new_zeros(1))


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    pre_softmax: bool = True,
    renormalize: bool = False,
    bias: Maybe = None,
    n_group: int = 1,
    topk_group: int = 1,
    scaling_factor: float = 1.0,
) -> Routing:
    """Top-k routing: ``top_k`` experts for each token, and the tokens sorted by expert. The weights are differentiable.

    Experts are chosen by logit, the largest first. With a bias, by score + bias; if the softmax is over the chosen
    experts, by logit + bias. Of equal ones the lower index comes first; NaN is the largest. Scores and weights are
    computed in float32.

    On CUDA tensors it is one call of three kernels without host synchronization, so a CUDA graph can capture it; it is
    deterministic.

    Args:
        logits: (T, E), float32, bfloat16 or float16, on the CPU also float64, which is then the compute type;
            rows contiguous. T from 0, E from 1 to 1024.
        top_k: K, 1 to 16 experts for a token, at most E.
        score: "softmax" or "sigmoid".
        pre_softmax: True: the softmax is over all experts. False: over the chosen ones.
        renormalize: Divides the weights of a token by their sum. After a softmax over the chosen ones it has no effect.
        bias: float32 (E,), affects the choice, not the weights (DeepSeek-V3). It has no gradient.
        n_group: Groups of consecutive experts, 1 to 32. Only experts of the best ``topk_group`` groups are chosen. A
            group's score is its best expert's or, with a bias, the sum of its best two (DeepSeek-V3).
        topk_group: 1 to ``n_group``.
        scaling_factor: A factor of the weights, applied last.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a shape, type, stride or number that is not allowed.
    """
    check_tensors("route", logits=logits, bias=bias)
    for name, flag in (("pre_softmax", pre_softmax), ("renormalize", renormalize)):
        if type(flag) is not bool:
            raise make_error(TypeError, "route", name, repr(flag), "True or False")
    counts = (("top_k", top_k), ("n_group", n_group), ("topk_group", topk_group))
    top_k, n_group, topk_group = (whole("route", name, count) for name, count in counts)
    rule = (top_k, score, pre_softmax, renormalize, n_group, topk_group)
    factor = checked_number("route", "scaling_factor", scaling_factor)
    weights, indices, *sorted_, _ = moe_route(logits, bias, *rule, factor)
    return Routing(indices, weights, *sorted_)


def sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``offsets``, ``gather_idx`` and ``scatter_idx`` of a :class:`Routing`, for a custom router.

    An index outside of 0 to ``experts`` - 1, such as -1, drops its slot, which has no row and the ``scatter_idx`` -1.
    The rows from ``offsets[-1]`` on then have no slot, and their ``gather_idx`` is 0. A token may have an expert
    more than once.

    Args:
        indices: int32 (T, K), contiguous, K from 1 to 32.
        experts: E, 1 to 1024.

    Raises:
        TypeError: an argument of another Python type.
        ValueError: a shape, type, stride or number that is not allowed.
    """
    check_tensors("sort", indices=indices)
    return moe_sort(indices, whole("sort", "experts", experts))


def check_tensors(where: str, **tensors: Any) -> None:
    """Raises a ``TypeError`` for what is neither a tensor nor None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(where, name, tensor)


def whole(where: str, name: str, value: Any) -> int:
    """An integer. An ``int`` skips the check, which ``torch.compile`` cannot trace."""
    return value if type(value) is int else checked_number(where, name, value, integer=True)


def load_balance_loss(logits: torch.Tensor, routing: Routing | RouterOutput, score: str = "softmax") -> torch.Tensor:
    """E times the sum over experts of (fraction of all slots) x (mean probability): 1 if both are uniform.

    0 without tokens. W. Fedus et al.: Switch Transformers (2021). Probabilities are the softmax over experts or, for
    sigmoid scores, the scores divided by their sum (DeepSeek-V3). The gradient flows through probabilities, not through
    indices.

    Args:
        logits: (T, E), the arguments of :func:`route`.
        routing: The result of :func:`route` for them, or a :class:`RouterOutput`, whose ``logits`` these are.
        score: "softmax" or "sigmoid".

    Raises:
        TypeError: logits that are no tensor, or a routing of another type.
        ValueError: logits of another shape than were routed, or another score.
    """
    where = "load_balance_loss"
    check_tensor(where, "logits", logits)
    if not isinstance(routing, (Routing, RouterOutput)):
        raise make_error(TypeError, where, "routing", type(routing).__name__, "what cudnn.moe.route returned")
    if score not in _SCORES:
        _refuse(where, "score", repr(score), _SCORES_IN_WORDS)
    routed = (routing.indices.shape[0], *routing.offsets.shape)
    if logits.shape != routed:
        _refuse(where, "shape of logits", tuple(logits.shape), f"{routed}, as were routed")
    values = wide(logits)
    if not values.shape[0]:
        return values.sum()
    if score == "sigmoid":
        values = torch.nn.functional.logsigmoid(
            values
        )  # softmax of log(score) = score / sum, also if all scores underflow
    probabilities = values.softmax(-1)
    counts = routing.offsets.diff(prepend=routing.offsets.new_zeros(1))
    fractions = counts.to(values.dtype) / routing.indices.numel()
    return logits.shape[1] * (fractions * probabilities.mean(0)).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean of logsumexp(logits)^2, which keeps logits small; 0 without tokens. B. Zoph et al.: ST-MoE (2022)."""
    check_tensor("z_loss", "logits", logits)
    values = wide(logits)
    return values.logsumexp(-1).square().mean() if values.shape[0] else values.sum()


@torch.no_grad()
def update_correction_bias(
    bias: torch.Tensor, counts: torch.Tensor, rate: float = 1e-3, group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Adds ``rate * sign(mean(counts) - counts)`` to the bias in place: experts with few tokens get more.

    DeepSeek-V3's balancing without an auxiliary loss; the bias is ``e_score_correction_bias`` there. Call it once in an
    optimizer step, after the last backward pass.

    Args:
        bias: float32 (E,), the buffer ``correction`` of :class:`cudnn.nn.MoE`.
        counts: (E,), the tokens of each expert in the step: ``RouterOutput.counts``, summed over micro-batches.
        rate: The size of a change.
        group: A process group whose ranks' counts are added up: all ranks with different tokens. All of them call.

    Raises:
        ValueError: shapes that differ.
        TypeError: an argument that is no tensor.
    """
    where = "update_correction_bias"
    check_tensor(where, "bias", bias)
    check_tensor(where, "counts", counts)
    if bias.ndim != 1 or counts.shape != bias.shape:
        got, allowed = f"{tuple(counts.shape)} for a bias {tuple(bias.shape)}", "the shape (E,) of both"
        _refuse(where, "shape of counts", got, allowed)
    total = counts.to(torch.int64, copy=True)
    if group is not None:
        torch.distributed.all_reduce(total, group=group)
    # In integers: sign(mean - count) = sign(sum - E * count).
    bias.add_((total.sum() - len(total) * total).sign(), alpha=rate)


def _refuse(where: str, what: str, got: object, allowed: str, hint: str = "") -> None:
    raise make_error(ValueError, where, what, got, allowed, hint)


def _check(logits: torch.Tensor, bias: Maybe, rule: Rule) -> None:
    where = "route"
    if logits.ndim != 2 or not 0 < logits.shape[1] <= MOST_EXPERTS:
        _refuse(where, "shape of logits", tuple(logits.shape), f"(T, E), E from 1 to {MOST_EXPERTS}")
    experts = logits.shape[1]
    if logits.dtype not in _TYPES and (logits.dtype is not torch.float64 or architecture(logits)):
        allowed = f"{', '.join(map(str, _TYPES))}; on the CPU, not emulated, torch.float64 too"
        _refuse(where, "type of logits", logits.dtype, allowed)
    if logits.stride(1) != 1 and experts > 1:
        _refuse(where, "strides of logits", logits.stride(), "rows contiguous", "pass logits.contiguous()")
    check_rule(where, experts, rule, bias is not None)
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        got = f"{bias.dtype} of the shape {tuple(bias.shape)}, strides {bias.stride()}"
        _refuse(where, "bias", got, f"torch.float32 of the shape ({experts},), contiguous")
    if bias is not None and bias.device != logits.device:
        _refuse(where, "device of bias", bias.device, f"that of logits, {logits.device}")
    _check_rows(where, logits.shape[0], rule.top_k)


def check_rule(where: str, experts: int, rule: Rule, biased: bool) -> None:
    """Raises a ``ValueError`` for a rule that does not fit the number of experts."""
    if not 0 < rule.top_k <= min(MOST_CHOICES, experts):
        _refuse(where, "top_k", rule.top_k, f"1 to {min(MOST_CHOICES, experts)} of {experts} experts")
    if rule.score not in _SCORES:
        _refuse(where, "score", repr(rule.score), _SCORES_IN_WORDS)
    if not 0 < rule.n_group <= MOST_GROUPS or experts % rule.n_group:
        _refuse(where, "n_group", rule.n_group, f"1 to {MOST_GROUPS}, divisors of the {experts} experts")
    size = experts // rule.n_group
    if not 0 < rule.topk_group <= rule.n_group or rule.topk_group * size < rule.top_k:
        allowed = f"1 to {rule.n_group}, with at least {rule.top_k} experts in these groups of {size}"
        _refuse(where, "topk_group", rule.topk_group, allowed)
    if biased and rule.n_group > 1 and size < 2:
        _refuse(where, "n_group", rule.n_group, "groups of two experts or more, with a bias")


def _check_rows(where: str, tokens: int, top_k: int) -> None:
    if tokens * top_k > _MOST_ROWS:
        _refuse(where, "rows", tokens * top_k, f"at most {_MOST_ROWS}")


def _check_indices(indices: torch.Tensor, experts: int) -> None:
    where = "sort"
    if indices.ndim != 2 or not 0 < indices.shape[1] <= MOST_SUMMED:
        _refuse(where, "shape of indices", tuple(indices.shape), f"(T, K), K from 1 to {MOST_SUMMED}")
    if indices.dtype != torch.int32:
        _refuse(where, "type of indices", indices.dtype, "torch.int32", "pass indices.int()")
    if not indices.is_contiguous():
        _refuse(where, "strides of indices", indices.stride(), "contiguous", "pass indices.contiguous()")
    if not 0 < experts <= MOST_EXPERTS:
        _refuse(where, "experts", experts, f"1 to {MOST_EXPERTS}")
    _check_rows(where, *indices.shape)


@custom_op("moe_route", flops=flops.none, repeats=SMALL)
def moe_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    score: str,
    pre_softmax: bool,
    renormalize: bool,
    n_group: int,
    topk_group: int,
    scaling_factor: float,
) -> Six:
    """The fields of :class:`Routing`, weights first, and the chosen experts' logits: see :func:`routed`.

    Weights are first because PyTorch's ``opcheck`` adds up results in the dtype of the first.
    """
    rule = rule_of(top_k, score, pre_softmax, renormalize, n_group, topk_group)
    return routed(logits, bias, rule, scaling_factor)


def routed(logits: torch.Tensor, bias: Maybe, rule: Rule, scaling_factor: float) -> Six:
    """The results of :func:`moe_route`, without autograd: last, the logits of the chosen experts (T, K).

    They are without elements if the rule is dense (all logits have a gradient).
    """
    _check(logits, bias, rule)
    if not has_kernel(logits, "route"):
        indices = reference.top_k(logits, bias, rule)
        weights = reference.router_weights(logits, indices, rule, scaling_factor)
        chosen = logits.new_empty(0) if rule.is_dense else logits.gather(1, indices.long())
        return weights, indices, *reference.sort(indices, logits.shape[1]), chosen
    tokens, experts = logits.shape
    indices = logits.new_empty(tokens, rule.top_k, dtype=torch.int32)
    weights = torch.empty_like(indices, dtype=torch.float32)
    chosen = logits.new_empty(_chosen_shape(indices, rule))
    scored = [x for x in (logits, bias, weights, None if rule.is_dense else chosen) if x is not None]
    route_kernel = kernel(_ROUTE, RouteConfiguration, experts, rule.top_k, rule, logits.dtype, bias is not None)
    return weights, indices, *_sorted(route_kernel, indices, (*scored, scaling_factor)), chosen


def _chosen_shape(indices: torch.Tensor, rule: Rule) -> tuple[int, ...]:
    """The shape of the chosen experts' logits."""
    return (0,) if rule.is_dense else tuple(indices.shape)


@functools.lru_cache(maxsize=None, typed=True)
def rule_of(*fields: Any) -> Rule:
    """A cached Rule. ``typed``: 2.0 is not 2, nor True 1."""
    return Rule(*fields)


def _sorted(
    route_kernel: Kernel, indices: torch.Tensor, scored: tuple[Any, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets, gather_idx and scatter_idx from the kernels, which also write ``indices`` if there are logits."""
    tokens, experts = indices.shape[0], route_kernel.configuration.experts
    offsets, gather_idx, scatter_idx = results = _empty(indices, experts)
    if not indices.numel():
        offsets.zero_()
        return results
    counts = indices.new_empty(route_kernel.configuration.blocks(tokens) + 1, experts)
    route_kernel(*scored, indices, offsets, gather_idx, scatter_idx, counts)
    return results


@moe_route.register_fake
def _(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *rest: Any) -> Six:
    *fields, _ = rest  # and scaling_factor
    rule = Rule(top_k, *fields)
    _check(logits, bias, rule)
    indices = logits.new_empty(logits.shape[0], top_k, dtype=torch.int32)
    weights, chosen = (
        wide(torch.empty_like(indices, dtype=logits.dtype)),
        logits.new_empty(_chosen_shape(indices, rule)),
    )
    return weights, indices, *_empty(indices, logits.shape[1]), chosen


def _empty(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets, gather_idx and scatter_idx, not initialised."""
    return indices.new_empty(experts), indices.new_empty(indices.numel()), torch.empty_like(indices)


@custom_op("moe_route_bwd", flops=flops.none, repeats=SMALL)
def moe_route_bwd(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    experts: int,
    score: str,
    pre_softmax: bool,
    renormalize: bool,
    scaling_factor: float,
) -> torch.Tensor:
    """The gradient of logits from that of the weights: see :func:`logits_gradient`."""
    rule = rule_of(indices.shape[1], score, pre_softmax, renormalize)
    return logits_gradient(gradient, logits, indices, experts, rule, scaling_factor)


def logits_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    experts: int,
    rule: Rule,
    scaling_factor: float,
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The gradient of the logits (T, E) from that of the weights (T, K), in the dtype of ``logits``.

    Args:
        logits: All experts', (T, E), if the rule is dense, else the chosen ones', (T, K).
        rule: Its groups have no effect.
        rows: ``scatter_idx`` (T, K or more), whose further columns are of shared experts, and memory (R, 1, 1) for the
            gradient of each row's logit, 0 for a shared expert; float32, or float64 for logits in float64.
    """
    if not has_kernel(logits, "route"):
        return reference.logits_gradient(gradient, logits, indices, experts, rule, scaling_factor, rows)
    d_logits = logits.new_empty(logits.shape[0], experts)
    if logits.numel():
        slots = 0 if rows is None else rows[0].shape[1]
        launch = kernel(_GRADIENT, RouteGradientConfiguration, experts, rule, logits.dtype, slots)
        launch(gradient, logits, indices, d_logits, *(rows or ()), scaling_factor)
    return d_logits


moe_route_bwd.register_fake(lambda gradient, logits, indices, experts, *_: logits.new_empty(logits.shape[0], experts))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, chosen = inputs[0], output[5]
    ctx.save_for_backward(chosen if chosen.ndim > 1 else logits, output[1])
    ctx.mark_non_differentiable(chosen)
    ctx.options = (logits.shape[1], *inputs[3:6], inputs[8])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
    (logits, indices), gradient = ctx.saved_tensors, gradients[0]
    if gradient is None:
        return (None,) * 9
    gradient = gradient.contiguous()
    return moe_route_bwd(gradient, logits, indices, *ctx.options), *[None] * 8


moe_route.register_autograd(_backward, setup_context=_setup)


@custom_op("moe_sort", flops=flops.none, repeats=SMALL)
def moe_sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See :func:`sort`."""
    _check_indices(indices, experts)
    if not has_kernel(indices, "sort"):
        return reference.sort(indices, experts)
    return _sorted(kernel(_ROUTE, RouteConfiguration, experts, indices.shape[1]), indices)


@moe_sort.register_fake
def _(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_indices(indices, experts)
    return _empty(indices, experts)
