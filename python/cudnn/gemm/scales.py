"""Block scales in PyTorch: their layout in memory, quantizing, dequantizing.

Elements that are consecutive along ``k``, 16 or 32 of them, share a scale factor. GEMMs read and write scale factors in
atoms of 128 rows x 4 blocks, 512 bytes: a tensor of the shape (32, 4, ceil(mn / 128), 4, ceil(blocks / 4), l), in which

    scales[r % 32, r // 32 % 4, r // 128, j % 4, j // 4, i]    belongs to row r, block j of matrix i

and whose memory is that of a contiguous (l, ceil(mn / 128), ceil(blocks / 4), 32, 4, 4). Padding beyond the last row or
block fills the atoms.

Blockwise scales, one per 128 elements, are a float32 matrix: (mn, blocks, l), or (ceil(mn / 128), blocks, l) if 128
rows share one. Weight gradients read
blocks of 128 tokens with a scale for each block and feature: elements (blocks, n, 128), scales (blocks, n).
"""

from __future__ import annotations

from typing import Any

from cudnn.api_base import ceil_div
from cudnn.gemm.formats import BLOCKWISE_SIZE, FLOAT4, FLOAT8, LARGEST, QUANTIZED_LIMIT, name_of, wide
from cudnn.lazy import torch
from cudnn_kernels.schedule import first_block

ATOM_ROWS, ATOM_BLOCKS = 128, 4
_ORDER = (3, 4, 1, 5, 2, 0)  # dimensions of the contiguous memory, as the tensor has them
_FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_FLOAT32 = 3.4028234663852886e38
_LEAST_NORMAL = 2.0**-126  # float32


def scale_shape(mn: int, k: int, l: int, vector: int) -> tuple[int, ...]:  # noqa: E741
    """The shape of the scale factors of an operand (mn, k, l), one for every ``vector`` elements along k."""
    return (32, 4, ceil_div(mn, ATOM_ROWS), 4, ceil_div(ceil_div(k, vector), ATOM_BLOCKS), l)


