"""Block scales in PyTorch: layout, quantization, dequantization for the fused GEMMs."""

from cudnn.gemm.scales import (
    dequantize,
    dequantize_token_blocks,
    empty_scales,
    pack_float4,
    pack_scales,
    quantize_rows,
    quantize_token_blocks,
    round_scales,
    round_to,
    scale_shape,
    scale_values,
    token_block_count,
    token_blocks,
    unpack_float4,
    unpack_scales,
)

__all__ = [
    "dequantize",
    "dequantize_token_blocks",
    "empty_scales",
    "pack_float4",
    "pack_scales",
    "quantize_rows",
    "quantize_token_blocks",
    "round_scales",
    "round_to",
    "scale_shape",
    "scale_values",
    "token_block_count",
    "token_blocks",
    "unpack_float4",
    "unpack_scales",
]
