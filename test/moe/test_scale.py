"""The layer at scale: FSDP2 with expert parallelism, checkpoints over degrees, against one process."""

from __future__ import annotations

import copy
import io
import os
import pathlib
import socket
import time
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from cudnn import moe
from cudnn.nn import MoE, clip_grad_norm_
from support.pages import ROOT, Page
from support.ranks import run_processes

HIDDEN, INNER, EXPERTS, TOP_K, RANKS, STEPS = 32, 32, 8, 2, 4, 20
F64 = torch.float64


class Model(torch.nn.Module):
    """A linear layer, a mixture of experts, a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, HIDDEN, dtype=F64, device=options.get("device"))
        self.moe = MoE(HIDDEN, INNER, EXPERTS, TOP_K, dtype=F64, **options)
        self.last = torch.nn.Linear(HIDDEN, 4, dtype=F64, device=options.get("device"))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y, routing = self.moe(x, return_routing=True)
        balance = moe.load_balance_loss(routing.logits, routing)
        return (self.last(x + y) - target).square().mean() + 0.1 * balance


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's tokens and targets of a step; ranks have other tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [tuple(torch.randn(24, n, dtype=F64, generator=generator) for n in (16, 4)) for _ in range(RANKS)]  # pyright: ignore


def make(mesh: DeviceMesh | None = None, shards: bool = False, seed: int = 7, **options: Any) -> Model:
    """A model; on a mesh ("dp", "ep") with expert parallelism, and with ``shards`` by the recipe of the page."""
    torch.manual_seed(seed)
    model = Model(mesh=mesh, **options)
    return shard(model, mesh) if shards and mesh is not None else model


def shard(model: Model, mesh: DeviceMesh, placement: Any = None) -> Model:
    """FSDP2 as in docs/training_at_scale.md."""
    all_ranks = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("all",))
    for module in (model.moe.router, model.moe.shared, model.moe.shared_gate):
        if module is not None:
            fully_shard(module, mesh=all_ranks)
    # With one rank in "dp", PyTorch 2.13 divides float64 gradients twice, as it does float16's.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if mesh["dp"].size() == 1 else None)
    fully_shard(model.moe, mesh=mesh["dp"], mp_policy=policy, shard_placement_fn=placement)
    model.moe.set_gradient_divide_factor(mesh.size())  # pyright: ignore[reportCallIssue]
    fully_shard(model, mesh=all_ranks)
    return model


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Model, rank: int, first: int, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    """Losses, the mean over ranks, and clipped updates; without a mesh all ranks' batches in turn."""
    losses, alone = [], not any(isinstance(p, DTensor) for p in model.parameters())
    for step in range(first, first + steps):
        mine = batches(step) if alone else batches(step)[rank : rank + 1]
        total = torch.zeros((), dtype=F64)
        for x, target in mine:
            loss = model(x, target) / len(mine)
            loss.backward()
            total += loss.detach()
        if not alone:
            dist.all_reduce(total)
            total /= RANKS
            reduce_replicated(model)
        losses.append([float(total), float(clip_grad_norm_(model.parameters(), 0.5))])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def reduce_replicated(model: Model) -> None:
    """Without FSDP2: the mean over ranks; an expert's gradient is the sum over its expert-parallel group."""
    for p in model.parameters():
        assert p.grad is not None
        if not isinstance(p, DTensor):
            dist.all_reduce(p.grad)
            p.grad /= RANKS
        elif p.device_mesh.ndim == 1 and "ep" in (p.device_mesh.mesh_dim_names or ()):
            mean: Any = p.grad
            if p.device_mesh.size() < RANKS:
                dist.all_reduce(mean._local_tensor, group=p.device_mesh._get_root_mesh().get_group("dp"))
            mean._local_tensor.div_(RANKS)


def full(model: Model) -> dict[str, torch.Tensor]:
    return dcp.get_model_state_dict(model, options=dcp.StateDictOptions(full_state_dict=True))


def same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(actual[name], right, rtol=tolerance, atol=tolerance, msg=f"{{}} of {name}".format)


def meshes() -> dict[str, DeviceMesh]:
    """By the degree of expert parallelism."""
    names = ("dp", "ep")
    return {f"EP {ep}": init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=names) for ep in (1, 2, 4)}


def fsdp_and_ep(rank: int, path: pathlib.Path) -> None:
    """20 steps with the losses, gradient norms and weights of one process; then checkpoints."""
    mesh = meshes()["EP 2"]
    alone, model = make(), make(mesh, shards=True)
    right, optimizer = optimizer_of(alone), optimizer_of(model)
    torch.testing.assert_close(
        train(model, rank, 0, STEPS, optimizer), train(alone, rank, 0, STEPS, right), rtol=1e-9, atol=1e-9
    )
    same(full(model), alone.state_dict(), 1e-7)
    gradients(rank, mesh, alone)
    checkpoints(rank, path, alone, right)


