"""Megatron-Core: the experts of its ``MoELayer`` on our grouped GEMMs.

from cudnn.integrations import megatron as cudnn_megatron

spec = cudnn_megatron.use_experts(get_gpt_layer_local_spec(num_experts=128, moe_grouped_gemm=False))
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn.errors import make_error
from cudnn.integrations.weights import interleaved
from cudnn.moe import layer as expert_layer
from cudnn.moe.dispatched import device_counts, moe_experts, moe_experts_fwd_primitive, row_weights
from cudnn.moe.experts import Experts, SortedRows, grouped_gemm_ops, recipe_of
from cudnn.moe.main_grads import dummy_grad
from cudnn.moe.operator import moe_mlp
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import may_overwrite

_WHERE = "cudnn.integrations.megatron"

try:
    from megatron.core.activations import quick_gelu, squared_relu  # pyright: ignore[reportMissingImports]
    from megatron.core.dist_checkpointing import ShardedTensor  # pyright: ignore[reportMissingImports]
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.layers import (  # pyright: ignore[reportMissingImports]
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
        get_cuda_rng_tracker,
        get_expert_parallel_rng_tracker_name,
    )
    from megatron.core.transformer.module import MegatronModule  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.moe.moe_layer import MoELayer  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.moe.moe_utils import (  # pyright: ignore[reportMissingImports]
        get_default_pg_collection,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.utils import (  # pyright: ignore[reportMissingImports]
        make_sharded_object_for_checkpoint,
    )
except ImportError as error:
    hint = "pip install 'megatron-core>=0.16'"
    raise make_error(ImportError, _WHERE, "megatron-core", str(error), "version 0.16 or later", hint) from error

_NO_LIMIT = float(torch.finfo(torch.bfloat16).max)


def experts_spec(*, fp8: bool | str = False) -> Any:
    """The ``ModuleSpec`` of :class:`CudnnExperts`, for ``MoESubmodules(experts=...)`` of Megatron-Core 0.16.

    Later versions take a builder, a callable with ``(num_local_experts, config, /, *, pg_collection, name)``: the class
    :class:`CudnnExperts` is one.

    Args:
        fp8: of :func:`cudnn.ops.moe_experts`.
    """
    return ModuleSpec(module=CudnnExperts, params={"fp8": fp8})


def use_experts(spec: Any, *, fp8: bool | str = False) -> Any:
    """A copy of a layer's or block's spec whose MoE layers have :func:`experts_spec` as experts.

    Args:
        spec: A ``ModuleSpec`` of a transformer layer or an MoE layer, or ``TransformerBlockSubmodules``.
        fp8: of :func:`cudnn.ops.moe_experts`.

    Raises:
        ValueError: it has no MoE layer.
    """
    copied = copy.deepcopy(spec)
    submodules = list(_moe_submodules(copied))
    if not submodules:
        raise make_error(ValueError, f"{_WHERE}.use_experts", "spec", type(spec).__name__, "a spec with an MoE layer")
    for each in submodules:
        each.experts = experts_spec(fp8=fp8)
    return copied


def _moe_submodules(spec: Any) -> Any:
    """The ``MoESubmodules`` in a spec."""
    submodules = getattr(spec, "submodules", None)
    if getattr(spec, "module", None) is MoELayer:
        yield submodules
    elif submodules is not None:
        for name in vars(submodules):
            yield from _moe_submodules(getattr(submodules, name))
    for each in getattr(spec, "layer_specs", None) or ():
        yield from _moe_submodules(each)


class CudnnExperts(MegatronModule):
    """The routed experts of a Megatron-Core ``MoELayer``, in the place of ``SequentialMLP`` and ``TEGroupedMLP``.

    ``weight1`` (local experts, 2 I, H), gates first, or (local experts, I, H) without a gate, and ``weight2`` (local
    experts, H, I), with I the intermediate size of a rank of expert tensor parallelism. The kernels read them in place.
    Distributed checkpoints have the keys and global shapes of ``SequentialMLP`` and ``TEGroupedMLP``, so that they load
    each other's, with any degree of expert parallelism. ``load_state_dict`` takes those modules' keys too.

    Activations: SwiGLU, quick-GEGLU, both with ``activation_func_clamp_value`` and ``glu_linear_offset``, and
    squared ReLU. With ``gradient_accumulation_fusion`` weight gradients are added to ``main_grad`` in float32. The
    activation is always recomputed in the backward pass, so ``recompute_modules=["moe_act"]`` changes nothing.

    Args:
        num_local_experts: Experts of this rank.
        config: A ``TransformerConfig``.
        pg_collection: Process groups; None: Megatron's default ones.
        name: Ignored.
        fp8: of :func:`cudnn.ops.moe_experts`. Each pass then interleaves a copy of ``weight1``, quantizes the weights,
            and returns weight gradients as ``grad``; not with squared ReLU or ``delay_wgrad_compute``.

    Raises:
        ValueError: a configuration that is not supported.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        pg_collection: Any = None,
        *,
        name: str | None = None,
        fp8: bool | str = False,
    ) -> None:
        super().__init__(config=config)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.num_local_experts, self.use_fp8 = num_local_experts, recipe_of(_WHERE, fp8)
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        self.activation, self.act_params = _activation(config)
        tp, hidden = self.tp_group.size(), config.moe_latent_size or config.hidden_size
        _check_config(config, tp, bool(fp8))
        inner = config.moe_ffn_hidden_size // tp
        wide = 2 * inner if config.gated_linear_unit else inner
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        empty = {"device": device, "dtype": config.params_dtype}
        self.weight1 = torch.nn.Parameter(torch.empty(num_local_experts, wide, hidden, **empty))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, inner, **empty))
        has_bias = config.add_bias_linear
        self.bias1 = torch.nn.Parameter(torch.zeros(num_local_experts, wide, **empty)) if has_bias else None
        self.bias2 = torch.nn.Parameter(torch.zeros(num_local_experts, hidden, **empty)) if has_bias else None
        self._mark_parameters()
        if config.perform_initialization:
            self.reset_parameters()
        self._delayed: deque[list[Callable[[], Tensor | None]]] = deque()
        self._wgrad_hooks: list[Callable[..., Any]] = []
        self.register_load_state_dict_pre_hook(_stack_experts)

    def _mark_parameters(self) -> None:
        """Sets the attributes that Megatron's DDP, optimizers and tensor parallelism read."""
        expert_parallel, stride = self.ep_group.size() > 1, 2 if self.config.gated_linear_unit else 1
        for parameter, dim, parts in ((self.weight1, 1, stride), (self.weight2, 2, 1), (self.bias1, 1, stride)):
            if parameter is not None:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=parts)
        for parameter in self.parameters():
            parameter.allreduce = not expert_parallel  # pyright: ignore[reportAttributeAccessIssue]
        if getattr(self.config, "delay_wgrad_compute", False):
            for parameter in (self.weight1, self.weight2):
                parameter.skip_backward_post_hook = True  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initializes the weights with the configuration's methods, expert by expert.

        With ``use_cpu_initialization``, draws those of all ranks and keeps its own: the same seed leads to the same
        weights, whatever the degrees of parallelism.
        """
        methods: Any = (self.config.init_method, self.config.output_layer_init_method)
        if not self.config.use_cpu_initialization:
            tracker: Any = get_cuda_rng_tracker()
            with tracker.fork(get_expert_parallel_rng_tracker_name()):
                for weight, init in zip((self.weight1, self.weight2), methods, strict=True):
                    for expert in weight:
                        init(expert)
            return
        first, tp, tp_rank = self._first_expert, self.tp_group.size(), self.tp_group.rank()
        for expert in range(self.num_local_experts * self.ep_group.size()):
            for weight, init in zip((self.weight1, self.weight2), methods, strict=True):
                dim, parts = weight.partition_dim - 1, weight.partition_stride  # pyright: ignore[reportAttributeAccessIssue]
                shape = list(weight.shape[1:])
                shape[dim] *= tp
                drawn = torch.empty(shape, dtype=torch.float32, device="cpu")
                init(drawn)
                if 0 <= expert - first < self.num_local_experts:
                    shares = [part.chunk(tp, dim)[tp_rank] for part in drawn.chunk(parts, dim)]
                    weight[expert - first].copy_(torch.cat(shares, dim))

    @property
    def _first_expert(self) -> int:
        """The global index of this rank's first expert."""
        return self.ep_group.rank() * self.num_local_experts

    def forward(self, dispatched_input: Tensor, tokens_per_expert: Any, permuted_probs: Tensor) -> tuple[Tensor, None]:
        """The outputs of dispatched rows (R, H), multiplied by their probabilities, and no bias: it is added already.

        With expert tensor parallelism the outputs are this rank's partial sums, as the dispatchers expect.

        Args:
            dispatched_input: (R, H), sorted by local expert; rows behind the counts are padding.
            tokens_per_expert: Counts (local experts,), on the host or on the device.
            permuted_probs: (R,) or (R, 1).
        """
        x, probs = dispatched_input, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, probs = (x * probs.view(-1, 1)).to(x.dtype), None
        counts = tokens_per_expert
        if isinstance(counts, Tensor) and counts.dtype not in (torch.int32, torch.int64):
            counts = counts.long()
        main_grads = self._main_grads()
        if getattr(self.config, "delay_wgrad_compute", False) and torch.is_grad_enabled():
            counts, padded = device_counts(counts, x, self.num_local_experts)
            probs = None if probs is None else row_weights(probs, x)
            parameters = (self.weight1, self.weight2, self.bias1, self.bias2)
            return _Delayed.apply(self, counts, padded, main_grads, x, probs, *parameters), None
        buffers = main_grads if main_grads is None or torch.is_grad_enabled() else None
        up, down, *biases = self._operands()
        y = moe_experts(x, counts, up, down, probs, *biases, main_grads=buffers, **self._options)
        return y, None

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The weights and biases as the kernels read them: fp8 GEMMs need interleaved gates, which are copies."""
        weight1, bias1 = self.weight1, self.bias1
        if self.use_fp8:
            weight1 = interleaved(_WHERE, *weight1.chunk(2, 1))
            bias1 = None if bias1 is None else interleaved(_WHERE, *bias1.chunk(2, 1))
        return weight1, self.weight2, bias1, self.bias2

    @property
    def _options(self) -> dict[str, Any]:
        """Of :func:`cudnn.ops.moe_experts` and :func:`cudnn.ops.moe_mlp`."""
        layout = "interleaved" if self.use_fp8 else self._glu_layout
        return {"activation": self.activation, "glu_layout": layout, "fp8": self.use_fp8, **self.act_params}

    @property
    def _glu_layout(self) -> str:
        return "concatenated" if self.config.gated_linear_unit else "interleaved"

    def _main_grads(self) -> tuple[Tensor, Tensor] | None:
        """The buffers that weight gradients are added to, if Megatron has allocated them in float32. None with fp8:
        the kernels then compute gradients of interleaved copies.
        """
        if self.use_fp8:
            return None
        buffers = tuple(getattr(weight, "main_grad", None) for weight in (self.weight1, self.weight2))
        fuses = self.config.gradient_accumulation_fusion and all(w.requires_grad for w in (self.weight1, self.weight2))
        if not fuses or any(buffer is None or buffer.dtype is not torch.float32 for buffer in buffers):
            return None
        return buffers  # pyright: ignore[reportReturnType]

    def _local_experts(self) -> Experts:
        params = tuple(self.act_params.get(name, default) for name, default in _DEFAULTS.items())
        biases = (self.bias1, self.bias2)
        options = (self.activation, params, self._glu_layout, self.use_fp8)
        return Experts([self.weight1], [self.weight2], *biases, *options)

    def backward_dw(self) -> None:
        """Computes the weight gradients of the oldest backward pass that has none yet, with ``delay_wgrad_compute``.

        They are added to ``main_grad`` or to ``grad``; then the hooks of Megatron's DDP run. Without delayed gradients
        it does nothing.
        """
        if not self._delayed:
            return
        main_grads = self._main_grads()
        for weight, compute in zip((self.weight2, self.weight1), self._delayed.popleft(), strict=False):
            with torch.no_grad():
                grad = compute()
            if main_grads is not None:
                weight.grad = dummy_grad(weight)
            elif grad is not None:
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[..., Any]) -> None:
        """Called by Megatron's DDP: ``hook`` runs at the end of :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Sharded tensors with the keys and global shapes of ``SequentialMLP``: (all experts, rows, columns)."""
        singleton = bool((metadata or {}).get("singleton_local_shards", False))
        layout = _Layout(self, prefix, tuple(sharded_offsets), singleton)
        names = {
            "weight1": "linear_fc1.weight",
            "weight2": "linear_fc2.weight",
            "bias1": "linear_fc1.bias",
            "bias2": "linear_fc2.bias",
        }
        result = {}
        for name, key in names.items():
            if (parameter := getattr(self, name)) is not None:
                result[f"{prefix}{name}"] = layout.factory(name, key, parameter)
        return {**result, **layout.extra_states()}


