"""The MMAs of GEMM kernels in SASS: the parser on small programs, and a sample of configurations."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from cudnn_kernels import fakes
from cudnn_kernels.epilogue import Amax, Gated, MultiplyGroup, QuantizeRows, SquaredRelu, StoreTile
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import VarlenM
from cudnn_kernels.sm90 import gemm as hopper
from cudnn_kernels.sm90.heuristics import gemm as heuristics
from cudnn_kernels.sm100 import gemm as blackwell
from support import resources, sass
from support.compiled import Compiled, compile_kernel
from support.selection import brief

KERNELS = {resources.HOPPER: hopper.Gemm, resources.BLACKWELL: blackwell.Gemm}
CONFIGURATIONS = resources.configurations()
STEPS = {"sm_90a": 35, "sm_100a": 45}
SAMPLE = [(arch, name) for arch, step in STEPS.items() for name in list(CONFIGURATIONS[arch])[::step]]
NARROW = StoreTile("d", "float8_e4m3fn")

HOPPER = """
        .section        .text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_tile:
        /*0010*/                   MOV R2, RZ ;
.L_k:
        /*0018*/                   UMOV UR3, URZ ;
.L_spin:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2+URZ], R3 ;
        /*0030*/              @!P1 BRA `(.L_spin) ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, UP0 ;   /* 0x0000000000000000 */
                                                                                           /* 0x000fe20000000000 */
        /*0050*/                   UIADD3 UR16, UR10, 0x2, URZ ;                           /* 0x0000000000000000 */
                                                                                           /* 0x004fe20000000000 */
        /*0060*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;  /* 0x0000000000000000 */
                                                                                           /* 0x000fe20000000000 */
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0080*/              @!P2 BRA `(.L_late) ;
.L_back:
        /*0090*/               @P3 BRA `(.L_k) ;
        /*00a0*/                   MUFU.EX2 R5, R5 ;
        /*00b0*/                   STSM.16.M88.4 [R9], R4 ;
        /*00c0*/               @P1 STS.64 [R9+0x10], R6 ;
        /*00d0*/                   LDS.U16 R10, [R9] ;
        /*00e0*/               @P0 BRA `(.L_tile) ;
        /*00f0*/                   EXIT ;
.L_late:
        /*0100*/                   NOP ;
        /*0110*/                   BRA `(.L_back) ;
"""

BLACKWELL = """
.text.kernel:
        /*0000*/               @P0 BRA `(.L_finish) ;
.L_tile:
        /*0010*/                   UMOV UR5, URZ ;
.L_k:
        /*0020*/                   UTCCP.T.S.2CTA.4x32dp128bit tmem[UR16+0x100], gdesc[UR58] ;
        /*0030*/                   UTCOMMA.2CTA.4X gdesc[UR6], gdesc[UR4], tmem[UR7], tmem[UR8], idesc[UR9], UPT ;
        /*0040*/                   UMOV UR6, UR8 ;
        /*0050*/                   UTCOMMA.2CTA.4X gdesc[UR6], gdesc[UR4], tmem[UR7], tmem[UR8], idesc[UR9], UPT ;
        /*0060*/                   UTCOMMA.2CTA.4X gdesc[UR6], gdesc[UR4], tmem[UR7], tmem[UR8], idesc[UR9], UPT ;
        /*0070*/                   UTCBAR.2CTA.MULTICAST [UR5], URZ, UR4 ;
        /*0080*/                   BRA.U UP0, `(.L_k) ;
        /*0090*/               @P1 BRA `(.L_tile) ;
        /*00a0*/                   EXIT ;
