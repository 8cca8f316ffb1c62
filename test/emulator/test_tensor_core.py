"""tcgen05.mma and tcgen05.cp on operands laid out by hand, after the figures of the PTX ISA.

Operands in shared memory have no swizzle: core matrices of 8 rows of 16 bytes, those of successive K 128 bytes apart
(leading offset), those of successive rows `SBO` bytes (stride offset). Swizzled operands are the GEMMs' business.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ptx_emulator
from emulator.harness import core_matrices, registers, run

SHARED = """.shared .align 1024 .b8 buffer[16384];
  .shared .align 8 .b64 bar;
  .shared .align 8 .b32 holder;"""
N = 32
# %r1 buffer, %r2 barrier, %r10 tensor memory, %r11 that of the thread's own lane, %r15 the block's rank, %p1 its first
# thread, %p5 the first thread of all. {g} is the number of blocks of a pair.
SETUP = """mov.u32 %r1, buffer; mov.u32 %r2, bar; mov.u32 %r3, holder; setp.eq.s32 %p1, %r99, 0;
  setp.lt.u32 %p4, %r99, 32; mov.u32 %r15, %cluster_ctarank; setp.eq.s32 %p5, %r15, 0; and.pred %p5, %p5, %p1;
  @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster;
  @%p4 tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [%r3], 128; bar.sync 0; ld.shared.b32 %r10, [%r3];
  shl.b32 %r4, %r99, 16; and.b32 %r4, %r4, 0x600000; add.s32 %r11, %r10, %r4;"""
MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
WAIT = """mov.b16 %h1, 3;
  @%p5 tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r2]{mask};
  L: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra L;"""
FREE = "bar.sync 0; @%p4 tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 %r10, 128;"


def launch(body: str, source: Any, out: Any, ctas: int = 1) -> None:
    """Runs the text with what depends on the number of blocks filled in."""
    pair = {"{g}": str(ctas), "{multicast}": "", "{mask}": ""}
    if ctas == 2:
        pair |= {"{multicast}": ".multicast::cluster", "{mask}": ", %h1"}
    for name, value in pair.items():
        body = body.replace(name, value)
    run(body, source, out, grid=ctas, cluster=ctas, block=128, shared=SHARED, races=True)


def fill(size: int) -> str:
    """Copies `size` bytes, a multiple of 2048, of the block's own from global memory to the buffer."""
    lines = [
        f"mul.wide.u32 %rd1, %r99, 16; mul.wide.u32 %rd2, %r15, {size}; add.s64 %rd1, %rd1, %rd2; "
        "add.s64 %rd1, %rd1, %rd90; shl.b32 %r5, %r99, 4; add.s32 %r5, %r5, %r1;"
    ]
    lines += [
        f"ld.global.v4.b32 {{{registers(20, 4)}}}, [%rd1+{at}]; st.shared.v4.b32 [%r5+{at}], {{{registers(20, 4)}}};"
        for at in range(0, size, 2048)
    ]
    return "\n".join([*lines, f"fence.proxy.async.shared::cta; {MEET}"])


def show(count: int, shape: str = "32x32b") -> str:
    """Every thread stores `count` registers of a load from tensor memory."""
    lines = [
        f"tcgen05.ld.sync.aligned.{shape}.x{count // (4 if shape == '16x256b' else 1)}.b32 "
        f"{{{registers(40, count)}}}, [%r11]; tcgen05.wait::ld.sync.aligned; shl.b32 %r5, %r15, 7; "
        f"add.s32 %r5, %r5, %r99; mul.wide.u32 %rd1, %r5, {4 * count}; add.s64 %rd1, %rd1, %rd91;"
    ]
    return "\n".join(lines + [f"st.global.b32 [%rd1+{4 * i}], %r{40 + i};" for i in range(count)])


def descriptor(offset: int, leading: int, stride: int) -> str:
    """Into %rd%d: without swizzle; bit 46 is the fixed constant of tcgen05."""
    high = leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46
    return f"add.s32 %r6, %r1, {offset}; shr.u32 %r6, %r6, 4; cvt.u64.u32 %rd%d, %r6; or.b64 %rd%d, %rd%d, {high};"


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """(rows, k) codes of 4, 6 or 8 bits: 16 elements in the first bytes of every 16."""
    if bits == 8:
        return codes
    lanes = (codes[:, :, None] >> np.arange(bits)) & 1
    stream = np.packbits(lanes.reshape(len(codes), -1, 16 * bits), axis=2, bitorder="little")
    return np.pad(stream, ((0, 0), (0, 0), (0, 16 - 2 * bits))).reshape(len(codes), -1)


