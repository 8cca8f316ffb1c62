"""``cudnn.tensor``: described by shape and stride, by arrays and by other graph tensors; getters and setters."""

from __future__ import annotations

import enum
import json
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import cudnn
from cudnn.datatypes import _cudnn_to_torch_data_type, _torch_to_cudnn_data_type, dlpack_to_data_type
from support.drawing import shapes, strided

TORCH_TYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]


class Uid(enum.IntEnum):
    X = 0
    Y = 5


@pytest.fixture
def graph() -> cudnn.pygraph:
    return cudnn.pygraph()


@pytest.mark.parametrize("sequence", [list, tuple, torch.Size])
def test_dims_are_any_sequence(graph: cudnn.pygraph, sequence: type[Sequence[int]]) -> None:
    tensor = graph.tensor(dim=sequence((2, 3)), stride=sequence((3, 1)))
    assert tensor.get_dim() == [2, 3]
    assert tensor.get_stride() == [3, 1]


def test_defaults(graph: cudnn.pygraph) -> None:
    tensor = graph.tensor(dim=[1], stride=[1])
    assert tensor.get_name() == ""
    assert tensor.get_uid() == 0
    assert tensor.get_data_type() is cudnn.data_type.NOT_SET
    assert not tensor.get_is_virtual()
    assert not tensor.get_is_pass_by_value()
    assert tensor.get_alignment() == 16
    assert tensor.get_vector_count() == 1
    assert tensor.get_reordering_type() is cudnn.tensor_reordering.NONE
    assert not tensor.get_has_compile_time_constant()


def test_setters_chain_and_getters_return_copies() -> None:
    tensor = cudnn.tensor()
    offsets = cudnn.tensor()
    chained = (
        tensor.set_name("t")
        .set_uid(Uid.Y)
        .set_dim((2, 3))
        .set_stride([3, 1])
        .set_data_type(torch.bfloat16)
        .set_output(False)
        .set_is_pass_by_value(False)
        .set_reordering_type(cudnn.tensor_reordering.F8_128x4)
        .set_alignment(32)
        .set_vector_count_and_dimension(4, 1)
        .set_ragged_offset(offsets)
        .set_ragged_offset_multiplier(2)
    )
    assert chained is tensor
    assert (tensor.get_name(), tensor.get_uid(), type(tensor.get_uid())) == ("t", 5, int)
    assert tensor.get_data_type() is cudnn.data_type.BFLOAT16
    assert tensor.get_is_virtual()
    assert tensor.get_reordering_type() is cudnn.tensor_reordering.F8_128x4
    assert tensor.get_alignment() == 32
    assert (tensor.get_vector_count(), tensor.get_vector_dimension()) == (4, 1)
    assert tensor.get_ragged_offset() is offsets
    assert tensor.get_ragged_offset_multiplier() == 2
    tensor.get_dim().append(9)
    assert tensor.get_dim() == [2, 3]
    ragged = cudnn.pygraph().tensor([2, 1], [1, 1], ragged_offset=offsets, ragged_offset_multiplier=64)
    assert (ragged.get_ragged_offset(), ragged.get_ragged_offset_multiplier()) == (offsets, 64)


def test_set_output_is_the_opposite_of_virtual() -> None:
    tensor = cudnn.tensor().set_output(False)
    assert tensor.get_is_virtual()
    assert not tensor.set_output(True).get_is_virtual()
    assert tensor.set_is_virtual(True).get_is_virtual()


def test_uids(graph: cudnn.pygraph) -> None:
    assert graph.tensor(dim=[1], stride=[1], uid=Uid.X).get_uid() == 0
    assert json.loads(repr(graph.tensor(dim=[1], stride=[1], uid=0)))["uid"] == 0
    assert json.loads(repr(graph.tensor(dim=[1], stride=[1])))["uid"] is None
    with pytest.raises(ValueError, match="tensor 'x': uid: got -3; allowed: 0 to"):
        cudnn.tensor().set_name("x").set_uid(-3)


