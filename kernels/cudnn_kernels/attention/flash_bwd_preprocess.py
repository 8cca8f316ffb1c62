"""Attention backward, preprocess: dPsum = rowsum(dO * O) - dLSE and LSE * log2(e), and zeros for accumulators and
semaphores; then the gradient of the sinks.

Also the workspace of the backward pass. In it, each sequence has whole m_blocks, so that the main kernel loads row
values of an m_block with one bulk copy: rows beyond a sequence are padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import BackwardConfiguration, DecodeConfiguration, seqlen_info
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.pipeline.views import transposed
from cudnn_kernels.pipeline.workspace import workspace_pointers
from cudnn_kernels.threads import WARP_SIZE

PREPROCESS_THREADS = 128
INT32_REGIONS = "dq_semaphore", "tile_count_semaphore", "block_order"


@cute.jit
def m_block_rows(block: Int32, rows: Any, size: int, cu_seqlens: Any) -> tuple[Int32, Int32, Int32]:
    """An m_block's first row in its sequence, the sequence's first row in the tensors, and its length."""
    offset, block_idx = Int32(0), block
    if const_expr(cu_seqlens is not None):
        sequence, block_idx = seqlen_info.find_block(cu_seqlens, block, size)
        offset = Int32(cu_seqlens[sequence])
        rows = Int32(cu_seqlens[sequence + 1]) - offset
    return block_idx * size, offset, Int32(rows)


@dataclass
class FlatGrid:
    """A one-dimensional grid of blocks x heads x batches: other grid dimensions are limited to 65,535."""

    blocks: Any  # divisor
    heads: Any  # divisor


def make_grid(blocks: Any, heads: Any, batches: Any) -> tuple[FlatGrid, list[Any]]:
    """The grid, and its shape."""
    divisors = (cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in (blocks, heads))
    return FlatGrid(*divisors), [Int32(blocks) * heads * batches, 1, 1]


def grid_coord(grid: FlatGrid) -> tuple[Int32, Int32, Int32]:
    """This CTA's block, head and batch."""
    cta, _, _ = cute.arch.block_idx()
    index, block = divmod(cta, grid.blocks)
    batch, head = divmod(index, grid.heads)
    return block, head, batch


@dataclass
class BwdWorkspace:
    """The workspace of the backward pass. Row values are of padded sequences.

    ``lse_log2`` (LSE * log2(e)), ``dpsum`` and ``dq_semaphore`` (how many CTAs have added to dQ) are (s, h, b).
    ``dq_accum``, float32, is (512, .., m_blocks, h, b) in the order of accumulator fragments. ``dkv_partial``: partial
    dK and dV of split n_blocks, (keys, dkv_width, splits, blocks). ``tile_count_semaphore``: the dynamic scheduler's
    counter. ``block_order``, int32: see :class:`SortBlocks`.
    """

    lse_log2: cute.Tensor
    dpsum: cute.Tensor
    dq_accum: Any = None
    dq_semaphore: Any = None
    dkv_partial: Any = None
    tile_count_semaphore: Any = None
    block_order: Any = None


def preprocess(c: BackwardConfiguration, arguments: Mapping[str, Any]) -> BwdWorkspace:
    """Launches :class:`FlashBwdPreprocess` on a call's arguments by name and returns the workspace."""
    workspace = make_workspace(c, arguments)
    # read before the launch: the DSL may replace them by the kernel's values
    row_stats, stream = (workspace.dpsum, workspace.lse_log2), arguments["stream"]
    FlashBwdPreprocess(c).launch(arguments, workspace)
    if const_expr(c.sink):
        ReduceDSink().launch(*row_stats, arguments["sink"], arguments["dsink"], stream)
    return workspace


