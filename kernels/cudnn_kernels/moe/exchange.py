"""Tokens to the ranks of their experts, and sums back, through memory that the GPUs of a host see of each other.

Both kernels write to the other GPUs, which keeps the link busier than reading does. A rank has a row for every token of
every rank: token t of rank s is row s * most + t. ``Dispatch`` writes a token to each rank that has an expert of it.
``GiveBack`` adds up what the experts here made of a token, and writes the sum to the token's rank: one row, however
many of its experts are here. ``Add`` adds what came from other ranks to the sums of this one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, select_

from cudnn_kernels.moe.combining import Combine
from cudnn_kernels.moe.configuration import WARP
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind


def at(dtype: Any, start: Int64, place: Int64, count: int) -> cute.Tensor:
    """``count`` elements of memory that begins at an address, from the element ``place`` on, a multiple of it."""
    size = dtype.width // 8
    pointer = cute.make_ptr(dtype, start + place * size, cute.AddressSpace.gmem, assumed_align=count * size)
    return cute.make_tensor(pointer, cute.make_layout(count))


class Dispatch(Combine):
    """The kernel for one :class:`DispatchConfiguration`."""

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        rows = given["most"] if const_expr(c.announced) else given["tokens"].shape[0]
        names = ("tokens", "indices", "targets", "weights", "choice_targets", "row_of_rank", "rank", "most")
        self.dispatch(*(given.get(x) for x in names)).launch(
            grid=[rows * c.slices, 1, 1], block=[-(-c.width // WARP) * WARP, 1, 1], stream=given["stream"]
        )

    @cute.kernel
    def dispatch(
        self, tokens: cute.Tensor, indices: cute.Tensor, targets: cute.Tensor, weights: Any, choice_targets: Any,
        row_of_rank: Any, rank: Int32, most: Int32,
    ) -> None:  # fmt: skip
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
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

    Sums are read again as soon as all have come, from the first token on. So the first tokens come last here, and rows,
    which nobody reads again, make room for sums in the L2 cache.
    """

    streams = True

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        names = ("rows", "row_of_choice", "weights", "targets", "out", "values", "value_targets", "rank", "most")
        self.give_back(*(given.get(x) for x in names)).launch(
            grid=[given["row_of_choice"].shape[0] * c.slices, 1, 1], block=[-(-c.width // WARP) * WARP, 1, 1],
            stream=given["stream"], min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def give_back(
        self, rows: cute.Tensor, row_of_choice: cute.Tensor, weights: Any, targets: cute.Tensor,
        out: cute.Tensor, values: Any, value_targets: Any, rank: Int32, most: Int32,
    ) -> None:  # fmt: skip
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        turn, column = block // c.slices, block % c.slices * c.width + thread
        target, token = (rank + 1 + turn % c.ranks) % c.ranks, most - 1 - turn // c.ranks
        source = target * most + token
        row, factor = self.choices(row_of_choice, weights, source)
        largest = Int32(-1)
        for k in cutlass.range_constexpr(c.top_k):
            largest = cutlass.max(largest, row[k])
        is_own, place = target == rank, Int64(rank) * most + token
        is_wanted = (is_own & (token < out.shape[0])) | ((target != rank) & (largest >= 0))
        if is_wanted & (thread < c.width) & (column < self.columns):
            total = self.total(rows, row, factor, column)
            start = Int64(select_(is_own, out.iterator.toint(), targets[target]))
            first = Int64(select_(is_own, Int64(token), place)) * c.hidden
            self.store(at(self.dtype, start, first + column * c.vector, c.vector), total)
        if const_expr(c.values):
            if (largest >= 0) & (block % c.slices == 0) & (thread < c.values):
                cell = at(Int32, value_targets[target], place * c.values + thread, 1)
                cell[0] = values[source, thread]

    name(give_back, "cudnn_moe_give_back")


class Add(Combine):
    """The kernel for an :class:`AddConfiguration`."""

    streams = True

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        tokens = max(1, c.most_threads // c.width)  # of a CTA
        self.add(given["rows"], given["row_of_choice"], given["out"], given["rank"], tokens).launch(
            grid=[cute.ceil_div(given["out"].shape[0], tokens) * c.slices, 1, 1],
            block=[-(-tokens * c.width // WARP) * WARP, 1, 1], stream=given["stream"], min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def add(
        self, rows: cute.Tensor, row_of_choice: cute.Tensor, out: cute.Tensor, rank: Int32,
        tokens: cutlass.Constexpr[int],
    ) -> None:  # fmt: skip
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block // c.slices * tokens + thread // c.width
        column = block % c.slices * c.width + thread % c.width
        if (thread < tokens * c.width) & (token < out.shape[0]) & (column < self.columns):
            row, _ = self.choices(row_of_choice, None, token)
            for k in cutlass.range_constexpr(c.top_k):
                row[k] = Int32(select_(rank == k, Int32(-1), row[k]))
            self.store(self.part(out, token, column), self.with_own(rows, row, out, token, column))

    name(add, "cudnn_moe_add")

    def with_own(self, rows: cute.Tensor, row: cute.Tensor, out: cute.Tensor, token: Int32, column: Int32) -> list:
        """The sum of 16 bytes of other ranks' sums and this rank's."""
        own = self.load(out, token, column)
        others = self.total(rows, row, row, column)
        return [a + b for a, b in zip(self.values(own, Int32(0)), others, strict=True)]
