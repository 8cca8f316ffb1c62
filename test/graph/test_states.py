"""Tensors of a graph whose memory has other values than they show, cannot be written, or is not there."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn
from cudnn.runtime.tensor_guards import dynamic_shape_guard, guard
from cudnn.strided import readable, resolved
from support.graphs import reference_graph
from support.states import UNSTRIDED, imaginary, negative

X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)


def added(x: Any, y: Any, out: Any, described: Any = X) -> None:
    graph = reference_graph()
    a, b = graph.tensor_like(described, "x"), graph.tensor_like(Y, "y")
    c = graph.add(a, b, name="add").set_output(True)
    graph.build([cudnn.heur_mode.A])
    graph.execute({a: x, b: y, c: out})


@pytest.mark.parametrize("view", [negative, imaginary])
def test_inputs_are_read_as_they_show(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    out, x = torch.empty_like(X), view(X)
    added(x, negative(Y), out, described=x)
    assert torch.equal(out, X + Y)
    with cudnn.Graph(backend="reference") as graph:
        graph.add(x, Y, name="add").set_output(True)
    assert torch.equal(graph(x, Y), X + Y)
    assert torch.equal(graph({"add::0": x, "add::1": Y})["add::OUT_0"], X + Y)


def test_a_scalar_that_is_a_negative_view() -> None:
    with cudnn.Graph(backend="reference") as graph:
        graph.mul(X, negative(torch.full((1, 1, 1), 3.0)), name="mul").set_output(True)
    assert torch.equal(graph(X), 3 * X)
    assert torch.equal(cudnn.Graph.deserialize(graph.serialize())(X), 3 * X)


def test_copies_have_the_strides_of_their_views() -> None:
    x = torch.randn(3, 8)[:, ::2]
    for shown in (x, x[:1].expand(3, 4), x.T, x[:0], torch.randn(())):
        view = torch._neg_view(shown)
        copy = resolved(view)
        assert not copy.is_neg()
        assert copy.stride() == view.stride()
        assert torch.equal(copy, -shown)
        assert copy.data_ptr() != shown.data_ptr() or not copy.numel()
    assert resolved(x) is x
    z = torch.complex(x, x).conj()
    assert torch.equal(torch.view_as_real(resolved(z)), torch.stack([x, -x], -1))


@pytest.mark.parametrize("view", [negative, imaginary])
def test_outputs_that_are_negative_views_are_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    target = view(torch.ones_like(X))
    with pytest.raises(ValueError, match=r"tensor 'add::OUT_0' \(uid \d+\): got a negative view; .* torch.empty\(\)"):
        added(X, Y, target)
    assert bool((target == 1).all())
    with cudnn.Graph(backend="reference") as graph:
        graph.add(X, Y, name="add").set_output(True)
    with pytest.raises(ValueError, match="got a negative view"):
        graph({"add::0": X, "add::1": Y, "add::OUT_0": target})


def _flagged(x: np.ndarray, folder: Path) -> np.ndarray:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


def _broadcast(x: np.ndarray, folder: Path) -> np.ndarray:
    return np.broadcast_to(x, x.shape)


def _mapped(x: np.ndarray, folder: Path) -> np.ndarray:
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize("make", [_flagged, _broadcast, _mapped])
def test_inputs_may_be_read_only(make: Callable[[np.ndarray, Path], np.ndarray], tmp_path: Path) -> None:
    x, out = make(X.numpy(), tmp_path), torch.empty_like(X)
    assert not x.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        added(x, Y, out, described=x)
        with cudnn.Graph(backend="reference") as graph:
            graph.add(x, Y, name="add").set_output(True)
        found = graph(x, Y)
    assert torch.equal(out, X + Y)
    assert torch.equal(found, X + Y)
    with pytest.raises(ValueError, match=r"tensor 'add::OUT_0' \(uid \d+\): got a read-only array; .* array.copy\(\)"):
        added(X, Y, x)
    assert np.array_equal(x, X.numpy())


def test_a_read_only_scalar() -> None:
    scale = np.full((1, 1, 1), 3.0, np.float32)
    scale.flags.writeable = False
    with cudnn.Graph(backend="reference") as graph:
        graph.mul(X, scale, name="mul").set_output(True)
    assert torch.equal(graph(X), 3 * X)
    assert torch.equal(cudnn.Graph.deserialize(graph.serialize())(X), 3 * X)


def test_read_only_arrays_keep_their_strides() -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (x, x[:, ::2], x.T, x[::-1], x[:0], np.broadcast_to(x[0], (3, 6))):
        fixed = view.view()
        fixed.flags.writeable = False
        assert np.array_equal(readable(fixed), view)
        assert readable(fixed).strides == view.strides or not view.size
    assert readable(x) is x


@pytest.mark.parametrize("kind", UNSTRIDED)
def test_tensors_without_strides_are_refused_by_name(kind: str) -> None:
    bad = UNSTRIDED[kind](X)
    for place, arguments in (("'x'", (bad, Y, X)), ("'add::OUT_0'", (X, Y, bad))):
        with pytest.raises(TypeError, match=rf"execute: tensor {place} .*{kind}.*allowed: dense tensors.*To fix it"):
            added(*arguments)
    with pytest.raises(TypeError, match=rf"tensor_like: source 'x': .*{kind}"):
        reference_graph().tensor_like(bad, "x")
    with pytest.raises(TypeError, match=kind), cudnn.Graph(backend="reference") as graph:
        graph.add(bad, Y)


def test_tensors_without_memory_are_refused_by_name() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
    for bad in (X.to("meta"), fake):
        for place, arguments in (("'x'", (bad, Y, X)), ("'add::OUT_0'", (X, Y, bad))):
            with pytest.raises(ValueError, match=rf"tensor {place} .*without data.*allowed: tensors with memory"):
                added(*arguments)
    with pytest.raises(ValueError, match=r"tensor 'x' .*a transform of torch.func.*call an operator of cudnn.ops"):
        torch.vmap(lambda x: added(x, Y, X))(torch.stack([X, X]))


def test_what_later_calls_ask_tells_negative_views_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    views = negative(X), Y
    for known in (guard([X, Y]), dynamic_shape_guard([X, Y])):
        assert known(X, Y)
        assert not known(*views)
        assert not known(X.half(), Y)
        assert not any(known(make(X), Y) for make in (torch.Tensor.to_sparse, torch.Tensor.to_mkldnn))
    assert dynamic_shape_guard([X, Y])(X[:, :1], Y)
    monkeypatch.setattr(torch._C._dynamo, "guards", object())
    assert guard([X, Y])(X, Y)
    assert not guard([X, Y])(*views)
    assert not dynamic_shape_guard([X, Y])(X, Y)  # it cannot tell: each type is asked for
