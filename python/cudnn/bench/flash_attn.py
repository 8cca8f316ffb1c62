"""Benchmark of FlashAttention's functions: ours, and FlashAttention-4's called the same way; packed training steps.

FlashAttention-4: ``pip install flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext einops``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from cudnn.bench import GPU, HOST, QUICK, Benchmark, Call, Candidate, Options, Problem, off_by_norm, operands
from cudnn.bench.attention import PASSES, TOLERANCE, differentiated
from cudnn.lazy import torch

NAME = "flash_attn"
OURS, FLASH, SDPA = "cudnn.ops", "FlashAttention-4", "sdpa"
PACKAGES = {FLASH: "flash-attn-4"}
EAGER = "eager, sequences not separated"
"""gpt-oss has no ``"sdpa"``; its ``"eager"`` attention lets the sequences of a packed batch attend to one another."""
MODULES = {FLASH: "flash_attn.cute", OURS: "cudnn.ops"}
MIXED = (4096, 37, 1, 2048, 512, 3000, 129, 1024, 700, 256, 2500, 64, 1900, 117)
"""Lengths of a packed batch of 16384 tokens."""
SHORT = (1500, 37, 1, 700, 512, 300, 129, 917)
"""The same of 4096, of which a model may store all scores."""
TRAINING_TOLERANCE = 0.05  # of the norm, after all layers


@dataclass(frozen=True)
class Case:
    """``batch`` sequences of one length, or packed ones of ``lengths``; ``causal``, maybe with a ``window`` of keys."""

    heads: int
    kv_heads: int
    head_dims: tuple[int, int]  # of q and k, and of v
    batch: int = 0
    length: int = 0
    lengths: tuple[int, ...] = ()
    window: int = 0
    sink: bool = False
    softcap: float = 0.0
    causal: bool = True

    @property
    def label(self) -> str:
        """Batch and length, or the packed tokens; heads and head_dims; and the mask."""
        tokens = (sum(self.lengths),) if self.lengths else (self.batch, self.length)
        sizes = "x".join(map(str, (*tokens, self.heads, self.kv_heads, *self.head_dims)))
        packing = [] if not self.lengths else [f"{len(self.lengths)} sequences"]
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        options = ["sinks"] * self.sink + [f"softcap {self.softcap:g}"] * (self.softcap > 0)
        return f"{sizes} {', '.join([*packing, mask, *options])}"

    def flops(self, which: str) -> float:
        """Two GEMMs forward and five backward, over the unmasked scores."""
        scores = 0.0
        for n in self.lengths or (self.length,) * self.batch:
            hidden = max(n - self.window, 0) if self.window else 0
            scores += (n * (n + 1) - hidden * (hidden + 1)) / 2 if self.causal else n * n
        d, dv = self.head_dims
        return 2.0 * self.heads * scores * (d + dv if which == "forward" else 3 * d + 2 * dv)

    def tensors(self) -> list[Any]:
        """q, k, v and the gradient of the result: (tokens, heads, head_dim), or (batch, length, heads, head_dim)."""
        tokens = (sum(self.lengths),) if self.lengths else (self.batch, self.length)
        (d, dv), heads = self.head_dims, (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [operands.normal(*tokens, h, n).bfloat16() for h, n in zip(heads, (d, d, dv, dv), strict=True)]

    def sinks(self) -> Any:
        """A logit for each head, or None."""
        if not self.sink:
            return None
        return torch.linspace(-1, 1, self.heads, dtype=torch.float32, device=operands.DEVICE).bfloat16()


FIRST = (
    Case(32, 8, (128, 128), lengths=MIXED),
    Case(16, 16, (192, 128), lengths=MIXED),
    Case(64, 8, (64, 64), lengths=MIXED, window=128, sink=True),
)
"""The cases of ``--quick``."""
OTHERS = (
    Case(32, 8, (128, 128), lengths=(2048,) * 8),
    Case(32, 8, (128, 128), lengths=MIXED, window=1024),
    Case(64, 8, (64, 64), lengths=MIXED, sink=True),
    Case(16, 16, (128, 128), 4, 4096),
    Case(16, 16, (128, 128), 1, 16384),
    Case(32, 32, (64, 64), 4, 4096),
    Case(16, 16, (192, 128), 2, 8192),
    Case(8, 8, (256, 256), 4, 4096),
    Case(8, 8, (256, 256), 1, 16384),
    Case(16, 2, (256, 256), 4, 4096),
    Case(16, 16, (128, 128), 1, 16384, causal=False),
    Case(8, 8, (256, 256), 4, 4096, causal=False),
    Case(8, 4, (256, 256), lengths=MIXED, window=1024, softcap=50.0),
)
SMALL = (
    Case(16, 4, (128, 128), lengths=(100, 1, 27)),
    Case(16, 4, (128, 128), 1, 128),
)
"""So small that the GPU waits for the host."""


@dataclass(frozen=True)
class Model:
    """A model of transformers: ``family`` prefixes its classes, ``sizes`` are of its configuration.

    ``peer`` is its attention in transformers without FlashAttention.
    """

    name: str
    family: str
    peer: str
    lengths: tuple[int, ...]
    sizes: dict[str, int]

    @property
    def label(self) -> str:
        """The model and its batch."""
        return f"{self.name}, {self.sizes['num_hidden_layers']} layers, {sum(self.lengths)} tokens, training"


QWEN3 = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "num_hidden_layers": 4}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 720, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
GPT_OSS |= {"num_hidden_layers": 4}
MODELS = (
    Model("Qwen3 8B", "Qwen3", SDPA, MIXED, QWEN3),
    Model("gpt-oss, small experts", "GptOss", EAGER, SHORT, GPT_OSS),
)
"""Layers of the models' own sizes; gpt-oss with smaller experts, as attention is measured."""
VOCABULARY = 1024


