"""``cudnn bench --model``: the arithmetic, by hand, and what it must never do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cudnn
from cudnn.bench import Reading, Row, model, report, sass
from cudnn.bench.model import MACHINES, Kernel
from cudnn.bench.sass import Epilogue, Facts
from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.epilogue import Gated, Scale, StoreTile
from cudnn_kernels.problem import BlockScale, Operand
from cudnn_kernels.schedule import Dense
from support.cli import invoke

H200, B200 = MACHINES["sm_90a"], MACHINES["sm_100a"]
STORE = (StoreTile("c", "bfloat16"),)
FACTS = Facts("", 4, 0, 0, 50, 0, 200, Epilogue(instructions=1000, special=128, shared=256, tensor=0))


def configuration(**changes: object) -> GemmConfiguration:
    return dataclasses.replace(GemmConfiguration(Operand("bfloat16"), Operand("bfloat16"), STORE, Dense()), **changes)  # type: ignore[arg-type]


def run(*arguments: str) -> tuple[int, str]:
    result = invoke("bench", *arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("machine", "peaks"),
    [(H200, {32: 494.7e12, 16: 989.4e12, 8: 1978.9e12}), (B200, {32: 1.12e15, 16: 2.25e15, 8: 4.5e15, 4: 9e15})],
)
def test_the_rates_are_those_of_the_datasheets(machine: model.Machine, peaks: dict[int, float]) -> None:
    for bits, peak in peaks.items():
        rate = 2 * machine.multiprocessors * machine.macs * 16 / bits * machine.megahertz * 1e6
        assert rate == pytest.approx(peak, rel=5e-3)


def test_a_tile_of_hopper_by_hand() -> None:
    c = configuration(tile=(128, 256, 64), cluster=(2, 1))
    cycles, moved = model.tile_cycles(H200, c, Kernel(FACTS, 4), 128)
    assert cycles.multiply == 2 * 128 * 256 * 64 / 2048
    assert moved == 2 * (128 + 256 / 2) * 64 * 2 + 128 * 256 * 2  # two CTAs share B
    assert cycles.load == moved * 132 / 5120
    assert cycles.issue == 2 * 1000  # two warps to a scheduler
    assert cycles.special == 128 * 256 / 16  # results of 256 threads
    assert cycles.shared == 256 * 256 / 128
    assert cycles.epilogue == 2048


def test_a_tile_of_blackwell_by_hand() -> None:
    facts = dataclasses.replace(FACTS, copies=12, epilogue=dataclasses.replace(FACTS.epilogue, tensor=256))
    kernel = Kernel(facts, 4, 1, 304)
    c = configuration(a=Operand("float4_e2m1fn_x2", scale=BlockScale("float8_e4m3fn", 16)), tile=(256, 256, 256))
    cycles, moved = model.tile_cycles(B200, c, kernel, 256)
    assert cycles.multiply == 128 * 256 * 256 / (4 * 4096)
    assert moved == (128 + 256 / 2) * (256 / 2 + 256 / 16) + 128 * 256 * 2
    assert (cycles.issue, cycles.tensor) == (1000, 256)
    narrow = configuration(tile=(128, 64, 64), cluster=(1, 1))
    fed, _ = model.tile_cycles(B200, narrow, Kernel(FACTS, 4, 2, 128), 64)
    assert fed.multiply == (128 + 64) * 64 * 2 / 128  # shared memory's 128 bytes, more than 128 * 64 * 64 / 4096


def test_a_problem_by_hand() -> None:
    c = configuration(tile=(128, 256, 64), cluster=(2, 1))
    found = model.predict(H200, c, Kernel(FACTS, 4), 4096, 4096, 4096)
    assert found.rounds == 4  # 16 x 16 clusters on 66
    assert found.filled == pytest.approx(256 / 264)
    assert found.bound == "products, then epilogue"
    assert found.microseconds == pytest.approx(4 * (64 * 1024 + 2048) / 1830)
    assert found.busy == pytest.approx(256 / 264 * 65536 / (65536 + 2048))
    alternating = model.predict(
        H200, configuration(tile=(128, 256, 64), pingpong=True), Kernel(FACTS, 4), 4096, 4096, 4096
    )
    assert alternating.bound == "tensor cores"
    assert alternating.microseconds == pytest.approx((4 * 65536 + 1024) / 1830)  # the last epilogue shows


def test_what_bounds_a_problem() -> None:
    slow = Kernel(dataclasses.replace(FACTS, epilogue=Epilogue(9000, 0, 0, 0)), 4, 2, 512)
    c = configuration(tile=(256, 256, 64))
    assert model.predict(B200, c, slow, 4096, 4096, 512).bound == "epilogue"
    assert model.predict(B200, c, Kernel(FACTS, 4, 2, 512), 4096, 4096, 8192).bound == "tensor cores"
    assert model.predict(B200, c, Kernel(FACTS, 4, 1, 512), 4096, 4096, 8192).bound == "products, then epilogue"
    small = configuration(tile=(128, 128, 64), cluster=(1, 1))
    assert model.predict(B200, small, Kernel(FACTS, 4, 2, 256), 4096, 4096, 8192).bound == "L2, an assumed rate"
    found = model.predict(B200, c, Kernel(FACTS, 4, 2, 512), 65536, 65536, 64)
    assert found.bound == "memory"
    assert found.microseconds == pytest.approx((2 * 65536 * 64 + 65536 * 65536) * 2 / 7.7e12 * 1e6)


SIZES = st.integers(1, 20000)


@given(SIZES, SIZES, SIZES, st.sampled_from(list(model.table())), st.integers(1, 3))
def test_more_work_never_takes_less_time(m: int, n: int, k: int, name: str, factor: int) -> None:
    kernel, arch = model.table()[name], name.split(":")[0]
    machine = MACHINES[arch]
    m_, n_, k_ = name.split(": ")[1].split(",")[0].split("x")
    c = configuration(tile=(int(m_), int(n_), int(k_)), cluster=(int(m_) // 128, 1), pingpong="pingpong True" in name)

    def seconds(*sizes: int, kernel: Kernel = kernel, machine: model.Machine = machine) -> float:
        found = model.predict(machine, c, kernel, *sizes)
        assert 0 < found.busy <= 1
        assert 0 < found.filled <= 1
        assert found.busy <= found.filled * (1 + 1e-9)
        return found.microseconds

    base = seconds(m, n, k)
    assert seconds(factor * m, n, k) >= base
    assert seconds(m, factor * n, k) >= base
    assert seconds(m, n, factor * k) >= base
    facts = kernel.facts
    more = dataclasses.replace(facts, epilogue=dataclasses.replace(facts.epilogue, instructions=10**5))
    assert seconds(m, n, k, kernel=dataclasses.replace(kernel, facts=more)) >= base
    assert seconds(m, n, k, machine=dataclasses.replace(machine, megahertz=machine.megahertz * factor)) <= base


def test_results_of_swiglu_are_half_as_wide() -> None:
    assert (
        model.result_bytes((Scale(), StoreTile("ab12", "float32"), Gated(), StoreTile("c", "float8_e4m3fn")), 64) == 288
    )


@pytest.mark.parametrize(("size", "clusters"), [((0, 64, 64), (2, 1)), ((64, 64, 64), (16, 16))])
def test_impossible_problems_are_refused(size: tuple[int, int, int], clusters: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="allowed: sizes from 1, a cluster that fits"):
        model.predict(H200, configuration(cluster=clusters), Kernel(FACTS, 4), *size)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, rows, columns, dtype=dtype).permute(1, 2, 0)


def test_the_epilogues_are_those_of_the_apis() -> None:
    operands = {"sample_a": matrix(256, 128), "sample_b": matrix(256, 128)}
    plain = {**operands, "sample_sfa": None, "sample_sfb": None}
    c, d, column = matrix(256, 256), matrix(256, 256), matrix(256, 1, torch.float32)
    half = matrix(256, 128)
    apis = {
        ("gemm_amax", "GemmAmax"): cudnn.GemmAmax(**plain, sample_c=c, sample_amax=torch.empty(1)),
        ("gemm_swiglu", "GemmSwiglu"): cudnn.GemmSwiglu(**operands, sample_ab12=c, sample_c=half),
        ("gemm_swiglu", "GemmSwiglu, no ab12"): cudnn.GemmSwiglu(**operands, sample_ab12=None, sample_c=half),
        ("gemm_srelu", "GemmSrelu"): cudnn.GemmSrelu(**plain, sample_c=c, sample_d=d, sample_prob=column),
        ("gemm_dsrelu", "GemmDsrelu"): cudnn.GemmDsrelu(
            **plain, sample_c=c, sample_d=d, sample_dprob=column, sample_prob=column
        ),
    }
    for (name, candidate), api in apis.items():
        assert model.epilogues(name, "bf16")[candidate] == api.operations()


RUN = report.Report(
    "GEMM + SwiGLU",
    "bf16",
    "NVIDIA H200",
    "PyTorch 2.11.0",
    ("cuBLAS",),
    [
        Row("4096x4096x4096", "cuBLAS", 200.0, (), 2.0 * 4096**3, 1e8),
        Row("4096x4096x4096", "GemmSwiglu", 210.0, (), 2.0 * 4096**3, 1e8, True, Reading(1525.0, 690.0, 60.0)),
        Row("4096x4096x4096", "GemmSwiglu, no ab12", flops=2.0 * 4096**3, refused="wrong"),
        Row("host time, warm", "GemmSwiglu.execute", 7.0, ours=True),
    ],
)


@pytest.fixture
def without_disassembler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "disassembler", lambda: None)
    monkeypatch.setattr("cudnn.cli.model.disassembler", lambda: None)
    model.kernel.cache_clear()


@pytest.mark.usefixtures("without_disassembler")
def test_a_run_is_compared_at_its_own_clock(tmp_path: Path) -> None:
    found = model.compare(RUN)
    assert [(one.row.name, one.megahertz) for one in found] == [("GemmSwiglu", 1525.0)]
    c = model.configurations("sm_90a", "bf16", model.epilogues("gemm_swiglu", "bf16")["GemmSwiglu"], 4096, 4096)[0]
    at = dataclasses.replace(H200, megahertz=1525.0)
    assert found[0].prediction == model.predict(at, c, model.table()[model.key("sm_90a", c)], 4096, 4096, 4096)
    path = tmp_path / "run.csv"
    report.write_csv(RUN, path)
    code, output = run("--model", "--from-csv", str(path))
    assert code == 0
    assert "4096x4096x4096, GemmSwiglu: measured 210.0 us at 1525 MHz; model, not measured: " in output


def test_a_run_on_another_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    report.write_csv(dataclasses.replace(RUN, device="Some other GPU"), path)
    code, output = run("--model", "--from-csv", str(path))
    assert code == 2
    assert "Some other GPU" in output


@pytest.mark.usefixtures("without_disassembler")
@pytest.mark.parametrize("dtype", model.TYPES)
@pytest.mark.parametrize("name", ["gemm_amax", "gemm_dsrelu", "gemm_srelu", "gemm_swiglu"])
def test_every_problem_says_once_that_this_is_a_model(name: str, dtype: str) -> None:
    code, output = run(name, "--model", "--dtype", dtype, "--shapes", "256x128x512,8192x8192x4096")
    assert code == 0, output
    lines = [line for line in output.splitlines() if line]
    assert [line for line in lines if model.LABEL in line] == [lines[0], *(line for line in lines if line[0] in "28")]
    assert sum(line[0] in "28" for line in lines) == 2
    blackwell = 5 if model.TYPES[dtype].scale else 4  # with factors the library itself would choose another one
    assert sum(line.startswith("    ") for line in lines) == 2 * 2 * 2 * (1 + blackwell)
    assert "from the table of this release" in lines[0]


@pytest.mark.usefixtures("without_disassembler")
def test_the_clock_scales_what_the_tensor_cores_bound() -> None:
    def times(*arguments: str) -> list[float]:
        _, output = run("gemm_amax", "--model", "--shapes", "8192x8192x4096", *arguments)
        return [float(line.split(" us, ")[0].split()[-1]) for line in output.splitlines() if "bound: tensor" in line]

    slow, fast = times("--clock", "1000"), times("--clock", "2000")
    assert slow == pytest.approx([2 * seconds for seconds in fast], rel=1e-3)
    assert len(slow) >= 2


@pytest.mark.usefixtures("without_disassembler")
def test_a_configuration_that_nobody_disassembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "sass.json"
    empty.write_text(json.dumps({}))
    monkeypatch.setattr(model, "TABLE", empty)
    model.table.cache_clear()
    try:
        code, output = run("gemm_amax", "--model")
    finally:
        model.table.cache_clear()
    assert code == 1
    assert "allowed: one in the table of machine code. To fix it, pip install nvidia-cuda-nvdisasm." in output


def test_with_a_disassembler_the_machine_code_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    if sass.disassembler() is None:
        pytest.skip("nvdisasm is missing")
    read: list[str] = []

    def examine(arch: str, c: GemmConfiguration) -> Kernel:
        read.append(model.key(arch, c))
        return Kernel(FACTS, 4, 2, 512)

    monkeypatch.setattr(model, "examine", examine)
    model.kernel.cache_clear()
    try:
        code, output = run("gemm_amax", "--model", "--shapes", "256x256x256,512x512x512")
    finally:
        model.kernel.cache_clear()
    assert code == 0
    assert "disassembled here" in output
    assert len(read) == len(set(read)) == 2 * (1 + 4)


@pytest.mark.usefixtures("without_disassembler")
def test_what_fills_tensor_memory_is_shown() -> None:
    """256 columns and factors leave room for one accumulator, so that the products wait for the epilogue."""
    code, output = run("gemm_amax", "--model", "--dtype", "mxfp8", "--shapes", "8192x8192x8192")
    assert code == 0
    tiles = [line.strip() for line in output.splitlines() if " rounds, " in line]
    blackwell = [line for line in tiles if "accumulator" in line]
    assert {line.split("x")[1] for line in blackwell if "1 accumulator:" in line} == {"256"}
    assert {line.split("x")[1] for line in blackwell if "2 accumulators:" in line} == {"128"}
    assert len(tiles) - len(blackwell) == 2  # Hopper's, in registers
