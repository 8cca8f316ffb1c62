"""``cudnn bench``: what can be tested without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import cudnn
from cudnn import bench
from cudnn.backend import handle
from cudnn.bench import (
    Candidate,
    Clock,
    Problem,
    Ratio,
    Reading,
    Row,
    attention,
    flash_attn,
    gemm,
    monitor,
    report,
    results,
    suite,
)
from cudnn.cli import bench as command_line
from cudnn.cli.bench import table
from support.cli import invoke, words

PEER = "benchmarks/triton_gemm_swiglu.py"
YARDSTICKS = ("cuBLAS", "cuBLAS + SwiGLU")
READING = Reading(1755.0, 690.5, 61.0)
LARGE, SMALL = "8192x28672x4096 Llama 3 8B", "64x64x64"
ROWS = [
    Row(LARGE, "cuBLAS", 2853.0, (Ratio(1.0, 1.0, 1.0), Ratio(1.104, 1.1, 1.11)), 2.0 * 8192 * 28672 * 4096, 7.4e8),
    Row(
        LARGE,
        "GemmSwiglu",
        2600.0,
        (Ratio(1.097, 1.09, 1.104), Ratio(1.21, 1.19, 1.22)),
        2.0 * 8192 * 28672 * 4096,
        7.4e8,
        True,
        READING,
    ),
    Row(LARGE, "Triton, fused", refused="OutOfResources: shared memory, with a text that goes on and on and on"),
    Row(SMALL, "cuBLAS", 4.0, (Ratio(1.0, 1.0, 1.0), None), 2.0 * 64**3, 3e4, False, READING),
    Row("device copy", "device copy", 500.0, (None, None), 0.0, 2e9),
    Row("host time, warm", "GemmSwiglu.execute", 6.5, (None, None), ours=True),
]


def measured() -> report.Report:
    return report.Report("GEMM + SwiGLU", "bf16", "NVIDIA H200", "PyTorch 2.11.0", YARDSTICKS, list(ROWS))


def printed(shown: report.Report) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(shown))
    return console.export_text()


def run(*arguments: str) -> tuple[int, str]:
    result = invoke("bench", *arguments)
    return result.exit_code, words(result)


class FakeGpu:
    """Gets slower with every burst, as a card does that grows warm."""

    def __init__(self, drift: float = 0.0) -> None:
        self.drift, self.bursts = drift, []

    def seconds(self, call: Callable[[], Any], calls: int) -> float:
        self.bursts.append((call, calls))
        return calls * call() * (1 + self.drift * len(self.bursts))

    def clock(self, rounds: int = 6) -> Clock:
        return Clock(self.seconds, rounds, burst=40e-3, warm=10e-3, summary=statistics.median)


def test_a_plot_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output = run("gemm_swiglu", "--plot", "plot.png")
    assert code == 2
    assert "matplotlib is missing: run pip install '.[bench]' in a clone" in output


@pytest.mark.skipif(handle.gpu_available(), reason="a GPU is here")
@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_without_a_gpu_it_says_so(name: str) -> None:
    code, output = run(name)
    assert code == 1
    assert "no NVIDIA GPU" in output


def test_shapes() -> None:
    benchmark = bench.find("gemm_swiglu")
    assert benchmark.shapes("4096x4096x4096, 1x64x128") == ((4096, 4096, 4096), (1, 64, 128))
    some = gemm.labelled(bench.Options("bf16"), gated=True)
    assert len(some) == 7
    assert some[4096, 2 * 14336, 4096] == "Llama 3 8B"
    every = gemm.labelled(bench.Options("bf16", all=True), gated=False)
    assert every[8192, 18432, 7168] == "DeepSeek-V3"
    assert len(every) == 14
    assert list(gemm.labelled(bench.Options("bf16", ((1, 64, 64),)), gated=True)) == [(1, 64, 64)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_pair_of_rounds_treats_everybody_alike(count: int) -> None:
    for turn in (0, 2, 4):
        there, back = bench.order(count, turn), bench.order(count, turn + 1)
        assert sorted(there) == list(range(count))
        assert {there.index(i) + back.index(i) for i in range(count)} == {count - 1}
    assert count == 1 or bench.order(count, 0) != bench.order(count, 2)


def test_bursts_last_as_long_as_they_should_after_a_warm_up() -> None:
    gpu = FakeGpu()
    quick, slow = (lambda: 1e-3), (lambda: 1.0)
    rounds = []
    assert bench.compare([quick, slow], gpu.clock(2), lambda: rounds.append(1)) == [[1e-3] * 2, [1.0] * 2]
    assert [calls for call, calls in gpu.bursts if call is quick] == [3, 3, 10, 40, 10, 40]
    assert [calls for call, calls in gpu.bursts if call is slow] == [3, 3, 1, 1, 1, 1]
    assert len(rounds) == 2


def test_ratios_bear_a_card_that_grows_slower() -> None:
    theirs, ours = bench.compare([lambda: 1.1e-3, lambda: 1e-3], FakeGpu(drift=0.01).clock())
    assert theirs[-1] > 1.1 * theirs[0]
    assert bench.ratio(theirs, ours).median == pytest.approx(1.1, rel=0.01)
    assert bench.ratio([2.0, 3.0, 8.0], [1.0, 2.0, 2.0]) == (2.0, 1.5, 4.0)


def test_the_wrong_and_the_broken_are_not_timed() -> None:
    gpu = FakeGpu()

    def ready(seconds: float) -> Any:
        return lambda: lambda: seconds

    def broken() -> Any:
        raise RuntimeError(" no such kernel ")

    def missing() -> Any:
        raise ModuleNotFoundError("No module named 'peer'")

    def late() -> float:  # fails while others are timed
        return next(later)

    later = iter([1e-3] * 9)
    candidates = [
        Candidate("cuBLAS", ready(2e-3), lambda results: ""),
        Candidate("wrong", ready(5e-4), lambda results: f"wrong result: {results}"),
        Candidate("broken", broken, lambda results: ""),
        Candidate("missing", missing, lambda results: ""),
        Candidate("late", lambda: late, lambda results: ""),
        Candidate("Gemm", ready(1e-3), lambda results: "", ours=True),
    ]
    problem = Problem("1x1x1", lambda: candidates, flops=4e9, bytes=1.0, clock=gpu.clock())
    done: list[float] = []
    cublas, wrong, failed, absent, stopped, ours = bench.measure(problem, YARDSTICKS, lambda: READING, done.append)
    assert (absent.refused, stopped.refused) == (f"{bench.MISSING}: No module named 'peer'", "StopIteration: ")
    (none,) = bench.measure(Problem("1x1x1", broken), YARDSTICKS)
    assert (none.name, none.refused) == ("operands", "RuntimeError: no such kernel")
    assert (ours.microseconds, ours.teraflops, ours.ours) == (pytest.approx(1e3), pytest.approx(4.0), True)
    assert ours.ratios == (pytest.approx((2.0, 2.0, 2.0)), None)
    assert (cublas.refused, cublas.reading) == ("", READING)
    assert (wrong.refused, failed.refused) == ("wrong result: 0.0005", "RuntimeError: no such kernel")
    assert math.isnan(wrong.microseconds)
    assert 5e-4 not in {call() for call, _ in gpu.bursts if call is not late}
    assert done[-1] == 1.0
    assert done[:6] == sorted(done[:6])


def test_results_are_judged_by_their_size() -> None:
    want = torch.tensor([[1.0, -100.0], [3.0, 0.0]])
    assert gemm.wrong({"c": want}, 0.01, {"c": (want + 0.4).unsqueeze(-1)}) == ""
    assert "c is off by" in gemm.wrong({"c": want}, 0.01, {"c": want + 0.6})
    assert "c is off by nan" in gemm.wrong({"c": want}, 0.01, {"c": want * float("nan")})


def test_host_time_counts_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the GPU's time nor interruptions of single calls."""
    now = 0.0
    seconds = iter([4.0, 0.25, 0.25, 9.0, 0.25])

    def synchronize() -> None:
        nonlocal now
        now += 100.0

    def work() -> None:
        nonlocal now
        now += next(seconds)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert bench.host_seconds(work, 5) == 5 * 0.25


