"""Tokens to the ranks of their experts, and sums back, through memory that the GPUs of a host see of each other.

A rank has a row for every token of every rank: token t of rank s is row s * most + t. ``Receive`` reads from the memory
of rank s what has an expert here. ``Send`` adds up what the experts here made of a token, and writes the sum to rank s:
one row, however many of the token's experts are here.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.moe.combining import Combine
from cudnn_kernels.moe.configuration import WARP, ReceiveConfiguration
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind


def piece_at(dtype: Any, start: Int64, row: Int64, hidden: int, column: Int32) -> cute.Tensor:
    """16 bytes of a row of memory that begins at an address."""
    size = dtype.width // 8
    address = start + row * (hidden * size) + Int64(column) * 16
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(16 // size))


class Receive:
    """The kernel for one :class:`ReceiveConfiguration`."""

    def __init__(self, configuration: ReceiveConfiguration) -> None:
        c = self.c = configuration
        self.dtype = DTYPES[c.dtype]
        self.columns = c.hidden // c.vector

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        given = bind(self.c.slots(), arguments)
        tokens = given["tokens"]
        self.kernel(given["sources"], given["indices"], tokens, given["most"]).launch(
            grid=[tokens.shape[0] * self.c.slices, 1, 1], block=[-(-self.c.width // WARP) * WARP, 1, 1],
            stream=given["stream"],
        )  # fmt: skip

    @cute.kernel
    def kernel(self, sources: cute.Tensor, indices: cute.Tensor, tokens: cute.Tensor, most: Int32) -> None:
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row, column = block // c.slices, block % c.slices * c.width + thread
        largest = Int32(-1)
        for k in cutlass.range_constexpr(c.top_k):
            largest = cutlass.max(largest, indices[row, k])
        if (largest >= 0) & (thread < c.width) & (column < self.columns):
            source = piece_at(self.dtype, sources[row // most], Int64(row % most), c.hidden, column)
            part = cute.make_rmem_tensor(c.vector, self.dtype)
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
            cute.copy(atom, source, part)
            cute.copy(atom, part, cute.local_tile(tokens[row, None], (c.vector,), (column,)))

    name(kernel, "cudnn_moe_receive")


class Send(Combine):
    """The kernel for a :class:`CombineConfiguration` whose sums go to other ranks."""

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        tensors = [given.get(x) for x in ("rows", "row_of_choice", "weights", "targets")]
        self.send(*tensors, given["rank"], given["most"]).launch(
            grid=[given["row_of_choice"].shape[0] * c.slices, 1, 1], block=[-(-c.width // WARP) * WARP, 1, 1],
            stream=given["stream"], min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def send(
        self, rows: cute.Tensor, row_of_choice: cute.Tensor, weights: Any, targets: cute.Tensor, rank: Int32,
        most: Int32,
    ) -> None:  # fmt: skip
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token, column = block // c.slices, block % c.slices * c.width + thread
        row, factor = self.choices(row_of_choice, weights, token)
        largest = Int32(-1)
        for k in cutlass.range_constexpr(c.top_k):
            largest = cutlass.max(largest, row[k])
        if (largest >= 0) & (thread < c.width) & (column < self.columns):
            total = self.total(rows, row, factor, column)
            place = Int64(rank) * most + token % most
            self.store(piece_at(self.dtype, targets[token // most], place, c.hidden, column), total)

    name(send, "cudnn_moe_send")
