"""Hugging Face transformers with "cudnn" experts and attention: its own models, at small sizes, with random weights."""

from __future__ import annotations

import copy
import functools
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Hugging Face transformers is not installed")
from transformers.integrations.moe import use_experts_implementation  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from cudnn.integrations._causal_mask import CausalMask, MaskView  # noqa: E402
from cudnn.integrations.transformers import attention, mask, register  # noqa: E402
from integrations import transformers_sweep  # noqa: E402
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


def results(one: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of the loss."""
    out = one(input_ids=TOKENS, labels=TOKENS, **arguments)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad for n, p in one.named_parameters() if p.grad is not None}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.detach().float() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-6))


@pytest.mark.parametrize("name", MODELS)
def test_experts(name: str) -> None:
    """In bfloat16 as close to float32 as transformers' own choices, of the same routing; an expert has no tokens."""
    torch.manual_seed(1)
    x, shares = torch.randn(40, 64), torch.rand(40, 2)
    index, gradient = torch.randint(1, 4, (40, 2)), torch.randn(40, 64)
    actual = {}
    for choice, dtype in (("eager", torch.float32), ("grouped_mm", BF16), ("cudnn", BF16)):
        module = model(name, "eager", choice, dtype).model.layers[0].mlp.experts
        arguments = [x.to(dtype).requires_grad_(), shares.clone().requires_grad_()]
        y = module(arguments[0], index, arguments[1])
        grads = torch.autograd.grad(y, [*arguments, *module.parameters()], gradient.to(y.dtype))
        actual[choice] = dict(zip(["y", "x", "shares", *dict(module.named_parameters())], [y, *grads], strict=True))
    for each, expected in actual["eager"].items():
        assert error(actual["cudnn"][each], expected) < error(actual["grouped_mm"][each], expected) + 2e-3, each


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
    actual = [results(model(name, "eager", experts, dtype)) for experts in ("cudnn", "eager")]
    slack = 1e-4 if dtype is torch.float32 else 1e-7  # rotations have float32 in them
    for each, expected in actual[1].items():
        assert expected.dtype is dtype
        limit = slack * float(expected.abs().max())
        torch.testing.assert_close(actual[0][each], expected, rtol=slack, atol=limit, msg=each)


@pytest.mark.parametrize("padded", brief([False, True], 0))
@pytest.mark.parametrize("name", MODELS)
def test_attention_in_float32(name: str, padded: bool) -> None:
    """On the CPU float32 can be compared closely: windows, sinks, padding, and keys wider than values."""
    seen = torch.ones_like(TOKENS)
    if padded:
        seen[0, :5] = 0
    expected = results(model(name, "eager", "eager"), attention_mask=seen)
    actual = results(model(name, "cudnn", "eager"), attention_mask=seen)
    rows = seen.bool()
    torch.testing.assert_close(actual["logits"][rows], expected["logits"][rows], rtol=1e-4, atol=1e-4)
    if not padded:  # rows that are padding have other results, and those have gradients
        for each, gradient in expected.items():
            torch.testing.assert_close(actual[each], gradient, rtol=1e-3, atol=1e-4, msg=each)


def losses(one: Any, steps: int) -> list[float]:
    """Of training on the same few tokens, in autocast."""
    optimizer = torch.optim.AdamW(one.parameters(), lr=2e-3)
    actual = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=BF16):
            loss = one(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        actual.append(loss.item())
    return actual


@pytest.mark.parametrize(("name", "steps"), brief([("gpt-oss", 8), *((name, 50) for name in MODELS)], 0))
def test_trains_along_the_same_losses(name: str, steps: int) -> None:
    theirs, ours = (losses(model(name, choice, choice), steps) for choice in ("eager", "cudnn"))
    assert theirs[-1] < (0.5 if steps == 50 else 0.9) * theirs[0]
    apart = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    assert apart < 0.03 * theirs[0]  # a tie between experts may fall the other way


def test_generates_with_a_cache() -> None:
    """Token by token, with the keys of a cache, as in one pass."""
    actual = [
        model("gpt-oss", choice, "eager").generate(TOKENS[:, :12], max_new_tokens=8, do_sample=False, use_cache=True)
        for choice in ("eager", "cudnn")
    ]
    assert torch.equal(*actual)


@pytest.mark.parametrize("name", MODELS)
def test_experts_are_compiled_without_graph_breaks(name: str) -> None:
    """Each model finds its activation in its own way."""
    layer = model(name, "eager", "cudnn").model.layers[-1].mlp
    x = torch.randn(2, 5, COMMON["hidden_size"])
    torch.compiler.reset()
    actual, expected = (one(x) for one in (torch.compile(layer, backend="eager", fullgraph=True), layer))
    torch.testing.assert_close(actual, expected)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss"])
def test_compiled_without_graph_breaks(name: str) -> None:
    torch.compiler.reset()
    one = model(name, "cudnn", "cudnn", BF16)
    expected = one(input_ids=TOKENS).logits
    actual = torch.compile(one, backend="aot_eager", fullgraph=True)(input_ids=TOKENS).logits
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.05, atol=0.1)


