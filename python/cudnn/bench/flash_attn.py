"""Benchmark of FlashAttention's functions against FlashAttention-4's own, called the same way, and of packed training.

FlashAttention-4: ``pip install flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext einops``. Run it with
``python -m cudnn.bench.varlen``; ``--quick`` leaves out the training steps.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from cudnn.bench import HOST, QUICK, compare, off_by_norm
from cudnn.lazy import torch

PEER = "FlashAttention-4"
TOLERANCE = 0.01  # of the norm; rounding to bfloat16 costs 0.003
MIXED = (4096, 37, 1, 2048, 512, 3000, 129, 1024, 700, 256, 2500, 64, 1900, 117)
"""Lengths of a packed batch of 16384 tokens."""
SHORT = (1500, 37, 1, 700, 512, 300, 129, 917)
"""The same of 4096, of which a model may store all scores."""


class Row(NamedTuple):
    """A measurement, ours and the peer's: TFLOP/s and tokens/s, higher is better, or microseconds."""

    shape: str
    metric: str
    ours: float
    peer: float


@dataclass(frozen=True)
class Case:
    """Sequences of one length, ``batch`` of them, or packed ones, of ``lengths``; causal, with a ``window``."""

    heads: int
    kv_heads: int
    head: tuple[int, int]
    batch: int = 0
    length: int = 0
    lengths: tuple[int, ...] = ()
    window: int = 0
    sink: bool = False
    softcap: float = 0.0

    @property
    def label(self) -> str:
        """The shape and the mask."""
        sizes = f"{sum(self.lengths)} packed" if self.lengths else f"{self.batch} x {self.length}"
        options = [f"window {self.window}"] * (self.window > 0) + ["sinks"] * self.sink
        options += [f"softcap {self.softcap:g}"] * (self.softcap > 0)
        return ", ".join([sizes, f"heads {self.heads}/{self.kv_heads}", f"D {self.head[0]}/{self.head[1]}", *options])

    def flops(self, backward: bool) -> float:
        """Over the pairs that are not masked."""
        lengths = self.lengths or (self.length,) * self.batch
        pairs = 0.0
        for n in lengths:
            hidden = max(n - self.window, 0) if self.window else 0
            pairs += (n * (n + 1) - hidden * (hidden + 1)) / 2
        d, dv = self.head
        return 2.0 * self.heads * pairs * (3 * d + 2 * dv if backward else d + dv)

    def tensors(self) -> list[Any]:
        """q, k, v and the gradient of the result; packed, or (b, s, h, d)."""
        torch.manual_seed(0)
        tokens = (sum(self.lengths),) if self.lengths else (self.batch, self.length)
        (d, dv), heads = self.head, (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = zip(heads, (d, d, dv, dv), strict=True)
        return [torch.randn(*tokens, h, width, device="cuda", dtype=torch.bfloat16) for h, width in shapes]


CASES = (
    Case(8, 4, (256, 256), lengths=MIXED, window=1024, softcap=50.0),
    Case(64, 8, (64, 64), lengths=MIXED, window=128, sink=True),
    Case(64, 8, (64, 64), lengths=MIXED, sink=True),
    Case(32, 8, (128, 128), lengths=MIXED, window=1024),
    Case(32, 8, (128, 128), lengths=MIXED),
    Case(32, 8, (128, 128), lengths=(2048,) * 8),
    Case(16, 16, (192, 128), lengths=MIXED),
    Case(16, 16, (128, 128), 4, 4096),
    Case(16, 16, (128, 128), 1, 16384),
    Case(32, 32, (64, 64), 4, 4096),
    Case(16, 16, (192, 128), 2, 8192),
    Case(8, 8, (256, 256), 4, 4096),
    Case(8, 8, (256, 256), 1, 16384),
    Case(16, 2, (256, 256), 4, 4096),
)
SMALL = (
    Case(16, 4, (128, 128), 1, 128),
    Case(16, 4, (128, 128), lengths=(100, 1, 27)),
)
"""Where the host's time counts."""


def functions(case: Case, module: Any) -> Callable[..., Any]:
    """``run(q, k, v)``: O by the functions of a module with FlashAttention's names."""
    window = (case.window - 1, 0) if case.window else (None, None)
    options: dict[str, Any] = {"causal": not case.window, "window_size": window, "softcap": case.softcap}
    if case.sink:
        options["learnable_sink"] = torch.linspace(-1, 1, case.heads, dtype=torch.float32, device="cuda").bfloat16()
    if not case.lengths:
        return lambda q, k, v: first(module.flash_attn_func(q, k, v, **options))
    ends = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device="cuda")
    options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    options |= {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}
    return lambda q, k, v: first(module.flash_attn_varlen_func(q, k, v, **options))


def first(output: Any) -> Any:
    """O, of functions that may return the LSE too."""
    return output[0] if isinstance(output, tuple) else output


def passes(case: Case, module: Any) -> tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]:
    """The forward pass without a graph, the backward pass, and the results of both."""
    q, k, v, do = case.tensors()
    run = functions(case, module)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        with torch.no_grad():
            return run(q, k, v)

    o = run(*inputs)
    backward = functools.partial(torch.autograd.grad, o, inputs, do, retain_graph=True)
    names = ("o", "dq", "dk", "dv")
    return forward, backward, dict(zip(names, (forward(), *backward()), strict=True))


