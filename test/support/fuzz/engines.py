"""Runs products with unaligned rows on every engine that cuDNN offers, each in a process that may die.

``PYTHONPATH=test:python:kernels python -m support.fuzz.engines --seconds 270 --processes 14 --report explore.jsonl``
writes a line for each engine tried, and prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import cudnn
from cudnn.datatypes import _cudnn_to_torch_data_type
from cudnn.enums import heur_mode
from support.fuzz.harness import new_graph, run
from support.fuzz.unaligned import UnalignedMatmulCase, natural_alignment

Record = dict[str, Any]
# "heuristics" and an index, or "engine" and its number; the alignment that is declared: 16 bytes, as each tensor's rows
# have it (natural), as those of any tensor (lowest), or 16 with a gap after each row that makes it true (padded).
Try = tuple[str, int, str]
_MODES = [heur_mode.A, heur_mode.FALLBACK]
_PATIENCE = 90.0
_BACKEND = {"cuda": "cudnn", "cpu": "reference"}


def _planned(graph: cudnn.pygraph, tensors: Sequence[cudnn.tensor], declared: str) -> None:
    """Up to the heuristics, with the alignment that is declared for the tensors: 16, or what their rows have."""
    graph.validate()
    if declared in ("natural", "lowest"):
        types = [_cudnn_to_torch_data_type(tensor.get_data_type()) for tensor in tensors]
        found = [natural_alignment(tensor, dtype) for tensor, dtype in zip(tensors, types, strict=True)]
        for tensor, dtype, own in zip(tensors, types, found, strict=True):
            tensor.set_alignment(own if declared == "natural" else max(min(found), dtype.itemsize))
    graph.build_operation_graph()
    graph.create_execution_plans(_MODES)


def candidates(case: UnalignedMatmulCase, device: str, all_engines: bool) -> list[tuple[Try, str]]:
    """Configurations of the heuristics, and of the engines that these leave out with their default knobs."""
    graph, _, _ = new_graph(case, backend=_BACKEND[device])
    try:
        _planned(graph, [], "16")
    except cudnn.cudnnGraphNotSupportedError:
        return []
    tags = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
    found: list[tuple[Try, str]] = []
    for index, tag in enumerate(tags):
        if tag not in tags[:index]:
            found.append((("heuristics", index, "16"), tag))
    if all_engines and device == "cuda" and case.seed % 4 == 0:
        known = {int(tag.removeprefix("eng").split("_")[0]) for tag in tags}
        found += [(("engine", i, "16"), f"eng{i}") for i in range(graph.get_engine_count()) if i not in known]
    return found


def attempt(case: UnalignedMatmulCase, way: Try, tag: str, device: str) -> Record:
    """Runs the case on one configuration."""
    source, number, declared = way
    case = case.padded() if declared == "padded" else case
    notes: dict[str, Any] = {"notes": [], "workspace": 0, "build_s": 0.0}

    def build(graph: cudnn.pygraph) -> None:
        start = time.perf_counter()
        nodes = {id(t): t for node in graph.nodes for t in node.tensors()}.values()
        index = number
        try:
            _planned(graph, [t for t in nodes if not t.get_is_virtual() and not t.get_is_pass_by_value()], declared)
            tags = [graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())]
            if source == "heuristics" and tag in tags:  # the order depends on strides and alignment
                index = tags.index(tag)
            if source == "engine":
                graph.create_execution_plan(number, {})
                index = graph.get_execution_plan_count() - 1
            graph.build_plan_at_index(index)
        except RuntimeError as error:
            raise cudnn.cudnnGraphNotSupportedError(str(error)) from error
        notes["notes"] = [note.name for note in graph.get_behavior_notes_for_plan_at_index(index)]
        notes["workspace"] = graph.get_workspace_size_plan_at_index(index)
        notes["build_s"] = round(time.perf_counter() - start, 3)

    found = run(case, device, _BACKEND[device], build)
    status = {"passed": "right", "refused": "refused"}.get(found.status, "wrong")
    return {"status": status, "message": found.message[:400], "plan": found.plan,
            "seconds": round(found.seconds, 3), **notes}  # fmt: skip


def _gpu_answers() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _work(connection: Connection, device: str, all_engines: bool) -> None:
    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        seed, todo = job
        case = UnalignedMatmulCase.draw(seed)
        if todo is None:
            connection.send(("list", candidates(case, device, all_engines)))
            continue
        way, tag = todo
        record = attempt(case, way, tag, device)
        usable = record["status"] != "wrong" or device == "cpu" or _gpu_answers()
        if not usable:
            record["status"] = "died"
        if not record["plan"]:
            record["plan"] = tag
        connection.send(("done", record))
        if not usable:
            os._exit(1)


class _Worker:
    """A process and the problem that it works on: which configurations are left."""

    def __init__(self, device: str, all_engines: bool) -> None:
        context = mp.get_context("spawn")
        self.options = device, all_engines
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *self.options), daemon=True)
        self.process.start()
        theirs.close()
        self.since = time.monotonic()

    def give(self, job: Any) -> None:
        self.since = time.monotonic()
        with contextlib.suppress(OSError):  # a dead process shows when its answer is read
            self.connection.send(job)

    def answer(self) -> Any:
        """A message, None while there is none, or why there will be none."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return ("dead", f"the process died (exit code {self.process.exitcode})")
        if time.monotonic() - self.since > _PATIENCE:
            self.process.kill()
            return ("dead", f"no result after {_PATIENCE:.0f} s")
        return None


