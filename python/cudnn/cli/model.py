"""``cudnn bench --model``: what limits a fused GEMM, computed and not measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from cudnn import bench
from cudnn.bench import gemm, model
from cudnn.bench import report as reports
from cudnn.bench.sass import disassembler


def _known(show: Callable[..., None]) -> Callable[..., int]:
    """Shows a model; the exit code."""

    @functools.wraps(show)
    def shown(*arguments: Any) -> int:
        try:
            show(*arguments)
        except model.UnknownKernelError as error:
            typer.echo(str(error))
            return 1
        return 0

    return shown


@_known
def show(name: str, options: bench.Options, clock: float) -> None:
    """Prints the model of every configuration for every shape."""
    try:
        model.epilogues(name, options.dtype)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    source = "disassembled here" if disassembler() else "from the table of this release"
    typer.echo(f"{model.LABEL}: peak rates, no latencies; machine code {source}")
    for (m, n, k), label in gemm.labelled(options, model.declared(name).pairs > 1).items():
        typer.echo(f"\n{m}x{n}x{k} {label}".rstrip() + f", {options.dtype}: {model.LABEL}")
        before = ("", "")
        for candidate, arch, c in model.candidates(name, options.dtype, n, k, options.without_optional):
            machine = model.MACHINES[arch]
            if clock:
                machine = dataclasses.replace(machine, megahertz=clock)
            if (candidate, arch) != before:
                before = candidate, arch
                where = f"{machine.name} ({arch}, {machine.multiprocessors} SMs, {machine.megahertz:.0f} MHz)"
                typer.echo(f"  {candidate} on {where}")
            extra = 0.0 if candidate == model.ALONE else model.preparation_bytes(arch, options.dtype, m, n, k)
            kernel = model.kernel(arch, c)
            whole, tile = predicted(c, kernel, model.predict(machine, c, kernel, m, n, k, extra), 2.0 * m * n * k)
            typer.echo(f"    {whole}\n      {tile}")


def predicted(c: Any, kernel: model.Kernel, p: model.Prediction, flops: float) -> tuple[str, str]:
    """A prediction in words: the whole problem, then one tile of one CTA."""
    size = f"{'x'.join(map(str, c.tile))}, cluster {'x'.join(map(str, c.cluster))}" + ", ping-pong" * c.pingpong
    if kernel.accumulators:
        size += f", {kernel.accumulators} accumulator" + "s" * (kernel.accumulators > 1)
    e, cycles = kernel.facts.epilogue, p.cycles
    epilogue = {
        f"{e.instructions} instructions of a thread": cycles.issue,
        f"{e.special} special": cycles.special,
        f"{e.shared} bytes shared": cycles.shared,
        f"{e.tensor} reads of tensor memory": cycles.tensor,
    }
    return (
        f"{size}: {p.microseconds:.1f} us, {flops / p.microseconds * 1e-6:.0f} TF, {100 * p.busy:.0f} % of the tensor "
        f"cores; bound: {p.bound}; {p.rounds} rounds, {100 * p.filled:.0f} % filled",
        f"cycles of a tile: {cycles.multiply:.0f} tensor cores ({kernel.facts.run} {kernel.facts.mma} a k tile), "
        f"{cycles.load:.0f} L2 ({p.bytes / 1024:.0f} KiB by TMA), {cycles.epilogue:.0f} epilogue "
        f"({', '.join(f'{what}: {count:.0f}' for what, count in epilogue.items() if count)})",
    )


@_known
def compare(path: Path) -> None:
    """Prints the model beside what was measured."""
    try:
        found = model.compare(reports.read_csv(path))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--from-csv") from None
    for one in found:
        row, p = one.row, one.prediction
        typer.echo(
            f"{row.problem}, {row.name}: measured {row.microseconds:.1f} us at {one.megahertz:.0f} MHz; "
            f"{model.LABEL}: {p.microseconds:.1f} us, {p.microseconds / row.microseconds:.2f} of it, bound: {p.bound}"
        )