def gradients(rank: int, mesh: DeviceMesh, alone: Model) -> None:
    """Of each parameter, for weights loaded from one process on each rank."""
    model = make(seed=8, mesh=mesh)
    model.load_state_dict(alone.state_dict())
    shard(model, mesh)
    model(*batches(99)[rank]).backward()
    for x, target in batches(99):
        (alone(x, target) / RANKS).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12, msg=f"{{}} of {name}".format)
    alone.zero_grad()


def checkpoints(rank: int, path: pathlib.Path, alone: Model, right: torch.optim.Optimizer) -> None:
    """Each degree, with FSDP2 and without, continues from each other's checkpoint as one process does."""
    last = None
    again, start = copy.deepcopy(alone.state_dict()), copy.deepcopy(right.state_dict())
    expected = train(alone, rank, STEPS, 2, right)
    cases = [(name, shards) for name in ("EP 2", "EP 4", "EP 1") for shards in (True, False)]
    for name, shards in cases:
        model = make(meshes()[name], shards, seed=rank)
        optimizer = optimizer_of(model)
        if last is None:
            dcp.set_model_state_dict(model, again, options=dcp.StateDictOptions(full_state_dict=True))
            names = dict(enumerate(name for name, _ in alone.named_parameters()))
            state = {"state": {names[i]: each for i, each in start["state"].items()}}
            state["param_groups"] = [{**start["param_groups"][0], "params": list(names.values())}]
            options = dcp.StateDictOptions(full_state_dict=True)
            dcp.set_optimizer_state_dict(model, optimizer, state, options=options)
        else:
            model_state, optimizer_state = dcp.get_state_dict(model, optimizer)
            states = {"model": model_state, "optimizer": optimizer_state}
            checkpoint.load(states, checkpoint_id=path / last)
            dcp.set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        last = f"{name}, {shards}".replace(" ", "")
        model_state, optimizer_state = dcp.get_state_dict(model, optimizer)
        checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path / last)
        actual = train(model, rank, STEPS, 2, optimizer)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=f"{{}} of {name}, {shards}".format)


EXTRAS: dict[str, Any] = {"bias": True, "shared_experts": 1, "shared_gate": True, "renormalize": True}


def initial(rank: int) -> None:
    """The same seed gives the same weights for each sharding, also on the device meta."""
    expected = make(**EXTRAS).moe.state_dict()
    torch.manual_seed(7)
    once_more = make(**EXTRAS).moe
    torch.manual_seed(3)
    for module in (once_more, once_more.router):
        module.reset_parameters()
    for name, mesh in meshes().items():
        model = make(mesh, **EXTRAS)
        # Over ranks, shared experts are a module; one rank has them behind the others.
        merged = full(model.moe)
        for weight in ("up", "down", "up_bias", "down_bias"):
            merged[weight] = torch.cat([merged[weight], merged.pop(f"shared.{weight}")])
        same(merged, expected)
        for placement in (None, lambda p: Shard(1) if p.ndim > 2 else None):
            with torch.device("meta"):
                model = shard(Model(mesh=mesh, **EXTRAS), mesh, placement)
            model.to_empty(device="cpu")
            torch.manual_seed(3)
            for module in (model.moe, model.moe.router):
                module.reset_parameters()
            up = model.moe.up
            assert isinstance(up, DTensor)
            torch.testing.assert_close(up.full_tensor(), once_more.up[:EXPERTS], rtol=0, atol=0, msg=name)
            weight: Any = model.moe.router.weight
            assert torch.equal(weight.full_tensor(), once_more.router.weight)


def exported(rank: int, path: pathlib.Path) -> None:
    """Full weights in safetensors, and from there into one process and into any sharding."""
    source = make(meshes()["EP 4"], seed=1, **EXTRAS)
    weights = full(source)
    if rank == 0:
        save_file({name: x.contiguous() for name, x in weights.items()}, path / "model.safetensors")
    dist.barrier()
    weights = load_file(path / "model.safetensors")
    alone, over_ranks = make(seed=2, **EXTRAS), make(meshes()["EP 2"], seed=2, **EXTRAS)
    x, target = batches(0)[rank]
    for model in (alone, over_ranks):
        model.load_state_dict(weights)
        torch.testing.assert_close(model(x, target), source(x, target))
    over_ranks.load_state_dict(alone.state_dict())  # with shared experts as rows of up
    torch.testing.assert_close(over_ranks(x, target), source(x, target))


