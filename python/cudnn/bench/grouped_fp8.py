"""Benchmark of the grouped GEMM with e4m3 operands and a float32 scale factor for each 128 elements.

The yardsticks are PyTorch's grouped GEMMs: of the same values in bfloat16, and of e4m3 operands with a scale factor
for each row. DeepGEMM is a peer if it is installed; its experts begin at multiples of 128 rows.
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
from cudnn.gemm import dequantize
from cudnn.lazy import torch

NAME = "grouped_gemm_fp8"
OURS, OURS_BF16 = "GroupedGemmQuant, fp8 per 128", "GroupedGemm, bf16"
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
    """The shapes, with experts of equal size."""
    clock = QUICK if options.quick else GPU
    return [
        Problem(
            f"{m}x{n}x{k}x{experts}",
            functools.partial(candidates, (m, n, k, experts)),
            flops=2.0 * m * n * k,
            clock=clock,
        )
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
    offsets.copy_(torch.tensor(grouped.ends("uniform", shape[3], shape[0]), dtype=torch.int32, device="cpu"))
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
        Candidate(OURS_BF16, lambda: ours(cudnn.GroupedGemm, plain, {}), check, ours=True),
        Candidate(OURS, lambda: ours(api, inputs, {"sf_vec_size": gemm_peers.BLOCK}), check, ours=True),
    ]


def renamed(call: Call) -> Call:
    """The call with its result under the API's name."""
    return lambda: {"d": call()["product"]}


def scaled(inputs: Mapping[str, Any]) -> Call:
    """PyTorch's grouped GEMM of the e4m3 operands with a scale factor of 1 for each row of A and of B."""
    a, b, ends = inputs["a"][..., 0], inputs["b"].permute(2, 1, 0), inputs["padded_offsets"]
    rows = torch.ones(a.shape[0], dtype=torch.float32, device=a.device)
    columns = torch.ones(len(ends), b.shape[2], dtype=torch.float32, device=a.device)
    return lambda: {"d": torch._scaled_grouped_mm(a, b, rows, columns, offs=ends, out_dtype=torch.bfloat16)}


def deep_gemm(inputs: Mapping[str, Any]) -> Call:
    """DeepGEMM on the same operands.

    Raises:
        ValueError: an expert does not begin at a multiple of 128 rows.
    """
    a, sfa = inputs["a"][..., 0], inputs["sfa"][..., 0]
    b, sfb = (inputs[name].permute(2, 0, 1).contiguous() for name in ("b", "sfb"))
    ends = inputs["padded_offsets"]
    if any(end % gemm_peers.BLOCK for end in ends.tolist()):
        raise ValueError(f"DeepGEMM: an expert ends at no multiple of {gemm_peers.BLOCK} rows")
    d = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=torch.bfloat16, device=a.device)
    return gemm_peers.deep_grouped_gemm(a, sfa, b, sfb, ends, d, "d")


def ours(api: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Call:
    """The API with a bfloat16 result."""
    outputs = {name: x for name, x in api.allocated(inputs, options).items() if name == "d"}
    tensors = {**inputs, **outputs}
    op = api(**api.samples(tensors), **options)
    op.compile()
    run = functools.partial(op.execute, **{p: tensors.get(name) for name, p in api.parameters.items()})
    return returning(run, outputs)