def benchmark() -> Benchmark:
    """The benchmark; a shape is a batch of sequences of one length, as those of ``sdpa``."""
    return Benchmark(
        title="FlashAttention's functions",
        yardsticks=(FLASH, SDPA),
        dtypes=("bf16",),
        dimensions={"B": 1, "S": 1, "HQ": 1, "HK": 1, "D": 8, "DV": 8},
        problems=problems,
    )


def problems(options: Options) -> list[Problem]:
    """Both passes of each case; host time; training steps. ``quick``: the first of each."""
    clock = QUICK if options.quick else GPU
    if options.shapes:
        shapes: Any = options.shapes
        return timed([Case(hq, hk, (d, dv), b, s) for b, s, hq, hk, d, dv in shapes], clock)
    some = 1 if options.quick else None
    small, training = host(SMALL[:some]), [step_problem(model, clock) for model in MODELS[:some]]
    return [*timed(FIRST, clock), *small, *training, *timed(() if options.quick else OTHERS, clock)]


def timed(cases: Sequence[Case], clock: Any) -> list[Problem]:
    """GPU time of both passes."""
    return [
        Problem(f"{case.label}, {which}", functools.partial(candidates, case, which), case.flops(which), clock=clock)
        for case in cases
        for which in PASSES
    ]


def host(cases: Sequence[Case]) -> list[Problem]:
    """Host time of both passes."""
    return [
        Problem(f"{case.label}, {which}, host", functools.partial(candidates, case, which), clock=HOST)
        for case in cases
        for which in PASSES
    ]


def candidates(case: Case, which: str) -> list[Candidate]:
    """The functions of FlashAttention-4 and ours. Both are compared with :func:`exact`."""
    tensors = case.tensors()
    expected = exact(case, which, *tensors)
    check = functools.partial(wrong, case, expected)
    return [
        Candidate(
            name,
            functools.partial(prepare, name, case, which, tensors),
            check,
            name == OURS,
            package=PACKAGES.get(name, "torch"),
        )
        for name in MODULES
    ]


def prepare(name: str, case: Case, which: str, tensors: Sequence[Any]) -> Call:
    """A pass through the functions of a candidate's module.

    Raises:
        ModuleNotFoundError: the peer is not installed.
    """
    return differentiated(function(case, importlib.import_module(MODULES[name])), which, *tensors)


def function(case: Case, module: Any) -> Callable[..., Any]:
    """``run(q, k, v)``: O by a module with FlashAttention's names."""
    window = (case.window - 1, 0) if case.window else (None, None)
    options: dict[str, Any] = {
        "causal": case.causal and not case.window,
        "window_size": window,
        "softcap": case.softcap,
    }
    options |= {"learnable_sink": case.sinks()} if case.sink else {}
    run = module.flash_attn_varlen_func if case.lengths else module.flash_attn_func
    if case.lengths:
        cu_seqlens = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=operands.DEVICE)
        options |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        options |= {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}

    def call(q: Any, k: Any, v: Any) -> Any:
        output = run(q, k, v, **options)
        return output[0] if isinstance(output, tuple) else output  # FlashAttention-4 may return the LSE too

    return call


