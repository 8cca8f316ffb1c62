"""Models of Hugging Face transformers with "cudnn" experts: expert parallelism, FSDP2, and LoRA on experts."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

from cudnn.integrations.transformers import register  # noqa: E402
from support.ranks import run_processes  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
IMPLEMENTATIONS = {"dtype": torch.float32, "attn_implementation": "sdpa", "experts_implementation": "cudnn"}
TOKENS = torch.arange(40).view(2, 20) * 7 % 96


def make(**implementations: Any) -> Any:
    register()
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM._from_config(
        transformers.Qwen3MoeConfig(**SIZES), **{**IMPLEMENTATIONS, **implementations}
    )
    return model.train()


def test_expert_parallelism_and_fsdp(tmp_path: pathlib.Path) -> None:
    """Routers give the experts of other ranks IDs from the number of experts on; FSDP2 shards the experts' weights."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to shard a model")
    distributed = pytest.importorskip("transformers.distributed", reason="this transformers shards no models")
    alone = make()
    alone.save_pretrained(tmp_path / "model")
    expected = alone(input_ids=TOKENS, labels=TOKENS).loss
    expected.backward()

    def rank(number: int) -> None:
        os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE="2")
        for options in ({"tp_size": 2, "enable_expert_parallel": True}, {"fsdp_size": 2}):
            config = distributed.DistributedConfig(**options)
            model = transformers.Qwen3MoeForCausalLM.from_pretrained(
                tmp_path / "model", distributed_config=config, **IMPLEMENTATIONS
            ).train()
            weight = model.model.layers[0].mlp.experts.gate_up_proj
            assert isinstance(weight, DTensor)
            assert weight.to_local().shape[0] == 4
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            torch.testing.assert_close(loss, expected)
            loss.backward()
            for actual, right in zip(model.parameters(), alone.parameters(), strict=True):
                gradient: Any = actual.grad
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                torch.testing.assert_close(gradient, right.grad, rtol=1e-4, atol=1e-6)

    run_processes(2, tmp_path, rank)


def test_lora_of_the_experts() -> None:
    """peft makes their weights a sum: the gradients are those with transformers' own experts, and it merges them."""
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    results = []
    for implementation in ("eager", "cudnn"):
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names)
        model = peft.get_peft_model(make(experts_implementation=implementation), config)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            torch.nn.init.normal_(p, std=0.02, generator=torch.Generator().manual_seed(int("lora_A" in name)))
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=TOKENS, labels=TOKENS).loss, loss, rtol=1e-5, atol=1e-5)
        results.append((loss, {name: p.grad for name, p in trained.items()}))
    assert any("experts" in name and bool(gradient.any()) for name, gradient in results[1][1].items())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)
