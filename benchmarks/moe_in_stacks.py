"""The experts of torchtitan and of Megatron-Core with our kernels, compared with their own, at Qwen3-30B-A3B's sizes.

    python benchmarks/moe_in_stacks.py [--wheels WHEELS] [--save benchmarks/results] [TOKENS ...]

WHEELS is a folder with wheels of what is not installed: torchtitan, spmd_types, tyro, docstring_parser, typeguard and
megatron_core; they are unpacked to a temporary folder. TOKENS: 8192 and 32768.

Rows are dispatched already: 8 experts of 128 for each token, chosen at random; a module gets them sorted by expert.
torchtitan's experts run ``torch._grouped_mm``. Megatron's ``GroupedMLP`` needs the package ``grouped_gemm``: where that
is missing, ``torch._grouped_mm`` stands in for its GEMM. ``SequentialMLP`` is a loop over experts. All modules of a
stack have the same weights; one whose output or gradient differs is not timed.

The protocol is that of ``cudnn bench``: rounds in which all modules take turns; forward and backward. Memory is the
peak of a pass without weights and inputs. Host time is until all kernels are queued, of calls with an empty queue.
``--save`` replaces ``moe_in_stacks.csv`` in a folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cudnn.bench import GPU, HOST, Candidate, Problem, Row, measure, off_by_norm, results
from cudnn.cli.info import driver_version

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOLERANCE = 0.02
NAME, OURS, DEVICE = "moe_in_stacks", "cudnn-fused", "cuda"
STACKS = {"torchtitan": "GroupedExperts", "megatron-core": "GroupedMLP"}
"""Distributions, and the names of their experts that ratios are of."""
Module = torch.nn.Module


def unpack(folder: Path) -> None:
    """Makes the wheels of a folder importable."""
    target = tempfile.mkdtemp()
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(target)
    sys.path.append(target)


class Rows:
    """Rows sorted by expert, the gradient of their outputs, probabilities, and counts on the device."""

    def __init__(self, tokens: int) -> None:
        torch.manual_seed(0)
        chosen = torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOP_K).indices
        self.x, self.dy = (torch.randn(tokens * TOP_K, HIDDEN, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        self.probs = torch.rand(len(self.x), device=DEVICE, requires_grad=True)
        self.counts = chosen.flatten().bincount(minlength=EXPERTS)
        self.x.requires_grad_()

    def one_pass(self, experts: Module, *rest: torch.Tensor) -> dict[str, torch.Tensor]:
        """Forward and backward. No gradient stays: it would count as memory that the next pass frees."""
        y = experts(self.x, *rest)
        y = y[0] if isinstance(y, tuple) else y
        y.backward(self.dy)
        assert self.x.grad is not None
        results = {"y": y, "x.grad": self.x.grad}
        experts.zero_grad()
        self.x.grad = self.probs.grad = None
        return results


def torchtitan(rows: Rows) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """A pass of each module by its name."""
    from torchtitan.models.common.moe import GroupedExperts

    from cudnn.integrations.torchtitan import cudnn_experts

    draw = partial(torch.nn.init.normal_, std=0.02)
    init = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), draw)
    config = GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS, param_init=init)
    modules = {}
    for name, each in ((STACKS["torchtitan"], config), (OURS, cudnn_experts(config))):
        with torch.device(DEVICE):
            modules[name] = each.build().to(torch.bfloat16)
        torch.manual_seed(0)
        modules[name].init_states()
    return {name: partial(rows.one_pass, experts, rows.counts) for name, experts in modules.items()}


def megatron(rows: Rows) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    """A pass of each module by its name."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.experts import GroupedMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import build_module

    from cudnn.integrations.megatron import experts_spec

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    allow_grouped_mlp()
    config, groups = megatron_config(), get_default_pg_collection()
    sequential = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False).submodules.experts
    specs = {"SequentialMLP": sequential, "GroupedMLP": GroupedMLP, OURS: experts_spec()}
    modules = {
        name: build_module(spec, EXPERTS, config, pg_collection=groups).to(DEVICE) for name, spec in specs.items()
    }
    copy_weights(*modules.values())
    on_host = rows.counts.cpu()  # as the dispatchers have it
    return {name: partial(rows.one_pass, experts, on_host, rows.probs) for name, experts in modules.items()}


