"""What the grouped fused GEMMs refuse: arguments, and values of offsets and addresses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import cudnn
from cudnn.fused import registry
from cudnn.runtime.call import Call, CheckedTensors
from support import grouped
from support.oracle import BF16, E4M3, F16, F32, FP4

pytest.importorskip("ptx_emulator")

I32 = torch.int32

WRONG_ADDRESSES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"b_ptrs": torch.zeros(3, dtype=torch.int32)}, ValueError, "b_ptrs must be int64: got torch.int32"),
    ({"b_ptrs": torch.zeros(2, dtype=torch.int64)}, ValueError, "b_ptrs length mismatch: got 2; allowed: expected 3"),
    ({"b_ptrs": torch.zeros(3, 1, dtype=torch.int64)}, ValueError, "b_ptrs must be 1-D"),
    ({"b_ptrs": torch.zeros(6, dtype=torch.int64)[::2]}, ValueError, "b_ptrs must be contiguous"),
    ({"b_ptrs": None}, ValueError, "b_tensor and b_ptrs: got neither; allowed: one of them"),
    ({"b": torch.zeros(128, 128, 3).bfloat16()}, ValueError, "b_tensor and b_ptrs: got both; allowed: one of them"),
    ({"n": None}, ValueError, "n and b_dtype: got None and torch.bfloat16; allowed: both, with b_ptrs"),
    ({"b_dtype": F16}, ValueError, "b_dtype: got torch.float16; allowed: bfloat16, the type of a"),
]


def test_halves_that_are_refused() -> None:
    """Two addresses for each expert, of halves of n or of k."""
    p = grouped.problem("grouped_gemm", b_halves=True)
    with pytest.raises(ValueError, match="b_halves: got True; allowed: False, where b is a tensor"):
        grouped.run(p, "reference")
    grouped.use_pointers(p)
    for changed, words in (
        ({"b_ptrs": p.inputs["b_ptrs"][:3]}, "b_ptrs length mismatch: got 3; allowed: expected 6"),
        ({"a": p.inputs["a"][:, :64]}, "k, with b_halves: got 64; allowed: multiples of 128"),
    ):
        inputs, p.inputs = p.inputs, {**p.inputs, **changed}
        with pytest.raises(ValueError, match=words):
            grouped.run(p, "reference")
        p.inputs = inputs
    p = grouped.problem("grouped_gemm_glu", n=192, glu_layout="concatenated", major="mn")
    grouped.use_pointers(p)
    with pytest.raises(
        NotImplementedError, match=r"b tensor major.*: got n; allowed: k, for glu_layout='concatenated'"
    ):
        grouped.run(p, "sm_90a")


@pytest.mark.parametrize(("changed", "error", "words"), WRONG_ADDRESSES)
def test_wrong_addresses(changed: dict[str, Any], error: Any, words: str) -> None:
    p = grouped.problem("grouped_gemm_quant")
    grouped.use_pointers(p)
    p.options |= {key: value for key, value in changed.items() if key in p.options}
    p.inputs |= {key: value for key, value in changed.items() if key not in p.options}
    with pytest.raises(error, match=words):
        grouped.run(p, "reference")


SUMS: list[tuple[dict[str, Any], dict[str, Any], str, type[Exception], str]] = [
    # changes of samples, and of options, where; the error, its words
    ({"d": BF16}, {}, "sm_90a", ValueError, "d tensor dtype: got bfloat16; allowed: float8_e4m3fn or float8_e5m2, for"),
    ({}, {"sf_vec_size": 32}, "sm_90a", ValueError, "sf_vec_size: got 32; allowed: 128, for s"),
    ({"d_col": E4M3}, {}, "sm_90a", ValueError, "d_col tensor: got a tensor; allowed: None, for sfd_row of float32"),
    ({}, {}, "sm_100a", NotImplementedError, "sfa and sfd_row tensors, on sm_100a: got float32 for both; allowed: f"),
    ({"sfa": None, "sfb": None}, {}, "sm_90a", NotImplementedError, "for sfd_row of float32, on sm_90a: got float8_e4"),
]


@pytest.mark.parametrize(("changed", "options", "arch", "error", "words"), SUMS)
def test_float32_factors_of_a_result_that_are_refused(
    changed: dict[str, Any], options: dict[str, Any], arch: str, error: type[Exception], words: str
) -> None:
    api = cudnn.GroupedGemmGlu
    arguments = api.empty_tensors((256, 256, 128, 2), "fp8_128", "meta")
    sizes = api.example_sizes({"m": 256, "n": 256, "k": 128, "experts": 2}) | {"vector": 128}
    for name, dtype in ({"d": E4M3, "sfd_row": F32} | changed).items():
        arguments[name] = dtype and api.spec(name).layout.allocate(sizes, "n", dtype, "meta")
    with pytest.raises(error, match=words):
        api(**api.samples(arguments), **{"sf_vec_size": 128} | options, arch=arch).check_support()


VALUES = [
    (
        "grouped_gemm",
        {"padded_offsets": torch.tensor([64, 60, 208], dtype=I32)},
        "offsets: got .64, 60, 208.; allowed: numbers that do not decrease, from 0 to 208",
    ),
    ("grouped_gemm", {"padded_offsets": torch.tensor([64, 64, 224], dtype=I32)}, "offsets: got .64, 64, 224."),
    (
        "grouped_gemm_glu_hadamard",
        {"padded_offsets": torch.tensor([64, 72, 208], dtype=I32)},
        "offsets: got .*, multiples of 16",
    ),
    ("discrete_grouped_gemm_swiglu", {"b_ptrs": torch.tensor([16, 0, 32])}, "b_ptrs: got 0x0; allowed: addresses, mul"),
]
"""Values that a call may not have; with words of the error."""


@pytest.mark.parametrize(("name", "changed", "words"), VALUES)
def test_values_that_no_kernel_takes(name: str, changed: dict[str, Any], words: str) -> None:
    """In the host's memory they are always looked at."""
    p = grouped.problem(name, ends=(64, 64, 208), inputs={"prob": F32})
    grouped.run(p, "reference")
    p.inputs |= changed
    with pytest.raises(ValueError, match=words):
        grouped.run(p, "reference")


