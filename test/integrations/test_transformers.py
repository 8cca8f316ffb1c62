"""Hugging Face transformers with "cudnn" experts and attention: its own models, at small sizes, with random weights."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from cudnn.integrations.transformers import attention, mask, register  # noqa: E402
from support.selection import brief  # noqa: E402

BF16 = torch.bfloat16
COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "use_cache": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 64, "sliding_window": 10}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "intermediate_size": 32,
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 2,
        },
    ),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "intermediate_size": 64,
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
        },
    ),
}
TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


@functools.cache
def weights(name: str) -> Any:
    """A model with transformers' own implementations, in float32."""
    register()
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)  # larger than by default, so that all parts matter
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.normal_()
    model.set_experts_implementation("eager")
    return model


def model(name: str, attention: str, experts: str, dtype: torch.dtype = torch.float32) -> Any:
    """A copy of it with other implementations and type."""
    kind, _ = MODELS[name]
    first = weights(name)
    made = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        copy.deepcopy(first.config), attn_implementation=attention, dtype=dtype
    )
    made.load_state_dict(first.state_dict())
    made.set_experts_implementation(experts)
    assert (made.config._attn_implementation, made.config._experts_implementation) == (attention, experts)
    return made


def results(one: Any, **given: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of the loss."""
    out = one(input_ids=TOKENS, labels=TOKENS, **given)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in one.named_parameters() if p.grad is not None}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().float() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-6))


@pytest.mark.parametrize("name", MODELS)
def test_experts(name: str) -> None:
    """In bfloat16 as close to float32 as transformers' own choices, of the same routing; an expert has no tokens."""
    torch.manual_seed(1)
    x, shares = torch.randn(40, 64), torch.rand(40, 2)
    index, gradient = torch.randint(1, 4, (40, 2)), torch.randn(40, 64)
    found = {}
    for choice, dtype in (("eager", torch.float32), ("grouped_mm", BF16), ("cudnn", BF16)):
        module = model(name, "eager", choice, dtype).model.layers[0].mlp.experts
        given = [x.to(dtype).requires_grad_(), shares.clone().requires_grad_()]
        y = module(given[0], index, given[1])
        grads = torch.autograd.grad(y, [*given, *module.parameters()], gradient.to(y.dtype))
        found[choice] = dict(zip(["y", "x", "shares", *dict(module.named_parameters())], [y, *grads], strict=True))
    for each, expected in found["eager"].items():
        assert error(found["cudnn"][each], expected) < error(found["grouped_mm"][each], expected) + 2e-3, each


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    """Where bfloat16 leaves a tie between experts, another one may be chosen: of one token in ten, at most."""
    own = results(weights(name))
    weights(name).zero_grad()
    theirs = results(model(name, "eager", "eager", BF16))
    ours = results(model(name, "cudnn", "cudnn", BF16))
    assert ours.keys() == theirs.keys() == own.keys()
    assert any("experts" in each for each in own)
    tokens = [(each.pop("logits").float() - own["logits"]).norm(dim=-1).quantile(0.9) for each in (ours, theirs)]
    assert tokens[0] < 1.5 * tokens[1]
    for each in ours:
        assert error(ours[each], own[each]) < 2 * error(theirs[each], own[each]) + 0.15, each


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in MODELS), ("gpt-oss", torch.float64)])
def test_experts_in_wide_types(name: str, dtype: torch.dtype) -> None:
    """Logits and gradients can be compared closely, in float64 to more digits."""
    found = [results(model(name, "eager", experts, dtype)) for experts in ("cudnn", "eager")]
    slack = 1e-4 if dtype is torch.float32 else 1e-7  # rotations have float32 in them
    for each, expected in found[1].items():
        assert expected.dtype is dtype
        limit = slack * float(expected.abs().max())
        torch.testing.assert_close(found[0][each], expected, rtol=slack, atol=limit, msg=each)


@pytest.mark.parametrize("padded", brief([False, True], 0))
@pytest.mark.parametrize("name", MODELS)
def test_attention_in_float32(name: str, padded: bool) -> None:
    """On the CPU float32 can be compared closely: windows, sinks, padding, and keys wider than values."""
    seen = torch.ones_like(TOKENS)
    if padded:
        seen[0, :5] = 0
    expected = results(model(name, "eager", "eager"), attention_mask=seen)
    found = results(model(name, "cudnn", "eager"), attention_mask=seen)
    rows = seen.bool()
    torch.testing.assert_close(found["logits"][rows], expected["logits"][rows], rtol=1e-4, atol=1e-4)
    if not padded:  # rows that are padding have other results, and those have gradients
        for each, gradient in expected.items():
            torch.testing.assert_close(found[each], gradient, rtol=1e-3, atol=1e-4, msg=each)


def losses(one: Any, steps: int) -> list[float]:
    """Of training on the same few tokens, in autocast."""
    optimizer = torch.optim.AdamW(one.parameters(), lr=2e-3)
    found = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=BF16):
            loss = one(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("name", "steps"), brief([("gpt-oss", 8), *((name, 50) for name in MODELS)], 0))
