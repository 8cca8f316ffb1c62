"""Prepares operands that the tensor cores, or TMA, cannot read, in one pass over memory: dequantizes them to bfloat16,
or transposes them. Hopper's GEMM prepares all such operands so, Blackwell's the ragged ones.

Dequantization: target[i, j, l] = bfloat16(source[i, j, l] * scale[i, j // vector, l]), for fp8 in both majors and for
fp4. The result has at most six significant bits, so it is exact unless its exponent leaves bfloat16's range: beyond
2^128 it becomes infinite, below 2^-126 it is rounded to a multiple of 2^-133. NaN results from a NaN in either.
Widening is the same without scale factors, and exact: the tensor cores can read fp8, but accumulate it with fewer bits.

Transposition: target = source, MN-major to K-major, for types of 1, 2 and 4 bytes.

Both are memory-bound: every thread has several loads in flight, and warps access whole cache lines. One kernel prepares
all operands of a GEMM, since a second launch would take longer than small operands need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.memory import SmemAllocator

from cudnn_kernels.configuration import ROW, GemmConfiguration, pitch
from cudnn_kernels.configuration import OperandConfiguration as Configuration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.tma import address_space_view, ptr_array_coord, ptr_array_view
from cudnn_kernels.pipeline.workspace import workspace_pointers
from cudnn_kernels.problem import Operand
from cudnn_kernels.signature import bind, sizes_of
from cudnn_kernels.threads import WARP_SIZE

THREADS = 256
WARPS = THREADS // WARP_SIZE
VECTOR = 8  # values that a thread dequantizes at a time: 16 bytes of the result
VECTORS = 16  # per thread
ROWS, ATOM = 128, 512  # rows of an atom, which has 4 scale factors for each, and its bytes
ROW_WORDS = 32  # words of a row in shared memory: one per bank


class PrepareOperand:
    """The kernel for one :class:`Configuration`, or for several operands, each a row of the grid."""

    def __init__(self, *configurations: Configuration) -> None:
        self.steps = [Preparation(c) for c in configurations]

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """Takes the arguments that the signature of one configuration lists: ``source``, ``scales``, ``target`` and
        others.

        All strides but those of 1 are multiples of 16 bytes. If a contiguous extent is not, the padding up to the next
        multiple is read from the source and overwritten in the target.
        """
        self.launch([bind(self.steps[0].c.slots(), arguments)])

    def launch(self, per_operand: Sequence[Mapping[str, Any]]) -> None:
        """Launches the kernel on each operand's arguments by name."""
        parameters = [step.arguments(arguments) for step, arguments in zip(self.steps, per_operand, strict=True)]
        ctas = [
            cutlass.min(params[-1], arguments["num_sms"] * step.c.resident)
            for step, params, arguments in zip(self.steps, parameters, per_operand, strict=True)
        ]
        width = ctas[0]
        for count in ctas[1:]:
            width = cutlass.max(width, count)
        self.kernel(parameters).launch(
            grid=[width, len(parameters), 1], block=[THREADS, 1, 1], stream=per_operand[0]["stream"]
        )

    @cute.kernel
    def kernel(self, parameters: list) -> None:
        """The CTAs of a grid row iterate over the tiles of its operand."""
        _, row, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(len(self.steps)):
            if row == i:
                self.steps[i].run(*parameters[i])

    set_kernel_name(kernel, "cudnn_prepare_operand_sm90")