def test_masks() -> None:
    """A mask that is a band has its bounds; every other mask is that of "sdpa"."""
    window, size = sliding_window_causal_mask_function(4), {"local_size": 4}
    padding = torch.ones(2, 9, dtype=torch.bool)
    assert mask(2, 9, 9, mask_function=causal_mask_function, attention_mask=padding) is None
    offset = torch.zeros((), dtype=torch.int64)  # as a static cache has it
    room = torch.cat((padding, ~padding), dim=1)
    for arguments in (
        {"mask_function": window, **size},
        {"mask_function": window, "attention_mask": padding, **size},
        {"mask_function": window, "kv_length": 18, "q_offset": offset, "attention_mask": room, **size},
        {"mask_function": causal_mask_function, "kv_length": 18},
        {"mask_function": causal_mask_function, "kv_length": 18, "q_offset": offset, "attention_mask": room},
    ):
        arguments = {"kv_length": 9, **arguments}
        actual, expected = mask(2, 9, **arguments), sdpa_mask(2, 9, **arguments | {"allow_is_causal_skip": False})
        assert type(actual) is CausalMask
        assert actual.shape == (2, 1, 9, arguments["kv_length"])
        seen = actual[:, :, :, : expected.shape[3]].dense()
        assert torch.equal(seen, expected)
    padding[0, 0] = False
    chunks = chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    for arguments in (
        {"mask_function": window, "attention_mask": padding, **size},
        {"mask_function": window, "allow_is_causal_skip": False, **size},
        {"mask_function": window, "q_offset": 3, "kv_length": 12, **size},
        {"mask_function": chunks, **size},
    ):
        arguments = {"kv_length": 9, **arguments}
        actual = mask(2, 9, **arguments)
        assert torch.equal(actual, sdpa_mask(2, 9, **arguments))
    packed = packed_sequence_mask_function(torch.arange(9).expand(2, 9) // 5)
    arguments = {"mask_function": and_masks(sliding_window_causal_mask_function(12), packed), "local_size": 12}
    actual = mask(2, 9, 9, allow_is_causal_skip=False, **arguments)  # a window longer than the sequences
    assert torch.equal(actual, sdpa_mask(2, 9, 9, allow_is_causal_skip=False, **arguments))


@pytest.mark.parametrize("window", [None, 3])
def test_a_causal_mask_is_read_as_any_mask(window: int | None) -> None:
    """By slices it stays a band; any other operation reads its elements; none can write them."""
    one = CausalMask(torch.empty(0), (2, 1, 6, 8), 0, window)
    rows, keys = torch.arange(6)[:, None], torch.arange(8)
    dense = ((keys <= rows) & (keys > rows - (window or 9))).expand(2, 1, 6, 8).contiguous()
    assert torch.equal(one.dense(), dense)
    for index in (
        (slice(None), slice(None), slice(-2, None)),
        (slice(1), slice(None), slice(1, 4), slice(0, 5)),
        (..., slice(2, 3), slice(None)),
        (..., slice(0, 0)),
    ):
        assert type(one[index]) is CausalMask
        assert torch.equal(one[index].dense(), dense[index])
    for read in (
        lambda x: x[..., 1:],
        lambda x: x[:, 0],
        lambda x: x[:, :, ::2],
        lambda x: x & (keys < 3),
        lambda x: torch.where(x, 0.0, -1.0),
        lambda x: x.to(torch.float32),
        lambda x: x.expand(2, 4, 6, 8),
        lambda x: torch.cat((x, x), -1),
        lambda x: x.any(),
        lambda x: x.clone().masked_fill_(x, False),
    ):
        assert type(read(one)) in (torch.Tensor, MaskView)
        assert torch.equal(read(one), read(dense))
    with pytest.raises(ValueError, match=r"got a CausalMask; allowed: a mask with storage"):
        one[:, :, 0] = True
    with pytest.raises(ValueError, match="got a CausalMask"):
        one.masked_fill_(keys < 3, False)
    for write in (
        lambda x: x[:, 0].fill_(False),
        lambda x: x[:, 0].unsqueeze(1)[..., 2:].zero_(),
        lambda x: x.transpose(2, 3).logical_not_(),
        lambda x: x[:, 0].__setitem__(0, False),
        lambda x: x.unbind(0)[0].fill_(False),
        lambda x: torch.logical_not(dense, out=x[:, 0]),
    ):
        with pytest.raises(ValueError, match="got a CausalMask"):
            write(one)
    copy = one[:, 0].clone()
    assert type(copy) is torch.Tensor
    assert not copy.fill_(False).any()
    q = torch.randn(2, 2, 6, 16)
    k = torch.randn(2, 2, 8, 16)
    found, expected = (attention(SimpleNamespace(), q, k, k, x.expand(2, 2, 6, 8))[0] for x in (one, dense))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("rows", "keys", "first", "window"), [(6, 6, 0, 3), (6, 9, 0, None), (2, 8, 4, 3), (1, 8, 5, 2)]
)
def test_attention_by_a_causal_mask(rows: int, keys: int, first: int, window: int | None) -> None:
    """Values and gradients are those with its elements: windows, room for more keys, and the last rows."""
    arguments = [torch.randn(2, heads, length, 16) for heads, length in ((4, rows), (2, keys), (2, keys))]
    arguments = [x.double().requires_grad_() for x in arguments]
    one = CausalMask(torch.empty(0), (2, 1, 8, keys), 0, window)[:, :, first : first + rows]
    actual, expected = (attention(SimpleNamespace(), *arguments, each)[0] for each in (one, one.dense()))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, arguments, torch.ones_like(x)) for x in (actual, expected)))


