"""The pytest plugin, which is installed with the package.

`@pytest.mark.emulate("sm_90a", "sm_100a")` runs a test once for each chip, with its kernels in the emulator and with
race detection. More arguments are those of `ptx_emulator.emulate`: `@pytest.mark.emulate("sm_100a", warn=["PE105"])`.
With `pytest --emulate-schedules 20` each of these tests runs under 20 schedules. An error of a kernel fails the test. A
failed test has the report of its launches in a section "emulator" of pytest's output. `--emulate-report FOLDER` writes
the reports of each test, passed or failed, as JSON to a file of the folder.

`ptx_emulator.run_ptx` and `run_triton` in a marked test take its options and schedule, too.

Fixtures: `emulation`, the `Report` of a marked test, which has `arch`; `emulate`, which begins a block as
`ptx_emulator.emulate` does, with `races=True`; `emulated_arch`, parametrized over the chips.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    import ptx_emulator

ARCHES = ("sm_90a", "sm_100a")
_PARAMETER = "_emulate_with"


class _Run(NamedTuple):
    """What a marked test runs with."""

    arch: str
    scheduler: str
    seed: int

    def __str__(self) -> str:
        seed = "" if self.scheduler == "lowest-pc" else f"-{self.seed}"
        return f"{self.arch}-{self.scheduler}{seed}"


_reports = pytest.StashKey[list["ptx_emulator.Report"]]()
_active = pytest.StashKey["ptx_emulator.Report"]()


def schedules(count: int) -> list[tuple[str, int]]:
    """Schedulers and seeds: the fast one, then the lazy one and the random one, alternately."""
    others = [(("lazy", "random")[number % 2], number // 2) for number in range(count - 1)]
    return [("lowest-pc", 0), *others]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx_emulator", "kernels in the emulator")
    group.addoption(
        "--emulate-schedules",
        type=_positive,
        default=1,
        metavar="N",
        help="Run each test with the mark 'emulate' under N schedules of its threads and copies (1).",
    )
    group.addoption(
        "--emulate-report",
        type=Path,
        metavar="FOLDER",
        help="Write what each test's kernels did and found to a JSON file in FOLDER.",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise pytest.UsageError(f"--emulate-schedules must be 1 or more; got {text}")
    return number


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "emulate(*arches, **options): run the test's kernels in ptx_emulator, once for each of arches (sm_90a, "
        "sm_100a), with race detection; options are those of ptx_emulator.emulate",
    )


def _marks(node: Any) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Chips and options: of the closest mark that has chips, and of all marks, the closest one first."""
    marks = list(node.iter_markers("emulate"))
    if not marks:
        return None
    arches = next((mark.args for mark in marks if mark.args), ARCHES)
    wrong = [arch for arch in arches if arch not in ARCHES]
    if wrong:
        raise pytest.UsageError(f"{node.nodeid}: the mark emulate takes {', '.join(ARCHES)}; got {wrong[0]!r}")
    options: dict[str, Any] = {}
    for mark in reversed(marks):
        options |= mark.kwargs
    return arches, options


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = _marks(metafunc.definition)
    if marks is None:
        return
    arches, options = marks
    chosen = schedules(int(metafunc.config.getoption("emulate_schedules") or 1))
    if {"scheduler", "seed"} & options.keys():  # the test's own
        chosen = [(options.get("scheduler", "lowest-pc"), options.get("seed", 0))]
    runs = [_Run(arch, *each) for arch in arches for each in chosen]
    metafunc.fixturenames.append(_PARAMETER)
    metafunc.parametrize(_PARAMETER, runs, ids=map(str, runs), indirect=True)


@pytest.fixture
def _emulate_with(request: pytest.FixtureRequest) -> _Run:
    return request.param


@pytest.fixture
def emulation(request: pytest.FixtureRequest, _emulate_with: _Run) -> ptx_emulator.Report:
    """The report of a test with the mark `emulate`; its `arch` is the chip."""
    return request.node.stash[_active]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and _PARAMETER in callspec.params:
        from ptx_emulator import Report

        item.stash[_active] = Report(arch=callspec.params[_PARAMETER].arch)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    __tracebackhide__ = True
    report = item.stash.get(_active, None)
    if report is None:
        return (yield)
    from ptx_emulator import Fault, emulate

    run: _Run = item.callspec.params[_PARAMETER]  # type: ignore[attr-defined]
    marks = _marks(item)
    assert marks is not None
    options = {"races": True, **marks[1], "scheduler": run.scheduler, "seed": run.seed}
    item.stash.setdefault(_reports, []).append(report)
    ended = False
    try:
        with emulate(run.arch, report=report, **options):
            result = yield
            ended = True
        return result
    except Fault as fault:
        if ended or fault.__cause__ is not None:  # raised by the end of the block: no line of the test is in its trace
            fault = fault.with_traceback(None)
        raise fault


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        found = [each for each in item.stash.get(_reports, []) if each.launches]
        if report.failed:
            report.sections += [("emulator", str(each)) for each in found]
        folder = item.config.getoption("emulate_report")
        if found and folder is not None:
            _write(folder, item.nodeid, report.outcome, found)
    return report


def _write(folder: Path, test: str, outcome: str, reports: list[ptx_emulator.Report]) -> None:
    """A name from the test's, and a hash, for names can differ in characters that file names cannot have."""
    readable, digest = re.sub(r"[^\w.-]+", "_", test)[-150:], hashlib.sha256(test.encode()).hexdigest()[:8]
    text = json.dumps({"test": test, "outcome": outcome, "reports": [each.as_dict() for each in reports]}, indent=2)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{readable}-{digest}.json").write_text(text + "\n")


@pytest.fixture(params=ARCHES)
def emulated_arch(request: pytest.FixtureRequest) -> str:
    """Parametrized over the chips."""
    return str(request.param)


@pytest.fixture
def emulate(
    request: pytest.FixtureRequest,
) -> Callable[..., AbstractContextManager[ptx_emulator.Report]]:
    """`emulate(arch, **options)` as `ptx_emulator.emulate`, with races on; a failed test has its reports too."""
    from ptx_emulator import emulate as begin

    @contextmanager
    def recorded(arch: str, **options: Any) -> Iterator[ptx_emulator.Report]:
        with begin(arch, **{"races": True, **options}) as report:
            request.node.stash.setdefault(_reports, []).append(report)
            yield report

    return recorded
