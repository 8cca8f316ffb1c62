"""How the reference executor reads and writes memory: strides, pointers, DLPack, devices, aliases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cudnn
from cudnn.reference.memory import pack_bits, unpack_bits, view
from support.drawing import shapes, strided
from support.graphs import FLOAT, MODES, like, reference_graph, run


def doubled(x: torch.Tensor, strides: list[int] | None = None) -> tuple[cudnn.pygraph, cudnn.tensor, cudnn.tensor]:
    graph = reference_graph()
    tx = like(graph, x, "x")
    y = graph.add(tx, tx, name="sum").set_output(True)
    if strides is not None:
        y.set_stride(strides)
    graph.build(MODES)
    return graph, tx, y


@given(st.data())
def test_any_strides_in_and_out(data: st.DataObject) -> None:
    dims = data.draw(shapes())
    x, out = data.draw(strided(dims)), data.draw(strided(dims)).fill_(float("nan"))
    graph, tx, y = doubled(x, list(out.stride()))
    graph.execute({tx: x, y: out})
    assert torch.equal(out, 2 * x)


def test_what_lies_between_the_elements_is_left_alone() -> None:
    x = torch.randn(3, 4)
    memory = torch.full((3, 12), 7.0)
    graph, tx, y = doubled(x, [12, 1])
    graph.execute({tx: x, y: memory[:, 4:8]})
    assert torch.equal(memory[:, 4:8], 2 * x)
    assert bool((memory[:, :4] == 7).all())
    assert bool((memory[:, 8:] == 7).all())


def test_overlapping_inputs() -> None:
    row = torch.randn(5)
    graph = reference_graph()
    tx = graph.tensor([3, 5], [0, 1], name="x")
    y = graph.relu(tx).set_output(True).set_stride([5, 1])
    (out,) = run(graph, {tx: row}, y)
    assert torch.equal(out, torch.relu(row).expand(3, 5))


def test_numpy_arrays_in_and_out() -> None:
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    out = np.full((4, 6), np.nan, dtype="float32")
    graph, tx, y = doubled(torch.from_numpy(x))
    graph.execute({tx: x, y: out})
    np.testing.assert_array_equal(out, 2 * x)


def test_buffers_with_gradients() -> None:
    x, out = torch.randn(4, 6, requires_grad=True), torch.empty(4, 6)
    graph, tx, y = doubled(x.detach())
    graph.execute({tx: x, y: out})
    assert torch.equal(out, 2 * x.detach())
    assert out.grad_fn is None


def test_a_buffer_in_the_middle_of_a_storage() -> None:
    memory = torch.randn(100)
    graph, tx, y = doubled(torch.empty(4, 6))
    graph.execute({tx: memory[4:28].view(4, 6), y: memory[40:64].view(4, 6)})
    assert torch.equal(memory[40:64], 2 * memory[4:28])


def test_an_intermediate_result_that_is_an_output_too() -> None:
    x = torch.randn(4, 6)
    graph = reference_graph()
    tx = like(graph, x)
    first = graph.relu(tx).set_output(True)
    second = graph.neg(first).set_output(True)
    outs = run(graph, {tx: x}, first, second)
    assert torch.equal(outs[0], torch.relu(x))
    assert torch.equal(outs[1], -torch.relu(x))


def test_scalars_stay_on_the_cpu_and_may_change() -> None:
    x, graph = torch.randn(4, 6), reference_graph()
    tx, factor = like(graph, x), graph.tensor_like(torch.ones(1, 1))
    y = graph.mul(tx, factor).set_output(True)
    for value in (2.0, -3.0):
        (out,) = run(graph, {tx: x, factor: torch.full((1, 1), value)}, y)
        assert torch.equal(out, value * x)


def test_addresses_are_aligned() -> None:
    with pytest.raises(ValueError, match=r"here: memory: got address .*; allowed: a multiple of 4 bytes for FLOAT"):
        view(torch.zeros(41, dtype=torch.uint8)[1:], FLOAT, [10], [1], "here")


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(1, 4), max_size=3), st.randoms())
def test_bits_there_and_back(batch: int, groups: int, spatial: list[int], random: Any) -> None:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    mask = torch.randint(0, 2, (batch, groups * 8, *spatial), generator=generator).bool()
    assert torch.equal(unpack_bits(pack_bits(mask)), mask)


def test_rows_between_the_entries_of_a_ragged_tensor_are_left_alone() -> None:
    graph = reference_graph()
    heads, size, lengths, starts = 2, 8, (3, 2), (0, 5, 10)  # tokens; two and three lie between
    step = heads * size
    offset = graph.tensor([3, 1, 1, 1], [1] * 4, cudnn.data_type.INT32)
    q, k, v = (graph.tensor([2, heads, 4, size], [4 * step, size, step, 1]).set_ragged_offset(offset) for _ in "qkv")
    rows = graph.tensor([2, 1, 1, 1], [1] * 4, cudnn.data_type.INT32)
    o = graph.sdpa(q, k, v, is_inference=True, use_padding_mask=True, seq_len_q=rows, seq_len_kv=rows)[0]
    assert o is not None
    o.set_output(True).set_dim(q.get_dim()).set_stride(q.get_stride()).set_ragged_offset(offset)
    graph.build(MODES)
    output = torch.full((10, heads, size), float("nan"))
    data = {tensor: torch.randn(10, heads, size) for tensor in (q, k, v)}
    counts = torch.tensor(lengths, dtype=torch.int32)
    graph.execute({**data, offset: step * torch.tensor(starts, dtype=torch.int32), rows: counts, o: output})
    written = ~output.isnan().flatten(1).any(1)
    assert written.tolist() == [True] * 3 + [False] * 2 + [True] * 2 + [False] * 3