def test_table() -> None:
    text = printed(measured())
    lines = text.splitlines()
    (ours,) = [line for line in lines if line.startswith("  GemmSwiglu ")]
    (cublas, _) = [line for line in lines if line.startswith("  cuBLAS ")]
    assert "740 TF" in ours
    assert "1.097 ±.007" in ours
    assert "1.210 ±.015" in ours
    assert cublas.count("█") == 4
    assert ours.count("█") == 4
    assert ours.rstrip().endswith("▍")  # 4.388 characters
    assert "…" not in text.split("while timing")[0]  # 80 columns hold it
    assert text.count(LARGE) == 2  # its rows, and what was not run
    assert "4.00 TB/s" in text
    assert "while timing: SM clock 1755 to 1755 MHz, 690 to 690 W, at most 61 °C" in text
    assert "not run: 8192x28672x4096 Llama 3 8B, Triton, fused: OutOfResources" in text
    assert "clocks and power: unknown" in printed(dataclasses.replace(measured(), rows=ROWS[-1:]))


def test_long_problems_and_yardsticks_leave_figures_whole() -> None:
    """Those of attention: 80 columns hold the figures of each row."""
    label = "1x131072x16x16x192x128 window 1024, backward"
    rows = [Row(label, flash_attn.FLASH, 12345.6, (Ratio(1.0, 1.0, 1.0), Ratio(1.057, 1.05, 1.06)), 6e12, 1e9, True)]
    text = printed(dataclasses.replace(measured(), yardsticks=(flash_attn.FLASH, attention.GRAPH), rows=rows))
    assert "…" not in text
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {flash_attn.FLASH} ")]
    assert line.split()[1:8] == ["12345.6", "486", "TF", "1.000", "±.000", "1.057", "±.005"]


