"""The dense fused GEMMs on the GPU: values, memory around the results, graphs, streams, repeats, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from cudnn.runtime import launch
from cudnn_kernels.epilogue import StoreTile
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.gemm.problem import Operand
from cudnn_kernels.schedule import Dense
from gpu.common import assert_allocates_nothing_and_waits_for_nothing, captured
from support import oracle
from support.api_cases import BY_NAME, NAMES, Case, case, check, slack
from support.oracle import BF16, E4M3, E5M2, E8M0, F16, F32, FP4
from support.threads import together

GUARD = 4096  # elements around a result that must stay as they are


def problem(name: str, *sizes: int, **inputs: Any) -> Case:
    return case(name, *sizes, **inputs, device="cuda")


def guarded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tensor within a larger one of sevens, and the larger one, by bytes."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.full((size + 2 * GUARD,), 7, dtype=torch.uint8, device="cuda")
    inside = memory[GUARD : GUARD + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    inside.view(torch.uint8).copy_(tensor.view(torch.uint8)) if tensor.element_size() == 1 else inside.copy_(tensor)
    return inside, memory


def outputs(of: Case) -> list[str]:
    names = {*of.family.results, "ab12"} - ({"c"} if of.family.name == "gemm_dsrelu" else set())
    return [name for name in sorted(names) if of.tensors.get(name) is not None]


def compiled(of: Case, **more: Any) -> Any:
    gemm = of.operation(**more)
    gemm.compile()
    return gemm


def run(of: Case, **more: Any) -> None:
    """Runs within guards and checks values and guards."""
    memories = {}
    for name in outputs(of):
        of.tensors[name], memories[name] = guarded(of.tensors[name])
    compiled(of)(**of.arguments(), **more)
    check(of, **more, slack=slack(of))
    for name, memory in memories.items():
        assert bool((memory[:GUARD] == 7).all()), name
        assert bool((memory[-GUARD:] == 7).all()), name


def alpha(name: str) -> dict[str, float]:
    return {} if name == "gemm_amax" else {"alpha": 0.5}


SIZES = [
    (256, 256, 512, 2),
    (1, 64, 16, 1),
    (1, 256, 4096, 3),
    (509, 320, 208, 1),
    (16 * 13, 64 * 7, 16 * 11, 3),
    (131, 1024, 32, 1),
    (4096, 4096, 1024, 1),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32, E4M3, E5M2], ids=str)
def test_sizes(name: str, dtype: Any) -> None:
    """Most of them by one kernel."""
    for size in SIZES:
        run(problem(name, *size, dtype=dtype, out=F16 if dtype == F16 else BF16, amax=True), **alpha(name))


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name].quantized])
@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_the_reference_has_the_same_scale_factors(name: str, out: Any) -> None:
    """Operands of small integers: every sum is exact, so that only the activation and the rounding are left."""
    of, on_cpu = problem(name, 300, 192, 64, 2, out=out, amax=True), case(name, 300, 192, 64, 2, out=out, amax=True)
    for key in ("a", "b", "c", "prob"):
        if of.tensors.get(key) is not None and key not in outputs(of):
            values = torch.randint(-2, 3, of.tensors[key].shape).to(of.tensors[key].dtype)
            of.tensors[key].copy_(values)
            on_cpu.tensors[key].copy_(values)
    for one in (of, on_cpu):
        compiled(one)(**one.arguments())
    for key in (of.family.quantized, of.family.result):
        same = (of.tensors[key].cpu().view(torch.uint8) == on_cpu.tensors[key].view(torch.uint8)).float().mean()
        assert float(same) == 1.0 if name != "gemm_swiglu" else float(same) > 0.999  # its exponential is approximated
    torch.testing.assert_close(of.tensors["amax"].cpu(), on_cpu.tensors["amax"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_error_is_at_most_twice_that_of_pytorch(name: str, dtype: Any) -> None:
    """The same computation in PyTorch rounds between its steps; ours rounds once."""
    of = problem(name, 1024, 512, 4096, dtype=dtype, out=dtype, side=dtype)
    compiled(of)(**of.arguments())
    z = oracle.matmul(of.a, of.b)
    tensors = of.tensors
    rounded = (tensors["a"][..., 0] @ tensors["b"][..., 0].T).unsqueeze(2)
    if name == "gemm_swiglu":
        up, gate = rounded.unflatten(1, (-1, 2, 32)).unbind(2)
        expected, other = oracle.swiglu(z), (up * torch.nn.functional.silu(gate)).flatten(1, 2)
    elif name == "gemm_srelu":
        expected, other = oracle.srelu(z, tensors["prob"]), rounded.relu().square() * tensors["prob"].to(dtype)
    elif name == "gemm_dsrelu":
        expected = oracle.dsrelu(z, tensors["c"], tensors["prob"])[0]
        other = 2 * rounded.relu() * tensors["c"] * tensors["prob"].to(dtype)
    else:
        expected, other = z, rounded
    finite = other.isfinite() & tensors[of.family.result].isfinite()
    ours, theirs = ((x.double() - expected)[finite].norm() for x in (tensors[of.family.result], other))
    assert float(ours) <= 2 * float(theirs)


def test_long_sums_of_8_bits_lose_no_more_than_those_of_cublas() -> None:
    """At most one and a half times the error of float32 results that cuBLAS adds up in float32."""
    of = problem("gemm_amax", 256, 256, 16384, dtype=E4M3, out=F32)
    compiled(of)(**of.arguments())
    z = oracle.matmul(of.a, of.b)[..., 0]
    a, b = of.tensors["a"][..., 0], of.tensors["b"][..., 0].T
    one = torch.ones((), device="cuda")
    other = torch._scaled_mm(a, b, one, one, out_dtype=F32, use_fast_accum=False)
    ours, theirs = (float((x.double() - z).norm()) for x in (of.tensors["c"][..., 0], other))
    assert 0 < ours <= 1.5 * theirs


def test_long_sums_of_16_bits() -> None:
    """The tensor cores cut sums off, to 25 bits: 2^-25 for each of 1024 instructions is 3e-5. 1.9e-5 was seen."""
    of = problem("gemm_amax", 256, 256, 16384, dtype=BF16, out=F32)
    compiled(of)(**of.arguments())
    z = oracle.matmul(of.a, of.b)
    assert 0 < float((of.tensors["c"].double() - z).norm() / z.norm()) < 3e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [{}, {"dtype": E4M3, "scale": E8M0}, {"dtype": F32, "majors": "mnn"}], ids=str)
def test_graph_replay_with_changed_data(name: str, inputs: dict[str, Any]) -> None:
    of = problem(name, 256, 256, 512, 2, **inputs)
    gemm = compiled(of)
    workspace = torch.empty(gemm.workspace_size(), dtype=torch.uint8, device="cuda")
    for buffer in (workspace, None):
        run = functools.partial(gemm.execute, **of.arguments(), workspace_tensor=buffer)
        run()
        torch.cuda.synchronize()
        graph = captured(run)
        for _ in range(3):
            fresh = problem(name, 256, 256, 512, 2, **inputs)
            of.a.values, of.b.values = fresh.a.values, fresh.b.values
            for key, tensor in of.tensors.items():
                if tensor is not None:
                    source = fresh.tensors[key]
                    tensor.view(torch.uint8).copy_(source.view(torch.uint8)) if tensor.element_size() == 1 else (
                        tensor.copy_(source)
                    )
            graph.replay()
            torch.cuda.synchronize()
            check(of, slack=3e-3 if inputs else 2e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [{}, {"dtype": E4M3, "scale": E8M0}], ids=str)
def test_execute_with_a_workspace_allocates_nothing_and_waits_for_nothing(name: str, inputs: dict[str, Any]) -> None:
    of = problem(name, 256, 256, 512, **inputs)
    gemm = compiled(of)
    arguments = {
        **of.arguments(),
        "workspace_tensor": torch.empty(gemm.workspace_size(), dtype=torch.uint8, device="cuda"),
    }
    assert_allocates_nothing_and_waits_for_nothing(lambda: gemm.execute(**arguments))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["current", "torch", "int", "CUstream"])
def test_streams(name: str, kind: str) -> None:
    """Work queued on the stream before the call is seen by it; operands are prepared in its order too."""
    from cuda.bindings.driver import CUstream

    of = problem(name, 256, 256, 512, dtype=F32, majors="mkn")
    gemm = compiled(of)
    values = torch.randn_like(of.tensors["a"])
    of.a.values = values.double()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    inputs = {"current": None, "torch": stream, "int": stream.cuda_stream, "CUstream": CUstream(stream.cuda_stream)}
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        of.tensors["a"].copy_(values)
        if kind == "current":
            gemm.execute(**of.arguments())
    if kind != "current":
        gemm.execute(**of.arguments(), current_stream=inputs[kind])
    stream.synchronize()
    check(of, slack=3e-3)


@pytest.mark.parametrize("name", NAMES)
def test_two_streams_at_once(name: str) -> None:
    gemm = compiled(problem(name, 256, 256, 512, dtype=E4M3, scale=E8M0))

    def work(_: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for m in (128, 384, 1024) * 5:
                of = problem(name, m, 256, 512, dtype=E4M3, scale=E8M0)
                gemm.execute(**of.arguments())
                torch.cuda.current_stream().synchronize()
                check(of, slack=2e-5)

    together(work)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inputs", [{"out": BF16}, {"dtype": FP4, "scale": E4M3, "vector": 16}, {"out": E4M3}], ids=str)
def test_100_repeats_have_the_same_bits(name: str, inputs: dict[str, Any]) -> None:
    """All but dprob, whose sums are added up in no fixed order."""
    if inputs["out"] == E4M3 and not BY_NAME[name].quantized if "out" in inputs else False:
        inputs = {"out": F32}
    of = problem(name, 512, 512, 512, 2, **inputs, amax=True)
    gemm = compiled(of)
    names = [key for key in outputs(of) if key != "dprob"]
    first: dict[str, torch.Tensor] = {}
    for _ in range(100):
        of.tensors["amax"].fill_(float("-inf"))
        gemm.execute(**of.arguments())
        for key in names:
            bits = of.tensors[key].clone()
            assert torch.equal(
                bits.view(torch.uint8) if bits.element_size() == 1 else bits,
                first.setdefault(key, bits.view(torch.uint8) if bits.element_size() == 1 else bits),
            )


@pytest.mark.parametrize("name", NAMES)
def test_the_wrapper_and_the_operator(name: str) -> None:
    import cudnn.ops

    of = problem(name, 256, 256, 512, 2)
    t = of.tensors
    more = {key: t[key] for key in of.family.extra}
    types = {"gemm_amax": {"c_dtype": BF16}, "gemm_swiglu": {"ab12_dtype": BF16, "c_dtype": BF16}}.get(name, {})
    wrapped = of.family.wrapper(
        a_tensor=t["a"],
        b_tensor=t["b"],
        sfa_tensor=None,
        sfb_tensor=None,
        **{f"{key}_tensor": tensor for key, tensor in more.items()},
        **types,
    )
    for key in of.family.results:
        t[key] = wrapped[f"{key}_tensor"]
    check(of, slack=2e-5)
    operator = getattr(cudnn.ops, name)
    actual = torch.compile(lambda a, b: operator(a, b, sfa=None, sfb=None, **more, **types))(t["a"], t["b"])
    for key, tensor in zip(of.family.results, actual, strict=True):
        if t[key] is not None and key != "dprob":
            assert torch.equal(tensor, t[key])


@pytest.mark.parametrize("name", NAMES)
def test_tensors_unlike_the_samples_never_reach_the_kernel(name: str) -> None:
    of = problem(name, 256, 256, 512)
    gemm = compiled(of)
    a, result = of.tensors["a"], of.tensors[of.family.result]
    last = f"{of.family.result}_tensor"
    for change in (
        {"a_tensor": a.half()},
        {"a_tensor": a.cpu()},
        {"a_tensor": a[:, :256]},
        {"a_tensor": oracle.strided(a, "mn")},
        {"a_tensor": a[..., 0]},
        {"a_tensor": torch.empty(256 * 512 + 1, device="cuda").bfloat16()[1:].as_strided(a.shape, a.stride())},
        {"a_tensor": None},
        {"sfa_tensor": a},
        {last: result[:, :32]},
        {last: result[:128]},
        {last: result.float()},
        {last: result.cpu()},
    ):
        with pytest.raises((ValueError, TypeError)):
            gemm.execute(**{**of.arguments(), **change})
    gemm.execute(**of.arguments())
    check(of, slack=2e-5)


def test_clusters_of_sixteen() -> None:
    """More than the eight CTAs that a kernel may have in a cluster without asking for it."""
    if launch.device_architecture(0) != "sm_90a":
        pytest.skip("a configuration of Hopper's GEMM")
    operand, epilogue = Operand("bfloat16"), (StoreTile("d", "float32"),)
    c = GemmConfiguration(operand, operand, epilogue, Dense(), tile=(128, 64, 64), cluster=(4, 4))
    a, b = (oracle.plain(size, 200, 2, device="cuda") for size in (1100, 600))
    d = torch.full((2, 1100, 600), torch.nan, device="cuda").permute(1, 2, 0)
    kernel = launch.kernel("cudnn_kernels.sm90.gemm:Gemm", c, "sm_90a")
    kernel(a.tensor, b.tensor, d, 128, torch.cuda.current_stream().cuda_stream)
    oracle.assert_rounded(d, oracle.matmul(a, b), 2e-5)
