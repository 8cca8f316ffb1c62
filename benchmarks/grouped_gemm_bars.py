"""What the grouped GEMMs are held to, in one table: each kernel beside its peer, or beside another kernel of ours.

    python benchmarks/grouped_gemm_bars.py [SECONDS | --compile]

Three shapes of experts, bf16 where no type is named. A ratio is the other time divided by ours: more is better,
everywhere. The two take turns by themselves, for each line anew, there and back: each runs as often behind the other as
the other behind it, so neither gains by what ran before. A ratio is the median of the rounds, beside the least and the
greatest. No shape is begun after SECONDS. The kernels are compiled first; with ``--compile``, nothing else is done.
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

    ``made``: the types of further tensors by name. ``without``: inputs that are left out. ``transposed``: the columns
    of weights are contiguous. ``ends``: those of experts, if not equally far apart. ``checked``: against the reference.
    """

    api: Any
    shape: tuple[int, ...]
    kind: str = "bf16"
    made: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ("prob", "beta")
    transposed: bool = False
    ends: tuple[int, ...] = ()
    checked: bool = True

    def __post_init__(self) -> None:
        vector = 32 if "sfd_row" in self.made else OPERAND_TYPES[self.kind].vector
        self.options = {} if vector == 16 else {"sf_vec_size": vector}
        experts, tokens = self.shape[3], self.shape["mnk".index(self.api.tokens)]
        self.ends = self.ends or tuple(peers.ends("uniform", experts, tokens))

    def tensors(self, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs and results by name."""
        given = program.inputs(self.api, self.shape, device, self.kind, generated_on=device)
        given = {name: x for name, x in given.items() if name not in self.without}
        if self.transposed:
            given["b"] = given["b"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
        self.offsets(given).copy_(torch.tensor(self.ends, dtype=torch.int32))
        results = self.api.allocated(given, self.options)
        results.pop("amax", None)
        sizes = self.api.example_sizes(dict(zip(self.api.example[0], self.shape, strict=True))) | {"vector": 32}
        for name, dtype in self.made.items():
            spec = self.api.spec(name)
            tensor = spec.layout.allocate(sizes, "n", getattr(torch, dtype), device)
            (results if spec.written else given)[name] = tensor.zero_() if name == "dprob" else tensor
            if not spec.written:
                tensor.fill_(1.0)
        return given, results

    def offsets(self, given: Mapping[str, Any]) -> Any:
        """Where experts end."""
        return next(given[spec.name] for spec in self.api.tensors if spec.init == "ends")

    def object(self, tensors: Mapping[str, Any], **options: Any) -> Any:
        """The API's object for tensors like these."""
        return self.api(**self.api.samples(tensors), **self.options, **options)

    def ready(self) -> tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]:
        """What is timed, its inputs and its results, which are right."""
        given, results = self.tensors("cuda")
        made = self.object({**given, **results})
        made.compile()
        named = {parameter: {**given, **results}.get(name) for name, parameter in made.parameters.items()}
        made.execute(**named)
        for name, exact in program.expected(self.api, given, results).items() if self.checked else ():
            found = program.judge(name, results[name], exact, program.SLACK)
            if not found.passed:
                raise ValueError(f"{name} is off by {found.error:.2e}, at most {found.allowed:.2e} is right")
        return lambda: made.execute(**named), given, results