.L_finish:
        /*00b0*/                   LDTM.x64 R4, tmem[UR4] ;
        /*00c0*/                   STS.128 [R80], R68 ;
        /*00d0*/                   LDTM.x16 R4, tmem[UR4+0x40] ;
        /*00e0*/              @!P3 BRA `(.L_finish) ;
        /*00f0*/                   STL [R1], R12 ;
        /*0100*/                   EXIT ;
"""


def test_a_hopper_kernel() -> None:
    assert sass.products(HOPPER) == sass.Products("HGMMA.64x128x16.F32.BF16", run=2, waits=1, copies=0, columns=0)


def test_a_first_k_tile_may_come_before_the_loop() -> None:
    first = HOPPER[HOPPER.index("        /*0018*/") : HOPPER.index("        /*0080*/")].replace(".L_spin", ".L_first")
    places = itertools.count(step=16)
    peeled = re.sub(
        r"/\*[0-9a-f]{4}\*/", lambda _: f"/*{next(places):04x}*/", HOPPER.replace(".L_k:\n", f"{first}.L_k:\n")
    )
    assert sass.products(peeled) == sass.products(HOPPER)


def test_a_blackwell_kernel() -> None:
    assert sass.products(BLACKWELL) == sass.Products("UTCOMMA.2CTA.4X", run=3, waits=0, copies=1, columns=80)


@pytest.mark.parametrize(
    "between",
    [
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2+URZ], R3 ;",
        "UTCBAR.2CTA.MULTICAST [UR5], URZ, UR4 ;",
        "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;",
        "BRA.U UP2, `(.L_tile) ;",
    ],
)
def test_a_wait_or_a_branch_ends_a_run_of_products(between: str) -> None:
    assert sass.products(BLACKWELL.replace("UMOV UR6, UR8 ;", between)).run == 1


def test_a_label_ends_a_run_of_products() -> None:
    cut = BLACKWELL.replace("        /*0060*/", ".L_x:\n        /*0060*/")
    assert sass.products(cut).run == 1


def test_loops_are_those_of_the_control_flow() -> None:
    program = sass.Program(HOPPER)
    spin, over_k, over_tiles = program.loops
    assert sorted(spin) == [3, 4]
    assert sorted(over_k) == [*range(2, 11), 17, 18]
    assert sorted(over_tiles) == [*range(1, 16), 17, 18]
    assert program.loops_around([5]) == [over_k, over_tiles]
    assert program.loops_around([0]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got 0; allowed: those of one kernel"),
        (HOPPER + HOPPER, "got 38; allowed: those of one kernel"),
        (HOPPER.replace("HGMMA", "FMUL"), "products: got [] in "),
        (HOPPER.replace("64x128x16.F32.BF16 R24, gdesc[UR16], R24, UP0", "64x64x16.F32.BF16 R24"), "allowed: one kind"),
        (HOPPER.replace("@P0 BRA `(.L_tile)", "EXIT"), "in 1 loops; allowed: one kind, in a loop over k"),
    ],
)
def test_what_is_no_gemm_kernel_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sass.products(text)


def kind(arch: str, a: str, vector: int, pair: bool, columns: int) -> str:
    """The instruction that PTX's kind of product becomes."""
    if arch == "sm_90a":
        names = {"bfloat16": "BF16", "float16": "F16", "float32": "TF32", **dict.fromkeys(FLOAT8, "")}
        depth = {"float32": 8, **dict.fromkeys(FLOAT8, 32)}.get(a, 16)
        if a in FLOAT8:
            return f"QGMMA.64x{columns}x32.F32.{FLOAT8[a]}.{FLOAT8[a]}"
        return f"HGMMA.64x{columns}x{depth}.F32" + (f".{names[a]}" if a != "float16" else "")
    name = {**dict.fromkeys(FLOAT8, "UTCQMMA"), "float4_e2m1fn_x2": "UTCOMMA"}.get(a, "UTCHMMA")
    return name + (".2CTA" if pair else "") + (".4X" if vector == 16 else "")


FLOAT8 = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}


def compiled(arch: str, c: GemmConfiguration) -> tuple[Compiled, sass.Products]:
    kernel = compile_kernel(arch, KERNELS[arch](c), *fakes.arguments(c))
    return kernel, sass.products(sass.disassemble(kernel.cubin))