def test_csv_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    report.write_csv(measured(), path)
    padded = [row if row.ratios else dataclasses.replace(row, ratios=(None, None)) for row in ROWS]
    assert repr(report.read_csv(path)) == repr(dataclasses.replace(measured(), rows=padded))  # NaN is not equal to NaN
    gemm_line = path.read_text().splitlines()[2].split(",")
    assert [float(text) for text in gemm_line[10:12]] == pytest.approx([740.056, 0.284615], rel=1e-5)


@pytest.mark.parametrize("right", [True, False])
def test_a_run_from_start_to_end(
    right: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Fake")
    sampled = [sys.executable, "-c", "import time; print('1700, 500.0, 50', flush=True); time.sleep(60)"]
    monkeypatch.setattr(command_line, "command", lambda: sampled)
    clock = FakeGpu().clock()

    def candidates() -> list[Candidate]:
        ours = Candidate("Gemm", lambda: lambda: 1e-3, lambda results: "" if right else "wrong result", ours=True)
        missing = Candidate("missing", lambda: importlib.import_module("cudnn.none"))
        return [Candidate("cuBLAS", lambda: lambda: 2e-3, lambda results: ""), missing, ours]

    problems = [Problem("64x64x64", candidates, 1e9, 1e6, clock), Problem("1x1x1", candidates, 1e9, 1e6, clock)]
    benchmark = bench.Benchmark("GEMM", ("cuBLAS",), ("bf16",), {}, lambda options: problems)
    path, saved = tmp_path / "run.csv", tmp_path / "results" / "gemm.csv"
    output_files = command_line.Output(path, None, saved, RUN)
    code = command_line.run("gemm", benchmark, bench.Options("bf16"), output_files)
    output = capsys.readouterr().out
    assert code == (0 if right else 1)
    assert ("2.000 ±.000" in output) == right
    assert output.count(f"missing: {bench.MISSING}") == 2
    assert output.count("not run: ") == (2 if right else 4)
    found = report.read_csv(path)
    assert [(row.problem, row.name) for row in found.rows] == [
        (problem, name) for problem in ("64x64x64", "1x1x1") for name in ("cuBLAS", "missing", "Gemm")
    ]
    assert (found.device, found.title, found.dtype) == ("NVIDIA Fake", "GEMM", "bf16")
    lines = results.read(saved)
    assert {line.peer for line in lines} == {"cuBLAS", *(["Gemm"] if right else [])}  # what was timed
    assert {(line.hardware, line.commit, line.family, line.dtype) for line in lines} == {
        ("NVIDIA Fake", "abc", "gemm", "bf16")
    }
    if right:
        ratio = next(line for line in lines if line.metric == "ratio to cuBLAS" and line.shape == "64x64x64")
        assert (ratio.peer, ratio.value, ratio.unit, ratio.ours) == ("Gemm", 2.0, "x", 1)


def test_shows_a_csv_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    report.write_csv(measured(), path)
    code, output = run("--from-csv", str(path))
    assert code == 0
    assert "NVIDIA H200; PyTorch 2.11.0" in output
    assert "GemmSwiglu" in output


def test_roofline() -> None:
    copy = Row("device copy", "device copy", 1.0, bytes=4e6)  # 4 TB/s
    gemms = [
        Row("a", "cuBLAS", 1.0, flops=7e8),
        Row("a", "ours", 1.0, flops=8e8),
        Row("a", "no", 1.0, flops=9e8, refused="-"),
    ]
    assert report.roof([copy, *gemms], flops=1e12, size=1e9) == 800  # 1000 a byte: the peak
    assert report.roof([copy, *gemms], flops=1e10, size=1e9) == 40  # 10 a byte: the bandwidth
    assert report.roof(gemms, 1e12, 1e9) is None
    assert report.roof([copy], 1e12, 1e9) is None
    assert report.datasheet("NVIDIA H200", "fp8") == 1979
    assert report.datasheet("NVIDIA H200", "nvfp4") is None
    assert report.datasheet("Some other GPU", "bf16") is None


RUN = results.Run("NVIDIA Fake", "580.1", "13.0", "2.11.0", "abc", "2026-11-29")


def test_result_files_keep_each_metric(tmp_path: Path) -> None:
    rows = [dataclasses.replace(row, spread=row.microseconds / 100, memory=2e9) for row in ROWS]
    rows[1] = dataclasses.replace(rows[1], package=bench.OURS_PACKAGE)
    rows.append(Row("4x4096x2 prefill", "cudnn", 1e6, (None,), tokens=16384.0, spread=1e4))
    path = results.path_of(tmp_path / "new", "gemm_swiglu", "fp8")
    results.write(path, list(results.results(RUN, "gemm_swiglu", "bf16", YARDSTICKS, rows)))
    assert path.name == "gemm_swiglu_fp8.csv"
    lines = {(line.shape, line.case, line.peer, line.metric): line for line in results.read(path)}
    ours = ("8192x28672x4096", "Llama 3 8B", "GemmSwiglu")
    assert lines[(*ours, "time")].value == 2600
    assert lines[(*ours, "time")].spread == 26
    assert (lines[(*ours, "rate")].value, lines[(*ours, "rate")].unit) == (740.1, "TFLOP/s")
    assert (lines[(*ours, "ratio to cuBLAS")].value, lines[(*ours, "ratio to cuBLAS")].spread) == (1.097, 0.007)
    assert lines[(*ours, "memory")].value == 2
    assert lines[(*ours, "time")].peer_version == cudnn.__version__
    assert lines["8192x28672x4096", "Llama 3 8B", "cuBLAS", "time"].peer_version == torch.__version__
    assert ("8192x28672x4096", "Llama 3 8B", "Triton, fused", "time") not in lines  # it was not timed
    assert ("8192x28672x4096", "Llama 3 8B", "cuBLAS", "ratio to cuBLAS") not in lines
    assert (lines["", "device copy", "device copy", "rate"].unit) == "TB/s"
    assert lines["4x4096x2", "prefill", "cudnn", "rate"].value == 16380
    assert lines["4x4096x2", "prefill", "cudnn", "rate"].unit == "tokens/s"
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="got columns"):
        results.read(other)


