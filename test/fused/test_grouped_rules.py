"""Rules of fused GEMMs that a call can break although its object's samples did not, and what a call may leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.fused import registry
from cudnn.runtime.call import Call
from support import grouped
from support.api_cases import case
from support.oracle import BF16, E4M3, F32

I32 = torch.int32
BACKWARD = {"c": BF16, "beta": F32, "prob": F32, "dprob": F32}

# A wrapper's object serves all m, n and k.

SIZES = [
    ("grouped_gemm_glu", {}, {"n": 96}, "n: got 96; allowed: multiples of 64"),
    ("grouped_gemm_dglu", BACKWARD, {"n": 48}, "n: got 48; allowed: multiples of 32"),
    ("grouped_gemm_glu_hadamard", {"prob": F32}, {"n": 160}, "n: got 160; allowed: multiples of"),
    ("grouped_gemm_glu_hadamard_quant", {"prob": F32}, {"n": 96}, "n: got 96; allowed: multiples"),
]


@pytest.mark.parametrize(("name", "inputs", "other", "words"), SIZES)
def test_sizes_of_a_later_call(name: str, inputs: Any, other: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked at again: on the device too, where a shape that the kernel cannot relate is another."""
    monkeypatch.setattr(registry.find(name), "objects", {})
    kind = "nvfp4" if name.endswith("quant") else "bf16"
    grouped.run(grouped.problem(name, kind, (256,), inputs=inputs), "reference")
    (created,) = registry.find(name).objects.values()
    p = grouped.problem(name, kind, (256,), inputs=inputs, **other)
    with pytest.raises(ValueError, match=words):
        grouped.run(p, "reference")
    assert list(registry.find(name).objects.values()) == [created]


@pytest.mark.parametrize(
    "control", [{"sf_vec_size": 32}, {"discrete_col_sfd": True}, {"norm_const_tensor": torch.ones(1)}]
)
def test_controls_of_scale_factors_without_any(control: dict[str, Any]) -> None:
    a, b, ones = torch.ones(256, 64).bfloat16(), torch.ones(1, 64, 64).bfloat16(), torch.ones(256)
    with pytest.raises(ValueError, match=f"{next(iter(control))} of scale factors: got given; allowed: none"):
        cudnn.grouped_gemm_glu_wrapper_sm100(
            a, None, torch.tensor([256]).int(), ones[:1], b, prob_tensor=ones, **control
        )


def test_sizes_of_a_later_call_of_dense_gemms() -> None:
    for name, n in (("gemm_swiglu", 96), ("gemm_dswiglu", 48)):
        created, other = (case(name, 32, columns, 32) for columns in (64, n))
        operation = created.family.cls(**created.samples())
        operation.compile()
        operation.execute(**created.arguments())
        with pytest.raises(ValueError, match=f"n: got {n}; allowed: multiples of"):
            operation.execute(**other.arguments())
    a, b, table, c = torch.randn(32, 64), torch.randn(256, 64), torch.randn(32, 64), torch.empty(32, 256)
    rope = cudnn.GemmRope(a[..., None], b[..., None], table, table, c[..., None])
    rope.compile()
    with pytest.raises(ValueError, match="n: got 192; allowed: multiples of head_size, 128"):
        rope.execute(a[..., None], b[:192, :, None], table, table, torch.empty(32, 192, 1))