def pickled(rank: int) -> None:
    """Without a group, which the layer gets back on the ranks that it had."""
    ranks = meshes()
    layer = make(ranks["EP 2"], **EXTRAS).moe
    x = torch.randn(9, HIDDEN, dtype=F64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    memory = io.BytesIO()
    torch.save(layer, memory)
    memory.seek(0)
    again = torch.load(memory, weights_only=False)
    for call in (lambda: again(x), again.state_dict, lambda: again.load_state_dict(layer.state_dict())):
        with pytest.raises(RuntimeError, match=rf"got none: these are the experts of rank {rank % 2} of 2 of ep_dim"):
            call()
    with pytest.raises(ValueError, match=rf"got rank {rank} of 4 of ep_dim; allowed: rank {rank % 2} of 2"):
        again.set_group(mesh=ranks["EP 4"])
    again.set_group(mesh=ranks["EP 2"])
    assert torch.equal(again(x), layer(x))
    same({n: x.full_tensor() for n, x in again.state_dict().items() if isinstance(x, DTensor)},
         {n: x.full_tensor() for n, x in layer.state_dict().items() if isinstance(x, DTensor)})  # fmt: skip
    with pytest.raises(ValueError, match="layer: got one that has its ranks"):
        again.set_group(mesh=ranks["EP 2"])


def tensor_parallel(rank: int) -> None:
    """Two ranks with the same tokens and half of each expert's intermediate size."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    options: dict[str, Any] = {"dtype": F64, "correction_bias": True, **EXTRAS}
    torch.manual_seed(5)
    alone = MoE(HIDDEN, 2 * INNER, EXPERTS, TOP_K, **options)
    torch.manual_seed(5)
    layer = MoE(HIDDEN, 2 * INNER, EXPERTS, TOP_K, mesh=mesh, etp_dim="etp", **options)
    assert layer.down.to_local().shape == (EXPERTS // 2, HIDDEN, INNER)  # pyright: ignore
    inputs = [torch.randn(11 + n, HIDDEN, dtype=F64, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    x, every = inputs[rank // 2].requires_grad_(), torch.cat(inputs).detach().requires_grad_()
    y, routing = layer(x, return_routing=True)
    expected, expected_routing = alone(every, return_routing=True)
    mine = slice(0, 11) if rank < 2 else slice(11, None)
    torch.testing.assert_close(y, expected[mine])
    ((y**3).sum() + (routing.logits**3).sum()).backward()
    ((expected**3).sum() + (expected_routing.logits**3).sum()).backward()
    torch.testing.assert_close(x.grad, every.grad[mine])  # pyright: ignore
    for name in ("up", "down", "up_bias", "down_bias"):
        gradient: Any = getattr(layer, name).grad
        torch.testing.assert_close(gradient.full_tensor(), getattr(alone, name).grad[:EXPERTS])
    replicated = {"router.weight": layer.router.weight, "shared.up": layer.shared.up}  # pyright: ignore
    rows = {"router.weight": alone.router.weight.grad, "shared.up": alone.up.grad[EXPERTS:]}  # pyright: ignore
    for name, weight in replicated.items():
        total = weight.grad.clone()
        dist.all_reduce(total, group=mesh.get_group("ep"))
        torch.testing.assert_close(total, rows[name], msg=name)
    other = MoE(HIDDEN, 2 * INNER, EXPERTS, TOP_K, mesh=mesh, etp_dim="etp", dtype=F64)
    with pytest.raises(ValueError, match=r"MoE: layer: got tokens=\(13 with .* on rank \d, tokens=\(13 with"):
        other(torch.full((13, HIDDEN), float(rank), dtype=F64))
    with pytest.raises(ValueError, match="intermediate: got 32, 'interleaved', on 2 ranks of etp_dim; allowed: a mul"):
        MoE(HIDDEN, 32, EXPERTS, TOP_K, mesh=mesh, etp_dim="etp")


def main_grads_and_counts(rank: int) -> None:
    """``main_grad`` has a rank's share; counts are those of all ranks."""
    mesh, x = meshes()["EP 2"], torch.randn(9, HIDDEN, dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "dtype": torch.float32, "correction_bias": True}
    torch.manual_seed(1)
    plain = MoE(HIDDEN, INNER, EXPERTS, TOP_K, **options)
    torch.manual_seed(1)
    layer = MoE(HIDDEN, INNER, EXPERTS, TOP_K, into_main_grad=True, **options)
    for name in ("up", "down"):
        weight: Any = getattr(layer, name)
        weight.main_grad = torch.ones(weight.to_local().shape)
    y, routing = layer(x, return_routing=True)
    y.sum().backward()
    plain(x).sum().backward()
    for name in ("up", "down"):
        weight, expected = getattr(layer, name), getattr(plain, name)
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad - 1, expected.grad.to_local(), rtol=1e-5, atol=1e-5)
    assert layer.correction is not None
    counts = routing.counts if rank else routing.counts * 100
    moe.update_correction_bias(layer.correction, counts, 0.5, dist.group.WORLD)
    values = [torch.empty_like(layer.correction) for _ in range(RANKS)]
    dist.all_gather(values, layer.correction)
    assert all(torch.equal(values[0], each) for each in values)
    assert bool(layer.correction.any())