@pytest.mark.parametrize(
    ("label", "shape", "case"),
    [
        ("4x4096x16x16x128x128 causal, forward", "4x4096x16x16x128x128", "causal, forward"),
        ("device copy", "", "device copy"),
        ("32768x4096", "32768x4096", ""),
    ],
)
def test_a_problem_has_a_shape_and_a_case(label: str, shape: str, case: str) -> None:
    assert results.problem_of(label) == (shape, case)


def test_versions_and_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert results.version_of("pytest") == pytest.__version__
    assert results.version_of("no-such-package") == ""
    monkeypatch.setattr(cudnn, "__file__", str(tmp_path / "python" / "cudnn" / "__init__.py"))
    assert results.source_commit() == ""
    code, output = run("sdpa", "--save", str(tmp_path))
    assert code == 2
    assert "a revision, where the package does not run from a git clone" in output


def test_all_runs_each_benchmark_in_a_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each writes its file or fails; one that does not end is killed, and what has no time left does not start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite, "GRACE", 0.2)
    monkeypatch.setattr(suite, "LEAST", 0.5)
    bodies = {
        "moe": f"open({str(tmp_path / 'moe.csv')!r}, 'w')",
        "sdpa": "raise SystemExit(3)",
        "host": "import time; time.sleep(60)",
    }
    families = [suite.Family(name, 1.5) for name in (*bodies, "nsa")]
    monkeypatch.setattr(suite, "FAMILIES", tuple(families))
    commands = []

    def command(family: suite.Family, *options: Any) -> list[str]:
        commands.append((family.name, *options))
        return [sys.executable, "-c", bodies[family.name]]

    real = suite.command(suite.Family("gemm_swiglu", 9.0, "fp8"), tmp_path, "abc", True, 9.0)
    assert real[3:] == ["bench", "gemm_swiglu", "--save", str(tmp_path), "--commit", "abc", "--dtype", "fp8", "--quick",
                        "--limit", "9"]  # fmt: skip
    monkeypatch.setattr(suite, "command", command)
    outcomes = {o.family.name: o.problem for o in suite.run(families[:3], tmp_path, "abc", True, 60.0)}
    assert outcomes == {"moe": "", "sdpa": "exit code 3: see above", "host": "killed: it did not end in time"}
    assert commands[0] == ("moe", tmp_path, "abc", True, 1.5)
    assert (tmp_path / "moe.csv").exists()
    assert [o.problem for o in suite.run(families[3:], tmp_path, "abc", False, 0.1)] == [
        "not started: --limit 0 is used up"
    ]
    result = invoke("bench", "all", "--save", tmp_path, "--commit", "abc", "--only", "moe", "--quick")
    assert (result.exit_code, result.output.split()[:2]) == (0, ["moe:", "0"])
    assert invoke("bench", "all", "--save", tmp_path, "--commit", "abc", "--only", "sdpa").exit_code == 1
    for options, reason in (
        ((), "--save: got nothing"),
        (("--save", tmp_path, "--commit", "a", "--only", "no"), "--only: got no; allowed: moe, sdpa, host, nsa."),
        (("--save", tmp_path, "--commit", "a", "--dtype", "fp8"), "with --save, --quick, --only"),
    ):
        failed = invoke("bench", "all", *options)
        assert failed.exit_code == 2
        assert reason in words(failed).replace("for ", "")


