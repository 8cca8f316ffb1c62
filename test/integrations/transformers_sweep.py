"""Runs the models of the installed transformers with "cudnn", against their own implementations, at tiny sizes.

    python test/integrations/transformers_sweep.py [--models llama,mixtral] [--shard 0/2] [--csv results.csv]

One model class of each type, random weights, float32 on the CPU: the kinds of calls are a prefill, padding on the left
and the right, generation with a growing and with a static cache, and a training step. Each result equals that of
"eager", or of "sdpa" where the model has it, or the model is refused in our words. The exit status counts the others.
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import importlib
import inspect
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cudnn.integrations import transformers as integration

BATCH, TOKENS, VOCABULARY = 2, 20, 96
PADDING = 6
TOLERANCE = 2e-3
LARGEST = 30_000_000  # parameters
HEADS = ("FOR_CAUSAL_LM", "FOR_SEQ_TO_SEQ_CAUSAL_LM", "FOR_IMAGE_TEXT_TO_TEXT", "FOR_MASKED_LM", "")
BAD = ("MISMATCH", "CRASH")

# Values of configurations, by name, where the class has that name with an integer.
TINY: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "dim", "embedding_size", "projection_dim"), 64
    ),
    **dict.fromkeys(
        ("decoder_hidden_size", "encoder_hidden_size", "text_hidden_size", "output_dim", "out_hidden_size"), 64
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "swa_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "num_dense_layers"), 0),
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 6,
    "sliding_window_size": 6,
    "attention_chunk_size": 8,
    "index_topk": 4,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
    "rotary_dim": 8,
    "mamba_d_ssm": 128,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1],
    "moe_hidden_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_chunk_size": 8,
    "n_groups": 1,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
ENDINGS = {"intermediate_size": 64, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCABULARY}
NEEDED = ("num_experts_per_tok", "n_group", "topk_group", "n_routed_experts", "head_dim", "moe_topk")
DROPPED = (
    *("model_type", "transformers_version", "architectures", "dtype", "quantization_config", "rope_scaling"),
    *("per_layer_config", "stage_names", "out_features", "out_indices", "output_attentions"),
)
# Other numbers, for models that do not run with those:
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"head_dim": 8},  # that of the rotated part
    {"num_hidden_layers": 4},
    {"mrope_section": [2, 3, 3]},
    {"mrope_section": [1, 1, 2]},
    {"layer_types": ["mamba", "attention"]},
)
LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")


class SlowError(Exception):
    """A model took too long."""


@dataclasses.dataclass
class Result:
    """What a family did: a verdict for each kind of call, or one for all."""

    family: str
    kind: str = ""
    verdicts: dict[str, str] = dataclasses.field(default_factory=dict)
    details: list[str] = dataclasses.field(default_factory=list)
    calls: int = 0
    arguments: set[str] = dataclasses.field(default_factory=set)

    @property
    def verdict(self) -> str:
        """The worst of all kinds of calls."""
        order = (*BAD, "not runnable", "refused by transformers", "refused", "equal")
        return next((each for each in order if each in self.verdicts.values()), "not runnable")

    def note(self, what: str, verdict: str, detail: object = "") -> None:
        self.verdicts[what] = verdict
        if detail:
            self.details.append(f"{what}: {str(detail).strip()[:300]}")


def families() -> list[str]:
    """The types of models that the installed transformers has."""
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def model_class(family: str) -> Any:
    """The class of a type's models: with a language model's head, if any."""
    for head in HEADS:
        names = getattr(modeling_auto, f"MODEL_{head}_MAPPING_NAMES".replace("__", "_"))
        name = names.get(family)
        if name:
            return getattr(transformers, name if isinstance(name, str) else name[0], None)
    return _class_of_a_part(CONFIG_MAPPING[family])


def _class_of_a_part(config: Any) -> Any:
    """The class of a part of other models, as a text or a vision model."""
    module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    actual = [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, transformers.PreTrainedModel) and each.config_class is config
    ]
    actual = [each for each in actual if not each.__name__.endswith("PreTrainedModel")]
    return min(actual, key=lambda each: ("ForCausalLM" not in each.__name__, len(each.__name__)), default=None)


def tiny(kind: Any, **changed: Any) -> Any:
    """A small configuration of a class; other small numbers by name."""
    return kind(**_shrunk(kind(), TINY | changed))


def _shrunk(config: Any, tiny: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a small configuration: those of a configuration by default, with small numbers."""
    values = {name: value for name, value in config.to_dict().items() if name[0] != "_" and name not in DROPPED}
    layers = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), None)
    kinds, heads = values.get("layer_types"), values.get("num_attention_heads")
    few = _few_layers(kinds) if isinstance(kinds, list) else list(range(min(tiny["num_hidden_layers"], layers or 2)))
    for name, value in list(values.items()):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        ending = next((each for each in ENDINGS if name.endswith(each)), None)
        if isinstance(value, list) and layers is not None and len(value) == layers > 2 and name not in tiny:
            values[name] = [value[index] for index in few]
        elif name in tiny and (number or (value is None and name in NEEDED) or isinstance(tiny[name], list)):
            values[name] = len(few) if name in LAYERS else tiny[name]
        elif ending and isinstance(value, int):
            values[name] = ENDINGS[ending]
        elif isinstance(value, float) and ("dropout" in name or name.endswith(("_drop", "_pdrop", "layerdrop"))):
            values[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            values[name] = VOCABULARY - 1 - len(name) % 8
        elif isinstance(sub := getattr(config, name, None), transformers.PreTrainedConfig):
            values[name] = type(sub)(**_shrunk(sub, tiny))
    if heads and values.get("num_key_value_heads") and config.num_key_value_heads == heads:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if isinstance(values.get("eos_token_id"), list):
        values["eos_token_id"] = 2
    sections, rotated = values.get("rope_parameters"), tiny.get("mrope_section")
    if isinstance(sections, dict) and ("mrope_section" in sections or rotated):
        values["rope_parameters"] = sections | {"mrope_section": rotated or [2, 3, 3]}
    return values


def _few_layers(kinds: list[str]) -> list[int]:
    """The first layer of each kind, and at least two."""
    first = sorted({kinds.index(each) for each in kinds})
    return sorted({*first, *range(2 if len(first) < 2 else 0)})[:5]


def build(kind: Any, config: Any, attention: Any, experts: str | None, weights: dict[str, Any] | None) -> Any:
    """A model with implementations; random weights, larger than by default, or the given ones."""
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    if experts:
        config._experts_implementation = experts
    model = kind._from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        if weights is not None:
            model.load_state_dict(weights)
        else:
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.12)
                elif "sink" in name:
                    parameter.normal_()
    return model.eval()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Random tokens, or an image."""
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name
    names = inspect.signature(model.forward).parameters
    text = torch.randint(3, VOCABULARY - 10, (BATCH, TOKENS), generator=generator)
    if name == "pixel_values" and not model.can_generate():
        config = model.config
        size = getattr(config, "image_size", 32)
        sizes = size if isinstance(size, (list, tuple)) else (size, size)
        channels = getattr(config, "num_channels", 3)
        kwargs = {name: torch.randn(BATCH, channels, *sizes, generator=generator)}
        return kwargs | ({"input_ids": text} if hasattr(config, "text_config") else {})
    if "grid_thw" in names and "input_ids" not in names:
        width = 3 * getattr(model.config, "temporal_patch_size", 1) * model.config.patch_size**2
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        return {next(iter(names)): torch.randn(32, width, generator=generator), "grid_thw": grid}
    if name == "input_values" or "input_values" in names:
        return {"input_values": torch.randn(BATCH, 4000, generator=generator)}
    kwargs = {"input_ids": text}
    if model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = torch.randint(3, VOCABULARY - 10, (BATCH, TOKENS), generator=generator)
    return kwargs


def output(model: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """The first floating tensor of a model's output: logits, or the last hidden state."""
    out = model(**kwargs)
    return first_tensor(out)