def scale_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of scale factors of that shape."""
    atom = 32 * 4 * 4
    return (16, 4, atom * shape[4], 1, atom, atom * shape[4] * shape[2])


def empty_scales(mn: int, k: int, l: int, vector: int, dtype: Any, device: Any = None) -> Any:  # noqa: E741
    """Scale factors for an operand (mn, k, l), all bytes 0."""
    shape = scale_shape(mn, k, l, vector)
    memory = torch.zeros([shape[5], shape[2], shape[4], 32, 4, 4], dtype=torch.uint8, device=device)
    return memory.view(dtype).permute(_ORDER)


def blockwise_scale_shape(mn: int, k: int, l: int, rows: int = 1) -> tuple[int, int, int]:  # noqa: E741
    """The shape of the float32 blockwise scales of an operand (mn, k, l), one for ``rows`` rows and 128 elements along
    k.
    """
    return (ceil_div(mn, rows), ceil_div(k, BLOCKWISE_SIZE), l)


def blockwise_scale_stride(shape: tuple[int, int, int], rows: int = 1) -> tuple[int, int, int]:
    """Their strides, those of ``torch._scaled_mm``: MN-major for scales of single rows, K-major for scales of ``rows``
    rows, with a pitch that is a multiple of four.
    """
    if rows == 1:
        return (1, shape[0], shape[0] * shape[1])
    pitch = ceil_div(shape[1], 4) * 4
    return (pitch, 1, pitch * shape[0])


def pack_scales(scales: Any) -> Any:
    """Lays out scale factors (mn, blocks, l) in atoms; bytes that pad the atoms are 0."""
    mn, blocks, batch = scales.shape
    packed = empty_scales(mn, blocks, batch, 1, scales.dtype, scales.device)
    atoms = packed.view(torch.uint8).permute(5, 2, 1, 0, 4, 3)  # l, row: 128s, 32s, 1s, block: 4s, 1s
    plain = torch.zeros(
        batch, atoms.shape[1] * ATOM_ROWS, atoms.shape[4] * ATOM_BLOCKS, dtype=torch.uint8, device=scales.device
    )
    plain[:, :mn, :blocks] = scales.view(torch.uint8).permute(2, 0, 1)
    atoms.copy_(plain.view(atoms.shape))
    return packed


def unpack_scales(scales: Any, mn: int, blocks: int) -> Any:
    """The scale factors (mn, blocks, l) from their atoms."""
    batch = scales.shape[5]
    plain = scales.view(torch.uint8).permute(5, 2, 1, 0, 4, 3).reshape(batch, scales.shape[2] * ATOM_ROWS, -1)
    return plain[:, :mn, :blocks].permute(1, 2, 0).contiguous().view(scales.dtype)


def pack_float4(x: Any) -> Any:
    """Rounds (mn, k, l) to e2m1, to nearest even and saturating, as packed pairs along k: (mn, k / 2, l), K-major."""
    x = x.float().permute(2, 0, 1).contiguous()
    values = torch.tensor(_FLOAT4_VALUES, dtype=torch.float32, device=x.device)
    between = (values[1:] + values[:-1]) / 2
    magnitude = x.abs().nan_to_num(nan=_FLOAT4_VALUES[-1])
    below, above = (torch.bucketize(magnitude, between, right=right) for right in (False, True))
    code = torch.where(below % 2 == 0, below, above)  # they differ where two values are equally near: the even one
    code = (code + 8 * (torch.signbit(x) & ~x.isnan())).to(torch.uint8)
    return _row_major(code[..., ::2] | code[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def unpack_float4(x: Any) -> Any:
    """The values (mn, k, l), float32, of packed pairs (mn, k / 2, l), dtype ``torch.float4_e2m1fn_x2`` or
    ``torch.uint8``.
    """
    grid = torch.tensor([*_FLOAT4_VALUES, *(-value for value in _FLOAT4_VALUES)], dtype=torch.float32, device=x.device)
    code = x.view(torch.uint8).permute(2, 0, 1)
    code = torch.stack([code & 15, code >> 4], dim=-1).flatten(2)
    return grid[code.long()].permute(1, 2, 0)


def _row_major(x: Any) -> Any:
    """Matrices (l, rows, columns) as (rows, columns, l), strides exact where a dimension has the size 1 too."""
    batch, rows, columns = x.shape
    shape, stride = (rows, columns, batch), (columns, 1, rows * columns)
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).copy_(x.permute(1, 2, 0))


def round_to(x: Any, dtype: Any) -> Any:
    """Rounds to nearest even; types of 8 bits and fewer saturate. Packed ones halve the second dimension."""
    name = name_of(dtype)
    if name == FLOAT4:
        return pack_float4(x).view(dtype)
    limit = LARGEST.get(name)
    return (x if limit is None else x.clamp(-limit, limit)).to(dtype)


def compute_block_scales(
    amax: Any, limit: float, scale_dtype: Any, norm: Any = 1.0, power_of_two: bool = False, up: bool = False
) -> tuple[Any, Any]:
    """The scale factors of blocks with these largest magnitudes, and the multipliers that quantize their values.

        scale = round(amax * (1 / limit) * norm),  multiplier = min(norm / scale, largest float32),  0 where scale is 0

    Every quantizer of the library has its scales from here, as kernels have theirs from the function of this name in
    ``cudnn_kernels.epilogue.quantize``. ``amax``, float32 or float64, is the type of computation and of multipliers.
    ``limit`` is what the largest magnitude becomes; :func:`round_scales` rounds, float32 scales only where they must be
    a ``power_of_two``. A finite amax gives a finite scale and a finite multiplier:

    ============  =======================  ===============================  ===================
    amax          float8_e8m0fnu           float8_e4m3fn, float8_e5m2       float32
    ============  =======================  ===============================  ===================
    0             2^-127                   0, multiplier 0                  0, multiplier 0
    tiny          at least 2^-127          the nearest, may be 0            at least 2^-126 max(norm, 1)
    huge          at most 2^127            at most the largest              at most the largest float32, or power of two
    infinity      2^127                    NaN                              infinity, multiplier 0
    NaN           NaN                      NaN                              NaN
    ============  =======================  ===============================  ===================

    A block with an infinity or a NaN dequantizes to infinity or NaN where it has one: 2^127 times the limit is more
    than float32 holds, and 0 times infinity is NaN. A float32 scale is a normal number, so that its reciprocal is
    finite, and so that arithmetic which flushes subnormal numbers does not lose it.

    Args:
        up: fp8 scales are rounded up, not to the nearest.
    """
    is_number = scale_dtype == torch.float32
    norm = torch.as_tensor(norm, dtype=amax.dtype, device=amax.device)
    most = 2.0**127 if power_of_two else _LARGEST_FLOAT32
    scales = (amax * (1 / limit) * norm).clamp(max=most).where(amax.isfinite(), amax)
    if is_number:
        scales = scales.maximum(norm.clamp(min=1.0) * _LEAST_NORMAL).where(amax > 0, scales)
        scales = decoded = above(scales) if power_of_two else scales
    else:
        scales = round_scales(scales, scale_dtype, up)
        decoded = scale_values(scales).to(amax.dtype)
    return scales, (norm * reciprocal(decoded)).clamp(max=_LARGEST_FLOAT32)


def reciprocal(x: Any) -> Any:
    """1 / x, at most the largest float32, and 0 for 0."""
    return x.reciprocal().clamp(max=_LARGEST_FLOAT32).masked_fill(x == 0, 0.0)


def round_scales(scales: Any, dtype: Any, up: bool = False) -> Any:
    """Rounds scale factors, not negative: e8m0 up to a power of two, fp8 to nearest, or ``up``; both saturate.

    NaN stays. Infinity becomes 2^127, or NaN in fp8: it does not become an ordinary scale.
    """
    if name_of(dtype) == "float8_e8m0fnu":
        mantissa, exponent = scales.clamp(2.0**-127, 2.0**127).frexp()
        code = exponent + 127 - (mantissa == 0.5).int()
        return code.masked_fill(scales.isnan(), 255).to(torch.uint8).view(torch.float8_e8m0fnu)
    if name_of(dtype) not in FLOAT8:
        return round_to(scales, dtype)
    scales = scales.masked_fill(scales.isinf(), float("nan"))
    nearest = round_to(scales, dtype)
    if not up:
        return nearest
    code = nearest.view(torch.uint8)
    return (code + (nearest.to(scales.dtype) < scales.clamp(max=LARGEST[name_of(dtype)])).to(code.dtype)).view(dtype)


def above(scales: Any) -> Any:
    """The next powers of two above numbers, not negative; such are their own. 0, NaN and infinity stay."""
    mantissa, exponent = scales.clamp(min=_LEAST_NORMAL).frexp()
    power = torch.ones_like(scales).ldexp(exponent - (mantissa == 0.5).int())
    return power.where(scales.isfinite() & (scales != 0), scales)


def scale_values(scales: Any) -> Any:
    """Scale factors as float32; bytes, ``torch.int8``, are e8m0."""
    if name_of(scales.dtype) != "float8_e8m0fnu":
        return scales.float()
    byte = scales.view(torch.uint8)
    return torch.where(byte == 255, float("nan"), torch.exp2(byte.double() - 127)).float()


def quantize_rows(
    x: Any, dtype: Any, scale_dtype: Any, vector: int, norm_const: Any = 1.0, rows: int = 1, power_of_two: bool = False
) -> tuple[Any, Any]:
    """Quantizes (m, n, l) with a scale factor for every ``vector`` elements along n: the elements and their scale
    factors.

    float32 scales are for 128 elements along n and for ``rows``, 1 or 128; ``power_of_two`` rounds them up to one.

        s, multiplier = compute_block_scales(max |x|, limit, scale_dtype, norm_const, power_of_two)
        q = x * multiplier,  rounded to ``dtype``, saturating

    all in float32; limit is 448 for e4m3, 128 for e5m2, 6 for e2m1; see :func:`compute_block_scales`. ``norm_const``: a
    float or a tensor of one element. The elements are N-major, packed in pairs for ``torch.float4_e2m1fn_x2``; the
    scale factors are in atoms, float32 ones a matrix.
    """
    x = x.float()
    m, n, _ = x.shape
    blocks = torch.nn.functional.pad(x.permute(2, 0, 1), (0, -n % vector)).unflatten(2, (-1, vector))
    norm = torch.as_tensor(norm_const, dtype=torch.float32, device=x.device).reshape(())
    largest = blocks.abs().amax(-1)
    if rows > 1:
        largest = torch.nn.functional.pad(largest, (0, 0, 0, -m % rows)).unflatten(1, (-1, rows)).amax(2)
    limit = QUANTIZED_LIMIT[name_of(dtype)]
    scales, factor = compute_block_scales(largest, limit, scale_dtype, norm, power_of_two)
    factor = factor.repeat_interleave(rows, 1)[:, :m]
    scaled = (blocks * factor.unsqueeze(-1)).flatten(2)[..., :n]
    if name_of(dtype) == FLOAT4:
        elements = pack_float4(scaled.permute(1, 2, 0)).view(dtype)
    else:
        elements = _row_major(round_to(scaled, dtype))
    if scale_dtype == torch.float32:
        shape = blockwise_scale_shape(m, n, x.shape[2], rows)
        matrix = torch.empty_strided(shape, blockwise_scale_stride(shape, rows), dtype=torch.float32, device=x.device)
        return elements, matrix.copy_(scales.permute(1, 2, 0))
    return elements, pack_scales(scales.permute(1, 2, 0).contiguous())


def token_block_count(rows: int, experts: int) -> int:
    """The number of blocks of 128 tokens that hold ``rows`` tokens of ``experts`` experts, each in separate blocks."""
    return rows // BLOCKWISE_SIZE + experts


def token_block_ranges(offsets: Any) -> list[tuple[slice, slice]]:
    """The tokens and the blocks of each expert, from their end offsets, int32 (experts,): block j of expert e is number
    start // 128 + e + j. Waits for the GPU.
    """
    ends = offsets.tolist()
    starts = [0, *ends[:-1]]
    firsts = [first_block(start, expert, BLOCKWISE_SIZE) for expert, start in enumerate(starts)]
    return [
        (slice(start, end), slice(first, first + ceil_div(end - start, BLOCKWISE_SIZE)))
        for start, end, first in zip(starts, ends, firsts, strict=True)
    ]


def token_blocks(x: Any, offsets: Any) -> Any:
    """Tokens (rows, n), sorted by expert, as blocks (blocks, n, 128) of an expert's tokens, filled up with zeros."""
    rows, n = x.shape
    blocks = x.new_zeros(token_block_count(rows, len(offsets)), n, BLOCKWISE_SIZE)
    for tokens, numbers in token_block_ranges(offsets):
        padding = -(tokens.stop - tokens.start) % BLOCKWISE_SIZE
        padded = torch.nn.functional.pad(x[tokens], (0, 0, 0, padding))
        blocks[numbers] = padded.unflatten(0, (-1, BLOCKWISE_SIZE)).transpose(1, 2)
    return blocks


