"""Benchmark of attention, forward and backward, against cuDNN and PyTorch. FlashAttention-4: ``flash_attn``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudnn.bench import (
    CUDNN,
    GPU,
    QUICK,
    Benchmark,
    Call,
    Candidate,
    Options,
    Problem,
    gemm,
    off_by_norm,
    operands,
    returning,
)
from cudnn.lazy import torch
from cudnn.sdpa import SdpaBackward, SdpaForward
from cudnn_kernels.attention import DESCALES

NAME = "sdpa"
OURS, GRAPH, FLEX = "cudnn.sdpa", "cuDNN", "flex attention"
OURS_FP8, GRAPH_FP8 = f"{OURS}, fp8", f"{GRAPH}, fp8"
PACKAGES = {GRAPH: CUDNN, GRAPH_FP8: CUDNN}
SHAPES = (
    (4, 4096, 16, 16, 128, 128),
    (1, 16384, 16, 16, 128, 128),
    (4, 4096, 32, 32, 64, 64),
    (2, 8192, 16, 16, 192, 128),
    (4, 4096, 8, 8, 256, 256),
    (1, 16384, 8, 8, 256, 256),
    (4, 4096, 16, 2, 256, 256),
)
"""Batch, sequence length, query heads, key/value heads, head_dim of q and k, head_dim of v."""
LENGTHS = tuple(1 << i for i in range(9, 18))
TOKENS = 16384
MODELS = {"128": (32, 8, 128, 128), "256": (8, 8, 256, 256)}
"""Head counts and head_dims for the sweep over ``LENGTHS``."""
WINDOW = 1024
ROWS = 512  # rows of q per chunk of the exact result
TOLERANCE, TOLERANCE_FP8 = 0.01, 0.1  # of the norm; rounding to bfloat16 costs 0.003
PASSES = ("forward", "backward")
SCALES = "descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"


@dataclass(frozen=True)
class Case:
    """A shape and its mask: none, ``causal``, or causal with ``window`` keys before the diagonal."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: int = 0
    dtype: str = "bf16"

    @property
    def label(self) -> str:
        """The shape and the mask."""
        sizes = (self.batch, self.length, self.heads, self.kv_heads, self.head_dim, self.head_dim_v)
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return f"{'x'.join(map(str, sizes))} {mask}"

    def flops(self, which: str) -> float:
        """Two GEMMs forward and five backward, over the unmasked scores."""
        visible_scores = self.length**2 / (1 + self.causal)
        if self.window:
            masked = max(self.length - self.window - 1, 0)
            visible_scores -= masked**2 / 2
        elements = self.head_dim + self.head_dim_v if which == "forward" else 3 * self.head_dim + 2 * self.head_dim_v
        return 2.0 * self.batch * self.heads * visible_scores * elements

    def bytes(self, which: str) -> float:
        """Each operand and result once."""
        queries, keys = self.batch * self.heads * self.length, self.batch * self.kv_heads * self.length
        passes = 1 if which == "forward" else 2  # and dO
        size = self.head_dim + self.head_dim_v
        return 2.0 * (passes * size * (queries + keys) + (passes - 1) * self.head_dim_v * queries) + 4.0 * queries


def benchmark() -> Benchmark:
    """The benchmark; a shape is like those of ``SHAPES``."""
    return Benchmark(
        title="Attention",
        yardsticks=(GRAPH,),
        dtypes=("bf16", "fp16"),
        dimensions={"B": 1, "S": 1, "HQ": 1, "HK": 1, "D": 8, "DV": 8},
        problems=problems,
        quick=tuple(SHAPES[i] for i in (0, 4, 2, 3)),
    )


