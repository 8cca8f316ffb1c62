"""Benchmark of the grouped GEMM with e4m3 operands and a float32 scale factor for each 128 elements, and of the
gradient of its weights.

The yardsticks are PyTorch's grouped GEMMs: of the same values in bfloat16, and of e4m3 operands with a scale factor
for each row, which has no gradient of weights. DeepGEMM is a peer if it is installed; its experts begin at multiples of
128 rows, and its gradients are added to float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.bench import (
    GPU,
    QUICK,
    Benchmark,
    Call,
    Candidate,
    Options,
    Problem,
    gemm_peers,
    grouped,
    off_by_norm,
    operands,
    returning,
)
from cudnn.demo_cases import grouped as cases
from cudnn.gemm import dequantize, dequantize_token_blocks, quantize_token_blocks
from cudnn.gemm.scales import token_block_ranges
from cudnn.lazy import torch

NAME = "grouped_gemm_fp8"
OURS, OURS_BF16 = "GroupedGemmQuant, fp8 per 128", "GroupedGemm, bf16"
WGRAD, WGRAD_BF16 = "GroupedGemmWgrad, fp8 per 128", "GroupedGemmWgrad, bf16"
WGRAD_ADDED = "GroupedGemmWgrad, fp8 per 128, added to float32"
BF16, SCALED = "torch._grouped_mm, bf16", "torch._scaled_grouped_mm, fp8 per row"
SHAPES = (
    (32768, 28672, 4096, 8),
    (32768, 2816, 2048, 64),
    (65536, 1536, 2048, 128),
    (262144, 4096, 7168, 128),
    (262144, 2048, 4096, 128),
)
"""Tokens, N, K, experts."""
DTYPE = "fp8_128"
GRADIENT = "gradient of weights"
TOLERANCE = 0.02  # of the norm: the reference rounds each operand to bfloat16 once more


def benchmark() -> Benchmark:
    """The benchmark; a shape is like those of ``SHAPES``."""
    return Benchmark(
        title="Grouped GEMM, fp8",
        yardsticks=(SCALED, BF16),
        dtypes=("fp8",),
        dimensions={"M": 1, "N": 128, "K": 128, "EXPERTS": 1},
        problems=problems,
        quick=SHAPES[:4],
    )


def problems(options: Options) -> list[Problem]:
    """The shapes, with experts of equal size: the GEMM, and the gradient of its weights (N, K) of each expert."""
    clock = QUICK if options.quick else GPU
    return [
        Problem(
            f"{m}x{n}x{k}x{experts} {case}".strip(),
            functools.partial(make, (m, n, k, experts)),
            flops=2.0 * m * n * k,
            clock=clock,
        )
        for case, make in (("", candidates), (GRADIENT, gradient_candidates))
        for m, n, k, experts in options.shapes or SHAPES
    ]


def candidates(shape: tuple[int, ...]) -> list[Candidate]:
    """Ours and the peers on the same values, but for ``_scaled_grouped_mm``, which reads unscaled e4m3 values."""
    import cudnn

    api: Any = cudnn.GroupedGemmQuant
    inputs = cases.inputs(api, shape, operands.DEVICE, DTYPE, generated_on=operands.DEVICE)
    inputs = {name: x for name, x in inputs.items() if name != "prob"}
    inputs["alpha"].fill_(1.0)
    offsets = inputs["padded_offsets"]
    offsets.copy_(ends(shape))
    plain: dict[str, Any] = {
        name: dequantize(inputs[name], inputs[f"sf{name}"], gemm_peers.BLOCK).bfloat16() for name in ("a", "b")
    }
    plain |= {"padded_offsets": offsets, "alpha": inputs["alpha"]}
    product = grouped.product(api, plain, offsets)()["product"]

    def check(results: Mapping[str, Any]) -> str:
        return off_by_norm({"d": product}, {"d": results["d"].reshape(product.shape)}, TOLERANCE)

    def check_unscaled(results: Mapping[str, Any]) -> str:
        values = {name: inputs[name].bfloat16() for name in ("a", "b")}
        return off_by_norm({"d": grouped.product(api, values, offsets)()["product"]}, results, TOLERANCE)

    return [
        Candidate(SCALED, lambda: scaled(inputs), check_unscaled),
        Candidate(BF16, lambda: renamed(grouped.product(api, plain, offsets)), check),
        Candidate(gemm_peers.DEEP_GEMM, lambda: deep_gemm(inputs), check, package=gemm_peers.DEEP_GEMM_PACKAGE),
        Candidate(OURS_BF16, lambda: forward(cudnn.GroupedGemm, plain, {}), check, ours=True),
        Candidate(OURS, lambda: forward(api, inputs, {"sf_vec_size": gemm_peers.BLOCK}), check, ours=True),
    ]


def gradient_candidates(shape: tuple[int, ...]) -> list[Candidate]:
    """Gradients of weights from the same values: e4m3 blocks of 128 tokens, and bfloat16."""
    import cudnn

    (m, n, k, experts), device = shape, operands.DEVICE
    offsets = ends(shape).to(device)
    quantized: dict[str, Any] = {"offsets": offsets}
    plain: dict[str, Any] = {"offsets": offsets}
    for name, columns in (("a", n), ("b", k)):
        tokens = torch.randn(m, columns, dtype=torch.bfloat16, device=device)
        quantized[name], quantized[f"sf{name}"] = quantize_token_blocks(tokens, offsets)
        plain[name] = dequantize_token_blocks(quantized[name], quantized[f"sf{name}"], offsets).bfloat16()
    plain["a"] = plain["a"].T
    blocks = [each for _, each in token_block_ranges(offsets)]
    scaled_options = {"sf_vec_size": gemm_peers.BLOCK}

    def reference() -> Mapping[str, Any]:
        return {"wgrad": torch._grouped_mm(plain["a"], plain["b"], offs=offsets)}

    expected = reference()

    def check(results: Mapping[str, Any]) -> str:
        return off_by_norm(expected, results, TOLERANCE)

    def zeros(dtype: Any) -> Any:
        return torch.zeros(experts, n, k, dtype=dtype, device=device)

    def deep() -> Call:
        a, sfa, b, sfb = (quantized[name] for name in ("a", "sfa", "b", "sfb"))
        return gemm_peers.deep_grouped_wgrad(a, sfa, b, sfb, blocks, zeros(torch.float32), "wgrad")

    def gradient(inputs: Mapping[str, Any], dtype: Any, options: Mapping[str, Any]) -> Call:
        return ours(cudnn.GroupedGemmWgrad, inputs, {"wgrad": zeros(dtype)}, options)

    added = {**scaled_options, "accumulate_on_output": True}
    return [
        Candidate(BF16, lambda: reference, check),
        Candidate(gemm_peers.DEEP_GEMM, deep, check, package=gemm_peers.DEEP_GEMM_PACKAGE),
        Candidate(WGRAD_BF16, lambda: gradient(plain, torch.bfloat16, {}), check, ours=True),
        Candidate(WGRAD, lambda: gradient(quantized, torch.bfloat16, scaled_options), check, ours=True),
        Candidate(WGRAD_ADDED, lambda: gradient(quantized, torch.float32, added), check, ours=True),
    ]


def ends(shape: tuple[int, ...]) -> Any:
    """End rows of experts of equal size, int32, on the CPU."""
    return torch.tensor(grouped.ends("uniform", shape[3], shape[0]), dtype=torch.int32, device="cpu")


def renamed(call: Call) -> Call:
    """The call with its result under the API's name."""
    return lambda: {"d": call()["product"]}