def test_trains_along_the_same_losses(name: str, steps: int) -> None:
    theirs, ours = (losses(model(name, choice, choice), steps) for choice in ("eager", "cudnn"))
    assert theirs[-1] < (0.5 if steps == 50 else 0.9) * theirs[0]
    apart = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    assert apart < 0.03 * theirs[0]  # a tie between experts may fall the other way


def test_generates_with_a_cache() -> None:
    """Token by token, with the keys of a cache, as in one pass."""
    found = [
        model("gpt-oss", choice, "eager").generate(TOKENS[:, :12], max_new_tokens=8, do_sample=False, use_cache=True)
        for choice in ("eager", "cudnn")
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_compiled_without_graph_breaks(name: str) -> None:
    """Each model finds its activation in its own way."""
    layer = model(name, "eager", "cudnn").model.layers[-1].mlp
    x = torch.randn(2, 5, COMMON["hidden_size"])
    torch.compiler.reset()
    found, expected = (one(x) for one in (torch.compile(layer, backend="eager", fullgraph=True), layer))
    torch.testing.assert_close(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
def test_compiled_without_graph_breaks(name: str) -> None:
    torch.compiler.reset()
    one = model(name, "cudnn", "cudnn", BF16)
    expected = one(input_ids=TOKENS).logits
    found = torch.compile(one, backend="aot_eager", fullgraph=True)(input_ids=TOKENS).logits
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.1)


def test_masks() -> None:
    """No mask is made for a causal sliding window over a whole sequence; every other mask is that of "sdpa"."""
    window, size = sliding_window_causal_mask_function(4), {"local_size": 4}
    assert mask(2, 9, 9, mask_function=window, **size) is None
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, 0] = False
    chunks = chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    for given in (
        {"mask_function": window, "attention_mask": padding, **size},
        {"mask_function": window, "allow_is_causal_skip": False, **size},
        {"mask_function": window, "q_offset": 3, "kv_length": 12, **size},
        {"mask_function": chunks, **size},
    ):
        given = {"kv_length": 9, **given}
        found = mask(2, 9, **given)
        assert torch.equal(found, sdpa_mask(2, 9, **given))
    packed = packed_sequence_mask_function(torch.arange(9).expand(2, 9) // 5)
    given = {"mask_function": and_masks(sliding_window_causal_mask_function(12), packed), "local_size": 12}
    found = mask(2, 9, 9, allow_is_causal_skip=False, **given)  # a window longer than the sequences
    assert torch.equal(found, sdpa_mask(2, 9, 9, allow_is_causal_skip=False, **given))


def test_a_window_that_the_model_does_not_pass_on() -> None:
    """As Qwen2-MoE, whose layers have it, and Phi-3.5-MoE, whose configuration does."""
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=BF16) for _ in range(3))
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    full, window = (attention(SimpleNamespace(), q, k, v, None, sliding_window=size)[0] for size in (None, 4))
    assert not torch.equal(full, window)
    for layer, expected in (
        (SimpleNamespace(config=SimpleNamespace(sliding_window=4)), window),
        (SimpleNamespace(config=SimpleNamespace(**kinds), layer_idx=0), full),
        (SimpleNamespace(config=SimpleNamespace(**kinds), layer_idx=1, sliding_window=4), window),
    ):
        assert torch.equal(attention(layer, q, k, v, None)[0], expected)


class Experts(torch.nn.Module):
    """Experts without gates, as some models have them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = 3
        self.up_proj = torch.nn.Parameter(torch.randn(3, 32, 16, dtype=BF16))
        self.down_proj = torch.nn.Parameter(torch.randn(3, 16, 32, dtype=BF16) / 32)
        self.act_fn = transformers.activations.ACT2FN["relu2"]

    def forward(self, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return sum(
            shares[:, k, None]
            * torch.einsum("ti,thi->th", self.act_fn(self._up(x, index[:, k])), self.down_proj[index[:, k]])
            for k in range(index.shape[1])
        )

    def _up(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.einsum("th,tih->ti", x, self.up_proj[index])


def test_experts_without_gates_and_what_is_refused() -> None:
    register()
    config = transformers.Qwen3MoeConfig(**COMMON)
    experts = use_experts_implementation(Experts, has_gate=False)(config)
    x, index, shares = torch.randn(5, 16, dtype=BF16), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    found = []
    for choice in ("eager", "cudnn"):
        config._experts_implementation = choice
        found.append(experts(x, index, shares).float())
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(
        ValueError, match=r"activation: got GELU through .*_default_apply_gate in Experts; allowed: SiLU"
    ):
        experts(x, index, shares)
    one = model("Mixtral", "cudnn", "eager")
    layer = one.model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 16)
    chosen = transformers.AttentionInterface()["cudnn"]
    with pytest.raises(ValueError, match="softcap: got a value; allowed: None"):
        chosen(layer, q, q, q, None, softcap=30.0)
