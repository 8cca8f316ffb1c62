"""The grouped fused GEMMs on the GPU: values, determinism, CUDA graphs, no host synchronization."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from gpu.common import captured
from support import grouped
from support.oracle import BF16, E4M3, F16, F32, FP4

I32 = torch.int32

REPEATED: list[dict[str, Any]] = [
    {"name": "grouped_gemm_glu", "operand_type": "fp16", "inputs": {"prob": F32, "a_index": I32}, "generate_c": True},
    {
        "name": "grouped_gemm_dglu",
        "operand_type": "nvfp4",
        "ends": (256, 512),
        "n": 96,
        "act_func": "dsituglu",
        "situ_beta1": 1.5,
        "deterministic": True,
        "inputs": {"c": F16, "beta": F32, "prob": F32, "dprob": F32},
    },
    {
        "name": "grouped_gemm_dsrelu",
        "n": 320,
        "deterministic": True,
        "generate_dbias": True,
        "inputs": {"c": BF16, "prob": F32, "dprob": F32},
    },
    {
        "name": "grouped_gemm_quant",
        "operand_type": "mxfp8",
        "ends": (256, 512),
        "n": 160,
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "bias": BF16},
        "discrete_col_sfd": True,
    },
    {"name": "grouped_gemm_quant", "operand_type": "fp8_128", "k": 320, "inputs": {"prob": F32}},
    {
        "name": "grouped_gemm_glu_hadamard_quant",
        "operand_type": "nvfp4",
        "ends": (256, 256, 768),
        "n": 256,
        "d_dtype": FP4,
        "inputs": {"prob": F32, "bias": BF16},
        "rht_colwise_dtype": FP4,
        "norm_const": 3.0,
        "rht_norm_const": 0.5,
    },
]


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: f"{case['name']}-{case.get('operand_type', 'bf16')}")
def test_100_repeats_have_the_same_bits(case: dict[str, Any]) -> None:
    p = grouped.problem(**case, device="cuda")
    grouped.run(p, "gpu")
    grouped.check(p)

    def results() -> dict[str, torch.Tensor]:
        whole, actual = {1: torch.uint8, 2: torch.int16, 4: torch.int32}, dict(p.results)
        if actual.get("sfd_col_tensor") is None:
            actual.pop("d_col_tensor", None)  # memory that nothing is written to
        return {key: x.view(whole[x.itemsize]) for key, x in actual.items() if x is not None}

    first = {key: x.clone() for key, x in results().items()}
    for _ in range(100):
        if "dprob" in p.inputs:
            p.inputs["dprob"].zero_()
        grouped.run(p, "gpu")
        for key, x in results().items():
            assert torch.equal(x, first[key]), key


def test_a_cuda_graph_serves_other_experts_and_weights() -> None:
    """What ends of experts and addresses are counts when a graph is replayed."""
    one, other = (grouped.problem("grouped_gemm", ends=ends, device="cuda") for ends in ((70, 70, 200), (0, 150, 200)))
    for p in (one, other):
        grouped.use_pointers(p)
    d = torch.empty(200, 128, 1, dtype=BF16, device="cuda").as_strided((200, 128, 1), (128, 1, 25600))
    arguments = {**{key: x for key, x in one.inputs.items() if x is not None}, "d": d}
    api = cudnn.GroupedGemm
    made = api(**api.samples(arguments), num_experts=3, b_shape=(128, 128), b_dtype=BF16)
    made.compile()
    named = {parameter: arguments.get(name) for name, parameter in made.parameters.items()}
    made.execute(**named)
    torch.cuda.synchronize()
    graph = captured(lambda: made.execute(**named))
    for p in (one, other):
        for name in ("a", "padded_offsets", "b_ptrs", "alpha"):
            arguments[name].copy_(p.inputs[name])
        d.fill_(0.0)
        graph.replay()
        p.results = {"d_tensor": d, "c_tensor": None}
        grouped.check(p)


def test_no_object_waits_for_the_gpu() -> None:
    a, b = (grouped.operand("mxfp8", rows, 192, 1, "cuda") for rows in (136, 72))
    sfa, sfb = (grouped.by_expert(x.scales, (64, 192), 32) for x in (a, b))
    offsets, out = torch.tensor([64, 192], dtype=I32, device="cuda"), torch.empty(2, 136, 72, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        cudnn.GroupedGemmWgrad(a.tensor[..., 0], b.tensor[..., 0].T, sfa, sfb, offsets, out, sf_vec_size=32).compile()
    finally:
        torch.cuda.set_sync_debug_mode("default")
