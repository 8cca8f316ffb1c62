"""Operands that the tensor cores, or the copy engine, cannot read, written anew in one pass over memory: as bfloat16,
or transposed. Hopper's GEMM prepares all such operands so, Blackwell's ragged ones.

Dequantisation: target[i, j, l] = bfloat16(source[i, j, l] * scale[i, j // vector, l]), for fp8 in both majors and for
fp4. The product has at most six significant bits, so it is exact unless its exponent leaves bfloat16's range: beyond
2^128 it becomes infinite, below 2^-126 it is rounded to a multiple of 2^-133. NaN comes of a NaN in either. Widening is
the same without factors, and exact: the tensor cores can read fp8, but add up its products with fewer bits.

Transposition: target = source, MN-major to K-major, for types of 1, 2 and 4 bytes.

Both are bound by memory: every thread has several loads in flight, warps read and write whole lines. One kernel does
all operands of a product: to launch another one would take longer than small ones need.
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
from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.copy import address, everywhere, matrices
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.problem import Operand
from cudnn_kernels.signature import bind, sizes_of

THREADS = 256
WARP = 32
WARPS = THREADS // WARP
PIECE = 8  # values that a thread dequantises together: 16 bytes of the result
PIECES = 16  # of a thread
ROWS, ATOM = 128, 512  # rows of an atom of scales, which has 4 scales for each, and its bytes
LINE = 32  # words of a row in shared memory: all banks


class PrepareOperand:
    """The kernel for one :class:`Configuration`, or for those of several operands, a row of the grid each."""

    def __init__(self, *configurations: Configuration) -> None:
        self.steps = [Preparation(c) for c in configurations]

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the signature of one configuration lists: ``source``, ``scales``, ``target`` and others.

        All strides but those of 1 are multiples of 16 bytes. Where a contiguous extent is none, what lies between it
        and the next multiple is read from the source and overwritten in the target.
        """
        self.launch([bind(self.steps[0].c.slots(), arguments)])

    def launch(self, each: Sequence[Mapping[str, Any]]) -> None:
        """Launches the kernel on each operand's arguments by name."""
        given = [step.arguments(arguments) for step, arguments in zip(self.steps, each, strict=True)]
        ctas = [
            cutlass.min(parameters[-1], arguments["multiprocessors"] * step.c.resident)
            for step, parameters, arguments in zip(self.steps, given, each, strict=True)
        ]
        width = ctas[0]
        for count in ctas[1:]:
            width = cutlass.max(width, count)
        self.kernel(given).launch(grid=[width, len(given), 1], block=[THREADS, 1, 1], stream=each[0]["stream"])

    @cute.kernel
    def kernel(self, given: list) -> None:
        """CTAs of a row take its operand's tiles in turn."""
        _, row, _ = cute.arch.block_idx()
        for i in cutlass.range_constexpr(len(self.steps)):
            if row == i:
                self.steps[i].run(*given[i])

    name(kernel, "cudnn_prepare_operand_sm90")