def test_values_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the kernel starts, which is not there."""
    monkeypatch.setattr("cudnn.runtime.launch.compile_for_emulation", lambda *arguments: None)
    monkeypatch.setattr(registry.find("grouped_gemm_quant"), "objects", {})
    p = grouped.problem("grouped_gemm_quant", "nvfp4", (256, 512), inputs={"prob": F32})
    p.inputs["padded_offsets"][0] = 128
    with pytest.raises(ValueError, match=r"offsets: got \[128, 512\]; allowed: .* from 0 to 512, multiples of 256"):
        grouped.run(p, "sm_90a")


@pytest.mark.parametrize("setting", ["0", "1"])
def test_values_on_the_device(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are checked on request, before the kernel starts, for scale factors of any dimensions."""
    ran: list[Any] = []

    def checked(call: Call, *_: Any) -> CheckedTensors:
        if not call.canonicalizers:
            raise ValueError("factors are flat")
        return CheckedTensors(lambda *_: False, 0, 132, 0)

    monkeypatch.setenv("CUDNN_FE_GROUPED_GEMM_VALIDATE_DEVICE_VALUES", setting)
    monkeypatch.setattr("cudnn.runtime.launch.kernel", lambda *_: lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(Call, "_check", checked)
    p = grouped.problem("grouped_gemm_quant", "mxfp8", ends=(256, 512), n=64, k=64)
    api: Any = cudnn.GroupedGemmQuant
    arguments = {name: p.inputs.get(name) for name in api.names} | {"d": torch.empty(512, 64, 1).bfloat16()}
    operation = api(**api.samples(arguments), sf_vec_size=32, arch="sm_90a")
    operation.compile()
    arguments |= {key: arguments[key].permute(5, 2, 4, 0, 1, 3).reshape(-1) for key in ("sfa", "sfb")}
    for ends in ([256, 512], [256, 250], [256, 250]):
        arguments["padded_offsets"].copy_(torch.tensor(ends))
        wrong = setting == "1" and ends[1] == 250
        with pytest.raises(ValueError, match=r"offsets: got .256, 250") if wrong else contextlib.nullcontext():
            operation.run(tuple(arguments.values()), (None,) * len(operation.scalars), 0, None)
    assert len(ran) == (3 if setting == "0" else 1)


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    # the API, the problem, changes of its inputs; the error, its words
    ("grouped_gemm", {}, {"b": None}, ValueError, "b_tensor and b_ptrs: got neither; allowed: one of them"),
    ("grouped_gemm", {"operand_type": "mxfp8"}, {}, TypeError, "sf"),
    ("grouped_gemm_quant", {"m_aligned": 128}, {}, ValueError, "m_aligned: got 128; allowed: 256"),
    (
        "grouped_gemm_quant",
        {"d_dtype": F32},
        {"d": torch.zeros(200, 128, 1)[..., 0]},
        ValueError,
        "d_tensor: got torch.float32 with 2 dimensions; allowed: torch.float32 with 3, as a",
    ),
    ("grouped_gemm", {}, {"d": torch.zeros(200, 128, 1)}, ValueError, "pass d_dtype=torch.float32"),
    ("grouped_gemm_quant", {"b_dtype": BF16}, {}, ValueError, "b_dtype: got torch.bfloat16; allowed: None, where b is"),
    ("grouped_gemm_quant", {"cd_major": "m"}, {}, ValueError, "cd_major: got 'm'; allowed: 'n'"),
    ("grouped_gemm_quant", {"sf_fp8_dtype_override": "e5m3"}, {}, ValueError, "sf_fp8_dtype_override: got 'e5m3'"),
    ("grouped_gemm_quant", {"mma_tiler_mn": (256, 128)}, {}, ValueError, "mma_tiler_mn: got .256, 128.; allowed: 256"),
    ("grouped_gemm_quant", {"cluster_shape_mn": (1, 1)}, {}, ValueError, "an even number of rows, for a tile of 256"),
    ("grouped_gemm_quant", {"cluster_shape_mn": (4, 1), "mma_tiler_mn": (128, 256)}, {}, ValueError, "128 or 256 rows"),
    (
        "grouped_gemm_quant",
        {"operand_type": "mxfp8", "d_dtype": E4M3},
        {},
        ValueError,
        "norm_const_tensor is required when FP8 inputs are used",
    ),
    ("grouped_gemm_quant", {"use_single_group_runtime_offsets": True}, {}, ValueError, "got 3 experts, without scale"),
    ("grouped_gemm_quant", {}, {"padded_offsets": torch.zeros(2).int()}, ValueError, "padded_offsets tensor shape"),
    ("grouped_gemm_quant", {}, {"padded_offsets": torch.zeros(3)}, ValueError, "padded_offsets tensor dtype"),
    ("grouped_gemm_quant", {}, {"bias": torch.zeros(3, 128)}, ValueError, "bias tensor shape mismatch"),
    ("grouped_gemm_glu", {"n": 96}, {}, ValueError, "n: got 96; allowed: multiples of 64"),
    ("grouped_gemm_glu", {"act_func": "relu"}, {}, ValueError, "act_func: got 'relu'"),
    ("grouped_gemm_glu", {"act_func": "situglu", "situ_beta1": 0.0}, {}, ValueError, "situ_beta1: got 0.0"),
    (
        "grouped_gemm_glu",
        {"act_func": "situglu"},
        {},
        ValueError,
        "act_func: got 'situglu'; allowed: 'swiglu' or 'geglu', without scale factors",
    ),
    (
        "grouped_gemm_dglu",
        {"act_func": "dsituglu"},
        {"prob": torch.rand(200)},
        ValueError,
        "act_func: got 'dsituglu'; allowed: 'dswiglu' or 'dgeglu', without scale factors",
    ),
    ("grouped_gemm_srelu", {"tanh_clamp_scale": -1.0}, {"prob": torch.rand(200)}, ValueError, "tanh_clamp_scale: got"),
    ("discrete_grouped_gemm_swiglu", {"act_func": "situglu"}, {}, ValueError, "act_func: got 'situglu'"),
    ("grouped_gemm_srelu", {}, {}, ValueError, "prob_tensor is required"),
    (
        "grouped_gemm_glu_hadamard_quant",
        {"rht_colwise_dtype": FP4, "rht_rowwise_dtype": BF16},
        {"prob": torch.rand(200)},
        NotImplementedError,
        "float4_e2m1fn_x2, with one of rows; allowed: float4_e2m1fn_x2",
    ),
    (
        "grouped_gemm_glu_hadamard_quant",
        {"d_dtype": FP4},
        {"prob": torch.rand(200)},
        ValueError,
        "d tensor of four bits: got 64 columns of swiglu; allowed: multiples of 128",
    ),
    (
        "grouped_gemm_glu_hadamard_quant",
        {"mma_tiler_mn": (128, 256)},
        {"prob": torch.rand(200)},
        ValueError,
        "mma_tiler_mn: got .128, 256.; allowed: 256 rows",
    ),
    ("grouped_gemm_glu_hadamard_quant", {"glu_limit": -1.0}, {"prob": torch.rand(200)}, ValueError, "glu_limit: got"),
]


@pytest.mark.parametrize(("name", "arguments", "changed", "error", "words"), REFUSED)
def test_what_is_refused(name: str, arguments: dict[str, Any], changed: dict[str, Any], error: Any, words: str) -> None:
    p = grouped.problem(name, **arguments)
    p.inputs |= changed
    with pytest.raises(error, match=words):
        grouped.run(p, "reference")


def test_too_many_experts() -> None:
    a, b = torch.zeros(8, 16).bfloat16(), torch.zeros(1025, 8, 16).bfloat16()
    with pytest.raises(ValueError, match="experts=1025; allowed: at least 1, at most 1024 experts"):
        cudnn.grouped_gemm_wrapper(a, torch.zeros(1025, dtype=torch.int32), torch.ones(1025), b)