def test_tensors_compare_by_identity(graph: cudnn.pygraph) -> None:
    first, second = graph.tensor(dim=[1], stride=[1], uid=1), graph.tensor(dim=[1], stride=[1], uid=1)
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_torch_types(graph: cudnn.pygraph, dtype: torch.dtype) -> None:
    kind = _torch_to_cudnn_data_type(dtype)
    assert kind is not None
    assert _cudnn_to_torch_data_type(kind) is dtype
    assert graph.tensor_like(torch.empty(2, 4, dtype=dtype)).get_data_type() is kind
    assert graph.tensor(dim=[1], stride=[1], data_type=dtype).get_data_type() is kind


def test_other_types_are_refused(graph: cudnn.pygraph) -> None:
    with pytest.raises(ValueError, match=r"data type: got torch.complex64; allowed: a cudnn.data_type or one of"):
        graph.tensor(dim=[1], stride=[1], data_type=torch.complex64)
    with pytest.raises(ValueError, match="data type: got 'float'"):
        cudnn.tensor().set_data_type("float")


@given(shapes().flatmap(strided))
def test_like_a_torch_tensor(data: torch.Tensor) -> None:
    tensor = cudnn.pygraph().tensor_like(data, name="x")
    assert tensor.get_dim() == list(data.shape)
    assert tensor.get_stride() == list(data.stride())
    assert tensor.get_data_type() is cudnn.data_type.FLOAT
    assert tensor.get_name() == "x"
    assert tensor.get_is_pass_by_value() == (data.numel() == 1)


