"""wgmma's instructions and what a thread holds of their result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, TFloat32
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.core import _pack_shape
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import mma as base

from cudnn_kernels.epilogue.fragment import RowLayout

K, MN = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class WgmmaRows(RowLayout):
    """Rows of accumulators: of each 64, a warp has 16 and a thread two, 8 apart; four threads share them."""

    neighbours: int = 4
    run: int = 2
    matrices: bool = True

    def order(self, width: int, slot: int) -> Sequence[int]:
        first = 2 * (slot % 2) + width // 2 * (slot // 2)
        return [first + 4 * (position // 2) + position % 2 for position in range(width // 4)]

    def row(self, thread: Int32, slot: int) -> Int32:
        return slot // 2 * 64 + thread // 32 * 16 + thread % 32 // 4 + slot % 2 * 8

    def store(self, acc: cute.Tensor, slot: int, line: cute.Tensor, thread: Int32, factor: Any = None) -> None:
        """Writes a thread's values of one of two rows to a row in memory, pair by pair: times a factor, rounded."""
        order, pair = self.order(2 * cute.size(acc), slot), cute.make_rmem_tensor(self.run, line.element_type)
        for place in range(0, len(order), self.run):
            for i in range(self.run):
                value = acc[order[place + i]]
                pair[i] = (value if factor is None else value * factor).to(line.element_type)
            cute.autovec_copy(pair, cute.local_tile(line, (self.run,), (self.column(thread, place) // self.run,)))


class MmaTF32Op(base.MmaOp):
    """The instruction for tf32, which the DSL's own list lacks: both operands K-major."""

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **_: Any) -> base.MmaTraits:
        kind = cute_nvgpu.MmaAtomSM90Type.get(
            _pack_shape(self.shape_mnk, loc=loc, ip=ip).type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        return base.MmaTraits(base.make_atom(kind, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip))


def mma_operation(
    a: Any,
    b: Any,
    width: int,
    a_major: OperandMajorMode,
    b_major: OperandMajorMode,
    source: Any = warpgroup.OperandSource.SMEM,
) -> Any:
    """The instruction for B in shared memory, 64 rows and ``width`` columns, accumulating in float32."""
    if a.width == 16:
        return warpgroup.MmaF16BF16Op(a, Float32, (64, width, 16), source, a_major, b_major)
    if a.width == 8:
        return warpgroup.MmaF8Op(a, b, Float32, (64, width, 32), source, a_major, b_major)
    return MmaTF32Op(TFloat32, TFloat32, Float32, (64, width, 8), source, a_major, b_major)


def opaque(word: Int32) -> Int32:
    """The same value, of which the compiler knows nothing."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def register_operand(mma: Any, values: cute.Tensor, shape: tuple[int, int]) -> cute.Tensor:
    """A product's rounded values as operand A of another: an accumulator's registers are an operand's, in this order.

    Opaque: else the compiler rounds after the fence before the product.
    """
    words = cute.recast_tensor(values, Int32)
    fixed = cute.make_rmem_tensor(cute.size(words), Int32)
    for i in range(cute.size(words)):
        fixed[i] = opaque(words[i])
    layout = cute.make_layout(mma.partition_shape_A(shape))
    return cute.make_tensor(cute.recast_ptr(fixed.iterator, dtype=values.element_type), layout)


@dataclass(frozen=True)
class Product:
    """A B^T of a warpgroup: of ``rows`` and ``columns``, in 16 or 8 bits, summed in float32. Plain data.

    ``a`` and ``b`` say what follows each other in memory: elements along K, or rows of A, columns of A B^T. With
    ``registers``, A is there, not in shared memory.
    """

    dtype: Any
    columns: int
    rows: int = 64
    a: OperandMajorMode = K
    b: OperandMajorMode = K
    registers: bool = False

    def mma(self) -> cute.TiledMma:
        """The instruction, one for each use: to accumulate or not is a value of its own."""
        source = warpgroup.OperandSource.RMEM if self.registers else warpgroup.OperandSource.SMEM
        return cute.make_tiled_mma(mma_operation(self.dtype, self.dtype, self.columns, self.a, self.b, source))

    def left(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """A in shared memory, (rows, k, ..), or registers for it: see :meth:`read`."""
        mma = self.mma()
        if self.registers:
            return cute.make_rmem_tensor(mma.partition_shape_A(tensor.shape), self.dtype)
        return mma.make_fragment_A(mma.get_slice(thread).partition_A(tensor))

    def read(self, a: Any, tensor: cute.Tensor, thread: Int32) -> None:
        """Copies A from shared memory, (rows, k), where it is an operand from registers."""
        if self.registers:
            cute.autovec_copy(self.mma().get_slice(thread).partition_A(tensor), a)

    def right(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """B, (columns, k, ..)."""
        mma = self.mma()
        return mma.make_fragment_B(mma.get_slice(thread).partition_B(tensor))

    def accumulator(self) -> cute.Tensor:
        """A thread's sums."""
        return cute.make_rmem_tensor(self.mma().partition_shape_C((self.rows, self.columns)), Float32)

    def put(
        self, values: cute.Tensor, target: cute.Tensor, thread: Int32, transposed: bool = False, matrices: int = 4
    ) -> None:
        """Writes rounded sums to a tile in shared memory, (rows, columns): so many ``matrices`` of 8 x 8 at once, or
        pairs of 8 bits. ``transposed``: rows follow each other there.
        """
        dtype = values.element_type
        pairs = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=16)
        atom = pairs if dtype.width == 8 else cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, matrices), dtype)
        copy = cute.make_tiled_copy_C(atom, self.mma()).get_slice(thread)
        cute.copy(atom, copy.retile(values), copy.partition_D(target))

    def issue(
        self,
        acc: cute.Tensor,
        a: Any,
        b: Any,
        adds: bool,
        part: slice = slice(None),
        between: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Issues the product, or its addition to ``acc``, or a ``part`` of its instructions, as a group of its own.

        A warp can issue but few instructions before it waits for the first. So it does what work there is ``between``
        them, spread evenly.
        """
        mma, chosen, done = self.mma(), range(cute.size(a, mode=[2]))[part], 0
        if chosen.start == 0:  # later parts follow the first one without any work on their registers
            warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, adds)
        for number, k in enumerate(chosen, 1):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            due = number * len(between) // len(chosen)
            for work in between[done:due]:
                work()
            done = due
        warpgroup.commit_group()
