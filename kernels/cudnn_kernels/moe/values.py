"""Permutes router weights from (token, k) slots to rows, and the gradients per row back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, const_expr

from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.naming import set_kernel_name

THREADS = 256


class Values(Kernel):
    """The kernel for one ``ValuesConfiguration``. A thread has a (token, k) slot."""

    def launch(self, arguments: Mapping[str, Any]) -> None:
        tensors = [arguments.get(x) for x in ("scatter_idx", "per_slot", "per_row", "sums")]
        self.kernel(*tensors).launch(
            grid=[cute.ceil_div(cute.size(tensors[0]), THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
        )

    @cute.kernel
    def kernel(self, scatter_idx: cute.Tensor, per_slot: cute.Tensor, per_row: cute.Tensor, sums: Any) -> None:
        thread, block = thread_block_idx()
        index = block * THREADS + thread
        if index < cute.size(scatter_idx):
            slot = (index // self.c.top_k, index % self.c.top_k)
            row = scatter_idx[slot]
            if const_expr(self.c.back):
                value = Float32(0.0)
                if row >= 0:
                    value = per_row[row, 0, 0]
                per_slot[slot] = value
            elif row >= 0:
                per_row[row, 0, 0] = per_slot[slot]
                sums[row, 0, 0] = Float32(0.0)

    set_kernel_name(kernel, "cudnn_moe_values")
