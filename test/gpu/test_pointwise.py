"""Element-wise operations on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import cudnn
from cudnn.pygraph import known_faults
from gpu.common import IO_TYPES, assert_accurate, gpu_graph, workspace
from support.fuzz.chain import OPS
from support.graphs import MODES, like, run

BOOLEAN = cudnn.data_type.BOOLEAN


def draw(
    kind: torch.dtype, low: float = -2.0, dims: tuple[int, ...] = (4, 96, 128), width: float = 3.25
) -> torch.Tensor:
    """In fp16 odd multiples of 2^-9, at none of which a derivative jumps."""
    return ((torch.randint(round(256 * width), dims, device="cuda") + 0.5) / 256 + low).to(kind)


CASES = [(name, kind) for name, op in OPS.items() for kind in IO_TYPES[: 3 if len(op.domains) == 1 else 1]]


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if not case[0].startswith("logical")], ids=str)
def test_values(name: str, kind: torch.dtype) -> None:
    op = OPS[name]
    lows = [-2.0, 2.75] if name == "mod" else [max(low, 0.25 if low > 0 else -2.0) for low, _ in op.domains]
    widths = [min(high - low, 1.25 if low > 0 else 3.25) for low, (_, high) in zip(lows, op.domains, strict=True)]
    arguments = op.suited(*(draw(kind, low, width=width) for low, width in zip(lows, widths, strict=True)))
    graph = gpu_graph(io=kind)
    tensors = [like(graph, x) for x in arguments]
    if name == "binary_select":
        tensors[2] = graph.cmp_gt(tensors[0], tensors[1]).set_data_type(BOOLEAN)
        arguments[2] = arguments[0] > arguments[1]
    out = op.add(graph, *tensors).set_output(True)
    kwargs = {tensor: x for tensor, x in zip(tensors, arguments, strict=True) if not tensor.get_is_virtual()}
    (result,) = run(graph, kwargs, out)
    assert_accurate(result, lambda dtype: op.function(*(x.to(dtype) for x in arguments)).to(dtype), kind)


@pytest.mark.parametrize("dims", [(1, 1, 128), (1, 96, 1), (4, 1, 1), (4, 96, 1), (1, 96, 128), (96, 128)])
def test_broadcast(dims: tuple[int, ...]) -> None:
    a, b = draw(torch.bfloat16), draw(torch.bfloat16, dims=dims)
    try:
        graph = gpu_graph(io=torch.bfloat16)
        tensors = {like(graph, a): a, like(graph, b): b}
        (result,) = run(graph, tensors, graph.add(*tensors).set_output(True))
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
    data = {x1: halves[0], x2: halves[1], c: cos, s: sin, outs[0]: halves[0], outs[1]: halves[1]}
    graph.execute(data, workspace(graph))

    def rotated(dtype: torch.dtype) -> torch.Tensor:
        a, b, cosine, sine = (item.to(dtype) for item in (before[..., :16], before[..., 16:], cos, sin))
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    assert_accurate(memory, rotated, kind)


@pytest.mark.parametrize(
    ("method", "formula"),
    [("logical_and", torch.bitwise_and), ("logical_or", torch.bitwise_or), ("logical_not", torch.bitwise_not)],
)
def test_logic(method: str, formula: Callable[..., torch.Tensor]) -> None:
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
    graph.execute({**dict(zip(inputs, data, strict=True)), y: result}, workspace(graph))
    assert torch.equal(result, formula(*data))


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
