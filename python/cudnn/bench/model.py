"""Benchmark of a model: two layers of Qwen3-30B-A3B's sizes in Hugging Face transformers, prefill and training.

The yardstick is transformers' own implementations, ``"grouped_mm"`` experts and ``"sdpa"`` attention. Training is a
forward pass with the loss, a backward pass and a fused AdamW step, all in bfloat16. The vocabulary is reduced in
proportion to the number of layers, so that the layers have the same share of the time as in the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.bench import GPU, QUICK, Benchmark, Call, Candidate, Options, Problem, off_by_norm, operands
from cudnn.lazy import torch

NAME = "model"
PEER, OURS, OUR_EXPERTS = "transformers", "cudnn", "cudnn experts, sdpa"
IMPLEMENTATIONS = {PEER: ("grouped_mm", "sdpa"), OURS: ("cudnn", "cudnn"), OUR_EXPERTS: ("cudnn", "sdpa")}
"""Experts and attention of each candidate."""
SHAPES = ((4, 4096, 2),)
"""Sequences, tokens of a sequence, layers."""
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
"""Qwen3-30B-A3B, which has 48 layers and a vocabulary of 151,936."""
PASSES = ("prefill", "training")
LOGITS_TOLERANCE = 0.2  # of the norm: tokens whose scores nearly tie go to other experts
LOSS_TOLERANCE = 0.01


def benchmark() -> Benchmark:
    """The benchmark; a shape is like that of ``SHAPES``."""
    return Benchmark(
        title="Qwen3-30B-A3B, two layers, in transformers",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions={"B": 1, "S": 1, "L": 1},
        problems=problems,
        quick=SHAPES,
    )


def problems(options: Options) -> list[Problem]:
    """Prefill and training of each shape."""
    return [
        Problem(
            f"{'x'.join(map(str, shape))} {which}",
            functools.partial(candidates, shape, which),
            tokens=float(shape[0] * shape[1]),
            clock=QUICK if options.quick else GPU,
            memory=True,
        )
        for shape in options.shapes or SHAPES
        for which in PASSES
    ]


def candidates(shape: tuple[int, ...], which: str) -> list[Candidate]:
    """The implementations, with equal weights and tokens. Their logits or their loss are compared with the peer's."""
    batch, length, layers = shape
    tokens = torch.randint(SIZES["vocab_size"], (batch, length), dtype=torch.int64, device=operands.DEVICE)
    expected: dict[str, Any] = {}

    def check(results: Mapping[str, Any]) -> str:
        if not expected:
            expected.update({name: value.detach().clone() for name, value in results.items()})
        return off_by_norm(expected, results, LOSS_TOLERANCE if which == "training" else LOGITS_TOLERANCE)

    def candidate(name: str) -> Candidate:
        prepare = functools.partial(passes, name, layers, tokens, which)
        return Candidate(name, prepare, check, name != PEER, package="transformers")

    return [candidate(name) for name in IMPLEMENTATIONS]


def passes(name: str, layers: int, tokens: Any, which: str) -> Call:
    """A call of one pass of a new model.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # pyright: ignore

    import cudnn.integrations.transformers as integration

    integration.register()
    experts, attention = IMPLEMENTATIONS[name]
    torch.manual_seed(0)
    with torch.device(tokens.device):
        model: Any = Qwen3MoeForCausalLM._from_config(
            Qwen3MoeConfig(num_hidden_layers=layers, **SIZES), attn_implementation=attention, dtype=torch.bfloat16
        )
    model.set_experts_implementation(experts)

    if which == "prefill":

        def prefill() -> Mapping[str, Any]:
            with torch.no_grad():
                return {"logits": model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits}

        return prefill
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=tokens.is_cuda)

    def step() -> Mapping[str, Any]:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss.detach()}

    return step
