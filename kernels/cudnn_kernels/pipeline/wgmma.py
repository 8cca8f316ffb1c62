"""wgmma: instructions, fragments of operands and accumulators, and the MMAs of attention."""

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

from cudnn_kernels.pipeline.fragment import RowLayout

K, MN = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class WgmmaRows(RowLayout):
    """The rows of a wgmma accumulator: of each 64, a warp has 16 and a thread two, 8 apart; four lanes share a row."""

    lanes_per_row: int = 4
    run: int = 2
    matrices: bool = True

    def order(self, width: int, slot: int) -> Sequence[int]:
        first = 2 * (slot % 2) + width // 2 * (slot // 2)
        return [first + 4 * (position // 2) + position % 2 for position in range(width // 4)]

    def row(self, thread: Int32, slot: int) -> Int32:
        return slot // 2 * 64 + thread // 32 * 16 + thread % 32 // 4 + slot % 2 * 8

    def store(self, acc: cute.Tensor, slot: int, target: cute.Tensor, thread: Int32, factor: Any = None) -> None:
        """Stores a thread's values of a row slot to a row in memory, pair by pair, times a factor and rounded."""
        order, pair = self.order(2 * cute.size(acc), slot), cute.make_rmem_tensor(self.run, target.element_type)
        for position in range(0, len(order), self.run):
            for i in range(self.run):
                value = acc[order[position + i]]
                pair[i] = (value if factor is None else value * factor).to(target.element_type)
            cute.autovec_copy(pair, cute.local_tile(target, (self.run,), (self.column(thread, position) // self.run,)))


class MmaTF32Op(base.MmaOp):
    """wgmma for tf32, which the DSL does not provide: both operands K-major."""

    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **_: Any) -> base.MmaTraits:
        atom_type = cute_nvgpu.MmaAtomSM90Type.get(
            _pack_shape(self.shape_mnk, loc=loc, ip=ip).type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        return base.MmaTraits(base.make_atom(atom_type, [Boolean(False).ir_value(loc=loc, ip=ip)], loc=loc, ip=ip))


def mma_operation(
    a: Any,
    b: Any,
    width: int,
    a_major: OperandMajorMode,
    b_major: OperandMajorMode,
    source: Any = warpgroup.OperandSource.SMEM,
) -> Any:
    """The wgmma of 64 rows and ``width`` columns with B in shared memory and float32 accumulators."""
    if a.width == 16:
        return warpgroup.MmaF16BF16Op(a, Float32, (64, width, 16), source, a_major, b_major)
    if a.width == 8:
        return warpgroup.MmaF8Op(a, b, Float32, (64, width, 32), source, a_major, b_major)
    return MmaTF32Op(TFloat32, TFloat32, Float32, (64, width, 8), source, a_major, b_major)


def opaque(word: Int32) -> Int32:
    """An optimization barrier: the same value, opaque to the compiler."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word])


def register_operand(mma: Any, values: cute.Tensor, shape: tuple[int, int]) -> cute.Tensor:
    """Rounded accumulators as operand A of another MMA: their register layout is that of operand A.

    The values are opaque: otherwise the compiler rounds them after the fence that precedes the MMA.
    """
    words = cute.recast_tensor(values, Int32)
    fixed = cute.make_rmem_tensor(cute.size(words), Int32)
    for i in range(cute.size(words)):
        fixed[i] = opaque(words[i])
    layout = cute.make_layout(mma.partition_shape_A(shape))
    return cute.make_tensor(cute.recast_ptr(fixed.iterator, dtype=values.element_type), layout)


@dataclass(frozen=True)
class WarpgroupMma:
    """acc (+)= A B^T by one warpgroup: ``rows`` and ``columns``, 16-bit or 8-bit operands. Plain data.

    ``a`` and ``b`` are the majors of the operands. With ``registers``, A is in registers instead of shared memory.
    """

    dtype: Any
    columns: int
    rows: int = 64
    a: OperandMajorMode = K
    b: OperandMajorMode = K
    registers: bool = False

    def mma(self) -> cute.TiledMma:
        """A new tiled MMA for each use: its accumulate flag is an IR value."""
        source = warpgroup.OperandSource.RMEM if self.registers else warpgroup.OperandSource.SMEM
        return cute.make_tiled_mma(mma_operation(self.dtype, self.dtype, self.columns, self.a, self.b, source))

    def fragment_a(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """The fragment of A, (rows, k, ...), in shared memory, or registers to be filled by :meth:`load_a`."""
        mma = self.mma()
        if self.registers:
            return cute.make_rmem_tensor(mma.partition_shape_A(tensor.shape), self.dtype)
        return mma.make_fragment_A(mma.get_slice(thread).partition_A(tensor))

    def load_a(self, a: Any, tensor: cute.Tensor, thread: Int32) -> None:
        """Loads A, (rows, k), from shared memory to registers, if it is a register operand."""
        if self.registers:
            cute.autovec_copy(self.mma().get_slice(thread).partition_A(tensor), a)

    def fragment_b(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """The fragment of B, (columns, k, ...), in shared memory."""
        mma = self.mma()
        return mma.make_fragment_B(mma.get_slice(thread).partition_B(tensor))

    def accumulator(self) -> cute.Tensor:
        """A thread's accumulators."""
        return cute.make_rmem_tensor(self.mma().partition_shape_C((self.rows, self.columns)), Float32)

    def r2s(
        self, values: cute.Tensor, target: cute.Tensor, thread: Int32, transposed: bool = False, matrices: int = 4
    ) -> None:
        """Copies rounded accumulators to a tile in shared memory, (rows, columns), by stmatrix with ``matrices`` 8 x 8
        matrices, or by pairs of 8-bit values. ``transposed``: rows are contiguous there.
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
        accumulate: bool,
        k_blocks: slice = slice(None),
        between: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Issues the MMA for some of its ``k_blocks`` and commits it as a group. ``accumulate``: to what ``acc`` has.

        A warp can issue only a few wgmma before it waits for the first, so the callbacks ``between`` run interleaved
        with them.
        """
        mma, chosen, done = self.mma(), range(cute.size(a, mode=[2]))[k_blocks], 0
        if chosen.start == 0:  # later k blocks follow without register accesses in between
            warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        for issued, k in enumerate(chosen, 1):
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
            due = issued * len(between) // len(chosen)
            for work in between[done:due]:
                work()
            done = due
        warpgroup.commit_group()
