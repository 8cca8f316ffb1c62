"""torchtitan's MoE with our experts, by its override, against its own experts: on the CPU, over gloo."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("triton", reason="torchtitan needs triton, which is not installed")
pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not installed")

import spmd_types as spmd
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder, disable_fsdp_gradient_division
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from support.ranks import run_processes

DIM, INNER, EXPERTS, TOP_K = 64, 128, 8, 2  # a rank with tensor parallelism has 64
OVERRIDE = "cudnn.integrations.torchtitan.cudnn_experts"
LAYOUT = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
BF16 = torch.bfloat16


def build(override: str | tuple[str, dict[str, Any]] | None, parallel: ParallelDims | None = None) -> Any:
    """A layer, seeded; ``parallel``: sharded over it."""
    draw = functools.partial(torch.nn.init.normal_, std=0.2)
    routed = {"dim": DIM, "num_experts": EXPERTS, "top_k": TOP_K}
    config = make_moe_config(
        num_experts=EXPERTS,
        router=make_router_config(**routed, gate_param_init={"weight": draw}, score_func="softmax"),
        routed_experts=make_routed_experts_config(
            **routed, hidden_dim=INNER, param_init=dict.fromkeys(LAYOUT, draw), comm_backend="standard"
        ),
    )
    if parallel is not None:
        set_moe_sharding_config(config, enable_ep=parallel.ep > 1, enable_sp=False, expert_param_layout=LAYOUT)
    if override is not None:
        assert len(apply_overrides(OverrideConfig(imports=[override]), config)) == 1
    torch.manual_seed(0)
    layer = config.build()
    layer.init_states()
    layer.to(BF16)
    if parallel is not None:
        layer.parallelize(parallel)
    return layer


def tokens(rank: int = 0, length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x, dy = (torch.randn(1, length, DIM, generator=generator).to(BF16) for _ in range(2))
    return x, dy


def local(x: Any) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def results(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and the gradients, by torchtitan's names."""
    x = x.clone().requires_grad_()
    y = layer(x)
    local(y).backward(dy)
    experts = layer.routed_experts.inner_experts
    grads = {name: local(w.grad) for name, w in experts.named_parameters()}
    assert x.grad is not None
    return {"y": local(y).detach(), "x": x.grad, "gate": local(layer.router.gate.weight.grad), **grads}


def check(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, expected in right.items():
        error = (left[name].float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.02, (name, error)


@pytest.fixture
def alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_as_grouped_experts() -> None:
    """The same initialization, state dict, outputs and gradients."""
    theirs, ours = build(None), build(OVERRIDE)
    left, right = ours.state_dict(), theirs.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert torch.equal(left[name], tensor), name
    check(results(ours, *tokens()), results(theirs, *tokens()))


@pytest.mark.usefixtures("alone")
def test_state_dicts_load_into_each_other() -> None:
    theirs, ours = build(None), build(OVERRIDE)
    for source, target in ((theirs, ours), (ours, theirs)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict())
        for name, tensor in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], tensor), name


@pytest.mark.usefixtures("alone")
def test_hugging_face_checkpoints() -> None:
    """Those of torchtitan's adapter for Qwen3, of and for either module."""
    attention = SimpleNamespace(rope=CosSinRoPE.Config(dim=DIM, max_seq_len=64))
    block = SimpleNamespace(moe=SimpleNamespace(num_experts=EXPERTS), attention=attention)
    config: Any = SimpleNamespace(layers=[block], enable_weight_tying=False)
    prefix = "layers.0.moe."
    for source, target in ((build(None), build(OVERRIDE)), (build(OVERRIDE), build(None))):
        saved = Qwen3StateDictAdapter(config, None).to_hf({prefix + n: t for n, t in source.state_dict().items()})
        assert len(saved) == 3 * EXPERTS + 1
        assert saved["model.layers.0.mlp.experts.7.up_proj.weight"].shape == (INNER, DIM)
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        loaded = Qwen3StateDictAdapter(config, None).from_hf(saved)
        target.load_state_dict({name.removeprefix(prefix): each for name, each in loaded.items()}, strict=False)
        for name, parameter in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], parameter), name


@pytest.mark.usefixtures("alone")
def test_one_graph_for_any_number_of_rows() -> None:
    """The experts compile with ``fullgraph``; numbers of rows lead to no recompilation."""
    experts = build(OVERRIDE).routed_experts.inner_experts
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(experts, fullgraph=True, backend=counter)
    for rows in (40, 44, 52):
        x, counts = torch.randn(rows, DIM).to(BF16), torch.tensor([10, 0, 3, 7, 4, 6, 1, 9])
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x, counts), experts(x, counts))
        assert not experts(x, counts)[40:].any()
    assert counter.frame_count == 1


