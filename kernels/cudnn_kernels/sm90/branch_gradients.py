"""The gradients of native sparse attention's gates, window and compression, on Hopper.

The products of rows with their branches are the gradients of gates, and what the kernels of both attentions need: one
kernel reads all of it once. Both attentions add to the same float32 sums of dQ, which are rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, select_

from cudnn_kernels.attention import sequences
from cudnn_kernels.attention.around import (
    ROW_THREADS,
    Grid,
    QueryGradient,
    RowProducts,
    Values,
    grid_of,
    place_in,
    values_of,
    vector,
)
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.attention.sparse import BRANCHES, BranchGradientsConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import name
from cudnn_kernels.sm90.attention_backward import AttentionBackward
from cudnn_kernels.sm90.compression_backward import CompressionBackward


class BranchGradients(Kernel):
    """The kernels for one :class:`BranchGradientsConfiguration`."""

    c: BranchGradientsConfiguration

    def launch(self, given: Mapping[str, Any]) -> None:
        """Launches the kernels on arguments by name."""
        c, near = self.c, self.c.near
        p, offsets, scale, stream = near.packed, given.get("cum_seqlen_q"), given["scale_softmax"], given["stream"]
        dq = sequences.matrix(given["dq"], p)
        of_near = {**given, "do": given["d_near"]}
        of_compressed = {**given, "do": given["d_compressed"], "workspace": given["compressed_workspace"]}
        of_compressed |= {x: given["compressed_" + x] for x in ("k", "v", "dk", "dv")}
        if const_expr(p):
            of_compressed["cum_seqlen_k"] = given["cum_seqlen_compressed"]
        values, values_compressed = values_of(near, of_near), values_of(c.compressed, of_compressed)
        sums = values_compressed.dq_sums = values.dq_sums
        BranchRows(c).launch_on(given, values_compressed, values)
        CompressionBackward(c.compressed).launch_passes(of_compressed, values_compressed)
        AttentionBackward(near).launch_passes(of_near, values)
        QueryGradient(near).launch(sums, None, dq, offsets, scale, stream)


class BranchRows(RowProducts):
    """The gradients of gates and branches, and what :class:`RowProducts` computes, for compression and the window."""

    def __init__(self, configuration: BranchGradientsConfiguration) -> None:
        super().__init__(configuration.near)
        self.gate_dtype, self.clears = DTYPES[configuration.gates], configuration.compressed.shared == "adds"

    def launch_on(self, given: Mapping[str, Any], *values: Values) -> None:
        """Of a call's arguments by name."""
        p, stream = self.c.packed, given["stream"]
        branches, changes = ([sequences.matrix(given[y + x], p) for x in BRANCHES] for y in ("", "d_"))
        out, gates, d_gates = (sequences.matrix(given[x], p) for x in ("out", "gates", "d_gates"))
        log_sums = [sequences.rows(given["compressed_lse"], p, False), sequences.rows(given["near_lse"], False)]
        told, zeros = [(x.log_sums, x.products) for x in values], values[1].dq_sums
        rows = values[1].products.shape
        blocks = rows[0] // self.rows
        zeros = cute.make_tensor(zeros.iterator, cute.make_layout((self.rows * self.c.head, blocks, *rows[1:])))
        grid, shape = grid_of(blocks, out.shape[2], out.shape[3])
        self.gradients(
            out, branches, changes, gates, d_gates, log_sums, told, zeros, given.get("cum_seqlen_q"), grid
        ).launch(grid=shape, block=[ROW_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def gradients(
        self,
        out: cute.Tensor,
        branches: list,
        changes: list,
        gates: cute.Tensor,
        d_gates: cute.Tensor,
        given: list,
        told: list,
        zeros: cute.Tensor,
        offsets: Any,
        grid: Grid,
    ) -> None:
        """``out`` is the gradient of the sum, ``given`` the log-sum-exp of compression and of the window."""
        c, lanes = self.c, self.lanes
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = place_in(grid)
        lane, sequence = thread % lanes, batch
        mine, first, rows = self.rows_of(block, out.shape[0], offsets)
        if const_expr(offsets is not None):
            sequence, _ = sequences.find_block(offsets, block * self.rows // c.tile[0], c.tile[0])
        parts = self.load((out, *branches), mine, first, rows, head, batch, thread)
        if const_expr(self.clears):
            self.clear(zeros[None, block, head, batch], thread)
        for i in cutlass.range_constexpr(self.passes):
            row, place = mine + self.row(thread, i), block * self.rows + self.row(thread, i)
            factors = [part.load().to(Float32) for part in parts[i]]
            for j in cutlass.range_constexpr(len(BRANCHES)):
                total, gate = (factors[0] * factors[1 + j]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0), Float32(0.0)
                total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
                if row < rows:
                    gate = gates[first + row, j, head, batch].to(Float32)
                    parts[i][1 + j].store((factors[0] * gate).to(out.element_type))
                    cute.autovec_copy(parts[i][1 + j], vector(changes[j], first + row, head, batch, lane))
                    if lane == 0:
                        d_gates[first + row, j, head, batch] = total.to(self.gate_dtype)
                if const_expr(j != 1):  # selection's kernel has its own
                    log_sum = Float32.inf
                    if row < rows:
                        if const_expr(j == 0):
                            log_sum = given[0][first + row, head, batch] * LOG2_E
                        else:
                            log_sum = given[1][row, head, sequence] * LOG2_E
                        log_sum = Float32(select_(log_sum == -Float32.inf, Float32.inf, log_sum))
                    if lane == 0:
                        told[j // 2][0][place, head, batch] = log_sum
                        told[j // 2][1][place, head, batch] = Float32(select_(row < rows, gate * total, Float32(0.0)))

    name(gradients, "cudnn_nsa_branch_rows")