@given(shapes().flatmap(strided))
def test_like_a_dlpack_array(data: torch.Tensor) -> None:
    array = data.numpy()
    tensor = cudnn.pygraph().tensor_like(array)
    assert tensor.get_dim() == list(array.shape)
    assert tensor.get_stride() == [step // 4 for step in array.strides]
    assert tensor.get_data_type() is cudnn.data_type.FLOAT


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"])
def test_dlpack_types(graph: cudnn.pygraph, name: str) -> None:
    tensor = graph.tensor_like(np.zeros((2, 2), dtype=name))
    assert _cudnn_to_torch_data_type(tensor.get_data_type()) is getattr(torch, name)


def test_an_unknown_dlpack_type_is_not_set(graph: cudnn.pygraph) -> None:
    assert graph.tensor_like(np.zeros((2, 2), dtype="uint16")).get_data_type() is cudnn.data_type.NOT_SET
    assert dlpack_to_data_type(99, 16) is cudnn.data_type.NOT_SET


def test_pytorchs_functions_and_operators_refuse_it(graph: cudnn.pygraph) -> None:
    x: Any = graph.tensor_like(torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"torch\.relu: argument: got a cudnn\.tensor, which has no data.*graph\.relu"):
        torch.relu(x)
    for compute in (lambda: x + 1, lambda: 2 * x, lambda: -x, lambda: x @ x, lambda: torch.zeros(2, 2) + x):
        with pytest.raises(TypeError, match=r"operand: got a cudnn\.tensor, which has no data.*graph\.add"):
            compute()


def test_what_is_no_array(graph: cudnn.pygraph) -> None:
    with pytest.raises(ValueError, match=r"tensor_like: source: got list; allowed: a cudnn.tensor"):
        graph.tensor_like([1, 2])


def test_scalars_on_the_cpu_are_passed_by_value(graph: cudnn.pygraph) -> None:
    for scalar in (torch.tensor(2.0), torch.zeros(1, 1, 1, 1), np.zeros((1, 1), dtype="float32")):
        tensor = graph.tensor_like(scalar)
        assert tensor.get_is_pass_by_value()
        assert tensor.get_dim() == [1] * max(1, scalar.ndim)
    assert not graph.tensor_like(torch.zeros(2)).get_is_pass_by_value()


def test_like_a_graph_tensor_copies_all_but_uid_and_name(graph: cudnn.pygraph) -> None:
    offsets = graph.tensor(dim=[3, 1, 1, 1], stride=[1, 1, 1, 1], data_type=cudnn.data_type.INT32)
    source = graph.tensor(
        dim=[2, 3],
        stride=[1, 2],
        data_type=torch.int8,
        is_virtual=True,
        ragged_offset=offsets,
        reordering_type=cudnn.tensor_reordering.F8_128x4,
        name="source",
        uid=4,
    ).set_alignment(64)
    copy = graph.tensor_like(source)
    assert copy is not source
    assert copy.get_name() == ""
    assert copy.get_uid() == 0
    assert copy.get_ragged_offset() is offsets
    assert json.loads(repr(copy.set_name("source").set_uid(4))) == json.loads(repr(source))
    copy.set_dim([7, 7])
    assert source.get_dim() == [2, 3]


def test_like_an_output_of_another_graph() -> None:
    """The forward graph's outputs describe inputs of the backward graph, once they are inferred."""
    forward = cudnn.pygraph(io_data_type=torch.float16, compute_data_type=torch.float32)
    y = forward.relu(forward.tensor(dim=[2, 3], stride=[3, 1]), name="act").set_output(True)
    assert y.get_dim() == []
    forward.validate()
    copy = cudnn.pygraph().tensor_like(y)
    assert (copy.get_dim(), copy.get_stride(), copy.get_is_virtual()) == ([2, 3], [3, 1], False)
    assert copy.get_data_type() is cudnn.data_type.HALF


@pytest.mark.parametrize(
    ("value", "dtype_name"),
    [(1.5, "FLOAT"), (3, "INT32"), (-(2**31), "INT32"), (2**31, "INT64"), (-(2**40), "INT64")],
)
def test_scalar_constants(graph: cudnn.pygraph, value: float, dtype_name: str) -> None:
    tensor = graph.tensor_scalar(value, cudnn.scalar_type.RUNTIME_PARAM)
    assert tensor.get_data_type().name == dtype_name
    assert tensor.get_dim() == [1]
    assert tensor.get_is_pass_by_value()
    assert not tensor.get_has_compile_time_constant()
    fixed = graph.tensor_scalar(value, cudnn.scalar_type.COMPILE_TIME_CONST)
    assert fixed.get_has_compile_time_constant()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": [], "stride": []}, r"dim=\[\], stride=\[\]; allowed: both set"),
        ({"dim": [2, 3], "stride": [1]}, r"dim=\[2, 3\] with stride=\[1\]; allowed: one stride per dimension"),
        ({"dim": [2, 0], "stride": [1, 1]}, r"dim=\[2, 0\]; allowed: positive extents"),
        ({"dim": [2] * 9, "stride": [1] * 9}, "rank 9; allowed: rank 1 to 8"),
        ({"dim": [2, 2], "stride": [2, 1], "is_virtual": True, "is_pass_by_value": True}, "virtual and pass-by-value"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    graph = cudnn.pygraph(
        io_data_type=torch.float16, intermediate_data_type=torch.float32, compute_data_type=torch.float32
    )
    graph.relu(graph.tensor(**options, name="odd"), name="act").set_output(True)
    with pytest.raises(ValueError, match=f"act.*tensor 'odd'.*{message}"):
        graph.validate()


ENUMERATIONS = [value for value in vars(cudnn).values() if isinstance(value, type) and issubclass(value, enum.Enum)]


@pytest.mark.parametrize("enum_type", ENUMERATIONS, ids=lambda enum_type: enum_type.__name__)
def test_enumerations_print_by_name(enum_type: type[enum.IntEnum]) -> None:
    for member in enum_type:
        text = f"{enum_type.__name__}.{member.name}"
        assert (str(member), f"{member}", repr(member)) == (text, text, f"<{text}: {member.value}>")
        assert member == member.value
        assert pickle.loads(pickle.dumps(member)) is member