def test_a_causal_mask_is_compiled_without_graph_breaks() -> None:
    """A layer alone is compiled, and gets the mask of the model, which is not."""
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    one = CausalMask(torch.empty(0), (1, 1, 9, 9), 0, 4)
    torch.compiler.reset()
    module = torch.nn.Module()
    layer = torch.compile(lambda *x: attention(module, *x)[0], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(layer(q, k, v, one), attention(SimpleNamespace(), q, k, v, one.dense())[0])


def test_which_keys_a_row_sees_is_not_guessed() -> None:
    """Without a mask, a causal call has sq == sk and no window; compressed keys have another number."""
    q, k = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 12, 16)
    module = SimpleNamespace()
    with pytest.raises(ValueError, match=r"attention_mask: got None, with 9 rows and 12 keys; .* To fix it, pass"):
        attention(module, q, k, k, None)
    with pytest.raises(ValueError, match=r"attention_mask: got None, with 9 rows and 3 keys"):
        attention(module, q, k[:, :, :3], k[:, :, :3], None)
    with pytest.raises(ValueError, match=r"sliding_window: got 4 without a mask for 9 rows; .*attn_implementation="):
        attention(module, q, q, q, None, sliding_window=4)
    whole = attention(module, q, q, q, None, sliding_window=9)[0]
    causal = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(whole, causal)
    cross = torch.nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2)
    for arguments in ({"is_causal": False}, {"sliding_window": 4, "is_causal": False}):
        torch.testing.assert_close(attention(module, q, k, k, None, **arguments)[0], cross)
    torch.testing.assert_close(attention(SimpleNamespace(is_causal=False), q, k, k, None)[0], cross)
    torch.testing.assert_close(attention(module, q[:, :, :1], k, k, None)[0], cross[:, :1])  # one row sees all keys


