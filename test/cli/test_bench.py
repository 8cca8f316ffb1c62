"""``cudnn bench``: what can be tested without a GPU."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import itertools
import math
import statistics
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
from cudnn import bench, lazy
from cudnn.backend import handle
from cudnn.bench import (
    Candidate,
    Clock,
    Problem,
    Ratio,
    Reading,
    Row,
    attention,
    dense_gemm,
    gated_mlp,
    gemm,
    gemm_peers,
    grouped,
    grouped_fp8,
    model,
    moe,
    moe_decode,
    moe_peers,
    monitor,
    nsa,
    operands,
    report,
    results,
    suite,
)
from cudnn.cli import bench as command_line
from cudnn.cli.bench import table
from cudnn.fused import registry
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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    now = 0.0

    def work() -> None:
        nonlocal now
        now += 0.25

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert bench.host_seconds(work, 2) == 0.5


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
    rows = [Row(label, attention.FLASH, 12345.6, (Ratio(1.0, 1.0, 1.0), Ratio(1.057, 1.05, 1.06)), 6e12, 1e9, True)]
    text = printed(dataclasses.replace(measured(), yardsticks=(attention.FLASH, attention.GRAPH), rows=rows))
    assert "…" not in text
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {attention.FLASH} ")]
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


def test_all_names_benchmarks_that_exist() -> None:
    keys = [family.key for family in suite.FAMILIES]
    assert len(keys) == len(set(keys))
    assert all(not x.dtype or x.dtype in bench.find(x.name).dtypes[1:] for x in suite.FAMILIES)
    assert {x.name for x in suite.FAMILIES} >= {"model", "moe", "moe_decode", "sdpa", "nsa", "host", "grouped_gemm_fp8"}
    needed, total = ("model", "moe", "sdpa", "gemm_swiglu", "grouped_gemm", "host", "nsa", "moe_decode"), 0.0
    for family in suite.FAMILIES[: len(needed)]:
        total += family.seconds
    assert {family.name for family in suite.FAMILIES[: len(needed)]} == set(needed)
    assert total <= suite.QUICK_LIMIT


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


def in_torch(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replaces it in PyTorch too: ``lazy.torch`` takes all of PyTorch's names again when it lacks one."""
    for module in (lazy.torch, torch):
        monkeypatch.setattr(module, name, value)


def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks run on CPU tensors, and nothing is compiled."""
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    in_torch(monkeypatch, "compile", lambda function, **options: function)


def timed(problem: Problem, yardsticks: tuple[str, ...]) -> list[Row]:
    """Every call takes a millisecond."""
    clock = Clock(lambda call, calls: 1e-3, 1, 1e-3, 1e-3, min)
    return bench.measure(dataclasses.replace(problem, clock=clock), yardsticks)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in bench.BENCHMARKS if name in registry.gemms() for dtype in ("bf16", "nvfp4")),
        *(("gemm_swiglu", dtype) for dtype in ("fp16", "fp8", "fp8_128", "mxfp8")),
    ],
)
def test_candidates_of_gemms_agree_on_cpu_tensors(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The APIs take what the benchmark gives them: on CPU tensors they run their references."""
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(gemm, "COPY_BYTES", 1 << 12)
    benchmark = bench.find(name)
    options = bench.Options(dtype, ((256, 256, 128),), without_optional=bool(benchmark.optional))
    rows = [row for problem in benchmark.problems(options) for row in timed(problem, benchmark.yardsticks)]
    refused = {row.name for row in rows if row.refused}
    allowed = {"our GEMM alone", "Triton, fused", "Triton, fused, no ab12", "torch._scaled_mm, blocks"}
    allowed |= {gemm_peers.QUACK, gemm_peers.DEEP_GEMM}  # not installed
    assert refused <= allowed, [row.refused for row in rows]
    assert [row.problem for row in rows][-1] == "host time, warm"


