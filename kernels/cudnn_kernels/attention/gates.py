"""NSA's gated sum of three attention branches, and its gradients. Both are memory-bound.

A thread has 16 bytes of a row; adjacent threads share a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cudnn_kernels.attention.sparse import BRANCHES, GateConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.vectors import VECTOR

THREADS = 256


class Gates(Kernel):
    """The kernel for one :class:`GateConfiguration`, forward or backward."""

    def __init__(self, configuration: GateConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.gate_dtype = DTYPES[c.gates]
        self.lanes = c.width // VECTOR  # threads of a row

    def launch(self, arguments: Mapping[str, Any]) -> None:
        kernel = self.backward_kernel if self.c.gradient else self.kernel
        branches = tuple(arguments[x] for x in BRANCHES)
        branch_grads = tuple(arguments.get("d_" + x) for x in BRANCHES)
        kernel(branches, branch_grads, arguments["gates"], arguments.get("d_gates"), arguments["out"]).launch(
            grid=[cute.ceil_div(arguments["out"].shape[0] * self.lanes, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
        )

    @cute.kernel
    def kernel(self, branches: Any, branch_grads: Any, gates: cute.Tensor, d_gates: Any, out: cute.Tensor) -> None:
        """out = sum of gate_i * branch_i."""
        row, column = self.coord()
        if row < out.shape[0]:
            acc = cute.make_rmem_tensor(VECTOR, Float32)
            acc.fill(0.0)
            branch_values = [self.load(x, row, column) for x in branches]
            for i in cutlass.range_constexpr(len(BRANCHES)):
                acc.store(acc.load() + branch_values[i] * gates[row, i].to(Float32))
            vectors.store(acc.load(), out[row, None], column)

    set_kernel_name(kernel, "cudnn_nsa_gates")

    @cute.kernel
    def backward_kernel(
        self, branches: Any, branch_grads: Any, gates: cute.Tensor, d_gates: Any, out: cute.Tensor
    ) -> None:
        """d_branch_i = gate_i * d_out, d_gate_i = dot(branch_i, d_out). ``out`` is the gradient of the sum."""
        row, column = self.coord()
        exists = row < out.shape[0]
        row = cutlass.min(row, out.shape[0] - 1)  # all lanes take part in the row's shuffle reduction
        d_out = self.load(out, row, column)
        branch_values = [self.load(x, row, column) for x in branches]
        for i in cutlass.range_constexpr(len(BRANCHES)):
            dot = (branch_values[i] * d_out).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for bit in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                dot += cute.arch.shuffle_sync_bfly(dot, 1 << bit)
            if exists:
                vectors.store(d_out * gates[row, i].to(Float32), branch_grads[i][row, None], column)
                if column == 0:
                    d_gates[row, i] = dot.to(self.gate_dtype)

    set_kernel_name(backward_kernel, "cudnn_nsa_gates_backward")

    def coord(self) -> tuple[Int32, Int32]:
        """A thread's row, and the index of its 16-byte vector."""
        thread, block = thread_block_idx()
        return (block * (THREADS // self.lanes)) + thread // self.lanes, thread % self.lanes

    def load(self, tensor: cute.Tensor, row: Int32, column: Int32) -> Any:
        """16 bytes of a row, in float32."""
        return vectors.load(tensor[row, None], column).load().to(Float32)