def first_tensor(out: Any) -> torch.Tensor:
    named = [getattr(out, name, None) for name in ("logits", "last_hidden_state")]
    values = out.to_tuple() if hasattr(out, "to_tuple") else out
    return next(x for x in (*named, *values) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim > 1)


def prefill(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        return [output(model, inputs(model))]


def padding(model: Any, left: bool) -> list[torch.Tensor]:
    """Only the rows that are no padding count."""
    kwargs = inputs(model)
    seen = torch.ones(BATCH, TOKENS, dtype=torch.int64)
    seen[0, slice(0, PADDING) if left else slice(TOKENS - PADDING, None)] = 0
    with torch.no_grad():
        out = output(model, kwargs | {"attention_mask": seen})
    return [out if model.config.is_encoder_decoder or out.shape[1] != TOKENS else out[seen.bool()]]


def generate(model: Any, cache: str | None) -> list[torch.Tensor]:
    """The logits of each token; the other model's tokens are those of ties."""
    kwargs = {"input_ids": inputs(model)["input_ids"][:, :12]}
    options: dict[str, Any] = {"cache_implementation": cache} if cache else {}
    out = model.generate(
        **kwargs,
        attention_mask=torch.ones_like(kwargs["input_ids"]),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
        pad_token_id=0,
        **options,
    )
    return list(out.logits)


def train(model: Any) -> list[torch.Tensor]:
    """The loss and the gradients of all weights."""
    kwargs = inputs(model)
    model.train()
    model.zero_grad()
    text = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
    names = model.forward.__code__.co_varnames
    out = model(**kwargs, labels=text) if "labels" in names and model.can_generate() else model(**kwargs)
    loss = getattr(out, "loss", None)
    loss = first_tensor(out).float().square().mean() if loss is None else loss
    loss.backward()
    model.eval()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


KINDS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "prefill": prefill,
    "padding left": lambda model: padding(model, True),
    "padding right": lambda model: padding(model, False),
    "generate": lambda model: generate(model, None),
    "static cache": lambda model: generate(model, "static"),
    "train": train,
}