_DEFAULTS = {"linear_offset": 1.0, "geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0}


def _activation(config: Any) -> tuple[str, dict[str, Any]]:
    """The name of the activation, and its numbers."""
    function, gated = config.activation_func, config.gated_linear_unit
    clamp, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    if gated and function is torch.nn.functional.silu and clamp is None and not offset:
        return "swiglu", {}
    if gated and (function is torch.nn.functional.silu or function is quick_gelu):
        alpha, limit = 1.702 if function is quick_gelu else 1.0, _NO_LIMIT if clamp is None else float(clamp)
        named = {"linear_offset": float(offset), "geglu_alpha": alpha, "glu_clamp_max": limit, "glu_clamp_min": -limit}
        return "geglu", named
    if not gated and function is squared_relu:
        return "srelu", {}
    got = f"{getattr(function, '__name__', function)}, gated_linear_unit={gated}"
    allowed = "silu or quick_gelu with gated_linear_unit, or squared_relu without"
    raise make_error(ValueError, _WHERE, "activation_func", got, allowed, "keep Megatron's experts")


def _check_config(config: Any, tp: int, fp8: bool) -> None:
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        hint = "use experts_spec(fp8=True), whose e4m3 GEMMs need no recipe"
        raise make_error(ValueError, _WHERE, "config.fp8 or config.fp4", config.fp8 or config.fp4, "None", hint)
    if fp8 and not config.gated_linear_unit:
        raise make_error(ValueError, _WHERE, "fp8 without gated_linear_unit", fp8, "False")
    if fp8 and getattr(config, "delay_wgrad_compute", False):
        raise make_error(ValueError, _WHERE, "delay_wgrad_compute with fp8", True, "False")
    if config.moe_ffn_hidden_size is None or config.moe_ffn_hidden_size % tp:
        got = f"{config.moe_ffn_hidden_size} with {tp} ranks of expert tensor parallelism"
        raise make_error(ValueError, _WHERE, "moe_ffn_hidden_size", got, "a multiple of the ranks")
    if config.add_bias_linear and tp > 1:
        hint = "set add_bias_linear=False, or expert_tensor_parallel_size=1"
        raise make_error(ValueError, _WHERE, "add_bias_linear", f"True with {tp} ranks", "False", hint)
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise make_error(ValueError, _WHERE, "moe_apply_probs_on_input", f"top k {config.moe_router_topk}", "top k 1")


class _Delayed(torch.autograd.Function):
    """The experts with weight gradients that :meth:`CudnnExperts.backward_dw` computes."""

    @staticmethod
    def forward(
        ctx: Any,
        module: CudnnExperts,
        counts: Tensor,
        padded: bool,
        main_grads: tuple[Tensor, Tensor] | None,
        x: Tensor,
        probs: Tensor | None,
        *parameters: Any,
    ) -> Tensor:
        e = module._local_experts()
        options = (e.activation, e.act_params, e.glu_layout, e.fp8, padded, True)
        y, offsets, preact = moe_experts_fwd_primitive(
            x, counts, probs, e.up, e.down, e.up_bias, e.down_bias, [], [], *options
        )
        ctx.module, ctx.main_grads, ctx.padded = module, main_grads, padded
        ctx.save_for_backward(x, probs, preact, offsets, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, probs, preact, offsets, *_ = ctx.saved_tensors
        e, rows, dy = ctx.module._local_experts(), SortedRows(offsets, len(x)), aligned(gradients[0])
        needs = expert_layer.NeedsGrad(*ctx.needs_input_grad[4:])
        delayed: list[Callable[[], Tensor | None]] = []
        if not len(x):
            ctx.module._delayed.append([functools.partial(torch.zeros_like, w) for w in (*e.down, *e.up)])
            zeros = [None if w is None else torch.zeros_like(w) for w in (x, probs, e.up_bias, e.down_bias)]
            return None, None, None, None, *zeros[:2], None, None, *zeros[2:]
        if ctx.padded:
            dy = dy.where(rows.expert < len(offsets), 0.0)
        main_grad = ([], []) if ctx.main_grads is None else ([ctx.main_grads[0]], [ctx.main_grads[1]])
        arguments = (x, preact, None, probs, rows, e, needs, main_grad)
        into_preact = may_overwrite(preact)
        grads = expert_layer.backward(grouped_gemm_ops(x, e), dy, *arguments, delayed=delayed, into_preact=into_preact)
        if grads.x is not None and ctx.padded:
            grads = grads._replace(x=grads.x.where(rows.expert < len(offsets), 0.0))
        ctx.module._delayed.append(delayed)
        return None, None, None, None, grads.x, grads.weights, None, None, grads.up_bias, grads.down_bias


class _Layout:
    """How a module's parameters are stored in distributed checkpoints."""

    def __init__(self, module: CudnnExperts, prefix: str, offsets: tuple[Any, ...], singleton: bool) -> None:
        self.prefix, self.offsets, self.singleton = prefix, offsets, singleton
        self.gated = module.config.gated_linear_unit
        self.local, self.first = module.num_local_experts, module._first_expert
        self.ep = (module.ep_group.rank(), module.ep_group.size())
        self.tp = (module.tp_group.rank(), module.tp_group.size())
        self.dp_rank = module.dp_group.rank()

    def factory(self, name: str, key: str, parameter: Tensor) -> Any:
        """The sharded tensors of a parameter (local experts, ...): gates and others apart, as Megatron has them."""
        parts = 2 if self.gated and name in ("weight1", "bias1") else 1
        axis = {"weight1": 0, "bias1": 0, "weight2": 1, "bias2": None}[name]  # of an expert, that ranks share
        replica = (0, self.tp[0] if axis is None else 0, self.dp_rank)

        @torch.no_grad()
        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any = None) -> list[Any]:
            if flattened_range is not None:
                allowed, hint = (
                    "None",
                    'save optimizers with metadata["distrib_optim_sharding_type"]="fully_reshardable"',
                )
                raise make_error(ValueError, _WHERE, "flattened_range", flattened_range, allowed, hint)
            shards = []
            for part, values in enumerate(tensor.chunk(parts, 1)):
                shards += self._shards(key, values, part, parts, axis, replica_id)
            return shards

        @torch.no_grad()
        def merge(loaded: list[Tensor]) -> Tensor:
            each = len(loaded) // parts
            halves = [loaded[part * each : (part + 1) * each] for part in range(parts)]
            return torch.cat([torch.stack(half) if self.singleton else half[0] for half in halves], 1)

        arguments: Any = (f"{self.prefix}experts.{key}", parameter, build, merge, replica)
        return ShardedTensorFactory(*arguments)

    def _shards(self, key: str, values: Tensor, part: int, parts: int, axis: int | None, replica_id: Any) -> list[Any]:
        """The shards of one part of a parameter: all local experts', or one for each."""
        before = len(self.offsets)
        rank, ranks = self.tp
        if not self.singleton:
            inner = () if axis is None else ((before + 1 + axis, part * ranks + rank, parts * ranks),)
            offsets = (*self.offsets, (before, *self.ep), *inner)
            return [_sharded(key, values.contiguous(), offsets, replica_id, before)]
        inner = () if axis is None else ((before + axis, rank, ranks),)
        suffix, shards = ("_w", "_v")[part] if parts == 2 else "", []
        for i, expert in enumerate(values):
            own = key.replace(f"{self.prefix}experts.", f"{self.prefix}experts.{self.first + i}.") + suffix
            shards.append(_sharded(own, expert.contiguous(), (*self.offsets, *inner), replica_id, before))
        return shards

    def extra_states(self) -> dict[str, Any]:
        """Empty states that ``SequentialMLP`` looks for."""
        result = {}
        for i in range(self.first, self.first + self.local):
            for linear in ("linear_fc1", "linear_fc2"):
                key, offsets = f"{self.prefix}experts.{linear}._extra_state", self.offsets
                if self.singleton:
                    key = f"{self.prefix}experts.{i}.{linear}._extra_state"
                else:
                    offsets = (*offsets, (len(offsets), i, self.local * self.ep[1]))
                replica = (0, self.tp[0], self.dp_rank)
                name = f"{self.prefix}expert{i}.{linear}._extra_state"
                result[name] = make_sharded_object_for_checkpoint(None, key, offsets, replica)
        return result


def _sharded(key: str, values: Tensor, offsets: Sequence[Any], replica_id: Any, prepended: int) -> Any:
    options = {"replica_id": replica_id, "prepend_axis_num": prepended}
    return ShardedTensor.from_rank_offsets(key, values, *offsets, **options)


def _stack_experts(module: CudnnExperts, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook before loading: takes the keys of ``SequentialMLP`` and of ``TEGroupedMLP``; drops their extra states."""
    for linear, name in (("linear_fc1", "1"), ("linear_fc2", "2")):
        for kind in ("weight", "bias"):
            for pattern in (f"local_experts.{{}}.{linear}.{kind}", f"{linear}.{kind}{{}}"):
                keys = [prefix + pattern.format(i) for i in range(module.num_local_experts)]
                if all(key in state_dict for key in keys):
                    state_dict[f"{prefix}{kind}{name}"] = torch.stack([state_dict.pop(key) for key in keys])
    for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
        del state_dict[key]


class CudnnMoEBackend(CudnnExperts):
    """Router output to layer output in one module: dispatch, experts and combine.

    The interface of Megatron's whole-layer backends: ``forward(hidden_states, probs, routing_map)``. Tokens are
    exchanged over the expert-parallel group by :func:`cudnn.ops.moe_mlp`, without Megatron's dispatchers. Parameters,
    checkpoints and restrictions are those of :class:`CudnnExperts`; without expert tensor parallelism, and without
    ``delay_wgrad_compute``.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> Tensor:
        """The layer's output, of the shape of ``hidden_states``.

        Args:
            hidden_states: (..., H), T tokens.
            probs: (T, experts of all ranks), the weights of chosen experts; differentiable.
            routing_map: (T, experts of all ranks), bool; at most ``moe_router_topk`` experts for each token.
        """
        if self.tp_group.size() > 1:
            raise make_error(ValueError, _WHERE, "expert tensor parallelism", self.tp_group.size(), "1")
        probs, routing_map = probs.flatten(0, -2), routing_map.flatten(0, -2)
        experts = routing_map.shape[1]
        order = torch.arange(experts, 0, -1, dtype=torch.int64, device=routing_map.device)  # slots by expert
        chosen, indices = (routing_map * order).topk(min(self.config.moe_router_topk, experts), 1)
        wide = torch.float64 if hidden_states.dtype is torch.float64 else torch.float32
        weights = probs.gather(1, indices).to(wide)
        group = self.ep_group if self.ep_group.size() > 1 else None
        grads = self._main_grads() if torch.is_grad_enabled() else None
        routing = (indices.where(chosen > 0, -1), weights)
        return moe_mlp(hidden_states, routing, *self._operands(), main_grads=grads, group=group, **self._options)
