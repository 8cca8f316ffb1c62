"""Benchmark of host time: how long a warm call occupies the CPU, next to ``torch.add(out=)`` in the same run.

Tensors are small, so that the GPU waits for the host. Last come the first training steps of processes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cudnn.bench import CUDNN, HOST, Benchmark, Candidate, Options, Problem, first_step, operands, returning
from cudnn.lazy import torch

NAME = "host"
YARDSTICK = "torch.add(out=)"
SIZE = 256
EXPERTS, TOP_K = 8, 2
QWEN3_EXPERTS, QWEN3_TOP_K = 128, 8
FIRST_STEP = f"first step, {first_step.TOKENS} tokens"
"""Both passes of a layer of Qwen3-30B-A3B in a new process, with the synchronization after each."""


def benchmark() -> Benchmark:
    """The benchmark. It has no shapes."""
    return Benchmark(
        title="Host time of a warm call",
        yardsticks=(YARDSTICK,),
        dtypes=("bf16",),
        dimensions={"SIZE": 64},
        problems=problems,
    )


def problems(options: Options) -> list[Problem]:
    """A problem for each kind of call."""
    size = options.shapes[0][0] if options.shapes else SIZE
    warm = [Problem(case, functools.partial(candidates, case, size), clock=HOST) for case in CASES]
    return [*warm, Problem(FIRST_STEP, first_step.candidates, clock=first_step.RECORDED)]


def candidates(case: str, size: int) -> list[Candidate]:
    """``torch.add`` and the calls of a case: ours, and PyTorch's for the same task."""
    x = operands.normal(size, size).bfloat16()
    y = torch.empty_like(x)
    return [Candidate(YARDSTICK, lambda: lambda: {"": torch.add(x, x, out=y)}), *CASES[case](size)]


def timed(name: str, prepare: Callable[[], Callable[[], Any]], ours: bool = True, package: str = "torch") -> Candidate:
    """A candidate that is not checked: other benchmarks check the same calls."""
    return Candidate(name, lambda: returning(prepare(), {}), ours=ours, package=package)


def inferred(name: str, layer: Callable[..., Any], *inputs: Any, ours: bool = True, **options: Any) -> Candidate:
    """The forward pass of a layer without gradients."""
    call = functools.partial(torch.no_grad()(layer), *inputs, **options)
    return timed(name, lambda: call, ours)


def trained(name: str, layer: Any, x: Any, **options: Any) -> Candidate:
    """Both passes of our layer. Gradients are not kept."""
    x = x.clone().requires_grad_()
    needed = [x, *layer.parameters()]

    def run() -> dict[str, Any]:
        y = layer(x, **options)
        y = y[0] if options else y
        torch.autograd.grad(y, needed, y)
        return {}

    return Candidate(name, lambda: run, ours=True)


def graphs(size: int) -> list[Candidate]:
    """``graph.execute`` of matmul + bias, and PyTorch's function for it."""
    import cudnn

    a, b, out = (operands.normal(1, size, size).half() for _ in range(3))
    bias = operands.normal(1, 1, size).half()

    def execute() -> Callable[[], Any]:
        graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.HALF,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        inputs = [graph.tensor_like(x) for x in (a, b, bias)]
        product = graph.matmul(name="matmul", A=inputs[0], B=inputs[1])
        output = graph.bias(name="bias", input=product, bias=inputs[2])
        output.set_output(True)
        graph.build([cudnn.heur_mode.A])
        tensors = {**dict(zip(inputs, (a, b, bias), strict=True)), output: out}
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=a.device)
        return functools.partial(graph.execute, tensors, workspace)

    matrix, weight, vector = a[0], b[0], bias[0, 0]
    return [
        timed("torch.addmm(out=)", lambda: lambda: torch.addmm(vector, matrix, weight, out=out[0]), ours=False),
        Candidate("graph.execute", execute, ours=True, package=CUDNN),
    ]


def gemms(size: int) -> list[Candidate]:
    """The class and the wrapper of GEMM + SwiGLU, and PyTorch's GEMM."""
    import cudnn
    from cudnn.bench import dense_gemm
    from cudnn.ops import gemm_swiglu

    api: Any = cudnn.GemmSwiglu
    o = operands.operands("bf16", size, size, size)
    a, b = o.a.tensor, o.b.tensor
    wrapper: Any = cudnn.gemm_swiglu_wrapper_sm100
    types = {"ab12_dtype": torch.bfloat16, "c_dtype": torch.bfloat16}
    return [
        timed("torch.matmul", lambda: lambda: torch.matmul(o.a.plain, o.peer_b.t()), ours=False),
        timed("GemmSwiglu.execute", lambda: dense_gemm.prepare(api, o, {}, True)),
        timed("gemm_swiglu_wrapper", lambda: lambda: wrapper(a, b, alpha=1.0, **types)),
        timed("cudnn.ops.gemm_swiglu", lambda: lambda: gemm_swiglu(o.a.plain, o.peer_b)),
    ]