TYPES: dict[str, tuple[str, Any, int, int, int]] = {  # kind, NumPy type, bits, code in the descriptor, K
    "bf16": ("f16", ml_dtypes.bfloat16, 16, 1, 16),
    "f16": ("f16", np.float16, 16, 0, 16),
    "tf32": ("tf32", np.float32, 32, 2, 8),
    "s8": ("i8", np.int8, 8, 1, 32),
    "u8": ("i8", np.uint8, 8, 0, 32),
    "e4m3": ("f8f6f4", ml_dtypes.float8_e4m3fn, 8, 0, 32),
    "e5m2": ("f8f6f4", ml_dtypes.float8_e5m2, 8, 1, 32),
    "e2m3": ("f8f6f4", ml_dtypes.float6_e2m3fn, 6, 3, 32),
    "e3m2": ("f8f6f4", ml_dtypes.float6_e3m2fn, 6, 4, 32),
    "e2m1": ("f8f6f4", ml_dtypes.float4_e2m1fn, 4, 5, 32),
}


def operand(rows: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Values as float64, and the bytes of each row along K."""
    _, dtype, bits, _, k = TYPES[kind]
    low = 0 if kind == "u8" else -3
    values = np.random.default_rng(seed).integers(low, 4, (rows, k)).astype(dtype)
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(rows, -1)
    return values.astype(np.float64), packed(raw, bits) if bits < 16 else raw


def instruction(a: str, b: str, m: int) -> int:
    d = 2 if TYPES[a][0] == "i8" else 1
    return d << 4 | TYPES[a][3] << 7 | TYPES[b][3] << 10 | N >> 3 << 17 | m >> 4 << 24


def a_in_tensor_memory(raw: np.ndarray, ctas: int) -> np.ndarray:
    """(128 lanes, words) of a block's rows of A."""
    words = np.zeros((128, raw.shape[1] // 4), np.uint32)
    if len(raw) == 128:
        words[:] = raw.view(np.uint32)
    elif ctas == 2:  # twice: once for the columns of D in the lower lanes, once for those in the upper ones
        words[:64] = words[64:] = raw.view(np.uint32)
    else:  # the first 16 lanes of each quarter
        words.reshape(4, 32, -1)[:, :16] = raw.view(np.uint32).reshape(4, 16, -1)
    return words


def multiply(a: str, b: str, m: int, source: str, ctas: int = 1) -> None:
    """D = A B^T, accumulated twice; every block holds its rows of A and its part of the rows of B."""
    kind, _, bits, _, k = TYPES[a]
    (va, raw_a), (vb, raw_b) = operand(m, a, 1), operand(N, b, 2)
    images, count = [], k * bits // 32
    for mine_a, mine_b in zip(np.split(raw_a, ctas), np.split(raw_b, ctas), strict=True):
        image = core_matrices(mine_b)
        place = len(image)
        tensor = source == "tensor"
        image += a_in_tensor_memory(mine_a, ctas).tobytes() if tensor else core_matrices(mine_a)
        images.append(image + bytes(-len(image) % 2048))
    stride = 8 * max(raw_a.shape[1], raw_b.shape[1])
    if source == "shared":
        given, prepare = "%rd11", descriptor(place, 128, stride).replace("%d", "11")
    else:
        given, loads = "[%r12]", "".join(f"ld.shared.b32 %r{20 + i}, [%r14+{place + 4 * i}];" for i in range(count))
        prepare = f"""add.s32 %r12, %r10, 64; add.s32 %r13, %r11, 64; mad.lo.s32 %r14, %r99, {4 * count}, %r1; {loads}
          tcgen05.st.sync.aligned.32x32b.x{count}.b32 [%r13], {{{registers(20, count)}}};
          tcgen05.wait::st.sync.aligned; {MEET}"""
    rows = m // ctas
    folded = ctas == 2 and rows == 64
    form, held = ("16x256b", N // 2) if m == 64 else ("32x32b", N // 2 if folded else N)
    out = np.zeros((ctas, 128, held), np.int32 if kind == "i8" else np.float32)
    mma = f"tcgen05.mma.cta_group::{{g}}.kind::{kind} [%r10], {given}, %rd12, {instruction(a, b, m)}, %p3;"
    code = f"""{SETUP} {fill(len(images[0]))} {prepare} {descriptor(0, 128, stride).replace("%d", "12")}
      @!%p5 bra W; setp.ne.s32 %p3, %r99, %r99; {mma} setp.eq.s32 %p3, %r99, %r99; {mma} W: {WAIT} {show(held, form)}
      {MEET} {FREE}"""
    launch(code, np.frombuffer(b"".join(images), np.uint8).copy(), out, ctas)
    if folded:  # the right half of the columns is in the upper lanes
        out = np.concatenate([out[:, :64], out[:, 64:]], axis=2)
    elif m == 64:  # thread t of warp w holds rows t / 4 and t / 4 + 8 of 16, pairs of columns
        tile = out.reshape(4, 8, 4, N // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5)
        out = tile.reshape(64, N)
    np.testing.assert_array_equal(out.reshape(m, N), 2 * va @ vb.T)


@pytest.mark.parametrize(
    "pair",
    [
        ("bf16", "bf16"),
        ("f16", "bf16"),
        ("tf32", "tf32"),
        ("s8", "u8"),
        ("e4m3", "e5m2"),
        ("e2m3", "e3m2"),
        ("e3m2", "e4m3"),
        ("e2m1", "e2m3"),
        ("e5m2", "e2m1"),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(("m", "ctas"), [(128, 1), (64, 1), (256, 2), (128, 2)])
def test_operands_in_shared_memory(pair: tuple[str, str], m: int, ctas: int) -> None:
    multiply(*pair, m, "shared", ctas)


@pytest.mark.parametrize(
    "pair", [("bf16", "f16"), ("tf32", "tf32"), ("u8", "s8"), ("e5m2", "e4m3"), ("e4m3", "e3m2")], ids="-".join
)
@pytest.mark.parametrize(("m", "ctas"), [(128, 1), (64, 1), (256, 2), (128, 2)])
def test_a_in_tensor_memory(pair: tuple[str, str], m: int, ctas: int) -> None:
    multiply(*pair, m, "tensor", ctas)


def test_narrow_a_in_tensor_memory_is_refused() -> None:
    code = f"""{SETUP} @!%p1 bra W; mov.b64 %rd12, {1 << 46}; setp.eq.s32 %p3, %r99, %r99;
      tcgen05.mma.cta_group::1.kind::f8f6f4 [%r10], [%r10+64], %rd12, {instruction("e2m1", "e4m3", 128)}, %p3;
      W: {FREE}"""
    with pytest.raises(ptx_emulator.UnsupportedPTX, match="sub-byte A operand in tensor memory"):
        launch(code, np.zeros(16, np.uint8), np.zeros(1))


COPIES = {  # rows, 32-bit words of a row, and the row that lane i gets (None: not written)
    "128x256b": (128, 8, lambda i: i),
    "128x128b": (128, 4, lambda i: i),
    "4x256b": (4, 8, lambda i: i // 32 if i % 32 == 0 else None),
    "64x128b.warpx2::02_13": (64, 4, lambda i: i % 64),
    "64x128b.warpx2::01_23": (64, 4, lambda i: i // 64 * 32 + i % 32),
    "32x128b.warpx4": (32, 4, lambda i: i % 32),
}


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("form", COPIES)
def test_copies_to_tensor_memory(form: str, ctas: int) -> None:
    """Lanes that the copy leaves alone keep what was there. One thread of a pair copies for both blocks, each from its
    own shared memory; the commit tells both.
    """
    rows, words, source = COPIES[form]
    data = np.random.default_rng(3).integers(0, 1 << 32, (ctas, max(rows, 8), words), dtype=np.uint32)
    images = [core_matrices(mine.view(np.uint8)) for mine in data]
    images = [image + bytes(-len(image) % 2048) for image in images]
    out = np.zeros((ctas, 128, words), np.uint32)
    blank = f"""{"".join(f"mov.b32 %r{30 + i}, 7;" for i in range(words))}
      tcgen05.st.sync.aligned.32x32b.x{words}.b32 [%r11], {{{registers(30, words)}}}; tcgen05.wait::st.sync.aligned;"""
    code = f"""{SETUP} {blank} {fill(len(images[0]))} {descriptor(0, 128, 32 * words).replace("%d", "12")}
      @%p5 tcgen05.cp.cta_group::{{g}}.{form} [%r10], %rd12; {WAIT} {show(words)} {MEET} {FREE}"""
    launch(code, np.frombuffer(b"".join(images), np.uint8).copy(), out, ctas)
    for mine, found in zip(data, out, strict=True):
        expected = [mine[source(i)].tolist() if source(i) is not None else [7] * words for i in range(128)]
        assert found.tolist() == expected


def test_decompressing_copies_are_refused() -> None:
    with pytest.raises(ptx_emulator.UnsupportedPTX, match=r"128x128b\.b8x16\.b6x16_p32"):
        launch(
            f"{SETUP} @%p1 tcgen05.cp.cta_group::1.128x128b.b8x16.b6x16_p32 [%r10], %rd1; {FREE}",
            np.zeros(16, np.uint8),
            np.zeros(1),
        )


def test_loads_and_stores_of_16_bits() -> None:
    """pack::16b joins the low halves of two neighbouring columns; unpack::16b takes them apart again."""
    source = np.random.default_rng(4).integers(0, 1 << 32, (128, 4), dtype=np.uint32)
    out = np.zeros((128, 12), np.uint32)
    code = f"""{SETUP} mul.wide.u32 %rd1, %r99, 16; add.s64 %rd1, %rd1, %rd90;
      ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd1];
      tcgen05.st.sync.aligned.32x32b.x4.unpack::16b.b32 [%r11], {{{registers(20, 4)}}}; tcgen05.wait::st.sync.aligned;
      tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {{{registers(30, 4)}}}, [%r11]; tcgen05.wait::ld.sync.aligned;
      mul.wide.u32 %rd1, %r99, 48; add.s64 %rd1, %rd1, %rd91;
      tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{registers(34, 8)}}}, [%r11]; tcgen05.wait::ld.sync.aligned;
      {"".join(f"st.global.b32 [%rd1+{4 * i}], %r{30 + i};" for i in range(12))} {FREE}"""
    launch(code, source, out)
    assert out[:, :4].tolist() == source.tolist()
    assert out[:, 4:].tolist() == source.view(np.uint16).tolist()
