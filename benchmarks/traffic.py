"""What kernels move, on a GPU by Nsight Compute and in the emulator: sectors, wavefronts.

    ncu --csv --page raw --print-units base -k regex:KERNELS --metrics METRICS \\
        python benchmarks/traffic.py run > ncu.csv                                     # on an H200
    python benchmarks/traffic.py emulate emulated.csv                                  # anywhere
    python benchmarks/traffic.py compare ncu.csv emulated.csv docs/emulator-traffic.csv GPU

`python benchmarks/traffic.py kernels` and `metrics` print what stands for KERNELS and METRICS. Programs run with the
same random problems, and the n-th launch of a program here is compared with the n-th there. The programs of other
projects are those of `docs/outside_kernels.py`; both commands leave out those whose package is not installed, and the
versions must be the same. `python docs/generate.py` makes the table of `docs/emulator-calibration.md`.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cudnn

sys.path.append(str(Path(__file__).parents[1] / "docs"))

import outside_kernels

OURS = {
    "rmsnorm_rht_amax": (64, 1024),
    "gemm_swiglu": (256, 256, 2048),
    "gemm_amax": (256, 256, 2048),
    "gemm_dswiglu": (256, 256, 2048),
    "gemm_geglu": (256, 256, 2048),
    "gemm_rope": (256, 256, 2048),
    "gemm_srelu": (256, 256, 2048),
    "grouped_gemm": (320, 128, 2048, 3),
    "grouped_gemm_glu": (320, 128, 2048, 3),
    "grouped_gemm_swiglu": (320, 128, 2048, 3),
    "grouped_gemm_wgrad": (128, 128, 2048, 3),
}
OUTSIDE = (
    "QuACK rmsnorm",
    "QuACK softmax",
    "QuACK gemm",
    "FlashAttention-4 forward, D 64",
    "Triton softmax",
    "Triton dot",
)
KERNELS = "^(cudnn_|kernel_cutlass_|softmax$|dot$)"  # of these programs, and not PyTorch's
SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
METRICS = {  # what Nsight Compute counts, and the same of a launch in the emulator
    SECTORS.format("ld"): lambda launch: launch.sectors["global load"] + launch.sectors["global to shared cp.async"],
    SECTORS.format("st"): lambda launch: launch.sectors["global store"],
    "memory_l1_wavefronts_shared": lambda launch: launch.wavefronts + launch.wgmma_wavefronts,
    "memory_l1_wavefronts_shared_ideal": lambda launch: (
        launch.wavefronts + launch.wgmma_wavefronts - launch.bank_conflicts
    ),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": lambda launch: launch.l1_wavefronts,
    "lts__t_sectors_srcunit_tex_op_read.sum": lambda launch: launch.l2_sectors["read"],
    "lts__t_sectors_srcunit_tex_op_write.sum": lambda launch: launch.l2_sectors["write"],
}
RUN = "traffic: "  # before a program's name and version on stdout, where Nsight Compute's lines are, too
COLUMNS = ("program", "version", "kernel", "metric", "ncu", "emulator", "hardware", "date")


class Launch(NamedTuple):
    program: str
    version: str
    kernel: str
    counts: dict[str, float]


def programs() -> Iterator[tuple[str, str]]:
    """Names and versions of those that are installed."""
    for name in OURS:
        yield name, cudnn.__version__
    installed = {each.name for each in importlib.metadata.distributions()}
    for name in OUTSIDE:
        project = outside_kernels.CASES[name][0]
        if (package := outside_kernels.PACKAGES[project]) in installed:
            yield name, outside_kernels.version(project, Path())
        else:
            print(f"{name} is left out: {package} is not installed", file=sys.stderr)


def run() -> None:
    """All on the GPU."""
    from cudnn import demo_cases

    for name, version in programs():
        torch.manual_seed(0)
        if name in OURS:
            demo_cases.find(name).make(OURS[name], "cuda").call()
            result = "right"
        elif name.startswith("Triton"):
            function, grid, arguments, expected = outside_kernels.triton_problem(name.split()[1], "cuda")
            function[(grid,)](*arguments, n=64)
            torch.testing.assert_close(arguments[-1], expected, atol=1e-2, rtol=1e-2)
            result = "right"
        else:
            result = outside_kernels.CASES[name][3]()
        if result != "right":
            raise RuntimeError(f"{name}: {result}")
        print(f"{RUN}{name}, {version}", flush=True)
    torch.cuda.synchronize()


def launches(name: str) -> list[Any]:
    """Of a program in the emulator, for Hopper."""
    import ptx_emulator
    from cudnn import demo_cases

    options = {"races": True, "multiprocessors": 132}
    if name in OURS:
        with cudnn.emulation("sm_90a", **options) as report:
            demo_cases.find(name).make(OURS[name], "cpu").call()
        return report.launches
    if name.startswith("Triton"):
        return [outside_kernels.run_triton(name.split()[1], "sm_90a")[1]]
    with ptx_emulator.emulate("sm_90a", cuda=True, warn=outside_kernels.WARN, **options) as report:
        outside_kernels.CASES[name][3]()
    return report.launches


def emulate(file: Path) -> None:
    """A row for each launch and metric."""
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["program", "version", "launch", "kernel", "metric", "value"])
        for name, version in programs():
            torch.manual_seed(0)
            for number, launch in enumerate(launches(name)):
                about = [name, version, number, launch.kernel]
                writer.writerows([*about, metric, count(launch)] for metric, count in METRICS.items())


def read_emulated(file: Path) -> list[Launch]:
    found: dict[tuple[str, str], Launch] = {}
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            new = Launch(row["program"], row["version"], row["kernel"], {})
            found.setdefault((row["program"], row["launch"]), new).counts[row["metric"]] = float(row["value"])
    return list(found.values())


def read_ncu(file: Path) -> tuple[dict[str, str], list[tuple[str, dict[str, float]]]]:
    """Versions of the programs that ran, and kernel and counts of each launch.

    The raw page has a line of names, one of units, in which the ID is empty, and one for each launch, between the
    program's own output and Nsight Compute's messages.
    """
    lines = file.read_text().splitlines()
    versions = dict(line.removeprefix(RUN).rsplit(", ", 1) for line in lines if line.startswith(RUN))
    found = []
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["ID"]:
            missing = [name for name in METRICS if not row.get(name, "").replace(",", "").replace(".", "").isdigit()]
            if missing:
                raise ValueError(f"{file}: no number for {missing[0]} of {row['Kernel Name']}: {row.get(missing[0])!r}")
            counts = {name: float(row[name].replace(",", "")) for name in METRICS}
            found.append((row["Kernel Name"].split("(")[0], counts))
    return versions, found


def compare(ncu: Path, emulated: Path) -> list[dict[str, Any]]:
    """Rows with both values; kernels must be the same, in the same order."""
    versions, measured = read_ncu(ncu)
    ours = [launch for launch in read_emulated(emulated) if launch.program in versions]
    missing = versions.keys() - {launch.program for launch in ours}
    if missing or len(measured) != len(ours):
        raise ValueError(
            f"{ncu} has {len(measured)} launches, {emulated} {len(ours)} of the same programs"
            f"{' and none of ' + ', '.join(sorted(missing)) if missing else ''}: run the same programs"
        )
    rows = []
    for (kernel, counts), launch in zip(measured, ours, strict=True):
        if launch.version != versions[launch.program]:
            chip = versions[launch.program]
            raise ValueError(f"{launch.program} is {chip} in {ncu} and {launch.version} in {emulated}: use one version")
        if kernel != launch.kernel:
            raise ValueError(f"launch of {kernel} in {ncu} stands where {emulated} has {launch.kernel}")
        for metric, value in counts.items():
            about = {"program": launch.program, "version": launch.version, "kernel": kernel, "metric": metric}
            rows.append({**about, "ncu": value, "emulator": launch.counts[metric]})
    return rows


def main(arguments: list[str]) -> None:
    command, *files = [*arguments, ""][: max(1, len(arguments))]
    if command == "metrics":
        print(",".join(METRICS))
    elif command == "kernels":
        print(KERNELS)
    elif command == "run":
        run()
    elif command == "emulate":
        emulate(Path(files[0]))
    elif command == "compare":
        (ncu, emulated, table), hardware = map(Path, files[:3]), files[3]  # the GPU's name, as nvidia-smi prints it
        day = datetime.datetime.fromtimestamp(ncu.stat().st_mtime, datetime.timezone.utc).date().isoformat()
        rows = [row | {"hardware": hardware, "date": day} for row in compare(ncu, emulated)]
        with table.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        for row in rows:
            print(f"{row['program']:32} {row['metric']:58} {row['ncu']:10.0f} {row['emulator']:10.0f}")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