@pytest.mark.parametrize("name", [name for name in registry.packages() if "grouped" in name])
def test_candidates_of_grouped_gemms_agree_on_cpu_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find(name)
    step = registry.find(name).group_rows
    shape = (128, 192, 100, 3) if registry.find(name).tokens == "k" else (100 // step * step or 3 * step, 128, 128, 3)
    rows = [
        row
        for routing in grouped.ROUTINGS
        for problem in benchmark.problems(bench.Options("bf16", (shape,), routing=routing))[:1]
        for row in timed(problem, benchmark.yardsticks)
    ]
    assert {row.name for row in rows if row.refused} <= {"Triton", gemm_peers.QUACK}, [row.refused for row in rows]
    assert len({row.name for row in rows}) >= 3


def grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """``torch._grouped_mm``, which the CPU has not in every version."""
    spans = list(itertools.pairwise([0, *offs.tolist()]))
    if b.ndim == 2:
        return torch.stack([a[:, x:y] @ b[x:y] for x, y in spans])
    return torch.cat([a[x:y] @ b[e] for e, (x, y) in enumerate(spans)])


def test_candidates_of_a_gated_mlp_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    shape, wide = (96, 128, 64), "cuBLAS, float32 result"  # which the CPU has not
    problems = bench.find("gated_mlp").problems(bench.Options("bf16", (shape,)))
    assert [problem.flops for problem in problems] == [18.0 * 96 * 128 * 64, 6.0 * 96 * 128 * 64]
    for problem in (*problems, *gated_mlp.gemm_problems(shape)):
        candidates = [each for each in problem.candidates() if each.name != wide]
        assert all(each.prepare is not None for each in candidates)
        refused = {each.name: each.check(each.prepare()()) for each in candidates if each.prepare is not None}
        assert set(refused.values()) == {""}, (problem.label, refused)
        zeros = {name: 0 * value for name, value in candidates[0].prepare()().items()}  # pyright: ignore[reportOptionalCall]
        assert "wrong result" in candidates[0].check(zeros)


def test_candidates_of_a_layer_of_experts_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_the_cpu(monkeypatch)
    monkeypatch.setattr(bench, "_peak", lambda call: 5e9)
    benchmark, shape = bench.find("moe"), (50, 64, 32, 4, 2)
    assert moe.flops_of(shape) == (6 * 50 * 64 * 32 * 2, 6 * 50 * 64 * 32 * 2, 12 * 50 * 64 * 32 * 2)
    here = [moe.PEER, *([moe.TRANSFORMERS] if moe_peers.has_transformers() else []), moe.LOOP, moe.OURS]
    shown = report.Report("", "bf16", "", "", benchmark.yardsticks)
    for problem in benchmark.problems(bench.Options("bf16", (shape,))):
        rows = timed(problem, benchmark.yardsticks)
        assert {row.name: row.refused for row in rows} == dict.fromkeys(here, ""), problem.label
        assert {row.memory for row in rows} == {5e9}
        shown.rows += rows
    assert "5.00" in printed(shown)
    report.write_csv(shown, tmp_path / "run.csv")
    assert report.read_csv(tmp_path / "run.csv").rows[-1].memory == rows[-1].memory
    assert len(benchmark.problems(bench.Options("bf16"))) == 9
    assert len(benchmark.problems(bench.Options("bf16", all=True))) == 3 * (3 + 9 + 5)
    refused = {c.name: c.check({"y": torch.zeros(50, 64)}) for c in moe.candidates(shape, "forward")}
    assert all("wrong result: y is off by" in refused[name] for name in here)
    (fp8,) = (c for c in moe.candidates((50, 128, 128, 4, 2), "forward") if c.name == moe.FP8)
    assert not fp8.check(fp8.prepare()())


def flash_attention(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[Any, Any]) -> Any:
    """FlashAttention-4's interface, of (b, s, h, d): bottom right, with the log-sum-exp."""
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    left, right = (None, 0) if causal else window_size
    mask = mask if right is None else mask.tril(right)
    mask = mask if left is None else mask.triu(-left)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return o.transpose(1, 2), None


def test_candidates_of_attention_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(flash_attn_func=flash_attention))
    deselected: list[Any] = []
    monkeypatch.setattr(cudnn.pygraph, "deselect_engines", lambda self, names: deselected.append(names))
    benchmark, shape = bench.find("sdpa"), (2, 70, 4, 2, 64, 64)
    for case in (attention.Case(*shape), attention.Case(*shape, causal=True, window=20, dtype="fp16")):
        for which in attention.PASSES:
            found = [x for x in attention.candidates(case, which) if x.name != attention.FLEX]
            assert found[0].name == attention.FLASH
            assert [x.check(x.prepare()()) for x in found] == [""] * len(found), (case.label, which)
            assert found[-1].ours
            assert "wrong result: " in found[-1].check(collections.defaultdict(lambda: torch.zeros(2, 4, 70, 64)))
    assert deselected == [["fused"]] * 8  # graphs, of which each pass has two: ours would be timed as cuDNN's
    assert attention.Case(1, 4, 1, 1, 8, 8, causal=True, window=1).flops("forward") == 2 * (8 - 2) * 16
    assert len(benchmark.problems(bench.Options("bf16", benchmark.quick, quick=True))) == 9
    assert len(benchmark.problems(bench.Options("bf16", all=True))) > 100


