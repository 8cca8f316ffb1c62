"""Expert parallelism on one host: dispatch of tokens and combine of expert outputs through peer (symmetric) memory.

Both kernels write to the other GPUs, which uses the link better than reads. A rank has a row for every token of every
rank: token t of rank s is row s * most + t. ``Dispatch`` writes a token to each rank that has one of its experts.
``CombineExchange`` adds up the outputs of the local experts of a token and writes the sum to the token's rank: one row
per rank. Meanwhile it adds the rows that other ranks send to this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, select_

from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.moe.combining import Combine, rounded
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE


def elements_at(dtype: Any, start: Int64, offset: Int64, count: int) -> cute.Tensor:
    """``count`` elements of memory that begins elements_at an address, from the element ``offset`` on, a multiple of
    it.
    """
    size = dtype.width // 8
    pointer = cute.make_ptr(dtype, start + offset * size, cute.AddressSpace.gmem, assumed_align=count * size)
    return cute.make_tensor(pointer, cute.make_layout(count))


class Dispatch(Combine):
    """The kernel for one :class:`DispatchConfiguration`."""

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        rows = arguments["most"] if c.announced else arguments["tokens"].shape[0]
        names = ("tokens", "indices", "targets", "weights", "choice_targets", "row_of_rank", "rank", "most")
        self.dispatch(*(arguments.get(x) for x in names)).launch(
            grid=[rows * c.slices, 1, 1], block=[-(-c.width // WARP_SIZE) * WARP_SIZE, 1, 1], stream=arguments["stream"]
        )

    @cute.kernel
    def dispatch(
        self,
        tokens: cute.Tensor,
        indices: cute.Tensor,
        targets: cute.Tensor,
        weights: Any,
        choice_targets: Any,
        row_of_rank: Any,
        rank: Int32,
        most: Int32,
    ) -> None:
        c = self.c
        thread, block = thread_block_idx()
        token, column = block // c.slices, block % c.slices * c.width + thread
        is_here = token < tokens.shape[0]
        source = select_(is_here, token, Int32(0))
        rank_mask = Int32(0)  # one bit per rank
        for k in cutlass.range_constexpr(c.top_k):
            index = indices[source, k]
            is_one = is_here & (index >= 0) & (index < c.ranks * c.local)
            rank_mask |= Int32(select_(is_one, Int32(1) << (index // c.local), Int32(0)))
        if const_expr(c.announced):
            if (block % c.slices == 0) & (thread < 2 * c.top_k):
                k = thread % c.top_k
                index, weight = indices[source, k], weights[source, k]
                offset = Int64(thread // c.top_k * c.ranks + rank) * most + token
                for target in cutlass.range_constexpr(c.ranks):
                    local = index - target * c.local
                    local = Int32(select_(is_here & (local >= 0) & (local < c.local), local, Int32(-1)))
                    cell = elements_at(Int32, choice_targets[target], offset * c.top_k + k, 1)
                    cell[0] = Int32(select_(thread < c.top_k, local, weight))
            if (block % c.slices == 0) & (thread < c.ranks) & is_here:
                row_of_rank[token, thread] = Int32(
                    select_((rank_mask >> thread) & 1 == 1, thread * most + token, Int32(-1))
                )
        if (rank_mask != 0) & (thread < c.width) & (column < self.columns):
            vector = self.load(tokens, token, column)
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
            offset = (Int64(rank) * most + token) * c.hidden + column * c.vector
            for step in cutlass.range_constexpr(c.ranks):
                target = (rank + 1 + step) % c.ranks
                if (rank_mask >> target) & 1 == 1:
                    cute.copy(atom, vector, elements_at(self.dtype, targets[target], offset, c.vector))

    set_kernel_name(dispatch, "cudnn_moe_dispatch")


class CombineExchange(Combine):
    """The kernel for a :class:`CombineExchangeConfiguration`. Slots alternate between the ranks, which keeps the link
    busy.

    CTAs start in the order of their indices. Those that send a token precede the CTA that adds the received rows of a
    token of this rank by a lookahead, so that no CTA waits for a later one. The last CTA waits until all ranks have
    started: their memory of the call before may then be overwritten.
    """

    streams = True

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        names = (
            "rows",
            "scatter_idx",
            "weights",
            "targets",
            "row_of_rank",
            "out",
            "word_targets",
            "values",
            "own_values",
            "rank",
            "most",
            "limit",
        )
        num_turns = arguments["most"] + cutlass.min(c.ahead, arguments["most"])
        self.combine_exchange(*(arguments.get(x) for x in names)).launch(
            grid=[num_turns * c.ranks * c.slices, 1, 1],
            block=[-(-c.width // WARP_SIZE) * WARP_SIZE, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def combine_exchange(
        self,
        rows: cute.Tensor,
        scatter_idx: cute.Tensor,
        weights: Any,
        targets: cute.Tensor,
        row_of_rank: cute.Tensor,
        out: cute.Tensor,
        word_targets: cute.Tensor,
        values: Any,
        own_values: Any,
        rank: Int32,
        most: Int32,
        limit: Int32,
    ) -> None:
        c = self.c
        thread, block = thread_block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        slot_index, column = block // c.slices, block % c.slices * c.width + thread
        target, token = (rank + 1 + slot_index % c.ranks) % c.ranks, slot_index // c.ranks
        is_own = target == rank
        token -= Int32(select_(is_own, cutlass.min(c.ahead, most), Int32(0)))
        is_one = (token >= 0) & (token < Int32(select_(is_own, out.shape[0], most)))
        token = Int32(select_(is_one, token, Int32(0)))
        source, offset = target * most + token, Int64(rank) * most + token
        row, factor = self.load_slots(scatter_idx, weights, source)
        largest = Int32(-1)
        for k in cutlass.range_constexpr(c.top_k):
            largest = cutlass.max(largest, row[k])
        is_one &= is_own | (largest >= 0)
        if is_one & (thread < c.width) & (column < self.columns):
            words = self.words(self.total(rows, row, factor, column))
            first = targets[target] + 16 * Int64(column)
            if is_own:
                total = self.sum_of(self.of_ranks(words, row_of_rank, token, rank, first, self.size, limit))
                self.store(self.row_vector(out, token, column), total)
            else:
                send(words, first + offset * self.size)
        if const_expr(c.values):
            if is_one & (block % c.slices == 0) & (thread < c.values):
                word = [values[source, thread]]
                start = word_targets[target] + 4 * Int64(c.ranks + thread)
                if is_own:
                    each = self.of_ranks(word, row_of_rank, token, rank, start, 4 * c.values, limit)
                    own_values[token, thread] = sum_of_floats(each)
                else:
                    send(word, start + offset * (4 * c.values))
        if (thread < c.ranks) & (thread != rank):
            if block == 0:
                cute.arch.fence_acq_rel_sys()
                send([Int32(0)], word_targets[thread] + 4 * Int64(rank))
            if block == blocks - 1:
                cell = word_targets[rank] + 4 * Int64(thread)
                wait_and_clear(poll(cell, 1), cell, limit)
                cute.arch.fence_acq_rel_sys()

    set_kernel_name(combine_exchange, "cudnn_moe_give_back")

    @property
    def size(self) -> int:
        """Bytes of a token's row."""
        return self.c.hidden * self.dtype.width // 8

    def words(self, values: list) -> list:
        """A rounded 16-byte vector as words."""
        words = cute.recast_tensor(rounded(values, self.dtype), Int32)
        return [words[i] for i in range(4)]

    def of_ranks(
        self,
        own_words: list,
        row_of_rank: cute.Tensor,
        token: Int32,
        rank: Int32,
        first: Int64,
        size: int,
        limit: Int32,
    ) -> list:
        """The words of a token from every rank, ``own_words`` first; zeros from ranks that send no row of it.

        Received rows have ``size`` bytes; the words of row 0 are at ``first``.
        """
        rows = [row_of_rank[token, (rank + 1 + step) % self.c.ranks] for step in range(self.c.ranks - 1)]
        cells = [first + size * Int64(cutlass.max(row, 0)) for row in rows]
        received = [poll(cell, len(own_words)) for cell in cells]  # all loads are in flight together
        for words, cell, row in zip(received, cells, rows, strict=True):
            wait_and_clear(words, cell, limit, row >= 0)
        received_rows = zip(received, rows, strict=True)
        return [
            own_words,
            *([Int32(select_(row >= 0, x[i], Int32(0))) for i in range(len(own_words))] for x, row in received_rows),
        ]

    def sum_of(self, each: list) -> list:
        """The sum of a vector over the ranks, in float32."""
        total = [Float32(0.0)] * self.c.vector
        for words in each:
            vector = cute.make_rmem_tensor(self.c.vector, self.dtype)
            bits = cute.recast_tensor(vector, Int32)
            for i, word in enumerate(words):
                bits[i] = word
            wide = vector.load().to(Float32)
            total = [a + wide[i] for i, a in enumerate(total)]
        return total