def test_sizes_behind_addresses_are_those_of_the_constructor() -> None:
    """Matrices behind pointers have no shape."""
    p = grouped.problem("grouped_gemm_glu", "bf16", (64, 208))
    grouped.use_pointers(p)
    samples = {"sample_a": p.inputs["a"], "sample_c": None, "sample_d": torch.empty(208, 64, 1).bfloat16()}
    samples |= {"sample_padded_offsets": p.inputs["padded_offsets"], "sample_alpha": p.inputs["alpha"]}
    weights = {"num_experts": 2, "b_shape": (128, 128), "b_dtype": BF16}
    created = cudnn.GroupedGemmGlu(**samples, sample_sfa=None, sample_d_col=None, **weights)
    created.compile()
    d = torch.empty(208, 64, 1).bfloat16()
    kwargs = (p.inputs["padded_offsets"], p.inputs["alpha"], None, None, None, p.inputs["b_ptrs"])
    created.execute(p.inputs["a"], None, d, None, *kwargs)
    with pytest.raises(ValueError, match=r"b_shape: got \(128, 128\); allowed: \(n, 64\), as a"):
        created.execute(p.inputs["a"][:, :64].contiguous(), None, d, None, *kwargs)
    a, b, ends = torch.zeros(64, 16).bfloat16(), torch.zeros(64, 32).bfloat16(), torch.tensor([64], dtype=I32)
    wgrad = cudnn.GroupedGemmWgrad(a.T, b, None, None, ends, num_experts=1, wgrad_shape=(16, 32), wgrad_dtype=BF16)
    wgrad.compile()
    with pytest.raises(ValueError, match=r"wgrad_shape: got \(16, 32\); allowed: \(16, 64\), of a and b"):
        wgrad.execute(a.T, b.repeat(1, 2), None, None, ends, wgrad_ptrs=torch.zeros(1, dtype=torch.int64))


# What a call may leave out, or give in another form.


@pytest.mark.parametrize("name", ["grouped_gemm_quant", "grouped_gemm_glu"])
def test_a_tensor_that_is_not_written_may_be_left_out(name: str) -> None:
    """``d_col``, where nothing is quantised; existing programs have one in the samples, but not in every call."""
    p = grouped.problem(name, "mxfp4", (256,), n=64, k=64)
    grouped.run(p, "reference")
    names = ("a", "b", "sfa", "sfb", "padded_offsets", "alpha")
    samples = {key: p.inputs[key] for key in names} | {"d": torch.empty_like(p.results["d_tensor"])}
    if name == "grouped_gemm_glu":
        samples["c"] = torch.empty_like(p.results["c_tensor"])
    api = registry.find(name)
    created: Any = api(**api.samples(samples | {"d_col": torch.empty_like(samples["d"])}), sf_vec_size=32)  # pyright: ignore
    created.compile()
    assert "d_col" in created.unused()
    created.execute(**{api.parameters[key]: x for key, x in samples.items()})
    assert torch.equal(samples["d"], p.results["d_tensor"])
    d_col = torch.empty_like(samples["d"])
    created.execute(**{api.parameters[key]: x for key, x in samples.items()}, d_col_tensor=d_col)
    with pytest.raises(ValueError, match="b tensor: got None; allowed: a tensor, as the sample"):
        created.execute(**{api.parameters[key]: x for key, x in samples.items() if key != "b"})


def test_float32_factors_of_a_result_may_not_be_left_out() -> None:
    """Row-wise scales are written without column-wise ones: a warm call checks their shape."""
    api = cudnn.GroupedGemmGlu
    kwargs = api.empty_tensors((256, 256, 128, 2), "fp8_128", "meta")
    sizes = api.example_sizes({"m": 256, "n": 256, "k": 128, "experts": 2}) | {"vector": 128}
    for name, dtype in (("d", E4M3), ("sfd_row", F32)):
        kwargs[name] = api.spec(name).layout.allocate(sizes, "n", dtype, "meta")
    created = api(**api.samples(kwargs), sf_vec_size=128, arch="sm_90a")
    assert created.check_support()
    assert "sfd_row" not in created.unused()
    with pytest.raises(ValueError, match="sfd_row tensor: got None; allowed: a tensor, as the sample"):
        created.check_presence({**dict.fromkeys(created.names), **kwargs, "sfd_row": None})


def test_flat_factors_at_the_first_calls_of_two_threads() -> None:
    """One thread's call may fail after another one has regenerated it for flat scale factors."""
    p = grouped.problem("grouped_gemm_quant", "mxfp8", (256,), n=64, k=64)
    api: Any = cudnn.GroupedGemmQuant
    kwargs = {name: p.inputs.get(name) for name in api.names} | {"d": torch.empty(256, 64, 1).bfloat16()}
    created = api(**api.samples(kwargs), sf_vec_size=32, arch="sm_90a")
    call = Call(created, created.plan("sm_90a", created.sizes(created.descs)), lambda *_: None)
    kwargs |= {key: kwargs[key].permute(5, 2, 4, 0, 1, 3).reshape(-1) for key in ("sfa", "sfb")}
    for _ in range(2):
        assert call._recover(tuple(kwargs.values()), ()) is created.run
    assert [call._recover(call._canonicalized(tuple(kwargs.values())), ()) for _ in range(2)] == [created.run, None]


