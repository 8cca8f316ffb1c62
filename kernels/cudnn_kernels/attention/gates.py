"""The sum of three attentions, each times its gate, and its gradients. Both are bound by memory.

A thread has 16 bytes of a row of a head; threads next to each other have a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cudnn_kernels.attention.sparse import BRANCHES, GateConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.vectors import VECTOR

THREADS = 256


class Gates(Kernel):
    """The kernel for one :class:`GateConfiguration`, forward or backward."""

    def __init__(self, configuration: GateConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.gate_dtype = DTYPES[c.gates]
        self.lanes = c.width // VECTOR  # of a row

    def launch(self, given: Mapping[str, Any]) -> None:
        kernel = self.gradients if self.c.gradient else self.kernel
        branches = tuple(given[x] for x in BRANCHES)
        changes = tuple(given.get("d_" + x) for x in BRANCHES)
        kernel(branches, changes, given["gates"], given.get("d_gates"), given["out"]).launch(
            grid=[cute.ceil_div(given["out"].shape[0] * self.lanes, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=given["stream"],
        )

    @cute.kernel
    def kernel(self, branches: Any, changes: Any, gates: cute.Tensor, d_gates: Any, out: cute.Tensor) -> None:
        """The sum."""
        row, column = self.place()
        if row < out.shape[0]:
            total = cute.make_rmem_tensor(VECTOR, Float32)
            total.fill(0.0)
            parts = [self.load(x, row, column) for x in branches]
            for i in cutlass.range_constexpr(len(BRANCHES)):
                total.store(total.load() + parts[i] * gates[row, i].to(Float32))
            vectors.store(total.load(), out[row, None], column)

    name(kernel, "cudnn_nsa_gates")

    @cute.kernel
    def gradients(self, branches: Any, changes: Any, gates: cute.Tensor, d_gates: Any, out: cute.Tensor) -> None:
        """``out`` is the gradient of the sum."""
        row, column = self.place()
        exists = row < out.shape[0]
        row = cutlass.min(row, out.shape[0] - 1)  # all lanes take part in the sums of a row
        mine = self.load(out, row, column)
        parts = [self.load(x, row, column) for x in branches]
        for i in cutlass.range_constexpr(len(BRANCHES)):
            total = (parts[i] * mine).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for step in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, 1 << step)
            if exists:
                vectors.store(mine * gates[row, i].to(Float32), changes[i][row, None], column)
                if column == 0:
                    d_gates[row, i] = total.to(self.gate_dtype)

    name(gradients, "cudnn_nsa_gates_gradient")

    def place(self) -> tuple[Int32, Int32]:
        """A thread's row, and which 16 bytes of it."""
        thread, block = here()
        return (block * (THREADS // self.lanes)) + thread // self.lanes, thread % self.lanes

    def load(self, tensor: cute.Tensor, row: Int32, column: Int32) -> Any:
        """16 bytes of a row, in float32."""
        return vectors.load(tensor[row, None], column).load().to(Float32)