def make_workspace(c: BackwardConfiguration, arguments: Mapping[str, Any]) -> BwdWorkspace:
    """The workspace's tensors for a call's arguments by name; uninitialized."""
    q, k = (seqlen_info.as_sdhb(arguments[x], c.varlen) for x in ("q", "k"))
    batches = seqlen_info.num_sequences(c, arguments)
    blocks, heads = seqlen_info.num_blocks(q.shape[0], batches, c.tile[0], c.varlen), q.shape[2:]
    shapes = {
        "dq_accum": (512, c.tile[0] * c.head_dim // 512, blocks, *heads),
        "dq_semaphore": (c.tile[0], blocks, *heads),
        "tile_count_semaphore": (1,),
        **dict.fromkeys(("lse_log2", "dpsum"), (blocks * c.tile[0], *heads)),
    }
    if const_expr(c.longest_first):
        shapes["block_order"] = (2, seqlen_info.num_blocks(k.shape[0], batches, c.cluster_tile_n, c.varlen))
    if const_expr(c.split):
        shapes["dkv_partial"] = (c.dkv_width, c.cluster_tile_n, arguments["parts"], arguments["split"])
    workspace = BwdWorkspace(**workspace_tensors(c, arguments, shapes, workspace_sizes(c, arguments)))
    if const_expr(c.split):
        workspace.dkv_partial = transposed(workspace.dkv_partial)
    return workspace


def workspace_sizes(c: BackwardConfiguration, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by name, for the regions of the workspace."""
    q, k = (seqlen_info.as_sdhb(arguments[x], c.varlen) for x in ("q", "k"))
    sizes = {"sq": q.shape[0], "sk": k.shape[0], "hq": q.shape[2], "b": seqlen_info.num_sequences(c, arguments)}
    sizes |= {x: arguments[x] for x in ("split", "parts") if x in arguments}
    return {name: Int64(x) for name, x in sizes.items()}


def workspace_tensors(
    c: BackwardConfiguration | DecodeConfiguration,
    arguments: Mapping[str, Any],
    shapes: Mapping[str, tuple[Any, ...]],
    sizes: dict[str, Any],
) -> dict[str, cute.Tensor]:
    """The workspace's regions that have a shape here, as 32-bit values: int32 semaphores and block order, else
    float32.
    """
    pointers, integers = workspace_pointers(c.slots(), arguments, c.regions(), sizes), INT32_REGIONS
    dtypes = {x: Int32 if x in integers else Float32 for x in pointers if x in shapes}
    return {
        x: cute.make_tensor(cute.recast_ptr(pointers[x], dtype=dtype), cute.make_layout(shapes[x]))
        for x, dtype in dtypes.items()
    }


def row_vector(tensor: cute.Tensor, row: Int32, head: Int32, batch: Int32, number: Any) -> cute.Tensor:
    """The ``number``-th 16 bytes of a row."""
    return cute.local_tile(tensor[row, None, head, batch], (VECTOR,), (number,))


class FlashBwdPreprocess:
    """dPsum = rowsum(dO * O) - dLSE, LSE * log2(e), zeroed dQ accumulator and semaphores. A CTA has 16 rows of a head.

    LSE is inf for padding rows, and for rows whose LSE is -inf, which see no key: so P = exp2(S - LSE) is 0. A row has
    8 to 32 lanes; a lane issues the loads of all its rows before it reduces.
    """

    rows = 16

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration
        self.lanes = next(lanes for lanes in (8, 16, 32) if lanes * VECTOR >= configuration.head_dim_v)
        self.passes = self.rows * self.lanes // PREPROCESS_THREADS

    def launch(self, arguments: Mapping[str, Any], workspace: BwdWorkspace) -> None:
        """On a call's arguments by name; the workspace's semaphores become zeros too."""
        c, rows = self.c, workspace.dpsum.shape
        o, do = (seqlen_info.as_sdhb(arguments[x], c.varlen) for x in ("o", "do"))
        lse, dlse = (
            seqlen_info.lse_view(arguments[x], c.varlen, c.lse == "by head") if x in arguments else None
            for x in ("lse", "dlse")
        )
        cu_seqlens = arguments.get("cum_seqlen_q")
        blocks = rows[0] // self.rows
        semaphore = workspace.dq_semaphore
        dq_accum = None if c.first_cta_stores_dq else workspace.dq_accum
        if dq_accum is not None:
            dq_accum = cute.make_tensor(
                dq_accum.iterator, cute.make_layout((self.rows * c.head_dim, blocks, *rows[1:]))
            )
        if semaphore is not None:
            semaphore = cute.make_tensor(semaphore.iterator, workspace.dpsum.layout)
        grid, shape = make_grid(blocks, o.shape[2], o.shape[3])
        self.kernel(
            o,
            do,
            lse,
            dlse,
            workspace.dpsum,
            workspace.lse_log2,
            dq_accum,
            semaphore,
            workspace.tile_count_semaphore,
            cu_seqlens,
            grid,
        ).launch(grid=shape, block=[PREPROCESS_THREADS, 1, 1], stream=arguments["stream"])

    @cute.kernel
    def kernel(
        self,
        o: cute.Tensor,
        do: cute.Tensor,
        lse: cute.Tensor,
        dlse: Any,
        dpsum: cute.Tensor,
        lse_log2: cute.Tensor,
        dq_accum: Any,
        semaphore: Any,
        tile_count_semaphore: Any,
        cu_seqlens: Any,
        grid: FlatGrid,
    ) -> None:
        c, lanes = self.c, self.lanes
        thread, cta = thread_block_idx()
        block, head, batch = grid_coord(grid)
        if const_expr(tile_count_semaphore is not None):
            if cta + thread == 0:
                tile_count_semaphore[0] = Int32(0)
        lane = thread % lanes
        row_begin, seq_offset, rows = self.rows_of(block, o.shape[0], cu_seqlens)
        fragments = self.load((o, do), row_begin, seq_offset, rows, head, batch, thread)
        if const_expr(dq_accum is not None):
            self.clear(dq_accum[None, block, head, batch], thread)
        for i in cutlass.range_constexpr(self.passes):
            row, dot, row_lse = row_begin + self.row(thread, i), Float32(0.0), Float32.inf
            if row < rows:
                if lane < c.head_dim_v // VECTOR:
                    a, b = (fragment.load().to(Float32) for fragment in fragments[i])
                    dot = (a * b).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
                row_lse = lse[seq_offset + row, head, batch] * LOG2_E
                row_lse = Float32(select_(row_lse == -Float32.inf, Float32.inf, row_lse))
            dot = cute.arch.warp_reduction_sum(dot, threads_in_group=lanes)
            if const_expr(dlse is not None):
                if row < rows:
                    dot -= dlse[seq_offset + row, head, batch]
            if lane == 0:
                padded_row = block * self.rows + self.row(thread, i)
                dpsum[padded_row, head, batch] = dot
                lse_log2[padded_row, head, batch] = row_lse
                if const_expr(semaphore is not None):
                    semaphore[padded_row, head, batch] = 0

    def rows_of(self, block: Int32, rows: Any, cu_seqlens: Any) -> tuple[Int32, Int32, Int32]:
        """The CTA's first row in its sequence, the sequence's first row in the tensors, and its length."""
        start, size = block * self.rows, self.c.tile[0]
        row_begin, seq_offset, rows = m_block_rows(start // size, rows, size, cu_seqlens)
        return row_begin + start % size, seq_offset, rows

    @cute.jit
    def load(
        self, tensors: tuple, row_begin: Int32, seq_offset: Int32, rows: Int32, head: Int32, batch: Int32, thread: Int32
    ) -> list[list[cute.Tensor]]:
        """A lane's vectors of a thread's rows, of all tensors."""
        fragments = [[cute.make_rmem_tensor(VECTOR, x.element_type) for x in tensors] for _ in range(self.passes)]
        lane = thread % self.lanes
        for i in cutlass.range_constexpr(self.passes):
            row = row_begin + self.row(thread, i)
            if (row < rows) & (lane < self.c.head_dim_v // VECTOR):
                for fragment, tensor in zip(fragments[i], tensors, strict=True):
                    cute.autovec_copy(row_vector(tensor, seq_offset + row, head, batch, lane), fragment)
        return fragments

    def clear(self, dq_accum: cute.Tensor, thread: Int32) -> None:
        """Zeros the dQ accumulator of the CTA's rows."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in range(self.rows * self.c.head_dim // 4 // PREPROCESS_THREADS):
            cute.autovec_copy(zeros, cute.local_tile(dq_accum, (4,), (thread + i * PREPROCESS_THREADS,)))

    def row(self, thread: Int32, i: int) -> Int32:
        """The index of a thread's ``i``-th row among the CTA's."""
        return thread // self.lanes + i * (PREPROCESS_THREADS // self.lanes)

    set_kernel_name(kernel, "cudnn_attention_backward_preprocess")


class ReduceDSink:
    """dsink = -sum(exp(sink - LSE) * dPsum) over all rows of a head: a CTA has a head, and sums in a fixed order.

    Padding rows add 0: their LSE is inf.
    """

    threads = 512

    def launch(
        self, dpsum: cute.Tensor, lse_log2: cute.Tensor, sink: cute.Tensor, dsink: cute.Tensor, stream: Any
    ) -> None:
        """dpsum and lse_log2 (s, h, b); sink and dsink (h,)."""
        self.kernel(dpsum, lse_log2, sink, dsink).launch(
            grid=[sink.shape[0], 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, dpsum: cute.Tensor, lse_log2: cute.Tensor, sink: cute.Tensor, dsink: cute.Tensor) -> None:
        thread, head = thread_block_idx()
        warp_sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.threads // WARP_SIZE))
        logit, total = sink[head] * LOG2_E, Float32(0.0)
        for batch in cutlass.range(dpsum.shape[2], unroll=1):
            for row in cutlass.range(thread, dpsum.shape[0], self.threads, unroll=4):
                weight = cute.math.exp2(logit - lse_log2[row, head, batch], fastmath=True)
                total += weight * dpsum[row, head, batch]
        total = cute.arch.warp_reduction_sum(total)
        if thread % WARP_SIZE == 0:
            warp_sums[thread // WARP_SIZE] = total
        cute.arch.sync_threads()
        if thread == 0:
            total = Float32(0.0)
            for i in cutlass.range_constexpr(self.threads // WARP_SIZE):
                total += warp_sums[i]
            dsink[head] = -total

    set_kernel_name(kernel, "cudnn_attention_backward_reduce_dsink")
