"""The command `python -m calibration`."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import calibration
from calibration import Case, Difference, Golden
from ptx_emulator.errors import EmulatorError, UnsupportedPTX


@dataclass
class Row:
    """One family of the table."""

    cases: int = 0
    equal: int = 0
    within: int = 0
    refused: int = 0
    wrong: int = 0
    missing: int = 0
    ulps: int = 0
    seconds: float = 0.0
    problems: dict[str, str] = field(default_factory=dict)


def judge(case: Case, golden: Golden, arch: str, row: Row) -> None:
    """Runs a case in the emulator and enters the outcome."""
    row.cases += 1
    start = time.perf_counter()
    if case.id not in golden.outputs:
        row.missing += 1
        row.problems[case.id] = "no result of a GPU"
        return
    fingerprint, kept = golden.outputs[case.id]
    if fingerprint != case.fingerprint(arch):
        row.missing += 1
        row.problems[case.id] = "the case is not the one the GPU ran"
        return
    try:
        found: Difference | str = calibration.compare(case, kept, calibration.run_emulated(case, arch))
    except (UnsupportedPTX, NotImplementedError) as error:
        if case.refused:
            row.refused += 1
            return
        found = f"{type(error).__name__}: {error}"
    except EmulatorError as error:
        found = f"{type(error).__name__}: {error}"
    finally:
        row.seconds += time.perf_counter() - start
    if isinstance(found, str) or found.wrong:
        row.wrong += 1
        row.problems[case.id] = str(found)
        return
    row.ulps = max(row.ulps, found.ulps)
    if found.unequal:
        row.within += 1
    else:
        row.equal += 1


def table(rows: dict[str, Row]) -> str:
    heads = ("family", "cases", "equal", "within", "refused", "wrong", "missing", "ulps")
    lines = ["{:12} {:>6} {:>6} {:>7} {:>8} {:>6} {:>8} {:>9}".format(*heads)]
    for name, row in rows.items():
        lines.append(
            f"{name:12} {row.cases:6} {row.equal:6} {row.within:7} {row.refused:8} {row.wrong:6} "
            f"{row.missing:8} {row.ulps:9}"
        )
    for row in rows.values():
        lines += [f"{name}: {why.splitlines()[0][:160]}" for name, why in row.problems.items()]
    return "\n".join(lines)


def write(file: Path, new: Golden, arch: str) -> None:
    """Adds results to a file, which keeps those of other cases."""
    order = [case.id for case in calibration.cases(arch)]
    outputs = {**(calibration.load(file).outputs if file.exists() else {}), **new.outputs}
    calibration.save(file, Golden(new.about, {name: outputs[name] for name in order if name in outputs}))


def on_gpu(cases: list[Case], arch: str, options: argparse.Namespace) -> int:
    outputs, errors, device = calibration.run_all(cases, arch)
    about = {**device, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")}
    if options.write:
        write(options.write, Golden(about, calibration.collect(arch, cases, outputs)), arch)
    if options.full:
        arrays: Any = {f"{k}|{i}": x for k, v in outputs.items() for i, x in enumerate(v)}
        np.savez_compressed(options.full, **arrays)
    if options.log:
        options.log.write_text(json.dumps({"about": about, "errors": errors}, indent=1))
    print(about)
    families: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for case in cases:
        families[case.family][case.id in errors] += 1
    for family, (good, bad) in families.items():
        print(f"{family:12} {good:5} ran {bad:5} in error")
    for name, why in list(errors.items())[:60]:
        print(f"{name}: {why[:200]}")
    return bool(errors)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration", description=__doc__)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cases by name, such as 'wgmma/*'")
    parser.add_argument("--golden", type=Path, help="a GPU's results; those kept here if left out")
    parser.add_argument("--missing", action="store_true", help="only cases of which the file has no results")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpu", action="store_true", help="run on this machine's GPU")
    parser.add_argument("--write", type=Path, metavar="FILE", help="with --gpu: add the results to it")
    parser.add_argument("--full", type=Path, metavar="FILE", help="with --gpu: every output in full, as .npz")
    parser.add_argument("--log", type=Path, metavar="FILE", help="with --gpu: the errors in full, as JSON")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = [c for c in calibration.cases(options.arch) if any(fnmatch.fnmatch(c.id, name) for name in options.only)]
    if options.serve:
        from calibration.gpu import serve

        known = {c.id: c for c in cases}
        serve([known[line] for line in sys.stdin.read().splitlines()], options.arch, options.serve)
        return 0
    source = options.golden or calibration.path(options.arch)
    if options.missing:
        have = {name: fingerprint for name, (fingerprint, _) in calibration.load(source).outputs.items()}
        cases = [c for c in cases if have.get(c.id) != c.fingerprint(options.arch)]
    if options.gpu:
        return on_gpu(cases, options.arch, options)
    golden = calibration.load(source)
    rows: defaultdict[str, Row] = defaultdict(Row)
    for case in cases:
        judge(case, golden, options.arch, rows[case.family])
    if options.json:
        print(json.dumps({"about": golden.about, "families": {k: asdict(v) for k, v in rows.items()}}, indent=1))
    else:
        print(golden.about, table(rows), sep="\n")
    return any(row.wrong or row.missing for row in rows.values())


if __name__ == "__main__":
    sys.exit(main())
