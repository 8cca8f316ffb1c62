"""Expert parallelism on one host: dispatch of tokens and combine of expert outputs through peer (symmetric) memory.

Both kernels write to the other GPUs, which uses the link better than reads. A rank has a row for every token of every
rank: token t of rank s is row s * max_tokens + t. ``Dispatch`` writes a token to each rank that has one of its experts.
``CombineExchange`` adds up the outputs of a token's local experts and writes the sum to the token's rank: one row per
rank. Meanwhile it adds the rows that other ranks send to this one.

There are no flags: an empty buffer holds a NaN bit pattern that is never sent, so a word that differs has arrived. The
reader writes the pattern again for the next call.
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
    """A tensor of ``count`` elements at an address plus ``offset`` elements, which is a multiple of ``count``."""
    size = dtype.width // 8
    pointer = cute.make_ptr(dtype, start + offset * size, cute.AddressSpace.gmem, assumed_align=count * size)
    return cute.make_tensor(pointer, cute.make_layout(count))


class Dispatch(Combine):
    """The kernel for one :class:`DispatchConfiguration`: a CTA sends a token, or a slice of its columns."""

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        rows = arguments["max_tokens"] if c.sends_routing else arguments["tokens"].shape[0]
        names = ("tokens", "indices", "targets", "weights", "slot_targets", "row_of_rank", "rank", "max_tokens")
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
        slot_targets: Any,
        row_of_rank: Any,
        rank: Int32,
        max_tokens: Int32,
    ) -> None:
        c = self.c
        thread, block = thread_block_idx()
        token, column = block // c.slices, block % c.slices * c.width + thread
        in_range = token < tokens.shape[0]
        source = select_(in_range, token, Int32(0))
        # (1) The ranks of the token's experts, one bit each.
        rank_mask = Int32(0)
        for k in cutlass.range_constexpr(c.top_k):
            index = indices[source, k]
            is_active = in_range & (index >= 0) & (index < c.ranks * c.local_experts)
            rank_mask |= Int32(select_(is_active, Int32(1) << (index // c.local_experts), Int32(0)))
        # (2) Send the token's local expert indices and weights to all ranks.
        if const_expr(c.sends_routing):
            if (block % c.slices == 0) & (thread < 2 * c.top_k):
                k = thread % c.top_k
                index, weight = indices[source, k], weights[source, k]
                offset = Int64(thread // c.top_k * c.ranks + rank) * max_tokens + token
                for target in cutlass.range_constexpr(c.ranks):
                    local = index - target * c.local_experts
                    local = Int32(select_(in_range & (local >= 0) & (local < c.local_experts), local, Int32(-1)))
                    slot = elements_at(Int32, slot_targets[target], offset * c.top_k + k, 1)
                    slot[0] = Int32(select_(thread < c.top_k, local, weight))
            if (block % c.slices == 0) & (thread < c.ranks) & in_range:
                row_of_rank[token, thread] = Int32(
                    select_((rank_mask >> thread) & 1 == 1, thread * max_tokens + token, Int32(-1))
                )
        # (3) Send the token to these ranks, each rank starting with its successor.
        if (rank_mask != 0) & (thread < c.width) & (column < self.columns):
            vector = self.load(tokens, token, column)
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
            offset = (Int64(rank) * max_tokens + token) * c.hidden + column * c.vector
            for step in cutlass.range_constexpr(c.ranks):
                target = (rank + 1 + step) % c.ranks
                if (rank_mask >> target) & 1 == 1:
                    cute.copy(atom, vector, elements_at(self.dtype, targets[target], offset, c.vector))

    set_kernel_name(dispatch, "cudnn_moe_dispatch")


class CombineExchange(Combine):
    """The kernel for a :class:`CombineExchangeConfiguration`. Slots alternate between the ranks, which keeps the link
    busy.

    CTAs start in the order of their indices. A CTA sends a token of another rank, or adds the received rows of a token
    of this rank. Tokens are sent ``lookahead`` tokens before those of the same index are added, so that no CTA waits
    for a later one. The last CTA waits until all ranks have started: the buffers that they read in the call before may
    then be overwritten.
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
            "max_tokens",
            "timeout_ms",
        )
        num_steps = arguments["max_tokens"] + cutlass.min(c.lookahead, arguments["max_tokens"])
        self.combine_exchange(*(arguments.get(x) for x in names)).launch(
            grid=[num_steps * c.ranks * c.slices, 1, 1],
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
        max_tokens: Int32,
        timeout_ms: Int32,
    ) -> None:
        c = self.c
        thread, block = thread_block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        work_idx, column = block // c.slices, block % c.slices * c.width + thread
        target, token = (rank + 1 + work_idx % c.ranks) % c.ranks, work_idx // c.ranks
        is_own = target == rank
        token -= Int32(select_(is_own, cutlass.min(c.lookahead, max_tokens), Int32(0)))
        is_active = (token >= 0) & (token < Int32(select_(is_own, out.shape[0], max_tokens)))
        token = Int32(select_(is_active, token, Int32(0)))
        source, offset = target * max_tokens + token, Int64(rank) * max_tokens + token
        row, weight = self.load_slots(scatter_idx, weights, source)
        max_row = Int32(-1)
        for k in cutlass.range_constexpr(c.top_k):
            max_row = cutlass.max(max_row, row[k])
        is_active &= is_own | (max_row >= 0)
        # (1) Sum of the token's local experts; send it to the token's rank, or add those that other ranks send.
        if is_active & (thread < c.width) & (column < self.columns):
            words = self.words(self.total(rows, row, weight, column))
            row_0 = targets[target] + 16 * Int64(column)
            if is_own:
                received = self.receive_from_ranks(words, row_of_rank, token, rank, row_0, self.size, timeout_ms)
                total = self.sum_over_ranks(received)
                self.store(self.row_vector(out, token, column), total)
            else:
                send(words, row_0 + offset * self.size)
        # (2) The same for float32 values.
        if const_expr(c.values):
            if is_active & (block % c.slices == 0) & (thread < c.values):
                word = [values[source, thread]]
                start = word_targets[target] + 4 * Int64(c.ranks + thread)
                if is_own:
                    received = self.receive_from_ranks(word, row_of_rank, token, rank, start, 4 * c.values, timeout_ms)
                    own_values[token, thread] = sum_floats_over_ranks(received)
                else:
                    send(word, start + offset * (4 * c.values))
        # (3) Signal all ranks that this rank has started, and wait for their signals.
        if (thread < c.ranks) & (thread != rank):
            if block == 0:
                cute.arch.fence_acq_rel_sys()
                send([Int32(0)], word_targets[thread] + 4 * Int64(rank))
            if block == blocks - 1:
                address = word_targets[rank] + 4 * Int64(thread)
                wait_and_clear(poll(address, 1), address, timeout_ms)
                cute.arch.fence_acq_rel_sys()

    set_kernel_name(combine_exchange, "cudnn_moe_combine_exchange")

    @property
    def size(self) -> int:
        """Bytes of a token's row."""
        return self.c.hidden * self.dtype.width // 8

    def words(self, values: list) -> list:
        """A rounded 16-byte vector as words."""
        words = cute.recast_tensor(rounded(values, self.dtype), Int32)
        return [words[i] for i in range(4)]

    def receive_from_ranks(
        self,
        own_words: list,
        row_of_rank: cute.Tensor,
        token: Int32,
        rank: Int32,
        start: Int64,
        size: int,
        timeout_ms: Int32,
    ) -> list:
        """The words of a token from every rank, ``own_words`` first; zeros from ranks that send no row of it.

        Received rows have ``size`` bytes; the words of row 0 are at ``start``.
        """
        rows = [row_of_rank[token, (rank + 1 + step) % self.c.ranks] for step in range(self.c.ranks - 1)]
        addresses = [start + size * Int64(cutlass.max(row, 0)) for row in rows]
        received = [poll(address, len(own_words)) for address in addresses]  # all loads are in flight together
        for words, address, row in zip(received, addresses, rows, strict=True):
            wait_and_clear(words, address, timeout_ms, row >= 0)
        received_rows = zip(received, rows, strict=True)
        return [
            own_words,
            *([Int32(select_(row >= 0, x[i], Int32(0))) for i in range(len(own_words))] for x, row in received_rows),
        ]

    def sum_over_ranks(self, words_of_ranks: list) -> list:
        """The sum of a vector over the ranks, in float32. ``words_of_ranks``: its words from each rank."""
        total = [Float32(0.0)] * self.c.vector
        for words in words_of_ranks:
            vector = cute.make_rmem_tensor(self.c.vector, self.dtype)
            bits = cute.recast_tensor(vector, Int32)
            for i, word in enumerate(words):
                bits[i] = word
            wide = vector.load().to(Float32)
            total = [a + wide[i] for i, a in enumerate(total)]
        return total


def sum_floats_over_ranks(words_of_ranks: list) -> Int32:
    """The sum of a float32 over the ranks, as its bits."""
    total = Float32(0.0)
    for (word,) in words_of_ranks:
        total += word.bitcast(Float32)
    return total.bitcast(Int32)


EMPTY = -1
"""The word of an empty buffer: a NaN of 16 or 32 bits. Senders replace this NaN by ``NAN``."""
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
def wait_and_clear(words: cute.Tensor, address: Int64, timeout_ms: Int32, is_sent: Any = True) -> None:
    """Polls until all words at an address have arrived, within ``timeout_ms`` milliseconds, and empties them."""
    if is_sent:
        if _is_missing(words):
            start = cute.arch.globaltimer()
            while _is_missing(words):
                cute.arch.inline_ptx("nanosleep.u32 100;")
                poll_again(words, address)
                if cute.arch.globaltimer() - start > Int64(timeout_ms) * 1_000_000:
                    cute.arch.inline_ptx("trap;")
        _store([Int32(EMPTY)] * cute.size(words), address)
