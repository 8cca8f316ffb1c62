"""Tokens to the ranks of their experts, and sums back, through memory that the GPUs of a host see of each other.

Both kernels write to the other GPUs, which keeps the link busier than reading does. A rank has a row for every token of
every rank: token t of rank s is row s * most + t. ``Dispatch`` writes a token to each rank that has an expert of it.
``GiveBack`` adds up what the experts here made of a token, and writes the sum to the token's rank: one row, however
many of its experts are here. Meanwhile it adds what comes from other ranks to the sums of this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, select_

from cudnn_kernels.kernel import here
from cudnn_kernels.moe.combining import Combine, rounded
from cudnn_kernels.moe.configuration import WARP
from cudnn_kernels.naming import name


def at(dtype: Any, start: Int64, place: Int64, count: int) -> cute.Tensor:
    """``count`` elements of memory that begins at an address, from the element ``place`` on, a multiple of it."""
    size = dtype.width // 8
    pointer = cute.make_ptr(dtype, start + place * size, cute.AddressSpace.gmem, assumed_align=count * size)
    return cute.make_tensor(pointer, cute.make_layout(count))


class Dispatch(Combine):
    """The kernel for one :class:`DispatchConfiguration`."""

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        rows = given["most"] if c.announced else given["tokens"].shape[0]
        names = ("tokens", "indices", "targets", "weights", "choice_targets", "row_of_rank", "rank", "most")
        self.dispatch(*(given.get(x) for x in names)).launch(
            grid=[rows * c.slices, 1, 1], block=[-(-c.width // WARP) * WARP, 1, 1], stream=given["stream"]
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
        thread, block = here()
        token, column = block // c.slices, block % c.slices * c.width + thread
        is_here = token < tokens.shape[0]
        source = select_(is_here, token, Int32(0))
        wanted = Int32(0)  # a bit for each rank
        for k in cutlass.range_constexpr(c.top_k):
            index = indices[source, k]
            is_one = is_here & (index >= 0) & (index < c.ranks * c.local)
            wanted |= Int32(select_(is_one, Int32(1) << (index // c.local), Int32(0)))
        if const_expr(c.announced):
            if (block % c.slices == 0) & (thread < 2 * c.top_k):
                k = thread % c.top_k
                index, weight = indices[source, k], weights[source, k]
                place = Int64(thread // c.top_k * c.ranks + rank) * most + token
                for target in cutlass.range_constexpr(c.ranks):
                    local = index - target * c.local
                    local = Int32(select_(is_here & (local >= 0) & (local < c.local), local, Int32(-1)))
                    cell = at(Int32, choice_targets[target], place * c.top_k + k, 1)
                    cell[0] = Int32(select_(thread < c.top_k, local, weight))
            if (block % c.slices == 0) & (thread < c.ranks) & is_here:
                row_of_rank[token, thread] = Int32(
                    select_((wanted >> thread) & 1 == 1, thread * most + token, Int32(-1))
                )
        if (wanted != 0) & (thread < c.width) & (column < self.columns):
            part = self.load(tokens, token, column)
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
            place = (Int64(rank) * most + token) * c.hidden + column * c.vector
            for step in cutlass.range_constexpr(c.ranks):
                target = (rank + 1 + step) % c.ranks
                if (wanted >> target) & 1 == 1:
                    cute.copy(atom, part, at(self.dtype, targets[target], place, c.vector))

    name(dispatch, "cudnn_moe_dispatch")


class GiveBack(Combine):
    """The kernel for a :class:`GiveBackConfiguration`. The ranks' tokens take turns, which keeps the link busy.

    CTAs start in the order of their numbers. Those that send a token come some before the one that has its sum on this
    rank and adds the others', for which it waits: no CTA waits for a later one. The last one waits until all ranks have
    begun: what they read before may then be written again.
    """

    streams = True

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        names = (
            "rows",
            "row_of_choice",
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
        turns = given["most"] + cutlass.min(c.ahead, given["most"])
        self.give_back(*(given.get(x) for x in names)).launch(
            grid=[turns * c.ranks * c.slices, 1, 1],
            block=[-(-c.width // WARP) * WARP, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def give_back(
        self,
        rows: cute.Tensor,
        row_of_choice: cute.Tensor,
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
        thread, block = here()
        blocks, _, _ = cute.arch.grid_dim()
        turn, column = block // c.slices, block % c.slices * c.width + thread
        target, token = (rank + 1 + turn % c.ranks) % c.ranks, turn // c.ranks
        is_own = target == rank
        token -= Int32(select_(is_own, cutlass.min(c.ahead, most), Int32(0)))
        is_one = (token >= 0) & (token < Int32(select_(is_own, out.shape[0], most)))
        token = Int32(select_(is_one, token, Int32(0)))
        source, place = target * most + token, Int64(rank) * most + token
        row, factor = self.choices(row_of_choice, weights, source)
        largest = Int32(-1)
        for k in cutlass.range_constexpr(c.top_k):
            largest = cutlass.max(largest, row[k])
        is_one &= is_own | (largest >= 0)
        if is_one & (thread < c.width) & (column < self.columns):
            words = self.words(self.total(rows, row, factor, column))
            first = targets[target] + 16 * Int64(column)
            if is_own:
                total = self.sum_of(self.of_ranks(words, row_of_rank, token, rank, first, self.size, limit))
                self.store(self.part(out, token, column), total)
            else:
                send(words, first + place * self.size)
        if const_expr(c.values):
            if is_one & (block % c.slices == 0) & (thread < c.values):
                word = [values[source, thread]]
                start = word_targets[target] + 4 * Int64(c.ranks + thread)
                if is_own:
                    each = self.of_ranks(word, row_of_rank, token, rank, start, 4 * c.values, limit)
                    own_values[token, thread] = sum_of_numbers(each)
                else:
                    send(word, start + place * (4 * c.values))
        if (thread < c.ranks) & (thread != rank):
            if block == 0:
                cute.arch.fence_acq_rel_sys()
                send([Int32(0)], word_targets[thread] + 4 * Int64(rank))
            if block == blocks - 1:
                cell = word_targets[rank] + 4 * Int64(thread)
                take(look(cell, 1), cell, limit)
                cute.arch.fence_acq_rel_sys()

    name(give_back, "cudnn_moe_give_back")

    @property
    def size(self) -> int:
        """Bytes of a token."""
        return self.c.hidden * self.dtype.width // 8

    def words(self, values: list) -> list:
        """16 bytes of a row, rounded."""
        words = cute.recast_tensor(rounded(values, self.dtype), Int32)
        return [words[i] for i in range(4)]

    def of_ranks(
        self, own: list, row_of_rank: cute.Tensor, token: Int32, rank: Int32, first: Int64, size: int, limit: Int32
    ) -> list:
        """Words of a token from each rank, of this one, ``own``, first; zeros from those that have no row of it.

        Rows of the others are of ``size`` bytes, the words of row 0 at ``first``.
        """
        rows = [row_of_rank[token, (rank + 1 + step) % self.c.ranks] for step in range(self.c.ranks - 1)]
        cells = [first + size * Int64(cutlass.max(row, 0)) for row in rows]
        found = [look(cell, len(own)) for cell in cells]  # all at once
        for words, cell, row in zip(found, cells, rows, strict=True):
            take(words, cell, limit, row >= 0)
        others = zip(found, rows, strict=True)
        return [own, *([Int32(select_(row >= 0, x[i], Int32(0))) for i in range(len(own))] for x, row in others)]

    def sum_of(self, each: list) -> list:
        """The sum of 16 bytes of all ranks, in float32."""
        total = [Float32(0.0)] * self.c.vector
        for words in each:
            part = cute.make_rmem_tensor(self.c.vector, self.dtype)
            bits = cute.recast_tensor(part, Int32)
            for i, word in enumerate(words):
                bits[i] = word
            numbers = part.load().to(Float32)
            total = [a + numbers[i] for i, a in enumerate(total)]
        return total


def sum_of_numbers(each: list) -> Int32:
    """The sum of a float32 of all ranks, as its bits."""
    total = Float32(0.0)
    for (word,) in each:
        total += word.bitcast(Float32)
    return total.bitcast(Int32)


NOTHING = -1
"""A word where nothing has come. No rank sends it: these bits are a NaN, of 16 or 32 bits, and another one is sent."""
NAN = 0x7FFF7FFF


def look(address: Int64, count: int) -> cute.Tensor:
    """Words to which another GPU may be writing: what is there now."""
    words = cute.make_rmem_tensor(count, Int32)
    look_again(words, address)
    return words


def look_again(words: cute.Tensor, address: Int64) -> None:
    """The same, in memory that is there."""
    count = cute.size(words)
    vector, pattern = _vector("w", count)
    code = f"ld.relaxed.sys.global{vector}.b32 {pattern}, [{{$r0}}];"
    found = cute.arch.inline_ptx(code, write_only_types=[Int32] * count, read_only_args=[address])
    for i, word in enumerate(found if count > 1 else [found]):
        words[i] = word


def send(words: list, address: Int64) -> None:
    """Stores words, which another GPU may look for."""
    _store([Int32(select_(word == NOTHING, Int32(NAN), word)) for word in words], address)


def _store(words: list, address: Int64) -> None:
    vector, pattern = _vector("r", len(words))
    code = f"st.relaxed.sys.global{vector}.b32 [{{$r{len(words)}}}], {pattern};"
    cute.arch.inline_ptx(code, read_only_args=[*words, address])


def _vector(kind: str, count: int) -> tuple[str, str]:
    """PTX's suffix for so many words, and their names."""
    names = ", ".join(f"{{${kind}{i}}}" for i in range(count))
    return (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)


def _is_missing(words: cute.Tensor) -> Any:
    missing = words[0] == NOTHING
    for i in range(1, cute.size(words)):
        missing |= words[i] == NOTHING
    return missing


@cute.jit
def take(words: cute.Tensor, address: Int64, limit: Int32, comes: Any = True) -> None:
    """Waits until what comes to an address is there, ``limit`` milliseconds at most, and leaves nothing there."""
    if comes:
        if _is_missing(words):
            start = cute.arch.globaltimer()
            while _is_missing(words):
                cute.arch.inline_ptx("nanosleep.u32 100;")
                look_again(words, address)
                if cute.arch.globaltimer() - start > Int64(limit) * 1_000_000:
                    cute.arch.inline_ptx("trap;")
        _store([Int32(NOTHING)] * cute.size(words), address)
