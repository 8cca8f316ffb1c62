"""Block scales in PyTorch: layout, quantization, dequantization for the fused GEMMs."""

from cudnn.gemm.scales import (
    dequantize,
    empty_scales,
    pack_float4,
    pack_scales,
    quantize_rows,
    round_scales,
    round_to,
    scale_shape,
    scale_values,
    unpack_float4,
    unpack_scales,
)

__all__ = [
    "dequantize",
    "empty_scales",
    "pack_float4",
    "pack_scales",
    "quantize_rows",
    "round_scales",
    "round_to",
    "scale_shape",
    "scale_values",
    "unpack_float4",
    "unpack_scales",
]