def tensor_key(model: Any) -> Iterator[str]:
    """The kinds of calls that a model knows."""
    text = "input_ids" in inputs(model) and "pixel_values" not in inputs(model)
    for kind in KINDS:
        if kind.startswith("padding") and not text:
            continue
        if kind in ("generate", "static cache") and not (text and model.can_generate()):
            continue
        yield kind


def distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, in parts of the largest value of a tensor."""
    if [x.shape for x in actual] != [x.shape for x in expected]:
        return float("inf")
    most = 0.0
    for one, other in zip(actual, expected, strict=True):
        finite = torch.isfinite(other)
        if not torch.equal(finite, torch.isfinite(one)):
            return float("inf")
        if other.numel() and finite.any():
            apart = (one.double() - other.double())[finite].abs().max()
            most = max(most, float(apart / other[finite].abs().max().double().clamp(min=1e-4)))
    return most


def is_ours(error: BaseException) -> bool:
    """Whether an error is a refusal of this library."""
    return "; allowed: " in str(error) or type(error).__name__.startswith("cudnn")


def sweep(family: str, seconds: int = 100) -> Result:
    """Runs all kinds of calls of a family."""
    result = Result(family)
    previous = signal.signal(signal.SIGALRM, _late)
    signal.alarm(seconds)
    try:
        _sweep(family, result)
    except SlowError:
        result.note("all", "not runnable", "takes too long")
    except Exception as error:
        result.note("all", "not runnable", f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return result


def _late(*_: Any) -> None:
    raise SlowError


def _sweep(family: str, result: Result) -> None:
    kind = model_class(family)
    if kind is None:
        raise LookupError("no class")
    result.kind = kind.__name__
    if _refused_when_built(kind, family, result):
        return
    for variant in VARIANTS:
        result.details.clear()
        if (made := _own_models(kind, family, variant, result)) and (
            first := _own(made[1], prefill, "prefill", result)
        ):
            break
    else:
        raise RuntimeError(result.details[-1])
    config, models, mixture = made
    own = models["eager"]
    expected = {"prefill": first}
    for call in tensor_key(own):
        actual = None if call == "prefill" else _own(models, KINDS[call], call, result)
        expected |= {} if actual is None else {call: actual}
    weights = own.state_dict()
    choices = {"attention": ("cudnn", "eager" if mixture else None)}
    if mixture:
        choices["experts"] = ("eager", "cudnn")
    for choice, (attention, experts) in choices.items():
        try:
            model = build(kind, config, attention, experts, weights)
        except SlowError:
            raise
        except Exception as error:
            result.note(choice, _of_error(error), error)
            continue
        for call, wanted in expected.items():
            _compare(result, f"{choice} {call}" if choice == "experts" else call, model, KINDS[call], wanted)
            if result.verdicts.get("experts prefill") == "refused":
                break


def _refused_when_built(kind: Any, family: str, result: Result) -> bool:
    """Whether a class is refused when a model is built, without weights."""
    for make in (tiny, lambda config: config()):
        error = _error_of(
            lambda make=make: kind._from_config(make(CONFIG_MAPPING[family]), attn_implementation="cudnn")
        )
        if error is None:
            return False
        if is_ours(error):
            result.note("attention", "refused", error)
            return True
    return False


def _error_of(build: Callable[[], Any]) -> Exception | None:
    try:
        with torch.device("meta"):
            build()
    except SlowError:
        raise
    except Exception as error:
        return error
    return None


def _own_models(kind: Any, family: str, variant: dict[str, Any], result: Result) -> Any:
    """A small configuration, the models with their own implementations, and whether they have experts; or None."""
    models = {}
    try:
        config = tiny(CONFIG_MAPPING[family], **variant)
        with torch.device("meta"):
            empty = kind._from_config(copy.deepcopy(config), attn_implementation="eager")
        if (size := sum(p.numel() for p in empty.parameters())) > LARGEST:
            raise MemoryError(f"{size / 1e6:.0f} million parameters")
        mixture = any(hasattr(module, "has_gate") and hasattr(module, "is_concatenated") for module in empty.modules())
        experts = "eager" if mixture else None
        models["eager"] = build(kind, config, "eager", experts, None)
        if kind._supports_sdpa:
            models["sdpa"] = build(kind, config, "sdpa", experts, models["eager"].state_dict())
    except SlowError:
        raise
    except Exception as error:
        result.details.append(f"{type(error).__name__}: {error}"[:250])
        if "eager" not in models:
            return None
    return config, models, mixture


def _own(models: dict[str, Any], call: Callable[[Any], Any], what: str, result: Result) -> dict[str, Any] | None:
    """What the model's own implementations return, where they run."""
    try:
        return {name: _seeded(call, model) for name, model in models.items()}
    except SlowError:
        raise
    except Exception as error:
        result.details.append(f"{what}: {type(error).__name__}: {error}"[:250])
        return None


