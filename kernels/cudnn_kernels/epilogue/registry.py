"""The implementation of each epilogue operation."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_kernels import epilogue
from cudnn_kernels.epilogue import arithmetic, hadamard, quantize, reductions, rotate, tiles, token_blocks
from cudnn_kernels.epilogue.operation import EpiOpImpl

EPI_OPS: Mapping[type[epilogue.EpiOp], type[EpiOpImpl]] = {
    epilogue.Scale: arithmetic.ScaleImpl,
    epilogue.MultiplyGroup: arithmetic.MultiplyGroupImpl,
    epilogue.MultiplyColumn: arithmetic.MultiplyColumnImpl,
    epilogue.MultiplyBlocks: arithmetic.MultiplyBlocksImpl,
    epilogue.AddRow: arithmetic.AddRowImpl,
    epilogue.Gated: arithmetic.GatedImpl,
    epilogue.GatedBackward: arithmetic.GatedBackwardImpl,
    epilogue.Round: arithmetic.RoundImpl,
    epilogue.SquaredRelu: arithmetic.SquaredReluImpl,
    epilogue.SquaredReluBackward: arithmetic.SquaredReluBackwardImpl,
    epilogue.LoadTile: tiles.LoadTileImpl,
    epilogue.StoreTile: tiles.StoreTileImpl,
    epilogue.Deinterleave: rotate.DeinterleaveImpl,
    epilogue.Rotate: rotate.RotateImpl,
    epilogue.Hadamard: hadamard.HadamardImpl,
    epilogue.Amax: reductions.AmaxImpl,
    epilogue.SumRow: reductions.SumRowImpl,
    epilogue.SumColumn: reductions.SumColumnImpl,
    epilogue.QuantizeRows: quantize.QuantizeRowsImpl,
    epilogue.QuantizeColumns: quantize.QuantizeColumnsImpl,
    epilogue.StoreColumns: quantize.StoreColumnsImpl,
    epilogue.StoreTokenBlocks: token_blocks.StoreTokenBlocksImpl,
}