ARGUMENTS = {
    "indices": torch.zeros(1, 9, 2, dtype=torch.int64),
    "block_indices": torch.zeros(1, 9, 2, dtype=torch.int64),
    "sinks": torch.zeros(1, 2, 9, 1),
    "position_bias": torch.zeros(1, 2, 9, 9),
    "head_mask": torch.ones(2),
    "max_length_k": 9,
    "seq_idx": torch.zeros(1, 9),
    "cache": object(),
    "output_attentions": True,
    "deterministic": True,
    "what_a_later_version_adds": False,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_without_a_meaning_here_are_refused(name: str) -> None:
    """Whatever chooses keys, changes scores or asks for weights; None is no choice."""
    q = torch.randn(1, 2, 9, 16)
    with pytest.raises(ValueError, match=rf"attention: {name}: got .*; allowed: None( or False)?\. To fix it, "):
        attention(SimpleNamespace(), q, q, q, None, **{name: ARGUMENTS[name]})
    ignored = {name: None, "position_ids": torch.arange(9), "output_attentions": False, "use_cache": True}
    assert torch.equal(*(attention(SimpleNamespace(), q, q, q, None, **each)[0] for each in (ignored, {})))


def test_what_packed_sequences_and_softcaps_are_refused() -> None:
    q, seen = torch.randn(1, 2, 9, 64), torch.ones(1, 1, 9, 9, dtype=torch.bool)
    ends = torch.tensor([0, 4, 9])
    for arguments, message in [
        ({"softcap": 30.0, "attention_mask": seen}, r"softcap: got 30\.0 with a mask .*attn_implementation=.eager"),
        ({"cu_seq_lens_q": ends}, "cu_seq_lens_k: got None; allowed: both"),
        ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "attention_mask": seen}, "attention_mask: got a mask"),
    ]:
        with pytest.raises(ValueError, match=message):
            attention(SimpleNamespace(), q, q, q, **{"attention_mask": None, **arguments})


PACKED_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Gemma2": {"sliding_window": 8, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64},
    "GptOss": {"sliding_window": 8, "num_local_experts": 4},
}
LENGTHS = (20, 1, 13, 30)


