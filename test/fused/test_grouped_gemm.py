"""The grouped fused GEMMs against their formulas in float64, in PyTorch and in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn
from cudnn.fused import operator as operator_of
from cudnn.fused import registry
from cudnn.fused.grouped import ExpertsGemm
from cudnn.grouped_gemm.grouped_gemm_glu_hadamard.hadamard_utils import hadamard_matrix
from support import grouped, oracle
from support.oracle import BF16, E4M3, E8M0, F16, F32, FP4
from support.recorded import OnGpu, Recorded

pytest.importorskip("ptx_emulator")

I32 = torch.int32
NAMES = [name for name in registry.packages() if issubclass(registry.find(name), ExpertsGemm)]
ROWS = [name for name in NAMES if name != "grouped_gemm_wgrad"]

CASES: list[dict[str, Any]] = [
    {"name": "grouped_gemm", "m": 220, "inputs": {"prob": F32}, "generate_c": True},
    {
        "name": "grouped_gemm",
        "operand_type": "fp16",
        "inputs": {"prob": BF16, "bias": F16, "alpha": BF16},
        "major": "mn",
    },
    {"name": "grouped_gemm", "operand_type": "fp8", "d_dtype": F16},
    {"name": "grouped_gemm_quant", "m": 220, "inputs": {"prob": F32, "row_scale": F32}},
    {"name": "grouped_gemm_quant", "inputs": {"prob": BF16, "bias": BF16}, "generate_amax": False},
    {"name": "grouped_gemm_quant", "operand_type": "nvfp4", "ends": (256, 512), "inputs": {"prob": F32}},
    {
        "name": "grouped_gemm_quant",
        "operand_type": "mxfp8",
        "ends": (256, 256, 512),
        "n": 160,
        "inputs": {"norm_const": F32},
        "d_dtype": E4M3,
    },
    {
        "name": "grouped_gemm_quant",
        "operand_type": "mxfp8",
        "ends": (256, 512),
        "m": 600,
        "n": 160,
        "inputs": {"norm_const": F32, "bias": BF16},
        "d_dtype": E4M3,
        "discrete_col_sfd": True,
    },
    {"name": "grouped_gemm_glu", "m": 220, "inputs": {"prob": F32}, "generate_c": True},
    {
        "name": "grouped_gemm_glu",
        "n": 192,
        "inputs": {"prob": BF16, "bias": BF16},
        "act_func": "geglu",
        "linear_offset": 0.5,
        "geglu_alpha": 1.2,
        "glu_clamp_max": 5.0,
        "glu_clamp_min": -3.0,
    },
    {
        "name": "grouped_gemm_glu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 192,
        "inputs": {"norm_const": F32},
        "d_dtype": E4M3,
        "discrete_col_sfd": True,
    },
    {"name": "grouped_gemm_glu", "operand_type": "mxfp4", "ends": (256, 256, 512), "inputs": {"bias": F32}},
    {"name": "grouped_gemm_swiglu", "operand_type": "nvfp4", "ends": (256, 512), "inputs": {"prob": F32}},
    {"name": "grouped_gemm_srelu", "inputs": {"prob": F32, "bias": F32}},
    {
        "name": "grouped_gemm_srelu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 160,
        "major": "mn",
        "inputs": {"norm_const": F32, "prob": BF16},
        "d_dtype": E4M3,
    },
    {
        "name": "grouped_gemm_dglu",
        "m": 220,
        "n": 96,
        "generate_dbias": True,
        "inputs": {"c": BF16, "beta": F32, "prob": F32, "dprob": F32, "activation": BF16},
    },
    {
        "name": "grouped_gemm_dglu",
        "operand_type": "fp16",
        "n": 96,
        "inputs": {"c": F16, "activation": F16},
        "act_func": "dgeglu",
    },
    {
        "name": "grouped_gemm_dglu",
        "operand_type": "nvfp4",
        "ends": (256, 512),
        "n": 96,
        "inputs": {"c": F32, "beta": BF16, "prob": F32},
        "act_func": "dgeglu",
        "glu_clamp_max": 4.0,
        "geglu_alpha": 1.2,
    },
    {
        "name": "grouped_gemm_dglu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 64,
        "major": "mn",
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "c": BF16, "beta": BF16, "dprob": F32},
        "discrete_col_sfd": True,
    },
    {
        "name": "discrete_grouped_gemm_swiglu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 192,
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "bias": BF16, "prob": BF16},
        "discrete_col_sfd": True,
        "major": "mn",
    },
    {"name": "discrete_grouped_gemm_swiglu", "operand_type": "nvfp4", "ends": (256, 512), "act_func": "geglu"},
    {"name": "discrete_grouped_gemm_swiglu", "act_func": "geglu", "semantics": "1.23"},
    {
        "name": "discrete_grouped_gemm_dswiglu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 64,
        "major": "mn",
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "c": BF16, "beta": BF16, "dprob": F32, "prob": F32},
        "generate_dbias": True,
    },
    {"name": "discrete_grouped_gemm_dswiglu", "inputs": {"c": BF16, "beta": F32}, "act_func": "dgeglu"},
    {
        "name": "discrete_grouped_gemm_dswiglu",
        "operand_type": "nvfp4",
        "ends": (256, 512),
        "inputs": {"c": BF16, "beta": F32, "dprob": F32},
        "act_func": "dgeglu",
        "semantics": "1.23",
    },
    {
        "name": "grouped_gemm_dswiglu",
        "operand_type": "mxfp4",
        "ends": (256, 256, 512),
        "n": 64,
        "inputs": {"c": F16, "prob": F32, "beta": F32},
    },
    {"name": "grouped_gemm_dsrelu", "m": 220, "inputs": {"c": BF16, "prob": F32, "dprob": F32}, "generate_dbias": True},
    {"name": "grouped_gemm_dsrelu", "m": 220, "inputs": {"c": BF16, "prob": F32}, "semantics": "1.23"},
    {
        "name": "grouped_gemm_dsrelu",
        "operand_type": "nvfp4",
        "ends": (256, 512),
        "d_dtype": F32,
        "inputs": {"c": F32, "prob": F32, "dprob": F32},
    },
    {"name": "grouped_gemm", "m": 220, "inputs": {"a_index": I32}},
    {"name": "grouped_gemm_glu", "operand_type": "fp16", "inputs": {"prob": F32, "a_index": I32}, "generate_c": True},
    {"name": "grouped_gemm_swiglu", "m": 220, "inputs": {"a_index": I32}},
    {
        "name": "grouped_gemm_dglu",
        "m": 220,
        "n": 96,
        "inputs": {"c": BF16, "beta": F32, "dprob": F32, "a_index": I32},
        "generate_dbias": True,
    },
    {"name": "grouped_gemm_dswiglu", "n": 64, "inputs": {"c": F16, "prob": F32, "a_index": I32}},
    {"name": "grouped_gemm_srelu", "inputs": {"prob": F32, "a_index": I32}},
    {"name": "grouped_gemm_dsrelu", "m": 220, "inputs": {"c": BF16, "prob": F32, "dprob": F32, "a_index": I32}},
    {
        "name": "grouped_gemm_dsrelu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 160,
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "c": BF16, "prob": BF16},
        "discrete_col_sfd": True,
        "generate_dbias": True,
    },
    {
        "name": "grouped_gemm_dglu",
        "operand_type": "nvfp4",
        "ends": (256, 512),
        "n": 96,
        "act_func": "dsituglu",
        "situ_beta1": 1.5,
        "situ_beta2": 4.0,
        "inputs": {"c": F16, "beta": F32, "prob": F32, "dprob": F32},
        "deterministic": True,
    },
    {
        "name": "grouped_gemm_dglu",
        "m": 220,
        "n": 96,
        "deterministic": True,
        "inputs": {"c": F16, "beta": F32, "prob": F32, "dprob": F32},
    },
    {
        "name": "grouped_gemm_dsrelu",
        "m": 220,
        "n": 320,
        "inputs": {"c": BF16, "prob": F32, "dprob": F32},
        "deterministic": True,
        "generate_dbias": True,
        "tanh_clamp_scale": 3.0,
    },
    {
        "name": "grouped_gemm_glu",
        "operand_type": "mxfp4",
        "ends": (256, 768),
        "n": 192,
        "inputs": {"prob": BF16, "bias": BF16},
        "act_func": "situglu",
        "situ_beta1": 1.5,
    },
    {"name": "grouped_gemm_glu", "operand_type": "nvfp4", "ends": (256, 512), "act_func": "situglu", "situ_beta2": 3.0},
    {"name": "grouped_gemm_srelu", "inputs": {"prob": F32}, "tanh_clamp_scale": 1.5},
    {
        "name": "grouped_gemm_dglu",
        "m": 220,
        "n": 96,
        "act_func": "dgeglu",
        "inputs": {"c": BF16, "beta": F32, "prob": F32, "activation": BF16},
    },
    {
        "name": "grouped_gemm_dsrelu",
        "operand_type": "mxfp8",
        "ends": (256, 768),
        "n": 160,
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "c": BF16, "prob": BF16},
        "tanh_clamp_scale": 3.0,
    },
    {
        "name": "grouped_gemm_glu_hadamard",
        "operand_type": "nvfp4",
        "ends": (256, 256, 768),
        "n": 192,
        "inputs": {"prob": F32, "bias": BF16},
        "act_func": "situglu",
    },
    {"name": "grouped_gemm_glu_hadamard", "ends": (64, 64, 208), "m": 220, "inputs": {"prob": F32}},
    {"name": "grouped_gemm_glu_hadamard", "ends": (64, 208), "inputs": {"prob": F32}, "act_func": "srelu"},
    {
        "name": "grouped_gemm_glu_hadamard",
        "operand_type": "nvfp4",
        "ends": (256, 256, 512),
        "inputs": {"prob": F32},
        "act_func": "geglu",
        "semantics": "1.23",
    },
    {
        "name": "grouped_gemm_glu_hadamard_quant",
        "operand_type": "nvfp4",
        "ends": (256, 256, 768),
        "n": 256,
        "d_dtype": FP4,
        "inputs": {"prob": F32, "bias": BF16},
        "rht_colwise_dtype": FP4,
        "norm_const": 1e-3,
        "rht_norm_const": 5e-4,
    },
    {
        "name": "grouped_gemm_glu_hadamard_quant",
        "operand_type": "nvfp4",
        "ends": (256, 512),
        "n": 256,
        "act_func": "geglu",
        "inputs": {"prob": F32},
        "rht_rowwise_dtype": FP4,
        "glu_alpha": 1.5,
        "glu_limit": 2.0,
    },
    {"name": "grouped_gemm_glu_hadamard_quant", "ends": (256,), "inputs": {"prob": F32}, "rht_rowwise_dtype": BF16},
    {
        "name": "grouped_gemm_quant",
        "operand_type": "fp8_128",
        "ends": (256, 256, 512),
        "k": 320,
        "inputs": {"prob": F32},
    },
    {"name": "grouped_gemm_glu", "operand_type": "fp8_128", "ends": (130, 300), "n": 192, "inputs": {"bias": BF16}},
    {"name": "grouped_gemm_quant", "operand_type": "fp8_128", "ends": (256, 512), "shared": 1, "inputs": {"prob": F32}},
    {"name": "grouped_gemm_dsrelu", "operand_type": "fp8_128", "ends": (256,), "inputs": {"c": BF16, "prob": F32}},
    {
        "name": "grouped_gemm_glu",
        "m": 220,
        "n": 320,
        "inputs": {"prob": F32, "bias": BF16},
        "generate_c": True,
        "glu_layout": "concatenated",
    },
    {
        "name": "grouped_gemm_glu",
        "operand_type": "fp8_128",
        "ends": (130, 300),
        "m": 320,
        "n": 512,
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "bias": BF16},
    },
    {"name": "grouped_gemm_glu", "n": 256, "d_dtype": E4M3, "sf_vec_size": 128, "inputs": {"norm_const": F32}},
    {
        "name": "grouped_gemm_dglu",
        "m": 220,
        "n": 96,
        "generate_dbias": True,
        "glu_layout": "concatenated",
        "inputs": {"c": F16, "prob": F32, "dprob": F32, "activation": BF16},
    },
    {"name": "grouped_gemm_glu", "operand_type": "fp8_128", "m": 220, "n": 192, "k": 320, "inputs": {"a_index": I32}},
    {
        "name": "grouped_gemm_glu",
        "operand_type": "fp8_128",
        "ends": (130, 300),
        "m": 320,
        "n": 512,
        "d_dtype": E4M3,
        "inputs": {"norm_const": F32, "bias": BF16, "a_index": I32},
    },
]
"""Problems by the arguments of ``grouped.problem``."""


def label(case: dict[str, Any]) -> str:
    return "-".join(
        [case["name"].removeprefix("grouped_gemm_"), case.get("operand_type", "bf16"), *case.get("inputs", ())]
    )


@pytest.mark.parametrize("where", ["reference", pytest.param("sm_90a", marks=pytest.mark.full)])
def test_a_gradient_rounded_to_the_type_of_operands(where: str) -> None:
    """Of whole numbers, whose sums are exact: nothing but this rounding tells the results apart."""
    inputs = {"c": BF16, "dprob": F32}
    p = grouped.problem("grouped_gemm_dglu", n=96, inputs=inputs, round_dgrad_to_input_dtype=True)
    for name in ("a", "b"):
        p.inputs[name].copy_(torch.randint(-8, 9, p.inputs[name].shape))
    p.inputs["alpha"].fill_(1.0)
    a, b = p.inputs["a"].double(), p.inputs["b"].double()
    for expert, (start, end) in enumerate(zip((0, *p.ends[:-1]), p.ends, strict=True)):
        p.product[start:end] = a[start:end, :, 0] @ b[:, :, expert].T
    assert not torch.equal(p.product, p.product.bfloat16().double())
    grouped.run(p, where)
    grouped.check(p)
    p.options["round_dgrad_to_input_dtype"] = False
    with pytest.raises(AssertionError):
        grouped.check(p)


@pytest.mark.parametrize("where", ["reference", "sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "case",
    [
        {
            "name": "grouped_gemm_glu",
            "n": 192,
            "glu_layout": "concatenated",
            "generate_c": True,
            "inputs": {"bias": BF16},
        },
        {"name": "grouped_gemm", "b_halves": True, "major": "mn", "inputs": {"prob": F32}},
    ],
    ids=["halves of n", "halves of k"],
)
def test_weights_whose_halves_lie_apart(case: dict[str, Any], where: str) -> None:
    """As gate and up weights do: forward they are halves of B's rows, in the gradient of x of k."""
    p = grouped.problem(**case)
    grouped.use_pointers(p)
    grouped.run(p, where)
    grouped.check(p)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_reference(case: dict[str, Any]) -> None:
    p = grouped.problem(**case)
    grouped.run(p, "reference")
    grouped.check(p)


