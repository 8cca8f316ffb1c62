"""A mixture of experts as a module: router, experts, shared experts.

Forward: router GEMM, top-k and sort (:func:`cudnn.moe.routing.routed`), then the experts (:mod:`cudnn.moe.layer`).
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, make_error
from cudnn.fused import argument_types
from cudnn.fused.gated import LAYOUTS
from cudnn.fused.host import FusedAPI
from cudnn.gemm.formats import wide
from cudnn.moe import compile_ahead
from cudnn.moe.autograd import LayerFunction, forward
from cudnn.moe.exchange import Exchange, check_all_ranks, describe_config
from cudnn.moe.experts import ACT_PARAMS, ACTIVATIONS, GATED, Experts, recipe_of
from cudnn.moe.fsdp import attach, check_sharding
from cudnn.moe.gathered import GatheredWeight
from cudnn.moe.operator import in_shape_of, moe_mlp, tokens_of
from cudnn.moe.parallel import check_same_layer
from cudnn.moe.quantizing import forget_quantized, weights_changed
from cudnn.moe.router_linear import moe_router_linear
from cudnn.moe.routing import RouterOutput, Routing, check_rule, route, rule_of, sort
from cudnn.moe.sharding import (
    device_of,
    draw_seed,
    expert_mesh,
    local_part,
    local_shard,
    share_of,
    uniform_,
)
from cudnn.moe.tensor_parallel import sum_gradients, sum_over
from cudnn.runtime import launch
from cudnn.runtime.kernels import CompileAhead, compile_all
from cudnn.runtime.launch_sequence import LaunchSequences
from cudnn.runtime.registration import autocast_type, needs_dispatch
from cudnn_kernels.moe.configuration import MOST_EXPERTS, MOST_SUMMED

_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_EXPERT_PARAMETERS = ("up", "down", "up_bias", "down_bias")
_FP8_PARAMETERS = _EXPERT_PARAMETERS[:2]
_RULE = ("score", "pre_softmax", "renormalize", "n_group", "topk_group")


class _Router(torch.nn.Linear):
    """A linear layer that checks its input. In float32 it also takes bfloat16 and float16 tokens."""

    batch_invariant = False

    def reset_parameters(self) -> None:
        """As ``torch.nn.Linear``, with the same values for every sharding over ranks."""
        uniform_(self.weight, self.in_features**-0.5, draw_seed(self.weight))

    def forward(self, tokens: Tensor) -> Tensor:
        self.check(tokens)
        if self.batch_invariant:
            return moe_router_linear(tokens, self.weight)
        return super().forward(tokens if autocast_type(tokens) else tokens.to(self.weight.dtype))

    def check(self, tokens: Tensor) -> None:
        """Raises a ValueError for tokens of another dtype or size, a RuntimeError for a weight that FSDP2 sharded."""
        weight = self.weight
        local_shard("router.weight", None if isinstance(tokens, DTensor) else weight, None)
        types = (torch.float32, torch.bfloat16, torch.float16) if weight.dtype is torch.float32 else (weight.dtype,)
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


class _QuantizedModule(torch.nn.Module):
    """A module that drops the e4m3 copy of a weight that is replaced, as FSDP2 replaces gathered weights and sharded
    ones.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        weight = self.__dict__.get("_parameters", {}).get(name)
        if weight is not None and weight is not value:
            forget_quantized(weight)
        super().__setattr__(name, value)