class _Slot:
    """Brings one problem after the other through its tries, in a process that is replaced when it dies."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.worker = _Worker(options.device, options.all_engines)
        self.seed: int | None = None
        self.left: list[tuple[Try, str]] = []
        self.now: tuple[Try, str] | None = None

    def start(self, seed: int) -> None:
        self.seed, self.left, self.now = seed, [], None
        self.worker.give((seed, None))

    def step(self) -> Record | None:
        """Takes what the process says; gives it the next try. Returns a record, if there is one."""
        if self.seed is None or (said := self.worker.answer()) is None:
            return None
        kind, content = said
        record: Record | None = None
        if kind == "list":
            self.left = list(content)
            if not content:
                record = {"status": "refused", "plan": "", "message": "no configuration", "notes": []}
        elif kind == "done":
            record = content
        else:
            record = {"status": "died", "message": content, "notes": [], "plan": self.now[1] if self.now else ""}
        if kind == "dead" or (record and record["status"] == "died"):
            self.worker.process.join(10)
            self.worker = _Worker(self.options.device, self.options.all_engines)
        if record is not None:
            way = self.now[0] if self.now else None
            record = {"seed": self.seed, "way": way, **record}
            # What goes wrong as it stands is tried with the alignment that the rows have, and with other rows.
            if way and way[2] == "16" and record["status"] in ("wrong", "died") and self.now:
                self.left[:0] = [((*way[:2], declared), self.now[1]) for declared in ("natural", "lowest", "padded")]
        self._next()
        return record

    def _next(self) -> None:
        if self.left:
            self.now = self.left.pop(0)
            self.worker.give((self.seed, self.now))
        else:
            self.seed = None


def explore(options: argparse.Namespace) -> list[Record]:
    """All records, written to the report as they come."""
    start = time.monotonic()
    slots = [_Slot(options) for _ in range(options.processes)]
    seeds = iter(range(options.start, options.start + options.count))
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(options.report.open("w")) if options.report else None
        while True:
            over = time.monotonic() - start > options.seconds
            for slot in slots:
                if slot.seed is None and not over and (seed := next(seeds, None)) is not None:
                    slot.start(seed)
            busy = [slot for slot in slots if slot.seed is not None]
            if not busy or time.monotonic() - start > options.seconds + 15:
                break
            wait([slot.worker.connection for slot in busy], timeout=1)
            for slot in busy:
                record = slot.step()
                if record is not None:
                    record["facts"] = UnalignedMatmulCase.draw(record["seed"]).alignment()
                    record["after"] = [i.op for i in UnalignedMatmulCase.draw(record["seed"]).after.instructions]
                    records.append(record)
                    if report:
                        report.write(json.dumps(record) + "\n")
                        report.flush()
    for slot in slots:
        slot.worker.process.kill()
    print(f"{len({r['seed'] for r in records})} problems, {len(records)} tries in {time.monotonic() - start:.1f} s")
    return records


def table(records: Sequence[Record]) -> None:
    """Counts by configuration, declared alignment, and what the rows of A, B and C have."""
    groups: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for record in records:
        facts = record["facts"]
        declared = record["way"][2] if record["way"] else ""
        engine = record["plan"].split("_")[0] or "none"
        types = facts["A"]["type"], facts["B"]["type"]
        rows = tuple(facts[name]["natural"] for name in "ABC")
        for key in ((engine, declared), (engine, declared, *types), (engine, declared, *types, *rows)):
            groups[key][record["status"]] += 1
    for key, counts in sorted(groups.items(), key=lambda item: (len(item[0]), str(item)))[:300]:
        if len(key) < 4 or counts["wrong"] or counts["died"]:
            print(*key, dict(counts))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=10_000, help="problems, unless the time is over before")
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--all-engines", action="store_true", help="for one problem in four, those that heuristics leave out too"
    )
    parser.add_argument("--report", type=Path)
    records = explore(parser.parse_args(arguments))
    table(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