def sum_of_floats(each: list) -> Int32:
    """The sum of a float32 over the ranks, as its bits."""
    total = Float32(0.0)
    for (word,) in each:
        total += word.bitcast(Float32)
    return total.bitcast(Int32)


EMPTY = -1
"""The word of an empty cell. It is a NaN of 16 or 32 bits; a rank that sends this NaN sends another one instead."""
NAN = 0x7FFF7FFF


def poll(address: Int64, count: int) -> cute.Tensor:
    """Loads words that another GPU may be writing."""
    words = cute.make_rmem_tensor(count, Int32)
    poll_again(words, address)
    return words


def poll_again(words: cute.Tensor, address: Int64) -> None:
    """Loads the words again."""
    count = cute.size(words)
    vector, pattern = _vector("w", count)
    code = f"ld.relaxed.sys.global{vector}.b32 {pattern}, [{{$r0}}];"
    received = cute.arch.inline_ptx(code, write_only_types=[Int32] * count, read_only_args=[address])
    for i, word in enumerate(received if count > 1 else [received]):
        words[i] = word


def send(words: list, address: Int64) -> None:
    """Stores words for which another GPU may be polling."""
    _store([Int32(select_(word == EMPTY, Int32(NAN), word)) for word in words], address)


def _store(words: list, address: Int64) -> None:
    vector, pattern = _vector("r", len(words))
    code = f"st.relaxed.sys.global{vector}.b32 [{{$r{len(words)}}}], {pattern};"
    cute.arch.inline_ptx(code, read_only_args=[*words, address])


def _vector(register_prefix: str, count: int) -> tuple[str, str]:
    """The PTX vector suffix for ``count`` words, and their operands."""
    names = ", ".join(f"{{${register_prefix}{i}}}" for i in range(count))
    return (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)


def _is_missing(words: cute.Tensor) -> Any:
    missing = words[0] == EMPTY
    for i in range(1, cute.size(words)):
        missing |= words[i] == EMPTY
    return missing


@cute.jit
def wait_and_clear(words: cute.Tensor, address: Int64, limit: Int32, comes: Any = True) -> None:
    """Polls until all words at an address have arrived, for at most ``limit`` milliseconds, and empties the cell."""
    if comes:
        if _is_missing(words):
            start = cute.arch.globaltimer()
            while _is_missing(words):
                cute.arch.inline_ptx("nanosleep.u32 100;")
                poll_again(words, address)
                if cute.arch.globaltimer() - start > Int64(limit) * 1_000_000:
                    cute.arch.inline_ptx("trap;")
        _store([Int32(EMPTY)] * cute.size(words), address)