def grouped_gemms(size: int) -> list[Candidate]:
    """The class and the wrapper of grouped GEMM + GLU, and PyTorch's grouped GEMM."""
    import cudnn
    from cudnn.bench import grouped
    from cudnn.demo_cases import grouped as cases

    api: Any = cudnn.GroupedGemmGlu
    shape = (size, size, size, TOP_K)
    inputs = cases.inputs(api, shape, operands.DEVICE, generated_on=operands.DEVICE)
    outputs = api.allocated(inputs, api.pointer_options(inputs))
    return [
        timed("torch._grouped_mm", lambda: grouped.product(api, inputs, inputs["padded_offsets"]), ours=False),
        timed("GroupedGemmGlu.execute", lambda: grouped.ours(api, inputs, outputs)),
        timed("grouped_gemm_glu_wrapper", lambda: cases.make(api, shape, operands.DEVICE).call),
    ]


def attention(size: int) -> list[Candidate]:
    """The class and the operators of attention, and PyTorch's and FlashAttention-4's functions."""
    from cudnn.bench import attention as attention_bench
    from cudnn.bench.flash_attn import FLASH
    from cudnn.ops import flash_attn_func, scaled_dot_product_attention

    case = attention_bench.Case(1, size, 4, 4, 64, 64, causal=True)
    q, k, v, do = (operands.normal(1, 4, size, 64).bfloat16() for _ in range(4))
    peer = torch.nn.functional.scaled_dot_product_attention
    tokens = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def flash_attention() -> Callable[[], Any]:
        from flash_attn.cute import flash_attn_func as function  # pyright: ignore[reportMissingImports]

        return lambda: function(*tokens, causal=True)

    return [
        timed("F.scaled_dot_product_attention", lambda: lambda: peer(q, k, v, is_causal=True), ours=False),
        timed("SdpaForward.execute", lambda: attention_bench.ours(case, "forward", q, k, v, do)),
        timed(
            "cudnn.ops.scaled_dot_product_attention",
            lambda: lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        timed("cudnn.ops.flash_attn_func", lambda: lambda: flash_attn_func(*tokens, causal=True)),
        timed(f"{FLASH}, flash_attn_func", flash_attention, False, "flash-attn-4"),
    ]


def moe(size: int) -> list[Candidate]:
    """The layer, eager, and the same layer in eager PyTorch, without gradients; both passes of ours."""
    from cudnn.bench import moe_peers
    from cudnn.nn import MoE

    layer = MoE(size, size, EXPERTS, TOP_K, renormalize=True, device=operands.DEVICE)
    x = operands.normal(SIZE, size).bfloat16()
    weights = (layer.up, layer.down, layer.router.weight)
    peer = functools.partial(moe_peers.plain, moe_peers.grouped, TOP_K)
    return [
        inferred("PyTorch, eager, torch._grouped_mm", peer, x, *weights, ours=False),
        inferred("cudnn.nn.MoE", layer, x),
        inferred("cudnn.nn.MoE, return_routing", layer, x, return_routing=True),
        trained("cudnn.nn.MoE, both passes", layer, x),
        trained("cudnn.nn.MoE, both passes, return_routing", layer, x, return_routing=True),
    ]


def one_token(size: int) -> list[Candidate]:
    """Layers for one token, eager: MoE with the sizes of Qwen3-30B-A3B at the size 256, and a gated MLP."""
    from cudnn.nn import GatedMLP, MoE

    hidden, device = 8 * size, operands.DEVICE
    moe_layer = MoE(hidden, 3 * size, QWEN3_EXPERTS, QWEN3_TOP_K, renormalize=True, device=device)
    mlp = GatedMLP(hidden, 3 * hidden, device=device)
    x = operands.normal(1, hidden).bfloat16()
    return [
        inferred("cudnn.nn.MoE", moe_layer, x),
        inferred("cudnn.nn.GatedMLP", mlp, x),
        trained("cudnn.nn.MoE, both passes", moe_layer, x),
        trained("cudnn.nn.GatedMLP, both passes", mlp, x),
    ]


CASES: dict[str, Callable[[int], list[Candidate]]] = {
    "graph": graphs,
    "GEMM + SwiGLU": gemms,
    "grouped GEMM + GLU": grouped_gemms,
    "attention": attention,
    "MoE layer": moe,
    "layers, 1 token": one_token,
}