def problems(m: int, n: int, k: int, experts: int) -> dict[str, Ours]:
    """Our calls by name, on tokens m, with weights n x k."""
    rows = (m, n, k, experts)
    generator = torch.Generator().manual_seed(0)
    share = m // experts
    counts = (torch.randint(-share // 8, share // 8, (experts,), generator=generator) + share).tolist()
    counts[-1] += m - sum(counts)
    rounded = [-(-count // 256) * 256 for count in counts]
    glu, quant = cudnn.GroupedGemmGlu, cudnn.GroupedGemmQuant
    return {
        "product": Ours(cudnn.GroupedGemm, rows),
        "SwiGLU": Ours(glu, rows),
        "SwiGLU, prob, c kept": Ours(glu, rows, made={"c": "bfloat16"}, without=("beta",)),
        "gradient of tokens": Ours(cudnn.GroupedGemm, (m, k, n, experts), transposed=True),
        "gradient of weights": Ours(cudnn.GroupedGemmWgrad, (n, k, m, experts)),
        "gradient of SwiGLU, dprob": Ours(
            cudnn.GroupedGemmDglu, (m, n // 2, k, experts), "bf16", {"dprob": "float32"}, ("beta",), transposed=True
        ),
        "quantised to fp8": Ours(quant, rows, made=QUANTISED, checked=False),
        "fp8, a factor a row": Ours(quant, rows, "fp8", made={"row_scale": "float32"}, checked=False),
        "fp8, factors per 128": Ours(quant, rows, "fp8_128", checked=False),
        "SwiGLU, Zipf": Ours(glu, rows, ends=tuple(peers.ends("zipf", experts, m))),
        "SwiGLU, ragged": Ours(glu, rows, ends=tuple(accumulate(counts))),
        "SwiGLU, padded": Ours(glu, (sum(rounded), n, k, experts), ends=tuple(accumulate(rounded))),
    }


def scaled(given: Mapping[str, Any], n: int) -> Callable[[], Any]:
    """PyTorch's grouped product of fp8 operands, with a factor for each row of both."""
    a, b, ends = given["a"][..., 0], given["b"].permute(2, 1, 0), given["padded_offsets"]
    rows, columns = a.new_ones(a.shape[0], dtype=torch.float32), a.new_ones(len(ends), n, dtype=torch.float32)
    return lambda: torch._scaled_grouped_mm(a, b, rows, columns, offs=ends, out_dtype=torch.bfloat16)


def others(ours: Mapping[str, Ours], given: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """What makes the peers of our calls that were made, by their names."""
    found: dict[str, Any] = {}
    for name, inputs in given.items():
        ends = ours[name].offsets(inputs)
        if name == "fp8, a factor a row":
            found[name] = partial(scaled, inputs, ours[name].shape[1])
        elif name.endswith("dprob"):
            found[name] = partial(peers.followed, ours[name].api, inputs, ends, results[name])
        elif name == "product" or name.startswith("gradient"):
            found[name] = partial(peers.product, ours[name].api, inputs, ends)
        if name == "product" and importlib.util.find_spec("quack"):
            found["QuACK"] = partial(peers.quack, inputs, ends)
    return found


BARS = (  # our call; what it is compared with: a peer or a call of ours; the least ratio
    ("product", "peer product", 1.0),
    ("product", "peer QuACK", 1.0),
    ("SwiGLU", "peer product", 1.0),
    ("SwiGLU, prob, c kept", "peer product", 0.0),
    ("gradient of tokens", "peer gradient of tokens", 1.05),
    ("gradient of weights", "peer gradient of weights", 1.05),
    ("gradient of SwiGLU, dprob", "peer gradient of SwiGLU, dprob", 1.15),
    ("quantised to fp8", "product", 0.97),
    ("fp8, a factor a row", "peer fp8, a factor a row", 1.2),
    ("fp8, factors per 128", "product", 1.6),
    ("SwiGLU, Zipf", "SwiGLU", 1 / 1.1),
    ("SwiGLU, ragged", "SwiGLU, padded", 1 / 1.03),
)


def measure(shape: tuple[int, ...]) -> None:
    """Prints the lines of a shape."""
    ours, calls, given, results = problems(*shape), dict[str, Any](), dict[str, Any](), dict[str, Any]()

    def attempt(name: str, make: Callable[[], Any]) -> None:
        try:
            calls[name], given[name], results[name] = make()
            calls[name]()
        except Exception as error:  # the others are still measured
            for made in (calls, given, results):
                made.pop(name, None)
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()

    for name, one in ours.items():
        attempt(name, one.ready)
    for name, peer in others(ours, given, results).items():
        attempt(f"peer {name}", lambda peer=peer: (peer(), None, None))
    m, n, k, _ = shape
    for name, other, bar in BARS:
        if name not in calls or other not in calls:
            continue
        times = compare([calls[name], calls[other]], PAIR)
        ratio, least, most = bench.ratio(times[1], times[0])
        mine, theirs = map(statistics.median, times)
        flops = 2e-12 * m * n * k / (2 if name.startswith("gradient of SwiGLU") else 1)
        met = "" if ratio >= bar else "  MISSED"
        print(
            f"  {name:26s} {mine * 1e6:8.1f} us {flops / mine:6.0f} TF   {other:34s} {theirs * 1e6:8.1f} us"
            f"   {ratio:.3f} [{least:.3f} {most:.3f}] (bar {bar:.3f}){met}",
            flush=True,
        )


def host() -> None:
    """Prints the host time of warm calls."""
    m, n, k, experts = SMALL
    names = ("product", "SwiGLU", "gradient of weights", "gradient of SwiGLU, dprob", "quantised to fp8")
    for name, one in problems(m * 2, n, k, experts).items():
        if name in names:
            call, _, _ = one.ready()
            (times,) = compare([call], HOST)
            print(f"  host, {name:26s} {min(times) * 1e6:.2f} us (bar 8)", flush=True)
    (times,) = compare([program.make(cudnn.GroupedGemmGlu, (2 * m, n, k, experts), "cuda").call], HOST)
    print(f"  host, wrapper of SwiGLU {min(times) * 1e6:.2f} us, with what it allocates", flush=True)


def main() -> None:
    """All, as far as the time allows."""
    start, only = time.monotonic(), sys.argv[1:] == ["--compile"]
    limit = float(sys.argv[1]) if sys.argv[1:] and not only else 300.0
    wanted: dict[Any, warm.Kernel] = {}
    for shape in (*SHAPES, (SMALL[0] * 2, *SMALL[1:])):
        for name, one in problems(*shape).items():
            given, results = one.tensors("meta")
            for key in one.object({**given, **results}, arch=ARCH).kernels():
                wanted.setdefault(key, warm.Kernel(name, *key))
    for _ in warm.warm(list(wanted.values()), cache.user(), min(16, os.cpu_count() or 1)):
        pass
    print(f"{len(wanted)} kernels: {time.monotonic() - start:.1f} s", flush=True)
    if only:
        return
    host()
    for shape in SHAPES:
        if time.monotonic() - start < limit:
            print(f"{'x'.join(map(str, shape))}: begun at {time.monotonic() - start:.1f} s", flush=True)
            measure(shape)
    print(f"{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