def test_candidates_of_native_sparse_attention_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    monkeypatch.setattr(nsa, "CHECKED_TOKENS", 128)
    benchmark, shape = bench.find("nsa"), (128, 2, 1, 64)
    assert benchmark.quick == nsa.SHAPES
    assert nsa.flops_of(shape, nsa.STEPS[3]) == 4 * 128 * 2 * 64 * 2 * 64
    assert len(benchmark.problems(bench.Options("bf16", all=True))) == 6 * len(nsa.STEPS)
    quick = [x.label for x in benchmark.problems(bench.Options("bf16", nsa.SHAPES, quick=True))]
    assert not any("alike" in label for label in quick)
    assert all("whole" in label for label in quick[:6])
    assert len(quick) == 3 * 7
    for problem, step in zip(benchmark.problems(bench.Options("bf16", (shape,))), nsa.STEPS, strict=True):
        peer, ours, *_ = problem.candidates()
        assert (peer.name, ours.name, ours.ours) == (nsa.PEER, nsa.OURS, True)
        assert ours.prepare is not None
        results = ours.prepare()()
        assert ours.check(results) == "", problem.label
        changed = {x: found.roll(1, 1) + 1 for x, found in results.items()}
        few_tokens = nsa.make_tensors(shape, step.correlated)
        assert nsa.wrong(step, few_tokens, changed).startswith("wrong result: "), problem.label


def test_candidates_of_fp8_grouped_gemms_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find("grouped_gemm_fp8")
    (problem,) = benchmark.problems(bench.Options("fp8", ((256, 128, 256, 2),)))
    rows = {row.name: row.refused for row in timed(problem, benchmark.yardsticks)}
    assert [name for name, refused in rows.items() if not refused] == [
        grouped_fp8.BF16,
        grouped_fp8.OURS_BF16,
        grouped_fp8.OURS,
    ]
    assert rows[gemm_peers.DEEP_GEMM] == f"{bench.MISSING}: No module named 'deep_gemm'"
    candidates = {candidate.name: candidate for candidate in grouped_fp8.candidates((256, 128, 256, 2))}
    assert candidates[grouped_fp8.OURS].check({"d": torch.zeros(256, 128)}).startswith("wrong result: d is off")
    assert len(benchmark.problems(bench.Options("fp8"))) == len(grouped_fp8.SHAPES)


