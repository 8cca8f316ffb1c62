"""Attention on Hopper, backward: dQ, dK and dV in one kernel.

    P = exp(scale Q K^T - LSE)   dP = dO V^T   dS = P (dP - D)   D = the sum of O dO over a row
    dV = P^T dO                  dK = scale dS^T Q               dQ = scale dS K

A CTA has a block of keys, and dK and dV of it in registers; it goes through the query blocks that see it. dQ's sum over
blocks of keys is added up in global memory, in float32.

Two warpgroups multiply. Each has half of the keys: their S^T and dP^T have keys in rows, so that P^T and dS^T go
into the products for dV and dK from registers. Only dS passes through shared memory, for dQ, of which each warpgroup
has half. Of a third warpgroup, one warp lets the copy engine fetch, another one lets it add up dQ.

``deterministic``: additions to a block of queries take turns in the order in which CTAs start, so that a CTA waits for
earlier ones alone: of keys from the last ones on with a causal mask, since their CTAs come to a block first, and from
the first ones on without. The last heads have the first keys first even so: their CTAs, the longest ones, must not end
alone, and go through the queries from the last ones on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.around import KeyGradients, QueryGradient, Values, prepare, store_rows
from cudnn_kernels.attention.backward import Block, Work, block_of, part_of, place_of, work_of
from cudnn_kernels.attention.mask import Mask
from cudnn_kernels.attention.softmax import Scale, cap
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import barriers, ring
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.cluster import Cluster, meet
from cudnn_kernels.pipeline.copy import copy_bytes, fetch
from cudnn_kernels.pipeline.wgmma import MN, Product, WgmmaRows, opaque, register_operand

GROUP = 128  # threads of a warpgroup
GROUPS = 2  # that multiply
ROWS = 64  # of a warpgroup's product
FEW, MANY = 24, 240  # registers of a loading and of a multiplying thread
ALL_BARRIER = 1  # of the multiplying warpgroups
STAGES = 2
DRAWN = 2  # blocks of keys
TOGETHER = 8
"""Heads of K whose first blocks start together where a mask makes later ones shorter, so that no long one is last, and
where CTAs take turns, so that few wait; half as many with pairs of CTAs, a quarter if they take turns or start with the
last keys, save with a left end at 192. Several blocks of a head still run at the same time, and find in L2 what they
load.
"""
L2_BYTES = 64 << 20  # of Q, dO and dQ's sums of heads whose CTAs take turns: each waits for the additions of others


@dataclass(frozen=True)
class Box:
    """A tile in shared memory that the copy engine fetches: of a tensor, so many rows and columns.

    ``part``: a product takes so many of the columns. ``stages``: buffers.
    """

    source: str
    rows: int
    columns: int
    part: int = 0
    stages: int = 1

    def bytes(self, dtype: Any) -> int:
        """Of one buffer."""
        return self.rows * self.columns * dtype.width // 8


class Backward(Kernel):
    """What the kernels for a :class:`BackwardConfiguration` have in common. ``cluster`` CTAs take neighbouring keys.

    A subclass has the products ``score``, ``query``, ``dk`` and ``dv``, ``more_buffers`` and ``more_barriers``, what a
    warpgroup does that multiplies (``consume``) and each of the ``assistants``, warps that neither do nor fetch
    (``assist``), and ``result_part``: a warpgroup's part of the buffer of dK or dV. Accumulators are written so many
    ``matrices`` at once, dK and dV ``transposed``. ``ahead``: scores are computed a step before all else. ``stages``:
    buffers of dO. ``copies_values``: the copy engine fetches LSE and D too.
    """

    cluster, stages, assistants, matrices = 1, STAGES, GROUPS, 4
    ahead, copies_values, transposed = True, True, False
    score: Product
    query: Product
    dk: Product
    dv: Product

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.m, self.n = c.tile
        self.rows = WgmmaRows(slots=2)

    def together(self, rows: Any) -> Any:
        """Heads of K, of so many rows each, whose first blocks start together: see ``TOGETHER``."""
        c = self.c
        few = c.deterministic or c.last_first
        quarter = few and not (c.left and c.head == 192)
        most = TOGETHER // self.cluster ** (1 + quarter) if c.right or c.compressed or few else 1
        if not c.deterministic:
            return most
        in_l2 = L2_BYTES // (2 * (c.head + c.head_v) + 4 * c.head)
        return cutlass.min(most, cutlass.max(in_l2 // cutlass.max(Int32(rows), 1), 1))

    def boxes(self) -> dict[str, Box]:
        """What is fetched, by the names of the buffers. K is an operand of dQ, too, part by part."""
        c = self.c
        return {
            "q": Box("q", self.m, c.head, stages=STAGES),
            "do": Box("do", self.m, c.head_v, stages=self.stages),
            "k": Box("k", self.n, c.head, self.dq_width),
            "v": Box("v", self.n, c.head_v),
        }

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        # before the launch, after which the DSL may take for them what they are inside the kernel
        offsets, scale, stream = given.get("cum_seqlen_q"), given["scale_softmax"], given["stream"]
        dq, values = sequences.matrix(given["dq"], c.packed), prepare(c, given)
        sums, turns = values.dq_sums, values.turns
        self.launch_passes(given, values)
        QueryGradient(c).launch(sums, turns, dq, offsets, scale, stream)

    def launch_passes(self, given: Mapping[str, Any], values: Values) -> None:
        """The kernels between those of :mod:`cudnn_kernels.attention.around`, on a call's arguments by name."""
        c, scale, stream = self.c, given["scale_softmax"], given["stream"]
        dk, dv = (sequences.matrix(given[name], c.packed) for name in ("dk", "dv"))
        rows = given["q"].shape[0] // sequences.count(c, given) if c.packed else given["q"].shape[2]
        work, clusters = work_of(c, given, self.cluster * self.n, together=self.together(rows))
        atoms = [self.loaded(sequences.copied(given[x.source], c.packed), x) for x in self.boxes().values()]
        key_sums, again = values.key_sums, replace(work)
        if c.queue:
            clusters = cutlass.min(given["multiprocessors"], clusters)
        self.kernel(atoms, dk, dv, replace(values), work, Scale(scale, given.get("softcap"))).launch(
            grid=[self.cluster * clusters, 1, 1],
            block=[GROUP * (1 + GROUPS), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        if const_expr(c.split):
            KeyGradients(c).launch(key_sums, dk, dv, again, scale, stream)

    @cute.kernel
    def kernel(self, atoms: list, dk: cute.Tensor, dv: cute.Tensor, values: Values, work: Work, scale: Scale) -> None:
        """The roles of the warpgroups."""
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(self.cluster > 1) else 0
        smem = SmemAllocator()
        layouts = {x: self.tile(box.rows, box.columns, box.stages, box.part) for x, box in self.boxes().items()}
        shared = {x: self.allocate(smem, layout) for x, layout in layouts.items()} | self.more_buffers(smem)
        counts = {
            f"{x}_{state}": (stages, count)
            for x, stages in (("q", STAGES), ("do", self.stages))
            for state, count in (("full", 1), ("empty", 4 * GROUPS))
        }
        counts |= {"kv_full": (1, 1)} | ({"kv_empty": (1, 4 * GROUPS)} if self.c.queue else {})
        shared |= self.barriers(smem, counts | self.more_barriers(), thread)
        if group == 0:
            cute.arch.setmaxregister_decrease(FEW)
            if warp_index == 0:
                copies = dict(zip(self.boxes(), atoms, strict=True))
                self.each_block(work, values, rank, lambda *x: self.produce(copies, shared, values, rank, *x), True)
            if const_expr(self.assistants > 0):
                if (warp_index > 0) & (warp_index <= self.assistants):
                    self.each_block(
                        work, values, rank, lambda *x: self.assist(shared, values, rank, warp_index - 1, *x)
                    )
        else:
            cute.arch.setmaxregister_increase(MANY)
            self.each_block(work, values, rank, lambda *x: self.consume(shared, values, dk, dv, scale, rank, *x))
        if const_expr(self.cluster > 1):  # until when the other CTA may write here
            meet(Cluster(self.cluster, 1))

    name(kernel, "cudnn_attention_backward_sm90")

    def block(self, work: Work, index: Int32, rank: Any) -> Block:
        """One of the CTA's cluster, or a part of it."""
        c = self.c
        if const_expr(c.split):
            block = part_of(c, work, index, c.keys, self.m, c.last_first)
        else:
            block = block_of(c, work, index, c.keys, self.m, False, c.last_first)
        block.row += rank * self.n
        return block

    @cute.jit
    def each_block(self, work: Work, values: Values, rank: Any, visit: Any, draws: bool = False) -> None:
        """Does something for every block of the CTA, told how many steps came before, and how many blocks with steps.

        With a queue, one warp ``draws``, while others still compute the block before, and tells them.
        """
        if const_expr(not self.c.queue):
            cta, _, _ = cute.arch.block_idx()
            visit(self.block(work, cta // self.cluster, rank), 0, 0)
        else:
            turn = Int32(0)
            number, before, blocks = ring.draw(*self.queue, values.drawn, turn, (0, 0), draws)
            while number < work.count:
                block = self.block(work, number, rank)
                visit(block, before, blocks)
                turn += 1
                told = (before + block.steps, blocks + cutlass.min(block.steps, 1))
                number, before, blocks = ring.draw(*self.queue, values.drawn, turn, told, draws)

    def tile(self, rows: int, columns: int, stages: int = 1, part: int = 0) -> Any:
        """A buffer's layout, rows of contiguous elements: (rows, columns), and stages if there are several.

        Its swizzled pieces are so narrow that whole ones make up the columns, or the ``part`` of a product.
        """
        kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, part or columns)
        atom = warpgroup.make_smem_layout_atom(kind, self.dtype)
        layout = cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
        return layout if stages > 1 else cute.slice_(layout, (None, None, 0))

    def loaded(self, tensor: cute.Tensor, box: Box) -> Any:
        """How the copy engine fetches a tile: an atom and the tensor of its coordinates."""
        tile = self.tile(box.rows, box.columns, part=box.part)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, tile, (box.rows, box.columns))

    def allocate(self, smem: Any, layout: Any) -> cute.Tensor:
        """A swizzled buffer."""
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    @cute.jit
    def barriers(self, smem: Any, counts: barriers.Counts, thread: Int32) -> dict[str, Any]:
        """Barriers for all CTAs of the cluster."""
        made = barriers.allocate(smem, counts)
        if const_expr(self.c.queue):
            self.queue = ring.Ring.allocate(smem, DRAWN), smem.allocate_tensor(Int32, cute.make_layout((3, DRAWN)))
        if thread == 0:
            if const_expr(self.c.queue):
                ring.initialise(self.queue[0], 1, 4 * GROUPS + self.assistants + 1)
            barriers.initialise(made, counts)
        cute.arch.mbarrier_init_fence()
        meet(Cluster(self.cluster, 1))
        return made

    def fetch(self, atom: Any, rows: cute.Tensor, box: Box, place: Any, target: cute.Tensor, full: Any) -> None:
        """Starts a copy of a tile that begins at ``place``, a row and a column."""
        fetch(atom, cute.local_tile(cute.domain_offset(place, rows), (box.rows, box.columns), (0, 0)), target, full)

    def keys_fetched(self, block: Block, rank: Any) -> dict[str, tuple[Any, int]]:
        """Where the tiles begin that stay for all steps: rows and columns, by the names of the buffers."""
        return {"k": (block.row, 0), "v": (block.row, 0)}

    @cute.jit
    def fetch_keys(self, atoms: Any, shared: Any, block: Block, places: Any, blocks: Any) -> None:
        """Fetches the tiles that stay, if there are any steps."""
        boxes, full = self.boxes(), shared["kv_full"]
        if block.steps > 0:
            if const_expr(self.c.queue):
                cute.arch.mbarrier_wait(shared["kv_empty"], blocks % 2 ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, sum(boxes[x].bytes(self.dtype) for x in places))
            for x, place in places.items():
                rows = sequences.copied_rows(atoms[x][1], block.head, block.batch, block.first_row, block.mask.queries)
                self.fetch(atoms[x][0], rows, boxes[x], place, shared[x], full)

    @cute.jit
    def produce(
        self, atoms: Any, shared: Any, values: Values, rank: Any, block: Block, before: Any, blocks: Any
    ) -> None:
        """One warp: fetches K and V, then Q and dO of every step."""
        boxes, total = self.boxes(), block.steps
        self.fetch_keys(atoms, shared, block, self.keys_fetched(block, rank), blocks)
        more = cutlass.min(total, 1) if const_expr(self.ahead) else 0  # the last Q is multiplied for nothing
        for step in cutlass.range(total + more, unroll=1):
            used = cutlass.min(step, total - 1)
            head, index = place_of(block, used)
            first = (block.first_block + index) * self.m
            for x, of_rows in (("q", "log_sums"), ("do", "products")):
                if x == "q" or step < total:
                    stages, size = boxes[x].stages, boxes[x].bytes(self.dtype) + 4 * self.m * self.copies_values
                    stage, phase = (before + step) % stages, (before + step) // stages % 2
                    full = shared[f"{x}_full"] + stage
                    cute.arch.mbarrier_wait(shared[f"{x}_empty"] + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                    rows = sequences.copied_rows(atoms[x][1], head, block.batch, block.first_column, block.mask.keys)
                    target = shared[x] if const_expr(stages == 1) else shared[x][None, None, stage]
                    self.fetch(atoms[x][0], rows, boxes[x], (index * self.m, 0), target, full)
                    if const_expr(self.copies_values):
                        source = cute.domain_offset((first, head, block.batch), getattr(values, of_rows)).iterator
                        values_of_rows = shared[of_rows][None, stage].iterator
                        with cute.arch.elect_one():
                            copy_bytes(source, values_of_rows, 4 * self.m, full)

    def multiplying(self) -> tuple[Int32, Int32]:
        """A multiplying warpgroup's number, and the thread's in it: anew, for to keep them would cost registers."""
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // GROUP) - 1
        return group, thread - GROUP - group * GROUP

    def all_multiplying(self) -> None:
        """Waits for both multiplying warpgroups, of which all have written to shared memory what products read."""
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.wait(ALL_BARRIER, GROUPS * GROUP)

    @cute.jit
    def hide(self, scores: cute.Tensor, mask: Mask, row: Int32, key: Int32) -> None:
        """Makes scores that do not count -inf, in the tiles that have any."""
        if not mask.whole(row, ROWS, key, self.score.columns):
            thread, _, _ = cute.arch.thread_idx()  # anew: to keep it for this would cost a register in all steps
            mask.hide(scores, self.rows, thread % GROUP, row, key, self.score.columns)

    def place_for_p(self, scores: cute.Tensor) -> cute.Tensor:
        """Where P goes: over the scores, save where these become something else."""
        return cute.make_rmem_tensor(scores.layout, Float32) if self.c.softcap else scores

    def exponentiate(
        self, scores: cute.Tensor, p: cute.Tensor, scale: Float32, log_sums: Iterable[tuple[int, Float32]]
    ) -> None:
        """Makes P of scores, those numbered, each with the LSE of its row; capped ones become P's derivatives by them,
        before the cap.
        """
        for i, log_sum in log_sums:
            score = scores[i]
            p[i] = cute.math.exp2(score * scale - log_sum, fastmath=True)
            if self.c.softcap:
                scores[i] = p[i] * cute.arch.fmax(1.0 - score * score, 0.0)  # -inf is hidden

    def differentiate(self, gradients: cute.Tensor, p: cute.Tensor, products: cute.Tensor) -> None:
        """Turns dP into dS."""
        for i, product in self.each(products):
            gradients[i] = p[i] * (gradients[i] - product)

    def rounded(self, values: cute.Tensor, factor: Any = None) -> cute.Tensor:
        """The values in the type of the inputs."""
        found = cute.make_rmem_tensor(values.shape, self.dtype)
        loaded = values.load() if factor is None else values.load() * factor
        found.store(loaded.to(self.dtype))
        return found

    def place(self, block: Block, step: Int32) -> tuple[Any, ...]:
        """Where the values of a step's block are: block, head, batch."""
        head, index = place_of(block, step)
        return block.first_block + index, head, block.batch

    def turn(self, mask: Mask, block: Block, m_block: Int32) -> Int32:
        """How many clusters add to a block of queries before this one."""
        row, size = m_block * self.m, self.cluster * self.n
        number = block.row // size
        before = number - mask.begin(row) // size
        if self.c.right:
            before = Int32(select_(block.way > 0, (mask.end(row + self.m - 1) - 1) // size - number, before))
        return before

    @cute.jit
    def wait_for_turn(self, turns: cute.Tensor, part: Any, turn: Int32) -> None:
        """Waits until so many have added what they had."""
        found, place = Int32(-1), cute.domain_offset((part,), turns).iterator
        while found != turn:
            found = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place.toint()]
            )

    def end_turn(self, turns: cute.Tensor, part: Any) -> None:
        """Lets the next one add."""
        place = cute.domain_offset((part,), turns).iterator
        cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[place.toint()])

    @cute.jit
    def finish(self, shared: Any, values: Values, block: Block, results: Any, scale: Scale, rank: Any) -> None:
        """Writes dK and dV, the sums and the tensor of each: of a split block to the workspace."""
        if const_expr(self.c.split):
            if block.number >= 0:
                self.leave(values, block, results, rank)
            else:
                self.store(shared, block, results, scale)
        else:
            self.store(shared, block, results, scale)

    def leave(self, values: Values, block: Block, results: Any, rank: Any) -> None:
        """Writes sums as they are, to be added to those of other parts."""
        (group, thread), column = self.multiplying(), 0
        for (acc, out), product in zip(results.values(), (self.dk, self.dv), strict=True):
            place, head = (rank * self.n, column, block.part, block.number), cute.size(out, mode=[1])
            tile = cute.local_tile(cute.domain_offset(place, values.key_sums)[None, None, 0, 0], (self.n, head), (0, 0))
            target = product.mma().get_slice(thread).partition_C(self.result_part(tile, group))
            cute.autovec_copy(acc, target)
            column += head

    def store(self, shared: Any, block: Block, results: Any, scale: Scale) -> None:
        """Writes sums, rounded, through buffers of shared memory."""
        group, thread = self.multiplying()
        if const_expr(self.c.queue):  # else addresses are computed before all steps, which need the registers
            thread = opaque(thread)
        barriers.wait(ALL_BARRIER, GROUPS * GROUP)  # both have used the buffers
        factors = (scale.scores, None)
        for (x, (acc, _)), product, factor in zip(results.items(), (self.dk, self.dv), factors, strict=True):
            part = self.result_part(shared[x], group)
            product.put(self.rounded(acc, factor), part, thread, self.transposed, self.matrices)
        barriers.wait(ALL_BARRIER, GROUPS * GROUP)
        rows = cutlass.min(Int32(self.n), block.mask.queries - block.row)
        for x, (_, out) in results.items():
            target = cute.domain_offset((block.first_row + block.row, 0), out[None, None, block.head, block.batch])
            store_rows(shared[x], target, rows, group * GROUP + thread)
        if const_expr(self.c.queue):
            barriers.wait(ALL_BARRIER, GROUPS * GROUP)


class AttentionBackward(Backward):
    """The kernel in which a warpgroup has 64 keys: rows of S^T and dP^T, of dV = P^T dO and of dK = dS^T Q.

    Of steps whose rows do not come in 64, dQ is computed transposed, and the next scores before a step ends.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        c = self.c
        self.ahead = c.dq_turned
        if self.ahead and c.queue:
            raise ValueError(f"{c}: where CTAs draw blocks of keys, query rows come in 64")
        self.score = Product(self.dtype, self.m)
        self.gradient = replace(self.score, registers=c.v_in_registers)
        self.dk, self.dv = (Product(self.dtype, head, b=MN, registers=True) for head in (c.head, c.head_v))
        if c.dq_turned:  # dQ^T = K^T dS^T, of half of the head
            self.dq_width, self.query = ROWS, Product(self.dtype, self.m, a=MN)
        else:  # dQ = dS K: of 64 queries half of the head, or of 128 all of it
            self.dq_width = c.head * self.m // (GROUPS * ROWS)
            self.query = Product(self.dtype, self.dq_width, b=MN)

    def more_buffers(self, smem: Any) -> dict[str, cute.Tensor]:
        """dS, and float32 values: dQ on its way, and what belongs to a step's rows.

        With a queue dK and dV leave from where dS and dQ were, while K and V of the next block come.
        """
        per_row = cute.make_layout((self.m, STAGES))
        layouts = {"dq": cute.make_layout((512, self.m * self.c.head // 512)), "log_sums": per_row, "products": per_row}
        found = {x: smem.allocate_tensor(Float32, layout, byte_alignment=1024) for x, layout in layouts.items()}
        found["ds"] = self.allocate(smem, self.tile(self.m, self.n, STAGES))
        for x, over, head in (("dk", "ds", self.c.head), ("dv", "dq", self.c.head_v)) if self.c.queue else ():
            layout = self.tile(self.n, head)
            place = cute.recast_ptr(found[over].iterator, layout.inner, dtype=self.dtype)
            found[x] = cute.make_tensor(place, layout.outer)
        return found

    def more_barriers(self) -> dict[str, tuple[int, int]]:
        return {"dq_full": (GROUPS, 4), "dq_empty": (GROUPS, 1)}

    def result_part(self, buffer: cute.Tensor, group: Int32) -> cute.Tensor:
        return cute.local_tile(buffer, (ROWS, cute.size(buffer, mode=[1])), (group, 0))

    @cute.jit
    def consume(
        self,
        shared: Any,
        values: Values,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Scale,
        rank: Any,
        block: Block,
        before: Any,
        blocks: Any,
    ) -> None:
        """A warpgroup that multiplies."""
        group, thread = self.multiplying()
        rows_k, rows_v = (self.result_part(shared[x], group) for x in ("k", "v"))
        tSrK, tSrV = self.score.left(rows_k, thread), self.gradient.left(rows_v, thread)
        tSrQ, tSrdO = (self.score.right(shared[x], thread) for x in ("q", "do"))
        tKrQ, tVrdO = self.dk.right(turned(shared["q"]), thread), self.dv.right(turned(shared["do"]), thread)
        slab, half = (group, 0) if const_expr(self.m == GROUPS * ROWS) else (0, group)
        sK = cute.local_tile(turned(shared["k"]), (self.dq_width, self.n), (half, 0))
        if const_expr(self.c.dq_turned):
            tQrS, tQrK = self.query.right(shared["ds"], thread), self.query.left(sK, thread)
        else:
            sS = cute.local_tile(shared["ds"], (ROWS, self.n), (slab, 0, None))
            tQrS, tQrK = self.query.left(sS, thread), self.query.right(sK, thread)
        scores, gradients = self.score.accumulator(), self.score.accumulator()
        acc_dk, acc_dv, acc_dq = self.dk.accumulator(), self.dv.accumulator(), self.query.accumulator()
        if const_expr(self.ahead):  # in the same registers, of which ptxas would else find too few
            acc_dq = cute.make_tensor(scores.iterator, acc_dq.layout)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        mask, key = replace(block.mask), block.row + group * ROWS
        (scale_log2, factor), p = scale.powers(), self.place_for_p(scores)
        q_full, q_empty, do_full, do_empty, dq_full, dq_empty = (
            shared[f"{x}_{state}"] for x in ("q", "do", "dq") for state in ("full", "empty")
        )
        if block.steps > 0:
            cute.arch.mbarrier_wait(shared["kv_full"], blocks % 2)
            self.gradient.read(tSrV, rows_v, thread)
            if const_expr(self.ahead):
                cute.arch.mbarrier_wait(q_full, 0)
                self.score.issue(scores, tSrK, tSrQ[None, None, None, 0], False)
                warpgroup.wait_group(0)
        m_block, after = place_of(block, 0)[1], block.begin + block.way * block.blocks
        for place in cutlass.range(before, before + block.steps, unroll=1):
            stage, phase = place % STAGES, place // STAGES % 2
            if const_expr(not self.ahead):
                cute.arch.mbarrier_wait(q_full + stage, phase)
                self.score.issue(scores, tSrK, tSrQ[None, None, None, stage], False)
            cute.arch.mbarrier_wait(do_full + stage, phase)
            self.gradient.issue(gradients, tSrV, tSrdO[None, None, None, stage], False)
            if const_expr(not self.ahead):
                warpgroup.wait_group(1)
            cap(scores, factor)
            self.hide(scores, mask, key, m_block * self.m)
            m_block += block.way
            if m_block == after:
                m_block = block.begin
            log_sums = self.columns(shared["log_sums"][None, stage], thread)
            self.exponentiate(scores, p, scale_log2, self.each(log_sums))
            weights = register_operand(self.dv.mma(), self.rounded(p), (ROWS, self.m))
            warpgroup.wait_group(0)
            self.differentiate(gradients, scores, self.columns(shared["products"][None, stage], thread))
            rounded = self.rounded(gradients)
            ds = register_operand(self.dk.mma(), rounded, (ROWS, self.m))
            sdS = cute.local_tile(turned(shared["ds"])[None, None, stage], (ROWS, self.m), (group, 0))
            self.dv.issue(acc_dv, weights, tVrdO[None, None, None, stage], True)
            self.score.put(rounded, sdS, thread, True)
            self.all_multiplying()
            tQr = (tQrS[None, None, None, stage], tQrK)
            self.query.issue(acc_dq, *(tQr[::-1] if const_expr(self.c.dq_turned) else tQr), False)
            self.dk.issue(acc_dk, ds, tKrQ[None, None, None, stage], True)
            warpgroup.wait_group(1)
            barriers.arrive_once(do_empty + stage)
            cute.arch.mbarrier_wait(dq_empty + group, place % 2 ^ 1)
            self.hand_over(acc_dq, shared["dq"], dq_full + group, group, thread)
            if const_expr(self.ahead):
                following = place + 1
                cute.arch.mbarrier_wait(q_full + following % STAGES, following // STAGES % 2)
                self.score.issue(scores, tSrK, tSrQ[None, None, None, following % STAGES], False)
                warpgroup.wait_group(1)
                barriers.arrive_once(q_empty + stage)
                warpgroup.wait_group(0)  # in flight over a loop's end, ptxas would let products wait for each other
            else:
                warpgroup.wait_group(0)
                barriers.arrive_once(q_empty + stage)
        names = ("dk", "dv") if const_expr(self.c.queue) else ("k", "v")
        if const_expr(self.c.queue):
            if block.steps > 0:
                barriers.arrive_once(shared["kv_empty"])
                for other in cutlass.range_constexpr(GROUPS):  # dQ has left its buffer
                    cute.arch.mbarrier_wait(dq_empty + other, (before + block.steps - 1) % 2)
        results = dict(zip(names, ((acc_dk, dk), (acc_dv, dv)), strict=True))
        self.finish(shared, values, block, results, scale, rank)

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
        barriers.arrive_once(full)

    @cute.jit
    def assist(
        self, shared: Any, values: Values, rank: Any, part: Int32, block: Block, before: Any, blocks: Any
    ) -> None:
        """One warp: lets the copy engine add a warpgroup's part of dQ, step by step."""
        c, chunks = self.c, self.m * self.c.head // 512 // GROUPS
        source, full, empty = (
            cute.domain_offset((0, part * chunks), shared["dq"]).iterator.toint(),
            shared["dq_full"] + part,
            shared["dq_empty"] + part,
        )
        size = 4 * 512 * chunks
        mask = block.mask.turned()  # of the loop's own: a branch in it rebinds the values of what it uses
        for step in cutlass.range(block.steps, unroll=1):
            place = self.place(block, step)
            target = cute.domain_offset((0, part * chunks), values.dq_sums[(None, None, *place)]).iterator.toint()
            cute.arch.mbarrier_wait(full, (before + step) % 2)
            turn = Int32(0)
            if const_expr(c.deterministic):
                turn = self.turn(mask, block, place_of(block, step)[1])
                self.wait_for_turn(values.turns[(None, *place)], part, turn)
                cute.arch.inline_ptx("fence.proxy.async.global;", read_only_args=[])
            with cute.arch.elect_one():
                if const_expr(c.stores_first):
                    if turn == 0:
                        self.write(target, source, size, False)
                    else:
                        self.write(target, source, size, True)
                else:
                    self.write(target, source, size, c.shared != "stores")
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(empty)
                if const_expr(c.deterministic):
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    cute.arch.inline_ptx("fence.proxy.async.global;", read_only_args=[])
                    self.end_turn(values.turns[(None, *place)], part)
            cute.arch.sync_warp()

    def write(self, target: Any, source: Any, size: int, adds: bool) -> None:
        """One thread: lets the copy engine write to global memory, or add to what is there."""
        reduce, add = ("reduce.", ".add.f32") if adds else ("", "")
        cute.arch.inline_ptx(
            f"cp.{reduce}async.bulk.global.shared::cta.bulk_group{add} [{{$r0}}], [{{$r1}}], {{$r2}};",
            read_only_args=[target, source, Int32(size)],
        )

    def columns(self, values: cute.Tensor, thread: Int32) -> cute.Tensor:
        """The values, in shared memory, of the query rows that a thread has as columns."""
        found = cute.make_rmem_tensor(self.m // 4, Float32)
        for i in range(self.m // 8):
            source = cute.local_tile(values, (2,), (4 * i + thread % 4,))
            cute.autovec_copy(source, cute.local_tile(found, (2,), (i,)))
        return found

    def each(self, values: cute.Tensor) -> Iterator[tuple[int, Float32]]:
        """A thread's sums, each with the value of its query row, which is a column."""
        for slot in range(2):
            for place, i in enumerate(self.rows.order(self.m, slot)):
                yield i, values[place]
