"""Calls of the grouped fused GEMMs as programs that exist make them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

import cudnn
from cudnn.fused import registry
from support import grouped
from support.oracle import BF16, E4M3, E8M0, F32
from support.selection import WHERE, within

TILES = ((256, 256), None, 16, False, 256, False)  # mma_tiler_mn ... discrete_col_sfd


def inputs(p: grouped.Problem, names: str) -> list[Any]:
    return [p.inputs.get(name) for name in names.split()]


@pytest.mark.parametrize("family", ["grouped_gemm", "discrete_grouped_gemm"])
def test_packages_of_a_family_are_its_attributes(family: str) -> None:
    """Also where nothing has imported them by their paths."""
    program = f"""
import cudnn
from cudnn.fused import registry
package = cudnn.{family}.{family}_swiglu
assert package.api.{family}_swiglu_wrapper_sm100 is cudnn.{family}_swiglu_wrapper_sm100
assert cudnn.{family}.{family}_swiglu_wrapper_sm100 is cudnn.{family}_swiglu_wrapper_sm100
assert not hasattr(cudnn.{family}, "grouped_gemm_none")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("semantics", ["1.23", "1.32"])
@pytest.mark.parametrize("stream", [None, 0])
@pytest.mark.parametrize(
    ("name", "before", "between"),
    [
        (
            "grouped_gemm_dsrelu",
            "a b c sfa sfb padded_offsets alpha prob dprob",
            (False, None, None, None, None, "k", None, F32, BF16, "n", *TILES),
        ),
        (
            "discrete_grouped_gemm_swiglu",
            "a b_ptrs sfa sfb_ptrs padded_offsets alpha n b_dtype",
            (None, None, None, F32, BF16, BF16, "n", *TILES, "swiglu", "k"),
        ),
        (
            "discrete_grouped_gemm_dswiglu",
            "a b_ptrs c sfa sfb_ptrs padded_offsets alpha beta prob dprob n b_dtype",
            (False, None, F32, BF16, "n", *TILES, "dswiglu", "k", None),
        ),
    ],
)
def test_the_older_tail_of_positional_arguments(
    name: str,
    before: str,
    between: tuple[Any, ...],
    stream: int | None,
    semantics: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """use_dynamic_sched and current_stream came before what later versions put between them."""
    monkeypatch.setenv("CUDNN_FRONTEND_SEMANTICS", semantics)
    arguments = {"prob": F32, "c": BF16, "dprob": F32, "beta": F32} if "ds" in name else {}
    p = grouped.problem(name, inputs=arguments)
    p.inputs["dprob"] = torch.zeros(200, 1, 1)
    grouped.run(p, "reference")
    values = p.inputs | p.options
    wrapper = getattr(cudnn, f"{name}_wrapper_sm100")
    placed = wrapper(*(values.get(key) for key in before.split()), *between, True, stream)
    key = "d_row_tensor" if "ds" in name else "d_tensor"
    assert torch.equal(placed[key], p.results[key])


def test_the_older_order_of_a_call_of_dsrelu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces came before addresses later; without them, amax came in the place of scale factors."""
    monkeypatch.setenv("CUDNN_FRONTEND_SEMANTICS", "1.23")
    p = grouped.problem("grouped_gemm_dsrelu", inputs={"prob": F32, "c": BF16, "dprob": F32})
    grouped.run(p, "reference")
    d, amax = torch.empty(200, 128, 1).bfloat16(), torch.full((3, 1), -torch.inf)
    a, b, c, sfa, sfb, *rest = inputs(p, "a b c sfa sfb padded_offsets alpha prob dprob")
    operation = cudnn.GroupedGemmDsreluSm100(a, b, c, d, None, sfa, sfb, *rest, sample_amax=amax)
    operation.compile()
    operation.execute(a, c, d, None, sfa, *rest, b, sfb, None, None, None, None, None, amax, None, None)
    assert torch.equal(d, p.results["d_row_tensor"])
    assert torch.equal(amax, p.results["amax_tensor"])


@pytest.mark.parametrize("name", ["GroupedGemmGlu", "GroupedGemmDsrelu", "GroupedGemmGluHadamard"])
def test_a_call_that_fits_no_order(name: str) -> None:
    """What Python says of a function with this signature, also where a required tensor may come in two places."""
    execute = getattr(cudnn, name).execute
    required = [p.name for p in inspect.signature(execute).parameters.values() if p.default is p.empty]
    right = dict.fromkeys(required)
    for call, words in (
        (lambda: execute(**dict.fromkeys(required[:-1])), rf"missing 1 required .*'{required[-1]}'"),
        (lambda: execute(None, 1), "missing .* required"),
        (lambda: execute(None, **right), "multiple values for argument 'self'"),
        (lambda: execute(*[None] * len(required), **{required[-1]: 1}), "multiple values|pass arguments by name"),
        (lambda: execute(**right, alhpa=1.0), "unexpected keyword argument 'alhpa'"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_positional_arguments_that_fit_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is a clamp or a stream: the version whose meaning the call has tells which."""
    p = grouped.problem("grouped_gemm_srelu", inputs={"prob": F32})
    before = inputs(p, "a b sfa sfb padded_offsets alpha bias b_ptrs sfb_ptrs n b_dtype")
    before += ["k", None, p.inputs["prob"], F32, BF16, BF16, "n", *TILES, False]
    (_, plain, *_), (_, clamped, *_) = (cudnn.grouped_gemm_srelu_wrapper_sm100(*before, *x) for x in ((), (1,)))
    assert not torch.equal(plain, clamped)
    monkeypatch.setenv("CUDNN_FRONTEND_SEMANTICS", "1.23")
    assert torch.equal(cudnn.grouped_gemm_srelu_wrapper_sm100(*before, 0)["d_tensor"], plain)


def test_a_result_that_is_not_written_may_be_another() -> None:
    """Without quantisation, d_col is neither read nor written."""
    p = grouped.problem("grouped_gemm_glu", "nvfp4", (256, 512), inputs={"prob": F32})
    grouped.run(p, "reference")
    c, d = torch.empty(512, 128, 1).bfloat16(), torch.empty(512, 64, 1).bfloat16()
    a, prob, weights = p.inputs["a"], p.inputs["prob"], inputs(p, "b sfb")
    about = inputs(p, "sfa padded_offsets alpha")
    operation = cudnn.GroupedGemmGluSm100(a, c, d, *about, d, *weights, sample_prob=prob)
    operation.compile()
    operation.execute(a, c, d, *about, *weights, d_col_tensor=d, prob_tensor=prob)
    assert torch.equal(d, p.results["d_tensor"])
    with pytest.raises(ValueError, match="c tensor: got memory that d uses too"):
        operation.execute(a, c, c[:, :64], *about, *weights, d_col_tensor=d, prob_tensor=prob)


def test_a_scheduler_counter_goes_with_weights_in_a_tensor() -> None:
    """Behind addresses it was ignored."""
    p = grouped.problem("grouped_gemm_quant", "mxfp8", (256, 512), inputs={"norm_const": F32})
    arguments = {"a_tensor": p.inputs["a"], "sfa_tensor": p.inputs["sfa"], "padded_offsets": p.inputs["padded_offsets"]}
    arguments |= {"alpha_tensor": p.inputs["alpha"], "d_dtype": BF16, "sf_vec_size": 32, "use_dynamic_sched": True}
    counter = torch.zeros(1, dtype=torch.int32)
    places, factors = (torch.tensor([p.inputs[name].data_ptr()] * 2) for name in ("b", "sfb"))
    dense = {"b_tensor": p.inputs["b"], "sfb_tensor": p.inputs["sfb"]}
    cudnn.grouped_gemm_quant_wrapper_sm100(**arguments, **dense, scheduler_counter_tensor=counter)
    discrete = {"b_ptrs": places, "sfb_ptrs": factors, "n": 128, "b_dtype": E4M3}
    with pytest.raises(
        ValueError, match=r"scheduler_counter tensor: got a tensor; allowed: None, but for .* in a tensor"
    ):
        cudnn.grouped_gemm_quant_wrapper_sm100(**arguments, **discrete, scheduler_counter_tensor=counter)


def gradient_inputs() -> tuple[torch.Tensor, ...]:
    a, b = torch.randn(64, 256).to(E4M3), torch.randn(96, 256).to(E4M3)
    factors = torch.ones(128, 8).to(E8M0)
    return a, b.T, factors, factors, torch.tensor([128, 256], dtype=torch.int32)


@pytest.mark.parametrize("where", WHERE)
def test_gradients_whose_columns_are_contiguous(where: str) -> None:
    """After gradients whose rows are, of the same sizes; overwritten, and added to."""
    device = "cuda" if where == "gpu" else "cpu"
    a, b = torch.randn(64, 192, device=device).bfloat16(), torch.randn(192, 96, device=device).bfloat16()
    ends = torch.tensor([64, 64, 192], dtype=torch.int32, device=device)
    rows, columns = torch.ones(3, 64, 96, device=device), torch.ones(3, 96, 64, device=device).mT
    arguments = {"a_tensor": a, "b_tensor": b, "sfa_tensor": None, "sfb_tensor": None, "offsets_tensor": ends}
    expected = torch.stack(
        [a[:, :64].float() @ b[:64].float(), torch.zeros_like(rows[0]), a[:, 64:].float() @ b[64:].float()]
    )
    with within(where):
        for added in (False, True):
            for out in (rows, columns):
                (wgrad,) = cudnn.grouped_gemm_wgrad_wrapper_sm100(
                    **arguments, wgrad_tensor=out, wgrad_dtype=F32, accumulate_on_output=added
                )
                assert wgrad is out
                torch.testing.assert_close(out, (1 + added) * expected, rtol=1e-4, atol=1e-4)
    operation = cudnn.GroupedGemmWgradSm100(
        a, b, None, None, ends, columns, arch="sm_100a" if where == "sm_100a" else "sm_90a"
    )
    assert operation.check_support()


def test_one_experts_gradient_whose_columns_are_contiguous() -> None:
    a, b, out = torch.randn(64, 32).bfloat16(), torch.randn(32, 96).bfloat16(), torch.ones(96, 64).t().unsqueeze(0)
    cudnn.grouped_gemm_wgrad_wrapper(
        a, b, None, None, torch.tensor([32], dtype=torch.int32), wgrad_tensor=out, wgrad_dtype=F32
    )
    torch.testing.assert_close(out[0], a.float() @ b.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("expert", "error"),
    [
        (torch.zeros(96, 64).bfloat16().T, r"sample_wgrad_expert tensor stride mismatch: expected \(96, 1\)"),
        (torch.zeros(64, 128).bfloat16()[:, :96], r"sample_wgrad_expert tensor stride mismatch: expected \(96, 1\)"),
        (torch.zeros(96, 64).bfloat16(), r"sample_wgrad_expert tensor shape mismatch: expected \(64, 96\)"),
        (torch.zeros(64, 96), r"sample_wgrad_expert tensor dtype mismatch: expected torch.bfloat16"),
        (torch.zeros(64, 96).bfloat16(), None),
    ],
)
def test_the_sample_of_a_gradient_behind_an_address(expert: torch.Tensor, error: str | None) -> None:
    """Other strides were ignored: gradients were written as if they were contiguous."""
    operation = cudnn.GroupedGemmWgradSm100(
        *gradient_inputs(),
        sample_wgrad_expert=expert,
        num_experts=2,
        wgrad_shape=(64, 96),
        wgrad_dtype=BF16,
        sf_vec_size=32,
    )
    if error is None:
        assert operation.check_support()
        return
    with pytest.raises(ValueError, match=error):
        operation.check_support()


@pytest.mark.parametrize("scratch", [torch.zeros(8).byte(), torch.zeros(2048).char(), torch.zeros(4096).byte()[::2]])
def test_a_descriptor_workspace_that_is_none(scratch: torch.Tensor) -> None:
    """Ours use none, but a program that runs here has to run with kernels that do."""
    arguments = gradient_inputs()
    cudnn.grouped_gemm_wgrad_wrapper_sm100(*arguments, sf_vec_size=32, descriptor_workspace=torch.zeros(1024).byte())
    with pytest.raises(ValueError, match=r"descriptor_workspace: got .* allowed: at least 1024 bytes, torch.uint8"):
        cudnn.grouped_gemm_wgrad_wrapper_sm100(*arguments, sf_vec_size=32, descriptor_workspace=scratch)


@pytest.mark.parametrize("semantics", ["1.23", None])
@pytest.mark.parametrize(
    ("name", "samples", "order"),
    [
        (
            "grouped_gemm_glu",
            "",
            "a c d sfa padded_offsets alpha b sfb bias b_ptrs sfb_ptrs d_col sfd_row sfd_col amax norm_const prob",
        ),
        (
            "grouped_gemm_quant",
            "",
            "a sfa padded_offsets alpha d b sfb bias b_ptrs sfb_ptrs d_col sfd_row sfd_col amax norm_const prob",
        ),
        (
            "discrete_grouped_gemm_swiglu",
            "num_experts b_shape b_dtype",
            "a b_ptrs c d sfa sfb_ptrs padded_offsets alpha bias d_col sfd_row sfd_col amax norm_const prob",
        ),
        (
            "discrete_grouped_gemm_dswiglu",
            "num_experts b_shape b_dtype",
            "a b_ptrs c d_row d_col sfa sfb_ptrs padded_offsets alpha beta prob dprob dbias sfd_row sfd_col amax "
            "norm_const",
        ),
    ],
)
def test_the_stream_of_a_call_in_the_older_order(name: str, samples: str, order: str, semantics: str | None) -> None:
    """It came right after the tensors. A number may be the stream, in objects that follow the older version."""
    from cuda.bindings.driver import CUstream

    backward = "ds" in name
    p = grouped.problem(name, inputs={"prob": F32} | ({"c": BF16, "dprob": F32, "beta": F32} if backward else {}))
    p.inputs["dprob"] = torch.zeros(200, 1, 1) if backward else None
    p.options["semantics"] = semantics
    grouped.run(p, "reference")
    tensors = p.inputs | {key: x.clone() for n, x in p.results.items() if x is not None and (key := n[:-7]) != "dprob"}
    api = registry.find(name)
    about = {"num_experts": 3, "b_shape": (128, 128), "b_dtype": BF16}
    operation = api(**api.samples(tensors), **{key: about[key] for key in samples.split()}, semantics=semantics)
    operation.compile()
    result = "d_row" if backward else "d"
    tensors[result].zero_()
    stream = 0 if semantics else CUstream(0)
    operation.execute(*(tensors.get(key) for key in order.split()), stream)
    assert torch.equal(tensors[result], p.results[f"{result}_tensor"])


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_quant", "grouped_gemm_dglu", "grouped_gemm_glu"])
@pytest.mark.parametrize("where", WHERE)
def test_weights_with_contiguous_columns(name: str, where: str) -> None:
    """(experts, k, n) with b_major="n", as samples and in calls; k = n, so that no shape tells."""
    device = "cuda" if where == "gpu" else "cpu"
    a, b = torch.randn(64, 64, device=device).bfloat16(), torch.randn(2, 64, 64, device=device).bfloat16()
    ends, ones = torch.tensor([16, 64], dtype=torch.int32, device=device), torch.ones(2, device=device)
    api: Any = registry.find(name)
    inputs = {"a": a, "b": b, "padded_offsets": ends, "alpha": ones, "prob": torch.ones(64, device=device)}
    inputs |= {"c": torch.randn(64, 128, device=device).bfloat16(), "beta": ones} if name == "grouped_gemm_dglu" else {}
    options = {"b_major": "n"}
    views = api.reinterpret(inputs, options)
    results = api.allocated({key: api.canonicalize(key, x) for key, x in views.items()}, options)
    tensors = {**inputs, **{key: x.zero_() for key, x in results.items()}}
    like = {**tensors, "b": b.transpose(1, 2).permute(1, 2, 0)}  # (n, k, experts)
    with within(where):
        for samples, called in ((tensors, tensors), (like, tensors), (tensors, like)):
            for x in results.values():
                x.zero_()
            operation = api(**api.samples(samples), **options)
            operation.compile()
            operation.execute(**{parameter: called.get(key) for key, parameter in api.parameters.items()})
            d = (tensors.get("d") if "d" in tensors else tensors["d_row"])[..., 0].float()
            product = torch.cat([a[:16].float() @ b[0].float(), a[16:].float() @ b[1].float()])
            if name == "grouped_gemm_glu":
                gate, up = product.view(64, 1, 2, 32).unbind(2)
                product = (torch.nn.functional.silu(gate) * up).flatten(1)
            if name == "grouped_gemm_dglu":
                gate, up = inputs["c"].float().view(64, 2, 2, 32).unbind(2)
                s, g = gate.sigmoid(), product.view(64, 2, 32)
                product = torch.stack([g * up * s * (1 + gate * (1 - s)), g * gate * s], 2).flatten(1)
            torch.testing.assert_close(d, product, rtol=2e-2, atol=2e-2 * float(product.abs().max()))
