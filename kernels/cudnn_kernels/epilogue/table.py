"""Which class runs which declaration."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_kernels import epilogue as declared
from cudnn_kernels.epilogue import arithmetic, hadamard, quantize, reductions, rotate, tiles
from cudnn_kernels.epilogue.operation import Operation

OPERATIONS: Mapping[type, type[Operation]] = {
    declared.Scale: arithmetic.Scale,
    declared.MultiplyGroup: arithmetic.MultiplyGroup,
    declared.MultiplyColumn: arithmetic.MultiplyColumn,
    declared.AddRow: arithmetic.AddRow,
    declared.Gated: arithmetic.Gated,
    declared.GatedBackward: arithmetic.GatedBackward,
    declared.Round: arithmetic.Round,
    declared.Deinterleave: rotate.Deinterleave,
    declared.Rotate: rotate.Rotate,
    declared.Hadamard: hadamard.Hadamard,
    declared.SquaredRelu: arithmetic.SquaredRelu,
    declared.SquaredReluBackward: arithmetic.SquaredReluBackward,
    declared.LoadTile: tiles.LoadTile,
    declared.StoreTile: tiles.StoreTile,
    declared.Amax: reductions.Amax,
    declared.SumRow: reductions.SumRow,
    declared.SumColumn: reductions.SumColumn,
    declared.QuantizeRows: quantize.QuantizeRows,
    declared.QuantizeColumns: quantize.QuantizeColumns,
    declared.StoreColumns: quantize.StoreColumns,
}