class Preparation:
    """How an operand is prepared."""

    def __init__(self, configuration: Configuration) -> None:
        c = self.c = configuration
        self.k_major = c.source.major == "k"
        self.bits = c.source.bits
        self.scaled = c.source.scale is not None
        self.depth = 4 * c.source.scale.vector if c.source.scale else 0  # values along k of an atom of scales
        # Values of a tile along the source's contiguous dimension and across it.
        self.to_bfloat16 = self.scaled or c.widen
        self.tile = (WARP * PIECE, WARPS * PIECES) if self.to_bfloat16 else (ROWS, LINE * 32 // self.bits)

        self.run = self.dequantise if self.to_bfloat16 else self.transpose

    def arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: what :attr:`run` takes, the number of tiles last."""
        source, scale, target = arguments["source"], arguments.get("scales"), arguments["target"]
        pointers, scale_pointers = None, None
        if self.c.source.pointers:
            pointers, scale_pointers, packed = source, scale, self.c.source.packed
            element = Uint8 if packed > 1 else DTYPES[self.c.source.dtype]
            source = matrices(element, target.shape[0], target.shape[1] // packed, self.k_major, pointers)
            scale = self.scales_anywhere(target.shape, scale) if self.scaled else None
        scales = (scale, scale_pointers, arguments.get("offsets")) if self.to_bfloat16 else ()
        along, across = self.directions((target.shape[0], target.shape[1]))
        tiles = (cute.ceil_div(along, self.tile[0]), cute.ceil_div(across, self.tile[1]))
        total = tiles[0] * tiles[1] * target.shape[2]
        divisors = tuple(cute.fast_divmod_create_divisor_v2(size) for size in tiles)
        return (source, pointers, *scales, target, divisors, total)

    def scales_anywhere(self, shape: Any, pointers: cute.Tensor) -> cute.Tensor:
        """The scales of operands of a shape (mn, k, l) at any addresses."""
        rows, blocks = cute.ceil_div(shape[0], ROWS), cute.ceil_div(shape[1], self.depth)
        strides = (16, 4, cute.assume(Int64(blocks) * ATOM, ATOM), 1, ATOM)
        return everywhere(DTYPES[self.c.source.scale.dtype], (32, 4, rows, 4, blocks), strides, pointers)

    def directions(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """(mn, k) as (along, across) the source's contiguous dimension, or the other way round."""
        return pair[::-1] if self.k_major else pair

    def offset(self, tensor: cute.Tensor, along: Any, across: Any, batch: Any) -> Any:
        """Where a value of the source or target lies, in the tensor's elements."""
        mn, k = self.directions((along, across))
        if self.bits == 4 and tensor.element_type.width == 8:
            k = k // 2  # packed fp4
        return cute.crd2idx((mn, k, batch), tensor.layout)

    @cute.jit
    def dequantise(
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
        """A warp's 32 lanes are along the contiguous dimension, its pieces and the other warps' across it."""
        thread, cta = here()
        ctas, _, _ = cute.arch.grid_dim()
        length, width = self.directions((target.shape[0], target.shape[1]))
        for index in cutlass.range(cta, total, ctas, unroll=1):
            row, column, batch = _place(index, divisors)
            along = column * self.tile[0] + thread % WARP * PIECE
            across = row * self.tile[1] + thread // WARP
            if along < length:
                raw = cute.make_rmem_tensor((PIECE * self.bits // 32, PIECES), Uint32)
                line = cutlass.min(across, width - 1)
                if const_expr(self.c.source.ragged):
                    place, step = self.part_at(offsets, along, line, width)
                else:
                    place = self.offset(source, along, line, address(pointers, batch))
                    step = self.directions(source.stride[:2])[1] * WARPS
                for i in cutlass.range_constexpr(PIECES):
                    raw[None, i].store(_words(source, place, PIECE * self.bits // 32).load())
                    # Past the end the last piece is read again, and not written: no branch parts the loads.
                    place = cutlass.select_(across + (i + 1) * WARPS < width, place + step, place)
                atom = self.atom(scale, scale_pointers, offsets, along, across, batch, target.shape[0])
                scales = self.scales(scale, atom, along, across) if const_expr(self.scaled) else lambda piece: 1.0
                place = self.offset(target, along, across, batch)
                step = self.directions(target.stride[:2])[1] * WARPS
                for i in cutlass.range_constexpr(PIECES):
                    rounded = cute.make_rmem_tensor((PIECE,), BFloat16)
                    rounded.store((self.values(raw[None, i]).load() * scales(i)).to(BFloat16))
                    if across + i * WARPS < width:
                        _words(target, place, 4).store(cute.recast_tensor(rounded, Uint32).load())
                    place += step

    def part_at(self, offsets: cute.Tensor, k: Int32, row: Int32, rows: Any) -> tuple[Int64, Int64]:
        """Where a value of a ragged source lies, in the tensor's elements, and the distance of a thread's rows."""
        start, end = part_of(offsets, k)
        pitch, packed = Int64(end - start), self.c.source.packed
        return (Int64(start) * rows + pitch * row + (k - start)) // packed, pitch // packed * WARPS

    def values(self, raw: cute.Tensor) -> cute.Tensor:
        """A piece as float32."""
        values = cute.make_rmem_tensor((PIECE,), Float32)
        if self.bits >= 8:
            values.store(cute.recast_tensor(raw, DTYPES[self.c.source.dtype]).load().to(Float32))
        else:
            # The three bits below the sign, put where float16 has its lowest exponent bits and its highest one of the
            # mantissa, are the value times 2^-14, subnormal or not. Nibbles i and i + 4 share a word.
            halves = cute.make_rmem_tensor((PIECE // 2,), Uint32)
            for i in range(PIECE // 2):
                word = raw[0] >> (4 * i)
                halves[i] = ((word << 12) & Uint32(0x80008000)) | ((word << 9) & Uint32(0x0E000E00))
            wide = (cute.recast_tensor(halves, Float16).load() * Float16(2.0**14)).to(Float32)
            for i in range(PIECE):
                values[i] = wide[2 * (i % 4) + i // 4]
        return values

    def atom(
        self, scale: Any, pointers: Any, offsets: Any, along: Int32, across: Int32, batch: Int32, mn: Int32
    ) -> Any:
        """Where the atom begins that has a value's scale, if there are some."""
        if not self.scaled:
            return None
        row, k = self.directions((along, across))
        row, k = row // ROWS, k // self.depth
        if offsets is None:
            return cute.crd2idx((0, 0, row, 0, k, address(pointers, batch)), scale.layout)
        start, end = part_of(offsets, k * self.depth)
        first, count = start // self.depth, cute.ceil_div(end - start, self.depth)
        return ATOM * (cute.ceil_div(mn, ROWS) * first + row * count + k - first)

    def scales(self, scale: cute.Tensor, atom: Any, along: Int32, across: Int32) -> Any:
        """Loads this thread's scales. Gives a function from a piece to its scale, or to one for each value.

        A word of an atom has a row's four scales, 16 bytes have the words of rows r, r + 32, r + 64 and r + 96.
        """
        if self.k_major:
            # Pieces are in rows w + 8 i for warp w, so a load serves every fourth. One scale of a word matters.
            block = along // self.c.source.scale.vector
            words = cute.make_rmem_tensor((4, PIECES // 4), Uint32)
            for i in range(PIECES // 4):
                words[None, i].store(_words(scale, atom + (across % 32 + WARPS * i) * 16, 4).load())
            factors = self.decode([words[i] for i in range(PIECES)], block % 4 * 8)
            return lambda piece: factors[piece // 4 + piece % 4 * 4]
        # Values are in rows of their own, pieces along k: four in each of the four blocks of an atom.
        words = cute.make_rmem_tensor((PIECE,), Uint32)
        for i in range(PIECE):
            words[i] = _words(scale, atom + (along % 32 + i) * 16 + along // 32 % 4 * 4, 1)[0]
        blocks = [self.decode([words[i] for i in range(PIECE)], 8 * j).load() for j in range(4)]
        return lambda piece: blocks[piece // 4]

    def decode(self, words: list[Any], shift: Any) -> cute.Tensor:
        """The scales in the words' bytes from bit ``shift`` on, as float32."""
        factors = cute.make_rmem_tensor((len(words),), Float32)
        if DTYPES[self.c.source.scale.dtype] is cutlass.Float8E4M3FN:
            codes = cute.make_rmem_tensor((len(words),), Uint8)
            for i, word in enumerate(words):
                codes[i] = Uint8((word >> shift) & 0xFF)
            factors.store(cute.recast_tensor(codes, cutlass.Float8E4M3FN).load().to(Float32))
        else:
            # The exponent; the mantissa's highest bit makes 2^-127 of 0 and NaN of 255.
            bits = cute.recast_tensor(factors, Uint32)
            for i, word in enumerate(words):
                code = (word >> shift) & 0xFF
                special = code - Uint32(1) >= Uint32(254)  # wraps around for 0
                bits[i] = (code << 23) | (Uint32(special) << 22)
        return factors

    @cute.jit
    def transpose(
        self, source: cute.Tensor, pointers: cute.Tensor | None, target: cute.Tensor, divisors: Any, total: Int32
    ) -> None:
        """A thread transposes within words, the CTA transposes words through shared memory.

        There a row is 128 bytes along k, in eight chunks. The rows that a thread writes have one number modulo eight,
        if counted in chunks of the source; a chunk's place is its number xor that one. The threads of a warp then meet
        different banks, both when they write words and when they read chunks.
        """
        size = self.bits // 8
        per_word, chunk = 4 // size, 16 // size  # values
        thread, cta = here()
        ctas, _, _ = cute.arch.grid_dim()
        mn, k = target.shape[0], target.shape[1]
        eighth, line = thread % 8, thread // 8
        last_chunk = (mn - 1) // chunk * chunk
        shared = SmemAllocator().allocate_tensor(Uint32, cute.make_layout(ROWS * LINE), byte_alignment=128)
        write = eighth * chunk * LINE + ((line // 4) ^ eighth) * 4 + line % 4

        for index in cutlass.range(cta, total, ctas, unroll=1):
            row, column, batch = _place(index, divisors)
            first_mn, first_k = column * self.tile[0], row * self.tile[1]
            raw = cute.make_rmem_tensor((4, per_word, size), Uint32)
            for part in cutlass.range_constexpr(size):
                for i in cutlass.range_constexpr(per_word):
                    near_mn = cutlass.min(first_mn + (part * 8 + eighth) * chunk, last_chunk)
                    near_k = cutlass.min(first_k + line * per_word + i, k - 1)
                    place = self.offset(source, near_mn, near_k, address(pointers, batch))
                    raw[None, i, part].store(_words(source, place, 4).load())
            for part in cutlass.range_constexpr(size):
                for j in cutlass.range_constexpr(4):
                    words = _transposed([raw[j, i, part] for i in range(per_word)])
                    for i in cutlass.range_constexpr(per_word):
                        shared[write + (part * 8 * chunk + j * per_word + i) * LINE] = words[i]
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(ROWS // (THREADS // 8)):
                row_mn = line + i * (THREADS // 8)
                place = row_mn * LINE + (eighth ^ (row_mn // chunk % 8)) * 4
                words = cute.make_tensor((shared.iterator + cute.assume(place, 4)).align(16), cute.make_layout(4))
                to_mn, to_k = first_mn + row_mn, first_k + eighth * chunk
                if to_mn < mn and to_k < k:
                    _words(target, self.offset(target, to_mn, to_k, batch), 4).store(words.load())
            cute.arch.sync_threads()  # all have read what the next tile overwrites


def prepare(c: GemmConfiguration, given: Mapping[str, Any]) -> dict[str, Any]:
    """Launches the kernel for a GEMM's operands that are prepared. The GEMM's arguments, with these and the workspace's
    other regions by name.
    """
    slots = c.slots()
    sizes, ready, each = sizes_of(slots, given, Int64), {**given, **divided(slots, given, c.regions)}, []
    for side, step in c.prepared:
        form = f"{side}_ptrs" if step.source.pointers else side
        offsets = given[c.schedule.offsets] if step.splits_k else None
        target = ready[side] = in_workspace(getattr(c, side), *c.operand_sizes[side], sizes, ready[side])
        mine = {"source": given[form], "scales": given.get(f"sf{form}"), "offsets": offsets, "target": target}
        each.append({**given, **mine})
    PrepareOperand(*(step for _, step in c.prepared)).launch(each)
    return ready


def in_workspace(operand: Operand, rows: str, batch: str, sizes: Mapping[str, Int64], start: Any) -> cute.Tensor:
    """A prepared operand at its place in the workspace; ``rows`` and ``batch`` are its sizes by name."""
    element, mn, k = DTYPES[operand.dtype], sizes[rows], sizes["k"]
    apart = cute.assume(pitch(operand, mn, k), ROW * 8 // operand.bits)
    k_major = operand.major == "k"
    far = apart * (mn if k_major else k)
    stride = (apart, 1, far) if k_major else (1, apart, far)
    first = cute.recast_ptr(start, dtype=element)
    return cute.make_tensor(first, cute.make_layout((Int32(mn), Int32(k), Int32(sizes[batch])), stride=stride))


@cute.jit
def part_of(offsets: cute.Tensor, k: Int32) -> tuple[Int32, Int32]:
    """Where the part that k belongs to begins and ends; what is beyond the last part has no end."""
    low, high = Int32(0), Int32(offsets.shape[0])
    while low < high:  # the first part that ends beyond k is one of those from low to high
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
    """``count`` words of 32 bits from an element on, which is aligned to as many."""
    pointer = (tensor.iterator + offset).align(4 * count)
    return cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(count))


def _place(index: Int32, divisors: tuple[Any, Any]) -> tuple[Int32, Int32, Int32]:
    """A tile's row, column and batch by its number."""
    rest, column = divmod(index, divisors[0])
    batch, row = divmod(rest, divisors[1])
    return row, column, batch


def _transposed(words: list[Any]) -> list[Any]:
    """The transpose of four words of four bytes, of two of two halves, of one of one."""
    if len(words) == 4:
        ab, cd = (
            [cute.arch.prmt(*pair, selector) for selector in (0x5140, 0x7362)] for pair in (words[:2], words[2:])
        )  # a0 b0 a1 b1, a2 b2 a3 b3
        return _transposed([ab[0], cd[0]]) + _transposed([ab[1], cd[1]])
    if len(words) == 2:
        return [Uint32(cute.arch.prmt(*words, selector)) for selector in (0x5410, 0x7632)]
    return words