@pytest.mark.parametrize("family", PACKED_MODELS)
def test_packed_sequences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients are those of "eager" with a block-diagonal mask, and no mask is stored."""
    sizes = COMMON | {"num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 32} | PACKED_MODELS[family]
    torch.manual_seed(0)
    one = getattr(transformers, f"{family}ForCausalLM")._from_config(
        getattr(transformers, f"{family}Config")(**sizes), attn_implementation="eager", dtype=torch.float32
    )
    for parameter in one.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1)
    tokens = torch.randint(3, 96, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    ends = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
    block = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS)).bool()
    full, window = (
        torch.zeros(seen.shape).masked_fill(~seen, -1e30)[None, None]
        for seen in (block, block & torch.ones(block.shape).triu(-7).bool())
    )

    def passes(kind: str, **arguments: Any) -> list[torch.Tensor]:
        one.set_attn_implementation(kind)
        one.zero_grad()
        out = one(input_ids=tokens, position_ids=positions, labels=tokens, **arguments)
        out.loss.backward()
        return [out.logits.detach(), *(p.grad.clone() for p in one.parameters() if p.grad is not None)]

    masks = full if family == "Qwen3" else {"full_attention": full, "sliding_attention": window}
    expected = passes("eager", attention_mask=masks)
    monkeypatch.setattr(CausalMask, "dense", lambda self: pytest.fail("a mask is stored"))
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 30, "max_length_k": 30}
    for arguments in ({}, lengths):
        for actual, want in zip(passes("cudnn", **arguments), expected, strict=True):
            torch.testing.assert_close(actual, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()) + 1e-8)


def test_packed_sequences_of_other_head_sizes_by_a_mask() -> None:
    positions = torch.cat([torch.arange(n) for n in (10, 14)])[None].expand(2, -1)
    outputs = [
        model("Qwen3-MoE", kind, "eager")(input_ids=TOKENS, position_ids=positions).logits for kind in ("cudnn", "sdpa")
    ]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_a_packed_mask_is_read_as_any_mask() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    for window in (None, 2):
        first = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        function = and_masks(first, packed_sequence_mask_function(ids))
        packed = mask(2, 6, 6, mask_function=function, local_size=window, allow_is_causal_skip=False)
        assert isinstance(packed, CausalMask)
        assert packed.ends.tolist() == [0, 3, 5, 6, 7, 12]
        assert packed.longest == 5
        stored = sdpa_mask(2, 6, 6, 0, mask_function=function, allow_is_causal_skip=False)
        assert torch.equal(packed.dense(), stored)
        assert torch.equal(packed[:, :, 2:] & True, stored[:, :, 2:])
    other = and_masks(causal_mask_function, packed_sequence_mask_function(ids), lambda b, h, q, k: k != 1)
    assert not isinstance(mask(2, 6, 6, mask_function=other, allow_is_causal_skip=False), CausalMask)


def test_a_row_that_sees_all_keys_of_its_window_needs_no_mask() -> None:
    function = sliding_window_causal_mask_function(4)
    assert mask(1, 1, 4, 9, mask_function=function, local_size=4, kv_offset=6) is None
    assert mask(1, 1, 10, 9, mask_function=function, local_size=4, kv_offset=0) is not None


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_are_contiguous(rows: int, masked: bool) -> None:
    """So that a model may call .view on them, also where keys are wider than values."""
    q, k, v = (torch.randn(2, 2, length, size) for length, size in ((rows, 16), (9, 16), (9, 8)))
    seen = torch.ones(2, 1, rows, 9, dtype=torch.bool) if masked or rows == 1 else None
    out, weights = attention(SimpleNamespace(), q, k, v, seen)
    assert out.is_contiguous()
    assert out.view(2, rows, 16).shape == (2, rows, 16)
    assert weights is None


REFUSED = {
    "DeepseekV32": "sdpa",  # keys by an index
    "GlmMoeDsa": "sdpa",
    "Falcon": "sdpa",  # a path for "sdpa", and one for all others
    "DeepseekV4": "eager",  # compressed keys
    "GPTJ": "eager",  # a class for each implementation
    "Bark": "eager",
    "Mamba": "eager",  # no attention
    "Longformer": "eager",  # attention that does not call the interface
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_a_meaning_here_are_refused(name: str) -> None:
    """When they are built, or their implementation is set; before their weights exist."""
    register()
    actual = [kind for kind in ("ForCausalLM", "ForMaskedLM", "CausalModel") if hasattr(transformers, name + kind)]
    if not actual:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind, config = getattr(transformers, name + actual[0]), getattr(transformers, f"{name}Config")
    if name == "Bark":
        kind, config = transformers.BarkCausalModel, transformers.models.bark.BarkSemanticConfig
    if name == "GPTJ" and kind._supports_attention_backend:
        pytest.skip(f"transformers {transformers.__version__} has one class, which calls the interface")
    with torch.device("meta"):
        wanted = rf"model: got \w+.*; allowed: classes .* To fix it, choose attn_implementation=\"{REFUSED[name]}\""
        with pytest.raises(ValueError, match=wanted):
            kind._from_config(config(), attn_implementation="cudnn")
    with pytest.raises(ValueError, match="model: got"):  # where a class of the user's own is made of it
        type("Own", (kind,), {"__module__": kind.__module__})._from_config(config(), attn_implementation="cudnn")


def test_a_model_with_sinks_is_taken_and_one_without_support_is_not() -> None:
    """As transformers' own check: its "sdpa" has no sinks, ours has; and the check is added once."""
    register()
    register()
    check = transformers.PreTrainedModel.get_correct_attn_implementation
    assert not hasattr(check.__wrapped__, "__wrapped__")
    first = weights("gpt-oss")
    assert not first._supports_sdpa
    assert first.get_correct_attn_implementation("cudnn") == "cudnn"
    assert first.get_correct_attn_implementation("eager") == "eager"
    with torch.device("meta"):
        one = transformers.MambaModel._from_config(transformers.MambaConfig(num_hidden_layers=1, hidden_size=16))
    with pytest.raises(ValueError, match=r'model: got MambaModel; .*choose attn_implementation="eager"'):
        one.set_attn_implementation("cudnn")
    one.set_attn_implementation("eager")


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
    actual = []
    for choice in ("eager", "cudnn"):
        config._experts_implementation = choice
        actual.append(experts(x, index, shares).float())
    torch.testing.assert_close(*actual, rtol=0.05, atol=0.05)
    experts.act_fn = torch.nn.GELU()
    with pytest.raises(
        ValueError, match=r"activation: got GELU\(.*\) without gates in Experts; allowed: SiLU .* squared"
    ):
        experts(x, index, shares)


def moe(act_fn: Any = torch.nn.functional.silu, **options: Any) -> Any:
    """A layer of gated experts that chooses "cudnn"."""
    register()

    class Gated(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 3
            self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 64, 16))
            self.down_proj = torch.nn.Parameter(torch.randn(3, 16, 32))
            self.act_fn = act_fn

        def forward(self, *_: Any) -> Any:
            raise AssertionError

    config = transformers.Qwen3MoeConfig(**COMMON)
    config._experts_implementation = "cudnn"
    return use_experts_implementation(Gated, **options)(config)