def modules() -> tuple[Any, Any]:
    """Ours, and the peer's if it is installed."""
    from cudnn import ops

    try:
        import flash_attn.cute as flash  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        print(f"{PEER} is not installed: {error}", file=sys.stderr)
        return ops, None
    return ops, flash


def timed(calls: list[Any], clock: Any) -> list[float]:
    """Seconds of each call, interleaved; NaN for a call that is missing."""
    present = [call for call in calls if call is not None]
    seconds = iter([statistics.median(x) if clock is QUICK else min(x) for x in compare(present, clock)])
    return [math.nan if call is None else next(seconds) for call in calls]


def attention_rows(cases: Iterable[Case] = CASES) -> Iterator[Row]:
    """TFLOP/s of both passes."""
    ours, flash = modules()
    for case in cases:
        mine, theirs = passes(case, ours), attempt(case, flash)
        if theirs is not None and (wrong := off_by_norm(theirs[2], mine[2], TOLERANCE)):
            print(f"{case.label}: ours and {PEER} differ: {wrong}", file=sys.stderr)
        for i, metric in enumerate(("forward", "backward")):
            flops = case.flops(i == 1)
            times = timed([mine[i], None if theirs is None else theirs[i]], QUICK)
            yield Row(case.label, f"{metric}, TFLOP/s", *(flops / x * 1e-12 for x in times))
        del mine, theirs
        torch.cuda.empty_cache()


def attempt(case: Case, module: Any) -> Any:
    """The peer's passes; None, with a note, where it does not support the case."""
    if module is None:
        return None
    try:
        return passes(case, module)
    except Exception as error:  # a peer can raise anything
        print(f"{case.label}: {PEER}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None


def host_rows(cases: Iterable[Case] = SMALL) -> Iterator[Row]:
    """Microseconds of the host for a call: without a graph, with one, and the backward pass."""
    ours, flash = modules()
    for case in cases:
        mine, theirs = passes(case, ours), attempt(case, flash)
        for i, metric in enumerate(("forward", "backward")):
            times = timed([mine[i], None if theirs is None else theirs[i]], HOST)
            yield Row(case.label, f"{metric}, host us", *(1e6 * x for x in times))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3, 4 layers": (
        "Qwen3",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 4,
        },
    ),
    "gpt-oss, 4 layers": (
        "GptOss",
        {
            "hidden_size": 2880,
            "intermediate_size": 720,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_hidden_layers": 4,
        },
    ),
}
"""Architectures of transformers with the layers' own sizes; gpt-oss with smaller experts, as attention is measured."""


def training_rows(names: Iterable[str] = tuple(MODELS)) -> Iterator[Row]:
    """Tokens/s of a step on a packed batch, beside transformers' other implementations of the model's attention."""
    import transformers  # pyright: ignore[reportMissingImports]

    from cudnn.integrations.transformers import register

    register()
    for name in names:
        family, sizes = MODELS[name]
        lengths = MIXED if family == "Qwen3" else SHORT
        positions = torch.cat([torch.arange(n, dtype=torch.int64, device="cuda") for n in lengths])[None]
        ids = torch.randint(3, 1000, positions.shape, dtype=torch.int64, device="cuda")
        config = getattr(transformers, f"{family}Config")(
            vocab_size=1024, max_position_embeddings=1 << 17, attention_dropout=0.0, use_cache=False, **sizes
        )
        model_class = getattr(transformers, f"{family}Model")
        torch.manual_seed(0)
        model = model_class(config).to("cuda", torch.bfloat16)
        for peer in ("sdpa" if model_class._supports_sdpa else "eager", "flash_attention_4"):
            calls: list[Any] = [
                functools.partial(training_step, model, kind, ids, positions) for kind in ("cudnn", peer)
            ]
            try:
                expected = calls[1]()
            except Exception as error:  # not installed, or not for this model
                print(f"{name}: {peer}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                calls[1] = None
            else:  # gpt-oss's "eager" lets sequences see one another
                wrong = "" if peer == "eager" else off_by_norm({"output": expected}, {"output": calls[0]()}, 0.05)
                if wrong:
                    print(f"{name}: {peer}: {wrong}", file=sys.stderr)
            times = timed(calls, QUICK)
            tokens = sum(lengths)
            rates = (tokens / x for x in times)
            yield Row(f"{name}, {tokens} packed tokens", f"training step, tokens/s, peer {peer}", *rates)
            del calls
        del model
        torch.cuda.empty_cache()


def training_step(model: Any, ids: Any, positions: Any, kind: str) -> Any:
    """A forward and a backward pass; the output."""
    model.set_attn_implementation(kind)
    output = model(input_ids=ids, position_ids=positions).last_hidden_state
    output.float().square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return output.detach()


def rows(quick: bool = False) -> Iterator[Row]:
    """All measurements; about 4 minutes on an H200 with cold caches, in which kernels are mostly compiled."""
    yield from host_rows()
    if not quick:
        yield from training_rows()
    yield from attention_rows()


def main() -> None:
    """Prints a table."""
    print(f"{'shape':58} {'metric':44} {'ours':>10} {PEER:>16} {'ratio':>6}")
    for row in rows("--quick" in sys.argv):
        ratio = row.peer / row.ours if "us" in row.metric.split() else row.ours / row.peer
        print(f"{row.shape:58} {row.metric:44} {row.ours:10.1f} {row.peer:16.1f} {ratio:6.3f}", flush=True)


if __name__ == "__main__":
    main()
