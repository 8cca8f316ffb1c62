"""The ``cudnn`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import cudnn
from cudnn.cli.cache import app as _cache

app = typer.Typer(
    help="cuDNN's Graph API in pure Python: look at this machine, try real graphs on it.",
    no_args_is_help=True,
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


@app.command("info")
def _info() -> None:
    """Show GPU, driver, PyTorch and cuDNN, what is wrong with them, and what this machine can run."""
    from cudnn.cli.info import show

    show()


@app.command("demo")
def _demo(
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is one.")] = "auto",
) -> None:
    """Build and run real graphs and check each against plain PyTorch. Exit code 1 if any is wrong."""
    from cudnn.cli.demo import run

    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"got {device!r}; allowed: auto, cpu, cuda.", param_hint="--device")
    raise typer.Exit(run(device))


@app.command("bench")
def _bench(
    name: Annotated[str, typer.Argument(help="The fused API: rmsnorm_rht_amax.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the bars into this image file.")] = None,
) -> None:
    """Measure a fused API beside a device copy and torch.compile on this GPU."""
    from cudnn.bench import BENCHMARKS
    from cudnn.cli.bench import run

    if name not in BENCHMARKS:
        raise typer.BadParameter(f"got {name!r}; allowed: {', '.join(BENCHMARKS)}.", param_hint="NAME")
    raise typer.Exit(run(name, plot))


def main() -> None:
    """Runs the command line."""
    app(prog_name="cudnn")