BRIEFLY = [(0, "sm_90a"), (1, "sm_100a"), (8, "sm_90a"), (len(CASES) - 20, "sm_90a"), (len(CASES) - 2, "sm_90a")]
"""Numbers of cases that run without ``--full``, and where: those of any rows, which take the least time."""
KERNELS = [
    pytest.param(case, arch, marks=[] if (i, arch) in BRIEFLY else pytest.mark.full, id=f"{label(case)}-{arch}")
    for i, case in enumerate(CASES)
    for arch in ("sm_90a", "sm_100a")
    if (arch, case.get("operand_type"), case.get("d_dtype")) != ("sm_100a", "fp8_128", E4M3)  # refused
] + [pytest.param(case, "gpu", marks=pytest.mark.gpu, id=f"{label(case)}-gpu") for case in CASES]


@pytest.mark.parametrize(("case", "where"), KERNELS)
def test_the_kernels(case: dict[str, Any], where: str) -> None:
    p = grouped.problem(**case, device="cuda" if where == "gpu" else "cpu")
    grouped.run(p, where)
    grouped.check(p)


def test_experts_first_and_rows_without_a_last_dimension() -> None:
    """The layouts of PyTorch's own tensors: results come in the same."""
    p = grouped.problem("grouped_gemm_quant", "mxfp8", (256, 512), inputs={"norm_const": F32}, d_dtype=E4M3)
    grouped.run(p, "reference")
    expected = p.results
    p.inputs["a"], p.inputs["b"] = p.inputs["a"][..., 0], p.inputs["b"].permute(2, 0, 1)
    for name in ("sfa", "sfb"):
        p.inputs[name] = p.inputs[name].permute(5, 2, 4, 0, 1, 3)
    grouped.run(p, "reference")
    assert p.results["d_tensor"].shape == (512, 128)
    assert torch.equal(p.results["d_tensor"].view(torch.uint8), expected["d_tensor"][..., 0].view(torch.uint8))
    assert p.results["sfd_row_tensor"].is_contiguous()
    assert p.results["sfd_row_tensor"].shape == (1, 4, 1, 32, 4, 4)
    assert torch.equal(
        p.results["sfd_col_tensor"].view(torch.uint8),
        expected["sfd_col_tensor"].permute(5, 2, 4, 0, 1, 3).view(torch.uint8),
    )