ROUTED = (torch.randn(5, 16), torch.randint(0, 3, (5, 2)), torch.rand(5, 2))
SILU = {
    "nn.SiLU": torch.nn.SiLU(),
    "in place": torch.nn.SiLU(inplace=True),
    "transformers": transformers.activations.ACT2FN["silu"],
    "swish": transformers.activations.ACT2FN["swish"],
    "F.silu": torch.nn.functional.silu,
    "aten": torch.ops.aten.silu,
    "aten.default": torch.ops.aten.silu.default,
    "partial": functools.partial(torch.nn.functional.silu, inplace=False),
    "partial of aten": functools.partial(torch.ops.aten.silu),
    "partial of a partial": functools.partial(functools.partial(torch.nn.SiLU())),
}


@pytest.mark.parametrize("name", SILU)
def test_spellings_of_silu(name: str) -> None:
    layer = moe(SILU[name])
    actual = layer(*ROUTED)
    x, index, shares = ROUTED
    expected = torch.zeros_like(x)
    for k in range(2):
        gate, up = torch.einsum("th,tih->ti", x, layer.gate_up_proj[index[:, k]]).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate) * up
        expected += shares[:, k, None] * torch.einsum("ti,thi->th", hidden, layer.down_proj[index[:, k]])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class SiLU(torch.nn.Module):
    """Of another library, with another meaning."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


OTHERS = {
    "gelu": (torch.nn.functional.gelu, "gelu"),
    "aten": (torch.ops.aten.gelu, "gelu"),
    "partial": (
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        r"partial\(gelu, approximate='tanh'\)",
    ),
    "name": (SiLU(), r"SiLU\(\)"),
    "lambda": (lambda x: x, "<lambda>"),
    "missing": (None, "None"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_are_named(name: str) -> None:
    act_fn, text = OTHERS[name]
    layer = moe(act_fn)
    with pytest.raises(
        ValueError, match=rf"activation: got {text} through .*_default_apply_gate, .* in Gated; allowed"
    ):
        layer(*ROUTED)


def test_steps_that_experts_do_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not read, and options that transformers' decorator has later (post-expert norms)."""
    layer = moe()
    layer.post_expert_norm = torch.nn.RMSNorm(16)
    with pytest.raises(ValueError, match=r"module: got post_expert_norm.weight in Gated; .*experts_implementation="):
        layer(*ROUTED)
    layer = moe()
    layer.register_buffer("gate_up_proj_scale_inv", torch.ones(3))
    with pytest.raises(ValueError, match="module: got gate_up_proj_scale_inv in Gated"):
        layer(*ROUTED)
    layer = moe()
    layer.gate_up_proj_bias = torch.nn.Parameter(torch.zeros(3, 64))  # but has_bias=False
    with pytest.raises(ValueError, match="module: got gate_up_proj_bias in Gated"):
        layer(*ROUTED)
    layer = moe()
    layer(*ROUTED)

    def later(experts_class: Any = None, *, has_gate: bool = True, has_post_expert_norm: bool = False) -> None: ...

    monkeypatch.setattr(transformers.integrations.moe, "use_experts_implementation", later)
    layer.has_post_expert_norm = False
    layer(*ROUTED)
    layer.has_post_expert_norm = True
    with pytest.raises(ValueError, match="module: got has_post_expert_norm=True in Gated"):
        layer(*ROUTED)


def test_gates_that_their_function_reads_in_another_order_are_refused() -> None:
    """transformers' own function splits in halves, whatever the decorator says."""
    with pytest.raises(ValueError, match=r"activation: got silu through .*_default_apply_gate, in pairs, in Gated"):
        moe(is_concatenated=False)(*ROUTED)


FAMILIES = {
    "llama": "equal",
    "mixtral": "equal",
    "qwen3_moe": "equal",
    "gpt_oss": "equal",
    "gemma3_text": "equal",
    "gemma4_text": "equal",
    "afmoe": "equal",
    "jetmoe": "equal",
    "bert": "equal",
    "vit": "equal",
    "gemma2": "refused",
    "deepseek_v32": "refused",
    "glm_moe_dsa": "refused",
    "minimax_m3_vl": "refused",
    "deepseek_v4": "refused",
    "muse_spark_text": "refused",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sweep(family: str) -> None:
    """Prefill, padding, generation, a static cache and training are as by the model's own functions, or refused."""
    if family not in transformers_sweep.families():
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    register()
    actual = transformers_sweep.sweep(family)
    assert actual.verdict == FAMILIES[family], actual
    assert actual.calls or actual.verdict != "equal"