def quantize_token_blocks(x: Any, offsets: Any, dtype: Any = None, power_of_two: bool = False) -> tuple[Any, Any]:
    """Quantises tokens (rows, n), sorted by expert, with a float32 scale factor for every 128 tokens of an expert.

    Returns:
        Elements (blocks, n, 128) of ``dtype``, e4m3 by default, see :func:`token_blocks`, and their scale factors
        (blocks, n): operands of :class:`cudnn.GroupedGemmWgrad`. In float32; scales as those of :func:`quantize_rows`.
    """
    dtype = dtype or torch.float8_e4m3fn
    blocks = token_blocks(x.float(), offsets)
    limit = QUANTIZED_LIMIT[name_of(dtype)]
    scales, factor = compute_block_scales(blocks.abs().amax(-1), limit, torch.float32, 1.0, power_of_two)
    return round_to(blocks * factor.unsqueeze(-1), dtype), scales


def dequantize_token_blocks(x: Any, scales: Any, offsets: Any) -> Any:
    """The values (rows, n) of tokens in blocks, float32; the inverse of :func:`quantize_token_blocks`."""
    values = (x.float() * scales.unsqueeze(-1)).transpose(1, 2)
    ranges = token_block_ranges(offsets)
    return torch.cat([values[numbers].flatten(0, 1)[: tokens.stop - tokens.start] for tokens, numbers in ranges])


def dequantize(x: Any, scales: Any = None, vector: int = 1) -> Any:
    """The values (mn, k, l) of an operand in float32 (float64 stays), times its scale factors, if any."""
    values = unpack_float4(x) if name_of(x.dtype) == FLOAT4 else wide(x)
    if scales is None:
        return values
    mn, k, _ = values.shape
    if scales.dtype == torch.float32:
        rows = 1 if scales.shape[0] == mn else BLOCKWISE_SIZE
        return values * scales.repeat_interleave(rows, 0)[:mn].repeat_interleave(vector, 1)[:, :k]
    blocks = scale_values(unpack_scales(scales, mn, ceil_div(k, vector)))
    return values * blocks.repeat_interleave(vector, dim=1)[:, :k]
