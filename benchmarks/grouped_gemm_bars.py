"""Performance bars of the grouped GEMMs in one table: each kernel against its peer, or against another of our kernels.

    python benchmarks/grouped_gemm_bars.py [SECONDS | --compile]

Three shapes of experts, in bf16 unless a row names a type. A ratio is the other kernel's time divided by ours; higher
is better. The two kernels of a row run interleaved, in alternating order, so that neither gains by what ran before it.
A ratio is the median over the rounds, with minimum and maximum. No shape starts after SECONDS. The kernels are compiled
first; with ``--compile`` the script stops there.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import cudnn
from cudnn import bench
from cudnn.bench import GPU, HOST, compare
from cudnn.bench import grouped as peers
from cudnn.demo_cases import grouped as program
from cudnn.fused import warm
from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.runtime import cache

SHAPES = ((32768, 28672, 4096, 8), (32768, 2816, 2048, 64), (65536, 1536, 2048, 128))
SMALL = (256, 128, 128, 2)
ARCH = "sm_90a"
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
PAIR = replace(GPU, rounds=8)
QUANTISED = {"d": E4M3, "d_col": E4M3, "sfd_row": E8M0, "sfd_col": E8M0, "norm_const": "float32"}


@dataclass
class Ours:
    """A call of an API on a problem (m, n, k, experts), or (m, n, tokens, experts).

    ``extra_types``: types of optional tensors by name. ``without``: inputs that are omitted. ``transposed``: the
    weights are column-major. ``end_rows``: end row of each expert; default: equal sizes. ``has_reference``: results are
    compared with the reference.
    """

    api: Any
    shape: tuple[int, ...]
    operand_type: str = "bf16"
    extra_types: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ("prob", "beta")
    transposed: bool = False
    end_rows: tuple[int, ...] = ()
    has_reference: bool = True

    def __post_init__(self) -> None:
        vector = 32 if "sfd_row" in self.extra_types else OPERAND_TYPES[self.operand_type].vector
        self.options = {} if vector == 16 else {"sf_vec_size": vector}
        experts, tokens = self.shape[3], self.shape["mnk".index(self.api.tokens)]
        self.end_rows = self.end_rows or tuple(peers.ends("uniform", experts, tokens))

    def tensors(self, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and results by name."""
        inputs = program.inputs(self.api, self.shape, device, self.operand_type, generated_on=device)
        inputs = {name: x for name, x in inputs.items() if name not in self.without}
        if self.transposed:
            inputs["b"] = inputs["b"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
        self.offsets(inputs).copy_(torch.tensor(self.end_rows, dtype=torch.int32))
        results = self.api.allocated(inputs, self.options)
        results.pop("amax", None)
        sizes = self.api.example_sizes(dict(zip(self.api.example[0], self.shape, strict=True))) | {"vector": 32}
        for name, dtype in self.extra_types.items():
            spec = self.api.spec(name)
            tensor = spec.layout.allocate(sizes, "n", getattr(torch, dtype), device)
            (results if spec.written else inputs)[name] = tensor.zero_() if name == "dprob" else tensor
            if not spec.written:
                tensor.fill_(1.0)
        return inputs, results

    def offsets(self, inputs: Mapping[str, Any]) -> Any:
        """The tensor with the end row of each expert."""
        return next(inputs[spec.name] for spec in self.api.tensors if spec.init == "ends")

    def object(self, tensors: Mapping[str, Any], **options: Any) -> Any:
        """An object of the API for tensors with these shapes and types."""
        return self.api(**self.api.samples(tensors), **self.options, **options)

    def compiled_call(self) -> tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]:
        """The compiled call, its inputs and its results, after the results were checked."""
        inputs, results = self.tensors("cuda")
        operation = self.object({**inputs, **results})
        operation.compile()
        named = {parameter: {**inputs, **results}.get(name) for name, parameter in operation.parameters.items()}
        operation.execute(**named)
        for name, exact in program.expected(self.api, inputs, results).items() if self.has_reference else ():
            comparison = program.judge(name, results[name], exact, program.TOLERANCE)
            if not comparison.passed:
                raise ValueError(f"{name} is off by {comparison.error:.2e}, at most {comparison.allowed:.2e} is right")
        return lambda: operation.execute(**named), inputs, results


