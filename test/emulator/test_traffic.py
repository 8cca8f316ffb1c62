"""`benchmarks/traffic.py`: reads Nsight Compute's output, and refuses other kernels, programs and versions."""

from __future__ import annotations

import csv
import importlib
import io
import runpy
from pathlib import Path
from typing import Any

import pytest

import ptx_emulator

ROOT = Path(__file__).parents[2]
ABOUT = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size")


@pytest.fixture(scope="module")
def traffic() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "traffic.py"))


def ncu(traffic: dict[str, Any], launches: list[tuple[str, int]], stdout: str) -> str:
    """As `ncu --csv --page raw` prints: messages and the program's output, names, units, a line for each launch."""
    stream = io.StringIO()
    writer = csv.writer(stream, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*ABOUT, "Device", "CC", *traffic["METRICS"]])
    writer.writerow([*("" for _ in ABOUT), "", "", *("sector" for _ in traffic["METRICS"])])
    for number, (kernel, value) in enumerate(launches):
        about = (number, 4242, "python3.12", "127.0.0.1", kernel, 1, 7, "(128, 1, 1)", "(64, 1, 1)", 0, "9.0")
        writer.writerow([*about, *(f"{value + at:,}" for at in range(len(traffic["METRICS"])))])
    return f"==PROF== Connected to process 4242\n{stdout}==PROF== Disconnected from process 4242\n{stream.getvalue()}"


def emulated(traffic: dict[str, Any], rows: list[tuple[str, str, str, int]]) -> str:
    lines = ["program,version,launch,kernel,metric,value"]
    for program, version, kernel, value in rows:
        lines += [f'"{program}",{version},0,{kernel},{name},{value + at}' for at, name in enumerate(traffic["METRICS"])]
    return "\n".join(lines) + "\n"


OUTPUT = "traffic: gemm_amax, 0.1.0\ntraffic: FlashAttention-4 forward, D 64, 4.0.0b36\n"
LAUNCHES = [("cudnn_gemm", 8192), ("kernel_cutlass_kernel_flash(Params)", 1234567)]
OURS = [
    ("gemm_amax", "0.1.0", "cudnn_gemm", 8192),
    ("Triton dot", "3.9.0", "dot", 5),  # not installed on the machine with the GPU
    ("FlashAttention-4 forward, D 64", "4.0.0b36", "kernel_cutlass_kernel_flash", 1234500),
]


def test_counts_are_compared(traffic: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, ours, table = tmp_path / "ncu.csv", tmp_path / "emulated.csv", tmp_path / "traffic.csv"
    chip.write_text(ncu(traffic, LAUNCHES, OUTPUT))
    ours.write_text(emulated(traffic, OURS))
    traffic["main"](["compare", str(chip), str(ours), str(table), "NVIDIA H200"])
    rows = list(csv.DictReader(table.open()))
    assert [(row["program"], row["ncu"], row["emulator"]) for row in (rows[0], rows[len(traffic["METRICS"])])] == [
        ("gemm_amax", "8192.0", "8192.0"),
        ("FlashAttention-4 forward, D 64", "1234567.0", "1234500.0"),
    ]
    generate = importlib.import_module("generate")  # of the folder docs, which traffic.py made importable
    monkeypatch.setattr(generate, "TRAFFIC", table)
    assert "| gemm_amax 0.1.0 | 8192 | 8193 |" in generate.traffic()
    assert "| FlashAttention-4 forward, D 64 4.0.0b36 | 1234567 (-0.0 %) |" in generate.traffic()
    assert f"| within 2 %{' | 2 of 2' * len(traffic['METRICS'])} |" in generate.traffic()
    table.write_text(table.read_text().replace(",1234500.0", ",1204500.0"))
    assert "| within 2 % | 1 of 2 | 2 of 2 |" in generate.traffic()
    table.write_text("".join(line for line in table.open() if "lts__" not in line))  # of fewer metrics
    assert "L2" not in generate.traffic()


def test_loads_of_ncu_are_loads_and_cp_async(traffic: dict[str, Any]) -> None:
    launch = ptx_emulator.Launch("k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0)
    launch.sectors.update({"global load": 3, "global to shared cp.async": 4, "global to shared TMA": 16})
    assert [count(launch) for name, count in traffic["METRICS"].items() if name.endswith("op_ld.sum")] == [7]


@pytest.mark.parametrize(
    ("launches", "output", "said"),
    [
        (LAUNCHES[:1], OUTPUT, "has 1 launches, .* 2 of the same programs"),
        ([("other", 1), LAUNCHES[1]], OUTPUT, "launch of other .* stands where .* has cudnn_gemm"),
        (LAUNCHES, OUTPUT.replace("b36", "b37"), "is 4.0.0b37 in .* and 4.0.0b36 in"),
        (LAUNCHES, f"{OUTPUT}traffic: QuACK gemm, 0.6.5\n", "none of QuACK gemm"),
    ],
)
def test_other_programs_are_refused(
    traffic: dict[str, Any], tmp_path: Path, launches: list[tuple[str, int]], output: str, said: str
) -> None:
    chip, ours = tmp_path / "ncu.csv", tmp_path / "emulated.csv"
    chip.write_text(ncu(traffic, launches, output))
    ours.write_text(emulated(traffic, OURS))
    with pytest.raises(ValueError, match=said):
        traffic["compare"](chip, ours)


def test_a_metric_that_was_not_measured_is_refused(traffic: dict[str, Any], tmp_path: Path) -> None:
    chip = tmp_path / "ncu.csv"
    chip.write_text(ncu(traffic, LAUNCHES, OUTPUT).replace('"8,192"', '"n/a"'))
    with pytest.raises(ValueError, match=r"no number for l1tex__t_sectors_\w+.sum of cudnn_gemm: 'n/a'"):
        traffic["read_ncu"](chip)
