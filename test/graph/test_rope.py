"""Rotary position embedding: values against complex rotation, gradient, refusals, what cuDNN takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.graphs import FLOAT, HALF, configurations, like, planned_graph, reference_graph, run
from support.refusals import check_refused


def angles(positions: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    half = torch.rand(positions, 1, 1, dim // 2, generator=generator) * 6
    return torch.cat([half, half], -1)


def rotated(x: torch.Tensor, freqs: torch.Tensor, dim: int, scale: float) -> torch.Tensor:
    """Pairs (j, j + dim / 2) of the last ``dim`` elements as complex numbers, turned by the angle of their position."""
    start, half = x.shape[-1] - dim, dim // 2
    pairs = torch.complex(x[..., start : start + half], x[..., start + half :])
    theta = freqs[: x.shape[2], 0, 0, :half]
    turned = pairs * torch.polar(torch.ones_like(theta), theta)
    return torch.cat([x[..., :start], turned.real, turned.imag], -1) * scale


@settings(max_examples=20, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 3),
    positions=st.integers(1, 6),
    halves=st.integers(1, 4),
    passed=st.integers(0, 3),
    more=st.integers(0, 2),
    scale=st.sampled_from([1.0, -0.5]),
    seed=st.integers(0, 2**31),
)
def test_rotation_and_its_gradient(
    batch: int, heads: int, positions: int, halves: int, passed: int, more: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dim = 2 * halves
    x, dy = (torch.randn(batch, heads, positions, dim + passed, generator=generator) for _ in range(2))
    freqs = angles(positions + more, dim, generator)
    expected = rotated(x, freqs, dim, scale)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(rotated(leaf, freqs, dim, scale), leaf, dy)

    graph = reference_graph()
    tx, tf, td = like(graph, x), like(graph, freqs, "freqs"), like(graph, dy)
    y = graph.rope(tx, tf, scale, dim if passed else 0, name="r").set_output(True)
    dx = graph.rope_backward(td, tf, output_scale=scale, rope_dim=dim).set_output(True)
    assert y.get_name() == "r::Y"
    results = run(graph, {tx: x, tf: freqs, td: dy}, y, dx)
    torch.testing.assert_close(results, (expected, gradient), rtol=1e-4, atol=1e-5)


def test_other_layouts_of_angles() -> None:
    generator = torch.Generator().manual_seed(0)
    x, freqs = torch.randn(2, 3, 5, 8), angles(5, 4, generator)
    expected = rotated(x, freqs, 4, 2.0)
    for shape in ([5, 4], [1, 5, 4], [1, 1, 5, 4]):
        graph = reference_graph()
        tx, tf = like(graph, x).set_uid(1), like(graph, freqs.view(shape)).set_uid(2)
        y = graph.rope(tx, tf, output_scale=2.0, rope_dim=4).set_output(True).set_uid(3)
        (result,) = run(graph, {tx: x, tf: freqs}, y)
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda g, x: g.rope(x, g.tensor([4, 1, 1, 8], [8, 8, 8, 1])), ["freqs", "dim=[5, 1, 1, 8]"]),
        (lambda g, x: g.rope(x, g.tensor([5, 1, 1, 4], [4, 4, 4, 1])), ["freqs", "dim=[5, 1, 1, 8]"]),
        (lambda g, x: g.rope(x, g.tensor([2, 1, 5, 8], [40, 40, 8, 1])), ["freqs", "the angles of each position"]),
        (lambda g, x: g.rope(x, x, rope_dim=3), ["rope_dim: got 3", "even number up to the head size, 8"]),
        (lambda g, x: g.rope(x, x, rope_dim=10), ["rope_dim: got 10"]),
        (lambda g, x: g.rope(g.tensor([5, 8], [8, 1]), x), ["rank"]),
        (
            lambda g, x: g.rope_backward(x, g.tensor([5, 1, 1, 8], [8, 8, 8, 1])).set_dim([1, 3, 5, 8]),
            ["rope_backward", "output DX", "dim=[2, 3, 5, 8]"],
        ),
    ],
)
def test_refusals(build: Callable[..., Any], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, graph.tensor([2, 3, 5, 8], [120, 40, 8, 1])), ValueError, ["rope", *words])


def test_cudnn_fuses_it_into_attention(device_properties: Any, libcudnn: Any) -> None:
    if libcudnn.version < 92400:
        pytest.skip("this cuDNN does not have the operation")
    graph = planned_graph(device_properties)
    q, k, v = (graph.tensor([2, 4, 128, 128], [65536, 16384, 128, 1]) for _ in range(3))
    freqs = graph.tensor([128, 1, 1, 128], [128, 128, 128, 1], FLOAT)
    turned = [graph.rope(tensor, freqs).set_data_type(HALF) for tensor in (q, k)]
    o, _ = graph.sdpa(*turned, v, generate_stats=False, attn_scale=0.1)
    o.set_output(True)
    assert configurations(graph) > 0
    graph.build_plans()
    assert graph.get_plan_name()