@pytest.mark.parametrize("name", ["grouped_gemm_srelu", "grouped_gemm_glu"])
def test_flat_scale_factors_and_bytes_of_one_element(name: str) -> None:
    """What calls of other libraries have: flat buffers of scale factors, and four-bit elements whose bytes count as
    one.
    """
    p = grouped.problem(name, "mxfp4", (256, 512), n=192, k=256, inputs={"prob": F32})
    for key in ("sfa", "sfb"):
        p.inputs[key] = p.inputs[key].permute(5, 2, 4, 0, 1, 3).reshape(-1)
    grouped.run(p, "reference")
    grouped.check(p)
    with pytest.raises(ValueError, match=r"sfa tensor: got 4095 elements .*; allowed: 4096, contiguous"):
        cudnn.grouped_gemm_quant_wrapper(p.inputs["a"], p.inputs["sfa"][1:], *[None] * 2, p.inputs["b"], sf_vec_size=32)
    p = grouped.problem(name, "mxfp4", (256, 512), n=192, k=256, inputs={"prob": F32})
    for key in ("a", "b"):
        p.inputs[key] = grouped.unpacked_fp4(p.inputs[key])
    grouped.run(p, "reference")
    grouped.check(p)


def test_a_class_takes_flat_scale_factors_in_any_call() -> None:
    """Whether its samples had them or not."""
    p = grouped.problem("grouped_gemm_quant", "nvfp4", (256,))
    flat = {key: p.inputs[key].permute(5, 2, 4, 0, 1, 3).reshape(-1) for key in ("sfa", "sfb")}
    actual = []
    for samples in (p.inputs, p.inputs | flat):
        d = torch.empty(256, 128, 1)
        operation = cudnn.GroupedGemmQuant(**registry.find(p.name).samples(samples | {"d": d}))
        operation.compile()
        for arguments in (p.inputs, p.inputs | flat):
            operation.execute(
                **{operation.parameters[key]: x for key, x in arguments.items()}, d_tensor=d.fill_(torch.nan)
            )
            actual.append(d.clone())
    assert all(torch.equal(actual[0], other) for other in actual)
    assert bool(actual[0].isfinite().all())


