"""Megatron-Core's ``MoELayer`` with our experts, against its ``SequentialMLP``: on the CPU, over gloo.

Megatron-Core asks CUDA for its device and for a stream even if all tensors are on the CPU; ``on_the_cpu`` answers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core import optimizer as megatron_optimizer  # noqa: E402
from megatron.core.activations import quick_gelu, squared_relu  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.optimizer import FP32Optimizer, param_group_identifier_keys  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from cudnn.integrations import megatron as cudnn_megatron  # noqa: E402
from cudnn.ops import moe_experts  # noqa: E402
from support.ranks import run_processes  # noqa: E402

HIDDEN, INNER, EXPERTS, TOP_K = 64, 64, 8, 2
SILU = torch.nn.functional.silu
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {"gated_linear_unit": True, "activation_func": SILU},
    "clamped": {"gated_linear_unit": True, "activation_func": SILU, "activation_func_clamp_value": 1.0},
    "geglu": {
        "gated_linear_unit": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 1.5,
        "glu_linear_offset": 1.0,
    },
    "srelu": {"activation_func": squared_relu},
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_for_cuda(monkeypatch)


def answer_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: event, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **_: torch.empty(0))
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream)
    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", moved)
    monkeypatch.setattr(filesystem_async, "_process_memory", lambda: 0)  # without psutil the writing process dies
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # without TE the module has no such name


def moved(tensor: torch.Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron does with tensors on a GPU alone."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


@pytest.fixture
def alone(tmp_path: pathlib.Path) -> Iterator[None]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def config(dispatcher: str = "allgather", activation: str = "swiglu", **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "init_method_std": 0.3,
        "moe_router_load_balancing_type": "none",
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
    }
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "ffn_hidden_size": INNER, "moe_ffn_hidden_size": INNER}
    routing = {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "moe_token_dispatcher_type": dispatcher}
    return TransformerConfig(num_attention_heads=4, **(sizes | routing | defaults | ACTIVATIONS[activation] | options))


def layers(c: Any) -> tuple[MoELayer, MoELayer]:
    """Megatron's, and one with our experts and the same weights."""
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(0)
    theirs, ours = MoELayer(c, spec.submodules), MoELayer(c, cudnn_megatron.use_experts(spec).submodules)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def weights(layer: MoELayer, grad: bool = False) -> list[torch.Tensor]:
    """(E, N, H) and (E, H, I) of the local experts, or their gradients."""
    get: Callable[[Any], torch.Tensor] = lambda w: w.grad if grad else w.detach()  # noqa: E731
    experts: Any = layer.experts
    if isinstance(experts, cudnn_megatron.CudnnExperts):
        return [get(experts.weight1), get(experts.weight2)]
    linears = [(e.linear_fc1.weight, e.linear_fc2.weight) for e in experts.local_experts]
    return [torch.stack([get(w) for w in each]) for each in zip(*linears, strict=True)]


def results(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y, bias = layer(x)
    assert bias is None
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, layer.router.weight.grad, *weights(layer, True)]  # pyright: ignore