def cases(options: Options) -> list[Case]:
    """The cases: full and causal masks; with ``all`` the sweep over lengths, and windows; with ``quick`` causal."""
    shapes: Any = options.shapes or SHAPES
    shapes_and_masks: list[Any] = [
        (shape, causal, 0) for shape in shapes for causal in ((True,) if options.quick else (False, True))
    ]
    if options.all and not options.shapes:
        for heads in MODELS.values():
            for length in LENGTHS:
                shape = (max(TOKENS // length, 1), length, *heads)
                shapes_and_masks += [(shape, causal, 0) for causal in (False, True)]
                shapes_and_masks += [(shape, True, WINDOW)] * (length > WINDOW)
    return [
        Case(*shape, causal=causal, window=window, dtype=options.dtype) for shape, causal, window in shapes_and_masks
    ]


def problems(options: Options) -> list[Problem]:
    """Both passes of each case, and the device copy that the roofline needs."""
    clock = QUICK if options.quick else GPU
    result = [
        Problem(
            f"{case.label}, {which}",
            functools.partial(candidates, case, which, options.quick),
            case.flops(which),
            case.bytes(which),
            clock,
        )
        for case in cases(options)
        for which in PASSES
    ]
    return [*result, Problem("device copy", gemm.copy_candidates, bytes=2.0 * gemm.COPY_BYTES, clock=clock)]


def candidates(case: Case, which: str, quick: bool = False) -> list[Candidate]:
    """The implementations that support the case; flex attention, which compiles slowly, not with ``quick``."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    q, k, v, do = (
        operands.normal(case.batch, case.length, heads, head_dim).to(dtype).transpose(1, 2)
        for heads, head_dim in (
            (case.heads, case.head_dim),
            (case.kv_heads, case.head_dim),
            (case.kv_heads, case.head_dim_v),
            (case.heads, case.head_dim_v),
        )
    )
    expected = exact(case, q, k, v, do, which)
    implementations: dict[str, Callable[..., Call]] = {
        GRAPH: graph,
        FLEX: flex_attention,
        OURS: ours,
    }
    if which == "forward" and not quick:
        implementations |= {GRAPH_FP8: in_fp8(graph), OURS_FP8: in_fp8(ours)}
    if quick:
        del implementations[FLEX]
    if (case.head_dim, case.head_dim_v) not in (SdpaForward if which == "forward" else SdpaBackward).head_sizes:
        implementations = {
            name: implementation for name, implementation in implementations.items() if name not in (OURS, OURS_FP8)
        }
    return [
        Candidate(
            name,
            functools.partial(implementation, case, which, q, k, v, do),
            functools.partial(wrong, expected, tolerance=TOLERANCE_FP8 if name in (OURS_FP8, GRAPH_FP8) else TOLERANCE),
            name in (OURS, OURS_FP8),
            package=PACKAGES.get(name, "torch"),
        )
        for name, implementation in implementations.items()
    ]


def exact(case: Case, q: Any, k: Any, v: Any, do: Any, which: str) -> dict[str, Any]:
    """The results in float32 of the first batch and first KV head, computed in chunks of rows of q."""
    qhead_per_kvhead = case.heads // case.kv_heads
    q, k, v, do = (x[0, :heads].float() for x, heads in ((q, qhead_per_kvhead), (k, 1), (v, 1), (do, qhead_per_kvhead)))
    scale = case.head_dim**-0.5
    keys = torch.arange(case.length, dtype=torch.int64, device=q.device)
    chunks: list[Any] = []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, case.length, ROWS):
        rows = slice(first, first + ROWS)
        row = keys[rows, None]
        scores = scale * q[:, rows] @ k.mT
        if case.causal:
            scores.masked_fill_(keys > row, -torch.inf)
        if case.window:
            scores.masked_fill_(keys < row - case.window, -torch.inf)
        p = scores.softmax(-1)
        o = p @ v
        if which == "forward":
            chunks.append(o)
            continue
        ds = p * (do[:, rows] @ v.mT - (o * do[:, rows]).sum(-1, keepdim=True))
        chunks.append(scale * ds @ k)
        dk += (scale * ds.mT @ q[:, rows]).sum(0)
        dv += (p.mT @ do[:, rows]).sum(0)
    first_result = torch.cat(chunks, 1)
    return {"o": first_result} if which == "forward" else {"dq": first_result, "dk": dk, "dv": dv}


def wrong(expected: Mapping[str, Any], results: Mapping[str, Any], tolerance: float = TOLERANCE) -> str:
    """Checks the heads of the first batch that ``expected`` has. Returns a message, or ``""``."""
    return off_by_norm(expected, {name: results[name][0, : len(want)] for name, want in expected.items()}, tolerance)


def in_fp8(make: Callable[..., Call]) -> Callable[..., Call]:
    """The same implementation with Q, K and V in e4m3."""
    return lambda case, which, q, k, v, do: make(case, which, *(x.to(torch.float8_e4m3fn) for x in (q, k, v)), do)


def ours(case: Case, which: str, q: Any, k: Any, v: Any, do: Any) -> Call:
    """Our kernels."""
    options: dict[str, Any] = {"is_causal": case.causal, "window_size": (case.window or -1, -1)}
    o, lse = torch.empty_like(do), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    one = torch.ones((), dtype=torch.float32, device=q.device).expand(case.batch, case.kv_heads)
    descales = DESCALES if q.dtype.itemsize == 1 else ()
    forward = SdpaForward(q, k, v, o, lse, **options, **{f"sample_{x}": one for x in descales})
    forward.compile()
    scale_tensors = {f"{x}_tensor": one for x in descales}
    run, results = functools.partial(forward.execute, q, k, v, o, lse, **scale_tensors), {"o": o}
    if which == "backward":
        run()
        results = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        backward = SdpaBackward(q, k, v, o, do, lse, *results.values(), **options)
        backward.compile()
        run = functools.partial(backward.execute, q, k, v, o, do, lse, *results.values())
    return returning(run, results)


def differentiated(run: Callable[..., Any], which: str, q: Any, k: Any, v: Any, do: Any) -> Call:
    """A pass of a differentiable function."""
    if which == "forward":

        def forward() -> Mapping[str, Any]:
            with torch.no_grad():
                return {"o": run(q, k, v)}

        return forward
    from torch._functorch import config

    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with config.patch(donated_buffer=False):  # a compiled backward pass with donated buffers runs only once
        o = run(*inputs)
    gradients = functools.partial(torch.autograd.grad, o, inputs, do, retain_graph=True)
    return lambda: dict(zip(("dq", "dk", "dv"), gradients(), strict=True))


def graph(case: Case, which: str, q: Any, k: Any, v: Any, do: Any) -> Call:
    """cuDNN, through the Graph API."""
    import cudnn

    dtypes = {
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float16: cudnn.data_type.HALF,
        torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
    }
    bounds = {"diagonal_band_right_bound": 0} if case.causal else {}
    bounds |= {"diagonal_band_left_bound": case.window + 1} if case.window else {}
    options: dict[str, Any] = {"attn_scale": case.head_dim**-0.5, **bounds}

    def built(graph_: Any, inputs: Mapping[Any, Any], outputs: Mapping[Any, Any]) -> Callable[[], Any]:
        for tensor, x in outputs.items():
            tensor.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
        graph_.validate()
        graph_.build_operation_graph()
        graph_.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph_.deselect_engines(["fused"])  # our kernels, ranked first where they are faster
        graph_.check_support()
        graph_.build_plans()
        workspace = torch.empty(graph_.get_workspace_size(), dtype=torch.uint8, device=q.device)
        return functools.partial(graph_.execute, {**inputs, **outputs}, workspace)

    def new() -> Any:
        fp32 = cudnn.data_type.FLOAT
        return cudnn.pygraph(io_data_type=dtypes[q.dtype], intermediate_data_type=fp32, compute_data_type=fp32)

    o, stats = torch.empty_like(do, dtype=q.dtype), torch.empty((*q.shape[:3], 1), dtype=torch.float32, device=q.device)
    graph_ = new()
    if q.dtype.itemsize == 1:
        tensors = {graph_.tensor_like(x): x for x in (q, k, v)}
        scales = torch.ones(len(SCALES), 1, 1, 1, 1, dtype=torch.float32, device=q.device)
        scale_tensors = {graph_.tensor_like(x): x for x in scales}
        bounds = {name.removeprefix("diagonal_band_"): x for name, x in bounds.items()}
        o_tensor, _, *amax_tensors = graph_.sdpa_fp8(
            *tensors,
            **dict(zip(SCALES, scale_tensors, strict=True)),
            is_inference=True,
            attn_scale=case.head_dim**-0.5,
            **bounds,
        )
        amax = dict(zip(amax_tensors, torch.ones(2, 1, 1, 1, 1, dtype=torch.float32, device=q.device), strict=True))
        run = built(graph_, {**tensors, **scale_tensors}, {o_tensor: o, **amax})
        return returning(run, {"o": o})
    tensors = {graph_.tensor_like(x): x for x in (q, k, v)}
    o_tensor, stats_tensor = graph_.sdpa(*tensors, generate_stats=True, **options)
    stats_tensor.set_data_type(cudnn.data_type.FLOAT)
    run, results = built(graph_, tensors, {o_tensor: o, stats_tensor: stats}), {"o": o}
    if which == "backward":
        run()
        results = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        graph_ = new()
        tensors = {graph_.tensor_like(x): x for x in (q, k, v, o, do)}
        stats_tensor = graph_.tensor_like(stats)
        gradients = graph_.sdpa_backward(*tensors, stats_tensor, **options)
        run = built(graph_, {**tensors, stats_tensor: stats}, dict(zip(gradients, results.values(), strict=True)))
    return returning(run, results)


def flex_attention(case: Case, which: str, q: Any, k: Any, v: Any, do: Any) -> Call:
    """PyTorch's flex attention, compiled, with a block mask."""
    from torch.nn.attention import flex_attention as flex  # pyright: ignore[reportMissingImports]

    def visible(batch: Any, head_dim: Any, row: Any, key: Any) -> Any:
        return (key <= row) & (key >= row - case.window) if case.window else key <= row

    torch._dynamo.reset()
    mask = flex.create_block_mask(visible, None, None, case.length, case.length, str(q.device)) if case.causal else None
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    run = functools.partial(compiled, block_mask=mask, enable_gqa=case.heads != case.kv_heads)
    return differentiated(run, which, q, k, v, do)