class SharedExperts(_QuantizedModule):
    """The shared experts of a layer whose other experts are sharded over ranks: each rank computes its own tokens'.

    A module with separate hooks: ``fully_shard`` gathers its weights over all data-parallel ranks. Parameters: ``up``
    (shared_experts, N, hidden), ``down`` (shared_experts, hidden, intermediate), ``up_bias`` and ``down_bias``.
    """

    up: torch.nn.Parameter
    down: torch.nn.Parameter

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], options: dict[str, Any], device: Any, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._options = options
        for name in _EXPERT_PARAMETERS:
            shape = shapes.get(name)
            weight = None if shape is None else torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, weight)

    def forward(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """The sum of the shared experts' outputs (T, hidden) for tokens (T, hidden), by weights (T, shared_experts)."""
        up, down, up_bias, down_bias = (getattr(self, name) for name in _EXPERT_PARAMETERS)
        indices = torch.arange(weights.shape[1], dtype=torch.int32, device=tokens.device)
        routing = indices.expand(tokens.shape[0], -1), wide(weights)  # FSDP2 may have cast them
        return moe_mlp(tokens, routing, up, down, up_bias, down_bias, **self._options)


class MoE(_QuantizedModule):
    """A mixture-of-experts layer: a router sends each token to ``top_k`` experts and weights their outputs.

    The router is a linear layer and :func:`cudnn.moe.route`, the experts are :func:`cudnn.ops.moe_mlp`. Shared experts,
    of the same size, process every token with the weight 1 or, with ``shared_gate``, ``sigmoid(gate(x))``; S of them
    compute the same as one of S times the intermediate size.

    Construction on a GPU, in bfloat16 or float16, starts the compilation of the kernels in the background: see
    :meth:`compile`, which waits for it.

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
        fp8: of :func:`cudnn.ops.moe_mlp`. With "blockwise", call :meth:`weights_changed` after changes of ``up.data``
            or ``down.data`` that no ``torch.optim.Optimizer`` made.
        batch_invariant: of :func:`cudnn.ops.moe_mlp`, and the router's GEMM is batch-invariant too: a token's output
            has the same bits whatever the other tokens and their number are. The number of experts is a multiple of 8,
            the router has the dtype of the experts, and there is no ``shared_gate``. On CPU tensors only in emulation.
        into_main_grad: The backward pass adds the gradients of ``up`` and ``down`` to ``up.main_grad`` and
            ``down.main_grad``, float32. The caller allocates and zeroes them, as Megatron's DDP does. Autograd gets no
            gradient; if a weight has the attribute ``grad_added_to_main_grad``, which that DDP adds, it becomes True,
            and autograd gets a tensor without a meaning, for DDP's hooks.
        mesh: A ``DeviceMesh`` with the dimension ``ep_dim``, over whose ranks the experts are spread. ``up``, ``down``
            and biases are DTensors of all experts, sharded with ``Shard(0)``; ``fully_shard`` over another dimension
            of the mesh shards them further. Each rank stores experts / ranks; gradients of the router are this rank's.
            Shared experts are then the module ``shared``, whose weights each rank has.
        ep_dim: See ``mesh``.
        etp_dim: A second dimension of the mesh, expert tensor parallelism: each of its ranks has a slice of the
            intermediate size of every expert. These ranks call with the same tokens and get the same results.
        group, time_limit: of :func:`cudnn.ops.moe_mlp`. In place of ``mesh``: the layer makes a mesh of one dimension,
            "ep". With ``mesh``: an :class:`cudnn.moe.Exchange` over the ranks of ``ep_dim``.
        device: None: PyTorch's default device; if that is the CPU, the mesh's.
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
        fp8: bool | str = False,
        batch_invariant: bool = False,
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
        mesh: Any = None,
        ep_dim: str = "ep",
        etp_dim: str | None = None,
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
        recipe = recipe_of("MoE", fp8)
        if recipe and (activation not in GATED or glu_layout != LAYOUTS[0] or hidden % 128 or intermediate % 128):
            got = f"{activation!r}, {glu_layout!r}, hidden={hidden}, intermediate={intermediate}"
            raise make_error(ValueError, "MoE", "fp8", got, "gates, interleaved, multiples of 128", "leave fp8 out")
        if shared_experts < 0 or (shared_gate and not shared_experts):
            got = f"{shared_experts}{', with shared_gate' * shared_gate}"
            raise make_error(ValueError, "MoE", "shared_experts", got, "0 or more, and with shared_gate 1 or more")
        if batch_invariant and (experts % 8 or shared_gate):
            got = f"{experts} experts{', with shared_gate' * shared_gate}"
            allowed = "a multiple of 8 experts, without shared_gate"
            raise make_error(ValueError, "MoE", "batch_invariant", got, allowed, "leave batch_invariant out")
        rule = rule_of(top_k, score, pre_softmax, renormalize, n_group, topk_group)
        check_rule("MoE", experts, rule, correction_bias)
        if top_k + shared_experts > MOST_SUMMED or experts + shared_experts > MOST_EXPERTS:
            got = f"{experts} and {shared_experts} shared ones, top_k {top_k}"
            allowed = f"{MOST_EXPERTS} with shared ones, at most {MOST_SUMMED} of them for a token"
            hint = "make the shared experts a separate layer: one expert of S times the size computes the same as S"
            raise make_error(ValueError, "MoE", "experts", got, allowed, hint if shared_experts else "")
        self.experts, self.top_k, self.shared_experts, self.activation = experts, top_k, shared_experts, activation
        self.glu_layout, self.fp8, self.into_main_grad = glu_layout, recipe, into_main_grad
        self.batch_invariant = batch_invariant
        self._rule = (score, pre_softmax, renormalize, n_group, topk_group)
        self._scaling_factor = checked_number("MoE", "scaling_factor", scaling_factor)
        act_params = (linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min)
        named = zip(ACT_PARAMS, act_params, strict=True)
        self._act_params = {name: checked_number("MoE", name, x, limit="clamp" in name) for name, x in named}
        self._time_limit = time_limit
        self._expert_mesh = expert_mesh(group, mesh, ep_dim, etp_dim, device)
        self._share: tuple[Any, Any] | None = None  # of an unpickled layer, until set_group
        self._check_degrees(intermediate)
        self._is_checked = self._expert_mesh is None
        if self._expert_mesh is not None:
            device = device_of(device, self._expert_mesh.mesh)
        factory_kwargs = {"device": device, "dtype": dtype}
        self._has_run = self._gathers_fp8 = False
        self._sequences = LaunchSequences()
        options = (*self._rule, *self._options().values(), bias, shared_experts, shared_gate, correction_bias)
        kind = (hidden, intermediate, experts, top_k, into_main_grad, *options)
        usual = self._expert_mesh is None and type(self).forward is MoE.forward and type(self).route is MoE.route
        with compile_ahead.at_construction(self, device, dtype, kind) if usual else contextlib.nullcontext():
            self.router = _Router(hidden, experts, bias=False, **factory_kwargs)
            self.router.batch_invariant = batch_invariant
            self.shared_gate = torch.nn.Linear(hidden, 1, bias=False, **factory_kwargs) if shared_gate else None
            n = intermediate * (2 if activation in GATED else 1)
            sizes = {"up": (n, hidden), "down": (hidden, intermediate)}
            sizes |= {"up_bias": (n,), "down_bias": (hidden,)} if bias else {}
            for name in _EXPERT_PARAMETERS:
                weight = self._empty_weight(name, sizes[name], **factory_kwargs) if name in sizes else None
                self.register_parameter(name, None if weight is None else torch.nn.Parameter(weight))
            shapes = {name: (shared_experts, *size) for name, size in sizes.items()}
            separate = shared_experts > self._shared_rows
            self.shared = SharedExperts(shapes, self._options(), **factory_kwargs) if separate else None
            self.correction: Tensor | None
            correction = torch.zeros(experts, dtype=torch.float32, device=device) if correction_bias else None
            self.register_buffer("correction", correction)
            self.reset_parameters()

    up: torch.nn.Parameter
    down: torch.nn.Parameter
    up_bias: torch.nn.Parameter | None
    down_bias: torch.nn.Parameter | None

    def _check_degrees(self, intermediate: int) -> None:
        """Raises a ValueError for experts, or an intermediate size, that the ranks cannot divide."""
        ranks = self._expert_mesh
        if ranks is None:
            return
        if self.experts % ranks.ep:
            got, allowed = f"{self.experts} experts on {ranks.ep} ranks", "the same number of experts on each rank"
            raise make_error(ValueError, "MoE", "experts", got, allowed)
        multiple = ranks.etp * (128 if self.fp8 else 32)
        if ranks.etp > 1 and (intermediate % multiple or self.glu_layout != LAYOUTS[0]):
            got = f"{intermediate}, {self.glu_layout!r}, on {ranks.etp} ranks of etp_dim"
            raise make_error(ValueError, "MoE", "intermediate", got, f"a multiple of {multiple}, {LAYOUTS[0]!r}")

    def _empty_weight(self, name: str, size: tuple[int, ...], device: Any, dtype: torch.dtype) -> Tensor:
        """The memory of all experts' weights of a size: over ranks a DTensor."""
        shape = (self.experts + self._shared_rows, *size)
        if self._expert_mesh is None:
            return torch.empty(shape, device=device, dtype=dtype)
        etp_dim = {"up": 1, "up_bias": 1, "down": 2, "down_bias": None}[name]
        return self._expert_mesh.shard(shape, etp_dim, device, dtype)

    @property
    def _shared_rows(self) -> int:
        """The number of shared experts that are rows of ``up`` and ``down``: over ranks they are in ``shared``."""
        return self.shared_experts if self._expert_mesh is None and self._share is None else 0

    def reset_parameters(self) -> None:
        """Initializes the experts' parameters as ``torch.nn.Linear`` does, and ``correction`` with 0.

        Ranks that begin with the same seed of ``torch.manual_seed`` have parts of the weights that one rank with all
        experts has, whatever the mesh and ``fully_shard`` are.
        """
        for weight, bias in (("up", "up_bias"), ("down", "down_bias")):
            bound = getattr(self, weight).shape[-1] ** -0.5
            for name in (weight, bias):
                parameter = getattr(self, name)
                if parameter is not None:
                    seed = draw_seed(parameter)
                    uniform_(parameter, bound, seed)
                    if self.shared is not None:
                        uniform_(getattr(self.shared, name), bound, seed + self.experts)
        if self.correction is not None:
            self.correction.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A layer with copies of the parameters and the same group."""
        for each in (self._expert_mesh, *(self._expert_mesh or ())):
            memo[id(each)] = each
        clone = memo[id(self)] = type(self).__new__(type(self))
        clone.__setstate__(copy.deepcopy(self.__dict__, memo))
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """The state without process groups, with this rank's share of the experts as plain tensors."""
        state, ranks = self.__dict__.copy(), self._expert_mesh
        if ranks is None:
            return state
        state["_expert_mesh"], state["_share"] = None, (ranks.coordinate, tuple(ranks.mesh.shape))
        state["_is_checked"] = False
        state["_parameters"] = parameters = dict(self._parameters)
        for name in _EXPERT_PARAMETERS:
            weight = local_shard(name, parameters[name], ranks)
            if weight is not None:
                parameters[name] = torch.nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
        return state

    def set_group(self, group: Any = None, *, mesh: Any = None, ep_dim: str = "ep", etp_dim: str | None = None) -> None:
        """Sets the process group or mesh of an unpickled layer; arguments as those of the constructor.

        Its parameters become DTensors: call it before an optimizer is made.

        Raises:
            ValueError: the weights are another rank's share; or the layer was not pickled.
        """
        if self._share is None:
            raise make_error(ValueError, "MoE.set_group", "layer", "one that has its ranks", "one that was unpickled")
        ranks = expert_mesh(group, mesh, ep_dim, etp_dim, self.router.weight.device)
        share = None if ranks is None else (ranks.coordinate, tuple(ranks.mesh.shape))
        if ranks is None or share != self._share:
            got, allowed = ("none" if share is None else _describe(*share)), f"{_describe(*self._share)}, as pickled"
            hint = "for another number of ranks, save state dicts by torch.distributed.checkpoint"
            raise make_error(ValueError, "MoE.set_group", "ranks", got, allowed, hint)
        self._share, self._expert_mesh = None, ranks
        for name in _EXPERT_PARAMETERS:
            weight = self._parameters[name]
            if weight is not None:
                size = tuple(weight.shape[1:])
                etp_dim_of = {"up": 1, "up_bias": 1, "down": 2}.get(name)
                if etp_dim_of is not None:
                    size = tuple(s * (ranks.etp if i == etp_dim_of else 1) for i, s in enumerate(size, 1))
                whole = self._empty_weight(name, size, device=weight.device, dtype=weight.dtype)
                local_part(whole)[0].copy_(weight.detach())
                setattr(self, name, torch.nn.Parameter(whole, requires_grad=weight.requires_grad))

    def _check_share(self, what: str) -> None:
        """Raises a RuntimeError for a layer that was unpickled on one rank and has not got its ranks back."""
        if self._share is not None:
            got, allowed = f"none: these are the experts of {_describe(*self._share)}", "the ranks that it had"
            hint = "call layer.set_group with the group or mesh of the constructor"
            raise make_error(RuntimeError, f"MoE.{what}", "group", got, allowed, hint)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Refuses one rank's share, which would pass for all experts."""
        self._check_share("state_dict")
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Takes all experts' weights on each rank; shared experts may be rows of ``up`` or in ``shared``."""
        self._check_share("load_state_dict")
        self._move_shared(state_dict, prefix)
        for name in _EXPERT_PARAMETERS:
            parameter, value = self._parameters.get(name), state_dict.get(prefix + name)
            if parameter is not None and isinstance(value, Tensor):
                state_dict[prefix + name], reason = share_of(parameter, value)
                if reason:
                    errors.append(f'MoE: "{prefix}{name}" {reason}.')
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if self._gathers_fp8:  # with ``assign`` the local tensors are other ones
            attach(self, _FP8_PARAMETERS)

    def _move_shared(self, state_dict: Any, prefix: str) -> None:
        """Moves shared experts in a state dict to where this layer has them."""
        for name in _EXPERT_PARAMETERS if self.shared_experts else ():
            key, shared_key = prefix + name, f"{prefix}shared.{name}"
            value, has_shared = state_dict.get(key), shared_key in state_dict
            if value is None:
                continue
            if self.shared is None and has_shared:
                state_dict[key] = torch.cat([value, state_dict.pop(shared_key)])
            elif self.shared is not None and not has_shared and len(value) == self.experts + self.shared_experts:
                state_dict[key], state_dict[shared_key] = value.split([self.experts, self.shared_experts])

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        """Called by ``to``, ``half`` and similar methods; ``correction`` stays float32."""
        before = self.correction
        super()._apply(fn, recurse)
        if self.correction is not None and before is not None and self.correction.dtype is not before.dtype:
            self.correction = before.to(self.correction.device)
        if self._gathers_fp8:  # the local tensors may be other ones
            attach(self, _FP8_PARAMETERS)
        return self

    def load_gate_up(self, gate_up: Tensor) -> None:
        """Copies weights (experts + shared_experts, 2 intermediate, hidden) into ``up``: concatenated, gates first.

        Over ranks, each takes its share of all experts' weights, without shared experts.
        """
        check_tensor("MoE.load_gate_up", "gate_up", gate_up)
        self._check_share("load_gate_up")
        if self.activation not in GATED or gate_up.shape != self.up.shape:
            got = f"{tuple(gate_up.shape)}, for the activation {self.activation!r}"
            raise make_error(ValueError, "MoE.load_gate_up", "gate_up", got, f"{tuple(self.up.shape)}, of a gated one")
        if self.glu_layout == "interleaved":
            gate_up = gate_up.detach().unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)
        local, part = local_part(self.up)
        with torch.no_grad():
            local.copy_(gate_up[part])

    def weights_changed(self) -> None:
        """With ``fp8``: the next pass quantizes the experts' weights again.

        Needed after a change that neither a ``torch.optim.Optimizer`` made nor PyTorch's version counter counts, such
        as one of ``layer.up.data``.
        """
        weights_changed(self.up, self.down)
        if self.shared is not None:
            weights_changed(self.shared.up, self.shared.down)

    def enable_fsdp_fp8_all_gather(self) -> None:
        """FSDP2 gathers ``up`` and ``down`` in e4m3 from now on: half the bytes, and the same results, bit by bit.

        Call it after ``fully_shard`` of this layer and before its first forward pass, on all ranks. Each rank quantizes
        its shard once per optimizer step, and float32 scales of 128 x 128 blocks travel with the values. Gathered
        weights then have no 16-bit memory: only the layer reads them. Parameters, gradients, optimizers and state dicts
        are as without it. Shared experts of a layer with ``mesh`` are gathered in 16 bits.

        Raises:
            ValueError: ``fp8`` is not "blockwise" or "blockwise_save16"; ``into_main_grad``; a sharding that splits
                experts, or is uneven; weights on the CPU by ``CPUOffloadPolicy``. At the first forward pass: weights
                are gathered in a dtype other than bfloat16 and float16.
            RuntimeError: ``fully_shard`` has not been called, or the layer has run.
        """
        where = "MoE.enable_fsdp_fp8_all_gather"
        if not self.fp8.startswith("blockwise") or self.into_main_grad:
            got = f"fp8={self.fp8!r}, into_main_grad={self.into_main_grad}"
            allowed = "fp8='blockwise' or 'blockwise_save16', into_main_grad=False"
            raise make_error(ValueError, where, "layer", got, allowed, "construct it with these")
        if self._has_run:
            raise make_error(RuntimeError, where, "layer", "one that has run", "one before its first forward pass")
        expert_dims = () if self._expert_mesh is None else self._expert_mesh.mesh.mesh_dim_names
        for name in _FP8_PARAMETERS:
            check_sharding(name, getattr(self, name), expert_dims)
        attach(self, _FP8_PARAMETERS)
        self._gathers_fp8 = True

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
        total = self.experts + self._shared_rows
        shared = torch.arange(self.experts, total, dtype=torch.int32, device=indices.device)
        return torch.cat([indices, shared.expand(indices.shape[0], -1)], 1)

    def forward(self, x: Tensor, routing: Routing | None = None, *, return_routing: bool = False) -> Any:
        """``[..., hidden]``, of the shape and dtype of x.

        Args:
            x: ``[..., hidden]``.
            routing: The result of :meth:`route` for x, if called.
            return_routing: Returns a pair: the result and a :class:`cudnn.moe.RouterOutput`, from which losses of the
                router are computed, such as :func:`cudnn.moe.load_balance_loss`. Also under ``fully_shard``, where
                :meth:`route` has no weights.
        """
        if self._gathers_fp8 and torch.compiler.is_compiling():
            return self._run_eagerly(x, routing, return_routing)
        if torch.compiler.is_compiling() or self._has_run:
            return self._run(x, routing, return_routing)
        if self._expert_mesh is not None:
            result = self._run(x, routing, return_routing)
            self._has_run = True
            return result
        with CompileAhead(compile_ahead.of_module(self, tokens_of("MoE", x))):
            result = self._run(x, routing, return_routing)
        self._has_run = True
        return result

    def compile(self, *args: Any, max_tokens: int | None = None, **kwargs: Any) -> None:
        """With ``max_tokens``: compiles the kernels of any number of tokens up to it, in parallel, and waits for them.

        The weights are on the GPU then. Without it, this is ``torch.nn.Module.compile``.

        Raises:
            RuntimeError: the weights are not on a GPU that has kernels; the layer is over ranks.
        """
        if max_tokens is None:
            super().compile(*args, **kwargs)
            return
        if self._expert_mesh is not None:
            raise make_error(RuntimeError, "MoE.compile", "max_tokens", max_tokens, "None for a layer over ranks")
        if not self.up.is_cuda:
            hint = "move the layer to the GPU; `cudnn cache warm --moe` needs none"
            raise make_error(RuntimeError, "MoE.compile", "device", self.up.device, "cuda", hint)
        arch = launch.device_architecture(self.up.get_device())
        num_sms = FusedAPI.num_sms(self.up.get_device())
        compile_all(compile_ahead.module_kernels(self, max_tokens, arch, num_sms))

    @torch.compiler.disable(reason="weights that FSDP2 gathered in e4m3 are no plain tensors")
    def _run_eagerly(self, x: Tensor, routing: Routing | None, return_routing: bool) -> Any:
        return self._run(x, routing, return_routing)

    def _run(self, x: Tensor, routing: Routing | None, return_routing: bool) -> Any:
        tokens = tokens_of("MoE", x)
        if not self._is_checked:
            self._check_share("forward")
            self._check_same_layer(tokens)
        if return_routing and routing is not None:
            allowed = "None with return_routing: the layer routes"
            raise make_error(ValueError, "MoE", "routing", type(routing).__name__, allowed, "leave one of them out")
        if self.into_main_grad and torch.is_grad_enabled() and self._main_grads() is None:
            hint = "set both, or call the layer under torch.no_grad()"
            raise make_error(
                ValueError, "MoE", "main_grad of up and down", None, "float32 tensors of their shapes", hint
            )
        parameters = [local_shard(name, getattr(self, name), self._expert_mesh) for name in _EXPERT_PARAMETERS]
        if self._gathers_fp8 and not all(isinstance(weight, GatheredWeight) for weight in parameters[:2]):
            got, allowed = "parameters that were replaced after enable_fsdp_fp8_all_gather", "those that FSDP2 gathers"
            raise make_error(RuntimeError, "MoE", "up, down", got, allowed, "change parameters in place")
        inputs = self._inputs_of_one_node(tokens, parameters) if routing is None else None
        if inputs is not None:
            y, output = self._one_node(inputs, return_routing)
        else:
            logits: Any = None
            if routing is None:
                logits, routing = self.route(tokens)
            y = self._run_experts(tokens, routing, parameters)
            output = RouterOutput(logits, routing.weights, routing.indices, routing.offsets) if return_routing else None
        if self.shared is not None:
            y = y + self.shared(tokens, self._shared(tokens))
        y = in_shape_of(x, y)
        return (y, output) if return_routing else y

    def _one_node(self, inputs: Sequence[Any], return_routing: bool) -> tuple[Tensor, RouterOutput | None]:
        """y (T, hidden), by one autograd node, and the router's output if wanted."""
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
            result = LayerFunction.apply(self, return_routing, *inputs)
            return (result[0], RouterOutput(*result[1:])) if return_routing else (result, None)
        tokens, shared, router, *parameters = inputs
        y, _, output = forward(self, tokens, shared, router, parameters, False, return_routing)
        return y, output

    def _run_experts(self, tokens: Tensor, routing: Routing, parameters: Sequence[Tensor | None]) -> Tensor:
        """The experts' outputs (T, hidden) for a routing, operator by operator, over the layer's ranks."""
        up, down, up_bias, down_bias = parameters
        if self._shared_rows:
            indices = self._with_shared(routing.indices)
            weights = torch.cat([routing.weights, self._shared(tokens)], 1)
            routing = Routing(indices, weights, *sort(indices, self.experts + self._shared_rows))
        ranks = self._expert_mesh
        etp_group = None if ranks is None or ranks.etp == 1 else ranks.etp_group
        if etp_group is not None:
            summed: list[Any] = sum_gradients(etp_group, tokens, routing.weights, down_bias)
            tokens, weights, down_bias = summed
            routing = routing._replace(weights=weights)
            down_bias = None if down_bias is None else down_bias / dist.get_world_size(etp_group)
        arguments: Any = (up, down, up_bias, down_bias)
        options = {"main_grads": self._main_grads(), "group": self._exchange_group(), "time_limit": self._time_limit}
        y = moe_mlp(tokens, routing, *arguments, **self._options(), **options)
        return y if etp_group is None else sum_over(etp_group, y)

    def _options(self) -> dict[str, Any]:
        """The options of ``moe_mlp`` that describe an expert."""
        options = {"activation": self.activation, "glu_layout": self.glu_layout, "fp8": self.fp8}
        return {**options, "batch_invariant": self.batch_invariant, **self._act_params}

    def _exchange_group(self) -> Any:
        """The group over which tokens are exchanged; None if one rank has all experts, except by an ``Exchange``."""
        ranks = self._expert_mesh
        return None if ranks is None or (ranks.ep == 1 and not isinstance(ranks.group, Exchange)) else ranks.group

    def _inputs_of_one_node(self, tokens: Tensor, parameters: Sequence[Tensor | None]) -> Sequence[Any] | None:
        """The tensors of a call that can be one autograd node; None if tracing, a dispatch mode, a hook or an override
        has to see the call: tokens, shared experts' weights, the router's weight, parameters.
        """
        router, ranks, overrides_route = self.router, self._expert_mesh, type(self).route is not MoE.route
        if overrides_route or not tokens.shape[0]:
            return None
        if ranks is not None and (self._exchange_group() is not None or ranks.etp > 1):
            return None
        dtype = parameters[0].dtype  # pyright: ignore[reportOptionalMemberAccess]
        if type(router) is not _Router or router.is_customized or (weight := router.weight).dtype is not dtype:
            return None
        if needs_dispatch([t for t in (tokens, weight, *parameters) if t is not None], True):
            return None
        router.check(tokens)
        return tokens, self._shared(tokens) if self._shared_rows else None, weight, *parameters

    def _padded_router(self, router: Tensor) -> Tensor:
        """The router's weight, contiguous, with rows of zeros for shared experts."""
        shared = self._shared_rows
        return torch.nn.functional.pad(router, (0, 0, 0, shared)) if shared else router.contiguous()

    def _experts(self, parameters: Sequence[Any]) -> Experts:
        up, down, up_bias, down_bias = parameters
        options = (self.activation, tuple(self._act_params.values()), self.glu_layout, self.fp8, self.batch_invariant)
        return Experts([up], [down], up_bias, down_bias, *options)

    def _main_grads(self) -> tuple[Tensor, Tensor] | None:
        up, down = (getattr(w, "main_grad", None) if self.into_main_grad else None for w in (self.up, self.down))
        return None if up is None or down is None else (local_part(up)[0], local_part(down)[0])

    def _main_grad_lists(self) -> tuple[list[Tensor], list[Tensor]]:
        """The ``main_grad`` buffers of up and of down; empty lists without ``into_main_grad``."""
        buffers = self._main_grads()
        return ([], []) if buffers is None else ([buffers[0]], [buffers[1]])

    @torch.compiler.disable(reason="ranks compare their layers")
    def _check_same_layer(self, tokens: Tensor) -> None:
        """At the first call the ranks compare their layers' configurations: see the operator's errors."""
        ranks: Any = self._expert_mesh
        config = describe_config(
            hidden=self.up.shape[2],
            intermediate=self.down.shape[2],
            experts=self.experts,
            top_k=self.top_k,
            dtype=self.up.dtype,
            **self._options(),
            bias=self.up_bias is not None,
            correction_bias=self.correction is not None,
            shared_experts=self.shared_experts,
            shared_gate=self.shared_gate is not None,
            scaling_factor=self._scaling_factor,
            **dict(zip(_RULE, self._rule, strict=True)),
            etp=ranks.etp,
        )
        if ranks.etp > 1:
            checksum = zlib.crc32(tokens.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
            same = f"{config}; tokens=({len(tokens)} with the checksum {checksum})"
            check_all_ranks(ranks.etp_group, same, 0, self._time_limit, "MoE")
        if self._exchange_group() is not None:
            sizes = (self.experts, self.top_k, tokens.shape[-1], autocast_type(tokens) or self.up.dtype)
            check_same_layer("MoE", ranks.group, config, sizes, tokens, self._time_limit)
        self._is_checked = True

    def extra_repr(self) -> str:
        sizes = f"{self.up.shape[2]}, {self.down.shape[2]}, experts={self.experts}, top_k={self.top_k}"
        shared = f", shared_experts={self.shared_experts}" if self.shared_experts else ""
        return f"{sizes}{shared}, {self.activation}{f', fp8={self.fp8!r}' if self.fp8 else ''}"


def _describe(coordinate: Sequence[int], shape: Sequence[int]) -> str:
    """A rank's position in a mesh, in words."""
    dims = zip(("ep_dim", "etp_dim"), coordinate, shape, strict=False)
    return ", ".join(f"rank {index} of {size} of {dim}" for dim, index, size in dims)