def test_types_of_the_cute_dsl() -> None:
    """As PyTorch's."""
    cutlass = pytest.importorskip("cutlass")
    p = grouped.problem("grouped_gemm_glu", generate_c=True, c_dtype=cutlass.Float16, d_dtype=cutlass.BFloat16)
    p.options["acc_dtype"] = cutlass.Float32
    grouped.run(p, "reference")
    grouped.check(p)
    assert (p.results["c_tensor"].dtype, p.results["d_tensor"].dtype) == (F16, BF16)
    p = grouped.problem("discrete_grouped_gemm_swiglu", "nvfp4", (256,))
    p.options["b_dtype"] = cutlass.Float4E2M1FN
    grouped.run(p, "reference")
    grouped.check(p)


def test_rows_of_no_expert_are_not_touched() -> None:
    p = grouped.problem("grouped_gemm", ends=(30, 60), m=100)
    p.inputs["d"] = torch.full((100, 128, 1), 7.0).bfloat16()
    grouped.run(p, "reference")
    assert p.results["d_tensor"] is p.inputs["d"]
    assert bool((p.results["d_tensor"][60:] == 7).all())
    grouped.check(p)


def whole(name: str, *units: int) -> tuple[int, ...]:
    """Ends of experts that an API takes."""
    step = max(registry.find(name).group_rows, 16)
    return tuple(step * unit for unit in units)