@pytest.mark.usefixtures("alone")
def test_options_of_the_override() -> None:
    with pytest.raises(ValueError, match="got hidden_dim=128, dim=64; allowed: multiples of 128 and of 128"):
        build((OVERRIDE, {"fp8": True}))
    with pytest.raises(TypeError, match="unknown"):
        build((OVERRIDE, {"unknown": True}))


@pytest.mark.usefixtures("alone")
def test_forward_gemms_in_e4m3(caplog: pytest.LogCaptureFixture) -> None:
    """Gates and up projections are interleaved in each pass, which is logged; gradients reach both."""
    from cudnn.integrations import torchtitan, weights

    weights._log.cache_clear()
    draw = functools.partial(torch.nn.init.normal_, std=0.2)
    config = torchtitan.GroupedExperts.Config(
        dim=128, hidden_dim=128, num_experts=4, param_init=dict.fromkeys(LAYOUT, draw)
    )
    x, counts = torch.randn(40, 128).to(BF16), torch.tensor([10, 0, 23, 7])
    results = []
    for fp8 in (False, True):
        torch.manual_seed(0)
        experts = torchtitan.cudnn_experts(config, fp8=fp8).build()
        experts.init_states()
        experts.to(BF16)
        with caplog.at_level("WARNING", "cudnn"):
            y = experts(x, counts)
        y.float().square().mean().backward()
        results.append({"y": y.detach(), **{name: w.grad for name, w in experts.named_parameters()}})
    for name, right in results[0].items():
        error = (results[1][name].float() - right.float()).norm() / right.float().norm()
        assert 0 < error < 0.1, name
    assert "gate and up weights are interleaved in each pass, for fp8" in caplog.text


@pytest.mark.usefixtures("alone")
def test_weights_of_other_types_are_cast(caplog: pytest.LogCaptureFixture) -> None:
    """To bfloat16, as torchtitan does, which is logged."""
    from cudnn.integrations import weights

    weights._log.cache_clear()
    theirs, ours = build(None).float(), build(OVERRIDE).float()
    x, counts = torch.randn(40, DIM), torch.tensor([10, 0, 3, 7, 4, 6, 1, 9])
    with caplog.at_level("WARNING", "cudnn"):
        y = ours.routed_experts.inner_experts(x, counts)
    assert y.dtype is torch.float32
    check({"y": y}, {"y": theirs.routed_experts.inner_experts(x, counts)})
    assert "expert weights are cast from torch.float32 to torch.bfloat16 in each pass" in caplog.text


def dims(rank: int, ep: int, tp: int = 1) -> ParallelDims:
    os.environ["LOCAL_RANK"], parallel_dims.device_type = str(rank), "cpu"  # torchtitan's default is "cuda"
    set_spmd_backend("partial_dtensor")
    degrees = {"dp_replicate": 1, "dp_shard": 2 // tp, "cp": 1, "tp": tp, "pp": 1, "ep": ep, "world_size": 2}
    parallel = ParallelDims(**degrees, spmd_backend="partial_dtensor")
    parallel.build_mesh()
    return parallel


def expert_parallel(rank: int, path: pathlib.Path) -> None:
    """Weights are DTensors: against torchtitan's experts, and against one process; checkpoints into either degree."""
    parallel = dims(rank, 2)
    theirs, ours = build(None, parallel), build(OVERRIDE, parallel)
    experts = ours.routed_experts.inner_experts
    assert isinstance(experts.w1_EFD, DTensor)
    assert local(experts.w1_EFD).shape[0] == EXPERTS // 2
    actual = results(ours, *tokens(rank))
    check(actual, results(theirs, *tokens(rank)))
    alone = build(OVERRIDE)
    torch.testing.assert_close(actual["y"], alone(tokens(rank)[0]), rtol=0.03, atol=0.03)
    checkpoint.save(ours.state_dict(), checkpoint_id=str(path / "two"))
    for layer in (build(None), alone, theirs):
        with torch.no_grad():
            for parameter in layer.parameters():
                local(parameter).zero_()
        state = layer.state_dict()
        checkpoint.load(state, checkpoint_id=str(path / "two"))
        layer.load_state_dict(state)
        for name, tensor in layer.state_dict().items():
            right = ours.state_dict()[name]
            right = right.full_tensor() if isinstance(right, DTensor) else right
            assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, right), name
            assert right.any() or "bias" in name or "tokens" in name


