"""Attention on Hopper, backward: dQ, dK and dV in one kernel.

    P = exp(scale Q K^T - LSE)   dP = dO V^T   dS = P (dP - D)   D = the sum of O dO over a row
    dV = P^T dO                  dK = scale dS^T Q               dQ = scale dS K

A CTA has a block of keys, and dK and dV of it in registers; it goes through the query blocks that see it. dQ's sum over
blocks of keys is added up in global memory, in float32.

Two warpgroups multiply. Each has half of the keys: their S^T and dP^T have keys in rows, so that P^T and dS^T go
into the products for dV and dK from registers. Only dS passes through shared memory, for dQ, of which each warpgroup
has half. Of a third warpgroup, one warp lets the copy engine fetch, another one lets it add up dQ.

``deterministic``: additions to a block of queries take turns, in the order of the keys: from the last ones on with
a causal mask, since their CTAs come to a block first, and from the first ones on without. CTAs start in that order too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.around import QueryGradient, RowProducts
from cudnn_kernels.attention.mask import Mask, mask_of
from cudnn_kernels.attention.sequences import Sequence, turned
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.wgmma import WgmmaRows, register_operand
from cudnn_kernels.signature import START, Workspace, bind

GROUP = 128  # threads of a warpgroup
GROUPS = 2  # that multiply
ROWS = 64  # of a warpgroup's product
FEW, MANY = 24, 240  # registers of a loading and of a multiplying thread
ALL_BARRIER = 1  # of the multiplying warpgroups
STAGES = 2
TOGETHER = 8
"""Heads of K whose first blocks start together where a mask makes later ones shorter, so that no long one is last; half
as many with pairs of CTAs. Several blocks of a head still run at the same time, and find in L2 what they load.
"""


@dataclass
class Block:
    """A CTA's keys: their first one, head and batch, and where the sequence lies."""

    key: Int32
    head: Int32
    batch: Int32
    first_query: Int32
    first_key: Int32
    first_block: Int32  # of the sequence's query blocks, among all
    begin: Int32  # of the query blocks that see the cluster's keys
    end: Int32
    mask: Mask


@dataclass
class Values:
    """What belongs to query rows in the workspace: LSE * log2(e), D, dQ's sums, and how many CTAs added to them."""

    log_sums: cute.Tensor
    products: cute.Tensor
    dq_sums: cute.Tensor
    turns: Any = None


