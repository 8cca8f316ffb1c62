"""What GEMM kernels' machine code says: the parser on small programs, and the table against the configurations.

``support.sass`` compiles and disassembles every configuration; here only a sample.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from cudnn.bench import model, sass
from cudnn_kernels import fakes
from cudnn_kernels.epilogue import Amax, Gated, MultiplyGroup, QuantizeRows, SquaredRelu, StoreTile
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import VarlenM
from cudnn_kernels.sm90 import heuristics
from cudnn_kernels.sm90.gemm import Gemm
from support import sass as table
from support.compiled import compile_kernel
from support.selection import brief

CONFIGURATIONS = table.configurations()
PROMOTED = next(name for name in CONFIGURATIONS if name.startswith("sm_90a") and "a float8" in name)
SAMPLE = [*list(CONFIGURATIONS)[::28], PROMOTED]

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
    found = sass.facts(HOPPER)
    assert found == sass.Facts(
        mma="HGMMA.64x128x16.F32.BF16",
        run=2,
        waits=1,
        copies=0,
        loop=11,  # 0x18 to 0x90, and what is late
        local=0,
        registers=24 + 64,
        epilogue=sass.Epilogue(instructions=6, special=1, shared=16 + 8 + 2, tensor=0),
    )


def test_a_first_k_tile_may_come_before_the_loop() -> None:
    first = HOPPER[HOPPER.index("        /*0018*/") : HOPPER.index("        /*0080*/")].replace(".L_spin", ".L_first")
    places = itertools.count(step=16)
    peeled = re.sub(
        r"/\*[0-9a-f]{4}\*/", lambda _: f"/*{next(places):04x}*/", HOPPER.replace(".L_k:\n", f"{first}.L_k:\n")
    )
    found, known = sass.facts(peeled), sass.facts(HOPPER)
    fewer = known.loop - first.count("/*00")  # what a turn of the loop has besides
    assert found == replace(known, epilogue=replace(known.epilogue, instructions=known.epilogue.instructions - fewer))


def test_a_blackwell_kernel() -> None:
    found = sass.facts(BLACKWELL)
    assert found == sass.Facts(
        mma="UTCOMMA.2CTA.4X",
        run=3,
        waits=0,
        copies=1,
        loop=7,
        local=1,
        registers=81,
        epilogue=sass.Epilogue(instructions=4, special=0, shared=16, tensor=80),
    )


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
    assert sass.facts(BLACKWELL.replace("UMOV UR6, UR8 ;", between)).run == 1


def test_a_label_ends_a_run_of_products() -> None:
    cut = BLACKWELL.replace("        /*0060*/", ".L_x:\n        /*0060*/")
    assert sass.facts(cut).run == 1


def test_loops_are_those_of_the_control_flow() -> None:
    program = sass.Program(HOPPER)
    spin, over_k, over_tiles = program.loops
    assert sorted(spin) == [3, 4]
    assert sorted(over_k) == [*range(2, 11), 17, 18]
    assert sorted(over_tiles) == [*range(1, 16), 17, 18]
    assert program.loops_around([5]) == [over_k, over_tiles]
    assert program.loops_around([0]) == []


@pytest.mark.parametrize(
    ("opcode", "operands", "bytes", "registers"),
    [
        ("STS.128", "[R4], R8", 16, 9),
        ("LDS.64", "R4, [R90.64]", 8, 92),
        ("STS.U8", "[R4], R8", 1, 9),
        ("LDSM.16.M88.2", "R4, [R8]", 8, 9),
        ("STS", "[UR4], R250", 4, 251),
        ("LDG.E.128", "R12, desc[UR4][R2.64]", 16, 16),
    ],
)
def test_an_instruction(opcode: str, operands: str, bytes: int, registers: int) -> None:
    instruction = sass.Instruction("", opcode, operands)
    assert (instruction.bytes, instruction.registers) == (bytes, registers)


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
        sass.facts(text)


def test_what_cannot_be_disassembled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    with pytest.raises(RuntimeError, match="allowed: a cubin that nvdisasm knows"):
        sass.disassemble(b"not a cubin")
    monkeypatch.setattr(sass, "disassembler", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvdisasm"):
        sass.disassemble(b"")


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


def test_the_table_is_complete() -> None:
    assert list(model.table()) == list(CONFIGURATIONS)


@pytest.mark.parametrize("arch", model.MACHINES)
def test_kernels_are_what_their_configurations_ask_for(arch: str) -> None:
    for name, kernel in model.table().items():
        if not name.startswith(arch):
            continue
        c, facts = CONFIGURATIONS[name][1], kernel.facts
        hopper = arch == "sm_90a"
        vector = c.a.scale.vector if c.a.scale else 0
        assert facts.mma == kind(arch, c.a.dtype, vector, c.tile[0] == 256, c.tile[1]), name
        assert facts.run == (8 if c.pingpong else 4), name  # 128 bytes of k at 32 a product; ping-pong: 128 rows at 64
        assert facts.registers <= (240 if hopper else 255), name
        assert kernel.buffers >= (3 if hopper else 2), name
        factors = c.tile[2] // vector // 4 if vector else 0  # columns of factors, four to a copy of 128 rows
        assert facts.copies == factors * (1 + -(-c.tile[1] // 128)), name
        assert facts.epilogue.tensor == (0 if hopper else c.tile[1]), name
        assert kernel.columns <= 512, name
        assert kernel.accumulators in ((0,) if hopper else (1, 2)), name
        staged = model.result_bytes(c.epilogue, 128 * c.tile[1])
        threads = 256 if hopper and not c.pingpong else 128
        assert facts.epilogue.shared * threads >= staged, name


def test_nothing_is_spilled() -> None:
    assert not [name for name, kernel in model.table().items() if kernel.facts.local]


def test_products_are_issued_without_waiting_for_each_other() -> None:
    """At most two instructions of a run wait, for registers: an index that is read late, the issue of a product."""
    assert max(kernel.facts.waits for kernel in model.table().values()) <= 2


@pytest.mark.parametrize("name", brief(SAMPLE, 0, len(SAMPLE) - 2, len(SAMPLE) - 1))
def test_a_sample_is_still_about_what_the_table_says(name: str) -> None:
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    found, known = model.examine(*CONFIGURATIONS[name]), model.table()[name]
    same = ("mma", "run", "copies", "local")
    assert [getattr(found.facts, x) for x in same] == [getattr(known.facts, x) for x in same]
    assert replace(found, facts=known.facts) == known  # buffers, accumulators, columns
    for x in ("instructions", "special", "shared", "tensor"):  # what the model counts with
        assert getattr(found.facts.epilogue, x) == pytest.approx(getattr(known.facts.epilogue, x), rel=0.1, abs=8), x
    assert found.facts.loop == pytest.approx(known.facts.loop, rel=0.1)


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
    assert model.examine("sm_90a", c).facts.run == 4 * (height // 64)


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
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    a, b = (Operand("float8_e4m3fn", scale=BlockScale("float32", 128, rows)) for rows in (1, 128))
    problem = GemmProblem(replace(a, index=index), b, epilogue, VarlenM(), 1536, 2048, groups=128)
    c = heuristics.configure(problem)
    code = sass.disassemble(compile_kernel("sm_90a", Gemm(c), *fakes.arguments(c)).cubin)
    found = [set(map(int, each)) for each in ADDITION.findall(code)]
    assert len(found) >= c.tile[1] // 2
    assert not [each for each in found if len(each) == 3 and len({number % 2 for number in each}) == 1]


ADDITION = re.compile(r"FFMA R\d+, R(\d+)(?:\.reuse)?, R(\d+)(?:\.reuse)?, R(\d+) ;")
