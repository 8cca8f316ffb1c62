"""Element-wise operations on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnn
from cudnn.pygraph import known_faults
from gpu.common import IO_TYPES, assert_accurate, gpu_graph
from support.graphs import MODES, like, run

pytestmark = pytest.mark.gpu
BOOLEAN, INT32 = cudnn.data_type.BOOLEAN, cudnn.data_type.INT32

Formula = Callable[..., torch.Tensor]
UNARY: dict[str, tuple[Formula, float]] = {  # formula, lowest value drawn
    "sqrt": (torch.sqrt, 0.1), "rsqrt": (torch.rsqrt, 0.1), "reciprocal": (torch.reciprocal, 0.1),
    "erf": (torch.erf, -2), "identity": (torch.clone, -2), "exp": (torch.exp, -2), "log": (torch.log, 0.1),
    "neg": (torch.neg, -2), "abs": (torch.abs, -2), "ceil": (torch.ceil, -2), "floor": (torch.floor, -2),
    "sin": (torch.sin, -2), "cos": (torch.cos, -2), "tan": (torch.tan, -1.2), "tanh": (torch.tanh, -2),
    "elu": (F.elu, -2), "gelu": (F.gelu, -2), "gelu_approx_tanh": (lambda x: F.gelu(x, approximate="tanh"), -2),
    "sigmoid": (torch.sigmoid, -2), "softplus": (F.softplus, -2), "relu": (F.relu, -2), "swish": (F.silu, -2),
}  # fmt: skip
BINARY: dict[str, Formula] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
    "add_square": lambda a, b: a + b * b, "bias": torch.add, "scale": torch.mul, "pow": torch.pow, "mod": torch.fmod,
}  # fmt: skip
COMPARISONS = {"cmp_eq": "eq", "cmp_neq": "ne", "cmp_gt": "gt", "cmp_ge": "ge", "cmp_lt": "lt", "cmp_le": "le"}


def draw(kind: torch.dtype, low: float = -2.0, dims: tuple[int, ...] = (4, 96, 128)) -> torch.Tensor:
    return (torch.rand(dims, device="cuda") * (1.25 - low) + low).to(kind)


def one_node(method: str, *data: torch.Tensor, kind: object = None, io: object = None, **options: Any) -> torch.Tensor:
    graph = gpu_graph(io=data[0].dtype if io is None else io)
    tensors = [like(graph, item) for item in data]
    out = getattr(graph, method)(*tensors, **options).set_output(True)
    if kind is not None:
        out.set_data_type(kind)
    return run(graph, dict(zip(tensors, data, strict=True)), out)[0]


@pytest.mark.parametrize("kind", IO_TYPES, ids=str)
@pytest.mark.parametrize("method", UNARY)
def test_unary(method: str, kind: torch.dtype) -> None:
    formula, low = UNARY[method]
    x = draw(kind, low)
    assert_accurate(one_node(method, x), lambda dtype: formula(x.to(dtype)), kind)


@pytest.mark.parametrize("method", BINARY)
def test_binary(method: str) -> None:
    low = 0.25 if method in ("div", "pow", "mod") else -2
    a, b = draw(torch.float16, low), draw(torch.float16, low)
    if method == "mod":  # discontinuous: only quotients far from a whole number tell
        b = b + 2.5
    result = one_node(method, a, b)
    assert_accurate(result, lambda dtype: BINARY[method](a.to(dtype), b.to(dtype)), torch.float16)


@pytest.mark.parametrize("dims", [(1, 1, 128), (1, 96, 1), (4, 1, 1), (4, 96, 1), (1, 96, 128), (96, 128)])
def test_broadcast(dims: tuple[int, ...]) -> None:
    a, b = draw(torch.bfloat16), draw(torch.bfloat16, dims=dims)
    try:
        result = one_node("add", a, b)
    except cudnn.cudnnGraphNotSupportedError:
        # 9.19 adds a wrong operand beyond the first batch entry, so the library refuses all but one number per row,
        # and a matrix that all entries share.
        assert cudnn.backend_version() <= known_faults.SEEN_IN
        assert dims not in ((4, 96, 1), (1, 96, 128), (96, 128))
        return
    assert_accurate(result, lambda dtype: a.to(dtype) + b.to(dtype), torch.bfloat16)


@pytest.mark.parametrize("kind", IO_TYPES, ids=str)
def test_rotary_embeddings_in_place(kind: torch.dtype) -> None:
    """Element-wise operations alone on the strided halves of a tensor, with a matrix that all batch entries share."""
    memory = draw(kind, dims=(256, 4096, 32))
    cos, sin = draw(kind, dims=(1, 4096, 16)), draw(kind, dims=(1, 4096, 16))
    graph = gpu_graph(io=kind)
    x1, x2, c, s = (like(graph, item) for item in (memory[..., :16], memory[..., 16:], cos, sin))
    outs = [
        graph.sub(graph.mul(x1, c), graph.mul(x2, s)).set_output(True).set_stride(x1.get_stride()),
        graph.add(graph.mul(x2, c), graph.mul(x1, s)).set_output(True).set_stride(x1.get_stride()),
    ]
    graph.build(MODES)
    before = memory.clone()
    halves = memory[..., :16], memory[..., 16:]
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    data = {x1: halves[0], x2: halves[1], c: cos, s: sin, outs[0]: halves[0], outs[1]: halves[1]}
    graph.execute(data, workspace)

    def rotated(dtype: torch.dtype) -> torch.Tensor:
        a, b, cosine, sine = (item.to(dtype) for item in (before[..., :16], before[..., 16:], cos, sin))
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    assert_accurate(memory, rotated, kind)


@pytest.mark.parametrize("method", COMPARISONS)
def test_comparisons(method: str) -> None:
    a, b = (torch.randint(-2, 3, (4, 96, 128), device="cuda").half() for _ in "ab")
    expected = getattr(torch, COMPARISONS[method])(a, b)
    assert torch.equal(one_node(method, a, b), expected.half())


@pytest.mark.parametrize(
    ("method", "formula"),
    [("logical_and", torch.bitwise_and), ("logical_or", torch.bitwise_or), ("logical_not", torch.bitwise_not)],
)
def test_logic(method: str, formula: Formula) -> None:
    # The engine keeps eight elements a byte, along the fastest dimension.
    data = [
        torch.randint(0, 256, (4, 96, 16), device="cuda", dtype=torch.uint8)
        for _ in range(1 if method == "logical_not" else 2)
    ]
    graph = gpu_graph(io=BOOLEAN, intermediate=BOOLEAN, compute=BOOLEAN)
    inputs = [graph.tensor([4, 96, 128], [96 * 128, 128, 1]) for _ in data]
    y = getattr(graph, method)(*inputs).set_output(True)
    graph.build(MODES)
    result = torch.full_like(data[0], 0xA5)
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    graph.execute({**dict(zip(inputs, data, strict=True)), y: result}, workspace)
    assert torch.equal(result, formula(*data))


@pytest.mark.parametrize(
    "options", [{}, {"negative_slope": 0.1}, {"lower_clip": -0.5, "upper_clip": 0.75}, {"upper_clip": 6}]
)
def test_relu_options(options: dict[str, Any]) -> None:
    x, dy = draw(torch.float16), draw(torch.float16)
    low, slope, high = (
        options.get("lower_clip", 0.0),
        options.get("negative_slope", 0.0),
        options.get("upper_clip", 1e4),
    )
    for kink in (low, high):  # there the derivative is a matter of rounding
        x = torch.where((x - kink).abs() < 0.02, x + 0.05, x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (F.leaky_relu(x - low, slope) + low).clamp(max=high)

    assert_accurate(one_node("relu", x, **options), lambda dtype: forward(x.to(dtype)), torch.float16)
    check_backward("relu_backward", forward, x, dy, **options)


@pytest.mark.parametrize("beta", [None, 0.5])
def test_swish_beta(beta: float | None) -> None:
    x, dy = draw(torch.float16), draw(torch.float16)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid((beta or 1.0) * x)

    assert_accurate(one_node("swish", x, swish_beta=beta), lambda dtype: forward(x.to(dtype)), torch.float16)
    check_backward("swish_backward", forward, x, dy, swish_beta=beta)


@pytest.mark.parametrize("method", ["tanh", "sigmoid", "elu", "gelu", "gelu_approx_tanh", "softplus"])
def test_backward(method: str) -> None:
    check_backward(f"{method}_backward", UNARY[method][0], draw(torch.float16), draw(torch.float16))


def check_backward(method: str, forward: Formula, x: torch.Tensor, dy: torch.Tensor, **options: Any) -> None:
    def gradient(dtype: torch.dtype) -> torch.Tensor:
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(forward(leaf), leaf, dy.to(dtype))[0]

    assert_accurate(one_node(method, dy, x, **options), gradient, torch.float16)


def test_gen_index_and_select() -> None:
    x, y = draw(torch.float16), draw(torch.float16)
    graph = gpu_graph(io=torch.float16)
    first, second = like(graph, x), like(graph, y)
    column = graph.gen_index(first, axis=2)
    row = graph.gen_index(first, axis=1)
    mask = graph.cmp_ge(row, column).set_data_type(BOOLEAN)
    out = graph.binary_select(first, second, mask).set_output(True)
    try:
        (result,) = run(graph, {first: x, second: y}, out)
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error)[:200])
    triangle = torch.ones(96, 128, dtype=torch.bool, device="cuda").tril()
    assert torch.equal(result, torch.where(triangle, x, y))