def checked(case: Case, name: str, x: Any) -> Any:
    """The part that is checked: the query heads of the first key/value head, of the first entry of a batch."""
    tokens = x if case.lengths else x[0]
    return tokens[:, : 1 if name in ("k", "v", "dk", "dv") else case.heads // case.kv_heads]


def exact(case: Case, which: str, *tensors: Any) -> dict[str, Any]:
    """The results that are checked, by PyTorch in float32, one sequence after the other."""
    heads = case.heads // case.kv_heads
    q, k, v, do = (
        checked(case, name, x).float().transpose(0, 1) for name, x in zip(("q", "k", "v", "do"), tensors, strict=True)
    )
    inputs = [x.requires_grad_(which == "backward") for x in (q, k, v)]
    sinks = case.sinks()
    sinks = None if sinks is None else sinks[:heads].float()[:, None, None]
    outputs, gradients = [], []
    for first, last in pairwise([0, *accumulate(case.lengths or (case.length,))]):
        parts = [x[:, first:last].detach().requires_grad_(x.requires_grad) for x in inputs]
        o = sequence(case, sinks, *parts)
        outputs.append(o.detach())
        if which == "backward":
            gradients.append(torch.autograd.grad(o, parts, do[:, first:last]))
    results = [outputs] if which == "forward" else zip(*gradients, strict=True)
    names = ("o",) if which == "forward" else ("dq", "dk", "dv")
    return {name: torch.cat(list(x), 1).transpose(0, 1) for name, x in zip(names, results, strict=True)}


def sequence(case: Case, sinks: Any, q: Any, k: Any, v: Any) -> Any:
    """O of one sequence and one key/value head."""
    scores = case.head_dims[0] ** -0.5 * q @ k.mT
    if case.softcap:
        scores = case.softcap * (scores / case.softcap).tanh()
    token = torch.arange(q.shape[1], dtype=torch.int64, device=q.device)
    distance = token[:, None] - token
    if case.causal:
        hidden = (distance < 0) | (distance >= case.window) if case.window else distance < 0
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    return torch.cat([scores, sinks.expand(-1, q.shape[1], 1)], -1).softmax(-1)[..., :-1] @ v


def wrong(case: Case, expected: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Checks results against those of :func:`exact`. Returns a message, or ``""``."""
    return off_by_norm(expected, {name: checked(case, name, x) for name, x in results.items()}, TOLERANCE)


def step_problem(model: Model, clock: Any) -> Problem:
    """Training steps of a model."""
    return Problem(
        model.label, functools.partial(step_candidates, model), tokens=float(sum(model.lengths)), clock=clock
    )


def step_candidates(spec: Model) -> list[Candidate]:
    """Implementations of the attention of one model, whose outputs are compared with those of the first.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    import transformers  # pyright: ignore[reportMissingImports]

    from cudnn.integrations.transformers import register

    register()
    config = getattr(transformers, f"{spec.family}Config")(
        vocab_size=VOCABULARY, max_position_embeddings=1 << 17, attention_dropout=0.0, use_cache=False, **spec.sizes
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{spec.family}Model")(config).to(operands.DEVICE, torch.bfloat16)
    positions = [torch.arange(n, dtype=torch.int64, device=operands.DEVICE) for n in spec.lengths]
    positions = torch.cat(positions)[None]
    tokens = torch.randint(3, VOCABULARY, positions.shape, dtype=torch.int64, device=operands.DEVICE)
    expected: dict[str, Any] = {}

    def check(results: Mapping[str, Any]) -> str:
        if not expected:
            expected.update({name: value.clone() for name, value in results.items()})
        return off_by_norm(expected, results, TRAINING_TOLERANCE)

    def candidate(name: str) -> Candidate:
        prepare = functools.partial(steps, name, model, tokens, positions)
        package = PACKAGES.get(name, "transformers")
        return Candidate(name, prepare, *([] if name == EAGER else [check]), ours=name == OURS, package=package)

    return [candidate(name) for name in (spec.peer, FLASH, OURS)]


def steps(name: str, model: Any, tokens: Any, positions: Any) -> Call:
    """A forward and a backward pass with an implementation of attention; returns the output.

    Raises:
        ModuleNotFoundError: the peer is not installed.
    """
    if name == FLASH:
        importlib.import_module(MODULES[name])
    attention = {FLASH: "flash_attention_4", OURS: "cudnn", EAGER: "eager"}.get(name, name)

    def step() -> Mapping[str, Any]:
        model.set_attn_implementation(attention)  # the candidates share the model
        output = model(input_ids=tokens, position_ids=positions).last_hidden_state
        output.float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        return {"output": output.detach()}

    return step
