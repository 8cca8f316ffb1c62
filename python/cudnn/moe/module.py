"""A mixture of experts as a module: router, experts, shared experts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, refused
from cudnn.fused import kinds
from cudnn.fused.gated import LAYOUTS
from cudnn.gemm.formats import wide
from cudnn.moe import layer as passes
from cudnn.moe.exchange import said
from cudnn.moe.experts import ACTIVATIONS, GATED, NUMBERS, Experts, Products, Rows
from cudnn.moe.operator import checked, moe_mlp, tokens_of
from cudnn.moe.parallel import agreed, ranks_of
from cudnn.moe.routing import Routing, check_rule, logits_gradient, route, routed, rule_of, sort
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import autocast_type, is_seen, once
from cudnn_kernels.moe.configuration import MOST_EXPERTS, MOST_SUMMED

_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_RULE = ("score", "pre_softmax", "renormalize", "n_group", "topk_group")


class _Kept(NamedTuple):
    """What the backward pass needs. ``logits`` are those of all experts, or of the chosen ones where they suffice."""

    tokens: Tensor
    logits: Tensor
    hidden: Tensor
    indices: Tensor
    weights: Tensor
    offsets: Tensor
    gather_idx: Tensor
    scatter_idx: Tensor


class _RouterBackward:
    """The backward pass of the router and of shared experts' weights: see :class:`cudnn.moe.layer.RouterBackward`.

    Where only the logits of chosen experts have a gradient, a row of a choice gets its logit's, times the router's
    weight for the expert; else the router's product adds its part at last.

    Attributes:
        by_shared, by_weight: The gradients of shared experts' weights and of the router's weight, where they are asked
            for.
    """

    by_logits: Tensor
    by_shared: Tensor | None = None
    by_weight: Tensor | None = None

    def __init__(self, layer: MoE, kept: _Kept, weight: Tensor, of_shared: bool, of_weight: bool) -> None:
        self.layer, self.kept, self.weight, self.of_shared, self.of_weight = layer, kept, weight, of_shared, of_weight

    def of_weights(self, by_weights: Tensor) -> tuple[Tensor, Tensor] | None:
        layer, by_chosen = self.layer, by_weights
        if self.of_shared:
            by_chosen, self.by_shared = (
                x.contiguous() for x in by_chosen.split([layer.top_k, layer.shared_experts], 1)
            )
        elif layer.shared_experts:
            by_chosen = by_chosen[:, : layer.top_k].contiguous()
        self.by_logits, of_rows = layer._by_logits(by_chosen, self.kept)
        self.by_weight = self.by_logits.T @ self.kept.tokens if self.of_weight else None
        return None if of_rows is None else (of_rows, layer._with_zeros(self.weight))

    def add_to(self, by_x: Tensor) -> None:
        by_x.addmm_(self.by_logits, self.weight)  # nobody else has this gradient


class _Layer(torch.autograd.Function):
    """The layer as one node of autograd, which takes the host less time than one for each operator would."""

    @staticmethod
    def forward(
        ctx: Any, layer: MoE, tokens: Tensor, shared: Tensor | None, router: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        y, kept, ctx.kind = layer._computed(tokens, shared, router, parameters, True)
        ctx.layer, ctx.sums = layer, layer._sums()
        ctx.save_for_backward(*kept, router, *parameters)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, layer, sums = ctx.saved_tensors, ctx.layer, ctx.sums
        kept, (router, *parameters) = _Kept(*saved[:8]), saved[8:]
        _, of_tokens, of_shared, of_router, *rest = ctx.needs_input_grad
        for part in sums:
            torch.autograd.graph.increment_version(part)
        e, rows = layer._experts(parameters), Rows(kept.offsets, kept.gather_idx, kept.scatter_idx)
        needs = passes.Needs(of_tokens, of_tokens or of_shared or of_router, *rest)
        its = _RouterBackward(layer, kept, router, of_shared, of_router)
        given = (kept.hidden, kept.indices, kept.weights, rows, e, needs, sums)
        found = passes.backward(ctx.kind, aligned(gradients[0]), kept.tokens, *given, router=its)
        return None, found.x, its.by_shared, its.by_weight, *found[2:]


class _Router(torch.nn.Linear):
    """A linear layer that says what it takes. One of float32 takes tokens of 16 bits too."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.check(tokens)
        return super().forward(tokens if autocast_type(tokens) else tokens.to(self.weight.dtype))

    def check(self, tokens: Tensor) -> None:
        """Raises for tokens of another type or size."""
        weight, types = self.weight, [self.weight.dtype]
        types += [torch.bfloat16, torch.float16] * (weight.dtype is torch.float32)
        fits = tokens.dtype in types or autocast_type(tokens) is not None
        if not fits or tokens.shape[-1] != weight.shape[1]:
            got = f"{tokens.dtype} [..., {tokens.shape[-1]}]"
            allowed = f"{' or '.join(map(str, types))} [..., {weight.shape[1]}]"
            cure = "" if fits else "use x.to(layer.up.dtype), or torch.autocast"
            raise refused(ValueError, "MoE", "x", got, allowed, cure)

    @property
    def is_altered(self) -> bool:
        """Whether someone looks at its calls or their gradients, or has given it a bias or a ``forward``."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        given = self.bias is not None or "forward" in vars(self)
        return any(hooks) or given or bool(_has_any_global_hook())


class MoE(torch.nn.Module):
    """A layer of experts: each token goes through ``top_k`` of them, chosen and weighted by a router.

    The router is a linear layer and :func:`cudnn.moe.route`, the experts are :func:`cudnn.ops.moe_mlp`. Shared experts,
    of the same size, see every token with the weight 1 or, with ``shared_gate``, ``sigmoid(gate(x))``; S of them are
    one of S times the intermediate size.

    It has these parameters:

        - ``router.weight`` (experts, hidden), ``shared_gate.weight`` (1, hidden). After ``layer.router.float()``,
          logits are computed in float32, except under ``torch.autocast``.
        - ``up`` (experts + shared_experts, N, hidden) with N = 2 intermediate or, for "srelu", intermediate. Of every
          64 rows of a gated activation, the first 32 are gates: :meth:`load_gate_up` copies weights in halves. With
          ``glu_layout="concatenated"``, the first half are gates.
        - ``down`` (experts + shared_experts, hidden, intermediate).
        - ``up_bias``, ``down_bias`` with ``bias``.

    The buffer ``correction``, float32 (experts,), with ``correction_bias``, is added to the scores that choose experts,
    not to weights. It stays float32 in a module that gets another type.

    Args:
        hidden, intermediate: Sizes, multiples of 8 and of 32.
        experts, top_k: How many there are, up to 1024 with shared ones, and how many a token sees, up to 16.
        activation, glu_layout: of :func:`cudnn.ops.moe_mlp`.
        bias: The experts have biases.
        shared_experts, shared_gate: See above.
        correction_bias: See above.
        fp8: of :func:`cudnn.ops.moe_mlp`: the experts' forward products are of e4m3.
        into_main_grad: The backward pass adds the gradients of ``up`` and ``down`` to ``up.main_grad`` and
            ``down.main_grad``, float32, as Megatron's optimizers have them, and gives none to autograd.
        group, time_limit: of :func:`cudnn.ops.moe_mlp`: ``experts`` are those of all ranks, of which each has its share
            in ``up`` and ``down``; gradients of the router are this rank's. Not with shared experts.
        dtype: bfloat16 or float16; float32 for calls under ``torch.autocast`` and, as float64, for the reference on the
            CPU. None: PyTorch's default type, as in its own layers.
        score, pre_softmax, renormalize, n_group, topk_group, scaling_factor: of :func:`cudnn.moe.route`.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".

    Raises:
        ValueError: an activation or size that is not allowed.
        TypeError: an argument of another Python type, such as a group that is none.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        glu_layout: str = "interleaved",
        bias: bool = False,
        fp8: bool = False,
        shared_experts: int = 0,
        shared_gate: bool = False,
        correction_bias: bool = False,
        into_main_grad: bool = False,
        score: str = "softmax",
        pre_softmax: bool = True,
        renormalize: bool = False,
        n_group: int = 1,
        topk_group: int = 1,
        scaling_factor: float = 1.0,
        linear_offset: float = 1.0,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        group: Any = None,
        time_limit: float = 600.0,
        device: Any = None,
        dtype: torch.dtype | None = torch.bfloat16,
    ) -> None:
        given = kinds.checked("MoE", MoE.__init__, locals())
        counts = ("hidden", "intermediate", "experts", "top_k", "shared_experts", "n_group", "topk_group")
        hidden, intermediate, experts, top_k, shared_experts, n_group, topk_group = (given[name] for name in counts)
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _TYPES:
            raise refused(ValueError, "MoE", "dtype", dtype, ", ".join(map(str, _TYPES)))
        if activation not in ACTIVATIONS:
            raise refused(ValueError, "MoE", "activation", repr(activation), " or ".join(map(repr, ACTIVATIONS)))
        for name, size, step in (("hidden", hidden, 8), ("intermediate", intermediate, 32), ("experts", experts, 1)):
            if size < 1 or size % step:
                allowed = f"a multiple of {step}" if step > 1 else "1 or more"
                cure = f"take {-(-max(size, 1) // step) * step} and fill what is new of the weights with zeros"
                raise refused(ValueError, "MoE", name, size, allowed, cure if step > 1 else "")
        if glu_layout not in LAYOUTS or (glu_layout != LAYOUTS[0] and activation not in GATED):
            got = f"{glu_layout!r} with {activation!r}"
            raise refused(ValueError, "MoE", "glu_layout", got, f"{LAYOUTS[0]!r}, or {LAYOUTS[1]!r} for gates")
        if fp8 and (activation not in GATED or glu_layout != LAYOUTS[0] or hidden % 128 or intermediate % 128):
            got = f"{activation!r}, {glu_layout!r}, hidden={hidden}, intermediate={intermediate}"
            raise refused(ValueError, "MoE", "fp8", got, "gates, interleaved, multiples of 128", "leave fp8 out")
        if shared_experts < 0 or (shared_gate and not shared_experts):
            got = f"{shared_experts}{', with shared_gate' * shared_gate}"
            raise refused(ValueError, "MoE", "shared_experts", got, "0 or more, and with shared_gate 1 or more")
        rule = rule_of(top_k, score, pre_softmax, renormalize, n_group, topk_group)
        check_rule("MoE", experts, rule, correction_bias)
        if top_k + shared_experts > MOST_SUMMED or experts + shared_experts > MOST_EXPERTS:
            got = f"{experts} and {shared_experts} shared ones, top_k {top_k}"
            allowed = f"{MOST_EXPERTS} with shared ones, of which a token sees {MOST_SUMMED} at most"
            cure = "one shared expert of S times the size does what S do: make it a layer of its own"
            raise refused(ValueError, "MoE", "experts", got, allowed, cure if shared_experts else "")
        self.experts, self.top_k, self.shared_experts, self.activation = experts, top_k, shared_experts, activation
        self.glu_layout, self.fp8, self.into_main_grad = glu_layout, fp8, into_main_grad
        self._rule = (score, pre_softmax, renormalize, n_group, topk_group)
        self._scaling_factor = checked_number("MoE", "scaling_factor", scaling_factor)
        numbers = (linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min)
        named = zip(NUMBERS, numbers, strict=True)
        self._numbers = {name: checked_number("MoE", name, x, limit="clamp" in name) for name, x in named}
        made = {"device": device, "dtype": dtype}
        ranks = 1 if group is None else ranks_of("MoE", group)
        if experts % ranks or (group is not None and shared_experts):
            got = f"{experts} experts and {shared_experts} shared ones on {ranks} ranks"
            allowed = "as many experts on each rank, and no shared ones with a group"
            raise refused(ValueError, "MoE", "experts", got, allowed, "make the shared experts a layer of their own")
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
        correction = torch.zeros(experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction", correction)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the experts' parameters as those of ``torch.nn.Linear`` are; ``correction`` is 0 then."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, -bound, bound)
        if self.correction is not None:
            self.correction.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A layer with parameters of its own and the same group."""
        memo[id(self._ranks["group"])] = self._ranks["group"]
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        """What ``to``, ``half`` and the like do."""
        before = self.correction
        super()._apply(fn, recurse)
        if self.correction is not None and before is not None and self.correction.dtype is not before.dtype:
            self.correction = before.to(self.correction.device)
        return self

    def load_gate_up(self, gate_up: Tensor) -> None:
        """Copies weights (experts + shared_experts, 2 intermediate, hidden) into ``up``: halves, gates first."""
        check_tensor("MoE.load_gate_up", "gate_up", gate_up)
        if self.activation not in GATED or gate_up.shape != self.up.shape:
            got = f"{tuple(gate_up.shape)}, for the activation {self.activation!r}"
            raise refused(ValueError, "MoE.load_gate_up", "gate_up", got, f"{tuple(self.up.shape)}, of a gated one")
        if self.glu_layout == "interleaved":
            gate_up = gate_up.detach().unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)
        with torch.no_grad():
            self.up.copy_(gate_up)

    def route(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The router's logits (T, experts) and its choice, without shared experts: for a loss that balances, say."""
        logits = self.router(tokens_of("MoE", x))
        rule: dict[str, Any] = dict(zip(_RULE, self._rule, strict=True))
        return logits, route(logits, self.top_k, bias=self.correction, scaling_factor=self._scaling_factor, **rule)

    def _shared(self, tokens: Tensor) -> Tensor:
        """The shared experts' weights (T, shared_experts)."""
        weight = wide(tokens.new_ones(tokens.shape[0], self.shared_experts))
        return weight if self.shared_gate is None else weight * wide(self.shared_gate(tokens)).sigmoid()

    def _with_shared(self, indices: Tensor) -> Tensor:
        """The shared experts as further choices of every token."""
        shared = torch.arange(self.experts, len(self.up), dtype=torch.int32, device=indices.device)
        return torch.cat([indices, shared.expand(indices.shape[0], -1)], 1)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """``[..., hidden]`` of the same shape. ``routing``: what :meth:`route` returned for x, if it was called."""
        tokens = tokens_of("MoE", x)
        if not self._agreed:
            self._agree(tokens)
        if self.into_main_grad and torch.is_grad_enabled() and self._main_grads() is None:
            cure = "set both, or call the layer under torch.no_grad()"
            raise refused(ValueError, "MoE", "main_grad of up and down", None, "float32 tensors of their shapes", cure)
        parameters = (self.up, self.down, self.up_bias, self.down_bias)
        if routing is None and self._is_unseen(tokens, parameters):
            self.router.check(tokens)
            shared, weight = self._shared(tokens) if self.shared_experts else None, self.router.weight
            given = (tokens, shared, weight, *parameters)
            if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
                y = _Layer.apply(self, *given)
            else:
                y, *_ = self._computed(tokens, shared, weight, parameters, False)
            return y if x.ndim == 2 else y.view(x.shape)
        if routing is None:
            _, routing = self.route(tokens)
        if self.shared_experts:
            indices = self._with_shared(routing.indices)
            weights = torch.cat([routing.weights, self._shared(tokens)], 1)
            routing = Routing(indices, weights, *sort(indices, len(self.up)))
        return moe_mlp(
            x,
            routing,
            *parameters,
            activation=self.activation,
            glu_layout=self.glu_layout,
            fp8=self.fp8,
            main_grads=self._main_grads(),
            **self._numbers,
            **self._ranks,
        )

    def _is_unseen(self, tokens: Tensor, parameters: Sequence[Tensor | None]) -> bool:
        """Whether nobody has to see the operators that a call consists of."""
        router, own_choice = self.router, type(self).route is not MoE.route
        if own_choice or self._ranks["group"] is not None or not tokens.shape[0]:
            return False
        if type(router) is not _Router or router.is_altered or router.weight.dtype is not self.up.dtype:
            return False
        return not is_seen([t for t in (tokens, router.weight, *parameters) if t is not None], True)

    def _computed(
        self, tokens: Tensor, shared: Tensor | None, router: Tensor, parameters: Sequence[Any], keeps: bool
    ) -> tuple[Tensor, _Kept, Products]:
        """The result, what the backward pass needs, and the products."""
        logits, tokens = torch.nn.functional.linear(tokens, router), aligned(tokens)
        rule = rule_of(self.top_k, *self._rule)
        weights, indices, *sorted_, chosen = routed(logits, self.correction, rule, self._scaling_factor)
        kept = tokens, logits if keeps and rule.is_dense else chosen
        del logits  # where they are not kept, their memory is free for the experts
        if shared is not None:
            indices, weights = self._with_shared(indices), torch.cat([weights, shared], 1)
            sorted_ = sort(indices, len(self.up))
        e, rows = self._experts(parameters), Rows(*sorted_)
        kind = checked(tokens, weights, indices, e, self._sums())
        y, hidden = passes.forward(kind, tokens, weights, rows, e, keeps)
        return y, _Kept(*kept, hidden, indices, weights, *sorted_), kind

    def _by_logits(self, by_weights: Tensor, kept: _Kept) -> tuple[Tensor, Tensor | None]:
        """The gradient of the logits, from that of the chosen experts' weights; and of each row's, (R, 1, 1), where
        only these have one.
        """
        indices = kept.indices if not self.shared_experts else kept.indices[:, : self.top_k].contiguous()
        rule = rule_of(self.top_k, *self._rule[:3])
        of_rows = None if rule.is_dense else by_weights.new_empty(kept.gather_idx.numel(), 1, 1)
        rows = None if of_rows is None else (kept.scatter_idx, of_rows)
        given = (by_weights, kept.logits, indices, self.experts, rule, self._scaling_factor, rows)
        return logits_gradient(*given), of_rows

    def _with_zeros(self, router: Tensor) -> Tensor:
        """The router's weight, contiguous, with rows of zeros for shared experts."""
        shared = self.shared_experts
        return torch.nn.functional.pad(router, (0, 0, 0, shared)) if shared else router.contiguous()

    def _experts(self, parameters: Sequence[Any]) -> Experts:
        up, down, up_bias, down_bias = parameters
        options = (self.activation, tuple(self._numbers.values()), self.glu_layout, self.fp8)
        return Experts([up], [down], up_bias, down_bias, *options)

    def _main_grads(self) -> tuple[Tensor, Tensor] | None:
        up, down = (getattr(w, "main_grad", None) if self.into_main_grad else None for w in (self.up, self.down))
        return None if up is None or down is None else (up, down)

    def _sums(self) -> tuple[list[Tensor], list[Tensor]]:
        """What the gradients of up and down are added to, if they are."""
        both = self._main_grads()
        return ([], []) if both is None else ([both[0]], [both[1]])

    @torch.compiler.disable(reason="ranks compare their layers")
    def _agree(self, tokens: Tensor) -> None:
        """At the first call all ranks say what their layer is: see the operator's errors."""
        words = said(
            hidden=self.up.shape[2],
            intermediate=self.down.shape[2],
            experts=self.experts,
            top_k=self.top_k,
            dtype=self.up.dtype,
            activation=self.activation,
            glu_layout=self.glu_layout,
            fp8=self.fp8,
            **self._numbers,
            bias=self.up_bias is not None,
            correction_bias=self.correction is not None,
            scaling_factor=self._scaling_factor,
            **dict(zip(_RULE, self._rule, strict=True)),
        )
        sizes = (self.experts, self.top_k, tokens.shape[-1], autocast_type(tokens) or self.up.dtype)
        agreed("MoE", words=words, sizes=sizes, x=tokens, **self._ranks)
        self._agreed = True

    def extra_repr(self) -> str:
        sizes = f"{self.up.shape[2]}, {self.down.shape[2]}, experts={self.experts}, top_k={self.top_k}"
        shared = f", shared_experts={self.shared_experts}" if self.shared_experts else ""
        return f"{sizes}{shared}, {self.activation}{', fp8' * self.fp8}"
