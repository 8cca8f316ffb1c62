"""Runs the recipe of docs/training_at_scale.md, word for word, on two GPUs (or two CPU processes), about 90 s.

    python benchmarks/training_at_scale.py [--save benchmarks/results]

It prints a table and exits with an error if a row fails:

- losses: 50 steps with two-way expert parallelism, compared with one GPU that has all experts and both ranks' tokens;
- checkpoint: saved at step 25 with EP 2, loaded with EP 1 and FSDP2 over both, saved, loaded with EP 2;
- killed: one rank ends within a step; the other one has to end with an error within its limits;
- host time: forward and backward of a layer with and without ``return_routing``, on one GPU.

``--save`` replaces ``training_at_scale.csv`` in a folder. The rates of the exchange and of the layer over two GPUs come
from ``cudnn bench moe --ranks 2 --save``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS, STEPS, TOKENS, HIDDEN = 2, 50, 512, 256
LIMIT = 10  # seconds that the rank which is left may wait
NAME, ONE, BOTH = "training_at_scale", "1 GPU", f"{RANKS} GPUs, EP {RANKS}"
Figure = tuple[str, str, str, float, str]  # case, candidate, metric, value, unit
PAGE = Path(__file__).parents[1] / "docs" / "training_at_scale.md"


def load_recipe(folder: Path, time_limit: int | None = None) -> Any:
    """The module of the page's block ``recipe.py``."""
    match = re.search(r'^```python title="recipe.py"\n(.*?)^```$', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert match
    text = match[1] if time_limit is None else match[1].replace("time_limit=60", f"time_limit={time_limit}")
    path = folder / f"recipe_{os.environ.get('RANK', 0)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(rank: int, step: int, device: Any) -> tuple[Any, Any]:
    """A rank's tokens and targets of a step."""
    import torch

    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x.to(device), x.roll(1, -1).to(device)


def train(recipe: Any, model: Any, optimizer: Any, rank: int, steps: range, device: Any) -> list[float]:
    """Losses, the mean over ranks."""
    import torch.distributed as dist

    losses = []
    for step in steps:
        loss, _ = recipe.train_step(model, optimizer, *batch(rank, step, device))
        dist.all_reduce(loss)
        losses.append(float(loss) / RANKS)
    return losses


def train_alone(model: Any, optimizer: Any, device: Any) -> list[float]:
    """The losses of one GPU with all tokens: the ranks' batches are micro-batches."""
    import cudnn

    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(RANKS):
            loss = model(*batch(rank, step, device)) / RANKS
            loss.backward()
            total += float(loss)
        cudnn.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def whole(model: Any) -> dict[str, Any]:
    """All parameters, on each rank."""
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def run_train(folder: Path, rank: int, device: Any) -> None:
    """The rows "losses" and "checkpoint"."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    recipe = load_recipe(folder)

    def make(world: Any, mesh: Any, seed: int = 0) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = recipe.parallelize(recipe.Model(HIDDEN, mesh=mesh), world, mesh)
        return model, recipe.make_optimizer(model)

    one = init_device_mesh(device.type, (RANKS, 1, 1, 1), mesh_dim_names=("rank", "world", "dp", "ep"))
    alone, alone_optimizer = make(one["world"], one["dp", "ep"])
    begin = time.monotonic()
    expected = train_alone(alone, alone_optimizer, device)
    seconds_alone = time.monotonic() - begin

    world, mesh = recipe.meshes(ep=2)
    model, optimizer = make(world, mesh)
    begin = time.monotonic()
    losses = train(recipe, model, optimizer, rank, range(STEPS // 2), device)
    recipe.save(folder / "ep2", model, optimizer)
    losses += train(recipe, model, optimizer, rank, range(STEPS // 2, STEPS), device)
    seconds = time.monotonic() - begin
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    report(rank, "losses", worst < 0.02, f"{expected[0]:.4f} to {expected[-1]:.4f} alone, {losses[0]:.4f} to "
           f"{losses[-1]:.4f} with EP 2, at most {worst:.2%} apart; {seconds:.0f} s")  # fmt: skip
    figures = [
        (f"loss of step {step + 1}", name, "loss", values[step], "")
        for step in (0, STEPS // 2 - 1, STEPS - 1)
        for name, values in ((ONE, expected), (BOTH, losses))
    ]
    figures += [(f"{STEPS} steps", ONE, "time", seconds_alone, "s"), (f"{STEPS} steps", BOTH, "time", seconds, "s")]
    figures += [(f"losses of {STEPS} steps, largest difference", BOTH, "difference", 100 * worst, "%")]
    record(folder, rank, figures)

    world1, mesh1 = recipe.meshes(ep=1)
    other, other_optimizer = make(world1, mesh1, seed=1)
    recipe.load(folder / "ep2", other, other_optimizer)
    again = train(recipe, other, other_optimizer, rank, range(STEPS // 2, STEPS), device)
    apart = max(abs(a - b) / b for a, b in zip(again, losses[STEPS // 2 :], strict=True))
    recipe.save(folder / "ep1", other, other_optimizer)
    back, back_optimizer = make(world, mesh, seed=2)
    recipe.load(folder / "ep1", back, back_optimizer)
    right, actual = whole(other), whole(back)
    is_same = right.keys() == actual.keys() and all(torch.equal(actual[name], x) for name, x in right.items())
    text = f"EP 2 to EP 1: losses at most {apart:.2%} apart; back to EP 2: {'the same' if is_same else 'OTHER'} bits"
    report(rank, "checkpoint", apart < 0.02 and is_same, text)
    case = f"losses of {STEPS - STEPS // 2} steps after loading EP 2 with EP 1, largest difference"
    record(folder, rank, [(case, BOTH, "difference", 100 * apart, "%")])


def run_killed(folder: Path, rank: int, device: Any) -> None:
    """Rank 1 ends within a step."""
    import torch

    recipe = load_recipe(folder, LIMIT)
    world, mesh = recipe.meshes(ep=2, timeout=LIMIT)
    torch.manual_seed(0)
    model = recipe.parallelize(recipe.Model(HIDDEN, mesh=mesh), world, mesh)
    optimizer = recipe.make_optimizer(model)
    train(recipe, model, optimizer, rank, range(2), device)
    (folder / f"alive{rank}").touch()
    while rank and not (folder / "alive0").exists():
        time.sleep(0.01)
    if rank == 1:
        model.blocks[1].dense.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    train(recipe, model, optimizer, rank, range(2, 4), device)


def run_host(folder: Path, rank: int, device: Any) -> None:
    """The row "host time"."""
    if rank or device.type != "cuda":
        return
    import torch

    import cudnn

    layer = cudnn.nn.MoE(2048, 768, 128, 8, renormalize=True, device=device)
    x = torch.randn(4096, 2048, device=device).bfloat16().requires_grad_()
    gradient, of_logits = torch.randn_like(x), torch.randn(4096, 128, device=device).bfloat16()

    def plain() -> None:
        layer(x).backward(gradient)

    def with_routing() -> None:
        y, routing = layer(x, return_routing=True)
        torch.autograd.backward([y, routing.logits], [gradient, of_logits])

    def with_loss() -> None:
        y, routing = layer(x, return_routing=True)
        torch.autograd.backward([y, cudnn.moe.load_balance_loss(routing.logits, routing)], [gradient, None])

    def routed() -> None:
        logits, routing = layer.route(x)
        torch.autograd.backward([layer(x, routing), cudnn.moe.load_balance_loss(logits, routing)], [gradient, None])

    calls = {"plain": plain, "routing": with_routing, "with loss": with_loss, "layer.route, loss": routed}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(24):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(5):
                call()
            if turn > 3:
                times[name].append((time.perf_counter() - begin) / 5 * 1e6)
            torch.cuda.synchronize()
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratio = medians["routing"] / medians["plain"]
    text = ", ".join(f"{name} {value:.0f} us" for name, value in medians.items())
    report(rank, "host time", ratio <= 1.1, f"{text}; return_routing x {ratio:.3f}")
    record(folder, rank, [(f"host time, {name}", ONE, "time", value, "us") for name, value in medians.items()])


def report(rank: int, name: str, passed: bool, text: str) -> None:
    if rank == 0:
        print(f"| {name} | {'ok' if passed else 'FAILED'} | {text} |", flush=True)
    if not passed:
        sys.exit(1)


def record(folder: Path, rank: int, figures: list[Figure]) -> None:
    """Adds figures to those that ``--save`` writes."""
    if rank == 0:
        with (folder / "figures.jsonl").open("a") as file:
            file.writelines(f"{json.dumps(figure)}\n" for figure in figures)


def save(folder: Path, target: Path, commit: str) -> None:
    """Replaces the result file."""
    from cudnn.bench import OURS_PACKAGE, results
    from cudnn.cli.info import driver_version

    run = results.this_run(driver_version(), commit)
    start = (run.hardware, run.driver, run.cuda, run.torch, run.commit, run.date, NAME, "bf16", "")
    version, lines = results.version_of(OURS_PACKAGE), []
    for text in (folder / "figures.jsonl").read_text().splitlines():
        case, peer, metric, value, unit = json.loads(text)
        figure = (metric, results.significant(value), unit, 0.0)
        lines.append(results.Result(*start, case, peer, version, 1, *figure))
    results.write(results.path_of(target, NAME), lines)


def worker(phase: str, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    rank, cuda = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=LIMIT if phase == "killed" else 120))
    {"train": run_train, "killed": run_killed, "host": run_host}[phase](folder, rank, device)
    if phase != "host":
        dist.barrier()
    dist.destroy_process_group()


def launch(phase: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Starts both ranks, as torchrun does, but without its agent, which would end one rank after the other."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    variables |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    command = [sys.executable, __file__, "--phase", phase, "--folder", str(folder)]
    pipes: Any = {"stderr": subprocess.STDOUT, "stdout": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes)
        for r in range(RANKS)
    ]


def output_of(process: subprocess.Popen[str], limit: int = 150) -> str:
    """What a process prints until it ends, at the latest after the limit in seconds."""
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{process.communicate()[0]}\nended after {limit} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=("train", "killed", "host"))
    parser.add_argument("--folder", type=Path, help="used by the processes that this one starts")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="replace training_at_scale.csv in this folder")
    parser.add_argument("--commit", default="", help="the library's commit; default: that of its git clone")
    arguments = parser.parse_args()
    if arguments.phase:
        worker(arguments.phase, arguments.folder)
        return 0
    commit = arguments.commit
    if arguments.save is not None:
        from cudnn.bench.results import source_commit

        commit = commit or source_commit()
        if not commit:
            parser.error("--commit: got nothing; needed where the package does not run from a git clone.")
    failed = False
    print("| what | | |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for phase in ("train", "host", "killed"):
            begin = time.monotonic()
            processes = launch(phase, folder)
            outputs = [output_of(process) for process in processes]
            seconds = time.monotonic() - begin
            codes = [process.returncode for process in processes]
            rows = [line for line in outputs[0].splitlines() if line.startswith("| ")]
            print(*rows, sep="\n", flush=True)
            if phase == "killed":
                errors = [line for line in outputs[0].splitlines() if re.search(r"Error|error|abort", line)]
                passed = codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL)
                row = (
                    f"rank 1 killed, rank 0 ended with {codes[0]} after {seconds:.0f} s: {(errors or ['?'])[-1][:200]}"
                )
                print(f"| killed | {'ok' if passed else 'FAILED'} | {row} |", flush=True)
                if passed:
                    case = f"a killed rank: until the other one ends, start included, with limits of {LIMIT} s"
                    record(folder, 0, [(case, BOTH, "time", seconds, "s")])
            else:
                passed = codes == [0] * RANKS
            if not passed:
                print(*outputs, sep="\n--- rank\n", file=sys.stderr)
            failed |= not passed
        if arguments.save is not None and (folder / "figures.jsonl").exists():
            save(folder, arguments.save, commit)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