def _seeded(call: Callable[[Any], Any], model: Any) -> Any:
    """Some models sample the patches that they see."""
    torch.manual_seed(0)
    return call(model)


def _compare(result: Result, what: str, model: Any, call: Callable[[Any], Any], wanted: dict[str, Any]) -> None:
    with Watch(result):
        try:
            actual = _seeded(call, model)
        except SlowError:
            raise
        except Exception as error:
            result.note(what, _of_error(error), f"{type(error).__name__}: {error}")
            return
    apart = {name: distance(actual, each) for name, each in wanted.items()}
    if min(apart.values()) < TOLERANCE:
        result.note(what, "equal")
    else:
        result.note(what, "MISMATCH", apart)


def _of_error(error: Exception) -> str:
    if is_ours(error):
        return "refused"
    return "refused by transformers" if "does not support" in str(error) else "CRASH"


class Watch:
    """Counts the calls of our attention, and notes the arguments that have values."""

    def __init__(self, result: Result) -> None:
        self.result, self.check = result, integration._check_arguments

    def __enter__(self) -> None:
        def check(others: dict[str, Any]) -> None:
            self.result.calls += 1
            self.result.arguments.update(name for name, value in others.items() if value is not None)
            self.check(others)

        integration._check_arguments = check

    def __exit__(self, *_: Any) -> None:
        integration._check_arguments = self.check


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="types of models, with commas between them; all by default")
    parser.add_argument("--shard", default="0/1", help="the number of a part, and how many parts there are")
    parser.add_argument("--csv", type=Path, help="a file for the table")
    parser.add_argument("--seconds", type=int, default=100, help="the longest time for a model")
    kwargs = parser.parse_args()
    quiet()
    torch.set_num_threads(1)  # the sizes are too small for more
    integration.register()
    part, parts = map(int, kwargs.shard.split("/"))
    chosen = kwargs.models.split(",") if kwargs.models else families()[part::parts]
    results = []
    for family in chosen:
        results.append(sweep(family, kwargs.seconds))
        print_row(results[-1])
    counts = Counter(each.verdict for each in results)
    unused = sum(each.verdict == "equal" and not each.calls for each in results)
    print(f"transformers {transformers.__version__}: {dict(counts)}; equal, but never calls our attention: {unused}")
    arguments = sorted(set().union(*(each.arguments for each in results)))
    print(f"arguments that had values: {', '.join(arguments)}")
    if kwargs.csv:
        with kwargs.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("family", "class", "verdict", "calls", "verdicts", "details", "arguments"))
            for each in results:
                row = (each.family, each.kind, each.verdict, each.calls, each.verdicts, each.details, each.arguments)
                writer.writerow(row)
    return sum(each.verdict in BAD for each in results)


def quiet() -> None:
    """No warnings of transformers."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()


def print_row(result: Result) -> None:
    kinds = "" if len(set(result.verdicts.values())) < 2 else f" {result.verdicts}"
    detail = f" | {result.details[0][:160]}" if result.details else ""
    print(
        f"{result.family:28} {result.verdict:24} {result.calls:4} calls{kinds}{detail}".replace("\n", " "), flush=True
    )


if __name__ == "__main__":
    sys.exit(min(main(), 100))
