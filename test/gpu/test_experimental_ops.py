"""The operators on PyTorch tensors, on the GPU against PyTorch in float64."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.nn import functional as F

import cudnn
from cudnn.experimental.ops import moe_grouped_matmul, scaled_dot_product_attention
from cudnn.experimental.ops.sdpa import _bprop_cache, _fprop_cache
from cudnn.ops import causal_conv1d
from gpu.common import assert_accurate
from support.dense_attention import with_gradients
from support.torch_attention import CASES, Varying

UNSUPPORTED = cudnn.cudnnGraphNotSupportedError


def check(problem: Varying, tensors: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    """At most twice the error of the same computation in the type, plus its rounding."""
    exact = with_gradients(problem.solve, [x.double() for x in tensors])
    rough = with_gradients(problem.solve, tensors)
    for name, one, other, typed in zip(("O", "dQ", "dK", "dV"), actual, exact, rough, strict=True):
        assert torch.isfinite(one).all(), name
        error, peer = ((x.double() - other).abs().max().item() for x in (one, typed))
        allowed = 2 * peer + torch.finfo(one.dtype).eps * other.abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def attend(problem: Varying, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    function = functools.partial(scaled_dot_product_attention, **problem.keywords("cuda"))
    try:
        return with_gradients(function, tensors)
    except UNSUPPORTED as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("outputs_hold_nan")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, dtype: torch.dtype) -> None:
    tensors = CASES[name].tensors(dtype, "cuda")
    check(CASES[name], tensors, attend(CASES[name], tensors))


@pytest.mark.usefixtures("outputs_hold_nan")
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_head_sizes(d: int, packed: bool) -> None:
    starts = [0, 100, 356] if packed else None
    problem = Varying(
        h_q=8, h_kv=2, s_q=256, s_kv=256, d=d, d_v=d, options={"is_causal": True}, starts_q=starts, starts_kv=starts
    )
    tensors = problem.tensors(torch.float16, "cuda")
    check(problem, tensors, attend(problem, tensors))


@pytest.mark.parametrize("packed", [False, True])
def test_parts_of_a_larger_tensor(packed: bool) -> None:
    problem = CASES["packed, causal, grouped heads" if packed else "causal"]
    problem = dataclasses.replace(problem, h_q=4, h_kv=4)
    whole = torch.randn(2, 24, 3, 4, 16, device="cuda", dtype=torch.float16)
    tensors = [*(whole[:, :, index].transpose(1, 2) for index in range(3)), problem.tensors(whole.dtype, "cuda")[3]]
    check(problem, tensors, attend(problem, tensors))


def test_tensors_that_cudnn_cannot_read() -> None:
    problem = CASES["causal"]
    tensors = problem.tensors(torch.float16, "cuda")
    memory = torch.empty(tensors[0].numel() + 1, dtype=torch.float16, device="cuda")
    shifted = memory[1:].view(tensors[0].shape).copy_(tensors[0])
    arguments = [shifted, tensors[1].mT.contiguous().mT, tensors[2], tensors[3].sum((0, 1, 2)).expand(tensors[3].shape)]
    check(problem, arguments, attend(problem, arguments))


def test_a_graph_is_built_once_for_all_streams() -> None:
    problem = CASES["lengths"]
    tensors = problem.tensors(torch.float16, "cuda")
    attend(problem, tensors)
    before = len(_fprop_cache), len(_bprop_cache)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        actual = attend(problem, tensors)
    torch.cuda.current_stream().wait_stream(side)
    check(problem, tensors, actual)
    assert (len(_fprop_cache), len(_bprop_cache)) == before


def test_both_passes_in_a_cuda_graph() -> None:
    problem = CASES["packed, causal, grouped heads"]
    tensors = problem.tensors(torch.float16, "cuda")
    keywords = problem.keywords("cuda")
    function = functools.partial(scaled_dot_product_attention, **keywords)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with_gradients(function, tensors)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = with_gradients(function, tensors)
    for x, fresh in zip(tensors, problem.tensors(torch.float16, "cuda"), strict=True):
        x.copy_(fresh)
    graph.replay()
    check(problem, tensors, actual)
    shorter = dataclasses.replace(problem, starts_q=[0, 4, 27], starts_kv=[0, 9, 11])
    for name in ("cumulative_seq_len_q", "cumulative_seq_len_kv"):
        keywords[name].copy_(shorter.keywords("cuda")[name])
    graph.replay()
    check(shorter, tensors, actual)


@pytest.mark.parametrize("name", ["causal", "lengths, bottom right", "packed, causal, grouped heads"])
def test_compiled_attention(name: str) -> None:
    problem = CASES[name]
    tensors = problem.tensors(torch.float16, "cuda")
    keywords = problem.keywords("cuda")
    function = functools.partial(scaled_dot_product_attention, **keywords)
    compiled = torch.compile(lambda q, k, v: function(q, k, v), fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled, tensors), with_gradients(function, tensors))


def experts(token: torch.Tensor, weight: torch.Tensor, first: list[int]) -> torch.Tensor:
    ends = [*first[1:], token.shape[1]]
    return torch.cat([token[0, a:b] @ weight[e] for e, (a, b) in enumerate(zip(first, ends, strict=True))])[None]


@pytest.mark.parametrize(("e", "m", "k", "n"), [(4, 512, 256, 256), (8, 1024, 512, 512), (4, 256, 256, 256)])
@pytest.mark.parametrize("gathered", [False, True])
def test_experts(e: int, m: int, k: int, n: int, gathered: bool) -> None:
    """Result and gradient of the tokens; that of the weight where cuDNN has it."""
    if gathered and cudnn.backend_version() <= 91900:
        pytest.skip("cuDNN 9.19 gathers from memory that is not its own; refused")
    kind = torch.float16
    token, weight = torch.randn(1, m, k, device="cuda").to(kind), torch.randn(e, n, k, device="cuda").to(kind).mT
    first = sorted(torch.randint(m, (e,)).tolist())
    first[0] = 0
    offsets = torch.tensor(first, dtype=torch.int32, device="cuda").view(-1, 1, 1)
    index = torch.randint(m, (1, 2 * m, 1), dtype=torch.int32, device="cuda") if gathered else None
    d_out = torch.randn(1, 2 * m if gathered else m, n, device="cuda")

    def product(token: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return moe_grouped_matmul(token, weight, offsets, index, mode="gather" if gathered else "none")

    def formula(token: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return experts(token if index is None else token[:, index.flatten()], weight, first)

    out, d_token = with_gradients(lambda token: product(token, weight), [token, d_out])
    for place, result in enumerate((out, d_token)):
        assert_accurate(
            result,
            lambda dtype, place=place: with_gradients(
                lambda token: formula(token, weight.to(dtype)), [token.to(dtype), d_out]
            )[place],
            kind,
        )
    if cudnn.backend_version() < 92200:
        with pytest.raises(RuntimeError, match=r"needs cuDNN 9\.22\.0"):
            with_gradients(lambda weight: product(token, weight), [weight, d_out])
        return
    try:
        _, d_weight = with_gradients(lambda weight: product(token, weight), [weight, d_out])
    except RuntimeError as error:
        pytest.skip(str(error))
    assert_accurate(
        d_weight,
        lambda dtype: with_gradients(lambda weight: formula(token.to(dtype), weight), [weight.to(dtype), d_out])[1],
        kind,
    )


def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> torch.Tensor:
    y = F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1])
    return F.silu(y) if activation == "silu" else y


@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("w", [2, 4, 8, 64])
def test_causal_convolution(w: int, kind: torch.dtype, activation: str) -> None:
    shapes = ((2, 96, 130), (96, w), (96,), (2, 96, 130))
    *leaves, d_y = (torch.randn(*shape, device="cuda").to(kind) for shape in shapes)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(*tensors, activation=activation)

    if cudnn.backend_version() < 92200:
        with pytest.raises(UNSUPPORTED, match=r"causal_conv1d needs cuDNN 9\.22\.0"):
            run(*leaves)
        return
    actual = with_gradients(run, [*leaves, d_y])
    exact = with_gradients(lambda *x: convolved(*x, activation), [x.double() for x in (*leaves, d_y)])
    for one, other in zip(actual, exact, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=scale * max(2e-6, torch.finfo(kind).eps))