class Preparation:
    """The preparation of one operand."""

    def __init__(self, configuration: Configuration) -> None:
        c = self.c = configuration
        self.k_major = c.source.major == "k"
        self.bits = c.source.bits
        self.scaled = c.source.scale is not None
        self.depth = (
            4 * c.source.scale.vector if c.source.scale else 0
        )  # elements along k whose scale factors are in one atom
        # Values of a tile along the source's contiguous dimension and across it.
        self.to_bfloat16 = self.scaled or c.widen
        self.tile = (WARP_SIZE * VECTOR, WARPS * VECTORS) if self.to_bfloat16 else (ROWS, ROW_WORDS * 32 // self.bits)

        self.run = self.dequantize if self.to_bfloat16 else self.transpose

    def arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: the parameters of :attr:`run`; the last one is the number of tiles."""
        source, scale, target = arguments["source"], arguments.get("scales"), arguments["target"]
        pointers, scale_pointers = None, None
        if self.c.source.pointers:
            pointers, scale_pointers, packed = source, scale, self.c.source.packed
            element = Uint8 if packed > 1 else DTYPES[self.c.source.dtype]
            source = ptr_array_view(element, target.shape[0], target.shape[1] // packed, self.k_major, pointers)
            scale = self.scales_ptr_array(target.shape, scale) if self.scaled else None
        scales = (scale, scale_pointers, arguments.get("offsets")) if self.to_bfloat16 else ()
        along, across = self.directions((target.shape[0], target.shape[1]))
        tiles = (cute.ceil_div(along, self.tile[0]), cute.ceil_div(across, self.tile[1]))
        total = tiles[0] * tiles[1] * target.shape[2]
        divisors = tuple(cute.fast_divmod_create_divisor_v2(size) for size in tiles)
        return (source, pointers, *scales, target, divisors, total)

    def scales_ptr_array(self, shape: Any, pointers: cute.Tensor) -> cute.Tensor:
        """The scale factors of a ptr-array of operands of a shape (mn, k, l)."""
        rows, blocks = cute.ceil_div(shape[0], ROWS), cute.ceil_div(shape[1], self.depth)
        strides = (16, 4, cute.assume(Int64(blocks) * ATOM, ATOM), 1, ATOM)
        return address_space_view(DTYPES[self.c.source.scale.dtype], (32, 4, rows, 4, blocks), strides, pointers)

    def directions(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """(mn, k) as (along, across) the source's contiguous dimension, and back."""
        return pair[::-1] if self.k_major else pair

    def offset(self, tensor: cute.Tensor, along: Any, across: Any, batch: Any) -> Any:
        """The offset of a value of the source or target, in the tensor's elements."""
        mn, k = self.directions((along, across))
        if self.bits == 4 and tensor.element_type.width == 8:
            k = k // 2  # packed fp4
        return cute.crd2idx((mn, k, batch), tensor.layout)

    @cute.jit
    def dequantize(
        self,
        source: cute.Tensor,
        pointers: cute.Tensor | None,
        scale: cute.Tensor | None,
        scale_pointers: cute.Tensor | None,
        offsets: cute.Tensor | None,
        target: cute.Tensor,
        divisors: Any,
        total: Int32,
    ) -> None:
        """A warp's 32 lanes lie along the contiguous dimension, a thread's vectors and the other warps across it."""
        thread, cta = thread_block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        length, width = self.directions((target.shape[0], target.shape[1]))
        for index in cutlass.range(cta, total, ctas, unroll=1):
            row, column, batch = _tile_coord(index, divisors)
            along = column * self.tile[0] + thread % WARP_SIZE * VECTOR
            across = row * self.tile[1] + thread // WARP_SIZE
            if along < length:
                raw = cute.make_rmem_tensor((VECTOR * self.bits // 32, VECTORS), Uint32)
                line = cutlass.min(across, width - 1)
                if const_expr(self.c.source.ragged):
                    offset_of, step = self.group_offset(offsets, along, line, width)
                else:
                    offset_of = self.offset(source, along, line, ptr_array_coord(pointers, batch))
                    step = self.directions(source.stride[:2])[1] * WARPS
                for i in cutlass.range_constexpr(VECTORS):
                    raw[None, i].store(_words(source, offset_of, VECTOR * self.bits // 32).load())
                    # Beyond the end, the last vector is loaded again and not stored: no branch separates the loads.
                    offset_of = cutlass.select_(across + (i + 1) * WARPS < width, offset_of + step, offset_of)
                atom = self.atom(scale, scale_pointers, offsets, along, across, batch, target.shape[0])
                scales = self.scales(scale, atom, along, across) if const_expr(self.scaled) else lambda vector: 1.0
                offset_of = self.offset(target, along, across, batch)
                step = self.directions(target.stride[:2])[1] * WARPS
                for i in cutlass.range_constexpr(VECTORS):
                    rounded = cute.make_rmem_tensor((VECTOR,), BFloat16)
                    rounded.store((self.values(raw[None, i]).load() * scales(i)).to(BFloat16))
                    if across + i * WARPS < width:
                        _words(target, offset_of, 4).store(cute.recast_tensor(rounded, Uint32).load())
                    offset_of += step

    def group_offset(self, offsets: cute.Tensor, k: Int32, row: Int32, rows: Any) -> tuple[Int64, Int64]:
        """The offset of a value of a ragged source, in the tensor's elements, and the stride of a thread's rows."""
        start, end = group_of(offsets, k)
        pitch, packed = Int64(end - start), self.c.source.packed
        return (Int64(start) * rows + pitch * row + (k - start)) // packed, pitch // packed * WARPS

    def values(self, raw: cute.Tensor) -> cute.Tensor:
        """A vector as float32."""
        values = cute.make_rmem_tensor((VECTOR,), Float32)
        if self.bits >= 8:
            values.store(cute.recast_tensor(raw, DTYPES[self.c.source.dtype]).load().to(Float32))
        else:
            # The three bits below the sign, put where float16 has its lowest exponent bits and its highest one of the
            # mantissa, are the value times 2^-14, subnormal or not. Nibbles i and i + 4 share a word.
            nibbles = cute.make_rmem_tensor((VECTOR // 2,), Uint32)
            for i in range(VECTOR // 2):
                word = raw[0] >> (4 * i)
                nibbles[i] = ((word << 12) & Uint32(0x80008000)) | ((word << 9) & Uint32(0x0E000E00))
            wide = (cute.recast_tensor(nibbles, Float16).load() * Float16(2.0**14)).to(Float32)
            for i in range(VECTOR):
                values[i] = wide[2 * (i % 4) + i // 4]
        return values

    def atom(
        self, scale: Any, pointers: Any, offsets: Any, along: Int32, across: Int32, batch: Int32, mn: Int32
    ) -> Any:
        """The offset of the atom with a value's scale factor, if the operand is scaled."""
        if not self.scaled:
            return None
        row, k = self.directions((along, across))
        row, k = row // ROWS, k // self.depth
        if offsets is None:
            return cute.crd2idx((0, 0, row, 0, k, ptr_array_coord(pointers, batch)), scale.layout)
        start, end = group_of(offsets, k * self.depth)
        first, count = start // self.depth, cute.ceil_div(end - start, self.depth)
        return ATOM * (cute.ceil_div(mn, ROWS) * first + row * count + k - first)

    def scales(self, scale: cute.Tensor, atom: Any, along: Int32, across: Int32) -> Any:
        """Loads this thread's scale factors. Returns a function from a vector to its scale factor, or to one per value.

        A word of an atom has a row's four scales, 16 bytes have the words of rows r, r + 32, r + 64 and r + 96.
        """
        if self.k_major:
            # A warp w's vectors are in rows w + 8 i, so one load serves every fourth vector. One byte of a word is
            # used.
            block = along // self.c.source.scale.vector
            words = cute.make_rmem_tensor((4, VECTORS // 4), Uint32)
            for i in range(VECTORS // 4):
                words[None, i].store(_words(scale, atom + (across % 32 + WARPS * i) * 16, 4).load())
            scales = self.decode([words[i] for i in range(VECTORS)], block % 4 * 8)
            return lambda vector: scales[vector // 4 + vector % 4 * 4]
        # Each value is in another row, vectors along k: four in each of the four blocks of an atom.
        words = cute.make_rmem_tensor((VECTOR,), Uint32)
        for i in range(VECTOR):
            words[i] = _words(scale, atom + (along % 32 + i) * 16 + along // 32 % 4 * 4, 1)[0]
        blocks = [self.decode([words[i] for i in range(VECTOR)], 8 * j).load() for j in range(4)]
        return lambda vector: blocks[vector // 4]

    def decode(self, words: list[Any], shift: Any) -> cute.Tensor:
        """The scale factors in the bytes of words from bit ``shift`` on, as float32."""
        scales = cute.make_rmem_tensor((len(words),), Float32)
        if DTYPES[self.c.source.scale.dtype] is cutlass.Float8E4M3FN:
            codes = cute.make_rmem_tensor((len(words),), Uint8)
            for i, word in enumerate(words):
                codes[i] = Uint8((word >> shift) & 0xFF)
            scales.store(cute.recast_tensor(codes, cutlass.Float8E4M3FN).load().to(Float32))
        else:
            # The exponent; the mantissa's highest bit makes 2^-127 of 0 and NaN of 255.
            bits = cute.recast_tensor(scales, Uint32)
            for i, word in enumerate(words):
                code = (word >> shift) & 0xFF
                special = code - Uint32(1) >= Uint32(254)  # wraps around for 0
                bits[i] = (code << 23) | (Uint32(special) << 22)
        return scales

    @cute.jit
    def transpose(
        self, source: cute.Tensor, pointers: cute.Tensor | None, target: cute.Tensor, divisors: Any, total: Int32
    ) -> None:
        """A thread transposes within words, the CTA transposes words through shared memory.

        Shared memory has rows of 128 bytes along k, in eight chunks. The rows that a thread writes are congruent modulo
        eight, counted in chunks of the source; a chunk's position is its index xor that number. The lanes of a warp
        then access different banks, both when they write words and when they read chunks.
        """
        size = self.bits // 8
        per_word, chunk = 4 // size, 16 // size  # values
        thread, cta = thread_block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        mn, k = target.shape[0], target.shape[1]
        eighth, line = thread % 8, thread // 8
        last_chunk = (mn - 1) // chunk * chunk
        shared = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(ROWS * ROW_WORDS), byte_alignment=128)
        write = eighth * chunk * ROW_WORDS + ((line // 4) ^ eighth) * 4 + line % 4

        for index in cutlass.range(cta, total, ctas, unroll=1):
            row, column, batch = _tile_coord(index, divisors)
            first_mn, first_k = column * self.tile[0], row * self.tile[1]
            raw = cute.make_rmem_tensor((4, per_word, size), Uint32)
            for vec in cutlass.range_constexpr(size):
                for i in cutlass.range_constexpr(per_word):
                    near_mn = cutlass.min(first_mn + (vec * 8 + eighth) * chunk, last_chunk)
                    near_k = cutlass.min(first_k + line * per_word + i, k - 1)
                    offset_of = self.offset(source, near_mn, near_k, ptr_array_coord(pointers, batch))
                    raw[None, i, vec].store(_words(source, offset_of, 4).load())
            for vec in cutlass.range_constexpr(size):
                for j in cutlass.range_constexpr(4):
                    words = _transposed([raw[j, i, vec] for i in range(per_word)])
                    for i in cutlass.range_constexpr(per_word):
                        shared[write + (vec * 8 * chunk + j * per_word + i) * ROW_WORDS] = words[i]
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(ROWS // (THREADS // 8)):
                row_mn = line + i * (THREADS // 8)
                offset_of = row_mn * ROW_WORDS + (eighth ^ (row_mn // chunk % 8)) * 4
                words = cute.make_tensor((shared.iterator + cute.assume(offset_of, 4)).align(16), cute.make_layout(4))
                to_mn, to_k = first_mn + row_mn, first_k + eighth * chunk
                if to_mn < mn and to_k < k:
                    _words(target, self.offset(target, to_mn, to_k, batch), 4).store(words.load())
            cute.arch.sync_threads()  # the next tile overwrites shared memory


def prepare(c: GemmConfiguration, call_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Launches the preparation of a GEMM's operands. Returns the GEMM's arguments, with the prepared operands and the
    other regions of the workspace by name.
    """
    slots = c.slots()
    sizes, arguments, per_operand = (
        sizes_of(slots, call_arguments, Int64),
        {**call_arguments, **workspace_pointers(slots, call_arguments, c.regions)},
        [],
    )
    for name, step in c.prepared:
        form = f"{name}_ptrs" if step.source.pointers else name
        offsets = call_arguments[c.schedule.offsets] if step.varlen_k else None
        target = arguments[name] = in_workspace(getattr(c, name), *c.operand_sizes[name], sizes, arguments[name])
        operand_arguments = {
            "source": call_arguments[form],
            "scales": call_arguments.get(f"sf{form}"),
            "offsets": offsets,
            "target": target,
        }
        per_operand.append({**call_arguments, **operand_arguments})
    PrepareOperand(*(step for _, step in c.prepared)).launch(per_operand)
    return arguments


def in_workspace(operand: Operand, rows: str, batch: str, sizes: Mapping[str, Int64], start: Any) -> cute.Tensor:
    """A prepared operand in the workspace; ``rows`` and ``batch`` are its sizes by name."""
    element, mn, k = DTYPES[operand.dtype], sizes[rows], sizes["k"]
    row_stride = cute.assume(pitch(operand, mn, k), ROW * 8 // operand.bits)
    k_major = operand.major == "k"
    batch_stride = row_stride * (mn if k_major else k)
    stride = (row_stride, 1, batch_stride) if k_major else (1, row_stride, batch_stride)
    first = cute.recast_ptr(start, dtype=element)
    return cute.make_tensor(first, cute.make_layout((Int32(mn), Int32(k), Int32(sizes[batch])), stride=stride))


@cute.jit
def group_of(offsets: cute.Tensor, k: Int32) -> tuple[Int32, Int32]:
    """The begin and end of the group that has k, by binary search; beyond the last group both are its end."""
    low, high = Int32(0), Int32(offsets.shape[0])
    while low < high:  # the first group that ends beyond k is in [low, high]
        middle = (low + high) // 2
        if offsets[middle] <= k:
            low = middle + 1
        else:
            high = middle
    start, end = Int32(0), Int32(0)
    if low > 0:
        start = offsets[low - 1]
        end = start
    if low < offsets.shape[0]:
        end = offsets[low]
    return start, end


def _words(tensor: cute.Tensor, offset: Any, count: int) -> cute.Tensor:
    """``count`` 32-bit words from an element on, which is aligned to them."""
    pointer = (tensor.iterator + offset).align(4 * count)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(count))


def _tile_coord(index: Int32, divisors: tuple[Any, Any]) -> tuple[Int32, Int32, Int32]:
    """A tile's row, column and batch from its index."""
    rest, column = divmod(index, divisors[0])
    batch, row = divmod(rest, divisors[1])
    return row, column, batch


def _transposed(words: list[Any]) -> list[Any]:
    """Transposes 4 x 4 bytes in four words, 2 x 2 halfwords in two, or one word."""
    if len(words) == 4:
        ab, cd = (
            [cute.arch.prmt(*pair, selector) for selector in (0x5140, 0x7362)] for pair in (words[:2], words[2:])
        )  # a0 b0 a1 b1, a2 b2 a3 b3
        return _transposed([ab[0], cd[0]]) + _transposed([ab[1], cd[1]])
    if len(words) == 2:
        return [Uint32(cute.arch.prmt(*words, selector)) for selector in (0x5410, 0x7632)]
    return words
