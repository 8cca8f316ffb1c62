"""``cudnn cache``: the compiled kernels on disk."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Compiled kernels on disk: list, clear, warm.", no_args_is_help=True)


@app.command("list")
def _list() -> None:
    """Show every compiled kernel: name, architecture, size, and what would be refused."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from cudnn.launch import cache

    found = list(cache.files())
    table = Table(box=box.SIMPLE)
    for heading in ("kernel", "arch", "KiB", "configuration"):
        table.add_column(heading, justify="right" if heading == "KiB" else "left", overflow="fold")
    for file in found:
        size = f"{file.size / 1024:.0f}"
        if file.entry is None:
            table.add_row(file.path.name, "", size, f"refused: {file.fault}")
        else:
            table.add_row(file.entry.name, file.entry.arch, size, file.entry.configuration)
    console = Console()
    console.print(f"{cache.folder()}: {len(found)} compiled kernels", soft_wrap=True)
    if found:
        console.print(table)


@app.command("clear")
def _clear() -> None:
    """Remove every compiled kernel. The next use compiles again."""
    from cudnn.launch import cache

    folder, removed = cache.folder(), cache.clear()
    typer.echo(f"{folder}: {removed} compiled kernels removed")


@app.command("warm")
def _warm(
    arch: Annotated[str, typer.Option(help="sm_90a (H100, H200) or sm_100a (B200); no such GPU is needed.")],
) -> None:
    """Compile the usual configurations of every fused API ahead of time."""
    from cudnn.launch import cache, warm

    if arch not in warm.architectures():
        allowed = ", ".join(warm.architectures())
        raise typer.BadParameter(f"got {arch!r}; allowed: {allowed}.", param_hint="--arch")
    for done, total, name in warm.warm(arch):
        typer.echo(f"{done}/{total} {name}")
    typer.echo(str(cache.folder()))
