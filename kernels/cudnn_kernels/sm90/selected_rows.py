"""Neighbouring rows, on Hopper, of which each attends to blocks of keys of its own choice.

A CTA takes tiles in turn, or draws them from a counter. A tile is some rows of a sequence, as many as a CTA's
warpgroups have rows of products for: a group of 16 heads of Q that share a head of K takes 16 of a warpgroup's 64.
Three warps of the loading warpgroup read the rows' lists, 32 places at a time, and find their union. The fourth lets
the copy engine fetch each block of the union before once, and says which rows chose it. A warpgroup passes over blocks
that none of its rows chose. The next tile's blocks are fetched while this one's last are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences
from cudnn_kernels.epilogue.fragment import upper_lane
from cudnn_kernels.kernel import count_up, here
from cudnn_kernels.pipeline.barriers import arrive_once
from cudnn_kernels.pipeline.copy import partition
from cudnn_kernels.pipeline.ring import Ring, advanced, initialise
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS, AttentionForward

WARP = 32
PLACES = 32  # of a list that are read at a time, one by each lane
AGAIN = 1 << 26  # is added to a block for every time that the row listed it before
READING = 3  # warps of the loading warpgroup that read lists
LOADING_BARRIER, READING_BARRIER, FIRST_BARRIER = 1, 2, 3  # of the loading warpgroup, of those warps, and free ones
FAR = 1 << 30  # steps
DRAWN = 2  # numbers of tiles on their way
REACH = 2  # steps from one that a warpgroup holds to the next that it waits for, at most: fewer than buffers
REGISTERS = {1: (56, 256), 2: (56, 224), 3: (32, 160)}  # of a loading and a multiplying thread, by warpgroups


@dataclass
class Choices:
    """A call's lists of blocks, how many each row has, or None, where sequences end, and a head of K's tiles.

    ``drawn`` is how many tiles CTAs have drawn, if they draw them. ``window``: before the steps of a tile's lists, and
    the end that follows them, there are those of so many of the newest keys of its rows, and an end, if it is not None.
    """

    indices: cute.Tensor
    counts: Any
    offsets: cute.Tensor
    tiles: Int32
    drawn: Any
    window: Any


@dataclass
class Tile:
    """What a CTA has at a time: ``rows`` from ``row`` on, at ``place`` of a ``sequence``; heads of Q and one of K."""

    row: Int32
    rows: Int32
    sequence: Int32
    place: Int32
    key_head: Int32
    first_head: Int32
    heads: Int32
    first_key: Int32
    keys: Int32


@dataclass
class Lists:
    """In shared memory: the rows' lists, and two unions of them, one that is read and one whose blocks are fetched.

    ``keys`` are the blocks of the lists. A block's first place in them is new to the union: ``firsts`` say which places
    are, ``rows`` which rows have their blocks. A union has a count, its blocks, and for each a mask of its rows.
    """

    keys: cute.Tensor
    rows: cute.Tensor
    firsts: cute.Tensor
    counts: cute.Tensor
    blocks: cute.Tensor
    masks: cute.Tensor


@dataclass
class Steps:
    """The ring of blocks, and in shared memory of every part of a step its tile of keys and its rows.

    A tile of keys of -1 is the end of the rows' list. ``rows_full`` and ``rows_empty`` are for Q, and dO, of every
    warpgroup. Where CTAs draw tiles, ``queue`` is a ring of the drawn ones' numbers, ``numbers``. ``apart``: for each
    warpgroup, whether it takes its rows one by one, where it may.
    """

    ring: Ring
    rows_full: Any
    rows_empty: Any
    tiles: cute.Tensor
    masks: cute.Tensor
    queue: Any
    numbers: Any
    apart: Any


@dataclass
class Warpgroup:
    """One that multiplies, with its ``own`` values, and what it shares with the others: tensors and shared memory."""

    tensors: Any
    buffers: Any
    own: Any
    choices: Choices
    steps: Steps
    scale: Float32
    group: Int32
    thread: Int32


@dataclass
class Part:
    """What a warpgroup computes a tile with.

    A step begins with ``products``: of each the sums, both operands in shared memory, and the depth. The first one's
    sums are weighed, with ``row_values`` of a thread's rows, then rounded, multiplied by ``values`` and added to
    ``acc``, which has so many ``columns``. ``near``: the steps are those of a window.
    """

    mine: Tile
    products: Any
    rounded: cute.Tensor
    acc: cute.Tensor
    values: Any
    columns: int
    row_values: Any
    near: bool = False


class SelectedRows(AttentionForward):
    """What the kernels have in common whose CTAs have neighbouring rows.

    A subclass says what a warpgroup computes: :meth:`attend` has a tile, of which it lets :meth:`take` all steps, and
    :meth:`weigh` has a step, ``again`` where others came before. ``of_rows``: what is loaded of a tile's rows;
    ``own_values``: float32 values of each that a warpgroup has in shared memory. It may have its own of :meth:`begin`
    and :meth:`prepare`. ``apart``: it is told which warpgroups' rows share little, by :meth:`share_little`.
    """

    of_rows: tuple[str, ...] = ("q",)
    own_values, apart = 0, False

    def __init__(self, configuration: Any) -> None:
        super().__init__(configuration)
        s = self.s = configuration
        self.size = min(s.block, self.tile_n)  # keys that one copy fetches
        self.per_block = s.block // self.size
        self.parts = self.tile_n // self.size
        self.shares = -(-s.group // ROWS)  # CTAs that share a row's heads
        self.queries = self.groups * s.together
        self.box = min(s.padded, 16)  # heads of Q that one copy fetches
        self.reach = min(s.stages - 1, REACH)

    @property
    def widths(self) -> dict[str, int]:
        """What is loaded, and the elements of its heads."""
        s = self.s
        widths = {"q": s.head, "do": s.head_v, "k": s.head, "v": s.head_v}
        return {x: widths[x] for x in (*self.of_rows, "k", "v")}

    def loads(self, atoms: Any, buffers: Any) -> list[Any]:
        """Of all that is loaded: atom and view, buffer, width."""
        return [(*atoms[x], buffers[x], width) for x, width in self.widths.items()]

    def launch_rows(
        self, kernel: Any, given: Mapping[str, Any], tensors: Any, scale: Float32, drawn: Any = None, window: Any = None
    ) -> None:
        """Launches a kernel of :meth:`roles`. ``drawn``: the memory of a counter, where CTAs draw tiles."""
        offsets = given["cum_seqlen_q"]
        if const_expr(drawn is not None):
            drawn = self.begin_drawing(drawn.align(16), given["stream"])
        tiles = sequences.blocks_of(given["q"].shape[0], offsets.shape[0] - 1, self.queries, True) * self.shares
        choices = Choices(given["block_indices"], given.get("block_counts"), offsets, tiles, drawn, window)
        kernel(self.atoms(given, self.box, self.size), tensors, choices, scale).launch(
            grid=[cutlass.min(tiles * self.s.key_heads, given["multiprocessors"]), 1, 1],
            block=[GROUP * (1 + self.groups), 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,
        )

    @cute.jit
    def roles(self, atoms: Any, tensors: Any, choices: Choices, scale: Float32) -> None:
        """A kernel, all of it. ``tensors`` are the subclass's own."""
        s, smem = self.s, SmemAllocator()
        thread, index = here()
        group = cute.arch.make_warp_uniform(thread // GROUP)
        shapes = {x: (self.tile_m, width, 1) for x, width in self.widths.items()}
        shapes |= {x: (self.tile_n, self.widths[x], s.stages) for x in ("k", "v")}
        buffers = self.buffers(smem, shapes | self.further())
        own = None
        if const_expr(self.own_values):
            layout = cute.make_layout((ROWS, self.own_values, self.groups))
            own = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        lists, steps = self.lists(smem), self.steps(smem, choices)
        self.initialise(steps, thread)
        self.begin(tensors, index, thread)
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            self.produce(atoms, buffers, choices, lists, steps, thread)
        else:
            cute.arch.setmaxregister_increase(many)
            mine = own[None, None, group - 1] if const_expr(self.own_values) else None
            w = Warpgroup(tensors, buffers, mine, choices, steps, scale, group - 1, thread - GROUP * group)
            self.consume(w)

    def further(self) -> dict[str, tuple[int, int, int]]:
        """Further operands in shared memory by name: (rows, columns, stages)."""
        return {}

    def begin(self, tensors: Any, cta: Int32, thread: Int32) -> None:
        """Before the warpgroups part."""

    @cute.jit
    def tile(self, index: Int32, choices: Choices) -> Tile:
        """What a CTA has. All rows of a head come before the next head's, so that L2 holds its keys."""
        s, tiles, offsets = self.s, choices.tiles, choices.offsets
        key_head, number, share = index // tiles, index % tiles // self.shares, index % self.shares
        sequence, own = sequences.find_block(offsets, number, self.queries)
        first = offsets[cutlass.max(sequence, 0)]
        keys, place = offsets[sequence + 1] - first, own * self.queries
        rows = Int32(select_(sequence >= 0, cutlass.min(keys - place, self.queries), Int32(0)))
        heads = cutlass.min(s.group - share * ROWS, ROWS)
        return Tile(
            first + place, rows, sequence, place, key_head, key_head * s.group + share * ROWS, heads, first, keys
        )

    def seen(self, mine: Tile, row: Any) -> Int32:
        """How many keys of the sequence a row of the tile may see."""
        return mine.place + row + 1 if const_expr(self.s.causal) else mine.keys

    def lists(self, smem: Any) -> Lists:
        """Shared memory for lists."""
        places, union = (PLACES, self.queries), (PLACES * self.queries, 2)
        shapes = (places, places, self.queries, 2, union, union)
        return Lists(*(smem.allocate_tensor(Int32, cute.make_layout(x), byte_alignment=16) for x in shapes))

    def steps(self, smem: Any, choices: Choices) -> Steps:
        """Shared memory for the ring's barriers and what they tell."""
        stages = self.s.stages
        ring, rows = Ring.allocate(smem, stages), (smem.allocate_array(cutlass.Int64, self.groups) for _ in range(2))
        told = (
            smem.allocate_tensor(Int32, cute.make_layout((self.parts, stages)), byte_alignment=16) for _ in range(2)
        )
        queue, numbers = None, None
        if const_expr(choices.drawn is not None):
            queue = Ring.allocate(smem, DRAWN)
            numbers = smem.allocate_tensor(Int32, cute.make_layout(DRAWN), byte_alignment=16)
        apart = None
        if const_expr(self.apart):
            apart = smem.allocate_tensor(Int32, cute.make_layout(self.groups), byte_alignment=16)
        return Steps(ring, *rows, *told, queue, numbers, apart)

    @cute.jit
    def initialise(self, steps: Steps, thread: Int32) -> None:
        """Makes the barriers ready."""
        if thread == 0:
            for group in cutlass.range_constexpr(self.groups):
                cute.arch.mbarrier_init(steps.rows_full + group, 1)
                cute.arch.mbarrier_init(steps.rows_empty + group, GROUP // WARP)
            initialise(steps.ring, 1, self.warps)
            if const_expr(steps.queue is not None):
                initialise(steps.queue, 1, self.warps + GROUP // WARP)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    def copy_rows(
        self, atom: Any, tensor: cute.Tensor, buffer: cute.Tensor, width: int, full: Any, mine: Tile, group: int
    ) -> None:
        """Starts copies of a warpgroup's heads of Q, or dO, (heads, width, rows), and of zeros where there are none."""
        box = (self.box, width)
        source = cute.local_tile(cute.domain_offset((mine.first_head, 0, 0), tensor), box, (None, 0, None))
        to, of = partition(atom, cute.local_tile(buffer, box, (None, 0)), source)
        for row in range(0, ROWS, self.box):
            query, head = group * self.s.together + row // self.s.padded, row % self.s.padded
            exists = (query < mine.rows) & (head < mine.heads) & (row // self.s.padded < self.s.together)
            some = Int32(select_(exists, Int32(head // self.box), Int32(self.s.heads)))  # beyond the last head: zeros
            own, part = mine.row + cutlass.min(query, mine.rows - 1), (group * ROWS + row) // self.box
            cute.copy(atom, of[None, some, own], to[None, part], tma_bar_ptr=full)

    @cute.jit
    def unite(self, first: Int32, choices: Choices, lists: Lists, number: Int32, mine: Tile, thread: Int32) -> None:
        """Union ``number``, of the places from ``first`` on of the rows' lists. The reading warps' work.

        A lane has a place of a list; a warp has every third row. What a row lists again is another element.
        """
        indices, counts = choices.indices, choices.counts
        lane, warp_index, most = cute.arch.lane_idx(), thread // WARP, indices.shape[2]
        keys, rows, firsts = lists.keys, lists.rows, lists.firsts
        for row in cutlass.range(warp_index, mine.rows, READING, unroll=1):
            key, listed = Int32(-1), most
            if const_expr(counts is not None):
                listed = cutlass.min(counts[mine.row + row, mine.key_head], most)
            if first + lane < listed:
                block = indices[mine.row + row, mine.key_head, first + lane]
                if (block >= 0) & (block <= (self.seen(mine, row) - 1) // self.s.block):
                    key = block
            before = cute.arch.popc(cute.arch.match_sync(0xFFFFFFFF, key) & cute.arch.lanemask_lt())
            if key >= 0:
                key += Int32(before) * AGAIN
            keys[lane, row] = key
        self.reading()
        places = cute.ceil_div(cutlass.min(most - first, PLACES), 4)
        for row in cutlass.range(warp_index, mine.rows, READING, unroll=1):
            key, having, four = keys[lane, row], Int32(0), cute.make_rmem_tensor(4, Int32)
            for other in cutlass.range(mine.rows, unroll=1):
                found = Int32(0)
                for place in cutlass.range(places, unroll=4):
                    cute.autovec_copy(cute.local_tile(keys[None, other], (4,), (place,)), four)
                    for j in cutlass.range_constexpr(4):
                        found = Int32(select_(four[j] == key, Int32(1), found))
                having = having | (found << other)
            new = (key >= 0) & ((having & ((1 << row) - 1)) == 0)
            rows[lane, row] = Int32(select_(new, having, Int32(0)))
            ballot = cute.arch.vote_ballot_sync(new)
            if lane == 0:
                firsts[row] = Int32(ballot)
        self.reading()
        self.write_union(lists, number % 2, mine, lane, warp_index)

    @cute.jit
    def write_union(self, lists: Lists, buffer: Int32, mine: Tile, lane: Int32, warp_index: Int32) -> None:
        """Orders a union's blocks: those of the lists' first places, then of the second ones, and so on. Among these,
        rows of all warpgroups take turns, so that each warpgroup always has work.
        """
        keys, rows, firsts, counts = lists.keys, lists.rows, lists.firsts, lists.counts
        blocks, chosen_by, lower, count = lists.blocks, lists.masks, Int32(cute.arch.lanemask_lt()), Int32(0)
        for row in cutlass.range(warp_index, mine.rows, READING, unroll=1):
            place = Int32(0)
            for other in cutlass.range(mine.rows, unroll=1):
                word, earlier = firsts[other], self.turn(other) < self.turn(row)
                place += Int32(cute.arch.popc(word & lower)) + Int32(select_(earlier, (word >> lane) & 1, Int32(0)))
            having = rows[lane, row]
            if having != 0:
                blocks[place, buffer], chosen_by[place, buffer] = keys[lane, row] % AGAIN, having
        for row in cutlass.range(mine.rows, unroll=1):
            count += Int32(cute.arch.popc(firsts[row]))
        if (warp_index == 0) & (lane == 0):
            counts[buffer] = count

    def turn(self, row: Any) -> Any:
        """A row's rank in the order of a union's blocks, in which rows of all warpgroups take turns."""
        return row % self.s.together * self.groups + row // self.s.together

    def reading(self) -> None:
        """Waits for the warps that read lists."""
        cute.arch.barrier(barrier_id=READING_BARRIER, number_of_threads=READING * WARP)

    def hand_over(self) -> None:
        """A union is there, and the one before was fetched."""
        cute.arch.barrier(barrier_id=LOADING_BARRIER, number_of_threads=GROUP)

    @cute.jit
    def produce(self, atoms: Any, buffers: Any, choices: Choices, lists: Lists, steps: Steps, thread: Int32) -> None:
        """The loading warpgroup, with all tiles of the CTA."""
        index, _, _ = cute.arch.block_idx()
        most = cutlass.max(choices.indices.shape[2], 1)
        done, turn, number, before = Int32(0), Int32(0), Int32(0), Int32(0)  # steps, tiles with rows, unions and tiles
        while index < choices.tiles * self.s.key_heads:
            mine = self.tile(index, choices)
            if mine.rows > 0:
                loads = self.loads(atoms, buffers)
                rows, sides = loads[:-2], [self.side(*load, mine) for load in loads[-2:]]
                for place in cutlass.range(0, most, PLACES, unroll=1):
                    if thread >= WARP:
                        self.unite(place, choices, lists, number, mine, thread - WARP)
                    self.hand_over()
                    if thread < WARP:
                        if const_expr(choices.window is not None):
                            if place == 0:
                                done = self.fetch_near(sides, steps, mine, done, choices.window)
                        done = self.fetch(sides, lists, steps, mine, done, number)
                    elif (thread // WARP == 1) & (place == 0):
                        self.fetch_rows(rows, steps, mine, turn, lists, number)
                    number += 1
                if thread < WARP:
                    self.fetch_end(steps, done)
                done += 1
                turn += 1
            if const_expr(choices.drawn is not None):
                if thread // WARP == 1:
                    self.draw(choices, steps, before)
            index = self.next_tile(choices, steps, index, before)
            before += 1

    @cute.jit
    def draw(self, choices: Choices, steps: Steps, before: Int32) -> None:
        """One warp: draws a tile, and tells all warps through shared memory. A CTA has its first one without that."""
        stage, parity = before % DRAWN, before // DRAWN % 2
        queue, numbers = steps.queue, steps.numbers
        every, _, _ = cute.arch.grid_dim()
        cute.arch.mbarrier_wait(queue.empty + stage, parity ^ 1)
        if cute.arch.lane_idx() == 0:
            numbers[stage] = every + count_up(choices.drawn)
            cute.arch.mbarrier_arrive(queue.full + stage)

    @cute.jit
    def next_tile(self, choices: Choices, steps: Steps, index: Int32, before: Int32) -> Int32:
        """The CTA's tile behind one, which so many were before."""
        every, _, _ = cute.arch.grid_dim()
        following = index + every
        if const_expr(choices.drawn is not None):
            stage, parity, queue = before % DRAWN, before // DRAWN % 2, steps.queue
            cute.arch.mbarrier_wait(queue.full + stage, parity)
            following = cute.arch.make_warp_uniform(steps.numbers[stage])
            self.release(queue.empty + stage)
        return following

    @cute.jit
    def fetch_rows(self, rows: Any, steps: Steps, mine: Tile, turn: Int32, lists: Lists, number: Int32) -> None:
        """One warp: fetches Q, and dO, for each warpgroup once it is done with those of the tile before, whose first
        union is given by its number.
        """
        elements = sum(width for *_, width in rows)
        for group in cutlass.range_constexpr(self.groups):
            full = steps.rows_full + group
            cute.arch.mbarrier_wait(steps.rows_empty + group, turn % 2 ^ 1)
            apart, told = None, steps.apart
            if const_expr(self.apart):
                apart = self.share_little(lists, number % 2, group)
            with cute.arch.elect_one():
                if const_expr(self.apart):
                    told[group] = apart
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes(ROWS, elements))
            for atom, tensor, buffer, width in rows:
                self.copy_rows(atom, tensor, buffer[None, None, 0], width, full, mine, group)

    def share_little(self, lists: Lists, buffer: Int32, group: int) -> Any:
        """Whether a warpgroup's rows seldom share the blocks of a union, as an integer."""

    @cute.jit
    def fetch(self, sides: Any, lists: Lists, steps: Steps, mine: Tile, done: Int32, number: Int32) -> Int32:
        """One warp: fetches the blocks of a union. ``done`` steps were before; the result counts on."""
        buffer = number % 2
        count, union = Int32(lists.counts[buffer]), (lists.blocks[None, buffer], lists.masks[None, buffer])
        last = done + cute.ceil_div(count, self.parts) * self.per_block
        for step in cutlass.range(last - done, unroll=1):
            tiles, masks = (cute.make_rmem_tensor(self.parts, Int32) for _ in range(2))
            for part in cutlass.range_constexpr(self.parts):
                place = step // self.per_block * self.parts + part
                tiles[part], masks[part] = self.beyond(mine), Int32(0)
                if place < count:
                    tiles[part] = union[0][place] * self.per_block + step % self.per_block
                    masks[part] = union[1][place]
            self.fetch_step(sides, done + step, tiles, masks, steps)
        return last

    @cute.jit
    def fetch_near(self, sides: Any, steps: Steps, mine: Tile, done: Int32, window: Int32) -> Int32:
        """One warp: fetches the newest keys that rows of a tile see in a window, and tells their end.

        ``done`` steps were before; the result counts on.
        """
        first = cutlass.max(mine.place + 1 - window, 0) // self.size
        count = (mine.place + mine.rows - 1) // self.size + 1 - first
        for step in cutlass.range(cute.ceil_div(count, self.parts), unroll=1):
            tiles, masks = (cute.make_rmem_tensor(self.parts, Int32) for _ in range(2))
            for part in cutlass.range_constexpr(self.parts):
                number = step * self.parts + part
                begin = (first + number) * self.size - mine.place  # of keys, counted from the tile's first row
                row, last = cutlass.max(begin, 0), cutlass.min(begin + self.size + window - 1, mine.rows)
                exists = (number < count) & (row < last)
                tiles[part] = Int32(select_(exists, first + number, self.beyond(mine)))
                masks[part] = Int32(select_(exists, (1 << last) - (1 << row), Int32(0)))
            self.fetch_step(sides, done, tiles, masks, steps)
            done += 1
        self.fetch_end(steps, done)
        return done + 1

    def beyond(self, mine: Tile) -> Int32:
        """A tile of keys behind all keys."""
        return cute.ceil_div(mine.keys, self.size)

    @cute.jit
    def fetch_end(self, steps: Steps, done: Int32) -> None:
        """One warp: tells the end of a tile's list."""
        stage, phase, tiles, masks = done % self.s.stages, done // self.s.stages % 2, steps.tiles, steps.masks
        cute.arch.mbarrier_wait(steps.ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            for part in cutlass.range_constexpr(self.parts):
                tiles[part, stage], masks[part, stage] = Int32(-1), Int32(-1)
            cute.arch.mbarrier_arrive(steps.ring.full + stage)

    @cute.jit
    def fetch_step(self, sides: Any, number: Int32, tiles: cute.Tensor, masks: cute.Tensor, steps: Steps) -> None:
        """One warp: fetches the parts of a step: tiles of keys, and the rows that they are for."""
        stage, phase = number % self.s.stages, number // self.s.stages % 2
        full, told, told_masks = steps.ring.full + stage, steps.tiles, steps.masks
        cute.arch.mbarrier_wait(steps.ring.empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            for part in cutlass.range_constexpr(self.parts):
                told[part, stage], told_masks[part, stage] = tiles[part], masks[part]
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes(self.tile_n, self.s.head + self.s.head_v))
        for part in cutlass.range_constexpr(self.parts):
            for atom, to, of in sides:
                cute.copy(atom, of[None, tiles[part]], to[None, stage, part], tma_bar_ptr=full)

    def side(self, atom: Any, tensor: cute.Tensor, ring: cute.Tensor, width: int, mine: Tile) -> Any:
        """Of K or V: how it is copied, and the parts of the ring and the tiles."""
        rows = sequences.copied_rows(tensor, mine.key_head, Int32(0), mine.first_key, mine.keys)
        box, every = (self.size, width), (None, 0)
        to = cute.local_tile(ring, (*box, self.s.stages), (*every, 0))
        return atom, *partition(atom, to, cute.local_tile(rows, box, every))

    @cute.jit
    def consume(self, w: Warpgroup) -> None:
        """A warpgroup, with all tiles of the CTA."""
        index, _, _ = cute.arch.block_idx()
        stage, phase, turn, before = Int32(0), Int32(0), Int32(0), Int32(0)
        while index < w.choices.tiles * self.s.key_heads:
            mine = self.tile(index, w.choices)
            if mine.rows > 0:
                self.prepare(w, mine)
                cute.arch.mbarrier_wait(w.steps.rows_full + w.group, turn % 2)
                turn += 1
                stage, phase = self.attend(w, index, mine, stage, phase)
            index = self.next_tile(w.choices, w.steps, index, before)
            before += 1

    def prepare(self, w: Warpgroup, mine: Tile) -> None:
        """Before a tile's rows are awaited."""

    def begin_step(self, part: Part, stage: Int32) -> None:
        """Issues a step's products."""
        for acc, left, right, depth in part.products:
            self.multiply_shared(acc, left, right, self.tile_n, depth, stage)

    def end_step(self, part: Part, stage: Int32) -> None:
        """Issues the product that adds to the sums."""
        self.add_product(part.acc, part.rounded, part.values, part.columns, self.tile_n, stage)

    @cute.jit
    def round_step(self, part: Part, some: Boolean) -> None:
        """Makes what was weighed an operand: ``some`` of a warp's rows see keys, else it is 0."""
        rounded, weighed = part.rounded, part.products[0][0]
        if some:
            rounded.store(weighed.load().to(self.dtype))
        else:
            rounded.fill(0.0)

    @cute.jit
    def take(self, w: Warpgroup, part: Part, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """All of a tile's steps, from one and its phase on; the one that tells the end.

        While a step's last product runs, the products of the next one that the warpgroup takes part in are issued and
        weighed.
        """
        ring = w.steps.ring
        stage, phase, found = self.find(w, stage, phase)
        while found:
            self.begin_step(part, stage)
            seen = self.seen_keys(w, part, stage)
            self.finish(0)
            self.weigh(w, part, stage, seen, False)
            self.round_step(part, seen[1])
            before = stage
            stage, phase, again = self.find(w, *advanced(ring, stage, phase), self.reach)
            while again:
                self.begin_step(part, stage)
                self.end_step(part, before)
                seen = self.seen_keys(w, part, stage)
                self.finish(1)
                self.weigh(w, part, stage, seen, True)
                self.finish(0)
                self.release(ring.empty + before)
                self.round_step(part, seen[1])
                before = stage
                stage, phase, again = self.find(w, *advanced(ring, stage, phase), self.reach)
            self.end_step(part, before)
            self.finish(0)
            self.release(ring.empty + before)
            stage, phase, found = self.find(w, stage, phase)
        self.release(ring.empty + stage)
        if const_expr(not part.near):
            self.release(w.steps.rows_empty + w.group)
        return stage, phase

    @cute.jit
    def find(
        self, w: Warpgroup, stage: Int32, phase: Int32, most: cutlass.Constexpr[int] = FAR
    ) -> tuple[Int32, Int32, Boolean]:
        """The first step, from one on, that a warpgroup takes part in, and whether there is one, or it is the end.

        Releases those before. Looks at so many at ``most``: if there is none, the last one of them is not released.
        """
        steps, left = w.steps, Int32(most - 1)
        wanted = self.wanted(steps, stage, phase, w.group)
        while ~wanted & (left > 0):
            self.release(steps.ring.empty + stage)
            stage, phase = advanced(steps.ring, stage, phase)
            wanted = self.wanted(steps, stage, phase, w.group)
            left -= 1
        return stage, phase, wanted & (cute.arch.make_warp_uniform(steps.tiles[0, stage]) >= 0)

    def wanted(self, steps: Steps, stage: Int32, phase: Int32, group: Int32) -> Boolean:
        """Waits for a step. Whether rows of a warpgroup chose any part of it, or it is the end."""
        cute.arch.mbarrier_wait(steps.ring.full + stage, phase)
        mask = Int32(0)
        for part in range(self.parts):
            mask = mask | steps.masks[part, stage]
        return self.of_group(mask, group)

    def of_group(self, mask: Int32, group: Int32) -> Boolean:
        """Whether there are rows of a warpgroup among some."""
        mine = (1 << self.s.together) - 1
        return cute.arch.make_warp_uniform(mask >> (group * self.s.together)) & mine != 0

    def seen_keys(self, w: Warpgroup, part: Part, stage: Int32) -> tuple[Any, Boolean, Boolean]:
        """Of each part of a step, for each of a thread's rows, the first key that it sees, None for 0, and where those
        end that it chose and sees; whether a warp's rows see any, and whether a thread's see all.
        """
        found, fewest, largest = [], Int32(self.size), Int32(0)
        for slot in range(2):
            row, spans = w.group * self.s.together + self.score_rows.row(w.thread, slot) // self.s.padded, []
            for number in range(self.parts):
                chose, first = (w.steps.masks[number, stage] >> row) & 1, None
                before = w.steps.tiles[number, stage] * self.size
                end = (part.mine.place + row + 1 if part.near else self.seen(part.mine, row)) - before
                end, whole = Int32(select_(chose == 1, end, Int32(0))), None
                if part.near:
                    first = end - w.choices.window
                    whole = Int32(select_(first > 0, Int32(0), end))
                fewest = cutlass.min(fewest, end if whole is None else whole)
                largest = cutlass.max(largest, end)
                spans.append((first, end))
            found.append(spans)
        return found, cute.arch.vote_any_sync(largest > 0), fewest >= self.size

    @cute.jit
    def hide_unchosen(self, scores: cute.Tensor, spans: Any, every: Boolean, thread: Int32) -> None:
        """Makes scores -inf of keys that a row did not choose or does not see."""
        if ~every:
            for slot in cutlass.range_constexpr(2):
                for place, i in enumerate(self.score_rows.order(self.tile_n, slot)):
                    part = place // 2 * 8 // self.size  # four threads have eight columns next to each other
                    column, (first, end) = self.score_rows.column(thread, place) - part * self.size, spans[slot][part]
                    exists = column < end
                    if const_expr(first is not None):
                        exists = exists & (column >= first)
                    scores[i] = Float32(select_(exists, scores[i], -Float32.inf))

    def meet_group(self, group: Int32) -> None:
        """Waits for a multiplying warpgroup."""
        cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=GROUP)

    @cute.jit
    def release(self, empty: Any) -> None:
        """A warp is done with a step."""
        cute.arch.sync_warp()
        arrive_once(empty)

    def head_of(self, mine: Tile, group: Int32, number: Int32) -> tuple[Int32, Int32, Boolean]:
        """What a row of a warpgroup's product is: a row of Q, a head, and whether there is one."""
        own, head = number // self.s.padded, number % self.s.padded
        row = group * self.s.together + own
        exists = (row < mine.rows) & (head < mine.heads) & (own < self.s.together)
        return mine.row + row, mine.first_head + head, exists

    def columns(self, thread: Int32) -> list[Any]:
        """The vectors of a row that a thread has once neighbours have exchanged theirs."""
        return [4 * i + thread % 4 for i in range(self.s.head_v // (4 * VECTOR))]

    def neighbours(self, acc: cute.Tensor, slot: int, factor: Float32) -> cute.Tensor:
        """A row's values, times a factor, rounded: of every 32 of a row, each of its four threads gets 8 that are next
        to each other, (8, 32s). It had every fourth pair.
        """
        order = self.score_rows.order(self.s.head_v, slot)
        rounded = cute.make_rmem_tensor((VECTOR, len(order) // VECTOR), self.dtype)
        for place, i in enumerate(order):
            rounded[place] = (acc[i] * factor).to(self.dtype)
        pairs = cute.recast_tensor(rounded, Int32)
        for first in range(0, len(order) // 2, 4):
            for distance in (1, 2):
                upper = upper_lane(distance)
                for lower in range(first, first + 4):
                    if not lower & distance:
                        a, b = pairs[lower], pairs[lower + distance]
                        got = cute.arch.shuffle_sync_bfly(Int32(select_(upper, a, b)), distance)
                        pairs[lower] = Int32(select_(upper, got, a))
                        pairs[lower + distance] = Int32(select_(upper, b, got))
        return rounded