@pytest.mark.parametrize("name", ROWS)
def test_one_object_serves_all_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another number of tokens compiles nothing, nor do other n and k unless an environment variable requests it; no
    tokens make no object.
    """
    api, compiled = registry.find(name), []
    compile_ = api.compile
    monkeypatch.setattr(api, "compile", lambda self: compiled.append(self) or compile_(self))
    api.objects.clear()
    d = registry.find(name).result[0]
    more = {"prob": F32, "c": BF16} if d == "d_row" else {"prob": F32}
    for units, size in (((0, 0), 128), ((1, 4), 128), ((0, 19), 128), ((4, 4), 256), ((0, 0), 128)):
        p = grouped.problem(name, ends=(ends := whole(name, *units)), n=size, inputs=more)
        grouped.run(p, "reference")
        assert p.results[f"{d}_tensor"].shape[0] == ends[-1]
    objects = 2 if name.startswith("discrete") else 1  # their n and k are arguments
    assert (len(compiled), len(api.objects)) == (objects, objects)
    monkeypatch.setenv("CUDNN_FE_GROUPED_GEMM_DYNAMIC_MNKL", "0")
    for size in (128, 256):
        grouped.run(grouped.problem(name, n=size, inputs=more, ends=whole(name, 4, 4)), "reference")
    objects += 0 if name.startswith("discrete") else 2
    assert (len(compiled), len(api.objects)) == (objects, objects)


@pytest.mark.parametrize("name", ROWS)
def test_operators_are_traced(name: str) -> None:
    """Their fake results are like the real ones."""
    more = {"prob": F32, "c": BF16, "beta": F32} if registry.find(name).result[0] == "d_row" else {"prob": F32}
    p = grouped.problem(name, ends=whole(name, 4, 4, 13), inputs=more)
    operator, known = getattr(cudnn.ops, name), {*p.inputs, *p.options}
    signature = operator_of.signature_of(registry.find(name), registry.wrapper(name))[0].parameters
    arguments = {key: p.inputs.get(key, p.options.get(key)) for key in signature if key in known}
    real = operator(**dict.fromkeys(key for key, q in signature.items() if q.default is q.empty) | arguments)
    with FakeTensorMode() as mode:
        arguments = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
        fake = operator(**dict.fromkeys(key for key, q in signature.items() if q.default is q.empty) | arguments)
    likeness = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (real, fake)]
    assert likeness[0] == likeness[1]


# Pointer arrays of weights.

ADDRESSED: list[dict[str, Any]] = [
    {"name": "grouped_gemm", "inputs": {"prob": F32}, "major": "mn"},
    {"name": "grouped_gemm_quant", "operand_type": "nvfp4", "ends": (256, 512), "inputs": {"prob": F32}},
    {"name": "grouped_gemm_quant", "operand_type": "mxfp8", "ends": (256,)},
    {
        "name": "grouped_gemm_glu",
        "operand_type": "mxfp8",
        "ends": (256, 256, 512),
        "major": "mn",
        "inputs": {"norm_const": F32},
        "d_dtype": E4M3,
    },
    {"name": "grouped_gemm_srelu", "inputs": {"prob": F32}},
    {"name": "grouped_gemm_quant", "operand_type": "fp8_128", "ends": (256, 256, 512), "n": 192, "k": 320},
    {
        "name": "discrete_grouped_gemm_swiglu",
        "operand_type": "fp8_128",
        "ends": (256, 512),
        "n": 192,
        "k": 320,
        "major": "mn",
    },
]
WHERE = [
    "reference",
    *(pytest.param(arch, marks=pytest.mark.full) for arch in ("sm_90a", "sm_100a")),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("case", ADDRESSED, ids=label)
@pytest.mark.parametrize("where", WHERE)
def test_weights_behind_addresses(where: str, case: dict[str, Any]) -> None:
    """Of the same values as in a tensor; another call has other addresses."""
    p = grouped.problem(**case, device="cuda" if where == "gpu" else "cpu")
    if "b" in p.inputs:
        grouped.use_pointers(p)
    grouped.run(p, where)
    grouped.check(p)


def test_sizes_of_a_call_with_addresses_only() -> None:
    """A workspace is allocated by them."""
    p = grouped.problem("discrete_grouped_gemm_swiglu", "nvfp4", (256, 512))
    registry.find(p.name).objects.clear()
    grouped.run(p, "reference")
    (object_,) = registry.find(p.name).objects.values()
    sizes = object_.sizes_now([p.inputs.get(name) for name in object_.names])
    assert {name: sizes[name] for name in ("m", "n", "k", "experts")} == {"m": 512, "n": 128, "k": 128, "experts": 2}


def test_what_functions_say_of_themselves() -> None:
    """Programs ask the functions what they support, and how large a workspace is that our kernels do not use."""
    assert cudnn.grouped_gemm_quant_wrapper_sm100.supports_optional_amax
    assert cudnn.grouped_gemm_glu_wrapper_sm100.supports_external_scheduler_counter
    assert not hasattr(cudnn.grouped_gemm_srelu_wrapper_sm100, "supports_canonical_layouts")
    size = cudnn.get_grouped_gemm_wgrad_workspace_size_sm100
    assert (size(3), size(2, output_mode="discrete", input_order="tensor_ragged"), size(0)) == (1536, 1280, 1)
    with pytest.raises(ValueError, match="num_experts: got -1; allowed: 0 or more"):
        size(-1)


# Versions.


def test_older_positional_order() -> None:
    """acc_dtype came where row_scale is now."""
    p = grouped.problem("grouped_gemm_quant", inputs={"prob": F32})
    before = [p.inputs[key] for key in ("a", "sfa", "padded_offsets", "alpha", "b", "sfb")]
    before += [None, None, None, None, None, "k", None, p.inputs["prob"]]
    old = cudnn.grouped_gemm_quant_wrapper(*before, torch.float32, torch.float32)
    new = cudnn.grouped_gemm_quant_wrapper(*before, None, torch.float32, torch.float32)
    assert old["d_tensor"].dtype == new["d_tensor"].dtype == torch.float32
    assert torch.equal(old["d_tensor"], new["d_tensor"])
    with pytest.raises(TypeError, match=r"positional arguments: got .*; allowed: a_tensor, sfa_tensor, padded_offsets"):
        cudnn.grouped_gemm_quant_wrapper(*before, "row", "scale")


def test_older_semantics(monkeypatch: pytest.MonkeyPatch) -> None:
    """prob could not be left out."""
    p = grouped.problem("grouped_gemm_quant")
    grouped.run(p, "reference")
    grouped.check(p)
    monkeypatch.setenv("CUDNN_FRONTEND_SEMANTICS", "1.23")
    with pytest.raises(ValueError, match="prob_tensor is required"):
        grouped.run(p, "reference")
    p.options["semantics"] = "1.32"
    grouped.run(p, "reference")
    p.options["semantics"] = "2.0"
    with pytest.raises(ValueError, match=r"semantics: got '2.0'; allowed: '1\.23' or '1\.32'"):
        grouped.run(p, "reference")


def test_both_orders_of_the_hadamard_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positional arguments of both versions, told by where the experts' ends are; the meaning is a version's."""
    p = grouped.problem("grouped_gemm_glu_hadamard", "nvfp4", (256, 512), inputs={"prob": F32})
    g = p.inputs
    newer = [g[key] for key in ("a", "sfa", "padded_offsets", "alpha", "prob", "b", "sfb")]
    older = [g[key] for key in ("a", "b", "sfa", "sfb", "padded_offsets", "alpha", "prob")]
    p.results = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(*newer)
    grouped.check(p)
    again = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(*older)
    assert all(torch.equal(x, y) for x, y in zip(p.results, again, strict=True))
    c, d = (torch.empty_like(p.results[name]) for name in ("c_tensor", "d_tensor"))
    arguments = [g["a"], g["b"], c, d, *older[2:]]
    cudnn.GroupedGemmGluHadamardSm100(*arguments)(*arguments)
    assert torch.equal(d, p.results["d_tensor"])
    monkeypatch.setenv("CUDNN_FRONTEND_SEMANTICS", "1.23")
    p.results = cudnn.grouped_gemm_glu_hadamard_wrapper_sm100(*older)
    p.options["semantics"] = "1.23"
    grouped.check(p)


