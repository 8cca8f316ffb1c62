"""Hugging Face transformers: the MLPs of dense models by ``gated_mlp``, at small sizes, with random weights."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")

from cudnn.gated_mlp.layer import are_adjacent  # noqa: E402
from cudnn.integrations import _gated_mlp  # noqa: E402
from cudnn.integrations.transformers import adjoin, register  # noqa: E402

TOKENS = torch.randint(3, 96, (2, 16), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama with biases": ("Llama", {"mlp_bias": True}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
}


def model(name: str, implementation: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    register()
    family, options = MODELS.get(name, (name, {"head_dim": 16}))
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    chosen = {} if implementation is None else {"experts_implementation": implementation}
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=dtype, **chosen)


def results(one: Any) -> list[torch.Tensor]:
    """Logits, and the gradients of the loss."""
    out = one(input_ids=TOKENS, labels=TOKENS)
    return [out.logits, *torch.autograd.grad(out.loss, list(one.parameters()))]


def close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).norm().detach()) <= tolerance * float(other.norm().detach())


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    gated_mlp = _gated_mlp.gated_mlp
    monkeypatch.setattr(_gated_mlp, "gated_mlp", lambda *given: calls.append(given) or gated_mlp(*given))
    one = model(name)
    expected = results(one)
    assert not calls
    ours = model(name, "cudnn")
    ours.load_state_dict(one.state_dict())
    close(results(ours), expected, 1e-5)
    assert len(calls) == 1
    one.set_experts_implementation("cudnn")
    close(results(one), expected, 1e-5)
    assert len(calls) == 2
    one.set_experts_implementation("eager")
    results(one)
    assert len(calls) == 2


def test_weights_lie_side_by_side_and_stay_the_same() -> None:
    one = model("Llama", "cudnn")
    mlp = one.model.layers[0].mlp
    before, state = dict(one.named_parameters()), {k: v.clone() for k, v in one.state_dict().items()}
    assert not are_adjacent(mlp.gate_proj.weight, mlp.up_proj.weight)
    results(one)
    assert are_adjacent(mlp.gate_proj.weight, mlp.up_proj.weight)
    assert all(parameter is before[name] for name, parameter in one.named_parameters())
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    twin = copy.deepcopy(one)
    adjoin(twin)
    twin_mlp = twin.model.layers[0].mlp
    assert are_adjacent(twin_mlp.gate_proj.weight, twin_mlp.up_proj.weight)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    one(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert are_adjacent(mlp.gate_proj.weight, mlp.up_proj.weight)
    assert not torch.equal(mlp.up_proj.weight, twin_mlp.up_proj.weight)


def test_what_the_kernels_lack_runs_the_models_own_forward(caplog: pytest.LogCaptureFixture) -> None:
    _gated_mlp._logged.clear()
    gemma, ours = model("Gemma"), model("Gemma", "cudnn")
    ours.load_state_dict(gemma.state_dict())
    with caplog.at_level(logging.WARNING):
        close(results(ours), results(gemma), 0.0)
    assert "GemmaMLP runs transformers' own forward, since it has the activation" in caplog.text
    llama = model("Llama", "cudnn")
    llama.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING):
        results(llama)
    assert "LlamaMLP runs transformers' own forward, since it has hooks of its linear layers" in caplog.text


def test_compiled_without_graph_breaks() -> None:
    one = model("Qwen3", "cudnn")
    mlp = one.model.layers[0].mlp
    x = torch.randn(2, 5, 64)
    torch.compiler.reset()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), mlp(x))
