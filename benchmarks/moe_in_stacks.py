"""The experts of torchtitan and of Megatron-Core with our kernels, compared with their own, at Qwen3-30B-A3B's sizes.

    python benchmarks/moe_in_stacks.py WHEELS [TOKENS ...]

WHEELS is a folder with wheels of what is not installed: torchtitan, spmd_types, tyro, docstring_parser, typeguard and
megatron_core; they are unpacked to a temporary folder. TOKENS: 8192 and 32768.

Rows are dispatched already: 8 experts of 128 for each token, chosen at random; a module gets them sorted by expert.
torchtitan's experts run ``torch._grouped_mm``. Megatron's ``GroupedMLP`` needs the package ``grouped_gemm``: where that
is missing, ``torch._grouped_mm`` stands in for its GEMM. ``SequentialMLP`` is a loop over experts.

Device time is that of CUDA events around forward and backward; host time is until all kernels are queued, of a call
with an empty queue. Both are medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
CALLS = 12


def unpack(folder: Path) -> None:
    """Makes the wheels of a folder importable."""
    target = tempfile.mkdtemp()
    for wheel in folder.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(target)
    sys.path.append(target)


def rows(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, the gradient of their outputs, probabilities, and counts on the device."""
    torch.manual_seed(0)
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices
    x, dy = (torch.randn(tokens * TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    probs = torch.rand(len(x), device="cuda", requires_grad=True)
    return x.requires_grad_(), dy, probs, chosen.flatten().bincount(minlength=EXPERTS)


def torchtitan(tokens: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    from torchtitan.models.common.moe import GroupedExperts

    from cudnn.integrations.torchtitan import cudnn_experts

    draw = partial(torch.nn.init.normal_, std=0.02)
    init = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), draw)
    config = GroupedExperts.Config(dim=HIDDEN, hidden_dim=INNER, num_experts=EXPERTS, param_init=init)
    x, dy, _, counts = rows(tokens)
    for name, each in (("torchtitan GroupedExperts", config), ("torchtitan + cudnn_experts", cudnn_experts(config))):
        with torch.device("cuda"):
            experts = each.build().to(torch.bfloat16)
        experts.init_states()
        yield name, partial(one_pass, experts, x, dy, counts)


def megatron(tokens: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe import experts as megatron_experts
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cudnn.integrations.megatron import experts_spec

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    if not megatron_experts.gg.grouped_gemm_is_available():
        megatron_experts.gg.assert_grouped_gemm_is_available = lambda: None
        megatron_experts.gg.ops = SimpleNamespace(gmm=gmm)
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 32}
    sizes |= {"num_moe_experts": EXPERTS, "moe_router_topk": TOP_K, "ffn_hidden_size": INNER}
    options = {"add_bias_linear": False, "bf16": True, "params_dtype": torch.bfloat16}
    options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    options |= {"bias_activation_fusion": True, "gradient_accumulation_fusion": False}
    config = TransformerConfig(moe_ffn_hidden_size=INNER, **sizes, **options)
    groups = get_default_pg_collection()
    sequential = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False).submodules.experts
    x, dy, probs, counts = rows(tokens)
    on_host = counts.cpu()  # as the dispatchers have it
    specs = (
        ("SequentialMLP", sequential),
        ("GroupedMLP", megatron_experts.GroupedMLP),
        ("+ experts_spec", experts_spec()),
    )
    for name, spec in specs:
        experts = build_module(spec, EXPERTS, config, pg_collection=groups).cuda()
        yield f"Megatron {name}", partial(one_pass, experts, x, dy, on_host, probs)


def one_pass(experts: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, *rest: torch.Tensor) -> None:
    """Forward and backward, with new gradients."""
    experts.zero_grad()
    x.grad = None
    y = experts(x, *rest)
    (y[0] if isinstance(y, tuple) else y).backward(dy)


def gmm(a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """``grouped_gemm.ops.gmm`` by ``torch._grouped_mm``."""
    ends = counts.cumsum(0).to(device=a.device, dtype=torch.int32, non_blocking=True)
    return torch._grouped_mm(a, b.mT if trans_b else b, offs=ends)


def measured(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds on the device, and on the host."""
    for _ in range(3):
        call()
    device, host = [], []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        start.record()
        call()
        end.record()
        host.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def main() -> None:
    warnings.filterwarnings("ignore")
    unpack(Path(sys.argv[1]))
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; forward and backward")
    print("module,tokens,device_ms,host_ms,tokens_per_s,tflops")
    for tokens in map(int, sys.argv[2:] or ("8192", "32768")):
        flops = 18 * tokens * TOP_K * HIDDEN * INNER
        for stack in (torchtitan, megatron):
            try:
                for name, call in stack(tokens):
                    device, host = measured(call)
                    figures = f"{device:.3f},{host:.3f},{1e3 * tokens / device:.0f},{flops / device / 1e9:.0f}"
                    print(f"{name},{tokens},{figures}", flush=True)
            except ImportError as error:
                print(f"{stack.__name__},{tokens},not measured: {error}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
