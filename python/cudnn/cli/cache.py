"""``cudnn cache``: the compiled kernels on disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from cudnn.cli.commands import Command, Group, check_choice, option_error, sizes
from cudnn.fused.registry import compiled

if TYPE_CHECKING:
    from cudnn.fused.warm import Kernel
    from cudnn.runtime.cache import Store

_NO_CACHE = "no folder can be written to: compiled kernels are not kept; set CUDNN_KERNEL_CACHE"

app = typer.Typer(cls=Group, help="Compiled kernels on disk: list, clear, warm.", no_args_is_help=True)


@app.command("list", cls=Command)
def _list(
    full: Annotated[bool, typer.Option("--full", help="Show configurations in full.")] = False,
) -> None:
    """Show every compiled kernel: name, architecture, size, configuration, and what would be refused."""
    from cudnn.runtime import cache

    user = cache.user()
    for store in (cache.system(), cache.unwritable(), user):
        if store is not None:
            _show(store, full)
    if user is None:
        typer.echo(_NO_CACHE)


def _show(store: Store, full: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    files = list(store.files())
    table = Table(box=box.SIMPLE, expand=True)
    table.add_column("kernel", no_wrap=True)
    table.add_column("arch", no_wrap=True)
    table.add_column("KiB", justify="right", no_wrap=True)
    table.add_column("configuration", overflow="fold" if full else "ellipsis", no_wrap=not full, ratio=1)
    for file in files:
        if file.entry is not None:
            size = f"{file.size / 1024:.0f}"
            table.add_row(file.entry.name, file.entry.arch, size, Text(file.entry.configuration))
    console = Console(highlight=False)
    whose = ", the system's" if store.shared else ""
    refused = [file for file in files if file.entry is None]
    count = f"{table.row_count} compiled kernels" + (f", {len(refused)} refused" if refused else "")
    console.print(f"{store.folder}{whose}: {count}", soft_wrap=True, markup=False)
    if table.row_count:
        console.print(table)
    for file in refused:
        console.print(f"refused: {file.fault}", style="red", soft_wrap=True, markup=False)


@app.command("clear", cls=Command)
def _clear() -> None:
    """Remove every compiled kernel of this user. The next use compiles again."""
    from cudnn.runtime import cache

    store, removed = cache.user(), cache.clear()
    if store is None:
        typer.echo(_NO_CACHE)
        return
    typer.echo(f"{store.folder}: {removed} compiled kernels removed")
    for file in store.files():
        typer.echo(f"not removed: {file.fault}")


@app.command("warm", cls=Command)
def _warm(
    arch: Annotated[
        list[str],
        typer.Option(metavar="ARCH", help="sm_90a (H100, H200) or sm_100a (B200); no such GPU is needed."),
    ],
    api: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"One of {', '.join(compiled())}; default: all.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="TYPE", help="Of the operands: bf16, fp16, fp8, mxfp8 or nvfp4; default: all."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="MxNxK of a GEMM, MxN of the norm, BxHxSxDxDV of attention; default: language models'.",
        ),
    ] = None,
    system: Annotated[
        str, typer.Option(metavar="DIR", help="Into this folder, for CUDNN_SYSTEM_KERNEL_CACHE. For root alone.")
    ] = "",
    jobs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Kernels compiled at a time; each takes 0.5 GB of memory.")
    ] = 1,
) -> None:
    """Compile kernels of the fused APIs ahead of time, for example for an image: those of common calls, or as given.

    --arch, --api, --dtype and --shape may be given several times.
    """
    from cudnn.fused import warm
    from cudnn.runtime import cache

    for option, values, allowed in (("--arch", arch, warm.architectures()), ("--api", api or [], tuple(compiled()))):
        for value in values:
            check_choice(option, value, allowed)
    store = cache.system(system) if system else cache.user()
    if store is None:
        typer.echo(f"cudnn cache warm: {_NO_CACHE}", err=True)
        raise typer.Exit(1)
    if os.getuid() != store.owner:
        allowed = "root, because files of other users are refused when kernels are loaded"
        raise option_error("--system", f"user {os.getuid()}", allowed)
    try:
        shapes = [sizes(text, "sizes such as 4096x4096x4096") for text in shape or ()]
        kernels = warm.wanted(arch, api or (), dtype or (), shapes)
    except (ValueError, NotImplementedError) as error:
        raise typer.BadParameter(str(error), param_hint="--shape, --dtype") from None
    try:
        _compile(kernels, store, jobs)
    except (OSError, cache.UntrustedFileError) as error:
        typer.echo(f"cudnn cache warm: {error}", err=True)
        raise typer.Exit(1) from None


def _compile(kernels: list[Kernel], store: Store, jobs: int) -> None:
    from rich.console import Console

    from cudnn.cli import progress
    from cudnn.fused import warm

    console = Console(highlight=False)
    compiled = 0
    with progress.shown("compiling kernels", len(kernels)) as steps:
        for number, (kernel, seconds) in enumerate(warm.warm(kernels, store, jobs), start=1):
            outcome = f"{seconds:.1f} s" if seconds else "was there"
            console.print(f"{number}/{len(kernels)} {kernel.label}: {outcome}", soft_wrap=True)
            compiled += bool(seconds)
            steps.advance()
    cached = len(kernels) - compiled
    console.print(f"{store.folder}: {compiled} kernels compiled, {cached} were already there", soft_wrap=True)