def problems(m: int, n: int, k: int, experts: int) -> dict[str, Ours]:
    """Our calls by name, for m tokens and weights n x k."""
    rows = (m, n, k, experts)
    generator = torch.Generator().manual_seed(0)
    mean_rows = m // experts
    counts = (torch.randint(-mean_rows // 8, mean_rows // 8, (experts,), generator=generator) + mean_rows).tolist()
    counts[-1] += m - sum(counts)
    rounded = [-(-count // 256) * 256 for count in counts]
    glu, quant = cudnn.GroupedGemmGlu, cudnn.GroupedGemmQuant
    return {
        "product": Ours(cudnn.GroupedGemm, rows),
        "SwiGLU": Ours(glu, rows),
        "SwiGLU, prob, c kept": Ours(glu, rows, extra_types={"c": "bfloat16"}, without=("beta",)),
        "gradient of tokens": Ours(cudnn.GroupedGemm, (m, k, n, experts), transposed=True),
        "gradient of weights": Ours(cudnn.GroupedGemmWgrad, (n, k, m, experts)),
        "gradient of SwiGLU, dprob": Ours(
            cudnn.GroupedGemmDglu, (m, n // 2, k, experts), "bf16", {"dprob": "float32"}, ("beta",), transposed=True
        ),
        "quantised to fp8": Ours(quant, rows, extra_types=QUANTISED, has_reference=False),
        "fp8, a scale per row": Ours(quant, rows, "fp8", extra_types={"row_scale": "float32"}, has_reference=False),
        "fp8, scales per 128": Ours(quant, rows, "fp8_128", has_reference=False),
        "SwiGLU, Zipf": Ours(glu, rows, end_rows=tuple(peers.ends("zipf", experts, m))),
        "SwiGLU, ragged": Ours(glu, rows, end_rows=tuple(accumulate(counts))),
        "SwiGLU, padded": Ours(glu, (sum(rounded), n, k, experts), end_rows=tuple(accumulate(rounded))),
    }


def scaled(inputs: Mapping[str, Any], n: int) -> Callable[[], Any]:
    """PyTorch's grouped GEMM of fp8 operands with a scale per row of A and B."""
    a, b, ends = inputs["a"][..., 0], inputs["b"].permute(2, 1, 0), inputs["padded_offsets"]
    rows, columns = a.new_ones(a.shape[0], dtype=torch.float32), a.new_ones(len(ends), n, dtype=torch.float32)
    return lambda: torch._scaled_grouped_mm(a, b, rows, columns, offs=ends, out_dtype=torch.bfloat16)


def peer_calls(ours: Mapping[str, Ours], inputs_of: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Functions that prepare the peers of our calls, by name."""
    peers_: dict[str, Any] = {}
    for name, inputs in inputs_of.items():
        ends = ours[name].offsets(inputs)
        if name == "fp8, a scale per row":
            peers_[name] = partial(scaled, inputs, ours[name].shape[1])
        elif name.endswith("dprob"):
            peers_[name] = partial(peers.product_then_epilogue, ours[name].api, inputs, ends, results[name])
        elif name == "product" or name.startswith("gradient"):
            peers_[name] = partial(peers.product, ours[name].api, inputs, ends)
        if name == "product" and importlib.util.find_spec("quack"):
            peers_["QuACK"] = partial(peers.quack, inputs, ends)
    return peers_


BARS = (  # our call; the peer, or other call of ours, that it is compared with; the minimum ratio
    ("product", "peer product", 1.0),
    ("product", "peer QuACK", 1.0),
    ("SwiGLU", "peer product", 1.0),
    ("SwiGLU, prob, c kept", "peer product", 0.0),
    ("gradient of tokens", "peer gradient of tokens", 1.05),
    ("gradient of weights", "peer gradient of weights", 1.05),
    ("gradient of SwiGLU, dprob", "peer gradient of SwiGLU, dprob", 1.15),
    ("quantised to fp8", "product", 0.97),
    ("fp8, a scale per row", "peer fp8, a scale per row", 1.2),
    ("fp8, scales per 128", "product", 1.6),
    ("SwiGLU, Zipf", "SwiGLU", 1 / 1.1),
    ("SwiGLU, ragged", "SwiGLU, padded", 1 / 1.03),
)


def measure(shape: tuple[int, ...]) -> None:
    """Measures and prints the rows of a shape."""
    ours, calls, inputs, results = problems(*shape), dict[str, Any](), dict[str, Any](), dict[str, Any]()

    def attempt(name: str, make: Callable[[], Any]) -> None:
        try:
            calls[name], inputs[name], results[name] = make()
            calls[name]()
        except Exception as error:  # the others are still measured
            for by_name in (calls, inputs, results):
                by_name.pop(name, None)
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()

    for name, call_of in ours.items():
        attempt(name, call_of.compiled_call)
    for name, peer in peer_calls(ours, inputs, results).items():
        attempt(f"peer {name}", lambda peer=peer: (peer(), None, None))
    m, n, k, _ = shape
    for name, other, bar in BARS:
        if name not in calls or other not in calls:
            continue
        times = compare([calls[name], calls[other]], PAIR)
        ratio, least, most = bench.ratio(times[1], times[0])
        own_times, theirs = map(statistics.median, times)
        flops = 2e-12 * m * n * k / (2 if name.startswith("gradient of SwiGLU") else 1)
        verdict = "" if ratio >= bar else "  MISSED"
        print(
            f"  {name:26s} {own_times * 1e6:8.1f} us {flops / own_times:6.0f} TF   {other:34s} {theirs * 1e6:8.1f} us"
            f"   {ratio:.3f} [{least:.3f} {most:.3f}] (bar {bar:.3f}){verdict}",
            flush=True,
        )


def host() -> None:
    """Prints the host time of warm calls."""
    m, n, k, experts = SMALL
    names = ("product", "SwiGLU", "gradient of weights", "gradient of SwiGLU, dprob", "quantised to fp8")
    for name, call_of in problems(m * 2, n, k, experts).items():
        if name in names:
            call, _, _ = call_of.compiled_call()
            (times,) = compare([call], HOST)
            print(f"  host, {name:26s} {min(times) * 1e6:.2f} us (bar 8)", flush=True)
    (times,) = compare([program.make(cudnn.GroupedGemmGlu, (2 * m, n, k, experts), "cuda").call], HOST)
    print(f"  host, wrapper of SwiGLU {min(times) * 1e6:.2f} us, with what it allocates", flush=True)


def main() -> None:
    """Compiles the kernels, then measures as many shapes as the time allows."""
    start, compile_only = time.monotonic(), sys.argv[1:] == ["--compile"]
    limit = float(sys.argv[1]) if sys.argv[1:] and not compile_only else 300.0
    kernels: dict[Any, warm.Kernel] = {}
    for shape in (*SHAPES, (SMALL[0] * 2, *SMALL[1:])):
        for name, call_of in problems(*shape).items():
            inputs, results = call_of.tensors("meta")
            for key in call_of.object({**inputs, **results}, arch=ARCH).kernels():
                kernels.setdefault(key, warm.Kernel(name, *key))
    for _ in warm.warm(list(kernels.values()), cache.user(), min(16, os.cpu_count() or 1)):
        pass
    print(f"{len(kernels)} kernels: {time.monotonic() - start:.1f} s", flush=True)
    if compile_only:
        return
    host()
    for shape in SHAPES:
        if time.monotonic() - start < limit:
            print(f"{'x'.join(map(str, shape))}: begun at {time.monotonic() - start:.1f} s", flush=True)
            measure(shape)
    print(f"{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