def test_largest_magnitudes_without_samples() -> None:
    """An object computes them with or without samples; a call may leave them out."""
    p = grouped.problem("grouped_gemm_glu_hadamard", ends=(64, 208), inputs={"prob": F32})
    grouped.run(p, "reference")
    names = ("a", "sfa", "padded_offsets", "alpha", "prob", "b")
    results = {"c": torch.empty(208, 128, 1).bfloat16(), "d": torch.empty(208, 64, 1).bfloat16()}
    operation = cudnn.GroupedGemmGluHadamard(
        **{f"sample_{name}": x for name, x in (p.inputs | results).items() if name in (*names, *results)}
    )
    operation.compile()
    arguments = {
        operation.parameters[name]: x for name, x in (p.inputs | results).items() if name in (*names, *results)
    }
    operation.execute(**arguments)
    actual = {f"{name}_tensor": torch.zeros(2, 1) for name in ("amax", "post_rht_amax")}
    operation.execute(**arguments, **actual)
    assert torch.equal(results["d"], p.results["d_tensor"])
    assert all(torch.equal(x, p.results[name]) for name, x in actual.items())


@pytest.mark.parametrize(("operand_type", "flat"), [("bf16", False), ("mxfp8", False), ("mxfp8", True)])
def test_a_warm_call_looks_at_every_shape(operand_type: str, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at those of scale factors, which stand for many sizes, so that the kernel cannot relate them."""
    api, shape, kernels = cudnn.GroupedGemmQuant, (512, 128, 128, 2), Recorded(monkeypatch)
    arguments, sizes = (
        api.empty_tensors(shape, operand_type, "cpu"),
        api.example_sizes({"m": 512, "n": 128, "k": 128, "experts": 2}),
    )
    for name, dtype in (("d", E4M3), ("d_col", E4M3), ("sfd_row", E8M0), ("sfd_col", E8M0), ("norm_const", F32)):
        arguments[name] = api.spec(name).layout.allocate(sizes | {"vector": 32}, "n", dtype, "cpu")
    if flat:
        arguments |= {name: arguments[name].new_empty(arguments[name].numel()) for name in ("sfa", "sfb")}
    operation: Any = api(**api.samples(arguments), sf_vec_size=32, arch="sm_90a")
    operation.compile()

    def execute(tensors: dict[str, Any]) -> None:
        operation.execute(**{p: OnGpu(tensors[x]) if x in tensors else None for x, p in api.parameters.items()})

    execute(arguments)
    for name, x in arguments.items():
        with pytest.raises(ValueError, match=r"mismatch|allowed"):
            execute(arguments | {name: x.new_empty((*x.shape[:-1], x.shape[-1] + 1))})
    execute(arguments)
    assert len(kernels.calls) == 2
    kernels.refusing = True
    with pytest.raises(ValueError, match="Mismatched Tensor on argument #0"):
        execute(arguments)


def test_the_hadamard_matrix_is_built_in() -> None:
    """The same one may be given; another one only where it is not looked at."""
    p = grouped.problem("grouped_gemm_glu_hadamard", ends=(64,), inputs={"prob": F32})
    names = ("a", "padded_offsets", "alpha", "prob", "b")
    samples = {f"sample_{name}": p.inputs[name] for name in names} | {"sample_sfa": None}
    samples |= {"sample_c": torch.empty(64, 128, 1).bfloat16(), "sample_d": torch.empty(64, 64, 1).bfloat16()}
    matrix = hadamard_matrix(16, BF16)
    assert torch.equal(matrix.float(), oracle.signs_of(16))
    for other, options in ((matrix, {"use_tmem_post_rht_amax": True}), (-matrix, {}), (matrix, {"semantics": "1.23"})):
        assert cudnn.GroupedGemmGluHadamard(**samples, sample_hadamard=other, **options).check_support()
    for options in ({"use_tmem_post_rht_amax": True}, {"semantics": "1.23"}):
        operation = cudnn.GroupedGemmGluHadamard(**samples, sample_hadamard=-matrix, **options)
        with pytest.raises(NotImplementedError, match="hadamard tensor: got another matrix"):
            operation.check_support()
    one, other = (cudnn.GroupedGemmGluHadamard(**samples) for _ in range(2))
    one.compile()
    other.compile()
    assert one._amax_scratch is other._amax_scratch  # never freed, since any stream may still write there


def test_one_expert_with_all_rows() -> None:
    """Offsets are not read: they may hold anything."""
    p = grouped.problem("grouped_gemm_quant", "mxfp4", (256,), use_single_group_runtime_offsets=True)
    p.inputs["padded_offsets"].fill_(-5)
    grouped.run(p, "reference")
    grouped.check(p)
