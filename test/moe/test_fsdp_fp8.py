"""FSDP2's all-gather of e4m3 shards: the bits of the gather in 16 bits that is followed by a quantization."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint as activation_checkpoint

import cudnn
from cudnn.moe import gathered, quantizing, reference
from cudnn.moe.gathered import GatheredCopies, GatheredWeight
from cudnn.nn import MoE
from support.ranks import run_processes

HIDDEN, INNER, EXPERTS, TOP_K, RANKS, STEPS = 128, 128, 4, 2, 2, 3
BF16 = torch.bfloat16


def make(fp8: Any = "blockwise", mesh: Any = None, over: Any = None, gathers: bool = True, **options: Any) -> Any:
    """Two layers by the recipe of docs/training_at_scale.md, or sharded ``over`` a mesh; with ``gathers``, in e4m3."""
    torch.manual_seed(5)
    sharding = {name: options.pop(name) for name in ("reshard_after_forward", "shard_placement_fn") if name in options}
    inner = options.pop("inner", INNER)
    policy = MixedPrecisionPolicy(param_dtype=options.pop("param_dtype", None), reduce_dtype=torch.float32)
    options = {"dtype": BF16, "renormalize": True, "mesh": mesh, **options}
    model = torch.nn.Sequential(*(MoE(HIDDEN, inner, EXPERTS, TOP_K, fp8=fp8, **options) for _ in range(2)))
    world = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in list[Any](model):
        for module in (layer.router, layer.shared) if mesh is not None else ():
            if module is not None:
                fully_shard(module, mesh=world, mp_policy=policy)
        fully_shard(layer, mesh=over or (world if mesh is None else mesh["dp"]), mp_policy=policy, **sharding)
        layer.set_force_sum_reduction_for_comms(True)
        if gathers:
            layer.enable_fsdp_fp8_all_gather()
    fully_shard(model, mesh=world, mp_policy=policy)
    return model


def local(weight: Any) -> torch.Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


def train(model: Any, rank: int, steps: int = STEPS, micro_batches: int = 2) -> list[torch.Tensor]:
    """Losses, gradients and weights of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    results = []
    for step in range(steps):
        for micro_batch in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
            x = torch.randn(40, HIDDEN, generator=generator).to(BF16)
            loss = model(x).float().square().mean()
            loss.backward()
            results.append(loss.detach())
        results += [local(p.grad).clone() for p in model.parameters()]
        optimizer.step()
        results += [local(p).detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
    return results


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, b), f"result {i}"


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes that a rank's all-gathers take in, their number, and the shards that were quantized."""
    counts = {"bytes": 0, "gathers": 0, "quantized": 0, "transposed": 0}
    gather, quantize, transpose = (
        _fsdp_collectives.DefaultAllGather.__call__,
        quantizing._quantize,
        gathered._transpose,
    )

    def counting(self: Any, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        counts["bytes"] += input_tensor.nbytes
        counts["gathers"] += 1
        return gather(self, output_tensor, input_tensor, *args, **kwargs)

    def count(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(_fsdp_collectives.DefaultAllGather, "__call__", counting)
        patch.setattr(quantizing, "_quantize", count("quantized", quantize))
        patch.setattr(gathered, "_transpose", count("transposed", transpose))
        yield counts


def bits_and_bytes(rank: int) -> None:
    """With and without resharding after forward, master weights in float32, biases, shared experts, expert parallelism:
    losses, gradients and weights of several steps, and what was gathered and quantized.
    """
    monkeypatch = pytest.MonkeyPatch()
    ranks = {shape: init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")) for shape in ((2, 1), (1, 2))}
    names = ("dp", "ep", "etp")
    with_etp = {shape: init_device_mesh("cpu", shape, mesh_dim_names=names) for shape in ((2, 1, 1), (1, 1, 2))}
    cases: list[dict[str, Any]] = [
        {},
        {"reshard_after_forward": False, "fp8": "blockwise_save16"},
        {"dtype": torch.float32, "param_dtype": BF16, "bias": True},
        {"shared_experts": 2},
        {"mesh": ranks[2, 1], "shared_experts": 1, "dtype": torch.float32, "param_dtype": BF16},
        {"mesh": ranks[1, 2]},
        {"mesh": with_etp[2, 1, 1], "etp_dim": "etp"},
        {"mesh": with_etp[1, 1, 2], "etp_dim": "etp", "inner": 256, "same_tokens": True},
    ]
    for case in cases:
        tokens_of = 0 if case.pop("same_tokens", False) else rank
        counts = []
        results = []
        for gathers in (False, True):
            with counted(monkeypatch) as count:
                results.append(train(make(gathers=gathers, **case), tokens_of))
            counts.append(count)
        same(results[1], results[0])
        before, after = counts
        assert before["gathers"] == after["gathers"]
        if case == {}:
            experts = EXPERTS * 3 * INNER * HIDDEN // RANKS  # weights of a rank's shards of a layer
            others = EXPERTS * HIDDEN // RANKS * 2  # bytes of the router's
            passes = 2 * 2 * 2 * STEPS  # layers, micro-batches, forward and backward
            assert before["bytes"] == passes * (2 * experts + others)
            assert after["bytes"] == passes * (experts + experts // 128**2 * 4 + others)
            backward = passes - 2 * STEPS  # up and down in backward passes, but for up of the first layer, without dx
            assert before["quantized"] == passes + backward
            assert after["quantized"] == 2 * 2 * STEPS  # up and down of two layers, once per step
            assert after["transposed"] == backward
            assert before["transposed"] == 0


def changes(rank: int) -> None:
    """What changes weights without a step: operations on DTensors and on their shards, state dicts, other tensors."""
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(BF16)
    models = [make(gathers=gathers) for gathers in (False, True)]

    def double(layer: Any) -> None:
        with torch.no_grad():
            layer.up.mul_(2.0)

    def shards(layer: Any) -> None:
        with torch.no_grad():
            local(layer.down).mul_(-1.5)

    def data(layer: Any) -> None:
        local(layer.up).data.mul_(0.5)
        layer.weights_changed()

    def state(layer: Any, assign: bool = False) -> None:
        weights = {name: -1.25 * w.detach() if "up" in name else w for name, w in layer.state_dict().items()}
        layer.load_state_dict(weights, assign=assign)

    def assigned(layer: Any) -> None:
        state(layer, assign=True)

    def applied(layer: Any) -> None:
        layer._apply(lambda t: t * 0.75)

    last = None
    for change in (double, shards, data, state, assigned, applied):
        for model in models:
            change(model[0])
        with torch.no_grad():
            y = [model(x) for model in models]
        assert torch.equal(*y), change
        assert last is None or not torch.equal(y[0], last), change
        last = y[0]
        for model in models:
            model(x).sum().backward()
        same([local(p.grad) for p in models[1].parameters()], [local(p.grad) for p in models[0].parameters()])
    local(models[1][0].up).data.mul_(1.5)
    models[1](x)
    with pytest.raises(RuntimeError, match="weights_changed"):
        models[1](x)


def checkpoints(rank: int, path: pathlib.Path) -> None:
    """State dicts and distributed checkpoints are those of the gather in 16 bits, and load into each other."""
    options: dict[str, Any] = {"dtype": torch.float32, "param_dtype": BF16}
    models = [make(gathers=gathers, **options) for gathers in (False, True)]
    for model in models:
        train(model, rank, 1)
    states: list[Any] = [dcp.get_model_state_dict(model) for model in models]
    full = dcp.StateDictOptions(full_state_dict=True)
    for left, right in (states, [dcp.get_model_state_dict(model, options=full) for model in models]):
        assert left.keys() == right.keys()
        for name, weight in left.items():
            assert type(weight) is type(right[name])
            assert type(local(right[name])) is torch.Tensor
            assert right[name].dtype is torch.float32
            assert torch.equal(local(weight), local(right[name])), name
    checkpoint.save({"model": states[1]}, checkpoint_id=path / "fp8")
    expected = train(models[1], rank)
    for gathers in (False, True):
        model = make(gathers=gathers, **options)
        state = dcp.get_model_state_dict(model)
        checkpoint.load({"model": state}, checkpoint_id=path / "fp8")
        dcp.set_model_state_dict(model, state)
        same(train(model, rank), expected)


def on_meta(rank: int) -> None:
    """Weights that get memory after the call, by ``to_empty``."""
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(3)
            module.reset_parameters()
    torch.manual_seed(5)
    x = torch.randn(9, HIDDEN).to(BF16)
    plain = make(gathers=False)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))


def other_passes(rank: int) -> None:
    """Activation checkpointing, the operator path, the profiler, autocast, ``torch.compile``."""
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(BF16)

    def routed(layer: Any) -> None:
        layer.register_forward_pre_hook(lambda module, args: (args[0], None))
        layer.router.register_forward_hook(lambda *_: None)  # not one autograd node

    def profiled(model: Any) -> torch.Tensor:
        with torch.profiler.profile():
            return model(x)

    def cast(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return model(x)

    def recomputed(model: Any) -> Any:
        return activation_checkpoint(model, x, use_reentrant=False)

    for run in (recomputed, profiled, cast, lambda model: model(x)):
        results = []
        for gathers in (False, True):
            model = make(gathers=gathers)
            for layer in model:
                routed(layer)
            y = run(model)
            y.float().square().sum().backward()
            results.append([y.detach(), *(local(p.grad) for p in model.parameters())])
        same(*results)
    results = []
    for gathers in (False, True):  # compiled code is left for these layers
        model = make(gathers=gathers)
        y = (torch.compile(model, backend="eager") if gathers else model)(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(local(p.grad) for p in model.parameters())])
    same(*results)


def refused(rank: int) -> None:
    """Before anything is gathered."""
    x, world = torch.randn(9, HIDDEN).to(BF16), init_device_mesh("cpu", (RANKS,))
    layer: Any = MoE(HIDDEN, INNER, EXPERTS, TOP_K, fp8="blockwise")
    with pytest.raises(RuntimeError, match=r"up: got a plain tensor; .*call fully_shard before it"):
        layer.enable_fsdp_fp8_all_gather()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(RuntimeError, match=r"up: got placements .*Shard\(dim=0\).*; .*call fully_shard before it"):
        MoE(HIDDEN, INNER, EXPERTS, TOP_K, fp8="blockwise", mesh=mesh).enable_fsdp_fp8_all_gather()
    wrong: Any
    for wrong in ({"fp8": ""}, {"fp8": "forward"}, {"into_main_grad": True}):
        with pytest.raises(ValueError, match=r"layer: got fp8=.*; allowed: fp8='blockwise'"):
            make(**wrong)
    with pytest.raises(ValueError, match=r"sharding of up: got .*dim=1.*; allowed: Shard\(0\) by FSDP2"):
        make(shard_placement_fn=lambda p: Shard(1) if p.ndim > 2 else None)
    with pytest.raises(ValueError, match=r"sharding of up: got 5 experts over 2 ranks; .*shared experts are among"):
        make(shared_experts=1)
    ran = make(gathers=False)
    ran(x)
    with pytest.raises(RuntimeError, match="layer: got one that has run"):
        ran[0].enable_fsdp_fp8_all_gather()
    with pytest.raises(ValueError, match=r"dtype of up, gathered: got torch.float32; .*MixedPrecisionPolicy"):
        make(dtype=torch.float32)(x.float())
    model = make()
    model[0].up._local_tensor = model[0].up._local_tensor.clone()
    with pytest.raises(RuntimeError, match=r"parameters that were replaced after enable_fsdp_fp8_all_gather"):
        model(x)
    model, kept = make(), list[Any]()
    model[0].register_forward_pre_hook(lambda module, _: kept.append(module.up))
    model(x)
    (weight,) = kept
    assert type(weight) is GatheredWeight
    with pytest.raises(RuntimeError, match="weight: got one that FSDP2 has resharded"):
        weight.copies.by_rows()
    with pytest.raises(RuntimeError, match=r"operation on a gathered weight: got aten.add.Tensor"):
        _ = weight + 1
    fully_shard(layer, mesh=world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer.up.device_mesh, "_device_type", "cuda")  # whose weights CPUOffloadPolicy keeps on the CPU
        with pytest.raises(ValueError, match=r"device of up: got cpu, with CPUOffloadPolicy; .*leave offload_policy"):
            layer.enable_fsdp_fp8_all_gather()


def ranks_of_two(rank: int, path: pathlib.Path) -> None:
    bits_and_bytes(rank)
    changes(rank)
    checkpoints(rank, path)
    on_meta(rank)
    other_passes(rank)
    refused(rank)


def test_over_two_processes(tmp_path: pathlib.Path) -> None:
    run_processes(RANKS, tmp_path, lambda rank: ranks_of_two(rank, tmp_path))


def ranks_of_four(rank: int) -> None:
    """Hybrid sharding, and FSDP2 over expert parallelism; PyTorch refuses to reshard to fewer ranks."""
    ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for case in ({"mesh": ep}, {"over": hybrid}):
        same(*(train(make(gathers=gathers, **case), rank, 2, 1) for gathers in (True, False)))
    model = make(reshard_after_forward=2)
    with pytest.raises(AssertionError, match="Expected 1 all_gather_output, got 2"):
        model(torch.randn(9, HIDDEN).to(BF16))


def test_over_four_processes(tmp_path: pathlib.Path) -> None:
    run_processes(4, tmp_path, ranks_of_four)


@pytest.mark.parametrize("arch", ["", "sm_90a", "sm_100a"])
def test_a_gathered_weight_is_transposed_once(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 256, 128).to(BF16)
    values, scales = reference.quantize(weight.view(-1, 128), 128)
    copies = GatheredCopies(values.view(weight.shape), scales.view(3, 2, 1))
    with cudnn.emulation(arch, races=True) if arch else contextlib.nullcontext(), counted(monkeypatch) as counts:
        expected = quantizing.quantized_both_ways([weight])
        for _ in range(2):
            actual = quantizing.quantized_both_ways([GatheredWeight(copies, BF16)])
        assert counts["transposed"] == 1
        copies.renew(copies.values, copies.scales)
        assert copies.transposed.untyped_storage().size() == 0
        again = copies.both_ways()
        assert counts["transposed"] == 2
    zeros = torch.zeros_like(GatheredWeight(copies, BF16))  # FSDP2's gradient of a weight that has none
    assert type(zeros) is torch.Tensor
    assert (zeros.dtype, zeros.stride(), bool(zeros.any())) == (BF16, weight.stride(), False)
    for a, b, c in zip(actual, again, expected, strict=True):
        assert torch.equal(a.float(), c.float())
        assert torch.equal(b.float(), c.float())
