"""A number for each choice as a number for its row, and back: routers' weights and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, const_expr

from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.naming import name

THREADS = 256


class Values(Kernel):
    """The kernel for one ``ValuesConfiguration``. A thread has a choice."""

    def launch(self, given: Mapping[str, Any]) -> None:
        tensors = [given.get(x) for x in ("row_of_choice", "of_choices", "of_rows", "sums")]
        self.kernel(*tensors).launch(
            grid=[cute.ceil_div(cute.size(tensors[0]), THREADS), 1, 1], block=[THREADS, 1, 1], stream=given["stream"]
        )

    @cute.kernel
    def kernel(self, row_of_choice: cute.Tensor, of_choices: cute.Tensor, of_rows: cute.Tensor, sums: Any) -> None:
        thread, block = here()
        choice = block * THREADS + thread
        if choice < cute.size(row_of_choice):
            place = (choice // self.c.top_k, choice % self.c.top_k)
            row = row_of_choice[place]
            if const_expr(self.c.back):
                value = Float32(0.0)
                if row >= 0:
                    value = of_rows[row, 0, 0]
                of_choices[place] = value
            elif row >= 0:
                of_rows[row, 0, 0] = of_choices[place]
                sums[row, 0, 0] = Float32(0.0)

    name(kernel, "cudnn_moe_values")
