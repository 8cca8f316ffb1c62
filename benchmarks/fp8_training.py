"""Trains a small MoE language model in bfloat16 and with fp8 experts: 1,000 steps, three seeds, on one GPU.

    python benchmarks/fp8_training.py --save benchmarks/results

The text is the source of Python's standard library, byte by byte; files whose names hash to a tenth are held out. The
models of a seed begin with the same weights and read the same batches. The result file has, for each run, the mean loss
of every 20 steps and the loss on held-out text at the end, in nats per byte.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from cudnn.bench import results
from cudnn.cli.info import driver_version
from cudnn.moe import load_balance_loss
from cudnn.nn import MoE

FAMILY, STEPS, EVERY, SEEDS = "fp8_training", 1000, 20, (0, 1, 2)
RECIPES = {"bf16": False, "fp8": "blockwise"}
VOCABULARY = 256
HELD_OUT_BATCHES = 16


class Sizes(NamedTuple):
    """Sizes of the model and of a batch."""

    hidden: int = 512
    intermediate: int = 512
    experts: int = 16
    top_k: int = 2
    layers: int = 3
    heads: int = 8
    length: int = 512
    batch: int = 16


class Block(nn.Module):
    """Causal attention and a layer of experts, each after an RMSNorm."""

    def __init__(self, sizes: Sizes, fp8: bool | str, device: Any) -> None:
        super().__init__()
        self.heads, options = sizes.heads, {"bias": False, "device": device, "dtype": torch.bfloat16}
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, **options)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, **options)
        shape = (sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k)
        self.moe = MoE(*shape, renormalize=True, fp8=fp8, device=device)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y, router = self.moe(self.norms[1](x), return_routing=True)
        return x + y, load_balance_loss(router.logits, router)


class Model(nn.Module):
    """A language model of bytes; its input and output embeddings are separate."""

    def __init__(self, sizes: Sizes, fp8: bool | str, device: Any) -> None:
        super().__init__()
        options = {"device": device, "dtype": torch.bfloat16}
        self.embed = nn.Embedding(VOCABULARY, sizes.hidden, **options)
        self.positions = nn.Embedding(sizes.length, sizes.hidden, **options)
        self.blocks = nn.ModuleList(Block(sizes, fp8, device) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, **options)
        self.head = nn.Linear(sizes.hidden, VOCABULARY, bias=False, **options)

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the next bytes, and the mean loss of the routers' balance."""
        tokens, targets = text[:, :-1], text[:, 1:]
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        balance = []
        for block in self.blocks:
            x, loss = block(x)
            balance.append(loss)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), torch.stack(balance).mean()


class AdamW:
    """AdamW on float32 copies of bfloat16 weights, with a warm-up and a cosine decay of the learning rate."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, steps: int) -> None:
        self.parameters, self.masters = parameters, [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
        warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.02, total_iters=min(50, steps))
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, max(1, steps - 50), eta_min=lr / 10)
        self.schedule = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warmup, decay], [min(50, steps)])

    @torch.no_grad()
    def step(self) -> None:
        """Clips the gradients at a norm of 1, updates the weights, and drops the gradients."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        self.schedule.step()
        torch._foreach_copy_(self.parameters, self.masters)


def library_text(held_out: bool) -> torch.Tensor:
    """The sources of Python's standard library as bytes, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    chosen = [path for path in paths if (zlib.crc32(path.name.encode()) % 10 == 0) == held_out]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)


def batches(text: torch.Tensor, sizes: Sizes, count: int, seed: int) -> torch.Tensor:
    """Random pieces of the text, int64 (count, batch, length + 1)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - sizes.length - 1, (count * sizes.batch, 1), generator=generator)
    return text[starts + torch.arange(sizes.length + 1)].view(count, sizes.batch, -1).long()


def train(
    text: tuple[torch.Tensor, torch.Tensor], sizes: Sizes, fp8: bool | str, seed: int, steps: int, device: Any
) -> tuple[list[float], float]:
    """The loss of each step, and on held-out text at the end."""
    torch.manual_seed(seed)
    model = Model(sizes, fp8, device)
    optimizer = AdamW(list(model.parameters()), 1e-3, steps)
    losses = torch.zeros(steps, device=device)
    data = batches(text[0], sizes, steps, seed).to(torch.uint8).to(device)
    for step in range(steps):
        loss, balance = model(data[step].long())
        (loss + 0.01 * balance).backward()
        optimizer.step()
        losses[step] = loss.detach()
    with torch.no_grad():
        held_out = [model(batch.to(device))[0] for batch in batches(text[1], sizes, HELD_OUT_BATCHES, 0)]
    return losses.tolist(), float(torch.stack(held_out).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="where to write fp8_training.csv")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--commit", default="", help="the library's commit; default: that of its git clone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no NVIDIA GPU here")
    text, sizes = (library_text(False), library_text(True)), Sizes()
    run = results.this_run(driver_version(), options.commit or results.source_commit())
    shape = "x".join(map(str, sizes))
    lines = []
    for seed in SEEDS:
        for name, fp8 in RECIPES.items():
            start = time.perf_counter()
            losses, held_out = train(text, sizes, fp8, seed, options.steps, "cuda")
            print(f"seed {seed}, {name}: held out {held_out:.4f}, {time.perf_counter() - start:.0f} s", flush=True)
            problem = {"family": FAMILY, "dtype": name, "shape": shape, "peer": name, "peer_version": "", "ours": 1}
            means = [
                (step + EVERY, sum(losses[step : step + EVERY]) / EVERY)
                for step in range(0, options.steps - EVERY + 1, EVERY)
            ]
            cases = [(f"seed {seed}, step {step}", value) for step, value in means]
            cases.append((f"seed {seed}, held out", held_out))
            for case, value in cases:
                figures = {"case": case, "metric": "loss", "value": round(value, 5), "unit": "nats", "spread": 0.0}
                lines.append(results.Result(**asdict(run), **problem, **figures))
            if options.save is not None:
                results.write(options.save / f"{FAMILY}.csv", lines)


if __name__ == "__main__":
    main()
