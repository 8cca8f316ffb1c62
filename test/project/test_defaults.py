"""Calls whose types and devices are all explicit, under other defaults of PyTorch: the same results, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cudnn
import cudnn.ops
from cudnn import demo_cases
from cudnn.demo_cases import dense, gemm_variants
from cudnn.fused import grouped
from cudnn.grouped_gemm.grouped_gemm_glu_hadamard.hadamard_utils import hadamard_matrix
from cudnn.moe import experts
from cudnn.nn import MoE
from cudnn.pygraph.attention import support as attention_support

CPU = torch.device("cpu")
F32, BF16, HALF = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True, scope="module")
def _newest() -> Iterator[None]:
    """What some version of cuDNN does not support, the reference executor runs all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_support, "loaded_version", lambda: attention_support.NEWEST)
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


OTHERS: dict[str, Callable[[], Any]] = {
    **{str(dtype): lambda dtype=dtype: default_dtype(dtype) for dtype in (BF16, HALF, torch.float64)},
    "set_default_device": lambda: default_device("meta"),
    "with device": lambda: torch.device("meta"),
}


def random_tensor(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    generator = torch.Generator(CPU).manual_seed(len(shape))
    return torch.randn(*shape, dtype=F32, device=CPU, generator=generator).to(dtype)


def attention(**options: Any) -> list[torch.Tensor]:
    graph = cudnn.pygraph(
        io_data_type=cudnn.data_type.HALF,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        backend="reference",
    )
    x = random_tensor(1, 3, 32, 16, dtype=HALF)
    q = graph.tensor_like(x)
    data = {q: x}
    if "dropout" in options:
        seeds = [torch.full((1, 1, 1, 1), seed, dtype=torch.int64, device=CPU) for seed in (3, 5)]
        data |= {graph.tensor_like(seed).set_is_pass_by_value(False): seed for seed in seeds}
        options["dropout"] = (0.25, *[*data][1:])
    o, stats = graph.sdpa(q, q, q, generate_stats=True, name="attention", **options)
    results = [torch.zeros_like(x), torch.zeros(1, 3, 32, 1, dtype=F32, device=CPU)]
    o.set_output(True).set_dim(x.shape).set_stride(x.stride())
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    graph.build([cudnn.heur_mode.A])
    graph.execute({**data, o: results[0], stats: results[1]})
    return results


def layer(**options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    moe = MoE(128, 128, 4, 2, shared_experts=1, score="sigmoid", correction_bias=True, device=CPU, **options)
    x = random_tensor(9, 128, dtype=BF16).requires_grad_()
    y = moe(x)
    y.backward(torch.ones_like(y))
    assert moe.correction is not None
    return [moe.correction, *moe.parameters(), y, x.grad, *(p.grad for p in moe.parameters())]


def fused(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    program = demo_cases.find(name)
    problem = program.make(program.shape, "cpu")  # which keeps the memory of addresses
    return [x for x in problem.call() if x is not None]


def variant(v: gemm_variants.Variant) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [x for x in dense.make(v, "cpu").call() if x is not None]


def dropped() -> list[torch.Tensor]:
    torch.manual_seed(0)
    q = random_tensor(1, 2, 32, 16, dtype=HALF)
    return [cudnn.ops.scaled_dot_product_attention(q, q, q, dropout_p=0.5)]


def conv() -> list[torch.Tensor]:
    return [cudnn.ops.causal_conv1d(random_tensor(2, 8, 16), random_tensor(8, 4), random_tensor(8), "silu")]


def restored() -> list[torch.Tensor]:
    """A scalar that is kept with a graph, and a graph's index."""
    x, two = random_tensor(1, 4, 8), torch.full((1, 1, 1), 2.5, dtype=F32, device=CPU)
    with cudnn.Graph(backend="reference") as graph:
        y = graph.mul(x, two, name="mul")
        z = graph.add(y, graph.gen_index(y, axis=2, name="index"), name="add")
        z.set_output(True)
    return [graph(x), cudnn.Graph.deserialize(graph.serialize())(x)]


CALLS: dict[str, Callable[[], list[torch.Tensor]]] = {
    **{name: lambda name=name: fused(name) for name in demo_cases.PROGRAMS},
    **{str(v): lambda v=v: variant(v) for v in gemm_variants.sample("sm_100a", 6)},
    "alibi": lambda: attention(use_alibi_mask=True, use_causal_mask=True),
    "dropout": lambda: attention(dropout=None),
    "layer": layer,
    "layer in fp8": lambda: layer(fp8=True),
    "operator with dropout": dropped,
    "convolution": conv,
    "restored graph": restored,
    "hadamard_matrix": lambda: [hadamard_matrix(16)],
}


def forget() -> None:
    """Empties what calls keep, so that it is made under the defaults of the next one."""
    experts._ONES.clear()
    grouped.amax_scratch.cache_clear()


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.detach().flatten().contiguous().view(torch.uint8)

    return len(actual) == len(expected) and all(
        (x.dtype, x.device, x.shape) == (y.dtype, y.device, y.shape) and torch.equal(bits(x), bits(y))
        for x, y in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_defaults(name: str) -> None:
    forget()
    expected = CALLS[name]()
    with torch.device(CPU):  # under any mode operators take PyTorch's own way, which adds gradients in another order
        expected_in_a_mode = CALLS[name]()
    for other, defaults in OTHERS.items():
        forget()
        with defaults():
            actual = CALLS[name]()
        assert same(actual, expected_in_a_mode if "device" in other else expected), f"under {other}"
        assert same(CALLS[name](), expected), f"with what was kept under {other}"


def test_a_layer_without_a_type_takes_the_default() -> None:
    with default_dtype(BF16):
        moe = MoE(64, 32, 4, 2, correction_bias=True, score="sigmoid", dtype=None, device=CPU)
    assert {p.dtype for p in moe.parameters()} == {BF16}
    assert moe.correction is not None
    assert moe.correction.dtype == F32
