"""The ``cudnn`` command."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

import cudnn
from cudnn.cli.bench import main as _bench
from cudnn.cli.cache import app as _cache
from cudnn.cli.commands import Command, Group, check_choice, option_error, sizes
from cudnn.cli.explain import main as _explain
from cudnn.demo_cases import PROGRAMS

app = typer.Typer(
    cls=Group,
    help="cuDNN's Graph API in pure Python: look at this machine, try real graphs on it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every command below too
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(_cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cudnn-fused {cudnn.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command("info", cls=Command)
def _info() -> None:
    """Show GPU, driver, PyTorch and cuDNN, what is wrong with them, and what this machine can run."""
    from cudnn.cli.info import show

    show()


@app.command("demo", cls=Command)
def _demo(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto (cuda if there is a GPU).")] = "auto",
) -> None:
    """Build and run real graphs and check each against plain PyTorch. Exit code 1 if any is wrong."""
    from cudnn.cli.demo import run

    check_choice("--device", device, ("auto", "cpu", "cuda"))
    raise typer.Exit(run(device))


app.command("bench", cls=Command)(_bench)
app.command("explain", cls=Command)(_explain)


class _ScriptCommand(Command):
    """Arguments after a Python script on the command line belong to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        script = next((index for index, text in enumerate(args) if text.endswith(".py")), len(args))
        return super().parse_args(ctx, [*args[:script], "--", *args[script:]])


@app.command("emulate", cls=_ScriptCommand)
def _emulate(
    target: Annotated[str, typer.Argument(help=f"A fused API ({', '.join(PROGRAMS)}), or a Python script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    arch: Annotated[str, typer.Option(help="sm_90a (Hopper) or sm_100a (Blackwell).")] = "sm_100a",
    races: Annotated[bool, typer.Option(help="Look for data races; two to five times slower.")] = True,
    scheduler: Annotated[str, typer.Option(help="lowest-pc, random or lazy.")] = "lowest-pc",
    seed: Annotated[int, typer.Option(help="Seed of the random tensors and schedulers.")] = 0,
    load_waits: Annotated[bool, typer.Option(hidden=True, help="--no-load-waits: --warn PE105.")] = True,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Leave out findings with this code; may be repeated.")
    ] = None,
    warn: Annotated[
        list[str] | None, typer.Option(metavar="CODE", help="Findings with this code are warnings; may be repeated.")
    ] = None,
    cuda: Annotated[
        bool, typer.Option("--cuda", help='Scripts for device="cuda" run: CPU tensors, and answers of the chip.')
    ] = False,
    shape: Annotated[str, typer.Option(help="Size of the fused API's problem, such as 16x512.")] = "",
    json: Annotated[str, typer.Option(metavar="FILE", help="Also write the report as JSON; -: to stdout.")] = "",
    timeline: Annotated[
        str, typer.Option(metavar="FILE", help="Draw what the warps of block (0, 0, 0) did, as SVG.")
    ] = "",
    ptx: Annotated[bool, typer.Option("--ptx", help="Print the PTX of the kernels that ran.")] = False,
) -> None:
    """Run a fused API or a script of CuTe DSL kernels without a GPU; show what the kernels did.

    Options go before a script; what follows the script is passed to it. Exit code 1 after a fault, a race or a wrong
    result.
    """
    from cudnn import demo_cases
    from cudnn.cli import emulate
    from cudnn.fused.warm import architectures
    from ptx_emulator.findings import CONTINUES
    from ptx_emulator.machine import SCHEDULERS

    check_choice("--arch", arch, architectures())
    check_choice("--scheduler", scheduler, SCHEDULERS)
    for option, codes in (("--ignore", ignore), ("--warn", warn)):
        for code in codes or ():
            check_choice(option, code, CONTINUES)
    if not load_waits:
        warnings.warn("--no-load-waits is deprecated: use --warn PE105", DeprecationWarning, stacklevel=1)
        warn = [*(warn or ()), "PE105"]
    is_script = target.endswith(".py")
    if is_script and not Path(target).is_file():
        raise option_error("TARGET", repr(target), "a file that exists")
    if not is_script:
        check_choice("TARGET", target, (*PROGRAMS, "or a script (*.py), for everything else"))
    if is_script and shape:
        raise option_error("--shape", repr(shape), "only with a fused API")
    if not is_script and arguments:
        raise option_error("ARGUMENTS", repr(" ".join(arguments)), "only with a script")
    problem = _problem(shape, demo_cases.find(target).dimensions) if shape else None
    options = emulate.Options(
        arch, races, scheduler, seed, tuple(ignore or ()), tuple(warn or ()), cuda, (0, 0, 0) if timeline else None
    )
    raise typer.Exit(emulate.run(target, arguments or (), options, problem, json, ptx, timeline))


@app.command("selftest", cls=Command)
def _selftest(
    arch: Annotated[str, typer.Option(help="sm_90a (Hopper) or sm_100a (Blackwell).")],
    emulate: Annotated[bool, typer.Option("--emulate", help="In the emulator, with no GPU.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every variant of the GEMMs, not a sample.")] = False,
    json: Annotated[str, typer.Option(metavar="FILE", help="Also write the report as JSON.")] = "",
) -> None:
    """Try the fused GEMMs on this GPU and print a report to send. Exit code 1 if anything is wrong."""
    from cudnn.cli import selftest
    from cudnn.fused.warm import architectures
    from cudnn.lazy import torch
    from cudnn.runtime.launch import device_architecture

    check_choice("--arch", arch, architectures())
    if not emulate:
        here = device_architecture(0) if torch.cuda.is_available() else "no GPU"
        if here != arch:
            raise typer.BadParameter(f"got {arch!r}; here: {here}. To fix it, add --emulate.", param_hint="--arch")
    raise typer.Exit(selftest.run(arch, emulate, full, json))


def _problem(text: str, dimensions: tuple[str, ...]) -> tuple[int, ...]:
    count = len(dimensions)
    return sizes(text, f"{' x '.join(dimensions)} such as {'x'.join(['512'] * count)}", count)


def main() -> None:
    """Runs the command line."""
    app(prog_name="cudnn")
