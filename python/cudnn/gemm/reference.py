"""The reference of the fused GEMMs in PyTorch: the GEMM, and each epilogue operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from cudnn.gemm.formats import FLOAT4, LARGEST, name_of, wide
from cudnn.gemm.scales import compute_block_scales, dequantize, reciprocal
from cudnn.gemm.scales import round_to as rounded
from cudnn.lazy import torch
from cudnn_kernels import epilogue as declared
from cudnn_kernels.epilogue import TOKEN_BLOCK
from cudnn_kernels.formats import FORMATS, GLU_BLOCK
from cudnn_kernels.schedule import first_block

GROUPS = "groups"
Values = dict[str, Any]  # tensors (m, n, l), float32 or float64, by name; and the rows' groups
Arguments = Mapping[str, Any]


def product(tensors: Mapping[str, Any], vector: int) -> Any:
    """acc[m, n, l] = sum over k of A[m, k, l] B[n, k, l], in float32 or float64; operands times their scale factors."""
    a = dequantize(tensors["a"], tensors.get("sfa"), vector)
    b = dequantize(tensors["b"], tensors.get("sfb"), vector)
    return torch.einsum("mkl,nkl->mnl", a, b)


def evaluate(declarations: Sequence[Any], accumulator: Any, arguments: Arguments, groups: Any = None) -> None:
    """Runs the epilogue on the arguments, by name, as the kernel does; ``accumulator`` is (m, n, l), float32 or
    float64.

    Each l is an expert or, with ``groups``, int64 (m,), the expert of each row.
    """
    # PyTorch does not copy packed elements.
    packed = {n: x.view(torch.uint8) for n, x in arguments.items() if name_of(getattr(x, "dtype", "")) == FLOAT4}
    values = {"x": accumulator, GROUPS: groups}
    for declaration in declarations:
        REFERENCES[type(declaration)](declaration, values, {**arguments, **packed})


def scale(o: declared.Scale, values: Values, arguments: Arguments) -> None:
    values[o.value] = values[o.value] * arguments[o.tensor]


def multiply_group(o: declared.MultiplyGroup, values: Values, arguments: Arguments) -> None:
    factor, groups = wide(arguments[o.tensor]) ** o.power, values[GROUPS]
    values[o.value] = values[o.value] * (factor if groups is None else factor[groups].reshape(-1, 1, 1))


def load_tile(o: declared.LoadTile, values: Values, arguments: Arguments) -> None:
    x = wide(arguments[o.tensor])
    values[o.value] = interleave_glu(x) if o.concat_glu else x


def store_tile(o: declared.StoreTile, values: Values, arguments: Arguments) -> None:
    x, target = values[o.value], arguments[o.tensor]
    x = concatenate_glu(x) if o.concat_glu else x
    if o.dtype == FLOAT4:
        codes = e2m1(x)
        target.copy_(codes[:, 0::2] + 16 * codes[:, 1::2])
    else:
        limit = LARGEST.get(o.dtype)
        rounded = (x if limit is None else x.clamp(-limit, limit)).to(target.dtype)
        target.copy_(wide(target) + wide(rounded) if o.adds else rounded)


def interleave_glu(x: Any) -> Any:
    """(m, n, l) with concatenated halves of columns to alternating blocks of 32 columns of each half."""
    return x.unflatten(1, (2, -1, GLU_BLOCK)).transpose(1, 2).flatten(1, 3)


def concatenate_glu(x: Any) -> Any:
    """The inverse of :func:`interleave_glu`."""
    return x.unflatten(1, (-1, 2, GLU_BLOCK)).transpose(1, 2).flatten(1, 3)


def multiply_column(o: declared.MultiplyColumn, values: Values, arguments: Arguments) -> None:
    values[o.value] = values[o.value] * wide(arguments[o.tensor])


def multiply_blocks(o: declared.MultiplyBlocks, values: Values, arguments: Arguments) -> None:
    x = values[o.value]
    scales = wide(arguments[o.tensor])[: x.shape[0]]
    values[o.value] = x * scales.repeat_interleave(o.vector, 1)[:, : x.shape[1]]


def add_row(o: declared.AddRow, values: Values, arguments: Arguments) -> None:
    row, groups = wide(arguments[o.tensor]).unsqueeze(0), values[GROUPS]
    row = interleave_glu(row) if o.concat_glu else row
    if groups is not None:
        row = row.transpose(0, 2)[groups]
    x = values["x"]
    if o.factor:  # rounded once
        values["x"] = (x.double() + row.double() * arguments[o.factor.tensor].double()).to(x.dtype)
    else:
        values["x"] = x + row


def gated(o: declared.Gated, values: Values, arguments: Arguments) -> None:
    y, _, _ = activation(o.gate.bind(arguments), *gate_and_up(values["x"], o.gate_first))
    values["x"] = y.flatten(1, 2)


def gated_backward(o: declared.GatedBackward, values: Values, arguments: Arguments) -> None:
    x, saved = values["x"], values[o.saved]
    y, *slopes = activation(o.gate.bind(arguments), *gate_and_up(saved, o.gate_first))
    wide = x.new_empty(saved.shape)
    for target, slope in zip(gate_and_up(wide, o.gate_first), slopes, strict=True):
        target.copy_(x.unflatten(1, (-1, GLU_BLOCK)) * slope)
    y = y.flatten(1, 2)
    values.update(x=wide, activation=y, prob_gradient=x * y)


def gate_and_up(x: Any, gate_first: bool) -> tuple[Any, Any]:
    """Views of the gate and up columns of a tensor, (m, pairs, 32, l)."""
    blocks = x.unflatten(1, (-1, 2, GLU_BLOCK))
    return blocks[:, :, int(not gate_first)], blocks[:, :, int(gate_first)]


def activation(o: declared.Gate, gate: Any, other: Any) -> tuple[Any, Any, Any]:
    """y, and its derivatives with respect to gate and up."""
    if o.activation == "situ":
        first, second, sigmoid = (gate / o.beta1).tanh(), (other / o.beta2).tanh(), gate.sigmoid()
        f, h = o.beta1 * first * sigmoid, o.beta2 * second
        by_gate = h * ((1 - first * first) * sigmoid + f * (1 - sigmoid))
        return h * f, by_gate, f * (1 - second * second)
    g = gate if o.clamp_max is None else gate.clamp(o.gate_min, o.clamp_max)
    clamps = o.clamp_max is not None or o.clamp_min is not None
    u = (other.clamp(o.clamp_min, o.clamp_max) if clamps else other) + o.offset
    if o.activation == "relu":
        f, slope = g.relu(), 1.0 - (g <= 0).to(g.dtype)
    else:
        sigmoid = (o.slope * g).sigmoid()
        f, slope = g * sigmoid, sigmoid * (1 + o.slope * g * (1 - sigmoid))
    by_gate, by_other = u * slope, f
    if o.clamp_max is not None:
        by_gate, by_other = by_gate.masked_fill(gate > o.clamp_max, 0.0), by_other.masked_fill(other > o.clamp_max, 0.0)
    if o.clamp_min is not None:
        by_other = by_other.masked_fill(other < o.clamp_min, 0.0)
    return u * f, by_gate, by_other


def round_to(o: declared.Round, values: Values, arguments: Arguments) -> None:
    x = values[o.value]
    values[o.value] = x.to(getattr(torch, o.dtype)).to(x.dtype)


def deinterleave(o: declared.Deinterleave, values: Values, arguments: Arguments) -> None:
    heads = values["x"].unflatten(1, (-1, o.head)).clone()
    rotary = heads[:, :, o.first : o.first + o.size]
    rotary.copy_(rotary.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3))
    values["x"] = heads.flatten(1, 2)


def rotate(o: declared.Rotate, values: Values, arguments: Arguments) -> None:
    x = values["x"]
    cos, sin = (table.to(x.dtype) for table in (arguments[o.cos], arguments[o.sin]))
    if o.positions:
        positions = arguments[o.positions].long()
        rows = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = (table[rows].where((rows == positions).unsqueeze(1), float("nan")) for table in (cos, sin))
    sin = -sin if o.inverse else sin
    # For left columns, then for right ones.
    tables = [(cos, sin)] * 2 if not o.full_tables else [*zip(*(t.chunk(2, dim=1) for t in (cos, sin)), strict=True)]
    shape = (-1, 1, o.rotary // 2, *(1,) * (x.ndim - 2))
    (cos, sin), (cos_right, sin_right) = ([t.reshape(shape) for t in pair] for pair in tables)
    heads = x.unflatten(1, (-1, o.head)).clone()
    which = slice(o.begin // o.head, None if o.end is None else o.end // o.head)
    rotary = heads[:, which, o.first : o.first + o.rotary]
    left, right = rotary.unflatten(2, (-1, 2)).unbind(3) if o.interleaved else rotary.unflatten(2, (2, -1)).unbind(2)
    first, second = left * cos - right * sin, right * cos_right + left * sin_right
    left.copy_(first)
    right.copy_(second)
    values["x"] = heads.flatten(1, 2)


def hadamard(o: declared.Hadamard, values: Values, arguments: Arguments) -> None:
    x, dim = values[o.value], 1 if o.along == "n" else 0
    rounded = x.bfloat16().float()
    count = x.shape[dim]
    y = x.new_zeros(*(-(-size // 16) * 16 if i == dim else size for i, size in enumerate(x.shape)))
    y.narrow(dim, 0, count).copy_(rounded)
    for step in (1, 2, 4, 8):
        pairs = y.unflatten(dim, (-1, 2, step))
        a, b = (pairs.select(dim + 1, i).clone() for i in (0, 1))
        pairs.select(dim + 1, 0).copy_(a + b)
        pairs.select(dim + 1, 1).copy_(a - b)
    values[o.result] = y.narrow(dim, 0, count) * o.factor


def squared_relu(o: declared.SquaredRelu, values: Values, arguments: Arguments) -> None:
    y, _ = clamped_relu(values["x"], o.clamp)
    values["x"] = y * y


def clamped_relu(x: Any, clamp: float | None) -> tuple[Any, Any]:
    """relu(x), or s tanh(relu(x) / s), 0 for NaN; and the derivative where x is positive."""
    if clamp is None:
        return x.relu(), 1.0
    t = (x.where(x > 0, 0) / clamp).tanh()
    return t * clamp, 1 - t * t


def squared_relu_backward(o: declared.SquaredReluBackward, values: Values, arguments: Arguments) -> None:
    rectified, other = (values[o.gradient], values["x"]) if o.of_saved else (values["x"], values[o.gradient])
    y, slope = clamped_relu(rectified, o.clamp)
    if o.of_saved:
        values["activation"] = y * y
    product = y * other
    values["prob_gradient"] = y * product
    values["x"] = (product + product) * slope


def amax(o: declared.Amax, values: Values, arguments: Arguments) -> None:
    target, groups = arguments[o.tensor], values[GROUPS]
    blocks = values[o.value].abs().unflatten(1, (-1, o.roles, GLU_BLOCK if o.roles > 1 else 1))
    if o.by_expert and groups is not None:
        largest = blocks.amax((1, 3)).view(len(groups), -1)  # of every row
        rows = groups.unsqueeze(1).expand(-1, o.roles)
        target.view(-1, o.roles).scatter_reduce_(0, rows, largest.to(target.dtype), "amax")
        return
    largest = blocks.amax((0, 1, 3)).view(o.roles, -1)
    target.copy_(target.maximum((largest.t() if o.by_expert else largest.amax(1)).reshape(target.shape)))


def sum_row(o: declared.SumRow, values: Values, arguments: Arguments) -> None:
    arguments[o.tensor].add_(values[o.value].sum(1, keepdim=True))


def sum_column(o: declared.SumColumn, values: Values, arguments: Arguments) -> None:
    x, target, groups = values[o.value], arguments[o.tensor], values[GROUPS]
    x = concatenate_glu(x) if o.concat_glu else x
    if groups is None:
        target.copy_(x.sum(0).t())
    else:
        target.copy_(x.new_zeros(target.shape).index_add_(0, groups, x[:, :, 0]))


def quantize_rows(o: declared.QuantizeRows, values: Values, arguments: Arguments) -> None:
    values[o.value] = quantize(o, values[o.source or o.value], o.vector, arguments[o.tensor], arguments)


def quantize_columns(o: declared.QuantizeColumns, values: Values, arguments: Arguments) -> None:
    x, scales, groups = values[o.source].transpose(0, 1), arguments[o.tensor], values[GROUPS]
    if not o.by_expert or groups is None:
        values[o.value] = quantize(o, x, 32, scales, arguments).transpose(0, 1)
        return
    quantized, row, columns = x.clone(), 0, scales.shape[2]
    for count in groups.unique_consecutive(return_counts=True)[1].tolist():
        atoms = -(-count // 128)
        strides = (16, 4, 512 * atoms, 1, 512, 512 * atoms * columns)
        offset = scales.storage_offset() + row // 128 * columns * 512
        expert_scales = scales.as_strided((32, 4, columns, 4, atoms, 1), strides, offset)
        expert_columns = x[:, row : row + count]
        quantized[:, row : row + count] = quantize(o, expert_columns, 32, expert_scales, arguments)
        row += count
    values[o.value] = quantized.transpose(0, 1)


def store_columns(o: declared.StoreColumns, values: Values, arguments: Arguments) -> None:
    x, groups = values[o.value][:, :, 0].t(), values[GROUPS]
    norm, n = x.new_tensor(arguments[o.norm_const]), x.shape[0]
    columns_by_expert = [x] if groups is None else x.split(groups.unique_consecutive(return_counts=True)[1].tolist(), 1)
    data, scales = [], []
    for expert_columns in columns_by_expert:
        blocks = expert_columns.unflatten(1, (-1, 16))
        codes, _ = compute_block_scales(blocks.abs().amax(2), FORMATS[FLOAT4].block_limit, torch.float8_e4m3fn, norm)
        factor = reciprocal(wide(codes) * reciprocal(norm))
        bits = e2m1(blocks * factor.unsqueeze(2)).flatten()
        data.append(bits[0::2] + 16 * bits[1::2])
        scales.append(codes.view(torch.uint8).view(n // 128, 4, 32, -1, 4).permute(2, 1, 0, 4, 3).flatten())
    for name, pieces in ((o.tensor, data), (o.scales, scales)):
        target = arguments[name].view(pieces[0].dtype)
        for expert_columns, start in zip(pieces, [0, *accumulate(len(x) for x in pieces)], strict=False):
            target[start : start + len(expert_columns)] = expert_columns


def store_token_blocks(o: declared.StoreTokenBlocks, values: Values, arguments: Arguments) -> None:
    x, groups = values[o.value][:, :, 0], values[GROUPS]
    numbers, counts = groups.unique_consecutive(return_counts=True)
    start, limit = 0, FORMATS[o.dtype].block_limit
    for group, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        padded = torch.nn.functional.pad(x[start : start + count], (0, 0, 0, -count % TOKEN_BLOCK))
        blocks = padded.unflatten(0, (-1, TOKEN_BLOCK)).transpose(1, 2)
        codes, multiplier = compute_block_scales(blocks.abs().amax(2), limit, torch.float32, 1.0, o.power_of_two)
        first = first_block(start, group, TOKEN_BLOCK)
        which = slice(first, first + len(blocks))
        arguments[o.tensor][which] = rounded(blocks * multiplier.unsqueeze(2), arguments[o.tensor].dtype)
        arguments[o.scales][which] = codes
        start += count


Quantizer = declared.QuantizeRows | declared.QuantizeColumns


def quantize(o: Quantizer, x: Any, vector: int, scales: Any, arguments: Arguments) -> Any:
    """Writes the scale factors of a tensor (r, k, l), one per ``vector`` values along k; returns the scaled values.

    Padding in the last atoms of scale factors is 0; float32 scales are a matrix.
    """
    norm = arguments[o.norm_const] if o.norm_const else x.new_ones(1)
    rows, columns, batch = x.shape
    groups = -(-columns // vector)
    padded = x.new_zeros(rows, groups * vector, batch)
    padded[:, :columns] = x
    padded = padded.unflatten(1, (groups, vector))
    limit, scale_dtype = FORMATS[o.dtype].block_limit, getattr(torch, o.scale_dtype)
    codes, multiplier = compute_block_scales(padded.abs().amax(2), limit, scale_dtype, norm, o.power_of_two)
    codes = codes if o.scale_dtype == "float32" else codes.view(torch.uint8)
    if o.atoms and o.scale_dtype != "float32":
        _, _, row_atoms, _, group_atoms, _ = scales.shape
        atoms = codes.new_zeros(row_atoms * 128, group_atoms * 4, batch)
        atoms[:rows, :groups] = codes
        codes = atoms.unflatten(1, (group_atoms, 4)).unflatten(0, (row_atoms, 4, 32)).permute(2, 1, 0, 4, 3, 5)
    scales.copy_(codes.view(scales.dtype))
    return (padded * multiplier.unsqueeze(2)).flatten(1, 2)[:, :columns]


def e2m1(x: Any) -> Any:
    """E2M1 codes, rounded to nearest even: the number of midpoints below, then the sign bit. NaN: 7 or 15."""
    size, code = x.abs(), x.signbit().byte() * 8
    for midpoint, to_even in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1, 0, 1, 0, 1, 0), strict=True):
        below = (size >= midpoint) if to_even else (size > midpoint)
        code = code + (below | size.isnan()).byte()
    return code


REFERENCES: Mapping[type, Callable[[Any, Values, Arguments], None]] = {
    declared.Scale: scale,
    declared.LoadTile: load_tile,
    declared.StoreTile: store_tile,
    declared.MultiplyGroup: multiply_group,
    declared.MultiplyColumn: multiply_column,
    declared.MultiplyBlocks: multiply_blocks,
    declared.AddRow: add_row,
    declared.Gated: gated,
    declared.Round: round_to,
    declared.Deinterleave: deinterleave,
    declared.Rotate: rotate,
    declared.GatedBackward: gated_backward,
    declared.Hadamard: hadamard,
    declared.SquaredRelu: squared_relu,
    declared.SquaredReluBackward: squared_relu_backward,
    declared.Amax: amax,
    declared.SumRow: sum_row,
    declared.SumColumn: sum_column,
    declared.QuantizeRows: quantize_rows,
    declared.QuantizeColumns: quantize_columns,
    declared.StoreColumns: store_columns,
    declared.StoreTokenBlocks: store_token_blocks,
}