class Decoder(torch.nn.Module):
    """What torchtitan's FSDP2 reads of a model: one block with the layer."""

    enable_weight_tying, tok_embeddings, norm, lm_head = False, None, None, None

    def __init__(self, layer: Any) -> None:
        super().__init__()
        block: Any = torch.nn.Module()
        block.moe_enabled, block.moe, block.forward = True, layer, lambda x: layer(x)
        self.layers = torch.nn.ModuleDict({"0": block})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["0"](x)


def fully_sharded(rank: int, path: pathlib.Path, ep: int, shard_dim: int = 0) -> None:
    """FSDP2 over 2 ranks: outputs, gradients and checkpoints are those of one process; weights are float32 shards."""
    parallel = dims(rank, ep)
    whole = build(OVERRIDE)
    expected: Any = [results(whole, *tokens(each)) for each in range(2)]  # gradients add up
    layer = build(OVERRIDE, parallel if ep > 1 else None).float()
    experts = layer.routed_experts.inner_experts
    model = Decoder(layer)
    options: dict[str, Any] = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    if shard_dim == 0:
        experts_mesh = {"ep_degree": ep, "edp_mesh": parallel.get_optional_mesh(["efsdp"])}
        apply_fsdp_to_decoder(model, parallel.get_mesh(["fsdp"]), **options, pp_enabled=False, **experts_mesh)
    else:  # more ranks than experts
        chosen = set(experts.parameters())
        policy, place = MixedPrecisionPolicy(**options), lambda each: Shard(shard_dim) if each in chosen else None
        fully_shard(layer, mesh=parallel.get_mesh(["fsdp"]), mp_policy=policy, shard_placement_fn=place)
        disable_fsdp_gradient_division(layer)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo sums alone
    assert local(experts.w1_EFD).shape[shard_dim] == whole.routed_experts.inner_experts.w1_EFD.shape[shard_dim] // 2
    x, dy = tokens(rank)
    x.requires_grad_()
    y = model(x)
    y.backward(dy)
    named = dict(experts.named_parameters()) | {"gate": layer.router.gate.weight}
    grads = {name: weight.grad.full_tensor() for name, weight in named.items()}
    check({"y": y.detach(), "x": x.grad, **grads}, {**expected[1], **{n: expected[rank][n] for n in ("y", "x")}})
    folder = str(path / f"fsdp{ep}{shard_dim}")
    checkpoint.save(layer.state_dict(), checkpoint_id=folder)
    assert isinstance(layer.state_dict()["routed_experts.inner_experts.w1_EFD"], DTensor)
    loaded = build(None).float()
    with torch.no_grad():
        for each in (*loaded.parameters(), *layer.parameters()):
            local(each).zero_()
    for target in (loaded, layer):
        state = target.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        target.load_state_dict(state)
        for name, right in whole.state_dict().items():
            left = target.state_dict()[name]
            assert torch.equal(left.full_tensor() if isinstance(left, DTensor) else left, right.to(left.dtype)), name


def tensor_parallel(rank: int) -> None:
    """Each rank has half of each expert, as torchtitan's."""
    parallel = dims(rank, 1, tp=2)
    theirs, ours = build(None, parallel), build(OVERRIDE, parallel)
    assert local(ours.routed_experts.inner_experts.w1_EFD).shape[1] == INNER // 2
    actual = results(ours, *tokens())
    check(actual, results(theirs, *tokens()))
    torch.testing.assert_close(actual["y"], build(OVERRIDE)(tokens()[0]), rtol=0.03, atol=0.03)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(local(ours.state_dict()[name]), local(tensor)), name


def two_ranks(rank: int, path: pathlib.Path) -> None:
    expert_parallel(rank, path)
    fully_sharded(rank, path, ep=1)
    fully_sharded(rank, path, ep=1, shard_dim=1)
    fully_sharded(rank, path, ep=2)
    tensor_parallel(rank)


def test_two_ranks(tmp_path: pathlib.Path) -> None:
    """Expert parallelism, FSDP2 and tensor parallelism; in a process without threads, which forks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, check=True, timeout=200)


if __name__ == "__main__":
    run_processes(2, pathlib.Path(sys.argv[1]), functools.partial(two_ranks, path=pathlib.Path(sys.argv[1])))