@pytest.mark.parametrize(("arch", "name"), brief(SAMPLE, 0, 3, len(SAMPLE) - 1))
def test_kernels_are_what_their_configurations_ask_for(arch: str, name: str) -> None:
    c, hopper = CONFIGURATIONS[arch][name], arch == resources.HOPPER
    actual = compiled(arch, c)[1]
    vector = c.a.scale.vector if c.tensor_core_scale else 0
    columns = KERNELS[arch](c).partial_n if hopper and c.scales_accumulator else c.tile[1]
    assert actual.mma == kind(arch, c.a.dtype, vector, c.tile[0] == 256, columns)
    assert actual.run == (8 if c.pingpong else 4)  # 128 bytes of k at 32 a product; ping-pong: 128 rows at 64
    # For registers: an index that is read late, the issue of a product, SFA * SFB of two rows.
    assert actual.waits <= (4 if c.scales_accumulator else 2)
    factors = c.tile[2] // vector // 4 if vector else 0  # columns of scale factors, four to a copy of 128 rows
    assert actual.copies == factors * (1 + -(-c.tile[1] // 128))
    # Of tensor memory: the accumulator, and before it the partial accumulator that is promoted to it.
    assert actual.columns == (0 if hopper else c.tile[1] * (2 if c.scales_accumulator else 1))


@pytest.mark.parametrize(
    ("index", "epilogue", "n"),
    brief(
        itertools.product(
            ("", "a_index"),
            (
                (Amax(), StoreTile("d", "bfloat16")),
                (Gated(), Amax(), StoreTile("d", "float32")),
                (StoreTile("c", "bfloat16"), SquaredRelu(), Amax(), StoreTile("d", "float32")),
            ),
            (384, 1024),
        ),
        0,
        3,
        8,
    ),
)
def test_products_of_experts_are_issued_together(index: str, epilogue: tuple[Any, ...], n: int) -> None:
    """On Hopper, all of a k tile's, though a warpgroup may have no rows of an expert's last tile."""
    operands = Operand("bfloat16", index=index), Operand("bfloat16")
    c = heuristics.configure(GemmProblem(*operands, epilogue, VarlenM(), n, 4096, groups=8))
    c = replace(c, dynamic_scheduler=False)  # else there are two kernels
    height = c.tile[0] if c.pingpong else c.tile[0] // 2
    assert c.tile[0] * c.cluster[0] > height
    assert compiled("sm_90a", c)[1].run == 4 * (height // 64)


@pytest.mark.parametrize(
    ("index", "epilogue"),
    [
        ("a_index", (MultiplyGroup(), Gated(), QuantizeRows("sf", "float8_e4m3fn", "float32", 128), NARROW)),
        ("", (MultiplyGroup(), StoreTile("d", "bfloat16"))),
    ],
    ids=["up", "down"],
)
def test_additions_of_sums_read_two_banks_of_registers(index: str, epilogue: tuple[Any, ...]) -> None:
    """Of a MoE layer in e4m3. Where ``ptxas`` put all three operands of half of them in one bank, an epilogue's change
    made the whole loop 7 per cent slower on an H200.
    """
    a, b = (Operand("float8_e4m3fn", scale=BlockScale("float32", 128, rows)) for rows in (1, 128))
    problem = GemmProblem(replace(a, index=index), b, epilogue, VarlenM(), 1536, 2048, groups=128)
    c = heuristics.configure(problem)
    code = sass.disassemble(compile_kernel("sm_90a", hopper.Gemm(c), *fakes.arguments(c)).cubin)
    actual = [set(map(int, each)) for each in ADDITION.findall(code)]
    assert len(actual) >= c.tile[1] // 2
    assert not [each for each in actual if len(each) == 3 and len({number % 2 for number in each}) == 1]


@pytest.mark.parametrize("tile_n", brief((192, 256), 1))
def test_a_warp_loads_the_scale_factors_of_a_k_tile_twice(tile_n: int) -> None:
    """SFA of a thread's two rows by one vector load, SFB of all columns by another."""
    a, b = (Operand("float8_e4m3fn", scale=BlockScale("float32", 128, rows)) for rows in (1, 128))
    problem = GemmProblem(a, b, (StoreTile("d", "bfloat16"),), VarlenM(), 1536, 2048, groups=128)
    c = replace(heuristics.configure(problem), tile=(128, tile_n, 128), dynamic_scheduler=False)
    program = sass.Program(sass.disassemble(compile_kernel("sm_90a", hopper.Gemm(c), *fakes.arguments(c)).cubin))
    loop = program.loops_around(program.places("QGMMA")[-1:])[0]
    names = [program.instructions[n].name for n in loop]
    mmas_of_k_tile = 4 * (tile_n // hopper.Gemm(c).partial_n)
    assert names.count("LDS") == 2 * names.count("QGMMA") // mmas_of_k_tile


ADDITION = re.compile(r"FFMA R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+) ;")
