"""What fused kernels move, on a GPU by Nsight Compute and in the emulator: sectors, wavefronts, bytes.

    ncu --csv --page raw -k regex:cudnn_ --metrics METRICS python benchmarks/traffic.py run > ncu.csv   # on an H200
    python benchmarks/traffic.py metrics                                                  # prints METRICS
    python benchmarks/traffic.py emulate emulated.csv                                     # anywhere
    python benchmarks/traffic.py compare ncu.csv emulated.csv                             # a table of both

Programs run with the same random problems; the n-th launch of a program here is compared with the n-th there.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch

from cudnn import demo_cases

PROGRAMS = {
    "rmsnorm_rht_amax": (64, 1024),
    "gemm_swiglu": (256, 256, 128),
    "gemm_amax": (256, 256, 128),
    "gemm_dswiglu": (256, 256, 128),
    "gemm_geglu": (256, 256, 128),
    "gemm_rope": (256, 256, 128),
    "gemm_srelu": (256, 256, 128),
    "grouped_gemm": (320, 128, 64, 3),
    "grouped_gemm_glu": (320, 128, 64, 3),
    "grouped_gemm_swiglu": (320, 128, 64, 3),
    "grouped_gemm_wgrad": (128, 128, 192, 3),
}
SHARED, SECTORS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
METRICS = {  # what Nsight Compute counts, and the same of a launch in the emulator
    SECTORS.format("ld"): lambda launch: launch.sectors["global load"],
    SECTORS.format("st"): lambda launch: launch.sectors["global store"],
    SHARED: lambda launch: launch.wavefronts,
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": lambda launch: launch.bank_conflicts,
    "lts__t_sectors_op_read.sum": lambda launch: (
        launch.sectors["global load"] + launch.sectors["global to shared TMA"] + launch.sectors["global to shared bulk"]
    ),
    "lts__t_sectors_op_write.sum": lambda launch: (
        launch.sectors["global store"]
        + launch.sectors["shared to global TMA"]
        + launch.sectors["shared to global bulk"]
    ),
}


def run(device: str) -> None:
    for name, shape in PROGRAMS.items():
        torch.manual_seed(0)
        demo_cases.find(name).make(shape, device).call()


def emulate(file: Path) -> None:
    """A row for each launch and metric."""
    import cudnn

    with cudnn.emulation("sm_90a", races=True, multiprocessors=132) as report:
        run("cpu")
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["launch", "kernel", "metric", "value"])
        for number, launch in enumerate(report.launches):
            writer.writerows([number, launch.kernel, name, count(launch)] for name, count in METRICS.items())


def read_ncu(file: Path) -> list[tuple[str, dict[str, float]]]:
    """Kernel and metrics of each launch. The raw page has a line of units below its header."""
    lines = [line for line in file.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    found = []
    for row in rows:
        values = {name: row[name].replace(",", "") for name in METRICS if row.get(name)}
        if values and all(value.replace(".", "").isdigit() for value in values.values()):
            found.append((row["Kernel Name"], {name: float(value) for name, value in values.items()}))
    return found


def compare(ncu: Path, emulated: Path) -> list[dict[str, Any]]:
    """Rows with both values and their ratio; kernels must be the same, in the same order."""
    launches: dict[int, tuple[str, dict[str, float]]] = {}
    with emulated.open(newline="") as stream:
        for row in csv.DictReader(stream):
            launch = launches.setdefault(int(row["launch"]), (row["kernel"], {}))
            launch[1][row["metric"]] = float(row["value"])
    measured = read_ncu(ncu)
    if len(measured) != len(launches):
        raise ValueError(f"{ncu} has {len(measured)} launches, {emulated} {len(launches)}: run the same programs")
    rows = []
    for (kernel, chip), (name, ours) in zip(measured, launches.values(), strict=True):
        if kernel.split("(")[0] != name:
            raise ValueError(f"launch of {kernel} in {ncu} stands where {emulated} has {name}")
        for metric, value in chip.items():
            ratio = ours[metric] / value if value else (1.0 if not ours[metric] else float("inf"))
            rows.append({"kernel": name, "metric": metric, "ncu": value, "emulator": ours[metric], "ratio": ratio})
    return rows


def main(arguments: list[str]) -> None:
    command, *files = arguments
    if command == "metrics":
        print(",".join(METRICS))
    elif command == "run":
        run("cuda")
        torch.cuda.synchronize()
    elif command == "emulate":
        emulate(Path(files[0]))
    elif command == "compare":
        for row in compare(Path(files[0]), Path(files[1])):
            print(
                f"{row['kernel']:40} {row['metric']:58} {row['ncu']:10.0f} {row['emulator']:10.0f} {row['ratio']:6.3f}"
            )
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
