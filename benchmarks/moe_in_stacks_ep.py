"""MoE layers of torchtitan and of Megatron-Core with expert parallelism over two GPUs: their experts and ours.

    python benchmarks/moe_in_stacks_ep.py [--wheels WHEELS] [--save benchmarks/results] [--tokens 8192]

WHEELS and sizes are those of ``moe_in_stacks.py``. Each stack keeps its router and its all-to-all dispatcher over NCCL;
only the experts differ. The layers have the same weights; one whose output or gradient differs is not timed.

A time is that of forward and backward on the slowest rank: a burst of calls that both ranks begin together, until the
GPU is done. The layers take turns; the median over the rounds is shown, its spread is half the range. ``--save``
replaces ``moe_in_stacks_ep.csv`` in a folder.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import moe_in_stacks as single  # next to this file
import torch
import torch.distributed as dist

from cudnn.bench import OURS_PACKAGE, off_by_norm, order, results
from cudnn.cli.info import driver_version

RANKS, ROUNDS, CALLS, LIMIT = 2, 6, 4, 150.0  # LIMIT: seconds of the whole run
NAME, TOLERANCE = "moe_in_stacks_ep", 0.03
SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
Pass = Callable[[], dict[str, torch.Tensor]]


def one_pass(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Forward and backward, with new gradients."""
    layer.zero_grad()
    x.grad = None
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    assert x.grad is not None
    return {"y": y, "x.grad": x.grad}


