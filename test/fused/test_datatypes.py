"""Types of the CuTe DSL for PyTorch's, as programs with custom kernels query them."""

from __future__ import annotations

import subprocess
import sys

import cutlass
import pytest
import torch

import cudnn
from cudnn.datatypes import _convert_to_cutlass_data_type, _torch_to_cutlass_data_type, is_cutlass_available

TYPES = {
    torch.float64: cutlass.Float64,
    torch.float32: cutlass.Float32,
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
    torch.float8_e8m0fnu: cutlass.Float8E8M0FNU,
    torch.float4_e2m1fn_x2: cutlass.Float4E2M1FN,
    torch.int8: cutlass.Int8,
    torch.int16: cutlass.Int16,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
    torch.uint8: cutlass.Uint8,
    torch.bool: cutlass.Boolean,
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(dtype: torch.dtype) -> None:
    assert is_cutlass_available()
    assert _torch_to_cutlass_data_type(dtype) is _convert_to_cutlass_data_type(dtype) is TYPES[dtype]
    assert _convert_to_cutlass_data_type(TYPES[dtype]) is TYPES[dtype]


def test_bytes_are_four_bit_elements_if_asked_for() -> None:
    for convert in (_torch_to_cutlass_data_type, _convert_to_cutlass_data_type):
        assert convert(torch.uint8, interpret_uint8_as_fp4x2=True) is cutlass.Float4E2M1FN
        assert convert(torch.int8, interpret_uint8_as_fp4x2=True) is cutlass.Int8


def test_types_of_graphs() -> None:
    assert _convert_to_cutlass_data_type(cudnn.data_type.FP8_E4M3) is cutlass.Float8E4M3FN


@pytest.mark.parametrize("dtype", [torch.complex64, "float32", None, cudnn.data_type.INT8x4], ids=str)
def test_no_such_type(dtype: object) -> None:
    assert _torch_to_cutlass_data_type(dtype) is None
    with pytest.raises(ValueError, match=r"data type for the CuTe DSL: dtype: got .*; allowed: torch.float32, torch"):
        _convert_to_cutlass_data_type(dtype)


def test_the_dsl_is_loaded_by_a_call_alone() -> None:
    program = """if True:
        import sys
        from cudnn.datatypes import _convert_to_cutlass_data_type, is_cutlass_available
        assert "cutlass" not in sys.modules
        assert is_cutlass_available() and "cutlass" in sys.modules
        """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_the_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cudnn_kernels.fakes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    assert not is_cutlass_available()
    with pytest.raises(ImportError):
        _convert_to_cutlass_data_type(torch.float32)