def refused(rank: int) -> None:
    mesh = meshes()["EP 2"]
    layer = make(mesh).moe
    state: Any = layer.state_dict()
    share = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}
    with pytest.raises(RuntimeError, match=r'MoE: "up" has the shape \(4, 64, 32\), one rank\'s share; allowed: all'):
        layer.load_state_dict(share)
    with pytest.raises(RuntimeError, match=r'MoE: "up" is sharded over ranks as \(\(2,\), .*, but the layer\'s is'):
        make(meshes()["EP 4"]).moe.load_state_dict(state)
    with pytest.raises(RuntimeError, match='MoE: "up" is a DTensor, the layer\'s is not'):
        make().moe.load_state_dict(state)
    layer = make(mesh, shared_experts=1).moe
    twice = make(shared_experts=1).moe.state_dict() | layer.shared.state_dict(prefix="shared.")  # pyright: ignore
    with pytest.raises(RuntimeError, match=r'MoE: "up" has the shape \(9, 64, 32\), another number of experts'):
        layer.load_state_dict(twice)
    sharded, x = make(seed=7), torch.randn(3, HIDDEN, dtype=F64)
    fully_shard(sharded.moe, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"MoE: router\.weight: got a DTensor .*; .*call the layer, not its methods"):
        sharded.moe.route(x)
    y, routing = sharded.moe(x, return_routing=True)
    expected, expected_routing = make(seed=7).moe(x, return_routing=True)
    torch.testing.assert_close((y, routing), (expected, expected_routing))
    with pytest.raises(
        RuntimeError, match=r"MoE: up: got a DTensor over the mesh \('dp', 'ep'\); allowed: a DTensor ov"
    ):
        make(mesh, shards=True).moe.forward(x)
    wrong: Any
    for wrong, words in (
        ({"ep_dim": "tp"}, r"ep_dim: got 'tp'; allowed: one dimension of the mesh, .*'dp', 'ep'"),
        ({"etp_dim": "ep"}, "etp_dim: got 'ep'|ep_dim: got 'ep'"),
        ({"group": dist.group.WORLD}, "group with mesh"),
        ({"mesh": None, "etp_dim": "etp"}, "etp_dim: got 'etp'; allowed: None without mesh"),
        ({"experts": 7}, "experts: got 7 experts on 2 ranks"),
    ):
        with pytest.raises(ValueError, match=f"MoE: {words}"):
            MoE(**{"hidden": 32, "intermediate": 32, "experts": 8, "top_k": 2, "mesh": mesh, **wrong})
    with pytest.raises(TypeError, match=r"MoE: mesh: got int; allowed: a .*DeviceMesh"):
        MoE(32, 32, 8, 2, mesh=3)


def killed(rank: int) -> None:
    """A rank that dies: the others end with an error within the limit. The last of a process."""
    layer = make(meshes()["EP 4"], time_limit=5.0).moe
    x = torch.randn(3, HIDDEN, dtype=F64)
    layer(x)
    dist.barrier()
    if rank == 3:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(
        RuntimeError, match="Exchange: group: got no answer of all ranks within 5 s, or an error of one"
    ):
        layer(x).sum().backward()
    assert time.monotonic() - begin < 7
    os._exit(0)  # a group that lost a rank cannot end in order


def test_four_ranks(tmp_path: pathlib.Path) -> None:
    def rank(number: int) -> None:
        torch.manual_seed(0)
        fsdp_and_ep(number, tmp_path)
        initial(number)
        exported(number, tmp_path)
        pickled(number)
        tensor_parallel(number)
        main_grads_and_counts(number)
        refused(number)
        killed(number)

    run_processes(RANKS, tmp_path, rank)


def test_the_page_over_two_ranks(tmp_path: pathlib.Path) -> None:
    """The code of docs/training_at_scale.md, as torchrun starts it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}

    def rank(number: int) -> None:
        dist.destroy_process_group()
        os.environ.update(environment, RANK=str(number))
        Page.read(ROOT / "docs" / "training_at_scale.md").run_scripts()

    run_processes(2, tmp_path, rank)