def test_a_counter_of_several_numbers() -> None:
    """The scheduler's, of which kernels of the other frontend use the first."""
    p = grouped.problem("grouped_gemm_quant", "mxfp4", (256,), n=64, k=64, use_dynamic_sched=True)
    p.inputs["scheduler_counter"] = torch.zeros(4, dtype=I32)
    grouped.run(p, "reference")
    grouped.check(p)
    p.inputs["scheduler_counter"] = torch.zeros(0, dtype=I32)
    with pytest.raises(ValueError, match="scheduler_counter tensor shape mismatch"):
        grouped.run(p, "reference")


def test_ends_of_experts_in_two_dimensions() -> None:
    p = grouped.problem("grouped_gemm", ends=(64, 64, 208))
    p.inputs["padded_offsets"] = p.inputs["padded_offsets"][:, None]
    grouped.run(p, "reference")
    grouped.check(p)


def test_addresses_of_scale_factors_are_needed() -> None:
    p = grouped.problem("grouped_gemm_quant", "mxfp4", (256,))
    grouped.use_pointers(p)
    p.inputs["sfb_ptrs"] = None
    with pytest.raises(ValueError, match="sfb_ptrs: got None; allowed: an array of addresses, int64, one for each exp"):
        grouped.run(p, "reference")


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("grouped_gemm_srelu", 64),
        ("grouped_gemm_dsrelu", 64),
        ("grouped_gemm_glu_hadamard", 64),
        ("grouped_gemm_glu", 64),
        ("grouped_gemm_quant", 32),
    ],
)
def test_bytes_that_may_be_one_element_or_two(name: str, k: int) -> None:
    """If the number of scale factors fits both: one for squared ReLU and the Hadamard transform, as in the other
    frontend, two elsewhere.
    """
    inputs = {"prob": F32} | ({"c": BF16} if name == "grouped_gemm_dsrelu" else {})
    p = grouped.problem(name, "mxfp4", (256,), n=64, k=k, inputs=inputs)
    for key in ("a", "b"):
        two = name in ("grouped_gemm_glu", "grouped_gemm_quant")
        p.inputs[key] = p.inputs[key].view(torch.uint8) if two else grouped.unpacked_fp4(p.inputs[key])
    grouped.run(p, "reference")
    grouped.check(p)


def test_tiles_of_128_columns_in_the_older_backward_pass() -> None:
    p = grouped.problem("grouped_gemm_dswiglu", "mxfp4", (256,), n=32, k=32, inputs=BACKWARD, mma_tiler_mn=(256, 128))
    p.inputs.pop("dprob")
    grouped.run(p, "reference")
    grouped.check(p)


@pytest.mark.parametrize(
    "name", [name for name in registry.packages() if "grouped_gemm_" in name and "wgrad" not in name]
)
def test_no_tokens_with_scale_factors(name: str) -> None:
    """Results of more than 128 columns, whose empty scale factors have strides of no meaning. One API returns none
    then.
    """
    api = registry.find(name)
    kind = "nvfp4" if "hadamard" in name else "mxfp8"
    more = {"prob": F32, "norm_const": F32} | ({"c": BF16, "beta": F32} if api.result[0] == "d_row" else {})
    narrow = {"d_dtype": E4M3} if kind == "mxfp8" else {}
    p = grouped.problem(name, kind, ends=(0, 0), n=384, inputs=more, **narrow)
    grouped.run(p, "reference")
    assert p.results[f"{api.result[0]}_tensor"].shape[0] == 0
    if narrow:
        scales = p.results["sfd_col_tensor"]
        assert scales is None if name == "grouped_gemm_dswiglu" else scales.shape == (32, 4, scales.shape[2], 4, 0, 1)
