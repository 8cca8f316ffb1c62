"""NSA gradients of gates, sliding window and compression, on Hopper.

dPsum of each branch, dot(O_branch, d_out), is also the gradient of its gate: one preprocess kernel reads all branches
once. The backward kernels of window and compression share one float32 dq_accum, which is converted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, select_

from cudnn_kernels.attention import seqlen_info
from cudnn_kernels.attention.flash_bwd_postprocess import ConvertDQ
from cudnn_kernels.attention.flash_bwd_preprocess import (
    PREPROCESS_THREADS,
    BwdWorkspace,
    FlashBwdPreprocess,
    FlatGrid,
    grid_coord,
    make_grid,
    make_workspace,
    row_vector,
)
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.attention.sparse import BRANCHES, BranchGradientsConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.sm90.attention_backward import AttentionBackward
from cudnn_kernels.sm90.compression_backward import CompressionBackward


class BranchGradients(Kernel):
    """The kernels for one :class:`BranchGradientsConfiguration`."""

    c: BranchGradientsConfiguration

    def launch(self, arguments: Mapping[str, Any]) -> None:
        """Launches the kernels on arguments by name."""
        c, windowed = self.c, self.c.windowed
        is_varlen = windowed.varlen
        cu_seqlens = arguments.get("cum_seqlen_q")
        scale = arguments["scale_softmax"]
        stream = arguments["stream"]
        dq = seqlen_info.as_sdhb(arguments["dq"], is_varlen)
        window_args = {**arguments, "do": arguments["d_windowed"]}
        compressed_args = {**arguments, "do": arguments["d_compressed"], "workspace": arguments["compressed_workspace"]}
        compressed_args |= {x: arguments["compressed_" + x] for x in ("k", "v", "dk", "dv")}
        if const_expr(is_varlen):
            compressed_args["cum_seqlen_k"] = arguments["cum_seqlen_compressed"]
        window_workspace = make_workspace(windowed, window_args)
        compressed_workspace = make_workspace(c.compressed, compressed_args)
        dq_accum = compressed_workspace.dq_accum = window_workspace.dq_accum
        BranchPreprocess(c).launch_on(arguments, compressed_workspace, window_workspace)
        CompressionBackward(c.compressed).launch_main(compressed_args, compressed_workspace)
        AttentionBackward(windowed).launch_main(window_args, window_workspace)
        ConvertDQ(windowed).launch(dq_accum, None, dq, cu_seqlens, scale, stream)


class BranchPreprocess(FlashBwdPreprocess):
    """Gradients of gates and branches, and :class:`FlashBwdPreprocess`'s row values of compression and window."""

    def __init__(self, configuration: BranchGradientsConfiguration) -> None:
        super().__init__(configuration.windowed)
        self.gate_dtype = DTYPES[configuration.gates]
        self.zeroes_dq_accum = configuration.compressed.shared_dq_accum == "accumulate"

    def launch_on(self, arguments: Mapping[str, Any], *workspaces: BwdWorkspace) -> None:
        """On a call's arguments by name."""
        is_varlen, stream = self.c.varlen, arguments["stream"]
        branches, branch_grads = (
            [seqlen_info.as_sdhb(arguments[y + x], is_varlen) for x in BRANCHES] for y in ("", "d_")
        )
        out, gates, d_gates = (seqlen_info.as_sdhb(arguments[x], is_varlen) for x in ("out", "gates", "d_gates"))
        lse = [
            seqlen_info.lse_view(arguments["compressed_lse"], is_varlen, False),
            seqlen_info.lse_view(arguments["windowed_lse"], False),
        ]
        stats, dq_accum = [(x.lse_log2, x.dpsum) for x in workspaces], workspaces[1].dq_accum
        rows = workspaces[1].dpsum.shape
        blocks = rows[0] // self.rows
        dq_accum = cute.make_tensor(
            dq_accum.iterator, cute.make_layout((self.rows * self.c.head_dim, blocks, *rows[1:]))
        )
        grid, shape = make_grid(blocks, out.shape[2], out.shape[3])
        self.gradients(
            out, branches, branch_grads, gates, d_gates, lse, stats, dq_accum, arguments.get("cum_seqlen_q"), grid
        ).launch(grid=shape, block=[PREPROCESS_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def gradients(
        self,
        out: cute.Tensor,
        branches: list,
        branch_grads: list,
        gates: cute.Tensor,
        d_gates: cute.Tensor,
        lse: list,
        stats: list,
        dq_accum: cute.Tensor,
        cu_seqlens: Any,
        grid: FlatGrid,
    ) -> None:
        """``out`` is the gradient of the gated sum, ``lse`` the LSE of compression and of the window."""
        c, lanes = self.c, self.lanes
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = grid_coord(grid)
        lane, sequence = thread % lanes, batch
        row_begin, seq_offset, rows = self.rows_of(block, out.shape[0], cu_seqlens)
        if const_expr(cu_seqlens is not None):
            sequence, _ = seqlen_info.find_block(cu_seqlens, block * self.rows // c.tile[0], c.tile[0])
        fragments = self.load((out, *branches), row_begin, seq_offset, rows, head, batch, thread)
        if const_expr(self.zeroes_dq_accum):
            self.clear(dq_accum[None, block, head, batch], thread)
        for i in cutlass.range_constexpr(self.passes):
            row, padded_row = row_begin + self.row(thread, i), block * self.rows + self.row(thread, i)
            operands = [fragment.load().to(Float32) for fragment in fragments[i]]
            for j in cutlass.range_constexpr(len(BRANCHES)):
                dot, gate = (operands[0] * operands[1 + j]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0), Float32(0.0)
                dot = cute.arch.warp_reduction_sum(dot, threads_in_group=lanes)
                if row < rows:
                    gate = gates[seq_offset + row, j, head, batch].to(Float32)
                    fragments[i][1 + j].store((operands[0] * gate).to(out.element_type))
                    cute.autovec_copy(
                        fragments[i][1 + j], row_vector(branch_grads[j], seq_offset + row, head, batch, lane)
                    )
                    if lane == 0:
                        d_gates[seq_offset + row, j, head, batch] = dot.to(self.gate_dtype)
                if const_expr(j != 1):  # selection's backward computes its own
                    row_lse = Float32.inf
                    if row < rows:
                        if const_expr(j == 0):
                            row_lse = lse[0][seq_offset + row, head, batch] * LOG2_E
                        else:
                            row_lse = lse[1][row, head, sequence] * LOG2_E
                        row_lse = Float32(select_(row_lse == -Float32.inf, Float32.inf, row_lse))
                    if lane == 0:
                        stats[j // 2][0][padded_row, head, batch] = row_lse
                        stats[j // 2][1][padded_row, head, batch] = Float32(
                            select_(row < rows, gate * dot, Float32(0.0))
                        )

    set_kernel_name(gradients, "cudnn_nsa_branch_preprocess")