def test_deep_gemm_gets_aligned_scales_and_the_expert_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that computes what DeepGEMM documents: operands (data, scales), B by expert, an expert for a row."""
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)

    def dequantized(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows = 1 if scales.shape[-2] == x.shape[-2] else 128
        return x.float() * scales.repeat_interleave(rows, -2).repeat_interleave(128, -1)

    def dense(a: Any, b: Any, d: torch.Tensor) -> None:
        d.copy_(dequantized(*a) @ dequantized(*b).T)

    def by_expert(a: Any, b: Any, d: torch.Tensor, expert_of_row: torch.Tensor) -> None:
        assert expert_of_row.dtype == torch.int32
        weights = dequantized(*b)
        for expert in range(len(weights)):
            rows = expert_of_row == expert
            d[rows] = (dequantized(*a)[rows] @ weights[expert].T).to(d.dtype)

    layout = types.SimpleNamespace(get_mn_major_tma_aligned_tensor=lambda x: x.mT.contiguous().mT)
    library = types.SimpleNamespace(fp8_gemm_nt=dense, m_grouped_fp8_gemm_nt_contiguous=by_expert)
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    monkeypatch.setitem(sys.modules, "deep_gemm.utils.layout", layout)
    for name, shape, dtype in (
        ("gemm_swiglu", (256, 256, 256), "fp8_128"),
        ("grouped_gemm_fp8", (256, 128, 256, 2), "fp8"),
    ):
        benchmark = bench.find(name)
        rows = timed(benchmark.problems(bench.Options(dtype, (shape,)))[0], benchmark.yardsticks)
        (peer,) = (row for row in rows if row.name == gemm_peers.DEEP_GEMM)
        assert (peer.refused, peer.package) == ("", "sgl-deep-gemm")
    inputs = {"padded_offsets": torch.tensor([100, 256]), "a": torch.zeros(256, 128, 1)}
    inputs |= {"b": torch.zeros(128, 128, 2), "sfa": torch.ones(256, 1, 1), "sfb": torch.ones(1, 1, 2)}
    with pytest.raises(ValueError, match="ends at no multiple of 128"):
        grouped_fp8.deep_gemm(inputs)


def test_quack_runs_the_fastest_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        tile_m: int = 0
        tile_n: int = 0
        pingpong: bool = False

    used = []

    def tuned(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, config: Config, alpha: float = 1.0) -> None:
        used.append(config)
        d.copy_(alpha * a @ b)

    interface = types.SimpleNamespace(
        default_config=lambda device: Config(), gemm_tuned=types.SimpleNamespace(fn=tuned)
    )
    monkeypatch.setitem(sys.modules, "quack", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    clock = dataclasses.replace(gemm_peers.GPU, seconds=lambda call, calls: call() and float(used[-1].tile_n))
    monkeypatch.setattr(gemm_peers, "GPU", clock)
    a, b, d = torch.ones(4, 2), torch.ones(2, 3), torch.empty(4, 3)
    call = gemm_peers.quack(a, b, d, "z", alpha=0.5)
    assert (call()["z"] == 1).all()
    assert used[-1].tile_n == 192


def test_calls_of_the_host_benchmark_run_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find("host")
    assert {problem.clock for problem in benchmark.problems(bench.Options("bf16"))} == {bench.HOST}
    for problem in benchmark.problems(bench.Options("bf16", ((64,),))):
        rows = timed(problem, benchmark.yardsticks)
        assert [row.refused for row in rows] == [""] * len(rows), problem.label
        assert rows[0].name == "torch.add(out=)"
        assert sum(row.ours for row in rows) >= 1


def test_a_model_runs_with_transformers_implementations_and_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    on_the_cpu(monkeypatch)
    small = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    monkeypatch.setattr(model, "SIZES", small)
    benchmark = bench.find("model")
    prefill, training = benchmark.problems(bench.Options("bf16", ((2, 40, 1),)))
    for problem in (prefill, training):
        rows = timed(problem, benchmark.yardsticks)
        assert [(row.name, row.refused) for row in rows] == [(name, "") for name in model.IMPLEMENTATIONS]
        assert rows[1].rate == "240 k tok/s"  # 80 tokens in a third of a millisecond
    peer, ours, _ = model.candidates((2, 40, 1), "training")
    assert peer.check(peer.prepare()()) == ""
    assert ours.check({"loss": torch.tensor(1.0)}).startswith("wrong result: loss is off")


def test_candidates_of_decode_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    in_torch(monkeypatch, "_grouped_mm", grouped_product)
    benchmark = bench.find("moe_decode")
    (problem,) = benchmark.problems(bench.Options("bf16", ((3, 128, 128, 4, 2),)))
    rows = timed(problem, benchmark.yardsticks)
    assert [(row.name, row.refused) for row in rows] == [(name, "") for name in moe_decode.NAMES]
    assert problem.flops == 6 * 3 * 128 * 128 * 2


def test_lists_of_blocks_that_rows_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "DEVICE", "cpu")
    common = []
    for correlated in (False, True):
        rows = nsa.block_lists(8192, 2, correlated)[0]
        assert rows.shape == (8192, 2, 16)
        row_block = torch.arange(8192)[:, None] // 64
        assert (rows.amax(-1) == row_block).all()
        assert (rows == 0).any(-1).all()
        blocks = rows.sort(-1).values
        assert ((blocks.diff(dim=-1) > 0) | (blocks[..., 1:] < 0)).all()
        common.append(sum(len(set(x) & set(y)) for x, y in itertools.pairwise(rows[4096:, 0].tolist())) / 4095)
    assert common[0] < 7 < 13 < common[1]


def test_layers_of_models_and_routings() -> None:
    api = registry.find("grouped_gemm_glu")
    some = grouped.shapes(api, bench.Options("bf16"))
    assert some[(65536, 1536, 2048, 128)] == "Qwen3-30B-A3B, 8192 tokens"
    assert (65536, 2048, 768, 128) in grouped.shapes(registry.find("grouped_gemm_quant"), bench.Options("bf16"))
    assert (65536, 768, 2048, 128) in grouped.shapes(registry.find("grouped_gemm_dglu"), bench.Options("bf16"))
    assert (1536, 2048, 65536, 128) in grouped.shapes(registry.find("grouped_gemm_wgrad"), bench.Options("bf16"))
    assert len(grouped.shapes(api, bench.Options("bf16", all=True))) > 5 * 7
    assert grouped.ends("uniform", 4, 100) == [25, 50, 75, 100]
    stops = grouped.ends("zipf", 8, 1000)
    sizes = sorted((y - x for x, y in itertools.pairwise([0, *stops])), reverse=True)
    assert stops[-1] == 1000
    assert sizes[0] == pytest.approx(2 * sizes[1], abs=2) == pytest.approx(8 * sizes[7], abs=8)


def test_candidates_of_rmsnorm_agree_on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch)
    benchmark = bench.find("rmsnorm_rht_amax")
    problem = benchmark.problems(bench.Options("bf16", ((64, 512),)))[0]
    rows = timed(problem, benchmark.yardsticks)
    assert [row.refused for row in rows] == [""] * 4
    assert all(row.ratios == ((1.0, 1.0, 1.0),) for row in rows)
    assert rows[0].rate == "0.00 TB/s"


def test_the_triton_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = dense_gemm.source_module(PEER)
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    source = importlib.import_module("triton.compiler").ASTSource
    for dtype, keep in (("bf16", True), ("fp8e4nv", False)):
        types = {**dict.fromkeys(("a", "b"), f"*{dtype}"), **dict.fromkeys(("ab12", "c"), "*bf16"), "alpha": "fp32"}
        types |= dict.fromkeys(("m", "n", "k"), "i32")
        constants = {**module.configurations()[0].kwargs, "CTAS": 132, "KEEP": keep}
        aligned = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 5, 6, 7)}
        kernel = module.gemm_swiglu_kernel
        made = source(kernel, types | dict.fromkeys(constants, "constexpr"), constants, aligned)
        compiled = triton.compile(made, target=target, options={"num_warps": 8, "num_stages": 3})
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async.bulk.tensor" in compiled.asm["ptx"]


def test_without_the_source_tree_the_triton_kernel_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cudnn, "__file__", str(tmp_path / "site-packages" / "cudnn" / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="part of the source tree"):
        dense_gemm.source_module.__wrapped__(PEER)