class Backward:
    """What the kernels for a :class:`BackwardConfiguration` have in common. ``cluster`` CTAs take neighbouring keys."""

    cluster = 1

    def __init__(self, configuration: BackwardConfiguration) -> None:
        c = self.c = configuration
        self.dtype = DTYPES[c.dtype]
        self.m, self.n = c.tile
        self.rows = WgmmaRows(slots=2)
        self.widths = {"q": c.head, "k": c.head, "v": c.head_v, "do": c.head_v}

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        q, k, o, do, dq, dk, dv = (
            sequences.matrix(given[name], c.packed) for name in ("q", "k", "o", "do", "dq", "dk", "dv")
        )
        copied = {name: sequences.copied(given[name], c.packed) for name in ("q", "k", "v", "do")}
        lse = sequences.rows(given["lse"], c.packed, c.lse == "by head")
        offsets = (given.get("cum_seqlen_q"), given.get("cum_seqlen_k"))
        batches = offsets[0].shape[0] - 1 if const_expr(c.packed) else q.shape[3]
        scale, stream, key_heads = given["scale_softmax"], given["stream"], cute.size(k, mode=[2])
        blocks = sequences.blocks_of(q.shape[0], batches, self.m, c.packed)
        sizes = {"sq": Int64(q.shape[0]), "sk": Int64(k.shape[0]), "hq": Int64(q.shape[2]), "b": Int64(batches)}
        per_row = (blocks * self.m, q.shape[2], q.shape[3])
        per_block = (512, self.m * c.head // 512, blocks, q.shape[2], q.shape[3])
        values = Values(
            self.region(given["workspace"], "log_sums", per_row, sizes),
            self.region(given["workspace"], "row_products", per_row, sizes),
            self.region(given["workspace"], "dq_sums", per_block, sizes),
        )
        if const_expr(c.deterministic):
            values.turns = self.region(given["workspace"], "turns", (self.m, *per_block[2:]), sizes, Int32)
        RowProducts(c).launch(
            o, do, lse, values.products, values.log_sums, values.dq_sums, offsets[0], stream, values.turns
        )  # fmt: skip
        clusters = sequences.blocks_of(k.shape[0], batches, self.cluster * self.n, c.packed)
        heads = key_heads * q.shape[3]
        sections = cute.ceil_div(heads, TOGETHER // self.cluster if const_expr(c.right or c.compressed) else 1)
        self.kernel(
            self.atoms(copied), dk, dv, (values.log_sums, values.products, values.dq_sums, values.turns), offsets,
            q.shape[0], q.shape[2] // key_heads, scale, given["right"], given["left"],
        ).launch(
            grid=[self.cluster * cute.ceil_div(heads, sections), clusters, sections],
            block=[GROUP * (1 + GROUPS), 1, 1], cluster=[self.cluster, 1, 1], stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip
        QueryGradient(c).launch(values.dq_sums, dq, offsets[0], scale, stream)

    def region(
        self, workspace: cute.Tensor, name: str, shape: tuple[Any, ...], sizes: dict[str, Any], kind: Any = Float32
    ) -> cute.Tensor:  # fmt: skip
        """A region of the workspace as values of 32 bits."""
        (slot,) = (slot for slot in self.c.slots() if isinstance(slot, Workspace))
        start = cute.assume(Int64(slot.places(sizes)[0][name]), START)
        first = cute.recast_ptr((workspace.iterator + start).align(16), dtype=kind)
        return cute.make_tensor(first, cute.make_layout(shape))

    def atoms(self, copied: dict[str, cute.Tensor]) -> Any:
        """How the copy engine fetches each tensor."""
        raise NotImplementedError

    def kernel(self, *arguments: Any) -> Any:
        """The kernel proper."""
        raise NotImplementedError

    def tile(self, rows: int, columns: int, stages: int = 1) -> Any:
        """A buffer's layout, rows of contiguous elements: (rows, columns), and stages if there are several."""
        layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, 64, columns), self.dtype, stages)
        return layout if stages > 1 else cute.slice_(layout, (None, None, 0))

    def loaded(self, tensor: cute.Tensor, rows: int, columns: int) -> Any:
        """How the copy engine fetches a tile: an atom and the tensor of its coordinates."""
        load = cpasync.CopyBulkTensorTileG2SOp()
        return cpasync.make_tiled_tma_atom(load, tensor, self.tile(rows, columns), (rows, columns))

    def mma(self, n: int, a: OperandMajorMode, b: OperandMajorMode, source: Any = None) -> cute.TiledMma:
        """The product of 64 rows and ``n`` columns, of operands in shared memory, or A from registers."""
        source = source or warpgroup.OperandSource.SMEM
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (ROWS, n, 16), source, a, b)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def allocate(self, smem: Any, layout: Any) -> cute.Tensor:
        """A swizzled buffer."""
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def barriers(self, smem: Any, counts: dict[str, tuple[int, int]], thread: Int32) -> dict[str, Any]:
        """Barriers in shared memory, by name: as many as the first number, for so many arrivals as the second."""
        made = {name: smem.allocate_array(cutlass.Int64, count) for name, (count, _) in counts.items()}
        self.initialise(made, counts, thread)
        return made

    @cute.jit
    def initialise(self, made: dict[str, Any], counts: dict[str, tuple[int, int]], thread: Int32) -> None:
        """Makes the barriers ready, for all CTAs of the cluster."""
        if thread == 0:
            for name, (count, arrivals) in counts.items():
                for i in range(count):
                    cute.arch.mbarrier_init(made[name] + i, arrivals)
        cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def block(self, offsets: Any, queries: Int32, dk: cute.Tensor, right: Int32, left: Int32, rank: Any) -> Block:
        """What this CTA's keys are. All CTAs of a cluster take the same query blocks."""
        c, size = self.c, self.cluster * self.n
        keys, heads = dk.shape[0], cute.size(dk, mode=[2])
        place, cluster, section = cute.arch.block_idx()
        together, clusters, _ = cute.arch.grid_dim()
        if const_expr(c.deterministic and c.right):
            cluster = clusters - 1 - cluster
        head = (section * together + place) // self.cluster
        exists = head < heads * dk.shape[3]
        batch, head = head // heads, head % heads
        s, first_block = Sequence(batch, queries, keys, Int32(0), Int32(0)), Int32(0)
        if const_expr(c.packed):
            batch, cluster = sequences.find_block(offsets[1], cluster, size)
            s = sequences.packed(*offsets, batch)
            first_block = sequences.first_block(offsets[0], batch, self.m)
        queries, keys = s.queries, s.keys
        mask = mask_of(c, queries, keys, right, left)
        first = cluster * size
        if not exists:
            first = keys
        seen_by = mask.turned()
        begin = seen_by.begin(first) // self.m
        end = cute.ceil_div(cutlass.max(seen_by.end(first + size - 1), Int32(0)), self.m)
        if first >= keys:
            end = begin
        end = cutlass.max(begin, end)
        return Block(first + rank * self.n, head, s.batch, s.first_query, s.first_key, first_block, begin, end, mask)

    def fetch(self, atom: Any, source: cute.Tensor, target: cute.Tensor, place: Any, shape: Any, full: Any) -> None:
        """Starts a copy of a tile that begins at ``place``."""
        tile = cute.local_tile(cute.domain_offset(place, source), shape, (0, 0))
        to, of = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, of, to, tma_bar_ptr=full)

    @cute.jit
    def fetch_keys(self, atoms: Any, buffers: Any, full: Any, block: Block, places: Any) -> None:
        """Fetches the tiles that stay for all steps, if there are any, by the names of their buffers."""
        if block.end > block.begin:
            self.expect(full, self.n * sum(self.widths[x] for x in places))
            for x, place in places.items():
                rows = sequences.copied_rows(atoms[x][1], block.head, block.batch, block.first_key, block.mask.keys)
                self.fetch(atoms[x][0], rows, buffers[x], place, (self.n, self.widths[x]), full)

    @cute.jit
    def expect(self, full: Any, elements: int, more: int = 0) -> None:
        """Announces so many elements, and so many bytes more."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, elements * self.dtype.width // 8 + more)

    def multiply(self, mma: Any, acc: cute.Tensor, a: Any, b: Any, accumulate: bool) -> None:
        """Issues a product, as a group of its own."""
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def all_multiplying(self) -> None:
        """Waits for both multiplying warpgroups."""
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=GROUPS * GROUP)

    @cute.jit
    def hide(self, scores: cute.Tensor, mask: Mask, row: Int32, key: Int32, width: int, thread: Int32) -> None:
        """Makes scores that do not count -inf, in the tiles that have any."""
        if not mask.whole(row, ROWS, key, width):
            mask.hide(scores, self.rows, thread, row, key, width)

    def put(
        self, mma: Any, values: cute.Tensor, target: cute.Tensor, transposed: bool, count: int, thread: Int32
    ) -> None:  # fmt: skip
        """Writes a warpgroup's rounded accumulators to its tile in shared memory, ``count`` matrices at once."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, count), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(target))

    def rounded(self, values: cute.Tensor, factor: Any = None) -> cute.Tensor:
        """The values in the type of the inputs."""
        found = cute.make_rmem_tensor(values.shape, self.dtype)
        loaded = values.load() if factor is None else values.load() * factor
        found.store(loaded.to(self.dtype))
        return found

    @cute.jit
    def release(self, empty: Any) -> None:
        """A warp is done with a buffer."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty)

    def sums(self, values: Values, block: Block, step: Int32, steps: Int32, group_heads: Int32) -> cute.Tensor:
        """Those of dQ of a step's block."""
        head, m_block = block.head * group_heads + step // steps, block.begin + step % steps
        return values.dq_sums[None, None, block.first_block + m_block, head, 0 if self.c.packed else block.batch]

    def turns(self, values: Values, block: Block, step: Int32, steps: Int32, group_heads: Int32) -> cute.Tensor:
        """How many have added each part of dQ of a step's block so far."""
        head, m_block = block.head * group_heads + step // steps, block.begin + step % steps
        return values.turns[None, block.first_block + m_block, head, 0 if self.c.packed else block.batch]

    def turn(self, mask: Mask, block: Block, m_block: Int32) -> Int32:
        """How many clusters add to a block of queries before this one."""
        row, size = m_block * self.m, self.cluster * self.n
        number = block.key // size
        if self.c.right:
            return (mask.end(row + self.m - 1) - 1) // size - number
        return number - mask.begin(row) // size

    @cute.jit
    def wait_for_turn(self, turns: cute.Tensor, part: Any, turn: Int32) -> None:
        """Waits until so many have added what they had."""
        found, place = Int32(-1), cute.domain_offset((part,), turns).iterator
        while found != turn:
            found = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place.toint()]
            )

    def end_turn(self, turns: cute.Tensor, part: Any, count: Any = 1) -> None:
        """Lets the next one add; nothing with a count of 0."""
        place = cute.domain_offset((part,), turns).iterator
        arguments = [place.toint(), Int32(count)]
        cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=arguments)

    @cute.jit
    def write(self, buffer: cute.Tensor, out: cute.Tensor, block: Block, width: int, thread256: Int32) -> None:
        """Writes the rows of dK or dV that exist, from shared memory."""
        batch = 0 if const_expr(self.c.packed) else block.batch
        vector = 128 // self.dtype.width
        columns = width // vector
        target = cute.domain_offset((block.first_key + block.key, 0), out[None, None, block.head, batch])
        for i in cutlass.range_constexpr(self.n * columns // (GROUPS * GROUP)):
            index = thread256 + i * GROUPS * GROUP
            row, column = index // columns, index % columns
            if block.key + row < block.mask.keys:
                source = cute.local_tile(buffer, (1, vector), (row, column))
                cute.autovec_copy(source, cute.local_tile(target, (1, vector), (row, column)))


class AttentionBackward(Backward):
    """The kernel in which a warpgroup has 64 keys."""

    def atoms(self, copied: dict[str, cute.Tensor]) -> Any:
        c = self.c
        return (
            self.loaded(copied["q"], self.m, c.head), self.loaded(copied["do"], self.m, c.head_v),
            self.loaded(copied["k"], self.n, c.head), self.loaded(copied["v"], self.n, c.head_v),
        )  # fmt: skip

    def score_mma(self) -> cute.TiledMma:
        """S^T and dP^T: rows are a warpgroup's keys, columns queries."""
        return self.mma(self.m, OperandMajorMode.K, OperandMajorMode.K)

    def key_mma(self, head: int) -> cute.TiledMma:
        """dV = P^T dO and dK = dS^T Q: rows are a warpgroup's keys."""
        return self.mma(head, OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM)

    def query_mma(self) -> cute.TiledMma:
        """dQ = dS K: of 64 queries half of the head, or of 128 all of it."""
        return self.mma(self.c.head * self.m // (GROUPS * ROWS), OperandMajorMode.K, OperandMajorMode.MN)

    @cute.kernel
    def kernel(
        self, atoms: Any, dk: cute.Tensor, dv: cute.Tensor, values: Any, offsets: Any, queries: Int32,
        group_heads: Int32, scale: Float32, right: Int32, left: Int32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        smem = SmemAllocator()
        buffers = {
            "q": self.allocate(smem, self.tile(self.m, c.head, STAGES)),
            "do": self.allocate(smem, self.tile(self.m, c.head_v, STAGES)),
            "k": self.allocate(smem, self.tile(self.n, c.head)), "v": self.allocate(smem, self.tile(self.n, c.head_v)),
            "ds": self.allocate(smem, self.tile(self.m, self.n, STAGES)),
        }  # fmt: skip
        dq = cute.make_layout((512, self.m * c.head // 512))
        buffers["dq"] = smem.allocate_tensor(Float32, dq, byte_alignment=128)
        per_row = cute.make_layout((self.m, STAGES))
        buffers |= {x: smem.allocate_tensor(Float32, per_row, byte_alignment=128) for x in ("log_sums", "products")}
        ring = {"full": (STAGES, 1), "empty": (STAGES, 4 * GROUPS)}
        counts = {f"{x}_{state}": count for x in ("q", "do") for state, count in ring.items()}
        counts |= {"dq_full": (GROUPS, 4), "dq_empty": (GROUPS, 1)}
        barriers = self.barriers(smem, {"kv_full": (1, 1), **counts}, thread)
        block, values = self.block(offsets, queries, dk, right, left, 0), Values(*values)
        if group == 0:
            cute.arch.setmaxregister_decrease(FEW)
            if warp_index == 0:
                named = dict(zip(("q", "do", "k", "v"), atoms, strict=True))
                self.produce(named, buffers, barriers, values, block, group_heads)
            if warp_index == 1:
                self.accumulate(buffers["dq"], barriers, values, block, group_heads)
        else:
            cute.arch.setmaxregister_increase(MANY)
            self.consume(buffers, barriers, dk, dv, values, block, group_heads, scale, group - 1, thread - GROUP)

    name(kernel, "cudnn_attention_backward_sm90")

    @cute.jit
    def produce(
        self, atoms: Any, buffers: Any, barriers: Any, values: Values, block: Block, group_heads: Int32
    ) -> None:  # fmt: skip
        """One warp: fetches K and V, then Q and dO of every step."""
        c = self.c
        steps = block.end - block.begin
        mine = (block.key, 0)
        self.fetch_keys(atoms, buffers, barriers["kv_full"], block, {"k": mine, "v": mine})
        total = steps * group_heads
        batch = 0 if const_expr(c.packed) else block.batch
        for step in cutlass.range(total + cutlass.min(total, 1), unroll=1):  # the last Q is multiplied for nothing
            used = cutlass.min(step, total - 1)
            head, index = block.head * group_heads + used // steps, block.begin + used % steps
            first = (block.first_block + index) * self.m
            stage, phase = step % STAGES, step // STAGES % 2
            for x, of_rows in (("q", "log_sums"), ("do", "products")):
                if x == "q" or step < total:
                    full = barriers[f"{x}_full"] + stage
                    cute.arch.mbarrier_wait(barriers[f"{x}_empty"] + stage, phase ^ 1)
                    self.expect(full, self.m * self.widths[x], 4 * self.m)
                    rows = sequences.copied_rows(atoms[x][1], head, block.batch, block.first_query, block.mask.queries)
                    target = buffers[x][None, None, stage]
                    self.fetch(atoms[x][0], rows, target, (index * self.m, 0), (self.m, self.widths[x]), full)
                    source = cute.domain_offset((first, head, batch), getattr(values, of_rows)).iterator
                    self.fetch_rows(source, buffers[of_rows][None, stage].iterator, full)

    @cute.jit
    def fetch_rows(self, source: Any, target: Any, full: Any) -> None:
        """Starts a copy of a value for each row."""
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[target.toint(), source.toint(), Int32(4 * self.m), full.toint()],
            )

    @cute.jit
    def consume(
        self, buffers: Any, barriers: Any, dk: cute.Tensor, dv: cute.Tensor, values: Values, block: Block,
        group_heads: Int32, scale: Float32, group: Int32, thread256: Int32,
    ) -> None:  # fmt: skip
        """A warpgroup: the products of all steps, then dK and dV."""
        c = self.c
        thread = thread256 - group * GROUP
        score_mma, query_mma = self.score_mma(), self.query_mma()
        dk_mma, dv_mma = self.key_mma(c.head), self.key_mma(c.head_v)
        score, dk_part, dv_part, query = (x.get_slice(thread) for x in (score_mma, dk_mma, dv_mma, query_mma))
        sK, sV = (cute.local_tile(buffers[x], (ROWS, head), (group, 0)) for x, head in (("k", c.head), ("v", c.head_v)))
        tSrK, tSrV = (score_mma.make_fragment_A(score.partition_A(x)) for x in (sK, sV))
        tSrQ, tSrdO = (score_mma.make_fragment_B(score.partition_B(buffers[x])) for x in ("q", "do"))
        tKrQ = dk_mma.make_fragment_B(dk_part.partition_B(turned(buffers["q"])))
        tVrdO = dv_mma.make_fragment_B(dv_part.partition_B(turned(buffers["do"])))
        slab, half = (group, 0) if const_expr(self.m == GROUPS * ROWS) else (0, group)
        width = c.head * self.m // (GROUPS * ROWS)
        tQrS = query_mma.make_fragment_A(
            query.partition_A(cute.local_tile(buffers["ds"], (ROWS, self.n), (slab, 0, None)))
        )
        tQrK = query_mma.make_fragment_B(
            query.partition_B(cute.local_tile(turned(buffers["k"]), (width, self.n), (half, 0)))
        )
        scores, gradients = (
            cute.make_rmem_tensor(score_mma.partition_shape_C((ROWS, self.m)), Float32) for _ in range(2)
        )
        acc_dk, acc_dv = (
            cute.make_rmem_tensor(mma.partition_shape_C((ROWS, head)), Float32)
            for mma, head in ((dk_mma, c.head), (dv_mma, c.head_v))
        )
        acc_dq = cute.make_rmem_tensor(query_mma.partition_shape_C((ROWS, width)), Float32)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        steps = block.end - block.begin
        total = steps * group_heads
        mask, key = block.mask.turned(), block.key + group * ROWS
        q_full, q_empty, do_full, do_empty, dq_full, dq_empty = (
            barriers[f"{x}_{state}"] for x in ("q", "do", "dq") for state in ("full", "empty")
        )
        if total > 0:
            cute.arch.mbarrier_wait(barriers["kv_full"], 0)
        for step in cutlass.range(total, unroll=1):
            m_block = block.begin + step % steps
            stage, phase = step % STAGES, step // STAGES % 2
            cute.arch.mbarrier_wait(q_full + stage, phase)
            self.multiply(self.score_mma(), scores, tSrK, tSrQ[None, None, None, stage], False)
            cute.arch.mbarrier_wait(do_full + stage, phase)
            self.multiply(self.score_mma(), gradients, tSrV, tSrdO[None, None, None, stage], False)
            warpgroup.wait_group(1)
            self.hide(scores, mask, key, m_block * self.m, self.m, thread)
            self.exponentiate(scores, buffers["log_sums"][None, stage], scale * LOG2_E, thread)
            p = register_operand(dv_mma, self.rounded(scores), (ROWS, self.m))
            warpgroup.wait_group(0)
            self.differentiate(gradients, scores, buffers["products"][None, stage], thread)
            rounded = self.rounded(gradients)
            ds = register_operand(dk_mma, rounded, (ROWS, self.m))
            sdS = cute.local_tile(turned(buffers["ds"])[None, None, stage], (ROWS, self.m), (group, 0))
            self.multiply(self.key_mma(c.head_v), acc_dv, p, tVrdO[None, None, None, stage], True)
            self.put(score_mma, rounded, sdS, True, 4, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_multiplying()
            self.multiply(self.query_mma(), acc_dq, tQrS[None, None, None, stage], tQrK, False)
            self.multiply(self.key_mma(c.head), acc_dk, ds, tKrQ[None, None, None, stage], True)
            warpgroup.wait_group(1)
            self.release(do_empty + stage)
            cute.arch.mbarrier_wait(dq_empty + group, step % 2 ^ 1)
            self.hand_over(acc_dq, buffers["dq"], dq_full + group, group, thread)
            warpgroup.wait_group(0)
            self.release(q_empty + stage)
        self.all_multiplying()  # both have used K
        for acc, mma, buffer, out, head, factor in (
            (acc_dk, dk_mma, buffers["k"], dk, c.head, scale), (acc_dv, dv_mma, buffers["v"], dv, c.head_v, None),
        ):  # fmt: skip
            mine = cute.local_tile(buffer, (ROWS, head), (group, 0))
            self.put(mma, self.rounded(acc, factor), mine, False, 4, thread)
            self.all_multiplying()
            self.write(buffer, out, block, head, thread256)

    @cute.jit
    def hand_over(self, acc: cute.Tensor, buffer: cute.Tensor, full: Any, part: Int32, thread: Int32) -> None:
        """Writes a part of dQ to where the copy engine adds it from: four values of each thread after the other's."""
        vectors = cute.size(acc) // 4
        for i in cutlass.range_constexpr(vectors):
            four = cute.make_rmem_tensor(4, Float32)
            for j in cutlass.range_constexpr(4):
                four[j] = acc[4 * i + j]
            cute.autovec_copy(four, cute.local_tile(buffer[None, part * vectors + i], (4,), (thread,)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.release(full)

    @cute.jit
    def accumulate(
        self, buffer: cute.Tensor, barriers: Any, values: Values, block: Block, group_heads: Int32
    ) -> None:  # fmt: skip
        """One warp: lets the copy engine add both warpgroups' parts of dQ, step by step."""
        c = self.c
        steps = block.end - block.begin
        chunks = self.m * c.head // 512 // GROUPS
        size = Int32(4 * 512 * chunks)
        mask = replace(block.mask)  # of the loop's own: a branch in it rebinds the values of what it uses
        for step in cutlass.range(steps * group_heads, unroll=1):
            sums = self.sums(values, block, step, steps, group_heads)
            for part in cutlass.range_constexpr(GROUPS):
                cute.arch.mbarrier_wait(barriers["dq_full"] + part, step % 2)
                if const_expr(c.deterministic):
                    turn = self.turn(mask, block, block.begin + step % steps)
                    self.wait_for_turn(self.turns(values, block, step, steps, group_heads), part, turn)
                    cute.arch.inline_ptx("fence.proxy.async.global;", read_only_args=[])
                source, target = (cute.domain_offset((0, part * chunks), x).iterator.toint() for x in (buffer, sums))
                with cute.arch.elect_one():
                    cute.arch.inline_ptx(
                        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
                        read_only_args=[target, source, size],
                    )
                    cute.arch.cp_async_bulk_commit_group()
                cute.arch.sync_warp()
            for part in cutlass.range_constexpr(GROUPS):
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(GROUPS - 1 - part, read=True)
                    cute.arch.mbarrier_arrive(barriers["dq_empty"] + part)
                cute.arch.sync_warp()
            for part in cutlass.range_constexpr(GROUPS if c.deterministic else 0):
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(GROUPS - 1 - part, read=False)
                    cute.arch.inline_ptx("fence.proxy.async.global;", read_only_args=[])
                    self.end_turn(self.turns(values, block, step, steps, group_heads), part)
                cute.arch.sync_warp()

    def columns(self, values: cute.Tensor, thread: Int32) -> cute.Tensor:
        """The values, in shared memory, of the query rows that a thread has as columns."""
        found = cute.make_rmem_tensor(self.m // 4, Float32)
        for i in range(self.m // 8):
            source = cute.local_tile(values, (2,), (4 * i + thread % 4,))
            cute.autovec_copy(source, cute.local_tile(found, (2,), (i,)))
        return found

    def exponentiate(self, scores: cute.Tensor, log_sums: cute.Tensor, scale: Float32, thread: Int32) -> None:
        """Turns scores into P."""
        shifts = self.columns(log_sums, thread)
        for slot in range(2):
            for place, i in enumerate(self.rows.order(self.m, slot)):
                scores[i] = cute.math.exp2(scores[i] * scale - shifts[place], fastmath=True)

    def differentiate(self, gradients: cute.Tensor, p: cute.Tensor, products: cute.Tensor, thread: Int32) -> None:
        """Turns dP into dS."""
        shifts = self.columns(products, thread)
        for slot in range(2):
            for place, i in enumerate(self.rows.order(self.m, slot)):
                gradients[i] = p[i] * (gradients[i] - shifts[place])