def tokens_of(shape: tuple[int, ...], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens, and the gradient of the layer's output."""
    torch.manual_seed(rank)
    x, dy = (torch.randn(shape, device=single.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), dy


def torchtitan(tokens: int, rank: int) -> dict[str, Pass]:
    """A pass of each layer by the name of its experts."""
    import spmd_types as spmd
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config

    if not hasattr(torch.compiler, "_is_non_strict_tracing"):  # PyTorch 2.11; torchtitan 0.3.0 asks
        torch.compiler._is_non_strict_tracing = lambda: False  # pyright: ignore
    set_spmd_backend("partial_dtensor")
    parallel_dims.device_type = single.DEVICE
    degrees = {"dp_replicate": 1, "dp_shard": RANKS, "cp": 1, "tp": 1, "pp": 1, "ep": RANKS, "world_size": RANKS}
    parallel = parallel_dims.ParallelDims(**degrees, spmd_backend="partial_dtensor")
    parallel.build_mesh()
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    draw = partial(torch.nn.init.normal_, std=0.02)
    sizes: dict[str, Any] = {"dim": single.HIDDEN, "num_experts": single.EXPERTS, "top_k": single.TOP_K}
    layers = {}
    for name in (single.STACKS["torchtitan"], single.OURS):
        experts = {"param_init": dict.fromkeys(layout, draw), "comm_backend": "standard"}
        config = make_moe_config(
            num_experts=single.EXPERTS,
            router=make_router_config(**sizes, gate_param_init={"weight": draw}, score_func="softmax"),
            routed_experts=make_routed_experts_config(**sizes, hidden_dim=single.INNER, **experts),
        )
        set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=layout)
        if name == single.OURS:
            apply_overrides(OverrideConfig(imports=["cudnn.integrations.torchtitan.cudnn_experts"]), config)
        torch.manual_seed(0)
        with torch.device(single.DEVICE):
            layers[name] = config.build()
        layers[name].init_states()
        layers[name].to(torch.bfloat16)
        layers[name].parallelize(parallel)
    x, dy = tokens_of((1, tokens, single.HIDDEN), rank)
    return {name: partial(one_pass, layer, x, dy) for name, layer in layers.items()}


def megatron(tokens: int, rank: int) -> dict[str, Pass]:
    """A pass of each layer by the name of its experts."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from cudnn.integrations.megatron import use_experts

    if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine, 0.16.1 asks for the name
        moe_utils.te_general_gemm = None  # pyright: ignore
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS, expert_tensor_parallel_size=1)
    single.allow_grouped_mlp()
    routing = {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    config = single.megatron_config(expert_model_parallel_size=RANKS, **routing)
    spec = get_moe_module_spec(use_te=False, num_experts=single.EXPERTS, moe_grouped_gemm=False)
    grouped = get_moe_module_spec(use_te=False, num_experts=single.EXPERTS, moe_grouped_gemm=True)
    specs = {"SequentialMLP": spec, single.STACKS["megatron-core"]: grouped, single.OURS: use_experts(spec)}
    layers = {}
    for name, each in specs.items():
        model_parallel_cuda_manual_seed(0)
        torch.manual_seed(0)
        layers[name] = MoELayer(config, each.submodules).to(single.DEVICE)
    first, *others = layers.values()
    for layer in others:
        layer.router.load_state_dict(first.router.state_dict())
    single.copy_weights(*(layer.experts for layer in layers.values()))
    x, dy = tokens_of((tokens, 1, single.HIDDEN), rank)
    return {name: partial(one_pass, layer, x, dy) for name, layer in layers.items()}


def worst(value: float) -> float:
    """The maximum over the ranks."""
    local = torch.tensor(value, dtype=torch.float64, device=single.DEVICE)
    dist.all_reduce(local, dist.ReduceOp.MAX)
    return local.item()


def seconds(call: Pass) -> float:
    """Of a call in a burst that all ranks begin together, on the slowest rank."""
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return worst((time.perf_counter() - begin) / CALLS)


def measured(passes: dict[str, Pass]) -> dict[str, list[float] | str]:
    """Seconds of each round, or why a layer was not timed."""
    rows: dict[str, list[float] | str] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, call in passes.items():
        outputs = call()
        expected = expected or {each: x.detach().clone() for each, x in outputs.items()}
        wrong = off_by_norm(expected, outputs, TOLERANCE)
        rows[name] = [] if not worst(bool(wrong)) else wrong or "wrong result on another rank"
    timed = [(name, times) for name, times in rows.items() if isinstance(times, list)]
    for name, _ in timed:
        seconds(passes[name])
    for round_index in range(ROUNDS):
        for index in order(len(timed), round_index):
            name, times = timed[index]
            times.append(seconds(passes[name]))
    return rows


def run_rank(rank: int, port: int, wheels: Path | None, tokens: int, answers: Any) -> None:
    """The process of one rank."""
    warnings.filterwarnings("ignore")
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        if wheels is not None:
            single.unpack(wheels)
        address: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": RANKS}
        if single.DEVICE == "cuda":
            torch.cuda.set_device(rank)
            address["device_id"] = torch.device("cuda", rank)
        dist.init_process_group("nccl" if single.DEVICE == "cuda" else "gloo", **address)
        for stack, make in (("torchtitan", torchtitan), ("megatron-core", megatron)):
            rows = measured(make(tokens, rank))
            if rank == 0:
                answers.put((stack, rows, results.version_of(stack)))
            torch.cuda.empty_cache()
        answers.put(None)
        dist.barrier()
    except Exception:
        answers.put(f"rank {rank}: {traceback.format_exc()}")
        raise


def run(wheels: Path | None, tokens: int) -> tuple[list[Any], str]:
    """What rank 0 answered, and an error or ""."""
    os.environ.update(SETTINGS)
    context = torch.multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    arguments = (20000 + os.getpid() % 20000, wheels, tokens, answers)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found, running, end = [], RANKS, time.monotonic() + LIMIT
    try:
        while running:
            try:
                answer = answers.get(timeout=1)
            except queue.Empty:
                ended = [process.exitcode for process in processes if process.exitcode]
                if ended or time.monotonic() > end:
                    return found, f"a rank ended with {ended}" if ended else f"not done after {LIMIT:.0f} s"
                continue
            if isinstance(answer, str):
                return found, answer
            running -= answer is None
            found += [] if answer is None else [answer]
        return found, ""
    finally:
        for process in processes:
            process.kill()


def lines_of(run: results.Run, stack: str, version: str, rows: dict[str, Any], tokens: int) -> list[results.Result]:
    """The lines of a result file; a shape is tokens of a rank, hidden and intermediate size, experts, top-k, ranks."""
    shape = "x".join(map(str, (tokens, single.HIDDEN, single.INNER, single.EXPERTS, single.TOP_K, RANKS)))
    start = (run.hardware, run.driver, run.cuda, run.torch, run.commit, run.date, NAME, "bf16", shape, stack)
    lines = []
    for name, times in rows.items():
        if isinstance(times, str):
            continue
        ours, typical = name == single.OURS, statistics.median(times)
        spread = (max(times) - min(times)) / 2
        peer = (name, results.version_of(OURS_PACKAGE) if ours else version, int(ours))
        for metric, value, unit, each in (
            ("time", 1e6 * typical, "us", 1e6 * spread),
            ("rate", tokens / typical, "tokens/s", tokens / typical * spread / typical),
        ):
            figure = (metric, results.significant(value), unit, results.significant(each))
            lines.append(results.Result(*start, *peer, *figure))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of what is not installed")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help=f"replace {NAME}.csv in this folder")
    parser.add_argument("--commit", default="", help="the library's commit; default: that of its git clone")
    arguments = parser.parse_args()
    commit = arguments.commit or results.source_commit()
    if arguments.save is not None and not commit:
        parser.error("--commit: got nothing; needed where the package does not run from a git clone.")
    found, error = run(arguments.wheels, arguments.tokens)
    lines, failed = [], bool(error)
    print(f"forward and backward of a layer over {RANKS} ranks, {arguments.tokens} tokens a rank")
    print("| stack | experts | ms | tokens/s of a rank |\n|---|---|---|---|")
    for stack, rows, version in found:
        for name, times in rows.items():
            failed |= isinstance(times, str)
            typical = times if isinstance(times, str) else statistics.median(times)
            cells = (
                f"{1e3 * typical:.3f} | {arguments.tokens / typical:,.0f}" if isinstance(typical, float) else typical
            )
            print(f"| {stack} {version} | {name} | {cells} |")
        if arguments.save is not None:
            this_run = results.this_run(driver_version(), commit)
            lines += lines_of(this_run, stack, version, rows, arguments.tokens)
    if lines:
        results.write(results.path_of(arguments.save, NAME), lines)
    if error:
        print(error, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