def tokens(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(10, 2, HIDDEN, generator=generator), torch.randn(10, 2, HIDDEN, generator=generator)


def same(c: Any, rank: int = 0) -> None:
    theirs, ours = layers(c)
    for left, right in zip(results(ours, *tokens(rank)), results(theirs, *tokens(rank)), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_as_sequential_mlp(activation: str) -> None:
    same(config("alltoall" if activation == "geglu" else "allgather", activation))


@pytest.mark.usefixtures("alone")
def test_no_tokens_for_an_expert_and_probabilities_on_the_input() -> None:
    same(config("alltoall", moe_router_topk=1, moe_apply_probs_on_input=True, moe_router_pre_softmax=True))


@pytest.mark.usefixtures("alone")
def test_biases_are_added_and_none_is_returned() -> None:
    experts: Any = cudnn_megatron.CudnnExperts(EXPERTS, config(add_bias_linear=True))
    torch.nn.init.normal_(experts.bias1)
    torch.nn.init.normal_(experts.bias2)
    x, probs, counts = torch.randn(20, HIDDEN), torch.rand(20), torch.tensor([3, 0, 4, 1, 2, 5, 0, 5])
    y, bias = experts(x, counts, probs)
    assert bias is None
    matrices = (experts.weight1, experts.weight2, probs, experts.bias1, experts.bias2)
    assert torch.equal(y, moe_experts(x, counts, *matrices, glu_layout="concatenated"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_biases_as_sequential_mlp(activation: str) -> None:
    """The output and all gradients, those of the biases too."""
    theirs, ours = layers(config(activation=activation, add_bias_linear=True))
    for expert in theirs.experts.local_experts:  # Megatron adds to a view in place, which autograd refuses
        expert.linear_fc2.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))
    linears = [(e.linear_fc1.bias, e.linear_fc2.bias) for e in theirs.experts.local_experts]
    with torch.no_grad():
        for bias in itertools.chain(*linears):
            bias.normal_()
    ours.load_state_dict(theirs.state_dict())
    for left, right in zip(results(ours, *tokens()), results(theirs, *tokens()), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    for left, right in zip((ours.experts.bias1, ours.experts.bias2), zip(*linears, strict=True), strict=True):
        torch.testing.assert_close(left.grad, torch.stack([bias.grad for bias in right]), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("delayed", [False, True])
def test_recomputed_layer(delayed: bool) -> None:
    """``recompute_modules=["moe"]`` changes no bit of the output and of the gradients."""
    expected = results(layers(config())[1], *tokens())
    layer = layers(config(recompute_granularity="selective", recompute_modules=["moe"]))[1]
    assert layer.moe_layer_recompute
    layer.experts.config.delay_wgrad_compute = delayed
    calls: list[bool] = []
    layer.experts.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    x = tokens()[0].requires_grad_()
    y, _ = layer(x)
    y.backward(tokens()[1])
    layer.backward_dw()
    assert calls == [False, True]
    actual = [y.detach(), x.grad, layer.router.weight.grad, *weights(layer, True)]
    for left, right in zip(actual, expected, strict=True):
        assert torch.equal(left, right)  # pyright: ignore


@pytest.mark.usefixtures("alone")
def test_attributes_that_megatron_reads() -> None:
    experts: Any = cudnn_megatron.CudnnExperts(EXPERTS, config())
    assert experts.weight1.allreduce
    read = [(w.tensor_model_parallel, w.partition_dim, w.partition_stride) for w in experts.parameters()]
    assert read == [(True, 1, 2), (True, 2, 1)]


@pytest.mark.usefixtures("alone")
def test_the_builder_of_later_versions() -> None:
    groups = moe_utils.get_default_pg_collection()
    builder: Any = cudnn_megatron.CudnnExperts
    assert builder(4, config(), pg_collection=groups, name="mlp.experts").num_local_experts == 4


@pytest.mark.usefixtures("alone")
def test_specs() -> None:
    """Of a layer and of a block; a spec without experts is refused."""
    layer = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    ours = cudnn_megatron.use_experts(layer)
    assert ours.submodules.mlp.submodules.experts.module is cudnn_megatron.CudnnExperts
    assert layer.submodules.mlp.submodules.experts.module is not cudnn_megatron.CudnnExperts
    block: Any = get_gpt_decoder_block_spec(config(), use_transformer_engine=False)
    (replaced,) = cudnn_megatron.use_experts(block).layer_specs
    assert replaced.submodules.mlp.submodules.experts.module is cudnn_megatron.CudnnExperts
    with pytest.raises(ValueError, match="a spec with an MoE layer"):
        cudnn_megatron.use_experts(get_gpt_layer_local_spec())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_func": torch.nn.functional.gelu}, "activation_func: got gelu"),
        ({"fp8": "hybrid"}, "fp8"),
        ({"moe_ffn_hidden_size": None}, "moe_ffn_hidden_size"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    c = config()
    for name, value in change.items():
        setattr(c, name, value)
    with pytest.raises(ValueError, match=message):
        cudnn_megatron.CudnnExperts(EXPERTS, c)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recipe", [True, "blockwise"])
def test_fp8(recipe: bool | str) -> None:
    """Gates and up projections are interleaved in each pass; gradients reach the parameters, not ``main_grad``."""
    sizes = {"hidden_size": 128, "moe_ffn_hidden_size": 128, "params_dtype": torch.bfloat16}
    c = config(**sizes, gradient_accumulation_fusion=True)
    x, counts, probs = torch.randn(40, 128).bfloat16(), torch.tensor([10, 0, 23, 7]), torch.rand(40)
    results = []
    for fp8 in (False, recipe):
        torch.manual_seed(0)
        experts = cudnn_megatron.CudnnExperts(4, c, fp8=fp8)
        y, _ = experts(x.requires_grad_(), counts, probs)
        y.float().square().mean().backward()
        results.append({"y": y.detach(), "x": x.grad, **{name: w.grad for name, w in experts.named_parameters()}})
        x.grad = None
    for name, right in results[0].items():
        error = (results[1][name].float() - right.float()).norm() / right.float().norm()
        assert 0 < error < 0.1, name


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [({"activation": "srelu"}, "fp8 without gated_linear_unit"), ({"delay_wgrad_compute": True}, "with fp8")],
)
def test_fp8_refused(options: dict[str, Any], message: str) -> None:
    c = config(activation=options.pop("activation", "swiglu"))
    for name, value in options.items():
        setattr(c, name, value)
    with pytest.raises(ValueError, match=message):
        cudnn_megatron.CudnnExperts(EXPERTS, c, fp8="blockwise")


@pytest.mark.usefixtures("alone")
def test_delayed_weight_gradients() -> None:
    """They come by ``backward_dw``, in the order of the backward passes, and add up."""
    _, layer = layers(config())
    expected = [results(layer, *tokens(rank)) for rank in range(2)][1]
    layer.zero_grad()
    layer.experts.config.delay_wgrad_compute = True
    calls: list[int] = []
    layer.experts.register_wgrad_accumulation_and_reduce_hooks(lambda *_: calls.append(1))
    for rank in range(2):
        x = tokens(rank)[0].requires_grad_()
        layer(x)[0].backward(tokens(rank)[1])
    assert torch.equal(x.grad, expected[1])  # pyright: ignore
    assert layer.experts.weight1.grad is None
    for count in (1, 2, 2):
        layer.backward_dw()
        assert len(calls) == count
    for left, right in zip(weights(layer, True), expected[3:], strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("delayed", [False, True])
def test_gradients_into_main_grad(delayed: bool) -> None:
    """Under Megatron's DDP with ``overlap_grad_reduce``, which needs a gradient of each parameter."""
    _, layer = layers(config())
    expected = results(layer, *tokens())[2:]
    layer.zero_grad()
    layer.experts.config.gradient_accumulation_fusion = True
    layer.experts.config.delay_wgrad_compute = delayed
    for weight in (layer.experts.weight1, layer.experts.weight2):
        weight.skip_backward_post_hook = delayed
    options = {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True, "delay_wgrad_compute": delayed}
    wrapped = DistributedDataParallel(layer.config, DistributedDataParallelConfig(**options), layer)
    for _ in range(2):
        wrapped.zero_grad_buffer()
        wrapped(tokens()[0])[0].backward(tokens()[1])
        layer.backward_dw()
        wrapped.finish_grad_sync()
        for parameter, right in zip(layer.parameters(), expected, strict=True):
            assert parameter.grad is None
            torch.testing.assert_close(parameter.main_grad, right)  # pyright: ignore
        assert layer.experts.weight1.grad_added_to_main_grad


@pytest.mark.usefixtures("alone")
def test_the_whole_layer_backend() -> None:
    c = config()
    _, layer = layers(c)
    backend = cudnn_megatron.CudnnMoEBackend(EXPERTS, c)
    backend.load_state_dict(layer.experts.state_dict())
    (x, dy), twin = tokens(), tokens()[0].requires_grad_()
    expected = results(layer, x, dy)
    layer.router.weight.grad = None
    probs, routing_map = layer.route(twin)
    y = backend(twin, probs, routing_map)
    y.backward(dy)
    actual = [y.detach(), twin.grad, layer.router.weight.grad, backend.weight1.grad, backend.weight2.grad]
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def parallelized(ep: int = 1, tp: int = 1) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp
    )


def make(kind: int, ep: int, seed: int = 3) -> MoELayer:
    """Megatron's layer (0), or one with our experts (1)."""
    parallelized(ep)
    torch.manual_seed(seed)
    return layers(config(expert_model_parallel_size=ep))[kind]


def over_degrees(rank: int, ep: int) -> None:
    for dispatcher in ("allgather", "alltoall"):
        parallelized(ep)
        same(config(dispatcher, expert_model_parallel_size=ep), rank)


def expert_tensor_parallel(rank: int) -> None:
    """Each rank has half of each expert: as Megatron's."""
    parallelized(tp=2)
    options = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "sequence_parallel": True}
    same(config("alltoall", **options), rank)


def checkpoints(rank: int, path: pathlib.Path, singleton: bool) -> None:
    """From and to every degree, and from and to Megatron's experts."""
    options = {"metadata": {"singleton_local_shards": singleton}} if singleton else {}
    cases = [((1, 2), (1, 1)), ((0, 1), (1, 2)), ((1, 1), (1, 2)), ((1, 2), (0, 1)), ((0, 2), (1, 1))]
    for source, target in cases[:2] if singleton else cases:
        folder = path / f"{source}{target}"
        folder.mkdir(exist_ok=True)
        layer = make(*source)
        full = gathered(layer, source[1])
        dist_checkpointing.save(layer.sharded_state_dict(**options), str(folder))
        other = make(*target, seed=5)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(**options), str(folder)))
        for left, right in zip(gathered(other, target[1]), full, strict=True):
            assert torch.equal(left, right), (source, target)
            assert left.abs().sum()


def answer_for_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's optimizers ask for tensors on a GPU and for TransformerEngine's Adam."""
    monkeypatch.setattr(megatron_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    for module in (megatron_optimizer, distrib_optimizer):
        monkeypatch.setattr(module, "Adam", FusedAdam)
    for name in ("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER"):
        monkeypatch.setattr(distrib_optimizer, name, True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    for name in ("tensor", "zeros"):
        monkeypatch.setattr(torch, name, functools.partial(on_the_host, getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "type", functools.partialmethod(type_on_a_gpu, type_of=torch.Tensor.type))


def on_the_host(function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    return function(*args, **(kwargs | {"device": None} if kwargs.get("device") == "cuda" else kwargs))


def type_on_a_gpu(tensor: torch.Tensor, *args: Any, type_of: Callable[..., Any], **kwargs: Any) -> Any:
    """The name that Megatron's optimizers compare, such as "torch.cuda.FloatTensor"."""
    result = type_of(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result


class FusedAdam(torch.optim.Optimizer):
    """Adam with TransformerEngine's state: DistributedOptimizer does not load that of torch's Adam."""

    def __init__(self, params: Any, lr: float, eps: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                for name, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
                    state.setdefault(name, torch.zeros_like(parameter)).lerp_(parameter.grad**power, 0.1)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                parameter -= group["lr"] * group["step"] * update


def optimizer_of(layer: MoELayer, distributed: bool) -> Any:
    """Adam: Megatron's distributed optimizer, or its optimizer of float32 parameters, one for all of them."""
    options = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0, use_distributed_optimizer=distributed)
    if not distributed:
        for parameter in layer.parameters():
            parameter.main_grad = torch.empty_like(parameter)
        group = {"params": list(layer.parameters()), **dict.fromkeys(param_group_identifier_keys, 1.0)}
        return FP32Optimizer(torch.optim.Adam([group], lr=0.1), options, lambda *_: None)
    c = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return get_megatron_optimizer(options, [DistributedDataParallel(layer.config, c, layer)])


def step(layer: MoELayer, optimizer: Any, number: int) -> None:
    """One step with gradients that depend on the weights alone, elementwise."""
    for parameter in layer.parameters():
        parameter.main_grad.copy_((parameter.detach() * 10 + number).sin())  # pyright: ignore
    assert optimizer.step()[0]


def resumed(rank: int, path: pathlib.Path, distributed: bool) -> None:
    """A second step after loading the layer and the optimizer's state leads to the same weights."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    # Megatron chains two optimizers with expert parallelism, and one without, which do not load each other's state.
    cases = [((0, 2), (1, 2)), ((1, 1), (0, 1))] if distributed else [((1, 2), (1, 1)), ((0, 1), (1, 2))]
    for source, target in cases:
        folder = path / f"{source}{target}"
        folder.mkdir(parents=True, exist_ok=True)
        layer = make(*source)
        optimizer = optimizer_of(layer, distributed)
        step(layer, optimizer, 1)
        state = layer.sharded_state_dict()
        saved = {"model": state, "optimizer": optimizer.sharded_state_dict(state, metadata=metadata)}
        dist_checkpointing.save(saved, str(folder))
        step(layer, optimizer, 2)
        expected = gathered(layer, source[1])
        other = make(*target, seed=5)
        optimizer = optimizer_of(other, distributed)
        step(other, optimizer, 3)  # which allocates the state
        state = other.sharded_state_dict()
        loads = {"model": state, "optimizer": optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)}
        loaded = dist_checkpointing.load(loads, str(folder))
        other.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step(other, optimizer, 2)
        for left, right in zip(gathered(other, target[1]), expected, strict=True):
            assert torch.equal(left, right), (source, target, distributed)


def whole_layer_backend(rank: int) -> None:
    """Against Megatron's dispatcher and experts, with other tokens, and another number of them, on each rank."""
    parallelized(2)
    c = config("alltoall", expert_model_parallel_size=2)
    theirs, ours = layers(c)
    backend = cudnn_megatron.CudnnMoEBackend(EXPERTS // 2, c)
    backend.load_state_dict(ours.experts.state_dict())
    x, dy = (each[: 10 - 3 * rank] for each in tokens(rank))
    expected = results(theirs, x, dy)
    theirs.router.weight.grad = None
    twin = x.clone().requires_grad_()
    y = backend(twin, *theirs.route(twin))
    y.backward(dy)
    actual = [y.detach(), twin.grad, theirs.router.weight.grad, backend.weight1.grad, backend.weight2.grad]
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def gathered(layer: MoELayer, ep: int) -> list[torch.Tensor]:
    """The weights of all ranks' experts."""
    result = []
    for weight in weights(layer):
        parts = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(parts, weight.contiguous())
        result.append(torch.cat(parts) if ep == 2 else weight)
    return result


def initialized(rank: int) -> None:
    """The same weights with either degree."""
    each = []
    for ep in (1, 2):
        parallelized(ep)
        torch.manual_seed(3)
        layer = MoELayer(
            config(expert_model_parallel_size=ep),
            cudnn_megatron.use_experts(get_moe_module_spec(use_te=False, num_experts=EXPERTS)).submodules,
        )
        each.append(gathered(layer, ep))
    for left, right in zip(*each, strict=True):
        assert torch.equal(left, right)
        assert not torch.equal(left[0], left[EXPERTS // 2])


def everything(rank: int, path: pathlib.Path) -> None:
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    over_degrees(rank, 2)
    expert_tensor_parallel(rank)
    whole_layer_backend(rank)
    initialized(rank)
    for singleton in (False, True):
        folder = path / str(singleton)
        folder.mkdir(exist_ok=True)
        checkpoints(rank, folder, singleton)
    answer_for_optimizers(pytest.MonkeyPatch())
    for distributed in (False, True):
        resumed(rank, path / f"resumed_{distributed}", distributed)


def test_two_ranks(tmp_path: pathlib.Path) -> None:
    """Parallelism over experts and inside them, the whole-layer backend, initialization, checkpoints, optimizers.

    In a process without threads, which forks.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, check=True, timeout=200)


if __name__ == "__main__":
    answer_for_cuda(pytest.MonkeyPatch())
    run_processes(2, pathlib.Path(sys.argv[1]), functools.partial(everything, path=pathlib.Path(sys.argv[1])))