def megatron_config(**options: Any) -> Any:
    """The configuration of a layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 32}
    sizes |= {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "ffn_hidden_size": INNER}
    options |= {"add_bias_linear": False, "bf16": True, "params_dtype": torch.bfloat16}
    options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    options |= {"bias_activation_fusion": True, "gradient_accumulation_fusion": False}
    return TransformerConfig(moe_ffn_hidden_size=INNER, **sizes, **options)


def allow_grouped_mlp() -> None:
    """``torch._grouped_mm`` stands in for the package ``grouped_gemm`` where that is missing."""
    from megatron.core.transformer.moe import experts

    if not experts.gg.grouped_gemm_is_available():
        experts.gg.assert_grouped_gemm_is_available = lambda: None
        experts.gg.ops = SimpleNamespace(gmm=gmm)


@torch.no_grad()
def copy_weights(each: Module, grouped: Module, our: Module) -> None:
    """Copies the weights of ``SequentialMLP`` into ``GroupedMLP`` and into our experts."""
    for number, theirs in ((1, "linear_fc1"), (2, "linear_fc2")):
        local_experts: Any = each.local_experts
        weights = torch.stack([getattr(expert, theirs).weight for expert in local_experts])
        getattr(our, f"weight{number}").copy_(weights)
        getattr(grouped, f"weight{number}").view(weights.mT.shape).copy_(weights.mT)


def gmm(a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """``grouped_gemm.ops.gmm`` by ``torch._grouped_mm``."""
    ends = counts.cumsum(0).to(device=a.device, dtype=torch.int32, non_blocking=True)
    return torch._grouped_mm(a, b.mT if trans_b else b, offs=ends)


def candidates(stack: str, tokens: int) -> list[Candidate]:
    """The modules of a stack. Their results are compared with those of the first."""
    passes = {"torchtitan": torchtitan, "megatron-core": megatron}[stack](Rows(tokens))
    first = next(iter(passes.values()))
    expected = {name: x.detach().clone() for name, x in first().items()}

    def check(outputs: Any) -> str:
        return off_by_norm(expected, outputs, TOLERANCE)

    return [
        Candidate(name, lambda call=call: call, check, ours=name == OURS, package=stack)
        for name, call in passes.items()
    ]


def rows_of(stack: str, tokens: int) -> list[Row]:
    """The measurements of a stack: of the device, and of the host."""
    shape, flops = f"{tokens}x{HIDDEN}x{INNER}x{EXPERTS}x{TOP_K}", 18 * tokens * TOP_K * HIDDEN * INNER
    problem = Problem(f"{shape} {stack}", partial(candidates, stack, tokens), flops, clock=GPU, memory=True)
    rows = measure(replace(problem, tokens=tokens), [STACKS[stack]])
    torch.cuda.empty_cache()
    host = measure(replace(problem, label=f"{shape} {stack}, host", flops=0.0, clock=HOST, memory=False), [])
    torch.cuda.empty_cache()
    return [*rows, *host]


def shown(row: Row) -> str:
    """A line of the table on stdout."""
    if row.refused:
        return f"| {row.problem} | {row.name} | not measured: {row.refused[:300]} | | | |"
    ratio = row.ratios[0] if row.ratios else None
    cells = [f"{row.microseconds / 1e3:.3f} ± {row.spread / 1e3:.3f}"]
    cells += [f"{1e6 * row.tokens / row.microseconds:,.0f}", f"{row.teraflops:.0f}"] if row.tokens else ["", ""]
    cells += [f"{row.memory / 1e9:.2f}" if row.memory == row.memory else ""]
    cells += [f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio else ""]
    return f"| {row.problem} | {row.name} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="*", type=int, default=[8192, 32768], metavar="TOKENS")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of what is not installed")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="replace moe_in_stacks.csv in this folder")
    parser.add_argument("--commit", default="", help="the library's commit; default: that of its git clone")
    arguments = parser.parse_args()
    commit = arguments.commit or results.source_commit()
    if arguments.save is not None and not commit:
        parser.error("--commit: got nothing; needed where the package does not run from a git clone.")
    warnings.filterwarnings("ignore")
    if arguments.wheels is not None:
        unpack(arguments.wheels)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; forward and backward")
    print("| tokens, sizes, stack | module | ms | tokens/s | TFLOP/s | GB | theirs / this |")
    print("|---|---|---|---|---|---|---|")
    lines: list[results.Result] = []
    failed = False
    for tokens in arguments.tokens:
        for stack in STACKS:
            rows = rows_of(stack, tokens)
            print(*map(shown, rows), sep="\n", flush=True)
            failed |= any(row.refused for row in rows)
            if arguments.save is not None:  # after each stack: an interrupted run keeps its figures
                run = results.this_run(driver_version(), commit)
                lines += results.results(run, NAME, "bf16", [STACKS[stack]], rows)
                results.write(results.path_of(arguments.save, NAME), lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