def scaled(inputs: Mapping[str, Any]) -> Call:
    """PyTorch's grouped GEMM of the e4m3 operands with a scale factor of 1 for each row of A and of B."""
    a, b, offsets = inputs["a"][..., 0], inputs["b"].permute(2, 1, 0), inputs["padded_offsets"]
    rows = torch.ones(a.shape[0], dtype=torch.float32, device=a.device)
    columns = torch.ones(len(offsets), b.shape[2], dtype=torch.float32, device=a.device)
    return lambda: {"d": torch._scaled_grouped_mm(a, b, rows, columns, offs=offsets, out_dtype=torch.bfloat16)}


def deep_gemm(inputs: Mapping[str, Any]) -> Call:
    """DeepGEMM on the same operands.

    Raises:
        ValueError: an expert does not begin at a multiple of 128 rows.
    """
    a, sfa = inputs["a"][..., 0], inputs["sfa"][..., 0]
    b, sfb = (inputs[name].permute(2, 0, 1).contiguous() for name in ("b", "sfb"))
    offsets = inputs["padded_offsets"]
    if any(end % gemm_peers.BLOCK for end in offsets.tolist()):
        raise ValueError(f"DeepGEMM: an expert ends at no multiple of {gemm_peers.BLOCK} rows")
    d = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=torch.bfloat16, device=a.device)
    return gemm_peers.deep_grouped_gemm(a, sfa, b, sfb, offsets, d, "d")


def forward(api: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Call:
    """The API with a bfloat16 result."""
    return ours(api, inputs, {"d": api.allocated(inputs, options)["d"]}, options)


def ours(api: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any], options: Mapping[str, Any]) -> Call:
    """The API into ``outputs``."""
    tensors = {**inputs, **outputs}
    op = api(**api.samples(tensors), **options)
    op.compile()
    run = functools.partial(op.execute, **{p: tensors.get(name) for name, p in api.parameters.items()})
    return returning(run, outputs)
