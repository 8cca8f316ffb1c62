"""What attention's forward kernels have in common on all architectures.

Which rows a CTA has and what they see; what the copy engine fetches and writes; a row's log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, select_
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.attention import DESCALES, ForwardConfiguration, sequences, softmax
from cudnn_kernels.attention.mask import Mask, mask_of
from cudnn_kernels.attention.sequences import Sequence
from cudnn_kernels.epilogue.fragment import RowLayout
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.copy import fetch, partition

Q, K, V, O = range(4)  # noqa: E741
L2_BYTES = 64 << 20  # of K and V, for heads that run at the same time; with a left end half of it
WARP = 32
SORTING = 4  # warps of a CTA that sorts


@dataclass
class Problem:
    """What a tile belongs to: its first row, its head, that of K and V, its batch, and where its sequence lies."""

    row: Int32
    head: Int32
    key_head: Int32
    batch: Int32
    first_query: Int32
    first_key: Int32
    mask: Mask


@dataclass
class Work:
    """The tiles of a call. They come in sections: with a causal mask, and where they are drawn, all tiles of as many
    heads as have ``L2_BYTES`` of K and V; else all tiles.

    Fields that are divisors have a form by which kernels divide fast.
    """

    tiles: Int32  # of a head
    all_heads: Int32  # of all batches
    turns: Int32  # tiles that a CTA takes, one in each turn
    queries: Int32
    keys: Int32
    section: Any  # divisor: turns of a section or, where a CTA has one tile, its tiles
    together: Any  # divisor: heads of a section
    others: Any  # divisor: heads of the last section; without a causal mask, tiles of a head
    heads: Any  # divisor: heads of Q in a sequence
    share: Any  # divisor: heads of Q that share one of K
    offsets_q: Any
    offsets_k: Any
    right: Int32
    left: Int32
    order: Any  # of packed sequences' tiles, if CTAs draw them: see Forward.sort


@dataclass
class Call:
    """What a kernel is launched with. ``tensors`` are Q, K, V and O; ``atoms`` are None where threads load or store.

    ``scale`` is that of scores before the exponential, ``cap_factor`` that before the cap, if there is one.
    """

    atoms: list
    tensors: list
    lse: Any
    sink: Any
    work: Any
    scale: Float32
    cap_factor: Any
    scale_output: Float32
    descales: Any  # of Q, K and V, for each head of K, if there are some


class Forward(Kernel):
    """A kernel for one :class:`ForwardConfiguration`.

    A subclass has what its ``threads`` do (``body``), how a buffer lies in shared memory (``layout``), which rows and
    columns of S a thread holds, ``rows`` of Q and O that are copied together, and whether a CTA ``stays`` for several
    tiles. ``boxes``: rows and elements of Q, K, V and O that one copy moves.
    """

    score_rows: RowLayout
    threads: int
    rows: int
    stays: bool = False

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.result = DTYPES[next(slot.dtype for slot in c.slots() if slot.name == "o")]
        self.tile_m, self.tile_n = c.tile
        self.boxes = [(self.rows, c.head), (self.tile_n, c.head), (self.tile_n, c.head_v), (self.rows, c.head_v)]

    @property
    def in_sections(self) -> bool:
        """Whether sections are of some heads."""
        return self.c.right or self.c.queue

    def layout(self, rows: int, columns: int, stages: int = 1, dtype: Any = None) -> Any:
        """Buffers in shared memory, rows of contiguous elements: (rows, columns, stages)."""
        raise NotImplementedError

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        work = self.work(given)
        ctas = work.tiles * work.all_heads
        if c.queue:
            batches = work.offsets_q.shape[0] - 1
            self.sort(work.offsets_q, work.offsets_k, work.order).launch(
                grid=[cute.ceil_div(batches, SORTING), 1, 1], block=[WARP * SORTING, 1, 1], stream=given["stream"]
            )
        if self.stays or c.queue:
            ctas = cutlass.min(given["multiprocessors"], ctas)
        lse = sequences.rows(given["lse"], c.packed, c.lse == "by head") if c.lse else None
        copies = [self.copy(which, sequences.copied(given["qkvo"[which]], c.packed)) for which in (Q, K, V, O)]
        self.kernel(self.call(given, copies, lse, given.get("sink"), work)).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=given["stream"], min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, call: Call) -> None:
        """O and LSE."""
        self.body(call)

    name(kernel, "cudnn_attention_forward")

    def body(self, call: Call) -> None:
        """What the threads do."""
        raise NotImplementedError

    def copy(self, which: int, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        """How the copy engine moves a box of a tensor: an atom, and the tensor of its coordinates."""
        op = cpasync.CopyBulkTensorTileS2GOp() if which == O else cpasync.CopyBulkTensorTileG2SOp()
        box = self.boxes[which]
        whole = self.layout(self.tile_n if which in (K, V) else self.rows, box[1], dtype=tensor.element_type)
        return cpasync.make_tiled_tma_atom(op, tensor, cute.composition(cute.slice_(whole, (None, None, 0)), box), box)

    def call(self, given: Mapping[str, Any], copies: list, lse: Any, sink: Any, work: Any) -> Call:
        """What the kernel is launched with; ``copies`` are pairs of an atom and a tensor."""
        scale, factor = softmax.Scale(given["scale_softmax"], given.get("softcap")).powers()
        atoms, tensors = (list(x) for x in zip(*copies, strict=True))
        descales = [given[x] for x in DESCALES] if DESCALES[0] in given else None
        return Call(atoms, tensors, lse, sink, work, scale, factor, given["scale_output"], descales)

    def work(self, given: Mapping[str, Any]) -> Any:
        """The tiles that a call's tensors have."""
        c = self.c
        q, k = (sequences.matrix(given[name], c.packed) for name in ("q", "k"))
        offsets = given.get("cum_seqlen_q")
        batches = sequences.count(c, given)
        tiles = Int32(sequences.blocks_of(q.shape[0], batches, self.tile_m, c.packed))
        all_heads = together = Int32(q.shape[2] if c.packed else q.shape[2] * q.shape[3])
        if const_expr(self.in_sections):
            keys = k.shape[0] // cutlass.max(Int32(batches), 1) if c.packed else k.shape[0]  # on average
            keys_in_l2 = L2_BYTES // (1 + c.left) // ((c.head + c.head_v) * self.dtype.width // 8)
            share = q.shape[2] // k.shape[2]
            key_heads = cutlass.max(Int32(all_heads // share), 1)
            together = cutlass.min(cutlass.max(keys_in_l2 // cutlass.max(Int32(keys), 1), 1), key_heads)
            if const_expr(self.stays):
                together = fewest_turns(together, key_heads, share * tiles, given["multiprocessors"])
            together = together * share
        section, turns = together * tiles, Int32(1)
        if const_expr(self.stays):
            section = cute.ceil_div(section, given["multiprocessors"])
            turns = section * cute.ceil_div(all_heads, together)
        order = None
        if const_expr(c.queue):
            numbers = cute.recast_ptr(given["workspace"].iterator.align(16), dtype=Int32)
            order = cute.make_tensor(numbers, cute.make_layout((2, tiles + 1)))
        rest = all_heads % together if self.in_sections else tiles
        divisors = (section, together, rest, q.shape[2], q.shape[2] // k.shape[2])
        return Work(
            tiles,
            all_heads,
            turns,
            Int32(q.shape[0]),
            Int32(k.shape[0]),
            *[cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in divisors],
            offsets,
            given.get("cum_seqlen_k"),
            given["right"],
            given["left"],
            order,
        )

    @cute.kernel
    def sort(self, offsets_q: cute.Tensor, offsets_k: cute.Tensor, order: cute.Tensor) -> None:
        """Puts packed sequences' tiles in order, those of few keys first: they are drawn from the last on, and what is
        drawn last should not take long.

        ``order``, (2, tiles + 1): none was drawn, and how many there are of a head; then of each tile, its sequence and
        the number of that sequence's first one. A warp has a sequence.
        """
        thread, cta = here()
        lane, count = cute.arch.lane_idx(), offsets_q.shape[0] - 1
        mine = cta * SORTING + cute.arch.make_warp_uniform(thread // WARP)
        before, every = Int32(0), Int32(0)
        if mine < count:
            s = sequences.packed(offsets_q, offsets_k, mine)
            for other in cutlass.range(lane, count, WARP, unroll=4):
                o = sequences.packed(offsets_q, offsets_k, other)
                tiles = cute.ceil_div(o.queries, self.tile_m)
                every += tiles
                if (o.keys < s.keys) | ((o.keys == s.keys) & (other < mine)):
                    before += tiles
            before, every = cute.arch.warp_reduction_sum(before), cute.arch.warp_reduction_sum(every)
            for tile in cutlass.range(lane, cute.ceil_div(s.queries, self.tile_m), WARP, unroll=1):
                order[0, 1 + before + tile] = mine
                order[1, 1 + before + tile] = before
        if (mine == 0) & (lane == 0):
            order[0, 0] = Int32(0)
            order[1, 0] = every

    name(sort, "cudnn_attention_sort")

    @cute.jit
    def tile(self, work: Work, turn: Any = None) -> tuple[Int32, Int32]:
        """A CTA's tile in a turn, or the one of a number that was drawn, and its head among all heads; the tile is
        negative where there is none.

        With a causal mask the last rows come first, since they take longest. CTAs take tiles in rising order in one
        turn and in falling order in the next, so that none gets only long ones.
        """
        cta, _, _ = cute.arch.block_idx()
        tiles = work.order[1, 0] if const_expr(self.c.queue) else work.tiles
        if const_expr(self.c.queue):
            section = Int32(Uint32(turn) // Uint32(tiles * work.together.divisor))
            index = turn - section * tiles * work.together.divisor
        else:
            section, index = divmod(turn if const_expr(self.stays) else cta, work.section)
        if const_expr(self.stays):
            ctas, _, _ = cute.arch.grid_dim()
            index = index * ctas + Int32(select_((section + index) % 2 == 1, ctas - 1 - cta, cta))
        first = section * work.together.divisor
        tile, head = divmod(index, work.together)
        if const_expr(not self.in_sections):
            head, tile = divmod(index, work.others)
            tile = Int32(select_(head < work.all_heads, tile, tiles))
        elif first + work.together.divisor > work.all_heads:
            tile, head = divmod(index, work.others)
        return tiles - 1 - tile, first + head

    @cute.jit
    def problem(self, work: Work, tile: Int32, index: Int32) -> Problem:
        """The rows of a tile; ``index`` is its head's number among all heads."""
        c = self.c
        batch, head = divmod(index, work.heads)
        s = Sequence(batch, work.queries, work.keys, Int32(0), Int32(0))
        if const_expr(c.packed):
            if const_expr(c.queue):
                batch, tile = work.order[0, 1 + tile], tile - work.order[1, 1 + tile]
            else:
                batch, tile = sequences.find_block(work.offsets_q, tile, self.tile_m)
            s = sequences.packed(work.offsets_q, work.offsets_k, batch)
        mask = mask_of(c, s.queries, s.keys, work.right, work.left)
        return Problem(tile * self.tile_m, head, head // work.share, s.batch, s.first_query, s.first_key, mask)

    def blocks(self, p: Problem) -> tuple[Int32, Int32, Int32, Int32]:
        """The blocks of keys that a tile's rows need."""
        return p.mask.blocks(p.row, cutlass.min(p.row + self.tile_m, p.mask.queries) - 1, self.tile_n)

    def exists(self, p: Problem) -> Boolean:
        """Whether the tile has rows: sequences may be shorter than the longest."""
        return p.row < p.mask.queries

    def bytes(self, rows: int, columns: int) -> int:
        """Of a tile in shared memory."""
        return rows * columns * self.dtype.width // 8

    def hide(self, scores: cute.Tensor, p: Problem, row: Int32, thread: Int32, n: Int32) -> None:
        """Makes scores of keys that a row does not see -inf. ``row`` is the group's first."""
        p.mask.hide(scores, self.score_rows, thread, row, n * self.tile_n, self.tile_n)

    def state(self, call: Call) -> softmax.State:
        """A thread's part of the softmax."""
        maxima, sums = (cute.make_rmem_tensor(self.score_rows.slots, Float32) for _ in range(2))
        scale, lift = call.scale, None
        if self.dtype.width == 8:
            scale = cute.arch.fmax(scale, softmax.LEAST_SCALE)
            lift = softmax.LIFT / scale
        return softmax.State(maxima, sums, scale, lift=lift)

    def reset(self, state: softmax.State, call: Call, p: Problem, thread: Int32) -> None:
        """Before a row's first block."""
        if call.sink is None:
            softmax.reset(state)
        else:
            softmax.reset_to_sink(state, call.sink[p.head], self.score_rows, thread)

    def prefetch(self, call: Call) -> None:
        """One thread: loads what describes tensors to the copy engine."""
        for atom in call.atoms:
            if atom is not None:
                cpasync.prefetch_descriptor(atom)

    def fetch_rows(self, call: Call, sQ: cute.Tensor, full: Any, p: Problem, part: int) -> None:
        """Starts the copy of a part of the tile's rows of Q to its buffer: (rows, elements, part)."""
        gQ = cute.domain_offset((p.row, 0), queries_of(p, call.tensors[Q]))
        tQsQ, tQgQ = partition(call.atoms[Q], sQ, cute.local_tile(gQ, self.boxes[Q], (None, 0)))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + part, self.bytes(*self.boxes[Q]))
        cute.copy(call.atoms[Q], tQgQ[None, part], tQsQ[None, part], tma_bar_ptr=full + part)

    def fetch_keys(
        self, call: Call, buffer: cute.Tensor, full: Any, p: Problem, which: int, n: Int32, piece: int = 0
    ) -> None:
        """Starts the copy of a block of K or V, or of a ``piece`` of its columns."""
        rows = sequences.copied_rows(call.tensors[which], p.key_head, p.batch, p.first_key, p.mask.keys)
        fetch(call.atoms[which], cute.local_tile(rows, self.boxes[which], (n, piece)), buffer, full)

    def store_rows(self, call: Call, sO: cute.Tensor, p: Problem, row: Int32) -> None:
        """Starts the copy of rows of O, from ``row`` on, from their buffer."""
        gO = cute.domain_offset((row, 0), queries_of(p, call.tensors[O]))
        tOsO, tOgO = partition(call.atoms[O], sO, cute.local_tile(gO, self.boxes[O], (0, 0)))
        cute.copy(call.atoms[O], tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_log_sums(self, call: Call, p: Problem, row: Int32, thread: Int32, log_sums: Any) -> None:
        """Writes LSE of a thread's rows. ``row`` is the group's first."""
        for slot in cutlass.range_constexpr(self.score_rows.slots if self.c.lse else 0):
            mine = row + self.score_rows.row(thread, slot)
            if thread % self.score_rows.neighbours == 0:
                if mine < p.mask.queries:
                    call.lse[self.place(p, mine)] = log_sums[slot]

    def place(self, p: Problem, row: Int32) -> tuple[Any, ...]:
        """Of a row's LSE."""
        return p.first_query + row, p.head, 0 if self.c.packed else p.batch


@cute.jit
def fewest_turns(most: Int32, heads: Int32, tiles: Int32, ctas: Int32) -> Int32:
    """Heads of K in a section, at most so many: such that CTAs take the fewest turns. A section begins with a turn.

    The more of a turn is not used, the more CTAs are done before the others. ``tiles`` are those of a head.
    """
    best, least = Int32(most), Int32((1 << 31) - 1)
    fewest = cute.ceil_div(heads, most)
    for sections in cutlass.range(fewest, 2 * fewest + 1, unroll=1):
        some = cute.ceil_div(heads, sections)
        turns = cute.ceil_div(some * tiles, ctas) * cute.ceil_div(heads, some)
        if turns < least:
            best, least = some, turns
    return best


def queries_of(p: Problem, tensor: cute.Tensor) -> cute.Tensor:
    """A sequence's rows of Q or O, of the copy engine's coordinates."""
    return sequences.copied_rows(tensor, p.head, p.batch, p.first_query, p.mask.queries)
