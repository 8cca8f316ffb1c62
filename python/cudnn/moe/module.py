"""A mixture of experts as a module: router, experts, shared experts.

Forward: router GEMM, top-k and sort (:func:`cudnn.moe.routing.routed`), then the experts (:mod:`cudnn.moe.layer`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, make_error
from cudnn.fused import argument_types
from cudnn.fused.gated import LAYOUTS
from cudnn.fused.host import FusedAPI
from cudnn.gemm.formats import wide
from cudnn.moe import compile_ahead
from cudnn.moe import layer as expert_layer
from cudnn.moe.exchange import describe_config
from cudnn.moe.experts import ACT_PARAMS, ACTIVATIONS, GATED, Experts, GroupedGemmOps, Permutation
from cudnn.moe.operator import checked, moe_mlp, tokens_of
from cudnn.moe.parallel import check_same_layer, ranks_of
from cudnn.moe.routing import Routing, check_rule, logits_gradient, route, routed, rule_of, sort
from cudnn.runtime import launch
from cudnn.runtime.kernels import CompileAhead, compile_all
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import autocast_type, needs_dispatch, once_differentiable
from cudnn_kernels.moe.configuration import MOST_EXPERTS, MOST_SUMMED

_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_RULE = ("score", "pre_softmax", "renormalize", "n_group", "topk_group")


class _Saved(NamedTuple):
    """Tensors saved for backward. ``logits``: all experts', or only the chosen ones' if these suffice."""

    tokens: Tensor
    logits: Tensor
    preact: Tensor
    indices: Tensor
    weights: Tensor
    offsets: Tensor
    gather_idx: Tensor
    scatter_idx: Tensor


class _RouterBackward:
    """The backward pass of the router and of the shared experts' gate: a :class:`cudnn.moe.layer.RouterBackward`.

    If only the chosen experts' logits have a gradient, the up GEMM^T adds dlogit[r] router[e] to each row of dx; else
    :meth:`add_dx` adds the router's GEMM at the end.

    Attributes:
        dshared, drouter: The gradients of the shared experts' weights and of the router's weight, if needed.
    """

    dlogits: Tensor
    dshared: Tensor | None = None
    drouter: Tensor | None = None

    def __init__(self, layer: MoE, saved: _Saved, router: Tensor, needs_shared: bool, needs_router: bool) -> None:
        self.layer, self.saved, self.router = layer, saved, router
        self.needs_shared, self.needs_router = needs_shared, needs_router

    def backward_weights(self, dweights: Tensor) -> tuple[Tensor, Tensor] | None:
        layer, drouted = self.layer, dweights
        if self.needs_shared:
            drouted, self.dshared = (x.contiguous() for x in dweights.split([layer.top_k, layer.shared_experts], 1))
        elif layer.shared_experts:
            drouted = dweights[:, : layer.top_k].contiguous()
        self.dlogits, dlogit_of_row = layer._dlogits(drouted, self.saved)
        self.drouter = self.dlogits.T @ self.saved.tokens if self.needs_router else None
        return None if dlogit_of_row is None else (dlogit_of_row, layer._padded_router(self.router))

    def add_dx(self, dx: Tensor) -> None:
        dx.addmm_(self.dlogits, self.router)  # in place: dx is not shared


class _Layer(torch.autograd.Function):
    """The whole layer as one autograd node, which takes less host time than one node per operator."""

    @staticmethod
    def forward(
        ctx: Any, layer: MoE, tokens: Tensor, shared: Tensor | None, router: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        y, saved, ctx.ops = layer._forward(tokens, shared, router, parameters, True)
        ctx.layer, ctx.main_grad = layer, layer._main_grad_lists()
        ctx.save_for_backward(*saved, router, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        layer, main_grad = ctx.layer, ctx.main_grad
        tensors = ctx.saved_tensors
        saved, (router, *parameters) = _Saved(*tensors[:8]), tensors[8:]
        _, needs_tokens, needs_shared, needs_router, *needs_parameters = ctx.needs_input_grad
        for buffers in main_grad:
            torch.autograd.graph.increment_version(buffers)
        e = layer._experts(parameters)
        permutation = Permutation(saved.offsets, saved.gather_idx, saved.scatter_idx)
        needs_weights = needs_tokens or needs_shared or needs_router
        needs_grad = expert_layer.NeedsGrad(needs_tokens, needs_weights, *needs_parameters)
        router_backward = _RouterBackward(layer, saved, router, needs_shared, needs_router)
        arguments = (saved.preact, saved.indices, saved.weights, permutation, e, needs_grad, main_grad)
        dy = aligned(gradients[0])
        grads = expert_layer.backward(ctx.ops, dy, saved.tokens, *arguments, router=router_backward)
        return None, grads.x, router_backward.dshared, router_backward.drouter, *grads[2:]


class _Router(torch.nn.Linear):
    """A linear layer that checks its input. In float32 it also takes bfloat16 and float16 tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        self.check(tokens)
        return super().forward(tokens if autocast_type(tokens) else tokens.to(self.weight.dtype))

    def check(self, tokens: Tensor) -> None:
        """Raises a ValueError for tokens of another dtype or size."""
        weight, types = self.weight, [self.weight.dtype]
        types += [torch.bfloat16, torch.float16] * (weight.dtype is torch.float32)
        fits = tokens.dtype in types or autocast_type(tokens) is not None
        if not fits or tokens.shape[-1] != weight.shape[1]:
            got = f"{tokens.dtype} [..., {tokens.shape[-1]}]"
            allowed = f"{' or '.join(map(str, types))} [..., {weight.shape[1]}]"
            hint = "" if fits else "use x.to(layer.up.dtype), or torch.autocast"
            raise make_error(ValueError, "MoE", "x", got, allowed, hint)

    @property
    def is_customized(self) -> bool:
        """Whether the module has hooks, a bias, or another ``forward``."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks)
        overridden = self.bias is not None or "forward" in vars(self)
        return any(hooks) or overridden or bool(_has_any_global_hook())


class MoE(torch.nn.Module):
    """A mixture-of-experts layer: a router sends each token to ``top_k`` experts and weights their outputs.

    The router is a linear layer and :func:`cudnn.moe.route`, the experts are :func:`cudnn.ops.moe_mlp`. Shared experts,
    of the same size, process every token with the weight 1 or, with ``shared_gate``, ``sigmoid(gate(x))``; S of them
    compute the same as one of S times the intermediate size.

    Parameters of the module:

        - ``router.weight`` (experts, hidden), ``shared_gate.weight`` (1, hidden). After ``layer.router.float()``,
          logits are computed in float32, except under ``torch.autocast``.
        - ``up`` (experts + shared_experts, N, hidden) with N = 2 intermediate or, for "srelu", intermediate. Of every
          64 rows of a gated activation, the first 32 are gates: :meth:`load_gate_up` copies concatenated weights. With
          ``glu_layout="concatenated"``, the first half of the rows are gates.
        - ``down`` (experts + shared_experts, hidden, intermediate).
        - ``up_bias``, ``down_bias`` with ``bias``.

    The buffer ``correction``, float32 (experts,), with ``correction_bias``, is added to the scores that choose experts,
    not to weights. It stays float32 when the module is cast.

    Args:
        hidden, intermediate: Sizes, multiples of 8 and of 32.
        experts, top_k: The number of experts, up to 1024 with shared ones, and of experts per token, up to 16.
        activation, glu_layout: of :func:`cudnn.ops.moe_mlp`.
        bias: The experts have biases.
        shared_experts, shared_gate: See above.
        correction_bias: See above.
        fp8: of :func:`cudnn.ops.moe_mlp`: the experts' forward GEMMs take e4m3.
        into_main_grad: The backward pass adds the gradients of ``up`` and ``down`` to ``up.main_grad`` and
            ``down.main_grad``, float32, as Megatron's optimizers allocate them; autograd gets none.
        group, time_limit: of :func:`cudnn.ops.moe_mlp`: ``experts`` counts those of all ranks; each rank has
            experts / ranks in ``up`` and ``down``; gradients of the router are this rank's. Not with shared experts.
        dtype: bfloat16 or float16; float32 for calls under ``torch.autocast`` and, as float64, for the reference on the
            CPU. None: PyTorch's default type, as in its own layers.
        score, pre_softmax, renormalize, n_group, topk_group, scaling_factor: of :func:`cudnn.moe.route`.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".

    Raises:
        ValueError: an activation or size that is not allowed.
        TypeError: an argument of another Python type, such as a group that is no process group.
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
        checked_arguments = argument_types.checked("MoE", MoE.__init__, locals())
        counts = ("hidden", "intermediate", "experts", "top_k", "shared_experts", "n_group", "topk_group")
        hidden, intermediate, experts, top_k, shared_experts, n_group, topk_group = (
            checked_arguments[name] for name in counts
        )
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _TYPES:
            raise make_error(ValueError, "MoE", "dtype", dtype, ", ".join(map(str, _TYPES)))
        if activation not in ACTIVATIONS:
            raise make_error(ValueError, "MoE", "activation", repr(activation), " or ".join(map(repr, ACTIVATIONS)))
        for name, size, step in (("hidden", hidden, 8), ("intermediate", intermediate, 32), ("experts", experts, 1)):
            if size < 1 or size % step:
                allowed = f"a multiple of {step}" if step > 1 else "1 or more"
                hint = f"take {-(-max(size, 1) // step) * step} and pad the weights with zeros"
                raise make_error(ValueError, "MoE", name, size, allowed, hint if step > 1 else "")
        if glu_layout not in LAYOUTS or (glu_layout != LAYOUTS[0] and activation not in GATED):
            got = f"{glu_layout!r} with {activation!r}"
            raise make_error(ValueError, "MoE", "glu_layout", got, f"{LAYOUTS[0]!r}, or {LAYOUTS[1]!r} for gates")
        if fp8 and (activation not in GATED or glu_layout != LAYOUTS[0] or hidden % 128 or intermediate % 128):
            got = f"{activation!r}, {glu_layout!r}, hidden={hidden}, intermediate={intermediate}"
            raise make_error(ValueError, "MoE", "fp8", got, "gates, interleaved, multiples of 128", "leave fp8 out")
        if shared_experts < 0 or (shared_gate and not shared_experts):
            got = f"{shared_experts}{', with shared_gate' * shared_gate}"
            raise make_error(ValueError, "MoE", "shared_experts", got, "0 or more, and with shared_gate 1 or more")
        rule = rule_of(top_k, score, pre_softmax, renormalize, n_group, topk_group)
        check_rule("MoE", experts, rule, correction_bias)
        if top_k + shared_experts > MOST_SUMMED or experts + shared_experts > MOST_EXPERTS:
            got = f"{experts} and {shared_experts} shared ones, top_k {top_k}"
            allowed = f"{MOST_EXPERTS} with shared ones, at most {MOST_SUMMED} of them for a token"
            hint = "make the shared experts a separate layer: one expert of S times the size computes the same as S"
            raise make_error(ValueError, "MoE", "experts", got, allowed, hint if shared_experts else "")
        self.experts, self.top_k, self.shared_experts, self.activation = experts, top_k, shared_experts, activation
        self.glu_layout, self.fp8, self.into_main_grad = glu_layout, fp8, into_main_grad
        self._rule = (score, pre_softmax, renormalize, n_group, topk_group)
        self._scaling_factor = checked_number("MoE", "scaling_factor", scaling_factor)
        act_params = (linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min)
        named = zip(ACT_PARAMS, act_params, strict=True)
        self._act_params = {name: checked_number("MoE", name, x, limit="clamp" in name) for name, x in named}
        factory_kwargs = {"device": device, "dtype": dtype}
        ranks = 1 if group is None else ranks_of("MoE", group)
        if experts % ranks or (group is not None and shared_experts):
            got = f"{experts} experts and {shared_experts} shared ones on {ranks} ranks"
            allowed = "the same number of experts on each rank, and no shared ones with a group"
            raise make_error(ValueError, "MoE", "experts", got, allowed, "make the shared experts a separate layer")
        self._ranks: dict[str, Any] = {"group": group, "time_limit": time_limit}
        self._is_checked = group is None
        self._has_run = False
        count, n = experts // ranks + shared_experts, intermediate * (2 if activation in GATED else 1)
        self.router = _Router(hidden, experts, bias=False, **factory_kwargs)
        self.shared_gate = torch.nn.Linear(hidden, 1, bias=False, **factory_kwargs) if shared_gate else None
        self.up = torch.nn.Parameter(torch.empty(count, n, hidden, **factory_kwargs))
        self.down = torch.nn.Parameter(torch.empty(count, hidden, intermediate, **factory_kwargs))
        self.up_bias = torch.nn.Parameter(torch.empty(count, n, **factory_kwargs)) if bias else None
        self.down_bias = torch.nn.Parameter(torch.empty(count, hidden, **factory_kwargs)) if bias else None
        self.correction: Tensor | None
        correction = torch.zeros(experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction", correction)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the experts' parameters as ``torch.nn.Linear`` does, and ``correction`` with 0."""
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = weight.shape[-1] ** -0.5
            for parameter in (weight, bias):
                if parameter is not None:
                    torch.nn.init.uniform_(parameter, -bound, bound)
        if self.correction is not None:
            self.correction.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A layer with copies of the parameters and the same group."""
        memo[id(self._ranks["group"])] = self._ranks["group"]
        clone = memo[id(self)] = type(self).__new__(type(self))
        clone.__setstate__(copy.deepcopy(self.__dict__, memo))
        return clone

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        """Called by ``to``, ``half`` and similar methods; ``correction`` stays float32."""
        before = self.correction
        super()._apply(fn, recurse)
        if self.correction is not None and before is not None and self.correction.dtype is not before.dtype:
            self.correction = before.to(self.correction.device)
        return self

    def load_gate_up(self, gate_up: Tensor) -> None:
        """Copies weights (experts + shared_experts, 2 intermediate, hidden) into ``up``: concatenated, gates first."""
        check_tensor("MoE.load_gate_up", "gate_up", gate_up)
        if self.activation not in GATED or gate_up.shape != self.up.shape:
            got = f"{tuple(gate_up.shape)}, for the activation {self.activation!r}"
            raise make_error(ValueError, "MoE.load_gate_up", "gate_up", got, f"{tuple(self.up.shape)}, of a gated one")
        if self.glu_layout == "interleaved":
            gate_up = gate_up.detach().unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)
        with torch.no_grad():
            self.up.copy_(gate_up)

    def route(self, x: Tensor) -> tuple[Tensor, Routing]:
        """The router's logits (T, experts) and its routing, without shared experts, for example for a loss."""
        logits = self.router(tokens_of("MoE", x))
        rule: dict[str, Any] = dict(zip(_RULE, self._rule, strict=True))
        return logits, route(logits, self.top_k, bias=self.correction, scaling_factor=self._scaling_factor, **rule)

    def _shared(self, tokens: Tensor) -> Tensor:
        """The shared experts' weights (T, shared_experts)."""
        weight = wide(tokens.new_ones(tokens.shape[0], self.shared_experts))
        return weight if self.shared_gate is None else weight * wide(self.shared_gate(tokens)).sigmoid()

    def _with_shared(self, indices: Tensor) -> Tensor:
        """Indices (T, top_k + shared_experts): the shared experts are further slots of every token."""
        shared = torch.arange(self.experts, len(self.up), dtype=torch.int32, device=indices.device)
        return torch.cat([indices, shared.expand(indices.shape[0], -1)], 1)

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """``[..., hidden]``, of the shape and dtype of x. ``routing``: the result of :meth:`route` for x, if called."""
        if torch.compiler.is_compiling() or self._has_run or self._ranks["group"] is not None:
            return self._run(x, routing)
        with CompileAhead(compile_ahead.of_module(self, tokens_of("MoE", x))):
            y = self._run(x, routing)
        self._has_run = True
        return y

    def compile(self, *args: Any, max_tokens: int | None = None, **kwargs: Any) -> None:
        """With ``max_tokens``: compiles the kernels for up to so many tokens, in parallel, and waits for them.

        The weights are on the GPU then. Without it, this is ``torch.nn.Module.compile``.

        Raises:
            RuntimeError: the weights are not on a GPU that has kernels.
        """
        if max_tokens is None:
            super().compile(*args, **kwargs)
            return
        if not self.up.is_cuda:
            hint = "move the layer to the GPU; `cudnn cache warm --moe` needs none"
            raise make_error(RuntimeError, "MoE.compile", "device", self.up.device, "cuda", hint)
        arch = launch.device_architecture(self.up.get_device())
        num_sms = FusedAPI.num_sms(self.up.get_device())
        compile_all(compile_ahead.module_kernels(self, max_tokens, arch, num_sms))

    def _run(self, x: Tensor, routing: Routing | None) -> Tensor:
        tokens = tokens_of("MoE", x)
        if not self._is_checked:
            self._check_same_layer(tokens)
        if self.into_main_grad and torch.is_grad_enabled() and self._main_grads() is None:
            hint = "set both, or call the layer under torch.no_grad()"
            raise make_error(
                ValueError, "MoE", "main_grad of up and down", None, "float32 tensors of their shapes", hint
            )
        parameters = (self.up, self.down, self.up_bias, self.down_bias)
        if routing is None and self._is_one_node(tokens, parameters):
            self.router.check(tokens)
            shared, weight = self._shared(tokens) if self.shared_experts else None, self.router.weight
            inputs = (tokens, shared, weight, *parameters)
            if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
                y = _Layer.apply(self, *inputs)
            else:
                y, *_ = self._forward(tokens, shared, weight, parameters, False)
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
            **self._act_params,
            **self._ranks,
        )

    def _is_one_node(self, tokens: Tensor, parameters: Sequence[Tensor | None]) -> bool:
        """Whether the call can be one autograd node: no tracing, dispatch mode, hook or override sees it."""
        router, overrides_route = self.router, type(self).route is not MoE.route
        if overrides_route or self._ranks["group"] is not None or not tokens.shape[0]:
            return False
        if type(router) is not _Router or router.is_customized or router.weight.dtype is not self.up.dtype:
            return False
        return not needs_dispatch([t for t in (tokens, router.weight, *parameters) if t is not None], True)

    def _forward(
        self, tokens: Tensor, shared: Tensor | None, router: Tensor, parameters: Sequence[Any], save_preact: bool
    ) -> tuple[Tensor, _Saved, GroupedGemmOps]:
        """y (T, hidden), the tensors to save for backward, and the layer's GEMMs."""
        # (1) Router GEMM, top-k, weights, and the sort by expert.
        logits, tokens = torch.nn.functional.linear(tokens, router), aligned(tokens)
        rule = rule_of(self.top_k, *self._rule)
        weights, indices, *permutation, chosen = routed(logits, self.correction, rule, self._scaling_factor)
        saved_logits = logits if save_preact and rule.is_dense else chosen
        del logits  # if they are not saved, the experts reuse their memory
        # (2) Shared experts are further slots of every token.
        if shared is not None:
            indices, weights = self._with_shared(indices), torch.cat([weights, shared], 1)
            permutation = sort(indices, len(self.up))
        # (3) Experts: permute, up GEMM + activation, down GEMM, combine.
        e = self._experts(parameters)
        ops = checked(tokens, weights, indices, e, self._main_grad_lists())
        y, preact = expert_layer.forward(ops, tokens, weights, Permutation(*permutation), e, save_preact)
        return y, _Saved(tokens, saved_logits, preact, indices, weights, *permutation), ops

    def _dlogits(self, dweights: Tensor, saved: _Saved) -> tuple[Tensor, Tensor | None]:
        """The gradient of the logits (T, experts), from that of the routed experts' weights (T, top_k).

        And, if only the chosen experts' logits have a gradient, each row's (R, 1, 1), else None.
        """
        indices = saved.indices if not self.shared_experts else saved.indices[:, : self.top_k].contiguous()
        rule = rule_of(self.top_k, *self._rule[:3])
        dlogit_of_row = None if rule.is_dense else dweights.new_empty(saved.gather_idx.numel(), 1, 1)
        rows = None if dlogit_of_row is None else (saved.scatter_idx, dlogit_of_row)
        arguments = (dweights, saved.logits, indices, self.experts, rule, self._scaling_factor, rows)
        return logits_gradient(*arguments), dlogit_of_row

    def _padded_router(self, router: Tensor) -> Tensor:
        """The router's weight, contiguous, with rows of zeros for shared experts."""
        shared = self.shared_experts
        return torch.nn.functional.pad(router, (0, 0, 0, shared)) if shared else router.contiguous()

    def _experts(self, parameters: Sequence[Any]) -> Experts:
        up, down, up_bias, down_bias = parameters
        options = (self.activation, tuple(self._act_params.values()), self.glu_layout, self.fp8)
        return Experts([up], [down], up_bias, down_bias, *options)

    def _main_grads(self) -> tuple[Tensor, Tensor] | None:
        up, down = (getattr(w, "main_grad", None) if self.into_main_grad else None for w in (self.up, self.down))
        return None if up is None or down is None else (up, down)

    def _main_grad_lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """The ``main_grad`` buffers of up and of down; empty lists without ``into_main_grad``."""
        buffers = self._main_grads()
        return ([], []) if buffers is None else ([buffers[0]], [buffers[1]])

    @torch.compiler.disable(reason="ranks compare their layers")
    def _check_same_layer(self, tokens: Tensor) -> None:
        """At the first call the ranks compare their layers' configurations: see the operator's errors."""
        config = describe_config(
            hidden=self.up.shape[2],
            intermediate=self.down.shape[2],
            experts=self.experts,
            top_k=self.top_k,
            dtype=self.up.dtype,
            activation=self.activation,
            glu_layout=self.glu_layout,
            fp8=self.fp8,
            **self._act_params,
            bias=self.up_bias is not None,
            correction_bias=self.correction is not None,
            scaling_factor=self._scaling_factor,
            **dict(zip(_RULE, self._rule, strict=True)),
        )
        sizes = (self.experts, self.top_k, tokens.shape[-1], autocast_type(tokens) or self.up.dtype)
        check_same_layer("MoE", config=config, sizes=sizes, x=tokens, **self._ranks)
        self._is_checked = True

    def extra_repr(self) -> str:
        sizes = f"{self.up.shape[2]}, {self.down.shape[2]}, experts={self.experts}, top_k={self.top_k}"
        shared = f", shared_experts={self.shared_experts}" if self.shared_experts else ""
        return f"{sizes}{shared}, {self.activation}{', fp8' * self.fp8}"
