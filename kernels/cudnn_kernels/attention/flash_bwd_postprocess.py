"""Attention backward, postprocess: converts the float32 dQ accumulator, and reduces dK and dV of split n_blocks."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import BackwardConfiguration
from cudnn_kernels.attention.backward import BwdSchedulerParams, block_info
from cudnn_kernels.attention.flash_bwd_preprocess import (
    FlatGrid,
    grid_coord,
    m_block_rows,
    make_grid,
    row_vector,
)
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.threads import WARP_SIZE

POSTPROCESS_THREADS = 256
MMA_ROWS = 64  # rows of dQ (or dQ^T) of one MMA


@cute.jit
def store_rows(buffer: cute.Tensor, out: cute.Tensor, rows: Int32, thread: Int32) -> None:
    """256 threads copy the first ``rows`` rows of a tile in shared memory, (s, d), to global memory."""
    columns = cute.size(buffer, mode=[1]) // VECTOR
    for i in cutlass.range_constexpr(-(-cute.size(buffer, mode=[0]) * columns // POSTPROCESS_THREADS)):
        row_vector = thread + i * POSTPROCESS_THREADS
        coord = (row_vector // columns, row_vector % columns)
        if coord[0] < rows:
            source, target = (cute.local_tile(x, (1, VECTOR), coord) for x in (buffer, out))
            cute.autovec_copy(source, target)


class ConvertDQ:
    """dQ = scale * dq_accum, converted to dQ's type. A CTA has one m_block of a head.

    The accumulator has the order of MMA fragments: for every 64 rows x 8 columns (of the head, or of rows with
    ``dq_swap_ab``), four values of each of 128 threads. If the first CTA of the semaphore's order stores, m_blocks that
    no CTA added to are uninitialized: their semaphore is 0, and dQ is 0.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]

    def launch(
        self, dq_accum: cute.Tensor, dq_semaphore: Any, dq: cute.Tensor, cu_seqlens: Any, scale: Float32, stream: Any
    ) -> None:
        """dq_accum (512, rows * d / 512, m_blocks, h, b), dq_semaphore (rows, m_blocks, h, b), dQ (s, d, h, b)."""
        grid, shape = make_grid(dq_accum.shape[2], dq.shape[2], dq.shape[3])
        dq_semaphore = dq_semaphore if self.c.first_cta_stores_dq else None
        self.kernel(dq_accum, dq_semaphore, dq, cu_seqlens, scale, grid).launch(
            grid=shape, block=[POSTPROCESS_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        dq_accum: cute.Tensor,
        dq_semaphore: Any,
        dq: cute.Tensor,
        cu_seqlens: Any,
        scale: Float32,
        grid: FlatGrid,
    ) -> None:
        c, size = self.c, self.c.tile[0]
        thread, _, _ = cute.arch.thread_idx()
        block, head, batch = grid_coord(grid)
        row, first, rows = m_block_rows(block, dq.shape[0], size, cu_seqlens)
        smem = SmemAllocator()
        pitch = c.head_dim + VECTOR  # padded by 16 bytes, so that rows are in different banks
        sdQ = smem.allocate_tensor(
            self.dtype, cute.make_layout((size, c.head_dim), stride=(pitch, 1)), byte_alignment=16
        )
        if row < rows:
            warpgroups, columns, additions = POSTPROCESS_THREADS // 128, c.head_dim // 8, Int32(1)
            if const_expr(dq_semaphore is not None):
                additions = dq_semaphore[0, block, head, batch]
            lane, warpgroup = thread % 128, thread // 128
            values = cute.make_rmem_tensor(4, Float32)
            values.fill(0.0)
            for i in cutlass.range_constexpr(size * c.head_dim // 512 // warpgroups):
                index = i * warpgroups + warpgroup
                source = cute.local_tile(dq_accum[None, index, block, head, batch], (4,), (lane,))
                if additions > 0:
                    cute.autovec_copy(source, values)
                n_chunks = size // 8 if c.dq_swap_ab else columns  # n8 tiles of a 64-row MMA
                row_idx = index // n_chunks * MMA_ROWS + lane // WARP_SIZE * 16 + lane % WARP_SIZE // 4
                for j in cutlass.range_constexpr(2):
                    pair = cute.make_rmem_tensor(2, self.dtype)
                    for k in cutlass.range_constexpr(2):
                        pair[k] = (values[2 * j + k] * scale).to(self.dtype)
                    coord = (row_idx + 8 * j, index % n_chunks * 4 + lane % 4)
                    if const_expr(c.dq_swap_ab):
                        for k in cutlass.range_constexpr(2):
                            sdQ[2 * coord[1] + k, coord[0]] = pair[k]
                    else:
                        cute.autovec_copy(pair, cute.local_tile(sdQ, (1, 2), coord))
            cute.arch.sync_threads()
            out = cute.domain_offset((first + row, 0), dq[None, None, head, batch])
            store_rows(sdQ, out, rows - row, thread)

    set_kernel_name(kernel, "cudnn_attention_backward_convert_dq")


class ReduceDKDV:
    """dK and dV of split n_blocks: the sum of their partials, in the order of splits, converted.

    A CTA has 16 keys of an n_block; a key has 16 to 64 threads with 8 elements of dK or dV each.
    """

    keys = 16

    def __init__(self, configuration: BackwardConfiguration) -> None:
        c = self.c = configuration
        self.dtype = DTYPES[c.dtype]
        self.lanes = c.dkv_width // VECTOR

    def launch(
        self,
        dkv_partial: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scheduler: BwdSchedulerParams,
        scale: Float32,
        stream: Any,
    ) -> None:
        """dkv_partial (keys, elements, splits, blocks), dK and dV (s, d, h, b)."""
        self.kernel(dkv_partial, dk, dv, scheduler, scale).launch(
            grid=[dkv_partial.shape[3] * (self.c.cluster_tile_n // self.keys), 1, 1],
            block=[POSTPROCESS_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, dkv_partial: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, scheduler: BwdSchedulerParams, scale: Float32
    ) -> None:
        c, chunks = self.c, self.c.cluster_tile_n // self.keys
        thread, cta = thread_block_idx()
        split_block, first_key = cta // chunks, cta % chunks * self.keys
        block = block_info(
            c, scheduler, scheduler.num_unsplit + split_block, c.cluster_tile_n, c.tile[0], False, c.reverse_n_blocks
        )
        index, columns = thread % self.lanes, c.head_dim // VECTOR
        acc, acc_16bit = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(self.keys * self.lanes // POSTPROCESS_THREADS):
            key = first_key + i * (POSTPROCESS_THREADS // self.lanes) + thread // self.lanes
            row = block.row + key
            if (index < columns + c.head_dim_v // VECTOR) & (row < block.mask.seqlen_q):
                acc.fill(0.0)
                for j in cutlass.range(dkv_partial.shape[2], unroll=4):
                    acc.store(acc.load() + vectors.load(dkv_partial[key, None, j, split_block], index).load())
                factor = Float32(select_(index < columns, scale, Float32(1.0)))
                acc_16bit.store((acc.load() * factor).to(self.dtype))
                row += block.row_offset
                if index < columns:
                    cute.autovec_copy(acc_16bit, row_vector(dk, row, block.head, block.batch, index))
                else:
                    cute.autovec_copy(acc_16bit, row_vector(dv, row, block.head, block.batch, index - columns))

    set_kernel_name(kernel, "cudnn_attention_backward_reduce_dkv")
