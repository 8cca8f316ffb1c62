"""Runs many cases in several processes, which may crash, and sums up what became of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from support.fuzz import FAMILIES
from support.fuzz.harness import Outcome, run

Job = tuple[str, int]
Record = dict[str, Any]
_PATIENCE = 120.0  # seconds until a case counts as hanging
_SHOWN = 20


def outcome(job: Job, device: str) -> Outcome:
    """What becomes of the case of a family and a seed, by cuDNN on a GPU, by the reference executor elsewhere."""
    family, seed = job
    return run(FAMILIES[family].draw(seed), device, "reference" if device == "cpu" else "cudnn")


def _work(connection: Connection, device: str) -> None:
    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        found = outcome(job, device)
        usable = found.status != "failed" or device == "cpu" or _gpu_answers()
        connection.send((found.record(), usable))
        if not usable:
            os._exit(1)


def _gpu_answers() -> bool:
    """Whether this process can still use its GPU: after some errors it cannot."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@dataclass
class Worker:
    """A process that runs one case after the other, and the case that it has now."""

    device: str
    job: Job | None = None
    since: float = 0.0
    process: Any = field(init=False)
    connection: Connection = field(init=False)

    def __post_init__(self) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.device), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, job: Job) -> bool:
        """Hands over a job; False where the process is gone."""
        try:
            self.connection.send(job)
        except OSError:
            return False
        self.job, self.since = job, time.monotonic()
        return True

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):  # gone already
            self.connection.send(None)

    def result(self) -> Record | None:
        """Of the job, if it is done; None while it runs."""
        assert self.job is not None
        message = f"no result after {_PATIENCE:.0f} s"
        if self.connection.poll():
            try:
                record, usable = self.connection.recv()
                if not usable:
                    self.process.join(10)
                return record
            except (EOFError, OSError):
                self.process.join(10)
                message = f"the process died (exit code {self.process.exitcode})"
        elif time.monotonic() - self.since < _PATIENCE:
            return None
        self.process.kill()
        family, seed = self.job
        return {
            "family": family, "seed": seed, "status": "crashed", "reason": message, "message": message, "plan": "",
            "seconds": round(time.monotonic() - self.since, 3), "size": FAMILIES[family].draw(seed).size,
        }  # fmt: skip


def sweep(jobs: Sequence[Job], device: str, processes: int) -> Iterator[Record]:
    """Records of all jobs, as they are done."""
    waiting = list(reversed(jobs))
    workers: list[Worker] = []
    while waiting or any(worker.job for worker in workers):
        workers = [worker for worker in workers if worker.job or worker.process.is_alive()]
        while len(workers) < min(processes, len(waiting) + sum(worker.job is not None for worker in workers)):
            workers.append(Worker(device))
        for worker in workers:
            if waiting and worker.job is None and worker.give(waiting[-1]):
                waiting.pop()
        wait([worker.connection for worker in workers if worker.job], timeout=1)
        for worker in workers:
            record = worker.result() if worker.job else None
            if record is not None:
                worker.job = None
                yield record
    for worker in workers:
        worker.dismiss()


def summary(records: Sequence[Record]) -> list[Record]:
    """Counts by family, refusals and failures grouped by reason, and the smallest cases that fail."""
    lines: list[Record] = []
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for family in FAMILIES:
        mine = [record for record in records if record["family"] == family]
        if not mine:
            continue
        counts = Counter(record["status"] for record in mine)
        refused, most = counts["refused"] / len(mine), FAMILIES[family].most_refused
        lines.append(
            {"kind": "family", "family": family, "cases": len(mine), **counts, "refused_share": round(refused, 4),
             "allowed_share": most, "seconds": round(sum(record["seconds"] for record in mine), 1),
             "ok": refused <= most and not counts["failed"] and not counts["crashed"]}
        )  # fmt: skip
        for record in mine:
            if record["status"] != "passed":
                groups[family, record["status"], record["reason"]].append(record["seed"])
    for (family, status, reason), seeds in sorted(groups.items(), key=lambda item: -len(item[1])):
        lines.append({"kind": status, "family": family, "count": len(seeds), "reason": reason, "seeds": seeds[:8]})
    failures = [record for record in records if record["status"] in ("failed", "crashed")]
    for record in sorted(failures, key=lambda record: record["size"])[:_SHOWN]:
        case = FAMILIES[record["family"]].draw(record["seed"])
        lines.append({"kind": "case", **record, "case": json.loads(case.json())})
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: exit status 1 where a case failed, or a family was refused too often."""
    parser = argparse.ArgumentParser(description="Random graphs against formulas of PyTorch.")
    parser.add_argument("family", nargs="*", help=f"{', '.join(FAMILIES)}; all where none is named")
    parser.add_argument("--seed", type=int, help="this case alone, with all that is known of it")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, help="cases of each family; by default as many as a full run has")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the reference executor")
    parser.add_argument("--report", type=Path, help="a file for the summary, in JSON lines")
    parser.add_argument("--records", type=Path, help="a file for a JSON line about each case, as it is done")
    options = parser.parse_args(arguments)
    families = options.family or [*FAMILIES]
    unknown = sorted({*families} - {*FAMILIES})
    if unknown:
        parser.error(f"family: got {', '.join(unknown)}; allowed: {', '.join(FAMILIES)}")
    if options.seed is not None:
        records = []
        for family in families:
            found = outcome((family, options.seed), options.device)
            print(found.case.json(), json.dumps(found.record()), sep="\n")
            records.append(found.record())
    else:
        start = time.monotonic()
        ranges = [
            [(f, options.start + i) for i in range(FAMILIES[f].full if options.count is None else options.count)]
            for f in families
        ]
        records = []
        with options.records.open("w") if options.records else contextlib.nullcontext() as lines_of_cases:
            for record in sweep([job for jobs in ranges for job in jobs], options.device, options.processes):
                records.append(record)
                if lines_of_cases:
                    print(json.dumps(record), file=lines_of_cases, flush=True)
        print(f"{len(records)} cases in {time.monotonic() - start:.1f} s")
        for line in summary(records):
            print(json.dumps({key: value for key, value in line.items() if key != "case"})[:400])
    lines = summary(records)
    if options.report:
        options.report.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return 0 if all(line["ok"] for line in lines if line["kind"] == "family") else 1


if __name__ == "__main__":
    sys.exit(main())
