"""Split-KV attention (flash-decoding) on Hopper: the forward kernel's main loop over a split of the keys.

The MMA warpgroups load Q themselves (PackGQA rows) and store partial O to global memory; K and V come by TMA.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.attention.forward import O, Params
from cudnn_kernels.attention.split_kv import CacheTileInfo, SplitKV
from cudnn_kernels.sm90.attention_forward import WGMMA_M, AttentionForward, MmaContext, SharedStorage
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE


class AttentionDecode(SplitKV, AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`."""

    q_arrivals, separate_so, speculative_max = WARPGROUP_SIZE // WARP_SIZE, False, False

    @cute.jit
    def for_each_tile(self, params: Params, process: Any, is_scheduler: bool = False) -> None:
        process(self.tile_info(params.scheduler, *self.tile_coord(params.scheduler)), Int32(0), Int32(0))

    def load_q_tiles(self, params: Params, storage: SharedStorage, info: CacheTileInfo, q_phase: Int32) -> None:
        """Nothing: the MMA warpgroups load Q."""

    def compute_tile(
        self,
        params: Params,
        storage: SharedStorage,
        ctx: MmaContext,
        info: CacheTileInfo,
        n_blocks_done: Int32,
        q_phase: Int32,
    ) -> None:
        self.load_q_rows(params, storage.sQ[None, None, ctx.wg_idx], info, ctx.wg_idx * WGMMA_M, ctx.thread)
        cute.arch.sync_warp()
        self.consumer_release(storage.q_full + ctx.wg_idx)
        super().compute_tile(params, storage, ctx, info, n_blocks_done, q_phase)

    @cute.jit
    def store_o(self, params: Params, storage: SharedStorage, ctx: MmaContext, info: CacheTileInfo) -> None:
        """Stores the partial O of the warpgroup's rows."""
        for slot in cutlass.range_constexpr(2):
            row = info.row + ctx.wg_idx * WGMMA_M + self.score_rows.row(ctx.thread, slot)
            if row < info.mask.seqlen_q:
                gO = params.tensors[O][(None, *self.lse_coord(info, row))]
                self.score_rows.store(ctx.acc_O, slot, gO, ctx.thread)