def test_all_ends_its_process_on_sigterm(tmp_path: Path) -> None:
    """``timeout`` and job schedulers send SIGTERM; a benchmark that went on would disturb the next one."""
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"""
import sys
from cudnn.bench import suite
suite.command = lambda *_: [sys.executable, "-c", {child!r}]
list(suite.run([suite.Family("host", 1.0)], "", "", False))
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_all_names_benchmarks_that_exist() -> None:
    keys = [family.key for family in suite.FAMILIES]
    assert len(keys) == len(set(keys))
    assert all(not x.dtype or x.dtype in bench.find(x.name).dtypes[1:] for x in suite.FAMILIES)
    assert {x.name for x in suite.FAMILIES} >= {"model", "moe", "moe_decode", "sdpa", "nsa", "host", "grouped_gemm_fp8"}
    needed = {"model", "moe", "moe_decode", "sdpa", "flash_attn", "gemm_swiglu", "grouped_gemm", "host", "nsa"}
    first = suite.FAMILIES[: len(needed)]
    assert {family.name for family in first} == needed
    assert sum(family.seconds for family in first) <= suite.QUICK_LIMIT


def test_problems_after_the_limit_do_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Fake")
    monkeypatch.setattr(command_line, "command", lambda: ["no-such-program"])
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(command_line, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    ours = [Candidate("Gemm", lambda: lambda: 1e-3, ours=True)]
    problems = [Problem(str(i), lambda: ours, 1e9, clock=FakeGpu().clock()) for i in range(4)]
    benchmark = bench.Benchmark("GEMM", ("cuBLAS",), ("bf16",), {}, lambda options: problems)
    path = tmp_path / "gemm.csv"
    code = command_line.run("gemm", benchmark, bench.Options("bf16"), command_line.Output(None, None, path, RUN), 25.0)
    assert code == 0
    assert "not run: the last 2 of 4 problems, by --limit" in capsys.readouterr().out
    assert {line.case for line in results.read(path)} == {"0", "1"}


WITH_MEMORY = [dataclasses.replace(row, memory=2e9) for row in ROWS[:2]]
MANY = [dataclasses.replace(ROWS[0], problem=str(i)) for i in range(30)]


@pytest.mark.parametrize(
    "rows",
    [ROWS, ROWS[4:5], ROWS[:2], WITH_MEMORY, MANY],
    ids=["all", "bytes only", "without a copy", "memory", "many"],
)
def test_plot(tmp_path: Path, rows: list[Row]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    report.plot(dataclasses.replace(measured(), rows=rows), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert int.from_bytes(path.read_bytes()[16:20], "big") < 4000  # pixels across


def test_monitor() -> None:
    lines = "print('1700, 500.0, 50\\n1800, 600.0, 60\\n1750, 700.0, 55\\n[N/A], [N/A], 40\\n', flush=True)"
    with monitor.Monitor([sys.executable, "-c", f"{lines}; import time; time.sleep(600)"]) as watched:
        while len(watched._samples) < 3:  # or until pytest's time limit
            time.sleep(0.01)
        assert watched.read() == (1750.0, 600.0, 60.0)
        assert watched.read() is None
    with monitor.Monitor(["no-such-program"]) as watched:
        assert watched.read() is None
