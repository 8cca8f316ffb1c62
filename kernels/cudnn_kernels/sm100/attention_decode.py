"""Split-KV attention (flash-decoding) on Blackwell: the forward kernel's main loop over a split of the keys.

The softmax warpgroup loads Q (PackGQA rows) and stores partial O to global memory; K and V come by TMA.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cudnn_kernels.attention.forward import O, Params
from cudnn_kernels.attention.split_kv import CacheTileInfo, SplitKV
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.attention_forward import AttentionForward, SharedStorage
from cudnn_kernels.sm100.tensor_memory import CHUNK
from cudnn_kernels.threads import WARPGROUP_SIZE


class AttentionDecode(SplitKV, AttentionForward):
    """The kernels for one :class:`DecodeConfiguration`. Its tile is (128, 128)."""

    def load_q_tiles(self, params: Params, storage: SharedStorage, info: CacheTileInfo) -> None:
        """Nothing: the softmax warpgroup loads Q."""

    @cute.jit
    def softmax_warpgroup(
        self,
        params: Params,
        storage: SharedStorage,
        info: CacheTileInfo,
        q_tile: Int32,
        thread: Int32,
        begin: Int32,
        end: Int32,
    ) -> None:
        self.load_q_rows(params, storage.sQ[None, None, 0], info, 0, thread)
        barriers.sync(Barrier.WARPGROUP, WARPGROUP_SIZE)
        if thread == 0:
            cute.arch.mbarrier_arrive(storage.q_full)
        AttentionForward.softmax_warpgroup(self, params, storage, info, q_tile, thread, begin, end)

    @cute.jit
    def store_o(
        self,
        params: Params,
        storage: SharedStorage,
        info: CacheTileInfo,
        row_scale: Float32,
        q_tile: Int32,
        thread: Int32,
        has_keys: Boolean,
    ) -> None:
        """Stores the partial O of the rows."""
        row, tmem_o = info.row + thread, self.tmem_o(storage, q_tile)
        gO = params.tensors[O][(None, *self.lse_coord(info, row))]
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for chunk in cutlass.range_constexpr(self.c.head_dim_v // CHUNK):
            values.fill(0.0)
            if has_keys:
                tensor_memory.load(tmem_o + chunk * CHUNK, thread, values)
                cute.arch.fence_view_async_tmem_load()
            values.store(values.load() * row_scale)
            if row < info.mask.seqlen_q:
                cute.autovec_copy(values, cute.local_tile(gO, (CHUNK,), (chunk,)))
