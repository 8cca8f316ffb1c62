"""Small operation graphs made of backend descriptors alone, without the graph builder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn.backend.descriptor import Descriptor
from cudnn.backend.engine import OperationGraph
from cudnn.backend.enums import Attribute, ConvolutionMode, DataType, DescriptorType


def tensor(uid: int, dims: Sequence[int], strides: Sequence[int], dtype: DataType = DataType.HALF) -> Descriptor:
    """A tensor in device memory."""
    return Descriptor.make(
        DescriptorType.TENSOR,
        {
            Attribute.TENSOR_DATA_TYPE: dtype,
            Attribute.TENSOR_DIMENSIONS: dims,
            Attribute.TENSOR_STRIDES: strides,
            Attribute.TENSOR_UNIQUE_ID: uid,
            Attribute.TENSOR_BYTE_ALIGNMENT: 16,
        },
    )


def matmul(batch: int = 2, m: int = 128, n: int = 256, k: int = 64, **options: Any) -> OperationGraph:
    """C (uid 3) = A (1) @ B (2), row-major fp16. ``options`` are those of ``OperationGraph``."""
    operation = Descriptor.make(
        DescriptorType.OPERATION_MATMUL,
        {
            Attribute.OPERATION_MATMUL_ADESC: tensor(1, [batch, m, k], [m * k, k, 1]),
            Attribute.OPERATION_MATMUL_BDESC: tensor(2, [batch, k, n], [k * n, n, 1]),
            Attribute.OPERATION_MATMUL_CDESC: tensor(3, [batch, m, n], [m * n, n, 1]),
            Attribute.OPERATION_MATMUL_DESC: Descriptor.make(
                DescriptorType.MATMUL, {Attribute.MATMUL_COMP_TYPE: DataType.FLOAT}
            ),
        },
    )
    return OperationGraph([operation], **options)


def convolution() -> OperationGraph:
    """Y (uid 3) = X (1) * W (2): 3x3, padding 1, channels last, fp16."""
    description = Descriptor.make(
        DescriptorType.CONVOLUTION,
        {
            Attribute.CONVOLUTION_COMP_TYPE: DataType.FLOAT,
            Attribute.CONVOLUTION_CONV_MODE: ConvolutionMode.CROSS_CORRELATION,
            Attribute.CONVOLUTION_SPATIAL_DIMS: 2,
            Attribute.CONVOLUTION_PRE_PADDINGS: [1, 1],
            Attribute.CONVOLUTION_POST_PADDINGS: [1, 1],
            Attribute.CONVOLUTION_DILATIONS: [1, 1],
            Attribute.CONVOLUTION_FILTER_STRIDES: [1, 1],
        },
    )
    operation = Descriptor.make(
        DescriptorType.OPERATION_CONVOLUTION_FORWARD,
        {
            Attribute.OPERATION_CONVOLUTION_FORWARD_X: tensor(1, [4, 64, 16, 16], [16384, 1, 1024, 64]),
            Attribute.OPERATION_CONVOLUTION_FORWARD_W: tensor(2, [32, 64, 3, 3], [576, 1, 192, 64]),
            Attribute.OPERATION_CONVOLUTION_FORWARD_Y: tensor(3, [4, 32, 16, 16], [8192, 1, 512, 32]),
            Attribute.OPERATION_CONVOLUTION_FORWARD_CONV_DESC: description,
            Attribute.OPERATION_CONVOLUTION_FORWARD_ALPHA: 1.0,
            Attribute.OPERATION_CONVOLUTION_FORWARD_BETA: 0.0,
        },
    )
    return OperationGraph([operation])
